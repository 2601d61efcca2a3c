"""The time by which is deleted and forgotten: how far it follows a wall clock that jumps."""

from __future__ import annotations

import logging

import pytest

from broker.storage.steady_clock import SteadyClock
from kafkalog.clock import ManualClock

DAY = 86_400
HOUR = 3600


def ahead(steady: SteadyClock, clock: ManualClock) -> int:
    """Seconds by which the steady time is ahead of the wall clock."""
    return (steady.now_us() - clock.now_us()) // 1_000_000


def test_time_that_passes_is_believed_however_seldom_somebody_looks() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    clock.advance(30 * DAY)
    assert steady.now_us() == clock.now_us()
    assert steady.monotonic() == clock.monotonic()


def test_a_jump_ahead_is_believed_after_an_hour_and_time_continues_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    with caplog.at_level(logging.WARNING):
        clock.jump(8 * DAY)
        assert ahead(steady, clock) == -8 * DAY
        clock.advance(HOUR - 1)
        assert ahead(steady, clock) == -8 * DAY
        clock.advance(1)
        assert ahead(steady, clock) == 0
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["clock_jumped_ahead", "clock_believed"]


@pytest.mark.parametrize("next_look", [0, 1])
def test_a_further_jump_is_not_believed_for_the_hour_of_the_one_before(next_look: float) -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    clock.jump(420)
    assert ahead(steady, clock) == -420
    clock.advance(HOUR - 1)
    assert ahead(steady, clock) == -420
    clock.jump(30 * DAY)
    clock.advance(next_look)
    assert ahead(steady, clock) == -420 - 30 * DAY
    clock.advance(HOUR - 1)
    assert ahead(steady, clock) == -420 - 30 * DAY
    clock.advance(1)
    assert ahead(steady, clock) == 0


def test_a_further_jump_that_is_taken_back_and_comes_again_begins_the_hour_anew_each_time() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    for seconds in (420, 30 * DAY, -30 * DAY, 30 * DAY):
        clock.jump(seconds)
        assert ahead(steady, clock) < 0
        clock.advance(HOUR / 2 - 1)
        assert ahead(steady, clock) < 0
    clock.advance(HOUR / 2)
    assert ahead(steady, clock) < 0
    clock.advance(1)
    assert ahead(steady, clock) == 0


def test_small_steps_within_the_hour_do_not_begin_it_anew() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    clock.jump(DAY)
    assert ahead(steady, clock) == -DAY
    for _ in range(60):
        clock.advance(60)
        clock.jump(0.5)
    assert ahead(steady, clock) == 0


def test_a_jump_that_is_taken_back_was_never_believed() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    for _ in range(3):
        clock.jump(DAY)
        assert ahead(steady, clock) == -DAY
        clock.advance(HOUR / 2)
        clock.jump(-DAY)
        assert ahead(steady, clock) == 0


def test_small_steps_and_steps_back_are_believed_at_once() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    for seconds in (60, -5, -30 * DAY, 59):
        clock.jump(seconds)
        assert ahead(steady, clock) == 0
