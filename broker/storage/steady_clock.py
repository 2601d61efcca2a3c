"""The time used for deleting and forgetting: the wall clock's, unless that has just jumped ahead.

A resumed virtual machine, or a wrong time server, can set the wall clock days ahead for a minute. Retention by that
time would delete every record, and a producer that was forgotten by it would append a batch twice. So a jump ahead of
the monotonic clock is accepted only after it has lasted an hour; until then this clock continues from the time before
it. A further jump begins a new hour; otherwise the hour of the first would make the second accepted. A clock that goes
back is accepted at once, because then less is old.

It cannot detect that the clock was wrong before the broker's start.
"""

from __future__ import annotations

import threading

from kafkalog.clock import Clock
from kafkalog.events import get_logger

log = get_logger(__name__)

_STEP_US_MAX = 60_000_000
"""A step ahead that is believed at once: a time server corrects seconds."""
_DOUBTED_SECONDS = 3600.0


class SteadyClock(Clock):
    """Another clock, whose wall time is believed as this module says. Thread-safe. The hour of a jump begins with the
    first look after it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._epoch_us = self._wall_epoch_us(clock.monotonic())  # the wall time at which the monotonic one was 0
        self._doubted_since: float | None = None
        self._doubted_epoch_us = 0  # the wall time that is doubted, in the same way

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def now_us(self) -> int:
        """Wall-clock time in microseconds since the epoch, at most as late as it can be believed to be."""
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
                self._doubted_epoch_us = min(self._doubted_epoch_us, epoch_us)  # from which the next jump is seen
            else:
                self._doubted_since = None
                self._epoch_us = epoch_us
                log.warning("clock_believed", seconds=ahead_us // 1_000_000)
            return self._epoch_us + int(now * 1_000_000)

    def _wall_epoch_us(self, monotonic: float) -> int:
        return self._clock.now_us() - int(monotonic * 1_000_000)
