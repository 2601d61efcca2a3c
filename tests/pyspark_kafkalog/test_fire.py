"""Exactly once under fire, a short run of it (`tests/soak/test_exactly_once.py` has the long ones): a driver killed
after each step of a commit, failing tasks, twins, a killed broker, a driver that goes on after it was replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pyspark_kafkalog.fire.harness import Scenario, check_exactly_once, check_reader, duplicates_and_losses, run

BATCHES = 30


@pytest.mark.timeout(400)
def test_every_row_is_there_once_and_in_order_under_fire(tmp_path: Path) -> None:
    scenario = Scenario.random(4, BATCHES, pauses=1)
    outcome = run(scenario, tmp_path, print)
    check_reader(outcome)
    check_exactly_once(outcome, BATCHES)
    assert outcome.happened >= scenario.plan.driver_events()
    (failure,) = outcome.failures
    assert "was replaced" in failure


@pytest.mark.timeout(400)
def test_at_least_once_under_fire_doubles_rows_and_loses_none(tmp_path: Path) -> None:
    """Which proves that the test above would see it."""
    scenario = Scenario.random(4, 12, points=("some staged", "all staged"), delivery="at-least-once")
    outcome = run(scenario, tmp_path, print)
    check_reader(outcome)
    doubled, lost = duplicates_and_losses(outcome, 12)
    assert doubled > 0 and lost == 0
    with pytest.raises(AssertionError):
        check_exactly_once(outcome, 12)
