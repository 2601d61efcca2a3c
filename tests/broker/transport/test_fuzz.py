"""Random and mutated bytes at both ports: no crash, no hang, no thread, descriptor or memory left behind.

Seeds are fixed; a failure names the case, which is made from the seed alone.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import psutil
import pytest

from kafkalog.format.batch import iter_batches
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.wire import broker_pb2, frames, transactions_pb2
from kafkalog.wire import dataport_pb2 as pb
from tests.broker.conftest import RunningBroker
from tests.broker.data_port_client import DataPortClient, a_batch, append_frame, fetch_frame, stage_frame

CASES = 250
PRODUCER = producer_id_of("x")
_OF_GRPC = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
"""gRPC keeps some of both, more or fewer by the moment. Eventfds of ours are counted by `own_eventfds`."""


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, replaced by boundary numbers."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed) or 1)
        kind = dice.randrange(5)
        if kind == 0 and changed:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del changed[at : at + dice.randint(1, 40)]
        elif kind == 2:
            changed[at:at] = changed[at : at + dice.randint(1, 40)]
        elif kind == 3:
            number = dice.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 20, (1 << 20) + 1, 70_000])
            changed[at : at + 4] = struct.pack("<I", number)
        else:
            changed[at:at] = dice.randbytes(dice.randint(1, 30))
    return bytes(changed)


def _staged_batch(sequence: int) -> bytes:
    return a_batch(
        [b"s"], producer_id=PRODUCER, producer_epoch=0, base_sequence=sequence, transaction_batch_id=0, part=1
    )


def streams(topic: bytes, seed: int) -> Iterator[bytes]:
    """What a broken client might send, hello included."""
    dice = random.Random(seed)
    good = [
        append_frame(1, topic, a_batch([b"a", b"b"])),
        append_frame(2, topic, a_batch([b"x" * 5000], codec=2)),
        append_frame(3, topic, a_batch(), acks=0),
        append_frame(4, topic, a_batch([b"s"], producer_id=5, producer_epoch=0, base_sequence=0)),
        fetch_frame(5, topic, 0),
        fetch_frame(6, topic, 0, max_wait_ms=50, min_bytes=1 << 30),
        append_frame(7, topic, a_batch([bytes(200_000)])),
        stage_frame(8, topic, _staged_batch(0) + _staged_batch(1)),
        stage_frame(9, topic, _staged_batch(2)),
    ]
    for _ in range(CASES):
        kind = dice.randrange(4)
        if kind == 0:
            yield dice.randbytes(dice.randint(0, 300))
        elif kind == 1:
            yield frames.hello() + dice.randbytes(dice.randint(0, 2000))
        elif kind == 2:
            yield frames.hello() + b"".join(
                mutated(frame, dice) if dice.random() < 0.5 else frame for frame in dice.choices(good, k=4)
            )
        else:
            stream = b"".join(dice.choices(good, k=3))
            yield frames.hello() + stream[: dice.randrange(len(stream))]


def everything_is_given_back(
    broker: RunningBroker, threads: int, descriptors: int, eventfds: set[int]
) -> Callable[[], list[str]]:
    """A function that tells what is not."""

    def look() -> list[str]:
        gc.collect()
        counters = broker.counters()
        kept = [name for name in ("dataport.connections", "dataport.reserved_bytes") if counters[name]]
        if threading.active_count() > threads:
            kept += [f"more than {threads} threads", *(thread.name for thread in threading.enumerate())]
        if _count(_descriptors()) > descriptors:
            kept += [f"more than {descriptors} descriptors", *_descriptors()]
        return kept + [f"eventfd {descriptor}" for descriptor in tuple(eventfds)]

    return look


def _descriptors() -> list[str]:
    """What this process has open."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, closed by now
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return targets


def _count(descriptors: list[str]) -> int:
    return sum(each not in _OF_GRPC for each in descriptors)


