from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from broker.storage import scan as recovery
from broker.storage.dump import dump, entries, verify
from broker.storage.log_dir import LogDirectory
from broker.storage.segment import segment_path
from kafkalog.errors import InvalidArgument
from kafkalog.format.batch import CODECS, HEADER_SIZE, Batch, encode_batch, read_header, stamp
from kafkalog.format.columns import HAS_HEADERS, HAS_KEY, HAS_TIMESTAMP_DELTA, columns_from_lists, encode_columns
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, topic


def rich_batch() -> Batch:
    columns = columns_from_lists(
        [b"v" * 100, None], [1_700_000_000_000_000, 1_700_000_000_500_000], [b"k", None], [[("h", b"1")], None]
    )
    assert columns.attributes == HAS_TIMESTAMP_DELTA | HAS_KEY | HAS_HEADERS
    data = bytearray(
        encode_batch(
            encode_columns(columns.batch, CODECS["zstd"]), codec=CODECS["zstd"], attributes=columns.attributes,
            record_count=2, min_timestamp_us=columns.min_timestamp_us, max_timestamp_us=columns.max_timestamp_us,
        ).tobytes()
    )  # fmt: skip
    return read_header(data), memoryview(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Offsets 0 and 1 rich, then 38 plain ones, in four segments, cleanly closed."""
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 1)
    log.append([rich_batch()], log.last_epoch)
    for offset in range(2, 40):
        log.append([numbered(offset, producer=(7, 0, offset - 2))], log.last_epoch)
    directory.close()
    return log.directory


def test_good_log_verifies_by_segment_folder_and_data_directory(folder: Path) -> None:
    segments = sorted(folder.glob("*.log"))
    for path in (folder, folder.parent):
        found = verify(path)
        assert not found.problems
        assert (found.segments, found.batches, found.records) == (len(segments), 39, 40)
        assert found.bytes == sum(path.stat().st_size for path in segments)
    assert sum(verify(path).records for path in segments) == 40


def test_dump_shows_batches_and_records(folder: Path) -> None:
    lines = list(dump(folder))
    assert lines[0].startswith(f"t-0 {folder}/{0:020d}.log (")
    assert lines[1].startswith("  0: offsets 0 to 1, ")
    assert "2 records, codec zstd, epoch 1, appended 20" in lines[1]
    assert "timestamps 2023-11-14T22:13:20+00:00 to 2023-11-14T22:13:20.500000+00:00, producer none" in lines[1]
    assert "producer 7/0/0" in lines[2]
    with_records = list(dump(folder, records=True))
    shown = f"{b'v' * 64!r}... (100 bytes)"
    assert with_records[2] == f"    0 2023-11-14T22:13:20+00:00 key=b'k' value={shown} headers=[('h', b'1')]"
    assert with_records[3] == "    1 2023-11-14T22:13:20.500000+00:00 key=none value=none headers=[]"
    records = [entry for entry in entries(folder, records=True) if entry["kind"] == "record"]
    assert [entry["offset"] for entry in records] == list(range(40))
    assert records[5]["value"] == b"%020d" % 5


def test_damage_and_torn_tail_are_shown_where_they_are(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("*.log"))
    data = bytearray(first.read_bytes())
    second_at = int.from_bytes(data[8:12], "little")
    data[second_at + 100] ^= 1
    first.write_bytes(data)
    with last.open("ab") as file:
        file.write(b"torn" * 5)
    found = verify(folder)
    assert found.torn_bytes == 20
    assert [(p.start_offset, p.end_offset, p.position) for p in found.problems] == [(2, 3, second_at)]
    assert f"{first}: damaged: offsets 2 to 2, " in str(found.problems[0])
    lines = list(dump(folder))
    assert f"  {second_at}: DAMAGED offsets 2 to 2, {found.problems[0].bytes} bytes" in lines
    assert lines[-1].endswith("torn tail, 20 bytes (the next start cuts them off)")


@pytest.mark.parametrize("size", [20, 95, 96, 5000])
def test_pure_noise_is_a_problem_and_no_torn_tail(tmp_path: Path, size: int) -> None:
    path = tmp_path / f"{7:020d}.log"
    path.write_bytes(random.Random(5).randbytes(size))
    found = verify(path)
    assert [str(problem) for problem in found.problems] == [f"{path}: contains no record batch: {size} bytes at 0"]
    assert found.torn_bytes == 0


@pytest.mark.parametrize("size", [1, 8, 30, 95, 96, 120])
@pytest.mark.parametrize("written", [True, False])
def test_a_first_batch_cut_short_is_a_torn_tail(tmp_path: Path, size: int, written: bool) -> None:
    data = bytearray(rich_batch()[1])
    stamp(data, 7, 0, 0)
    path = tmp_path / f"{7:020d}.log"
    path.write_bytes(data[:size] if written else bytes(size))  # a lost machine may leave zeros
    found = verify(path)
    assert not found.problems and found.torn_bytes == size


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_scan_in_parts_finds_what_one_scan_finds(folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    shutil.rmtree(folder)
    log = LogDirectory(folder.parent / "other").open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=1 << 20), 1)
    for offset in range(12):
        log.append([numbered(offset)], log.last_epoch)
    good = next(log.directory.glob("*.log")).read_bytes()
    length = len(numbered(0)[1])
    assert len(good) == 12 * length
    path = folder / f"{0:020d}.log"
    folder.mkdir()
    # A body, a header, two in a row, the first and the last batch; then the last one cut.
    damages = [(100,), (length * 3 + 100,), (length * 4 + 8,), (length * 5, length * 6 + 90), (length * 11 + 8,)]
    for flipped in (*damages, sum(damages, ())):
        for cut in (0, 8):
            data = bytearray(good[: len(good) - cut])
            for position in flipped:
                data[position] ^= 1
            path.write_bytes(data)
            with monkeypatch.context() as patched:
                whole = list(entries(path)), verify(path)
                patched.setattr("broker.storage.dump._BATCHES_AT_ONCE", at_once)
                assert (list(entries(path)), verify(path)) == whole


def test_a_dump_begins_before_its_segment_is_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=1 << 20), 1)
    log.append([numbered(offset) for offset in range(3000)], log.last_epoch)
    directory.close()
    checked = 0
    batch_is_good = recovery._body_is_good

    def counted(*arguments: Any) -> bool:
        nonlocal checked
        checked += 1
        return batch_is_good(*arguments)

    monkeypatch.setattr(recovery, "_body_is_good", counted)
    found = entries(log.directory)
    assert next(found)["kind"] == "segment"
    assert next(found)["start_offset"] == 0
    assert checked <= 1000
    assert sum(1 for _ in found) == 2999


def test_two_damaged_batches_are_two_problems_where_an_index_tells_what_is_between(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=1 << 20), 1)
    at = {}
    for offset in range(30):
        at[offset] = log.view.end_position
        log.append([numbered(offset)], log.last_epoch)
    directory.close()
    path = segment_path(log.directory, 0)
    for offset in (3, 20):
        with path.open("r+b") as file:
            file.seek(at[offset])
            file.write(bytes(HEADER_SIZE + 8))
    found = verify(log.directory)
    assert [(each.what, each.start_offset, each.end_offset) for each in found.problems] == [
        ("damaged", 3, 4),
        ("damaged", 20, 21),
    ]
    assert found.batches == 28
    assert sum(entry["kind"] == "batch" for entry in entries(log.directory)) == 28


def test_index_that_is_damaged_or_wrong_is_a_problem(folder: Path) -> None:
    path = sorted(folder.glob("*.index"))[1]
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert [(p.file, p.what) for p in verify(folder).problems] == [(str(path), "damaged index")]
    path.unlink()
    assert not verify(folder).problems
    other = sorted(folder.glob("*.index"))[-1]
    other.write_bytes(other.read_bytes())
    segment = other.with_suffix(".log")
    segment.write_bytes(segment.read_bytes()[:-8])
    assert [p.what for p in verify(folder).problems] == ["damaged", "index describes more bytes than its segment has"]


def test_batch_whose_contents_lie_is_a_problem(tmp_path: Path) -> None:
    columns = columns_from_lists([b"a", b"b"], 5)
    data = bytearray(
        encode_batch(
            encode_columns(columns.batch, 0), codec=0, attributes=0, record_count=3, min_timestamp_us=5,
            max_timestamp_us=5,
        ).tobytes()
    )  # fmt: skip
    stamp(data, 0, 0, 0)
    (tmp_path / f"{0:020d}.log").write_bytes(data)
    assert [p.what for p in verify(tmp_path).problems] == ["it has 2 records, but its header says 3"]


@pytest.mark.parametrize("codec", list(CODECS))
def test_batch_whose_header_lies_about_its_timestamps_is_a_problem_and_is_shown(tmp_path: Path, codec: str) -> None:
    """A broker does not look into a compressed body, but whoever verifies a log has the time."""
    columns = columns_from_lists([b"a", b"b", b"c"], [5, 12, 7])
    data = bytearray(
        encode_batch(
            encode_columns(columns.batch, CODECS[codec]), codec=CODECS[codec], attributes=columns.attributes,
            record_count=3, min_timestamp_us=6, max_timestamp_us=14,
        ).tobytes()
    )  # fmt: skip
    stamp(data, 0, 0, 0)
    (tmp_path / f"{0:020d}.log").write_bytes(data)
    sentence = "its timestamps' deltas are 0 to 7; by its header's timestamps they are 0 to 8"
    assert [p.what for p in verify(tmp_path).problems] == [sentence]
    records = [entry for entry in entries(tmp_path, records=True) if entry["kind"] == "record"]
    assert [entry["timestamp_us"] for entry in records] == [6, 13, 8]


@pytest.mark.parametrize("unit", [1, 1 << 31])
def test_dump_shows_every_record_at_its_own_time(tmp_path: Path, unit: int) -> None:
    _, data = make_batch([b"a", b"b", b"c"], [unit * time for time in (5, 12, 7)])
    (tmp_path / f"{0:020d}.log").write_bytes(data)
    records = [entry for entry in entries(tmp_path, records=True) if entry["kind"] == "record"]
    assert [entry["timestamp_us"] for entry in records] == [unit * time for time in (5, 12, 7)]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "there is no file or folder"),
        (".", "contains no log"),
        ("file.txt", "is not a segment: the name of a segment is 20 digits and .log"),
    ],
)
def test_path_without_a_log_gets_a_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file.txt").write_text("x")
    for action in (verify, lambda path: list(dump(path))):
        with pytest.raises(InvalidArgument, match=sentence):
            action(tmp_path / name)
