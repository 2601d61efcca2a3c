"""The Kafka connector's rules for records, partitions and topics that come and go, by failOnDataLoss."""

from __future__ import annotations

import itertools
import logging
import math
import re
import shlex
import sys
import threading
import traceback
from types import CodeType
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafkalog.cli.main import run
from kafkalog.client import groups
from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch
from kafkalog.errors import (
    BrokerBusy,
    BrokerStopping,
    BrokerUnreachable,
    CorruptBatch,
    DataLost,
    KafkalogError,
    LeaderNotAvailable,
    NoBrokers,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopic,
    ZooKeeperNotAsked,
)
from kafkalog.format.batch import read_header
from kafkalog.records import TopicPartition
from pyspark_kafkalog.read.group_publisher import Progress
from pyspark_kafkalog.read.offset_reader import Lookup
from pyspark_kafkalog.source import StreamReader
from tests.pyspark_kafkalog.live import EVERYTHING, Live, read_between, rows
from tests.threads import join_all
from tests.waiting import waited_for

EARLIEST = {"startingOffsets": "earliest"}
GO_ON = {"startingOffsets": "earliest", "failOnDataLoss": "false"}

Position = dict[str, Any]


def started(live: Live, topic: str, **options: Any) -> tuple[StreamReader, Position, Position]:
    """A stream with its start and the end of its first micro-batch."""
    stream = live.stream(subscribe=topic, **options)
    start = stream.initialOffset()
    return stream, start, stream.latestOffset(start, EVERYTHING)


# --- what comes ------------------------------------------------------------------------------------------------------


def test_an_added_partition_that_does_not_start_at_zero(live: Live) -> None:
    topic = live.topic(2)
    strict, _, end = started(live, topic, **EARLIEST)
    lenient = live.stream(subscribe=topic, **GO_ON)
    live.admin.alter_topic(topic, partitions=2)
    live.append(topic, 5, 1)
    live.delete_before(topic, 3, 1)
    with pytest.raises(
        DataLost, match=f"{topic}-1, new to the stream, starts at 3, not at 0; set failOnDataLoss=false"
    ):
        strict.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match=f"{topic}-1, new to the stream, starts at 3"):
        strict.partitions(end, {topic: {"0": 2, "1": 5}})
    after = lenient.latestOffset(end, EVERYTHING)
    assert after == {topic: {"0": 2, "1": 5}}
    assert read_between(lenient, end, after) == [(1, 3), (1, 4)]
    limited = live.stream(subscribe=topic, **GO_ON, maxOffsetsPerTrigger="1")
    assert limited.latestOffset(end, limited.getDefaultReadLimit()) == {topic: {"0": 2, "1": 4}}


def test_an_added_partition_that_is_gone_before_its_start_is_known(live: Live, monkeypatch: Any) -> None:
    topic = live.topic(2)
    strict, _, end = started(live, topic, **EARLIEST)
    lenient = live.stream(subscribe=topic, **GO_ON)
    live.admin.alter_topic(topic, partitions=2)
    live.append(topic, 1, 1)
    monkeypatch.setattr(Lookup, "earliest_of_those_there", lambda self, partitions: {})
    says = f"{topic}-1, new to the stream, disappeared before the first offset was known"
    with pytest.raises(DataLost, match=says):
        strict.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match=says):
        strict.partitions(end, {topic: {"0": 2, "1": 1}})
    assert lenient.latestOffset(end, EVERYTHING) == end
    assert lenient.partitions(end, {topic: {"0": 2, "1": 1}}) == []


@pytest.mark.parametrize("options", [EARLIEST, GO_ON])
def test_a_suspected_loss_is_asked_again_before_it_is_believed(
    live: Live, monkeypatch: Any, options: dict[str, str]
) -> None:
    topic = live.topic(5)
    stream, start, end = started(live, topic, **options)
    looks: list[str] = []
    known_ends = Lookup.known_ends

    def lagging(self: Lookup, partitions: Any) -> Any:
        found = known_ends(self, partitions)
        looks.append(topic)
        return dict.fromkeys(found, 3) if len(looks) < 3 else found

    monkeypatch.setattr(Lookup, "known_ends", lagging)
    assert stream.latestOffset(start, EVERYTHING) == {topic: {"0": 3}}
    looks.clear()
    live.append(topic, 1)
    assert stream.latestOffset(end, EVERYTHING) == {topic: {"0": 6}}
    assert len(looks) == 3


# --- what goes -------------------------------------------------------------------------------------------------------


def test_a_deleted_topic_fails_the_stream_or_is_left_out_while_the_others_continue(live: Live) -> None:
    kept, deleted = live.topic(2), live.topic(3)
    options = {"subscribe": f"{kept},{deleted}"}
    strict, lenient = live.stream(**options, **EARLIEST), live.stream(**options, **GO_ON)
    start = lenient.initialOffset()
    end = lenient.latestOffset(start, EVERYTHING)
    planned = lenient.partitions(start, end)
    assert end == {kept: {"0": 2}, deleted: {"0": 3}}
    live.admin.delete_topic(deleted)
    live.append(kept, 1)
    with pytest.raises(DataLost, match=f"topic '{deleted}', which the stream reads, was deleted"):
        strict.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match=f"{deleted}"):
        strict.partitions(start, end)
    assert sorted(set(rows(lenient, planned))) == [(0, 0), (0, 1)]  # a task that was planned before
    assert sorted(set(read_between(lenient, start, end))) == [(0, 0), (0, 1)]
    after = lenient.latestOffset(end, EVERYTHING)
    assert after == {kept: {"0": 3}}
    assert read_between(lenient, end, after) == [(0, 2)]
    assert lenient.latestOffset(after, EVERYTHING) == after
    restarted = live.stream(**options, **GO_ON)
    assert restarted.latestOffset(after, EVERYTHING) == after
    with pytest.raises(UnknownTopic, match=deleted):
        live.stream(**options, **EARLIEST).latestOffset(after, EVERYTHING)
    with pytest.raises(DataLost, match=f"the stream reads {deleted}-0, deleted since"):
        strict.partitions(end, after)


