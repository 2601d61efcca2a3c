"""Receives a connection's bytes, into a buffer that grows by reservations from the shared pools.

The buffer has one of three sizes: 32 KiB of its own; 1 MiB while the read-ahead pool has it, which is never waited
for; exactly one large frame. That last one takes no memory until it is written to, and bytes are received into it only
as far as the pool has granted them: a step is asked for when bytes are there to be received, and is as large as they
are. So a peer holds what it has sent, whatever it announced, and while its step is not granted its bytes stay in the
socket. `memory_pool.py` says why all waits end.

A frame that needs more than 32 KiB must arrive within `send.timeout.ms` plus a second for each MB. While another body
has waited for memory for 2 s, a connection that holds some and brought less than 250 kB/s in that time is closed. The
buffer of the last large frame is given back when others want memory, or after 5 s without use. Both rules also hold
while an answer waits for its peer to read.

Knows no requests and no replies. Not thread-safe, except for the wake that the pools call.
"""

from __future__ import annotations

import fcntl
import mmap
import socket
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from broker.config import BrokerSettings
from broker.transport.memory_pool import MemoryPools, Reservation
from kafkalog.clock import Clock
from kafkalog.wire.frames import HEADER_LENGTH_MAX, PREFIX, PREFIX_SIZE

BASE_CAPACITY = 32 * 1024
"""What every connection has: 1000 of them take 32 MB."""
_READ_AHEAD = 1 << 20
_BODY_BYTES_PER_SECOND = 1_000_000
_IDLE_SECONDS = 5.0
_CONTENDED_SECONDS = 2.0
_CONTENDED_BYTES = 500_000
_INT_SIZE = 4


Frame = tuple[bytes, memoryview]
"""A whole frame: header, and body as a view of the buffer. A plain tuple, for it is made for every append."""


@dataclass(frozen=True)
class OversizedHeader:
    """A frame whose header is too long to be read: the rest of the stream cannot be parsed."""

    header_length: int


@dataclass(frozen=True)
class OversizedBody:
    """A frame whose header is here and whose body is larger than allowed; the body's bytes follow."""

    header: bytes
    body_length: int


