"""Accepting: a port in use, descriptors that run out, many connections at once."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from broker.config import BrokerSettings
from broker.replica.host import Host
from broker.storage.disk import Disk
from broker.transport.connection import Connection
from broker.transport.dataport import DataPort, close_all, listen
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import AddressInUse
from kafkalog.net.local import socket_name
from kafkalog.wire import frames
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import DataPortClient, a_batch, append_frame, ask_for_more_than_sockets_hold
from tests.waiting import waited_for


def settings(port: int, **more: object) -> BrokerSettings:
    return BrokerSettings.parse({"data.port": port, "log.dir": "/", "zookeeper.connect": "z:1", **more})


def test_a_port_in_use_is_refused_by_name() -> None:
    taken = listen(settings(0))
    port = taken[0].getsockname()[1]
    with pytest.raises(AddressInUse, match=rf"127\.0\.0\.1:{port} is in use by another process \(setting data\.port\)"):
        listen(settings(port))
    close_all(taken)
    close_all(listen(settings(port)))


def test_a_name_of_the_unix_socket_that_is_taken_is_refused_and_leaves_the_port_free() -> None:
    taken = listen(settings(0))
    port = taken[0].getsockname()[1]
    taken[0].close()
    with pytest.raises(
        AddressInUse, match=rf"Unix socket @kafkalog-data-127\.0\.0\.1:{port} is in use by another process"
    ):
        listen(settings(port))
    taken[1].close()
    close_all(listen(settings(port)))


@pytest.mark.parametrize(
    ("more", "families"),
    [
        ({}, [socket.AF_INET, socket.AF_UNIX]),
        ({"host": "0.0.0.0", "advertised.host": "here"}, [socket.AF_INET, socket.AF_UNIX]),
        ({"host": "127.0.0.2"}, [socket.AF_INET]),
        ({"data.local.socket": False}, [socket.AF_INET]),
    ],
)
def test_a_unix_socket_is_beside_loopback_alone(more: dict[str, object], families: list[int]) -> None:
    listeners = listen(settings(0, **more))
    assert [each.family for each in listeners] == families
    close_all(listeners)


@pytest.mark.parametrize("left", [0, 1], ids=["none_left", "one_left_for_the_socket_alone"])
def test_without_descriptors_the_connections_there_are_continue_and_new_ones_wait(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    topic = broker.new_topic()
    batch = a_batch()  # made before, for pyarrow imports pandas at the first one
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    pause = threading.Event()
    with broker.client() as good, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.socket()) for _ in range(5)]
        connected = []
        try:
            room = max(map(int, os.listdir("/proc/self/fd"))) + 32  # other threads may take some of these numbers first
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
            for sock in waiting:  # several, for another thread may close something and so let one in
                with contextlib.suppress(OSError):
                    while True:
                        fillers.append(os.dup(0))
                for _ in range(left):
                    os.close(fillers.pop())
                sock.settimeout(30)
                sock.connect(("127.0.0.1", broker.broker.data_port))
                sock.sendall(frames.hello())
                connected.append(sock)
                for _ in range(200):
                    if "accept_failed" in caplog.text:
                        break
                    pause.wait(0.01)
                if "accept_failed" in caplog.text:
                    break
            assert "accept_failed" in caplog.text
            assert good.append(topic, batch).base_offset == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in fillers:
                os.close(fd)
        for sock in connected:
            assert sock.recv(frames.HELLO_SIZE) == frames.hello()


def test_a_connection_for_which_there_is_no_thread_is_closed_and_leaves_nothing(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("broker.transport.connection.Connection.start", no_thread)
        with broker.client(greet=False) as client:
            assert client.is_closed()
        waited_for(lambda: broker.broker.rpc_service._counters()["dataport.connections"] == 0)
    topic = broker.new_topic()
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0


def test_a_stop_closes_connections_that_were_refused_at_once(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.dataport._REFUSED_SECONDS", 3600.0)
    broker = start_broker(max_connections=1)
    with broker.client() as one, broker.client() as refused:
        assert refused.reply()[0].HasField("error")
        port = getattr(broker.broker.rpc_service._counters, "__self__")  # noqa: B009
        waited_for(lambda: bool(port._refused))  # it is answered before it is kept
        [(kept, _)] = port._refused
        port.stop(10)
        assert kept.fileno() == -1
        assert one.is_closed()


def refused_sockets(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The broker's ends of the connections that are refused from now on."""
    found: list[socket.socket] = []
    refuse = DataPort._refuse

    def noted(port: DataPort, accepted: socket.socket, peer: str) -> None:
        found.append(accepted)
        refuse(port, accepted, peer)

    monkeypatch.setattr(DataPort, "_refuse", noted)
    return found


