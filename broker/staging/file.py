"""One file of staged data: appended to, synced, read in places, removed when nothing in it is live any more.

Not thread-safe: Staging holds the lock. What the bytes mean is `format.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.storage.disk import Buffer, Disk, append_all
from broker.storage.file_slice import SharedFile

STAGED_SUFFIX = ".staged"


def staged_path(folder: Path, number: int) -> Path:
    return folder / f"{number:020d}{STAGED_SUFFIX}"


class StagedFile:
    """A file and what keeps it.

    Attributes:
        salt: of its frames' checksums.
        size: where the next bytes go.
        synced: bytes before it outlive a power cut, as far as is known.
        live: how many batches and prepared sets stand in it that are needed.
        drops: numbers of the files that hold the sets whose end is told in this one: without it, a start would take
            those for prepared.
    """

    def __init__(self, disk: Disk, folder: Path, number: int, salt: int) -> None:
        self._disk = disk
        self.path = staged_path(folder, number)
        self.number = number
        self.salt = salt
        self.size = self.synced = self.live = 0
        self.drops: set[int] = set()
        self._file: SharedFile | None = None

    def create(self) -> None:
        self._file = SharedFile(self._disk, self._disk.create(self.path))

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

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def remove(self) -> None:
        self.close()
        self._disk.unlink(self.path)
