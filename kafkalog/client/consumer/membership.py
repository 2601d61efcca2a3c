"""Membership of a consumer in its group: it joins, keeps its lease, and moves the partitions that have to move.

Three threads:

- `kafkalog-lease` renews the lease at each heartbeat. The lease counts from the *sending* of the last renewal that
  succeeded, by this process's monotonic clock, and ends a margin before the brokers' count. After that nothing is
  handed out.
- `kafkalog-news` waits at a broker for another generation, or for partitions that others release.
- `kafkalog-member` does everything else: for each generation it gives back the partitions that are no longer this
  member's, once no iterator has a record of them in hand, and claims those that now are. Partitions that stay are read
  on meanwhile. It also commits at each `auto.commit.interval.ms`.

The subscriber's callbacks run in a thread that reads (`serve`), as in Kafka's clients, so that they may seek and
commit. A partition is read only after `on_assigned`, and released only after `on_revoked`, has returned.

Failures are retried for ever, with pauses. When the lease has ended, or another process has joined under this member's
name, everything that was fetched is dropped, nothing is committed, and the member joins again.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from kafkalog.client.admin import ListedOffset, list_offsets
from kafkalog.client.background import in_background
from kafkalog.client.cluster import NO_LEADER, Cluster
from kafkalog.client.config import ConsumerSettings
from kafkalog.client.consumer.cursors import Cursor, Cursors, Hold, Lease
from kafkalog.client.consumer.fetcher import Source
from kafkalog.errors import (
    Closed,
    KafkalogError,
    LeaderNotAvailable,
    MemberFenced,
    NoCommittedOffset,
    NotOwner,
    RetriableError,
    StaleGeneration,
    UnknownMember,
)
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.shares import partitions_of, shares_of

log = get_logger(__name__)

Callback = Callable[[Any, list[TopicPartition]], object]
"""(consumer, partitions); called in a thread that reads."""

_MARGIN = 0.1
"""Of the session timeout: what clocks may differ in speed, and a message may take from the check to the application."""
_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 2.0
_LOOK_SECONDS = 0.5
_GONE = (UnknownMember, MemberFenced)


class Subscription(NamedTuple):
    """What a member subscribes to, and what it is told.

    Attributes:
        topics, pattern: names, or a regular expression that a whole name matches.
        on_assigned: called with partitions before they are read.
        on_revoked: called with partitions before they are released; their offsets may still be committed.
        on_lost: called with partitions that others may own already.
    """

    topics: tuple[str, ...] = ()
    pattern: str = ""
    on_assigned: Callback | None = None
    on_revoked: Callback | None = None
    on_lost: Callback | None = None

    def __str__(self) -> str:
        return f"topics matching {self.pattern}" if self.pattern else ", ".join(self.topics)


class _Call(NamedTuple):
    """A callback that is due, until a lease has ended; None: whenever that is."""

    callback: Callback
    partitions: list[TopicPartition]
    done: Callable[[], object]
    lease: Lease | None


class Membership:
    """A consumer's membership, from the first call of `start` to `leave`.

    Args:
        cluster: for offsets of partitions without a committed one; membership has connections of its own.
        cursors: of the consumer; what is assigned is added to them, what is revoked or lost is removed.
        consumer: for the callbacks.
    """

    def __init__(
        self,
        cluster: Cluster,
        cursors: Cursors,
        consumer: Any,
        group: str,
        settings: ConsumerSettings,
        subscription: Subscription,
    ) -> None:
        self._cluster = cluster
        self._cursors = cursors
        self._consumer = weakref.ref(consumer)
        weakref.finalize(consumer, self._close_threads)
        self._group = group
        self._settings = settings
        self._subscription = subscription
        self._session_seconds = settings.session_timeout_ms / 1000
        self._name = settings.group_instance_id or _new_name(settings)
        self._token = f"{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._registry: Cluster | None = None
        self._process = os.getpid()
        self._lease = Lease()  # of this membership; a later one has another
        self._changed = threading.Condition()  # guards all below; held for no I/O
        self._epoch = -1
        self._is_member = False
        self._lost: KafkalogError | None = None
        self._generation = -1
        self._share: frozenset[TopicPartition] = frozenset()
        self._topic_ids: dict[str, bytes] = {}
        self._claims: dict[TopicPartition, int] = {}  # what it owns, and the number of each claim
        self._unknown: dict[TopicPartition, int] = {}  # owned and not wanted: the answer to the claim was lost
        # To be released, and not read again before that, also if they are of the share again: a release that was not
        # answered may be executed late.
        self._going: set[TopicPartition] = set()
        self._revoked: set[Cursor] = set()  # on_revoked has been called
        self._waiting: dict[TopicPartition, str] = {}  # of the share, what others own
        # Claimed, and their offsets are being looked up; with the ids of their topics.
        self._starting: dict[TopicPartition, tuple[Future[dict[TopicPartition, ListedOffset]], Mapping[str, bytes]]]
        self._starting = {}
        self._freed = False
        self._calls: list[_Call] = []  # one at most is due at a time
        self._is_serving = False
        self._readers = 0
        self._asked_at = time.monotonic()
        self._progress: object = None
        self._order = 0
        self._written: dict[TopicPartition, int] = {}
        self._commit_at = 0.0
        self._error: KafkalogError | None = None
        self._stopping = False
        self._is_idle = False  # the member's thread does nothing any more, because of `_stopping`
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        cursors.may_be_empty = True
        cursors.is_called = self._is_due
        cursors.is_late = lambda: self._lease.has_ended()
        cursors.put_down = self._wake

    @property
    def name(self) -> str:
        """The member's name in its group."""
        return self._name

    def start(self) -> None:
        """Start the threads. Raises OutOfThreads."""
        for target, name in (
            (self._run, "kafkalog-member"),
            (self._keep_lease, "kafkalog-lease"),
            (self._follow, "kafkalog-news"),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    # --- for threads that read

    def _is_due(self) -> bool:
        return self._due_call() is not None or self._error is not None

    def _due_call(self) -> _Call | None:
        calls = self._calls[:1] if not self._is_serving else ()
        return next((call for call in calls if call.lease is None or not call.lease.has_ended()), None)

    @contextmanager
    def reading(self) -> Any:
        """During the `with` block a thread of the application waits for records."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._asked_at = time.monotonic()

    def serve(self) -> None:
        """Run the callbacks that are due, in this thread. Raises what keeps the member from reading."""
        while True:
            with self._changed:
                error = self._error
                if error is not None:
                    raise error.fresh()
                call = self._due_call()
                if call is None:
                    return
                self._is_serving = True
            try:
                call.callback(self._consumer(), list(call.partitions))
            finally:
                call.done()
                with self._changed:
                    self._is_serving = False
                    if call in self._calls:
                        self._calls.remove(call)
                    self._changed.notify_all()

    def _wake(self) -> None:
        """An iterator has put down what it had in hand."""
        if self._going:
            with self._changed:
                self._changed.notify_all()

    # --- requests

    def _ask(self, method: str, request: Any, seconds: float | None = None) -> Any:
        """Call any broker, each once. Raises KafkalogError."""
        registry = self._registry
        if registry is None:
            raise Closed(what="consumer")
        timeout_ms = int((self._session_seconds / 4 if seconds is None else seconds) * 1000) + 1
        return registry.call(method, request, patient=False, timeout_ms=timeout_ms)

    def _connect(self) -> None:
        """Connections of its own to the brokers in another order for each member: a slow call of another thread delays
        no renewal, and members spread over the brokers. Raises KafkalogError."""
        if self._registry is not None:
            return
        brokers = list(self._cluster.describe(patient=False).brokers)
        random.shuffle(brokers)
        settings = self._settings
        patience_ms = max(200, settings.session_timeout_ms // 4)
        self._registry = Cluster(
            [f"{broker.host}:{broker.grpc_port}" if ":" not in broker.host else f"[{broker.host}]:{broker.grpc_port}"
             for broker in brokers],
            connect_timeout_ms=min(settings.connect_timeout_ms, patience_ms),
            request_timeout_ms=patience_ms,
        )  # fmt: skip

    def _is_me(self, me: pb.Membership) -> bool:
        """Lock held: whether this is the membership now, and it is not lost."""
        return self._is_member and self._lost is None and me == self._me()

    def _me(self) -> pb.Membership:
        return pb.Membership(group=self._group, member=self._name, epoch=self._epoch)

    def awaited(self) -> set[TopicPartition] | None:
        """The partitions of its share that are not read yet; None: it is no member now."""
        cursors = self._cursors.by_partition
        with self._changed:
            if not self._is_member or self._lost is not None:
                return None
            share = self._share
        moving = Hold.ASSIGNED | Hold.REVOKED  # the latter: it is released first, and claimed again
        return {p for p in share if (cursor := cursors.get(p)) is None or cursor.hold & moving}

    def next_order(self) -> int:
        """The number of the next commit."""
        with self._changed:
            self._order += 1
            return self._order

    # --- the lease

    def _keep_lease(self) -> None:
        pause = _PAUSE_SECONDS
        wait = 0.0
        while not self._closing.wait(wait):
            with self._changed:
                self._changed.wait_for(lambda: (self._is_member and self._lost is None) or self._closing.is_set())
                if self._closing.is_set():
                    return
                me, session_timeout_ms = self._me(), self._settings.session_timeout_ms
            sent = time.monotonic()
            wait = self._settings.heartbeat_interval_ms / 1000
            if self._lease.has_ended():
                self._note_lost(me, UnknownMember(group=self._group, member=self._name))
                continue
            try:
                reply = self._ask(
                    "RenewMember", pb.RenewMemberRequest(member=me, session_timeout_ms=session_timeout_ms)
                )
            except _GONE as error:
                self._note_lost(me, error)
            except KafkalogError:
                wait, pause = pause, min(pause * 2, _PAUSE_SECONDS_MAX, self._session_seconds / 10)
            else:
                pause = _PAUSE_SECONDS
                if self._lease.has_ended():  # who noticed it has dropped a record already
                    self._note_lost(me, UnknownMember(group=self._group, member=self._name))
                with self._changed:
                    if self._is_me(me) and not self._lease.has_ended():
                        self._lease.end = sent + self._session_seconds * (1 - _MARGIN)
                    if reply.generation != self._generation:
                        self._freed = True
                        self._changed.notify_all()

    def _note_lost(self, me: pb.Membership, error: KafkalogError) -> None:
        with self._changed:
            if self._is_me(me):
                self._lease.end = -1.0
                self._lost = error
                self._changed.notify_all()

    # --- news

    def _follow(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._is_member and self._lost is None and not self._freed) or self._closing.is_set()
                )
                if self._closing.is_set():
                    return
                me, generation, waiting = self._me(), self._generation, sorted(self._waiting)
            seconds = max(self._session_seconds / 2, 1.0)
            request = pb.AwaitGroupRequest(
                member=me, generation=generation, partitions=shares_of(waiting), max_wait_ms=int(seconds * 1000)
            )
            try:
                reply = self._ask("AwaitGroup", request, seconds + self._session_seconds / 4)
            except _GONE as error:
                self._note_lost(me, error)
            except KafkalogError as error:
                log.info("group_news_late", group=self._group, member=self._name, reason=str(error))
                self._closing.wait(pause * (0.5 + random.random()))
                pause = min(pause * 2, _PAUSE_SECONDS_MAX)
                with self._changed:
                    self._freed = bool(self._waiting)  # perhaps they are: nobody was asked
                    self._changed.notify_all()
            else:
                pause = _PAUSE_SECONDS
                with self._changed:
                    if self._is_me(me) and sorted(self._waiting) == waiting:
                        self._take_news(reply.news)
                        self._freed = self._freed or bool(waiting)
                        self._changed.notify_all()

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
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()

    def _follow_changes(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._is_ending():
            try:
                self._step()
                pause = _PAUSE_SECONDS
            except Closed:
                return
            except _GONE as error:
                self._note_lost(self._me(), error)
            except (RetriableError, OSError) as error:
                log.info("group_not_followed", group=self._group, member=self._name, reason=str(error))
                self._pause(pause * (0.5 + random.random()))
                pause = min(pause * 2, _PAUSE_SECONDS_MAX)
            except KafkalogError as error:
                self._fail(error)
                self._pause(_PAUSE_SECONDS_MAX)
            except Exception as error:  # a defect; the reader learns of it, and this thread goes on
                log.exception("member_failed", group=self._group, member=self._name)
                self._fail(KafkalogError(reason=f"{type(error).__name__}: {error}"))
                self._pause(_PAUSE_SECONDS_MAX)

    def _is_ending(self) -> bool:
        return self._stopping or self._closing.is_set()

    def _pause(self, seconds: float | None) -> None:
        """Wait so long, or until the end."""
        with self._changed:
            self._changed.wait_for(self._is_ending, seconds)

    def _fail(self, error: KafkalogError) -> None:
        """Raise an error to who reads."""
        with self._changed:
            self._error = error
        with self._cursors.fetcher.lock:
            self._cursors.fetcher.call()

    def _step(self) -> None:
        """Do what is to be done now, then wait for news."""
        if self._lost is not None:
            self._lose()
        for step in (self._join, self._begin, self._revoke, self._claim, self._commit_if_due):
            if self._is_ending():
                return
            step()
        with self._changed:
            if self._has_work():
                return
            self._changed.wait(min(_LOOK_SECONDS, max(0.0, self._commit_at - time.monotonic())))
        self._check_poll()

    def _has_work(self) -> bool:
        """Lock held."""
        return self._stopping or self._lost is not None or self._freed

    def _join(self) -> None:
        """Join the group, unless this is a member of it."""
        if self._is_member:
            return
        self._connect()
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
        reply = self._ask("JoinGroup", request)
        with self._changed:
            self._error = None
            self._is_member, self._epoch = True, reply.epoch
            self._forget()
            self._generation = -1
            self._take_news(reply.news)
            self._asked_at = time.monotonic()
            self._commit_at = time.monotonic() + settings.auto_commit_interval_ms / 1000
            self._lease = Lease(sent + self._session_seconds * (1 - _MARGIN))
            self._changed.notify_all()
        log.info("group_joined", group=self._group, member=self._name, generation=self._generation)

    def _lose(self) -> None:
        """Drop everything; others may own it."""
        self._lease.end = -1.0
        error, lost = self._lost, self._told()
        self._cursors.remove(list(self._cursors.by_partition))
        with self._changed:
            self._forget()
            self._calls.clear()
            self._is_member = False
            self._lost = None
            self._share = frozenset()
            self._changed.notify_all()
        log.warning("group_membership_lost", group=self._group, partitions=len(lost), reason=str(error))
        # A join of its own may have been executed late. If another process has the name, they would fence each other.
        is_replaced = isinstance(error, MemberFenced) and error.facts.get("process") != self._token
        if is_replaced and self._settings.group_instance_id:
            assert error is not None
            self._fail(error)
            self._pause(None)
            return
        if self._subscription.on_lost is not None and lost:
            self._call(self._subscription.on_lost, lost, lambda: None, None)
            self._wait_served()

    def _forget(self) -> None:
        """Lock held: nothing is claimed."""
        self._claims, self._unknown, self._waiting = {}, {}, {}
        self._starting, self._written = {}, {}
        self._going, self._revoked = set(), set()

    # --- callbacks

    def _told(self) -> list[TopicPartition]:
        """The partitions that are the application's: `on_assigned` was called with them, and no other callback."""
        with self._changed:
            serving = set(self._calls[0].partitions) if self._is_serving and self._calls else set()
        with self._cursors.fetcher.lock:
            return sorted(
                partition
                for partition, cursor in self._cursors.by_partition.items()
                if cursor not in self._revoked and bool(cursor.hold & Hold.ASSIGNED) == (partition in serving)
            )

    def _call(
        self, callback: Callback, partitions: list[TopicPartition], done: Callable[[], object], lease: Lease | None
    ) -> None:
        with self._changed:
            self._calls.append(_Call(callback, partitions, done, lease))
        with self._cursors.fetcher.lock:
            self._cursors.fetcher.call()

    def _wait_served(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._calls or self._is_ending())

    # --- revoking

    def _revoke(self) -> None:
        """Give back what is no longer of the share, once nothing of it is in hand and `on_revoked` has returned."""
        with self._changed:
            self._going |= self._claims.keys() - self._share | self._made_anew()
            gone = set(self._going)
            unknown = {p: number for p, number in self._unknown.items() if p not in self._claims}
            is_calling = bool(self._calls)
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
                    self._call(callback, sorted(untold), lambda: self._revoked.update(untold.values()), self._lease)
                ready -= untold.keys()
            if ready:
                self._release(ready)
        if unknown:
            request = pb.ReleasePartitionsRequest(member=self._me())
            for (topic, number), claim in unknown.items():
                request.claims.add(topic=topic, partition=number, claim=claim)
            self._ask("ReleasePartitions", request)
            with self._changed:
                self._unknown = {}

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
        listed = sorted(partitions)
        is_committing = self._settings.enable_auto_commit
        positions = self._cursors.positions(listed) if is_committing else {}
        request = pb.ReleasePartitionsRequest(member=self._me(), order=self.next_order())
        for partition in listed:
            claim = request.claims.add(
                topic=partition.topic, partition=partition.partition, claim=self._claims[partition]
            )
            if partition in positions:
                claim.offset = positions[partition]
                claim.topic_id = self._cursors.by_partition[partition].source.reader.topic_id
        self._ask("ReleasePartitions", request)
        self._revoked.difference_update([self._cursors.by_partition.get(partition) for partition in listed])
        self._cursors.remove(listed)
        with self._changed:
            self._freed = self._freed or bool(self._share & set(listed))
            for partition in listed:
                self._claims.pop(partition, None)
                self._going.discard(partition)
                self._starting.pop(partition, None)
                self._written.pop(partition, None)

    # --- claiming

    def _claim(self) -> None:
        with self._changed:
            generation, topic_ids = self._generation, self._topic_ids
            wanted = sorted(self._share - self._claims.keys())
            if not wanted or not self._freed:
                self._have_looked()
                return
        self._know(wanted, topic_ids)
        request = pb.ClaimPartitionsRequest(member=self._me(), generation=generation, partitions=shares_of(wanted))
        try:
            reply = self._ask("ClaimPartitions", request)
        except StaleGeneration:
            with self._changed:
                if generation == self._generation:  # otherwise the news have come meanwhile
                    self._have_looked()
            return
        claims = {TopicPartition(each.topic, each.partition): each for each in reply.claims}
        with self._changed:
            self._claims.update((partition, each.claim) for partition, each in claims.items())
            if generation == self._generation:
                self._waiting = {TopicPartition(each.topic, each.partition): each.owner for each in reply.owners}
                self._have_looked()
        starts = {partition: each.offset for partition, each in claims.items() if each.HasField("offset")}
        self._written.update(starts)
        self._add(starts, topic_ids)
        missing = [partition for partition in claims if partition not in starts]
        if missing:
            self._look_up(missing, topic_ids)

    def _know(self, partitions: Iterable[TopicPartition], topic_ids: Mapping[str, bytes]) -> None:
        """Have the cluster know the topics by the generation's ids, and so their leaders: starts are looked up at each
        by itself. Of a topic that was created again it may know the one before, and what reads the new one would fail
        with UnknownTopicId until the metadata is old. Raises KafkalogError."""

        def known_id(topic: str) -> bytes | None:
            known = self._cluster.known_topic(topic)
            return None if known is None else known.topic_id

        topics = sorted({partition.topic for partition in partitions})
        if unknown := [topic for topic in topics if known_id(topic) != topic_ids[topic]]:
            self._cluster.refresh(unknown, patient=False)
        for partition in partitions:
            if known_id(partition.topic) not in (None, topic_ids[partition.topic]):
                # The broker that was asked does not know of it yet.
                raise LeaderNotAvailable(partition=str(partition), broker_id=NO_LEADER)

    def _have_looked(self) -> None:
        """Lock held: claims were made as far as is known; the next news are waited for."""
        self._freed = False
        self._changed.notify_all()

    def _look_up(self, partitions: list[TopicPartition], topic_ids: Mapping[str, bytes]) -> None:
        """Find where partitions without an offset start, by `auto.offset.reset`, beside everything else."""
        reset = self._settings.auto_offset_reset
        if reset == "error":
            where = str(partitions[0])
            self._fail(NoCommittedOffset(group=self._group, partition=where, setting="auto.offset.reset"))
            return
        by_leader: dict[int, list[TopicPartition]] = {}  # so a broker that is away holds up no other one's
        for partition in partitions:
            topic = self._cluster.known_topic(partition.topic)
            known = () if topic is None else topic.partitions
            leader = known[partition.partition].leader if partition.partition < len(known) else NO_LEADER
            by_leader.setdefault(leader, []).append(partition)
        for some in by_leader.values():
            begun = in_background(partial(self._listed, some, reset), self._looked_up)
            with self._changed:
                self._starting.update(dict.fromkeys(some, (begun, topic_ids)))

    def _listed(self, partitions: list[TopicPartition], reset: str) -> dict[TopicPartition, ListedOffset]:
        """The starts of those partitions that are served. Waits a little if one is not, as it is asked for again."""
        failed: dict[TopicPartition, KafkalogError] = {}
        found = list_offsets(self._cluster, dict.fromkeys(partitions, reset), failed)
        for partition, error in failed.items():
            log.warning("group_partition_not_begun", group=self._group, partition=str(partition), reason=str(error))
        if failed:
            self._closing.wait(_PAUSE_SECONDS_MAX)
        return found

    def _looked_up(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _begin(self) -> None:
        """Read those partitions whose offsets were looked up."""
        with self._changed:
            done = {partition: each for partition, each in self._starting.items() if each[0].done()}
            for partition in done:
                del self._starting[partition]
        by_call: dict[int, list[TopicPartition]] = {}
        for partition, (future, _) in done.items():
            by_call.setdefault(id(future), []).append(partition)
        for partitions in by_call.values():
            future, topic_ids = done[partitions[0]]
            error = future.exception()
            if error is None:
                found = {partition: each.offset for partition, each in future.result().items()}
                self._add(
                    {p: at for p in partitions if p in self._claims and (at := found.get(p)) is not None}, topic_ids
                )
                again = [partition for partition in partitions if partition not in found]
                if again:
                    self._look_up(again, topic_ids)
            elif isinstance(error, RetriableError):
                self._look_up(partitions, topic_ids)
            else:
                raise error

    def _add(self, starts: Mapping[TopicPartition, int], topic_ids: Mapping[str, bytes]) -> None:
        """Read partitions from these offsets, once `on_assigned` has returned."""
        if not starts:
            return
        cursors = {
            partition: Cursor(Source(partition, topic_ids[partition.topic], offset), self._lease)
            for partition, offset in starts.items()
        }
        callback = self._subscription.on_assigned
        if callback is not None:
            for cursor in cursors.values():
                cursor.hold |= Hold.ASSIGNED
        self._cursors.add(cursors)
        if callback is not None:
            self._call(
                callback,
                sorted(cursors),
                lambda: self._cursors.let_go(cursors.values(), Hold.ASSIGNED),
                self._lease,
            )

    # --- committing

    def _commit_if_due(self) -> None:
        now = time.monotonic()
        if now < self._commit_at:
            return
        self._commit_at = now + self._settings.auto_commit_interval_ms / 1000
        if self._settings.enable_auto_commit:
            self.commit(self._cursors.positions(self._claims.keys() & self._cursors.by_partition.keys()))

    def commit(self, offsets: Mapping[TopicPartition, int], *, patient: bool = False) -> None:
        """Commit offsets of what this member owns, those that are not committed already.

        Raises:
            NotOwner: it does not own one of them (any more).
        """
        with self._changed:
            news = {p: offset for p, offset in offsets.items() if self._written.get(p) != offset}
            if not news:
                return
            if not self._is_member:
                raise NotOwner(member=self._name, partition=str(min(news)), group=self._group, owner="")
            self._order += 1
            me = self._me()
            request = pb.CommitOffsetsRequest(group=self._group, member=me, order=self._order)
            cursors = self._cursors.by_partition
            for partition, offset in news.items():
                cursor = cursors.get(partition)  # of what was read: a topic may have been created again under the name
                topic_id = self._topic_ids.get(partition.topic) if cursor is None else cursor.source.reader.topic_id
                request.offsets.add(
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=offset,
                    topic_id=topic_id,
                    claim=self._claims.get(partition),
                )
        if patient:
            try:
                self._cluster.call("CommitOffsets", request)
            except _GONE as error:
                self._note_lost(me, error)
                raise NotOwner(member=me.member, partition=str(min(news)), group=self._group, owner="") from None
        else:
            self._ask("CommitOffsets", request)
        with self._changed:
            self._written.update((p, offset) for p, offset in news.items() if p in self._claims)

    # --- slow applications

    def _check_poll(self) -> None:
        """Leave the group if the application has asked for no record for `max.poll.interval.ms`."""
        now = time.monotonic()
        with self._cursors.fetcher.lock:
            progress = [cursor.position() for cursor in self._cursors.by_partition.values() if cursor.hands]
        with self._changed:
            if self._readers or not self._is_member or progress != self._progress:
                self._asked_at, self._progress = now, progress
            limit_ms = self._settings.max_poll_interval_ms
            is_slow = now - self._asked_at > limit_ms / 1000
        if is_slow and not self._is_ending():
            self._lease.end = -1.0
            log.warning("group_left_because_polls_are_slow", group=self._group, member=self._name, limit_ms=limit_ms)
            self._leave()
            with self._changed:
                self._lost = UnknownMember(group=self._group, member=self._name)
            self._lose()
            with self._changed:
                self._changed.wait_for(lambda: self._readers > 0 or self._is_ending())

    # --- the end

    def _leave(self, until: float = 0.0) -> None:
        """Leave the group, and try again until then."""
        request = pb.LeaveGroupRequest(group=self._group, member=self._name, epoch=self._epoch)
        try:
            self._retrying(lambda: self._ask("LeaveGroup", request), until)
        except KafkalogError as error:
            log.info("group_left_by_its_lease", group=self._group, member=self._name, reason=str(error))

    def _retrying(self, attempt: Callable[[], object], until: float) -> None:
        """Call `attempt`, again and again until it succeeds, fails for good, or it is so late. Raises KafkalogError."""
        while True:
            try:
                attempt()
                return
            except RetriableError:
                if time.monotonic() >= until:
                    raise
            # The thread that closes waits here, for as long as `close` may take. What failed (a broker that restarts, a
            # connection to ZooKeeper) comes back inside brokers, which notify no client of it.
            time.sleep(min(_PAUSE_SECONDS, max(0.0, until - time.monotonic())))

    def stop(self, timeout: float) -> None:
        """Hand out nothing more, call `on_revoked` in this thread, commit, and leave the group; a static member keeps
        its place for its session timeout. If that was impossible, others go on from the last commit. Safe to call
        twice.

        Args:
            timeout: seconds to wait at most for brokers and threads.
        """
        end = time.monotonic() + timeout
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
            if os.getpid() != self._process:
                return
            # What the member's thread does now may end a claim. It may not get on if this is a signal handler above a
            # thread that has the fetcher's lock.
            patience = _PAUSE_SECONDS if self._cursors.fetcher.is_interrupted() else timeout
            self._changed.wait_for(lambda: self._is_idle or not self._threads[0].is_alive(), patience)
        is_valid = self._is_member and not self._lease.has_ended()
        self._cursors.hold(self._cursors.by_partition, Hold.REVOKED)
        self._lease.end = -1.0  # also for what a thread has taken and not handed out yet
        try:
            self._tell_the_end(is_valid)
            if is_valid and self._settings.enable_auto_commit:
                self._commit_at_the_end(end)
        finally:
            self._close_threads()
            if self._is_member and not self._settings.group_instance_id:
                self._leave(end)
            registry = self._registry
            if registry is not None:
                registry.close()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, end - time.monotonic()))
            self._cursors.remove(list(self._cursors.by_partition))
            self._detach()

    def _tell_the_end(self, is_valid: bool) -> None:
        """Call the callbacks that are left to call."""
        held, subscription = self._told(), self._subscription
        for call in self._calls[self._is_serving :]:
            if call.callback is subscription.on_lost:
                call.callback(self._consumer(), call.partitions)
        callback = subscription.on_revoked if is_valid else subscription.on_lost
        if callback is not None and held:
            callback(self._consumer(), held)

    def _commit_at_the_end(self, until: float) -> None:
        positions = self._cursors.positions(list(self._claims))
        try:
            self._retrying(lambda: self.commit(positions), until)
        except KafkalogError as error:
            log.warning("last_commit_failed", group=self._group, member=self._name, reason=str(error))

    def _close_threads(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: it is no member, and has none of the threads."""
        self._detach()
        self._cursors.may_be_empty = False
        self._cursors.replace({})

    def _detach(self) -> None:
        self._cursors.is_called = self._cursors.is_late = bool
        self._cursors.put_down = lambda: None


def _new_name(settings: ConsumerSettings) -> str:
    readable = re.sub(r"[^a-zA-Z0-9._-]", "_", settings.client_id or socket.gethostname())[:200]
    return f"{readable}-{uuid.uuid4().hex}"
