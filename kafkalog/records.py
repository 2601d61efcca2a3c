"""Values of the public API: partitions, messages, results of sends. Knows no format and no connection."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition by its topic's name and its number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Message(NamedTuple):
    """One record as a consumer sees it.

    `timestamp_us` is in microseconds since the epoch; `headers` a tuple of (key, value) pairs, empty if there are none.
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class RecordMetadata(NamedTuple):
    """The place of an acknowledged record in the log. `offset` is -1 with acks=0."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
