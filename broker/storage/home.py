"""What a log needs of the directory that it stands in: `LogDirectory` is one. It breaks the circle between the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from broker.storage.disk import Disk
from kafkalog.clock import Clock
from kafkalog.errors import DiskFull, StorageFailed


class Flushable(Protocol):
    """A log, as its directory's threads see it."""

    label: str

    def flush(self) -> None:
        """fdatasync what is appended by now."""


class LogHome(Protocol):
    """What a log needs of the directory that it stands in."""

    disk: Disk
    clock: Clock
    steady_clock: Clock
    path: Path
    producer_batches_remembered: int
    producer_state_max: int
    failed: StorageFailed | None

    def fail(self, error: StorageFailed) -> None:
        """Take the whole directory out of service."""

    def doubt(self, label: str, error: StorageFailed) -> None:
        """A file of a partition was not there: have it looked whether somebody removed the partition, which concerns
        that one alone. If it is in its place, the whole directory is taken out of service with the error."""

    def tell_full(self, error: DiskFull, label: str) -> None:
        """Log that there was no room for something of a partition, or nothing left to open its file with."""

    def unlink_soon(self, name: str, unlink: Callable[[], bool]) -> None:
        """Have the thread that unlinks call something until it returns False, again after a second where it raises; a
        stop waits for one call. Before that thread was started it is called now. Called without a lock of the log's."""

    def flush_soon(self, log: Flushable) -> None:
        """Have a flusher thread call `log.flush()`."""

    def flush_within(self, log: Flushable, seconds: float) -> None:
        """The same, that much later, or earlier if that was asked for already."""

    def flush_not(self, log: Flushable) -> None:
        """Forget that a later flush was asked for: there was one, or there will be none any more."""
