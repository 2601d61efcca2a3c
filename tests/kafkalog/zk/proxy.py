"""A TCP proxy before a ZooKeeper: cuts connections and refuses new ones, or holds back what is sent, as a stalled
network does, and delivers it later."""

from __future__ import annotations

import socket
import threading


class Proxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards _sockets and _refusing
        self._sockets: set[socket.socket] = set()
        self._refusing = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._refusing:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._flowing.wait()
                target.sendall(data)
        except OSError:
            pass
        self._flowing.wait()
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

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
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self._flowing.set()
        self.cut()
        self._thread.join()
