"""The stream reader called as Spark calls it, without Spark: what it remembers, what it must not, when it fails."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.errors import DataLost, InvalidArgument, PartitionLost, UnknownTopic
from kafkalog.net.control import ControlConnection
from pyspark_kafkalog import connections
from pyspark_kafkalog.read.stream import NO_LIMIT
from pyspark_kafkalog.source import BatchReader, StreamReader

SCHEMA = StructType([StructField("offset", LongType()), StructField("value", BinaryType())])
EVERYTHING = ReadMaxRows(NO_LIMIT)


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def append(cluster: LocalCluster) -> Iterator[Callable[..., None]]:
    with Producer(cluster.bootstrap_servers) as producer:

        def append(topic: str, count: int, partition: int = 0) -> None:
            for _ in range(count):
                producer.send(topic, b"v", partition=partition)
            producer.flush()

        yield append


@pytest.fixture
def reader(cluster: LocalCluster) -> Callable[..., StreamReader]:
    return lambda **options: StreamReader(
        SCHEMA,
        {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "fetchOffset.retryIntervalMs": "20", **options},
    )


Append = Callable[..., None]
MakeReader = Callable[..., StreamReader]


def offsets_read(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """What the tasks of a micro-batch read, in a process that has only the pickled reader."""
    task = pickle.loads(pickle.dumps(reader))
    return [
        offset
        for planned in reader.partitions(start, end)
        for batch in task.read(pickle.loads(pickle.dumps(planned)))
        for offset in batch.column("offset").to_pylist()
    ]


def test_the_start_is_remembered_while_the_log_grows(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    append(topic, 10)
    stream = reader(subscribe=topic)
    start = stream.initialOffset()
    append(topic, 2)
    assert stream.initialOffset() == start == {topic: {"0": 10, "1": 0}}


def test_from_latest_an_empty_first_batch_writes_the_start_down(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic)
    append(topic, 10)
    stream = reader(subscribe=topic)
    start = stream.initialOffset()
    append(topic, 5)
    assert stream.latestOffset(start, EVERYTHING) == start
    assert stream.reportLatestOffset() == {topic: {"0": 15}}
    end = stream.latestOffset(start, EVERYTHING)
    assert offsets_read(stream, start, end) == [10, 11, 12, 13, 14]


@pytest.fixture
def grpc_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process asks brokers over gRPC from now on, connecting included, as a new worker that knows nothing."""
    made: list[str] = []
    connect, call = ControlConnection.connect, ControlConnection.call

    def connecting(self: ControlConnection) -> Any:
        made.append("connect")
        return connect(self)

    def calling(self: ControlConnection, method: str, request: Any, timeout_ms: int) -> Any:
        made.append(method)
        return call(self, method, request, timeout_ms)

    monkeypatch.setattr(ControlConnection, "connect", connecting)
    monkeypatch.setattr(ControlConnection, "call", calling)
    return made


