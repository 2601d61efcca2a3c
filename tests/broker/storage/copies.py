"""Logs with the same segments on memory disks, and damage to their files that a power cut does not take back."""

from __future__ import annotations

from pathlib import Path

from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from broker.storage.segment import Segment
from kafkalog.clock import ManualClock
from tests.broker.storage.batches import TOPIC_ID, numbered, topic
from tests.crash.memory_disk import MemoryDisk

PATH = Path("/data")
BATCHES, RECORDS = 4, 2
PER_SEGMENT = BATCHES * RECORDS
SEGMENTS = 4
END = SEGMENTS * PER_SEGMENT
PRODUCER = 7


def open_copy(disk: MemoryDisk, leader_epoch: int | None = 3) -> Log:
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock(), producer_batches_remembered=5)
    return directory.open_log(TOPIC_ID, 0, "t-0", topic(index_interval_bytes=700, segment_ms=1000), leader_epoch)


def new_copy(disk: MemoryDisk | None = None) -> Log:
    """Segments of four batches with two records each, in leader epochs 0 to 3; all but the last are closed and
    synced."""
    clock = ManualClock()
    directory = LogDirectory(PATH, disk=disk or MemoryDisk(), clock=clock, producer_batches_remembered=5)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(index_interval_bytes=700, segment_ms=1000), 0)
    for number in range(SEGMENTS):
        if number:
            log.begin_epoch(number)
        clock.advance(10)
        for offset in range(number * PER_SEGMENT, (number + 1) * PER_SEGMENT, RECORDS):
            sent = PRODUCER, 0, offset
            log.append([numbered(offset, RECORDS, 8, producer=sent, timestamps_us=offset)], log.last_epoch)
    log.flush()
    return log


def flip(disk: MemoryDisk, path: Path, at: int) -> None:
    file = disk._file(path)
    for data in (file.data, file.durable):
        data[at] ^= 4


def cut(disk: MemoryDisk, path: Path, size: int) -> None:
    file = disk._file(path)
    for data in (file.data, file.durable):
        del data[size:]


def bytes_in(log: Log, segment: Segment) -> bytes:
    return log.read_segment(segment, 0, segment.size)


def check_all(log: Log) -> int:
    """Check all closed segments and the files; returns the bytes read."""
    read = 0
    for segment in log.view.segments[:-1]:
        read += sum(log.check(segment))
        log.check_index(segment)
    log.check_files()
    return read


def batch_at(position: int, batch_bytes: int) -> tuple[int, int]:
    """The offsets [start, end), within its segment, of the batch at a position."""
    number = position // batch_bytes
    return number * RECORDS, (number + 1) * RECORDS
