"""Segments of a log are replaced: whatever stops it, what is found is the old ones or the new one, whole."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.replica.repair import repair
from broker.storage.log import Appended, Log
from broker.storage.replacement import Replacement
from broker.storage.segment import segment_path
from kafkalog.errors import Closed, DiskFull, StorageFailed
from tests.broker.replica.test_repair import Copy
from tests.broker.storage.batches import TOPIC_ID, numbered, read_all
from tests.broker.storage.copies import END, PER_SEGMENT, PRODUCER, RECORDS, bytes_in, flip, new_copy, open_copy
from tests.crash.memory_disk import MemoryDisk

CUTS = 12  # of names and sectors that were not synced any may be lost: each step is cut so often
RANGES = pytest.mark.parametrize(("first", "last"), [(1, 1), (0, 0), (1, 2), (0, 2)])
DAMAGED = PER_SEGMENT + RECORDS


def good() -> dict[int, bytes | None]:
    return {offset: b"%08d" % offset for offset in range(END)}


def damaged() -> dict[int, bytes | None]:
    return good() | dict.fromkeys(range(DAMAGED, DAMAGED + RECORDS))


def damaged_log(disk: MemoryDisk) -> Log:
    """The second batch of the second segment is damaged."""
    log = new_copy(disk)
    segment = log.view.segments[1]
    flip(disk, segment.path, segment.size // 4 + 100)
    assert sum(log.check(segment)) >= segment.size
    assert [each[:2] for each in segment.damaged] == [(DAMAGED, DAMAGED + RECORDS)]
    log.check_index(segment)  # the saved index has the damage, and must not describe the new file
    return log


def written(log: Log, first: int, last: int) -> Replacement:
    """A replacement of segments by one whole one, complete."""
    replacement = log.begin_replacement(log.view.segments[first : last + 1])
    assert replacement is not None
    twin = new_copy()
    for segment in twin.view.segments[first : last + 1]:
        replacement.append(bytes_in(twin, segment))
    assert replacement.complete() == ()
    return replacement


def all_of(log: Log) -> dict[int, bytes | None]:
    """As `read_all`, once the damage in bodies is known: a read with one in its middle would count as damaged whole."""
    for segment in log.view.segments:
        list(log.check(segment))
    return read_all(log)


def check(disk: MemoryDisk, expected: list[dict[int, bytes | None]]) -> dict[int, bytes | None]:
    """Open what was left twice, and append between; returns what was found."""
    log = open_copy(disk, 4)
    found = all_of(log)
    assert found in expected
    assert not [name for name in disk.names(log.directory) if ".swap" in name or name.endswith(".tmp")]
    log.append([numbered(END, 1, 8)], 4)
    log.flush()
    log.close(clean=False)
    again = all_of(open_copy(disk, 5))
    assert again == found | {END: b"%08d" % END}
    return found


@RANGES
def test_a_stop_at_any_step_leaves_the_old_segments_or_the_new_one(first: int, last: int) -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    images: list[tuple[str, MemoryDisk]] = []
    disk.before = lambda step: images.append((step, disk.after_kill()))
    assert log.replace(written(log, first, last))
    disk.before = lambda step: None
    images.append(("done", disk.after_kill()))
    whole = good() if first <= 1 <= last else damaged()
    decided = False
    for seed, (step, image) in enumerate(images):
        dice = random.Random(seed)
        for keep in (0.0, 0.5):
            for _ in range(CUTS if keep else 1):
                found = check(image.after_power_cut(dice, keep), [whole, damaged()])
                assert step != "done" or found == whole
        is_new = check(image.after_kill(), [whole, damaged()]) == whole
        assert not decided or is_new, f"the decision was taken back before {step}"
        decided = is_new and whole != damaged()
    assert len(images) > 10


def test_a_stop_within_the_start_that_finishes_a_replacement_costs_nothing() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    images = disk.images()
    assert log.replace(written(log, 0, 2))
    disk.before = lambda step: None
    name = f"{0:020d}-{3 * PER_SEGMENT:020d}.swap"
    decided = [each for each in images if name in each.names(log.directory)]
    assert len(decided) > 4
    for seed, image in enumerate(decided[::2]):
        opening = image.after_kill()
        within = opening.images()
        open_copy(opening, 4)
        assert within
        for each in within:
            assert check(each.after_kill(), [good()]) == good()
            check(each.after_power_cut(random.Random(seed), 0.5), [good(), damaged()])


def test_a_stop_at_any_step_of_a_repair_costs_nothing_of_what_is_known_of_the_repaired_batches() -> None:
    """A start had met the damage. The roll before the repair saves what was known without these batches."""
    disk, first = MemoryDisk(), END - 2 * RECORDS
    log = new_copy(disk)
    path, size = log.view.segments[-1].path, log.view.segments[-1].size // 4
    log.close(clean=False)
    flip(disk, path, 2 * size + 150)
    log = open_copy(disk, 4)
    images = disk.images()
    repaired(log)
    log.close()
    disk.before = lambda step: None
    for seed, image in enumerate([*images, disk]):
        dice = random.Random(seed)
        for stopped in (image.after_kill(), *(image.after_power_cut(dice, keep) for keep in (0.0, 0.5))):
            again = open_copy(stopped, 5)
            repaired(again)
            assert is_known(again, first), seed
            again.close()
            assert is_known(open_copy(stopped, 6), first), seed
    assert len(images) > 30


def repaired(log: Log) -> None:
    log.roll_if_damaged()
    log.append([numbered(0, producer=(PRODUCER + 1, 0, 0))], log.last_epoch)
    for segment in log.view.segments[:-1]:
        repair(log, segment, [Copy(new_copy())], lambda: False)
    assert log.first_damage() is None


def is_known(log: Log, offset: int) -> bool:
    sent = PRODUCER, 0, offset
    [again] = log.append([numbered(offset, RECORDS, 8, producer=sent, timestamps_us=offset)], log.last_epoch)
    return isinstance(again, Appended) and again.base_offset == offset


def test_a_replacement_that_was_finished_does_not_come_back_after_a_truncation() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    assert log.replace(written(log, 1, 2))
    to = PER_SEGMENT + RECORDS
    log.truncate_to(to)
    log.begin_epoch(9)
    log.append([numbered(1000, 1, 8)], 9)
    log.flush()
    for seed in range(CUTS):
        left = open_copy(disk.after_power_cut(random.Random(seed), 0.5), 9)
        assert read_all(left) == {offset: b"%08d" % offset for offset in range(to)} | {to: b"00001000"}


def test_readers_of_the_old_segments_read_on_in_them() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    open_files = disk.open_files
    twin = new_copy()

    def read_old_and_new() -> None:
        view = log.view
        with log.reader.read(2 * PER_SEGMENT, 1 << 20) as held:
            assert log.replace(written(log, 1, 2))
            assert held.read() == bytes_in(twin, twin.view.segments[2])
        for offset in (PER_SEGMENT, 2 * PER_SEGMENT):
            old = log.reader.read(offset, 200, look=lambda: (view, view.end_offset))
            with old, log.reader.read(offset, 200) as new:
                assert old.read()[:100] == new.read()[:100]
                assert old.segment_base_offset == offset and new.segment_base_offset == PER_SEGMENT
        assert disk.open_files == open_files + 2

    read_old_and_new()
    assert read_all(log) == good()
    assert disk.open_files == open_files, "the old files are still open"


def _delete(log: Log) -> None:
    log.delete_before(2 * PER_SEGMENT)


def _truncate_within(log: Log) -> None:
    """The segment becomes the active one, gets other records, and is closed again."""
    log.truncate_to(PER_SEGMENT + RECORDS)
    log.begin_epoch(9)
    for number in range(20):
        log.append([numbered(1000 + number, RECORDS, 8)], 9)
        log._services.clock.advance(1)  # type: ignore[attr-defined]
    log.flush()


def _reset(log: Log) -> None:
    log.reset_to(5)


def _replace(log: Log) -> None:
    assert log.replace(written(log, 0, 1))


@pytest.mark.parametrize("change", [_delete, _truncate_within, _reset, _replace])
def test_a_replacement_is_given_up_if_its_segments_have_changed_meanwhile(change: Callable[[Log], None]) -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 1)
    change(log)
    expected = read_all(log)
    assert not log.replace(replacement)
    assert read_all(log) == expected
    assert not [name for name in disk.names(log.directory) if ".swap" in name]
    log.close(clean=False)
    assert all_of(open_copy(disk, 10)) == expected


def test_a_replacement_stays_good_if_the_log_is_cut_after_its_segments() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 1)
    end_offset = 3 * PER_SEGMENT + RECORDS
    log.truncate_to(end_offset)
    assert log.replace(replacement)
    expected = read_all(log)
    assert len(expected) == end_offset
    log.close(clean=False)
    assert all_of(open_copy(disk, 10)) == expected


def test_only_closed_segments_in_a_row_are_replaced() -> None:
    log = new_copy()
    segments = log.view.segments
    assert log.begin_replacement(segments[-1:]) is None
    assert log.begin_replacement([segments[0], segments[2]]) is None
    assert log.begin_replacement(new_copy().view.segments[:1]) is None


def test_a_closed_log_takes_no_replacement() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 1)
    log.close()
    with pytest.raises(Closed):
        log.replace(replacement)
    assert not [name for name in disk.names(log.directory) if ".swap" in name]


@pytest.mark.parametrize("step", ["create", "write", "rename"])
def test_a_full_disk_leaves_the_old_segments(step: str) -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)

    def refuse(name: str) -> None:
        if name.startswith(step):
            raise OSError(28, "No space left on device")

    disk.before = refuse
    with pytest.raises(DiskFull):
        log.replace(written(log, 1, 1))
    disk.before = lambda name: None
    assert read_all(log) == damaged()
    assert log.replace(written(log, 1, 1))
    assert read_all(log) == good()


def test_a_lack_of_descriptors_leaves_the_old_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 1)

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patched:
        for step in ("create", "open", "names", "sync_dir"):
            patched.setattr(disk, step, refuse)
        with pytest.raises(DiskFull):
            log.replace(replacement)
    assert read_all(log) == damaged()
    assert log.replace(written(log, 1, 1))
    assert read_all(log) == good()


def test_a_decision_that_may_have_been_taken_ends_the_directory() -> None:
    """The log must not go on: the next start would put the replacement over what it has by then."""
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 1)
    renamed: list[str] = []

    def refuse(step: str) -> None:
        if step == "sync_dir" and renamed:
            raise OSError(28, "No space left on device")
        if step.endswith(".swap"):
            renamed.append(step)

    disk.before = refuse
    with pytest.raises(StorageFailed):
        log.replace(replacement)
    assert check(disk.after_kill(), [good()]) == good()


def test_an_error_after_the_decision_ends_the_directory_and_the_next_start_finishes() -> None:
    disk = MemoryDisk()
    log = damaged_log(disk)
    replacement = written(log, 1, 2)
    name = segment_path(log.directory, 2 * PER_SEGMENT).name

    def refuse(step: str) -> None:
        if step == f"unlink {name}":
            raise OSError(5, "Input/output error")

    disk.before = refuse
    with pytest.raises(StorageFailed):
        log.replace(replacement)
    assert check(disk.after_kill(), [good()]) == good()
    assert TOPIC_ID.hex() in log.directory.name
