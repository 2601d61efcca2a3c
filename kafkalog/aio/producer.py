"""Sending with asyncio. The engine is `kafkalog.Producer`; this adds what it needs to never block the event loop.

`send` puts a record into its batch in the event loop's thread, which waits for nothing. What may wait (the first record
to a topic, a table, a flush) is called in a thread of its own; room in a full buffer is waited for on the event loop.
Nothing is kept for a record but its handle and, until its batch is done, that it is awaited. Awaited, it waits for a
future that all handles of its batch share.

Everything that is kept here belongs to the event loop's thread, but `_done` and `_is_woken`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kafkalog.aio.calls import begin, call_soon, in_thread
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import Partitioner
from kafkalog.client.producer import delivery as threaded_delivery
from kafkalog.client.producer import producer as threaded
from kafkalog.client.producer.queue import Batch
from kafkalog.errors import BufferExhausted, InvalidArgument, KafkalogError, RequestTimedOut
from kafkalog.format.columns import Headers
from kafkalog.records import RecordMetadata, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

_SENDS_AT_ONCE = 1000  # 1 to 2 ms; then other tasks have their turn
_Outcome = TypeVar("_Outcome")


class Delivery:
    """The outcome of one record, to be awaited, as often as you like: `metadata = await delivery`. Its batch is sent
    without further lingering then. For a future, as `asyncio.wait` needs it: `asyncio.ensure_future(delivery)`.

    Raises:
        KafkalogError: awaited: why it could not be delivered.
    """

    __slots__ = ("_delivery", "_producer")

    def __init__(self, producer: Producer, delivery: threaded_delivery.Delivery) -> None:
        self._producer = producer
        self._delivery = delivery

    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self._delivery.done()

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self._delivery.done():
            self._producer._enter_loop()
            run = threaded_delivery.Run(self._delivery._batch, self._delivery._index, 1)
            yield from self._producer._asked([run]).__await__()
        return self._delivery.result()

    def __repr__(self) -> str:
        return repr(self._delivery)


class Producer:
    """Sends records to topics, for asyncio: as `kafkalog.Producer`, with the same settings. An async context manager,
    which flushes and closes at its end.

    No call blocks the event loop. All calls belong to one event loop.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        partitioner: as of `kafkalog.Producer`; called on the event loop.
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
        self._producer = threaded.Producer(bootstrap_servers, partitioner=partitioner, **settings)
        self._accumulator = self._producer._accumulator
        self._block_seconds = self._producer._settings.max_block_ms / 1000
        self._sends = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lookups: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._room: asyncio.Future[None] | None = None
        self._waits: dict[Batch, asyncio.Future[None]] = {}
        self._done: deque[Batch] = deque()
        self._is_woken = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        try:
            await self.close()
        except KafkalogError:
            if kind is None:  # else it would hide the block's own
                raise

    # --- sending

    async def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_us: int | None = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
    ) -> Delivery:
        """Send a record; returns its handle when the producer has taken it. Waits for the first record to a topic, and
        while buffer.memory is full (max.block.ms). Cancelled, it has not taken the record.

        Awaiting each handle at once sends batches of few records: let many tasks send, or await the handles later.

        Args:
            timestamp_us: microseconds since the epoch; now if None.
            headers: (name, bytes or None) pairs, or a mapping.

        Raises:
            UnknownTopic, UnknownPartition, BrokerUnreachable, RecordTooLarge, InvalidArgument: of this record.
            OutOfThreads: no thread can be started now to send to a broker; the record was not taken.
            BufferExhausted: the memory stayed full for max.block.ms.
            Closed: the producer is closed.
        """
        if self._loop is not asyncio.get_running_loop():  # in line: it is asked for each record
            self._enter_loop()
        try:
            count = self._producer._routes[topic].count
        except (KeyError, TypeError):
            count = 0
        if not count or (partition is not None and (partition.__class__ is not int or not 0 <= partition < count)):
            await self._look_up(topic, partition)
        self._sends += 1
        if not self._sends % _SENDS_AT_ONCE:
            await asyncio.sleep(0)
        send = self._producer.send
        if self._room is None:
            try:
                return Delivery(self, send(topic, value, key, partition, timestamp_us, headers))
            except BufferExhausted:
                pass
        return Delivery(self, await self._with_room(partial(send, topic, value, key, partition, timestamp_us, headers)))

    async def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_us: int | None = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
    ) -> RecordMetadata:
        """As `send`; returns the record's place in the log when it is acknowledged. Cancelled, it may have sent the
        record.

        Raises:
            KafkalogError: as `send`; or why it could not be delivered.
        """
        return await (await self.send(topic, value, key, partition, timestamp_us, headers))

    async def send_many(
        self,
        topic: str,
        values: Iterable[bytes | None],
        keys: Iterable[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamp_us: int | None = None,
    ) -> list[tuple[TopicPartition, int, int]]:
        """Send records, as `kafkalog.Producer.send_many`, and wait for all acks.

        Returns:
            (partition, first offset, records) of every run; the offset is -1 with acks=0.
        """
        self._enter_loop()
        send = partial(self._producer.send_many, topic, values, keys, partition=partition, timestamp_us=timestamp_us)
        return await self._placed(await in_thread(send))

    async def send_arrow(
        self, topic: str, table: pa.Table | pa.RecordBatch, *, partition: int | None = None
    ) -> list[tuple[TopicPartition, int, int]]:
        """Send a table's rows, as `kafkalog.Producer.send_arrow`, and wait for all acks.

        Returns:
            (partition, first offset, rows) of every batch; the offset is -1 with acks=0.
        """
        self._enter_loop()
        send = partial(self._producer.send_arrow, topic, table, partition=partition)
        return await self._placed(await in_thread(send))

    async def flush(self, timeout: float | None = None) -> None:
        """Send all open batches now, and wait until every record sent before is acknowledged or has failed.

        Raises:
            KafkalogError: the first failure of a record whose handle nobody awaited.
            RequestTimedOut: not within `timeout` seconds.
        """
        await in_thread(partial(self._producer.flush, timeout), self._flush_untold)

    async def close(self, timeout: float | None = None) -> None:
        """Flush, then end threads and connections. Records not acknowledged within `timeout` seconds fail.

        Raises:
            KafkalogError: as from `flush`; the producer is closed all the same.
        """
        await in_thread(partial(self._producer.close, timeout), self._close_untold)

    def _enter_loop(self) -> None:
        """Of a call: this thread runs the event loop, and may not wait. Raises Closed, InvalidArgument."""
        if self._loop is asyncio.get_running_loop():
            return
        if self._loop is not None:
            if self._accumulator.closed is not None:
                raise self._accumulator.closed.fresh()
            raise InvalidArgument(reason="this producer is used in two event loops: make one producer in each")
        self._loop = asyncio.get_running_loop()
        self._accumulator.may_not_wait.add(threading.get_ident())

    # --- topics

    async def _look_up(self, topic: str, partition: int | None) -> None:
        """Wait until the producer knows a topic, and that it has a partition. Raises KafkalogError."""
        wanted = repr(topic), repr(partition)  # they may be anything
        lookup = self._lookups.get(wanted)
        if lookup is None:
            lookup = self._lookups[wanted] = begin(partial(self._find, topic, partition))
            lookup.add_done_callback(lambda _: self._lookups.pop(wanted))
        await asyncio.wait([lookup])
        error = lookup.exception()
        if error is not None:
            raise error.fresh() if isinstance(error, KafkalogError) else error

    def _find(self, topic: str, partition: int | None) -> None:
        """In a thread of its own."""
        self._producer._route(topic)
        if partition is not None:
            self._producer._route_with(topic, partition)

    # --- waiting for room

    async def _with_room(self, send: Callable[[], _Outcome]) -> _Outcome:
        """Send when there is room. Raises BufferExhausted."""
        end = time.monotonic() + self._block_seconds
        while True:
            if self._room is None:
                loop = asyncio.get_running_loop()
                self._room = loop.create_future()
                self._accumulator.on_room.append(partial(call_soon, loop, self._has_room, self._room))
                with suppress(BufferExhausted):  # once more: there may have been room before
                    return send()
            left = max(0.0, end - time.monotonic())
            await asyncio.wait([self._room], timeout=left)
            if left == 0:
                limit_ms = int(self._block_seconds * 1000)
                raise BufferExhausted(limit=self._accumulator.memory, waited_ms=limit_ms)
            with suppress(BufferExhausted):
                return send()

    def _has_room(self, room: asyncio.Future[None]) -> None:
        if self._room is room:
            self._room = None
        room.set_result(None)

    # --- waiting for acks

    async def _placed(self, sent: threaded_delivery.ManyDelivery) -> list[tuple[TopicPartition, int, int]]:
        """The places in the log of what was sent, once all is acknowledged. Raises KafkalogError."""
        await self._asked(sent._runs)
        return sent.result()

    async def _asked(self, runs: Sequence[threaded_delivery.Run]) -> None:
        """Wait until these are acknowledged or have failed. Cancelled, nobody was told of their outcome."""
        left = [run for run in runs if not run.batch.done]
        try:
            for run in left:
                run.batch.ask(run.first, run.records)
            if left:
                await asyncio.wait({self._wait_of(run.batch) for run in left})
        except BaseException:
            for run in left:
                self._accumulator.lock.run(self._accumulator.ask_no_more, run.batch, run.first)
            raise

    def _flush_untold(self, error: BaseException) -> None:
        """A flush that was cancelled has failed. If its time was over, its records are left to the next one."""
        if not isinstance(error, RequestTimedOut):
            self._untold(error)

    def _close_untold(self, error: BaseException) -> None:
        """A close that was cancelled has failed. If its time to wait for another close was over, that one tells."""
        if not (isinstance(error, RequestTimedOut) and error.facts["what"] == threaded.A_CLOSE):
            self._untold(error)

    def _untold(self, error: BaseException) -> None:
        """A flush or a close that was cancelled has failed."""
        if isinstance(error, KafkalogError) and not isinstance(error, InvalidArgument):
            self._accumulator.lock.run(self._accumulator.tell_later, error)

    def _wait_of(self, batch: Batch) -> asyncio.Future[None]:
        """Done once a batch is acknowledged or has failed. It is sent after the tasks that can run now: their records
        go with it."""
        wait = self._waits.get(batch)
        if wait is None:
            loop = asyncio.get_running_loop()
            wait = self._waits[batch] = loop.create_future()
            self._accumulator.lock.run(self._watch, batch, loop)
            loop.call_soon(self._hurry, batch)
        return wait

    def _watch(self, batch: Batch, loop: asyncio.AbstractEventLoop) -> None:
        """Lock held: learn when a batch is done."""
        if batch.done:
            self._note_done(batch, loop)
        else:
            batch.add_callback(-1, lambda error, metadata: self._note_done(batch, loop))

    def _hurry(self, batch: Batch) -> None:
        if batch.queue.open is batch:
            self._accumulator.lock.run(self._hurry_open, batch)

    def _hurry_open(self, batch: Batch) -> None:
        """Lock held."""
        if batch.queue.open is batch:
            self._accumulator.hurry(batch.queue)

    def _note_done(self, batch: Batch, loop: asyncio.AbstractEventLoop) -> None:
        """In any thread. The event loop is woken once for all batches that are done when it comes to it."""
        self._done.append(batch)
        if not self._is_woken:
            self._is_woken = True
            call_soon(loop, self._end_waits)

    def _end_waits(self) -> None:
        self._is_woken = False  # first: what comes after the last look wakes again
        while self._done:
            self._waits.pop(self._done.popleft()).set_result(None)
