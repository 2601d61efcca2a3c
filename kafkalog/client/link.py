"""Requests in flight on one connection to a broker's data port. It answers in their order, so the oldest comes next.

Keeps correlation ids and deadlines, and reports the outcome of each request: answered, or lost with the connection. The
user of a link sends, receives and waits, and holds a lock if several threads use it. Knows no topics and no retries.
Used by the producer, the fetchers, the stager and the look-up of timestamps.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

from kafkalog.errors import ProtocolError
from kafkalog.net.data import DataConnection
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire

_CORRELATION_ID_MAX = (1 << 32) - 1  # what the wire holds

_Request = TypeVar("_Request")


class Link(Generic[_Request]):
    """A connection, and the requests in flight on it.

    Args:
        connection: its own; `lose` closes it.
    """

    __slots__ = ("_in_flight", "_next_id", "connection")

    def __init__(self, connection: DataConnection) -> None:
        self.connection = connection
        self._next_id = 1
        self._in_flight: deque[tuple[int, _Request, float]] = deque()

    @property
    def count(self) -> int:
        """How many requests are in flight."""
        return len(self._in_flight)

    @property
    def in_flight(self) -> list[_Request]:
        """The requests without an answer, the oldest first."""
        return [request for _, request, _ in self._in_flight]

    @property
    def deadline(self) -> float:
        """The deadline of the oldest request in flight; infinite without one."""
        return self._in_flight[0][2] if self._in_flight else math.inf

    def next_id(self) -> int:
        """The correlation id of the next request."""
        correlation_id = self._next_id
        self._next_id = correlation_id % _CORRELATION_ID_MAX + 1
        return correlation_id

    def began(self, correlation_id: int, request: _Request, deadline: float = math.inf) -> None:
        """Record a request as in flight, before it is sent: the answer may come at once.

        Args:
            request: any object that identifies what the answer is for.
            deadline: after which it is overdue, by the user's clock.
        """
        self._in_flight.append((correlation_id, request, deadline))

    def request_of(self, reply: pb.ReplyHeader) -> _Request:
        """The request that a reply answers. It stays in flight until `answered`.

        Raises:
            KafkalogError: the broker's error about the whole connection, which it then closes.
            ProtocolError: the oldest request has another id.
        """
        if self._in_flight and self._in_flight[0][0] == reply.correlation_id:
            return self._in_flight[0][1]
        if reply.HasField("error"):
            raise error_from_wire(reply.error)
        raise ProtocolError(address=self.connection.address, reason="an answer to a request that was not made")

    def extend(self, deadline: float) -> None:
        """Set a later deadline for the oldest request, because its answer is arriving."""
        correlation_id, request, _ = self._in_flight[0]
        self._in_flight[0] = correlation_id, request, deadline

    def answered(self) -> None:
        """Remove the oldest request, which is answered, from those in flight."""
        self._in_flight.popleft()

    def forget(self) -> list[_Request]:
        """Forget the requests in flight, because no answer will come, and return them."""
        lost = self.in_flight
        self._in_flight.clear()
        return lost

    def lose(self) -> list[_Request]:
        """Close the connection; returns the requests that were in flight."""
        self.connection.close()
        return self.forget()
