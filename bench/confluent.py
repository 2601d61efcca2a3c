"""confluent-kafka's clients on a real Apache Kafka broker, beside `Consumer` and `Producer`, on this machine.

- `poll` and `consume(10000)` of a group, from a topic of four partitions. Each reader joins a group of its own; its
  first record is not counted, so neither is the join. Each record's value is used. `confluent-kafka` is measured at its
  defaults, by which it stops fetching for a second whenever 100,000 records lie ready, and `tuned`, with room for all.
- One record after the other, each sent when the one before is acknowledged: how long that takes.
- Records with keys into a topic of a thousand partitions.

Needs Kafka's jars: without them there are no figures but a sentence that says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter, methodcaller
from typing import Any

import confluent_kafka
import pyarrow as pa
from confluent_kafka.admin import AdminClient

from bench.measure import all_there, by_turns, figure, records_in, seconds
from bench.peers.jars import patience_seconds
from bench.peers.kafka import SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.peers.librdkafka import TUNED_CONSUMER, end_offsets, make_topic
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer

RECORD_BYTES = 200
PARTITIONS = 4
BATCH = 10_000
MANY_PARTITIONS = 1000
KEYS = 100_000
PERCENTILES = (50.0, 99.0)
TOPIC = "confluent"
Read = Callable[[Any, int, Callable[[Any], bytes]], float]
_groups = count()


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    records = max(40_000, int(1_000_000 * scale)) // BATCH * BATCH
    values = [os.urandom(RECORD_BYTES) for _ in range(BATCH)]
    with (
        KafkaServer(kafka_jars(SERVER, patience_seconds(scale)), {}) as kafka,
        LocalCluster(durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        admin.create_topic(TOPIC, partitions=PARTITIONS)
        rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
        with Producer(cluster.bootstrap_servers, acks=1) as producer:
            for sent in range(0, records, BATCH):
                producer.send_arrow(TOPIC, rows, partition=sent // BATCH % PARTITIONS)
            producer.flush()
        kafka_admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        make_topic(kafka_admin, TOPIC, PARTITIONS)
        _fill(
            confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 20}), values, records
        )
        all_there(records_in(admin, TOPIC, PARTITIONS), records, "kafkalog's topic")
        all_there(end_offsets(kafka.bootstrap_servers, TOPIC, PARTITIONS), records, "Kafka's topic")

        def ours(read: Read) -> float:
            with Consumer(cluster.bootstrap_servers, group=f"g{next(_groups)}", auto_offset_reset="earliest") as reader:
                reader.subscribe([TOPIC])
                return read(reader, records, attrgetter("value"))

        def of_confluent(read: Read, settings: Mapping[str, object]) -> float:
            group = {"group.id": f"g{next(_groups)}", "auto.offset.reset": "earliest"}
            reader = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap_servers, **group, **settings})
            try:
                reader.subscribe([TOPIC])
                return read(reader, records, methodcaller("value"))
            finally:
                reader.close()

        times = by_turns(
            {
                "poll, kafkalog": lambda: ours(poll),
                "poll, confluent-kafka": lambda: of_confluent(poll, {}),
                "poll, confluent-kafka tuned": lambda: of_confluent(poll, TUNED_CONSUMER),
                f"consume({BATCH}), kafkalog": lambda: ours(consume),
                f"consume({BATCH}), confluent-kafka": lambda: of_confluent(consume, {}),
                f"consume({BATCH}), confluent-kafka tuned": lambda: of_confluent(consume, TUNED_CONSUMER),
            },
            scale,
        )
        for name, taken in times.items():
            yield figure(name, "records/s", [(records - 1) / each for each in taken], records=records, **_FACTS)
        yield from _one_by_one(cluster, kafka, scale)
        yield from _keyed(cluster, admin, kafka, kafka_admin, scale)


_FACTS: dict[str, object] = {
    "record_bytes": RECORD_BYTES,
    "kafka": SERVER_VERSION,
    "confluent_kafka": confluent_kafka.__version__,
}


def _one_by_one(cluster: LocalCluster, kafka: KafkaServer, scale: float) -> Iterator[dict[str, object]]:
    """Milliseconds from a send to its ack, with nothing else under way. Neither side lingers."""
    count = max(100, int(3000 * scale))
    value = os.urandom(RECORD_BYTES)

    def ours(settings: Mapping[str, Any]) -> list[float]:
        with Producer(cluster.bootstrap_servers, linger_ms=0, **settings) as producer:
            return _percentiles(lambda: producer.send(TOPIC, value, partition=0).result(), count)

    def of_confluent(settings: Mapping[str, Any]) -> list[float]:
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0, **settings})

        def send() -> None:
            producer.produce(TOPIC, value, partition=0)
            producer.flush()

        return _percentiles(send, count)

    taken = by_turns(
        {
            "kafkalog": lambda: ours({}),
            "kafkalog, acks=1": lambda: ours({"acks": 1}),
            "confluent-kafka": lambda: of_confluent({}),
            "confluent-kafka, acks=1": lambda: of_confluent({"acks": 1}),
        },
        scale,
    )
    for name, rounds in taken.items():
        for number, percentile in enumerate(PERCENTILES):
            each = [1000 * of_round[number] for of_round in rounds]
            yield figure(f"one by one, p{percentile:g}, {name}", "ms", each, records=count, **_FACTS)


def _percentiles(send: Callable[[], object], count: int) -> list[float]:
    send()
    taken = sorted(seconds(send) for _ in range(count))
    return [taken[int(len(taken) * each / 100)] for each in PERCENTILES]


def _keyed(
    cluster: LocalCluster, admin: Admin, kafka: KafkaServer, kafka_admin: AdminClient, scale: float
) -> Iterator[dict[str, object]]:
    """Rows a second by key into many partitions; both sides' defaults but for acks=1, and linger of `tuned`."""
    topic, partitions = f"{TOPIC}-keyed", MANY_PARTITIONS if scale >= 0.1 else 50
    in_tables = max(100_000, int(2_000_000 * scale)) // KEYS * KEYS
    one_by_one = max(10_000, int(300_000 * scale)) // BATCH * BATCH
    admin.create_topic(topic, partitions=partitions)
    make_topic(kafka_admin, topic, partitions)
    sent = {"kafkalog": 0, "kafka": 0}
    values = [os.urandom(RECORD_BYTES) for _ in range(BATCH)]
    keys = [[str(number * 7919 % KEYS).encode() for number in range(at, at + BATCH)] for at in range(0, KEYS, BATCH)]
    small = [pa.record_batch([pa.array(some, pa.binary()), pa.array(values)], names=["key", "value"]) for some in keys]
    large = [pa.Table.from_batches(small).combine_chunks().to_batches()[0]]

    def arrow(tables: Sequence[pa.RecordBatch]) -> float:
        with Producer(cluster.bootstrap_servers, acks=1) as producer:

            def send() -> None:
                for number in range(in_tables // tables[0].num_rows):
                    producer.send_arrow(topic, tables[number % len(tables)])
                producer.flush()

            sent["kafkalog"] += in_tables
            return seconds(send)

    def ours() -> float:
        with Producer(cluster.bootstrap_servers, acks=1) as producer:

            def send() -> None:
                for number in range(one_by_one // BATCH):
                    for key, value in zip(keys[number % len(keys)], values, strict=True):
                        producer.send(topic, value, key)
                producer.flush()

            sent["kafkalog"] += one_by_one
            return seconds(send)

    def of_confluent(settings: Mapping[str, Any]) -> float:
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": 1, **settings})

        def send() -> None:
            for number in range(one_by_one // BATCH):
                for key, value in zip(keys[number % len(keys)], values, strict=True):
                    producer.produce(topic, value, key)
                producer.poll(0)
            producer.flush()

        sent["kafka"] += one_by_one
        return seconds(send)

    room = {"queue.buffering.max.messages": one_by_one + 1}
    taken = by_turns(
        {
            f"send_arrow, tables of {KEYS:,}": lambda: arrow(large),
            f"send_arrow, tables of {BATCH:,}": lambda: arrow(small),
            "send": ours,
            "confluent-kafka": lambda: of_confluent(room),
            "confluent-kafka tuned": lambda: of_confluent({**room, "linger.ms": 100, "batch.size": 1_000_000}),
        },
        scale,
    )
    all_there(records_in(admin, topic, partitions), sent["kafkalog"], "kafkalog's topic by key")
    all_there(end_offsets(kafka.bootstrap_servers, topic, partitions), sent["kafka"], "Kafka's topic by key")
    for name, times in taken.items():
        records = in_tables if name.startswith("send_arrow") else one_by_one
        each = [records / each for each in times]
        yield figure(f"by key, {name}", "records/s", each, records=records, partitions=partitions, **_FACTS)


def _fill(producer: Any, values: list[bytes], records: int) -> None:
    for sent in range(0, records, BATCH):
        for value in values:
            producer.produce(TOPIC, value, partition=sent // BATCH % PARTITIONS)
        producer.flush()


def poll(reader: Any, records: int, value: Callable[[Any], bytes]) -> float:
    """Seconds for all records but the first."""
    _first(reader)
    begun, left, size = time.perf_counter(), records - 1, 0
    while left:
        if (message := reader.poll(1.0)) is not None:
            size += len(value(message))
            left -= 1
    return time.perf_counter() - begun


def consume(reader: Any, records: int, value: Callable[[Any], bytes]) -> float:
    """As `poll`."""
    _first(reader)
    begun, left, size = time.perf_counter(), records - 1, 0
    while left:
        messages = reader.consume(min(left, BATCH), 1.0)
        size += sum(map(len, map(value, messages)))
        left -= len(messages)
    return time.perf_counter() - begun


def _first(reader: Any) -> None:
    while reader.poll(1.0) is None:
        pass
