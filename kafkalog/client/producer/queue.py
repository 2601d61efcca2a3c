"""Records to batches, and a partition's batches from the first send to the ack. Pure: no threads, no I/O, no clock.

One `PartitionQueue` holds the batches of one partition in order:

    open -> ready -> unacked (in flight | to be sent again) -> acked or failed

Sequence numbers are given when a batch first leaves `ready`. The rules that keep retries from doubling or reordering:
- A batch is sent again under the (producer id, epoch, sequence) of its first send, so that the broker recognizes it.
- After any failure nothing more of the partition is sent until every batch in flight is answered. Then all batches
  without an ack are sent again in order, each with an answer of its own.
- A batch that fails for good leaves a gap, and the broker refuses batches after a gap. Once all are answered, the
  partition continues under a higher epoch from sequence 0. Of the batches after the gap, only those known not to be in
  the log are sent under the new epoch. One whose outcome is unknown fails too (OutcomeUnknown): under a new number the
  broker would not recognize it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.client.cluster import LOOK_SECONDS
from kafkalog.client.producer.encode import Body
from kafkalog.errors import (
    LEADER_CHANGES,
    DeliveryTimedOut,
    InternalError,
    KafkalogError,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OutcomeUnknown,
    OutOfOrderSequence,
    RequestTimedOut,
    StorageFailed,
)
from kafkalog.format.batch import SEQUENCE_MODULUS
from kafkalog.format.columns import HAS_TIMES, Columns, Headers
from kafkalog.records import RecordMetadata, TopicPartition
from kafkalog.retry import Backoff

if TYPE_CHECKING:
    from kafkalog.client.producer.accumulator import Accumulator

_TIMESTAMP_BYTES = 8
_BITMAPS = 5  # of nulls: keys, values, and within headers; rows without any have none until they join others
_DEADLINES_APART_SECONDS = 1.0
EPOCH_MAX = (1 << 15) - 1
_MAY_BE_WRITTEN = (RequestTimedOut, StorageFailed, InternalError, NotEnoughReplicasAfterAppend, NotLeader)
"""Answers that leave it open whether the batch is in the log. NotLeader is also the answer to a batch that the leader
wrote, and then led no more before the in-sync replicas had it."""

OnDelivery = Callable[["KafkalogError | None", "RecordMetadata | None"], object]
"""(error, metadata), one of them None: the order of confluent-kafka and librdkafka."""


class Identity(NamedTuple):
    """A producer's id and epoch."""

    producer_id: int
    epoch: int


