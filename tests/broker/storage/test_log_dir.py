from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from broker.replica.partition import Partition
from broker.storage.checkpoint import seal
from broker.storage.disk import Disk
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory, folder_name
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    Closed,
    ClusterMismatch,
    DataDirInUse,
    DiskFull,
    FileRefused,
    InvalidSetting,
    NotLeader,
    OutOfFiles,
    StorageFailed,
)
from tests.broker.replica.partitions import open_partition
from tests.broker.replica.test_staged_writes import PRODUCER, write
from tests.broker.replica.test_staged_writes import batch as staged_batch
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, read_all, topic
from tests.crash.memory_disk import MemoryDisk
from tests.threads import NoThreads
from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 60


def test_directory_is_one_process_alone(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    attempt = (
        "import sys; from broker.storage.log_dir import LogDirectory; from kafkalog.errors import DataDirInUse\n"
        "try: LogDirectory(sys.argv[1])\n"
        "except DataDirInUse as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", attempt, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert told.strip() == f"data directory {tmp_path} is in use by another process ({os.getpid()})"
    with pytest.raises(DataDirInUse):
        LogDirectory(tmp_path)  # nor twice in one process
    directory.close()
    LogDirectory(tmp_path).close()


@pytest.mark.parametrize("name", ["file", "file/logs"])
def test_a_log_dir_that_is_a_file_is_a_wrong_setting_and_no_failed_disk(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("somebody's")
    with pytest.raises(InvalidSetting, match=rf"^log\.dir='{tmp_path / name}' is not valid: it is not a directory"):
        LogDirectory(tmp_path / name)
    assert (tmp_path / "file").read_text() == "somebody's"


def test_directory_belongs_to_one_broker_of_one_cluster(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    assert (directory.cluster_id, directory.broker_id) == (None, None)
    directory.check_owner("blue", 2)
    directory.claim("red", 1)
    named = directory.directory_id
    directory.claim("red", 1)
    directory.close()
    directory = LogDirectory(tmp_path)
    assert (directory.cluster_id, directory.broker_id, directory.directory_id) == ("red", 1, named)
    cluster_setting = "zookeeper.connect (its addresses and its chroot)"
    for other, differs in {
        ("blue", 1): f"cluster red, not to cluster blue: correct {cluster_setting}",
        ("red", 2): "broker 1, not to broker 2: correct broker.id",
        (
            "blue",
            2,
        ): "broker 1 of cluster red, not to broker 2 of cluster blue: correct broker.id and zookeeper.connect",
    }.items():
        for call in (directory.check_owner, directory.claim):
            with pytest.raises(ClusterMismatch, match=re.escape(f"belongs to {differs}")) as refused:
                call(*other)
            assert str(refused.value).endswith(", or give another log.dir")
    with pytest.raises(ClusterMismatch, match=re.escape(f"red, not to a new cluster: correct {cluster_setting}, or ")):
        directory.check_owner(None, 1)
    directory.close()


def test_damaged_meta_is_reported_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "meta").write_bytes(b"nonsense")
    with pytest.raises(StorageFailed, match=r"meta is damaged"):
        LogDirectory(tmp_path)
    assert (tmp_path / "meta").read_bytes() == b"nonsense"
    (tmp_path / "meta").unlink()
    LogDirectory(tmp_path).close()  # the lock was given up


def test_directories_differ_by_their_ids_and_a_lock_by_its_file(tmp_path: Path) -> None:
    one, other = LogDirectory(tmp_path / "one"), LogDirectory(tmp_path / "other")
    one.claim("red", 1)
    other.claim("red", 1)
    assert one.directory_id != other.directory_id
    assert one.lock_id != other.lock_id
    held, named = one.lock_id, one.directory_id
    one.close()
    (tmp_path / "one").rename(tmp_path / "moved")
    moved = LogDirectory(tmp_path / "moved")
    assert (moved.lock_id, moved.directory_id) == (held, named)
    moved.close()
    other.close()


def test_a_directorys_name_outlives_a_power_cut_before_anything_relies_on_its_id(tmp_path: Path) -> None:
    class RecordingDisk(Disk):
        synced: ClassVar[list[Path]] = []

        def sync_dir(self, path: Path) -> None:
            super().sync_dir(path)
            self.synced.append(path)

    directory = LogDirectory(tmp_path / "a" / "b", disk=RecordingDisk())
    directory.claim("red", 1)
    directory.close()
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} == set(RecordingDisk.synced)


def test_logs_without_meta_are_claimed_by_nobody(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    directory.claim("red", 1)
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    directory.close()
    (tmp_path / "meta").unlink()
    directory = LogDirectory(tmp_path)
    with pytest.raises(StorageFailed, match=r"it holds logs, but .*/meta, which names their broker, is missing"):
        directory.claim("red", 1)
    directory.close()
    assert not (tmp_path / "meta").exists()


def test_a_log_is_a_folder_with_a_segment(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    assert not directory.has_log(TOPIC_ID, 0)
    directory.make_folders(TOPIC_ID, [0])
    assert not directory.has_log(TOPIC_ID, 0)
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    assert directory.has_log(TOPIC_ID, 0)
    assert not directory.has_log(TOPIC_ID, 1)
    directory.close()


def test_log_made_in_the_place_of_another_begins_where_it_is_told_and_keeps_the_other_aside(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    folder = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).directory
    (folder / "note").write_text("kept")
    for start_offset in (70, 5):
        directory.replace_log(TOPIC_ID, 0, "t-0", start_offset)
        log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 3)
        assert (log.start_offset, log.end_offset, log.last_epoch) == (start_offset, start_offset, 3)
        log.append([numbered(start_offset)], log.last_epoch)
        directory.close()
        directory = LogDirectory(tmp_path)
        assert read_all(directory.open_log(TOPIC_ID, 0, "t-0", topic(), 3)) == {start_offset: b"%020d" % start_offset}
    assert (tmp_path / f"{folder.name}.set-aside-1" / "note").read_text() == "kept"
    assert (tmp_path / f"{folder.name}.set-aside-2").is_dir()
    assert directory.existing() == [(TOPIC_ID, 0)]
    directory.close()


def test_log_that_could_not_be_made_for_lack_of_space_is_made_at_the_next_try(tmp_path: Path) -> None:
    class FullDisk(Disk):
        room = 0

        def create(self, path: Path) -> int:
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return super().create(path)

    disk = FullDisk()
    directory = LogDirectory(tmp_path, disk=disk)
    for disk.room in (0, 1):
        with pytest.raises(DiskFull):
            directory.replace_log(TOPIC_ID, 0, "t-0", 70)
        assert not directory.has_log(TOPIC_ID, 0)
    disk.room = 100
    directory.replace_log(TOPIC_ID, 0, "t-0", 70)
    assert directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).end_offset == 70
    directory.close()


def test_clean_stop_is_known_and_an_unclean_one_too(tmp_path: Path) -> None:
    for stopped_clean in (True, False, True, True):
        directory = LogDirectory(tmp_path)
        directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).append([numbered(0)], 0)
        directory.close(clean=stopped_clean)
        directory = LogDirectory(tmp_path)
        assert directory.was_clean is stopped_clean
        directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
        directory.close()


def test_log_that_nobody_opened_since_an_unclean_stop_keeps_it_unclean(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    for partition in (0, 1):
        directory.open_log(TOPIC_ID, partition, f"t-{partition}", topic(), 0)
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    directory.close()
    assert not LogDirectory(tmp_path).was_clean


def test_logs_are_found_again_and_removed_for_good(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    other = bytes(16)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    assert directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0) is log
    log.append([numbered(0)], log.last_epoch)
    directory.open_log(other, 12, "u-12", topic(), 0)
    (tmp_path / "something-else").mkdir()
    assert directory.existing() == [(other, 12), (TOPIC_ID, 0)]
    held = log.reader.read(0, 100)
    directory.remove_log(TOPIC_ID, 0)
    directory.remove_log(TOPIC_ID, 0)
    assert held.length and len(held.read()) == held.length
    held.close()
    with pytest.raises(Closed):
        log.append([numbered(1)], log.last_epoch)
    assert directory.existing() == [(other, 12)]
    assert directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).end_offset == 0
    directory.close()


class SlowUnlinks(Disk):
    """Every unlink of a segment waits for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.began = threading.Event()

    def unlink(self, path: Path) -> None:
        if path.suffix == ".log":
            self.began.set()
            assert self.turns.acquire(timeout=2 * WAIT_SECONDS), "nobody let it go on"
        super().unlink(path)


def a_large_log_being_deleted(path: Path, disk: SlowUnlinks) -> LogDirectory:
    directory = LogDirectory(path, disk=disk)
    directory.start()
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=4096), 0)
    for _ in range(5):
        log.append([make_batch([os.urandom(5000)])], log.last_epoch)
        log.flush()
    assert len(list((path / folder_name(TOPIC_ID, 0)).glob("*.log*"))) >= 5
    directory.remove_log(TOPIC_ID, 0)
    assert disk.began.wait(WAIT_SECONDS)
    return directory


def test_other_logs_are_opened_tidied_and_listed_while_a_large_one_is_unlinked(tmp_path: Path) -> None:
    disk = SlowUnlinks()
    directory = a_large_log_being_deleted(tmp_path, disk)
    assert directory.existing() == []
    other = directory.open_log(bytes(16), 1, "u-1", topic(), 0)
    assert directory.logs() == [other]
    directory.tidy()
    directory.remove_log(TOPIC_ID, 0)  # again: it is gone
    assert len(list(tmp_path.glob("*.deleted"))) == 1
    disk.turns.release(100)
    waited_for(lambda: not list(tmp_path.glob("*.deleted")))
    directory.close()


def test_a_stop_waits_for_one_unlink_of_a_large_log_and_the_next_start_does_the_rest(tmp_path: Path) -> None:
    disk = SlowUnlinks()
    directory = a_large_log_being_deleted(tmp_path, disk)
    closing = threading.Thread(target=directory.close)
    closing.start()
    waited_for(lambda: directory._stopping)
    closing.join(0.1)  # the time to end too early: what must not happen sends no event
    assert closing.is_alive()  # else the next broker would be unlinking the same files
    disk.turns.release()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    [left] = tmp_path.glob("*.deleted")
    assert list(left.iterdir())
    disk.began.clear()
    directory = LogDirectory(tmp_path, disk=disk)  # waits for no unlink
    assert directory.was_clean
    directory.start()
    assert disk.began.wait(WAIT_SECONDS)
    disk.turns.release(100)
    waited_for(lambda: not list(tmp_path.glob("*.deleted")))
    directory.close()


def segment_names(log: Log) -> list[str]:
    return sorted(path.name for path in log.directory.glob("*.log"))


def cut_off(log: Log, disk: SlowUnlinks) -> None:
    """Every record deleted; the unlink of the first segment goes on."""
    assert len(segment_names(log)) >= 5
    log.delete_before(log.end_offset)
    assert disk.began.wait(WAIT_SECONDS)


def a_log_of_segments(directory: LogDirectory) -> Log:
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=4096), 0)
    for _ in range(5):
        log.append([make_batch([os.urandom(5000)])], log.last_epoch)
        log.flush()
    return log


def test_while_segments_are_unlinked_their_log_can_be_deleted_and_others_are_tidied(tmp_path: Path) -> None:
    disk = SlowUnlinks()
    directory = LogDirectory(tmp_path, disk=disk)
    directory.start()
    log = a_log_of_segments(directory)
    cut_off(log, disk)
    other = directory.open_log(bytes(16), 1, "u-1", topic(), 0)
    tidied = threading.Thread(target=lambda: (other.apply_retention(), other.checkpoint()))
    tidied.start()
    tidied.join(WAIT_SECONDS)
    assert not tidied.is_alive()
    deleting = threading.Thread(target=directory.remove_log, args=(TOPIC_ID, 0))
    deleting.start()
    disk.turns.release()
    deleting.join(WAIT_SECONDS)
    assert not deleting.is_alive(), "it waits for more than the unlink that is going on"
    again = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)  # names its first segment as that did
    disk.turns.release(100)
    waited_for(lambda: not list(tmp_path.glob("*.deleted")))
    assert segment_names(again) == [f"{0:020d}.log"]
    directory.close()


def test_a_stop_amid_the_deletion_of_segments_waits_for_one_and_the_next_opening_does_the_rest(tmp_path: Path) -> None:
    disk = SlowUnlinks()
    directory = LogDirectory(tmp_path, disk=disk)
    directory.start()
    log = a_log_of_segments(directory)
    end = log.end_offset
    cut_off(log, disk)
    closing = threading.Thread(target=directory.close)
    closing.start()
    waited_for(lambda: directory._stopping)
    disk.turns.release()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    left = segment_names(log)
    assert len(left) >= 4
    disk.began.clear()
    directory = LogDirectory(tmp_path, disk=disk)
    directory.start()
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    assert (log.view.start_offset, log.end_offset) == (end, end)
    assert disk.began.wait(WAIT_SECONDS)
    disk.turns.release(100)
    waited_for(lambda: len(segment_names(log)) == 1)
    log.append([make_batch([b"x"])], log.last_epoch)
    assert log.end_offset == end + 1
    directory.close()


def test_what_is_not_a_brokers_is_left_alone(tmp_path: Path) -> None:
    for name in ("thesis.tmp", "draft.new", "x-0.deleted"):
        (tmp_path / name).write_text("mine")
    for name in ("site.new", "old.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("mine")
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    directory = LogDirectory(tmp_path)
    directory.start()
    directory.close()
    assert before <= {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}


def test_an_unlink_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.storage.unlinker._RETRY_SECONDS", 0.01)
    refused = threading.Event()

    class Refusing(Disk):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".log" and not refused.is_set():
                refused.set()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().unlink(path)

    directory = LogDirectory(tmp_path, disk=Refusing())
    directory.start()
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    directory.remove_log(TOPIC_ID, 0)
    assert refused.wait(WAIT_SECONDS)
    waited_for(lambda: not list(tmp_path.glob("*.deleted")))
    assert directory.failed is None
    directory.close()


@pytest.mark.parametrize("at_start", [True, False], ids=["at a start", "as it runs"])
def test_a_segment_that_may_not_be_unlinked_keeps_nothing_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    monkeypatch.setattr("broker.storage.unlinker._RETRY_SECONDS", 0.01)

    class Immutable(Disk):
        """As `chattr +i` makes a file."""

        name = f"{0:020d}.log"
        refused = 0

        def unlink(self, path: Path) -> None:
            if path.name == self.name:
                self.refused += 1
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            super().unlink(path)

    disk = Immutable()
    directory = LogDirectory(tmp_path, disk=disk)
    if not at_start:
        directory.start()
    log = a_log_of_segments(directory)
    kept = (log.directory / disk.name).read_bytes()
    cut_to = log.view.segments[2].base_offset
    if at_start:
        disk.name = "none"
        log.delete_before(cut_to)
        directory.close()
        disk.name = f"{0:020d}.log"
        (log.directory / disk.name).write_bytes(kept)  # as a stop before the unlink leaves it
        directory = LogDirectory(tmp_path, disk=disk)
        directory.start()
        log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    else:
        log.delete_before(cut_to)
    waited_for(lambda: disk.refused >= 3 or directory.failed is not None)
    other = directory.open_log(TOPIC_ID, 1, "t-1", topic(), 0)
    for each in (log, other):
        each.append([numbered(0)], each.last_epoch)
        each.flush()
    assert log.start_offset == cut_to
    log.delete_before(log.view.segments[-1].base_offset)
    log.delete_before(log.end_offset)
    assert directory.services.unlinker._removals.qsize() <= 1, "it is asked for once more with each deletion"
    disk.name = "none"
    waited_for(lambda: segment_names(log) == [log.view.segments[-1].path.name])
    assert directory.failed is None
    directory.close()


def test_folders_of_many_logs_are_synced_together_and_again_if_that_failed(tmp_path: Path) -> None:
    class CountingDisk(Disk):
        synced = 0
        fails = False

        def sync_dir(self, path: Path) -> None:
            self.synced += path == tmp_path
            if self.fails:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            super().sync_dir(path)

    disk = CountingDisk()
    directory = LogDirectory(tmp_path, disk=disk)
    disk.fails = True
    with pytest.raises(OutOfFiles):
        directory.make_folders(TOPIC_ID, range(3))
    disk.fails, disk.synced = False, 0
    directory.make_folders(TOPIC_ID, range(3))  # they are there, but not for good
    for partition in range(3):
        directory.open_log(TOPIC_ID, partition, f"t-{partition}", topic(), 0)
    assert disk.synced == 1
    directory.close()


@pytest.mark.parametrize("doing", ["making folders", "replacing the log", "deleting the log"])
def test_failed_sync_of_a_folder_ends_the_directory(tmp_path: Path, doing: str) -> None:
    class FailsOnce(Disk):
        fails = 0

        def sync_dir(self, path: Path) -> None:
            if self.fails:
                self.fails -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_dir(path)

    disk = FailsOnce()
    directory = LogDirectory(tmp_path, disk=disk)
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    disk.fails = 1
    actions = {
        "making folders": lambda: directory.make_folders(TOPIC_ID, [1]),
        "replacing the log": lambda: directory.replace_log(TOPIC_ID, 1, "t-1", 7),
        "deleting the log": lambda: directory.remove_log(TOPIC_ID, 0),
    }
    for _ in range(2):
        with pytest.raises(StorageFailed, match=f"is out of service: {doing} for .*: Input/output error"):
            actions[doing]()
    assert directory.failed is not None
    directory.close()
    assert not (tmp_path / "clean").exists()


def test_what_stands_in_the_place_of_one_log_concerns_no_other(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    in_its_way = tmp_path / folder_name(TOPIC_ID, 0)
    in_its_way.write_text("not a folder")
    with pytest.raises(FileRefused, match=rf"cannot use a file of .*: opening the log for t-0: .*: {in_its_way}"):
        directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    assert directory.failed is None
    directory.open_log(TOPIC_ID, 1, "t-1", topic(), 0).append([numbered(0)], 0)
    in_its_way.unlink()
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).append([numbered(0)], 0)
    directory.close()
    assert LogDirectory(tmp_path).was_clean


def test_files_that_a_stop_left_half_written_are_removed(tmp_path: Path) -> None:
    LogDirectory(tmp_path).close()
    for name in ("meta.tmp", "clean.tmp"):
        (tmp_path / name).write_bytes(b"half")
    directory = LogDirectory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    directory.close()


def test_deletion_that_a_stop_interrupted_is_finished(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    folder = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).directory
    directory.close()
    folder.rename(folder.with_name(folder.name + ".deleted"))
    folder.with_name(folder.name + ".new").mkdir()
    directory = LogDirectory(tmp_path)
    assert directory.existing() == []
    directory.start()
    waited_for(lambda: [path.name for path in tmp_path.iterdir()] == ["lock"])
    directory.close()


def test_background_rolls_deletes_saves_and_forgets(tmp_path: Path) -> None:
    clock = ManualClock()
    directory = LogDirectory(tmp_path, clock=clock, check_interval_ms=5, producer_expiration_ms=1000)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_ms=1000, retention_ms=5000), 0)
    log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch)
    directory.start()
    rolled = threading.Event()
    log.on_flushed = lambda: rolled.set() if log.flushed_offset == 1 else None
    clock.advance(2)
    assert rolled.wait(WAIT_SECONDS)
    clock.advance(5)
    gone = log.directory / f"{0:020d}.log"
    while gone.exists():
        threading.Event().wait(0.005)
    directory.close()
    assert read_all(LogDirectory(tmp_path).open_log(TOPIC_ID, 0, "t-0", topic(), 0)) == {}


def test_close_ends_every_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    directory = LogDirectory(tmp_path)
    directory.start()
    assert len(set(threading.enumerate()) - before) > 1
    directory.close()
    directory.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(Closed):
        directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)


def test_failure_is_told_where_no_thread_can_be_started_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    told, woken = threading.Event(), threading.Event()
    directory.on_failed = lambda error: told.set()
    directory.start()
    log.on_flushed = woken.set
    machine = NoThreads(monkeypatch, lambda name: name.startswith("log-"))
    directory.services.health.fail(StorageFailed(directory=str(tmp_path), reason="the disk is gone"))
    assert machine.refused == ["log-failed"]
    assert told.wait(WAIT_SECONDS)
    assert woken.wait(WAIT_SECONDS)
    directory.close()


def test_failure_is_reported_once_and_wakes_waiters(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    told: list[StorageFailed] = []
    woken = threading.Event()
    directory.on_failed = told.append
    log.on_flushed = woken.set
    first = StorageFailed(directory=str(tmp_path), reason="the disk is gone")
    directory.services.health.fail(first)
    directory.services.health.fail(StorageFailed(directory=str(tmp_path), reason="again"))
    assert woken.wait(WAIT_SECONDS)
    assert told == [first]
    with pytest.raises(StorageFailed, match="the disk is gone"):
        log.append([numbered(0)], log.last_epoch)
    directory.close()
    assert not LogDirectory(tmp_path).was_clean


# --- what somebody removes while it is open --------------------------------------------------------------------------


def emptied(directory: Path, kept: Path) -> None:
    shutil.copytree(directory, kept)
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def moved(directory: Path, kept: Path) -> None:
    directory.rename(kept)


def replaced(directory: Path, kept: Path) -> None:
    directory.rename(kept)
    shutil.copytree(kept, directory)


@pytest.mark.parametrize("deed", [emptied, moved, replaced])
def test_a_directory_that_is_gone_or_another_is_out_of_service(
    tmp_path: Path, deed: Callable[[Path, Path], None]
) -> None:
    directory = LogDirectory(tmp_path / "data")
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    log.append([numbered(0)], log.last_epoch)
    lost: list[object] = []
    directory.on_lost = lambda *key: lost.append(key)
    directory.tidy()
    assert directory.failed is None
    deed(tmp_path / "data", tmp_path / "kept")
    directory.tidy()
    assert "is no longer the file that this broker has locked" in str(directory.failed)
    assert not lost
    directory.close()
    assert not (tmp_path / "data" / "clean").exists()


def test_a_log_that_is_replaced_while_it_is_looked_for_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    lost: list[object] = []
    directory.on_lost = lambda *key: lost.append(key)

    def replaced_meanwhile() -> bool:
        directory.replace_log(TOPIC_ID, 0, "t-0", 7)
        noted.append(directory.note_if_missing(TOPIC_ID, 0))
        directory.trust_log(TOPIC_ID, 0)
        directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
        return True

    noted: list[bool] = []
    monkeypatch.setattr(log, "is_gone", replaced_meanwhile)
    directory.tidy()
    assert noted == [True]
    assert not lost
    assert not directory.note_if_missing(TOPIC_ID, 0)
    [appended] = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0).append([numbered(0)], 0)
    assert isinstance(appended, Appended) and appended.base_offset == 7
    directory.close()
    assert LogDirectory(tmp_path).was_clean


def test_a_segment_that_gets_its_name_while_it_is_looked_for_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=4096), 0)
    log.append([numbered(0, size=5000)], log.last_epoch)
    log.append([numbered(1, size=5000)], log.last_epoch)
    stands_at, looked = directory.disk.stands_at, list[str]()

    def named_meanwhile(fd: int, path: Path) -> bool:
        if not looked:
            log.flush()
        looked.append(path.suffix)
        return stands_at(fd, path)

    monkeypatch.setattr(directory.disk, "stands_at", named_meanwhile)
    assert not log.is_gone()
    assert looked == [".next", ".log"]
    directory.close()


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_file_that_is_missing_ends_its_log_or_the_directory_if_that_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    directory = LogDirectory(tmp_path)
    log, other = (directory.open_log(TOPIC_ID, number, f"t-{number}", topic(), 0) for number in (0, 1))
    log.append([numbered(0)], log.last_epoch)
    told = threading.Event()
    directory.on_failed = lambda error: told.set()
    directory.on_lost = lambda *key: told.set()

    def missing(path: Path) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    if is_removed:
        shutil.rmtree(log.directory)
    else:
        monkeypatch.setattr(directory.disk, "create", missing)
    with pytest.raises(Closed, match="log of t-0"):
        log.checkpoint()
    assert told.wait(WAIT_SECONDS)
    if is_removed:
        assert directory.failed is None
        assert directory.note_if_missing(TOPIC_ID, 0)
        other.append([numbered(0)], other.last_epoch)
        other.checkpoint()
    else:
        assert "No such file or directory" in str(directory.failed)
    directory.close()


def rolled(partition: Partition) -> None:
    """Another segment was begun, and gets its name at the next flush."""
    for number in range(2):
        partition.log.append([numbered(number, size=5000)], partition.log.last_epoch)


def prepared(partition: Partition) -> None:
    """A batch is staged and prepared."""
    write(partition, 0, [staged_batch(0)])


def apply(partition: Partition) -> None:
    partition.staged.apply("x", PRODUCER, 0, b"%016d" % 0)
    partition.log.checkpoint()


def stage_more(partition: Partition) -> None:
    partition.staged.stage(b"u" * 16, [staged_batch(0, batch_id=1)])
    partition.staged.abort([b"u" * 16])
    partition.staged.drop(b"%016d" % 0, 5)
    partition.staged.expire((), partition._staging._now() + 1)  # removes the file
    prepared(partition)


@pytest.mark.parametrize("topic_id", [bytes(range(1, 17)), TOPIC_ID], ids=["another topic", "moved away and back"])
def test_a_late_error_of_a_deleted_log_is_no_fault_of_the_one_in_its_place(tmp_path: Path, topic_id: bytes) -> None:
    """Its files are in place, so the disk was blamed."""
    directory = LogDirectory(tmp_path)
    old = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    directory.remove_log(TOPIC_ID, 0)
    new = directory.open_log(topic_id, 0, "t-0", topic(), 0)
    with pytest.raises(Closed):  # as of a thread that was amid a repair
        old._errors.refuse(FileNotFoundError(errno.ENOENT, "missing", str(old.directory)), "reading a segment")
    waited_for(lambda: not directory._doubted)
    assert directory.failed is None
    new.append([numbered(0)], new.last_epoch)
    directory.close()


@pytest.mark.parametrize(
    ("before", "step"),
    [
        (rolled, lambda partition: partition.log.flush()),  # names the segment
        (rolled, lambda partition: partition.log.append([numbered(2, size=5000)], partition.log.last_epoch)),
        (rolled, lambda partition: partition.log.delete_before(1)),
        (rolled, lambda partition: partition.log.truncate_to(1)),
        (rolled, lambda partition: partition.log.checkpoint()),
        (rolled, prepared),
        (prepared, apply),
        (prepared, stage_more),
    ],
    ids=["flush", "append", "delete records", "truncate", "checkpoint", "stage", "apply", "stage again"],
)
def test_a_folder_that_somebody_removed_takes_no_other_log_along(
    tmp_path: Path, before: Callable[[Partition], None], step: Callable[[Partition], object]
) -> None:
    directory = LogDirectory(tmp_path)
    partition = open_partition(directory)
    other = directory.open_log(TOPIC_ID, 1, "t-1", topic(), 0)
    before(partition)
    shutil.rmtree(partition.log.directory)
    with contextlib.suppress(Closed, NotLeader):
        step(partition)
    directory.tidy()
    waited_for(lambda: not directory._doubted)
    assert directory.failed is None
    assert directory.note_if_missing(TOPIC_ID, 0)
    other.append([numbered(0)], other.last_epoch)
    other.checkpoint()
    directory.close()
    assert not LogDirectory(tmp_path).was_clean


def test_a_segment_that_somebody_removed_is_no_obstacle_to_retention(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=4096), 0)
    for number in range(3):
        log.append([numbered(number, size=5000)], log.last_epoch)
        log.flush()
    (log.directory / f"{0:020d}.log").unlink()
    assert log.delete_before(2) == 2
    assert directory.failed is None
    assert sorted(read_all(log)) == [2]
    directory.close()


# --- high watermarks -------------------------------------------------------------------------------------------------


def replicated(directory: LogDirectory, partition: int, records: int, high_watermark: int) -> Log:
    log = directory.open_log(TOPIC_ID, partition, f"t-{partition}", topic(), 0)
    log.append([numbered(offset) for offset in range(log.end_offset, records)], 0)
    log.high_watermark = high_watermark
    return log


def test_high_watermarks_are_saved_at_a_stop_and_at_most_the_end_counts(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    replicated(directory, 0, 5, 3)
    replicated(directory, 1, 4, 4)
    directory.open_log(TOPIC_ID, 2, "t-2", topic(), 0).append([numbered(0)], 0)  # a single copy
    assert directory.saved_high_watermark(TOPIC_ID, 0) == 0
    directory.close()
    directory = LogDirectory(tmp_path)
    assert [directory.saved_high_watermark(TOPIC_ID, number) for number in range(4)] == [3, 4, 0, 0]
    directory.open_log(TOPIC_ID, 1, "t-1", topic(), None).truncate_to(2)
    assert [directory.saved_high_watermark(TOPIC_ID, number) for number in range(2)] == [3, 2]
    directory.close()


def test_high_watermarks_are_written_only_if_one_changed_and_those_of_unopened_logs_stay(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    replicated(directory, 0, 5, 3)
    replicated(directory, 1, 5, 5)
    directory.save_high_watermarks()
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    file = tmp_path / "high-watermarks"
    number = file.stat().st_ino
    log = replicated(directory, 0, 5, 3)
    directory.save_high_watermarks()
    assert file.stat().st_ino == number
    log.high_watermark = 4
    directory.save_high_watermarks()
    assert file.stat().st_ino != number
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    assert [directory.saved_high_watermark(TOPIC_ID, number) for number in range(2)] == [4, 5]
    directory.close()


def test_a_thread_saves_high_watermarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.storage.log_dir._HIGH_WATERMARKS_SECONDS", 0.01)
    directory = LogDirectory(tmp_path)
    directory.start()
    log = replicated(directory, 0, 5, 3)
    for expected in (3, 5):
        log.high_watermark = expected
        waited_for(lambda: directory.saved_high_watermark(TOPIC_ID, 0) == expected)  # noqa: B023
    waited_for(lambda: b": 5}" in (tmp_path / "high-watermarks").read_bytes())
    directory.close(clean=False)


def test_a_removed_log_leaves_no_high_watermark(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    replicated(directory, 0, 5, 3)
    replicated(directory, 1, 5, 3)
    directory.save_high_watermarks()
    directory.remove_log(TOPIC_ID, 0)
    directory.replace_log(TOPIC_ID, 1, "t-1", 0)
    directory.trust_log(TOPIC_ID, 1)
    directory.close()
    directory = LogDirectory(tmp_path)
    assert [directory.saved_high_watermark(TOPIC_ID, number) for number in range(2)] == [0, 0]
    directory.close()


@pytest.mark.parametrize("data", [b"junk", seal({"x": "y"}), b""])
def test_damaged_high_watermarks_are_unknown(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "high-watermarks").write_bytes(data)
    directory = LogDirectory(tmp_path)
    assert directory.saved_high_watermark(TOPIC_ID, 0) == 0
    replicated(directory, 0, 5, 3)
    directory.close()
    directory = LogDirectory(tmp_path)
    assert directory.saved_high_watermark(TOPIC_ID, 0) == 3
    directory.close()


def test_a_stop_while_high_watermarks_are_saved_leaves_old_or_new_ones() -> None:
    disk = MemoryDisk()
    directory = LogDirectory("/data", disk=disk)
    log = replicated(directory, 0, 5, 3)
    directory.save_high_watermarks()
    images = disk.images()
    log.high_watermark = 5
    directory.save_high_watermarks()
    assert images
    for image in images:
        for left in (image.after_kill(), *(image.after_power_cut(random.Random(seed), 0.5) for seed in range(4))):
            again = LogDirectory("/data", disk=left)
            assert again.saved_high_watermark(TOPIC_ID, 0) in (3, 5)
            again.save_high_watermarks()
    again = LogDirectory("/data", disk=disk.after_power_cut(random.Random(0), 0.0))
    assert again.saved_high_watermark(TOPIC_ID, 0) == 5


# --- lost writes -----------------------------------------------------------------------------------------------------


def claimed(disk: MemoryDisk) -> LogDirectory:
    directory = LogDirectory("/data", disk=disk)
    directory.claim("c", 1)
    directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    return directory


def may_have_lost(disk: MemoryDisk) -> bool:
    """What a start finds that is killed at once."""
    return LogDirectory("/data", disk=disk.after_kill()).may_have_lost


def test_new_directory_a_kill_and_a_clean_stop_have_lost_nothing() -> None:
    disk = MemoryDisk()
    directory = claimed(disk)
    assert not directory.may_have_lost
    assert not may_have_lost(disk)  # killed
    directory.close()
    disk.boot = "another"
    assert not may_have_lost(disk)
    directory = claimed(disk)
    assert not directory.may_have_lost
    assert not may_have_lost(disk)  # the new boot id counts from now on


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_machine_that_was_lost_may_have_lost_writes_until_that_is_settled(keep: float) -> None:
    disk = MemoryDisk()
    claimed(disk)
    disk = disk.after_power_cut(random.Random(0), keep)
    for clean in (False, True):  # over starts, also after a clean stop
        directory = claimed(disk)
        assert directory.may_have_lost
        directory.close(clean)
        assert claimed(disk.after_power_cut(random.Random(0), keep)).may_have_lost
    directory = claimed(disk)
    directory.settle_loss()
    assert not directory.may_have_lost
    assert not may_have_lost(disk)
    assert claimed(disk.after_power_cut(random.Random(0), 1.0)).may_have_lost
    directory.close()
    assert not may_have_lost(disk)


def test_boot_id_that_is_not_known_may_be_another() -> None:
    disk = MemoryDisk()
    claimed(disk)
    data = disk.bytes_of(Path("/data/lock"))
    whole = bytes(data)
    assert whole == b"%-19d\n%-36s\n    \n" % (os.getpid(), b"boot")
    assert not may_have_lost(disk)
    for length in (0, 5, 20):
        data[:] = whole[:length]
        assert may_have_lost(disk)


def test_stop_before_every_step_of_a_start_forgets_no_loss() -> None:
    disk = MemoryDisk()
    claimed(disk)
    disk = disk.after_power_cut(random.Random(0), 1.0)
    images = disk.images()
    claimed(disk)
    for image in images:
        assert may_have_lost(image)
        assert may_have_lost(image.after_power_cut(random.Random(1), 0.5))


def test_lock_file_of_a_real_disk_has_the_boot_id(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    pid, boot_id, lost, _ = (tmp_path / "lock").read_text().split("\n")
    assert (int(pid), boot_id, lost) == (os.getpid(), Disk().boot_id(), "    ")
    directory.close()
