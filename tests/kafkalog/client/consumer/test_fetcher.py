"""Whom a consumer's fetching asks, and for how long it tries: over leaders that change as the test says. Over real
brokers it is in `test_consumer.py`."""

from __future__ import annotations

import math
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client.background import BackgroundCall
from kafkalog.client.config import ConsumerSettings
from kafkalog.client.consumer import fetcher as fetcher_module
from kafkalog.client.consumer.fetcher import Fetcher, Source
from kafkalog.client.link import Link
from kafkalog.errors import (
    BrokerUnreachable,
    DiskFull,
    KafkalogError,
    LeaderNotAvailable,
    LogTruncated,
    OffsetOutOfRange,
    ProtocolError,
    RequestTimedOut,
    UnknownPartition,
    UnknownTopicId,
)
from kafkalog.net.data import Reply
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import PREFIX_SIZE, error_to_wire
from tests.interrupts import interrupted_at

TOPIC_ID = b"t" * 16


class Unreachable:
    """A cluster of which no broker can be reached; `leader_id` leads."""

    leader_id = 1

    def loss_of(self, broker_id: int, connection: object) -> BrokerUnreachable | None:
        return None

    def known_topic(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(topic_id=TOPIC_ID, partitions=[SimpleNamespace(leader_epoch=0)] * 3)

    def fresh_topic(self, name: str) -> SimpleNamespace:
        return self.known_topic(name)

    def leader(self, topic: object, number: int) -> SimpleNamespace:
        return SimpleNamespace(broker_id=self.leader_id)

    def connect_data(self, broker_id: int) -> Any:
        raise BrokerUnreachable(address=f"broker {broker_id}", reason="connection refused")

    def refresh(self, names: object, *, patient: bool) -> None:
        """Always known."""


class Opening(Unreachable):
    """A cluster whose broker 1 leads the partitions that are `opened`; nobody has opened the others."""

    def __init__(self, *opened: int) -> None:
        self.opened = set(opened)

    def leader(self, topic: object, number: int) -> SimpleNamespace:
        if number not in self.opened:
            raise LeaderNotAvailable(partition=f"t-{number}", broker_id=-1)
        return SimpleNamespace(broker_id=1)

    def connect_data(self, broker_id: int) -> Keeping:
        return Keeping([])


class Clock:
    """The fetcher's, which the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(fetcher_module, "time", made)
    return made


def test_a_leader_that_failed_before_another_led_is_tried_as_long_as_one_that_never_did(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_timeout_ms=1000)
    for leader_id, clock.now in ((1, 0.0), (2, 0.9), (1, 1.8), (1, 2.7)):
        cluster.leader_id = leader_id
        waiting._ask_all()
    clock.now = 3.6
    assert errors(waiting) == [None, None]
    waiting._ask_all()
    assert "broker 1" in str(waiting.sources[0].error)
    waiting.close()


def errors(waiting: Fetcher) -> list[type[KafkalogError] | None]:
    return [None if source.error is None else type(source.error) for source in waiting.sources]


def at_once(call: Callable[[], Any], on_done: Callable[[Future[Any]], object]) -> BackgroundCall[Any]:
    """What else a thread does."""
    future: BackgroundCall[Any] = BackgroundCall()
    future.add_done_callback(on_done)
    try:
        future.set_result(call())
    except KafkalogError as error:
        future.set_exception(error)
    return future


def fetching(cluster: Any, **settings: Any) -> Fetcher:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    made = Fetcher(cluster, ConsumerSettings.parse(given), lambda: None, at_once)
    made.sources = [Source(TopicPartition("t", number), TOPIC_ID, 0) for number in range(2)]
    return made


def test_a_partition_that_moves_leaves_the_trouble_of_those_that_stay_with_its_leader() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    waiting._ask_all()
    trouble = waiting._troubles[1]
    cluster.leader = lambda topic, number: SimpleNamespace(broker_id=(2, 1)[number])
    waiting._ask_all()
    assert waiting._troubles.keys() == {1, 2}
    assert waiting._troubles[1] is trouble
    waiting.close()


def test_an_error_that_nobody_takes_leaves_no_time_to_look_again() -> None:
    """It would be over, and the thread that drives would look at it without a pause."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    cluster.leader = lambda topic, number: SimpleNamespace(broker_id=(1, 2)[number])
    waiting._ask_all()
    assert waiting._troubles.keys() == {1, 2}
    waiting.sources[0].error = UnknownTopicId(topic_id="74")
    waiting._ask_all()
    assert waiting._troubles.keys() == {2}
    waiting.close()


def test_a_link_that_is_lost_while_another_answers_is_not_looked_at_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event is in hand already; the number may be that of a new connection by then."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    received: list[int] = []
    for broker_id, fd in ((1, 91), (2, 92)):
        connection: Any = SimpleNamespace(has_buffered=False, fileno=lambda fd=fd: fd, close=lambda: None)
        link: Link[fetcher_module._Asked] = Link(connection)
        waiting._links[broker_id] = link
        link.began(link.next_id(), fetcher_module._Asked())

    def receive(broker_id: int, link: Link[Any]) -> bool:
        received.append(broker_id)
        waiting._drop(3 - broker_id, waiting._links[3 - broker_id])
        return True

    poller = SimpleNamespace(register=lambda *_: None, poll=lambda timeout_ms: [(91, 1), (92, 1)])
    monkeypatch.setattr(fetcher_module, "select", SimpleNamespace(poll=lambda: poller, POLLIN=1))
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    waiting._receive = receive  # type: ignore[method-assign]
    waiting._drive(True, None)
    assert received == [1]
    waiting.close()


def test_who_has_no_time_to_try_again_asks_who_leads_the_next_time_all_the_same() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_timeout_ms=0)
    waiting._ask_all()
    with pytest.raises(BrokerUnreachable):
        waiting._ready(waiting.sources)
    asked: list[object] = []
    cluster.refresh = lambda names, patient: asked.append(names)
    cluster.leader_id = 2
    waiting._ask_all()
    assert errors(waiting) == [BrokerUnreachable, BrokerUnreachable]
    assert asked == [["t"]]
    waiting.close()


