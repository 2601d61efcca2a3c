"""The Kafka connector's rules for how much a micro-batch takes and in how many splits, and our own beside them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafkalog.clock import ManualClock
from kafkalog.errors import RequestTimedOut
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import EARLIEST, LATEST
from pyspark_kafkalog.read import partition_reader as reading
from pyspark_kafkalog.read.admission import MinOffsets
from pyspark_kafkalog.read.group_publisher import Progress
from pyspark_kafkalog.source import StreamReader
from tests.pyspark_kafkalog.live import EVERYTHING, Live, Logged, by_partition, ranges, read_between, rows
from tests.threads import join_all


def batches(stream: StreamReader, start: Logged) -> Iterator[Logged]:
    """The ends of the micro-batches from a start on, for ever."""
    while True:
        start = stream.latestOffset(start, stream.getDefaultReadLimit())
        yield start


def first_batches(stream: StreamReader, count: int) -> list[list[int]]:
    [topic] = stream.initialOffset()
    return [list(end[topic].values()) for end in itertools.islice(batches(stream, stream.initialOffset()), count)]


def of_large_batches(live: Live) -> tuple[str, int]:
    """A topic with 20 and 10 records, each in a batch of its own, and the bytes of one of those."""
    topic = live.topic(0, 0, index_interval_bytes=64)
    for partition, count in ((0, 20), (1, 10)):
        for _ in range(count):
            live.append(topic, 1, partition, value=bytes(1000))
    where = TopicPartition(topic, 0)
    return topic, live.admin.list_offsets({where: "latest"})[where].size_bytes // 20


# --- how much --------------------------------------------------------------------------------------------------------


def test_max_offsets_is_proportional_floor_from_one_on_and_ceil_below(live: Live) -> None:
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"}
    assert first_batches(live.stream(subscribe=live.topic(10, 5), **options), 2) == [[3, 1], [6, 2]]
    assert first_batches(live.stream(subscribe=live.topic(50, 1, 0), **options), 1) == [[4, 1, 0]]


@pytest.mark.parametrize("limit", [{"maxOffsetsPerTrigger": "4"}, {"maxBytesPerTrigger": "1"}])
def test_offsets_that_are_gone_take_no_share_of_a_limit(live: Live, limit: dict[str, str]) -> None:
    topic = live.topic(30, 2)
    live.delete_before(topic, 28)
    stream = live.stream(subscribe=topic, failOnDataLoss="false", **limit)
    start = {topic: {"0": 5, "1": 0}}
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert end == {topic: {"0": 30, "1": 2}}
    assert sorted(read_between(stream, start, end)) == [(0, 28), (0, 29), (1, 0), (1, 1)]
    live.delete_before(topic, 30)
    live.append(topic, 2, 1)
    assert stream.latestOffset(end, stream.getDefaultReadLimit()) == {topic: {"0": 30, "1": 4}}


def test_max_bytes_is_proportional_and_reads_everything_in_the_end(live: Live) -> None:
    topic, size = of_large_batches(live)
    stream = live.stream(subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger=str(6 * size + 5))
    ends = first_batches(stream, 8)
    assert ends[0] == [4, 2]
    assert ends[-1] == [20, 10]
    assert all(after > before for before, after in itertools.pairwise(sum(end) for end in ends[:5]))
    start = stream.initialOffset()
    first = {topic: {"0": 4, "1": 2}}
    assert read_between(stream, start, first) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    # A limit below any batch still moves on by one.
    small = live.stream(subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger="1")
    assert first_batches(small, 1) == [[1, 1]]


@pytest.mark.parametrize(("records", "ends"), [("3", [2, 1]), ("1000", [4, 2])])
def test_of_both_limits_the_smaller_counts(live: Live, records: str, ends: list[int]) -> None:
    topic, size = of_large_batches(live)
    both = {"maxOffsetsPerTrigger": records, "maxBytesPerTrigger": str(6 * size + 5)}
    assert first_batches(live.stream(subscribe=topic, startingOffsets="earliest", **both), 1) == [ends]


def test_min_offsets_lets_the_first_batch_pass_and_then_waits_for_enough_or_the_delay(live: Live) -> None:
    topic = live.topic(3)
    stream = live.stream(subscribe=topic, startingOffsets="earliest", minOffsetsPerTrigger="5", maxTriggerDelay="1h")
    clock = ManualClock()
    stream._session._min_offsets = MinOffsets(5, stream._session.options.max_trigger_delay_s, clock.monotonic)
    first = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    assert first == {topic: {"0": 3}}
    live.append(topic, 4)
    assert stream.latestOffset(first, EVERYTHING) == first
    assert stream.reportLatestOffset() == {topic: {"0": 7}}
    live.append(topic, 1)
    second = stream.latestOffset(first, EVERYTHING)
    assert second == {topic: {"0": 8}}
    live.append(topic, 1)
    assert stream.latestOffset(second, EVERYTHING) == second
    clock.advance(3601)
    assert stream.latestOffset(second, EVERYTHING) == {topic: {"0": 9}}


def test_min_offsets_counts_from_the_empty_first_batch_of_a_stream_from_latest_on(live: Live) -> None:
    topic = live.topic(3)
    stream = live.stream(subscribe=topic, minOffsetsPerTrigger="5", maxTriggerDelay="1h")
    start = stream.initialOffset()
    assert stream.latestOffset(start, EVERYTHING) == start
    live.append(topic, 4)
    assert stream.latestOffset(start, EVERYTHING) == start
    live.append(topic, 1)
    assert stream.latestOffset(start, EVERYTHING) == {topic: {"0": 8}}


def test_a_batch_that_has_waited_is_still_limited(live: Live) -> None:
    topic = live.topic(30)
    both = {"minOffsetsPerTrigger": "10", "maxOffsetsPerTrigger": "20"}
    stream = live.stream(subscribe=topic, startingOffsets="earliest", **both)
    assert first_batches(stream, 2) == [[20], [30]]
    assert first_batches(live.stream(subscribe=topic, startingOffsets="earliest", **both), 1) == [[20]]  # a restart


def test_available_now_ignores_the_minimum_and_once_ignores_all_limits(live: Live) -> None:
    topic = live.topic(9)
    options = {"minOffsetsPerTrigger": "4", "maxOffsetsPerTrigger": "4", "maxBytesPerTrigger": "1000000"}
    stream = live.stream(subscribe=topic, startingOffsets="earliest", **options)
    stream.prepareForTriggerAvailableNow()
    assert first_batches(stream, 4) == [[4], [8], [9], [9]]
    for limit in ({"maxOffsetsPerTrigger": "4"}, {"maxBytesPerTrigger": "1"}, {"minOffsetsPerTrigger": "100"}):
        stream = live.stream(subscribe=topic, startingOffsets="earliest", **limit)
        for _ in range(2):
            assert stream.latestOffset(stream.initialOffset(), ReadAllAvailable()) == {topic: {"0": 9}}


def test_a_call_that_passes_over_what_is_gone_is_not_availablenows_last(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[None] = []
    monkeypatch.setattr(Progress, "finish", lambda progress: finished.append(None))
    topic = live.topic(30)
    stream = live.stream(subscribe=topic, failOnDataLoss="false", maxOffsetsPerTrigger="4")
    live.delete_before(topic, 30)
    stream.prepareForTriggerAvailableNow()
    end = stream.latestOffset({topic: {"0": 5}}, stream.getDefaultReadLimit())
    assert end == {topic: {"0": 30}}
    assert not finished
    assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
    assert finished


def test_a_batch_read_tells_which_options_it_ignores(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    topic = live.topic(9)
    ignored = ["maxBytesPerTrigger", "maxOffsetsPerTrigger", "maxTriggerDelay", "minOffsetsPerTrigger"]
    with caplog.at_level(logging.WARNING):
        assert live.read(subscribe=topic, **dict.fromkeys(ignored, "5")) == [list(range(9))]
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert [message.split("=")[1] for message in told] == ignored


# --- an idle stream --------------------------------------------------------------------------------------------------


@pytest.fixture
def called_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks again 10 ms after an answer; so do tests, on a busy machine too."""
    monkeypatch.setattr("pyspark_kafkalog.read.stream._IDLE_GAP_S", math.inf)


