"""Writing with Spark into a running cluster: batches and streams, and the writer called as Spark calls it in a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Message, Producer, TopicPartition
from kafkalog.client.producer.partitioner import partition_for_key
from kafkalog.errors import (
    BatchTooLarge,
    KafkalogError,
    RecordTooLarge,
    UnknownPartition,
    UnknownTopic,
)
from pyspark_kafkalog.sink import BatchWriter

MessagesIn = Callable[[str], list[Message]]
VALUES = StructType([StructField("value", StringType())])


def test_rows_arrive_with_all_their_columns(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic, partitions=3)
    rows = spark.createDataFrame(
        [
            ("k", "a", 2, [("h", bytearray(b"1")), ("h", None)], 7),
            (None, None, 0, None, 8),
            ("k2", "ü", 2, [], 9),
        ],
        "key string, value string, partition int, headers array<struct<key:string,value:binary>>, other int",
    )
    rows.coalesce(1).write.format("kafkalog").options(**options).mode("append").save()
    assert [(m.partition, m.key, m.value, m.headers) for m in messages_in(topic)] == [
        (0, None, None, ()),
        (2, b"k", b"a", (("h", b"1"), ("h", None))),
        (2, b"k2", "ü".encode(), ()),
    ]


def test_rows_go_to_the_topic_that_they_name(
    spark: SparkSession,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    messages_in: MessagesIn,
) -> None:
    one, two = new_topic(), new_topic()
    admin.create_topic(one)
    admin.create_topic(two)
    del options["topic"]
    rows = spark.range(0, 1000, 1, 1).selectExpr(
        "cast(id AS string) AS value", f"if(id % 3 = 0, '{one}', '{two}') AS topic"
    )
    rows.write.format("kafkalog").options(**options).mode("append").save()
    assert [int(m.value or b"") for m in messages_in(one)] == list(range(0, 1000, 3))
    assert [int(m.value or b"") for m in messages_in(two)] == [n for n in range(1000) if n % 3]


def test_keys_choose_partitions_as_the_producer_does_and_order_is_kept(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic, partitions=4)
    rows = spark.range(0, 50_000, 1, 1).selectExpr("cast(id % 100 AS string) AS key", "cast(id AS string) AS value")
    rows.write.format("kafkalog").options(**options).mode("append").save()
    messages = messages_in(topic)
    assert len(messages) == 50_000
    last: dict[int, int] = {}
    for message in messages:
        assert message.partition == partition_for_key(message.key or b"", 4)
        assert int(message.value or b"") % 100 == int(message.key or b"")
        assert int(message.value or b"") > last.get(message.partition, -1)
        last[message.partition] = int(message.value or b"")


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_rows_of_a_task_keep_their_order_whatever_they_name(
    spark: SparkSession,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    messages_in: MessagesIn,
    delivery: str,
) -> None:
    one, three = new_topic(), new_topic()
    admin.create_topic(one)
    admin.create_topic(three, partitions=3)
    del options["topic"]
    rows = spark.range(0, 25_000, 1, 1).selectExpr(  # several Arrow batches
        f"if(id % 2 = 0, '{one}', '{three}') AS topic",
        "cast(id AS string) AS value",
        "if(id % 3 = 0, cast(id % 100 AS string), null) AS key",
        "if(id % 5 = 0, 0, null) AS partition",
        "if(id % 7 = 0, array(struct('h' AS key, cast('1' AS binary) AS value)), null) AS headers",
    )
    rows.write.format("kafkalog").options(**options, delivery=delivery).mode("append").save()
    assert [int(m.value or b"") for m in messages_in(one)] == list(range(0, 25_000, 2))
    stored: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for message in messages_in(three):
        stored[message.partition].append(int(message.value or b""))
    assert all(numbers == sorted(numbers) for numbers in stored.values())
    assert sorted(number for numbers in stored.values() for number in numbers) == list(range(1, 25_000, 2))


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_records_bear_the_time_of_their_row_or_that_of_writing(
    spark: SparkSession,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    delivery: str,
    tmp_path: Path,
) -> None:
    admin.create_topic(topic)
    rows = spark.sql(
        "SELECT * FROM VALUES ('a', timestamp_micros(7)), ('b', null), ('c', timestamp_micros(-3)) "
        "AS (value, timestamp)"
    )
    before = time.time_ns() // 1000
    rows.coalesce(1).write.format("kafkalog").options(**options, delivery=delivery).mode("append").save()
    stamps = [message.timestamp_us for message in messages_in(topic)]
    assert (stamps[0], stamps[2]) == (7, -3)
    assert before <= stamps[1] <= time.time_ns() // 1000

    copy = f"{topic}.copy"
    admin.create_topic(copy)
    reading = {"subscribe": topic, "startingOffsets": "earliest", **options}
    del reading["topic"]
    stream = spark.readStream.format("kafkalog").options(**reading).load().writeStream.format("kafkalog")
    writing = {**options, "topic": copy, "delivery": delivery, "checkpointLocation": str(tmp_path / "checkpoint")}
    stream.options(**writing).trigger(availableNow=True).start().awaitTermination()
    assert [message.timestamp_us for message in messages_in(copy)] == stamps


def test_rows_without_keys_are_spread(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic, partitions=2)
    rows = spark.range(0, 40_000, 1, 1).selectExpr("cast(id AS string) AS value")
    rows.write.format("kafkalog").options(**options).mode("append").save()
    offsets = admin.list_offsets({TopicPartition(topic, n): "latest" for n in range(2)})
    counts = [listed.offset or 0 for listed in offsets.values()]
    assert sum(counts) == 40_000
    assert min(counts) >= 10_000


def test_a_stream_writes_what_it_reads(
    spark: SparkSession,
    cluster: LocalCluster,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    source = new_topic()
    admin.create_topic(source, partitions=2)
    admin.create_topic(topic)
    numbers = spark.range(0, 10_000, 1, 2).selectExpr("cast(id AS string) AS value", "cast(id % 2 AS int) AS partition")
    numbers.write.format("kafkalog").options(**{**options, "topic": source}).mode("append").save()
    read = spark.readStream.format("kafkalog").options(
        **{"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": source},
        startingOffsets="earliest",
        maxOffsetsPerTrigger=4000,
    )
    query = (
        read.load()
        .select("value")
        .writeStream.format("kafkalog")
        .options(**options, checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert sorted(int(m.value or b"") for m in messages_in(topic)) == list(range(10_000))
    assert [progress["sink"]["numOutputRows"] for progress in query.recentProgress] == [4000, 4000, 2000]


def test_a_failed_write_raises_one_sentence(spark: SparkSession, options: dict[str, str], topic: str) -> None:
    with pytest.raises(Exception, match=f"there is no topic '{topic}'"):
        spark.range(1).selectExpr("'v' AS value").write.format("kafkalog").options(**options).mode("append").save()


# --- the writer in a task, at least once ----------------------------------------------------------------------------


@pytest.fixture
def at_least_once(options: dict[str, str], kept: dict[Any, Producer]) -> dict[str, str]:
    return {**options, "delivery": "at-least-once"}


def batch_of(values: list[Any], **more: list[Any]) -> pa.RecordBatch:
    columns = {"value": pa.array(values, pa.string())}
    types = {"partition": pa.int32(), "key": pa.binary()}
    columns |= {name: pa.array(of, types[name]) for name, of in more.items()}
    return pa.RecordBatch.from_pydict(columns)


def test_an_unknown_topic_and_partition_and_too_large_a_record_fail_the_task(
    admin: Admin, at_least_once: dict[str, str], topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    writer = BatchWriter(VALUES, at_least_once, overwrite=False)
    admin.delete_topic(topic)
    with pytest.raises(UnknownTopic, match=topic):
        writer.write(iter([batch_of(["v"])]))
    admin.create_topic(topic, partitions=2, config={"max.message.bytes": 10_000})
    with pytest.raises(RecordTooLarge, match="larger than its max"):
        writer.write(iter([batch_of(["v" * 20_000])]))
    with_partition = StructType([*VALUES.fields, StructField("partition", IntegerType())])
    with pytest.raises(UnknownPartition, match=f"'{topic}' has no partition 2"):
        BatchWriter(with_partition, at_least_once, overwrite=False).write(iter([batch_of(["v"], partition=[2])]))


def test_a_producer_outlives_a_task_that_ends_well_and_no_other(
    admin: Admin, at_least_once: dict[str, str], kept: dict[Any, Producer], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    at_least_once["kafkalog.linger.ms"] = "60000"
    writer = BatchWriter(VALUES, at_least_once, overwrite=False)
    writer.write(iter([batch_of(["a"])]))
    [producer] = kept.values()
    writer.write(iter([]))
    assert list(kept.values()) == [producer]

    def fails() -> Iterator[pa.RecordBatch]:
        yield batch_of(["b"])
        raise EOFError("the task failed")

    with pytest.raises(EOFError, match="the task failed"):
        writer.write(fails())
    assert kept == {}
    with pytest.raises(KafkalogError):
        producer.send(topic, b"c")
    writer.write(iter([batch_of(["d"])]))
    assert [m.value for m in messages_in(topic) if m.value != b"b"] == [b"a", b"d"]


def test_everything_is_acknowledged_when_write_returns(admin: Admin, at_least_once: dict[str, str], topic: str) -> None:
    admin.create_topic(topic)
    schema = StructType([StructField("value", StringType()), StructField("key", BinaryType())])
    writer = BatchWriter(schema, {**at_least_once, "kafkalog.linger.ms": "60000"}, overwrite=False)
    writer.write(batch_of(["v"] * 1000, key=[b"k"] * 1000) for _ in range(5))
    assert admin.list_offsets({TopicPartition(topic, 0): "latest"})[TopicPartition(topic, 0)].offset == 5000


def test_a_record_that_fails_after_it_was_taken_fails_its_task(
    admin: Admin, at_least_once: dict[str, str], topic: str
) -> None:
    admin.create_topic(topic)
    writer = BatchWriter(VALUES, at_least_once, overwrite=False)
    writer.write(iter([batch_of(["v"])]))

    def batches() -> Iterator[pa.RecordBatch]:
        admin.alter_topic(topic, {"max.message.bytes": 10_000})  # after the task has looked up the limit
        yield batch_of(["v" * 20_000])

    with pytest.raises(BatchTooLarge, match=topic):
        writer.write(batches())


def test_neither_commit_nor_abort_change_what_was_written_at_least_once(
    admin: Admin, at_least_once: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    writer = BatchWriter(VALUES, at_least_once, overwrite=False)
    for end, more in ((writer.commit, []), (writer.abort, [None])):
        end([writer.write(iter([batch_of(["v"])])), *more])
    assert len(messages_in(topic)) == 2
