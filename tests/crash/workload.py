"""Everything a log does to its disk, in a fixed order, with a record of what was promised at each moment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from broker.storage.disk import Disk
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import DiskFull
from kafkalog.format.batch import Batch, BatchHeader
from tests.broker.storage.batches import TOPIC_ID, numbered, read_all, topic
from tests.crash.memory_disk import MemoryDisk

PATH = Path("/data")
PRODUCER = 7
RECORDS = 3


def open_directory(disk: Disk, clock: ManualClock | None = None) -> LogDirectory:
    return LogDirectory(PATH, disk=disk, clock=clock or ManualClock(), producer_batches_remembered=5)


def open_log(directory: LogDirectory, leader_epoch: int = 0) -> Log:
    return directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_ms=60_000, retention_ms=300_000), leader_epoch)


@dataclass
class Promises:
    """What a log's user may count on at one moment.

    Attributes:
        now_us: the time.
        written: value by offset of what append returned for.
        in_flight: the same of an append that has not returned.
        flushed_to: end of what a flush returned for.
        start: start offset as last returned; `start_in_flight`: what a call that has not returned may move it to.
        cut_in_flight: where a truncation that has not returned cuts.
        sent: of each producer the last batch appended and its offset, to be sent again.
        others: where the batches stand that are not PRODUCER's.
        epochs: where leader epochs began, of which begin_epoch returned.
    """

    now_us: int = 0
    written: dict[int, bytes] = field(default_factory=dict)
    in_flight: dict[int, bytes] = field(default_factory=dict)
    flushed_to: int = 0
    start: int = 0
    start_in_flight: int = 0
    cut_in_flight: int | None = None
    sent: dict[int, tuple[BatchHeader, bytes, int]] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    epochs: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return max(self.written, default=self.start - 1) + 1

    def copy(self, now_us: int) -> Promises:
        return replace(
            self,
            now_us=now_us,
            written=dict(self.written),
            in_flight=dict(self.in_flight),
            sent=dict(self.sent),
            others=set(self.others),
            epochs=dict(self.epochs),
        )

    def next_batch(self, offset: int, count: int = RECORDS) -> Batch:
        """What PRODUCER appends at an offset."""
        sequence = offset - RECORDS * sum(other < offset for other in self.others)
        return numbered(offset, count, producer=(PRODUCER, 0, sequence), timestamps_us=offset)


class Workload(Promises):
    """Appends of one idempotent producer, and of others that append once and then wait, mixed with what rolls, cuts,
    flushes and restarts."""

    def __init__(self, disk: Disk, *, flush: bool) -> None:
        super().__init__()
        self.disk = disk
        self.clock = ManualClock()
        self.flush = flush
        self.refused = 0
        self.unclean_stops = 0
        self.batches = 0
        self.epoch = 1

    def promises(self) -> Promises:
        return Promises(**{name: getattr(self, name) for name in Promises.__dataclass_fields__}).copy(
            self.clock.now_us()
        )

    def run(self) -> None:
        directory, log = self._open(0)
        self._append(log, 12)
        self._insist(log.checkpoint)
        self._append(log, 3)
        self._cut(log, lambda: log.delete_before(5), 5)
        self._append(log, 10, together=5)
        self.clock.advance(61)
        self._cut(log, log.roll_if_old)
        self._append(log, 2)
        self._checkpoint(log)
        self.clock.advance(61)
        self._cut(log, log.roll_if_old)
        self._insist(log.flush)
        self.clock.advance(189)
        self._append(log, 1)
        self._cut(log, log.apply_retention)
        self._close(directory)

        directory, log = self._open(1)
        self._append(log, 26)
        self._truncate(log, self.end - 2 * RECORDS)
        self._append(log, 2)
        self._checkpoint(log)
        self._append(log, 1)
        self._truncate(log, self.end - 22 * RECORDS)
        self._append(log, 20)
        self._checkpoint(log)
        self._truncate(log, self.end - 3 * RECORDS)
        self._append(log, 1)
        log.update_settings(topic(retention_bytes=2000))
        self._cut(log, log.apply_retention)
        self._append(log, 2)
        self._cut(log, lambda: log.delete_before(self.end), self.end)
        self._append(log, 2)
        self.clock.advance(10_000)
        log.update_settings(topic(retention_ms=1000))
        self._cut(log, log.apply_retention)
        self._append(log, 1)
        self._close(directory)

    def _insist(self, action: Callable[[], object]) -> None:
        """Do something until there is room on the disk for it."""
        for _ in range(100):
            try:
                action()
                return
            except DiskFull:
                self.refused += 1
        raise AssertionError("the disk never had room again")

    def _open(self, leader_epoch: int) -> tuple[LogDirectory, Log]:
        opened: list[tuple[LogDirectory, Log]] = []

        def attempt() -> None:
            directory = open_directory(self.disk, self.clock)
            try:
                directory.claim("c", 1)
                opened.append((directory, open_log(directory, leader_epoch)))
            except DiskFull:
                directory.close(clean=False)
                raise

        self._insist(attempt)
        return opened[0]

    def _close(self, directory: LogDirectory) -> None:
        directory.close()
        self.flushed_to = self.end
        self.unclean_stops += "clean" not in self.disk.names(PATH)

    def _append(self, log: Log, count: int, together: int = 1) -> None:
        """`count` batches, some in one call each; what a full disk refuses is sent again, as a producer does."""
        for _ in range(count // together):
            batches = []
            for number in range(together):
                offset = self.end + number * RECORDS
                batches.append(self._made(offset))
                self.in_flight |= {offset + i: b"%020d" % (offset + i) for i in range(RECORDS)}
            while batches:
                outcomes = log.append(batches, log.last_epoch)
                for outcome, (header, data) in zip(outcomes, list(batches), strict=True):
                    if isinstance(outcome, DiskFull):
                        self.refused += 1
                        assert self.refused < 1000
                        continue
                    assert isinstance(outcome, Appended), outcome
                    batches.remove((header, data))
                    self.sent[header.producer_id] = header, bytes(data), outcome.base_offset
                    for offset in range(outcome.base_offset, outcome.end_offset):
                        self.written[offset] = self.in_flight.pop(offset)
            if self.flush:
                self._insist(log.flush)
                self.flushed_to = self.end

    def _made(self, offset: int) -> Batch:
        self.batches += 1
        if self.batches % 4:
            return self.next_batch(offset)
        self.others.add(offset)
        return numbered(offset, RECORDS, producer=(100 + self.batches, 0, 0), timestamps_us=offset)

    def _checkpoint(self, log: Log) -> None:
        self._insist(log.checkpoint)
        self.flushed_to = self.end

    def _cut(self, log: Log, action: Callable[[], object], to: int | None = None) -> None:
        self.start_in_flight = self.end if to is None else to
        self._insist(action)
        self.start = self.start_in_flight = log.start_offset
        self.flushed_to = max(self.flushed_to, log.flushed_offset)

    def _truncate(self, log: Log, offset: int) -> None:
        self.cut_in_flight = offset
        self._insist(lambda: log.truncate_to(offset))
        assert log.end_offset == offset
        for cut in [at for at in self.written if at >= offset]:
            del self.written[cut]
        self.cut_in_flight = None
        self.flushed_to = min(self.flushed_to, offset)
        self.epochs = {epoch: start for epoch, start in self.epochs.items() if start < offset}
        for _ in range(2):  # the first gets no records
            self._begin_epoch(log)
        self.sent.clear()  # it is not said which states of the producers outlive a truncation
        self.others = {at for at in self.others if at < offset}

    def _begin_epoch(self, log: Log) -> None:
        epoch = self.epoch = self.epoch + 1
        self._insist(lambda: log.begin_epoch(epoch))
        self.epochs[epoch] = self.end


class Crash(NamedTuple):
    """An image of the disk at the moment before a step, and what was promised by then."""

    step: str
    disk: MemoryDisk
    promises: Promises


@functools.cache
def crashes(flush: bool) -> list[Crash]:
    """The workload stopped before each of its steps. To be looked at, not changed: tests share the images."""
    found: list[Crash] = []
    disk = MemoryDisk()
    work = Workload(disk, flush=flush)
    disk.before = lambda step: found.append(Crash(step, disk.after_kill(), work.promises()))
    work.run()
    return found


def check_folder(disk: MemoryDisk, log: Log) -> None:
    """Nothing stands in a log's folder but what belongs to it."""
    names = disk.names(log.directory)
    assert not [name for name in names if name.endswith(".tmp")]
    segments = [name for name in names if name.endswith(".log")]
    assert sum(disk.file_size(log.directory / name) for name in segments) == log.view.size_bytes
    assert all(int(name[:20]) > log.start_offset for name in segments[1:])


