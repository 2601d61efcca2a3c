"""Whom a consumer's fetching asks, and for how long it tries: over leaders that change as the test says. Over real
brokers it is in `test_consumer.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client import session
from kafkalog.client.config import CONSUMER_SETTINGS
from kafkalog.client.session import FetchSession, Source
from kafkalog.connection import Reply
from kafkalog.errors import BrokerUnreachable, UnknownTopicId
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import PREFIX_SIZE

TOPIC_ID = b"t" * 16


class Unreachable:
    """A cluster of which no broker can be reached; `leader_id` leads."""

    leader_id = 1

    def topic(self, name: str, *, patient: bool) -> SimpleNamespace:
        return SimpleNamespace(topic_id=TOPIC_ID)

    def leader(self, topic: object, number: int) -> SimpleNamespace:
        return SimpleNamespace(broker_id=self.leader_id)

    def connect_data(self, broker_id: int) -> None:
        raise BrokerUnreachable(address=f"broker {broker_id}", reason="connection refused")

    def refresh(self, names: object, *, patient: bool) -> None:
        """Always known."""


def test_a_leader_that_failed_before_another_led_is_tried_as_long_as_one_that_never_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now))
    cluster: Any = Unreachable()
    fetching = FetchSession(cluster, CONSUMER_SETTINGS.parse({"retry.timeout.ms": 1000}))
    fetching.sources = [Source(TopicPartition("t", 0), TOPIC_ID, 0)]
    for leader_id, now in ((1, 0.0), (2, 0.9), (1, 1.8), (1, 2.7)):  # noqa: B007
        cluster.leader_id = leader_id
        fetching._ask_all()
    now = 3.6
    with pytest.raises(BrokerUnreachable, match="broker 1"):
        fetching._ask_all()
    fetching.close()


def fetching(cluster: Any, **settings: Any) -> FetchSession:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    made = FetchSession(cluster, CONSUMER_SETTINGS.parse(given))
    made.sources = [Source(TopicPartition("t", number), TOPIC_ID, 0) for number in range(2)]
    return made


def test_trouble_is_over_with_an_answer_and_with_a_question_that_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails a later time is tried as long as what never failed."""
    now = 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now))
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_timeout_ms=1000)
    trouble = BrokerUnreachable(address="here:1", reason="connection refused")
    waiting._failed(session._NO_BROKER, trouble)
    waiting._failed(1, trouble)
    now = 0.5
    waiting._refresh()
    assert list(waiting._troubles) == [1]
    link: Any = SimpleNamespace(broker_id=1, asked=deque(), connection=Answering())
    waiting._links[1] = link
    link.asked.append(session._Asked(1, [], 60.0))
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    waiting._receive(link)
    assert waiting._troubles == {}
    waiting.close()


class Answering:
    """A connection that answers the first request, with nothing."""

    address = "here:1"

    def receive(self) -> Reply:
        return Reply(pb.ReplyHeader(correlation_id=1, fetch=pb.FetchReply()), None)

    def close(self) -> None:
        """Nothing to close."""


def test_an_error_that_comes_while_nobody_waits_is_for_who_comes_next() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    lost = UnknownTopicId(topic_id="74")

    def fail() -> None:
        raise lost

    waiting._ask_all = fail  # type: ignore[method-assign]
    waiting._drive_guarded(wait=False, end=None)
    with waiting.lock:
        with pytest.raises(UnknownTopicId):
            waiting._ready(waiting.sources)
        assert waiting._ready(waiting.sources) is None, "it is told once"
    waiting.close()


def test_only_one_who_has_nothing_asks_again_before_an_answer_and_who_has_least_comes_first() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    asked: list[list[int]] = []

    class Keeping(Answering):
        def send(self, pieces: Sequence[bytes | memoryview]) -> None:
            header = pb.RequestHeader.FromString(b"".join(pieces)[PREFIX_SIZE:])
            asked.append([part.partition for part in header.fetch.partitions])

    cluster.connect_data = lambda broker_id: Keeping()
    first, second = waiting.sources
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=100))
    first.put_back([batch])
    assert waiting._is_behind()
    waiting._ask_all()
    assert asked == [[1, 0]]
    assert not waiting._is_behind()
    first.asked = None  # as after a seek to what has arrived
    waiting._ask_all()
    assert asked == [[1, 0]], "it has something to go on with"
    second.asked = None
    waiting._ask_all()
    assert asked == [[1, 0], [1, 0]]
    first.asked = second.asked = None
    waiting._ask_all()
    assert len(asked) == 2, "two are enough"
    waiting.close()


def test_a_source_with_an_error_is_not_asked_for_and_a_seek_leaves_nothing_of_where_it_was() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    source = waiting.sources[0]
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=1 << 30))
    source.put_back([batch])
    source.error = source.failure = UnknownTopicId(topic_id="74")
    source.reset_to = 7
    assert not waiting._wants_more(source)
    source.arrived.clear()
    source.arrived_bytes = 0
    assert not waiting._wants_more(source)
    source.put_back([batch])
    source.go_to(3)
    assert waiting._wants_more(source)
    assert (source.arrived_bytes, source.error, source.failure, source.reset_to) == (0, None, None, None)
    assert source.reader.offset == 3
    waiting.close()


def test_a_close_wakes_who_waits_and_who_drives() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    woken: list[str] = []
    waiting.wake = lambda: woken.append("who drives")  # type: ignore[method-assign]
    arrival: Any = waiting._arrival
    arrival.notify_all = lambda: woken.append("who waits")
    waiting.close()
    assert woken == ["who drives", "who waits"]
