"""Cursors: how far the records of the assigned partitions were handed out, to which iterators. Knows no group.

A message that an iterator returned counts as processed when that iterator is asked for the next one. Until then it is
in the iterator's hand, and the partition's position stays before it.

A KeyboardInterrupt may come after any call. Before records move from one place to the next, the cursor's `resume` is
set to the offset to restart from; the assignment that completes the move clears it. If it is still set when the next
call comes, the move was interrupted, and fetching restarts from there. An iterator takes a message out of `left` and
notes it in its hand by a `for` statement, with no call in between; so it looks at the lease before it takes one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Flag, auto
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.client.consumer.decode import ROWS_AT_ONCE, ArrowBuilder, Decoded, Rows
from kafkalog.client.consumer.fetcher import Fetcher, Source
from kafkalog.client.consumer.partition_fetch import FetchedBatch
from kafkalog.errors import CorruptBatch, InvalidArgument
from kafkalog.events import get_logger
from kafkalog.records import Message, MessageFields, Messages, TopicPartition, as_messages

if TYPE_CHECKING:
    import pyarrow as pa

log = get_logger(__name__)

_ARROW_ROWS = 10_000  # small batches are joined up to here
_ARROW_BYTES = 2 << 20
_ANY = 1 << 62

_moments = itertools.count()  # an order of events without a lock: an iterator may be closed at any point


class Hold(Flag):
    """Why nothing is fetched or handed out of a partition."""

    NONE = 0
    PAUSED = auto()
    ASSIGNED = auto()  # `on_assigned` has not been called yet
    REVOKED = auto()  # another member of the group is to read it
    UNPLACED = auto()  # nobody knows where it starts: the group has no offset, and nobody has sought
    GONE = auto()  # a broker says that its topic does not exist; its group will say the same, or the broker another


class Lease:
    """Until when records may be handed out.

    Attributes:
        end: by the monotonic clock. Once it has passed it stays so: another membership has another lease.
    """

    __slots__ = ("end",)

    def __init__(self, end: float = -1.0) -> None:
        self.end = end

    def has_ended(self) -> bool:
        return time.monotonic() >= self.end


class Hand:
    """The message or Arrow batch that one iterator has handed out last, and that is still being processed.

    Attributes:
        cursor: of its partition; None: the hand is empty.
        message: handed out last; None: no message from `offset` on was handed out yet, or it is an Arrow batch that
            begins there.
        end_offset, read_in: of an Arrow batch, or messages that were taken together, their end and the leader epoch in
            which the log had them; -1 of messages one by one.
        is_unseen: the Arrow batch was made, or messages were taken to be handed out together, and were not handed out.
        is_untaken: a thread waits for records on behalf of an event loop, or has waited for these; the loop has not
            taken them.
        made: when its iterator was made, by `_moments`.
        given_up: when the iterator was closed with this in hand; None: it was not closed.
    """

    __slots__ = (
        "cursor",
        "end_offset",
        "given_up",
        "is_unseen",
        "is_untaken",
        "made",
        "message",
        "offset",
        "read_in",
    )

    def __init__(self, *, is_untaken: bool = False) -> None:
        self.cursor: Cursor | None = None
        self.message: Message | None = None
        self.offset = self.end_offset = -1
        self.read_in: int | None = None
        self.is_unseen = False
        self.is_untaken = is_untaken
        self.made = next(_moments)
        self.given_up: int | None = None

    def take_from(self, cursor: Cursor, offset: int) -> None:
        """Lock held: the iterator hands out records of that partition next, from that offset on."""
        self.cursor, self.message, self.offset, self.is_unseen = cursor, None, offset, False
        self.end_offset = -1
        cursor.hands.add(self)
        cursor.was_taken = True

    def put_down(self) -> None:
        """Lock held: mark as processed what is in hand."""
        if self.cursor is not None:
            self.cursor.hands.discard(self)
            self.cursor = None

    def give_up(self) -> None:
        """Note that its iterator is closed."""
        self.given_up = next(_moments)

    def first_offset(self) -> int:
        message = self.message
        return self.offset if message is None else message.offset


class Named(NamedTuple):
    """An offset of a partition that the application has committed by name.

    Attributes:
        position: of the cursor when it was; infinite: it is the partition's last commit.
    """

    offset: int
    position: float


class Cursor:
    """The progress of handing out one partition's records. Guarded by the fetcher's lock.

    Attributes:
        offset: the next to hand out, if there are no `rows`.
        rows: the fields of messages being handed out; `left` are those not handed out yet; `batches` are what they were
            made from.
        end_offset: the next offset after `rows`.
        hands: those of the iterators that have a record of it in hand.
        was_taken: whether records of it were handed out, or it was sought.
        hold: why nothing of it is handed out.
        lease: nothing of it is handed out after its end; None: it has none.
        named: the last commit by name since it was sought; None: there was none.
        resume: the offset to restart from, while records are being moved; None: none are.
        is_sought: `resume` was named by the application: the records before it may not have been read.
    """

    __slots__ = (
        "batches",
        "builder",
        "end_offset",
        "hands",
        "hold",
        "is_sought",
        "lease",
        "left",
        "named",
        "offset",
        "resume",
        "rows",
        "source",
        "was_taken",
    )

    def __init__(self, source: Source, lease: Lease | None = None) -> None:
        self.source = source
        self.lease = lease
        self.builder = ArrowBuilder(source.topic_partition)
        self.offset = self.end_offset = source.reader.offset
        self.rows: list[MessageFields] = []
        self.left: Iterator[MessageFields] = iter(self.rows)
        self.batches: Sequence[FetchedBatch] = ()
        self.hands: set[Hand] = set()
        self.was_taken = False
        self.hold = Hold.NONE
        self.named: Named | None = None
        self.resume: int | None = None
        self.is_sought = False

    def messages(self) -> Iterator[Message]:
        """Those that are left, each taken out of `left` when it is asked for."""
        return as_messages(self.left)

    def has_ended(self) -> bool:
        """Whether its lease has."""
        return self.lease is not None and self.lease.has_ended()

    def next_offset(self) -> int:
        """The offset of the message to be handed out next. An iterator may take that message at the same time."""
        if self.resume is not None:
            return self.resume
        if not self.rows:
            source = self.source
            at = source.reset_to
            if at is not None and (not source.arrived or source.arrived[0].start_offset >= at):
                self.offset, source.reset_to, self.named = at, None, None
            return self.offset
        left = self.left.__length_hint__()  # type: ignore[attr-defined]
        return _offset(self.rows[-left]) if left else self.end_offset

    def position(self) -> int:
        """The offset before which every record is processed."""
        hands = [hand.first_offset() for hand in self.hands]  # first: what leaves `left` meanwhile is in a hand
        return min([self.next_offset(), *hands])

    def read_in(self) -> int | None:
        """A leader epoch in which the log had all that was handed out; None: not known. While a reset is pending, what
        is handed out is of the log from before, and the reader is past the reset."""
        source = self.source
        return source.reader.read_in if source.reset_to is None else source.read_before

    def epoch_of(self, offset: int) -> int | None:
        """Lock held: the leader epoch that belongs to an offset which the application names; None: not known. Unless it
        is where the cursor stands, before or after what is in hand, or in an Arrow batch in hand, it may come from
        elsewhere, or have been read before the log was cut."""
        for hand in self.hands:
            if hand.offset < offset <= hand.end_offset:
                return hand.read_in
        return self.read_in() if offset in (self.position(), self.next_offset()) else None

    def is_through(self) -> bool:
        """Whether all `rows` were handed out, or will be fetched again."""
        return self.resume is not None or not self.left.__length_hint__()  # type: ignore[attr-defined]

    def is_free(self) -> bool:
        """Whether no iterator that goes on has a record of it in hand."""
        return all(hand.given_up is not None for hand in self.hands)

    def cut(self) -> int:
        """Hand out no more of `rows`; returns the offset of the first one that was not handed out, and keeps it in
        `resume`."""
        if self.resume is None:
            self.resume = self.next_offset()
            if self.rows:
                left = list(self.left)  # in one step: a running iterator gets none of these
                self.resume = _offset(left[0]) if left else self.end_offset
        return self.resume

    def settle(self) -> None:
        """Stop handing out `rows`; those not handed out are fetched again."""
        if self.rows and self.resume is None:
            self.resume = self.next_offset()
            rows = list(self.left)  # in one step: a running iterator gets none of these
            if not rows:
                self.offset = self.end_offset
            else:
                self.offset = at = _offset(rows[0])
                left = [batch for batch in self.batches if batch.header.end_offset > at]
                arrived = self.source.arrived
                if arrived and arrived[0].data is left[-1].data:
                    self.source.take(1, 1)  # the rest of the same batch, which comes along
                self.source.put_back([batch._replace(start_offset=max(at, batch.start_offset)) for batch in left])
            self._forget()
            self.resume = None

    def take_back(self) -> None:
        """Take back what nobody has taken yet. No `rows` are handed out any more."""
        for hand in [hand for hand in self.hands if hand.is_untaken]:
            if hand.is_unseen:  # an Arrow batch; messages were taken back with the rows
                self.resume = min(self.next_offset(), hand.offset)
                self.restart()
            hand.put_down()

    def take_back_given_up(self) -> int:
        """Fetch again what is in hands that were given up and was not committed by name, because nobody else is to read
        on after it. Returns the offset that is handed out next."""
        if self.hands:
            at, named = self.position(), self.named
            if named is not None and named.position == at:
                at = min(max(at, named.offset), self.next_offset())
            self.resume = at
            self.hands.clear()
            self.restart()
        return self.next_offset()

    def seek(self, offset: int) -> None:
        self.resume, self.is_sought, self.named, self.was_taken = offset, True, None, True
        self.hands.clear()
        self.restart()

    def restart(self) -> None:
        """Fetch again from `resume`, if it is set: a move was interrupted, so what has arrived is unknown."""
        at = self.resume
        if at is not None:
            read_in = None if self.is_sought else self.read_in()
            self._forget()
            self.source.go_to(at, read_in)
            self.offset, self.resume, self.is_sought = at, None, False

    def forget_given_up(self, asking: Hand) -> None:
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


def _offset(row: MessageFields) -> int:
    return row[2]


def _taken_from(cursor: Cursor, hand: Hand, most: int) -> Taken:
    """Lock held: some of a cursor's rows, taken out of it for a hand."""
    hand.is_unseen = True
    rows = list(itertools.islice(cursor.left, most))
    return Taken(cursor, [rows] if rows else [])


