"""kazoo's client, with requests that can be taken back: only `session.py` uses it.

On its own, kazoo keeps a request whose caller has given up and sends it after a reconnect, over anything written
meanwhile. It accepts any number of requests while there is no connection. A caller blocks once kazoo's wake-up socket
is full. And as requests count as pings, kazoo does not detect that a server has stopped answering while requests are
sent often. Here a request is accepted only while there is a connection, and is either *sent* (from its first byte on,
so that its outcome may be unknown) or not (it will never be executed). One lock guards the queue, so that this is
always known.

Overrides methods of kazoo's client (`_notify_pending`) and connection (`start`, `_expand_client_hosts`, `_connect`,
`_read_socket`, `_send_request`), as they are in kazoo 2.10 and 2.11.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.retry import KazooRetry

_Answer = TypeVar("_Answer")
_Answer_co = TypeVar("_Answer_co", covariant=True)

OUTSTANDING_MAX = 10_000
"""Requests without an answer, queued or sent; one more is refused."""


class Refused(Exception):
    """A request was not taken; the text says why."""


class Request(Protocol[_Answer_co]):
    """One of kazoo's requests (`kazoo.protocol.serialization`)."""

    def serialize(self) -> bytearray: ...

    def deserialize(self, bytes: bytes, offset: int, /) -> _Answer_co: ...


class Pending(AsyncResult, Generic[_Answer]):
    """An answer to come. `sent`: the request may have been executed, whatever `answer` raises."""

    def __init__(self, handler: SequentialThreadingHandler) -> None:
        super().__init__(handler)
        self.sent = False

    def answer(self, seconds: float) -> _Answer:
        """Wait for it. Raises KazooTimeoutError, or what became of the request."""
        answer: _Answer = self.get(timeout=seconds)
        return answer


class Client(KazooClient):
    """A `KazooClient` for `submit` and `take_back`. Of its other calls only start, stop and close are to be used."""

    _connection: _Connection

    def __init__(self, hosts: str, timeout: float, connection_retry: KazooRetry) -> None:
        self.lock = Lock()  # guards _queue and _pending, and what is appended to them against the loss of a connection
        super().__init__(hosts=hosts, timeout=timeout, connection_retry=connection_retry)
        self._connection = _Connection(self, self._conn_retry.copy(), logger=self.logger)

    @property
    def unknown_hosts(self) -> tuple[str, ...]:
        """Of the hosts, those that had no address when a connection was last tried."""
        return self._connection.unknown_hosts

    def submit(self, request: Request[_Answer]) -> Pending[_Answer]:
        """Have a request sent after those before it. Raises Refused: there is no connection, or too many wait."""
        pending: Pending[_Answer] = Pending(self.handler)
        with self.lock:
            if not self._live.is_set():
                raise Refused("there is no connection")
            if len(self._queue) + len(self._pending) >= OUTSTANDING_MAX:
                raise Refused(f"{OUTSTANDING_MAX} requests wait for an answer")
            self._queue.append((request, pending))
            if len(self._queue) == 1:
                self._connection.wake()
        return pending

    def take_back(self, pending: Pending[Any]) -> bool:
        """Give a request up; whether it will surely never be executed, because it was not sent."""
        with self.lock:
            if pending.sent:
                return False
            for index, (_, queued) in enumerate(self._queue):
                if queued is pending:
                    del self._queue[index]
                    break
            return True

    def wait_connected(self, seconds: float) -> bool:
        """Whether there is a connection, or is one within that time."""
        return self._live.wait(seconds)

    def _notify_pending(self, state: str) -> None:
        """The connection is gone, and `_live` cleared: fail everything. Nothing is taken any more, so nothing stays."""
        with self.lock:
            super()._notify_pending(state)


class _Connection(ConnectionHandler):
    """Sends what is queued, one request a call, in kazoo's own thread."""

    client: Client
    _xid: int
    _heard = 0.0
    unknown_hosts: tuple[str, ...] = ()

    def start(self) -> None:
        super().start()
        self._read_sock.setblocking(False)
        self._write_sock.setblocking(False)

    def wake(self) -> None:
        """Have `_send_request` called. What is in the socket says that the queue is not empty, not how long it is."""
        try:
            self._write_sock.send(b"\0")
        except BlockingIOError:
            pass  # it is full of wake-ups

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        found = super()._expand_client_hosts()
        known = {host for host, _, _ in found}
        self.unknown_hosts = tuple(host for host, _ in self.client.hosts if host.strip() not in known)
        return found

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        timeouts = super()._connect(host, hostip, port)
        self._heard = time.monotonic()
        return timeouts

    def _read_socket(self, read_timeout: float) -> object:
        response = super()._read_socket(read_timeout)
        self._heard = time.monotonic()
        return response

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        client = self.client
        if client._pending and time.monotonic() - self._heard > read_timeout:
            raise ConnectionDropped(f"no answer to anything for {read_timeout:.1f} s")
        request = None
        with client.lock:
            if client._queue:
                request, pending = client._queue.popleft()
                self._xid = (self._xid % 2147483647) + 1
                xid = self._xid
                if pending is not None:
                    pending.sent = True
                client._pending.append((request, pending, xid))
            if not client._queue:
                self._clear_wakes()
        if request is not None:
            self._submit(request, connect_timeout, xid)

    def _clear_wakes(self) -> None:
        """Lock held. `stop` appends and wakes without it: hence the second look."""
        try:
            while self._read_sock.recv(4096):
                pass
        except OSError:
            pass
        if self.client._queue:
            self.wake()
