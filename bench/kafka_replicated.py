"""Apache Kafka beside kafkalog, both with three brokers on this machine, each partition on all of them,
min.insync.replicas=2 and acks=all: what Spark writes, and what a producer sends in batches of 50.

Everything else is as in `kafka`. The producer's peer is librdkafka, by `confluent-kafka`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import confluent_kafka

from bench.kafka import PARTITIONS, RECORD_BYTES, Sides
from bench.measure import figure, fresh_topic, interleaved
from bench.peers.connector import BROKER, CONNECTOR_TUNED, PRODUCER, KafkaTopics
from bench.peers.jars import patience_seconds
from bench.peers.kafka import CONNECTOR, SERVER, KafkaServer, kafka_jars
from bench.spark_session import WARMUPS, spark_session
from broker.local import LocalCluster
from kafkalog import Admin, Producer

BROKERS = 3
REPLICATED = {"default.replication.factor": BROKERS, "min.insync.replicas": 2}
BATCH_RECORDS = 50


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    patience = patience_seconds(scale)
    server_jars, connector_jars = kafka_jars(SERVER, patience), kafka_jars(CONNECTOR, patience)
    with (
        KafkaServer(server_jars, {**BROKER, **REPLICATED}, BROKERS) as kafka,
        LocalCluster(BROKERS, durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
        spark_session({"spark.jars": ",".join(connector_jars)}) as spark,
    ):
        topics = KafkaTopics(spark, kafka.bootstrap_servers, BROKERS)
        connector = {CONNECTOR_TUNED: {**PRODUCER, "kafka.acks": "all"}}
        sides = Sides(spark, kafka, topics, cluster, admin, connector, scale)
        yield from sides.written("write, deleted", 5_000_000, PARTITIONS, warmups=WARMUPS)
        yield from sent(kafka, topics, cluster, admin, scale)


def sent(
    kafka: KafkaServer, topics: KafkaTopics, cluster: LocalCluster, admin: Admin, scale: float
) -> Iterator[dict[str, object]]:
    """Records a second of `send` beside librdkafka's `produce`, in batches of 50."""
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    count = max(1000, int(500_000 * scale))

    def ours() -> None:
        with Producer(cluster.bootstrap_servers, acks="all", batch_records=BATCH_RECORDS) as producer:
            for start in range(0, count, len(values)):
                for value in values[: count - start]:
                    producer.send("sent", value)
            producer.flush()

    def of_librdkafka() -> None:
        settings = {"acks": "all", "batch.num.messages": BATCH_RECORDS, "queue.buffering.max.messages": 1_000_000}
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True, **settings}
        )
        for start in range(0, count, len(values)):
            for value in values[: count - start]:
                producer.produce(topics.current, value)
            producer.poll(0)
        producer.flush()

    def renew() -> None:
        fresh_topic(admin, cluster, "sent", PARTITIONS)
        topics.delete()
        topics.make(PARTITIONS)

    times = interleaved({"kafkalog": ours, "confluent-kafka": of_librdkafka}, scale, before=renew)
    topics.delete()
    for name, taken in times.items():
        rates = [count / each for each in taken]
        yield figure(
            f"send, batches of {BATCH_RECORDS}, {name}", "records/s", rates, records=count, record_bytes=RECORD_BYTES
        )
