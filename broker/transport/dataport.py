"""The data port: accepts connections and gives each a thread (`connection.py`). Knows no requests.

A connection over `max.connections` gets an error frame and is closed. `stop` lets every connection complete the
requests that it has received whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable
from queue import SimpleQueue

from broker.config import BrokerSettings
from broker.ports import bound_socket
from broker.replica.host import Host
from broker.transport.connection import Connection
from broker.transport.memory_pool import MemoryPool, MemoryPools
from kafkalog.clock import Clock
from kafkalog.errors import AddressInUse, TooManyConnections
from kafkalog.events import get_logger
from kafkalog.net.local import enlarge, peer_of, socket_name
from kafkalog.net.tcp import tune
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_BACKLOG = 512
_PARSING_MAX = 8
_REFUSED_KEPT = 64
_REFUSED_SECONDS = 1.0
_RETRY_ACCEPT_MS = 200
_HELLO_MS = 50
_FOR_EACH_BROKER = 4
"""Connections beyond max.connections: a link, a scrubber's, and those of them that are about to end."""


def listen(settings: BrokerSettings) -> list[socket.socket]:
    """Listening sockets: that of the port first, then perhaps a Unix socket for clients on this machine. Raises
    AddressInUse, InvalidSetting."""
    listeners = [bound_socket(settings.host, settings.data_port, "data.port")]
    try:
        name = socket_name(settings.host, listeners[0].getsockname()[1])
        if settings.data_local_socket and name is not None and (beside := _unix_socket()) is not None:
            listeners.append(beside)
            try:
                beside.bind(name)
            except OSError:
                raise AddressInUse(address=f"Unix socket @{name[1:].decode()}", setting="data.port") from None
        for listener in listeners:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
    except BaseException:
        close_all(listeners)
        raise
    return listeners


def _unix_socket() -> socket.socket | None:
    try:
        return socket.socket(socket.AF_UNIX)
    except OSError as error:  # as where systemd's RestrictAddressFamilies leaves it out
        log.warning("unix_socket_refused", reason=error.strerror)
        return None


