"""One connection of the data port: frames in, replies in order, slices out by sendfile. One thread, one poll.

    receive -> parse every whole frame -> append all appends of one wake-up at once -> answer what is due, in order -> poll

The poll is over the socket and an eventfd: appends, flushes, the budget and `stop` wake it. Appends are written when they
are parsed, so they never wait for earlier acks; a fetch is looked up when its turn to be answered comes. A fetch that
waits for data is answered at once when anything queues behind it.

Limits: a body over `request.max.bytes` gets RequestTooLarge and is read and dropped, up to four times the limit; a longer
one, or a frame header over 1 MiB, or one that cannot be parsed, closes the connection after the error. A body above 64 KiB
is read only once its bytes are reserved, and has 30 s (`send.timeout.ms`) and a second for each MB to come. Under acks=0
any error closes the connection, after the replies before it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable

from broker.replica.catalog import Catalog
from broker.replica.partition import Partition
from broker.requests import append as appends
from broker.requests import fetch as fetches
from broker.transport.budget import Budget, Reservation
from broker.transport.receive_buffer import BASE_CAPACITY, Frame, OversizedBody, OversizedHeader, ReceiveBuffer
from kafkalog.clock import Clock
from kafkalog.config import Values
from kafkalog.errors import InternalError, InvalidRequest, KafkalogError, ProtocolError, RequestTooLarge
from kafkalog.log import get_logger
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_GROWN_CAPACITY = 1 << 20
_PENDING_MAX = 10_000
_CALLS_AT_ONCE = 1000
_HELLO_SECONDS = 10.0
_LINGER_SECONDS = 2.0
_ACK_TIMEOUT_MS = 30_000
_DRAIN_FACTOR = 4
_BODY_BYTES_PER_SECOND = 1_000_000
_IDLE_BUFFER_SECONDS = 5.0


class _Ack:
    """An append that is written, and whose ack may have to wait for a flush."""

    __slots__ = ("call", "correlation_id", "deadline")

    def __init__(self, correlation_id: int, call: appends.Call, deadline: float) -> None:
        self.correlation_id = correlation_id
        self.call = call
        self.deadline = deadline


class _Fetch:
    """A fetch that is not answered yet; its deadline counts from when it came."""

    __slots__ = ("correlation_id", "deadline", "request")

    def __init__(self, correlation_id: int, request: pb.FetchRequest, deadline: float) -> None:
        self.correlation_id = correlation_id
        self.request = request
        self.deadline = deadline


class _Refusal:
    """An error for a request as a whole; `fatal`: the connection ends after it. Without a reply under acks=0."""

    __slots__ = ("correlation_id", "error", "fatal", "silent")

    def __init__(self, correlation_id: int, error: KafkalogError, fatal: bool = False, silent: bool = False) -> None:
        self.correlation_id = correlation_id
        self.error = error
        self.fatal = fatal
        self.silent = silent


class _Gone(Exception):
    """The connection cannot go on: the peer is gone, too slow or not one of ours."""


class Connection:
    """A client's connection.

    Args:
        sock: accepted, non-blocking; closed at the end.
        on_end: called from this connection's thread when it has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        catalog: Catalog,
        settings: Values,
        clock: Clock,
        budget: Budget,
        on_end: Callable[[Connection], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._sock = sock
        self._peer = peer
        self._catalog = catalog
        self._settings = settings
        self._clock = clock
        self._budget = budget
        self._on_end = on_end
        self._send_timeout = settings.send_timeout_ms / 1000
        self._buffer = ReceiveBuffer(settings.request_max_bytes)
        self._reservation: Reservation | None = None
        self._body_deadline: float | None = None
        self._pending: deque[_Ack | _Fetch | _Refusal] = deque()
        self._registered: list[Partition] = []
        self._out: list[bytes] = []
        self._to_discard = 0
        self._last_request = clock.monotonic()
        self._end_of_input = False  # the peer sends no more, or we read no more: answer what is pending, then end
        self._stopping = False
        self._wake_lock = threading.Lock()  # guards _wake_fd against a wake after its close
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._poller.register(sock, select.POLLIN)
        self._reading = True
        self._ack = pb.ReplyHeader()  # reused: building one anew for every ack costs 4 us, setting four fields 0.8
        self._acked = self._ack.append.partitions.add()
        self._thread = threading.Thread(target=self._run, name=f"dataport-{peer}", daemon=True)

    # --- what others call ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what was received whole, then end."""
        self._stopping = True
        self.wake()

    def cut(self) -> None:
        """End at once, whatever it is doing."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.wake()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def wake(self) -> None:
        """Have the connection look again; from any thread."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._greet():
                self._serve()
            self._linger()
        except _Gone as gone:
            log.debug("connection_ended", peer=self._peer, reason=str(gone))
        except OSError as error:
            log.debug("connection_ended", peer=self._peer, reason=error.strerror or str(error))
        except Exception:
            log.exception("connection_failed", peer=self._peer)
        finally:
            self.dispose()

    def dispose(self) -> None:
        """Give back everything the connection holds."""
        self._unregister()
        self._pending.clear()
        if self._reservation is not None:
            self._reservation.release()
        self._sock.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._on_end(self)

    def _greet(self) -> bool:
        """Exchange hellos; whether the client speaks this version."""
        deadline = self._clock.monotonic() + _HELLO_SECONDS
        while len(self._buffer) < frames.HELLO_SIZE:
            if self._stopping:
                return False
            if self._clock.monotonic() > deadline:
                raise _Gone("no hello in time")
            self._poll(deadline)
            self._receive()
            if self._end_of_input:
                raise _Gone("closed before its hello")
        view = self._buffer.take(frames.HELLO_SIZE)
        try:
            frames.check_hello(view, self._peer)
        except ProtocolError as error:
            log.info("hello_refused", peer=self._peer, reason=str(error))
            if view.startswith(frames.HELLO_MAGIC):
                self._send(frames.hello())
            return False
        self._send(frames.hello())
        return True

    def _serve(self) -> None:
        while True:
            self._take_frames()
            if self._stopping:
                self._end_of_input = True
            self._answer()
            if self._end_of_input and not self._pending:
                return
            self._fit_buffer()
            self._poll(self._next_deadline())
            self._check_deadlines()
            self._receive()

    # --- receiving -------------------------------------------------------------------------------------------------

    def _poll(self, deadline: float | None) -> None:
        """Wait for input, a wake or a deadline."""
        wants = not self._end_of_input and len(self._pending) < _PENDING_MAX and self._has_room()
        if wants != self._reading:
            # Not reading, only the peer's going away is of interest, and it is reported unasked (POLLHUP).
            self._poller.modify(self._sock, select.POLLIN if wants else 0)
            self._reading = wants
        timeout_ms = None if deadline is None else max(0.0, deadline - self._clock.monotonic()) * 1000 + 1
        for fd, events in self._poller.poll(timeout_ms):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif events & (select.POLLERR | select.POLLHUP):
                if not self._reading or events & select.POLLERR:
                    raise _Gone("the peer has closed the connection")

    def _has_room(self) -> bool:
        return self._buffer.needed <= self._buffer.capacity

    def _receive(self) -> None:
        """Take in what has arrived, if there is room for it."""
        if not self._reading:
            return
        space = self._buffer.space()
        try:
            count = self._sock.recv_into(space)
        except BlockingIOError:
            return
        if count == 0:
            self._end_of_input = True
            return
        self._buffer.received(count)
        if count == len(space) and self._buffer.capacity < _GROWN_CAPACITY:
            self._grow(_GROWN_CAPACITY)

    def _grow(self, capacity: int) -> bool:
        """A larger buffer, if the budget has the bytes at once."""
        reservation = self._budget.try_reserve(capacity, self.wake)
        if reservation is None:
            return False
        self._replace_reservation(reservation)
        self._buffer.resize(capacity)
        return True

    def _replace_reservation(self, reservation: Reservation | None) -> None:
        if self._reservation is not None:
            self._reservation.release()
        self._reservation = reservation

    def _fit_buffer(self) -> None:
        """Larger when the next frame needs it (once the budget grants it), small again when others wait for bytes."""
        buffer = self._buffer
        if self._reservation is not None and not self._reservation.granted:
            return  # asked for already
        if not self._has_room():
            if buffer.needed <= _GROWN_CAPACITY and self._grow(_GROWN_CAPACITY):
                return
            # What the old buffer stood on is given back first: two that hold and wait for more would wait for ever.
            if buffer.capacity > BASE_CAPACITY and len(buffer) <= BASE_CAPACITY:
                buffer.resize(BASE_CAPACITY)
                self._replace_reservation(None)
            ...