def test_several_topics_that_are_gone_are_left_out(live: Live) -> None:
    kept, first, second = live.topic(2), live.topic(3), live.topic(3)
    stream = live.stream(subscribe=f"{kept},{first},{second}", **GO_ON)
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    for gone in (first, second):
        live.admin.delete_topic(gone)
    assert stream.latestOffset(end, EVERYTHING) == {kept: {"0": 2}}


@pytest.mark.parametrize("how", ["subscribe", "subscribePattern", "assign"])
def test_a_checkpoint_of_what_the_options_leave_out_is_reported_as_that_and_not_as_a_loss(
    live: Live, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    src, text = live.topic(2), live.topic(3)
    logged = {src: {"0": 2}}
    selects = {how: {"subscribe": text, "subscribePattern": f"^{text}$", "assign": {text: [0]}}[how]}
    strict, lenient = live.stream(**selects, **EARLIEST), live.stream(**selects, **GO_ON)
    says = f"^the checkpoint has {src}-0, but the options select {how}=.*{text}.*: give the query its own checkpoint"
    for call in (lambda: strict.latestOffset(logged, EVERYTHING), lambda: strict.partitions({src: {"0": 1}}, logged)):
        with pytest.raises(KafkalogError, match=says) as raised:
            call()
        assert "failOnDataLoss" not in str(raised.value)
        assert "deleted" not in str(raised.value)
    with caplog.at_level(logging.WARNING):
        assert lenient.latestOffset(logged, EVERYTHING) == {text: {"0": 3}}
        assert read_between(lenient, logged, {text: {"0": 3}}) == [(0, 0), (0, 1), (0, 2)]
        assert lenient.partitions({src: {"0": 1}}, logged) == []
        with pytest.raises(KafkalogError, match=says):  # of the checkpoint only what is left out
            strict.latestOffset({**logged, text: {"0": 1}}, EVERYTHING)
    assert "deleted" not in caplog.text
    assert caplog.text.count("left_out_of_the_checkpoint") == 1


def test_when_every_topic_of_a_pattern_is_gone_the_stream_fails_or_keeps_its_position_and_never_has_none(
    live: Live,
) -> None:
    topic = live.topic(2)
    strict, stream = (live.stream(subscribePattern=f"{topic}.*", **options) for options in (EARLIEST, GO_ON))
    start = stream.initialOffset()
    end = stream.latestOffset(start, EVERYTHING)
    live.admin.delete_topic(topic)
    with pytest.raises(DataLost, match=f"the stream reads {topic}-0, deleted since"):
        strict.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match=f"the batch reads {topic}-0, deleted since"):
        strict.partitions(start, end)
    assert stream.partitions(start, end) == []
    assert stream.latestOffset(end, EVERYTHING) == end == {topic: {"0": 2}}


# --- made anew while the query was stopped ---------------------------------------------------------------------------


def ran(live: Live, topic: str, **options: Any) -> Position:
    """The position in the checkpoint of a query that read all there was, and published that before it was stopped."""
    stream, _, end = started(live, topic, **EARLIEST, **options)
    stream.latestOffset(end, EVERYTHING)
    stream.stop()
    return end


def made_anew(live: Live, topic: str, *counts: int) -> None:
    live.admin.delete_topic(topic)
    live.admin.create_topic(topic, partitions=len(counts))
    for partition, count in enumerate(counts):
        live.append(topic, count, partition)


def test_a_topic_created_again_while_its_query_was_stopped_fails_it_or_is_read_from_its_start(live: Live) -> None:
    topic = live.topic(3, 2)
    end = ran(live, topic)
    made_anew(live, topic, 5, 5)
    says = f"topic '{topic}' was deleted and created again: group spark-{topic} has offset 3 of {topic}-0 in the"
    strict = live.stream(subscribe=topic)
    with pytest.raises(DataLost, match=says):
        strict.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match=says):
        live.stream(subscribe=topic).partitions({topic: {"0": 1, "1": 2}}, end)  # a micro-batch to be done again
    strict.stop()
    lenient = live.stream(subscribe=topic, failOnDataLoss="false")
    assert lenient.partitions({topic: {"0": 1, "1": 2}}, end) == []
    back = lenient.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0, "1": 0}}  # an empty micro-batch
    assert lenient.partitions(end, back) == []
    killed = live.stream(subscribe=topic, failOnDataLoss="false")  # with that in the checkpoint, or without
    assert killed.latestOffset(end, EVERYTHING) == back
    after = lenient.latestOffset(back, EVERYTHING)
    assert after == {topic: {"0": 5, "1": 5}}
    assert len(read_between(lenient, back, after)) == 10
    lenient.stop()
    live.append(topic, 1)
    restarted = live.stream(subscribe=topic)  # it is the stream's topic by now, wherever it was stopped
    assert restarted.latestOffset(after, EVERYTHING) == {topic: {"0": 6, "1": 5}}


