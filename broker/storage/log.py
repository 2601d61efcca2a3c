"""One partition's log: a folder of segments. It is appended to at the end, read anywhere, and deleted from the start by
retention.

The log of a leader assigns offsets and stamps them into batches (`append`). It does so in the leader epoch that was
begun here (`begin_epoch`), and refuses appends in any other. The log of a follower takes the leader's bytes as they are
(`append_stamped`). The log knows the partition only by its label. It keeps no bytes in memory: a read returns a range
of a file (`FileSlice`).

Threads:

- `_lock` guards all state that changes. Appends hold it. The only steps under it that wait for the disk are the write
  of an append, the creation of a file, the stamping of one that becomes a segment (`adopt`), the save of a new leader
  epoch, and a truncation. Other syncs, renames, other saves
  and deletions run while appends continue.
- `_flush_lock` is taken before `_lock`. It lets one flush run at a time.
- `_save_lock` is taken before `_flush_lock`. Indexes and states are saved, and segments deleted, under it.
- `on_flushed` is called with none of them held. It takes the locks of the partition, which are taken before all of
  these: the partition truncates its log while its role must not change. `on_deleted` takes none of either.
- Reads take no lock. They use an immutable `View`, which is replaced as a whole after the bytes that it describes are
  written.

A roll only creates the next segment, named `.next`. The following flush syncs the full segment and then renames the
next one to `.log`. So the name `.log` proves that all segments before it are synced (`loader.py`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from broker.config import TopicSettings
from broker.storage import flushed_acks
from broker.storage.apply_progress import Progress, RecordBatch
from broker.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, read_whole
from broker.storage.disk import Buffer, TruncateFailed, passes
from broker.storage.disk_errors import DiskErrors
from broker.storage.epochs import EPOCHS_NAME, NO_EPOCH, LeaderEpochs
from broker.storage.flusher import FlushTask
from broker.storage.index import Damage, decode_index, encode_index
from broker.storage.loader import (
    finish_reset,
    lacks_producers,
    may_be_reset,
    open_folder,
    open_producers,
    record_reset,
)
from broker.storage.producer_state import Producers, ProducersSnapshot, Remembered, is_saved_state
from broker.storage.reader import UNKNOWN, Reader, View
from broker.storage.replacement import Replacement
from broker.storage.retention import expired
from broker.storage.scrub import OnBatch, SegmentCheck
from broker.storage.segment import NEXT_SUFFIX, Segment
from broker.storage.services import Services
from broker.storage.snapshots import Snapshots
from kafkalog.errors import Closed, CorruptBatch, DiskFull, FencedLeaderEpoch, KafkalogError, OutOfFiles
from kafkalog.events import get_logger
from kafkalog.format.batch import NO_TRANSACTION, Batch, BatchHeader, iter_batches, stamp

log = get_logger(__name__)

OFFSET_MAX = (1 << 63) - 1
"""No record has it."""
_FLUSH_AHEAD_BYTES = 64 << 20
"""With this many unflushed bytes, a background flush is requested whatever the settings are."""
_FLUSH_AHEAD_DECIDED = 8 << 20
"""The same during the append of a decided transaction batch. It is smaller because the ack waits for the last flush."""
_ADOPTS_BELOW = 1000
"""Segments of a log, from which on it adopts none: each costs two files, memory and time at a start, and time under the
lock when the next one begins. 10,000 took 71 MB, 1.5 s, and 2 to 22 ms."""
_ROLLS_AHEAD_MAX = 8
"""Maximum number of rolls whose segments are not synced yet: each keeps a file open, and a start reads all of them. At
the maximum, the active segment grows beyond segment.bytes, so that appends do not wait."""

_RESTORED_AT_ONCE = 1000
"""So many batches that a repair brings back are recorded while an append waits."""


class Appended(NamedTuple):
    """An appended batch: its offsets [base_offset, end_offset), and its append time."""

    base_offset: int
    end_offset: int
    append_timestamp_us: int

    @classmethod
    def before(cls, known: Remembered) -> Appended:
        """The first append of a batch that was sent again."""
        return cls(known.base_offset, known.end_offset, known.append_us)


class _Roll(NamedTuple):
    """A full segment, the next one, and the state of the producers at the offset between them."""

    old: Segment
    new: Segment
    producers: ProducersSnapshot


class Log:
    """A partition's log. Thread-safe.

    Attributes:
        label: the partition's name for errors and events.
        settings: the topic's current settings; `update_settings` changes them.
        reader: reads the log. It has the view, which is replaced as a whole after each change.
        on_flushed: called without arguments after each flush, and when the directory failed. It may be called on any
            thread. The caller holds no lock of the log.
        on_deleted: called without arguments after records were deleted: whoever copies the log looks again. The caller
            may hold locks of the log and the partition.
    """

    def __init__(
        self, services: Services, folder: Path, label: str, settings: TopicSettings, leader_epoch: int | None
    ) -> None:
        """Open the folder's log, and recover it after a stop.

        Args:
            leader_epoch: the epoch in which this broker leads the partition. It begins now, unless the log knows a
                later one, which then continues. The epoch is written to disk before the first append, so that the start
                of many partitions takes no syncs for it. None: this broker does not lead the partition.

        Raises:
            StorageFailed: the directory is out of service from now on.
            FileRefused, DiskFull: only this log cannot be opened; try again.
        """
        self.label = label
        self.directory = folder
        self.on_flushed: Callable[[], None] = lambda: None
        self.on_deleted: Callable[[], None] = lambda: None
        self._services = services
        self._errors = DiskErrors(services.health, label, folder)
        self._disk = services.disk
        self._clock = services.clock
        self._lock = threading.Lock()  # guards the attributes below; the view is read without it
        self._flush_lock = threading.Lock()  # one flush at a time; taken before _lock
        self._save_lock = threading.Lock()  # guards _snapshots, _saved_offset, _deleted; taken before _flush_lock
        self._closed = False
        self._closes = False  # `close` was called
        self._resets = False  # `reset_to` has not done all its steps on the disk
        self._flush_asked = False
        self._flush_timed = False
        self._flusher = services.flusher
        self._flush_task = FlushTask(label, self.flush)
        self.reader = Reader(services.disk, label, self._errors)
        self._producers = Producers(
            label, services.producer_batches_remembered, services.producer_state_max, services.clock
        )
        self._apply_progress = self._producers.apply_progress
        try:
            opened = open_folder(self._disk, folder, label, settings, self._producers, self._errors)
        except OSError as error:
            self._errors.refuse_to_open(error, "opening the log")
        deleted, self._segments, checkpoint = opened.deleted, opened.segments, opened.checkpoint
        self._saved_offset, self._synced_before = opened.saved_offset, opened.synced_before
        self._epochs, self._lacks_producers = opened.epochs, opened.lacks_producers
        self._deleted = deque(deleted)  # segments still to be unlinked, oldest first; under _save_lock
        segments = self._segments
        self._snapshots = Snapshots(self._disk, folder, label, checkpoint, self._errors, self._saved_offset)
        self._active = segments[-1]
        self._unsynced_rolls: list[_Roll] = []  # oldest first
        self._unsaved_rolls: list[_Roll] = []  # synced, but their indexes are not saved
        self._leader_epoch: int | None = None  # the epoch in which `append` stamps; None while not leading
        self._followed_epoch = NO_EPOCH  # the last one of `follow_epoch`
        self._high_watermark: int | None = None  # None: the end offset
        self._end_offset = self._flushed_offset = checkpoint.recovery_point
        self._flushed_position = self._active.size
        if leader_epoch is not None:
            self._begin_epoch(max(leader_epoch, self._epochs.last))
        self._acks_lock = threading.Lock()  # guards the file `flushed-acks`; taken before _lock
        self._notes_flushed_acks = opened.notes_flushed_acks  # durably
        self._acks_flushed_from = self._end_offset  # since the topic has flush.messages=1, acks from here on were
        self._apply_settings(settings)
        self._publish()
        self._unlink_soon()

    def _apply_settings(self, settings: TopicSettings) -> None:
        self.settings = settings
        self._segment_bytes = settings.segment_bytes
        self._segment_us = settings.segment_ms * 1000
        self._flush_messages = settings.flush_messages
        self._flush_ms = settings.flush_ms

    def _publish(self) -> None:
        """Publish a new view to readers."""
        start = self._snapshots.checkpoint.start_offset
        bases = tuple(segment.base_offset for segment in self._segments)
        flushed_offset = self._flushed_offset
        flushed_position = self._flushed_position if flushed_offset >= self._active.base_offset else UNKNOWN
        self.reader.view = View(
            start,
            tuple(self._segments),
            bases,
            self._end_offset,
            self._active.size,
            flushed_offset,
            flushed_position,
        )

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The first offset that may be read."""
        return self.reader.view.start_offset

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        return self.reader.view.end_offset

    @property
    def flushed_offset(self) -> int:
        """Every record before this offset is durable."""
        return self._flushed_offset

    @property
    def lacks_producers(self) -> bool:
        """Whether the log is empty, and the state of the producers of the records before it is not known. A leader has
        it (`producers_before`)."""
        view = self.reader.view
        return self._lacks_producers and view.start_offset == view.end_offset

    @property
    def high_watermark(self) -> int:
        """The offset up to which the records are on all replicas of the in-sync set: the end offset, unless it was set.
        The log is not truncated below it. The log uses it only to keep the producers' states that a truncation needs,
        and the directory saves it."""
        high_watermark = self._high_watermark
        return self.end_offset if high_watermark is None else high_watermark

    @high_watermark.setter
    def high_watermark(self, offset: int | None) -> None:
        """None: there are no other replicas any more. What was deleted was on all of them, so a saved offset from
        before a deletion counts as the start."""
        with self._lock:
            self._high_watermark = None if offset is None else min(max(offset, self.start_offset), self._end_offset)

    def first_damage(self, from_offset: int = 0) -> int | None:
        """Where the first range begins that is known to be damaged on disk, of those that begin at or after an offset;
        None: none does."""
        view = self.reader.view
        damaged = [each for segment in view.segments for each in segment.damaged if each.end_offset > view.start_offset]
        starts = [max(each.start_offset, view.start_offset) for each in damaged]
        return min((start for start in starts if start >= from_offset), default=None)

    @property
    def synced_before(self) -> int:
        """Every record before this offset was surely synced when the log was opened."""
        return self._synced_before

    @property
    def has_high_watermark(self) -> bool:
        """Whether the high watermark was set: the partition has several replicas."""
        return self._high_watermark is not None

    @property
    def view(self) -> View:
        return self.reader.view

    @property
    def needs_flush_for_ack(self) -> bool:
        """Whether flush.messages=1: an ack means that the batch is durable."""
        return self._flush_messages == 1

    def update_settings(self, settings: TopicSettings) -> None:
        """Change the topic's settings. A new index.interval.bytes takes effect with the next segment.

        Raises:
            StorageFailed, DiskFull, Closed: acks have to wait for flushes as before, and the settings do not change.
        """
        with self._acks_lock:
            if settings.flush_messages != 1 and self._flush_messages == 1:  # only then the file may be there
                with self._lock:
                    self._check_usable()
                try:
                    flushed_acks.forget(self._disk, self.directory)
                except OSError as error:
                    self._errors.refuse(error, "removing the note that acks are flushed")
                self._notes_flushed_acks = False
            with self._lock:
                if settings.flush_messages == 1 and self._flush_messages != 1:
                    self._acks_flushed_from = self._end_offset
                self._apply_settings(settings)
        if self._flush_messages is not None or self._flush_ms is not None:
            self.request_flush()

    def _check_usable(self) -> None:
        """Lock held. Raises DiskFull if a reset cannot be finished yet."""
        if self._closed or self._errors.health.failed is not None:
            self._errors.check()
            raise Closed(what=f"log of {self.label}")
        if self._resets:
            self._finish_reset(is_recorded=False)

    # --- leader epochs -------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """The last leader epoch that was begun or of which there is a batch; -1 if there is none."""
        return self._epochs.last

    def begin_epoch(self, epoch: int, *, durable: bool = True) -> None:
        """Begin a leader epoch at the end offset: this broker leads the partition in it, and appends in older epochs
        are refused from now on. If the epoch has begun already, only the latter.

        Args:
            durable: otherwise the epoch is saved before the first append, so that the start of many partitions takes no
                syncs for it.

        Raises:
            FencedLeaderEpoch: the log knows or follows a later epoch.
            DiskFull: the epoch has begun, but is not durable; the next append tries to save it.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
            if epoch < self._known_epoch:
                raise self._fenced(epoch)
            if epoch > self._epochs.last:
                log.info(
                    "leader_epoch_begun",
                    partition=self.label,
                    epoch=epoch,
                    end_offset=self._end_offset,
                    previous_is_empty=self._epochs.last >= 0 and self._epochs.last_start == self._end_offset,
                )
            self._begin_epoch(epoch)
            if durable and not self._epochs.is_saved:
                self._save_epochs()

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._epochs.last:
            self._epochs.begin(epoch, self._end_offset)
        self._leader_epoch = epoch

    def follow_epoch(self, epoch: int) -> None:
        """Follow the leader of an epoch: appends as a leader, and copies from the leaders of older epochs, are refused
        from now on. Not durable, because a start follows anew.

        Raises:
            FencedLeaderEpoch: the log knows or follows a later epoch, or leads in this one.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
            self._follow_epoch(epoch)

    def _follow_epoch(self, epoch: int) -> None:
        if epoch < self._known_epoch or epoch == self._leader_epoch:
            raise self._fenced(epoch)
        self._followed_epoch, self._leader_epoch = epoch, None

    @property
    def _known_epoch(self) -> int:
        return max(self._epochs.last, self._followed_epoch)

    def _save_epochs(self, *, durable: bool = True) -> None:
        try:
            self._epochs.save(self._disk, self.directory, self.label, durable=durable)
        except OSError as error:
            self._errors.refuse(error, "saving a leader epoch")

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """Where an epoch ended in this log (KIP-101).

        Returns:
            (the largest known epoch that is at most `epoch`, the start offset of the epoch after that one, or the log's
            end offset). If there is none: (-1, the log's start offset).
        """
        with self._lock:
            return self._epochs.end_of(epoch, self.start_offset, self._end_offset)

    def _fenced(self, epoch: int) -> FencedLeaderEpoch:
        return FencedLeaderEpoch(partition=self.label, epoch=epoch, current=self._known_epoch)

    # --- appending -----------------------------------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], leader_epoch: int) -> list[Appended | KafkalogError]:
        """Assign offsets to batches and write them, several with one write.

        Args:
            batches: header and writable bytes of each. The caller has checked them. The bytes are stamped in place.
            leader_epoch: the epoch in which the caller believes to lead.

        Returns:
            For each batch its Appended, or its error: OutOfOrderSequence, ProducerFenced, SequenceForgotten,
            TooManyProducers, DiskFull. After DiskFull no later batch is written, so that order is kept. Other errors do
            not affect the other batches.

        Raises:
            FencedLeaderEpoch: another epoch has begun, or this broker no longer leads. Nothing was appended.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
            if leader_epoch != self._leader_epoch:
                raise self._fenced(leader_epoch)
            results: list[Appended | KafkalogError] = []
            try:
                self._append(batches, results)
            except DiskFull as full:
                self._services.health.log_full(full, self.label)
                results.extend([full] * (len(batches) - len(results)))
        return results

    def _append(self, batches: Sequence[Batch], results: list[Appended | KafkalogError]) -> None:
        """`append` under the lock. After DiskFull, `results` ends before the first batch that is not written."""
        run: list[Batch] = []  # the batches of one write
        ahead: dict[int, tuple[int, int]] = {}  # producer -> epoch and sequence expected after its batches in `run`
        length = new = 0  # bytes of `run`, and its number of unknown producers
        for header, batch in batches:
            producer_id = header.producer_id
            if producer_id >= 0:
                if ahead.get(producer_id) != (header.producer_epoch, header.base_sequence):
                    is_new = producer_id not in self._producers
                    # If the check depends on batches in `run`, write and record these first.
                    if producer_id in ahead or (is_new and not self._producers.has_room(new + 1)):
                        self._write(run, length, results)
                        length = new = 0
                        ahead.clear()
                    known = self._producers.check(header)
                    if known is not None:
                        self._write(run, length, results)  # first, because results are in the order of the batches
                        length = new = 0
                        ahead.clear()
                        if isinstance(known, Remembered):
                            log.info(
                                "duplicate_recognised",
                                partition=self.label,
                                producer_id=producer_id,
                                base_offset=known.base_offset,
                                earlier_epoch=known.base_offset < self._epochs.last_start,
                            )
                        results.append(Appended.before(known) if isinstance(known, Remembered) else known)
                        continue
                    new += is_new
                ahead[producer_id] = header.producer_epoch, header.end_sequence
            if run and self._active.size + length + header.length > self._segment_bytes:
                self._write(run, length, results)
                length = 0
            run.append((header, batch))
            length += header.length
        self._write(run, length, results)

    def _write(self, run: list[Batch], length: int, results: list[Appended | KafkalogError]) -> None:
        """Stamp the batches of `run`, write them with one append, record them, and empty `run`."""
        if not run:
            return
        active = self._active
        now_us = self._clock.now_us()
        epochs = self._epochs
        if (
            not epochs.is_saved
            or active.size + length > self._segment_bytes
            or active.is_adopted
            or active.is_old(self._segment_us, now_us)
        ):
            active = self._ready(length, now_us)
        epoch, offset = epochs.last, self._end_offset
        buffers: list[Buffer] = []
        appended: list[Appended | KafkalogError] = []
        for header, batch in run:
            stamp(batch, offset, epoch, now_us)
            end = offset + header.last_offset_delta + 1
            appended.append(Appended(offset, end, now_us))
            buffers.append(batch)
            offset = end
        try:
            position = active.append(buffers, length)
        except (OSError, TruncateFailed) as error:
            self._append_failed(error)
        for header, _ in run:
            active.note(header, active.end_offset, position, now_us)
            if header.producer_id >= 0:
                base_offset = active.end_offset - header.last_offset_delta - 1
                if header.transaction_batch_id == NO_TRANSACTION:
                    self._producers.record(header, base_offset, now_us)
                else:
                    self._apply_progress.record(header, base_offset, now_us)
            position += header.length
        active.leader_epoch = epoch
        results.extend(appended)
        run.clear()
        self._advance(offset, position)

    def _ready(self, length: int, now_us: int) -> Segment:
        """The segment for an append of so many bytes. Saves a new leader epoch first, and rolls."""
        self._save_begun_epoch()
        active = self._active
        if active.is_adopted or (
            active.size
            and (active.size + length > self._segment_bytes or active.is_old(self._segment_us, now_us))
            and len(self._unsynced_rolls) < _ROLLS_AHEAD_MAX
        ):
            self._roll()
            return self._active
        return active

    def _save_begun_epoch(self) -> None:
        if not self._epochs.is_saved:
            # With other replicas also what batches show: a batch that is damaged is repaired by the epoch that it had.
            self._save_epochs(durable=self._high_watermark is not None or not self._epochs.are_in_batches)

    def _append_failed(self, error: OSError | TruncateFailed) -> NoReturn:
        if isinstance(error, TruncateFailed):
            self._errors.fail(error, "cutting off a failed append")
        self._errors.refuse(error, "appending")

    def _advance(self, offset: int, position: int) -> None:
        """Publish appended batches to readers, and request the flushes that the settings demand.

        Args:
            offset, position: the end of the batches; the position is in the active segment.
        """
        self._end_offset = offset
        view = self.reader.view  # every append comes here, and `_replace` takes twice as long
        self.reader.view = View(view[0], view[1], view[2], offset, position, view[5], view[6])
        messages = self._flush_messages
        many = messages is not None and offset - self._flushed_offset >= messages
        if many or position - self._flushed_position >= _FLUSH_AHEAD_BYTES:
            self._ask_flush()
        elif self._flush_ms is not None and not self._flush_timed:
            self._flush_timed = True
            self._flusher.within(self._flush_task, self._flush_ms / 1000)

    def append_decided(self, batches: Sequence[Batch], leader_epoch: int) -> None:
        """Append batches of one decided transaction. The caller is responsible for their order, and for hiding them
        from readers.

        Args:
            leader_epoch: the epoch in which the caller believes to lead.

        Raises:
            FencedLeaderEpoch: another epoch has begun, or this broker no longer leads. Nothing was appended.
            DiskFull: no batch was appended.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
            if leader_epoch != self._leader_epoch:
                raise self._fenced(leader_epoch)
            self._write(list(batches), sum(header.length for header, _ in batches), [])
            if self._active.size - self._flushed_position >= _FLUSH_AHEAD_DECIDED:
                self._ask_flush()

    def adopt(self, path: Path, headers: Sequence[BatchHeader], leader_epoch: int) -> bool:
        """As `append_decided`, of the batches that a file of the same disk has, which becomes the next segment: nothing
        of it is written again but what is stamped. It keeps its old name too.

        Args:
            headers: of all that the file has, in order.

        Returns:
            False if it cannot become a segment now; the caller appends the batches.

        Raises:
            As `append_decided`.
        """
        with self._lock:
            self._check_usable()
            if leader_epoch != self._leader_epoch:
                raise self._fenced(leader_epoch)
            if not self._active.size or len(self._segments) >= _ADOPTS_BELOW:  # an empty segment has the name
                return False
            self._save_begun_epoch()
            now_us, epoch = self._clock.now_us(), self._epochs.last
            new = self._next_segment()
            try:
                if not new.adopt(path, headers, epoch, now_us):
                    return False
            except OSError as error:
                self._errors.refuse(error, "making a segment of what is staged")
            offset = self._end_offset
            self._begin(new)
            log.info("segment_adopted", partition=self.label, base_offset=offset, bytes=new.size)
            for header in headers:
                self._apply_progress.record(header, offset, now_us)
                offset += header.last_offset_delta + 1
            return True

    def append_stamped(self, data: memoryview, leader_epoch: int) -> int:
        """Append record batches as they stand in the leader's log. Segments roll by this log's own settings. Producers
        and transactions are recorded with the leader's append time, so that a follower that becomes the leader
        recognises duplicates.

        Args:
            data: batches from the end offset on. They are checked here. A cut last batch is ignored.
            leader_epoch: the epoch of the leader that sent them, which is followed from now on (`follow_epoch`).

        Returns:
            The new end offset. If a batch after the first is refused, it is the end of the batches before that one; the
            next call starts with the refused batch and raises.

        Raises:
            CorruptBatch: the first batch is damaged, or does not continue this log: it begins at another offset, or has
                an older epoch than the batch before it or a later one than the leader. The leader's log has a gap where
                its disk was damaged. A follower cannot copy past it.
            FencedLeaderEpoch: the log knows or follows a later epoch, or leads in this one.
            DiskFull: the end offset shows what was appended.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        headers = _whole_batches(data, self.label)
        with self._lock:
            self._check_usable()
            self._follow_epoch(leader_epoch)
            start = length = 0  # of `run` in `data`
            run: list[BatchHeader] = []  # the batches of one write
            for header in self._continuing(headers, leader_epoch):
                full = self._active.size + length + header.length > self._segment_bytes
                if run and (full or header.leader_epoch != run[0].leader_epoch):
                    self._write_stamped(run, data[start : start + length])
                    start, length, run = start + length, 0, []
                run.append(header)
                length += header.length
            if run:
                self._write_stamped(run, data[start : start + length])
            return self._end_offset

    def _continuing(self, headers: Sequence[BatchHeader], leader_epoch: int) -> Sequence[BatchHeader]:
        """The leader's batches up to the first that does not continue the log. Raises CorruptBatch if that is the
        first."""
        offset, epoch = self._end_offset, self._epochs.last
        for number, header in enumerate(headers):
            fault = None
            if header.base_offset != offset:
                fault = f"the leader's batch there begins at {header.base_offset}"
            elif not epoch <= header.leader_epoch <= leader_epoch:
                fault = (
                    f"its leader epoch {header.leader_epoch} is not between {epoch} and the leader's, {leader_epoch}"
                )
            if fault is not None and number == 0:
                raise CorruptBatch(partition=self.label, offset=offset, reason=fault)
            if fault is not None:
                return headers[:number]
            offset, epoch = header.end_offset, header.leader_epoch
        return headers

    def _write_stamped(self, run: Sequence[BatchHeader], data: memoryview) -> None:
        """Write batches of one leader epoch with one append, and record them."""
        epoch = run[0].leader_epoch
        if epoch > self._epochs.last:
            self._epochs.begin(epoch, self._end_offset)
        # By the leader's clock, as are the times of what is there: by another one, each segment could be old at once.
        active = self._ready(len(data), run[-1].append_timestamp_us)
        try:
            position = active.append([data], len(data))
        except (OSError, TruncateFailed) as error:
            self._append_failed(error)
        for header in run:
            active.note(header, header.base_offset, position, header.append_timestamp_us)
            self._producers.replay(header)
            position += header.length
        active.leader_epoch = epoch
        self._advance(run[-1].end_offset, position)

    def producers_before(self, offset: int) -> bytes:
        """The saved form of the state of producers and transactions at an offset, where a batch begins: what a log
        needs that has only the batches from there on, so that with these it has the state that this one has. Reads the
        headers of transaction batches that lie on both sides.

        Raises:
            OffsetOutOfRange, CorruptBatch, StorageFailed, DiskFull, Closed: as a read of these headers.
        """
        with self._lock:
            self._check_usable()
            producers = self._producers.snapshot(self._end_offset)
        later = {
            RecordBatch(header.producer_id, header.transaction_batch_id, header.part, header.base_sequence)
            for header in self.reader.headers(offset, producers.end_of_batches_across(offset))
            if header.transaction_batch_id != NO_TRANSACTION
        }
        return producers.before(offset, later).encode()

    def take_producers(self, data: bytes) -> bool:
        """Take over, durably, the state of producers and transactions before an empty log, from the log of the leader;
        see `producers_before`. Returns whether it is one, intact, at this log's end.

        Raises:
            DiskFull: nothing changed.
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
        """
        with self._save_lock, self._lock:
            self._check_usable()
            offset = self._end_offset
            if self.start_offset < offset or not is_saved_state(data, offset):
                return False
            try:
                self._snapshots.save_encoded_producers(data, offset)
            except OSError as error:
                self._errors.refuse(error, "saving the producers' state")
            self._producers.load(data, offset)
            self._lacks_producers = False
            return True

    def settle_producers(self) -> None:
        """This log leads: if it began anew, and the state of the producers of the records before it never came from its
        leader, what it knows of them is the partition's. Raises as `take_producers`."""
        if self.lacks_producers:
            with self._lock:
                known = self._producers.snapshot(self._end_offset)
            self.take_producers(known.encode())

    @contextmanager
    def no_appends(self) -> Iterator[int]:
        """Yield the end offset. Appends wait during the `with` block, so it does not change."""
        with self._lock:
            yield self._end_offset

    def transaction_done(self, producer_id: int, batch_id: int) -> None:
        """Note that a transaction batch is done in all partitions and is its transaction's last, so that the progress
        is forgotten sooner."""
        with self._lock:
            self._apply_progress.done(producer_id, batch_id)

    def apply_progress(self, producer_id: int) -> Progress | None:
        """The apply progress of a transaction, or None."""
        with self._lock:
            return self._apply_progress.get(producer_id)

    def applied_batch(self, producer_id: int) -> int:
        """The last batch of a transaction of which anything was appended, or -1. Waits for no lock, because an append
        may hold it for as long as a disk takes."""
        progress = self._apply_progress.get(producer_id)
        return -1 if progress is None else progress.batch_id

    def applied_batches(self) -> set[tuple[int, int]]:
        """Producer id and batch id of each transaction's last batch of which anything was appended."""
        with self._lock:
            return self._apply_progress.batches()

    def _roll(self) -> None:
        """Create a segment at the end offset, and make it the active one. A later flush syncs the old segment and then
        renames the new one.

        Raises:
            DiskFull: nothing changed; the next append tries again.
        """
        new = self._next_segment()
        new.leader_epoch = self._active.leader_epoch
        try:
            new.create()
        except OSError as error:
            self._errors.refuse(error, "creating a segment")
        self._begin(new)

    def _next_segment(self) -> Segment:
        return Segment(self._disk, self.directory, self._end_offset, self.settings.index_interval_bytes, NEXT_SUFFIX)

    def _begin(self, new: Segment) -> None:
        """Make a segment that begins at the end offset the active one."""
        old = self._active
        assert old.size > 0
        self._unsynced_rolls.append(_Roll(old, new, self._producers.snapshot(self._end_offset)))
        self._segments.append(new)
        self._active = new
        self._flushed_position = 0
        self._end_offset = new.end_offset
        self._publish()
        self._ask_flush()
        log.info("segment_rolled", partition=self.label, base_offset=new.base_offset, bytes=old.size)

    def roll_if_old(self) -> bool:
        """Roll if the active segment is older than segment.ms; returns whether it did."""
        with self._lock:
            self._check_usable()
            if not self._active.is_old(self._segment_us, self._clock.now_us()):
                return False
            self._roll()
            return True

    def roll_if_damaged(self) -> None:
        """Roll if the active segment is damaged, because only a closed segment can be replaced. Raises DiskFull."""
        with self._lock:
            self._check_usable()
            if self._active.damaged and self._active.size:
                self._roll()

    # --- flushing ------------------------------------------------------------------------------------------------

    def request_flush(self) -> None:
        """Request a flush of all appended bytes by a flusher thread. One fdatasync serves all earlier requests."""
        with self._lock:
            self._ask_flush()

    def _ask_flush(self) -> None:
        if not self._flush_asked:
            self._flush_asked = True
            self._flusher.soon(self._flush_task)

    def flush_to(self, offset: int) -> None:
        """Flush, unless every record before an offset is already flushed. A flush that is running is waited for."""
        if self._flushed_offset < offset:
            self._flush_and_tell(offset)

    def flush(self) -> None:
        """fdatasync all appended bytes. Save the indexes of full segments and the state of the producers, unless
        another thread saves now.

        Raises:
            StorageFailed: the directory is out of service from now on.
            DiskFull: a segment could not be renamed; try again.
        """
        self._flush_and_tell()
        if self._unsaved_rolls and self._save_lock.acquire(blocking=False):
            try:
                self._save_rolls()
            finally:
                self._save_lock.release()

    def _flush_and_tell(self, offset: int | None = None) -> None:
        """Flush, unless every record before an offset is already flushed; without a lock held."""
        if self._flush(offset):
            self.on_flushed()

    def _flush(self, offset: int | None = None) -> bool:
        """`_flush_and_tell` without telling, for those who hold `_save_lock`; returns whether to tell."""
        with self._flush_lock:
            if offset is not None and self._flushed_offset >= offset:
                return False
            with self._lock:
                self._check_usable()
                self._flush_asked = self._flush_timed = False
                target, segment, position = self._end_offset, self._active, self._active.size
                rolls = list(self._unsynced_rolls)
                is_flushed = self._flushed_offset >= target
            for roll in rolls:
                self._sync_roll(roll)
                with self._lock:
                    self._roll_synced(roll)
            if not is_flushed:
                self._sync(segment)
                with self._lock:
                    self._mark_flushed(target, segment, position)
        return True

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Hold `_save_lock` during the `with` block, and tell of what was flushed in it, if anything, after that."""
        told_offset = flushed_offset = 0
        try:
            with self._save_lock:
                told_offset = self._flushed_offset
                try:
                    yield
                finally:
                    flushed_offset = self._flushed_offset
        finally:
            if flushed_offset > told_offset:
                self.on_flushed()

    def _sync(self, segment: Segment) -> None:
        file = segment.share_file()
        try:
            self._disk.sync(file.fd)
        except OSError as error:
            self._errors.fail(error, "fdatasync")
        finally:
            file.release()

    def _sync_roll(self, roll: _Roll) -> None:
        """Sync a full segment, and then rename the next one to `.log`. Raises StorageFailed, DiskFull."""
        self._sync(roll.old)
        try:
            if roll.new.is_next:
                roll.new.rename()
            self._disk.sync_dir(self.directory)
        except OSError as error:
            self._errors.refuse(error, "renaming a segment")

    def _roll_synced(self, roll: _Roll) -> None:
        self._unsynced_rolls.remove(roll)
        self._unsaved_rolls.append(roll)
        roll.old.close()
        self._mark_flushed(roll.new.base_offset, roll.new, 0)

    def _save_rolls(self) -> None:
        """Save the indexes of full segments and the state of the producers; under `_save_lock`. If the disk is full,
        this is only logged: a start rebuilds them."""
        with self._lock:
            if self._closed or self._services.health.failed is not None:
                return
            rolls, self._unsaved_rolls = self._unsaved_rolls, []
        for roll in rolls:
            try:
                if roll is rolls[-1] and self._snapshots.producers_at < roll.new.base_offset:
                    self._snapshots.save_producers(roll.producers, self.high_watermark)
            except OSError as error:
                if not passes(error):
                    self._errors.fail(error, "saving the producers' state")
                log.warning("producers_not_saved", partition=self.label, offset=roll.new.base_offset)
            self._save_index(roll.old)  # one sync for each segment, so that a start need not read 1 GiB

    def _mark_flushed(self, offset: int, segment: Segment, position: int) -> None:
        """Move the flushed offset, and publish it to readers.

        Args:
            offset: every record before it is synced.
            segment, position: the offset is at this position of this segment. A roll may have happened there since.
        """
        if offset > self._flushed_offset:
            self._flushed_offset = offset
            self._flushed_position = position if segment is self._active else 0
            known = self._flushed_position if offset >= self._active.base_offset else UNKNOWN
            self.reader.view = self.reader.view._replace(flushed_offset=offset, flushed_position=known)

    def checkpoint(self) -> None:
        """Flush, and save what shortens the next start: the index, the state of the producers, the recovery point.

        Raises:
            StorageFailed: the directory is out of service.
            Closed: the log is closed.
            DiskFull: the next start will take longer.
        """
        with self._saving():
            with self._lock:
                self._check_usable()
                end_offset, active = self._end_offset, self._active
                if end_offset == self._saved_offset:
                    return
                producers, summary = self._producers.snapshot(end_offset), active.summary()
            self._flush()
            try:
                active.save_index(summary)
                self._save_rolls()  # after it: if a roll followed, this replaces the index by a complete one
                if self._snapshots.producers_at <= end_offset:
                    self._snapshots.save_producers(producers, self.high_watermark)
            except OSError as error:
                self._errors.refuse(error, "saving an index")
            checkpoint = self._snapshots.checkpoint
            self._snapshots.write_checkpoint(Checkpoint(checkpoint.start_offset, end_offset, summary.covered))
            self._saved_offset = end_offset

    def note_flushed_acks(self) -> None:
        """Note durably that all that was acknowledged is durable, once it is, of a topic that has got flush.messages=1.

        Raises:
            StorageFailed, DiskFull, Closed: it is not noted.
        """
        with self._acks_lock:
            with self._lock:
                self._check_usable()
                needed = min(self._acks_flushed_from, self._end_offset)
                if self._notes_flushed_acks or self._flush_messages != 1 or self._flushed_offset < needed:
                    return
            try:
                flushed_acks.note(self._disk, self.directory)
                self._disk.sync_dir(self.directory)
            except OSError as error:
                self._errors.refuse(error, "noting that acks are flushed")
            self._notes_flushed_acks = True

    # --- cutting -------------------------------------------------------------------------------------------------

    def apply_retention(self) -> int:
        """Delete segments by retention.ms and retention.bytes, none after the high watermark; returns their number."""
        with self._saving():
            with self._lock:
                self._check_usable()
                count = expired(self._segments, self.settings, self._services.steady_clock.now_us())
                if self._high_watermark is not None:  # what follows it may be on no other replica yet
                    ends = [*(after.base_offset for after in self._segments[1:]), self._end_offset]
                    count = min(count, bisect_right(ends, self._high_watermark))
                start_offset = self._snapshots.checkpoint.start_offset
                # Those that an earlier deletion kept for the producers' state at the high watermark.
                count = max(count, sum(after.base_offset <= start_offset for after in self._segments[1:]))
                if not count:
                    return 0
                if count == len(self._segments):
                    self._roll()
                start_offset = self._segments[count].base_offset
            self._start_at(start_offset)
        self._unlink_soon()
        return count

    def delete_before(self, offset: int) -> int:
        """Make every record before an offset unreadable, and delete the segments that contain only such records.

        Returns:
            The new start offset: the given one, or the old one if that is larger.

        Raises:
            OffsetOutOfRange: the offset is negative or after the end.
        """
        with self._saving():
            with self._lock:
                self._check_usable()
                view = self.reader.view
                if offset > view.end_offset or offset < 0:
                    raise self.reader.out_of_range(offset, view, view.end_offset)
                moves = offset > view.start_offset
                if moves and offset == self._end_offset and self._active.size:
                    self._roll()
            if moves:
                self._start_at(offset)
                log.info("records_deleted", partition=self.label, start_offset=offset)
            start_offset = self._snapshots.checkpoint.start_offset
        self._unlink_soon()
        return start_offset

    def _start_at(self, offset: int) -> None:
        """Move the start offset durably, and remove the segments before it from the log; under `_save_lock`. A start
        finishes this after a stop.

        The recovery point is moved to the start offset if it is before it, because records that are not read any more
        may be missing.
        """
        if self._unsynced_rolls:
            try:
                self._flush()
            except DiskFull:
                pass  # the deletion frees space
        self._save_rolls()  # the segments to be deleted may contain the last batches of producers
        try:
            self._save_producers_before(offset)
        except DiskFull:
            safe = self._segment_of(min(offset, self._snapshots.producers_at))
            if safe is self._segments[0]:
                raise
            self._delete_before(safe.base_offset)
            while self._deleted:
                self._unlink_oldest()  # frees space
            self._save_producers_before(offset)
        try:
            self._delete_before(offset)
        except DiskFull:
            whole = self._segment_of(offset).base_offset
            if whole in (offset, self._segments[0].base_offset):
                raise
            self._delete_before(whole)
            while self._deleted:
                self._unlink_oldest()  # frees space
            self._delete_before(offset)

    @property
    def _knows_producers(self) -> bool:
        return bool(self._producers) or bool(self._apply_progress)

    def _segment_of(self, offset: int) -> Segment:
        with self._lock:
            return self._segments[max(bisect_right([each.base_offset for each in self._segments], offset) - 1, 0)]

    def _delete_before(self, offset: int) -> None:
        """The part of `_start_at` after the state of the producers is saved."""
        kept = self._segment_of(offset)
        if self._high_watermark is not None and self._knows_producers:
            try:  # a truncation to the high watermark replays the segments from this state on
                needed = self._segment_of(self._snapshots.newest_at(self.high_watermark))
            except OSError as error:
                self._errors.refuse(error, "looking up the producers' states")
            kept = min(kept, needed, key=lambda segment: segment.base_offset)
        with self._lock:
            if self._unsynced_rolls:
                kept = min(kept, self._unsynced_rolls[0].old, key=lambda segment: segment.base_offset)
        offset = max(offset, self._snapshots.checkpoint.start_offset)
        checkpoint = self._snapshots.checkpoint._replace(start_offset=offset)
        if offset > checkpoint.recovery_point:
            checkpoint = Checkpoint(offset, offset)
        written = True
        try:
            self._snapshots.write_checkpoint(checkpoint)
        except DiskFull as full:
            if isinstance(full, OutOfFiles) or kept.base_offset != offset:
                raise
            # The deletion of whole segments frees space, and their absence alone shows where the log starts.
            self._snapshots.checkpoint, written = checkpoint, False
        with self._lock:
            number = self._segments.index(kept)
            old, self._segments = self._segments[:number], self._segments[number:]
            self._unsaved_rolls = [roll for roll in self._unsaved_rolls if roll.old not in old]
            self._epochs.start_at(offset)
            self._publish()
        self.on_deleted()
        self._deleted += old
        while self._deleted and not written:
            self._unlink_oldest(durable=True)

    def _unlink_oldest(self, durable: bool = False) -> None:
        """Unlink a segment that no reader can reach any more; under `_save_lock`.

        Args:
            durable: sync the unlink, because only the segment's absence shows that it was deleted. Otherwise a refused
                unlink can be retried later.

        Raises:
            DiskFull, FileRefused: the unlink was refused, and `durable` is false.
            StorageFailed: the directory is out of service from now on.
        """
        segment = self._deleted[0]
        try:
            segment.delete()
            if durable:
                self._disk.sync_dir(self.directory)
        except OSError as error:
            if durable:
                self._errors.fail(error, "deleting a segment")
            self._errors.refuse_to_open(error, "deleting a segment")
        self._deleted.popleft()
        log.info("segment_deleted", partition=self.label, base_offset=segment.base_offset, bytes=segment.size)

    def _unlink_soon(self) -> None:
        """Let the unlinker's thread unlink the segments that were removed from the log. Called without a lock."""
        if self._deleted:
            self._services.unlinker.soon(self.directory.name, self._unlink_deleted)

    def _unlink_deleted(self) -> bool:
        """Unlink one of the segments that were removed from the log; returns whether there are more. An unlink of 1 GiB
        takes 50 to 300 ms.

        Does nothing if the log is closed, because its folder may have been opened as another Log. The next opening
        unlinks the rest.
        """
        if self._closes:  # `close` must not compete for the lock with the next unlink
            return False
        with self._save_lock:
            if self._closed or not self._deleted:
                return False
            self._unlink_oldest()
            return bool(self._deleted)

    def _save_producers_before(self, offset: int) -> None:
        """Save the state of producers and transactions, unless a saved state covers the segments before an offset.

        A roll or a checkpoint usually saved it. After a stop, or when the disk was full, only these segments contain
        it.

        Raises:
            DiskFull: the segments must not be deleted.
            StorageFailed: the directory is out of service.
        """
        if self._snapshots.producers_at >= self._segment_of(offset).base_offset or not self._knows_producers:
            return
        with self._lock:
            producers = self._producers.snapshot(self._end_offset)
        self._flush()
        try:
            self._snapshots.save_producers(producers, self.high_watermark)
        except OSError as error:
            self._errors.refuse(error, "saving the producers' state")

    def truncate_to(self, offset: int) -> int:
        """Cut off every batch that has an offset at or after the given one, as a follower does. The leader epochs that
        began there are forgotten, also if there is no batch to cut off. Appends by a leader are refused until
        `begin_epoch`.

        Returns:
            The new end offset: the given one, or the start of the batch or damaged range that contained it, or the old
            end offset if that is smaller.

        Raises:
            OffsetOutOfRange: the offset is before the start.
            DiskFull: a segment could not be renamed, or an adopted one not copied, or the checkpoint not written;
                nothing was cut.
            StorageFailed: the directory is out of service.
        """
        with self._save_lock, self._flush_lock, self._lock:
            self._check_usable()
            view = self.reader.view
            if offset < view.start_offset:
                raise self.reader.out_of_range(offset, view, view.end_offset)
            epochs = len(self._epochs.entries)
            if offset >= view.end_offset:
                self._truncate_epochs(offset)
                return view.end_offset
            for roll in list(self._unsynced_rolls):
                self._sync_roll(roll)
                self._roll_synced(roll)
            try:
                self._truncate(view, offset)
            except OSError as error:
                self._errors.fail(error, "truncating")
            self._truncate_epochs(self._end_offset)
            log.info(
                "log_truncated",
                partition=self.label,
                asked=offset,
                end_offset=self._end_offset,
                epochs=epochs - len(self._epochs.entries),
            )
            return self._end_offset

    def _truncate_epochs(self, offset: int) -> None:
        """Forget the leader epochs that began at or after an offset. After the batches: a start drops the epochs that
        began after the end, and the follower asks again about one that began at the end."""
        self._leader_epoch = None
        self._epochs.truncate_to(offset)
        if not self._epochs.is_saved:
            try:
                self._save_epochs()
            except DiskFull as full:  # the next append tries again
                self._services.health.log_full(full, self.label)

    def _truncate(self, view: View, offset: int) -> None:
        number = bisect_right(view.bases, offset) - 1
        segment = view.segments[number]
        position, end_offset = self.reader.boundary(view, number, offset)
        try:
            cut = segment.cut_copy(position, end_offset)
            if cut.is_adopted:
                cut.copied_to(position)  # first: there may be no room
        except OSError as error:
            self._errors.refuse(error, "reading what stays of a segment")
        # A start must not report the cut records as missing, nor use their saved state for later records.
        checkpoint = self._snapshots.checkpoint._replace(
            start_offset=min(self._snapshots.checkpoint.start_offset, end_offset)
        )
        if end_offset < checkpoint.recovery_point:
            checkpoint = checkpoint._replace(recovery_point=end_offset, recovery_position=position)
        try:
            self._snapshots.write_checkpoint(checkpoint)
        except BaseException:
            cut.forget_copy()
            raise
        later = self._segments[number + 1 :]
        self._segments, self._active = [*self._segments[:number], cut], cut
        self._unsaved_rolls = [roll for roll in self._unsaved_rolls if roll.old in self._segments]
        self._end_offset = end_offset
        if self._high_watermark is not None:
            self._high_watermark = min(self._high_watermark, end_offset)
        if self._flushed_offset >= end_offset:
            self._flushed_offset, self._flushed_position = end_offset, position
        self._publish()  # before the files change: what is found in an old segment from now on is not the log's damage
        for each in reversed(later):
            each.delete()
            self._disk.sync_dir(self.directory)
        cut.forget_saved_index()
        self._snapshots.drop_producers_after(end_offset)
        self._disk.sync_dir(self.directory)
        segment.close()
        if cut.is_adopted:
            log.info("adopted_segment_cut", partition=self.label, base_offset=cut.base_offset, bytes=position)
        cut.cut(position)
        self._flushed_offset, self._flushed_position = end_offset, position
        self._saved_offset = -1  # the index was forgotten, and the producers' state may be older
        self._snapshots.producers_at = open_producers(
            self._disk, self.directory, self._segments, self._producers, self.label
        )
        self._lacks_producers = lacks_producers(self._disk, self.directory, self._segments)
        self._publish()

    def reset_to(self, offset: int, producers: bytes = b"") -> None:
        """Delete every record, and begin anew with an empty log at an offset, as a follower does whose log ends before
        the leader's starts. The producers' state, the apply progress and the leader epochs are forgotten. Appends by a
        leader are refused until `begin_epoch`.

        Once the reset may be recorded, the log is the new one. If there is no space or descriptor for the files of it,
        each later use tries to make them, and raises DiskFull until they are made (`finish_reset`).

        Args:
            producers: the state of producers and transactions before the offset, as far as it is known here; see
                `producers_before`. It is not saved, and holds until the leader's is taken over.

        Raises:
            DiskFull: nothing was deleted.
            StorageFailed: the directory is out of service. The next start finishes the reset, if it was recorded.
            Closed: the log is closed.
        """
        with self._save_lock, self._flush_lock, self._lock:
            self._check_usable()
            is_recorded = True
            try:
                record_reset(self._disk, self.directory, offset)
            except OSError as error:
                if not may_be_reset(self._disk, self.directory):
                    self._errors.refuse(error, "recording a reset")
                if not passes(error):  # the next start may delete what is appended from now on
                    self._errors.fail(error, "recording a reset")
                is_recorded = False
            old = self._segments
            new = Segment(self._disk, self.directory, offset, self.settings.index_interval_bytes)
            self._segments, self._active = [new], new
            self._unsynced_rolls, self._unsaved_rolls = [], []
            self._deleted.clear()
            self._leader_epoch, self._epochs = None, LeaderEpochs()
            self._producers.clear()
            self._producers.load(producers, offset)
            self._lacks_producers = offset > 0
            self._end_offset = self._flushed_offset = self._saved_offset = self._snapshots.producers_at = offset
            self._flushed_position = 0
            self._high_watermark = None if self._high_watermark is None else offset
            self._snapshots.checkpoint = Checkpoint(offset, offset, 0)
            self._publish()  # before the files are gone: a reader that misses one looks for a newer view
            for segment in old:
                segment.close()
            self._resets = True
            try:
                self._finish_reset(is_recorded)
            except DiskFull as full:
                self._services.health.log_full(full, self.label)

    def _finish_reset(self, is_recorded: bool) -> None:
        """The steps of `reset_to` on the disk; lock held. After a failure they begin with the record again, whichever
        of them were done: nothing may be deleted before it is durable."""
        try:
            if not is_recorded:
                record_reset(self._disk, self.directory, self._end_offset)
            finish_reset(self._disk, self.directory, self.label)
            self._active.open_for_append()
        except OSError as error:
            self._errors.refuse(error, "resetting the log")
        self._resets = False

    def finish_reset(self) -> None:
        """Finish the steps of `reset_to` on the disk, if some are left. Until then a loss of power may restore the old
        log.

        Raises:
            DiskFull: there still is no space or descriptor for them.
            StorageFailed, Closed.
        """
        with self._lock:
            self._check_usable()

    # --- checking --------------------------------------------------------------------------------------------------

    def check(
        self,
        segment: Segment,
        from_offset: int = 0,
        until_offset: int = OFFSET_MAX,
        on_batch: OnBatch = lambda header: None,
    ) -> Iterator[int]:
        """Check the batches of a segment; see `SegmentCheck.run`. No lock is held while it reads. Damage is added to
        the segment's, and logged once. Ends early if the segment is not in the log any more.

        Raises:
            StorageFailed, DiskFull: the file cannot be read.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
        view = self.reader.view
        if segment not in view.segments:
            return
        limit, limit_offset = view.limit(view.segments.index(segment))
        check = SegmentCheck(self._disk, self.reader, segment, limit, limit_offset, on_batch)
        try:
            for read in check.run(from_offset, until_offset):
                yield read
                with self._lock:
                    self._check_usable()
                if segment not in self.reader.view.segments:
                    return
        except FileNotFoundError:
            if segment in self.reader.view.segments:  # somebody removed it
                self.reader.note_damage(segment, [Damage(segment.base_offset, limit_offset, 0, limit)])
        except OSError as error:
            self._errors.refuse(error, "checking a segment")

    def read_segment(self, segment: Segment, position: int, length: int) -> bytes:
        """Bytes of a segment as they are, for a replacement. Raises StorageFailed, DiskFull."""
        try:
            file = segment.share_file()
            try:
                return self._disk.read_sparing_cache(file.fd, length, position)
            finally:
                file.release()
        except OSError as error:
            self._errors.refuse(error, "reading a segment")

    def check_index(self, segment: Segment) -> None:
        """Save the index of a closed segment again if the saved one is missing or damaged, or does not have the damage
        that is known.

        Raises:
            StorageFailed, DiskFull, Closed.
        """
        with self._save_lock:
            with self._lock:
                self._check_usable()
                unsaved = [roll.old for roll in (*self._unsynced_rolls, *self._unsaved_rolls)]
                if segment not in self._segments[:-1] or segment in unsaved:
                    return
                wanted = encode_index(segment.index, segment.summary())
            try:
                found = read_whole(self._disk, segment.index_path)
            except OSError as error:
                self._errors.refuse(error, "reading an index")
            if found == wanted:
                return
            if found is None or decode_index(found, segment.base_offset, 1) is None:
                log.warning("index_rebuilt", partition=self.label, base_offset=segment.base_offset)
            self._save_index(segment)

    def check_files(self) -> None:
        """Write the checkpoint, the leader epochs and the producers' state again if their files are missing or damaged.

        Raises:
            StorageFailed, DiskFull, Closed.
        """
        rebuilt = []
        try:
            with self._save_lock:
                with self._lock:
                    self._check_usable()
                    if self._epochs.is_damaged(self._disk, self.directory):
                        self._save_epochs()
                        rebuilt.append(EPOCHS_NAME)
                if self._snapshots.write_damaged_checkpoint():
                    rebuilt.append(CHECKPOINT_NAME)
                if self._snapshots.drop_damaged_producers():
                    self._saved_offset = -1
                    rebuilt.append("producers")
        except OSError as error:
            self._errors.refuse(error, "checking files")
        for name in rebuilt:
            log.warning("file_rebuilt", partition=self.label, file=name)
        if self._saved_offset < 0:
            self.checkpoint()

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of the record at an offset; -1 if it is not known."""
        with self._lock:
            return self._epochs.at(offset)

    # --- replacing -----------------------------------------------------------------------------------------------

    def begin_replacement(self, old: Sequence[Segment]) -> Replacement | None:
        """Begin to write a segment that is to replace closed segments: `old`, in order. Takes no lock while it is
        written. Returns None if they are not closed segments of this log (any more).

        Raises:
            DiskFull, StorageFailed: the new file cannot be made.
            Closed: the log is closed.
        """
        with self._lock:
            self._check_usable()
            number = self._number_of(old)
            if number is None:
                return None
            end_offset = self._segments[number + len(old)].base_offset
        return Replacement(self._disk, self.directory, old, end_offset, self._errors)

    def _number_of(self, old: Sequence[Segment]) -> int | None:
        """The number of the first of some segments, if they are closed segments of this log in a row. Lock held."""
        closed = self._segments[:-1]
        number = closed.index(old[0]) if old[0] in closed else len(closed)
        return number if closed[number : number + len(old)] == list(old) else None

    def replace(self, replacement: Replacement) -> bool:
        """Put a complete replacement in the place of its old segments, durably. Appends and reads continue; readers of
        an old file read on in it.

        Returns:
            False if the old segments were deleted, truncated or replaced meanwhile; the replacement was abandoned.

        Raises:
            DiskFull: the replacement was abandoned; try again.
            StorageFailed: the directory is out of service. The next start finishes the replacement if it was decided.
            Closed: the log is closed; the replacement was abandoned.
        """
        decided = False
        try:
            saved, restored = self._restored_by(replacement)
            with self._saving():
                with self._lock:
                    self._check_usable()
                    if self._number_of(replacement.old) is None:
                        return False
                if any(offset < replacement.end_offset for offset in self._saved_offsets() - saved):
                    _, restored = self._restored_by(replacement)  # a state was saved that is of an offset amid them
                self._restore_producers(restored)
                self._flush()  # a roll that is not synced renames its segment later
                self._save_rolls()
                try:
                    self._snapshots.restore(self._producers.empty(), restored)
                    for segment in replacement.old:
                        with suppress(FileNotFoundError):
                            segment.keep_file()
                    replacement.decide()
                except OSError as error:
                    if replacement.may_be_decided:  # it would replace what the log has by then
                        self._errors.fail(error, "replacing a segment")
                    self._errors.refuse(error, "replacing a segment")
                decided = True
                self._replaced(replacement)
        finally:
            if not decided:
                replacement.abandon()
        return True

    def _restored_by(self, replacement: Replacement) -> tuple[set[int], list[BatchHeader]]:
        """The offsets of the saved states, and what they and the present one may remember of the batches that a
        replacement brings back. Needs no lock, because all their headers are read."""
        saved = self._saved_offsets()
        return saved, self._producers.memorable(replacement.restored(), saved)

    def _saved_offsets(self) -> set[int]:
        try:
            return set(self._snapshots.offsets())
        except OSError as error:
            self._errors.refuse(error, "looking up the producers' states")

    def _restore_producers(self, restored: Sequence[BatchHeader]) -> None:
        """Record the batches that a replacement brings back: a start, or a truncation, that met their damage could not.
        The saved states get them next, also one of an earlier roll. All of it comes before the decision: a stop in
        between leaves the damage, which is repaired again. After the decision nothing would show what a saved state
        lacks."""
        for number in range(0, len(restored), _RESTORED_AT_ONCE):
            with self._lock:
                self._producers.restore(restored[number : number + _RESTORED_AT_ONCE])
            # Not a wait: it lets other threads run. A released lock goes to whoever runs, and this thread would take it
            # again before an append that waits for it runs: one waited for all pieces, 0.9 s with 25,000 batches.
            time.sleep(0)

    def _replaced(self, replacement: Replacement) -> None:
        """`replace` after the decision."""
        new, old = replacement.segment, replacement.old
        with self._lock:
            number = self._segments.index(old[0])
            self._segments[number : number + len(old)] = [new]
            self._unsaved_rolls = [roll for roll in self._unsaved_rolls if roll.old not in old]
            self._publish()
        try:
            replacement.finish()
        except OSError as error:
            self._errors.fail(error, "replacing a segment")
        self._save_index(new)
        new.close()
        log.info(
            "segment_replaced", partition=self.label, base_offset=new.base_offset, end_offset=replacement.end_offset,
            old_bytes=sum(segment.size for segment in old), bytes=new.size,
        )  # fmt: skip

    def _save_index(self, segment: Segment) -> None:
        """Save the index of a synced segment; under `_save_lock`. If the disk is full, this is only logged: a start
        rebuilds it."""
        try:
            segment.save_index(durable=True)
        except OSError as error:
            if not passes(error):
                self._errors.fail(error, "saving an index")
            log.warning("index_not_saved", partition=self.label, base_offset=segment.base_offset)

    # --- tidying and closing -------------------------------------------------------------------------------------

    def is_gone(self) -> bool:
        """Whether the active segment's file was removed, moved or replaced: a start would not find what is written to
        it. Takes two system calls.

        Raises:
            StorageFailed, FileRefused, DiskFull: the file cannot be looked up.
        """
        try:
            if self._active.is_in_place():
                return False
            with self._save_lock, self._flush_lock, self._lock:  # again: a rename or a roll may have interfered
                return not self._closed and not self._active.is_in_place()
        except OSError as error:
            self._errors.refuse_to_open(error, "checking a segment file")

    def forget_silent_producers(self, before_us: int) -> int:
        """Forget producers whose last append was before a time; returns their number."""
        with self._lock:
            return self._producers.forget_silent(before_us)

    @property
    def knows_transactions(self) -> bool:
        """Whether the log keeps the apply progress of any transaction."""
        return bool(self._apply_progress)

    def has_silent_transactions(self, keep: Collection[int]) -> bool:
        """Whether the apply progress of some transaction may be forgotten (`ApplyProgress.silent`).

        Args:
            keep: producer ids that do not count.
        """
        now_us = self._services.steady_clock.now_us()
        with self._lock:
            return bool(self._apply_progress.silent(now_us, keep))

    def forget_silent_transactions(self, keep: Collection[int]) -> None:
        """Forget the apply progress that `has_silent_transactions` finds."""
        now_us = self._services.steady_clock.now_us()
        with self._lock:
            self._apply_progress.forget_silent(now_us, keep)

    def close(self, clean: bool = True) -> None:
        """Stop appending and reading. Slices in use stay valid.

        Args:
            clean: save everything first, so that the next start has nothing to recover.

        Raises:
            StorageFailed, DiskFull: the log is closed, but not everything is saved.
        """
        self._closes = True
        try:
            if clean and not self._closed and self._services.health.failed is None:
                self.checkpoint()
        finally:
            with self._save_lock, self._flush_lock, self._lock:
                if not self._closed:
                    self._closed = self._errors.is_closed = self.reader.closed = True
                    self._flusher.cancel(self._flush_task)
                    for segment in self._segments:
                        segment.close()


def _whole_batches(data: memoryview, label: str) -> list[BatchHeader]:
    """The headers of the whole batches up to the first damaged one. Raises CorruptBatch if that is the first."""
    headers: list[BatchHeader] = []
    try:
        for header, _ in iter_batches(data, label):
            headers.append(header)
    except CorruptBatch:
        if not headers:
            raise
    return headers
