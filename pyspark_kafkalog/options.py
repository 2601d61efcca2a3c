"""The options of the `kafkalog` format, declared once: parsing, errors and the table of the documents are made from
`OPTIONS`. Text to typed values; pure.

Names and meanings are those of Spark's Kafka connector. Spark hands option names over in lower case, so they are
compared that way and named in errors as the docs spell them. `kafkalog.` in front of a client setting passes it on
(`kafkalog.compression.type`); `kafka.` does the same for settings that bear the same name here, so that a job written
for Kafka needs no new ones: what the Kafka connector refuses is refused, what is unknown here is warned of.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kafkalog.config import Settings, nearest_hint
from kafkalog.errors import InvalidArgument, InvalidSetting
from kafkalog.events import get_logger
from kafkalog.zk.paths import is_valid_name
from pyspark_kafkalog.offsets import COMMITTED, SYMBOLS, Position, parse_assignment, parse_position, parse_timestamps
from pyspark_kafkalog.times import parse_span_s, parse_timestamp

log = get_logger(__name__)

BATCH_READ = "batch read"
STREAM_READ = "stream read"
BATCH_WRITE = "batch write"
STREAM_WRITE = "stream write"
SAME = "the same"
OURS = "not there"
READ = (BATCH_READ, STREAM_READ)
WRITE = (BATCH_WRITE, STREAM_WRITE)

EXACTLY_ONCE = "exactly-once"
AT_LEAST_ONCE = "at-least-once"


class Unset(NamedTuple):
    """In place of a default: what it means that an option is not given, where no value of the option says it."""

    meaning: str


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented; case does not matter.
        type: of its text, as in the docs.
        default: as a user would write it, or by use where that makes a difference. Nothing else states it: the typed
            default is what `parse` makes of it.
        used_by: the uses that it applies to; others ignore it.
        parse: typed value of (name, text); raises InvalidArgument.
        why: one sentence.
        kafka: how it compares with the option of that name of Spark's Kafka connector; `SAME`, `OURS`, or in words.
    """

    name: str
    type: str
    default: str | Mapping[str, str] | Unset
    used_by: tuple[str, ...]
    parse: Callable[[str, str], Any]
    why: str
    kafka: str = SAME

    def default_value(self, use: str = "") -> Any:
        """The typed default; None if there is none, or if it depends on the use and none is named."""
        if isinstance(self.default, Unset):
            return None
        text = self.default if isinstance(self.default, str) else self.default.get(use)
        return None if text is None else self.parse(self.name, text)

    def default_text(self) -> str:
        """The default, as in the docs."""
        if isinstance(self.default, Unset):
            return self.default.meaning
        if isinstance(self.default, str):
            return self.default
        return ", ".join(f"{use.split()[0]}: {text}" for use, text in self.default.items())


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidArgument(reason=f"the option {name} is empty")
    return text.strip()


def _path(name: str, text: str) -> str:
    _text(name, text)
    return text


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


def _milliseconds(name: str, text: str) -> int:
    if not text.strip().isdecimal() or not 0 < int(text) < 1 << 31:
        raise InvalidArgument(reason=f"{name}='{text}' is not valid: it must be a number of milliseconds, at least 1")
    return int(text)


def _pause(name: str, text: str) -> int:
    return 0 if text.strip() == "0" else _milliseconds(name, text)


def _word(*words: str) -> Callable[[str, str], str]:
    allowed = f"{', '.join(words[:-1])} or {words[-1]}"

    def parse(name: str, text: str) -> str:
        if text.strip().lower() not in words:
            raise InvalidArgument(reason=f"{name}='{text}' is not valid: it must be {allowed}")
        return text.strip().lower()

    return parse


def _columns(name: str, text: str) -> tuple[str, ...]:
    columns = tuple(column.strip() for column in text.split(",") if column.strip())
    if not columns:
        raise InvalidArgument(reason=f"{name}='{text}' names no column")
    return columns


def _version(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) >= 1 << 63:
        raise InvalidArgument(
            reason=f"{name}='{text}' is not valid: it must be a whole number of at least 0, such as the batch id that "
            "foreachBatch passes"
        )
    return int(text)


def _topics(name: str, text: str) -> tuple[str, ...]:
    topics = {topic.strip() for topic in text.split(",") if topic.strip()}
    if not topics:
        raise InvalidArgument(reason=f"{name}='{text}' names no topic")
    return tuple(sorted(topics))


def _pattern(name: str, text: str) -> str:
    pattern = _text(name, text)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(reason=f"{name}='{text}' is not a regular expression: {error}") from None
    return pattern


