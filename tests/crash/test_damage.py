"""Bits flip, files end early, tails are zero, files are gone: no wrong record is served, and no good one is lost.

The log under test: two closed segments and a last one of three batches each, two records in a batch, one producer; its
start offset is 1 and it was closed cleanly, or, for `killed`, killed with the last segment neither described nor known
to be synced.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.storage.index import Damage
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory, folder_name
from broker.storage.segment import Segment
from kafkalog.clock import ManualClock
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import HEADER_SIZE, STAMPED_SIZE, BatchHeader, iter_batches, stamp
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, topic, values_of
from tests.crash.memory_disk import MemoryDisk
from tests.whole_batch import check_batch

PATH = Path("/data")
FOLDER = PATH / folder_name(TOPIC_ID, 0)
PRODUCER = 7
BATCHES, RECORDS = 3, 2
PER_SEGMENT = BATCHES * RECORDS
END = 3 * PER_SEGMENT
START = 1
BODY_CHECKED_FROM = STAMPED_SIZE + 4
BASES = [0, PER_SEGMENT, 2 * PER_SEGMENT]
CLEAN_OR_KILLED = pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
# A closed segment is treated alike after both stops.
SEGMENTS = pytest.mark.parametrize(
    ("clean", "base"),
    [(True, BASES[0]), (True, BASES[-1]), (False, BASES[-1])],
    ids=["first", "last", "last-of-a-killed-one"],
)


def segment(base_offset: int) -> Path:
    return FOLDER / f"{base_offset:020d}.log"


def value(offset: int) -> bytes:
    return b"%08d" % offset


def open_log(disk: MemoryDisk) -> tuple[LogDirectory, Log]:
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock(), producer_batches_remembered=5)
    return directory, directory.open_log(TOPIC_ID, 0, "t-0", topic(index_interval_bytes=700), 0)


@functools.cache
def _image(clean: bool) -> MemoryDisk:
    disk = MemoryDisk()
    clock = ManualClock()
    directory = LogDirectory(PATH, disk=disk, clock=clock, producer_batches_remembered=5)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(index_interval_bytes=700, segment_ms=1000), 0)
    for base in BASES:
        clock.advance(10)
        for offset in range(base, base + PER_SEGMENT, RECORDS):
            log.append(
                [numbered(offset, RECORDS, 8, producer=(PRODUCER, 0, offset), timestamps_us=offset)], log.last_epoch
            )
        log.delete_before(START)
    log.flush()
    if clean:
        directory.close()
    image = disk.after_kill()
    assert [name for name in image.names(FOLDER) if name.endswith(".log")] == [segment(base).name for base in BASES]
    return image


def damaged_copy(clean: bool) -> MemoryDisk:
    return _image(clean).after_kill()


def batches_of(clean: bool, base_offset: int) -> list[tuple[int, BatchHeader]]:
    """(position, header) of a segment's batches before it was damaged."""
    position, found = 0, []
    for header, _ in iter_batches(memoryview(_image(clean).bytes_of(segment(base_offset)))):
        found.append((position, header))
        position += header.length
    return found


def served(log: Log) -> dict[int, bytes | None]:
    """What each offset gives a client that checks what it gets; None where it gets an error."""
    found: dict[int, bytes | None] = {}
    offset = log.start_offset
    while offset < log.end_offset:
        try:
            with log.reader.read(offset, 1) as one:
                batch = one.read()
            header = check_batch(batch)
        except CorruptBatch:
            found[offset] = None
            offset += 1
            continue
        assert header.base_offset <= offset < header.end_offset
        found |= {at: value for at, value in values_of(header, batch) if at >= offset}
        offset = header.end_offset
    return found


def good(*missing: int) -> dict[int, bytes | None]:
    return {offset: None if offset in missing else value(offset) for offset in range(START, END)}


def check_goes_on(disk: MemoryDisk, found: dict[int, bytes | None]) -> None:
    """A log that was damaged takes batches, and after restarts, unclean and clean, serves what it did before."""
    for clean in (False, True):
        directory, log = open_log(disk)
        end = log.end_offset
        (appended,) = log.append([numbered(end, 1, 8)], log.last_epoch)
        assert isinstance(appended, Appended)
        assert appended.base_offset == end
        directory.close(clean)
        directory, log = open_log(disk)
        found = found | {end: value(end)}
        assert served(log) == found
        directory.close(clean)


# --- segments --------------------------------------------------------------------------------------------------------


