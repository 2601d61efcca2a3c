"""The gRPC port: every request of the service, its errors, health and reflection."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from broker.local.zookeeper import EmbeddedZooKeeper
from broker.requests import staging
from broker.transport import lanes, rpc
from kafkalog import Admin, TopicPartition, errors
from kafkalog.errors import KafkalogError
from kafkalog.format.batch import iter_batches
from kafkalog.net.control import ControlConnection
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import transactions_pb2
from kafkalog.wire.frames import error_from_wire
from kafkalog.wire.service import METHODS, SERVICE
from kafkalog.zk.client import Client
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import a_batch
from tests.broker.stub import BrokerStub
from tests.proxy import StallingProxy
from tests.threads import NoThreads, join_all
from tests.waiting import waited_for


def refused(call: Callable[..., Any], request: Any) -> tuple[KafkalogError, grpc.StatusCode]:
    """The error that a call is refused with, and its status."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    error = error_from_wire(pb.Error.FromString(metadata[rpc.ERROR_KEY]))
    assert caught.value.details() == str(error)
    return error, caught.value.code()


def append(broker: RunningBroker, topic: bytes, body: bytes, acks: int = 1) -> pb.AppendReply:
    part = pb.AppendPartition(topic_id=topic, partition=0, length=len(body))
    request = pb.AppendRequest(acks=acks, timeout_ms=5000, partitions=[part])
    reply: pb.AppendReply = broker.stub.Append(bpb.InlineAppendRequest(request=request, body=body), timeout=30)
    return reply


def pull(broker: RunningBroker, topic: bytes, offset: int, **options: Any) -> bpb.PullReply:
    part = pb.FetchPartition(topic_id=topic, partition=0, offset=offset)
    reply: bpb.PullReply = broker.stub.Pull(pb.FetchRequest(partitions=[part], **options), timeout=30)
    return reply


# --- topics --------------------------------------------------------------------------------------------------------


def test_a_topic_is_described_with_what_was_set_and_what_is_in_force(broker: RunningBroker) -> None:
    request = bpb.CreateTopicRequest(name="t", partitions=2, config={"retention_ms": "5000"})
    made = broker.stub.CreateTopic(request)
    assert made.name == "t"
    assert len(made.topic_id) == 16
    assert dict(made.config) == {"retention.ms": "5000"}
    assert made.effective["retention.ms"] == "5000"
    assert made.effective["cleanup.policy"] == "delete"
    assert made.effective["flush.ms"] == ""
    assert [(one.partition, one.leader, list(one.isr)) for one in made.partitions] == [(0, 0, [0]), (1, 0, [0])]
    for asked in (bpb.DescribeTopicsRequest(names=["t"]), bpb.DescribeTopicsRequest(ids=[made.topic_id])):
        assert list(broker.stub.DescribeTopics(asked).topics) == [made]
    broker.new_topic("a")
    assert [topic.name for topic in broker.stub.DescribeTopics(bpb.DescribeTopicsRequest()).topics] == ["a", "t"]


def test_describing_what_is_not_there_says_so_in_its_place(broker: RunningBroker) -> None:
    broker.new_topic("there")
    request = bpb.DescribeTopicsRequest(names=["gone", "there", "no/name"], ids=[b"?" * 16])
    gone, there, no_name, no_id = broker.stub.DescribeTopics(request).topics
    assert isinstance(error_from_wire(gone.error), errors.UnknownTopic)
    assert gone.name == "gone"
    assert there.name == "there"
    assert not there.HasField("error")
    assert isinstance(error_from_wire(no_name.error), errors.InvalidTopicName)
    assert isinstance(error_from_wire(no_id.error), errors.UnknownTopicId)


@pytest.mark.parametrize(
    "request_, error, status, says",
    [
        ({"name": "no/name"}, errors.InvalidTopicName, "INVALID_ARGUMENT", "'no/name' is not a topic name"),
        ({"name": ""}, errors.InvalidTopicName, "INVALID_ARGUMENT", "is not a topic name"),
        ({"name": "line\n"}, errors.InvalidTopicName, "INVALID_ARGUMENT", "is not a topic name"),
        ({"name": "t", "partitions": 10_001}, errors.InvalidPartitions, "INVALID_ARGUMENT", "is 10000"),
        ({"name": "t", "replicas": 2}, errors.InvalidReplicationFactor, "INVALID_ARGUMENT", "live brokers, 1"),
        ({"name": "t", "config": {"retention": "1"}}, errors.UnknownSetting, "INVALID_ARGUMENT", "retention"),
        ({"name": "t", "config": {"segment.bytes": "x"}}, errors.InvalidSetting, "INVALID_ARGUMENT", "whole number"),
        ({"name": "t", "config": {"flush.visibility": "flushed"}}, errors.InvalidSetting, "INVALID_ARGUMENT", "flush"),
        ({"name": "there"}, errors.TopicExists, "ALREADY_EXISTS", "exists already"),
    ],
)
def test_a_topic_that_cannot_be_made_is_refused_with_one_sentence(
    broker: RunningBroker, request_: dict[str, Any], error: type[KafkalogError], status: str, says: str
) -> None:
    broker.new_topic("there")
    raised, code = refused(broker.stub.CreateTopic, bpb.CreateTopicRequest(**request_))
    assert type(raised) is error
    assert code.name == status
    assert says in str(raised)
    assert [topic.name for topic in broker.stub.DescribeTopics(bpb.DescribeTopicsRequest()).topics] == ["there"]


def test_an_altered_topic_has_its_settings_in_force_and_more_partitions(broker: RunningBroker) -> None:
    topic = broker.new_topic("t", retention_ms=5000)
    log = broker.broker.host.leader_of(topic, 0).log
    request = bpb.AlterTopicRequest(name="t", set={"max.message.bytes": "2048"}, unset=["retention.ms"], partitions=3)
    altered = broker.stub.AlterTopic(request)
    assert dict(altered.config) == {"max.message.bytes": "2048"}
    assert altered.topic_id == topic
    assert len(altered.partitions) == 3
    assert log.settings.max_message_bytes == 2048
    assert log.settings.retention_ms == 7 * 24 * 3_600_000
    with broker.client() as client:
        assert client.append(topic, a_batch(), partition=2).base_offset == 0
        assert client.append(topic, a_batch([bytes(3000)])).error.code == errors.BatchTooLarge.code


