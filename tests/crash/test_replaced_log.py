"""A log is made in the place of a lost one: whatever stops it, what is found is the new log, or the old, or none."""

from __future__ import annotations

import random

import pytest

from tests.broker.storage.batches import TOPIC_ID, numbered, read_all
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import PATH, open_directory, open_log

START = 1000
CUTS = 20  # of the names that were changed any may be lost: each step is cut so often
SEGMENT = f"{0:020d}.log"


def is_kept(disk: MemoryDisk, old_bytes: bytearray) -> bool:
    """Whether the log that stood there is on a disk, under its own name or another."""
    folders = [PATH / name for name in disk.names(PATH) if name.startswith(TOPIC_ID.hex())]
    return any(SEGMENT in disk.names(folder) and disk.bytes_of(folder / SEGMENT) == old_bytes for folder in folders)


@pytest.mark.parametrize("folder_is_there", [True, False])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5], ids=["killed", "power-cut", "power-cut-half"])
def test_a_stop_at_any_step_leaves_no_log_that_begins_elsewhere(folder_is_there: bool, keep: float | None) -> None:
    disk = MemoryDisk()
    directory = open_directory(disk)
    directory.claim("c", 1)
    old, old_bytes = {}, bytearray()
    if folder_is_there:
        log = open_log(directory)
        log.append([numbered(0)], log.last_epoch)
        log.flush()
        old, old_bytes = read_all(log), disk.bytes_of(log.directory / SEGMENT)
    images: list[MemoryDisk] = []
    disk.before = lambda step: images.append(disk.after_kill())
    directory.replace_log(TOPIC_ID, 0, "t-0", START)
    done = disk.after_kill()
    assert len(images) > 5
    for seed, image in enumerate([*images, done]):
        dice = random.Random(seed)
        found = [image] if keep is None else [image.after_power_cut(dice, keep) for _ in range(CUTS)]
        assert not folder_is_there or all(is_kept(left, old_bytes) for left in found)
        left = found[0]
        directory = open_directory(left)
        directory.claim("c", 1)
        if directory.has_log(TOPIC_ID, 0):
            log = open_log(directory, leader_epoch=1)
            assert read_all(log) == old or log.start_offset == START
            assert image is not done or log.start_offset == START
            log.append([numbered(log.end_offset)], log.last_epoch)
        else:
            assert image is not done
        directory.replace_log(TOPIC_ID, 0, "t-0", 2 * START)
        assert open_log(directory, leader_epoch=2).start_offset == 2 * START
