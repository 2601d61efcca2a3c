"""Spark batch read: rows a second from four partitions to noop, beside a source that makes the same rows in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrameReader, SparkSession

from bench.measure import interleaved, rate, ratio
from bench.spark_session import RUNS, WARMUPS, spark_session
from broker.local import LocalCluster
from kafkalog import Admin, Producer

RECORD_BYTES = 200
PARTITIONS = 4


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    count = max(40_000, int(5_000_000 * scale))
    count -= count % (10_000 * PARTITIONS)
    with LocalCluster() as cluster:
        fill(cluster.bootstrap_servers, "read", count)
        with spark_session() as spark:
            for name, schema in (("full schema", None), ("value only", "value binary")):
                yield from _figures(name, spark, cluster.bootstrap_servers, count, schema, scale)


def fill(bootstrap_servers: str, topic: str, count: int, partitions: int = PARTITIONS) -> None:
    """Make a topic of `count` records in batches of 10,000, partition by partition."""
    values = pa.array([os.urandom(RECORD_BYTES) for _ in range(10_000)], pa.binary())
    with Admin(bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=partitions)
    with Producer(bootstrap_servers) as producer:
        for sent in range(0, count, len(values)):
            partition = pa.repeat(pa.scalar(sent // len(values) % partitions, pa.int32()), len(values))
            producer.send_arrow(topic, pa.record_batch([values, partition], names=["value", "partition"]))


def _figures(
    name: str, spark: SparkSession, servers: str, count: int, schema: str | None, scale: float
) -> Iterator[dict[str, object]]:
    ours = spark.read.format("kafkalog").option("kafkalog.bootstrap.servers", servers).option("subscribe", "read")
    memory = (
        spark.read.format("memory_benchmark")
        .option("rows", count)
        .option("bytes", RECORD_BYTES)
        .option("partitions", PARTITIONS)
    )
    times = interleaved(
        {"kafkalog": to_noop(ours, schema), "memory": to_noop(memory, schema)}, scale, runs=RUNS, warmups=WARMUPS
    )
    yield {
        "name": f"Spark batch read, {name}",
        "value": round(rate(count, times["kafkalog"])),
        "unit": "rows/s",
        "in_memory_source": round(rate(count, times["memory"])),
        "ratio": round(ratio(times["kafkalog"], times["memory"]), 3),
        "rows": count,
        "record_bytes": RECORD_BYTES,
    }


def to_noop(reader: DataFrameReader, schema: str | None = None) -> Callable[[], None]:
    """A batch read that throws its rows away: all columns, or those of a schema."""
    if schema:
        reader = reader.schema(schema)
    return lambda: reader.load().write.format("noop").mode("overwrite").save()
