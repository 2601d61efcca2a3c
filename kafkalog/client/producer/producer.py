"""Sending: records and tables to topics, asynchronously, in order for each partition.

`send` puts a record into its partition's open batch and returns a handle. A batch is closed when it is full or has
lingered; a sender for each broker (`sender.py`) sends it and receives the ack. The accumulator (`accumulator.py`) has
the unacknowledged batches and the waits, the queues (`queue.py`) the rules of retries.

`send` takes about 1 us a record, and creates no object except the handle.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import time_ns
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Self

from kafkalog.client import arguments
from kafkalog.client.cluster import Cluster, PartitionInfo, TopicInfo
from kafkalog.client.config import Partitioner, connection_settings, parse_producer
from kafkalog.client.producer import lists
from kafkalog.client.producer.accumulator import BATCH_COST, RECORD_COST, TABLE_COST, Accumulator
from kafkalog.client.producer.delivery import Delivery, ManyDelivery, Run
from kafkalog.client.producer.mutex import TOKEN, is_clients
from kafkalog.client.producer.partitioner import chosen_partition, partition_for_key, random_turn
from kafkalog.client.producer.queue import Batch, Failed, Identity, OnDelivery, PartitionQueue
from kafkalog.client.producer.sender import Owner, Sender
from kafkalog.errors import (
    Closed,
    InvalidArgument,
    KafkalogError,
    OutOfThreads,
    RecordTooLarge,
    RequestTimedOut,
    UnknownPartition,
    UnknownTopic,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import CODECS
from kafkalog.format.columns import Headers, copied
from kafkalog.net.forks import after_fork
from kafkalog.net.main_thread import Signal
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.client.producer.tables import Chunk

log = get_logger(__name__)

_ACKS = {"0": 0, "1": 1, "all": -1}
_RECORD_SIZE = 12 + RECORD_COST  # of a record beside its value: timestamp, offset of the value; and its objects
_FIELD_BYTES = 4  # of a key, or a header's key or value: its offset
_LONE_BYTES = 280  # of a batch of one record, beside the record
_LONE_KEY_BYTES = 80
_LONE_HEADERS_BYTES = 560
_BATCH_BYTES = 900  # of a batch of many, beside the records
_COMPRESSED_BYTES = 140  # more in a batch where nothing could be compressed: 8 a buffer
_TIMESTAMP_MAX = (1 << 63) - 1
_LINGERS_BELOW = 64 * 1024  # bytes of a table's rows for one partition: larger batches cost little beside their rows
_RESERVATION = 16 * 1024
_HELD_UP_SECONDS = 1.0
"""A partition is held up if its oldest batch waits for so long, beside what is usual: with a full buffer all wait."""
A_CLOSE = "a close"
"""What `RequestTimedOut` says is late, where close() waited for another thread's."""
_JOIN_SECONDS = 0.5  # for senders to end after the timeout of close()
_EXIT_SECONDS = 10.0  # to wait for acks when the interpreter ends


class _Route:
    """A topic's queues, `count` of them in use. Queue `in_turn` gets the records that may go to any partition.

    Once the topic `is_gone`, nothing may be put into its queues, because no sender has them any more.
    """

    __slots__ = ("batch_size_max", "count", "in_turn", "is_gone", "queues", "record_size_max", "topic")

    def __init__(self, topic: TopicInfo) -> None:
        self.topic = topic
        self.queues: list[PartitionQueue] = []
        self.in_turn: PartitionQueue
        self.count = 0
        self.is_gone = False
        self.batch_size_max = 0
        self.record_size_max = 0

    def next_turn(self) -> PartitionQueue:
        self.in_turn = self.queues[(self.in_turn.topic_partition.partition + 1) % self.count]
        return self.in_turn


