"""Ranges of a partition, as Spark's tasks read them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.client import cluster as cluster_module
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import ClientSettings
from kafkalog.client.consumer import range_fetch
from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch, decode
from kafkalog.client.consumer.range_fetch import LeaderHint, fetch_range
from kafkalog.errors import (
    BrokerBusy,
    BrokerUnreachable,
    CorruptBatch,
    DataLost,
    InternalError,
    KafkalogError,
    LeaderNotAvailable,
    NotLeader,
    OffsetOutOfRange,
    OutOfFiles,
    RequestTimedOut,
    TooManyConnections,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.format.batch import BatchHeader
from kafkalog.net.data import DataConnection, Reply
from kafkalog.wire import broker_pb2
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import PREFIX_SIZE, error_to_wire
from tests.kafkalog.client.consumer.batches import batches
from tests.proxy import proxied

pytestmark = pytest.mark.timeout(120)
COUNT = 2000


@pytest.fixture(scope="module")
def connected(cluster: LocalCluster) -> Iterator[Cluster]:
    shared = Cluster(cluster.bootstrap_servers, retry_timeout_ms=500)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def filled(cluster: LocalCluster) -> TopicPartition:
    """Records 0 to 1999, seven a batch."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("ranges", partitions=1)
    with Producer(cluster.bootstrap_servers, batch_records=7, linger_ms=1000) as producer:
        for number in range(COUNT):
            producer.send("ranges", b"%d" % number, partition=0)
    return TopicPartition("ranges", 0)


def values(groups: Iterator[list[tuple[BatchHeader, pa.RecordBatch]]]) -> Iterator[int]:
    return (int(value) for group in groups for _, columns in group for value in columns.column("value").to_pylist())


def read(cluster: Cluster, partition: TopicPartition, start: int, end: int, max_bytes: int = 1 << 20) -> list[int]:
    found = []
    for group in fetch_range(cluster, partition, None, start, end, max_bytes=max_bytes):
        assert group
        for header, columns in group:
            assert columns.num_rows > 0
            first = max(header.base_offset, start)
            values = [int(value) for value in columns.column("value").to_pylist()]
            assert values[0] == first
            found += values
    return found


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize(
    "start, end", [(0, COUNT), (0, 1), (5, 9), (6, 8), (700, 1401), (COUNT - 1, COUNT), (3, 3), (9, 4)]
)
def test_a_range_is_read_to_the_record(
    connected: Cluster, filled: TopicPartition, start: int, end: int, max_bytes: int
) -> None:
    assert read(connected, filled, start, end, max_bytes) == list(range(start, end))


def hint_of(cluster: Cluster, partition: TopicPartition) -> LeaderHint:
    topic, leader = cluster.leader_of(partition)
    return LeaderHint(topic.topic_id, leader)


def test_who_knows_the_leader_asks_no_broker_who_it_is(connected: Cluster, filled: TopicPartition) -> None:
    cold = Cluster("127.0.0.1:1", bootstrap_timeout_ms=500)  # nobody answers there
    hint = hint_of(connected, filled)
    for topic_id in (hint.topic_id, None):
        assert list(values(fetch_range(cold, filled, topic_id, 3, 9, hint=hint))) == list(range(3, 9))
    cold.close()


def test_who_knows_nothing_waits_once_for_a_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = Cluster("127.0.0.1:1", bootstrap_timeout_ms=5000, retry_timeout_ms=60_000)  # nobody answers there
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(cold, "pause", pause)
    clock = SimpleNamespace(monotonic=lambda: now)
    for module in (range_fetch, cluster_module):
        monkeypatch.setattr(module, "time", clock)
    with pytest.raises(BrokerUnreachable):
        list(fetch_range(cold, T0, b"i" * 16, 0, 9))
    assert now == 5.0
    cold.close()


@pytest.mark.parametrize("outdated", ["port", "topic"])
def test_a_hint_that_is_outdated_costs_a_question(
    cluster: LocalCluster, connected: Cluster, filled: TopicPartition, outdated: str
) -> None:
    hint = hint_of(connected, filled)
    elsewhere = hint.broker._replace(data_port=1)
    old = hint._replace(broker=elsewhere) if outdated == "port" else hint._replace(topic_id=bytes(16))
    cold = Cluster(cluster.bootstrap_servers)
    assert list(values(fetch_range(cold, filled, None, 3, 9, hint=old))) == list(range(3, 9))
    cold.close()


