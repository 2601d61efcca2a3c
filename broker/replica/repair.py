"""Repairs a damaged segment of a replica from other replicas: the damaged offsets come from them, the rest from the
segment itself. Knows logs and where bytes may come from; no sockets.

A batch of another replica is taken only if its checksums match, it continues the one before it, and its leader epoch is
the one that this log has for its offset. In one epoch one leader gives each offset to one batch. So it is the batch
that was here, whether it is acknowledged or not. A high watermark does not matter: a leader that has just been elected
may know of none until this replica has joined, which it cannot with damage.

A damaged range is taken as a whole, from several replicas if none has all of it, or else stays as it is: its bytes are
kept, and so is all that is good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from broker.storage.index import Damage
from broker.storage.log import Log
from broker.storage.replacement import Replacement
from broker.storage.segment import Segment
from kafkalog.errors import Closed, CorruptBatch, KafkalogError
from kafkalog.events import get_logger
from kafkalog.format.batch import iter_batches

log = get_logger(__name__)

_PIECE_BYTES = 1 << 20


class Source(Protocol):
    """Another replica of the partition.

    Attributes:
        name: for messages.
    """

    name: str

    def read(self, offset: int, max_bytes: int) -> memoryview:
        """Batches from an offset on, at least one; the last one may be cut. Raises KafkalogError."""


class Unrepaired(NamedTuple):
    """Damage that is left, and why."""

    damage: Damage
    reason: str


class Outcome(NamedTuple):
    """How many damaged ranges were repaired, and what is left."""

    repaired: int
    left: list[Unrepaired]


class _NotObtained(Exception):
    """No replica has the rest of a range."""


class _Range:
    """The good batches of a damaged range, from other replicas."""

    def __init__(self, target: Log, damage: Damage, sources: Sequence[Source]) -> None:
        self.damage = damage
        self.reason = ""
        self._target = target
        self._sources = sources
        self._pieces = self._obtain()
        self._first: memoryview | None = None

    def is_there(self) -> bool:
        """Whether the first batches can be had; `reason` says why not."""
        try:
            self._first = next(self._pieces, memoryview(b""))  # without offsets: bytes that belong to no batch
        except _NotObtained as error:
            self.reason = str(error)
        return self._first is not None

    def write_to(self, replacement: Replacement) -> bool:
        """Write all batches, or nothing; returns whether they could be had."""
        assert self._first is not None
        start = replacement.size
        try:
            replacement.append(self._first)
            for piece in self._pieces:
                replacement.append(piece)
        except _NotObtained as error:
            self.reason = str(error)
            replacement.cut(start)
            return False
        return True

    def _obtain(self) -> Iterator[memoryview]:
        damage, offset = self.damage, self.damage.start_offset
        if not self._sources:
            raise _NotObtained("there is no other replica")
        while offset < damage.end_offset:
            reasons = []
            for source in self._sources:
                try:
                    piece, offset = self._matching(source.read(offset, _PIECE_BYTES), offset)
                    break
                except KafkalogError as error:
                    reasons.append(f"{source.name}: {error}")
            else:
                raise _NotObtained("; ".join(reasons))
            yield piece

    def _matching(self, data: memoryview, offset: int) -> tuple[memoryview, int]:
        """The batches of `data` that belong at an offset, and where they end. Raises CorruptBatch if there is none."""
        length, target = 0, self._target
        fault = "no whole batch was sent"
        try:
            for header, batch in iter_batches(data, target.label):
                fault = "the batch there is another one"
                if (
                    header.base_offset != offset
                    or header.end_offset > self.damage.end_offset
                    or header.leader_epoch != target.epoch_at(offset)
                ):
                    break
                length += len(batch)
                offset = header.end_offset
                if offset == self.damage.end_offset:
                    break
        except CorruptBatch:
            if not length:
                raise
        if not length:
            raise CorruptBatch(partition=target.label, offset=offset, reason=fault)
        return data[:length], offset


def repair(target: Log, segment: Segment, sources: Sequence[Source], is_stopping: Callable[[], bool]) -> Outcome:
    """Replace a damaged closed segment by one without the damage that other replicas can make good.

    Args:
        sources: the other replicas, the best one first.
        is_stopping: looked at between pieces.

    Damage before the log's start offset does not count.

    Raises:
        DiskFull, StorageFailed.
        Closed: the log is closed, or `is_stopping` said so.
    """
    start_offset = target.start_offset
    ranges = [_Range(target, damage, sources) for damage in segment.damaged if damage.end_offset > start_offset]
    there = [each for each in ranges if each.is_there()]
    left = ranges
    if there:
        replacement = target.begin_replacement([segment])
        if replacement is None:
            return Outcome(0, [])
        repaired = _write(target, segment, replacement, {each.damage: each for each in there}, is_stopping)
        if repaired and target.replace(replacement):
            for damage in repaired:
                log.warning(
                    "damage_repaired",
                    partition=target.label,
                    start_offset=damage.start_offset,
                    end_offset=damage.end_offset,
                )
            left = [each for each in ranges if each.damage not in repaired]
    return Outcome(len(ranges) - len(left), [Unrepaired(each.damage, each.reason) for each in left])


def _write(
    target: Log,
    segment: Segment,
    replacement: Replacement,
    there: dict[Damage, _Range],
    is_stopping: Callable[[], bool],
) -> list[Damage]:
    """Write the replacement; returns the damage that it repairs. If that is none, the replacement was abandoned."""
    repaired: list[Damage] = []
    kept: list[Damage] = []
    position = 0

    def copy(end_position: int) -> None:
        nonlocal position
        while position < end_position:
            if is_stopping():
                raise Closed(what=f"log of {target.label}")
            data = target.read_segment(segment, position, min(_PIECE_BYTES, end_position - position))
            if not data:
                return
            replacement.append(data)
            position += len(data)

    try:
        for damage in segment.damaged:
            copy(damage.position)
            obtained = there.get(damage)
            if obtained is not None and obtained.write_to(replacement):
                repaired.append(damage)
            else:
                start = replacement.size
                copy(damage.end_position)
                kept.append(damage._replace(position=start, end_position=replacement.size))
            position = damage.end_position
        copy(segment.size)
        found = replacement.complete(kept) if repaired else ()
        if not all(any(_contains(known, each) for known in kept) for each in found):
            repaired.clear()
        if not repaired:
            replacement.abandon()
            for _ in target.check(segment):  # it has new damage, which is repaired with the next attempt
                if is_stopping():
                    break
    except BaseException:
        replacement.abandon()
        raise
    return repaired


def _contains(known: Damage, found: Damage) -> bool:
    return known.start_offset <= found.start_offset and found.end_offset <= known.end_offset