@SEGMENTS
def test_bit_flipped_at_any_byte_of_a_segment_costs_its_batch_alone(clean: bool, base: int) -> None:
    for position, header in batches_of(clean, base):
        hit = range(header.base_offset, header.end_offset)
        for at in range(position, position + header.length):
            disk = damaged_copy(clean)
            disk.bytes_of(segment(base))[at] ^= 1 << at % 8
            _, log = open_log(disk)
            found = served(log)
            if not clean and header.end_offset == END and at >= position + BODY_CHECKED_FROM:
                # The last batch, not known to be synced, with a good length: that is what a torn write looks like.
                assert found == {offset: value(offset) for offset in range(START, header.base_offset)}
            else:
                assert found == good(*hit), f"byte {at - position} of the batch at {header.base_offset}"


@CLEAN_OR_KILLED
def test_log_with_a_flipped_bit_continues(clean: bool) -> None:
    for base in BASES:
        for position, header in batches_of(clean, base):
            for at in (0, 9, 13, 20, 26, 30, 50, header.length - 1):
                disk = damaged_copy(clean)
                disk.bytes_of(segment(base))[position + at] ^= 16
                directory, log = open_log(disk)
                found = served(log)
                directory.close(clean=False)
                check_goes_on(disk.after_kill(), found)


@SEGMENTS
def test_segment_cut_to_any_length_keeps_its_whole_batches(clean: bool, base: int) -> None:
    whole = batches_of(clean, base)
    for length in range(whole[-1][0] + whole[-1][1].length):
        disk = damaged_copy(clean)
        del disk.bytes_of(segment(base))[length:]
        kept_to = max((h.end_offset for position, h in whole if position + h.length <= length), default=base)
        directory, log = open_log(disk)
        found = served(log)
        if base == BASES[-1] and not clean:
            assert found == {offset: value(offset) for offset in range(START, kept_to)}
            assert disk.file_size(segment(base)) == sum(h.length for _, h in whole if h.end_offset <= kept_to)
        else:
            assert found == good(*range(kept_to, base + PER_SEGMENT))
        directory.close(clean=False)
        if length % 39 == 0:
            check_goes_on(disk.after_kill(), found)


@CLEAN_OR_KILLED
def test_tail_of_zeros_or_noise_is_cut_off(clean: bool) -> None:
    noise = bytes((7 * i * i + 3 * i) % 251 for i in range(5000))
    for junk in (bytes(1), bytes(8), bytes(96), bytes(512), bytes(5000), noise[:1], noise[:97], noise):
        disk = damaged_copy(clean)
        disk.bytes_of(segment(BASES[-1])).extend(junk)
        _, log = open_log(disk)
        assert served(log) == good()
        check_goes_on(disk.after_kill(), good())


def test_tail_that_became_zero_from_any_position_on_is_cut_to_whole_batches() -> None:
    whole = batches_of(False, BASES[-1])
    size = whole[-1][0] + whole[-1][1].length
    for position in range(0, size, 8):
        disk = damaged_copy(False)
        disk.bytes_of(segment(BASES[-1]))[position:] = bytes(size - position)
        # Arrow pads with zeros: a batch whose last bytes were zero anyway is whole.
        original = bytes(_image(False).bytes_of(segment(BASES[-1])))
        kept_to = max(
            (h.end_offset for at, h in whole if not any(original[max(at, position) : at + h.length])),
            default=BASES[-1],
        )
        before = max((h.end_offset for at, h in whole if at + h.length <= position), default=BASES[-1])
        _, log = open_log(disk)
        assert served(log) == {offset: value(offset) for offset in range(START, max(before, kept_to))}


def test_two_damaged_batches_cost_only_themselves() -> None:
    for base in BASES[:2]:
        whole = batches_of(True, base)
        for first in range(BATCHES - 1):
            for second in range(first + 1, BATCHES):
                for at in (4, 40):
                    disk = damaged_copy(True)
                    hit: list[int] = []
                    for number in (first, second):
                        position, header = whole[number]
                        disk.bytes_of(segment(base))[position + at] ^= 1
                        hit += range(header.base_offset, header.end_offset)
                    disk.unlink(segment(base).with_suffix(".index"))  # found by the scan, not by a reader
                    _, log = open_log(disk)
                    assert served(log) == good(*hit)


@CLEAN_OR_KILLED
def test_destroyed_header_is_survived_by_the_chain_behind_it(clean: bool) -> None:
    for base in BASES:
        for position, header in batches_of(clean, base)[:-1]:
            disk = damaged_copy(clean)
            disk.bytes_of(segment(base))[position : position + HEADER_SIZE] = bytes(HEADER_SIZE)
            _, log = open_log(disk)
            assert served(log) == good(*range(header.base_offset, header.end_offset))


SYNCED, UNSYNCED = 12, 6


