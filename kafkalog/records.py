"""Values of the public API: partitions, messages, results of sends. Knows no format and no connection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import eq, index
from typing import NamedTuple, overload


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


MessageFields = tuple[str, int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int, bytes]
"""A message's fields in order. Python's garbage collector leaves a plain tuple of such values alone after its first
pass. A message it scans in several passes, which takes longer than to make it."""


def as_messages(fields: Iterable[MessageFields]) -> Iterator[Message]:
    """The message of each, made when it is asked for. No call comes between taking the fields and the message."""
    return map(tuple.__new__, repeat(Message), fields)


_SHOWN = 10


class Messages(Sequence[Message]):
    """Messages that were consumed together. A sequence as a list is, but for changes; each message is made when it is
    looked at, so that thousands of them cost the garbage collector nothing: `list(messages)` makes all.

    Args:
        parts: the messages' fields in order.
        are_runs: each part is of one partition, in the log's order.
    """

    __slots__ = ("_are_runs", "_ends", "_parts")
    __hash__ = None  # type: ignore[assignment] # as a list's

    def __init__(self, parts: Iterable[Sequence[MessageFields]] = (), *, are_runs: bool = False) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(map(len, self._parts)))
        self._are_runs = are_runs

    def _fields(self) -> Iterator[MessageFields]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Message]:
        return as_messages(self._fields())

    def __reversed__(self) -> Iterator[Message]:
        return as_messages(reversed(list(self._fields())))

    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        return list(self).index(value, start, len(self) if stop is None else stop)  # type: ignore[arg-type]

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> Messages: ...
    def __getitem__(self, at: int | slice) -> Message | Messages:
        if isinstance(at, slice):
            return Messages([list(self._fields())[at] if at.step not in (None, 1) else self._between(at)])
        place = index(at)
        place += len(self) if place < 0 else 0
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} messages, and none at {at}")
        return Message(*self._at(place))

    def _between(self, at: slice) -> list[MessageFields]:
        first, end, _ = at.indices(len(self))
        found: list[MessageFields] = []
        for number in range(bisect_right(self._ends, first), bisect_left(self._ends, end) + 1) if first < end else ():
            part = self._parts[number]
            part_first = self._ends[number] - len(part)
            found += part[max(0, first - part_first) : end - part_first]
        return found

    def _at(self, place: int) -> MessageFields:
        number = bisect_right(self._ends, place)
        return self._parts[number][place - self._ends[number]]  # counted from the part's end

    def __eq__(self, other: object) -> bool:
        """With another of these, or with a list of messages."""
        if not isinstance(other, Messages | list):
            return NotImplemented
        theirs: Iterable[object] = other._fields() if isinstance(other, Messages) else other
        return len(self) == len(other) and all(map(eq, self._fields(), theirs))

    def __add__(self, more: Iterable[Message]) -> list[Message]:
        return [*self, *more]

    def __radd__(self, before: Iterable[Message]) -> list[Message]:
        return [*before, *self]

    def __reduce__(self) -> tuple[type[Messages], tuple[list[list[MessageFields]]]]:
        return Messages, ([list(self._fields())],)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN]))
        more = f", ... {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return f"Messages([{shown}{more}])"


def lasts_of(messages: Messages) -> Iterable[Message]:
    """Those among which is the last of each partition: of runs the last ones, else all."""
    if not messages._are_runs:
        return messages
    return [Message(*part[-1]) for part in messages._parts if len(part)]


class RecordMetadata(NamedTuple):
    """The place of an acknowledged record in the log. `offset` is -1 with acks=0."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
