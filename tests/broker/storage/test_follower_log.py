from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.storage.apply_progress import Progress
from broker.storage.epochs import EPOCHS_NAME, read_epochs
from broker.storage.loader import record_reset
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    CorruptBatch,
    DiskFull,
    FencedLeaderEpoch,
    OffsetOutOfRange,
    OutOfOrderSequence,
    StorageFailed,
)
from kafkalog.format.batch import Batch, stamp
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, read_all, topic
from tests.broker.storage.replicas import bytes_of, catch_up, fetch
from tests.broker.storage.test_log import CountingDisk


class Replica:
    """A log in a directory of its own."""

    def __init__(self, path: Path, leader_epoch: int | None, clock: ManualClock, **settings: object) -> None:
        self.disk = CountingDisk()
        self._path, self._clock, self._settings = path, clock, topic(**settings)
        self._open(leader_epoch)

    def _open(self, leader_epoch: int | None) -> None:
        self.directory = LogDirectory(self._path, disk=self.disk, clock=self._clock)
        self.log = self.directory.open_log(TOPIC_ID, 0, "t-0", self._settings, leader_epoch)

    def restart(self, clean: bool = False) -> Log:
        self.directory.close(clean)
        self._open(None)
        return self.log


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def leader(tmp_path: Path, clock: ManualClock) -> Iterator[Log]:
    replica = Replica(tmp_path / "leader", 0, clock, segment_bytes=9000)
    yield replica.log
    replica.directory.close()


@pytest.fixture
def follower(tmp_path: Path, clock: ManualClock) -> Iterator[Replica]:
    replica = Replica(tmp_path / "follower", None, clock, segment_bytes=4096)
    yield replica
    replica.directory.close()


def fill(log: Log, count: int) -> None:
    for offset in range(log.end_offset, log.end_offset + count):
        log.append([numbered(offset)], log.last_epoch)


def stamped(batch: Batch, offset: int, epoch: int) -> bytes:
    _, data = batch
    stamp(data, offset, epoch, 77)
    return bytes(data)


def test_follower_has_the_leaders_bytes_and_epochs_in_segments_of_its_own(leader: Log, follower: Replica) -> None:
    for epoch in (1, 2, 4):
        fill(leader, 25)
        leader.begin_epoch(epoch)
    leader.begin_epoch(5)
    fill(leader, 3)
    log = follower.log
    catch_up(log, leader, 5)
    for _ in range(2):
        assert bytes_of(log) == bytes_of(leader)
        assert read_all(log) == read_all(leader)
        assert log._epochs.entries == [(0, 0), (1, 25), (2, 50), (5, 75)]
        assert log.last_epoch == 5
        log = follower.restart()
    log.flush()
    assert len(log.view.bases) > len(leader.view.bases)
    assert max(path.stat().st_size for path in log.directory.glob("*.log")) <= 4096


@pytest.mark.parametrize("ahead", [0, 86_400])
def test_a_followers_segments_are_old_by_the_leaders_clock(
    tmp_path: Path, leader: Log, clock: ManualClock, ahead: int
) -> None:
    """By its own, which may be wrong, or is later where old records are copied, each fetch began a segment."""
    at_follower = ManualClock(clock.now_us() + ahead * 1_000_000)
    replica = Replica(tmp_path / "other", None, at_follower, segment_ms=3_600_000)
    for count in (5, 3, 3):
        for _ in range(count):
            fill(leader, 1)
            fetch(replica.log, leader, 0)
        clock.advance(3_600)
        at_follower.advance(86_400)
    assert replica.log.view.bases == (0, 5, 8)
    replica.directory.close()


def test_a_fetch_is_one_write(leader: Log, follower: Replica) -> None:
    fill(leader, 6)
    fetch(follower.log, leader, 0)
    fill(leader, 5)
    writes = follower.disk.writes
    assert fetch(follower.log, leader, 0) == 11
    assert follower.disk.writes == writes + 1


