"""Time, passed in: the real clock, and a manual one for tests. Wall time in microseconds, monotonic time in seconds."""

from __future__ import annotations

import threading
import time


class Clock:
    """The machine's clocks."""

    def now_us(self) -> int:
        """Wall-clock time in microseconds since the epoch."""
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        """Seconds that never go back, for timeouts."""
        return time.monotonic()


class ManualClock(Clock):
    """A clock that stands still until it is advanced; both times advance together, except for `jump`."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._lock = threading.Lock()  # guards both times
        self._now_us = now_us
        self._monotonic = 0.0

    def now_us(self) -> int:
        with self._lock:
            return self._now_us

    def monotonic(self) -> float:
        with self._lock:
            return self._monotonic

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_us += int(seconds * 1_000_000)
            self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Move only the wall clock; the monotonic clock does not change."""
        with self._lock:
            self._now_us += int(seconds * 1_000_000)


SYSTEM_CLOCK = Clock()
