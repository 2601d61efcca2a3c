"""Up to where readers may read: what is flushed, what is hidden, and that the end never goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.replica.partition import Partition
from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from broker.storage.reader import Reader, View
from kafkalog.clock import ManualClock
from kafkalog.errors import OffsetOutOfRange
from kafkalog.zk.registry import PartitionState
from tests.broker.replica.partitions import open_partition
from tests.broker.replica.test_staged_writes import batch, write
from tests.broker.storage.batches import numbered, read_all, topic

WAIT_SECONDS = 60.0
BATCH, OTHER = (1 << 62, 0), (1 << 62 | 1, 0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data", clock=ManualClock())
    yield opened
    opened.close()


@pytest.fixture
def partition(directory: LogDirectory) -> Iterator[Partition]:
    opened = open_partition(directory)
    yield opened
    opened.close()


def fill(log: Log, count: int) -> None:
    for _ in range(count):
        log.append([numbered(log.end_offset)], log.last_epoch)


def truncated(partition: Partition, offset: int) -> int:
    """Cut a partition that goes on leading; returns its end."""
    end_offset = partition.following.truncate_to(offset)
    partition.log.begin_epoch(partition.role.epoch)
    return end_offset


def test_flushed_visibility_shows_records_only_once_they_are_flushed(directory: LogDirectory) -> None:
    settings = topic(flush_messages=1000, flush_visibility="flushed")
    partition = open_partition(directory, settings)
    log = partition.log
    fill(log, 2)
    assert (partition.readable_end_offset, partition.end_offset) == (0, 2)
    with partition.read(0, 1000, None) as found:
        assert found.length == 0
    with log.reader.read(0, 10_000) as found:
        assert found.length > 0  # a replica may
    assert partition.offset_for_timestamp(0) is None
    log.flush()
    fill(log, 1)
    partition.update_settings(settings.with_({"retention.bytes": 1 << 30}))
    assert partition.readable_end_offset == 2
    assert list(read_all(partition)) == [0, 1]
    with pytest.raises(OffsetOutOfRange, match=r"outside \[0, 2\]"):
        partition.delete_before(3)
    partition.update_settings(topic())
    assert partition.readable_end_offset == 3
    assert partition.delete_before(-1) == 3
    partition.close()


def test_a_readers_end_does_not_go_back_when_flushed_visibility_is_set(partition: Partition) -> None:
    log = partition.log
    fill(log, 20)
    partition.update_settings(topic(flush_ms=1000, flush_visibility="flushed"))
    assert (partition.readable_end_offset, log.flushed_offset) == (20, 0)
    fill(log, 2)
    assert partition.readable_end_offset == 20  # the rule holds for what comes since
    log.flush()
    assert partition.readable_end_offset == 22


def test_the_end_is_known_where_readers_have_seen_it_before_flushed_visibility_is_set(partition: Partition) -> None:
    fill(partition.log, 20)
    two = PartitionState(0, partition.role.epoch + 1, (0,), (), {0: "here"}, 1)
    partition.role.lead(two, [0, 1])
    assert partition.end_for_readers() == 20
    partition.update_settings(topic(flush_ms=100_000, flush_visibility="flushed"))
    assert partition.log.flushed_offset == 0
    assert partition.end_for_readers() == 20


def test_what_is_appended_after_a_truncation_is_not_shown_for_what_was_there_before(directory: LogDirectory) -> None:
    partition = open_partition(directory)
    fill(partition.log, 20)
    partition.update_settings(topic(flush_ms=1000, flush_visibility="flushed"))
    assert truncated(partition, 10) == partition.readable_end_offset == 10
    fill(partition.log, 2)
    assert partition.readable_end_offset == 10
    partition.close()


def test_a_truncation_takes_along_what_was_hidden_behind_it(partition: Partition) -> None:
    log, applier = partition.log, partition._applier
    fill(log, 5)
    applier.hide(BATCH)
    applier.hide(OTHER, 3)
    fill(log, 5)
    applier._show_once_flushed(BATCH, 10)
    applier._show_once_flushed(OTHER, 10)
    truncated(partition, 4)
    fill(log, 10)
    log.flush()
    applier.flushed()
    assert partition.readable_end_offset == 3, "of the other a record is left, and the rest of it is to come"
    applier._show(OTHER)
    assert partition.readable_end_offset == 14


def test_a_truncation_to_where_a_hidden_batch_begins_takes_all_of_it_along(partition: Partition) -> None:
    fill(partition.log, 2)
    partition._applier.hide(BATCH)
    fill(partition.log, 2)
    assert truncated(partition, 2) == 2
    fill(partition.log, 1)
    assert partition.readable_end_offset == 3


def test_a_log_that_was_another_partition_s_shows_what_it_did_and_no_batch_that_is_not_synced(
    directory: LogDirectory,
) -> None:
    first = open_partition(directory)
    fill(first.log, 20)
    flushed = topic(flush_ms=100_000, flush_visibility="flushed", retention_ms=1000)
    first.update_settings(flushed)
    prepared = write(first, 0, [batch(0)])
    first.staged.apply("x", prepared.producer_id, 0, prepared.commit_uuid)
    assert first.readable_end_offset == 20
    first.close()
    altered = flushed.with_({"retention.ms": None})
    second = open_partition(directory, altered)
    assert second.log is first.log
    assert second.readable_end_offset == second.log.flushed_offset == 21
    assert second.log.settings.given() == altered.given()
    second.close()


def test_what_is_hidden_begins_where_the_first_hidden_batch_does(partition: Partition) -> None:
    log, applier = partition.log, partition._applier
    fill(log, 2)
    applier.hide(BATCH)
    applier.hide(OTHER, 1)  # as one that a start finds half there
    fill(log, 3)
    applier.hide(BATCH, 0)  # it is hidden already, and stays where it is
    assert partition.readable_end_offset == 1
    applier._show(OTHER)
    assert partition.readable_end_offset == 2
    applier._show(BATCH)
    assert partition.readable_end_offset == 5


def test_nothing_before_the_start_is_read_where_retention_took_the_beginning_of_a_hidden_batch(
    partition: Partition,
) -> None:
    log, applier = partition.log, partition._applier
    applier.hide(BATCH)
    fill(log, 3)
    log.delete_before(2)
    assert partition.readable_end_offset == 2


def test_a_whole_batch_is_shown_by_the_flush_that_reaches_its_end_and_not_by_one_before(partition: Partition) -> None:
    log, applier = partition.log, partition._applier
    applier.hide(BATCH)
    fill(log, 1)
    log.flush()
    fill(log, 1)
    applier._show_once_flushed(BATCH, 2)
    applier.flushed()  # of a flush that began before
    assert partition.readable_end_offset == 0
    log.flush()
    assert partition.readable_end_offset == 2
    applier.hide(OTHER, 0)
    applier._show_once_flushed(OTHER, 2)  # it is flushed already
    assert partition.readable_end_offset == 2


class LateView:
    """In the place of a log's reader: whoever asks for its view gets the one before something happens."""

    def __init__(self, reader: Reader, happens: Callable[[], None]) -> None:
        self._reader = reader
        self._happens: list[Callable[[], None]] = [happens]

    @property
    def view(self) -> View:
        view = self._reader.view
        while self._happens:
            self._happens.pop()()
        return view

    @view.setter
    def view(self, view: View) -> None:
        self._reader.view = view


