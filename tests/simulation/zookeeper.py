"""A simulated ZooKeeper behind `kafkalog/zk/session.py`: `Tree` is the server's data, `Server` has the sessions, and
`Client` stands in for kazoo's client, with the same requests.

A request takes time to the server and back; both ways keep the order. A connection that is cut leaves requests whose
outcome is unknown: of those on their way the first ones are still executed, perhaps seconds later, but before the same
session connects again. Watches fire late: the callback comes after answers that already show the change. A session
whose client is not heard of expires by the server's clock, and its client learns so when it connects again.

`test_zookeeper.py` replays random operations on this and on a real ZooKeeper.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from kazoo.client import KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol import serialization as requests
from kazoo.protocol.states import WatchedEvent, ZnodeStat

import kafkalog.zk.session as zk_session
from kafkalog.zk.client import Refused
from tests.simulation.scheduler import Event, Process, Queue, Scheduler

_PINGS_IN_TIMEOUT = 3


class Node(NamedTuple):
    """A znode. Children are the paths below."""

    data: bytes
    owner: int
    czxid: int
    mzxid: int
    version: int = 0
    cversion: int = 0


class Change(NamedTuple):
    """What a write did to a path: created, changed or deleted."""

    kind: str
    path: str


class Tree:
    """The znodes, and what each request does to them. Pure.

    Attributes:
        zxid: counts the writes.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {"/": Node(b"", 0, 0, 0)}
        self.zxid = 0

    def children(self, path: str) -> list[str]:
        return sorted(each.rpartition("/")[2] for each in self.nodes if each != "/" and _parent(each) == path)

    def stat(self, path: str) -> ZnodeStat:
        node = self._node(path)
        count = len(self.children(path))
        return ZnodeStat(
            node.czxid, node.mzxid, 0, 0, node.version, node.cversion, 0, node.owner, len(node.data), count, node.mzxid
        )

    def _node(self, path: str) -> Node:
        if path not in self.nodes:
            raise NoNodeError
        return self.nodes[path]

    def execute(self, request: Any, session: int) -> tuple[Any, list[Change]]:
        """The answer to a request, and what it changed. Raises kazoo's errors."""
        if isinstance(request, requests.GetData):
            return (self._node(request.path).data, self.stat(request.path)), []
        if isinstance(request, requests.Exists):
            return (self.stat(request.path) if request.path in self.nodes else None), []
        if isinstance(request, requests.GetChildren):
            self._node(request.path)
            return self.children(request.path), []
        self.zxid += 1
        if isinstance(request, requests.Transaction):
            return self._multi(request.operations, session)
        changes: list[Change] = []
        return self._write(request, session, changes), changes

    def _multi(self, operations: Sequence[Any], session: int) -> tuple[list[Any], list[Change]]:
        before, changes, answers = dict(self.nodes), list[Change](), list[Any]()
        for number, operation in enumerate(operations):
            try:
                answers.append(self._write(operation, session, changes))
            except KazooException as error:
                self.nodes = before
                after = len(operations) - number - 1
                rolled_back: list[Any] = [RolledBackError() for _ in range(number)]
                return [*rolled_back, error, *(RuntimeInconsistency() for _ in range(after))], []
        return answers, changes

    def _write(self, request: Any, session: int, changes: list[Change]) -> Any:
        path = request.path
        if isinstance(request, requests.Create):
            if path in self.nodes:
                raise NodeExistsError
            self._touch_parent(path)
            owner = session if request.flags & 1 else 0
            self.nodes[path] = Node(request.data, owner, self.zxid, self.zxid)
            changes.append(Change("created", path))
            return path
        node = self._node(path)
        if request.version not in (-1, node.version):
            raise BadVersionError
        if isinstance(request, requests.SetData):
            self.nodes[path] = node._replace(data=request.data, version=node.version + 1, mzxid=self.zxid)
            changes.append(Change("changed", path))
            return self.stat(path)
        if isinstance(request, requests.Delete):
            if self.children(path):
                raise NotEmptyError
            self._touch_parent(path)
            del self.nodes[path]
            changes.append(Change("deleted", path))
            return True
        assert isinstance(request, requests.CheckVersion)
        return True

    def _touch_parent(self, path: str) -> None:
        parent = _parent(path)
        node = self._node(parent)
        if node.owner:
            raise NoChildrenForEphemeralsError
        self.nodes[parent] = node._replace(cversion=node.cversion + 1)

    def end_session(self, session: int) -> list[Change]:
        """Delete the session's ephemeral znodes."""
        self.zxid += 1
        changes: list[Change] = []
        for path in [path for path, node in self.nodes.items() if node.owner == session]:
            self._write(requests.Delete(path, -1), 0, changes)
        return changes


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