def test_epoch_is_on_disk_before_its_first_copied_batch(leader: Log, follower: Replica) -> None:
    log = follower.log
    sizes: list[tuple[int, object]] = []
    real = follower.disk.write

    def write(fd: int, buffers: object, position: int) -> int:
        epochs = read_epochs(follower.disk, log.directory)
        sizes.append((position, epochs and epochs.last))
        return real(fd, buffers, position)

    fill(leader, 1)
    leader.begin_epoch(3)
    fill(leader, 1)
    follower.disk.write = write  # type: ignore[method-assign]
    fetch(log, leader, 3)
    length = log.view.size_bytes // 2
    assert sizes == [(0, None), (0, 0), (0, 0), (length, 3)]  # file, batch, file, batch


def test_cut_last_batch_is_ignored(leader: Log, follower: Replica) -> None:
    fill(leader, 3)
    data = bytes_of(leader)
    length = len(data) // 3
    assert follower.log.append_stamped(memoryview(data)[: length - 1], 0) == 0
    assert follower.log.append_stamped(memoryview(data)[: 2 * length + 50], 0) == 2
    assert follower.log.append_stamped(memoryview(data)[2 * length :], 0) == 3
    assert bytes_of(follower.log) == data


@pytest.mark.parametrize("at", [5, 60])
def test_damaged_batch_is_refused_and_those_before_it_are_taken(leader: Log, follower: Replica, at: int) -> None:
    fill(leader, 3)
    data = bytearray(bytes_of(leader))
    length = len(data) // 3
    data[2 * length + at] ^= 1
    log = follower.log
    assert log.append_stamped(memoryview(data), 0) == 2
    with pytest.raises(CorruptBatch):
        log.append_stamped(memoryview(data)[2 * length :], 0)
    assert log.end_offset == 2
    assert fetch(log, leader, 0) == 3


@pytest.mark.parametrize(
    ("offset", "epoch", "reason"),
    [
        (3, 2, "at 2: the leader's batch there begins at 3"),
        (1, 2, "at 2: the leader's batch there begins at 1"),
        (2, 1, "its leader epoch 1 is not between 2 and the leader's, 3"),
        (2, 4, "its leader epoch 4 is not between 2 and the leader's, 3"),
    ],
)
def test_batch_that_does_not_continue_the_log_is_refused(
    follower: Replica, offset: int, epoch: int, reason: str
) -> None:
    log = follower.log
    first = stamped(numbered(0), 0, 0) + stamped(numbered(1), 1, 2)
    wrong = stamped(numbered(9), offset, epoch)
    assert log.append_stamped(memoryview(first + wrong), 3) == 2
    with pytest.raises(CorruptBatch, match=reason):
        log.append_stamped(memoryview(wrong), 3)
    assert log.append_stamped(memoryview(stamped(numbered(2), 2, 3)), 3) == 3
    assert log._epochs.entries == [(0, 0), (2, 1), (3, 2)]