def test_a_topic_created_again_is_not_read_on_in_the_middle_nor_where_another_is_meant(
    connected: Cluster, filled: TopicPartition
) -> None:
    hint = LeaderHint(bytes(16), hint_of(connected, filled).broker)
    with pytest.raises(UnknownTopicId):
        list(fetch_range(connected, filled, bytes(16), 3, 9, hint=hint))


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_request_asks_for_about_what_the_range_takes(
    cluster: LocalCluster, connected: Cluster, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    partition = TopicPartition(f"sized-{size}", 0)
    with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers, batch_records=2) as producer:
        admin.create_topic(partition.topic, partitions=1)
        for _ in range(400):
            producer.send(partition.topic, b"v" * size, partition=0)
    asked: list[int] = []
    ask = PartitionFetch.ask

    def recorded(self: PartitionFetch, request: pb.FetchRequest, max_bytes: int) -> None:
        asked.append(max_bytes)
        ask(self, request, max_bytes)

    monkeypatch.setattr(PartitionFetch, "ask", recorded)
    for count in (10, 200):
        asked.clear()
        groups = list(fetch_range(connected, partition, None, 0, count))
        assert sum(columns.num_rows for group in groups for _, columns in group) == count
        assert asked[0] <= max(64 << 10, count << 10)
        assert max(asked) <= (64 << 10) + max(count << 10, 3 * count * (size + 200))
        assert len(asked) <= 3


def test_columns_stand_on_the_memory_they_were_received_into(connected: Cluster, filled: TopicPartition) -> None:
    allocated = pa.total_allocated_bytes()
    [group] = list(fetch_range(connected, filled, None, 0, 100))
    addresses = [data.address for _, columns in group for data in columns.column("value").buffers()[2:] if data]
    assert addresses == sorted(addresses)
    assert addresses[-1] - addresses[0] < 64 * 1024
    assert all(address % 8 == 0 for address in addresses)
    del group
    assert pa.total_allocated_bytes() <= allocated + 1024


def test_connections_are_used_again_and_those_with_an_answer_outstanding_are_not(
    cluster: LocalCluster, filled: TopicPartition
) -> None:
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy):
        for _ in range(5):
            assert read(through, filled, 10, 20) == list(range(10, 20))
        assert proxy.accepted == 1
        left = fetch_range(through, filled, None, 0, COUNT, max_bytes=1)
        next(left)
        left.close()
        assert read(through, filled, 10, 20) == list(range(10, 20))
        assert proxy.accepted == 2


def test_a_cut_connection_continues_where_it_was(cluster: LocalCluster, filled: TopicPartition) -> None:
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port, retry_backoff_ms=5) as (through, proxy):
        found: list[int] = []
        for group in fetch_range(through, filled, None, 0, COUNT, max_bytes=2000):
            found += [int(value) for _, columns in group for value in columns.column("value").to_pylist()]
            if len(found) % 5 == 0:
                proxy.cut()
        assert found == list(range(COUNT))
        assert proxy.accepted > 3


