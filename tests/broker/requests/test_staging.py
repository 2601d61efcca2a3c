"""Staged writes over a real broker: data port, gRPC and ZooKeeper."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker.config import BrokerSettings
from broker.replica import applier
from broker.replica.in_doubt import Resolution, resolution
from broker.replica.jobs import StagedJobs
from broker.replica.partition import Partition
from broker.replica.staged_writes import StagedWrites
from broker.requests import staging
from broker.staging.format import PreparedSet
from broker.storage.log_dir import LogDirectory
from broker.storage.segment import LOG_SUFFIX
from kafkalog import errors
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import parse_producer
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome, TransactionCoordinator
from kafkalog.client.transaction.stager import NumberedTransactions, PartStager
from kafkalog.clock import Clock, ManualClock
from kafkalog.format.batch import Batch, iter_batches
from kafkalog.format.columns import decode_columns
from kafkalog.format.decisions import DecidedTopic, Decision
from kafkalog.format.producer_ids import family_of, producer_id_of
from kafkalog.wire import broker_pb2, frames
from kafkalog.wire import dataport_pb2 as data_pb
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk import decisions
from kafkalog.zk.session import REQUEST_BYTES_MAX, ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import DataPortClient, a_batch, fetch_frame
from tests.broker.requests.hosted import TOPIC_ID, Hosted
from tests.kafkalog.zk.expiry import expire
from tests.threads import join_all
from tests.waiting import waited_for

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
    name: str = TRANSACTION

    @property
    def producer(self) -> int:
        return producer_id_of(self.name)

    def stage(self, part: int, *bodies: tuple[bytes, ...], partition: int = 0) -> None:
        """A part of batches, each with these values."""
        uuid = os.urandom(16)
        batches = [
            staged_batch(*values, batch_id=self.batch_id, part=part, sequence=number, producer=self.producer)
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
            transactional_id=self.name, producer_id=self.producer, batch_id=self.batch_id,
            commit_uuid=self.commit_uuid, version=version,
        )  # fmt: skip
        for partition, parts in self.parts.items():
            request.partitions.add(topic_id=self.topic, partition=partition, parts=parts)
        reply = self.broker.stub.Prepare(request, timeout=30)
        return [error_from_wire(each.error) if each.HasField("error") else None for each in reply.partitions]

    def asked(self, method: str) -> Any:
        """A Prepare's or Apply's reply as it is."""
        requests = {"Prepare": pb.PrepareRequest, "Apply": pb.ApplyRequest}
        request = requests[method](
            transactional_id=self.name, producer_id=self.producer, batch_id=self.batch_id, commit_uuid=self.commit_uuid
        )
        for partition, parts in self.parts.items():
            added = request.partitions.add(topic_id=self.topic, partition=partition)
            if method == "Prepare":
                added.parts.extend(parts)
        return getattr(self.broker.stub, method)(request, timeout=30)

    def apply(self) -> list[int | errors.KafkalogError]:
        request = pb.ApplyRequest(
            transactional_id=self.name, producer_id=self.producer, batch_id=self.batch_id, commit_uuid=self.commit_uuid
        )
        for partition in self.parts:
            request.partitions.add(topic_id=self.topic, partition=partition)
        reply = self.broker.stub.Apply(request, timeout=30)
        return [error_from_wire(each.error) if each.HasField("error") else each.end_offset for each in reply.partitions]

    def release(self) -> None:
        request = pb.ForgetStagedRequest(transactional_id=self.name, batch_id=self.batch_id)
        for partition in self.parts:
            request.partitions.add(topic_id=self.topic, partition=partition)
        self.broker.stub.ForgetStaged(request, timeout=30)

    def decision(self, version: int, *, done: bool = False) -> Decision:
        topic = DecidedTopic(self.topic, "t", tuple((number, number) for number in sorted(self.parts)))
        return Decision(self.name, version, self.batch_id, self.commit_uuid, "run", b"", done, (topic,), (), True, 1)


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


def test_an_apply_and_a_prepare_that_take_long_are_answered_as_unfinished_and_done_once(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(staging, "_AT_ONCE_BYTES", -1)
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",), (b"b",))
    [partition] = broker.broker.host.hosted.values()
    for method, step in (("Prepare", "keep_prepared"), ("Apply", "apply")):
        ran: list[str] = []
        may_go_on = threading.Event()
        does = getattr(partition.staged, step)

        def gated(*arguments: Any, ran: Any = ran, gate: Any = may_go_on, does: Any = does) -> Any:
            ran.append("once")
            assert gate.wait(60)
            return does(*arguments)

        monkeypatch.setattr(partition.staged, step, gated)
        answers = [write.asked(method).partitions[0] for _ in range(3)]
        assert all(answer.unfinished and not answer.HasField("error") for answer in answers)
        assert len(ran) == 1
        may_go_on.set()
        waited_for(lambda method=method: not write.asked(method).partitions[0].unfinished)  # type: ignore[misc]
        assert values_in(broker, topic) == ([b"a", b"b"] if method == "Apply" else [])


def test_an_apply_says_how_far_it_is(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(staging, "_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(applier, "_SYNC_BYTES", 1)
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, *[(b"x" * 700_000,)] * 4)
    assert write.prepare() == [None]
    [partition] = broker.broker.host.hosted.values()
    permits = threading.Semaphore(0)
    append = partition.log.append_decided

    def paced(batches: Sequence[Batch], leader_epoch: int) -> None:
        assert permits.acquire(timeout=60)
        append(batches, leader_epoch)

    monkeypatch.setattr(partition.log, "append_decided", paced)
    seen: list[int] = []

    def gets_on() -> bool:
        [answer] = write.asked("Apply").partitions
        if seen and answer.unfinished and answer.progress == seen[-1]:
            return False
        seen.append(answer.progress)
        return True

    for _ in range(4):
        waited_for(gets_on)
        permits.release()
    waited_for(lambda: not write.asked("Apply").partitions[0].unfinished)
    assert seen == sorted(set(seen))
    assert partition.log.flushed_offset == 4


@pytest.mark.parametrize("partitions", [1, 8])  # one whose job begins at once, and more than there are threads
def test_a_commit_against_a_full_disk_is_given_up_and_applied_once_there_is_room(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    monkeypatch.setattr(staging, "_AT_ONCE_BYTES", -1)  # as a large one
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.01)
    monkeypatch.setattr("broker.staging.staging._CHECK_LASTS_SECONDS", 0.0)
    topic = broker.new_topic(partitions=partitions)
    disk = broker.broker.host.leader_of(topic, 0).log._disk
    writes, tries = disk.write, itertools.count()
    real, asked, asks, over = staging.apply, threading.Condition(), 0, False

    def apply(*arguments: Any) -> pb.ApplyReply:
        nonlocal asks
        with asked:
            asks += 1
            asked.notify_all()
        return real(*arguments)

    def full(fd: int, buffers: Sequence[Any], position: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(LOG_SUFFIX):
            next(tries)
            with asked:  # no job is over within the turn in which it begins
                now = asks
                asked.wait_for(lambda: asks > now or over, 60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writes(fd, buffers, position)

    settings = parse_producer({"transaction.commit.timeout.ms": 1000, "retry.backoff.ms": 10})
    cluster = Cluster(f"127.0.0.1:{broker.broker.grpc_port}", retry_backoff_ms=10, retry_backoff_max_ms=50)
    coordinator = TransactionCoordinator(cluster, settings)
    with PartStager(cluster, settings, TRANSACTION, 0, 0) as stager:
        values = [b"%0700000d" % number for number in range(3 * partitions)]
        numbers = [number % partitions for number in range(3 * partitions)]
        stager.stage({"t": pa.table({"value": values, "partition": pa.array(numbers, pa.int32())})})
        parts = stager.finish()
    batch = CommitBatch(TRANSACTION, 0, "run", True, b"", parts)
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as thread:
        patched.setattr(disk, "write", full)
        patched.setattr(staging, "apply", apply)
        commit = thread.submit(coordinator.commit, batch)
        try:
            with pytest.raises(errors.CommitTimedOut, match="no space left on the disk") as given_up:
                commit.result(60)
        finally:
            patched.undo()
            with asked:
                over = True
                asked.notify_all()
    assert given_up.value.facts["decided"] == "yes"
    assert next(tries) >= 3
    assert coordinator.commit(batch) is Outcome.RECORDED
    assert [len(values_in(broker, topic, number)) for number in range(partitions)] == [3] * partitions
    coordinator.close()
    cluster.close()


@dataclass
class HeldUp:
    """A log whose applies begin, and go on once they may."""

    begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def hold(self, partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
        append = partition.log.append_decided

        def held(batches: Sequence[Batch], leader_epoch: int) -> None:
            self.begun.set()
            assert self.may_go_on.wait(60)
            append(batches, leader_epoch)

        monkeypatch.setattr(partition.log, "append_decided", held)


def decided_and_prepared(broker: RunningBroker, topic: bytes, name: str) -> Write:
    """A write that the in_doubt applies."""
    write = Write(broker, topic, name=name)
    write.stage(0, (name.encode(),))
    assert write.prepare() == [None]
    decisions.write_decision(broker.broker.host.metadata.session, write.decision(-1))
    return write


def test_a_small_apply_is_answered_in_time_while_the_resolver_applies_to_its_partition(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(applier, "_WAIT_SECONDS", 3.0)
    topic = broker.new_topic()
    [partition] = broker.broker.host.hosted.values()
    gate = HeldUp()
    gate.hold(partition, monkeypatch)
    decided_and_prepared(broker, topic, "resolved")
    small = Write(broker, topic, name="small")
    small.stage(0, (b"small",))
    assert small.prepare() == [None]
    resolving = threading.Thread(target=broker.broker.in_doubt.resolve, args=(0,))
    resolving.start()
    assert gate.begun.wait(60)
    try:
        [answer] = small.asked("Apply").partitions
        assert answer.unfinished, answer
        assert answer.progress > 0
    finally:
        gate.may_go_on.set()
        join_all([resolving], 60)
    waited_for(lambda: not small.asked("Apply").partitions[0].unfinished)
    assert values_in(broker, topic) == [b"resolved", b"small"]


def test_a_small_apply_that_finds_its_partition_taken_becomes_a_job(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(applier, "_WAIT_SECONDS", 3.0)
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    [partition] = broker.broker.host.hosted.values()
    with partition._applier._applying:  # as by another's, which began after it was looked at
        [answer] = write.asked("Apply").partitions
        assert answer.unfinished, answer
        assert answer.progress > 0
    waited_for(lambda: not write.asked("Apply").partitions[0].unfinished)
    assert values_in(broker, topic) == [b"a"]


@pytest.mark.parametrize(("method", "step"), [("Prepare", "keep_prepared"), ("Apply", "finish_apply")])
def test_small_work_that_fails_says_how_far_it_came(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, method: str, step: str
) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    [partition] = broker.broker.host.hosted.values()

    def fails(*_: Any) -> None:
        raise errors.DiskFull(directory="/data")

    monkeypatch.setattr(partition.staged, step, fails)
    [answer] = write.asked(method).partitions
    assert isinstance(error_from_wire(answer.error), errors.DiskFull)
    assert 0 < answer.progress <= partition.staged.work


def test_a_stop_waits_for_nothing_that_the_resolver_applies(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    [partition] = broker.broker.host.hosted.values()
    gate = HeldUp()
    gate.hold(partition, monkeypatch)
    write = decided_and_prepared(broker, topic, "resolved")
    in_doubt = broker.broker.in_doubt
    in_doubt._state_changed(True, False)  # its thread looks at once, at young sets too
    assert gate.begun.wait(60)
    stopping = threading.Thread(target=in_doubt.stop)
    stopping.start()
    try:
        join_all([stopping], 20)
    finally:
        gate.may_go_on.set()
        join_all([stopping], 60)
    assert write.apply() == [1]


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


def test_a_plain_append_of_a_staged_batch_and_a_staged_plain_batch_are_refused(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        appended = client.append(topic, staged_batch(b"x", batch_id=0, part=0, sequence=0))
        assert "send it as a stage request" in str(error_from_wire(appended.error))
        (staged,) = stage(client, topic, (0, os.urandom(16), a_batch()))
        assert "a staged batch needs producer id, batch id and part >= 0, not -1" in str(error_from_wire(staged.error))
    assert values_in(broker, topic) == []


def test_a_partition_that_fails_keeps_no_other_from_being_staged(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    good = staged_batch(b"x", batch_id=0, part=0, sequence=0)
    late = staged_batch(b"x", batch_id=0, part=1, sequence=2)
    damaged = bytearray(good)
    damaged[-1] ^= 1
    with broker.client() as client:
        answers = stage(
            client, topic, (0, b"a" * 16, bytes(damaged)), (5, b"b" * 16, good), (0, b"c" * 16, late),
            (0, b"short", good), (0, b"d" * 16, good),
        )  # fmt: skip
        again = stage(client, topic, (0, b"d" * 16, good))
    found = [type(error_from_wire(each.error)) if each.HasField("error") else each.batches for each in answers]
    assert found == [errors.CorruptBatch, errors.UnknownPartition, errors.StagedOutOfOrder, errors.InvalidRequest, 1]
    assert [each.batches for each in again] == [1]


def test_a_set_that_misses_a_part_is_not_prepared(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    write.stage(0, (b"a",), (b"b",))
    write.stage(0, (b"c",), partition=1)
    write.parts[0][0].batches = 3
    lost, fine = write.prepare()
    assert isinstance(lost, errors.StagedPartLost)
    assert str(lost) == (
        "staged rows of transaction 'spark-stream-1', batch 0, for t-0 are lost: part 0 has only 2 of its 3 batches"
    )
    assert fine is None
    refused, applied = write.apply()
    assert isinstance(refused, errors.StagedPartLost) and "it is not prepared on this broker" in str(refused)
    assert applied == 1


def test_a_discard_forgets_parts_but_no_prepared_one(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    write, failed = Write(broker, topic), Write(broker, topic)
    write.stage(0, (b"a",))
    failed.stage(0, (b"b",))
    assert write.prepare() == [None]
    assert len(listed(broker)) == 2
    request = pb.AbortStagedRequest()
    request.partitions.add(topic_id=topic, uuids=[part.uuid for each in (write, failed) for part in each.parts[0]])
    broker.stub.AbortStaged(request, timeout=30)
    assert [each.commit_uuid for each in listed(broker)] == [write.commit_uuid]
    assert write.prepare() == [None]  # its parts are looked for again
    assert write.apply() == [1]


def test_a_leader_does_what_was_decided_while_it_was_away(start_broker: StartBroker) -> None:
    """No coordinator comes back: the decision alone has the set applied, written done, and dropped."""
    broker = start_broker()
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    decisions.write_decision(broker.broker.host.metadata.session, write.decision(-1))
    broker.stop(clean=False)
    broker = start_broker()
    partition = broker.broker.host.leader_of(topic, 0)
    with broker.client() as client:
        fetched, _ = client.fetch(topic, 0, max_wait_ms=20_000)  # answered by the in_doubt's apply
    assert fetched.end_offset == 1
    while partition.staged.all():
        broker.broker.in_doubt.resolve(0)
    assert decisions.read_decision(broker.broker.host.metadata.session, TRANSACTION).done
    assert values_in(broker, topic) == [b"a"]


def test_the_last_leader_that_has_a_decided_batch_writes_that_it_is_done(start_broker: StartBroker) -> None:
    brokers = start_broker(0), start_broker(1)
    session = brokers[0].broker.host.metadata.session
    topic = brokers[0].new_topic(partitions=2)
    gone = brokers[0].new_topic("gone")
    led = {each.partition: each.leader for each in brokers[0].described("t").partitions}
    assert set(led.values()) == {0, 1}
    writes = [Write(brokers[led[number]], topic) for number in range(2)]
    writes[1].commit_uuid = writes[0].commit_uuid
    for number, write in enumerate(writes):
        write.stage(number, (b"a",), partition=number)
        assert write.prepare() == [None]
    decision = writes[0].decision(-1)
    topics = DecidedTopic(topic, "t", ((0, 1),)), DecidedTopic(gone, "gone", ((0, 0),))
    decisions.write_decision(session, replace(decision, topics=topics, stays=False))
    writes[0].broker.broker.in_doubt.resolve(0)
    first = decisions.read_decision(session, TRANSACTION)
    assert (first.done, first.applied) == (False, (DecidedTopic(topic, "t", ((0, 0),)),))
    brokers[0].stub.DeleteTopic(broker_pb2.DeleteTopicRequest(name="gone"), timeout=30)
    metadata = writes[1].broker.broker.host.metadata
    assert metadata.wait_until(lambda: "gone" not in metadata.topics, 60)  # until then its partition may be led
    for _ in range(2):  # the second time there is nothing to add
        writes[1].broker.broker.in_doubt.resolve(0)
    last = decisions.read_decision(session, TRANSACTION)
    assert (last.done, last.applied, last.topics) == (True, (), topics)
    for write in writes:
        write.broker.broker.in_doubt.resolve(0)
        assert listed(write.broker) == []
    assert [values_in(write.broker, topic, number) for number, write in enumerate(writes)] == [[b"a"], [b"a"]]


def test_a_leader_of_several_partitions_of_a_decided_batch_writes_that_it_is_done(broker: RunningBroker) -> None:
    topic, session = broker.new_topic(partitions=3), broker.broker.host.metadata.session
    write = Write(broker, topic)
    for number in range(3):
        write.stage(number, (b"a",), partition=number)
    assert write.prepare() == [None] * 3
    decisions.write_decision(session, write.decision(-1))
    broker.broker.in_doubt.resolve(0)
    assert decisions.read_decision(session, TRANSACTION).done
    broker.broker.in_doubt.resolve(0)
    assert listed(broker) == []
    assert [values_in(broker, topic, number) for number in range(3)] == [[b"a"]] * 3


def test_a_set_that_nobody_decides_is_dropped_only_after_its_version_was_raised(start_broker: StartBroker) -> None:
    broker = start_broker(transaction_timeout_ms=1, transaction_staged_retention_ms=3_600_000)
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    partition = broker.broker.host.leader_of(topic, 0)
    session = broker.broker.host.metadata.session
    while partition.staged.all():
        broker.broker.in_doubt.resolve(0)
    assert decisions.read_decision(session, TRANSACTION).version == 0
    with pytest.raises(errors.DecisionMoved):
        decisions.write_decision(session, write.decision(-1))
    (lost,) = write.apply()
    assert isinstance(lost, errors.StagedPartLost)


def test_a_batch_that_nobody_decides_is_dropped_in_all_of_its_partitions_in_one_round(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    for number in range(2):
        write.stage(number, (b"a",), partition=number)
    assert write.prepare() == [None, None]
    in_doubt = broker.broker.in_doubt
    monkeypatch.setattr(in_doubt, "_timeout", 0.0)
    in_doubt.resolve(0)
    assert listed(broker) == []
    assert decisions.read_decision(broker.broker.host.metadata.session, TRANSACTION).version == 0


def test_after_a_lost_session_young_sets_are_looked_at_too(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_doubt = broker.broker.in_doubt
    waited_for(lambda: not in_doubt._all)  # the first look has begun
    ages: list[float] = []
    monkeypatch.setattr(in_doubt, "resolve", ages.append)
    expire(broker.broker.host.metadata.session)
    waited_for(lambda: 0 in ages)


def test_what_was_prepared_and_decided_just_now_is_left_to_its_coordinator(broker: RunningBroker) -> None:
    in_doubt = broker.broker.in_doubt
    waited_for(lambda: not in_doubt._all)  # the first look, at sets of any age, has begun
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    decisions.write_decision(broker.broker.host.metadata.session, write.decision(-1))
    in_doubt.resolve(3600)
    assert values_in(broker, topic) == []
    in_doubt.resolve(0)
    assert values_in(broker, topic) == [b"a"]


def test_a_leader_writes_that_it_has_a_batch_only_once_it_is_durable(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    host, write_decision = broker.broker.host, decisions.write_decision
    write_decision(host.metadata.session, write.decision(-1))
    partition = host.leader_of(topic, 0)
    durable: list[int] = []

    def written(session: ZooKeeperSession, decision: Decision) -> int:
        durable.append(partition.log.flushed_offset)
        return write_decision(session, decision)

    monkeypatch.setattr(partition.log, "request_flush", lambda: None)  # no thread flushes it by the way
    monkeypatch.setattr(decisions, "write_decision", written)
    broker.broker.in_doubt.resolve(0)
    broker.broker.in_doubt.resolve(0)
    assert durable == [1]


def test_a_partition_shows_its_batch_while_another_of_the_request_is_still_appended(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    write.stage(0, (b"b",), partition=1)
    assert write.prepare() == [None, None]
    first, second = (broker.broker.host.leader_of(topic, number) for number in range(2))
    real = second.log.append_decided

    def append_decided(batches: Sequence[Batch], leader_epoch: int) -> None:
        waited_for(lambda: first.readable_end_offset == 1, 15)
        real(batches, leader_epoch)

    monkeypatch.setattr(second.log, "append_decided", append_decided)
    assert write.apply() == [1, 1]


def test_a_fetch_that_waits_is_answered_by_an_apply(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    partition = broker.broker.host.leader_of(topic, 0)
    with broker.client() as client:
        client.send(fetch_frame(1, topic, 0, max_wait_ms=30_000))
        waited_for(lambda: len(partition.waiters) == 1)
        began = time.monotonic()
        assert write.apply() == [1]
        header, _ = client.reply()
        assert header.fetch.partitions[0].end_offset == 1
        assert time.monotonic() - began < 20


def test_one_lost_set_keeps_no_other_of_its_partition_from_being_resolved_and_no_part_from_expiring(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker(transaction_staged_retention_ms=1)
    topic = broker.new_topic()
    lost, fine = Write(broker, topic, name="lost"), Write(broker, topic, name="fine")
    for write in (lost, fine):
        write.stage(0, (write.name.encode() * 20,))
        assert write.prepare() == [None]
    Write(broker, topic, name="loose").stage(0, (b"loose",))
    (file,) = tmp_path.rglob("*.staged")
    data = file.read_bytes()
    with file.open("r+b") as staged:
        staged.seek(data.index(b"lost" * 20))
        staged.write(b"!")
    for write in (lost, fine):
        decisions.write_decision(broker.broker.host.metadata.session, write.decision(-1))
    partition = broker.broker.host.leader_of(topic, 0)
    broker.broker.in_doubt.resolve(0)
    assert values_in(broker, topic) == [b"fine" * 20]
    while any(staged.prepared is None for staged in partition.staged.all()):
        broker.broker.in_doubt.expiry.look()
    assert {staged.prepared.transactional_id for staged in partition.staged.all() if staged.prepared} == {
        "lost",
        "fine",
    }
    broker.broker.in_doubt.resolve(0)
    assert caplog.text.count("transaction_not_resolved") == 1
    (error,) = lost.apply()
    assert isinstance(error, errors.StagedPartLost)


def test_a_decision_that_cannot_be_written_on_keeps_no_part_from_expiring_and_is_logged_once(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker(transaction_staged_retention_ms=1)
    name = "t" * 240  # of which an addition to the decision takes much room
    topic = broker.new_topic(name, partitions=2)
    full, fine = Write(broker, topic, name="full"), Write(broker, topic, name="fine")
    for write in (full, fine):
        write.stage(0, (write.name.encode(),))
        assert write.prepare() == [None]
    Write(broker, topic, name="loose").stage(0, (b"loose",))
    session = broker.broker.host.metadata.session
    for write in (full, fine):
        both = replace(write.decision(-1), topics=(DecidedTopic(topic, name, ((0, 1),)),))  # 1 never gets its rows
        if write is full:
            added = replace(both, applied=(DecidedTopic(topic, name, ((0, 0),)),))
            both = replace(both, run_id="r" * (REQUEST_BYTES_MAX - len(decisions._content(added))))
        decisions.write_decision(session, both)
    partition = broker.broker.host.leader_of(topic, 0)
    broker.broker.in_doubt.resolve(0)
    while any(staged.prepared is None for staged in partition.staged.all()):
        broker.broker.in_doubt.expiry.look()
    assert set(values_in(broker, topic)) == {b"full", b"fine"}
    assert [decisions.read_decision(session, write.name).applied for write in (full, fine)] == [
        (),
        (DecidedTopic(topic, name, ((0, 0),)),),
    ]
    broker.broker.in_doubt.resolve(0)
    assert caplog.text.count("transaction_not_closed transactional_id=full") == 1


def test_damage_of_what_is_staged_is_found_before_anything_is_decided(broker: RunningBroker, tmp_path: Path) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    write.stage(0, (b"good" * 20,))
    write.stage(0, (b"fine" * 20,), partition=1)
    for file in tmp_path.rglob("*.staged"):
        data = file.read_bytes()
        if b"good" in data:
            with file.open("r+b") as staged:
                staged.seek(data.index(b"good"))
                staged.write(b"!")
    lost, fine = write.prepare()
    assert isinstance(lost, errors.StagedPartLost)
    assert "batch 0 of part 0: its checksum does not match" in str(lost)
    assert fine is None


def test_bytes_are_listed_while_half_a_batch_is_hidden(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        for value in range(3):
            client.append(topic, a_batch([b"%d" % value]))
    partition = broker.broker.host.leader_of(topic, 0)
    partition._applier.hide((PRODUCER, 0), 2)  # as a start that finds half a batch there
    for offset in range(4):
        wanted = broker_pb2.ListOffset(
            topic_id=topic, partition=0, at=broker_pb2.ListOffset.AFTER_BYTES, from_offset=offset, max_bytes=1 << 62
        )
        request = broker_pb2.ListOffsetsRequest(partitions=[wanted])
        (listed,) = broker.stub.ListOffsets(request, timeout=30).partitions
        assert not listed.HasField("error"), listed
        assert (listed.offset, listed.size_bytes > 0) == (max(2, offset), offset < 2)


@pytest.mark.parametrize("parts", [(2, 1), (1, 1)])
def test_parts_out_of_order_or_named_twice_are_not_prepared(broker: RunningBroker, parts: tuple[int, int]) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    for part in parts:
        write.stage(part, (b"a",))
    (error,) = write.prepare()
    assert isinstance(error, errors.InvalidRequest)
    assert "must be in ascending order, each once" in str(error)
    assert [(staged.commit_uuid, staged.parts) for staged in listed(broker)] == [(b"", 2)]


def test_parts_that_nobody_prepares_expire(start_broker: StartBroker) -> None:
    broker = start_broker(transaction_staged_retention_ms=1)
    topic = broker.new_topic()
    Write(broker, topic).stage(0, (b"a",))
    partition = broker.broker.host.leader_of(topic, 0)
    while partition.staged.all():
        broker.broker.in_doubt.expiry.look()
    assert broker.counters()["staged.bytes"] == 0


HOUR = 3600.0


class ShiftedClock(Clock):
    """The machine's clocks, that much later."""

    def __init__(self) -> None:
        self.wall_seconds = self.monotonic_seconds = 0.0

    def now_us(self) -> int:
        return super().now_us() + int(self.wall_seconds * 1_000_000)

    def monotonic(self) -> float:
        return super().monotonic() + self.monotonic_seconds

    def advance(self, seconds: float) -> None:
        self.wall_seconds += seconds
        self.monotonic_seconds += seconds