def test_who_follows_takes_nothing_from_an_older_leader_nor_as_one(leader: Log, follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(2)
    fill(log, 1)
    data = memoryview(stamped(numbered(1), 1, 2))
    for epoch in (1, 2):  # in 2 it leads itself
        with pytest.raises(FencedLeaderEpoch):
            log.append_stamped(data, epoch)
    fill(log, 1)
    log.follow_epoch(3)
    with pytest.raises(FencedLeaderEpoch, match="leader epoch 2 of t-0 is not the current one, 3"):
        log.append([numbered(2)], 2)
    with pytest.raises(FencedLeaderEpoch):
        log.append_stamped(data, 2)
    with pytest.raises(FencedLeaderEpoch):
        log.follow_epoch(2)
    with pytest.raises(FencedLeaderEpoch):
        log.begin_epoch(2)
    assert log.append_stamped(memoryview(stamped(numbered(2), 2, 3)), 3) == 3
    log.begin_epoch(4)
    fill(log, 1)
    assert log._epochs.entries == [(2, 0), (3, 2), (4, 3)]


def test_follower_that_becomes_leader_recognises_what_was_sent_to_its_leader(
    leader: Log, follower: Replica, clock: ManualClock
) -> None:
    sent = [numbered(number, 2, producer=(7, 0, 2 * number)) for number in range(3)]
    outcomes = leader.append(sent, 0)
    leader.append_decided([make_batch([b"x"], producer=(8, 0, number), transaction=(4, 1)) for number in (0, 2)], 0)
    clock.advance(5)
    catch_up(follower.log, leader, 0)
    log = follower.log
    for _ in range(2):
        log.begin_epoch(log.last_epoch + 1)
        again = log.append([numbered(2, 2, producer=(7, 0, 4))], log.last_epoch)
        assert again == outcomes[2:] and isinstance(again[0], Appended)
        [gap] = log.append([numbered(2, 2, producer=(7, 0, 8))], log.last_epoch)
        assert isinstance(gap, OutOfOrderSequence)
        progress, theirs = log.apply_progress(8), leader.apply_progress(8)
        assert progress is not None and theirs is not None
        assert [progress.has(1, number) for number in range(4)] == [True, False, True, False]
        assert facts(progress) == facts(theirs)
        log = follower.restart()


def facts(progress: Progress) -> tuple[object, ...]:
    return progress.batch_id, progress.start_offset, progress.end_offset, progress.last_append_us, progress.first


def test_times_of_a_copy_are_the_leaders(leader: Log, follower: Replica, clock: ManualClock) -> None:
    leader.append([numbered(0, timestamps_us=500)], 0)
    appended_us = clock.now_us()
    clock.advance(100)
    catch_up(follower.log, leader, 0)
    [segment] = follower.log.view.segments
    assert (segment.first_append_us, segment.last_append_us) == (appended_us, appended_us)
    assert follower.log.reader.offset_for_timestamp(400) == (0, 500)


def test_full_disk_refuses_a_copy_and_continues_when_there_is_room(
    leader: Log, follower: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(leader, 2)
    leader.begin_epoch(1)
    fill(leader, 2)
    log, real = follower.log, follower.disk.write

    def full(fd: int, buffers: object, position: int) -> int:
        if read_epochs(follower.disk, log.directory) is not None and position:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, position)

    with monkeypatch.context() as patched:
        patched.setattr(follower.disk, "write", full)
        with pytest.raises(DiskFull):
            fetch(log, leader, 1)
    assert (log.end_offset, log.last_epoch) == (2, 1)
    catch_up(log, leader, 1)
    assert bytes_of(log) == bytes_of(leader)
    assert (log.directory / EPOCHS_NAME).exists()


def test_follower_that_was_ahead_is_cut_where_the_epochs_diverge(leader: Log, follower: Replica) -> None:
    fill(leader, 10)
    catch_up(follower.log, leader, 0)
    follower.log.begin_epoch(1)  # it leads, and nobody copies what it appends
    fill(follower.log, 5)
    follower.log.begin_epoch(2)
    leader.begin_epoch(3)
    fill(leader, 2)
    catch_up(follower.log, leader, 3)
    assert bytes_of(follower.log) == bytes_of(leader)
    assert follower.log._epochs.entries == [(0, 0), (3, 10)]


# --- reset -----------------------------------------------------------------------------------------------------------


def test_reset_begins_anew_and_empty_with_nothing_of_before(leader: Log, follower: Replica) -> None:
    fill(leader, 60)
    log = follower.log
    catch_up(log, leader, 0)
    log.checkpoint()
    log.begin_epoch(1)
    log.append([numbered(60, producer=(7, 0, 0))], 1)
    log.append_decided([make_batch([b"x"], producer=(8, 0, 0), transaction=(4, 1))], 1)
    held = log.reader.read(0, 500)
    log.reset_to(100)
    with pytest.raises(FencedLeaderEpoch):
        log.append([numbered(100)], 1)
    for _ in range(2):
        assert (log.start_offset, log.end_offset, log.flushed_offset, log.view.size_bytes) == (100, 100, 100, 0)
        assert (log.last_epoch, log.epoch_end(5), log.apply_progress(8)) == (-1, (-1, 100), None)
        assert sorted(path.name for path in log.directory.iterdir()) == [f"{100:020d}.log", "checkpoint"]
        log = follower.restart()
    with pytest.raises(OffsetOutOfRange):
        log.reader.read(0, 1)
    with held:
        assert len(held.read()) == held.length
    log.begin_epoch(3)
    [appended] = log.append([numbered(100, producer=(7, 0, 0))], 3)
    assert isinstance(appended, Appended) and appended.base_offset == 100
    assert list(read_all(follower.restart())) == [100]


@pytest.mark.parametrize("offset", [0, 30])
def test_reset_to_an_offset_at_which_a_segment_began(leader: Log, follower: Replica, offset: int) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 30)
    log.flush()
    log.append([numbered(30, size=4000)], 0)
    assert 30 in log.view.bases
    log.delete_before(1)
    log.reset_to(offset)
    log.begin_epoch(1)
    fill(log, 2)
    log.checkpoint()
    assert list(read_all(follower.restart(clean=True))) == [offset, offset + 1]


