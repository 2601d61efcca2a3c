"""Memory for request bodies, shared by all connections and taken step by step as the bytes of a body arrive.

Half received bodies must never wait for each other in a circle. A step is granted only if after it the body that lacks
most could still be received whole from the free memory. The oldest unfinished body gets any free memory. So the oldest
one always completes and frees its memory, and then the next is the oldest. Unfinished bodies come before new ones, and
new ones in the order of asking; a small one does not overtake.

Knows no sockets and no clock; waiting users are woken. A reservation is never larger than the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

Wake = Callable[[], None]


class Reservation:
    """A share of the pool that grows up to `size`; `held` bytes of it are granted. Given back by `release`.

    Attributes:
        asked: bytes that it waits for; 0 while it does not wait.
    """

    __slots__ = ("_pool", "_wake", "asked", "held", "size")

    def __init__(self, pool: MemoryPool, size: int, wake: Wake) -> None:
        self._pool = pool
        self._wake = wake
        self.size = size
        self.held = 0
        self.asked = 0

    @property
    def granted(self) -> bool:
        """Whether all of the reservation is held."""
        return self.held == self.size

    def grow(self, count: int) -> bool:
        """Ask for more bytes. Returns False if they are granted later; `wake` is called then."""
        return self._pool._grow(self, count)

    def release(self) -> None:
        """Give back all bytes, and stop waiting."""
        self._pool._release(self)


class MemoryPool:
    """Bytes that are shared by reservations.

    Args:
        limit: the number of bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()  # guards all below; wakes are called outside it
        self._used = 0
        self._holders: set[Reservation] = set()
        self._unfinished: dict[Reservation, None] = {}  # those that hold a part of their size, the oldest first
        self._waiting: dict[Reservation, None] = {}  # in the order of asking

    @property
    def used(self) -> int:
        return self._used

    @property
    def is_wanted(self) -> bool:
        """Whether a reservation waits: holders of bytes that they do not need now should give them back."""
        return bool(self._waiting)

    @property
    def first_waiting(self) -> Reservation | None:
        """The reservation that waits longest for a step."""
        with self._lock:
            return next(iter(self._waiting), None)

    def reservation(self, size: int, wake: Wake) -> Reservation:
        """A reservation that holds nothing yet. `wake` is called when a step that it waited for is granted and, while
        it holds bytes, when others begin to wait."""
        assert size <= self.limit
        return Reservation(self, size, wake)

    def reserve(self, size: int, wake: Wake) -> Reservation:
        """A reservation that is granted whole, now or later."""
        reservation = self.reservation(size, wake)
        if size:
            reservation.grow(size)
        return reservation

    def try_reserve(self, size: int, wake: Wake) -> Reservation | None:
        """A reservation that is granted whole at once, if the bytes are free and none waits; else None."""
        reservation = Reservation(self, size, wake)
        with self._lock:
            if self._waiting or not self._fits(reservation, size):
                return None
            self._grant(reservation, size)
        return reservation

    def _grow(self, reservation: Reservation, count: int) -> bool:
        assert 0 < count <= reservation.size - reservation.held
        assert not reservation.asked
        with self._lock:
            if (reservation.held or not self._waiting) and self._fits(reservation, count):
                self._grant(reservation, count)
                return True
            reservation.asked = count
            self._waiting[reservation] = None
            holders = list(self._holders)
        for holder in holders:
            holder._wake()
        return False

    def _fits(self, reservation: Reservation, count: int) -> bool:
        free = self.limit - self._used - count
        if free < 0:
            return False
        if reservation is next(iter(self._unfinished), None):
            return True
        lacking = max((other.size - other.held for other in self._unfinished if other is not reservation), default=0)
        return free >= max(lacking, reservation.size - reservation.held - count)

    def _grant(self, reservation: Reservation, count: int) -> None:
        self._used += count
        reservation.held += count
        reservation.asked = 0
        self._holders.add(reservation)
        if reservation.held < reservation.size:
            self._unfinished.setdefault(reservation)
        else:
            self._unfinished.pop(reservation, None)

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            self._used -= reservation.held
            reservation.held = reservation.asked = 0
            self._holders.discard(reservation)
            self._unfinished.pop(reservation, None)
            self._waiting.pop(reservation, None)
            granted = self._grant_waiting()
        for waiter in granted:
            waiter._wake()

    def _grant_waiting(self) -> list[Reservation]:
        granted = []
        for unfinished in list(self._unfinished):
            if unfinished.asked and self._fits(unfinished, unfinished.asked):
                granted.append(unfinished)
                self._grant(unfinished, unfinished.asked)
                del self._waiting[unfinished]
        while (waiter := next(iter(self._waiting), None)) is not None:
            if waiter.held or not self._fits(waiter, waiter.asked):
                break
            granted.append(waiter)
            self._grant(waiter, waiter.asked)
            del self._waiting[waiter]
        return granted


class MemoryPools(NamedTuple):
    """The pools that all connections of a broker share.

    Attributes:
        bodies: for frames too large for a connection's own buffer; waited for.
        read_ahead: for larger buffers, which make many small frames cheaper; taken if free, never waited for.
    """

    bodies: MemoryPool
    read_ahead: MemoryPool
