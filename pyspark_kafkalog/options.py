"""The options of the `kafkalog` format, declared once: parsing, errors and README's table are made from `OPTIONS`.
Text to typed values; pure.

Names and meanings are those of Spark's Kafka connector. Spark hands option names over in lower case, so they are
compared that way and named in errors as the docs spell them. `kafkalog.` in front of a client setting passes it on
(`kafkalog.compression.type`); `kafka.` does the same for settings that bear the same name here, so that a job written
for Kafka needs no new ones: what the Kafka connector refuses is refused, what is unknown here is warned of.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kafkalog.config import Table, nearest_hint
from kafkalog.errors import InvalidArgument, InvalidSetting
from kafkalog.log import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.committed import default_group, parse_fallback, parse_group
from pyspark_kafkalog.offsets import COMMITTED, EARLIEST, LATEST, Position, parse_assignment, parse_position

log = get_logger(__name__)

BATCH_READ = "batch read"
STREAM_READ = "stream read"
BATCH_WRITE = "batch write"
STREAM_WRITE = "stream write"
READ = (BATCH_READ, STREAM_READ)
WRITE = (BATCH_WRITE, STREAM_WRITE)


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented; case does not matter.
        type: what its text holds, as the docs say it.
        default: as the docs say it.
        used_by: the uses that it applies to; others ignore it.
        parse: typed value of (name, text); raises InvalidArgument.
        why: one sentence.
    """

    name: str
    type: str
    default: str
    used_by: tuple[str, ...]
    parse: Callable[[str, str], Any]
    why: str


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidArgument(reason=f"the option {name} is empty")
    return text.strip()


def _addresses(name: str, text: str) -> str:
    from kafkalog.client.config import parse_bootstrap

    try:
        parse_bootstrap(_text(name, text))
    except InvalidSetting as error:
        raise InvalidArgument(reason=f"{name}='{text}' is not valid: {error.facts['reason']}") from None
    return ",".join(address.strip() for address in text.split(","))