def test_follower_that_ends_before_the_leaders_start_begins_there(leader: Log, follower: Replica) -> None:
    fill(leader, 10)
    catch_up(follower.log, leader, 0)
    fill(leader, 50)
    leader.begin_epoch(2)
    fill(leader, 30)
    leader.delete_before(70)
    catch_up(follower.log, leader, 2)
    assert bytes_of(follower.log) == bytes_of(leader)
    assert follower.log._epochs.entries == leader._epochs.entries == [(2, 70)]


def with_producers(leader: Log, *, deleted_to: int) -> list[Batch]:
    """Fill a leader's log with batches of producers, and ten of a transaction in between; returns the producers'."""
    sent = [numbered(number, producer=(7 + number % 3, 0, number // 3)) for number in range(60)]
    leader.append(sent[:30], 0)
    for number in range(10):
        leader.append_decided([make_batch([b"x"], producer=(99, 0, number), transaction=(4, 1))], 0)
    leader.append(sent[30:], 0)
    leader.delete_before(deleted_to)
    return sent


@pytest.mark.parametrize("deleted_to", [20, 35, 65, 70])
def test_follower_that_begins_anew_knows_the_producers_of_the_records_before_it(
    leader: Log, follower: Replica, deleted_to: int
) -> None:
    sent = with_producers(leader, deleted_to=deleted_to)
    log = follower.log
    log.reset_to(deleted_to)
    assert log.lacks_producers
    log = follower.restart()
    assert log.lacks_producers
    assert log.take_producers(leader.producers_before(deleted_to))
    assert not log.lacks_producers
    log = follower.restart()
    assert not log.lacks_producers
    catch_up(log, leader, 0)
    for _ in range(2):
        progress, theirs = log.apply_progress(99), leader.apply_progress(99)
        assert progress is not None and theirs is not None
        assert progress.encode(99) == theirs.encode(99)
        log.begin_epoch(log.last_epoch + 1)
        again = log.append(sent, log.last_epoch)
        assert [each.base_offset for each in again if isinstance(each, Appended)] == [*range(30), *range(40, 70)]
        assert log.end_offset == 70
        log = follower.restart()


def test_follower_that_begins_anew_knows_nothing_of_records_that_it_does_not_have(
    leader: Log, follower: Replica
) -> None:
    """After a failover they may be lost, and are sent and applied again."""
    sent = with_producers(leader, deleted_to=35)
    log = follower.log
    log.reset_to(35)
    catch_up(log, leader, 0)
    log.truncate_to(38)
    log.begin_epoch(1)
    progress = log.apply_progress(99)
    assert progress is not None
    assert [progress.has(1, number) for number in range(10)] == [True] * 8 + [False] * 2
    again = log.append(sent, 1)
    assert [each.base_offset for each in again if isinstance(each, Appended)] == [*range(30), *range(38, 68)]


def test_a_copy_of_a_log_whose_start_is_amid_a_batch_begins_with_that_batch(leader: Log, follower: Replica) -> None:
    assert leader.reader.copy_offset() == 0
    for number in range(4):
        leader.append_decided([make_batch([b"x"] * 3, producer=(99, 0, number), transaction=(4, 1))], 0)
    assert [_copy_offset_after(leader, offset) for offset in (3, 7, 8)] == [3, 6, 6]
    log = follower.log
    log.reset_to(6)
    assert log.take_producers(leader.producers_before(6))
    progress = log.apply_progress(99)
    assert progress is not None and [progress.has(1, number) for number in range(4)] == [True, True, False, False]
    for offset, for_copy in ((6, False), (5, True), (7, False)):
        with pytest.raises(OffsetOutOfRange):
            leader.reader.read(offset, 1, for_copy=for_copy)
    with leader.reader.read(6, 1 << 20, for_copy=True) as found:
        assert log.append_stamped(memoryview(found.read()), 0) == 12
    log.delete_before(8)
    log = follower.restart()
    progress, theirs = log.apply_progress(99), leader.apply_progress(99)
    assert progress is not None and theirs is not None and progress.encode(99) == theirs.encode(99)
    assert read_all(log) == read_all(leader)
    assert _copy_offset_after(leader, 12) == 12


def _copy_offset_after(log: Log, deleted_to: int) -> int:
    log.delete_before(deleted_to)
    return log.reader.copy_offset()


def test_follower_takes_no_state_that_is_damaged_or_not_of_its_end_or_amid_its_log(
    leader: Log, follower: Replica
) -> None:
    with_producers(leader, deleted_to=20)
    log = follower.log
    log.reset_to(20)
    data = leader.producers_before(20)
    assert not log.take_producers(data[:-1])
    assert not log.take_producers(leader.producers_before(21))
    assert log.lacks_producers
    fetch(log, leader, 0, 1)
    assert not log.lacks_producers and not log.take_producers(leader.producers_before(log.end_offset))
    log.truncate_to(20)
    assert log.lacks_producers and log.take_producers(data)


def test_follower_that_is_cut_at_its_start_asks_for_the_state_again_if_it_was_replaced_by_later_ones(
    leader: Log, follower: Replica
) -> None:
    """It is cut below its high watermark, as after an unclean election."""
    with_producers(leader, deleted_to=20)
    log = follower.log
    log.high_watermark = 0
    log.reset_to(20)
    data = leader.producers_before(20)
    assert log.take_producers(data)
    for _ in range(4):
        for _ in range(10):
            fetch(log, leader, 0, 1)
        log.high_watermark = log.end_offset
        log.checkpoint()
    assert states(log)[0] > 20
    assert log.truncate_to(20) == 20
    assert log.lacks_producers
    assert log.take_producers(data)
    assert not log.lacks_producers


def test_follower_without_room_for_the_state_of_the_producers_asks_again(
    leader: Log, follower: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_producers(leader, deleted_to=20)
    log = follower.log
    log.reset_to(20)

    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(follower.disk, "create", full)
        with pytest.raises(DiskFull):
            log.take_producers(leader.producers_before(20))
    assert log.lacks_producers and len(log._producers) == 0
    catch_up(log, leader, 0)
    assert len(log._producers) == 3


def test_deletion_on_a_follower_keeps_the_state_that_it_got_until_a_later_one_is_saved(
    leader: Log, follower: Replica
) -> None:
    sent = with_producers(leader, deleted_to=20)
    log = follower.log
    log.high_watermark = 0
    log.reset_to(20)
    catch_up(log, leader, 0)
    log.high_watermark = 45
    log.delete_before(40)
    assert states(log)[0] == 20
    assert log.truncate_to(45) == 45
    log.begin_epoch(1)
    [again] = log.append(sent[:1], 1)
    assert isinstance(again, Appended) and again.base_offset == 0


@contextmanager
def refusing(disk: CountingDisk, code: int, *steps: str) -> Iterator[None]:
    """Let steps of a disk that take a path fail."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    with pytest.MonkeyPatch.context() as patched:
        for step in steps:
            patched.setattr(disk, step, refuse)
        yield


NEED_DESCRIPTORS = "create", "open", "names", "sync_dir"


@pytest.mark.parametrize(("code", "steps"), [(errno.ENOSPC, ("create",)), (errno.EMFILE, NEED_DESCRIPTORS)])
def test_reset_without_room_or_descriptor_for_its_record_deletes_nothing(
    leader: Log, follower: Replica, code: int, steps: tuple[str, ...]
) -> None:
    fill(leader, 3)
    catch_up(follower.log, leader, 0)
    with refusing(follower.disk, code, *steps), pytest.raises(DiskFull):
        follower.log.reset_to(9)
    assert list(read_all(follower.log)) == [0, 1, 2]
    follower.log.reset_to(9)
    assert follower.restart().start_offset == 9


def test_log_of_which_a_reset_left_only_its_record_is_not_lost(follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 3)
    record_reset(follower.disk, log.directory, 50)
    for path in log.directory.glob("*.log"):
        path.unlink()
    assert follower.directory.has_log(TOPIC_ID, 0)
    assert follower.restart().end_offset == 50
    record_reset(follower.disk, log.directory, 60)
    (log.directory / "reset").write_bytes(b"junk")
    assert follower.restart().end_offset == 0


def test_segments_that_were_to_be_unlinked_take_no_file_of_the_new_log_along(
    follower: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 30)
    log.flush()
    log.append([numbered(30, size=4000)], 0)
    unlinks: list[Callable[[], bool]] = []
    monkeypatch.setattr(follower.directory.services.unlinker, "soon", lambda name, step: unlinks.append(step))
    log.delete_before(31)
    log.reset_to(30)
    for step in unlinks:
        while step():
            pass
    log.begin_epoch(1)
    fill(log, 1)
    assert list(read_all(follower.restart())) == [30]


@pytest.mark.parametrize("looked_up", [True, False])
def test_reset_that_may_be_recorded_takes_the_directory_out_of_service(follower: Replica, looked_up: bool) -> None:
    """A start would delete what is appended after it."""
    log = follower.log
    log.begin_epoch(0)
    fill(log, 3)
    failing = ("sync_dir",) if looked_up else ("create", "exists")
    with refusing(follower.disk, errno.EIO, *failing), pytest.raises(StorageFailed):
        log.reset_to(9)
    with pytest.raises(StorageFailed):
        fill(log, 1)
    assert follower.restart().end_offset == (9 if looked_up else 3)


# --- high watermark --------------------------------------------------------------------------------------------------


def test_high_watermark_of_a_single_copy_is_its_end_and_of_others_what_was_set(follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 5)
    assert (log.high_watermark, log.has_high_watermark) == (5, False)
    log.high_watermark = 3
    fill(log, 5)
    assert (log.high_watermark, log.has_high_watermark) == (3, True)
    log.high_watermark = 99
    fill(log, 1)
    assert log.high_watermark == 10
    log.truncate_to(8)
    assert log.high_watermark == 8
    log.reset_to(50)
    assert log.high_watermark == 50


def states(log: Log) -> list[int]:
    """Offsets of the saved states of the producers."""
    return sorted(int(path.name[:20]) for path in log.directory.glob("*.producers"))


def test_truncation_to_the_high_watermark_forgets_no_producer_of_segments_that_are_gone(follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(0)
    [first] = log.append([numbered(0, producer=(7, 0, 0))], 0)
    for count in (40, 30):
        fill(log, count)
        log.checkpoint()
    log.high_watermark = 75  # beyond the second state
    assert states(log)[-1] == 71
    log.delete_before(70)
    assert log.view.bases[0] > 0, "no segment has the producer's batch"
    for _ in range(3):
        fill(log, 10)
        log.checkpoint()
    assert states(log)[0] == 71 and len(states(log)) == 3
    assert log.truncate_to(75) == 75
    log.begin_epoch(1)
    assert log.append([numbered(0, producer=(7, 0, 0))], 1) == [first]
    log = follower.restart()
    log.begin_epoch(2)
    assert log.append([numbered(0, producer=(7, 0, 0))], 2) == [first]


def test_deletion_keeps_the_segments_from_the_state_of_the_high_watermark_on(follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 5)
    log.checkpoint()
    [first] = log.append([numbered(0, producer=(7, 0, 0))], 0)
    log.high_watermark = 60  # no state from here to 60 is saved
    fill(log, 114)
    log.checkpoint()
    assert len(states(log)) == 3 and states(log)[:2] == [5, 112]
    log.delete_before(58)
    assert (log.start_offset, log.view.bases[0]) == (58, 0)
    assert log.truncate_to(60) == 60
    log.begin_epoch(1)
    assert log.append([numbered(0, producer=(7, 0, 0))], 1) == [first]
    log.high_watermark = 60
    log.checkpoint()
    assert states(log) == [5, 60]
    log.apply_retention()
    assert log.view.bases[0] > 0
    assert log.start_offset > 0 and list(read_all(log)) == [58, 59]


def test_retention_deletes_nothing_after_the_high_watermark(follower: Replica) -> None:
    log = follower.log
    log.begin_epoch(0)
    fill(log, 60)
    log.update_settings(topic(retention_bytes=0))
    log.high_watermark = 0
    assert log.apply_retention() == 0
    second = log.view.bases[1]
    log.high_watermark = second - 1
    assert log.apply_retention() == 0
    log.high_watermark = second
    assert log.apply_retention() == 1
    assert log.start_offset == second
