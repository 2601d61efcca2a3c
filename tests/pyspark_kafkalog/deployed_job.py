"""The job that the tests of deployments run: a batch write, a stream from there through the sink, both read back and
compared with what was written. Prints one line of JSON; knows nothing of how Spark was started.

    python deployed_job.py BOOTSTRAP CHECKPOINTS SOURCE:TARGET[:DELIVERY]... [--remote sc://HOST:PORT] [--halting]

It runs once for each pair of topics, which are there already and empty. With `--halting`, the first attempt at one task
of every write comes to a halt once it has handed out its rows: nothing ends it but Spark, after a twin of it has come
through. The twin begins only then: it may be there before the first attempt's Python has started.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext
    from pyspark.sql import DataFrame, SparkSession

ROWS = 1200
TASKS = 2
HALF = ROWS // 2 + TASKS  # each partition's share is rounded down: two micro-batches take all
HALTING_TASK = 0
_WAIT_SECONDS = 120.0
"""When an attempt gives up waiting for the other; long after that should have run."""

SETTINGS = (
    "spark.master",
    "spark.python.worker.reuse",
    "spark.python.unix.domain.socket.enabled",
    "spark.sql.execution.arrow.maxRecordsPerBatch",
    "spark.speculation",
)
PLACE = "prefix string, package string, pid int"


def value_of(row: int) -> str:
    return f"{row}:" + "x" * 1000  # large enough to get through the pipes between Spark and its workers


@dataclass(frozen=True)
class Halting:
    """The rows as they are, but one first attempt does not end after them, and its twin waits for it to get there.

    Attributes:
        folder: one that all tasks see, where the first attempt tells of its halt.
        seen: `(bootstrap, topic)` to wait there for the first attempt's rows, which get there at once; or None.
    """

    folder: Path
    seen: tuple[str, str] | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        from tests.waiting import waited_for  # only here: the job without halts runs where the checkout is not seen

        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != HALTING_TASK:
            yield from batches
        elif context.attemptNumber() == 0:
            yield from batches
            self._halted(context).touch()
            threading.Event().wait(_WAIT_SECONDS)  # Spark kills it once its twin is through
            raise TimeoutError("no twin of this attempt came through")
        else:
            waited_for(self._halted(context).exists, _WAIT_SECONDS, "the first attempt did not come to its halt")
            first = next(batches)
            if self.seen is not None:
                _see(first["value"][0].as_py().encode(), *self.seen)
            yield first
            yield from batches

    def _halted(self, context: TaskContext) -> Path:
        return self.folder / f"halted-{context.stageId()}"


def _see(value: bytes, bootstrap: str, topic: str) -> None:
    """Return once a value is in a topic."""
    from kafkalog import Consumer, TopicPartition

    with Consumer(bootstrap) as consumer:
        consumer.assign({TopicPartition(topic, partition): "earliest" for partition in range(TASKS)})
        if not any(message.value == value for message in consumer.messages(timeout=_WAIT_SECONDS)):
            raise TimeoutError("the first attempt's rows did not get into the topic")


def place(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For each row one of PLACE: the Python that the task runs in."""
    import pyarrow as pa

    import pyspark_kafkalog

    for batch in batches:
        row = {"prefix": sys.prefix, "package": os.path.dirname(pyspark_kafkalog.__file__), "pid": os.getpid()}
        types = pa.schema({"prefix": pa.string(), "package": pa.string(), "pid": pa.int32()})
        yield pa.RecordBatch.from_pylist([row] * batch.num_rows, types)


def differences(rows: DataFrame) -> dict[str, int]:
    """How the values of a read differ from those written, as multisets."""
    found = Counter(row.value for row in rows.selectExpr("cast(value AS string) AS value").collect())
    wanted = Counter(value_of(number) for number in range(ROWS))
    return {
        "missing": len(wanted.keys() - found.keys()),
        "foreign": len(found.keys() - wanted.keys()),
        "doubled": sum(count - 1 for count in found.values()),
    }


def run(
    spark: SparkSession,
    bootstrap: str,
    source: str,
    target: str,
    checkpoint: str,
    delivery: str = "",
    *,
    halts: Path | None = None,
) -> dict[str, Any]:
    """The whole job over two existing topics; what it found."""
    servers = {"kafkalog.bootstrap.servers": bootstrap}
    sink = {**servers, **({"delivery": delivery} if delivery else {})}

    def prepared(rows: DataFrame, topic: str) -> DataFrame:
        if halts is None:
            return rows
        seen = (bootstrap, topic) if delivery == "at-least-once" else None
        # Without keys: rows with keys are gathered before they are sent, and would not be there at the halt.
        return rows.select("value").mapInArrow(Halting(halts, seen), "value string")

    written = spark.range(0, ROWS, 1, TASKS).selectExpr(
        "cast(id % 97 AS string) AS key", "concat(id, ':', repeat('x', 1000)) AS value"
    )
    prepared(written, source).write.format("kafkalog").options(**sink, topic=source).mode("append").save()

    def read(topic: str) -> DataFrame:
        return spark.read.format("kafkalog").options(**servers, subscribe=topic).load()

    stream = (
        spark.readStream.format("kafkalog")
        .options(**servers, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger=str(HALF))
        .load()
        .selectExpr("cast(key AS string) AS key", "cast(value AS string) AS value")
    )
    query = (
        prepared(stream, target)
        .writeStream.format("kafkalog")
        .options(**sink, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    places = [spark.range(0, TASKS, 1, TASKS).mapInArrow(place, PLACE).collect() for _ in range(2)]
    return {
        "source": differences(read(source)),
        "target": differences(read(target)),
        "micro_batches": len({progress.batchId for progress in query.recentProgress}),
        "driver": sys.prefix,
        "driver_has_kafkalog": importlib.util.find_spec("kafkalog") is not None,
        "prefixes": sorted({row.prefix for rows in places for row in rows}),
        "packages": sorted({row.package for rows in places for row in rows}),
        "pids": [sorted({row.pid for row in rows}) for rows in places],
        "settings": {name: spark.conf.get(name, None) for name in SETTINGS},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("topics", nargs="+")
    parser.add_argument("--remote")
    parser.add_argument("--halting", action="store_true")
    given = parser.parse_args()

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("kafkalog deployed")
    spark = (builder.remote(given.remote) if given.remote else builder).getOrCreate()
    halts = given.checkpoints if given.halting else None
    found = []
    for topics in given.topics:
        source, target, *delivery = topics.split(":")
        checkpoint = str(given.checkpoints / target)
        found.append(run(spark, given.bootstrap, source, target, checkpoint, *delivery, halts=halts))
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