def half_synced(**settings: object) -> tuple[MemoryDisk, dict[int, int], LogDirectory]:
    """A log of one segment, not closed: batches up to a checkpoint, and more behind; where each of them stands."""
    disk = MemoryDisk()
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock())
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=1 << 20, **settings), 0)
    at = {}
    for offset in range(SYNCED + UNSYNCED):
        at[offset] = log.view.end_position
        log.append([numbered(offset, 1, 8, producer=(PRODUCER, 0, offset))], log.last_epoch)
        if offset == SYNCED - 1:
            log.checkpoint()
    return disk, at, directory


@pytest.mark.parametrize("behind", range(SYNCED, SYNCED + UNSYNCED - 1))
def test_damage_and_a_hole_in_the_unsynced_tail_cost_nothing_between_them(behind: int) -> None:
    disk, at, _ = half_synced()
    disk = disk.after_kill()
    disk.unlink(segment(0).with_suffix(".index"))  # a power cut may take it: it was saved without a sync
    for offset in (2, behind):
        disk.bytes_of(segment(0))[at[offset] : at[offset] + HEADER_SIZE + 8] = bytes(HEADER_SIZE + 8)
    _, log = open_log(disk)
    end = SYNCED + UNSYNCED
    assert served(log) == {offset: None if offset in (2, behind) else value(offset) for offset in range(end)}


def test_the_last_good_record_before_a_hole_over_several_entries_of_the_index_can_be_read() -> None:
    disk, at, directory = half_synced(index_interval_bytes=64)  # an entry for each batch
    directory.close()
    hole = range(5, 11)
    for offset in hole:
        disk.bytes_of(segment(0))[at[offset] : at[offset + 1]] = bytes(at[offset + 1] - at[offset])
    _, log = open_log(disk)
    with log.reader.read(hole[0] - 1, 1 << 20) as found:
        assert found.length > 0
    end = SYNCED + UNSYNCED
    assert served(log) == {offset: None if offset in hole else value(offset) for offset in range(end)}


def test_a_time_is_looked_up_over_a_hole_of_more_entries_of_the_index_than_calls_may_be_nested() -> None:
    disk = MemoryDisk()
    directory = LogDirectory(PATH, disk=disk, clock=ManualClock())
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(segment_bytes=1 << 20, index_interval_bytes=64), 0)
    at = []
    for offset in range(sys.getrecursionlimit() + 100):
        at.append(log.view.end_position)
        log.append(
            [numbered(offset, timestamps_us=5000 if offset == 1 else 1000)], log.last_epoch
        )  # an entry for each batch
    directory.close()
    disk.bytes_of(segment(0))[at[1] : at[-1]] = bytes(at[-1] - at[1])
    _, log = open_log(disk)
    with pytest.raises(CorruptBatch, match="offsets 1 to 1 are damaged on disk"):
        log.reader.offset_for_timestamp(5000)


def test_damage_that_a_start_found_is_never_looked_for_again() -> None:
    """A power cut may take what was saved without a sync; and with another damage behind, nothing between the two leads
    up to the recovery point."""
    disk, at, _ = half_synced()
    disk = disk.after_kill()
    disk.unlink(segment(0).with_suffix(".index"))
    for offset in (2, 7):
        if offset == 7:
            open_log(disk)
            disk = disk.after_power_cut(random.Random(0), 0)
        disk.bytes_of(segment(0))[at[offset] : at[offset] + HEADER_SIZE + 8] = bytes(HEADER_SIZE + 8)
    _, log = open_log(disk)
    assert served(log) == {offset: None if offset in (2, 7) else value(offset) for offset in range(SYNCED + UNSYNCED)}


def test_the_index_of_a_full_segment_outlives_a_power_cut() -> None:
    disk = MemoryDisk()
    _, log = open_log(disk)
    while len(log.view.segments) == 1:
        log.append([numbered(log.end_offset, RECORDS, 8)], log.last_epoch)
    log.flush()
    whole, end = log.view.segments[0].index_path, log.view.segments[1].base_offset
    disk = disk.after_power_cut(random.Random(0), 0)
    assert whole.name in disk.names(FOLDER)
    for offset in (4, end - 4):
        position, _ = log.view.segments[0].index.before(offset)
        disk.bytes_of(segment(0))[position : position + HEADER_SIZE + 8] = bytes(HEADER_SIZE + 8)
    found = served(open_log(disk)[1])
    assert 2 <= sum(found[offset] is None for offset in range(end)) <= 2 * RECORDS