class Producer:
    """Sends records to topics. Thread-safe; a context manager, which flushes and closes at its end.

    The producer of the paper's section 3, with the idempotence of KIP-98 and the delivery.timeout.ms of KIP-91.

    A producer that is never closed is flushed when the interpreter ends, for 10 seconds at most. If the process is
    killed, batches that linger are lost.

    Do not call it from a signal handler: set a flag there, and flush in the main program. If the handler interrupted a
    call of this producer, its own call raises ReentrantCall; buffered records stay buffered. (If a SystemExit raised
    there interrupts close(), close() gives up all records that are not acknowledged.)

    With acks=all (the default) a record is acknowledged once every in-sync replica has it, and survives the loss of all
    but one of them; with acks=1 once the leader has it. With acks=0 a record counts as delivered when it is written to
    the socket, and may be lost without an error. With enable.idempotence (the default, except with acks=0) a retry
    neither doubles nor reorders the records of a partition, also if another broker leads it meanwhile.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        partitioner: (key or None, number of partitions) -> partition, for records that name none. None: by CRC-32C of
            the key; records without a key fill one batch of a partition, then of the next (as KIP-480), from a
            random partition on.
        **settings: of `ProducerSettings` (`linger_ms=5`).

    Raises:
        UnknownSetting, InvalidSetting: of the settings.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] | Cluster,
        *,
        partitioner: Partitioner | None = None,
        **settings: Any,
    ) -> None:
        values = parse_producer(settings)
        if partitioner is not None and not callable(partitioner):
            raise InvalidArgument(reason=f"partitioner is {partitioner!r}, not a function of (key, partitions)")
        self._partitioner = partitioner
        self._settings = values
        self._acks = _ACKS[values.acks]
        self._codec = CODECS[values.compression_type]
        self._linger = values.linger_ms / 1000
        self._delivery_timeout = values.delivery_timeout_ms / 1000
        self._last_index = values.batch_records - 1
        self._reservation = max(1024, min(_RESERVATION, values.buffer_memory // 16))
        self._owns_cluster = not isinstance(bootstrap_servers, Cluster)
        self._cluster = (
            bootstrap_servers
            if isinstance(bootstrap_servers, Cluster)
            else Cluster(bootstrap_servers, connection_settings(values))
        )
        self._accumulator = Accumulator(
            values.buffer_memory, values.max_block_ms, self._cluster.address, self._hurry, self._make_whole
        )
        self._lock = self._accumulator.lock  # guards routes and senders, and all that the accumulator's lock guards
        self._routes: dict[str, _Route] = {}
        self._senders: dict[int, Sender] = {}
        self._owner = Owner(self._identity_now, self._take_in_topics, self._topics_sent_to, self._has_work)
        self._is_stopped = False
        self._closing: _Closing | None = None
        self._identity: Identity | None = None
        self._identity_lock = threading.Lock()  # guards _identity while it is asked for
        after_fork(self, Producer._after_fork_in_child)
        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:  # sent records still get their time, but an error of close() would hide the block's own
            try:
                self.close()
            except KafkalogError:
                pass

    # --- sending

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_us: int | None = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Delivery:
        """Send a record. Blocks only for the first record to a topic, and while buffer.memory is full (max.block.ms).

        Name the arguments after the key. (They are not keyword-only because that makes each call 0.04 us cheaper.)

        Args:
            timestamp_us: microseconds since the epoch; now if None.
            headers: (name, bytes or None) pairs, or a mapping.
            on_delivery: called with (None, RecordMetadata) or (error, None), as by confluent-kafka, on a thread of the
                producer's, so it must not wait for deliveries itself.

        Raises:
            UnknownTopic, UnknownPartition, BrokerUnreachable, RecordTooLarge, InvalidArgument: of this record.
            OutOfThreads: no thread can be started now to send to a broker; the record was not taken.
            BufferExhausted: the memory stayed full for max.block.ms.
            Closed: the producer is closed.
            ReentrantCall: in a signal handler that interrupted a call of this producer.
        """
        try:
            route = self._routes[topic]
        except (KeyError, TypeError):  # a topic without a route yet; not a topic's name
            route = self._route(topic)
        size = _RECORD_SIZE
        if value is not None:
            if value.__class__ is not bytes:
                value = _as_bytes("value", value)
            size += len(value)
        pairs: Headers | None = None
        in_turn = is_plain = key is None and partition is None and headers is None and self._partitioner is None
        if not is_plain:
            if key is not None:
                if key.__class__ is not bytes:
                    key = _as_bytes("key", key)
                size += len(key) + _FIELD_BYTES
            if headers:
                pairs = _checked_headers(headers)
                size += sum(len(name.encode()) + len(data or b"") + 2 * _FIELD_BYTES for name, data in pairs)
            if partition is None:
                partition = self._partition_for(key, route)
                in_turn = partition is None
            elif partition.__class__ is not int or not 0 <= partition < route.count:
                route = self._route_with(topic, partition)
        if timestamp_us is None:
            timestamp_us = time_ns() // 1000
        else:
            _check_timestamp(timestamp_us)
        if on_delivery is not None and not callable(on_delivery):
            raise InvalidArgument(reason=f"on_delivery is {on_delivery!r}, not a function of (error, metadata)")
        delivery = Delivery()
        lock = self._lock
        tokens = lock.tokens
        try:
            try:  # the lock, in line: see mutex.py
                del tokens[0]
                lock.holder = delivery
            except IndexError:
                lock.wait_for(delivery)
            queue = route.in_turn if in_turn else route.queues[partition]  # type: ignore[index]
            batch = queue.open
            if batch is None or batch.size + size > batch.size_limit:
                if size > route.record_size_max:
                    self._check_lone_size(route, size, key is not None, pairs is not None)
                batch = self._batch_with_room(route, queue, in_turn, size)
            values = batch.values
            delivery._index = index = len(values)
            batch.size += size
            batch.timestamps_us.append(timestamp_us)
            if not is_plain or batch.is_mixed:
                batch.add_key_and_headers(index, key, pairs)
            if on_delivery is not None:
                batch.add_callback(index, on_delivery)
            delivery._batch = batch
            values.append(value)  # last: after an interrupt, a record without its value here does not count
            if index == self._last_index:
                self._hurry(batch.queue)
            lock.holder = None
            tokens += TOKEN
            if lock.waiting:
                lock.wake()
        except BaseException as error:
            try:
                if lock.holder is delivery:
                    self._make_whole(error)
            finally:
                if lock.holder is delivery:
                    lock.holder = None
                    tokens += TOKEN
                if lock.waiting:
                    lock.wake()
            raise
        return delivery

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | None],
        keys: Iterable[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamp_us: int | None = None,
    ) -> ManyDelivery:
        """Send records, in order for each partition, with one timestamp: the paper's MessageSet. They go into the same
        batches as those of `send`, at a fraction of its time for each.

        Args:
            keys: as many as values.
            partition: of all records; None: by the key; records without either take turns, about a batch at a time.
            timestamp_us: microseconds since the epoch, of all records; now if None.

        Raises:
            UnknownTopic, UnknownPartition, BrokerUnreachable, OutOfThreads, RecordTooLarge, InvalidArgument: nothing
                was sent.
            BufferExhausted: the memory stayed full for max.block.ms; the records before were taken.
            Closed, ReentrantCall: as `send`.
        """
        route = self._routes.get(arguments.text("topic", topic)) or self._route(topic)
        if partition is not None and (partition.__class__ is not int or not 0 <= partition < route.count):
            route = self._route_with(topic, partition)
        if timestamp_us is None:
            timestamp_us = time_ns() // 1000
        else:
            _check_timestamp(timestamp_us)
        given = lists.checked("values", values, _as_bytes)
        given_keys = None if keys is None else lists.checked("keys", keys, _as_bytes)
        if given_keys is not None and len(given_keys) != len(given):
            raise InvalidArgument(reason=f"there are {len(given)} values and {len(given_keys)} keys")
        if not given:
            return ManyDelivery([])
        if _size(given, given_keys) > route.record_size_max:  # nearly never
            for index, value in enumerate(given):
                key = None if given_keys is None else given_keys[index]
                if (size := _size([value], None if key is None else [key])) > route.record_size_max:
                    self._check_lone_size(route, size, key is not None, has_headers=False)
        if partition is None:
            found = lists.by_partition(given, given_keys, route.count, self._partitioner)
        else:
            found = [lists.Records(partition, given, given_keys)]
        return ManyDelivery(self._lock.run(self._put_lists, route, found, timestamp_us))

    def _put_lists(self, route: _Route, found: Iterable[lists.Records], timestamp_us: int) -> list[Run]:
        """Lock held: put lists of records into batches, waiting for room."""
        runs = []
        for partition, values, keys in found:
            start = 0
            while start < len(values):
                queue = route.in_turn if partition is None else route.queues[partition]
                batch = queue.open
                if batch is not None and batch.columns is not None:
                    batch = None  # rows of a table take no records
                end = min(len(values), start + self._records_left(batch))
                size = _size(values[start:end], keys and keys[start:end])
                room = route.batch_size_max - (0 if batch is None else batch.size)
                if size > room and (end - start) * room < size:  # not one of them, about, fits into the open batch
                    room = route.batch_size_max
                while size > room and end > start + 1:
                    end = start + max(1, (end - start) * room // size)
                    size = _size(values[start:end], keys and keys[start:end])
                if batch is None or batch.size + size > batch.size_limit:
                    batch = self._batch_with_room(route, queue, partition is None, size)
                    if end > start + (left := self._records_left(batch)):  # another batch than before
                        end = start + left
                        size = _size(values[start:end], keys and keys[start:end])
                index = len(batch.values)
                batch.size += size
                batch.add_records(values[start:end], keys and keys[start:end], timestamp_us)
                runs.append(Run(batch, index, end - start))
                if not self._records_left(batch):
                    self._hurry(batch.queue)
                start = end
        return runs

    def _records_left(self, batch: Batch | None) -> int:
        """How many records a batch has room for."""
        return self._last_index + 1 - (0 if batch is None else len(batch.values))

    def send_arrow(self, topic: str, table: pa.Table | pa.RecordBatch, *, partition: int | None = None) -> ManyDelivery:
        """Send a table's rows, in order for each partition. No step works row by row. Rows of less than 64 KiB for a
        partition linger as records do (linger.ms), so that those of the next tables join them.

        Args:
            table: its columns by name: `value`, and if wanted `key`, `headers`, `timestamp`, `partition`
                (`client/producer/tables.py` has their types).
            partition: of all rows; None: by the column `partition`, then by the key; rows without either take turns.

        Raises:
            UnknownTopic, UnknownPartition, BrokerUnreachable, OutOfThreads, RecordTooLarge, InvalidArgument: nothing
                was sent.
            BufferExhausted: the memory stayed full for max.block.ms; the rows before were taken.
            Closed: the producer is closed.
            ReentrantCall: in a signal handler that interrupted a call of this producer.
        """
        from kafkalog.client.producer import tables

        route = self._routes.get(arguments.text("topic", topic)) or self._route(topic)
        if partition is not None and (partition.__class__ is not int or not 0 <= partition < route.count):
            route = self._route_with(topic, partition)
        chunks = [
            chunk
            for batch in tables.record_batches(table)
            for chunk in tables.chunks(
                batch,
                topic=topic,
                partitions=route.count,
                partition=partition,
                partitioner=self._partitioner,
                next_turn=partial(self._next_turn, route),
                now_us=time_ns() // 1000,
                rows_max=self._settings.batch_records,
                bytes_max=self._settings.batch_size,
                message_bytes_max=route.topic.max_message_bytes,
            )
        ]
        return ManyDelivery(self._lock.run(self._put_tables, route, chunks))

    def _put_tables(self, route: _Route, chunks: Iterable[Chunk]) -> list[Run]:
        """Lock held: put chunks of tables into their queues, waiting for room."""
        runs = []
        rows_max, bytes_max = self._settings.batch_records, min(self._settings.batch_size, route.batch_size_max)
        lingers_below = min(_LINGERS_BELOW, bytes_max)
        for chunk in chunks:
            columns, size = chunk.columns, chunk.size
            charge = size + TABLE_COST
            self._check_usable(route)
            while self._reserve(charge):
                self._check_usable(route)
            queue = route.queues[chunk.partition]
            deadline = time.monotonic() + self._delivery_timeout
            waiting = deadline - queue.first_deadline
            is_held_up = (
                queue.failing_since is not None or waiting > _HELD_UP_SECONDS + 2 * self._accumulator.usual_wait
            )
            if is_held_up and 2 * size < columns.batch.get_total_buffer_size():
                columns = copied(columns)  # else these few rows keep the memory of their table, whose others are sent
            batch = queue.last_of_tables(columns, size, rows_max, bytes_max, deadline)
            if batch is not None:
                index = batch.count
                batch.charged += charge
                batch.add_rows(columns, size)
                if queue.open is batch and (batch.size >= lingers_below or batch.count >= rows_max):
                    self._hurry(queue)
            else:
                index = 0
                lingers = self._linger > 0 and size < lingers_below and columns.batch.num_rows < rows_max
                batch = Batch(queue, time.monotonic() + self._linger if lingers else 0.0, deadline)
                batch.charged = charge
                batch.add_rows(columns, size)
                if queue.open is not None:
                    self._hurry(queue)  # the rows did not join it: it lingers no more
                queue.put(batch)
                self._accumulator.started(batch)
                self._has_work(queue, batch.linger_until)
            runs.append(Run(batch, index, columns.batch.num_rows))
        return runs

    def flush(self, timeout: float | None = None) -> None:
        """Send all open batches now, and wait until every record sent before is acknowledged or has failed.

        Raises:
            KafkalogError: the first failure, if there was one that no callback got and no caller learned by the
                record's handle. It is raised by each flush that waited for the record, or else by the next
                one of any thread: threads that share a producer know more by handles. Beyond a thousand failed batches
                it may be one that a caller has learned.
            RequestTimedOut: not within `timeout` seconds; None or negative: it waits for ever.
            ReentrantCall: in a signal handler that interrupted a call of this producer.
        """
        failure = self._lock.run(self._flush, arguments.seconds("timeout", timeout))
        if failure is not None:
            raise failure

    def _flush(self, timeout: float | None) -> KafkalogError | None:
        failed, unfinished = self._accumulator.failures(), self._accumulator.unfinished()
        if self._is_stopped and unfinished:  # given up; a close() that this call interrupted cannot report it
            raise Closed(what="producer")
        self._close_batches()
        self._accumulator.wait_done(unfinished, timeout, "a flush")
        return self._accumulator.take_failure([*failed, *reversed(unfinished)])

    def close(self, timeout: float | None = None) -> None:
        """Flush, then end threads and connections. Records not acknowledged within `timeout` seconds fail. If another
        thread is closing it, wait until it is closed.

        Raises:
            ReentrantCall: in a signal handler that interrupted a call of this producer, which stays open.
            KafkalogError: as from `flush`; the producer is closed all the same.
            RequestTimedOut: another thread had not closed it within `timeout` seconds.
        """
        if threading.get_ident() in self._accumulator.own_threads:
            raise InvalidArgument(reason="close() cannot be called in on_delivery, because it waits for that thread")
        timeout = arguments.seconds("timeout", timeout)
        end = None if timeout is None else time.monotonic() + timeout
        closing = _Closing()
        failure: KafkalogError | None = None
        try:
            self._lock.run(self._take_no_more, closing)
            if self._closing is closing:
                self.flush(timeout)
        except KafkalogError as error:
            failure = closing.failure = error
        finally:  # an interrupt, wherever it comes, leaves nothing open
            if self._closing is closing:
                try:
                    self._stop(None if end is None else max(0.0, end - time.monotonic()) + _JOIN_SECONDS, closing)
                finally:
                    closing.ended.set()
        if failure is not None:
            raise failure
        if self._closing is not closing:
            self._wait_closed(timeout)

    def _wait_closed(self, timeout: float | None) -> None:
        """Wait for the thread that is closing this producer, if there is one. Raises what it raises, or what was not
        told before."""
        closing = self._closing
        failure: KafkalogError | None = None
        if closing is not None and not closing.ended.is_set() and closing.thread != threading.get_ident():
            if not closing.ended.wait(timeout):
                assert timeout is not None
                raise RequestTimedOut(what=A_CLOSE, address=self._cluster.address, timeout_ms=int(timeout * 1000))
            failure = closing.failure
        untold = self._lock.run(self._accumulator.take_failure, ())
        if (failure or untold) is not None:
            raise (failure or untold).fresh()  # type: ignore[union-attr]

    def _take_no_more(self, closing: _Closing) -> None:
        """Lock held: unless it was closed before, this is the closing."""
        if self._accumulator.closed is None:
            self._closing = closing
            self._close_batches()  # send() checks for a close only when it needs a new batch
            self._accumulator.close()

    def _stop(self, join_timeout: float | None, closing: _Closing) -> None:
        senders = self._lock.run(self._stop_senders)
        if self._owns_cluster:
            self._cluster.close()  # ends the senders' calls to it
        end = None if join_timeout is None else time.monotonic() + join_timeout
        for sender in senders:  # one that is connecting may be late; it ends when it sees the close
            sender.join(None if end is None else max(0.0, end - time.monotonic()))
        _open.discard(self)
        self._accumulator.call_back(self._lock.run(self._give_up_the_rest, closing))

    def _stop_senders(self) -> list[Sender]:
        """Lock held."""
        self._is_stopped = True
        senders = list(self._senders.values())
        for sender in senders:
            sender.stop()
        return senders

    def _give_up_the_rest(self, closing: _Closing) -> list[Batch]:
        """Lock held."""
        left = self._accumulator.unfinished()
        left.reverse()
        if left and closing.failure is None:  # what ended the flush is no failure of a record
            closing.failure = Closed(what="producer")
        for batch in left:
            batch.queue.clear()
        return self._accumulator.finish([(batch, Closed(what="producer")) for batch in left])

    # --- filling batches, lock held

    def _batch_with_room(self, route: _Route, queue: PartitionQueue, in_turn: bool, size: int) -> Batch:
        """An open batch with room for a record of that size: of its partition, or of the next one in turn.

        Memory is reserved for a batch in steps, so that `send` need not check it for every record.
        """
        while True:
            self._check_usable(route)
            if queue.open is None and in_turn:
                queue = route.next_turn()
                in_turn = False
            batch = queue.open
            used = 0 if batch is None else batch.size
            if batch is not None and (batch.columns is not None or 0 < used > route.batch_size_max - size):
                self._hurry(queue)
                continue
            wanted = min(max(used + size, used + self._reservation), max(size, route.batch_size_max))
            charge = wanted - used if batch is not None else wanted + BATCH_COST
            if self._reserve(charge):
                continue  # other threads ran meanwhile
            if batch is None:
                now = time.monotonic()
                batch = queue.start_batch(now + self._linger, now + self._delivery_timeout)
                self._accumulator.started(batch)
                self._has_work(queue, batch.linger_until)
            batch.charged += charge
            batch.size_limit = wanted
            return batch

    def _next_turn(self, route: _Route) -> int:
        """Lock not held: the partition for the next rows that may go to any."""
        return self._lock.run(route.next_turn).topic_partition.partition

    def _reserve(self, charge: int) -> bool:
        """Reserve memory. Returns True if it had to wait: then nothing is reserved, because all may have changed."""
        accumulator = self._accumulator
        if accumulator.buffered and accumulator.buffered + charge > accumulator.memory:
            self._close_batches()
            accumulator.wait_for_room(charge)
            return True
        accumulator.buffered += charge
        return False

    def _hurry(self, queue: PartitionQueue) -> None:
        self._has_work(queue, 0.0)
        self._accumulator.close_batch(queue)

    def _make_whole(self, error: BaseException) -> None:
        """Lock held: repair what an exception left half done under the lock.

        A `KafkalogError` leaves nothing half done, unless a signal handler raised it. An interrupt may come anywhere:
        records that are complete stay, and their callbacks are called.
        """
        if isinstance(error, KafkalogError) and all(is_clients(frame) for frame, _ in walk_tb(error.__traceback__)):
            return
        for sender in self._senders.values():
            if not self._is_stopped:
                with suppress(OutOfThreads):  # a sender without a thread has no queues: see _have_sender
                    sender.start()
        for route in self._routes.values():
            for queue in route.queues:
                if queue.cut_open_batch():
                    self._accumulator.forget(queue.drop_open_batch())
                for batch in queue.unsent_batches():
                    batch.count_rows()
                    self._accumulator.started(batch)
                self._has_work(queue, 0.0)
        self._accumulator.count_again()

    def _close_batches(self) -> None:
        for route in self._routes.values():
            for queue in route.queues:
                if queue.open is not None:
                    self._hurry(queue)

    # --- checks

    def _check_open(self) -> None:
        if self._accumulator.closed is not None:
            raise Closed(**self._accumulator.closed.facts)

    def _check_usable(self, route: _Route) -> None:
        """Lock held: check again, because the topic may have been deleted since its route was looked up."""
        self._check_open()
        if route.is_gone:
            raise UnknownTopic(topic=route.topic.name)

    def _partition_for(self, key: bytes | None, route: _Route) -> int | None:
        """The partition of a record that names none; None if it may go to any."""
        if self._partitioner is None:
            return None if key is None else partition_for_key(key, route.count)
        return chosen_partition(self._partitioner, key, route.count)

    def _check_lone_size(self, route: _Route, size: int, has_key: bool, has_headers: bool) -> None:
        """Check that a record near the limit fits into a batch alone."""
        size += _LONE_BYTES - RECORD_COST + has_key * _LONE_KEY_BYTES + has_headers * _LONE_HEADERS_BYTES
        size += _COMPRESSED_BYTES * (self._codec != 0)
        limit = route.topic.max_message_bytes
        if size > limit:
            raise RecordTooLarge(size=size, topic=route.topic.name, limit=limit)

    # --- topics and brokers

    def look_up_again(self) -> None:
        """Look up the topics that records were sent to, in one request: records for one that was created again go to
        the new topic at once. What cannot be looked up now stays as it was."""
        if names := self._lock.run(self._topics_sent_to):
            with suppress(KafkalogError):
                self._cluster.describe_topics(names, patient=False)
            self._accumulator.call_back(self._lock.run(self._taken_in_and_finished))

    def _taken_in_and_finished(self) -> list[Batch]:
        """Lock held: the batches to call back for, after the cluster's metadata is applied."""
        return self._accumulator.finish(self._take_in_topics())

    def _route(self, topic: str) -> _Route:
        """The route to a topic that nothing was sent to before. Raises UnknownTopic, BrokerUnreachable."""
        arguments.text("topic", topic)
        self._check_open()
        info = self._cluster.topic(topic)
        return self._lock.run(self._known_or_new_route, info)

    def _known_or_new_route(self, info: TopicInfo) -> _Route:
        """Lock held."""
        route = self._routes.get(info.name)
        if route is None:
            route = _Route(info)
            self._take_in(route, info)
            self._routes[info.name] = route
        return route

    def _route_with(self, topic: str, partition: object) -> _Route:
        """The route to a topic that has a partition, perhaps a new one. Raises UnknownPartition."""
        if partition.__class__ is not int:
            raise InvalidArgument(reason=f"partition is {partition!r}, not a number")
        assert isinstance(partition, int)
        [info] = self._cluster.describe_topics([topic])
        route, called = self._lock.run(self._route_and_finished, info)
        self._accumulator.call_back(called)
        if not 0 <= partition < route.count:
            raise UnknownPartition(topic=topic, partition=partition, partitions=route.count)
        return route

    def _route_and_finished(self, info: TopicInfo) -> tuple[_Route, list[Batch]]:
        """Lock held: a topic's route by the cluster's metadata now, and the batches to call back for."""
        route = self._known_or_new_route(info)
        return route, self._accumulator.finish(self._take_in(route, info))

    def _take_in(self, route: _Route, info: TopicInfo) -> Failed:
        """Lock held: apply the cluster's current metadata of a topic. Returns the batches whose partition is gone.

        Raises:
            OutOfThreads: of a leader's sender; the route is as it was.
        """
        for each in info.partitions:  # first: without a thread for one of them nothing is half done
            self._have_sender(each.leader)
        first_time = not route.queues
        route.topic = info
        compressed = _COMPRESSED_BYTES * (self._codec != 0)
        route.record_size_max = info.max_message_bytes - _BATCH_BYTES - compressed + RECORD_COST
        route.batch_size_max = min(self._settings.batch_size, route.record_size_max)
        for each in info.partitions[len(route.queues) :]:
            route.queues.append(self._new_queue(info, each))
        for queue, each in zip(route.queues, info.partitions, strict=False):
            if queue.topic_id != info.topic_id:
                queue.retarget(info.topic_id)
                self._has_work(queue, 0.0)
            if queue.leader != each.leader:
                self._move(queue, each.leader)
        route.count = len(info.partitions)
        failed = _without_partition(route)
        if first_time or route.in_turn.topic_partition.partition >= route.count:
            route.in_turn = route.queues[random_turn(route.count)]
        return failed

    def _new_queue(self, topic: TopicInfo, partition: PartitionInfo) -> PartitionQueue:
        settings = self._settings
        queue = PartitionQueue(
            TopicPartition(topic.name, partition.partition),
            topic.topic_id,
            idempotent=settings.enable_idempotence and self._acks != 0,
            window=settings.max_in_flight_requests,
            delivery_timeout_ms=settings.delivery_timeout_ms,
            backoff=settings.backoff(),
            accumulator=self._accumulator,
        )
        queue.leader = partition.leader
        return queue

    def _move(self, queue: PartitionQueue, leader: int) -> None:
        """Lock held: give a queue to the sender of its new leader."""
        self._senders[queue.leader].drop(queue)
        queue.leader = leader
        queue.leader_changed()
        self._has_work(queue, 0.0)

    def _have_sender(self, broker_id: int) -> None:
        """Lock held: have a sender to a broker, with a thread. Raises OutOfThreads."""
        sender = self._senders.get(broker_id)
        if sender is None:
            sender = self._senders[broker_id] = Sender(
                broker_id,
                self._cluster,
                self._accumulator,
                self._owner,
                acks=self._acks,
                codec=self._codec,
                request_bytes=self._settings.max_request_size,
            )
        if not self._is_stopped:  # else no close() would stop it, and there is nothing to send
            sender.start()  # also a sender that got no thread when it was created

    # --- what the senders ask for

    def _topics_sent_to(self) -> list[str]:
        """Lock held: the topics that records were sent to."""
        return list(self._routes)

    def _has_work(self, queue: PartitionQueue, at: float) -> None:
        """Lock held: have the leader's sender check a queue at a time (monotonic), if it is not empty."""
        if not queue.is_idle:
            self._senders[queue.leader].has_work(queue, at)

    def _take_in_topics(self) -> Failed:
        """Lock held: apply refreshed metadata of all topics. Returns the batches whose partition is gone.

        If no thread can be started for a leader's sender, the topic keeps its old leaders. They refuse batches of
        partitions that they do not lead, and their senders then ask again.
        """
        failed: Failed = []
        for name, route in list(self._routes.items()):
            info = self._cluster.known_topic(name)
            if info is not None:
                try:
                    failed += self._take_in(route, info)
                except OutOfThreads as error:
                    log.warning("leaders_not_taken_in", topic=name, reason=str(error))
            else:
                failed += [(batch, UnknownTopic(topic=name)) for queue in route.queues for batch in queue.clear()]
                route.is_gone = True
                del self._routes[name]
        return failed

    def _identity_now(self, used_up: int | None) -> Identity:
        """Lock not held: this producer's identity; a new id if all epochs of `used_up` are used. Raises
        KafkalogError."""
        with self._identity_lock:
            if self._identity is None or self._identity.producer_id == used_up:
                reply: broker_pb2.InitProducerReply
                reply = self._cluster.call("InitProducer", broker_pb2.InitProducerRequest(), patient=False)
                self._identity = Identity(reply.producer_id, reply.producer_epoch)
            return self._identity

    def _after_fork_in_child(self) -> None:
        """Start empty: the parent continues to send its records; the child has neither its threads nor its
        connections."""
        self._accumulator.abandon(Closed(what="producer, made before a fork (make one in the child),"))
        self._lock = self._accumulator.lock
        self._closing = None
        self._routes.clear()  # with the open batches: nothing would send what joined them
        for sender in self._senders.values():
            sender.abandon()


