"""The machine stops before every step: of what was not synced any sectors and names may be gone, in any mixture."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from broker.storage.epochs import read_epochs
from broker.storage.log import Appended
from kafkalog.clock import ManualClock
from kafkalog.errors import DiskFull, OutOfFiles
from tests.broker.storage.batches import make_batch, numbered, read_all
from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_kills import FLUSHES
from tests.crash.workload import PRODUCER, RECORDS, check_survivor, crashes, open_directory, open_log


@FLUSHES
@pytest.mark.parametrize("keep", [0.0, 0.7])
def test_power_cut_before_every_step_keeps_what_was_flushed(flush: bool, keep: float) -> None:
    for number, crash in enumerate(crashes(flush)):
        check_survivor(crash.disk.after_power_cut(random.Random(number), keep), crash.promises, power_cut=True)


@pytest.mark.parametrize("keep", [0.0, 0.5])
@FLUSHES
def test_power_cut_after_a_kill_keeps_what_was_flushed_in_between(flush: bool, keep: float) -> None:
    for number, crash in enumerate(crashes(flush)):
        disk = crash.disk.after_kill()
        directory = open_directory(disk, ManualClock(crash.promises.now_us))
        whose = directory.directory_id
        log = open_log(directory, leader_epoch=1)
        seen = crash.promises.copy(crash.promises.now_us)
        seen.start, at = log.start_offset, log.end_offset
        log.append([seen.next_batch(at)], log.last_epoch)
        log.flush()
        seen.others = {other for other in seen.others if other < at}
        for known in (seen.written, seen.in_flight):
            for cut in [offset for offset in known if offset >= at]:
                del known[cut]
        seen.written |= {offset: b"%020d" % offset for offset in range(at, at + RECORDS)}
        if seen.cut_in_flight is not None:
            seen.epochs = {epoch: start for epoch, start in seen.epochs.items() if start < at}
        seen.flushed_to, seen.cut_in_flight = log.end_offset, None
        seen.start_in_flight = max(seen.start, seen.start_in_flight)
        seen.sent = {producer: sent for producer, sent in seen.sent.items() if sent[2] < at and producer != PRODUCER}
        left = disk.after_power_cut(random.Random(number), keep)
        check_survivor(left.after_kill(), seen, power_cut=True)
        assert directory.cluster_id is None or open_directory(left).directory_id == whose


def test_power_cut_of_a_long_unsynced_tail_never_serves_a_wrong_record() -> None:
    unsynced = max(crashes(flush=False), key=lambda crash: crash.promises.end - crash.promises.flushed_to)
    assert unsynced.promises.end - unsynced.promises.flushed_to >= 20
    for seed in range(150):
        check_survivor(unsynced.disk.after_power_cut(random.Random(seed), 0.8), unsynced.promises, power_cut=True)


def test_power_cut_after_a_truncation_does_not_revive_what_was_saved_of_the_part_cut_off() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    for offset in (0, 3, 6):
        log.append([numbered(offset, 3, producer=(PRODUCER, 0, offset), timestamps_us=offset)], log.last_epoch)
    log.checkpoint()
    log.truncate_to(3)
    log.begin_epoch(1)
    for offset in (3, 6, 9):
        log.append([numbered(offset, 3, timestamps_us=1000 + offset)], log.last_epoch)
    log.flush()
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    assert log.end_offset == 12
    assert log.reader.offset_for_timestamp(500) == (3, 1003)
    (appended,) = log.append([numbered(12, 3, producer=(PRODUCER, 0, 3))], log.last_epoch)
    assert isinstance(appended, Appended) and appended.base_offset == 12


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("epochs", [(1,), (1, 2)])
def test_power_cut_keeps_where_epochs_began_with_and_without_records(epochs: tuple[int, ...], keep: float) -> None:
    """What the batches show is not synced: an epoch that has records takes no sync before the first of them."""
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    log.append([numbered(0, 3)], log.last_epoch)
    for epoch in epochs:
        log.begin_epoch(epoch, durable=False)
    log.append([numbered(3, 3)], epochs[-1])
    log.flush()
    expected = [log.epoch_end(epoch) for epoch in range(4)]
    for seed in range(20):
        left = open_log(open_directory(disk.after_power_cut(random.Random(seed), keep)), leader_epoch=epochs[-1])
        assert [left.epoch_end(epoch) for epoch in range(4)] == expected


def test_power_cut_keeps_where_epochs_began_as_saved_where_there_are_other_replicas() -> None:
    """A damaged batch in which an epoch begins is repaired by it: its header may not show it any more."""
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    log.append([numbered(0, 3)], log.last_epoch)
    log.high_watermark = 0
    log.begin_epoch(1, durable=False)
    log.append([numbered(3, 3)], 1)
    left = read_epochs(disk.after_power_cut(random.Random(0), 0.0), log.directory)
    assert left is not None and left.entries == [(0, 0), (1, 3)]


def test_power_cut_after_a_start_that_was_refused_once_keeps_the_segment_that_it_named() -> None:
    class NoDescriptors(MemoryDisk):
        gone = False

        def sync_dir(self, path: Path) -> None:
            if self.gone:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            super().sync_dir(path)

    disk, clock = NoDescriptors(), ManualClock()
    directory = open_directory(disk, clock)
    log = open_log(directory)
    log.append([numbered(0)], log.last_epoch)
    log.checkpoint()
    clock.advance(61)
    assert log.roll_if_old()
    directory.close()
    directory = open_directory(disk, clock)
    assert directory.was_clean
    disk.gone = True
    with pytest.raises(OutOfFiles):
        open_log(directory)
    disk.gone = False
    log = open_log(directory)
    log.append([numbered(1)], log.last_epoch)
    log.flush()
    left = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    assert list(read_all(left)) == [0, 1]


def test_power_cut_does_not_bring_back_a_segment_that_a_start_dropped_for_a_gap_before_it() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    log.append([numbered(0, size=1500)], log.last_epoch)
    log.checkpoint()
    log.append([numbered(1, size=1500)], log.last_epoch)
    log.append([numbered(2, size=1500)], log.last_epoch)
    later = log.view.segments[-1]
    assert later.base_offset == 2
    disk.sync_dir(log.directory)  # the system may write the second segment first
    file = later.share_file()
    disk.sync(file.fd)
    disk = disk.after_power_cut(random.Random(0), 0.0)
    log = open_log(open_directory(disk))
    assert log.end_offset == 1
    log.append([numbered(101)], log.last_epoch)
    log.flush()
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    assert list(read_all(log).values()) == [b"%01500d" % 0, b"%020d" % 101]


def test_power_cut_does_not_bring_back_the_producers_of_records_that_are_lost() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    log.append([numbered(0), numbered(1), numbered(2, producer=(9, 0, 0))], log.last_epoch)
    log.checkpoint()
    for name in disk.names(log.directory):
        if not name.endswith(".producers"):
            disk.unlink(log.directory / name)
    disk.sync_dir(log.directory)
    log = open_log(open_directory(disk))
    assert log.end_offset == 0
    for number in range(5):
        log.append([numbered(number)], log.last_epoch)
    log.flush()
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    (appended,) = log.append([numbered(5, producer=(9, 0, 0))], log.last_epoch)
    assert isinstance(appended, Appended) and appended.base_offset == 5


class FullForProducers(MemoryDisk):
    """Has no room for the producers' state while `full`; where `relieved`, no longer than until a segment is gone."""

    full = False
    relieved = False

    def create(self, path: Path) -> int:
        if self.full and ".producers" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self.relieved and path.suffix == ".log":
            self.full = False


