"""Files of staged batches that become segments: what is in them is written once, and has a name in the staging folder
and one in the log until the set is dropped. Neither use changes what the other has."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from broker.replica.partition import Partition
from broker.staging import staging
from broker.staging.copies import StagedCopy, agreed_copies
from broker.staging.format import FILE_START
from broker.staging.part import PART_SUFFIX, Part, StagedFile
from broker.storage import log as log_module
from broker.storage.checkpoint import TEMPORARY
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    Closed,
    DiskFull,
    FencedLeaderEpoch,
    FileRefused,
    InvalidRequest,
    NotLeader,
    OutOfFiles,
    StagedPartLost,
)
from kafkalog.format.batch import CRC_FROM, HEADER_SIZE, STAMPED_SIZE, iter_batches
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import numbered
from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_staged_writes import FIRST, LOOSE, SECOND, Set, apply, copy_staged, known, lead_in, visible
from tests.crash.workload import open_directory


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of a part but the first are in a file of its own, which becomes a segment."""
    monkeypatch.setattr(staging, "_OWN_FROM", 1)
    monkeypatch.setattr(staging, "_ADOPTED_MIN", 1)
    monkeypatch.setattr(staging, "_BATCH_MIN", 1)


def stage(partition: Partition) -> None:
    for part, _ in FIRST.parts:
        for batch in FIRST.batches(part):
            partition.staged.stage(FIRST.uuid(part), [batch])


def prepare(partition: Partition, version: int = 0) -> None:
    partition.staged.prepare(FIRST.prepared(version))
    partition.staged.keep_prepared(FIRST.commit_uuid)


def write(partition: Partition) -> None:
    """Stage, prepare and apply the set; it is not dropped."""
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)


def part_files(disk: MemoryDisk, partition: Partition) -> list[Path]:
    folder = partition.log.directory / staging.STAGING
    return [folder / name for name in disk.names(folder) if name.endswith(PART_SUFFIX)]


def begun(count: int = 1) -> tuple[list[MemoryDisk], list[Partition]]:
    disks = [MemoryDisk() for _ in range(count)]
    partitions = [open_partition(open_directory(disk)) for disk in disks]
    lead_in(partitions[0], 3)
    return disks, partitions


def bases(partition: Partition) -> list[int]:
    return [segment.base_offset for segment in partition.log.view.segments]


def staged_bytes(data: bytearray) -> list[bytes]:
    """What was staged of each batch: without what is stamped."""
    return [bytes(batch[CRC_FROM:]) for _, batch in iter_batches(memoryview(bytes(data)))]


def test_a_decided_file_becomes_a_segment_and_no_batch_of_it_is_written_again() -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    before = len(disk.steps)
    apply(partition, FIRST)
    assert visible(partition) == FIRST.values
    # Part 0 has two batches in its file, part 4 one: a segment with the first of each part, and one of each file.
    assert bases(partition) == [0, 2, 6, 8]
    linked = [step for step in disk.steps[before:] if step.startswith("link")]
    assert linked == [f"link {2:020d}.next", f"link {8:020d}.next"]


def test_an_adopted_segment_has_the_time_of_its_append() -> None:
    """Retention goes by it, and what is remembered of an apply is forgotten by it."""
    _, [partition] = begun()
    write(partition)
    now_us = ManualClock().now_us()
    segments = partition.log.view.segments
    assert [(each.first_append_us, each.last_append_us) for each in segments] == [(now_us, now_us)] * 4
    progress = partition.log.apply_progress(FIRST.prepared(0).producer_id)
    assert progress is not None and progress.last_append_us == now_us


def test_nothing_is_adopted_once_the_applier_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's next owner applies the set again."""
    _, [partition] = begun()
    stage(partition)
    prepare(partition)
    append_decided = partition.log.append_decided

    def last(batches: Any, leader_epoch: int) -> None:
        append_decided(batches, leader_epoch)
        partition._applier._closed = True  # `close` would wait for this append

    monkeypatch.setattr(partition.log, "append_decided", last)
    with pytest.raises((Closed, NotLeader)):
        apply(partition, FIRST)
    assert partition.end_offset == 2


def test_a_power_cut_leaves_no_adopted_segment_that_is_stamped_by_half() -> None:
    """It would be reported as damage, of records that nobody has acknowledged."""
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    images = disk.images()
    apply(partition, FIRST)
    for image in images:
        for number in range(5):
            again = open_partition(open_directory(image.after_power_cut(random.Random(number), 0.7)), leader_epoch=4)
            assert again.log.first_damage() is None


def test_an_append_after_an_adopted_segment_goes_to_the_next_one() -> None:
    [disk], [partition] = begun()
    write(partition)
    sizes = [disk.file_size(path) for path in part_files(disk, partition)]
    partition.append_as_leader([numbered(0)])
    assert bases(partition) == [0, 2, 6, 8, 10]
    assert [disk.file_size(path) for path in part_files(disk, partition)] == sizes


@pytest.mark.parametrize("cut", ["kill", "power cut"])
def test_an_append_after_a_start_does_not_go_to_an_adopted_segment_either(cut: str) -> None:
    [disk], [partition] = begun()
    write(partition)
    left = disk.after_kill() if cut == "kill" else disk.after_power_cut(random.Random(0), 0.0)
    partition = open_partition(open_directory(left), leader_epoch=4)
    sizes = [left.file_size(path) for path in part_files(left, partition)]
    assert sizes
    partition.append_as_leader([numbered(0)])
    assert [left.file_size(path) for path in part_files(left, partition)] == sizes
    assert bases(partition)[-1] == 10
    assert known(partition) == [(FIRST.prepared(0), None)]


