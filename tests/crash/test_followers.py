"""A follower's machine or process stops before every step of its copies, truncations and resets."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.replica.partition import Partition
from broker.storage.epochs import EPOCHS_NAME
from broker.storage.log import Appended, Log
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import CorruptBatch, DiskFull, StorageFailed
from kafkalog.format.batch import iter_batches
from kafkalog.zk.registry import PartitionState
from tests.broker.storage.batches import TOPIC_ID, numbered, read_all, topic
from tests.broker.storage.replicas import bytes_of, catch_up
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import check_folder, open_directory, open_log


def fill(log: Log, batches: int, producer: int) -> None:
    """Append batches of a producer, whose values differ from those of the others."""
    for _ in range(batches):
        sent = producer, 0, next_sequence(log, producer)
        log.append([numbered(producer * 10_000 + log.end_offset, 2, producer=sent)], log.last_epoch)


def next_sequence(log: Log, producer: int) -> int:
    known = log._producers._by_id.get(producer)
    return 0 if known is None else known.next_sequence


def open_follower(disk: MemoryDisk, *, is_there: bool = False) -> Log:
    directory = open_directory(disk)
    assert not is_there or directory.has_log(TOPIC_ID, 0)
    return directory.open_log(TOPIC_ID, 0, "t-0", topic(), None)


@functools.cache
def leaders() -> list[Log]:
    """Three leaders in turn: the second has lost the end of the first one's log, the third has a later start."""
    found = []
    for later in range(3):
        log = open_log(open_directory(MemoryDisk()))
        fill(log, 20, 0)
        log.begin_epoch(1)
        fill(log, 3, 0)
        if later == 0:
            log.begin_epoch(2)
            log.begin_epoch(3)
            fill(log, 15, 1)
        else:
            log.begin_epoch(4)
            fill(log, 25, 2)
        if later == 2:
            log.begin_epoch(6)
            fill(log, 30, 3)
            log.delete_before(130)
        found.append(log)
    return found


class Stopped(NamedTuple):
    """The disk before a step; `leader`: number of the one that is followed; `synced`: end offset of the last flush."""

    step: str
    disk: MemoryDisk
    leader: int
    synced: int


@functools.cache
def stops() -> list[Stopped]:
    found: list[Stopped] = []
    disk = MemoryDisk()
    for _ in follow(disk, found):
        pass
    return found


def follow(disk: MemoryDisk, found: list[Stopped]) -> Iterator[Log]:
    """Follow the leaders in turn."""
    followed = synced = 0
    disk.before = lambda step: found.append(Stopped(step, disk.after_kill(), followed, synced))
    log = open_follower(disk)
    for followed, leader in enumerate(leaders()):
        if followed == 2:
            synced = 0  # it goes on with nothing of before
        elif followed:
            synced = min(synced, 46)  # where the leaders diverge
        catch_up(log, leader, leader.last_epoch)
        yield log
        log.flush()
        synced = log.end_offset
        log.checkpoint()


def epochs_of(log: Log) -> dict[int, int]:
    return dict(log._epochs.entries)


def check(disk: MemoryDisk, stopped: Stopped, *, power_cut: bool) -> None:
    """What is left is of one leader, batch by batch; and the replica follows the last leader to the end."""
    log = open_follower(disk, is_there=stopped.leader > 0)
    assert log.end_offset >= stopped.synced
    offset = log.start_offset
    while offset < log.end_offset:
        try:
            with log.reader.read(offset, 1 << 20) as part:
                batches = list(iter_batches(memoryview(part.read())))
        except CorruptBatch as error:
            assert power_cut and offset >= stopped.synced
            offset = error.facts["end_offset"]
            continue
        for header, data in batches:
            whose = next(each for each in leaders() if header.leader_epoch in epochs_of(each))
            if whose.start_offset <= header.base_offset:
                with whose.reader.read(header.base_offset, 1) as same:
                    assert same.read() == bytes(data)
            offset = header.end_offset
    check_folder(disk, log)
    for leader in leaders()[stopped.leader :]:
        catch_up(log, leader, leader.last_epoch)
        found, theirs = read_all(log), read_all(leader)
        damaged = {offset for offset, value in found.items() if value is None}
        assert power_cut or not damaged
        assert found == theirs | dict.fromkeys(damaged)
        if not damaged:
            assert bytes_of(log) == bytes_of(leader)
    if damaged:
        return
    log.begin_epoch(9)
    for producer in (0, 2, 3):  # only the last one has records after the log's start
        last = producer, 0, next_sequence(leaders()[2], producer) - 2
        [again] = log.append([numbered(0, 2, producer=last)], 9)
        assert isinstance(again, Appended)
        assert (again.end_offset > log.start_offset) is (producer == 3)
    assert log.end_offset == leaders()[2].end_offset


def test_steps_are_of_every_kind() -> None:
    kinds = {stopped.step for stopped in stops()}
    assert {f"rename {EPOCHS_NAME}", "truncate", "rename reset", "unlink reset", "sync"} <= kinds
    assert f"rename {leaders()[2].start_offset:020d}.producers" in kinds
    assert [name for name in kinds if name.endswith(".log") and name.startswith(("rename", "unlink"))]