@pytest.mark.parametrize("policy", ["error", "earliest"])
def test_an_offset_past_the_end_is_asked_for_again_when_it_is_known_who_leads_now(clock: Clock, policy: str) -> None:
    waiting = fetching(Unreachable(), auto_offset_reset=policy)
    source = waiting.sources[0]

    def answered(offset: int) -> tuple[type[KafkalogError] | None, int | None]:
        source.reader.go_to(offset)
        asked = source.asked = fetcher_module._Asked()
        asked.sources.append(source)
        error = OffsetOutOfRange(offset=offset, partition="t-0", start_offset=3, end_offset=8)
        waiting._take_in(asked, pb.FetchReply(partitions=[{"error": error_to_wire(error)}]), None)
        return None if source.error is None else type(source.error), source.reset_to

    acted = (OffsetOutOfRange, None) if policy == "error" else (None, 3)
    for clock.now in (1.0, 1.1):
        assert answered(9) == (None, None)
        assert waiting._stale and source.trouble is not None and source.reader.offset == 9
    clock.now = 1.2
    waiting._refresh()
    assert answered(9) == acted
    source.go_to(2)
    assert answered(2) == acted, "records before the start are deleted, whoever leads"
    waiting.close()


def test_a_reset_to_where_logs_part_keeps_the_leader_epoch_of_what_was_read(clock: Clock) -> None:
    """Before the leader answers, another one may be elected whose log was cut further."""
    waiting = fetching(Unreachable(), auto_offset_reset="latest")
    source = waiting.sources[0]
    for error, read_in in (
        (LogTruncated(offset=9, partition="t-0", epoch=4, start_offset=3, end_offset=8), 4),
        (OffsetOutOfRange(offset=2, partition="t-0", start_offset=3, end_offset=8), None),
    ):
        source.go_to(int(error.facts["offset"]), 4)
        source.doubted_at = waiting._refreshed_at = 1.0  # it is known who leads
        asked = source.asked = fetcher_module._Asked()
        asked.sources.append(source)
        waiting._take_in(asked, pb.FetchReply(partitions=[{"error": error_to_wire(error)}]), None)
        assert (source.reset_to, source.reader.read_in) == (8, read_in)
    waiting.close()


def test_a_partition_whose_log_cannot_be_opened_delays_no_other_and_is_given_up_alone(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_backoff_ms=125, retry_backoff_max_ms=500, retry_timeout_ms=1000)
    good, full = waiting.sources
    tries: list[float] = []
    answer = pb.FetchReply(partitions=[{}, {"error": error_to_wire(DiskFull(directory="/data", reason="full"))}])
    while full.error is None:
        asked = fetcher_module._Asked()
        asked.sources += waiting.sources
        wanted = waiting._wants_more(full)
        good.asked, full.asked = asked, asked if wanted else None
        if wanted:
            tries.append(clock.now)
        assert waiting._take_in(asked, answer, None) is None, "no reason to leave the broker alone"
        assert waiting._wants_more(good)
        if full.trouble is not None:
            assert full.trouble in waiting._all_troubles(), "it wakes who drives"
        clock.now += 0.125
    assert tries == [0.0, 0.125, 0.375, 0.875, 1.0]
    assert isinstance(full.error, DiskFull)
    assert waiting._troubles == {}
    full.go_to(0)
    assert waiting._wants_more(full)
    waiting.close()


