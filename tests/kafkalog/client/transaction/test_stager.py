"""A task's side of the exactly-once write: staged rows outlive cut connections and killed brokers, once, in order."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog.client.admin import Admin
from kafkalog.client.cluster import Cluster, PartitionInfo, TopicInfo
from kafkalog.client.config import ClientSettings, parse_producer
from kafkalog.client.transaction import stager as staging
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome, TransactionCoordinator
from kafkalog.client.transaction.stager import NumberedTransactions, PartStager, abort_parts
from kafkalog.errors import (
    BrokerUnreachable,
    DeliveryTimedOut,
    InvalidArgument,
    KafkalogError,
    LeaderNotAvailable,
    StagedOutOfOrder,
    StagedPartLost,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.format.batch import read_header
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import PREFIX, PREFIX_SIZE, error_to_wire
from tests.free_ports import free_ports
from tests.kafkalog.client.transaction.test_coordinator import PARTITIONS, expected, read, rows
from tests.proxy import proxied
from tests.threads import NoThreads, join_all
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(180)
FAST = {"retry.backoff.ms": 10}


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[LocalCluster]:
    """A cluster of two brokers that may be killed; they are to be running again at the end of a test."""
    with LocalCluster(brokers=2) as running:
        yield running


def create(cluster: LocalCluster, topic: str) -> str:
    """Make a topic; returns a transactional id."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, PARTITIONS)
    return f"spark-stream-{uuid.uuid4()}"


def stager(cluster: Cluster, transactional_id: str, batch_id: int = 0, part: int = 0, **settings: Any) -> PartStager:
    return PartStager(cluster, parse_producer(settings), transactional_id, batch_id, part)


def table(values: list[str]) -> pa.Table:
    numbers = [number % PARTITIONS for number in range(len(values))]
    return pa.table({"value": values, "partition": pa.array(numbers, pa.int32())})


def fail_after_staging(task: PartStager, topic: str) -> None:
    task.stage({topic: table(rows(0))})
    task.finish()
    raise ZeroDivisionError


