"""Consuming with asyncio. The engine is `kafkalog.Consumer`; this adds who hands out its records, and in which thread.

Messages come a thousand at a time. One thread of the consumer's own waits for them, and takes none: the event loop's
thread takes each message from the cursor when it returns it. So a call that is cancelled has taken nothing. Its wait
continues in the thread, and the next call joins it; what has come until then holds up no partition that is to go. What
asks a broker (commits, lookups) has a thread for each call, because it must not wait until messages come.

Everything that is kept here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kafkalog.aio.calls import Caller, in_thread
from kafkalog.client import arguments
from kafkalog.client.admin import AtTimestamp
from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer import consumer as threaded
from kafkalog.client.consumer.cursors import Cursor, Going, Hand, Taken, joined
from kafkalog.errors import InvalidArgument, KafkalogError
from kafkalog.net.forks import after_fork
from kafkalog.records import Message, MessageFields, Messages, TopicPartition, as_messages

if TYPE_CHECKING:
    import pyarrow as pa

Callback = Callable[["Consumer", list[TopicPartition]], Awaitable[object] | object]
"""(consumer, partitions); called on the event loop, and awaited if it is a coroutine function."""

_NOTHING: Iterator[MessageFields] = iter(())
_LOOK_SECONDS = 0.5


class _Called(NamedTuple):
    """A callback.

    Attributes:
        consumer: that it was called with.
        task: that runs it.
        thread: that waits for it.
    """

    consumer: weakref.ref[Consumer]
    task: asyncio.Task[Any]
    thread: int


_callback: ContextVar[_Called | None] = ContextVar("_callback", default=None)
"""That in which a task, or one that began it, runs or ran: `asyncio.wait_for` awaits in a task of its own."""


class _Wait(NamedTuple):
    """A wait for records in the consumer's thread.

    Attributes:
        take: which of the cursors' methods waits.
        hand: has the records that have come. They are taken back if their partition is to go before a call takes them.
        found: what `take` returns.
    """

    take: Callable[..., Any]
    hand: Hand
    found: asyncio.Future[Any]


class Consumer:
    """Reads partitions, for asyncio: as `kafkalog.Consumer`, with the same settings. An async context manager; iterable
    over its messages.

    Calls that may wait are coroutines, and none blocks the event loop. A cancelled `poll`, `async for` or `consume`
    loses no message: the next call returns it. A message that was returned counts as processed when the next one is
    asked for. One task at a time may ask for records; all calls belong to one event loop.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        group: the name under which offsets are committed, from which "committed" partitions start, and which
            `subscribe` joins.
        **settings: of `ConsumerSettings`.

    Raises:
        UnknownSetting, InvalidSetting: of the settings.
    """

    def __init__(
        self, bootstrap_servers: str | Iterable[str] | Cluster, group: str | None = None, **settings: Any
    ) -> None:
        self._consumer = threaded.Consumer(bootstrap_servers, group, **settings)
        self._cursors = self._consumer._cursors
        self._thread = Caller()
        self._forsaken = weakref.finalize(self, _let_go, self._consumer, self._thread)
        self._forsaken.atexit = False
        self._wait: _Wait | None = None
        self._hand = Hand()  # has what was returned last
        self._earlier: list[Hand] = []  # have what `consume` returned before it
        self._cursor: Cursor | None = None  # of its messages; None: it has none
        self._left = _NOTHING  # the cursor's messages that were not returned yet
        after_fork(self, Consumer._after_fork_in_child)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, timeout: float = 2.0) -> None:
        """Leave the group, and close the connections, as `kafkalog.Consumer.close`. Iterators end, and waiting calls
        return, in other tasks too."""
        self._left = _NOTHING
        await self._in_thread(partial(self._consumer.close, timeout))
        self._thread.stop()
        self._forsaken.detach()

    # --- what is read, and from where

    async def assign(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> None:
        """Read these partitions from now on, and no others; as `kafkalog.Consumer.assign`."""
        await in_thread(partial(self._consumer.assign, starts))

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions; the others are not affected."""
        self._consumer.unassign(partitions)

    async def subscribe(
        self,
        topics: str | re.Pattern[str] | Iterable[str],
        *,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        """Read these topics as a member of the group, which shares their partitions among its members; as
        `kafkalog.Consumer.subscribe`.

        The callbacks are functions or coroutine functions. They are called on the event loop, with this consumer and a
        list of partitions; no record is returned meanwhile. In them you may `seek`, `commit` and `pause`, but not read.

        Raises:
            InvalidArgument: the consumer has no group, or has partitions assigned by `assign`.
        """
        await self._in_thread(
            partial(
                self._consumer.subscribe,
                topics,
                on_assigned=self._on_loop(on_assigned),
                on_revoked=self._on_loop(on_revoked),
                on_lost=self._on_loop(on_lost),
            )
        )

    async def unsubscribe(self) -> None:
        """Leave the group; as `close`, but the consumer stays open."""
        await self._in_thread(self._consumer.unsubscribe)

    async def _in_thread(self, call: Callable[[], None]) -> None:
        """Make a call in a thread; if a callback makes it, as that callback: a call that leaves a group does not wait
        for its end."""
        called, in_callback = self._called(), self._consumer._in_callback

        def make() -> None:
            if called is not None:
                in_callback.behalf = called.thread  # of this thread, which ends with the call
            call()

        await in_thread(make)

    def _on_loop(self, callback: Callback | None) -> Callable[[Any, list[TopicPartition]], object] | None:
        """A callback for the engine, which calls it in another thread: that waits while the event loop runs it. A loop
        that has stopped may run on, but not once it is closed; and nobody is called who does not have the consumer."""
        if callback is None:
            return None
        loop, reference = asyncio.get_running_loop(), weakref.ref(self)

        async def called(partitions: list[TopicPartition], thread: int) -> None:
            consumer = reference()
            if consumer is not None:
                task = asyncio.current_task()
                assert task is not None
                _callback.set(_Called(reference, task, thread))
                result = callback(consumer, partitions)
                if inspect.isawaitable(result):
                    await result

        def is_over() -> bool:
            return loop.is_closed() or reference() is None

        def call(_: Any, partitions: list[TopicPartition]) -> None:
            if is_over():
                return
            running = asyncio.run_coroutine_threadsafe(called(partitions, threading.get_ident()), loop)
            while not futures.wait([running], _LOOK_SECONDS).done:
                if is_over():
                    return
            running.result()

        return call

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Return no records of partitions until `resume`. They stay assigned, and what was fetched is kept. Ignores
        and raises what `kafkalog.Consumer.pause` does."""
        self._consumer.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Return records of paused partitions again. Ignores and raises what `pause` does."""
        self._consumer.resume(partitions)

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return self._consumer.paused()

    def failures(self) -> dict[TopicPartition, KafkalogError]:
        """The last error that was raised for each assigned partition, since its assignment or last `seek`."""
        return self._consumer.failures()

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return self._consumer.assignment()

    async def seek(self, partition: TopicPartition, where: str | int | AtTimestamp) -> None:
        """Continue elsewhere in a partition; `where` as in `assign`."""
        await in_thread(partial(self._consumer.seek, partition, where))

    async def position(self, partition: TopicPartition) -> int:
        """The offset before which every record is processed: that of the message that was returned last, until the next
        one is asked for."""
        return self._consumer.position(partition)

    # --- group offsets

    async def commit(
        self, done: Mapping[TopicPartition, int] | Message | Sequence[Message] | pa.RecordBatch | None = None
    ) -> None:
        """Write the group's offsets; as `kafkalog.Consumer.commit`: without arguments the position of every assigned
        partition, so not the message that is still being processed. A cancelled commit may be written or not."""
        await self._in_thread(partial(self._consumer.commit, done))

    async def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The group's committed offsets of partitions (None: the assigned ones); those without one are left out."""
        return await in_thread(partial(self._consumer.committed, partitions))

    # --- reading

    def __aiter__(self) -> Self:
        self._consumer._check_open()
        return self

    async def __anext__(self) -> Message:
        cursor = self._cursor
        if not self._earlier and cursor is not None and (cursor.lease is None or not cursor.lease.has_ended()):
            for message in as_messages(self._left):  # not by next(): see cursors.py
                self._hand.message = message
                return message
        found = await self._poll(None)
        if found is None:
            raise StopAsyncIteration
        return found

    async def poll(self, timeout: float | None = None) -> Message | None:
        """The next message; the one before counts as processed.

        Args:
            timeout: seconds to wait at most; None or negative: until there is one.

        Returns:
            None after `timeout` seconds without a message, or when closed.

        Raises:
            KafkalogError: as `kafkalog.Consumer.messages`.
        """
        self._consumer._check_open()
        return await self._poll(arguments.seconds("timeout", timeout))

    async def _poll(self, timeout: float | None) -> Message | None:
        end = _end(timeout)
        self._check_not_in_callback()
        self._consumer._note_asked()
        self._put_earlier_down()
        while True:
            cursor = self._cursor
            if cursor is not None and not cursor.has_ended():
                for message in as_messages(self._left):
                    self._hand.message = message
                    return message
            if not await self._found(self._cursors.next_rows, end):
                return None
            self._consumer._note_got(self._hand)

    async def consume(self, num_messages: int = 1, timeout: float | None = None) -> Messages:
        """The next messages, up to a number; those before count as processed.

        If it is cancelled, or a callback raises, the messages that had come are read again. So limit the time by
        `timeout`, which returns those.

        Args:
            num_messages: to return at most, and to wait for.
            timeout: seconds to wait at most; None or negative: until there are that many.

        Returns:
            fewer after `timeout` seconds, or when closed, or when another member of the group is to read a partition of
            theirs.

        Raises:
            KafkalogError: as `kafkalog.Consumer.messages`. Messages that had come before it are returned first.
        """
        self._consumer._check_open()
        end = _end(arguments.seconds("timeout", timeout))
        if arguments.whole_number("num_messages", num_messages) < 1:
            raise InvalidArgument(reason=f"num_messages must be at least 1, not {num_messages}")
        self._check_not_in_callback()
        self._consumer._note_asked()
        self._put_earlier_down()
        left, is_late = num_messages, self._consumer._is_late
        taken: list[Taken] = []
        try:
            try:
                while True:
                    self._hand.is_unseen = True
                    if rows := list(itertools.islice(self._left, left)):
                        assert self._cursor is not None
                        self._hand.message = Message(*rows[0])
                        taken.append(Taken(self._cursor, [rows]))
                        left -= len(rows)
                    if not left:
                        break
                    try:
                        if not await self._found(self._cursors.next_rows, end, keep=bool(taken)):
                            break
                    except Going:
                        taken = [each for each in taken if not is_late(each.cursor, each.first_offset)]
                        if taken:
                            break
                        self._give_back()  # the lease has ended: begin anew
                        left = num_messages
            except KafkalogError as error:
                if not taken or self._consumer._is_of_callback(error):
                    raise
            for hand in (*self._earlier, self._hand):
                self._consumer._note_got(hand)
            # Only now: the lease may have ended while this task waited for more.
            messages = joined(each for each in taken if not is_late(each.cursor, each.first_offset))
            for hand in (*self._earlier, self._hand):
                hand.is_unseen = False
        except BaseException:
            if any(hand.is_unseen for hand in (*self._earlier, self._hand)):
                self._give_back()
            raise
        return messages

    def arrow_batches(self, timeout: float | None = None) -> AsyncIterator[pa.RecordBatch]:
        """The records of all assigned partitions as they arrive, as Arrow batches, each of one partition, in order; as
        `kafkalog.Consumer.arrow_batches`.

        Args:
            timeout: stop after this many seconds without a batch; None or negative: never.

        Raises:
            KafkalogError: as `kafkalog.Consumer.messages`.
        """
        self._consumer._check_open()
        return _ArrowBatches(self, arguments.seconds("timeout", timeout))

    async def _next_arrow(self, timeout: float | None) -> pa.RecordBatch | None:
        end = _end(timeout)
        self._check_not_in_callback()
        self._consumer._note_asked()
        self._put_earlier_down()
        while True:
            batch = await self._found(self._cursors.next_arrow, end)
            if batch is None:
                return None
            if self._cursors.is_current(self._hand):
                self._consumer._note_got(self._hand)
                self._hand.is_unseen = False
                found: pa.RecordBatch = batch
                return found
            self._give_back()

    # --- waiting

    async def _found(self, take: Callable[..., Any], end: float | None, keep: bool = False) -> Any:
        """What `take`, a method of the cursors that waits for records, returns in the consumer's thread; `_hand` has it
        then. What was returned before counts as processed, unless `keep`.

        Returns:
            None at the end (monotonic), or when the consumer is closed.
        """
        if keep:
            self._earlier.append(self._hand)
            self._hand, self._cursor, self._left = Hand(), None, _NOTHING
        begun = None
        while True:
            wait = self._wait
            if wait is None:
                if self._consumer._fetcher.closed:
                    return None
                wait = begun = self._wait = self._begin(take)
            if wait.found.get_loop() is not asyncio.get_running_loop():
                raise InvalidArgument(reason="this consumer is used in two event loops: make one consumer in each")
            left = None if end is None else max(0.0, end - time.monotonic())
            await asyncio.wait([wait.found], timeout=left)
            if not wait.found.done():
                return None
            if self._wait is not wait:  # another task was faster
                continue
            self._wait = None
            wait.hand.is_untaken = False  # if it was taken back, `left` has ended, and a batch is not current
            error = wait.found.exception()
            if (
                wait is not begun
                and isinstance(error, InvalidArgument | Going)
                and not self._consumer._is_of_callback(error)
            ):
                continue  # of what was assigned, or taken, before this call
            found = wait.found.result()
            if found is None:
                return None
            self._hand = wait.hand
            if wait.take != take:  # begun by a call of another kind
                self._give_back()
                continue
            if take == self._cursors.next_rows:
                self._cursor, self._left = found, found.left
            return found

    def _begin(self, take: Callable[..., Any]) -> _Wait:
        """Begin to wait; what is in hand counts as processed, but not what a call of `consume` is collecting."""
        processed, hand = self._hand, Hand(is_untaken=True)
        self._hand, self._cursor, self._left = Hand(), None, _NOTHING
        taking = partial(take, taken=tuple(self._earlier)) if self._earlier else take
        return _Wait(take, hand, self._thread.begin(partial(_waited, self._consumer, taking, processed, hand)))

    def _called(self) -> _Called | None:
        """The callback of this consumer in which this runs, directly or in a task that it began."""
        called = _callback.get()
        return called if called is not None and called.consumer() is self and not called.task.done() else None

    def _check_not_in_callback(self) -> None:
        if self._called() is not None:
            raise InvalidArgument(reason=threaded.READING_CALLBACK)

    def _put_earlier_down(self) -> None:
        """What `consume` has returned is processed; not the last partition's, because `_left` follows it."""
        if self._earlier:
            with self._cursors.fetcher.lock:
                for hand in self._earlier:
                    self._cursors.put_hand_down(hand)
            self._earlier = []

    def _give_back(self) -> None:
        """What is in hand was not returned: it is fetched again."""
        hands = [*self._earlier, self._hand]
        self._earlier, self._hand, self._cursor, self._left = [], Hand(), None, _NOTHING
        self._cursors.give_back(hands)

    def _after_fork_in_child(self) -> None:
        """Continue where the parent was: its thread, and what that waited for, is not here."""
        self._forsaken.detach()
        self._thread = Caller()
        wait, self._wait = self._wait, None
        if wait is not None:
            self._cursors.give_back([wait.hand])


class _ArrowBatches:
    """The iterator of `Consumer.arrow_batches`; unlike a generator, it can continue after a cancelled wait."""

    def __init__(self, consumer: Consumer, timeout: float | None) -> None:
        self._consumer = consumer
        self._timeout = timeout

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await self._consumer._next_arrow(self._timeout)
        if batch is None:
            raise StopAsyncIteration
        return batch


def _let_go(consumer: threaded.Consumer, thread: Caller) -> None:
    """Of a consumer that nobody has any more: it may be waiting for records, and stay a member of its group."""
    thread.stop()
    in_background(consumer.close)


def _end(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _waited(consumer: threaded.Consumer, take: Callable[..., Any], processed: Hand, hand: Hand) -> Any:
    """In the consumer's thread: put down what is processed, and wait for records."""
    with consumer._fetcher.lock:
        consumer._cursors.put_hand_down(processed)
    return consumer._next(take, None, None, hand)