@pytest.mark.usefixtures("called_soon")
def test_an_idle_stream_waits_in_the_broker_until_records_come_or_200_ms_are_over(live: Live) -> None:
    topic = live.topic(3, 0)
    stream = live.stream(subscribe=topic, startingOffsets="earliest")
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    started = time.monotonic()
    assert stream.latestOffset(end, EVERYTHING) == end
    assert 0.15 < time.monotonic() - started < 5
    latest: list[Logged] = []
    waiting = threading.Thread(target=lambda: latest.append(stream.latestOffset(end, EVERYTHING)))
    waiting.start()
    live.append(topic, 1, 1)
    join_all([waiting], 60)
    assert latest in ([{topic: {"0": 3, "1": 1}}], [end])  # the machine may have been slow to append
    assert stream.latestOffset(end, EVERYTHING) == {topic: {"0": 3, "1": 1}}


def test_a_stream_waits_for_records_only_while_spark_has_nothing_else_to_do(live: Live, monkeypatch: Any) -> None:
    """Else it would keep another source of its query waiting: Spark asks one after the other."""
    now, waits = [1000.0], [0]

    def waited(_: Any, ends: Any, milliseconds: int) -> bool:
        waits[0] += 1
        now[0] += milliseconds / 1000
        return False

    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", waited)
    monkeypatch.setattr(
        "pyspark_kafkalog.read.stream.time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    )
    topic = live.topic(3)
    stream = live.stream(subscribe=topic, startingOffsets="earliest")
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    for pause, waits_expected in ((0.5, 0), (0.01, 1), (0.01, 1), (0.3, 0), (0.2, 0), (0.01, 1)):
        waits[0] = 0
        now[0] += pause  # a micro-batch, or what another source waits; 10 ms are Spark's own
        assert stream.latestOffset(end, EVERYTHING) == end
        assert waits[0] == waits_expected, pause


@pytest.mark.usefixtures("called_soon")
def test_idle_sources_of_one_query_share_a_short_wait(live: Live, monkeypatch: Any) -> None:
    waits: list[int] = []
    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", lambda _, __, ms: waits.append(ms))
    streams = [live.stream(subscribe=live.topic(1), startingOffsets="earliest") for _ in range(3)]
    ends = [stream.latestOffset(stream.initialOffset(), EVERYTHING) for stream in streams]
    for _ in range(2):
        waits.clear()
        assert [stream.latestOffset(end, EVERYTHING) for stream, end in zip(streams, ends, strict=True)] == ends
    assert waits
    assert max(waits) <= 10
    waits.clear()
    for _ in range(2):  # the others' query has ended
        assert streams[0].latestOffset(ends[0], EVERYTHING) == ends[0]
    assert max(waits) > 100


@pytest.mark.usefixtures("called_soon")
@pytest.mark.parametrize("answer", [True, False])  # as if there were news, or no room for one more who waits
def test_an_idle_stream_asks_seldom_even_where_the_broker_does_not_wait(
    live: Live, monkeypatch: Any, answer: bool
) -> None:
    stream = live.stream(subscribe=live.topic(3), startingOffsets="earliest")
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    asked: list[Any] = []

    def at_once(*given: Any) -> bool:
        asked.append(given)
        return answer

    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", at_once)
    assert stream.latestOffset(end, EVERYTHING) == end
    assert 1 <= len(asked) <= 5


def test_available_now_and_once_do_not_wait(live: Live, monkeypatch: Any) -> None:
    monkeypatch.setattr("kafkalog.client.admin.wait_for_records", lambda *given: pytest.fail("it waits"))
    topic = live.topic(3)
    stream = live.stream(subscribe=topic, startingOffsets="earliest")
    end = {topic: {"0": 3}}
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    stream.prepareForTriggerAvailableNow()
    assert stream.latestOffset(end, EVERYTHING) == end


# --- how many splits -------------------------------------------------------------------------------------------------


def splits_of_stream(live: Live, topic: str, **options: Any) -> list[list[tuple[int, int, int]]]:
    stream = live.stream(subscribe=topic, startingOffsets="earliest", **options)
    start = stream.initialOffset()
    end = stream.latestOffset(start, EVERYTHING)
    planned = stream.partitions(start, end)
    found = by_partition(sorted(rows(stream, planned)))
    assert found == [list(range(offset)) for offset in end[topic].values()][: len(found)]
    return ranges(planned)


def test_a_split_is_a_partition_of_the_log_by_default(live: Live) -> None:
    topic = live.topic(4, 0, 2)
    assert splits_of_stream(live, topic) == [[(0, 0, 4)], [(2, 0, 2)]]
    whole = [[(number, EARLIEST, LATEST)] for number in range(3)]
    assert ranges(live.batch(subscribe=topic).partitions()) == whole


def test_min_partitions_counts_empty_ranges_in_a_batch_and_not_in_a_stream(live: Live) -> None:
    topic = live.topic(4, 0, 2)
    cut = [[(0, 0, 2)], [(0, 2, 4)], [(2, 0, 2)]]
    assert splits_of_stream(live, topic, minPartitions="3") == cut
    reader = live.batch(subscribe=topic, minPartitions="3")
    assert ranges(reader.partitions()) == [[(number, EARLIEST, LATEST)] for number in range(3)]
    reader = live.batch(subscribe=topic, minPartitions="4")
    assert len(reader.partitions()) == 4
    assert sorted(rows(reader, reader.partitions())) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1)]


