"""One replica of a partition on this broker: its log and the parts staged beside it, its role (`role.py`), what it does
while it follows (`following.py`) and for staged writes while it leads (`staged_writes.py`), and up to where readers may
read (`readable_end.py`). Here are the appends, reads and acks of a leader. Knows no sockets, no ZooKeeper.

Thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.config import TopicSettings
from broker.replica.ack import Ack
from broker.replica.applier import Applier
from broker.replica.following import Following
from broker.replica.readable_end import ReadableEnd
from broker.replica.role import Role
from broker.replica.staged_writes import StagedWrites
from broker.replica.waiters import Waiters
from broker.staging.staging import Staging
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
from kafkalog.format.batch import Batch


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
        staged: what it keeps beside its log.
        waiters: who waits for an append, a flush, the high watermark or the close.
        replica_waiters: which followers wait for an append, a deletion or a change of the role.

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
        self._staging = Staging(directory.services, log.directory, log.label, lambda: log.settings.segment_bytes)
        self._applier = Applier(log, self._staging, self.replica_waiters.wake)
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
        self.staged = StagedWrites(
            log, self._staging, self._applier, self.role, self.waiters, self.replica_waiters, self._ack_of_replicas
        )
        log.on_flushed = self._flushed
        log.on_deleted = self.replica_waiters.wake

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
        """The first readable record at or after a timestamp; see Reader.

        Raises:
            OffsetNotAvailable: it may be among what the last leader let readers read; see `end_for_readers`.
        """
        with self.role.hosted():
            look = self._readable_end.look
            found = self._reader.offset_for_timestamp(timestamp_us, from_offset, look)
            if found is None:
                self._check_knows_end()
                found = self._reader.offset_for_timestamp(timestamp_us, from_offset, look)  # it may be known just now
            return found

    def reach(self, offset: int, max_bytes: int) -> tuple[int, int]:
        """The offset about `max_bytes` after an offset, and the bytes up to it; see `reach`."""
        view, end_offset = self._readable_end.look()
        return reach(view, offset, max_bytes, end_offset)

    def delete_before(self, offset: int) -> int:
        """Delete every record before an offset, or all readable ones (-1); returns the start offset after that.

        Raises:
            OffsetOutOfRange: the offset is after the readable end.
            OffsetNotAvailable: as `end_for_readers`.
        """
        self.role.check_leads_surely()  # another leader would not delete what this one does
        if offset == -1 or offset > self.readable_end_offset:
            self._check_knows_end()
        start_offset, end_offset = self.start_offset, self.readable_end_offset
        if offset > end_offset:
            raise OffsetOutOfRange(
                offset=offset, partition=self.label, start_offset=start_offset, end_offset=end_offset
            )
        with self.role.hosted():
            return self.log.delete_before(end_offset if offset == -1 else offset)

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
            raise OffsetNotAvailable(partition=self.label, leader_epoch=leadership.epoch)

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

    # --- acks ----------------------------------------------------------------------------------------------------

    def _flushed(self) -> None:
        self._applier.flushed()
        if not self.role.is_single and self.log.needs_flush_for_ack:
            self.role.advance()
        self.waiters.wake()

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

    def _ack_of_replicas(self, epoch: int, end_offset: int, staged_end: int) -> Ack | None:
        if self.role.is_single:
            return None
        return Ack(self, epoch, end_offset, staged_end, needs_flush=False, needs_replicas=True)

    def is_flushed_to(self, end_offset: int) -> bool:
        """Whether the log is durable up to an offset. Raises StorageFailed, NotLeader."""
        return self.keeps(Ack(self, self.role.epoch, end_offset, -1, needs_flush=True, needs_replicas=False))

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