class Called(Exception):
    """Something has to be done by a thread that reads, before it waits."""


class Going(Exception):
    """Who asks for more records has some of a partition that is to go."""


class Streams:
    """So many streams over all partitions, each of which reads its own. Guarded by the fetcher's lock.

    A partition stays with its stream, whatever else comes or goes, so its records are processed in order. While no
    record of it is in hand, it moves to even the streams out, or because nobody reads its stream (any more).

    Args:
        patience_s: a stream that has asked for no record for so long is not read.

    Attributes:
        partitions: of each stream.
    """

    def __init__(self, count: int, patience_s: float) -> None:
        self.partitions: list[list[TopicPartition]] = [[] for _ in range(count)]
        self._patience_s = patience_s
        self._asked = [time.monotonic()] * count  # when each one did last; those that never did get their time too
        self._in_hands: list[list[int]] = [[]] * count  # the offsets of what each one processed when it was last seen
        self._dealt: Mapping[TopicPartition, Cursor] = {}

    def deal(self, cursors: Mapping[TopicPartition, Cursor], asking: int) -> bool:
        """Share these partitions, as one of the streams asks. Returns whether one has moved to another stream."""
        now = time.monotonic()
        self._asked[asking] = now
        is_dealt, self._dealt = self._dealt is cursors, {}  # till the end: an interrupt amid a move has all dealt again
        for some in self.partitions:
            some[:] = [each for each in some if each in cursors]
        self._note_progress(cursors, now)
        are_read = [at >= now - self._patience_s for at in self._asked]
        read = [some for some, is_read in zip(self.partitions, are_read, strict=True) if is_read]
        has_moved = False
        for number, some in enumerate(self.partitions):
            if not are_read[number] and (left := [each for each in some if cursors[each].is_free()]):
                offsets = {str(each): cursors[each].take_back_given_up() for each in left}
                log.warning("stream_is_not_read", stream=number, others_read_on_from=offsets)
                some[:] = [each for each in some if each not in left]
                has_moved = True
        if has_moved or not is_dealt:
            for partition in sorted(cursors.keys() - set(itertools.chain(*self.partitions))):
                min(read, key=len).append(partition)
        while True:
            fewest, most = min(read, key=len), max(read, key=len)
            free = [partition for partition in most if not cursors[partition].hands]
            if len(most) - len(fewest) < 2 or not free:
                self._dealt = cursors
                return has_moved
            most.remove(free[0])
            fewest.append(free[0])
            has_moved = True

    def _note_progress(self, cursors: Mapping[TopicPartition, Cursor], now: float) -> None:
        """A stream asks only once for many records: it is read as well if the one that is being processed changes."""
        for number, asked in enumerate(self._asked):
            if asked < now - self._patience_s / 4:
                hands = [hand for each in self.partitions[number] for hand in cursors[each].hands]
                offsets = sorted(hand.first_offset() for hand in hands if hand.given_up is None)
                if offsets != self._in_hands[number]:
                    self._in_hands[number], self._asked[number] = offsets, now