def _group(name: str, text: str) -> str:
    """The value of the option that names a group. Raises InvalidArgument."""
    if not is_valid_name(text.strip()):
        raise InvalidArgument(
            reason=f"{name}='{text}' is not valid: use 1 to 249 of the characters a-z A-Z 0-9 . _ - but not '.' or '..'"
        )
    return text.strip()


def _start(name: str, text: str) -> Position:
    return parse_position(name, text, {**SYMBOLS, "committed": COMMITTED})


OPTIONS = (
    Option("kafkalog.bootstrap.servers", "host:port,...", Unset("required"), READ + WRITE, _addresses,
           "Addresses of any brokers of the cluster, with their gRPC ports. The client finds the others from them. "
           "`kafka.bootstrap.servers` is another name for it.", "`kafka.bootstrap.servers`; the addresses differ"),
    Option("subscribe", "topic,topic", Unset("one of these three"), READ, _topics, "Topics to read, with all their partitions."),
    Option("subscribePattern", "regular expression", Unset("one of these three"), READ, _pattern,
           "Reads every topic in whose name the pattern is found (`^flights`: all that begin with it; `flights`: all "
           "with it in them). A stream also reads topics that are created later.", "Java's regular expressions there, Python's here"),
    Option("assign", '`{"topic": [0, 1]}`', Unset("one of these three"), READ, lambda _, text: parse_assignment(text),
           "Partitions to read."),
    Option("startingOffsets", "earliest, latest, committed or JSON", {BATCH_READ: "earliest", STREAM_READ: "latest"}, READ, _start,
           'Where to start. In JSON: an offset for every partition, `{"topic": {"0": 23, "1": -2}}`, with -2 for '
           "earliest and -1 for latest. `committed` starts each partition at the offset of the read's group, which "
           "`kafkalog.group.id` names. A stream uses it only if its checkpoint is new. A batch cannot start at latest.", "no `committed`"),
    Option("startingOffsetsByTimestamp", '`{"topic": {"0": TIME}}`', Unset("none"), READ, parse_timestamps,
           "Starts each partition at its first record with this time or a later one. It takes precedence over "
           "startingOffsets. Times are written as for startingTimestamp.", "milliseconds only"),
    Option("startingTimestamp", "milliseconds or ISO-8601", Unset("none"), READ, parse_timestamp,
           "One such time for all partitions. It takes precedence over the other two. `1772366400000` or "
           "`2026-03-01T12:00:00+01:00`; UTC if no zone is given.", "milliseconds only"),
    Option("startingOffsetsByTimestampStrategy", "error or latest", "error", READ, _word("error", "latest"),
           "What to do with a partition that has no record with this time or a later one: fail, or start at its "
           "end. It applies to both ways to start by time."),
    Option("kafkalog.group.id", "name", Unset("from what is read"), READ, _group,
           "The group under which a stream publishes its position, and whose offsets `startingOffsets=committed` "
           "uses. `kafka.group.id` is another name for it. The default is `spark-TOPIC` for `subscribe` with one "
           "topic; for other reads it is `spark-`, the topics or pattern, and a checksum.",
           "`kafka.group.id`, with which its consumers fetch; they commit nothing"),
    Option("groupIdPrefix", "name", "spark", READ, _group,
           "Beginning of the default group name. Ignored if kafkalog.group.id is given.",
           "`spark-kafka-source` and `spark-kafka-relation`, with a new name at every start"),
    Option("committed.fallback", "error, earliest or latest", "error", READ, _word("error", "earliest", "latest"),
           "Where `startingOffsets=committed` starts in a topic in which the group has committed no offset, or in a "
           "partition with an offset that is no longer in the log. A partition that came to a topic of the group is "
           "read from its start. `kafkalog.committed.fallback` is another name for it.", OURS),
    Option("endingOffsets", "latest or JSON", "latest", (BATCH_READ,), parse_position,
           "Where a batch ends: the offset after that of the last record. Earliest and latest are looked up each "
           "time the DataFrame is run."),
    Option("endingOffsetsByTimestamp", '`{"topic": {"0": TIME}}`', Unset("none"), (BATCH_READ,), parse_timestamps,
           "Ends each partition before its first record with this time or a later one, or at its end if there is "
           "no such record. It takes precedence over endingOffsets.", "milliseconds only"),
    Option("endingTimestamp", "milliseconds or ISO-8601", Unset("none"), (BATCH_READ,), parse_timestamp,
           "One such time for all partitions. It takes precedence over the other two.",
           "milliseconds only. Refused here in a stream (ignored there), and if it is before startingTimestamp"),
    Option("includeHeaders", "true or false", "false", READ, _truth, "Adds the column `headers`."),
    Option("columns", "column,column", Unset("all"), READ, _columns,
           "Reads only these columns, in this order: `value,offset`. The same as `.schema(...)` with their types.", OURS),
    Option("maxOffsetsPerTrigger", "whole number", Unset("no limit"), (STREAM_READ,), _count,
           "Largest number of records in one micro-batch. Each partition gets a share in proportion to its "
           "backlog, rounded down, but at least 1. Trigger.Once ignores it."),
    Option("maxBytesPerTrigger", "whole number", Unset("no limit"), (STREAM_READ,), _count,
           "The same limit in bytes of the log, accurate to `index.interval.bytes` for each partition. If both "
           "limits are given, the smaller one counts.", OURS),
    Option("minOffsetsPerTrigger", "whole number", Unset("any"), (STREAM_READ,), _count,
           "A micro-batch waits until this many records are there or maxTriggerDelay is over. The first one after "
           "a start does not wait. Trigger.Once and AvailableNow ignore it.",
           "also used with AvailableNow, which may leave the last records to the next run"),
    Option("maxTriggerDelay", "time, as in 5s or 15m", "15m", (STREAM_READ,), parse_span_s,
           "How long minOffsetsPerTrigger may delay a micro-batch. A number without a unit is milliseconds."),
    Option("minPartitions", "whole number", Unset("none"), READ, _count,
           "Approximate minimum number of input splits: large offset ranges are cut to reach it. Without it, each "
           "partition of the log is one split."),
    Option("maxRecordsPerPartition", "whole number", Unset("none"), READ, _count,
           "An offset range with more records is cut into even pieces."),
    Option("maxInputPartitions", "whole number", Unset("none"), READ, _count,
           "Largest number of input splits: several offset ranges are packed into one split. Use it for topics "
           "with many small partitions, because each split costs a Python task of 20 to 55 ms.", OURS),
    Option("minRecordsPerPartition", "whole number", Unset("none"), READ, _count,
           "Offset ranges are packed until there are not more splits than so many records make, and at least one. Use it "
           "for streams of small micro-batches whose rows take little time, such as `1000`.", OURS),
    Option("failOnDataLoss", "true or false", "true", READ, _truth,
           "Whether to fail when records to be read are no longer in the log. If false, the loss is logged and the read continues with the records that are left.", "notices a topic that was deleted and created again only while it is shorter than before, and skips the records that it has then"),
    Option("kafkaConsumer.pollTimeoutMs", "milliseconds", Unset("`retry.timeout.ms`"), READ, _milliseconds,
           "How long a task retries brokers that do not answer.",
           "`spark.network.timeout` by default"),
    Option("fetchOffset.numRetries", "whole number", "3", READ, _count,
           "How often topics and offsets are requested before a topic counts as missing, or records as lost. Each "
           "request retries unreachable brokers for `kafkalog.retry.timeout.ms`."),
    Option("fetchOffset.retryIntervalMs", "milliseconds", "1000", READ, _pause, "Pause between these requests."),
    Option("kafka.isolation.level", "read_uncommitted or read_committed", "read_uncommitted", READ,
           _word("read_uncommitted", "read_committed"),
           "Both values mean the same: uncommitted records are in no partition.", "read_uncommitted shows records that may be aborted"),
    Option("topic", "topic", Unset("column `topic`"), WRITE, _text,
           "Topic for all rows. It takes precedence over the column `topic`. The argument of `save` or `start` is "
           "another way to give it.", "`save` and `start` take no argument there"),
    Option("delivery", f"{EXACTLY_ONCE} or {AT_LEAST_ONCE}", EXACTLY_ONCE, WRITE, _word(EXACTLY_ONCE, AT_LEAST_ONCE),
           "exactly-once: rows can be read once the whole write (in a stream: the micro-batch) is decided, and each row is written once, whatever fails meanwhile. at-least-once: each task writes directly to the "
           "log, and writes its rows again if it is run again.", "always at least once"),
    Option("txnAppId", "text", Unset("none"), (BATCH_WRITE,), _text,
           "Name of an application whose writes to a topic are numbered by `txnVersion`. For writes in "
           "`foreachBatch`.", OURS),
    Option("txnVersion", "whole number", Unset("none"), (BATCH_WRITE,), _version,
           "Number of this write. If the same query has already written this version to the topic, the write is "
           "skipped after a restart; if another query has, it fails. In `foreachBatch`, give the batch id.", OURS),
    Option("checkpointLocation", "path", Unset("`spark.sql.streaming.checkpointLocation` and the query's name"), WRITE, _path,
           "The query's checkpoint. The sink reads it to distinguish a copied checkpoint from a restart. In "
           "`foreachBatch`, give numbered writes the query's own checkpoint: under Spark Connect, and in a thread "
           "to which Spark does not report the query, they fail without it.", "only Spark reads it"),
)  # fmt: skip

