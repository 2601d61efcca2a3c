"""What a follower's broker asks, and what a leader makes of it, without a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.replica import fetcher as fetcher_module
from broker.replica.fetcher import ReplicaFetcher
from broker.replica.following import Following, Position
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.role import Role
from broker.replica.throttle import Throttle
from broker.requests import fetch, replicate
from broker.requests.replicate import ReplicaSession
from broker.staging import staging
from broker.storage.log_dir import LogDirectory
from kafkalog import errors
from kafkalog.clock import SYSTEM_CLOCK, ManualClock
from kafkalog.errors import DiskFull
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk.registry import BrokerRecord, PartitionState
from tests.broker.replica.test_staged_writes import batch
from tests.broker.requests.hosted import TOPIC_ID, Hosted
from tests.broker.storage.batches import numbered


class Leading(Hosted):
    """Leads all partitions, which broker 1 follows and broker 2 has not fetched yet."""

    def __init__(self, directory: LogDirectory, partitions: int = 2) -> None:
        super().__init__(directory, partitions)
        state = PartitionState(0, 1, (0, 2), (), {0: "here", 1: "its", 2: "other"})
        for partition in self.partitions:
            partition.role.lead(state, [0, 1, 2])

    replica_of = Hosted.leader_of


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Any]:
    directory = LogDirectory(tmp_path)
    yield Leading(directory)
    directory.close()


def test_states_of_producers_that_do_not_fit_into_an_answer_are_not_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many partitions an answer took longer than a link waits, and the next one began anew."""
    directory = LogDirectory(tmp_path)
    host: Any = Leading(directory, 5)
    made: list[int] = []

    def producers_before(self: Partition, offset: int) -> bytes:
        made.append(self.number)
        return bytes(700)

    monkeypatch.setattr(Partition, "producers_before", producers_before)
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    named = [
        pb.ReplicaPosition(topic_id=TOPIC_ID, partition=number, leader_epoch=1, last_epoch=-1, needs_producers=True)
        for number in range(5)
    ]
    session.take(pb.ReplicaFetchRequest(broker_id=1, registration=1, directory="its", partitions=named))
    for given in range(1, 6):
        made.clear()
        answer = session.answer(1000, False)
        assert answer is not None and len(answer.slices) == 1
        answer.close()
        assert len(made) <= 2, f"in answer {given}"
    directory.close()