def test_a_log_whose_files_somebody_has_linked_elsewhere_is_appended_to() -> None:
    """As a backup by hard links does; also of a log that is empty."""
    [disk], [partition] = begun()
    for records in range(2):
        disk = disk.after_kill()
        disk.link(partition.log.view.segments[-1].path, Path(f"/data/backup-{records}"))
        partition = open_partition(open_directory(disk), leader_epoch=4 + records)
        partition.append_as_leader([numbered(records)])
        assert partition.log.end_offset == records + 1
    assert bases(partition) == [0, 1]
    assert disk.file_size(Path("/data/backup-1")) == disk.file_size(partition.log.view.segments[0].path)


def test_once_the_set_is_dropped_the_segment_has_its_file_alone() -> None:
    [disk], [partition] = begun()
    write(partition)
    partition.staged.drop(FIRST.commit_uuid, 5)
    assert part_files(disk, partition) == []
    assert visible(partition) == FIRST.values
    left = disk.after_kill()
    again = open_partition(open_directory(left), leader_epoch=4)
    assert visible(again) == FIRST.values
    again.append_as_leader([numbered(0)])
    assert bases(again)[-1] == 8  # nobody else has it: it is appended to


@pytest.mark.parametrize("end_offset", [2, 4, 8])
def test_a_truncation_of_an_adopted_segment_leaves_what_is_staged_whole(end_offset: int) -> None:
    """A leader that was replaced cuts off what its successor has not; what was prepared stays prepared."""
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    staged = {path: staged_bytes(disk.bytes_of(path)) for path in part_files(disk, partition)}
    apply(partition, FIRST)
    images = disk.images()
    partition.role.follow(1, 4)
    assert partition.log.truncate_to(end_offset) == end_offset
    disk.before = lambda step: None
    assert {path: staged_bytes(disk.bytes_of(path)) for path in part_files(disk, partition)} == staged
    for number in range(3):  # the cut is durable
        again = open_partition(open_directory(disk.after_power_cut(random.Random(number), 0.0)), leader_epoch=5)
        assert again.log.end_offset == end_offset
    assert images
    for image in [*images, disk]:
        for left in (image.after_kill(), *(image.after_power_cut(random.Random(n), 0.5) for n in range(3))):
            again = open_partition(open_directory(left), leader_epoch=5)
            assert known(again) == [(FIRST.prepared(0), None)]
            apply(again, FIRST)
            assert visible(again) == FIRST.values


def test_a_copy_that_is_cut_is_not_the_segment() -> None:
    """A leader whose copies are shorter has its follower cut: that changes the staged file, not the log."""
    [disk], [partition] = begun()
    write(partition)
    copies = partition.staged.copies()
    partition.role.follow(1, 4)
    shorter = [copy._replace(size=copy.size - 8) if copy.part else copy for copy in copies]
    partition.following.keep_only_staged(shorter, 4)
    assert visible(partition) == FIRST.values
    assert [copy.size for copy in partition.staged.copies()] == [copy.size for copy in shorter]
    for number in range(8):
        left = disk.after_power_cut(random.Random(number), 0.5)
        again = open_partition(open_directory(left), leader_epoch=5)
        assert visible(again) == FIRST.values
        with suppress(InvalidRequest):  # the loss may have undone the cut: all of it is there, and is prepared
            assert again.staged.stage(FIRST.uuid(0), FIRST.batches(0)[:1])[0] >= 2


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EEXIST])
def test_whatever_a_file_system_says_that_gives_no_second_name_the_batches_are_copied(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_links(self: MemoryDisk, path: Path, new: Path) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path), None, str(new))

    monkeypatch.setattr(MemoryDisk, "link", no_links)
    _, [partition] = begun()
    write(partition)
    assert visible(partition) == FIRST.values
    assert bases(partition) == [0]


@pytest.mark.parametrize(
    "limit", ["too small a segment", "larger than a segment", "small batches", "a log of many segments"]
)
def test_a_file_that_would_make_a_segment_too_many_is_copied(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """And one of many small batches: each of them is stamped while appends wait."""
    [disk], [partition] = begun()
    if limit == "small batches":
        monkeypatch.setattr(staging, "_BATCH_MIN", len(FIRST.batches(0)[1][1]) + 1)
    if limit == "too small a segment":
        monkeypatch.setattr(staging, "_ADOPTED_MIN", 10_000)
        monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: 1 << 20)
    if limit == "a log of many segments":
        monkeypatch.setattr(log_module, "_ADOPTS_BELOW", 1)
    stage(partition)
    prepare(partition)
    assert part_files(disk, partition)
    if limit == "larger than a segment":  # the topic's setting has changed
        monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: 100)
    apply(partition, FIRST)
    assert bases(partition) == [0]
    assert visible(partition) == FIRST.values


def test_a_part_has_no_file_of_its_own_where_segments_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_ADOPTED_MIN", 1 << 40)
    [disk], [partition] = begun()
    stage(partition)
    assert part_files(disk, partition) == []


def test_a_follower_places_the_batches_of_a_part_whichever_file_comes_first() -> None:
    _, [leader, follower] = begun(2)
    stage(leader)
    prepare(leader)
    follower.role.follow(1, 3)
    _, pieces = leader.staged.news([], 1 << 20)
    for piece, found in reversed(pieces):
        data = memoryview(found.read())
        follower.following.copy_staged(piece.file.number, piece.file.salt, piece.file.part, piece.position, data, 3)
    assert known(follower) == [(FIRST.prepared(0), None)]
    lead_in(follower, 4)
    apply(follower, FIRST)
    assert visible(follower) == FIRST.values


