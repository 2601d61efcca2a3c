"""The file system, as the log uses it: the one module of the broker that opens, writes or syncs a file of the log.

Every method of `Disk` is one step that can fail, or at which the machine can stop. The crash tests subclass `Disk` and
simulate both at each step. Methods raise the system's OSError; `storage_error` converts it to an error of kafkalog. A
created, renamed or unlinked name is durable only after `sync_dir`, written bytes only after `sync`. This module knows
no file format.
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
_NOT_CACHED = (errno.EAGAIN, errno.EOPNOTSUPP)  # the second: the file system cannot tell
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_OF_A_NAME = (
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY
)  # fmt: skip
_READ_MAX = 1 << 30  # one pread returns at most 2 GiB - 4 KiB
_WRITE_MAX = 1 << 20
"""Maximum bytes of one write call. Larger calls took up to ten times as long for each byte when measured: the kernel
has to find all the memory at once."""


class Disk:
    """The machine's disk. Paths are absolute; file descriptors are close-on-exec."""

    def create(self, path: Path) -> int:
        """Create a file and open it for reading and writing. Raises FileExistsError if the name is taken."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def open(self, path: Path, *, write: bool = False) -> int:
        return os.open(path, os.O_RDWR if write else os.O_RDONLY)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """Make one vectored write; returns the number of bytes written, which may be fewer than given."""
        return os.pwritev(fd, _of_one_call(buffers), position)

    def read(self, fd: int, length: int, position: int) -> bytes:
        """Read `length` bytes; fewer only at the end of the file."""
        if length <= _READ_MAX:
            return os.pread(fd, length, position)
        parts = []
        while length > 0 and (part := os.pread(fd, min(length, _READ_MAX), position)):
            parts.append(part)
            position += len(part)
            length -= len(part)
        return b"".join(parts)

    def read_sparing_cache(self, fd: int, length: int, position: int) -> bytes:
        """As `read`; what was not in the page cache before is not kept in it. For reads of much that is needed once."""
        buffer = bytearray(length)
        try:
            if os.preadv(fd, [buffer], position, os.RWF_NOWAIT) == length:
                return bytes(buffer)
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
        os.posix_fadvise(fd, position, length, os.POSIX_FADV_RANDOM)  # else what is read ahead counts as cached
        data = self.read(fd, length, position)
        os.posix_fadvise(fd, position, length, os.POSIX_FADV_DONTNEED)
        return data

    def read_into(self, fd: int, buffer: memoryview, position: int) -> int:
        """Fill a buffer; returns the number of bytes read, fewer than its length only at the end of the file."""
        filled = 0
        while filled < len(buffer) and (got := os.preadv(fd, [buffer[filled:]], position + filled)):
            filled += got
        return filled

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """fdatasync: make the bytes of a file and its size durable."""
        os.fdatasync(fd)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder. A file that has the new name is replaced, and so is an empty folder."""
        os.replace(old, new)

    def link(self, path: Path, new: Path) -> None:
        """Give a file a second name. Raises FileExistsError if the name is taken, OSError if the file system has no
        such thing."""
        os.link(path, new)

    def name_count(self, fd: int) -> int:
        """How many names an open file has."""
        return os.fstat(fd).st_nlink

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_dir(self, path: Path) -> None:
        os.mkdir(path)

    def make_dirs(self, path: Path) -> None:
        """Make a folder and its missing parents, and make their names durable."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        os.makedirs(path, exist_ok=True)
        for each in missing:
            self.sync_dir(each.parent)

    def remove_dir(self, path: Path) -> None:
        os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted."""
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        """Whether a name exists. Unlike `names`, this takes no descriptor."""
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def stands_at(self, fd: int, path: Path) -> bool:
        """Whether a path still names an open file: false once the file was removed, moved or replaced."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(fd))

    def lock(self, path: Path) -> int | None:
        """Lock a file, which is created if missing. Returns a descriptor that holds the lock, or None if another
        process holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def identity(self, fd: int) -> str:
        """A text that identifies an open file on this machine until the next boot, whatever path it was opened by."""
        stat = os.fstat(fd)
        return f"{self.boot_id()}:{stat.st_dev}:{stat.st_ino}"

    def boot_id(self) -> str:
        """The kernel's boot id, 36 characters, which changes with every boot. A container has the boot id of its host,
        whose file locks and page cache it shares."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class TruncateFailed(Exception):
    """An append failed, and so did the removal of the bytes that it wrote."""


def append_all(disk: Disk, fd: int, buffers: Sequence[Buffer], end: int) -> None:
    """Write all buffers at the end of a file, or nothing: after a failed write the file is cut to its old end.

    Args:
        end: the file's size before the append.

    Raises:
        OSError: nothing was appended.
        TruncateFailed: some bytes may have been appended.
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
    """Write all buffers, with as many write calls as needed."""
    while buffers:
        wrote = disk.write(fd, buffers, position)
        position += wrote
        buffers = _after(buffers, wrote)


def _of_one_call(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """The first buffers, up to `_WRITE_MAX` bytes and `_BUFFERS_MAX` buffers: the input of one write call."""
    left = _WRITE_MAX
    for number, buffer in enumerate(buffers):
        length = len(buffer)
        if length >= left or number == _BUFFERS_MAX:
            cut = [memoryview(buffer)[:left]] if number < _BUFFERS_MAX else []
            return [*buffers[:number], *cut]
        left -= length
    return buffers


def _after(buffers: Sequence[Buffer], wrote: int) -> Sequence[Buffer]:
    """The buffers without their first `wrote` bytes."""
    for number, buffer in enumerate(buffers):
        if wrote < len(buffer):
            return [memoryview(buffer)[wrote:], *buffers[number + 1 :]]
        wrote -= len(buffer)
    return ()


def is_full(error: OSError) -> bool:
    """Whether the disk had no space or the quota was reached: the same write may succeed later."""
    return error.errno in _FULL


def passes(error: OSError) -> bool:
    """Whether the step did nothing and may succeed later: there was no space, descriptor or memory.

    A lack of memory counts only if the step was to open a name (`filename`). In a read, write or sync it is a failure.
    """
    return is_full(error) or error.errno in _NO_DESCRIPTOR or (error.errno == errno.ENOMEM and bool(error.filename))


def is_of_a_name(error: OSError) -> bool:
    """Whether the error concerns one name only: permission, a missing name, or another file of that name. The disk
    itself has not failed."""
    return error.errno in _OF_A_NAME and bool(error.filename)


def is_missing(error: OSError) -> bool:
    """Whether a name that was to be used does not exist."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR) and bool(error.filename)


def storage_error(directory: Path, error: OSError, doing: str) -> DiskFull | StorageFailed:
    """Convert an OSError to an error of kafkalog: DiskFull, OutOfFiles (a DiskFull), or StorageFailed."""
    if is_full(error):
        return DiskFull(directory=str(directory))
    if passes(error):
        return OutOfFiles(directory=str(directory), reason=f"{doing}: {error.strerror or error}")
    return StorageFailed(directory=str(directory), reason=f"{doing}: {error.strerror or error}")
