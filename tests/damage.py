"""Damage on a broker's disk, for tests."""

from __future__ import annotations

from pathlib import Path

from broker.local import LocalCluster
from kafkalog import Admin


def flip(cluster: LocalCluster, topic: str, batch: int, byte: int) -> None:
    """Flip a bit in a batch of a partition's first segment, on the broker's disk."""
    with Admin(cluster.bootstrap_servers) as admin:
        [description] = admin.describe_topics([topic])
    [segment] = Path(cluster.brokers[0].data_directory).rglob(f"{description.topic_id.hex()}-0/*.log")
    with segment.open("r+b") as file:
        position = 0
        for _ in range(batch):
            file.seek(position + 8)
            position += int.from_bytes(file.read(4), "little")
        file.seek(position + byte)
        old = file.read(1)[0]
        file.seek(position + byte)
        file.write(bytes([old ^ 4]))
