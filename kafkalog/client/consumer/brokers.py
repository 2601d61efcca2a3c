"""A member's connections to brokers: of its own, so that a slow call of another thread delays no renewal. Each has the
brokers in another order, so members spread over them; any broker can answer for a group."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from kafkalog.client.cluster import Cluster
from kafkalog.client.config import ConsumerSettings
from kafkalog.errors import BrokerUnreachable, Closed, RetriableError

PAUSE_SECONDS = 0.1


class Brokers:
    """The connections, which are made when first asked for and anew when no broker answers.

    Args:
        cluster: for the addresses of all brokers.
        is_ending: whether no new connections are to be made.

    Attributes:
        stop_at: when the last call has to be answered, by `time.monotonic`.
    """

    def __init__(self, cluster: Cluster, settings: ConsumerSettings, is_ending: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._is_ending = is_ending
        self._connections: Cluster | None = None
        self.stop_at: float | None = None

    def connect(self) -> None:
        """Raises KafkalogError."""
        if self._connections is None:
            self._connections = self._new_connections()

    def close(self) -> None:
        """Safe to call twice. Calls that wait raise Closed."""
        if self._connections is not None:
            self._connections.close()

    def ask(self, method: str, request: Any, seconds: float | None = None) -> Any:
        """Call any broker, each once; for a quarter of the session timeout unless told otherwise. Raises
        KafkalogError."""
        connections = self._connections
        if connections is None:
            raise Closed(what="consumer")
        if seconds is None:
            seconds = self._settings.session_timeout_ms / 4000
        if self.stop_at is not None:  # a broker that hangs leaves time for another
            seconds = min(seconds, max(PAUSE_SECONDS, (self.stop_at - time.monotonic()) / 2))
        try:
            return connections.call(method, request, patient=False, timeout_ms=int(seconds * 1000) + 1)
        except BrokerUnreachable:
            if self._connections is connections and not self._is_ending():
                self._connections = self._new_connections()  # brokers may have come that it does not know
                connections.close()
            raise
        except Closed:
            if self._connections is connections:
                raise
            reason = "it is asked by another connection now"
            raise BrokerUnreachable(address=connections.address, reason=reason) from None

    def retrying(self, attempt: Callable[[], object], until: float) -> None:
        """Call `attempt`, again and again until it succeeds, fails for good, or it is so late. Raises KafkalogError."""
        while True:
            try:
                attempt()
                return
            except RetriableError:
                if time.monotonic() >= until:
                    raise
            if self._connections is None:
                raise Closed(what="consumer")
            self._connections.pause(min(PAUSE_SECONDS, max(0.0, until - time.monotonic())))

    def _new_connections(self) -> Cluster:
        self._cluster.describe(patient=False)
        addresses = self._cluster.addresses()
        random.shuffle(addresses)
        settings = self._settings
        patience_ms = max(200, settings.session_timeout_ms // 4)
        return Cluster(
            addresses,
            connect_timeout_ms=min(settings.connect_timeout_ms, patience_ms),
            request_timeout_ms=patience_ms,
        )
