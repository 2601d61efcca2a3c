from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.storage.checkpoint import seal, write_atomic
from broker.storage.disk import Disk
from broker.storage.epochs import EPOCHS_NAME, LeaderEpochs, read_epochs
from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from kafkalog.errors import FencedLeaderEpoch, NotLeader
from kafkalog.zk.registry import PartitionState
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import TOPIC_ID, make_batch, numbered, read_all, topic

ENTRIES = [(0, 0), (2, 10), (3, 10), (5, 30)]


class Restarted:
    """A log that is killed and opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory: LogDirectory | None = None

    def open(self, leader_epoch: int | None = None) -> Log:
        self.kill()
        self._directory = LogDirectory(self._path)
        return self._directory.open_log(TOPIC_ID, 0, "t-0", topic(), leader_epoch)

    def kill(self) -> None:
        if self._directory is not None:
            self._directory.close(clean=False)


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Restarted]:
    found = Restarted(tmp_path)
    yield found
    found.kill()


def append(log: Log, count: int) -> None:
    log.append([numbered(log.end_offset + i) for i in range(count)], log.last_epoch)


def epochs_of(log: Log) -> list[tuple[int, int]]:
    return [(epoch, start_offset) for epoch, start_offset in log._epochs.entries]


# --- the entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found"),
    [(-1, (-1, 5)), (0, (0, 10)), (1, (0, 10)), (2, (2, 10)), (3, (3, 30)), (4, (3, 30)), (5, (5, 40)), (9, (5, 40))],
)
def test_epoch_ends_where_the_next_one_begins_or_the_log_ends(asked: int, found: tuple[int, int]) -> None:
    assert LeaderEpochs(ENTRIES).end_of(asked, 5, 40) == found


@pytest.mark.parametrize(
    ("start", "left"),
    [
        (0, ENTRIES),
        (4, [(0, 4), (2, 10), (3, 10), (5, 30)]),
        (10, [(0, 10), (2, 10), (3, 10), (5, 30)]),
        (11, [(3, 11), (5, 30)]),
        (30, [(3, 30), (5, 30)]),
        (99, [(5, 99)]),
    ],
)
def test_entries_before_the_start_become_one_that_holds_there(start: int, left: list[tuple[int, int]]) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.start_at(start)
    assert epochs.entries == left
    assert epochs.last == 5 and epochs.is_saved


@pytest.mark.parametrize(("end", "left"), [(31, 4), (30, 3), (29, 3), (11, 3), (10, 1), (1, 1), (0, 0)])
def test_truncation_drops_what_began_at_its_end_too(end: int, left: int) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.truncate_to(end)
    assert epochs.entries == ENTRIES[:left]
    assert epochs.is_saved == (left == 4)
    assert epochs.last == (ENTRIES[left - 1][0] if left else -1)


@pytest.mark.parametrize(("end", "left"), [(30, 4), (29, 3), (10, 3), (9, 1), (0, 1)])
def test_log_that_ends_earlier_keeps_what_began_at_its_end(end: int, left: int) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.end_at(end)
    assert epochs.entries == ENTRIES[:left]
    assert epochs.is_saved == (left == 4)


def test_file_comes_back(tmp_path: Path) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.begin(7, 30)
    assert not epochs.is_saved
    epochs.save(Disk(), tmp_path, "t-0")
    assert epochs.is_saved
    found = read_epochs(Disk(), tmp_path)
    assert found is not None and found.is_saved and found.entries == [*ENTRIES, (7, 30)]


@pytest.mark.parametrize(
    "epochs", [None, 3, [[0]], [["x", 0]], [[0, 0], [0, 5]], [[0, 0], [2, 5], [1, 5]], [[0, 5], [1, 4]]]
)
def test_file_of_another_shape_counts_as_damaged(tmp_path: Path, epochs: object) -> None:
    write_atomic(Disk(), tmp_path / EPOCHS_NAME, seal({"epochs": epochs}))
    assert read_epochs(Disk(), tmp_path) is None


# --- of a log --------------------------------------------------------------------------------------------------------


def test_epochs_outlive_a_kill_also_those_without_records(restarted: Restarted) -> None:
    log = restarted.open(0)
    append(log, 3)
    log.begin_epoch(4)
    log.begin_epoch(4)
    log.begin_epoch(6)
    append(log, 2)
    log.begin_epoch(7)
    assert log.last_epoch == 7
    expected = [(0, 0), (4, 3), (6, 3), (7, 5)]
    assert epochs_of(log) == expected
    log = restarted.open()
    assert epochs_of(log) == expected
    assert [log.epoch_end(epoch) for epoch in (0, 3, 5, 6, 7, 8)] == [(0, 3), (0, 3), (4, 3), (6, 5), (7, 5), (7, 5)]


def test_epoch_is_on_disk_before_its_first_batch_and_a_log_without_appends_has_no_file(restarted: Restarted) -> None:
    log = restarted.open(3)
    assert log.last_epoch == 3
    assert not (log.directory / EPOCHS_NAME).exists()
    append(log, 1)
    found = read_epochs(Disk(), log.directory)
    assert found is not None and found.entries == [(3, 0)]


def test_follower_has_no_epoch_before_its_first_batch_and_appends_nothing(restarted: Restarted) -> None:
    log = restarted.open()
    assert (log.last_epoch, log.epoch_end(5)) == (-1, (-1, 0))
    for epoch in (-1, 0):
        with pytest.raises(FencedLeaderEpoch, match=f"leader epoch {epoch} of t-0 is not the current one, -1"):
            log.append([numbered(0)], epoch)
    log.begin_epoch(2)
    append(log, 1)
    assert epochs_of(log) == [(2, 0)]


def test_append_in_another_epoch_is_refused_and_so_is_the_beginning_of_an_older_one(restarted: Restarted) -> None:
    log = restarted.open(1)
    append(log, 1)
    log.begin_epoch(3)
    for epoch in (1, 2, 4):
        with pytest.raises(FencedLeaderEpoch):
            log.append([numbered(1)], epoch)
        with pytest.raises(FencedLeaderEpoch):
            log.append_decided([make_batch([b"x"], producer=(8, 0, 0), transaction=(0, 0))], epoch)
    with pytest.raises(FencedLeaderEpoch):
        log.begin_epoch(2)
    assert (log.end_offset, log.last_epoch) == (1, 3)
    log.truncate_to(1)  # it follows now: epoch 3 had no records
    assert epochs_of(log) == [(1, 0)]
    for epoch in (1, 3):
        with pytest.raises(FencedLeaderEpoch):
            log.append([numbered(1)], epoch)
    log.begin_epoch(5)
    append(log, 1)
    assert epochs_of(log) == [(1, 0), (5, 1)]


def test_partition_whose_epoch_is_over_does_not_lead(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    partition = open_partition(directory, leader_epoch=1)
    partition.append_as_leader([numbered(0)])
    partition.log.begin_epoch(2)
    with pytest.raises(NotLeader):
        partition.append_as_leader([numbered(1)])
    partition.role.lead(PartitionState.only(0, "here", 3), [0])
    partition.append_as_leader([numbered(1)])
    assert epochs_of(partition.log) == [(1, 0), (2, 1), (3, 1)]
    partition.role.follow(1, 2)  # it is over too
    assert (partition.role.leads, partition.role.epoch) == (True, 3)
    directory.close()


def test_truncation_to_the_exact_end_forgets_an_epoch_without_records_for_good(restarted: Restarted) -> None:
    log = restarted.open(0)
    append(log, 3)
    log.begin_epoch(4)
    assert log.truncate_to(3) == 3
    assert epochs_of(log) == [(0, 0)]
    assert epochs_of(restarted.open()) == [(0, 0)]


def test_truncation_within_a_batch_forgets_an_epoch_that_began_with_it(restarted: Restarted) -> None:
    log = restarted.open(0)
    append(log, 3)
    log.begin_epoch(1)
    log.append([numbered(3, 5)], 1)
    assert log.truncate_to(6) == 3
    assert epochs_of(log) == [(0, 0)]
    assert log.truncate_to(0) == 0
    assert (log.last_epoch, log.epoch_end(0)) == (-1, (-1, 0))


def test_deletions_move_the_first_entry_to_the_start(restarted: Restarted) -> None:
    log = restarted.open(0)
    for epoch in (1, 2, 3):
        append(log, 20)
        log.begin_epoch(epoch)
    log.delete_before(30)
    expected = [(1, 30), (2, 40), (3, 60)]
    assert epochs_of(log) == expected
    assert log.epoch_end(0) == (-1, 30)
    log = restarted.open()
    assert epochs_of(log) == expected
    log.delete_before(60)
    assert epochs_of(log) == [(2, 60), (3, 60)]
    assert log.epoch_end(2) == (2, 60), "a follower whose log ends there is not behind"


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_lost_file_is_rebuilt_from_the_batches(
    restarted: Restarted, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    log = restarted.open(0)
    for epoch in (1, 2, 3, 4):
        append(log, 25)
        log.begin_epoch(epoch)
    assert len(log.view.segments) > 3
    log.checkpoint()
    file = log.directory / EPOCHS_NAME
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    expected = [(0, 0), (1, 25), (2, 50), (3, 75)]  # nothing else shows epoch 4
    log = restarted.open()
    assert epochs_of(log) == expected
    assert len(read_all(log)) == 100
    assert caplog.text.count("leader_epochs_rebuilt") == 1
    assert epochs_of(restarted.open()) == expected
    assert caplog.text.count("leader_epochs_rebuilt") == 1


def test_file_that_lacks_the_epoch_of_the_last_batch_is_rebuilt(restarted: Restarted) -> None:
    log = restarted.open(0)
    append(log, 2)
    old = (log.directory / EPOCHS_NAME).read_bytes()
    log.begin_epoch(1)
    append(log, 2)
    (log.directory / EPOCHS_NAME).write_bytes(old)
    assert epochs_of(restarted.open()) == [(0, 0), (1, 2)]


def test_new_log_has_lost_no_file(restarted: Restarted, caplog: pytest.LogCaptureFixture) -> None:
    restarted.open(0)
    restarted.open()
    assert "leader_epochs_rebuilt" not in caplog.text


def test_epochs_of_records_that_a_power_cut_took_are_forgotten_for_good(restarted: Restarted) -> None:
    log = restarted.open(0)
    append(log, 3)
    size = log.view.size_bytes
    append(log, 2)
    log.begin_epoch(1)
    append(log, 1)
    log.begin_epoch(2)
    with open(log.directory / f"{0:020d}.log", "r+b") as file:
        file.truncate(size)
    log = restarted.open()
    assert (log.end_offset, epochs_of(log)) == (3, [(0, 0)])
    log.begin_epoch(0)
    append(log, 5)  # to offsets at which, the old file said, epochs 1 and 2 began
    assert epochs_of(restarted.open()) == [(0, 0)]
