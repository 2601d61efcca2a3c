"""Subscribed consumers whose topics are deleted, have a broker that is away, or were never read by the group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.consumer.brokers import Brokers
from kafkalog.errors import NoCommittedOffset, UnknownTopicId
from kafkalog.wire import broker_pb2 as pb
from tests.waiting import waited_for


def test_an_offset_of_a_deleted_topic_is_not_committed_to_the_one_that_has_its_name_now(
    cluster: LocalCluster, new_topic: Callable[[], str]
) -> None:
    topic = group = new_topic()
    where = TopicPartition(topic, 0)

    def fill() -> bytes:
        created = admin.create_topic(topic, partitions=1)
        with Producer(cluster.bootstrap_servers) as producer:
            for _ in range(5):
                producer.send(topic, b"x")
        return created.topic_id

    with (
        Admin(cluster.bootstrap_servers) as admin,
        Consumer(cluster.bootstrap_servers, group, auto_offset_reset="earliest", enable_auto_commit=False) as consumer,
    ):
        fill()
        consumer.subscribe(topic)
        messages = consumer.messages()
        next(messages)  # in hand, so the partition is not given back
        admin.delete_topic(topic)
        made_anew = fill()
        membership = consumer._membership
        assert membership is not None
        news = pb.GroupNews(
            generation=membership._generation + 1,
            share=[pb.GroupShare(topic=topic, partitions=[0])],
            topics=[pb.GroupTopic(topic=topic, topic_id=made_anew)],
        )
        with membership._changed:
            membership._take_news(news)
        with pytest.raises(UnknownTopicId):
            consumer.commit({where: 1})
        assert not admin.committed(group).get(where)
        del messages
        admin.delete_topic(topic)


def test_a_topic_created_again_is_read_from_its_start_by_a_member_that_learns_of_both_at_once(
    cluster: LocalCluster, new_topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, is_made_anew, ask = new_topic(), threading.Event(), Brokers.ask

    def late_news(brokers: Brokers, method: str, *given: Any) -> Any:
        if method == "AwaitGroup":
            assert is_made_anew.wait(60)
        return ask(brokers, method, *given)

    def fill(value: bytes) -> bytes:
        created = admin.create_topic(topic, partitions=1)
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send(topic, value)
        return created.topic_id

    def is_shared_anew() -> bool:
        group = admin.describe_group(topic)
        return group.generation > 1 and bool(group.members[0].share)

    monkeypatch.setattr(Brokers, "ask", late_news)
    with (
        Admin(cluster.bootstrap_servers) as admin,
        Consumer(cluster.bootstrap_servers, topic, auto_offset_reset="earliest") as consumer,
    ):
        fill(b"old")
        consumer.subscribe(topic)
        assert [message.value for message in consumer.consume(1, 30)] == [b"old"]
        assert consumer.poll(0) is None
        admin.delete_topic(topic)
        topic_id = fill(b"new")
        waited_for(is_shared_anew)
        is_made_anew.set()
        waited_for(lambda: [c.source.reader.topic_id for c in consumer._cursors.by_partition.values()] == [topic_id])
        assert [message.value for message in consumer.consume(1, 30)] == [b"new"]


def test_a_broker_that_is_away_holds_up_no_other_one_s_partitions_of_a_new_group() -> None:
    with LocalCluster(brokers=2) as own, Admin(own.bootstrap_servers) as admin:
        away = admin.create_topic("t", partitions=2).partitions[1].leader
        with Producer(own.bootstrap_servers) as producer:
            producer.send("t", b"here", partition=0)
        next(each for each in own.brokers if each.broker_id == away).stop()
        waited_for(lambda: len(admin.describe_cluster().brokers) == 1)
        settings = {"auto_offset_reset": "earliest", "retry_timeout_ms": 600_000}
        with Consumer(own.bootstrap_servers, "g", **settings) as consumer:
            consumer.subscribe("t")
            assert [message.value for message in consumer.messages(1, timeout=30)] == [b"here"]
            assert consumer.awaited() == {TopicPartition("t", 1)}


def test_a_group_without_offsets_is_told_the_setting_of_subscriptions(
    cluster: LocalCluster, new_topic: Callable[[], str]
) -> None:
    topic = group = new_topic()
    with Admin(cluster.bootstrap_servers) as admin, Consumer(cluster.bootstrap_servers, group) as consumer:
        admin.create_topic(topic, partitions=1)
        consumer.subscribe(topic)
        with pytest.raises(NoCommittedOffset, match=f"{topic}-0; set auto.offset.reset to earliest or latest"):
            consumer.poll(60)
        consumer.unsubscribe()
        consumer_of_a_part = Consumer(cluster.bootstrap_servers, group)
        with (
            consumer_of_a_part,
            pytest.raises(NoCommittedOffset, match=r"set committed\.fallback to earliest or latest"),
        ):
            consumer_of_a_part.assign({TopicPartition(topic, 0): "committed"})
