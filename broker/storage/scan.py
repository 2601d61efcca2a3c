"""Finds every good batch in a segment's bytes, and the damage between them. Pure: reads through a function that is
passed in.

`scan` walks from a position that is known to be the start of a batch. Its rules:

1. A header that fails its check gives nothing, not even a length. The next batch is then searched for in 8-byte steps:
   a. The checksum of a batch's body covers all but the first 28 bytes and the checksum itself. If it fits up to some
      later header that is good, the damaged batch ends there: nothing inside it is taken for a batch.
   b. Else a later good batch counts only if from there headers chain without a gap over a place that is known to be
      the start of a batch with that offset, or to the end of the segment: a payload may hold what looks like a batch.
      Such places are the recovery point, where a saved index has an entry, and where damage ends that was found before:
      a second damage behind the first costs nothing between them. A batch with a bad body on the way, but not at the
      segment's end, does not break a chain: its offset and length are under the header's checksum.
2. A good header with a bad body is damage of a known length.
3. What follows the last good batch is a write cut short, to be cut off, unless it lies before the recovery point (or,
   by rule 1a, is a batch whose body is whole): then it is damage and kept, and its offsets are not given out again.

Only fields under the header's checksum are used before the body's checksum is checked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.checksums import Checksums
from broker.storage.index import Damage
from kafkalog.format.batch import (
    ALIGNMENT,
    CRC_FROM,
    HEADER,
    HEADER_SIZE,
    LENGTH_MAX,
    STAMPED,
    STAMPED_SIZE,
    BatchHeader,
    fields_fault,
    header_at,
)

Read = Callable[[int, int], "bytes | memoryview"]
"""(position, length) -> that many bytes; fewer only at the end of the file."""

Places = AbstractSet[tuple[int, int]]
"""(position, offset): a batch with that base offset starts there, or the log ended there once."""

_WINDOW = 1 << 20
_OFFSET_MAX = (1 << 63) - 1


class Scan(NamedTuple):
    """What a scan found.

    Attributes:
        end_offset: after the last good batch, and after the damage behind it if that is kept.
        end_position: where the next batch may be written; less than the size where a torn tail is to be cut.
        leader_epoch: of the last good batch.
        damaged: in order.
        tail_damaged: the last of them reaches the end of the segment: nothing is to be appended behind it.
        torn_bytes: what is to be cut.
    """

    end_offset: int
    end_position: int
    leader_epoch: int
    damaged: tuple[Damage, ...]
    tail_damaged: bool
    torn_bytes: int


def scan(
    read: Read,
    size: int,
    *,
    position: int,
    offset: int,
    leader_epoch: int,
    synced_offset: int,
    next_segment: int | None,
    known: Places,
    on_batch: Callable[[BatchHeader, int], None],
) -> Scan:
    """Walk a segment from the start of a batch to its end.

    Args:
        read: the segment's bytes.
        size: where they end.
        position, offset, leader_epoch: where to start, the offset that comes there, the epoch of the batch before.
        synced_offset: everything before it was synced.
        next_segment: base offset of the next segment; None if this is the last one.
        known: known starts of batches: by the recovery point, an index, or damage found before.
        on_batch: called with the header and position of every good batch, in order.
    """
    unbuffered, read = read, _Window(read, size).read
    damaged: list[Damage] = []
    open_damage: tuple[int, int] | None = None  # offset and position where it begins
    least = offset  # no batch from here on has a smaller base offset
    limit = _OFFSET_MAX if next_segment is None else next_segment
    tail_end = 0  # offset after a last batch of which only the header is damaged
    while position < size:
        header = _good_header(read, position, size, least, limit, leader_epoch)
        exact = header is not None and (header.base_offset == least or open_damage is not None)
        if header is not None and exact:
            if position + header.length > size:
                open_damage = open_damage or (offset, position)
                break  # it was the last batch, and nothing inside it is a batch
            if _body_is_good(read, position, header):
                if open_damage is not None:
                    damaged.append(Damage(open_damage[0], header.base_offset, open_damage[1], position))
                    open_damage = None
                on_batch(header, position)
                offset = least = header.end_offset
                leader_epoch = header.leader_epoch
            else:
                open_damage = open_damage or (offset, position)
                least = header.base_offset + 1
            position += header.length
            continue
        first = position if header is not None else position + ALIGNMENT
        offset_is_known = open_damage is None
        open_damage = open_damage or (offset, position)
        checksums = Checksums(unbuffered, position)
        found = _resynchronise(read, checksums, position, first, size, least, limit, leader_epoch, known)
        if found.position is None:
            if offset_is_known:
                tail_end = least + found.records_at_end
            break
        position = found.position
    synced = synced_offset if next_segment is None else next_segment
    if open_damage is None:
        open_damage = (offset, position)
    kept_to = max(synced, tail_end)
    if kept_to > open_damage[0]:
        damaged.append(Damage(open_damage[0], kept_to, open_damage[1], size))
        return Scan(kept_to, size, leader_epoch, tuple(damaged), True, 0)
    return Scan(open_damage[0], open_damage[1], leader_epoch, tuple(damaged), False, size - open_damage[1])


class _Window:
    """Reads ahead, because most reads of a scan are small and sequential."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._start = 0
        self._data = memoryview(b"")

    def read(self, position: int, length: int) -> memoryview:
        at = position - self._start
        if at < 0 or at + length > len(self._data):
            wanted = max(min(_WINDOW, self._size - position), length)
            self._start, self._data, at = position, memoryview(self._read(position, wanted)), 0
        return self._data[at : at + length]