def test_a_time_to_try_again_that_nobody_waits_for_wakes_nobody(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """As that of a broker whose partitions have enough for now, or one that was asked and has not answered yet."""
    waits: list[float] = []
    poller = SimpleNamespace(register=lambda *_: None, poll=lambda timeout_ms: waits.append(timeout_ms) or [])
    clock.now = 5.0
    monkeypatch.setattr(fetcher_module, "select", SimpleNamespace(poll=lambda: poller, POLLIN=1))
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    for broker_id, retry_at in ((1, 4.9), (2, 5.0)):
        trouble = waiting._troubles[broker_id] = fetcher_module._Trouble(waiting._settings, 0.0)
        trouble.retry_at = retry_at
    waiting._drive(True, None)
    trouble.retry_at = 5.5
    waiting._drive(True, None)
    assert waits == [5000, 500]
    waiting.close()


def test_who_makes_room_in_a_partition_wakes_the_thread_that_drives() -> None:
    """It has left that partition out, and waits for another's next event."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster, max_partition_fetch_bytes=100)
    source = waiting.sources[0]
    woken: list[int] = []
    waiting.wake = lambda: woken.append(source.arrived_bytes)  # type: ignore[method-assign]
    waiting._driver = -1  # another thread
    batches: Any = [SimpleNamespace(header=SimpleNamespace(length=size, record_count=1)) for size in (60, 60, 40)]
    source.put_back(batches)
    after_each = []
    for _ in range(4):
        waiting.next(lambda: [source], 0.0, lambda source: source.take(1, 1))
        after_each.append(list(woken))
    assert after_each == [[], [40], [40, 0], [40, 0]], "where there is room, and where there is nothing"
    waiting._driver = None
    waiting.close()


def test_an_error_that_is_found_while_asking_is_not_waited_over() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    cluster.known_topic = lambda name: SimpleNamespace(topic_id=b"another")
    waiting._drive(True, None)
    assert isinstance(waiting.sources[0].error, UnknownTopicId)
    waiting.wake()
    waiting._drive(True, None)
    assert is_drained(waiting), "another time it is waited, until somebody wakes it"
    waiting.close()


def is_drained(waiting: Fetcher) -> bool:
    """Whether no wake-up is left, which would have the driving thread look again and again."""
    try:
        return not waiting._wake_receiver.recv(1)
    except BlockingIOError:
        return True


def receiving(waiting: Fetcher) -> list[int]:
    """The brokers whose answers are taken, as they will be."""
    received: list[int] = []

    def receive(broker_id: int, link: Link[Any]) -> bool:
        received.append(broker_id)
        return True

    waiting._receive = receive  # type: ignore[method-assign]
    return received


def test_a_wake_wakes_once_and_keeps_no_answer_from_being_received() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    received = receiving(waiting)
    answers, broker = socket.socketpair()
    with answers, broker:
        connection: Any = SimpleNamespace(has_buffered=False, fileno=answers.fileno, close=lambda: None)
        asking(waiting, connection, [], math.inf)
        for number in range(3):
            waiting.wake()
            if number:
                broker.send(b"x")
            waiting._drive(True, None)
            assert is_drained(waiting)
            assert received == [1] * number
        waiting.close()


def test_an_answer_that_was_read_with_the_one_before_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event tells of it: the socket is empty. It may have brought what is waited for."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    received = receiving(waiting)
    monkeypatch.setattr(fetcher_module, "select", SimpleNamespace(poll=lambda: Registers(), POLLIN=1))
    asking(waiting, SimpleNamespace(has_buffered=True, fileno=lambda: 99, close=lambda: None), [], math.inf)
    waiting._drive(True, None)
    assert received == [1]
    waiting.close()


class Registers:
    """In the place of a poll that must not wait."""

    def register(self, *_: object) -> None:
        """Nothing will be polled."""


def test_a_reader_without_time_looks_once_and_no_reader_waits_beyond_its_end(clock: Clock) -> None:
    """The clock stands still: its end is now."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    looks: list[int] = []

    def among() -> list[Source]:
        looks.append(len(looks))
        assert len(looks) < 5, "it looks again and again"
        return waiting.sources

    waiting._drive = lambda wait, end: None  # type: ignore[method-assign]
    assert waiting.next(among, 0.0, lambda source: source) is None
    assert len(looks) == 2, "once more after it has driven"
    waiting._driver = -1  # another thread
    looks.clear()
    assert waiting.next(among, 0.0, lambda source: source) is None
    assert len(looks) == 1
    waiting._driver = None
    waiting.close()


def test_a_driver_that_returns_lets_a_waiting_thread_drive() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    woken: list[int | None] = []
    arrival: Any = waiting._arrival
    arrival.notify_all = lambda: woken.append(waiting._driver)
    waiting._drive = lambda wait, end: None  # type: ignore[method-assign]
    waiting.next(lambda: waiting.sources, 0.0, lambda source: source)
    assert woken == [None], "nobody drives by then"
    waiting.close()


@pytest.mark.parametrize("pause", [0.25, 1.25])
def test_of_the_time_that_nobody_drives_no_more_counts_than_the_longest_pause(clock: Clock, pause: float) -> None:
    """A reader that looks at times gives a broker up after as many tries as one that waits."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_backoff_ms=250, retry_backoff_max_ms=250, retry_timeout_ms=1000)
    waiting._refresh = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        assert waiting.next(lambda: waiting.sources, 0.0, lambda source: source) is None
        clock.now += pause
    with pytest.raises(BrokerUnreachable):
        waiting.next(lambda: waiting.sources, 0.0, lambda source: source)
    waiting.close()


def test_nobody_is_asked_who_leads_before_the_next_try_is_due(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_backoff_ms=500)
    asked: list[float] = []

    def refresh(names: object, *, patient: bool) -> None:
        asked.append(clock.now)
        raise BrokerUnreachable(address="here:1", reason="connection refused")

    cluster.refresh = refresh
    waiting._stale = True
    for clock.now in (0.0, 0.25, 0.5, 0.75):
        waiting._ask_all()
    assert asked == [0.0, 0.5]
    waiting.close()


def test_who_leads_is_known_as_of_when_it_was_asked_and_not_when_the_answer_came(clock: Clock) -> None:
    """A try that became due between the two asks again."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    asked: list[BackgroundCall[Any]] = []
    waiting._begin = lambda call, on_done: asked.append(BackgroundCall()) or asked[-1]
    clock.now = 1.0
    waiting._refresh()
    clock.now = 2.0
    asked[0].set_result(None)
    waiting._refresh()
    assert (len(asked), waiting._refreshed_at) == (1, 1.0)
    waiting.close()


def test_a_connection_that_is_there_only_after_the_close_is_closed() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    made, closed = BackgroundCall[Any](), list[bool]()
    waiting._begin = lambda call, on_done: made
    waiting._ask_all()
    assert waiting._connecting == {1: made}
    waiting.close()
    made.set_result(SimpleNamespace(close=lambda: closed.append(True)))
    assert closed == [True]


def test_trouble_is_over_with_an_answer_and_with_a_question_that_was_answered(clock: Clock) -> None:
    """What fails a later time is tried as long as what never failed."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_timeout_ms=1000)
    trouble = BrokerUnreachable(address="here:1", reason="connection refused")
    waiting._failed(fetcher_module._ANY_BROKER, trouble)
    waiting._failed(1, trouble)
    clock.now = 0.5
    waiting._refresh()
    assert list(waiting._troubles) == [1]
    link = asking(waiting, Answering(), [], 60.0)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    waiting._receive(1, link)
    assert waiting._troubles == {}
    waiting.close()


def asking(waiting: Fetcher, connection: Any, sources: list[Source], deadline: float) -> Link[Any]:
    """Have a fetch of sources in flight to broker 1."""
    link = waiting._links[1] = Link(connection)
    asked = fetcher_module._Asked()
    asked.sources += sources
    for source in sources:
        source.asked = asked
    link.began(link.next_id(), asked, deadline)
    return link


class Answering:
    """A connection that answers the first request, with nothing."""

    address = "here:1"
    received_bytes = 0

    def receive_now(self) -> Reply:
        return Reply(pb.ReplyHeader(correlation_id=1, fetch=pb.FetchReply()), None)

    def close(self) -> None:
        """Nothing to close."""


def test_the_error_of_a_broker_is_raised_once_and_for_those_who_read_what_it_leads(clock: Clock) -> None:
    """Whichever thread drives, and whether or not it waits."""
    cluster: Any = Unreachable()
    cluster.leader = lambda topic, number: SimpleNamespace(broker_id=(1, 2, 1)[number])
    waiting = fetching(cluster, retry_timeout_ms=1000)
    waiting.sources.append(Source(TopicPartition("t", 2), TOPIC_ID, 0))
    first, healthy, third = waiting.sources
    cluster.connect_data = lambda broker_id: Keeping([]) if broker_id == 2 else Unreachable().connect_data(broker_id)
    for clock.now in (0.0, 1.0):
        waiting._drive(False, None)
    assert errors(waiting) == [BrokerUnreachable, None, BrokerUnreachable]
    with waiting.lock:
        assert waiting._ready([healthy]) is None
        with pytest.raises(BrokerUnreachable) as raised:
            waiting._ready(waiting.sources)
        assert first.failure is third.failure is raised.value
        assert waiting._ready(waiting.sources) is None, "it is raised once"
    assert healthy.failure is None
    waiting.close()


def test_that_nobody_says_who_leads_is_the_error_of_what_is_not_known(clock: Clock) -> None:
    cluster: Any = Opening(0, 1)
    waiting = fetching(cluster, retry_timeout_ms=1000)
    unknown = Source(TopicPartition("unknown", 0), TOPIC_ID, 0)
    waiting.sources.append(unknown)
    known = cluster.known_topic
    cluster.known_topic = lambda name: known(name) if name == "t" else None

    def refresh(names: object, *, patient: bool) -> None:
        raise BrokerUnreachable(address="here:1", reason="connection refused")

    cluster.refresh = refresh
    for clock.now in (0.0, 1.0):
        waiting._stale = True
        waiting._ask_all()
    assert errors(waiting) == [None, None, BrokerUnreachable]
    assert waiting.sources[0].asked is not None
    waiting.close()


def test_a_partition_that_a_topic_has_not_for_long_is_the_error_of_that_one(clock: Clock) -> None:
    """It may be new, and the metadata older."""
    cluster: Any = Opening(0)

    def leader(topic: object, number: int) -> SimpleNamespace:
        if number == 1:
            raise UnknownPartition(topic="t", partition=1, partitions=1)
        return SimpleNamespace(broker_id=1)

    cluster.leader = leader
    cluster.refresh = lambda names, *, patient: None
    waiting = fetching(cluster, retry_timeout_ms=1000)
    waiting._ask_all()
    assert errors(waiting) == [None, None]
    assert waiting.sources[0].asked is not None
    while clock.now < 10 and waiting.sources[1].error is None:
        clock.now += 0.05
        waiting._ask_all()
    assert errors(waiting) == [None, UnknownPartition]
    waiting.close()


class Keeping(Answering):
    """A connection that keeps which partitions were asked for."""

    def __init__(self, asked: list[list[int]]) -> None:
        self._asked = asked

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        header = pb.RequestHeader.FromString(b"".join(pieces)[PREFIX_SIZE:])
        self._asked.append([part.partition for part in header.fetch.partitions])


def test_only_one_who_has_nothing_asks_again_before_an_answer_and_who_has_least_comes_first() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    asked: list[list[int]] = []
    cluster.connect_data = lambda broker_id: Keeping(asked)
    first, second = waiting.sources
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=100))
    first.put_back([batch])
    assert waiting._is_behind()
    waiting._ask_all()
    assert asked == [[1, 0]]
    assert not waiting._is_behind()
    first.asked = None  # as after a seek to what has arrived
    waiting._ask_all()
    assert asked == [[1, 0]], "it has something to go on with"
    second.asked = None
    waiting._ask_all()
    assert asked == [[1, 0], [1, 0]]
    first.asked = second.asked = None
    waiting._ask_all()
    assert len(asked) == 2, "two are enough"
    waiting._links[1].lose()
    waiting._ask_all()
    second.asked, second.is_dry = None, True
    waiting._ask_all()
    assert len(asked) == 3, "its last answer brought nothing, so that another can wait"
    waiting.close()


def test_a_source_with_an_error_is_not_asked_for_and_a_seek_leaves_nothing_of_where_it_was() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    source: Any = waiting.sources[0]
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=1 << 30, end_offset=5))
    source.put_back([batch])
    source.error = source.failure = UnknownTopicId(topic_id="74")
    source.reset_to = 7
    assert not waiting._wants_more(source)
    source.arrived.clear()
    source.arrived_bytes = 0
    assert not waiting._wants_more(source)
    source.put_back([batch])
    source.go_to(3)
    assert waiting._wants_more(source)
    assert (source.arrived_bytes, source.error, source.failure, source.reset_to) == (0, None, None, None)
    assert source.reader.offset == 3
    waiting.close()


def test_close_wakes_waiters_and_the_driver() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    woken: list[str] = []
    waiting.wake = lambda: woken.append("who drives")  # type: ignore[method-assign]
    arrival: Any = waiting._arrival
    arrival.notify_all = lambda: woken.append("who waits")
    waiting.close()
    assert woken == ["who drives", "who waits"]


def test_a_taking_ends_with_the_rows_or_the_bytes_that_are_enough() -> None:
    source = Source(TopicPartition("t", 0), TOPIC_ID, 0)
    batches: list[Any] = [SimpleNamespace(header=SimpleNamespace(length=100, record_count=10)) for _ in range(4)]
    source.put_back(batches)
    assert (source.take(1, 1 << 20), source.arrived_bytes) == (batches[:1], 300)
    assert (source.take(1 << 20, 101), source.arrived_bytes) == (batches[1:3], 100)
    assert source.take(11, 1 << 20) == batches[3:]
    for rows, size in ((10, 1 << 20), (1 << 20, 100)):  # so many, and not one more
        source.put_back(batches)
        assert source.take(rows, size) == batches[:1]
        source.go_to(0)


def test_a_turn_lasts_until_there_is_no_more_and_then_comes_who_waited_longest() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    first, second = waiting.sources
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=100, record_count=10))
    second.arrived.append(batch)
    assert waiting._ready([second]) is second
    first.arrived += [batch, batch]
    assert waiting._ready(waiting.sources) is second, "its turn is not over"
    second.take(1, 1)
    assert waiting._ready(waiting.sources) is first
    first.take(1, 1)
    second.arrived.append(batch)
    assert waiting._ready(waiting.sources) is first
    first.take(1, 1)
    assert waiting._ready(waiting.sources) is second
    first.arrived.append(batch)
    second.take(1, 1)
    assert waiting._ready(waiting.sources) is first
    waiting.close()


def test_a_turn_ends_with_the_bytes_of_one_fetch() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, max_partition_fetch_bytes=150)
    first, second = waiting.sources
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=100, record_count=10))
    first.arrived += [batch] * 5
    second.arrived += [batch] * 5
    order: list[int] = []
    for _ in range(8):
        source = waiting._ready(waiting.sources)
        assert source is not None
        taken = source.take(1, 1)
        if len(order) == 1:  # a part of it was used
            source.put_back(taken)
        order.append(waiting.sources.index(source))
    assert order == [0, 0, 0, 1, 1, 0, 0, 1]
    waiting.close()


def test_a_partition_that_fails_each_time_it_is_asked_for_leaves_the_others_their_turns() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    failing, busy = waiting.sources
    batch: Any = SimpleNamespace(header=SimpleNamespace(length=100, record_count=10))
    for _ in range(2):
        failing.error = UnknownPartition(topic="t", partition=0, partitions=0)
        busy.arrived.append(batch)
        with pytest.raises(UnknownPartition):
            waiting._ready(waiting.sources)
        failing.error = failing.failure
        assert waiting._ready(waiting.sources) is busy
        busy.take(1, 1)
        assert waiting._ready([busy]) is None, "its turn is over"
    waiting.close()


def test_more_is_asked_for_once_half_of_what_may_lie_here_is_used_up() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, max_partition_fetch_bytes=1000)
    source = waiting.sources[0]
    for length, wants_more in ((500, True), (501, False)):
        batch: Any = SimpleNamespace(header=SimpleNamespace(length=length, record_count=1))
        source.put_back([batch])
        assert waiting._wants_more(source) is wants_more
        source.take(1, 1)
    waiting.close()


def test_a_request_says_what_is_set_and_has_its_wait_and_the_timeout_to_be_answered(clock: Clock) -> None:
    clock.now = 10.0
    cluster: Any = Unreachable()
    sizes = {"fetch_min_bytes": 5, "fetch_max_bytes": 7000, "max_partition_fetch_bytes": 6000}
    waiting = fetching(cluster, **sizes, fetch_max_wait_ms=2000, request_timeout_ms=500)
    sent: list[pb.RequestHeader] = []
    link: Link[Any] = Link(SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
    deadlines = []

    def send(pieces: Sequence[bytes | memoryview]) -> None:
        sent.append(pb.RequestHeader.FromString(b"".join(pieces)[PREFIX_SIZE:]))

    link.connection.send = send  # type: ignore[method-assign]
    for _ in range(2):
        waiting._ask(1, link, waiting.sources)
        deadlines.append(link.deadline)
    assert [header.correlation_id for header in sent] == [1, 2]
    fetch = sent[0].fetch
    assert (fetch.min_bytes, fetch.max_bytes, fetch.max_wait_ms) == (5, 7000, 2000)
    assert sent[1].fetch.max_wait_ms == 0, "behind another one it asks what there is now"
    assert [part.max_bytes for part in fetch.partitions] == [6000, 6000]
    assert deadlines == [12.5, 12.5]
    waiting.close()


def test_an_answer_to_another_request_ends_the_connection() -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    link = asking(waiting, Answering(), [waiting.sources[0]], 60.0)
    link.answered()
    link.began(2, waiting.sources[0].asked)
    waiting.sources[0].broker_id = 1
    waiting._receive(1, link)
    with pytest.raises(ProtocolError, match="an answer to a request that was not made"):
        waiting._ready(waiting.sources)
    assert waiting._links == {}
    assert waiting.sources[0].asked is None
    waiting.close()


def test_pauses_between_tries_grow_to_the_longest_and_no_further(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_backoff_ms=100, retry_backoff_max_ms=250, retry_timeout_ms=60_000)
    pauses = []
    for clock.now in (1.0, 2.0, 3.0, 4.0):
        waiting._failed(1, RequestTimedOut(what="a fetch", address="here:1", timeout_ms=1))
        pauses.append(round((waiting._troubles[1].retry_at - clock.now) * 1000))
        assert waiting._is_paused(1)
    assert pauses == [100, 200, 250, 250]
    connects: list[float] = []

    def connect(broker_id: int) -> None:
        connects.append(clock.now)
        raise BrokerUnreachable(address="here:1", reason="connection refused")

    cluster.connect_data = connect
    for clock.now in (4.2, 4.25):
        waiting._ask_all()
    assert connects == [4.25], "when it is due and not before"
    waiting.close()


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("soonest", ["a try", "the reader's end", "an answer's deadline"])
def test_the_driver_wakes_at_the_first_event(monkeypatch: pytest.MonkeyPatch, soonest: str) -> None:
    times = dict.fromkeys(("a try", "the reader's end", "an answer's deadline"), 30.0) | {soonest: 3.0}
    waits: list[float] = []

    class Poller:
        def register(self, *_: object) -> None:
            """Nothing happens on any of them."""

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            waits.append(timeout_ms)
            return []

    monkeypatch.setattr(fetcher_module, "select", SimpleNamespace(poll=Poller, POLLIN=1))
    cluster: Any = Unreachable()
    waiting = fetching(cluster, request_timeout_ms=1000)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    trouble = waiting._troubles[2] = fetcher_module._Trouble(waiting._settings, 0.0)
    trouble.retry_at = times["a try"]
    connection: Any = SimpleNamespace(has_buffered=False, fileno=lambda: 99, close=lambda: None)
    asking(waiting, connection, [], times["an answer's deadline"])
    waiting._drive(True, times["the reader's end"])
    assert waits == [3000]
    waiting.close()


def test_a_partition_without_a_leader_counts_as_one_failure_for_each_pause(clock: Clock) -> None:

    def leader(topic: object, number: int) -> SimpleNamespace:
        raise LeaderNotAvailable(partition=f"t-{number}", broker_id=1)

    cluster: Any = Unreachable()
    cluster.leader = leader
    waiting = fetching(cluster, retry_backoff_ms=100, retry_backoff_max_ms=1000)
    waiting._ask_all()  # of two partitions
    waiting._ask_all()
    assert (waiting._troubles[1].retry_at, waiting._troubles[1].retry.backoff.pause) == (0.1, 0.2)
    clock.now = 0.1
    waiting._ask_all()
    assert round(waiting._troubles[1].retry_at, 3) == 0.3
    waiting.close()


def test_a_log_that_nobody_has_opened_is_asked_for_with_short_pauses_and_given_up_alone(clock: Clock) -> None:
    refreshed: list[float] = []
    cluster: Any = Opening(0)
    cluster.refresh = lambda names, patient: refreshed.append(clock.now)
    waiting = fetching(cluster, retry_backoff_ms=500, retry_backoff_max_ms=1000, retry_timeout_ms=3000)
    good, unopened = waiting.sources
    while clock.now < 10 and unopened.error is None:
        waiting._ask_all()
        assert good.asked is not None, "the other is read meanwhile"
        if unopened.trouble is not None:
            assert unopened.trouble in waiting._all_troubles(), "it wakes who drives"
        clock.now += 0.125
    assert isinstance(unopened.error, LeaderNotAvailable)
    assert waiting._found_error, "whoever waits is to look, and not to wait for an event"
    assert clock.now == 3.125
    assert refreshed == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0], "before each try, the last one too"
    unopened.error = None  # taken by a reader
    waiting._ask_all()
    assert refreshed[-1] == 3.125 and unopened.trouble is not None, "it is tried as long another time"
    cluster.opened.add(1)
    clock.now = unopened.trouble.retry_at
    waiting._ask_all()
    assert unopened.asked is not None and unopened.trouble is None
    waiting.close()


def test_a_log_that_is_opened_between_two_tries_is_found_by_the_last(clock: Clock) -> None:
    """What is known then is one pause old: it is asked again first."""
    known_to_be_led = led = False

    def leader(topic: object, number: int) -> SimpleNamespace:
        if not known_to_be_led:
            raise LeaderNotAvailable(partition=f"t-{number}", broker_id=broker_id)
        return SimpleNamespace(broker_id=1)

    def refresh(names: object, *, patient: bool) -> None:
        nonlocal known_to_be_led
        known_to_be_led = led

    cluster: Any = Unreachable()
    cluster.leader, cluster.refresh = leader, refresh
    cluster.connect_data = lambda broker_id: Keeping([])
    for broker_id in (-1, 7):  # noqa: B007 - no broker has opened it; the one that did is away
        clock.now, known_to_be_led, led = 0.0, False, False
        waiting = fetching(cluster, retry_backoff_ms=1000, retry_timeout_ms=1000)
        waiting._ask_all()
        clock.now = 0.5
        waiting._ask_all()
        led, clock.now = True, 1.0
        waiting._ask_all()
        assert all(source.asked is not None and source.error is None for source in waiting.sources)
        waiting.close()


def test_a_partition_that_is_not_opened_yet_has_its_time_though_another_was_not_before(clock: Clock) -> None:
    """As topics are created one after the other, for longer than retry.timeout.ms."""
    cluster: Any = Opening()
    waiting = fetching(cluster, retry_backoff_ms=250, retry_backoff_max_ms=250, retry_timeout_ms=1000)
    first, second = waiting.sources
    waiting.sources = [first]
    for clock.now in (0.0, 0.25, 0.5, 0.75):
        waiting._ask_all()
    waiting.sources = [first, second]
    cluster.opened.add(0)
    for clock.now in (1.0, 1.25, 1.5, 1.75):
        waiting._ask_all()
        assert second.error is None and first.error is None
    waiting.close()


def test_a_partition_is_not_given_up_for_the_time_that_its_broker_was_away(clock: Clock) -> None:
    """Its disk was full, and nobody could be asked whether it still is."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_backoff_ms=125, retry_backoff_max_ms=125, retry_timeout_ms=1000)
    full = waiting.sources[1]
    waiting.sources = [full]
    disk_full = pb.FetchReply(partitions=[{"error": error_to_wire(DiskFull(directory="/data", reason="full"))}])

    def answered_at(moment: float) -> None:
        clock.now = moment
        link = waiting._links[1] = Link(Keeping([]))  # type: ignore[arg-type]
        waiting._ask(1, link, [full])
        waiting._take_in(link.in_flight[0], disk_full, None)

    answered_at(0.0)
    answered_at(0.5)
    waiting._drop(1, waiting._links[1])
    answered_at(30.0)
    assert full.error is None and full.trouble is not None
    answered_at(30.5)
    assert full.error is None
    for step in range(8):
        answered_at(30.625 + step * 0.125)
    assert isinstance(full.error, DiskFull), "while the broker answers, it is"
    waiting.close()


def test_a_full_disk_does_not_hold_back_the_warning_of_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    waiting.sources.append(Source(TopicPartition("t", 2), TOPIC_ID, 0))
    with waiting.lock:
        for source, directory in zip(waiting.sources, ("/a", "/a", "/b"), strict=True):
            source.broker_id = 1
            waiting._source_failed(source, DiskFull(directory=directory))
    waiting._failed(1, BrokerUnreachable(address="broker 1", reason="connection refused"))
    waiting._failed(2, BrokerUnreachable(address="broker 2", reason="connection refused"))
    said = [record.getMessage() for record in caplog.records if "fetching_held_up" in record.getMessage()]
    assert [next(what for what in ("/a", "/b", "broker 1", "broker 2") if what in line) for line in said] == [
        "/a",
        "/b",
        "broker 1",
        "broker 2",
    ]
    waiting.close()


@pytest.mark.parametrize("broker_is_away", [True, False])
def test_that_nobody_says_who_leads_is_told_where_no_broker_is_away(
    caplog: pytest.LogCaptureFixture, broker_is_away: bool
) -> None:
    """Else it follows from that."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    for broker_id in (1, fetcher_module._ANY_BROKER) if broker_is_away else (fetcher_module._ANY_BROKER,):
        waiting._failed(broker_id, BrokerUnreachable(address=f"broker {broker_id}", reason="connection refused"))
    [said] = [record.getMessage() for record in caplog.records]
    assert ("broker_id=1 " in said) is broker_is_away
    waiting.close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_broker_that_is_silent_is_given_up_in_time_beside_one_that_answers(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, wait: bool
) -> None:
    """Each time that somebody drives, there is an event of the one that answers, or nobody waits."""
    poller = SimpleNamespace(register=lambda *_: None, poll=lambda timeout_ms: [(92, 1)])
    monkeypatch.setattr(fetcher_module, "select", SimpleNamespace(poll=lambda: poller, POLLIN=1))
    cluster: Any = Unreachable()
    waiting = fetching(cluster)
    answers = {1: 0, 2: 0, 3: 1}
    for broker_id, deadline in ((1, 1.0), (2, 60.0), (3, 0.5)):
        connection: Any = SimpleNamespace(
            address=f"here:{broker_id}",
            has_buffered=False,
            fileno=lambda broker_id=broker_id: 90 + broker_id,
            close=lambda: None,
        )
        link: Link[Any] = Link(connection)
        waiting._links[broker_id] = link
        link.began(link.next_id(), fetcher_module._Asked(), deadline)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    waiting._receive = lambda broker_id, link: bool(answers[broker_id])  # type: ignore[method-assign]
    for clock.now in (0.9, 1.0):
        assert 1 in waiting._links
        waiting._drive(wait, None)
    assert waiting._links.keys() == {2, 3}, "an answer of the third has come and was not looked at yet"
    assert waiting._troubles.keys() == {1}
    waiting.close()


def test_a_silent_broker_is_given_up_early_if_it_is_not_registered_any_more(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, request_timeout_ms=30_000)
    connection: Any = SimpleNamespace(address="here:1", close=lambda: None)
    waiting._receive = lambda broker_id, link: False  # type: ignore[method-assign]
    link: Link[fetcher_module._Asked] = Link(connection)
    waiting._links[1] = link
    link.began(link.next_id(), fetcher_module._Asked(), 30.5)  # the fetch may wait for half a second
    lost = BrokerUnreachable(address="here:1", reason="it is not registered in the cluster any more")
    for clock.now, loss, is_stale, is_kept in (
        (2.4, lost, False, True),  # it may be a pause
        (2.5, None, True, True),
        (2.5, lost, True, False),
    ):
        cluster.loss_of = lambda broker_id, connection, loss=loss: loss
        waiting._check_deadlines(clock.now)
        assert (waiting._stale, waiting._links == {1: link}) == (is_stale, is_kept)
    assert waiting._troubles.keys() == {1}
    waiting.close()


def test_what_a_silent_broker_was_asked_for_is_asked_of_the_next_leader(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, request_timeout_ms=30_000)
    waiting._receive = lambda broker_id, link: False  # type: ignore[method-assign]
    asked: dict[int, list[list[int]]] = {1: [], 2: []}
    cluster.connect_data = lambda broker_id: Keeping(asked[broker_id])
    waiting._ask_all()
    clock.now = 3.0
    led = [SimpleNamespace(leader=1, leader_epoch=0) for _ in range(2)]
    cluster.known_topic = lambda name: SimpleNamespace(topic_id=TOPIC_ID, partitions=led)
    cluster.leader = lambda topic, number: SimpleNamespace(broker_id=led[number].leader)
    for leader, epoch, is_moved in ((1, 1, False), (-1, 2, False), (2, 3, True)):
        assert asked == {1: [[0, 1]], 2: []}
        led[1] = SimpleNamespace(leader=leader, leader_epoch=epoch)
        waiting._check_deadlines(clock.now)
        assert (1 not in waiting._links) == is_moved
    waiting._ask_all()
    assert asked == {1: [[0, 1], [0]], 2: [[1]]}
    waiting.close()


@pytest.mark.parametrize("what", ["connect_data", "refresh"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hit a generator's end
def test_an_interrupt_anywhere_leaves_no_call_whose_end_wakes_nobody(what: str) -> None:
    """The next read would wait for it for ever."""
    for place in count():
        go_on = threading.Event()
        cluster: Any = Opening(0, 1)
        setattr(cluster, what, lambda *_, go_on=go_on, **__: go_on.wait(30))
        waiting = Fetcher(cluster, ConsumerSettings.parse({}), lambda: None)
        waiting.sources = [Source(TopicPartition("t", 0), TOPIC_ID, 0)]
        waiting._stale = what == "refresh"
        files = ("client/consumer/fetcher.py", "client/background.py", "concurrent/futures/_base.py")
        was_interrupted = interrupted_at(place, waiting._ask_all, *files)
        calls: list[Future[Any]] = list(waiting._connecting.values())
        if waiting._refreshing is not None:
            calls.append(waiting._refreshing[1])
        go_on.set()
        if calls:
            assert select.select([waiting._wake_receiver], [], [], 30)[0], f"nobody is woken, {place}"
        waiting._links.clear()
        waiting._connecting.clear()
        waiting.close()
        if not was_interrupted:
            break
    assert calls and place > 5


class Trickling(Answering):
    """A connection on which a piece of an answer comes each time that it is looked at, while there are any."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    def receive_now(self) -> Any:
        if self._pieces:
            self._pieces -= 1
            self.received_bytes += 1


def test_an_answer_that_comes_in_pieces_is_overdue_once_no_piece_comes(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, request_timeout_ms=1000)
    link = asking(waiting, Trickling(2), waiting.sources, 1.0)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    for clock.now in (1.0, 2.0):
        waiting._drive(False, None)
        assert waiting._links == {1: link} and waiting._troubles == {}
    assert link.deadline == 3.0
    clock.now = 3.0
    waiting._drive(False, None)
    assert waiting._links == {} and waiting._troubles.keys() == {1}
    waiting.close()


def test_a_request_behind_a_slow_answer_has_its_time_from_that_answer_on(clock: Clock) -> None:
    cluster: Any = Unreachable()
    waiting = fetching(cluster, request_timeout_ms=1000, fetch_max_wait_ms=500)
    link = asking(waiting, Answering(), [], 9.0)
    link.began(link.next_id(), fetcher_module._Asked(), 1.5)
    waiting._ask_all = lambda: None  # type: ignore[method-assign]
    clock.now = 8.0
    waiting._receive(1, link)
    assert (link.count, link.deadline) == (1, 9.5)
    waiting.close()


def test_a_broker_that_answers_again_is_no_error_for_those_who_did_not_read_meanwhile(clock: Clock) -> None:
    """Each partition is read by a thread of its own; one of them was busy with its records."""
    cluster: Any = Unreachable()
    waiting = fetching(cluster, retry_timeout_ms=1000)
    reading, busy = waiting.sources
    for clock.now in (0.0, 1.0):
        waiting._drive(False, None)
    assert errors(waiting) == [BrokerUnreachable, BrokerUnreachable]
    with pytest.raises(BrokerUnreachable), waiting.lock:
        waiting._ready([reading])
    assert errors(waiting) == [None, BrokerUnreachable]
    for clock.now in (2.0, 3.2):  # given up again
        waiting._drive(False, None)
    with pytest.raises(BrokerUnreachable), waiting.lock:
        waiting._ready([reading])
    asked: list[list[int]] = []
    link = asking(waiting, Keeping(asked), [], 60.0)
    waiting._receive(1, link)
    assert errors(waiting) == [None, None]
    assert asked == [[0, 1]]
    busy.error = UnknownPartition(topic="t", partition=1, partitions=1)
    asking(waiting, Keeping(asked), [], 60.0)
    waiting._receive(1, waiting._links[1])
    assert errors(waiting) == [None, UnknownPartition], "its own error"
    waiting.close()


def test_a_connection_that_nobody_needs_any_more_is_closed_and_its_failure_is_forgotten() -> None:
    """The partition moved before it was there. When it moves back, it is connected to anew."""
    futures: dict[int, BackgroundCall[Any]] = {}
    closed: list[int] = []
    cluster: Any = Unreachable()
    cluster.connect_data = lambda broker_id: broker_id
    waiting = fetching(cluster)

    def begin(call: Callable[[], Any], on_done: Callable[[Future[Any]], object]) -> BackgroundCall[Any]:
        futures[call()] = BackgroundCall()
        return futures[call()]

    waiting._begin = begin
    for cluster.leader_id in (1, 2, 3):
        waiting._ask_all()
        assert list(waiting._connecting) == [cluster.leader_id]
    futures[1].set_result(SimpleNamespace(close=lambda: closed.append(1)))
    futures[2].set_exception(BrokerUnreachable(address="broker 2", reason="connection refused"))
    assert closed == [1]
    cluster.leader_id = 2
    waiting._ask_all()
    assert waiting._troubles == {}
    waiting.close()
