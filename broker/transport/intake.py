"""What a connection receives, and the memory for it: a buffer that grows on reservations of the shared budgets.

The buffer has one of three sizes: 32 KiB of its own; 1 MiB while the read-ahead budget has it, which is never waited
for; exactly one large frame, waited for. Who waits holds nothing that others wait for, so all waits end. A large frame
has `send.timeout.ms` and a second for each MB to come; its buffer is given back when others want it, or unused for 5 s.

Knows no requests and no replies; not thread-safe, but for the wake that the budgets call.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from broker.transport.budget import Budgets, Reservation
from broker.transport.receive_buffer import BASE_CAPACITY, Frame, OversizedBody, OversizedHeader, ReceiveBuffer
from kafkalog.clock import Clock
from kafkalog.config import Values
from kafkalog.wire.frames import PREFIX_SIZE

_READ_AHEAD = 1 << 20
_BODY_BYTES_PER_SECOND = 1_000_000
_IDLE_SECONDS = 5.0


class Intake:
    """The receiving side of a connection.

    Args:
        sock: non-blocking.
        wake: called from any thread when a reservation was granted, or is wanted by others: `fit` then.
    """

    def __init__(
        self, sock: socket.socket, settings: Values, clock: Clock, budgets: Budgets, wake: Callable[[], None]
    ) -> None:
        self.received_bytes = 0
        self._sock = sock
        self._clock = clock
        self._budgets = budgets
        self._wake = wake
        self._patience = settings.send_timeout_ms / 1000
        self._buffer = ReceiveBuffer(settings.request_max_bytes)
        self._ahead: Reservation | None = None  # what a buffer of 1 MiB stands on
        self._large: Reservation | None = None  # what a buffer for one large frame stands on, or waits for
        self._frame_deadline: float | None = None
        self._last_received = clock.monotonic()
        self._was_filled = False  # by the last receive: there is probably more
        self._to_discard = 0

    def __len__(self) -> int:
        """Bytes received and not taken."""
        return len(self._buffer)

    @property
    def has_room(self) -> bool:
        """Whether the frame at hand fits; while it does not, there is nothing to receive to."""
        return self._buffer.needed <= self._buffer.capacity

    def receive(self) -> bool:
        """Take in what has arrived; False at the end of the input. Only while it `has_room`."""
        space = self._buffer.space()
        if self._large is not None:
            # No more than the frame at hand: then nothing stands in the way of giving the large buffer back after it.
            space = space[: self._buffer.needed - len(self._buffer)]
        try:
            count = self._sock.recv_into(space)
        except BlockingIOError:
            return True
        self._buffer.received(count)
        self._last_received = self._clock.monotonic()
        self.received_bytes += count
        self._was_filled = count == len(space)
        return count > 0

    def next_frame(self) -> Frame | OversizedBody | OversizedHeader | None:
        """The next whole frame, taken, or None. Its body is a view that is good until `receive` or `fit`."""
        if self._to_discard:
            self._to_discard -= self._buffer.discard(self._to_discard)
            if self._to_discard:
                return None
        frame = self._buffer.next_frame()
        if frame is not None:
            self._frame_deadline = None
        return frame

    def take(self, count: int) -> bytes:
        """The first bytes, taken; there have to be as many."""
        return self._buffer.take(count)

    def drop(self) -> None:
        """Forget all that was received."""
        self._buffer.discard(len(self._buffer))

    def discard(self, count: int) -> None:
        """Forget the next bytes, those that are still to come too."""
        self._give_back_large()  # with a large buffer no more than a frame is received at once
        self._to_discard = count

    @property
    def deadline(self) -> float | None:
        """When to look again: at `is_too_slow`, or to `fit`."""
        if self._frame_deadline is not None:
            return self._frame_deadline
        return self._last_received + _IDLE_SECONDS if self._is_unused() else None

    @property
    def is_too_slow(self) -> bool:
        """Whether a large frame did not come in its time."""
        return self._frame_deadline is not None and self._clock.monotonic() > self._frame_deadline

    def close(self) -> None:
        """Give back every reservation, also one that is waited for, and the memory that stood on it: a connection is
        part of a cycle, which the collector finds late."""
        self.drop()
        self._buffer.resize(0)
        for reservation in (self._ahead, self._large):
            if reservation is not None:
                reservation.release()
        self._ahead = self._large = None

    # --- fitting the buffer ----------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Make room for the frame at hand, or give room back that it does not need."""
        buffer = self._buffer
        if self._large is not None and self._large.granted and len(buffer) >= PREFIX_SIZE:
            fits = _READ_AHEAD < buffer.needed <= self._large.size
            if not fits:  # the next frame is another kind of frame
                self._give_back_large()
            elif self._frame_deadline is None:
                self._expect_frame()
        if not self.has_room:
            self._make_room()
        elif self._was_filled and buffer.capacity < _READ_AHEAD:
            self._read_ahead()
        elif self._is_unused() and self._is_to_go():
            self._give_back_large()
            self._give_back_ahead()

    def _make_room(self) -> None:
        """Get, or wait for, a buffer that the frame at hand fits in."""
        buffer = self._buffer
        if self._large is None:
            if buffer.needed <= _READ_AHEAD and self._read_ahead():
                return
            self._large = self._budgets.bodies.reserve(buffer.needed, self._wake)
        if self._large.granted:
            buffer.resize(buffer.needed)
            if self._ahead is not None:
                self._ahead.release()
                self._ahead = None
            self._expect_frame()

    def _read_ahead(self) -> bool:
        """A buffer of 1 MiB, if that is to be had at once."""
        if self._ahead is None:
            self._ahead = self._budgets.read_ahead.try_reserve(_READ_AHEAD, self._wake)
        if self._ahead is None:
            return False
        self._buffer.resize(_READ_AHEAD)
        return True

    def _expect_frame(self) -> None:
        """Have the frame at hand come within a time, for it holds bytes that others may wait for."""
        patience = self._patience + self._buffer.needed / _BODY_BYTES_PER_SECOND
        self._frame_deadline = self._clock.monotonic() + patience

    def _is_unused(self) -> bool:
        return len(self._buffer) < PREFIX_SIZE and self._buffer.capacity > BASE_CAPACITY

    def _is_to_go(self) -> bool:
        """Whether an unused buffer is to be given back: others want it, or it was of no use for a while."""
        wanted = self._large is not None and self._budgets.bodies.is_wanted
        return wanted or self._clock.monotonic() >= self._last_received + _IDLE_SECONDS

    def _give_back_large(self) -> None:
        if self._large is not None:
            assert len(self._buffer) <= BASE_CAPACITY, "more than the frame at hand was received"
            self._buffer.resize(BASE_CAPACITY)
            self._large.release()
            self._large = self._frame_deadline = None
            self._was_filled = False

    def _give_back_ahead(self) -> None:
        if self._ahead is not None:
            self._buffer.resize(BASE_CAPACITY)
            self._ahead.release()
            self._ahead = None
            self._was_filled = False