def loose(broker: RunningBroker, write: Write) -> int:
    """How many parts of a write the broker has, after it forgot those that are too old."""
    broker.broker.in_doubt.expiry.look()
    return sum(each.parts for each in listed(broker) if not each.commit_uuid and each.producer_id == write.producer)


@pytest.mark.parametrize("partitions", [(0, 1), (1, 0)])
def test_a_part_lives_while_anything_of_its_write_is_staged_and_a_day_longer(
    start_broker: StartBroker, partitions: tuple[int, int]
) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    topic = broker.new_topic(partitions=2)
    write, other = Write(broker, topic, name="long"), Write(broker, topic, name="abandoned")
    write.stage(0, (b"a",), partition=partitions[0])
    other.stage(0, (b"x",))
    clock.advance(20 * HOUR)
    write.stage(1, (b"b",), partition=partitions[1])
    clock.advance(20 * HOUR)
    assert (loose(broker, write), loose(broker, other)) == (2, 0)
    clock.advance(5 * HOUR)
    assert loose(broker, write) == 0


def test_a_task_that_stages_elsewhere_keeps_the_parts_of_its_write_here(start_broker: StartBroker) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    topic = broker.new_topic()
    write, other = Write(broker, topic, name="long"), Write(broker, topic, batch_id=1, name="long")
    write.stage(0, (b"a",))
    other.stage(0, (b"x",))
    for _ in range(5):
        clock.advance(20 * HOUR)
        reply = broker.stub.Renew(pb.RenewRequest(family=family_of(write.producer), batch_id=0), timeout=30)
        assert reply.renew_within_ms == 6 * 3_600_000
        broker.broker.in_doubt.expiry.look()
    assert [each.batch_id for each in listed(broker)] == [0]
    assert write.prepare() == [None]
    assert write.apply() == [1]


