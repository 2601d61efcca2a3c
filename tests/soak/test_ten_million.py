"""Ten million records through every path: each exactly as sent, in order per partition, none lost, none twice.

KAFKALOG_SOAK_RECORDS makes it smaller for a quick look.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from tests.soak import numbered
from tests.soak.numbered import Ledger

pytestmark = pytest.mark.timeout(1800)
RECORDS = int(os.environ.get("KAFKALOG_SOAK_RECORDS", 10_000_000))
PARTITIONS = 4
MEMORY_MAX_BYTES = 300_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(brokers=1) as running:
        yield running


@pytest.fixture(scope="module")
def topic(cluster: LocalCluster) -> str:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("numbered", partitions=PARTITIONS, config={"segment.bytes": str(1 << 28)})
    with Producer(cluster.bootstrap_servers, acks=1) as producer:
        for value in numbered.records(0, RECORDS):
            producer.send("numbered", value)
        producer.flush()
    return "numbered"


def test_consumer_reads_every_record_as_messages(cluster: LocalCluster, topic: str) -> None:
    ledger = Ledger(RECORDS)
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in range(PARTITIONS)})
        pending: dict[int, list[bytes | None]] = {p: [] for p in range(PARTITIONS)}
        first = dict.fromkeys(pending, 0)

        def check(partition: int) -> None:
            values = pending[partition]
            ledger.add(partition, first[partition], numbered.numbers(pa.array(values, pa.binary())))
            first[partition] += len(values)
            pending[partition] = []

        for message in consumer.messages(max_messages=RECORDS, timeout=60):
            assert message.offset == first[message.partition] + len(pending[message.partition])
            pending[message.partition].append(message.value)
            if len(pending[message.partition]) == 10_000:
                check(message.partition)
        for partition in pending:
            if pending[partition]:
                check(partition)
    ledger.assert_complete()


def test_consumer_reads_every_record_as_arrow(cluster: LocalCluster, topic: str) -> None:
    ledger = Ledger(RECORDS)
    seen = 0
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in range(PARTITIONS)})
        for batch in consumer.arrow_batches():
            offsets = batch.column("offset").to_numpy()
            assert (np.diff(offsets) == 1).all()
            partition = batch.column("partition")[0].as_py()
            ledger.add(partition, int(offsets[0]), numbered.numbers(batch.column("value")))
            seen += batch.num_rows
            if seen >= RECORDS:
                break
    ledger.assert_complete()


@pytest.fixture(scope="module")
def spark_driver(spark: SparkSession) -> Iterator[SparkSession]:
    cloudpickle.register_pickle_by_value(numbered)  # the workers cannot import the tests
    yield spark
    cloudpickle.unregister_pickle_by_value(numbered)


def check_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check each record where it is read; hand on its partition, offset and number."""
    for batch in batches:
        if batch.num_rows:
            found = numbered.numbers(batch.column("value"))
            yield pa.record_batch(
                [batch.column("partition"), batch.column("offset"), pa.array(found)],
                names=["partition", "offset", "number"],
            )


def add_all(ledger: Ledger, frame: DataFrame) -> None:
    rows = frame.mapInArrow(check_rows, "partition int, offset long, number long").toArrow()
    partitions, offsets, found = (rows.column(name).to_numpy() for name in ("partition", "offset", "number"))
    for partition in np.unique(partitions):
        mine = partitions == partition
        order = np.argsort(offsets[mine], kind="stable")
        sorted_offsets = offsets[mine][order]
        assert (np.diff(sorted_offsets) == 1).all()
        assert (order == np.arange(len(order))).all(), "Spark hands out a partition's rows out of order"
        ledger.add(int(partition), int(sorted_offsets[0]), found[mine][order])


def test_spark_batch_reads_every_record(cluster: LocalCluster, topic: str, spark_driver: SparkSession) -> None:
    ledger = Ledger(RECORDS)
    reader = spark_driver.read.format("kafkalog").option("kafkalog.bootstrap.servers", cluster.bootstrap_servers)
    add_all(ledger, reader.option("subscribe", topic).load().select("value", "partition", "offset"))
    ledger.assert_complete()


def test_spark_stream_reads_every_record(
    cluster: LocalCluster, topic: str, spark_driver: SparkSession, tmp_path: os.PathLike[str]
) -> None:
    ledger = Ledger(RECORDS)
    batches = []
    stream = (
        spark_driver.readStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", cluster.bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max(1, RECORDS // 5))
        .load()
    )

    def add(frame: DataFrame, batch_id: int) -> None:
        add_all(ledger, frame.select("value", "partition", "offset"))
        batches.append(batch_id)

    query = (
        stream.writeStream.foreachBatch(add)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert len(batches) >= 5
    ledger.assert_complete()


def test_spark_writes_every_record_back(cluster: LocalCluster, topic: str, spark_driver: SparkSession) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("copied", partitions=PARTITIONS, config={"segment.bytes": str(1 << 28)})
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
    frame = spark_driver.read.format("kafkalog").options(**options, subscribe=topic).load()
    frame.select("value", "partition").write.format("kafkalog").options(**options, topic="copied").mode("append").save()
    ledger = Ledger(RECORDS)
    add_all(
        ledger,
        spark_driver.read.format("kafkalog")
        .options(**options, subscribe="copied")
        .load()
        .select("value", "partition", "offset"),
    )
    ledger.assert_complete()


def test_broker_stays_small(cluster: LocalCluster, topic: str) -> None:
    for broker in cluster.brokers:
        with open(f"/proc/{broker.pid}/status") as status:
            peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
        assert peak < MEMORY_MAX_BYTES, f"the broker's resident set reached {peak / 1e6:.0f} MB"
