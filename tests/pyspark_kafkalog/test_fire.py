"""Exactly once under fire, a short run: an end after each step of a commit, failing tasks, twins, a killed broker.
`tests/soak/test_exactly_once.py` has the long ones, with a driver killed after every step and drivers that go on after
they were replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pyspark_kafkalog.fire.faults import TASK_FAULTS
from tests.pyspark_kafkalog.fire.harness import Scenario, check_exactly_once, check_reader, duplicates_and_losses, run

pytestmark = pytest.mark.java

SEED, BATCHES = 1, 20  # a seed that has every fault of a task
DRIVER_KILLS = ("half applied",)
COMMIT_KILLS = ("all staged", "prepared", "decided", "applied", "done")
"""After these only the process is killed that commits: a driver takes seconds to start again."""


@pytest.mark.timeout(900)
def test_every_row_is_there_once_and_in_order_under_fire(tmp_path: Path) -> None:
    scenario = Scenario.random(SEED, BATCHES, kills=DRIVER_KILLS, crashes=COMMIT_KILLS)
    assert set(scenario.plan.tasks.values()) == set(TASK_FAULTS)
    outcome = run(scenario, tmp_path, print)
    check_reader(outcome)
    check_exactly_once(outcome, BATCHES)
    assert outcome.happened >= scenario.plan.driver_events()


@pytest.mark.timeout(900)
def test_every_row_that_write_stream_writes_is_there_once_and_in_order_under_fire(tmp_path: Path) -> None:
    """The driver commits, so all that ends a commit ends the driver."""
    scenario = Scenario.random(SEED, BATCHES, kills=("all staged", "decided", "applied"), by="write_stream")
    assert set(scenario.plan.tasks.values()) == set(TASK_FAULTS)
    outcome = run(scenario, tmp_path, print)
    check_reader(outcome)
    check_exactly_once(outcome, BATCHES)
    assert outcome.happened >= scenario.plan.driver_events()


@pytest.mark.timeout(900)
def test_at_least_once_under_fire_doubles_rows_and_loses_none(tmp_path: Path) -> None:
    """Which proves that the test above would see it."""
    scenario = Scenario.random(4, 12, kills=(), crashes=("all staged",), delivery="at-least-once")
    outcome = run(scenario, tmp_path, print)
    check_reader(outcome)
    doubled, lost = duplicates_and_losses(outcome, 12)
    assert doubled > 0 and lost == 0
    with pytest.raises(AssertionError):
        check_exactly_once(outcome, 12)