@pytest.mark.parametrize("has_rows", [True, False], ids=["rows of another topic", "no rows yet"])
def test_a_task_of_a_numbered_write_keeps_what_others_staged_for_topics_that_it_has_not_met(
    start_broker: StartBroker, has_rows: bool
) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    for name in ("a", "b"):
        broker.new_topic(name)
    settings = parse_producer({})
    spied: Any = Cluster(f"127.0.0.1:{broker.broker.grpc_port}")
    call, renewed = spied.call, threading.Event()

    def seen(method: str, request: Any, **more: Any) -> Any:
        reply = call(method, request, **more)
        if method == "Renew":
            renewed.set()
        return reply

    coordinator = TransactionCoordinator(spied, settings)
    numbered = NumberedTransactions("etl", lambda topics: coordinator.numbered("etl", topics))
    [name] = numbered.of_topics(spied.describe_topics(["a"]))
    rows = pa.table({"value": [b"x"] * 10})
    with PartStager(spied, settings, numbered, 1, 0) as ended:
        ended.stage({"a": rows})
        parts = ended.finish()
    clock.advance(20 * HOUR)
    spied.call = seen
    with PartStager(spied, settings, numbered, 1, 1) as running:
        if has_rows:
            running.stage({"b": rows})
        assert renewed.wait(60)
        clock.advance(20 * HOUR)
        broker.broker.in_doubt.expiry.look()
    batch = CommitBatch(name, 1, "run", True, b"", parts, skip_if_recorded=True)
    assert coordinator.commit(batch) is Outcome.COMMITTED
    coordinator.close()
    spied.close()