def test_alterations_that_cannot_be_are_refused(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    alter = broker.stub.AlterTopic
    assert isinstance(refused(alter, bpb.AlterTopicRequest(name="gone"))[0], errors.UnknownTopic)
    assert isinstance(refused(alter, bpb.AlterTopicRequest(name="a/b"))[0], errors.UnknownTopic)
    fewer, _ = refused(alter, bpb.AlterTopicRequest(name="t", partitions=1))
    assert "cannot be removed" in str(fewer)
    unknown, _ = refused(alter, bpb.AlterTopicRequest(name="t", unset=["retention.m"]))
    assert "did you mean 'retention.ms'" in str(unknown)
    assert isinstance(
        refused(alter, bpb.AlterTopicRequest(name="t", set={"segment.bytes": "1"}))[0], errors.InvalidSetting
    )


def test_a_deleted_topic_is_gone_with_its_files_and_its_name_starts_anew(broker: RunningBroker) -> None:
    topic = broker.new_topic("t")
    log = broker.broker.host.leader_of(topic, 0).log
    with broker.client() as client:
        client.append(topic, a_batch())
        commit = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=1)])
        broker.stub.CommitOffsets(commit)
        assert broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t")).topic_id == topic
        assert client.append(topic, a_batch()).error.code == errors.UnknownTopicId.code
        error, status = refused(broker.stub.DeleteTopic, bpb.DeleteTopicRequest(name="t"))
        assert isinstance(error, errors.UnknownTopic)
        assert status is grpc.StatusCode.NOT_FOUND
        again = broker.new_topic("t")
        assert again != topic
        assert client.append(again, a_batch()).base_offset == 0
        assert not broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group="g")).offsets
    assert not log.directory.exists()


@pytest.mark.parametrize("letter", ["x", "%", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("length", [300, 1100, 20_000])
def test_an_error_with_long_facts_is_still_that_error(broker: RunningBroker, letter: str, length: int) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        broker.stub.CreateTopic(bpb.CreateTopicRequest(name=letter * length), timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    error = error_from_wire(pb.Error.FromString(metadata[rpc.ERROR_KEY]))
    assert isinstance(error, errors.InvalidTopicName)
    told = error.facts["topic"]
    assert told == letter * length or told.endswith(f"{letter}... ({length} characters)")
    assert (caught.value.details() or "").startswith(f"'{letter * 10}")


# --- offsets -------------------------------------------------------------------------------------------------------


def listed(broker: RunningBroker, topic: bytes, at: int, timestamp_us: int = 0, partition: int = 0) -> bpb.ListedOffset:
    wanted = bpb.ListOffset(topic_id=topic, partition=partition, timestamp_us=timestamp_us)
    wanted.at = at  # type: ignore[assignment] # one that there is not, too
    reply: bpb.ListOffsetsReply = broker.stub.ListOffsets(bpb.ListOffsetsRequest(partitions=[wanted]))
    return reply.partitions[0]


def test_offsets_are_listed_by_place_and_by_timestamp(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    for second in range(5):
        append(broker, topic, a_batch([b"x"] * 2, timestamp_us=second * 1_000_000))
    assert listed(broker, topic, bpb.ListOffset.EARLIEST).offset == 0
    latest = listed(broker, topic, bpb.ListOffset.LATEST)
    assert latest.offset == 10
    assert latest.size_bytes > 1000
    at = listed(broker, topic, bpb.ListOffset.TIMESTAMP, 2_500_000)
    assert (at.found, at.offset, at.timestamp_us) == (True, 6, 3_000_000)
    assert not listed(broker, topic, bpb.ListOffset.TIMESTAMP, 4_000_001).found
    assert listed(broker, topic, 9).error.code == errors.InvalidRequest.code
    assert listed(broker, topic, 0, partition=4).error.code == errors.UnknownPartition.code


def test_records_are_deleted_before_an_offset(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    for _ in range(5):
        append(broker, topic, a_batch())
    delete = broker.stub.DeleteRecords
    assert delete(bpb.DeleteRecordsRequest(topic_id=topic, before_offset=3)).log_start_offset == 3
    assert listed(broker, topic, bpb.ListOffset.EARLIEST).offset == 3
    assert pull(broker, topic, 2).reply.partitions[0].error.code == errors.OffsetOutOfRange.code
    error, _ = refused(delete, bpb.DeleteRecordsRequest(topic_id=topic, before_offset=6))
    assert isinstance(error, errors.OffsetOutOfRange)
    assert isinstance(
        refused(delete, bpb.DeleteRecordsRequest(topic_id=topic, before_offset=-2))[0], errors.OffsetOutOfRange
    )
    assert delete(bpb.DeleteRecordsRequest(topic_id=topic, before_offset=-1)).log_start_offset == 5


def test_a_log_that_cannot_be_read_for_a_pull_ends_its_directory_and_the_client_gets_the_error(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.new_topic()
    append(broker, topic, a_batch([bytes(200_000)]))
    log = broker.broker.host.leader_of(topic, 0).log
    real_read = log._disk.read

    def read(fd: int, length: int, position: int) -> bytes:
        if length > 100_000:  # a body's; headers can be read
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_read(fd, length, position)

    monkeypatch.setattr(log._disk, "read", read)
    error, _ = refused(
        broker.stub.Pull, pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)], max_bytes=1 << 20)
    )
    assert isinstance(error, errors.StorageFailed)
    assert "reading for t-0: Input/output error" in str(error)
    told = error_from_wire(pull(broker, topic, 0).reply.partitions[0].error)
    assert isinstance(told, errors.StorageFailed)


def test_group_offsets_are_kept_by_group_and_partition(broker: RunningBroker) -> None:
    a, b = broker.new_topic("a", partitions=2), broker.new_topic("b")
    commit, committed = broker.stub.CommitOffsets, broker.stub.CommittedOffsets
    offsets = [
        bpb.GroupOffset(topic="a", partition=1, offset=7, topic_id=a),
        bpb.GroupOffset(topic="b", offset=3, topic_id=b),
    ]
    commit(bpb.CommitOffsetsRequest(group="g", offsets=offsets))
    assert list(committed(bpb.CommittedOffsetsRequest(group="g")).offsets) == offsets
    assert list(committed(bpb.CommittedOffsetsRequest(group="g", topics=["b"])).offsets) == offsets[1:]
    assert not committed(bpb.CommittedOffsetsRequest(group="other")).offsets
    back = bpb.GroupOffset(topic="a", partition=1, offset=2, topic_id=a)
    commit(bpb.CommitOffsetsRequest(group="g", offsets=[back]))
    assert list(committed(bpb.CommittedOffsetsRequest(group="g", topics=["a"])).offsets) == [back]
    for wrong, error in (
        (bpb.CommitOffsetsRequest(group="a/b", offsets=offsets), errors.InvalidRequest),
        (bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="c")]), errors.UnknownTopic),
        (bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="b", partition=1)]),
         errors.UnknownPartition),
        (bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="b", offset=-1)]), errors.InvalidRequest),
    ):  # fmt: skip
        assert type(refused(commit, wrong)[0]) is error


