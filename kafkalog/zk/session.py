"""A session with ZooKeeper. Every call ends within a bounded time. Only this module and `client.py` import kazoo.

Errors of calls:

- `ZooKeeperUnreachable`, with the address: ZooKeeper did not answer. It is unknown whether a requested write was
  executed or will be. So a write names the version that it replaces, or writes the same content whenever it is
  executed.
- `ZooKeeperNotAsked`: the request was not sent, because there was no connection or its time was over. It is never
  executed.
- `TooLargeForZooKeeper`: the request is larger than `REQUEST_BYTES_MAX` and was not sent.
- `NoNode`, `NodeExists`, `BadVersion`, `NotEmpty`: outcomes on which callers decide.

Answers come in the order of the requests, so a read sees every earlier write of this session. This module knows no path
and no content. Paths are below the chroot.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from kazoo.client import KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.exceptions import ConnectionLoss as ConnectionLossError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol import serialization as requests
from kazoo.protocol.states import WatchedEvent, ZnodeStat
from kazoo.retry import KazooRetry
from kazoo.security import OPEN_ACL_UNSAFE

from kafkalog.errors import InvalidSetting, TooLargeForZooKeeper, ZooKeeperNotAsked, ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import paths
from kafkalog.zk.client import Client, Pending, Refused, Request

log = get_logger(__name__)

_Answer = TypeVar("_Answer")

NoNode = NoNodeError
NodeExists = NodeExistsError
BadVersion = BadVersionError
NotEmpty = NotEmptyError

ANY_VERSION = -1
"""Of a znode, in a write."""

MULTI_MAX = 500
"""Maximum number of operations in one multi: 500 stay far below ZooKeeper's limit of 1 MB for a packet."""

REQUEST_BYTES_MAX = (1 << 20) - 1 - 1024
"""Maximum size of one request. If a request is larger than jute.maxbuffer (by default 1 MiB less a byte), ZooKeeper
closes the connection, and all other requests in flight fail with it. The 1024 bytes are reserved, because a follower
adds some bytes when it forwards a request to its leader."""

_CONNECTION_LOST = (ConnectionLossError, ConnectionClosedError, SessionExpiredError)
_EPHEMERAL = 1
_PARENT_ATTEMPTS = 3
_WAIT_TOLD_SECONDS = 2.0
_HEADER_BYTES = 8
_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[^\s:,/\[\]]+):(\d{1,5})$")


class Address(NamedTuple):
    """The address of ZooKeeper: `hosts` as host:port,host:port, and the cluster's `chroot`."""

    hosts: str
    chroot: str


def parse_connect(text: str) -> Address:
    """Parse a `zookeeper.connect` string. The default chroot is /kafkalog. Raises InvalidSetting."""
    hosts, _, chroot = text.partition("/")
    for host in hosts.split(","):
        match = _ADDRESS.match(host.strip())
        if not match or not 0 < int(match.group(2)) < 65536:
            raise InvalidSetting(name="zookeeper.connect", value=text, reason=f"'{host}' is not host:port")
    if "," in chroot:
        reason = f"give the chroot once, after the last host: {_with_one_chroot(text)}"
        raise InvalidSetting(name="zookeeper.connect", value=text, reason=reason)
    chroot = "/" + chroot.strip("/") if chroot.strip("/") else paths.DEFAULT_CHROOT
    if "//" in chroot:
        raise InvalidSetting(name="zookeeper.connect", value=text, reason=f"chroot '{chroot}' has an empty name")
    return Address(",".join(host.strip() for host in hosts.split(",")), chroot)


def _with_one_chroot(text: str) -> str:
    """Correct h1:2181/a,h2:2181/a to h1:2181,h2:2181/a."""
    parts = [part.strip().partition("/") for part in text.split(",")]
    chroot = next(filter(None, (chroot.strip("/") for _, _, chroot in parts)), "")
    return ",".join(host for host, _, _ in parts if host) + "/" + chroot


class Create(NamedTuple):
    """An operation of a multi: create a znode."""

    path: str
    value: bytes = b""
    ephemeral: bool = False


class Set(NamedTuple):
    """An operation of a multi: write a znode that has the given version. Version -1 matches any version."""

    path: str
    value: bytes
    version: int = -1


class Delete(NamedTuple):
    """An operation of a multi: delete a znode that has the given version. Version -1 matches any version."""

    path: str
    version: int = -1


