"""A disk in memory that can be stopped before any of its steps, as a killed process or a lost machine leaves it.

The machine's file system is modelled at its weakest: of what was written but not synced, a power cut keeps any subset
of the 512-byte sectors, and of the names made, changed and removed since the folder was synced any subset too.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.storage.disk import Buffer, Disk

SECTOR = 512


@dataclass
class File:
    """`durable` and, since the last sync, writes (position, bytes) and truncations (length, None)."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def copied(self, _: dict[int, File | Folder]) -> File:
        return File(bytearray(self.data), bytearray(self.durable), list(self.pending))


@dataclass
class Folder:
    """`durable` names and the changes since the last sync: (name, what it names now or None)."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[list[tuple[str, File | Folder | None]]] = field(default_factory=list)

    def change(self, *changes: tuple[str, File | Folder | None]) -> None:
        self.pending.append(list(changes))
        _apply(self.names, changes)

    def copied(self, done: dict[int, File | Folder]) -> Folder:
        """A copy of all below. A file under two names, now and before, is one file in the copy too (`done`, by id)."""

        def copy(found: File | Folder) -> File | Folder:
            if id(found) not in done:
                done[id(found)] = found.copied(done)
            return done[id(found)]

        return Folder(
            {name: copy(found) for name, found in self.names.items()},
            {name: copy(found) for name, found in self.durable.items()},
            [[(name, found and copy(found)) for name, found in changes] for changes in self.pending],
        )


def _apply(names: dict[str, File | Folder], changes: Sequence[tuple[str, File | Folder | None]]) -> None:
    for name, what in changes:
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


class MemoryDisk(Disk):
    """The disk.

    Attributes:
        steps: names of the steps done so far, such as `rename checkpoint`.
        before: called before each step with its name; what it raises stops it.
        boot: the machine's boot id.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.steps: list[str] = []
        self.before: Callable[[str], None] = lambda step: None
        self.boot = "boot"
        self._writing: tuple[File, bytes, int] | None = None
        self._open: dict[int, File] = {}
        self._next_fd = 1000

    # --- crashes -------------------------------------------------------------------------------------------------

    def after_kill(self) -> MemoryDisk:
        """What the next process finds: all that the operating system was given."""
        other = MemoryDisk()
        other.boot = self.boot
        copies: dict[int, File | Folder] = {}
        other.root = self.root.copied(copies)
        if self._writing is not None:
            file, data, position = self._writing
            copied = copies[id(file)]
            assert isinstance(copied, File)
            other._writing = copied, data, position
        return other

    def images(self) -> list[MemoryDisk]:
        """What a kill before each step from now on would leave; it grows with them."""
        found: list[MemoryDisk] = []
        self.before = lambda step: found.append(self.after_kill())
        return found

    def tear(self, length: int) -> None:
        """Do the first bytes of the write before which this image was taken."""
        assert self._writing is not None
        file, data, position = self._writing
        _write(file, data[:length], position)

    @property
    def is_within_write(self) -> bool:
        return self._writing is not None

    def after_power_cut(self, chance: random.Random, keep: float) -> MemoryDisk:
        """What is left of it after a power cut; every unsynced sector and name is kept with probability `keep`."""
        other = self.after_kill()
        other.boot = f"{self.boot}+"
        _cut_power(other.root, chance, keep)
        return other

    def _step(self, name: str) -> None:
        self.before(name)
        self.steps.append(name)

    # --- the interface -------------------------------------------------------------------------------------------

    def _folder(self, path: Path) -> Folder:
        found: File | Folder = self.root
        for part in path.parts[1:]:
            if not isinstance(found, Folder) or part not in found.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            found = found.names[part]
        assert isinstance(found, Folder)
        return found

    def _file(self, path: Path) -> File:
        found = self._folder(path.parent).names.get(path.name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        assert isinstance(found, File)
        return found

    def _descriptor(self, file: File) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd

    def create(self, path: Path) -> int:
        self._step(f"create {path.name}")
        folder = self._folder(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = File()
        folder.change((path.name, file))
        return self._descriptor(file)

    def open(self, path: Path, *, write: bool = False) -> int:
        return self._descriptor(self._file(path))

    def close(self, fd: int) -> None:
        del self._open[fd]

    @property
    def open_files(self) -> int:
        return len(self._open)

    def file_size(self, path: Path) -> int:
        return len(self._file(path).data)

    def bytes_of(self, path: Path) -> bytearray:
        """The bytes of a file, to be damaged in place."""
        return self._file(path).data

    def size(self, fd: int) -> int:
        return len(self._open[fd].data)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        file, data = self._open[fd], b"".join(bytes(buffer) for buffer in buffers)
        self._writing = file, data, position
        self._step("write")
        self._writing = None
        _write(file, data, position)
        return len(data)

    def read(self, fd: int, length: int, position: int) -> bytes:
        return bytes(self._open[fd].data[position : position + length])

    def read_sparing_cache(self, fd: int, length: int, position: int) -> bytes:
        return self.read(fd, length, position)

    def read_into(self, fd: int, buffer: memoryview, position: int) -> int:
        found = self.read(fd, len(buffer), position)
        buffer[: len(found)] = found
        return len(found)

    def truncate(self, fd: int, length: int) -> None:
        self._step("truncate")
        file = self._open[fd]
        file.pending.append((length, None))
        _truncate(file.data, length)

    def sync(self, fd: int) -> None:
        self._step("sync")
        file = self._open[fd]
        file.durable, file.pending = bytearray(file.data), []

    def sync_dir(self, path: Path) -> None:
        self._step("sync_dir")
        folder = self._folder(path)
        folder.durable, folder.pending = dict(folder.names), []

    def rename(self, old: Path, new: Path) -> None:
        self._step(f"rename {new.name}")
        assert old.parent == new.parent
        folder = self._folder(old.parent)
        if old.name not in folder.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        folder.change((new.name, folder.names[old.name]), (old.name, None))

    def link(self, path: Path, new: Path) -> None:
        self._step(f"link {new.name}")
        file, folder = self._file(path), self._folder(new.parent)
        if new.name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path), None, str(new))
        folder.change((new.name, file))

    def name_count(self, fd: int) -> int:
        return _name_count(self.root, self._open[fd])

    def unlink(self, path: Path) -> None:
        if isinstance(self._folder(path.parent).names.get(path.name), Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._file(path)
        self._step(f"unlink {path.name}")
        self._folder(path.parent).change((path.name, None))

    def make_dir(self, path: Path) -> None:
        folder = self._folder(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._step(f"make_dir {path.name}")
        folder.change((path.name, Folder()))

    def make_dirs(self, path: Path) -> None:
        folder = self.root
        for part in path.parts[1:]:  # there from the beginning, as a mount point is
            made = folder.names.setdefault(part, Folder())
            folder.durable.setdefault(part, made)
            assert isinstance(made, Folder)
            folder = made

    def remove_dir(self, path: Path) -> None:
        self._step(f"remove_dir {path.name}")
        self._folder(path.parent).change((path.name, None))

    def names(self, path: Path) -> list[str]:
        return sorted(self._folder(path).names)

    def exists(self, path: Path) -> bool:
        return path.name in self._folder(path.parent).names

    def stands_at(self, fd: int, path: Path) -> bool:
        try:
            return self._file(path) is self._open[fd]
        except FileNotFoundError:
            return False

    def lock(self, path: Path) -> int | None:
        folder = self._folder(path.parent)
        file = folder.names.setdefault(path.name, File())
        assert isinstance(file, File)
        return self._descriptor(file)

    def boot_id(self) -> str:
        return self.boot

    def identity(self, fd: int) -> str:
        return str(id(self._open[fd]))


def _name_count(folder: Folder, file: File) -> int:
    return sum(
        _name_count(found, file) if isinstance(found, Folder) else found is file for found in folder.names.values()
    )


def _write(file: File, data: bytes, position: int) -> None:
    if data:
        file.pending.append((position, data))
        _put(file.data, data, position)


def _put(into: bytearray, data: bytes, position: int) -> None:
    into.extend(bytes(max(position - len(into), 0)))
    into[position : position + len(data)] = data


def _truncate(data: bytearray, length: int) -> None:
    del data[length:]
    data.extend(bytes(length - len(data)))


def _cut_power(folder: Folder, chance: random.Random, keep: float) -> None:
    names = dict(folder.durable)
    for changes in folder.pending:
        if chance.random() < keep:
            _apply(names, changes)
    folder.names, folder.durable, folder.pending = names, dict(names), []
    for found in names.values():
        if isinstance(found, Folder):
            _cut_power(found, chance, keep)
            continue
        data = bytearray(found.durable)
        for position, written in found.pending:
            if written is None:
                if chance.random() < keep:
                    _truncate(data, position)
                continue
            at = position
            while at < position + len(written):
                end = min((at // SECTOR + 1) * SECTOR, position + len(written))
                if chance.random() < keep:
                    _put(data, written[at - position : end - position], at)
                at = end
        found.data, found.durable, found.pending = data, bytearray(data), []
