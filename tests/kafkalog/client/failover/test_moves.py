"""Partitions that are moved to other brokers while clients use them, and while brokers fail (KIP-455)."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.replica.insync import InSyncSets
from broker.storage.log_dir import folder_name
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.cluster import PartitionInfo
from kafkalog.client.transaction.coordinator import Outcome
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import (
    InvalidSetting,
    KafkalogError,
    LeaderNotAvailable,
    ReassignmentInProgress,
    ReassignmentNotCancelled,
    TooFewBrokers,
    UnknownBroker,
)
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending, leader_of, values
from tests.kafkalog.client.failover.test_transactions import stage
from tests.kafkalog.client.transaction.test_coordinator import PARTITIONS as OF_A_QUERY
from tests.kafkalog.client.transaction.test_coordinator import Query, expected, read, rows
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.threads import join_all
from tests.waiting import waited_for

NEVER = 1
"""A rate in bytes a second at which a copy goes no further than its first piece."""
PIECES = [bytes(60_000)] * 8
"""Values of several first pieces."""


@pytest.fixture
def admin(brokers: Brokers) -> Iterator[Admin]:
    with Admin(brokers.bootstrap_servers) as admin:
        yield admin


def partition(admin: Admin, number: int = 0) -> PartitionInfo:
    return admin.describe_topics(["t"])[0].partition(number)


def wait_until_at(admin: Admin, *replicas: int, number: int = 0) -> None:
    """Wait until a move to these brokers is over, as every broker sees it."""

    def is_over() -> bool:
        found = partition(admin, number)
        is_there = found.replicas == replicas and not found.adding and set(found.isr) == set(replicas)
        return is_there and not admin.reassignments("t")

    waited_for(is_over, 30, f"the move to {replicas} is not over")


def has_folder(brokers: Brokers, broker_id: int, topic_id: bytes, number: int = 0) -> bool:
    directory = Path(brokers.running[broker_id].broker.settings.log_dir)
    return (directory / folder_name(topic_id, number)).exists()


def fill(brokers: Brokers, sent: list[bytes], number: int = 0) -> None:
    with Producer(brokers.bootstrap_servers, batch_records=1, linger_ms=0) as producer:
        for value in sent:
            producer.send("t", value, partition=number)
        producer.flush()


def records(brokers: Brokers, count: int) -> list[bytes | None]:
    """The values of partition 0, from its start to its end."""
    servers = ",".join(f"127.0.0.1:{each.broker.grpc_port}" for each in brokers.running.values())
    with Consumer(servers) as consumer, Admin(servers) as admin:
        where = TopicPartition("t", 0)
        assert admin.list_offsets({where: "latest"})[where].offset == count
        consumer.assign({where: "earliest"})
        return [message.value for message in consumer.messages(count, timeout=60)]


class Reading:
    """Reads partition 0 from a thread, from its beginning on."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._consumer = Consumer(bootstrap_servers)
        self.values: list[bytes | None] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, count: int) -> None:
        self._consumer.assign({TopicPartition("t", 0): "earliest"})
        self._count = count
        self._thread.start()

    def _run(self) -> None:
        with self._consumer:
            for message in self._consumer.messages(self._count, timeout=60):
                self.values.append(message.value)

    def join(self) -> list[bytes | None]:
        join_all([self._thread], 60)
        return self.values


# --- moves while clients go on


