"""Apply progress: how much of each transaction's last transaction batch is in a log. With it, an apply that was
interrupted continues where it stopped. No I/O.

The progress of a transaction is a function of the log. The header of each of its record batches has the id of the
transaction batch, the part, and the number within the part. A newer transaction batch starts a new progress; record
batches of an older one do not change it. Progress covers all record batches of the transaction batch in the log. It
stores them as ranges of numbers for each part, because a lost machine may leave holes in unsynced data.

Retention may delete the record batches before the progress. So progress is saved with the producers' state
(`producer_state.py`). Progress is needed while a set of its transaction is prepared here: an apply may arrive, also a
second time, and only the progress prevents a second append. Without a prepared set an apply appends nothing; progress
then only lets a late apply succeed. So progress is not forgotten while a set of its transaction is prepared. Nor is it
forgotten before the drop of the last set is durable, because a power cut would restore that set. Otherwise progress is
forgotten

- `DONE_PROGRESS_KEPT_US` after the last append, if the transaction is done and will have no other transaction batch;
- `PROGRESS_KEPT_US` after the last append, if that is not known;
- the oldest first, if there are more than `PROGRESS_MAX`.

Saved form, little-endian:

    u32 count
    for each transaction:  i64 producer_id, i64 batch_id, i64 start_offset, i64 end_offset, i64 last_append_us,
                           i32 first_part, i32 first_number, u32 first_crc, u32 range_count
    for each range:        i32 part, i32 first, i32 end        batches [first, end) of the part are in the log
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kafkalog.format.batch import NO_TRANSACTION, BatchHeader
from kafkalog.format.decisions import BATCH_WRITE_KEPT_SECONDS

PROGRESS_KEPT_US = 30 * 86_400 * 1_000_000
DONE_PROGRESS_KEPT_US = BATCH_WRITE_KEPT_SECONDS * 1_000_000
PROGRESS_MAX = 10_000
_COUNT = struct.Struct("<I")
_PROGRESS = struct.Struct("<qqqqqiiII")
_RANGE = struct.Struct("<iii")
assert (_COUNT.size, _PROGRESS.size, _RANGE.size) == (4, 56, 12)


class RecordBatch(NamedTuple):
    """A record batch of a transaction. `number`: within the part."""

    producer_id: int
    batch_id: int
    part: int
    number: int


class Progress:
    """The record batches of one transaction batch that are in a log.

    Attributes:
        batch_id: the id of the transaction batch.
        start_offset: base offset of the first record batch.
        first: part, number within the part, and checksum of the first record batch. They identify the prepared set if
            several coordinators prepared a transaction batch of the same id.
        end_offset: end offset of the last record batch.
        last_append_us: append time of the last record batch.
        snapshots: number of snapshots taken before this object was made. If more have been taken since, one of them
            contains this object, which is then copied before a change.
    """

    __slots__ = ("_ranges", "batch_id", "end_offset", "first", "last_append_us", "snapshots", "start_offset")

    def __init__(self, batch_id: int, start_offset: int, first: tuple[int, int, int], snapshots: int = 0) -> None:
        self.batch_id = batch_id
        self.first = first
        self.start_offset = self.end_offset = start_offset
        self.last_append_us = 0
        self.snapshots = snapshots
        self._ranges: dict[int, list[list[int]]] = {}

    def copy(self, snapshots: int) -> Progress:
        other = Progress(self.batch_id, self.start_offset, self.first, snapshots)
        other.end_offset, other.last_append_us = self.end_offset, self.last_append_us
        other._ranges = {part: [list(each) for each in found] for part, found in self._ranges.items()}
        return other

    def before(self, producer_id: int, offset: int, later: Collection[RecordBatch]) -> Progress:
        """The progress without later record batches, which begin at or after an offset. Its end offset and the time of
        its last append are upper bounds."""
        other = Progress(self.batch_id, self.start_offset, self.first)
        other.end_offset, other.last_append_us = offset, self.last_append_us
        for part, found in self._ranges.items():
            for number in (number for first, end in found for number in range(first, end)):
                if RecordBatch(producer_id, self.batch_id, part, number) not in later:
                    other.add(part, number, number + 1)
        return other

    def add(self, part: int, first: int, end: int) -> None:
        """Add batches [first, end) of a part."""
        ranges = self._ranges.setdefault(part, [])
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = end
        elif not self.has(part, first):
            ranges.append([first, end])

    def restore(self, header: BatchHeader) -> None:
        """Add a record batch that may lie before others, and may have been added."""
        if not self.has(header.part, header.base_sequence):
            self.add(header.part, header.base_sequence, header.base_sequence + 1)
        if header.base_offset < self.start_offset:
            self.start_offset, self.first = header.base_offset, (header.part, header.base_sequence, header.crc)
        if header.end_offset > self.end_offset:
            self.end_offset, self.last_append_us = header.end_offset, header.append_timestamp_us

    def has(self, part: int, number: int) -> bool:
        """Whether the batch of this number within a part is in the log."""
        return any(first <= number < end for first, end in self._ranges.get(part, ()))

    def has_all(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Whether all batches of some parts are in the log. Each part is given as (part, number of its batches)."""
        return all(self._count(part) == batches for part, batches in parts)

    def _count(self, part: int) -> int:
        return sum(end - first for first, end in self._ranges.get(part, ()))

    def encode(self, producer_id: int) -> bytes:
        ranges = [(part, first, end) for part, found in self._ranges.items() for first, end in found]
        start = _PROGRESS.pack(
            producer_id,
            self.batch_id,
            self.start_offset,
            self.end_offset,
            self.last_append_us,
            *self.first,
            len(ranges),
        )
        return start + b"".join(_RANGE.pack(*each) for each in ranges)


