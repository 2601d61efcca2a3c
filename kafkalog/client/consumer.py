"""Consuming: assigned partitions as iterators of messages or Arrow batches, in order for each partition.

Who reads what is assigned by the caller. The position is that behind the last message handed out; `commit` writes it
to ZooKeeper (through a broker), so that what is processed before it is committed is processed at least once. What is
fetched stands in the session (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kafkalog.client.admin import AtTimestamp, list_offsets
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import CONSUMER_SETTINGS, connection_settings
from kafkalog.client.decoding import ArrowBuilder, Decoded, messages
from kafkalog.client.fetcher import FetchedBatch, decode
from kafkalog.client.groups import commit_offsets, committed_offsets
from kafkalog.client.session import FetchSession, Source
from kafkalog.connection import after_fork
from kafkalog.errors import Closed, CorruptBatch, InvalidArgument, NoCommittedOffset
from kafkalog.records import Message, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

_STARTS = ("earliest", "latest", "committed")
_ROWS_AT_ONCE = 1000  # messages made in one go
_ARROW_ROWS = 10_000  # small batches are joined up to here
_ARROW_BYTES = 2 << 20
_ANY = 1 << 62


class _Cursor:
    """A partition's position, and the messages being handed out. Guarded by the session's lock.

    Attributes:
        position: the next offset, where nothing is being handed out.
        last: the message handed out last, whose offset then tells the position; None after a seek.
        rows: messages being handed out, `left` those of them that were not; `batches` what they were made of.
        end_offset: the position once `rows` are through.
    """

    __slots__ = ("batches", "builder", "end_offset", "last", "left", "position", "rows", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.builder = ArrowBuilder(source.topic_partition)
        self.position = self.end_offset = source.reader.offset
        self.last: Message | None = None
        self.rows: list[Message] = []
        self.left: Iterator[Message] = iter(self.rows)
        self.batches: Sequence[FetchedBatch] = ()

    def next_offset(self) -> int:
        return self.position if self.last is None else self.last.offset + 1

    def is_through(self) -> bool:
        """Whether all `rows` were handed out."""
        return not self.left.__length_hint__()  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Stop handing out; what was not handed out comes again."""
        if self.rows:
            if self.is_through():
                self.position = self.end_offset
            else:
                self.position = at = self.next_offset()
                left = [batch for batch in self.batches if batch.header.end_offset > at]
                arrived = self.source.arrived
                if arrived and arrived[0].data is left[-1].data:
                    self.source.take(1, 1)  # the rest of the same batch, which comes along
                self.source.put_back([batch._replace(start_offset=max(at, batch.start_offset)) for batch in left])
            self._forget()

    def seek(self, offset: int) -> None:
        self._forget()
        self.source.go_to(offset)
        self.position = offset

    def _forget(self) -> None:
        self.rows.clear()  # an iterator over them that somebody holds has ended
        self.rows = []
        self.left = iter(self.rows)
        self.batches = ()
        self.last = None


class MessageStream:
    """One partition's messages: an iterable that blocks while there is nothing, until the consumer is closed."""

    def __init__(self, consumer: Consumer, topic_partition: TopicPartition) -> None:
        self._consumer = consumer
        self.topic_partition = topic_partition

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def messages(self, max_messages: int | None = None, timeout: float | None = None) -> Iterator[Message]:
        """As `Consumer.messages`, of this partition."""
        return self._consumer._messages(self.topic_partition, max_messages, timeout)


