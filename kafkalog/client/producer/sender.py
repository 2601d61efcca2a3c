"""One producer's sender to one broker: a thread that sends batches, and per connection one that reads the acks.

A frame carries the batches of one partition, or small ones of many that are sent for the first time; frames are
pipelined and answered in order, partition by partition. A failed connection is reported to the queues of all batches
that were in flight on it; they decide what is sent again (`queue.py`). Knows no `send`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import NamedTuple

from kafkalog.client.background import close_result, in_background
from kafkalog.client.cluster import LOOK_SECONDS, QUIET_LOOK_SECONDS, QUIET_SECONDS, Cluster
from kafkalog.client.complaints import Complaint
from kafkalog.client.link import Link
from kafkalog.client.producer.accumulator import Accumulator
from kafkalog.client.producer.encode import Body, encode_records
from kafkalog.client.producer.queue import Batch, Failed, Identity, PartitionQueue
from kafkalog.errors import (
    BrokerUnreachable,
    Closed,
    InternalError,
    KafkalogError,
    NotLeader,
    OutOfOrderSequence,
    OutOfThreads,
    ProtocolError,
    RequestTimedOut,
    RequestTooLarge,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import NO_PRODUCER, EncodedBatch, encode_batch
from kafkalog.format.columns import Columns, Headers, encode_columns, joined
from kafkalog.net.data import DataConnection
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire, frame_start

log = get_logger(__name__)

_PASS_BYTES = 4 << 20  # sent at once; then answers and lingering batches are handled
_FRAME_BYTES = 256 << 10  # of a frame with batches of several partitions
_FRAME_PARTITIONS = 500
_ELECTION_SECONDS = 30.0
"""So long a leader that fails is looked up again with short pauses, then with the longest between two tries."""
NO_IDENTITY = Identity(NO_PRODUCER, -1)


class Owner(NamedTuple):
    """What a sender needs of its producer.

    Attributes:
        identity: returns the producer's identity, a new one if the given id is used up. Lock not held; asks the
            cluster.
        take_in_topics: applies the cluster's metadata of the topics, and gives partitions to the senders of their
            leaders, if these have threads. Lock held; returns the batches whose partition is gone.
        topics: returns those that records were sent to. Lock held.
        has_work: makes the leader's sender check a queue at a time (monotonic), if it is not empty. Lock held. A sender
            calls this when it is done with batches of a queue. The queue may have another leader by then, and that
            leader's sender does not know that they are back in the queue, or that more may be in flight again.
    """

    identity: Callable[[int | None], Identity]
    take_in_topics: Callable[[], Failed]
    topics: Callable[[], list[str]]
    has_work: Callable[[PartitionQueue, float], None]


class _Contents(NamedTuple):
    """A batch's records when it was taken to be sent. It is encoded without the lock, and meanwhile another thread may
    give the batch up and empty it, because its topic was deleted."""

    values: list[bytes | None]
    timestamps_us: list[int]
    keys: list[bytes | None] | None
    headers: list[Headers | None] | None
    columns: list[Columns] | None
    body: Body | None


class _Request(NamedTuple):
    """An append to one partition that is not answered yet."""

    topic_id: bytes
    queue: PartitionQueue
    batches: list[Batch]
    contents: list[_Contents]


_Frame = list[_Request]
"""The requests of one frame."""


class _Framing:
    """A frame that is being filled.

    Attributes:
        lengths: bytes of each request's batches.
        body: all of these.
    """

    def __init__(self, bytes_max: int) -> None:
        self.requests: _Frame = []
        self.lengths: list[int] = []
        self.body: list[bytes | memoryview] = []
        self._left = bytes_max

    def has_room(self, request: _Request, length: int) -> bool:
        """Whether a request of so many bytes may be added. One that is sent again has a frame alone: its answer is to
        give its own outcome."""
        return not self.requests or (
            len(self.requests) < _FRAME_PARTITIONS
            and length <= self._left
            and request.batches[0].sends == self.requests[0].batches[0].sends == 1
        )

    def add(self, request: _Request, encoded: list[EncodedBatch], length: int) -> None:
        for each in encoded:
            self.body.append(each.header)
            self.body.append(each.body)
            if each.padding:
                self.body.append(each.padding)
        self.requests.append(request)
        self.lengths.append(length)
        self._left -= length


class Sender:
    """Sends to one broker. That of broker -1 has the partitions without a leader; it never gets a connection.

    Args:
        acks: 0 or 1 (-1 for all), as in the requests.
    """

    def __init__(
        self,
        broker_id: int,
        cluster: Cluster,
        accumulator: Accumulator,
        owner: Owner,
        *,
        acks: int,
        codec: int,
        request_bytes: int,
    ) -> None:
        self.broker_id = broker_id
        self._cluster = cluster
        self._accumulator = accumulator
        self._owner = owner
        self._acks = acks
        self._codec = codec
        self._request_bytes = request_bytes
        # A frame that is refused is answered, but under acks=0 by the end of the connection: there it is a partition's.
        self._frame_bytes = min(_FRAME_BYTES, request_bytes) if acks else 0
        self._request_timeout = cluster.settings.request_timeout_ms / 1000
        # The sending thread's own, reused: building a header anew for each request takes 3 us, setting its fields 0.8.
        self._header = pb.RequestHeader()
        self._header.append.acks = acks
        self._header.append.timeout_ms = cluster.settings.request_timeout_ms
        self._work = threading.Condition(accumulator.lock)  # type: ignore[arg-type]
        # All below: guarded by the accumulator's lock.
        self._active: dict[PartitionQueue, None] = {}
        self._link: Link[_Frame] | None = None
        self._sleeps_until: float | None = None
        self._sleeps = False
        self._stopping = False
        self._stale = False  # the metadata may be out of date
        self._refreshed_at = -math.inf
        self._quiet_since = 0.0  # when it last answered, or had nothing to answer
        self._refresh_at = time.monotonic() + cluster.settings.metadata_max_age_ms / 1000
        self._complaint = Complaint(log, "records_held_up")
        self._readers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name=f"producer-{broker_id}", daemon=True)

    # --- what the producer calls, lock held

    def start(self) -> None:
        """Start its thread, unless it was started. Raises OutOfThreads; a later call may succeed."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:
                raise OutOfThreads(process="this process", reason=str(error)) from None

    def has_work(self, queue: PartitionQueue, at: float) -> None:
        """Check a queue for batches to send at a time (monotonic)."""
        self._active[queue] = None
        if self._sleeps and (self._sleeps_until is None or at < self._sleeps_until):
            self._work.notify()
            self._sleeps = False  # afterwards: an interrupt in between would leave it asleep for good

    def drop(self, queue: PartitionQueue) -> None:
        """Forget a queue that has another leader now."""
        self._active.pop(queue, None)

    def stop(self) -> None:
        self._stopping = True
        self._work.notify()
        if self._link is not None:
            self._link.connection.shut_down()

    # --- lock not held

    def join(self, timeout: float | None = None) -> None:
        """Wait until its threads have ended, for `timeout` seconds at most."""
        end = None if timeout is None else time.monotonic() + timeout
        if self._thread.ident is not None:
            self._thread.join(timeout)
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))

    def abandon(self) -> None:
        """In a forked child: leave the parent's connection alone."""
        if self._link is not None:
            self._link.connection.abandon()
        self._link = None

    # --- the sending thread

    def _run(self) -> None:
        self._accumulator.own_threads.add(threading.get_ident())
        try:
            while self._passed():
                pass
        finally:
            self._accumulator.own_threads.discard(threading.get_ident())  # a later thread may get the same

    def _passed(self) -> bool:
        """Make one pass; returns whether there is a next one."""
        try:
            return self._send_due()
        except Exception as error:  # a defect of ours: raised to the callers that wait, and logged
            log.exception("producer_sender_failed", broker_id=self.broker_id)
            self._fail_everything(InternalError.of(error))
            return True

    def _send_due(self) -> bool:
        """Wait for work and do it; returns whether there is a next pass."""
        with self._accumulator.lock:
            if self._stopping:  # checked before taking batches, whose outcome would be lost
                return False
            now = time.monotonic()
            requests, called, wake_at, in_need = self._collect(now)
            look_at = self._look_at(now)
            stale = bool(self._active) and (self._stale or now >= self._refresh_at or now >= look_at)
            wake_at = min(wake_at, look_at) if wake_at is not None else None if look_at == math.inf else look_at
            if not (requests or called or in_need or stale):
                self._sleep(wake_at, now)
                return True
        self._accumulator.call_back(called)
        if stale:
            self._refresh()
        if in_need:
            self._give_identities(in_need)
        if requests:
            self._send(requests)
        return True

    def _sleep(self, wake_at: float | None, now: float) -> None:
        self._sleeps_until, self._sleeps = wake_at, True
        self._work.wait(None if wake_at is None else min(max(0.0, wake_at - now), threading.TIMEOUT_MAX))
        self._sleeps = False

    def _collect(self, now: float) -> tuple[list[_Request], list[Batch], float | None, list[PartitionQueue]]:
        """Lock held: the requests to send, the batches with callbacks to run, the time to check again, and the queues
        that need a producer id."""
        requests: list[_Request] = []
        failed: Failed = []
        in_need: list[PartitionQueue] = []
        wake_at: float | None = None
        size = 0
        link = self._link
        if link is not None and link.count:
            wake_at = link.deadline
            if wake_at <= now:
                failed += self._give_up(link)
                wake_at = None
        for queue in list(self._active):
            if queue.open is not None and queue.open.linger_until <= now:
                self._accumulator.close_batch(queue)
            failed += queue.expired(now)
            if queue.needs_identity:
                if not queue.is_held(now):
                    in_need.append(queue)
            else:
                while size < _PASS_BYTES and (batches := queue.take(now, self._request_bytes)):
                    size += sum(batch.size for batch in batches)
                    requests += _requests(queue, batches)
                if size >= _PASS_BYTES:
                    self._active[queue] = self._active.pop(queue)  # to the end: the others come first next time
                    break
            if queue.is_idle:
                del self._active[queue]
            else:
                at = queue.wake_at()
                if at is not None and (wake_at is None or at < wake_at):
                    wake_at = at
        return requests, self._accumulator.finish(failed), wake_at, in_need

    def _look_at(self, now: float) -> float:
        """Lock held: when to look up whether partitions have another leader, beside the look after each failure.
        Infinite while nothing fails, or nobody waits for what is unanswered: its topic was deleted."""
        if not self._active:
            return math.inf
        longest = self._cluster.settings.retry_backoff_max_ms / 1000
        pause = math.inf
        for queue in self._active:
            if queue.failing_since is not None and queue.is_held(now):
                is_recent = now - queue.failing_since < _ELECTION_SECONDS
                pause = min(pause, LOOK_SECONDS if is_recent else longest)
        if self._link is not None and self._link.count:
            if self._is_quiet():
                pause = min(pause, QUIET_LOOK_SECONDS)
            elif pause == math.inf:
                return self._quiet_since + QUIET_SECONDS
        return self._refreshed_at + pause

    def _refresh(self) -> None:
        """Refresh the metadata. A failure is not reported: the queues have their own failures and deadlines."""
        with self._accumulator.lock:
            self._stale = False
            self._refreshed_at = time.monotonic()
            self._refresh_at = time.monotonic() + self._cluster.settings.metadata_max_age_ms / 1000
            names = self._owner.topics()
        try:
            self._cluster.refresh(names, patient=False)
        except KafkalogError as error:
            log.debug("refresh_failed", broker_id=self.broker_id, reason=str(error))
        with self._accumulator.lock:
            failed = self._owner.take_in_topics()
            link = self._link
            if link is not None and self._is_quiet():
                lost: KafkalogError | None = self._cluster.loss_of(self.broker_id, link.connection)
                queues = (request.queue for request in link.in_flight[0])
                queue = next((queue for queue in queues if queue.leader != self.broker_id), None)
                if lost is None and queue is not None:
                    lost = NotLeader(broker_id=self.broker_id, partition=str(queue.topic_partition))
                if lost is not None:
                    failed += self._lose(link, lost)
            called = self._accumulator.finish(failed)
        self._accumulator.call_back(called)

    def _is_quiet(self) -> bool:
        """Lock held: whether the broker owes an answer, and has sent none for a while."""
        link = self._link
        return link is not None and link.count > 0 and time.monotonic() - self._quiet_since >= QUIET_SECONDS

    def _give_identities(self, queues: list[PartitionQueue]) -> None:
        for queue in queues:
            try:
                identity = self._owner.identity(queue.used_up)
            except KafkalogError as error:
                with self._accumulator.lock:
                    queue.hold(error, time.monotonic())
                    for batch in queue.unsent_batches()[:1]:
                        self._held_up(error, batch)
                continue
            with self._accumulator.lock:
                queue.identity = identity

    def _send(self, requests: list[_Request]) -> None:
        try:
            link = self._connected(requests)
        except KafkalogError as error:
            self._not_sent(requests, error)
            return
        framed, pieces = self._encode_requests(link, requests)
        if not framed:
            return
        requests = [request for _, frame in framed for request in frame]
        if self._acks:
            with self._accumulator.lock:
                if self._link is not link:
                    lost: KafkalogError | None = BrokerUnreachable(
                        address=link.connection.address, reason="it closed the connection"
                    )
                else:
                    lost = None
                    now = time.monotonic()
                    due = now + self._request_timeout
                    if not link.count:
                        self._quiet_since = now
                    for correlation_id, frame in framed:
                        last = min(max(batch.deadline for batch in request.batches) for request in frame)
                        link.began(correlation_id, frame, min(due, last))
            if lost is not None:
                self._not_sent(requests, lost)
                return
        try:
            link.connection.send(pieces)
        except KafkalogError as error:
            self._link_lost(link, error)
            if not self._acks:
                self._finish_unanswered(requests, error)
            return
        if not self._acks:
            self._finish_unanswered(requests, None)

    def _connected(self, requests: list[_Request]) -> Link[_Frame]:
        link = self._link
        if link is not None:
            return link
        connection = self._new_connection(requests)
        link = Link(connection)
        reader = threading.Thread(target=self._read, args=(link,), name=f"producer-{self.broker_id}-acks", daemon=True)
        with self._accumulator.lock:
            try:
                reader.start()
            except RuntimeError as error:  # nothing was sent: temporary, like an overloaded broker
                connection.close()
                raise OutOfThreads(process="this process", reason=str(error)) from None
            self._link = link
            self._readers = [thread for thread in self._readers if thread.is_alive()]
            self._readers.append(reader)
            if self._stopping:
                connection.shut_down()
        return link

    def _new_connection(self, requests: list[_Request]) -> DataConnection:
        """Connect, to send these requests. A broker that is suspended accepts and does not greet, and the leader may
        change long before connect.timeout.ms is over: so it is looked up meanwhile.

        Raises:
            NotLeader: the broker does not lead one of the partitions any more.
            Closed: the sender is stopped.
            BrokerUnreachable, ProtocolError.
        """
        connect = partial(self._cluster.connect_data, self.broker_id)
        connecting = in_background(connect, here_if_need_be=True)
        while not wait([connecting], QUIET_LOOK_SECONDS).done:
            self._refresh()
            with self._accumulator.lock:
                moved = [request.queue for request in requests if request.queue.leader != self.broker_id]
                stopping = self._stopping
            if moved or stopping:
                connecting.add_done_callback(close_result)
                if stopping:
                    raise Closed(what="producer")
                raise NotLeader(broker_id=self.broker_id, partition=str(moved[0].topic_partition))
        return connecting.result()

    def _encode_requests(
        self, link: Link[_Frame], requests: list[_Request]
    ) -> tuple[list[tuple[int, _Frame]], list[bytes | memoryview]]:
        """The requests in frames with their correlation ids, and the bytes of these. A batch that cannot be encoded
        fails, and the batches after it in its partition wait."""
        framed: list[tuple[int, _Frame]] = []
        pieces: list[bytes | memoryview] = []
        frame = _Framing(self._frame_bytes)
        held: dict[PartitionQueue, list[Batch]] = {}
        failed: list[tuple[Batch, KafkalogError]] = []
        for request in requests:
            if request.queue in held:
                held[request.queue] += request.batches
                continue
            encoded: list[EncodedBatch] = []
            for batch, contents in zip(request.batches, request.contents, strict=True):
                try:
                    encoded.append(self._encode_batch(batch, contents))
                except Exception as error:  # a defect of ours: it must not fail other batches
                    log.exception("batch_not_encoded", partition=str(request.queue.topic_partition))
                    failed.append((batch, InternalError.of(error)))
                    held[request.queue] = [each for each in request.batches if each is not batch]
                    break
            else:
                length = sum(each.length for each in encoded)
                if not frame.has_room(request, length):
                    framed.append(self._end_frame(link, frame, pieces))
                    frame = _Framing(self._frame_bytes)
                frame.add(request, encoded, length)
        if frame.requests:
            framed.append(self._end_frame(link, frame, pieces))
        if failed:
            self._not_encoded(failed, held)
        return framed, pieces

    def _encode_batch(self, batch: Batch, contents: _Contents) -> EncodedBatch:
        body = contents.body
        if body is None:
            body = self._encode_body(batch, contents)
            if not batch.done:
                batch.body = body
        producer_id, epoch = batch.identity or NO_IDENTITY
        return encode_batch(
            memoryview(body.data),
            codec=self._codec,
            attributes=body.attributes,
            record_count=body.record_count,
            min_timestamp_us=body.min_timestamp_us,
            max_timestamp_us=body.max_timestamp_us,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=batch.sequence if batch.identity is not None else -1,
        )

    def _encode_body(self, batch: Batch, contents: _Contents) -> Body:
        if contents.columns is not None:
            columns = joined(contents.columns)
            data = encode_columns(columns.batch, self._codec)
            return Body(data, columns.attributes, batch.count, columns.min_timestamp_us, columns.max_timestamp_us)
        return encode_records(contents.values, contents.timestamps_us, contents.keys, contents.headers, self._codec)

    def _end_frame(self, link: Link[_Frame], frame: _Framing, pieces: list[bytes | memoryview]) -> tuple[int, _Frame]:
        """Add a frame to `pieces`. Returns its correlation id, and its requests."""
        header, parts = self._header, self._header.append.partitions
        del parts[len(frame.requests) :]
        while len(parts) < len(frame.requests):
            parts.add()
        header.correlation_id = correlation_id = link.next_id()
        for part, request, length in zip(parts, frame.requests, frame.lengths, strict=True):
            part.topic_id = request.topic_id
            part.partition = request.queue.topic_partition.partition
            part.length = length
        pieces.append(frame_start(header.SerializeToString(), sum(frame.lengths)))
        pieces += frame.body
        return correlation_id, frame.requests

    # --- outcomes

    def _finish_unanswered(self, requests: list[_Request], error: KafkalogError | None) -> None:
        """acks=0: the batches are done once written to the socket, and never sent again: part may have arrived."""
        outcomes: list[tuple[Batch, KafkalogError | None]] = []
        with self._accumulator.lock:
            now = time.monotonic()
            for request in requests:
                for batch in request.batches:
                    request.queue.dropped(batch)
                    outcomes.append((batch, error))
                self._owner.has_work(request.queue, now)
            called = self._accumulator.finish(outcomes)
        self._accumulator.call_back(called)

    def _not_sent(self, requests: list[_Request], error: KafkalogError) -> None:
        failed: Failed = []
        with self._accumulator.lock:
            now = time.monotonic()
            self._stale = True
            for queue, batches in _by_queue(requests).items():
                failed += queue.unsent(batches, error, now)
                self._owner.has_work(queue, now)
            self._held_up(error, requests[0].batches[0])
            called = self._accumulator.finish(failed)
        self._accumulator.call_back(called)

    def _not_encoded(self, refused: Failed, held: dict[PartitionQueue, list[Batch]]) -> None:
        """Batches could not be encoded; `held` has the other batches of their partitions that were taken with them."""
        failed: Failed = []
        with self._accumulator.lock:
            now = time.monotonic()
            for batch, error in refused:
                failed += batch.queue.refused(batch, error, now)
                failed += batch.queue.unsent(held[batch.queue], error, now)
                self._owner.has_work(batch.queue, now)
            called = self._accumulator.finish(failed)
        self._accumulator.call_back(called)

    def _give_up(self, link: Link[_Frame]) -> Failed:
        """Lock held: the oldest request is unanswered for too long."""
        timeout_ms = int(self._request_timeout * 1000)
        return self._lose(
            link, RequestTimedOut(what="an append", address=link.connection.address, timeout_ms=timeout_ms)
        )

    def _link_lost(self, link: Link[_Frame], error: KafkalogError) -> None:
        with self._accumulator.lock:
            called = self._accumulator.finish(self._lose(link, error))
        self._accumulator.call_back(called)

    def _lose(self, link: Link[_Frame], error: KafkalogError) -> Failed:
        """Lock held: a connection is lost; batches in flight on it may be in the log or not. The thread that reads from
        the connection closes it."""
        link.connection.shut_down()
        if self._link is not link:
            return []
        self._link = None
        self._stale = True
        lost = [request for frame in link.forget() for request in frame]
        failed: Failed = []
        now = time.monotonic()
        for queue, batches in _by_queue(lost).items():
            failed += queue.lost(batches, error, now)
            self._owner.has_work(queue, now)
        if not self._stopping:  # else we closed it
            log.info("broker_connection_lost", broker_id=self.broker_id, reason=str(error), requests=len(lost))
            if lost:
                self._held_up(error, lost[0].batches[0])
        return failed

    def _held_up(self, error: KafkalogError, batch: Batch) -> None:
        """Lock held: log that a batch, and perhaps others of this broker, will be sent again."""
        if not self._stopping:
            partition = str(batch.queue.topic_partition)
            self._complaint.failed(error, batch.deadline, broker_id=self.broker_id, partition=partition)

    def _fail_everything(self, error: KafkalogError) -> None:
        with self._accumulator.lock:
            failed = self._lose(self._link, error) if self._link is not None else []
            failed += [(batch, error) for queue in self._active for batch in queue.clear()]
            called = self._accumulator.finish(failed)
        self._accumulator.call_back(called)

    # --- the acks' thread

    def _read(self, link: Link[_Frame]) -> None:
        connection = link.connection
        self._accumulator.own_threads.add(threading.get_ident())
        try:
            while True:
                try:
                    replies = connection.receive_some()
                except RequestTimedOut:
                    if connection.has_buffered or self._is_owed(link):
                        raise
                    continue  # no request was in flight, or only since a moment
                with self._accumulator.lock:
                    called = self._take_replies(link, replies)
                self._accumulator.call_back(called)
        except KafkalogError as error:
            self._link_lost(link, error)
        except Exception as error:
            log.exception("producer_acks_failed", broker_id=self.broker_id)
            self._link_lost(link, InternalError.of(error))
        finally:
            connection.close()
            self._accumulator.own_threads.discard(threading.get_ident())

    def _is_owed(self, link: Link[_Frame]) -> bool:
        """Whether an answer is overdue. A silent connection has not failed while no request is overdue."""
        with self._accumulator.lock:
            return self._link is not link or link.deadline <= time.monotonic()

    def _take_replies(self, link: Link[_Frame], replies: list[pb.ReplyHeader]) -> list[Batch]:
        """Lock held: handle some answers, which come in the order of the requests."""
        if self._link is not link:
            return []
        outcomes: list[tuple[Batch, KafkalogError | None]] = []
        touched: dict[PartitionQueue, None] = {}
        now = self._quiet_since = time.monotonic()
        fault: KafkalogError | None = None
        for reply in replies:
            try:
                frame = link.request_of(reply)
                answers = _answers(frame, reply, link.connection.address)
            except KafkalogError as error:
                fault = error
                break
            link.answered()
            for request, answer in zip(frame, answers, strict=True):
                outcomes += self._take_answer(request, answer, len(frame) > 1, now)
                touched[request.queue] = None
        for queue in touched:
            self._owner.has_work(queue, now)
        if fault is not None:
            outcomes += self._lose(link, fault)
        return self._accumulator.finish(outcomes)

    def _take_answer(
        self, request: _Request, answer: pb.AppendedPartition | pb.Error, has_others: bool, now: float
    ) -> list[tuple[Batch, KafkalogError | None]]:
        """Lock held: the outcomes of a request; an error for its whole frame may be due to others (`has_others`)."""
        queue, batches = request.queue, request.batches
        outcomes: list[tuple[Batch, KafkalogError | None]] = []
        if isinstance(answer, pb.AppendedPartition) and not answer.HasField("error"):
            offset = answer.base_offset
            for batch in batches:
                batch.base_offset = offset
                offset += batch.count
                outcomes.append((batch, None))
                outcomes += queue.acked(batch)
            return outcomes
        is_of_frame = isinstance(answer, pb.Error)
        error = error_from_wire(answer if isinstance(answer, pb.Error) else answer.error)
        self._stale = self._stale or not isinstance(error, OutOfOrderSequence)
        if error.retriable:
            self._held_up(error, batches[0])
        if is_of_frame and has_others:
            if isinstance(error, RequestTooLarge):
                self._frame_bytes = 0  # the broker takes less than this client sends: no more frames that are shared
            outcomes += queue.refused_together(batches, error, now, maybe_written=error.retriable)
        elif len(batches) == 1:
            outcomes += queue.refused(batches[0], error, now)
        else:
            outcomes += queue.refused_together(batches, error, now)
        return outcomes


