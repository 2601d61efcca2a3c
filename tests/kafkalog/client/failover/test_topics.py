"""Topics with several replicas, as clients make and see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.errors import InvalidArgument, InvalidReplicationFactor, InvalidSetting
from tests.broker.conftest import StartBroker
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.waiting import waited_for


def test_a_topic_has_as_many_replicas_as_were_asked_for(brokers: Brokers) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        two = admin.create_topic("two", partitions=3, replication_factor=2, config={"min.insync.replicas": 2})
        assert [len(set(each.replicas)) for each in two.partitions] == [2, 2, 2]
        assert [each.leader for each in two.partitions] == [each.replicas[0] for each in two.partitions]
        assert [sorted(each.isr) for each in two.partitions] == [sorted(each.replicas) for each in two.partitions]
        assert not any(each.is_under_replicated or each.is_offline({0, 1, 2}) for each in two.partitions)
        assert [len(each.replicas) for each in admin.create_topic("one").partitions] == [1]

        with pytest.raises(InvalidReplicationFactor, match=r"^replication factor 4 is larger than the number of live "):
            admin.create_topic("four", replication_factor=4)
        with pytest.raises(InvalidArgument, match=r"^replication_factor must be from 1 to 2147483647, not 0$"):
            admin.create_topic("none", replication_factor=0)
        with pytest.raises(InvalidSetting, match=r"^min.insync.replicas=3 is not valid: the topic has 2 replicas$"):
            admin.create_topic("above", replication_factor=2, config={"min.insync.replicas": 3})


def test_partitions_that_lack_a_replica_or_a_leader_are_found(brokers: Brokers) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic("t", replication_factor=2, config={"min.insync.replicas": 2})
        [first] = admin.describe_topics(["t"])[0].partitions
        follower = first.replicas[1]
        brokers.kill(follower)
        waited_for(lambda: len(admin.describe_topics(["t"])[0].partition(0).isr) == 1)
        [lacking] = admin.describe_topics(["t"])[0].partitions
        assert (lacking.leader, lacking.isr, lacking.eligible) == (first.leader, (first.leader,), (follower,))
        assert lacking.is_under_replicated and not lacking.is_offline(brokers.running)
        brokers.kill(first.leader)
        waited_for(lambda: admin.describe_topics(["t"])[0].partition(0).is_offline(brokers.running))
        brokers.start(first.leader)
        brokers.start(follower)
        wait_in_sync(admin, "t", first.replicas)


def test_the_controller_is_known_and_another_is_elected(brokers: Brokers) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        first = admin.describe_controller()
        assert first in brokers.running
        brokers.kill(first)
        waited_for(lambda: admin.describe_controller() in brokers.running)


def test_clients_go_on_with_a_cluster_that_was_made_anew_at_the_addresses(
    start_broker: StartBroker, chroot: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its topic was created earlier than the known one, by the number that its ZooKeeper gave."""
    anew = {"zookeeper.connect": f"{chroot}-anew", "log.dir": str(tmp_path / "anew")}
    second = start_broker(**anew)
    ports = {"grpc.port": second.broker.grpc_port, "data.port": second.broker.data_port}
    second.new_topic()
    second.stop()
    first = start_broker(**ports)
    first.new_topic()
    servers, partition = f"127.0.0.1:{first.broker.grpc_port}", TopicPartition("t", 0)
    with Producer(servers) as producer, Admin(servers) as admin, Consumer(servers) as consumer:
        assert producer.send("t", b"before").result(30).offset == 0
        for old in (True, False):
            if not old:
                first.stop()
                second = start_broker(**anew, **ports)
                assert producer.send("t", b"after").result(30).offset == 0
            [described] = admin.describe_topics(["t"])
            assert described.topic_id == (first if old else second).record("t").topic_id
            assert admin.list_offsets({partition: "latest"})[partition].offset == 1
            consumer.assign({partition: "earliest"})
            [record] = consumer.messages(1, timeout=30)
            assert record.value == (b"before" if old else b"after")
    assert caplog.text.count("cluster_changed") == 3
