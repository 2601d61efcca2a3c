"""The file system, as the log uses it: the one module of the broker that opens, writes or syncs a file of the log.

Every method is one step that can fail, or at which the machine can stop; the crash tests subclass `Disk` and do both at
each step. Calls raise OSError as the system does; `storage_error` converts it to an error of kafkalog. A created,
renamed or unlinked name is durable only after `sync_dir`, bytes only after `sync`. Knows no format.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from kafkalog.errors import DiskFull, OutOfFiles, StorageFailed

Buffer = bytes | bytearray | memoryview

_BUFFERS_MAX = os.sysconf("SC_IOV_MAX")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_OF_A_NAME = (
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY
)  # fmt: skip
_READ_MAX = 1 << 30  # one pread gives at most 2 GiB - 4 KiB
_WRITE_MAX = 1 << 20
"""Bytes of one write call. Larger ones were measured to take up to ten times as long for each byte: the kernel has to
find all the memory at once."""


class Disk:
    """The machine's disk. Paths are absolute; file descriptors are close-on-exec."""

    def create(self, path: Path) -> int:
        """A new file for reading and writing; raises FileExistsError if the name is taken."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def open(self, path: Path, *, write: bool = False) -> int:
        return os.open(path, os.O_RDWR if write else os.O_RDONLY)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """One vectored write; returns how many bytes it took, which may be fewer than given."""
        return os.pwritev(fd, _of_one_call(buffers), position)

    def read(self, fd: int, length: int, position: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        if length <= _READ_MAX:
            return os.pread(fd, length, position)
        parts = []
        while length > 0 and (part := os.pread(fd, min(length, _READ_MAX), position)):
            parts.append(part)
            position += len(part)
            length -= len(part)
        return b"".join(parts)

    def read_into(self, fd: int, buffer: memoryview, position: int) -> int:
        """Fill a buffer; fewer bytes only at the end of the file."""
        filled = 0
        while filled < len(buffer) and (got := os.preadv(fd, [buffer[filled:]], position + filled)):
            filled += got
        return filled

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """fdatasync: the bytes of a file and its size."""
        os.fdatasync(fd)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, over what has that name."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_dir(self, path: Path) -> None:
        os.mkdir(path)

    def make_dirs(self, path: Path) -> None:
        """A folder and those above it, where they are missing; their names are durable."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        os.makedirs(path, exist_ok=True)
        for each in missing:
            self.sync_dir(each.parent)

    def remove_dir(self, path: Path) -> None:
        os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        """What stands in a folder, sorted."""
        return sorted(os.listdir(path))

    def stands_at(self, fd: int, path: Path) -> bool:
        """Whether an open file is what a path names; not so once it was removed, moved or replaced."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(fd))

    def lock(self, path: Path) -> int | None:
        """A descriptor that holds the lock of a file (made if missing), or None if another process holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def identity(self, fd: int) -> str:
        """Names an open file among all that this machine has had since it was booted, whatever path led to it."""
        stat = os.fstat(fd)
        return f"{_boot_id()}:{stat.st_dev}:{stat.st_ino}"


def _boot_id() -> str:
    """Another one after every boot; containers have that of their host, whose locks they share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class TruncateFailed(Exception):
    """What a failed append left could not be cut off again."""


def append_all(disk: Disk, fd: int, buffers: Sequence[Buffer], end: int) -> None:
    """Write all of some buffers at a file's end, or nothing: what a failed write left is cut off again.

    Raises:
        OSError: nothing was appended.
        TruncateFailed: something may have been.
    """
    try:
        write_all(disk, fd, buffers, end)
    except OSError as error:
        try:
            disk.truncate(fd, end)
        except OSError as second:
            raise TruncateFailed(f"{error}, and then {second}") from second
        raise


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """Write all of some buffers, whatever a single write takes."""
    while buffers:
        wrote = disk.write(fd, buffers, position)
        position += wrote
        buffers = _after(buffers, wrote)


def _of_one_call(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """The first of some buffers: as many and as much as one call is given."""
    left = _WRITE_MAX
    for number, buffer in enumerate(buffers):
        length = len(buffer)
        if length >= left or number == _BUFFERS_MAX:
            cut = [memoryview(buffer)[:left]] if number < _BUFFERS_MAX else []
            return [*buffers[:number], *cut]
        left -= length
    return buffers


def _after(buffers: Sequence[Buffer], wrote: int) -> Sequence[Buffer]:
    """What of some buffers stands after their first `wrote` bytes."""
    for number, buffer in enumerate(buffers):
        if wrote < len(buffer):
            return [memoryview(buffer)[wrote:], *buffers[number + 1 :]]
        wrote -= len(buffer)
    return ()


def is_full(error: OSError) -> bool:
    """Whether it only lacks space, so that the same write may succeed later."""
    return error.errno in _FULL


def passes(error: OSError) -> bool:
    """Whether nothing was done, and the same may succeed later: no space, or nothing left to open a file with. A lack
    of memory is that only where a name was to be opened (`filename`): of a read, write or sync it is a failure."""
    return is_full(error) or error.errno in _NO_DESCRIPTOR or (error.errno == errno.ENOMEM and bool(error.filename))


def is_of_a_name(error: OSError) -> bool:
    """Whether it is about one name alone: rights to it, its absence, or what else stands there. The disk can be
    believed."""
    return error.errno in _OF_A_NAME and bool(error.filename)


def is_missing(error: OSError) -> bool:
    """Whether a name was not there that should have been."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR) and bool(error.filename)


def storage_error(directory: Path, error: OSError, doing: str) -> DiskFull | StorageFailed:
    """Our error for the system's."""
    if is_full(error):
        return DiskFull(directory=str(directory))
    if passes(error):
        return OutOfFiles(directory=str(directory), reason=f"{doing}: {error.strerror or error}")
    return StorageFailed(directory=str(directory), reason=f"{doing}: {error.strerror or error}")