def test_producer_ids_are_given_out_once_over_all_brokers(start_broker: StartBroker) -> None:
    brokers = [start_broker(0), start_broker(1)]
    ids = [broker.stub.InitProducer(bpb.InitProducerRequest()) for broker in brokers for _ in range(600)]
    assert len({one.producer_id for one in ids}) == len(ids) == 1200
    assert {one.producer_epoch for one in ids} == {0}


def znodes(session: ZooKeeperSession, path: str = "") -> dict[str, bytes]:
    """Every permanent znode below the chroot, parents first."""
    found: dict[str, bytes] = {}
    for name in session.children(path or "/"):
        content, stat = session.get(f"{path}/{name}")
        if not stat.ephemeralOwner:
            found[f"{path}/{name}"] = content
        found |= znodes(session, f"{path}/{name}")
    return found


def set_back(session: ZooKeeperSession, backup: dict[str, bytes]) -> None:
    for path in reversed(znodes(session)):
        if path not in backup:
            session.delete(path)
    for path, content in backup.items():
        session.set(path, content)


def test_a_producer_after_zookeeper_was_set_back_is_taken_for_none_before(
    start_broker: StartBroker, chroot: str
) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    session = ZooKeeperSession(chroot)
    session.start()
    backup = znodes(session)
    for value in (b"before", b"after"):
        one = broker.stub.InitProducer(bpb.InitProducerRequest(), timeout=30)
        batch = a_batch([value], producer_id=one.producer_id, producer_epoch=one.producer_epoch, base_sequence=0)
        assert not append(broker, topic, batch).partitions[0].HasField("error")
        if value == b"before":
            broker.stop()
            set_back(session, backup)
            broker = start_broker()
    assert listed(broker, topic, bpb.ListOffset.LATEST).offset == 2
    session.close()


# --- append and pull -----------------------------------------------------------------------------------------------


