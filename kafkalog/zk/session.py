"""A session with ZooKeeper. Every call ends within a bounded time; this module and `client.py` alone import kazoo.

If ZooKeeper does not answer, calls raise `ZooKeeperUnreachable` with its address; whether a requested write was
executed, or will be, is then unknown. So a write names the version that it replaces, or writes the same content
whenever it is executed. A request that was not sent, because there was no connection or its time was over, raises
`ZooKeeperNotAsked`: it is never executed. Outcomes that callers decide on are the exceptions `NoNode`, `NodeExists` and
`BadVersion`. Answers come in the order of the requests, so a read sees every write that this session sent before. Knows
no path and no content; paths are below the chroot.
"""

from __future__ import annotations

import re
import threading
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

MULTI_MAX = 500
"""Operations of one multi: 500 of them stay far under ZooKeeper's limit of 1 MB a packet."""

REQUEST_BYTES_MAX = (1 << 20) - 1 - 1024
"""Of one request. ZooKeeper ends the connection that sends it more than its jute.maxbuffer, 1 MiB less a byte by
default, and with it whatever else is under way; a follower adds some bytes when it hands a request to its leader."""

_CONNECTION_LOST = (ConnectionLossError, ConnectionClosedError, SessionExpiredError)
_EPHEMERAL = 1
_PARENT_ATTEMPTS = 3
_HEADER_BYTES = 8
_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[^\s:,/\[\]]+):(\d{1,5})$")


class Address(NamedTuple):
    """Where ZooKeeper is: `hosts` as host:port,host:port and the cluster's `chroot`."""

    hosts: str
    chroot: str


def parse_connect(text: str) -> Address:
    """The parts of a `zookeeper.connect` string; without a chroot it is /kafkalog. Raises InvalidSetting."""
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
    """What was meant by h1:2181/a,h2:2181/a."""
    parts = [part.strip().partition("/") for part in text.split(",")]
    return ",".join(host for host, _, _ in parts) + "/" + parts[0][2].strip("/")


class Create(NamedTuple):
    """One operation of a multi: make a znode."""

    path: str
    value: bytes = b""
    ephemeral: bool = False


class Set(NamedTuple):
    """One operation of a multi: write a znode; version -1 takes any."""

    path: str
    value: bytes
    version: int = -1


class Delete(NamedTuple):
    """One operation of a multi: remove a znode; version -1 takes any."""

    path: str
    version: int = -1


class Check(NamedTuple):
    """One operation of a multi: nothing, unless a znode has another version."""

    path: str
    version: int


Operation = Create | Set | Delete | Check
Watch = Callable[[str], None]
"""Called once, on ZooKeeper's thread, with the path that changed; it must not block."""


class _Caller(threading.local):
    """Of the thread: how long its requests wait for a connection, and whether somebody still waits for them."""

    patience_seconds = 0.0
    is_waiting: Callable[[], bool] | None = None


