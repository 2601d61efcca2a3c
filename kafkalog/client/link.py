"""Requests in flight on one connection to a broker's data port. It answers in their order, so the oldest comes next.

Keeps correlation ids and deadlines, and says what became of each request: answered, or lost with the connection. Sends
and receives nothing, waits for nothing; whoever uses it does, and holds the lock if several threads do. Knows no topics
and no retries. The producer, the fetcher and the stager sit on it.
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
    """A connection, and what was asked on it.

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
        """That of the oldest request in flight; infinite without one."""
        return self._in_flight[0][2] if self._in_flight else math.inf

    def next_id(self) -> int:
        """The correlation id of the next request."""
        correlation_id = self._next_id
        self._next_id = correlation_id % _CORRELATION_ID_MAX + 1
        return correlation_id

    def sends(self, correlation_id: int, request: _Request, deadline: float = math.inf) -> None:
        """Record a request as in flight, before it is sent: the answer may come at once.

        Args:
            request: any object that identifies what the answer is for.
            deadline: when it is overdue, by the user's clock.
        """
        self._in_flight.append((correlation_id, request, deadline))

    def asked(self, reply: pb.ReplyHeader) -> _Request:
        """The request that a reply answers. It stays in flight until `answered`.

        Raises:
            KafkalogError: what the broker says of the connection as a whole, which it closes then.
            ProtocolError: no such request is the oldest.
        """
        if self._in_flight and self._in_flight[0][0] == reply.correlation_id:
            return self._in_flight[0][1]
        if reply.HasField("error"):
            raise error_from_wire(reply.error)
        raise ProtocolError(address=self.connection.address, reason="an answer to a request that was not made")

    def answered(self) -> None:
        """The oldest request is not in flight any more."""
        self._in_flight.popleft()

    def forget(self) -> list[_Request]:
        """No answer will come; returns the requests that were in flight."""
        lost = self.in_flight
        self._in_flight.clear()
        return lost

    def lose(self) -> list[_Request]:
        """Close the connection; returns the requests that were in flight."""
        self.connection.close()
        return self.forget()
