"""Memory for request bodies, shared by all connections: reserved before a body is read, granted in the order of asking.

Knows no sockets; whoever has to wait is woken. A reservation is never larger than the budget.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

Wake = Callable[[], None]


class Reservation:
    """Some bytes of the budget, once `granted`. Given back by `release`, granted or not."""

    __slots__ = ("_budget", "_wake", "granted", "size")

    def __init__(self, budget: Budget, size: int, wake: Wake) -> None:
        self._budget = budget
        self._wake = wake
        self.size = size
        self.granted = False

    def release(self) -> None:
        self._budget._release(self)


class Budget:
    """Bytes to be shared out.

    Args:
        limit: how many there are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()  # guards all below; wakes are called outside it
        self._used = 0
        self._queue: deque[Reservation] = deque()
        self._holders: set[Reservation] = set()

    @property
    def used(self) -> int:
        return self._used

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits: those who hold bytes that they do not need just now should give them back."""
        return bool(self._queue)

    def try_reserve(self, size: int, wake: Wake) -> Reservation | None:
        """Bytes that are free right now, with nobody waiting for them; else None. `wake`: as in `reserve`."""
        with self._lock:
            if self._queue or self._used + size > self.limit:
                return None
            return self._grant(Reservation(self, size, wake))

    def reserve(self, size: int, wake: Wake) -> Reservation:
        """Bytes, now or later: `wake` is called when they are granted, and while they are held when others wait."""
        assert size <= self.limit
        reservation = Reservation(self, size, wake)
        holders: list[Reservation] = []
        with self._lock:
            if not self._queue and self._used + size <= self.limit:
                self._grant(reservation)
            else:
                self._queue.append(reservation)
                holders = list(self._holders)
        for holder in holders:
            holder._wake()
        return reservation

    def _grant(self, reservation: Reservation) -> Reservation:
        self._used += reservation.size
        self._holders.add(reservation)
        reservation.granted = True
        return reservation

    def _release(self, reservation: Reservation) -> None:
        granted = []
        with self._lock:
            if reservation.granted:
                reservation.granted = False
                self._used -= reservation.size
                self._holders.discard(reservation)
            elif reservation in self._queue:
                self._queue.remove(reservation)
            while self._queue and self._used + self._queue[0].size <= self.limit:
                granted.append(self._grant(self._queue.popleft()))
        for waiter in granted:
            waiter._wake()


class Budgets(NamedTuple):
    """What all connections of a broker share.

    Attributes:
        bodies: for frames too large for a connection's own buffer; waited for.
        read_ahead: for larger buffers, which make many small frames cheaper; taken if free, never waited for.
    """

    bodies: Budget
    read_ahead: Budget