def test_a_set_that_came_before_the_end_of_its_parts_is_durable_once_they_have_come() -> None:
    disks, [leader, follower] = begun(2)
    stage(leader)
    prepare(leader)
    follower.role.follow(1, 3)
    _, pieces = leader.staged.news([], 1 << 20)
    for piece, found in pieces:
        data = memoryview(found.read())
        if piece.file.part:
            for start in range(0, len(data), 100):
                part = data[start : start + 100]
                follower.following.copy_staged(piece.file.number, piece.file.salt, piece.file.part, start, part, 3)
                follower.following.position()
        else:
            follower.following.copy_staged(piece.file.number, 0, b"", 0, data, 3)
            assert known(follower)[0][1] is not None  # it lacks most of it
    assert known(follower) == [(FIRST.prepared(0), None)]
    assert follower.following.position().staged == leader.staged.copies()
    for disk in (disks[1].after_kill(), disks[1].after_power_cut(random.Random(0), 0.0)):
        again = open_partition(open_directory(disk), leader_epoch=4)
        assert known(again) == [(FIRST.prepared(0), None)]
        apply(again, FIRST)
        assert visible(again) == FIRST.values


def test_a_copy_of_a_file_that_is_being_stamped_is_as_good_as_any() -> None:
    """A follower that joins copies while the leader applies. It may get a header that is stamped by half."""
    [_, theirs], [leader, follower] = begun(2)
    stage(leader)
    prepare(leader)
    copy_staged(leader, follower, 3)
    [first, _] = part_files(theirs, follower)
    for at in range(24):
        left = theirs.after_kill()
        left.bytes_of(first)[at] ^= 255
        if 8 <= at < 12:
            continue  # the length, which no stamp changes
        again = open_partition(open_directory(left), leader_epoch=4)
        assert known(again) == [(FIRST.prepared(0), None)]
        apply(again, FIRST)
        assert visible(again) == FIRST.values


def test_a_part_goes_on_in_a_new_file_in_a_new_epoch() -> None:
    disks, [old, new] = begun(2)
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    for batch in batches[:2]:
        old.staged.stage(uuid, [batch])
    copy_staged(old, new, 3)
    lead_in(new, 4)
    for batch in batches[2:]:
        new.staged.stage(uuid, [batch])
    assert len(part_files(disks[1], new)) == 2
    copy_staged(new, old, 4)
    again = open_partition(open_directory(disks[0].after_kill()), leader_epoch=5)
    assert again.staged.stage(uuid, batches[:1])[0] == len(batches)


def test_a_leader_goes_on_with_a_new_file_when_it_leads_again() -> None:
    """Two epochs never write one file, or two copies could differ."""
    _, [partition] = begun()
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    for batch in batches[:2]:
        partition.staged.stage(uuid, [batch])
    lead_in(partition, 5)
    partition.staged.stage(uuid, [batches[2]])
    assert [each.number >> staging._EPOCH_BITS for each in partition.staged.copies() if each.part] == [3, 5]


@pytest.mark.parametrize("damage", ["none", "the end is cut short", "a header", "a body"])
def test_a_start_tells_damage_of_a_parts_file_from_a_write_that_a_kill_cut_short(damage: str) -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    left = disk.after_kill()
    path, _ = part_files(disk, partition)
    data = left.bytes_of(path)
    second = len(FIRST.batches(0)[1][1])
    match damage:
        case "the end is cut short":
            del data[-9:]
        case "a header":
            data[second + 8 : second + 12] = bytes(4)
        case "a body":
            data[second + 100] ^= 1
    again = open_partition(open_directory(left), leader_epoch=4)
    assert again._staging.may_lack_acknowledged(False) == damage.startswith("a ")
    assert (known(again)[0][1] is None) == (damage == "none")


