"""Values of the public API: partitions, messages, results of sends. Knows no format and no connection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition by its topic's name and its number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """The numbers of partitions by topic; both sorted."""
    found: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        found.setdefault(topic, []).append(number)
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: 0-3,7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


class Message(NamedTuple):
    """One record as a consumer sees it.

    `timestamp_us` is in microseconds since the epoch; `headers` a tuple of (key, value) pairs, empty if there are none;
    `leader_epoch` the one in which it was appended (KIP-320): if that ended before the record, the record was lost;
    `topic_id` the 16 bytes that tell its topic from another one of the same name, created later.
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    leader_epoch: int = -1
    topic_id: bytes = b""


class RecordMetadata(NamedTuple):
    """The place of an acknowledged record in the log. `offset` is -1 with acks=0."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
