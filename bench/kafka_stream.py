"""Spark streams from topic to topic, beside the same by Spark's Kafka connector on a real Apache Kafka broker.

Latency: a producer sends 500 records of 200 bytes a second by a schedule, Spark copies them to another topic with the
default trigger, and a consumer reads them there. A record's latency is from when it was to be sent until the consumer
has it, so that a producer that is held up makes it longer. Producer and consumer are the system's own Python client
(for Kafka `confluent-kafka`) at their defaults.

Throughput: a stream copies what lies ready, a given number of records in each micro-batch.

kafkalog writes exactly once, or at least once, which is what the connector does; by the format's sink and by
`write_stream`. "Tuned", its source packs small partitions (`minRecordsPerPartition`).
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import confluent_kafka
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench.measure import all_there, by_turns, figure, records_in, seconds
from bench.peers.connector import BROKER, CONNECTOR_DEFAULTS, CONNECTOR_TUNED, CONSUMER, PRODUCER, KafkaTopics
from bench.peers.jars import patience_seconds
from bench.peers.kafka import CONNECTOR, CONNECTOR_VERSION, SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.peers.librdkafka import end_offsets
from bench.spark_session import spark_session
from bench.spark_write import DELIVERIES
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from pyspark_kafkalog import write_stream

RECORD_BYTES = 200
PARTITIONS = 2
RECORDS_A_SECOND = 500
TUNED_READING = {"minRecordsPerPartition": "1000"}
PERCENTILES = (50.0, 99.0, 99.9)
_WARMUP_SECONDS = 5.0
_MEASURED_SECONDS = 12.0
_ARRIVED_WITHIN_SECONDS = 120.0
_OF_KAFKA = (CONNECTOR_DEFAULTS, CONNECTOR_TUNED)
_NUMBER = struct.Struct("<q")

Send = Callable[[bytes], object]
Arrived = Callable[[], Sequence[bytes]]
"""The values of what has arrived since the last call; it waits a moment for some."""


class Side(ABC):
    """One of those compared: its topics, its clients and what Spark calls it.

    Attributes:
        format_name: of its source and its sink.
        where: the brokers, as an option of source and sink.
        sinks: options of the sink by name.
        reading: options of the source.
        is_for_latency: whether these options are of no use where much lies ready.
    """

    format_name: str
    where: Mapping[str, str]
    sinks: Mapping[str, Mapping[str, str]]
    reading: Mapping[str, str] = {}
    is_for_latency = False

    def __init__(self) -> None:
        self._numbers = count()

    def start(self, rows: DataFrame, options: Mapping[str, str], topic: str, checkpoint: str) -> StreamingQuery:
        """A query that writes rows to a topic, with options of one of the sinks."""
        writer = rows.writeStream.format(self.format_name).options(**self.where, **options)
        return writer.option("topic", topic).option("checkpointLocation", checkpoint).start()

    @abstractmethod
    def make(self) -> str:
        """A new topic's name."""

    @abstractmethod
    def count(self, topic: str) -> int:
        """How many records it has."""

    @abstractmethod
    def fill(self, topic: str, values: list[bytes]) -> None:
        """Send some at once."""

    @abstractmethod
    def sending(self, topic: str) -> Any:
        """A context manager of a `Send`."""

    @abstractmethod
    def arriving(self, topic: str) -> Any:
        """A context manager of an `Arrived`."""


class OfKafkalog(Side):
    format_name = "kafkalog"
    sinks: Mapping[str, Mapping[str, str]] = {each: {"delivery": each} for each in DELIVERIES}

    def __init__(self, cluster: LocalCluster, admin: Admin) -> None:
        super().__init__()
        self._servers, self._admin = cluster.bootstrap_servers, admin
        self.where = {"kafkalog.bootstrap.servers": self._servers}

    def make(self) -> str:
        topic = f"{type(self).__name__}-{next(self._numbers)}"
        self._admin.create_topic(topic, partitions=PARTITIONS)
        return topic

    def count(self, topic: str) -> int:
        return records_in(self._admin, topic, PARTITIONS)

    def fill(self, topic: str, values: list[bytes]) -> None:
        with Producer(self._servers) as producer:
            producer.send_many(topic, values)

    @contextmanager
    def sending(self, topic: str) -> Iterator[Send]:
        with Producer(self._servers) as producer:
            yield partial(producer.send, topic)

    @contextmanager
    def arriving(self, topic: str) -> Iterator[Arrived]:
        with Consumer(self._servers) as consumer:
            consumer.assign({TopicPartition(topic, partition): "earliest" for partition in range(PARTITIONS)})
            yield lambda: [message.value or b"" for message in _arrived(consumer)]


