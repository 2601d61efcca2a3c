"""Members of a group in one process: what they do when an answer is lost, a lease ends, or others come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.consumer.membership import Membership
from kafkalog.errors import NotOwner, RequestTimedOut
from tests.waiting import waited_for

Ask = Callable[..., Any]


@pytest.fixture
def tested(cluster: LocalCluster, topic: str) -> str:
    """A topic of two partitions with one record each."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=2)
    produce(cluster, topic, 0, 1)
    return topic


def produce(cluster: LocalCluster, topic: str, *partitions: int) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for partition in partitions:
            producer.send(topic, b"", partition=partition)


def member(cluster: LocalCluster, topic: str, **settings: Any) -> Consumer:
    """A subscribed consumer, in a group that has the topic's name."""
    chosen = {"session_timeout_ms": 2000, "heartbeat_interval_ms": 200, "auto_offset_reset": "earliest"}
    consumer = Consumer(cluster.bootstrap_servers, group=topic, **chosen | settings)
    consumer.subscribe(topic)
    return consumer


def partitions_of(consumer: Consumer) -> list[int]:
    """Those that it reads, in the order of their numbers; asks for a record, so that it takes part."""
    consumer.poll(0)
    return sorted(partition.partition for partition in consumer.assignment())


@contextmanager
def requests(answer: Callable[[Ask, str], Any], of: Consumer | None = None) -> Iterator[None]:
    """During the `with` block members, or one of them, get their answers from a function of (ask the broker, the
    method's name)."""
    real = Membership._ask

    def ask(membership: Membership, method: str, request: Any, seconds: float | None = None) -> Any:
        if of is not None and membership is not of._membership:
            return real(membership, method, request, seconds)
        return answer(lambda: real(membership, method, request, seconds), method)

    with patch.object(Membership, "_ask", ask):
        yield


def lost() -> RequestTimedOut:
    return RequestTimedOut(what="a request", address="a broker", timeout_ms=0)


def test_a_member_gets_back_what_another_one_had(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        with member(cluster, tested) as other:
            waited_for(lambda: len(partitions_of(one)) == 1 and len(partitions_of(other)) == 1)
        waited_for(lambda: partitions_of(one) == [0, 1])


def test_what_was_fetched_of_partitions_that_stay_is_kept_while_others_move(cluster: LocalCluster, topic: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=3)
    with member(cluster, topic) as one:
        waited_for(lambda: partitions_of(one) == [0, 1, 2])
        produce(cluster, topic, 1, 2)
        empty = one.streams()[0]

        def is_driven() -> bool:
            """It fetches all partitions, and hands out nothing."""
            return not any(empty.messages(timeout=0.05))

        filled = {p: cursor for p, cursor in one._cursors.by_partition.items() if p.partition > 0}
        waited_for(lambda: is_driven() and all(cursor.source.arrived for cursor in filled.values()))
        arrived = {partition: cursor.source.arrived[0] for partition, cursor in filled.items()}
        with member(cluster, topic) as other:
            waited_for(lambda: is_driven() and len(one.assignment()) == 2 and len(partitions_of(other)) == 1)
            stayed = filled.keys() & set(one.assignment())
            assert stayed
            for partition in stayed:
                assert one._cursors.by_partition[partition] is filled[partition]
                assert filled[partition].source.arrived[0] is arrived[partition]


def test_a_partition_that_is_new_to_a_running_group_is_read(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one, Admin(cluster.bootstrap_servers) as admin:
        assert {message.partition for message in one.messages(max_messages=2, timeout=30)} == {0, 1}
        admin.alter_topic(tested, partitions=3)
        produce(cluster, tested, 2)
        assert {message.partition for message in one.messages(max_messages=1, timeout=30)} == {2}


def test_the_last_commit_is_tried_again_when_its_answer_is_lost(cluster: LocalCluster, tested: str) -> None:
    asked: list[str] = []

    def lose_one(ask: Ask, method: str) -> Any:
        asked.append(method)
        if method == "CommitOffsets" and asked.count(method) == 1:
            raise lost()
        return ask()

    one = member(cluster, tested, auto_commit_interval_ms=3_600_000)
    assert len(one.consume(2, 30)) == 2
    assert one.consume(1, 0) == []
    with requests(lose_one):
        one.close()
    assert asked.count("CommitOffsets") == 2
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(tested) == {TopicPartition(tested, 0): 1, TopicPartition(tested, 1): 1}


def test_a_partition_whose_release_was_not_answered_is_read_again_when_it_comes_back(
    cluster: LocalCluster, tested: str
) -> None:
    is_refusing, was_refused = threading.Event(), threading.Event()
    is_refusing.set()

    def refuse(ask: Ask, method: str) -> Any:
        if method == "ReleasePartitions" and is_refusing.is_set():
            was_refused.set()
            raise lost()
        return ask()

    with requests(refuse), member(cluster, tested) as one:
        membership = one._membership
        assert membership is not None
        assert len(one.consume(2, 30)) == 2  # and they stay in hand, so that nothing is released yet
        with member(cluster, tested):
            waited_for(lambda: len(membership._share) == 1 and not membership._freed)
            assert one.poll(0) is None
            waited_for(was_refused.is_set)
        waited_for(lambda: len(membership._share) == 2)
        is_refusing.clear()
        produce(cluster, tested, 0, 1)
        assert {message.partition for message in one.messages(max_messages=2, timeout=30)} == {0, 1}


def test_consume_returns_nothing_of_a_lease_that_ended_while_it_waited(cluster: LocalCluster, tested: str) -> None:
    def refuse(ask: Ask, method: str) -> Any:
        if method in ("RenewMember", "JoinGroup"):
            raise lost()
        return ask()

    with member(cluster, tested, session_timeout_ms=1000) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        with requests(refuse):
            assert one.consume(3, 3) == []
        found = [(message.partition, message.offset) for message in one.consume(2, 30)]
        assert sorted(found) == [(0, 0), (1, 0)], "they are handed out by the next membership"


def test_a_commit_of_a_member_that_was_removed_says_that_it_owns_nothing(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, enable_auto_commit=False) as one:
        [message] = one.consume(1, 30)
        membership = one._membership
        assert membership is not None
        membership._leave()
        with pytest.raises(NotOwner):
            one.commit(message)
        assert one.commit(next(one.messages(timeout=30))) is None, "it has joined again"


def test_news_that_come_while_a_claim_is_refused_for_them_are_acted_upon(cluster: LocalCluster, tested: str) -> None:
    is_waiting, has_news, has_claimed = threading.Event(), threading.Event(), threading.Event()

    def news_during_a_claim(ask: Ask, method: str) -> Any:
        known = membership._generation
        if method == "AwaitGroup":
            is_waiting.set()
            reply = ask()
            if reply.news.generation > known and not has_claimed.is_set():
                has_news.set()
                assert has_claimed.wait(30)
            return reply
        if method == "ClaimPartitions" and has_news.is_set() and not has_claimed.is_set():
            has_claimed.set()
            waited_for(lambda: membership._generation > known)
        return ask()

    with member(cluster, tested) as other, Admin(cluster.bootstrap_servers) as admin:
        assert len(other.consume(2, 30)) == 2  # it has them in hand, so the other one has to wait
        with member(cluster, tested) as one:
            assert one._membership is not None
            membership = one._membership
            waited_for(lambda: len(membership._waiting) == 1)
            with requests(news_during_a_claim, one):
                assert is_waiting.wait(30)
                admin.alter_topic(tested, partitions=4)
                waited_for(lambda: bool(partitions_of(one)))
            assert has_claimed.is_set()
