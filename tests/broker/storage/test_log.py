from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from broker.config import TopicSettings
from broker.storage import log as log_module
from broker.storage.disk import Disk
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from broker.storage.producer_state import ProducersSnapshot
from broker.storage.reader import reach
from broker.storage.segment import Hint, Segment
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    Closed,
    CorruptBatch,
    DiskFull,
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProducerFenced,
    TooManyProducers,
)
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, read_all, read_batches, topic, values_of
from tests.waiting import waited_for
from tests.whole_batch import check_batch

WAIT_SECONDS = 50


class CountingDisk(Disk):
    """Counts writes and syncs of files."""

    def __init__(self) -> None:
        self.writes = self.syncs = 0
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.syncing = threading.Event()

    def write(self, fd: int, buffers: object, position: int) -> int:
        self.writes += 1
        return super().write(fd, buffers, position)  # type: ignore[arg-type]

    def sync(self, fd: int) -> None:
        self.syncing.set()
        assert self.may_sync.wait(WAIT_SECONDS)
        self.syncs += 1
        super().sync(fd)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


@pytest.fixture
def directory(tmp_path: Path, disk: CountingDisk, clock: ManualClock) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data", disk=disk, clock=clock, check_interval_ms=3_600_000)
    yield opened
    opened.close()


def open_log(directory: LogDirectory, settings: TopicSettings | None = None, leader_epoch: int = 0) -> Log:
    opened = directory.open_log(TOPIC_ID, 0, "t-0", settings or topic(), leader_epoch)
    opened.begin_epoch(opened.last_epoch)  # saves the epoch, which the first append would sync otherwise
    return opened


def truncate(log: Log, offset: int) -> int:
    """Truncate as a follower, and go on as the leader of the next epoch."""
    end_offset = log.truncate_to(offset)
    log.begin_epoch(log.last_epoch + 1)
    return end_offset


def fill(log: Log, count: int) -> None:
    for offset in range(log.end_offset, log.end_offset + count):
        log.append([numbered(offset)], log.last_epoch)


# --- appending -------------------------------------------------------------------------------------------------------


def test_batches_get_offsets_epoch_and_time_in_one_write(
    directory: LogDirectory, disk: CountingDisk, clock: ManualClock
) -> None:
    log = open_log(directory, leader_epoch=3)
    log.append([numbered(0, 2)], log.last_epoch)
    clock.advance(1)
    writes = disk.writes
    outcomes = log.append([numbered(2, 3), numbered(5), numbered(6, 2)], log.last_epoch)
    assert disk.writes == writes + 1
    now = clock.now_us()
    assert outcomes == [Appended(2, 5, now), Appended(5, 6, now), Appended(6, 8, now)]
    headers = [header for header, _ in read_batches(log, 2)]
    assert [(h.base_offset, h.leader_epoch, h.append_timestamp_us) for h in headers] == [
        (2, 3, now), (5, 3, now), (6, 3, now),
    ]  # fmt: skip
    log.begin_epoch(4)
    log.append([numbered(8)], log.last_epoch)
    assert read_batches(log, 8)[0][0].leader_epoch == 4


def test_leader_epoch_never_falls_behind_that_of_the_log(tmp_path: Path) -> None:
    """Where the cluster's state was lost and counts from 0 again, recovery must still believe what is appended."""
    for epoch, stamped in ((5, 5), (0, 5), (6, 6), (1, 6)):
        directory = LogDirectory(tmp_path)
        log = open_log(directory, leader_epoch=epoch)
        assert log.last_epoch == stamped
        fill(log, 1)
        assert read_batches(log, log.end_offset - 1)[0][0].leader_epoch == stamped
        directory.close(clean=False)
    log = open_log(LogDirectory(tmp_path))
    assert list(read_all(log)) == [0, 1, 2, 3]


def test_call_that_fills_segments_is_split_at_their_ends(directory: LogDirectory) -> None:
    log = open_log(directory)
    log.append([numbered(offset) for offset in range(60)], log.last_epoch)
    log.flush()
    sizes = {path.name: path.stat().st_size for path in log.directory.glob("*.log")}
    assert len(sizes) > 3
    assert max(sizes.values()) <= 4096
    assert read_all(log) == {offset: b"%020d" % offset for offset in range(60)}


def test_batch_larger_than_a_segment_gets_one_of_its_own(directory: LogDirectory) -> None:
    log = open_log(directory)
    log.append([numbered(0), numbered(1, 3, 3000), numbered(4)], log.last_epoch)
    names = sorted(path.name for path in log.directory.iterdir() if path.suffix in (".log", ".next"))
    assert names == [f"{0:020d}.log", f"{1:020d}.next", f"{4:020d}.next"]  # none is known to be synced
    log.flush()
    names = sorted(path.name for path in log.directory.glob("*.log"))
    assert names == [f"{offset:020d}.log" for offset in (0, 1, 4)]
    assert len(read_all(log)) == 5


def test_refused_batch_takes_those_of_its_producer_behind_it_and_no_other(directory: LogDirectory) -> None:
    log = open_log(directory)
    outcomes = log.append(
        [
            numbered(0, producer=(7, 0, 0)),
            numbered(1, producer=(7, 0, 2)),  # a gap
            numbered(2, producer=(8, 0, 0)),
            numbered(3, producer=(7, 0, 3)),
            numbered(4, producer=(7, 0, 0)),  # the first again
            numbered(5),
            numbered(6, producer=(7, 0, 1)),  # what was missing
        ],
        log.last_epoch,
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Appended, OutOfOrderSequence, Appended, OutOfOrderSequence, Appended, Appended, Appended]
    found = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    assert [outcome.base_offset for outcome in found] == [0, 1, 0, 2, 3]
    assert [int(value or b"") for value in read_all(log).values()] == [0, 2, 5, 6]


