"""Commits that take longer than their timeout, on brokers in this process whose appends wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from broker.replica.host import Host
from broker.requests import staging
from broker.storage.log import Log
from kafkalog import Consumer, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import connection_settings, parse_producer
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome, TransactionCoordinator
from kafkalog.client.transaction.stager import PartStager, StagedPartition
from kafkalog.errors import StagedPartLost
from kafkalog.wire import transactions_pb2 as pb
from tests.broker.conftest import StartBroker

PARTITIONS = 16


def test_a_commit_that_takes_longer_than_its_timeout_and_its_requests_ends_and_is_there_once(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = [start_broker(number) for number in range(2)]
    brokers[0].new_topic("t", PARTITIONS)
    append, apply = Log.append_decided, staging.apply
    permits = {broker.broker.settings.log_dir: threading.Semaphore(0) for broker in brokers}

    def paced(self: Log, *arguments: Any) -> None:
        assert permits[str(self.directory.parent)].acquire(timeout=60)
        append(self, *arguments)

    def one_more(request: pb.ApplyRequest, host: Host, *rest: Any) -> pb.ApplyReply:
        """Each answer that says unfinished lets one partition's rows in."""
        reply = apply(request, host, *rest)
        if any(partition.unfinished for partition in reply.partitions):
            permits[host.settings.log_dir].release()
        return reply

    monkeypatch.setattr(staging, "_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.5)
    monkeypatch.setattr(staging, "apply", one_more)
    monkeypatch.setattr(Log, "append_decided", paced)  # 8 partitions of each of two brokers: 4 s at least
    settings = parse_producer({"request.timeout.ms": 3000, "transaction.commit.timeout.ms": 3500})
    cluster = Cluster(f"127.0.0.1:{brokers[0].broker.grpc_port}", connection_settings(settings))
    coordinator = TransactionCoordinator(cluster, settings)
    with PartStager(cluster, settings, "spark-batch-x", 0, 0) as stager:
        numbers = pa.array(range(PARTITIONS), pa.int32())
        stager.stage({"t": pa.table({"value": [f"{number}" for number in range(PARTITIONS)], "partition": numbers})})
        parts = stager.finish()
    began = time.monotonic()
    assert coordinator.commit(CommitBatch("spark-batch-x", 0, "run", False, b"", parts)) is Outcome.COMMITTED
    assert time.monotonic() - began > 3.5
    hosted = [partition for broker in brokers for partition in broker.broker.host.hosted.values()]
    assert [partition.log.end_offset for partition in hosted] == [1] * PARTITIONS
    coordinator.close()
    cluster.close()


def test_a_prepare_of_more_parts_than_a_message_holds_is_cut(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic_id = broker.new_topic("t", 8)
    settings = parse_producer({"transaction.commit.timeout.ms": 60_000})
    cluster = Cluster(f"127.0.0.1:{broker.broker.grpc_port}", connection_settings(settings))
    coordinator = TransactionCoordinator(cluster, settings)
    parts = [
        StagedPartition("t", topic_id, number, part.to_bytes(16, "big"), part, 1, 1000, 1)
        for number in range(8)
        for part in range(number * 20_000, (number + 1) * 20_000)
    ]
    with pytest.raises(StagedPartLost):  # nothing of them is staged: the brokers have looked
        coordinator.commit(CommitBatch("spark-batch-y", 0, "run", False, b"", parts))
    whole = pb.PrepareRequest()
    for part in parts:
        whole.partitions.add().parts.add(uuid=part.uuid, part=part.part, batches=part.batches, length=part.length)
    assert whole.ByteSize() > 2 << 20
    coordinator.close()
    cluster.close()


def test_most_of_a_large_part_is_written_once(start_broker: StartBroker) -> None:
    """Of 48 MB in one part 8 MiB are copied into the log; the rest becomes a segment of it as it is. Each row is read
    once, in order."""
    broker = start_broker()
    broker.new_topic("t", 1)
    settings = parse_producer({})
    cluster = Cluster(f"127.0.0.1:{broker.broker.grpc_port}", connection_settings(settings))
    coordinator = TransactionCoordinator(cluster, settings)
    rows, size, batches = 2000, 1200, 20
    with PartStager(cluster, settings, "spark-batch-z", 0, 0) as stager:
        for first in range(0, rows * batches, rows):
            values = [number.to_bytes(8, "big") + bytes(size) for number in range(first, first + rows)]
            stager.stage({"t": pa.table({"value": pa.array(values, pa.binary())})})
        parts = stager.finish()
    [partition] = broker.broker.host.hosted.values()
    assert coordinator.commit(CommitBatch("spark-batch-z", 0, "run", False, b"", parts)) is Outcome.COMMITTED
    segments = partition.log.view.segments
    copied, adopted = (segment.path.stat() for segment in segments)
    assert copied.st_size < 12 << 20 < 32 << 20 < adopted.st_size
    assert partition.log.end_offset == rows * batches
    with Consumer(cluster) as consumer:
        consumer.assign({TopicPartition("t", 0): "earliest"})
        found = [value[:8] for batch in _until(consumer, rows * batches) for value in batch.column("value").to_pylist()]
    assert found == [number.to_bytes(8, "big") for number in range(rows * batches)]
    coordinator.close()
    cluster.close()


def _until(consumer: Consumer, count: int) -> Iterator[pa.RecordBatch]:
    for batch in consumer.arrow_batches():
        yield batch
        count -= batch.num_rows
        if count <= 0:
            return
