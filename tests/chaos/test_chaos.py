"""Clients of a cluster that fails see no anomaly. `./run chaos` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import plan
from tests.chaos.run import run


@pytest.mark.java
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "replication_factor", "reaches"),
    [
        (1, 1, "log recovered after a kill"),
        (1, 3, "in-sync set at min"),  # a leader changes only if the broker that is killed led a partition
        (2, 3, "in-sync set at min"),  # a follower once waited for itself in it
    ],
)
def test_a_short_run_has_no_anomaly(tmp_path: Path, seed: int, replication_factor: int, reaches: str) -> None:
    outcome = run(plan(seed, 5, replication_factor), tmp_path)
    assert outcome.anomalies == []
    assert outcome.reached[reaches]
