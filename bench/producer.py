"""Producer: records a second through `send` at batches of 50 and of 1, through `send_many` in lists of 50, and rows a
second through `send_arrow`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import time_ns

import pyarrow as pa

from bench.measure import fresh_topic, interleaved, throughput
from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.client.producer.delivery import Delivery

TOPIC = "producer"
RECORD_BYTES = 200
PARTITIONS = 4


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
    at_fifty, at_one, as_arrow = (max(1000, int(n * scale)) for n in (1_000_000, 100_000, 5_000_000))
    counts = {
        "send, batches of 50": at_fifty,
        "send_many, batches of 50": at_fifty,
        "send, batches of 1": at_one,
        "send_arrow": as_arrow,
    }
    fifties = [values[start : start + 50] for start in range(0, len(values), 50)]
    with LocalCluster(brokers=1) as cluster, Admin(cluster.bootstrap_servers) as admin:

        def send(batch_records: int) -> None:
            count = counts[f"send, batches of {batch_records}"]
            with Producer(cluster.bootstrap_servers, acks=1, batch_records=batch_records) as producer:
                send_one = producer.send
                for start in range(0, count, len(values)):
                    for value in values[: count - start]:
                        send_one(TOPIC, value)
                producer.flush()

        def send_many() -> None:
            with Producer(cluster.bootstrap_servers, acks=1, batch_records=50) as producer:
                for start in range(0, at_fifty, len(values)):
                    for fifty in fifties[: -(-(at_fifty - start) // 50)]:
                        producer.send_many(TOPIC, fifty)
                producer.flush()

        def send_arrow() -> None:
            with Producer(cluster.bootstrap_servers, acks=1) as producer:
                deliveries = [producer.send_arrow(TOPIC, rows) for _ in range(0, as_arrow, len(values))]
                for delivery in deliveries:
                    delivery.result()

        times = interleaved(
            {
                "send, batches of 50": lambda: send(50),
                "send_many, batches of 50": send_many,
                "send, batches of 1": lambda: send(1),
                "send_arrow": send_arrow,
                "calls alone": lambda: _calls_alone(values, at_fifty),
            },
            scale,
            before=lambda: fresh_topic(admin, cluster, TOPIC, PARTITIONS),
        )
        counts["calls alone"] = at_fifty
        yield from throughput(times, counts, RECORD_BYTES, [broker.pid for broker in cluster.brokers if broker.pid])


def _calls_alone(values: list[bytes], count: int) -> None:
    """The least that a `send` in Python can do: one call a record, that keeps the record, its time and a handle. Tells
    how fast the machine is just then."""
    kept = _Kept()
    for start in range(0, count, len(values)):
        kept.values, kept.timestamps_us = [], []
        keep = kept.keep
        for value in values[: count - start]:
            keep(TOPIC, value)


class _Kept:
    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.timestamps_us: list[int] = []

    def keep(self, topic: str, value: bytes) -> Delivery:
        delivery = Delivery()
        delivery._index = len(self.values)
        self.values.append(value)
        self.timestamps_us.append(time_ns() // 1000)
        return delivery
