"""The Unix socket beside the data port: clients on the machine find it by themselves, and do without it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.errors import BrokerUnreachable
from kafkalog.net.data import DataConnection
from kafkalog.net.local import Peer, connect_here, socket_name
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import frame_start


def connected(host: str, port: int) -> contextlib.closing[DataConnection]:
    return contextlib.closing(DataConnection(host, port, connect_timeout_ms=5000, request_timeout_ms=5000))


def family_of(connection: DataConnection) -> int:
    return connection._socket.family


@pytest.fixture
def port(cluster: LocalCluster) -> int:
    return cluster.brokers[0].data_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_client_on_the_machine_takes_the_unix_socket(port: int, host: str) -> None:
    with connected(host, port) as connection:
        assert family_of(connection) == socket.AF_UNIX
        assert connection.address == f"{host}:{port}"


def test_a_broker_without_it_is_reached_over_tcp_and_so_is_one_that_is_not_here() -> None:
    with LocalCluster(settings={"data.local.socket": "false"}) as own:
        with connected("127.0.0.1", own.brokers[0].data_port) as connection:
            assert family_of(connection) == socket.AF_INET
        assert connect_here("127.0.0.1", own.brokers[0].data_port, 5000) is None
    assert socket_name("192.0.2.1", 9193) is None
    assert socket_name("broker.example", 9193) is None


def test_a_broker_that_was_killed_has_it_again(topic: str) -> None:
    with LocalCluster() as own, Admin(own.bootstrap_servers) as admin:
        admin.create_topic(topic)
        broker = own.brokers[0]
        with connected("127.0.0.1", broker.data_port) as before:
            broker.kill()
            assert connect_here("127.0.0.1", broker.data_port, 5000) is None
            broker.start()
            assert not before.is_quiet()
        with connected("127.0.0.1", broker.data_port) as after:
            assert family_of(after) == socket.AF_UNIX
        with Producer(own.bootstrap_servers) as producer:
            producer.send(topic, b"x").result(60)


@contextlib.contextmanager
def full_queue(port: int) -> Iterator[None]:
    """A program that has the name and accepts nobody any more."""
    name = socket_name("127.0.0.1", port)
    assert name is not None
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(name)
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(name)
            except BlockingIOError:
                break
        yield


def test_a_full_queue_is_not_waited_for() -> None:
    with full_queue(1):
        assert connect_here("127.0.0.1", 1, 3_600_000) is None


def test_without_a_descriptor_it_is_as_unreachable_as_over_tcp(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another kind would fail the records that wait, instead of sending them later."""

    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", refused)
    with pytest.raises(BrokerUnreachable, match="too many open files"):
        connected("127.0.0.1", port)


def test_another_users_socket_is_left_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalog.net.local.peer_of", lambda _: Peer(1, 12345))
    with connected("127.0.0.1", port) as connection:
        assert family_of(connection) == socket.AF_INET


def test_large_batches_come_back_as_they_went(cluster: LocalCluster, topic: str, port: int) -> None:
    """Larger than a socket holds, by sendfile."""
    values = [os.urandom(700_000) for _ in range(20)]
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic)
    with Producer(cluster.bootstrap_servers) as producer:
        for value in values:
            producer.send(topic, value)
        producer.flush()
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, 0): "earliest"})
        assert [message.value for message in consumer.messages(max_messages=20)] == values


def test_a_request_that_is_none_ends_the_connection_with_its_error(port: int) -> None:
    with connected("127.0.0.1", port) as connection:
        assert family_of(connection) == socket.AF_UNIX
        connection.send([frame_start(pb.RequestHeader(correlation_id=3).SerializeToString(), 0)])
        reply = connection.receive()
        assert (reply.header.correlation_id, reply.header.HasField("error")) == (3, True)
