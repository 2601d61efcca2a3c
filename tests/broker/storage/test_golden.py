"""Files of earlier versions are read, and written the same: a start after an upgrade must find its log."""

from __future__ import annotations

from pathlib import Path

from broker.staging.format import scan_file
from broker.storage.checkpoint import Checkpoint, read_checkpoint, read_label, seal, unseal, write_atomic
from broker.storage.disk import Disk
from broker.storage.epochs import EPOCHS_NAME, read_epochs
from broker.storage.index import decode_index, encode_index
from broker.storage.log_dir import LogDirectory
from broker.storage.producer_state import Producers
from kafkalog.clock import ManualClock
from tests.golden.make import (
    CHECKPOINT,
    GOLDEN,
    HIGH_WATERMARKS,
    INDEX_SUMMARY,
    LEADER_EPOCHS,
    PREPARED,
    PRODUCERS_AT,
    TIME,
    make_index,
    make_producers,
    make_producers_with_marks,
    make_staged,
)


def test_index_version_1() -> None:
    data = (GOLDEN / "index-1.bin").read_bytes()
    decoded = decode_index(data, 1000, 65_536)
    assert decoded is not None
    index, summary = decoded
    assert summary == INDEX_SUMMARY
    assert list(index.offsets) == list(make_index().offsets) == [1000, 1300, 1650]
    assert index.positions == make_index().positions
    assert index.max_before_us == make_index().max_before_us
    assert encode_index(index, summary) == data


def test_producers_version_1() -> None:
    """It had no apply_progress of transactions."""
    data = (GOLDEN / "producers-1.bin").read_bytes()
    producers = Producers("t-0", 5, 1000, ManualClock())
    assert producers.load(data, PRODUCERS_AT)
    assert producers.snapshot(PRODUCERS_AT).encode() == make_producers().snapshot(PRODUCERS_AT).encode()


def test_producers_version_2() -> None:
    data = (GOLDEN / "producers-2.bin").read_bytes()
    producers = Producers("t-0", 5, 1000, ManualClock())
    assert producers.load(data, PRODUCERS_AT)
    assert (
        producers.snapshot(PRODUCERS_AT).encode() == data == make_producers_with_marks().snapshot(PRODUCERS_AT).encode()
    )
    progress = producers.apply_progress.get(PREPARED.producer_id)
    assert progress is not None
    assert (progress.batch_id, progress.start_offset, progress.end_offset) == (12, 1200, 1208)
    assert [progress.has(4, number) for number in range(5)] == [True, True, False, True, False]


def test_staged_file_version_1() -> None:
    data = (GOLDEN / "staged-1.bin").read_bytes()
    assert data == make_staged()
    batch, prepared, dropped = scan_file(lambda position, length: data[position : position + length], len(data))
    assert [found.kind for found in (batch, prepared, dropped)] == [1, 2, 3]
    assert batch.header is not None
    assert (batch.number, batch.uuid, batch.staged_us, batch.header.part) == (1, PREPARED.parts[0].uuid, TIME, 4)
    assert prepared.prepared == PREPARED
    assert dropped.uuid == PREPARED.commit_uuid


def test_checkpoint_version_3(tmp_path: Path) -> None:
    data = (GOLDEN / "checkpoint-3.txt").read_bytes()
    assert unseal(data) == CHECKPOINT
    assert seal(CHECKPOINT) == data
    folder = tmp_path
    write_atomic(Disk(), folder / "checkpoint", data)
    assert read_checkpoint(Disk(), folder) == Checkpoint(1010, 1900, 88064)
    assert read_label(Disk(), folder) == "flights-0"


def test_leader_epochs_version_1(tmp_path: Path) -> None:
    data = (GOLDEN / "leader-epochs-1.txt").read_bytes()
    assert unseal(data) == LEADER_EPOCHS
    write_atomic(Disk(), tmp_path / EPOCHS_NAME, data)
    epochs = read_epochs(Disk(), tmp_path)
    assert epochs is not None and epochs.entries == [(0, 0), (3, 1200), (4, 1200)]
    epochs.save(Disk(), tmp_path, "flights-0")
    assert (tmp_path / EPOCHS_NAME).read_bytes() == data


def test_high_watermarks_version_1(tmp_path: Path) -> None:
    data = (GOLDEN / "high-watermarks-1.txt").read_bytes()
    assert unseal(data) == HIGH_WATERMARKS
    assert seal(HIGH_WATERMARKS) == data
    (tmp_path / "high-watermarks").write_bytes(data)
    directory = LogDirectory(tmp_path)
    assert [directory.saved_high_watermark(bytes(range(16)), number) for number in (0, 12, 1)] == [1200, 0, 0]
    directory.close()