def test_one_append_of_many_new_producers_keeps_the_limit(tmp_path: Path, clock: ManualClock) -> None:
    directory = LogDirectory(tmp_path, clock=clock, producer_state_max=5)
    log = open_log(directory, topic(segment_bytes=1 << 20))

    def append(*producers: int) -> list[bool]:
        """Whether the first batch of each was taken."""
        outcomes = log.append([make_batch([b"x"], producer=(producer, 0, 0)) for producer in producers], log.last_epoch)
        return [isinstance(outcome, Appended) for outcome in outcomes]

    assert append(*range(8)) == [True] * 5 + [False] * 3
    assert len(log._producers) == 5
    clock.advance(301)  # they are silent for long enough to be forgotten
    known = make_batch([b"y"], producer=(0, 0, 1))
    strangers = [make_batch([b"x"], producer=(producer, 0, 0)) for producer in range(10, 16)]
    outcomes = log.append([known, *strangers], log.last_epoch)
    assert [isinstance(outcome, Appended) for outcome in outcomes] == [True] * 5 + [False] * 2
    assert isinstance(outcomes[5], TooManyProducers)
    assert len(log._producers) == 5
    (again,) = log.append([make_batch([b"y"], producer=(0, 0, 1))], log.last_epoch)
    assert again == outcomes[0]
    directory.close()


def test_producers_are_remembered_over_a_restart_clean_or_not(tmp_path: Path) -> None:
    for clean in (True, False, True):
        directory = LogDirectory(tmp_path)
        log = open_log(directory)
        sequence = log.end_offset
        first = numbered(sequence, 2, producer=(7, 0, sequence))
        assert [outcome.base_offset for outcome in log.append([first], log.last_epoch)] == [sequence]  # type: ignore[union-attr]
        directory.close(clean)
        directory = LogDirectory(tmp_path)
        log = open_log(directory)
        (again,) = log.append([first], log.last_epoch)
        assert again.base_offset == sequence  # type: ignore[union-attr]
        directory.close(clean)


def test_producer_state_outlives_the_records_it_is_made_from(directory: LogDirectory) -> None:
    log = open_log(directory)
    log.append([numbered(0, producer=(7, 1, 0))], log.last_epoch)
    fill(log, 40)
    log.delete_before(log.end_offset)
    directory.close()
    log = open_log(LogDirectory(directory.path))
    assert [type(o) for o in log.append([numbered(1, producer=(7, 0, 1))], log.last_epoch)] == [ProducerFenced]
    assert [type(o) for o in log.append([numbered(1, producer=(7, 1, 1))], log.last_epoch)] == [Appended]


def test_closed_log_says_so(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 1)
    held = log.reader.read(0, 1)
    directory.close()
    assert check_batch(held.read()).base_offset == 0
    held.close()
    for action in (
        lambda: log.append([numbered(1)], log.last_epoch),
        lambda: log.reader.read(0, 1),
        log.flush,
        log.apply_retention,
    ):
        with pytest.raises(Closed, match="log of t-0 is closed"):
            action()


# --- reading ---------------------------------------------------------------------------------------------------------


def test_read_is_one_segment_and_its_hint_leads_on(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 50)
    offset, hint, got = 0, None, []
    while offset < 50:
        with log.reader.read(offset, 900, hint) as found:
            assert os.fstat(found.fileno()).st_size >= found.position + found.length
            data = found.read()
            position = 0
            while len(data) - position >= 24:
                length = int.from_bytes(data[position + 8 : position + 12], "little")
                if position + length > len(data):
                    break
                header = check_batch(data[position : position + length])
                got += [value for _, value in values_of(header, data[position : position + length])]
                offset, position = header.end_offset, position + length
            hint = Hint(found.segment_base_offset, found.position + position)
    assert got == [b"%020d" % offset for offset in range(50)]


