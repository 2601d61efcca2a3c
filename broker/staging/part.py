"""Staged parts, and the files that have their batches: appended to, synced, read at positions, removed when nothing in
them is needed.

Not thread-safe: Staging holds the lock. `format.py` defines the bytes of a file. Knows no set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.disk import Buffer, Disk, append_all
from broker.storage.segment import SharedFile
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CRC_FROM, STAMPED_SIZE, Batch, BatchHeader, body_fault, read_header
from kafkalog.format.producer_ids import family_of

STAGED_SUFFIX = ".staged"


def staged_path(folder: Path, number: int) -> Path:
    return folder / f"{number:020d}{STAGED_SUFFIX}"


class StagedFile:
    """A file, and the reasons to keep it.

    Attributes:
        salt: of its frames' checksums.
        size: where the next bytes go.
        synced: bytes before it are known to be durable.
        live: how many needed batches and prepared sets are in it.
        drops: numbers of the files with the sets whose drop is recorded in this one: without this file, a start would
            take those sets for prepared.
        ends: numbers of the files with anything of those sets, and of their parts.
        begin: how many bytes had been staged here when it was made (`Staging.staged_end`); -1: it was made by an
            earlier process, or by another broker.
        replayed: of a copy, the frames before it were replayed.
    """

    def __init__(self, disk: Disk, folder: Path, number: int, salt: int) -> None:
        self._disk = disk
        self.path = staged_path(folder, number)
        self.number = number
        self.salt = salt
        self.size = self.synced = self.live = self.replayed = 0
        self.begin = -1
        self.drops: set[int] = set()
        self.ends: set[int] = set()
        self._file: SharedFile | None = None
        self._is_writable = False

    def create(self) -> None:
        self._file = SharedFile(self._disk, self._disk.create(self.path))
        self._is_writable = True

    def open_for_append(self) -> None:
        """Go on with a copy that an earlier process made."""
        if not self._is_writable:
            self.close()
            self._file = SharedFile(self._disk, self._disk.open(self.path, write=True))
            self._is_writable = True

    def share(self) -> SharedFile:
        """The open file, to be released by the caller."""
        if self._file is None:
            self._file = SharedFile(self._disk, self._disk.open(self.path))
        shared = self._file.share()
        assert shared, "who closes it forgets it"
        return self._file

    def append(self, buffers: Sequence[Buffer], length: int) -> int:
        """Write at the end; returns the position. Raises as `append_all`."""
        file = self._file
        assert file is not None
        position = self.size
        append_all(self._disk, file.fd, buffers, position)
        self.size = position + length
        return position

    def cut(self, size: int) -> None:
        """Cut off what is behind a size; durable after the next sync."""
        self.open_for_append()
        assert self._file is not None
        self._disk.truncate(self._file.fd, size)
        self.size, self.synced = size, 0

    def close(self) -> None:
        file, self._file, self._is_writable = self._file, None, False
        if file is not None:
            file.release()

    def remove(self) -> None:
        self.close()
        self._disk.unlink(self.path)


_CRCS = struct.Struct("<II")  # header_crc and crc, behind what is stamped
assert STAMPED_SIZE + _CRCS.size == CRC_FROM
_PIECE_BYTES = 1 << 20
"""What is read at once."""

Write = tuple[int, int]
"""What tasks stage one write for: the family of its transactions' producer ids, and the number of their batches. Its
parts may be in many partitions."""

Place = tuple[StagedFile, int, int, int]
"""Where a batch stands: file, position, length; and its checksum."""


def write_of(producer_id: int, batch_id: int) -> Write:
    """The write that a batch of a transaction belongs to."""
    return family_of(producer_id), batch_id


class Part:
    """The batches of a part, in order, and the number of sets that need them.

    `renewed`: by the monotonic clock, when it was added to last, or a task of its write was last known to run.
    """

    __slots__ = ("batch_id", "last_us", "length", "number", "places", "producer_id", "renewed", "sets", "uuid", "write")

    def __init__(self, uuid: bytes, header: BatchHeader) -> None:
        self.uuid = uuid
        self.producer_id = header.producer_id
        self.batch_id = header.transaction_batch_id
        self.write = write_of(header.producer_id, header.transaction_batch_id)
        self.number = header.part
        self.places: list[Place] = []
        self.length = 0
        self.last_us = 0
        self.renewed = 0.0
        self.sets = 0  # prepared sets that it belongs to

    def add(self, place: Place, staged_us: int, now: float) -> None:
        self.places.append(place)
        self.length += place[2]
        self.last_us = max(self.last_us, staged_us)
        self.renewed = now

    def is_whose(self, header: BatchHeader) -> bool:
        return (self.producer_id, self.batch_id, self.number) == (
            header.producer_id,
            header.transaction_batch_id,
            header.part,
        )


class PartDamaged(Exception):
    """A batch differs from what was staged; names the batch and the reason."""


Read = Callable[[StagedFile, memoryview, int], None]
"""Fills memory with bytes of a file from a position on."""


class ReadBuffer:
    """Memory into which parts are read, as large as the largest read so far."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def pieces(self, part: Part, wanted: Sequence[int], read: Read) -> Iterator[list[tuple[int, memoryview]]]:
        """Batches of a part by their numbers, with their bytes, some at a time; good until the next ones."""
        at = 0
        while at < len(wanted):
            count, length = _together(part.places, wanted, at)
            if length > len(self._memory):
                self._memory = memoryview(bytearray(max(length, min(part.length, _PIECE_BYTES))))
            file, start, *_ = part.places[wanted[at]]
            read(file, self._memory[:length], start)
            piece = []
            for number in wanted[at : at + count]:
                _, position, size, _ = part.places[number]
                piece.append((number, self._memory[position - start : position - start + size]))
            yield piece
            at += count