def test_a_partition_that_cannot_be_renewed_keeps_no_other_from_it(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    topic = broker.new_topic(partitions=3)
    write = Write(broker, topic, name="long")
    for number in range(3):
        write.stage(number, (b"a",), partition=number)
    closed = next(iter(broker.broker.host.hosted.values()))

    def not_here(_: object) -> None:
        raise errors.NotLeader(broker_id=0, partition=closed.label)

    monkeypatch.setattr(closed.staged, "renew", not_here)
    clock.advance(20 * HOUR)
    broker.stub.Renew(pb.RenewRequest(family=family_of(write.producer), batch_id=0), timeout=30)
    clock.advance(20 * HOUR)
    assert loose(broker, write) == 3  # they count together


def test_a_clock_that_jumps_expires_nothing(start_broker: StartBroker) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    topic = broker.new_topic()
    prepared, staged = Write(broker, topic, name="prepared"), Write(broker, topic, name="staged")
    prepared.stage(0, (b"a",))
    staged.stage(0, (b"b",))
    assert prepared.prepare() == [None]
    session, in_doubt = broker.broker.host.metadata.session, broker.broker.in_doubt
    done = replace(prepared.decision(-1, done=True), transactional_id="done", stays=False, decided_us=clock.now_us())
    decisions.write_decision(session, done)
    clock.wall_seconds += 1000 * HOUR
    clock.advance(600)  # old decisions are looked for again
    in_doubt.resolve(0)
    in_doubt.expiry.look()
    assert len(listed(broker)) == 2
    assert decisions.read_decision(session, "done").done
    clock.wall_seconds -= 2000 * HOUR
    in_doubt.resolve(0)
    in_doubt.expiry.look()
    assert prepared.apply() == [1]
    assert staged.prepare() == [None]
    assert staged.apply() == [2]


def test_a_restart_starts_the_life_of_what_is_staged_anew(start_broker: StartBroker) -> None:
    clock = ShiftedClock()
    broker = start_broker(clock=clock)
    write = Write(broker, broker.new_topic())
    write.stage(0, (b"a",))
    clock.advance(23 * HOUR)
    broker.stop()
    clock.advance(23 * HOUR)
    write.broker = broker = start_broker(clock=clock)
    assert loose(broker, write) == 1
    clock.advance(25 * HOUR)
    assert loose(broker, write) == 0


def test_a_deleted_topic_takes_what_was_staged_with_it(broker: RunningBroker, tmp_path: Path) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    assert list(tmp_path.rglob("*.staged"))
    broker.stub.DeleteTopic(broker_pb2.DeleteTopicRequest(name="t"), timeout=30)

    def is_gone() -> bool:  # os.walk passes over folders that vanish meanwhile
        return not any(name.endswith(".staged") for _, _, names in os.walk(tmp_path) for name in names)

    assert broker.broker.host.metadata.wait_until(is_gone, 30)
    (gone,) = write.apply()
    assert isinstance(gone, errors.UnknownTopicId)


@pytest.mark.parametrize(
    ("version", "batch_id", "uuid", "done", "said"),
    [
        (3, 5, b"mine", False, Resolution.WAIT),  # it was prepared at this very version
        (4, 4, b"else", True, Resolution.WAIT),  # an earlier batch was done meanwhile
        (4, 5, b"mine", False, Resolution.APPLY),
        (5, 5, b"mine", True, Resolution.DROP),
        (4, 5, b"else", False, Resolution.DROP),
        (4, 6, b"else", False, Resolution.DROP),
        (-1, -1, b"", False, Resolution.WAIT),
    ],
)
def test_the_action_for_a_prepared_set_follows_the_decision(
    version: int, batch_id: int, uuid: bytes, done: bool, said: Resolution
) -> None:
    prepared = PreparedSet(TRANSACTION, PRODUCER, 5, b"mine", 3, ())
    topics = (DecidedTopic(b"topic", "t", ((0, 3),)),)
    decision = Decision(TRANSACTION, version, batch_id, uuid, "run", b"", done, topics)
    assert resolution(decision, prepared, b"topic", 2) is said


# --- without a port ------------------------------------------------------------------------------------------------


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    directory = LogDirectory(tmp_path / "data")
    yield Hosted(directory)
    directory.close()


@pytest.fixture
def jobs() -> Iterator[StagedJobs]:
    jobs = StagedJobs(0)
    yield jobs
    jobs.stop()


def staged_at(hosted: Any, number: int = 0, *, part: int = 0, name: str = TRANSACTION) -> pb.StagedPart:
    """A part of one batch, staged in a partition."""
    uuid = os.urandom(16)
    body = staged_batch(b"value", batch_id=0, part=part, sequence=0, producer=producer_id_of(name))
    request = data_pb.StageRequest()
    request.partitions.add(topic_id=TOPIC_ID, partition=number, uuid=uuid, length=len(body))
    [staged] = staging.StageCall(request, memoryview(bytearray(body)), hosted).write().partitions
    assert not staged.HasField("error"), staged
    return pb.StagedPart(uuid=uuid, part=part, batches=1, length=len(body))


def preparing(*parts: pb.StagedPart, version: int = -1) -> pb.PrepareRequest:
    request = pb.PrepareRequest(
        transactional_id=TRANSACTION, producer_id=PRODUCER, commit_uuid=b"c" * 16, version=version
    )
    request.partitions.add(topic_id=TOPIC_ID, partition=0, parts=parts)
    return request


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"transactional_id": "", "producer_id": producer_id_of("")},
            "a transactional id must have 1 to 1000 characters",
        ),
        ({"transactional_id": "é" * 1001, "producer_id": producer_id_of("é" * 1001)}, "must have 1 to 1000 characters"),
        ({"producer_id": PRODUCER + 1}, f"producer id {PRODUCER + 1} is not that of '{TRANSACTION}'"),
        ({"batch_id": -1}, "batch_id must be >= 0, got -1"),
        ({"commit_uuid": b"short"}, "the uuid of a commit must have 16 bytes, not 5"),
    ],
)
@pytest.mark.parametrize("kind", [pb.PrepareRequest, pb.ApplyRequest])
def test_a_request_names_a_transaction_its_producer_and_its_commit(
    hosted: Any, jobs: StagedJobs, kind: Any, wrong: dict[str, Any], says: str
) -> None:
    named = {"transactional_id": TRANSACTION, "producer_id": PRODUCER, "commit_uuid": b"c" * 16, **wrong}
    ask = staging.prepare if kind is pb.PrepareRequest else staging.apply
    with pytest.raises(errors.InvalidRequest, match=re.escape(says)):
        ask(kind(**named), hosted, jobs, 30)


