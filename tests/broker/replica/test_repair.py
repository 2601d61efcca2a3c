"""A damaged segment is repaired from other logs: what is taken, and what is kept."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from broker.replica import repair as module
from broker.replica.repair import Outcome, repair
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import BrokerUnreachable, Closed, CorruptBatch
from tests.broker.storage.batches import TOPIC_ID, numbered, read_all, topic
from tests.broker.storage.copies import (
    BATCHES,
    END,
    PATH,
    PER_SEGMENT,
    PRODUCER,
    RECORDS,
    bytes_in,
    cut,
    flip,
    new_copy,
    open_copy,
)
from tests.crash.memory_disk import MemoryDisk

MIXED, DECIDED = 11, [(0, 3), (1, 2)]  # batches of `mixed_log`, and those of each part of the decided batch among them
GOOD: dict[int, bytes | None] = {offset: b"%08d" % offset for offset in range(END)}


class Copy:
    """Another replica, whose log is here.

    Attributes:
        read_from: the offsets at which it was read.
    """

    def __init__(self, log: Log, name: str = "other") -> None:
        self.name = name
        self.log = log
        self.read_from: list[int] = []

    def read(self, offset: int, max_bytes: int) -> memoryview:
        self.read_from.append(offset)
        with self.log.reader.read(offset, max_bytes) as found:
            return memoryview(found.read())


class Away:
    name = "away"

    def read(self, offset: int, max_bytes: int) -> memoryview:
        raise BrokerUnreachable(address="a:1", reason="it is away")


def damaged_copy(*places: tuple[int, int]) -> tuple[MemoryDisk, Log]:
    """A log with damage in the bodies of some batches: (number of the segment, number of the batch)."""
    disk = MemoryDisk()
    log = new_copy(disk)
    for number, batch in places:
        segment = log.view.segments[number]
        flip(disk, segment.path, batch * (segment.size // BATCHES) + 150)
        list(log.check(segment))
        assert segment.damaged
    return disk, log


def mixed_log(disk: MemoryDisk) -> Log:
    """Batches of two producers around a decided batch, in one segment."""
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock(), producer_batches_remembered=5)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(index_interval_bytes=700), 0)
    log.append([numbered(offset, producer=(7, 0, offset)) for offset in range(2)], 0)
    for part, batches in DECIDED:
        log.append_decided(
            [numbered(part * 10 + each, producer=(9, 0, each), transaction=(4, part)) for each in range(batches)], 0
        )
    log.append([numbered(offset, producer=(8, 0, offset)) for offset in range(2)], 0)
    log.append([numbered(2, producer=(7, 0, 2)), numbered(0)], 0)
    log.flush()
    return log


def known_of(log: Log) -> tuple[object, ...]:
    """What a log knows of its batches: for each batch of the producers where it is, and the apply progress."""
    sent = (7, 0), (7, 1), (7, 2), (8, 0), (8, 1)
    again = [log.append([numbered(9, producer=(producer, 0, number))], log.last_epoch) for producer, number in sent]
    progress = log.apply_progress(9)
    assert progress is not None
    decided = progress.start_offset, progress.end_offset, progress.first, progress.has_all(DECIDED)
    return *((each.base_offset, each.end_offset) for [each] in again if isinstance(each, Appended)), decided


def mend_all(log: Log, *sources: Copy) -> None:
    log.roll_if_damaged()
    log.flush()
    for segment in log.view.segments[:-1]:
        repair(log, segment, sources, lambda: False)
    assert log.first_damage() is None


def mend(log: Log, *sources: Copy | Away, number: int = 1, is_stopping: Callable[[], bool] = lambda: False) -> Outcome:
    return repair(log, log.view.segments[number], sources, is_stopping)


@pytest.mark.parametrize("piece", [1 << 20, 300, 500])
def test_any_damage_of_a_segment_is_repaired_byte_for_byte(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece)
    twin = new_copy()
    disk = MemoryDisk()
    log = new_copy(disk)
    expected = bytes_in(twin, twin.view.segments[1])
    index = bytes(disk.bytes_of(log.view.segments[1].index_path))
    for at in range(0, len(expected), 29):
        flip(disk, log.view.segments[1].path, at)
        list(log.check(log.view.segments[1]))
        assert mend(log, Copy(twin)) == Outcome(1, [])
        assert disk.bytes_of(log.view.segments[1].path) == expected
        assert disk.bytes_of(log.view.segments[1].index_path) == index
        assert log.view.segments[1].damaged == ()
        assert read_all(log) == GOOD
    log.close(clean=False)
    assert read_all(open_copy(disk, 4)) == GOOD


@pytest.mark.parametrize("size", [0, 100, 300, 700])
def test_what_is_missing_of_a_segment_is_repaired(size: int) -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    cut(disk, log.view.segments[1].path, size)
    list(log.check(log.view.segments[1]))
    assert mend(log, Copy(new_copy())).left == []
    assert read_all(log) == GOOD


def test_a_segment_whose_file_is_gone_is_repaired() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    disk.unlink(log.view.segments[1].path)
    list(log.check(log.view.segments[1]))
    assert mend(log, Copy(new_copy())) == Outcome(1, [])
    assert read_all(log) == GOOD


def test_replicas_with_damage_at_different_places_repair_each_other() -> None:
    _, one = damaged_copy((1, 0), (1, 2))
    _, other = damaged_copy((1, 1), (1, 3))
    assert mend(one, Copy(other)) == Outcome(2, [])
    assert mend(other, Copy(one)) == Outcome(2, [])
    assert read_all(one) == read_all(other) == GOOD


def test_damage_at_the_same_place_stays_and_the_rest_is_repaired() -> None:
    disk, one = damaged_copy((1, 1), (1, 3))
    _, other = damaged_copy((1, 1))
    before = bytes_in(one, one.view.segments[1])
    outcome = mend(one, Copy(other))
    lost = range(PER_SEGMENT + RECORDS, PER_SEGMENT + 2 * RECORDS)
    assert outcome.repaired == 1
    assert [(each.damage.start_offset, each.damage.end_offset) for each in outcome.left] == [(lost.start, lost.stop)]
    assert outcome.left[0].reason.startswith("other: corrupt batch")
    assert read_all(one) == GOOD | dict.fromkeys(lost)
    after = bytes_in(one, one.view.segments[1])
    size = len(before) // BATCHES
    assert after[: 3 * size] == before[: 3 * size], "the damaged bytes are kept"
    one.close(clean=False)
    again = open_copy(disk, 4)
    assert read_all(again) == GOOD | dict.fromkeys(lost)
    assert mend(again, Copy(new_copy())) == Outcome(1, [])
    assert read_all(again) == GOOD


def test_damage_that_nobody_can_repair_changes_nothing() -> None:
    disk, one = damaged_copy((1, 1))
    steps = list(disk.steps)
    for sources, reason in (
        ((), "there is no other replica"),
        ((Away(), Copy(damaged_copy((1, 1))[1])), "away: .*is away.*; other: corrupt batch"),
    ):
        outcome = mend(one, *sources)
        assert outcome.repaired == 0
        assert re.match(reason, outcome.left[0].reason), outcome
    assert disk.steps == steps


def test_a_range_is_taken_from_several_replicas_if_none_has_all_of_it() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    cut(disk, log.view.segments[1].path, 0)
    list(log.check(log.view.segments[1]))
    log.view.segments[1].damaged = (log.view.segments[1].damaged[0]._replace(end_offset=2 * PER_SEGMENT),)
    first, second = Copy(damaged_copy((1, 3))[1], "first"), Copy(damaged_copy((1, 0))[1], "second")
    assert mend(log, first, second).left == []
    assert read_all(log) == GOOD
    assert second.read_from == [2 * PER_SEGMENT - RECORDS]


def test_a_range_of_which_no_replica_has_the_end_stays_as_it_is() -> None:
    disk, log = damaged_copy((1, 1), (1, 3))
    segment = log.view.segments[1]
    size = segment.size // BATCHES
    flip(disk, segment.path, 2 * size + 150)
    segment.damaged = ()
    list(log.check(segment))
    found = log.view.segments[1].damaged
    ranges = [(PER_SEGMENT + RECORDS, PER_SEGMENT + 3 * RECORDS), (PER_SEGMENT + 3 * RECORDS, 2 * PER_SEGMENT)]
    assert [(each.start_offset, each.end_offset) for each in found] == ranges
    before = bytes_in(log, segment)
    outcome = mend(log, Copy(damaged_copy((1, 2))[1]))
    assert outcome.repaired == 1
    assert [(each.damage.start_offset, each.damage.end_offset) for each in outcome.left] == ranges[:1]
    assert bytes_in(log, log.view.segments[1])[: 3 * size] == before[: 3 * size], "the damaged bytes are kept"
    assert mend(log, Copy(new_copy())).left == [] and read_all(log) == GOOD


def test_batches_in_each_others_place_are_put_in_order() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    before, size = bytes_in(log, segment), segment.size // BATCHES
    disk.bytes_of(segment.path)[size : 3 * size] = before[2 * size : 3 * size] + before[size : 2 * size]
    list(log.check(segment))
    assert mend(log, Copy(new_copy())).left == []
    assert bytes_in(log, log.view.segments[1]) == before
    assert read_all(log) == GOOD


def test_a_replica_with_other_records_there_is_not_believed() -> None:
    _, log = damaged_copy((1, 1))
    directory = LogDirectory(PATH, disk=MemoryDisk(), clock=ManualClock())
    other = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    for offset in range(0, END, RECORDS):  # all in epoch 0, where the log has epoch 1
        other.append([numbered(5000 + offset, RECORDS, 8)], 0)
    outcome = mend(log, Copy(other))
    assert outcome.repaired == 0
    assert "another one" in outcome.left[0].reason


def test_what_is_not_known_to_be_acknowledged_is_repaired_too() -> None:
    """Otherwise a replica would wait for a high watermark, and its leader for this replica."""
    _, log = damaged_copy((1, 1), (2, 0))
    log.high_watermark = 0
    assert mend(log, Copy(new_copy()), number=1) == Outcome(1, [])
    assert mend(log, Copy(new_copy()), number=2) == Outcome(1, [])


def test_damage_before_the_start_does_not_count() -> None:
    _, log = damaged_copy((1, 0))
    log.delete_before(PER_SEGMENT + RECORDS)
    assert log.view.segments[0].damaged
    assert mend(log, Copy(new_copy()), number=0) == Outcome(0, [])


def test_a_stop_ends_a_repair_and_leaves_no_file() -> None:
    disk, log = damaged_copy((1, 3))
    with pytest.raises(Closed):
        mend(log, Copy(new_copy()), is_stopping=lambda: True)
    assert not [name for name in disk.names(log.directory) if ".swap" in name]


def test_new_damage_in_what_counts_as_good_is_not_taken_over() -> None:
    disk, log = damaged_copy((1, 1))
    segment = log.view.segments[1]
    flip(disk, segment.path, 3 * (segment.size // BATCHES) + 150)
    assert mend(log, Copy(new_copy())).repaired == 0
    list(log.check(log.view.segments[1]))
    assert mend(log, Copy(new_copy())) == Outcome(2, [])
    assert read_all(log) == GOOD


def test_damage_in_the_active_segment_is_repaired_after_a_roll() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    active = log.view.segments[-1]
    flip(disk, active.path, 150)
    list(log.check(active, active.base_offset, active.base_offset + 1))
    assert active.damaged
    with pytest.raises(CorruptBatch):
        log.reader.read(active.base_offset, 1000)
    log.roll_if_damaged()
    assert log.view.segments[-1] is not active
    assert mend(log, Copy(new_copy()), number=3) == Outcome(1, [])
    assert read_all(log) == GOOD


@pytest.mark.parametrize("is_restarted", [False, True], ids=["once", "with-what-it-saved"])
@pytest.mark.parametrize("lost", [(0,), (2,), (3, 4), (6,), (9,), (0, 2, 5, 9), tuple(range(10))], ids=str)
def test_what_a_start_could_not_learn_from_damaged_batches_comes_with_their_repair(
    lost: tuple[int, ...], is_restarted: bool
) -> None:
    """A repaired replica that came to lead appended what had been acknowledged once more."""
    disk, twin = MemoryDisk(), mixed_log(MemoryDisk())
    log = mixed_log(disk)
    path, size = log.view.segments[0].path, log.view.segments[0].size // MIXED
    log.close(clean=False)
    for batch in lost:
        flip(disk, path, batch * size + 150)
    log = open_copy(disk, 0)
    assert log.first_damage() == lost[0]
    if is_restarted:
        log.close()
        log = open_copy(disk, 0)
    log.roll_if_damaged()
    log.append([numbered(0, producer=(5, 0, 0))], 0)
    log.flush()  # saves what it knows
    mend_all(log, Copy(twin))
    assert known_of(log) == known_of(twin)
    for is_clean, is_newest_lost in ((False, False), (True, False), (True, True)):
        log.close(clean=is_clean)
        if is_newest_lost:
            disk.unlink(log.directory / max(name for name in disk.names(log.directory) if name.endswith(".producers")))
        log = open_copy(disk, 0)
        assert known_of(log) == known_of(twin)


def test_what_a_truncation_could_not_learn_from_damaged_batches_comes_with_their_repair() -> None:
    _, log = damaged_copy((3, 0))
    log.truncate_to(END - RECORDS)
    log.begin_epoch(4)
    mend_all(log, Copy(new_copy()))
    first = END - PER_SEGMENT
    [again] = log.append([numbered(first, RECORDS, 8, producer=(PRODUCER, 0, first))], 4)
    assert isinstance(again, Appended) and again.base_offset == first


def test_a_batch_behind_a_saved_state_is_not_in_it_after_its_repair_and_is_appended_again_after_a_cut() -> None:
    disk, log = damaged_copy((3, 0))
    first = log.view.segments[3].base_offset
    log.roll_if_damaged()
    mend_all(log, Copy(new_copy()))
    assert f"{first:020d}.producers" in disk.names(log.directory)
    log.truncate_to(first)
    log.begin_epoch(4)
    log.append([numbered(first, RECORDS, 8, producer=(PRODUCER, 0, first))], 4)
    assert log.end_offset == first + RECORDS


def test_of_a_part_that_is_repaired_that_part_is_known() -> None:
    disk, twin = MemoryDisk(), mixed_log(MemoryDisk())
    log, half = mixed_log(disk), mixed_log(other := MemoryDisk())
    path, size = log.view.segments[0].path, log.view.segments[0].size // MIXED
    for broken, batches in ((log, (0, 3)), (half, (3,))):
        broken.close(clean=False)
        for batch in batches:
            flip(disk if broken is log else other, path, batch * size + 150)
    log, half = open_copy(disk, 0), open_copy(other, 0)
    log.roll_if_damaged()
    assert mend(log, Copy(half), number=0).repaired == 1
    *sent, decided = known_of(log)
    assert sent == list(known_of(twin)[:-1]) and decided != known_of(twin)[-1]
    mend_all(log, Copy(twin))
    assert known_of(log) == known_of(twin)


def test_damage_that_a_start_meets_in_a_closed_segment_is_known_and_repaired() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[2]
    log.close()
    for name in disk.names(log.directory):
        if name.endswith(".producers"):
            disk.unlink(log.directory / name)
    flip(disk, segment.path, 3 * (segment.size // BATCHES) + 150)
    log = open_copy(disk)
    last = 3 * PER_SEGMENT - RECORDS
    assert log.first_damage() == last
    assert mend(log, Copy(new_copy()), number=2) == Outcome(1, [])
    log.close(clean=False)
    log = open_copy(disk, 4)
    assert log.first_damage() is None
    [again] = log.append([numbered(last, RECORDS, 8, producer=(PRODUCER, 0, last))], 4)
    assert isinstance(again, Appended) and again.base_offset == last