class OfWriteStream(OfKafkalog):
    """As the format, but written by `write_stream`."""

    sinks: Mapping[str, Mapping[str, str]] = {f"{each}, write_stream": {"delivery": each} for each in DELIVERIES}

    def start(self, rows: DataFrame, options: Mapping[str, str], topic: str, checkpoint: str) -> StreamingQuery:
        given: dict[str, Any] = {**self.where, **options}
        return write_stream(rows, topic=topic, checkpoint_location=checkpoint, **given)


class OfTunedFormat(OfKafkalog):
    """As the format, with few splits where there are few records."""

    sinks: Mapping[str, Mapping[str, str]] = {f"{each}, tuned": {"delivery": each} for each in DELIVERIES}
    reading = TUNED_READING
    is_for_latency = True


class OfTunedWriteStream(OfWriteStream):
    """As `write_stream`, with few splits where there are few records."""

    sinks: Mapping[str, Mapping[str, str]] = {f"{each}, write_stream tuned": {"delivery": each} for each in DELIVERIES}
    reading = TUNED_READING
    is_for_latency = True


class OfKafka(Side):
    format_name = "kafka"
    sinks: Mapping[str, Mapping[str, str]] = {CONNECTOR_DEFAULTS: {}}

    def __init__(self, kafka: KafkaServer, topics: KafkaTopics) -> None:
        super().__init__()
        self._servers, self._topics = kafka.bootstrap_servers, topics
        self.where = {"kafka.bootstrap.servers": self._servers}

    def make(self) -> str:
        self._topics.make(PARTITIONS)
        return self._topics.current

    def count(self, topic: str) -> int:
        return end_offsets(self._servers, topic, PARTITIONS)

    def fill(self, topic: str, values: list[bytes]) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": self._servers})
        for value in values:
            producer.produce(topic, value)
        producer.flush()

    @contextmanager
    def sending(self, topic: str) -> Iterator[Send]:
        producer = confluent_kafka.Producer({"bootstrap.servers": self._servers})

        def send(value: bytes) -> None:
            producer.produce(topic, value)
            producer.poll(0)

        yield send
        producer.flush()

    @contextmanager
    def arriving(self, topic: str) -> Iterator[Arrived]:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self._servers, "group.id": topic})
        consumer.assign([confluent_kafka.TopicPartition(topic, each, 0) for each in range(PARTITIONS)])
        try:
            yield lambda: [message.value() or b"" for message in _arrived(consumer)]
        finally:
            consumer.close()