@pytest.mark.parametrize("relieved", [True, False])
def test_deletion_on_a_full_disk_forgets_no_producer(relieved: bool) -> None:
    """What the saved state tells may go, and makes room for a newer one; else nothing is deleted."""
    disk = FullForProducers()
    log = open_log(open_directory(disk))
    for number in range(6):
        log.append([numbered(number, size=1500, producer=(number, 0, 0))], log.last_epoch)
        if number == 2:
            log.checkpoint()
            disk.full, disk.relieved = True, relieved
    log.flush()
    bases = log.view.bases
    assert bases == (0, 2, 4)
    if relieved:
        log.delete_before(bases[-1])
        assert log.view.bases == bases[-1:]
    else:
        with pytest.raises(DiskFull):
            log.delete_before(bases[-1])
        assert log.start_offset <= 3
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    for number in range(6):
        (appended,) = log.append([numbered(number, size=1500, producer=(number, 0, 0))], log.last_epoch)
        assert isinstance(appended, Appended) and appended.base_offset == number


def test_power_cut_after_a_deletion_keeps_the_marks_that_the_roll_before_it_had_no_room_for() -> None:
    disk = FullForProducers()
    log = open_log(open_directory(disk))
    log.append_decided([make_batch([b"x"], producer=(9, 0, 0), transaction=(4, 0))], log.last_epoch)
    log.append([numbered(1, size=3000)], log.last_epoch)
    log.append([numbered(2, size=1000)], log.last_epoch)  # in another segment
    disk.full = True
    log.flush()
    disk.full = False
    log.append([numbered(3)], log.last_epoch)  # nobody synced it
    log.delete_before(2)
    assert not [name for name in disk.names(log.directory) if name == f"{0:020d}.log"]
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    progress = log.apply_progress(9)
    assert progress is not None and progress.batch_id == 4