def test_connections_cut_at_any_byte_stage_each_batch_once(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    staged = [rows(0, 300, f"{number:02}") for number in range(20)]
    port = cluster.brokers[0].data_port
    with proxied(cluster.bootstrap_servers, port, **FAST) as (behind, proxy), stager(behind, name) as task:
        for number, each in enumerate(staged):
            proxy.cut_after(1 + number * 211)
            task.stage({topic: table(each)})
            parts = task.finish()  # else one connection's end would cut several batches at once
        assert proxy.accepted > 15
        coordinator = TransactionCoordinator(behind)
        assert coordinator.commit(CommitBatch(name, 0, "run", True, b"", parts)) is Outcome.COMMITTED
        coordinator.close()
    assert read(cluster.bootstrap_servers, topic) == expected(*staged)


def test_a_topic_created_again_is_found_although_this_process_knew_the_old_one(
    cluster: LocalCluster, topic: str
) -> None:
    name = create(cluster, topic)
    with contextlib.closing(Cluster(cluster.bootstrap_servers, **FAST)) as kept:
        with stager(kept, name) as task:
            task.stage({topic: table(rows(0))})
            task.finish()
        with Admin(cluster.bootstrap_servers) as admin:
            admin.delete_topic(topic)
            anew = admin.create_topic(topic, PARTITIONS)
        with stager(kept, name, batch_id=1) as task:
            task.stage({topic: table(rows(1))})
            assert {part.topic_id for part in task.finish()} == {anew.topic_id}


def test_a_topic_created_again_under_a_task_fails_it_at_once(cluster: LocalCluster, topic: str) -> None:
    """What the task has staged is gone with the old one."""
    name = create(cluster, topic)
    with (
        contextlib.closing(Cluster(cluster.bootstrap_servers, **FAST)) as connected,
        stager(connected, name, **{"delivery.timeout.ms": 20_000}) as task,
    ):
        task.stage({topic: table(rows(0))})
        task.finish()
        with Admin(cluster.bootstrap_servers) as admin:
            admin.delete_topic(topic)
            admin.create_topic(topic, PARTITIONS)
        with pytest.raises(UnknownTopicId):
            stage_and_finish(task, topic)


def test_a_topic_created_again_fails_a_task_that_has_trouble_with_another_one(
    cluster: LocalCluster, topic: str
) -> None:
    """All of it was acknowledged before, and is gone."""
    name, anew = create(cluster, topic), f"{topic}.anew"
    create(cluster, anew)
    port = cluster.brokers[0].data_port
    with proxied(cluster.bootstrap_servers, port, **FAST) as (behind, proxy), stager(behind, name) as task:
        task.stage({topic: table(rows(0)), anew: table(rows(0))})
        task.finish()
        with Admin(cluster.bootstrap_servers) as admin:
            admin.delete_topic(anew)
            admin.create_topic(anew, PARTITIONS)
        proxy.cut()
        with pytest.raises(UnknownTopicId):
            stage_and_finish(task, topic)


def test_rows_for_a_partition_that_is_added_under_a_task_are_staged_unless_the_topic_was_created_again(
    cluster: LocalCluster, topic: str
) -> None:
    name = create(cluster, topic)
    added = [pa.table({"value": ["x"], "partition": pa.array([PARTITIONS + more], pa.int32())}) for more in range(2)]
    with contextlib.closing(Cluster(cluster.bootstrap_servers, **FAST)) as behind, stager(behind, name) as task:
        task.stage({topic: table(rows(0))})
        with Admin(cluster.bootstrap_servers) as admin:
            admin.alter_topic(topic, partitions=PARTITIONS + 1)
            task.stage({topic: added[0]})
            assert [part.partition for part in task.finish()] == [*range(PARTITIONS + 1)]
            admin.delete_topic(topic)
            admin.create_topic(topic, PARTITIONS + 2)
        with pytest.raises(UnknownTopicId):
            task.stage({topic: added[1]})


def test_answers_that_are_lost_stage_nothing_twice(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    port = cluster.brokers[0].data_port
    with proxied(cluster.bootstrap_servers, port, **FAST) as (behind, proxy), stager(behind, name) as task:
        task.stage({topic: table(rows(0))})
        task.finish()
        proxy.hold_answers()
        task.stage({topic: table(rows(1))})
        cut = threading.Timer(0.3, proxy.cut)
        cut.start()
        parts = task.finish()
        join_all([cut], 60)
        coordinator = TransactionCoordinator(behind)
        coordinator.commit(CommitBatch(name, 0, "run", True, b"", parts))
        coordinator.close()
    assert [part.batches for part in parts] == [2] * PARTITIONS
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0), rows(1))


def test_a_write_that_stages_for_longer_than_the_retention_commits(topic: str) -> None:
    """Its first task has ended, and what it staged is on one broker; the others stage, and wait for rows, elsewhere."""
    settings = {"transaction.staged.retention.ms": 4000}
    with LocalCluster(brokers=2, settings=settings) as brokers:
        name, abandoned = create(brokers, topic), f"spark-stream-{uuid.uuid4()}"
        with contextlib.closing(Cluster(brokers.bootstrap_servers, **FAST)) as cluster:
            coordinator = TransactionCoordinator(cluster)
            with stager(cluster, abandoned) as task:
                task.stage({topic: table(rows(0))})
                task.finish()
            first = [f"{number:03}" for number in range(60)]
            with stager(cluster, name) as task:
                task.stage({topic: pa.table({"value": first, "partition": pa.array([0] * 60, pa.int32())})})
                parts = task.finish()
            with stager(cluster, name, part=1) as task:
                last = [f"{number:03}" for number in range(60, 90)]
                task.stage({topic: pa.table({"value": last[:20], "partition": pa.array([1] * 20, pa.int32())})})
                waited_for(lambda: not coordinator.staged(abandoned), 60)  # older than that, parts expire
                task.stage({topic: pa.table({"value": last[20:], "partition": pa.array([1] * 10, pa.int32())})})
                parts += task.finish()
            leaders = [cluster.leader_of(TopicPartition(topic, number))[1].broker_id for number in (0, 1)]
            assert leaders[0] != leaders[1]
            assert coordinator.commit(CommitBatch(name, 0, "run", True, b"", parts)) is Outcome.COMMITTED
            coordinator.close()
        assert read(brokers.bootstrap_servers, topic) == [first, last, []]


