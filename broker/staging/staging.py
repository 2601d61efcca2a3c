"""The staged parts of one partition, beside its log: parts of batches that are not decided yet.

    <partition's folder>/staging/%020d.staged                files of `format.py`, appended to one after the other
    <partition's folder>/staging/%020d-<uuid>-<salt>.part    batches of one part alone, appended to beside those
    <partition's folder>/staging/complete                    there while no set lacks that the log may have half of

A task stages a part, batch by batch (`stage`); the ack means that the operating system has it. The first `_OWN_FROM`
bytes of a part go to the file that all share, what comes after them to files of its own: once the set is decided, these
become segments of the log as they are (`pieces`, `Log.adopt`), and are not written a second time. A coordinator has the
parts of its batch prepared as one set (`prepare`). From the ack on they are durable, and kept until the set is dropped
(`drop`), which is recorded in the file too. Parts that are never prepared are forgotten (`abort`, `expire`). After a
restart they may be there again, and are forgotten again. Ages are by the monotonic clock, counted from the restart, so
a jump of the wall clock has no effect.

Files are numbered by the leader epoch in which they were made, and within it. Only the leader of that epoch writes to
them, and only at the end, so the copies of two replicas can differ in nothing but their length. A follower copies the
bytes of the files that its leader has, in their order (`copy`), and removes or cuts what its leader does not have
(`keep_only`): the end of a copy may record a drop, or a batch, that only an old leader knew. It decides nothing itself,
and knows what a start would know of its files. What was acknowledged is whole in every copy of the in-sync set.

A file with frames is closed at 64 MiB, and at 64 MiB more for each 256 files there are; a part's own at
`segment.bytes`. Files are removed once nothing in them is needed, as is the active file when it has `_WASTE_MAX` bytes
of which none is needed. Until then a part's file that has become a segment has two names, one here and one in the log.
After a restart existing files are not appended to. A start reads all files: a part counts up to its first missing or
damaged batch, and a set with an incomplete part is lost.

Damage may also have cost a set of which nothing is known any more. A start that finds such damage removes the file
`complete` before any other, and one that does not find `complete`, as after a removal of the folder by hand, cannot
rely on the sets that it found either (`may_lack_sets`). The file is made again by `note_complete`.

Threads: `_lock` guards all that changes. `_sync_lock` comes before it and lets one sync run at a time while others
stage; the directory's flusher threads sync before `prepare` does.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from fastcrc.crc32 import iscsi as crc32c

from broker.staging.copies import Lacking, StagedCopy, StagedPiece, agreed_copies
from broker.staging.format import (
    BATCH,
    DROPPED,
    FILE_START,
    FRAME_SIZE,
    PREPARED,
    Frame,
    PartSpec,
    PreparedSet,
    UnreadableFile,
    encode_set,
    file_start,
    frame,
    is_cut_short,
    is_part_cut_short,
    salt_of,
    scan_file,
    scan_part,
)
from broker.staging.part import (
    Part,
    PartDamaged,
    ReadBuffer,
    StagedFile,
    Write,
    check_batches,
    named,
    read_batches,
    read_headers,
    write_of,
)
from broker.storage.checkpoint import TEMPORARY
from broker.storage.disk import Buffer, TruncateFailed, is_missing, is_of_a_name, passes
from broker.storage.disk_errors import DiskErrors
from broker.storage.flusher import FlushTask
from broker.storage.segment import FileSlice
from broker.storage.services import Services
from kafkalog.errors import Closed, DiskFull, FileRefused, InvalidRequest, StagedOutOfOrder, StagedPartLost
from kafkalog.events import get_logger
from kafkalog.format.batch import Batch, BatchHeader

log = get_logger(__name__)

STAGING = "staging"
"""The folder within the partition's."""
COMPLETE = "complete"
"""A file in it; see above."""
_FILE_BYTES = 64 << 20
_OWN_FROM = 8 << 20
"""Bytes of a part after which it gets files of its own: a file costs as much as writing a megabyte or two."""
_OWN_MAX = 256
"""Files of parts in a partition. More parts than that go on in the file that all share: leader and follower name all
files in each fetch that copies any of them."""
_ADOPTED_MIN = 32 << 20
"""Smaller files are copied into the log, so that it does not come to consist of small segments."""
_BATCH_MIN = 256 << 10
"""So are files whose batches are smaller on average: the log's lock is held while each gets its stamp, and the pages of
these are synced. 5,000 batches of 50 KB took 0.13 s."""
_EPOCH_BITS = 32
"""Of a file's number, those below the leader epoch."""
_PIECES_MAX = 1000  # that a follower gets at once
_WASTE_MAX = 8 << 20
_SYNC_AHEAD_BYTES = 8 << 20
_SYNC_AHEAD_FILES = 32
"""Files opened to be written to, after which they are synced, too: a sync closes them."""
_CHECK_LASTS_SECONDS = 10.0
"""A set that was found undamaged is not read again for so long: an apply comes right after the check by `prepare`."""


class _Dropped(Exception):
    """The set to be read was dropped meanwhile, and its file is removed."""


class _Set:
    """A prepared set. `parts`: those that exist; `files`: those with its prepared frames; `lost`: why it cannot be
    applied; `logged`: the loss was logged."""

    __slots__ = ("checked", "counted", "files", "length", "logged", "lost", "parts", "prepared", "renewed", "staged_us")

    def __init__(self, prepared: PreparedSet, parts: list[Part], staged_us: int, now: float) -> None:
        self.prepared = prepared
        self.length = sum(part.length for part in prepared.parts)
        self.parts = parts
        self.staged_us = staged_us
        self.renewed = now
        self.files: list[StagedFile] = []
        self.lost: str | None = None
        self.logged = False
        self.checked: float | None = None  # when all of it was last found undamaged
        self.counted = {True: 0, False: 0}  # bytes already counted by checks: for prepares, and for applies


class WholeFile(NamedTuple):
    """Batches of a set that are all of a file, one after the other: it can become a segment (`Log.adopt`).

    Attributes:
        headers: as they are in the file.
        copies: the same batches, as `Staging.pieces` gives those of other files.
    """

    path: Path
    headers: list[BatchHeader]
    copies: Iterator[list[Batch]]

    @property
    def length(self) -> int:
        return sum(header.length for header in self.headers)


