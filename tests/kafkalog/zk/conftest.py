"""Sessions of ZooKeeper with a chroot of their own, some through a proxy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from broker.local.zookeeper import EmbeddedZooKeeper
from kafkalog.zk.session import ZooKeeperSession
from tests.proxy import StallingProxy

_chroots = itertools.count()


@pytest.fixture
def proxy(zookeeper: EmbeddedZooKeeper) -> Iterator[StallingProxy]:
    """A proxy before the ZooKeeper."""
    assert zookeeper.port is not None
    one = StallingProxy(zookeeper.port)
    yield one
    one.close()


@pytest.fixture
def new_session(zookeeper: EmbeddedZooKeeper) -> Iterator[Callable[..., ZooKeeperSession]]:
    """Starts sessions under one chroot that no other test uses; through a proxy if one is given."""
    chroot = f"zk-test/{next(_chroots)}"
    started = []

    def start(through: StallingProxy | None = None, **timeouts: int) -> ZooKeeperSession:
        server = zookeeper.connect if through is None else f"127.0.0.1:{through.port}"
        session = ZooKeeperSession(f"{server}/{chroot}", **timeouts)
        session.start()
        started.append(session)
        return session

    yield start
    for session in started:
        session.close()


@pytest.fixture
def session(new_session: Callable[..., ZooKeeperSession]) -> ZooKeeperSession:
    return new_session()
