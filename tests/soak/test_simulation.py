"""More seeds of the simulated cluster than `./run test` has time for."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.plan import plan
from tests.simulation.world import PROBES, run

pytestmark = pytest.mark.timeout(7200)
SEEDS = int(os.environ.get("KAFKALOG_SOAK_SEEDS", 1000))


def test_seeds_have_no_anomaly_and_reach_every_situation() -> None:
    reached: Counter[str] = Counter()
    for seed in range(SEEDS):
        outcome = run(plan(seed))
        assert outcome.anomalies == [], f"seed {seed}"
        reached += outcome.reached
    assert [name for name in PROBES if not reached[name]] == []
