"""kazoo's client, with requests that can be cancelled. Only `session.py` uses it.

Problems of kazoo alone:

- It keeps a request whose caller has given up, and sends it after a reconnect. Such a request may overwrite later
  writes.
- It accepts any number of requests while there is no connection.
- A caller blocks once kazoo's wake-up socket is full.
- It counts requests as pings. So it does not detect that a server has stopped answering while requests are sent often.

Here a request is accepted only while there is a connection. It is either *sent* (from its first byte on), and its
outcome may be unknown; or it is not sent, and will never be executed. One lock guards the queue, so it is always known
which.

This module overrides methods of kazoo's client (`_notify_pending`) and connection (`start`, `_expand_client_hosts`,
`_connect`, `_read_socket`, `_send_ping`, `_send_request`), as they are in kazoo 2.10 and 2.11.
"""

from __future__ import annotations

import math
import time
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import AsyncResult, KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.retry import KazooRetry

from kafkalog.events import get_logger

log = get_logger(__name__)

_Answer = TypeVar("_Answer")
_Answer_co = TypeVar("_Answer_co", covariant=True)

OUTSTANDING_MAX = 10_000
"""Maximum number of requests without an answer, queued or sent. A further request is refused."""
_SILENT = "no answer yet"


class Refused(Exception):
    """A request was not accepted. The text is the reason."""


class Request(Protocol[_Answer_co]):
    """One of kazoo's requests (`kazoo.protocol.serialization`)."""

    def serialize(self) -> bytearray: ...

    def deserialize(self, bytes: bytes, offset: int, /) -> _Answer_co: ...


class Pending(AsyncResult, Generic[_Answer]):
    """The answer of an accepted request.

    Attributes:
        sent: the request has been sent and may have been executed, whatever `answer` raises.
        sent_at: when, by the monotonic clock.
    """

    def __init__(self, handler: SequentialThreadingHandler) -> None:
        super().__init__(handler)
        self.sent = False
        self.sent_at = -math.inf

    def answer(self, seconds: float) -> _Answer:
        """Wait for the answer. Raises KazooTimeoutError, or the error that ended the request."""
        answer: _Answer = self.get(timeout=seconds)
        return answer


class Client(KazooClient):
    """A `KazooClient` with `submit` and `take_back`. Send requests only with `submit`: KazooClient's own methods for
    requests do not take the lock."""

    _connection: _Connection

    def __init__(self, hosts: str, timeout: float, connection_retry: KazooRetry) -> None:
        self.lock = Lock()  # guards _queue and _pending: nothing is added while a lost connection fails all requests
        super().__init__(hosts=hosts, timeout=timeout, connection_retry=connection_retry)
        self._connection = _Connection(self, self._conn_retry.copy(), logger=self.logger)

    @property
    def kept_until(self) -> float:
        """Until when, by the monotonic clock, ZooKeeper has surely not ended the session: its timeout begins when the
        last request that was answered came there, which is after it was sent."""
        return self._connection.proven_at + self._connection.session_seconds

    @property
    def why_unconnected(self) -> str:
        """Why the last attempts to connect failed, as part of a sentence; for each host, if the reasons differ."""
        failures = self._connection.failures
        reasons = {f"{host}:{port}": failures.get((host, port), _SILENT) for host, port in self.hosts}
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{host}: {reason}" for host, reason in reasons.items())

    def submit(self, request: Request[_Answer]) -> Pending[_Answer]:
        """Queue a request after the earlier ones.

        Raises:
            Refused: there is no connection, or too many requests wait for an answer.
        """
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
        """Cancel a request. Returns True if it was not sent, and so will never be executed."""
        with self.lock:
            if pending.sent:
                return False
            for index, (_, queued) in enumerate(self._queue):
                if queued is pending:
                    del self._queue[index]
                    break
            return True

    def wait_connected(self, seconds: float) -> bool:
        """Wait for a connection. Returns whether there is one before the timeout."""
        return self._live.wait(seconds)

    def _notify_pending(self, state: str) -> None:
        """Fail all requests after the connection is lost. kazoo has cleared `_live` before, so `submit` accepts none
        and no request is left over."""
        with self.lock:
            super()._notify_pending(state)


def _reason(error: Exception) -> str:
    """Why an attempt to connect failed: the system's text of its error if there is one, else kazoo's."""
    cause = error.__context__
    if isinstance(error, KazooTimeoutError) or isinstance(cause, TimeoutError):
        return "timed out"
    text = (isinstance(cause, OSError) and cause.strerror) or str(error)
    return text[0].lower() + text[1:]


class _Connection(ConnectionHandler):
    """kazoo's connection. It sends the queued requests in kazoo's own thread, one for each call of `_send_request`."""

    client: Client
    _xid: int
    _heard = 0.0
    _pinged_at = -math.inf
    proven_at = -math.inf  # when the last request, or ping, was sent that has been answered
    session_seconds = 0.0

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.failures: dict[tuple[str, int], str] = {}  # of hosts, by (host, port), until a connection succeeds

    def start(self) -> None:
        super().start()
        self._read_sock.setblocking(False)
        self._write_sock.setblocking(False)

    def wake(self) -> None:
        """Make kazoo call `_send_request`. Bytes in the wake-up socket mean that the queue is not empty; their number
        has no meaning."""
        try:
            self._write_sock.send(b"\0")
        except BlockingIOError:
            pass  # the socket already has wake-ups

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        found = super()._expand_client_hosts()
        known = {host for host, _, _ in found}
        for host, port in self.client.hosts:
            if host not in known:
                self.failures[host, port] = f"the name {host} cannot be resolved"
        return found

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        began = time.monotonic()
        try:
            read_timeout, connect_timeout = super()._connect(host, hostip, port)
        except (ConnectionDropped, KazooTimeoutError) as error:
            self.failures[host, port] = _reason(error)
            raise
        self.failures = {}
        self._heard, self.proven_at = time.monotonic(), began
        granted_ms = round(read_timeout * 1.5)  # kazoo's is two thirds of the session's, in milliseconds
        asked_ms = self.client._session_timeout
        if granted_ms not in (asked_ms, round(self.session_seconds * 1000)):  # once, not at each connection
            log.warning("zookeeper_session_timeout_changed", asked_ms=asked_ms, granted_ms=granted_ms)
        self.session_seconds = granted_ms / 1000
        return read_timeout, connect_timeout

    def _read_socket(self, read_timeout: float) -> object:
        waiting, was_pinged = self.client._pending, self.ping_outstanding.is_set()
        first = waiting[0] if waiting else None
        response = super()._read_socket(read_timeout)
        self._heard = time.monotonic()
        if was_pinged and not self.ping_outstanding.is_set():
            self.proven_at = max(self.proven_at, self._pinged_at)
        if first is not None and (not waiting or waiting[0] is not first) and isinstance(first[1], Pending):
            self.proven_at = max(self.proven_at, first[1].sent_at)
        return response

    def _send_ping(self, connect_timeout: float) -> None:
        if not self.ping_outstanding.is_set():
            self._pinged_at = time.monotonic()
        super()._send_ping(connect_timeout)

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
                    pending.sent, pending.sent_at = True, time.monotonic()
                client._pending.append((request, pending, xid))
            if not client._queue:
                self._clear_wakes()
        if request is not None:
            self._submit(request, connect_timeout, xid)

    def _clear_wakes(self) -> None:
        """Empty the wake-up socket. The caller holds the lock. kazoo's `stop` queues and wakes without the lock, so the
        queue is checked again."""
        try:
            while self._read_sock.recv(4096):
                pass
        except OSError:
            pass
        if self.client._queue:
            self.wake()