class ReceiveBuffer:
    """The bytes that were received and not yet taken: filled by recv_into, parsed in place. Not thread-safe.

    Knows the boundaries of frames, no sockets and no memory pools. Returned views are valid until the next `space` or
    `resize`.

    Args:
        body_max: largest body of a frame.
    """

    def __init__(self, body_max: int) -> None:
        self._body_max = body_max
        self._view = memoryview(bytearray(BASE_CAPACITY))
        self._start = 0
        self._end = 0
        self.needed = PREFIX_SIZE
        """Capacity that the next frame needs as a whole, as far as is known."""

    @property
    def capacity(self) -> int:
        return len(self._view)

    def __len__(self) -> int:
        """Bytes received and not taken."""
        return self._end - self._start

    def space(self) -> memoryview:
        """The memory to receive into; empty only if the current frame needs more than the capacity."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and (self._start + self.needed > self.capacity or self._end == self.capacity):
            count = len(self)
            self._view[:count] = self._view[self._start : self._end]
            self._start, self._end = 0, count
        return self._view[self._end :]

    def received(self, count: int) -> None:
        self._end += count

    def resize(self, capacity: int) -> None:
        """Change the capacity and keep the bytes. Memory above the base size returns to the kernel when dropped."""
        count = len(self)
        assert capacity >= count
        # An anonymous map takes no memory until it is written to, and is freed at once: malloc would keep it.
        memory = bytearray(capacity) if capacity <= BASE_CAPACITY else mmap.mmap(-1, capacity)
        view = memoryview(memory)
        view[:count] = self._view[self._start : self._end]
        self._view, self._start, self._end = view, 0, count

    def take(self, count: int) -> bytes:
        """Take the first `count` bytes, as a copy."""
        taken = bytes(self._view[self._start : self._start + count])
        self._start += len(taken)
        return taken

    def discard(self, count: int) -> int:
        """Drop up to so many bytes; returns how many."""
        taken = min(count, len(self))
        self._start += taken
        return taken

    def next_frame(self) -> Frame | OversizedBody | OversizedHeader | None:
        """Take the next frame; None if it is not whole yet (`needed` is then the capacity for it)."""
        view, start = self._view, self._start
        have = self._end - start
        if have < PREFIX_SIZE:
            self.needed = PREFIX_SIZE
            return None
        header_length, body_length = PREFIX.unpack_from(view, start)
        if header_length > HEADER_LENGTH_MAX:
            return OversizedHeader(header_length)
        header_end = PREFIX_SIZE + header_length
        if body_length > self._body_max:
            self.needed = header_end
            if have < header_end:
                return None
            self._start = start + header_end
            return OversizedBody(bytes(view[start + PREFIX_SIZE : start + header_end]), body_length)
        total = header_end + body_length
        self.needed = total
        if have < total:
            return None
        self._start = start + total
        header_start = start + PREFIX_SIZE
        body_start = header_start + header_length
        return bytes(view[header_start:body_start]), view[body_start : body_start + body_length]


class _Contended(NamedTuple):
    """A wait of another body: its reservation, the bytes received at its begin, and when to check."""

    waiter: Reservation
    received_bytes: int
    until: float


class Intake:
    """The receiving side of a connection.

    Args:
        sock: non-blocking.
        wake: called from any thread when a reservation was granted, or is wanted by others; `fit` follows.
    """

    def __init__(
        self, sock: socket.socket, settings: BrokerSettings, clock: Clock, pools: MemoryPools, wake: Callable[[], None]
    ) -> None:
        self.received_bytes = 0
        self._sock = sock
        self._clock = clock
        self._pools = pools
        self._wake = wake
        self._patience = settings.send_timeout_ms / 1000
        self._buffer = ReceiveBuffer(settings.request_max_bytes)
        self._ahead: Reservation | None = None  # for a buffer of 1 MiB
        self._large: Reservation | None = None  # for a buffer of one large frame; granted or waited for
        self._waits_since: float | None = None  # for a step of `_large`
        self._frame_deadline: float | None = None
        self._contended: _Contended | None = None
        self._last_received = clock.monotonic()
        self._was_filled = False  # by the last receive: there is probably more
        self._is_cut = False  # the current frame is not whole, and its size is known
        self._is_kept = False  # the large buffer is that of an earlier frame
        self._to_discard = 0

    def __len__(self) -> int:
        """Bytes received and not taken."""
        return len(self._buffer)

    @property
    def may_receive(self) -> bool:
        """Whether `receive` could receive anything: not while it waits for memory."""
        return self._large is None or not self._large.asked

    def receive(self) -> bool:
        """Receive the bytes that have arrived; returns False at the end of the input. To be called only while it
        `may_receive` and the socket is readable. Requests memory for bytes that do not fit."""
        self._stand_on_large()
        space = self._space()
        if not space:
            self._ask()
            space = self._space()
            if not space:
                return True
        try:
            count = self._sock.recv_into(space)
        except BlockingIOError:
            return True
        self._buffer.received(count)
        self._last_received = self._clock.monotonic()
        self.received_bytes += count
        self._was_filled = count == len(space)
        return count > 0

    def _space(self) -> memoryview:
        """The memory to receive into, as far as it is granted."""
        buffer, large = self._buffer, self._large
        space = buffer.space()
        if large is not None and large.held:
            # No more than the current frame, so that the large buffer can be given back after it.
            space = space[: max(0, min(buffer.needed, large.held) - len(buffer))]
        return space

    def _ask(self) -> None:
        """Get, or begin to wait for, memory for the arrived bytes of a frame that fits no smaller buffer."""
        buffer = self._buffer
        if self._large is None:
            if buffer.needed <= _READ_AHEAD and self._read_ahead():
                return
            self._large = self._pools.bodies.reservation(buffer.needed, self._wake)
            self._is_kept = False
        large = self._large
        received = min(len(buffer) + max(1, self._readable()), buffer.needed)
        if not large.grow(received - large.held):
            self._waits_since = self._clock.monotonic()
        self._stand_on_large()

    def _readable(self) -> int:
        """How many bytes wait in the socket; 0 at the end of the input."""
        return int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(_INT_SIZE)), "little")

    def next_frame(self) -> Frame | OversizedBody | OversizedHeader | None:
        """Take the next whole frame, or None. Its body is a view that is valid until `receive` or `fit`."""
        if self._to_discard:
            self._to_discard -= self._buffer.discard(self._to_discard)
            if self._to_discard:
                self._is_cut = False
                return None
        frame = self._buffer.next_frame()
        self._is_cut = frame is None and len(self._buffer) >= PREFIX_SIZE
        if frame is not None:
            self._frame_deadline = self._contended = None
            self._is_kept = True
        return frame

    def take(self, count: int) -> bytes:
        """Take the first bytes; there must be as many."""
        return self._buffer.take(count)

    def drop(self) -> None:
        """Drop all received bytes."""
        self._buffer.discard(len(self._buffer))

    def discard(self, count: int) -> None:
        """Drop the next bytes, also those that have not arrived yet."""
        self._give_back_large()  # with a large buffer no more than a frame is received at once
        self._to_discard = count

    @property
    def deadline(self) -> float | None:
        """When to check `is_too_slow` again, or to call `fit`."""
        if self._waits_since is not None:
            return None
        if self._frame_deadline is not None:
            return self._frame_deadline if self._contended is None else min(self._frame_deadline, self._contended.until)
        return self._last_received + _IDLE_SECONDS if self._is_unused() else None

    @property
    def is_too_slow(self) -> bool:
        """Whether a large frame did not arrive in its time, or makes little progress while others wait for its
        memory."""
        now = self._clock.monotonic()
        if self._waits_since is not None or self._frame_deadline is None:
            return False
        if now > self._frame_deadline:
            return True
        return self.is_in_the_way

    @property
    def is_in_the_way(self) -> bool:
        """Whether it holds memory that another body waits for, and received hardly anything meanwhile."""
        contended = self._contended
        return (
            contended is not None
            and self._clock.monotonic() >= contended.until
            and self.received_bytes - contended.received_bytes < _CONTENDED_BYTES
            and self._pools.bodies.first_waiting is contended.waiter
        )

    @property
    def contended_until(self) -> float | None:
        """When to check `is_in_the_way` again."""
        return None if self._contended is None else self._contended.until

    def close(self) -> None:
        """Give back every reservation, also one that is waited for, and its memory: a connection is part of a cycle,
        which the collector finds late."""
        self.drop()
        self._buffer.resize(0)
        for reservation in (self._ahead, self._large):
            if reservation is not None:
                reservation.release()
        self._ahead = self._large = None

    # --- fitting the buffer ----------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Make room for the current frame, or give back room that it does not need."""
        buffer = self._buffer
        self._stand_on_large()
        if self._large is not None and self._is_kept and len(buffer) <= BASE_CAPACITY:
            needed, size = buffer.needed, self._large.size
            fits = BASE_CAPACITY < needed <= size and (needed > _READ_AHEAD or size <= _READ_AHEAD)
            if self._pools.bodies.is_wanted or (self._is_cut and not fits):
                self._give_back_large()
        if self._is_cut and buffer.needed > BASE_CAPACITY:
            if self._frame_deadline is None:
                self._expect_frame()
            if self._large is not None:
                self._look_who_waits(self._large)
        if self._large is None and self._was_filled and buffer.capacity < _READ_AHEAD:
            self._read_ahead()
        elif self._is_unused() and self._clock.monotonic() >= self._last_received + _IDLE_SECONDS:
            self._give_back_large()
            self._give_back_ahead()

    def make_way(self) -> None:
        """Give back memory that others want and the current frame does not need, and watch the waits for the rest. To
        be called while nothing is received, because the peer has to read first."""
        self._stand_on_large()
        if self._large is None:
            return
        if self._is_kept and len(self._buffer) <= BASE_CAPACITY and self._pools.bodies.is_wanted:
            self._give_back_large()
        else:
            self._look_who_waits(self._large)

    def _stand_on_large(self) -> None:
        """Receive into the large buffer, once anything of it was granted."""
        large = self._large
        if large is None or large.asked:
            return
        if self._waits_since is not None:
            if self._frame_deadline is not None:
                self._frame_deadline += self._clock.monotonic() - self._waits_since
            self._waits_since = None
        if large.held and self._buffer.capacity < large.size:
            self._buffer.resize(large.size)
            if self._ahead is not None:
                self._ahead.release()
                self._ahead = None

    def _read_ahead(self) -> bool:
        """Get a buffer of 1 MiB, if it is available at once."""
        if self._ahead is None:
            self._ahead = self._pools.read_ahead.try_reserve(_READ_AHEAD, self._wake)
        if self._ahead is None:
            return False
        self._buffer.resize(_READ_AHEAD)
        return True

    def _expect_frame(self) -> None:
        """Set a time limit for the current frame, because it holds memory that others may wait for."""
        patience = self._patience + self._buffer.needed / _BODY_BYTES_PER_SECOND
        self._frame_deadline = self._clock.monotonic() + patience

    def _look_who_waits(self, large: Reservation) -> None:
        """Measure this connection's progress while others wait for memory and it holds some."""
        bodies = self._pools.bodies
        waiter = bodies.first_waiting if large.held and not large.asked and bodies.is_wanted else None
        if waiter is None:
            self._contended = None
            return
        now, contended = self._clock.monotonic(), self._contended
        if contended is None or contended.waiter is not waiter or now >= contended.until:
            self._contended = _Contended(waiter, self.received_bytes, now + _CONTENDED_SECONDS)

    def _is_unused(self) -> bool:
        buffer = self._buffer
        return buffer.capacity > BASE_CAPACITY and max(buffer.needed, len(buffer)) <= BASE_CAPACITY

    def _give_back_large(self) -> None:
        if self._large is not None:
            assert len(self._buffer) <= BASE_CAPACITY, "more than the frame at hand was received"
            self._buffer.resize(BASE_CAPACITY)
            self._large.release()
            self._large = self._waits_since = self._contended = None
            self._was_filled = False

    def _give_back_ahead(self) -> None:
        if self._ahead is not None:
            self._buffer.resize(BASE_CAPACITY)
            self._ahead.release()
            self._ahead = None
            self._was_filled = False
