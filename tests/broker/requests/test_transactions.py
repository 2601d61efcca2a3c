"""Staged writes over a real broker: data port, gRPC and ZooKeeper."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kafkalog import errors
from kafkalog.format.batch import iter_batches, producer_id_of
from kafkalog.format.columns import decode_columns
from kafkalog.wire import dataport_pb2 as data_pb
from kafkalog.wire import frames
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import DecidedTopic, Decision
from kafkalog.wire.frames import error_from_wire
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import DataPortClient, a_batch

TRANSACTION = "spark-stream-1"
PRODUCER = producer_id_of(TRANSACTION)


def staged_batch(*values: bytes, batch_id: int, part: int, sequence: int, producer: int = PRODUCER) -> bytes:
    return a_batch(
        values, producer_id=producer, producer_epoch=0, base_sequence=sequence, transaction_batch_id=batch_id, part=part
    )


def stage_frame(topic: bytes, *parts: tuple[int, bytes, bytes]) -> bytes:
    """`parts`: partition, uuid, body."""
    request = data_pb.StageRequest(timeout_ms=10_000)
    for partition, uuid, body in parts:
        request.partitions.add(topic_id=topic, partition=partition, uuid=uuid, length=len(body))
    header = data_pb.RequestHeader(correlation_id=7, stage=request).SerializeToString()
    body = b"".join(body for _, _, body in parts)
    return frames.frame_start(header, len(body)) + body


def stage(client: DataPortClient, topic: bytes, *parts: tuple[int, bytes, bytes]) -> list[data_pb.StagedPartition]:
    client.send(stage_frame(topic, *parts))
    header, _ = client.reply()
    assert header.WhichOneof("reply") == "stage", header
    return list(header.stage.partitions)


@dataclass
class Write:
    """A batch of a transaction in one topic, as a driver and its tasks write it."""

    broker: RunningBroker
    topic: bytes
    batch_id: int = 0
    commit_uuid: bytes = field(default_factory=lambda: os.urandom(16))
    parts: dict[int, list[pb.StagedPart]] = field(default_factory=dict)

    def stage(self, part: int, *bodies: tuple[bytes, ...], partition: int = 0) -> None:
        """A part of batches, each with these values."""
        uuid = os.urandom(16)
        batches = [
            staged_batch(*values, batch_id=self.batch_id, part=part, sequence=number)
            for number, values in enumerate(bodies)
        ]
        with self.broker.client() as client:
            (staged,) = stage(client, self.topic, (partition, uuid, b"".join(batches)))
        assert not staged.HasField("error"), staged
        length = sum(map(len, batches))
        assert (staged.batches, staged.length) == (len(batches), length)
        self.parts.setdefault(partition, []).append(
            pb.StagedPart(uuid=uuid, part=part, batches=len(batches), length=length)
        )

    def prepare(self, version: int = -1) -> list[errors.KafkalogError | None]:
        request = pb.PrepareRequest(
            transactional_id=TRANSACTION, producer_id=PRODUCER, batch_id=self.batch_id, commit_uuid=self.commit_uuid,
            version=version,
        )  # fmt: skip
        for partition, parts in self.parts.items():
            request.partitions.add(topic_id=self.topic, partition=partition, parts=parts)
        reply = self.broker.stub.Prepare(request, timeout=30)
        return [error_from_wire(each.error) if each.HasField("error") else None for each in reply.partitions]

    def apply(self) -> list[int | errors.KafkalogError]:
        request = pb.ApplyRequest(
            transactional_id=TRANSACTION, producer_id=PRODUCER, batch_id=self.batch_id, commit_uuid=self.commit_uuid
        )
        for partition in self.parts:
            request.partitions.add(topic_id=self.topic, partition=partition)
        reply = self.broker.stub.Apply(request, timeout=30)
        return [error_from_wire(each.error) if each.HasField("error") else each.end_offset for each in reply.partitions]

    def release(self) -> None:
        request = pb.ReleaseRequest(transactional_id=TRANSACTION, batch_id=self.batch_id)
        for partition in self.parts:
            request.partitions.add(topic_id=self.topic, partition=partition)
        self.broker.stub.Release(request, timeout=30)

    def decision(self, version: int, *, done: bool = False) -> Decision:
        topic = DecidedTopic(self.topic, "t", tuple((number, number) for number in sorted(self.parts)))
        return Decision(TRANSACTION, version, self.batch_id, self.commit_uuid, "run", b"", done, (topic,), (), True, 1)


def listed(broker: RunningBroker) -> list[pb.StagedSet]:
    return list(broker.stub.ListStaged(pb.ListStagedRequest(), timeout=30).sets)


def values_in(broker: RunningBroker, topic: bytes, partition: int = 0) -> list[bytes]:
    """Every value that a consumer finds."""
    found: list[bytes] = []
    offset = 0
    with broker.client() as client:
        while True:
            fetched, body = client.fetch(topic, offset, partition=partition)
            assert not fetched.HasField("error"), fetched
            for header, batch in iter_batches(memoryview(body)):
                found += decode_columns(header, batch).column("value").to_pylist()
                offset = header.end_offset
            if offset == fetched.end_offset:
                return found


def test_a_batch_is_read_only_once_it_is_applied_and_then_in_the_order_of_its_parts(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    write.stage(2, (b"a", b"b"), (b"c",))
    write.stage(5, (b"d",))
    write.stage(0, (b"z",), partition=1)
    with broker.client() as client:
        client.append(topic, a_batch([b"other"]))
    assert write.prepare() == [None, None]
    assert values_in(broker, topic) == [b"other"]
    assert write.apply() == [5, 1]
    assert values_in(broker, topic) == [b"other", b"a", b"b", b"c", b"d"]
    assert values_in(broker, topic, 1) == [b"z"]
    assert write.apply() == [5, 1]  # sent again
    write.release()
    assert listed(broker) == []
    assert write.apply() == [5, 1]  # late
    assert values_in(broker, topic) == [b"other", b"a", b"b", b"c", b"d"]


def test_a_prepared_batch_survives_a_restart_and_is_applied_once(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",), (b"b",))
    assert write.prepare() == [None]
    broker.stop(clean=False)
    write.broker = broker = start_broker()
    assert values_in(broker, topic) == []
    assert [(each.transactional_id, each.parts) for each in listed(broker)] == [(TRANSACTION, 1)]
    assert write.apply() == [2]
    broker.stop(clean=False)
    write.broker = broker = start_broker()
    assert write.apply() == [2]
    assert values_in(broker, topic) == [b"a", b"b"]