def _requests(queue: PartitionQueue, batches: list[Batch]) -> list[_Request]:
    """The requests for some batches. Batches that are sent for the first time share a request. A batch that is sent
    again gets a request of its own, so that the answer gives its own outcome. So does each batch without a sequence
    number, because the broker cannot recognize it."""
    together = batches[0].identity is not None and batches[0].sends == 1
    requests = []
    for group in [batches] if together else [[batch] for batch in batches]:
        contents = [
            _Contents(each.values, each.timestamps_us, each.keys, each.headers, each.columns, each.body)
            for each in group
        ]
        requests.append(_Request(queue.topic_id, queue, group, contents))
    return requests


def _answers(frame: _Frame, reply: pb.ReplyHeader, address: str) -> Sequence[pb.AppendedPartition | pb.Error]:
    """What a reply says of each request of a frame. Raises ProtocolError: it leaves some out."""
    if reply.HasField("error"):
        return [reply.error] * len(frame)
    answers = reply.append.partitions
    if len(answers) != len(frame):
        raise ProtocolError(
            address=address, reason=f"an append to {len(frame)} partitions was answered for {len(answers)}"
        )
    return answers


def _by_queue(requests: list[_Request]) -> dict[PartitionQueue, list[Batch]]:
    found: dict[PartitionQueue, list[Batch]] = {}
    for request in requests:
        found.setdefault(request.queue, []).extend(request.batches)
    return found
