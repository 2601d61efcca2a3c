"""What a log knows of its idempotent producers: which batch comes next, and which were the last ones. No I/O.

A batch of a producer carries its id, its epoch and the sequence number of its first record. In order: it follows the
last one. Seen before: one of the last `remembered` batches of its producer, answered as it was the first time. A gap:
an earlier batch is missing, the producer has to send again from there. A new epoch starts at sequence 0.

A producer that was forgotten and continues gets an error for a gap. It then starts an epoch, and gives up what it had
sent and had no answer for (OutcomeUnknown): that may be in the log, and nobody knows any more. So nothing is doubled.

The state is a function of the log, saved now and then (`%020d.producers`, named by the offset that it is true at) so
that a start reads only the log behind it. Saved form, little-endian, the CRC-32C of the rest at the end:

    4s "KLPR", u32 version 2, i64 offset, u32 producer_count
    for each producer, that of the last append last:
                        i64 producer_id, i16 epoch, i32 next_sequence, i64 last_append_us, u16 batch_count
    for each batch:     i32 base_sequence, i32 record_count, i64 base_offset, i64 end_offset, i64 append_us
    apply progress      as `apply_progress.py` saves them
    u32 crc
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.apply_progress import ApplyProgress, ApplyProgressSnapshot
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
_VERSION, _WITHOUT_MARKS = 2, 1
_MAY_SEND_AGAIN_SECONDS = 300.0
"""How long after its last append a producer may still send a batch again: more than twice a delivery.timeout.ms."""


class Remembered(NamedTuple):
    """A batch that was appended."""

    base_sequence: int
    record_count: int
    base_offset: int
    end_offset: int
    append_us: int


class _Producer:
    """`batches`: the remembered ones as they are saved, for a packed one takes 32 bytes and a tuple of it 250.
    `last_append`: by the monotonic clock, estimated at a start from the wall clock.
    `snapshots`: how many had been taken when this was made; with more, one of them holds it, and it is not changed."""

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


class ProducersSnapshot:
    """The state as it was at an offset. Taken under the log's lock, at the price of two lists; encoded without it."""

    def __init__(
        self, offset: int, numbers: list[int], producers: list[_Producer], apply_progress: ApplyProgressSnapshot
    ) -> None:
        self.offset = offset
        self._numbers = numbers
        self._producers = producers
        self._apply_progress = apply_progress

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
        label: the partition, as errors name it.
        remembered: batches of a producer that are known again.
        state_max: producers that are kept. A further one replaces the one that has been silent longest. If that one
            appended within five minutes, it may still retry, so the new producer is refused. Those minutes go by the
            monotonic clock: a wall clock that is set, ahead or back, makes nobody silent.
        clock: appends are stamped with its wall time.

    Attributes:
        apply_progress: of the transactions.
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
        """Whether so many more can be kept, and none is forgotten for them."""
        return len(self._by_id) + count <= self._state_max

    def check(self, header: BatchHeader) -> Remembered | KafkalogError | None:
        """None: append it. Remembered: it is in the log, there. An error: refuse it."""
        producer = self._by_id.get(header.producer_id)
        if producer is None or header.producer_epoch > producer.epoch:
            # Of a producer that is not known (any more) only the beginning is in order: an earlier batch of its may
            # have been refused, or may still be on its way.
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
        for at in range(len(producer.batches) - _BATCH.size, -1, -_BATCH.size):
            batch = Remembered._make(_BATCH.unpack_from(producer.batches, at))
            if batch.base_sequence == header.base_sequence and batch.record_count == header.record_count:
                return batch
        behind = (producer.next_sequence - header.base_sequence) % SEQUENCE_MODULUS
        if behind < SEQUENCE_MODULUS // 2:
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
        """Take in a batch of an idempotent producer that was appended just now."""
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
        """When an append was that was stamped before this start, by the monotonic clock; now, if it was later."""
        return self._clock.monotonic() - max(self._clock.now_us() - append_us, 0) / 1_000_000

    def replay(self, header: BatchHeader) -> None:
        """Take in a batch that stands in the log."""
        if header.producer_id < 0:
            return
        append_us = header.append_timestamp_us
        if header.transaction_batch_id == NO_TRANSACTION:
            self._record(header, header.base_offset, append_us, self._monotonic(append_us))
        else:
            self.apply_progress.record(header, header.base_offset, append_us)

    def forget_silent(self, before_us: int) -> int:
        """Forget the producers whose last append is older; returns how many."""
        count = 0
        while self._by_id and next(iter(self._by_id.values())).last_append_us < before_us:
            self._by_id.popitem(last=False)
            count += 1
        return count

    def clear(self) -> None:
        self._by_id.clear()
        self.apply_progress.clear()

    def snapshot(self, offset: int) -> ProducersSnapshot:
        """The state now, which is true at an offset."""
        self._snapshots += 1
        return ProducersSnapshot(offset, list(self._by_id), list(self._by_id.values()), self.apply_progress.snapshot())

    def load(self, data: bytes, offset: int) -> bool:
        """Become the saved state. False, and nothing changed, if it is damaged or of another offset."""
        if (
            len(data) < _START.size + _CRC.size
            or crc32c(data[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - 4)[0]
        ):
            return False
        magic, version, true_at, count = _START.unpack_from(data)
        if (magic, true_at) != (_MAGIC, offset) or version not in (_VERSION, _WITHOUT_MARKS):
            return False
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
        if version != _WITHOUT_MARKS:
            self.apply_progress.load(data, at)
        return True
