"""The disk refuses: no space, and space again; a write or fdatasync that fails for good. At every step."""

from __future__ import annotations

import errno
import functools
import os
import random
from pathlib import Path

import pytest

from broker.storage.disk import Buffer
from kafkalog.clock import ManualClock
from kafkalog.errors import CorruptBatch, DiskFull, OutOfFiles, StorageFailed, from_wire
from tests.broker.storage.batches import numbered, read_all, topic
from tests.crash.memory_disk import MemoryDisk
from tests.crash.workload import PATH, Workload, check_survivor, open_directory, open_log

TAKES_ROOM = ("create", "write", "make_dir", "link")


@functools.cache
def steps() -> tuple[str, ...]:
    disk = MemoryDisk()
    Workload(disk, flush=True).run()
    return tuple(disk.steps)


class FailingDisk(MemoryDisk):
    """Steps from the `first` on fail with an error, `count` of them; a write that fails for lack of room takes part
    of its bytes first, as the system's does."""

    def __init__(self, first: int, count: int, code: int, partly: int = 0) -> None:
        super().__init__()
        self.first, self.count, self.code, self.partly = first, count, code, partly
        self.tried = 0
        self.failed = 0
        self.before = self._maybe_fail

    def _maybe_fail(self, step: str) -> None:
        self.tried += 1
        if self.first < self.tried <= self.first + self.count and self._concerns(step):
            self.failed += 1
            if step == "write" and self.partly:
                self.tear(self.partly)
            raise OSError(self.code, os.strerror(self.code))

    def _concerns(self, step: str) -> bool:
        return self.code != errno.ENOSPC or step.partition(" ")[0] in TAKES_ROOM


@pytest.mark.parametrize("partly", [0, 100], ids=["nothing-written", "part-written"])
def test_full_disk_at_any_step_refuses_and_continues_when_there_is_room(partly: int) -> None:
    refused = 0
    for step, name in enumerate(steps()):
        if name.startswith("write" if partly else TAKES_ROOM):
            disk = FailingDisk(step, 1, errno.ENOSPC, partly)
            work = Workload(disk, flush=True)
            work.run()
            assert disk.failed == 1
            assert disk.open_files == 0
            refused += work.refused
            if step % 4 == 0:
                check_survivor(disk.after_kill(), work.promises(), power_cut=False)
    assert refused


def test_disk_that_stays_full_for_a_while_costs_nothing() -> None:
    for step in range(0, len(steps()) - 15, 6):
        if not any(name.startswith(TAKES_ROOM) for name in steps()[step : step + 12]):
            continue  # a truncation only takes away
        disk = FailingDisk(step, 12, errno.ENOSPC)
        work = Workload(disk, flush=True)
        work.run()
        assert disk.failed >= 1
        assert disk.open_files == 0
        check_survivor(disk.after_kill(), work.promises(), power_cut=False)


def test_failed_step_takes_the_directory_out_of_service_and_costs_nothing_flushed() -> None:
    out_of_service = 0
    for step, name in enumerate(steps()):
        disk = FailingDisk(step, 1, errno.EIO)
        work = Workload(disk, flush=True)
        try:
            work.run()
        except StorageFailed:
            out_of_service += 1
        else:
            # A stop goes on to its end, and is not marked as clean; syncing the mark itself comes too late for that.
            unneeded = name == "sync_dir" and steps()[step - 1] == "rename clean"
            assert work.unclean_stops == 1 or unneeded, f"an error at step {step} ({name}) went unnoticed"
        # What the failed step was to write or sync is gone: the page cache drops dirty pages that it could not write.
        check_survivor(disk.after_power_cut(random.Random(step), 0.0), work.promises(), power_cut=True)
    assert out_of_service


class FewFiles(MemoryDisk):
    """Names cannot be opened, made or listed, nor folders synced, from the `first` try on, `count` times."""

    def __init__(self, first: int, count: int, code: int = errno.EMFILE) -> None:
        super().__init__()
        self.first, self.count, self.code = first, count, code
        self.tried = 0
        self.refused = ""

    def _try(self, path: Path, doing: str) -> None:
        self.tried += 1
        if self.first < self.tried <= self.first + self.count:
            self.refused = doing
            raise OSError(self.code, os.strerror(self.code), str(path))

    def create(self, path: Path) -> int:
        self._try(path, "create")
        return super().create(path)

    def open(self, path: Path, *, write: bool = False) -> int:
        self._try(path, "open")
        return super().open(path, write=write)

    def sync_dir(self, path: Path) -> None:
        self._try(path, "sync_dir")
        super().sync_dir(path)

    def names(self, path: Path) -> list[str]:
        if path != PATH:  # the workload itself looks there
            self._try(path, "names")
        return super().names(path)


