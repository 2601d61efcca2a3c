"""What a read makes of what brokers say, with answers as the test says. With real brokers: `test_rules_*.py`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client.cluster import NO_LEADER, PartitionInfo
from kafkalog.client.consumer.range_fetch import LeaderHint
from kafkalog.errors import BrokerUnreachable, DataLost, KafkalogError, LeaderNotAvailable, UnknownPartition
from kafkalog.records import TopicPartition
from pyspark_kafkalog.read import offset_reader as lookup
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.offset_reader import Lookup
from pyspark_kafkalog.read.options import parse_source

A0, B0 = TopicPartition("a", 0), TopicPartition("b", 0)


@pytest.fixture
def looking() -> Lookup:
    return Lookup(parse_source({"kafkalog.bootstrap.servers": "here:1", "subscribe": "a,b"}))


def test_a_wait_is_of_a_millisecond_at_least_and_for_nothing_there_is_none(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", lambda _, __, ms: waits.append(ms))
    looking.wait({A0: 1}, 0.0004)
    looking.wait({A0: 1}, 0.25)
    looking.wait({}, 0.25)
    assert waits == [1, 250]


def test_a_loss_is_in_doubt_until_it_is_accepted_and_again_once_it_was_not_found(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(lookup, "time", SimpleNamespace(sleep=pauses.append))
    losses = Losses(fail=False)

    def look(reasons: str, handling: Losses) -> str:
        for reason in reasons:
            handling.found(reason)
        return reasons

    again = looking.options.fetch_attempts - 1
    for reasons, expected in (("a", again), ("a", 0), ("ab", again), ("ba", 0), ("b", 0), ("a", again), ("", 0)):
        pauses.clear()
        assert looking.asked_again(partial(look, reasons), losses) == reasons
        assert len(pauses) == expected, reasons
    strict = Losses(fail=True)
    for _ in range(2):
        pauses.clear()
        with pytest.raises(DataLost):
            looking.asked_again(partial(look, "a"), strict)
        assert len(pauses) == again


def test_a_limit_of_bytes_ends_no_partition_behind_where_it_was_said_to_end(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that came between the look at the ends and that at the bytes are of a later micro-batch."""
    answers = [{A0: (12, 1000), B0: (7, 3000)}, {A0: (12, 1000), B0: (3, 1500)}]
    monkeypatch.setattr(looking, "_after_bytes", lambda wanted: answers.pop(0))
    assert looking.limited_by_bytes({A0: 0, B0: 0}, {A0: 10, B0: 7}, 2000) == {A0: 10, B0: 3}


def test_an_end_by_time_has_nothing_that_came_since_it_was_looked_up(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be later than the time: the next window has it too."""
    now = {A0: 10, B0: 7}

    def by_time(times: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        now[A0] = 11
        return {B0: 3}

    monkeypatch.setattr(looking, "at", lambda symbol, partitions: {each: now[each] for each in partitions})
    monkeypatch.setattr(looking, "_by_time", by_time)
    bound = parse_source(
        {"kafkalog.bootstrap.servers": "here:1", "subscribe": "a,b", "endingTimestamp": "9"}
    ).batch_bounds()[1]
    assert looking.end(bound, [A0, B0]) == {A0: 10, B0: 3}


def test_topics_are_matched_with_a_pattern_only_if_none_can_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that was started at a broker which had been cut off before a topic was made read nothing of it."""
    topic = SimpleNamespace(name="a", topic_id=b"1", partitions=[PartitionInfo(0, 1, 0, (), ())])

    def describe_topics(
        names: Iterable[str] = (), *, is_complete: bool = False, may_lack_new: bool = False
    ) -> list[SimpleNamespace]:
        if is_complete and not may_lack_new:
            raise BrokerUnreachable(address="here:1", reason="there may be more topics")
        return [topic]

    cluster: Any = SimpleNamespace(describe_topics=describe_topics)
    monkeypatch.setattr(lookup, "connected", lambda options: cluster)
    where = {"kafkalog.bootstrap.servers": "here:1"}
    assert Lookup(parse_source({**where, "subscribe": "a"})).partitions() == {A0: b"1"}
    with pytest.raises(BrokerUnreachable, match="there may be more topics"):
        Lookup(parse_source({**where, "subscribePattern": "a.*"})).partitions()
    stream = Lookup(parse_source({**where, "subscribePattern": "a.*"}))
    assert stream.partitions(may_lack_new=True) == {A0: b"1"}, "it looks again"


def test_unopened_is_what_nobody_leads_not_what_a_broker_that_is_away_leads(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = [PartitionInfo(number, leader, 0, (), ()) for number, leader in enumerate((NO_LEADER, 0, 7))]
    cluster: Any = SimpleNamespace(known_topic={"a": SimpleNamespace(partitions=partitions)}.get)
    monkeypatch.setattr(lookup, "connected", lambda options: cluster)
    assert looking.unopened([A0, TopicPartition("a", 1), TopicPartition("a", 2), TopicPartition("a", 3), B0]) == {A0}


def test_a_leader_is_told_of_the_topic_that_was_meant_and_none_where_it_is_not_known(
    looking: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, leads = SimpleNamespace(topic_id=b"1"), SimpleNamespace(broker_id=1)
    errors: list[KafkalogError] = []

    def leader(*_: object) -> SimpleNamespace:
        if errors:
            raise errors.pop()
        return leads

    cluster: Any = SimpleNamespace(known_topic={"a": topic}.get, leader=leader)
    monkeypatch.setattr(lookup, "connected", lambda options: cluster)
    leading: Any = leads
    assert looking.leader(A0, b"1") == LeaderHint(b"1", leading)
    assert looking.leader(A0, b"2") is None
    assert looking.leader(B0, b"1") is None
    for error in (
        LeaderNotAvailable(partition="a-0", broker_id=1),
        UnknownPartition(topic="a", partition=0, partitions=0),
    ):
        errors.append(error)
        assert looking.leader(A0, b"1") is None
