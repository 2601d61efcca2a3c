"""Staged parts, and the files that have their batches: appended to, synced, read at positions, removed when nothing in
them is needed.

Not thread-safe: Staging holds the lock. `format.py` defines the bytes of a file. Knows no set.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.disk import Buffer, Disk, append_all
from broker.storage.linked import open_alone
from broker.storage.segment import SharedFile
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import (
    CRC_FROM,
    HEADER_SIZE,
    STAMPED_SIZE,
    Batch,
    BatchHeader,
    body_fault,
    header_at,
    read_header,
    stamp,
)
from kafkalog.format.producer_ids import family_of

STAGED_SUFFIX = ".staged"
PART_SUFFIX = ".part"
_NAME = re.compile(r"(\d{20})(?:-([0-9a-f]{32})-([0-9a-f]{16})\.part|\.staged)")


def staged_path(folder: Path, number: int, salt: int, part: bytes) -> Path:
    name = f"-{part.hex()}-{salt:016x}{PART_SUFFIX}" if part else STAGED_SUFFIX
    return folder / f"{number:020d}{name}"


def named(name: str) -> tuple[int, int, bytes] | None:
    """The number of a staged file by its name, and of a part's file its salt and the part's uuid (else 0 and nothing);
    None if it is none."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[3] or "0", 16), bytes.fromhex(match[2] or "")) if match else None