@pytest.mark.parametrize("options", [{"minOffsetsPerTrigger": "1000"}, {"maxOffsetsPerTrigger": "1"}])
def test_a_topic_created_again_is_begun_whatever_the_limits_say(live: Live, options: dict[str, str]) -> None:
    topic = live.topic(3)
    end = ran(live, topic)
    stopped = live.stream(subscribe=topic, failOnDataLoss="false", **options)
    running, _, _ = started(live, topic, **GO_ON, **options)
    made_anew(live, topic, 5)
    for stream in (running, stopped):
        assert stream.latestOffset(end, stream.getDefaultReadLimit()) == {topic: {"0": 0}}


def test_available_now_reads_a_topic_created_again_while_it_was_stopped(live: Live) -> None:
    topic = live.topic(3)
    end = ran(live, topic)
    made_anew(live, topic, 5)
    stream = live.stream(subscribe=topic, failOnDataLoss="false")
    stream.prepareForTriggerAvailableNow()
    back = stream.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0}}
    assert stream.latestOffset(back, EVERYTHING) == {topic: {"0": 5}}


def test_available_now_reads_a_topic_created_again_with_more_partitions_after_an_empty_batch(live: Live) -> None:
    topic = live.topic(3)
    end = ran(live, topic)
    made_anew(live, topic, 2, 1)
    stream = live.stream(subscribe=topic, failOnDataLoss="false")
    stream.prepareForTriggerAvailableNow()
    back = stream.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0}}
    assert stream.partitions(end, back) == []
    after = stream.latestOffset(back, EVERYTHING)
    assert after == {topic: {"0": 2, "1": 1}}
    assert len(stream.partitions(back, after)) == 2
    with pytest.raises(DataLost, match=r"ends in .*-0, but the target is"):
        stream.partitions(after, back)


def test_nothing_is_said_of_a_topic_of_which_the_group_has_nothing_or_the_new_one(live: Live) -> None:
    topic = live.topic(3)
    made_anew(live, topic, 5)
    assert live.stream(subscribe=topic).latestOffset({topic: {"0": 3}}, EVERYTHING) == {topic: {"0": 5}}
    other = live.topic(3, 3)
    ran(live, other)
    made_anew(live, other, 5, 5)
    live.admin.commit(f"spark-{other}", {TopicPartition(other, 1): 1})  # somebody of the group is in the new one
    at = {other: {"0": 3, "1": 3}}
    assert live.stream(subscribe=other).latestOffset(at, EVERYTHING) == {other: {"0": 5, "1": 5}}


def test_a_topic_is_restarted_once_although_nothing_could_be_published_since(live: Live, monkeypatch: Any) -> None:
    topic = live.topic(3)
    end = ran(live, topic)
    made_anew(live, topic, 5)
    monkeypatch.setattr(Progress, "at", lambda *given: None)
    stream = live.stream(subscribe=topic, failOnDataLoss="false")
    back = stream.latestOffset(end, EVERYTHING)
    after = stream.latestOffset(back, EVERYTHING)
    assert (back, after) == ({topic: {"0": 0}}, {topic: {"0": 5}})
    assert live.stream(subscribe=topic).latestOffset(after, EVERYTHING) == after


def go_on_unpublished(live: Live, stream: StreamReader, position: Position, monkeypatch: Any) -> Position:
    """Where a stream is after a micro-batch of all there is, in which its driver is killed."""
    with monkeypatch.context() as patched:
        patched.setattr(Progress, "at", lambda *given: None)
        end = stream.latestOffset(position, EVERYTHING)
    stream.stop()
    return end


@pytest.mark.parametrize("killed", ["where it is gone", "in its first micro-batch"])
@pytest.mark.parametrize("restarted_with", ["true", "false"])
def test_a_topic_that_the_stream_saw_go_and_come_back_is_not_taken_for_the_one_before_at_a_restart(
    live: Live, monkeypatch: Any, caplog: pytest.LogCaptureFixture, killed: str, restarted_with: str
) -> None:
    kept = live.topic(5)
    deleted = f"{kept}.b"
    live.admin.create_topic(deleted)
    live.append(deleted, 5)
    selects = {"subscribePattern": f"{kept}.*"}
    stream = live.stream(**selects, **GO_ON)
    position = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    stream.latestOffset(position, EVERYTHING)
    group = stream._session.options.group
    waited_for(lambda: TopicPartition(deleted, 0) in live.admin.committed(group))
    live.admin.delete_topic(deleted)
    position = stream.latestOffset(position, EVERYTHING)
    assert position == {kept: {"0": 5}}
    if killed == "where it is gone":
        stream.stop()
        stream = live.stream(**selects, **GO_ON)
    live.admin.create_topic(deleted)
    live.append(deleted, 7)
    after = go_on_unpublished(live, stream, position, monkeypatch)
    assert after == {kept: {"0": 5}, deleted: {"0": 7}}
    assert "created again" not in caplog.text  # it was gone, and this one is new to the stream
    again = live.stream(**selects, startingOffsets="earliest", failOnDataLoss=restarted_with)
    assert len(read_between(again, position, after)) == 7
    assert again.latestOffset(after, EVERYTHING) == after


