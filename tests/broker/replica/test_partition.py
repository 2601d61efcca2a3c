"""A partition over a real log: who waits is woken, once; what is closed refuses."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.config import TopicSettings
from broker.replica.leadership import Pulse
from broker.replica.partition import Partition
from broker.replica.role import Wanted
from broker.staging.format import PartSpec, PreparedSet
from broker.storage.log import Appended, Log
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import (
    DiskFull,
    FencedLeaderEpoch,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetNotAvailable,
    OutOfFiles,
    ReplicaDiverged,
    StorageFailed,
)
from kafkalog.format.batch import Batch, BatchHeader
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.zk.registry import BrokerRecord, PartitionState
from tests.broker.data_port_client import a_batch
from tests.broker.replica.partitions import open_partition
from tests.broker.storage.batches import TOPIC_ID
from tests.waiting import waited_for
from tests.whole_batch import check_batch


def checked(data: bytes) -> tuple[BatchHeader, memoryview]:
    view = memoryview(bytearray(data))
    return check_batch(view), view


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data")
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def partition(directory: LogDirectory) -> Partition:
    return open_partition(directory, TopicSettings.parse({}), leader_epoch=3)


def test_an_append_wakes_a_waiter_once(partition: Partition) -> None:
    woken: list[str] = []

    def wake() -> None:
        woken.append("reader")

    partition.waiters.register(wake)
    partition.waiters.register(wake)  # the same again: one registration
    assert len(partition.waiters) == 1
    epoch, (appended,) = partition.append_as_leader([checked(a_batch([b"a", b"b"]))])
    assert epoch == 3
    assert isinstance(appended, Appended)
    assert (appended.base_offset, appended.end_offset) == (0, 2)
    assert woken == ["reader"]
    partition.append_as_leader([checked(a_batch())])
    assert woken == ["reader"]
    partition.waiters.register(wake)
    partition.waiters.unregister(wake)
    partition.waiters.unregister(wake)
    partition.append_as_leader([checked(a_batch())])
    assert woken == ["reader"]


def test_a_flush_wakes_waiters(partition: Partition) -> None:
    flushed = threading.Event()
    partition.append_as_leader([checked(a_batch())])
    assert not partition.is_flushed_to(1)
    partition.waiters.register(flushed.set)
    partition.log.request_flush()
    assert flushed.wait(30)
    assert partition.is_flushed_to(1)


@pytest.mark.parametrize("method", ["apply", "try_apply"])
def test_an_apply_wakes_who_waits_even_if_its_last_flush_was_over_before(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    producer = producer_id_of("x")
    data = a_batch([b"a"], producer_id=producer, producer_epoch=0, base_sequence=0, transaction_batch_id=0, part=0)
    partition.staged.stage(b"u" * 16, [checked(data)])
    spec = PartSpec(b"u" * 16, 0, 1, len(data))
    partition.staged.prepare(PreparedSet("x", producer, 0, b"c" * 16, -1, (spec,)))
    partition.staged.keep_prepared(b"c" * 16)
    woken = threading.Event()
    real = partition.log.append_decided

    def append_decided(batches: Sequence[Batch], leader_epoch: int) -> None:
        real(batches, leader_epoch)
        partition.log.flush()  # as for an ack of others; nothing of the batch is shown yet
        partition.waiters.register(woken.set)

    monkeypatch.setattr(partition.log, "append_decided", append_decided)
    partition.staged.finish_apply(getattr(partition.staged, method)("x", producer, 0, b"c" * 16))
    assert partition.readable_end_offset == 1
    assert woken.is_set()


def test_a_drop_that_shows_what_was_hidden_wakes_who_waits(partition: Partition) -> None:
    producer = producer_id_of("x")
    data = a_batch([b"a"], producer_id=producer, producer_epoch=0, base_sequence=0, transaction_batch_id=0, part=0)
    partition.staged.stage(b"u" * 16, [checked(data)])
    partition.staged.prepare(PreparedSet("x", producer, 0, b"c" * 16, -1, (PartSpec(b"u" * 16, 0, 1, len(data)),)))
    partition._applier.hide((producer, 0), 0)  # as where half of the batch stood in the log
    partition.append_as_leader([checked(a_batch())])
    assert partition.readable_end_offset == 0
    woken = threading.Event()
    partition.waiters.register(woken.set)
    assert partition.staged.drop(b"c" * 16, 0)
    assert woken.is_set()
    assert partition.readable_end_offset == 1


def test_waiters_get_the_error_of_a_failed_directory(partition: Partition, directory: LogDirectory) -> None:
    woken = threading.Event()
    partition.append_as_leader([checked(a_batch())])
    partition.waiters.register(woken.set)
    directory.services.health.fail(StorageFailed(directory="d", reason="broken"))
    assert woken.wait(30)
    with pytest.raises(StorageFailed, match="broken"):
        partition.is_flushed_to(0)


def test_a_closed_partition_refuses_and_lets_go_who_waits(partition: Partition) -> None:
    woken = threading.Event()
    partition.append_as_leader([checked(a_batch())])
    partition.waiters.register(woken.set)
    partition.close()
    assert woken.is_set()
    with pytest.raises(NotLeader, match="broker 0 does not lead partition t-0"):
        partition.append_as_leader([checked(a_batch())])
    with pytest.raises(NotLeader):
        partition.read(0, 100, None)
    assert partition.log.end_offset == 1


def test_new_settings_reach_the_log(partition: Partition) -> None:
    partition.update_settings(TopicSettings.parse({"flush.messages": 1}))
    assert partition.log.needs_flush_for_ack
    assert partition.settings.flush_messages == 1


def test_a_deleted_partition_is_no_ones_and_holds_up_no_ack(partition: Partition, directory: LogDirectory) -> None:
    _, (appended,) = partition.append_as_leader([checked(a_batch())])
    assert isinstance(appended, Appended)
    assert not partition.is_flushed_to(appended.end_offset)
    partition.close()
    directory.remove_log(TOPIC_ID, 0)
    with pytest.raises(NotLeader):
        partition.is_flushed_to(appended.end_offset)
    assert partition.is_flushed_to(0)
    partition.role.is_closed = False  # as whoever looked just before the close
    with pytest.raises(NotLeader):
        partition.read(0, 100, None)
    with pytest.raises(NotLeader):
        partition.append_as_leader([checked(a_batch())])


def test_an_ack_that_is_asked_for_as_a_clean_close_flushes_is_asked_for_again_and_given(
    partition: Partition, directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition.append_as_leader([checked(a_batch())])
    closed = threading.Event()

    def flushed_offset(log: Log) -> int:
        found = log._flushed_offset
        if not closed.is_set():  # the stop of a broker comes just behind this look
            closed.set()
            partition.close()
            directory.close()
        return found

    monkeypatch.setattr(Log, "flushed_offset", property(flushed_offset))
    assert not partition.is_flushed_to(1)  # and no NotLeader: the record outlives a power cut
    assert partition.is_flushed_to(1)


def test_a_follower_that_comes_to_lead_while_it_flushes_does_not_wait_for_itself(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(directory, TopicSettings.parse({"flush.messages": 1}), leader_epoch=3)
    partition.role.follow(1, 4)

    def flush_to(offset: int) -> None:
        leading = threading.Thread(target=partition.role.lead, args=(replace(TWO, leader_epoch=5), [0]), daemon=True)
        leading.start()
        leading.join(10)
        assert not leading.is_alive()
        partition._flushed()

    monkeypatch.setattr(partition.log, "flush_to", flush_to)
    assert partition.following.position().leader_id == 0


# --- a follower that is not as its leader


def deposed(directory: LogDirectory, start_offset: int, *, is_unclean: bool) -> Partition:
    """A replica with ten records of epoch 3, of which those before an offset were deleted. It follows in epoch 4."""
    settings = TopicSettings.parse({"unclean.leader.election.enable": str(is_unclean).lower()})
    partition = open_partition(directory, settings, leader_epoch=3)
    for _ in range(10):
        partition.append_as_leader([checked(a_batch())])
    partition.delete_before(start_offset)
    partition.role.follow(1, 4)
    return partition


def test_an_append_of_an_epoch_that_is_over_comes_to_nothing_also_before_the_first_copy(
    directory: LogDirectory,
) -> None:
    """It came after the follower's end was named, and the next leader's watermark was taken for it."""
    partition = deposed(directory, 0, is_unclean=False)
    with pytest.raises(FencedLeaderEpoch):
        partition.log.append([checked(a_batch())], 3)
    assert partition.end_offset == 10


def test_a_state_of_an_epoch_that_is_over_changes_no_role(partition: Partition) -> None:
    for leader_id in (1, -1):
        partition.role.follow(leader_id, 2)
        assert partition.role.leads
        assert (partition.role.leader_id, partition.role.epoch) == (0, 3)
    partition.role.follow(1, 5)
    partition.role.follow(2, 4)
    assert (partition.role.leader_id, partition.role.epoch) == (1, 5)


def test_the_high_watermark_of_a_follower_does_not_go_back_nor_after_its_end(directory: LogDirectory) -> None:
    partition = deposed(directory, 0, is_unclean=False)
    partition.log.high_watermark = 5
    for told, known in ((7, 7), (6, 7), (15, 10), (8, 10)):
        partition.following.watermark_is(told, 0, 4)
        assert (partition.role.high_watermark, partition.log.high_watermark) == (known, known)


def test_a_follower_that_agrees_with_its_leader_only_before_its_own_start_begins_anew(directory: LogDirectory) -> None:
    """It emptied its log at its own start, and asked again from there without end: the leader's log ended before."""
    partition = deposed(directory, 10, is_unclean=True)
    partition.following.truncate(2, 7, 5, 5, 4)
    assert (partition.start_offset, partition.end_offset, partition.role.high_watermark) == (5, 5, 5)


