"""Clients of a cluster that fails see no anomaly. `./run chaos` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import plan
from tests.chaos.run import run


@pytest.mark.java
@pytest.mark.timeout(600)
def test_a_short_run_has_no_anomaly(tmp_path: Path) -> None:
    outcome = run(plan(seed=1, seconds=5), tmp_path)
    assert outcome.anomalies == []
    assert outcome.reached["log recovered after a kill"]
