"""The checkpoint and the saved states of the producers, which a partition keeps beside its segments. They shorten the
next start, and they keep state after segments are deleted. Knows the files, not when to save them. Not thread-safe: Log
holds its save lock.
"""

from __future__ import annotations

from pathlib import Path

from broker.storage.checkpoint import Checkpoint, write_atomic, write_checkpoint
from broker.storage.disk import Disk
from broker.storage.disk_errors import DiskErrors
from broker.storage.loader import snapshot_offsets, snapshot_path
from broker.storage.producer_state import ProducersSnapshot

_SNAPSHOTS_KEPT = 2


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

    def save_producers(self, producers: ProducersSnapshot) -> None:
        """Save a state of the producers durably, and delete all but the newest two. The caller has synced the log up to
        the state's offset. Raises OSError."""
        write_atomic(self._disk, snapshot_path(self._folder, producers.offset), producers.encode())
        self.producers_at = producers.offset
        for old in snapshot_offsets(self._disk, self._folder)[_SNAPSHOTS_KEPT:]:
            self._disk.unlink(snapshot_path(self._folder, old))

    def drop_producers_after(self, offset: int) -> None:
        """Delete the states whose offset is after a given one. Raises OSError."""
        for later in snapshot_offsets(self._disk, self._folder):
            if later > offset:
                self._disk.unlink(snapshot_path(self._folder, later))
        self.producers_at = min(self.producers_at, offset)