@pytest.mark.parametrize("step", ["stage", "prepare", "decide", "apply", "done"])
def test_brokers_killed_after_any_step_lose_and_double_nothing(
    own_cluster: LocalCluster, topic: str, step: str
) -> None:
    name = create(own_cluster, topic)
    cluster = Cluster(own_cluster.bootstrap_servers, **FAST)
    coordinator: Any = TransactionCoordinator(cluster)
    kills: list[str] = []

    def kill(*_: Any) -> None:
        kills.append(step)
        for broker in own_cluster.brokers:
            broker.kill()
        for broker in own_cluster.brokers:
            broker.start()

    def then_kill(method: str) -> None:
        original = getattr(coordinator, method)

        def wrapped(*arguments: Any) -> Any:
            result = original(*arguments)
            if not kills:
                kill()
            return result

        setattr(coordinator, method, wrapped)

    if step == "apply":
        done = coordinator._write_done
        coordinator._write_done = lambda *arguments: (kills or kill(), done(*arguments))[1]
    elif step != "stage":
        then_kill({"prepare": "_prepare", "decide": "_decide", "done": "_write_done"}[step])
    with stager(cluster, name, 0) as task:
        task.stage({topic: table(rows(0, 60))})
        if step == "stage":
            kill()
        parts = task.finish()
    assert coordinator.commit(CommitBatch(name, 0, "run", True, b"", parts)) is Outcome.COMMITTED
    assert kills
    with stager(cluster, name, 1) as task:
        task.stage({topic: table(rows(1))})
        assert coordinator.commit(CommitBatch(name, 1, "run", True, b"", task.finish())) is Outcome.COMMITTED
    coordinator.close()
    cluster.close()
    assert read(own_cluster.bootstrap_servers, topic) == expected(rows(0, 60), rows(1))


