"""Files with two names: what was staged for a log, and became a segment of it, is one file with a name in each.

Such a file is stamped before it gets its second name, and not changed while it has two. Whoever has to cut it, or to
write behind its end, does that to a copy.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from broker.storage.checkpoint import TEMPORARY
from broker.storage.disk import Disk, write_all

_COPIED_AT_ONCE = 1 << 20


def open_alone(disk: Disk, path: Path, length: int | None = None) -> tuple[int, bool]:
    """Open a file to change it in place. If it has another name, under which it must stay as it is, the path first
    gets a copy of it, of its first `length` bytes; the copy is synced, its name is not.

    Returns:
        (the open file, whether it is a copy).

    Raises:
        OSError: nothing has changed.
    """
    fd = disk.open(path, write=True)
    if disk.name_count(fd) == 1:
        return fd, False
    try:
        copied = copy_beside(disk, path, fd, disk.size(fd) if length is None else length)
        return take_place(disk, path, copied), True
    finally:
        disk.close(fd)


def copy_beside(disk: Disk, path: Path, fd: int, length: int) -> int:
    """A synced copy of the first bytes of an open file, under a temporary name beside a path, open for writing. Raises
    OSError: there is none."""
    temporary = path.with_name(path.name + TEMPORARY)
    if disk.exists(temporary):
        disk.unlink(temporary)
    copy = disk.create(temporary)
    try:
        position = 0
        while position < length and (data := disk.read(fd, min(length - position, _COPIED_AT_ONCE), position)):
            write_all(disk, copy, [data], position)
            position += len(data)
        disk.sync(copy)
    except BaseException:
        discard(disk, path, copy)
        raise
    return copy


def take_place(disk: Disk, path: Path, copy: int) -> int:
    """Give the path to the copy that is beside it; returns the copy. Raises OSError: the copy is closed and gone."""
    try:
        disk.rename(path.with_name(path.name + TEMPORARY), path)
    except BaseException:
        discard(disk, path, copy)
        raise
    return copy


def discard(disk: Disk, path: Path, copy: int) -> None:
    """Remove the copy beside a path: it may be what fills the disk."""
    disk.close(copy)
    with suppress(OSError):  # the next start does it
        disk.unlink(path.with_name(path.name + TEMPORARY))