BOOTSTRAP = "kafkalog.bootstrap.servers"
_OTHER_NAMES = {
    "kafka.bootstrap.servers": BOOTSTRAP,
    "kafka.group.id": "kafkalog.group.id",
    "kafkalog.committed.fallback": "committed.fallback",
    "kafka.committed.fallback": "committed.fallback",
}
"""Second names of options."""
SELECTIONS = ("subscribe", "subscribePattern", "assign")
_BY_KEY = {option.name.lower(): option for option in OPTIONS}

_SPARKS_OWN = frozenset(
    ["path", "paths", "queryname", "asyncprogresstrackingenabled",
     "asyncprogresstrackingcheckpointintervalms", "_asyncprogresstrackingoverridesinksupportcheck"]
)  # fmt: skip
"""What Spark puts among the options, or reads from them itself."""

_OF_A_TABLE = {"owner", "provider"}
"""What Spark puts among the options when a table is made."""
_NO_TABLES = (
    "a table made with CREATE TABLE cannot be read or written, for Spark hands none of its options to a Python data "
    "source; use CREATE TEMPORARY VIEW ... USING kafkalog OPTIONS (...) to read, and df.write to write"
)

_REFUSED = {
    "auto.offset.reset": "set startingOffsets instead, and committed.fallback if that is committed",
    "enable.auto.commit": "a stream's position is in its checkpoint",
    "key.deserializer": "keys are read as bytes; cast or decode the column",
    "value.deserializer": "values are read as bytes; cast or decode the column",
    "key.serializer": "keys are written as the bytes of the column",
    "value.serializer": "values are written as the bytes of the column",
    "interceptor.classes": "there are no interceptors",
    "partitioner.class": "a row goes where its column 'partition' says, or else where its key belongs",
}
"""Options that the Kafka connector refuses, or that have no effect because Spark gives every offset to read."""


