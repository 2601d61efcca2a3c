"""Copies the leaders' logs to the replicas that follow here: one link, with one connection and one thread, to each
broker that leads any.

    name the positions that are new -> wait for news -> append, cut, take over the high watermark -> ...

The leader's broker keeps the positions (`broker/requests/replicate.py`), so a link of idle partitions exchanges one
small request each half second. What is said, and what follows from the answers, is in `fetcher.py`.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

from broker.replica.fetcher import Key, ReplicaFetcher
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.throttle import Throttle
from kafkalog.clock import Clock
from kafkalog.errors import BrokerUnreachable, KafkalogError, RequestTimedOut
from kafkalog.events import get_logger
from kafkalog.net.data import DataConnection
from kafkalog.retry import Backoff
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_CONNECT_TIMEOUT_MS = 3_000
_REQUEST_TIMEOUT_MS = 10_000
_SILENCE_SECONDS = 10.0


class Link(Protocol):
    """What exchanges a fetcher's requests and answers with the leader's broker."""

    def start(self) -> None: ...

    def wake(self) -> None:
        """The fetcher may have another request. Called by any thread."""

    def stop(self) -> None:
        """Begin to end."""

    def join(self) -> None:
        """Wait for the end."""


class Links:
    """The links of a broker. Thread-safe.

    Args:
        directory_id: the id of its data directory.
        on_diverged: called with a replica that cannot follow any more, and why.

    Attributes:
        new_link: makes the link for a fetcher.
    """

    def __init__(
        self,
        broker_id: int,
        directory_id: str,
        metadata: Metadata,
        clock: Clock,
        on_diverged: Callable[[Partition, KafkalogError], object],
    ) -> None:
        self._broker_id = broker_id
        self._directory_id = directory_id
        self._metadata = metadata
        self._clock = clock
        self._on_diverged = on_diverged
        self._throttle = Throttle()
        self.new_link: Callable[[ReplicaFetcher], Link] = lambda fetcher: _Link(fetcher, metadata, clock)
        self._lock = threading.Lock()  # guards all below
        self._links: dict[int, tuple[ReplicaFetcher, Link]] = {}
        self._leaders: dict[Key, int] = {}
        self._followed: dict[Key, tuple[Partition, int]] = {}  # and in which epoch
        self._stopped = False

    def follow(self, replica: Partition, throttled_rate: int) -> None:
        """Copy from the leader that the replica has now, and from no other.

        Args:
            throttled_rate: see `PartitionState`; a new one takes effect at once.
        """
        key, leader, followed = (
            (replica.topic_id, replica.number),
            replica.role.leader_id,
            (replica, replica.role.epoch),
        )
        with self._lock:
            before = self._leaders.get(key, -1)
            has_new_rate = self._throttle.set_rate(key, throttled_rate)
            if self._stopped or (before == leader and self._followed.get(key) == followed):
                if has_new_rate and before in self._links:
                    fetcher, link = self._links[before]
                    if fetcher.hurry(key):
                        link.wake()
                return
            if before not in (-1, leader):
                self._leave(before, key)
            if leader < 0 or leader == self._broker_id:
                self._leaders.pop(key, None)
                return
            self._leaders[key], self._followed[key] = leader, followed
            if leader not in self._links:
                fetcher = ReplicaFetcher(
                    leader,
                    self._broker_id,
                    self._directory_id,
                    self._metadata,
                    self._clock,
                    self._throttle,
                    self._on_diverged,
                )
                self._links[leader] = fetcher, self.new_link(fetcher)
                self._links[leader][1].start()
            fetcher, link = self._links[leader]
        fetcher.follow(key, replica)
        link.wake()

    def leave(self, key: Key) -> None:
        """Copy this partition no longer."""
        with self._lock:
            leader = self._leaders.pop(key, -1)
            self._followed.pop(key, None)
            self._throttle.set_rate(key, 0)
            if leader >= 0:
                self._leave(leader, key)

    def _leave(self, leader: int, key: Key) -> None:
        fetcher, link = self._links[leader]
        if fetcher.leave(key):
            link.wake()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            links, self._links = self._links, {}
            self._leaders.clear()
        for _, link in links.values():
            link.stop()
        for _, link in links.values():
            link.join()

    @property
    def fetched_bytes(self) -> int:
        """Since the start."""
        return sum(fetcher.fetched_bytes for fetcher, _ in list(self._links.values()))


class _Link:
    def __init__(self, fetcher: ReplicaFetcher, metadata: Metadata, clock: Clock) -> None:
        self._fetcher = fetcher
        self._metadata = metadata
        self._clock = clock
        self._changed = threading.Condition()  # guards the following
        self._stopping = False
        self._connection: DataConnection | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"replica-link-{fetcher.leader_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            connection = self._connection
        self.wake()
        if connection is not None:
            connection.shut_down()

    def join(self) -> None:
        self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        said = ""  # why there is no connection; a leader that stays away is worth one line
        leader_id = self._fetcher.leader_id
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._fetcher.has_replicas or self._stopping)
                    if self._stopping:
                        return
                try:
                    self._connect()
                    backoff.reset()
                    said = ""
                    self._exchange()
                except KafkalogError as error:
                    if self._stopping:
                        return
                    if str(error) != said:
                        said = str(error)
                        log.info("replica_link_interrupted", leader=leader_id, reason=said)
                except Exception:  # a defect: the followers go on after a pause
                    log.exception("replica_link_failed", leader=leader_id)
                finally:
                    self._disconnect()
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, backoff.next())
        finally:
            with self._changed:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _connect(self) -> None:
        """Raises BrokerUnreachable, ProtocolError."""
        leader_id = self._fetcher.leader_id
        broker = self._metadata.brokers.get(leader_id)
        if broker is None:
            raise BrokerUnreachable(address=f"broker {leader_id}", reason="it is not registered")
        connection = DataConnection(
            broker.host,
            broker.data_port,
            connect_timeout_ms=_CONNECT_TIMEOUT_MS,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
            of_replica=True,
        )
        self._fetcher.connected()
        with self._changed:
            self._connection = connection
            if self._stopping:
                connection.shut_down()

    def _disconnect(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self) -> None:
        connection = self._connection
        assert connection is not None
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        correlation_id = 0
        while not self._stopping:
            request, wait = self._fetcher.next_request()
            if request is not None:
                correlation_id += 1
                header = pb.RequestHeader(correlation_id=correlation_id, replica_fetch=request)
                connection.send([frames.frame_start(header.SerializeToString(), 0)])
            if not connection.has_buffered:
                sent_at = self._clock.monotonic()
                ready = {fd for fd, _ in poller.poll((_SILENCE_SECONDS if wait is None else wait) * 1000 + 1)}
                if not ready and self._clock.monotonic() >= sent_at + _SILENCE_SECONDS:
                    raise RequestTimedOut(
                        what="a replica fetch", address=connection.address, timeout_ms=round(_SILENCE_SECONDS * 1000)
                    )
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                if connection.fileno() not in ready:
                    continue
            self._fetcher.take(*connection.receive())
