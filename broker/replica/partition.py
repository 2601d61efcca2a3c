"""One replica of a partition on this broker: its log, the parts staged beside it, the readable end, and the waiters for
a change. Knows no sockets, no ZooKeeper.

The readable end is the log's end or, with flush.visibility=flushed, the end of the flushed records (the paper's rule,
section 3.1). In both cases it is at most the start of the first hidden batch (`applier.py`). It never goes back,
because a reader would then treat its range as lost.

Thread-safe. Waiters are woken outside every lock. A wake is a hint to look again; a registration is good for one wake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from broker.config import TopicSettings
from broker.replica.applier import Applied, Applier
from broker.staging.format import PreparedSet
from broker.staging.part import Write
from broker.staging.staging import Staged, Staging
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from broker.storage.reader import View, reach
from broker.storage.segment import FileSlice, Hint
from kafkalog.errors import Closed, KafkalogError, NotLeader, OffsetOutOfRange, StorageFailed
from kafkalog.format.batch import Batch

Wake = Callable[[], None]


class _FlushRule(NamedTuple):
    """Whether readers see only what is flushed. `shown_offset`: records before it were readable when the rule was set,
    and stay readable."""

    flushed_only: bool
    shown_offset: int


class Partition:
    """A partition that this broker holds and leads.

    Args:
        topic: the topic's name, for messages.
        topic_id: names the topic in requests.
        number: within the topic.
        log: its open log, of `directory`, which closes it.
        settings: the topic's.

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
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.label = f"{topic}-{number}"
        self.log = log
        self.settings = settings
        self._directory = directory
        self._broker_id = broker_id
        self._closed = False
        self._lock = threading.Lock()  # guards _waiters; the only lock then held, for set operations only
        self._waiters: set[Wake] = set()
        self._reader = log.reader
        if log.flushed_offset < log.end_offset:
            log.flush()  # only the previous Partition knew which batches were hidden until their sync
        self._staging = Staging(directory.services, log.directory, log.label)
        self._applier = Applier(log, self._staging)
        self._flush_rule = _FlushRule(settings.flush_visibility == "flushed", 0)
        log.on_flushed = self._flushed

    # --- what requests do ----------------------------------------------------------------------------------------

    def append_as_leader(self, batches: Sequence[Batch]) -> list[Appended | KafkalogError]:
        """Append checked batches in one write; returns each batch's outcome, in order. Wakes readers that wait for
        data.

        Raises:
            NotLeader: the partition was closed here meanwhile.
            StorageFailed, DiskFull: nothing was written.
        """
        if self._closed:
            raise self._not_here()
        try:
            outcomes = self.log.append(batches)
        except Closed:  # between the check above and here
            raise self._not_here() from None
        if self._waiters:
            self.wake_waiters()
        return outcomes

    def read(self, offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        """A description of the bytes from an offset on; see Reader.read."""
        if self._closed:
            raise self._not_here()
        try:
            return self._reader.read(offset, max_bytes, hint, self._look)
        except Closed:
            raise self._not_here() from None

    @property
    def is_open(self) -> bool:
        """Whether requests are served; the directory may have closed the log."""
        return not self._closed and not self._reader.closed

    @property
    def leader_epoch(self) -> int:
        """The epoch stamped into batches."""
        return self.log.leader_epoch

    @leader_epoch.setter
    def leader_epoch(self, epoch: int) -> None:
        self.log.leader_epoch = epoch

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
            return self.log.delete_before(end_offset if offset == -1 else offset)

    def truncate_to(self, offset: int) -> int:
        """Cut off every batch with an offset at or after the given one; see Log.truncate_to."""
        with self._hosted():
            end_offset = self.log.truncate_to(offset)
        self._applier.truncated(end_offset)
        with self._applier.no_changes():
            rule = self._flush_rule
            self._flush_rule = rule._replace(shown_offset=min(rule.shown_offset, end_offset))
        return end_offset

    # --- staged writes -------------------------------------------------------------------------------------------

    def stage(self, uuid: bytes, batches: Sequence[Batch]) -> tuple[int, int]:
        """Keep checked batches of a part beside the log; see Staging.stage."""
        with self._hosted():
            return self._staging.stage(uuid, batches)

    def prepare(self, prepared: PreparedSet) -> None:
        """Record parts as a set; it is durable after `keep_prepared`. See Applier.prepare."""
        with self._hosted():
            self._applier.prepare(prepared)
            self._staging.request_sync()

    def keep_prepared(self, commit_uuid: bytes) -> None:
        """Make a recorded set durable, and check that it is as it was staged. Raises as Staging.check."""
        with self._hosted():
            self._staging.check(commit_uuid)  # while a thread of the directory does the requested sync
            self._staging.sync()

    def apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied:
        """Append the missing record batches of a decided batch; durable after `finish_apply`. See Applier.apply.

        The flush that shows the batch wakes waiting readers; they are also woken here, in case that flush is over.
        """
        try:
            with self._hosted():
                return self._applier.apply(transactional_id, producer_id, batch_id, commit_uuid)
        finally:
            self.wake_waiters()

    def try_apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied | None:
        """`apply`, or None while another apply or drop is under way."""
        try:
            with self._hosted():
                return self._applier.try_apply(transactional_id, producer_id, batch_id, commit_uuid)
        finally:
            self.wake_waiters()

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
        """Wait until an applied batch is durable; readers see it from then on."""
        with self._hosted():
            self._applier.finish(applied)

    def drop(self, commit_uuid: bytes, below_version: int, wait: bool = True) -> bool:
        """Forget a prepared set; see Applier.drop."""
        with self._hosted():
            dropped = self._applier.drop(commit_uuid, below_version, wait)
        self.wake_waiters()
        return dropped

    def forget_staged(self, transactional_id: str, batch_id: int, stays: bool) -> None:
        """Forget a transaction's staged data up to a batch that is done. `stays` as in `Applier.forget`."""
        with self._hosted():
            self._applier.forget(transactional_id, batch_id, stays)

    def abort_parts(self, uuids: Iterable[bytes]) -> None:
        """Forget parts that are not prepared."""
        with self._hosted():
            self._staging.abort(uuids)

    def renew(self, write: Write) -> None:
        """Keep the parts of a write, because one of its tasks still runs."""
        with self._hosted():
            self._staging.renew(write)

    def expire(self, writes: Collection[Write], before: float) -> int:
        """Forget parts of some writes that are not prepared, and not renewed since a time; returns how many."""
        with self._hosted():
            return self._staging.expire(writes, before)

    def forget_silent_transactions(self) -> None:
        """Forget the apply progress of transactions that ended long ago."""
        if self.log.knows_transactions:
            with self._hosted():
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
        except Closed:
            raise self._not_here() from None

    def _flushed(self) -> None:
        self._applier.flushed()
        self.wake_waiters()

    # --- acks ----------------------------------------------------------------------------------------------------

    @property
    def needs_flush_for_ack(self) -> bool:
        """Whether an ack requires a flush (flush.messages=1)."""
        return self.log.needs_flush_for_ack

    def is_flushed_to(self, end_offset: int) -> bool:
        """Whether the log is durable up to an offset.

        Raises:
            StorageFailed: it cannot be known any more.
            NotLeader: the partition was closed here before the flush.
        """
        failed = self._directory.failed
        if failed is not None:
            raise StorageFailed(**failed.facts)
        closed = self._closed  # read before the offset, because a clean close flushes first
        if self.log.flushed_offset >= end_offset:
            return True
        if closed:
            raise self._not_here()
        return False

    def _not_here(self) -> NotLeader:
        return NotLeader(broker_id=self._broker_id, partition=self.label)

    # --- waiting -------------------------------------------------------------------------------------------------

    def register(self, wake: Wake) -> None:
        """Register `wake` to be called once, at the next append, flush or close. The caller checks again after this."""
        with self._lock:
            self._waiters.add(wake)

    def unregister(self, wake: Wake) -> None:
        with self._lock:
            self._waiters.discard(wake)

    def wake_waiters(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    @property
    def waiting(self) -> int:
        """How many wait here right now."""
        return len(self._waiters)

    # --- what the host does -----------------------------------------------------------------------------------

    def update_settings(self, settings: TopicSettings) -> None:
        """Use other settings from now on. Readers still see what they could see before."""
        self.settings = settings
        with self.log.no_appends(), self._applier.no_changes():
            self._flush_rule = _FlushRule(settings.flush_visibility == "flushed", self.readable_end_offset)
        self.log.update_settings(settings)
        self.wake_waiters()

    def close(self) -> None:
        """Refuse requests from now on, and wake all waiters; a running apply ends, perhaps later, and appends nothing
        more. Waits for no fdatasync. The directory closes the log, which another Partition may open at once."""
        self._closed = True
        self.wake_waiters()
        self._staging.close()
        self._applier.close()