class Consumer:
    """Reads assigned partitions. Thread-safe; a context manager; iterable over its messages.

    Iterators block while there is nothing to read, and end when the consumer is closed, from whatever thread.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        group: whose offsets are committed and start "committed" partitions.
        **settings: of `CONSUMER_SETTINGS`.

    Raises:
        UnknownSetting, InvalidSetting: of the settings.
    """

    def __init__(
        self, bootstrap_servers: str | Iterable[str] | Cluster, group: str | None = None, **settings: Any
    ) -> None:
        self._settings = CONSUMER_SETTINGS.parse(settings)
        self._group = group
        self._owns_cluster = not isinstance(bootstrap_servers, Cluster)
        self._cluster = (
            bootstrap_servers
            if isinstance(bootstrap_servers, Cluster)
            else Cluster(bootstrap_servers, connection_settings(self._settings))
        )
        self._session = FetchSession(self._cluster, self._settings)
        self._cursors: dict[TopicPartition, _Cursor] = {}
        self._by_source: dict[Source, _Cursor] = {}
        after_fork(self)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections. Iterators end, also those that other threads wait in.

        In a signal handler too: what was interrupted then lets go as it goes on.
        """
        self._session.close(self._cluster.close if self._owns_cluster else None)

    # --- what is read, and from where

    def assign(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> None:
        """Read these partitions from now on, and no others.

        Iterators go on with what is assigned then; a stream of a partition that is not fails with InvalidArgument.

        Args:
            starts: "earliest", "latest", "committed", an offset, or `AtTimestamp(us)`: the first record at or after it,
                the end if there is none.

        Raises:
            UnknownTopic, UnknownPartition, BrokerUnreachable.
            NoCommittedOffset: by "committed", with committed.fallback=error.
        """
        self._check_open()
        offsets = self._resolved({TopicPartition(*partition): start for partition, start in starts.items()})
        cursors = {}
        for partition, offset in offsets.items():
            topic = self._cluster.topic(partition.topic)
            topic.partition(partition.partition)
            cursors[partition] = _Cursor(Source(partition, topic.topic_id, offset))
        with self._session.lock:
            for cursor in self._cursors.values():
                cursor.settle()
            self._cursors = cursors
            self._by_source = {cursor.source: cursor for cursor in cursors.values()}
            self._session.set_sources(self._by_source)

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return list(self._cursors)

    def seek(self, partition: TopicPartition, where: str | int | AtTimestamp) -> None:
        """Go on elsewhere in a partition; `where` as in `assign`. What an iterator has at hand of it is dropped."""
        self._check_open()
        cursor = self._cursor(partition)
        [offset] = self._resolved({cursor.source.topic_partition: where}).values()
        with self._session.lock:
            cursor.seek(offset)
            self._session.wake()

    def position(self, partition: TopicPartition) -> int:
        """The offset behind the last message handed out: the next one, if there are no gaps."""
        cursor = self._cursor(partition)
        with self._session.lock:
            if cursor.rows and cursor.is_through() and cursor.last is cursor.rows[-1]:
                return cursor.end_offset
            return cursor.next_offset()

    def _cursor(self, partition: TopicPartition) -> _Cursor:
        cursor = self._cursors.get(TopicPartition(*partition))
        if cursor is None:
            raise InvalidArgument(reason=f"{TopicPartition(*partition)} is not assigned to this consumer (any more)")
        return cursor

    def _resolved(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> dict[TopicPartition, int]:
        """The offset of each start, looked up where it is symbolic."""
        wanted = dict(starts)
        for partition, start in wanted.items():
            if isinstance(start, AtTimestamp) or (isinstance(start, str) and start in _STARTS):
                continue
            if not isinstance(start, int) or isinstance(start, bool) or start < 0:
                raise InvalidArgument(
                    reason=f"{start!r} is no place to start in {partition}: 'earliest', 'latest', 'committed', an "
                    "offset from 0, or AtTimestamp(us)"
                )
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

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Write the group's offsets: those given, or the position of every assigned partition.

        Raises:
            InvalidArgument: the consumer has no group.
            UnknownTopic, UnknownPartition, BrokerUnreachable.
        """
        group = self._group_or_error()
        if offsets is None:
            offsets = {partition: self.position(partition) for partition in self._cursors}
        if offsets:
            commit_offsets(self._cluster, group, offsets)

    def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The group's committed offsets of some partitions, the assigned ones if None. Those without are left out."""
        group = self._group_or_error()
        wanted = [TopicPartition(*partition) for partition in (self._cursors if partitions is None else partitions)]
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
        """The messages of all assigned partitions as they come.

        Args:
            max_messages: stop after so many.
            timeout: stop after so many seconds without one.

        Raises:
            OffsetOutOfRange: the position is not in the log (any more), with auto.offset.reset=error.
            CorruptBatch: what comes next is damaged; `seek` behind it to go on.
            UnknownTopic, UnknownTopicId: the topic was deleted.
            BrokerUnreachable: for retry.timeout.ms. It can be tried again.
        """
        return self._messages(None, max_messages, timeout)

    def streams(self) -> list[MessageStream]:
        """A stream of messages for each assigned partition; each may be iterated in a thread of its own."""
        return [MessageStream(self, partition) for partition in self._cursors]

    def _messages(
        self, only: TopicPartition | None, max_messages: int | None, timeout: float | None
    ) -> Iterator[Message]:
        self._check_open()
        if max_messages is None:
            while (cursor := self._next_rows(only, timeout)) is not None:
                for message in cursor.left:
                    cursor.last = message
                    yield message
            return
        left = max_messages
        while left > 0:
            cursor = self._next_rows(only, timeout)
            if cursor is None:
                return
            # A seek may end the rows early, and another iterator take some of them: what is handed out here is counted.
            for left, message in zip(range(left - 1, -1, -1), cursor.left, strict=False):  # noqa: B007, B020
                cursor.last = message
                yield message

    def arrow_batches(self, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """The records of all assigned partitions as they come, as Arrow: each batch from one partition, in order.

        Columns: topic (dictionary), partition, offset, timestamp, key, value, headers; see `decoding.ARROW_SCHEMA`.

        Args:
            timeout: stop after so many seconds without one.

        Raises:
            As `messages`.
        """
        self._check_open()
        while (batch := self._next_arrow(timeout)) is not None:
            yield batch

    def _wanted(self, only: TopicPartition | None) -> Sequence[Source]:
        """Lock held: the sources to take from, as they are assigned now. Raises InvalidArgument if there is none."""
        if only is not None:
            return [self._cursor(only).source]
        if not self._cursors:
            raise InvalidArgument(reason="no partition is assigned to this consumer: call assign() first")
        return self._session.sources

    def _next_rows(self, only: TopicPartition | None, timeout: float | None) -> _Cursor | None:
        """A cursor with messages to hand out, waiting for one."""
        with self._session.lock:
            for cursor in [self._cursor(only)] if only is not None else self._cursors.values():
                if not cursor.is_through():
                    return cursor
        return self._session.next(partial(self._wanted, only), timeout, self._take_rows)

    def _take_rows(self, source: Source) -> _Cursor:
        """Lock held: make messages of what has arrived."""
        cursor = self._by_source[source]
        cursor.settle()
        batches = source.take(_ROWS_AT_ONCE, _ANY)
        end_offset = batches[-1].header.end_offset
        # Of a large batch a part: messages by the thousand stay in the processor's cache, all at once take 1.5 times as
        # long. To open the batch again for the rest costs 10 us.
        is_part = len(batches) == 1 and end_offset - batches[0].start_offset > 2 * _ROWS_AT_ONCE
        if is_part:
            end_offset = batches[0].start_offset + _ROWS_AT_ONCE
        rows: list[Message] = []
        for decoded in self._decoded(source, batches, end_offset):
            rows += messages(source.topic_partition, decoded)
        if is_part:
            source.put_back([batches[0]._replace(start_offset=end_offset)])
        cursor.rows, cursor.left, cursor.batches = rows, iter(rows), batches
        cursor.end_offset = min(end_offset, batches[-1].header.end_offset)
        return cursor

    def _next_arrow(self, timeout: float | None) -> pa.RecordBatch | None:
        with self._session.lock:
            for cursor in self._cursors.values():
                cursor.settle()
        return self._session.next(partial(self._wanted, None), timeout, self._take_arrow)

    def _take_arrow(self, source: Source) -> pa.RecordBatch:
        """Lock held: one Arrow batch of what has arrived."""
        cursor = self._by_source[source]
        batches = source.take(_ARROW_ROWS, _ARROW_BYTES)
        decoded = list(self._decoded(source, batches))
        cursor.position = batches[-1].header.end_offset
        return cursor.builder.build(decoded)

    def _decoded(self, source: Source, batches: list[FetchedBatch], end_offset: int | None = None) -> Iterator[Decoded]:
        """Lock held: the batches' columns up to an offset. One that is damaged ends them; it and the rest come again.

        Raises:
            CorruptBatch: the first one is damaged.
        """
        for number, batch in enumerate(batches):
            try:
                columns = decode(batch, source.topic_partition, end_offset)
            except CorruptBatch:
                source.put_back(batches[number:])
                del batches[number:]
                if number == 0:
                    raise
                return
            yield Decoded(batch.header, columns, batch.start_offset)

    def _check_open(self) -> None:
        if self._session.closed:
            raise Closed(what="consumer")

    def after_fork_in_child(self) -> None:
        self._session.after_fork_in_child()
