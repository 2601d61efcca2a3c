"""Offsets of many partitions: reading them from options, comparing them, writing them to Spark's offset log. Pure: no
broker, no Spark.

An offset names the next record to read, so a range is [start, end). Two symbols stand for offsets that only the broker
knows, with the Kafka connector's numbers: EARLIEST and LATEST. A third, COMMITTED, stands for what the read's group has
committed; `read/group_start.py` replaces it before anything else sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from pyspark_kafkalog.times import timestamp_us

LATEST = -1
EARLIEST = -2
COMMITTED = -3
SYMBOLS = {"earliest": EARLIEST, "latest": LATEST}

PartitionOffsets = dict[TopicPartition, int]
"""Offset (or symbol) by partition."""

Position = int | PartitionOffsets
"""One symbol for every partition, or an offset or symbol for each."""


class Bound(NamedTuple):
    """Where a read starts or ends, and which option says so.

    Attributes:
        position: offsets and symbols; with `by_time` timestamps in microseconds, each standing for the first record
            that is as late or later.
        no_match: the symbol for a partition without such a record; None: that is an error.
    """

    option: str
    position: Position
    by_time: bool = False
    no_match: int | None = None


class InputRange(NamedTuple):
    """What one task reads: the records [start, end) of a partition; both may be symbols in a batch read."""

    partition: TopicPartition
    start: int
    end: int


# --- text and JSON -------------------------------------------------------------------------------------------------


def parse_position(option: str, text: str, symbols: Mapping[str, int] = SYMBOLS) -> Position:
    """The value of startingOffsets or endingOffsets: a symbol, or JSON with an offset for every partition.

    Raises:
        InvalidArgument: naming the option.
    """
    symbol = symbols.get(text.strip().lower())
    if symbol is not None:
        return symbol
    example = '{"topicA": {"0": 23, "1": -1}} (-2 is earliest, -1 latest)'
    return _by_partition(option, text, f"{', '.join(symbols)} or {example}", "an offset", example, _offset)


def parse_timestamps(option: str, text: str) -> PartitionOffsets:
    """The value of startingOffsetsByTimestamp or endingOffsetsByTimestamp, in microseconds.

    Raises:
        InvalidArgument: naming the option.
    """
    example = '{"topicA": {"0": 1772366400000, "1": "2026-03-01T12:00:00Z"}} (milliseconds or ISO-8601)'
    return _by_partition(option, text, example, "a timestamp", example, timestamp_us)


def _offset(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= EARLIEST else None


def _by_partition(
    option: str, text: str, expected: str, what: str, example: str, parse: Callable[[Any], int | None]
) -> PartitionOffsets:
    """JSON with a value for every partition of every topic; `parse` gives None for what is none."""
    values: PartitionOffsets = {}
    for topic, by_partition in _parse_object(option, text, expected).items():
        if not isinstance(by_partition, dict):
            raise InvalidArgument(reason=f"{option}: '{topic}' must have {what} for each partition, as in {example}")
        for number, value in by_partition.items():
            parsed = parse(value)
            if not number.isdecimal() or parsed is None:
                raise InvalidArgument(
                    reason=f"{option}: '{number}': {json.dumps(value)} of topic '{topic}' is not a partition "
                    f"and {what.split()[1]}, as in {example}"
                )
            if (partition := TopicPartition(topic, int(number))) in values:
                raise InvalidArgument(reason=f"{option} lists partition {int(number)} of topic '{topic}' twice")
            values[partition] = parsed
    return values


def parse_assignment(text: str) -> tuple[TopicPartition, ...]:
    """The partitions of the option assign. Raises InvalidArgument."""
    example = '{"topicA": [0, 1], "topicB": [2]}'
    found: set[TopicPartition] = set()
    for topic, numbers in _parse_object("assign", text, example).items():
        if not isinstance(numbers, list):
            raise InvalidArgument(reason=f"assign: topic '{topic}' must have a list of partitions, as in {example}")
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise InvalidArgument(reason=f"assign: {json.dumps(number)} is not a partition of topic '{topic}'")
            found.add(TopicPartition(topic, number))
    if not found:
        raise InvalidArgument(reason=f"assign='{text}' names no partition; expected {example}")
    return tuple(sorted(found))


def _parse_object(option: str, text: str, expected: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise InvalidArgument(reason=f"{option} names one topic or partition twice: {text}")
        return result

    try:
        parsed = json.loads(text, object_pairs_hook=once)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidArgument(reason=f"{option}='{text}' is not valid; expected {expected}")
    return parsed


def to_log(offsets: PartitionOffsets) -> dict[str, dict[str, int]]:
    """Offsets as Spark's offset log holds them, `{"topic": {"0": 23}}`.

    Spark compares offsets as JSON text: the order is fixed (by topic, then by partition number), or an unchanged
    position would look new and an empty batch would follow another for ever.
    """
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return by_topic


def from_log(logged: Mapping[str, Mapping[str, int]] | None) -> PartitionOffsets:
    """What `to_log` wrote; None (Spark's null, before any topic matched) has no partition."""
    return {
        TopicPartition(topic, int(partition)): int(offset)
        for topic, by_partition in (logged or {}).items()
        for partition, offset in by_partition.items()
    }


# --- resolving -----------------------------------------------------------------------------------------------------


def position_of_each(bound: Bound, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
    """The offset, symbol or timestamp for every partition that is read.

    Raises:
        InvalidArgument: the option lists other partitions than those read.
    """
    wanted = sorted(partitions)
    position = bound.position
    if isinstance(position, int):
        return dict.fromkeys(wanted, position)
    if position.keys() != set(wanted):
        symbols = "" if bound.by_time else " (-2 for earliest, -1 for latest)"
        raise InvalidArgument(
            reason=f"{bound.option} must list exactly the partitions that are read{symbols}: "
            f"listed are {partition_names(position)}, read are {partition_names(wanted)}"
        )
    return {partition: position[partition] for partition in wanted}


def symbols_in(offsets: Iterable[PartitionOffsets], symbol: int) -> list[TopicPartition]:
    """The partitions that stand at a symbol in any of them."""
    return sorted({partition for each in offsets for partition, offset in each.items() if offset == symbol})


def resolved(offsets: PartitionOffsets, earliest: PartitionOffsets, latest: PartitionOffsets) -> PartitionOffsets:
    """Offsets with every symbol replaced."""
    by_symbol = {EARLIEST: earliest, LATEST: latest}
    return {
        partition: by_symbol[offset][partition] if offset in by_symbol else offset
        for partition, offset in offsets.items()
    }


def check_batch_bounds(start: Bound, end: Bound) -> None:
    """Check a batch's range as far as possible without a broker.

    Raises:
        InvalidArgument: starts at latest, ends at earliest, or given starts and ends do not fit each other.
    """
    for bound, symbol, word in ((start, LATEST, "latest"), (end, EARLIEST, "earliest")):
        if bound.by_time:
            continue
        if bound.position == symbol:
            raise InvalidArgument(reason=f"{bound.option} of a batch read cannot be {word}: no record would be read")
        if isinstance(bound.position, dict) and (named := symbols_in([bound.position], symbol)):
            raise InvalidArgument(reason=f"{bound.option} of a batch read cannot be {word} ({symbol}) for {named[0]}")
    first, last = start.position, end.position
    if isinstance(first, dict) and isinstance(last, dict) and first.keys() != last.keys():
        raise InvalidArgument(
            reason=f"{start.option} and {end.option} must list the same partitions: "
            f"{partition_names(first)} and {partition_names(last)}"
        )
    if start.by_time and end.by_time:
        check_order(start, end, "timestamp", first, last)
    elif not start.by_time and not end.by_time and isinstance(first, dict) and isinstance(last, dict):
        check_order(start, end, "offset", first, last)


def check_order(start: Bound, end: Bound, what: str, first: Position, last: Position) -> None:
    """Raises InvalidArgument if a partition's range ends before it starts; symbols are not compared."""
    if isinstance(first, int) and isinstance(last, int):
        pairs = [("", first, last)]
    else:
        partitions = sorted(first if isinstance(first, dict) else last if isinstance(last, dict) else ())
        pairs = [(f" of {each}", _at(first, each), _at(last, each)) for each in partitions]
    for where, begins, ends in pairs:
        if 0 <= ends < begins:
            unit = " us" if what == "timestamp" else ""
            raise InvalidArgument(
                reason=f"the start {what} {begins}{unit}{where} ({start.option}) is greater than its end {what} "
                f"{ends}{unit} ({end.option})"
            )


def _at(position: Position, partition: TopicPartition) -> int:
    return position if isinstance(position, int) else position[partition]


def partition_names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(str(partition) for partition in sorted(partitions)) or "none"


# --- comparing two positions ---------------------------------------------------------------------------------------


def input_ranges(start: PartitionOffsets, end: PartitionOffsets) -> list[InputRange]:
    """The ranges between two positions, those without records left out. A partition new in `end` begins at 0."""
    return [
        InputRange(partition, start.get(partition, 0), offset)
        for partition, offset in sorted(end.items())
        if offset > start.get(partition, 0)
    ]


def whats_gone(start: PartitionOffsets, end: PartitionOffsets) -> list[str]:
    """The loss if a position `start` has partitions that `end` lacks: at most one sentence."""
    gone = start.keys() - end.keys()
    return [f"the stream reads {partition_names(gone)}, deleted since"] if gone else []


def whats_moved_back(start: PartitionOffsets, end: PartitionOffsets) -> list[str]:
    """The losses if partitions now end before the position `start`: a sentence for each."""
    return [
        f"the stream knows of offset {start[partition]} of {partition}, which now ends at {offset}: either the topic "
        "was deleted and created again, or the start was set beyond the end"
        for partition, offset in sorted(end.items())
        if partition in start and offset < start[partition]
    ]
