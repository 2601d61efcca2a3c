"""A group of real processes keeps its rules (`history.py`) whatever happens to them. `./run soak` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.local import LocalCluster
from tests.groups.torture import Torture


@pytest.mark.timeout(600)
def test_members_come_go_and_fail(tmp_path: Path) -> None:
    with (
        LocalCluster(brokers=2) as cluster,
        Torture(cluster, tmp_path, seed=1, members=4, partitions=12) as torture,
    ):
        torture.run(seconds=15)
        torture.check()


@pytest.mark.timeout(600)
def test_members_are_killed_again_and_again(tmp_path: Path) -> None:
    """Nothing is skipped, and nothing is handed out again but what came after a commit."""
    with LocalCluster(brokers=2) as cluster, Torture(cluster, tmp_path, seed=1, members=3, partitions=6) as torture:
        torture.run_kills(records=20_000, kills=3)
        assert torture.check() > 0, "members were killed before they committed"
