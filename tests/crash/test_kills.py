"""kill -9 before every single step that a log asks of its disk: what the system was given is all there afterwards."""

from __future__ import annotations

import pytest

from tests.crash.memory_disk import Killed, MemoryDisk
from tests.crash.workload import Workload, check_survivor, open_directory, open_log


def steps_of_workload() -> list[str]:
    disk = MemoryDisk()
    Workload(disk, flush=True).run()
    return disk.steps


def killed_at(step: int, *, flush: bool, torn: int = 0) -> tuple[MemoryDisk, Workload]:
    """The disk and the promises at the moment before a step; a write has written its first `torn` bytes."""
    disk = MemoryDisk()
    work = Workload(disk, flush=flush)

    def stop(number: int, name: str) -> None:
        if number == step:
            killed = Killed(name)
            killed.torn = torn  # type: ignore[attr-defined]
            raise killed

    disk.before = stop
    with pytest.raises(Killed):
        work.run()
    return disk, work


def test_workload_reaches_every_kind_of_step() -> None:
    kinds = {step.partition(" ")[0] for step in steps_of_workload()}
    assert kinds == {"create", "write", "truncate", "sync", "sync_dir", "rename", "unlink", "make_dir"}


def test_workload_that_is_not_killed_keeps_its_promises_and_closes_its_files() -> None:
    disk = MemoryDisk()
    work = Workload(disk, flush=True)
    work.run()
    assert disk.open_files == 0
    check_survivor(disk.after_kill(), work, power_cut=False)


def test_kill_before_every_step_loses_nothing_that_the_system_had() -> None:
    for step in range(len(steps_of_workload())):
        disk, work = killed_at(step, flush=True)
        check_survivor(disk.after_kill(), work, power_cut=False)


def test_kill_without_flushes_loses_nothing_that_the_system_had() -> None:
    disk = MemoryDisk()
    Workload(disk, flush=False).run()
    for step in range(len(disk.steps)):
        killed, work = killed_at(step, flush=False)
        check_survivor(killed.after_kill(), work, power_cut=False)


def test_kill_within_every_write_leaves_no_torn_batch() -> None:
    for step, name in enumerate(steps_of_workload()):
        if name == "write":
            for torn in (1, 95, 96, 200, 447):
                disk, work = killed_at(step, flush=True, torn=torn)
                check_survivor(disk.after_kill(), work, power_cut=False)


def test_kill_at_every_step_of_a_recovery_costs_nothing() -> None:
    all_steps = steps_of_workload()
    for step in range(0, len(all_steps), 5):
        disk, work = killed_at(step, flush=True, torn=150)
        recovering = disk.after_kill()
        open_log(open_directory(recovering), leader_epoch=1)
        for second in range(len(recovering.steps)):
            again = disk.after_kill()

            def stop(number: int, name: str, at: int = second) -> None:
                if number == at:
                    raise Killed(name)

            again.before = stop
            with pytest.raises(Killed):
                open_log(open_directory(again), leader_epoch=1)
            check_survivor(again.after_kill(), work, power_cut=False)
