"""The consequence of a failed disk step: an error that may be retried, the loss of a partition, or the failure of the
data directory.

- A failed read, write or fdatasync takes the whole directory out of service, because the page cache may differ from the
  disk.
- A step that lacks space, a descriptor or memory fails alone. So does a step whose error concerns a single name.
- If a file is missing, somebody may have removed the partition's folder. Then only that partition is lost. A check that
  runs later decides this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from broker.storage.disk import TruncateFailed, is_missing, is_of_a_name, passes, storage_error
from kafkalog.clock import Clock
from kafkalog.errors import Closed, DiskFull, FileRefused, OutOfFiles, StorageFailed
from kafkalog.events import get_logger

log = get_logger(__name__)

_FULL_LOGGED_EVERY_SECONDS = 60.0


class DirectoryHealth:
    """Whether a data directory is in service. Thread-safe.

    Attributes:
        failed: the error that took the directory out of service; None while it is in service.
        on_failed: called once, with that error. The caller may hold a log's locks, so the work must be done in another
            thread.
        on_doubt: called with a partition's folder and an error when one of its files is missing. It must start a check
            in another thread, because the caller may hold a log's locks. If nobody removed the partition, the check
            must call `fail` with the error.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.failed: StorageFailed | None = None
        self.on_failed: Callable[[StorageFailed], None] = lambda error: None
        self.on_doubt: Callable[[Path, StorageFailed], None] = lambda folder, error: None
        self._clock = clock
        self._lock = threading.Lock()  # guards the attributes below, and `failed`; taken after all other locks
        self._full_at = float("-inf")
        self._full_logged_at: dict[str, float] = {}  # by event

    def check(self) -> None:
        """Raises StorageFailed if the directory is out of service."""
        if self.failed is not None:
            raise StorageFailed(**self.failed.facts)

    def fail(self, error: StorageFailed) -> None:
        """Take the directory out of service."""
        with self._lock:
            if self.failed is not None:
                return
            self.failed = error
        log.error("log_directory_failed", directory=str(self.path), reason=error.facts.get("reason"))
        self.on_failed(error)

    @property
    def is_full(self) -> bool:
        """Whether a step lacked disk space in the last minute."""
        return self._clock.monotonic() - self._full_at < _FULL_LOGGED_EVERY_SECONDS

    def log_full(self, error: DiskFull, label: str) -> None:
        """Log that a step of a partition lacked disk space, or a descriptor or memory. Each of these two events is
        logged at most once a minute, however often steps are retried."""
        now = self._clock.monotonic()
        event = "out_of_files" if isinstance(error, OutOfFiles) else "disk_full"
        with self._lock:
            if event == "disk_full":
                self._full_at = now
            if now - self._full_logged_at.get(event, float("-inf")) < _FULL_LOGGED_EVERY_SECONDS:
                return
            self._full_logged_at[event] = now
        log.warning(event, partition=label, directory=str(self.path), reason=str(error))


class DiskErrors:
    """Decides the consequence of disk errors in one partition's folder.

    Args:
        health: of the data directory.
        label: the partition's name for errors and events.
        folder: the partition's; the data directory itself by default.

    Attributes:
        is_closed: its files may be removed now, and others stand in their place.
    """

    def __init__(self, health: DirectoryHealth, label: str, folder: Path | None = None) -> None:
        self.check = health.check
        self.health = health
        self.label = label
        self.is_closed = False
        self._folder = health.path if folder is None else folder

    def fail(self, error: OSError | TruncateFailed, doing: str) -> NoReturn:
        """Take the directory out of service, because the page cache may differ from the disk.

        If a file is missing, somebody may have removed the partition's folder, for instance with `rm`. Then `on_doubt`
        starts a check in another thread instead, because the caller may hold locks. The caller gets Closed, as from a
        closed log.

        Args:
            doing: the step that failed, for the error's text.

        Raises:
            Closed: a file is missing, and the check has been started, unless this is closed.
            StorageFailed: in all other cases.
        """
        reason = f"{doing} for {self.label}: {getattr(error, 'strerror', None) or error}"
        failed = StorageFailed(directory=str(self.health.path), reason=reason)
        if isinstance(error, OSError) and is_missing(error):
            if not self.is_closed:
                self.health.on_doubt(self._folder, failed)
            raise Closed(what=f"log of {self.label}") from error
        self.health.fail(failed)
        raise failed from error

    def refuse(self, error: OSError, doing: str) -> NoReturn:
        """Raise DiskFull if the error is temporary (`passes`): the directory stays in service. Otherwise `fail`."""
        if passes(error):
            raise storage_error(self.health.path, error, f"{doing} for {self.label}") from error
        self.fail(error, doing)

    def refuse_to_open(self, error: OSError, doing: str) -> NoReturn:
        """Raise FileRefused if the error concerns one name, and so only this log. Otherwise `refuse`.

        For steps that open, make or delete a log or a segment. A FileRefused may be retried. The error of a failed sync
        names no file and so never becomes one: a retried sync would succeed although the bytes are not on the disk.
        """
        if is_of_a_name(error):
            reason = f"{doing} for {self.label}: {error.strerror}: {error.filename}"
            raise FileRefused(directory=str(self.health.path), reason=reason) from error
        self.refuse(error, doing)
