"""Exactly once under fire, at length: 200 micro-batches a seed, with all that can go wrong at random places; and once
on a standalone master with two workers, where Spark itself speculates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pyspark_kafkalog.deployments import standalone_master
from tests.pyspark_kafkalog.fire.faults import POINTS, SLOW
from tests.pyspark_kafkalog.fire.harness import Scenario, check_exactly_once, check_reader, duplicates_and_losses, run

pytestmark = pytest.mark.timeout(3600)
BATCHES = 200
SEEDS = range(1, 21)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_is_there_once_and_in_order_under_fire(seed: int, tmp_path: Path) -> None:
    scenario = Scenario.random(seed, BATCHES, crashes=POINTS[1:-1], pauses=2, broker_kills=6)
    print(f"seed {seed}: {scenario.plan}, brokers killed after {scenario.broker_kills}", flush=True)
    outcome = run(scenario, tmp_path, lambda text: print(f"seed {seed}: {text}", flush=True))
    check_reader(outcome)
    check_exactly_once(outcome, BATCHES)
    assert outcome.happened >= scenario.plan.driver_events()
    assert len(outcome.failures) == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_at_least_once_doubles_rows_and_loses_none(seed: int, tmp_path: Path) -> None:
    scenario = Scenario.random(
        seed, BATCHES, kills=("some staged", "all staged", "committed"), broker_kills=6, delivery="at-least-once"
    )
    outcome = run(scenario, tmp_path, lambda text: print(f"seed {seed}: {text}", flush=True))
    check_reader(outcome)
    doubled, lost = duplicates_and_losses(outcome, BATCHES)
    assert doubled > 0 and lost == 0


def test_speculative_attempts_of_a_standalone_cluster_write_nothing_twice(tmp_path: Path) -> None:
    """Every eighth task or so is slow, so that Spark starts it again on the other worker."""
    with standalone_master(tmp_path, cores=2) as master:
        scenario = Scenario.random(
            1,
            60,
            kills=(),
            broker_kills=2,
            task_faults=(SLOW,),
            spark={
                "spark.master": master,
                "spark.cores.max": "4",
                "spark.executor.memory": "512m",
                "spark.speculation": "true",
                "spark.speculation.interval": "100ms",
                "spark.speculation.multiplier": "1.5",
                "spark.speculation.quantile": "0.5",
                "spark.speculation.minTaskRuntime": "500ms",
                "spark.task.maxFailures": "4",
            },
        )
        outcome = run(scenario, tmp_path, lambda text: print(text, flush=True))
    check_reader(outcome)
    check_exactly_once(outcome, 60)
    assert any(event.startswith("twin of slow") for event in outcome.happened), "Spark never speculated"
