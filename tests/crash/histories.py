"""Random histories of one log: lives that end in a kill, a power cut or a stop, each on what the ones before have left.

One cut finds a log as it was meant to be. A second one finds the holes of the first, with an index that may be older.
"""

from __future__ import annotations

import random

from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from tests.broker.storage.batches import TOPIC_ID, numbered, read_all, topic
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import PATH

_LIVES = 8
_STEPS_MAX = 300
_STOPS = 0.005  # of all acts; one life in five ends in a stop


class _Crash(BaseException):
    """The process ends here."""


class History:
    """One log's lives, as a seed has them.

    Args:
        tidied: segments are rolled by age, the directory is tidied, and some lives end in a stop.

    Attributes:
        kept: value by offset of what a power cut must leave.
        written: the same of what a kill must leave.
    """

    def __init__(self, seed: int, tidied: bool = True) -> None:
        self._tidied = tidied
        self._chance = random.Random(seed)
        self._disk = MemoryDisk()
        self._clock = ManualClock()
        self._steps_left: int | None = None
        self._next_value = 0
        self.kept: dict[int, bytes] = {}
        self.written: dict[int, bytes] = {}

    def run(self) -> None:
        """Live all lives. Raises AssertionError if a start does not find what it must, or finds something twice."""
        for life in range(_LIVES):
            self._disk.before = self._count_step
            directory = LogDirectory(PATH, disk=self._disk, clock=self._clock)
            segment_bytes, interval = self._chance.choice([4096, 8192, 1 << 20]), self._chance.choice([64, 512])
            segment_ms = 60_000 if self._tidied else 86_400_000
            settings = topic(segment_bytes=segment_bytes, segment_ms=segment_ms, index_interval_bytes=interval)
            log = directory.open_log(TOPIC_ID, 0, "t-0", settings, life)
            self._check(log)
            self._steps_left = self._chance.randint(5, _STEPS_MAX)
            try:
                while not (self._tidied and self._chance.random() < _STOPS):
                    self._act(directory, log)
                directory.close()
                self.kept = dict(self.written)
            except _Crash:
                pass
            self._steps_left = None
            image = self._disk.after_kill()
            if self._chance.random() < 0.7:
                image = image.after_power_cut(self._chance, self._chance.choice([0.0, 0.3, 0.7, 0.95]))
                self.written = dict(self.kept)
            self._disk = image

    def _count_step(self, step: str) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            if not self._steps_left:
                raise _Crash

    def _act(self, directory: LogDirectory, log: Log) -> None:
        what = self._chance.choices(["append", "flush", "checkpoint", "tidy"], [10, 1, 1, 1])[0]
        if what == "append":
            first, count = self._next_value, self._chance.choice([1, 2, 3])
            size = self._chance.choice([20, 20, 200, 700])
            self._next_value += count
            base = log.end_offset
            log.append([numbered(first, count, size)], log.last_epoch)
            self.written |= {base + each: b"%0*d" % (size, first + each) for each in range(count)}
        elif what == "flush":
            log.flush()
        elif what == "checkpoint":
            log.checkpoint()
        else:
            self._clock.advance(20)
            if self._tidied:
                directory.tidy()
        self.kept |= {offset: value for offset, value in self.written.items() if offset < log.flushed_offset}

    def _check(self, log: Log) -> None:
        found = read_all(log)
        lost = {offset: value for offset, value in self.written.items() if found.get(offset) != value}
        assert not lost, f"offsets {min(lost)} to {max(lost)} are lost"
        values = [value for value in found.values() if value is not None]
        assert len(set(values)) == len(values)
        self.written = {offset: value for offset, value in found.items() if value is not None}
        self.kept = dict(self.written)