class Taken(NamedTuple):
    """Messages of a partition that are to be handed out with others: their fields, part by part; none is empty."""

    cursor: Cursor
    parts: Sequence[Sequence[MessageFields]]

    @property
    def first_offset(self) -> int:
        return _offset(self.parts[0][0])

    @property
    def records(self) -> int:
        return sum(map(len, self.parts))


def joined(taken: Iterable[Taken]) -> Messages:
    return Messages((part for each in taken for part in each.parts), are_runs=True)


class Share(NamedTuple):
    """What one of several streams reads."""

    number: int
    streams: Streams


Part = TopicPartition | Share | None
"""What an iterator reads: a partition, a stream's share, or all."""


class Cursors:
    """The cursors of a consumer, and its fetcher. Guarded by the fetcher's lock.

    Attributes:
        by_partition: replaced as a whole when partitions come or go.
        is_late: whether nothing may be handed out any more, although partitions are assigned.
        is_called: whether an iterator has to call back first, see `Called`.
        put_down: called with the lock held when an iterator has put down what it had in hand.
    """

    def __init__(self, make_fetcher: Callable[[Callable[[], None]], Fetcher]) -> None:
        self.fetcher = make_fetcher(self._restart)
        self.by_partition: dict[TopicPartition, Cursor] = {}
        self._by_source: dict[Source, Cursor] = {}
        self.may_be_empty = False
        self.is_late: Callable[[], bool] = bool
        self.is_called: Callable[[], bool] = bool
        self.put_down: Callable[[], object] = bool

    # --- which partitions

    def replace(self, cursors: Mapping[TopicPartition, Cursor]) -> None:
        """Read these from now on, and no others. A cursor that is replaced by another one hands out nothing more."""
        with self.fetcher.lock:
            for partition, cursor in self.by_partition.items():
                if cursors.get(partition) is not cursor:
                    cursor.settle()
            self._set(dict(cursors))

    def add(self, cursors: Mapping[TopicPartition, Cursor]) -> None:
        """Read these besides."""
        with self.fetcher.lock:
            self.replace({**self.by_partition, **cursors})

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Read these no longer; those that are not read are ignored."""
        gone = set(partitions)
        with self.fetcher.lock:
            self.replace({p: cursor for p, cursor in self.by_partition.items() if p not in gone})

    def hold(self, partitions: Iterable[TopicPartition], why: Hold) -> None:
        """Hand out nothing more of those of some partitions that are read. What was fetched is kept. What an event loop
        has not taken is taken back: nobody may ever ask for it."""
        with self.fetcher.lock:
            for partition in partitions:
                if (cursor := self.by_partition.get(partition)) is not None:
                    cursor.settle()
                    cursor.take_back()
                    cursor.hold |= why
            self._set(self.by_partition)

    def let_go(self, cursors: Iterable[Cursor], why: Hold) -> None:
        """Hand them out again, unless they are held for another reason."""
        with self.fetcher.lock:
            for cursor in cursors:
                cursor.hold &= ~why
                cursor.source.is_dry = False  # records may have come since it was held
            self._set(self.by_partition)

    def seek(self, cursor: Cursor, offset: int) -> None:
        """Continue elsewhere in a partition."""
        with self.fetcher.lock:
            cursor.seek(offset)
            self.let_go([cursor], Hold.UNPLACED)

    def call(self) -> None:
        """Have who reads see at the next record that `is_called`, whichever partition's it has at hand."""
        with self.fetcher.lock:
            for cursor in self.by_partition.values():
                cursor.settle()
            self.fetcher.call()

    def _set(self, cursors: dict[TopicPartition, Cursor]) -> None:
        """Lock held: fetch for these from now on, and for no others."""
        by_source = {cursor.source: cursor for cursor in cursors.values()}
        sources = [cursor.source for cursor in cursors.values() if not cursor.hold]
        self.by_partition, self._by_source, self.fetcher.sources = cursors, by_source, sources
        self.fetcher.call()

    def of(self, partition: TopicPartition) -> Cursor:
        """Raises InvalidArgument: the partition is not assigned."""
        cursor = self.by_partition.get(partition)
        if cursor is None:
            raise InvalidArgument(reason=f"{partition} is not assigned to this consumer")
        return cursor

    def in_hand(self, partitions: Iterable[TopicPartition]) -> set[TopicPartition]:
        """Those of some partitions of which an iterator that was not closed has a record in hand."""
        with self.fetcher.lock:
            cursors = {p: cursor for p in partitions if (cursor := self.by_partition.get(p)) is not None}
            return {p for p, cursor in cursors.items() if any(hand.given_up is None for hand in cursor.hands)}

    def in_hands(self) -> dict[Hand, object]:
        """The hands with records that the application has, and an object that is another one when a hand has others."""
        with self.fetcher.lock:
            return {
                hand: hand.offset if hand.message is None else hand.message
                for cursor in self.by_partition.values()
                for hand in cursor.hands
                if hand.given_up is None and not hand.is_unseen
            }

    def positions(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset before which every record is processed, of those of some partitions that are read. Of one that
        starts nowhere there is none."""
        with self.fetcher.lock:
            found = {p: cursor for p in partitions if (cursor := self.by_partition.get(p)) is not None}
            return {p: cursor.position() for p, cursor in found.items() if not cursor.hold & Hold.UNPLACED}

    def epochs_of(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Lock held: the leader epochs that belong to offsets which the application names."""
        found = self.by_partition
        return {
            partition: found[partition].epoch_of(offset) for partition, offset in offsets.items() if partition in found
        }

    # --- handing out

    def _wanted(self, part: Part, taken: Iterable[Hand] = ()) -> Sequence[Source]:
        """Lock held: the sources to take from, as they are now. Raises InvalidArgument if there is none, Called,
        Going."""
        for hand in taken:
            cursor = hand.cursor
            if cursor is not None and (cursor.hold & Hold.REVOKED or cursor.has_ended()):
                raise Going
        if self.is_called():
            raise Called
        for cursor in self.by_partition.values():
            cursor.restart()
            if cursor.rows and cursor.is_free():  # what an iterator has left is everybody's
                cursor.settle()
        if self.is_late():
            return ()
        if part is None:
            if not self.by_partition and not self.may_be_empty:
                raise InvalidArgument(
                    reason="no partition is assigned to this consumer: call subscribe() or assign() first"
                )
            return self.fetcher.sources
        return [cursor.source for cursor in self._cursors_of(part) if not cursor.hold]

    def _cursors_of(self, part: Part) -> list[Cursor]:
        """Lock held. Raises InvalidArgument: the partition is not assigned."""
        if part is None:
            return list(self.by_partition.values())
        if isinstance(part, Share):
            if part.streams.deal(self.by_partition, part.number):
                self.fetcher.call()
            return [self.by_partition[each] for each in part.streams.partitions[part.number]]
        return [self.of(part)]

    def next_rows(self, part: Part, timeout: float | None, hand: Hand, taken: Sequence[Hand] = ()) -> Cursor | None:
        """Wait for messages and return their cursor; `hand` has put down what it had, and is at the first of them.

        Args:
            taken: have messages that are to be handed out together with these.

        Returns:
            None after `timeout` seconds without a message, or when closed.

        Raises:
            Called: the caller has to serve first.
            Going: no more are to be taken, because those in `taken` hold up a partition, or their lease has ended.
            KafkalogError: as `Fetcher.next`.
        """
        with self.fetcher.lock:
            cursor = self._with_rows(part, hand)
            if cursor is not None:
                return cursor
        return self.fetcher.next(partial(self._wanted, part, taken), timeout, partial(self._take_rows, hand))

    def next_messages(
        self,
        most: int,
        part: Part,
        timeout: float | None,
        hand: Hand,
        *,
        taken: Sequence[Hand],
        together: int,
    ) -> Taken | None:
        """As `next_rows`: messages, so many at most, that are to be handed out together. They are unseen.

        Args:
            together: how many were asked for at once, those in `taken` among them. A thousand and more are left as
                columns.
        """
        with self.fetcher.lock:
            cursor = self._with_rows(part, hand)
            if cursor is not None:
                return _taken_from(cursor, hand, most)
        take = self._take_columns if together >= ROWS_AT_ONCE else self._take_some
        return self.fetcher.next(partial(self._wanted, part, taken), timeout, partial(take, most, hand))

    def _with_rows(self, part: Part, hand: Hand) -> Cursor | None:
        """Lock held: a cursor with rows that were made and not handed out, for a hand, which puts down what it had."""
        self.put_hand_down(hand)
        cursors = self._cursors_of(part)
        for cursor in cursors:
            cursor.forget_given_up(hand)
        if not self.is_late():
            for cursor in cursors:
                if not cursor.is_through():
                    hand.take_from(cursor, cursor.next_offset())
                    return cursor
        return None

    def take_back(self, cursor: Cursor, offset: int) -> None:
        """Fetch again from a message that was taken out of its cursor, and not handed out."""
        with self.fetcher.lock:
            if self._by_source.get(cursor.source) is cursor:
                cursor.resume = min(cursor.cut(), offset)
                cursor.restart()

    def give_back(self, hands: Collection[Hand]) -> None:
        """Fetch again what these have in hand: it was not handed out."""
        if not hands:
            return
        with self.fetcher.lock:
            for hand in hands:
                cursor = hand.cursor
                if cursor is not None and self._is_in(hand, cursor):
                    cursor.resume = min(cursor.cut(), hand.first_offset())
                    cursor.restart()
                hand.is_unseen = False
                self.put_hand_down(hand)
            self.fetcher.wake()

    def is_current(self, hand: Hand) -> bool:
        """Whether what is in hand may be handed out now: its partition was not sought, held or removed since, and its
        lease has not ended."""
        with self.fetcher.lock:
            cursor = hand.cursor
            if cursor is None or cursor.hold or cursor.has_ended():
                return False
            return self._is_in(hand, cursor)

    def _is_in(self, hand: Hand, cursor: Cursor) -> bool:
        """Lock held: whether a cursor is still read, and not sought since the hand took from it."""
        return hand in cursor.hands and self._by_source.get(cursor.source) is cursor

    def put_hand_down(self, hand: Hand) -> None:
        """Lock held: mark as processed what is in hand."""
        if hand.cursor is not None:
            hand.put_down()
            self.put_down()

    def _take_rows(self, hand: Hand, source: Source) -> Cursor:
        """Lock held: make messages of what has arrived, for a hand."""
        cursor = self._by_source[source]
        cursor.settle()
        cursor.resume = cursor.next_offset()
        batches = source.take(ROWS_AT_ONCE, _ANY)
        end_offset = batches[-1].header.end_offset
        is_part = len(batches) == 1 and end_offset - batches[0].start_offset > 2 * ROWS_AT_ONCE
        if is_part:
            end_offset = batches[0].start_offset + ROWS_AT_ONCE
        rows: list[MessageFields] = []
        for decoded in self._decoded(source, batches, end_offset):
            rows += Rows(source.topic_partition, source.reader.topic_id, decoded)
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

    def _take_some(self, most: int, hand: Hand, source: Source) -> Taken:
        """Lock held: some of the messages that `_take_rows` makes."""
        return _taken_from(self._take_rows(hand, source), hand, most)

    def _take_columns(self, most: int, hand: Hand, source: Source) -> Taken:
        """Lock held: so many messages at most, as columns of what has arrived."""
        cursor = self._by_source[source]
        cursor.settle()
        first = cursor.resume = cursor.next_offset()
        batches = source.take(most, _ANY)
        parts, left = [], most
        for decoded in self._decoded(source, batches):
            parts.append(decoded)
            left -= decoded.columns.num_rows
        end_offset = batches[-1].header.end_offset
        if left < 0:  # the rest of the last one stays
            parts[-1], end_offset = parts[-1].cut(parts[-1].columns.num_rows + left)
            source.put_back([batches[-1]._replace(start_offset=end_offset)])
        rows = [
            Rows(source.topic_partition, source.reader.topic_id, each) for each in parts if each.columns.num_rows
        ]  # none of a compacted batch whose last records are gone
        hand.take_from(cursor, first)
        hand.end_offset, hand.read_in = end_offset, cursor.read_in()
        cursor.offset, cursor.resume, hand.is_unseen = end_offset, None, True
        return Taken(cursor, rows)

    def next_arrow(self, part: Part, timeout: float | None, hand: Hand) -> pa.RecordBatch | None:
        """As `next_rows`: one Arrow batch, of one partition."""
        with self.fetcher.lock:
            self.put_hand_down(hand)
            for cursor in self._cursors_of(part):
                cursor.forget_given_up(hand)
                cursor.settle()
        return self.fetcher.next(partial(self._wanted, part), timeout, partial(self._take_arrow, hand))

    def _take_arrow(self, hand: Hand, source: Source) -> pa.RecordBatch:
        """Lock held: one Arrow batch of what has arrived, for a hand."""
        cursor = self._by_source[source]
        cursor.settle()
        cursor.resume = cursor.next_offset()
        batches = source.take(_ARROW_ROWS, _ARROW_BYTES)
        decoded = list(self._decoded(source, batches))
        built = cursor.builder.build(decoded)
        hand.take_from(cursor, cursor.offset)
        hand.end_offset, hand.read_in = batches[-1].header.end_offset, cursor.read_in()
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
                batches[number] = opened = batch.opened(source.topic_partition)
            except CorruptBatch as error:
                source.put_back(batches[number:])
                del batches[number:]
                if number == 0:
                    source.failure = error
                    raise
                return
            yield Decoded(batch.header, opened.wanted(end_offset), batch.start_offset)

    def _restart(self) -> None:
        """Lock held: restart all cursors, after the fetching thread was interrupted."""
        for cursor in self.by_partition.values():
            cursor.cut()
            cursor.restart()
