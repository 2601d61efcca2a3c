"""Staged data of one partition: what is taken, kept, dropped, and what it leaves on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from broker.replica.leadership import Pulse
from broker.replica.partition import Partition
from broker.staging import staging
from broker.staging.format import PartSpec, PreparedSet, scan_file
from broker.staging.part import write_of
from broker.storage.apply_progress import DONE_PROGRESS_KEPT_US, PROGRESS_KEPT_US, ApplyProgress
from broker.storage.dump import dump, verify
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import DiskFull, FileRefused, InvalidRequest, NotLeader, StagedOutOfOrder, StagedPartLost
from kafkalog.format.batch import Batch
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.zk.registry import PartitionState
from tests.broker.replica.partitions import append_part_of_a_batch, open_partition
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, read_all, topic
from tests.crash.memory_disk import MemoryDisk

PRODUCER = 1 << 62
BOTH = PartitionState(0, 1, (0, 1), (), {0: "here", 1: "there"})


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data", clock=ManualClock())
    yield opened
    opened.close()


def batch(number: int, *, batch_id: int = 0, part: int = 0, size: int = 20) -> Batch:
    value = b"%0*d" % (size, 100 * batch_id + number)
    return make_batch([value], producer=(PRODUCER, 0, number), transaction=(batch_id, part))


def write(partition: Partition, batch_id: int, batches: list[Batch], *, part: int = 0) -> PreparedSet:
    """Stage and prepare a part of its own."""
    uuid = b"%015d%d" % (batch_id, part)
    partition.staged.stage(uuid, batches)
    spec = PartSpec(uuid, part, len(batches), sum(len(data) for _, data in batches))
    prepared = PreparedSet("x", PRODUCER, batch_id, b"%016d" % batch_id, -1, (spec,))
    partition.staged.prepare(prepared)
    partition._staging.sync()
    return prepared


def apply(partition: Partition, prepared: PreparedSet) -> int:
    applied = partition.staged.apply("x", PRODUCER, prepared.batch_id, prepared.commit_uuid)
    partition.staged.finish_apply(applied)
    return applied.end_offset


def staged_files(partition: Partition) -> list[Path]:
    return sorted((partition.log.directory / staging.STAGING).glob("*.staged"))


def test_a_batch_sent_again_is_known_and_one_too_early_refused(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    first = batch(0)
    assert partition.staged.stage(b"u" * 16, [first]) == (1, len(first[1]), None)
    assert partition.staged.stage(b"u" * 16, [first, batch(1)])[0] == 2
    assert partition.staged.stage(b"u" * 16, [first])[0] == 2
    with pytest.raises(StagedOutOfOrder, match="part 0 for t-0 got batch 3, but 2 is next"):
        partition.staged.stage(b"u" * 16, [batch(3)])
    with pytest.raises(InvalidRequest, match="batches of another part"):
        partition.staged.stage(b"u" * 16, [batch(2, part=1)])


def test_a_prepared_part_gets_no_more_batches(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    with pytest.raises(InvalidRequest, match="is prepared"):
        partition.staged.stage(prepared.parts[0].uuid, [batch(1)])
    assert partition.staged.stage(prepared.parts[0].uuid, [batch(0)])[0] == 1


def test_a_set_prepared_again_keeps_the_newer_version_and_is_dropped_only_below_the_decision_s(
    directory: LogDirectory,
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    partition.staged.prepare(prepared._replace(version=4))
    size = partition.staged.size_bytes
    for version in (2, 4):
        partition.staged.prepare(prepared._replace(version=version))
    assert partition.staged.size_bytes == size
    assert not partition.staged.drop(prepared.commit_uuid, 4)
    directory.close(clean=False)
    directory = LogDirectory(directory.path, clock=ManualClock())
    partition = open_partition(directory)
    (found,) = partition.staged.all()
    assert found.prepared is not None and found.prepared.version == 4
    assert partition.staged.drop(prepared.commit_uuid, 5)
    assert partition.staged.all() == []
    directory.close()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loss_that_is_found_after_the_epoch_settles_nothing(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The replica may follow by then, and its sets are its leader's."""
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])

    apply_progress = partition.log.apply_progress

    def unknown(_: int) -> None:
        monkeypatch.setattr(partition.log, "apply_progress", apply_progress)
        partition.role.lead(PartitionState.only(0, "here", 1), [0])

    def lost(*_: Any, **__: Any) -> NoReturn:
        partition.role.lead(PartitionState.only(0, "here", 1), [0])
        raise partition._staging.lost(prepared, "damaged")

    settled: list[object] = []
    monkeypatch.setattr(partition._staging, "drop_others", lambda *which: settled.append(which))
    if is_known:
        monkeypatch.setattr(partition._staging, "check", lost)
    else:
        monkeypatch.setattr(partition.log, "apply_progress", unknown)
    with pytest.raises((NotLeader, StagedPartLost)):
        partition.staged.apply("x", PRODUCER, 0, prepared.commit_uuid if is_known else b"c" * 16)
    assert settled == []


