"""Spark streaming: how long an empty micro-batch takes, kafkalog to kafkalog, beside an empty source in memory to a
sink that throws away.

Spark runs no micro-batch while a source's offsets stand still, so kafkalog's batches get the least that moves them: one
record of one byte in each partition, which a filter drops, so that the sink's tasks run and write nothing. The records
are all there before the query starts and `maxOffsetsPerTrigger` deals them out: batch follows batch, and no wait for
new data is in the time. The source in memory moves its offset without any row and has as many partitions; the same
filter stands behind it. So kafkalog's side has these fetches on top of what is compared.

The time is `triggerExecution` of Spark's own progress reports, from asking the source to the offsets' commit. The two
queries run by turns, never at once, for an idle query takes time from the other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyspark.sql import SparkSession

from bench.measure import by_turns, figure, fresh_topic
from bench.spark_session import spark_session
from bench.spark_write import DELIVERIES
from broker.local import LocalCluster
from kafkalog import Admin, Producer

PARTITIONS = 2
ROUNDS = 5
_DROPS_ALL = "offset < 0"


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    warmups, batches = batch_counts(scale)
    with LocalCluster() as cluster, spark_session() as spark:
        fill(cluster.bootstrap_servers, "trickle", warmups + batches)
        servers = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
        source: dict[str, str | int] = {**servers, "subscribe": "trickle", "startingOffsets": "earliest"}
        source["maxOffsetsPerTrigger"] = PARTITIONS
        sinks = {each: {**servers, "topic": "out", "delivery": each} for each in DELIVERIES}
        with Admin(cluster.bootstrap_servers) as admin:
            fresh_topic(admin, cluster, "out", PARTITIONS)
        memory = {"partitions": PARTITIONS, "batches": warmups + batches}
        candidates: dict[str, Callable[[], float]] = {
            each: partial(batch_time, spark, scale, "kafkalog", source, "kafkalog", sink)
            for each, sink in sinks.items()
        }
        candidates["memory"] = partial(batch_time, spark, scale, "memory_benchmark", memory, "memory_benchmark", {})
        times = by_turns(candidates, scale, runs=ROUNDS)
    for name, taken in times.items():
        milliseconds = [1000 * each for each in taken]
        yield figure(f"empty micro-batch, {name}", "ms", milliseconds, partitions=PARTITIONS, batches=batches)


def batch_counts(scale: float) -> tuple[int, int]:
    """How many micro-batches of a query are not counted, and how many are."""
    return (5, 30) if scale >= 0.1 else (1, 2)


def fill(bootstrap_servers: str, topic: str, count: int) -> None:
    """Make a topic of so many records in each partition, each a batch of its own, as a trickle would leave them."""
    with Admin(bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=PARTITIONS)
    with Producer(bootstrap_servers, batch_records=1) as producer:
        for _ in range(count):
            for partition in range(PARTITIONS):
                producer.send(topic, b"x", partition=partition)


def batch_time(
    spark: SparkSession,
    scale: float,
    source: str,
    source_options: Mapping[str, str | int],
    sink: str,
    sink_options: Mapping[str, str | int],
) -> float:
    """Median seconds of a micro-batch of a query of its own, after some that are not counted.

    The source has to have as many of them to give as `batch_counts` says.
    """
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as checkpoint:
        rows = spark.readStream.format(source).options(**source_options).load().where(_DROPS_ALL).select("value")
        writer = rows.writeStream.format(sink).options(**sink_options).option("checkpointLocation", checkpoint)
        query = writer.start()
        try:
            query.processAllAvailable()
            ran = [each.durationMs for each in query.recentProgress if "addBatch" in each.durationMs]
        finally:
            query.stop()
    warmups, batches = batch_counts(scale)
    assert len(ran) == warmups + batches, f"{len(ran)} micro-batches ran"
    return statistics.median(durations["triggerExecution"] for durations in ran[warmups:]) / 1000
