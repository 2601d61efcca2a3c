"""Connections between simulated processes. Each way keeps the order of its messages, as TCP does.

A way that is blocked delivers late, what was sent before and meanwhile. A connection that is cut loses the answers, and
all requests on their way but the first few, which are executed late. Messages are bytes, or what a test makes of them.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from kafkalog.errors import BrokerUnreachable, RequestTimedOut
from tests.simulation.scheduler import Event, Process, Scheduler

_BUFFERED_SECONDS = 3.0
"""Up to so long after a cut, what has arrived is still executed."""
_SLOW_SECONDS = 0.3


class Network:
    """All connections.

    Attributes:
        blocked_until: by source and target, until when the way between them delivers nothing.
        slow_until: by source and target, until when it is slow.
        latency_seconds: of a way, on the average.
        numbers: of connections, in the order in which they are made.
    """

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self.scheduler = scheduler
        self.chance = chance
        self.blocked_until: dict[tuple[str, str], float] = {}
        self.slow_until: dict[tuple[str, str], float] = {}
        self.latency_seconds = 0.0003
        self.connections: list[Connection] = []
        self.numbers = itertools.count()

    def block(self, source: str, target: str, seconds: float) -> None:
        self.blocked_until[source, target] = self.scheduler.now + seconds

    def heal(self) -> None:
        self.blocked_until.clear()
        self.slow_until.clear()

    def drop(self, process: Process) -> None:
        """Cut all connections of a process that has ended."""
        for connection in [each for each in self.connections if process in (each.source, each.target)]:
            connection.cut()

    def arrival(self, source: str, target: str) -> float:
        """When a message that is sent now arrives."""
        way = 0.0001 + self.chance.expovariate(1 / self.latency_seconds)
        if self.slow_until.get((source, target), 0.0) > self.scheduler.now:
            way += self.chance.random() * _SLOW_SECONDS
        return max(self.scheduler.now, self.blocked_until.get((source, target), 0.0)) + way

    def connect(self, source: Process, target: Process | None, serve: Callable[[Connection], object]) -> Connection:
        """Within a fiber of `source`. Raises BrokerUnreachable.

        Args:
            serve: called in a new fiber of the target.
        """
        self.scheduler.sleep(0.0002)
        name = "nobody" if target is None else target.name
        blocked = max(self.blocked_until.get(way, 0.0) for way in ((source.name, name), (name, source.name)))
        if target is None or target.is_dead or blocked > self.scheduler.now:
            if blocked > self.scheduler.now:
                self.scheduler.sleep(min(1.0, blocked - self.scheduler.now))
            raise BrokerUnreachable(address=name, reason="the simulated network")
        connection = Connection(self, source, target)
        self.connections.append(connection)
        self.scheduler.spawn(target, f"connection-of-{source.name}", lambda: serve(connection))
        return connection


class Connection:
    """A connection; its source sends requests, its target answers."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self.network = network
        self.number = next(network.numbers)
        self.source = source
        self.target = target
        self.is_up = True
        self.has_news = Event(network.scheduler)
        """An answer has come, or the connection was cut."""
        self.has_requests = Event(network.scheduler)
        self.requests: deque[Any] = deque()  # arrived
        self.answers: deque[Any] = deque()
        self.is_over = False
        """No further request will arrive."""
        self._on_the_way: deque[Any] = deque()
        self._arrives_at = self._answered_at = 0.0

    def send(self, request: Any) -> None:
        """Raises BrokerUnreachable."""
        if not self.is_up:
            raise BrokerUnreachable(address=self.target.name, reason="the connection was cut")
        entry = [request]  # by identity
        self._on_the_way.append(entry)
        self._arrives_at = max(self._arrives_at, self.network.arrival(self.source.name, self.target.name))
        self._after(self._arrives_at, lambda: self._arrived(entry), "request")

    def _after(self, at: float, call: Callable[[], object], what: str) -> None:
        scheduler = self.network.scheduler
        scheduler.after(at - scheduler.now, call, f"{self.source.name}>{self.target.name}/{what}")

    def _arrived(self, entry: list[Any]) -> None:
        if self._on_the_way and self._on_the_way[0] is entry:
            self._on_the_way.popleft()
            self.requests.append(entry[0])
            self.has_requests.set()

    def answer(self, answer: Any) -> None:
        """By the target."""
        self._answered_at = max(self._answered_at, self.network.arrival(self.target.name, self.source.name))
        self._after(self._answered_at, lambda: self._answered(answer), "answer")

    def _answered(self, answer: Any) -> None:
        if self.is_up:
            self.answers.append(answer)
            self.has_news.set()

    def receive(self, seconds: float) -> Any:
        """By the source: the next answer. Raises BrokerUnreachable, RequestTimedOut."""
        until = self.network.scheduler.now + seconds
        while not self.answers:
            if not self.is_up:
                raise BrokerUnreachable(address=self.target.name, reason="the connection was cut")
            self.has_news.clear()
            left = until - self.network.scheduler.now
            if left <= 0 or not self.has_news.wait(left):
                raise RequestTimedOut(what="a request", address=self.target.name, timeout_ms=round(seconds * 1000))
        return self.answers.popleft()

    def cut(self) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self.network.connections.remove(self)
        kept = self.network.chance.randint(0, len(self._on_the_way))
        self._on_the_way = deque(list(self._on_the_way)[:kept])
        at = self.network.scheduler.now
        for entry in self._on_the_way:
            at += self.network.chance.random() * _BUFFERED_SECONDS
            self._after(at, lambda entry=entry: self._arrived(entry), "late request")  # type: ignore[misc]
        self._after(at, self._end, "end")
        self.has_news.set()

    def _end(self) -> None:
        self.is_over = True
        self.has_requests.set()

    def next_request(self, seconds: float | None = None) -> Any:
        """By the target: the next request; None: there is none in that time, or the connection `is_over`."""
        until = None if seconds is None else self.network.scheduler.now + seconds
        while not self.requests and not self.is_over:
            self.has_requests.clear()
            left = None if until is None else until - self.network.scheduler.now
            if left is not None and left <= 0:
                return None
            self.has_requests.wait(left)
        return self.requests.popleft() if self.requests else None
