"""Who waits for a change of a partition. A wake is a hint to look again; a registration is good for one wake.

Thread-safe. A wake must take no lock of a partition: it may be called under that of the role.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Wake = Callable[[], None]


class Waiters:
    """The waiters of one kind at one partition. Who waits registers first, and then looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the only lock then held, for set operations only
        self._waiting: set[Wake] = set()

    def register(self, wake: Wake) -> None:
        """Register `wake` to be called once, at the next change. The caller checks again after this."""
        with self._lock:
            self._waiting.add(wake)

    def unregister(self, wake: Wake) -> None:
        with self._lock:
            self._waiting.discard(wake)

    def wake(self) -> None:
        """Call all that are registered, after a change."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for wake in waiting:
            wake()

    def __len__(self) -> int:
        """How many wait here right now."""
        return len(self._waiting)
