"""kill -9 before every single step that a log asks of its disk: what the system was given is all there afterwards."""

from __future__ import annotations

import random

import pytest

from kafkalog.clock import ManualClock
from tests.broker.storage.batches import numbered
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import PRODUCER, Workload, check_survivor, crashes, open_directory, open_log

FLUSHES = pytest.mark.parametrize("flush", [True, False], ids=["flushed", "left-to-the-system"])


def test_workload_reaches_every_kind_of_step() -> None:
    kinds = {crash.step.partition(" ")[0] for crash in crashes(flush=True)}
    assert kinds == {"create", "write", "truncate", "sync", "sync_dir", "rename", "unlink", "make_dir"}


def test_workload_that_is_not_killed_keeps_its_promises_and_closes_its_files() -> None:
    disk = MemoryDisk()
    work = Workload(disk, flush=True)
    work.run()
    assert disk.open_files == 0
    check_survivor(disk.after_kill(), work.promises(), power_cut=False)


def test_a_start_that_reads_full_segments_for_their_producers_keeps_none_of_them_open() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    for offset in range(40):
        log.append([numbered(offset, size=300, producer=(PRODUCER, 0, offset))], log.last_epoch)
    log.flush()
    for name in disk.names(log.directory):
        if name.endswith(".producers"):
            disk.unlink(log.directory / name)
    disk = disk.after_kill()
    directory = open_directory(disk)
    before = disk.open_files
    log = open_log(directory)
    assert len(log.view.segments) > 3
    assert disk.open_files == before + 1


@FLUSHES
def test_kill_before_every_step_loses_nothing_that_the_system_had(flush: bool) -> None:
    for crash in crashes(flush):
        check_survivor(crash.disk.after_kill(), crash.promises, power_cut=False)


def test_kill_within_every_write_leaves_no_torn_batch() -> None:
    for crash in crashes(flush=False):
        if crash.disk.is_within_write:
            for length in (1, 96, 447):
                disk = crash.disk.after_kill()
                disk.tear(length)
                check_survivor(disk, crash.promises, power_cut=False)


def test_kill_at_every_step_of_a_recovery_costs_nothing() -> None:
    for crash in crashes(flush=True)[::8]:
        left = crash.disk.after_kill()
        if left.is_within_write:
            left.tear(150)
        recovering = left.after_kill()
        images = recovering.images()
        open_log(open_directory(recovering), leader_epoch=1)
        for image in images:
            check_survivor(image, crash.promises, power_cut=False)


def test_power_cut_after_a_recovery_keeps_what_the_recovery_showed() -> None:
    for crash in crashes(flush=False)[::3]:
        disk = crash.disk.after_kill()
        end_offset = open_log(open_directory(disk), leader_epoch=1).end_offset
        seen = crash.promises.copy(crash.promises.now_us)
        seen.flushed_to = end_offset
        check_survivor(disk.after_power_cut(random.Random(0), 0.0), seen, power_cut=True)


@FLUSHES
def test_deletion_between_a_recovery_and_another_stop_forgets_no_producer(flush: bool) -> None:
    for number, crash in enumerate(crashes(flush)[::2]):
        disk = crash.disk.after_kill()
        log = open_log(open_directory(disk, ManualClock(crash.promises.now_us)), leader_epoch=1)
        seen = crash.promises.copy(crash.promises.now_us)
        seen.flushed_to = log.end_offset  # a start syncs what it finds
        seen.start = max(seen.start, log.start_offset)
        seen.start_in_flight = log.view.bases[-1] if number % 2 else log.end_offset
        images = disk.images() if number % 8 < 2 else []
        log.delete_before(seen.start_in_flight)
        for seed, image in enumerate(images):
            check_survivor(image.after_power_cut(random.Random(seed), 0.5), seen, power_cut=True)
            check_survivor(image, seen, power_cut=False)
        disk.before = lambda step: None
        seen.start = log.start_offset
        check_survivor(disk.after_power_cut(random.Random(number), 0.0), seen, power_cut=True)
        check_survivor(disk.after_kill(), seen, power_cut=False)