def test_an_epoch_is_saved_before_a_file_is_adopted_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches of a set may be in the log already, from an earlier epoch."""
    _, [partition] = begun()
    stage(partition)
    prepare(partition)

    saved: list[bool] = []

    def no_room(self: MemoryDisk, path: Path, new: Path) -> NoReturn:
        saved.append(partition.log._epochs.is_saved)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path), None, str(new))

    with monkeypatch.context() as full:
        full.setattr(MemoryDisk, "link", no_room)
        with pytest.raises(DiskFull):
            apply(partition, FIRST)
        assert partition.log.end_offset == 2
        partition.log.begin_epoch(4, durable=False)
        assert not partition.log._epochs.is_saved
        lead_in(partition, 4)
        partition.log._epochs.is_saved = False
        with pytest.raises(DiskFull):
            apply(partition, FIRST)
    assert saved == [True, True]
    apply(partition, FIRST)
    assert visible(partition) == FIRST.values


def test_a_file_is_not_adopted_in_an_epoch_that_is_over() -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    partition.append_as_leader([numbered(0)])
    path, _ = part_files(disk, partition)
    headers = [header for header, _ in FIRST.batches(0)[1:]]
    before = bytes(disk.bytes_of(path))
    with pytest.raises(FencedLeaderEpoch):
        partition.log.adopt(path, headers, 2)
    assert (partition.log.end_offset, bytes(disk.bytes_of(path))) == (1, before)


def test_a_start_removes_what_a_stop_left_of_a_copy() -> None:
    [disk], [partition] = begun()
    stage(partition)
    path, _ = part_files(disk, partition)
    left = path.with_name(path.name + TEMPORARY)
    disk.close(disk.create(left))
    disk = disk.after_kill()
    open_partition(open_directory(disk), leader_epoch=4)
    assert not disk.exists(left)


def test_a_file_is_needed_for_batches_that_came_before_others() -> None:
    header = FIRST.batches(0)[1][0]
    part = Part(FIRST.uuid(0), header)
    own, framed = (StagedFile(MemoryDisk(), Path("/data"), number, 7) for number in (2, 1))
    part.offer(1, (own, 0, 8, 1), 0, 0.0)
    part.offer(1, (own, 0, 8, 1), 0, 0.0)
    assert (own.live, part.places, part.files()) == (1, [], {own})
    part.offer(0, (framed, 0, 8, 0), 0, 0.0)
    assert (own.live, framed.live, len(part.places), part.early) == (1, 1, 2, {})
    part.forget()
    assert (own.live, framed.live) == (0, 0)


def test_a_part_larger_than_a_segment_has_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    [disk], [partition] = begun()
    size = len(FIRST.batches(0)[0][1])
    monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: size)
    stage(partition)
    assert [disk.file_size(path) for path in part_files(disk, partition)] == [size] * 3
    prepare(partition)
    apply(partition, FIRST)
    assert visible(partition) == FIRST.values
    assert bases(partition) == [0, 2, 4, 6, 8]


class Full(MemoryDisk):
    """It has no room for steps that begin in some way, while `is_full`."""

    def __init__(self, *steps: str) -> None:
        super().__init__()
        self.is_full = False
        self.before = lambda step: self._refuse() if self.is_full and step.startswith(steps) else None

    def _refuse(self) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_one(*steps: str) -> tuple[Full, Partition]:
    disk = Full(*steps)
    partition = open_partition(open_directory(disk))
    lead_in(partition, 3)
    return disk, partition


def test_a_part_goes_on_after_its_empty_file_was_removed_on_a_full_disk() -> None:
    disk, partition = full_one("write")
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    partition.staged.stage(uuid, [batches[0]])
    partition.staged.stage(LOOSE.uuid(9), [LOOSE.batches(9)[0]])
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.staged.stage(uuid, [batches[1]])
    disk.is_full = False
    partition.staged.abort([LOOSE.uuid(9)])
    assert part_files(disk, partition) == []
    for batch in batches[1:]:
        partition.staged.stage(uuid, [batch])
    assert len(part_files(disk, partition)) == 1


def test_a_part_goes_on_in_its_file_if_there_was_no_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, partition = full_one("create")
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    size = len(batches[0][1])
    monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: size)
    partition.staged.stage(uuid, [batches[0]])
    partition.staged.stage(uuid, [batches[1]])
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.staged.stage(uuid, [batches[2]])
    monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: 1 << 30)
    assert partition.staged.stage(uuid, [batches[2]])[0] == 3


def test_a_truncation_that_has_no_room_for_what_stays_of_an_adopted_segment_cuts_nothing() -> None:
    disk, partition = full_one("write")
    write(partition)
    partition.role.follow(1, 4)
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.log.truncate_to(4)
    assert partition.log.end_offset == 10
    assert [name for name in disk.names(partition.log.directory) if name.endswith(TEMPORARY)] == []
    disk.is_full = False
    assert partition.log.truncate_to(4) == 4


def test_a_truncation_that_has_no_room_for_the_checkpoint_leaves_no_copy_behind() -> None:
    disk, partition = full_one("create checkpoint")
    write(partition)
    partition.role.follow(1, 4)
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.log.truncate_to(4)
    assert [name for name in disk.names(partition.log.directory) if name.endswith(".log" + TEMPORARY)] == []
    disk.is_full = False
    assert partition.log.truncate_to(4) == 4


def test_a_start_without_room_to_cut_an_adopted_segment_is_tried_again() -> None:
    """Its end was damaged, as nothing but the disk does it."""
    [disk], [partition] = begun()
    write(partition)
    left = disk.after_kill()
    del left.bytes_of(part_files(left, partition)[1])[-9:]
    full = Full("create")
    full.root = left.root
    directory = open_directory(full)
    full.is_full = True
    with pytest.raises(DiskFull):
        open_partition(directory)
    full.is_full = False
    assert open_partition(directory).log.end_offset == 8


def test_an_adopted_segment_is_not_cut_below_what_is_agreed_on_whatever_the_high_watermark_was() -> None:
    """Its own is older than its leader's after a kill; the records below that one must not go back elsewhere."""
    _, [partition] = begun()
    write(partition)
    partition.log.high_watermark = 2
    partition.role.follow(1, 4)
    assert partition.log.truncate_to(4) == 4


def test_a_sync_does_not_count_for_a_file_that_was_cut_amid_it() -> None:
    """The same bytes may come again, and would never be synced."""
    [disk], [partition] = begun()
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    for batch in batches:
        partition.staged.stage(uuid, [batch])
    copies = partition.staged.copies()
    size = len(batches[1][1])
    shorter = [each._replace(size=size) if each.part else each for each in copies]
    [whole] = (bytes(disk.bytes_of(path)) for path in part_files(disk, partition))
    [own] = (file for file in partition._staging._files.values() if file.part)
    real = disk.sync

    def cut_amid(fd: int) -> None:
        real(fd)
        if own.size > size and partition.role.leads:
            partition.role.follow(1, 4)
            partition.following.keep_only_staged(shorter, 4)

    disk.sync = cut_amid  # type: ignore[method-assign]
    partition._staging.sync()
    assert (own.size, own.synced) == (size, 0)
    partition.following.copy_staged(own.number, own.salt, own.part, size, memoryview(whole[size:]), 4)
    partition._staging.sync()
    assert (own.size, own.synced) == (len(whole), len(whole))


def test_a_sync_passes_over_a_file_whose_number_another_has_by_then() -> None:
    [disk], [partition] = begun()
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    for batch in batches:
        partition.staged.stage(uuid, [batch])
    files = partition._staging._files
    [own] = (file for file in files.values() if file.part)
    real = disk.sync

    def replace_amid(fd: int) -> None:
        real(fd)
        if files[own.number] is own:
            own.remove()
            files[own.number] = StagedFile(disk, own.path.parent, own.number, own.salt + 1, own.part)

    disk.sync = replace_amid  # type: ignore[method-assign]
    partition._staging.sync()
    assert files[own.number] is not own