def _good_header(read: Read, position: int, size: int, least: int, limit: int, leader_epoch: int) -> BatchHeader | None:
    """The header at a position if its checksum matches and it fits into the log's order."""
    header = header_at(read(position, HEADER_SIZE)) if size - position >= HEADER_SIZE else None
    if header is None or not least <= header.base_offset < limit or header.leader_epoch < leader_epoch:
        return None
    return header


def _body_is_good(read: Read, position: int, header: BatchHeader) -> bool:
    """Whether the body's checksum matches and the header's fields under it make sense."""
    start = position + CRC_FROM
    return _checksum(read, start, position + header.length, 0) == header.crc and fields_fault(header) is None


def _checksum(read: Read, start: int, end: int, crc: int) -> int | None:
    """CRC-32C of bytes [start, end), continued from `crc`; None if not all of them exist."""
    while start < end:
        data = read(start, min(_WINDOW, end - start))
        if not data:
            return None
        crc = crc32c(data, crc)
        start += len(data)
    return crc


class _Resynchronised(NamedTuple):
    """The position of the next batch, or None; and the number of records of a last batch whose body alone is whole."""

    position: int | None
    records_at_end: int


class _Chain:
    """Batches that follow each other without a gap; the last of them is at `position`.

    A body is read only if it decides something, because a payload may hold any number of false headers.

    Attributes:
        is_believed: the chain passes a known place.
    """

    def __init__(
        self, checksums: Checksums, before: list[_Chain], position: int, header: BatchHeader, size: int, known: Places
    ) -> None:
        """The chains that end where a batch begins, and to which it is linked, with it; without any, a chain of its
        own."""
        self._checksums = checksums
        self._position = position
        self._header = header
        earlier = [found for each in before if (found := each.first_good()) is not None]
        self._first_good = min(earlier, default=None)
        self.end = end = position + header.length
        self.is_believed: bool = (
            any(each.is_believed for each in before)
            or (position, header.base_offset) in known
            or (end, header.end_offset) in known
            or (end == size and self._ends_well)
        )

    @cached_property
    def _ends_well(self) -> bool:
        """Whether the body of the last batch is good."""
        start = self._position + CRC_FROM
        return fields_fault(self._header) is None and self._checksums.of(start, self.end) == self._header.crc

    def first_good(self) -> int | None:
        """Where the first batch with a good body stands."""
        if self._first_good is None and self._ends_well:
            return self._position
        return self._first_good

    def links(self, after: BatchHeader) -> bool:
        """Whether the last batch is followed by that which stands behind it."""
        before = self._header
        if after.leader_epoch < before.leader_epoch or after.base_offset <= before.base_offset:
            return False
        return after.base_offset == before.end_offset or not self._ends_well


