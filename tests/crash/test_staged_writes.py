"""A crash before every step of a staged write: what was prepared survives, what was decided comes into the log once and
whole, what was not decided never does, and no reader ever sees a part of a batch.

After each crash the partition is opened as a broker does, its readers are looked at, and then what was decided is
applied again, as a leader does that reads the decision.
"""

from __future__ import annotations

import errno
import functools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import pytest

from broker.replica.partition import Partition
from broker.staging import part as staged_part
from broker.staging import staging
from broker.staging.copies import StagedCopy, agreed_copies
from broker.staging.format import PartSpec, PreparedSet
from broker.storage.apply_progress import PROGRESS_KEPT_US
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import DiskFull, StagedPartLost, StorageFailed
from kafkalog.format.batch import Batch
from kafkalog.zk.registry import PartitionState
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import make_batch, numbered, read_all
from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_disk_errors import TAKES_ROOM, FailingDisk
from tests.crash.workload import PATH, open_directory

TRANSACTION, PRODUCER = "spark-stream-1", 1 << 62
OTHER, OTHER_PRODUCER = "app-1", 1 << 62 | 1


@pytest.fixture(autouse=True, params=[False, True], ids=["copied", "adopted"])
def small_files(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Sizes at which a few small batches fill files and are read in several pieces. Adopted: all batches of a part but
    the first are in files of its own, which become segments."""
    if request.param:
        monkeypatch.setattr(staging, "_OWN_FROM", 1)
        monkeypatch.setattr(staging, "_ADOPTED_MIN", 1)
        monkeypatch.setattr(staging, "_BATCH_MIN", 1)
    monkeypatch.setattr(staging, "_FILE_BYTES", 5000)
    monkeypatch.setattr(staging, "_WASTE_MAX", 2000)
    monkeypatch.setattr(staged_part, "_PIECE_BYTES", 1000)


@dataclass(frozen=True)
class Set:
    """A batch of a transaction: how many record batches each part has, by part number."""

    producer: int
    batch_id: int
    parts: tuple[tuple[int, int], ...]
    attempt: int = 0

    @property
    def commit_uuid(self) -> bytes:
        return b"commit%d-%d-%d" % (self.producer & 1, self.batch_id, self.attempt) + bytes(5)

    def uuid(self, part: int) -> bytes:
        return b"part%d-%d-%d-%02d" % (self.producer & 1, self.batch_id, self.attempt, part) + bytes(4)

    def batches(self, part: int) -> list[Batch]:
        count = dict(self.parts)[part]
        return [
            make_batch(
                list(self._values(part, number)),
                producer=(self.producer, 0, number),
                transaction=(self.batch_id, part),
            )
            for number in range(count)
        ]

    def _values(self, part: int, number: int) -> Iterator[bytes]:
        for record in range(2):
            yield b"%d-%d-%d %02d-%02d-%d" % (self.producer & 1, self.batch_id, self.attempt, part, number, record)

    @property
    def values(self) -> list[bytes]:
        return [value for part, count in self.parts for number in range(count) for value in self._values(part, number)]

    def prepared(self, version: int = -1) -> PreparedSet:
        specs = [
            PartSpec(self.uuid(part), part, count, sum(len(data) for _, data in self.batches(part)))
            for part, count in self.parts
        ]
        name = TRANSACTION if self.producer == PRODUCER else OTHER
        return PreparedSet(name, self.producer, self.batch_id, self.commit_uuid, version, tuple(specs))


FIRST = Set(PRODUCER, 0, ((0, 3), (4, 2)))
ZOMBIE = Set(PRODUCER, 1, ((0, 2),), attempt=1)
SECOND = Set(PRODUCER, 1, ((1, 4), (2, 1), (3, 3)))
FOREIGN = Set(OTHER_PRODUCER, 7, ((0, 5),))
UNDECIDED = Set(PRODUCER, 2, ((0, 2),))
LOOSE = Set(PRODUCER, 2, ((9, 2),), attempt=2)
ALL = (FIRST, ZOMBIE, SECOND, FOREIGN, UNDECIDED, LOOSE)


@dataclass
class Done:
    """What a broker's users were told by some moment."""

    prepared: set[Set] = field(default_factory=set)
    decided: set[Set] = field(default_factory=set)
    applied: set[Set] = field(default_factory=set)
    dropped: set[Set] = field(default_factory=set)
    plain: list[bytes] = field(default_factory=list)
    synced_plain: int = 0

    def copy(self) -> Done:
        return Done(
            set(self.prepared),
            set(self.decided),
            set(self.applied),
            set(self.dropped),
            list(self.plain),
            self.synced_plain,
        )


class Staged(Done):
    """Two transactions, a zombie's set and loose parts, with appends of others in between, over two starts."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__()
        self.disk = disk
        self.refused = 0

    def run(self) -> None:
        directory = self._start()
        self._stage(FIRST)
        self._plain()
        self._prepare(FIRST)
        self._stage(SECOND, ZOMBIE)
        self._apply(FIRST)
        self._prepare(ZOMBIE)
        self._drop(FIRST)
        self._plain()
        self._prepare(SECOND)
        self._stage(FOREIGN, LOOSE)
        self._apply(SECOND)
        self.partition.close()
        directory.close(clean=False)
        directory = self._start()
        self._prepare(FOREIGN)
        self._drop(ZOMBIE)
        self._plain()
        self._drop(SECOND)
        self._apply(FOREIGN)
        self._stage(UNDECIDED)
        self._prepare(UNDECIDED)
        self._try(self.partition.log.checkpoint)
        self.synced_plain = len(self.plain)
        self._drop(FOREIGN)
        self._plain()
        self.partition.close()
        directory.close()
        if "clean" in self.disk.names(PATH):
            self.synced_plain = len(self.plain)

    def _try(self, action: object) -> None:
        """Do something until there is room on the disk for it."""
        for _ in range(50):
            try:
                action()  # type: ignore[operator]
                return
            except DiskFull:
                self.refused += 1
        raise AssertionError("the disk never had room again")

    def _start(self) -> LogDirectory:
        opened: list[tuple[LogDirectory, Partition]] = []

        def attempt() -> None:
            directory = open_directory(self.disk)
            try:
                opened.append((directory, open_partition(directory)))
            except DiskFull:
                directory.close(clean=False)
                raise

        self._try(attempt)
        directory, self.partition = opened[0]
        return directory

    def _stage(self, *sets: Set) -> None:
        """The parts of some sets, batch by batch in turn, as tasks that run at once do."""
        left = [(each.uuid(part), each.batches(part)) for each in sets for part, _ in each.parts]
        while left:
            for uuid, batches in left:
                self._try(functools.partial(self.partition.staged.stage, uuid, [batches.pop(0)]))
            left = [(uuid, batches) for uuid, batches in left if batches]

    def _prepare(self, which: Set) -> None:
        def prepare() -> None:
            self.partition.staged.prepare(which.prepared())
            self.partition.staged.keep_prepared(which.commit_uuid)

        self._try(prepare)
        self.prepared.add(which)

    def _apply(self, which: Set) -> None:
        self.decided.add(which)
        self.dropped |= {each for each in ALL if (each.producer, each.batch_id) == (which.producer, which.batch_id)}
        self._try(functools.partial(apply, self.partition, which))
        self.applied.add(which)
        self.synced_plain = len(self.plain)

    def _drop(self, which: Set) -> None:
        self.dropped.add(which)
        self._try(functools.partial(self.partition.staged.drop, which.commit_uuid, 5))

    def _plain(self) -> None:
        value = b"%020d" % len(self.plain)
        self.plain.append(value)

        def append() -> None:
            _, (outcome,) = self.partition.append_as_leader([numbered(len(self.plain) - 1)])
            if isinstance(outcome, DiskFull):
                raise outcome

        self._try(append)


def apply(partition: Partition, which: Set) -> None:
    applied = partition.staged.apply(
        which.prepared().transactional_id, which.producer, which.batch_id, which.commit_uuid
    )
    partition.staged.finish_apply(applied)


def apply_late(partition: Partition, which: Set, done: Done) -> None:
    """As a coordinator does that got no answer. If the batch was done and its set dropped, damage keeps the partition
    from knowing that; the coordinator then reads the decision (`coordinator.py:_roll_forward`)."""
    try:
        apply(partition, which)
    except StagedPartLost:
        assert partition._staging.may_lack_sets
        assert which in done.applied


class Crash(NamedTuple):
    step: str
    disk: MemoryDisk
    done: Done


def crashes() -> list[Crash]:
    """The workload stopped before each of its steps."""
    found: list[Crash] = []
    disk = MemoryDisk()
    work = Staged(disk)
    disk.before = lambda step: found.append(Crash(step, disk.after_kill(), work.copy()))
    work.run()
    return found


def visible(partition: Partition) -> list[bytes | None]:
    return list(read_all(partition).values())


def check(disk: MemoryDisk, done: Done, *, power_cut: bool) -> None:
    """Start from what a crash left, look, resolve, look again; start once more, and look."""
    directory = open_directory(disk, ManualClock(1_000_000))
    partition = open_partition(directory, leader_epoch=1)
    seen = [value for value in visible(partition) if value is not None]
    for each in ALL:
        found = [value for value in seen if value in set(each.values)]
        if each not in done.decided:
            assert not found, f"{each} was not decided"
        else:
            assert found in ([], each.values), f"a reader sees a part of {each}"
        if each in done.applied:
            assert found == each.values, f"{each} was applied"
    kept = done.plain[: done.synced_plain] if power_cut else done.plain[:-1]
    for each in sorted(done.prepared - done.decided - done.dropped, key=lambda each: each.commit_uuid):
        assert partition.staged.all(), each
        assert each.prepared() in [staged.prepared for staged in partition.staged.all()], f"{each} was prepared"
    for each in sorted(done.decided, key=lambda each: each.commit_uuid):
        apply_late(partition, each, done)
        apply_late(partition, each, done)
    wanted = sorted(value for each in done.decided for value in each.values)
    present = [value for value in visible(partition) if value is not None]
    assert sorted(value for value in present if b" " in value) == wanted
    if not power_cut:
        assert None not in visible(partition)
    plain = [value for value in present if b" " not in value]
    assert plain[: len(kept)] == kept
    assert len(set(plain)) == len(plain)
    late = [each for each in (FIRST, SECOND) if each in done.decided]
    for each in late:
        apply_late(partition, each, done)
    assert [value for value in visible(partition) if value is not None] == present
    partition.close()
    directory.close(clean=False)
    directory = open_directory(disk, ManualClock(1_000_000))
    partition = open_partition(directory, leader_epoch=2)
    assert [value for value in visible(partition) if value is not None] == present
    for each in late:
        apply_late(partition, each, done)
    assert [value for value in visible(partition) if value is not None] == present
    partition.close()
    directory.close()
    assert disk.open_files == 0


def test_the_workload_by_itself_keeps_its_promises_and_closes_its_files() -> None:
    disk = MemoryDisk()
    work = Staged(disk)
    work.run()
    assert disk.open_files == 0
    assert len(work.applied) == 3
    assert len([name for name in disk.steps if name.startswith("create") and name.endswith((".staged", ".part"))]) >= 3
    assert [name for name in disk.steps if name.startswith("unlink") and name.endswith((".staged", ".part"))]
    assert any(name.startswith("link") for name in disk.steps) == (staging._OWN_FROM == 1)
    check(disk, work, power_cut=False)


def test_kill_before_every_step_of_a_staged_write_keeps_its_promises() -> None:
    for crash in crashes():
        check(crash.disk.after_kill(), crash.done, power_cut=False)


def test_kill_within_every_write_of_a_staged_write_keeps_its_promises() -> None:
    for crash in crashes():
        if crash.disk.is_within_write:
            for length in (1, 60, 500):
                disk = crash.disk.after_kill()
                disk.tear(length)
                check(disk, crash.done, power_cut=False)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_power_cut_before_every_step_of_a_staged_write_keeps_its_promises(keep: float) -> None:
    for number, crash in enumerate(crashes()):
        check(crash.disk.after_power_cut(random.Random(number), keep), crash.done, power_cut=True)


def test_kill_at_every_step_of_an_apply_that_resumes_costs_nothing() -> None:
    applying = [crash for crash in crashes() if crash.done.decided != crash.done.applied]
    assert len(applying) > 20
    for crash in applying[::6]:
        disk = crash.disk.after_kill()
        images = disk.images()
        partition = open_partition(open_directory(disk), leader_epoch=1)
        for each in crash.done.decided:
            apply(partition, each)
        for number, image in enumerate(images):
            check(image, crash.done, power_cut=False)
            check(image.after_power_cut(random.Random(number), 0.5), crash.done, power_cut=True)


class Alike(Set):
    """An attempt whose record batches are those of any other, as far as both have them."""

    def _values(self, part: int, number: int) -> Iterator[bytes]:
        yield b"%02d-%02d" % (part, number)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["both prepared before the apply", "one prepared after it"])
def test_readers_end_goes_back_at_no_crash_between_two_attempts_that_begin_alike(length: int, late: bool) -> None:
    decided, other = Alike(PRODUCER, 0, ((0, 2),)), Alike(PRODUCER, 0, ((0, length),), attempt=1)
    found: list[tuple[int, bool, MemoryDisk]] = []
    work = Staged(MemoryDisk())
    directory = work._start()
    partition, readable = work.partition, 0

    def before(_: str) -> None:
        nonlocal readable
        readable = max(readable, partition.readable_end_offset)
        found.append((readable, False, work.disk.after_kill()))
        cut = work.disk.after_power_cut(random.Random(len(found)), 0.5)
        found.append((2 if readable >= 2 else 0, True, cut))

    work.disk.before = before
    work._stage(decided, other)
    for each in (decided,) if late else (other, decided):
        work._prepare(each)
    work._apply(decided)
    work._plain()
    if late:
        work._prepare(other)
    work._drop(decided)
    work._plain()
    partition.staged.expire((), 1 << 40)
    partition.log.flush()
    work._drop(other)
    directory.close(clean=False)
    for end, power_cut, disk in found:
        reopened = open_partition(open_directory(disk), leader_epoch=1)
        assert reopened.readable_end_offset >= end, power_cut
    assert len(found) > 30


@pytest.mark.parametrize("partly", [10, 100])  # the first within what is stamped
@pytest.mark.parametrize("count", [1, 9])
def test_full_disk_at_any_step_of_a_staged_write_refuses_and_continues_when_there_is_room(
    count: int, partly: int
) -> None:
    whole = MemoryDisk()
    Staged(whole).run()
    refused = 0
    for step, name in enumerate(whole.steps):
        if name.startswith(TAKES_ROOM):
            disk = FailingDisk(step, count, errno.ENOSPC, partly)
            work = Staged(disk)
            work.run()
            assert disk.failed
            refused += work.refused
            disk.before = lambda step: None
            check(disk, work, power_cut=False)
    assert refused


def test_failed_step_of_a_staged_write_takes_the_directory_out_of_service_and_costs_nothing_promised() -> None:
    whole = MemoryDisk()
    Staged(whole).run()
    for step in range(len(whole.steps)):
        disk = FailingDisk(step, 1, errno.EIO)
        work = Staged(disk)
        try:
            work.run()
        except StorageFailed:
            pass
        disk.before = lambda step: None
        check(disk.after_power_cut(random.Random(step), 0.0), work, power_cut=True)


def test_damage_of_a_staged_batch_loses_its_set_and_is_never_served() -> None:
    work = Staged(MemoryDisk())
    work.disk.before = lambda step: None
    directory = work._start()
    work._stage(FIRST)
    work._prepare(FIRST)
    directory.close(clean=False)
    folder = work.partition.log.directory / staging.STAGING
    paths = [folder / name for name in work.disk.names(folder) if name != staging.COMPLETE]
    for damaged, at in ((path, at) for path in paths for at in range(0, work.disk.file_size(path), 7)):
        disk = work.disk.after_kill()
        disk.bytes_of(damaged)[at] ^= 16
        partition = open_partition(open_directory(disk))
        try:
            apply(partition, FIRST)
        except StagedPartLost:
            assert visible(partition) == []
        else:  # a bit that means nothing: one that a stamp replaces
            assert visible(partition) == FIRST.values


def done_and_forgotten(work: Staged, also_staged: Set | None = None) -> LogDirectory:
    """A one-off write that is done, released, and so long ago that its progress is forgotten, which is saved."""
    clock = ManualClock(1)
    directory = open_directory(work.disk, clock)
    work.partition = open_partition(directory)
    if also_staged is not None:
        work._stage(also_staged)  # its file has to stay
        work._prepare(also_staged)
    work._stage(FIRST)
    work._prepare(FIRST)
    work._apply(FIRST)
    work.partition.staged.forget(TRANSACTION, FIRST.batch_id, stays=False)
    clock.advance(PROGRESS_KEPT_US // 1_000_000 + 1)
    return directory


def forget(work: Staged, directory: LogDirectory) -> None:
    work.partition.staged.forget_silent()
    work._plain()
    work.partition.log.checkpoint()
    directory.close(clean=False)


def apply_again(disk: MemoryDisk) -> None:
    """A coordinator that was frozen asks once more: the set may be back, but what it wrote is not written twice."""
    partition = open_partition(open_directory(disk), leader_epoch=1)
    try:
        apply(partition, FIRST)
    except StagedPartLost:
        pass
    values = [value for value in visible(partition) if value is not None]
    assert sorted(value for value in values if value in FIRST.values) == sorted(FIRST.values)


def test_a_set_that_is_prepared_again_after_a_kill_outlives_a_power_cut() -> None:
    disk = MemoryDisk()
    partition = open_partition(open_directory(disk))
    for part, _ in FIRST.parts:
        partition.staged.stage(FIRST.uuid(part), FIRST.batches(part))
    partition.staged.prepare(FIRST.prepared())
    disk = disk.after_kill()  # before anything of it was synced, the names of its files included
    partition = open_partition(open_directory(disk), leader_epoch=1)
    partition.staged.prepare(FIRST.prepared())
    partition.staged.keep_prepared(FIRST.commit_uuid)
    partition = open_partition(open_directory(disk.after_power_cut(random.Random(0), 0.0)), leader_epoch=2)
    assert [staged.prepared for staged in partition.staged.all()] == [FIRST.prepared()]


@pytest.mark.parametrize("also_staged", [None, FOREIGN])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_progress_of_an_apply_is_forgotten_only_once_no_power_cut_brings_its_set_back(
    also_staged: Set | None, is_killed: bool
) -> None:
    work = Staged(MemoryDisk())
    directory = done_and_forgotten(work, also_staged)
    if is_killed:  # what told that the set is dropped is in the page cache only
        directory.close(clean=False)
        clock = ManualClock(2 * PROGRESS_KEPT_US)
        directory = open_directory(work.disk, clock)
        work.partition = open_partition(directory)
    forget(work, directory)
    assert work.partition.log.apply_progress(PRODUCER) is None
    for number in range(20):
        apply_again(work.disk.after_power_cut(random.Random(number), number % 3 / 2))


def test_the_progress_of_an_apply_stays_while_there_is_no_room_to_say_that_its_set_is_dropped() -> None:
    work = Staged(MemoryDisk())
    full = True

    def no_room(step: str) -> None:
        if full and work.applied and step == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    work.disk.before = no_room
    directory = done_and_forgotten(work, also_staged=FOREIGN)
    work.partition.staged.forget_silent()
    assert work.partition.log.apply_progress(PRODUCER) is not None
    full = False
    forget(work, directory)
    assert work.partition.log.apply_progress(PRODUCER) is None
    apply_again(work.disk.after_kill())
    apply_again(work.disk.after_power_cut(random.Random(0), 0.0))


def copy_staged(leader: Partition, follower: Partition, epoch: int) -> None:
    """As a follower does, until it has all; then what it says is durable."""
    follower.role.follow(1, epoch)
    for _ in range(10):
        files, pieces = leader.staged.news(follower.following.position().staged, 1 << 20)
        if files is None and not pieces:
            return
        if files is not None:
            follower.following.keep_only_staged(files, epoch)
        for piece, found in pieces:
            data = memoryview(found.read())
            follower.following.copy_staged(
                piece.file.number, piece.file.salt, piece.file.part, piece.position, data, epoch
            )
    raise AssertionError("it never has all")


def lead_in(partition: Partition, epoch: int) -> None:
    partition.role.lead(PartitionState.only(0, "here", epoch), [0])


def replicas(count: int) -> tuple[list[MemoryDisk], list[Partition]]:
    disks = [MemoryDisk() for _ in range(count)]
    return disks, [open_partition(open_directory(disk)) for disk in disks]


def prepare(partition: Partition, which: Set, version: int = 0) -> None:
    partition.staged.prepare(which.prepared(version))
    partition.staged.keep_prepared(which.commit_uuid)


def stage(partition: Partition, which: Set) -> None:
    for part, _ in which.parts:
        partition.staged.stage(which.uuid(part), which.batches(part))


def known(partition: Partition) -> list[tuple[PreparedSet | None, str | None]]:
    return [(each.prepared, each.lost) for each in partition.staged.all()]


def test_a_follower_copies_a_staged_file_again_that_a_power_cut_made_unreadable() -> None:
    """Its name was in the way, and took the whole directory out of service."""
    leader = open_partition(open_directory(MemoryDisk()))
    leader.staged.stage(bytes(16), [make_batch([b"x"], producer=(PRODUCER, 0, 0), transaction=(0, 0))])
    [copy] = leader.staged.copies()

    def follow(disk: MemoryDisk) -> Partition:
        replica = open_partition(open_directory(disk))
        copy_staged(leader, replica, 5)
        return replica

    disk = MemoryDisk()
    replica = follow(disk)
    damaged = disk.after_kill()
    folder = replica.log.directory / staging.STAGING
    [name] = [name for name in damaged.names(folder) if name.endswith(".staged")]
    damaged.bytes_of(folder / name)[:16] = bytes(16)
    again = follow(damaged)
    assert again.staged.copies() == [copy]
    assert [(each.producer_id, each.batch_id) for each in again.staged.all()] == [(PRODUCER, 0)]


def test_a_part_whose_end_the_next_leader_does_not_have_goes_on_after_what_it_has() -> None:
    """The follower forgot all of the part, so what the next leader added to it did not count, and an acknowledged part
    was lost once the follower led."""
    parts = [make_batch([b"%d" % number], producer=(PRODUCER, 0, number), transaction=(0, 0)) for number in range(3)]
    _, (one, two, three) = replicas(3)
    uuid = bytes(16)
    lead_in(one, 3)
    one.staged.stage(uuid, [parts[0]])
    copy_staged(one, two, 3)
    lead_in(one, 5)
    one.staged.stage(uuid, [parts[1]])
    copy_staged(one, three, 5)
    lead_in(two, 6)
    assert two.staged.stage(uuid, parts[1:])[0] == 3
    copy_staged(two, three, 6)
    lead_in(three, 7)
    spec = PartSpec(uuid, 0, 3, sum(len(data) for _, data in parts))
    three.staged.prepare(PreparedSet(TRANSACTION, PRODUCER, 0, b"c" * 16, -1, (spec,)))
    three.staged.keep_prepared(b"c" * 16)


def test_a_leader_writes_to_files_of_its_own_epoch_only() -> None:
    _, [partition] = replicas(1)
    for epoch in (3, 5, 6):
        lead_in(partition, epoch)
        for part in range(2):
            data = make_batch([b"x"], producer=(PRODUCER, 0, 0), transaction=(epoch, part))
            partition.staged.stage(b"%016d" % (2 * epoch + part), [data])
    assert [each.number >> staging._EPOCH_BITS for each in partition.staged.copies()] == [3, 5, 6]


def test_a_set_that_only_an_old_leader_prepared_again_is_what_it_was() -> None:
    """The follower forgot the set with the file in which it was prepared again."""
    _, (old, new) = replicas(2)
    lead_in(old, 3)
    stage(old, FIRST)
    prepare(old, FIRST)
    copy_staged(old, new, 3)
    lead_in(old, 5)
    prepare(old, FIRST, version=1)
    lead_in(new, 6)
    copy_staged(new, old, 6)
    assert known(old) == known(new) == [(FIRST.prepared(0), None)]


def test_a_drop_that_only_an_old_leader_has_is_forgotten_before_it_counts_as_a_copy() -> None:
    """It is the end of a file whose beginning the next leader has. The follower read it again at each start, and then
    the set as it was prepared later, whose parts were gone by the drop."""
    disks, (old, new) = replicas(2)
    lead_in(old, 3)
    stage(old, FIRST)
    stage(old, LOOSE)  # its file has to stay
    prepare(old, FIRST)
    copy_staged(old, new, 3)
    assert old.staged.drop(FIRST.commit_uuid, 1)
    lead_in(new, 5)
    prepare(new, FIRST, version=1)
    old.role.follow(1, 5)
    assert new._staging.lacking(old.staged.copies(), 0).reached == -1
    copy_staged(new, old, 5)
    assert old.staged.copies() == new.staged.copies()
    wanted = [(FIRST.prepared(1), None), (None, None)]
    assert known(old) == wanted
    for disk in (disks[0].after_kill(), disks[0].after_power_cut(random.Random(0), 0.0)):
        assert known(open_partition(open_directory(disk), leader_epoch=6))[0] == wanted[0]
    lead_in(old, 7)
    apply(old, FIRST)
    assert visible(old) == FIRST.values


def test_a_drop_that_a_follower_has_and_its_next_leader_lacks_is_forgotten() -> None:
    _, (old, two, new) = replicas(3)
    lead_in(old, 3)
    stage(old, FIRST)
    stage(old, LOOSE)  # so that the file stays
    prepare(old, FIRST)
    copy_staged(old, two, 3)
    copy_staged(old, new, 3)
    lead_in(old, 5)
    assert old.staged.drop(FIRST.commit_uuid, 1)
    copy_staged(old, two, 5)
    lead_in(new, 6)
    assert known(two) != known(new)
    copy_staged(new, two, 6)
    assert known(two) == known(new)


def test_a_part_that_a_leader_forgot_after_its_epoch_is_known_again_when_it_follows() -> None:
    """A leader that does not know of the next one lets parts expire, and records that nowhere."""
    _, (old, new) = replicas(2)
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    lead_in(old, 3)
    old.staged.stage(uuid, batches[:2])
    stage(old, LOOSE)  # its file has to stay
    copy_staged(old, new, 3)
    lead_in(new, 5)
    old.staged.abort([uuid])
    new.staged.stage(uuid, batches)
    copy_staged(new, old, 5)
    lead_in(old, 6)
    assert old.staged.stage(uuid, batches[:1])[0] == len(batches)


def test_a_follower_names_a_copied_set_only_once_it_is_durable_also_if_that_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disks, (leader, follower) = replicas(2)
    lead_in(leader, 3)
    stage(leader, FIRST)
    prepare(leader, FIRST)
    follower.role.follow(1, 3)
    _, pieces = leader.staged.news(follower.following.position().staged, 1 << 20)
    for piece, found in pieces:
        data = memoryview(found.read())
        follower.following.copy_staged(piece.file.number, piece.file.salt, piece.file.part, piece.position, data, 3)

    def no_room() -> NoReturn:
        raise DiskFull(directory="/data")

    with monkeypatch.context() as full:
        full.setattr(follower._staging, "sync", no_room)
        for _ in range(2):
            with pytest.raises(DiskFull):
                follower.following.position()
    assert follower.following.position().staged == leader.staged.copies()
    disk = disks[1].after_power_cut(random.Random(0), 0.0)
    assert known(open_partition(open_directory(disk))) == [(FIRST.prepared(0), None)]


def test_a_follower_reads_its_files_again_only_if_something_else_follows_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (leader, follower) = replicas(2)
    lead_in(leader, 3)
    stage(leader, FOREIGN)
    prepare(leader, FOREIGN)
    lead_in(leader, 5)
    stage(leader, FIRST)
    prepare(leader, FIRST)
    copy_staged(leader, follower, 5)
    read: list[object] = []
    real = staging.Staging._read_file
    monkeypatch.setattr(staging.Staging, "_read_file", lambda self, file: (read.append(file), real(self, file)))
    assert leader.staged.drop(FOREIGN.commit_uuid, 1)  # its file is removed
    copy_staged(leader, follower, 5)
    assert follower.staged.copies() == leader.staged.copies()
    assert (len(leader.staged.copies()), read) == (1, [])
    assert known(follower) == known(leader) == [(FIRST.prepared(0), None)]


def test_a_follower_keeps_no_copy_of_a_file_that_comes_after_what_it_lacks_of_an_older_one() -> None:
    """Parts go on from file to file: what it has of the newer one is replayed after the older one."""
    old, new = StagedCopy(1, 7, 100), StagedCopy(2, 8, 50)
    for has, kept in (
        ([old, new], [old, new]),
        ([old, new._replace(size=60)], [old, new]),
        ([old._replace(size=40), new], [old._replace(size=40)]),
        ([old._replace(salt=9), new], []),
        ([new], []),
    ):
        assert agreed_copies([new, old], has) == kept


def test_a_leader_does_not_count_a_follower_that_lacks_the_end_of_a_file_from_before_its_epoch() -> None:
    _, (old, new) = replicas(2)
    lead_in(old, 3)
    stage(old, FIRST)
    copy_staged(old, new, 3)
    lead_in(new, 5)
    stage(new, LOOSE)
    [before, since] = new.staged.copies()

    def reached(*copies: StagedCopy) -> int:
        return new._staging.lacking(copies, 0).reached

    assert reached() == reached(before._replace(size=before.size - 1)) == -1
    assert reached(before) == 0
    assert reached(before, since._replace(size=since.size - 1)) == since.size - 1
    assert reached(before, since) == new._staging.staged_end == since.size


@pytest.mark.parametrize("damage", ["none", "the end is cut short", "the beginning", "a frame", "a batch"])
def test_a_start_tells_damage_of_what_is_staged_from_a_write_that_a_kill_cut_short(damage: str) -> None:
    [disk], [partition] = replicas(1)
    stage(partition, FIRST)
    prepare(partition, FIRST)
    disk = disk.after_kill()
    folder = partition.log.directory / staging.STAGING
    [name] = [name for name in disk.names(folder) if name.endswith(".staged")]
    data = disk.bytes_of(folder / name)
    match damage:
        case "the end is cut short":
            del data[-9:]
        case "the beginning":
            data[0] ^= 1
        case "a frame":
            data[16 + 20] ^= 1
        case "a batch":
            data[16 + 48 + 100] ^= 1
    opened = open_partition(open_directory(disk), leader_epoch=1)
    assert opened.following.may_lack_staged(may_have_lost=False) == (damage not in ("none", "the end is cut short"))
    assert opened.following.may_lack_staged(may_have_lost=True)