def read_batches(part: Part, wanted: Sequence[int], read: Read, label: str) -> Iterator[list[Batch]]:
    """Batches of a part by their numbers, some at a time; checked, writable, and good until the next ones.

    Raises:
        PartDamaged: at the first that is.
    """
    for piece in ReadBuffer().pieces(part, wanted, read):
        yield [(_checked(data, part, number, label), data) for number, data in piece]


def check_batches(part: Part, wanted: Sequence[int], read: Read, buffer: ReadBuffer) -> None:
    """Check that batches of a part are as they were staged. All else about them was checked when they arrived.

    Raises:
        PartDamaged: at the first that differs.
    """
    for piece in buffer.pieces(part, wanted, read):
        for number, data in piece:
            crc = part.places[number][3]
            header_crc, crc_there = _CRCS.unpack_from(data, STAMPED_SIZE)
            if crc32c(data[:STAMPED_SIZE]) != header_crc:
                raise PartDamaged(f"batch {number} of part {part.number}: its header's checksum does not match")
            if crc32c(data[CRC_FROM:]) != crc or crc_there != crc:
                raise PartDamaged(f"batch {number} of part {part.number}: its checksum does not match")


def _together(places: Sequence[Place], wanted: Sequence[int], at: int) -> tuple[int, int]:
    """How many of the wanted batches, from one on, are to be read at once, and how many bytes that is."""
    file, start, length, _ = places[wanted[at]]
    end, count = start + length, 1
    for number in wanted[at + 1 :]:
        next_file, position, length, _ = places[number]
        if next_file is not file or position + length - start > _PIECE_BYTES:
            break
        end, count = position + length, count + 1
    return count, end - start


def _checked(data: memoryview, part: Part, number: int, label: str) -> BatchHeader:
    try:
        header = read_header(data, 0, label)
        fault = body_fault(header, data)
    except CorruptBatch as error:
        raise PartDamaged(f"batch {number} of part {part.number}: {error.facts['reason']}") from None
    if fault or not part.is_whose(header) or header.base_sequence != number:
        raise PartDamaged(f"batch {number} of part {part.number}: {fault or 'it is another'}")
    return header
