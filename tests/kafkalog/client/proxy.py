"""A TCP proxy before a broker's data port that cuts connections and holds answers back, and a Cluster behind it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kafkalog.client.cluster import BrokerInfo, Cluster
from kafkalog.connection import DataConnection


class Proxy:
    """Forwards connections to a port of this machine."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards _sockets
        self._sockets: set[socket.socket] = set()
        self._open = threading.Event()
        self._open.set()
        self.accepted = 0
        self.upstream_bytes = 0
        self.cut_at: int | None = None
        self.answer_bytes_left: int | None = None
        self.is_holding = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self.accepted += 1
            with self._lock:
                self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        greeted = False  # a hello that is held back would keep a client from ever sending
        try:
            while data := source.recv(65536):
                if answers:
                    if greeted:
                        if self.answer_bytes_left is not None:
                            target.sendall(data[: self.answer_bytes_left])
                            data = data[self.answer_bytes_left :]
                            self.answer_bytes_left = None
                            self._open.clear()
                            self.is_holding.set()
                        self._open.wait()
                    greeted = True
                else:
                    self.upstream_bytes += len(data)
                    if self.cut_at is not None and self.upstream_bytes >= self.cut_at:
                        target.sendall(data[: len(data) - (self.upstream_bytes - self.cut_at)])
                        self.cut_at = None
                        break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

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
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._open.set()

    def close(self) -> None:
        self._listener.close()
        self.cut()


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
def proxied(bootstrap_servers: str, data_port: int, **settings: object) -> Iterator[tuple[ProxiedCluster, Proxy]]:
    """A cluster behind a proxy, and the proxy."""
    proxy = Proxy(data_port)
    cluster = ProxiedCluster(bootstrap_servers, **settings)
    cluster.data_port = proxy.port
    try:
        yield cluster, proxy
    finally:
        cluster.close()
        proxy.close()
