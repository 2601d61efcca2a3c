"""librdkafka, by `confluent-kafka`: as its documents say that it is fastest, and topics made by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.measure import looked_for

TUNED_PRODUCER: Mapping[str, object] = {
    "acks": 1,
    "batch.num.messages": 10_000,
    "batch.size": 1_000_000,
    "linger.ms": 20,
}
TUNED_CONSUMER: Mapping[str, object] = {
    "max.partition.fetch.bytes": 8 << 20,
    "fetch.max.bytes": 64 << 20,
    "queued.max.messages.kbytes": 1 << 20,
    "queued.min.messages": 1_000_000,
}
"""With room for all that lies ready: by its defaults it fetches nothing for a second whenever 100,000 records do."""


def make_topic(admin: AdminClient, topic: str, partitions: int) -> None:
    for made in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        made.result()


def delete_topic(admin: AdminClient, topic: str) -> None:
    for gone in admin.delete_topics([topic]).values():
        gone.result()


def produce_all(producer: Any, topic: str, values: list[bytes], records: int) -> None:
    """Send so many records by confluent-kafka's producer, of values that come again, waiting for room where there is
    none."""
    produce, poll = producer.produce, producer.poll
    for start in range(0, records, len(values)):
        for value in values[: records - start]:
            while True:
                try:
                    produce(topic, value)
                    break
                except BufferError:
                    poll(0.1)
        poll(0)
    if left := producer.flush():
        raise RuntimeError(f"librdkafka has not sent {left} records")


def end_offset(consumer: Any, place: TopicPartition) -> int:
    """A partition's end. Asked for again while its broker does not know yet that it leads it: a topic of 1,000
    partitions is made before that."""
    found: list[int] = []

    def is_told() -> bool:
        try:
            found.append(consumer.get_watermark_offsets(place, timeout=60.0)[1])
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                raise
        return bool(found)

    looked_for(is_told, 60.0, f"{place.topic}-{place.partition} has no leader")
    return found[0]


def end_offsets(servers: str, topic: str, partitions: int) -> int:
    """How many records a topic has, by their end offsets."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "ends"})
    try:
        return sum(end_offset(consumer, TopicPartition(topic, partition)) for partition in range(partitions))
    finally:
        consumer.close()