@pytest.mark.parametrize(("count", "code"), [(1, errno.EMFILE), (4, errno.ENFILE), (1, errno.ENOMEM)])
def test_lack_of_descriptors_at_any_step_refuses_and_continues_when_there_are_some(count: int, code: int) -> None:
    counting = FewFiles(1 << 60, 0)
    Workload(counting, flush=True).run()
    kinds = set()
    for first in range(0, counting.tried - count, 1 if code == errno.EMFILE else 7):
        disk = FewFiles(first, count, code)
        work = Workload(disk, flush=True)
        try:
            work.run()
        except StorageFailed as failed:
            # What a truncation began it must end; nothing but a follower truncates.
            assert "truncating" in str(failed), f"{disk.refused} at {first}"
            continue
        kinds.add(disk.refused)
        assert disk.open_files == 0, f"{disk.refused} at {first}"
        check_survivor(disk.after_power_cut(random.Random(first), 0.5), work.promises(), power_cut=True)
    assert kinds == {"create", "open", "sync_dir", "names"} or code != errno.EMFILE  # the others try fewer steps


def test_read_without_a_descriptor_is_refused_and_appends_continue() -> None:
    disk = FewFiles(1 << 60, 1)
    log = open_log(open_directory(disk))
    for offset in range(30):
        log.append([numbered(offset)], log.last_epoch)
    log.flush()  # until then the full segments are open
    for ask in (lambda: log.reader.read(0, 100), lambda: log.reader.offset_for_timestamp(0)):
        disk.first = disk.tried
        with pytest.raises(OutOfFiles, match="cannot open a file of /data now: reading for t-0: Too many open files"):
            ask()
    told = from_wire(*OutOfFiles(directory="/data", reason="x").to_wire())
    assert isinstance(told, OutOfFiles) and told.retriable
    log.append([numbered(30)], log.last_epoch)
    assert len(read_all(log)) == 31


def test_failed_fdatasync_ends_reads_and_writes_until_a_restart() -> None:
    disk = FailingDisk(1 << 60, 1, errno.EIO)
    directory = open_directory(disk)
    log = open_log(directory)
    log.append([numbered(0)], log.last_epoch)
    log.flush()
    log.append([numbered(1)], log.last_epoch)
    disk.first = disk.tried
    with pytest.raises(StorageFailed, match="fdatasync for t-0: Input/output error"):
        log.flush()
    for action in (
        lambda: log.reader.read(0, 1),
        lambda: log.append([numbered(2)], log.last_epoch),
        log.flush,
        log.checkpoint,
        lambda: log.reader.offset_for_timestamp(0),
        lambda: log.delete_before(1),
        lambda: log.truncate_to(1),
        log.apply_retention,
        lambda: open_log(directory),
    ):
        with pytest.raises(StorageFailed, match="fdatasync"):
            action()
    assert directory.failed is not None
    directory.close()
    directory = open_directory(disk.after_power_cut(random.Random(0), 0.0))
    assert not directory.was_clean
    assert read_all(open_log(directory)) == {0: b"%020d" % 0}


def test_append_that_cannot_be_cut_off_again_ends_service() -> None:
    disk = FailingDisk(1 << 60, 2, errno.EIO, partly=50)
    directory = open_directory(disk)
    log = open_log(directory)
    log.append([numbered(0)], log.last_epoch)
    disk.first = disk.tried
    with pytest.raises(StorageFailed, match="cutting off a failed append"):
        log.append([numbered(1)], log.last_epoch)
    assert directory.failed is not None


def test_append_cut_short_by_a_full_disk_leaves_no_byte() -> None:
    disk = FailingDisk(1 << 60, 1, errno.ENOSPC, partly=50)
    log = open_log(open_directory(disk))
    log.append([numbered(0)], log.last_epoch)
    size = log.view.size_bytes
    disk.first = disk.tried
    refused = log.append([numbered(1), numbered(2)], log.last_epoch)
    assert [type(outcome) for outcome in refused] == [DiskFull, DiskFull]
    assert disk.file_size(log.directory / f"{0:020d}.log") == size == log.view.size_bytes
    assert log.end_offset == 1


