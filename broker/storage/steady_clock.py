"""The time used to delete records and to forget producers: the wall clock, but a jump forward is not accepted at once.

A resumed virtual machine, or a wrong time server, can set the wall clock days forward for a minute. Retention by that
time would delete every record, and a producer that was forgotten by it would append a batch twice. So a jump forward,
compared with the monotonic clock, is accepted only after it has lasted an hour. Until then this clock continues from
the time before the jump. A further jump starts a new hour; otherwise the hour of the first jump would accept the
second. A step back is accepted at once, because it makes nothing older.

This clock cannot detect that the wall clock was already wrong when the broker started.
"""

from __future__ import annotations

import threading

from kafkalog.clock import Clock
from kafkalog.events import get_logger

log = get_logger(__name__)

_STEP_US_MAX = 60_000_000
"""A step forward of at most this size is accepted at once: a time server corrects seconds."""
_DOUBTED_SECONDS = 3600.0


class SteadyClock(Clock):
    """A clock with the wall time described in the module's docstring, from another clock. Thread-safe. The hour of a
    jump starts with the first call of `now_us` after the jump."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the attributes below
        self._epoch_us = self._wall_epoch_us(clock.monotonic())  # accepted wall time at monotonic time 0
        self._doubted_since: float | None = None
        self._doubted_epoch_us = 0  # not yet accepted wall time at monotonic time 0

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def now_us(self) -> int:
        """The accepted wall time, in microseconds since the epoch."""
        with self._lock:
            now = self._clock.monotonic()
            epoch_us = self._wall_epoch_us(now)
            ahead_us = epoch_us - self._epoch_us
            if ahead_us <= _STEP_US_MAX:
                self._doubted_since = None
                self._epoch_us = epoch_us
            elif self._doubted_since is None or epoch_us - self._doubted_epoch_us > _STEP_US_MAX:
                self._doubted_since, self._doubted_epoch_us = now, epoch_us
                log.warning("clock_jumped_ahead", seconds=ahead_us // 1_000_000, doubted_for_s=int(_DOUBTED_SECONDS))
            elif now - self._doubted_since < _DOUBTED_SECONDS:
                self._doubted_epoch_us = min(self._doubted_epoch_us, epoch_us)  # the next jump is measured from it
            else:
                self._doubted_since = None
                self._epoch_us = epoch_us
                log.warning("clock_believed", seconds=ahead_us // 1_000_000)
            return self._epoch_us + int(now * 1_000_000)

    def _wall_epoch_us(self, monotonic: float) -> int:
        return self._clock.now_us() - int(monotonic * 1_000_000)