class _OpenChains:
    """The chains that end at a position or behind it; a few, for a segment has millions of batches."""

    def __init__(self) -> None:
        self._by_end: dict[int, list[_Chain]] = {}
        self._ends: list[int] = []  # a heap

    def add(self, chain: _Chain) -> None:
        if chain.end not in self._by_end:
            self._by_end[chain.end] = []
            heapq.heappush(self._ends, chain.end)
        self._by_end[chain.end].append(chain)

    def take(self, position: int) -> list[_Chain]:
        """Those that end at a position. Those that end before it are forgotten: positions only grow."""
        while self._ends and self._ends[0] < position:
            del self._by_end[heapq.heappop(self._ends)]
        return self._by_end.get(position, [])


def _resynchronise(
    read: Read,
    checksums: Checksums,
    start: int,
    first: int,
    size: int,
    least: int,
    limit: int,
    leader_epoch: int,
    known: Places,
) -> _Resynchronised:
    """The start of the next trusted batch, at or after `first`; rule 1.

    At `start` is a bad header, or, if `first` is `start`, a good one in an unexpected place. The time is proportional
    to the bytes, however many headers follow and whatever lengths they claim: one batch can hold 250,000 headers, each
    of which claims to be as long as the batch.
    """
    damaged = read(start, HEADER_SIZE) if first > start else b""
    header = BatchHeader._make(HEADER.unpack(damaged)) if len(damaged) == HEADER_SIZE else None
    if header is not None and fields_fault(header) is not None:
        header = None
    running, running_to = 0, start + CRC_FROM
    believed: int | None = None
    chains = _OpenChains()
    for position, candidate in _headers(read, first, size, least, limit, leader_epoch):
        if header is not None and position >= start + HEADER_SIZE:
            running, running_to = _checksum(read, running_to, position, running) or 0, position
            if running == header.crc:
                return _Resynchronised(position, 0)
        before = [each for each in chains.take(position) if each.links(candidate)]
        chain = _Chain(checksums, before, position, candidate, size, known)
        if chain.is_believed and (found := chain.first_good()) is not None:
            believed = found if believed is None else min(believed, found)
        chains.add(chain)
    if header is not None and size % ALIGNMENT == 0 and _checksum(read, running_to, size, running) == header.crc:
        return _Resynchronised(None, header.last_offset_delta + 1)  # all that looked like batches is inside its body
    return _Resynchronised(believed, 0)


def _headers(
    read: Read, start: int, size: int, least: int, limit: int, leader_epoch: int
) -> Iterator[tuple[int, BatchHeader]]:
    """Every 8-byte step from `start` where a good header of a batch that fits before `size` stands."""
    while size - start >= HEADER_SIZE:
        data = read(start, min(_WINDOW + HEADER_SIZE, size - start))
        usable = len(data) - HEADER_SIZE
        if usable < 0:
            return
        steps = usable // ALIGNMENT + 1
        # The length, at 8 of each step, rules out nearly all of them at 30 ns each.
        lengths = memoryview(data)[: len(data) // 4 * 4].cast("i")[2 : 2 * steps + 2 : 2]
        for step, length in enumerate(lengths):
            if HEADER_SIZE <= length <= LENGTH_MAX and length % ALIGNMENT == 0:
                at = step * ALIGNMENT
                base_offset, _, epoch, _ = STAMPED.unpack_from(data, at)
                if (
                    start + at + length <= size
                    and least <= base_offset < limit
                    and epoch >= leader_epoch
                    and crc32c(data[at : at + STAMPED_SIZE]) == int.from_bytes(data[at + 24 : at + 28], "little")
                ):
                    yield start + at, BatchHeader._make(HEADER.unpack_from(data, at))
        start += steps * ALIGNMENT