def test_a_topic_that_is_asked_for_again_and_again_is_described_once(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    request = bpb.DescribeTopicsRequest(names=["t", "no"] * 3, ids=[topic] * 3)
    reply = broker.stub.DescribeTopics(request, timeout=30)
    assert [each.name for each in reply.topics] == ["t", "no", "t"]


def test_requests_that_name_too_many_partitions_are_refused(broker: RunningBroker) -> None:
    def appending(named: int) -> bpb.InlineAppendRequest:
        return bpb.InlineAppendRequest(request=pb.AppendRequest(acks=1, partitions=[pb.AppendPartition()] * named))

    def fetching(named: int) -> pb.FetchRequest:
        return pb.FetchRequest(partitions=[pb.FetchPartition()] * named)

    def listing(named: int) -> bpb.ListOffsetsRequest:
        return bpb.ListOffsetsRequest(partitions=[bpb.ListOffset()] * named)

    for call, request_of, kind, limit in (
        (broker.stub.Append, appending, "append", 1000),
        (broker.stub.Pull, fetching, "fetch", 50_000),
        (broker.stub.ListOffsets, listing, "listing", 50_000),
    ):
        error, _ = refused(call, request_of(limit + 1))
        assert f"the {kind} names {limit + 1} partitions; the limit for one request is {limit}" in str(error)
        call(request_of(limit), timeout=60)
    names = [str(number) for number in range(50_001)]
    error, _ = refused(broker.stub.DescribeTopics, bpb.DescribeTopicsRequest(names=names[1:], ids=[b"1"]))
    assert "the call names 50001 topics; the limit for one call is 50000" in str(error)
    assert len(broker.stub.DescribeTopics(bpb.DescribeTopicsRequest(names=names[1:]), timeout=60).topics) == 50_000


def test_an_inline_append_is_pulled_back(broker: RunningBroker) -> None:
    topic = broker.new_topic(flush_messages=1)
    assert append(broker, topic, a_batch([b"a", b"b"])).partitions[0].base_offset == 0
    assert append(broker, topic, a_batch([b"c"])).partitions[0].base_offset == 2
    pulled = pull(broker, topic, 0, max_bytes=1 << 20)
    headers = [header for header, _ in iter_batches(memoryview(pulled.body))]
    assert [(header.base_offset, header.record_count) for header in headers] == [(0, 2), (2, 1)]
    assert pulled.reply.partitions[0].length == len(pulled.body)
    assert pulled.reply.partitions[0].end_offset == 3


def test_an_inline_request_over_its_limit_is_refused(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    part = pb.AppendPartition(topic_id=topic, length=(2 << 20) + 1)
    request = bpb.InlineAppendRequest(request=pb.AppendRequest(acks=1, partitions=[part]), body=bytes((2 << 20) + 1))
    assert isinstance(refused(broker.stub.Append, request)[0], errors.RequestTooLarge)
    with pytest.raises(grpc.RpcError, match="larger than max"):
        append(broker, topic, bytes(3 << 20))
    with pytest.raises(grpc.RpcError, match="acks=0 is not possible"):
        append(broker, topic, a_batch(), acks=0)


def test_a_pull_waits_for_data_and_its_answer_stays_under_the_limit(start_broker: StartBroker) -> None:
    broker = start_broker(pull_max_bytes=10_000)
    topic = broker.new_topic()
    pulled: list[bpb.PullReply] = []
    waiting = threading.Thread(target=lambda: pulled.append(pull(broker, topic, 0, max_wait_ms=30_000, min_bytes=1)))
    waiting.start()
    partition = broker.broker.host.leader_of(topic, 0)
    waited_for(lambda: len(partition.waiters) > 0)
    append(broker, topic, a_batch([b"news"]))
    join_all([waiting], 60)
    assert len(pulled[0].body) == pulled[0].reply.partitions[0].length > 0
    assert len(partition.waiters) == 0
    for _ in range(50):
        append(broker, topic, a_batch([bytes(1000)]))
    assert 9000 < len(pull(broker, topic, 1, max_bytes=1 << 20).body) <= 10_000
    assert pull(broker, topic, 51, max_wait_ms=10, min_bytes=1).body == b""


def test_an_offset_is_listed_by_the_bytes_up_to_it(broker: RunningBroker) -> None:
    topic = broker.new_topic(index_interval_bytes=64)
    sizes = [len(a_batch([bytes(100)] * count)) for count in (1, 2, 3, 4)]
    for count in (1, 2, 3, 4):
        append(broker, topic, a_batch([bytes(100)] * count))

    def after(from_offset: int, max_bytes: int) -> tuple[int, int]:
        wanted = bpb.ListOffset(
            topic_id=topic, at=bpb.ListOffset.AFTER_BYTES, from_offset=from_offset, max_bytes=max_bytes
        )
        found = broker.stub.ListOffsets(bpb.ListOffsetsRequest(partitions=[wanted]), timeout=30).partitions[0]
        return found.offset, found.size_bytes

    assert after(0, 1 << 62) == (10, sum(sizes))
    assert after(3, 1 << 62) == (10, sizes[2] + sizes[3])
    assert after(0, sizes[0] + sizes[1] + 1) == (3, sizes[0] + sizes[1])
    assert after(1, sizes[1]) == (3, sizes[1])
    assert after(1, 1) == (3, sizes[1])  # a batch at least
    assert [after(offset, 1000) for offset in (10, 99)] == [(10, 0), (99, 0)]


def test_waiting_pulls_leave_threads_for_other_calls(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    part = pb.FetchPartition(topic_id=topic)
    request = pb.FetchRequest(partitions=[part], max_wait_ms=30_000, min_bytes=1)
    calls = [broker.stub.Pull.future(request, timeout=30) for _ in range(30)]
    assert broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30).answering_broker_id == 0
    append(broker, topic, a_batch())
    for call in calls:
        call.result()


def test_a_listing_waits_until_an_end_moves(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    append(broker, topic, a_batch())
    wanted = bpb.ListOffset(topic_id=topic, known_offset=1)
    waiting = broker.stub.ListOffsets.future(
        bpb.ListOffsetsRequest(partitions=[wanted], max_wait_ms=30_000), timeout=30
    )
    partition = broker.broker.host.leader_of(topic, 0)
    waited_for(lambda: len(partition.waiters) > 0)
    assert not waiting.done()
    append(broker, topic, a_batch())
    assert waiting.result().partitions[0].offset == 2
    assert len(partition.waiters) == 0
    # What is known no more, or in vain, is answered: a listing never fails by waiting.
    for known, wait_ms in ((1, 30_000), (2, 10)):
        wanted.known_offset = known
        reply = broker.stub.ListOffsets(bpb.ListOffsetsRequest(partitions=[wanted], max_wait_ms=wait_ms), timeout=20)
        assert reply.partitions[0].offset == 2
    gone = bpb.ListOffset(topic_id=bytes(16))
    reply = broker.stub.ListOffsets(bpb.ListOffsetsRequest(partitions=[gone], max_wait_ms=30_000), timeout=20)
    assert isinstance(error_from_wire(reply.partitions[0].error), errors.UnknownTopicId)


def test_listings_beyond_those_that_may_wait_are_answered_at_once(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    most = rpc._LISTINGS_WAITING_MAX
    for end in (0, 1):  # again: who has waited leaves its place to others
        wanted = bpb.ListOffset(topic_id=topic, known_offset=end)
        request = bpb.ListOffsetsRequest(partitions=[wanted], max_wait_ms=30_000)
        calls = [broker.stub.ListOffsets.future(request, timeout=30) for _ in range(most + 8)]
        waited_for(lambda: sum(call.done() for call in calls) == 8)  # noqa: B023
        append(broker, topic, a_batch())
        assert sorted(call.result().partitions[0].offset for call in calls) == [end] * 8 + [end + 1] * most


@pytest.mark.parametrize("method", ["Pull", "ListOffsets"])
def test_a_call_that_fails_as_it_waits_leaves_its_place_to_others(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(rpc, "_PULLS_WAITING_MAX", 1)
    monkeypatch.setattr(rpc, "_LISTINGS_WAITING_MAX", 1)
    broker = start_broker(**{"fetch.max.wait.ms": 600_000})
    topic = broker.new_topic()
    request = {
        "Pull": pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)], max_wait_ms=600_000, min_bytes=1),
        "ListOffsets": bpb.ListOffsetsRequest(partitions=[bpb.ListOffset(topic_id=topic)], max_wait_ms=600_000),
    }[method]

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr("broker.requests.waits.wait_for", broken)
        assert isinstance(refused(getattr(broker.stub, method), request)[0], errors.InternalError)
    call = getattr(broker.stub, method).future(request, timeout=600)
    partition = broker.broker.host.leader_of(topic, 0)
    waited_for(lambda: len(partition.waiters) == 1)
    append(broker, topic, a_batch())
    call.result(timeout=30)


def test_nobody_waits_longer_than_the_broker_lets_him(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.requests.append._ACK_TIMEOUT_MS", 20)
    broker = start_broker(**{"fetch.max.wait.ms": 20})
    topic = broker.new_topic(flush_messages=1)
    assert pull(broker, topic, 0, max_wait_ms=600_000, min_bytes=1).body == b""
    wanted = bpb.ListOffset(topic_id=topic)
    request = bpb.ListOffsetsRequest(partitions=[wanted], max_wait_ms=600_000)
    assert broker.stub.ListOffsets(request, timeout=30).partitions[0].offset == 0
    with broker.client() as client:
        assert client.fetch(topic, 0, max_wait_ms=600_000)[1] == b""
    partition = broker.broker.host.leader_of(topic, 0)
    monkeypatch.setattr(partition, "keeps", lambda _: False)  # as on a disk that stands still
    body = a_batch()
    part = pb.AppendPartition(topic_id=topic, length=len(body))
    for timeout_ms in (600_000, 0):
        appended = broker.stub.Append(
            bpb.InlineAppendRequest(
                request=pb.AppendRequest(acks=1, timeout_ms=timeout_ms, partitions=[part]), body=body
            ),
            timeout=30,
        )
        error = error_from_wire(appended.partitions[0].error)
        assert str(error) == "the fdatasync of t-0 at the broker's disk did not finish within 20 ms"


def test_an_answer_larger_than_what_all_may_take_is_given_alone(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_ANSWERS_MAX", 1000)
    broker = start_broker()
    topic = broker.new_topic()
    append(broker, topic, a_batch([bytes(5000)]))
    assert len(pull(broker, topic, 0).body) > 5000
    waited_for(lambda: broker.broker.rpc_service._answers.used == 0)


def test_answers_that_nobody_reads_take_no_more_than_their_pool(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_BUSY_SECONDS", 0.05)
    monkeypatch.setattr(rpc, "_PULLS_WAITING_MAX", 1)
    broker = start_broker()
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch([bytes(7 << 20)]))
    options = [("grpc.max_receive_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{broker.broker.grpc_port}", options=options)
    answers = broker.broker.rpc_service._answers
    held = answers.reserve(10 << 20, lambda: None)  # as if for a client that does not read
    stub = BrokerStub(channel)
    request = pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)])
    error, status = refused(stub.Pull, request)
    assert isinstance(error, errors.BrokerBusy)
    assert status is grpc.StatusCode.UNAVAILABLE
    held.release()
    assert len(stub.Pull(request, timeout=30).body) > 7 << 20
    partition = broker.broker.host.leader_of(topic, 0)
    part = pb.FetchPartition(topic_id=topic, offset=1)
    waiting = stub.Pull.future(pb.FetchRequest(partitions=[part], max_wait_ms=30_000, min_bytes=1), timeout=30)
    waited_for(lambda: len(partition.waiters) == 1)  # who waited for memory in vain has left his place
    append(broker, topic, a_batch())
    assert waiting.result().body
    channel.close()
    waited_for(lambda: answers.used == 0)


# --- waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Pull", "ListOffsets", "Append"])
def test_a_call_that_was_cancelled_lets_go_long_before_its_time_is_over(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    broker = start_broker(**{"fetch.max.wait.ms": 600_000})
    topic = broker.new_topic(flush_messages=1)
    monkeypatch.setattr("broker.requests.append._ACK_TIMEOUT_MS", 600_000)
    partition = broker.broker.host.leader_of(topic, 0)
    if method == "Append":
        monkeypatch.setattr(partition, "keeps", lambda _: False)  # as on a disk that stands still
    body = a_batch()
    part = pb.AppendPartition(topic_id=topic, length=len(body))
    request = {
        "Pull": pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)], max_wait_ms=600_000, min_bytes=1),
        "ListOffsets": bpb.ListOffsetsRequest(partitions=[bpb.ListOffset(topic_id=topic)], max_wait_ms=600_000),
        "Append": bpb.InlineAppendRequest(
            request=pb.AppendRequest(acks=1, timeout_ms=600_000, partitions=[part]), body=body
        ),
    }[method]
    call = getattr(broker.stub, method).future(request, timeout=600)
    waited_for(lambda: len(partition.waiters) > 0)
    call.cancel()
    waited_for(lambda: len(partition.waiters) == 0)


