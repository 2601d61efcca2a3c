"""What a replica does to its log and to its staged copies while it follows a leader, whose they become.

Thread-safe. All of it is done under the role's lock, and only in the epoch in which the caller believes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from broker.replica.applier import Applier
from broker.replica.readable_end import ReadableEnd
from broker.replica.role import Role
from broker.staging.copies import StagedCopy
from broker.staging.staging import Staging
from broker.storage.log import Log
from kafkalog.errors import CorruptBatch, FencedLeaderEpoch, OffsetOutOfRange, ReplicaDiverged
from kafkalog.events import get_logger
from kafkalog.format.batch import iter_batches

log = get_logger(__name__)


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


class Following:
    """The writes of a replica that follows.

    Args:
        label: of the partition.

    Attributes:
        may_have_lost: a loss of power may have damaged the log, which was not cut after it (`cut_unsynced_damage`).
    """

    def __init__(
        self,
        label: str,
        log: Log,
        staging: Staging,
        applier: Applier,
        role: Role,
        readable_end: ReadableEnd,
    ) -> None:
        self._label = label
        self._log = log
        self._reader = log.reader
        self._staging = staging
        self._applier = applier
        self._role = role
        self._readable_end = readable_end
        self._position_lock = threading.Lock()  # of `position`; taken before the role's
        self.may_have_lost = False

    def position(self) -> Position:
        """What this follower has. It is durable as far as acks promise that: the log with flush.messages=1, and
        prepared sets. Damage is met with this: until it is repaired, the replica does not join the in-sync set.

        Raises:
            DiskFull: a log that began anew is not on the disk yet; try again.
            StorageFailed, Closed.
        """
        damage = self._log.first_damage()
        if damage is not None:
            self._reader.on_damage(damage)
        while True:
            with self._position_lock, self._role.hosted():
                # Without the role's lock, because a flush moves the watermark of a replica that has come to lead.
                needs_flush = self._log.needs_flush_for_ack
                if needs_flush:
                    self._log.flush_to(self._log.end_offset)
                self._staging.sync_copies()
                with self._role.lock:
                    self._log.finish_reset()
                    has_more = self._log.flushed_offset < self._log.end_offset
                    if needs_flush and has_more and not self._role.leads:
                        continue  # another leader's link has appended
                    return Position(
                        self._role.leader_id,
                        self._role.epoch,
                        self._log.end_offset,
                        self._log.last_epoch,
                        damage is None,
                        self._log.lacks_producers,
                        self._staging.copies(),
                    )

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the log is known to be damaged."""
        return self._log.first_damage() is None

    def append(self, data: memoryview, epoch: int) -> int:
        """Append the leader's bytes; a last batch that is cut is left out. An empty log whose start is amid a batch, by
        a loss of power after a deletion, begins anew with that batch. Returns the new end offset.

        Raises:
            FencedLeaderEpoch: this replica does not follow in that epoch (any more).
            CorruptBatch, OffsetOutOfRange: the bytes are not what comes next.
            StorageFailed, DiskFull.
        """
        with self._following(epoch):
            end_offset = self._log.end_offset
            if self._log.start_offset == end_offset:
                first = next((header for header, _ in iter_batches(data, self._label)), None)
                if first is not None and first.base_offset < end_offset < first.end_offset:
                    self._begin_anew(first.base_offset)
                    return first.base_offset
            return self._log.append_stamped(data, epoch)

    def take_producers(self, data: bytes, epoch: int) -> bool:
        """Take over the state of the producers of the records before this empty log; see Log.take_producers. Raises as
        `append`."""
        with self._following(epoch):
            return self._log.take_producers(data)

    def watermark_is(self, watermark: int, start_offset: int, epoch: int) -> None:
        """Take over the leader's high watermark and the start of its log, after this log agrees with the leader's
        (rule 12)."""
        with self._following(epoch):
            self._log.high_watermark = self._role.readable_limit = max(
                self._log.high_watermark, min(watermark, self._log.end_offset)
            )
            if self._log.start_offset < start_offset <= self._log.end_offset:
                self._log.delete_before(start_offset)

    def truncate(
        self, agreed_epoch: int, agreed_end_offset: int, leader_start_offset: int, copy_offset: int, epoch: int
    ) -> None:
        """Cut off what the leader does not have: see `Role.fetched` (rule 1). Begin anew where a copy of the leader's
        log begins, if nothing of this log is known to agree with it, or if the leader has deleted all that agrees and
        all that readers have seen here.

        Raises:
            ReplicaDiverged: readers have seen what would be cut off, and the topic does not allow that.
        """
        with self._following(epoch):
            _, ended = self._log.epoch_end(agreed_epoch)
            agreed, start_offset = min(ended, agreed_end_offset), self._log.start_offset
            seen = max(self._log.high_watermark, start_offset)
            if agreed < leader_start_offset and seen <= leader_start_offset:
                self._begin_anew(copy_offset)
                return
            if agreed < seen and not self._log.settings.unclean_leader_election_enable:
                raise ReplicaDiverged(
                    partition=self._label, offset=agreed, high_watermark=seen, leader=self._role.leader_id
                )
            if agreed <= start_offset and agreed < seen:
                self._begin_anew(copy_offset)
            else:
                self.truncate_to(agreed)

    def cut_unsynced_damage(self) -> None:
        """Cut off the first damaged range that a loss of power may have left, and all after it. For a replica that
        others do not count on there. What was acknowledged, or surely synced, stays: others may have lost it too, and
        a repair makes it good. A leader's log stays."""
        with self._role.lock, self._role.hosted():
            if self._role.leads:
                return
            damage = self._log.first_damage(max(self._log.high_watermark, self._log.synced_before))
            if damage is None:
                self.may_have_lost = False
                return
            end_offset = self.truncate_to(damage)
            self.may_have_lost = False  # now: a cut that is refused for lack of room is asked for again
            if not self._role.is_single:
                self._role.readable_limit = self._log.high_watermark
        log.warning("damaged_end_cut", partition=self._label, end_offset=end_offset)

    def begin_anew(self, leader_start_offset: int, copy_offset: int, epoch: int) -> bool:
        """Drop the log if the leader's begins after its end, and begin where a copy of that begins; returns whether it
        does."""
        with self._following(epoch):
            begins_later = leader_start_offset > self._log.end_offset
            if begins_later:
                self._begin_anew(copy_offset)
            return begins_later

    def _begin_anew(self, offset: int) -> None:
        """The state of the producers stays as this log had it, until the leader's is there: a member of the in-sync set
        has everything that was acknowledged before the leader's start, and may be elected before it has that."""
        producers = b""
        if self._log.start_offset <= offset <= self._log.end_offset:
            with suppress(CorruptBatch, OffsetOutOfRange):  # other records were there
                producers = self._log.producers_before(offset)
        self._log.reset_to(offset, producers)
        self._cut_to(offset)
        self._log.high_watermark = self._role.readable_limit = offset

    def copy_staged(self, number: int, salt: int, part: bytes, position: int, data: memoryview, epoch: int) -> None:
        """Write bytes of a file of what is staged at the leader. Raises as `Staging.copy`, FencedLeaderEpoch."""
        with self._following(epoch):
            self._staging.copy(number, salt, part, position, data)

    def keep_only_staged(self, copies: Iterable[StagedCopy], epoch: int) -> None:
        """Forget what the leader has not staged (any more); see Staging.keep_only."""
        with self._following(epoch):
            self._staging.keep_only(copies)

    def may_lack_staged(self, may_have_lost: bool) -> bool:
        """See Staging.may_lack_acknowledged."""
        return self._staging.may_lack_acknowledged(may_have_lost)

    def forget_copies(self) -> None:
        """Forget all that is staged here, because the machine may have lost a part of it."""
        with self._role.hosted():
            self._staging.keep_only(())
            self._staging.sync_copies()

    @contextmanager
    def _following(self, epoch: int) -> Iterator[None]:
        with self._role.lock:
            if self._role.leads or self._role.epoch != epoch:
                raise FencedLeaderEpoch(partition=self._label, epoch=epoch, current=self._role.epoch)
            with self._role.hosted():
                yield

    def truncate_to(self, offset: int) -> int:
        """Cut off every batch with an offset at or after the given one; see Log.truncate_to. The caller has the role's
        lock."""
        end_offset = self._log.truncate_to(offset)
        self._cut_to(end_offset)
        return end_offset

    def _cut_to(self, end_offset: int) -> None:
        """Forget what is known of records at or after the offset to which the log was cut."""
        self._applier.truncated(end_offset)
        with self._applier.no_changes():
            self._readable_end.cut_to(end_offset)
