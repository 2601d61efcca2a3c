"""The checkpoint and the saved states of the producers, which a partition keeps beside its segments. They shorten the
next start, and they keep state after segments are deleted. Knows the files, not when to save them. Not thread-safe: Log
holds its save lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.storage.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    is_whole,
    read_whole,
    write_atomic,
    write_checkpoint,
)
from broker.storage.disk import Disk
from broker.storage.disk_errors import DiskErrors
from broker.storage.loader import snapshot_offsets, snapshot_path
from broker.storage.producer_state import Producers, ProducersSnapshot, is_saved_state
from kafkalog.format.batch import BatchHeader

_NEWEST_KEPT = 2


class Snapshots:
    """A partition's saved files.

    Attributes:
        checkpoint: the current checkpoint. The file may be older if the disk was full.
        producers_at: the newest saved state of the producers describes the log at least up to this offset.
    """

    def __init__(
        self, disk: Disk, folder: Path, label: str, checkpoint: Checkpoint, errors: DiskErrors, producers_at: int
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._label = label
        self._errors = errors
        self.checkpoint = checkpoint
        self.producers_at = producers_at

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint durably. Raises DiskFull, StorageFailed."""
        try:
            write_checkpoint(self._disk, self._folder, checkpoint, self._label)
        except OSError as error:
            self._errors.refuse(error, "writing a checkpoint")
        self.checkpoint = checkpoint

    def save_producers(self, producers: ProducersSnapshot, high_watermark: int) -> None:
        """Save a state of the producers durably, and delete the older ones, except two: the newest of them, because the
        new file may be damaged, and the newest at or below the high watermark, because the log may be truncated to
        there, and the segments before it may be deleted. The caller has synced the log up to the state's offset. Raises
        OSError."""
        self.save_encoded_producers(producers.encode(), producers.offset)
        offsets = snapshot_offsets(self._disk, self._folder)
        kept = {*offsets[:_NEWEST_KEPT], self._newest(offsets, high_watermark)}
        for old in offsets:
            if old not in kept:
                self._disk.unlink(snapshot_path(self._folder, old))

    def save_encoded_producers(self, data: bytes, offset: int) -> None:
        """Save the saved form of a state at an offset durably. Raises OSError."""
        write_atomic(self._disk, snapshot_path(self._folder, offset), data)
        self.producers_at = offset

    def write_damaged_checkpoint(self) -> bool:
        """Write the checkpoint again if its file is missing or damaged; returns whether it was. Raises OSError,
        DiskFull, StorageFailed."""
        if is_whole(read_whole(self._disk, self._folder / CHECKPOINT_NAME)):
            return False
        self.write_checkpoint(self.checkpoint)
        return True

    def drop_damaged_producers(self) -> bool:
        """Delete the saved states that are damaged; returns whether there was one. The caller then saves a new one.
        Raises OSError."""
        offsets = snapshot_offsets(self._disk, self._folder)
        damaged = [offset for offset in offsets if not self._is_whole(offset)]
        for offset in damaged:
            self._disk.unlink(snapshot_path(self._folder, offset))
        if damaged:
            self._disk.sync_dir(self._folder)
            self.producers_at = max((offset for offset in offsets if offset not in damaged), default=-1)
        return bool(damaged)

    def _is_whole(self, offset: int) -> bool:
        return is_saved_state(read_whole(self._disk, snapshot_path(self._folder, offset)) or b"", offset)

    def offsets(self) -> list[int]:
        """The offsets of the saved states. Raises OSError."""
        return snapshot_offsets(self._disk, self._folder)

    def restore(self, producers: Producers, headers: Sequence[BatchHeader]) -> None:
        """Add batches that a repair brings back to the saved states of the log after them, durably.

        Args:
            producers: is overwritten.
            headers: of the batches, in order.

        Raises:
            OSError.
        """
        for offset in self.offsets():
            path = snapshot_path(self._folder, offset)
            saved = read_whole(self._disk, path)
            if saved is not None and producers.load(saved, offset):
                producers.restore(header for header in headers if header.base_offset < offset)
                restored = producers.snapshot(offset).encode()
                if restored != saved:
                    write_atomic(self._disk, path, restored)

    def newest_at(self, offset: int) -> int:
        """The offset of the newest saved state at or below an offset; -1 if there is none. Raises OSError."""
        return self._newest(snapshot_offsets(self._disk, self._folder), offset)

    @staticmethod
    def _newest(offsets: list[int], limit: int) -> int:
        return max((offset for offset in offsets if offset <= limit), default=-1)

    def drop_producers_after(self, offset: int) -> None:
        """Delete the states whose offset is after a given one. The caller then sets `producers_at`. Raises OSError."""
        for later in snapshot_offsets(self._disk, self._folder):
            if later > offset:
                self._disk.unlink(snapshot_path(self._folder, later))