def test_a_second_name_that_was_given_though_an_error_was_reported_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says that it is there already, if its first answer was lost."""
    real = MemoryDisk.link

    def link(self: MemoryDisk, path: Path, new: Path) -> None:
        real(self, path, new)
        real(self, path, new)

    monkeypatch.setattr(MemoryDisk, "link", link)
    [disk], [partition] = begun()
    write(partition)
    assert visible(partition) == FIRST.values
    assert bases(partition) == [0, 2, 6, 8]
    partition.append_as_leader([numbered(0)])
    again = open_partition(open_directory(disk.after_kill()), leader_epoch=4)
    assert again.log.first_damage() is None


def test_a_file_that_is_not_synced_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync would not learn of an error in writing it back."""
    _, [partition] = begun()
    monkeypatch.setattr(partition._staging, "sync", lambda: None)
    monkeypatch.setattr(partition._staging, "request_sync", lambda: None)
    size = len(FIRST.batches(0)[1][1])
    monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: size)
    stage(partition)
    prepare(partition)
    own = [file for file in partition._staging._files.values() if file.part]
    assert len(own) == 3
    assert all(file.is_open and not file.synced for file in own)


def test_files_that_a_start_has_found_are_not_kept_open_either() -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    again = open_partition(open_directory(disk.after_kill()), leader_epoch=4)
    lead_in(again, 4)
    again._staging.check(FIRST.commit_uuid)
    assert not any(file.is_open for file in again._staging._files.values() if file.part)
    apply(again, FIRST)
    assert not any(file.is_open for file in again._staging._files.values() if file.part)


def test_the_cut_of_a_file_with_two_names_is_durable_after_a_sync() -> None:
    [disk], [partition] = begun()
    write(partition)
    shorter = [copy._replace(size=copy.size - 8) if copy.part else copy for copy in partition.staged.copies()]
    partition.role.follow(1, 4)
    partition.following.keep_only_staged(shorter, 4)
    partition._staging.sync()
    again = open_partition(open_directory(disk.after_power_cut(random.Random(0), 0.0)), leader_epoch=5)
    # Of the third no batch is whole any more: it is removed.
    assert [copy.size for copy in again.staged.copies()] == [copy.size for copy in shorter[:2]]


def test_a_start_without_descriptors_to_cut_an_adopted_segment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    [disk], [partition] = begun()
    write(partition)
    left = disk.after_kill()
    del left.bytes_of(part_files(left, partition)[1])[-9:]
    directory = open_directory(left)

    real = MemoryDisk.create

    def none_left(self: MemoryDisk, path: Path) -> int:
        if path.name.endswith(".log" + TEMPORARY):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(self, path)

    with monkeypatch.context() as scarce:
        scarce.setattr(MemoryDisk, "create", none_left)
        with pytest.raises(OutOfFiles):
            open_partition(directory)
    assert open_partition(directory).log.end_offset == 8


def test_a_cut_of_what_a_power_cut_damaged_is_asked_for_again_if_it_had_no_room() -> None:
    disk, partition = full_one("create 0000")
    write(partition)
    partition.log.high_watermark, partition.log._synced_before = 2, 0
    partition.role.follow(1, 4)
    segment = partition.log.view.segments[1]
    disk.bytes_of(segment.path)[segment.size - 20] ^= 255
    for _ in partition.log.check(segment):
        pass
    partition.following.may_have_lost = True
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.following.cut_unsynced_damage()
    assert (partition.following.may_have_lost, partition.log.end_offset) == (True, 10)
    disk.is_full = False
    partition.following.cut_unsynced_damage()
    assert (partition.following.may_have_lost, partition.log.end_offset) == (False, 4)


def test_a_copy_that_has_no_room_leaves_nothing_behind() -> None:
    disk, partition = full_one("sync")
    write(partition)
    shorter = [copy._replace(size=copy.size - 8) if copy.part else copy for copy in partition.staged.copies()]
    partition.role.follow(1, 4)
    disk.is_full = True
    with pytest.raises(DiskFull):
        partition.following.keep_only_staged(shorter, 4)
    folder = partition.log.directory / staging.STAGING
    assert [name for name in disk.names(folder) if name.endswith(TEMPORARY)] == []


def test_a_follower_counts_a_batch_that_came_stamped_by_half() -> None:
    [ours, _], [leader, follower] = begun(2)
    stage(leader)
    prepare(leader)
    ours.bytes_of(part_files(ours, leader)[0])[3] ^= 255
    copy_staged(leader, follower, 3)
    assert known(follower) == [(FIRST.prepared(0), None)]
    lead_in(follower, 4)
    apply(follower, FIRST)
    assert visible(follower) == FIRST.values


def test_a_set_is_checked_and_applied_whatever_is_stamped() -> None:
    """A check may overlap the stamping; a full disk may end it amid a header, on file systems that write elsewhere."""
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    for path in part_files(disk, partition):
        disk.bytes_of(path)[3] ^= 255
    partition.staged.keep_prepared(FIRST.commit_uuid)
    apply(partition, FIRST)
    assert visible(partition) == FIRST.values


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_a_power_cut_restores_beside_another_of_its_number_is_in_nobodys_way(seed: int) -> None:
    [ours, theirs], [leader, follower] = begun(2)
    first, second = b"\xff" * 16, b"\x01" * 16
    for batch in LOOSE.batches(9):
        leader.staged.stage(first, [batch])
    copy_staged(leader, follower, 3)
    follower._staging.sync()
    leader.staged.abort([first])
    leader.staged.expire([], float("inf"))
    leader = open_partition(open_directory(ours.after_kill()), leader_epoch=3)  # it gives the numbers again
    for batch in SECOND.batches(3):
        leader.staged.stage(second, [batch])
    copy_staged(leader, follower, 3)
    left = theirs.after_power_cut(random.Random(seed), 0.5)
    again = open_partition(open_directory(left), leader_epoch=3)
    copy_staged(leader, again, 4)
    assert again.staged.copies() == leader.staged.copies()


