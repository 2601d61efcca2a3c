"""Holds the copies that a broker makes for moves of partitions to a rate of bytes a second. The leaders say which
copies are held: never those that acks wait for (`Leadership.holds_no_ack`)."""

from __future__ import annotations

import threading

_Key = tuple[bytes, int]


class Throttle:
    """One for all links of a broker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._rates: dict[_Key, int] = {}  # by partition, if it has one
        self._debt_bytes = 0.0  # how much was copied before its time
        self._paid_at = 0.0  # when that was so
        self._last_rate = 0

    def set_rate(self, key: _Key, rate: int) -> bool:
        """Set the rate of a partition; 0: none. Returns whether it had another."""
        with self._lock:
            before = self._rates.pop(key, 0)
            if rate:
                self._rates[key] = rate
            return before != rate

    def pause(self, key: _Key, size_bytes: int, now: float) -> float:
        """How many seconds after a piece of a copy its next piece may be asked for. The pieces of all copies follow
        each other, so each copy gets its turn.

        Args:
            now: by the monotonic clock.
        """
        with self._lock:
            rate = self._rates.get(key, 0)
            if not rate:
                return 0.0
            paid_bytes = (now - self._paid_at) * self._last_rate
            self._debt_bytes = max(0.0, self._debt_bytes - paid_bytes) + size_bytes
            self._paid_at, self._last_rate = now, rate
            return self._debt_bytes / rate
