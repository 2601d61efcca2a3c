"""Finds every good batch in a segment's bytes, and the damage between them. Pure: reads through a function that is
passed in.

`scan` walks from a position that is known to be the start of a batch. Its rules:

1. No field of a header that fails its check is trusted, not even the length. The next batch is then searched for in
   8-byte steps:
   a. The checksum of a batch's body covers all but the first 28 bytes and the checksum itself. If it matches the bytes
      up to some later good header, the damaged batch ends there. Nothing inside it is taken for a batch.
   b. Otherwise a later good batch counts only if headers chain from it without a gap to the end of the segment, or over
      a known place: the known start of a batch with that offset. Without this rule, bytes of a payload that look like
      a batch could pass for one. Known places are the recovery point, the entries of a saved index, and the ends of
      damage found before. Because of the last, new damage after known damage loses no good batch between the two. A
      batch with a bad body does not break a chain, because its offset and length are under the header's checksum. But
      it cannot be the last one of a chain to the segment's end.
2. A good header with a bad body is damage of a known length.
3. The bytes after the last good batch are an incomplete write, to be cut off. But they are damage if they are before
   the recovery point, or if they are a batch whose body is intact (rule 1a). Then they are kept, and their offsets are
   not given out again.

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
"""(position, offset): a batch with that base offset starts at the position, or the log once ended there."""

_WINDOW = 1 << 20
_OFFSET_MAX = (1 << 63) - 1


class Scan(NamedTuple):
    """The result of a scan.

    Attributes:
        end_offset: end offset of the last good batch, or of the damage after it if that is kept.
        end_position: position for the next batch. It is less than the size if a torn tail is to be cut.
        leader_epoch: of the last good batch.
        damaged: the damaged ranges, in order.
        tail_damaged: the last damaged range reaches the end of the segment, so nothing may be appended to it.
        torn_bytes: number of bytes to cut from the end.
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
        read: reads the segment's bytes.
        size: the scan ends at this position.
        position: where to start.
        offset: the offset at `position`.
        leader_epoch: of the batch before `position`.
        synced_offset: every record before this offset was synced.
        next_segment: base offset of the next segment; None if this is the last one.
        known: known starts of batches, from the recovery point, an index, or damage found before.
        on_batch: called with the header and position of every good batch, in order.
    """
    unbuffered, read = read, _Window(read, size).read
    damaged: list[Damage] = []
    open_damage: tuple[int, int] | None = None  # (offset, position) of its start
    least = offset  # no batch at or after `position` has a smaller base offset
    limit = _OFFSET_MAX if next_segment is None else next_segment
    tail_end = 0  # end offset of a last batch of which only the header is damaged
    while position < size:
        header = _good_header(read, position, size, least, limit, leader_epoch)
        exact = header is not None and (header.base_offset == least or open_damage is not None)
        if header is not None and exact:
            if position + header.length > size:
                open_damage = open_damage or (offset, position)
                break  # an incomplete last batch; nothing inside it is a batch
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
    """A read buffer: most reads of a scan are small and sequential."""

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
    """The header at a position, if its checksum matches and its offset and leader epoch are in order; else None."""
    header = header_at(read(position, HEADER_SIZE)) if size - position >= HEADER_SIZE else None
    if header is None or not least <= header.base_offset < limit or header.leader_epoch < leader_epoch:
        return None
    return header


def _body_is_good(read: Read, position: int, header: BatchHeader) -> bool:
    """Whether the body's checksum matches and the header fields that it covers are valid."""
    start = position + CRC_FROM
    return _checksum(read, start, position + header.length, 0) == header.crc and fields_fault(header) is None


def _checksum(read: Read, start: int, end: int, crc: int) -> int | None:
    """CRC-32C of bytes [start, end), continued from `crc`; None if not all of these bytes exist."""
    while start < end:
        data = read(start, min(_WINDOW, end - start))
        if not data:
            return None
        crc = crc32c(data, crc)
        start += len(data)
    return crc


class _Resynchronised(NamedTuple):
    """The result of a search for the next batch.

    Attributes:
        position: of the next batch; None if none was found.
        records_at_end: number of records of a last batch whose header is damaged and whose body is intact; else 0.
    """

    position: int | None
    records_at_end: int