def test_flushed_visibility_shows_nothing_unflushed_that_was_behind_a_hidden_batch(partition: Partition) -> None:
    applier = partition._applier
    fill(partition.log, 2)
    partition.log.flush()
    applier.hide(BATCH)
    fill(partition.log, 5)
    partition.update_settings(topic(flush_ms=100_000, flush_visibility="flushed"))
    applier._show(BATCH)
    assert partition.readable_end_offset == partition.log.flushed_offset == 2


def test_a_reader_that_waits_is_woken_when_written_records_become_visible(directory: LogDirectory) -> None:
    partition = open_partition(directory, topic(flush_ms=100_000, flush_visibility="flushed"))
    fill(partition.log, 1)
    woken = threading.Event()
    partition.waiters.register(woken.set)
    partition.update_settings(topic())
    assert woken.is_set() and partition.readable_end_offset == 1
    partition.close()


class EarlyChange:
    """In the place of a log's reader: something happens before the first view is taken."""

    def __init__(self, reader: Reader, happens: Callable[[], None]) -> None:
        self._reader = reader
        self._happens = [happens]

    @property
    def view(self) -> View:
        while self._happens:
            self._happens.pop()()
        return self._reader.view


def test_a_look_amid_a_batch_that_is_shown_meanwhile_does_not_end_amid_it(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, applier = partition.log, partition._applier
    fill(log, 1)
    applier.hide(BATCH)
    fill(log, 2)  # of the batch's four records

    def finish() -> None:
        fill(log, 2)
        log.flush()
        applier._show(BATCH)

    monkeypatch.setattr(partition._readable_end, "_reader", LateView(log.reader, finish))
    assert partition.readable_end_offset == 5


def test_a_look_amid_the_change_to_flushed_visibility_shows_nothing_that_came_after_it(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(partition.log, 1)

    def change() -> None:
        partition.update_settings(topic(flush_ms=1000, flush_visibility="flushed"))
        fill(partition.log, 1)

    monkeypatch.setattr(partition._readable_end, "_reader", EarlyChange(partition.log.reader, change))
    assert partition.readable_end_offset == 1


class BetweenLocks:
    """In the place of a lock: something happens just before it is taken."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._happens()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("change", ["hide", "flushed visibility is set"])
def test_an_append_that_comes_amid_a_change_is_not_shown_and_hidden_again(
    partition: Partition, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, applier = partition.log, partition._applier
    fill(log, 3)
    seen: list[int] = []
    appending = threading.Thread(target=fill, args=(log, 1))

    def append_and_look() -> None:
        appending.start()
        appending.join(0.2)
        seen.append(partition.readable_end_offset)

    if change == "hide":
        applier._lock = BetweenLocks(append_and_look)  # type: ignore[assignment]
        applier.hide(BATCH)
    else:
        monkeypatch.setattr(partition._readable_end, "_reader", LateView(log.reader, append_and_look))
        partition.update_settings(topic(flush_ms=1000, flush_visibility="flushed"))
    appending.join(WAIT_SECONDS)
    assert log.end_offset == 4
    assert partition.readable_end_offset >= seen[0] == 3
