"""confluent-kafka's consumer on a real Apache Kafka broker, beside `Consumer`: `poll` and `consume(10000)` of a group.

Both brokers are on this machine, with the same records in a topic of four partitions. Each reader joins a group of its
own; its first record is not counted, so neither is the join. Each record's value is used. `confluent-kafka` is measured
with its defaults, by which it stops fetching for a second whenever 100,000 records lie ready, and `tuned`, with room
for all of them.

Needs Kafka's jars: without them there are no figures but a sentence that says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from operator import attrgetter, methodcaller
from typing import Any

import confluent_kafka
import pyarrow as pa
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.measure import by_turns, rate, ratio
from bench.peers.kafka import SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer

RECORD_BYTES = 200
PARTITIONS = 4
BATCH = 10_000
TOPIC = "confluent"
TUNED = {
    "max.partition.fetch.bytes": 8 << 20,
    "fetch.max.bytes": 64 << 20,
    "queued.max.messages.kbytes": 1 << 20,
    "queued.min.messages": 1_000_000,
}
Read = Callable[[Any, int, Callable[[Any], bytes]], float]
_groups = count()


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    records = max(40_000, int(1_000_000 * scale)) // BATCH * BATCH
    values = [os.urandom(RECORD_BYTES) for _ in range(BATCH)]
    with (
        KafkaServer(kafka_jars(SERVER, 300.0 if scale >= 0.1 else 45.0), {}) as kafka,
        LocalCluster(brokers=1) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        admin.create_topic(TOPIC, partitions=PARTITIONS)
        rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
        with Producer(cluster.bootstrap_servers, acks=1) as producer:
            for sent in range(0, records, BATCH):
                producer.send_arrow(TOPIC, rows, partition=sent // BATCH % PARTITIONS)
            producer.flush()
        kafka_admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for made in kafka_admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
            made.result()
        _fill(
            confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 20}), values, records
        )

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
                "poll, confluent-kafka tuned": lambda: of_confluent(poll, TUNED),
                f"consume({BATCH}), kafkalog": lambda: ours(consume),
                f"consume({BATCH}), confluent-kafka": lambda: of_confluent(consume, {}),
                f"consume({BATCH}), confluent-kafka tuned": lambda: of_confluent(consume, TUNED),
            },
            scale,
        )
    for name, taken in times.items():
        yield {
            "name": name,
            "value": round(rate(records - 1, taken)),
            "unit": "records/s",
            "ratio": round(ratio(times[name.split(",")[0] + ", kafkalog"], taken), 3),
            "records": records,
            "record_bytes": RECORD_BYTES,
            "seconds": [round(each, 4) for each in taken],
            "kafka": SERVER_VERSION,
            "confluent_kafka": confluent_kafka.__version__,
        }


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