class OfTunedKafka(OfKafka):
    """With larger batches, fetches and buffers, on both sides of the stream."""

    sinks: Mapping[str, Mapping[str, str]] = {CONNECTOR_TUNED: {**PRODUCER, "kafka.linger.ms": "0"}}
    reading = CONSUMER


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    patience = patience_seconds(scale)
    server_jars, connector_jars = kafka_jars(SERVER, patience), kafka_jars(CONNECTOR, patience)
    with (
        KafkaServer(server_jars, BROKER) as kafka,
        LocalCluster(durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
        spark_session({"spark.jars": ",".join(connector_jars)}) as spark,
    ):
        kinds = OfKafkalog, OfWriteStream, OfTunedFormat, OfTunedWriteStream
        ours = [kind(cluster, admin) for kind in kinds]
        topics = KafkaTopics(spark, kafka.bootstrap_servers)
        sides = (*ours, OfKafka(kafka, topics), OfTunedKafka(kafka, topics))
        streams = {name: (side, options) for side in sides for name, options in side.sinks.items()}
        yield from _latencies(spark, streams, scale)
        large = {name: each for name, each in streams.items() if not each[0].is_for_latency}
        yield from _throughputs(spark, large, scale)


def _latencies(
    spark: SparkSession, streams: Mapping[str, tuple[Side, Mapping[str, str]]], scale: float
) -> Iterator[dict[str, object]]:
    warmup, measured = (_WARMUP_SECONDS, _MEASURED_SECONDS) if scale >= 0.1 else (1.0, 2.0)
    taken = by_turns(
        {name: partial(_latency, spark, side, options, warmup, measured) for name, (side, options) in streams.items()},
        scale,
    )
    for name, rounds in taken.items():
        for number, percentile in enumerate(PERCENTILES):
            yield figure(
                f"stream to stream at {RECORDS_A_SECOND} records/s, p{percentile:g}, {name}",
                "ms",
                [1000 * each[number] for each in rounds],
                seconds=measured,
                record_bytes=RECORD_BYTES,
                **_versions(name),
            )


def _latency(
    spark: SparkSession, side: Side, options: Mapping[str, str], warmup: float, measured: float
) -> list[float]:
    """Percentiles of the latency, in seconds."""
    source, target = side.make(), side.make()
    sent_first, sent = int(warmup * RECORDS_A_SECOND), int((warmup + measured) * RECORDS_A_SECOND)
    arrived: dict[int, float] = {}
    with (
        _stream(spark, side, options, source, target),
        side.arriving(target) as arriving,
        side.sending(source) as send,
    ):
        send(_value(-1))
        _take(arriving, arrived, 1, _ARRIVED_WITHIN_SECONDS)  # the query runs, and clients know their topics
        start = time.perf_counter()
        sender = threading.Thread(target=_send_by_schedule, args=(send, start, sent))
        sender.start()
        try:
            _take(arriving, arrived, 1 + sent, warmup + measured + _ARRIVED_WITHIN_SECONDS)
        finally:
            sender.join()
    latencies = sorted(arrived[each] - start - each / RECORDS_A_SECOND for each in range(sent_first, sent))
    return [latencies[min(len(latencies) - 1, int(len(latencies) * each / 100))] for each in PERCENTILES]


def _arrived(consumer: Any) -> list[Any]:
    """The messages that a consumer has, once it has one. `consume` alone would wait for as many as it may return."""
    first = consumer.poll(0.1)
    return [] if first is None else [first, *consumer.consume(1000, 0)]


def _value(number: int) -> bytes:
    return _NUMBER.pack(number) + bytes(RECORD_BYTES - _NUMBER.size)


def _take(arriving: Arrived, arrived: dict[int, float], records: int, within_seconds: float) -> None:
    """Note when each record arrives, until so many have."""
    deadline = time.perf_counter() + within_seconds
    while len(arrived) < records:
        for value in arriving():
            number = _NUMBER.unpack_from(value)[0]
            if number in arrived:
                raise RuntimeError(f"record {number} has arrived twice")
            arrived[number] = time.perf_counter()
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{records - len(arrived)} of {records} records have not arrived")


def _send_by_schedule(send: Send, start: float, records: int) -> None:
    for number in range(records):
        # The schedule is what is measured against: records are due by the clock, whatever happened to those before.
        time.sleep(max(0.0, start + number / RECORDS_A_SECOND - time.perf_counter()))
        send(_value(number))


@contextmanager
def _stream(
    spark: SparkSession, side: Side, options: Mapping[str, str], source: str, target: str, **reading: str
) -> Iterator[Any]:
    """A query that copies one topic to another, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as checkpoint:
        given = {**side.where, **side.reading, **reading, "subscribe": source}
        reader = spark.readStream.format(side.format_name).options(**given)
        rows = reader.option("startingOffsets", "earliest").load().select("value")
        query = side.start(rows, options, target, checkpoint)
        try:
            yield query
        finally:
            query.stop()


def _throughputs(
    spark: SparkSession, streams: Mapping[str, tuple[Side, Mapping[str, str]]], scale: float
) -> Iterator[dict[str, object]]:
    records = max(20_000, int(2_000_000 * scale))
    a_batch = records // 10
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    sources = {side: side.make() for side in {id(side): side for side, _ in streams.values()}.values()}
    for side, topic in sources.items():
        for start in range(0, records, len(values)):
            side.fill(topic, values[: records - start])
        all_there(side.count(topic), records, topic)

    def copy(side: Side, options: Mapping[str, str]) -> float:
        target = side.make()
        with _stream(spark, side, options, sources[side], target, maxOffsetsPerTrigger=str(a_batch)) as query:
            taken = seconds(query.processAllAvailable)
        all_there(side.count(target), records, target)
        return taken

    taken = by_turns({name: partial(copy, side, options) for name, (side, options) in streams.items()}, scale)
    for name, times in taken.items():
        yield figure(
            f"stream to stream of a backlog, {name}",
            "records/s",
            [records / each for each in times],
            records=records,
            records_a_micro_batch=a_batch,
            record_bytes=RECORD_BYTES,
            **_versions(name),
        )


def _versions(name: str) -> Mapping[str, str]:
    return {"kafka": SERVER_VERSION, "connector": CONNECTOR_VERSION} if name in _OF_KAFKA else {}