def failing(calls: dict[int, KafkalogError], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that fails instead, the times that are named."""
    made = itertools.count(1)

    def called(*arguments: Any, **named: Any) -> Any:
        error = calls.get(next(made))
        if error is not None:
            raise error
        return call(*arguments, **named)

    return called


@pytest.mark.parametrize("sending", [2, 3, 4])
def test_a_next_request_that_can_not_be_sent_loses_no_answer(
    connected: Cluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch, sending: int
) -> None:
    error = BrokerUnreachable(address="there", reason="reset by peer")
    monkeypatch.setattr(DataConnection, "send", failing({sending: error}, DataConnection.send))
    assert read(connected, filled, 0, COUNT, max_bytes=2000) == list(range(COUNT))


def test_metadata_is_requested_again_from_a_busy_broker(
    connected: Cluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = BrokerUnreachable(address="there", reason="reset by peer")
    busy = BrokerBusy(broker=0, reason="256 calls of the lane of DescribeTopics are queued")
    monkeypatch.setattr(DataConnection, "send", failing({1: gone}, DataConnection.send))
    monkeypatch.setattr(connected, "refresh", failing({1: busy}, connected.refresh))
    assert read(connected, filled, 0, COUNT) == list(range(COUNT))


def test_an_answer_that_does_not_follow_the_one_before_is_refused(
    connected: Cluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PartitionFetch.take
    taken = itertools.count(1)

    def forget_the_second(reader: PartitionFetch, answer: pb.FetchedPartition, data: memoryview) -> list[FetchedBatch]:
        found = take(reader, answer, data)
        return [] if next(taken) == 2 else found

    monkeypatch.setattr(PartitionFetch, "take", forget_the_second)
    found: list[int] = []
    with pytest.raises(DataLost, match=rf"{filled} continues at offset \d+, but \d+ is next"):
        found.extend(values(fetch_range(connected, filled, None, 0, COUNT, max_bytes=2000)))
    assert found == list(range(len(found))) != []


def test_batches_before_one_that_can_not_be_decoded_are_handed_out(
    connected: Cluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CorruptBatch(partition=str(filled), offset=28, reason="no Arrow")
    monkeypatch.setattr(range_fetch, "decode", failing({5: error}, decode))
    found: list[int] = []
    with pytest.raises(CorruptBatch, match="no Arrow"):
        found.extend(values(fetch_range(connected, filled, None, 0, COUNT)))
    assert found == list(range(28))


def test_a_pause_of_the_reader_is_not_counted_against_its_retries(
    cluster: LocalCluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_passed = 0.0
    passing = SimpleNamespace(monotonic=lambda: time.monotonic() + time_passed, sleep=time.sleep)
    monkeypatch.setattr(range_fetch, "time", passing)
    patient = Cluster(cluster.bootstrap_servers, retry_timeout_ms=5000)
    error = BrokerUnreachable(address="there", reason="reset by peer")
    found: list[int] = []
    for number, group in enumerate(fetch_range(patient, filled, None, 0, COUNT, max_bytes=2000), 1):
        found += [int(value) for _, columns in group for value in columns.column("value").to_pylist()]
        if number == 2:
            time_passed = 3600.0
            monkeypatch.setattr(DataConnection, "receive", failing({1: error}, DataConnection.receive))
    assert found == list(range(COUNT))
    patient.close()


def test_a_range_outside_the_log_raises(connected: Cluster, filled: TopicPartition) -> None:
    with pytest.raises(OffsetOutOfRange, match=rf"offset 5000 of {filled} is outside \[0, {COUNT}\]"):
        read(connected, filled, 5000, 5001)
    with pytest.raises(OffsetOutOfRange, match=rf"offset {COUNT + 4} of {filled} is outside \[0, {COUNT}\]"):
        read(connected, filled, COUNT - 5, COUNT + 5)
    with pytest.raises(UnknownTopic):
        read(connected, TopicPartition("no.such.topic", 0), 0, 1)
    with pytest.raises(UnknownPartition, match="topic 'ranges' has no partition 3; it has 1"):
        read(connected, TopicPartition("ranges", 3), 0, 1)
    with pytest.raises(UnknownTopicId, match=f"no topic has the id {bytes(16).hex()}"):
        list(fetch_range(connected, filled, bytes(16), 0, 1))


# --- taking answers, without a broker --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, asked, follows", [
    ("compact", 10, True),  # compaction left a gap in the answer
    ("compact", 20, False),  # the answer before was taken in, and not handed out
    ("delete", 10, False),
])  # fmt: skip
def test_a_gap_is_compactions_or_a_loss(policy: str, asked: int, follows: bool) -> None:
    topic = SimpleNamespace(effective={"cleanup.policy": policy})
    cluster: Any = SimpleNamespace(topic=lambda name: topic, settings=ClientSettings.parse({}))
    reader = PartitionFetch(TopicPartition("t", 0), b"i" * 16, 10)
    fetch = range_fetch._RangeFetch(cluster, reader, 100, 1 << 20, None, False)
    fetch._asked_offset = asked
    header: Any = SimpleNamespace(end_offset=30)
    found = [FetchedBatch(header, memoryview(b""), 20)]
    if follows:
        fetch._check_follows(found)
        assert fetch._position == 30
    else:
        with pytest.raises(DataLost, match="t-0 continues at offset 20, but 10 is next"):
            fetch._check_follows(found)


def test_a_range_that_is_left_leaves_no_connection_with_an_answer_outstanding_to_the_next(
    cluster: LocalCluster, filled: TopicPartition
) -> None:
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, _):
        left = fetch_range(behind, filled, None, 0, COUNT, max_bytes=1)
        next(left)  # what comes next is asked for already
        left.close()
        assert not any(behind._idle.values())
        assert read(behind, filled, 0, COUNT) == list(range(COUNT))
        assert len(behind._idle[0]) == 1


# --- a range over brokers that answer as the test says ----------------------------------------------------------------

GONE = BrokerUnreachable(address="here:1", reason="it closed the connection")
THREES = [batches(3, 3, 3)[start * len(batches(3)) : (start + 1) * len(batches(3))] for start in range(3)]
T0 = TopicPartition("t", 0)


class Wire:
    """A connection to a broker that has records 0 to 8, three a batch and a batch an answer."""

    address = "here:1"

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._asked: list[tuple[int, bytes, int]] = []
        self.is_closed = False

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._brokers.sends and (error := self._brokers.sends.pop(0)):
            raise error
        data = b"".join(pieces)
        header = pb.RequestHeader.FromString(data[PREFIX_SIZE:])
        [part] = header.fetch.partitions
        self._asked.append((header.correlation_id, part.topic_id, part.offset))

    def receive(self) -> Reply:
        correlation_id, topic_id, offset = self._asked.pop(0)
        event = self._brokers.events.pop(0) if self._brokers.events else None
        if isinstance(event, BrokerUnreachable):
            raise event
        if isinstance(event, int | OffsetOutOfRange):  # up to where this broker lets readers read, or its log ends
            reply = pb.ReplyHeader(correlation_id=correlation_id)
            if isinstance(event, OffsetOutOfRange):
                reply.fetch.partitions.add(error=error_to_wire(event))
                return Reply(reply, None)
            body = THREES[offset // 3] if offset < event else b""
            reply.fetch.partitions.add(end_offset=event, length=len(body))
            return Reply(reply, memoryview(bytearray(body)))
        if event is None and topic_id != self._brokers.topic_id:
            event = UnknownTopicId(topic_id=topic_id.hex())
            reply = pb.ReplyHeader(correlation_id=correlation_id)
            reply.fetch.partitions.add(error=error_to_wire(event))
            return Reply(reply, None)
        if event is not None:
            return Reply(pb.ReplyHeader(error=error_to_wire(event)), None)
        body = THREES[offset // 3]
        reply = pb.ReplyHeader(correlation_id=correlation_id)
        reply.fetch.partitions.add(end_offset=9, length=len(body))
        return Reply(reply, memoryview(bytearray(body)))

    def close(self) -> None:
        self.is_closed = True


class Brokers:
    """In the place of a Cluster. `sends` and `events` say what becomes of the requests, in turn; `leads_then` leads
    once somebody asks, and its log ends at `latest`."""

    latest = 9

    def __init__(self, **settings: object) -> None:
        self.settings = ClientSettings.parse(settings)
        self.topic_id = b"i" * 16
        self.sends: list[KafkalogError | None] = []
        self.events: list[KafkalogError | int | None] = []
        self.leader = self.leads_then = 1
        self.borrowed: list[int] = []
        self.given_back: list[Wire] = []
        self.pauses: list[float] = []
        self.made: list[Wire] = []
        self.now = 0.0

    def topic(self, name: str, *, patient: bool = True) -> SimpleNamespace:
        return SimpleNamespace(topic_id=self.topic_id, effective={"cleanup.policy": "delete"})

    def leader_of(
        self, partition: TopicPartition, topic_id: bytes | None = None, *, patient: bool = True
    ) -> tuple[SimpleNamespace, SimpleNamespace]:
        assert not patient or topic_id is None, "whoever reads the range tries again"
        return self.topic("t"), SimpleNamespace(broker_id=self.leader)

    def refresh(self, names: object, *, patient: bool = True) -> None:
        self.leader = self.leads_then

    def retrying(self, attempt: Callable[[], object], *, finds_leaders: bool) -> object:
        return attempt()

    def call(self, method: str, request: object, *, broker_id: int, patient: bool) -> SimpleNamespace:
        assert (method, broker_id) == ("ListOffsets", self.leads_then)
        listed = broker_pb2.ListedOffset(found=True, offset=self.latest)
        return SimpleNamespace(partitions=[listed])

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def await_answer(self, broker_id: int, connection: Wire, partition: TopicPartition) -> None:
        """`connection` answers at once, or fails."""

    def borrow_data(self, broker_id: int, known: object) -> Wire:
        self.borrowed.append(broker_id)
        self.made.append(Wire(self))
        return self.made[-1]

    def give_back(self, broker_id: int, connection: Wire) -> None:
        self.given_back.append(connection)


def read_from(brokers: Brokers, topic_id: bytes | None = b"i" * 16, **more: Any) -> Iterator[int]:
    cluster: Any = brokers
    for group in fetch_range(cluster, T0, topic_id, 0, 9, **more):
        for header, columns in group:
            yield from range(header.base_offset, header.base_offset + columns.num_rows)


def test_after_a_failure_whoever_leads_then_is_asked() -> None:
    brokers = Brokers()
    brokers.leads_then = 2
    brokers.events = [GONE]
    assert list(read_from(brokers)) == list(range(9))
    assert brokers.borrowed == [1, 2]


OUTSIDE = OffsetOutOfRange(offset=3, partition="t-0", start_offset=0, end_offset=2)


@pytest.mark.parametrize("event", [3, OUTSIDE], ids=["readable end", "log end"])
@pytest.mark.parametrize("first", [[], [None]], ids=["at once", "amid the range"])
def test_the_end_of_a_log_is_that_which_its_leader_has_now(event: KafkalogError | int, first: list[None]) -> None:
    """It may be that of a broker which leads no more, or of one which leads since a moment."""
    brokers = Brokers()
    brokers.leads_then = 2
    brokers.events = [*first, event]
    assert list(read_from(brokers)) == list(range(9))
    assert brokers.borrowed == [1, 2]
    brokers.latest = 8
    brokers.events = [*first, event]
    with pytest.raises(OffsetOutOfRange):
        list(read_from(brokers))


@pytest.mark.parametrize("first", [[], [None]], ids=["at once", "amid the range"])
def test_records_that_were_deleted_are_not_asked_for_again(first: list[None]) -> None:
    """Else it takes the whole time for retries to find out, and then is no error that tells of lost data."""
    brokers = Brokers()
    brokers.events = [*first, OffsetOutOfRange(offset=3, partition="t-0", start_offset=6, end_offset=9)]
    with pytest.raises(OffsetOutOfRange):
        list(read_from(brokers))
    assert not brokers.pauses


def test_records_end_the_pauses_and_interruptions_with_records_between_do_not_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(retry_timeout_ms=400)
    monkeypatch.setattr(range_fetch, "time", SimpleNamespace(monotonic=lambda: brokers.now))
    brokers.events = [GONE, GONE, None] * 3
    first = brokers.settings.retry_backoff_ms / 1000
    assert list(read_from(brokers)) == list(range(9))
    assert brokers.pauses == [first, 2 * first] * 3
    assert sum(brokers.pauses) > 0.4
    brokers.events = [GONE] * 20
    with pytest.raises(BrokerUnreachable):
        list(read_from(brokers))


def test_pauses_grow_to_the_longest_and_no_further() -> None:
    brokers = Brokers(retry_backoff_ms=100, retry_backoff_max_ms=250)
    brokers.events = [RequestTimedOut(what="a fetch", address="here:1", timeout_ms=1)] * 4
    assert list(read_from(brokers)) == list(range(9))
    assert brokers.pauses == [0.1, 0.2, 0.25, 0.25]


def test_while_leaders_change_pauses_are_short() -> None:
    brokers = Brokers(retry_backoff_ms=100, retry_backoff_max_ms=250)
    brokers.events = [GONE] * 4
    assert list(read_from(brokers)) == list(range(9))
    assert brokers.pauses == [0.1, 0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    "passing",
    [
        BrokerBusy(broker=1),
        LeaderNotAvailable(partition="t-0", broker_id=1),
        NotLeader(broker_id=1, partition="t-0"),
        OutOfFiles(broker=1),
        RequestTimedOut(what="a fetch", address="here:1", timeout_ms=1),
        TooManyConnections(broker=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_retriable_error_is_retried(passing: KafkalogError) -> None:
    brokers = Brokers()
    brokers.events = [passing]
    assert list(read_from(brokers)) == list(range(9))
    assert len(brokers.pauses) == 1


def test_a_topic_created_again_is_read_instead_only_until_records_have_come() -> None:
    leader: Any = SimpleNamespace(broker_id=1)
    hint = LeaderHint(b"i" * 16, leader)
    brokers = Brokers()
    brokers.topic_id = b"anew".ljust(16)
    assert list(read_from(brokers, None, hint=hint)) == list(range(9))
    brokers.topic_id = b"i" * 16
    reading = read_from(brokers, None, hint=hint)
    assert next(reading) == 0
    brokers.topic_id = b"anew".ljust(16)
    with pytest.raises(UnknownTopicId):
        list(reading)


def test_an_answer_to_a_request_that_did_not_leave_is_not_waited_for() -> None:
    brokers = Brokers()
    brokers.sends = [None, GONE]
    assert list(read_from(brokers)) == list(range(9))
    assert [each.is_closed for each in brokers.made] == [True, False]
    assert brokers.given_back == brokers.made[1:]
    assert brokers.pauses == []


def test_a_connection_that_the_broker_refused_to_continue_with_is_closed_and_not_given_back() -> None:
    brokers = Brokers()
    brokers.events = [None, InternalError(reason="a defect")]
    with pytest.raises(InternalError):
        list(read_from(brokers))
    assert brokers.given_back == []
    assert [each.is_closed for each in brokers.made] == [True]