def test_full_disk_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    disk = FailingDisk(0, 0, errno.ENOSPC)
    log = open_log(open_directory(disk, clock))
    disk.count = 1 << 60
    for minute in (1, 2):
        for _ in range(3):
            assert isinstance(log.append([numbered(0)], log.last_epoch)[0], DiskFull)
        assert caplog.text.count("disk_full") == minute
        clock.advance(60)


def test_disk_is_full_until_a_minute_after_the_last_append_that_had_no_room() -> None:
    clock = ManualClock()
    disk = FailingDisk(0, 0, errno.ENOSPC)
    directory = open_directory(disk, clock)
    log = open_log(directory)
    assert not directory.is_full
    disk.count = 1 << 60
    for _ in range(3):  # the second one within the minute of the first, of which alone is logged
        assert isinstance(log.append([numbered(0)], log.last_epoch)[0], DiskFull)
        clock.advance(59.5)
        assert directory.is_full
    clock.advance(0.5)
    assert not directory.is_full


def test_too_many_open_files_are_not_reported_as_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    class NoNewFiles(MemoryDisk):
        code = 0

        def create(self, path: Path) -> int:
            if self.code:
                raise OSError(self.code, os.strerror(self.code), str(path))
            return super().create(path)

    def logged() -> tuple[int, int]:
        return caplog.text.count("out_of_files"), caplog.text.count("disk_full")

    clock, disk = ManualClock(), NoNewFiles()
    directory = open_directory(disk, clock)
    log = open_log(directory)
    for offset in range(40):  # until the next one needs a segment
        disk.code = errno.EMFILE
        [refused] = log.append([numbered(offset)], log.last_epoch)
        if isinstance(refused, OutOfFiles):
            break
    for minute in (1, 2):
        for _ in range(3):
            assert isinstance(log.append([numbered(offset)], log.last_epoch)[0], OutOfFiles)
        assert not directory.is_full
        assert logged() == (minute, 0)
        clock.advance(60)
    for disk.code in (errno.EMFILE, errno.ENOSPC, errno.EMFILE):
        log.append([numbered(offset)], log.last_epoch)
    assert logged() == (3, 1)  # neither keeps the other from being logged
    assert directory.is_full


def test_write_that_takes_part_of_its_bytes_is_carried_on() -> None:
    class SlowDisk(MemoryDisk):
        def write(self, fd: int, buffers: list[Buffer], position: int) -> int:  # type: ignore[override]
            return super().write(fd, [b"".join(bytes(b) for b in buffers)[:100]], position)

    log = open_log(open_directory(SlowDisk()))
    log.append([numbered(0, 2), numbered(2, 2), numbered(4, 2)], log.last_epoch)
    assert read_all(log) == {offset: b"%020d" % offset for offset in range(6)}


def test_read_error_ends_service() -> None:
    class Unreadable(MemoryDisk):
        broken = False

        def read(self, fd: int, length: int, position: int) -> bytes:
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, length, position)

    disk = Unreadable()
    log = open_log(open_directory(disk))
    log.append([numbered(0)], log.last_epoch)
    disk.broken = True
    with pytest.raises(StorageFailed, match="reading for t-0"):
        log.reader.read(0, 1)
    disk.broken = False
    with pytest.raises(StorageFailed):
        log.reader.read(0, 1)


def test_retention_makes_room_on_a_disk_too_full_for_its_checkpoint_whatever_happens_meanwhile() -> None:
    disk = MemoryDisk()
    log = open_log(open_directory(disk))
    for offset in range(50):
        log.append([numbered(offset)], log.last_epoch)
    log.flush()
    log.update_settings(topic(retention_bytes=0))
    images: list[MemoryDisk] = []

    def before(step: str) -> None:
        images.append(disk.after_kill())
        if step == "create checkpoint.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = before
    segments = len([name for name in disk.names(log.directory) if name.endswith(".log")])
    assert log.apply_retention() == segments - 1 > 2
    start = log.start_offset
    for image in images:
        for seed in range(20):
            found = open_log(open_directory(image.after_power_cut(random.Random(seed), 0.5)))
            assert found.start_offset <= start
            assert read_all(found) == {offset: b"%020d" % offset for offset in range(found.start_offset, 50)}