def test_max_records_per_partition_cuts_first_and_only_the_ends_of_a_batch_stay_symbols(live: Live) -> None:
    topic = live.topic(10, 3)
    cut = [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 10)], [(1, 0, 3)]]
    assert splits_of_stream(live, topic, maxRecordsPerPartition="4") == cut
    late = [[(0, EARLIEST, 3)], [(0, 3, 6)], [(0, 6, LATEST)], [(1, EARLIEST, LATEST)]]
    assert ranges(live.batch(subscribe=topic, maxRecordsPerPartition="4").partitions()) == late


def test_the_first_piece_of_a_batch_is_empty_when_the_log_starts_behind_it(live: Live) -> None:
    topic = live.topic(10)
    reader = live.batch(subscribe=topic, maxRecordsPerPartition="5")
    planned = reader.partitions()
    live.delete_before(topic, 5)
    assert rows(reader, planned[1:]) == [(0, offset) for offset in range(5, 10)]
    live.delete_before(topic, 7)
    assert rows(reader, planned[:1]) == []


def test_max_input_partitions_packs_by_records(live: Live) -> None:
    topic = live.topic(6, 1, 2, 3)
    assert splits_of_stream(live, topic, maxInputPartitions="2") == [[(0, 0, 6)], [(1, 0, 1), (2, 0, 2), (3, 0, 3)]]
    assert len(splits_of_stream(live, topic, maxInputPartitions="9")) == 4
    packed = live.batch(subscribe=topic, maxInputPartitions="2")
    assert [[each[0] for each in split] for split in ranges(packed.partitions())] == [[0], [1, 2, 3]]
    assert by_partition(rows(packed, packed.partitions())) == [list(range(count)) for count in (6, 1, 2, 3)]
    both = live.batch(subscribe=topic, minPartitions="6", maxInputPartitions="6")
    assert len(both.partitions()) <= 6
    assert by_partition(sorted(rows(both, both.partitions()))) == [list(range(count)) for count in (6, 1, 2, 3)]


