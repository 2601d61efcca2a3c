"""A producer's unacknowledged records: the lock, the memory that they use, and the waits for room and for acks.

`send` fills the queues (`queue.py`), and the senders (`sender.py`) empty them; both hold `lock` meanwhile. Callbacks
run without it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kafkalog.client.producer.mutex import Mutex
from kafkalog.client.producer.queue import Batch, PartitionQueue
from kafkalog.errors import BufferExhausted, Closed, InvalidArgument, KafkalogError, RequestTimedOut
from kafkalog.events import get_logger

log = get_logger(__name__)

RECORD_COST = 100  # bytes of buffer.memory for a record's objects, beside its bytes
BATCH_COST = 1000  # and for a batch's
TABLE_COST = 2000  # and for those of a table's rows in a batch
_ROOM_SHARE = 0.75  # callers that wait for room are woken when no more is used: waking them for each ack costs too much
_FAILURES_KEPT = 1000
_USUAL_OF = 64  # batches, about, of which the wait is averaged


class Accumulator:
    """Unacknowledged records. `lock` guards it, all queues and all batches; each method says whether the caller must
    hold it.

    Args:
        memory: bytes, see buffer.memory.
        max_block_ms: longest wait for room.
        address: of the cluster, for errors.
        hurry: called with the lock held: sends a queue's open batch without lingering.
        repair: called with the lock held, when an operation under it was interrupted.

    Attributes:
        own_threads: the producer's, which may wait neither for room nor for acks.
        may_not_wait: other threads that may not wait for room: those of event loops.
        on_room: called once each, with the lock held, when there is room again, or the producer is closed.
        usual_wait: seconds from a batch's beginning to its ack, of the last ones.
    """

    def __init__(
        self,
        memory: int,
        max_block_ms: int,
        address: str,
        hurry: Callable[[PartitionQueue], None],
        repair: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.memory = memory
        self.buffered = 0
        self.closed: KafkalogError | None = None
        self.own_threads: set[int] = set()
        self.may_not_wait: set[int] = set()
        self.on_room: deque[Callable[[], object]] = deque()
        self.hurry = hurry
        self._address = address
        self._max_block_ms = max_block_ms
        self._unfinished: dict[Batch, None] = {}
        self.usual_wait = 0.0
        self._failures: list[Batch] = []
        self._unkept: KafkalogError | None = None  # the first failure for which there was no room
        self._untold: KafkalogError | None = None  # what a flush or a close has told nobody
        self._blocked = 0
        self._repair = repair
        self.renew_locks()

    def renew_locks(self) -> None:
        """At the start, and in a forked child: no thread is left there that could release them."""
        self.lock = Mutex(self._repair)
        self._room = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._delivered = threading.Condition(self.lock)  # type: ignore[arg-type]

    def started(self, batch: Batch) -> None:
        """Lock held: a batch is being filled."""
        self._unfinished[batch] = None

    def forget(self, batch: Batch) -> None:
        """Lock held: drop a batch that was started and got no record."""
        self._unfinished.pop(batch, None)

    def count_again(self) -> None:
        """Lock held: count the buffered bytes again, after a reservation that was not used."""
        self.buffered = sum(batch.charged for batch in self._unfinished)

    def close_batch(self, queue: PartitionQueue) -> None:
        """Lock held: let the open batch be sent, and return the part of its reservation that it did not use. Rows of
        tables reserve only what they use."""
        batch = queue.open
        if batch is not None:
            queue.close_batch()
            if batch.columns is not None:
                return
            unused = batch.charged - batch.size - BATCH_COST
            batch.charged -= unused
            self.buffered -= unused

    def wait_for_room(self, charge: int) -> None:
        """Lock held: wait until `charge` bytes fit, or nothing is buffered.

        Raises:
            BufferExhausted: they did not fit within max.block.ms; at once, if this thread may not wait.
            Closed: the producer was closed meanwhile.
        """
        me = threading.get_ident()
        limit_ms = 0 if me in self.own_threads or me in self.may_not_wait else self._max_block_ms
        started = time.monotonic()
        self._blocked += 1
        try:
            while self.buffered and self.buffered + charge > self.memory:
                left = started + limit_ms / 1000 - time.monotonic()
                if left <= 0:
                    raise BufferExhausted(limit=self.memory, waited_ms=limit_ms)
                self._room.wait(min(left, threading.TIMEOUT_MAX))
                if self.closed is not None:
                    raise Closed(what="producer")
        finally:
            self._blocked -= 1

    def finish(self, outcomes: Iterable[tuple[Batch, KafkalogError | None]]) -> list[Batch]:
        """Lock held: batches are acknowledged (their `base_offset` is set) or failed. Returns those with callbacks."""
        called = []
        awaited = False
        now = time.monotonic()
        for batch, error in outcomes:
            if batch.done:  # given up while its answer was on its way
                continue
            batch.error = error
            batch.done = True
            self.buffered -= batch.charged
            self._unfinished.pop(batch, None)
            awaited = awaited or batch.awaited
            if batch.callbacks is not None:
                called.append(batch)
            if error is not None:
                batch.timestamps_us = []  # only an ack has them in its metadata
                self._keep_failure(batch, error)
            else:
                self.usual_wait += (batch.waited(now) - self.usual_wait) / _USUAL_OF
                batch.asked.clear()
            batch.values, batch.keys, batch.headers, batch.columns, batch.body = [], None, None, None, None
        if awaited:
            self._delivered.notify_all()
        if (self._blocked or self.on_room) and self.buffered <= self.memory * _ROOM_SHARE:
            self._announce_room()
        return called

    def _keep_failure(self, batch: Batch, error: KafkalogError) -> None:
        """Lock held: keep a failed batch for the next flush, if some sender may not learn of it. Without room for more,
        the flush tells of it all the same."""
        for index, _ in batch.callbacks or ():
            if index >= 0:
                batch.ask(index)
        if batch.is_observed or self._unkept is not None or batch in self._failures:
            return
        if len(self._failures) >= _FAILURES_KEPT:
            self._failures = self.failures()
        if len(self._failures) < _FAILURES_KEPT:
            self._failures.append(batch)
        else:
            self._unkept = error

    def ask_no_more(self, batch: Batch, first: int) -> None:
        """Lock held: whoever asked for the outcome of some records has stopped waiting without it: a flush tells."""
        batch.asked.pop(first, None)
        if batch.error is not None:
            self._keep_failure(batch, batch.error)

    def _announce_room(self) -> None:
        """Lock held."""
        self._room.notify_all()
        while self.on_room:
            self.on_room.popleft()()

    def call_back(self, batches: Iterable[Batch]) -> None:
        """Lock not held: run the callbacks of finished batches. What ends a program (SystemExit) ends no thread of the
        producer's; in a caller's it is raised once all are called."""
        ending: BaseException | None = None
        for batch in batches:
            assert batch.callbacks is not None
            for index, on_delivery in batch.callbacks:
                # Who waits for the batch has no record in it, and rows of tables have no metadata.
                metadata = None if batch.error is not None or index < 0 else batch.metadata(index)
                try:
                    on_delivery(batch.error, metadata)
                except BaseException as error:
                    log.exception("on_delivery_failed", partition=str(batch.queue.topic_partition))
                    if not isinstance(error, Exception):
                        ending = error
            batch.callbacks = None
        if ending is not None and threading.get_ident() not in self.own_threads:
            raise ending

    def wait_done(self, batches: Iterable[Batch], timeout: float | None, what: str) -> None:
        """Lock held: wait until all are acknowledged or failed.

        Raises:
            RequestTimedOut: they were not within `timeout` seconds.
            InvalidArgument: called from a callback, which would wait for itself.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for batch in batches:
            while not batch.done:
                if threading.get_ident() in self.own_threads:
                    raise InvalidArgument(
                        reason=f"{what} cannot be waited for in on_delivery, because that thread receives the acks"
                    )
                batch.awaited = True
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    assert timeout is not None
                    raise RequestTimedOut(what=what, address=self._address, timeout_ms=int(timeout * 1000))
                self._delivered.wait(None if left is None else min(left, threading.TIMEOUT_MAX))

    def unfinished(self) -> list[Batch]:
        """Lock held: the unacknowledged batches, the latest first: when that one is acknowledged, most others are."""
        return list(reversed(self._unfinished))

    def failures(self) -> list[Batch]:
        """Lock held: the failed batches of which a sender does not know, and no flush has told."""
        return [batch for batch in self._failures if not batch.is_observed]

    def take_failure(self, batches: Iterable[Batch]) -> KafkalogError | None:
        """Lock held: why the first of some batches failed that no callback got and no caller asked for. Their failures
        count as reported now; those of others, which another thread may have sent, do not. If there is none, but one
        was not kept, it is told."""
        told = {batch: batch.error for batch in batches if batch.error is not None and not batch.is_observed}
        self._failures = [batch for batch in self.failures() if batch not in told]
        if told:
            return next(iter(told.values()))
        left, self._unkept, self._untold = self._unkept or self._untold, None, None
        return left

    def tell_later(self, error: KafkalogError) -> None:
        """Lock held: a flush or a close has told of a failure, and nobody was there any more: the next one does."""
        if self._untold is None:
            self._untold = error

    def abandon(self, closed: Closed) -> None:
        """In a forked child: all that is not acknowledged is the parent's, which goes on sending it."""
        self.renew_locks()
        self.closed = closed
        for batch in self.unfinished():
            batch.done, batch.error, batch.callbacks = True, closed, None
        self._unfinished.clear()
        self._failures, self._unkept, self._untold = [], None, None
        self.on_room.clear()
        self.buffered = 0

    def close(self) -> None:
        """Lock held: accept no more records, and wake the callers that wait for room."""
        self.closed = Closed(what="producer")
        self._announce_room()
