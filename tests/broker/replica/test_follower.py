"""The links to leaders: who is fetched from whom, and how a leader that stays away is reported."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.replica.fetcher import ReplicaFetcher
from broker.replica.follower import Links, _Link
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.wire import frames
from kafkalog.zk.registry import BrokerRecord
from tests.waiting import waited_for


class _Registered(dict[int, object]):
    """No broker is registered; counts how often one was looked up."""

    looked_up = 0

    def get(self, key: int, default: object = None) -> object:
        self.looked_up += 1
        return default


def test_a_leader_that_stays_away_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="broker.replica.follower")
    registered = _Registered()
    fetcher = cast(Any, SimpleNamespace(leader_id=7, has_replicas=True))
    link = _Link(fetcher, cast(Any, SimpleNamespace(brokers=registered)), SYSTEM_CLOCK)
    link.start()
    try:
        waited_for(lambda: registered.looked_up > 3)
    finally:
        link.stop()
        link.join()
    # Threads that an earlier test has left may log too.
    [said] = [record.getMessage() for record in caplog.records if record.name == "broker.replica.follower"]
    assert "replica_link_interrupted" in said and "broker 7" in said


def test_a_leader_is_told_that_it_is_a_broker_that_comes_to_copy() -> None:
    """Clients may have taken all of its connections."""
    fetcher = cast(Any, SimpleNamespace(leader_id=7, has_replicas=True, connected=lambda: None))
    with socket.create_server(("127.0.0.1", 0)) as leader:
        leader.settimeout(30)
        brokers = {7: BrokerRecord(7, "127.0.0.1", 1, leader.getsockname()[1])}
        link = _Link(fetcher, cast(Any, SimpleNamespace(brokers=brokers)), SYSTEM_CLOCK)
        link.start()
        try:
            accepted, _ = leader.accept()
            with accepted:
                assert accepted.recv(frames.HELLO_SIZE, socket.MSG_WAITALL) == frames.hello(of_replica=True)
        finally:
            leader.close()  # else the next connection waits for a greeting
            link.stop()
            link.join()


class _Idle:
    """A link that exchanges nothing."""

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def stop(self) -> None: ...

    def join(self) -> None: ...


def test_a_replica_is_fetched_from_the_leader_that_it_has_now_and_from_no_other() -> None:
    links = Links(0, "here", cast(Any, SimpleNamespace()), SYSTEM_CLOCK, lambda *_: None)
    fetchers: list[ReplicaFetcher] = []

    def new_link(fetcher: ReplicaFetcher) -> _Idle:
        fetchers.append(fetcher)
        return _Idle()

    links.new_link = new_link
    role = SimpleNamespace(leader_id=1, epoch=1)
    replica = cast(Any, SimpleNamespace(topic_id=bytes(16), number=0, role=role))
    for leader_id, fetched_from in ((1, [1]), (2, [2]), (1, [1]), (-1, []), (2, [2]), (0, [])):
        role.leader_id, role.epoch = leader_id, role.epoch + 1
        links.follow(replica, 0)
        assert [each.leader_id for each in fetchers if each.has_replicas] == fetched_from
    assert len(fetchers) == 2, "a link for each leader"
