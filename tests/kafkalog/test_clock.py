"""The machine's clocks."""

from __future__ import annotations

import time

from kafkalog.clock import SYSTEM_CLOCK


def test_timeouts_go_by_the_clock_that_nobody_sets_and_times_by_the_wall_clock() -> None:
    clocks = (SYSTEM_CLOCK.monotonic, time.monotonic), (SYSTEM_CLOCK.now_us, lambda: time.time_ns() // 1000)
    for clock, real in clocks:
        before = real()
        assert before <= clock() <= real()
