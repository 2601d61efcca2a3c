"""The role of a replica on this broker: whether it leads, in which leader epoch, and its high watermark.

A replica leads in one leader epoch, follows the leader of one, or does neither. What a leader knows of its followers is
in `leadership.py`. A partition with one replica has nobody to wait for: the log's end is its high watermark.

Thread-safe. Its lock guards the role. It is held for the writes of a follower and for the change of a role, and taken
before the log's locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from broker.replica.applier import Applier
from broker.replica.leadership import Joining, Leadership, Pulse
from broker.replica.waiters import Waiters
from broker.staging.copies import StagedCopy
from broker.staging.staging import Staging
from broker.storage.log import Log
from broker.storage.reader import reach
from kafkalog.clock import Clock
from kafkalog.errors import (
    Closed,
    ConnectionSuperseded,
    FencedLeaderEpoch,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetNotAvailable,
    UnknownLeaderEpoch,
)
from kafkalog.events import get_logger
from kafkalog.zk.registry import BrokerRecord, PartitionState

log = get_logger(__name__)

_NO_LIMIT = 1 << 62
"""No offset is after it."""
_FOLLOWED_SECONDS = 3.0
"""Followers fetch each half second at least. After this silence of one, another replica may have been elected."""


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


class Role:
    """The role of a replica of a partition. It has none until `lead` or `follow` is called.

    Args:
        label: of the partition.
        applier: is told when an epoch begins.
        waiters: who waits for the high watermark.
        replica_waiters: which followers wait for a change of the role.

    Attributes:
        lock: guards all below, which is read without it where a moment before would do.
        leadership: the epoch that it leads; None: it does not lead.
        epoch: the leader epoch in which it leads or follows; -1: in none yet.
        leader_id: the broker that leads, as far as this replica knows; -1: none does.
        readable_limit: the high watermark, or more than any offset if this replica is single.
        is_closed: it serves nothing any more.
        on_joinable: called when a follower may join the in-sync set.
        is_certain: whether the roles are those of this moment.
    """

    def __init__(
        self,
        label: str,
        broker_id: int,
        log: Log,
        staging: Staging,
        applier: Applier,
        waiters: Waiters,
        replica_waiters: Waiters,
        clock: Clock,
    ) -> None:
        self._label = label
        self._broker_id = broker_id
        self._log = log
        self._reader = log.reader
        self._staging = staging
        self._applier = applier
        self._waiters = waiters
        self._replica_waiters = replica_waiters
        self._clock = clock
        self._assigned: tuple[int, ...] = (broker_id,)
        self.lock = threading.Lock()
        self.leadership: Leadership | None = None
        self.epoch = -1
        self.leader_id = -1
        self.readable_limit = _NO_LIMIT
        self.is_closed = False
        self.on_joinable: Callable[[], object] = lambda: None
        self.is_certain: Callable[[], bool] = lambda: True

    # --- which it is ----------------------------------------------------------------------------------------------

    def lead(self, state: PartitionState, assigned: Sequence[int]) -> None:
        """Lead, or go on leading, as a state says.

        Args:
            assigned: the brokers in the topic's znode; the state may have others.

        Raises:
            StorageFailed, DiskFull, Closed: the beginning of the epoch could not be noted; nothing changed.
        """
        with self.lock:
            leadership = self.leadership
            self._assigned = tuple(assigned)
            if leadership is not None and leadership.epoch == state.leader_epoch:
                leadership.configure(assigned, self._log.settings.min_insync_replicas)
                self._adopt(leadership, state)
            else:
                was_alone = leadership is not None and self.is_single
                self._log.settle_producers()
                self._log.begin_epoch(state.leader_epoch, durable=False)
                self._staging.begin_epoch(state.leader_epoch)
                self._applier.begin(state.leader_epoch)
                if was_alone and len(state.held_by(assigned)) > 1:
                    # Readers have seen all that was appended in the epoch that is over, and its acks waited for nobody.
                    if self._log.needs_flush_for_ack:
                        self._log.flush_to(self._log.end_offset)
                    self.readable_limit = self._log.high_watermark = self._log.end_offset
                waits_for_flushes = self._log.needs_flush_for_ack or self._log.settings.flush_visibility == "flushed"
                if waits_for_flushes and self._log.flushed_offset < self._log.end_offset:
                    self._log.request_flush()  # readers have to see what the last leader may have shown
                leadership = self.leadership = Leadership(
                    self._broker_id,
                    state,
                    assigned,
                    self._log.settings.min_insync_replicas,
                    self._log.end_offset,  # not what is flushed: it may have been acknowledged by earlier settings
                    self._staging.staged_end,
                    self._log.high_watermark,
                    self._clock.monotonic(),
                )
                self.epoch, self.leader_id = state.leader_epoch, self._broker_id
            leadership.advance(self._own_end, self._staging.staged_end)
            self._publish_watermark(leadership)
        self._waiters.wake()
        self._replica_waiters.wake()
        self.on_joinable()

    def follow(self, leader_id: int, leader_epoch: int) -> None:
        """Follow a leader, -1 for nobody, from now on. Appends that are not acknowledged get an error."""
        with self.lock:
            if leader_epoch < self.epoch:
                return
            if self.leadership is not None:
                self._applier.end_epoch()  # before the log may be cut
                self._staging.end_epoch()
            with suppress(FencedLeaderEpoch):  # the log knows of a later one: what is behind it is refused anyway
                self._log.follow_epoch(leader_epoch)  # first: an append that waits comes to nothing
            self.leadership, self.epoch, self.leader_id = None, leader_epoch, leader_id
            self.readable_limit = self._log.high_watermark
        self._waiters.wake()
        self._replica_waiters.wake()

    @property
    def leads(self) -> bool:
        return self.leadership is not None

    @property
    def is_single(self) -> bool:
        """Whether no other replica has to have what this one appends; also before it has a role."""
        return self.readable_limit == _NO_LIMIT

    @property
    def high_watermark(self) -> int:
        """Every record before it is on all replicas of the in-sync set, as far as this one knows."""
        limit = self.readable_limit
        return self._reader.view.end_offset if limit == _NO_LIMIT else limit

    @property
    def _own_end(self) -> int:
        """Up to where this replica has what an ack promises."""
        return self._log.flushed_offset if self._log.needs_flush_for_ack else self._log.end_offset

    def _publish_watermark(self, leadership: Leadership) -> None:
        """Role lock held: let readers read up to the high watermark."""
        if leadership.is_alone:
            self.readable_limit = _NO_LIMIT
            if self._log.has_high_watermark:  # from when there were others
                self._log.high_watermark = None
        else:
            self.readable_limit = leadership.watermark
            self._log.high_watermark = leadership.watermark

    def advance(self) -> None:
        """Move the high watermark after the log's end, a follower or the in-sync set has moved, and wake readers."""
        if self.is_single or self.leadership is None:
            return  # before the lock: a follower flushes while it has it
        with self.lock:
            leadership = self.leadership
            if leadership is None or not leadership.advance(self._own_end, self._staging.staged_end):
                return
            self._publish_watermark(leadership)
        self._waiters.wake()

    def check_leads(self, epoch: int) -> None:
        """Raises NotLeader: this replica does not lead in that epoch (any more)."""
        leadership = self.leadership
        if leadership is None or leadership.epoch != epoch:
            raise self.not_here()

    def check_enough(self, leadership: Leadership) -> None:
        """Raises NotEnoughReplicas: what is written in this epoch could not be acknowledged."""
        if leadership.is_below_min:
            raise NotEnoughReplicas(
                partition=self._label, insync=list(leadership.state.isr), least=leadership.min_insync
            )

    def is_replicated(self, epoch: int, end_offset: int, staged_end: int) -> bool:
        """Whether what was written in an epoch, up to these places, is on all replicas of the in-sync set.

        Raises:
            NotLeader: this replica does not lead in that epoch any more.
            NotEnoughReplicasAfterAppend: the in-sync set is too small to say so.
        """
        self.check_leads(epoch)  # before the lock, as in `advance`
        with self.lock:
            leadership = self.leadership
            if leadership is None or leadership.epoch != epoch:
                raise self.not_here()
            if leadership.is_alone or (
                leadership.watermark >= end_offset and leadership.staged_watermark >= staged_end
            ):
                return True
            if leadership.is_below_min:
                raise NotEnoughReplicasAfterAppend(
                    partition=self._label, insync=list(leadership.state.isr), least=leadership.min_insync
                )
            return False

    def check_knows_end(self) -> None:
        """Raises OffsetNotAvailable: a new leader does not know yet up to where the last one let readers read
        (KIP-207), or another one may have been elected meanwhile. An end before that would look like lost data."""
        leadership = self.leadership
        if leadership is not None and not leadership.is_alone and leadership.watermark < leadership.start_offset:
            raise OffsetNotAvailable(partition=self._label, leader_epoch=leadership.epoch)
        self.check_leads_surely()

    def check_leads_surely(self) -> None:
        """Raises OffsetNotAvailable: another replica may have been elected more than some moments ago."""
        leadership = self.leadership
        if leadership is None or leadership.is_alone or self.is_certain():
            return
        with self.lock:
            is_followed = leadership.is_followed(self._clock.monotonic() - _FOLLOWED_SECONDS)
        if not is_followed:
            raise OffsetNotAvailable(partition=self._label, leader_epoch=leadership.epoch)

    def left(self, broker_id: int, directory: str, connection: int) -> None:
        """A follower does not follow this replica any more; see `Leadership.left`."""
        if self.leadership is None:
            return  # before the lock, as in `advance`
        with self.lock:
            if self.leadership is not None:
                self.leadership.left(broker_id, directory, connection)

    # --- what followers say ----------------------------------------------------------------------------------------

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
            ConnectionSuperseded: the follower fetches on a later connection by now.
            OffsetOutOfRange: the log begins after the follower's end, and the follower is not empty or not where a copy
                begins.
        """
        if self.leadership is None:
            raise self.not_here()  # before the lock, as in `advance`
        with self.hosted():
            is_before = last_epoch < 0 and end_offset < self._reader.view.start_offset
            begins_copy = is_before and end_offset == self._reader.copy_offset()
        with self.hosted(), self.lock:
            leadership = self.leadership
            if leadership is None:
                raise self.not_here()
            if epoch != leadership.epoch:
                error = FencedLeaderEpoch if epoch < leadership.epoch else UnknownLeaderEpoch
                raise error(partition=self._label, epoch=epoch, current=leadership.epoch)
            if leadership.is_superseded(broker_id, directory, pulse.connection):
                raise ConnectionSuperseded(partition=self._label, broker_id=broker_id)
            view = self._reader.view
            if end_offset < view.start_offset and not begins_copy:
                raise self._reader.out_of_range(end_offset, view, view.end_offset)
            if last_epoch >= 0:
                found, ended = self._log.epoch_end(last_epoch)
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
            )
        self.advance()
        if joinable:
            self.on_joinable()
        return None

    def throttled_rate(self, broker_id: int) -> int:
        """How many bytes a second a follower may copy; 0: any number. Only a follower for which no ack waits is
        limited."""
        leadership = self.leadership
        if leadership is None or not leadership.state.throttled_rate:
            return 0
        with self.lock:
            state = leadership.state
            return state.throttled_rate if broker_id in state.adding and leadership.holds_no_ack(broker_id) else 0

    def lacking_bytes(self, broker_id: int) -> int:
        """About how many bytes of the log a follower does not have; 0 if this replica does not lead."""
        leadership = self.leadership
        if leadership is None:
            return 0
        view = self._reader.view
        return reach(view, leadership.end_of(broker_id), _NO_LIMIT, view.end_offset)[1]

    # --- the in-sync set ---------------------------------------------------------------------------------------------

    def wanted_changes(self, now: float, lag_seconds: float, live: Mapping[int, BrokerRecord]) -> Wanted | None:
        """How the in-sync set is to change; None: this replica does not lead, or nothing is to change. Not asked while
        a change is being written. See `Leadership.changes`."""
        if self.is_single or self.leadership is None:
            return None  # before the lock, as in `advance`
        with self.lock:
            leadership = self.leadership
            if leadership is None or self.is_closed:
                return None
            joining, leaving = leadership.changes(now, lag_seconds, self._log.end_offset, live)
            if not joining and not leaving and not leadership.joining:
                return None
            return Wanted(leadership.state, joining, leaving, bool(leadership.joining))

    def _adopt(self, leadership: Leadership, state: PartitionState) -> None:
        """Role lock held."""
        before = leadership.state.isr
        if leadership.adopt(state) and state.isr != before:
            log.info(
                "in_sync_set_changed",
                partition=self._label,
                isr=list(state.isr),
                leader_epoch=state.leader_epoch,
                at_min=len(state.isr) == leadership.min_insync,
            )

    def begin_change(self, wanted: Wanted) -> bool:
        """Count those that are to join for the high watermark from now on, because they may be in the set soon. Returns
        False if the epoch is over."""
        with self.lock:
            leadership = self.leadership
            if leadership is None or leadership.epoch != wanted.state.leader_epoch:
                return False
            for each in wanted.joining:
                leadership.asked_to_join(each)
            return True

    def take_outcome(self, wanted: Wanted, state: PartitionState | None) -> None:
        """A write of a change is over: this state was read after it. None: nothing will be written any more."""
        with self.lock:
            leadership = self.leadership
            if leadership is None or leadership.epoch != wanted.state.leader_epoch:
                return
            if state is not None:
                self._adopt(leadership, state)
            # A write whose answer was lost may be executed later, as long as the state has the version that it names.
            if state is None or state.version > wanted.state.version or not wanted.is_unresolved:
                leadership.nothing_asked()
        self.advance()
        self._waiters.wake()  # acks may have become impossible

    # --- until the close -------------------------------------------------------------------------------------------

    @contextmanager
    def hosted(self) -> Iterator[None]:
        """Raises NotLeader if the partition is closed here, or is closed meanwhile; its log may be closed a little
        before."""
        if self.is_closed or self._reader.closed:
            raise self.not_here()
        try:
            yield
        except (Closed, FencedLeaderEpoch):
            raise self.not_here() from None

    def not_here(self) -> NotLeader:
        return NotLeader(broker_id=self._broker_id, partition=self._label)

    def settings_changed(self) -> None:
        """The log has got other settings."""
        with self.lock:
            if self.leadership is not None:
                self.leadership.configure(self._assigned, self._log.settings.min_insync_replicas)
        self.advance()

    def close(self) -> None:
        """Refuse requests from now on, and wake all waiters."""
        self.is_closed = True
        self._waiters.wake()
        self._replica_waiters.wake()