def test_kill_of_a_follower_before_every_step() -> None:
    for stopped in stops():
        check(stopped.disk.after_kill(), stopped, power_cut=False)


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_power_cut_of_a_follower_before_every_step(keep: float) -> None:
    for number, stopped in enumerate(stops()):
        check(stopped.disk.after_power_cut(random.Random(number), keep), stopped, power_cut=True)


def test_kill_of_a_follower_at_every_step_of_a_reset_that_a_start_finishes() -> None:
    begun = next(stopped for stopped in stops() if stopped.step == f"unlink {EPOCHS_NAME}")
    left = begun.disk.after_kill()
    images = left.images()
    open_follower(left)
    assert len(images) > 8
    for image in images:
        check(image.after_kill(), begun, power_cut=False)
        check(image.after_power_cut(random.Random(0), 0.5), begun, power_cut=True)


class Scarce(MemoryDisk):
    """To open a file and to list a folder are steps too, for each takes a descriptor."""

    def open(self, path: Path, *, write: bool = False) -> int:
        self._step(f"open {path.name}")
        return super().open(path, write=write)

    def names(self, path: Path) -> list[str]:
        self._step("names")
        return super().names(path)


@pytest.mark.parametrize("count", [1, 1 << 60])
@pytest.mark.parametrize(
    ("code", "kinds"),
    [(errno.ENOSPC, ("create", "write", "rename")), (errno.EMFILE, ("create", "open", "names", "sync_dir"))],
)
def test_reset_that_lacks_space_or_descriptors_at_any_step_is_carried_out_later(
    code: int, kinds: tuple[str, ...], count: int
) -> None:
    leader = leaders()[2]
    ends = set()
    for first in itertools.count():
        disk = Scarce()
        log = open_follower(disk)
        catch_up(log, leaders()[1], leaders()[1].last_epoch)
        before, tried = bytes_of(log), itertools.count()
        refused: list[str] = []

        def lack(step: str, first: int = first, tried: Iterator[int] = tried, refused: list[str] = refused) -> None:
            if step.startswith(kinds) and first <= next(tried) < first + count:
                refused.append(step)
                raise OSError(code, os.strerror(code), step)

        disk.before = lack
        is_reset = True
        try:
            log.reset_to(leader.start_offset)
        except DiskFull:
            is_reset = False
        if not refused:
            break
        if is_reset and count > 1:
            for use in (log.finish_reset, log.flush, log.checkpoint, log.apply_retention):
                with pytest.raises(DiskFull):
                    use()
        disk.before = lambda step: None
        left = Stopped(refused[0], disk, 2, 0)
        check(disk.after_kill(), left, power_cut=False)
        for number in range(4):
            check(disk.after_power_cut(random.Random(number), number / 3), left, power_cut=True)
        if is_reset:
            assert log.start_offset == log.end_offset == leader.start_offset
        else:
            assert bytes_of(log) == before
        ends.add(is_reset)
        log.finish_reset()
        catch_up(log, leader, leader.last_epoch)
        check(disk.after_kill(), Stopped("", disk, 2, log.end_offset), power_cut=False)
        assert bytes_of(log) == bytes_of(leader)
    assert ends == {True, False}


@pytest.mark.parametrize("kept", ["high watermark", "checkpoint", ""])
def test_a_follower_cuts_its_log_at_damage_that_a_loss_of_power_left_and_a_leader_keeps_what_is_good(kept: str) -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    fill(log, 8, 0)
    if kept == "checkpoint":
        log.checkpoint()
    fill(log, 8, 0)
    damaged = disk.after_kill()
    damaged.bytes_of(log.directory / "00000000000000000000.log")[700] ^= 4
    directory = open_directory(damaged)
    opened = directory.open_log(TOPIC_ID, 0, "t-0", topic(), None)
    replica = Partition("t", TOPIC_ID, 0, opened, directory, topic(), 1, SYSTEM_CLOCK)
    list(opened.check(opened.view.segments[0]))
    damage = opened.first_damage()
    assert damage is not None and 0 < damage < opened.end_offset == log.end_offset
    replica.role.lead(PartitionState(1, 5, (1,)), [0, 1])
    replica.following.cut_unsynced_damage()
    assert opened.end_offset == log.end_offset
    opened.high_watermark = damage + 1 if kept == "high watermark" else 0
    replica.following.may_have_lost = True
    replica.role.follow(0, 6)
    replica.following.cut_unsynced_damage()
    assert not replica.following.may_have_lost
    if kept:
        assert (
            opened.end_offset == log.end_offset
            and not replica.following.is_whole
            and not replica.following.position().is_whole
        )
    else:
        assert opened.end_offset == damage and replica.following.is_whole and replica.following.position().is_whole
        assert read_all(opened) == {offset: value for offset, value in read_all(log).items() if offset < damage}


def test_failed_step_of_a_follower_costs_nothing_flushed() -> None:
    class Failing(MemoryDisk):
        left = 0

        def _step(self, name: str) -> None:
            super()._step(name)
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    failed = 0
    for number in range(0, len(stops()), 3):
        disk = Failing()
        disk.left = number + 1
        seen: list[Stopped] = []
        try:
            for _ in follow(disk, seen):
                pass
        except StorageFailed:
            failed += 1
        disk.left = 0
        check(disk.after_power_cut(random.Random(number), 0.0), seen[-1], power_cut=True)
    assert failed > 20
