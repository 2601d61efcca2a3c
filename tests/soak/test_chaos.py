"""Clients of a cluster that fails see no anomaly, with one seed after the other; and see one when records are lost."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import coverage
from tests.chaos.plan import plan
from tests.chaos.run import run

pytestmark = pytest.mark.timeout(7200)
SEEDS = int(os.environ.get("KAFKALOG_SOAK_SEEDS", 30))


@pytest.mark.parametrize(
    ("replication_factor", "required"), [(1, coverage.REQUIRED), (3, coverage.REQUIRED_REPLICATED)], ids=["1", "3"]
)
def test_seeds_have_no_anomaly_and_reach_what_they_have_to(
    tmp_path: Path, replication_factor: int, required: tuple[str, ...]
) -> None:
    reached: Counter[str] = Counter()
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run(plan(seed, 60, replication_factor), folder)
        assert outcome.anomalies == []
        reached += outcome.reached
    assert coverage.missing(reached, required) == []


def test_records_that_a_broker_loses_are_missed(tmp_path: Path) -> None:
    """One copy, and no flush before the ack: a loss of power loses what was acknowledged."""
    made = plan(seed=1, seconds=8, kinds=("lose power",))._replace(topic_settings={}, writers=(), members=0)
    names = {anomaly.name for anomaly in run(made, tmp_path).anomalies}
    assert {"lost-write", "inconsistent-offsets", "stale-end"} <= names