def test_a_query_that_comes_to_a_group_with_offsets_of_a_deleted_topic_is_told_how_to_continue(live: Live) -> None:
    """Its checkpoint does not say of which topic it is, and looks like one of the deleted topic."""
    topic = live.topic(5)
    ran(live, topic)
    made_anew(live, topic, 7)
    position = ran(live, topic, kafkalog__group__id=f"{topic}.own")
    assert position == {topic: {"0": 7}}
    changed = live.stream(subscribe=topic)
    with pytest.raises(DataLost, match="the query's group has changed") as lost:
        changed.latestOffset(position, EVERYTHING)
    changed.stop()
    [command] = re.findall("`kafkalog (.*)`", str(lost.value))
    assert run([*shlex.split(command), "--bootstrap", live.servers, "--wait"]) == 0
    live.append(topic, 1)
    again = live.stream(subscribe=topic)
    assert again.latestOffset(position, EVERYTHING) == {topic: {"0": 8}}


def test_a_topic_created_again_while_a_micro_batch_is_run_again_fails_or_is_read_from_its_start(live: Live) -> None:
    topic = live.topic(3, 2)
    end = ran(live, topic)
    before = {topic: {"0": 1, "1": 2}}
    strict, lenient = live.stream(subscribe=topic), live.stream(subscribe=topic, failOnDataLoss="false")
    for stream in (strict, lenient):
        assert read_between(stream, before, end) == [(0, 1), (0, 2)]
    made_anew(live, topic, 5, 5)
    with pytest.raises(DataLost, match=f"topic '{topic}' was deleted and created again"):
        strict.latestOffset(end, EVERYTHING)
    back = lenient.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0, "1": 0}}
    assert len(read_between(lenient, back, lenient.latestOffset(back, EVERYTHING))) == 10


def test_a_topic_that_was_created_again_under_a_running_stream_is_not_begun_once_more_at_a_restart(
    live: Live, monkeypatch: Any
) -> None:
    topic = live.topic(3, 2)
    end = ran(live, topic)
    stream = live.stream(subscribe=topic, **GO_ON)
    assert stream.latestOffset(end, EVERYTHING) == end
    made_anew(live, topic, 5, 5)
    back = stream.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0, "1": 0}}
    after = go_on_unpublished(live, stream, back, monkeypatch)
    assert live.stream(subscribe=topic).latestOffset(after, EVERYTHING) == after == {topic: {"0": 5, "1": 5}}