def test_an_invalid_uuid_is_refused_in_its_partition_only(hosted: Any, jobs: StagedJobs) -> None:
    with pytest.raises(errors.InvalidRequest, match="the uuid of a commit must have 16 bytes, not 1"):
        staging.forget(pb.ForgetStagedRequest(commit_uuid=b"c"), hosted)
    good = staged_at(hosted)
    [prepared] = staging.prepare(
        preparing(pb.StagedPart(uuid=b"u", batches=1, length=good.length)), hosted, jobs, 30
    ).partitions
    assert "the uuid of a part must have 16 bytes, not 1" in str(error_from_wire(prepared.error))
    body = staged_batch(b"value", batch_id=0, part=0, sequence=0)
    request = data_pb.StageRequest()
    request.partitions.add(topic_id=TOPIC_ID, partition=0, uuid=b"u", length=len(body))
    [staged] = staging.StageCall(request, memoryview(bytearray(body)), hosted).write().partitions
    assert "the uuid of a part must have 16 bytes, not 1" in str(error_from_wire(staged.error))


def test_a_request_without_partitions_or_parts_is_refused(hosted: Any, jobs: StagedJobs) -> None:
    with pytest.raises(errors.InvalidRequest, match="a stage request's partitions have 0 bytes, but its body has 0"):
        staging.StageCall(data_pb.StageRequest(), memoryview(bytearray()), hosted)
    [prepared] = staging.prepare(preparing(), hosted, jobs, 30).partitions
    assert "the parts of partition 0 must be in ascending order" in str(error_from_wire(prepared.error))