@pytest.mark.parametrize("copies", [1, 2])
def test_a_producer_and_a_consumer_notice_nothing_of_moves_to_and_fro(
    brokers: Brokers, admin: Admin, copies: int
) -> None:
    topic = admin.create_topic("t", PARTITIONS, copies)
    before = topic.partition(0).replicas
    others = [broker for broker in range(3) if broker not in before[:1]][:copies]
    reading = Reading(brokers.bootstrap_servers)
    with Producer(brokers.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
        with Sending(producer, "t") as sending:
            sending.wait_for_more()
            reading.start(1000)
            for there in (others, list(before), others):
                [moved] = admin.reassign("t", [0], to_brokers=there)
                assert (moved.error, set(moved.target)) == (None, set(there))
                wait_until_at(admin, *moved.target)
                sending.wait_for_more()
            waited_for(lambda: sending.acked >= 2000)
        producer.flush()
    assert (sending.failures, sending.acked) == ([], sending.sent)
    found = values(brokers.bootstrap_servers, "t", sending.sent)
    assert found == [[b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)]
    assert reading.join() == found[0][:1000]
    for broker in set(before) - set(others):
        waited_for(lambda broker=broker: not has_folder(brokers, broker, topic.topic_id))  # type: ignore[misc]


def test_one_copy_becomes_three_that_survive_a_broker_and_three_become_one(brokers: Brokers, admin: Admin) -> None:
    topic = admin.create_topic("t")
    [first] = topic.partition(0).replicas
    sent = [b"%d" % number for number in range(100)]
    fill(brokers, sent[:50])
    with Consumer(brokers.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition("t", 0): "earliest"})
        assert len(list(consumer.messages(50, timeout=30))) == 50
        [grown] = admin.reassign("t", replication_factor=3)
        assert (grown.replicas, grown.target[0], len(grown.target)) == ((first,), first, 3)
        wait_until_at(admin, *grown.target)
        assert not partition(admin).is_under_replicated
        admin.alter_topic("t", set={"min.insync.replicas": 2})
        fill(brokers, sent[50:75])
        brokers.kill(first)
        fill(brokers, sent[75:])
        assert [message.value for message in consumer.messages(50, timeout=30)] == sent[50:]
    brokers.start(first)
    wait_in_sync(admin, "t")
    with pytest.raises(InvalidSetting, match="topic t would have 1 replica"):
        admin.reassign("t", replication_factor=1)
    admin.alter_topic("t", set={"min.insync.replicas": 1})
    last = grown.target[2]
    [shrunk] = admin.reassign("t", to_brokers=[last], replication_factor=1)
    assert shrunk.target == (last,)
    wait_until_at(admin, last)
    fill(brokers, [b"alone"])
    assert records(brokers, 101) == [*sent, b"alone"]
    for broker in grown.target[:2]:
        waited_for(lambda broker=broker: not has_folder(brokers, broker, topic.topic_id))  # type: ignore[misc]
    state = brokers.running[last].record("t").states[0]
    assert (state.leader, state.isr, state.eligible, set(state.directories)) == (last, (last,), (), {last})


def test_what_is_staged_moves_too_and_is_committed_there(brokers: Brokers, admin: Admin) -> None:
    admin.create_topic("t", OF_A_QUERY, 1)
    query = Query(brokers.bootstrap_servers, "t", f"spark-stream-{uuid.uuid4()}")
    try:
        there = [2 if leader_of(admin, "t", number) != 2 else 0 for number in range(OF_A_QUERY)]

        def move() -> None:
            for number, broker in enumerate(there):
                admin.reassign("t", [number], to_brokers=[broker])
                wait_until_at(admin, broker, number=number)

        parts = stage(query, 0, rows(0), move)
        there.reverse()
        move()
        assert query.coordinator.commit(query.batch(0, parts)) is Outcome.COMMITTED
        assert read(brokers.bootstrap_servers, "t") == expected(rows(0))
    finally:
        query.close()


# --- failures amid a move


def moving(brokers: Brokers, admin: Admin, copies: int, *to: int) -> bytes:
    """A topic with several pieces that is being moved at a rate at which that does not end; its id."""
    topic = admin.create_topic("t", 1, copies)
    fill(brokers, PIECES)
    [begun] = admin.reassign("t", to_brokers=to, throttled_rate=NEVER)
    assert begun.error is None
    return topic.topic_id


def test_a_move_goes_on_after_the_broker_that_copies_was_killed(brokers: Brokers, admin: Admin) -> None:
    moving(brokers, admin, 1, 1)
    brokers.kill(1)
    fill(brokers, [b"amid"])
    brokers.start(1)
    admin.throttle_reassignments(0)
    wait_until_at(admin, 1)
    assert records(brokers, 9) == [*PIECES, b"amid"]


def test_a_move_goes_on_after_its_leader_and_the_controller_were_killed(brokers: Brokers, admin: Admin) -> None:
    brokers.start(3)
    moving(brokers, admin, 2, 2, 3)
    brokers.kill(leader_of(admin, "t"))
    fill(brokers, [b"amid"])
    waited_for(lambda: admin.describe_controller() in brokers.running)
    controller = admin.describe_controller()
    assert controller is not None
    if controller not in (0, 1):
        brokers.kill(controller)
        waited_for(lambda: admin.describe_controller() in brokers.running)
        brokers.start(controller)
    [progress] = admin.reassignments()
    assert (set(progress.replicas), progress.target, progress.throttled_rate) == ({0, 1}, (2, 3), NEVER)
    admin.throttle_reassignments(0)
    wait_until_at(admin, 2, 3)
    assert records(brokers, 9) == [*PIECES, b"amid"]


