"""One replica of a partition on this broker: its log and the parts staged beside it, its role (`role.py`), what it does
while it follows (`following.py`), and up to where readers may read (`readable_end.py`). Here is what a leader does for
clients: appends, reads, staged writes, acks. Knows no sockets, no ZooKeeper.

Thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from broker.config import TopicSettings
from broker.replica.applier import Applied, Applier
from broker.replica.following import Following
from broker.replica.readable_end import ReadableEnd
from broker.replica.role import Role
from broker.replica.waiters import Waiters
from broker.staging.format import PreparedSet
from broker.staging.part import Write
from broker.staging.staging import Staged, StagedCopy, Staging
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from broker.storage.reader import reach
from broker.storage.segment import FileSlice, Hint
from kafkalog.clock import Clock
from kafkalog.errors import (
    Closed,
    FencedLeaderEpoch,
    KafkalogError,
    LogTruncated,
    OffsetNotAvailable,
    OffsetOutOfRange,
    StorageFailed,
    UnknownLeaderEpoch,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import Batch

log = get_logger(__name__)


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


class Partition:
    """A replica that this broker holds. It serves nothing until its role leads or follows.

    Args:
        topic: the topic's name, for messages.
        topic_id: names the topic in requests.
        number: within the topic.
        log: its open log, of `directory`, which closes it.
        settings: the topic's.

    Attributes:
        role: whether it leads, in which epoch, with which followers.
        following: what it does to its log for a leader.
        waiters: who waits for an append, a flush, the high watermark or the close.
        replica_waiters: which followers wait for an append or a change of the role.

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
        self.waiters = Waiters()
        self.replica_waiters = Waiters()
        self._reader = log.reader
        if log.flushed_offset < log.end_offset:
            log.flush()  # only the previous Partition knew which batches were hidden until their sync
        self._staging = Staging(directory.services, log.directory, log.label)
        self._applier = Applier(log, self._staging)
        self.role = Role(
            self.label,
            broker_id,
            log,
            self._staging,
            self._applier,
            self.waiters,
            self.replica_waiters,
            clock,
        )
        self._readable_end = ReadableEnd(self._reader, self._applier, self.role, settings)
        self.following = Following(self.label, log, self._staging, self._applier, self.role, self._readable_end)
        log.on_flushed = self._flushed

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
        leadership = self.role.leadership
        if self.role.is_closed or leadership is None:
            raise self.role.not_here()
        if needs_replicas:
            self.role.check_enough(leadership)
        try:
            outcomes = self.log.append(batches, leadership.epoch)
        except (Closed, FencedLeaderEpoch):  # between the check above and here
            raise self.role.not_here() from None
        if self.role.is_single:
            if self.waiters:
                self.waiters.wake()
        else:
            if self.replica_waiters:
                self.replica_waiters.wake()
            self.role.advance()
        return leadership.epoch, outcomes

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
        current = self.role.epoch
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
        if self.role.is_closed:
            raise self.role.not_here()
        try:
            found = self._reader.read(offset, max_bytes, hint, self._readable_end.look)
        except Closed:
            raise self.role.not_here() from None
        except OffsetOutOfRange as error:
            if offset > error.facts["end_offset"]:
                self._check_knows_end()
            raise
        if not found.length and not self.role.is_certain():  # the reader would wait where nothing comes any more
            try:
                self.role.check_leads_surely()
            except BaseException:
                found.close()
                raise
        return found

    @property
    def is_open(self) -> bool:
        """Whether requests are served; the directory may have closed the log."""
        return not self.role.is_closed and not self._reader.closed

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
        return self._readable_end.look()[1]

    @property
    def size_bytes(self) -> int:
        return self._reader.view.size_bytes

    def offset_for_timestamp(self, timestamp_us: int, from_offset: int = 0) -> tuple[int, int | None] | None:
        """The first readable record at or after a timestamp; see Reader."""
        with self.role.hosted():
            return self._reader.offset_for_timestamp(timestamp_us, from_offset, self._readable_end.look)

    def reach(self, offset: int, max_bytes: int) -> tuple[int, int]:
        """The offset about `max_bytes` after an offset, and the bytes up to it; see `reach`."""
        view, end_offset = self._readable_end.look()
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
        with self.role.hosted():
            start_offset = self.log.delete_before(end_offset if offset == -1 else offset)
        self.replica_waiters.wake()
        return start_offset

    def end_for_readers(self) -> int:
        """The readable end, for who asks for the latest offset.

        Raises:
            OffsetNotAvailable: a new leader does not know yet up to where the last one let readers read (KIP-207), or
                another one may have been elected meanwhile. An end before that would look like lost data.
        """
        self._check_knows_end()
        return self.readable_end_offset

    def _check_knows_end(self) -> None:
        """Raises OffsetNotAvailable: see `end_for_readers`."""
        self.role.check_knows_end()
        leadership = self.role.leadership
        if leadership is None or leadership.is_alone:
            return
        if self._readable_end.waits_for_flush_to(leadership.start_offset):  # the last leader may have flushed it
            raise OffsetNotAvailable(partition=self.label, leader_epoch=leadership.epoch) from None

    # --- what followers ask of the leader ----------------------------------------------------------------------------

    @property
    def copy_offset(self) -> int:
        """Where a copy of this log begins: with the batch that contains the start offset."""
        with self.role.hosted():
            return self._reader.copy_offset()

    def read_as_replica(self, offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        """As `read`, in whatever role, up to the log's end, and from where a copy begins."""
        with self.role.hosted():
            return self._reader.read(offset, max_bytes, hint, for_copy=True)

    def producers_before(self, offset: int) -> bytes:
        """The state of the producers of the records before an offset, for a follower whose log begins there; see
        Log.producers_before."""
        with self.role.hosted():
            return self.log.producers_before(offset)

    def met_damage(self, offset: int) -> None:
        """A follower says that what it got from an offset on is damaged."""
        self._reader.on_damage(offset)

    def staged_news(
        self, staged: Sequence[StagedCopy], max_bytes: int
    ) -> tuple[list[StagedCopy] | None, list[FileSlice]]:
        """The files of what is staged here, if a follower with these copies has to remove or cut some, else None; and
        the next pieces that it lacks, as they stand in the files."""
        with self.role.hosted():
            lacking = self._staging.lacking(staged, max_bytes)
            pieces = (self._staging.slice(each) for each in lacking.pieces)
            return lacking.files, [piece for piece in pieces if piece is not None]

    def staged_copies(self) -> list[StagedCopy]:
        """The files of what is staged here."""
        return self._staging.copies()

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
        with self.role.hosted():
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
            self.role.advance()
            self.waiters.wake()

    @contextmanager
    def _staging_as_leader(self, needs_replicas: bool = False) -> Iterator[int]:
        """Yields the leader epoch. Followers copy what the `with` block stages or appends.

        Raises:
            NotLeader: this broker does not lead.
            NotEnoughReplicas: what is staged could not be acknowledged.
        """
        leadership = self.role.leadership
        if leadership is None:
            raise self.role.not_here()
        if needs_replicas:
            self.role.check_enough(leadership)
        with self.role.hosted():
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
        with self.role.hosted():
            self._applier.finish(applied)
        self.role.advance()

    def ack_of_apply(self, applied: Applied) -> Ack | None:
        """What the ack of an applied batch waits for besides `finish_apply`; None: for nothing."""
        if self.role.is_single:
            return None
        staged_end = self._staging.staged_end
        return Ack(self, applied.epoch, applied.sync_to, staged_end, needs_flush=False, needs_replicas=True)

    def is_flushed_to(self, end_offset: int) -> bool:
        """Whether the log is durable up to an offset. Raises StorageFailed, NotLeader."""
        return self.keeps(Ack(self, self.role.epoch, end_offset, -1, needs_flush=True, needs_replicas=False))

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
        with self.role.hosted():
            self._staging.renew(write)

    def expire(self, writes: Collection[Write], before: float) -> int:
        """Forget parts of some writes that are not prepared, and not renewed since a time; returns how many. A follower
        forgets what its leader has forgotten."""
        if not self.role.leads:
            return 0
        with self._staging_as_leader():
            return self._staging.expire(writes, before)

    def forget_silent_transactions(self) -> None:
        """Forget the apply progress of transactions that ended long ago."""
        if self.log.knows_transactions and self.role.leads:
            with self._staging_as_leader():
                self._applier.forget_silent()

    @property
    def staged_size_bytes(self) -> int:
        """Bytes of the files of staged data."""
        return self._staging.size_bytes

    def staged(self) -> list[Staged]:
        """The staged parts and sets."""
        return self._staging.staged()

    def _flushed(self) -> None:
        self._applier.flushed()
        if not self.role.is_single and self.log.needs_flush_for_ack:
            self.role.advance()
        self.waiters.wake()

    # --- acks ----------------------------------------------------------------------------------------------------

    def ack_of(self, end_offset: int, epoch: int, needs_replicas: bool) -> Ack | None:
        """What the ack of an append up to an offset waits for; None: for nothing.

        Args:
            needs_replicas: acks=all.
        """
        needs_flush = self.log.needs_flush_for_ack
        needs_replicas = needs_replicas and not self.role.is_single
        if not needs_flush and not needs_replicas:
            return None
        return Ack(self, epoch, end_offset, -1, needs_flush, needs_replicas)

    def _staged_ack(self, epoch: int) -> Ack | None:
        """What the ack of all that is staged by now waits for; None: for nothing."""
        if self.role.is_single:
            return None
        return Ack(self, epoch, 0, self._staging.staged_end, needs_flush=False, needs_replicas=True)

    def keeps(self, ack: Ack) -> bool:
        """See `Ack.is_kept`."""
        failed = self._directory.failed
        if failed is not None:
            raise StorageFailed(**failed.facts)
        closed = self.role.is_closed  # read before the offset, because a clean close flushes first
        is_kept = not ack.needs_flush or self.log.flushed_offset >= ack.end_offset
        if ack.needs_replicas and not self.role.is_replicated(ack.epoch, ack.end_offset, ack.staged_end):
            is_kept = False
        if is_kept:
            return True
        if closed:
            raise self.role.not_here()
        return False

    # --- what the host does -----------------------------------------------------------------------------------

    def update_settings(self, settings: TopicSettings) -> None:
        """Use other settings from now on. Readers still see what they could see before.

        Raises:
            StorageFailed, DiskFull, Closed: the settings are as before; to be tried again.
        """
        with self.log.no_appends(), self._applier.no_changes():
            self._readable_end.update_settings(settings)
        self.log.update_settings(settings)
        self.settings = settings
        self.role.settings_changed()
        self.waiters.wake()

    def close(self) -> None:
        """Refuse requests from now on, and wake all waiters; a running apply ends, perhaps later, and appends nothing
        more. Waits for no fdatasync. The directory closes the log, which another Partition may open at once."""
        self.role.close()
        self._staging.close()
        self._applier.close()