class Staged(NamedTuple):
    """Staged data of a transaction's batch: a prepared set, or all parts that are in none (`prepared` None).

    `staged_us`: when the newest of it came, by the wall clock. `renewed`: by the monotonic one, when it was prepared,
    or when a task of its write was last known to run; the broker's start, if that came later. `lost`: why the set
    cannot be applied.
    """

    producer_id: int
    batch_id: int
    prepared: PreparedSet | None
    parts: int
    length: int
    staged_us: int
    renewed: float
    lost: str | None = None

    @property
    def write(self) -> Write:
        return write_of(self.producer_id, self.batch_id)


class Staging:
    """The staged data of a partition. Thread-safe.

    Args:
        folder: the partition's; the staging folder in it is made when something is staged.
        label: the partition, as errors name it.
        segment_bytes: the topic's segment.bytes.

    Raises:
        StorageFailed: the directory is out of service from now on.
        FileRefused, DiskFull: it cannot be opened; to be tried again.
    """

    def __init__(self, services: Services, folder: Path, label: str, segment_bytes: Callable[[], int]) -> None:
        self.label = label
        self._segment_bytes = segment_bytes
        self._services = services
        self._disk = services.disk
        self._clock = services.clock
        self._errors = DiskErrors(services.health, label, folder)
        self._sync_task = FlushTask(label, self.sync)
        self._folder = folder / STAGING
        self._lock = threading.Lock()  # guards all below
        self._sync_lock = threading.Lock()  # one sync at a time; before _lock
        self._closed = False
        self._sync_asked = False
        self.synced_bytes = 0  # since the start; grows with each file
        self.checked_bytes = 0  # since the start; see `check`
        self._names_made = self._names_synced = 0  # files made, and those whose names are durable
        self._drops_made = self._drops_synced = 0  # sets dropped, and those whose drop is durable
        # sets whose end could not be recorded for lack of space, and their files
        self._unrecorded_drops: dict[bytes, list[StagedFile]] = {}
        self._has_folder = False
        self._files: dict[int, StagedFile] = {}
        self._unreadable: dict[int, StagedFile] = {}  # found by the start, and kept: they may be needed
        self._removed: set[int] = set()  # numbers of removed files that a power cut may restore
        self._next_number = 0
        self.staged_end = 0
        """Bytes staged here since the start: the place in what followers copy."""
        self._unsynced = 0  # bytes written since the last sync, here or with copies
        self._opened = 0  # files opened to be written to since then
        self._has_unsynced_set = False  # a set came with a copy, or with the files of an earlier process
        self._is_stale = False  # what is known is not what the files say
        self._gone: list[StagedFile] = []  # copies removed since it was known what the files say
        self._written = 0.0  # when something was written last
        self._active: StagedFile | None = None  # with frames
        self._written_to: StagedFile | None = None  # last
        self._parts: dict[bytes, Part] = {}
        self._sets: dict[bytes, _Set] = {}
        self.may_lack_sets = True
        """Sets may have been prepared here that are not known any more: a start found damage outside of parts, or no
        file `complete`; until `note_complete`."""
        self._damaged = False  # found by the start
        self._lost_frames = False  # the start found damage that may have cost what was acknowledged
        try:
            self._open()
        except OSError as error:
            self._errors.refuse_to_open(error, "opening what is staged")

    # --- starting ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            names = self._disk.names(self._folder)
        except FileNotFoundError:
            return
        self._has_folder = True
        self._drops_made = 1  # as for names: a set may have been dropped just before a kill
        for name in names:
            if name.endswith(TEMPORARY):
                self._disk.unlink(self._folder / name)
        self._find_files(names)
        numbers = sorted(self._files)
        self._replay_files()
        self._next_number = numbers[-1] + 1 if numbers else 0  # a new epoch begins with its own numbers
        self._names_made = 1  # the process that made them may have ended before the sync
        self.may_lack_sets = self._damaged or COMPLETE not in names
        if self._damaged and COMPLETE in names:
            self._disk.unlink(self._folder / COMPLETE)
        if self._files:
            # For removals before a kill, on which `_remove_dead` counts; and that of COMPLETE precedes those here.
            self._disk.sync_dir(self._folder)
        self._remove_dead()

    def _find_files(self, names: list[str]) -> None:
        """A power cut may restore a file that was removed, beside another that has its number by now: it gets another
        number."""
        found = [
            StagedFile(self._disk, self._folder, number, salt, part)
            for number, salt, part in sorted(filter(None, map(named, names)))
        ]
        self._files = {file.number: file for file in found}
        for file in found:
            if self._files[file.number] is not file:
                file.renumber(max(self._files) + 1)
                self._files[file.number] = file

    def _replay_files(self) -> None:
        """Know what the files say, and nothing else."""
        self._parts, self._sets, self._unrecorded_drops = {}, {}, {}
        self._active = None
        for file in self._files.values():
            file.live = 0
            file.drops, file.ends = set(), set()
        for _, file in sorted(self._files.items()):
            if file.part:
                self._read_part_file(file)
            else:
                self._read_file(file)
        for known in self._sets.values():
            # Logged only when the set is used: a power cut may restore a dropped set without its parts.
            known.lost = self._fault_of(known.prepared)
        self._has_unsynced_set = bool(self._sets)
        self._is_stale = False
        self._gone.clear()

    def _read_file(self, file: StagedFile) -> None:
        fd = self._disk.open(file.path)
        try:
            file.size = self._disk.size(fd)
            if file.size >= FILE_START.size:
                file.salt = salt_of(self._disk.read(fd, FILE_START.size, 0)) or 0
            end = min(FILE_START.size, file.size)

            def read(position: int, length: int) -> bytes | memoryview:
                return self._disk.read(fd, length, position)

            for found in scan_file(read, file.size):
                skipped = found.position - FRAME_SIZE > end
                self._damaged |= skipped or (found.kind == PREPARED and found.fault is not None)
                self._lost_frames |= skipped or found.fault is not None
                end = found.position + found.length
                self._replay(file, found)
            self._damaged |= end < file.size  # torn by a stop, or damaged
            self._lost_frames |= end < file.size and not is_cut_short(read, file.size, end)
            file.replayed = end
        except UnreadableFile as error:
            self._damaged = self._lost_frames = True
            self._unreadable[file.number] = self._files.pop(file.number)
            log.error("staged_damage_found", partition=self.label, file=str(file.path), position=0, bytes=file.size,
                      reason=str(error))  # fmt: skip
        finally:
            self._disk.close(fd)

    def _read_part_file(self, file: StagedFile) -> None:
        fd = self._disk.open(file.path)
        try:
            file.size = self._disk.size(fd)

            def read(position: int, length: int) -> bytes:
                return self._disk.read(fd, length, position)

            self._replay_part(file, read, 0)
            self._lost_frames |= file.replayed < file.size and not is_part_cut_short(read, file.size, file.replayed)
        finally:
            self._disk.close(fd)

    def _replay_part(self, file: StagedFile, read: Callable[[int, int], bytes], from_position: int) -> None:
        """Know the batches of a part's file from a position on."""
        file.replayed = from_position
        for position, header, fault in scan_part(read, file.size, from_position):
            file.replayed = position + header.length
            if fault is not None:
                self._lost_frames = True
                log.error("staged_damage_found", partition=self.label, file=str(file.path), position=position,
                          bytes=header.length, reason=fault)  # fmt: skip
                continue
            part = self._parts.get(file.part)
            if part is None:
                part = self._parts[file.part] = Part(file.part, header)
            if part.is_whose(header):
                part.offer(header.base_sequence, (file, position, header.length, header.crc), 0, self._now())

    def _replay(self, file: StagedFile, found: Frame) -> None:
        if found.fault is not None:
            log.error("staged_damage_found", partition=self.label, file=str(file.path), position=found.position,
                      bytes=found.length, reason=found.fault)  # fmt: skip
        elif found.kind == BATCH:
            assert found.header is not None
            part = self._parts.get(found.uuid)
            if part is None:
                part = self._parts[found.uuid] = Part(found.uuid, found.header)
            if part.is_whose(found.header):
                place = file, found.position, found.length, found.header.crc
                part.offer(found.number, place, found.staged_us, self._now())
        elif found.kind == PREPARED:
            assert found.prepared is not None
            self._keep(found.prepared, file, found.staged_us)
        elif found.kind == DROPPED and found.uuid in self._sets:
            self._forget_set(found.uuid, file)

    def _fault_of(self, prepared: PreparedSet) -> str | None:
        """What is wrong with the parts of a set, or None."""
        return next(filter(None, (self._fault(spec, prepared) for spec in prepared.parts)), None)

    def _fault(self, spec: PartSpec, prepared: PreparedSet) -> str | None:
        """What is wrong with a part of a set, or None."""
        part = self._parts.get(spec.uuid)
        if part is None:
            return f"part {spec.part} is not staged here"
        if (part.producer_id, part.batch_id, part.number) != (prepared.producer_id, prepared.batch_id, spec.part):
            return f"part {spec.part} belongs to another write"
        if (len(part.places), part.length) != (spec.batches, spec.length):
            return f"part {spec.part} has only {len(part.places)} of its {spec.batches} batches"
        return None

    def _lost_error(self, known: _Set) -> StagedPartLost:
        """The error for a use of a lost set; logged at the first call for the set."""
        assert known.lost is not None
        if not known.logged:
            known.logged = True
            log.error("staged_part_lost", partition=self.label, commit=known.prepared.commit_uuid.hex(),
                      reason=known.lost)  # fmt: skip
        return self.lost(known.prepared, known.lost)

    # --- what it holds -------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of its files. Takes no lock, because the lock is held during writes and the caller must not wait."""
        return sum(file.size for file in list(self._files.values()))

    def may_lack_acknowledged(self, may_have_lost: bool) -> bool:
        """Whether something acknowledged may be missing after a start: by damage other than the end of a write that was
        cut short, or by the loss of what was not synced.

        Args:
            may_have_lost: the machine may have lost that.
        """
        return self._lost_frames or (may_have_lost and self._has_folder)

    def prepared(self, commit_uuid: bytes) -> PreparedSet | None:
        """The prepared set of a commit."""
        with self._lock:
            known = self._sets.get(commit_uuid)
            return known.prepared if known is not None else None

    def prepared_bytes(self, commit_uuid: bytes) -> int:
        """The size of a prepared set, 0 if there is none."""
        with self._lock:
            known = self._sets.get(commit_uuid)
            return known.length if known is not None else 0

    def may_hold(self, commit_uuid: bytes, number: int, batch: int, crc: int) -> bool:
        """Whether a batch of a part, with that checksum, may belong to a set, as far as is known."""
        with self._lock:
            known = self._sets.get(commit_uuid)
            if known is None or not any(spec.part == number and batch < spec.batches for spec in known.prepared.parts):
                return False
            here = [part.places for part in known.parts if part.number == number and batch < len(part.places)]
            return not here or here[0][batch][3] == crc

    def note_complete(self) -> None:
        """Record that the log has no half of a batch whose set is not known. Raises StorageFailed, Closed."""
        with self._lock:
            self._check_usable()
            try:
                if self._has_folder:
                    self._make_complete()
            except OSError as error:
                if passes(error) or is_of_a_name(error):
                    return  # as for lack of space, or in a folder that was removed; asked for again
                self._errors.fail(error, "noting that all sets are known")
            self.may_lack_sets = False

    def producer_ids(self) -> set[int]:
        """The producer ids of the prepared sets."""
        with self._lock:
            return {known.prepared.producer_id for known in self._sets.values()}

    def staged(self) -> list[Staged]:
        """All staged data: sets first, then parts that are in none."""
        if not self._parts and not self._sets:  # nearly always, and a broker has thousands
            return []
        with self._lock:
            found = [
                Staged(known.prepared.producer_id, known.prepared.batch_id, known.prepared, len(known.prepared.parts),
                       known.length, known.staged_us, known.renewed, known.lost)
                for known in self._sets.values()
            ]  # fmt: skip
            loose: dict[Write, list[Part]] = {}
            for part in self._parts.values():
                if not part.sets:
                    loose.setdefault((part.producer_id, part.batch_id), []).append(part)
        for (producer_id, batch_id), parts in loose.items():
            length, staged_us = sum(part.length for part in parts), max(part.last_us for part in parts)
            renewed = max(part.renewed for part in parts)
            found.append(Staged(producer_id, batch_id, None, len(parts), length, staged_us, renewed))
        return found

    # --- staging -------------------------------------------------------------------------------------------------

    def stage(self, uuid: bytes, batches: Sequence[Batch]) -> tuple[int, int]:
        """Write the batches of a part that are not there yet.

        Args:
            uuid: of the part.
            batches: header and bytes of each, checked by the caller.

        Returns:
            How many batches the part has now, and how many bytes they have.

        Raises:
            StagedOutOfOrder: an earlier batch of the part is missing; nothing was written.
            InvalidRequest: they are not all of one part, or the part is prepared and has all of its batches.
            DiskFull, StorageFailed, Closed.
        """
        with self._lock:
            self._check_usable()
            part = self._parts.get(uuid) or Part(uuid, batches[0][0])
            new = self._new_batches(part, batches)
            if new:
                if part.sets:
                    raise InvalidRequest(reason=f"part {part.number} for {self.label} is prepared and cannot grow")
                now_us = self._clock.now_us()
                own = self._own_file(part, new)
                if own is not None:
                    file, position, between = own, self._append_own(own, new), 0
                else:
                    file, position = self._write(
                        [(BATCH, header.base_sequence, uuid, header.crc, data) for header, data in new], now_us
                    )
                    between = FRAME_SIZE
                for header, data in new:
                    part.add((file, position, len(data), header.crc), now_us, self._written)
                    position += len(data) + between
                self._parts[uuid] = part
                self._ask_sync_ahead()
            return len(part.places), part.length

    def _new_batches(self, part: Part, batches: Sequence[Batch]) -> list[Batch]:
        new: list[Batch] = []
        for header, data in batches:
            if not part.is_whose(header):
                raise InvalidRequest(reason=f"batches of another part were sent for part {part.number} of {self.label}")
            expected = len(part.places) + len(new)
            if header.base_sequence > expected:
                raise StagedOutOfOrder(
                    part=part.number, partition=self.label, sequence=header.base_sequence, expected=expected
                )
            if header.base_sequence == expected:
                new.append((header, data))
        return new

    def _write(self, frames: Iterable[tuple[int, int, bytes, int, Buffer]], now_us: int) -> tuple[StagedFile, int]:
        """Write frames (kind, number, uuid, crc, payload) at once; returns the file, and the position of the first
        payload."""
        frames = list(frames)
        length = sum(FRAME_SIZE + len(data) for _, _, _, _, data in frames)
        file = self._file_for(length)
        buffers: list[Buffer] = [] if file.size else [file_start(file.salt)]
        start = sum(map(len, buffers))
        for kind, number, uuid, crc, data in frames:
            buffers += (frame(file.salt, kind, len(data), number, uuid, now_us, crc), data)
        return file, self._append(file, buffers, start + length) + start + FRAME_SIZE

    def _own_file(self, part: Part, batches: Sequence[Batch]) -> StagedFile | None:
        """The file of a part alone that the next batches go to; None: they go to the one that all share."""
        segment_bytes = self._segment_bytes()
        if part.length < _OWN_FROM or segment_bytes < _ADOPTED_MIN:
            return None
        file = part.file
        if file is not None and self._files.get(file.number) is not file:  # empty, for lack of room, and removed
            file = None
        length = sum(len(data) for _, data in batches)
        if file is not None and (not file.size or file.size + length <= segment_bytes):
            return file
        if sum(1 for each in self._files.values() if each.part) >= _OWN_MAX:
            part.file = None
            return None
        part.file = self._new_file(secrets.randbits(64), part.uuid)
        if file is not None:
            self._close_idle(file)
        return part.file

    def _append_own(self, file: StagedFile, batches: Sequence[Batch]) -> int:
        """Write batches to a part's own file; returns the position of the first."""
        self._open_for_append(file)
        return self._append(file, [data for _, data in batches], sum(len(data) for _, data in batches))

    def _open_for_append(self, file: StagedFile) -> None:
        """Open a part's file, or a copy, again: a sync has closed it, or it has become a segment too. Raises DiskFull,
        StorageFailed, FileRefused."""
        self._opened += not file.is_writable
        try:
            self._names_made += file.open_for_append()
        except OSError as error:
            self._refuse(error, "opening a staged file")

    def _append(self, file: StagedFile, buffers: list[Buffer], length: int) -> int:
        """Write at the end of a file; returns the position."""
        try:
            position = file.append(buffers, length)
        except TruncateFailed as error:
            self._errors.fail(error, "cutting off what was staged in part")
        except OSError as error:
            self._errors.refuse(error, "staging")
        if self._written_to is not file:
            self._written_to = file
            file.runs.append((position, self.staged_end))
        self._written = self._now()
        self.staged_end += length
        self._unsynced += length
        return position

    def _close_idle(self, file: StagedFile) -> None:
        """Lock held: close a file until it is next used, unless a sync is to do that. A write may have thousands, and
        be decided hours later."""
        if file is not self._active:
            file.close_if_synced()

    def _file_for(self, length: int) -> StagedFile:
        """The file to write to, a new one if that is full."""
        active = self._active
        # Their number grows with the root of the bytes.
        largest = _FILE_BYTES * (1 + len(self._files) // _OWN_MAX)
        if active is not None and (not active.size or active.size + length <= largest):
            return active
        self._active = self._new_file(secrets.randbits(64))
        if active is not None:
            self._close_idle(active)
        return self._active

    def _new_file(self, salt: int, part: bytes = b"") -> StagedFile:
        """A file with the next number. Raises DiskFull, StorageFailed."""
        file = self._created(self._next_number, salt, part)
        file.runs.append((0, self.staged_end))
        self._written_to = file
        self._next_number += 1
        self._files[file.number] = file
        return file

    def _created(self, number: int, salt: int, part: bytes) -> StagedFile:
        """A new file, also on disk. Raises DiskFull, StorageFailed."""
        file = StagedFile(self._disk, self._folder, number, salt, part)
        try:
            if not self._has_folder:
                self._make_folder()
            file.create()
        except OSError as error:
            self._refuse(error, "making a staged file")
        self._names_made += 1
        self._opened += 1
        return file

    def _make_folder(self) -> None:
        """Once only: a folder that is missing later was removed by hand. Its name is durable before anything is staged
        in it, so that after a loss of power it is known whether something was."""
        try:
            self._disk.make_dir(self._folder)
        except FileExistsError:  # made by a call that failed after it
            pass
        self._disk.sync_dir(self._folder.parent)
        if not self.may_lack_sets:
            self._make_complete()
        self._has_folder = True

    def _make_complete(self) -> None:
        try:
            self._disk.close(self._disk.create(self._folder / COMPLETE))
        except FileExistsError:
            pass

    def _now(self) -> float:
        return self._clock.monotonic()

    # --- copies ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Write to new files from now on, whose numbers are those of a leader epoch. What is staged counts as renewed:
        its tasks may have talked to another leader until now. Raises StorageFailed, DiskFull, Closed."""
        with self._lock:
            self._replay_if_stale()
            self._active = None
            self._next_number = max(self._next_number, epoch << _EPOCH_BITS)
            now = self._now()
            for part in self._parts.values():
                part.renewed, part.file = now, None
            for known in self._sets.values():
                known.renewed = now
            self._remove_dead()

    def copies(self) -> list[StagedCopy]:
        """The files, the oldest first."""
        if not self._files:
            return []
        with self._lock:
            return self._copies()

    def _copies(self) -> list[StagedCopy]:
        return [StagedCopy(file.number, file.salt, file.size, file.part) for _, file in sorted(self._files.items())]

    def end_epoch(self) -> None:
        """Another replica may lead from now on. It may have what was forgotten here without a record."""
        self._is_stale = True

    def lacking(self, copies: Sequence[StagedCopy], max_bytes: int) -> Lacking:
        """What a follower lacks that has these copies; of the pieces at most so many bytes."""
        if not self._files and not copies:
            return Lacking(self.staged_end, None, [])
        pieces: list[StagedPiece] = []
        with self._lock:
            here = self._copies()
            kept = agreed_copies(here, copies)
            sizes = {copy.number: copy.size for copy in kept}
            reached, left = self.staged_end, max_bytes
            for _, file in sorted(self._files.items()):
                size = sizes.get(file.number, 0)
                if size < file.size:
                    reached = min(reached, file.reached(size))
                    if left >= FILE_START.size and len(pieces) < _PIECES_MAX:  # the start of a file is read whole
                        pieces.append(StagedPiece(file, size, min(left, file.size - size)))
                        left -= pieces[-1].length
        if kept == sorted(copies):
            return Lacking(reached, None, pieces)
        return Lacking(-1, here, pieces)

    def slice(self, piece: StagedPiece) -> FileSlice | None:
        """A piece as it stands in its file; None if the file was removed. Raises StorageFailed, DiskFull, Closed."""
        with self._lock:
            self._check_usable()
            if self._files.get(piece.file.number) is not piece.file:
                return None
            try:
                shared = piece.file.share()
                self._close_idle(piece.file)  # the slice has its share
            except OSError as error:
                self._refuse(error, "opening a staged file")
        return FileSlice(
            self._disk,
            shared,
            piece.file.number,
            piece.position,
            piece.length,
            lambda error: self._refuse(error, "reading what is staged"),
        )

    def copy(self, number: int, salt: int, part: bytes, position: int, data: Buffer) -> None:
        """Write bytes of a leader's file at the end of the copy here, and replay them.

        Args:
            salt, part: of a part's file; without a part it has frames.

        Raises:
            InvalidRequest: the copy does not end there.
            DiskFull, StorageFailed, Closed.
        """
        with self._lock:
            self._check_usable()
            file = self._files.get(number)
            if position != (0 if file is None else file.size):
                reason = f"staged file {number} of {self.label} has {file.size if file else 0} bytes, not {position}"
                raise InvalidRequest(reason=reason)
            if file is None:
                file = self._make_copy(number, salt, part, data)
            self._open_for_append(file)
            try:
                file.append([data], len(data))
            except TruncateFailed as error:
                self._errors.fail(error, "cutting off what was copied in part")
            except OSError as error:
                self._refuse(error, "copying what is staged")
            self._written = self._now()
            self._unsynced += len(data)
            self._replay_copy(file)
            self._ask_sync_ahead()

    def _make_copy(self, number: int, salt: int | None, part: bytes, data: Buffer) -> StagedFile:
        salt = salt if part else salt_of(memoryview(data))
        if salt is None:
            raise InvalidRequest(reason=f"the beginning of staged file {number} of {self.label} is not one")
        if (unreadable := self._unreadable.pop(number, None)) is not None:  # it has the name
            self._remove_copy(unreadable)
        file = self._created(number, salt, part)
        self._next_number = max(self._next_number, number + 1)
        self._files[number] = file
        return file

    def _replay_copy(self, file: StagedFile) -> None:
        """Replay what is whole now of a copy."""
        shared = file.share()

        def read(position: int, length: int) -> bytes:
            return self._disk.read(shared.fd, length, position)

        found: list[Frame] = []
        try:
            if file.part:
                self._replay_part(file, read, file.replayed)
            else:
                found = list(scan_file(read, file.size, file.replayed, is_growing=True))
        except OSError as error:
            self._errors.refuse(error, "reading what was copied")
        finally:
            shared.release()
        if file.part:
            self._note_grown(file.part)
        for each in found:
            self._replay(file, each)
            file.replayed = each.position + each.length
            if each.kind == PREPARED and (known := self._sets.get(each.uuid)) is not None:
                known.lost = self._fault_of(known.prepared)
                self._has_unsynced_set = True

    def _note_grown(self, uuid: bytes) -> None:
        """A part has got batches of which a set may know already."""
        part = self._parts.get(uuid)
        if part is not None and part.sets:
            self._has_unsynced_set = True
            self._look_at_sets_of(part)

    def _look_at_sets_of(self, part: Part) -> None:
        """Know whether the sets of a part are whole, which has got batches or lost some."""
        for known in self._sets.values():
            if part in known.parts:
                known.lost = self._fault_of(known.prepared)

    def keep_only(self, copies: Iterable[StagedCopy]) -> None:
        """Remove and cut the copies of what a leader does not have (any more), and those that cannot be read here. What
        follows from the files that are left is known after `sync_copies`. Raises StorageFailed, DiskFull, Closed."""
        with self._lock:
            self._check_usable()
            here = self._copies()
            sizes = {copy.number: copy.size for copy in agreed_copies(copies, here)}
            gone = [file for file in self._files.values() if file.number not in sizes]
            for file in gone:
                del self._files[file.number]
            # Before anything is copied next: the leader may have these batches in another file, and one that a part has
            # stays as it is.
            self._lose_batches_in({file for file in gone if file.part and file.live})
            self._gone += [file for file in gone if not file.part]
            for file in (*gone, *self._unreadable.values()):
                self._remove_copy(file)
            self._unreadable.clear()
            for file in self._files.values():
                if sizes[file.number] < file.size:
                    self._is_stale = True
                    self._cut_copy(file, sizes[file.number])

    def _cut_copy(self, file: StagedFile, size: int) -> None:
        try:
            self._names_made += file.cut(size)
        except OSError as error:
            self._refuse(error, "cutting a copy of a staged file")

    def _replay_if_stale(self) -> None:
        """Raises StorageFailed, FileRefused, DiskFull: to be called again."""
        # Of what is not needed here either, as after the end of a transaction, nothing follows.
        if self._is_stale or any(file.live or file.ends & self._files.keys() for file in self._gone):
            self._is_stale = True
            try:
                self._replay_files()
            except OSError as error:
                self._refuse(error, "reading what is staged")
        self._gone.clear()

    def _lose_batches_in(self, gone: Collection[StagedFile]) -> None:
        """Know that files of parts are gone. Nothing else follows from these than the batches of their parts, so that
        nothing has to be read: all that is staged may take longer than the in-sync set waits."""
        for uuid in {file.part for file in gone} & self._parts.keys():
            part = self._parts[uuid]
            part.lose(gone)
            if part.sets:
                self._look_at_sets_of(part)
            elif not part.files():
                del self._parts[uuid]

    def _remove_copy(self, file: StagedFile) -> None:
        try:
            file.remove()
        except FileNotFoundError:
            pass
        except OSError as error:
            self._errors.fail(error, "removing a staged file")
        self._removed.add(file.number)
        self._names_made += 1  # the next sync keeps it removed, too

    def sync_copies(self) -> None:
        """Know what the copies say, and make the sets in them durable, with their parts. Raises StorageFailed,
        FileRefused, DiskFull, Closed."""
        if self._is_stale or self._gone:
            with self._lock:
                self._check_usable()
                self._replay_if_stale()
        if self._has_unsynced_set:
            self._has_unsynced_set = False
            try:
                self.sync()
            except BaseException:
                self._has_unsynced_set = True
                raise

    # --- prepared sets -------------------------------------------------------------------------------------------

    def prepare(self, prepared: PreparedSet, is_over: Callable[[], bool]) -> None:
        """Record a set of parts, to be kept until it is dropped; durable after `sync`.

        If the set is prepared already, only a newer version is recorded.

        Args:
            is_over: whether the log has its batch; called with the lock held. If so, it came from another set, and this
                one is not recorded, because it cannot be decided any more.

        Raises:
            StagedPartLost: a part is missing, short, or another's.
            InvalidRequest: the commit uuid is that of another set.
            DiskFull, StorageFailed, Closed.
        """
        with self._lock:
            self._check_usable()
            known = self._sets.get(prepared.commit_uuid)
            if known is None and is_over():
                return
            if known is not None and known.prepared._replace(version=prepared.version) != prepared:
                raise InvalidRequest(reason=f"commit {prepared.commit_uuid.hex()} of {self.label} has another set")
            for spec in prepared.parts:
                fault = self._fault(spec, prepared)
                if fault is not None:
                    raise self.lost(prepared, fault) if known is None else self._lost_error(known)
            if known is not None and known.prepared.version >= prepared.version:
                return
            now_us = self._clock.now_us()
            data = encode_set(prepared)
            file, _ = self._write([(PREPARED, 0, prepared.commit_uuid, crc32c(data), data)], now_us)
            self._keep(prepared, file, now_us)

    def _keep(self, prepared: PreparedSet, file: StagedFile, now_us: int) -> None:
        known = self._sets.get(prepared.commit_uuid)
        if known is None:
            parts = [self._parts[spec.uuid] for spec in prepared.parts if spec.uuid in self._parts]
            known = self._sets[prepared.commit_uuid] = _Set(prepared, parts, now_us, self._now())
            for part in parts:
                part.sets += 1
        self._unrecorded_drops.pop(prepared.commit_uuid, None)
        known.prepared = prepared
        known.files.append(file)
        file.live += 1

    def lost(self, prepared: PreparedSet, reason: str) -> StagedPartLost:
        return StagedPartLost(
            transactional_id=prepared.transactional_id, batch_id=prepared.batch_id, partition=self.label, reason=reason
        )

    def drop(self, commit_uuid: bytes, below_version: int | None = None) -> bool:
        """Forget a prepared set, and those of its parts that no other set has; returns whether it was forgotten.

        Args:
            below_version: only if it was prepared at a smaller version.
        """
        with self._lock:
            self._check_usable()
            known = self._sets.get(commit_uuid)
            if known is None or (below_version is not None and known.prepared.version >= below_version):
                return False
            self._drop(commit_uuid)
            return True

    def drop_others(self, producer_id: int, batch_id: int, commit_uuid: bytes) -> None:
        """Forget all sets of a batch but one; durably, unless the disk is full. Raises StorageFailed, Closed."""
        batch = producer_id, batch_id
        with self._lock:
            self._check_usable()
            others = [
                uuid
                for uuid, known in self._sets.items()
                if (known.prepared.producer_id, known.prepared.batch_id) == batch and uuid != commit_uuid
            ]
            for uuid in others:
                self._drop(uuid)
        if others:
            self.settle_drops()

    def _drop(self, commit_uuid: bytes) -> None:
        try:
            file, _ = self._write([(DROPPED, 0, commit_uuid, 0, b"")], self._clock.now_us())
        except DiskFull as full:  # if a start finds the set again, in-doubt recovery drops it again
            self._services.health.log_full(full, self.label)
            self._forget_set(commit_uuid, None)
        except FileRefused:  # the folder was removed, and the set with it
            self._forget_set(commit_uuid, None)
        else:
            self._forget_set(commit_uuid, file)
        self._remove_dead()

    def _forget_set(self, commit_uuid: bytes, told_in: StagedFile | None) -> None:
        known = self._sets.pop(commit_uuid)
        self._drops_made += 1
        if told_in is None:
            self._unrecorded_drops[commit_uuid] = known.files
        for file in known.files:
            file.live -= 1
            if told_in is not None and file is not told_in:
                told_in.drops.add(file.number)
        if told_in is not None:
            told_in.ends |= told_in.drops | {file.number for part in known.parts for file in part.files()}
        for part in known.parts:
            part.sets -= 1
            if not part.sets:
                self._forget_part(part)

    def settle_drops(self) -> bool:
        """Make the drops before this call durable, as far as possible; returns whether all are. Raises StorageFailed,
        Closed."""
        try:
            with self._lock:
                self._check_usable()
                self._record_drops()
                dropped = self._drops_made
            if self._drops_synced < dropped:
                self.sync(drops_too=True)
        except DiskFull as full:
            self._services.health.log_full(full, self.label)
            return False
        except FileRefused:  # the folder was removed, and what could bring a set back
            return False
        return True

    def record_drops(self) -> None:
        """Write the drops for which there was no room, if there is room now. Raises StorageFailed, Closed."""
        if self._unrecorded_drops:
            self.settle_drops()

    def _record_drops(self) -> None:
        """Write the drops of sets for which there was no room. Raises DiskFull."""
        for commit_uuid, files in list(self._unrecorded_drops.items()):
            left = [each for each in files if self._files.get(each.number) is each]
            if left:
                file, _ = self._write([(DROPPED, 0, commit_uuid, 0, b"")], self._clock.now_us())
                file.drops |= {each.number for each in left if each is not file}
                self._drops_made += 1
            del self._unrecorded_drops[commit_uuid]

    def _forget_part(self, part: Part) -> None:
        del self._parts[part.uuid]
        part.forget()

    def abort(self, uuids: Iterable[bytes]) -> None:
        """Forget parts that are not prepared."""
        wanted = set(uuids)
        self._forget_parts(lambda part: part.uuid in wanted)

    def forget_batches(self, producer_id: int, to_batch_id: int) -> None:
        """Forget the unprepared parts of a transaction's batches up to one."""
        self._forget_parts(lambda part: part.producer_id == producer_id and part.batch_id <= to_batch_id)

    def renew(self, write: Write) -> None:
        """Renew the parts of a write, because one of its tasks runs."""
        if not self._parts:
            return
        with self._lock:
            self._check_usable()
            now = self._now()
            for part in self._parts.values():
                if part.write == write:
                    part.renewed = now

    def expire(self, writes: Collection[Write], before: float) -> int:
        """Forget the unprepared parts of some writes, except those renewed since a time; returns how many. Removes also
        a file of which nothing was needed since that time."""
        count = 0
        if writes:
            count = self._forget_parts(lambda part: part.renewed < before and part.write in writes)
        with self._lock:
            if self._is_idle(before):
                self._active = None
                self._remove_dead()
        return count

    def may_expire(self, writes: Collection[Write], before: float) -> bool:
        """Whether `expire` may have anything to do. Takes no lock: nearly always there is nothing, and a broker asks
        thousands of partitions every few seconds."""
        return bool(self._files) and (bool(writes) or self._is_idle(before))

    def _is_idle(self, before: float) -> bool:
        """Whether nothing is needed of the active file, nor was since a time. Without the lock: a moment ago."""
        active = self._active
        return active is not None and not active.live and self._written < before

    def _forget_parts(self, which: Callable[[Part], bool]) -> int:
        with self._lock:
            self._check_usable()
            gone = [part for part in self._parts.values() if not part.sets and which(part)]
            for part in gone:
                self._forget_part(part)
            if gone:
                self._remove_dead()
            return len(gone)

    def _remove_dead(self) -> None:
        """Remove the files of which nothing is needed any more. A file that records drops is removed only after the
        files of the dropped sets are durably removed, because a power cut may undo the earlier of two removals
        alone."""
        for file in list(self._files.values()):  # the oldest first: a file records drops of older sets
            if file.drops:
                file.drops &= self._files.keys() | self._removed
            if file.live or file.drops & self._files.keys() or (file is self._active and file.size < _WASTE_MAX):
                continue
            if file is self._active:
                self._active = None
            del self._files[file.number]
            try:
                if file.drops:
                    self._disk.sync_dir(self._folder)
                    self._removed.clear()
                file.remove()
            except FileNotFoundError:
                pass
            except OSError as error:
                self._errors.fail(error, "removing a staged file")
            self._removed.add(file.number)

    # --- reading -------------------------------------------------------------------------------------------------

    def check(
        self, commit_uuid: bytes, is_there: Callable[[int, int], bool] = lambda part, number: False, again: bool = True
    ) -> None:
        """Read all batches of a prepared set, and compare their checksums; a set that was dropped passes.

        `checked_bytes` grows by the bytes read, but not by repeated reads: an apply that meets a full disk is repeated,
        reads the set each time, and makes no progress. For prepares a set counts once; for applies once, and once more
        after any of it was appended.

        Args:
            is_there: (part, number of a batch) -> whether to leave it out.
            again: also if the set was checked in the last `_CHECK_LASTS_SECONDS`; for a prepare.

        Raises:
            StagedPartLost: it is damaged; from then on the set counts as lost.
            StorageFailed, DiskFull, Closed.
        """
        with self._lock:
            self._check_usable()
            known = self._sets.get(commit_uuid)
            if known is None:
                return
            if known.lost is not None:
                raise self._lost_error(known)
            now = self._now()
            if not again and known.checked is not None and now - known.checked < _CHECK_LASTS_SECONDS:
                return
            parts = list(known.parts)
        buffer = ReadBuffer()
        done = 0

        def read(file: StagedFile, into: memoryview, position: int) -> None:
            nonlocal done
            self._read(file, into, position)
            done += len(into)
            with self._lock:
                if (more := done - known.counted[again]) > 0:
                    known.counted[again] = done
                    self.checked_bytes += more

        try:
            for part in parts:
                wanted = [number for number in range(len(part.places)) if not is_there(part.number, number)]
                for file, numbers in part.by_file(wanted):
                    check_batches(part, numbers, read, buffer)
                    with self._lock:
                        self._close_idle(file)
        except PartDamaged as damaged:
            raise self._found_lost(known, damaged) from None
        except _Dropped:
            return
        finally:
            with self._lock:
                for file in {file for part in parts for file in part.files()}:
                    self._close_idle(file)
        with self._lock:
            known.checked = now

    def _found_lost(self, known: _Set, damaged: PartDamaged) -> StagedPartLost:
        with self._lock:
            known.lost = str(damaged)
            return self._lost_error(known)

    def pieces(self, commit_uuid: bytes, is_there: Callable[[int, int], bool]) -> Iterator[list[Batch] | WholeFile]:
        """The batches of a prepared set in their order, some at a time; writable, and good until the next ones. If
        they fill a large file, the file comes instead.

        Args:
            is_there: (part, number of a batch) -> whether it is to be left out.

        Raises:
            StagedPartLost: the next batches are damaged; from then on the set counts as lost.
            StorageFailed, DiskFull, Closed.
        """
        with self._lock:
            self._check_usable()
            known = self._sets.get(commit_uuid)
            if known is None:
                raise self._led_elsewhere()
            if known.lost is not None:
                raise self._lost_error(known)
            parts = list(known.parts)
        for part in parts:
            wanted = [number for number in range(len(part.places)) if not is_there(part.number, number)]
            for file, numbers in part.by_file(wanted):
                yield from self._pieces_of(known, part, file, numbers)

    def _pieces_of(
        self, known: _Set, part: Part, file: StagedFile, numbers: list[int]
    ) -> Iterator[list[Batch] | WholeFile]:
        copies = self._copied(known, part, numbers)
        if self._may_be_adopted(part, file, numbers):
            with self._losing(known):
                headers = read_headers(part, numbers, self._read)
            yield WholeFile(file.path, headers, copies)
            known.counted[False] = 0  # they were appended
        else:
            yield from copies
        with self._lock:
            self._close_idle(file)

    def _may_be_adopted(self, part: Part, file: StagedFile, numbers: list[int]) -> bool:
        if not file.part or not max(_ADOPTED_MIN, len(numbers) * _BATCH_MIN) <= file.size <= self._segment_bytes():
            return False
        return sum(part.places[number][2] for number in numbers) == file.size

    def _copied(self, known: _Set, part: Part, numbers: list[int]) -> Iterator[list[Batch]]:
        with self._losing(known):
            for batches in read_batches(part, numbers, self._read, self.label):
                yield batches
                known.counted[False] = 0  # they were appended

    @contextmanager
    def _losing(self, known: _Set) -> Iterator[None]:
        """Reads batches of a set in the `with` block. Raises StagedPartLost, Closed."""
        try:
            yield
        except PartDamaged as damaged:
            raise self._found_lost(known, damaged) from None
        except _Dropped:
            raise self._led_elsewhere() from None

    def _led_elsewhere(self) -> Closed:
        """A set is gone amid its apply: a drop waits for that, but a new leader does not."""
        return Closed(what=f"staging of {self.label}")

    def _read(self, file: StagedFile, into: memoryview, position: int) -> None:
        try:
            with self._lock:
                self._check_usable()  # if its topic was deleted, the file is removed
                if self._files.get(file.number) is not file:
                    raise _Dropped
                shared = file.share()
            try:
                self._disk.read_into(shared.fd, into, position)
            finally:
                shared.release()
        except OSError as error:
            if self._was_removed(error):
                raise PartDamaged(f"{file.path} was removed") from None
            self._errors.refuse(error, "reading what is staged")

    # --- syncing -------------------------------------------------------------------------------------------------

    def _ask_sync_ahead(self) -> None:
        if not self._sync_asked and (self._unsynced >= _SYNC_AHEAD_BYTES or self._opened >= _SYNC_AHEAD_FILES):
            self._sync_asked = True
            self._services.flusher.soon(self._sync_task)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that are not synced yet."""
        with self._lock:
            return sum(file.size - file.synced for file in self._files.values())

    def request_sync(self) -> None:
        """Request a sync by a thread of the directory; `sync` then has little left to do."""
        with self._lock:
            if not self._sync_asked:
                self._sync_asked = True
                self._services.flusher.soon(self._sync_task)

    def sync(self, *, drops_too: bool = False) -> None:
        """Make all that was staged and recorded until now durable. Raises StorageFailed, DiskFull, Closed.

        Args:
            drops_too: also the removal of files of which nothing is needed; only settle_drops waits for that.
        """
        with self._sync_lock:
            with self._lock:
                self._check_usable()
                self._sync_asked = False
                self._unsynced = self._opened = 0
                names, drops, removed = self._names_made, self._drops_made, set(self._removed)
                unsynced = [(file, file.size, file.changes) for file in self._files.values() if file.synced < file.size]
            for file, size, changes in unsynced:
                self._sync_file(file, size, changes)
            if names > self._names_synced or drops_too:
                try:
                    self._disk.sync_dir(self._folder)
                    if not self._names_synced:
                        self._disk.sync_dir(self._folder.parent)
                except OSError as error:
                    self._refuse(error, "syncing the folder of staged files")
                self._drops_synced = drops
                with self._lock:
                    self._removed -= removed
            self._names_synced = names

    def _sync_file(self, file: StagedFile, size: int, changes: int) -> None:
        try:
            with self._lock:
                self._check_usable()
                if self._files.get(file.number) is not file:
                    return  # nothing in it is needed any more
                shared = file.share()
        except OSError as error:
            self._refuse(error, "opening a staged file")
        try:
            self._disk.sync(shared.fd)
        except OSError as error:
            self._errors.fail(error, "fdatasync of what is staged")
        finally:
            shared.release()
        with self._lock:
            if file.changes != changes:
                return  # it was cut, or replaced, and has its next sync
            self.synced_bytes += size - file.synced
            file.synced = size
            self._close_idle(file)

    # --- the end -------------------------------------------------------------------------------------------------

    def _refuse(self, error: OSError, doing: str) -> NoReturn:
        """As `DiskErrors.refuse`, but FileRefused if somebody removed staged files."""
        if self._closed and is_missing(error):  # the partition may have been deleted since
            raise Closed(what=f"staging of {self.label}") from error
        if self._was_removed(error):
            self._errors.refuse_to_open(error, doing)
        self._errors.refuse(error, doing)

    def _was_removed(self, error: OSError) -> bool:
        """Whether a staged file or the folder of them was removed by hand, which affects this partition only. If all of
        the partition was, `DiskErrors` finds it."""
        try:
            return is_missing(error) and bool(self._disk.names(self._folder.parent))
        except OSError:
            return False

    def _check_usable(self) -> None:
        if self._closed or self._errors.health.failed is not None:
            self._errors.check()
            raise Closed(what=f"staging of {self.label}")

    def close(self) -> None:
        """Does not wait for a sync that is under way: it shares the open files."""
        with self._lock:
            self._closed = self._errors.is_closed = True
            for file in self._files.values():
                file.close()
