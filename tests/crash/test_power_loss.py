"""The machine stops before every step: of what was not synced any sectors and names may be gone, in any mixture."""

from __future__ import annotations

import random

import pytest

from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_kills import killed_at
from tests.crash.workload import Workload, check_survivor


def steps(flush: bool) -> int:
    disk = MemoryDisk()
    Workload(disk, flush=flush).run()
    return len(disk.steps)


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "left-to-the-system"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_power_cut_before_every_step_keeps_what_was_flushed(flush: bool, keep: float) -> None:
    for step in range(steps(flush)):
        disk, work = killed_at(step, flush=flush, torn=300)
        check_survivor(disk.after_power_cut(random.Random(step), keep), work, power_cut=True)


def test_power_cut_of_a_long_unsynced_tail_never_serves_a_wrong_record() -> None:
    disk, work = killed_at(steps(flush=False) - 30, flush=False)
    for seed in range(150):
        check_survivor(disk.after_power_cut(random.Random(seed), 0.8), work, power_cut=True)
