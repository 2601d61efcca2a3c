"""The data port over real sockets: order, waiting, limits, and peers that misbehave."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from broker.storage.log import Log
from broker.transport import connection
from broker.transport.connection import Connection
from broker.transport.dataport import DataPort
from kafkalog.errors import (
    CorruptBatch,
    InvalidRequest,
    KafkalogError,
    OffsetOutOfRange,
    StorageFailed,
    UnknownPartition,
    UnknownTopicId,
)
from kafkalog.format.batch import iter_batches
from kafkalog.format.columns import decode_columns
from kafkalog.net.data import DataConnection
from kafkalog.versions import VersionRange
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames
from kafkalog.wire.broker_pb2 import DeleteTopicRequest
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import (
    DataPortClient,
    a_batch,
    append_frame,
    ask_for_more_than_sockets_hold,
    fetch_frame,
    stage_frame,
)
from tests.threads import join_all
from tests.waiting import waited_for
from tests.whole_batch import check_batch


def error_of(part: pb.AppendedPartition | pb.FetchedPartition | pb.ReplyHeader) -> KafkalogError:
    assert part.HasField("error"), part
    return frames.error_from_wire(part.error)


def values_in(body: bytes) -> list[bytes]:
    """The records' values in the whole batches of a fetch."""
    found: list[bytes] = []
    for header, batch in iter_batches(memoryview(body)):
        found += decode_columns(header, batch).column("value").to_pylist()
    return found


# --- appends and fetches -------------------------------------------------------------------------------------------