_SECURITY = ("security.", "ssl.", "sasl.")
"""What settings of Kafka's clients about encryption and authentication begin with."""


def check_names(options: Mapping[str, str]) -> None:
    """Refuse names that are neither the format's, nor a client setting's, nor Spark's own. Raises InvalidArgument."""
    if "groupidprefix" in _lowered(options) and {"kafka.group.id", "kafkalog.group.id"} & _lowered(options).keys():
        log.warning("option_ignored", option="groupIdPrefix", reason="kafkalog.group.id comes before it")
    given = _lowered(options)
    if given.keys() >= _OF_A_TABLE:
        raise InvalidArgument(reason=_NO_TABLES)
    if not given:
        raise InvalidArgument(
            reason=f"no option is given; at least {BOOTSTRAP} is needed. If this is a table of SQL: {_NO_TABLES}"
        )
    for name, value in given.items():
        prefix, _, setting = name.partition(".")
        if _is_security(name) or (prefix in ("kafkalog", "kafka") and _is_security(setting)):
            _refuse_security(name, value)
            continue
        if name in _BY_KEY or name in _SPARKS_OWN or name.startswith("spark.") or name in _OTHER_NAMES:
            continue
        if prefix in ("kafkalog", "kafka") and setting in _REFUSED:
            raise InvalidArgument(reason=f"the option {name} is not supported: {_REFUSED[setting]}")
        if prefix == "kafkalog":
            if setting not in _client_setting_names():
                ours = [option for option in _BY_KEY if option.startswith("kafkalog.")]
                hint = nearest_hint(name, [*ours, *(f"kafkalog.{setting}" for setting in _client_setting_names())])
                raise InvalidArgument(reason=f"there is no client setting '{name}'{hint}")
        elif prefix == "kafka":
            if setting not in _client_setting_names():
                log.warning("kafka_option_ignored", option=name)
        else:
            is_bare = f"kafkalog.{name}" in _BY_KEY or name in _client_setting_names()
            hint = f"; did you mean 'kafkalog.{name}'?" if is_bare else nearest_hint(name, _BY_KEY)
            for key, option in _BY_KEY.items():
                hint = hint.replace(f"'{key}'", f"'{option.name}'")
            raise InvalidArgument(reason=f"the format kafkalog has no option '{name}'{hint}")