def test_a_follower_does_not_take_a_file_for_one_that_its_leader_has_lost() -> None:
    """The same part, under the same number, with other batches in it."""
    [ours, _], [leader, follower] = begun(2)
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    leader.staged.stage(uuid, batches[:2])
    for batch in batches[2:]:
        leader.staged.stage(uuid, [batch])
    copy_staged(leader, follower, 3)
    leader = open_partition(open_directory(ours.after_power_cut(random.Random(0), 0.0)), leader_epoch=3)
    for batch in batches:
        leader.staged.stage(uuid, [batch])
    copy_staged(leader, follower, 3)
    lead_in(follower, 4)
    assert follower.staged.stage(uuid, batches[:1])[0] == len(batches)


def test_files_of_parts_are_not_kept_open_once_the_set_is_durable() -> None:
    [disk], [partition] = begun()
    stage(partition)
    assert {file.is_open for file in partition._staging._files.values() if file.part} == {True}
    partition.staged.prepare(FIRST.prepared(0))
    partition._staging.sync()
    assert {file.is_open for file in partition._staging._files.values() if file.part} == {False}
    partition.staged.keep_prepared(FIRST.commit_uuid)
    assert {file.is_open for file in partition._staging._files.values() if file.part} == {False}
    apply(partition, FIRST)
    assert {file.is_open for file in partition._staging._files.values() if file.part} == {False}
    partition.staged.drop(FIRST.commit_uuid, 5)
    assert part_files(disk, partition) == []


def test_a_sync_is_asked_for_each_so_many_bytes_whichever_files_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, [partition] = begun()
    parts = [(1, SECOND.batches(1)), (3, SECOND.batches(3))]
    size = sum(len(batches[number][1]) for _, batches in parts for number in range(3))
    monkeypatch.setattr(staging, "_SYNC_AHEAD_BYTES", size)
    asked: list[object] = []
    monkeypatch.setattr(partition._staging._services.flusher, "soon", asked.append)
    for number in range(2):
        for part, batches in parts:
            partition.staged.stage(SECOND.uuid(part), [batches[number]])
    assert asked == []
    for part, batches in parts:
        partition.staged.stage(SECOND.uuid(part), [batches[2]])
    assert len(asked) == 1


MANY = Set(SECOND.producer, 1, tuple((part, 4) for part in range(7)))


def stage_many(partition: Partition, numbers: slice) -> None:
    """Of each part, the batches with these numbers."""
    for part, _ in MANY.parts:
        for batch in MANY.batches(part)[numbers]:
            partition.staged.stage(MANY.uuid(part), [batch])


def test_parts_for_which_there_are_no_more_files_go_on_in_the_one_that_all_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leader and follower name all files in each fetch: a broker had so many that their names did not fit into one."""
    monkeypatch.setattr(staging, "_OWN_MAX", 3)
    disks, partitions = begun(2)
    leader, follower = partitions
    for number in range(4):
        for part in (6, 0, 5, 1, 4, 2, 3):
            leader.staged.stage(MANY.uuid(part), [MANY.batches(part)[number]])
    assert len(part_files(disks[0], leader)) == 3
    copy_staged(leader, follower, 3)
    for disk, partition in zip(disks, partitions, strict=True):
        for again in (partition, open_partition(open_directory(disk.after_kill()), leader_epoch=4)):
            lead_in(again, 5)
            again.staged.prepare(MANY.prepared(0))
            again.staged.keep_prepared(MANY.commit_uuid)
            apply(again, MANY)
            assert visible(again) == MANY.values


def test_a_part_goes_on_in_a_file_of_its_own_once_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_OWN_MAX", 1)
    [disk], [partition] = begun()
    for part in (0, 1):
        for batch in MANY.batches(part)[:2]:
            partition.staged.stage(MANY.uuid(part), [batch])
    partition.staged.abort([MANY.uuid(0)])
    assert part_files(disk, partition) == []
    for batch in MANY.batches(1)[2:]:
        partition.staged.stage(MANY.uuid(1), [batch])
    assert len(part_files(disk, partition)) == 1


def test_parts_that_wait_for_their_decision_keep_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may have thousands of them, and wait for hours."""
    monkeypatch.setattr(staging, "_SYNC_AHEAD_FILES", 3)
    disks, partitions = begun(2)
    asked: list[list[object]] = [[], []]
    for partition, those in zip(partitions, asked, strict=True):
        monkeypatch.setattr(partition._staging._services.flusher, "soon", those.append)
    leader, follower = partitions

    def open_files(partition: Partition) -> int:
        return sum(file.is_open for file in partition._staging._files.values() if file.part)

    stage_many(leader, slice(2))
    copy_staged(leader, follower, 3)
    for partition, those in zip(partitions, asked, strict=True):
        assert open_files(partition) == 7 and len(those) == 1
        partition._staging.sync()
        assert open_files(partition) == 0
    lead_in(leader, 3)
    stage_many(leader, slice(2, None))
    copy_staged(leader, follower, 3)
    assert len(part_files(disks[0], leader)) == len(part_files(disks[1], follower)) == 7
    lead_in(follower, 4)
    follower.staged.prepare(MANY.prepared(0))
    follower.staged.keep_prepared(MANY.commit_uuid)
    apply(follower, MANY)
    assert visible(follower) == MANY.values


