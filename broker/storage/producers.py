"""What a log knows of its idempotent producers: which batch comes next, and which were the last ones. No I/O.

A batch of a producer carries its id, its epoch and the sequence number of its first record. In order: it follows the
last one. Seen before: one of the last `remembered` batches of its producer, answered as it was the first time. A gap:
an earlier batch is missing, the producer has to send again from there. A new epoch starts at sequence 0.

The state is a function of the log, saved now and then (`%020d.producers`, named by the offset that it is true at) so
that a start reads only the log behind it. Saved form, little-endian, the CRC-32C of the rest at the end:

    4s "KLPR", u32 version 1, i64 offset, u32 producer_count
    for each producer:  i64 producer_id, i16 epoch, i32 next_sequence, i64 last_append_us, u16 batch_count
    for each batch:     i32 base_sequence, i32 record_count, i64 base_offset, i64 end_offset, i64 append_us
    marks               as `marks.py` saves them
    u32 crc
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.marks import Marks
from kafkalog.errors import KafkalogError, OutOfOrderSequence, SequenceForgotten, StaleProducerEpoch
from kafkalog.format.batch import NO_TRANSACTION, SEQUENCE_MODULUS, BatchHeader

PRODUCERS_SUFFIX = ".producers"
_START = struct.Struct("<4sIqI")
_PRODUCER = struct.Struct("<qhiqH")
_BATCH = struct.Struct("<iiqqq")
_CRC = struct.Struct("<I")
assert (_START.size, _PRODUCER.size, _BATCH.size) == (20, 24, 32)
_MAGIC = b"KLPR"
_VERSION, _WITHOUT_MARKS = 2, 1


class Remembered(NamedTuple):
    """A batch that was appended."""

    base_sequence: int
    record_count: int
    base_offset: int
    end_offset: int
    append_us: int


class _Producer:
    __slots__ = ("batches", "epoch", "last_append_us", "next_sequence")

    def __init__(self, epoch: int, remembered: int) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self.last_append_us = 0
        self.batches: deque[Remembered] = deque(maxlen=remembered)


class Producers:
    """The state of one log's producers. Not thread-safe: Log holds the lock.

    Args:
        label: the partition, as errors name it.
        remembered: batches of a producer that are known again.

    Attributes:
        marks: of the transactions.
    """

    def __init__(self, label: str, remembered: int) -> None:
        self._label = label
        self._remembered = remembered
        self._by_id: dict[int, _Producer] = {}
        self.marks = Marks()

    def __len__(self) -> int:
        return len(self._by_id)

    def verdict(self, header: BatchHeader) -> Remembered | KafkalogError | None:
        """None: append it. Remembered: it is in the log, there. An error: refuse it."""
        producer = self._by_id.get(header.producer_id)
        if producer is None or header.producer_epoch > producer.epoch:
            # Of a producer that is not known (any more) only the beginning is in order: an earlier batch of its may
            # have been refused, or may still be on its way.
            return None if header.base_sequence == 0 else self._gap(header, 0)
        if header.producer_epoch < producer.epoch:
            return StaleProducerEpoch(
                producer_id=header.producer_id,
                epoch=header.producer_epoch,
                partition=self._label,
                current=producer.epoch,
            )
        if header.base_sequence == producer.next_sequence:
            return None
        for batch in reversed(producer.batches):
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
        """Take in a batch that was appended."""
        if header.transaction_batch_id != NO_TRANSACTION:
            self.marks.record(header, base_offset, append_us)
            return
        producer = self._by_id.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = self._by_id[header.producer_id] = _Producer(header.producer_epoch, self._remembered)
        producer.next_sequence = header.end_sequence
        producer.last_append_us = append_us
        end_offset = base_offset + header.last_offset_delta + 1
        producer.batches.append(
            Remembered(header.base_sequence, header.record_count, base_offset, end_offset, append_us)
        )

    def replay(self, header: BatchHeader) -> None:
        """Take in a batch that stands in the log."""
        if header.producer_id >= 0:
            self.record(header, header.base_offset, header.append_timestamp_us)

    def forget_silent(self, before_us: int) -> int:
        """Forget the producers whose last append is older; returns how many."""
        silent = [number for number, producer in self._by_id.items() if producer.last_append_us < before_us]
        for number in silent:
            del self._by_id[number]
        return len(silent)

    def clear(self) -> None:
        self._by_id.clear()
        self.marks.clear()

    def encode(self, offset: int) -> bytes:
        """The saved form of the state, which is true at an offset."""
        parts = [_START.pack(_MAGIC, _VERSION, offset, len(self._by_id))]
        for number, producer in self._by_id.items():
            parts.append(
                _PRODUCER.pack(
                    number, producer.epoch, producer.next_sequence, producer.last_append_us, len(producer.batches)
                )
            )
            parts.extend(_BATCH.pack(*batch) for batch in producer.batches)
        parts.extend(self.marks.encode())
        data = b"".join(parts)
        return data + _CRC.pack(crc32c(data))

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
        by_id: dict[int, _Producer] = {}
        at = _START.size
        for _ in range(count):
            number, epoch, next_sequence, last_append_us, batch_count = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            producer = by_id[number] = _Producer(epoch, self._remembered)
            producer.next_sequence, producer.last_append_us = next_sequence, last_append_us
            for _ in range(batch_count):
                producer.batches.append(Remembered._make(_BATCH.unpack_from(data, at)))
                at += _BATCH.size
        self._by_id = by_id
        self.marks.clear()
        if version != _WITHOUT_MARKS:
            self.marks.load(data, at)
        return True