class StagedFile:
    """A file, and the reasons to keep it.

    Attributes:
        part: the uuid of the part of which alone it has batches, without frames; empty: it has frames.
        salt: of its frames' checksums. A part's file has it in its name.
        size: where the next bytes go.
        synced: bytes before it are known to be durable.
        changes: how often it was cut or replaced: a sync from before that says nothing of it.
        live: how many needed batches and prepared sets are in it.
        drops: numbers of the files with the sets whose drop is recorded in this one: without this file, a start would
            take those sets for prepared.
        ends: numbers of the files with anything of those sets, and of their parts.
        runs: (position, how many bytes had been staged here before: `Staging.staged_end`) of each place from which on
            this file alone was written to, until the next. Empty: it was made by an earlier process, or by another
            broker.
        replayed: of a copy, what is before it was replayed.
    """

    def __init__(self, disk: Disk, folder: Path, number: int, salt: int, part: bytes = b"") -> None:
        self._disk = disk
        self.path = staged_path(folder, number, salt, part)
        self.number = number
        self.part = part
        self.salt = salt
        self.size = self.synced = self.changes = self.live = self.replayed = 0
        self.runs: list[tuple[int, int]] = []
        self.drops: set[int] = set()
        self.ends: set[int] = set()
        self._file: SharedFile | None = None
        self._is_writable = False

    def create(self) -> None:
        self._file = SharedFile(self._disk, self._disk.create(self.path))
        self._is_writable = True

    @property
    def is_writable(self) -> bool:
        """Whether it is open to be appended to."""
        return self._is_writable

    def open_for_append(self, length: int | None = None) -> bool:
        """Go on with a file that an earlier process made, or that has become a segment too: then with a copy, of its
        first `length` bytes. Returns whether it is one, whose name is to be synced. Raises OSError."""
        if self._file is not None and self._is_writable and self._disk.name_count(self._file.fd) == 1:
            return False
        self.close()
        fd, is_copy = open_alone(self._disk, self.path, length)
        self._file = SharedFile(self._disk, fd)
        self._is_writable = True
        self.changes += is_copy
        return is_copy

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

    def reached(self, size: int) -> int:
        """What had been staged here when this file had so many bytes; -1: not known."""
        if not self.runs:
            return -1
        position, staged = self.runs[bisect_right(self.runs, size, key=itemgetter(0)) - 1]
        return staged + size - position

    def renumber(self, number: int) -> None:
        """Rename the file. Raises OSError."""
        path = staged_path(self.path.parent, number, self.salt, self.part)
        self._disk.rename(self.path, path)
        self.path, self.number = path, number

    def cut(self, size: int) -> bool:
        """Cut off what is behind a size; durable after the next sync. Returns as `open_for_append`."""
        is_copy = self.open_for_append(size)
        assert self._file is not None
        self._disk.truncate(self._file.fd, size)
        self.size, self.synced = size, 0
        self.changes += 1
        return is_copy

    def close_if_synced(self) -> None:
        """Close the file, unless a later sync has to learn of errors in writing back what was written here."""
        if self.synced >= self.size or not self._is_writable:
            self.close()

    @property
    def is_open(self) -> bool:
        return self._file is not None

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

    Attributes:
        renewed: by the monotonic clock, when it was added to last, or a task of its write was last known to run.
        file: to which its next batches go, alone; None: to the file that all parts share.
        early: batches, by number, that came before earlier ones: a follower copies several files side by side.
    """

    __slots__ = (
        "batch_id",
        "early",
        "file",
        "last_us",
        "length",
        "number",
        "places",
        "producer_id",
        "renewed",
        "sets",
        "uuid",
        "write",
    )

    def __init__(self, uuid: bytes, header: BatchHeader) -> None:
        self.uuid = uuid
        self.producer_id = header.producer_id
        self.batch_id = header.transaction_batch_id
        self.write = write_of(header.producer_id, header.transaction_batch_id)
        self.number = header.part
        self.places: list[Place] = []
        self.early: dict[int, Place] = {}
        self.file: StagedFile | None = None
        self.length = 0
        self.last_us = 0
        self.renewed = 0.0
        self.sets = 0  # prepared sets that it belongs to

    def add(self, place: Place, staged_us: int, now: float) -> None:
        self.places.append(place)
        self.length += place[2]
        self.last_us = max(self.last_us, staged_us)
        self.renewed = now
        place[0].live += 1

    def offer(self, number: int, place: Place, staged_us: int, now: float) -> None:
        """Add the batch with a number, once those before it are there. One that is there already stays as it is."""
        if number > len(self.places):
            if number not in self.early:
                self.early[number] = place
                place[0].live += 1
        elif number == len(self.places):
            self.add(place, staged_us, now)
            while (early := self.early.pop(len(self.places), None)) is not None:
                early[0].live -= 1
                self.add(early, staged_us, now)

    def by_file(self, wanted: Sequence[int]) -> Iterator[tuple[StagedFile, list[int]]]:
        """Numbers of batches, in order, parted by the files that have them."""
        for file, numbers in groupby(wanted, lambda number: self.places[number][0]):
            yield file, list(numbers)

    def files(self) -> set[StagedFile]:
        """Those with batches of it."""
        return {place[0] for place in (*self.places, *self.early.values())}

    def forget(self) -> None:
        """Nothing in its files is needed for it any more."""
        for place in (*self.places, *self.early.values()):
            place[0].live -= 1

    def lose(self, gone: Collection[StagedFile]) -> None:
        """Forget the batches in files that are gone. Those after the first of them wait for it."""
        first = next((number for number, place in enumerate(self.places) if place[0] in gone), len(self.places))
        self.early.update(enumerate(self.places[first:], first))
        self.length -= sum(place[2] for place in self.places[first:])
        del self.places[first:]
        for number, place in list(self.early.items()):
            if place[0] in gone:
                place[0].live -= 1
                del self.early[number]

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


def read_headers(part: Part, wanted: Sequence[int], read: Read) -> list[BatchHeader]:
    """The headers of batches of a part, by their numbers. Raises PartDamaged."""
    headers = []
    buffer = memoryview(bytearray(HEADER_SIZE))
    for number in wanted:
        file, position, length, crc = part.places[number]
        read(file, buffer, position)
        _unstamp(file, buffer, length)
        header = header_at(buffer)
        if header is None or (header.length, header.crc) != (length, crc):
            raise PartDamaged(f"batch {number} of part {part.number}: its header is not the one that was staged")
        headers.append(header)
    return headers


def _unstamp(file: StagedFile, batch: memoryview, length: int) -> None:
    """Make good, in memory, what a leader stamps into a part's file before that becomes a segment: a stop, a full disk,
    or a read amid it, may show it in part."""
    if file.part:
        batch[8:12] = length.to_bytes(4, "little")
        stamp(batch, 0, 0, 0)


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
            file, _, length, crc = part.places[number]
            _unstamp(file, data, length)
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
    _unstamp(part.places[number][0], data, len(data))
    try:
        header = read_header(data, 0, label)
        fault = body_fault(header, data)
    except CorruptBatch as error:
        raise PartDamaged(f"batch {number} of part {part.number}: {error.facts['reason']}") from None
    if fault or not part.is_whose(header) or header.base_sequence != number:
        raise PartDamaged(f"batch {number} of part {part.number}: {fault or 'it is another'}")
    return header