def test_a_sync_counts_only_what_was_there_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    [disk], [partition] = begun()
    first, second, third = FIRST.batches(0)
    for one in (first, second):
        partition.staged.stage(FIRST.uuid(0), [one])
    real = disk.sync

    def sync(fd: int) -> None:
        real(fd)
        monkeypatch.setattr(disk, "sync", real)
        partition.staged.stage(FIRST.uuid(0), [third])

    # The part's own file is the last one that is synced; it grows meanwhile.
    monkeypatch.setattr(partition._staging, "_files", dict(reversed(partition._staging._files.items())))
    monkeypatch.setattr(disk, "sync", sync)
    partition._staging.sync()
    assert partition._staging.unsynced_bytes == len(third[1])
    partition._staging.sync()
    assert partition._staging.unsynced_bytes == 0


def test_a_copy_that_was_cut_and_grew_again_is_synced() -> None:
    disk = MemoryDisk()
    disk.make_dirs(Path("/data"))
    file = StagedFile(disk, Path("/data"), 1, 7, b"p" * 16)
    file.create()
    file.append([b"x" * 100], 100)
    file.synced = 100
    file.cut(50)
    file.append([b"y" * 40], 40)
    assert file.synced < file.size == 90


@pytest.mark.parametrize("wrong", [0, -1, 1])
def test_a_piece_of_a_copy_is_taken_only_at_its_end(wrong: int) -> None:
    _, [leader, follower] = begun(2)
    stage(leader)
    copy_staged(leader, follower, 3)
    copy = next(each for each in follower.staged.copies() if each.part)
    at = 0 if wrong == 0 else copy.size + wrong
    with pytest.raises(InvalidRequest, match=f"has {copy.size} bytes, not {at}"):
        follower.following.copy_staged(copy.number, copy.salt, copy.part, at, memoryview(b"again"), 3)
    assert copy in follower.staged.copies()


def test_a_set_that_is_known_to_be_lost_is_not_applied() -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    path = part_files(disk, partition)[0]
    disk.bytes_of(path)[-10] ^= 1
    for _ in range(2):
        with pytest.raises(StagedPartLost):
            partition._staging.check(FIRST.commit_uuid)
    with pytest.raises(StagedPartLost):
        next(partition._staging.pieces(FIRST.commit_uuid, lambda *_: False))


