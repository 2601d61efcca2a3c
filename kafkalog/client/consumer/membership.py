"""Membership of a consumer in its group: it joins, keeps its lease, and moves the partitions that have to move.

Three threads:

- `kafkalog-lease` renews the lease at each heartbeat, and three times in a session at least. The lease counts from the
  *sending* of the last renewal that succeeded, by this process's monotonic clock, and ends a margin before the brokers'
  count. After that nothing is handed out. A member that leaves hands out nothing more, but renews its lease until
  `on_revoked` has returned, at most for `max.poll.interval.ms`.
- `kafkalog-news` waits at a broker for another generation, or for partitions that others release.
- `kafkalog-member` does everything else: for each generation it gives back the partitions that are no longer this
  member's, once no iterator has a record of them in hand, and claims those that now are. Partitions that stay are read
  on meanwhile. It also commits at each `auto.commit.interval.ms`.

A partition is read only after `on_assigned`, and released only after `on_revoked`, has returned: the subscriber's
callbacks run in a thread that reads (`callbacks.py`).

Failures are retried for ever, with pauses. When the lease has ended, or another process has joined under this member's
name, everything that was fetched is dropped, nothing is committed, and the member joins again.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.client.complaints import Complaint
from kafkalog.client.config import ConsumerSettings
from kafkalog.client.consumer.brokers import PAUSE_SECONDS, Brokers
from kafkalog.client.consumer.callbacks import Call, Callbacks, InCallback, Subscription
from kafkalog.client.consumer.cursors import Cursor, Cursors, Hand, Hold, Lease, Named
from kafkalog.client.consumer.fetcher import Source
from kafkalog.client.consumer.starts import Starts
from kafkalog.client.groups import commit_living, committed_offsets
from kafkalog.errors import (
    Closed,
    GroupKindDiffers,
    KafkalogError,
    MemberFenced,
    NoCommittedOffset,
    NotOwner,
    OutOfThreads,
    RetriableError,
    StaleGeneration,
    UnknownMember,
)
from kafkalog.events import get_logger
from kafkalog.net.main_thread import Signal
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.shares import partitions_of, shares_of

log = get_logger(__name__)

_MARGIN = 0.1
"""Of the session timeout: what clocks may differ in speed, and a message may take from the check to the application."""
_STREAMS_END_SECONDS = 15.0
"""A Spark stream that has ended is a member for 10 s more, and its removal takes a moment."""
_PAUSE_SECONDS_MAX = 2.0
_NOT_FOLLOWED_SECONDS = 4.0
_LOOK_SECONDS = 0.5
_GONE = (UnknownMember, MemberFenced)
_PARTITIONS_AT_ONCE = 498
"""Of a claim, a commit or a release in one request: a broker writes so many offsets at once, with its checks of the
group's state. What has been answered is not asked again, so a share of any size gets on."""
_NEVER = (0, None)


class _Commit(NamedTuple):
    """A commit, made before its offsets are taken or named.

    Whatever happens after that: its offsets are written only in the membership and by the claims that were this
    member's then, and undo no commit that was made later. Its requests name all three, so that the broker refuses or
    ignores one that is late; what is known to be late is not sent.

    Attributes:
        ask: sends a request; raises KafkalogError.
        me: the membership.
        claims: the numbers of the claims.
        order: among the commits of this member; 0: it undoes no commit at all.
        is_due: whether a cursor's position is to be committed; looked at when no commit can come in between. None: they
            are committed by name.
        epochs: the leader epochs that belong to the offsets that are committed by name, where they are known.
        may_be_lost: try it also when the membership counts as lost: one that leaves because it is slow does already
            when it commits for the last time.
    """

    ask: Callable[[pb.CommitOffsetsRequest], object]
    me: pb.Membership
    claims: Mapping[TopicPartition, int]
    order: int
    is_due: Callable[[Cursor, int], bool] | None = None
    may_be_lost: bool = False
    epochs: Mapping[TopicPartition, int | None] = MappingProxyType({})