class Check(NamedTuple):
    """An operation of a multi: make the multi fail unless a znode has the given version."""

    path: str
    version: int


Operation = Create | Set | Delete | Check
Watch = Callable[[str], None]
"""Called once, on ZooKeeper's thread, with the path that changed; it must not block."""


class _Caller(threading.local):
    """State of the calling thread.

    Attributes:
        patience_seconds: how long a request waits for a connection before it is refused.
        is_waiting: returns whether somebody still waits for the results; None if that is not known.
    """

    patience_seconds = 0.0
    is_waiting: Callable[[], bool] | None = None


class ZooKeeperSession:
    """A session with ZooKeeper that reconnects by itself. Without a connection, requests are refused at once (but see
    `patient`). Thread-safe.

    Args:
        connect: host:port,host:port with an optional /chroot.
        session_timeout_ms: the server deletes the session's ephemeral znodes after this long without contact.
        connection_timeout_ms: how long `start` waits for a connection.
        request_timeout_ms: how long a request waits for its answer.
    """

    def __init__(
        self,
        connect: str,
        *,
        session_timeout_ms: int = 10_000,
        connection_timeout_ms: int = 15_000,
        request_timeout_ms: int = 8_000,
    ) -> None:
        self.address = parse_connect(connect)
        self._connection_timeout = connection_timeout_ms / 1000
        self._request_timeout = request_timeout_ms / 1000
        self._watchers: dict[Watch, Callable[[WatchedEvent], None]] = {}
        self._on_state: list[Callable[[bool, bool], None]] = []
        self._lock = threading.Lock()  # guards _has_session
        self._has_session = False
        self._caller = _Caller()
        self._client = Client(
            hosts=self.address.hosts,
            timeout=(session_timeout_ms + 0.5) / 1000,  # kazoo's cuts off what is less than a millisecond
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0),
        )
        self._client.add_listener(self._state_changed)

    def start(self) -> None:
        """Connect, and create the chroot if it is missing. Raises ZooKeeperUnreachable."""
        try:
            self._client.start_async()
            self._await_connection()
            self._ensure(self.address.chroot)
            self._client.chroot = self.address.chroot
        except ZooKeeperUnreachable:
            self.close()
            raise

    def _await_connection(self) -> None:
        """Wait for the first connection; a long wait is logged. Raises ZooKeeperUnreachable."""
        told = min(_WAIT_TOLD_SECONDS, self._connection_timeout)
        if self._client.wait_connected(told):
            return
        if (left := self._connection_timeout - told) > 0:
            reason = self._client.why_unconnected
            log.warning("zookeeper_awaited", address=self.address.hosts, reason=reason, given_up_in_s=round(left))
            if self._client.wait_connected(left):
                return
        reason = f"no connection within {self._connection_timeout:g} s: {self._client.why_unconnected}"
        error = ZooKeeperUnreachable(address=self.address.hosts, reason=reason)
        error.add_note("start ZooKeeper, or correct zookeeper.connect")
        raise error

    def close(self) -> None:
        """End the session. Its ephemeral znodes are deleted at once. Safe to call twice."""
        self._client.remove_listener(self._state_changed)
        try:
            self._client.stop()
        finally:
            self._client.close()

    def on_state(self, callback: Callable[[bool, bool], None]) -> None:
        """Register `callback(connected, session_is_new)`. It is called at every change of the connection, on kazoo's
        thread, and must not block. The session is new at the first connection, and after the last one was lost.

        Watches are lost with the connection. After a reconnect, read and watch again.
        """
        self._on_state.append(callback)

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def is_kept(self) -> bool:
        """Whether ZooKeeper has surely not ended the session yet. By this process's own clock, so it is true of no
        process that was suspended for longer than the session's timeout."""
        return time.monotonic() < self._client.kept_until

    @property
    def session_id(self) -> int:
        """The id of the ZooKeeper session, which owns its ephemeral znodes; 0 before the first connection."""
        client_id = self._client.client_id
        return client_id[0] if client_id else 0

    def _state_changed(self, state: str) -> None:
        with self._lock:
            if state == KazooState.LOST:
                self._has_session = False
            session_is_new = state == KazooState.CONNECTED and not self._has_session
            if state == KazooState.CONNECTED:
                self._has_session = True
        if state == KazooState.CONNECTED:
            log.info("zookeeper_connected", address=self.address.hosts, session_is_new=session_is_new)
        else:
            log.warning("zookeeper_disconnected", address=self.address.hosts, session_lost=state == KazooState.LOST)
        for callback in self._on_state:
            callback(state == KazooState.CONNECTED, session_is_new)

    # --- the caller ----------------------------------------------------------------------------------------------

    @contextmanager
    def patient(self) -> Iterator[None]:
        """During the `with` block, a request of this thread waits for a connection if there is none, up to the
        connection timeout. For threads that have nothing else to do."""
        before, self._caller.patience_seconds = self._caller.patience_seconds, self._connection_timeout
        try:
            yield
        finally:
            self._caller.patience_seconds = before

    @contextmanager
    def on_behalf_of(self, is_waiting: Callable[[], bool]) -> Iterator[None]:
        """During the `with` block, a request of this thread is sent only while `is_waiting` returns true: while its
        requester still waits for the result. Otherwise it raises ZooKeeperNotAsked."""
        before, self._caller.is_waiting = self._caller.is_waiting, is_waiting
        try:
            yield
        finally:
            self._caller.is_waiting = before

    # --- calls ---------------------------------------------------------------------------------------------------

    def _send(self, request: Request[_Answer]) -> Pending[_Answer]:
        """Queue a request. Raises ZooKeeperNotAsked, TooLargeForZooKeeper."""
        size = len(request.serialize()) + _HEADER_BYTES
        if size > REQUEST_BYTES_MAX:
            raise TooLargeForZooKeeper(path=_path_of(request), size=size, limit=REQUEST_BYTES_MAX)
        caller = self._caller
        if caller.patience_seconds:
            self._client.wait_connected(caller.patience_seconds)
        if caller.is_waiting is not None and not caller.is_waiting():
            raise self._not_asked("the caller no longer waits for the answer")
        try:
            return self._client.submit(request)
        except Refused as error:
            raise self._not_asked(str(error)) from None

    def _answer(self, pending: Pending[_Answer]) -> _Answer:
        """Wait for an answer. Raises ZooKeeperNotAsked, ZooKeeperUnreachable, or ZooKeeper's error for the request."""
        try:
            return pending.answer(self._request_timeout)
        except KazooTimeoutError:
            if self._client.take_back(pending):
                raise self._not_asked("it accepts no requests") from None
            raise ZooKeeperUnreachable(address=self.address.hosts, reason="no answer in time") from None
        except _CONNECTION_LOST as error:
            expired = isinstance(error, SessionExpiredError)
            reason = "the session has expired" if expired else "the connection was lost"
            if not pending.sent:
                raise self._not_asked(reason) from None
            raise ZooKeeperUnreachable(address=self.address.hosts, reason=reason) from None

    def _not_asked(self, reason: str) -> ZooKeeperNotAsked:
        return ZooKeeperNotAsked(address=self.address.hosts, reason=reason)

    def _call(self, request: Request[_Answer]) -> _Answer:
        return self._answer(self._send(request))

    def _call_all(self, wanted: Sequence[Request[_Answer]]) -> list[_Answer | None]:
        """The answers of many requests, up to 500 of them in flight at once. The answer is None if the znode does not
        exist or has another version."""
        answers: list[_Answer | None] = []
        for start in range(0, len(wanted), MULTI_MAX):
            sent: list[Pending[_Answer]] = []
            try:
                sent.extend(self._send(request) for request in wanted[start : start + MULTI_MAX])
                answers += [self._found(pending) for pending in sent]
            except BaseException:
                for pending in sent:
                    self._client.take_back(pending)
                raise
        return answers

    def _found(self, pending: Pending[_Answer]) -> _Answer | None:
        try:
            return self._answer(pending)
        except (NoNode, BadVersion):
            return None

    def _full(self, path: str) -> str:
        return (self._client.chroot + path).rstrip("/") or "/"

    def _watcher(self, watch: Watch | None) -> Callable[[WatchedEvent], None] | None:
        """The function to give kazoo for a watch: always the same one, because kazoo keeps a set of functions for each
        path, and repeated reads must not add to it."""
        if watch is None:
            return None

        def changed(event: WatchedEvent) -> None:
            if event.path:  # an event without a path is a change of the session's state, which on_state reports
                watch(event.path)

        return self._watchers.setdefault(watch, changed)

    def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, ZnodeStat]:
        """The content and stat of a znode. Raises NoNode."""
        return self._call(requests.GetData(self._full(path), self._watcher(watch)))

    def get_many(
        self, wanted: Sequence[str], watch: Watch | None = None, *, watch_missing: bool = True
    ) -> list[tuple[bytes, ZnodeStat] | None]:
        """The contents and stats of many znodes, requested at once; None for a znode that does not exist. `watch` is
        also called when such a znode is created, unless `watch_missing` is false."""
        watcher = self._watcher(watch)
        found = self._call_all([requests.GetData(self._full(path), watcher) for path in wanted])
        if watcher is None or not watch_missing:
            return found
        for index, path in enumerate(wanted):
            if found[index] is None and self._call(requests.Exists(self._full(path), watcher)) is not None:
                [found[index]] = self._call_all([requests.GetData(self._full(path), watcher)])
        return found

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """The names of a znode's children. Raises NoNode."""
        return self._call(requests.GetChildren(self._full(path), self._watcher(watch)))

    def exists(self, path: str) -> ZnodeStat | None:
        """The stat of a znode; None if it does not exist."""
        return self._call(requests.Exists(self._full(path), None))

    def stats(self, wanted: Sequence[str]) -> list[ZnodeStat | None]:
        """The stats of many znodes; None for a znode that does not exist."""
        return self._call_all([requests.Exists(self._full(path), None) for path in wanted])

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> None:
        """Create a znode and its missing parents. Raises NodeExists."""
        request = self._creation(Create(path, value, ephemeral))
        for attempt in range(_PARENT_ATTEMPTS):
            try:
                self._call(request)
                return
            except NoNode:
                if attempt == _PARENT_ATTEMPTS - 1:
                    raise  # another client deletes the parents as fast
            self._ensure(path.rpartition("/")[0])

    def set(self, path: str, value: bytes, version: int = -1) -> ZnodeStat:
        """Write a znode that has the given version; -1 matches any version. Returns its new stat. Raises NoNode,
        BadVersion."""
        return self._call(requests.SetData(self._full(path), value, version))

    def delete(self, path: str, version: int = -1) -> None:
        """Delete a znode that has the given version; -1 matches any version. Raises NoNode, BadVersion, NotEmpty."""
        self._call(requests.Delete(self._full(path), version))

    def delete_many(self, wanted: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete znodes, given as (path, version), each independently of the others. Returns for each whether it was
        deleted. Raises NotEmpty."""
        answers = self._call_all([requests.Delete(self._full(path), version) for path, version in wanted])
        return [answer is not None for answer in answers]

    def ensure(self, wanted: Iterable[str]) -> None:
        """Create those znodes that are missing, and their missing parents."""
        wanted = list(wanted)
        for path, stat in zip(wanted, self.stats(wanted), strict=True):
            if stat is None:
                self._ensure(path)

    def _ensure(self, path: str) -> None:
        for end in [index for index, letter in enumerate(path) if letter == "/" and index] + [len(path)]:
            try:
                self._call(self._creation(Create(path[:end])))
            except NodeExists:
                pass

    def _creation(self, operation: Create) -> requests.Create:
        flags = _EPHEMERAL if operation.ephemeral else 0
        return requests.Create(self._full(operation.path), operation.value, OPEN_ACL_UNSAFE, flags)

    def multi(self, operations: Sequence[Operation]) -> None:
        """Execute all operations or none. Raises the first failure: NoNode, NodeExists, BadVersion, NotEmpty."""
        parts: list[requests.Create | requests.SetData | requests.Delete | requests.CheckVersion] = []
        for operation in operations:
            if isinstance(operation, Create):
                parts.append(self._creation(operation))
            elif isinstance(operation, Set):
                parts.append(requests.SetData(self._full(operation.path), operation.value, operation.version))
            elif isinstance(operation, Delete):
                parts.append(requests.Delete(self._full(operation.path), operation.version))
            else:
                parts.append(requests.CheckVersion(self._full(operation.path), operation.version))
        for outcome in self._call(requests.Transaction(parts)):
            if isinstance(outcome, Exception) and not isinstance(outcome, RolledBackError | RuntimeInconsistency):
                raise outcome


def _path_of(request: Any) -> str:
    """The znode of a request; of a multi, the znode of its largest operation."""
    if isinstance(request, requests.Transaction):
        return _path_of(max(request.operations, key=lambda part: len(part.serialize())))
    return str(request.path)
