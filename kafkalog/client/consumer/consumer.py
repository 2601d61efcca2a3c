"""Consuming: assigned partitions as iterators of messages or Arrow batches, in order for each partition.

The caller assigns the partitions. `commit` writes positions to ZooKeeper (through a broker). A message that an iterator
returned counts as processed when that iterator is asked for the next one. So a partition's position is the first
message that is being processed, or that was not handed out. A commit, from any thread, never includes a message that is
still being processed: everything is processed at least once. If an iterator is left in the middle (by `break`, by an
error), its last message counts as processed when an iterator created later is asked for a message; iterators of other
threads do not affect this. Fetched records are in the fetcher (`fetcher.py`).

A KeyboardInterrupt may come after any call. Before records move from one place to the next, the cursor's `resume` is
set to the offset to restart from; the assignment that completes the move clears it. If it is still set when the next
call comes, the move was interrupted, and fetching restarts from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kafkalog.client import arguments
from kafkalog.client.admin import AtTimestamp, list_offsets
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import ConsumerSettings, connection_settings
from kafkalog.client.consumer.decode import ArrowBuilder, Decoded, messages
from kafkalog.client.consumer.fetcher import Fetcher, Source
from kafkalog.client.consumer.partition_fetch import FetchedBatch, decode
from kafkalog.client.groups import commit_offsets, committed_offsets
from kafkalog.errors import Closed, CorruptBatch, InvalidArgument, KafkalogError, NoCommittedOffset
from kafkalog.net.forks import after_fork
from kafkalog.records import Message, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

_STARTS = ("earliest", "latest", "committed")
_ROWS_AT_ONCE = 1000  # messages made at once
_ARROW_ROWS = 10_000  # small batches are joined up to here
_ARROW_BYTES = 2 << 20
_ANY = 1 << 62

_moments = itertools.count()  # an order of events without a lock: an iterator may be closed at any point


class _Hand:
    """The message or Arrow batch that one iterator has handed out last, and that is still being processed.

    Attributes:
        cursor: of its partition; None: the hand is empty.
        message: handed out last; None: no message from `offset` on was handed out yet, or it is an Arrow batch that
            begins there.
        is_unseen: the Arrow batch was made and not handed out.
        made: when its iterator was made, by `_moments`.
        given_up: when the iterator was closed with this in hand; None: it was not closed.
    """

    __slots__ = ("cursor", "given_up", "is_unseen", "made", "message", "offset")

    def __init__(self) -> None:
        self.cursor: _Cursor | None = None
        self.message: Message | None = None
        self.offset = -1
        self.is_unseen = False
        self.made = next(_moments)
        self.given_up: int | None = None

    def take_from(self, cursor: _Cursor, offset: int) -> None:
        """Lock held: the iterator hands out records of that partition next, from that offset on."""
        self.cursor, self.message, self.offset, self.is_unseen = cursor, None, offset, False
        cursor.hands.add(self)

    def put_down(self) -> None:
        """Lock held: mark as processed what is in hand."""
        if self.cursor is not None:
            self.cursor.hands.discard(self)
            self.cursor = None

    def first_offset(self) -> int:
        message = self.message
        return self.offset if message is None else message.offset


class _Cursor:
    """The progress of handing out one partition's records. Guarded by the fetcher's lock.

    Attributes:
        offset: the next to hand out, if there are no `rows`.
        rows: messages being handed out; `left` are those not handed out yet; `batches` are what they were made from.
        end_offset: the next offset after `rows`.
        hands: those of the iterators that have a record of it in hand.
        resume: the offset to restart from, while records are being moved; None: none are.
    """

    __slots__ = ("batches", "builder", "end_offset", "hands", "left", "offset", "resume", "rows", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.builder = ArrowBuilder(source.topic_partition)
        self.offset = self.end_offset = source.reader.offset
        self.rows: list[Message] = []
        self.left: Iterator[Message] = iter(self.rows)
        self.batches: Sequence[FetchedBatch] = ()
        self.hands: set[_Hand] = set()
        self.resume: int | None = None

    def next_offset(self) -> int:
        """The offset of the message to be handed out next. An iterator may take that message at the same time."""
        if self.resume is not None:
            return self.resume
        if not self.rows:
            source = self.source
            at = source.reset_to
            if at is not None and (not source.arrived or source.arrived[0].start_offset >= at):
                self.offset, source.reset_to = at, None
            return self.offset
        left = self.left.__length_hint__()  # type: ignore[attr-defined]
        return self.rows[-left].offset if left else self.end_offset

    def position(self) -> int:
        """The offset before which every record is processed."""
        hands = [hand.first_offset() for hand in self.hands]  # first: what leaves `left` meanwhile is in a hand
        return min([self.next_offset(), *hands])

    def is_through(self) -> bool:
        """Whether all `rows` were handed out, or will be fetched again."""
        return self.resume is not None or not self.left.__length_hint__()  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Stop handing out `rows`; those not handed out are fetched again."""
        if self.rows and self.resume is None:
            self.resume = self.next_offset()
            rows = list(self.left)  # in one step: a running iterator gets none of these
            if not rows:
                self.offset = self.end_offset
            else:
                self.offset = at = rows[0].offset
                left = [batch for batch in self.batches if batch.header.end_offset > at]
                arrived = self.source.arrived
                if arrived and arrived[0].data is left[-1].data:
                    self.source.take(1, 1)  # the rest of the same batch, which comes along
                self.source.put_back([batch._replace(start_offset=max(at, batch.start_offset)) for batch in left])
            self._forget()
            self.resume = None

    def seek(self, offset: int) -> None:
        self.resume = offset
        self.hands.clear()
        self.restart()

    def restart(self) -> None:
        """Fetch again from `resume`, if it is set: a move was interrupted, so what has arrived is unknown."""
        at = self.resume
        if at is not None:
            self._forget()
            self.source.go_to(at)
            self.offset, self.resume = at, None

    def forget_given_up(self, asking: _Hand) -> None:
        """`asking` wants a record: mark as processed what is in hands that were given up before it was made.

        A hand that was given up later is kept: `asking` may be another thread's, and processing may have failed. A
        record that was taken in hand and never handed out, because of an interrupt, is fetched again.
        """
        if self.hands:
            left = [hand for hand in self.hands if hand.given_up is not None and hand.given_up <= asking.made]
            unseen = [hand.offset for hand in left if hand.is_unseen]
            if unseen:
                self.resume = min([self.next_offset(), *unseen])
            self.hands = self.hands.difference(left)

    def _forget(self) -> None:
        self.rows.clear()  # ends an iterator over them that another thread may hold
        self.rows = []
        self.left = iter(self.rows)
        self.batches = ()