def _is_security(setting: str) -> bool:
    return setting.startswith(_SECURITY)


def _refuse_security(name: str, value: str) -> None:
    """Raises InvalidArgument unless it is what every connection is: to pass over the rest would be to send in clear
    what the user asked to be kept secret."""
    if not (name.endswith("security.protocol") and value.strip().upper() == "PLAINTEXT"):
        raise InvalidArgument(
            reason=f"the option {name} is not supported: connections to brokers have neither encryption nor "
            "authentication; leave out every security, ssl and sasl option where the network itself is safe enough"
        )


def client_settings(options: Mapping[str, str], table: type[Settings]) -> dict[str, str]:
    """Those client settings among the options that a table has, by dotted name; `kafkalog.` beats `kafka.`.

    A job may carry the producer's and the consumer's together: the others are left out. Their values are not checked.
    """
    found: dict[str, str] = {}
    for prefix in ("kafka.", "kafkalog."):
        for name, value in _lowered(options).items():
            if name.startswith(prefix) and name.removeprefix(prefix) in table.rows:
                found[name.removeprefix(prefix)] = value
    return found


@functools.cache
def _client_setting_names() -> frozenset[str]:
    from kafkalog.client.config import ClientSettings, ConsumerSettings, ProducerSettings

    tables = (ClientSettings, ConsumerSettings, ProducerSettings)
    return frozenset(name for table in tables for name in table.rows) - _REFUSED.keys()


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def option_values(options: Mapping[str, str], uses: tuple[str, ...]) -> dict[str, Any]:
    """Parsed values, by documented name, of the options given that apply to one of the uses."""
    given = _lowered(options)
    for other, name in _OTHER_NAMES.items():
        if other in given and given.setdefault(name, given[other]) != given[other]:
            raise InvalidArgument(
                reason=f"{name} ({given[name]}) and {other} ({given[other]}) differ: two names of one option"
            )
    values = {
        option.name: option.parse(option.name, given[key])
        for key, option in _BY_KEY.items()
        if key in given and not set(uses).isdisjoint(option.used_by)
    }
    _take_path(given, values, uses)
    return values


def defaults(uses: tuple[str, ...]) -> dict[str, Any]:
    """Typed defaults, by documented name, of the options that apply to one of the uses: None where an option has none,
    or one that depends on the use."""
    return {option.name: option.default_value() for option in OPTIONS if not set(uses).isdisjoint(option.used_by)}


def default_of(name: str, use: str) -> Any:
    """The typed default of an option in a use; None if there is none."""
    return _BY_KEY[name.lower()].default_value(use)


def _take_path(given: Mapping[str, str], values: dict[str, Any], uses: tuple[str, ...]) -> None:
    """Have the argument of load, save or start, which Spark hands over as the option path, name the topic.

    Raises:
        InvalidArgument: an option says otherwise.
    """
    path = given.get("path", "")
    if "paths" in given:  # Spark's, a JSON array: load was given several
        path = ",".join(json.loads(given["paths"]))
    if not path.strip():
        return
    name, call = ("subscribe", "load") if uses == READ else ("topic", "save or start")
    said = f"'{path}', the argument of {call},"
    parsed = _BY_KEY[name].parse("path", path)
    for topic in parsed if isinstance(parsed, tuple) else (parsed,):
        if not is_valid_name(topic):
            raise InvalidArgument(reason=f"{said} is no topic's name; leave it out, or name the topic there")
    for other in SELECTIONS if uses == READ else ("topic",):
        if other in values and (other != name or values[other] != parsed):
            raise InvalidArgument(
                reason=f"{said} and the option {other}={given[other.lower()]} differ: give one of them"
            )
    values[name] = parsed


def bootstrap_servers(values: Mapping[str, Any]) -> str:
    if BOOTSTRAP not in values:
        raise InvalidArgument(reason=f"the option {BOOTSTRAP} is missing: host:port of a broker")
    servers: str = values[BOOTSTRAP]
    return servers


def markdown() -> str:
    """The options, with how each compares with the Kafka connector's, as docs/reference/spark-options.md has them."""
    return "\n".join(_markdown_rows()) + "\n"


def _markdown_rows() -> Iterator[str]:
    yield "| option | value | default | used by | what it does | in the Kafka connector |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for option in OPTIONS:
        uses = {READ + WRITE: "all", READ: "read", WRITE: "write"}.get(option.used_by, ", ".join(option.used_by))
        yield f"| `{option.name}` | {option.type} | {option.default_text()} | {uses} | {option.why} | {option.kafka} |"