class Batch:
    """Records of one partition that are sent, acknowledged or refused together. The producer's lock guards its fields.

    Attributes:
        values, timestamps_us, keys, headers: a record at each index; None where no record has one. Emptied once `body`
            is made; the timestamps stay, for the metadata, unless it fails.
        is_mixed: some record has a key or headers.
        count: records, once closed.
        size: of the records in memory, more than encoded; `size_limit`: no more than that is reserved; `charged`: what
            the batch counts in buffer.memory.
        linger_until, deadline: by the monotonic clock, in seconds.
        columns: the records of tables one after the other, instead of lists of values, keys and so on.
        body: the encoded columns, made when first sent.
        identity, sequence: under which it is sent; None before the first send, and always if not idempotent.
        base_offset, error: the outcome, once `done`.
        awaited: a caller waits for its outcome.
        callbacks: by the index of their record, or -1 of who waits for the batch.
        asked: the records whose senders ask for the outcome or are called: how many from each of some indices on.
    """

    __slots__ = (
        "asked", "awaited", "base_offset", "body", "callbacks", "charged", "columns", "count", "deadline", "done",
        "error", "headers", "identity", "is_in_flight", "is_mixed", "keys", "linger_until", "lost", "maybe_written",
        "queue", "sends", "sequence", "size", "size_limit", "timestamps_us", "values",
    )  # fmt: skip

    def __init__(self, queue: PartitionQueue, linger_until: float, deadline: float) -> None:
        self.queue = queue
        self.linger_until = linger_until
        self.deadline = deadline
        self.values: list[bytes | None] = []
        self.timestamps_us: list[int] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[Headers | None] | None = None
        self.callbacks: list[tuple[int, OnDelivery]] | None = None
        self.count = self.size = self.size_limit = self.charged = self.sends = 0
        self.columns: list[Columns] | None = None
        self.body: Body | None = None
        self.identity: Identity | None = None
        self.sequence = -1
        self.is_mixed = self.is_in_flight = self.lost = self.maybe_written = False
        self.done = self.awaited = False
        self.asked: dict[int, int] = {}
        self.base_offset = -1
        self.error: KafkalogError | None = None

    def add_key_and_headers(self, index: int, key: bytes | None, headers: Headers | None) -> None:
        """Add the key and headers of the record that was just added."""
        self.is_mixed = True
        if key is not None and self.keys is None:
            self.keys = [None] * index
        if self.keys is not None:
            self.keys.append(key)
        if headers is not None and self.headers is None:
            self.headers = [None] * index
        if self.headers is not None:
            self.headers.append(headers)

    def add_records(
        self, values: Sequence[bytes | None], keys: Sequence[bytes | None] | None, timestamp_us: int
    ) -> None:
        """Add records with one timestamp, none with headers."""
        index, count = len(self.values), len(values)
        self.timestamps_us.extend(repeat(timestamp_us, count))
        if keys is not None or self.is_mixed:
            self.is_mixed = True
            if keys is not None and self.keys is None:
                self.keys = [None] * index
            if self.keys is not None:
                self.keys.extend(keys if keys is not None else repeat(None, count))
            if self.headers is not None:
                self.headers.extend(repeat(None, count))
        self.values.extend(values)  # last, as in `Producer.send`

    def ask(self, first: int, records: int = 1) -> None:
        """Whoever sent these records learns their outcome. By any thread; twice is as once."""
        if not self.done or self.error is not None:
            self.asked[first] = records

    def waited(self, now: float) -> float:
        """Seconds since it was begun."""
        return now - self.deadline + self.queue.delivery_timeout_ms / 1000

    @property
    def is_observed(self) -> bool:
        """Whether whoever sent its records learns the outcome, of each of them. Once it is closed."""
        return 0 < self.count <= sum(self.asked.copy().values())

    def add_rows(self, columns: Columns, size: int) -> None:
        """Add rows of a table after those of others, if there are any, of `size` bytes."""
        if self.columns is None:
            self.columns = []
        self.size += size
        self.columns.append(columns)
        self.count += columns.batch.num_rows

    def count_rows(self) -> None:
        """Count the rows of its tables, if it has any, again: an interrupt may have left some that are not counted."""
        if self.columns is not None:
            self.count = sum(each.batch.num_rows for each in self.columns)

    def add_callback(self, index: int, on_delivery: OnDelivery) -> None:
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append((index, on_delivery))

    def cut(self) -> None:
        """Remove the parts of an incomplete record: one whose value, which is added last, is missing."""
        count = len(self.values)
        for column in (self.timestamps_us, self.keys, self.headers):
            if column is not None:
                del column[count:]
        if self.callbacks is not None:
            self.callbacks = [each for each in self.callbacks if each[0] < count] or None

    def offset_of(self, index: int) -> int:
        """The offset of its record at an index; -1: it is not known, as with acks=0."""
        return self.base_offset + index if self.base_offset >= 0 else -1

    def metadata(self, index: int) -> RecordMetadata:
        """The place in the log of its record at an index."""
        return RecordMetadata(*self.queue.topic_partition, self.offset_of(index), self.timestamps_us[index])


Failed = list[tuple[Batch, KafkalogError]]
"""Batches that are out of the queue for good, and why."""