class _Chain:
    """Batches that follow each other without a gap, represented by the last of them.

    A body is read only if the result depends on it, because a payload may contain any number of false headers.

    Attributes:
        end: end position of the last batch.
        is_trusted: the chain passes a known place, or ends with a good batch at the end of the segment.
    """

    def __init__(
        self, checksums: Checksums, before: list[_Chain], position: int, header: BatchHeader, size: int, known: Places
    ) -> None:
        """Extend chains by a batch, or start a new chain with it.

        Args:
            before: the chains that the batch extends; none to start a new chain.
            position, header: of the batch.
            size: end position of the segment.
            known: known starts of batches.
        """
        self._checksums = checksums
        self._position = position
        self._header = header
        earlier = [found for each in before if (found := each.first_good()) is not None]
        self._first_good = min(earlier, default=None)
        self.end = end = position + header.length
        self.is_trusted: bool = (
            any(each.is_trusted for each in before)
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
        """The position of the chain's first batch with a good body; None if there is none."""
        if self._first_good is None and self._ends_well:
            return self._position
        return self._first_good

    def links(self, after: BatchHeader) -> bool:
        """Whether a batch that starts at the chain's end may be the next batch, by its offset and leader epoch."""
        before = self._header
        if after.leader_epoch < before.leader_epoch or after.base_offset <= before.base_offset:
            return False
        return after.base_offset == before.end_offset or not self._ends_well


class _OpenChains:
    """The chains that end at or after the current position. Earlier ones are forgotten, because a segment has millions
    of batches."""

    def __init__(self) -> None:
        self._by_end: dict[int, list[_Chain]] = {}
        self._ends: list[int] = []  # a heap

    def add(self, chain: _Chain) -> None:
        if chain.end not in self._by_end:
            self._by_end[chain.end] = []
            heapq.heappush(self._ends, chain.end)
        self._by_end[chain.end].append(chain)

    def take(self, position: int) -> list[_Chain]:
        """The chains that end at a position. Chains that end before it are forgotten, because positions only grow."""
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
    """Find the start of the next trusted batch at or after `first`, by rule 1.

    At `start` is a bad header or, if `first` is `start`, a good one with an unexpected offset. The time is proportional
    to the number of bytes, whatever headers these contain: one batch can contain 250,000 headers, each with a length as
    large as the batch.
    """
    damaged = read(start, HEADER_SIZE) if first > start else b""
    header = BatchHeader._make(HEADER.unpack(damaged)) if len(damaged) == HEADER_SIZE else None
    if header is not None and fields_fault(header) is not None:
        header = None
    running, running_to = 0, start + CRC_FROM
    trusted: int | None = None
    chains = _OpenChains()
    for position, candidate in _headers(read, first, size, least, limit, leader_epoch):
        if header is not None and position >= start + HEADER_SIZE:
            running, running_to = _checksum(read, running_to, position, running) or 0, position
            if running == header.crc:
                return _Resynchronised(position, 0)
        before = [each for each in chains.take(position) if each.links(candidate)]
        chain = _Chain(checksums, before, position, candidate, size, known)
        if chain.is_trusted and (found := chain.first_good()) is not None:
            trusted = found if trusted is None else min(trusted, found)
        chains.add(chain)
    if header is not None and size % ALIGNMENT == 0 and _checksum(read, running_to, size, running) == header.crc:
        return _Resynchronised(None, header.last_offset_delta + 1)  # what looked like batches is in its body
    return _Resynchronised(trusted, 0)


def _headers(
    read: Read, start: int, size: int, least: int, limit: int, leader_epoch: int
) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of every good header at 8-byte steps from `start` whose batch ends at or before `size`."""
    while size - start >= HEADER_SIZE:
        data = read(start, min(_WINDOW + HEADER_SIZE, size - start))
        usable = len(data) - HEADER_SIZE
        if usable < 0:
            return
        steps = usable // ALIGNMENT + 1
        # The length field, 8 bytes after each step, rules out nearly all steps, at 30 ns each.
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