def test_read_ends_where_a_batch_starts_for_readers_discard_one_that_is_cut(directory: LogDirectory) -> None:
    log = open_log(directory, topic(segment_bytes=1 << 20))
    for first in range(0, 40, 4):
        log.append([numbered(first, 4, size=200)], log.last_epoch)
    with log.reader.read(4, 1 << 20) as rest:
        batch_length = rest.length // 9
    for max_bytes in (1, batch_length, 3 * batch_length - 1, 3 * batch_length):
        with log.reader.read(4, max_bytes) as found:
            assert found.length == max(batch_length, max_bytes // batch_length * batch_length)


def test_offset_outside_is_refused_with_the_limits(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 10)
    log.delete_before(4)
    for offset in (3, 11):
        with pytest.raises(OffsetOutOfRange, match=rf"offset {offset} of t-0 is outside \[4, 10\]"):
            log.reader.read(offset, 1)
    with log.reader.read(10, 1) as found:
        assert found.length == 0 and found.read() == b""


def test_reads_continue_while_segments_roll_and_are_deleted(tmp_path: Path) -> None:
    """Readers see consecutive, right records, or are told that retention was faster; slices stay whole."""
    directory = LogDirectory(tmp_path)
    log = open_log(directory, topic(retention_bytes=12_000))
    stop, failures, reads = threading.Event(), [], itertools.count()

    def read() -> None:
        offset = 0
        try:
            while not stop.is_set() or offset < log.end_offset:
                try:
                    with log.reader.read(offset, 2000) as held:
                        batch_at = 0
                        data = held.read()
                        assert len(data) == held.length
                    if not data:
                        stop.wait(0.001)
                    while len(data) - batch_at > 96:
                        length = int.from_bytes(data[batch_at + 8 : batch_at + 12], "little")
                        if batch_at + length > len(data):
                            break
                        header = check_batch(data[batch_at : batch_at + length])
                        assert header.base_offset == offset
                        (value,) = [v for _, v in values_of(header, data[batch_at : batch_at + length])]
                        assert value == b"%020d" % offset
                        offset, batch_at = header.end_offset, batch_at + length
                        next(reads)
                except OffsetOutOfRange:
                    assert offset < log.start_offset
                    offset = log.start_offset
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        log.append([numbered(offset) for offset in range(log.end_offset, log.end_offset + 20)], log.last_epoch)
        log.apply_retention()
    stop.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    directory.close()
    assert not failures
    assert next(reads) > 500
    assert log.start_offset > 0


def test_slice_of_a_deleted_segment_still_has_its_bytes(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 40)
    held = log.reader.read(0, 500)
    assert log.delete_before(40) == 40
    assert not (log.directory / f"{0:020d}.log").exists()
    with held:
        assert check_batch(held.read()).base_offset == 0


# --- times -----------------------------------------------------------------------------------------------------------


def test_time_is_found_to_the_batch_and_not_before_the_start(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(0, 60, 3):
        log.append(
            [numbered(offset, 3, timestamps_us=[offset * 10, offset * 10 + 25, offset * 10 + 10])], log.last_epoch
        )
    log.append([numbered(60, 3, timestamps_us=700)], log.last_epoch)
    find = log.reader.offset_for_timestamp
    assert find(-1) == (0, None)
    assert find(324) == find(325) == (30, None)
    assert find(326) == (33, None)
    assert find(596) == find(700) == (60, 700)  # one time for all of them: there is nothing to look for
    assert find(701) is None
    log.delete_before(41)
    assert find(0) == (41, None)
    log.delete_before(61)
    assert find(0) == (61, 700)


def test_time_is_looked_for_from_an_offset_on(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(0, 60, 3):
        log.append(
            [numbered(offset, 3, timestamps_us=[offset * 10, offset * 10 + 25, offset * 10 + 10])], log.last_epoch
        )
    find = log.reader.offset_for_timestamp
    assert find(0, 31) == (31, None)
    assert find(0, 33) == (33, None)
    assert find(500, 33) == (48, None)
    assert find(500, 60) is find(500, 1 << 62) is None
    assert find(500, -1 << 62) == (48, None)


# --- flushing --------------------------------------------------------------------------------------------------------


def test_without_a_flush_policy_nothing_is_flushed(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 3)
    assert log.flushed_offset == 0
    assert not log.needs_flush_for_ack
    log.flush()
    assert log.flushed_offset == 3


def test_flush_messages_flushes_after_so_many_records(directory: LogDirectory) -> None:
    log = open_log(directory, topic(flush_messages=3))
    flushed = threading.Event()
    log.on_flushed = flushed.set
    directory.start()
    fill(log, 2)
    assert log.flushed_offset == 0
    fill(log, 1)
    assert flushed.wait(WAIT_SECONDS)
    assert log.flushed_offset == 3


def test_one_fdatasync_serves_all_that_wait(directory: LogDirectory, disk: CountingDisk) -> None:
    log = open_log(directory, topic(flush_messages=1))
    assert log.needs_flush_for_ack
    reached = threading.Event()
    log.on_flushed = lambda: reached.set() if log.flushed_offset == 10 else None
    directory.start()
    disk.may_sync.clear()
    disk.syncing.clear()
    fill(log, 1)
    assert disk.syncing.wait(WAIT_SECONDS)  # the first is on its way to the disk
    syncs = disk.syncs
    fill(log, 9)  # and these come meanwhile
    disk.may_sync.set()
    assert reached.wait(WAIT_SECONDS)
    assert disk.syncs == syncs + 2


def test_much_unflushed_is_flushed_ahead_of_the_roll(directory: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_FLUSH_AHEAD_BYTES", 1000)
    log = open_log(directory)
    flushed = threading.Event()
    log.on_flushed = flushed.set
    directory.start()
    fill(log, 2)
    assert log.flushed_offset == 0
    fill(log, 2)
    assert flushed.wait(WAIT_SECONDS)
    assert log.flushed_offset == 4


def test_what_is_decided_is_flushed_while_more_of_it_is_appended(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_FLUSH_AHEAD_DECIDED", 1000)
    log = open_log(directory)
    flushed = threading.Event()
    log.on_flushed = flushed.set
    directory.start()
    for number in range(8):
        log.append_decided([numbered(number, producer=(7, 0, number), transaction=(0, 0))], log.last_epoch)
    assert flushed.wait(WAIT_SECONDS)


def test_flush_ms_of_all_time_keeps_no_other_topic_from_its_flushes(tmp_path: Path) -> None:
    """2**63 - 1 is Kafka's default of flush.ms, which people copy."""
    directory = LogDirectory(tmp_path, check_interval_ms=(1 << 63) - 1)
    never = open_log(directory, topic(flush_ms=(1 << 63) - 1))
    soon = directory.open_log(TOPIC_ID, 1, "t-1", topic(flush_ms=5), 0)
    flushed = threading.Event()
    soon.on_flushed = lambda: flushed.set() if soon.flushed_offset == soon.end_offset else None
    directory.start()
    for _ in range(3):
        never.append([numbered(never.end_offset)], never.last_epoch)
        flushed.clear()
        soon.append([numbered(soon.end_offset)], soon.last_epoch)
        assert flushed.wait(WAIT_SECONDS)
    assert never.flushed_offset == 0
    directory.close()


def test_a_log_has_one_deadline_whatever_flushes_it_before(directory: LogDirectory) -> None:
    flusher = directory.services.flusher
    log = open_log(directory, topic(flush_ms=3_600_000, flush_messages=10))
    for _ in range(50):
        fill(log, 12)
        log.flush()
    assert len(flusher._deadlines) == 1
    log.update_settings(topic(flush_ms=1000))  # earlier counts
    log.flush()
    fill(log, 1)
    assert [waiting.at for waiting in flusher._deadlines if waiting.task] == [1.0]
    directory.remove_log(TOPIC_ID, 0)
    assert not [waiting for waiting in flusher._deadlines if waiting.task], "a deleted log is kept by its deadline"


def test_lookup_by_time_tells_damage_every_time_and_after_a_restart_too(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    for offset in range(6):
        log.append([numbered(offset, timestamps_us=100 * offset)], log.last_epoch)
    length = log.view.size_bytes // 6
    with open(log.directory / f"{0:020d}.log", "r+b") as file:
        file.seek(2 * length + 100)  # in a body
        file.write(b"\xff" * 8)

    def lookups(log: Log) -> list[object]:
        found: list[object] = []
        for when in (100, 200, 300, 500, 600):
            try:
                found.append(log.reader.offset_for_timestamp(when))
            except CorruptBatch as error:
                found.append((error.facts["offset"], error.facts["end_offset"]))
        return found

    expected: list[object] = [(1, 100), (2, 3), (2, 3), (5, 500), None]  # for the last two the index leads past it
    assert lookups(log) == expected
    assert lookups(log) == expected
    directory.close()
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    assert lookups(log) == expected
    log.delete_before(3)
    assert lookups(log) == [(3, 300), (3, 300), (3, 300), (5, 500), None]
    directory.close()


def test_lookup_by_time_does_not_continue_past_damage_that_ends_a_segment(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(4):
        log.append([numbered(offset, size=1500, timestamps_us=100 * offset)], log.last_epoch)
    log.flush()
    assert log.view.bases == (0, 2)
    for base in log.view.bases:
        with open(log.directory / f"{base:020d}.log", "r+b") as file:
            file.seek(-100, os.SEEK_END)  # in the body of its last batch
            file.write(b"\xff" * 8)
    for _ in range(2):
        for when, damaged in ((1, 1), (100, 1), (201, 3), (300, 3)):
            with pytest.raises(CorruptBatch) as caught:
                log.reader.offset_for_timestamp(when)
            assert (caught.value.facts["offset"], caught.value.facts["end_offset"]) == (damaged, damaged + 1)
        assert [log.reader.offset_for_timestamp(when) for when in (0, 101, 301)] == [(0, 0), (2, 200), None]


def test_read_of_a_log_that_is_deleted_meanwhile_finds_it_closed_not_damaged(directory: LogDirectory) -> None:
    log = open_log(directory)
    fill(log, 60)
    read = log.reader.read

    def late(*arguments: object) -> object:
        log.reader.read = read  # type: ignore[method-assign]
        directory.remove_log(TOPIC_ID, 0)
        return read(*arguments)  # type: ignore[arg-type]

    log.reader.read = late  # type: ignore[method-assign,assignment]
    with pytest.raises(Closed):
        log.reader.read(0, 100)


def test_flush_ms_flushes_in_the_background(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = open_log(directory, topic(flush_ms=20))
    directory.start()
    for round_number in (1, 2):
        reached = threading.Event()
        log.on_flushed = lambda event=reached, end=round_number: (  # type: ignore[misc]
            event.set() if log.flushed_offset == end else None
        )
        fill(log, 1)
        assert reached.wait(WAIT_SECONDS)
    directory.close()


@pytest.mark.parametrize("asked", [{"flush_messages": 1}, {"flush_ms": 3_600_000}])
def test_settings_that_ask_for_flushes_have_flushed_what_was_appended_before_them(
    directory: LogDirectory, asked: dict[str, int]
) -> None:
    log = open_log(directory)
    flushed = threading.Event()
    log.on_flushed = flushed.set
    directory.start()
    fill(log, 2)
    log.update_settings(topic(**asked))
    assert flushed.wait(WAIT_SECONDS)
    assert log.flushed_offset == 2


def test_roll_flushes_and_tells(directory: LogDirectory, clock: ManualClock) -> None:
    log = open_log(directory, topic(flush_messages=1000, segment_ms=1000))
    told = threading.Event()
    log.on_flushed = told.set
    directory.start()
    fill(log, 2)
    clock.advance(2)
    assert log.roll_if_old()
    assert told.wait(WAIT_SECONDS)
    assert log.flushed_offset == 2


def _replace_the_first_segment(log: Log) -> bool:
    first = log.view.segments[0]
    replacement = log.begin_replacement([first])
    assert replacement is not None
    replacement.append(log.read_segment(first, 0, first.size))
    replacement.complete()
    return log.replace(replacement)


@pytest.mark.parametrize(
    "saves",
    [
        Log.checkpoint,
        Log.close,
        Log.apply_retention,
        lambda log: log.delete_before(log.end_offset - 1),
        _replace_the_first_segment,
    ],
    ids=["checkpoint", "close", "retention", "deletion", "replacement"],
)
def test_who_is_told_of_a_flush_may_wait_for_a_truncation(
    directory: LogDirectory, saves: Callable[[Log], object]
) -> None:
    log = open_log(directory, topic(retention_bytes=4096))
    fill(log, 100)
    assert len(log.view.segments) > 2
    told: list[int] = []

    def on_flushed() -> None:
        truncation = threading.Thread(target=log.truncate_to, args=(log.end_offset,), daemon=True)
        truncation.start()
        truncation.join(10)
        assert not truncation.is_alive()
        told.append(log.flushed_offset)

    log.on_flushed = on_flushed
    saves(log)
    assert told == [100]


def test_a_flush_is_told_of_though_there_is_no_room_for_what_is_saved_after_it(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it would wait for the next one."""
    log = open_log(directory)
    fill(log, 2)
    told: list[int] = []
    log.on_flushed = lambda: told.append(log.flushed_offset)

    def no_room(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory.disk, "rename", no_room)
    with pytest.raises(DiskFull):
        log.checkpoint()
    assert told == [2]


# --- appends while the disk is slow ----------------------------------------------------------------------------------


def appended_meanwhile(disk: CountingDisk, log: Log, action: Callable[[], object]) -> bool:
    """Whether an append comes through while `action`, on another thread, waits for an fdatasync; both are ended."""
    disk.syncing.clear()
    disk.may_sync.clear()
    acting = threading.Thread(target=action)
    appending = threading.Thread(target=log.append, args=([numbered(1000)], log.last_epoch))
    acting.start()
    try:
        assert disk.syncing.wait(WAIT_SECONDS)
        appending.start()
        appending.join(5)
        return not appending.is_alive()
    finally:
        disk.may_sync.set()
        acting.join(WAIT_SECONDS)
        appending.join(WAIT_SECONDS)


def test_appends_that_roll_segments_wait_for_no_sync(directory: LogDirectory, disk: CountingDisk) -> None:
    log = open_log(directory)
    disk.may_sync.clear()
    appending = threading.Thread(
        target=lambda: [log.append([numbered(offset, size=1500)], log.last_epoch) for offset in range(7)]
    )
    appending.start()
    appending.join(5)
    assert not appending.is_alive()
    assert len(log.view.segments) == 4
    assert log.flushed_offset == 0
    disk.may_sync.set()
    appending.join(WAIT_SECONDS)
    log.flush()
    assert log.flushed_offset == 7
    assert not list(log.directory.glob("*.next"))
    assert len(list(log.directory.glob("*.index"))) == 3


@pytest.mark.parametrize("action", ["flush", "checkpoint", "apply_retention", "delete_before"])
def test_appends_continue_while_a_sync_of_whatever_kind_is_waited_for(
    directory: LogDirectory, disk: CountingDisk, clock: ManualClock, action: str
) -> None:
    log = open_log(directory, topic(retention_ms=1000))
    for offset in range(6):
        log.append([numbered(offset, size=1500)], log.last_epoch)
    clock.advance(2)
    actions = {"delete_before": lambda: log.delete_before(3)}
    assert appended_meanwhile(disk, log, actions.get(action, getattr(log, action)))
    # All syncs of it are waited for, not only the first.
    log.append([numbered(offset, size=1500) for offset in range(6, 10)], log.last_epoch)
    assert log.end_offset == 11
    log.flush()
    assert log.flushed_offset == 11


def test_every_sync_of_a_checkpoint_and_of_a_deletion_lets_appends_through(
    directory: LogDirectory, disk: CountingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(directory)
    blocked: list[str] = []
    real_sync, real_sync_dir = disk.sync, disk.sync_dir

    def checked(real: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(what: Any) -> None:
            if not log._lock.acquire(timeout=5):
                blocked.append(str(what))
            else:
                log._lock.release()
            real(what)

        return sync

    real_encode = ProducersSnapshot.encode
    monkeypatch.setattr(
        ProducersSnapshot, "encode", lambda self: checked(lambda _: None)("encode") or real_encode(self)
    )
    for offset in range(6):
        log.append([numbered(offset, size=1500, producer=(7, 0, offset))], log.last_epoch)
    log.append_decided([make_batch([b"x"], producer=(8, 0, 0), transaction=(1, 0))], log.last_epoch)
    monkeypatch.setattr(disk, "sync", checked(real_sync))
    monkeypatch.setattr(disk, "sync_dir", checked(real_sync_dir))
    log.checkpoint()
    log.delete_before(5)
    log.append([numbered(7, size=3500)], log.last_epoch)
    log.append([numbered(8, size=3500)], log.last_epoch)
    log.flush()
    assert not blocked


def test_segment_grows_rather_than_wait_when_no_flush_catches_up(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(40):
        log.append([numbered(offset, size=3000)], log.last_epoch)
    assert len(log.view.segments) == 9  # eight rolls that nobody synced
    log.flush()
    log.append([numbered(40, size=3000)], log.last_epoch)
    assert len(log.view.segments) == 10
    assert len(read_all(log)) == 41


def test_acks_of_a_full_segment_wait_for_its_sync(directory: LogDirectory, disk: CountingDisk) -> None:
    log = open_log(directory, topic(flush_messages=1))
    log.append([numbered(offset, size=3000) for offset in range(3)], log.last_epoch)
    assert log.flushed_offset == 0  # rolled twice, and nothing of it outlives a power cut
    disk.may_sync.clear()
    disk.syncing.clear()
    flushing = threading.Thread(target=log.flush)
    flushing.start()
    assert disk.syncing.wait(WAIT_SECONDS)
    assert log.flushed_offset == 0
    disk.may_sync.set()
    flushing.join(WAIT_SECONDS)
    assert log.flushed_offset == 3


# --- rolls, retention, cuts ------------------------------------------------------------------------------------------


def test_segment_rolls_by_age_at_the_next_append_and_in_the_background(
    directory: LogDirectory, clock: ManualClock
) -> None:
    log = open_log(directory, topic(segment_ms=1000))
    assert not log.roll_if_old()  # nothing to close
    fill(log, 1)
    clock.advance(0.9)
    fill(log, 1)
    clock.advance(0.1)
    fill(log, 1)  # the first batch is a second old: this one goes to a new segment
    log.flush()
    assert [path.name for path in sorted(log.directory.glob("*.log"))] == [f"{o:020d}.log" for o in (0, 2)]
    clock.advance(1)
    directory.tidy()
    assert (log.directory / f"{3:020d}.log").exists()


def test_retention_by_time_goes_by_the_append_time(directory: LogDirectory, clock: ManualClock) -> None:
    log = open_log(directory, topic(retention_ms=10_000, segment_ms=1000))
    for offset in range(4):
        log.append([numbered(offset, timestamps_us=1 << 60)], log.last_epoch)  # the future, says the producer
        clock.advance(3)
    assert log.apply_retention() == 1  # appended 12 s ago; the next one 9 s ago
    assert log.start_offset == 1
    clock.advance(100)
    assert log.apply_retention() == 3  # the last one too
    assert (log.start_offset, log.end_offset) == (4, 4)
    fill(log, 1)
    assert list(read_all(log)) == [4]


def test_a_wall_clock_that_steps_back_makes_no_record_old(directory: LogDirectory, clock: ManualClock) -> None:
    """A segment was as old as its last append: one in the wrong time had those before it deleted."""
    log = open_log(directory, topic(retention_ms=3_600_000))
    fill(log, 1)
    clock.jump(-86_400)
    for _ in range(2):
        fill(log, 1)
        log._roll()  # one in the segment from before, and one in a segment of its own
    clock.jump(86_400)
    clock.advance(3_600)
    log.apply_retention()
    assert list(read_all(log)) == [0, 1, 2]
    clock.advance(1)
    directory.close()
    again = LogDirectory(directory.path, clock=clock)
    log = again.open_log(TOPIC_ID, 0, "t-0", topic(retention_ms=3_600_000), None)
    log.apply_retention()
    assert list(read_all(log)) == [], "no later either"
    again.close()


def test_the_latest_time_of_a_segment_outlives_a_truncation(directory: LogDirectory, clock: ManualClock) -> None:
    log = open_log(directory, topic(index_interval_bytes=64))
    fill(log, 3)
    clock.advance(3_600)
    fill(log, 2)
    latest = clock.now_us()
    clock.jump(-86_400)
    fill(log, 2)
    log.truncate_to(6)
    assert [segment.last_append_us for segment in log.view.segments] == [latest]


def test_a_deletion_to_amid_a_segment_begins_with_whole_ones_on_a_disk_without_room(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(directory)
    for offset in range(12):
        log.append([numbered(offset, size=1000)], log.last_epoch)
    log.flush()
    first, second, *_ = [segment.path for segment in log.view.segments]
    real = directory.disk.rename

    def rename(old: Path, new: Path) -> None:
        if first.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(old, new)

    monkeypatch.setattr(directory.disk, "rename", rename)
    amid = log.view.bases[1] + 1
    assert log.delete_before(amid) == amid
    assert not first.exists() and second.exists()


def test_a_wall_clock_that_jumps_ahead_deletes_no_record_and_forgets_no_producer(
    directory: LogDirectory, clock: ManualClock
) -> None:
    log = open_log(directory, topic(retention_ms=7 * 86_400_000, retention_bytes=9000))
    fill(log, 60)
    sent = numbered(60, producer=(7, 0, 0))
    [first] = log.append([sent], log.last_epoch)
    assert isinstance(first, Appended)
    clock.jump(8 * 86_400)  # a machine that was resumed, or a wrong time server
    directory.tidy()
    assert 0 < log.start_offset < 60  # by size it deletes as ever
    [again] = log.append([numbered(60, producer=(7, 0, 0))], log.last_epoch)
    assert isinstance(again, Appended) and again.base_offset == 60
    clock.jump(-8 * 86_400)
    directory.tidy()
    assert log.end_offset == 61 and log.start_offset < 60
    clock.jump(8 * 86_400)
    directory.tidy()
    clock.advance(3600)  # it was right after all
    directory.tidy()
    assert log.start_offset == 61


def test_of_the_producers_states_the_last_two_are_kept(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(5):
        log.append([numbered(offset, producer=(7, 0, offset))], log.last_epoch)
        log.checkpoint()
    states = sorted(path.name for path in log.directory.glob("*.producers"))
    assert states == [f"{offset:020d}.producers" for offset in (4, 5)]


def test_a_flush_for_which_there_was_no_room_is_tried_again(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.storage.flusher._FULL_RETRY_SECONDS", 0.0)
    log = open_log(directory)
    real, tries = directory.disk.rename, itertools.count()

    def rename(old: Path, new: Path) -> None:
        if new.suffix == ".log" and next(tries) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(old, new)

    monkeypatch.setattr(directory.disk, "rename", rename)
    directory.start()
    for offset in range(3):
        log.append([numbered(offset, size=3000)], log.last_epoch)
    waited_for(lambda: log.flushed_offset >= 2)
    assert next(tries) > 2


def test_retention_by_size_keeps_the_last_segment(directory: LogDirectory) -> None:
    log = open_log(directory, topic(retention_bytes=9000))
    fill(log, 60)
    log.apply_retention()
    assert log.view.size_bytes <= 9000
    log.update_settings(topic(retention_bytes=0))
    log.apply_retention()
    assert len(list(log.directory.glob("*.log"))) == 1
    assert log.end_offset == 60


def test_no_index_is_saved_of_a_segment_that_was_deleted_as_it_was_synced(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(directory)
    for offset in range(4):
        log.append([numbered(offset, size=3000, producer=(7, 0, offset))], log.last_epoch)
    real, tries = directory.disk.rename, itertools.count()

    def rename(old: Path, new: Path) -> None:
        if next(tries) == 0:  # the segments are full of what is about to go; then there is room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(old, new)

    monkeypatch.setattr(directory.disk, "rename", rename)
    assert log.delete_before(3) == 3
    log.flush()
    assert log.view.bases == (3,)
    assert [path.name for path in log.directory.glob("*.index")] == []


def test_start_offset_outlives_a_restart_and_never_goes_back(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    fill(log, 5)
    assert log.delete_before(3) == 3
    assert log.delete_before(1) == 3
    directory.close(clean=False)
    log = open_log(LogDirectory(tmp_path))
    assert log.start_offset == 3
    assert list(read_all(log)) == [3, 4]


def test_truncation_cuts_back_to_the_start_of_a_batch(directory: LogDirectory) -> None:
    log = open_log(directory)
    for offset in range(0, 60, 3):
        log.append([numbered(offset, 3, producer=(7, 0, offset))], log.last_epoch)
    assert log.truncate_to(60) == 60
    assert truncate(log, 31) == 30
    assert list(read_all(log)) == list(range(30))
    (appended,) = log.append(
        [numbered(30, 2, producer=(7, 0, 30))], log.last_epoch
    )  # its producer state went back as well
    assert isinstance(appended, Appended) and appended.base_offset == 30
    assert read_all(log)[31] == b"%020d" % 31
    assert log.truncate_to(0) == 0
    assert log.view.size_bytes == 0
    with pytest.raises(OffsetOutOfRange):
        log.truncate_to(-1)


def test_what_is_saved_of_the_producers_at_the_very_end_of_a_truncation_stays(directory: LogDirectory) -> None:
    """It is true, and the segments that say the same may be deleted next."""
    log = open_log(directory)
    log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch)
    log.checkpoint()
    saved = log.directory / f"{1:020d}.producers"
    log.append([numbered(1, producer=(7, 0, 1))], log.last_epoch)
    assert truncate(log, 1) == 1
    assert saved.exists()
    assert log.truncate_to(0) == 0
    assert not saved.exists()


def test_producers_of_segments_deleted_after_a_truncation_are_remembered(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    for offset in range(60):
        log.append([numbered(offset, producer=(7, 0, offset))], log.last_epoch)
    log.checkpoint()
    assert truncate(log, 10) == 10
    fill(log, 40)
    log.flush()
    assert log.delete_before(40) == 40
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    assert log.start_offset == 40
    (appended,) = log.append([numbered(50, producer=(7, 0, 10))], log.last_epoch)
    assert isinstance(appended, Appended) and appended.base_offset == 50
    directory.close()


def test_producers_of_segments_deleted_right_after_a_truncation_are_remembered(tmp_path: Path) -> None:
    """The truncation took the saved states along: what is deleted next is the only source of them."""
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    [first] = log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch)
    fill(log, 59)
    log.checkpoint()
    assert truncate(log, 40) == 40
    assert log.delete_before(35) == 35
    assert log.view.bases[0] > 0
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    assert log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch) == [first]
    directory.close()


def test_segment_that_ends_where_a_truncation_moved_the_start_keeps_its_producers_over_a_restart(
    tmp_path: Path,
) -> None:
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    [first] = log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch)
    log.append([numbered(1, 5)], log.last_epoch)
    log.delete_before(3)
    assert truncate(log, 3) == 1  # the start of the batch
    log.append([numbered(1, size=4000)], log.last_epoch)
    assert (log.start_offset, log.view.bases) == (1, (0, 1))
    log._flush()  # without saving anything, as in a process that is killed
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    assert log.append([numbered(0, producer=(7, 0, 0))], log.last_epoch) == [first]
    assert log.apply_retention() == 1
    assert list(read_all(log)) == [1]
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    assert open_log(directory).append([numbered(0, producer=(7, 0, 0))], log.last_epoch) == [first]
    directory.close()


def test_what_rolls_knew_of_a_tail_that_was_cut_off_is_not_saved_for_that_of_its_successor(tmp_path: Path) -> None:
    """A producer whose records were cut off would be answered that they are there, and they would not be written."""
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    for offset in range(60):
        log.append([numbered(offset, producer=(7, 0, offset))], log.last_epoch)
    assert len(log.view.segments) > 3, "rolls that no flush has saved anything of"
    assert truncate(log, 10) == 10
    log.flush()
    for offset in range(10, 60):
        log.append([numbered(offset, producer=(8, 0, offset - 10))], log.last_epoch)
    log.flush()
    directory.close(clean=False)
    directory = LogDirectory(tmp_path)
    log = open_log(directory)
    assert log.end_offset == 60
    (appended,) = log.append([numbered(60, producer=(7, 0, 10))], log.last_epoch)
    assert isinstance(appended, Appended) and appended.base_offset == 60
    assert read_all(log)[60] == b"%020d" % 60
    directory.close()


def test_retention_deletes_what_a_truncation_left_before_the_start(directory: LogDirectory, clock: ManualClock) -> None:
    log = open_log(directory, topic(retention_ms=10_000))
    fill(log, 3)
    log.delete_before(1)
    assert truncate(log, 1) == 1
    clock.advance(11)
    assert log.apply_retention() == 1  # a segment whose only record is not readable: the start stays where it is
    assert (log.start_offset, log.end_offset, log.view.size_bytes) == (1, 1, 0)
    fill(log, 1)
    assert list(read_all(log)) == [1]


def test_truncation_keeps_the_greatest_time_of_what_is_left(directory: LogDirectory) -> None:
    log = open_log(directory, topic(index_interval_bytes=300))
    for offset, when in enumerate([10, 90, 20, 30, 40, 50]):
        log.append([numbered(offset, timestamps_us=when)], log.last_epoch)
    log.truncate_to(5)
    assert log.reader.offset_for_timestamp(80) == (1, 90)
    assert log.reader.offset_for_timestamp(91) is None


def test_bytes_are_counted_over_segments_and_no_further_than_what_is_visible(directory: LogDirectory) -> None:
    log = open_log(directory, topic(index_interval_bytes=64))
    ends = [0]
    for first in range(0, 40, 4):
        [appended] = log.append([numbered(first, 4, size=300)], log.last_epoch)
        assert isinstance(appended, Appended)
        ends.append(appended.end_offset)
    view = log.view
    assert len(view.segments) > 2
    size = view.size_bytes // 10
    for start in range(10):
        assert reach(view, ends[start], 1 << 62, 40) == (40, (10 - start) * size)
        for count in range(1, 11 - start):
            assert reach(view, ends[start], count * size, 40) == (ends[start + count], count * size)
            assert reach(view, ends[start], count * size + size // 2, 40) == reach(view, ends[start], count * size, 40)
        assert reach(view, ends[start], 0, 40) == (ends[start + 1], size)
    log.delete_before(22)
    assert reach(log.view, 0, size, 40) == (24, size)
    half = log.view._replace(flushed_offset=36, flushed_position=log.view.end_position - size)
    assert reach(half, 28, 1 << 62, 36) == (36, 2 * size)


@pytest.mark.parametrize("interval", [64, 1 << 16])
def test_bytes_are_counted_up_to_the_end_that_is_given_wherever_that_is(directory: LogDirectory, interval: int) -> None:
    log = open_log(directory, topic(index_interval_bytes=interval))
    for first in range(0, 40, 4):
        log.append([numbered(first, 4, size=300)], log.last_epoch)
    whole = log.view
    size = whole.size_bytes // 10
    assert len(whole.segments) > 2
    for hidden in range(0, 40, 4):
        view = log.view
        slack = max(interval // size, 0) * size + size  # an entry of the index, and a batch
        for start in range(0, 44, 4):
            reached, counted = reach(view, start, 1 << 62, hidden)
            assert reached == max(hidden, start)
            exact = max(hidden - start, 0) // 4 * size
            assert exact <= counted <= exact + (0 if interval == 64 else min(slack, whole.size_bytes))
            assert (counted > 0) == (start < hidden)
            for most in range(0, whole.size_bytes, size):
                reached, counted = reach(view, start, most, hidden)
                assert start + (start < hidden) <= reached <= max(hidden, start)
                assert (counted > 0) == (reached > start)


def test_who_waits_for_a_flush_under_way_starts_no_other(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(directory)
    log.append([numbered(0)], log.last_epoch)
    syncs: list[int] = []
    begun, may_end = threading.Event(), threading.Event()
    real = directory.disk.sync

    def sync(fd: int) -> None:
        syncs.append(fd)
        begun.set()
        assert may_end.wait(30)
        real(fd)

    monkeypatch.setattr(directory.disk, "sync", sync)
    first = threading.Thread(target=log.flush)
    first.start()
    assert begun.wait(30)
    log.append([numbered(1)], log.last_epoch)  # not what the second one waits for
    second = threading.Thread(target=log.flush_to, args=(1,))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    may_end.set()
    first.join(30)
    second.join(30)
    assert (len(syncs), log.flushed_offset) == (1, 1)


def test_roll_at_the_end_of_a_flush_under_way_leaves_no_flushed_bytes_in_the_new_segment(
    directory: LogDirectory, disk: CountingDisk
) -> None:
    log = open_log(directory, topic(flush_messages=1000))
    log.append([numbered(0, size=3000)], log.last_epoch)
    full = log.view.size_bytes
    flushing = threading.Thread(target=log.flush)
    disk.may_sync.clear()
    flushing.start()
    try:
        assert disk.syncing.wait(WAIT_SECONDS)
        log.append([numbered(1, size=3000)], log.last_epoch)
    finally:
        disk.may_sync.set()
        flushing.join(WAIT_SECONDS)
    assert log.view.bases == (0, 1)
    assert (log.flushed_offset, log._flushed_position) == (1, 0)
    assert reach(log.view, 0, 1 << 30, 1) == (1, full)


def test_index_of_a_segment_that_rolls_while_a_checkpoint_waits_for_its_flush_is_saved_whole(
    directory: LogDirectory, disk: CountingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(directory)
    fill(log, 3)
    first = log.view.segments[0]
    summed_up = threading.Event()
    summary = first.summary
    monkeypatch.setattr(first, "summary", lambda: (summary(), summed_up.set())[0])
    flushing, saving = threading.Thread(target=log.flush), threading.Thread(target=log.checkpoint)
    disk.may_sync.clear()
    flushing.start()
    try:
        assert disk.syncing.wait(WAIT_SECONDS)
        saving.start()
        assert summed_up.wait(WAIT_SECONDS)
        log.append([numbered(3, size=2000)], log.last_epoch)
        log.append([numbered(4, size=3000)], log.last_epoch)
    finally:
        disk.may_sync.set()
        flushing.join(WAIT_SECONDS)
        saving.join(WAIT_SECONDS)
    assert len(log.view.segments) == 2
    again = Segment(disk, log.directory, first.base_offset, 512)
    again.open_closed()
    size = again.size
    assert size == first.size and again.load_index() and again.size == size