class PartitionQueue:
    """The batches of one partition, in order. Not thread-safe: the producer's lock guards it.

    Args:
        topic_partition: names it.
        topic_id: of the topic the batches are for.
        idempotent: whether batches get sequence numbers; `identity` is then to be set before `take`.
        window: batches that may be unacknowledged at once.
        delivery_timeout_ms: from a batch's beginning to its deadline.
        backoff: its own; of the pauses before batches are sent again.
        accumulator: bounds the memory of this queue's batches; `delivery.py` finds it here.

    Attributes:
        identity: set by the sender when `needs_identity` is true, with another producer id than `used_up`.
        in_flight: batches whose answer is awaited.
        failing_since: the time of the first failure since the last ack; None if there was none. The leader may have
            changed.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        topic_id: bytes,
        *,
        idempotent: bool,
        window: int,
        delivery_timeout_ms: int,
        backoff: Backoff,
        accumulator: Accumulator | None = None,
    ) -> None:
        self.accumulator = accumulator
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.leader = -1
        self.open: Batch | None = None
        self.ready: deque[Batch] = deque()
        self.unacked: deque[Batch] = deque()
        self.in_flight = 0
        self.identity: Identity | None = None
        self.last_failure: KafkalogError | None = None
        self.failing_since: float | None = None
        self._idempotent = idempotent
        self._window = window
        self.delivery_timeout_ms = delivery_timeout_ms
        self._backoff = backoff
        self._retry_at = 0.0
        self._next_sequence = 0
        self._broken = False
        self.used_up: int | None = None

    # --- filling

    def start_batch(self, linger_until: float, deadline: float) -> Batch:
        """Open an empty batch, and close the open one."""
        self.close_batch()
        self.open = Batch(self, linger_until, deadline)
        return self.open

    def close_batch(self) -> None:
        """Let the open batch, if there is one, be sent."""
        batch = self.open
        if batch is not None:
            if batch.columns is None:
                batch.count = len(batch.values)
            self.open = None  # nothing can interrupt between this and the next
            self.ready.append(batch)

    def cut_open_batch(self) -> bool:
        """Remove the parts of an incomplete record from the open batch; returns whether no record is left."""
        if self.open is None or self.open.columns is not None:
            return False
        self.open.cut()
        return not self.open.values

    def drop_open_batch(self) -> Batch:
        """Close the open batch, which has no record, and forget it."""
        assert self.open is not None and not self.open.values
        batch, self.open = self.open, None
        return batch

    def unsent_batches(self) -> list[Batch]:
        """The batches that were never sent: those that are ready, and the open one."""
        return [*self.ready, *([self.open] if self.open is not None else [])]

    def put(self, batch: Batch) -> None:
        """Add a batch of a table's rows after all others; it stays open until its `linger_until`, if it has one."""
        self.close_batch()
        if batch.linger_until:
            self.open = batch
        else:
            self.ready.append(batch)

    def last_of_tables(
        self, columns: Columns, size: int, rows_max: int, bytes_max: int, deadline: float
    ) -> Batch | None:
        """The last batch, if rows of a table can be added to it: it has rows of the same columns, and room for these,
        and was not sent yet. Small pieces become large batches so, if they come faster than they are sent: a table of
        10,000 rows has 10 for each of a thousand partitions, and a batch costs as much as some hundred rows.

        Args:
            deadline: of the rows; the batch's may be a little earlier.
        """
        last = self.open
        if last is None:
            if not self.ready:
                return None
            last = self.ready[-1]
        rows = last.count + columns.batch.num_rows
        if (
            last.columns is None
            or last.columns[0].attributes | HAS_TIMES != columns.attributes | HAS_TIMES
            or rows > rows_max
            or last.size + size + _TIMESTAMP_BYTES * rows + _BITMAPS * (rows // 8 + 8) > bytes_max
            or deadline > last.deadline + _DEADLINES_APART_SECONDS
        ):
            return None
        return last

    # --- sending

    @property
    def first_deadline(self) -> float:
        """That of the batch which waits longest; infinite without one."""
        first = next(itertools.chain(self.unacked, self.ready), self.open)
        return math.inf if first is None else first.deadline

    @property
    def is_idle(self) -> bool:
        return not (self.open or self.ready or self.unacked)

    @property
    def needs_identity(self) -> bool:
        return self._idempotent and self.identity is None and bool(self.ready or self.unacked)

    def is_held(self, now: float) -> bool:
        """Whether the queue pauses after a failure."""
        return now < self._retry_at

    def can_send(self, now: float) -> bool:
        """Whether `take` would return any batch."""
        if now < self._retry_at:
            return False
        if len(self.unacked) > self.in_flight:
            return not self.in_flight
        return bool(self.ready) and self.in_flight < self._window and not self._broken

    def wake_at(self) -> float | None:
        """The next time at which a linger, a pause or a deadline ends; None if no batch waits for one."""
        times = []
        if self.open is not None:
            times.append(self.open.linger_until)
        waiting = len(self.unacked) > self.in_flight
        if waiting or self.ready:
            if not self.in_flight:
                times.append(self._retry_at)
            held = (batch for batch in self.unacked if not batch.is_in_flight)
            first = next(held, None) if waiting else self.ready[0]
            assert first is not None
            times.append(first.deadline)
        return min(times, default=None)

    def take(self, now: float, bytes_max: int) -> list[Batch]:
        """The batches to send now, in order, at least one if `can_send`; they are in flight from here on."""
        if not self.can_send(now):
            return []
        again = len(self.unacked) > self.in_flight
        taken: list[Batch] = []
        source = iter(list(self.unacked)) if again else iter(())
        size = 0
        while self.in_flight < self._window:
            if again:
                batch = next(source, None)
                if batch is None:
                    break
            elif self.ready:
                batch = self.ready[0]
            else:
                break
            if taken and size + batch.size > bytes_max:
                break
            if not again:
                self.ready.popleft()
                self.unacked.append(batch)
            if self._idempotent and batch.identity is None:
                assert self.identity is not None
                batch.identity, batch.sequence = self.identity, self._next_sequence
                self._next_sequence = (self._next_sequence + batch.count) % SEQUENCE_MODULUS
            batch.is_in_flight = True
            batch.sends += 1
            self.in_flight += 1
            size += batch.size
            taken.append(batch)
        return taken

    # --- answers

    def acked(self, batch: Batch) -> Failed:
        """The batch is in the log."""
        if not self._landed(batch):
            return []
        self.unacked.remove(batch)  # nearly always the first
        self._backoff.reset()
        self.failing_since = None
        return self._settled()

    def refused(self, batch: Batch, error: KafkalogError, now: float) -> Failed:
        """The broker answered a batch that was sent alone with an error."""
        if not self._landed(batch):
            return []
        self._failed_by(error, batch)
        if isinstance(error, OutOfOrderSequence):  # the only error which proves that it was not written before
            batch.maybe_written = False
        elif isinstance(error, _MAY_BE_WRITTEN):
            batch.maybe_written = True
        failed: Failed = []
        if error.retriable:
            if isinstance(error, OutOfOrderSequence) and self.unacked[0] is batch:
                self._broken = True  # no earlier batch is missing: the broker has lost the producer's state
            self._pause(now)
        else:
            self.unacked.remove(batch)
            self._broken = self._idempotent
            failed.append((batch, self._unknown() if batch.lost else error))  # it may have come through before
        return failed + self._settled()

    def refused_together(
        self, batches: Sequence[Batch], error: KafkalogError, now: float, *, maybe_written: bool = True
    ) -> Failed:
        """The broker answered batches with one error, which may concern any of them: each is sent again alone."""
        landed = [batch for batch in batches if self._landed(batch)]
        for batch in landed:
            batch.maybe_written = batch.maybe_written or maybe_written
        return self._to_be_sent_again(landed, error, now)

    def lost(self, batches: Sequence[Batch], error: KafkalogError, now: float) -> Failed:
        """The connection was lost before an answer: the batches may be in the log or not."""
        landed = [batch for batch in batches if self._landed(batch)]
        for batch in landed:
            batch.maybe_written = batch.lost = True
        return self._to_be_sent_again(landed, error, now)

    def unsent(self, batches: Sequence[Batch], error: KafkalogError, now: float) -> Failed:
        """The batches were not sent: no connection could be made."""
        return self._to_be_sent_again([batch for batch in batches if self._landed(batch)], error, now)

    def _to_be_sent_again(self, landed: list[Batch], error: KafkalogError, now: float) -> Failed:
        if not landed:
            return []
        self._failed_by(error, landed[0])
        self._pause(now)
        return self._settled()

    def _failed_by(self, error: KafkalogError, batch: Batch) -> None:
        """Record a batch's failure as the last one; not if it is only the gap that a failed batch left."""
        follows = self._broken or self.unacked[0] is not batch
        if not (isinstance(error, OutOfOrderSequence) and follows and self.last_failure is not None):
            self.last_failure = error

    def dropped(self, batch: Batch) -> None:
        """Done with a batch of which no answer is expected (acks=0)."""
        if self._landed(batch):
            self.unacked.remove(batch)

    def _landed(self, batch: Batch) -> bool:
        """Whether the batch was still awaited: an answer may also come for a batch that was given up (`clear`)."""
        if not batch.is_in_flight:
            return False
        batch.is_in_flight = False
        self.in_flight -= 1
        return True

    def _pause(self, now: float) -> None:
        changes = isinstance(self.last_failure, LEADER_CHANGES)
        self._retry_at = now + self._backoff.next(LOOK_SECONDS if changes else math.inf)
        if self.failing_since is None:
            self.failing_since = now

    def leader_changed(self) -> None:
        """Another leader, or another topic's, gets the batches: send at once, instead of after the pause."""
        self._retry_at = 0.0
        self._backoff.reset()

    def hold(self, error: KafkalogError, now: float) -> None:
        """A step before sending failed: pause as after a failed send."""
        self.last_failure = error
        self._pause(now)

    def _settled(self) -> Failed:
        """Once all batches are answered, close a gap in the sequence: a higher epoch, from 0."""
        if not self._broken or self.in_flight:
            return []
        self._broken = False
        failed: Failed = []
        for batch in [batch for batch in self.unacked if batch.lost or batch.maybe_written]:
            self.unacked.remove(batch)
            failed.append((batch, self._unknown()))
        self._renumber()
        return failed

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(partition=str(self.topic_partition), reason=str(self.last_failure))

    def _renumber(self) -> None:
        """Start a new epoch. After the last epoch another producer id is needed (`needs_identity`)."""
        if self.identity is not None:
            producer_id, epoch = self.identity
            if epoch < EPOCH_MAX:
                self.identity = Identity(producer_id, epoch + 1)
            else:
                self.identity, self.used_up = None, producer_id
        self._next_sequence = 0
        for batch in self.unacked:
            batch.identity = None

    def expired(self, now: float) -> Failed:
        """Remove the waiting batches that are past their deadline. Batches in flight are left to an answer or a lost
        connection."""
        failed: Failed = []
        for waiting in (self.unacked, self.ready):
            if not waiting or waiting[0].deadline > now:
                continue
            late = [batch for batch in waiting if not batch.is_in_flight and batch.deadline <= now]
            for batch in late:
                waiting.remove(batch)
                failed.append((batch, self._timed_out()))
                if batch.identity is not None:
                    self._broken = True
        return failed + self._settled() if failed else failed

    def _timed_out(self) -> DeliveryTimedOut:
        return DeliveryTimedOut(
            partition=str(self.topic_partition),
            timeout_ms=self.delivery_timeout_ms,
            reason=str(self.last_failure or "none, it waited for others"),
        )

    def retarget(self, topic_id: bytes) -> None:
        """Continue at once with a topic that was created again under the name. Batches sent to the old topic are lost
        with it, and are sent again. Does nothing while an answer is awaited."""
        if self.in_flight:
            return
        self.topic_id = topic_id
        for batch in self.unacked:
            batch.lost = batch.maybe_written = False
        self._renumber()  # a gap was closed when the last answer came
        self.leader_changed()

    def clear(self) -> list[Batch]:
        """Give up and return all batches that are left, also those in flight; their answers are then ignored.

        The queue may be used again. A batch that is given up leaves a gap in the sequence, or is in the log after all.
        """
        self.close_batch()
        left = [*self.unacked, *self.ready]
        for batch in left:
            batch.is_in_flight = False
        self.unacked.clear()
        self.ready.clear()
        self.in_flight = 0
        self._broken = self._broken or any(batch.identity is not None for batch in left)
        self._settled()
        return left