class _Session:
    def __init__(self, number: int, process: Process, timeout: float, heard_at: float) -> None:
        self.number = number
        self.process = process
        self.timeout = timeout
        self.heard_at = heard_at
        self.connection: _Connection | None = None


class Server:
    """The server, and the network to it.

    Attributes:
        cut_until: by process, until when it does not reach the server.
        slow_until: by process, until when its requests are slow.
        on_write: called with each path that was written and its data; None: it was deleted.
        late_writes: how many were executed after their connection was cut.
    """

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self.scheduler = scheduler
        self.chance = chance
        self.tree = Tree()
        self.cut_until: dict[str, float] = {}
        self.slow_until: dict[str, float] = {}
        self.on_write: Callable[[str, bytes | None], None] = lambda path, data: None
        self.late_writes = 0
        self._sessions: dict[int, _Session] = {}
        self._next_session = 100
        self._connections: list[_Connection] = []

    def is_reached_by(self, process: Process) -> bool:
        now = self.scheduler.now
        return not process.is_dead and self.cut_until.get(process.name, 0.0) <= now and process.frozen_until <= now

    def delay(self, process: Process) -> float:
        """A way in one direction."""
        seconds = 0.0002 + self.chance.expovariate(2000.0)
        if self.slow_until.get(process.name, 0.0) > self.scheduler.now and self.chance.random() < 0.3:
            seconds += self.chance.random() * 2.0
        return seconds

    def cut(self, process: Process, seconds: float) -> None:
        """Cut a process off for so long."""
        self.cut_until[process.name] = self.scheduler.now + seconds
        self.drop(process)

    def drop(self, process: Process) -> None:
        """Cut the connections of a process, which may connect again at once."""
        for connection in [each for each in self._connections if each.process is process]:
            connection.cut()

    def expire(self, process: Process) -> None:
        """End the sessions of a process, as if they had not been heard of for long."""
        for session in [each for each in self._sessions.values() if each.process is process]:
            self._end(session)

    def connect(self, client: Client, session_number: int) -> _Connection | None:
        """Connect with a session, or with a new one (0); None: it has expired."""
        session = self._sessions.get(session_number)
        if session_number and session is None:
            return None
        if session is None:
            self._next_session += 1
            session = self._sessions[self._next_session] = _Session(
                self._next_session, client.process, client.timeout, self.scheduler.now
            )
            self._watch_over(session)
        if session.connection is not None:
            session.connection.flush()
            session.connection.cut()
        session.heard_at = self.scheduler.now
        session.connection = connection = _Connection(self, client, session)
        self._connections.append(connection)
        return connection

    def forget(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _watch_over(self, session: _Session) -> None:
        """Expire it when it was not heard of for its timeout; its client pings while it is connected."""
        if session.number not in self._sessions:
            return
        connection = session.connection
        if connection is not None and connection.is_up and self.is_reached_by(connection.process):
            session.heard_at = self.scheduler.now
        if self.scheduler.now - session.heard_at >= session.timeout:
            self._end(session)
        else:
            self.scheduler.after(session.timeout / _PINGS_IN_TIMEOUT, lambda: self._watch_over(session), "zk/session")

    def _end(self, session: _Session) -> None:
        if self._sessions.pop(session.number, None) is not None:
            self.changed(self.tree.end_session(session.number))
            if session.connection is not None:
                session.connection.cut(executes=False)

    def close_session(self, session: _Session) -> None:
        self._end(session)

    def is_alive(self, session: _Session) -> bool:
        return session.number in self._sessions

    def changed(self, changes: list[Change]) -> None:
        """Fire the watches of what was changed."""
        for kind, path in changes:
            node = self.tree.nodes.get(path)
            self.on_write(path, None if node is None else node.data)
            for connection in list(self._connections):
                connection.changed(kind, path)


@contextmanager
def sessions(server: Server) -> Iterator[None]:
    """Within the `with` block a `ZooKeeperSession` that is made is one with this server."""
    with mock.patch.object(zk_session, "Client", partial(Client, server)):
        yield


class Pending:
    """As `kafkalog.zk.client.Pending`."""

    def __init__(self, scheduler: Scheduler, request: Any) -> None:
        self.request = request
        self.sent = False
        self._done = Event(scheduler)
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self._done.is_set():
            self._value, self._error = value, error
            self._done.set()

    def answer(self, seconds: float) -> Any:
        if not self._done.wait(seconds):
            raise KazooTimeoutError("no answer")
        if self._error is not None:
            raise self._error
        return self._value


class _Connection:
    """A client's connection. Both ways keep the order."""

    def __init__(self, server: Server, client: Client, session: _Session) -> None:
        self._server = server
        self.client = client
        self.process = client.process
        self.session = session
        self.is_up = True
        self._coming: deque[Pending] = deque()  # not executed yet
        self._unanswered: deque[Pending] = deque()
        self._arrives_at = self._answered_at = 0.0
        self._watched: set[tuple[str, str]] = set()  # at the server: what, path

    def send(self, pending: Pending) -> None:
        pending.sent = True
        self._coming.append(pending)
        self._unanswered.append(pending)
        self._arrives_at = self._later(self._arrives_at)
        self._after(self._arrives_at, lambda: self._arrived(pending), "request")

    def _later(self, than: float) -> float:
        return max(than, self._server.scheduler.now + self._server.delay(self.process))

    def _after(self, at: float, call: Callable[[], object], what: str) -> None:
        scheduler = self._server.scheduler
        scheduler.after(at - scheduler.now, call, f"zk/{self.process.name}/{what}")

    def _arrived(self, pending: Pending) -> None:
        if not self._coming or self._coming[0] is not pending:
            return  # executed by `flush`, or lost
        self._coming.popleft()
        self._execute(pending)

    def flush(self) -> None:
        """Execute what is still on its way: the session has connected again."""
        while self._coming:
            self._execute(self._coming.popleft())

    def _execute(self, pending: Pending) -> None:
        server, request = self._server, pending.request
        if not server.is_alive(self.session):
            return
        self.session.heard_at = server.scheduler.now
        value, error, changes = None, None, list[Change]()
        try:
            value, changes = server.tree.execute(request, self.session.number)
        except KazooException as found:
            error = found
        if self.is_up and getattr(request, "watcher", None) is not None:
            what = "children" if isinstance(request, requests.GetChildren) else "data"
            if error is None:
                self._watched.add((what, request.path))
                self.client.watch(what, request.path, request.watcher)
        if self.is_up:
            self._answered_at = self._later(self._answered_at)
            self._after(self._answered_at, lambda: self._answer(pending, value, error), "answer")
        else:
            server.late_writes += bool(changes)
        server.changed(changes)

    def _answer(self, pending: Pending, value: Any, error: BaseException | None) -> None:
        if self.is_up and self._unanswered and self._unanswered[0] is pending:
            self._unanswered.popleft()
            pending.set(value, error)

    def changed(self, kind: str, path: str) -> None:
        fired = {("data", path)} if kind != "deleted" else {("data", path), ("children", path)}
        if kind != "changed":
            fired.add(("children", _parent(path)))
        for what, at in sorted(fired & self._watched):
            self._watched.discard((what, at))
            self._answered_at = self._later(self._answered_at)
            self._after(self._answered_at, lambda what=what, at=at: self._fire(what, at), "watch")  # type: ignore[misc]

    def _fire(self, what: str, path: str) -> None:
        if self.is_up:
            self.client.fire(what, path)

    def cut(self, executes: bool = True) -> None:
        """Cut it. Of the requests on their way some are still executed, later."""
        if not self.is_up:
            return
        self.is_up = False
        self._server.forget(self)
        kept = self._server.chance.randint(0, len(self._coming)) if executes else 0
        coming = list(self._coming)[:kept]
        self._coming = deque(coming)
        at = self._server.scheduler.now
        for pending in coming:
            at += self._server.chance.random() * 3.0
            self._after(at, lambda pending=pending: self._arrived(pending), "late request")  # type: ignore[misc]
        self.client.lost(self)

    def fail_all(self, error: type[BaseException]) -> None:
        while self._unanswered:
            self._unanswered.popleft().set(error=error())


class Client:
    """As `kafkalog.zk.client.Client`: made by a fiber, for its process."""

    why_unconnected = "no answer yet"

    def __init__(self, server: Server, hosts: str, timeout: float, connection_retry: object) -> None:
        self._server = server
        self._scheduler = server.scheduler
        self.process = self._scheduler.running.process
        self.timeout = timeout
        self.chroot = ""
        self.client_id: tuple[int, bytes] | None = None
        self._listeners: list[Callable[[str], object]] = []
        self._connection: _Connection | None = None
        self._watchers: dict[tuple[str, str], dict[Callable[[WatchedEvent], None], None]] = {}
        self._is_stopped = False
        self._live = Event(self._scheduler)
        self._callbacks = Queue(self._scheduler)
        self._scheduler.spawn(self.process, "zk-callbacks", self._call_back)

    # --- what the session calls --------------------------------------------------------------------------------------

    def add_listener(self, listener: Callable[[str], object]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[str], object]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def start_async(self) -> None:
        self._connect()

    def stop(self) -> None:
        self._is_stopped = True
        connection = self._connection
        if connection is not None:
            connection.flush()
            self._server.close_session(connection.session)

    def close(self) -> None:
        """Nothing is left after `stop`."""

    @property
    def connected(self) -> bool:
        return self._live.is_set()

    @property
    def kept_until(self) -> float:
        """A connection that is up has all its pings answered."""
        return self._scheduler.now + self.timeout if self.connected else 0.0

    def wait_connected(self, seconds: float) -> bool:
        return self._live.wait(seconds)

    def submit(self, request: Any) -> Pending:
        pending = Pending(self._scheduler, request)
        connection = self._connection
        if connection is None or not self._live.is_set():
            raise Refused("there is no connection")
        connection.send(pending)
        return pending

    def take_back(self, pending: Pending) -> bool:
        return not pending.sent

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._is_stopped or self.process.is_dead or self._connection is not None:
            return
        again = 0.05 + self._server.chance.random() * 0.2
        if self._server.is_reached_by(self.process):
            connection = self._server.connect(self, self.client_id[0] if self.client_id else 0)
            if connection is not None:
                self._connection = connection
                self.client_id = (connection.session.number, b"")
                self._scheduler.after(self._server.delay(self.process), lambda: self._connected(connection), "zk/up")
                return
            self.client_id = None
            self._state_changed(KazooState.LOST)
        self._scheduler.after(again, self._connect, "zk/connect")

    def _connected(self, connection: _Connection) -> None:
        if self._connection is connection and connection.is_up:
            self._live.set()
            self._state_changed(KazooState.CONNECTED)

    def lost(self, connection: _Connection) -> None:
        """The connection was cut."""
        if self._connection is not connection:
            return
        self._connection = None
        was_live = self._live.is_set()
        self._live.clear()
        is_expired = self._is_stopped or not self._server.is_alive(connection.session)
        connection.fail_all(SessionExpiredError if is_expired else ConnectionLoss)
        self._watchers.clear()
        if self._is_stopped or self.process.is_dead:
            return
        if was_live:
            self._state_changed(KazooState.SUSPENDED)
        self._scheduler.after(0.01 + self._server.chance.random() * 0.1, self._connect, "zk/connect")

    def _state_changed(self, state: str) -> None:
        self._callbacks.put(lambda: [listener(state) for listener in list(self._listeners)])

    def watch(self, what: str, path: str, watcher: Callable[[WatchedEvent], None]) -> None:
        self._watchers.setdefault((what, path), {})[watcher] = None

    def fire(self, what: str, path: str) -> None:
        event = WatchedEvent("CHANGED", "CONNECTED", path.removeprefix(self.chroot))
        for watcher in self._watchers.pop((what, path), {}):
            self._callbacks.put(lambda watcher=watcher: watcher(event))

    def _call_back(self) -> None:
        while True:
            call = self._callbacks.get()
            if self._server.chance.random() < 0.2:  # late
                self._scheduler.sleep(self._server.chance.random() * 0.05)
            call()
