"""ZooKeeper is set back to an old backup: no epoch is led twice, no copy of an acknowledged record is cut, and an
operator can bring the partition back, as docs/OPERATIONS.md says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kafkalog import errors
from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk import paths
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import StartBroker
from tests.broker.data_port_client import a_batch
from tests.broker.replica.test_replication import Brokers, in_sync, leader_of, new_topic, replica
from tests.waiting import waited_for

LAG_MS = 3000


@pytest.fixture
def session(chroot: str) -> Iterator[ZooKeeperSession]:
    """ZooKeeper's own shell."""
    session = ZooKeeperSession(chroot)
    session.start()
    yield session
    session.close()


class Restored:
    """Brokers that were stopped, and started again with the state of their partition from before its last failover.

    Two records were acknowledged: one before the backup was made, one since then.
    """

    def __init__(self, start: StartBroker, session: ZooKeeperSession, *, first_is_behind: bool) -> None:
        brokers: Brokers = {number: start(number, replica_lag_time_max_ms=LAG_MS) for number in range(3)}
        self.topic = topic = new_topic(brokers[0], min_insync_replicas=2)
        waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
        self._session, self._path = session, paths.partition_state("t", topic, 0)
        with brokers[0].client() as client:
            assert not client.append(topic, a_batch([b"before"]), acks=-1).HasField("error")
        backup, _ = session.get(self._path)
        assert json.loads(backup)["leader"] == 0
        brokers.pop(0).stop()
        with leader_of(brokers, topic).client() as client:
            assert not client.append(topic, a_batch([b"since"]), acks=-1).HasField("error")
        if not first_is_behind:
            brokers[0] = start(0, replica_lag_time_max_ms=LAG_MS)
            waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
        # Each knows by now that readers may have seen the record.
        waited_for(lambda: all(replica(broker, topic).role.high_watermark == 2 for broker in brokers.values()))
        for broker in brokers.values():
            broker.stop()
        session.set(self._path, backup)
        self.brokers: Brokers = {number: start(number, replica_lag_time_max_ms=LAG_MS) for number in range(3)}

    def correct(self, **fields: Any) -> None:
        """Write fields of the state, as an operator does."""
        content, _ = self._session.get(self._path)
        self._session.set(self._path, json.dumps({**json.loads(content), **fields}).encode())

    def is_whole(self) -> bool:
        """Whether every broker has both records, and they are in sync."""
        held = [each.broker.host.hosted.get((self.topic, 0)) for each in self.brokers.values()]
        return all(partition is not None and partition.role.high_watermark == 2 for partition in held)


@pytest.fixture
def diverged(start_broker: StartBroker, session: ZooKeeperSession, caplog: pytest.LogCaptureFixture) -> Restored:
    """The restored leader lacks a record that the two others have, which do not cut it."""
    restored = Restored(start_broker, session, first_is_behind=True)
    waited_for(lambda: caplog.text.count("replica_diverged") == 2)
    return restored


@pytest.mark.timeout(60)
def test_a_log_that_knows_a_later_epoch_is_not_led_in_an_older_one(
    start_broker: StartBroker, session: ZooKeeperSession
) -> None:
    restored = Restored(start_broker, session, first_is_behind=False)
    refused = restored.brokers[0].broker.host.failure(restored.topic, 0)
    assert isinstance(refused, errors.FencedLeaderEpoch), "it is better not served than led twice in one epoch"
    restored.correct(leader=-1, leader_epoch=5, isr=[1], eligible=[])
    waited_for(lambda: replica(restored.brokers[1], restored.topic).role.leads)
    assert replica(restored.brokers[1], restored.topic).role.epoch == 6
    waited_for(restored.is_whole)


@pytest.mark.timeout(60)
def test_followers_of_a_restored_leader_that_lacks_records_do_not_cut_theirs(diverged: Restored) -> None:
    ends = {number: replica(each, diverged.topic).end_offset for number, each in diverged.brokers.items()}
    assert ends == {0: 1, 1: 2, 2: 2}, "the records are still there"
    diverged.correct(leader=-1, leader_epoch=5, isr=[1], eligible=[])
    waited_for(lambda: replica(diverged.brokers[1], diverged.topic).role.leads)
    waited_for(diverged.is_whole)


@pytest.mark.timeout(60)
def test_a_copy_that_diverged_is_cut_once_the_topic_allows_it(diverged: Restored) -> None:
    settings = {"unclean.leader.election.enable": "true"}
    diverged.brokers[0].stub.AlterTopic(pb.AlterTopicRequest(name="t", set=settings), timeout=30)
    waited_for(lambda: all(replica(each, diverged.topic).end_offset == 1 for each in diverged.brokers.values()))
