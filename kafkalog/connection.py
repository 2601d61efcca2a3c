"""One broker seen from a client: its gRPC service and its data port. What fails becomes an error of `errors.py` here.

A connection belongs to the process that made it: a forked child must leave it alone (`abandon`), and code that may run
after a fork registers with `after_fork`. Nothing connects at import. Knows no topics, retries or caches.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kafkalog.errors import (
    BrokerBusy,
    BrokerNotAsked,
    BrokerUnreachable,
    Closed,
    InternalError,
    KafkalogError,
    ProtocolError,
    RequestTimedOut,
    RequestTooLarge,
)
from kafkalog.events import get_logger
from kafkalog.wire import broker_pb2, dataport_pb2
from kafkalog.wire.frames import (
    HEADER_LENGTH_MAX,
    HELLO_SIZE,
    PREFIX,
    PREFIX_SIZE,
    check_hello,
    error_from_wire,
    hello,
)
from kafkalog.wire.service import METHODS
from kafkalog.wire.sockets import tune

if TYPE_CHECKING:
    import grpc

log = get_logger(__name__)

_PIECES_MAX = 1024  # IOV_MAX
_BUFFER_SIZE = 64 * 1024
BODY_LENGTH_MAX = (1 << 31) - 1
_RPC_MESSAGE_MAX = 64 << 20
_CHANNEL_END_SECONDS = 0.02
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")
_HTTP2_START = b"\x00\x00"  # a gRPC server greets with a SETTINGS frame, whose 24-bit length is small


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- data port -----------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """A frame from the broker. `body` is writable memory of its own, None if the frame has none."""

    header: dataport_pb2.ReplyHeader
    body: memoryview | None


class DataConnection:
    """A connection to a broker's data port, its greeting done. One thread may send while another receives.

    Args:
        connect_timeout_ms: for connecting and greeting together.
        request_timeout_ms: a send or receive that makes no progress for that long fails.

    Raises:
        BrokerUnreachable: nothing answers there in time.
        ProtocolError: what answers is no kafkalog data port.
    """

    def __init__(self, host: str, port: int, *, connect_timeout_ms: int, request_timeout_ms: int) -> None:
        self.address = format_address(host, port)
        self._request_timeout_ms = request_timeout_ms
        self._buffer = memoryview(bytearray(_BUFFER_SIZE))
        self._start = self._end = 0
        self._closed = False
        self._socket = _connect(host, port, connect_timeout_ms)
        try:
            self._greet()
            # Blocking with the kernel's own timeouts: one system call an operation. Python's timeouts poll before each,
            # and every return from a call may wait 5 ms for the interpreter lock when another thread is busy.
            self._socket.settimeout(None)
            seconds, milliseconds = divmod(request_timeout_ms, 1000)
            limit = struct.pack("@ll", seconds, milliseconds * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except BaseException:
            self._socket.close()
            raise

    def _greet(self) -> None:
        """Hello each way, within what is left of the connect timeout."""
        try:
            self._socket.sendall(hello())
            answer = b""
            while len(answer) < HELLO_SIZE:
                piece = self._socket.recv(HELLO_SIZE - len(answer))
                if not piece:
                    break
                answer += piece
        except TimeoutError:
            reason = "it accepts connections but does not greet as a kafkalog data port"
            raise BrokerUnreachable(address=self.address, reason=reason) from None
        except OSError as error:
            raise BrokerUnreachable(address=self.address, reason=_plain(error)) from None
        if not answer:
            raise BrokerUnreachable(address=self.address, reason="it closed the connection without a greeting")
        if len(answer) < HELLO_SIZE:
            raise ProtocolError(address=self.address, reason="this is not a kafkalog data port")
        check_hello(answer, self.address)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_buffered(self) -> bool:
        """Whether bytes of a further frame have been read already."""
        return self._end > self._start

    def is_quiet(self) -> bool:
        """Whether it is open and nothing has come, as it should be while no answer is awaited."""
        if self.has_buffered:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send pieces one after the other. Raises BrokerUnreachable, RequestTimedOut."""
        try:
            for first in range(0, len(pieces), _PIECES_MAX):
                self._send_all(pieces[first : first + _PIECES_MAX])
        except BlockingIOError:
            raise self._timed_out("a send") from None
        except (OSError, ValueError) as error:
            raise self._gone(error) from None

    def _send_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        total = sum(map(len, pieces))
        sent = self._socket.sendmsg(pieces)
        while sent < total:
            total -= sent
            rest = []
            for piece in pieces:
                if sent >= len(piece):
                    sent -= len(piece)
                else:
                    rest.append(memoryview(piece)[sent:])
                    sent = 0
            pieces = rest
            sent = self._socket.sendmsg(pieces)

    def receive(self) -> Reply:
        """The next frame, waiting for it.

        Raises:
            BrokerUnreachable: the connection ended.
            RequestTimedOut: nothing came for the request timeout.
            ProtocolError: what came is no frame.
            KafkalogError: an error that the broker tells before it closes (TooManyConnections).
        """
        try:
            header_length, body_length = self._frame_lengths()
            self._fill(PREFIX_SIZE + header_length)
            header = self._take_header(header_length)
            return Reply(header, self._receive_body(body_length) if body_length else None)
        except BlockingIOError:
            raise self._timed_out("a request") from None
        except (OSError, ValueError) as error:
            raise self._gone(error) from None

    def receive_some(self) -> list[dataport_pb2.ReplyHeader]:
        """At least one frame's header, and all others that came along whole; for frames without bodies."""
        headers = [self.receive().header]
        while self._end - self._start >= PREFIX_SIZE:
            header_length, body_length = PREFIX.unpack_from(self._buffer, self._start)
            if self._end - self._start < PREFIX_SIZE + header_length or body_length:
                break
            headers.append(self._take_header(header_length))
        return headers

    def _frame_lengths(self) -> tuple[int, int]:
        self._fill(PREFIX_SIZE)
        header_length, body_length = PREFIX.unpack_from(self._buffer, self._start)
        if header_length > HEADER_LENGTH_MAX or body_length > BODY_LENGTH_MAX:
            reason = f"a frame with a header of {header_length} and a body of {body_length} bytes is none of ours"
            raise ProtocolError(address=self.address, reason=reason)
        return header_length, body_length

    def _take_header(self, header_length: int) -> dataport_pb2.ReplyHeader:
        start = self._start + PREFIX_SIZE
        self._start = start + header_length
        data = bytes(self._buffer[start : self._start])
        try:
            return dataport_pb2.ReplyHeader.FromString(data)
        except Exception:  # protobuf's DecodeError, whose module is an implementation's own
            raise ProtocolError(address=self.address, reason="a frame's header is not readable") from None

    def _fill(self, wanted: int) -> None:
        """Have at least that many bytes in the buffer, reading what there is."""
        while self._end - self._start < wanted:
            if self._start:
                left = self._end - self._start
                self._buffer[:left] = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, left
            if wanted > len(self._buffer):
                larger = memoryview(bytearray(wanted))
                larger[: self._end] = self._buffer[: self._end]
                self._buffer = larger
            count = self._socket.recv_into(self._buffer[self._end :])
            if not count:
                raise ConnectionResetError("it closed the connection")
            self._end += count

    def _receive_body(self, length: int) -> memoryview:
        import pyarrow as pa  # not for clients that only append; its pool hands the same pages out again

        body = memoryview(pa.allocate_buffer(length)).cast("B")
        got = min(length, self._end - self._start)
        body[:got] = self._buffer[self._start : self._start + got]
        self._start += got
        while got < length:
            count = self._socket.recv_into(body[got:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("it closed the connection")
            got += count
        return body

    def _timed_out(self, what: str) -> RequestTimedOut:
        return RequestTimedOut(what=what, address=self.address, timeout_ms=self._request_timeout_ms)

    def _gone(self, error: Exception) -> BrokerUnreachable:
        reason = "the connection was closed here" if self._closed else _plain(error)
        return BrokerUnreachable(address=self.address, reason=reason)

    def close(self) -> None:
        """End it; a thread that waits in `send` or `receive` gets BrokerUnreachable."""
        if not self._closed:
            self._closed = True
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._socket.close()

    def shut_down(self) -> None:
        """Make both directions fail, and leave the descriptor to the thread that reads: it is not used for another."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def abandon(self) -> None:
        """Let go of it in a forked child, without a sign to the broker: the parent goes on using it."""
        self._closed = True
        self._socket.close()


def _connect(host: str, port: int, timeout_ms: int) -> socket.socket:
    address = format_address(host, port)
    try:
        connected = socket.create_connection((host, port), timeout_ms / 1000)
    except TimeoutError:
        raise BrokerUnreachable(address=address, reason=f"it did not accept within {timeout_ms} ms") from None
    except (OSError, UnicodeError) as error:
        raise BrokerUnreachable(address=address, reason=_plain(error)) from None
    try:
        tune(connected)
    except OSError as error:  # reset before we came to it
        connected.close()
        raise BrokerUnreachable(address=address, reason=_plain(error)) from None
    return connected


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error) or type(error).__name__


# --- gRPC ----------------------------------------------------------------------------------------------------------


class PendingCall:
    """A call of `ControlConnection.begin`."""

    def __init__(self, future: Any, translated: Callable[[Any], KafkalogError]) -> None:
        self._future = future
        self._translated = translated

    @property
    def is_done(self) -> bool:
        return bool(self._future.done())

    def result(self) -> Any:
        """What the broker answered, of a call that is done. Raises as `ControlConnection.call` does."""
        import grpc

        try:
            return self._future.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if isinstance(error, grpc.FutureCancelledError):
                raise Closed(what="call") from None
            raise self._translated(error) from None

    def cancel(self) -> None:
        self._future.cancel()


class ControlConnection:
    """A broker's gRPC service at one address.

    Args:
        connect_timeout_ms: for the first answer.
    """

    def __init__(self, host: str, port: int, *, connect_timeout_ms: int) -> None:
        self.address = format_address(host, port)
        self._host, self._port = host, port
        self._connect_timeout_ms = connect_timeout_ms
        self._lock = threading.Lock()  # guards all below
        self._channel: grpc.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._calls = 0
        self._is_closed = False
        _controls[id(self)] = self

    def connect(self) -> broker_pb2.ClusterDescription:
        """Connect, and ask who the cluster is.

        Raises:
            BrokerUnreachable: nothing answers there in time.
            ProtocolError: what answers there is no broker's gRPC service.
        """
        started = time.monotonic()
        # A refused or silent address is told by a plain connect, at once and in plain words; gRPC would try again.
        _connect(self._host, self._port, self._connect_timeout_ms).close()
        left_ms = max(1, self._connect_timeout_ms - int((time.monotonic() - started) * 1000))
        try:
            return self.call("DescribeCluster", broker_pb2.DescribeClusterRequest(), left_ms)
        except (BrokerUnreachable, RequestTimedOut, ProtocolError) as error:
            self.close()
            raise self._diagnosis(error) from None
        except KafkalogError:  # it is a broker, which is stopping or busy
            self.close()
            raise

    def call(self, method: str, request: Any, timeout_ms: int) -> Any:
        """One call of the service.

        Raises:
            BrokerNotAsked: the connection was closed before the call.
            BrokerUnreachable, RequestTimedOut, ProtocolError: the call did not get through, or no answer came back: the
                broker may have heard it. So it is where the connection is closed during the call.
            KafkalogError: the error that the broker answered with.
        """
        import grpc

        with self._lock:
            callable = self._method(method)
            self._calls += 1
        try:
            return callable(request, timeout=timeout_ms / 1000)
        except grpc.RpcError as error:
            raise self._translated(method, error, timeout_ms) from None
        except ValueError:  # gRPC's for a closed channel, before it begins a call
            if not self._is_closed:
                raise
            raise self._not_asked() from None  # `close` came since the lock was released
        finally:
            with self._lock:
                self._calls -= 1

    def begin(self, method: str, request: Any, timeout_ms: int, done: Callable[[], None]) -> PendingCall:
        """Begin a call of the service. Raises BrokerNotAsked.

        Args:
            done: called from another thread, once there is a result or the call was cancelled.
        """
        with self._lock:
            future = self._method(method).future(request, timeout=timeout_ms / 1000)
            self._calls += 1

        def ended(_: Any) -> None:
            with self._lock:
                self._calls -= 1
            done()

        future.add_done_callback(ended)
        return PendingCall(future, lambda error: self._translated(method, error, timeout_ms))

    def _method(self, name: str) -> Any:
        """Lock held: a method of the service, on a channel that is opened if there is none, or a fork closed it. Raises
        BrokerNotAsked."""
        if self._is_closed:
            raise self._not_asked()
        known = self._methods.get(name)
        if known is None:
            if self._channel is None:
                self._channel = self._new_channel()
            known = self._methods[name] = METHODS[name].on(self._channel)
        return known

    def _not_asked(self) -> BrokerNotAsked:
        return BrokerNotAsked(address=self.address, reason="the connection was closed here")

    def _new_channel(self) -> grpc.Channel:
        import grpc

        options = [
            ("grpc.max_receive_message_length", _RPC_MESSAGE_MAX),
            ("grpc.max_send_message_length", _RPC_MESSAGE_MAX),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ]
        return grpc.insecure_channel(self.address, options)

    def _translated(self, method: str, error: grpc.RpcError, timeout_ms: int) -> KafkalogError:
        import grpc

        for name, value in error.trailing_metadata() or ():
            if name == "kafkalog-error-bin":
                return error_from_wire(dataport_pb2.Error.FromString(value))
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            return BrokerUnreachable(address=self.address, reason=details or "it is not available")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimedOut(what=method, address=self.address, timeout_ms=timeout_ms)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            too_large = _TOO_LARGE.search(details)
            if too_large is None:  # gRPC's own limit of calls at once, of which the broker's code hears nothing
                return BrokerBusy(broker=self.address, reason=details or "it has too many calls")
            size, limit = map(int, too_large.groups())
            return RequestTooLarge(size=size, setting="message limit over gRPC", limit=limit)
        if code == grpc.StatusCode.CANCELLED:
            return BrokerUnreachable(address=self.address, reason="the connection was closed here")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(
                address=self.address, reason=f"this server has no {method}; it is no kafkalog broker, or an older one"
            )
        return InternalError(reason=f"{method} at {self.address}: {code.name} {details}")

    def _diagnosis(self, error: KafkalogError) -> KafkalogError:
        """Why a port that accepts does not answer: perhaps it is a data port, or no broker's at all."""
        if isinstance(error, ProtocolError):
            return error
        try:
            DataConnection(
                self._host, self._port, connect_timeout_ms=min(1000, self._connect_timeout_ms), request_timeout_ms=1000
            ).close()
        except (BrokerUnreachable, ProtocolError):
            pass
        else:
            return ProtocolError(
                address=self.address, reason="this is a broker's data port; bootstrap.servers wants its gRPC port"
            )
        if isinstance(error, RequestTimedOut):
            reason = (
                f"it accepts connections but does not answer within {self._connect_timeout_ms} ms as a kafkalog broker"
            )
        elif _answers_as_grpc(self._host, self._port):
            reason = "its gRPC service closed the connection"
        else:
            reason = "what listens there is no kafkalog broker's gRPC port"
        return BrokerUnreachable(address=self.address, reason=reason)

    def close(self) -> None:
        """End it, with the calls under way; there are no more after that."""
        with self._lock:
            self._is_closed = True
            self._close_channel()

    def _close_channel(self) -> None:
        channel, self._channel, self._methods = self._channel, None, {}
        if channel is not None:
            channel.close()

    def close_if_idle(self) -> bool:
        """Close the channel if there is one, no call uses it, and nobody is about to; whether it was."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._channel is None or self._calls:
                return False
            self._close_channel()
            return True
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Let go of it in a forked child; the channel's threads are not there, so it is neither used nor closed."""
        if self._channel is not None:
            _ABANDONED.append(self._channel)
        self._channel, self._methods = None, {}


_ABANDONED: list[Any] = []  # channels of a parent: destroying one in a child would wait for threads that are not there


def _answers_as_grpc(host: str, port: int) -> bool:
    """Whether a server greets with an HTTP/2 frame."""
    try:
        with _connect(host, port, 1000) as probe:
            probe.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            readable, _, _ = select.select([probe], [], [], 1.0)
            return bool(readable) and probe.recv(2) == _HTTP2_START
    except (OSError, KafkalogError):
        return False


# --- forks ---------------------------------------------------------------------------------------------------------

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_controls: weakref.WeakValueDictionary[int, ControlConnection] = weakref.WeakValueDictionary()


def after_fork(owner: Any) -> None:
    """Have `owner.after_fork_in_child()` called in every forked child, for as long as the owner lives."""
    _owners.add(owner)


def _before_fork() -> None:
    """Close the gRPC channels that no call is under way on; the next call opens another.

    With a channel open, gRPC's fork handlers abort one child in twenty that is to run another program, as when PySpark
    starts Java (`subprocess` with a preexec_fn). Right after the close they make it hang instead.
    """
    controls = [reference() for reference in _controls.valuerefs()]  # a copy: other threads may add to them
    closed = [control.close_if_idle() for control in controls if control is not None]
    if any(closed):
        # gRPC lets go of a channel in a thread of its own and offers nothing to wait for: no event, no callback, no
        # state that can be asked. Without a pause a child hung within 1,000 forks; with 5 ms none did: 20 leave room.
        time.sleep(_CHANNEL_END_SECONDS)


def _in_child() -> None:
    for owner in list(_owners):
        try:
            owner.after_fork_in_child()
        except Exception:  # a defect; the others must not go on with what is their parent's for it
            log.exception("after_fork_failed", owner=type(owner).__name__)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