def _truth(name: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise InvalidArgument(reason=f"{name}='{text}' is not valid: it must be true or false")
    return text.strip().lower() == "true"


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidArgument(reason=f"{name}='{text}' is not valid: it must be a whole number of at least 1")
    return int(text)


def _topics(name: str, text: str) -> tuple[str, ...]:
    topics = {topic.strip() for topic in text.split(",") if topic.strip()}
    if not topics:
        raise InvalidArgument(reason=f"{name}='{text}' names no topic")
    return tuple(sorted(topics))


def _pattern(name: str, text: str) -> str:
    try:
        re.compile(_text(name, text))
    except re.error as error:
        raise InvalidArgument(reason=f"{name}='{text}' is no regular expression: {error}") from None
    return text


def _start(name: str, text: str) -> Position:
    return COMMITTED if text.strip().lower() == "committed" else parse_position(name, text)


OPTIONS = (
    Option("kafkalog.bootstrap.servers", "host:port,...", "required", READ + WRITE, _addresses,
           "Any brokers of the cluster, by their gRPC ports; the others are found from them. "
           "`kafka.bootstrap.servers` is another name for it."),
    Option("subscribe", "topic,topic", "one of these three", READ, _topics, "Topics to read, every partition."),
    Option("subscribePattern", "regular expression", "one of these three", READ, _pattern,
           "Reads the topics in whose name it is found anywhere (write `^flights$` for just one); "
           "a stream picks up topics created later."),
    Option("assign", '`{"topic": [0, 1]}`', "one of these three", READ, lambda _, text: parse_assignment(text),
           "Partitions to read."),
    Option("startingOffsets", "earliest, latest, committed or JSON", "batch: earliest, stream: latest", READ, _start,
           'Where to start; in JSON an offset for every partition, `{"topic": {"0": 23, "1": -2}}`, with -2 for '
           "earliest and -1 for latest. `committed` is where the read's group is in each partition. Of a stream it counts only when its checkpoint is new; a batch can not start at "
           "latest."),
    Option("kafkalog.group.id", "name", "from what is read", READ, parse_group,
           "The group under which a stream publishes its position, and from which `startingOffsets=committed` takes "
           "its start; `kafka.group.id` is another name for it. `subscribe` of one topic: `spark-TOPIC`; other reads: "
           "their topics or pattern behind `spark-`, with a checksum."),
    Option("committed.fallback", "error, earliest or latest", "error", READ, parse_fallback,
           "Where `startingOffsets=committed` starts in a partition for which the group has committed nothing, or an "
           "offset that the log has no longer; `kafkalog.committed.fallback` is another name for it."),
    Option("endingOffsets", "latest or JSON", "latest", (BATCH_READ,), parse_position,
           "Where a batch ends: the offset after the last record's. Earliest and latest of a batch are looked up anew "
           "each time that the DataFrame is run."),
    Option("includeHeaders", "true or false", "false", READ, _truth, "Adds the column `headers`."),
    Option("maxOffsetsPerTrigger", "whole number", "no limit", (STREAM_READ,), _count,
           "Records of one micro-batch, shared out over the partitions in proportion to what each has left."),
    Option("topic", "topic", "column `topic`", WRITE, _text,
           "Topic that every row goes to, whatever its column `topic` says."),
)  # fmt: skip

BOOTSTRAP = "kafkalog.bootstrap.servers"
_OTHER_NAMES = {
    "kafka.bootstrap.servers": BOOTSTRAP,
    "kafka.group.id": "kafkalog.group.id",
    "kafkalog.committed.fallback": "committed.fallback",
    "kafka.committed.fallback": "committed.fallback",
}
"""Second names of options."""
_SELECTIONS = ("subscribe", "subscribePattern", "assign")
_BY_KEY = {option.name.lower(): option for option in OPTIONS}

_SPARKS_OWN = frozenset(
    ["path", "paths", "checkpointlocation", "queryname", "asyncprogresstrackingenabled",
     "asyncprogresstrackingcheckpointintervalms", "_asyncprogresstrackingoverridesinksupportcheck"]
)  # fmt: skip
"""What Spark puts among the options, or reads from them itself."""

_REFUSED = {
    "auto.offset.reset": "set startingOffsets instead",
    "enable.auto.commit": "a stream's position is in its checkpoint",
    "key.deserializer": "keys are read as bytes; cast or decode the column",
    "value.deserializer": "values are read as bytes; cast or decode the column",
    "key.serializer": "keys are written as the bytes of the column",
    "value.serializer": "values are written as the bytes of the column",
    "interceptor.classes": "there are no interceptors",
}
"""What the Kafka connector refuses, and what would have no effect on a read whose every offset is told."""


@dataclass(frozen=True)
class Selection:
    """Which partitions are read: the option's name and its parsed value."""

    option: str
    value: Any

    def matches(self, topic: str) -> bool:
        """Whether subscribePattern finds a topic."""
        assert self.option == "subscribePattern"
        return re.search(self.value, topic) is not None

    def topics(self) -> tuple[str, ...]:
        """The topics that subscribe or assign name."""
        assert self.option != "subscribePattern"
        if self.option == "subscribe":
            return self.value
        return tuple(sorted({partition.topic for partition in self.value}))

    def words(self) -> str:
        """What is read, for a person's eyes."""
        value = self.value if isinstance(self.value, str) else ", ".join(str(each) for each in self.value)
        return f"{self.option} {value}"

    def takes(self, partition: TopicPartition) -> bool:
        """Whether a partition of one of its topics is read."""
        return self.option != "assign" or partition in self.value


@dataclass(frozen=True)
class SourceOptions:
    """What a read was asked for. Positions are None where nothing was given: the default depends on batch or stream."""

    bootstrap_servers: str
    client: dict[str, str]
    selection: Selection
    starting: Position | None
    ending: Position | None
    include_headers: bool
    max_offsets_per_trigger: int | None
    group: str
    committed_fallback: str

    def batch_positions(self) -> tuple[Position, Position]:
        """Start and end of a batch read."""
        starting = EARLIEST if self.starting is None else self.starting
        return starting, LATEST if self.ending is None else self.ending

    def stream_start(self) -> Position:
        """Start of a stream whose checkpoint is new."""
        return LATEST if self.starting is None else self.starting


@dataclass(frozen=True)
class SinkOptions:
    """What a write was asked for. `topic` is None where the rows tell theirs."""

    bootstrap_servers: str
    client: dict[str, str]
    topic: str | None


def parse_source(options: Mapping[str, str]) -> SourceOptions:
    """The options of a read, those of batch and stream alike. Raises InvalidArgument."""
    from kafkalog.client.config import CONSUMER_SETTINGS

    values = _values(options, READ)
    client = _client_settings(options, CONSUMER_SETTINGS)
    CONSUMER_SETTINGS.parse(client)
    chosen = [name for name in _SELECTIONS if name in values]
    if len(chosen) != 1:
        number = "only one" if chosen else "one"
        raise InvalidArgument(reason=f"a read needs {number} of the options {', '.join(chosen or _SELECTIONS)}")
    return SourceOptions(
        bootstrap_servers=_bootstrap(values),
        client=client,
        selection=Selection(chosen[0], values[chosen[0]]),
        starting=values.get("startingOffsets"),
        ending=values.get("endingOffsets"),
        include_headers=values.get("includeHeaders", False),
        max_offsets_per_trigger=values.get("maxOffsetsPerTrigger"),
        group=values.get("kafkalog.group.id") or default_group(chosen[0], values[chosen[0]]),
        committed_fallback=values.get("committed.fallback", "error"),
    )


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    """The options of a write. Raises InvalidArgument."""
    from kafkalog.client.config import PRODUCER_SETTINGS, parse_producer

    values = _values(options, WRITE)
    client = _client_settings(options, PRODUCER_SETTINGS)
    parse_producer(client)
    return SinkOptions(_bootstrap(values), client, values.get("topic"))


def check_names(options: Mapping[str, str]) -> None:
    """Refuse names that are neither the format's, nor a client setting's, nor Spark's own. Raises InvalidArgument."""
    for name in _lowered(options):
        prefix, _, setting = name.partition(".")
        if name in _BY_KEY or name in _SPARKS_OWN or name.startswith("spark.") or name in _OTHER_NAMES:
            continue
        if prefix in ("kafkalog", "kafka") and setting in _REFUSED:
            raise InvalidArgument(reason=f"the option {name} is not supported: {_REFUSED[setting]}")
        if prefix == "kafkalog":
            if setting not in _client_setting_names():
                hint = nearest_hint(setting, _client_setting_names()).replace("'", "'kafkalog.", 1)
                raise InvalidArgument(reason=f"there is no client setting '{name}'{hint}")
        elif prefix == "kafka":
            if setting not in _client_setting_names():
                log.warning("kafka_option_ignored", option=name)
        else:
            hint = nearest_hint(name, _BY_KEY)
            for key, option in _BY_KEY.items():
                hint = hint.replace(f"'{key}'", f"'{option.name}'")
            raise InvalidArgument(reason=f"the format kafkalog has no option '{name}'{hint}")


def _client_settings(options: Mapping[str, str], table: Table) -> dict[str, str]:
    """Those client settings among the options that a table has, by dotted name; `kafkalog.` beats `kafka.`.

    A job may carry the producer's and the consumer's together: the others are left out. Their values are not checked.
    """
    found: dict[str, str] = {}
    for prefix in ("kafka.", "kafkalog."):
        for name, value in _lowered(options).items():
            if name.startswith(prefix) and name.removeprefix(prefix) in table:
                found[name.removeprefix(prefix)] = value
    return found


@functools.cache
def _client_setting_names() -> frozenset[str]:
    from kafkalog.client.config import CLIENT_SETTINGS, CONSUMER_SETTINGS, PRODUCER_SETTINGS

    tables = (CLIENT_SETTINGS, CONSUMER_SETTINGS, PRODUCER_SETTINGS)
    return frozenset(setting.name for table in tables for setting in table) - _REFUSED.keys()


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _values(options: Mapping[str, str], uses: tuple[str, ...]) -> dict[str, Any]:
    """Parsed values, by documented name, of the options given that apply to one of the uses."""
    given = _lowered(options)
    for other, name in _OTHER_NAMES.items():
        if other in given and given.setdefault(name, given[other]) != given[other]:
            raise InvalidArgument(
                reason=f"{name} ({given[name]}) and {other} ({given[other]}) differ: two names of one option"
            )
    return {
        option.name: option.parse(option.name, given[key])
        for key, option in _BY_KEY.items()
        if key in given and not set(uses).isdisjoint(option.used_by)
    }


def _bootstrap(values: Mapping[str, Any]) -> str:
    if BOOTSTRAP not in values:
        raise InvalidArgument(reason=f"the option {BOOTSTRAP} is missing: host:port of a broker")
    return values[BOOTSTRAP]


def markdown() -> str:
    """README's table of the options."""
    return "\n".join(_markdown_rows()) + "\n"


def _markdown_rows() -> Iterator[str]:
    yield "| option | value | default | used by | what it does |"
    yield "| --- | --- | --- | --- | --- |"
    for option in OPTIONS:
        uses = {READ + WRITE: "all", READ: "read", WRITE: "write"}.get(option.used_by, ", ".join(option.used_by))
        yield f"| `{option.name}` | {option.type} | {option.default} | {uses} | {option.why} |"