def test_rows_without_key_or_partition_are_spread_and_parts_ordered(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    behind = Cluster(cluster.bootstrap_servers)
    found = []
    for part in range(2):
        with stager(behind, name, part=part, **{"batch.records": 2}) as task:
            task.stage({topic: pa.table({"value": [f"{part}{number}" for number in range(6)]})})
            found.append(task.finish())
    assert [[(each.partition, each.records) for each in parts] for parts in found] == [
        [(0, 2), (1, 2), (2, 2)],
        [(0, 2), (1, 2), (2, 2)],
    ]
    coordinator = TransactionCoordinator(behind)
    coordinator.commit(CommitBatch(name, 0, "run", True, b"", [*found[1], *found[0]]))
    coordinator.close()
    behind.close()
    first = producer_id_of(name) % PARTITIONS
    stored = read(cluster.bootstrap_servers, topic)
    assert stored[first:] + stored[:first] == [  # each part begins one partition further
        ["00", "01", "14", "15"],
        ["02", "03", "10", "11"],
        ["04", "05", "12", "13"],
    ]


def test_rows_of_a_task_keep_their_order_whatever_they_name(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    other = f"{topic}.other"
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(other, 1)
    parts = []
    with contextlib.closing(Cluster(cluster.bootstrap_servers)) as behind:
        for part in range(2):
            with stager(behind, name, part=part, **{"batch.records": 7}) as task:
                for batch in range(5):
                    numbers = range(part * 1000 + batch * 30, part * 1000 + batch * 30 + 30)
                    mixed = pa.table(
                        {
                            "value": [f"{number:04}" for number in numbers],
                            "key": [f"k{number % 4}" if number % 3 == 0 else None for number in numbers],
                            "partition": pa.array([0 if number % 5 == 0 else None for number in numbers], pa.int32()),
                        }
                    )
                    task.stage({topic: mixed, other: mixed})
                parts += task.finish()
        coordinator = TransactionCoordinator(behind)
        coordinator.commit(CommitBatch(name, 0, "run", True, b"", parts))
        coordinator.close()
    everything = [f"{part * 1000 + number:04}" for part in range(2) for number in range(150)]
    assert read(cluster.bootstrap_servers, other) == [everything]
    stored = read(cluster.bootstrap_servers, topic)
    assert all(values == sorted(values) for values in stored)
    assert sorted(value for values in stored for value in values) == everything


def test_topics_with_a_transaction_each_share_a_connection_to_each_broker(
    own_cluster: LocalCluster, topic: str
) -> None:
    topics = [f"{topic}.{number}" for number in range(4)]
    for each in topics:
        create(own_cluster, each)
    with contextlib.closing(Cluster(own_cluster.bootstrap_servers, **FAST)) as behind:
        coordinator = TransactionCoordinator(behind)
        infos = behind.describe_topics(topics)
        names = coordinator.numbered(topic, infos)
        coordinator.forget([coordinator.decision(names[1])])
        names[1] += ":1"
        asked: list[list[str]] = []

        def numbered(found: Sequence[TopicInfo]) -> list[str]:
            asked.append([each.name for each in found])
            return coordinator.numbered(topic, found)

        with PartStager(behind, parse_producer({}), NumberedTransactions(topic, numbered), 0, 0) as task:
            task.stage({each: table(rows(0)) for each in topics[:3]})
            task.stage({each: table(rows(1)) for each in topics})
            parts = task.finish()
            assert len(task._links) == len(own_cluster.brokers) == 2
        assert asked == [topics[:3], topics[3:]]
        assert [len(behind._idle[broker.broker_id]) for broker in behind.describe().brokers] == [1, 1]
        for each, name in zip(topics, names, strict=True):
            mine = [part for part in parts if part.topic == each]
            assert coordinator.commit(CommitBatch(name, 0, "", True, b"", mine)) is Outcome.COMMITTED
        coordinator.close()
    servers = own_cluster.bootstrap_servers
    assert [read(servers, each) for each in topics[:3]] == [expected(rows(0), rows(1))] * 3
    assert read(servers, topics[3]) == expected(rows(1))


def test_small_batches_of_one_task_fill_all_partitions_alike(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    with contextlib.closing(Cluster(cluster.bootstrap_servers)) as behind:
        used = []
        for batch_id in range(2 * PARTITIONS):
            with stager(behind, name, batch_id=batch_id) as task:
                task.stage({topic: pa.table({"value": rows(batch_id)})})
                [part] = task.finish()
                used.append(part.partition)
                task.abort()
    assert sorted(used) == sorted([*range(PARTITIONS), *range(PARTITIONS)])


def test_what_cannot_be_staged_is_reported_and_a_failed_task_leaves_nothing(cluster: LocalCluster, topic: str) -> None:
    name = create(cluster, topic)
    behind = Cluster(cluster.bootstrap_servers)
    coordinator = TransactionCoordinator(behind)
    with stager(behind, name) as task:
        task.stage({topic: table(rows(0))})
        task.finish()
        assert len(coordinator.staged(name)) == PARTITIONS
        with pytest.raises(UnknownPartition):
            task.stage({topic: pa.table({"value": ["x"], "partition": pa.array([PARTITIONS], pa.int32())})})
    with pytest.raises(ZeroDivisionError), stager(behind, name, part=1) as task:
        fail_after_staging(task, topic)
    assert {(each.parts, each.commit_uuid) for each in coordinator.staged(name)} == {(1, b"")}
    with pytest.raises(InvalidArgument), stager(behind, name) as task:
        task.stage({topic: pa.table({"value": [1]})})
    with pytest.raises(UnknownTopic), stager(behind, name) as task:
        task.stage({f"{topic}.none": pa.table({"value": ["x"]})})
    coordinator.close()
    behind.close()


def test_a_leader_that_stays_away_fails_the_task_within_the_delivery_timeout(
    own_cluster: LocalCluster, topic: str
) -> None:
    name = create(own_cluster, topic)
    cluster = Cluster(own_cluster.bootstrap_servers, **FAST)
    with stager(cluster, name, **{"delivery.timeout.ms": 500}) as task:
        task.stage({topic: table(rows(0))})
        task.finish()
        for broker in own_cluster.brokers:
            broker.kill()
        try:
            with pytest.raises(DeliveryTimedOut):
                stage_and_finish(task, topic)
        finally:
            for broker in own_cluster.brokers:
                broker.start()
    cluster.close()


def stage_and_finish(task: PartStager, topic: str) -> None:
    task.stage({topic: table(rows(1))})
    task.finish()


def test_interruptions_with_acks_between_do_not_add_up(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = create(cluster, topic)
    passed = 0.0
    passing = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(staging, "time", passing)
    port = cluster.brokers[0].data_port
    with proxied(cluster.bootstrap_servers, port, **FAST) as (behind, proxy), stager(behind, name) as task:
        for number in range(3):
            proxy.cut_after(100)
            task.stage({topic: table(rows(number))})
            parts = task.finish()
            passed += 1000.0  # delivery.timeout.ms is 120 s
        assert proxy.accepted == 4
    assert [part.batches for part in parts] == [3] * PARTITIONS


def test_a_task_that_fails_leaves_no_connection_with_an_answer_outstanding_to_the_next(
    cluster: LocalCluster, topic: str
) -> None:
    name = create(cluster, topic)
    port = cluster.brokers[0].data_port
    with proxied(cluster.bootstrap_servers, port, **FAST) as (behind, proxy):
        with stager(behind, name) as task:
            task.stage({topic: table(rows(0))})
            task.finish()
        assert proxy.accepted == 1
        proxy.hold_answers()
        with pytest.raises(ZeroDivisionError), stager(behind, name, part=1) as task:  # on the same connection
            fail_while_staging(task, topic)
        assert proxy.accepted == 1
        assert not any(behind._idle.values())
        proxy.cut()
        with stager(behind, name, part=2) as task:
            task.stage({topic: table(rows(2))})
            assert [part.records for part in task.finish()] == [4] * PARTITIONS
        assert proxy.accepted == 2


def fail_while_staging(task: PartStager, topic: str) -> None:
    task.stage({topic: table(rows(1))})
    raise ZeroDivisionError


# --- over leaders that answer as the test says, without a broker ------------------------------------------------------

CUT = BrokerUnreachable(address="here:1", reason="it closed the connection")


def info(name: str, partitions: int = PARTITIONS, topic_id: bytes = b"i" * 16) -> TopicInfo:
    each = tuple(PartitionInfo(number, 1, 0, (1,), (1,)) for number in range(partitions))
    return TopicInfo(name, topic_id, {}, {"max.message.bytes": str(1 << 20)}, each, 0)


class Leader:
    """A connection to a leader. Keeps the sequences of what was sent, and hands out `answers`: errors, or acks of as
    many as are told; an ack of each by itself where none is left."""

    address = "here:1"

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        self._correlation_ids: list[int] = []
        self.is_closed = False

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._leaders.sends_cut:
            self._leaders.sends_cut -= 1
            raise CUT
        data = b"".join(pieces)
        header_length, _ = PREFIX.unpack_from(data)
        header = pb.RequestHeader.FromString(data[PREFIX_SIZE : PREFIX_SIZE + header_length])
        self._correlation_ids.append(header.correlation_id)
        self._leaders.sent.append(read_header(data, PREFIX_SIZE + header_length, "t-0").base_sequence)
        self._leaders.unanswered_most = max(self._leaders.unanswered_most, len(self._correlation_ids))

    def receive_some(self) -> list[pb.ReplyHeader]:
        answer = self._leaders.answers.pop(0) if self._leaders.answers else None
        if isinstance(answer, BrokerUnreachable):
            raise answer
        reply = pb.ReplyHeader(correlation_id=self._correlation_ids.pop(0))
        part = reply.stage.partitions.add()
        if answer is not None:
            part.error.CopyFrom(error_to_wire(answer))
        return [reply]

    def close(self) -> None:
        self.is_closed = True


class Leaders:
    """In the place of a Cluster: one broker leads everything, and `topics` are as the broker tells them."""

    settings = ClientSettings.parse({})

    def __init__(self) -> None:
        self.topics = {"t": info("t")}
        self.answers: list[KafkalogError | None] = []
        self.sends_cut = 0  # that many sends fail next
        self.sent: list[int] = []
        self.unanswered_most = 0
        self.made: list[Leader] = []
        self.pauses: list[float] = []

    def describe_topics(self, names: Sequence[str]) -> list[TopicInfo]:
        return [self.topics[name] for name in names]

    def leader_of(self, partition: TopicPartition, topic_id: bytes) -> tuple[TopicInfo, SimpleNamespace]:
        return self.topics[partition.topic], SimpleNamespace(broker_id=1)

    def topic(self, name: str, *, patient: bool) -> TopicInfo:
        return self.topics[name]

    def refresh(self, names: object, *, patient: bool) -> None:
        """Always known."""

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def await_answer(self, broker_id: int, connection: Leader, partition: TopicPartition) -> None:
        """`connection` answers at once, or fails."""

    def borrow_data(self, broker_id: int) -> Leader:
        self.made.append(Leader(self))
        return self.made[-1]

    def give_back(self, broker_id: int, connection: Leader) -> None:
        """Nobody borrows it again."""


def staging_to(leaders: Leaders, transaction: Any = "tx", **settings: Any) -> PartStager:
    cluster: Any = leaders
    return PartStager(cluster, parse_producer(settings), transaction, 3, 5)


def one(value: str = "v") -> pa.Table:
    return pa.table({"value": [value], "partition": pa.array([0], pa.int32())})


def test_a_task_that_finds_no_thread_for_its_renewal_stages_and_starts_it_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = NoThreads(monkeypatch, lambda name: name == "staged-renewal")
    with staging_to(Leaders()) as stager:
        stager.stage({"t": one()})
        machine.on = False
        stager.stage({"t": one()})
        assert stager._renewal._thread.is_alive()
        assert [part.batches for part in stager.finish()] == [2]
    assert len(machine.refused) == 2


def test_an_ack_ends_the_pauses_and_connections_in_doubt_are_closed() -> None:
    leaders = Leaders()
    with staging_to(leaders) as task:
        first = leaders.settings.retry_backoff_ms / 1000
        for _ in range(2):
            leaders.answers = [CUT, CUT, CUT]
            task.stage({"t": one()})
            task.finish()
        assert leaders.pauses == [first, 2 * first, 4 * first] * 2
        assert leaders.sent == [0] * 4 + [1] * 4
        assert [each.is_closed for each in leaders.made] == [True] * 6 + [False]


@pytest.mark.parametrize("cuts", [1, 2])
def test_what_a_failed_send_was_of_is_in_flight_until_it_is_acknowledged(cuts: int) -> None:
    leaders = Leaders()
    with staging_to(leaders) as task:
        leaders.sends_cut = cuts
        task.stage({"t": one()})
        [part] = task.finish()
        assert leaders.sent == [0]
        assert part.batches == 1
        assert not any(part.unacked for part in task._parts.values())


def out_of_order(expected: int) -> StagedOutOfOrder:
    return StagedOutOfOrder(part=5, partition="t-0", sequence=1, expected=expected)


def test_a_leader_that_has_less_than_it_acknowledged_fails_the_task_at_once_and_one_that_has_not_does_not() -> None:
    leaders = Leaders()
    with staging_to(leaders) as task:
        task.stage({"t": one()})
        task.finish()
        leaders.answers = [out_of_order(1)]  # it was restarted with what it had acknowledged: sent again
        task.stage({"t": one()})
        task.finish()
        assert leaders.sent == [0, 1, 1]
        leaders.answers = [out_of_order(1)]
        task.stage({"t": one()})
        with pytest.raises(StagedPartLost, match="has 1 batches of part 5 and had acknowledged 2"):
            task.finish()
        assert leaders.sent == [0, 1, 1, 2]


def test_a_topic_created_again_with_more_partitions_fails_the_task_that_needs_them() -> None:
    leaders = Leaders()
    with staging_to(leaders) as task:
        task.stage({"t": one()})
        beyond = pa.table({"value": ["v"], "partition": pa.array([PARTITIONS], pa.int32())})
        leaders.topics["t"] = info("t", PARTITIONS + 1, b"anew".ljust(16))
        with pytest.raises(UnknownTopicId):
            task.stage({"t": beyond})
        leaders.topics["t"] = info("t", PARTITIONS + 1)
        task.stage({"t": beyond})
        assert [part.partition for part in task.finish()] == [0, PARTITIONS]


def test_what_is_in_flight_is_bounded_by_the_producers_memory() -> None:
    leaders = Leaders()
    with staging_to(leaders, **{"buffer.memory": 1 << 20, "compression.type": "none"}) as task:
        for _ in range(40):
            task.stage({"t": one("v" * 100_000)})
        assert leaders.unanswered_most == 11
        task.finish()


def test_parts_are_discarded_wherever_they_can_be() -> None:
    """Neither a topic that is gone nor a broker that is away keeps the others from being told."""
    told: dict[int, list[bytes]] = {}

    class Some:
        def look_up(self, topics: object, patient: bool) -> None:
            raise CUT

        def known_topic(self, name: str) -> SimpleNamespace | None:
            return None if name == "gone" else SimpleNamespace(name=name, topic_id=name.encode())

        def leader(self, topic: object, partition: int) -> SimpleNamespace:
            if partition == 3:
                raise LeaderNotAvailable(partition="a-3", broker_id=-1)
            return SimpleNamespace(broker_id=partition)

        def call(self, method: str, request: Any, broker_id: int, patient: bool) -> None:
            if broker_id == 1:
                raise CUT
            told[broker_id] = [each for part in request.partitions for each in part.uuids]

    cluster: Any = Some()
    places = [("a", 1), ("gone", 0), ("a", 0), ("a", 2), ("b", 2), ("a", 2), ("a", 3)]
    parts = [(TopicPartition(*place), place[0].encode(), b"%d" % index) for index, place in enumerate(places)]
    abort_parts(cluster, [*parts, (TopicPartition("b", 0), b"of the old b", b"7")])
    assert told == {0: [b"2"], 2: [b"3", b"5", b"4"]}


@pytest.mark.parametrize("known", [False, True], ids=["unknown topics", "topics known long ago"])
def test_no_broker_is_waited_for_to_discard_parts(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    with contextlib.closing(Cluster(f"127.0.0.1:{free_ports(1)}", metadata_max_age_ms=1)) as away:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            raise CUT  # as at the end of the time

        monkeypatch.setattr(away, "pause", pause)
        names = ["a", "b"]
        if known:
            away.remember(*map(info, names))
            waited_for(lambda: all(away.fresh_topic(name) is None for name in names))
        abort_parts(away, [(TopicPartition(name, 0), info(name).topic_id, bytes(16)) for name in names])
        assert pauses == []
