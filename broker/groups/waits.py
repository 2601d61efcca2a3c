"""Waits of members for news of their groups, at one broker: one for each member, and fewer than there are threads.

Each wait occupies a thread. A member of which an older wait goes on has given it up. A member for which there is no
room asks again a moment later: so it hears of news too, only later, and members of other groups are not shut out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from broker.groups.claims import Claimant

WAITS_MAX = 112
"""Some threads of the lane are left to answer those that do not wait."""
RETRY_AFTER_MS = 1000


class GroupWaits:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _waits
        self._waits: dict[Claimant, threading.Event] = {}

    @contextmanager
    def waiting(self, claimant: Claimant, changed: threading.Event) -> Iterator[Callable[[], bool]]:
        """During the `with` block, a member waits for an event, instead of in its older wait, whose event is set.

        Yields:
            Whether it may wait, or still may.
        """
        with self._lock:
            older = self._waits.get(claimant)
            if older is not None or len(self._waits) < WAITS_MAX:
                self._waits[claimant] = changed
        if older is not None:
            older.set()
        try:
            yield lambda: self._waits.get(claimant) is changed
        finally:
            with self._lock:
                if self._waits.get(claimant) is changed:
                    del self._waits[claimant]
