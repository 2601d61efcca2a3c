"""Simulated clusters: the fixed seeds have no anomaly, a seed gives the same run each time, and planted mistakes are
found. `./run simulate` does more of it."""

from __future__ import annotations

import pytest

from tests.simulation.plan import plan
from tests.simulation.planted import PLANTED, planted
from tests.simulation.world import run

FOUND_BY = {
    "truncates to the high watermark": (1,),
    "joins without the records from before the epoch": (42, 58, 46, 27),
    "a wiped replica keeps its place": (17, 46, 60, 52, 34),
    "a late write of a state is executed": (4, 15, 0, 25, 41),
    "the watermark counts who has not fetched in this epoch": (7,),
    "a truncation forgets the producers": (13, 1, 22, 34),
    "an ack is completed by a later epoch": (136,),
}
"""Seeds of which one at least finds each mistake: what a seed comes to changes with every change of the brokers. Others
are found by `./run simulate --mistake`."""


SEEDS = (*range(8), 27, 159, 199, 351)  # the last ones have found something


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_has_no_anomaly(seed: int) -> None:
    outcome = run(plan(seed))
    assert outcome.anomalies == [], f"{plan(seed)}\n" + "\n".join(outcome.log[-100:])


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = run(plan(5)), run(plan(5))
    assert (first.trace, first.log) == (second.trace, second.log)


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    for seed in FOUND_BY[mistake]:
        with planted(mistake):
            is_found = bool(run(plan(seed)).anomalies)
        if is_found:
            break
    assert is_found
    assert seed in SEEDS or not run(plan(seed)).anomalies