def test_of_connections_that_were_refused_no_more_than_the_last_are_kept(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.dataport._REFUSED_SECONDS", 3600.0)
    monkeypatch.setattr("broker.transport.dataport._REFUSED_KEPT", 2)
    refused = refused_sockets(monkeypatch)
    broker = start_broker(max_connections=1)
    with broker.client(), contextlib.ExitStack() as stack:
        for _ in range(4):
            assert stack.enter_context(broker.client()).reply()[0].HasField("error")
        waited_for(lambda: [sock.fileno() == -1 for sock in refused] == [True, True, False, False])


def test_a_connection_that_was_refused_is_closed_a_moment_later(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.dataport._REFUSED_SECONDS", 0.0)
    refused = refused_sockets(monkeypatch)
    broker = start_broker(max_connections=1)
    with broker.client(), broker.client() as one_too_many:
        assert one_too_many.reply()[0].HasField("error")
        waited_for(lambda: [sock.fileno() for sock in refused] == [-1])


def test_a_stop_cuts_off_a_reader_that_takes_nothing(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server._GRACE_SECONDS", 0.1)
    broker = start_broker(send_timeout_ms=600_000)
    topic = broker.new_topic()
    with broker.client() as client:
        ask_for_more_than_sockets_hold(client, topic)
        assert client.read(1)  # of answers that do not fit the sockets
        [connection] = getattr(broker.broker.rpc_service._counters, "__self__")._connections  # noqa: B009
        broker.stop()
        connection.join(20)
        assert not connection._thread.is_alive()


def address(family: int, port: int) -> tuple[str, int] | bytes:
    if family == socket.AF_INET:
        return "127.0.0.1", port
    name = socket_name("127.0.0.1", port)
    assert name is not None
    return name


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_cut_ends_a_connection_whose_acks_do_not_come(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, family: int
) -> None:
    broker = start_broker()
    topic_id = broker.new_topic(flush_messages=1)
    may_sync, sync, port = threading.Event(), Disk.sync, broker.broker.data_port

    def late(disk: Disk, fd: int) -> None:
        may_sync.wait(60)
        sync(disk, fd)

    monkeypatch.setattr(Disk, "sync", late)
    started: list[Connection] = []
    start = Connection.start

    def noted(connection: Connection) -> None:
        started.append(connection)
        start(connection)

    monkeypatch.setattr(Connection, "start", noted)
    with socket.socket(family) as client:
        client.settimeout(30)
        client.connect(address(family, port))
        client.sendall(frames.hello() + append_frame(1, topic_id, a_batch(), timeout_ms=30_000))
        try:
            waited_for(lambda: any(each._pending for each in started))
            [connection] = started
            connection.stop()
            waited_for(lambda: not connection._reading)  # it waits for the acks alone
            connection.cut()
            connection.join(10)
            assert not connection._thread.is_alive()
        finally:
            may_sync.set()


def test_a_flood_at_one_socket_keeps_nobody_from_the_other() -> None:
    host, clock = SimpleNamespace(metadata=SimpleNamespace(brokers={})), SYSTEM_CLOCK
    listeners = listen(settings(0))
    families = [each.family for each in listeners]
    assert families == [socket.AF_INET, socket.AF_UNIX]
    port = listeners[0].getsockname()[1]
    data = DataPort(listeners, cast(Host, host), settings(port), clock)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            for listener in (socket.AF_INET, socket.AF_UNIX):
                client = stack.enter_context(socket.socket(listener))
                client.connect(address(listener, port))
        taken = []
        while (found := data._accept()) is not None:
            taken.append(stack.enter_context(found[0]).family)
        assert taken == families * 3
    close_all(listeners)


def test_two_hundred_connections_at_once_are_all_served(start_broker: StartBroker) -> None:
    broker = start_broker(max_connections=200)
    topic = broker.new_topic()
    clients = [DataPortClient(broker.broker.data_port) for _ in range(200)]
    offsets = sorted(client.append(topic, a_batch()).base_offset for client in clients)
    assert offsets == list(range(200))
    for client in clients:
        client.close()
