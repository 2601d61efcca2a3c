"""A range of a segment file, as a read hands it out: bytes are described, never copied (`FileSlice`).

The slice holds its file open until it is closed, so that retention, a roll or a close in between cannot make its
descriptor name another file. A truncation of the log's tail can make the file end within a slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from broker.storage.disk import Disk


class Hint(NamedTuple):
    """Where a batch may stand, as an earlier slice told."""

    segment_base_offset: int
    position: int


class SharedFile:
    """A descriptor with as many owners as shared it; the last one to release it closes it."""

    __slots__ = ("_disk", "_lock", "_owners", "fd")

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self.fd = fd
        self._lock = threading.Lock()  # guards _owners
        self._owners = 1

    def share(self) -> bool:
        """One owner more; False if the last one is gone already."""
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
    """Bytes [position, position + length) of a segment file; whole batches, but for the last one, which may be cut.

    To be closed, or used as a context manager. `length` 0: there is nothing (yet), and no file.

    Args:
        failed: what to do with an error of a read: it raises StorageFailed or DiskFull, as any read of the log does.
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
        """The descriptor for sendfile. Give it the position: the file has many readers."""
        assert self._file is not None, "an empty or closed slice has no file"
        return self._file.fd

    def read(self) -> bytes:
        """The bytes themselves, where they have to be in memory."""
        if self._file is None:
            return b""
        try:
            return self._disk.read(self._file.fd, self.length, self.position)
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> NoReturn:
        """The bytes could not be read, here or by sendfile. Raises StorageFailed: the directory is out of service."""
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
