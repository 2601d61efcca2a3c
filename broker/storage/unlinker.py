"""The thread that unlinks deleted files of one data directory: an unlink of 1 GiB takes 50 to 300 ms. Knows the calls
to make, not what they remove."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from broker.storage.disk_errors import DirectoryHealth
from kafkalog.events import get_logger

log = get_logger(__name__)

_RETRY_SECONDS = 1.0

Removal = tuple[str, Callable[[], bool]]
"""A folder's name, and what removes a piece of it: whether there is more."""


class Unlinker:
    """Thread-safe. What a stop leaves is removed by the next start."""

    def __init__(self, health: DirectoryHealth) -> None:
        self._health = health
        self._asked: queue.SimpleQueue[Removal | None] = queue.SimpleQueue()
        self._waiting: set[Removal] = set()  # what is in it
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log-unlink", daemon=True)
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Wait for the call that is under way; no other follows."""
        self._stopping.set()
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()

    def soon(self, name: str, unlink: Callable[[], bool]) -> None:
        """Have something called until it returns False, again after a second where it raises. Before `start` it is
        called now. Called without a log's lock.

        Args:
            name: the folder, for the log.
        """
        if self._thread is not None:
            self.later(name, unlink)
        else:
            while unlink():
                pass

    def later(self, name: str, unlink: Callable[[], bool]) -> None:
        """The same, but never now. A removal that is already queued is not queued twice: retention asks again at each
        round."""
        removal = name, unlink
        if removal not in self._waiting:
            self._waiting.add(removal)
            self._asked.put(removal)

    def _run(self) -> None:
        logged = set()
        while (removal := self._asked.get()) is not None:
            if self.is_stopping or self._health.failed is not None:
                continue  # the next start removes it
            name, unlink = removal
            self._waiting.discard(removal)  # first: what is asked for from now on may come too late for this call
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
