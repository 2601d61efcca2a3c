"""Reading with Spark from a running cluster: batches, and streams by AvailableNow and by trigger."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition

Options = dict[str, str]


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture(scope="module")
def producer(cluster: LocalCluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap_servers) as producer:
        yield producer


@pytest.fixture
def servers(cluster: LocalCluster) -> Options:
    return {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}


def numbered(producer: Producer, topic: str, numbers: range, partitions: int = 1) -> None:
    """Send numbers as values, number n to partition n mod `partitions`, and wait for the acks."""
    for number in numbers:
        producer.send(topic, str(number).encode(), partition=number % partitions)
    producer.flush()


def numbers_in(rows: DataFrame) -> list[int]:
    return sorted(int(row.value) for row in rows.select("value").collect())


def batch(spark: SparkSession, servers: Options, **options: str) -> DataFrame:
    return spark.read.format("kafkalog").options(**servers, **options).load()


# --- batch -----------------------------------------------------------------------------------------------------------


def test_every_column_is_as_it_was_sent(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    producer.send(topic, b"a", b"k", partition=0, timestamp_us=1_500_000, headers=[("h", b"1"), ("h", None)])
    producer.send(topic, None, partition=0, timestamp_us=2_000_001)
    producer.send(topic, b"", partition=1, timestamp_us=3_000_000)
    producer.flush()
    rows = [row.asDict(True) for row in batch(spark, servers, subscribe=topic, includeHeaders="true").collect()]
    rows.sort(key=lambda row: (row["partition"], row["offset"]))
    common = {"topic": topic, "timestampType": 0}
    first = {"value": bytearray(b"a"), "key": bytearray(b"k"), "partition": 0, "offset": 0}
    assert [{**row, "timestamp": row["timestamp"].astimezone(UTC)} for row in rows] == [
        {
            **common,
            **first,
            "timestamp": datetime.fromtimestamp(1.5, UTC),
            "headers": [{"key": "h", "value": bytearray(b"1")}, {"key": "h", "value": None}],
        },
        {**common, "value": None, "key": None, "partition": 0, "offset": 1,
         "timestamp": datetime.fromtimestamp(2, UTC).replace(microsecond=1), "headers": None},
        {**common, "value": bytearray(b""), "key": None, "partition": 1, "offset": 0,
         "timestamp": datetime.fromtimestamp(3, UTC), "headers": None},
    ]  # fmt: skip


def test_a_schema_picks_columns_in_its_order(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic)
    numbered(producer, topic, range(3))
    reader = spark.read.format("kafkalog").options(**servers, subscribe=topic).schema("offset bigint, value binary")
    assert [tuple(row) for row in reader.load().collect()] == [(0, b"0"), (1, b"1"), (2, b"2")]


def test_many_records_come_once_each_and_in_order_within_a_partition(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=4)
    numbered(producer, topic, range(50_000), partitions=4)
    rows = batch(spark, servers, subscribe=topic).select("partition", "offset", "value").collect()
    for partition in range(4):
        mine = [(row.offset, int(row.value)) for row in rows if row.partition == partition]
        assert mine == [(offset, 4 * offset + partition) for offset in range(12_500)]


def test_a_batch_reads_the_offsets_it_is_told(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    numbered(producer, topic, range(20), partitions=2)
    starts = json.dumps({topic: {"0": 4, "1": -2}})
    ends = json.dumps({topic: {"0": 6, "1": -1}})
    rows = batch(spark, servers, subscribe=topic, startingOffsets=starts, endingOffsets=ends)
    assert numbers_in(rows) == sorted([8, 10, *range(1, 20, 2)])


def test_the_same_frame_read_again_sees_what_was_added(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic)
    rows = batch(spark, servers, subscribe=topic)
    assert rows.count() == 0
    numbered(producer, topic, range(5))
    assert rows.count() == 5
    admin.delete_records({TopicPartition(topic, 0): 2})
    assert numbers_in(rows) == [2, 3, 4]


def test_a_pattern_and_an_assignment_select(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, new_topic: Callable[[], str]
) -> None:
    one, two = new_topic(), new_topic()
    for topic, first in ((one, 0), (two, 10)):
        admin.create_topic(topic, partitions=2)
        numbered(producer, topic, range(first, first + 4), partitions=2)
    pattern = f"({one}|{two})$"
    assert numbers_in(batch(spark, servers, subscribePattern=pattern)) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert numbers_in(batch(spark, servers, subscribe=f"{one}, {two}")) == [0, 1, 2, 3, 10, 11, 12, 13]
    # A partition that is not there is left out, as by the Kafka source.
    assert numbers_in(batch(spark, servers, assign=json.dumps({one: [1, 7]}))) == [1, 3]
    assert batch(spark, servers, subscribePattern="matches.nothing").count() == 0


def test_what_a_batch_can_not_read_gets_one_sentence(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    numbered(producer, topic, range(10), partitions=2)
    admin.delete_records({TopicPartition(topic, 0): 3})
    for options, says in (
        ({"subscribe": topic + ".not"}, f"there is no topic '{topic}.not'"),
        ({"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 3}})}, f"read are {topic}-0, {topic}-1"),
        (
            {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 2, "1": 0}})},
            f"offset 2 of {topic}-0 is outside [3, 5]",
        ),
        (
            {"subscribe": topic, "endingOffsets": json.dumps({topic: {"0": 6, "1": 0}})},
            f"{topic}-0 ends at offset 5 and was to be read up to 6",
        ),
    ):
        with pytest.raises(Exception, match="kafkalog") as raised:
            batch(spark, servers, **options).collect()
        assert says in str(raised.value)


def test_an_unreachable_cluster_is_named_in_bounded_time(spark: SparkSession) -> None:
    started = time.monotonic()
    options = {"kafkalog.bootstrap.servers": "127.0.0.1:1", "kafkalog.bootstrap.timeout.ms": "500"}
    with pytest.raises(Exception, match="no broker reachable at 127"):
        batch(spark, options, subscribe="t").collect()
    assert time.monotonic() - started < 60


# --- streams ---------------------------------------------------------------------------------------------------------


class Stream:
    """A stream into a table in memory, from one checkpoint however often it is started."""

    def __init__(self, spark: SparkSession, checkpoint: Path, options: Options) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._options = options
        self._started = 0
        self.read: list[int] = []
        """The numbers read so far, over all starts, in order of micro-batches."""

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        rows = self._spark.readStream.format("kafkalog").options(**self._options).load()

        def take(batch: DataFrame, number: int) -> None:
            self.read.extend(numbers_in(batch))

        writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(self._checkpoint))
        return writer.trigger(**trigger).start()

    def run(self) -> list[int]:
        """Read what there is, by AvailableNow; the number of rows of each micro-batch."""
        query = self.start({"availableNow": True})
        assert query.awaitTermination(120)
        return [progress["numInputRows"] for progress in query.recentProgress]

    def fail(self) -> str:
        """Read what there is; the sentence it fails with."""
        with pytest.raises(Exception, match="kafkalog") as raised:
            self.run()
        return str(raised.value)


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path, servers: Options) -> Callable[..., Stream]:
    return lambda **options: Stream(spark, tmp_path / "checkpoint", {**servers, **options})


def test_available_now_reads_all_in_limited_batches_and_continues_from_its_checkpoint(
    stream: Callable[..., Stream], admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    numbered(producer, topic, range(100), partitions=2)
    reading = stream(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="40")
    assert reading.run() == [40, 40, 20]
    assert sorted(reading.read) == list(range(100))
    numbered(producer, topic, range(100, 110), partitions=2)
    assert reading.run() == [10]
    assert sorted(reading.read) == list(range(110))
    admin.alter_topic(topic, partitions=3)
    producer.send(topic, b"1000", partition=2)
    producer.flush()
    reading.run()
    assert sorted(reading.read) == [*range(110), 1000]


def test_a_stream_from_latest_reads_what_comes_after_it_started(
    stream: Callable[..., Stream], admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    numbered(producer, topic, range(10), partitions=2)
    reading = stream(subscribe=topic)
    query = reading.start({"processingTime": "100 milliseconds"})
    try:
        wait_for(lambda: query.lastProgress is not None, query)
        numbered(producer, topic, range(10, 30), partitions=2)
        wait_for(lambda: len(reading.read) >= 20, query)
        latest = json.dumps({topic: {"0": 15, "1": 15}})

        def is_told() -> bool:
            progress = query.lastProgress
            return progress is not None and progress["sources"][0]["latestOffset"] == latest

        wait_for(is_told, query)
    finally:
        query.stop()
    assert sorted(reading.read) == list(range(10, 30))


def test_a_batch_whose_commit_was_lost_is_read_again_exactly(
    stream: Callable[..., Stream], admin: Admin, producer: Producer, topic: str, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    numbered(producer, topic, range(10))
    reading = stream(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="4")
    assert reading.run() == [4, 4, 2]
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    numbered(producer, topic, range(10, 13))
    reading.read.clear()
    assert reading.run() == [2, 3]
    assert reading.read == [8, 9, 10, 11, 12]


def test_records_gone_before_they_were_read_fail_the_stream(
    stream: Callable[..., Stream], admin: Admin, producer: Producer, topic: str
) -> None:
    admin.create_topic(topic)
    numbered(producer, topic, range(10))
    reading = stream(subscribe=topic, startingOffsets="earliest")
    reading.run()
    numbered(producer, topic, range(10, 20))
    admin.delete_records({TopicPartition(topic, 0): 15})
    says = reading.fail()
    assert "records to be read are missing from the log" in says
    assert f"offset 10 of {topic}-0 is outside [15, 20]" in says
    admin.delete_topic(topic)
    assert f"topic '{topic}', which the stream reads, was deleted" in reading.fail()
    admin.create_topic(topic)
    assert f"topic '{topic}' was deleted and created again: group spark-{topic} has offset 10" in reading.fail()


def test_what_a_stream_can_not_be_told_gets_one_sentence(stream: Callable[..., Stream], topic: str) -> None:
    assert "endingOffsets is only for batch reads" in stream(subscribe=topic, endingOffsets="latest").fail()
    assert f"there is no topic '{topic}'" in stream(subscribe=topic).fail()


def wait_for(condition: Callable[[], bool], query: StreamingQuery, seconds: float = 60) -> None:
    """Until it holds; fails with the query's own error if that ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, query.status
        if query.awaitTermination(0.05):  # type: ignore[arg-type] # seconds, also parts of one
            raise AssertionError(f"the query ended: {query.exception()}")


def test_a_stream_reads_a_projection(
    spark: SparkSession, servers: Options, admin: Admin, producer: Producer, topic: str, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    numbered(producer, topic, range(3))
    schema = StructType([StructField("value", BinaryType())])
    rows = spark.readStream.format("kafkalog").options(**servers, subscribe=topic, startingOffsets="earliest")
    read: list[tuple[Any, ...]] = []
    query = (
        rows.schema(schema)
        .load()
        .writeStream.foreachBatch(lambda batch, number: read.extend(tuple(row) for row in batch.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert read == [(b"0",), (b"1",), (b"2",)]
