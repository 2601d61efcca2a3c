"""One lane: what it counts as waiting for its message, and what it ends when others queue; over calls that the test
makes. Over gRPC it is in `test_rpc.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from broker.transport import lanes
from broker.transport.lanes import Lane, MessageOverdue
from kafkalog.threads import Pool
from tests.waiting import waited_for


class Call:
    """A call whose message comes when the test says so."""

    def __init__(self) -> None:
        self.may_come = threading.Event()
        self.cancelled = threading.Event()
        self.fails = False

    def messages(self) -> Iterator[bytes]:
        assert self.may_come.wait(30)
        if self.fails:
            raise ConnectionError
        yield b"message"

    def cancel(self) -> None:
        self.cancelled.set()


class Made:
    """A lane of two threads."""

    def __init__(self) -> None:
        self.crowded = threading.Event()
        self._full = Pool(1, process="the broker")
        self.lane = Lane("made", 2, self._full, self.crowded)
        self.calls: list[Call] = []
        self.received: dict[Call, bytes | type[BaseException] | None] = {}

    def call(self) -> Call:
        """One more call, which waits for its message; or queues."""
        call = Call()
        self.calls.append(call)
        self.lane.submit(self._receive, call)
        return call

    def _receive(self, call: Call) -> None:
        try:
            self.received[call] = self.lane.next_message(call.messages(), call)
        except (MessageOverdue, ConnectionError) as error:
            self.received[call] = type(error)

    def close(self) -> None:
        for call in self.calls:
            call.may_come.set()
        self.lane.shutdown()
        self._full.shutdown()


@pytest.fixture
def made() -> Iterator[Made]:
    lane = Made()
    yield lane
    lane.close()


def test_a_call_that_queues_while_others_wait_for_messages_is_reported(made: Made) -> None:
    for _ in range(2):
        made.call()
    waited_for(lambda: len(made.lane._awaited) == 2)
    assert not made.crowded.is_set()  # nobody queues
    made.call()
    assert made.crowded.is_set()


def test_a_call_that_begins_to_wait_for_its_message_while_others_queue_is_reported(made: Made) -> None:
    begin = threading.Event()
    waiting = Call()

    def late() -> None:
        assert begin.wait(30)
        made._receive(waiting)

    busy = threading.Event()
    made.lane.submit(late)
    made.lane.submit(busy.wait, 30)
    waited_for(lambda: made.lane._busy == 2)
    made.call()
    assert not made.crowded.is_set()  # nobody waits for a message
    begin.set()
    assert made.crowded.wait(30)
    waiting.may_come.set()
    busy.set()


def test_as_many_are_ended_as_queue_the_oldest_first_and_none_before_its_time(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made.call()
    waited_for(lambda: len(made.lane._awaited) == 1)
    second = made.call()
    waited_for(lambda: len(made.lane._awaited) == 2)
    assert made.lane.end_overdue() is None  # nobody queues
    made.call()
    left = made.lane.end_overdue()
    assert left is not None and 0 < left <= lanes._MESSAGE_SECONDS
    assert not first.cancelled.is_set()
    monkeypatch.setattr(lanes, "_MESSAGE_SECONDS", 0.0)
    assert made.lane.end_overdue() is not None  # there may be more to end
    assert first.cancelled.is_set() and not second.cancelled.is_set()


def test_a_message_that_comes_as_its_call_is_ended_is_not_taken(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MESSAGE_SECONDS", 0.0)
    first = made.call()
    waited_for(lambda: len(made.lane._awaited) == 1)
    made.call()
    made.call()
    waited_for(lambda: len(made.lane._awaited) == 2)
    made.lane.end_overdue()
    assert first.cancelled.is_set()
    first.may_come.set()
    waited_for(lambda: first in made.received)
    assert made.received[first] is MessageOverdue


@pytest.mark.parametrize("fails", [True, False])
def test_a_call_that_has_its_message_or_never_gets_one_is_awaited_no_more(made: Made, fails: bool) -> None:
    call = made.call()
    waited_for(lambda: len(made.lane._awaited) == 1)
    call.fails = fails
    call.may_come.set()
    waited_for(lambda: call in made.received)
    assert made.received[call] == (ConnectionError if fails else b"message")
    assert not made.lane._awaited
    waited_for(lambda: made.lane._busy == 0)  # its thread has nothing to do, so that no call queues
