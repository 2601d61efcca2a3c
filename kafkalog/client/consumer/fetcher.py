"""A consumer's fetching: a connection to each leader, and the batches that have arrived and were not taken.

There is no fetching thread: one thread that waits for records sends the requests and receives the answers, for all
partitions, and wakes the other waiting threads (`driving`). It never waits for a connection or for metadata, because a
hanging broker could delay these for seconds: threads of their own fetch them (`background.py`). The next request is
sent before records are handed out, so that the broker and the kernel's buffers work meanwhile. A partition from which
no records are taken is not fetched beyond its share.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kafkalog.client.background import BackgroundCall, close_result, in_background
from kafkalog.client.cluster import LOOK_SECONDS, NO_LEADER, QUIET_SECONDS, Cluster, longest_pause
from kafkalog.client.complaints import Complaint
from kafkalog.client.config import ConsumerSettings
from kafkalog.client.consumer.partition_fetch import NO_EPOCH, FetchedBatch, PartitionFetch, split_body
from kafkalog.client.link import Link
from kafkalog.errors import (
    DiskFull,
    KafkalogError,
    LeaderNotAvailable,
    LogTruncated,
    OffsetOutOfRange,
    RequestTimedOut,
    RetriableError,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.net.data import DataConnection
from kafkalog.records import TopicPartition
from kafkalog.retry import Retry
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire, frame_start

log = get_logger(__name__)

_LOOK_SECONDS = 5.0
_IN_FLIGHT_MAX = 2
_ANY_BROKER = -2  # key of failures to refresh metadata

_Taken = TypeVar("_Taken")


class Source:
    """One partition being fetched: the next offset, and what has arrived. Guarded by the fetcher's lock.

    Attributes:
        arrived: batches in order, not taken.
        arrived_bytes: of those.
        error: to be raised when `arrived` is used up.
        failure: the last error raised for it, since its last seek.
        asked: the unanswered request for it.
        trouble: set while only this partition cannot be read (no broker has opened its log, or none can); retried.
        doubted_at: when its offset was first past the end of the log, by an answer that is not confirmed yet.
        reset_to: where auto.offset.reset makes it continue after what has arrived; None: no reset is pending. Arrived
            batches before this offset are of the log from before the reset, the others of the one after.
        read_before: the leader epoch in which the log had what was read before the reset; None: not known.
        is_dry: whether its last answer brought nothing: it needs no answer before the others do.
        broker_id, leader_epoch: of its leader, as last reported.
        since: when it was begun. Older metadata does not say that its topic was deleted.
        turn: the number of its last turn to be taken from; 0: it had none.
        turn_bytes: that may still be taken in that turn, as long as there are batches.
    """

    __slots__ = (
        "arrived",
        "arrived_bytes",
        "asked",
        "broker_id",
        "doubted_at",
        "error",
        "failure",
        "is_dry",
        "leader_epoch",
        "read_before",
        "reader",
        "reset_to",
        "since",
        "topic_partition",
        "trouble",
        "turn",
        "turn_bytes",
    )

    def __init__(
        self, topic_partition: TopicPartition, topic_id: bytes, offset: int, last_epoch: int | None = None
    ) -> None:
        self.topic_partition = topic_partition
        self.reader = PartitionFetch(topic_partition, topic_id, offset, last_epoch)
        self.arrived: deque[FetchedBatch] = deque()
        self.arrived_bytes = 0
        self.error: KafkalogError | None = None
        self.failure: KafkalogError | None = None
        self.asked: _Asked | None = None
        self.trouble: _Trouble | None = None
        self.doubted_at: float | None = None
        self.reset_to: int | None = None
        self.read_before: int | None = None
        self.is_dry = False
        self.broker_id = NO_LEADER
        self.leader_epoch = NO_EPOCH
        self.since = time.monotonic()
        self.turn = self.turn_bytes = 0

    def take(self, rows: int, size: int) -> list[FetchedBatch]:
        """Remove and return the next arrived batches: one, and more until there are that many records or bytes, or a
        reset comes."""
        taken: list[FetchedBatch] = []
        arrived, end = self.arrived, self.reset_to
        while arrived and rows > 0 and size > 0:
            if end is not None and taken and arrived[0].start_offset >= end:
                break
            batch = arrived.popleft()
            taken.append(batch)
            length = batch.header.length
            self.arrived_bytes -= length
            self.turn_bytes -= length
            size -= length
            rows -= batch.header.record_count
        return taken

    def put_back(self, batches: Sequence[FetchedBatch]) -> None:
        """Put batches that were taken back to the front, without those that a reset has made another's since."""
        end = self.reset_to
        if end is not None:
            batches = [batch for batch in batches if batch.header.end_offset <= end]
        self.arrived.extendleft(reversed(batches))
        size = sum(batch.header.length for batch in batches)
        self.arrived_bytes += size
        self.turn_bytes += size

    def reset(self, offset: int, last_epoch: int | None = None) -> None:
        """Continue at another offset after what has arrived; `last_epoch` as of `PartitionFetch`. What has arrived from
        there on is of a log that is gone, or is fetched again."""
        if self.reset_to is None:
            self.read_before = self.reader.read_in
        while self.arrived and self.arrived[-1].header.end_offset > offset:
            batch = self.arrived.pop()
            self.arrived_bytes -= batch.header.length
            offset = min(offset, batch.start_offset)
        self.reader.go_to(offset, last_epoch)
        self.reset_to = offset

    def go_to(self, offset: int, last_epoch: int | None = None) -> None:
        """Drop what has arrived, and continue at another offset; `last_epoch` as of `PartitionFetch`."""
        self.arrived.clear()
        self.arrived_bytes = 0
        self.error = self.failure = self.trouble = None
        self.asked = None  # its answer is ignored
        self.reader.go_to(offset, last_epoch)
        self.reset_to = self.doubted_at = None
        self.is_dry = False


