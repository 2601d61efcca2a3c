"""Consuming: partitions as iterators of messages or Arrow batches, in order for each partition.

The caller assigns the partitions (`assign`), or subscribes to topics as a member of a group, which shares their
partitions among its members (`subscribe`). `commit` writes positions to ZooKeeper (through a broker). A message that
was handed out counts as processed when the next one is asked for. So a partition's position is the first message that
is being processed, or that was not handed out. A commit, from any thread, never includes a message that is still being
processed: everything is processed at least once. If an iterator is left in the middle (by `break`, by an error), its
last message counts as processed when an iterator created later is asked for a message; iterators of other threads do
not affect this. Progress is in `cursors.py`, fetched records are in `fetcher.py`, membership in `membership.py`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kafkalog.client import arguments
from kafkalog.client.admin import AtTimestamp, list_offsets
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import ConsumerSettings, connection_settings
from kafkalog.client.consumer.callbacks import Callback, InCallback, Subscription
from kafkalog.client.consumer.cursors import (
    Called,
    Cursor,
    Cursors,
    Going,
    Hand,
    Hold,
    Lease,
    Part,
    Share,
    Streams,
    Taken,
    joined,
)
from kafkalog.client.consumer.fetcher import Fetcher, Source
from kafkalog.client.consumer.membership import Membership
from kafkalog.client.consumer.partition_fetch import NO_EPOCH
from kafkalog.client.groups import Writer, commit_offsets, committed_offsets, offsets_with_epochs
from kafkalog.errors import Closed, InvalidArgument, KafkalogError, NoCommittedOffset, UnknownTopic, UnknownTopicId
from kafkalog.net.forks import after_fork
from kafkalog.patterns import matcher
from kafkalog.records import Message, Messages, TopicPartition, lasts_of

if TYPE_CHECKING:
    import pyarrow as pa

READING_CALLBACK = "a callback of a subscription cannot read: the call that called it is reading"
_FLAGS = {re.IGNORECASE: "i", re.DOTALL: "s", re.MULTILINE: "m"}
_LEAVE_SECONDS = 2.0
_STARTS = ("earliest", "latest", "committed")
_Found = TypeVar("_Found")


class MessageStream:
    """The messages of one partition, or of a share of the consumer's partitions: an iterable that blocks while there is
    no record, and ends when the consumer is closed.

    Attributes:
        topic_partition: None: it is one of several streams over all partitions.
    """

    def __init__(self, consumer: Consumer, part: TopicPartition | Share) -> None:
        self._consumer = consumer
        self._part = part
        self.topic_partition = part if isinstance(part, TopicPartition) else None

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def messages(self, max_messages: int | None = None, timeout: float | None = None) -> Iterator[Message]:
        """As `Consumer.messages`, of this stream."""
        return self._consumer._messages(self._part, max_messages, timeout, Hand())


class Consumer:
    """Reads partitions: those that the caller assigns, or its share of those that a group subscribes to. Thread-safe; a
    context manager; iterable over its messages.

    The pull consumer of the paper's section 3.1; `subscribe` is its section 3.2. Delivery is at least once (section
    3.3): a record is read again if it was not committed.

    Iterators block while there is no record to read, and end when the consumer is closed, in any thread.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between; or a `Cluster`, which is
            then shared and not closed.
        group: the name under which offsets are committed, from which "committed" partitions start, and which
            `subscribe` joins.
        **settings: of `ConsumerSettings`.

    Raises:
        UnknownSetting, InvalidSetting: of the settings.
        InvalidArgument: the group's name.
    """

    def __init__(
        self, bootstrap_servers: str | Iterable[str] | Cluster, group: str | None = None, **settings: Any
    ) -> None:
        self._settings = ConsumerSettings.parse(settings)
        self._group = None if group is None else arguments.name("group", group)
        self._owns_cluster = not isinstance(bootstrap_servers, Cluster)
        self._cluster = (
            bootstrap_servers
            if isinstance(bootstrap_servers, Cluster)
            else Cluster(bootstrap_servers, connection_settings(self._settings))
        )
        self._cursors = Cursors(lambda restart: Fetcher(self._cluster, self._settings, restart))
        self._fetcher = self._cursors.fetcher
        self._membership: Membership | None = None
        self._wanted: Membership | None = None  # to be joined when `_membership` has left
        self._closing = False
        self._in_callback = InCallback()
        self._polled: list[Hand] = []
        self._polled_by = 0  # the thread that called `poll` or `consume` last
        self._polling: Iterator[Message] = iter(())  # the rest of what the hand is at
        self._polling_lease: Lease | None = None
        # The id of every topic ever assigned, as assigned last: records of a topic that is no longer read may still be
        # committed, and a topic created again under the name must not get their offsets.
        self._topic_ids: dict[str, bytes] = {}
        self._writer = Writer()
        after_fork(self, Consumer._after_fork_in_child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, timeout: float = 2.0) -> None:
        """Leave the group, and close the connections. Iterators end, also those in which other threads wait.

        A subscribed consumer calls `on_revoked`, commits its position with enable.auto.commit, and leaves its group, so
        that others get its partitions at once. The position is before a record that was handed out last and not handed
        back. An assigned consumer commits nothing.

        May be called in a signal handler: the interrupted call then closes the connections when it continues.

        Args:
            timeout: seconds to wait at most for a thread that waits for a broker's answer (it ends as soon as it
                notices the close), for a callback that runs in another thread, and for another thread's `close`.
        """
        self._closing = True
        self._leave(self._membership, timeout)

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
            InvalidArgument: the consumer is subscribed.
        """
        self._check_open()
        self._check_not_subscribed("assign")
        wanted = arguments.by_partition("starts", starts)
        _check_starts(wanted)
        names = {partition.topic for partition in wanted}
        # Not from the cache: a topic may have been created again since, and then has another id.
        topics = {topic.name: topic for topic in self._cluster.describe_topics(names)} if names else {}
        for partition in wanted:
            topics[partition.topic].partition(partition.partition)
        epochs: dict[TopicPartition, int | None] = {}
        starts_at = self._resolved(wanted, epochs)
        cursors = {
            partition: Cursor(Source(partition, topics[partition.topic].topic_id, offset, epochs.get(partition)))
            for partition, offset in starts_at.items()
        }
        with self._fetcher.lock:
            self._topic_ids |= {topic: cursor.source.reader.topic_id for (topic, _), cursor in cursors.items()}
            self._cursors.replace(cursors)

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions; the others are not affected. Partitions that are not assigned are ignored."""
        self._check_open()
        self._check_not_subscribed("unassign")
        self._cursors.remove(arguments.partitions("partitions", partitions))

    def subscribe(
        self,
        topics: str | re.Pattern[str] | Iterable[str],
        *,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        """Read these topics as a member of the group, which shares their partitions among its members (the paper's
        section 3.2; docs/GROUPS.md).

        Returns at once; partitions come and go while records are asked for. A partition starts at the group's committed
        offset, or by `auto.offset.reset` if there is none; one that is added to a topic later starts at 0. Partitions
        that stay are read on while others move. Replaces an earlier subscription.

        The callbacks are called with this consumer and a list of partitions, in a thread that reads (or closes): in it
        they may `seek`, `commit` and `pause`, but not read. If one raises, so does the call that called it. A consumer
        that a callback refers to, as a method of an object that has it does, is not collected: `close` it.

        Args:
            topics: names; or a compiled regular expression that a whole name matches. A name that begins with ^ is a
                regular expression that the beginning of a name matches, as in Kafka's Python client. Brokers match
                them by RE2, see `patterns.py`.
            on_assigned: called with partitions before the first record of them is handed out. Here offsets that are
                kept elsewhere are sought.
            on_revoked: called with partitions that others are to read, after their last record was handed back. Their
                offsets can still be committed.
            on_lost: called with partitions that others may read already, because this member sent no heartbeat in time.
                Their offsets can not be committed any more.

        Raises:
            InvalidArgument: the consumer has no group, or has partitions assigned by `assign`.
            Closed: the consumer is closed, perhaps meanwhile.
            OutOfThreads: no thread could be started; the consumer is not subscribed.
        """
        group = self._group_or_error()
        names, pattern = _topics_or_pattern(topics)
        subscription = Subscription(names, pattern, on_assigned, on_revoked, on_lost)
        wanted = Membership(self._cluster, self._cursors, self, group, self._settings, subscription, self._in_callback)
        self._check_not_closing()
        if self._membership is None and self._cursors.by_partition:
            raise InvalidArgument(
                reason="this consumer has assigned partitions: unassign them, or use another consumer"
            )
        self._replace_membership(wanted)
        self._check_not_closing()  # as a callback, a signal's handler or another thread may do meanwhile

    def unsubscribe(self) -> None:
        """Leave the group; as `close`, but the consumer stays open."""
        self._replace_membership(None)

    def _replace_membership(self, wanted: Membership | None) -> None:
        """Leave the group, then join it as wanted; or as wanted last, by a callback, a signal's handler or another
        thread meanwhile: whoever has left joins."""
        try:
            last, self._wanted = self._membership, wanted  # at once: a later call's membership is not to be left
            self._leave(last, _LEAVE_SECONDS)
        except BaseException:
            if self._wanted is wanted:
                self._wanted = None
            raise
        finally:
            self._join()
            if self._closing:  # by a signal's handler, perhaps above a lock, where it could not close everything
                self._leave(self._membership, _LEAVE_SECONDS)

    def _join(self) -> None:
        """Become the member that is wanted, unless the last one has not left, or `close` was called."""
        wanted: Membership | None = None
        try:
            with self._fetcher.lock:
                if self._membership is None and not self._closing:
                    wanted, self._wanted = self._wanted, None
                    self._membership = wanted
                    if wanted is not None:
                        wanted.attach()
            if wanted is not None:
                wanted.start()
        except BaseException:
            if wanted is not None and self._membership is wanted:
                self._leave(wanted, _LEAVE_SECONDS)
            raise
        finally:
            with self._fetcher.lock:
                # No call in between, so no signal's handler either.
                is_leaving = self._membership is None or self._membership.is_stopping
                self._cursors.may_be_empty = not is_leaving or self._wanted is not None
                self._fetcher.call()  # who waits for records is a reader of this membership from now on

    def _leave(self, membership: Membership | None, timeout: float) -> None:
        """Leave the group, then close the connections if `close` was called. In a callback of a call that leaves, and
        in a signal's handler above one, do nothing: that call does it."""
        if membership is not None and membership.is_stopping_here():
            return
        try:
            if membership is not None:
                membership.stop(timeout)
        finally:
            if self._closing:
                self._fetcher.close(self._cluster.close if self._owns_cluster else None, timeout)
                self._cursors.call()  # ends the rows that are being handed out: who iterates over them looks at nothing
            elif membership is not None and membership.has_left and self._membership is membership:
                self._membership = None

    def _check_not_subscribed(self, what: str) -> None:
        if self._membership is not None:
            raise InvalidArgument(
                reason=f"this consumer is subscribed, so its group assigns its partitions: {what}() needs unsubscribe()"
            )

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of partitions until `resume`. They stay assigned, and what was fetched is kept.

        A partition that a subscribed consumer does not read now is ignored: its group may just have moved it. It is not
        paused when it comes back.

        Raises:
            InvalidArgument: a partition is not assigned, or not of a topic that is subscribed to.
        """
        self._hold(partitions, self._cursors.hold)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of paused partitions again; those that are not paused are ignored.

        Raises:
            InvalidArgument: as `pause`.
        """
        self._hold(
            partitions,
            lambda wanted, why: self._cursors.let_go([self._cursors.by_partition[each] for each in wanted], why),
        )

    def _hold(
        self, partitions: Iterable[TopicPartition], how: Callable[[Iterable[TopicPartition], Hold], None]
    ) -> None:
        self._check_open()
        wanted = arguments.partitions("partitions", partitions)
        membership = self._membership
        with self._fetcher.lock:
            for partition in wanted:
                if membership is None or not membership.has(partition):
                    self._cursors.of(partition)
            how([partition for partition in wanted if partition in self._cursors.by_partition], Hold.PAUSED)

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        with self._fetcher.lock:
            return [p for p, cursor in self._cursors.by_partition.items() if cursor.hold & Hold.PAUSED]

    def failures(self) -> dict[TopicPartition, KafkalogError]:
        """The last error that an iterator raised for each assigned partition, since its assignment or last `seek`. To
        continue with the others, `unassign` these; otherwise they are tried again."""
        with self._fetcher.lock:
            return {
                partition: cursor.source.failure
                for partition, cursor in self._cursors.by_partition.items()
                if cursor.source.failure is not None
            }

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return list(self._cursors.by_partition)

    def awaited(self) -> set[TopicPartition] | None:
        """Of a subscribed consumer: the partitions that its group has assigned to it and that it does not read yet,
        because other members still read them or their start is being looked up. None: it is no member of the group
        now, but joins it."""
        self._check_open()
        membership = self._membership
        return set() if membership is None else membership.awaited()

    def seek(self, partition: TopicPartition, where: str | int | AtTimestamp) -> None:
        """Continue elsewhere in a partition; `where` as in `assign`. Fetched records of it are dropped."""
        self._check_open()
        cursor = self._cursor(partition)
        _check_starts({partition: where})
        [offset] = self._resolved({cursor.source.topic_partition: where}, {}).values()
        self._cursors.seek(cursor, offset)

    def position(self, partition: TopicPartition) -> int:
        """The offset before which every record is processed.

        That is the offset of the message that an iterator returned last, until the iterator is asked for the next
        one; then that of the next message. If a loop is left in the middle (by `break`, by an error), its message
        counts as processed when a later iterator is asked for a message. Iterators of other threads do not affect
        this.
        """
        cursor = self._cursor(partition)
        positions = self._cursors.positions([cursor.source.topic_partition])
        if not positions:
            setting = "auto.offset.reset"
            raise NoCommittedOffset(group=self._group, partition=str(cursor.source.topic_partition), setting=setting)
        return positions[cursor.source.topic_partition]

    def _cursor(self, partition: TopicPartition) -> Cursor:
        return self._cursors.of(arguments.partition(partition))

    def _resolved(
        self, starts: Mapping[TopicPartition, str | int | AtTimestamp], epochs: dict[TopicPartition, int | None]
    ) -> dict[TopicPartition, int]:
        """The offset of each start, looked up where it is symbolic.

        Args:
            epochs: filled with the leader epochs in which what is before committed offsets was read.
        """
        wanted = dict(starts)
        from_group = [partition for partition, start in wanted.items() if start == "committed"]
        if from_group:
            wanted |= self._committed_or_fallback(from_group, epochs)
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

    def _committed_or_fallback(
        self, partitions: Sequence[TopicPartition], epochs: dict[TopicPartition, int | None]
    ) -> dict[TopicPartition, int | str]:
        topics = sorted({partition.topic for partition in partitions})
        committed = offsets_with_epochs(self._cluster, self._group_or_error(), topics)
        found: dict[TopicPartition, int | str] = {}
        for partition in partitions:
            if partition in committed:
                found[partition], epochs[partition] = committed[partition]
            elif self._settings.committed_fallback == "error":
                raise NoCommittedOffset(group=self._group, partition=str(partition))
            else:
                found[partition] = self._settings.committed_fallback
        return found

    # --- group offsets

    def commit(
        self, done: Mapping[TopicPartition, int] | Message | Sequence[Message] | pa.RecordBatch | None = None
    ) -> None:
        """Write the group's offsets, from any thread.

        Auto commit undoes no offset that was named here: it goes on where the position has moved past it, or was
        sought.

        Args:
            done: None: the position of every assigned partition, see `position`; what was handed out last is not
                processed by it. Of a subscribed consumer's partitions it leaves out those that go to other members just
                now, and those of which a later offset was committed by name. A message, the messages of `consume`, or
                an Arrow batch: the offset after it, or after the last of each partition; use this where they are
                processed. Messages of a topic that was created again meanwhile, of which the new one is read, are left
                out. Or a dict of offsets by TopicPartition.

        Raises:
            InvalidArgument: the consumer has no group.
            UnknownTopicId: a topic was deleted and created again since it was assigned; nothing was written. `assign`
                it again to read and commit the new one.
            UnknownTopic, UnknownPartition: it does not exist.
            NotOwner: the consumer is subscribed, and a partition is not its own (any more): another member goes on from
                the last commit. Nothing was written, of more than 498 partitions perhaps some. With None: it was no
                longer a member after it had handed out records, and has asked for none since.
            GroupIsSubscribed: the consumer is not subscribed, and other members of the group are.
            BrokerUnreachable: no broker answers.
        """
        group, membership = self._group_or_error(), self._membership
        if done is None and membership is not None:
            membership.commit_positions()
            return
        offsets: Mapping[TopicPartition, int]
        if done is None:
            with self._fetcher.lock:
                offsets = self._cursors.positions(self.assignment())
                cursors = self._cursors.by_partition
                epochs = {partition: cursors[partition].read_in() for partition in offsets if partition in cursors}
        else:
            offsets, epochs = _named(done, self._is_of_another_topic)
        if not offsets:
            return
        if membership is not None:
            membership.commit(offsets, epochs)
            return
        with self._fetcher.lock:
            epochs = self._cursors.epochs_of(offsets) | epochs
        commit_offsets(self._cluster, group, offsets, self._topic_ids, self._writer, epochs)

    def _is_of_another_topic(self, message: Message) -> bool:
        """Whether another topic of the name of a message's has been created since, and is read."""
        with self._fetcher.lock:
            cursor = self._cursors.by_partition.get(TopicPartition(message.topic, message.partition))
        read = self._topic_ids.get(message.topic) if cursor is None else cursor.source.reader.topic_id
        return read is not None and message.topic_id not in (b"", read)

    def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The group's committed offsets of partitions (None: the assigned ones); those without one are left out."""
        group = self._group_or_error()
        wanted = arguments.partitions("partitions", self.assignment() if partitions is None else partitions)
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
            timeout: stop after this many seconds without a message; None or negative: never.

        Raises:
            OffsetOutOfRange: the log does not have the position, with auto.offset.reset=error.
            CorruptBatch: the next batch is damaged. To continue, `seek` to the error's `facts["end_offset"]` (also in
                its sentence), if it is known.
            PartitionLost, FileRefused: a partition is not served until an operator acts; `failures` returns it, like
                all of these.
            UnknownTopic, UnknownTopicId: the topic was deleted. A subscribed consumer is told by its group instead.
            BrokerUnreachable, LeaderNotAvailable: it lasted for retry.timeout.ms; may be tried again.
        """
        return self._messages(None, max_messages, timeout, Hand())

    def streams(self, count: int | None = None) -> list[MessageStream]:
        """Streams of messages, each of which may be iterated in its own thread (the paper's message streams, section
        3).

        Args:
            count: so many streams, which share the partitions that are assigned at any time; none goes to another
                stream while a record of it is being processed. Read every one of them: partitions of a stream that asks
                for no record for max.poll.interval.ms go to the others. None: one for each partition that is assigned
                now.

        Raises:
            InvalidArgument: `count` is None, and the consumer is subscribed, so that its partitions come and go.
        """
        if count is not None:
            shared = Streams(_at_least_one("count", count), self._settings.max_poll_interval_ms / 1000)
            return [MessageStream(self, Share(number, shared)) for number in range(count)]
        if self._membership is not None:
            raise InvalidArgument(
                reason="this consumer is subscribed, so its partitions come and go: streams() needs a count, as "
                "streams(2)"
            )
        return [MessageStream(self, partition) for partition in self.assignment()]

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next message; the one before counts as processed. For one thread; others use `streams`.

        Args:
            timeout: seconds to wait at most; None or negative: until there is one.

        Returns:
            None after `timeout` seconds without a message, or when closed.

        Raises:
            KafkalogError: as `messages`.
        """
        end: float | None = None
        while True:
            lease = self._polling_lease
            if lease is None or time.monotonic() < lease.end:
                for message in self._polling:  # not by next(): see cursors.py
                    [hand] = self._polled
                    hand.message = message
                    return message
            if end is None:
                self._check_may_read()
                timeout = arguments.seconds("timeout", timeout)
                self._note_asked()
                end = math.inf if timeout is None else time.monotonic() + timeout
            if not self._find_polled(end):
                return None

    def _find_polled(self, end: float) -> bool:
        """Wait until there are messages to poll, or for the end (monotonic). Returns whether there are."""
        hand = Hand()
        self._put_polled_down(hand)
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        cursor = self._next(self._cursors.next_rows, None, left, hand)
        if cursor is not None:
            self._note_got(hand)
            self._polling, self._polling_lease = cursor.messages(), cursor.lease
        return cursor is not None

    def _put_polled_down(self, *hands: Hand) -> None:
        """What `poll` or `consume` returned last is processed; what an interrupted `consume` did not return is fetched
        again. It returns what these hands take next."""
        self._cursors.give_back([hand for hand in self._polled if hand.is_unseen])
        with self._fetcher.lock:
            for hand in self._polled:
                self._cursors.put_hand_down(hand)
        self._polled, self._polling = list(hands), iter(())
        self._polled_by = threading.get_ident()

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> Messages:
        """The next messages, up to a number; those before count as processed. For one thread; others use `streams`.

        If it is interrupted, or a callback raises, the messages that had come are returned by a later call.

        Args:
            num_messages: to return at most, and to wait for.
            timeout: seconds to wait at most; None or negative: until there are that many.

        Returns:
            fewer after `timeout` seconds, or when closed, or when another member of the group is to read a partition of
            theirs. If a thousand or more were asked for, the sequence holds the fetched memory until it is released.

        Raises:
            KafkalogError: as `messages`. Messages that had come before it are returned first.
        """
        self._check_may_read()
        timeout = arguments.seconds("timeout", timeout)
        left = _at_least_one("num_messages", num_messages)
        self._note_asked()
        end = None if timeout is None else time.monotonic() + timeout
        self._put_polled_down()
        taken: list[Taken] = []
        try:
            while left > 0:
                hand = Hand()
                earlier = tuple(self._polled)
                take = partial(self._cursors.next_messages, left, taken=earlier, together=num_messages)
                self._polled.append(hand)
                seconds = None if end is None else max(0.0, end - time.monotonic())
                try:
                    found = self._next(take, None, seconds, hand)
                except Going:
                    taken = [each for each in taken if not self._is_late(each.cursor, each.first_offset)]
                    if taken:
                        break
                    self._put_polled_down()  # the lease has ended: begin anew
                    left = num_messages
                    continue
                except KafkalogError as error:
                    if taken and not self._is_of_callback(error):
                        break
                    raise
                if found is None:
                    break
                if found.parts:  # else another thread was faster
                    taken.append(found)
                    left -= found.records
            for hand in self._polled:
                self._note_got(hand)
            # Only now: the lease may have ended while this thread waited for more.
            in_time = [each for each in taken if not self._is_late(each.cursor, each.first_offset)]
            messages = joined(in_time)
            lease = taken[-1].cursor.lease if taken else None
            for hand in self._polled:
                hand.is_unseen = False
            # A signal's handler or another thread may have closed the consumer after the last look; here none comes in
            # between.
            if lease is None or lease.end >= 0:
                return messages
            self._cursors.give_back(self._polled)
        except BaseException:
            self._cursors.give_back(self._polled)
            raise
        return Messages()

    def _is_late(self, cursor: Cursor, offset: int) -> bool:
        """Whether messages from an offset on may not be handed out, because the lease has ended. They are fetched again
        then."""
        if not cursor.has_ended():
            return False
        self._cursors.take_back(cursor, offset)
        return True

    def _messages(self, part: Part, max_messages: int | None, timeout: float | None, hand: Hand) -> Iterator[Message]:
        self._check_open()
        timeout = arguments.seconds("timeout", timeout)
        if max_messages is not None:
            arguments.whole_number("max_messages", max_messages)
        try:
            now = time.monotonic
            self._note_asked()
            if max_messages is None:
                while (cursor := self._next(self._cursors.next_rows, part, timeout, hand)) is not None:
                    self._note_got(hand)
                    lease = cursor.lease
                    if lease is None:
                        for message in cursor.messages():
                            hand.message = message
                            yield message
                    elif not lease.has_ended():
                        for message in cursor.messages():
                            hand.message = message
                            yield message
                            if now() >= lease.end:  # here: see cursors.py
                                break
                        if hand.message is not None:
                            self._note_asked()
                return
            left = max_messages
            while left > 0:
                cursor = self._next(self._cursors.next_rows, part, timeout, hand)
                if cursor is None:
                    return
                self._note_got(hand)
                lease = cursor.lease
                if lease is not None and lease.has_ended():
                    continue
                # A seek may end the rows early, and another iterator may take some: count those returned here. The
                # range is asked first: when it ends, no message is taken that nobody gets.
                for after, message in zip(range(left - 1, -1, -1), cursor.messages(), strict=False):
                    hand.message = message
                    left = after
                    yield message
                    if lease is not None and now() >= lease.end:
                        break
                if left > 0 and hand.message is not None:  # else it wants no more
                    self._note_asked()
            with self._fetcher.lock:
                self._cursors.put_hand_down(hand)
                self._fetcher.call()  # others may have what is left of its rows
        finally:
            hand.give_up()
            if hand.cursor is not None:
                self._fetcher.wake()  # as above; no lock, because this may be the garbage collector's call

    def _note_asked(self) -> None:
        """A call of the application begins that asks for a record."""
        if (membership := self._membership) is not None:
            membership.note_asked()

    def _note_got(self, hand: Hand) -> None:
        """The application gets what is in hand, unless its lease has ended: look at that after this."""
        if (membership := self._membership) is not None:
            membership.note_got(hand)

    def _next(
        self, take: Callable[[Part, float | None, Hand], _Found | None], part: Part, timeout: float | None, hand: Hand
    ) -> _Found | None:
        """What `take` returns, a method of the cursors. Callbacks of the subscription run in between."""
        self._check_not_in_callback()
        if self._polled and hand not in self._polled and self._polled_by == threading.get_ident():
            self._put_polled_down()  # this thread has gone over to an iterator
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            membership = self._membership
            if membership is not None:
                membership.serve()
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                with nullcontext() if membership is None else membership.reading():
                    found = take(part, left, hand)
                return None if self._fetcher.closed else found  # a signal's handler may have closed it amid the taking
            except Called:
                continue
            except (UnknownTopic, UnknownTopicId) as error:
                if membership is None or not membership.note_gone(error):
                    raise

    def arrow_batches(self, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """The records of all assigned partitions as they arrive, as Arrow batches, each of one partition, in order.

        Columns: topic (dictionary of strings), partition (int32), offset (int64), timestamp (us, UTC), key, value
        (binary), headers; see `decode.ARROW_SCHEMA`.

        Args:
            timeout: stop after this many seconds without a batch; None or negative: never.

        Raises:
            KafkalogError: as `messages`.
        """
        return self._arrow_batches(timeout, Hand())

    def _arrow_batches(self, timeout: float | None, hand: Hand) -> Iterator[pa.RecordBatch]:
        self._check_open()
        timeout = arguments.seconds("timeout", timeout)
        try:
            self._note_asked()
            while (batch := self._next(self._cursors.next_arrow, None, timeout, hand)) is not None:
                self._note_got(hand)
                cursor = hand.cursor
                lease = None if cursor is None else cursor.lease
                if cursor is None or (lease is not None and (lease.has_ended() or lease.end < 0)):  # as in `consume`
                    hand.give_up()  # unseen: it is fetched again
                    hand = Hand()
                    continue
                hand.is_unseen = False
                yield batch
                self._note_asked()
        finally:
            hand.give_up()

    def _check_open(self) -> None:
        if self._fetcher.closed:
            raise Closed(what="consumer")

    def _check_not_closing(self) -> None:
        if self._closing:
            raise Closed(what="consumer")

    def _check_may_read(self) -> None:
        self._check_open()
        self._check_not_in_callback()

    def _is_of_callback(self, error: BaseException) -> bool:
        membership = self._membership
        return membership is not None and membership.callbacks.has_raised(error)

    def _check_not_in_callback(self) -> None:
        if self._in_callback.here:
            raise InvalidArgument(reason=READING_CALLBACK)

    def _after_fork_in_child(self) -> None:
        membership, self._membership = self._membership, None
        self._fetcher.after_fork_in_child()
        self._writer = Writer()
        if membership is not None:
            membership.abandon()


def _named(
    done: Mapping[TopicPartition, int] | Message | Sequence[Message] | pa.RecordBatch,
    is_of_another_topic: Callable[[Message], bool],
) -> tuple[Mapping[TopicPartition, int], dict[TopicPartition, int | None]]:
    """The offsets that `commit` is given, and the leader epochs that came with them. Raises InvalidArgument."""
    if isinstance(done, Mapping):
        return arguments.offsets("done", done), {}
    if not isinstance(done, Sequence):
        return _behind(done), {}
    latest: dict[tuple[str, int, bytes], Message] = {}
    if isinstance(done, Message | TopicPartition):
        done = [done]  # one of a partition is refused below
    for message in lasts_of(done) if isinstance(done, Messages) else done:
        if isinstance(message, TopicPartition):
            raise InvalidArgument(reason=f"{message} has no offset to commit: give a dict of offsets by TopicPartition")
        if not isinstance(message, Message):
            raise InvalidArgument(reason=f"done has a {type(message).__name__} among its messages")
        key = message.topic, message.partition, message.topic_id
        before = latest.get(key)
        # After a cut of the log, what was read later may have a smaller offset: its epoch is the later one.
        if before is None or (message.leader_epoch, message.offset) > (before.leader_epoch, before.offset):
            latest[key] = message
    last = {
        TopicPartition(message.topic, message.partition): message
        for message in latest.values()
        if not is_of_another_topic(message)
    }
    offsets = {partition: message.offset + 1 for partition, message in last.items()}
    return offsets, {p: message.leader_epoch for p, message in last.items() if message.leader_epoch != NO_EPOCH}


def _behind(batch: pa.RecordBatch) -> dict[TopicPartition, int]:
    """The offset after an Arrow batch of `arrow_batches`, in its partition. Raises InvalidArgument."""
    names = getattr(getattr(batch, "schema", None), "names", ())
    if not {"topic", "partition", "offset"} <= set(names):
        raise InvalidArgument(
            reason=f"done is a {type(batch).__name__}, not a message, an Arrow batch of this consumer's, or a dict of "
            "offsets by TopicPartition"
        )
    if not batch.num_rows:
        return {}
    last = batch.slice(batch.num_rows - 1).select(["topic", "partition", "offset"]).to_pylist()
    return {TopicPartition(each["topic"], each["partition"]): each["offset"] + 1 for each in last}


def _at_least_one(name: str, value: int) -> int:
    if arguments.whole_number(name, value) < 1:
        raise InvalidArgument(reason=f"{name} must be at least 1, not {value}")
    return value


def _topics_or_pattern(topics: str | re.Pattern[str] | Iterable[str]) -> tuple[tuple[str, ...], str]:
    """The names to subscribe to, or a regular expression that a whole name matches. Raises InvalidArgument."""
    if isinstance(topics, re.Pattern):
        return (), _checked(_flags(topics) + topics.pattern)
    names = (topics,) if isinstance(topics, str) else arguments.texts("topics", topics)
    if not names:
        raise InvalidArgument(reason="topics is empty: name at least one to subscribe to")
    if not any(name.startswith("^") for name in names):
        return tuple(sorted(set(names))), ""
    parts = [f"(?:{name}).*" if name.startswith("^") else re.escape(name) for name in names]
    pattern = parts[0] if len(parts) == 1 else "|".join(f"(?:{part})" for part in parts)
    return (), _checked(pattern)


def _checked(pattern: str) -> str:
    matcher(pattern)
    return pattern


def _flags(pattern: re.Pattern[str]) -> str:
    """Those of a compiled expression, as a prefix."""
    if pattern.flags & ~sum(_FLAGS, re.UNICODE):
        raise InvalidArgument(reason="of a pattern's flags only IGNORECASE, DOTALL and MULTILINE can be used")
    letters = "".join(letter for flag, letter in _FLAGS.items() if pattern.flags & flag)
    return f"(?{letters})" if letters else ""


def _check_starts(starts: Mapping[TopicPartition, Any]) -> None:
    for partition, start in starts.items():
        if isinstance(start, AtTimestamp) or (isinstance(start, str) and start in _STARTS):
            continue
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise InvalidArgument(
                reason=f"{start!r} is not a start in {partition}: give 'earliest', 'latest', 'committed', an "
                "offset from 0, or AtTimestamp(us)"
            )
