"""Consumer: records a second as messages and as Arrow, beside making the message objects alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from bench.measure import interleaved, throughput
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition

RECORD_BYTES = 200
PARTITIONS = 4


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    count = max(40_000, int(5_000_000 * scale))
    messages = min(count, max(10_000, int(1_000_000 * scale)))
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
    with LocalCluster(brokers=1) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic("consumer", partitions=PARTITIONS)
        with Producer(cluster.bootstrap_servers, acks=1) as producer:
            for sent in range(0, count, len(values)):
                producer.send_arrow("consumer", rows, partition=sent // len(values) % PARTITIONS)
            producer.flush()
        everything = {TopicPartition("consumer", p): "earliest" for p in range(PARTITIONS)}

        def read_messages() -> None:
            with Consumer(cluster.bootstrap_servers) as consumer:
                consumer.assign(everything)
                seen = sum(1 for _ in consumer.messages(max_messages=messages))
                assert seen == messages, seen

        def read_arrow() -> None:
            with Consumer(cluster.bootstrap_servers) as consumer:
                consumer.assign(everything)
                seen = 0
                for batch in consumer.arrow_batches():
                    seen += batch.num_rows
                    if seen >= count:
                        break
                assert seen == count, seen

        def make_messages() -> None:
            for start in range(0, messages, len(values)):
                for offset, value in enumerate(values, start):
                    Message("consumer", 0, offset, 0, None, value)

        times = interleaved({"messages": read_messages, "arrow": read_arrow, "objects alone": make_messages}, scale)
        counts = {"messages": messages, "arrow": count, "objects alone": messages}
        yield from throughput(times, counts, RECORD_BYTES, [broker.pid for broker in cluster.brokers if broker.pid])