class _Closing:
    """A close that is under way, for other threads that close too.

    Attributes:
        thread: that closes.
        ended: once it is closed.
        failure: of its flush.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.ended = Signal()
        self.failure: KafkalogError | None = None


_open: weakref.WeakSet[Producer] = weakref.WeakSet()


def _close_forgotten() -> None:
    """At the interpreter's exit: send the lingering batches of producers that were not closed."""
    for producer in list(_open):
        try:
            producer.close(_EXIT_SECONDS)
        except BaseException as error:  # of a callback, too: the others are flushed all the same
            log.warning("producer_not_flushed", reason=str(error) or type(error).__name__)


atexit.register(_close_forgotten)


def _without_partition(route: _Route) -> Failed:
    """Lock held: what is left for partitions that a topic made anew has not. A send may still hold their queues."""
    failed: Failed = []
    for queue in route.queues[route.count :]:
        name, number = queue.topic_partition
        error = UnknownPartition(topic=name, partition=number, partitions=route.count)
        failed += [(batch, error) for batch in queue.clear()]
    return failed


def _size(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None) -> int:
    """What records without headers take in a batch, as `Producer.send` counts them."""
    size = _RECORD_SIZE * len(values) + _bytes_of(values)
    return size if keys is None else size + _bytes_of(keys) + _FIELD_BYTES * (len(keys) - keys.count(None))


