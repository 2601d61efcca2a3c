"""Simulated clusters: the fixed seeds have no anomaly, a seed gives the same run each time, and planted mistakes are
found. `./run simulate` does more of it."""

from __future__ import annotations

import pytest

from tests.simulation.plan import plan
from tests.simulation.planted import PLANTED, planted
from tests.simulation.world import run

FOUND_BY = {
    "truncates to the high watermark": 1,
    "joins without the records from before the epoch": 42,
    "a wiped replica keeps its place": 34,
    "a late write of a state is executed": 0,
    "the watermark counts who has not fetched in this epoch": 7,
    "a truncation forgets the producers": 1,
    "an ack is completed by a later epoch": 136,
}
"""A seed that finds each mistake. After a change of what seeds expand to: `./run simulate --mistake`."""


SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_has_no_anomaly(seed: int) -> None:
    outcome = run(plan(seed))
    assert outcome.anomalies == [], f"{plan(seed)}\n" + "\n".join(outcome.log[-100:])


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = run(plan(5)), run(plan(5))
    assert (first.trace, first.log) == (second.trace, second.log)


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    seed = FOUND_BY[mistake]
    with planted(mistake):
        assert run(plan(seed)).anomalies
    assert seed in SEEDS or not run(plan(seed)).anomalies
