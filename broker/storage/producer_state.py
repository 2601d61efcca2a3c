"""The state of a log's idempotent producers: the next sequence number and the last batches of each. No I/O.

A producer's batch has its producer id, its epoch and the sequence number of its first record. A new epoch starts at
sequence 0. A batch is one of these:

- In order: it continues the producer's last batch, and is appended.
- A duplicate: it is one of the last batches of its producer (the deduplication window). The first append is returned.
- After a gap: an earlier batch is missing. The producer must send again from there.

A producer that was forgotten and then continues gets the error of a gap. It then starts a new epoch. It gives up the
batches that it had sent without getting an answer (OutcomeUnknown), because nobody can tell whether they are in the
log. So no batch is appended twice.

The state is a function of the log. It is saved from time to time in `%020d.producers`, named by the end offset that it
describes, so that a start reads only the log after it. A replica that copies a log from a later offset on gets the
state at that offset with it (`ProducersSnapshot.before`). Saved form, little-endian:

    4s "KLPR", u32 version 2, i64 offset, u32 producer_count
    for each producer, in the order of their last appends:
                        i64 producer_id, i16 epoch, i32 next_sequence, i64 last_append_us, u16 batch_count
    for each batch:     i32 base_sequence, i32 record_count, i64 base_offset, i64 end_offset, i64 append_us
    apply progress      the saved form of `apply_progress.py`; not in version 1
    u32 crc             CRC-32C of all other bytes
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.apply_progress import ApplyProgress, ApplyProgressSnapshot, RecordBatch
from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError, OutOfOrderSequence, ProducerFenced, SequenceForgotten, TooManyProducers
from kafkalog.format.batch import NO_TRANSACTION, SEQUENCE_MODULUS, BatchHeader

PRODUCERS_SUFFIX = ".producers"
_START = struct.Struct("<4sIqI")
_PRODUCER = struct.Struct("<qhiqH")
_BATCH = struct.Struct("<iiqqq")
_CRC = struct.Struct("<I")
assert (_START.size, _PRODUCER.size, _BATCH.size) == (20, 24, 32)
_MAGIC = b"KLPR"
_VERSION, _WITHOUT_PROGRESS = 2, 1
_MAY_SEND_AGAIN_SECONDS = 300.0
"""A producer may still send a batch again this long after its last append: more than twice a delivery.timeout.ms."""


def is_saved_state(data: bytes, offset: int) -> bool:
    """Whether bytes are a saved state at an offset, and intact."""
    if len(data) < _START.size + _CRC.size or crc32c(data[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - 4)[0]:
        return False
    magic, version, true_at, _ = _START.unpack_from(data)
    return (magic, true_at) == (_MAGIC, offset) and version in (_VERSION, _WITHOUT_PROGRESS)


class Remembered(NamedTuple):
    """A batch in the deduplication window."""

    base_sequence: int
    record_count: int
    base_offset: int
    end_offset: int
    append_us: int


class _Producer:
    """The state of one producer.

    Attributes:
        batches: the deduplication window in its saved form: a packed batch takes 32 bytes, a tuple 250.
        last_append: time of the last append by the monotonic clock; after a start estimated from the wall clock.
        snapshots: number of snapshots taken before this object was made. If more have been taken since, one of them
            contains this object, which is then copied before a change.
    """

    __slots__ = ("batches", "epoch", "last_append", "last_append_us", "next_sequence", "snapshots")

    def __init__(self, epoch: int, snapshots: int) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self.last_append = 0.0
        self.last_append_us = 0
        self.batches = bytearray()
        self.snapshots = snapshots

    def copy(self, snapshots: int) -> _Producer:
        other = _Producer(self.epoch, snapshots)
        other.next_sequence = self.next_sequence
        other.last_append, other.last_append_us = self.last_append, self.last_append_us
        other.batches += self.batches
        return other

    def before(self, offset: int) -> _Producer | None:
        """The state by those of its last batches that end at or before an offset; None if none does."""
        numbers = range(len(self.batches) // _BATCH.size)
        count = bisect_right(numbers, offset, key=lambda number: self.batch(number).end_offset)
        if not count:
            return None
        last = self.batch(count - 1)
        other = _Producer(self.epoch, self.snapshots)
        other.next_sequence = (last.base_sequence + last.record_count) % SEQUENCE_MODULUS
        other.last_append_us = last.append_us
        other.batches += self.batches[: count * _BATCH.size]
        return other

    def batch(self, number: int) -> Remembered:
        """A batch of the deduplication window; -1: the last one."""
        return Remembered._make(_BATCH.unpack_from(self.batches, number * _BATCH.size))


class ProducersSnapshot:
    """The state of all producers at an offset. It is taken under the log's lock, which copies only lists of references;
    it is encoded without the lock."""

    def __init__(
        self, offset: int, numbers: list[int], producers: list[_Producer], apply_progress: ApplyProgressSnapshot
    ) -> None:
        self.offset = offset
        self._numbers = numbers
        self._producers = producers
        self._apply_progress = apply_progress

    def end_of_batches_across(self, offset: int) -> int:
        """The end of the last transaction batch that lies on both sides of an offset; the offset if none does."""
        return self._apply_progress.end_of_batches_across(offset)

    def before(self, offset: int, later: Collection[RecordBatch]) -> ProducersSnapshot:
        """The part of this state that is about the log before an offset: with the record batches from there on, it
        gives this state. It has nothing about these, because a log that loses them must not take them for its own.

        Args:
            offset: where a record batch begins.
            later: the transactions' record batches in the log from the offset to `end_of_batches_across`.
        """
        found = zip(self._numbers, (each.before(offset) for each in self._producers), strict=True)
        known = [(number, producer) for number, producer in found if producer is not None]
        known.sort(key=lambda each: each[1].batch(-1).end_offset)  # in the order of their last appends
        return ProducersSnapshot(
            offset,
            [number for number, _ in known],
            [producer for _, producer in known],
            self._apply_progress.before(offset, later),
        )

    def encode(self) -> bytes:
        """The saved form."""
        parts: list[bytes | bytearray] = [_START.pack(_MAGIC, _VERSION, self.offset, len(self._producers))]
        for number, producer in zip(self._numbers, self._producers, strict=True):
            batches = producer.batches
            parts.append(
                _PRODUCER.pack(
                    number,
                    producer.epoch,
                    producer.next_sequence,
                    producer.last_append_us,
                    len(batches) // _BATCH.size,
                )
            )
            parts.append(batches)
        parts.extend(self._apply_progress.encode())
        data = b"".join(parts)
        return data + _CRC.pack(crc32c(data))


class Producers:
    """The state of one log's producers. Not thread-safe: Log holds the lock.

    Args:
        label: the partition's name for errors.
        remembered: length of a producer's deduplication window, in batches.
        state_max: maximum number of producers. A further producer replaces the one that has been silent longest. If
            that one appended within the last five minutes, it may still retry, so the new producer is refused. The five
            minutes are measured by the monotonic clock: setting the wall clock must not make a producer silent.
        clock: the clock whose wall time stamps appends.

    Attributes:
        apply_progress: the apply progress of transactions.
    """

    def __init__(self, label: str, remembered: int, state_max: int, clock: Clock) -> None:
        self._label = label
        self._remembered_bytes = remembered * _BATCH.size
        self._state_max = state_max
        self._clock = clock
        self._by_id: OrderedDict[int, _Producer] = OrderedDict()  # in the order of their last appends
        self._snapshots = 0
        self.apply_progress = ApplyProgress()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._by_id

    def has_room(self, count: int) -> bool:
        """Whether `count` more producers can be added without forgetting another."""
        return len(self._by_id) + count <= self._state_max

    def check(self, header: BatchHeader) -> Remembered | KafkalogError | None:
        """Check a producer's batch before its append.

        Returns:
            None if the batch is to be appended; a Remembered if it is a duplicate; else the error: OutOfOrderSequence,
            ProducerFenced, SequenceForgotten, TooManyProducers.
        """
        producer = self._by_id.get(header.producer_id)
        if producer is None or header.producer_epoch > producer.epoch:
            # From an unknown producer or a new epoch only sequence 0 is in order: an earlier batch may have been
            # refused, or may still be on its way.
            if header.base_sequence:
                return self._gap(header, 0)
            if producer is None and len(self._by_id) >= self._state_max and not self._oldest_may_go():
                return TooManyProducers(partition=self._label, limit=self._state_max)
            return None
        if header.producer_epoch < producer.epoch:
            return ProducerFenced(
                producer_id=header.producer_id,
                epoch=header.producer_epoch,
                partition=self._label,
                current=producer.epoch,
            )
        if header.base_sequence == producer.next_sequence:
            return None
        for number in reversed(range(len(producer.batches) // _BATCH.size)):
            batch = producer.batch(number)
            if batch.base_sequence == header.base_sequence and batch.record_count == header.record_count:
                return batch
        distance = (producer.next_sequence - header.base_sequence) % SEQUENCE_MODULUS
        if distance < SEQUENCE_MODULUS // 2:  # older than the deduplication window
            return SequenceForgotten(
                producer_id=header.producer_id, sequence=header.base_sequence, partition=self._label
            )
        return self._gap(header, producer.next_sequence)

    def _gap(self, header: BatchHeader, expected: int) -> OutOfOrderSequence:
        return OutOfOrderSequence(
            producer_id=header.producer_id,
            sequence=header.base_sequence,
            partition=self._label,
            expected=expected,
        )

    def record(self, header: BatchHeader, base_offset: int, append_us: int) -> None:
        """Record a batch of an idempotent producer after its append."""
        self._record(header, base_offset, append_us, self._clock.monotonic())

    def _record(self, header: BatchHeader, base_offset: int, append_us: int, append: float) -> None:
        producer = self._by_id.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            if producer is None and len(self._by_id) >= self._state_max and self._oldest_may_go():
                self._by_id.popitem(last=False)
            producer = self._by_id[header.producer_id] = _Producer(header.producer_epoch, self._snapshots)
        elif producer.snapshots != self._snapshots:
            producer = self._by_id[header.producer_id] = producer.copy(self._snapshots)
        self._by_id.move_to_end(header.producer_id)
        producer.next_sequence = header.end_sequence
        producer.last_append, producer.last_append_us = append, append_us
        end_offset = base_offset + header.last_offset_delta + 1
        batches = producer.batches
        batches += _BATCH.pack(header.base_sequence, header.record_count, base_offset, end_offset, append_us)
        if len(batches) > self._remembered_bytes:
            del batches[: -self._remembered_bytes]

    def _oldest_may_go(self) -> bool:
        oldest = next(iter(self._by_id.values()))
        return self._clock.monotonic() - oldest.last_append >= _MAY_SEND_AGAIN_SECONDS

    def _monotonic(self, append_us: int) -> float:
        """Convert the wall time of an append to the monotonic clock; a time in the future counts as now."""
        return self._clock.monotonic() - max(self._clock.now_us() - append_us, 0) / 1_000_000

    def replay(self, header: BatchHeader) -> None:
        """Record a batch that a start reads from the log."""
        if header.producer_id < 0:
            return
        append_us = header.append_timestamp_us
        if header.transaction_batch_id == NO_TRANSACTION:
            self._record(header, header.base_offset, append_us, self._monotonic(append_us))
        else:
            self.apply_progress.record(header, header.base_offset, append_us)

    def memorable(self, headers: Iterable[BatchHeader], offsets: Iterable[int]) -> list[BatchHeader]:
        """Those of some batches, in order, that a state may remember that is of one of these offsets, or of the end: of
        each producer the last ones before each offset. Looks at no state, so it needs no lock."""
        found: list[BatchHeader] = []
        latest: dict[tuple[int, bool], deque[BatchHeader]] = {}  # since the last offset
        after = iter(sorted(offsets))
        limit = next(after, None)
        for header in headers:
            while limit is not None and header.base_offset >= limit:
                found += chain.from_iterable(latest.values())
                latest.clear()
                limit = next(after, None)
            if header.producer_id < 0:
                continue
            is_numbered = header.transaction_batch_id == NO_TRANSACTION
            window = self._remembered_bytes // _BATCH.size if is_numbered else None
            kept = latest.setdefault((header.producer_id, is_numbered), deque(maxlen=window))
            if kept and kept[-1].transaction_batch_id != header.transaction_batch_id:
                kept.clear()  # only the progress of the last one is known
            kept.append(header)
        found += chain.from_iterable(latest.values())
        return sorted(found, key=attrgetter("base_offset"))

    def restore(self, headers: Iterable[BatchHeader]) -> None:
        """Record batches, in order, that a repair brings back: each is put in its place among those that are known. One
        that is known already changes nothing."""
        is_ordered = True
        for header in headers:
            if header.producer_id >= 0 and header.transaction_batch_id == NO_TRANSACTION:
                is_ordered &= not self._restore(header)
            elif header.producer_id >= 0:
                self.apply_progress.restore(header)
        if not is_ordered:
            self._by_id = OrderedDict(sorted(self._by_id.items(), key=lambda each: each[1].batch(-1).base_offset))
            while len(self._by_id) > self._state_max and self._oldest_may_go():
                self._by_id.popitem(last=False)

    def _restore(self, header: BatchHeader) -> bool:
        """Returns whether the batch is its producer's last one now."""
        known, base_offset = self._by_id.get(header.producer_id), header.base_offset
        is_last = known is None or known.batch(-1).base_offset < base_offset
        if known is None or (is_last and known.epoch != header.producer_epoch):
            producer = _Producer(header.producer_epoch, self._snapshots)
        elif known.epoch != header.producer_epoch:
            return False
        else:
            producer = known if known.snapshots == self._snapshots else known.copy(self._snapshots)
        count = len(producer.batches) // _BATCH.size
        number = bisect_left(range(count), base_offset, key=lambda number: producer.batch(number).base_offset)
        if number < count and producer.batch(number).base_offset == base_offset:
            return False
        append_us, at = header.append_timestamp_us, number * _BATCH.size
        producer.batches[at:at] = _BATCH.pack(
            header.base_sequence, header.record_count, base_offset, header.end_offset, append_us
        )
        del producer.batches[: max(0, len(producer.batches) - self._remembered_bytes)]
        if is_last:
            producer.next_sequence = header.end_sequence
            producer.last_append, producer.last_append_us = self._monotonic(append_us), append_us
        self._by_id[header.producer_id] = producer
        return is_last

    def empty(self) -> Producers:
        """A state without producers and transactions, with the same limits."""
        return Producers(self._label, self._remembered_bytes // _BATCH.size, self._state_max, self._clock)

    def forget_silent(self, before_us: int) -> int:
        """Forget the producers whose last append was before a wall time; returns their number."""
        count = 0
        while self._by_id and next(iter(self._by_id.values())).last_append_us < before_us:
            self._by_id.popitem(last=False)
            count += 1
        return count

    def clear(self) -> None:
        self._by_id.clear()
        self.apply_progress.clear()

    def snapshot(self, offset: int) -> ProducersSnapshot:
        """Take a snapshot of the state.

        Args:
            offset: the log's end offset, which the state describes.
        """
        self._snapshots += 1
        return ProducersSnapshot(offset, list(self._by_id), list(self._by_id.values()), self.apply_progress.snapshot())

    def load(self, data: bytes, offset: int) -> bool:
        """Replace the state by a saved one. If that is damaged or of another offset, change nothing and return
        False."""
        if not is_saved_state(data, offset):
            return False
        _, version, _, count = _START.unpack_from(data)
        by_id: OrderedDict[int, _Producer] = OrderedDict()
        at = _START.size
        for _ in range(count):
            number, epoch, next_sequence, last_append_us, batch_count = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            producer = by_id[number] = _Producer(epoch, self._snapshots)
            producer.next_sequence = next_sequence
            producer.last_append, producer.last_append_us = self._monotonic(last_append_us), last_append_us
            end = at + batch_count * _BATCH.size
            producer.batches += data[max(at, end - self._remembered_bytes) : end]
            at = end
        self._by_id = by_id
        self.apply_progress.clear()
        if version != _WITHOUT_PROGRESS:
            self.apply_progress.load(data, at)
        return True
