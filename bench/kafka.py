"""Spark's own Kafka connector into and out of a real Apache Kafka broker, beside kafkalog: the same rows, by turns.

Both sides have one broker on this machine, topics of four partitions, no compression, and leave the disk to the
operating system. Both producers wait for the leader's ack (acks=1), linger 5 ms, put 1 MB into a request and have
64 MiB of room; Kafka's batches may fill a request: its own 16 KB were made for records that come one by one. Both
consumers take up to 4 MiB of a partition and 8 MiB at once; Kafka's hands out 10,000 records at a time instead of 500.
Everything else of either is at its default; that of kafkalog's clients all is.

Needs Kafka's jars: without them there are no figures but a sentence that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.measure import fresh_topic, interleaved, looked_for, rate, ratio
from bench.peers.kafka import CONNECTOR, CONNECTOR_VERSION, SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.spark_read import to_noop
from bench.spark_session import RUNS, WARMUPS, spark_session
from bench.spark_write import DELIVERIES
from broker.local import LocalCluster
from kafkalog import Admin

RECORD_BYTES = 200
PARTITIONS = 4
_REGISTERED_WITHIN_SECONDS = 60.0
PRODUCER = {
    "kafka.acks": "1",
    "kafka.linger.ms": "5",
    "kafka.batch.size": "1000000",
    "kafka.max.request.size": "1048576",
    "kafka.buffer.memory": str(64 << 20),
    "kafka.compression.type": "none",
}
CONSUMER = {
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.fetch.max.bytes": str(8 << 20),
    "kafka.max.poll.records": "10000",
}
BROKER = {"num.partitions": PARTITIONS, "log.segment.delete.delay.ms": 1000}
"""What the runs before have written does not stay on the disk for a minute."""


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    patience = patience_seconds(scale)
    server_jars, connector_jars = kafka_jars(SERVER, patience), kafka_jars(CONNECTOR, patience)
    with (
        KafkaServer(server_jars, BROKER) as kafka,
        LocalCluster() as cluster,
        Admin(cluster.bootstrap_servers) as admin,
        spark_session({"spark.jars": ",".join(connector_jars)}) as spark,
    ):
        topics = KafkaTopics(spark, kafka.bootstrap_servers)
        yield from written(spark, kafka, topics, cluster, admin, PRODUCER, scale)
        yield from read(spark, kafka, topics, cluster, admin, scale)


def patience_seconds(scale: float) -> float:
    """How long to wait for jars. A small run is a test's."""
    return 300.0 if scale >= 0.1 else 45.0


def row_count(scale: float) -> int:
    return max(40_000, int(5_000_000 * scale))


def rows_to_write(spark: SparkSession, scale: float) -> DataFrame:
    ids = spark.range(0, row_count(scale), 1, PARTITIONS)
    return ids.selectExpr(f"cast(repeat('x', {RECORD_BYTES}) AS binary) AS value")


def written(
    spark: SparkSession,
    kafka: KafkaServer,
    topics: KafkaTopics,
    cluster: LocalCluster,
    admin: Admin,
    settings: Mapping[str, str],
    scale: float,
) -> Iterator[dict[str, object]]:
    """What Spark writes a second, exactly once and at least once.

    Args:
        settings: the options of the connector.
    """
    into_topic = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": "written"}
    theirs = {"kafka.bootstrap.servers": kafka.bootstrap_servers, **settings}

    def renew() -> None:
        fresh_topic(admin, cluster, "written", PARTITIONS)
        topics.renew()

    rows = rows_to_write(spark, scale)
    times = interleaved(
        {
            **{each: partial(_save, rows, "kafkalog", {**into_topic, "delivery": each}) for each in DELIVERIES},
            "connector": lambda: _save(rows, "kafka", {**theirs, "topic": topics.current}),
        },
        scale,
        runs=RUNS,
        warmups=WARMUPS,
        before=renew,
    )
    yield {**_figure("write", "exactly-once", times, row_count(scale), settings), "target_ratio": 2.0}
    yield _figure("write", "at-least-once", times, row_count(scale), settings)


def read(
    spark: SparkSession, kafka: KafkaServer, topics: KafkaTopics, cluster: LocalCluster, admin: Admin, scale: float
) -> Iterator[dict[str, object]]:
    """What Spark reads a second."""
    ours = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
    theirs = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
    fresh_topic(admin, cluster, "written", PARTITIONS)
    topics.renew()
    spread = rows_to_write(spark, scale).selectExpr("value", "spark_partition_id() AS partition")  # alike on both sides
    _save(spread, "kafkalog", {**ours, "topic": "written"})
    _save(spread, "kafka", {**theirs, **PRODUCER, "topic": topics.current})
    times = interleaved(
        {
            "kafkalog": _load(spark, "kafkalog", {**ours, "subscribe": "written"}),
            "connector": _load(spark, "kafka", {**theirs, **CONSUMER, "subscribe": topics.current}),
        },
        scale,
        runs=RUNS,
        warmups=WARMUPS,
    )
    yield _figure("read", "kafkalog", times, row_count(scale), CONSUMER)


class KafkaTopics:
    """One topic after the other on the Kafka broker, made and deleted by the client inside Spark's Java.

    Each has a name of its own: the producers that Spark keeps would go on writing to a name's deleted topic.
    """

    def __init__(self, spark: SparkSession, bootstrap_servers: str, nodes: int = 1) -> None:
        self._java: Any = spark.sparkContext._jvm
        assert self._java is not None
        properties = self._java.java.util.Properties()
        properties.setProperty("bootstrap.servers", bootstrap_servers)
        self._admin = self._java.org.apache.kafka.clients.admin.AdminClient.create(properties)
        looked_for(  # a broker serves before it is registered
            lambda: self._admin.describeCluster().nodes().get().size() >= nodes,
            _REGISTERED_WITHIN_SECONDS,
            "Kafka's brokers are not registered",
        )
        self._made = 0
        self.current = ""

    def renew(self) -> None:
        """Delete the current one and make another, with the broker's defaults."""
        one = self._java.java.util.Collections.singleton
        if self.current:
            self._admin.deleteTopics(one(self.current)).all().get()
        self._made += 1
        self.current = f"written-{self._made}"
        default = self._java.java.util.Optional.empty()
        topic = self._java.org.apache.kafka.clients.admin.NewTopic(self.current, default, default)
        self._admin.createTopics(one(topic)).all().get()


def _save(rows: DataFrame, format_name: str, options: Mapping[str, str]) -> None:
    rows.write.format(format_name).options(**options).mode("append").save()


def _load(spark: SparkSession, format_name: str, options: Mapping[str, str]) -> Callable[[], None]:
    return to_noop(spark.read.format(format_name).options(**options))


def _figure(
    what: str, ours: str, times: dict[str, list[float]], count: int, settings: Mapping[str, str]
) -> dict[str, object]:
    return {
        "name": f"Spark batch {what}, {ours}, beside the Kafka connector",
        "value": round(rate(count, times[ours])),
        "unit": "rows/s",
        "kafka_connector": round(rate(count, times["connector"])),
        "ratio": round(ratio(times[ours], times["connector"]), 3),
        "rows": count,
        "record_bytes": RECORD_BYTES,
        "kafka": SERVER_VERSION,
        "connector": CONNECTOR_VERSION,
        "connector_settings": settings,
    }
