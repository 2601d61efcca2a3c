"""Bit rot in closed segments and small files is found, and what can be rebuilt is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from broker.storage import scrub
from broker.storage.checkpoint import CHECKPOINT_NAME, is_whole, seal
from broker.storage.disk import Disk
from broker.storage.epochs import EPOCHS_NAME
from broker.storage.index import Damage
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import Closed, CorruptBatch, StorageFailed
from kafkalog.format.batch import stamp
from tests.broker.storage.batches import make_batch, read_all, topic
from tests.broker.storage.copies import (
    BATCHES,
    END,
    PATH,
    PER_SEGMENT,
    RECORDS,
    batch_at,
    check_all,
    cut,
    flip,
    new_copy,
    open_copy,
)
from tests.crash.memory_disk import MemoryDisk

GOOD: dict[int, bytes | None] = {offset: b"%08d" % offset for offset in range(END)}


def offsets_of(damaged: Iterable[Damage]) -> list[int]:
    return [offset for each in damaged for offset in range(each.start_offset, each.end_offset)]


@pytest.mark.parametrize("piece", [1 << 20, 1000, 200], ids=["one-piece", "pieces", "less-than-a-batch"])
def test_a_flip_of_any_byte_of_a_closed_segment_is_found(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", piece)
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    for at in range(0, segment.size, 1 if piece == 1000 else 7):
        flip(disk, segment.path, at)
        list(log.check(segment))
        start, end = batch_at(at, segment.size // BATCHES)
        assert [each[:2] for each in segment.damaged] == [(PER_SEGMENT + start, PER_SEGMENT + end)], at
        with pytest.raises(CorruptBatch):
            log.reader.read(PER_SEGMENT + start, 1000)
        flip(disk, segment.path, at)
        segment.damaged = ()
    assert sum(log.check(segment)) >= segment.size
    assert read_all(log) == GOOD


@pytest.mark.parametrize("goes_on", ["before", "after"])
def test_a_check_of_a_segment_that_is_cut_meanwhile_finds_no_damage_in_what_is_appended_then(
    goes_on: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It found the old records missing, in the object that the new ones were then appended to."""
    monkeypatch.setattr(scrub, "PIECE_BYTES", 500)
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    check = log.check(segment)
    next(check)
    end_offset = log.truncate_to(PER_SEGMENT + 3 * RECORDS)
    if goes_on == "before":
        list(check)
    for number in range(4):
        _, data = make_batch([b"x" * 77] * RECORDS)
        stamp(data, end_offset + number * RECORDS, 1, 77)
        log.append_stamped(memoryview(data), 1)
    list(check)
    assert segment not in log.view.segments and log.first_damage() is None
    assert "damage_found" not in caplog.text
    assert list(read_all(log)) == list(range(end_offset + 4 * RECORDS))


def test_batches_in_each_others_place_are_found() -> None:
    """As after a write that the disk made elsewhere: the checksums match."""
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    size = segment.size // BATCHES
    data = disk.bytes_of(segment.path)
    data[size : 2 * size], data[2 * size : 3 * size] = data[2 * size : 3 * size], data[size : 2 * size]
    list(log.check(segment))
    assert offsets_of(segment.damaged) == [PER_SEGMENT + 2 * RECORDS, PER_SEGMENT + 2 * RECORDS + 1]
    assert read_all(log) == GOOD | dict.fromkeys(offsets_of(segment.damaged)), "the one that is too early is left out"


def test_a_batch_of_an_older_epoch_is_found() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    size = segment.size // BATCHES
    stamp(memoryview(disk.bytes_of(segment.path))[size:], PER_SEGMENT + RECORDS, 0, 1)
    list(log.check(segment))
    assert offsets_of(segment.damaged) == [PER_SEGMENT + RECORDS, PER_SEGMENT + RECORDS + 1]


def test_good_segments_cost_one_read_of_them_and_nothing_is_written() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    before, open_files = list(disk.steps), disk.open_files
    assert check_all(log) == sum(segment.size for segment in log.view.segments[:-1])
    assert disk.steps == before
    assert disk.open_files == open_files


@pytest.mark.parametrize("size", [0, 1, 95, 96, 250, 700])
def test_a_segment_that_was_cut_short_is_found(size: int) -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    cut(disk, segment.path, size)
    list(log.check(segment))
    whole = size // (segment.size // BATCHES) * RECORDS
    assert offsets_of(segment.damaged) == list(range(PER_SEGMENT + whole, 2 * PER_SEGMENT))
    assert {offset for offset, value in read_all(log).items() if value is None} == set(
        range(PER_SEGMENT + whole, 2 * PER_SEGMENT)
    )


def test_a_segment_whose_file_is_gone_is_damaged_as_a_whole() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    disk.unlink(segment.path)
    list(log.check(segment))
    assert offsets_of(segment.damaged) == list(range(PER_SEGMENT, 2 * PER_SEGMENT))
    met: list[int] = []
    log.reader.on_damage = met.append
    with pytest.raises(CorruptBatch):
        log.reader.read(PER_SEGMENT + 1, 1000)
    assert met == [PER_SEGMENT + 1]


def test_damage_that_was_found_is_known_after_a_restart() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[0]
    flip(disk, segment.path, 200)  # in a body, which a start does not read
    check_all(log)
    assert segment.damaged
    log.close(clean=False)
    again = open_copy(disk, 4)
    assert again.view.segments[0].damaged == segment.damaged
    assert read_all(again)[0] is None