def test_tasks_with_numbers_ask_no_broker_over_grpc_not_even_in_a_new_worker(
    admin: Admin,
    append: Append,
    reader: MakeReader,
    topic: str,
    grpc_calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin.create_topic(topic, partitions=2)
    for partition in range(2):
        append(topic, 10, partition)
    stream = reader(subscribe=topic, startingOffsets="earliest", maxRecordsPerPartition="5")
    start = stream.initialOffset()
    planned = stream.partitions(start, stream.latestOffset(start, EVERYTHING))
    assert len(planned) == 4
    stream.stop()
    task = pickle.loads(pickle.dumps(stream))
    monkeypatch.setattr(connections, "_clusters", {})
    grpc_calls.clear()
    for worker in range(2):
        found = [batch for each in planned for batch in task.read(pickle.loads(pickle.dumps(each)))]
        assert sum(batch.num_rows for batch in found) == 20, worker
    assert grpc_calls == []


def test_a_batch_with_numbers_reads_the_topic_that_bears_the_name_when_it_runs(
    cluster: LocalCluster, admin: Admin, append: Append, topic: str, grpc_calls: list[str]
) -> None:
    admin.create_topic(topic)
    append(topic, 10)
    offsets = {"startingOffsets": json.dumps({topic: {"0": 2}}), "endingOffsets": json.dumps({topic: {"0": 5}})}
    batch = BatchReader(
        SCHEMA, {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": topic, **offsets}
    )
    [planned] = batch.partitions()
    grpc_calls.clear()
    assert [offset for found in batch.read(planned) for offset in found.column("offset").to_pylist()] == [2, 3, 4]
    assert grpc_calls == []
    admin.delete_topic(topic)
    admin.create_topic(topic)
    append(topic, 4)
    with pytest.raises(DataLost, match=f"{topic}-0 ends at offset 4 and was to be read up to 5"):
        list(batch.read(planned))
    append(topic, 1)
    assert [offset for found in batch.read(planned) for offset in found.column("offset").to_pylist()] == [2, 3, 4]


def test_from_earliest_the_first_batch_reads(admin: Admin, append: Append, reader: MakeReader, topic: str) -> None:
    admin.create_topic(topic)
    append(topic, 5)
    admin.delete_records({TopicPartition(topic, 0): 2})
    stream = reader(subscribe=topic, startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, EVERYTHING)
    assert (start, end) == ({topic: {"0": 2}}, {topic: {"0": 5}})
    assert offsets_read(stream, start, end) == [2, 3, 4]


def test_a_stream_starts_at_the_given_offsets(admin: Admin, append: Append, reader: MakeReader, topic: str) -> None:
    admin.create_topic(topic, partitions=3)
    for partition in range(3):
        append(topic, 4, partition)
    stream = reader(subscribe=topic, startingOffsets=json.dumps({topic: {"0": 3, "1": -1, "2": -2}}))
    assert stream.initialOffset() == {topic: {"0": 3, "1": 4, "2": 0}}
    with pytest.raises(InvalidArgument, match=f"read are {topic}-0, {topic}-1, {topic}-2"):
        reader(subscribe=topic, startingOffsets=json.dumps({topic: {"0": 3}})).initialOffset()


def test_a_replayed_first_batch_that_ended_before_the_new_start_is_empty(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic)
    append(topic, 10)
    logged = reader(subscribe=topic).initialOffset()
    append(topic, 15)
    restarted = reader(subscribe=topic)
    start = restarted.initialOffset()
    assert offsets_read(restarted, start, logged) == []
    # and the stream goes on from what was logged: nothing is left out
    end = restarted.latestOffset(logged, EVERYTHING)
    assert offsets_read(restarted, logged, end) == list(range(10, 25))


def test_a_limit_holds_but_for_trigger_once(admin: Admin, append: Append, reader: MakeReader, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    append(topic, 10, 0)
    append(topic, 5, 1)
    stream = reader(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="5")
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMaxRows(5)
    start = stream.initialOffset()
    assert stream.latestOffset(start, limit) == {topic: {"0": 3, "1": 1}}
    assert stream.latestOffset(start, ReadAllAvailable()) == {topic: {"0": 10, "1": 5}}
    assert stream.reportLatestOffset() == {topic: {"0": 10, "1": 5}}
    # Without a limit of the user's it is still none that Trigger.Once sends.
    assert reader(subscribe=topic).getDefaultReadLimit() == ReadMaxRows(NO_LIMIT)


def test_available_now_stops_at_what_there_was_at_first(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic)
    append(topic, 5)
    stream = reader(subscribe=topic, startingOffsets="earliest")
    stream.prepareForTriggerAvailableNow()
    append(topic, 5)  # before the first latestOffset: still part of it
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(6))
    append(topic, 5)
    assert end == {topic: {"0": 6}}
    end = stream.latestOffset(end, ReadMaxRows(6))
    assert end == {topic: {"0": 10}}
    assert stream.latestOffset(end, ReadMaxRows(6)) == end
    admin.delete_topic(topic)
    with pytest.raises(DataLost, match=f"topic '{topic}', which the stream reads, was deleted"):
        stream.latestOffset(end, ReadMaxRows(6))


def test_new_partitions_and_topics_are_read_from_their_first_record(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    stream = reader(subscribePattern=f"{topic}.*", startingOffsets="earliest")
    start = stream.initialOffset()
    assert start == stream.latestOffset(start, EVERYTHING) == {}
    admin.create_topic(topic)
    append(topic, 2)
    one = stream.latestOffset(start, EVERYTHING)
    assert offsets_read(stream, start, one) == [0, 1]
    admin.alter_topic(topic, partitions=2)
    admin.create_topic(topic + ".b")
    append(topic, 3, 1)
    append(topic + ".b", 1)
    two = stream.latestOffset(one, EVERYTHING)
    assert two == {topic: {"0": 2, "1": 3}, topic + ".b": {"0": 1}}
    assert offsets_read(stream, one, two) == [0, 1, 2, 0]


def test_a_new_partition_that_lost_its_first_records_is_a_loss(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic)
    stream = reader(subscribe=topic, startingOffsets="earliest")
    start = stream.initialOffset()
    admin.alter_topic(topic, partitions=2)
    append(topic, 3, 1)
    admin.delete_records({TopicPartition(topic, 1): 1})
    with pytest.raises(DataLost, match=f"{topic}-1, new to the stream, starts at 1, not at 0"):
        stream.latestOffset(start, EVERYTHING)


def test_a_topic_created_again_is_a_loss_even_when_it_is_as_long(
    admin: Admin, append: Append, reader: MakeReader, topic: str
) -> None:
    admin.create_topic(topic)
    append(topic, 3)
    stream = reader(subscribe=topic, startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, EVERYTHING)
    planned = stream.partitions(start, end)
    admin.delete_topic(topic)
    admin.create_topic(topic)
    append(topic, 5)
    with pytest.raises(DataLost, match="was deleted and created again"):
        stream.latestOffset(end, EVERYTHING)
    with pytest.raises(DataLost, match="was deleted and created again"):
        stream.partitions(start, end)
    with pytest.raises(DataLost):  # a task that was planned before
        list(pickle.loads(pickle.dumps(stream)).read(planned[0]))


def test_a_start_beyond_the_end_is_reported(admin: Admin, append: Append, reader: MakeReader, topic: str) -> None:
    admin.create_topic(topic)
    append(topic, 3)
    stream = reader(subscribe=topic, startingOffsets=json.dumps({topic: {"0": 9}}))
    with pytest.raises(DataLost, match=f"offset 9 of {topic}-0, which now ends at 3"):
        stream.latestOffset(stream.initialOffset(), EVERYTHING)


def test_a_topic_that_is_not_there_is_named(reader: MakeReader, topic: str) -> None:
    with pytest.raises(UnknownTopic, match=topic):
        reader(subscribe=topic).initialOffset()


@pytest.mark.parametrize("first_call", ["getDefaultReadLimit", "initialOffset", "prepareForTriggerAvailableNow"])
def test_an_end_is_refused_at_the_first_call(reader: MakeReader, topic: str, first_call: str) -> None:
    stream = reader(subscribe=topic, endingOffsets="latest")
    with pytest.raises(InvalidArgument, match="endingOffsets is only for batch reads"):
        getattr(stream, first_call)()


def test_a_lost_partition_fails_the_stream_and_recovered_it_is_lost_data(tmp_path: Path) -> None:
    with LocalCluster(data=tmp_path) as running, Admin(running.bootstrap_servers) as admin:
        topic_id = admin.create_topic("t").topic_id
        options = {"kafkalog.bootstrap.servers": running.bootstrap_servers, "subscribe": "t"}
        options |= {"startingOffsets": "earliest", "fetchOffset.retryIntervalMs": "20"}
        with Producer(running.bootstrap_servers) as producer:
            for _ in range(5):
                producer.send("t", b"old")
        stream = StreamReader(SCHEMA, options)
        position = stream.latestOffset(stream.initialOffset(), EVERYTHING)
        stream.stop()
        [broker] = running.brokers
        broker.stop()
        shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-0")
        broker.start()

        for lossy in ("true", "false"):  # nothing is lost while its disk may come back
            with pytest.raises(PartitionLost, match="partition t-0 is lost"):
                StreamReader(SCHEMA, options | {"failOnDataLoss": lossy}).latestOffset(position, EVERYTHING)
        with Producer(running.bootstrap_servers) as producer, pytest.raises(PartitionLost):
            producer.send("t", b"refused").result(60)

        [start] = admin.recover_partitions("t").values()
        with Producer(running.bootstrap_servers) as producer:
            producer.send("t", b"new")
        strict = StreamReader(SCHEMA, options)
        with pytest.raises(DataLost):
            offsets_read(strict, position, strict.latestOffset(position, EVERYTHING))
        lenient = StreamReader(SCHEMA, options | {"failOnDataLoss": "false"})
        assert offsets_read(lenient, position, lenient.latestOffset(position, EVERYTHING)) == [start]
        strict.stop()
        lenient.stop()