def test_log_that_cannot_be_opened_leaves_no_file_open() -> None:
    whole = MemoryDisk()
    log = open_log(open_directory(whole))
    for offset in range(20):
        log.append([numbered(offset)], log.last_epoch)
    torn = whole.after_kill()
    torn.bytes_of(log.directory / f"{0:020d}.log").extend(b"torn")
    steps_of_opening = torn.after_kill()
    directory = open_directory(steps_of_opening)
    first = len(steps_of_opening.steps)
    open_log(directory)
    for step in range(first, len(steps_of_opening.steps)):
        disk = FailingDisk(step, 1, errno.EIO)
        disk.root = torn.after_kill().root
        directory = open_directory(disk)
        with pytest.raises(StorageFailed, match="Input/output error"):
            open_log(directory)
        assert directory.failed is not None
        with pytest.raises(StorageFailed, match=str(directory.failed)):
            open_log(directory)
        directory.close()
        assert disk.open_files == 0


@pytest.mark.parametrize("torn", [b"", b"torn"], ids=["whole-tail", "torn-tail"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_fdatasync_of_what_a_start_recovered_is_not_tried_again(code: int, torn: bytes) -> None:
    """Of a failed write-back Linux tells once, and takes the pages for written."""

    class LosesOnce(MemoryDisk):
        fails = 1

        def sync(self, fd: int) -> None:
            if self.fails:
                self.fails -= 1
                raise OSError(code, os.strerror(code))
            super().sync(fd)

    killed = MemoryDisk()
    log = open_log(open_directory(killed))
    log.append([numbered(0)], log.last_epoch)
    log.checkpoint()
    log.append([numbered(1)], log.last_epoch)
    killed.bytes_of(log.directory / f"{0:020d}.log").extend(torn)
    disk = LosesOnce()
    disk.root = killed.after_kill().root
    directory = open_directory(disk)
    for _ in range(2):
        with pytest.raises(StorageFailed, match="fdatasync of recovered bytes for t-0"):
            open_log(directory)
    assert directory.failed is not None
    directory.close()
    assert disk.open_files == 0
    assert not open_directory(disk.after_kill()).was_clean


def test_names_that_an_opening_changed_and_could_not_sync_are_synced_by_the_next() -> None:
    """Else a dropped segment is there again after a power cut, where what was appended since ends at its name."""
    killed = MemoryDisk()
    log = open_log(open_directory(killed))
    log.append([numbered(0)], log.last_epoch)
    log.checkpoint()
    synced = log.view.size_bytes
    log.append([numbered(1)], log.last_epoch)
    log.append([numbered(2, size=4000)], log.last_epoch)
    (dropped,) = [name for name in killed.names(log.directory) if name.endswith(".next")]
    killed.sync_dir(log.directory)
    del killed.bytes_of(log.directory / f"{0:020d}.log")[synced:]
    disk = FewFiles(1 << 60, 1)
    disk.root = killed.after_kill().root
    steps: list[str] = []

    def opening(path: Path, doing: str) -> None:
        steps.append(doing)
        if doing == "sync_dir" and dropped not in MemoryDisk.names(disk, log.directory) and disk.count:
            disk.count = 0
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    disk._try = opening  # type: ignore[method-assign]
    directory = open_directory(disk)
    with pytest.raises(OutOfFiles):
        open_log(directory)
    assert not disk.count
    open_log(directory)
    assert dropped not in disk.after_power_cut(random.Random(0), 0.0).names(log.directory)


def test_an_index_of_damage_that_no_descriptor_is_left_for_is_saved_by_a_later_opening() -> None:
    """Nothing is wrong with the disk, so the directory stays in service."""
    written = MemoryDisk()
    directory = open_directory(written)
    log = open_log(directory)
    for offset in range(3):
        log.append([numbered(offset)], log.last_epoch)
    end = log.view.size_bytes
    folder = log.directory
    directory.close()
    written.bytes_of(folder / f"{0:020d}.log")[end // 3 + 3] ^= 1
    written.unlink(folder / f"{0:020d}.index")
    disk = FewFiles(1 << 60, 0)
    disk.root = written.after_kill().root
    refused = False

    def no_index(path: Path, doing: str) -> None:
        nonlocal refused
        if doing == "create" and ".index" in path.name and not refused:
            refused = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    disk._try = no_index  # type: ignore[method-assign]
    directory = open_directory(disk)
    with pytest.raises(OutOfFiles):
        open_log(directory)
    assert refused
    assert directory.failed is None
    reopened = open_log(directory)
    with pytest.raises(CorruptBatch):
        reopened.reader.read(1, 100)
    with reopened.reader.read(2, 1000) as found:
        assert found.length
    directory.close()