def test_a_follower_of_which_readers_saw_nothing_that_its_leader_still_has_begins_anew(directory: LogDirectory) -> None:
    """It was ahead of its high watermark when it was deposed, and the next leader deleted up to a later offset."""
    partition = deposed(directory, 2, is_unclean=False)
    partition.log.high_watermark = 7
    with pytest.raises(ReplicaDiverged):
        partition.following.truncate(-1, 6, 6, 6, 4)
    partition.following.truncate(-1, 8, 8, 7, 4)
    assert (partition.start_offset, partition.end_offset, partition.role.high_watermark) == (7, 7, 7)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_follower_that_begins_anew_knows_its_producers_until_it_gets_them_from_its_leader(
    directory: LogDirectory, is_restarted: bool
) -> None:
    """It may be elected before: then it took a batch that was sent again for a new one."""
    partition = open_partition(directory, leader_epoch=3)
    batch = checked(a_batch(producer_id=7, producer_epoch=0, base_sequence=0))
    partition.append_as_leader([batch])
    partition.role.follow(1, 4)
    partition.following.truncate(-1, 1, 1, 1, 4)
    assert (partition.start_offset, partition.end_offset) == (1, 1)
    assert partition.following.position().needs_producers
    partition.role.lead(replace(ONE, leader_epoch=5), [0])
    if is_restarted:
        directory.close(clean=False)
        directory = LogDirectory(directory.path)
        partition = open_partition(directory, leader_epoch=6)
    _, [appended] = partition.append_as_leader([batch])
    assert isinstance(appended, Appended)
    assert (appended.base_offset, partition.end_offset) == (0, 1)
    directory.close()


