"""What a failed step of the disk means for a partition: refused and to be tried again, or the end of the directory, or
of the partition alone if its files are gone.

Shared by all that a partition keeps in its folder, so that whatever fails first takes all of it out of service.
"""

from __future__ import annotations

from typing import NoReturn

from broker.storage.disk import TruncateFailed, is_missing, is_of_a_name, passes, storage_error
from broker.storage.home import LogHome
from kafkalog.errors import Closed, FileRefused, StorageFailed


class Faults:
    """The judge of one partition's errors; `label` names it."""

    def __init__(self, home: LogHome, label: str) -> None:
        self._home = home
        self._label = label

    def check(self) -> None:
        """Raises StorageFailed if the directory is out of service."""
        failed = self._home.failed
        if failed is not None:
            raise StorageFailed(**failed.facts)

    def fail(self, error: OSError | TruncateFailed, doing: str) -> NoReturn:
        """The disk can no longer be believed: take the directory out of service.

        Where a file is missing, somebody may have removed the partition's folder, as `rm` does. That is found out by a
        thread of its own, for the caller holds locks; until then the log is as good as closed.
        """
        reason = f"{doing} for {self._label}: {getattr(error, 'strerror', None) or error}"
        failed = StorageFailed(directory=str(self._home.path), reason=reason)
        if isinstance(error, OSError) and is_missing(error):
            self._home.doubt(self._label, failed)
            raise Closed(what=f"log of {self._label}") from error
        self._home.fail(failed)
        raise failed from error

    def refuse(self, error: OSError, doing: str) -> NoReturn:
        """DiskFull, after which all goes on, if the error `passes`; any other takes the directory out of service."""
        if passes(error):
            raise storage_error(self._home.path, error, f"{doing} for {self._label}") from error
        self.fail(error, doing)

    def refuse_to_open(self, error: OSError, doing: str) -> NoReturn:
        """As `refuse`, where a log is opened, made or deleted, or a segment of it: FileRefused if it is about one name,
        which concerns this log alone. A sync that failed must not be tried again: it would succeed, and the bytes not
        be on the disk."""
        if is_of_a_name(error):
            reason = f"{doing} for {self._label}: {error.strerror}: {error.filename}"
            raise FileRefused(directory=str(self._home.path), reason=reason) from error
        self.refuse(error, doing)
