"""Topics and the cluster over gRPC: what is described, where partitions are placed, and how long a change is waited
for."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest

from broker.requests import topics
from broker.transport import rpc
from kafkalog import Admin
from kafkalog.client import admin
from kafkalog.errors import InvalidPartitions, InvalidRequest, KafkalogError, StorageFailed, UnknownTopic
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire import dataport_pb2
from kafkalog.wire.frames import error_from_wire
from tests.broker.conftest import RunningBroker, StartBroker


def refused(call: Any, request: Any) -> KafkalogError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    return error_from_wire(dataport_pb2.Error.FromString(metadata[rpc.ERROR_KEY]))


def test_the_cluster_is_described_with_each_broker_and_where_zookeeper_is(
    start_broker: StartBroker, chroot: str
) -> None:
    one = start_broker(0, rack="left")
    two = start_broker(7)
    assert one.broker.host.metadata.wait_until(lambda: 7 in one.broker.host.metadata.brokers, 30)
    for asked in (one, two):
        found = asked.stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=30)
        assert f"{found.zookeeper_connect}{found.zookeeper_chroot}" == chroot
        assert found.answering_broker_id == asked.broker.host.broker_id
        by_id = {each.broker_id: each for each in found.brokers}
        assert [(each.rack, each.grpc_port, each.data_port) for each in (by_id[0], by_id[7])] == [
            ("left", one.broker.grpc_port, one.broker.data_port),
            ("", two.broker.grpc_port, two.broker.data_port),
        ]
        for broker_id, each in by_id.items():
            registered = asked.broker.host.metadata.brokers[broker_id]
            assert (each.epoch, each.version, each.host) == (registered.epoch, registered.version, registered.host)
            assert each.version
        assert by_id[0].epoch == by_id[7].epoch == 1
        assert found.cluster_id
        assert asked.stub.DescribeTopics(pb.DescribeTopicsRequest(), timeout=30).cluster_id == found.cluster_id


def test_a_broker_that_lags_behind_zookeeper_tells_that_it_is_uncertain(broker: RunningBroker) -> None:
    """Its disk may hang while its session is kept: it knows of no topic that was created since."""
    metadata = broker.broker.host.metadata

    def uncertain() -> list[bool]:
        described = broker.stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=30)
        topics_described = broker.stub.DescribeTopics(pb.DescribeTopicsRequest(), timeout=30)
        return [described.is_uncertain, topics_described.is_uncertain]

    assert uncertain() == [False, False]
    metadata.behind_since = time.monotonic()
    assert uncertain() == [False, False]
    metadata.behind_since = time.monotonic() - 2 * broker.broker.settings.zookeeper_session_timeout_ms / 1000
    assert uncertain() == [True, True]


def test_new_partitions_begin_where_the_fewest_are(start_broker: StartBroker) -> None:
    one = start_broker(0, num_partitions=3)
    one.new_topic("a", partitions=4)
    two = start_broker(1)
    assert one.broker.host.metadata.wait_until(lambda: 1 in one.broker.host.metadata.brokers, 30)
    before_us = time.time_ns() // 1000
    one.new_topic("b", partitions=0)  # as many as the broker's num.partitions
    described = one.described("b")
    assert before_us <= described.created_us <= time.time_ns() // 1000
    assert [list(each.replicas) for each in described.partitions] == [[1], [0], [1]]  # and then in turn
    assert [(each.leader, list(each.isr)) for each in described.partitions] == [(1, [1]), (0, [0]), (1, [1])]
    two.stub.AlterTopic(pb.AlterTopicRequest(name="a", partitions=5), timeout=30)
    assert list(two.described("a").partitions[4].replicas) == [1]


def test_a_topic_that_is_created_again_is_described_as_the_newer_one(start_broker: StartBroker) -> None:
    broker = start_broker()
    broker.new_topic("t")
    old = broker.described("t")
    altered = broker.stub.AlterTopic(pb.AlterTopicRequest(name="t", set={"retention.ms": "5"}), timeout=30)
    assert altered.created_zxid == old.created_zxid > 0
    broker.stub.DeleteTopic(pb.DeleteTopicRequest(name="t"), timeout=30)
    broker.new_topic("t")
    assert broker.described("t").created_zxid > old.created_zxid


def test_a_leader_epoch_that_was_raised_is_described(start_broker: StartBroker) -> None:
    broker = start_broker()
    broker.new_topic("t")
    broker.stop(clean=False)
    assert [each.leader_epoch for each in start_broker().described("t").partitions] == [1]


def test_a_topic_has_as_many_partitions_as_a_broker_allows_and_no_more(start_broker: StartBroker) -> None:
    broker = start_broker(max_partitions_per_topic=3)
    broker.new_topic("t", partitions=3)
    error = refused(broker.stub.AlterTopic, pb.AlterTopicRequest(name="t", partitions=4))
    assert isinstance(error, InvalidPartitions) and "max.partitions.per.topic is 3" in str(error)
    assert len(broker.described("t").partitions) == 3


def test_a_name_that_is_none_is_that_of_no_topic(broker: RunningBroker) -> None:
    topic = broker.new_topic("t")
    assert isinstance(refused(broker.stub.DeleteTopic, pb.DeleteTopicRequest(name="a/b")), UnknownTopic)
    [described] = broker.stub.DescribeTopics(pb.DescribeTopicsRequest(ids=[b"?" * 16]), timeout=30).topics
    assert described.topic_id == b"?" * 16  # beside its error, for who asked for several
    assert broker.described("t").topic_id == topic


def test_settings_are_named_either_way_in_a_change(broker: RunningBroker) -> None:
    broker.new_topic("t", retention_ms=5000, max_message_bytes=4096)
    request = pb.AlterTopicRequest(name="t", set={"max_message_bytes": "2048"}, unset=["retention_ms"])
    assert dict(broker.stub.AlterTopic(request, timeout=30).config) == {"max.message.bytes": "2048"}


@pytest.mark.parametrize("start_offset", [-1, (1 << 62) + 1])
def test_a_log_begins_at_no_offset_that_there_is_not(broker: RunningBroker, start_offset: int) -> None:
    request = pb.RecoverPartitionsRequest(topic_id=broker.new_topic("t"), partitions=[0], start_offset=start_offset)
    error = refused(broker.stub.RecoverPartitions, request)
    assert isinstance(error, InvalidRequest)
    assert f"start offset {start_offset} must be from 0 to {1 << 62}" in str(error)


def test_a_change_is_waited_for_no_longer_than_its_client_waits() -> None:
    assert topics._bounded(10, 600) == 10
    assert topics._bounded(10, 5) == 4  # the rest is for the answer
    assert topics._bounded(10, 0.5) == 0


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("slow", [0, 1], ids=["the broker that is asked", "another"])
def test_a_change_waits_for_every_broker_of_the_topic_and_names_those_that_have_not_followed(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, slow: int, follows: bool
) -> None:
    one, two = start_broker(0), start_broker(1)
    assert one.broker.host.metadata.wait_until(lambda: 1 in one.broker.host.metadata.brokers, 30)
    host = (one, two)[slow].broker.host
    opens, real = threading.Event(), host.open_for_a_turn

    def open_for_a_turn() -> None:
        assert opens.wait(30)
        real()

    with Admin(f"127.0.0.1:{one.broker.grpc_port}") as client:
        made = client.create_topic("t", partitions=2)
        assert made.behind == ()
        monkeypatch.setattr(admin, "FOLLOWED_SECONDS", 30.0 if follows else 1.0)
        monkeypatch.setattr(topics, "_OPENED_SECONDS", 0.5)
        monkeypatch.setattr(topics, "_SEEN_SECONDS", 0.5)
        monkeypatch.setattr(host, "open_for_a_turn", open_for_a_turn)
        if follows:
            threading.Timer(1.0, opens.set).start()
        altered = client.alter_topic("t", set={"retention.ms": 5})
        assert (altered.behind, altered.config) == (() if follows else (slow,), {"retention.ms": "5"})
        for broker in (one, two) if follows else ():
            assert [each.settings.retention_ms for each in broker.broker.host.hosted.values()] == [5]
        opens.set()
        monkeypatch.undo()
        assert client.delete_topic("t") == ()


def test_a_partition_that_cannot_be_opened_is_not_waited_for(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    host = broker.broker.host
    wait_until = host.metadata.wait_until

    def waiting(reached: Any, seconds: float) -> bool:
        waited.append(wait_until(reached, seconds))
        return waited[-1]

    def failing(*_: Any) -> None:
        raise StorageFailed(directory="d", reason="it is broken")

    monkeypatch.setattr(host._directory, "open_log", failing)
    monkeypatch.setattr(host.metadata, "wait_until", waiting)
    made = broker.stub.CreateTopic(pb.CreateTopicRequest(name="t", partitions=1), timeout=30)
    assert waited == [True]
    assert "it is broken" in str(error_from_wire(made.partitions[0].error))
    assert made.partitions[0].leader == -1


def test_where_partitions_go_is_told_to_who_asks_for_it_by_who_leads_them(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    for request, told in (
        (pb.DescribeTopicsRequest(names=["t"]), False),
        (pb.DescribeTopicsRequest(names=["t"], extents=True), True),
        (pb.DescribeTopicsRequest(extents=True), True),
        (pb.DescribeTopicsRequest(ids=[broker.described("t").topic_id], extents=True), True),
    ):
        [described] = broker.stub.DescribeTopics(request, timeout=30).topics
        assert [each.HasField("extent") for each in described.partitions] == [told] * len(described.partitions)