class ZooKeeperSession:
    """A connection to ZooKeeper that comes back by itself. While it is away, requests are refused at once.

    Args:
        connect: host:port,host:port with an optional /chroot.
        session_timeout_ms: silence after which the server drops our ephemeral znodes.
        connection_timeout_ms: how long `start` may take.
        request_timeout_ms: how long any other call may take.
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
        self._lock = threading.Lock()  # guards _expired
        self._expired = False
        self._caller = _Caller()
        self._client = Client(
            hosts=self.address.hosts,
            timeout=session_timeout_ms / 1000,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0),
        )
        self._client.add_listener(self._state_changed)

    def start(self) -> None:
        """Connect, and make the chroot. Raises ZooKeeperUnreachable."""
        try:
            self._client.start(timeout=self._connection_timeout)
            self._ensure(self.address.chroot)
            self._client.chroot = self.address.chroot
        except (KazooTimeoutError, ZooKeeperUnreachable):
            self.close()
            unknown = self._client.unknown_hosts
            names = f"; {' and '.join(unknown)} cannot be resolved" if unknown else ""
            raise ZooKeeperUnreachable(
                address=self.address.hosts, reason=f"no connection within {self._connection_timeout:g} s{names}"
            ) from None

    def close(self) -> None:
        """End the session: ephemeral znodes go at once. Safe to call twice."""
        self._client.remove_listener(self._state_changed)
        try:
            self._client.stop()
        finally:
            self._client.close()

    def on_state(self, callback: Callable[[bool, bool], None]) -> None:
        """Call `callback(connected, session_is_new)` at every change, on kazoo's thread; it must not block.

        Watches are lost with a connection: on a new one, read and watch again.
        """
        self._on_state.append(callback)

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def session_id(self) -> int:
        """The session that holds our ephemeral znodes."""
        client_id = self._client.client_id
        return client_id[0] if client_id else 0

    def _state_changed(self, state: str) -> None:
        with self._lock:
            if state == KazooState.LOST:
                self._expired = True
            session_is_new = state == KazooState.CONNECTED and self._expired
            if state == KazooState.CONNECTED:
                self._expired = False
        if state == KazooState.CONNECTED:
            log.info("zookeeper_connected", address=self.address.hosts, session_is_new=session_is_new)
        else:
            log.warning("zookeeper_disconnected", address=self.address.hosts, session_lost=state == KazooState.LOST)
        for callback in self._on_state:
            callback(state == KazooState.CONNECTED, session_is_new)

    # --- whose calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def patient(self) -> Iterator[None]:
        """For what this thread does inside: while there is no connection, a request waits for one, as long as `start`
        would, before it is sent. For who has nothing better to do."""
        before, self._caller.patience_seconds = self._caller.patience_seconds, self._connection_timeout
        try:
            yield
        finally:
            self._caller.patience_seconds = before

    @contextmanager
    def on_behalf_of(self, is_waiting: Callable[[], bool]) -> Iterator[None]:
        """For what this thread does inside: nothing is sent any more once whoever asked for it does not wait."""
        before, self._caller.is_waiting = self._caller.is_waiting, is_waiting
        try:
            yield
        finally:
            self._caller.is_waiting = before

    # --- calls ---------------------------------------------------------------------------------------------------

    def _send(self, request: Request[_Answer]) -> Pending[_Answer]:
        """Raises ZooKeeperNotAsked, TooLargeForZooKeeper."""
        size = len(request.serialize()) + _HEADER_BYTES
        if size > REQUEST_BYTES_MAX:
            raise TooLargeForZooKeeper(path=_path_of(request), size=size, limit=REQUEST_BYTES_MAX)
        caller = self._caller
        if caller.patience_seconds:
            self._client.wait_connected(caller.patience_seconds)
        if caller.is_waiting is not None and not caller.is_waiting():
            raise self._not_asked("nobody waits for the answer any more")
        try:
            return self._client.submit(request)
        except Refused as error:
            raise self._not_asked(str(error)) from None

    def _answer(self, pending: Pending[_Answer]) -> _Answer:
        try:
            return pending.answer(self._request_timeout)
        except KazooTimeoutError:
            if self._client.take_back(pending):
                raise self._not_asked("it takes no requests") from None
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
        """Answers of many requests, sent before the first answer is waited for; None where there is no znode, or it has
        another version."""
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
        """The same function for the same watch: kazoo keeps a set of them per path, so reading again adds none."""
        if watch is None:
            return None

        def changed(event: WatchedEvent) -> None:
            if event.path:  # without one it is the session's state, which on_state reports
                watch(event.path)

        return self._watchers.setdefault(watch, changed)

    def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, ZnodeStat]:
        """A znode's content and stat. Raises NoNode."""
        return self._call(requests.GetData(self._full(path), self._watcher(watch)))

    def get_many(self, wanted: Sequence[str], watch: Watch | None = None) -> list[tuple[bytes, ZnodeStat] | None]:
        """Contents of many znodes, asked for at once; None where there is none (whose making is watched too)."""
        watcher = self._watcher(watch)
        found = self._call_all([requests.GetData(self._full(path), watcher) for path in wanted])
        if watcher is None:
            return found
        for index, path in enumerate(wanted):
            if found[index] is None and self._call(requests.Exists(self._full(path), watcher)) is not None:
                [found[index]] = self._call_all([requests.GetData(self._full(path), watcher)])
        return found

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Names of a znode's children. Raises NoNode."""
        return self._call(requests.GetChildren(self._full(path), self._watcher(watch)))

    def exists(self, path: str) -> ZnodeStat | None:
        return self._call(requests.Exists(self._full(path), None))

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a znode, its parents too. Raises NodeExists."""
        request = self._creation(Create(path, value, ephemeral))
        for attempt in range(_PARENT_ATTEMPTS):
            try:
                self._call(request)
                return
            except NoNode:
                if attempt == _PARENT_ATTEMPTS - 1:
                    raise  # somebody removes them as fast
            self._ensure(path.rpartition("/")[0])

    def set(self, path: str, value: bytes, version: int = -1) -> ZnodeStat:
        """Write a znode. Raises NoNode, BadVersion."""
        return self._call(requests.SetData(self._full(path), value, version))

    def delete(self, path: str, version: int = -1) -> None:
        """Remove a znode. Raises NoNode, BadVersion, NotEmpty."""
        self._call(requests.Delete(self._full(path), version))

    def delete_many(self, wanted: Sequence[tuple[str, int]]) -> list[bool]:
        """Remove znodes that have the versions given, each for itself; which of them were removed."""
        answers = self._call_all([requests.Delete(self._full(path), version) for path, version in wanted])
        return [answer is not None for answer in answers]

    def ensure(self, wanted: Iterable[str]) -> None:
        """Make these znodes and their parents where they are missing."""
        wanted = list(wanted)
        present = self._call_all([requests.Exists(self._full(path), None) for path in wanted])
        for path, stat in zip(wanted, present, strict=True):
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
        """All of the operations or none. Raises the first failure: NoNode, NodeExists, BadVersion."""
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
    """The znode that a request writes, the largest of a multi's."""
    if isinstance(request, requests.Transaction):
        return _path_of(max(request.operations, key=lambda part: len(part.serialize())))
    return str(request.path)
