"""The thread that unlinks deleted files of one data directory, because an unlink of 1 GiB takes 50 to 300 ms. Knows the
calls to make, not what they remove."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from broker.storage.disk_errors import DirectoryHealth
from kafkalog.events import get_logger

log = get_logger(__name__)

_RETRY_SECONDS = 1.0

Removal = tuple[str, Callable[[], bool]]
"""A folder's name, and a function that removes one piece of its deleted files and returns whether there is more."""


class Unlinker:
    """Runs removals in its thread. Thread-safe. The next start removes what is left after a stop."""

    def __init__(self, health: DirectoryHealth) -> None:
        self._health = health
        self._removals: queue.SimpleQueue[Removal | None] = queue.SimpleQueue()
        self._queued: set[Removal] = set()  # the removals in _removals
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log-unlink", daemon=True)
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """End the thread after its current call."""
        self._stopping.set()
        self._removals.put(None)
        if self._thread is not None:
            self._thread.join()

    def soon(self, name: str, unlink: Callable[[], bool]) -> None:
        """Call `unlink` until it returns False; after an exception, again a second later. Before `start` it is called
        at once, in this thread. The caller must not hold a log's lock.

        Args:
            name: the folder's name, for the event log.
        """
        if self._thread is not None:
            self.later(name, unlink)
        else:
            while unlink():
                pass

    def later(self, name: str, unlink: Callable[[], bool]) -> None:
        """Queue a removal for the thread. One that is already queued is not queued again, because each round of
        retention submits the removals that are left."""
        removal = name, unlink
        if removal not in self._queued:
            self._queued.add(removal)
            self._removals.put(removal)

    def _run(self) -> None:
        logged = set()
        while (removal := self._removals.get()) is not None:
            if self.is_stopping or self._health.failed is not None:
                continue  # the next start removes it
            name, unlink = removal
            self._queued.discard(removal)  # before the call, which may not see what is to be removed from now on
            try:
                if unlink():
                    self.later(*removal)
                logged.discard(name)
            except Exception as error:
                if name not in logged and self._health.failed is None:
                    logged.add(name)
                    log.warning("not_unlinked", folder=name, reason=str(error))
                self._stopping.wait(_RETRY_SECONDS)
                self.later(*removal)