def check_survivor(disk: MemoryDisk, done: Promises, *, power_cut: bool) -> None:
    """Reopen what a crash left: all that was promised is there, and nothing that was never written."""
    clock = ManualClock(done.now_us)
    directory = open_directory(disk, clock)
    log = open_log(directory, leader_epoch=1)
    promised_to = done.flushed_to if power_cut else done.end
    if done.cut_in_flight is not None:
        promised_to = min(promised_to, done.cut_in_flight)
    assert done.start <= log.start_offset <= max(done.start_in_flight, done.start)
    assert log.end_offset >= max(promised_to, log.start_offset)
    known = done.written | done.in_flight
    found = read_all(log)
    for offset, value in found.items():
        assert value == known[offset] or (power_cut and value is None and offset >= done.flushed_to), offset
    assert set(found) == set(range(log.start_offset, log.end_offset))
    check_folder(disk, log)
    for epoch, start in done.epochs.items():
        if log.start_offset <= start <= log.end_offset and (done.cut_in_flight is None or start < done.cut_in_flight):
            assert log.epoch_end(epoch)[0] == epoch
            assert log.epoch_end(epoch - 1)[1] == (start if epoch > min(done.epochs) else log.epoch_end(epoch - 1)[1])
    for header, data, offset in done.sent.values() if done.cut_in_flight is None else ():
        if offset + RECORDS <= promised_to and not (header.producer_id == PRODUCER and done.in_flight):
            (again,) = log.append([(header, memoryview(bytearray(data)))], log.last_epoch)
            assert isinstance(again, Appended) and again.base_offset == offset, again
    end = log.end_offset
    # The producer goes on, unless batches of its were lost.
    whole = found and None not in found.values()
    (appended,) = log.append([done.next_batch(end, 2) if whole else numbered(end, 2)], log.last_epoch)
    assert appended == Appended(end, end + 2, done.now_us)
    directory.close()
    directory = open_directory(disk, clock)
    assert directory.was_clean
    found |= {end: b"%020d" % end, end + 1: b"%020d" % (end + 1)}
    assert read_all(open_log(directory, leader_epoch=2)) == found
    directory.close()
