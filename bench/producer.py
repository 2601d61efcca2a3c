"""Producer: records a second through `send` at batches of 50 and of 1, and rows a second through `send_arrow`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from bench.measure import interleaved, throughput
from broker.local import LocalCluster
from kafkalog import Admin, Producer

RECORD_BYTES = 200
PARTITIONS = 4


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
    at_fifty, at_one, as_arrow = (max(1000, int(n * scale)) for n in (1_000_000, 100_000, 5_000_000))
    with LocalCluster(brokers=1) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic("producer", partitions=PARTITIONS, config={"retention.bytes": str(1 << 28)})

        def send(count: int, batch_records: int) -> None:
            with Producer(cluster.bootstrap_servers, acks=1, batch_records=batch_records) as producer:
                send_one = producer.send
                for start in range(0, count, len(values)):
                    for value in values[: count - start]:
                        send_one("producer", value)
                producer.flush()

        def send_arrow() -> None:
            with Producer(cluster.bootstrap_servers, acks=1) as producer:
                deliveries = [producer.send_arrow("producer", rows) for _ in range(0, as_arrow, len(values))]
                for delivery in deliveries:
                    delivery.result()

        times = interleaved(
            {
                "send, batches of 50": lambda: send(at_fifty, 50),
                "send, batches of 1": lambda: send(at_one, 1),
                "send_arrow": send_arrow,
            }
        )
        counts = {"send, batches of 50": at_fifty, "send, batches of 1": at_one, "send_arrow": as_arrow}
        yield from throughput(times, counts, RECORD_BYTES, [broker.pid for broker in cluster.brokers])