def test_a_state_of_producers_that_may_be_of_a_later_epoch_is_not_given(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may have been cut since the leader was deposed, and go on with other records."""
    real = Partition.producers_before

    def producers_before(self: Partition, offset: int) -> bytes:
        self.role.follow(2, 2)
        return real(self, offset)

    monkeypatch.setattr(Partition, "producers_before", producers_before)
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    named = [pb.ReplicaPosition(topic_id=TOPIC_ID, partition=0, leader_epoch=1, last_epoch=-1, needs_producers=True)]
    session.take(pb.ReplicaFetchRequest(broker_id=1, registration=1, directory="its", partitions=named))
    answer = session.answer(1000, False)
    assert answer is not None
    assert not answer.slices
    assert isinstance(error_from_wire(answer.reply.partitions[0].error), errors.NotLeader)


def test_a_follower_gets_the_partitions_beyond_the_limit_of_open_files_in_the_next_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_SLICES_MAX", 2)
    directory = LogDirectory(tmp_path)
    host: Any = Leading(directory, 5)
    for partition in host.partitions:
        partition.append_as_leader([batch(0)])
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    session.take(request(1, 5))
    sent = []
    while (answer := session.answer(1 << 20, False)) is not None:
        sent.append([news.partition for news in answer.reply.partitions if news.length])
        answer.close()
    assert sent == [[0, 1], [2, 3], [4]]
    directory.close()


def request(registration: int, partitions: int = 2, *, leaves: bool = False) -> pb.ReplicaFetchRequest:
    named = [
        pb.ReplicaPosition(topic_id=TOPIC_ID, partition=number, leader_epoch=1, last_epoch=-1, leaves=leaves)
        for number in range(partitions)
    ]
    return pb.ReplicaFetchRequest(broker_id=1, registration=registration, directory="its", partitions=named)


def joining(partition: Partition, registration: int) -> list[int]:
    live = {1: BrokerRecord(1, "there", 1, 2, directory="its", epoch=registration)}
    wanted = partition.role.wanted_changes(SYSTEM_CLOCK.monotonic(), 10.0, live)
    return [] if wanted is None else [each.broker_id for each in wanted.joining]


def test_a_lost_log_does_not_join_while_the_request_that_leaves_it_is_taken_in(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is the first one of the broker's next registration."""
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    session.take(request(1))
    assert [joining(partition, 1) for partition in host.partitions] == [[1], [1]]
    seen: list[list[int]] = []
    real = Role.left

    def left(self: Role, broker_id: int, directory: str, connection: int) -> None:
        seen.extend(joining(partition, 2) for partition in host.partitions)
        real(self, broker_id, directory, connection)

    monkeypatch.setattr(Role, "left", left)
    session.take(request(2, leaves=True))
    assert seen == [[]] * 4
    assert [joining(partition, 2) for partition in host.partitions] == [[], []]


def test_a_lost_log_that_was_sent_records_since_it_was_named_does_not_join(host: Any) -> None:
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    session.take(request(1))
    for partition in host.partitions:
        partition.append_as_leader([batch(0)])
    answer = session.answer(1 << 20, False)
    assert answer is not None and len(answer.slices) == 2
    answer.close()
    assert [joining(partition, 1) for partition in host.partitions] == [[1], [1]], "they have all from before the epoch"
    session.take(request(2, leaves=True))
    assert [joining(partition, 2) for partition in host.partitions] == [[], []]


def test_what_comes_late_on_an_earlier_connection_is_not_what_a_follower_says_now(host: Any) -> None:
    """The network held it back. The follower had nothing new to say, so the earlier end stood, and it never joined."""
    earlier, session = (ReplicaSession(host, SYSTEM_CLOCK, number, lambda: None) for number in (1, 2))
    session.take(request(2))
    earlier.take(request(1))
    assert [joining(partition, 2) for partition in host.partitions] == [[1], [1]]
    earlier.take(request(1, leaves=True))
    assert [joining(partition, 2) for partition in host.partitions] == [[1], [1]]


def test_a_request_was_sent_after_the_answer_before_the_last_one(host: Any) -> None:
    """Two requests may be under way: a follower may have sent its last one before the last answer was made."""
    clock = ManualClock()
    session = ReplicaSession(host, clock, 0, lambda: None)
    asked = request(1)
    asked.broker_id, asked.directory = 2, "other"  # the only other member of the set
    for number in range(4):
        clock.advance(1.0)
        session.take(asked)
        leadership = host.partitions[0].role.leadership
        assert not leadership.is_followed(clock.monotonic() - 1.0)
        assert leadership.is_followed(clock.monotonic() - 2.0) is (number >= 2)
        answer = session.answer(1 << 20, True)
        assert answer is not None
        answer.close()


def test_a_follower_that_is_taken_for_superseded_is_told_so_until_the_other_connection_is_closed(host: Any) -> None:
    """Connections may be accepted in another order than they were made."""
    session, earlier = (ReplicaSession(host, SYSTEM_CLOCK, number, lambda: None) for number in (1, 2))
    earlier.take(request(2))
    session.take(request(2))
    answer = session.answer(1 << 20, False)
    assert answer is not None
    told = [error_from_wire(each.error) for each in answer.reply.partitions]
    assert all(isinstance(error, errors.ConnectionSuperseded) for error in told) and len(told) == 2
    earlier.close()
    session.take(request(3))
    assert [joining(partition, 3) for partition in host.partitions] == [[1], [1]]


def test_a_log_that_another_one_replaces_at_once_is_left_all_the_same(host: Any) -> None:
    """The position of the new one may be named later."""
    [old, new] = host.partitions
    new.role.follow(2, 5)
    fetcher = ReplicaFetcher(2, 0, "here", Metadata(host), SYSTEM_CLOCK, Throttle(), lambda *_: None)
    key = TOPIC_ID, 0
    fetcher.follow(key, old)
    assert fetcher.leave(key)
    fetcher.follow(key, new)
    asked, _ = fetcher.next_request()
    assert asked is not None
    assert [(each.leaves, each.leader_epoch) for each in asked.partitions] == [(True, 0), (False, 5)]


def fetching(metadata: Metadata, *replicas: Partition) -> ReplicaFetcher:
    """What fetches replicas of broker 0 from broker 2."""
    fetcher = ReplicaFetcher(2, 0, "here", metadata, SYSTEM_CLOCK, Throttle(), lambda *_: None)
    for replica in replicas:
        fetcher.follow((TOPIC_ID, replica.number), replica)
    return fetcher


def asked_of(fetcher: ReplicaFetcher) -> list[pb.ReplicaPosition]:
    """What its next request names; the one before is answered."""
    fetcher._in_flight = 0
    asked, _ = fetcher.next_request()
    assert asked is not None
    return list(asked.partitions)


def test_a_follower_without_room_for_records_deletes_what_its_leader_has_deleted(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that makes room."""
    replica = host.partitions[0]
    replica.append_as_leader([numbered(number) for number in range(5)])
    replica.role.follow(2, 5)
    fetcher = fetching(Metadata(host), replica)
    kept: list[Any] = []

    def full(*_: object) -> None:
        raise DiskFull(directory="/data")

    monkeypatch.setattr(replica.log, "append_stamped", full)
    monkeypatch.setattr(replica.following, "keep_only_staged", lambda copies, epoch: kept.append(copies))
    news = pb.ReplicaNews(length=1, leader_epoch=5, log_start_offset=3, high_watermark=5, names_staged=True)
    news.pieces.add(number=1)
    with pytest.raises(DiskFull):
        fetcher._take_news((TOPIC_ID, 0), replica, news, memoryview(b"x"))
    assert (replica.start_offset, kept) == (3, [[]])


def test_a_log_is_left_once(host: Any) -> None:
    replica = host.partitions[0]
    replica.role.follow(2, 5)
    fetcher = fetching(Metadata(host), replica)
    key = TOPIC_ID, 0
    assert fetcher.leave(key)
    fetcher.follow(key, replica)
    leaves = []
    for _ in range(2):
        leaves.append([each.leaves for each in asked_of(fetcher)])
        fetcher._name(key, 0.0)
    assert leaves == [[True, False], [False]]


def test_a_partition_that_is_left_while_its_turn_has_not_come_is_not_named(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "FILES_NAMED_MAX", 0)
    for partition in host.partitions:
        partition.staged.stage(b"%016d" % partition.number, [batch(0)])
        partition.role.follow(2, 5)
    fetcher = fetching(Metadata(host), *host.partitions)
    real = Following.position

    def position(self: Following) -> Position:
        fetcher.leave((TOPIC_ID, 1))
        return real(self)

    monkeypatch.setattr(Following, "position", position)
    named = asked_of(fetcher) + asked_of(fetcher)
    assert [each.partition for each in named if not each.leaves] == [0]


def test_no_more_positions_are_named_at_once_than_fit(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "_NAMED_MAX", 1)
    for partition in host.partitions:
        partition.role.follow(2, 5)
    fetcher = fetching(Metadata(host), *host.partitions)
    assert [[each.partition for each in asked_of(fetcher)] for _ in range(2)] == [[0], [1]]


def test_files_of_staged_data_are_named_in_several_requests_and_answers_if_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are to fit into a frame's header, which has a limit."""
    monkeypatch.setattr(fetcher_module, "FILES_NAMED_MAX", 7)
    monkeypatch.setattr(replicate, "FILES_NAMED_MAX", 7)
    monkeypatch.setattr(staging, "_OWN_FROM", 1)
    monkeypatch.setattr(staging, "_ADOPTED_MIN", 1)
    directory = LogDirectory(tmp_path)
    host: Any = Leading(directory, 6)
    for partition in host.partitions:
        for part in range(partition.number * 2):
            uuid = b"%d-%d" % (partition.number, part) + bytes(13)
            for number in range(2):
                partition.staged.stage(uuid[:16], [batch(number, part=part)])
    session = ReplicaSession(host, SYSTEM_CLOCK, 0, lambda: None)
    session.take(request(1, 6))
    answered: list[list[int]] = []
    while (answer := session.answer(1 << 20, False)) is not None:
        counts = (len(each.staged) + len(each.pieces) for each in answer.reply.partitions)
        answered.append([count for count in counts if count])
        answer.close()
    assert sum(map(len, answered)) == 5 < sum(map(sum, answered)), answered  # all, with their files
    assert len(answered) > 2 and all(sum(each[:-1]) <= 7 for each in answered), answered

    for partition in host.partitions:
        partition.role.follow(2, 5)
    fetcher = fetching(Metadata(host), *host.partitions)
    named: list[list[tuple[int, int]]] = []
    for _ in range(10):
        fetcher._in_flight = 0
        asked, wait = fetcher.next_request()
        assert asked is not None
        named.append([(each.partition, len(each.staged)) for each in asked.partitions])
        if wait is None:
            break
        assert wait == 0.0
    assert sorted(number for each in named for number, _ in each) == list(range(6))
    assert all(len(each) == 1 or sum(files for _, files in each) <= 7 for each in named), named
    assert len(named) > 2
    directory.close()


def registered(directory: str, epoch: int) -> dict[int, BrokerRecord]:
    return {0: BrokerRecord(0, "host", 1, 2, directory=directory, epoch=epoch)}


def test_a_request_names_the_registration_from_before_its_positions(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is lost is left before its broker registers anew: the new registration never had what it had."""
    metadata, replica = Metadata(host), host.partitions[0]
    replica.role.follow(2, 5)
    metadata._brokers = registered("here", 1)
    real = Following.position

    def position(self: Following) -> Position:
        found = real(self)
        metadata._brokers = registered("here", 2)
        return found

    monkeypatch.setattr(Following, "position", position)
    asked, _ = fetching(metadata, replica).next_request()
    assert asked is not None
    assert (asked.registration, len(asked.partitions)) == (1, 1)


@pytest.mark.parametrize(
    ("brokers", "registration"), [({}, -1), (registered("elsewhere", 3), -1), (registered("here", 3), 3)]
)
def test_a_registration_is_a_brokers_only_with_its_own_directory(
    host: Any, brokers: dict[int, BrokerRecord], registration: int
) -> None:
    metadata, replica = Metadata(host), host.partitions[0]
    replica.role.follow(2, 5)
    metadata._brokers = brokers
    asked, _ = fetching(metadata, replica).next_request()
    assert asked is not None
    assert asked.registration == registration


def test_a_replica_that_follows_another_leader_by_now_is_not_named(host: Any) -> None:
    replica = host.partitions[0]
    replica.role.follow(3, 6)
    asked, _ = fetching(Metadata(host), replica).next_request()
    assert asked is not None
    assert not asked.partitions


def test_a_new_connection_begins_anew_whatever_was_asked_on_the_one_before(host: Any) -> None:
    [first, second] = host.partitions
    for replica in (first, second):
        replica.role.follow(2, 5)
    fetcher = fetching(Metadata(host), first)
    assert fetcher.next_request()[0] is not None
    fetcher.follow((TOPIC_ID, second.number), second)
    assert fetcher.next_request()[0] is not None
    assert fetcher.next_request()[0] is None, "two are on their way"
    fetcher.connected()
    asked, _ = fetcher.next_request()
    assert asked is not None
    assert [each.partition for each in asked.partitions] == [0, 1]


def test_a_replica_whose_damage_was_repaired_is_named_again_though_there_is_nothing_new(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader lets it join then."""
    replica = host.partitions[0]
    replica.role.follow(2, 5)
    fetcher = fetching(Metadata(host), replica)
    with monkeypatch.context() as damaged:
        damaged.setattr(replica.log, "first_damage", lambda *_: 0)
        asked, _ = fetcher.next_request()
        assert asked is not None
        assert [each.has_damage for each in asked.partitions] == [True]
        assert fetcher.next_request()[0] is None
    asked, _ = fetcher.next_request()
    assert asked is not None
    assert [each.has_damage for each in asked.partitions] == [False]


def test_a_leader_is_told_once_of_damage_in_what_it_has_sent(host: Any) -> None:
    replica = host.partitions[0]
    replica.role.follow(2, 5)
    fetcher = fetching(Metadata(host), replica)
    data = bytearray(batch(0)[1])
    data[-1] ^= 1
    news = pb.ReplicaNews(topic_id=TOPIC_ID, partition=0, leader_epoch=5, length=len(data))
    told: list[bool] = []
    for _ in range(3):
        asked, _ = fetcher.next_request()
        assert asked is not None
        told += [each.is_damaged for each in asked.partitions]
        if len(told) == 1:
            fetcher.take(pb.ReplyHeader(replica_fetch=pb.ReplicaFetchReply(partitions=[news])), memoryview(data))
        else:
            fetcher.take(pb.ReplyHeader(replica_fetch=pb.ReplicaFetchReply()), None)
        fetcher.follow((TOPIC_ID, 0), replica)
    assert told == [False, True, False]
    assert replica.end_offset == 0
