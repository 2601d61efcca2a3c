"""Spark's own Kafka connector into and out of a real Apache Kafka broker, beside kafkalog: the same rows, by turns.

Both sides have one broker on this machine, no compression, and leave the disk to the operating system. The connector is
measured at its `defaults`, and `tuned`: it waits for the leader's ack (acks=1), lingers 5 ms, puts 1 MB into a request
and has 256 MiB of room, and its batches may fill a request: its own 16 KB were made for records that come one by one;
to read, it takes up to 4 MiB of a partition and 8 MiB at once, and hands out 10,000 records at a time instead of 500.
kafkalog's clients are at their defaults.

Beside them are the limits that Spark sets a data source in Python: one that makes the same rows in memory, and a writer
that throws them away.

A topic is made for each write. What the writes of a series wrote is `kept` until its end, so that the disk has to take
all of it, or `deleted` before the next one, which is kinder to whoever writes back late.

Needs Kafka's jars: without them there are no figures but a sentence that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.measure import all_there, by_turns, figure, fresh_topic, interleaved, records_in, seconds
from bench.peers.connector import BROKER, CONNECTOR_DEFAULTS, CONNECTOR_TUNED, CONSUMER, PRODUCER, KafkaTopics
from bench.peers.jars import patience_seconds
from bench.peers.kafka import CONNECTOR, CONNECTOR_VERSION, SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.peers.librdkafka import end_offsets
from bench.spark_read import to_noop
from bench.spark_session import WARMUPS, spark_session
from bench.spark_write import DELIVERIES
from broker.local import LocalCluster
from kafkalog import Admin

RECORD_BYTES = 200
PARTITIONS = 4
MANY_PARTITIONS = 64
KEYS = 100_000
SPLITS = 2


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    patience = patience_seconds(scale)
    server_jars, connector_jars = kafka_jars(SERVER, patience), kafka_jars(CONNECTOR, patience)
    with (
        KafkaServer(server_jars, BROKER) as kafka,
        LocalCluster(durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
        spark_session({"spark.jars": ",".join(connector_jars)}) as spark,
    ):
        topics = KafkaTopics(spark, kafka.bootstrap_servers)
        sides = Sides(spark, kafka, topics, cluster, admin, {CONNECTOR_DEFAULTS: {}, CONNECTOR_TUNED: PRODUCER}, scale)
        yield from sides.written("write, deleted", 5_000_000, PARTITIONS, warmups=WARMUPS, is_limit_measured=True)
        yield from sides.written("write, kept", 5_000_000, PARTITIONS, is_kept=True)
        for partitions, warmups in ((PARTITIONS, WARMUPS), (MANY_PARTITIONS, 1)):
            what = f"write by key, {partitions} partitions"
            yield from sides.written(what, 2_000_000, partitions, is_keyed=True, warmups=warmups)
        yield from sides.read()


def rows_to_write(spark: SparkSession, rows: int, is_keyed: bool = False) -> DataFrame:
    """Rows of 200 bytes, and with keys that come again."""
    columns = [f"cast(repeat('x', {RECORD_BYTES}) AS binary) AS value"]
    if is_keyed:
        columns.append(f"cast(cast(id * 7919 % {KEYS} AS string) AS binary) AS key")
    return spark.range(0, rows, 1, PARTITIONS).selectExpr(*columns)


class Sides:
    """kafkalog and Kafka, each with one topic at a time.

    Args:
        connector: how the connector writes: options by name.
        scale: of the benchmark.
    """

    def __init__(
        self,
        spark: SparkSession,
        kafka: KafkaServer,
        topics: KafkaTopics,
        cluster: LocalCluster,
        admin: Admin,
        connector: Mapping[str, Mapping[str, str]],
        scale: float,
    ) -> None:
        self._spark, self._topics, self._cluster, self._admin = spark, topics, cluster, admin
        self._connector, self._scale = connector, scale
        self._ours = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
        self._theirs = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
        self._numbers = count()
        self._current = ""
        self._written: list[str] = []

    def written(
        self,
        what: str,
        rows: int,
        partitions: int,
        *,
        is_keyed: bool = False,
        is_kept: bool = False,
        is_limit_measured: bool = False,
        warmups: int = 1,
    ) -> Iterator[dict[str, object]]:
        """Rows a second of each side. After each run its rows are counted."""
        rows = self._count(rows)
        frame = rows_to_write(self._spark, rows, is_keyed)

        def renew() -> None:
            if not is_kept:
                self._delete()
            self._make(partitions)

        def save_ours(delivery: str) -> float:
            options = {**self._ours, "topic": self._current, "delivery": delivery}
            taken = seconds(partial(_save, frame, "kafkalog", options))
            all_there(self._in_ours(partitions), rows, self._current)
            return taken

        def save_theirs(options: Mapping[str, str]) -> float:
            options = {**self._theirs, **options, "topic": self._topics.current}
            taken = seconds(partial(_save, frame, "kafka", options))
            all_there(self._in_theirs(partitions), rows, self._topics.current)
            return taken

        candidates: dict[str, Callable[[], float]] = {
            **{each: partial(save_ours, each) for each in DELIVERIES},
            **{name: partial(save_theirs, options) for name, options in self._connector.items()},
        }
        if is_limit_measured:
            candidates["discarding writer"] = lambda: seconds(partial(_save, frame, "memory_benchmark", {}))
        times = by_turns(candidates, self._scale, warmups=warmups, before=renew)
        self._delete()
        yield from self._figures(what, times, rows, partitions)

    def read(self) -> Iterator[dict[str, object]]:
        rows = self._count(5_000_000)
        self._fill(rows, PARTITIONS)
        memory = self._spark.read.format("memory_benchmark").options(
            rows=rows, bytes=RECORD_BYTES, partitions=PARTITIONS
        )
        for what, columns, warmups in (("read, full schema", None, WARMUPS), ("read, value only", "value", 1)):
            schema = f"{columns} binary" if columns else None
            candidates = {
                "kafkalog": to_noop(self._reader("kafkalog"), schema),
                "in-memory source": to_noop(memory, schema),
                **{
                    name: _connector_to_noop(self._reader("kafka", options), columns)
                    for name, options in ((CONNECTOR_DEFAULTS, {}), (CONNECTOR_TUNED, CONSUMER))
                },
            }
            times = interleaved(candidates, self._scale, warmups=warmups)
            yield from self._figures(what, times, rows, PARTITIONS)
        times = interleaved(
            {
                "kafkalog": lambda: self._reader("kafkalog").load().head(1),
                CONNECTOR_DEFAULTS: lambda: self._reader("kafka").load().head(1),
            },
            self._scale,
        )
        for name, taken in times.items():
            yield figure(f"time to the first row, {name}", "ms", [1000 * each for each in taken], rows=rows)
        self._delete()

        rows = self._count(640_000)
        self._fill(rows, MANY_PARTITIONS)
        candidates = {
            "kafkalog": to_noop(self._reader("kafkalog")),
            f"kafkalog, maxInputPartitions={SPLITS}": to_noop(
                self._reader("kafkalog", {"maxInputPartitions": str(SPLITS)})
            ),
            CONNECTOR_DEFAULTS: to_noop(self._reader("kafka")),
            CONNECTOR_TUNED: to_noop(self._reader("kafka", CONSUMER)),
        }
        times = interleaved(candidates, self._scale, warmups=WARMUPS)
        yield from self._figures(f"read, {MANY_PARTITIONS} partitions", times, rows, MANY_PARTITIONS)
        self._delete()

    def _count(self, rows: int) -> int:
        """A share of so many, the same number for each task and partition."""
        return max(40_000, int(rows * self._scale)) // 10_000 * 10_000

    def _fill(self, rows: int, partitions: int) -> None:
        """The same records in the same partitions on both sides."""
        self._make(partitions)
        spread = rows_to_write(self._spark, rows).selectExpr("value")
        spread = spread.selectExpr("value", f"cast(monotonically_increasing_id() % {partitions} AS int) AS partition")
        _save(spread, "kafkalog", {**self._ours, "topic": self._current})
        _save(spread, "kafka", {**self._theirs, **PRODUCER, "topic": self._topics.current})
        all_there(self._in_ours(partitions), rows, self._current)
        all_there(self._in_theirs(partitions), rows, self._topics.current)

    def _in_ours(self, partitions: int) -> int:
        return records_in(self._admin, self._current, partitions)

    def _in_theirs(self, partitions: int) -> int:
        return end_offsets(self._theirs["kafka.bootstrap.servers"], self._topics.current, partitions)

    def _make(self, partitions: int) -> None:
        self._current = f"written-{next(self._numbers)}"
        fresh_topic(self._admin, self._cluster, self._current, partitions)
        self._written.append(self._current)
        self._topics.make(partitions)

    def _delete(self) -> None:
        """Delete what was written so far."""
        for topic in self._written:
            self._admin.delete_topic(topic)
        self._written.clear()
        self._topics.delete()

    def _reader(self, format_name: str, options: Mapping[str, str] | None = None) -> Any:
        is_ours = format_name == "kafkalog"
        where = self._ours if is_ours else self._theirs
        topic = self._current if is_ours else self._topics.current
        return self._spark.read.format(format_name).options(**where, **(options or {}), subscribe=topic)

    def _figures(
        self, what: str, times: Mapping[str, list[float]], rows: int, partitions: int
    ) -> Iterator[dict[str, object]]:
        facts: dict[str, object] = {"rows": rows, "record_bytes": RECORD_BYTES, "partitions": partitions}
        for name, taken in times.items():
            versions = {"kafka": SERVER_VERSION, "connector": CONNECTOR_VERSION} if name in self._connector else {}
            yield figure(f"{what}, {name}", "rows/s", [rows / each for each in taken], **facts, **versions)


def _save(rows: DataFrame, format_name: str, options: Mapping[str, str]) -> None:
    rows.write.format(format_name).options(**options).mode("append").save()


def _connector_to_noop(reader: Any, columns: str | None) -> Callable[[], None]:
    """The connector takes no schema: its columns are selected from all."""
    if columns is None:
        return to_noop(reader)
    return lambda: reader.load().select(columns).write.format("noop").mode("overwrite").save()