def test_what_is_appended_between_a_look_and_the_wait_is_seen(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker(**{"fetch.max.wait.ms": 600_000})
    topic = broker.new_topic()
    partition = broker.broker.host.leader_of(topic, 0)
    register = partition.waiters.register

    def with_an_append_before(wake: Callable[[], None]) -> None:
        monkeypatch.setattr(partition.waiters, "register", register)
        append(broker, topic, a_batch())
        register(wake)

    monkeypatch.setattr(partition.waiters, "register", with_an_append_before)
    assert pull(broker, topic, 0, max_wait_ms=600_000, min_bytes=1).body
    monkeypatch.setattr(partition.waiters, "register", with_an_append_before)
    request = bpb.ListOffsetsRequest(partitions=[bpb.ListOffset(topic_id=topic, known_offset=1)], max_wait_ms=600_000)
    assert broker.stub.ListOffsets(request, timeout=30).partitions[0].offset == 2


def test_a_wake_for_too_little_is_not_the_last(start_broker: StartBroker) -> None:
    broker = start_broker(**{"fetch.max.wait.ms": 600_000})
    topic = broker.new_topic()
    size = len(a_batch())
    request = pb.FetchRequest(
        partitions=[pb.FetchPartition(topic_id=topic)], max_wait_ms=600_000, min_bytes=3 * size - 1
    )
    call = broker.stub.Pull.future(request, timeout=600)
    partition = broker.broker.host.leader_of(topic, 0)
    for _ in range(3):
        waited_for(lambda: len(partition.waiters) > 0)
        assert not call.done()
        append(broker, topic, a_batch())
    assert len(call.result(timeout=30).body) == 3 * size


def test_a_stop_answers_those_that_wait_and_refuses_others(start_broker: StartBroker) -> None:
    broker = start_broker(**{"fetch.max.wait.ms": 600_000})
    topic = broker.new_topic()
    pulling = broker.stub.Pull.future(
        pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)], max_wait_ms=600_000, min_bytes=1), timeout=600
    )
    listing = broker.stub.ListOffsets.future(
        bpb.ListOffsetsRequest(partitions=[bpb.ListOffset(topic_id=topic)], max_wait_ms=600_000), timeout=600
    )
    partition = broker.broker.host.leader_of(topic, 0)
    waited_for(lambda: len(partition.waiters) == 2)
    broker.broker.stop()
    assert pulling.result(timeout=30).body == b""  # an answer, and no call cut off
    assert listing.result(timeout=30).partitions[0].offset == 0


