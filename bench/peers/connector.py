"""Spark's Kafka connector: as it is tuned here, and the topics that it writes to."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from bench.measure import looked_for

_REGISTERED_WITHIN_SECONDS = 60.0
_SERVED_WITHIN_SECONDS = 60.0
CONNECTOR_TUNED = "connector tuned"
CONNECTOR_DEFAULTS = "connector defaults"
PRODUCER = {
    "kafka.acks": "1",
    "kafka.linger.ms": "5",
    "kafka.batch.size": "1000000",
    "kafka.max.request.size": "1048576",
    "kafka.buffer.memory": str(256 << 20),
    "kafka.compression.type": "none",
}
CONSUMER = {
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.fetch.max.bytes": str(8 << 20),
    "kafka.max.poll.records": "10000",
}
BROKER = {"num.partitions": 4, "log.segment.delete.delay.ms": 1000}
"""What the runs before have written does not stay on the disk for a minute."""


class KafkaTopics:
    """Topics on the Kafka broker, made and deleted by the client inside Spark's Java.

    Each has a name of its own: the producers that Spark keeps would go on writing to a name's deleted topic.

    Attributes:
        current: the last one made.
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
        self._kept: list[str] = []
        self.current = ""

    def make(self, partitions: int) -> None:
        """With the brokers' default replication factor. Returns once its leaders serve it: connectors whose first
        requests come before that fail with OutOfOrderSequenceException if there are many partitions."""
        self._made += 1
        self.current = f"written-{self._made}"
        some, empty = self._java.java.util.Optional.of(partitions), self._java.java.util.Optional.empty()
        topic = self._java.org.apache.kafka.clients.admin.NewTopic(self.current, some, empty)
        self._admin.createTopics(self._java.java.util.Collections.singleton(topic)).all().get()
        self._kept.append(self.current)
        kafka = self._java.org.apache.kafka
        wanted = self._java.java.util.HashMap()
        for partition in range(partitions):
            wanted.put(kafka.common.TopicPartition(self.current, partition), kafka.clients.admin.OffsetSpec.latest())

        def is_served() -> bool:
            try:
                self._admin.listOffsets(wanted).all().get()
            except Py4JJavaError:
                return False
            return True

        looked_for(is_served, _SERVED_WITHIN_SECONDS, f"Kafka's topic {self.current} has no leaders")

    def delete(self) -> None:
        """Delete all of them."""
        for topic in self._kept:
            self._admin.deleteTopics(self._java.java.util.Collections.singleton(topic)).all().get()
        self._kept.clear()
