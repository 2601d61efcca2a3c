"""The machine stops before every step: of what was not synced any sectors and names may be gone, in any mixture."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from broker.storage.log import Appended
from tests.broker.storage.batches import make_batch, numbered
from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_kills import FLUSHES
from tests.crash.workload import PRODUCER, check_survivor, crashes, open_directory, open_log


@FLUSHES
@pytest.mark.parametrize("keep", [0.0, 0.7])
def test_power_cut_before_every_step_keeps_what_was_flushed(flush: bool, keep: float) -> None:
    for number, crash in enumerate(crashes(flush)):
        check_survivor(crash.disk.after_power_cut(random.Random(number), keep), crash.promises, power_cut=True)


def test_power_cut_of_a_long_unsynced_tail_never_serves_a_wrong_record() -> None:
    unsynced = max(crashes(flush=False), key=lambda crash: crash.promises.end - crash.promises.flushed_to)
    assert unsynced.promises.end - unsynced.promises.flushed_to >= 20
    for seed in range(150):
        check_survivor(unsynced.disk.after_power_cut(random.Random(seed), 0.8), unsynced.promises, power_cut=True)


def test_power_cut_after_a_truncation_does_not_revive_what_was_saved_of_the_part_cut_off() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    for offset in (0, 3, 6):
        log.append([numbered(offset, 3, producer=(PRODUCER, 0, offset), timestamps_us=offset)])
    log.checkpoint()
    log.truncate_to(3)
    for offset in (3, 6, 9):
        log.append([numbered(offset, 3, timestamps_us=1000 + offset)])
    log.flush()
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    assert log.end_offset == 12
    assert log.offset_for_timestamp(500) == (3, 1003)
    (appended,) = log.append([numbered(12, 3, producer=(PRODUCER, 0, 3))])
    assert isinstance(appended, Appended)
    assert not appended.duplicate


class FullForProducers(MemoryDisk):
    """Has no room for the producers' state while `full`."""

    full = False

    def create(self, path: Path) -> int:
        if self.full and ".producers" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path)


def test_power_cut_after_a_deletion_keeps_the_marks_that_the_roll_before_it_had_no_room_for() -> None:
    disk = FullForProducers()
    log = open_log(open_directory(disk))
    log.append_decided([make_batch([b"x"], producer=(9, 0, 0), transaction=(4, 0))])
    log.show(9, 4)
    log.append([numbered(1, size=3000)])
    log.append([numbered(2, size=1000)])  # in another segment
    disk.full = True
    log.flush()
    disk.full = False
    log.append([numbered(3)])  # nobody synced it
    log.delete_before(2)
    assert not [name for name in disk.names(log.directory) if name == f"{0:020d}.log"]
    log = open_log(open_directory(disk.after_power_cut(random.Random(0), 0.0)))
    mark = log.mark(9)
    assert mark is not None and mark.batch_id == 4
