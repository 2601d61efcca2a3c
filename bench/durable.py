"""Every ack after a sync: kafkalog with `flush.messages=1` beside Kafka with `log.flush.interval.messages=1`.

One broker of each, on this machine and its disk. The peer's client is `confluent-kafka`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient

from bench.measure import by_turns, figure, seconds
from bench.peers.jars import patience_seconds
from bench.peers.kafka import SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.peers.librdkafka import make_topic, produce_all
from broker.local import LocalCluster
from kafkalog import Admin, Producer

RECORD_BYTES = 200
PARTITIONS = 4
TOPIC = "durable"
BATCH = 50


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    values = [os.urandom(RECORD_BYTES) for _ in range(1000)]
    counts = {
        f"batches of {BATCH}": int(100_000 * scale),
        "defaults": int(500_000 * scale),
        "one by one": int(1000 * scale),
    }
    counts = {name: max(50, records) for name, records in counts.items()}
    with (
        KafkaServer(kafka_jars(SERVER, patience_seconds(scale)), {"log.flush.interval.messages": 1}) as kafka,
        LocalCluster(durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        admin.create_topic(TOPIC, partitions=PARTITIONS, config={"flush.messages": 1})
        make_topic(AdminClient({"bootstrap.servers": kafka.bootstrap_servers}), TOPIC, PARTITIONS)

        def ours(records: int, is_each_awaited: bool, settings: Mapping[str, Any]) -> float:
            with Producer(cluster.bootstrap_servers, acks=1, **settings) as producer:

                def send() -> None:
                    for number in range(records):
                        delivery = producer.send(TOPIC, values[number % len(values)])
                        if is_each_awaited:
                            delivery.result()
                    producer.flush()

                return seconds(send)

        def theirs(records: int, is_each_awaited: bool, settings: Mapping[str, Any]) -> float:
            producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": 1, **settings})

            def send() -> None:
                if not is_each_awaited:
                    produce_all(producer, TOPIC, values, records)
                    return
                for number in range(records):
                    producer.produce(TOPIC, values[number % len(values)])
                    producer.flush()

            return seconds(send)

        candidates = {}
        for name, records in counts.items():
            of_ours: dict[str, Any] = {"linger_ms": 0} if name == "one by one" else {}
            of_theirs: dict[str, Any] = {"linger.ms": 0} if name == "one by one" else {}
            if name.startswith("batches"):
                of_ours, of_theirs = {"batch_records": BATCH}, {"batch.num.messages": BATCH}
            candidates[f"{name}, kafkalog"] = partial(ours, records, name == "one by one", of_ours)
            candidates[f"{name}, confluent-kafka"] = partial(theirs, records, name == "one by one", of_theirs)
        taken = by_turns(candidates, scale)
    for name, times in taken.items():
        records = counts[name.rpartition(", ")[0]]
        rates = [records / each for each in times]
        yield figure(name, "records/s", rates, records=records, record_bytes=RECORD_BYTES, kafka=SERVER_VERSION)