@pytest.mark.parametrize(("retention_ms", "within_ms"), [(1, 1), (400_000, 100_000), (1 << 40, 86_400_000)])
def test_tasks_renew_several_times_within_the_retention(hosted: Any, retention_ms: int, within_ms: int) -> None:
    hosted.settings = BrokerSettings.parse({"transaction.staged.retention.ms": retention_ms})
    assert staging.renew(pb.RenewRequest(), hosted).renew_within_ms == within_ms


def test_what_is_staged_is_listed_with_its_facts_for_one_transaction_or_for_all(hosted: Any, jobs: StagedJobs) -> None:
    before_us = time.time_ns() // 1000
    staged_at(hosted, 1, name="other")
    part = staged_at(hosted)
    [of_it] = staging.list_staged(pb.ListStagedRequest(transactional_id=TRANSACTION), hosted).sets
    assert (of_it.topic, of_it.partition, of_it.producer_id, of_it.transactional_id) == ("t", 0, PRODUCER, TRANSACTION)
    assert (of_it.version, of_it.parts, of_it.length, of_it.commit_uuid) == (-1, 1, part.length, b"")
    assert before_us - 1_000_000 <= of_it.staged_us <= time.time_ns() // 1000 + 1_000_000
    staging.prepare(preparing(part, version=4), hosted, jobs, 30)
    first, second = staging.list_staged(pb.ListStagedRequest(), hosted).sets
    assert (first.transactional_id, first.version, first.commit_uuid) == (TRANSACTION, 4, b"c" * 16)
    assert (second.transactional_id, second.partition, second.version) == ("", 1, -1)
    sizes = [partition.staged.size_bytes for partition in hosted.partitions]
    assert all(sizes)
    assert staging.staged_bytes(hosted) == sum(sizes)


