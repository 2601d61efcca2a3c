"""Copies the leaders' logs to the replicas that follow here: one link, with one connection and one thread, to each
broker that leads any.

    name the positions that are new -> wait for news -> append, cut, take over the high watermark -> ...

The leader's broker keeps the positions (`broker/requests/replicate.py`), so a link of idle partitions exchanges one
small request each half second. A failure of one partition is that partition's, and is tried again later.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable

from broker.replica.leadership import IN_FLIGHT_MAX
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.throttle import Throttle
from broker.staging.staging import StagedCopy
from broker.storage.segment import Hint
from kafkalog.clock import Clock
from kafkalog.errors import (
    BrokerUnreachable,
    CorruptBatch,
    FencedLeaderEpoch,
    KafkalogError,
    NotLeader,
    OffsetOutOfRange,
    ReplicaDiverged,
    RequestTimedOut,
    RetriableError,
    StorageFailed,
    UnknownLeaderEpoch,
)
from kafkalog.events import get_logger
from kafkalog.net.data import DataConnection, Reply
from kafkalog.retry import Backoff
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_WAIT_MS = 500
_MAX_BYTES = 8 << 20
_CONNECT_TIMEOUT_MS = 3_000
_REQUEST_TIMEOUT_MS = 10_000
_SILENCE_SECONDS = 10.0
_MENDED_SECONDS = 0.5
_NAMED_MAX = 5_000  # positions in one request: a frame's header is at most 1 MiB
_SOON = (NotLeader, FencedLeaderEpoch, UnknownLeaderEpoch)
"""One of the two sides has not heard of an election yet."""
_Key = tuple[bytes, int]


class Links:
    """The links of a broker. Thread-safe.

    Args:
        directory_id: the id of its data directory.
        on_diverged: called with a replica that cannot follow any more, and why.
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
        self._lock = threading.Lock()  # guards all below
        self._links: dict[int, _Link] = {}
        self._leaders: dict[_Key, int] = {}
        self._followed: dict[_Key, tuple[Partition, int]] = {}  # and in which epoch
        self._stopped = False

    def follow(self, replica: Partition, throttled_rate: int) -> None:
        """Copy from the leader that the replica has now, and from no other.

        Args:
            throttled_rate: see `PartitionState`; a new one takes effect at once.
        """
        key, leader, followed = (replica.topic_id, replica.number), replica.leader_id, (replica, replica.leader_epoch)
        with self._lock:
            before = self._leaders.get(key, -1)
            has_new_rate = self._throttle.set_rate(key, throttled_rate)
            if self._stopped or (before == leader and self._followed.get(key) == followed):
                if has_new_rate and before in self._links:
                    self._links[before].hurry(key)
                return
            if before not in (-1, leader):
                self._links[before].leave(key)
            if leader < 0 or leader == self._broker_id:
                self._leaders.pop(key, None)
                return
            self._leaders[key], self._followed[key] = leader, followed
            link = self._links.get(leader)
            if link is None:
                link = self._links[leader] = _Link(
                    leader,
                    self._broker_id,
                    self._directory_id,
                    self._metadata,
                    self._clock,
                    self._throttle,
                    self._on_diverged,
                )
                link.start()
        link.follow(key, replica)

    def leave(self, key: _Key) -> None:
        """Copy this partition no longer."""
        with self._lock:
            leader = self._leaders.pop(key, -1)
            self._followed.pop(key, None)
            self._throttle.set_rate(key, 0)
            if leader >= 0:
                self._links[leader].leave(key)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            links, self._links = self._links, {}
            self._leaders.clear()
        for link in links.values():
            link.stop()
        for link in links.values():
            link.join()

    @property
    def fetched_bytes(self) -> int:
        """Since the start."""
        return sum(link.fetched_bytes for link in list(self._links.values()))


