"""The Kafka connector's rules for which partitions are read, and where a read starts and ends."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from kafkalog.errors import InvalidArgument, UnknownTopic
from pyspark_kafkalog.datasource import KafkalogDataSource
from pyspark_kafkalog.read import offset_reader as lookup
from pyspark_kafkalog.source import BatchReader
from tests.pyspark_kafkalog import live as readers
from tests.pyspark_kafkalog.live import EVERYTHING, Live, by_partition, rows

NO_MATCH = r"no record at or after timestamp .* startingOffsetsByTimestampStrategy=latest"

# --- which partitions ------------------------------------------------------------------------------------------------


def test_a_pattern_without_a_match_is_an_empty_batch_and_an_idle_stream(live: Live) -> None:
    assert live.batch(subscribePattern="matches.nothing").partitions() == []
    stream = live.stream(subscribePattern="matches.nothing")
    assert stream.latestOffset(stream.initialOffset(), EVERYTHING) == {}


def test_a_selection_is_trimmed_and_empty_names_are_dropped(live: Live) -> None:
    one, two = live.topic(1), live.topic(2)
    ends = {one: {"0": 1}, two: {"0": 2}}
    assert live.start(subscribe=f" {one} ,, {two},", startingOffsets=" Latest ") == ends
    assert live.start(subscribePattern=f" ^{one}$ ") == {one: {"0": 1}}
    assert live.start(assign=f' {{"{two}": [0]}} ') == {two: {"0": 2}}


def test_a_pattern_may_be_found_anywhere_in_a_name(live: Live) -> None:
    topic = live.topic(1)
    assert live.start(subscribePattern=topic[1:-1]) == {topic: {"0": 1}}
    assert live.batch(subscribePattern=f"^{topic[1:]}").partitions() == []


def test_the_options_of_a_kafka_job_are_taken_whatever_their_case(live: Live) -> None:
    topic = live.topic(5)
    options = {
        "kafka.Bootstrap.Servers": live.servers,
        "SUBSCRIBE": topic,
        "startingoffsets": json.dumps({topic: {"0": 1}}),
        "EndingOffsets": " LATEST ",
        "MINPARTITIONS": "2",
    }
    reader = BatchReader(readers.SCHEMA, options)
    planned = reader.partitions()
    assert len(planned) == 2
    assert rows(reader, planned) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_a_topic_that_is_not_there_is_asked_for_as_often_as_told_then_fails(live: Live, monkeypatch: Any) -> None:
    from kafkalog.client.cluster import Cluster

    asked: list[object] = []
    describe = Cluster.describe_topics
    monkeypatch.setattr(Cluster, "describe_topics", lambda self, *names: asked.append(names) or describe(self, *names))
    name = live.new_topic()
    for reader in (live.batch(subscribe=name, fetchOffset__numRetries="4"),):
        with pytest.raises(UnknownTopic, match=name):
            reader.partitions()
    assert len(asked) == 4
    asked.clear()
    with pytest.raises(UnknownTopic, match=name):
        live.stream(assign={name: [0]}, fetchOffset__numRetries="1").initialOffset()
    assert len(asked) == 1


def test_the_pause_before_a_topic_is_asked_for_again_is_as_told_and_a_second_by_default(
    live: Live, monkeypatch: Any
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(lookup, "time", SimpleNamespace(sleep=pauses.append))
    missing = {"kafkalog.bootstrap.servers": live.servers, "subscribe": live.new_topic()}
    for options in ({}, {"fetchOffset.numRetries": "2", "fetchOffset.retryIntervalMs": "70"}):
        with pytest.raises(UnknownTopic):
            BatchReader(SCHEMA, {**missing, **options}).partitions()
    assert pauses == [1, 1, 0.07]


def test_a_partition_that_is_assigned_and_not_there_is_left_out_with_a_warning(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [message for message in caplog.messages if "assigned" in message]

    topic = live.topic(2, 3)
    with caplog.at_level(logging.WARNING):
        assert live.read(assign={topic: [1, 5]}) == [[], [0, 1, 2]]
    assert told() == [f"assigned_partitions_not_there partitions={topic}-5"]
    stream = live.stream(assign={topic: [1, 5]})
    with caplog.at_level(logging.WARNING):
        end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
        stream.latestOffset(end, EVERYTHING)
    assert len(told()) == 2  # a stream is told once, not with each micro-batch
    assert live.start(assign={topic: [1, 5]}, startingOffsets="latest") == {topic: {"1": 3}}


# --- offsets ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_from_earliest_to_latest_and_a_stream_starts_at_latest_unless_told(live: Live) -> None:
    topic = live.topic(3, 2)
    live.delete_before(topic, 1)
    assert live.read(subscribe=topic) == [[1, 2], [0, 1]]
    assert live.start(subscribe=topic) == {topic: {"0": 3, "1": 2}}


def test_listed_offsets_must_be_of_exactly_the_partitions_read(live: Live) -> None:
    topic = live.topic(3, 3)
    for listed in ({"0": 1}, {"0": 1, "1": 1, "2": 1}):
        for option in ("startingOffsets", "endingOffsets"):
            with pytest.raises(InvalidArgument, match=f"{option} must list exactly the partitions that are read"):
                live.read(subscribe=topic, **{option: {topic: listed}})
        with pytest.raises(InvalidArgument, match=f"read are {topic}-0, {topic}-1"):
            live.start(subscribe=topic, startingOffsets={topic: listed})


def test_a_batch_that_starts_behind_its_end_fails_when_both_are_known(live: Live) -> None:
    topic = live.topic(5)
    live.delete_before(topic, 3)
    says = "the start offset {} of .* is greater than its end offset {}"
    with pytest.raises(InvalidArgument, match=says.format(9, 5)):
        live.read(subscribe=topic, startingOffsets={topic: {"0": 9}})
    with pytest.raises(InvalidArgument, match=says.format(3, 2)):
        live.read(subscribe=topic, endingOffsets={topic: {"0": 2}})
    with pytest.raises(InvalidArgument, match=says.format(4, 3)):
        live.batch(subscribe=topic, startingOffsets={topic: {"0": 4}}, endingOffsets={topic: {"0": 3}})


def test_a_batch_that_mixes_times_and_offsets_fails_when_they_are_known_to_cross(live: Live, timed: str) -> None:
    says = "the start offset {} of .*-0 .{}. is greater than its end offset {} .{}."
    by_time, until = {"startingTimestamp": "1500"}, {"endingTimestamp": "1500"}
    with pytest.raises(InvalidArgument, match=says.format(1, "startingTimestamp", 0, "endingOffsets")):
        live.batch(subscribe=timed, **by_time, endingOffsets={timed: {"0": 0, "1": 1}}).partitions()
    with pytest.raises(InvalidArgument, match=says.format(2, "startingOffsets", 1, "endingTimestamp")):
        live.batch(subscribe=timed, **until, startingOffsets={timed: {"0": 2, "1": 0}}).partitions()
    assert live.read(subscribe=timed, **by_time, endingOffsets={timed: {"0": 1, "1": 0}}) == []
    assert live.read(subscribe=timed, **by_time, **until) == []


def test_earliest_and_latest_of_a_batch_are_looked_up_when_its_plan_is_run(live: Live) -> None:
    topic = live.topic(2, 2)
    for options in ({}, {"minPartitions": "3"}, {"maxRecordsPerPartition": "1"}, {"maxInputPartitions": "1"}):
        reader = live.batch(subscribe=topic, **options)
        plan = reader.partitions()
        before = by_partition(rows(reader, plan))
        live.append(topic, 2, partition=1)
        assert by_partition(rows(reader, plan)) == [before[0], [*before[1], len(before[1]), len(before[1]) + 1]]


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(live: Live) -> str:
    """Records at 1000, 2000 and 3000 ms in partition 0, at 1500 ms in partition 1."""
    topic = live.topic(0, 0)
    live.append_at(topic, 1000, 2000, 3000)
    live.append_at(topic, 1500, partition=1)
    return topic


@pytest.mark.parametrize("time", ["1500", "1970-01-01T00:00:01.5Z", "1970-01-01T01:00:01.500+01:00"])
def test_a_starting_timestamp_is_the_first_record_as_late(live: Live, timed: str, time: str) -> None:
    assert live.read(subscribe=timed, startingTimestamp=time) == [[1, 2], [0]]
    assert live.start(subscribe=timed, startingTimestamp=time) == {timed: {"0": 1, "1": 0}}


def test_starting_times_by_partition_may_be_milliseconds_or_iso_8601(live: Live, timed: str) -> None:
    times = {timed: {"0": 2001, "1": "1970-01-01T00:00:00.2Z"}}
    assert live.read(subscribe=timed, startingOffsetsByTimestamp=times) == [[2], [0]]
    assert live.start(subscribe=timed, startingOffsetsByTimestamp=times) == {timed: {"0": 2, "1": 0}}


def test_times_by_partition_must_be_of_exactly_the_partitions_read(live: Live, timed: str) -> None:
    with pytest.raises(InvalidArgument, match="startingOffsetsByTimestamp must list exactly"):
        live.read(subscribe=timed, startingOffsetsByTimestamp={timed: {"0": 1}})
    with pytest.raises(InvalidArgument, match="endingOffsetsByTimestamp must list exactly"):
        live.read(subscribe=timed, endingOffsetsByTimestamp={timed: {"0": 1}})
    with pytest.raises(InvalidArgument, match="startingOffsetsByTimestamp must list exactly"):
        live.start(subscribe=timed, startingOffsetsByTimestamp={timed: {"0": 1}})


def test_one_time_comes_before_times_by_partition_and_those_before_offsets(live: Live, timed: str) -> None:
    by_offset = {"startingOffsets": {timed: {"0": 2, "1": 1}}, "endingOffsets": {timed: {"0": 3, "1": 1}}}
    times = {"startingOffsetsByTimestamp": {timed: {"0": 1001, "1": 1}}}
    ends = {"endingOffsetsByTimestamp": {timed: {"0": 2001, "1": 1}}}
    assert live.read(subscribe=timed, **by_offset) == [[2]]
    assert live.read(subscribe=timed, **by_offset, **times) == [[1, 2], [0]]
    assert live.read(subscribe=timed, **by_offset, **times, startingTimestamp="1") == [[0, 1, 2], [0]]
    assert live.read(subscribe=timed, **times, **ends, startingTimestamp="0") == [[0, 1]]
    assert live.read(subscribe=timed, **ends, startingTimestamp="0", endingTimestamp="1501") == [[0], [0]]
    assert live.start(subscribe=timed, **times, startingOffsets="latest") == {timed: {"0": 1, "1": 0}}


def test_a_start_without_a_match_fails_and_names_the_strategy_or_is_latest(live: Live, timed: str) -> None:
    for times in ({"startingTimestamp": "1600"}, {"startingOffsetsByTimestamp": {timed: {"0": 1, "1": 1600}}}):
        for strategy in ({}, {"startingOffsetsByTimestampStrategy": "Error"}):
            with pytest.raises(InvalidArgument, match=f"{timed}-1 has {NO_MATCH}"):
                live.read(subscribe=timed, **times, **strategy)
            with pytest.raises(InvalidArgument, match=f"{timed}-1 has {NO_MATCH}"):
                live.start(subscribe=timed, **times, **strategy)
        latest = {**times, "startingOffsetsByTimestampStrategy": "LATEST"}
        assert live.read(subscribe=timed, **latest)[1:] == []
        assert live.start(subscribe=timed, **latest)[timed]["1"] == 1


def test_times_are_looked_up_once_when_a_batch_is_planned(live: Live, timed: str) -> None:
    reader = live.batch(subscribe=timed, startingTimestamp="1500", endingTimestamp="9999")
    plan = reader.partitions()
    live.append_at(timed, 3500)
    assert by_partition(rows(reader, plan)) == [[1, 2], [0]]


def test_an_end_without_a_match_is_latest(live: Live, timed: str) -> None:
    assert live.read(subscribe=timed, endingTimestamp="2000") == [[0], [0]]
    assert live.read(subscribe=timed, endingTimestamp="99999") == [[0, 1, 2], [0]]
    strategy = {"startingOffsetsByTimestampStrategy": "error"}  # of starts only
    assert live.read(subscribe=timed, endingOffsetsByTimestamp={timed: {"0": 9999, "1": 9999}}, **strategy)[1] == [0]


@pytest.mark.parametrize("how", ["time", "offset"])
def test_trigger_once_reads_all_partitions_but_those_that_start_at_their_end(live: Live, timed: str, how: str) -> None:
    by_time = {"startingTimestamp": "2000", "startingOffsetsByTimestampStrategy": "latest"}
    stream = live.stream(
        subscribe=timed, **(by_time if how == "time" else {"startingOffsets": {timed: {"0": 1, "1": -1}}})
    )
    start = stream.initialOffset()
    assert start == {timed: {"0": 1, "1": 1}}
    live.append_at(timed, 9000, partition=1)  # comes after the start that is still to be written down
    assert stream.latestOffset(start, ReadAllAvailable()) == {timed: {"0": 3, "1": 1}}


@pytest.mark.parametrize("far", [4611686018427387904, (1 << 63) - 1])
def test_a_timestamp_beyond_every_record_s_matches_none(live: Live, timed: str, far: int) -> None:
    by_partition = {timed: {"0": far, "1": far}}
    for times in ({"startingTimestamp": str(far)}, {"startingOffsetsByTimestamp": by_partition}):
        for reads in (live.read, live.start):
            with pytest.raises(InvalidArgument, match=NO_MATCH):
                reads(subscribe=timed, **times)
        latest = {**times, "startingOffsetsByTimestampStrategy": "latest"}
        assert live.read(subscribe=timed, **latest) == []
        assert live.start(subscribe=timed, **latest) == {timed: {"0": 3, "1": 1}}
    for ends in ({"endingTimestamp": str(far)}, {"endingOffsetsByTimestamp": by_partition}):
        assert live.read(subscribe=timed, **ends) == [[0, 1, 2], [0]]
    mixed = {timed: {"0": 1001, "1": far}}
    options = {"startingOffsetsByTimestamp": mixed, "startingOffsetsByTimestampStrategy": "latest"}
    assert live.start(subscribe=timed, **options)[timed]["1"] == 1


@pytest.mark.parametrize("end", [{}, {"endingTimestamp": "5000"}, {"endingTimestamp": "7000"}])
def test_a_record_that_comes_between_the_lookups_puts_no_start_behind_its_end(
    live: Live, monkeypatch: Any, end: dict[str, str]
) -> None:
    from pyspark_kafkalog.read.offset_reader import Lookup

    topic = live.topic(0)
    live.append_at(topic, 1000)
    by_time = Lookup._by_time

    def and_then_more(self: Lookup, times: Any) -> Any:
        found = by_time(self, times)
        live.append_at(topic, 6000)
        return found

    monkeypatch.setattr(Lookup, "_by_time", and_then_more)
    options = {"startingTimestamp": "5000", "startingOffsetsByTimestampStrategy": "latest"}
    assert live.read(subscribe=topic, **options, **end)[1:] == []


# --- what a batch refuses, without asking a broker -------------------------------------------------------------------

NOWHERE = {"kafkalog.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}
SCHEMA = StructType.fromJson(
    {"type": "struct", "fields": [{"name": "value", "type": "binary", "nullable": True, "metadata": {}}]}
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets of a batch read cannot be latest"),
        ({"startingOffsets": {"t": {"0": -1}}}, "cannot be latest (-1) for t-0"),
        ({"endingOffsets": "earliest"}, "endingOffsets of a batch read cannot be earliest"),
        ({"endingOffsets": {"t": {"0": -2}}}, "cannot be earliest (-2) for t-0"),
        ({"startingOffsets": {"t": {"0": 1}}, "endingOffsets": {"t": {"1": 2}}}, "must list the same partitions"),
        (
            {"startingOffsets": {"t": {"0": 1}}, "endingOffsets": {"t": {"0": 0}}},
            "the start offset 1 of t-0 (startingOffsets) is greater than its end offset 0 (endingOffsets)",
        ),
        (
            {"startingOffsetsByTimestamp": {"t": {"0": 1}}, "endingOffsetsByTimestamp": {"t": {"0": 1, "1": 1}}},
            "startingOffsetsByTimestamp and endingOffsetsByTimestamp must list the same partitions",
        ),
        (
            {"startingOffsetsByTimestamp": {"t": {"0": 2}}, "endingOffsetsByTimestamp": {"t": {"0": 1}}},
            "the start timestamp 2000 us of t-0 (startingOffsetsByTimestamp) is greater than its end timestamp 1000 us",
        ),
        (
            {"startingTimestamp": "2", "endingTimestamp": "1"},
            "the start timestamp 2000 us (startingTimestamp) is greater",
        ),
        (
            {"startingTimestamp": "2", "endingOffsetsByTimestamp": {"t": {"0": 1}}},
            "the start timestamp 2000 us of t-0 (startingTimestamp) is greater",
        ),
    ],
)
def test_a_batch_range_that_can_not_be_is_refused_without_a_broker(options: dict[str, Any], says: str) -> None:
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        BatchReader(SCHEMA, {**NOWHERE, **given})


def test_symbols_and_what_a_time_overrules_are_not_compared() -> None:
    for options in (
        {"startingOffsets": '{"t": {"0": -2}}', "endingOffsets": '{"t": {"0": 0}}'},
        {"startingOffsets": '{"t": {"0": 5}}', "endingOffsets": '{"t": {"0": -1}}'},
        {"startingOffsets": "latest", "startingTimestamp": "1"},
        {"startingOffsets": '{"t": {"0": 5}}', "endingTimestamp": "1"},
        {"startingOffsets": '{"t": {"0": 5}}', "endingOffsets": '{"t": {"0": 5}}'},  # as much is no contradiction
        {"startingTimestamp": "5", "endingTimestamp": "5"},
    ):
        BatchReader(SCHEMA, {**NOWHERE, **options})


@pytest.mark.parametrize("option", ["endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"])
@pytest.mark.parametrize("first_call", ["getDefaultReadLimit", "initialOffset", "prepareForTriggerAvailableNow"])
def test_a_stream_refuses_an_end_at_its_first_call(live: Live, option: str, first_call: str) -> None:
    value = {"endingOffsets": "latest", "endingOffsetsByTimestamp": {"t": {"0": 1}}, "endingTimestamp": "1"}[option]
    with pytest.raises(InvalidArgument, match=f"{option} is only for batch reads"):
        getattr(live.stream(subscribe="t", **{option: value}), first_call)()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingTimestamp": "soon"}, "startingTimestamp='soon' is not valid"),
        ({"endingTimestamp": "1.5"}, "endingTimestamp='1.5' is not valid"),
        ({"startingOffsetsByTimestamp": "latest"}, "startingOffsetsByTimestamp='latest' is not valid; expected"),
        ({"startingOffsetsByTimestamp": '{"t": {"0": "x"}}'}, "is not a partition and timestamp"),
        ({"startingOffsetsByTimestampStrategy": "earliest"}, "it must be error or latest"),
        ({"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "15"}, "minOffsetsPerTrigger (20) is greater than max"),
        ({"minOffsetsPerTrigger": "0"}, "it must be a whole number of at least 1"),
        ({"maxBytesPerTrigger": "1k"}, "maxBytesPerTrigger='1k'"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay='soon' is not valid"),
        ({"minPartitions": "0"}, "minPartitions='0'"),
        ({"maxRecordsPerPartition": "-1"}, "maxRecordsPerPartition='-1'"),
        ({"minPartitions": "4", "maxInputPartitions": "3"}, "minPartitions (4) is greater than maxInputPartitions (3)"),
        ({"maxRecordsPerPartition": "4", "maxInputPartitions": "3"}, "contradict each other"),
        ({"maxRecordsPerPartition": "4", "minRecordsPerPartition": "4"}, "contradict each other"),
        ({"minRecordsPerPartition": "0"}, "minRecordsPerPartition='0'"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss='no' is not valid: it must be true or false"),
        ({"kafkaConsumer.pollTimeoutMs": "0"}, "it must be a number of milliseconds"),
        ({"fetchOffset.numRetries": "0"}, "fetchOffset.numRetries='0'"),
        ({"fetchOffset.retryIntervalMs": "-5"}, "fetchOffset.retryIntervalMs='-5'"),
        ({"kafka.isolation.level": "read_all"}, "it must be read_uncommitted or read_committed"),
        ({"kafka.group.id": " "}, "kafkalog.group.id=' ' is not valid"),
        ({"columns": "value,colour"}, "columns: a read has no column 'colour'"),
        ({"columns": "value,value"}, "columns names a column twice"),
        ({"columns": " ,"}, "names no column"),
    ],
)
def test_what_is_wrong_for_batch_and_stream_alike_is_told_at_load(options: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)) as raised:
        KafkalogDataSource({**NOWHERE, **options}).schema()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kafka.auto.offset.reset", "set startingOffsets instead"),
        ("kafka.key.deserializer", "keys are read as bytes"),
        ("kafka.value.deserializer", "values are read as bytes"),
        ("kafka.enable.auto.commit", "a stream's position is in its checkpoint"),
        ("kafka.interceptor.classes", "there are no interceptors"),
    ],
)
def test_settings_that_the_connector_refuses_are_refused_whatever_their_case(name: str, says: str) -> None:
    for spelt in (name, name.title()):
        with pytest.raises(InvalidArgument, match=f"the option {name} is not supported: {says}"):
            KafkalogDataSource({**NOWHERE, spelt: "x"})


def test_limits_may_be_the_same(live: Live) -> None:
    topic = live.topic(4)
    live.start(subscribe=topic, minOffsetsPerTrigger="3", maxOffsetsPerTrigger="3")
    assert live.read(subscribe=topic, minPartitions="3", maxInputPartitions="3") == [[0, 1, 2, 3]]


def test_a_prefix_that_a_given_group_makes_useless_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        KafkalogDataSource({**NOWHERE, "groupIdPrefix": "p"})
        assert caplog.messages == []
        KafkalogDataSource({**NOWHERE, "groupIdPrefix": "p", "kafka.group.id": "g"})
    assert [message.split(" reason")[0] for message in caplog.messages] == ["option_ignored option=groupIdPrefix"]


def test_the_connectors_own_options_are_accepted(live: Live) -> None:
    topic = live.topic(2)
    options = {
        "groupIdPrefix": "p",
        "kafka__group__id": "g",
        "kafka__isolation__level": "READ_COMMITTED",
        "kafkaConsumer__pollTimeoutMs": "5000",
        "fetchOffset__numRetries": "2",
    }
    KafkalogDataSource(live.options(subscribe=topic, **options)).schema()
    assert live.read(subscribe=topic, **options) == [[0, 1]]


def test_columns_picks_and_orders_and_a_schema_must_agree(live: Live) -> None:
    options = live.options(subscribe="t", columns="offset, value")
    assert KafkalogDataSource(options).schema() == "offset bigint, value binary"
    assert KafkalogDataSource({**options, "includeHeaders": "true"}).schema().endswith(">>")
    with pytest.raises(InvalidArgument, match=r"the schema \(value\) and the option columns \(offset, value\) differ"):
        BatchReader(SCHEMA, options)
    with pytest.raises(InvalidArgument, match="differ; give one of them"):
        live.stream(subscribe="t", columns="offset,value").initialOffset()
