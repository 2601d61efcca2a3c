"""The settings of conf/spark-defaults.conf, each with what it gives: the same work as the file has it and otherwise, by
turns.

A setting of Spark's core needs a Spark of its own, and one Java holds one: these run in processes of their own, which
work by turns. A setting of SQL is changed within one session. `spark.sql.streaming.pollingDelay` is not in the file: an
idle kafkalog stream waits in the source. Its figure tells whether that is right.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
from pyspark.sql import SparkSession

from bench.measure import by_turns, fresh_topic, ratio, seconds
from bench.spark_read import to_noop
from bench.spark_session import spark_session
from bench.spark_stream import batch_counts, batch_time, into, rows_of
from broker.local import LocalCluster
from kafkalog import Admin

SOCKETS = "spark.python.unix.domain.socket.enabled"
REUSE = "spark.python.worker.reuse"
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
POLLING = "spark.sql.streaming.pollingDelay"
MEASURED = (SOCKETS, REUSE, BATCH_ROWS, POLLING)

PARTITIONS = 4

Work = Callable[[SparkSession], float]
"""Does something in a session, and says what it measured of it."""


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    count = max(40_000, int(5_000_000 * scale))
    with LocalCluster() as cluster, Admin(cluster.bootstrap_servers) as admin, spark_process({}) as spark:
        few, many = (8, 32) if scale >= 0.1 else (2, 4)
        tasks, stream = partial(empty_tasks, tasks=many), partial(empty_batch, partitions=few, scale=scale)
        with spark_process({SOCKETS: "false"}) as other:
            yield of_core(SOCKETS, f"{many} empty tasks", spark, other, tasks, scale)
            yield of_core(SOCKETS, f"micro-batch of {few} partitions", spark, other, stream, scale)
        with spark_process({REUSE: "false"}) as other:
            yield of_core(REUSE, f"micro-batch of {few} partitions", spark, other, stream, scale)

        servers = cluster.bootstrap_servers
        fresh_topic(admin, cluster, "idle", PARTITIONS)
        for value_bytes in (8, 200):
            work = partial(write, servers=servers, count=count, value_bytes=value_bytes)
            yield of_sql(
                BATCH_ROWS,
                "50000",
                f"write of {count} rows of {value_bytes} bytes",
                spark,
                work,
                scale,
                before=lambda: fresh_topic(admin, cluster, "written", PARTITIONS),
            )
        idle = partial(idle_cpu, servers=servers, window=max(1.0, 10 * scale))
        yield of_sql(POLLING, "100ms", "an idle stream, of one core", spark, idle, scale, unit="%")


class SparkProcess:
    """A Spark session in a process of its own, which does what it is told."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def do(self, work: Callable[[SparkSession], Any]) -> Any:
        """What a function returns there."""
        self._pipe.send(work)
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result


@contextmanager
def spark_process(settings: Mapping[str, str]) -> Iterator[SparkProcess]:
    """One with the settings of conf/spark-defaults.conf but for those given. It ends with the block, and also when this
    process is gone: its pipe closes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, dict(settings)))
    process.start()
    theirs.close()
    try:
        yield SparkProcess(ours)
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, settings: dict[str, str]) -> None:
    with spark_session(settings) as spark:
        while True:
            try:
                work = pipe.recv()
            except EOFError:
                return
            try:
                result = work(spark)
            except Exception as error:
                result = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(result)


def of_core(
    setting: str, what: str, spark: SparkProcess, other: SparkProcess, work: Work, scale: float
) -> dict[str, object]:
    """The figure of a setting that `other` has otherwise."""
    times = by_turns({"file": lambda: spark.do(work), "other": lambda: other.do(work)}, scale)
    return _figure(setting, what, spark, other.do(partial(_value, name=setting)), times, "ms")


def of_sql(
    setting: str,
    other: str,
    what: str,
    spark: SparkProcess,
    work: Work,
    scale: float,
    before: Callable[[], object] = lambda: None,
    unit: str = "ms",
) -> dict[str, object]:
    """The figure of a setting that can change within a session."""
    changed = partial(_with_setting, name=setting, value=other, work=work)
    measured = by_turns({"file": lambda: spark.do(work), "other": lambda: spark.do(changed)}, scale, before=before)
    return _figure(setting, what, spark, other, measured, unit)


def _figure(
    setting: str, what: str, spark: SparkProcess, other: str, measured: Mapping[str, list[float]], unit: str
) -> dict[str, object]:
    value = spark.do(partial(_value, name=setting))
    factor = 1000 if unit == "ms" else 1
    return {
        "name": f"{setting}={value}: {what}",
        "value": round(statistics.median(measured["file"]) * factor, 1),
        "unit": unit,
        f"at_{other}": round(statistics.median(measured["other"]) * factor, 1),
        "share_of_other": round(ratio(measured["other"], measured["file"]), 3),
    }


def _value(spark: SparkSession, name: str) -> str:
    return str(spark.conf.get(name))


def _with_setting(spark: SparkSession, name: str, value: str, work: Work) -> float:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        return work(spark)
    finally:
        spark.conf.set(name, str(before))


def empty_tasks(spark: SparkSession, tasks: int) -> float:
    """Seconds of a batch read of so many tasks without a row."""
    reader = spark.read.format("memory_benchmark").options(rows=0, bytes=1, partitions=tasks)
    return seconds(to_noop(reader))


def empty_batch(spark: SparkSession, partitions: int, scale: float) -> float:
    """Median seconds of a micro-batch without a row, from memory to a sink that throws away."""
    source = {"partitions": partitions, "batches": sum(batch_counts(scale))}
    return batch_time(scale, rows_of(spark, "memory_benchmark", source), into("memory_benchmark", {}))


def write(spark: SparkSession, servers: str, count: int, value_bytes: int) -> float:
    """Seconds of a batch write."""
    rows = spark.range(0, count, 1, PARTITIONS).selectExpr(f"cast(repeat('x', {value_bytes}) AS binary) AS value")
    writer = rows.write.format("kafkalog").options(**{"kafkalog.bootstrap.servers": servers, "topic": "written"})
    return seconds(lambda: writer.mode("append").save())


def idle_cpu(spark: SparkSession, servers: str, window: float) -> float:
    """Per cent of a core that Spark, its Java and its Python processes use while a stream has nothing to read."""
    reader = spark.readStream.format("kafkalog").option("kafkalog.bootstrap.servers", servers)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as checkpoint:
        writer = reader.option("subscribe", "idle").load().writeStream.format("noop")
        query = writer.option("checkpointLocation", checkpoint).start()
        try:
            query.processAllAvailable()
            before, start = _cpu_seconds(), time.perf_counter()
            # The span is what is measured: the processor time that is used while nothing happens. No event ends it.
            time.sleep(window)
            after, end = _cpu_seconds(), time.perf_counter()
        finally:
            query.stop()
    used = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    return 100 * used / (end - start)


def _cpu_seconds() -> dict[int, float]:
    """Of this process and all below it, by process id."""
    this = psutil.Process()
    found = {}
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = times.user + times.system
    return found
