"""One segment file and its index. Knows bytes, offsets and damage; no topics, sockets or ZooKeeper.

Writing is not thread-safe: Log holds the lock. Reading needs no lock: callers pass the position up to which the file
may be read. Appended bytes are durable only after sync().

A read returns a range of the file (`FileSlice`) and copies no bytes. The slice keeps its file open until it is closed,
so that retention, a roll or a close cannot make its descriptor refer to another file. After a truncation of the log's
tail the file may end within a slice.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.checkpoint import TEMPORARY, read_whole, write_atomic
from broker.storage.disk import Buffer, Disk, append_all, write_all
from broker.storage.index import NO_TIME, Damage, Index, Summary, decode_index, encode_index, places, united
from broker.storage.linked import copy_beside, discard, take_place
from broker.storage.scan import Places, Read, Scan, scan
from kafkalog.format.batch import CRC_FROM, HEADER_SIZE, STAMPED_SIZE, BatchHeader, header_at, stamp


class Hint(NamedTuple):
    """A position, known from an earlier slice, at which a batch may start."""

    segment_base_offset: int
    position: int


class SharedFile:
    """A descriptor with several owners. When the last owner releases it, it is closed."""

    __slots__ = ("_disk", "_lock", "_owners", "fd")

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self.fd = fd
        self._lock = threading.Lock()  # guards _owners
        self._owners = 1

    def share(self) -> bool:
        """Add an owner. Returns False if the last owner has already released the descriptor."""
        with self._lock:
            if self._owners == 0:
                return False
            self._owners += 1
            return True

    def release(self) -> None:
        with self._lock:
            assert self._owners > 0
            self._owners -= 1
            last = self._owners == 0
        if last:
            self._disk.close(self.fd)


class FileSlice:
    """Bytes [position, position + length) of a segment file: whole batches, except that the last one may be partial.

    Close it, or use it as a context manager. A slice of length 0 has no file.

    Args:
        failed: called with the error of a failed read. It raises StorageFailed or DiskFull, as any read of the log
            does.
    """

    __slots__ = ("_disk", "_failed", "_file", "length", "position", "segment_base_offset")

    def __init__(
        self,
        disk: Disk,
        file: SharedFile | None,
        segment_base_offset: int,
        position: int,
        length: int,
        failed: Callable[[OSError], NoReturn],
    ) -> None:
        self._failed = failed
        self._disk = disk
        self._file = file
        self.segment_base_offset = segment_base_offset
        self.position = position
        self.length = length

    def fileno(self) -> int:
        """The descriptor for sendfile. Always pass the position, because other readers share the descriptor."""
        assert self._file is not None, "an empty or closed slice has no file"
        return self._file.fd

    def read(self) -> bytes:
        """Read the bytes into memory. Raises StorageFailed, DiskFull."""
        if self._file is None:
            return b""
        try:
            return self._disk.read(self._file.fd, self.length, self.position)
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> NoReturn:
        """Handle the error of a failed read or sendfile. Raises DiskFull if the error is temporary; else StorageFailed:
        the directory is out of service."""
        self._failed(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # a slice dropped on an error path must not keep a deleted file's space


LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
NEXT_SUFFIX = ".next"
"""Suffix of a segment's file until the segment before it is synced. The suffix `.log` proves that every earlier segment
was synced."""
_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a second name that mean more than that there can be none."""
_FIRST_READ = 4096
_NEXT_READ = 1 << 16
_CHECKED = struct.Struct("<qiiqI")  # the fields under header_crc, and header_crc
assert _CHECKED.size == STAMPED_SIZE + 4


class BadHeader(Exception):
    """A read found bytes that are not a batch header. `Segment.examine` determines the damage."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(f"no batch header at {position}")


def segment_path(folder: Path, base_offset: int, suffix: str = LOG_SUFFIX) -> Path:
    return folder / f"{base_offset:020d}{suffix}"


def base_offset_of(name: str, suffix: str) -> int | None:
    """The base offset in a file's name (20 digits and the suffix); None if the name is not of that form."""
    digits = name[:20]
    return int(digits) if len(name) == 20 + len(suffix) and name.endswith(suffix) and digits.isdecimal() else None