class _Asked:
    """An unanswered fetch, and its sources; compared by identity."""

    __slots__ = ("sources",)

    def __init__(self) -> None:
        self.sources: list[Source] = []


class _Trouble:
    """The failures of a broker or a partition: since when (long times without a try do not count), and when to try
    again."""

    __slots__ = ("retry", "retry_at")

    def __init__(self, settings: ConsumerSettings, now: float) -> None:
        self.retry = Retry(settings.backoff(), settings.retry_timeout_ms / 1000, since=now)
        self.retry_at = now

    def forget(self, seconds: float) -> None:
        """Do not count these seconds, because nothing was tried in them."""
        assert self.retry.since is not None
        self.retry.since += seconds

    def tried(self, now: float) -> None:
        """Record a try. Its delay after it was due does not count: its broker was away, or no thread drove."""
        self.forget(now - self.retry_at)
        self.retry_at = now

    def failed(self, now: float, error: KafkalogError) -> bool:
        """Record another failure; returns whether to try again."""
        pause = self.retry.failed(now, longest_pause(error))
        if pause is None:
            return False
        self.retry_at = now + pause
        return True


class Fetcher:
    """Fetches some partitions.

    Args:
        settings: of `ConsumerSettings`.
        restart: called with the lock held when driving was interrupted: sets every source to its next offset.
        begin: begins a call that may take long; its second argument is called when that is done.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        restart: Callable[[], None],
        begin: Callable[[Callable[[], Any], Callable[[Future[Any]], object]], BackgroundCall[Any]] = in_background,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._begin = begin
        self._links: dict[int, Link[_Asked]] = {}  # the driving thread's own, as the next eight
        self._connecting: dict[int, BackgroundCall[DataConnection]] = {}  # by broker; those that nobody has taken yet
        self._refreshing: tuple[float, BackgroundCall[None]] | None = None  # a request of metadata, and since when
        self._troubles: dict[int, _Trouble] = {}
        self._given_up: dict[int, KafkalogError] = {}  # by broker, the error of its sources; until it answers
        self._stale = False
        self._found_error = False  # a source failed for good meanwhile: the thread that waits for it has to check
        self._refreshed_at = -math.inf  # when metadata was last requested
        # By broker, and for partitions by the directory too: a full disk is one complaint for all its partitions.
        self._complaints: dict[tuple[int, object], Complaint] = {}
        self._restart = restart
        self._drive_unfinished = False  # a thread is driving, or was interrupted in it
        self._left_at = time.monotonic()  # when the last thread stopped driving
        self.closed = False
        self._let_go_of = False
        self._on_closed: Callable[[], None] | None = None
        self.sources: list[Source] = []
        self._turns = 0
        self._renew()

    def _renew(self) -> None:
        self.lock = threading.RLock()  # guards `sources`, each of them, and the driver
        self._arrival = threading.Condition(self.lock)
        self._driver: int | None = None  # the thread that drives
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)

    # --- taking

    def next(
        self, among: Callable[[], Sequence[Source]], timeout: float | None, take: Callable[[Source], _Taken]
    ) -> _Taken | None:
        """Wait for a source with records, and return what `take` (called with the lock held) returns for it.

        Args:
            among: returns the wanted sources; called with the lock held, and again when they may have changed.

        Returns:
            None after `timeout` seconds without records, or when closed.

        Raises:
            KafkalogError: of one of these sources that cannot continue; or its broker was unreachable, or it had no
                leader, for retry.timeout.ms.
        """
        end = None if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        first = True
        if self._driver == me:  # it was interrupted while it stopped driving
            self._leave(me)
        while True:
            taken: _Taken | None = None
            try:
                with self.lock:
                    while True:
                        if self.closed:
                            return None
                        if self._drive_unfinished and self._driver is None:
                            self._restart_all()
                        source = self._ready(among())
                        if source is not None:
                            was_full = not self._wants_more(source)
                            taken = take(source)
                            has_room = was_full or not source.arrived
                            if has_room and self._driver is not None and self._wants_more(source):
                                self.wake()  # the driver left it out, and would not check before its next event
                        if self._driver is None and (source is None or self._is_behind()):
                            break
                        if source is not None:
                            return taken
                        left = None if end is None else end - time.monotonic()
                        if left is not None and left <= 0:
                            return None
                        self._arrival.wait(left)
                    if source is None and not first and end is not None and time.monotonic() >= end:
                        return None
                    self._driver, self._drive_unfinished = me, True
                first = False
                self._forget_idle_time()
                self._drive(source is None, end)
                self._drive_unfinished = False
            finally:
                if self._driver == me or self.closed:
                    self._leave(me)
            if source is not None:
                return taken

    def _leave(self, me: int) -> None:
        """Let another thread drive; if the fetcher was closed meanwhile, release everything."""
        with self.lock:
            if self._driver == me:
                self._left_at = time.monotonic()
                self._driver = None
            if self.closed and self._driver is None:
                self._let_go()
            self._arrival.notify_all()

    def _restart_all(self) -> None:
        """Lock held: restart after the driver was interrupted: requests in flight and arrived batches are unknown."""
        for broker_id, link in list(self._links.items()):
            self._drop(broker_id, link)
        for source in self.sources:
            source.asked = None
        self._restart()
        self._drive_unfinished = False

    def _ready(self, sources: Sequence[Source]) -> Source | None:
        """Lock held: a source with records or an error. One has its turn while it has records, at most for
        max.partition.fetch.bytes: another thread may drive, and keep it supplied for ever. Then comes the one whose
        last turn was longest ago. An error is a turn too: its source may fail again at once."""
        longest = None
        for source in sources:
            if source.arrived:
                if source.turn_bytes > 0:
                    return source
            elif source.error is None:
                source.turn_bytes = 0
                continue
            if longest is None or source.turn < longest.turn:
                longest = source
        if longest is None:
            return None
        self._turns += 1
        longest.turn = self._turns
        if not longest.arrived:
            error = longest.error
            assert error is not None
            for each in sources:  # a broker's error is that of all that it leads: it is raised once
                if each.error is error:
                    each.failure, each.error = error, None
            raise error
        longest.turn_bytes = self._settings.max_partition_fetch_bytes
        return longest

    def _is_behind(self) -> bool:
        """Lock held: whether a source wants more and its broker has no request."""
        links = self._links
        for source in self.sources:
            if self._wants_more(source):
                link = links.get(source.broker_id)
                if link is None or not link.count:
                    return True
        return False

    def _wants_more(self, source: Source) -> bool:
        return (
            source.asked is None
            and source.error is None
            and (source.trouble is None or time.monotonic() >= source.trouble.retry_at)
            and source.arrived_bytes * 2 <= self._settings.max_partition_fetch_bytes
        )

    # --- driving: one thread at a time, without the lock except where noted

    def _forget_idle_time(self) -> None:
        """Without a driver nothing was retried: such a time counts at most like the longest pause between two tries.
        For a source's trouble, see `_Trouble.tried`."""
        pause = self._settings.retry_backoff_max_ms / 1000
        uncounted = max(0.0, time.monotonic() - self._left_at - pause)
        for trouble in self._troubles.values():
            trouble.forget(uncounted)

    def _all_troubles(self) -> list[_Trouble]:
        with self.lock:
            of_sources = [source.trouble for source in self.sources if source.trouble is not None]
        return [*self._troubles.values(), *of_sources]

    def _drive(self, wait: bool, end: float | None) -> None:
        """Send the due requests; if `wait`, wait for an answer, a wake, the end, or the next time to check.

        Raises no KafkalogError: a failure is kept as the error of the sources that it concerns, and raised to those who
        read them, whichever thread drives.
        """
        looked_at = time.monotonic()
        self._found_error = False
        self._check_deadlines(looked_at)
        self._ask_all()
        if not wait or self._found_error:
            return
        poller = select.poll()
        poller.register(self._wake_receiver, select.POLLIN)
        by_fd = {}
        # Requests due before were sent, unless no thread wants them now; those must not cause a busy loop.
        until = [trouble.retry_at for trouble in self._all_troubles() if trouble.retry_at > looked_at]
        until.append(looked_at + _LOOK_SECONDS)  # what is wanted depends on the time, too
        if end is not None:
            until.append(end)
        for broker_id, link in list(self._links.items()):
            if link.count:
                if link.connection.has_buffered and self._receive(broker_id, link):
                    return
                by_fd[link.connection.fileno()] = broker_id, link
                poller.register(link.connection.fileno(), select.POLLIN)
                until.append(link.deadline)
                quiet_at = self._quiet_at(link)
                again_at = self._refreshed_at + self._settings.retry_backoff_max_ms / 1000
                until.append(quiet_at if quiet_at > looked_at else max(again_at, looked_at + LOOK_SECONDS))
        events = poller.poll(max(0.0, min(until) - time.monotonic()) * 1000)  # rounds up
        for fd, _ in events:
            if fd == self._wake_receiver.fileno():
                self._drain_wakes()
                continue
            broker_id, link = by_fd[fd]
            if self._links.get(broker_id) is link:  # else it was lost while another's answer was handled
                self._receive(broker_id, link)

    def _ask_all(self) -> None:
        """Send each leader a request for the wanted sources, and refresh metadata if needed."""
        with self.lock:
            sources = [source for source in self.sources if self._wants_more(source)]
        names = {source.topic_partition.topic for source in sources}
        if self._refreshing is not None or self._stale or not all(map(self._cluster.fresh_topic, names)):
            self._refresh()
        wanted: dict[int, list[Source]] = {}
        for source in sources:
            broker_id = self._leader_of(source) if source.error is None else None
            if broker_id is not None:
                wanted.setdefault(broker_id, []).append(source)
        if (self._troubles.keys() | self._connecting.keys()) - wanted.keys():
            self._forget_others()
        for broker_id, some in wanted.items():
            if self._is_paused(broker_id):
                continue
            try:
                link = self._link_to(broker_id)
                if link is None:
                    continue
                # A second request makes the broker answer the first at once: only for sources that may get records by
                # it. Two requests that end each other's wait would go round and round.
                starving = any(not source.arrived and not source.is_dry for source in some)
                if not link.count or (starving and link.count < _IN_FLIGHT_MAX):
                    self._ask(broker_id, link, some)
            except KafkalogError as error:
                self._failed(broker_id, error)

    def _link_to(self, broker_id: int) -> Link[_Asked] | None:
        """The link to a broker; None while connecting. Raises the error if it could not connect."""
        if broker_id in self._links:
            return self._links[broker_id]
        if broker_id not in self._connecting:
            self._connecting[broker_id] = self._begin(partial(self._cluster.connect_data, broker_id), self._on_done)
        if not self._connecting[broker_id].has_ended:
            return None
        link = self._links[broker_id] = Link(self._connecting.pop(broker_id).result())
        return link

    def _on_done(self, _: Future[Any]) -> None:
        self.wake()

    def _forget_others(self) -> None:
        """Forget the retry times of brokers that lead none of the sources, because each would wake the driving thread,
        and new connections to them, because they would be old when such a broker leads again."""
        with self.lock:
            leaders = {source.broker_id for source in self.sources if source.error is None}
        for broker_id in self._troubles.keys() - leaders - {_ANY_BROKER}:
            del self._troubles[broker_id]
        for broker_id in self._connecting.keys() - leaders:
            self._connecting.pop(broker_id).add_done_callback(close_result)

    def _leader_of(self, source: Source) -> int | None:
        """The broker to ask; None while metadata is being fetched, or if there is no leader: then the source or its
        leader is in trouble."""
        partition, topic_id = source.topic_partition, source.reader.topic_id
        topic = self._cluster.known_topic(partition.topic)
        if topic is None:
            if self._refreshing is None and not self._is_paused(_ANY_BROKER):  # metadata is fresh
                source.error = UnknownTopic(topic=partition.topic)
                self._found_error = True
            return None
        if topic.topic_id != topic_id:
            if self._refreshed_at <= source.since:
                self._refresh()
                if self._refreshed_at <= source.since:
                    return None
                return self._leader_of(source)
            source.error = UnknownTopicId(topic_id=f"{topic_id.hex()} ('{partition.topic}')")
            self._found_error = True
            return None
        try:
            broker_id = self._cluster.leader(topic, partition.partition).broker_id
        except LeaderNotAvailable as error:
            source.broker_id = error.facts["broker_id"]
            return self._without_leader(source, error)
        except UnknownPartition as error:  # new, and the metadata is older: it was there when it was assigned
            source.broker_id = NO_LEADER
            return self._without_leader(source, error)
        if source.broker_id != broker_id:
            source.broker_id, source.trouble = broker_id, None
        source.leader_epoch = topic.partitions[partition.partition].leader_epoch
        return broker_id

    def _without_leader(self, source: Source, error: KafkalogError) -> int | None:
        """The metadata has no leader for a source. Refresh it, if it is older than the time at which this try was due.
        A log that no broker has opened, or a partition that is not known yet, is the partition's trouble; an absent
        broker is the trouble of all its partitions."""
        unopened = source.broker_id == NO_LEADER
        trouble = source.trouble if unopened else self._troubles.get(source.broker_id)
        if trouble is not None:
            now = time.monotonic()
            if now < trouble.retry_at:
                return None
            if self._refreshed_at < trouble.retry_at and not self._is_paused(_ANY_BROKER):
                self._refresh()
                if self._refreshing is not None:
                    return None
                if self._refreshed_at >= trouble.retry_at:
                    return self._leader_of(source)
            if unopened:
                trouble.tried(now)
        if unopened:
            with self.lock:
                self._source_failed(source, error)
        else:
            self._failed(source.broker_id, error)
        return None

    def _refresh(self) -> None:
        """Request metadata, or handle the answer. Does nothing while the answer is awaited, or during a pause."""
        try:
            if self._refreshing is None:
                if self._is_paused(_ANY_BROKER):
                    return
                with self.lock:
                    names = {source.topic_partition.topic for source in self.sources}
                begun_at = time.monotonic()
                refresh = partial(self._cluster.refresh, sorted(names), patient=False)
                self._refreshing = begun_at, self._begin(refresh, self._on_done)
                self._stale = False  # last: an interrupt before it has the question asked again
            begun_at, refreshing = self._refreshing
            if not refreshing.has_ended:
                return
            self._refreshing = None
            refreshing.result()
        except KafkalogError as error:
            self._failed(_ANY_BROKER, error)
        else:
            self._refreshed_at = begun_at
            self._troubles.pop(_ANY_BROKER, None)

    def _ask(self, broker_id: int, link: Link[_Asked], sources: list[Source]) -> None:
        settings = self._settings
        header = pb.RequestHeader(correlation_id=link.next_id())
        fetch = header.fetch
        # One that was sent behind another asks what there is now; then all sources come together in one that waits.
        fetch.max_wait_ms = 0 if link.count else settings.fetch_max_wait_ms
        fetch.min_bytes = settings.fetch_min_bytes
        fetch.max_bytes = settings.fetch_max_bytes
        asked = _Asked()
        now = time.monotonic()
        with self.lock:
            # The sources with the fewest bytes come first: the broker fills its answer in this order.
            for source in sorted(sources, key=lambda source: source.arrived_bytes):
                source.reader.ask(fetch, settings.max_partition_fetch_bytes, source.leader_epoch)
                source.asked = asked
                if source.trouble is not None:
                    source.trouble.tried(now)
                asked.sources.append(source)
        link.began(header.correlation_id, asked, self._deadline())
        try:
            link.connection.send([frame_start(header.SerializeToString(), 0)])
        except KafkalogError:
            self._drop(broker_id, link)
            raise

    def _receive(self, broker_id: int, link: Link[_Asked]) -> bool:
        """Receive an answer, and send the next request before the answer is used. Of an answer that has not arrived
        whole the connection keeps what has: the other brokers' partitions do not wait for the rest.

        Returns:
            Whether there was an answer, or the connection failed.
        """
        trouble: KafkalogError | None
        before = link.connection.received_bytes
        try:
            reply = link.connection.receive_now()
            if reply is None:
                if link.connection.received_bytes > before:
                    link.extend(time.monotonic() + self._settings.request_timeout_ms / 1000)
                return False
            header, body = reply
            asked = link.request_of(header)
            if header.HasField("error"):
                raise error_from_wire(header.error)
            link.answered()
            if link.count:  # the broker begins the next one only now
                link.extend(self._deadline())
            trouble = self._take_in(asked, header.fetch, body)
        except KafkalogError as error:
            self._drop(broker_id, link)
            trouble = error
        if trouble is not None:
            self._failed(broker_id, trouble)
        else:
            self._troubles.pop(broker_id, None)
            if broker_id in self._given_up:
                self._forget_given_up(broker_id)
            self._ask_all()
        return True

    def _deadline(self) -> float:
        """Of a fetch that a broker begins now."""
        return time.monotonic() + (self._settings.fetch_max_wait_ms + self._settings.request_timeout_ms) / 1000

    def _forget_given_up(self, broker_id: int) -> None:
        """A broker that was given up answers: drop its error where no thread has read it. Such a partition's thread was
        busy with records, and would stop for nothing."""
        error = self._given_up.pop(broker_id)
        with self.lock:
            for source in self.sources:
                if source.error is error:
                    source.error = None

    def _take_in(self, asked: _Asked, reply: pb.FetchReply, body: memoryview | None) -> KafkalogError | None:
        """Give each source its part of an answer. Returns an error if metadata is to be refreshed before a retry."""
        parts = split_body(reply, body)
        trouble: KafkalogError | None = None
        with self.lock:
            for source, answer, data in zip(asked.sources, reply.partitions, parts, strict=True):
                if source.asked is not asked:  # a seek came meanwhile
                    continue
                source.asked = None
                try:
                    found = source.reader.take(answer, data)
                except OffsetOutOfRange as error:
                    if not self._is_doubtful(source, error):
                        self._out_of_range(source, error)
                except DiskFull as error:  # its log could not be opened; the others can be read
                    self._source_failed(source, error)
                except RetriableError as error:
                    trouble = error
                except KafkalogError as error:
                    source.error = error
                else:
                    source.trouble = source.doubted_at = None
                    source.is_dry = not found
                    source.arrived.extend(found)
                    source.arrived_bytes += sum(batch.header.length for batch in found)
        return trouble

    def _is_doubtful(self, source: Source, error: OffsetOutOfRange) -> bool:
        """Lock held: whether an offset past the log's end is asked for again first, when it is known who leads now:
        a broker that leads no more, and does not know it, may lack the newest records. A reset would read again, or
        skip, what another leader has."""
        end_offset = error.facts.get("end_offset")
        if not isinstance(end_offset, int) or source.reader.offset <= end_offset:
            return False
        now = time.monotonic()
        if source.doubted_at is None:
            source.doubted_at = now
        elif self._refreshed_at >= source.doubted_at:
            return False
        if source.trouble is None:
            source.trouble = _Trouble(self._settings, now)
        self._stale = True
        return source.trouble.failed(now, error)

    def _out_of_range(self, source: Source, error: OffsetOutOfRange) -> None:
        """Lock held: act by auto.offset.reset."""
        source.trouble = source.doubted_at = None
        where = self._settings.auto_offset_reset
        # Where logs part, each policy reads on there, as Kafka does: what is before it was read.
        is_start = where == "earliest" and not isinstance(error, LogTruncated)
        target: Any = error.facts.get("start_offset" if is_start else "end_offset")
        if where == "error" or not isinstance(target, int):
            source.error = error
        else:
            log.warning("offset_reset", partition=str(source.topic_partition), to=where, reason=str(error))
            # The log may be cut again, further, before the next answer.
            source.reset(target, error.facts.get("epoch") if isinstance(error, LogTruncated) else None)

    def _is_paused(self, broker_id: int) -> bool:
        trouble = self._troubles.get(broker_id)
        return trouble is not None and time.monotonic() < trouble.retry_at

    def _failed(self, broker_id: int, error: KafkalogError) -> None:
        """A broker was not reached, or does not lead the partition. If that lasts for too long, or another try is of no
        use, the error is kept for the sources that it leads."""
        now = time.monotonic()
        trouble = self._troubles.get(broker_id)
        # LeaderNotAvailable came from the cached metadata, which is refreshed when the next try is due.
        self._stale = self._stale or not isinstance(error, LeaderNotAvailable)
        if trouble is None:
            trouble = self._troubles[broker_id] = _Trouble(self._settings, now)
        is_worth_a_try = isinstance(error, RetriableError) or broker_id == _ANY_BROKER
        if not (is_worth_a_try and trouble.failed(now, error)):
            del self._troubles[broker_id]
            self._give_up(broker_id, error)
            return
        said = broker_id == _ANY_BROKER and len(self._troubles) > 1  # logged for the broker that caused it
        if not self.closed and not said:  # closed: we ended it
            self._complain(broker_id, error, trouble)

    def _give_up(self, broker_id: int, error: KafkalogError) -> None:
        """Keep an error for the sources that the broker leads. A failed metadata request is the error of the sources
        whose topic is not known; the others are fetched by the metadata that is cached."""
        with self.lock:
            for source in self.sources:
                if broker_id == _ANY_BROKER:
                    waits = self._cluster.known_topic(source.topic_partition.topic) is None
                else:
                    waits = source.broker_id == broker_id
                if waits and (source.error is None or source.error is self._given_up.get(broker_id)):
                    source.error = error
        self._given_up[broker_id] = error
        self._stale = self._found_error = True

    def _source_failed(self, source: Source, error: KafkalogError) -> None:
        """Lock held: one partition cannot be read just now. Keeps its error, to be raised, if that lasts for too
        long."""
        now = time.monotonic()
        if source.trouble is None:
            source.trouble = _Trouble(self._settings, now)
        if source.trouble.failed(now, error):
            self._complain(source.broker_id, error, source.trouble, partition=str(source.topic_partition))
        else:
            source.error, source.trouble = error, None
            self._stale = self._found_error = True

    def _complain(self, broker_id: int, error: KafkalogError, trouble: _Trouble, **facts: object) -> None:
        what = (broker_id, error.facts.get("directory"))
        complaint = self._complaints.get(what)
        if complaint is None:
            complaint = self._complaints[what] = Complaint(log, "fetching_held_up")
        if broker_id >= 0:
            facts["broker_id"] = broker_id
        complaint.failed(error, trouble.retry.until, **facts)

    def _check_deadlines(self, now: float) -> None:
        """Give up connections with an overdue answer. An answer that has arrived and was not read is not overdue."""
        for broker_id, link in list(self._links.items()):
            if link.deadline <= now and not self._receive(broker_id, link) and link.deadline <= now:
                self._drop(broker_id, link)
                address, timeout_ms = link.connection.address, self._settings.request_timeout_ms
                self._failed(broker_id, RequestTimedOut(what="a fetch", address=address, timeout_ms=timeout_ms))
            elif link.count and now >= self._quiet_at(link):
                lost = self._cluster.loss_of(broker_id, link.connection)
                if lost is not None:  # its partitions have other leaders, or none
                    self._drop(broker_id, link)
                    self._failed(broker_id, lost)
                elif any(self._has_moved(source) for source in link.in_flight[0].sources):
                    self._drop(broker_id, link)  # what it still leads is asked for on a new connection
                elif now >= self._refreshed_at + self._settings.retry_backoff_max_ms / 1000:
                    self._stale = True

    def _has_moved(self, source: Source) -> bool:
        """Whether another broker leads the partition than when it was asked for."""
        partition = source.topic_partition
        topic = self._cluster.known_topic(partition.topic)
        if topic is None or topic.topic_id != source.reader.topic_id or partition.partition >= len(topic.partitions):
            return False
        known = topic.partitions[partition.partition]
        return known.leader_epoch > source.leader_epoch and known.leader not in (source.broker_id, NO_LEADER)

    def _quiet_at(self, link: Link[_Asked]) -> float:
        """When a link with an unanswered request counts as quiet."""
        return link.deadline - self._settings.request_timeout_ms / 1000 + QUIET_SECONDS

    def _drop(self, broker_id: int, link: Link[_Asked]) -> None:
        if self._links.get(broker_id) is link:
            del self._links[broker_id]
        with self.lock:
            for asked in link.lose():
                for source in asked.sources:
                    if source.asked is asked:
                        source.asked = None

    # --- waking, closing

    def call(self) -> None:
        """Lock held: make the waiting threads ask again which sources they want."""
        self._arrival.notify_all()
        self.wake()

    def wake(self) -> None:
        """Make the driving thread check again; callable from any thread."""
        try:
            self._wake_sender.send(b"w")
        except OSError:  # full: it will check anyway; or closed
            pass

    def _drain_wakes(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except OSError:
            pass

    def is_interrupted(self) -> bool:
        """Whether this is a signal handler above a thread that has the lock. To be called without it."""
        is_owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return is_owned

    def close(self, on_closed: Callable[[], None] | None = None, timeout: float = 2.0) -> None:
        """Release everything; waiting threads get None.

        The driving thread's wait is ended; it releases everything when it stops driving. A connection that is just
        being made is closed when it is made. A signal handler may have interrupted the driving thread, or one that
        holds the lock, so `close` does not wait there: the interrupted thread releases everything when it continues, or
        else the next `close` does.

        Args:
            on_closed: called first, to end calls to the cluster, and at the end; so perhaps twice.
            timeout: seconds to wait at most for the driving thread to stop driving.
        """
        me = threading.get_ident()
        interrupting = self.is_interrupted()
        with self.lock:
            if not self.closed:
                self.closed = True
                self._on_closed = on_closed
                self.wake()
                self._arrival.notify_all()
            if interrupting or self._driver == me:
                return
            is_driven = self._driver is not None
        if is_driven:
            for link in list(self._links.values()):
                link.connection.shut_down()
            if on_closed is not None:
                on_closed()
        end = time.monotonic() + timeout
        with self.lock:
            while self._driver is not None:
                left = end - time.monotonic()
                if left <= 0:
                    log.info("close_not_waited_for", timeout_seconds=timeout)
                    return
                self._arrival.wait(left)
            self._let_go()

    def _let_go(self) -> None:
        """Lock held, no driver: release everything, once."""
        if self._let_go_of:
            return
        self._let_go_of = True
        for broker_id, link in list(self._links.items()):
            self._drop(broker_id, link)
        for connecting in self._connecting.values():
            connecting.add_done_callback(close_result)
        self._wake_receiver.close()
        self._wake_sender.close()
        if self._on_closed is not None:
            self._on_closed()

    def after_fork_in_child(self) -> None:
        """Continue at the same offsets with new connections."""
        for link in self._links.values():
            link.connection.abandon()
        self._links = {}
        self._connecting, self._refreshing = {}, None  # the child has no threads that could complete them
        for source in self.sources:
            source.asked = None
        self._wake_receiver.close()
        self._wake_sender.close()
        self._renew()
