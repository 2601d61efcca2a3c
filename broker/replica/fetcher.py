"""What the replicas here fetch from one leader's broker: which positions to name when, and what follows from an answer.
Knows no socket, no thread; `follower.py` has these.

A partition is named again after each answer that brought something, and a while after each failure. A failure of one
partition is that partition's. `connected` begins; then requests and answers alternate, at most two requests ahead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from broker.replica.following import Position
from broker.replica.leadership import IN_FLIGHT_MAX
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.throttle import Throttle
from broker.staging.copies import StagedCopy
from broker.storage.segment import Hint
from kafkalog.clock import Clock
from kafkalog.errors import (
    CorruptBatch,
    DiskFull,
    FencedLeaderEpoch,
    KafkalogError,
    NotLeader,
    OffsetOutOfRange,
    ProtocolError,
    ReplicaDiverged,
    RetriableError,
    StorageFailed,
    UnknownLeaderEpoch,
)
from kafkalog.events import get_logger
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames

log = get_logger(__name__)

_WAIT_MS = 500
_MAX_BYTES = 8 << 20
_MENDED_SECONDS = 0.5
_NAMED_MAX = 5_000  # positions in one request: a frame's header is at most 1 MiB
FILES_NAMED_MAX = 10_000  # and files of staged data, of 40 bytes each; more only of one partition
_SOON = (NotLeader, FencedLeaderEpoch, UnknownLeaderEpoch, OffsetOutOfRange)
"""One of the two sides has not heard of an election yet, or the log of an old leader was cut."""
Key = tuple[bytes, int]


class ReplicaFetcher:
    """The fetches from one leader's broker. `follow` and `leave` may be called by any thread, the rest by one.

    Args:
        leader_id: the broker that is fetched from.
        broker_id, directory_id: this broker's, and of its data directory.
        throttle: holds copies for moves of partitions.
        on_diverged: called with a replica that cannot follow any more, and why.

    Attributes:
        fetched_bytes: since the start.
    """

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
        self.leader_id = leader_id
        self._broker_id = broker_id
        self._directory_id = directory_id
        self._metadata = metadata
        self._clock = clock
        self._throttle = throttle
        self._on_diverged = on_diverged
        self._in_flight = 0
        self._lock = threading.Lock()  # guards the following
        self._replicas: dict[Key, Partition] = {}
        self._due: dict[Key, float] = {}  # when it is to be named in a request
        self._left: set[Key] = set()
        self._reasons: dict[Key, str] = {}  # of failures, each logged once
        self._hints: dict[Key, Hint] = {}
        self._damaged: set[Key] = set()  # what the leader sent last fails its checks
        self._not_whole: set[Key] = set()  # whose own damage the leader knows

    # --- what is followed --------------------------------------------------------------------------------------------

    def follow(self, key: Key, replica: Partition) -> None:
        """Name a replica's position as soon as possible."""
        with self._lock:
            self._replicas[key] = replica
            self._due[key] = 0.0

    def leave(self, key: Key) -> bool:
        """Fetch a partition no longer. Returns whether it was fetched."""
        with self._lock:
            if self._replicas.pop(key, None) is None:
                return False
            self._due.pop(key, None)
            self._left.add(key)
            return True

    def hurry(self, key: Key) -> bool:
        """Name a replica's position as soon as possible, if that waits for its time. Returns whether it does."""
        with self._lock:
            waits = key in self._due
            if waits:
                self._due[key] = 0.0
            return waits

    @property
    def has_replicas(self) -> bool:
        return bool(self._replicas)

    # --- requests ----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Begin anew on a connection of which the other side knows nothing yet."""
        with self._lock:
            self._left.clear()
            self._due = dict.fromkeys(self._replicas, 0.0)
            self._in_flight = 0

    def next_request(self) -> tuple[pb.ReplicaFetchRequest | None, float | None]:
        """The request to send now, if there is one, and in how many seconds there may be another one; None: after the
        next answer or `follow`."""
        if self._in_flight >= IN_FLIGHT_MAX:
            return None, None
        # First: if a log is lost, it is left before the broker is registered anew, so no request says of it that it
        # belongs to the new registration. It is left also if another log takes its place at once.
        registration = self._registration()
        positions, wait = self._take_due()
        if not positions and self._in_flight:
            return None, wait
        self._in_flight += 1
        request = pb.ReplicaFetchRequest(
            broker_id=self._broker_id,
            registration=registration,
            directory=self._directory_id,
            max_wait_ms=_WAIT_MS,
            max_bytes=_MAX_BYTES,
            partitions=positions,
        )
        return request, wait

    def _registration(self) -> int:
        """-1 while this broker is not registered: another one may have its id, with an empty disk."""
        own = self._metadata.brokers.get(self._broker_id)
        return -1 if own is None or own.directory != self._directory_id else own.epoch

    def _take_due(self) -> tuple[list[pb.ReplicaPosition], float | None]:
        """The positions that are to be named now, and in how many seconds there will be more."""
        now = self._clock.monotonic()
        with self._lock:
            left = [pb.ReplicaPosition(topic_id=key[0], partition=key[1], leaves=True) for key in self._left]
            self._left.clear()
            for key in [
                key for key in self._not_whole if key not in self._replicas or self._replicas[key].following.is_whole
            ]:
                self._not_whole.discard(key)
                if key in self._replicas:  # repaired: it may join now
                    self._due[key] = 0.0
            keys = [key for key, at in self._due.items() if at <= now][:_NAMED_MAX]
            due = deque((key, self._replicas[key]) for key in keys)
            for key in keys:
                del self._due[key]
        named: list[pb.ReplicaPosition] = []
        files = 0
        while due:
            key, replica = due[0]
            at = self._at(key, replica)
            if at is not None:
                files += len(at.staged)
                if named and files > FILES_NAMED_MAX:
                    break
                named.append(self._position(key, at))
            due.popleft()
        with self._lock:
            for key, _ in due:  # in the next request
                if key in self._replicas:
                    self._due.setdefault(key, 0.0)
            wait = min(self._due.values(), default=None)
        return left + named, None if wait is None else max(0.0, wait - now)

    def _at(self, key: Key, replica: Partition) -> Position | None:
        """Where a replica's copy ends, if this broker is its leader."""
        try:
            at = replica.following.position()
        except KafkalogError as error:  # closed; the host opens it again, or not
            self._failed(key, error, 1.0)
            return None
        return at if at.leader_id == self.leader_id else None

    def _position(self, key: Key, at: Position) -> pb.ReplicaPosition:
        position = pb.ReplicaPosition(
            topic_id=key[0],
            partition=key[1],
            leader_epoch=at.epoch,
            end_offset=at.end_offset,
            last_epoch=at.last_epoch,
            staged=[pb.StagedFile(**each._asdict()) for each in at.staged],
            is_damaged=key in self._damaged,
            has_damage=not at.is_whole,
            needs_producers=at.needs_producers,
        )
        self._damaged.discard(key)
        if not at.is_whole:
            self._not_whole.add(key)
        hint = self._hints.pop(key, None)
        if hint is not None:
            position.hint.segment_base_offset, position.hint.position = hint
        return position

    # --- answers -----------------------------------------------------------------------------------------------------

    def take(self, header: pb.ReplyHeader, body: memoryview | None) -> None:
        """Take in an answer. Raises the error that it has as a whole."""
        self._in_flight -= 1
        if header.HasField("error"):
            raise frames.error_from_wire(header.error)
        start = 0
        for news in header.replica_fetch.partitions:
            length = news.producers_length + news.length + sum(piece.length for piece in news.pieces)
            data = memoryview(b"") if body is None else body[start : start + length]
            start += length
            key = news.topic_id, news.partition
            with self._lock:
                replica = self._replicas.get(key)
            if replica is None:
                continue
            try:
                self._take_news(key, replica, news, data)
            except _SOON as error:
                self._failed(key, error, 0.1)
            except RetriableError as error:
                self._failed(key, error, 1.0)
            except CorruptBatch as error:  # the leader repairs it from another replica
                self._damaged.add(key)
                self._failed(key, error, _MENDED_SECONDS)
            except KafkalogError as error:
                self._failed(key, error, 5.0)
            else:
                self._reasons.pop(key, None)
        self.fetched_bytes += start

    def _take_news(self, key: Key, replica: Partition, news: pb.ReplicaNews, data: memoryview) -> None:
        epoch = news.leader_epoch
        if news.HasField("error"):
            error = frames.error_from_wire(news.error)
            if not isinstance(error, OffsetOutOfRange):
                raise error
            start_offset = error.facts["start_offset"]
            if not replica.following.begin_anew(start_offset, _copy_offset(news, start_offset), epoch):
                raise error
        elif news.diverges:
            copy_offset = _copy_offset(news, news.log_start_offset)
            try:
                replica.following.truncate(
                    news.agreed_epoch, news.agreed_end_offset, news.log_start_offset, copy_offset, epoch
                )
            except ReplicaDiverged as error:
                self.leave(key)
                self._on_diverged(replica, error)
                raise
        elif news.producers_length:
            if not replica.following.take_producers(bytes(data), epoch):
                raise ProtocolError(address=f"broker {self.leader_id}", reason="the state of the producers is damaged")
        else:
            full = self._copy(key, replica, news, data)
            replica.following.watermark_is(news.high_watermark, news.log_start_offset, epoch)
            if full is not None:
                raise full
            if not data and not news.names_staged:
                return
        self._name(key, self._throttle.pause(key, len(data), self._clock.monotonic()) if news.is_throttled else 0.0)

    def _copy(self, key: Key, replica: Partition, news: pb.ReplicaNews, data: memoryview) -> DiskFull | None:
        """Append and stage what has come. Returns the error if there is no room for it: what the leader has dropped is
        dropped here nevertheless, and what it has deleted is deleted, because that may make room."""
        epoch, full = news.leader_epoch, None
        try:
            if news.length:
                replica.following.append(data[: news.length], epoch)
                self._hints[key] = Hint(news.slice.segment_base_offset, news.slice.position + news.length)
        except DiskFull as error:
            full = error
        if news.names_staged:
            staged = [StagedCopy(each.number, each.salt, each.size, each.part) for each in news.staged]
            replica.following.keep_only_staged(staged, epoch)
        try:
            start = news.length
            for piece in () if full else news.pieces:
                came = data[start : start + piece.length]
                replica.following.copy_staged(piece.number, piece.salt, piece.part, piece.position, came, epoch)
                start += piece.length
        except DiskFull as error:
            full = error
        return full

    def _name(self, key: Key, after_seconds: float) -> None:
        """Name a partition's position in a request, after so long."""
        with self._lock:
            if key in self._replicas:
                self._due[key] = self._clock.monotonic() + after_seconds if after_seconds else 0.0

    def _failed(self, key: Key, error: KafkalogError, after_seconds: float) -> None:
        """A partition is tried again after so long. Each reason is logged once."""
        with self._lock:
            replica = self._replicas.get(key)
        if replica is not None and not isinstance(error, StorageFailed) and self._reasons.get(key) != str(error):
            self._reasons[key] = str(error)
            log.info("replica_not_fetched", partition=replica.label, leader=self.leader_id, reason=str(error))
        self._name(key, after_seconds)


def _copy_offset(news: pb.ReplicaNews, start_offset: int) -> int:
    """Where a copy of the leader's log begins. An older leader gives only its start offset."""
    return news.copy_offset if news.HasField("copy_offset") else start_offset
