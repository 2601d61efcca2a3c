"""Files of staged batches that become segments: what is in them is written once, and has a name in the staging folder
and one in the log until the set is dropped. Neither use changes what the other has."""

from __future__ import annotations

import errno
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from broker.replica.partition import Partition
from broker.staging import staging
from broker.staging.copies import StagedCopy, agreed_copies
from broker.staging.part import PART_SUFFIX, Part, StagedFile
from broker.storage.checkpoint import TEMPORARY
from kafkalog.errors import DiskFull, FencedLeaderEpoch, InvalidRequest
from kafkalog.format.batch import CRC_FROM, HEADER_SIZE, iter_batches
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import numbered
from tests.crash.memory_disk import MemoryDisk
from tests.crash.test_staged_writes import FIRST, LOOSE, SECOND, apply, copy_staged, known, lead_in, visible
from tests.crash.workload import open_directory


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of a part but the first are in a file of its own, which becomes a segment."""
    monkeypatch.setattr(staging, "_OWN_FROM", 1)
    monkeypatch.setattr(staging, "_ADOPTED_MIN", 1)


def stage(partition: Partition) -> None:
    for part, _ in FIRST.parts:
        for batch in FIRST.batches(part):
            partition.staged.stage(FIRST.uuid(part), [batch])


def prepare(partition: Partition, version: int = 0) -> None:
    partition.staged.prepare(FIRST.prepared(version))
    partition.staged.keep_prepared(FIRST.commit_uuid)


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
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)
    sizes = [disk.file_size(path) for path in part_files(disk, partition)]
    partition.append_as_leader([numbered(0)])
    assert bases(partition) == [0, 2, 6, 8, 10]
    assert [disk.file_size(path) for path in part_files(disk, partition)] == sizes


@pytest.mark.parametrize("cut", ["kill", "power cut"])
def test_an_append_after_a_start_does_not_go_to_an_adopted_segment_either(cut: str) -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)
    left = disk.after_kill() if cut == "kill" else disk.after_power_cut(random.Random(0), 0.0)
    partition = open_partition(open_directory(left), leader_epoch=4)
    sizes = [left.file_size(path) for path in part_files(left, partition)]
    assert sizes
    partition.append_as_leader([numbered(0)])
    assert [left.file_size(path) for path in part_files(left, partition)] == sizes
    assert bases(partition)[-1] == 10
    assert known(partition) == [(FIRST.prepared(0), None)]


def test_once_the_set_is_dropped_the_segment_has_its_file_alone() -> None:
    [disk], [partition] = begun()
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)
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
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)
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


def test_where_files_have_one_name_only_the_batches_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(self: MemoryDisk, path: Path, new: Path) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(new))

    monkeypatch.setattr(MemoryDisk, "link", no_links)
    _, [partition] = begun()
    stage(partition)
    prepare(partition)
    apply(partition, FIRST)
    assert visible(partition) == FIRST.values
    assert bases(partition) == [0]


@pytest.mark.parametrize("limit", ["too small a segment", "larger than a segment"])
def test_a_file_of_another_size_than_segments_have_is_copied(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    [disk], [partition] = begun()
    if limit == "too small a segment":
        monkeypatch.setattr(staging, "_ADOPTED_MIN", 10_000)
        monkeypatch.setattr(partition._staging, "_segment_bytes", lambda: 1 << 20)
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
        follower.following.copy_staged(piece.file.number, piece.file.part, piece.position, data, 3)
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
                follower.following.copy_staged(piece.file.number, piece.file.part, start, part, 3)
                follower.following.position()
        else:
            follower.following.copy_staged(piece.file.number, b"", 0, data, 3)
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