@pytest.mark.parametrize(
    "error",
    [
        ZooKeeperNotAsked(address="zk:2181", reason="there is no connection"),
        RequestTimedOut(what="CommittedOffsets", address="broker:9092", timeout_ms=3000),
        BrokerBusy(broker=0, reason="too many wait"),
        BrokerStopping(broker_id=0),
        NoBrokers(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_new_topic_waits_until_the_group_has_forgotten_the_one_before(
    live: Live, monkeypatch: Any, error: KafkalogError
) -> None:
    kept = live.topic(1)
    stream = live.stream(subscribePattern=f"{kept}.*", **EARLIEST)
    start = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    live.admin.create_topic(f"{kept}.b")
    live.append(f"{kept}.b", 2)
    live.append(kept, 1)

    def away(*given: Any, **named: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Lookup, "group_offsets", away)
        assert stream.latestOffset(start, EVERYTHING) == {kept: {"0": 2}}
        with pytest.raises(type(error)):  # there is no later look
            stream.latestOffset(start, ReadAllAvailable())
    assert stream.latestOffset(start, EVERYTHING) == {kept: {"0": 2}, f"{kept}.b": {"0": 2}}


def test_a_topic_created_again_waits_until_the_group_has_forgotten_the_one_before_each_time_with_one_warning(
    live: Live, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = live.topic(3)
    stream, _, end = started(live, topic, **GO_ON)
    forgotten: list[Any] = []
    forget = Lookup.forget_group_offsets

    def away(*given: Any, **named: Any) -> Any:
        raise ZooKeeperNotAsked(address="zk:2181", reason="there is no connection")

    def asked(self: Lookup, topic_ids: Any, **named: Any) -> None:
        forgotten.extend(topic_ids)
        forget(self, topic_ids, **named)

    monkeypatch.setattr(Lookup, "forget_group_offsets", asked)
    for times in (1, 2):
        made_anew(live, topic, 5)
        back = stream.latestOffset(end, EVERYTHING)
        assert back == {topic: {"0": 0}}
        with monkeypatch.context() as patched:
            patched.setattr(Lookup, "forget_group_offsets", away)
            for _ in range(2):
                assert stream.latestOffset(back, EVERYTHING) == back
        assert caplog.text.count("new_topics_wait") == times
        for _ in range(2):
            end = stream.latestOffset(back, EVERYTHING)
            assert end == {topic: {"0": 5}}
        assert len(forgotten) == times


def test_a_topic_created_again_while_records_are_waited_for_is_begun(live: Live, monkeypatch: Any) -> None:
    monkeypatch.setattr("pyspark_kafkalog.read.stream._IDLE_GAP_S", math.inf)
    topic = live.topic(3)
    stream, _, end = started(live, topic, **GO_ON)
    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", lambda *given: made_anew(live, topic, 5))
    assert stream.latestOffset(end, EVERYTHING) == {topic: {"0": 0}}


def test_a_new_checkpoint_of_brokers_that_do_not_answer_fails_although_only_the_group_was_asked_for(
    live: Live, monkeypatch: Any
) -> None:
    def away(*given: Any, **named: Any) -> Any:
        raise BrokerUnreachable(address="broker", reason="refused")

    monkeypatch.setattr(Lookup, "group_offsets", away)
    with pytest.raises(BrokerUnreachable):
        live.stream(subscribe=live.topic(1)).initialOffset()


def test_a_new_checkpoint_is_not_taken_for_one_of_the_topic_before(live: Live) -> None:
    topic = live.topic(3)
    ran(live, topic)
    made_anew(live, topic, 5)
    anew = live.stream(subscribe=topic, startingOffsets="earliest")
    start = anew.initialOffset()
    end = anew.latestOffset(start, EVERYTHING)
    anew.stop()  # before it published anything
    assert live.stream(subscribe=topic).latestOffset(end, EVERYTHING) == end == {topic: {"0": 5}}


def test_a_position_behind_the_end_fails_the_stream_or_goes_back_to_the_end(live: Live) -> None:
    topic = live.topic(3)
    beyond = {topic: {"0": 9}}
    with pytest.raises(DataLost, match=f"offset 9 of {topic}-0, which now ends at 3"):
        live.stream(subscribe=topic, **EARLIEST).latestOffset(beyond, EVERYTHING)
    lenient = live.stream(subscribe=topic, **GO_ON)
    end = lenient.latestOffset(beyond, EVERYTHING)
    assert end == {topic: {"0": 3}}
    assert lenient.partitions(beyond, end) == []
    with pytest.raises(DataLost, match=f"offset 9 of {topic}-0, which now ends at 3"):
        live.stream(subscribe=topic, **EARLIEST).partitions(beyond, end)
    at_its_start, start, _ = started(live, topic, startingOffsets={topic: {"0": 2}})
    with pytest.raises(DataLost, match=f"offset 2 of {topic}-0, which now ends at 1"):
        at_its_start.partitions(start, {topic: {"0": 1}})  # no replay: its first batch ended further on
    live.append(topic, 1)
    assert read_between(lenient, end, lenient.latestOffset(end, EVERYTHING)) == [(0, 3)]


def test_a_topic_created_again_is_read_from_its_start_by_way_of_an_empty_batch(live: Live) -> None:
    topic = live.topic(3)
    stream, start, end = started(live, topic, **GO_ON)
    planned = stream.partitions(start, end)
    live.admin.delete_topic(topic)
    live.admin.create_topic(topic)
    live.append(topic, 5)
    assert rows(stream, planned) == []  # a task that was planned before reads nothing of the new topic
    assert stream.partitions(start, end) == []
    back = stream.latestOffset(end, EVERYTHING)
    assert back == {topic: {"0": 0}}
    assert stream.partitions(end, back) == []
    after = stream.latestOffset(back, EVERYTHING)
    assert read_between(stream, back, after) == [(0, offset) for offset in range(5)]


@pytest.mark.parametrize("start", [0, 2])
def test_a_batch_that_starts_before_the_log_does(live: Live, start: int) -> None:
    topic = live.topic(6)
    live.delete_before(topic, 4)
    offsets = {"startingOffsets": {topic: {"0": start}}}
    with pytest.raises(DataLost, match=rf"offset {start} of {topic}-0 is outside \[4, 6\]"):
        live.read(subscribe=topic, **offsets)
    assert live.read(subscribe=topic, **offsets, failOnDataLoss="false") == [[4, 5]]
    inside = {**offsets, "endingOffsets": {topic: {"0": 3}}}
    assert live.read(subscribe=topic, **inside, failOnDataLoss="false") == []


def test_a_batch_that_ends_behind_the_log(live: Live) -> None:
    topic = live.topic(3)
    ends = {"endingOffsets": {topic: {"0": 8}}}
    with pytest.raises(DataLost, match=f"{topic}-0 ends at offset 3 and was to be read up to 8"):
        live.read(subscribe=topic, **ends)
    assert live.read(subscribe=topic, **ends, failOnDataLoss="false") == [[0, 1, 2]]


def test_a_deleted_topic_in_a_task_of_a_batch(live: Live) -> None:
    topic = live.topic(3)
    for options in ({}, {"failOnDataLoss": "false"}):
        reader = live.batch(subscribe=topic, **options)
        planned = reader.partitions()
        live.admin.delete_topic(topic)
        if options:
            assert rows(reader, planned) == []
        else:
            with pytest.raises(DataLost, match=f"{topic}-0 is not there any more"):
                rows(reader, planned)
        live.admin.create_topic(topic)


def test_records_that_age_out_while_they_are_read_are_jumped_over_and_none_comes_twice(
    live: Live, monkeypatch: Any
) -> None:
    from kafkalog.client.consumer import range_fetch

    topic = live.topic(0)
    for _ in range(10):
        live.append(topic, 1)
    fetch_range = range_fetch.fetch_range

    def aging(cluster: Any, partition: TopicPartition, topic_id: Any, start: int, end: int, **_: Any) -> Any:
        """One answer, and then the log starts further on."""
        fetched = fetch_range(cluster, partition, topic_id, start, end, max_bytes=1)
        yield next(fetched)
        if start < 6:
            live.delete_before(topic, 6 if start == 0 else 8)
            raise OffsetOutOfRange(offset=start + 1, partition=str(partition), start_offset=6, end_offset=10)
        yield from fetched

    monkeypatch.setattr(range_fetch, "fetch_range", aging)
    stream, start, end = started(live, topic, **GO_ON)
    assert read_between(stream, start, end) == [(0, 0), *((0, offset) for offset in range(6, 10))]
    assert read_between(stream, {topic: {"0": 2}}, {topic: {"0": 5}}) == []
    strict = live.stream(subscribe=topic, **EARLIEST)
    with pytest.raises(DataLost, match="is outside"):
        read_between(strict, {topic: {"0": 2}}, end)


def test_records_that_age_out_in_the_middle_of_a_batch_from_earliest_are_a_loss(live: Live, monkeypatch: Any) -> None:
    """At its start they are none: earliest is what there is."""
    from kafkalog.client.consumer import range_fetch

    topic = live.topic(0)
    for _ in range(6):
        live.append(topic, 1)
    fetch_range = range_fetch.fetch_range

    def aging(cluster: Any, partition: TopicPartition, topic_id: Any, start: int, end: int, **_: Any) -> Any:
        """One answer, and then the log starts further on."""
        yield next(fetch_range(cluster, partition, topic_id, start, end, max_bytes=1))
        live.delete_before(topic, 4)
        raise OffsetOutOfRange(offset=1, partition=str(partition), start_offset=4, end_offset=6)

    monkeypatch.setattr(range_fetch, "fetch_range", aging)
    with pytest.raises(DataLost, match=f"offset 1 of {topic}-0 is outside"):
        live.read(subscribe=topic)


def test_a_partition_that_is_gone_takes_no_other_along(live: Live) -> None:
    gone, there = sorted((live.topic(2), live.topic(3)))
    counts = len(live.read(subscribe=there)[0])
    reader = live.batch(subscribe=f"{gone},{there}", maxInputPartitions="1", failOnDataLoss="false")
    lookup = Lookup(reader._options)
    [planned] = reader.partitions()
    live.admin.delete_topic(gone)
    assert rows(reader, [planned]) == [(0, offset) for offset in range(counts)]
    at = [TopicPartition(gone, 0), TopicPartition(there, 0)]
    assert lookup.earliest_of_those_there(at) == {at[1]: 0}


def test_a_partition_without_a_leader_is_asked_for_again(live: Live, monkeypatch: Any) -> None:
    topic = live.topic(2)
    stream, start, _ = started(live, topic, **EARLIEST)
    at, failures = Lookup.at, [1]

    def electing(self: Lookup, symbol: int, partitions: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise LeaderNotAvailable(partition=f"{topic}-0", broker_id=7)
        return at(self, symbol, partitions)

    monkeypatch.setattr(Lookup, "at", electing)
    assert stream.latestOffset(start, EVERYTHING) == {topic: {"0": 2}}
    assert failures == [0]


@pytest.mark.parametrize("ends_at", [1, 4])  # 4: another broker, which has what the first said is gone
def test_a_log_that_is_cut_back_while_it_is_read_is_not_read_again_from_its_start(
    live: Live, monkeypatch: Any, ends_at: int
) -> None:
    from kafkalog.client.consumer import range_fetch

    topic = live.topic(0)
    for _ in range(4):
        live.append(topic, 1)
    fetch_range = range_fetch.fetch_range
    starts = []

    def cut_back(cluster: Any, partition: TopicPartition, topic_id: Any, start: int, end: int, **_: Any) -> Any:
        """Two answers, and then the log ends before what was read of it."""
        starts.append(start)
        fetched = fetch_range(cluster, partition, topic_id, start, end, max_bytes=1)
        yield next(fetched)
        yield next(fetched)
        raise OffsetOutOfRange(offset=start + 2, partition=str(partition), start_offset=0, end_offset=ends_at)

    monkeypatch.setattr(range_fetch, "fetch_range", cut_back)
    assert live.read(subscribe=topic, failOnDataLoss="false") == [[0, 1]]
    assert starts == [0]
    says = f"{topic}-0 ends at offset 1 and was to be read up to" if ends_at == 1 else "offset 2 of .* is outside"
    with pytest.raises(DataLost, match=says):
        live.read(subscribe=topic)


def test_a_damaged_range_fails_or_is_jumped_over(
    live: Live, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from kafkalog.client.consumer import range_fetch

    topic = live.topic(0)
    for _ in range(6):
        live.append(topic, 1)
    fetch_range = range_fetch.fetch_range

    def damaged(cluster: Any, partition: TopicPartition, topic_id: Any, start: int, end: int, **_: Any) -> Any:
        if start < 4:
            yield from fetch_range(cluster, partition, topic_id, start, 2)
            raise CorruptBatch(partition=str(partition), offset=2, reason="damaged on disk", end_offset=4)
        yield from fetch_range(cluster, partition, topic_id, start, end)

    monkeypatch.setattr(range_fetch, "fetch_range", damaged)
    with pytest.raises(CorruptBatch, match="damaged on disk"):
        live.read(subscribe=topic)
    with caplog.at_level(logging.WARNING):
        assert live.read(subscribe=topic, failOnDataLoss="false") == [[0, 1, 4, 5]]
    [told] = [message for message in caplog.messages if message.startswith("data_lost")]
    assert "damaged on disk" in told


def test_damage_that_a_second_fetch_does_not_meet_leaves_no_record_out(
    live: Live, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = live.topic(0)
    for _ in range(6):
        live.append(topic, 1)
    take = PartitionFetch.take
    changed: set[int] = set()

    def changed_on_the_way(reader: PartitionFetch, answer: Any, data: memoryview) -> list[FetchedBatch]:
        """Each batch comes damaged once."""
        if reader.offset in changed:
            return take(reader, answer, data[: read_header(data).length])
        changed.add(reader.offset)
        damaged = bytearray(data)
        damaged[120] ^= 1
        return take(reader, answer, memoryview(damaged))

    monkeypatch.setattr(PartitionFetch, "take", changed_on_the_way)
    with caplog.at_level(logging.WARNING):
        assert live.read(subscribe=topic, failOnDataLoss="false") == [list(range(6))]
    assert changed == set(range(6))
    assert not [message for message in caplog.messages if message.startswith("data_lost")]


def test_a_loss_that_does_not_fail_a_read_is_reported_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [message for message in caplog.messages if message.startswith("data_lost")]

    topic = live.topic(6)
    stream = live.stream(subscribe=topic, **GO_ON)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            stream.latestOffset({topic: {"0": 9}}, EVERYTHING)
        [one] = told()
        live.delete_before(topic, 4)
        read_between(stream, {topic: {"0": 1}}, {topic: {"0": 6}})
        [_, two] = told()
    assert f"offset 9 of {topic}-0, which now ends at 6" in one
    assert f"offset 1 of {topic}-0 is outside [4, 6]" in two


# --- AvailableNow ----------------------------------------------------------------------------------------------------


def test_a_source_that_has_ended_before_others_leaves_its_group_once_and_for_all(live: Live) -> None:
    topic = live.topic(3)
    stream, start, end = available_now(live, topic)
    assert end == {topic: {"0": 3}}
    read_between(stream, start, end)
    for _ in range(2):  # the micro-batches of other sources
        assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
        stream.commit(end)
        assert not live.admin.describe_group(f"spark-{topic}").members
        assert stream._session.progress._thread is None
    assert set(live.admin.committed(f"spark-{topic}").values()) == {3}


def test_a_source_that_has_ended_while_its_group_cannot_be_written_publishes_its_end_later(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = itertools.count()

    def is_busy(cluster: object, group: str, *_: object) -> None:
        if group == f"spark-{topic}":
            next(attempts)
        raise BrokerBusy(broker=0, reason="a test")

    topic = live.topic(3)
    stream, start, end = available_now(live, topic)
    read_between(stream, start, end)
    with monkeypatch.context() as patched:
        patched.setattr("kafkalog.client.groups.keep_member", is_busy)
        for _ in range(10):  # other sources go on, and wait for a moment only
            assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
            stream.commit(end)
        waited_for(lambda: stream._session.progress._thread is None)
    assert next(attempts) < 48  # of 60, if each call waited for its six
    assert caplog.text.count(f"group_last_position_not_published group=spark-{topic}") == 1
    assert not live.admin.committed(f"spark-{topic}")

    def is_published() -> bool:
        assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
        return set(live.admin.committed(f"spark-{topic}").values()) == {3}

    waited_for(is_published)
    waited_for(lambda: not live.admin.describe_group(f"spark-{topic}").members)
    assert stream._session._is_finished


def test_a_source_that_has_ended_waits_for_an_answer_that_is_on_its_way_a_tenth_of_the_time_since_the_last_try(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark ends the process after its last call."""
    topic = live.topic(3)
    stream, start, end = available_now(live, topic)
    read_between(stream, start, end)
    progress, keep = stream._session.progress, groups.keep_member
    begun, gate = threading.Event(), threading.Event()

    def keep_late(*arguments: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return keep(*arguments)

    monkeypatch.setattr(progress, "finish", lambda timeout=0.1, finish=progress.finish: finish(timeout))
    monkeypatch.setattr(groups, "keep_member", keep_late)
    assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
    assert begun.wait(60) and not stream._session._is_finished
    progress._tried_s -= 600  # a long micro-batch of another source
    monkeypatch.setattr("pyspark_kafkalog.read.group_publisher._PUBLISH_EVERY_S", 0.0)  # it waits for this at least
    main = threading.get_ident()

    def answer() -> None:
        try:
            waited_for(lambda: Progress.finish_again.__code__ in codes_of(main))
        finally:
            gate.set()

    answering = threading.Thread(target=answer)
    answering.start()
    assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
    join_all([answering], 60)
    assert stream._session._is_finished
    assert set(live.admin.committed(f"spark-{topic}").values()) == {3}


def codes_of(thread: int) -> set[CodeType]:
    """What a thread is in."""
    return {frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[thread])}


def available_now(live: Live, topic: str, **options: Any) -> tuple[StreamReader, Position, Position]:
    stream = live.stream(subscribe=topic, **{**GO_ON, **options})
    stream.prepareForTriggerAvailableNow()
    start = stream.initialOffset()
    return stream, start, stream.latestOffset(start, stream.getDefaultReadLimit())


def test_available_now_ends_where_the_log_ended_at_the_first_look(live: Live) -> None:
    topic = live.topic(4)
    stream, start, end = available_now(live, topic, maxOffsetsPerTrigger="3")
    live.append(topic, 3)
    live.admin.alter_topic(topic, partitions=2)
    live.append(topic, 1, 1)
    assert end == {topic: {"0": 3}}
    assert stream.latestOffset(end, stream.getDefaultReadLimit()) == {topic: {"0": 4}}
    assert read_between(stream, start, end) == [(0, 0), (0, 1), (0, 2)]


def test_available_now_fails_on_a_loss_whatever_fail_on_data_loss_says(live: Live) -> None:
    topic = live.topic(4)
    stream, start, end = available_now(live, topic, maxOffsetsPerTrigger="3")
    for moved, says in (
        ({topic: {"0": 3, "1": 1}}, "but the target is"),
        ({}, "ends in none, but the target is"),
        ({topic: {"0": 5}}, "but the target is 4"),
    ):
        with pytest.raises(DataLost, match=says):
            stream.partitions(start, moved)
    live.admin.delete_topic(topic)
    with pytest.raises(DataLost, match="AvailableNow must read it"):
        stream.partitions(start, end)
    with pytest.raises(DataLost, match="AvailableNow must read it"):
        stream.latestOffset(end, EVERYTHING)
    live.admin.create_topic(topic)
    live.append(topic, 1)  # made anew, and shorter
    with pytest.raises(DataLost, match="AvailableNow must read it"):
        stream.partitions(start, end)


def test_available_now_fails_if_a_topic_is_created_again_under_it_although_that_is_longer(live: Live) -> None:
    topic = live.topic(4)
    stream, _, end = available_now(live, topic, maxOffsetsPerTrigger="3")
    made_anew(live, topic, 9)
    with pytest.raises(DataLost, match="AvailableNow must read it"):
        stream.latestOffset(end, EVERYTHING)


def test_available_now_leaves_out_no_topic_of_which_the_group_cannot_be_asked(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = live.topic(1)
    options = {"subscribePattern": f"{kept}.*", **EARLIEST}
    stream = live.stream(**options)
    start = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    stream.stop()
    live.admin.create_topic(f"{kept}.b")
    live.append(f"{kept}.b", 2)
    again = live.stream(**options)
    again.prepareForTriggerAvailableNow()
    asked = Lookup.group_offsets

    def away(lookup: Lookup, topics: Any, **named: Any) -> Any:
        if f"{kept}.b" in topics:
            raise ZooKeeperNotAsked(address="zk:2181", reason="there is no connection")
        return asked(lookup, topics, **named)

    monkeypatch.setattr(Lookup, "group_offsets", away)
    with pytest.raises(ZooKeeperNotAsked):
        again.latestOffset(start, EVERYTHING)


def test_available_now_looks_again_before_it_believes_a_loss_when_it_plans(live: Live, monkeypatch: Any) -> None:
    topic = live.topic(4)
    stream, start, end = available_now(live, topic)
    known_ends, lagging = Lookup.known_ends, [1]

    def looked(self: Lookup, partitions: Any) -> Any:
        found = known_ends(self, partitions)
        if lagging[0]:
            lagging[0] -= 1
            return dict.fromkeys(found, 1)
        return found

    monkeypatch.setattr(Lookup, "known_ends", looked)
    assert len(read_between(stream, start, end)) == 4
    assert lagging == [0]


def test_available_now_from_latest_reads_what_came_before_its_first_look(live: Live) -> None:
    topic = live.topic(4)
    stream = live.stream(subscribe=topic, failOnDataLoss="false")
    stream.prepareForTriggerAvailableNow()
    start = stream.initialOffset()
    live.append(topic, 2)
    live.admin.alter_topic(topic, partitions=2)
    assert stream.latestOffset(start, EVERYTHING) == start
    live.append(topic, 2)
    assert stream.partitions(start, start) == []
    end = stream.latestOffset(start, EVERYTHING)
    assert end == {topic: {"0": 6, "1": 0}}
    assert read_between(stream, start, end) == [(0, 4), (0, 5)]


def test_a_batch_that_is_replayed_before_the_first_look_is_not_held_to_the_target(live: Live) -> None:
    topic = live.topic(4)
    stream = live.stream(subscribe=topic, **EARLIEST)
    stream.prepareForTriggerAvailableNow()
    assert read_between(stream, {topic: {"0": 1}}, {topic: {"0": 3}}) == [(0, 1), (0, 2)]
    assert stream.latestOffset({topic: {"0": 3}}, EVERYTHING) == {topic: {"0": 4}}


def test_a_first_batch_replayed_with_a_later_start_is_empty_and_loses_nothing(live: Live) -> None:
    topic = live.topic(4)
    by_time = {"startingTimestamp": "9000000000000", "startingOffsetsByTimestampStrategy": "latest"}
    for options in ({}, by_time):
        first = live.stream(subscribe=topic, **options)
        logged = first.initialOffset()
        live.append(topic, 2)
        assert first.latestOffset(logged, EVERYTHING) == logged  # a moving start is written down before it is read from
        restarted = live.stream(subscribe=topic, **options)
        assert restarted.initialOffset() != logged
        assert restarted.partitions(restarted.initialOffset(), logged) == []
        end = restarted.latestOffset(logged, EVERYTHING)
        assert len(read_between(restarted, logged, end)) == 2


def test_a_first_batch_replayed_from_earliest_starts_at_what_is_earliest_then(live: Live) -> None:
    topic = live.topic(4)
    _, _, logged = started(live, topic, **EARLIEST)
    live.delete_before(topic, 2)
    restarted = live.stream(subscribe=topic, **EARLIEST)
    assert read_between(restarted, restarted.initialOffset(), logged) == [(0, 2), (0, 3)]