def close_all(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


class DataPort:
    """The server side of the data port.

    Args:
        listeners: from `listen`; closed by `stop`.
        settings: the broker's.
    """

    def __init__(self, listeners: list[socket.socket], host: Host, settings: BrokerSettings, clock: Clock) -> None:
        self._listeners = listeners
        self._host = host
        self._settings = settings
        self._clock = clock
        largest_frame = settings.request_max_bytes + frames.HEADER_LENGTH_MAX + frames.PREFIX_SIZE
        self._pools = MemoryPools(
            bodies=MemoryPool(max(settings.queued_max_request_bytes, largest_frame)),
            read_ahead=MemoryPool(settings.queued_max_request_bytes // 4),
        )
        self._parse_permits: SimpleQueue[int] = SimpleQueue()
        for permit in range(_PARSING_MAX):
            self._parse_permits.put(permit)
        self._lock = threading.Lock()  # guards _connections, _closed_counters, _refused_count
        self._connections: set[Connection] = set()
        self._closed_counters: Counter[str] = Counter()
        self._refused: deque[tuple[socket.socket, float]] = deque()  # the accept thread's own, as the next
        self._numbers = itertools.count()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._accept_all, name="dataport-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_seconds: float) -> None:
        """Accept no more connections, complete received requests, and close all connections; slow ones are cut."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        close_all(self._listeners)
        os.close(self._wake_fd)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop()
        deadline = self._clock.monotonic() + grace_seconds
        for connection in connections:
            connection.join(max(0.0, deadline - self._clock.monotonic()))
        for connection in connections:
            connection.cut()
        for connection in connections:
            connection.join(grace_seconds)

    def counters(self) -> dict[str, int]:
        """Counters since the start, and current values: by name, unit last."""
        with self._lock:
            totals = Counter(self._closed_counters)
            for connection in self._connections:
                totals.update(connection.counters())
            totals["connections"] = len(self._connections)
        totals["reserved_bytes"] = self._pools.bodies.used + self._pools.read_ahead.used
        return {f"dataport.{name}": count for name, count in sorted(totals.items())}

    # --- accepting -------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        poller = select.poll()
        for listener in self._listeners:
            poller.register(listener, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        waiting: tuple[socket.socket, str] | None = None  # accepted, but no descriptor is left for its eventfd
        while not self._stopping:
            if waiting is None:
                poller.poll(_RETRY_ACCEPT_MS if self._refused else None)
            self._let_refused_go()
            while not self._stopping:
                try:
                    if waiting is None:
                        waiting = self._accept()
                    if waiting is not None:
                        self._admit(*waiting)
                except OSError as error:  # out of file descriptors or memory: existing connections continue
                    log.warning("accept_failed", reason=error.strerror)
                    self._wait_to_retry()
                    break
                if waiting is None:
                    break
                waiting = None
        for refused, _ in self._refused:
            refused.close()
        if waiting is not None:
            waiting[0].close()

    def _accept(self) -> tuple[socket.socket, str] | None:
        """A new connection and its peer; None if there is none. The listeners take turns: a flood at one of them keeps
        nobody from the other."""
        for listener in list(self._listeners):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                continue
            self._listeners.remove(listener)
            self._listeners.append(listener)
            accepted.setblocking(False)
            if listener.family == socket.AF_UNIX:
                enlarge(accepted)
                return accepted, f"process {peer_of(accepted).process_id}"
            with contextlib.suppress(OSError):  # gone again already: its connection finds out
                tune(accepted)
            return accepted, f"{address[0]}:{address[1]}"
        return None

    def _wait_to_retry(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.poll(_RETRY_ACCEPT_MS)

    def _admit(self, accepted: socket.socket, peer: str) -> None:
        """Serve a connection, or refuse it if there are too many. There is room besides for other brokers: without it
        their replicas would leave the in-sync sets. Raises OSError if no descriptor is left for it."""
        with self._lock:
            beyond = len(self._connections) - self._settings.max_connections
        room = _FOR_EACH_BROKER * len(self._host.metadata.brokers)
        if beyond >= 0 and not (beyond < room and _is_of_replica(accepted)):
            self._refuse(accepted, peer)
            return
        connection = Connection(
            accepted,
            next(self._numbers),
            peer,
            self._host,
            self._settings,
            self._clock,
            self._pools,
            self._parse_permits,
            self._connection_ended,
        )
        with self._lock:
            self._connections.add(connection)
        try:
            connection.start()
        except RuntimeError as error:  # no more threads
            log.warning("accept_failed", reason=str(error))
            connection.dispose()

    def _connection_ended(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._closed_counters.update(connection.counters())

    def _refuse(self, accepted: socket.socket, peer: str) -> None:
        """Send a connection the error that there are too many. It is closed a moment later: a close with unread bytes
        (the client's hello) resets the connection, and the client may not get the error."""
        limit = self._settings.max_connections
        with self._lock:
            self._closed_counters["connections_refused"] += 1
        log.warning("connection_refused", peer=peer, max_connections=limit)
        header = pb.ReplyHeader(error=frames.error_to_wire(TooManyConnections(limit=limit))).SerializeToString()
        try:
            accepted.send(frames.hello() + frames.frame_start(header, 0))
            accepted.shutdown(socket.SHUT_WR)
        except OSError:
            accepted.close()
            return
        self._refused.append((accepted, self._clock.monotonic() + _REFUSED_SECONDS))
        if len(self._refused) > _REFUSED_KEPT:
            self._refused.popleft()[0].close()

    def _let_refused_go(self) -> None:
        now = self._clock.monotonic()
        while self._refused and self._refused[0][1] <= now:
            self._refused.popleft()[0].close()


def _is_of_replica(accepted: socket.socket) -> bool:
    """Whether a new connection is that of a broker that comes to copy, by its hello, which is waited for a moment. It
    is left to be read."""
    poller = select.poll()
    poller.register(accepted, select.POLLIN)
    if not poller.poll(_HELLO_MS):
        return False
    try:
        return accepted.recv(frames.HELLO_SIZE, socket.MSG_PEEK).startswith(frames.REPLICA_MAGIC)
    except OSError:
        return False
