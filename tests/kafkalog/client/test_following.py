"""Which brokers have followed a change: each is asked until it has, and none more often than it answers."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin
from kafkalog.client import following
from kafkalog.client.cluster import BrokerInfo, ClusterInfo
from kafkalog.client.following import brokers_behind
from kafkalog.errors import BrokerUnreachable, UnknownTopicId
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from tests.waiting import suspend

UNKNOWN = pb.TopicDescription(error=error_to_wire(UnknownTopicId(topic_id="00")))
LATE, NOW = pb.TopicDescription(version=1), pb.TopicDescription(version=2)
AWAY = BrokerUnreachable(address="here:1", reason="refused")
HANGS = "hangs"


class Brokers:
    """Stands for a cluster whose brokers give these answers, one after the other, and the last one again."""

    def __init__(self, answers: dict[int, list[Any]]) -> None:
        self._answers = answers
        self.asked: Counter[int] = Counter()

    def describe(self, patient: bool) -> ClusterInfo:
        assert not patient
        return ClusterInfo("", tuple(BrokerInfo(number, "here", 1, 2, "", "") for number in self._answers), "", "")

    def begin(self, method: str, request: pb.DescribeTopicsRequest, broker_id: int) -> Future[Any]:
        assert (method, list(request.ids)) == ("DescribeTopics", [b"t"])
        answers = self._answers[broker_id]
        answer = answers[min(self.asked[broker_id], len(answers) - 1)]
        self.asked[broker_id] += 1
        future: Future[Any] = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not HANGS:
            future.set_result(pb.TopicDescriptions(topics=[answer]))
        return future

    def pause(self, seconds: float) -> None:
        # In the place of `Cluster.pause`, which waits for 0.1 s. No test waits for this: without it, who asks until a
        # time is over would keep the processor busy.
        time.sleep(0.001)


def behind(brokers: Brokers, concerned: range, seconds: float, was_seen: bool = True) -> tuple[int, ...]:
    told: Any = brokers
    return brokers_behind(
        told, b"t", concerned, lambda seen: seen.version >= 2, time.monotonic() + seconds, was_seen=was_seen
    )


def test_each_broker_is_asked_until_it_has_followed_or_the_time_is_over() -> None:
    brokers = Brokers(
        {0: [NOW], 1: [LATE, LATE, NOW], 2: [HANGS], 3: [UNKNOWN], 4: [LATE, UNKNOWN], 5: [AWAY, NOW], 9: [LATE]}
    )
    assert behind(brokers, range(7), 0.3) == (2, 3, 6), "2 hangs, 3 has not heard of the topic yet, 6 is not live"
    asked = dict(brokers.asked)
    assert (asked[0], asked[1], asked[2], asked[4], asked[5], asked[9]) == (1, 3, 1, 2, 2, 1)
    assert asked[3] > 3


def test_a_topic_that_no_broker_knows_any_more_was_deleted() -> None:
    assert behind(Brokers({0: [UNKNOWN], 1: [UNKNOWN]}), range(1), 60) == ()
    assert behind(Brokers({0: [UNKNOWN], 1: [LATE]}), range(1), 0.1) == (0,)
    assert behind(Brokers({0: [UNKNOWN], 1: [HANGS]}), range(1), 0.1) == (0,)
    assert behind(Brokers({0: [UNKNOWN], 1: [UNKNOWN]}), range(1), 0.1, was_seen=False) == (0,)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(brokers=2) as running:
        yield running


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers.split(",")[0]) as running:
        yield running


def test_a_change_of_a_topic_that_is_deleted_meanwhile_waits_for_nobody(
    cluster: LocalCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create_topic("gone", partitions=2)
    describe = admin._cluster.describe

    def deleted_before(**how: Any) -> ClusterInfo:
        with Admin(cluster.bootstrap_servers) as other:
            assert other.delete_topic("gone") == ()
        return describe(**how)

    monkeypatch.setattr(admin._cluster, "describe", deleted_before)
    began = time.monotonic()
    assert admin.alter_topic("gone", {"retention.ms": 7_777_777}).behind == ()
    assert time.monotonic() - began < following.FOLLOWED_SECONDS


def test_a_slow_broker_is_heard(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    call = admin._cluster.call
    asked: Counter[int | None] = Counter()

    def late(method: str, request: Any, *, broker_id: int | None = None, **how: Any) -> Any:
        asked[broker_id] += 1
        answer = call(method, request, broker_id=broker_id, **how)
        if broker_id == 1:
            # The fault is the time that passes: longer than between two questions, and than the patience of anything
            # but the change itself. Nothing happens meanwhile that could end it.
            time.sleep(3)
        return answer

    monkeypatch.setattr(admin._cluster, "call", late)
    assert admin.create_topic("slow", partitions=2).behind == ()
    assert asked[1] <= 2


def test_the_wait_ends_in_time_if_the_broker_that_made_the_change_hangs(
    cluster: LocalCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.client.admin.FOLLOWED_SECONDS", 2)
    admin.create_topic("hung", partitions=2)
    call: Callable[..., Any] = admin._cluster.call
    pids = [broker.pid or 0 for broker in cluster.brokers]

    def suspending(method: str, *more: Any, **how: Any) -> Any:
        answer = call(method, *more, **how)
        if method == "AlterTopic":
            for pid in pids:
                suspend(pid)
        return answer

    monkeypatch.setattr(admin._cluster, "call", suspending)
    began = time.monotonic()
    try:
        assert admin.alter_topic("hung", {"retention.ms": 7_777_777}).behind == (0, 1)
        assert time.monotonic() - began < 15
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
