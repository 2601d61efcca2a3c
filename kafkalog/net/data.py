"""A client's connection to a broker's data port: frames out and in (`wire/frames.py`), one system call for many.

Failures are raised as errors of `errors.py`. A connection belongs to the process that made it: a forked child must
leave it alone (`abandon`). Knows no topics, requests or retries.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kafkalog.errors import BrokerUnreachable, ProtocolError, RequestTimedOut
from kafkalog.net.local import connect_here
from kafkalog.net.tcp import connect, format_address, plain_reason
from kafkalog.wire import dataport_pb2
from kafkalog.wire.frames import HEADER_LENGTH_MAX, HELLO_SIZE, PREFIX, PREFIX_SIZE, check_hello, hello

_PIECES_MAX = 1024  # IOV_MAX
_BUFFER_SIZE = 64 * 1024
BODY_LENGTH_MAX = (1 << 31) - 1


class Reply(NamedTuple):
    """A frame from the broker. `body` is writable memory of its own, None if the frame has none."""

    header: dataport_pb2.ReplyHeader
    body: memoryview | None


class DataConnection:
    """A connection to a broker's data port, after the hello each way. One thread may send while another receives.

    Attributes:
        received_bytes: how many have been read since the greeting.
        protocol: the version that both sides speak.
        broker_epoch: of the broker's registration, as the user knew it.

    Args:
        connect_timeout_ms: for connecting and greeting together.
        request_timeout_ms: after which a send or receive without progress fails.
        broker_epoch: 0: not known.
        of_replica: this is a broker that comes to copy.

    Raises:
        BrokerUnreachable: nothing answers there in time.
        ProtocolError: the peer is not a kafkalog data port, or has no protocol version in common.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_ms: int,
        request_timeout_ms: int,
        broker_epoch: int = 0,
        of_replica: bool = False,
    ) -> None:
        self.address = format_address(host, port)
        self.broker_epoch = broker_epoch
        self._request_timeout_ms = request_timeout_ms
        self._buffer = memoryview(bytearray(_BUFFER_SIZE))
        self._start = self._end = 0
        self.received_bytes = 0
        self._header: dataport_pb2.ReplyHeader | None = None  # of the frame whose body is being received
        self._body = memoryview(b"")
        self._body_end = 0  # that much of it has come
        self._closed = False
        self._socket = connect_here(host, port, connect_timeout_ms) or connect(host, port, connect_timeout_ms)
        try:
            self.protocol = self._greet(hello(of_replica=of_replica))
            # Blocking with the kernel's timeouts: one system call for each operation. Python's timeouts add a poll, and
            # every return from a call may wait 5 ms for the interpreter lock when another thread is busy.
            self._socket.settimeout(None)
            seconds, milliseconds = divmod(request_timeout_ms, 1000)
            limit = struct.pack("@ll", seconds, milliseconds * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except BaseException:
            self._socket.close()
            raise

    def _greet(self, own_hello: bytes) -> int:
        """Hello each way, within what is left of the connect timeout. Returns the version that both speak."""
        try:
            self._socket.sendall(own_hello)
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
            raise BrokerUnreachable(address=self.address, reason=plain_reason(error)) from None
        if not answer:
            raise BrokerUnreachable(address=self.address, reason="it closed the connection without a greeting")
        if len(answer) < HELLO_SIZE:
            raise ProtocolError(address=self.address, reason="this is not a kafkalog data port")
        return check_hello(answer, self.address)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_buffered(self) -> bool:
        """Whether bytes of a further frame have been read already, perhaps not all of it."""
        return self._end > self._start

    def is_quiet(self) -> bool:
        """Whether it is open and nothing has arrived, as expected while no answer is awaited."""
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
        """Send pieces in order. Raises BrokerUnreachable, RequestTimedOut."""
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
        """Wait for the next frame.

        Raises:
            BrokerUnreachable: the connection ended.
            RequestTimedOut: nothing arrived within the request timeout.
            ProtocolError: the bytes are not a frame.
            KafkalogError: an error that the broker sends before it closes (TooManyConnections).
        """
        reply = self._receive(0)
        if reply is None:
            raise self._timed_out("a request")
        return reply

    def receive_now(self) -> Reply | None:
        """The next frame if it has arrived whole; None otherwise. What has arrived of it is kept for the next call.

        Raises:
            KafkalogError: as `receive`, but not RequestTimedOut.
        """
        return self._receive(socket.MSG_DONTWAIT)

    def _receive(self, flag: int) -> Reply | None:
        """The next frame; None if there is no more to read: at once with MSG_DONTWAIT, else after the request
        timeout."""
        try:
            if self._header is None:
                header_length, body_length = self._frame_lengths(flag)
                self._fill(PREFIX_SIZE + header_length, flag)
                header = self._take_header(header_length)
                if not body_length:
                    return Reply(header, None)
                self._begin_body(body_length)
                self._header = header
            self._fill_body(flag or socket.MSG_WAITALL)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise self._gone(error) from None
        reply = Reply(self._header, self._body)
        self._header, self._body, self._body_end = None, memoryview(b""), 0
        return reply

    def receive_some(self) -> list[dataport_pb2.ReplyHeader]:
        """Wait for a frame; returns its header, and those of all others that arrived whole. For frames without
        bodies."""
        headers = [self.receive().header]
        while self._end - self._start >= PREFIX_SIZE:
            header_length, body_length = PREFIX.unpack_from(self._buffer, self._start)
            if self._end - self._start < PREFIX_SIZE + header_length or body_length:
                break
            headers.append(self._take_header(header_length))
        return headers

    def _frame_lengths(self, flag: int) -> tuple[int, int]:
        self._fill(PREFIX_SIZE, flag)
        header_length, body_length = PREFIX.unpack_from(self._buffer, self._start)
        if header_length > HEADER_LENGTH_MAX or body_length > BODY_LENGTH_MAX:
            reason = f"a frame with a header of {header_length} and a body of {body_length} bytes is not valid here"
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

    def _fill(self, wanted: int, flag: int) -> None:
        """Read until at least that many bytes are in the buffer."""
        while self._end - self._start < wanted:
            if self._start:
                left = self._end - self._start
                self._buffer[:left] = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, left
            if wanted > len(self._buffer):
                larger = memoryview(bytearray(wanted))
                larger[: self._end] = self._buffer[: self._end]
                self._buffer = larger
            count = self._socket.recv_into(self._buffer[self._end :], 0, flag)
            if not count:
                raise ConnectionResetError("it closed the connection")
            self._end += count
            self.received_bytes += count

    def _begin_body(self, length: int) -> None:
        """Allocate a body, and copy what is in the buffer of it."""
        import pyarrow as pa  # clients that only append do not need it; its pool reuses pages

        self._body = memoryview(pa.allocate_buffer(length)).cast("B")
        self._body_end = min(length, self._end - self._start)
        self._body[: self._body_end] = self._buffer[self._start : self._start + self._body_end]
        self._start += self._body_end

    def _fill_body(self, flag: int) -> None:
        while self._body_end < len(self._body):
            count = self._socket.recv_into(self._body[self._body_end :], 0, flag)
            if not count:
                raise ConnectionResetError("it closed the connection")
            self._body_end += count
            self.received_bytes += count

    def _timed_out(self, what: str) -> RequestTimedOut:
        return RequestTimedOut(what=what, address=self.address, timeout_ms=self._request_timeout_ms)

    def _gone(self, error: Exception) -> BrokerUnreachable:
        reason = "the connection was closed here" if self._closed else plain_reason(error)
        return BrokerUnreachable(address=self.address, reason=reason)

    def close(self) -> None:
        """Close the connection; a thread that waits in `send` or `receive` gets BrokerUnreachable."""
        if not self._closed:
            self._closed = True
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._socket.close()

    def shut_down(self) -> None:
        """Make both directions fail; the reading thread closes the descriptor, so that it is not reused before."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def abandon(self) -> None:
        """Close the descriptor in a forked child, without a sign to the broker: the parent continues to use the
        connection."""
        self._closed = True
        self._socket.close()
