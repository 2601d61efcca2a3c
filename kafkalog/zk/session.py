"""A session with ZooKeeper: the only module that imports kazoo. Every call ends within a bounded time.

A ZooKeeper that does not answer is `ZooKeeperUnreachable`, naming its address; whether the write it was asked for
happened is then unknown. Outcomes that callers decide on are the exceptions `NoNode`, `NodeExists` and `BadVersion`.
Knows no path and no content; paths are below the chroot.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.exceptions import ConnectionLoss as ConnectionLossError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import WatchedEvent, ZnodeStat
from kazoo.retry import KazooRetry

from kafkalog.errors import InvalidSetting, ZooKeeperUnreachable
from kafkalog.log import get_logger
from kafkalog.zk import paths

log = get_logger(__name__)

NoNode = NoNodeError
NodeExists = NodeExistsError
BadVersion = BadVersionError
NotEmpty = NotEmptyError

MULTI_MAX = 500
"""Operations of one multi: 500 of them stay far under ZooKeeper's limit of 1 MB a packet."""

_UNREACHABLE = (KazooTimeoutError, ConnectionLossError, ConnectionClosedError, SessionExpiredError)
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
    chroot = "/" + chroot.strip("/") if chroot.strip("/") else paths.DEFAULT_CHROOT
    if "//" in chroot:
        raise InvalidSetting(name="zookeeper.connect", value=text, reason=f"'{chroot}' is no chroot")
    return Address(",".join(host.strip() for host in hosts.split(",")), chroot)


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


class ZooKeeperSession:
    """A connection to ZooKeeper that comes back by itself.

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
        self._client = KazooClient(
            hosts=self.address.hosts,
            timeout=session_timeout_ms / 1000,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0),
        )
        self._client.add_listener(self._state_changed)

    def start(self) -> None:
        """Connect, and make the chroot. Raises ZooKeeperUnreachable."""
        try:
            self._client.start(timeout=self._connection_timeout)
            self._call(self._client.ensure_path_async(self.address.chroot))
            self._client.chroot = self.address.chroot
        except (KazooTimeoutError, ZooKeeperUnreachable):
            self.close()
            raise ZooKeeperUnreachable(
                address=self.address.hosts, reason=f"no connection within {self._connection_timeout:g} s"
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
        return bool(self._client.connected)

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

    # --- calls ---------------------------------------------------------------------------------------------------

    def _call(self, result: Any) -> Any:
        try:
            return result.get(timeout=self._request_timeout)
        except _UNREACHABLE as error:
            raise ZooKeeperUnreachable(address=self.address.hosts, reason=_reason(error)) from None

    def _watcher(self, watch: Watch | None) -> Callable[[WatchedEvent], None] | None:
        """The same function for the same watch: kazoo keeps a set of them per path, so reading again adds none."""
        if watch is None:
            return None

        def changed(event: WatchedEvent) -> None:
            if event.path:  # without one it is the session's state, which on_state tells
                watch(event.path)

        return self._watchers.setdefault(watch, changed)

    def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, ZnodeStat]:
        """A znode's content and stat. Raises NoNode."""
        return self._call(self._client.get_async(path, watch=self._watcher(watch)))

    def get_many(self, wanted: Sequence[str], watch: Watch | None = None) -> list[tuple[bytes, ZnodeStat] | None]:
        """Contents of many znodes, asked for at once; None where there is none (whose making is watched too)."""
        watcher = self._watcher(watch)
        found = []
        for start in range(0, len(wanted), MULTI_MAX):
            results = [self._client.get_async(path, watch=watcher) for path in wanted[start : start + MULTI_MAX]]
            found += [self._found(result) for result in results]
        if watcher is None:
            return found
        for index, path in enumerate(wanted):
            if found[index] is None and self._call(self._client.exists_async(path, watch=watcher)) is not None:
                found[index] = self._found(self._client.get_async(path, watch=watcher))
        return found

    def _found(self, result: Any) -> tuple[bytes, ZnodeStat] | None:
        try:
            return self._call(result)
        except NoNode:
            return None

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Names of a znode's children. Raises NoNode."""
        return self._call(self._client.get_children_async(path, watch=self._watcher(watch)))

    def exists(self, path: str) -> ZnodeStat | None:
        return self._call(self._client.exists_async(path))

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a znode, its parents too. Raises NodeExists."""
        self._call(self._client.create_async(path, value, ephemeral=ephemeral, makepath=True))

    def set(self, path: str, value: bytes, version: int = -1) -> ZnodeStat:
        """Write a znode. Raises NoNode, BadVersion."""
        return self._call(self._client.set_async(path, value, version))

    def delete(self, path: str, version: int = -1) -> None:
        """Remove a znode. Raises NoNode, BadVersion, NotEmpty."""
        self._call(self._client.delete_async(path, version))

    def ensure(self, wanted: Iterable[str]) -> None:
        """Make these znodes and their parents where they are missing."""
        for result in [self._client.ensure_path_async(path) for path in wanted]:
            self._call(result)

    def multi(self, operations: Sequence[Operation]) -> None:
        """All of the operations or none. Raises the first failure: NoNode, NodeExists, BadVersion."""
        transaction = self._client.transaction()
        for operation in operations:
            if isinstance(operation, Create):
                transaction.create(operation.path, operation.value, ephemeral=operation.ephemeral)
            elif isinstance(operation, Set):
                transaction.set_data(operation.path, operation.value, operation.version)
            elif isinstance(operation, Delete):
                transaction.delete(operation.path, operation.version)
            else:
                transaction.check(operation.path, operation.version)
        for outcome in self._call(transaction.commit_async()):
            if isinstance(outcome, Exception) and not isinstance(outcome, RolledBackError | RuntimeInconsistency):
                raise outcome

    def delete_tree(self, path: str) -> None:
        """Remove a znode and all below it, leaves first; what is gone already is fine."""
        try:
            below = self.children(path)
        except NoNode:
            return
        for child in below:
            self.delete_tree(f"{path}/{child}")
        try:
            self.delete(path)
        except NoNode:
            pass


def _reason(error: KazooException | KazooTimeoutError) -> str:
    if isinstance(error, KazooTimeoutError):
        return "no answer in time"
    if isinstance(error, SessionExpiredError):
        return "the session has expired"
    return "the connection was lost"
