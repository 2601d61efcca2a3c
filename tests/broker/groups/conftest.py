"""Sides of brokers over a real ZooKeeper; see `sides.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kafkalog.clock import ManualClock
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.groups.sides import Side
from tests.kafkalog.zk.conftest import new_session as new_session
from tests.kafkalog.zk.conftest import proxy as proxy


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def new_side(new_session: Callable[..., ZooKeeperSession], clock: ManualClock) -> Callable[[], Side]:
    """Makes the sides of brokers of one cluster, each with a session of its own."""

    def make() -> Side:
        session = new_session()
        join_cluster(session, 0)
        side = Side(session, clock)
        side.learn()
        return side

    return make


@pytest.fixture
def side(new_side: Callable[[], Side]) -> Side:
    return new_side()