def test_what_queues_as_the_broker_is_stopped_is_refused_and_not_begun(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    abort = staging.abort

    def noted(*arguments: Any) -> Any:
        begun.release()
        return abort(*arguments)

    monkeypatch.setattr(staging, "abort", noted)
    topic = broker.new_topic()
    partition = broker.broker.host.leader_of(topic, 0)
    append(broker, topic, a_batch())
    discard = transactions_pb2.AbortStagedRequest(
        partitions=[transactions_pb2.AbortStagedPartition(topic_id=topic, uuids=[b"u" * 16])]
    )
    with partition._staging._lock:  # as while the disk stands still
        calls = [broker.stub.AbortStaged.future(discard, timeout=600) for _ in range(lanes.LANES["staged"].threads)]
        assert all(begun.acquire(timeout=60) for _ in calls)
        queued = broker.stub.DeleteRecords.future(
            bpb.DeleteRecordsRequest(topic_id=topic, before_offset=-1), timeout=600
        )
        broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30)  # the broker knows of those before it
        stopping = threading.Thread(target=broker.broker.stop)
        stopping.start()
        assert broker.broker.rpc_service._stopping.wait(30)
    join_all([stopping], 60)
    for call in calls:
        assert call.exception(timeout=30) is None
    error = queued.exception(timeout=30)
    assert isinstance(error, grpc.RpcError)
    told = error_from_wire(pb.Error.FromString(dict(queued.trailing_metadata())[rpc.ERROR_KEY]))
    assert isinstance(told, errors.BrokerStopping)
    assert partition.start_offset == 0


def test_who_watches_a_brokers_health_is_told_that_it_stops(broker: RunningBroker) -> None:
    watching = health_pb2_grpc.HealthStub(broker.channel).Watch(health_pb2.HealthCheckRequest(), timeout=600)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    stopping = threading.Thread(target=broker.broker.stop)
    stopping.start()
    try:
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        watching.cancel()
        join_all([stopping], 60)


# --- overload ------------------------------------------------------------------------------------------------------


def in_another_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that runs it, and what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except KafkalogError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_every_method_has_its_lane() -> None:
    listed = [method for lane in lanes.LANES.values() for method in lane.methods]
    assert sorted(listed) == sorted(METHODS)


@pytest.fixture
def proxy(zookeeper: EmbeddedZooKeeper) -> Iterator[StallingProxy]:
    """Named before `start_broker`, it ends after the brokers: without ZooKeeper their stop would wait for it."""
    assert zookeeper.port is not None
    one = StallingProxy(zookeeper.port)
    yield one
    one.close()


def test_while_zookeeper_stands_still_who_needs_it_not_is_answered(
    proxy: StallingProxy, start_broker: StartBroker, chroot: str
) -> None:
    through_proxy = f"127.0.0.1:{proxy.port}/{chroot.partition('/')[2]}"
    broker = start_broker(**{"zookeeper.connect": through_proxy, "zookeeper.session.timeout.ms": 60_000})
    topic = broker.new_topic()
    proxy.hold()
    try:
        commit = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
        create = bpb.CreateTopicRequest(name="new", partitions=1)
        waiting = [broker.stub.CommitOffsets.future(commit, timeout=600) for _ in range(300)]
        waiting += [broker.stub.CreateTopic.future(create, timeout=600) for _ in range(20)]
        waited_for(lambda: bool(broker.broker.host.metadata.session._client._pending))
        assert append(broker, topic, a_batch()).partitions[0].base_offset == 0
        assert len(pull(broker, topic, 0).body) > 0
        assert listed(broker, topic, bpb.ListOffset.LATEST).offset == 1
        assert broker.described("t").topic_id == topic
        assert broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30).answering_broker_id == 0
        assert "staged.bytes" in broker.counters()
        assert broker.stub.InitProducer(bpb.InitProducerRequest(), timeout=30).producer_id >= 0
        assert not all(call.done() for call in waiting)
    finally:
        proxy.resume()
    for call in waiting:
        call.cancel()


def test_slow_work_on_staged_data_delays_nobody_else(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    discard = transactions_pb2.AbortStagedRequest(
        partitions=[transactions_pb2.AbortStagedPartition(topic_id=topic, uuids=[b"u" * 16])]
    )
    with broker.broker.host.leader_of(topic, 0)._staging._lock:  # as while the disk stands still
        calls = [broker.stub.AbortStaged.future(discard, timeout=600) for _ in range(50)]
        assert append(broker, topic, a_batch()).partitions[0].base_offset == 0
        assert len(pull(broker, topic, 0).body) > 0
        assert listed(broker, topic, bpb.ListOffset.LATEST).offset == 1
        assert "staged.bytes" in broker.counters()
        commit = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=1)])
        broker.stub.CommitOffsets(commit, timeout=30)
        assert not any(call.done() for call in calls)
    for call in calls:
        call.result(timeout=30)