class Membership:
    """A consumer's membership, from the first call of `start` to `leave`.

    Args:
        cluster: for offsets of partitions without a committed one; membership has connections of its own.
        cursors: of the consumer; what is assigned is added to them, what is revoked or lost is removed.
        consumer: for the callbacks.
        in_callback: of the consumer.

    Attributes:
        is_stopping: `stop` was called.
        has_left: `stop` has nothing left to do.
    """

    def __init__(
        self,
        cluster: Cluster,
        cursors: Cursors,
        consumer: Any,
        group: str,
        settings: ConsumerSettings,
        subscription: Subscription,
        in_callback: InCallback,
    ) -> None:
        self._cluster = cluster
        self._cursors = cursors
        self._consumer = weakref.ref(consumer)
        self._in_callback = in_callback
        self._group = group
        self._settings = settings
        self._subscription = subscription
        self._session_seconds = settings.session_timeout_ms / 1000
        self._name = settings.group_instance_id or _new_name(settings)
        self._token = f"{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._brokers = Brokers(cluster, settings, self._is_ending)
        self._process = os.getpid()
        self._lease = Lease()  # of this membership; a later one has another
        # Guards all below; held for no I/O. Threads of the application take it as it is: an interrupt may leave a
        # condition's `with` block without its release.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._epoch = -1
        self._is_member = False
        self._is_joining = False  # a request to join is under way
        self._lost: KafkalogError | None = None
        self._refused_at: float | None = None  # when a join met Spark streams first
        self._generation = -1
        self._share: frozenset[TopicPartition] = frozenset()
        self._topic_ids: dict[str, bytes] = {}
        self._claims: dict[TopicPartition, int] = {}  # what it owns, and the number of each claim
        self._unknown: dict[TopicPartition, int] = {}  # owned and not wanted: the answer to the claim was lost
        # To be released, and not read again before that, also if they are of the share again: a release that was not
        # answered may be executed late.
        self._going: set[TopicPartition] = set()
        self._revoked: set[Cursor] = set()  # on_revoked has been called
        self._releasing: set[TopicPartition] = set()  # by the request that is not answered yet
        self._waiting: dict[TopicPartition, str] = {}  # of the share, what others own
        self._freed = False
        self._is_refused = False  # a broker has another generation; this one, or that broker, has not heard of the last
        self.callbacks = Callbacks(
            self._lock, self._changed, self._consumer, in_callback, cursors.call, self._is_ending
        )
        self._reading: set[int] = set()  # threads of the application that wait for records
        self._asked_at = time.monotonic()
        self._progress: dict[Hand, tuple[object, float]] = {}  # what each has, and since when at least
        self._orders = itertools.count(1)  # of commits; taken without a lock
        # The last commit of what is owned: its order, and its offset once it is known to be written.
        self._written: dict[TopicPartition, tuple[int, int | None]] = {}
        self._found: dict[TopicPartition, int] = {}  # starts by `auto.offset.reset`: the group has no offset there
        # Of which records were handed out before the lease was lost: with the fetcher's lock. If such a partition comes
        # back, the application may still commit an old record of it by name, until one is handed out anew.
        self._forfeit: frozenset[TopicPartition] = frozenset()
        self._uncommitted: frozenset[TopicPartition] = frozenset()  # those of them with records that were not committed
        self._has_asked = True  # for a record, since then; who waited already has not
        self._commit_at = self._look_at = 0.0
        self._error: KafkalogError | None = None
        self.is_stopping = False
        self._renew_until = math.inf  # the lease, after `stop` was called
        self._stopper: int | None = None  # the thread that is in `stop`
        self.has_left = False
        self._is_idle = False  # the member's thread does nothing any more, because of `is_stopping`
        self._closing = Signal()
        self._threads: list[threading.Thread] = []
        reset = settings.auto_offset_reset
        self._starts = Starts(cluster, group, reset, self._changed, self._closing)
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def name(self) -> str:
        """The member's name in its group."""
        return self._name

    def has(self, partition: TopicPartition) -> bool:
        """Whether it is of a topic that is subscribed to, so it may be this member's, or have been."""
        return self._subscription.has(partition.topic)

    def attach(self) -> None:
        """Lock of the fetcher held: what the cursors ask is asked of this membership from now on."""
        cursors, consumer = self._cursors, self._consumer()
        self._finalizer = weakref.finalize(consumer, self._close_threads)
        self._finalizer.atexit = False
        if not self.is_stopping:  # by a signal's handler; here none comes in between
            cursors.is_called = self._is_called
            cursors.is_late = lambda: self._lease.has_ended()
            cursors.put_down = self._wake

    def start(self) -> None:
        """Start the threads. Raises OutOfThreads; then `stop` is to be called."""
        for target, name in (
            (self._run, "kafkalog-member"),
            (self._keep_lease, "kafkalog-lease"),
            (self._follow, "kafkalog-news"),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)  # first: a signal's handler that stops it has to wait for it
            try:
                thread.start()
            except RuntimeError as error:
                raise OutOfThreads(process="the client", reason=str(error)) from None

    # --- for threads that read

    def _is_called(self) -> bool:
        is_new = threading.get_ident() not in self._reading  # it began to wait under another subscription
        return is_new or self.callbacks.due() is not None or self._due_error() is not None

    def _due_error(self) -> KafkalogError | None:
        """What keeps the member from reading."""
        error = self._error
        if isinstance(error, NoCommittedOffset):
            cursors = self._cursors.by_partition.values()
            if not any(cursor.hold & Hold.UNPLACED for cursor in cursors):
                return None  # they were sought; the member's thread is about to notice
        return error

    @contextmanager
    def reading(self) -> Any:
        """During the `with` block a thread of the application waits for records. Takes no lock, and may be left by an
        interrupt anywhere."""
        me = threading.get_ident()
        self._asked_at = time.monotonic()
        try:
            self._reading.add(me)
            yield
        finally:
            self._reading.discard(me)
            self._asked_at = time.monotonic()

    def note_asked(self) -> None:
        """A call of the application begins that asks for a record."""
        self._has_asked = True

    def note_got(self, hand: Hand) -> None:
        """The application gets what is in hand; the call may have begun before the lease was lost."""
        if self._has_asked:
            return
        with self._cursors.fetcher.lock:  # a loss is noted either before, and then the lease has ended, or after it
            if hand.cursor is not None and not hand.cursor.has_ended():
                self._has_asked = True

    def serve(self) -> None:
        """Run the callbacks that are due, in this thread, which asks for a record. Raises what keeps the member from
        reading."""
        self.callbacks.serve(self._check)

    def _check(self) -> None:
        error = self._due_error()
        if error is not None:
            raise error.fresh()

    def note_gone(self, error: KafkalogError) -> bool:
        """Hold the partitions that failed with this error, because their topic was deleted: the group will learn it, or
        that the topic was made anew. Returns whether there are any."""
        with self._cursors.fetcher.lock:
            gone = [p for p, cursor in self._cursors.by_partition.items() if cursor.source.failure is error]
            for partition in gone:
                self._cursors.by_partition[partition].source.failure = None
            self._cursors.hold(gone, Hold.GONE)
        return bool(gone)

    def _retry_gone(self) -> None:
        """Ask again for what was held because its topic was deleted: the broker may not have heard of it then."""
        gone = [cursor for cursor in self._cursors.by_partition.values() if cursor.hold & Hold.GONE]
        for cursor in gone:
            cursor.source.since = time.monotonic()
        if gone:
            self._cursors.let_go(gone, Hold.GONE)

    def _wake(self) -> None:
        """An iterator has put down what it had in hand."""
        if self._going:
            with self._lock:
                self._changed.notify_all()

    def _is_me(self, me: pb.Membership) -> bool:
        """Lock held: whether this is the membership now, and it is not lost."""
        return self._is_member and self._lost is None and me == self._me()

    def _me(self) -> pb.Membership:
        return pb.Membership(group=self._group, member=self._name, epoch=self._epoch)

    def awaited(self) -> set[TopicPartition] | None:
        """The partitions of its share that are not read yet; None: it is no member now."""
        cursors = self._cursors.by_partition
        with self._lock:
            if not self._is_member or self._lost is not None:
                return None
            share = self._share
        moving = Hold.ASSIGNED | Hold.UNPLACED | Hold.REVOKED  # the last: it is released first, and claimed again
        return {p for p in share if (cursor := cursors.get(p)) is None or cursor.hold & moving}

    # --- the lease

    def _keep_lease(self) -> None:
        interval = min(self._settings.heartbeat_interval_ms / 1000, self._session_seconds / 3)
        pause = PAUSE_SECONDS
        wait = 0.0
        while not self._closing.wait(wait):
            with self._lock:
                self._changed.wait_for(lambda: (self._is_member and self._lost is None) or self._closing.is_set())
                if self._closing.is_set():
                    return
                me, session_timeout_ms = self._me(), self._settings.session_timeout_ms
            sent = time.monotonic()
            wait = interval
            if sent > self._renew_until:
                return
            if self._lease.has_ended() and not self.is_stopping:
                self._note_lost(me, UnknownMember(group=self._group, member=self._name))
                continue
            try:
                reply = self._brokers.ask(
                    "RenewMember", pb.RenewMemberRequest(member=me, session_timeout_ms=session_timeout_ms)
                )
            except _GONE as error:
                self._note_lost(me, error)
            except KafkalogError:
                wait, pause = pause, min(pause * 2, _PAUSE_SECONDS_MAX, self._session_seconds / 10)
            else:
                wait, pause = max(0.0, sent + interval - time.monotonic()), PAUSE_SECONDS
                if self._lease.has_ended() and not self.is_stopping:  # who noticed it has dropped a record already
                    self._note_lost(me, UnknownMember(group=self._group, member=self._name))
                with self._lock:
                    if self._is_me(me) and not self._lease.has_ended():
                        self._lease.end = sent + self._session_seconds * (1 - _MARGIN)
                    if reply.generation != self._generation:
                        self._freed = True
                        self._changed.notify_all()

    def _note_lost(self, me: pb.Membership, error: KafkalogError) -> None:
        with self._lock:
            if self._is_me(me):
                self._lease.end = -1.0
                self._lost = error
                self._changed.notify_all()

    # --- news

    def _follow(self) -> None:
        pause = PAUSE_SECONDS
        while not self._closing.is_set():
            with self._lock:
                self._changed.wait_for(
                    lambda: (self._is_member and self._lost is None and not self._freed) or self._closing.is_set()
                )
                if self._closing.is_set():
                    return
                me, waiting = self._me(), sorted(self._waiting)
                generation = -1 if self._is_refused else self._generation
            seconds = max(self._session_seconds / 2, 1.0)
            request = pb.AwaitGroupRequest(
                member=me, generation=generation, partitions=shares_of(waiting), max_wait_ms=int(seconds * 1000)
            )
            try:
                reply = self._brokers.ask("AwaitGroup", request, seconds + self._session_seconds / 4)
            except _GONE as error:
                self._note_lost(me, error)
            except KafkalogError as error:
                log.info("group_news_late", group=self._group, member=self._name, reason=str(error))
                self._closing.wait(pause * (0.5 + random.random()))
                pause = min(pause * 2, _PAUSE_SECONDS_MAX)
                with self._lock:
                    self._freed = self._freed or (self._is_me(me) and bool(self._waiting))  # nobody was asked
                    self._changed.notify_all()
            else:
                if generation < 0 or reply.news.generation < generation:  # perhaps the broker has not heard of it
                    self._closing.wait(PAUSE_SECONDS)
                pause = PAUSE_SECONDS
                with self._lock:
                    if self._is_me(me) and sorted(self._waiting) == waiting:
                        self._take_news(reply.news)
                        self._freed = self._freed or bool(waiting) or generation < 0
                        self._is_refused = False
                        self._changed.notify_all()
                if reply.retry_after_ms:
                    self._closing.wait(reply.retry_after_ms / 1000)

    def _take_news(self, news: pb.GroupNews) -> None:
        """Lock held: a generation as a broker has it now."""
        if news.generation > self._generation:
            self._generation = news.generation
            self._share = frozenset(partitions_of(news.share))
            self._topic_ids = {topic.topic: topic.topic_id for topic in news.topics}
            self._waiting = {}
            self._freed = True
        if news.generation == self._generation:
            owned = {TopicPartition(each.topic, each.partition): each.claim for each in news.claims}
            known = self._share | self._claims.keys()
            self._unknown = {partition: number for partition, number in owned.items() if partition not in known}

    # --- the member

    def _run(self) -> None:
        try:
            self._follow_changes()
        finally:
            with self._lock:
                self._is_idle = True
                self._changed.notify_all()

    def _follow_changes(self) -> None:
        pause = PAUSE_SECONDS
        failure: KafkalogError | None = None
        # It may be a wrong address: the reading calls return nothing, and raise nothing.
        complaint = Complaint(log, "group_not_followed", patience_s=_NOT_FOLLOWED_SECONDS)
        while not self._is_ending():
            try:
                self._step()
                pause = PAUSE_SECONDS
                complaint.ended()
                with self._lock:
                    if failure is not None and self._error is failure:
                        self._error = None
                failure = None
            except Closed:
                return
            except _GONE as error:
                complaint.ended()
                self._note_lost(self._me(), error)
            except (RetriableError, OSError) as error:
                complaint.failed(error, math.inf, group=self._group, member=self._name)
                self._pause(pause * (0.5 + random.random()))
                pause = min(pause * 2, _PAUSE_SECONDS_MAX)
            except KafkalogError as error:
                if isinstance(error, GroupKindDiffers) and self._awaits_streams(error):
                    self._pause(PAUSE_SECONDS)
                    continue
                failure = error
                self._fail(failure)
                self._pause(_PAUSE_SECONDS_MAX)
            except Exception as error:  # a defect; the reader learns of it, and this thread goes on
                log.exception("member_failed", group=self._group, member=self._name)
                failure = KafkalogError(reason=f"{type(error).__name__}: {error}")
                self._fail(failure)
                self._pause(_PAUSE_SECONDS_MAX)

    def _awaits_streams(self, error: GroupKindDiffers) -> bool:
        """Whether the Spark streams that are members may have stopped: Spark ends them without notice."""
        now = time.monotonic()
        if self._refused_at is None:
            self._refused_at = now
            log.warning("group_awaits_end_of_streams", group=self._group, member=self._name, reason=str(error))
        return now < self._refused_at + _STREAMS_END_SECONDS

    def _is_ending(self) -> bool:
        return self.is_stopping or self._closing.is_set()

    def _pause(self, seconds: float | None) -> None:
        """Wait so long, or until the end."""
        with self._lock:
            self._changed.wait_for(self._is_ending, seconds)

    def _fail(self, error: KafkalogError) -> None:
        """Raise an error to who reads."""
        with self._lock:
            self._error = error
        self._cursors.call()

    def _step(self) -> None:
        """Do what is to be done now, then wait for news."""
        if self._lost is not None:
            self._lose()
        for step in (self._join, self._begin, self._revoke, self._claim, self._look_for_places, self._commit_if_due):
            if self._is_ending():
                return
            step()
        with self._lock:
            if self._has_work():
                return
            is_quiet = not self._changed.wait(min(_LOOK_SECONDS, max(0.0, self._commit_at - time.monotonic())))
        if is_quiet:
            self._retry_gone()
        self._check_poll()

    def _has_work(self) -> bool:
        """Lock held."""
        return self.is_stopping or self._lost is not None or self._freed

    def _join(self) -> None:
        """Join the group, unless this is a member of it."""
        if self._is_member:
            return
        self._brokers.connect()
        subscription, settings = self._subscription, self._settings
        member = pb.GroupMember(
            member=self._name,
            subscription=str(subscription),
            host=socket.gethostname(),
            process=self._token,
            client_id=settings.client_id or "",
            instance_id=settings.group_instance_id or "",
            session_timeout_ms=settings.session_timeout_ms,
            topics=subscription.topics,
            pattern=subscription.pattern,
        )
        request = pb.JoinGroupRequest(group=self._group, member=member, assignor=settings.partition_assignment_strategy)
        sent = time.monotonic()
        with self._lock:
            if self._closing.is_set():
                raise Closed(what="consumer")
            self._is_joining = True
        try:
            reply = self._brokers.ask("JoinGroup", request)
            with self._lock:
                self._error = None
                self._is_member, self._epoch, self._refused_at = True, reply.epoch, None
                self._forget()
                self._generation = -1
                self._take_news(reply.news)
                self._asked_at = time.monotonic()
                self._lease = Lease(sent + self._session_seconds * (1 - _MARGIN))
        finally:
            with self._lock:
                self._is_joining = False
                self._changed.notify_all()
        log.info("group_joined", group=self._group, member=self._name, generation=self._generation)
        with suppress(KafkalogError):
            self._cluster.look_up(subscription.topics, patient=False)
            for topic in subscription.topics:
                if self._cluster.known_topic(topic) is None:
                    log.warning("group_topic_does_not_exist_yet", group=self._group, topic=topic)

    def _lose(self) -> None:
        """Drop everything, as others may own it; but not from under a callback that runs, which may seek in it."""
        self._lease.end = -1.0
        self.callbacks.wait_returned()
        error, lost = self._lost, self._told()
        with self._cursors.fetcher.lock:
            self._note_forfeit()
            self._cursors.remove(list(self._cursors.by_partition))
        with self._lock:
            self._forget()
            self.callbacks.clear()
            self._is_member = False
            self._lost = None
            self._share = frozenset()
            self._changed.notify_all()
        log.warning("group_membership_lost", group=self._group, partitions=len(lost), reason=str(error))
        if self._subscription.on_lost is not None and lost:
            self.callbacks.add(self._subscription.on_lost, lost, lambda: None, None)
            self.callbacks.wait_served()
        # A join of its own may have been executed late. If another process has the name, they would fence each other.
        is_replaced = isinstance(error, MemberFenced) and error.facts.get("process") != self._token
        if is_replaced and self._settings.group_instance_id:
            assert error is not None
            self._fail(error)
            self._pause(None)

    def _note_forfeit(self) -> None:
        """The fetcher's lock held: note what is lost with the lease."""
        cursors = self._cursors.by_partition
        taken = {partition: cursor for partition, cursor in cursors.items() if cursor.was_taken}
        begun = self._found | {partition: offset for partition, (_, offset) in self._written.items()}
        lost = frozenset(
            partition
            for partition, cursor in taken.items()
            if not cursor.hold & Hold.UNPLACED and cursor.next_offset() != begun.get(partition)
        )
        self._uncommitted = lost if self._has_asked else lost | self._uncommitted
        self._forfeit, self._has_asked = self._still_forfeit() | taken.keys(), False

    def _still_forfeit(self) -> frozenset[TopicPartition]:
        """The fetcher's lock held: those of `_forfeit` of which nothing was handed out anew."""
        cursors = self._cursors.by_partition
        return frozenset(p for p in self._forfeit if (cursor := cursors.get(p)) is None or not cursor.was_taken)

    def _check_not_old(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The fetcher's lock held. A callback knows of the claims of what it was called with.

        Raises:
            NotOwner: one of these is not the start of a claim of which nothing was handed out yet, so it is of a record
                that was lost: others may have read and committed more since, or it is handed out again.
        """
        self._forfeit = self._still_forfeit()
        known = self.callbacks.called_with if self._in_callback.is_from_callback() else frozenset()
        for partition in self._forfeit.intersection(offsets) - known:
            cursor = self._cursors.by_partition.get(partition)
            if cursor is None or offsets[partition] != cursor.next_offset():
                raise self._not_owner(partition)

    def _not_owner(self, partition: TopicPartition) -> NotOwner:
        return NotOwner(member=self._name, partition=str(partition), group=self._group, owner="")

    def _forget(self) -> None:
        """Lock held: nothing is claimed."""
        self._claims, self._unknown, self._waiting = {}, {}, {}
        self._written, self._found = {}, {}
        self._starts.forget()
        self._going, self._revoked = set(), set()

    # --- callbacks

    def _told(self) -> list[TopicPartition]:
        """The partitions that are the application's: `on_assigned` was called with them, and no other callback."""
        serving = self.callbacks.served()
        with self._cursors.fetcher.lock:
            return sorted(
                partition
                for partition, cursor in self._cursors.by_partition.items()
                if cursor not in self._revoked and bool(cursor.hold & Hold.ASSIGNED) == (partition in serving)
            )

    # --- revoking

    def _revoke(self) -> None:
        """Give back what is no longer of the share, once nothing of it is in hand and `on_revoked` has returned."""
        with self._lock:
            self._going |= self._claims.keys() - self._share | self._made_anew()
            gone = set(self._going)
            unknown = {p: number for p, number in self._unknown.items() if p not in self._claims}
            is_calling = bool(self.callbacks)
        if gone:
            cursors = {p: cursor for p, cursor in self._cursors.by_partition.items() if p in gone}
            fresh = [p for p, cursor in cursors.items() if not cursor.hold & Hold.REVOKED]
            if fresh:
                self._cursors.hold(fresh, Hold.REVOKED)
            ready = gone - self._cursors.in_hand(gone)
            callback = self._subscription.on_revoked
            if callback is not None:
                untold = {p: cursor for p, cursor in cursors.items() if p in ready and cursor not in self._revoked}
                if untold and not is_calling:
                    self.callbacks.add(
                        callback, sorted(untold), lambda: self._revoked.update(untold.values()), self._lease
                    )
                ready -= untold.keys()
            if ready:
                self._release(ready)
        for part in _parts(unknown):
            request = pb.ReleasePartitionsRequest(member=self._me())
            for topic, number in part:
                request.claims.add(topic=topic, partition=number, claim=unknown[TopicPartition(topic, number)])
            self._brokers.ask("ReleasePartitions", request)
            with self._lock:
                for partition in part:
                    self._unknown.pop(partition, None)

    def _made_anew(self) -> set[TopicPartition]:
        """Lock held: partitions that stay, of topics that were deleted and created again under their names."""
        ids, cursors = self._topic_ids, self._cursors.by_partition
        return {
            partition
            for partition in self._share & self._claims.keys() & cursors.keys()
            if cursors[partition].source.reader.topic_id != ids.get(partition.topic)
        }

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit positions and end claims. Raises KafkalogError."""
        for part in _parts(sorted(partitions)):
            if self._is_ending():
                return
            try:
                self._release_part(part)
            finally:
                self._releasing = set()

    def _release_part(self, part: list[TopicPartition]) -> None:
        cursors = self._cursors.by_partition
        if self._settings.enable_auto_commit:
            commit = self._auto_commit()
            positions = self._cursors.positions(part)
        else:
            commit = self._commit_of_found()
            positions = {p: self._found[p] for p in part if p in self._found}
        with self._lock:
            self._releasing = set(part)
            request = pb.ReleasePartitionsRequest(member=commit.me, order=commit.order)
            news = self._news(commit, positions)
            for partition in part:
                topic, number = partition
                claim = request.claims.add(topic=topic, partition=number, claim=commit.claims[partition])
                if partition in news:
                    claim.offset = news[partition]
                    if (epoch := cursors[partition].read_in()) is not None:
                        claim.leader_epoch = epoch
                    claim.topic_id = cursors[partition].source.reader.topic_id
        self._brokers.ask("ReleasePartitions", request)
        self._revoked.difference_update([self._cursors.by_partition.get(partition) for partition in part])
        self._cursors.remove(part)
        self._starts.forget(part)
        with self._lock:
            self._freed = self._freed or bool(self._share & set(part))
            for partition in part:
                self._claims.pop(partition, None)
                self._going.discard(partition)
                self._written.pop(partition, None)
                self._found.pop(partition, None)

    # --- claiming

    def _claim(self) -> None:
        with self._lock:
            generation, topic_ids = self._generation, self._topic_ids
            wanted = sorted(self._share - self._claims.keys())
            if not wanted or not self._freed:
                self._have_looked()
                return
        waiting: dict[TopicPartition, str] = {}
        for part in _parts(wanted):
            if self._is_ending():
                return
            request = pb.ClaimPartitionsRequest(member=self._me(), generation=generation, partitions=shares_of(part))
            try:
                reply = self._brokers.ask("ClaimPartitions", request)
            except StaleGeneration:
                with self._lock:
                    if generation == self._generation:  # otherwise the news have come meanwhile
                        self._is_refused = True
                        self._have_looked()
                return
            waiting |= {TopicPartition(each.topic, each.partition): each.owner for each in reply.owners}
            self._take_claims(reply, topic_ids)
        with self._lock:
            if generation == self._generation:
                self._waiting = waiting
                self._have_looked()

    def _take_claims(self, reply: pb.ClaimPartitionsReply, topic_ids: Mapping[str, bytes]) -> None:
        """Read what was claimed, or look up where to begin."""
        claims = {TopicPartition(each.topic, each.partition): each for each in reply.claims}
        with self._lock:
            self._claims.update((partition, each.claim) for partition, each in claims.items())
        starts = {partition: each.offset for partition, each in claims.items() if each.HasField("offset")}
        self._written.update((partition, (0, offset)) for partition, offset in starts.items())
        epochs = {partition: each.leader_epoch for partition, each in claims.items() if each.HasField("leader_epoch")}
        self._add(starts, topic_ids, epochs=epochs)
        missing = [partition for partition in claims if partition not in starts]
        if missing and self._settings.auto_offset_reset == "error":
            self._add(dict.fromkeys(missing, 0), topic_ids, Hold.UNPLACED)
        elif missing:
            self._starts.look_up(missing, topic_ids)

    def _have_looked(self) -> None:
        """Lock held: claims were made as far as is known; the next news are waited for."""
        self._freed = False
        self._changed.notify_all()

    def _begin(self) -> None:
        """Read those partitions whose offsets were looked up."""
        for found in self._starts.found():
            with self._lock:
                starts = {partition: at for partition, at in found.offsets.items() if partition in self._claims}
                self._found.update(starts)
                self._commit_at = 0.0  # if the next owner looked it up, it could find a later one
            self._add(starts, found.topic_ids)

    def _look_for_places(self) -> None:
        """Who reads learns that a partition starts nowhere, until it is sought, or the group has an offset of it."""
        cursors = self._cursors.by_partition.items()
        held = Hold.ASSIGNED | Hold.REVOKED
        unplaced = {p: cursor for p, cursor in cursors if cursor.hold & Hold.UNPLACED and not cursor.hold & held}
        has_failed = isinstance(self._error, NoCommittedOffset)
        if unplaced and has_failed and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _PAUSE_SECONDS_MAX
            topics = sorted({partition.topic for partition in unplaced})
            for partition, offset in committed_offsets(self._cluster, self._group, topics).items():
                with self._cursors.fetcher.lock:  # meanwhile it may have been sought
                    if (cursor := unplaced.pop(partition, None)) is not None and cursor.hold & Hold.UNPLACED:
                        self._cursors.seek(cursor, offset)
        if unplaced and not has_failed:
            where = str(min(unplaced))
            self._fail(NoCommittedOffset(group=self._group, partition=where, setting="auto.offset.reset"))
        elif has_failed and not unplaced:
            with self._lock:
                self._error = None

    def _add(
        self,
        starts: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, bytes],
        hold: Hold = Hold.NONE,
        epochs: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """Read partitions from these offsets, once `on_assigned` has returned, unless they are held.

        Args:
            epochs: the leader epochs in which what is before the offsets was read, where they are known.
        """
        if not starts:
            return
        cursors = {}
        for partition, offset in starts.items():
            source = Source(partition, topic_ids[partition.topic], offset, epochs.get(partition))
            cursors[partition] = Cursor(source, self._lease)
        callback = self._subscription.on_assigned
        for cursor in cursors.values():
            cursor.hold |= hold if callback is None else hold | Hold.ASSIGNED
        with self._cursors.fetcher.lock:
            if self._is_ending():  # `stop` may have removed all others
                return
            self._cursors.add(cursors)
        if callback is not None:
            self.callbacks.add(
                callback,
                sorted(cursors),
                lambda: self._cursors.let_go(cursors.values(), Hold.ASSIGNED),
                self._lease,
            )

    # --- committing

    def _new_commit(
        self,
        ask: Callable[[pb.CommitOffsetsRequest], object],
        is_due: Callable[[Cursor, int], bool] | None = None,
        may_be_lost: bool = False,
    ) -> _Commit:
        with self._lock:
            return _Commit(ask, self._me(), dict(self._claims), next(self._orders), is_due, may_be_lost)

    def _auto_commit(self) -> _Commit:
        """As `auto.commit.interval.ms`, a release and the end ask for it."""
        return self._new_commit(partial(self._brokers.ask, "CommitOffsets"), _is_auto_due, may_be_lost=True)

    def _commit_of_found(self) -> _Commit:
        """Of starts that were looked up: who reads next would look up another one, perhaps a later one. A commit of
        which this member does not know yet that it is written is not undone."""
        return self._auto_commit()._replace(order=0)

    def _commit_if_due(self) -> None:
        now = time.monotonic()
        if now < self._commit_at:
            return
        self._commit_at = now + self._settings.auto_commit_interval_ms / 1000
        if self._settings.enable_auto_commit:
            commit = self._auto_commit()
            positions = self._cursors.positions(self._cursors.by_partition)
            try:
                commit_living(partial(self._commit_own, commit), positions)
            except NotOwner as error:  # news of that come
                log.info("group_commit_refused", group=self._group, member=self._name, reason=str(error))

    def commit(self, offsets: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int | None]) -> None:
        """Commit offsets that the application names. A partition's is not undone by a commit of its position; one that
        is named after the last record was handed back, as in `on_revoked`, is the last.

        Args:
            epochs: the leader epochs that came with offsets; those of others are looked up.

        Raises:
            NotOwner: this member does not own one of them (any more), or has lost the record in the meantime.
        """
        noted: dict[TopicPartition, tuple[Cursor, Named | None, Named]] = {}
        try:
            # One lock after the other: a signal's handler that closes the consumer may stand above one of them.
            commit = self._new_commit(self._ask_patiently)
            with self._cursors.fetcher.lock:
                self._check_not_old(offsets)
                self._note_named(offsets, noted)
                # After it: a commit of a position finds the offset named, or is an earlier one. And before the next one
                # is named, so that the last name is that of the last commit.
                epochs = {**self._cursors.epochs_of(offsets), **epochs}
                commit = commit._replace(order=next(self._orders), epochs=epochs)
            for part in _parts(offsets):
                self._commit_part(commit, {partition: offsets[partition] for partition in part})
                for partition in part:
                    noted.pop(partition, None)
        except BaseException:
            for cursor, before, named in noted.values():
                if cursor.named is named:
                    cursor.named = before
            raise

    def _note_named(
        self,
        offsets: Mapping[TopicPartition, int],
        noted: dict[TopicPartition, tuple[Cursor, Named | None, Named]],
    ) -> None:
        """The fetcher's lock held: note them at the cursors. For an interrupt that comes: before a cursor is changed,
        `noted` gets it, what it had, and what it has from then on."""
        served = self.callbacks.served()
        for partition, offset in offsets.items():
            if (cursor := self._cursors.by_partition.get(partition)) is not None:
                is_last = bool(cursor.hold & Hold.REVOKED) and (self.is_stopping or partition in served)
                named = Named(offset, math.inf if is_last else cursor.position())
                noted[partition] = cursor, cursor.named, named
                cursor.named = named

    def commit_positions(self) -> None:
        """Commit the positions of what this member owns, for the application.

        Raises:
            NotOwner: what was handed out last is lost.
        """
        commit = self._new_commit(self._ask_patiently, _is_due)
        positions = self._cursors.positions(self._cursors.by_partition)  # first: those of a lost share are none
        if self._uncommitted and not self._has_asked and not self._in_callback.is_from_callback():
            raise self._not_owner(min(self._uncommitted))
        commit_living(partial(self._commit_own, commit), positions)

    def _commit_own(self, commit: _Commit, positions: Mapping[TopicPartition, int]) -> None:
        """Commit positions, those first whose last commit is the oldest, without those that this member does not own
        any more: what it releases is committed by the release. Raises KafkalogError, as `_commit_part`."""
        refused: set[str] = set()
        while True:
            with self._lock:
                news = [p for p in self._news(commit, positions) if p not in self._releasing and str(p) not in refused]
                news.sort(key=lambda partition: self._written.get(partition, _NEVER)[0])
            try:
                for part in _parts(news):
                    self._commit_part(commit, {partition: positions[partition] for partition in part})
                return
            except NotOwner as error:
                partition = error.facts["partition"]
                if partition in refused:
                    raise
                refused.add(partition)

    def _commit_part(self, commit: _Commit, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit those offsets that are to be committed still.

        Raises:
            NotOwner: this member does not own one of them (any more).
        """
        with self._lock:
            cursors = self._cursors.by_partition
            news = self._news(commit, offsets)
            if not news:
                return
            request = pb.CommitOffsetsRequest(group=self._group, member=commit.me, order=commit.order)
            for partition, offset in news.items():
                # If no answer comes it is not known what is written, so a commit of what was written before is sent
                # again.
                if self._owns(commit, partition) and self._written.get(partition, _NEVER)[0] <= commit.order:
                    self._written[partition] = commit.order, None
                cursor = cursors.get(partition)  # of what was read: a topic may have been created again under the name
                topic_id = self._topic_ids.get(partition.topic) if cursor is None else cursor.source.reader.topic_id
                if commit.is_due is None:
                    epoch = commit.epochs.get(partition)
                else:
                    epoch = None if cursor is None else cursor.read_in()
                request.offsets.add(
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=offset,
                    topic_id=topic_id,
                    claim=commit.claims.get(partition),
                    leader_epoch=epoch,
                )
        commit.ask(request)
        with self._lock:
            for partition, offset in news.items():
                if self._written.get(partition) == (commit.order, None):
                    self._written[partition] = commit.order, offset
                self._found.pop(partition, None)

    def _news(self, commit: _Commit, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Lock held: the offsets of a commit that are to be sent. Those that were written already are its own from now
        on. What is not owned by its claims is left out of positions; what is named is sent: the broker says who owns
        it.

        Raises:
            NotOwner: the membership is over.
        """
        if offsets and not commit.may_be_lost and not self._is_me(commit.me):
            raise self._not_owner(min(offsets))
        cursors, news = self._cursors.by_partition, {}
        for partition, offset in offsets.items():
            if not self._owns(commit, partition):
                if commit.is_due is None:
                    news[partition] = offset
                continue
            if commit.is_due is not None and not (partition in cursors and commit.is_due(cursors[partition], offset)):
                continue
            order, written = self._written.get(partition, _NEVER)
            if written is None or (order <= commit.order and written != offset):
                news[partition] = offset
            elif order < commit.order:
                self._written[partition] = commit.order, written
        return news

    def _owns(self, commit: _Commit, partition: TopicPartition) -> bool:
        """Lock held: whether this member owns a partition by the same claim as when a commit was made."""
        claim = self._claims.get(partition)
        return claim is not None and claim == commit.claims.get(partition)

    def _ask_patiently(self, request: pb.CommitOffsetsRequest) -> None:
        """Raises KafkalogError."""
        try:
            self._cluster.call("CommitOffsets", request)
        except _GONE as error:
            self._note_lost(request.member, error)
            raise self._not_owner(min(TopicPartition(each.topic, each.partition) for each in request.offsets)) from None

    # --- slow applications

    def _check_poll(self) -> None:
        """Leave the group if the application, or an iterator that has a record in hand, has asked for no record for
        `max.poll.interval.ms`."""
        now = time.monotonic()
        in_hands = self._cursors.in_hands()
        with self._lock:
            before = self._progress
            self._progress = {
                hand: before[hand] if hand in before and before[hand][0] is what else (what, now)
                for hand, what in in_hands.items()
            }
            if self._reading or not self._is_member or self._progress != before:
                self._asked_at = now
            limit_ms = self._settings.max_poll_interval_ms
            is_slow = now - min([self._asked_at, *(since for _, since in self._progress.values())]) > limit_ms / 1000
        if is_slow and not self._is_ending():
            left_at = time.monotonic()
            self._lease.end = -1.0
            log.warning("group_left_because_polls_are_slow", group=self._group, member=self._name, limit_ms=limit_ms)
            self._commit_found()
            self._leave()
            with self._lock:
                self._lost = UnknownMember(group=self._group, member=self._name)
            self._lose()
            while not self._reading and self._asked_at < left_at and not self._is_ending():
                self._pause(PAUSE_SECONDS)  # who asks for a record takes no lock to tell it

    # --- the end

    def _leave(self, until: float = 0.0) -> None:
        """Leave the group, and try again until then."""
        request = pb.LeaveGroupRequest(group=self._group, member=self._name, epoch=self._epoch)
        try:
            self._brokers.retrying(lambda: self._brokers.ask("LeaveGroup", request), until)
        except KafkalogError as error:
            log.info("group_left_by_its_lease", group=self._group, member=self._name, reason=str(error))

    def is_stopping_here(self) -> bool:
        """Whether `stop` waits for this thread: this is a callback of it, or a signal's handler above it."""
        return self._in_callback.waits_for_this(self._stopper)

    def stop(self, timeout: float) -> None:
        """Hand out nothing more, call `on_revoked` in this thread, commit, and leave the group; a static member keeps
        its place for its session timeout. If that was impossible, others go on from the last commit.

        Waits for another thread that is in it. Finishes what an interrupt left of an earlier call.

        Args:
            timeout: seconds to wait at most for brokers and threads, besides the callbacks' own.
        """
        if os.getpid() != self._process:
            return
        me, is_valid, seconds = threading.get_ident(), False, timeout
        try:
            with self._lock:
                if self._stopper is not None:
                    self._changed.wait_for(lambda: self._stopper is None, timeout)
                if self._stopper is not None or self.has_left:
                    return
                # No call before this, without another thread: above the lock a signal's handler could not leave.
                was_stopping, self.is_stopping, self._stopper = self.is_stopping, True, me
                self._changed.notify_all()
            if not was_stopping:
                now = time.monotonic()
                end, self._renew_until = now + timeout, now + self._settings.max_poll_interval_ms / 1000
                self._wait_for_others(timeout)
                is_valid = self._is_member and not self._lease.has_ended()
                self._cursors.hold(self._cursors.by_partition, Hold.REVOKED)
                with self._lock:  # its renewal may be about to set the end
                    self._lease.end = -1.0  # also for what a thread has taken and not handed out yet
                seconds = end - time.monotonic()
                self._tell_the_end(is_valid)
        finally:
            try:
                if self._stopper == me:
                    self._end(is_valid, time.monotonic() + seconds)
            finally:
                if self._stopper == me:
                    self._stopper = None
                with self._lock:
                    self._changed.notify_all()

    def _end(self, is_valid: bool, until: float) -> None:
        """What has to be done however it ends; may be done twice."""
        try:
            self._close_threads()
            self._part(is_valid, until)
            self._brokers.close()
            for thread in self._threads:
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(max(0.0, until - time.monotonic()))
        finally:
            self._cursors.remove(list(self._cursors.by_partition))
            self._detach()
        self.has_left = True

    def _wait_for_others(self, seconds: float) -> None:
        """Wait for callbacks that run in other threads, which may commit; and for the member's thread, which may end a
        claim. They may not get on if this is a signal's handler above a thread that has the fetcher's lock."""
        patience = PAUSE_SECONDS if self._cursors.fetcher.is_interrupted() else seconds
        end = time.monotonic() + patience
        with self._lock:
            self._changed.wait_for(lambda: not self.callbacks.are_served_elsewhere(), patience)
            is_over = not self._threads or not self._threads[0].is_alive()
            self._changed.wait_for(lambda: self._is_idle or is_over, max(0.0, end - time.monotonic()) / 2)

    def _tell_the_end(self, is_valid: bool) -> None:
        """Call the callbacks that are left to call."""
        held, subscription = self._told(), self._subscription
        self.callbacks.finish(subscription.on_lost)
        callback = subscription.on_revoked if is_valid else subscription.on_lost
        if callback is not None and held:
            self.callbacks.run(Call(callback, held))

    def _part(self, is_valid: bool, until: float) -> None:
        """Commit and leave, until then: in a thread, because a broker that stands still holds up even connecting."""
        self._brokers.stop_at = until
        commit = self._auto_commit()
        is_committing = is_valid and self._settings.enable_auto_commit
        positions = self._cursors.positions(list(self._claims)) if is_committing else {}

        def ask() -> None:
            self._commit_at_the_end(commit, positions, until)
            if is_valid:
                self._commit_found()
            with self._lock:  # a leave that comes before the join leaves a member until its session times out
                self._changed.wait_for(lambda: not self._is_joining, max(0.0, until - time.monotonic()))
            if self._is_member and not self._settings.group_instance_id:
                self._leave(until)

        futures.wait([in_background(ask, here_if_need_be=True)], max(0.0, until - time.monotonic()))

    def _commit_at_the_end(self, commit: _Commit, positions: Mapping[TopicPartition, int], until: float) -> None:
        try:
            self._brokers.retrying(lambda: commit_living(partial(self._commit_own, commit), positions), until)
        except KafkalogError as error:
            log.warning("last_commit_failed", group=self._group, member=self._name, reason=str(error))

    def _commit_found(self) -> None:
        """Without auto-commit, and while the group has others: commit where this member began to read partitions of
        which nothing was committed. Another one would look up a start of its own, perhaps a later one."""
        if not self._found or self._settings.enable_auto_commit:
            return
        try:
            group = self._brokers.ask("DescribeGroup", pb.DescribeGroupRequest(group=self._group))
            if len(group.members) > 1:
                self._commit_own(self._commit_of_found(), dict(self._found))
        except KafkalogError as error:
            log.warning("last_commit_failed", group=self._group, member=self._name, reason=str(error))

    def _close_threads(self) -> None:
        """Nothing is handed out, and the lease is renewed no longer."""
        self._lease.end = -1.0
        self._closing.set()
        with self._lock:
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: it is no member, and has none of the threads; one of them may have the lock."""
        self._detach()
        self._cursors.may_be_empty = False
        self._cursors.replace({})

    def _detach(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._cursors.is_called = self._cursors.is_late = bool
        self._cursors.put_down = lambda: None


def _parts(partitions: Iterable[TopicPartition]) -> Iterator[list[TopicPartition]]:
    """Of so many partitions as one request may have."""
    listed = list(partitions)
    for start in range(0, len(listed), _PARTITIONS_AT_ONCE):
        yield listed[start : start + _PARTITIONS_AT_ONCE]


def _is_due(cursor: Cursor, position: int) -> bool:
    """Whether a commit of a position undoes no commit of a later offset by name."""
    return cursor.named is None or position >= cursor.named.offset


def _is_auto_due(cursor: Cursor, position: int) -> bool:
    """Whether auto commit may commit a position: it undoes no commit by name, and records were handed back since."""
    return _is_due(cursor, position) and (cursor.named is None or position > cursor.named.position)


def _new_name(settings: ConsumerSettings) -> str:
    readable = re.sub(r"[^a-zA-Z0-9._-]", "_", settings.client_id or socket.gethostname())[:200]
    return f"{readable}-{uuid.uuid4().hex}"
