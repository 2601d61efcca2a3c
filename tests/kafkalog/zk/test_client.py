"""Requests to ZooKeeper that can be taken back: the queue and what of it is sent, without a server. Over a real one,
held back and cut, it is in `test_session.py`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionDropped, ConnectionLoss
from kazoo.protocol.serialization import Exists
from kazoo.retry import KazooRetry

from kafkalog.zk import client as client_module
from kafkalog.zk.client import Client, Refused


def client_of(hosts: str) -> Any:
    """One that is not started; its insides are looked at."""
    return Client(hosts, 10.0, KazooRetry(max_tries=0))


class Sending:
    """A client as it is while there is a connection; its thread's steps are the test's. `sent`: paths and numbers."""

    def __init__(self) -> None:
        self.client = client_of("127.0.0.1:1")
        self.connection = self.client._connection
        self.connection._read_sock, self.connection._write_sock = socket.socketpair()
        for end in (self.connection._read_sock, self.connection._write_sock):
            end.setblocking(False)
        self.sent: list[tuple[str, int]] = []
        self.connection._submit = self._submit
        self.connection._xid = 0
        self.connection._heard = time.monotonic()
        self.client._live.set()

    def _submit(self, request: Exists, timeout: float, xid: int) -> None:
        self.sent.append((request.path, xid))

    def submit(self, *paths: str) -> list[Any]:
        return [self.client.submit(Exists(path, None)) for path in paths]

    def step(self, read_timeout: float = 10.0) -> None:
        self.connection._send_request(read_timeout, 10.0)

    def is_awake(self) -> bool:
        """Whether its thread would be told to send."""
        try:
            return bool(self.connection._read_sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False


@pytest.fixture
def sending() -> Iterator[Sending]:
    made = Sending()
    yield made
    made.connection._read_sock.close()
    made.connection._write_sock.close()


def test_requests_leave_one_a_step_in_order_and_the_thread_sleeps_after_the_last(sending: Sending) -> None:
    first, second = sending.submit("/a", "/b")
    assert (first.sent, second.sent) == (False, False)
    assert sending.is_awake()
    sending.step()
    assert (first.sent, second.sent) == (True, False)
    assert sending.is_awake(), "there is another"
    sending.step()
    assert second.sent
    assert not sending.is_awake()
    assert sending.sent == [("/a", 1), ("/b", 2)]
    [third] = sending.submit("/c")
    assert sending.is_awake() and not third.sent


def test_a_step_with_nothing_to_send_sends_nothing_and_sleeps(sending: Sending) -> None:
    [pending] = sending.submit("/a")
    assert sending.client.take_back(pending)
    sending.step()
    assert sending.sent == []
    assert not sending.is_awake()


def test_what_is_queued_is_taken_back_alone_and_what_was_sent_is_not(sending: Sending) -> None:
    first, second, third = sending.submit("/a", "/b", "/c")
    sending.step()
    assert not sending.client.take_back(first), "it may be executed"
    assert sending.client.take_back(second)
    assert sending.client.take_back(second), "it is not there any more, and was never sent"
    sending.step()
    assert [path for path, _ in sending.sent] == ["/a", "/c"]
    assert third.sent


def test_what_waits_for_an_answer_is_bounded_sent_or_not(sending: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "OUTSTANDING_MAX", 3)
    sending.submit("/a", "/b")
    sending.step()
    sending.submit("/c")
    with pytest.raises(Refused, match="3 requests wait for an answer"):
        sending.submit("/d")
    sending.client._pending.popleft()
    sending.submit("/d")


def test_without_a_connection_nothing_is_taken_and_what_was_is_failed(sending: Sending) -> None:
    sent, queued = sending.submit("/a", "/b")
    sending.step()
    failed_under_lock = []
    for pending in (sent, queued):
        fail = pending.set_exception
        pending.set_exception = lambda error, fail=fail: (
            failed_under_lock.append(sending.client.lock.locked()),
            fail(error),
        )
    sending.client._live.clear()
    sending.client._notify_pending("CONNECTING")
    assert failed_under_lock == [True, True], "nothing is appended meanwhile"
    for pending, was_sent in ((sent, True), (queued, False)):
        with pytest.raises(ConnectionLoss):
            pending.answer(0)
        assert pending.sent is was_sent
    with pytest.raises(Refused, match="there is no connection"):
        sending.submit("/c")
    assert not sending.client._queue
    assert not sending.client.wait_connected(0)


def test_more_wake_ups_than_a_socket_takes_hold_up_nobody(sending: Sending) -> None:
    for _ in range(100_000):
        sending.connection.wake()
    sending.submit("/a")
    sending.step()
    assert not sending.is_awake(), "all of them are over with what they were for"


def test_what_is_appended_while_wake_ups_are_cleared_is_not_slept_over(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo's `stop` appends and wakes without the lock."""
    real = sending.connection._read_sock

    class Overtaken:
        def recv(self, size: int, *flags: int) -> bytes:
            if not sending.client._queue:
                sending.client._queue.append((Exists("/stop", None), None))
                sending.connection.wake()
            data: bytes = real.recv(size, *flags)
            return data

    sending.submit("/a")
    monkeypatch.setattr(sending.connection, "_read_sock", Overtaken())
    sending.step()
    monkeypatch.setattr(sending.connection, "_read_sock", real)
    assert sending.is_awake()
    sending.step()
    assert [path for path, _ in sending.sent] == ["/a", "/stop"]


def test_numbers_of_requests_begin_again_after_the_largest(sending: Sending) -> None:
    sending.connection._xid = (1 << 31) - 2
    sending.submit("/a", "/b")
    sending.step()
    sending.step()
    assert [number for _, number in sending.sent] == [(1 << 31) - 1, 1]


def test_a_server_that_owes_answers_and_says_nothing_is_given_up(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))
    sending.connection._heard = 90.0
    sending.submit("/a", "/b", "/c")
    sending.step(5.0)  # nothing is owed so far, however long nothing came
    sending.connection._heard = 95.0
    sending.step(5.0)
    now = 100.5
    with pytest.raises(ConnectionDropped, match=r"no answer to anything for 5\.0 s"):
        sending.step(5.0)
    assert [path for path, _ in sending.sent] == ["/a", "/b"], "the third was not sent, and is known not to be"
