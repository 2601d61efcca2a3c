"""Files with two names: what was staged for a log, and became a segment of it, is one file with a name in each.

Such a file is stamped before it gets its second name, and never changed after that. Whoever has to cut it, or to write
behind its end, does that to a copy.
"""

from __future__ import annotations

from pathlib import Path

from broker.storage.checkpoint import TEMPORARY
from broker.storage.disk import Disk, write_all

_COPIED_AT_ONCE = 1 << 20


def open_alone(disk: Disk, path: Path, length: int | None = None) -> int:
    """Open a file to change it in place. If it has another name, under which it must stay as it is, the path first
    gets a copy of it, of its first `length` bytes; the copy is synced, its name is not. Raises OSError."""
    fd = disk.open(path, write=True)
    if disk.name_count(fd) == 1:
        return fd
    try:
        temporary = path.with_name(path.name + TEMPORARY)
        if disk.exists(temporary):
            disk.unlink(temporary)
        copy = disk.create(temporary)
        try:
            left, position = disk.size(fd) if length is None else length, 0
            while left > 0 and (data := disk.read(fd, min(left, _COPIED_AT_ONCE), position)):
                write_all(disk, copy, [data], position)
                position += len(data)
                left -= len(data)
            disk.sync(copy)
            disk.rename(temporary, path)
        except BaseException:
            disk.close(copy)
            raise
        return copy
    finally:
        disk.close(fd)
