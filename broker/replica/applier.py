"""Appends the staged parts of a decided batch to the log. One for each partition.

A set is checked as a whole when it is prepared, and again before the first append by an apply that comes later. Then
the record batches that the log lacks are appended, piece by piece; appends of others may come between the pieces. Large
staged files become segments as they are.
Readers see no record of the batch until all of it is in the log and synced: the log is hidden from the batch's first
record on, with all that others append after it, so that readers always see a prefix of the log. The flush that syncs
the batch's end shows it. If a start finds half of a batch, it hides that too, until an apply appends the rest.

A damaged set is lost, and hides nothing. The check finds damage before a record is appended. Damage that occurs later,
between the check and the append or while the broker is down, leaves half of the batch in the log. Readers then see that
half, because the rest cannot be appended any more, and each apply of the set returns StagedPartLost.

The log itself records the progress of an apply (`apply_progress.py`), so an apply can stop anywhere and be repeated.
Which set a batch came from is not recorded. Several coordinators may prepare sets of one batch, and these may begin
alike, but only one is decided. So once a set is in the log, the others of its batch are dropped before readers see it,
and no other is taken: what a start finds half applied was never readable.

Threads: `_applying` lets one apply or drop run at a time, perhaps for minutes, so a new leader epoch does not wait for
it. `_settling` is held while sets are dropped and what follows from that is shown, and by `begin`: the apply of an
epoch that is over drops, hides and shows nothing any more. It comes after `_applying`, then `_appending`, then the
locks of log and staging. `_lock` guards what is hidden; it comes after the log's. Readers take none: they look at
`hidden`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from broker.staging.format import PreparedSet
from broker.staging.staging import Staging, WholeFile
from broker.storage.apply_progress import Progress
from broker.storage.log import Log
from kafkalog.errors import Closed, FencedLeaderEpoch, InvalidRequest, RequestTimedOut, StagedPartLost
from kafkalog.format.producer_ids import producer_id_of

_WAIT_SECONDS = 30.0
_SYNC_BYTES = 64 << 20
_WAKE_BYTES = 256 << 10
"""After so much of a batch followers are woken: it may take minutes, and they would leave the in-sync set for having
nothing of it. Not for each piece, which may be as small as a task's part."""


TransactionalBatch = tuple[int, int]
"""Producer id and batch id of a transaction's batch."""


class Hidden(NamedTuple):
    """The start offset of the first hidden batch: readers see nothing from it on. None: nothing is hidden."""

    from_offset: int | None


class Applied(NamedTuple):
    """A batch that is in a log. `end_offset`: after its last record, 0 if only a later batch's progress is known;
    `sync_to`: the offset up to which the log has to be synced; `batches`: how many were missing and appended;
    `epoch`: the leader epoch in which they were."""

    producer_id: int
    batch_id: int
    end_offset: int
    sync_to: int
    batches: int
    epoch: int


