"""Offsets of many partitions: reading them from options, resolving, limiting, cutting into input ranges, writing them
to Spark's offset log. Pure: no broker, no Spark.

An offset names the next record to read, so a range is [start, end). Two symbols stand for offsets that only the broker
knows, with the Kafka connector's numbers: EARLIEST and LATEST. A third, COMMITTED, stands for what the read's group has
committed; `committed.py` replaces it before anything else sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition

LATEST = -1
EARLIEST = -2
COMMITTED = -3
SYMBOLS = {"earliest": EARLIEST, "latest": LATEST}

PartitionOffsets = dict[TopicPartition, int]
"""Offset (or symbol) by partition."""

Position = int | PartitionOffsets
"""One symbol for every partition, or an offset or symbol for each."""


class InputRange(NamedTuple):
    """What one task reads: the records [start, end) of a partition; both may be symbols in a batch read."""

    partition: TopicPartition
    start: int
    end: int


# --- text and JSON -------------------------------------------------------------------------------------------------


def parse_position(option: str, text: str) -> Position:
    """The value of startingOffsets or endingOffsets: earliest, latest, or JSON with an offset for every partition.

    Raises:
        InvalidArgument: naming the option.
    """
    symbol = SYMBOLS.get(text.strip().lower())
    if symbol is not None:
        return symbol
    example = '{"topicA": {"0": 23, "1": -1}} (-2 is earliest, -1 latest)'
    by_topic = _parse_object(option, text, f"earliest, latest or {example}")
    offsets: PartitionOffsets = {}
    for topic, by_partition in by_topic.items():
        if not isinstance(by_partition, dict):
            raise InvalidArgument(reason=f"{option}: '{topic}' must have an offset for each partition, as in {example}")
        for number, offset in by_partition.items():
            if not number.isdecimal() or not isinstance(offset, int) or isinstance(offset, bool) or offset < EARLIEST:
                raise InvalidArgument(
                    reason=f"{option}: '{number}': {json.dumps(offset)} of topic '{topic}' is no partition "
                    f"and offset, as in {example}"
                )
            offsets[TopicPartition(topic, int(number))] = offset
    return offsets


def parse_assignment(text: str) -> tuple[TopicPartition, ...]:
    """The partitions of the option assign. Raises InvalidArgument."""
    example = '{"topicA": [0, 1], "topicB": [2]}'
    found: set[TopicPartition] = set()
    for topic, numbers in _parse_object("assign", text, example).items():
        if not isinstance(numbers, list):
            raise InvalidArgument(reason=f"assign: topic '{topic}' must have a list of partitions, as in {example}")
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise InvalidArgument(reason=f"assign: {json.dumps(number)} is no partition of topic '{topic}'")
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


def position_of_each(option: str, position: Position, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
    """The offset or symbol for every partition that is read.

    Raises:
        InvalidArgument: the option lists other partitions than those read.
    """
    wanted = sorted(partitions)
    if isinstance(position, int):
        return dict.fromkeys(wanted, position)
    if position.keys() != set(wanted):
        raise InvalidArgument(
            reason=f"{option} must list exactly the partitions that are read (-2 for earliest, -1 for latest): "
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


def check_batch_positions(starting: Position, ending: Position) -> None:
    """What can be known to be wrong with a batch's range before any broker is asked.

    Raises:
        InvalidArgument: starts at latest, ends at earliest, or explicit starts and ends do not fit each other.
    """
    for name, position, symbol, word in (
        ("startingOffsets", starting, LATEST, "latest"),
        ("endingOffsets", ending, EARLIEST, "earliest"),
    ):
        if position == symbol:
            raise InvalidArgument(reason=f"{name} of a batch read can not be {word}: nothing would be read")
        if isinstance(position, dict) and (named := symbols_in([position], symbol)):
            raise InvalidArgument(reason=f"{name} of a batch read can not be {word} ({symbol}) for {named[0]}")
    if isinstance(starting, dict) and isinstance(ending, dict):
        if starting.keys() != ending.keys():
            raise InvalidArgument(
                reason="startingOffsets and endingOffsets must list the same partitions: "
                f"{partition_names(starting)} and {partition_names(ending)}"
            )
        for partition, start in sorted(starting.items()):
            if start >= 0 and 0 <= ending[partition] < start:
                raise InvalidArgument(
                    reason=f"the start offset {start} of {partition} is greater than its end offset {ending[partition]}"
                )


def partition_names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(str(partition) for partition in sorted(partitions)) or "none"


# --- limits and ranges ---------------------------------------------------------------------------------------------


def limited(start: PartitionOffsets, end: PartitionOffsets, max_offsets: int) -> PartitionOffsets:
    """The end offsets of a batch of about `max_offsets` records, shared out in proportion to each partition's backlog.

    The Kafka connector's rule: a share is rounded down from 1 on and up below 1, so that every partition with a backlog
    moves on and the sum may miss the limit a little either way. A partition that `start` does not have begins at 0.
    """
    backlog = {p: offset - start.get(p, 0) for p, offset in end.items() if offset > start.get(p, 0)}
    total = sum(backlog.values())
    if total <= max_offsets:
        return dict(end)
    ends = {}
    for partition, offset in end.items():
        size = backlog.get(partition, 0)
        if size == 0:
            ends[partition] = offset
        else:  # whole numbers: a float would lose offsets beyond 2**53
            share = max_offsets * size // total or 1
            ends[partition] = min(start.get(partition, 0) + share, offset)
    return ends


def input_ranges(start: PartitionOffsets, end: PartitionOffsets) -> list[InputRange]:
    """The ranges between two positions, those without records left out. A partition new in `end` begins at 0."""
    return [
        InputRange(partition, start.get(partition, 0), offset)
        for partition, offset in sorted(end.items())
        if offset > start.get(partition, 0)
    ]


def whats_lost(start: PartitionOffsets, end: PartitionOffsets) -> str | None:
    """Why the log can not have what a stream knew of, `start`, if it now ends at `end`; None if it can."""
    gone = start.keys() - end.keys()
    if gone:
        return f"the stream reads {partition_names(gone)}, deleted since"
    for partition, offset in sorted(end.items()):
        if partition in start and offset < start[partition]:
            return (
                f"the stream knows of offset {start[partition]} of {partition}, which now ends at {offset}: either "
                "the topic was deleted and created again, or the start was set beyond the end"
            )
    return None
