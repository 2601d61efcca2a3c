"""TCP proxies before servers of this machine: they cut connections, refuse new ones, and hold back what is sent, as a
network does that fails. `StallingProxy` holds all of it back, `AnswerLosingProxy` loses answers, `DataPortProxy` holds
back those of a broker; and a Cluster behind the latter."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kafkalog.client.cluster import BrokerInfo, Cluster
from kafkalog.net.data import DataConnection
from tests.threads import join_all


class Proxy:
    """Forwards connections to a port of this machine.

    Args:
        listens_at: its own address; any free port of this machine's by default.

    Attributes:
        port: its own.
        accepted: how many connections it has taken.
    """

    def __init__(self, port: int, listens_at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = port
        self._listener = socket.create_server(listens_at)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards what follows
        self._sockets: set[socket.socket] = set()
        self._refusing = False
        self.accepted = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                try:
                    if self._refusing:
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self.accepted += 1
                self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        is_first = True
        try:
            while (data := source.recv(65536)) and self._forward(data, target, answers, is_first):
                is_first = False
        except OSError:
            pass
        self._ended()
        shut_down(source, target)

    def _forward(self, data: bytes, target: socket.socket, answers: bool, is_first: bool) -> bool:
        """Hand on what came; False ends the connection.

        Args:
            answers: it comes from the server.
            is_first: nothing came from there on this connection before.
        """
        target.sendall(data)
        return True

    def _ended(self) -> None:
        """One side has ended a connection; the other is told on return."""

    def cut(self) -> None:
        """Cut all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        shut_down(*sockets)

    def close(self) -> None:
        shut_down(self._listener)
        self._listener.close()
        self.cut()
        join_all([self._thread], 60)


class StallingProxy(Proxy):
    """Holds back what is sent, as a stalled network does, and delivers it later."""

    def __init__(self, port: int) -> None:
        self._flowing = threading.Event()
        self._flowing.set()
        super().__init__(port)

    def _forward(self, data: bytes, target: socket.socket, answers: bool, is_first: bool) -> bool:
        self._flowing.wait()
        return super()._forward(data, target, answers, is_first)

    def _ended(self) -> None:
        self._flowing.wait()

    def hold(self) -> None:
        """Nothing arrives any more, not even that a connection ended."""
        self._flowing.clear()

    def resume(self) -> None:
        """What was held back arrives, and connections are taken again."""
        with self._lock:
            self._refusing = False
        self._flowing.set()

    def cut(self) -> None:
        """Cut all connections, and take none until `resume`."""
        with self._lock:
            self._refusing = True
        super().cut()

    def close(self) -> None:
        self._flowing.set()
        super().close()


class AnswerLosingProxy(Proxy):
    """Loses answers: what was asked arrives and is executed, and the connection is cut instead of the answer.

    Attributes:
        is_losing: whether it does so now.
    """

    def __init__(self, port: int) -> None:
        self.is_losing = threading.Event()
        super().__init__(port)

    def _forward(self, data: bytes, target: socket.socket, answers: bool, is_first: bool) -> bool:
        if answers and self.is_losing.is_set():
            return False
        return super()._forward(data, target, answers, is_first)


class DataPortProxy(Proxy):
    """Before a broker's data port: cuts connections in the middle of what is sent, and holds answers back."""

    def __init__(self, port: int) -> None:
        self._open = threading.Event()
        self._open.set()
        self.upstream_bytes = 0
        self.cut_at: int | None = None
        self.answer_bytes_left: int | None = None
        self.is_holding = threading.Event()
        super().__init__(port)

    def _forward(self, data: bytes, target: socket.socket, answers: bool, is_first: bool) -> bool:
        if answers:
            if not is_first:  # a hello that is held back would keep a client from ever sending
                data = self._held_back(data, target)
        else:
            self.upstream_bytes += len(data)
            if self.cut_at is not None and self.upstream_bytes >= self.cut_at:
                target.sendall(data[: len(data) - (self.upstream_bytes - self.cut_at)])
                self.cut_at = None
                return False
        return super()._forward(data, target, answers, is_first)

    def _held_back(self, data: bytes, target: socket.socket) -> bytes:
        """What is left to be sent of an answer, once it may be."""
        if self.answer_bytes_left is not None:
            target.sendall(data[: self.answer_bytes_left])
            data = data[self.answer_bytes_left :]
            self.answer_bytes_left = None
            self._open.clear()
            self.is_holding.set()
        self._open.wait()
        return data

    def cut_after(self, count: int) -> None:
        """Cut the connection when so many more bytes have gone to the broker: in the middle of a frame."""
        self.cut_at = self.upstream_bytes + count

    def hold_answers(self) -> None:
        """What goes to the broker arrives there; nothing but a hello comes back."""
        self._open.clear()

    def hold_answers_after(self, count: int) -> None:
        """So many bytes of the next answer come, and nothing more."""
        self.answer_bytes_left = count

    def cut(self) -> None:
        """Cut all connections; answers that were held back are lost."""
        super().cut()
        self._open.set()


class ProxiedCluster(Cluster):
    """A cluster whose data port is reached through a proxy."""

    data_port: int

    def connect_data(self, broker_id: int, known: BrokerInfo | None = None) -> DataConnection:
        return DataConnection(
            "127.0.0.1",
            self.data_port,
            connect_timeout_ms=self.settings.connect_timeout_ms,
            request_timeout_ms=self.settings.request_timeout_ms,
        )


@contextmanager
def proxied(
    bootstrap_servers: str, data_port: int, **settings: object
) -> Iterator[tuple[ProxiedCluster, DataPortProxy]]:
    """A cluster behind a proxy, and the proxy."""
    proxy = DataPortProxy(data_port)
    cluster = ProxiedCluster(bootstrap_servers, **settings)
    cluster.data_port = proxy.port
    try:
        yield cluster, proxy
    finally:
        cluster.close()
        proxy.close()


def shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
