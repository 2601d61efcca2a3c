"""A sender to a broker, with a connection that answers when and what the test says."""

from __future__ import annotations

import math
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kafkalog.client.config import LONG_MAX, ClientSettings
from kafkalog.client.link import Link
from kafkalog.client.producer import sender as module
from kafkalog.client.producer.accumulator import Accumulator
from kafkalog.client.producer.encode import encode_records
from kafkalog.client.producer.queue import Batch, Failed, Identity, PartitionQueue
from kafkalog.client.producer.sender import Sender, _requests
from kafkalog.errors import (
    BatchTooLarge,
    BrokerUnreachable,
    Closed,
    InternalError,
    KafkalogError,
    NotLeader,
    OutcomeUnknown,
    RequestTimedOut,
    RequestTooLarge,
    UnknownTopic,
)
from kafkalog.records import RecordMetadata, TopicPartition
from kafkalog.retry import Backoff
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import PREFIX, PREFIX_SIZE, error_to_wire
from tests.threads import NoThreads
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(60)
LIMIT = 30.0
SILENCE = RequestTimedOut(what="a request", address="here:1", timeout_ms=1)
GONE = BrokerUnreachable(address="here:1", reason="it closed the connection")


class Connection:
    """Keeps what is sent, and hands out the answers that a test puts in."""

    address = "here:1"
    has_buffered = False
    is_closed = False

    def __init__(self) -> None:
        self.sent: queues.Queue[pb.RequestHeader] = queues.Queue()
        self.answers: queues.Queue[pb.ReplyHeader | KafkalogError] = queues.Queue()
        self.receives = threading.Semaphore(0)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        data = b"".join(pieces)
        while data:
            header_length, body_length = PREFIX.unpack_from(data)
            self.sent.put(pb.RequestHeader.FromString(data[PREFIX_SIZE : PREFIX_SIZE + header_length]))
            data = data[PREFIX_SIZE + header_length + body_length :]

    def receive_some(self) -> list[pb.ReplyHeader]:
        self.receives.release()
        answer = self.answers.get(timeout=LIMIT)
        if isinstance(answer, KafkalogError):
            raise answer
        return [answer]

    def answer(self, *results: int | KafkalogError) -> list[bytes]:
        """Answer the next frame that was sent, each of its partitions with a base offset or an error; waits for it.
        Returns its topics' ids."""
        sent = self.sent.get(timeout=LIMIT)
        reply = pb.ReplyHeader(correlation_id=sent.correlation_id)
        for result in results:
            if isinstance(result, KafkalogError):
                reply.append.partitions.add(error=error_to_wire(result))
            else:
                reply.append.partitions.add(base_offset=result)
        self.answers.put(reply)
        return [part.topic_id for part in sent.append.partitions]

    def refuse(self, error: KafkalogError) -> None:
        """Answer the next frame with an error for all of it."""
        sent = self.sent.get(timeout=LIMIT)
        self.answers.put(pb.ReplyHeader(correlation_id=sent.correlation_id, error=error_to_wire(error)))

    def fall_silent(self) -> None:
        """Let the time for an answer pass, and wait until more are waited for."""
        while self.receives.acquire(blocking=False):
            pass
        self.answers.put(SILENCE)
        assert self.receives.acquire(timeout=LIMIT)

    def shut_down(self) -> None:
        self.answers.put(GONE)

    def close(self) -> None:
        self.is_closed = True


class Part:
    """Cluster and producer as a sender knows them: one connection, what `on_connect` and `on_refresh` do, and the
    leader's sender."""

    leader: Sender

    def __init__(self, **settings: object) -> None:
        self.settings = ClientSettings.parse(settings)
        self.connection = Connection()
        self.connects = 0
        self.on_connect: Callable[[], object] = lambda: None
        self.on_refresh: Callable[[], object] = lambda: None
        self.gone: Failed = []
        self.loss: BrokerUnreachable | None = None

    def loss_of(self, broker_id: int, connection: Connection) -> BrokerUnreachable | None:
        return self.loss

    def connect_data(self, broker_id: int) -> Connection:
        self.connects += 1
        self.on_connect()
        return self.connection

    def refresh(self, names: Sequence[str], *, patient: bool) -> None:
        self.on_refresh()

    def identity(self, used_up: int | None) -> Identity:
        return Identity(7, 0)

    def take_in_topics(self) -> Failed:
        gone, self.gone = self.gone, []
        return gone

    def topics(self) -> list[str]:
        return []

    def has_work(self, queue: PartitionQueue, at: float) -> None:
        if not queue.is_idle:
            self.leader.has_work(queue, at)