class MessageStream:
    """One partition's messages: an iterable that blocks while there is no record, and ends when the consumer is
    closed."""

    def __init__(self, consumer: Consumer, topic_partition: TopicPartition) -> None:
        self._consumer = consumer
        self.topic_partition = topic_partition

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def messages(self, max_messages: int | None = None, timeout: float | None = None) -> Iterator[Message]:
        """As `Consumer.messages`, of this partition."""
        return self._consumer._messages(self.topic_partition, max_messages, timeout, _Hand())


class Consumer:
    """Reads assigned partitions. Thread-safe; a context manager; iterable over its messages.

    The pull consumer of the paper's section 3.1, with partitions assigned by the caller, as by `assign` of Kafka's
    consumer. Delivery is at least once (section 3.3): a record is read again if it was not committed.

    Iterators block while there is no record to read, and end when the consumer is closed, in any thread.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        group: the name under which offsets are committed, and from which "committed" partitions start.
        **settings: of `ConsumerSettings`.

    Raises:
        UnknownSetting, InvalidSetting: of the settings.
    """

    def __init__(
        self, bootstrap_servers: str | Iterable[str] | Cluster, group: str | None = None, **settings: Any
    ) -> None:
        self._settings = ConsumerSettings.parse(settings)
        self._group = None if group is None else arguments.text("group", group)
        self._owns_cluster = not isinstance(bootstrap_servers, Cluster)
        self._cluster = (
            bootstrap_servers
            if isinstance(bootstrap_servers, Cluster)
            else Cluster(bootstrap_servers, connection_settings(self._settings))
        )
        self._fetcher = Fetcher(self._cluster, self._settings, self._restart)
        self._cursors: dict[TopicPartition, _Cursor] = {}
        self._by_source: dict[Source, _Cursor] = {}
        # The id of every topic ever assigned, as assigned last: records of a topic that is no longer read may still be
        # committed, and a topic created again under the name must not get their offsets.
        self._topic_ids: dict[str, bytes] = {}
        after_fork(self, Consumer._after_fork_in_child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, timeout: float = 2.0) -> None:
        """Close the connections. Iterators end, also those in which other threads wait. Commits nothing.

        May be called in a signal handler: the interrupted call then closes the connections when it continues.

        Args:
            timeout: seconds to wait at most for a thread that waits for a broker's answer; it ends as soon as it
                notices the close.
        """
        self._fetcher.close(self._cluster.close if self._owns_cluster else None, timeout)

    # --- what is read, and from where

    def assign(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> None:
        """Read these partitions from now on, and no others.

        Iterators continue with the new assignment. A stream of a partition that is not assigned raises InvalidArgument.

        Args:
            starts: "earliest", "latest", "committed", an offset, or `AtTimestamp(us)`: the first record at or after it,
                the end if there is none.

        Raises:
            UnknownTopic, UnknownPartition: it does not exist.
            BrokerUnreachable: no broker answers.
            PartitionLost: a partition whose start has to be looked up is not served.
            NoCommittedOffset: for "committed", with committed.fallback=error.
        """
        self._check_open()
        wanted = arguments.by_partition("starts", starts)
        _check_starts(wanted)
        names = {partition.topic for partition in wanted}
        # Not from the cache: a topic may have been created again since, and then has another id.
        topics = {topic.name: topic for topic in self._cluster.describe_topics(names)} if names else {}
        for partition in wanted:
            topics[partition.topic].partition(partition.partition)
        cursors = {
            partition: _Cursor(Source(partition, topics[partition.topic].topic_id, offset))
            for partition, offset in self._resolved(wanted).items()
        }
        with self._fetcher.lock:
            for cursor in self._cursors.values():
                cursor.settle()
            self._topic_ids |= {topic: cursor.source.reader.topic_id for (topic, _), cursor in cursors.items()}
            self._set_cursors(cursors)

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions; the others are not affected. Partitions that are not assigned are ignored."""
        self._check_open()
        gone = set(arguments.partitions("partitions", partitions))
        with self._fetcher.lock:
            for partition in gone & self._cursors.keys():
                self._cursors[partition].settle()
            left = {partition: cursor for partition, cursor in self._cursors.items() if partition not in gone}
            self._set_cursors(left)

    def _set_cursors(self, cursors: dict[TopicPartition, _Cursor]) -> None:
        """Lock held: fetch for these from now on, and for no others."""
        by_source = {cursor.source: cursor for cursor in cursors.values()}
        sources = list(by_source)
        self._cursors, self._by_source, self._fetcher.sources = cursors, by_source, sources
        self._fetcher.wake()

    def failures(self) -> dict[TopicPartition, KafkalogError]:
        """The last error that an iterator raised for each assigned partition, since its assignment or last `seek`. To
        continue with the others, `unassign` these; otherwise they are tried again."""
        with self._fetcher.lock:
            return {
                partition: cursor.source.failure
                for partition, cursor in self._cursors.items()
                if cursor.source.failure is not None
            }

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return list(self._cursors)

    def seek(self, partition: TopicPartition, where: str | int | AtTimestamp) -> None:
        """Continue elsewhere in a partition; `where` as in `assign`. Fetched records of it are dropped."""
        self._check_open()
        cursor = self._cursor(partition)
        _check_starts({partition: where})
        [offset] = self._resolved({cursor.source.topic_partition: where}).values()
        with self._fetcher.lock:
            cursor.seek(offset)
            self._fetcher.wake()

    def position(self, partition: TopicPartition) -> int:
        """The offset before which every record is processed.

        That is the offset of the message that an iterator returned last, until the iterator is asked for the next
        one; then that of the next message. If a loop is left in the middle (by `break`, by an error), its message
        counts as processed when a later iterator is asked for a message. Iterators of other threads do not affect
        this.
        """
        cursor = self._cursor(partition)
        with self._fetcher.lock:
            return cursor.position()

    def _cursor(self, partition: TopicPartition) -> _Cursor:
        partition = arguments.partition(partition)
        cursor = self._cursors.get(partition)
        if cursor is None:
            raise InvalidArgument(reason=f"{partition} is not assigned to this consumer")
        return cursor

    def _resolved(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> dict[TopicPartition, int]:
        """The offset of each start, looked up where it is symbolic."""
        wanted = dict(starts)
        from_group = [partition for partition, start in wanted.items() if start == "committed"]
        if from_group:
            wanted |= self._committed_or_fallback(from_group)
        offsets = {partition: start for partition, start in wanted.items() if isinstance(start, int)}
        listed = {partition: start for partition, start in wanted.items() if not isinstance(start, int)}
        beyond = []
        for partition, found in list_offsets(self._cluster, listed).items():
            if found.offset is None:
                beyond.append(partition)
            else:
                offsets[partition] = found.offset
        for partition, found in list_offsets(self._cluster, dict.fromkeys(beyond, "latest")).items():
            assert found.offset is not None
            offsets[partition] = found.offset
        return {partition: offsets[partition] for partition in wanted}

    def _committed_or_fallback(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | str]:
        committed = self.committed(partitions)
        fallback = self._settings.committed_fallback
        for partition in partitions:
            if partition not in committed and fallback == "error":
                raise NoCommittedOffset(group=self._group, partition=str(partition))
        return {partition: committed.get(partition, fallback) for partition in partitions}

    # --- group offsets

    def commit(self, done: Mapping[TopicPartition, int] | Message | pa.RecordBatch | None = None) -> None:
        """Write the group's offsets, from any thread.

        Args:
            done: None: the position of every assigned partition, see `position`. A message or Arrow batch of this
                consumer: the offset after it, in its partition; use this in the body of a loop, after the message is
                processed. Or a dict of offsets by TopicPartition.

        Raises:
            InvalidArgument: the consumer has no group.
            UnknownTopicId: a topic was deleted and created again since it was assigned; nothing was written. `assign`
                it again to read and commit the new one.
            UnknownTopic, UnknownPartition: it does not exist.
            BrokerUnreachable: no broker answers.
        """
        group = self._group_or_error()
        if done is None:
            offsets: Mapping[TopicPartition, int] = {each: self.position(each) for each in list(self._cursors)}
        elif isinstance(done, Message):
            offsets = {TopicPartition(done.topic, done.partition): done.offset + 1}
        elif isinstance(done, Mapping):
            offsets = arguments.offsets("done", done)
        else:
            offsets = _behind(done)
        if offsets:
            commit_offsets(self._cluster, group, offsets, self._topic_ids)

    def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The group's committed offsets of partitions (None: the assigned ones); those without one are left out."""
        group = self._group_or_error()
        wanted = arguments.partitions("partitions", self._cursors if partitions is None else partitions)
        if not wanted:
            return {}
        found = committed_offsets(self._cluster, group, sorted({partition.topic for partition in wanted}))
        return {partition: found[partition] for partition in wanted if partition in found}

    def _group_or_error(self) -> str:
        self._check_open()
        if self._group is None:
            raise InvalidArgument(reason="this consumer has no group: give it one, as Consumer(servers, group='name')")
        return self._group

    # --- reading

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def messages(self, max_messages: int | None = None, timeout: float | None = None) -> Iterator[Message]:
        """The messages of all assigned partitions as they arrive.

        Args:
            max_messages: stop after this many.
            timeout: stop after this many seconds without a message.

        Raises:
            OffsetOutOfRange: the log does not have the position, with auto.offset.reset=error.
            CorruptBatch: the next batch is damaged. To continue, `seek` to the error's `facts["end_offset"]` (also in
                its sentence), if it is known.
            PartitionLost, FileRefused: a partition is not served until an operator acts; `failures` returns it, like
                all of these.
            UnknownTopic, UnknownTopicId: the topic was deleted.
            BrokerUnreachable, LeaderNotAvailable: it lasted for retry.timeout.ms; may be tried again.
        """
        return self._messages(None, max_messages, timeout, _Hand())

    def streams(self) -> list[MessageStream]:
        """A stream of messages for each assigned partition (the paper's message streams, section 3). Each may be
        iterated in its own thread."""
        return [MessageStream(self, partition) for partition in self._cursors]

    def _messages(
        self, only: TopicPartition | None, max_messages: int | None, timeout: float | None, hand: _Hand
    ) -> Iterator[Message]:
        self._check_open()
        arguments.seconds("timeout", timeout)
        if max_messages is not None:
            arguments.whole_number("max_messages", max_messages)
        try:
            if max_messages is None:
                while (cursor := self._next_rows(only, timeout, hand)) is not None:
                    for message in cursor.left:
                        hand.message = message
                        yield message
                return
            left = max_messages
            while left > 0:
                cursor = self._next_rows(only, timeout, hand)
                if cursor is None:
                    return
                # A seek may end the rows early, and another iterator may take some: count only those returned here.
                for left, message in zip(range(left - 1, -1, -1), cursor.left, strict=False):  # noqa: B007, B020
                    hand.message = message
                    yield message
            with self._fetcher.lock:
                hand.put_down()
        finally:
            hand.given_up = next(_moments)

    def arrow_batches(self, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """The records of all assigned partitions as they arrive, as Arrow batches, each of one partition, in order.

        Columns: topic (dictionary of strings), partition (int32), offset (int64), timestamp (us, UTC), key, value
        (binary), headers; see `decode.ARROW_SCHEMA`.

        Args:
            timeout: stop after this many seconds without a batch.

        Raises:
            KafkalogError: as `messages`.
        """
        return self._arrow_batches(timeout, _Hand())

    def _arrow_batches(self, timeout: float | None, hand: _Hand) -> Iterator[pa.RecordBatch]:
        self._check_open()
        arguments.seconds("timeout", timeout)
        try:
            while (batch := self._next_arrow(timeout, hand)) is not None:
                hand.is_unseen = False
                yield batch
        finally:
            hand.given_up = next(_moments)

    def _wanted(self, only: TopicPartition | None) -> Sequence[Source]:
        """Lock held: the sources to take from, as they are assigned now. Raises InvalidArgument if there is none."""
        for cursor in self._cursors.values():
            cursor.restart()
        if only is not None:
            return [self._cursor(only).source]
        if not self._cursors:
            raise InvalidArgument(reason="no partition is assigned to this consumer: call assign() first")
        return self._fetcher.sources

    def _next_rows(self, only: TopicPartition | None, timeout: float | None, hand: _Hand) -> _Cursor | None:
        """Wait for messages and return their cursor; `hand` has put down what it had, and is at the first of them."""
        with self._fetcher.lock:
            hand.put_down()
            cursors = [self._cursor(only)] if only is not None else list(self._cursors.values())
            for cursor in cursors:
                cursor.forget_given_up(hand)
            for cursor in cursors:
                if not cursor.is_through():
                    hand.take_from(cursor, cursor.next_offset())
                    return cursor
        return self._fetcher.next(partial(self._wanted, only), timeout, partial(self._take_rows, hand))

    def _take_rows(self, hand: _Hand, source: Source) -> _Cursor:
        """Lock held: make messages of what has arrived, for a hand."""
        cursor = self._by_source[source]
        cursor.settle()
        cursor.resume = cursor.next_offset()
        batches = source.take(_ROWS_AT_ONCE, _ANY)
        end_offset = batches[-1].header.end_offset
        # Only a part of a large batch: messages by the thousand stay in the processor's cache; all at once take 1.5
        # times as long. Opening the batch again for the rest costs 10 us.
        is_part = len(batches) == 1 and end_offset - batches[0].start_offset > 2 * _ROWS_AT_ONCE
        if is_part:
            end_offset = batches[0].start_offset + _ROWS_AT_ONCE
        rows: list[Message] = []
        for decoded in self._decoded(source, batches, end_offset):
            rows += messages(source.topic_partition, decoded)
        if is_part:
            source.put_back([batches[0]._replace(start_offset=end_offset)])
        end_offset, left = min(end_offset, batches[-1].header.end_offset), iter(rows)
        cursor.rows, cursor.left, cursor.batches, cursor.end_offset, cursor.resume = (
            rows,
            left,
            batches,
            end_offset,
            None,
        )
        hand.take_from(cursor, cursor.next_offset())
        return cursor

    def _next_arrow(self, timeout: float | None, hand: _Hand) -> pa.RecordBatch | None:
        with self._fetcher.lock:
            hand.put_down()
            for cursor in self._cursors.values():
                cursor.forget_given_up(hand)
                cursor.settle()
        return self._fetcher.next(partial(self._wanted, None), timeout, partial(self._take_arrow, hand))

    def _take_arrow(self, hand: _Hand, source: Source) -> pa.RecordBatch:
        """Lock held: one Arrow batch of what has arrived, for a hand."""
        cursor = self._by_source[source]
        cursor.settle()
        cursor.resume = cursor.next_offset()
        batches = source.take(_ARROW_ROWS, _ARROW_BYTES)
        decoded = list(self._decoded(source, batches))
        built = cursor.builder.build(decoded)
        hand.take_from(cursor, cursor.offset)
        cursor.offset, cursor.resume, hand.is_unseen = batches[-1].header.end_offset, None, True
        return built

    def _decoded(self, source: Source, batches: list[FetchedBatch], end_offset: int | None = None) -> Iterator[Decoded]:
        """Lock held: the batches' columns up to an offset. A damaged batch ends them; it and the rest are fetched
        again.

        Raises:
            CorruptBatch: the first one is damaged.
        """
        for number, batch in enumerate(batches):
            try:
                columns = decode(batch, source.topic_partition, end_offset)
            except CorruptBatch as error:
                source.put_back(batches[number:])
                del batches[number:]
                if number == 0:
                    source.failure = error
                    raise
                return
            yield Decoded(batch.header, columns, batch.start_offset)

    def _restart(self) -> None:
        """Lock held: restart all cursors, after the fetching thread was interrupted."""
        for cursor in self._cursors.values():
            cursor.resume = cursor.next_offset()
            cursor.restart()

    def _check_open(self) -> None:
        if self._fetcher.closed:
            raise Closed(what="consumer")

    def _after_fork_in_child(self) -> None:
        self._fetcher.after_fork_in_child()


def _behind(batch: pa.RecordBatch) -> dict[TopicPartition, int]:
    """The offset after an Arrow batch of `arrow_batches`, in its partition. Raises InvalidArgument."""
    names = getattr(getattr(batch, "schema", None), "names", ())
    if not {"topic", "partition", "offset"} <= set(names):
        raise InvalidArgument(
            reason=f"done is a {type(batch).__name__}, not a message, an Arrow batch of this consumer's, or a dict of "
            "offsets by TopicPartition"
        )
    last = batch.slice(batch.num_rows - 1).select(["topic", "partition", "offset"]).to_pylist()
    return {TopicPartition(each["topic"], each["partition"]): each["offset"] + 1 for each in last}


def _check_starts(starts: Mapping[TopicPartition, Any]) -> None:
    for partition, start in starts.items():
        if isinstance(start, AtTimestamp) or (isinstance(start, str) and start in _STARTS):
            continue
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise InvalidArgument(
                reason=f"{start!r} is not a start in {partition}: give 'earliest', 'latest', 'committed', an "
                "offset from 0, or AtTimestamp(us)"
            )