def _bytes_of(data: Sequence[bytes | None]) -> int:
    try:
        return sum(map(len, data))  # type: ignore[arg-type]
    except TypeError:
        return sum(len(each) for each in data if each is not None)


def _check_timestamp(timestamp_us: int) -> None:
    if timestamp_us.__class__ is not int or not -_TIMESTAMP_MAX <= timestamp_us <= _TIMESTAMP_MAX:
        raise InvalidArgument(reason=f"timestamp_us={timestamp_us!r} is not a whole number of microseconds")


def _as_bytes(what: str, data: object) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    hint = f": encode it, for instance {what}.encode()" if isinstance(data, str) else ""
    raise InvalidArgument(reason=f"{what} is {type(data).__name__}, not bytes{hint}")


def _checked_headers(headers: Headers | Mapping[str, bytes | None]) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked = []
    try:
        for name, data in pairs:
            if not isinstance(name, str):
                raise InvalidArgument(reason=f"a header's name is {type(name).__name__}, not str")
            arguments.utf8("a header's name", name)
            checked.append((name, None if data is None else _as_bytes(f"header {name!r}", data)))
    except (TypeError, ValueError):
        raise InvalidArgument(reason=f"headers are {headers!r}, not (name, bytes) pairs or a mapping") from None
    return checked