class Senders:
    """Senders that share an accumulator, as a producer's do."""

    def __init__(self) -> None:
        self.accumulator = Accumulator(1 << 20, 1000, "here:1", lambda queue: None)
        self.senders: list[Sender] = []

    def make(self, part: Part, acks: int = 1, request_bytes: int = 1 << 20) -> Sender:
        stand_in: Any = part
        part.leader = Sender(1, stand_in, self.accumulator, stand_in, acks=acks, codec=0, request_bytes=request_bytes)
        return part.leader

    def start(self, part: Part, acks: int = 1, request_bytes: int = 1 << 20) -> Sender:
        sender = self.make(part, acks, request_bytes)
        self.senders.append(sender)
        with self.accumulator.lock:
            sender.start()
        return sender

    def queue(self, topic: str, idempotent: bool = False) -> PartitionQueue:
        return PartitionQueue(
            TopicPartition(topic, 0),
            topic.encode().ljust(16),
            idempotent=idempotent,
            window=10,
            delivery_timeout_ms=int(LIMIT * 1000),
            backoff=Backoff(0.001, 0.001),
            accumulator=self.accumulator,
        )

    def add(self, queue: PartitionQueue, value: bytes) -> Batch:
        """Lock held: a batch of one record."""
        now = time.monotonic()
        batch = queue.start_batch(now, now + LIMIT)
        batch.values.append(value)
        batch.timestamps_us.append(1)
        batch.size = batch.charged = len(value)
        self.accumulator.buffered += batch.charged
        self.accumulator.started(batch)
        queue.close_batch()
        return batch

    def send(self, sender: Sender, queue: PartitionQueue, value: bytes = b"x") -> Batch:
        with self.accumulator.lock:
            batch = self.add(queue, value)
            sender.has_work(queue, 0.0)
        return batch

    def outcome(self, batch: Batch) -> KafkalogError | int:
        """A batch's error or offset, once it is done."""
        with self.accumulator.lock:
            self.accumulator.wait_done([batch], LIMIT, "a batch")
        return batch.error or batch.base_offset


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    yield made
    with made.accumulator.lock:
        for sender in made.senders:
            sender.stop()
    until = time.monotonic() + LIMIT
    for sender in made.senders:
        sender.join(max(0.0, until - time.monotonic()))
        assert not any(thread.is_alive() for thread in (sender._thread, *sender._readers))


