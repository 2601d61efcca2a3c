"""A large write onto a slow disk: its commit takes many times its timeout, goes on, and is there once.

4 GB by default. KAFKALOG_SOAK_SLOW_BYTES makes it smaller for a quick look; the disk is never slower than 8 MB/s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.config import BrokerSettings
from broker.local.zookeeper import EmbeddedZooKeeper
from broker.server import Broker
from broker.storage import log_dir as directory
from broker.storage.disk import Buffer, Disk
from kafkalog import Admin, TopicPartition

pytestmark = pytest.mark.timeout(3600)
BYTES = int(os.environ.get("KAFKALOG_SOAK_SLOW_BYTES", 4 << 30))
VALUE_BYTES = 10_000
PARTITIONS = 4
TIMEOUT_SECONDS = 15


class SlowDisk(Disk):
    """What was written takes its time to be synced, one file after the other, as by a device with a cache."""

    bytes_per_second = max(BYTES / 120, 8_000_000)
    synced_bytes = 0

    def __init__(self) -> None:
        self._device = threading.Lock()
        self._lock = threading.Lock()  # guards _dirty
        self._dirty: dict[int, int] = {}

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        wrote = super().write(fd, buffers, position)
        file = os.fstat(fd).st_ino
        with self._lock:
            self._dirty[file] = self._dirty.get(file, 0) + wrote
        return wrote

    def sync(self, fd: int) -> None:
        with self._device:
            with self._lock:
                dirty = self._dirty.pop(os.fstat(fd).st_ino, 0)
            threading.Event().wait(dirty / self.bytes_per_second)  # the device at work
            SlowDisk.synced_bytes += dirty
            super().sync(fd)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(directory, "Disk", SlowDisk)
    zookeeper = EmbeddedZooKeeper(tmp_path / "zookeeper", durable=False)
    zookeeper.start()
    zookeeper.wait_ready(threading.Event().wait)
    given = {"broker.id": 0, "log.dir": str(tmp_path / "log"), "zookeeper.connect": zookeeper.connect}
    running = Broker(BrokerSettings.parse({**given, "grpc.port": 0, "data.port": 0}))
    running.start()
    yield running
    running.stop()
    zookeeper.stop()


def test_a_large_write_onto_a_slow_disk_commits_once(spark: SparkSession, broker: Broker) -> None:
    rows = BYTES // VALUE_BYTES
    options = {
        "kafkalog.bootstrap.servers": f"127.0.0.1:{broker.grpc_port}",
        "kafkalog.request.timeout.ms": "10000",
        "kafkalog.transaction.commit.timeout.ms": str(TIMEOUT_SECONDS * 1000),
    }
    with Admin(options["kafkalog.bootstrap.servers"]) as admin:
        admin.create_topic("t", partitions=PARTITIONS)
        began = time.monotonic()
        # Values that no codec shortens: the disk is to have all of it.
        numbered = spark.range(0, rows, 1, 2).selectExpr(
            f"concat(lpad(id, 12, '0'), randstr({VALUE_BYTES - 12})) AS value"
        )
        write = numbered.write.format("kafkalog").options(**options, topic="t").mode("append")
        write.save()
        print(f"{BYTES} bytes at {SlowDisk.bytes_per_second:.0f} bytes/s: {time.monotonic() - began:.0f} s", flush=True)
        ends = admin.list_offsets({TopicPartition("t", number): "latest" for number in range(PARTITIONS)})
    assert sum(end.offset or 0 for end in ends.values()) == rows
    assert SlowDisk.synced_bytes > 2 * rows * (VALUE_BYTES // 2)  # staged and applied
    read = spark.read.format("kafkalog").options(**options, subscribe="t").load()
    numbers = read.selectExpr("cast(substring(cast(value AS string), 1, 12) AS long) AS number")
    found = numbers.selectExpr("count(*) AS n", "count(DISTINCT number) AS d", "sum(number) AS s").collect()[0]
    assert (found.n, found.d, found.s) == (rows, rows, rows * (rows - 1) // 2)