def test_files_of_many_batches_do_not_stay(directory: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_FILE_BYTES", 20_000)
    monkeypatch.setattr(staging, "_WASTE_MAX", 10_000)
    partition = open_partition(directory)
    held = write(
        partition, 1000, [batch(0, batch_id=1000)]
    )  # undecided for long: it holds its own file, and that alone
    sizes = []
    for batch_id in range(60):
        prepared = write(partition, batch_id, [batch(number, batch_id=batch_id, size=1000) for number in range(3)])
        apply(partition, prepared)
        partition.staged.forget("x", batch_id, stays=True)
        sizes.append(partition.staged.size_bytes)
    assert max(sizes[30:]) <= max(sizes[:30]) <= 3 * 20_000
    assert [staged.prepared for staged in partition.staged.all()] == [held]
    partition.staged.drop(held.commit_uuid, 5)
    partition.staged.expire((), directory.services.clock.monotonic())
    assert len(staged_files(partition)) == 1  # it was written to just now
    partition.staged.expire((), directory.services.clock.monotonic() + 1)
    assert staged_files(partition) == []
    assert len(read_all(partition)) == 180


def test_a_file_that_tells_the_end_of_a_set_stays_as_long_as_the_file_of_that_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a start would take the set for prepared."""
    monkeypatch.setattr(staging, "_FILE_BYTES", 3000)
    monkeypatch.setattr(staging, "_WASTE_MAX", 1000)
    directory = LogDirectory(tmp_path / "data", clock=ManualClock())
    partition = open_partition(directory)
    held, dropped = (write(partition, batch_id, [batch(0, batch_id=batch_id)]) for batch_id in range(2))
    elsewhere = write(partition, 2, [batch(0, batch_id=2, size=2200)])
    for prepared in (dropped, elsewhere):
        assert partition.staged.drop(prepared.commit_uuid, 5)
    assert len(staged_files(partition)) == 2
    directory.close()
    directory = LogDirectory(tmp_path / "data", clock=ManualClock())
    partition = open_partition(directory)
    assert [each.prepared for each in partition.staged.all()] == [held]
    assert partition.staged.drop(held.commit_uuid, 5)
    partition.staged.expire((), directory.services.clock.monotonic() + 1)
    assert staged_files(partition) == []
    directory.close()


@contextlib.contextmanager
def full_disk(partition: Partition) -> Iterator[None]:
    """No room for another byte, for a while."""

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partition.log._disk, "write", write)
        yield


def reopened(directory: LogDirectory) -> tuple[LogDirectory, Partition]:
    directory.close(clean=False)
    directory = LogDirectory(directory.path, clock=ManualClock())
    return directory, open_partition(directory)


def test_a_set_prepared_again_after_a_drop_that_could_not_be_told_is_kept(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    other = prepared._replace(commit_uuid=b"o" * 16)  # another coordinator's: it keeps the parts
    partition.staged.prepare(other)
    with full_disk(partition):
        assert partition.staged.drop(prepared.commit_uuid, 5)
    partition.staged.prepare(prepared._replace(version=7))
    assert partition._staging.settle_drops()
    directory, partition = reopened(directory)
    assert {each.prepared for each in partition.staged.all()} == {other, prepared._replace(version=7)}
    directory.close()


def test_a_drop_that_is_reported_late_is_synced_and_stays_as_long_as_the_file_of_its_set(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_FILE_BYTES", 3000)
    monkeypatch.setattr(staging, "_WASTE_MAX", 1000)
    partition = open_partition(directory)
    held, dropped = (write(partition, batch_id, [batch(0, batch_id=batch_id)]) for batch_id in range(2))
    with full_disk(partition):
        assert partition.staged.drop(dropped.commit_uuid, 5)
        assert not partition._staging.settle_drops()
    gone = write(
        partition, 2, [batch(0, batch_id=2, size=2200)]
    )  # in a file of its own, with which the folder was synced
    assert partition._staging.settle_drops()
    assert partition.staged.unsynced_bytes == 0
    assert partition.staged.drop(gone.commit_uuid, 5)
    partition.staged.expire((), directory.services.clock.monotonic() + 1)
    directory, partition = reopened(directory)
    assert [each.prepared for each in partition.staged.all()] == [held]
    directory.close()


def test_an_apply_for_which_there_was_no_room_at_all_hides_nothing(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    with full_disk(partition), pytest.raises(DiskFull):
        apply(partition, prepared)
    partition.append_as_leader([numbered(7)])
    assert partition.readable_end_offset == partition.end_offset == 1
    assert apply(partition, prepared) == 2


def test_an_apply_for_which_there_was_no_room_amid_its_first_piece_hides_what_came_of_it(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0), batch(1)])
    append_decided = partition.log.append_decided

    def append_one(batches: list[Batch], leader_epoch: int) -> None:
        append_decided(batches[:1], leader_epoch)
        raise DiskFull(directory="/data")

    with monkeypatch.context() as full:
        full.setattr(partition.log, "append_decided", append_one)
        with pytest.raises(DiskFull):
            apply(partition, prepared)
    partition.append_as_leader([numbered(7)])
    assert (partition.readable_end_offset, partition.end_offset) == (0, 2)
    assert apply(partition, prepared) == 3
    assert len(read_all(partition)) == 3


@pytest.mark.parametrize("producer_id, batch_id", [(PRODUCER, 1), (PRODUCER + 1, 0)])
def test_an_apply_that_names_the_set_of_another_batch_is_refused(
    directory: LogDirectory, producer_id: int, batch_id: int
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    with pytest.raises(
        InvalidRequest, match=f"commit {prepared.commit_uuid.hex()} of t-0 is of batch 0, not {batch_id}"
    ):
        partition.staged.apply("x", producer_id, batch_id, prepared.commit_uuid)
    assert partition.end_offset == 0
    assert apply(partition, prepared) == 1


def test_others_append_between_the_pieces_and_readers_see_the_batch_as_a_whole(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    partition.append_as_leader([numbered(7)])
    seen: list[int] = []
    real = partition.log.append_decided

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        real(batches, leader_epoch)
        partition.append_as_leader([numbered(8)])
        seen.append(len(read_all(partition)))
        seen.append(partition.readable_end_offset)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    assert apply(partition, prepared) == partition.end_offset - 1
    assert seen == [1, 1] * 4
    assert len(read_all(partition)) == 1 + 4 + 4


def damage(path: Path, value: bytes) -> None:
    """Change the last byte of a value as it stands in a file, from behind the broker."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(data.index(value) + len(value) - 1)
        file.write(b"!")


def lost_by(partition: Partition, prepared: PreparedSet) -> str:
    """Why an apply of a set fails."""
    with pytest.raises(StagedPartLost) as lost:
        apply(partition, prepared)
    return str(lost.value)


def test_damage_of_a_later_part_is_found_before_the_first_append_and_hides_nothing(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    fine = write(partition, 1, [batch(0, batch_id=1)])
    damage(staged_files(partition)[0], b"%0600000d" % 3)
    assert "batch 3 of part 0: its checksum does not match" in lost_by(partition, prepared)
    assert partition.end_offset == 0
    partition.append_as_leader([numbered(7)])
    assert len(read_all(partition)) == 1
    assert [(staged.batch_id, staged.lost is None) for staged in partition.staged.all()] == [
        (0, False),
        (1, True),
    ]
    assert apply(partition, fine) == 2


def test_an_apply_that_comes_later_than_the_check_at_prepare_checks_again(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    directory = LogDirectory(tmp_path / "data", clock=clock)
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    partition.staged.keep_prepared(prepared.commit_uuid)
    damage(staged_files(partition)[0], b"%0600000d" % 3)
    clock.advance(11)
    assert "batch 3 of part 0: its checksum does not match" in lost_by(partition, prepared)
    assert partition.end_offset == 0
    directory.close()


def test_an_apply_right_after_the_check_at_prepare_does_not_check_again(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    partition.staged.keep_prepared(prepared.commit_uuid)
    checked_bytes = partition._staging.checked_bytes
    assert checked_bytes > 0
    apply(partition, prepared)
    assert partition._staging.checked_bytes == checked_bytes


def test_a_check_that_is_only_made_again_is_no_progress(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_CHECK_LASTS_SECONDS", 0.0)
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(3)])
    size = prepared.parts[0].length
    real, left = partition.log.append_decided, 0

    def until_full(batches: list[Batch], leader_epoch: int) -> None:
        nonlocal left
        if left == 0:
            raise DiskFull(directory="d", doing="appending")
        left -= 1
        real(batches, leader_epoch)

    monkeypatch.setattr(partition.log, "append_decided", until_full)

    def work_of(method: Callable[[], object]) -> int:
        before = partition.staged.work
        with contextlib.suppress(DiskFull):
            method()
        return partition.staged.work - before

    assert [work_of(lambda: partition.staged.keep_prepared(prepared.commit_uuid)) for _ in range(3)] == [
        size,
        0,
        0,
    ]
    assert [work_of(lambda: apply(partition, prepared)) for _ in range(3)] == [size, 0, 0]
    left = 1
    first = size // 3
    assert [work_of(lambda: apply(partition, prepared)) for _ in range(3)] == [first, size - first, 0]
    left = 2
    assert work_of(lambda: apply(partition, prepared)) == size - first
    assert partition.end_offset == 3


def test_a_set_that_is_dropped_while_it_is_checked_takes_nothing_out_of_service(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    real = directory.disk.read_into
    reads: list[int] = []

    def read_into(fd: int, buffer: memoryview, position: int) -> int:
        if not reads:
            assert partition.staged.drop(prepared.commit_uuid, 5)
            partition.staged.expire((), directory.services.clock.monotonic() + 1)
            assert staged_files(partition) == []
        reads.append(position)
        return real(fd, buffer, position)

    monkeypatch.setattr(directory.disk, "read_into", read_into)
    partition.staged.keep_prepared(prepared.commit_uuid)
    assert len(reads) == 1
    assert directory.failed is None


def test_damage_that_comes_amid_an_apply_hides_the_partition_neither_then_nor_after_a_restart(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory, topic(segment_bytes=1 << 24))
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    partition.append_as_leader([numbered(7)])
    real = partition.log.append_decided

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        real(batches, leader_epoch)
        partition.append_as_leader([numbered(8)])
        assert partition.readable_end_offset == 1
        if partition.end_offset == 3:
            damage(staged_files(partition)[0], b"%0600000d" % 3)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    assert "batch 3 of part 0" in lost_by(partition, prepared)
    assert partition.readable_end_offset == partition.end_offset > 3
    assert partition.end_offset == len(read_all(partition)) < 1 + 4 + 4
    assert "batch 3 of part 0" in lost_by(partition, prepared)  # asked for again
    partition.append_as_leader([numbered(9)])
    assert partition.readable_end_offset == partition.end_offset
    end_offset = partition.end_offset
    directory.close(clean=False)
    directory = LogDirectory(directory.path, clock=ManualClock())
    partition = open_partition(directory, topic(segment_bytes=1 << 24))
    assert partition.readable_end_offset == partition.end_offset == end_offset
    assert "part 0 has only 3 of its 4 batches" in lost_by(partition, prepared)
    assert partition.readable_end_offset == end_offset
    assert partition.staged.drop(prepared.commit_uuid, 5)  # as once the loss is accepted
    assert partition.readable_end_offset == end_offset
    directory.close()


def test_a_batch_is_shown_by_the_flush_that_reaches_its_end(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0), batch(1)])
    partition.staged.apply("x", PRODUCER, 0, prepared.commit_uuid)
    partition.append_as_leader([numbered(7)])
    assert partition.readable_end_offset == 0
    partition.log.flush()
    assert partition.readable_end_offset == partition.end_offset == 3
    assert not partition._applier._ends  # nothing is kept of the batches of a stream


def test_a_topic_deleted_between_two_pieces_of_an_apply_takes_nothing_else_along(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    other = directory.open_log(b"other topic's id", 0, "other-0", topic(), 0)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    real = partition.log.append_decided

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        real(batches, leader_epoch)
        directory.remove_log(TOPIC_ID, 0)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    with pytest.raises(NotLeader):
        apply(partition, prepared)
    assert directory.failed is None
    other.append([numbered(0)], other.last_epoch)
    assert len(read_all(other)) == 1


def test_an_apply_that_its_partition_s_end_meets_between_read_and_append_doubles_nothing(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log stays open, and its next partition applies the same set."""
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number) for number in range(3)])
    real, appending, may_append = partition.log.append_decided, threading.Event(), threading.Event()

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        appending.set()
        assert may_append.wait(30)
        real(batches, leader_epoch)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(apply, partition, prepared)
        assert appending.wait(30)
        closing = threads.submit(partition.close)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        monkeypatch.undo()
        may_append.set()
        closing.result(30)
        following = open_partition(directory)
        assert apply(following, prepared) == 3
        with contextlib.suppress(NotLeader):
            first.result(30)
    assert len(read_all(following)) == following.end_offset == 3
    following.close()


@pytest.mark.parametrize("what", ["prepare", "apply"])
def test_the_end_of_a_partition_waits_for_no_sync(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The thread that closes it opens all others. A sync took 4.9 s."""
    monkeypatch.setattr("broker.replica.applier._SYNC_BYTES", 1)
    partition = open_partition(directory)
    batches = [batch(number, size=600_000) for number in range(4)]
    prepared = write(partition, 0, batches)
    partition.log.begin_epoch(0)  # saves it: the first append would wait for that sync
    if what == "prepare":
        partition.staged.stage(b"u" * 16, [batch(0, batch_id=1)])
        partition._staging._names_made += 1  # as with a new file: the folder is synced after it
    real, syncing, may_go_on = directory.disk.sync, threading.Event(), threading.Event()

    def sync(fd: int) -> None:
        syncing.set()
        assert may_go_on.wait(30)
        real(fd)

    monkeypatch.setattr(directory.disk, "sync", sync)
    with ThreadPoolExecutor(1) as threads:
        steps = {
            "prepare": lambda: partition.staged.keep_prepared(prepared.commit_uuid),
            "apply": lambda: apply(partition, prepared),
        }
        step = threads.submit(steps[what])
        try:
            assert syncing.wait(30)
            closing = threading.Thread(target=partition.close, daemon=True)
            closing.start()
            closing.join(10)
            is_closed = not closing.is_alive()
            if is_closed and what == "prepare":  # a topic of that name is made anew
                directory.remove_log(TOPIC_ID, 0)
                directory.open_log(b"another topic's.", 0, "t-0", topic(), 0)
        finally:
            may_go_on.set()
        assert is_closed
        with pytest.raises(NotLeader):
            step.result(30)
    assert (directory.failed, directory._doubted) == (None, set())
    if what == "apply":
        following = open_partition(directory)
        assert apply(following, prepared) == 4
        assert len(read_all(following)) == following.end_offset == 4


def test_nothing_is_staged_any_more_once_the_directory_has_closed_the_log(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    shutil.rmtree(partition.log.directory)
    directory.tidy()
    for ask in (
        lambda: partition.staged.stage(b"u" * 16, [batch(0, batch_id=1)]),
        lambda: partition.staged.prepare(prepared),
        lambda: partition.staged.keep_prepared(prepared.commit_uuid),
        lambda: apply(partition, prepared),
    ):
        with pytest.raises(NotLeader):
            ask()
    assert directory.failed is None
    partition.close()


@pytest.mark.parametrize("damaged", ["the file's start", "the frame of the set", "the record of the set"])
def test_half_a_batch_whose_set_is_lost_is_not_taken_for_the_whole(directory: LogDirectory, damaged: str) -> None:
    partition = open_partition(directory)
    batches = [batch(number) for number in range(3)]
    prepared = write(partition, 0, batches)
    append_part_of_a_batch(partition, batches[:1])
    (file,) = staged_files(partition)
    directory.close(clean=False)
    data = bytearray(file.read_bytes())
    position = {"the file's start": 0, "the frame of the set": data.rindex(b"KLSF")}.get(damaged, len(data) - 40)
    data[position : position + 8] = bytes(8)
    file.write_bytes(data)
    with contextlib.closing(LogDirectory(directory.path, clock=ManualClock())) as again:
        partition = open_partition(again)
        with pytest.raises(StagedPartLost, match="only a part of the batch"):
            apply(partition, prepared)
        later = write(partition, 1, [batch(0, batch_id=1)])
        assert apply(partition, later) == 2
        assert partition.staged.drop(later.commit_uuid, 5)
        partition.close()


@pytest.mark.parametrize("lost", ["damaged", "removed", "removed, and staged to since"])
def test_half_a_batch_whose_set_was_lost_several_starts_ago_is_not_taken_for_the_whole(
    directory: LogDirectory, lost: str
) -> None:
    """Nothing is needed any more of the file that had the set, and it is gone."""
    partition = open_partition(directory)
    batches = [batch(number) for number in range(3)]
    prepared = write(partition, 0, batches)
    append_part_of_a_batch(partition, batches[:1])
    (file,) = staged_files(partition)
    if lost == "damaged":
        data = bytearray(file.read_bytes())
        for position in range(16, len(data), 8):
            data[position : position + 4] = bytes(4)  # no frame is left
        file.write_bytes(data)
    else:
        shutil.rmtree(file.parent)
    for _ in range(3):
        directory, partition = reopened(directory)
        assert staged_files(partition) == []
        if lost == "removed, and staged to since":
            partition.staged.abort([b"u" * 16] if partition.staged.stage(b"u" * 16, [batch(0, batch_id=7)]) else [])
            partition.staged.expire((), directory.services.clock.monotonic() + 1)
        with pytest.raises(StagedPartLost, match="only a part of the batch"):
            apply(partition, prepared)
        assert partition.readable_end_offset == 1
        partition.staged.forget_silent()
    later = write(partition, 1, [batch(0, batch_id=1)])
    assert apply(partition, later) == 2
    assert partition.staged.drop(later.commit_uuid, 5)
    apply(partition, later)
    partition.staged.forget_silent()
    directory, partition = reopened(directory)
    apply(partition, later)  # nothing is doubted any more
    directory.close()


@pytest.mark.parametrize("how", ["removed", "not to be written"])
def test_that_all_sets_are_known_can_not_be_noted_and_affects_nothing_else(
    directory: LogDirectory, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    apply(partition, write(partition, 0, [batch(0)]))
    directory.close(clean=False)
    (partition.log.directory / staging.STAGING / staging.COMPLETE).unlink()
    directory = LogDirectory(directory.path, clock=ManualClock())
    partition = open_partition(directory)
    apply(partition, write(partition, 1, [batch(0, batch_id=1)]))
    if how == "removed":
        shutil.rmtree(partition.log.directory / staging.STAGING)
    else:
        refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), staging.COMPLETE)
        monkeypatch.setattr(directory.services.disk, "create", Raises(refused))
    partition.staged.forget_silent()
    assert (directory.failed, partition._staging.may_lack_sets) == (None, True)
    partition.append_as_leader([numbered(1)])
    directory.close(clean=False)


class Raises:
    """A call that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *arguments: object, **named: object) -> NoReturn:
        raise self._error


def test_an_apply_whose_staged_files_are_removed_by_hand_is_refused_and_affects_nothing_else(
    directory: LogDirectory,
) -> None:
    partition = open_partition(directory)
    batches = [batch(number) for number in range(3)]
    prepared = write(partition, 0, batches)
    append_part_of_a_batch(partition, batches[:1])
    directory, partition = reopened(directory)
    assert partition.readable_end_offset == 0
    shutil.rmtree(partition.log.directory / staging.STAGING)
    for _ in range(2):
        with pytest.raises(StagedPartLost, match=r"00\.staged was removed"):
            apply(partition, prepared)
    assert partition.readable_end_offset == 1
    with pytest.raises(FileRefused, match="making a staged file for t-0: No such file or directory"):
        partition.staged.stage(b"u" * 16, [batch(0, batch_id=1)])
    partition.append_as_leader([numbered(1)])
    partition.log.flush()
    assert (partition.readable_end_offset, directory.failed) == (2, None)
    directory, partition = reopened(directory)
    with pytest.raises(StagedPartLost, match="only a part of the batch"):
        apply(partition, prepared)
    assert apply(partition, write(partition, 1, [batch(0, batch_id=1)])) == 3
    directory.close()


def test_a_hint_to_drop_a_set_does_not_wait_for_an_apply(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    dropped: list[bool] = []
    real = partition.log.append_decided

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        hint = threading.Thread(
            target=lambda: dropped.append(partition.staged.drop(prepared.commit_uuid, 5, wait=False))
        )
        hint.start()
        hint.join(30)
        real(batches, leader_epoch)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    assert apply(partition, prepared) == 1
    assert dropped == [False]
    partition.close()


def test_a_drop_waits_for_an_apply_that_stands_between_two_pieces(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    dropped: list[bool] = []
    dropper = threading.Thread(target=lambda: dropped.append(partition.staged.drop(prepared.commit_uuid, 5)))
    real = partition.log.append_decided

    def append_decided(batches: list[Batch], leader_epoch: int) -> None:
        real(batches, leader_epoch)
        if not dropper.ident:
            dropper.start()
            dropper.join(0.2)
            assert dropper.is_alive()

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    assert apply(partition, prepared) == 4
    dropper.join(30)
    assert dropped == [True]
    assert len(read_all(partition)) == 4
    assert partition.staged.all() == []


@pytest.mark.parametrize("begun", [False, True], ids=["before its first piece", "between two pieces"])
def test_a_new_leader_epoch_does_not_wait_for_an_apply_of_the_one_before(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """It reads, appends and syncs for as long as it likes, and the thread that gives roles follows ZooKeeper."""
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number, size=600_000) for number in range(4)])
    stands, goes_on = threading.Event(), threading.Event()
    check, append_decided = partition._staging.check, partition.log.append_decided

    def stand() -> None:
        stands.set()
        assert goes_on.wait(30)

    def slow_check(*given: Any, **how: Any) -> None:
        check(*given, **how)
        if not begun:
            stand()

    def slow_append(batches: list[Batch], leader_epoch: int) -> None:
        append_decided(batches, leader_epoch)
        stand()

    with monkeypatch.context() as patched, ThreadPoolExecutor() as threads:
        patched.setattr(partition._staging, "check", slow_check)
        patched.setattr(partition.log, "append_decided", slow_append)
        applied = threads.submit(apply, partition, prepared)
        assert stands.wait(30)
        led = threads.submit(partition.role.lead, PartitionState.only(0, "here", 1), [0])
        try:
            led.result(5)
            partition.append_as_leader([numbered(7)])
            assert partition.readable_end_offset == (0 if begun else 1)
        finally:
            goes_on.set()
        with pytest.raises(NotLeader):
            applied.result(30)
    assert partition.readable_end_offset == (0 if begun else 1), "half of a batch stays hidden"
    assert apply(partition, prepared) == 5
    assert (partition.role.epoch, partition.readable_end_offset) == (1, 5)


def test_an_apply_whose_epoch_ends_and_whose_records_are_cut_off_tells_that_nobody_leads_here(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    partition.role.lead(BOTH, [0, 1])
    prepared = write(partition, 0, [batch(number) for number in range(3)])
    append_decided = partition.log.append_decided

    def cut(batches: list[Batch], leader_epoch: int) -> None:
        append_decided(batches, leader_epoch)
        assert partition.end_offset == 3
        partition.role.follow(1, 2)
        partition.following.truncate(-1, 0, 0, 0, 2)

    with monkeypatch.context() as patched:
        patched.setattr(partition.log, "append_decided", cut)
        with pytest.raises(NotLeader):
            apply(partition, prepared)
    assert partition.end_offset == 0
    partition.role.lead(PartitionState.only(0, "here", 3), [0])
    assert apply(partition, prepared) == 3
    assert partition.readable_end_offset == 3


def test_an_applied_batch_is_acknowledged_once_the_in_sync_set_has_it_in_the_log(directory: LogDirectory) -> None:
    """That followers have the set is not enough: it is forgotten once the batch is acknowledged."""
    partition = open_partition(directory)
    partition.role.lead(BOTH, [0, 1])
    prepared = write(partition, 0, [batch(number) for number in range(3)])
    first, again = (partition.staged.apply("x", PRODUCER, 0, prepared.commit_uuid) for _ in range(2))
    acks = [partition.staged.ack_of_apply(each) for each in (first, again)]
    pulse = Pulse(directory.services.clock.monotonic(), 7, 0)
    for end_offset, last_epoch, is_kept in ((0, -1, False), (2, 1, False), (3, 1, True)):
        copies = partition._staging.copies()
        assert partition.role.fetched(1, "there", pulse, 1, end_offset, last_epoch, True, copies) is None
        assert [ack is None or ack.is_kept() for ack in acks] == [is_kept] * 2


def test_what_is_staged_is_renewed_by_a_new_leader_whose_tasks_may_have_talked_to_the_last_one(
    directory: LogDirectory,
) -> None:
    partition, clock = open_partition(directory), directory.services.clock
    partition.staged.stage(b"u" * 16, [batch(0)])
    staged_at = clock.monotonic()
    cast(ManualClock, clock).advance(100)
    partition.role.lead(PartitionState.only(0, "here", 1), [0])
    mine = [write_of(PRODUCER, 0)]
    assert partition.staged.expire(mine, before=staged_at + 100) == 0
    assert partition.staged.expire(mine, before=staged_at + 101) == 1


def test_a_release_leaves_a_half_applied_batch_its_set_and_hides_it_still(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0), batch(1)])
    append_part_of_a_batch(partition, [batch(0)])
    partition.append_as_leader([numbered(7)])
    partition.staged.forget("x", 0, stays=True)
    assert [staged.prepared for staged in partition.staged.all()] == [prepared]
    assert partition.readable_end_offset == 0
    assert apply(partition, prepared) == 3
    assert len(read_all(partition)) == 3


def test_half_of_a_batch_is_shown_once_the_set_that_it_came_from_is_dropped_whatever_others_prepared(
    directory: LogDirectory,
) -> None:
    partition = open_partition(directory)
    first = write(partition, 0, [batch(0), batch(1)])
    others = [batch(0, size=30), batch(1, size=30)]
    partition.staged.stage(b"o" * 16, others)
    spec = PartSpec(b"o" * 16, 0, 2, sum(len(data) for _, data in others))
    partition.staged.prepare(PreparedSet("x", PRODUCER, 0, b"d" * 16, -1, (spec,)))
    append_part_of_a_batch(partition, [batch(0)])
    assert partition.readable_end_offset == 0
    assert partition.staged.drop(first.commit_uuid, 5)
    assert partition.readable_end_offset == 1, "the rest of the other attempt's set does not follow on it"


def test_who_waits_for_an_apply_sees_that_its_syncs_go_on(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.replica.applier._SYNC_BYTES", 1)
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0), batch(1)])
    apply(partition, prepared)
    assert partition._applier.applied_bytes > partition.staged.prepared_bytes(prepared.commit_uuid) > 0


def test_a_release_of_a_batch_that_the_log_has_not_leaves_its_set(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    old, new = write(partition, 0, [batch(0)]), write(partition, 1, [batch(0, batch_id=1)])
    apply(partition, old)
    partition.staged.forget("x", 1, stays=True)
    assert new in [staged.prepared for staged in partition.staged.all()]
    assert apply(partition, new) == 2


def test_a_release_forgets_what_other_attempts_of_the_batch_staged(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    partition.staged.stage(b"an older attempt", [batch(0)])
    prepared = write(partition, 0, [batch(0)])
    partition.staged.stage(b"the next batch's", [batch(0, batch_id=1)])
    apply(partition, prepared)
    partition.staged.forget("x", 0, stays=True)
    assert [(staged.batch_id, staged.parts) for staged in partition.staged.all()] == [(1, 1)]


@pytest.mark.parametrize("late", [False, True], ids=["prepared before the apply", "prepared after it"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
def test_another_attempts_set_that_begins_alike_hides_nothing_that_was_readable(
    late: bool, dropped: bool, power_cut: bool
) -> None:
    disk, path = MemoryDisk(), Path("/data")
    partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    batches = [batch(number) for number in range(3)]
    length = sum(len(data) for _, data in batches)
    other = PreparedSet("x", PRODUCER, 0, b"o" * 16, -1, (PartSpec(b"o" * 16, 0, 3, length),))
    prepared = write(partition, 0, batches[:2])
    partition.staged.stage(b"o" * 16, batches)
    if late:
        apply(partition, prepared)
    partition.staged.prepare(other)
    partition.staged.keep_prepared(other.commit_uuid)
    apply(partition, prepared)
    if dropped:
        partition.staged.drop(prepared.commit_uuid, 5)
        partition._staging.sync()
    assert partition.readable_end_offset == 2
    disk = disk.after_power_cut(random.Random(0), 0.0) if power_cut else disk.after_kill()
    partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    assert partition.readable_end_offset == 2
    assert [each.prepared for each in partition.staged.all() if each.prepared] == ([] if dropped else [prepared])


def twins(partition: Partition, lengths: Sequence[int]) -> list[PreparedSet]:
    """Sets of one batch that begin alike, of so many record batches."""
    sets = []
    for number, length in enumerate(lengths):
        uuid = bytes([97 + number]) * 16
        batches = [batch(each) for each in range(length)]
        partition.staged.stage(uuid, batches)
        spec = PartSpec(uuid, 0, length, sum(len(data) for _, data in batches))
        sets.append(PreparedSet("x", PRODUCER, 0, uuid.upper(), -1, (spec,)))
        partition.staged.prepare(sets[-1])
        partition.staged.keep_prepared(sets[-1].commit_uuid)
    return sets


def test_a_twin_whose_drop_found_no_room_is_dropped_for_good_once_there_is_room(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    decided, _ = twins(partition, [2, 3])
    with monkeypatch.context() as full:
        full.setattr(partition._staging, "_write", Raises(DiskFull(directory="x")))
        apply(partition, decided)
    assert partition.readable_end_offset == 2
    partition.staged.forget_silent()
    directory, partition = reopened(directory)
    assert partition.readable_end_offset == 2
    directory.close()


def test_a_twin_that_can_not_be_dropped_because_its_file_was_removed_hides_nothing(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory)
    decided, _ = twins(partition, [2, 3])
    directory, partition = reopened(directory)  # no file is written to
    append = partition.log.append_decided

    def removing(batches: Any, leader_epoch: int) -> None:
        append(batches, leader_epoch)
        shutil.rmtree(partition.log.directory / staging.STAGING, ignore_errors=True)

    monkeypatch.setattr(partition.log, "append_decided", removing)
    assert apply(partition, decided) == 2
    assert (partition.readable_end_offset, directory.failed) == (2, None)
    directory.close(clean=False)


def test_a_twin_of_a_set_that_is_lost_without_a_trace_hides_nothing(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    decided, _ = twins(partition, [3, 3])
    append_part_of_a_batch(partition, [batch(0)])
    (file,) = staged_files(partition)
    directory.close(clean=False)
    data = bytearray(file.read_bytes())
    at = data.rindex(decided.commit_uuid)
    data[at : at + 4] = bytes(4)
    file.write_bytes(data)
    directory = LogDirectory(directory.path, clock=ManualClock())
    partition = open_partition(directory)
    assert partition.readable_end_offset == 0
    with pytest.raises(StagedPartLost):
        apply(partition, decided)
    partition.append_as_leader([numbered(1)])
    assert partition.readable_end_offset == partition.end_offset == 2
    directory, partition = reopened(directory)
    assert partition.readable_end_offset == partition.end_offset == 2, "the other set was dropped for good"
    directory.close(clean=False)


def test_a_twin_of_a_damaged_set_hides_nothing(directory: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.staging.part._PIECE_BYTES", 1)
    partition = open_partition(directory)
    decided, _ = twins(partition, [3, 3])
    append = partition.log.append_decided

    def damaging(batches: Any, leader_epoch: int) -> None:
        append(batches, leader_epoch)
        (file,) = staged_files(partition)
        data = bytearray(file.read_bytes())
        data[data.index(b"%020d" % 2) : data.index(b"%020d" % 2) + 4] = bytes(4)
        file.write_bytes(data)

    monkeypatch.setattr(partition.log, "append_decided", damaging)
    with pytest.raises(StagedPartLost):
        apply(partition, decided)
    assert partition.end_offset > 0
    assert partition.readable_end_offset == partition.end_offset
    directory.close(clean=False)


def test_an_older_batch_s_late_apply_does_not_show_half_of_a_newer_one(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    old, new = write(partition, 0, [batch(0)]), write(partition, 1, [batch(number, batch_id=1) for number in range(2)])
    apply(partition, old)
    append_part_of_a_batch(partition, [batch(0, batch_id=1)])
    assert apply(partition, old) == 0
    assert partition.readable_end_offset == 1
    assert apply(partition, new) == 3
    assert partition.readable_end_offset == 3


def test_marks_outlive_their_batches(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 3, [batch(number, batch_id=3) for number in range(2)])
    apply(partition, prepared)
    partition.append_as_leader([numbered(0)])
    partition.delete_before(partition.end_offset)
    directory.close(clean=False)
    directory = LogDirectory(directory.path, clock=ManualClock())
    partition = open_partition(directory)
    assert partition.start_offset == 3
    assert apply(partition, prepared) == 2
    assert partition.end_offset == 3
    directory.close()


def test_a_mark_is_forgotten_after_a_month_of_silence_unless_something_is_prepared() -> None:
    progress = ApplyProgress()
    header, _ = batch(0)
    progress.record(header, 0, 10)
    assert progress.forget_silent(10 + PROGRESS_KEPT_US, ()) == 0
    assert progress.forget_silent(11 + PROGRESS_KEPT_US, {PRODUCER}) == 0
    assert progress.forget_silent(11 + PROGRESS_KEPT_US, ()) == 1
    assert PROGRESS_KEPT_US >= 30 * 86_400 * 1_000_000


def test_a_mark_is_done_with_its_own_batch_only() -> None:
    progress = ApplyProgress()
    progress.record(batch(0, batch_id=5)[0], 0, 10)
    progress.done(PRODUCER, 4)  # it came late
    assert progress.forget_silent(11 + DONE_PROGRESS_KEPT_US, ()) == 0
    progress.done(PRODUCER, 5)
    progress.record(batch(0, batch_id=6)[0], 1, 10)  # there was another one after all
    assert progress.forget_silent(11 + DONE_PROGRESS_KEPT_US, ()) == 0
    progress.done(PRODUCER, 6)
    assert progress.forget_silent(11 + DONE_PROGRESS_KEPT_US, ()) == 1


def test_an_older_batch_that_stands_behind_a_newer_one_changes_no_mark() -> None:
    progress = ApplyProgress()
    progress.record(batch(0, batch_id=5)[0], 0, 1)
    progress.record(batch(1, batch_id=4)[0], 9, 2)
    kept = progress.get(PRODUCER)
    assert kept is not None and (kept.batch_id, kept.end_offset) == (5, 1)
    assert kept.has_all([(0, 1)]) and not kept.has_all([(0, 2)])


def test_values_that_look_like_frames_are_none(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    write(partition, 0, [batch(0)])
    (file,) = staged_files(partition)
    inner = file.read_bytes()
    partition.staged.stage(b"v" * 16, [make_batch([inner], producer=(PRODUCER, 0, 0), transaction=(1, 0))])
    partition.staged.stage(b"w" * 16, [batch(0, batch_id=1, part=3)])
    data = bytearray(file.read_bytes())
    position = data.index(inner[16:], len(inner))
    data[len(inner)] ^= 1  # the frame before the batch whose value holds frames of another file

    def read(at: int, length: int) -> bytes:
        return bytes(data[at : at + length])

    kinds = [(found.kind, found.uuid) for found in scan_file(read, len(data))]
    assert position
    assert kinds[-1] == (1, b"w" * 16)
    assert (1, b"v" * 16) not in kinds


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage().split()[0] for record in caplog.records if record.levelname == "ERROR"]
    caplog.clear()
    return found


def test_a_file_whose_beginning_is_damaged_is_reported_and_stays(
    directory: LogDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    partition = open_partition(directory)
    write(partition, 0, [batch(0)])
    [path] = staged_files(partition)
    directory.close(clean=False)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    torn = path.with_name(f"{1:020d}.staged")
    torn.write_bytes(b"KLSG")  # all that a kill left of a new file
    reopened = LogDirectory(directory.path, clock=ManualClock())
    with contextlib.closing(reopened):
        partition = open_partition(reopened)
        assert errors_logged(caplog) == ["staged_damage_found"]
        assert (staged_files(partition), path.read_bytes(), partition.staged.all()) == (
            [path],
            bytes(data),
            [],
        )
        apply(partition, write(partition, 1, [batch(0, batch_id=1)]))
        partition.staged.forget("x", 1, stays=True)
        assert path.read_bytes() == data


def test_a_set_that_a_power_cut_brings_back_without_its_parts_is_no_loss_until_somebody_needs_it(
    directory: LogDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_FILE_BYTES", 2000)
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(number) for number in range(40)])
    synced = {path: path.stat().st_size for path in staged_files(partition)}
    apply(partition, prepared)
    partition.staged.forget("x", 0, stays=True)
    [left] = staged_files(partition)
    directory.close(clean=False)
    with left.open("r+b") as file:
        file.truncate(synced[left])  # the end of the set was not synced; that the other files are gone is on the disk
    reopened = LogDirectory(directory.path, clock=ManualClock())
    with contextlib.closing(reopened):
        partition = open_partition(reopened)
        assert [staged.lost for staged in partition.staged.all()] == ["part 0 is not staged here"]
        assert errors_logged(caplog) == []
        for _ in range(2):
            with pytest.raises(StagedPartLost):
                partition._staging.check(prepared.commit_uuid)
        assert errors_logged(caplog) == ["staged_part_lost"]
        with pytest.raises(StagedPartLost):
            partition.staged.prepare(prepared)
        partition.staged.forget("x", 0, stays=True)
        assert partition.staged.all() == []


def test_a_log_is_dumped_and_verified_beside_what_is_staged(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    apply(partition, write(partition, 0, [batch(0)]))
    directory.close()
    assert not verify(directory.path).problems
    assert "offsets 0 to 0" in "\n".join(dump(partition.log.directory))


def test_a_file_of_which_nothing_is_needed_any_more_as_its_turn_to_be_synced_comes_is_left_out(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_FILE_BYTES", 3000)
    partition = open_partition(directory)
    for batch_id in range(3):
        partition.staged.stage(b"%016d" % batch_id, [batch(0, batch_id=batch_id, size=2200)])
    assert len(staged_files(partition)) == 3
    real: Callable[[int], None] = directory.disk.sync

    def sync(fd: int) -> None:
        partition.staged.abort([b"%016d" % 1])
        real(fd)

    monkeypatch.setattr(directory.disk, "sync", sync)
    partition._staging.sync()
    assert len(staged_files(partition)) == 2
    assert partition.staged.unsynced_bytes == 0
    assert directory.failed is None


def test_a_sync_runs_ahead_of_prepare(directory: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    real: Callable[[int], None] = directory.disk.sync
    monkeypatch.setattr(directory.disk, "sync", lambda fd: (real(fd), synced.set()))
    partition = open_partition(directory)
    directory.start()
    for number in range(9):
        partition.staged.stage(b"u" * 16, [batch(number, size=1 << 20)])
    assert synced.wait(30)
    directory.close()


def test_a_sync_is_asked_for_once_until_it_is_made_and_then_again(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = open_partition(directory)._staging
    asked: list[object] = []
    monkeypatch.setattr(directory.services.flusher, "soon", asked.append)
    for count in (1, 2):
        staged.request_sync()
        staged.request_sync()
        assert len(asked) == count
        staged.sync()


def test_marks_of_writes_that_are_done_for_good_are_forgotten_and_a_streams_stays(directory: LogDirectory) -> None:
    clock = directory.services.clock
    assert isinstance(clock, ManualClock)
    partition = open_partition(directory)

    def applied(name: str) -> PreparedSet:
        """A batch of a transaction, whose producer id is that of its name."""
        producer, uuid = producer_id_of(name), name.encode().ljust(16)
        data = make_batch([b"v"], producer=(producer, 0, 0), transaction=(0, 0))
        partition.staged.stage(uuid, [data])
        one = PreparedSet(name, producer, 0, uuid, -1, (PartSpec(uuid, 0, 1, len(data[1])),))
        partition.staged.prepare(one)
        partition.staged.finish_apply(partition.staged.apply(name, producer, 0, uuid))
        return one

    stream = applied("stream").producer_id
    partition.staged.forget("stream", 0, stays=True)
    prepared = applied("one-off")
    one_off = prepared.producer_id
    clock.advance(7200)
    partition.staged.forget_silent()
    assert partition.log.apply_progress(one_off) is not None  # its set is here, and an apply may come again
    assert partition.staged.apply("one-off", one_off, 0, prepared.commit_uuid).batches == 0
    partition.staged.forget("one-off", 0, stays=False)
    partition.staged.forget_silent()
    assert partition.log.apply_progress(one_off) is None
    assert partition.log.apply_progress(stream) is not None
    # What comes late all the same appends nothing.
    with pytest.raises(StagedPartLost):
        partition.staged.apply("one-off", one_off, 0, prepared.commit_uuid)
    with pytest.raises(StagedPartLost):
        partition.staged.prepare(prepared)
    assert len(read_all(partition)) == 2


@pytest.mark.parametrize("is_held", [True, False])
def test_a_follower_forgets_the_progress_of_transactions_too(directory: LogDirectory, is_held: bool) -> None:
    """Each batch write has a transaction of its own: a replica that never leads kept all of them."""
    clock = directory.services.clock
    assert isinstance(clock, ManualClock)
    partition = open_partition(directory)
    apply(partition, write(partition, 0, [batch(0)]))
    partition.staged.forget("x", 0, stays=True)
    if is_held:
        write(partition, 1, [batch(0, batch_id=1)])
    partition.role.follow(1, 7)
    partition.staged.forget_silent()
    assert partition.log.apply_progress(PRODUCER) is not None
    clock.advance(PROGRESS_KEPT_US // 1_000_000 + 1)
    partition.staged.forget_silent()
    assert (partition.log.apply_progress(PRODUCER) is not None) is is_held, "a set of its transaction is here"


def test_a_late_apply_of_a_write_that_was_done_just_now_succeeds(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    apply(partition, prepared)
    partition.staged.forget("x", 0, stays=False)
    partition.log.transaction_done(PRODUCER, 0)
    partition.staged.forget_silent()
    assert apply(partition, prepared) == 1
    assert len(read_all(partition)) == 1


def test_a_removal_just_before_a_kill_is_made_last_before_marks_are_forgotten_for_it() -> None:
    disk, path = MemoryDisk(), Path("/data")
    partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    prepared = write(partition, 0, [batch(0)])
    assert partition.staged.drop(prepared.commit_uuid, 5)
    partition.staged.expire((), 1 << 40)
    disk = disk.after_kill()
    assert disk.names(partition.log.directory / staging.STAGING) == [staging.COMPLETE]
    partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    assert partition._staging.settle_drops()
    partition = open_partition(
        LogDirectory(path, disk=disk.after_power_cut(random.Random(0), 0.0), clock=ManualClock())
    )
    assert partition.staged.all() == []


@pytest.mark.parametrize("killed", [False, True], ids=["in one life", "with a kill between"])
def test_a_power_cut_that_keeps_the_end_of_a_set_removed_keeps_the_set_removed(
    monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Of two removals it may keep the later one alone."""
    monkeypatch.setattr(staging, "_FILE_BYTES", 3000)
    monkeypatch.setattr(staging, "_WASTE_MAX", 1000)
    disk, path = MemoryDisk(), Path("/data")
    partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    held, dropped = (write(partition, batch_id, [batch(0, batch_id=batch_id)]) for batch_id in range(2))
    elsewhere = write(partition, 2, [batch(0, batch_id=2, size=2200)])  # in a second file, as the ends that follow
    folder = partition.log.directory / staging.STAGING

    def files() -> list[str]:
        return [name for name in disk.names(folder) if name != staging.COMPLETE]

    assert len(files()) == 2
    assert partition.staged.drop(dropped.commit_uuid, 5)
    assert partition._staging.settle_drops()
    assert len(files()) == 2
    assert partition.staged.drop(held.commit_uuid, 5)  # removes the first file
    assert len(files()) == 1
    if killed:
        disk = disk.after_kill()
        partition = open_partition(LogDirectory(path, disk=disk, clock=ManualClock()))
    assert partition.staged.drop(elsewhere.commit_uuid, 5)
    partition.staged.expire((), 1 << 40)
    assert files() == []
    for seed in range(20):
        cut = disk.after_power_cut(random.Random(seed), 0.5)
        partition = open_partition(LogDirectory(path, disk=cut, clock=ManualClock()))
        assert {each.prepared for each in partition.staged.all()} <= {held, elsewhere}


def test_of_too_many_marks_the_oldest_go_but_not_where_something_is_prepared(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = directory.services.clock
    assert isinstance(clock, ManualClock)
    monkeypatch.setattr("broker.storage.apply_progress.PROGRESS_MAX", 3)
    partition = open_partition(directory)
    prepared = write(partition, 0, [batch(0)])
    apply(partition, prepared)
    for number in range(6):
        clock.advance(1)
        partition.log.append_decided(
            [make_batch([b"v"], producer=(number, 0, 0), transaction=(0, 0))], partition.log.last_epoch
        )
    partition.staged.forget_silent()
    assert [partition.log.apply_progress(number) is not None for number in range(6)] == [False] * 4 + [True] * 2
    assert partition.log.apply_progress(PRODUCER) is not None