def test_a_follower_names_no_position_until_the_log_that_it_begins_anew_is_on_the_disk(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power could restore the old log, of which the leader would know nothing."""
    following = deposed(directory, 2, is_unclean=False).following

    def no_descriptor(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(directory.disk, "sync_dir", no_descriptor)
        assert following.begin_anew(50, 50, 4)
        for _ in range(2):
            with pytest.raises(OutOfFiles):
                following.position()
    assert directory.failed is None
    assert following.position().end_offset == 50


def test_a_follower_whose_records_its_next_leader_has_deleted_agrees_with_it(directory: LogDirectory) -> None:
    """It began anew and forgot the producers, while it was in the in-sync set and could be elected."""
    leader = open_partition(directory, leader_epoch=3)
    leader.append_as_leader([checked(a_batch([b"a", b"b"]))])
    leader.role.lead(replace(TWO, isr=(0, 1)), [0, 1])
    assert leader.delete_before(-1) == 2
    pulse = Pulse(SYSTEM_CLOCK.monotonic(), 1, 0)
    assert leader.role.fetched(1, "there", pulse, 4, 2, 3, True, []) is None
    assert leader.role.fetched(1, "there", pulse, 4, 3, 3, True, []) == (3, 2), "what comes after them is cut"


def test_a_follower_does_not_begin_anew_where_readers_have_seen_more_unless_the_topic_allows_it(
    directory: LogDirectory,
) -> None:
    partition = deposed(directory, 10, is_unclean=False)
    with pytest.raises(ReplicaDiverged):
        partition.following.truncate(2, 7, 5, 5, 4)
    assert (partition.start_offset, partition.end_offset, partition.role.high_watermark) == (10, 10, 10)
    partition.update_settings(TopicSettings.parse({"unclean.leader.election.enable": True}))
    partition.following.truncate(2, 7, 5, 5, 4)
    assert (partition.start_offset, partition.end_offset, partition.role.high_watermark) == (5, 5, 5)


@pytest.mark.parametrize("leader_start", [0, 4])
def test_a_follower_whose_high_watermark_is_before_its_start_loses_nothing_by_that(
    directory: LogDirectory, leader_start: int
) -> None:
    """Readers have seen all that was deleted."""
    partition = deposed(directory, 6, is_unclean=False)
    partition.log.high_watermark = 0
    with pytest.raises(ReplicaDiverged) as raised:
        partition.following.truncate(2, 3, leader_start, leader_start, 4)
    assert raised.value.facts["high_watermark"] == 6
    assert (partition.start_offset, partition.end_offset) == (6, 10)


def test_a_follower_begins_anew_only_if_its_log_ends_before_its_leaders_start(directory: LogDirectory) -> None:
    partition = deposed(directory, 2, is_unclean=True)
    for start_offset in (0, 5, 10):
        assert not partition.following.begin_anew(start_offset, start_offset, 4)
        assert (partition.start_offset, partition.end_offset) == (2, 10)
    with pytest.raises(FencedLeaderEpoch):
        partition.following.begin_anew(20, 20, 3)
    assert partition.following.begin_anew(20, 18, 4)  # its batch reaches back before its start
    assert (partition.start_offset, partition.end_offset, partition.role.high_watermark) == (18, 18, 18)


def test_damage_that_a_follower_knows_of_is_met_as_it_names_its_position(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads it there, and until it is repaired the replica does not join."""
    partition = deposed(directory, 0, is_unclean=False)
    met: list[int] = []
    partition.log.reader.on_damage = met.append
    assert partition.following.position().is_whole
    monkeypatch.setattr(partition.log, "first_damage", lambda *_: 3)
    assert not partition.following.position().is_whole
    assert met == [3]


def test_followers_are_woken_by_a_deletion(partition: Partition) -> None:
    woken = threading.Event()
    partition.append_as_leader([checked(a_batch())])
    partition.replica_waiters.register(woken.set)
    partition.delete_before(1)
    assert woken.is_set()


def test_followers_are_woken_by_a_deletion_that_is_refused_half_way(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    partition.append_as_leader([checked(a_batch())])
    partition.replica_waiters.register(woken.set)

    def refused() -> None:
        raise DiskFull(directory="/data")

    monkeypatch.setattr(partition.log, "_unlink_soon", refused)
    with pytest.raises(DiskFull):
        partition.delete_before(1)
    assert woken.is_set()


def test_followers_are_woken_by_retention(partition: Partition) -> None:
    woken = threading.Event()
    partition.update_settings(TopicSettings.parse({"retention.bytes": 6000, "segment.bytes": 4096}))
    for _ in range(2):
        partition.append_as_leader([checked(a_batch([bytes(4000)]))])
    partition.replica_waiters.register(woken.set)
    assert partition.log.apply_retention() == 1
    assert partition.start_offset == 1
    assert woken.is_set()


@pytest.mark.parametrize(
    ("end_offset", "last_epoch", "parts"),
    [
        (7, 1, (1, 5)),
        (5, 2, (1, 5)),  # its last record is of an epoch that the leader does not have
        (11, 3, (3, 10)),
        (4, 0, (-1, 0)),
        (12, -1, (-1, 0)),  # its log has no records: it began anew at an earlier leader, which had more
    ],
)
def test_a_follower_is_told_where_its_log_parts_from_its_leaders_and_does_not_join_with_what_it_has(
    directory: LogDirectory, end_offset: int, last_epoch: int, parts: tuple[int, int]
) -> None:
    partition = open_partition(directory, leader_epoch=1)
    partition.append_as_leader([checked(a_batch())] * 5)
    partition.role.lead(PartitionState(0, 3, (0,), (), {0: "here", 1: "there"}), [0, 1])
    partition.append_as_leader([checked(a_batch())] * 5)
    now = SYSTEM_CLOCK.monotonic()
    live = {1: BrokerRecord(1, "host", 1, 2, directory="there", epoch=7)}

    def asks(end_offset: int, last_epoch: int) -> tuple[int, int] | None:
        return partition.role.fetched(1, "there", Pulse(now, 7, 0), 3, end_offset, last_epoch, True, [])

    assert asks(end_offset, last_epoch) == parts
    assert partition.role.wanted_changes(now, 10.0, live) is None
    assert asks(10, 3) is None
    wanted = partition.role.wanted_changes(now, 10.0, live)
    assert wanted is not None
    assert [each.broker_id for each in wanted.joining] == [1]


ALONE_IN_SYNC = PartitionState(0, 4, (0,), (), {0: "here", 1: "there"}, 1)


def ask_to_join(partition: Partition) -> Wanted:
    """Broker 1 follows and has everything; a write that takes it into the in-sync set begins."""
    now = SYSTEM_CLOCK.monotonic()
    live = {1: BrokerRecord(1, "host", 1, 2, directory="there", epoch=7)}
    assert partition.role.fetched(1, "there", Pulse(now, 7, 0), partition.role.epoch, 0, -1, True, []) is None
    wanted = partition.role.wanted_changes(now, 10.0, live)
    assert wanted is not None
    assert [each.broker_id for each in wanted.joining] == [1]
    assert partition.role.begin_change(wanted)
    return wanted


def test_a_replica_counts_until_no_write_that_takes_it_into_the_set_can_come_any_more(partition: Partition) -> None:
    """The answer to the first one is lost: it may be executed as long as the state is the one that it was made from."""
    partition.role.lead(ALONE_IN_SYNC, [0, 1])
    assert not ask_to_join(partition).is_unresolved
    again = ask_to_join(partition)
    assert again.is_unresolved
    partition.append_as_leader([checked(a_batch())])
    for version, watermark in ((1, 0), (2, 1)):
        partition.role.take_outcome(again, replace(ALONE_IN_SYNC, version=version))
        assert partition.role.high_watermark == watermark


def test_an_ack_that_a_smaller_set_makes_impossible_is_refused_at_once(partition: Partition) -> None:
    partition.update_settings(TopicSettings.parse({"min.insync.replicas": 2}))
    both = replace(ALONE_IN_SYNC, isr=(0, 1))
    partition.role.lead(both, [0, 1])
    partition.append_as_leader([checked(a_batch())], needs_replicas=True)
    ack = partition.ack_of(1, 4, needs_replicas=True)
    assert ack is not None
    assert not ack.is_kept()
    woken: list[str] = []
    partition.waiters.register(lambda: woken.append("producer"))
    partition.role.take_outcome(Wanted(both, [], [1], False), replace(ALONE_IN_SYNC, version=2))
    assert woken == ["producer"]
    with pytest.raises(NotEnoughReplicasAfterAppend):
        ack.is_kept()


def test_a_new_min_insync_replicas_counts_at_once(partition: Partition) -> None:
    partition.role.lead(ALONE_IN_SYNC, [0, 1])
    partition.append_as_leader([checked(a_batch())], needs_replicas=True)
    assert partition.role.high_watermark == 1
    partition.update_settings(TopicSettings.parse({"min.insync.replicas": 2}))
    with pytest.raises(NotEnoughReplicas):
        partition.append_as_leader([checked(a_batch())], needs_replicas=True)
    partition.append_as_leader([checked(a_batch())])
    assert partition.role.high_watermark == 1
    partition.update_settings(TopicSettings.parse({"min.insync.replicas": 1}))
    assert partition.role.high_watermark == 2


def test_what_came_of_a_change_in_an_epoch_that_is_over_says_nothing_of_one_in_the_next(partition: Partition) -> None:
    partition.role.lead(ALONE_IN_SYNC, [0, 1])
    late = ask_to_join(partition)
    partition.role.lead(replace(ALONE_IN_SYNC, leader_epoch=5, version=2), [0, 1])
    ask_to_join(partition)
    partition.append_as_leader([checked(a_batch())])
    for state in (None, replace(ALONE_IN_SYNC, version=2)):
        partition.role.take_outcome(late, state)
        assert partition.role.high_watermark == 0
    assert not partition.role.begin_change(late)


def test_an_epoch_begins_at_the_end_of_the_log_also_if_acks_wait_for_flushes_since(partition: Partition) -> None:
    """What is not flushed was acknowledged before: a replica without it joined."""
    both = replace(TWO, isr=(0, 1), directories={0: "here", 1: "there", 2: "elsewhere"}, replicas=(0, 1, 2))
    partition.role.lead(both, [0, 1, 2])
    partition.append_as_leader([checked(a_batch())])
    pulse = Pulse(SYSTEM_CLOCK.monotonic(), 1, 0)
    assert partition.role.fetched(1, "there", pulse, 4, 1, 4, True, []) is None
    assert partition.role.high_watermark == 1
    with partition.log._flush_lock:  # as while the disk stands still
        partition.update_settings(TopicSettings.parse({"flush.messages": 1}))
        partition.role.lead(replace(both, leader_epoch=5, version=2), [0, 1, 2])
        assert partition.role.high_watermark == 1
        live = {2: BrokerRecord(2, "host", 1, 2, directory="elsewhere", epoch=1)}
        assert partition.role.fetched(2, "elsewhere", pulse, 5, 0, -1, True, []) is None
        assert partition.role.wanted_changes(SYSTEM_CLOCK.monotonic(), 10.0, live) is None
    waited_for(lambda: partition.log.flushed_offset == 1)


def test_readers_wait_for_what_the_last_leader_may_have_flushed_and_this_one_has_not(directory: LogDirectory) -> None:
    """What they had seen was taken for lost."""
    settings = TopicSettings.parse({"flush.visibility": "flushed", "flush.ms": 100_000})
    partition = open_partition(directory, settings, leader_epoch=3)
    both = replace(TWO, isr=(0, 1), directories={0: "here", 1: "there"})
    partition.role.lead(both, [0, 1])
    partition.append_as_leader([checked(a_batch())])
    pulse = Pulse(SYSTEM_CLOCK.monotonic(), 1, 0)
    assert partition.role.fetched(1, "there", pulse, 4, 1, 4, True, []) is None
    assert partition.end_for_readers() == 0
    with partition.log._flush_lock:  # as while the disk stands still
        partition.role.lead(replace(both, leader_epoch=5, version=2), [0, 1])
        assert partition.role.fetched(1, "there", pulse, 5, 1, 4, True, []) is None
        with pytest.raises(OffsetNotAvailable):
            partition.end_for_readers()
        with partition.read(1, 100, None) as found:
            assert not found.length
    waited_for(lambda: partition.log.flushed_offset == 1)
    assert partition.end_for_readers() == 1


# --- from one copy to several, and back


ONE = PartitionState.only(0, "here", 3)
TWO = replace(ONE, leader_epoch=4, replicas=(0,), target=(0, 1), version=1)


def test_readers_see_no_less_when_a_second_copy_is_added(directory: LogDirectory) -> None:
    """Those of one copy see records before their flush."""
    partition = open_partition(directory, TopicSettings.parse({"flush.messages": 1}), leader_epoch=3)
    _, [appended] = partition.append_as_leader([checked(a_batch([b"a", b"b"]))])
    assert isinstance(appended, Appended)
    assert partition.readable_end_offset == 2
    partition.role.lead(TWO, [0])
    assert (partition.readable_end_offset, partition.end_for_readers(), partition.role.high_watermark) == (2, 2, 2)
    assert partition.ack_of(2, 4, needs_replicas=True) is not None
    partition.role.lead(replace(TWO, isr=(0, 1), version=2), [0])
    partition.append_as_leader([checked(a_batch())])
    assert partition.readable_end_offset == 2, "the second copy has not fetched it"


def test_an_append_of_the_epoch_before_the_second_copy_is_not_acknowledged_in_the_next(partition: Partition) -> None:
    partition.append_as_leader([checked(a_batch())])
    assert partition.ack_of(1, 3, needs_replicas=True) is None, "one copy has nobody to wait for"
    partition.role.lead(TWO, [0])
    late = partition.ack_of(1, 3, needs_replicas=True)
    assert late is not None
    with pytest.raises(NotLeader):
        late.is_kept()


def test_acks_that_wait_for_a_copy_that_is_taken_away_are_kept_by_the_one_that_stays(partition: Partition) -> None:
    both = replace(ONE, leader_epoch=4, isr=(0, 1), replicas=(0, 1), target=(0,), version=1)
    partition.role.lead(both, [0, 1])
    partition.append_as_leader([checked(a_batch())], needs_replicas=True)
    ack = partition.ack_of(1, 4, needs_replicas=True)
    assert ack is not None
    assert not ack.is_kept()
    partition.role.lead(replace(ONE, leader_epoch=4, replicas=(0,), version=2), [0, 1])
    assert ack.is_kept()
    assert partition.readable_end_offset == 1
    partition.append_as_leader([checked(a_batch())])
    assert (partition.readable_end_offset, partition.log.has_high_watermark) == (2, False)
    assert partition.ack_of(2, 4, needs_replicas=True) is None
    assert ack._replace(end_offset=2).is_kept(), "of an append that came amid the change"


def test_what_is_asked_of_a_leader_does_not_wait_for_the_disk_of_a_follower(partition: Partition) -> None:
    """One thread looks after all partitions' in-sync sets, and others serve many: one slow follower's log is not
    theirs."""
    role = partition.role
    role.follow(1, 4)
    asked: list[object] = []

    def ask() -> None:
        asked.append(role.wanted_changes(0.0, 1.0, {}))
        role.left(1, "disk", 0)
        with pytest.raises(NotLeader):
            role.fetched(1, "disk", Pulse(0.0, 0, 0), 4, 0, -1, True, ())
        with pytest.raises(NotLeader):
            role.is_replicated(3, 0, 0)
        asked.append("all")

    thread = threading.Thread(target=ask, daemon=True)
    with role.lock:  # as its follower has it while it writes
        thread.start()
        thread.join(30)
        assert asked == [None, "all"]
