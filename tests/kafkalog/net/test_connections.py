"""Connecting to what is a broker, and to what is not."""

from __future__ import annotations

import itertools
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from broker.local import LocalCluster
from kafkalog import Admin
from kafkalog.errors import (
    BrokerBusy,
    BrokerNotAsked,
    BrokerUnreachable,
    Closed,
    KafkalogError,
    NoCommonVersion,
    ProtocolError,
    RequestTimedOut,
    TooManyConnections,
)
from kafkalog.net import forks
from kafkalog.net.control import _ABANDONED, ControlConnection
from kafkalog.net.data import _BUFFER_SIZE, BODY_LENGTH_MAX, DataConnection
from kafkalog.net.tcp import format_address
from kafkalog.versions import VersionRange
from kafkalog.wire import broker_pb2
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import HEADER_LENGTH_MAX, PREFIX, frame_start, hello
from kafkalog.wire.service import METHODS
from tests.threads import join_all
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(60)


def connect(port: int, timeout_ms: int = 500) -> DataConnection:
    return DataConnection("127.0.0.1", port, connect_timeout_ms=timeout_ms, request_timeout_ms=timeout_ms)


@contextmanager
def server(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that does something with each connection; its port."""
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            kept.append(accepted)
            try:
                talk(accepted)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for each in kept:
        each.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def silent(accepted: socket.socket) -> None:
    pass


def http(accepted: socket.socket) -> None:
    accepted.recv(1000)
    accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    accepted.close()


def hang_up(accepted: socket.socket) -> None:
    accepted.close()


def greet_and(after: bytes) -> Callable[[socket.socket], None]:
    def talk(accepted: socket.socket) -> None:
        accepted.recv(8)
        accepted.sendall(hello() + after)

    return talk


def hello_and_end(answer: bytes) -> Callable[[socket.socket], None]:
    def talk(accepted: socket.socket) -> None:
        accepted.recv(8)
        accepted.sendall(answer)
        accepted.close()

    return talk


# --- data port -------------------------------------------------------------------------------------------------------


def test_a_data_port_without_a_listener_is_unreachable() -> None:
    port = closed_port()
    with pytest.raises(BrokerUnreachable) as raised:
        connect(port)
    assert str(raised.value) == f"no broker reachable at 127.0.0.1:{port}: connection refused"


@pytest.mark.parametrize(
    "talk, kind, sentence",
    [
        (silent, BrokerUnreachable, "it accepts connections but does not greet as a kafkalog data port"),
        (hang_up, BrokerUnreachable, ""),
        (hello_and_end(b""), BrokerUnreachable, "it closed the connection without a greeting"),
        (hello_and_end(hello()[:3]), ProtocolError, "this is not a kafkalog data port"),
        (http, ProtocolError, "this is not a kafkalog data port (is it the gRPC port?)"),
        (
            lambda accepted: accepted.sendall(hello(VersionRange(8, 9))),
            ProtocolError,
            "speaks the protocol versions 8 to 9, and this side 1: they have none in common",
        ),
    ],
)
def test_what_is_no_data_port(talk: Callable[[socket.socket], None], kind: type[KafkalogError], sentence: str) -> None:
    with server(talk) as port, pytest.raises(kind) as raised:
        connect(port)
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert sentence in str(raised.value)


def test_a_grpc_port_is_no_data_port(cluster: LocalCluster) -> None:
    with pytest.raises(ProtocolError, match=r"this is not a kafkalog data port \(is it the gRPC port\?\)"):
        connect(cluster.brokers[0].grpc_port, timeout_ms=5000)


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(BrokerUnreachable, match=r"no broker reachable at no-such-host\.invalid:1: "):
        DataConnection("no-such-host.invalid", 1, connect_timeout_ms=5000, request_timeout_ms=500)


@pytest.mark.parametrize(
    "answer, sentence",
    [
        (b"\xff" * 64, "is not valid here"),
        (PREFIX.pack(HEADER_LENGTH_MAX + 1, 0), "is not valid here"),
        (PREFIX.pack(0, BODY_LENGTH_MAX + 1), "is not valid here"),
        (frame_start(b"\xff\xff\xff", 0), "a frame's header is not readable"),
    ],
)
def test_bytes_that_are_not_a_frame_raise_protocol_error(answer: bytes, sentence: str) -> None:
    with server(greet_and(answer)) as port:
        connection = connect(port)
        with pytest.raises(ProtocolError, match=sentence):
            connection.receive()
        connection.close()


def test_a_frame_may_be_as_large_as_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    header = pb.ReplyHeader(correlation_id=1).SerializeToString()
    monkeypatch.setattr("kafkalog.net.data.HEADER_LENGTH_MAX", len(header))
    monkeypatch.setattr("kafkalog.net.data.BODY_LENGTH_MAX", 1000)
    with server(greet_and(frame_start(header, 1000) + bytes(1000))) as port:
        connection = connect(port, timeout_ms=20_000)
        assert len(connection.receive().body or b"") == 1000
        connection.close()


def test_an_answer_that_does_not_come_is_given_up() -> None:
    with server(greet_and(b"")) as port:
        connection = connect(port, timeout_ms=100)
        with pytest.raises(RequestTimedOut, match=f"a request at 127.0.0.1:{port} did not finish within 100 ms"):
            connection.receive()
        connection.close()


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    with server(greet_and(b"")) as port:
        connection = connect(port, timeout_ms=100)
        with pytest.raises(RequestTimedOut, match="a send at"):
            connection.send([bytes(64 << 20)])
        connection.close()


def test_a_connection_that_ends_in_the_middle_of_a_frame() -> None:
    header = pb.ReplyHeader(correlation_id=1).SerializeToString()

    def talk(accepted: socket.socket) -> None:
        greet_and(frame_start(header, 1000) + bytes(10))(accepted)
        accepted.shutdown(socket.SHUT_RDWR)

    with server(talk) as port:
        connection = connect(port)
        with pytest.raises(BrokerUnreachable, match="it closed the connection"):
            connection.receive()
        connection.close()


def test_closing_wakes_a_thread_that_waits_for_an_answer() -> None:
    errors: list[KafkalogError] = []
    with server(greet_and(b"\1")) as port:
        connection = connect(port, timeout_ms=30_000)

        def wait() -> None:
            try:
                connection.receive()
            except KafkalogError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waited_for(lambda: connection.has_buffered)  # it has taken in that byte, and waits for more
        connection.shut_down()
        join_all([waiting], 20)
        connection.close()
        assert connection.fileno() == -1
    assert [str(error) for error in errors] == [
        f"no broker reachable at {connection.address}: the connection was closed here"
    ]


def test_frames_of_every_size_come_whole_whatever_the_pieces() -> None:
    bodies = [b"", b"x", b"y" * 70_000, b"", b"z" * 3_000_000, b"w" * 10]
    stream = b""
    for number, body in enumerate(bodies):
        reply = pb.ReplyHeader(correlation_id=number)
        if number == 3:
            for offset in range(10_000):  # a header larger than the receive buffer
                reply.fetch.partitions.add(length=1, end_offset=offset)
        header = reply.SerializeToString()
        stream += frame_start(header, len(body)) + body

    def talk(accepted: socket.socket) -> None:
        greet_and(b"")(accepted)
        for start in range(0, 100_000, 777):
            accepted.sendall(stream[start : min(start + 777, 100_000)])
        accepted.sendall(stream[100_000:])

    with server(lambda accepted: threading.Thread(target=talk, args=(accepted,)).start()) as port:
        connection = connect(port, timeout_ms=20_000)
        for number, body in enumerate(bodies):
            reply, received = connection.receive()
            assert reply.correlation_id == number
            assert (b"" if received is None else bytes(received)) == body
        assert not connection.has_buffered
        assert connection.is_quiet()
        connection.close()


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_header_may_fill_the_buffer_to_its_last_byte_and_beyond(more: int) -> None:
    facts = "x" * (_BUFFER_SIZE - 100)
    short = pb.ReplyHeader(correlation_id=7, error=pb.Error(facts=facts)).ByteSize()
    facts += "x" * (_BUFFER_SIZE - PREFIX.size - short + more)
    header = pb.ReplyHeader(correlation_id=7, error=pb.Error(facts=facts)).SerializeToString()
    assert PREFIX.size + len(header) == _BUFFER_SIZE + more
    with server(greet_and(frame_start(header, 0))) as port:
        connection = connect(port, timeout_ms=20_000)
        assert connection.receive().header.error.facts == facts
        connection.close()


def test_a_frame_is_received_in_pieces_without_a_wait_for_the_next() -> None:
    """Whichever place it stops at: amid its lengths, its header or its body."""
    bodies = [b"x" * 100, b"", b"y" * 200_000]
    frames = []
    for number, body in enumerate(bodies, 1):
        frames.append(frame_start(pb.ReplyHeader(correlation_id=number).SerializeToString(), len(body)) + body)
    stream = b"".join(frames)
    with sockets() as (broker, connection):
        received: list[tuple[int, bytes]] = []
        sent = 0
        for end in (3, 9, 11, 60, *range(100, 200, 7), 1000, 150_000, len(stream)):
            assert connection.receive_now() is None, "nothing has come since"
            broker.sendall(stream[sent:end])
            before, sent = connection.received_bytes, end
            while connection.received_bytes < end:
                assert select.select([connection], [], [], 30)[0]
                while (reply := connection.receive_now()) is not None:
                    received.append((reply.header.correlation_id, bytes(reply.body or b"")))
            assert connection.received_bytes - before > 0
        assert received == list(enumerate(bodies, 1))
        assert not connection.has_buffered
        broker.sendall(frames[0][:50])
        assert select.select([connection], [], [], 30)[0]
        assert connection.receive_now() is None
        broker.shutdown(socket.SHUT_RDWR)
        assert select.select([connection], [], [], 30)[0]
        with pytest.raises(BrokerUnreachable, match="it closed the connection"):
            connection.receive_now()


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, DataConnection]]:
    """A broker's end of a connection, and a client's."""
    accepted: queue.Queue[socket.socket] = queue.Queue()

    def talk(each: socket.socket) -> None:
        greet_and(b"")(each)
        accepted.put(each.dup())

    with server(talk) as port:
        connection = connect(port, timeout_ms=20_000)
        with closing(accepted.get(timeout=20)) as broker:
            yield broker, connection
        connection.close()


def test_a_broker_that_is_full_says_so() -> None:
    with LocalCluster(settings={"max.connections": 1}) as small:
        port = small.brokers[0].data_port
        first = connect(port, timeout_ms=5000)
        second = connect(port, timeout_ms=5000)
        reply = second.receive()
        assert reply.header.HasField("error")
        assert reply.header.error.code == TooManyConnections.code
        second.close()
        first.close()


# --- gRPC ------------------------------------------------------------------------------------------------------------


def control(port: int, timeout_ms: int = 700) -> ControlConnection:
    return ControlConnection("127.0.0.1", port, connect_timeout_ms=timeout_ms)


def test_a_grpc_port_without_a_listener_is_unreachable() -> None:
    port = closed_port()
    with pytest.raises(BrokerUnreachable) as raised:
        control(port).connect()
    assert str(raised.value) == f"no broker reachable at 127.0.0.1:{port}: connection refused"


def test_a_data_port_given_for_the_grpc_port_is_recognised(cluster: LocalCluster) -> None:
    port = cluster.brokers[0].data_port
    with pytest.raises(ProtocolError) as raised:
        control(port, timeout_ms=5000).connect()
    assert (
        str(raised.value) == f"127.0.0.1:{port}: this is a broker's data port; give its gRPC port in bootstrap.servers"
    )


NO_BROKER = "the server there is not the gRPC port of a kafkalog broker"
GREETING = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def greet(accepted: socket.socket) -> None:
    accepted.sendall(GREETING)


def greet_and_hang_up(accepted: socket.socket) -> None:
    accepted.recv(1000)
    accepted.sendall(GREETING)
    accepted.close()


@pytest.mark.parametrize(
    "talk, reason",
    [
        (silent, "it accepts connections but does not answer within 700 ms as a kafkalog broker"),
        (greet, "it accepts connections but does not answer within 700 ms as a kafkalog broker"),
        (greet_and_hang_up, "its gRPC service closed the connection"),
        (http, NO_BROKER),
        (hang_up, NO_BROKER),
    ],
)
def test_what_is_no_grpc_port(talk: Callable[[socket.socket], None], reason: str) -> None:
    started = time.monotonic()
    with server(talk) as port, pytest.raises(BrokerUnreachable) as raised:
        control(port).connect()
    assert time.monotonic() - started < 10
    assert str(raised.value) == f"no broker reachable at 127.0.0.1:{port}: {reason}"


def test_a_proxy_in_the_environment_is_left_alone(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.describe_cluster().brokers


def test_the_first_of_several_addresses_may_be_dead(cluster: LocalCluster) -> None:
    with Admin(f"127.0.0.1:{closed_port()},{cluster.bootstrap_servers}") as admin:
        assert admin.describe_cluster().brokers


def test_when_all_addresses_are_dead_each_is_named() -> None:
    first, second = closed_port(), closed_port()
    admin = Admin(f"127.0.0.1:{first},127.0.0.1:{second}", bootstrap_timeout_ms=0)
    with admin, pytest.raises(BrokerUnreachable) as raised:
        admin.topics()
    assert str(raised.value) == (
        f"no broker reachable at 127.0.0.1:{first}, 127.0.0.1:{second}: connection refused; connection refused"
    )


def test_a_greeting_that_failed_leaves_no_connection() -> None:
    ended = threading.Event()

    def talk(accepted: socket.socket) -> None:
        accepted.sendall(b"no hello")
        accepted.settimeout(30)
        while accepted.recv(100):
            pass
        ended.set()

    with server(lambda accepted: threading.Thread(target=talk, args=(accepted,), daemon=True).start()) as port:
        with pytest.raises(ProtocolError) as raised:
            connect(port)
        assert ended.wait(10)
        del raised  # its traceback holds the connection till here


def test_a_header_that_came_with_others_is_handed_out_with_them_unless_it_has_a_body() -> None:
    def frame(number: int, body: bytes = b"") -> bytes:
        return frame_start(pb.ReplyHeader(correlation_id=number).SerializeToString(), len(body)) + body

    with server(greet_and(frame(1) + frame(2) + frame(3, b"body") + frame(4))) as port:
        connection = connect(port, timeout_ms=20_000)
        connection._fill(len(frame(1) * 4) + 4, 0)
        assert [header.correlation_id for header in connection.receive_some()] == [1, 2]
        assert not connection.is_quiet(), "an answer came that nobody took"
        header, body = connection.receive()
        assert (header.correlation_id, bytes(body or b"")) == (3, b"body")
        connection.close()
    with server(greet_and(frame(1) + frame(2))) as port:
        connection = connect(port, timeout_ms=20_000)
        connection._fill(len(frame(1) * 2), 0)
        assert [header.correlation_id for header in connection.receive_some()] == [1, 2]
        assert not connection.has_buffered, "who looks at the socket next would not see the last one"
        connection.close()
    with server(greet_and(frame(1) + frame_start(b"", 0))) as port:  # the second one has nothing but its lengths
        connection = connect(port, timeout_ms=20_000)
        connection._fill(len(frame(1)) + PREFIX.size, 0)
        assert [header.correlation_id for header in connection.receive_some()] == [1, 0]
        connection.close()


# --- the gRPC service, its calls and its channel


def channel_to(port: int) -> ControlConnection:
    return ControlConnection("127.0.0.1", port, connect_timeout_ms=300)


DESCRIBE = broker_pb2.DescribeClusterRequest()


def test_a_connection_that_was_closed_opens_no_other_channel() -> None:
    closed = channel_to(1)
    closed.close()
    with pytest.raises(BrokerNotAsked, match="the connection was closed here"):
        closed.call("DescribeCluster", DESCRIBE, 100)
    with pytest.raises(BrokerNotAsked, match="the connection was closed here"):
        closed.begin("DescribeCluster", DESCRIBE, 100, lambda: None)
    assert closed._channel is None


@pytest.mark.parametrize("expected", [BrokerNotAsked, ValueError])
def test_a_close_that_overtakes_a_call_is_reported_as_such_and_no_other_mistake_is(expected: type[Exception]) -> None:
    overtaken: Any = channel_to(1)
    method = overtaken._method

    def and_before_the_call(name: str) -> Callable[..., object]:
        on_channel = method(name)

        def called(request: object, timeout: float) -> object:
            if expected is ValueError:
                raise ValueError("a mistake of ours")
            overtaken.close()
            return on_channel(request, timeout=timeout)

        return called

    overtaken._method = and_before_the_call
    with pytest.raises(expected):
        overtaken.call("DescribeCluster", DESCRIBE, 30_000)
    assert overtaken._calls == 0
    overtaken.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_call_that_a_close_ends_may_have_been_heard(is_begun: bool) -> None:
    heard, done = threading.Event(), threading.Event()
    with server(lambda accepted: heard.set()) as port, ThreadPoolExecutor(1) as pool:
        silent = channel_to(port)
        if is_begun:
            ended = silent.begin("DescribeCluster", DESCRIBE, 30_000, done.set).result
        else:
            ended = pool.submit(silent.call, "DescribeCluster", DESCRIBE, 30_000).result
            done.set()
        assert heard.wait(30)
        silent.close()
        assert done.wait(30)
        with pytest.raises(BrokerUnreachable) as raised:
            ended()
    assert not isinstance(raised.value, BrokerNotAsked)


def test_a_close_ends_several_calls_that_were_begun() -> None:
    with server(silent) as port:
        control = channel_to(port)
        ends = [threading.Event() for _ in range(8)]
        for ended in ends:
            control.begin("DescribeCluster", DESCRIBE, 30_000, ended.set)
        closing_it = threading.Thread(target=control.close, daemon=True)
        closing_it.start()
        join_all([closing_it], 20)
        for ended in ends:
            assert ended.wait(20)


def test_a_fork_closes_the_channel_that_no_call_is_under_way_on(cluster: LocalCluster) -> None:
    connected = channel_to(cluster.brokers[0].grpc_port)
    done = threading.Event()
    call = connected.begin("DescribeCluster", DESCRIBE, 30_000, done.set)
    assert done.wait(30)
    assert call.result().cluster_id
    connected._calls += 1
    assert not connected.close_if_idle(), "a call is under way"
    connected._calls -= 1
    assert connected.close_if_idle()
    assert not connected.close_if_idle(), "there is none any more"
    assert connected.call("DescribeCluster", DESCRIBE, 30_000).cluster_id  # on another
    connected.close()


def test_two_connections_to_one_address_share_no_channel() -> None:
    """Else one that is closed, as before a fork, would leave its sockets and threads to the other."""
    accepted = threading.Semaphore(0)
    with server(lambda _: accepted.release()) as port:
        controls = [channel_to(port) for _ in range(2)]
        for control in controls:
            control.begin("DescribeCluster", DESCRIBE, 30_000, lambda: None)
        assert all(accepted.acquire(timeout=10) for _ in controls)
        for control in controls:
            control.close()


@contextmanager
def described_as(cluster: broker_pb2.ClusterDescription) -> Iterator[ControlConnection]:
    """A connection to a server that has nothing but a description of its cluster."""
    answer = cluster.SerializeToString()
    answers: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
    service, _, method = METHODS["DescribeCluster"].path.strip("/").partition("/")
    with ThreadPoolExecutor(1) as pool:
        serving = grpc.server(pool, handlers=[grpc.method_handlers_generic_handler(service, {method: answers})])
        control = channel_to(serving.add_insecure_port("127.0.0.1:0"))
        serving.start()
        yield control
        control.close()
        serving.stop(None).wait()


def test_an_answer_may_be_larger_than_grpc_s_default_of_4_mib() -> None:
    with described_as(broker_pb2.ClusterDescription(cluster_id="x" * (5 << 20))) as control:
        assert len(control.call("DescribeCluster", DESCRIBE, 30_000).cluster_id) == 5 << 20


@pytest.mark.parametrize("spoken", [broker_pb2.VersionRange(), broker_pb2.VersionRange(oldest=1, newest=9)])
def test_a_broker_of_another_version_is_talked_to_while_there_is_a_common_one(spoken: broker_pb2.VersionRange) -> None:
    with described_as(broker_pb2.ClusterDescription(cluster_id="c", protocol=spoken)) as control:
        assert control.connect().cluster_id == "c"


def test_a_broker_without_a_common_version_is_refused_with_both_ranges() -> None:
    spoken = broker_pb2.VersionRange(oldest=8, newest=9)
    with (
        described_as(broker_pb2.ClusterDescription(protocol=spoken)) as control,
        pytest.raises(NoCommonVersion, match="speaks the protocol versions 8 to 9, and this side 1: they have none"),
    ):
        control.connect()


def test_a_call_that_was_given_up_says_so() -> None:
    with server(lambda accepted: None) as port:
        silent = channel_to(port)
        done = threading.Event()
        call = silent.begin("DescribeCluster", DESCRIBE, 30_000, done.set)
        call.cancel()
        assert silent.close_if_idle(), "a fork may come at once"
        assert done.wait(30)
        with pytest.raises(Closed):
            call.result()
        silent.close()


@pytest.mark.parametrize("error", [
    RequestTimedOut(what="DescribeCluster", address="a", timeout_ms=1), BrokerBusy(broker="a", reason="full")
])  # fmt: skip
def test_a_connect_that_fails_leaves_no_channel_and_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, error: KafkalogError
) -> None:
    closed: list[bool] = []
    asked: list[int] = []

    class Channel:
        def close(self) -> None:
            closed.append(True)

    with server(lambda accepted: None) as port:
        failing: Any = channel_to(port)
        failing._channel = Channel()

        def call(method: str, request: object, timeout_ms: int) -> None:
            asked.append(timeout_ms)
            raise error

        failing.call = call
        # A tenth of a second passes between two looks at the clock.
        clock = SimpleNamespace(monotonic=itertools.count(0.0, 0.1).__next__)
        monkeypatch.setattr("kafkalog.net.control.time", clock)
        with pytest.raises(KafkalogError):
            failing.connect()
    assert closed == [True]
    assert asked == [failing._connect_timeout_ms - 100]


def test_a_parents_channel_is_neither_closed_nor_destroyed_in_a_child() -> None:
    parents: Any = channel_to(1)
    parents._channel = channel = object()
    parents.abandon()
    assert parents._channel is None
    assert any(each is channel for each in _ABANDONED)
    _ABANDONED.remove(channel)


def test_an_address_of_version_6_stands_in_brackets() -> None:
    assert format_address("::1", 9192) == "[::1]:9192"
    assert format_address("localhost", 9192) == "localhost:9192"


def test_a_name_that_can_be_no_hosts_is_unreachable() -> None:
    with pytest.raises(BrokerUnreachable):
        DataConnection("a" * 70, 9192, connect_timeout_ms=500, request_timeout_ms=500)  # a label has 63 bytes at most


def taking(received: bytearray, done: threading.Event) -> Callable[[socket.socket], None]:
    """A peer that takes all that is sent, until it is closed."""

    def take(accepted: socket.socket) -> None:
        greet_and(b"")(accepted)
        while data := accepted.recv(1 << 16):
            received.extend(data)
        done.set()

    return take


class TakesLittle:
    """A socket of which each call sends 1,500 bytes at most, as it may if the peer is slow."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def sendmsg(self, pieces: Sequence[bytes | memoryview]) -> int:
        return self._real.send(b"".join(pieces)[:1500])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_pieces_come_whole_where_a_call_ends_within_one() -> None:
    received, done = bytearray(), threading.Event()
    pieces = [bytes([number]) * 1001 for number in range(20)]
    with server(taking(received, done)) as port:
        connected = connect(port)
        connected._socket = cast(socket.socket, TakesLittle(connected._socket))
        connected.send(pieces)
        connected.close()
        assert done.wait(30)
    assert received == b"".join(pieces)


def test_more_pieces_than_one_call_takes_are_all_sent() -> None:
    received, done = bytearray(), threading.Event()
    with server(taking(received, done)) as port:
        connected = connect(port)
        connected.send([b"%04d" % number for number in range(2500)])
        connected.close()
        assert done.wait(30)
    assert received == b"".join(b"%04d" % number for number in range(2500))


def test_a_connection_is_quiet_while_nothing_has_come_and_it_is_open() -> None:
    frame = frame_start(pb.ReplyHeader(correlation_id=1).SerializeToString(), 0)
    with server(greet_and(b"")) as port:
        connected = connect(port)
        assert connected.is_quiet()
        connected.close()
        assert not connected.is_quiet()
    with server(greet_and(frame + frame)) as port:
        connected = connect(port, 30_000)
        assert connected.receive().header.correlation_id == 1
        connected._fill(len(frame), 0)  # the second is read already
        assert connected.has_buffered
        assert not connected.is_quiet()
        connected.close()


def test_a_request_may_take_its_time_to_the_millisecond() -> None:
    with server(greet_and(b"")) as port:
        connected = connect(port, 1250)
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            seconds, micros = struct.unpack("@ll", connected._socket.getsockopt(socket.SOL_SOCKET, limit, 16))
            assert seconds == 1
            assert 250_000 <= micros < 300_000  # the kernel counts in its own ticks
        connected.close()


def test_a_call_that_has_ended_keeps_no_channel_from_being_closed_at_a_fork() -> None:
    with server(hang_up) as port:
        control = channel_to(port)
        done, under_way = threading.Event(), []

        def ended() -> None:
            under_way.append(len(control._begun))
            done.set()

        control.begin("DescribeCluster", DESCRIBE, 30_000, ended)
        assert done.wait(30)
        assert under_way == [0], "whoever is woken may fork at once"
        assert control.close_if_idle()
        control.close()


def test_a_fork_waits_for_no_thread_that_uses_a_connection() -> None:
    control = channel_to(1)
    with control._lock:
        assert not control.close_if_idle()


def test_a_defect_of_one_owner_keeps_no_other_from_letting_go_in_a_child(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Owner:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def let_go(self) -> None:
            told.append(self.fails)
            if self.fails:
                raise ZeroDivisionError

    owners = [Owner(True), Owner(False), Owner(True)]
    monkeypatch.setattr(forks, "_owners", dict.fromkeys(owners, Owner.let_go))
    forks._in_child()
    assert told == [True, False, True]
    assert "after_fork_failed owner=Owner" in caplog.text