def test_a_segment_whose_index_tells_its_beginning_is_read_from_there_on() -> None:
    """Saved at a checkpoint; a kill came after the segment was full and synced, and before it was saved again."""
    disk, at, directory = half_synced(index_interval_bytes=512)
    log = directory.logs()[0]
    log.update_settings(topic(segment_bytes=4096))
    old = bytes(disk.bytes_of(segment(0).with_suffix(".index")))
    log.append([numbered(SYNCED + UNSYNCED, 1, 4000)], log.last_epoch)
    log.flush()
    disk = disk.after_kill()
    disk.bytes_of(segment(0).with_suffix(".index"))[:] = old
    for offset in (2, 5):
        disk.bytes_of(segment(0))[at[offset] : at[offset] + HEADER_SIZE + 8] = bytes(HEADER_SIZE + 8)
    found = served(open_log(disk)[1])
    assert [offset for offset, found_value in found.items() if found_value is None] == [2, 5]


def destroy(disk: MemoryDisk, at: dict[int, int], *offsets: int) -> None:
    for offset in offsets:
        disk.bytes_of(segment(0))[at[offset] : at[offset] + HEADER_SIZE] = b"\xff" * HEADER_SIZE


def skipped_over(log: Log) -> list[int]:
    """The offsets left out by whoever goes on where the error says."""
    left_out: list[int] = []
    offset = log.start_offset
    while offset < log.end_offset:
        try:
            with log.reader.read(offset, 1) as one:
                offset = check_batch(one.read()).end_offset
        except CorruptBatch as error:
            left_out += range(offset, error.facts["end_offset"])
            offset = error.facts["end_offset"]
    return left_out


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "steps", [[(5,), (6,)], [(5,), (6, 7)], [(5,), (4,)], [(5,), (4, 6)], [(5, 6), (7,)], [(5,), (6,), (7,)]], ids=str
)
def test_damage_that_grows_costs_only_what_it_hits(steps: list[tuple[int, ...]], restart: bool) -> None:
    """In one interval of the index, of a segment that is appended to; its index is saved with what is known."""
    disk, at, directory = half_synced(index_interval_bytes=1 << 16)
    log = directory.logs()[0]
    hit: list[int] = []
    for offsets in steps:
        destroy(disk, at, *offsets)
        hit = sorted({*hit, *offsets})
        assert skipped_over(log) == hit
        if restart:
            directory.close()
            directory, log = open_log(disk)
        expected = {offset: None if offset in hit else value(offset) for offset in range(SYNCED + UNSYNCED)}
        assert served(log) == expected
    assert log.view.segments[0].damage_at(hit[0]) == Damage(hit[0], hit[-1] + 1, at[hit[0]], at[hit[-1] + 1])
    assert len(log.view.segments[0].damaged) == 1


def test_damage_that_grew_is_one_range_after_a_truncation_too() -> None:
    disk, at, directory = half_synced(index_interval_bytes=1 << 16)
    log = directory.logs()[0]
    destroy(disk, at, 5)
    assert skipped_over(log) == [5]
    destroy(disk, at, 6)
    assert log.truncate_to(SYNCED) == SYNCED
    assert log.view.segments[0].damaged == (Damage(5, 7, at[5], at[7]),)
    assert skipped_over(log) == [5, 6]


def test_a_record_that_no_batch_holds_leads_on_at_the_next_entry_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk gives one thing and then another: what a reader could not read, the scan finds whole."""
    disk, at, directory = half_synced(index_interval_bytes=3 * 64)
    (log,) = directory.logs()
    destroy(disk, at, 5)
    monkeypatch.setattr(Segment, "examine", lambda *given: [])
    offsets = log.view.segments[0].index.offsets
    with pytest.raises(CorruptBatch, match="no batch contains it") as caught:
        log.reader.read(5, 1)
    assert caught.value.facts["end_offset"] == min(offset for offset in offsets if offset > 5) < log.end_offset
    destroy(disk, at, 17)
    with pytest.raises(CorruptBatch, match="no batch contains it") as caught:
        log.reader.read(17, 1)
    assert caught.value.facts["end_offset"] == log.end_offset


def look_alikes(base_offset: int, count: int) -> Iterator[bytes]:
    """Batches as they stand in a log, to be put into a payload."""
    for offset in range(base_offset, base_offset + count):
        _, batch = make_batch([b"forged"])
        stamp(batch, offset, 0, 1)
        yield bytes(batch)


@pytest.mark.parametrize("destroyed", [1, 28, HEADER_SIZE], ids=["a-bit", "what-header_crc-covers", "the-header"])
def test_batch_inside_a_payload_is_never_taken_for_one(destroyed: int) -> None:
    """Offsets that would fit, before and behind: still only the chain to the log's end counts."""
    for forged_count in (1, 3):
        payload = b"".join(look_alikes(5, forged_count))
        disk = MemoryDisk()
        _, log = open_log(disk)
        log.append([make_batch([value(0)])], log.last_epoch)
        log.append([make_batch([payload, b"more"])], log.last_epoch)
        for offset in range(3, 6):
            log.append([make_batch([value(offset)])], log.last_epoch)
        position = check_batch(disk.bytes_of(segment(0))).length
        data = disk.bytes_of(segment(0))
        data[position : position + destroyed] = bytes(byte ^ 255 for byte in data[position : position + destroyed])
        _, log = open_log(disk.after_kill())
        expected: dict[int, bytes | None] = {0: value(0), 1: None, 2: None}
        assert served(log) == expected | {offset: value(offset) for offset in range(3, 6)}


