"""Reads a segment to find bit rot: every batch's checksums, offset and epoch. Takes no lock, and goes piece by piece,
so that the caller bounds the rate and can stop at any piece. Knows one segment; `Log` knows which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.disk import Disk
from broker.storage.index import Damage
from broker.storage.reader import Reader
from broker.storage.segment import Segment
from kafkalog.format.batch import CRC_FROM, HEADER_SIZE, BatchHeader, body_fault, fields_fault, header_at

PIECE_BYTES = 1 << 20

OnBatch = Callable[[BatchHeader], object]


class SegmentCheck:
    """A walk over the batches of a segment.

    Args:
        limit, limit_offset: where the segment, or what is to be read of it, ends.
        on_batch: called with the header of every good batch, in order.

    Attributes:
        offset: up to which the batches are checked.
    """

    def __init__(
        self, disk: Disk, reader: Reader, segment: Segment, limit: int, limit_offset: int, on_batch: OnBatch
    ) -> None:
        self._disk = disk
        self._reader = reader
        self._segment = segment
        self._limit = limit
        self._limit_offset = limit_offset
        self._on_batch = on_batch
        self._position = 0
        self._leader_epoch = 0
        self._failed_at = -1  # the position of a batch that failed, and was not found damaged
        self.offset = segment.base_offset

    def run(self, from_offset: int, until_offset: int) -> Iterator[int]:
        """Check the batches from the index entry before `from_offset` up to `until_offset`. Damage is added to the
        segment's. Yields the number of bytes read, after each piece.

        Raises:
            OSError: the file cannot be read. FileNotFoundError: it was deleted.
        """
        segment = self._segment
        self._position, self.offset = segment.index.before(from_offset)
        file = segment.share_file()
        try:
            while self.offset < until_offset:
                damage = self._covering()
                if damage is not None:
                    self._position = max(self._position, damage.end_position)
                    self.offset = damage.end_offset
                elif self._position >= self._limit:
                    return
                else:
                    length = min(PIECE_BYTES, self._limit - self._position)
                    data = self._disk.read_sparing_cache(file.fd, length, self._position)
                    yield from self._check(file.fd, memoryview(data), until_offset)
        finally:
            file.release()

    def _covering(self) -> Damage | None:
        """The known damage at the position reached."""
        for damage in self._segment.damaged:
            if damage.position <= self._position < damage.end_position or (
                damage.position == self._position and damage.start_offset <= self.offset < damage.end_offset
            ):
                return damage
        return None

    def _check(self, fd: int, data: memoryview, until_offset: int) -> Iterator[int]:
        """Check the batches of a piece that begins with one."""
        at, read = 0, len(data)
        while at < len(data) and self.offset < until_offset:
            header = header_at(data, at)
            if header is None and at and len(data) - at < HEADER_SIZE:
                break  # it goes on in the next piece
            is_next = header is not None and header.base_offset == self.offset
            if header is None or not is_next or header.leader_epoch < self._leader_epoch:
                self._fail()
                break
            if at + header.length > len(data):
                if at:
                    break
                yield read
                read = 0
                fault = not (yield from self._is_good(fd, header))
            else:
                fault = body_fault(header, data[at : at + header.length]) is not None
            if fault:
                self._fail()
                break
            at += header.length
            self._position += header.length
            self.offset, self._leader_epoch = header.end_offset, header.leader_epoch
            self._on_batch(header)
            if self._segment.damaged and self._covering() is not None:
                break
        if not data:
            self._fail()
        yield read

    def _is_good(self, fd: int, header: BatchHeader) -> Generator[int, None, bool]:
        """Whether the body of a batch that is longer than a piece is good."""
        start, end, crc = self._position + CRC_FROM, self._position + header.length, 0
        while start < min(end, self._limit):
            data = self._disk.read_sparing_cache(fd, min(PIECE_BYTES, end - start), start)
            if not data:
                return False
            crc = crc32c(data, crc)
            start += len(data)
            yield len(data)
        return start == end and crc == header.crc and fields_fault(header) is None

    def _fail(self) -> None:
        """Determine the damage at the position reached. If none is found, twice, go on at the next index entry."""
        position = self._position
        self._reader.examine(self._segment, position, self._limit, self._limit_offset)
        if self._covering() is None:
            if self._failed_at == position:
                _, after = self._segment.index.around(position)
                self._position, self.offset = after or (self._limit, self._limit_offset)
            self._failed_at = position