def test_a_deleted_segment_is_not_damaged() -> None:
    log = new_copy()
    segment = log.view.segments[0]
    check = log.check(segment)
    log.delete_before(PER_SEGMENT)
    assert list(check) == [] and segment.damaged == ()


def test_a_check_ends_with_the_log() -> None:
    log = new_copy()
    check = log.check(log.view.segments[0])
    next(check)
    log.close()
    with pytest.raises(Closed):
        next(check)


def test_a_read_error_ends_the_directory_as_any_other() -> None:
    class Failing(MemoryDisk):
        def read_sparing_cache(self, fd: int, length: int, position: int) -> bytes:
            raise OSError(5, "Input/output error")

    log = new_copy(Failing())
    with pytest.raises(StorageFailed):
        list(log.check(log.view.segments[0]))


@pytest.mark.parametrize("at", [5, 40, -3])
def test_a_damaged_index_is_saved_again(at: int) -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    path = log.view.segments[1].index_path
    before = bytes(disk.bytes_of(path))
    flip(disk, path, at)
    check_all(log)
    assert disk.bytes_of(path) == before
    disk.unlink(path)
    check_all(log)
    assert disk.bytes_of(path) == before


@pytest.mark.parametrize("name", [CHECKPOINT_NAME, EPOCHS_NAME])
def test_a_damaged_copy_of_a_sealed_document_is_written_again(name: str) -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    log.checkpoint()
    path = log.directory / name
    before = bytes(disk.bytes_of(path))
    for at in (3, -3):
        flip(disk, path, at)
        check_all(log)
        assert disk.bytes_of(path) == before, at
    disk.unlink(path)
    check_all(log)
    assert disk.bytes_of(path) == before


def test_damaged_states_of_producers_are_replaced_by_a_new_one() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    log.checkpoint()
    found = [name for name in disk.names(log.directory) if name.endswith(".producers")]
    assert len(found) > 1
    for name in found:
        flip(disk, log.directory / name, 30)
    check_all(log)
    assert [name for name in disk.names(log.directory) if name.endswith(".producers")] == [f"{END:020d}.producers"]
    log.close(clean=False)
    again = open_copy(disk, 4)
    (refused,) = again.append([make_batch([b"x"], producer=(7, 0, END + 5))], 4)
    assert "sequence" in str(refused), "the producer was forgotten"


@pytest.mark.parametrize("name", ["meta", "high-watermarks"])
def test_damaged_files_of_the_directory_are_written_again(name: str) -> None:
    disk = MemoryDisk()
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock())
    directory.claim("c", 1)
    log = directory.open_log(bytes(16), 0, "t-0", topic(), 0)
    log.append([make_batch([b"x"])], 0)
    log.high_watermark = 1
    directory.save_high_watermarks()
    path = PATH / name
    before = bytes(disk.bytes_of(path))
    for at in (3, -3):
        flip(disk, path, at)
        directory.check_files()
        assert disk.bytes_of(path) == before
    steps = list(disk.steps)
    directory.check_files()
    assert disk.steps == steps


def test_a_sealed_document_is_whole_with_both_copies_only() -> None:
    data = seal({"a": 1})
    assert is_whole(data)
    assert not is_whole(None) and not is_whole(b"") and not is_whole(data[: len(data) // 2])
    for at in range(len(data)):
        assert not is_whole(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_a_read_that_spares_the_cache_returns_what_a_read_does(tmp_path: Path) -> None:
    disk = Disk()
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 100)
    fd = disk.open(path)
    try:
        for position, length in ((0, 25_600), (100, 5), (25_000, 5000), (30_000, 10)):
            assert disk.read_sparing_cache(fd, length, position) == disk.read(fd, length, position)
    finally:
        disk.close(fd)


def test_a_read_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    disk = Disk()
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    fd = disk.open(path)

    def is_cached() -> bool:
        try:
            return os.preadv(fd, [bytearray(1 << 20)], 0, os.RWF_NOWAIT) == 1 << 20
        except BlockingIOError:
            return False
        except OSError as error:
            # What is asserted is only visible through RWF_NOWAIT, which some file systems (overlay, network) refuse.
            if error.errno != errno.EOPNOTSUPP:
                raise
            pytest.skip("the file system does not say what is cached")

    try:
        assert is_cached()
        disk.read_sparing_cache(fd, 1 << 20, 0)
        assert is_cached()
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 1 << 20, os.POSIX_FADV_DONTNEED)
        if is_cached():  # tmpfs has no other place for the bytes, so there is no cache to spare
            pytest.skip("the file system is in memory")
        assert disk.read_sparing_cache(fd, 1 << 20, 0) == bytes(1 << 20)
        assert not is_cached()
    finally:
        disk.close(fd)


def test_adjacent_damage_is_found_as_such() -> None:
    disk = MemoryDisk()
    log = new_copy(disk)
    segment = log.view.segments[1]
    size = segment.size // BATCHES
    for number in (1, 2):
        flip(disk, segment.path, number * size + 10)
    list(log.check(segment))
    assert offsets_of(segment.damaged) == list(range(PER_SEGMENT + RECORDS, PER_SEGMENT + 3 * RECORDS))
    assert read_all(log)[PER_SEGMENT + 3 * RECORDS] is not None
