"""The paper's claim that performance does not depend on how much is retained: the same is written to and read from a
broker that holds 100 MB and one that holds 20 GB, by turns. What is read is the last 100 MB, again and again. Before
each run the oldest records are deleted, so that the brokers hold as much as before, and the disk takes in what was
written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pyarrow as pa

from bench.measure import by_turns, figure, looked_for, seconds
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition

RECORD_BYTES = 200
TOPIC = "retained"
RETAINED_GB = (0.1, 20.0)
_ROWS = 10_000
_SEGMENT_BYTES = 16 << 20  # a segment that is written to is not deleted


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    rows = pa.record_batch([pa.array([os.urandom(RECORD_BYTES) for _ in range(_ROWS)])], names=["value"])

    def held(gigabytes: float) -> int:
        """In records."""
        return max(_ROWS, int(gigabytes * scale * 1e9 / RECORD_BYTES)) // _ROWS * _ROWS

    least = held(min(RETAINED_GB))
    partition = TopicPartition(TOPIC, 0)
    with LocalCluster(durable=True) as small, LocalCluster(durable=True) as large:
        clusters = dict(zip(RETAINED_GB, (small, large), strict=True))

        def write(servers: str, count: int) -> None:
            with Producer(servers, acks=1) as producer:
                for _ in range(0, count, _ROWS):
                    producer.send_arrow(TOPIC, rows, partition=0)
                producer.flush()

        def end_of(admin: Admin) -> int:
            end = admin.list_offsets({partition: "latest"})[partition].offset
            assert end is not None
            return end

        def read(servers: str, count: int) -> None:
            with Admin(servers) as admin, Consumer(servers) as consumer:
                end = end_of(admin)
                for _ in range(0, count, least):
                    consumer.assign({partition: end - least})
                    left = least
                    for batch in consumer.arrow_batches():
                        left -= batch.num_rows
                        if left <= 0:
                            break

        def settle() -> None:
            for gigabytes, cluster in clusters.items():
                with Admin(cluster.bootstrap_servers) as admin:
                    admin.delete_records({partition: max(0, end_of(admin) - held(gigabytes))})
                most = held(gigabytes) * (RECORD_BYTES + 20) + 2 * _SEGMENT_BYTES
                looked_for(partial(_has_at_most, most, cluster), 60, "deleted records are on the disk")
            os.sync()

        for gigabytes, cluster in clusters.items():
            with Admin(cluster.bootstrap_servers) as admin:
                admin.create_topic(TOPIC, partitions=1, config={"segment.bytes": _SEGMENT_BYTES})
            write(cluster.bootstrap_servers, held(gigabytes))
        for doing, work, times_least in (("produce", write, 10), ("consume", read, 100)):
            records = times_least * least
            taken = by_turns(
                {
                    f"{gigabytes:g} GB": partial(seconds, partial(work, cluster.bootstrap_servers, records))
                    for gigabytes, cluster in clusters.items()
                },
                scale,
                before=settle,
            )
            for name, times in taken.items():
                rates = [records / each for each in times]
                yield figure(
                    f"{doing}, {name} retained", "records/s", rates, records=records, record_bytes=RECORD_BYTES
                )


def _has_at_most(most: int, cluster: LocalCluster) -> bool:
    """Whether the records' files have no more bytes than that."""
    found = 0
    for path in cluster.root.glob(f"broker-*/{TOPIC}-*/*"):
        with suppress(FileNotFoundError):  # deleted since
            found += path.stat().st_size
    return found <= most
