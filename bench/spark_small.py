"""Spark batch read of a topic of 32 small partitions: packed into two splits by `maxInputPartitions`, and each in a
split of its own, beside the same rows in two partitions. Every split costs a Python task."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.measure import interleaved, ratio
from bench.spark_read import RECORD_BYTES, fill, to_noop
from bench.spark_session import RUNS, WARMUPS, spark_session
from broker.local import LocalCluster

SMALL_PARTITIONS = 32
SPLITS = 2
PARTITION_ROWS = 10_000


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    count = SMALL_PARTITIONS * PARTITION_ROWS
    with LocalCluster() as cluster, spark_session() as spark:
        fill(cluster.bootstrap_servers, "small", count, partitions=SMALL_PARTITIONS)
        fill(cluster.bootstrap_servers, "large", count, partitions=SPLITS)
        servers = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
        read: dict[str, dict[str, str | int]] = {
            "packed": {**servers, "subscribe": "small", "maxInputPartitions": SPLITS},
            "single": {**servers, "subscribe": "small"},
            "large": {**servers, "subscribe": "large"},
        }
        times = interleaved(
            {name: to_noop(spark.read.format("kafkalog").options(**options)) for name, options in read.items()},
            scale,
            runs=RUNS,
            warmups=WARMUPS,
        )
    for name, splits in (("packed", SPLITS), ("single", SMALL_PARTITIONS)):
        yield {
            "name": f"Spark batch read, {SMALL_PARTITIONS} small partitions in {splits} splits",
            "value": round(statistics.median(times[name]) * 1000, 1),
            "unit": "ms",
            "in_two_partitions": round(statistics.median(times["large"]) * 1000, 1),
            "time_ratio": round(ratio(times["large"], times[name]), 3),
            "rows": count,
            "record_bytes": RECORD_BYTES,
        }
