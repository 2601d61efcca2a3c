"""Links fail for the connections of some processes and not for others, and are well again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.network import ANSWERS, REQUESTS, Link, Weather, owner_of
from tests.threads import join_all
from tests.waiting import waited_for

_SECONDS = 30.0


class _Echo:
    """Answers each piece with itself. `arrived`: all that came."""

    def __init__(self) -> None:
        self.arrived = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(4096):
                    self.arrived += data
                    client.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        join_all([self._thread], _SECONDS)


@pytest.fixture
def echo() -> Iterator[_Echo]:
    server = _Echo()
    yield server
    server.close()


_origins: dict[int, str] = {}


@pytest.fixture
def link(echo: _Echo) -> Iterator[Link]:
    made = Link(echo.port, origin=lambda port: _origins[port])
    yield made
    made.close()


def connected(link: Link, origin: str) -> socket.socket:
    """A connection of that origin, which has been used. Fails if it is cut."""
    client = socket.socket()
    client.bind(("127.0.0.1", 0))
    client.settimeout(_SECONDS)
    _origins[client.getsockname()[1]] = origin
    client.connect(("127.0.0.1", link.port))
    assert asked(client, b"hello") == b"hello"
    return client


def asked(client: socket.socket, what: bytes) -> bytes:
    """The answer; empty if the connection is cut."""
    try:
        client.sendall(what)
        return client.recv(4096)
    except ConnectionError:
        return b""


def test_a_link_is_cut_for_one_origin(link: Link) -> None:
    with connected(link, "broker") as broker, connected(link, "clients") as client:
        link.set(Weather(is_cut=True), "broker")
        assert asked(broker, b"x") == b""
        assert asked(client, b"x") == b"x"
        with pytest.raises(AssertionError):
            connected(link, "broker")
        link.clear()
        connected(link, "broker").close()


def test_a_link_is_cut_for_all_that_are_not_named(link: Link) -> None:
    with connected(link, "broker") as broker, connected(link, "clients") as client:
        link.set(Weather(is_cut=True))
        link.set(Weather(), "clients")
        assert asked(broker, b"x") == b""
        with connected(link, "clients") as new:
            assert asked(new, b"y") == b"y"
        assert asked(client, b"x") == b""  # it was cut before it was named


def test_what_is_held_arrives_later(echo: _Echo, link: Link) -> None:
    with connected(link, "broker") as client:
        link.set(Weather(holds=frozenset({REQUESTS})))
        client.sendall(b"request")
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(4096)
        assert echo.arrived.endswith(b"hello")
        client.settimeout(_SECONDS)
        link.clear()
        assert client.recv(4096) == b"request"


def test_answers_alone_are_held(echo: _Echo, link: Link) -> None:
    with connected(link, "broker") as client:
        link.set(Weather(holds=frozenset({ANSWERS})))
        client.sendall(b"request")
        waited_for(lambda: echo.arrived.endswith(b"request"))
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(4096)
        client.settimeout(_SECONDS)
        link.clear()
        assert client.recv(4096) == b"request"


def test_the_end_of_a_connection_is_held(link: Link) -> None:
    with connected(link, "broker") as client:
        link.set(Weather(holds=frozenset({ANSWERS})))
        client.shutdown(socket.SHUT_WR)  # the server ends the connection then
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(4096)
        client.settimeout(_SECONDS)
        link.clear()
        assert client.recv(4096) == b""


def test_an_answer_is_lost_and_the_request_was_executed(echo: _Echo, link: Link) -> None:
    with connected(link, "broker") as client:
        link.set(Weather(loses=True))
        assert asked(client, b"request") == b""
        assert echo.arrived.endswith(b"request")


def test_a_slow_link_delivers(link: Link) -> None:
    with connected(link, "broker") as client:
        link.set(Weather(delay_s=0.01))
        assert asked(client, b"x") == b"x"


def test_connections_that_ended_are_forgotten(link: Link) -> None:
    for _ in range(20):
        connected(link, "broker").close()
    waited_for(lambda: not link._connections and not link._sockets)


def test_whose_connection_it_is(echo: _Echo) -> None:
    with socket.create_connection(("127.0.0.1", echo.port)) as client:
        port = client.getsockname()[1]
        assert owner_of(port, [os.getppid(), os.getpid()]) == os.getpid()
        assert owner_of(port, [os.getppid()]) is None
    with socket.socket() as unconnected:
        unconnected.bind(("127.0.0.1", 0))
        port = unconnected.getsockname()[1]
    assert owner_of(port, [os.getpid()]) is None