def test_a_cancelled_move_leaves_everything_where_it_was(brokers: Brokers, admin: Admin) -> None:
    topic_id = moving(brokers, admin, 1, 1)
    waited_for(lambda: has_folder(brokers, 1, topic_id))
    [cancelled] = admin.cancel_reassignments("t")
    assert (cancelled.error, cancelled.target) == (None, (0,))
    waited_for(lambda: not has_folder(brokers, 1, topic_id))
    fill(brokers, [b"after"])
    assert (partition(admin).replicas, partition(admin).isr) == ((0,), (0,))
    assert (admin.reassignments(), admin.cancel_reassignments()) == ([], [])
    admin.reassign("t", to_brokers=[1])
    wait_until_at(admin, 1)
    assert records(brokers, 9) == [*PIECES, b"after"]


def test_a_move_whose_new_replica_leads_is_cancelled_once_an_old_one_is_in_sync(brokers: Brokers, admin: Admin) -> None:
    brokers.start(3)
    topic_id = moving(brokers, admin, 1, 1)
    admin.cancel_reassignments()
    admin.reassign("t", to_brokers=[2, 3], replication_factor=2, throttled_rate=NEVER)
    brokers.kill(3)
    admin.throttle_reassignments(0)
    waited_for(lambda: set(partition(admin).isr) == {0, 2})
    brokers.kill(0)
    waited_for(lambda: partition(admin).leader == 2 and partition(admin).isr == (2,))
    fill(brokers, [b"amid"])
    [refused] = admin.cancel_reassignments()
    assert isinstance(refused.error, ReassignmentNotCancelled)
    brokers.start(0)
    waited_for(lambda: set(partition(admin).isr) == {0, 2})
    [cancelled] = admin.cancel_reassignments()
    assert cancelled.error is None
    assert (partition(admin).replicas, partition(admin).isr, partition(admin).leader) == ((0,), (0,), 0)
    assert records(brokers, 9) == [*PIECES, b"amid"]
    brokers.start(3)
    for broker in (2, 3):
        waited_for(lambda broker=broker: not has_folder(brokers, broker, topic_id))  # type: ignore[misc]


