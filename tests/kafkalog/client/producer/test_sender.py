"""A link to a broker, with a connection that answers when and what the test says."""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kafkalog.client.config import LONG_MAX, ClientSettings
from kafkalog.client.link import Link
from kafkalog.client.producer import sender
from kafkalog.client.producer.accumulator import Accumulator
from kafkalog.client.producer.encode import encode_records
from kafkalog.client.producer.queue import Batch, Failed, Identity, PartitionQueue
from kafkalog.client.producer.sender import BrokerLink
from kafkalog.errors import (
    BatchTooLarge,
    BrokerUnreachable,
    Closed,
    InternalError,
    KafkalogError,
    NotLeader,
    OutcomeUnknown,
    RequestTimedOut,
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

    def answer(self, base_offset: int = 0, error: KafkalogError | None = None) -> None:
        """The next request that was sent; waits for it."""
        reply = pb.ReplyHeader(correlation_id=self.sent.get(timeout=LIMIT).correlation_id)
        part = reply.append.partitions.add(base_offset=base_offset)
        if error is not None:
            part.error.CopyFrom(error_to_wire(error))
        self.answers.put(reply)

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
    """Cluster and producer as a link knows them: one connection, what `on_connect` and `on_refresh` do, and the link
    of the leader."""

    leader: BrokerLink

    def __init__(self, **settings: object) -> None:
        self.settings = ClientSettings.parse(settings)
        self.connection = Connection()
        self.connects = 0
        self.on_connect: Callable[[], object] = lambda: None
        self.on_refresh: Callable[[], object] = lambda: None
        self.gone: Failed = []

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


class Links:
    """Links that share an accumulator, as a producer's do."""

    def __init__(self) -> None:
        self.accumulator = Accumulator(1 << 20, 1000, "here:1", lambda queue: None)
        self.links: list[BrokerLink] = []

    def make(self, part: Part, acks: int = 1) -> BrokerLink:
        stand_in: Any = part
        part.leader = BrokerLink(1, stand_in, self.accumulator, stand_in, acks=acks, codec=0, request_bytes=1 << 20)
        return part.leader

    def start(self, part: Part, acks: int = 1) -> BrokerLink:
        link = self.make(part, acks)
        self.links.append(link)
        with self.accumulator.lock:
            link.start()
        return link

    def queue(self, topic: str, idempotent: bool = False) -> PartitionQueue:
        return PartitionQueue(
            TopicPartition(topic, 0),
            topic.encode().ljust(16),
            idempotent=idempotent,
            window=10,
            delivery_timeout_ms=int(LIMIT * 1000),
            backoff=Backoff(0.001, 0.001),
            owner=self.accumulator,
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

    def send(self, link: BrokerLink, queue: PartitionQueue, value: bytes = b"x") -> Batch:
        with self.accumulator.lock:
            batch = self.add(queue, value)
            link.has_work(queue, 0.0)
        return batch

    def outcome(self, batch: Batch) -> KafkalogError | int:
        """A batch's error or offset, once it is done."""
        with self.accumulator.lock:
            self.accumulator.wait_done([batch], LIMIT, "a batch")
        return batch.error or batch.base_offset


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    for link in made.links:
        with made.accumulator.lock:
            link.stop()
        link.join()


def test_without_a_thread_to_read_acks_nothing_is_sent_until_there_is_one(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NoThreads(monkeypatch, lambda name: name.endswith("-acks"))
    part = Part()
    batch = links.send(links.start(part), links.queue("t"))
    waited_for(lambda: len(machine.refused) > 1)
    assert part.connection.is_closed and part.connection.sent.empty()
    assert not batch.done
    machine.on = False
    part.connection.answer(base_offset=5)
    assert links.outcome(batch) == 5


def test_a_topic_deleted_while_its_batch_is_being_sent_fails_nothing_of_another(links: Links) -> None:
    part = Part()
    deleted, other = links.queue("deleted"), links.queue("other")

    def delete() -> None:  # as another link does that asked for the topics; between taking a batch and encoding it
        with links.accumulator.lock:
            links.accumulator.finish([(batch, UnknownTopic(topic="deleted")) for batch in deleted.clear()])

    part.on_connect = delete
    link = links.start(part)
    with links.accumulator.lock:
        lost, kept = links.add(deleted, b"lost"), links.add(other, b"kept")
        link.has_work(deleted, 0.0)
        link.has_work(other, 0.0)
    assert isinstance(links.outcome(lost), UnknownTopic)
    part.connection.answer(5)  # late, and of no use
    part.connection.answer(6)
    assert links.outcome(kept) == 6
    again = links.send(link, deleted, b"to a topic made anew")
    part.connection.answer(7)
    assert links.outcome(again) == 7
    assert links.accumulator.buffered == 0


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("acks", [0, 1])
def test_a_batch_that_can_not_be_encoded_fails_alone(
    links: Links, monkeypatch: pytest.MonkeyPatch, acks: int, idempotent: bool
) -> None:
    encode = encode_records

    def encode_or_fail(values: list[bytes | None], *others: Any) -> Any:
        if values == [b"bad"]:
            raise ValueError("a defect")
        return encode(values, *others)

    monkeypatch.setattr(sender, "encode_records", encode_or_fail)
    part = Part()
    link = links.start(part, acks)
    mixed, other = links.queue("mixed", idempotent and acks != 0), links.queue("other")
    told: list[RecordMetadata | KafkalogError | None] = []
    with links.accumulator.lock:
        bad, fine, elsewhere = links.add(mixed, b"bad"), links.add(mixed, b"fine"), links.add(other, b"elsewhere")
        bad.add_callback(0, lambda error, metadata: told.append(error))
        link.has_work(mixed, 0.0)
        link.has_work(other, 0.0)
    error = links.outcome(bad)
    assert isinstance(error, InternalError)
    assert "ValueError: a defect" in str(error)
    if acks:
        part.connection.answer(5)
        part.connection.answer(6)
    assert sorted(map(int, map(links.outcome, (fine, elsewhere)))) == ([5, 6] if acks else [-1, -1])  # type: ignore[arg-type]
    assert told == [error]
    assert links.accumulator.buffered == 0


@pytest.mark.parametrize("acks", [0, 1])
def test_silence_while_nothing_is_owed_leaves_the_connection_alone(links: Links, acks: int) -> None:
    part = Part()
    link = links.start(part, acks)
    queue = links.queue("t")
    for number in range(3):
        batch = links.send(link, queue)
        if acks:
            part.connection.fall_silent()  # since long before the request, which is answered only now
            part.connection.answer(number)
        assert links.outcome(batch) == (number if acks else -1)
        part.connection.fall_silent()
    assert part.connects == 1


def test_a_link_that_is_stopped_logs_no_lost_connection(links: Links, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    part = Part()
    link = links.start(part)
    queue = links.queue("t")
    batch = links.send(link, queue)
    part.connection.answer(0)
    links.outcome(batch)
    with links.accumulator.lock:
        link.stop()
    link.join()
    assert "broker_connection_lost" not in caplog.text


def test_a_connection_that_falls_silent_in_the_middle_of_an_answer_is_given_up(links: Links) -> None:
    part = Part()
    link = links.start(part)
    queue = links.queue("t")
    batch = links.send(link, queue)
    part.connection.sent.get(timeout=LIMIT)
    part.connection.has_buffered = True
    first, part.connection = part.connection, Connection()
    first.answers.put(SILENCE)
    part.connection.answer(3)
    assert links.outcome(batch) == 3
    assert part.connects == 2


def test_a_defect_of_a_link_is_told_also_for_what_its_lost_connection_gave_up(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part()
    link = links.make(part)
    queue = links.queue("t", idempotent=True)
    queue.identity = Identity(7, 0)
    with links.accumulator.lock:
        refused, unknown = links.add(queue, b"refused"), links.add(queue, b"unknown")
        link.has_work(queue, 0.0)
        [request] = link._requests(queue, queue.take(0.0, 1 << 20), 0.0)
        connection: Any = part.connection
        link._link = Link(connection)
        link._link.sends(1, request._replace(batches=[unknown]))
        error = BatchTooLarge(size=2, partition="t-0", limit=1)
        links.accumulator.finish(queue.refused(refused, error, 0.0))
    link._fail_everything(InternalError(reason="a defect"))
    assert links.outcome(refused) == error
    assert isinstance(links.outcome(unknown), OutcomeUnknown)
    assert links.accumulator.unfinished() == []


def test_a_link_that_stops_takes_out_nothing_that_nobody_is_told_of(links: Links) -> None:
    link = links.make(Part())
    queue = links.queue("t")
    told: list[KafkalogError | None] = []
    with links.accumulator.lock:
        batch = links.add(queue, b"late")
        batch.deadline = 0.0
        batch.add_callback(0, lambda error, metadata: told.append(error))
        link.has_work(queue, 0.0)
        link.stop()
    assert not link._turn()
    closed = Closed(what="producer")
    with links.accumulator.lock:
        called = links.accumulator.finish([(each, closed) for each in queue.clear()])
    links.accumulator.call_back(called)
    assert told == [closed]


def test_a_connection_that_is_made_while_its_link_is_stopped_is_let_go(links: Links) -> None:
    part = Part()
    link = links.start(part)

    def stop() -> None:
        with links.accumulator.lock:
            link.stop()

    part.on_connect = stop
    links.send(link, links.queue("t"))
    link.join(LIMIT / 3)
    assert part.connects == 1
    assert not any(thread.is_alive() for thread in (link._thread, *link._readers))


def test_a_link_sleeps_over_a_delivery_timeout_of_any_length(links: Links) -> None:
    part = Part()
    link = links.start(part)
    queue = links.queue("t")
    queue._window = 1
    with links.accumulator.lock:
        elsewhere, waiting = links.add(queue, b"elsewhere"), links.add(queue, b"waiting")
        waiting.deadline = LONG_MAX / 1000
        assert queue.take(0.0, 1 << 20) == [elsewhere]  # by the link that had the partition before
        link.has_work(queue, 0.0)
    poll = threading.Event()
    while not link._sleeps and not waiting.done:
        poll.wait(0.001)
    with links.accumulator.lock:
        links.accumulator.finish([(elsewhere, None), *queue.acked(elsewhere)])
        link.has_work(queue, 0.0)
    part.connection.answer(1)
    assert links.outcome(waiting) == 1


def asleep(link: BrokerLink) -> None:
    """Wait until a link has nothing to do."""
    poll = threading.Event()
    until = time.monotonic() + 10
    while not link._sleeps:
        assert time.monotonic() < until, "it finds something to do again and again"
        poll.wait(0.001)


@pytest.mark.parametrize("happens", ["is refused", "is lost", "has no connection"])
def test_after_a_failure_it_is_asked_who_leads(links: Links, happens: str) -> None:
    part = Part()
    asked = threading.Event()
    part.on_refresh = asked.set
    link, queue = links.start(part), links.queue("t")
    if happens == "has no connection":

        def refuse_once() -> None:
            part.on_connect = lambda: None
            raise GONE

        part.on_connect = refuse_once
    batch = links.send(link, queue)
    if happens == "is refused":
        part.connection.answer(error=NotLeader(broker_id=1, partition="t-0"))
    elif happens == "is lost":
        part.connection.sent.get(timeout=LIMIT)
        lost, part.connection = part.connection, Connection()
        lost.answers.put(GONE)
    assert asked.wait(LIMIT / 3)
    part.connection.answer(3)
    assert links.outcome(batch) == 3


@pytest.mark.parametrize("happens", ["no connection", "not encoded", "lost", "refused", "handed over"])
def test_what_a_link_leaves_of_a_partition_that_has_another_leader_since_is_sent_by_the_leaders_link(
    links: Links, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    acks = 0 if happens == "handed over" else 1
    before, after = Part(), Part()
    former, leading = links.start(before, acks), links.start(after, acks)
    queue = links.queue("t")
    queue._window = 2

    def move() -> None:  # as a producer does, while the former link has batches in hand
        before.on_connect = lambda: None
        with links.accumulator.lock:
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
        monkeypatch.setattr(sender, "encode_records", fail_first)
    if happens not in ("lost", "refused"):
        before.on_connect = move
    with links.accumulator.lock:
        *_, last = [links.add(queue, b"x") for _ in range(3)]
        former.has_work(queue, 0.0)
    if happens in ("lost", "refused"):
        sent = [before.connection.sent.get(timeout=LIMIT) for _ in range(2)]
        move()
        if happens == "lost":
            before.connection.answers.put(GONE)
        for request in sent if happens == "refused" else []:
            before.connection.sent.put(request)
            before.connection.answer(error=NotLeader(broker_id=1, partition="t-0"))
    for _ in range({"not encoded": 2, "handed over": 0}.get(happens, 3)):
        after.connection.answer(3)
    assert links.outcome(last) == (3 if acks else -1)
    assert after.connects == 1


def test_a_producer_id_that_can_not_be_had_is_asked_for_again_after_a_pause(links: Links) -> None:
    part = Part()
    asked: list[int | None] = []

    def refuse(used_up: int | None) -> Identity:
        asked.append(used_up)
        raise GONE

    part.identity = refuse  # type: ignore[method-assign]
    link, queue = links.start(part), links.queue("t", idempotent=True)
    queue._backoff.pause = LIMIT
    links.send(link, queue)
    asleep(link)
    assert asked == [None]


def test_a_connection_that_goes_before_its_requests_do_gets_none_of_them(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part()
    link = links.make(part)
    links.links.append(link)
    frames = link._frames

    def and_meanwhile_it_goes(used: Link[Any], requests: Any) -> Any:
        monkeypatch.setattr(link, "_frames", frames)
        part.connection = Connection()
        link._link_lost(used, GONE)
        return frames(used, requests)

    monkeypatch.setattr(link, "_frames", and_meanwhile_it_goes)
    with links.accumulator.lock:
        link.start()
    batch = links.send(link, links.queue("t"))
    part_of = threading.Thread(target=lambda: part.connection.answer(3), daemon=True)
    asleep(link)
    part_of.start()
    part_of.join(LIMIT / 3)
    assert links.outcome(batch) == 3
    assert part.connects == 2


def test_answers_of_a_connection_that_was_given_up_are_nothing_to_the_next(links: Links) -> None:
    link = links.make(Part())
    queue = links.queue("t")
    given_up, now_used = (Connection() for _ in range(2))
    stand_ins: Any = given_up, now_used
    with links.accumulator.lock:
        batch = links.add(queue, b"x")
        [request] = link._requests(queue, queue.take(0.0, 1 << 20), 0.0)
        before: Link[sender._Request] = Link(stand_ins[0])
        link._link = Link(stand_ins[1])
        link._link.sends(1, request)
        reply = pb.ReplyHeader(correlation_id=1)
        reply.append.partitions.add(base_offset=7)
        assert link._take_replies(before, [reply]) == []
        assert not batch.done and link._link.in_flight == [request]
        link._take_replies(link._link, [reply])
        assert batch.base_offset == 7


def test_the_thread_that_reads_acks_closes_its_connection_and_is_the_producers_no_longer(links: Links) -> None:
    """Its number may become that of a thread which sends."""
    part = Part()
    link = links.start(part)
    batch = links.send(link, links.queue("t"))
    part.connection.answer(0)
    links.outcome(batch)
    [reader] = link._readers
    assert reader.ident in links.accumulator.own_threads
    with links.accumulator.lock:
        link.stop()
    link.join(LIMIT)
    assert part.connection.is_closed
    assert reader.ident not in links.accumulator.own_threads


def test_a_partition_that_has_more_than_a_turn_takes_lets_the_others_go_next(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_TURN_BYTES", 1)
    link = links.make(Part())
    full, other = links.queue("full"), links.queue("other")
    with links.accumulator.lock:
        for _ in range(3):
            links.add(full, b"x")
        links.add(other, b"x")
        for queue in (full, other):
            queue._window = 1
            link.has_work(queue, 0.0)
        full._window = 10
        monkeypatch.setattr(link, "_request_bytes", 1)
        turns = [[request.queue for request in link._collect(0.0)[0]] for _ in range(3)]
    assert turns == [[full], [other], [full]]


def test_an_answer_is_waited_for_no_longer_than_its_batches_have(links: Links) -> None:
    link = links.make(Part())
    queue = links.queue("t")
    with links.accumulator.lock:
        batch = links.add(queue, b"x")
        batch.deadline = 5.0
        [request] = link._requests(queue, queue.take(0.0, 1 << 20), 0.0)
    assert request.deadline == 5.0


def test_what_was_told_of_the_topics_grows_old(links: Links) -> None:
    part = Part()
    asked: list[str] = []
    part.on_refresh = lambda: asked.append("who leads")
    link, queue = links.make(part), links.queue("t")
    links.links.append(link)
    for due, times in ((link._refresh_at, 0), (0.0, 1), (None, 1)):
        with links.accumulator.lock:
            link._refresh_at = link._refresh_at if due is None else due
            links.add(queue, b"x")
            link.has_work(queue, 0.0)
        link._turn()
        assert len(asked) == times