# --- what stands beside the segments ---------------------------------------------------------------------------------


def files_beside(clean: bool) -> list[Path]:
    names = [name for name in _image(clean).names(FOLDER) if not name.endswith(".log")]
    assert {Path(name).suffix for name in names} == {".index", ".producers", ""}
    return [FOLDER / name for name in names]


def check_nothing_lost(disk: MemoryDisk) -> None:
    _, log = open_log(disk)
    assert log.start_offset == START
    assert served(log) == good()
    assert log.reader.offset_for_timestamp(PER_SEGMENT) == (PER_SEGMENT, PER_SEGMENT)
    (again,) = log.append([numbered(END - RECORDS, RECORDS, 8, producer=(PRODUCER, 0, END - RECORDS))], log.last_epoch)
    assert isinstance(again, Appended)
    assert again.base_offset == END - RECORDS
    (new,) = log.append([numbered(END, RECORDS, 8, producer=(PRODUCER, 0, END))], log.last_epoch)
    assert isinstance(new, Appended)
    assert new.base_offset == END


@CLEAN_OR_KILLED
def test_bit_flipped_at_any_byte_beside_the_segments_costs_nothing(clean: bool) -> None:
    for path in files_beside(clean):
        for at in range(_image(clean).file_size(path)):
            disk = damaged_copy(clean)
            disk.bytes_of(path)[at] ^= 1 << at % 8
            check_nothing_lost(disk)


@CLEAN_OR_KILLED
def test_file_beside_the_segments_cut_or_gone_costs_no_record(clean: bool) -> None:
    for path in files_beside(clean):
        size = _image(clean).file_size(path)
        for length in range(0, size, 3):
            disk = damaged_copy(clean)
            del disk.bytes_of(path)[length:]
            if path.name == "checkpoint" and length < size // 2 - 1:
                # Not even one of its two copies: with it goes the record of which records were deleted.
                _, log = open_log(disk)
                assert served(log) == good() | {0: value(0)}
            else:
                check_nothing_lost(disk)
        if path.name != "checkpoint":
            disk = damaged_copy(clean)
            disk.unlink(path)
            check_nothing_lost(disk)


def test_bit_flipped_at_any_byte_of_meta_still_tells_whose_it_is() -> None:
    disk = MemoryDisk()
    LogDirectory(PATH, disk=disk).claim("a-cluster", 3)
    for at in range(disk.file_size(PATH / "meta")):
        damaged = disk.after_kill()
        damaged.bytes_of(PATH / "meta")[at] ^= 1 << at % 8
        LogDirectory(PATH, disk=damaged).claim("a-cluster", 3)


@pytest.mark.parametrize("gone", BASES[1:])
def test_missing_segment_is_reported_as_damage(gone: int) -> None:
    disk = damaged_copy(True)
    disk.unlink(segment(gone))
    _, log = open_log(disk)
    assert served(log) == good(*range(gone, gone + PER_SEGMENT))
    check_goes_on(disk.after_kill(), good(*range(gone, gone + PER_SEGMENT)))


@pytest.mark.parametrize("base", BASES)
def test_header_that_goes_bad_under_a_running_log_is_found_by_the_reader(base: int) -> None:
    for position, header in batches_of(True, base):
        disk = damaged_copy(True)
        _, log = open_log(disk)
        disk.bytes_of(segment(base))[position + 3] ^= 2
        assert served(log) == good(*range(header.base_offset, header.end_offset))
        with pytest.raises(CorruptBatch) as caught:
            log.reader.read(header.end_offset - 1, 1)
        assert caught.value.facts["offset"] == header.base_offset
        assert caught.value.facts["end_offset"] == header.end_offset
        if position:
            with log.reader.read(header.base_offset - 1, 1 << 20) as found:
                assert found.position + found.length == position  # a slice ends before what is known to be damaged