def test_min_records_per_partition_packs_small_ranges_and_leaves_large_ones(live: Live) -> None:
    topic = live.topic(6, 1, 2, 3)
    assert splits_of_stream(live, topic, minRecordsPerPartition="1") == [
        [(0, 0, 6)], [(1, 0, 1)], [(2, 0, 2)], [(3, 0, 3)],
    ]  # fmt: skip
    assert splits_of_stream(live, topic, minRecordsPerPartition="5") == [
        [(0, 0, 6)], [(1, 0, 1), (2, 0, 2), (3, 0, 3)],
    ]  # fmt: skip
    every = [(0, 0, 6), (1, 0, 1), (2, 0, 2), (3, 0, 3)]
    assert splits_of_stream(live, topic, minRecordsPerPartition="1000") == [every]
    assert len(splits_of_stream(live, topic, minRecordsPerPartition="5", maxInputPartitions="1")) == 1
    assert len(splits_of_stream(live, topic, minRecordsPerPartition="1000", minPartitions="3")) == 3


def test_a_batch_packed_by_its_records_is_still_bound_late(live: Live) -> None:
    topic = live.topic(6, 1, 2, 3)
    packed = live.batch(subscribe=topic, minRecordsPerPartition="5")
    planned = packed.partitions()
    assert ranges(planned) == [[(0, EARLIEST, LATEST)], [(number, EARLIEST, LATEST) for number in (1, 2, 3)]]
    live.append(topic, 4, partition=1)
    assert by_partition(rows(packed, planned)) == [list(range(count)) for count in (6, 5, 2, 3)]


# --- patience --------------------------------------------------------------------------------------------------------


def test_a_task_that_gets_no_answer_gives_up_after_poll_timeout_ms(live: Live) -> None:
    topic = live.topic(3)
    reader = live.batch(subscribe=topic, kafkaConsumer__pollTimeoutMs="400")
    planned = reader.partitions()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        options = dataclasses.replace(reader._options, bootstrap_servers=servers)
        started = time.monotonic()
        with pytest.raises(RequestTimedOut, match=r"kafkaConsumer.pollTimeoutMs.* did not finish within 400 ms"):
            list(reading.read_ranges(options, reader._schema, planned[0].value))
        assert time.monotonic() - started < 15