def test_calls_beyond_the_queue_are_refused_that_they_are_tried_again(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "QUEUED_MAX", 3)
    topic = broker.new_topic()
    discard = transactions_pb2.AbortStagedRequest(
        partitions=[transactions_pb2.AbortStagedPartition(topic_id=topic, uuids=[b"u" * 16])]
    )
    room = lanes.LANES["staged"].threads + 3
    with broker.broker.host.leader_of(topic, 0)._staging._lock:
        calls = [broker.stub.AbortStaged.future(discard, timeout=600) for _ in range(room + 5)]
        waited_for(lambda: sum(call.done() for call in calls) >= 5)
    refusals = [call for call in calls if call.exception(timeout=30) is not None]
    assert len(refusals) >= 5
    for call in refusals:
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        error = error_from_wire(pb.Error.FromString(dict(call.trailing_metadata())[rpc.ERROR_KEY]))
        assert isinstance(error, errors.BrokerBusy)
        assert "calls of the lane of AbortStaged are queued" in str(error)


def test_a_call_for_which_no_thread_can_be_started_is_refused_and_the_port_continues(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NoThreads(monkeypatch, lambda name: name.startswith("rpc-"))
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as caught:
            broker.stub.ListOffsets(bpb.ListOffsetsRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
    assert set(machine.refused) == {"rpc-listings_0"}
    machine.on = False
    broker.stub.ListOffsets(bpb.ListOffsetsRequest(), timeout=30)
    machine.on = True
    broker.stub.ListOffsets(bpb.ListOffsetsRequest(), timeout=30)  # by the thread that is there


def test_a_client_tries_again_where_a_broker_was_busy(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.new_topic()
    refused_once = threading.Event()
    refusing = lanes.is_refusing

    def noted() -> bool:
        if refusing():
            refused_once.set()
        return refusing()

    with Admin(f"127.0.0.1:{broker.broker.grpc_port}") as admin:
        admin.describe_cluster()
        monkeypatch.setattr(rpc, "is_refusing", noted)
        monkeypatch.setattr(lanes, "QUEUED_MAX", 0)
        thread, outcome = in_another_thread(admin.topics)
        assert refused_once.wait(30)
        monkeypatch.undo()
        join_all([thread], 60)
    assert [topic.name for topic in outcome[0]] == ["t"]


def test_what_grpc_itself_refuses_is_busy_or_too_large(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_CALLS_MAX", 0)
    full = start_broker().broker
    control = ControlConnection("127.0.0.1", full.grpc_port, connect_timeout_ms=30_000)
    with pytest.raises(errors.BrokerBusy, match="Concurrent RPC limit exceeded"):
        control.call("DescribeCluster", bpb.DescribeClusterRequest(), 30_000)
    control.close()
    monkeypatch.undo()
    control = ControlConnection("127.0.0.1", start_broker(1).broker.grpc_port, connect_timeout_ms=30_000)
    with pytest.raises(errors.RequestTooLarge) as raised:
        control.call("Append", bpb.InlineAppendRequest(body=bytes(5 << 20)), 30_000)
    assert raised.value.facts["limit"] == rpc._MESSAGE_MAX
    assert raised.value.facts["size"] >= 5 << 20
    control.close()


def test_what_its_client_gave_up_in_the_queue_is_not_begun(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    for _ in range(5):
        append(broker, topic, a_batch())
    discard = transactions_pb2.AbortStagedRequest(
        partitions=[transactions_pb2.AbortStagedPartition(topic_id=topic, uuids=[b"u" * 16])]
    )
    delete = broker.stub.DeleteRecords
    with broker.broker.host.leader_of(topic, 0)._staging._lock:
        calls = [broker.stub.AbortStaged.future(discard, timeout=600) for _ in range(lanes.LANES["staged"].threads)]
        given_up = delete.future(bpb.DeleteRecordsRequest(topic_id=topic, before_offset=4), timeout=600)
        # What comes after it on the connection is answered, so the broker knows of it.
        broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30)
        given_up.cancel()
        broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30)
    for call in calls:
        call.result(timeout=30)
    assert delete(bpb.DeleteRecordsRequest(topic_id=topic, before_offset=1), timeout=30).log_start_offset == 1


def test_calls_whose_message_never_comes_are_ended_while_others_queue(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_MESSAGE_SECONDS", 0.2)
    names = [f"/{SERVICE}/{lane.methods[0]}" for lane in lanes.LANES.values()]
    never = threading.Event()

    def no_message() -> Iterator[bytes]:
        never.wait()
        yield from ()

    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{broker.broker.grpc_port}", options) as channel:
        silent = []
        for name in (*names, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
            begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(name)
            silent += [begin.future(no_message()) for _ in range(30)]  # more than a lane has threads
        describe: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/DescribeCluster")
        describe(b"", timeout=30)  # so the broker knows of those before it
        try:
            topic = broker.new_topic()
            assert broker.stub.InitProducer(bpb.InitProducerRequest(), timeout=30).producer_id >= 0
            assert append(broker, topic, a_batch()).partitions[0].base_offset == 0
            health = health_pb2_grpc.HealthStub(broker.channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
        finally:
            never.set()


def test_a_call_whose_message_is_late_is_answered_while_nobody_queues(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_MESSAGE_SECONDS", 0.0)
    go_on = threading.Event()

    def late_message() -> Iterator[bytes]:
        assert go_on.wait(30)
        yield b""

    describe: grpc.StreamUnaryMultiCallable[bytes, bytes]
    describe = broker.channel.stream_unary(f"/{SERVICE}/DescribeCluster")
    call = describe.future(late_message())
    for _ in range(20):
        broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30)
    go_on.set()
    assert bpb.ClusterDescription.FromString(call.result(timeout=30)).answering_broker_id == 0


def test_a_call_without_its_message_and_one_that_is_no_message_are_refused(broker: RunningBroker) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        broker.channel.stream_unary(f"/{SERVICE}/DescribeCluster")(iter(()), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    error, status = refused(broker.channel.unary_unary(f"/{SERVICE}/CreateTopic"), b"\xff")
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error) == "invalid request: the message is not a request of CreateTopic"


def test_a_peer_that_has_vanished_loses_its_connection(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_KEEPALIVE_MS", 1000)
    monkeypatch.setattr(rpc, "_KEEPALIVE_TIMEOUT_MS", 200)
    port = start_broker().broker.grpc_port
    with socket.create_connection(("127.0.0.1", port), timeout=30) as peer:
        # A client's preface, its settings, and the acknowledgement of the server's; from then on no ping is answered.
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000 000000040100000000"))
        while peer.recv(4096):
            pass


def test_a_commit_lives_through_a_moment_without_zookeeper(
    proxy: StallingProxy, start_broker: StartBroker, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = TopicPartition("t", 0)
    broker = start_broker(**{"zookeeper.connect": f"127.0.0.1:{proxy.port}/{chroot.partition('/')[2]}"})
    broker.new_topic()
    session = broker.broker.host.metadata.session
    with Admin(f"127.0.0.1:{broker.broker.grpc_port}") as admin:
        admin.commit("g", {partition: 1})
        proxy.cut()
        waited_for(lambda: not session.connected)
        refused_once, not_asked = threading.Event(), session._not_asked

        def noted(reason: str) -> errors.ZooKeeperNotAsked:
            refused_once.set()
            return not_asked(reason)

        monkeypatch.setattr(session, "_not_asked", noted)
        thread, outcome = in_another_thread(lambda: admin.commit("g", {partition: 2}))
        assert refused_once.wait(30)
        proxy.resume()
        join_all([thread], 60)
        assert outcome == [None]
        assert admin.committed("g") == {partition: 2}


def test_a_start_and_a_change_of_topics_wait_for_a_zookeeper_that_is_away_for_a_moment(
    proxy: StallingProxy, start_broker: StartBroker, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away: list[bool] = []
    start, wait = ZooKeeperSession.start, Client.wait_connected

    def cut(session: ZooKeeperSession) -> None:
        proxy.cut()
        waited_for(lambda: not session.connected)
        away.append(True)

    def start_and_cut(session: ZooKeeperSession) -> None:
        start(session)
        cut(session)

    def come_back_and_wait(client: Client, seconds: float) -> bool:
        if away:
            away.clear()
            proxy.resume()
        return wait(client, seconds)

    monkeypatch.setattr(ZooKeeperSession, "start", start_and_cut)
    monkeypatch.setattr(Client, "wait_connected", come_back_and_wait)
    broker = start_broker(**{"zookeeper.connect": f"127.0.0.1:{proxy.port}/{chroot.partition('/')[2]}"})
    cut(broker.broker.host.metadata.session)
    topic = broker.new_topic()
    assert broker.described("t").topic_id == topic


def test_a_commit_is_not_written_once_its_client_has_given_up(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic()
    session = broker.broker.host.metadata.session
    committed = bpb.CommittedOffsetsRequest(group="g")
    standing_still = threading.Event()
    read, refuse = session.get_many, session._not_asked
    not_asked: list[str] = []

    def slowly(wanted: list[str], watch: Any = None, **how: Any) -> list[Any]:
        found = read(wanted, watch, **how)
        is_waiting = session._caller.is_waiting
        if is_waiting is not None:  # else it is no call, but the broker's own
            standing_still.set()
            waited_for(lambda: not is_waiting())
        return found

    def noted(reason: str) -> errors.ZooKeeperNotAsked:
        not_asked.append(reason)
        return refuse(reason)

    monkeypatch.setattr(session, "get_many", slowly)
    monkeypatch.setattr(session, "_not_asked", noted)
    request = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=1)])
    call = broker.stub.CommitOffsets.future(request, timeout=600)
    assert standing_still.wait(60)
    call.cancel()
    waited_for(lambda: bool(not_asked))
    monkeypatch.setattr(session, "get_many", read)
    assert not broker.stub.CommittedOffsets(committed, timeout=30).offsets


def test_memory_granted_to_an_answer_whose_client_has_gone_is_given_back(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_BUSY_SECONDS", 600)
    topic = broker.new_topic()
    append(broker, topic, a_batch())
    answers = broker.broker.rpc_service._answers
    held = answers.reserve(answers.limit, lambda: None)
    call = broker.stub.Pull.future(pb.FetchRequest(partitions=[pb.FetchPartition(topic_id=topic)]), timeout=600)
    waited_for(lambda: answers.is_wanted)
    call.cancel()
    broker.stub.DescribeCluster(bpb.DescribeClusterRequest(), timeout=30)
    held.release()
    waited_for(lambda: answers.used == 0)


# --- the rest ------------------------------------------------------------------------------------------------------


def test_health_and_reflection_answer(broker: RunningBroker) -> None:
    health = health_pb2_grpc.HealthStub(broker.channel)
    for service in ("", "kafkalog.wire.Broker"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(broker.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    services = next(reflection.ServerReflectionInfo(asked)).list_services_response.service
    assert "kafkalog.wire.Broker" in {service.name for service in services}


def test_a_defect_is_reported_as_such_and_the_broker_continues(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("broker.transport.rpc.offsets.list_offsets", broken)
    error, status = refused(broker.stub.ListOffsets, bpb.ListOffsetsRequest())
    assert str(error) == "the broker failed on this request: ZeroDivisionError: a defect"
    assert status is grpc.StatusCode.INTERNAL
    assert "request_failed" in caplog.text
    monkeypatch.undo()
    assert not broker.stub.ListOffsets(bpb.ListOffsetsRequest()).partitions