class ApplyProgressSnapshot:
    """The progress of all transactions at one moment; see `ProducersSnapshot`."""

    def __init__(self, progress: list[tuple[int, Progress]]) -> None:
        self._progress = progress

    def end_of_batches_across(self, offset: int) -> int:
        """The end of the last transaction batch that lies on both sides of an offset; the offset if none does."""
        ends = (each.end_offset for _, each in self._progress if each.start_offset < offset < each.end_offset)
        return max(ends, default=offset)

    def before(self, offset: int, later: Collection[RecordBatch]) -> ApplyProgressSnapshot:
        """See `ProducersSnapshot.before`."""
        return ApplyProgressSnapshot(
            [
                (number, progress if progress.end_offset <= offset else progress.before(number, offset, later))
                for number, progress in self._progress
                if progress.start_offset < offset
            ]
        )

    def encode(self) -> Sequence[bytes]:
        """The saved form, as buffers to be joined."""
        return [_COUNT.pack(len(self._progress)), *(progress.encode(number) for number, progress in self._progress)]


class ApplyProgress:
    """The progress of one log's transactions, by producer id. Not thread-safe: Log holds the lock."""

    def __init__(self) -> None:
        self._by_id: dict[int, Progress] = {}
        self._done: set[int] = set()
        self._snapshots = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, producer_id: int) -> Progress | None:
        """A transaction's progress, or None. Its next append changes the object in place, unless a snapshot contains
        it."""
        return self._by_id.get(producer_id)

    def batches(self) -> set[tuple[int, int]]:
        """Producer id and batch id of every progress."""
        return {(number, progress.batch_id) for number, progress in self._by_id.items()}

    def record(self, header: BatchHeader, base_offset: int, append_us: int) -> None:
        """Add a record batch of a transaction, appended at `base_offset`."""
        assert header.transaction_batch_id != NO_TRANSACTION
        progress = self._by_id.get(header.producer_id)
        if progress is None or progress.batch_id < header.transaction_batch_id:
            first = header.part, header.base_sequence, header.crc
            progress = self._by_id[header.producer_id] = Progress(
                header.transaction_batch_id, base_offset, first, self._snapshots
            )
            self._done.discard(header.producer_id)
        elif progress.batch_id > header.transaction_batch_id:
            return
        elif progress.snapshots != self._snapshots:
            progress = self._by_id[header.producer_id] = progress.copy(self._snapshots)
        progress.add(header.part, header.base_sequence, header.base_sequence + 1)
        progress.end_offset = base_offset + header.last_offset_delta + 1
        progress.last_append_us = append_us

    def restore(self, header: BatchHeader) -> None:
        """Add a record batch that a repair brings back: it may lie before others, and may be known."""
        progress = self._by_id.get(header.producer_id)
        if progress is None or progress.batch_id != header.transaction_batch_id:
            self.record(header, header.base_offset, header.append_timestamp_us)
            return
        if progress.snapshots != self._snapshots:
            progress = self._by_id[header.producer_id] = progress.copy(self._snapshots)
        progress.restore(header)

    def done(self, producer_id: int, batch_id: int) -> None:
        """Note that a transaction batch is done and that its transaction will have no other."""
        progress = self._by_id.get(producer_id)
        if progress is not None and progress.batch_id <= batch_id:
            self._done.add(producer_id)

    def silent(self, now_us: int, keep: Collection[int]) -> list[int]:
        """Producer ids whose progress may be forgotten, by age or because there are more than `PROGRESS_MAX`.

        Args:
            keep: producer ids that are left out.
        """
        by_age = sorted(
            (progress.last_append_us, number) for number, progress in self._by_id.items() if number not in keep
        )
        too_many = len(self._by_id) - PROGRESS_MAX
        return [
            number
            for place, (at_us, number) in enumerate(by_age)
            if place < too_many
            or now_us - at_us > (DONE_PROGRESS_KEPT_US if number in self._done else PROGRESS_KEPT_US)
        ]

    def forget_silent(self, now_us: int, keep: Collection[int]) -> int:
        """Forget the progress of all producer ids that `silent` returns; returns their number."""
        silent = self.silent(now_us, keep)
        for number in silent:
            del self._by_id[number]
            self._done.discard(number)
        return len(silent)

    def clear(self) -> None:
        self._by_id.clear()
        self._done.clear()

    def snapshot(self) -> ApplyProgressSnapshot:
        self._snapshots += 1
        return ApplyProgressSnapshot(list(self._by_id.items()))

    def load(self, data: bytes, at: int) -> None:
        """Replace the progress of all transactions by the saved form at `data[at:]`. The caller has checked the
        checksum."""
        by_id: dict[int, Progress] = {}
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        for _ in range(count):
            number, batch_id, start_offset, end_offset, last_append_us, *first, range_count = _PROGRESS.unpack_from(
                data, at
            )
            at += _PROGRESS.size
            progress = by_id[number] = Progress(batch_id, start_offset, (first[0], first[1], first[2]), self._snapshots)
            progress.end_offset, progress.last_append_us = end_offset, last_append_us
            for _ in range(range_count):
                progress.add(*_RANGE.unpack_from(data, at))
                at += _RANGE.size
        self._by_id = by_id
