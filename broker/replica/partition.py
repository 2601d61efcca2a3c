"""One replica of a partition on this broker: its role, its log, the parts staged beside it, the high watermark, the
readable end. Knows no sockets, no ZooKeeper.

A replica leads in one leader epoch, follows the leader of one, or does neither. What a leader knows of its followers is
in `leadership.py`. A partition with one replica has nobody to wait for: the log's end is its high watermark.

The readable end is the high watermark or, with flush.visibility=flushed, the end of the flushed records (the paper's
rule, section 3.1) if that is before it. In both cases it is at most the start of the first hidden batch (`applier.py`).
It does not go back while this replica leads, because a reader would then treat its range as lost.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from broker.config import TopicSettings
from broker.replica.applier import Applied, Applier
from broker.replica.leadership import Joining, Leadership, Pulse
from broker.replica.waiters import Waiters
from broker.staging.format import PreparedSet
from broker.staging.part import Write
from broker.staging.staging import Staged, StagedCopy, Staging
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from broker.storage.reader import View, reach
from broker.storage.segment import FileSlice, Hint
from kafkalog.clock import Clock
from kafkalog.errors import (
    Closed,
    FencedLeaderEpoch,
    KafkalogError,
    LogTruncated,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetNotAvailable,
    OffsetOutOfRange,
    ReplicaDiverged,
    StorageFailed,
    UnknownLeaderEpoch,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import Batch, iter_batches
from kafkalog.zk.registry import BrokerRecord, PartitionState

log = get_logger(__name__)

_NO_LIMIT = 1 << 62
_FOLLOWED_SECONDS = 3.0
"""Followers that ask for nothing new ask each half second."""


class _FlushRule(NamedTuple):
    """Whether readers see only what is flushed. `shown_offset`: records before it were readable when the rule was set,
    and stay readable."""

    flushed_only: bool
    shown_offset: int


class Ack(NamedTuple):
    """What the ack of a write waits for. It belongs to a place and to a leader epoch: no later epoch's watermark keeps
    its promise.

    Attributes:
        epoch: in which the write was made.
        end_offset: where it ends in the log.
        staged_end: where it ends in what is staged; -1: nothing was.
        needs_flush: the log must be durable up to the offset.
        needs_replicas: the watermarks must reach these places.
    """

    partition: Partition
    epoch: int
    end_offset: int
    staged_end: int
    needs_flush: bool
    needs_replicas: bool

    def is_kept(self) -> bool:
        """Whether the promise is kept.

        Raises:
            StorageFailed, NotLeader, NotEnoughReplicasAfterAppend: it is not known whether it will be.
        """
        return self.partition.keeps(self)


class Position(NamedTuple):
    """What a follower has, and whom it follows.

    Attributes:
        last_epoch: in which its log ends; -1: it has no records.
        is_whole: nothing before the end is known to be damaged.
        needs_producers: it lacks the state of the producers of the records before its log.
        staged: its copies of what is staged.
    """

    leader_id: int
    epoch: int
    end_offset: int
    last_epoch: int
    is_whole: bool
    needs_producers: bool
    staged: list[StagedCopy]


class Wanted(NamedTuple):
    """How the in-sync set of a partition is to change.

    Attributes:
        state: the last that is known to be written.
        joining, leaving: who is to join it, and who has to leave it.
        is_unresolved: it is not known whether an earlier change was written, or will be.
    """

    state: PartitionState
    joining: list[Joining]
    leaving: list[int]
    is_unresolved: bool


class Partition:
    """A replica that this broker holds. It has no role until `lead` or `follow` is called.

    Args:
        topic: the topic's name, for messages.
        topic_id: names the topic in requests.
        number: within the topic.
        log: its open log, of `directory`, which closes it.
        settings: the topic's.

    Attributes:
        waiters: who waits for an append, a flush, the high watermark or the close.
        replica_waiters: which followers wait for an append or a change of the role.
        may_have_lost: a loss of power may have damaged the log, which was not cut after it (`cut_unsynced_damage`).

    Raises:
        StorageFailed, FileRefused, DiskFull: the staged data cannot be opened.
    """

    def __init__(
        self,
        topic: str,
        topic_id: bytes,
        number: int,
        log: Log,
        directory: LogDirectory,
        settings: TopicSettings,
        broker_id: int,
        clock: Clock,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.label = f"{topic}-{number}"
        self.log = log
        self.settings = settings
        self._directory = directory
        self._broker_id = broker_id
        self._clock = clock
        self._closed = False
        self.waiters = Waiters()
        self.replica_waiters = Waiters()
        # Guards the role; held for the writes of a follower and the change of a role, before the log's locks.
        self._role_lock = threading.Lock()
        self._position_lock = threading.Lock()  # of `position`; taken before the role's
        self._leadership: Leadership | None = None
        self._epoch = -1  # the leader epoch in which this replica leads or follows
        self._leader_id = -1
        self._assigned: tuple[int, ...] = (broker_id,)
        self._readable_limit = _NO_LIMIT  # the high watermark, unless this replica is alone
        self.may_have_lost = False
        self.on_joinable: Callable[[], object] = lambda: None
        self.is_certain: Callable[[], bool] = lambda: True  # whether the roles are those of this moment
        self._reader = log.reader
        if log.flushed_offset < log.end_offset:
            log.flush()  # only the previous Partition knew which batches were hidden until their sync
        self._staging = Staging(directory.services, log.directory, log.label)
        self._applier = Applier(log, self._staging)
        self._flush_rule = _FlushRule(settings.flush_visibility == "flushed", 0)
        log.on_flushed = self._flushed

    # --- the role --------------------------------------------------------------------------------------------------

    def lead(self, state: PartitionState, assigned: Sequence[int]) -> None:
        """Lead, or go on leading, as a state says.

        Args:
            assigned: the brokers in the topic's znode; the state may have others.

        Raises:
            StorageFailed, DiskFull, Closed: the beginning of the epoch could not be noted; nothing changed.
        """
        with self._role_lock:
            leadership = self._leadership
            self._assigned = tuple(assigned)
            if leadership is not None and leadership.epoch == state.leader_epoch:
                leadership.configure(assigned, self.settings.min_insync_replicas)
                self._adopt(leadership, state)
            else:
                was_alone = leadership is not None and self._readable_limit == _NO_LIMIT
                self.log.begin_epoch(state.leader_epoch, durable=False)
                self._staging.begin_epoch(state.leader_epoch)
                self._applier.begin(state.leader_epoch)
                if was_alone and len(state.held_by(assigned)) > 1:
                    # Readers have seen all that was appended in the epoch that is over, and its acks waited for nobody.
                    if self.log.needs_flush_for_ack:
                        self.log.flush_to(self.log.end_offset)
                    self._readable_limit = self.log.high_watermark = self.log.end_offset
                leadership = self._leadership = Leadership(
                    self._broker_id,
                    state,
                    assigned,
                    self.settings.min_insync_replicas,
                    self._own_end,
                    self._staging.staged_end,
                    self.log.high_watermark,
                    self._clock.monotonic(),
                )
                self._epoch, self._leader_id = state.leader_epoch, self._broker_id
            leadership.advance(self._own_end, self._staging.staged_end)
            self._publish_watermark(leadership)
        self.waiters.wake()
        self.replica_waiters.wake()
        self.on_joinable()

    def follow(self, leader_id: int, leader_epoch: int) -> None:
        """Follow a leader, -1 for nobody, from now on. Appends that are not acknowledged get an error."""
        with self._role_lock:
            if leader_epoch < self._epoch:
                return
            if self._leadership is not None:
                self._staging.end_epoch()
            with suppress(FencedLeaderEpoch):  # the log knows of a later one: what is behind it is refused anyway
                self.log.follow_epoch(leader_epoch)  # first: an append that waits comes to nothing
            self._leadership, self._epoch, self._leader_id = None, leader_epoch, leader_id
            self._readable_limit = self.log.high_watermark
        self.waiters.wake()
        self.replica_waiters.wake()

    @property
    def leads(self) -> bool:
        return self._leadership is not None

    @property
    def leader_id(self) -> int:
        """The broker that leads, as far as this replica knows; -1: none does."""
        return self._leader_id

    @property
    def leader_epoch(self) -> int:
        """The epoch in which this replica leads or follows; -1: in none yet."""
        return self._epoch

    @property
    def high_watermark(self) -> int:
        """Every record before it is on all replicas of the in-sync set, as far as this one knows."""
        limit = self._readable_limit
        return self.end_offset if limit == _NO_LIMIT else limit

    @property
    def _own_end(self) -> int:
        """Up to where this replica has what an ack promises."""
        return self.log.flushed_offset if self.log.needs_flush_for_ack else self.log.end_offset

    def _publish_watermark(self, leadership: Leadership) -> None:
        """Role lock held: let readers read up to the high watermark."""
        if leadership.is_alone:
            self._readable_limit = _NO_LIMIT
            if self.log.has_high_watermark:  # from when there were others
                self.log.high_watermark = None
        else:
            self._readable_limit = leadership.watermark
            self.log.high_watermark = leadership.watermark

    def _advance(self) -> None:
        """Move the high watermark after the log's end, a follower or the in-sync set has moved, and wake readers."""
        if self._readable_limit == _NO_LIMIT or self._leadership is None:
            return  # before the lock: a follower flushes while it has it
        with self._role_lock:
            leadership = self._leadership
            if leadership is None or not leadership.advance(self._own_end, self._staging.staged_end):
                return
            self._publish_watermark(leadership)
        self.waiters.wake()

    # --- what requests do ----------------------------------------------------------------------------------------

    def append_as_leader(
        self, batches: Sequence[Batch], needs_replicas: bool = False
    ) -> tuple[int, list[Appended | KafkalogError]]:
        """Append checked batches in one write; returns the leader epoch, and each batch's outcome, in order. Wakes
        readers that wait for data.

        Args:
            needs_replicas: the ack will wait for the in-sync set.

        Raises:
            NotLeader: this broker does not lead (any more).
            NotEnoughReplicas: the ack could not be given; nothing was written.
            StorageFailed, DiskFull: nothing was written.
        """
        leadership = self._leadership
        if self._closed or leadership is None:
            raise self._not_here()
        if needs_replicas:
            self._check_enough(leadership)
        try:
            outcomes = self.log.append(batches, leadership.epoch)
        except (Closed, FencedLeaderEpoch):  # between the check above and here
            raise self._not_here() from None
        if self._readable_limit == _NO_LIMIT:
            if self.waiters:
                self.waiters.wake()
        else:
            if self.replica_waiters:
                self.replica_waiters.wake()
            self._advance()
        return leadership.epoch, outcomes

    def _check_enough(self, leadership: Leadership) -> None:
        """Raises NotEnoughReplicas."""
        if leadership.is_below_min:
            raise NotEnoughReplicas(
                partition=self.label, insync=list(leadership.state.isr), least=leadership.min_insync
            )

    def check_reader(self, epoch: int, offset: int, last_epoch: int | None) -> None:
        """Check what a reader believes (KIP-320).

        Args:
            epoch: the leader epoch in which it believes.
            offset: that it asks for.
            last_epoch: in which the records before that were read, or written; None: it does not say.

        Raises:
            FencedLeaderEpoch, UnknownLeaderEpoch: one of the two does not know the newest epoch.
            LogTruncated: the log does not have what it has read.
        """
        current = self._epoch
        if epoch != current:
            error = FencedLeaderEpoch if epoch < current else UnknownLeaderEpoch
            raise error(partition=self.label, epoch=epoch, current=current)
        if last_epoch is None:
            return
        _, ended = self.log.epoch_end(last_epoch)  # not before the log's start: what was deleted is not truncated
        if ended < offset:
            start_offset = self._reader.view.start_offset
            raise LogTruncated(
                partition=self.label, offset=offset, epoch=last_epoch, start_offset=start_offset, end_offset=ended
            )

    def read(self, offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        """A description of the bytes from an offset on; see Reader.read."""
        if self._closed:
            raise self._not_here()
        try:
            found = self._reader.read(offset, max_bytes, hint, self._look)
        except Closed:
            raise self._not_here() from None
        except OffsetOutOfRange as error:
            if offset > error.facts["end_offset"]:
                self._check_knows_end(self._leadership)
            raise
        if not found.length and not self.is_certain():  # the reader would wait where nothing comes any more
            try:
                self._check_leads_surely(self._leadership)
            except BaseException:
                found.close()
                raise
        return found

    @property
    def is_open(self) -> bool:
        """Whether requests are served; the directory may have closed the log."""
        return not self._closed and not self._reader.closed

    @property
    def start_offset(self) -> int:
        """The first offset that may be read."""
        return self._reader.view.start_offset

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        return self._reader.view.end_offset

    @property
    def readable_end_offset(self) -> int:
        """The offset up to which readers may read."""
        return self._look()[1]

    def _look(self) -> tuple[View, int]:
        """The current view and the readable end, both of the same moment. A view taken amid a hidden batch would end
        within that batch if the batch was shown meanwhile."""
        while True:
            rule, hidden = self._flush_rule, self._applier.hidden
            view = self._reader.view
            if self._applier.hidden is hidden and self._flush_rule is rule:
                break
        end = view.end_offset
        if rule.flushed_only:
            end = max(view.flushed_offset, min(rule.shown_offset, end))
        end = min(end, self._readable_limit)
        from_offset = hidden.from_offset
        return view, end if from_offset is None or end <= from_offset else max(view.start_offset, from_offset)

    @property
    def size_bytes(self) -> int:
        return self._reader.view.size_bytes

    def offset_for_timestamp(self, timestamp_us: int, from_offset: int = 0) -> tuple[int, int | None] | None:
        """The first readable record at or after a timestamp; see Reader."""
        with self._hosted():
            return self._reader.offset_for_timestamp(timestamp_us, from_offset, self._look)

    def reach(self, offset: int, max_bytes: int) -> tuple[int, int]:
        """The offset about `max_bytes` after an offset, and the bytes up to it; see `reach`."""
        view, end_offset = self._look()
        return reach(view, offset, max_bytes, end_offset)

    def delete_before(self, offset: int) -> int:
        """Delete every record before an offset, or all readable ones (-1); returns the start offset after that.

        Raises:
            OffsetOutOfRange: the offset is after the readable end.
        """
        start_offset, end_offset = self.start_offset, self.readable_end_offset
        if offset > end_offset:
            raise OffsetOutOfRange(
                offset=offset, partition=self.label, start_offset=start_offset, end_offset=end_offset
            )
        with self._hosted():
            start_offset = self.log.delete_before(end_offset if offset == -1 else offset)
        self.replica_waiters.wake()
        return start_offset

    def check_leads(self, epoch: int) -> None:
        """Raises NotLeader: this replica does not lead in that epoch (any more)."""
        leadership = self._leadership
        if leadership is None or leadership.epoch != epoch:
            raise self._not_here()

    def end_for_readers(self) -> int:
        """The readable end, for who asks for the latest offset.

        Raises:
            OffsetNotAvailable: a new leader does not know yet up to where the last one let readers read (KIP-207), or
                another one may have been elected meanwhile. An end before that would look like lost data.
        """
        self._check_knows_end(self._leadership)
        return self.readable_end_offset

    def _check_knows_end(self, leadership: Leadership | None) -> None:
        """Raises OffsetNotAvailable: see `end_for_readers`."""
        if leadership is not None and not leadership.is_alone and leadership.watermark < leadership.start_offset:
            raise OffsetNotAvailable(partition=self.label, leader_epoch=leadership.epoch) from None
        self._check_leads_surely(leadership)

    def _check_leads_surely(self, leadership: Leadership | None) -> None:
        """Raises OffsetNotAvailable: another replica may have been elected more than some moments ago."""
        if leadership is None or leadership.is_alone or self.is_certain():
            return
        with self._role_lock:
            is_followed = leadership.is_followed(self._clock.monotonic() - _FOLLOWED_SECONDS)
        if not is_followed:
            raise OffsetNotAvailable(partition=self.label, leader_epoch=leadership.epoch) from None

    def left(self, broker_id: int, directory: str) -> None:
        """A follower does not follow this replica any more."""
        with self._role_lock:
            if self._leadership is not None:
                self._leadership.left(broker_id, directory)

    # --- what followers ask of the leader ----------------------------------------------------------------------------

    def fetched(
        self,
        broker_id: int,
        directory: str,
        pulse: Pulse,
        epoch: int,
        end_offset: int,
        last_epoch: int,
        is_whole: bool,
        staged: Sequence[StagedCopy],
    ) -> tuple[int, int] | None:
        """A follower asks for what comes after the end of its log.

        Args:
            epoch: of the leader, as the follower believes.
            end_offset, last_epoch: where the follower's log ends, and the epoch in which it does.
            is_whole: it lacks nothing of what is before the end of its log.
            staged: what it has of what is staged.

        Returns:
            None if its log agrees with this one up to there; then it has everything before its end, except what is
            damaged. Else the last epoch of this log that may agree, and where it ended here.

        Raises:
            NotLeader, FencedLeaderEpoch, UnknownLeaderEpoch: one of the two does not know the newest epoch.
            OffsetOutOfRange: the log begins after the follower's end, and the follower is not empty or not where a copy
                begins.
        """
        with self._hosted():
            begins_copy = last_epoch < 0 and end_offset < self.start_offset and end_offset == self.copy_offset
        with self._hosted(), self._role_lock:
            leadership = self._leadership
            if leadership is None:
                raise self._not_here()
            if epoch != leadership.epoch:
                error = FencedLeaderEpoch if epoch < leadership.epoch else UnknownLeaderEpoch
                raise error(partition=self.label, epoch=epoch, current=leadership.epoch)
            view = self._reader.view
            if end_offset < view.start_offset and not begins_copy:
                raise self._reader.out_of_range(end_offset, view, view.end_offset)
            if last_epoch >= 0:
                found, ended = self.log.epoch_end(last_epoch)
                if found != last_epoch or ended < end_offset:
                    return found, ended
            elif end_offset > view.end_offset:
                return -1, view.start_offset
            staged_end = self._staging.lacking(staged, 0).reached
            joinable = leadership.fetched(
                broker_id,
                directory,
                pulse,
                end_offset,
                is_whole,
                staged_end,
                view.end_offset,
                self._staging.staged_end,
            )
        self._advance()
        if joinable:
            self.on_joinable()
        return None

    @property
    def copy_offset(self) -> int:
        """Where a copy of this log begins: with the batch that contains the start offset."""
        with self._hosted():
            return self._reader.copy_offset()

    def read_as_replica(self, offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        """As `read`, in whatever role, up to the log's end, and from where a copy begins."""
        with self._hosted():
            return self._reader.read(offset, max_bytes, hint, for_copy=True)

    def producers_before(self, offset: int) -> bytes:
        """The state of the producers of the records before an offset, for a follower whose log begins there; see
        Log.producers_before."""
        with self._hosted():
            return self.log.producers_before(offset)

    def met_damage(self, offset: int) -> None:
        """A follower says that what it got from an offset on is damaged."""
        self._reader.on_damage(offset)

    def staged_news(
        self, staged: Sequence[StagedCopy], max_bytes: int
    ) -> tuple[list[StagedCopy] | None, list[FileSlice]]:
        """The files of what is staged here, if a follower with these copies has to remove or cut some, else None; and
        the next pieces that it lacks, as they stand in the files."""
        with self._hosted():
            lacking = self._staging.lacking(staged, max_bytes)
            pieces = (self._staging.slice(each) for each in lacking.pieces)
            return lacking.files, [piece for piece in pieces if piece is not None]

    def staged_copies(self) -> list[StagedCopy]:
        """The files of what is staged here."""
        return self._staging.copies()

    def throttled_rate(self, broker_id: int) -> int:
        """The bytes a second to which the copying by a follower is to be held; 0: it is not. No ack waits for one that
        is."""
        leadership = self._leadership
        if leadership is None or not leadership.state.throttled_rate:
            return 0
        with self._role_lock:
            state, staged_end = leadership.state, self._staging.staged_end
            is_held = broker_id in state.adding and leadership.holds_no_ack(broker_id, self.end_offset, staged_end)
            return state.throttled_rate if is_held else 0

    def lacking_bytes(self, broker_id: int) -> int:
        """About how many bytes of the log a follower does not have; 0 if this replica does not lead."""
        leadership = self._leadership
        if leadership is None:
            return 0
        view = self._reader.view
        return reach(view, leadership.end_of(broker_id), _NO_LIMIT, view.end_offset)[1]

    # --- the in-sync set ---------------------------------------------------------------------------------------------

    def wanted_changes(self, now: float, lag_seconds: float, live: Mapping[int, BrokerRecord]) -> Wanted | None:
        """How the in-sync set is to change; None: this replica does not lead, or nothing is to change. Not asked while
        a change is being written. See `Leadership.changes`."""
        if self._readable_limit == _NO_LIMIT:
            return None
        with self._role_lock:
            leadership = self._leadership
            if leadership is None or self._closed:
                return None
            joining, leaving = leadership.changes(now, lag_seconds, self.log.end_offset, self._staging.staged_end, live)
            wanted = Wanted(leadership.state, joining, leaving, bool(leadership.joining))
            return wanted if any(wanted[1:]) else None

    def _adopt(self, leadership: Leadership, state: PartitionState) -> None:
        """Role lock held."""
        before = leadership.state.isr
        if leadership.adopt(state) and state.isr != before:
            log.info(
                "in_sync_set_changed",
                partition=self.label,
                isr=list(state.isr),
                leader_epoch=state.leader_epoch,
                at_min=len(state.isr) == leadership.min_insync,
            )

    def begin_change(self, wanted: Wanted) -> bool:
        """Count those that are to join for the high watermark from now on, because they may be in the set soon. Returns
        False if the epoch is over."""
        with self._role_lock:
            leadership = self._leadership
            if leadership is None or leadership.epoch != wanted.state.leader_epoch:
                return False
            for each in wanted.joining:
                leadership.asked_to_join(each)
            return True

    def take_outcome(self, wanted: Wanted, state: PartitionState | None) -> None:
        """A write of a change is over: this state was read after it. None: nothing will be written any more."""
        with self._role_lock:
            leadership = self._leadership
            if leadership is None or leadership.epoch != wanted.state.leader_epoch:
                return
            if state is not None:
                self._adopt(leadership, state)
            # A write whose answer was lost may be executed later, as long as the state has the version that it names.
            if state is None or state.version > wanted.state.version or not wanted.is_unresolved:
                leadership.nothing_asked()
        self._advance()
        self.waiters.wake()  # acks may have become impossible

    # --- what a follower does ----------------------------------------------------------------------------------------

    def position(self) -> Position:
        """What this follower has. It is durable as far as acks promise that: the log with flush.messages=1, and
        prepared sets. Damage is met with this: until it is repaired, the replica does not join the in-sync set."""
        damage = self.log.first_damage()
        if damage is not None:
            self._reader.on_damage(damage)
        while True:
            with self._position_lock, self._hosted():
                # Without the role's lock, because a flush moves the watermark of a replica that has come to lead.
                needs_flush = self.log.needs_flush_for_ack
                if needs_flush:
                    self.log.flush_to(self.log.end_offset)
                self._staging.sync_copies()
                with self._role_lock:
                    if needs_flush and self._leadership is None and self.log.flushed_offset < self.log.end_offset:
                        continue  # another leader's link has appended
                    return Position(
                        self._leader_id,
                        self._epoch,
                        self.log.end_offset,
                        self.log.last_epoch,
                        damage is None,
                        self.log.lacks_producers,
                        self._staging.copies(),
                    )

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the log is known to be damaged."""
        return self.log.first_damage() is None

    def append_as_follower(self, data: memoryview, epoch: int) -> int:
        """Append the leader's bytes; a last batch that is cut is left out. An empty log whose start is amid a batch, by
        a loss of power after a deletion, begins anew with that batch. Returns the new end offset.

        Raises:
            FencedLeaderEpoch: this replica does not follow in that epoch (any more).
            CorruptBatch, OffsetOutOfRange: the bytes are not what comes next.
            StorageFailed, DiskFull.
        """
        with self._following(epoch):
            end_offset = self.log.end_offset
            if self.log.start_offset == end_offset:
                first = next((header for header, _ in iter_batches(data, self.label)), None)
                if first is not None and first.base_offset < end_offset < first.end_offset:
                    self._begin_anew(first.base_offset)
                    return first.base_offset
            return self.log.append_stamped(data, epoch)

    def take_producers(self, data: bytes, epoch: int) -> bool:
        """Take over the state of the producers of the records before this empty log; see Log.take_producers. Raises as
        `append_as_follower`."""
        with self._following(epoch):
            return self.log.take_producers(data)

    def watermark_is(self, watermark: int, start_offset: int, epoch: int) -> None:
        """Take over the leader's high watermark and the start of its log, after this log agrees with the leader's
        (rule 12)."""
        with self._following(epoch):
            self.log.high_watermark = self._readable_limit = max(
                self.log.high_watermark, min(watermark, self.log.end_offset)
            )
            if self.log.start_offset < start_offset <= self.log.end_offset:
                self.log.delete_before(start_offset)

    def truncate_as_follower(
        self, agreed_epoch: int, agreed_end_offset: int, leader_start_offset: int, copy_offset: int, epoch: int
    ) -> None:
        """Cut off what the leader does not have: see `fetched` (rule 1). If nothing of this log is known to agree with
        the leader's, begin anew where a copy of that begins. So it is too if all that agrees, and all that readers have
        seen here, is before the leader's start: it was deleted there.

        Raises:
            ReplicaDiverged: readers have seen what would be cut off, and the topic does not allow that.
        """
        with self._following(epoch):
            _, ended = self.log.epoch_end(agreed_epoch)
            agreed, start_offset = min(ended, agreed_end_offset), self.log.start_offset
            seen = max(self.log.high_watermark, start_offset)
            if agreed < leader_start_offset and seen <= leader_start_offset:
                self._begin_anew(copy_offset)
                return
            if agreed < seen and not self.settings.unclean_leader_election_enable:
                raise ReplicaDiverged(partition=self.label, offset=agreed, high_watermark=seen, leader=self._leader_id)
            if agreed <= start_offset and agreed < seen:
                self._begin_anew(copy_offset)
            else:
                self._truncate_to(agreed)

    def cut_unsynced_damage(self) -> None:
        """Cut off the first damaged range that a loss of power may have left, and all after it. For a replica that
        others do not count on there. What was acknowledged, or surely synced, stays: others may have lost it too, and
        a repair makes it good. A leader's log stays."""
        with self._role_lock, self._hosted():
            if self._leadership is not None:
                return
            self.may_have_lost = False
            damage = self.log.first_damage(max(self.log.high_watermark, self.log.synced_before))
            if damage is None:
                return
            end_offset = self._truncate_to(damage)
            if self._readable_limit != _NO_LIMIT:
                self._readable_limit = self.log.high_watermark
        log.warning("damaged_end_cut", partition=self.label, end_offset=end_offset)

    def begin_anew(self, leader_start_offset: int, copy_offset: int, epoch: int) -> bool:
        """Drop the log if the leader's begins after its end, and begin where a copy of that begins; returns whether it
        does."""
        with self._following(epoch):
            begins_later = leader_start_offset > self.log.end_offset
            if begins_later:
                self._begin_anew(copy_offset)
            return begins_later

    def _begin_anew(self, offset: int) -> None:
        self.log.reset_to(offset)
        self._cut_to(offset)
        self.log.high_watermark = self._readable_limit = offset

    def copy_staged(self, number: int, position: int, data: memoryview, epoch: int) -> None:
        """Write bytes of a file of what is staged at the leader. Raises as `Staging.copy`, FencedLeaderEpoch."""
        with self._following(epoch):
            self._staging.copy(number, position, data)

    def keep_only_staged(self, copies: Iterable[StagedCopy], epoch: int) -> None:
        """Forget what the leader has not staged (any more); see Staging.keep_only."""
        with self._following(epoch):
            self._staging.keep_only(copies)

    def may_lack_staged(self, may_have_lost: bool) -> bool:
        """See Staging.may_lack_acknowledged."""
        return self._staging.may_lack_acknowledged(may_have_lost)

    def forget_copies(self) -> None:
        """Forget all that is staged here, because the machine may have lost a part of it."""
        with self._hosted():
            self._staging.keep_only(())
            self._staging.sync_copies()

    @contextmanager
    def _following(self, epoch: int) -> Iterator[None]:
        with self._role_lock:
            if self._leadership is not None or self._epoch != epoch:
                raise FencedLeaderEpoch(partition=self.label, epoch=epoch, current=self._epoch)
            with self._hosted():
                yield

    def _truncate_to(self, offset: int) -> int:
        """Cut off every batch with an offset at or after the given one; see Log.truncate_to."""
        end_offset = self.log.truncate_to(offset)
        self._cut_to(end_offset)
        return end_offset

    def _cut_to(self, end_offset: int) -> None:
        """Forget what is known of records at or after the offset to which the log was cut."""
        self._applier.truncated(end_offset)
        with self._applier.no_changes():
            rule = self._flush_rule
            self._flush_rule = rule._replace(shown_offset=min(rule.shown_offset, end_offset))

    # --- staged writes -------------------------------------------------------------------------------------------

    def stage(self, uuid: bytes, batches: Sequence[Batch]) -> tuple[int, int, Ack | None]:
        """Keep checked batches of a part beside the log. Returns how many batches the part has, how many bytes, and
        what the ack waits for. See Staging.stage; raises NotLeader, NotEnoughReplicas too."""
        with self._staging_as_leader(needs_replicas=True) as epoch:
            return *self._staging.stage(uuid, batches), self._staged_ack(epoch)

    def prepare(self, prepared: PreparedSet) -> Ack | None:
        """Record parts as a set; it is durable after `keep_prepared`, and on the replicas when the ack is kept. See
        Applier.prepare."""
        with self._staging_as_leader(needs_replicas=True) as epoch:
            self._applier.prepare(prepared)
            self._staging.request_sync()
            return self._staged_ack(epoch)

    def keep_prepared(self, commit_uuid: bytes) -> None:
        """Make a recorded set durable, and check that it is as it was staged. Raises as Staging.check."""
        with self._hosted():
            self._staging.check(commit_uuid)  # while a thread of the directory does the requested sync
            self._staging.sync()

    def apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied:
        """Append the missing record batches of a decided batch; durable after `finish_apply`. See Applier.apply.

        The flush that shows the batch wakes waiting readers; they are also woken here, in case that flush is over.
        """
        with self._applying() as epoch:
            return self._applier.apply(transactional_id, producer_id, batch_id, commit_uuid, epoch)

    def try_apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied | None:
        """`apply`, or None while another apply or drop is under way."""
        with self._applying() as epoch:
            return self._applier.try_apply(transactional_id, producer_id, batch_id, commit_uuid, epoch)

    @contextmanager
    def _applying(self) -> Iterator[int]:
        """Yields the leader epoch."""
        try:
            with self._staging_as_leader() as epoch:
                yield epoch
        finally:
            self._advance()
            self.waiters.wake()

    @contextmanager
    def _staging_as_leader(self, needs_replicas: bool = False) -> Iterator[int]:
        """Yields the leader epoch. Followers copy what the `with` block stages or appends.

        Raises:
            NotLeader: this broker does not lead.
            NotEnoughReplicas: what is staged could not be acknowledged.
        """
        leadership = self._leadership
        if leadership is None:
            raise self._not_here()
        if needs_replicas:
            self._check_enough(leadership)
        with self._hosted():
            try:
                yield leadership.epoch
            finally:
                self.replica_waiters.wake()

    @property
    def unsynced_staged_bytes(self) -> int:
        """About how many bytes a prepare has to sync here."""
        return self._staging.unsynced_bytes

    def prepared_bytes(self, commit_uuid: bytes) -> int:
        """The size of a prepared set, 0 if there is none."""
        return self._staging.prepared_bytes(commit_uuid)

    @property
    def staged_work(self) -> int:
        """Bytes that were checked and synced for prepares, or checked, appended and synced for applies, since the
        start. Callers that wait see progress by it. Repeated work does not count."""
        return self._applier.applied_bytes + self._staging.checked_bytes + self._staging.synced_bytes

    def finish_apply(self, applied: Applied) -> None:
        """Wait until an applied batch is durable here; readers see it from then on, once the in-sync set has it."""
        with self._hosted():
            self._applier.finish(applied)
        self._advance()

    def ack_of_apply(self, applied: Applied) -> Ack | None:
        """What the ack of an applied batch waits for besides `finish_apply`; None: for nothing."""
        if self._readable_limit == _NO_LIMIT:
            return None
        staged_end = self._staging.staged_end
        return Ack(self, applied.epoch, applied.sync_to, staged_end, needs_flush=False, needs_replicas=True)

    def is_flushed_to(self, end_offset: int) -> bool:
        """Whether the log is durable up to an offset. Raises StorageFailed, NotLeader."""
        return self.keeps(Ack(self, self._epoch, end_offset, -1, needs_flush=True, needs_replicas=False))

    def drop(self, commit_uuid: bytes, below_version: int, wait: bool = True) -> bool:
        """Forget a prepared set; see Applier.drop."""
        with self._staging_as_leader():
            dropped = self._applier.drop(commit_uuid, below_version, wait)
        self.waiters.wake()
        return dropped

    def forget_staged(self, transactional_id: str, batch_id: int, stays: bool) -> None:
        """Forget a transaction's staged data up to a batch that is done. `stays` as in `Applier.forget`."""
        with self._staging_as_leader():
            self._applier.forget(transactional_id, batch_id, stays)

    def abort_parts(self, uuids: Iterable[bytes]) -> None:
        """Forget parts that are not prepared."""
        with self._staging_as_leader():
            self._staging.abort(uuids)

    def renew(self, write: Write) -> None:
        """Keep the parts of a write, because one of its tasks still runs."""
        with self._hosted():
            self._staging.renew(write)

    def expire(self, writes: Collection[Write], before: float) -> int:
        """Forget parts of some writes that are not prepared, and not renewed since a time; returns how many. A follower
        forgets what its leader has forgotten."""
        if self._leadership is None:
            return 0
        with self._staging_as_leader():
            return self._staging.expire(writes, before)

    def forget_silent_transactions(self) -> None:
        """Forget the apply progress of transactions that ended long ago."""
        if self.log.knows_transactions and self._leadership is not None:
            with self._staging_as_leader():
                self._applier.forget_silent()

    @property
    def staged_size_bytes(self) -> int:
        """Bytes of the files of staged data."""
        return self._staging.size_bytes

    def staged(self) -> list[Staged]:
        """The staged parts and sets."""
        return self._staging.staged()

    @contextmanager
    def _hosted(self) -> Iterator[None]:
        """Raises NotLeader if the partition is closed here, or is closed meanwhile; its log may be closed a little
        before."""
        if self._closed or self._reader.closed:
            raise self._not_here()
        try:
            yield
        except (Closed, FencedLeaderEpoch):
            raise self._not_here() from None

    def _flushed(self) -> None:
        self._applier.flushed()
        if self._readable_limit != _NO_LIMIT and self.log.needs_flush_for_ack:
            self._advance()
        self.waiters.wake()

    # --- acks ----------------------------------------------------------------------------------------------------

    def ack_of(self, end_offset: int, epoch: int, needs_replicas: bool) -> Ack | None:
        """What the ack of an append up to an offset waits for; None: for nothing.

        Args:
            needs_replicas: acks=all.
        """
        needs_flush = self.log.needs_flush_for_ack
        needs_replicas = needs_replicas and self._readable_limit != _NO_LIMIT
        if not needs_flush and not needs_replicas:
            return None
        return Ack(self, epoch, end_offset, -1, needs_flush, needs_replicas)

    def _staged_ack(self, epoch: int) -> Ack | None:
        """What the ack of all that is staged by now waits for; None: for nothing."""
        if self._readable_limit == _NO_LIMIT:
            return None
        return Ack(self, epoch, 0, self._staging.staged_end, needs_flush=False, needs_replicas=True)

    def keeps(self, ack: Ack) -> bool:
        """See `Ack.is_kept`."""
        failed = self._directory.failed
        if failed is not None:
            raise StorageFailed(**failed.facts)
        closed = self._closed  # read before the offset, because a clean close flushes first
        is_flushed = not ack.needs_flush or self.log.flushed_offset >= ack.end_offset
        if ack.needs_replicas:
            with self._role_lock:
                leadership = self._leadership
                if leadership is None or leadership.epoch != ack.epoch:
                    raise self._not_here()
                if not leadership.is_alone and (
                    leadership.watermark < ack.end_offset or leadership.staged_watermark < ack.staged_end
                ):
                    if leadership.is_below_min:
                        raise NotEnoughReplicasAfterAppend(
                            partition=self.label, insync=list(leadership.state.isr), least=leadership.min_insync
                        )
                    is_flushed = False
        if is_flushed:
            return True
        if closed:
            raise self._not_here()
        return False

    def _not_here(self) -> NotLeader:
        return NotLeader(broker_id=self._broker_id, partition=self.label)

    # --- what the host does -----------------------------------------------------------------------------------

    def update_settings(self, settings: TopicSettings) -> None:
        """Use other settings from now on. Readers still see what they could see before."""
        self.settings = settings
        with self.log.no_appends(), self._applier.no_changes():
            self._flush_rule = _FlushRule(settings.flush_visibility == "flushed", self.readable_end_offset)
        self.log.update_settings(settings)
        with self._role_lock:
            if self._leadership is not None:
                self._leadership.configure(self._assigned, settings.min_insync_replicas)
        self._advance()
        self.waiters.wake()

    def close(self) -> None:
        """Refuse requests from now on, and wake all waiters; a running apply ends, perhaps later, and appends nothing
        more. Waits for no fdatasync. The directory closes the log, which another Partition may open at once."""
        self._closed = True
        self.waiters.wake()
        self.replica_waiters.wake()
        self._staging.close()
        self._applier.close()