def test_a_file_that_changed_after_its_check_is_not_adopted() -> None:
    """An adopted file is read no more, but for its headers: they have the checksums that were staged."""
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    for path in part_files(disk, partition):
        disk.bytes_of(path)[STAMPED_SIZE + 4] ^= 1  # of the checksum of the rest of a batch
    with pytest.raises(StagedPartLost):
        apply(partition, FIRST)
    assert visible(partition) == FIRST.values[:2]  # those of the file that parts share


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the staged files that are read whole."""
    names: list[str] = []
    for name in ("_read_file", "_read_part_file"):
        real = getattr(staging.Staging, name)

        def read(self: staging.Staging, file: StagedFile, real: Callable[..., None] = real) -> None:
            names.append(file.path.name)
            real(self, file)

        monkeypatch.setattr(staging.Staging, name, read)
    return names


def test_a_part_that_was_given_up_makes_no_follower_read_what_else_is_staged(read_again: list[str]) -> None:
    """It may be many gigabytes, and meanwhile the follower fetches nothing."""
    [_, disk], [leader, follower] = begun(2)
    stage(leader)
    for batch in LOOSE.batches(9):
        leader.staged.stage(LOOSE.uuid(9), [batch])
    copy_staged(leader, follower, 3)
    leader.staged.abort([LOOSE.uuid(9)])
    read_again.clear()
    copy_staged(leader, follower, 3)
    assert read_again == []
    assert follower.staged.copies() == leader.staged.copies()
    lead_in(follower, 4)
    prepare(follower)
    apply(follower, FIRST)
    assert visible(follower) == FIRST.values
    again = open_partition(open_directory(disk.after_kill()), leader_epoch=5)
    assert visible(again) == FIRST.values


def test_a_set_whose_files_go_before_its_drop_is_known_is_lost_until_then(read_again: list[str]) -> None:
    [_, disk], [leader, follower] = begun(2)
    stage(leader)
    prepare(leader)
    copy_staged(leader, follower, 3)
    copies = [copy for copy in leader.staged.copies() if not copy.part]
    follower.following.keep_only_staged(copies, 3)
    read_again.clear()
    follower._staging.sync_copies()
    assert read_again == []
    [(prepared, lost)] = known(follower)
    assert prepared == FIRST.prepared(0) and lost is not None
    assert known(open_partition(open_directory(disk.after_kill()), leader_epoch=4)) == [(prepared, lost)]
    apply(leader, FIRST)
    leader._staging.drop(FIRST.commit_uuid)
    copy_staged(leader, follower, 3)
    assert known(follower) == []
    assert follower.staged.copies() == leader.staged.copies()


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_that_the_next_leader_has_in_another_file_is_whole_at_the_last_one(count: int) -> None:
    """What was in the file that goes comes in the same answer, in another file."""
    _, [old, new] = begun(2)
    first, *rest = FIRST.batches(0)
    old.staged.stage(FIRST.uuid(0), [first])  # in the file that parts share
    copy_staged(old, new, 3)
    old.staged.stage(FIRST.uuid(0), rest[:1])  # in a file of its own, of which nobody else has a byte
    lead_in(new, 4)
    for batch in rest[:count]:
        new.staged.stage(FIRST.uuid(0), [batch])
    copy_staged(new, old, 4)
    lead_in(old, 5)
    assert old.staged.copies() == new.staged.copies()
    for batch in rest[count:]:
        old.staged.stage(FIRST.uuid(0), [batch])
    for batch in FIRST.batches(4):
        old.staged.stage(FIRST.uuid(4), [batch])
    prepare(old)
    apply(old, FIRST)
    assert visible(old) == FIRST.values


def test_copies_that_are_opened_again_ask_for_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_SYNC_AHEAD_FILES", 5)
    _, [leader, follower] = begun(2)
    asked: list[object] = []
    for number in range(3):
        for part in range(7):
            leader.staged.stage(MANY.uuid(part), [MANY.batches(part)[number]])
        if number == 2:
            follower._staging.sync()
            monkeypatch.setattr(follower._staging._services.flusher, "soon", asked.append)
        copy_staged(leader, follower, 3)
        lead_in(leader, 3)
    assert len(asked) == 1


def open_at(partition: Partition) -> list[int]:
    """Files of staged data that are open, but for the one that is written to."""
    held = partition._staging
    return [number for number, file in held._files.items() if file.is_open and file is not held._active]


@pytest.mark.parametrize("own", [0, 2])
def test_no_file_stays_open_that_was_read(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    """By a follower, by the check before the decision and by the apply: a broker may have more than descriptors."""
    monkeypatch.setattr(staging, "_OWN_MAX", own or 1 << 30)
    monkeypatch.setattr(staging, "_FILE_BYTES", 1)
    if not own:
        monkeypatch.setattr(staging, "_OWN_FROM", 1 << 30)  # all are in files that parts share
    _, [leader, follower] = begun(2)
    for part in range(7):
        for batch in MANY.batches(part):
            leader.staged.stage(MANY.uuid(part), [batch])
            leader._staging.sync()
    assert len(leader._staging._files) > 7 and open_at(leader) == []
    copy_staged(leader, follower, 3)
    assert open_at(leader) == []
    lead_in(leader, 3)
    leader.staged.prepare(MANY.prepared(0))
    leader.staged.keep_prepared(MANY.commit_uuid)
    assert open_at(leader) == []
    apply(leader, MANY)
    assert visible(leader) == MANY.values
    assert open_at(leader) == []


def test_files_that_all_parts_share_are_larger_the_more_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_OWN_FROM", 1 << 30)
    monkeypatch.setattr(staging, "_OWN_MAX", 2)
    monkeypatch.setattr(staging, "_FILE_BYTES", 400)
    _, [partition] = begun()
    stage_many(partition, slice(None))
    sizes = [copy.size for copy in partition.staged.copies()]
    assert sizes[:-1] == sorted(sizes[:-1]) and sizes[-2] > 2 * sizes[0], sizes


def test_a_copy_that_somebody_removed_concerns_its_partition_alone() -> None:
    disks, [leader, follower] = begun(2)
    stage(leader)
    copy_staged(leader, follower, 3)
    follower._staging.sync()
    for path in part_files(disks[1], follower):
        disks[1].unlink(path)
    lead_in(leader, 3)
    leader.staged.stage(SECOND.uuid(1), SECOND.batches(1))
    for part, _ in FIRST.parts:
        leader.staged.stage(MANY.uuid(part), MANY.batches(part)[:1])
    own = [copy for copy in leader.staged.copies() if copy.part]
    with pytest.raises(FileRefused):
        follower.following.copy_staged(own[0].number, own[0].salt, own[0].part, own[0].size, memoryview(b"more"), 3)
    assert follower._staging._errors.health.failed is None


def test_the_start_of_a_file_is_copied_whole() -> None:
    """A follower takes its salt from it."""
    _, [leader] = begun()
    stage(leader)
    for room in range(1, FILE_START.size + 2):
        pieces = leader._staging.lacking([], room).pieces
        assert all(piece.length >= FILE_START.size for piece in pieces)
    assert pieces


def test_files_of_parts_agree_each_by_itself() -> None:
    framed, own = StagedCopy(1, 7, 100), StagedCopy(2, 8, 50, b"p" * 16)
    for has, kept in (
        ([framed, own], [framed, own]),
        ([framed._replace(size=40), own], [framed._replace(size=40), own]),
        ([own._replace(size=60)], [own]),
        ([framed, own._replace(size=20)], [framed, own._replace(size=20)]),
        ([framed, own._replace(salt=9)], [framed]),
    ):
        assert agreed_copies([own, framed], has) == kept


def test_what_had_been_staged_by_a_position_of_a_file_that_was_written_by_turns() -> None:
    file = StagedFile(MemoryDisk(), Path("/data"), 1, 7)
    assert file.reached(0) == -1
    file.runs = [(0, 100), (50, 400), (60, 1000)]
    assert [file.reached(size) for size in (0, 49, 50, 55, 60, 70)] == [100, 149, 400, 405, 1000, 1010]


def test_a_follower_is_as_far_as_the_first_byte_that_it_lacks_was_staged() -> None:
    """By turns: what others staged before that byte counts, whatever file has it."""
    _, [leader] = begun()
    uuid, batches = SECOND.uuid(1), SECOND.batches(1)
    leader.staged.stage(uuid, [batches[0]])
    leader.staged.stage(uuid, [batches[1]])
    other = LOOSE.uuid(9)
    leader.staged.stage(other, [LOOSE.batches(9)[0]])
    end = leader._staging.staged_end
    leader.staged.stage(uuid, [batches[2]])
    framed, own = leader.staged.copies()
    assert own.part == uuid
    length = len(batches[1][1])
    assert leader._staging.lacking([framed, own._replace(size=length)], 0).reached == end
    assert leader._staging.lacking([framed, own._replace(size=length - 1)], 0).reached < end
    assert leader._staging.lacking([framed, own], 0).reached == leader._staging.staged_end
    assert length > HEADER_SIZE
