"""A group of many processes keeps its rules, with one seed after the other, and over a million records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import groups
from broker.local import LocalCluster
from kafkalog import Admin
from tests.groups.history import Reader
from tests.groups.torture import Torture

pytestmark = pytest.mark.timeout(1800)
RECORDS = int(os.environ.get("KAFKALOG_SOAK_RECORDS", 1_000_000))


@pytest.mark.parametrize("seed", range(20))
def test_a_group_is_tortured(tmp_path: Path, seed: int) -> None:
    with LocalCluster(brokers=2) as cluster, Torture(cluster, tmp_path, seed, members=8, partitions=32) as torture:
        torture.run(seconds=60)
        torture.check()


def test_members_are_killed_over_a_million_records(tmp_path: Path) -> None:
    with LocalCluster(brokers=2) as cluster, Torture(cluster, tmp_path, seed=1, members=4, partitions=16) as torture:
        torture.run_kills(RECORDS, kills=10)
        assert torture.check() > 0, "members were killed before they committed"


def test_zookeeper_is_away_for_a_minute(tmp_path: Path) -> None:
    """Members read on until their leases end, hand out nothing after that, and go on when ZooKeeper is back."""
    with LocalCluster(brokers=2) as cluster, Torture(cluster, tmp_path, seed=1, members=4, partitions=16) as torture:
        lapsed, back = torture.run_without_zookeeper(seconds=60)
        torture.check()
    meanwhile = [event for event in Reader(tmp_path).news() if lapsed < event.time_ns < back]
    assert [event for event in meanwhile if event.event in ("assigned", "out")] == []


def test_nine_hundred_partitions_have_their_owners_at_once() -> None:
    with LocalCluster(brokers=1) as cluster, Admin(cluster.bootstrap_servers) as admin:
        for number in range(groups.TOPICS):
            admin.create_topic(f"settled-{number}", partitions=groups.PARTITIONS)
        settling = groups.Settling(cluster, groups.TOPICS * groups.PARTITIONS, groups.MEMBERS)
        settling.run()
    limits = {"10 join at once": 5, "one more joins": 5, "one leaves": 2}
    for name, limit in limits.items():
        [change] = settling.found[name]
        assert change.seconds <= limit, name
