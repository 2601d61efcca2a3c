"""The network between the processes of a cluster, which can fail between some of them only: a proxy before each port.

The system says which process has the other end of a connection, so a link can fail for one broker and not for another,
nor for clients, although all connect to the same address.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.proxy import Proxy, shut_down

Origin = Callable[[int], str]
"""Who connects from this port of the machine."""


@dataclass
class Weather:
    """How a link is for connections from one origin.

    Attributes:
        is_cut: connections end at the next byte, new ones too.
        holds: of requests and answers, those that do not arrive until the link is well again.
        delay_s: that each piece takes longer.
        loses: what is asked arrives; instead of an answer the connection is cut.
    """

    is_cut: bool = False
    holds: frozenset[str] = frozenset()
    delay_s: float = 0.0
    loses: bool = False


WELL = Weather()
REQUESTS, ANSWERS = "requests", "answers"


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    origin: str
    ended: int = 0  # of its two directions


class Link(Proxy):
    """Before a server's port.

    Args:
        origin: who connects; None: it makes no difference, all are "".
    """

    def __init__(self, port: int, listens_at: tuple[str, int] = ("127.0.0.1", 0), origin: Origin | None = None) -> None:
        self._origin = origin
        self._weather: dict[str, Weather] = {}
        self._changed = threading.Condition()  # guards what is above and below
        self._connections: dict[socket.socket, _Connection] = {}  # by both sockets
        self._is_closed = False
        self._here = threading.local()  # the connection that a thread forwards
        super().__init__(port, listens_at)

    def set(self, weather: Weather, *origins: str) -> None:
        """From now on the link is like this for connections from these origins; no names: for all."""
        with self._changed:
            for origin in origins or ("",):
                self._weather[origin] = weather
            cut = [connection for connection in self._connections.values() if self._of(connection).is_cut]
            self._changed.notify_all()
        for connection in cut:
            shut_down(connection.client, connection.server)

    def clear(self) -> None:
        """The link is well again: what was held back arrives."""
        with self._changed:
            self._weather.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._weather.clear()
            self._changed.notify_all()
        super().close()

    def _of(self, connection: _Connection) -> Weather:
        return self._weather.get(connection.origin, self._weather.get("", WELL))

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        connection = self._connection(*((target, source) if answers else (source, target)))
        self._here.connection = connection
        super()._pump(source, target, answers)
        with self._changed:
            connection.ended += 1
            is_over = connection.ended == 2
            if is_over:
                for each in (source, target):
                    self._connections.pop(each, None)
        if is_over:  # a run makes thousands of connections
            with self._lock:
                self._sockets -= {source, target}
            source.close()
            target.close()

    def _connection(self, client: socket.socket, server: socket.socket) -> _Connection:
        origin = self._origin_of(client)  # without the lock: it takes some milliseconds
        with self._changed:
            found = self._connections.get(client)
            if found is None:
                found = self._connections[client] = self._connections[server] = _Connection(client, server, origin)
            return found

    def _origin_of(self, client: socket.socket) -> str:
        try:
            return "" if self._origin is None else self._origin(client.getpeername()[1])
        except OSError:  # it has ended already
            return ""

    def _ended(self) -> None:
        """While anything is held back, the other side does not learn of the end either."""
        with self._changed:
            while self._of(self._here.connection).holds and not self._is_closed:
                self._changed.wait()

    def _forward(self, data: bytes, target: socket.socket, answers: bool, is_first: bool) -> bool:
        way, connection = (ANSWERS if answers else REQUESTS), self._here.connection
        with self._changed:
            weather = self._of(connection)
            if weather.delay_s:
                self._changed.wait(weather.delay_s)
            while way in (weather := self._of(connection)).holds and not self._is_closed:
                self._changed.wait()
        if weather.is_cut or (answers and weather.loses):
            return False
        return super()._forward(data, target, answers, is_first)


def owner_of(port: int, pids: Iterable[int]) -> int | None:
    """Which of these processes has a connection from this port of the machine; None: none of them."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].partition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if str(path.readlink()) in inodes:
                    return pid
            except OSError:  # closed meanwhile
                pass
    return None