class _Link:
    def __init__(
        self,
        leader_id: int,
        broker_id: int,
        directory_id: str,
        metadata: Metadata,
        clock: Clock,
        throttle: Throttle,
        on_diverged: Callable[[Partition, KafkalogError], object],
    ) -> None:
        self.fetched_bytes = 0
        self._leader_id = leader_id
        self._broker_id = broker_id
        self._directory_id = directory_id
        self._metadata = metadata
        self._clock = clock
        self._throttle = throttle
        self._on_diverged = on_diverged
        self._changed = threading.Condition()  # guards the following
        self._replicas: dict[_Key, Partition] = {}
        self._due: dict[_Key, float] = {}  # when it is to be named in a request
        self._left: set[_Key] = set()
        self._stopping = False
        self._connection: DataConnection | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reasons: dict[_Key, str] = {}  # of failures, each logged once
        self._hints: dict[_Key, Hint] = {}
        self._damaged: set[_Key] = set()  # what the leader sent last fails its checks
        self._thread = threading.Thread(target=self._run, name=f"replica-link-{leader_id}", daemon=True)

    # --- what others call ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def follow(self, key: _Key, replica: Partition) -> None:
        with self._changed:
            self._replicas[key] = replica
            self._due[key] = 0.0
            self._left.discard(key)
            self._wake()

    def hurry(self, key: _Key) -> None:
        """Name a partition's position now, if that waits for its time."""
        with self._changed:
            if key in self._due:
                self._due[key] = 0.0
                self._wake()

    def leave(self, key: _Key) -> None:
        with self._changed:
            if self._replicas.pop(key, None) is not None:
                self._due.pop(key, None)
                self._left.add(key)
                self._wake()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            connection = self._connection
            self._wake()
        if connection is not None:
            connection.shut_down()

    def join(self) -> None:
        self._thread.join()

    def _wake(self) -> None:
        """Lock held."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
        self._changed.notify_all()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._replicas or self._stopping)
                    if self._stopping:
                        return
                try:
                    self._connect()
                    backoff.reset()
                    self._exchange()
                except KafkalogError as error:
                    if self._stopping:
                        return
                    log.info("replica_link_interrupted", leader=self._leader_id, reason=str(error))
                except Exception:  # a defect: the followers go on after a pause
                    log.exception("replica_link_failed", leader=self._leader_id)
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
        broker = self._metadata.brokers.get(self._leader_id)
        if broker is None:
            raise BrokerUnreachable(address=f"broker {self._leader_id}", reason="it is not registered")
        connection = DataConnection(
            broker.host,
            broker.data_port,
            connect_timeout_ms=_CONNECT_TIMEOUT_MS,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
        )
        with self._changed:
            self._connection = connection
            self._left.clear()
            self._due = dict.fromkeys(self._replicas, 0.0)  # the other side knows nothing of this connection
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
        in_flight = correlation_id = 0
        while not self._stopping:
            wait = None
            if in_flight < IN_FLIGHT_MAX:
                # First: if a log is lost, it is left before the broker is registered anew, so no request says of it
                # that it belongs to the new registration.
                registration = self._registration()
                positions, wait = self._take_due()
                if positions or not in_flight:
                    correlation_id += 1
                    self._send(connection, correlation_id, registration, positions)
                    in_flight += 1
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
            self._take_in(connection.receive())
            in_flight -= 1

    def _take_due(self) -> tuple[list[pb.ReplicaPosition], float | None]:
        """The positions that are to be named now, and in how many seconds there will be more."""
        now = self._clock.monotonic()
        with self._changed:
            left = [pb.ReplicaPosition(topic_id=key[0], partition=key[1], leaves=True) for key in self._left]
            self._left.clear()
            keys = [key for key, at in self._due.items() if at <= now][:_NAMED_MAX]
            due = {key: self._replicas[key] for key in keys}
            for key in keys:
                del self._due[key]
            wait = min(self._due.values(), default=None)
        named = [position for key, replica in due.items() if (position := self._position(key, replica)) is not None]
        return left + named, None if wait is None else max(0.0, wait - now)

    def _position(self, key: _Key, replica: Partition) -> pb.ReplicaPosition | None:
        try:
            at = replica.position()
        except KafkalogError as error:  # closed; the host opens it again, or not
            self._failed(key, error, 1.0)
            return None
        if at.leader_id != self._leader_id:
            return None
        position = pb.ReplicaPosition(
            topic_id=key[0],
            partition=key[1],
            leader_epoch=at.epoch,
            end_offset=at.end_offset,
            last_epoch=at.last_epoch,
            staged=[pb.StagedFile(**each._asdict()) for each in at.staged],
            is_damaged=key in self._damaged,
        )
        self._damaged.discard(key)
        hint = self._hints.pop(key, None)
        if hint is not None:
            position.hint.segment_base_offset, position.hint.position = hint
        return position

    def _registration(self) -> int:
        own = self._metadata.brokers.get(self._broker_id)
        return -1 if own is None else own.epoch

    def _send(
        self,
        connection: DataConnection,
        correlation_id: int,
        registration: int,
        positions: Iterable[pb.ReplicaPosition],
    ) -> None:
        request = pb.ReplicaFetchRequest(
            broker_id=self._broker_id,
            registration=registration,
            directory=self._directory_id,
            max_wait_ms=_WAIT_MS,
            max_bytes=_MAX_BYTES,
            partitions=positions,
        )
        header = pb.RequestHeader(correlation_id=correlation_id, replica_fetch=request)
        connection.send([frames.frame_start(header.SerializeToString(), 0)])

    # --- answers -----------------------------------------------------------------------------------------------------

    def _take_in(self, reply: Reply) -> None:
        header, body = reply
        if header.HasField("error"):
            raise frames.error_from_wire(header.error)
        start = 0
        for news in header.replica_fetch.partitions:
            length = news.length + sum(piece.length for piece in news.pieces)
            data = memoryview(b"") if body is None else body[start : start + length]
            start += length
            key = news.topic_id, news.partition
            with self._changed:
                replica = self._replicas.get(key)
            if replica is None:
                continue
            try:
                self._take_news(key, replica, news, data)
            except RetriableError as error:
                self._failed(key, error, 0.1 if isinstance(error, _SOON) else 1.0)
            except CorruptBatch as error:  # the leader repairs it from another replica
                self._damaged.add(key)
                self._failed(key, error, _MENDED_SECONDS)
            except KafkalogError as error:
                self._failed(key, error, 5.0)
            else:
                self._reasons.pop(key, None)
        self.fetched_bytes += start

    def _take_news(self, key: _Key, replica: Partition, news: pb.ReplicaNews, data: memoryview) -> None:
        epoch = news.leader_epoch
        if news.HasField("error"):
            error = frames.error_from_wire(news.error)
            if not isinstance(error, OffsetOutOfRange):
                raise error
            replica.begin_anew(error.facts["start_offset"], replica.position().epoch)
        elif news.diverges:
            try:
                replica.truncate_as_follower(news.agreed_epoch, news.agreed_end_offset, epoch)
            except ReplicaDiverged as error:
                self.leave(key)
                self._on_diverged(replica, error)
                raise
        else:
            if news.length:
                replica.append_as_follower(data[: news.length], epoch)
                self._hints[key] = Hint(news.slice.segment_base_offset, news.slice.position + news.length)
            if news.names_staged:
                replica.keep_only_staged([StagedCopy(each.number, each.salt, each.size) for each in news.staged], epoch)
            start = news.length
            for piece in news.pieces:
                replica.copy_staged(piece.number, piece.position, data[start : start + piece.length], epoch)
                start += piece.length
            replica.watermark_is(news.high_watermark, news.log_start_offset, epoch)
            if not data and not news.names_staged:
                return
        self._name(key, self._throttle.pause(key, len(data), self._clock.monotonic()) if news.is_throttled else 0.0)

    def _name(self, key: _Key, after_seconds: float) -> None:
        """Name a partition's position in a request, after so long."""
        with self._changed:
            if key in self._replicas:
                self._due[key] = self._clock.monotonic() + after_seconds if after_seconds else 0.0

    def _failed(self, key: _Key, error: KafkalogError, after_seconds: float) -> None:
        """A partition is tried again after so long. Each reason is logged once."""
        with self._changed:
            replica = self._replicas.get(key)
        if replica is not None and not isinstance(error, StorageFailed) and self._reasons.get(key) != str(error):
            self._reasons[key] = str(error)
            log.info("replica_not_fetched", partition=replica.label, leader=self._leader_id, reason=str(error))
        self._name(key, after_seconds)