def test_pipelined_appends_are_answered_in_order_and_read_back_as_sent(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    count = 3000
    with broker.client() as client:
        sender = threading.Thread(
            target=lambda: client.send(
                b"".join(append_frame(number, topic, a_batch([b"%d" % number])) for number in range(count))
            )
        )
        sender.start()
        for number in range(count):
            header, _ = client.reply()
            assert header.correlation_id == number
            assert header.append.partitions[0].base_offset == number
        join_all([sender], 60)
        values: list[bytes] = []
        while len(values) < count:
            part, body = client.fetch(topic, len(values), max_bytes=100_000)
            assert part.end_offset == count
            values += values_in(body)
        assert values == [b"%d" % number for number in range(count)]


def test_more_requests_than_are_kept_pending_are_all_answered(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.connection._PENDING_BYTES_MAX", 3000)  # of about five
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(b"".join(fetch_frame(number, topic, 0) for number in range(50)))
        assert [client.reply()[0].correlation_id for _ in range(50)] == list(range(50))


def frame_of(correlation_id: int, **request: pb.AppendRequest | pb.FetchRequest | pb.StageRequest) -> bytes:
    header = pb.RequestHeader(correlation_id=correlation_id)
    for name, value in request.items():
        getattr(header, name).CopyFrom(value)
    return frames.frame_start(header.SerializeToString(), 0)


def held_syncs(log: Log, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have a log's syncs wait until the event is set."""
    log.begin_epoch(log.last_epoch)  # else the first append would wait for its sync
    may_sync, sync = threading.Event(), log._disk.sync

    def held_sync(fd: int) -> None:
        assert may_sync.wait(60)
        sync(fd)

    monkeypatch.setattr(log._disk, "sync", held_sync)
    return may_sync


@pytest.mark.parametrize("kind", ["fetch", "append", "stage"])
def test_what_waits_behind_an_ack_is_bounded_in_bytes_and_the_rest_stays_with_the_peer(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    topic = broker.new_topic(flush_messages=1)
    log = broker.broker.host.leader_of(topic, 0).log
    may_sync = held_syncs(log, monkeypatch)
    frame = {
        "fetch": frame_of(
            2, fetch=pb.FetchRequest(max_bytes=1, partitions=[pb.FetchPartition(topic_id=topic, max_bytes=1)] * 10_000)
        ),
        "append": frame_of(
            2, append=pb.AppendRequest(acks=1, partitions=[pb.AppendPartition(topic_id=topic, length=0)] * 1000)
        ),
        "stage": frame_of(2, stage=pb.StageRequest(partitions=[pb.StagePartition(topic_id=topic)] * 1000)),
    }[kind]
    count = (60 << 20) // len(frame)  # more than sockets hold
    sent = 0
    with broker.client() as client:
        client.send(append_frame(1, topic, a_batch(), timeout_ms=60_000))
        client.sock.settimeout(1)
        try:
            for _ in range(count):
                client.send(frame)
                sent += len(frame)
        except TimeoutError:
            pass
        [connection] = connections_of(broker)
        held = sum(each.held_bytes for each in connection._pending)
        assert sent < count * len(frame), "all of it was taken in"
        assert len(connection._pending) <= 5
        assert held == connection._pending_bytes < 6 << 20
        may_sync.set()
        client.sock.settimeout(30)
        for number in (1, 2, 2):
            assert client.reply()[0].correlation_id == number


def test_a_request_that_names_too_many_partitions_is_refused_as_a_whole(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(
            append_frame(1, topic, a_batch())
            + frame_of(2, append=pb.AppendRequest(acks=1, partitions=[pb.AppendPartition()] * 1001))
            + frame_of(3, stage=pb.StageRequest(partitions=[pb.StagePartition()] * 1001))
            + frame_of(4, fetch=pb.FetchRequest(partitions=[pb.FetchPartition()] * 50_001))
            + fetch_frame(5, topic, 0)
            + frame_of(6, append=pb.AppendRequest(acks=0, partitions=[pb.AppendPartition()] * 1001))
            + fetch_frame(7, topic, 0)
        )
        replies = [client.reply()[0] for _ in range(5)]
        assert client.is_closed()
    assert [reply.correlation_id for reply in replies] == [1, 2, 3, 4, 5]
    assert [str(error_of(reply)) for reply in replies[1:4]] == [
        "invalid request: the append names 1001 partitions; the limit for one request is 1000",
        "invalid request: the stage names 1001 partitions; the limit for one request is 1000",
        "invalid request: the fetch names 50001 partitions; the limit for one request is 50000",
    ]


def test_a_fetch_over_the_bound_of_what_may_wait_is_answered_by_what_comes_behind_it(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.connection._PENDING_BYTES_MAX", 500)
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(fetch_frame(1, topic, 0, max_wait_ms=60_000))
        [connection] = connections_of(broker)
        waited_for(lambda: bool(connection._waiter.partitions))
        client.send(fetch_frame(2, topic, 0))
        client.sock.settimeout(15)
        assert [client.reply()[0].correlation_id for _ in range(2)] == [1, 2]


def test_large_and_small_frames_in_turn_come_through_one_connection(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    sizes = [3 << 20, 10, 2 << 20, 3 << 20, 200_000, 10, 10, 4 << 20, 1 << 20]
    with broker.client() as client:
        stream = b"".join(append_frame(i, topic, a_batch([bytes([i]) * size])) for i, size in enumerate(sizes))
        sender = threading.Thread(target=client.send, args=(stream,))
        sender.start()
        assert [client.reply()[0].append.partitions[0].base_offset for _ in sizes] == list(range(len(sizes)))
        join_all([sender], 60)
        for number, size in enumerate(sizes):
            assert values_in(client.fetch(topic, number, max_bytes=1)[1])[0] == bytes([number]) * size


def test_one_request_for_several_partitions_fails_for_each_alone(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    good, bad = a_batch([b"good"]), bytearray(a_batch([b"bad"]))
    bad[-9] ^= 1
    parts = [
        pb.AppendPartition(topic_id=topic, partition=number, length=len(batch))
        for number, batch in ((0, good), (1, bad), (2, good))
    ]
    request = pb.RequestHeader(correlation_id=9, append=pb.AppendRequest(acks=1, partitions=parts))
    with broker.client() as client:
        body = good + bytes(bad) + good
        client.send(frames.frame_start(request.SerializeToString(), len(body)) + body)
        header, _ = client.reply()
        first, second, third = header.append.partitions
        assert first.base_offset == 0
        assert not first.HasField("error")
        assert isinstance(error_of(second), CorruptBatch)
        assert isinstance(error_of(third), UnknownPartition)
        assert values_in(client.fetch(topic, 0)[1]) == [b"good"]
        assert client.fetch(topic, 0, partition=1)[0].end_offset == 0


def test_one_answer_opens_a_bounded_number_of_files(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch([b"v"]))
        request = pb.RequestHeader(correlation_id=1)
        request.fetch.min_bytes = 1 << 20  # not to be waited for: there will be no more in this answer
        request.fetch.max_wait_ms = 30_000
        for _ in range(5000):
            request.fetch.partitions.add(topic_id=topic, partition=0, offset=0, max_bytes=1)
        client.send(frames.frame_start(request.SerializeToString(), 0))
        header, body = client.reply()
        answers = header.fetch.partitions
        assert [bool(part.length) for part in answers] == [True] * 500 + [False] * 4500
        assert sum(part.length for part in answers) == len(body)
        assert all(part.end_offset == 1 and not part.HasField("error") for part in answers)


def test_limits_of_all_time_are_limits_like_others(start_broker: StartBroker) -> None:
    long_max = (1 << 63) - 1
    broker = start_broker(
        connections_max_idle_ms=long_max, send_timeout_ms=long_max, log_retention_check_interval_ms=long_max
    )
    topic = broker.new_topic()
    with broker.client() as client:
        for number in range(3):
            assert client.append(topic, a_batch([bytes(4 << 20)])).base_offset == number
        client.send(fetch_frame(1, topic, 0, max_bytes=64 << 20))  # fills the socket: it waits to send
        header, body = client.reply()
        assert len(body) == header.fetch.partitions[0].length > 12 << 20
        assert client.fetch(topic, 3)[0].end_offset == 3


def test_a_log_that_cannot_be_read_while_it_is_sent_ends_its_directory_and_the_client_gets_the_error(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    directory = broker.broker.host._directory
    told: list[KafkalogError] = []
    monkeypatch.setattr(directory, "on_failed", told.append)

    def sendfile(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with broker.client() as client:
        client.append(topic, a_batch())
        monkeypatch.setattr("broker.transport.connection.os.sendfile", sendfile)
        client.send(fetch_frame(1, topic, 0))
        assert client.is_closed()  # its answer had begun
    waited_for(lambda: bool(told))
    with broker.client() as client:
        error = error_of(client.fetch(topic, 0)[0])
        assert isinstance(error, StorageFailed)
        assert "reading for t-0: Input/output error" in str(error) == str(told[0])
        assert isinstance(error_of(client.append(topic, a_batch())), StorageFailed)


def test_acks_all_of_one_replica_is_the_leaders_and_another_acks_is_refused(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        assert client.append(topic, a_batch(), acks=-1).base_offset == 0
        assert "acks=7" in str(error_of(client.append(topic, a_batch(), acks=7)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch[:-8],
        lambda batch: batch[:50],
        lambda batch: batch[:20] + bytes([batch[20] ^ 1]) + batch[21:],
        lambda batch: batch[:60] + bytes([batch[60] ^ 1]) + batch[61:],
        lambda batch: batch + b"12345678",
        lambda batch: b"",
    ],
)
def test_a_damaged_batch_is_refused_and_nothing_of_it_is_written(
    broker: RunningBroker, spoil: Callable[[bytes], bytes]
) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        error = error_of(client.append(topic, spoil(a_batch([b"a", b"b"]))))
        assert isinstance(error, CorruptBatch | InvalidRequest)
        assert "t-0" in str(error)
        assert client.append(topic, a_batch()).base_offset == 0


def test_batches_that_are_whole_but_lie_are_refused(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    liars = [
        a_batch([b"a"], last_offset_delta=5),
        a_batch([b"a"], producer_id=5),
        a_batch([b"a"], producer_id=-7, producer_epoch=0, base_sequence=0),
    ]
    with broker.client() as client:
        for liar in liars:
            assert isinstance(error_of(client.append(topic, liar)), CorruptBatch)
        assert client.append(topic, a_batch()).base_offset == 0


def test_a_batch_over_the_topics_limit_is_refused_by_its_size(broker: RunningBroker) -> None:
    topic = broker.new_topic(max_message_bytes=2000)
    with broker.client() as client:
        error = error_of(client.append(topic, a_batch([bytes(3000)])))
        assert "max.message.bytes of 2000" in str(error)
        assert client.append(topic, a_batch([bytes(1000)])).base_offset == 0


def test_a_batch_of_just_the_topics_limit_is_taken(broker: RunningBroker) -> None:
    batch = a_batch([bytes(3000)])
    limits = len(batch), len(batch) - 1
    topics = [broker.new_topic(f"t{limit}", max_message_bytes=limit) for limit in limits]
    with broker.client() as client:
        appended, refused = (client.append(topic, batch) for topic in topics)
    assert not appended.HasField("error")
    assert f"max.message.bytes of {limits[1]}" in str(error_of(refused))


def test_a_producer_that_leaves_a_gap_is_refused_until_it_sends_in_order(broker: RunningBroker) -> None:
    topic = broker.new_topic()

    def numbered(sequence: int) -> bytes:
        return a_batch([b"%d" % sequence], producer_id=7, producer_epoch=0, base_sequence=sequence)

    with broker.client() as client:
        for correlation, sequence in enumerate((0, 2, 3, 1, 2, 1)):
            client.send(append_frame(correlation, topic, numbered(sequence)))
        answers = [client.reply()[0].append.partitions[0] for _ in range(6)]
        assert [answer.error.code for answer in answers] == [0, 33, 33, 0, 0, 0]
        assert [answer.base_offset for answer in answers] == [0, 0, 0, 1, 2, 1]  # the last was there already
        assert values_in(client.fetch(topic, 0)[1]) == [b"0", b"1", b"2"]


def test_compressed_batches_come_back_as_they_were_sent(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        for codec in (1, 2):
            client.append(topic, a_batch([b"%d" % codec * 1000] * 10, codec=codec))
        assert values_in(client.fetch(topic, 0)[1]) == [b"1" * 1000] * 10 + [b"2" * 1000] * 10


def test_a_fetch_is_sent_by_sendfile_from_its_hint_on(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        for number in range(20):
            client.append(topic, a_batch([b"%d" % number]))
        part, body = client.fetch(topic, 0, max_bytes=len(a_batch()) * 7)
        header = next(iter_batches(memoryview(body)))[0]
        consumed = sum(batch[0].length for batch in iter_batches(memoryview(body)))
        hint = pb.PositionHint(
            segment_base_offset=part.slice.segment_base_offset, position=part.slice.position + consumed
        )
        count = len(values_in(body))
        assert count == consumed // header.length == 7
        again, more = client.fetch(topic, count, hint=hint)
        assert again.slice == hint
        assert values_in(more) == [b"%d" % number for number in range(7, 20)]
        wrong = pb.PositionHint(segment_base_offset=0, position=12345)
        assert values_in(client.fetch(topic, 7, hint=wrong)[1]) == values_in(more)
        waited_for(lambda: broker.counters()["dataport.sendfile_bytes"] == len(body) + 2 * len(more))


def test_fetch_errors_stand_with_their_partition(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        assert isinstance(error_of(client.fetch(topic, 1)[0]), OffsetOutOfRange)
        assert isinstance(error_of(client.fetch(topic, 0, partition=1)[0]), UnknownPartition)
        assert error_of(client.fetch(b"?" * 16, 0)[0]).code == 11


def test_a_fetch_of_several_partitions_keeps_to_its_limit(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=3)
    batch = a_batch([bytes(1000)])
    parts = [pb.FetchPartition(topic_id=topic, partition=number, max_bytes=1 << 20) for number in range(3)]
    with broker.client() as client:
        for number in range(3):
            client.append(topic, batch * 4, partition=number)
        for max_bytes, lengths in (
            (len(batch) * 6, [4, 2, 0]),
            (len(batch) * 4, [4, 0, 0]),
            (1, [1, 0, 0]),
            (0, [4, 4, 4]),
        ):
            request = pb.FetchRequest(min_bytes=1, max_bytes=max_bytes, partitions=parts)
            header = pb.RequestHeader(correlation_id=1, fetch=request).SerializeToString()
            client.send(frames.frame_start(header, 0))
            reply, body = client.reply()
            assert [part.length // len(batch) for part in reply.fetch.partitions] == lengths
            assert len(body) == sum(part.length for part in reply.fetch.partitions)


# --- waiting -------------------------------------------------------------------------------------------------------


def wait_until_waiting(broker: RunningBroker, topic: bytes, count: int = 1) -> None:
    partition = broker.broker.host.leader_of(topic, 0)
    waited_for(lambda: len(partition.waiters) == count)


def test_a_waiting_fetch_is_answered_by_the_append_it_waits_for(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as reader, broker.client() as writer:
        reader.send(fetch_frame(1, topic, 0, max_wait_ms=30_000))
        wait_until_waiting(broker, topic)
        writer.append(topic, a_batch([b"news"]))
        header, body = reader.reply()
        assert values_in(body) == [b"news"]
        assert header.fetch.partitions[0].end_offset == 1


def test_a_fetch_waits_for_min_bytes_and_no_longer_than_its_time(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    size = len(a_batch([b"x"]))
    with broker.client() as reader, broker.client() as writer:
        reader.send(fetch_frame(1, topic, 0, max_wait_ms=30_000, min_bytes=2 * size))
        wait_until_waiting(broker, topic)
        writer.append(topic, a_batch([b"x"]))
        wait_until_waiting(broker, topic)
        assert not select.select([reader.sock], [], [], 0)[0]
        writer.append(topic, a_batch([b"x"]))
        assert len(reader.reply()[1]) == 2 * size
        reader.send(fetch_frame(2, topic, 2, max_wait_ms=20))
        header, body = reader.reply()
        assert body == b""
        assert header.fetch.partitions[0].end_offset == 2
        assert len(broker.broker.host.leader_of(topic, 0).waiters) == 0


def test_a_waiting_fetch_is_answered_at_once_when_something_queues_behind_it(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    with broker.client() as client:
        client.sock.settimeout(15)
        client.send(fetch_frame(1, topic, 0, max_wait_ms=30_000))
        wait_until_waiting(broker, topic)
        client.send(append_frame(2, topic, a_batch(), partition=1))
        assert client.reply()[0].correlation_id == 1
        assert client.reply()[0].append.partitions[0].base_offset == 0
        client.send(fetch_frame(3, topic, 0, max_wait_ms=30_000))
        wait_until_waiting(broker, topic)
        client.send(append_frame(4, topic, a_batch(), partition=1)[:20])  # its beginning is enough
        assert client.reply()[0].correlation_id == 3


def test_what_comes_between_a_look_and_the_registration_to_wait_is_not_missed(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    partition = broker.broker.host.leader_of(topic, 0)
    register = partition.waiters.register
    batch = bytearray(a_batch([b"news"]))

    def append_and_register(wake: Callable[[], None]) -> None:
        if partition.log.end_offset == 0:
            partition.append_as_leader([(check_batch(batch), memoryview(batch))])
        register(wake)

    monkeypatch.setattr(partition.waiters, "register", append_and_register)
    with broker.client() as client:
        client.sock.settimeout(15)
        assert values_in(client.fetch(topic, 0, max_wait_ms=30_000)[1]) == [b"news"]


def test_a_fetch_that_waits_at_a_topic_is_told_that_it_is_deleted(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as reader:
        reader.sock.settimeout(15)
        reader.send(fetch_frame(1, topic, 0, max_wait_ms=30_000))
        wait_until_waiting(broker, topic)
        broker.stub.DeleteTopic(DeleteTopicRequest(name="t"), timeout=30)
        assert isinstance(error_of(reader.reply()[0].fetch.partitions[0]), UnknownTopicId)


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_a_peer_that_goes_away_while_waiting_leaves_nothing_behind(broker: RunningBroker, resets: bool) -> None:
    topic = broker.new_topic()
    client = broker.client()
    client.send(fetch_frame(1, topic, 0, max_wait_ms=30_000))
    wait_until_waiting(broker, topic)
    if resets:  # as a process that was killed with answers unread
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    waited_for(lambda: broker.counters()["dataport.connections"] == 0)
    assert len(broker.broker.host.leader_of(topic, 0).waiters) == 0


def test_a_client_that_says_it_is_done_still_gets_its_answers(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(append_frame(1, topic, a_batch()) + fetch_frame(2, topic, 1, max_wait_ms=30_000))
        client.sock.shutdown(socket.SHUT_WR)
        assert client.reply()[0].append.partitions[0].base_offset == 0
        assert client.reply()[0].correlation_id == 2
        assert client.is_closed()


def test_producers_of_a_log_that_stands_still_delay_no_other_partition(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    stalled = broker.broker.host.leader_of(topic, 0)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(broker.client())
        reader.append(topic, a_batch(), partition=1)
        producers = [stack.enter_context(broker.client()) for _ in range(12)]  # more than there are turns
        stagers = [stack.enter_context(broker.client()) for _ in range(12)]
        counters = broker.broker.rpc_service._counters
        received = counters()["dataport.received_bytes"]
        with stalled.log._lock, stalled._staging._lock:  # as a disk that stalls under them would
            sent = 0
            for number, client in enumerate(producers):
                data = append_frame(number, topic, a_batch()) + append_frame(number, topic, a_batch())
                client.send(data)
                sent += len(data)
            for client in stagers:
                data = stage_frame(1, topic, a_batch(producer_id=5, producer_epoch=0, base_sequence=0,
                                                     transaction_batch_id=1, part=0))  # fmt: skip
                client.send(data)
                sent += len(data)
            waited_for(lambda: counters()["dataport.received_bytes"] == received + sent)
            assert reader.fetch(topic, 0, partition=1)[1]
            assert reader.append(topic, a_batch(), partition=1).base_offset == 1
        offsets = set()
        for client in producers:
            offsets |= {client.reply()[0].append.partitions[0].base_offset for _ in range(2)}
        assert offsets == set(range(24))
        for client in stagers:
            assert client.reply()[0].WhichOneof("reply") == "stage"


def test_requests_of_every_kind_in_one_wake_up_are_answered_in_order(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    staged = a_batch(producer_id=5, producer_epoch=0, base_sequence=0, transaction_batch_id=1, part=0)
    with broker.client() as client:
        client.send(
            append_frame(0, topic, a_batch())
            + append_frame(1, topic, a_batch())
            + fetch_frame(2, topic, 0)
            + stage_frame(3, topic, staged)
            + append_frame(4, topic, a_batch())
            + stage_frame(5, topic, staged)
            + fetch_frame(6, topic, 2)
        )
        replies = [client.reply() for _ in range(7)]
    assert [header.correlation_id for header, _ in replies] == list(range(7))
    kinds = [header.WhichOneof("reply") for header, _ in replies]
    assert kinds == ["append", "append", "fetch", "stage", "append", "stage", "fetch"]
    assert values_in(replies[2][1]) and values_in(replies[6][1])


def connections_of(broker: RunningBroker) -> list[Connection]:
    port = getattr(broker.broker.rpc_service._counters, "__self__")  # noqa: B009
    assert isinstance(port, DataPort)
    return list(port._connections)


def test_a_stop_that_comes_while_an_answer_is_sent_is_seen_once_it_is_sent(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    blocked = threading.Event()
    real = Connection._wait_writable

    def wait_writable(self: Connection) -> None:
        blocked.set()
        real(self)

    monkeypatch.setattr(Connection, "_wait_writable", wait_writable)
    with broker.client() as client:
        client.sock.settimeout(15)
        for _ in range(4):
            client.append(topic, a_batch([bytes(6 << 20)]))
        client.send(fetch_frame(1, topic, 0, max_bytes=64 << 20))
        assert blocked.wait(30)
        [connection] = connections_of(broker)
        connection.stop()
        waited_for(lambda: not select.select([connection._wake_fd], [], [], 0)[0])  # it has taken the wake
        assert len(client.reply()[1]) > 24 << 20
        assert client.is_closed()


def test_a_defect_in_parsing_ends_its_connection_and_takes_no_turn_along(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    real = Connection._take_frames
    failing = True

    def take_frames(self: Connection) -> Any:
        if failing:
            raise ZeroDivisionError("a defect")
        return real(self)

    monkeypatch.setattr(Connection, "_take_frames", take_frames)
    for _ in range(10):  # more than there are turns
        with broker.client() as client:
            client.send(append_frame(1, topic, a_batch()))
            assert client.is_closed()
    failing = False
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0


# --- group commit --------------------------------------------------------------------------------------------------


def test_with_flush_messages_1_the_ack_follows_the_flush_and_appends_do_not_wait_for_acks(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(flush_messages=1)
    log = broker.broker.host.leader_of(topic, 0).log
    may_sync = held_syncs(log, monkeypatch)
    with broker.client() as client:
        for number in range(50):
            client.send(append_frame(number, topic, a_batch([b"%d" % number])))
        waited_for(lambda: log.end_offset == 50)  # written, all of them, though the first is not acked
        assert not select.select([client.sock], [], [], 0)[0]
        assert log.flushed_offset == 0
        may_sync.set()
        assert [client.reply()[0].correlation_id for _ in range(50)] == list(range(50))
        assert log.flushed_offset == 50


def test_a_flush_that_ends_between_a_look_and_the_registration_to_wait_is_not_missed(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(flush_messages=1)
    partition = broker.broker.host.leader_of(topic, 0)
    register = partition.waiters.register
    monkeypatch.setattr(partition.log._flusher, "soon", lambda task: None)

    def flush_and_register(wake: Callable[[], None]) -> None:
        partition.log.flush()  # and nothing flushes, or wakes, after it
        register(wake)

    monkeypatch.setattr(partition.waiters, "register", flush_and_register)
    with broker.client() as client:
        client.sock.settimeout(15)
        client.send(append_frame(1, topic, a_batch(), timeout_ms=30_000))
        header, _ = client.reply()
    assert not header.append.partitions[0].HasField("error"), header


def test_an_ack_that_waits_too_long_for_its_flush_is_told_so(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(flush_messages=1)
    log = broker.broker.host.leader_of(topic, 0).log
    log.begin_epoch(log.last_epoch)  # else the append would wait for its sync
    may_sync = threading.Event()
    monkeypatch.setattr(log._disk, "sync", lambda fd: may_sync.wait(30))
    with broker.client() as client:
        error = error_of(client.append(topic, a_batch(), timeout_ms=50))
        assert str(error) == "the fdatasync of t-0 at the broker's disk did not finish within 50 ms"
        may_sync.set()


def test_a_failed_flush_is_told_to_everyone_who_waits_for_it(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic(flush_messages=1)
    log = broker.broker.host.leader_of(topic, 0).log

    def failing_sync(fd: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(log._disk, "sync", failing_sync)
    with broker.client() as client:
        client.send(append_frame(1, topic, a_batch()) + append_frame(2, topic, a_batch()))
        for _ in range(2):
            assert error_of(client.reply()[0].append.partitions[0]).code == 40  # StorageFailed
        assert error_of(client.fetch(topic, 0)[0]).code == 40


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_gets_its_error_and_the_connection_continues(start_broker: StartBroker) -> None:
    broker = start_broker(request_max_bytes=100_000)
    topic = broker.new_topic()
    with broker.client() as client, broker.client() as other:
        client.send(append_frame(1, topic, a_batch()))
        client.send(append_frame(2, topic, bytes(300_000)))
        client.send(append_frame(3, topic, a_batch()))
        assert client.reply()[0].append.partitions[0].base_offset == 0
        header, _ = client.reply()
        assert header.correlation_id == 2
        assert str(error_of(header)) == (
            "a request of 300000 bytes is larger than the broker's request.max.bytes of 100000"
        )
        assert client.reply()[0].append.partitions[0].base_offset == 1
        assert other.append(topic, a_batch()).base_offset == 2


def test_a_body_far_over_the_limit_gets_its_error_and_ends_the_connection(start_broker: StartBroker) -> None:
    broker = start_broker(request_max_bytes=100_000)
    topic = broker.new_topic()
    with broker.client() as client:
        header = append_frame(5, topic, b"")
        client.send(struct.pack("<I", len(header) - 8) + struct.pack("<I", 3_000_000_000) + header[8:])
        reply, _ = client.reply()
        assert reply.correlation_id == 5
        assert error_of(reply).code == 32
        assert client.is_closed()


def test_an_unreadable_header_is_reported_after_what_was_asked_before_and_ends_the_connection(
    broker: RunningBroker,
) -> None:
    topic = broker.new_topic()
    for garbage in (frames.frame_start(b"\xff" * 20, 0), struct.pack("<II", 1 << 30, 0)):
        with broker.client() as client:
            client.send(append_frame(1, topic, a_batch()) + garbage + append_frame(2, topic, a_batch()))
            assert client.reply()[0].HasField("append")
            reply, _ = client.reply()
            assert reply.correlation_id == 0
            assert reply.HasField("error")
            assert client.is_closed()


def test_what_its_peer_still_sends_resets_no_connection_that_is_ended(broker: RunningBroker) -> None:
    """A reset might overtake the last answer."""
    with broker.client() as client:
        client.send(frames.frame_start(b"\xff" * 20, 0) + bytes(200_000))
        assert client.reply()[0].HasField("error")
        waited_for(lambda: broker.counters()["dataport.connections"] == 0)
        assert client.sock.recv(1) == b""


def test_a_large_answer_comes_whole_though_its_connection_ends_behind_it_with_input_unread(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 60.0)
    topic = broker.new_topic()
    with broker.client() as client:
        for _ in range(8):
            client.append(topic, a_batch([bytes(1 << 20)]))
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # most of it waits in the broker
        asked = fetch_frame(1, topic, 0, max_bytes=9 << 20) + frames.frame_start(b"\xff" * 20, 0) + bytes(4 << 20)

        def send() -> None:
            with contextlib.suppress(OSError):
                client.sock.sendall(asked)

        sending = threading.Thread(target=send)
        sending.start()
        received = 0
        while piece := client.sock.recv(65536):
            received += len(piece)
        assert received > 8 << 20
        client.sock.shutdown(socket.SHUT_RDWR)
        join_all([sending], 60)


def test_an_unknown_request_is_reported_and_the_connection_continues(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(frames.frame_start(pb.RequestHeader(correlation_id=4).SerializeToString(), 3) + b"abc")
        reply, _ = client.reply()
        assert reply.correlation_id == 4
        assert isinstance(error_of(reply), InvalidRequest)
        assert client.append(topic, a_batch()).base_offset == 0


def test_an_error_under_acks_0_closes_the_connection_after_the_answers_before_it(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    with broker.client() as client:
        client.send(append_frame(1, topic, a_batch(), acks=0) * 3 + append_frame(2, topic, a_batch()))
        assert client.reply()[0].append.partitions[0].base_offset == 3
        client.send(append_frame(3, topic, a_batch()) + append_frame(4, topic, b"damaged", acks=0))
        assert client.reply()[0].correlation_id == 3
        assert client.is_closed()
    with broker.client() as client:  # what came behind it is not done, not even where it was taken out already
        client.send(append_frame(5, topic, b"damaged", acks=0) + fetch_frame(6, topic, 0) + fetch_frame(7, topic, 0))
        with pytest.raises(ConnectionError):
            client.reply()


def test_one_connection_too_many_is_told_so_and_the_others_continue(start_broker: StartBroker) -> None:
    broker = start_broker(max_connections=2)
    topic = broker.new_topic()
    with broker.client() as one, broker.client(), DataPortClient(broker.broker.data_port) as third:
        reply, _ = third.reply()
        assert str(error_of(reply)) == "the broker already has 2 connections (max.connections)"
        assert third.is_closed()
        assert one.append(topic, a_batch()).base_offset == 0
    waited_for(lambda: broker.counters()["dataport.connections"] == 0)
    counters = broker.counters()  # of connections that have ended
    assert (counters["dataport.requests"], counters["dataport.connections_refused"]) == (1, 1)
    with broker.client() as again:
        assert again.append(topic, a_batch()).base_offset == 1


def test_a_broker_that_comes_to_copy_is_one_connection_too_many_never(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that took all connections kept the followers out: these left the in-sync sets."""
    monkeypatch.setattr("broker.transport.dataport._HELLO_MS", 2000)  # a busy machine's pause is no silent peer
    broker = start_broker(max_connections=1)
    topic = broker.new_topic()
    port = broker.broker.data_port
    with broker.client() as one, socket.create_connection(("127.0.0.1", port)) as silent:
        assert one.append(topic, a_batch()).base_offset == 0
        silent.settimeout(30)
        assert silent.recv(frames.HELLO_SIZE) == frames.hello()
        with contextlib.ExitStack() as stack:
            answered = [fetches_as_replica(stack, port) for _ in range(5)]
        assert answered == [True] * 4 + [False], "a few for each broker that is registered"


def fetches_as_replica(stack: contextlib.ExitStack, port: int) -> bool:
    """Whether a connection that says that it is a follower's is served; it stays open."""
    replica = DataConnection("127.0.0.1", port, of_replica=True, connect_timeout_ms=30_000, request_timeout_ms=30_000)
    stack.enter_context(contextlib.closing(replica))
    asked = pb.RequestHeader(correlation_id=7, replica_fetch=pb.ReplicaFetchRequest(broker_id=1))
    replica.send([frames.frame_start(asked.SerializeToString(), 0)])
    header, _ = replica.receive()
    return (header.correlation_id, header.HasField("error")) == (7, False)


def test_more_bodies_than_the_pool_wait_their_turn_and_all_arrive(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.intake._CONTENDED_SECONDS", 60)  # a busy machine's pause is no silent peer
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)
    topic = broker.new_topic()
    bodies = [a_batch([bytes([65 + number]) * (2 << 20)]) for number in range(6)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(broker.client()) for _ in bodies]
        # One that begins a body and does not go on holds what it sent of it, and no more.
        first = append_frame(1, topic, bodies[0])
        clients[0].send(first[: len(first) // 2])
        waited_for(lambda: broker.counters()["dataport.reserved_bytes"] == len(first) // 2)
        senders = [
            threading.Thread(target=client.send, args=(append_frame(1, topic, body),))
            for client, body in zip(clients[1:], bodies[1:], strict=True)
        ]
        for sender in senders:
            sender.start()
        clients[0].send(first[len(first) // 2 :])
        for client in clients:
            assert not client.reply()[0].append.partitions[0].HasField("error")
        join_all(senders, 60)
    with broker.client() as reader:
        letters = set()
        for offset in range(6):
            letters.add(values_in(reader.fetch(topic, offset, max_bytes=1)[1])[0][:1])
    assert letters == {b"A", b"B", b"C", b"D", b"E", b"F"}
    waited_for(lambda: broker.counters()["dataport.reserved_bytes"] == 0)


def test_a_body_that_comes_too_slowly_is_cut_off_and_frees_its_bytes(start_broker: StartBroker) -> None:
    broker = start_broker(send_timeout_ms=100, request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)
    topic = broker.new_topic()
    with broker.client() as slow, broker.client() as other:
        slow.send(append_frame(1, topic, bytes(2 << 20))[:-1])
        other.send(append_frame(1, topic, a_batch([bytes(2 << 20)])))
        assert slow.is_closed()
        assert not other.reply()[0].append.partitions[0].HasField("error")


def test_bodies_that_are_announced_and_never_sent_hold_no_memory_and_hold_up_nobody(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)
    topic = broker.new_topic()
    whole = append_frame(1, topic, a_batch([bytes(2 << 20)]))
    with contextlib.ExitStack() as stack:
        for sent in (100, 100, 30_000, 30_000):  # of 2 MiB
            stack.enter_context(broker.client()).send(whole[:sent])
        client = stack.enter_context(broker.client())
        waited_for(lambda: broker.counters()["dataport.received_bytes"] >= 60_200)
        assert broker.counters()["dataport.reserved_bytes"] == 0
        client.sock.settimeout(15)  # a frame that nobody waits for has 30 s and more
        client.send(whole)
        assert not client.reply()[0].append.partitions[0].HasField("error")


def test_bodies_that_together_fill_the_pool_by_halves_all_arrive(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.intake._CONTENDED_SECONDS", 60)  # a busy machine's pause is no silent peer
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)
    topic = broker.new_topic()
    whole = append_frame(1, topic, a_batch([bytes(2 << 20)]))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(broker.client()) for _ in range(8)]
        senders = []
        for begin, end in ((0, len(whole) // 2), (len(whole) // 2, len(whole))):
            # The halves of some stay in their sockets, for there is no memory for all.
            senders = [threading.Thread(target=client.send, args=(whole[begin:end],)) for client in clients]
            for sender in senders:
                sender.start()
            if begin == 0:
                # As much as leaves room for the rest of the body that is furthest on: 2 MiB, but for a step of each.
                waited_for(lambda: broker.counters()["dataport.reserved_bytes"] > 3 << 19)
            for sender in senders:
                sender.join(60)
        for client in clients:
            assert not client.reply()[0].append.partitions[0].HasField("error")
    waited_for(lambda: broker.counters()["dataport.reserved_bytes"] == 0)


def test_peers_that_stop_in_the_middle_are_cut_off_only_while_others_wait_for_memory(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.intake._CONTENDED_SECONDS", 0.1)
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)
    topic = broker.new_topic()
    whole = append_frame(1, topic, a_batch([bytes(2 << 20)]))
    half = len(whole) // 2
    with broker.client() as first, broker.client() as second, broker.client() as other:
        for client in (first, second):
            client.send(whole[:half])
            waited_for(lambda: broker.counters()["dataport.reserved_bytes"] >= half)
        waited_for(lambda: broker.counters()["dataport.reserved_bytes"] == 2 * half)
        first.send(whole[half:])  # nobody waits, so its silence did not count
        assert not first.reply()[0].append.partitions[0].HasField("error")
        other.send(append_frame(1, topic, a_batch([bytes((3 << 20) - 5000)])))
        assert second.is_closed()
        assert not other.reply()[0].append.partitions[0].HasField("error")


def test_a_middling_frame_in_pieces_comes_through_where_no_memory_is_left_to_read_ahead(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20)  # of which 3/4 MiB to read ahead
    topic = broker.new_topic()
    whole = append_frame(1, topic, a_batch([bytes(200_000)]))
    with broker.client() as client:
        for _ in range(2):
            for begin in range(0, len(whole), 50_000):
                received = broker.counters()["dataport.received_bytes"]
                piece = whole[begin : begin + 50_000]
                client.send(piece)
                expected = received + len(piece)
                waited_for(lambda: broker.counters()["dataport.received_bytes"] >= expected)  # noqa: B023
            assert not client.reply()[0].append.partitions[0].HasField("error")


def test_a_reader_that_takes_nothing_is_cut_off(start_broker: StartBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "broker.transport.connection")
    broker = start_broker(send_timeout_ms=200)
    topic = broker.new_topic()
    with broker.client() as client:
        ask_for_more_than_sockets_hold(client, topic)
        waited_for(lambda: broker.counters()["dataport.connections"] == 0)
    assert "it took no byte of its answer for send.timeout.ms" in caplog.text


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reader_that_takes_nothing_holds_no_request_memory_that_others_wait_for(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    monkeypatch.setattr("broker.transport.intake._CONTENDED_SECONDS", 0.1)
    broker = start_broker(request_max_bytes=3 << 20, queued_max_request_bytes=3 << 20, send_timeout_ms=600_000)
    topic = broker.new_topic(partitions=2)
    durable = broker.new_topic("durable", flush_messages=1)
    log = broker.broker.host.leader_of(durable, 0).log
    for each in broker.broker.host.hosted.values():
        each.log.begin_epoch(each.role.epoch)  # else the first append would wait for its sync
    may_sync = threading.Event()
    real_sync = log._disk.sync

    def slow_sync(fd: int) -> None:
        assert may_sync.wait(30)
        real_sync(fd)

    body = a_batch([bytes((3 << 20) - 5000)])
    large = append_frame(3, topic, body, partition=1)
    with broker.client() as slow, broker.client() as other:
        for _ in range(8):
            other.append(topic, body)
        waited_for(lambda: bool(other.append(topic, a_batch())) and broker.counters()["dataport.reserved_bytes"] == 0)
        monkeypatch.setattr(log._disk, "sync", slow_sync)
        slow.send(append_frame(1, durable, a_batch()) + fetch_frame(2, topic, 0, max_bytes=24 << 20))
        slow.send(large if is_whole else large[: len(large) // 2])
        # The first ack waits for its flush; meanwhile the large frame is taken in.
        waited_for(lambda: broker.counters()["dataport.reserved_bytes"] >= len(large) // 2)
        if is_whole:
            waited_for(lambda: broker.broker.host.leader_of(topic, 1).log.end_offset == 1)
        may_sync.set()
        assert slow.reply()[0].correlation_id == 1
        assert slow.read(1)  # of an answer that does not fit the sockets, and of which no more is read
        other.sock.settimeout(20)
        other.send(append_frame(4, topic, body))
        assert not other.reply()[0].append.partitions[0].HasField("error")
        assert broker.counters()["dataport.connections"] == (2 if is_whole else 1)


def test_an_idle_connection_is_closed_and_one_whose_fetch_waits_is_not_idle(start_broker: StartBroker) -> None:
    broker = start_broker(connections_max_idle_ms=100)
    topic = broker.new_topic()
    with broker.client() as client:
        header = client.fetch(topic, 0, max_wait_ms=300)[0]
        assert (header.end_offset, header.length) == (0, 0)
        assert client.is_closed()


def test_a_client_or_broker_of_another_protocol_is_let_go(broker: RunningBroker) -> None:
    with broker.client(greet=False) as http:
        http.send(b"GET / HTTP/1.1\r\n\r\n")
        assert http.is_closed()
    for of_replica in (False, True):
        with broker.client(greet=False) as newer:
            newer.send(frames.hello(VersionRange(8, 9), of_replica=of_replica))
            assert newer.read(frames.HELLO_SIZE) == frames.hello()  # it learns what is spoken here
            assert newer.is_closed()


# --- stopping ------------------------------------------------------------------------------------------------------


def test_a_stop_answers_what_was_received_and_what_waits(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    with broker.client() as writer, broker.client() as reader, broker.client():
        for number in range(500):
            writer.send(append_frame(number, topic, a_batch()))
        assert writer.reply()[0].correlation_id == 0
        partition = broker.broker.host.leader_of(topic, 0)
        waited_for(lambda: partition.log.end_offset == 500)  # a fetch beyond the end would not wait
        reader.send(fetch_frame(1, topic, 500, max_wait_ms=30_000))
        wait_until_waiting(broker, topic)
        stopping = threading.Thread(target=broker.stop)
        stopping.start()
        assert reader.reply()[0].fetch.partitions[0].length == 0
        reader.close()
        answered = 1
        with contextlib.suppress(ConnectionError):
            while True:
                assert writer.reply()[0].append.partitions[0].base_offset == answered
                answered += 1
        writer.close()
        join_all([stopping], 60)
    again = start_broker()
    with again.client() as client:
        assert client.fetch(topic, 0)[0].end_offset == answered