def test_a_replica_that_is_added_again_is_not_in_sync_by_what_it_had_said_before(
    brokers: Brokers, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log was removed. The leader is the same, and so is the registration of the broker, which fetches nothing yet
    when the leader looks at who may join."""
    topic_id = admin.create_topic("t").topic_id
    fill(brokers, PIECES)
    admin.reassign("t", to_brokers=[0, 1], replication_factor=2)
    wait_until_at(admin, 0, 1)
    admin.reassign("t", to_brokers=[0], replication_factor=1)
    wait_until_at(admin, 0)
    waited_for(lambda: not has_folder(brokers, 1, topic_id))
    directory, may_open = brokers.running[1].broker.host._directory, threading.Event()
    open_log = directory.open_log

    def late(*given: Any) -> Any:
        assert may_open.wait(30)
        return open_log(*given)

    monkeypatch.setattr(directory, "open_log", late)
    admin.reassign("t", to_brokers=[0, 1], replication_factor=2)
    host = brokers.running[0].broker.host
    leader = host.leader_of(topic_id, 0)
    waited_for(lambda: (led := leader.role.leadership) is not None and led.replicas == (0, 1))
    InSyncSets(host, SYSTEM_CLOCK).look()
    assert brokers.running[0].record("t").states[0].isr == (0,)
    may_open.set()
    wait_until_at(admin, 0, 1)
    assert brokers.running[1].broker.host.replica_of(topic_id, 0).end_offset == len(PIECES)


# --- lost brokers


def test_an_empty_broker_replaces_a_lost_one_in_every_topic(brokers: Brokers, admin: Admin) -> None:
    for name in ("t", "u"):
        admin.create_topic(name, 2, 3)
    admin.create_topic("single", 3, 1)
    fill(brokers, PIECES)
    brokers.kill(2)
    brokers.start(3)
    begun = {each.partition: each for each in admin.reassign(from_broker=2)}
    single = [each for each in begun.values() if each.partition.topic == "single"]
    assert [type(each.error) for each in single] == [LeaderNotAvailable], "its only copy is lost"
    assert begun.keys() == {TopicPartition(name, number) for name in ("t", "u") for number in range(2)} | {
        each.partition for each in single
    }
    waited_for(lambda: not admin.reassignments())
    for name in ("t", "u"):
        for each in admin.describe_topics([name])[0].partitions:
            assert set(each.replicas) == set(each.isr) == {0, 1, 3}
    assert [each for each in admin.reassign(from_broker=2) if each.error is None] == []
    brokers.kill(0)
    brokers.kill(1)
    assert records(brokers, 8) == PIECES


def test_an_empty_directory_of_the_same_broker_gets_all_its_copies_again(brokers: Brokers, admin: Admin) -> None:
    topic = admin.create_topic("t", 1, 3)
    fill(brokers, PIECES)
    directory = Path(brokers.running[2].broker.settings.log_dir)
    brokers.kill(2)
    shutil.rmtree(directory)
    fill(brokers, [b"amid"])
    brokers.start(2)
    wait_in_sync(admin, "t")
    assert brokers.running[2].broker.host.replica_of(topic.topic_id, 0).end_offset == 9


def test_a_broker_that_comes_back_removes_the_log_that_was_moved_meanwhile(brokers: Brokers, admin: Admin) -> None:
    topic = admin.create_topic("t", 1, 2)
    gone = topic.partition(0).replicas[1]
    fill(brokers, PIECES)
    assert has_folder(brokers, gone, topic.topic_id)
    brokers.kill(gone)
    [moved] = admin.reassign(from_broker=gone)
    wait_until_at(admin, *moved.target)
    brokers.start(gone)
    waited_for(lambda: not has_folder(brokers, gone, topic.topic_id))
    fill(brokers, [b"after"])
    assert records(brokers, 9) == [*PIECES, b"after"]


# --- throttle


def test_a_throttled_copy_holds_its_rate_and_slows_no_ack(brokers: Brokers, admin: Admin) -> None:
    admin.create_topic("t", 1, 2)
    fill(brokers, PIECES)
    rate = 800_000
    [broker] = set(range(3)) - set(partition(admin).replicas)
    began = time.monotonic()
    admin.reassign("t", replication_factor=3, throttled_rate=rate)
    fill(brokers, [b"amid"])
    acked = time.monotonic()
    assert [each.adding for each in admin.reassignments()] == [(broker,)], "the ack waited for the copy"
    waited_for(lambda: not admin.reassignments())
    took = time.monotonic() - began
    behind_first_pieces = sum(map(len, PIECES)) - rate // 10 - 2 * 64_000
    assert behind_first_pieces / rate < took, "faster than its rate"
    assert took < sum(map(len, PIECES)) / rate + 5, "slower than its rate"
    assert acked - began < took


def test_a_replica_that_has_caught_up_is_not_throttled_any_more(brokers: Brokers, admin: Admin) -> None:
    """The move does not end, because another broker of its target is away; acks wait for the one that has joined. At
    the rate they would wait for minutes."""
    brokers.start(3)
    rate = 2000
    admin.create_topic("t", 1, 1)
    fill(brokers, [b"first"])
    admin.reassign("t", to_brokers=[2, 3], replication_factor=2, throttled_rate=rate)
    brokers.kill(3)
    waited_for(lambda: set(partition(admin).isr) == {0, 2})
    fill(brokers, [b"%d" % number for number in range(200)])
    fill(brokers, PIECES)
    assert [each.throttled_rate for each in admin.reassignments()] == [rate]
    assert set(partition(admin).isr) == {0, 2}


# --- what is refused


def test_what_cannot_be_moved_is_refused_with_the_reason(brokers: Brokers, admin: Admin) -> None:
    moving(brokers, admin, 1, 1)
    [again] = admin.reassign("t", to_brokers=[2])
    assert isinstance(again.error, ReassignmentInProgress)
    assert "`kafkalog topics reassign t --cancel`" in str(again.error)
    with pytest.raises(UnknownBroker, match=r"^broker 7 is not registered in the cluster; live are \[0, 1, 2\]$"):
        admin.reassign("t", to_brokers=[1, 7])
    assert admin.reassign(from_broker=9) == [], "it holds nothing, as a lost broker after the end of its replacement"
    with pytest.raises(TooFewBrokers, match="t-0 with 3 replicas needs as many brokers, and only 2 may be used"):
        admin.reassign("t", to_brokers=[1, 2], replication_factor=3)
    with pytest.raises(KafkalogError, match="has no partition 4"):
        admin.reassign("t", [4], to_brokers=[1])
    [planned] = admin.cancel_reassignments(dry_run=True)
    assert (planned.target, len(admin.reassignments())) == ((0,), 1)
