"""The log against a plain list: any order of appends, rolls, reads, cuts, restarts and kills, found by Hypothesis."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.storage.log import Appended
from broker.storage.log_dir import LogDirectory
from broker.storage.segment import Hint
from kafkalog.client.consumer.partition_fetch import FetchedBatch
from kafkalog.client.timestamps import first_record_at
from kafkalog.clock import ManualClock
from kafkalog.errors import OffsetOutOfRange, OutOfOrderSequence
from kafkalog.format.batch import Batch, iter_batches
from kafkalog.records import TopicPartition
from kafkalog.zk.registry import PartitionState
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import make_batch, topic, values_of
from tests.crash.memory_disk import MemoryDisk

PATH = Path("/data")
SEGMENT_MS, RETENTION_MS = 10_000, 100_000
AGES = st.sampled_from([0, 0, 0, 5, 40, 60])
"""Seconds: half of a segment's age, and two that together are just what retention allows."""
OFFSETS = st.integers(0, 1 << 16)
SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=6)


class LogMachine(RuleBasedStateMachine):
    """`records` is every record ever appended and not cut off at the end: (value, timestamp), its offset its place.
    `batch_starts` is where their batches begin, `batch_times` when each was appended, `epochs` each leader epoch with
    the offset at which it began."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.clock = ManualClock()
        self.records: list[tuple[bytes, int]] = []
        self.batch_starts: list[int] = []
        self.batch_times: list[int] = []
        self.start = 0
        self.epochs = [(0, 0)]
        self.sequences: dict[int, int] = {}
        self.last_batch: dict[int, tuple[Batch, int]] = {}
        self.hint: tuple[int, Hint] | None = None
        self.places: list[Hint] = []

    @initialize(flushed=st.booleans(), count=st.integers(0, 40))
    def begin(self, flushed: bool, count: int) -> None:
        more = {"flush_visibility": "flushed", "flush_ms": 1000} if flushed else {}
        self.settings = topic(segment_ms=SEGMENT_MS, retention_ms=RETENTION_MS, index_interval_bytes=300, **more)
        self.flushed_only = flushed
        self.open()
        if count:
            self.append_many(count, 3, 50, 0)
            self.log.flush()

    def open(self) -> None:
        self.directory = LogDirectory(PATH, disk=self.disk, clock=self.clock, producer_batches_remembered=5)
        self.partition = open_partition(self.directory, self.settings, self.epochs[-1][0])
        self.log = self.partition.log

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.partition.close()
            self.directory.close()
            assert self.disk.open_files == 0

    # --- appending -----------------------------------------------------------------------------------------------

    @rule(
        batches=st.lists(
            st.tuples(
                SIZES, st.integers(-50, 50), st.sampled_from([None, 1, 2]), st.sampled_from(["none", "lz4", "zstd"])
            ),
            min_size=1,
            max_size=5,
        )
    )
    def append(self, batches: list[tuple[list[int], int, int | None, str]]) -> None:
        made: list[tuple[Batch, list[tuple[bytes, int]], int | None]] = []
        end = len(self.records)
        for sizes, shift, producer, codec in batches:
            records = [
                (b"%d:%s" % (end + i, b"x" * size), (end + i) * 10 + shift * (i % 3)) for i, size in enumerate(sizes)
            ]
            end += len(records)
            sequence = (-1, -1, -1)
            if producer is not None:
                sequence = (producer, 0, self.sequences.get(producer, 0))
                self.sequences[producer] = sequence[2] + len(records)
            batch = make_batch([value for value, _ in records], [t for _, t in records], codec=codec, producer=sequence)
            made.append((batch, records, producer))
        outcomes = self.log.append([batch for batch, _, _ in made], self.log.last_epoch)
        for outcome, (batch, records, producer) in zip(outcomes, made, strict=True):
            base = len(self.records)
            assert outcome == Appended(base, base + len(records), self.clock.now_us())
            self.batch_starts.append(base)
            self.batch_times.append(self.clock.now_us())
            self.records += records
            if producer is not None:
                self.last_batch[producer] = batch, base

    @rule(count=st.integers(1, 30), records=st.integers(1, 4), size=st.sampled_from([10, 100, 1000]), seconds=AGES)
    def append_many(self, count: int, records: int, size: int, seconds: int) -> None:
        self.append([([size] * records, 0, None, "none")] * count)
        self.clock.advance(seconds)

    @rule(producer=st.sampled_from([1, 2]), gap=st.integers(1, 100))
    def send_again_and_leave_a_gap(self, producer: int, gap: int) -> None:
        if producer in self.last_batch:
            batch, base = self.last_batch[producer]
            (outcome,) = self.log.append([batch], self.log.last_epoch)
            assert isinstance(outcome, Appended)
            assert outcome.base_offset == base
        sequence = self.sequences.get(producer, 0)
        (outcome,) = self.log.append(
            [make_batch([b"gap"], producer=(producer, 0, sequence + gap))], self.log.last_epoch
        )
        assert isinstance(outcome, OutOfOrderSequence)
        assert outcome.facts["expected"] == sequence

    @rule(raised=st.integers(1, 3))
    def begin_epoch(self, raised: int) -> None:
        epoch = self.partition.role.epoch + raised
        self.partition.role.lead(PartitionState.only(0, "here", epoch), [0])
        self.log.begin_epoch(epoch)  # durable at once: a kill forgets one without records that was not saved
        self.epochs.append((self.partition.role.epoch, len(self.records)))

    @rule(action=st.sampled_from(["flush", "checkpoint", "roll_if_old"]), seconds=AGES)
    def tend(self, action: str, seconds: int) -> None:
        self.clock.advance(seconds)
        getattr(self.log, action)()
        if action == "flush":
            assert self.log.flushed_offset == len(self.records)

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def visible(self) -> int:
        return self.log.flushed_offset if self.flushed_only else len(self.records)

    @rule(
        reads=st.lists(
            st.tuples(OFFSETS, st.integers(0, 3000), st.none() | OFFSETS, st.booleans()), min_size=3, max_size=8
        )
    )
    def read(self, reads: list[tuple[int, int, int | None, bool]]) -> None:
        for at, max_bytes, up_to, hinted in reads:
            offset = self.start + at % (self.visible - self.start + 1 if self.visible >= self.start else 1)
            end = None if up_to is None else min(offset + up_to % 8, len(self.records))
            hint = None
            if hinted and self.hint is not None and self.start <= self.hint[0] <= len(self.records):
                offset, hint = self.hint
            self.check_read(offset, max_bytes, hint, end)

        for offset in (self.start - 1, len(self.records) + 1):
            with pytest.raises(OffsetOutOfRange):
                self.log.reader.read(offset, 100)

    def check_read(self, offset: int, max_bytes: int, hint: Hint | None, end: int | None) -> None:
        read = (
            self.partition.read(offset, max_bytes, hint)
            if end is None
            else self.log.reader.read(offset, max_bytes, hint, lambda: (self.log.view, end))
        )
        with read as found:
            data = found.read()
            assert len(data) == found.length
            position = found.position
            base = found.segment_base_offset
        batches = list(iter_batches(memoryview(data)))
        got = [record for header, batch in batches for record in values_of(header, batch)]
        limit = self.visible if end is None else end
        first = max((start for start in self.batch_starts if start <= offset), default=0)
        behind = min((start for start in self.batch_starts if start > offset), default=len(self.records))
        if offset >= limit or behind > limit:
            assert not data
            return
        assert got, "a reader always gets on"
        assert [at for at, _ in got] == list(range(first, got[-1][0] + 1))
        assert all(value == self.records[at][0] for at, value in got)
        assert got[-1][0] < limit
        assert len(data) <= max(max_bytes, batches[0][0].length)
        for header, _ in batches:
            self.places.append(Hint(base, position))
            position += header.length
        self.hint = batches[-1][0].end_offset, Hint(base, position)

    @rule(made_up=st.none() | st.builds(Hint, st.integers(0, 50), st.integers(-8, 5000)), at=OFFSETS, of=OFFSETS)
    def read_with_a_wrong_hint(self, made_up: Hint | None, at: int, of: int) -> None:
        """One made up, or that of another batch."""
        hint = made_up or (self.places[of % len(self.places)] if self.places else None)
        offset = self.start + at % (len(self.records) - self.start + 1)
        with self.log.reader.read(offset, 500) as right, self.log.reader.read(offset, 500, hint) as found:
            assert (found.segment_base_offset, found.position, found.length) == (
                right.segment_base_offset, right.position, right.length,
            )  # fmt: skip

    @rule(timestamp=st.integers(-200, 2000))
    def look_up_a_time(self, timestamp: int) -> None:
        expected = next(
            ((at, when) for at, (_, when) in enumerate(self.records) if at >= self.start and when >= timestamp),
            None,
        )
        if expected is not None and expected[0] >= self.visible:
            expected = None
        found = self.partition.offset_for_timestamp(timestamp)
        while found is not None and found[1] is None:  # it is looked for in the batch, as a client does
            with self.partition.read(found[0], 1, None) as whole:
                [(header, batch)] = iter_batches(memoryview(whole.read()))
            record = first_record_at(FetchedBatch(header, batch, found[0]), timestamp, TopicPartition("t", 0))
            found = record or self.partition.offset_for_timestamp(timestamp, header.end_offset)
        assert found == expected

    # --- cutting -------------------------------------------------------------------------------------------------

    @rule(limit=st.sampled_from([-1, 0, 3000, 20_000]), seconds=AGES)
    def apply_retention(self, limit: int, seconds: int) -> None:
        self.clock.advance(seconds)
        self.partition.update_settings(self.settings.with_({"retention.bytes": limit}))
        segments = self.segments()
        kept = self.kept(segments, limit)
        assert self.log.apply_retention() == len(segments) - len(kept)
        assert self.segments() == (kept or [(len(self.records), 0)])
        # What goes may hold no readable record: a truncation can cut off all from the batch on that holds the start.
        self.start = max(self.start, kept[0][0] if kept else len(self.records))

    def segments(self) -> list[tuple[int, int]]:
        """(base offset, bytes) of each segment's file."""
        names = [name for name in self.disk.names(self.log.directory) if name.endswith((".log", ".next"))]
        return [(int(name[:20]), self.disk.file_size(self.log.directory / name)) for name in names]

    def kept(self, segments: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
        """What retention is to leave of the segments; nothing if even the last one is too old."""
        horizon_us = self.clock.now_us() - RETENTION_MS * 1000
        batches = zip(self.batch_starts, self.batch_times, strict=True)
        fresh = next((start for start, when in batches if when >= horizon_us), len(self.records))
        segments = segments[max(sum(base <= self.start for base, _ in segments) - 1, 0) :]
        ends = [*(base for base, _ in segments[1:]), len(self.records)]
        kept = [segment for segment, end in zip(segments, ends, strict=True) if end > fresh or not segment[1]]
        while len(kept) > 1 and 0 <= limit < sum(size for _, size in kept):
            del kept[0]
        return kept

    @rule(at=OFFSETS)
    def delete_before(self, at: int) -> None:
        offset = self.start + at % (self.visible - self.start + 1) if self.visible >= self.start else self.start
        assert self.partition.delete_before(offset) == offset
        self.start = offset

    @rule(at=OFFSETS)
    @precondition(lambda self: len(self.records) > self.start)
    def truncate(self, at: int) -> None:
        offset = self.start + at % (len(self.records) - self.start)
        expected = max(start for start in self.batch_starts if start <= offset)
        assert self.partition.following.truncate_to(offset) == expected
        self.log.begin_epoch(self.partition.role.epoch)
        del self.records[expected:]
        self.batch_starts = [start for start in self.batch_starts if start < expected]
        del self.batch_times[len(self.batch_starts) :]
        self.start = min(self.start, expected)
        current, _ = self.epochs[-1]
        self.epochs = [(epoch, began) for epoch, began in self.epochs if began < expected]
        if not self.epochs or self.epochs[-1][0] < current:  # the partition leads on
            self.epochs.append((current, expected))
        self.forget_producers()

    def forget_producers(self) -> None:
        """Take up again what the log says comes next; what it should be is the crash tests' matter."""
        self.last_batch.clear()
        for producer in self.sequences:
            (outcome,) = self.log.append([make_batch([b"?"], producer=(producer, 0, 1 << 30))], self.log.last_epoch)
            assert isinstance(outcome, OutOfOrderSequence)
            self.sequences[producer] = outcome.facts["expected"]

    # --- restarts ------------------------------------------------------------------------------------------------

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.directory.close(clean)
        self.open()
        assert self.directory.was_clean == clean
        assert self.log.flushed_offset == len(self.records)

    @rule()
    def kill(self) -> None:
        unsynced = [name for name in self.disk.names(self.log.directory) if name.endswith(".next")]
        assert self.disk.open_files == 2 + len(unsynced), "the lock, the last segment, and those that are not synced"
        self.disk = self.disk.after_kill()
        self.open()
        assert self.log.flushed_offset == len(self.records)

    @invariant()
    def limits_agree(self) -> None:
        if hasattr(self, "log"):
            assert self.log.start_offset == self.start
            assert self.log.end_offset == len(self.records)
            assert self.partition.readable_end_offset == self.visible
            self.check_epochs()

    def check_epochs(self) -> None:
        """Of the epochs that ended before the start nothing is known; the others ended where the next one began."""
        assert self.log.last_epoch == self.partition.role.epoch == self.epochs[-1][0]
        ends = [began for _, began in self.epochs[1:]] + [len(self.records)]
        known = [(epoch, end) for (epoch, _), end in zip(self.epochs, ends, strict=True) if end > self.start]
        for epoch, end in known:
            assert self.log.epoch_end(epoch) == (epoch, end)
        for epoch, _ in self.epochs:
            assert self.log.epoch_end(epoch)[1] >= self.start


class TestLogAgainstList(LogMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=80,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
        derandomize=True,  # but other modules loaded before, other examples: Hypothesis takes numbers from them
    )