def own_eventfds(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Eventfds that Python code makes from now on and has not closed."""
    found: set[int] = set()
    make, close = os.eventfd, os.close

    def made(*given: int) -> int:
        found.add(descriptor := make(*given))
        return descriptor

    def closed(descriptor: int) -> None:
        found.discard(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "eventfd", made)
    monkeypatch.setattr(os, "close", closed)
    return found


def test_broken_clients_of_the_data_port_harm_nobody(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    seed = 20110612
    eventfds = own_eventfds(monkeypatch)
    with broker.client() as good:
        good.append(topic, a_batch())
        good.send(stage_frame(1, topic, _staged_batch(0)))  # its file stays open
        good.reply()
        broker.counters()
        assert len(eventfds) == 1
        threads, descriptors = threading.active_count() - 1, _count(_descriptors()) - 2
        end = 0
        for number, stream in enumerate(streams(topic, seed)):
            with broker.client(greet=False) as broken:
                try:
                    broken.send(stream)
                    broken.sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # it was cut off already
                assert broken.is_closed(), f"case {number} of seed {seed} hangs: {stream[:200]!r}"
            if number % 25 == 0:
                appended = good.append(topic, a_batch())
                assert not appended.HasField("error")
                assert appended.base_offset >= end
                end = appended.base_offset
    pause = threading.Event()
    look = everything_is_given_back(broker, threads, descriptors, eventfds)
    for _ in range(300):
        if not look():
            break
        pause.wait(0.05)
    kept = look()
    assert not kept, "\n".join(kept)
    assert "connection_failed" not in caplog.text
    assert "append_failed" not in caplog.text
    assert "fetch_failed" not in caplog.text
    assert "staged_write_failed" not in caplog.text
    with broker.client() as good:  # whatever got in is whole: it reads to its end
        offset, last = 0, good.fetch(topic, 0)[0].end_offset
        while offset < last:
            part, body = good.fetch(topic, offset)
            assert not part.HasField("error")
            for header, _ in iter_batches(memoryview(body)):
                offset = header.end_offset


def test_connections_that_come_and_go_leave_no_memory(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    large = append_frame(1, topic, a_batch([os.urandom(3 << 20)]))

    def round_() -> int:
        for number in range(40):
            with broker.client() as client:
                if number % 4 == 0:
                    client.send(large)
                    client.reply()
                elif number % 4 == 1:
                    client.send(large[: len(large) // 2])  # and goes away
                else:
                    client.append(topic, a_batch([os.urandom(1000)]))
                    client.fetch(topic, 0)
        return psutil.Process().memory_info().rss

    gc.disable()  # memory has to go with the connection, not when the collector happens to run
    try:
        round_()
        before = round_()
        after = max(round_() for _ in range(3))
    finally:
        gc.enable()
    assert after - before < 16 << 20


def test_random_bytes_at_the_grpc_port_harm_nobody(broker: RunningBroker) -> None:
    dice = random.Random(20110612)
    for _ in range(40):
        with DataPortClient(broker.broker.grpc_port, greet=False) as broken:
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if dice.random() < 0.5 else b""
            try:
                broken.send(preface + dice.randbytes(dice.randint(1, 500)))
                broken.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert broken.is_closed()
    assert broker.counters()


def test_mutated_messages_at_the_grpc_port_are_answered(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(stage_frame(1, topic, _staged_batch(0)))
        assert client.reply()[0].stage.partitions[0].batches == 1
    part = pb.AppendPartition(topic_id=topic, length=len(a_batch()))
    good = {
        "Append": broker_pb2.InlineAppendRequest(
            request=pb.AppendRequest(acks=1, timeout_ms=50, partitions=[part]), body=a_batch()
        ),
        "Pull": pb.FetchRequest(
            max_wait_ms=5, min_bytes=1, partitions=[pb.FetchPartition(topic_id=topic, offset=0, max_bytes=1000)]
        ),
        "CreateTopic": broker_pb2.CreateTopicRequest(name="new", partitions=1, config={"retention.ms": "5"}),
        "AlterTopic": broker_pb2.AlterTopicRequest(name="t", set={"retention.ms": "5"}),
        "DescribeTopics": broker_pb2.DescribeTopicsRequest(names=["t"], ids=[topic]),
        "ListOffsets": broker_pb2.ListOffsetsRequest(partitions=[broker_pb2.ListOffset(topic_id=topic)]),
        "DeleteRecords": broker_pb2.DeleteRecordsRequest(topic_id=topic, before_offset=0),
        "CommitOffsets": broker_pb2.CommitOffsetsRequest(
            group="g", offsets=[broker_pb2.GroupOffset(topic="t", partition=0, offset=1)]
        ),
        "Prepare": transactions_pb2.PrepareRequest(
            transactional_id="x",
            producer_id=PRODUCER,
            batch_id=0,
            commit_uuid=b"c" * 16,
            version=-1,
            partitions=[
                transactions_pb2.PreparePartition(
                    topic_id=topic,
                    parts=[
                        transactions_pb2.StagedPart(uuid=b"u" * 16, part=1, batches=1, length=len(_staged_batch(0)))
                    ],
                )
            ],
        ),
        "Apply": transactions_pb2.ApplyRequest(
            transactional_id="x",
            producer_id=PRODUCER,
            batch_id=0,
            commit_uuid=b"c" * 16,
            partitions=[transactions_pb2.TransactionPartition(topic_id=topic)],
        ),
        "ForgetStaged": transactions_pb2.ForgetStagedRequest(
            transactional_id="x", partitions=[transactions_pb2.TransactionPartition(topic_id=topic)]
        ),
        "AbortStaged": transactions_pb2.AbortStagedRequest(
            partitions=[transactions_pb2.AbortStagedPartition(topic_id=topic, uuids=[b"u" * 16])]
        ),
        "ListStaged": transactions_pb2.ListStagedRequest(transactional_id="x"),
        "CommittedOffsets": broker_pb2.CommittedOffsetsRequest(group="g", topics=["t"]),
    }
    dice = random.Random(20110612)
    for number in range(220):
        name = dice.choice(sorted(good))
        message = mutated(good[name].SerializeToString(), dice)
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        method = broker.channel.unary_unary(f"/kafkalog.wire.Broker/{name}")
        call = method.future(message, timeout=30)
        assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, (number, name, message)
        assert "the broker failed on this request" not in (call.details() or ""), (name, message)
    with broker.client() as client:
        assert not client.append(topic, a_batch()).HasField("error")