class Applier:
    """Applies and drops the prepared sets of one partition. Thread-safe.

    Args:
        wake_followers: called amid an apply, when there is more to copy.

    Attributes:
        applied_bytes: appended since the start; each wait for a sync adds one, because it is progress too.
        hidden: from which offset on readers see nothing. Each change makes a new object: if a reader finds the same
            object before and after it takes a view of the log, both are of the same moment.
    """

    def __init__(self, log: Log, staging: Staging, wake_followers: Callable[[], object]) -> None:
        self.applied_bytes = 0
        self.hidden = Hidden(None)
        self._log = log
        self._staging = staging
        self._wake_followers = wake_followers
        self._applying = threading.Lock()
        self._settling = threading.Lock()  # guards _epoch
        self._epoch = -1  # the leader epoch that this replica leads; -1: none
        self._appending = threading.Lock()  # guards _closed, and each append
        self._closed = False
        self._lock = threading.Lock()  # guards all below
        self._starts: dict[TransactionalBatch, int] = {}  # of hidden batches
        self._ends: dict[TransactionalBatch, int] = {}  # of complete batches, shown when the log is flushed to it
        # In the log, perhaps only in part: their sets may have been here, and be lost without a trace.
        self._doubted: set[TransactionalBatch] = set()
        self.begin(-1)

    def begin(self, leader_epoch: int) -> None:
        """Hide the batches of which the log has only a part: at the opening of a log, and when this replica begins to
        lead, because a follower appends parts of batches unseen. In the second case, after the log has begun the epoch:
        then an apply of an earlier one appends nothing more."""
        with self._settling:
            doubted = self._log.applied_batches() if self._staging.may_lack_sets else set()
            with self._lock:
                self._doubted = doubted
            self._settle_doubts()
            half = self._half_applied()
            with self._lock:
                self._starts = {
                    (producer_id, progress.batch_id): progress.start_offset for producer_id, progress in half.items()
                }
                self._ends = {}
                self._publish()
            self._epoch = leader_epoch

    def end_epoch(self) -> None:
        """The epoch that this replica leads is over: an apply of it settles nothing any more. Waits for none."""
        self._epoch = -1

    @contextmanager
    def _settling_in(self, leader_epoch: int) -> Iterator[None]:
        """Keeps the epoch from ending during the `with` block. Raises FencedLeaderEpoch if it is over."""
        with self._settling:
            if leader_epoch != self._epoch:
                raise FencedLeaderEpoch(partition=self._log.label, epoch=leader_epoch, current=self._epoch)
            yield

    def _half_applied(self) -> dict[int, Progress]:
        """The progress of batches of which only a part is in the log yet."""
        half: dict[int, Progress] = {}
        for staged in self._staging.staged():
            prepared, progress = staged.prepared, self._log.apply_progress(staged.producer_id)
            if prepared is None or staged.lost is not None or progress is None or progress.batch_id != staged.batch_id:
                continue
            # Other coordinators may have prepared the same batch; nothing of theirs is in a log.
            if not _has_all(progress, prepared) and self._staging.may_hold(prepared.commit_uuid, *progress.first):
                half[staged.producer_id] = progress
        return half

    def prepare(self, prepared: PreparedSet) -> None:
        """Record a set, unless the log has anything of its batch or of a later one; see Staging.prepare."""

        def is_over() -> bool:
            return self._log.applied_batch(prepared.producer_id) >= prepared.batch_id

        self._staging.prepare(prepared, is_over)

    # --- applying ------------------------------------------------------------------------------------------------

    def apply(
        self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes, leader_epoch: int
    ) -> Applied:
        """Append the record batches of a decided batch that the log lacks. They are durable after `finish`; readers see
        them as soon as they are synced, also without `finish`.

        Args:
            leader_epoch: in which it appends.

        Raises:
            StagedPartLost: neither a prepared set nor the log has the batch, or part of the set is damaged; that is
                found before the first append.
            InvalidRequest: the commit uuid is that of another batch.
            RequestTimedOut: another apply is taking long.
            DiskFull: a repeated call continues where this one stopped.
            FencedLeaderEpoch: that epoch is over.
            StorageFailed, Closed.
        """
        if not self._applying.acquire(timeout=_WAIT_SECONDS):
            waited_ms = round(_WAIT_SECONDS * 1000)
            raise RequestTimedOut(
                what=f"another apply to {self._log.label}", address="the broker", timeout_ms=waited_ms
            )
        try:
            return self._apply(transactional_id, producer_id, batch_id, commit_uuid, leader_epoch)
        finally:
            self._applying.release()

    def try_apply(
        self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes, leader_epoch: int
    ) -> Applied | None:
        """`apply`, or None while another apply or drop is under way."""
        if not self._applying.acquire(blocking=False):
            return None
        try:
            return self._apply(transactional_id, producer_id, batch_id, commit_uuid, leader_epoch)
        finally:
            self._applying.release()

    def _apply(
        self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes, leader_epoch: int
    ) -> Applied:
        prepared = self._staging.prepared(commit_uuid)
        if prepared is not None and (prepared.producer_id, prepared.batch_id) != (producer_id, batch_id):
            reason = f"commit {commit_uuid.hex()} of {self._log.label} is of batch {prepared.batch_id}, not {batch_id}"
            raise InvalidRequest(reason=reason)
        count = 0
        progress = self._log.apply_progress(producer_id)
        if prepared is None:
            lost = self._lost_without_set(progress, (producer_id, batch_id))
            if lost is not None:
                with self._settling_in(leader_epoch):
                    self._staging.drop_others(producer_id, batch_id, commit_uuid)
                    self._show((producer_id, batch_id))
                raise StagedPartLost(
                    transactional_id=transactional_id, batch_id=batch_id, partition=self._log.label, reason=lost
                )
        elif not _is_applied(progress, batch_id, prepared):
            begun = progress if progress is not None and progress.batch_id == batch_id else None
            count = self._append(prepared, begun, leader_epoch)
            progress = self._log.apply_progress(producer_id)
        with self._settling_in(leader_epoch):
            assert progress is not None
            self._staging.drop_others(producer_id, batch_id, commit_uuid)
            if prepared is not None:
                with self._lock:
                    self._doubted.discard((producer_id, batch_id))
            self._show_once_flushed((producer_id, batch_id), progress.end_offset)
        end_offset = progress.end_offset if progress.batch_id == batch_id else 0
        return Applied(producer_id, batch_id, end_offset, progress.end_offset, count, leader_epoch)

    def _lost_without_set(self, progress: Progress | None, batch: TransactionalBatch) -> str | None:
        """Why a batch without a prepared set is lost; None: the log has it. Its set is dropped once it is done."""
        if progress is None or progress.batch_id < batch[1]:
            return "it is not prepared on this broker"
        if batch in self._doubted:
            return (
                "staged data was damaged or removed before the last start, so the log may have only a part of the batch"
            )
        return None

    def _append(self, prepared: PreparedSet, progress: Progress | None, leader_epoch: int) -> int:
        def is_there(part: int, number: int) -> bool:
            return progress is not None and progress.has(part, number)

        count = unsynced = behind = 0
        unsaid = _WAKE_BYTES  # the first append is said
        try:
            self._staging.check(prepared.commit_uuid, is_there, again=False)
            # With progress it continues, as after a restart or a full disk.
            batch = prepared.producer_id, prepared.batch_id
            with self._settling_in(leader_epoch):
                self.hide(batch, progress.start_offset if progress is not None else None)
            for batches, size in self._appended(prepared.commit_uuid, is_there, leader_epoch):
                count += batches
                self.applied_bytes += size
                unsynced += size
                unsaid += size
                if unsaid >= _WAKE_BYTES or unsynced >= _SYNC_BYTES:
                    self._wake_followers()
                    unsaid = 0
                if unsynced >= _SYNC_BYTES:  # else all would be synced at the end, with no progress to report meanwhile
                    behind = self._synced_to(prepared.producer_id, behind, leader_epoch)
                    unsynced = 0
        except StagedPartLost:
            with self._settling_in(leader_epoch):
                self._staging.drop_others(prepared.producer_id, prepared.batch_id, prepared.commit_uuid)
                self._show_unless_half(prepared)
            raise
        finally:
            if not count and progress is None:
                with self._settling:
                    if leader_epoch == self._epoch:
                        self._show_if_nothing_came(prepared)
        return count

    def _appended(
        self, commit_uuid: bytes, is_there: Callable[[int, int], bool], leader_epoch: int
    ) -> Iterator[tuple[int, int]]:
        """Append the pieces of a set one after the other; after each, how many batches and bytes it had."""
        for piece in self._staging.pieces(commit_uuid, is_there):
            if isinstance(piece, WholeFile):
                with self._appending:
                    self._check_open()
                    is_adopted = self._log.adopt(piece.path, piece.headers, leader_epoch)
                if is_adopted:
                    yield len(piece.headers), piece.length
                    continue
            for batches in piece.copies if isinstance(piece, WholeFile) else (piece,):
                with self._appending:
                    self._check_open()
                    self._log.append_decided(batches, leader_epoch)
                yield len(batches), sum(header.length for header, _ in batches)

    def _show_if_nothing_came(self, prepared: PreparedSet) -> None:
        """Show records that others appended after a batch that was hidden and never begun."""
        progress = self._log.apply_progress(prepared.producer_id)
        if progress is None or progress.batch_id != prepared.batch_id:
            self._show((prepared.producer_id, prepared.batch_id))

    def _synced_to(self, producer_id: int, behind: int, leader_epoch: int) -> int:
        """Wait for the sync of earlier appends, not of the last one, so that the disk and this thread work in parallel.
        Returns the offset to wait for the next time."""
        self._log.flush_to(behind)
        self.applied_bytes += 1
        progress = self._log.apply_progress(producer_id)
        with self._settling_in(leader_epoch):
            assert progress is not None, "only a follower's log is cut"
            return progress.end_offset

    def _show_unless_half(self, prepared: PreparedSet) -> None:
        """Show the part of a batch that is in the log, unless the rest will follow."""
        if prepared.producer_id not in self._half_applied():
            self._show((prepared.producer_id, prepared.batch_id))

    def finish(self, applied: Applied) -> None:
        """Wait until the records that `apply` appended are synced and shown. Raises StorageFailed, Closed."""
        self._log.flush_to(applied.sync_to)
        with self._settling:
            if applied.epoch == self._epoch:
                self._show((applied.producer_id, applied.batch_id))  # the flush shows it too, perhaps a little later

    # --- hiding --------------------------------------------------------------------------------------------------

    def hide(self, batch: TransactionalBatch, start_offset: int | None = None) -> None:
        """Hide the log from a batch's start on, until `_show`. A batch that is hidden already does not change.

        Args:
            start_offset: of the batch; None: nothing of it is in the log yet.
        """
        with self._log.no_appends() as end_offset, self._lock:
            self._starts.setdefault(batch, end_offset if start_offset is None else start_offset)
            self._publish()

    def _show(self, *batches: TransactionalBatch) -> None:
        """Show hidden batches to readers: nothing more of them will be appended."""
        with self._lock:
            self._forget_hidden(batches)

    def _show_once_flushed(self, batch: TransactionalBatch, end_offset: int) -> None:
        """Show a complete batch as soon as the log is flushed to an offset: now, or by a flush, which is requested."""
        with self._lock:
            if self._log.flushed_offset >= end_offset:
                self._forget_hidden([batch])
                return
            self._ends[batch] = end_offset
        self._log.request_flush()

    @contextmanager
    def no_changes(self) -> Iterator[None]:
        """Keeps the hidden batches unchanged during the `with` block. Taken after `Log.no_appends`."""
        with self._lock:
            yield

    def flushed(self) -> None:
        """Show the batches that are complete and durable; called after each flush of the log."""
        if self._ends:
            with self._lock:
                flushed_offset = self._log.flushed_offset
                self._forget_hidden([batch for batch, end in self._ends.items() if end <= flushed_offset])

    def truncated(self, end_offset: int) -> None:
        """Forget hidden batches after an offset to which the log was cut; a batch across it is no longer complete."""
        with self._lock:
            self._starts = {batch: start for batch, start in self._starts.items() if start < end_offset}
            self._ends = {batch: end for batch, end in self._ends.items() if end <= end_offset}
            self._publish()

    def _forget_hidden(self, batches: Iterable[TransactionalBatch]) -> None:
        for batch in batches:
            self._starts.pop(batch, None)
            self._ends.pop(batch, None)
        self._publish()

    def _publish(self) -> None:
        self.hidden = Hidden(min(self._starts.values(), default=None))

    # --- forgetting ----------------------------------------------------------------------------------------------

    def drop(self, commit_uuid: bytes, below_version: int, wait: bool = True) -> bool:
        """Forget a prepared set, if it was prepared below a version of the decision; returns whether it was.

        The part of it that is in the log is shown, because no more of it will be appended.

        Args:
            wait: for a running apply; if false, the set is then kept.
        """
        if not self._applying.acquire(blocking=wait):
            return False
        try:
            with self._settling:
                return self._drop(commit_uuid, below_version)
        finally:
            self._applying.release()

    def _drop(self, commit_uuid: bytes, below_version: int | None) -> bool:
        prepared = self._staging.prepared(commit_uuid)
        if prepared is None or not self._staging.drop(commit_uuid, below_version):
            return False
        self._show_unless_half(prepared)
        return True

    def forget(self, transactional_id: str, batch_id: int, stays: bool) -> None:
        """Forget a transaction's staged data up to a batch that is done, if the log has that batch whole. Does nothing
        while an apply runs. In-doubt recovery drops the rest later.

        Args:
            stays: the decision is never forgotten (streams and numbered writes). Without, there will be no other batch,
                so the log forgets the progress as well.
        """
        if not stays:
            self._log.transaction_done(producer_id_of(transactional_id), batch_id)
        if not self._applying.acquire(blocking=False):
            return
        try:
            with self._settling:
                half = self._half_applied()
                for staged in self._staging.staged():
                    prepared = staged.prepared
                    if prepared is None or prepared.transactional_id != transactional_id or staged.batch_id > batch_id:
                        continue
                    progress = self._log.apply_progress(staged.producer_id)
                    if progress is not None and progress.batch_id >= batch_id and staged.producer_id not in half:
                        self._drop(prepared.commit_uuid, None)
                        self._staging.forget_batches(staged.producer_id, batch_id)
        finally:
            self._applying.release()

    def tend(self) -> None:
        """`forget_progress`, and what else is done from time to time while it leads. Raises StorageFailed, Closed."""
        self.forget_progress()
        self._staging.record_drops()
        self._settle_doubts()

    def forget_progress(self) -> None:
        """Make the log forget the progress of transactions that ended long ago. Raises StorageFailed, Closed."""
        keep = self._staging.producer_ids()
        # `keep` is taken before this call, so that the sets of all others are known to be dropped for good.
        if self._log.has_silent_transactions(keep) and self._staging.settle_drops():
            self._log.forget_silent_transactions(keep)

    def _settle_doubts(self) -> None:
        """Batches are doubted until they are applied from their sets, or until the log has a later batch of their
        transaction, or has forgotten it."""
        if not self._staging.may_lack_sets:
            return
        applied = self._log.applied_batches()
        with self._lock:
            self._doubted &= applied
            settled = not self._doubted
        if settled:
            self._staging.note_complete()

    def close(self) -> None:
        """From now on a running apply appends nothing: the log's next owner may append the same record batches. Waits
        for an append that is under way, with the sync of a file that becomes a segment, not for a check or another
        sync: they may take seconds, and the thread that closes a partition opens all others."""
        with self._appending:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(what=f"partition {self._log.label}")


def _is_applied(progress: Progress | None, batch_id: int, prepared: PreparedSet) -> bool:
    """Whether the log has all of a batch that it will ever have."""
    if progress is None or progress.batch_id < batch_id:
        return False
    return progress.batch_id > batch_id or _has_all(progress, prepared)


def _has_all(progress: Progress, prepared: PreparedSet) -> bool:
    return progress.has_all((each.part, each.batches) for each in prepared.parts)