def test_a_hint_that_one_partition_cannot_take_reaches_the_others(hosted: Any) -> None:
    part = staged_at(hosted)
    request = pb.AbortStagedRequest()
    request.partitions.add(topic_id=bytes(16), partition=0, uuids=[part.uuid])
    request.partitions.add(topic_id=TOPIC_ID, partition=0, uuids=[part.uuid])
    staging.abort(request, hosted)
    assert not hosted.partitions[0].staged.all()


@pytest.mark.parametrize("stays", [False, True])
def test_a_partition_that_forgets_learns_whether_the_decision_stays(
    hosted: Any, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    forgotten: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(hosted.partitions[0].staged, "forget", lambda *facts: forgotten.append(facts))
    request = pb.ForgetStagedRequest(transactional_id=TRANSACTION, batch_id=3, stays=stays)
    request.partitions.add(topic_id=TOPIC_ID, partition=0)
    staging.forget(request, hosted)
    assert forgotten == [(TRANSACTION, 3, stays)]


def test_a_prepare_waits_behind_the_work_on_its_partition_and_says_that_it_queues(
    hosted: Any, jobs: StagedJobs
) -> None:
    part = staged_at(hosted)
    partition = hosted.partitions[0]
    may_go_on = threading.Event()
    before = jobs.syncs.ask(partition, "other", may_go_on.wait)
    try:
        [answer] = staging.prepare(preparing(part), hosted, jobs, 0.1).partitions
        assert (answer.unfinished, answer.queued) == (True, True)
        assert answer.progress == sum(each.staged.work for each in hosted.partitions)
    finally:
        may_go_on.set()
        assert before.wait(60)
    [answer] = staging.prepare(preparing(part), hosted, jobs, 600).partitions
    assert (answer.unfinished, answer.queued, answer.progress) == (False, False, 0)


@pytest.mark.parametrize("size", ["unsynced_bytes", "prepared_bytes"])
def test_a_large_prepare_is_a_job_of_its_commit_and_version(
    hosted: Any, jobs: StagedJobs, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    part = staged_at(hosted)
    large = 1 << 40
    monkeypatch.setattr(StagedWrites, size, property(lambda _: large) if size[0] == "u" else lambda *_: large)
    asked: list[Any] = []
    ask = jobs.syncs.ask
    monkeypatch.setattr(jobs.syncs, "ask", lambda *facts: asked.append(facts[:2]) or ask(*facts))
    [answer] = staging.prepare(preparing(part, version=4), hosted, jobs, 600).partitions
    assert not answer.unfinished
    assert asked == [(hosted.partitions[0], (b"c" * 16, 4))]


def test_no_request_is_worked_at_for_longer_than_half_of_its_time(hosted: Any) -> None:
    hosted.clock = ManualClock()
    assert staging._turn_end(hosted, 1.0) == 0.5
    assert staging._turn_end(hosted, 600.0) == staging.TURN_SECONDS


def test_the_resolver_writes_no_decision_again_to_which_it_adds_nothing(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "broker.replica.in_doubt")
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    session = broker.broker.host.metadata.session
    both = DecidedTopic(topic, "t", ((0, 1),))
    decisions.write_decision(session, replace(write.decision(-1), topics=(both,)))
    in_doubt = broker.broker.in_doubt
    in_doubt.resolve(0)
    first = decisions.read_decision(session, TRANSACTION)
    assert first.applied == (DecidedTopic(topic, "t", ((0, 0),)),)
    assert first.decided_us > 1  # as it was written now
    in_doubt.resolve(0)
    assert decisions.read_decision(session, TRANSACTION) == first
    assert caplog.text.count("done=applied") == 1


def test_a_set_whose_decision_is_made_as_its_version_is_to_be_raised_is_looked_at_anew_and_no_failure(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = broker.new_topic()
    write = Write(broker, topic)
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    in_doubt, raise_version = broker.broker.in_doubt, decisions.raise_version

    def too_late(session: ZooKeeperSession, decision: Decision) -> int:
        decisions.write_decision(session, write.decision(-1))
        return raise_version(session, decision)

    monkeypatch.setattr(in_doubt, "_timeout", 0.0)
    monkeypatch.setattr(decisions, "raise_version", too_late)
    in_doubt.resolve(0)
    assert "transaction_not_resolved" not in caplog.text
    in_doubt.resolve(0)
    assert values_in(broker, topic) == [b"a"]


def test_a_partition_that_is_closed_while_it_is_resolved_keeps_no_other_from_it(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(partitions=2)
    write = Write(broker, topic)
    for number in range(2):
        write.stage(0, (b"a",), partition=number)
    assert write.prepare() == [None, None]
    host = broker.broker.host
    decisions.write_decision(host.metadata.session, write.decision(-1))
    asked: list[str] = []

    def apply_but_to_the_first(partition: Partition) -> Callable[..., Any]:
        apply = partition.staged.apply

        def applied(*arguments: Any) -> Any:
            asked.append(partition.label)
            if len(asked) == 1:
                raise partition.role.not_here()
            return apply(*arguments)

        return applied

    for partition in host.hosted.values():
        monkeypatch.setattr(partition.staged, "apply", apply_but_to_the_first(partition))
    broker.broker.in_doubt.resolve(0)
    assert sorted(asked) == ["t-0", "t-1"]
    assert values_in(broker, topic, int(asked[1][-1])) == [b"a"]


def test_a_decision_that_another_leader_writes_on_meanwhile_is_looked_at_anew_and_no_failure(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = Write(broker, broker.new_topic())
    write.stage(0, (b"a",))
    assert write.prepare() == [None]
    in_doubt, session = broker.broker.in_doubt, broker.broker.host.metadata.session
    decisions.write_decision(session, write.decision(-1))

    def another_writes(topic: DecidedTopic) -> bool:
        decisions.raise_version(session, decisions.read_decision(session, TRANSACTION))
        return False

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(in_doubt, "_is_deleted", another_writes)
        in_doubt.resolve(0)
    assert not decisions.read_decision(session, TRANSACTION).done
    assert "transaction_not_closed" not in caplog.text
    in_doubt.resolve(0)
    assert decisions.read_decision(session, TRANSACTION).done


def test_an_answer_with_an_error_says_nothing_else() -> None:
    answer = pb.AppliedPartition(end_offset=5, unfinished=True)
    with staging._errors_in(answer):
        raise errors.DiskFull(directory="/data", reason="full")
    assert (answer.end_offset, answer.unfinished) == (0, False)
    assert answer.HasField("error")
