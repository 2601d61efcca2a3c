"""One connection of the data port: frames in, replies in order, slices out by sendfile. One thread, one poll.

    receive -> parse every whole frame -> append all of one wake-up at once -> answer what is due, in order -> poll

The poll is over the socket and an eventfd: appends, flushes, the pool and `stop` wake it. Appends are written when
they are parsed, so they never wait for earlier acks; a fetch is looked up when its turn to be answered comes. A fetch
that waits for data is answered at once when another request queues behind it.

A body over `request.max.bytes` gets RequestTooLarge and is read and dropped, up to four times the limit. A longer body,
a frame header over 1 MiB or one that cannot be parsed closes the connection after the error. Under acks=0 any error
closes the connection, after the replies before it. `intake.py` bounds the memory for received bytes.
`_PENDING_BYTES_MAX` bounds the memory of requests from their parsing to their answers: beyond it nothing is received,
the bytes stay in the socket, and TCP slows the peer down.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from google.protobuf.message import DecodeError

from broker.config import BrokerSettings
from broker.replica.host import Host
from broker.requests import append as appends
from broker.requests import fetch as fetches
from broker.requests import staging, waits
from broker.requests.replicate import ReplicaSession
from broker.storage.segment import FileSlice
from broker.transport.intake import Frame, Intake, OversizedBody, OversizedHeader
from broker.transport.memory_pool import MemoryPools
from kafkalog.clock import Clock
from kafkalog.errors import InternalError, InvalidRequest, KafkalogError, ProtocolError, RequestTooLarge
from kafkalog.events import get_logger
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_PENDING_BYTES_MAX = 2 << 20
"""Of the requests that a connection keeps until they are answered, estimated; the last one may go over it. About 1,600
small appends."""
_REQUEST_BYTES = 512
_BYTES_PER_HEADER_BYTE = 2
_BYTES_PER_RESULT = 700
_BYTES_PER_FETCHED = 150
"""What requests hold, rather more than less: 625 bytes a partition of an append with an error each, 85 of a fetch."""
WRITTEN_PARTITIONS_MAX = 1000
FETCHED_PARTITIONS_MAX = 50_000
"""That one request may name. A header of 1 MiB has room for 500,000 that are left empty, each with an error object."""
_CALLS_AT_ONCE = 1000
_HELLO_SECONDS = 10.0
_LINGER_SECONDS = 1.0
_DRAIN_FACTOR = 4
_POLL_MS_MAX = 86_400_000
"""Of one poll: the system counts 2**31 ms and no more, and settings may be any number."""


class _Fetch:
    """A fetch that is not answered yet; its deadline counts from when it came."""

    __slots__ = ("correlation_id", "deadline", "held_bytes", "request")

    def __init__(self, correlation_id: int, request: pb.FetchRequest, deadline: float, held_bytes: int) -> None:
        self.correlation_id = correlation_id
        self.request = request
        self.deadline = deadline
        self.held_bytes = held_bytes


class _ReplicaFetch:
    """A follower's fetch that is not answered yet.

    Attributes:
        request: None once the session has taken in what it says.
    """

    __slots__ = ("correlation_id", "deadline", "held_bytes", "max_bytes", "request")

    def __init__(self, correlation_id: int, request: pb.ReplicaFetchRequest, deadline: float, held_bytes: int) -> None:
        self.correlation_id = correlation_id
        self.request: pb.ReplicaFetchRequest | None = request
        self.max_bytes = request.max_bytes
        self.deadline = deadline
        self.held_bytes = held_bytes


class _Refusal:
    """An error for a request as a whole; `fatal`: the connection ends after it. Without a reply under acks=0."""

    __slots__ = ("correlation_id", "error", "fatal", "held_bytes", "silent")

    def __init__(self, correlation_id: int, error: KafkalogError, fatal: bool = False, silent: bool = False) -> None:
        self.correlation_id = correlation_id
        self.error = error
        self.fatal = fatal
        self.silent = silent
        self.held_bytes = _REQUEST_BYTES


class _Staged:
    """A stage request that was carried out; it is answered once it is acknowledged."""

    __slots__ = ("call", "correlation_id", "deadline", "held_bytes", "reply")

    def __init__(
        self, correlation_id: int, call: staging.StageCall, reply: pb.StageReply, deadline: float, held_bytes: int
    ) -> None:
        self.correlation_id = correlation_id
        self.call = call
        self.reply = reply
        self.deadline = deadline
        self.held_bytes = held_bytes


class _Gone(Exception):
    """The connection cannot continue: the peer has closed it, is too slow, or does not speak this protocol."""


class Connection:
    """A client's connection.

    Args:
        sock: accepted, non-blocking; closed at the end.
        number: larger than those of the connections that were accepted before.
        parse_permits: has an item for each connection that may parse and check at once. Hundreds that wait for the
            interpreter's lock wake up every few milliseconds to request it, and each holds its objects: 900 took 20 s
            and 90 MB more.
        on_end: called from this connection's thread when it has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        peer: str,
        host: Host,
        settings: BrokerSettings,
        clock: Clock,
        pools: MemoryPools,
        parse_permits: SimpleQueue[int],
        on_end: Callable[[Connection], None],
    ) -> None:
        self._served = Counter(requests=0, sendfile_bytes=0)  # no new keys: other threads iterate over it
        self._sock = sock
        self._number = number
        self._peer = peer
        self._host = host
        self._settings = settings
        self._clock = clock
        self._parse_permits = parse_permits
        self._on_end = on_end
        self._intake = Intake(sock, settings, clock, pools, self.wake)
        self._pending: deque[appends.Call | _Fetch | _ReplicaFetch | _Refusal | _Staged] = deque()
        self._followers: ReplicaSession | None = None  # of the broker on the other side, once it fetches as a replica
        self._pending_bytes = 0  # held by _pending, and by appends that are taken and not written yet
        self._waiter = waits.Waiter(self.wake)
        self._kept_back: Frame | OversizedBody | OversizedHeader | None = None  # taken, and not handled yet
        self._out: list[bytes] = []
        self._last_request = clock.monotonic()
        self._end_of_input = False  # the peer sends no more, or we read no more: answer the pending requests, then end
        self._stopping = False
        self._is_cut = False
        self._wake_lock = threading.Lock()  # guards _wake_fd against a wake after its close
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._poller.register(sock, select.POLLIN)
        self._reading = True
        self._readable = False
        self._ack = pb.ReplyHeader()  # reused: building one anew for every ack costs 4 us, setting four fields 0.8
        self._acked = self._ack.append.partitions.add()
        self._thread = threading.Thread(target=self._run, name=f"dataport-{peer}", daemon=True)

    # --- what others call ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Complete the requests that were received whole, then end."""
        self._stopping = True
        self.wake()

    def cut(self) -> None:
        """End at once, whatever it is doing."""
        self._is_cut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.wake()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def wake(self) -> None:
        """Make the connection check again; callable from any thread."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def counters(self) -> dict[str, int]:
        """The connection's counters, by name."""
        return {**self._served, "received_bytes": self._intake.received_bytes}

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
        """Release everything that the connection holds."""
        self._waiter.leave()
        if self._followers is not None:
            self._followers.close()
        self._pending.clear()
        self._kept_back = None
        self._intake.close()
        self._sock.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._on_end(self)

    def _greet(self) -> bool:
        """Exchange hellos; returns whether the client speaks a version that this side speaks."""
        deadline = self._clock.monotonic() + _HELLO_SECONDS
        while len(self._intake) < frames.HELLO_SIZE:
            if self._stopping:
                return False
            if self._clock.monotonic() > deadline:
                raise _Gone("no hello in time")
            self._poll(deadline)
            self._receive()
            if self._end_of_input:
                raise _Gone("closed before its hello")
        hello = self._intake.take(frames.HELLO_SIZE)
        try:
            frames.check_hello(hello, self._peer)
        except ProtocolError as error:
            log.info("hello_refused", peer=self._peer, reason=str(error))
            if hello.startswith((frames.HELLO_MAGIC, frames.REPLICA_MAGIC)):
                self._send(frames.hello())
            return False
        self._send(frames.hello())
        return True

    def _serve(self) -> None:
        while True:
            took_all = self._take_requests()
            if self._stopping:
                self._end_of_input = True
            self._answer()
            if self._end_of_input and not self._pending:
                return
            if not took_all and self._has_room:
                continue  # what is left in the buffer makes no poll return
            self._intake.fit()
            self._poll(self._next_deadline())
            self._check_deadlines()
            self._receive()

    # --- receiving -------------------------------------------------------------------------------------------------

    def _poll(self, deadline: float | None) -> None:
        """Wait for input (unless there is no room or memory for it), a wake or a deadline."""
        wants = not self._end_of_input and self._has_room and self._intake.may_receive
        if wants != self._reading:
            self._poller.register(self._sock, select.POLLIN if wants else 0)
            self._reading = wants
        self._readable = False
        timeout_ms = None if deadline is None else max(0.0, deadline - self._clock.monotonic()) * 1000 + 1
        for fd, events in self._poller.poll(timeout_ms and min(timeout_ms, _POLL_MS_MAX)):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif self._reading:
                self._readable = True
            elif events & select.POLLERR or self._sock.family != socket.AF_UNIX:
                raise _Gone("the peer has closed the connection")
            else:  # a Unix socket reports POLLHUP, again and again, before what the peer sent is read
                self._poller.unregister(self._sock)
        if self._is_cut:  # which a Unix socket does not say
            raise _Gone("it was cut")

    @property
    def _has_room(self) -> bool:
        """Whether more requests may be taken. A single pending fetch does not count: the next request makes it
        answered."""
        return self._pending_bytes < _PENDING_BYTES_MAX or (
            len(self._pending) == 1 and isinstance(self._pending[0], _Fetch | _ReplicaFetch)
        )

    def _receive(self) -> None:
        if self._readable and not self._intake.receive():
            self._end_of_input = True

    def _next_deadline(self) -> float:
        head = self._pending[0] if self._pending else None
        if isinstance(head, appends.Call | _Fetch | _ReplicaFetch | _Staged):
            deadline = head.deadline
        else:
            deadline = self._last_request + self._settings.connections_max_idle_ms / 1000
        intake_deadline = self._intake.deadline
        return deadline if intake_deadline is None else min(deadline, intake_deadline)

    def _check_deadlines(self) -> None:
        if self._intake.is_too_slow:
            raise _Gone("its request came too slowly")
        idle_seconds = self._settings.connections_max_idle_ms / 1000
        if not self._pending and self._clock.monotonic() > self._last_request + idle_seconds:
            raise _Gone("it was idle for connections.max.idle.ms")

    # --- requests --------------------------------------------------------------------------------------------------

    def _take_requests(self) -> bool:
        """Take every whole frame: write the appends, queue the requests to be answered. Returns False if some were
        left.

        Parsing and checking needs a permit, because it uses the processor. Writing holds none, because it waits
        for logs and their disks: when it did, a few producers of one stalled log stopped the whole port.
        """
        is_more = len(self._intake) >= frames.PREFIX_SIZE
        while is_more:
            permit = self._parse_permits.get()
            try:
                write, is_more = self._take_frames()
            finally:
                self._parse_permits.put(permit)
            if write is not None:
                write()
        return len(self._intake) < frames.PREFIX_SIZE or self._has_room

    def _take_frames(self) -> tuple[Callable[[], None] | None, bool]:
        """Take frames up to one that is to be written. Returns a function that writes it, and whether there may be
        more."""
        calls: list[appends.Call] = []
        taken = 0
        write: Callable[[], None] | None = None
        is_more = True
        while write is None:
            frame, self._kept_back = self._kept_back, None
            if frame is None and self._has_room:
                frame = self._intake.next_frame()
            if frame is None:
                is_more = False
                break
            request = self._parse(frame)
            if (
                request is not None
                and isinstance(frame, tuple)
                and request.HasField("append")
                and (named := len(request.append.partitions)) <= WRITTEN_PARTITIONS_MAX
            ):
                call = appends.Call(request.append, frame[1], request.correlation_id)
                held = _REQUEST_BYTES + _BYTES_PER_HEADER_BYTE * len(frame[0]) + _BYTES_PER_RESULT * named
                call.held_bytes = held
                self._pending_bytes += held
                calls.append(call)
                taken += 1
                if len(calls) < _CALLS_AT_ONCE:
                    continue
                break
            if calls:
                self._kept_back = frame  # what it asks for comes after them
                break
            taken += 1
            if request is None:
                self._refuse_stream(frame)
                is_more = False
                break
            write = self._take(request, frame)
        if taken:
            self._last_request = self._clock.monotonic()
            self._served["requests"] += taken
        if calls:
            groups = appends.check(calls, self._host)
            return lambda: self._append(calls, groups), is_more
        return write, is_more

    def _take(
        self, request: pb.RequestHeader, frame: Frame | OversizedBody | OversizedHeader
    ) -> Callable[[], None] | None:
        """Take a request that is no append to be written; returns what writes it, if it is to be written."""
        if isinstance(frame, OversizedBody):
            self._refuse_body(request, frame.body_length)
        elif isinstance(frame, tuple) and request.HasField("stage"):
            return self._staged(request, frame)
        elif isinstance(frame, tuple):
            self._queue(request, len(frame[0]))
        return None

    def _parse(self, frame: Frame | OversizedBody | OversizedHeader) -> pb.RequestHeader | None:
        """The frame's header; None if the rest of the stream cannot be parsed."""
        if isinstance(frame, OversizedHeader):
            return None
        try:
            return pb.RequestHeader.FromString(frame[0] if isinstance(frame, tuple) else frame.header)
        except DecodeError:
            return None

    def _hold(self, held: _Fetch | _ReplicaFetch | _Refusal | _Staged) -> None:
        self._pending.append(held)
        self._pending_bytes += held.held_bytes

    def _queue(self, request: pb.RequestHeader, header_length: int) -> None:
        """Queue a fetch; refuse a request that names too many partitions or is of no known kind."""
        if request.HasField("append"):
            self._refuse_partitions(request, len(request.append.partitions), WRITTEN_PARTITIONS_MAX)
        elif request.HasField("replica_fetch"):
            replica_fetch = request.replica_fetch
            wait_ms = min(replica_fetch.max_wait_ms, self._settings.fetch_max_wait_ms)
            held_bytes = _REQUEST_BYTES + (_BYTES_PER_HEADER_BYTE + 1) * header_length
            deadline = self._clock.monotonic() + wait_ms / 1000
            self._hold(_ReplicaFetch(request.correlation_id, replica_fetch, deadline, held_bytes))
        elif not request.HasField("fetch"):
            reason = "the frame's header has no request that this broker knows"
            self._hold(_Refusal(request.correlation_id, InvalidRequest(reason=reason)))
        elif (named := len(request.fetch.partitions)) > FETCHED_PARTITIONS_MAX:
            self._refuse_partitions(request, named, FETCHED_PARTITIONS_MAX)
        else:
            wait_ms = min(request.fetch.max_wait_ms, self._settings.fetch_max_wait_ms)
            deadline = self._clock.monotonic() + wait_ms / 1000
            held_bytes = _REQUEST_BYTES + _BYTES_PER_HEADER_BYTE * header_length + _BYTES_PER_FETCHED * named
            self._hold(_Fetch(request.correlation_id, request.fetch, deadline, held_bytes))

    def _refuse_partitions(self, request: pb.RequestHeader, named: int, limit: int) -> None:
        """Refuse a request as a whole that names too many partitions."""
        error = too_many_partitions(str(request.WhichOneof("request")), named, limit)
        silent = request.HasField("append") and request.append.acks == appends.ACKS_NONE
        self._hold(_Refusal(request.correlation_id, error, fatal=silent, silent=silent))
        if silent:
            self._read_no_more()

    def _refuse_stream(self, frame: Frame | OversizedBody | OversizedHeader) -> None:
        """Queue the error that the stream cannot be parsed further, after the replies before it, and read no more."""
        error: KafkalogError = InvalidRequest(reason="the frame's header is not a RequestHeader message")
        if isinstance(frame, OversizedHeader):
            limit = frames.HEADER_LENGTH_MAX
            error = RequestTooLarge(size=frame.header_length, setting="limit of a frame's header", limit=limit)
        self._hold(_Refusal(0, error, fatal=True))
        self._read_no_more()

    def _read_no_more(self) -> None:
        self._end_of_input = True
        self._kept_back = None
        self._intake.drop()

    def _refuse_body(self, request: pb.RequestHeader, body_length: int) -> None:
        limit = self._settings.request_max_bytes
        error = RequestTooLarge(size=body_length, setting="request.max.bytes", limit=limit)
        silent = request.HasField("append") and request.append.acks == appends.ACKS_NONE
        fatal = silent or body_length > _DRAIN_FACTOR * limit
        self._hold(_Refusal(request.correlation_id, error, fatal, silent))
        if fatal:
            self._read_no_more()
        else:
            self._intake.discard(body_length)

    def _append(self, calls: list[appends.Call], groups: appends.Groups) -> None:
        """Write what some append requests bring, and queue their acks."""
        appends.write(calls, groups)
        now = self._clock.monotonic()
        for call in calls:
            if call.acks != appends.ACKS_NONE:
                call.deadline = now + call.timeout_ms / 1000
                self._pending.append(call)
                continue
            self._pending_bytes -= call.held_bytes
            if (error := call.failed()) is not None:
                self._hold(_Refusal(call.correlation_id, error, fatal=True, silent=True))
                self._read_no_more()
                return

    def _staged(self, request: pb.RequestHeader, frame: Frame) -> Callable[[], None] | None:
        """Check what a stage request brings; returns what writes it and queues its answer."""
        header, body = frame
        named = len(request.stage.partitions)
        if named > WRITTEN_PARTITIONS_MAX:
            self._refuse_partitions(request, named, WRITTEN_PARTITIONS_MAX)
            return None
        try:
            call = staging.StageCall(request.stage, body, self._host)
        except KafkalogError as error:
            self._hold(_Refusal(request.correlation_id, error))
            return None

        def write() -> None:
            reply = call.write()
            deadline = self._clock.monotonic() + call.timeout_ms / 1000
            held_bytes = _REQUEST_BYTES + _BYTES_PER_HEADER_BYTE * len(header) + _BYTES_PER_RESULT * named
            self._hold(_Staged(request.correlation_id, call, reply, deadline, held_bytes))

        return write

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Send what is due, in the order of the requests."""
        pending = self._pending
        while pending:
            head = pending[0]
            if isinstance(head, appends.Call):
                done = self._answer_append(head)
            elif isinstance(head, _Fetch):
                done = self._answer_fetch(head)
            elif isinstance(head, _ReplicaFetch):
                done = self._answer_replica_fetch(head)
            elif isinstance(head, _Staged):
                done = self._answer_stage(head)
            else:
                done = self._answer_refusal(head)
            if not done:
                break
            self._pending_bytes -= pending.popleft().held_bytes
        self._flush()

    def _answer_append(self, call: appends.Call) -> bool:
        if call.waits_for and not call.is_acked():
            is_acked = self._waiter.look(call.waiting_at(), call.is_acked)
            if not is_acked and self._clock.monotonic() < call.deadline:
                return False
        result = call.results[0]
        if len(call.results) == 1 and not call.waits_for and type(result) is tuple:
            header, acked = self._ack, self._acked
            header.correlation_id = call.correlation_id
            acked.base_offset, acked.append_timestamp_us, acked.log_start_offset = result
            encoded = header.SerializeToString()
        else:
            reply = appends.ack_reply(call)
            encoded = pb.ReplyHeader(correlation_id=call.correlation_id, append=reply).SerializeToString()
        self._out.append(frames.frame_start(encoded, 0))
        return True

    def _answer_stage(self, staged: _Staged) -> bool:
        call = staged.call
        if not call.is_acked() and not self._waiter.look(call.waiting_at(), call.is_acked):
            if self._clock.monotonic() < staged.deadline:
                return False
            call.give_up()
        header = pb.ReplyHeader(correlation_id=staged.correlation_id, stage=staged.reply).SerializeToString()
        self._out.append(frames.frame_start(header, 0))
        return True

    def _answer_fetch(self, fetch: _Fetch) -> bool:
        request = fetch.request
        limit = self._settings.fetch_max_bytes
        try:
            answer = fetches.fetch(request, self._host, limit)
            if not answer.is_enough(request) and not self._is_urgent(fetch):
                answer.close()
                partitions = waits.hosted(request, self._host)
                found = self._waiter.look(partitions, partial(waits.enough, request, self._host, limit))
                if found is None:
                    return False
                answer = found
        except KafkalogError as error:
            return self._answer_refusal(_Refusal(fetch.correlation_id, error))
        except Exception as error:  # a defect: returned to the client, and logged with its traceback
            log.exception("fetch_failed", peer=self._peer)
            failure = InternalError.of(error)
            return self._answer_refusal(_Refusal(fetch.correlation_id, failure))
        if self._waiter.partitions:
            self._waiter.leave()
        self._send_answer(pb.ReplyHeader(correlation_id=fetch.correlation_id, fetch=answer.reply), answer)
        return True

    def _answer_replica_fetch(self, fetch: _ReplicaFetch) -> bool:
        session = self._followers
        if session is None:
            session = self._followers = ReplicaSession(self._host, self._clock, self._number, self.wake)
        if fetch.request is not None:
            session.take(fetch.request)
            fetch.request = None
        limit = self._settings.fetch_max_bytes
        answer = session.answer(min(fetch.max_bytes or limit, limit), self._is_urgent(fetch))
        if answer is None:
            return False
        self._send_answer(pb.ReplyHeader(correlation_id=fetch.correlation_id, replica_fetch=answer.reply), answer)
        return True

    def _send_answer(self, header: pb.ReplyHeader, answer: fetches.Answer[Any]) -> None:
        """Send a header and the slices of an answer, and close these."""
        try:
            self._out.append(frames.frame_start(header.SerializeToString(), answer.length))
            if answer.slices:
                self._make_way()
                self._flush(more=True)
            for piece in answer.slices:
                if isinstance(piece, FileSlice):
                    self._send_file(piece)
                else:
                    self._send(piece.read())
        finally:
            answer.close()

    def _is_urgent(self, fetch: _Fetch | _ReplicaFetch) -> bool:
        """Whether a fetch is to be answered with what there is: its time is up, or something queues behind it."""
        return (
            len(self._pending) > 1
            or len(self._intake) > 0
            or self._end_of_input
            or self._clock.monotonic() >= fetch.deadline
        )

    def _answer_refusal(self, refusal: _Refusal) -> bool:
        if not refusal.silent:
            error = frames.error_to_wire(refusal.error)
            header = pb.ReplyHeader(correlation_id=refusal.correlation_id, error=error).SerializeToString()
            self._out.append(frames.frame_start(header, 0))
        if refusal.fatal:
            log.info("connection_refused_request", peer=self._peer, reason=str(refusal.error))
        return True

    # --- sending ---------------------------------------------------------------------------------------------------

    def _flush(self, more: bool = False) -> None:
        """Send the replies that have gathered; `more`: a body follows, so let the kernel wait for it."""
        if self._out:
            gathered = b"".join(self._out)
            self._out.clear()
            self._send(gathered, socket.MSG_MORE if more else 0)

    def _send(self, data: bytes, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view, flags) :]
            except BlockingIOError:
                self._wait_writable()

    def _send_file(self, piece: FileSlice) -> None:
        position, left = piece.position, piece.length
        while left:
            try:
                sent = os.sendfile(self._sock.fileno(), piece.fileno(), position, left)
            except BlockingIOError:
                self._wait_writable()
                continue
            except OSError as error:
                if error.errno == errno.EIO:  # of the file: sockets have other errors
                    self._cut_short(piece, error)
                raise
            if sent == 0:
                raise _Gone("the log was cut while it was sent")
            position += sent
            left -= sent
        self._served["sendfile_bytes"] += piece.length

    def _cut_short(self, piece: FileSlice, error: OSError) -> None:
        """An answer that says how long it is cannot be sent whole. The directory is out of service from now on, and
        the client gets that error when it asks again."""
        try:
            piece.failed(error)
        except KafkalogError as failed:
            raise _Gone(str(failed)) from error

    def _make_way(self) -> None:
        """While answers are sent, which takes as long as the peer likes: hold no memory that others wait for."""
        if self._intake.is_in_the_way:
            raise _Gone("its request holds memory that others wait for, and its answers are not read yet")
        self._intake.make_way()

    def _wait_writable(self) -> None:
        """Wait until the peer has read some of its answer."""
        deadline = self._clock.monotonic() + self._settings.send_timeout_ms / 1000
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        poller.register(self._wake_fd, select.POLLIN)
        woken = False
        try:
            while True:
                self._make_way()
                contended_until = self._intake.contended_until
                until = deadline if contended_until is None else min(deadline, contended_until)
                left_ms = max(0.0, until - self._clock.monotonic()) * 1000 + 1
                ready = {fd for fd, _ in poller.poll(min(left_ms, _POLL_MS_MAX))}
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    woken = True
                if self._sock.fileno() in ready:
                    return
                if self._clock.monotonic() > deadline:
                    raise _Gone("it took no byte of its answer for send.timeout.ms")
        finally:
            if woken:
                self.wake()  # it may be for what is looked at after the answer

    def _linger(self) -> None:
        """Let the peer read what was sent: a close with unread input resets the connection and may lose the last
        replies. So say that we are done, and drop what still comes until it closes too, for a moment."""
        self._sock.shutdown(socket.SHUT_WR)
        deadline = self._clock.monotonic() + _LINGER_SECONDS
        scratch = bytearray(16384)
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while (left := deadline - self._clock.monotonic()) > 0:
            poller.poll(left * 1000 + 1)
            try:
                if self._sock.recv_into(scratch) == 0:
                    return
            except BlockingIOError:
                pass


def too_many_partitions(kind: str, named: int, limit: int) -> InvalidRequest:
    """Why a request is refused."""
    return InvalidRequest(reason=f"the {kind} names {named} partitions; the limit for one request is {limit}")
