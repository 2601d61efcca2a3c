"""A Spark session for benchmarks and the sources and sinks that Spark is measured against: rows made in memory, rows
thrown away, in batch and streaming. They set the limit that a Python data source has; kafkalog is measured by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
FULL_SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)
BATCH_ROWS = 10_000
WARMUPS = 3
RUNS = 7


@contextmanager
def spark_session(given: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """local[2] in a Java process of its own, with this checkout in the workers' path and the settings of
    conf/spark-defaults.conf, but for those that are given. A session that is active already is the caller's: it is used
    as it is and left running."""
    active = SparkSession.getActiveSession()
    if active is not None:
        if given:
            raise RuntimeError(f"a session that is active cannot be given {', '.join(given)}")
        active.dataSource.register(Memory)
        yield active
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_CONF_DIR"] = str(ROOT / "conf")
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    builder = SparkSession.builder.master("local[2]").appName("kafkalog benchmark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "4g",  # Kafka's clients keep their buffers: that of the tuned producer is 256 MiB
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    for name, value in (settings | dict(given or {})).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(Memory)
    try:
        yield session
    finally:
        try:
            session.stop()
        finally:
            _end_java()


def _end_java() -> None:
    """pyspark would use the process again, also one that has ended or whose heap is full of what it kept."""
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    SparkContext._active_spark_context = SparkSession._instantiatedSession = None  # `stop` leaves them where it failed
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


class Memory(DataSource):
    """`rows` rows of `bytes`-byte values over `partitions` partitions, made in memory; writes are thrown away.

    As a stream it has no rows: its offset goes up by one with every micro-batch, until there were `batches` of them.
    """

    @classmethod
    def name(cls) -> str:
        return "memory_benchmark"

    def schema(self) -> str:
        return FULL_SCHEMA

    def reader(self, schema: StructType) -> MemoryReader:
        return MemoryReader(schema, *(int(self.options[name]) for name in ("rows", "bytes", "partitions")))

    def writer(self, schema: StructType, overwrite: bool) -> Discard:
        return Discard()

    def streamReader(self, schema: StructType) -> EmptyStream:
        return EmptyStream(*(int(self.options[name]) for name in ("batches", "partitions")))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DiscardStream:
        return DiscardStream()


class MemoryReader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int, value_bytes: int, partitions: int) -> None:
        self._schema, self._rows, self._value_bytes, self._partitions = schema, rows, value_bytes, partitions

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(partition) for partition in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import numpy as np
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self._schema, timezone="UTC")
        columns = {
            "key": pa.nulls(BATCH_ROWS, pa.binary()),
            "value": pa.array([os.urandom(self._value_bytes) for _ in range(BATCH_ROWS)], pa.binary()),
            "topic": pa.repeat(pa.scalar("topic"), BATCH_ROWS),
            "partition": pa.repeat(pa.scalar(partition.value, pa.int32()), BATCH_ROWS),
            "timestamp": pa.repeat(pa.scalar(1_700_000_000_000_000, pa.timestamp("us", tz="UTC")), BATCH_ROWS),
            "timestampType": pa.repeat(pa.scalar(0, pa.int32()), BATCH_ROWS),
        }
        rows = self._rows // self._partitions
        for offset in range(0, rows, BATCH_ROWS):
            columns["offset"] = pa.array(np.arange(offset, offset + BATCH_ROWS))
            batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
            yield batch.slice(0, min(BATCH_ROWS, rows - offset))


class Discard(DataSourceArrowWriter):
    def write(self, iterator: Iterator[object]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class EmptyStream(DataSourceStreamReader):
    def __init__(self, batches: int, partitions: int) -> None:
        self._batches, self._partitions = batches, partitions

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(1)

    def initialOffset(self) -> dict[str, int]:
        return {"batch": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"batch": min(start["batch"] + 1, self._batches)}

    def reportLatestOffset(self) -> dict[str, int]:
        return {"batch": self._batches}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(partition) for partition in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


class DiscardStream(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[object]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()