def test_without_a_thread_to_read_acks_nothing_is_sent_until_there_is_one(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NoThreads(monkeypatch, lambda name: name.endswith("-acks"))
    part = Part()
    batch = senders.send(senders.start(part), senders.queue("t"))
    waited_for(lambda: len(machine.refused) > 1)
    assert part.connection.is_closed and part.connection.sent.empty()
    assert not batch.done
    machine.on = False
    part.connection.answer(5)
    assert senders.outcome(batch) == 5


def test_a_topic_deleted_while_its_batch_is_being_sent_fails_nothing_of_another(senders: Senders) -> None:
    part = Part()
    deleted, other = senders.queue("deleted"), senders.queue("other")

    def delete() -> None:  # as another sender does that asked for the topics; between taking a batch and encoding it
        with senders.accumulator.lock:
            senders.accumulator.finish([(batch, UnknownTopic(topic="deleted")) for batch in deleted.clear()])

    part.on_connect = delete
    sender = senders.start(part)
    with senders.accumulator.lock:
        lost, kept = senders.add(deleted, b"lost"), senders.add(other, b"kept")
        sender.has_work(deleted, 0.0)
        sender.has_work(other, 0.0)
    assert isinstance(senders.outcome(lost), UnknownTopic)
    part.connection.answer(5, 6)  # the first late, and of no use
    assert senders.outcome(kept) == 6
    again = senders.send(sender, deleted, b"to a topic made anew")
    part.connection.answer(7)
    assert senders.outcome(again) == 7
    assert senders.accumulator.buffered == 0


def _two_in_a_frame(senders: Senders, part: Part, acks: int = 1, request_bytes: int = 1 << 20) -> list[Batch]:
    return _send_two(senders, senders.start(part, acks, request_bytes))


def _send_two(senders: Senders, sender: Sender) -> list[Batch]:
    queues = [senders.queue(topic, idempotent=True) for topic in ("first", "second")]
    with senders.accumulator.lock:
        batches = [senders.add(queue, b"x") for queue in queues]
        for queue in queues:
            queue.identity = Identity(7, 0)
            sender.has_work(queue, 0.0)
    return batches


def test_small_batches_of_several_partitions_go_in_one_frame_and_each_has_its_own_answer(senders: Senders) -> None:
    part = Part()
    first, second = _two_in_a_frame(senders, part)
    too_large = BatchTooLarge(size=2, partition="first-0", limit=1)
    assert part.connection.answer(too_large, 7) == [b"first".ljust(16), b"second".ljust(16)]
    assert str(senders.outcome(first)) == str(too_large) and senders.outcome(second) == 7
    assert senders.accumulator.buffered == 0


def test_a_frame_that_is_refused_as_a_whole_is_sent_again_partition_by_partition(senders: Senders) -> None:
    part = Part()
    first, second = _two_in_a_frame(senders, part)
    too_large = RequestTooLarge(size=2, setting="request.max.bytes", limit=1)
    part.connection.refuse(too_large)
    topics = part.connection.answer(5) + part.connection.answer(too_large)
    assert sorted(topics) == [b"first".ljust(16), b"second".ljust(16)]
    waited_for(lambda: first.done and second.done)
    outcomes = {batch.base_offset if batch.error is None else type(batch.error) for batch in (first, second)}
    assert outcomes == {5, RequestTooLarge}
    _send_two(senders, part.leader)
    assert len(part.connection.answer(6)) == len(part.connection.answer(7)) == 1, "no frame is shared after that"


def test_after_a_frame_that_was_refused_for_its_size_only_what_was_written_is_of_unknown_outcome(
    senders: Senders,
) -> None:
    part = Part()
    first, second = _two_in_a_frame(senders, part)
    part.connection.refuse(RequestTooLarge(size=2, setting="request.max.bytes", limit=1))
    waited_for(lambda: not part.connection.sent.empty())
    assert not first.maybe_written and not second.maybe_written
    part.connection.answer(5)
    part.connection.answer(6)


def test_after_a_frame_that_failed_as_a_whole_all_of_it_may_be_written(senders: Senders) -> None:
    part = Part(retry_backoff_max_ms=1)
    first, second = _two_in_a_frame(senders, part)
    part.connection.refuse(RequestTimedOut(what="an append", address="here:1", timeout_ms=1))
    waited_for(lambda: not part.connection.sent.empty())
    assert first.maybe_written and second.maybe_written
    part.connection.answer(5)
    part.connection.answer(6)


@pytest.mark.parametrize(("partitions", "in_bytes"), [(2, 1 << 20), (500, 2.5)])
def test_a_frame_has_so_many_partitions_and_bytes(
    senders: Senders, monkeypatch: pytest.MonkeyPatch, partitions: int, in_bytes: float
) -> None:
    part = Part()
    monkeypatch.setattr(module, "_FRAME_PARTITIONS", partitions)
    size = 1 << 20
    if in_bytes < size:
        probe = Part()
        _two_in_a_frame(senders, probe)
        probe.connection.sent.put(sent := probe.connection.sent.get(timeout=LIMIT))
        size = int(in_bytes * sent.append.partitions[0].length)
        probe.connection.answer(3, 4)
    monkeypatch.setattr(module, "_FRAME_BYTES", size)
    sender = senders.start(part)
    topics = [b"first", b"second", b"third"]
    with senders.accumulator.lock:
        queues = [senders.queue(topic.decode(), idempotent=True) for topic in topics]
        batches = [senders.add(queue, b"x") for queue in queues]
        for queue in queues:
            queue.identity = Identity(7, 0)
            sender.has_work(queue, 0.0)
    assert part.connection.answer(3, 4) == [topic.ljust(16) for topic in topics[:2]]
    assert part.connection.answer(5) == [b"third".ljust(16)]
    assert [senders.outcome(batch) for batch in batches] == [3, 4, 5]


def test_an_answer_for_fewer_partitions_than_were_sent_ends_the_connection(senders: Senders) -> None:
    part = Part()
    first, second = _two_in_a_frame(senders, part)
    waited_for(lambda: not part.connection.sent.empty())
    before, part.connection = part.connection, Connection()
    before.answer(5)
    assert [part.connection.answer(3), part.connection.answer(4)] == [[b"first".ljust(16)], [b"second".ljust(16)]]
    assert (senders.outcome(first), senders.outcome(second)) == (3, 4)
    waited_for(lambda: before.is_closed)


def test_without_acks_no_frame_is_shared_because_one_that_is_refused_ends_the_connection(senders: Senders) -> None:
    part = Part()
    for batch in _two_in_a_frame(senders, part, acks=0):
        assert senders.outcome(batch) == -1
    assert [len(part.connection.sent.get(timeout=LIMIT).append.partitions) for _ in range(2)] == [1, 1]


def test_a_shared_frame_is_given_up_when_the_first_of_its_batches_is_due(senders: Senders) -> None:
    part = Part()
    sender = senders.start(part)
    with senders.accumulator.lock:
        batches = [senders.add(senders.queue(topic, idempotent=True), b"x") for topic in ("first", "second")]
        batches[0].deadline = time.monotonic() + 5
        for batch in batches:
            batch.queue.identity = Identity(7, 0)
            sender.has_work(batch.queue, 0.0)
    waited_for(lambda: not part.connection.sent.empty())
    with senders.accumulator.lock:
        assert sender._link is not None and sender._link.deadline == batches[0].deadline
    part.connection.answer(3, 4)
    assert [senders.outcome(batch) for batch in batches] == [3, 4]


@pytest.mark.parametrize("bound", ["frames", "max.request.size"])
def test_what_is_not_small_goes_in_a_frame_of_its_own(
    senders: Senders, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    part = Part()
    if bound == "frames":
        monkeypatch.setattr(module, "_FRAME_BYTES", 10)
    batches = _two_in_a_frame(senders, part, request_bytes=10 if bound == "max.request.size" else 1 << 20)
    assert [part.connection.answer(3), part.connection.answer(4)] == [[b"first".ljust(16)], [b"second".ljust(16)]]
    assert [senders.outcome(batch) for batch in batches] == [3, 4]


def test_a_silent_broker_that_is_not_registered_any_more_is_given_up_before_its_time(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    part = Part(retry_backoff_max_ms=10)
    refreshes = threading.Semaphore(0)
    part.on_refresh = refreshes.release
    sender, queue = senders.start(part), senders.queue("t")
    queue.leader = sender.broker_id
    batch = senders.send(sender, queue)
    part.connection.sent.get(timeout=LIMIT)
    for _ in range(3):  # registered: it may answer yet
        assert refreshes.acquire(timeout=LIMIT)
    assert part.connects == 1
    part.loss = BrokerUnreachable(address="here:1", reason="it is not registered in the cluster any more")
    waited_for(lambda: part.connects > 1)
    part.connection.answer(5)  # what was sent again
    assert senders.outcome(batch) == 5


def test_what_a_silent_broker_got_is_sent_to_the_next_leader(senders: Senders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(module, "QUIET_LOOK_SECONDS", 0.02)
    silent, leading = Part(), Part()
    former, next_leader = senders.start(silent), senders.start(leading)
    queue = senders.queue("t")
    queue.leader = former.broker_id

    def change() -> None:  # as a producer does that takes in the topics
        with senders.accumulator.lock:
            former.drop(queue)
            queue.leader, silent.leader = 2, next_leader

    batch = senders.send(former, queue)
    silent.connection.sent.get(timeout=LIMIT)
    silent.on_refresh = change
    leading.connection.answer(3)
    assert senders.outcome(batch) == 3
    assert silent.connects == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_leader_is_looked_up_while_a_connection_to_the_last_one_hangs(
    senders: Senders, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """As a suspended broker's does: it accepts, and does not greet."""
    monkeypatch.setattr(module, "QUIET_LOOK_SECONDS", 0.02)
    hanging, leading = Part(), Part()
    former, next_leader = senders.start(hanging), senders.start(leading)
    queue = senders.queue("t")
    queue.leader = former.broker_id
    woken, has_changed = threading.Event(), threading.Event()
    hanging.on_connect = lambda: woken.wait(LIMIT)

    def change() -> None:  # as a producer does that takes in the topics
        with senders.accumulator.lock:
            if is_stopped:
                former.stop()
            else:
                former.drop(queue)
                queue.leader, hanging.leader = 2, next_leader
        has_changed.set()

    hanging.on_refresh = change
    batch = senders.send(former, queue)
    assert has_changed.wait(LIMIT / 3)
    if is_stopped:
        former.join(LIMIT / 3)
        assert not former._thread.is_alive()
    else:
        leading.connection.answer(3)
        assert senders.outcome(batch) == 3
    assert not hanging.connection.is_closed
    woken.set()
    waited_for(lambda: hanging.connection.is_closed)
    assert hanging.connection.sent.empty()


def test_an_answer_that_nobody_waits_for_is_not_looked_for(senders: Senders) -> None:
    """Its topic was deleted. The sender looked up the leader again and again, without a pause."""
    sender, queue = senders.make(Part()), senders.queue("t")
    connection: Any = Connection()
    with senders.accumulator.lock:
        senders.add(queue, b"x")
        sender.has_work(queue, 0.0)
        requests, *_ = sender._collect(0.0)
        sender._link = Link(connection)
        sender._link.began(1, requests, LIMIT)
        sender._quiet_since = -math.inf
        assert sender._is_quiet() and sender._look_at(0.0) < math.inf
        senders.accumulator.finish([(batch, UnknownTopic(topic="t")) for batch in queue.clear()])
        _, _, wake_at, _ = sender._collect(0.0)
        assert (sender._look_at(0.0), wake_at) == (math.inf, LIMIT)


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("acks", [0, 1])
def test_a_batch_that_can_not_be_encoded_fails_alone(
    senders: Senders, monkeypatch: pytest.MonkeyPatch, acks: int, idempotent: bool
) -> None:
    encode = encode_records

    def encode_or_fail(values: list[bytes | None], *others: Any) -> Any:
        if values == [b"bad"]:
            raise ValueError("a defect")
        return encode(values, *others)

    monkeypatch.setattr(module, "encode_records", encode_or_fail)
    part = Part()
    sender = senders.start(part, acks)
    mixed, other = senders.queue("mixed", idempotent and acks != 0), senders.queue("other")
    told: list[RecordMetadata | KafkalogError | None] = []
    with senders.accumulator.lock:
        bad, fine, elsewhere = senders.add(mixed, b"bad"), senders.add(mixed, b"fine"), senders.add(other, b"elsewhere")
        bad.add_callback(0, lambda error, metadata: told.append(error))
        sender.has_work(mixed, 0.0)
        sender.has_work(other, 0.0)
    error = senders.outcome(bad)
    assert isinstance(error, InternalError)
    assert "ValueError: a defect" in str(error)
    if acks:
        part.connection.answer(5)
        part.connection.answer(6)
    assert sorted(map(int, map(senders.outcome, (fine, elsewhere)))) == ([5, 6] if acks else [-1, -1])  # type: ignore[arg-type]
    assert told == [error]
    assert senders.accumulator.buffered == 0


@pytest.mark.parametrize("acks", [0, 1])
def test_silence_while_nothing_is_owed_leaves_the_connection_alone(senders: Senders, acks: int) -> None:
    part = Part()
    sender = senders.start(part, acks)
    queue = senders.queue("t")
    for number in range(3):
        batch = senders.send(sender, queue)
        if acks:
            part.connection.fall_silent()  # since long before the request, which is answered only now
            part.connection.answer(number)
        assert senders.outcome(batch) == (number if acks else -1)
        part.connection.fall_silent()
    assert part.connects == 1


def test_a_sender_that_is_stopped_logs_no_lost_connection(senders: Senders, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    part = Part()
    sender = senders.start(part)
    queue = senders.queue("t")
    batch = senders.send(sender, queue)
    part.connection.answer(0)
    senders.outcome(batch)
    with senders.accumulator.lock:
        sender.stop()
    sender.join(LIMIT)
    assert "broker_connection_lost" not in caplog.text


def test_a_connection_that_falls_silent_in_the_middle_of_an_answer_is_given_up(senders: Senders) -> None:
    part = Part()
    sender = senders.start(part)
    queue = senders.queue("t")
    batch = senders.send(sender, queue)
    part.connection.sent.get(timeout=LIMIT)
    part.connection.has_buffered = True
    first, part.connection = part.connection, Connection()
    first.answers.put(SILENCE)
    part.connection.answer(3)
    assert senders.outcome(batch) == 3
    assert part.connects == 2


def test_a_defect_of_a_sender_is_reported_also_for_what_its_lost_connection_gave_up(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part()
    sender = senders.make(part)
    queue = senders.queue("t", idempotent=True)
    queue.identity = Identity(7, 0)
    with senders.accumulator.lock:
        refused, unknown = senders.add(queue, b"refused"), senders.add(queue, b"unknown")
        sender.has_work(queue, 0.0)
        [request] = _requests(queue, queue.take(0.0, 1 << 20))
        connection: Any = part.connection
        sender._link = Link(connection)
        sender._link.began(1, [request._replace(batches=[unknown])])
        error = BatchTooLarge(size=2, partition="t-0", limit=1)
        senders.accumulator.finish(queue.refused(refused, error, 0.0))
    sender._fail_everything(InternalError(reason="a defect"))
    assert senders.outcome(refused) == error
    assert isinstance(senders.outcome(unknown), OutcomeUnknown)
    assert senders.accumulator.unfinished() == []


def test_a_sender_that_stops_takes_out_nothing_that_nobody_is_told_of(senders: Senders) -> None:
    sender = senders.make(Part())
    queue = senders.queue("t")
    told: list[KafkalogError | None] = []
    with senders.accumulator.lock:
        batch = senders.add(queue, b"late")
        batch.deadline = 0.0
        batch.add_callback(0, lambda error, metadata: told.append(error))
        sender.has_work(queue, 0.0)
        sender.stop()
    assert not sender._send_due()
    closed = Closed(what="producer")
    with senders.accumulator.lock:
        called = senders.accumulator.finish([(each, closed) for each in queue.clear()])
    senders.accumulator.call_back(called)
    assert told == [closed]


def test_a_connection_that_is_made_while_its_sender_is_stopped_is_let_go(senders: Senders) -> None:
    part = Part()
    sender = senders.start(part)

    def stop() -> None:
        with senders.accumulator.lock:
            sender.stop()

    part.on_connect = stop
    senders.send(sender, senders.queue("t"))
    sender.join(LIMIT / 3)
    assert part.connects == 1
    assert not any(thread.is_alive() for thread in (sender._thread, *sender._readers))


def test_a_sender_sleeps_over_a_delivery_timeout_of_any_length(senders: Senders) -> None:
    part = Part()
    sender = senders.start(part)
    queue = senders.queue("t")
    queue._window = 1
    with senders.accumulator.lock:
        elsewhere, waiting = senders.add(queue, b"elsewhere"), senders.add(queue, b"waiting")
        waiting.deadline = LONG_MAX / 1000
        assert queue.take(0.0, 1 << 20) == [elsewhere]  # by the sender that had the partition before
        sender.has_work(queue, 0.0)
    poll = threading.Event()
    while not sender._sleeps and not waiting.done:
        poll.wait(0.001)
    with senders.accumulator.lock:
        senders.accumulator.finish([(elsewhere, None), *queue.acked(elsewhere)])
        sender.has_work(queue, 0.0)
    part.connection.answer(1)
    assert senders.outcome(waiting) == 1


def asleep(sender: Sender) -> None:
    """Wait until a sender has nothing to do."""
    poll = threading.Event()
    until = time.monotonic() + 10
    while not sender._sleeps:
        assert time.monotonic() < until, "it finds something to do again and again"
        poll.wait(0.001)


@pytest.mark.parametrize("happens", ["is refused", "is lost", "has no connection"])
def test_after_a_failure_metadata_is_refreshed(senders: Senders, happens: str) -> None:
    part = Part()
    asked = threading.Event()
    part.on_refresh = asked.set
    sender, queue = senders.start(part), senders.queue("t")
    if happens == "has no connection":

        def refuse_once() -> None:
            part.on_connect = lambda: None
            raise GONE

        part.on_connect = refuse_once
    batch = senders.send(sender, queue)
    if happens == "is refused":
        part.connection.answer(NotLeader(broker_id=1, partition="t-0"))
    elif happens == "is lost":
        part.connection.sent.get(timeout=LIMIT)
        lost, part.connection = part.connection, Connection()
        lost.answers.put(GONE)
    assert asked.wait(LIMIT / 3)
    part.connection.answer(3)
    assert senders.outcome(batch) == 3


@pytest.mark.parametrize("happens", ["no connection", "not encoded", "lost", "refused", "handed over"])
def test_what_a_sender_leaves_of_a_partition_that_has_another_leader_since_is_sent_by_the_leaders_sender(
    senders: Senders, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    acks = 0 if happens == "handed over" else 1
    before, after = Part(), Part()
    former, leading = senders.start(before, acks), senders.start(after, acks)
    queue = senders.queue("t")
    queue._window = 2

    def move() -> None:  # as a producer does, while the former sender has batches in hand
        before.on_connect = lambda: None
        with senders.accumulator.lock:
            former.drop(queue)
            before.leader = leading
            leading.has_work(queue, 0.0)
        asleep(leading)
        if happens == "no connection":
            raise GONE

    def fail_first(*_: object) -> object:
        monkeypatch.undo()
        raise ValueError("a defect")

    if happens == "not encoded":
        monkeypatch.setattr(module, "encode_records", fail_first)
    if happens not in ("lost", "refused"):
        before.on_connect = move
    with senders.accumulator.lock:
        *_, last = [senders.add(queue, b"x") for _ in range(3)]
        former.has_work(queue, 0.0)
    if happens in ("lost", "refused"):
        sent = [before.connection.sent.get(timeout=LIMIT) for _ in range(2)]
        move()
        if happens == "lost":
            before.connection.answers.put(GONE)
        for request in sent if happens == "refused" else []:
            before.connection.sent.put(request)
            before.connection.answer(NotLeader(broker_id=1, partition="t-0"))
    for _ in range({"not encoded": 2, "handed over": 0}.get(happens, 3)):
        after.connection.answer(3)
    assert senders.outcome(last) == (3 if acks else -1)
    assert after.connects == 1


def test_a_producer_id_that_can_not_be_had_is_asked_for_again_after_a_pause(senders: Senders) -> None:
    part = Part()
    asked: list[int | None] = []

    def refuse(used_up: int | None) -> Identity:
        asked.append(used_up)
        raise GONE

    part.identity = refuse  # type: ignore[method-assign]
    sender, queue = senders.start(part), senders.queue("t", idempotent=True)
    queue._backoff.pause = LIMIT
    senders.send(sender, queue)
    asleep(sender)
    assert asked == [None]


def test_a_connection_that_goes_before_its_requests_do_gets_none_of_them(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part()
    sender = senders.make(part)
    senders.senders.append(sender)
    frames = sender._encode_requests

    def and_meanwhile_it_goes(used: Link[Any], requests: Any) -> Any:
        monkeypatch.setattr(sender, "_encode_requests", frames)
        part.connection = Connection()
        sender._link_lost(used, GONE)
        return frames(used, requests)

    monkeypatch.setattr(sender, "_encode_requests", and_meanwhile_it_goes)
    with senders.accumulator.lock:
        sender.start()
    batch = senders.send(sender, senders.queue("t"))
    part_of = threading.Thread(target=lambda: part.connection.answer(3), daemon=True)
    asleep(sender)
    part_of.start()
    part_of.join(LIMIT / 3)
    assert senders.outcome(batch) == 3
    assert part.connects == 2


def test_answers_of_a_connection_that_was_given_up_are_nothing_to_the_next(senders: Senders) -> None:
    sender = senders.make(Part())
    queue = senders.queue("t")
    given_up, now_used = (Connection() for _ in range(2))
    stand_ins: Any = given_up, now_used
    with senders.accumulator.lock:
        batch = senders.add(queue, b"x")
        [request] = _requests(queue, queue.take(0.0, 1 << 20))
        before: Link[module._Frame] = Link(stand_ins[0])
        sender._link = Link(stand_ins[1])
        sender._link.began(1, [request])
        reply = pb.ReplyHeader(correlation_id=1)
        reply.append.partitions.add(base_offset=7)
        assert sender._take_replies(before, [reply]) == []
        assert not batch.done and sender._link.in_flight == [[request]]
        sender._take_replies(sender._link, [reply])
        assert batch.base_offset == 7


def test_the_thread_that_reads_acks_closes_its_connection_and_is_the_producers_no_longer(senders: Senders) -> None:
    """Its number may become that of a thread which sends."""
    part = Part()
    sender = senders.start(part)
    batch = senders.send(sender, senders.queue("t"))
    part.connection.answer(0)
    senders.outcome(batch)
    [reader] = sender._readers
    assert reader.ident in senders.accumulator.own_threads
    with senders.accumulator.lock:
        sender.stop()
    sender.join(LIMIT)
    assert part.connection.is_closed
    assert reader.ident not in senders.accumulator.own_threads


def test_a_partition_that_has_more_than_a_turn_takes_lets_the_others_go_next(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PASS_BYTES", 1)
    sender = senders.make(Part())
    full, other = senders.queue("full"), senders.queue("other")
    with senders.accumulator.lock:
        for _ in range(3):
            senders.add(full, b"x")
        senders.add(other, b"x")
        for queue in (full, other):
            queue._window = 1
            sender.has_work(queue, 0.0)
        full._window = 10
        monkeypatch.setattr(sender, "_request_bytes", 1)
        turns = [[request.queue for request in sender._collect(0.0)[0]] for _ in range(3)]
    assert turns == [[full], [other], [full]]


def test_an_answer_is_waited_for_no_longer_than_its_batches_have(senders: Senders) -> None:
    part = Part()
    sender, queue = senders.start(part), senders.queue("t")
    with senders.accumulator.lock:
        batch = senders.add(queue, b"x")
        batch.deadline = time.monotonic() + 20  # request.timeout.ms is 30 s
        sender.has_work(queue, 0.0)
    request = part.connection.sent.get(timeout=LIMIT)
    assert sender._link is not None and sender._link.deadline == batch.deadline
    part.connection.sent.put(request)
    part.connection.answer(0)
    assert senders.outcome(batch) == 0


def test_what_was_told_of_the_topics_grows_old(senders: Senders) -> None:
    part = Part()
    asked: list[str] = []
    part.on_refresh = lambda: asked.append("who leads")
    sender, queue = senders.make(part), senders.queue("t")
    senders.senders.append(sender)
    for due, times in ((sender._refresh_at, 0), (0.0, 1), (None, 1)):
        with senders.accumulator.lock:
            sender._refresh_at = sender._refresh_at if due is None else due
            senders.add(queue, b"x")
            sender.has_work(queue, 0.0)
        sender._send_due()
        assert len(asked) == times


def test_a_stop_wakes_a_sender_that_sleeps_with_nothing_to_do(senders: Senders) -> None:
    sender, lock = senders.start(Part()), senders.accumulator.lock
    waited_for(lambda: sender._sleeps)
    with lock:
        sender.stop()
    sender.join(10)
    has_ended = not sender._thread.is_alive()
    with lock:
        sender._work.notify()  # or this fixture's end would wait for it
    assert has_ended
