"""The consequence of a failed disk step: a refusal that may be retried, or the loss of a partition, or the end of its
directory.

A failed read, write or fdatasync takes the whole directory out of service: the page cache may differ from the disk. A
step that lacks space, a descriptor or memory fails alone, and so does one that concerns a single name. If a file is
missing, somebody may have removed the partition's folder: then only that partition is lost, which is detected later.
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
    """Whether a data directory serves. Thread-safe.

    Attributes:
        failed: why it is out of service; None while it serves.
        on_failed: called once with the error that took it out of service. May be called with a log's locks held: it
            has to be done elsewhere.
        on_doubt: called with a partition's label and an error when one of its files is missing. It must start a check
            elsewhere, because the caller may hold locks: if nobody removed the partition, call `fail` with the error.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.failed: StorageFailed | None = None
        self.on_failed: Callable[[StorageFailed], None] = lambda error: None
        self.on_doubt: Callable[[str, StorageFailed], None] = lambda label, error: None
        self._clock = clock
        self._lock = threading.Lock()  # guards what is set below, and `failed`; after all other locks
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
        """Whether the disk had no room for something in the last minute."""
        return self._clock.monotonic() - self._full_at < _FULL_LOGGED_EVERY_SECONDS

    def log_full(self, error: DiskFull, label: str) -> None:
        """Log that there was no room for something of a partition, or nothing left to open its file with; each at most
        once a minute, however often it is tried."""
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
    """The judge of one partition's errors, shared by all that it keeps in its folder; `label` names the partition."""

    def __init__(self, health: DirectoryHealth, label: str) -> None:
        self.check = health.check
        self.health = health
        self._label = label

    def fail(self, error: OSError | TruncateFailed, doing: str) -> NoReturn:
        """The disk can no longer be believed: take the directory out of service.

        Where a file is missing, somebody may have removed the partition's folder, as `rm` does. That is found out by a
        thread of its own, for the caller holds locks; until then the log is as good as closed.
        """
        reason = f"{doing} for {self._label}: {getattr(error, 'strerror', None) or error}"
        failed = StorageFailed(directory=str(self.health.path), reason=reason)
        if isinstance(error, OSError) and is_missing(error):
            self.health.on_doubt(self._label, failed)
            raise Closed(what=f"log of {self._label}") from error
        self.health.fail(failed)
        raise failed from error

    def refuse(self, error: OSError, doing: str) -> NoReturn:
        """DiskFull, after which all goes on, if the error `passes`; any other takes the directory out of service."""
        if passes(error):
            raise storage_error(self.health.path, error, f"{doing} for {self._label}") from error
        self.fail(error, doing)

    def refuse_to_open(self, error: OSError, doing: str) -> NoReturn:
        """As `refuse`, where a log is opened, made or deleted, or a segment of it: FileRefused if it is about one name,
        which concerns this log alone. A sync that failed must not be tried again: it would succeed, and the bytes not
        be on the disk."""
        if is_of_a_name(error):
            reason = f"{doing} for {self._label}: {error.strerror}: {error.filename}"
            raise FileRefused(directory=str(self.health.path), reason=reason) from error
        self.refuse(error, doing)
