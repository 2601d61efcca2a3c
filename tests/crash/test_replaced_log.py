"""A log is made in the place of a lost one: whatever stops it, what is found is the new log, or the old, or none."""

from __future__ import annotations

import random

import pytest

from tests.broker.storage.batches import TOPIC_ID, numbered, read_all
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import open_directory, open_log

START = 1000


@pytest.mark.parametrize("folder_is_there", [True, False])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5], ids=["killed", "power-cut", "power-cut-half"])
def test_a_stop_at_any_step_leaves_no_log_that_begins_elsewhere(folder_is_there: bool, keep: float | None) -> None:
    disk = MemoryDisk()
    directory = open_directory(disk)
    directory.claim("c", 1)
    old = {}
    if folder_is_there:
        log = open_log(directory)
        log.append([numbered(0)])
        log.flush()
        old = read_all(log)
    images: list[MemoryDisk] = []
    disk.before = lambda step: images.append(disk.after_kill())
    directory.replace_log(TOPIC_ID, 0, "t-0", START)
    done = disk.after_kill()
    assert len(images) > 5
    for seed, image in enumerate([*images, done]):
        left = image if keep is None else image.after_power_cut(random.Random(seed), keep)
        directory = open_directory(left)
        directory.claim("c", 1)
        if directory.has_log(TOPIC_ID, 0):
            log = open_log(directory, leader_epoch=1)
            assert read_all(log) == old or log.start_offset == START
            assert image is not done or log.start_offset == START
            log.append([numbered(log.end_offset)])
        else:
            assert image is not done
        directory.replace_log(TOPIC_ID, 0, "t-0", 2 * START)
        assert open_log(directory, leader_epoch=2).start_offset == 2 * START
