"""Spark streaming: how long an empty micro-batch takes, kafkalog to kafkalog, beside an empty source in memory to a
sink that throws away.

Spark runs no micro-batch while a source's offsets stand still, so kafkalog's batches get the least that moves them: one
record of one byte in each partition, which a filter drops, so that the sink's tasks run and write nothing. The records
are all there before the query starts and `maxOffsetsPerTrigger` deals them out: batch follows batch, and no wait for
new data is in the time. The source in memory moves its offset without any row and has as many partitions; the same
filter stands behind it. So kafkalog's side has these fetches on top of what is compared. `write_stream` is measured
beside the format's sink, also with batches whose records are written.

The time is `triggerExecution` of Spark's own progress reports, from asking the source to the offsets' commit. The
queries run by turns, never at once, for an idle query takes time from the other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench.measure import by_turns, figure, fresh_topic
from bench.spark_session import spark_session
from bench.spark_write import DELIVERIES
from broker.local import LocalCluster
from kafkalog import Admin, Producer
from pyspark_kafkalog import write_stream

PARTITIONS = 2
ROUNDS = 5
_DROPS_ALL = "offset < 0"
_DROPS_NONE = "offset >= 0"

Start = Callable[[DataFrame, str], StreamingQuery]
"""Starts a query that writes rows, with a checkpoint."""


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    warmups, batches = batch_counts(scale)
    with LocalCluster(durable=True) as cluster, spark_session() as spark:
        fill(cluster.bootstrap_servers, "trickle", warmups + batches)
        servers = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
        source: dict[str, str | int] = {**servers, "subscribe": "trickle", "startingOffsets": "earliest"}
        source["maxOffsetsPerTrigger"] = PARTITIONS
        sinks = {each: {**servers, "topic": "out", "delivery": each} for each in DELIVERIES}
        with Admin(cluster.bootstrap_servers) as admin:
            fresh_topic(admin, cluster, "out", PARTITIONS)
        memory = {"partitions": PARTITIONS, "batches": warmups + batches}
        trickle, starts = rows_of(spark, "kafkalog", source), {}
        for each, sink in sinks.items():
            starts[each] = into("kafkalog", sink)
            starts[f"{each}, write_stream"] = partial(_by_write_stream, sink)
        empty, nothing = rows_of(spark, "memory_benchmark", memory), into("memory_benchmark", {})
        candidates = {
            f"{kind}, {name}": partial(batch_time, scale, trickle.where(where).select("value"), start)
            for kind, where in (("empty micro-batch", _DROPS_ALL), ("micro-batch of 2 records", _DROPS_NONE))
            for name, start in starts.items()
        }
        candidates["empty micro-batch, memory"] = partial(
            batch_time, scale, empty.where(_DROPS_ALL).select("value"), nothing
        )
        times = by_turns(candidates, scale, runs=ROUNDS)
    for name, taken in times.items():
        milliseconds = [1000 * each for each in taken]
        yield figure(name, "ms", milliseconds, partitions=PARTITIONS, batches=batches)


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


def rows_of(spark: SparkSession, source: str, options: Mapping[str, str | int]) -> DataFrame:
    return spark.readStream.format(source).options(**options).load()


def into(sink: str, options: Mapping[str, str | int]) -> Start:
    """Writes by a format's sink."""
    return lambda rows, checkpoint: (
        rows.writeStream.format(sink).options(**options).option("checkpointLocation", checkpoint).start()
    )


def _by_write_stream(options: Mapping[str, Any], rows: DataFrame, checkpoint: str) -> StreamingQuery:
    return write_stream(rows, checkpoint_location=checkpoint, **options)


def batch_time(scale: float, rows: DataFrame, start: Start) -> float:
    """Median seconds of a micro-batch of a query of its own, after some that are not counted.

    The source has to have as many of them to give as `batch_counts` says.
    """
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as checkpoint:
        query = start(rows, checkpoint)
        try:
            query.processAllAvailable()
            ran = [each.durationMs for each in query.recentProgress if "addBatch" in each.durationMs]
        finally:
            query.stop()
    warmups, batches = batch_counts(scale)
    assert len(ran) == warmups + batches, f"{len(ran)} micro-batches ran"
    return statistics.median(durations["triggerExecution"] for durations in ran[warmups:]) / 1000