class Segment:
    """A segment's file, index and totals (size, end offset, maximum timestamp, append times, leader epoch). After an
    append, the log sets `leader_epoch`. If it `is_adopted`, nothing may be appended: its file has a second name, under
    which it must stay as it is."""

    def __init__(
        self, disk: Disk, folder: Path, base_offset: int, index_interval_bytes: int, suffix: str = LOG_SUFFIX
    ) -> None:
        self._disk = disk
        self.path = segment_path(folder, base_offset, suffix)
        self.base_offset = base_offset
        self._file: SharedFile | None = None
        self.index = Index(base_offset, index_interval_bytes)
        self.damaged: tuple[Damage, ...] = ()
        self.is_adopted = False
        self._copy: tuple[int, int] | None = None  # see `copied_to`: its length and descriptor
        self.start_over()

    # --- files ---------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Create the file. Its name is durable after a sync of the folder."""
        self._file = SharedFile(self._disk, self._disk.create(self.path))

    @property
    def is_next(self) -> bool:
        """Whether the file is named `.next`: the segment before it may not be synced."""
        return self.path.suffix == NEXT_SUFFIX

    def rename(self) -> None:
        """Rename the file to `.log`, which proves that all earlier segments are synced. The name is durable after a
        sync of the folder."""
        path = self.path.with_suffix(LOG_SUFFIX)
        self._disk.rename(self.path, path)
        self.path = path

    def open_for_append(self) -> None:
        self._file = SharedFile(self._disk, self._disk.open(self.path, write=True))
        self.size = self._disk.size(self._file.fd)
        self.is_adopted = self.size > 0 and self._disk.name_count(self._file.fd) > 1

    def open_closed(self) -> None:
        """Set `size` from the file of a segment that is not appended to any more. The file is not kept open."""
        fd = self._disk.open(self.path)
        try:
            self.size = self._disk.size(fd)
        finally:
            self._disk.close(fd)

    def share_file(self) -> SharedFile:
        """The open file. The caller must release it. Raises FileNotFoundError if the segment was deleted."""
        while True:
            file = self._file
            if file is not None and file.share():
                return file
            try:
                opened = SharedFile(self._disk, self._disk.open(self.path))
            except FileNotFoundError:
                if self._file is None:
                    raise
                continue
            if self._file is None:
                return opened
            opened.release()  # `keep_file` was called meanwhile: the path may name another file by now

    def keep_file(self) -> None:
        """Keep the file open until the segment is dropped, because another segment gets its name. Readers that hold an
        older view read on in it."""
        if self._file is None:
            self._file = SharedFile(self._disk, self._disk.open(self.path))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the file. Slices in use stay valid."""
        copy, self._copy = self._copy, None
        if copy is not None:
            self._disk.close(copy[1])
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def is_in_place(self) -> bool:
        """Whether the segment's path still names its open file; True if the segment has no open file."""
        file = self._file
        if file is None or not file.share():
            return True
        try:
            return self._disk.stands_at(file.fd, self.path)
        finally:
            file.release()

    def delete(self) -> None:
        """Unlink the index and the segment file. A missing file counts as unlinked."""
        self.close()
        self.forget_saved_index()
        try:
            self._disk.unlink(self.path)
        except FileNotFoundError:
            pass

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(INDEX_SUFFIX)

    def save_index(self, summary: Summary | None = None, *, durable: bool = False) -> None:
        """Save the index for a restart. The bytes that it describes must have been synced.

        An index with damage is always made durable. Without it, a later scan may not find the good batches between that
        damage and other damage after it.
        """
        summary = summary or self.summary()
        data = encode_index(self.index, summary)
        write_atomic(self._disk, self.index_path, data, durable=durable or bool(summary.damaged))

    def forget_saved_index(self) -> None:
        for path in (self.index_path, self.index_path.with_name(self.index_path.name + TEMPORARY)):
            try:
                self._disk.unlink(path)
            except FileNotFoundError:
                pass

    def summary(self) -> Summary:
        return Summary(
            self.base_offset,
            self.size,
            self.end_offset,
            self.max_timestamp_us,
            self.first_append_us,
            self.last_append_us,
            self.leader_epoch,
            self.damaged,
        )

    # --- opening what is there -----------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Clear index and totals, to read the whole file again."""
        self.index = Index(self.base_offset, self.index.interval_bytes)
        self.size = 0
        self.end_offset = self.base_offset
        self.max_timestamp_us = NO_TIME
        self.first_append_us = self.last_append_us = -1
        self.leader_epoch = 0
        self.damaged = ()

    def load_index(self) -> bool:
        """Load index and totals from the saved index, which may describe only the beginning of the file. Returns False,
        and changes nothing, if the saved index is missing or damaged or describes more than the file.

        `size` must be the file's size. It is then the number of bytes that the saved index describes.
        """
        data = read_whole(self._disk, self.index_path)
        loaded = decode_index(data, self.base_offset, self.index.interval_bytes) if data is not None else None
        if loaded is None:
            return False
        index, summary = loaded
        if summary.covered > self.size:
            return False
        self.index = index
        self.size = summary.covered
        self.end_offset = summary.end_offset
        self.max_timestamp_us = summary.max_timestamp_us
        self.first_append_us = summary.first_append_us
        self.last_append_us = summary.last_append_us
        self.leader_epoch = summary.leader_epoch
        self.damaged = summary.damaged
        return True

    def recover(self, size: int, synced_offset: int, next_segment: int | None, known: Places) -> Scan:
        """Scan the file from `self.size` to `size`, and add its good batches to index and totals.

        Afterwards `self.size` is the position for the next batch. The file is not changed.

        Args:
            size, synced_offset, next_segment: see `scan`.
            known: known starts of batches.
        """

        def on_batch(header: BatchHeader, position: int) -> None:
            self.note(header, header.base_offset, position, header.append_timestamp_us)

        found = scan(
            self._reader(),
            size,
            position=self.size,
            offset=self.end_offset,
            leader_epoch=self.leader_epoch,
            synced_offset=synced_offset,
            next_segment=next_segment,
            known=known,
            on_batch=on_batch,
        )
        self.size = found.end_position
        self.end_offset = found.end_offset
        self.leader_epoch = found.leader_epoch
        self.damaged += found.damaged
        return found

    def replay(self, from_offset: int, on_batch: Callable[[BatchHeader], None]) -> list[Damage]:
        """Call `on_batch` with the header of every good batch from an offset on. Bodies are checked too. Damage is
        added; returns what was not known before."""
        position, offset = self.index.before(from_offset)
        found = scan(
            self._reader(),
            self.size,
            position=position,
            offset=offset,
            leader_epoch=0,
            synced_offset=self.end_offset,
            next_segment=self.end_offset,
            known=self._known(position),
            on_batch=lambda header, _: on_batch(header) if header.base_offset >= from_offset else None,
        )
        return self.add_damage(found.damaged)

    def _known(self, position: int) -> Places:
        """Known starts of batches from a position on: the index entries, and the ends of known damage."""
        return places(self.index, self.damaged, position)

    def _reader(self) -> Read:
        file = self._file
        if file is None:
            file = self._file = SharedFile(self._disk, self._disk.open(self.path))
        fd = file.fd
        return lambda position, length: self._disk.read(fd, length, position)

    # --- appending -----------------------------------------------------------------------------------------------

    def is_old(self, age_us: int, now_us: int) -> bool:
        """Whether its first batch was appended at least so long ago."""
        return self.first_append_us >= 0 and now_us - self.first_append_us >= age_us

    def append(self, buffers: Sequence[Buffer], length: int) -> int:
        """Write batches at the end; returns the position of the first. The caller must then call `note` for each.
        Raises OSError, TruncateFailed (see `append_all`)."""
        file = self._file
        assert file is not None
        position = self.size
        append_all(self._disk, file.fd, buffers, position)
        self.size = position + length
        return position

    def adopt(self, path: Path, headers: Sequence[BatchHeader], leader_epoch: int, now_us: int) -> bool:
        """Take a file that has these batches and nothing else: stamp them, sync it, and give it the segment's name too.

        Returns:
            False if it cannot have two names, or is not there: nothing has changed, except for what is stamped.

        Raises:
            OSError: as with False.
        """
        try:
            self._file = SharedFile(self._disk, self._disk.open(path, write=True))
        except FileNotFoundError:
            return False
        stamped = bytearray(CRC_FROM)
        for header in headers:
            stamped[8:12] = header.length.to_bytes(4, "little")
            stamp(stamped, self.end_offset, leader_epoch, now_us)
            write_all(self._disk, self._file.fd, [stamped[: STAMPED_SIZE + 4]], self.size)
            self.note(header, self.end_offset, self.size, now_us)
            self.size += header.length
        self._disk.sync(self._file.fd)  # before it has the name: a start would cut off what is not stamped
        try:
            self._disk.link(path, self.path)
        except OSError as error:
            if not self._disk.stands_at(self._file.fd, self.path):  # a network's file system may have done it, too
                self.close()
                if error.errno in _FAILS:
                    raise
                return False  # some file systems have no second names, and say so in various ways
        self.leader_epoch = leader_epoch
        self.is_adopted = True
        return True

    def note(self, header: BatchHeader, base_offset: int, position: int, append_us: int) -> None:
        """Add an appended batch to index and totals. `header` may be the one from before the batch was stamped."""
        if position >= self.index.next_position:
            self.index.add(base_offset, position, self.max_timestamp_us)
        if header.max_timestamp_us > self.max_timestamp_us:
            self.max_timestamp_us = header.max_timestamp_us
        if self.first_append_us < 0:
            self.first_append_us = append_us
        if append_us > self.last_append_us:
            self.last_append_us = append_us
        self.end_offset = base_offset + header.last_offset_delta + 1

    def sync(self) -> None:
        assert self._file is not None
        self._disk.sync(self._file.fd)

    def cut(self, position: int) -> None:
        """Truncate the file durably, and set `size`. The caller updates index and the other totals. A file with another
        name is replaced."""
        if self.is_adopted:
            copy, self._copy = self.copied_to(position), None
            self.close()
            self._file = SharedFile(self._disk, take_place(self._disk, self.path, copy))
            self._disk.sync_dir(self.path.parent)
            self.is_adopted = False
        assert self._file is not None
        self._disk.truncate(self._file.fd, position)
        self._disk.sync(self._file.fd)
        self.size = position

    def copied_to(self, position: int) -> int:
        """The copy of the file up to a position that `cut` will need, because the file has a second name: made before
        it, it needs no more room. Raises OSError."""
        if self._copy is None:
            assert self._file is not None
            self._copy = position, copy_beside(self._disk, self.path, self._file.fd, position)
        assert self._copy[0] == position
        return self._copy[1]

    def forget_copy(self) -> None:
        """There is no cut."""
        copy, self._copy = self._copy, None
        if copy is not None:
            discard(self._disk, self.path, copy[1])

    def cut_copy(self, position: int, offset: int) -> Segment:
        """The segment as it is once its file is cut at the start of a batch, which `cut` then does. It is another
        object, open for appending: whoever reads the longer file has the old one. Raises OSError."""
        copy = Segment(self._disk, self.path.parent, self.base_offset, self.index.interval_bytes, self.path.suffix)
        damaged = tuple(damage for damage in self.damaged if damage.start_offset < offset)
        copy.open_for_append()
        copy.index = self.index.up_to(offset)
        copy.size, copy.end_offset = copy.index.positions[-1], copy.index.offsets[-1]
        copy.max_timestamp_us = copy.index.max_before_us[-1]
        copy.recover(position, offset, offset, places(copy.index, damaged, position) | {(position, offset)})
        copy.damaged = united([*damaged, *copy.damaged])
        if copy.size:
            copy.first_append_us = self.first_append_us
            copy.last_append_us = self.last_append_us  # perhaps of what is cut; that of the rest is not known
        return copy

    # --- reading -------------------------------------------------------------------------------------------------

    def locate(self, file: SharedFile, offset: int, limit: int) -> tuple[int, int]:
        """(position, length) of the batch that contains an offset. The offset must not be in known damage.

        Args:
            limit: end position of the bytes that may be read.

        Raises:
            BadHeader: a bad header was found before the batch, or no batch at or before the offset.
        """
        position, _ = self.index.before(offset)
        jumps = {damage.position: damage.end_position for damage in self.damaged}
        found: tuple[int, int] | None = None
        data, data_at, step = b"", 0, _FIRST_READ
        while position < limit:
            if position in jumps and jumps[position] > position:
                position = jumps[position]
                continue
            at = position - data_at
            if at + _CHECKED.size > len(data):
                data, data_at, at = self._disk.read(file.fd, min(step, limit - position), position), position, 0
                step = _NEXT_READ
            header = stamped_at(data, at)
            if header is None:
                raise BadHeader(position)
            base_offset, length = header
            if base_offset > offset:
                break
            found = position, length
            position += length
        if found is None:
            raise BadHeader(position)
        return found

    def batch_length(self, file: SharedFile, position: int, offset: int, limit: int) -> int | None:
        """The length of the batch at a position; None if no batch with that base offset starts there. Reads one
        header."""
        if position < 0 or limit - position < HEADER_SIZE:
            return None
        header = stamped_at(self._disk.read(file.fd, _CHECKED.size, position), 0)
        return header[1] if header is not None and header[0] == offset else None

    def slice_end(self, position: int, limit: int) -> int:
        """The end position of a slice that begins at a position: the next damage, or `limit`."""
        for damage in self.damaged:
            if position < damage.position < limit:
                return damage.position
        return limit

    def damage_at(self, offset: int) -> Damage | None:
        for damage in self.damaged:
            if damage.start_offset <= offset < damage.end_offset:
                return damage
        return None

    def examine(self, file: SharedFile, position: int, limit: int, limit_offset: int) -> list[Damage]:
        """Determine the damage around a bad header, and add it to `damaged`. If known damage has grown, it is replaced.

        Args:
            position: of the bad header.
            limit, limit_offset: position and offset of a later place where a batch starts or the log ends.

        Returns:
            The damage that was not known before.
        """
        (start, offset), after = self.index.around(position)
        if after is not None and after[0] <= limit:
            limit, limit_offset = after
        found = scan(
            lambda at, length: self._disk.read(file.fd, min(length, limit - at), at),
            limit,
            position=start,
            offset=offset,
            leader_epoch=0,
            synced_offset=limit_offset,
            next_segment=limit_offset,
            known=self._known(start) | {(limit, limit_offset)},
            on_batch=lambda header, position: None,
        )
        return self.add_damage(found.damaged)

    def add_damage(self, found: Iterable[Damage]) -> list[Damage]:
        """Add damage; returns what was not known before. If known damage has grown, it is replaced."""
        known, damaged = self.damaged, united([*self.damaged, *found])
        self.damaged = damaged
        return [damage for damage in damaged if damage not in known]

    def headers(self, file: SharedFile, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of each batch from the start of a batch up to `limit`. Known damage is skipped. No body is
        read.

        Raises:
            BadHeader: bytes are not a batch header.
        """
        jumps = {damage.position: damage.end_position for damage in self.damaged}
        while position < limit:
            if position in jumps and jumps[position] > position:
                position = jumps[position]
                continue
            header = header_at(self._disk.read(file.fd, HEADER_SIZE, position))
            if header is None:
                raise BadHeader(position)
            yield position, header
            position += header.length


def stamped_at(data: bytes, at: int) -> tuple[int, int] | None:
    """(base offset, length) from the batch header at `data[at:]`; None if its checksum does not match."""
    if len(data) - at < _CHECKED.size:
        return None
    base_offset, length, _, _, checksum = _CHECKED.unpack_from(data, at)
    if length < HEADER_SIZE or crc32c(data[at : at + STAMPED_SIZE]) != checksum:
        return None
    return base_offset, length
