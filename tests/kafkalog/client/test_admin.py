"""Administering a real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, AtTimestamp, Producer, TopicPartition
from kafkalog.client.admin import AfterBytes, ListedOffset, list_offsets, wait_for_records
from kafkalog.client.cluster import Cluster, ClusterInfo
from kafkalog.client.config import ClientSettings
from kafkalog.client.groups import GroupMember, keep_member, leave_group
from kafkalog.errors import (
    BrokerBusy,
    BrokerStopping,
    BrokerUnreachable,
    Closed,
    InvalidArgument,
    InvalidPartitions,
    InvalidSetting,
    InvalidTopicName,
    KafkalogError,
    LeaderNotAvailable,
    NotLeader,
    OffsetNotAvailable,
    OffsetOutOfRange,
    PartitionLost,
    RequestTimedOut,
    RetriableError,
    TopicExists,
    UnknownPartition,
    UnknownSetting,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from tests.waiting import suspend, waited_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as connected:
        yield connected


def test_a_change_waits_for_the_brokers_of_the_topic_and_names_those_that_do_not_follow() -> None:
    longer = {
        "zookeeper.session.timeout.ms": 60_000
    }  # a broker that is suspended for two waits of 10 s stays registered
    with LocalCluster(brokers=2, settings=longer) as own, Admin(own.bootstrap_servers.split(",")[0]) as admin:
        for name in ("t", "u"):
            assert admin.create_topic(name, partitions=2).behind == ()
        for changed in ("1", "2", "3"):
            assert admin.alter_topic("t", set={"retention.ms": changed}).behind == ()
            request = pb.DescribeTopicsRequest(names=["t"])
            [seen] = admin._cluster.call("DescribeTopics", request, broker_id=1).topics
            assert (seen.effective["retention.ms"], seen.behind) == (changed, False)
        assert len(admin.alter_topic("t", partitions=4).partitions) == 4
        suspend(pid := own.brokers[1].pid or 0)
        try:
            altered = admin.alter_topic("t", set={"retention.ms": 4})
            assert (altered.behind, altered.config) == ((1,), {"retention.ms": "4"})
            assert admin.delete_topic("u") == (1,)
        finally:
            os.kill(pid, signal.SIGCONT)
        waited_for(lambda: len(admin.describe_cluster().brokers) == 2)
        assert admin.alter_topic("t", set={"retention.ms": 5}).behind == ()
        assert admin.delete_topic("t") == ()


def test_offsets_of_more_partitions_than_a_request_takes_are_asked_for_in_several(
    admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.client.admin._LISTED_MAX", 2)
    admin.create_topic(topic, partitions=5)
    partitions = [TopicPartition(topic, number) for number in range(5)]
    found = admin.list_offsets(dict.fromkeys(partitions, "latest"))
    assert {partition: each.offset for partition, each in found.items()} == dict.fromkeys(partitions, 0)
    assert wait_for_records(admin._cluster, dict.fromkeys(partitions, 0), 1)  # the fifth may have changed
    assert not wait_for_records(admin._cluster, dict.fromkeys(partitions[:2], 0), 1)


def test_a_topic_from_its_making_to_its_end(admin: Admin, topic: str) -> None:
    made = admin.create_topic(topic, partitions=2, config={"retention.ms": 5000, "flush_messages": 1})
    assert (made.name, len(made.partitions), len(made.topic_id)) == (topic, 2, 16)
    assert made.config == {"retention.ms": "5000", "flush.messages": "1"}
    assert made.effective["retention.ms"] == "5000"
    assert made.effective["segment.bytes"] == str(1 << 30)
    assert admin.describe_topics([topic]) == [made]
    assert made in admin.topics()
    assert admin.describe_topics() == admin.topics()
    assert admin.describe_topics([]) == []
    altered = admin.alter_topic(topic, set={"segment.ms": 1000}, unset=["retention.ms"], partitions=3)
    assert altered.config == {"segment.ms": "1000", "flush.messages": "1"}
    assert len(altered.partitions) == 3
    assert altered.topic_id == made.topic_id
    admin.delete_topic(topic)
    assert topic not in [each.name for each in admin.topics()]
    again = admin.create_topic(topic)
    assert again.topic_id != made.topic_id
    assert len(again.partitions) == 1


@pytest.mark.parametrize("call", [Admin.describe_cluster, Admin.groups, lambda admin: admin.create_topic("made-soon")])
def test_a_broker_that_accepts_and_never_answers_delays_no_call_for_long(
    cluster: LocalCluster, call: Callable[[Admin], object]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as suspended:
        servers = f"127.0.0.1:{suspended.getsockname()[1]},{cluster.bootstrap_servers}"
        with Admin(servers) as admin:
            began = time.monotonic()
            call(admin)
            assert time.monotonic() - began < 10, "it is waited for until request.timeout.ms is over"


def test_a_busy_broker_is_left_out_of_what_is_unserved(
    admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create_topic(topic)

    def busy(*_: object, broker_id: int, **__: object) -> None:
        raise BrokerBusy(broker=broker_id, reason="256 calls of the lane of DescribeTopics are queued")

    info = admin._cluster.describe()
    monkeypatch.setattr(admin._cluster, "describe", lambda: info)
    monkeypatch.setattr(admin._cluster, "call", busy)
    assert admin.unserved([topic]) == {}


def test_the_cluster_is_described(cluster: LocalCluster, admin: Admin) -> None:
    described = admin.describe_cluster()
    [broker] = described.brokers
    assert (broker.host, broker.grpc_port, broker.data_port) == (
        "127.0.0.1",
        cluster.brokers[0].grpc_port,
        cluster.brokers[0].data_port,
    )
    assert described.cluster_id
    assert described.zookeeper_connect == cluster.zookeeper_connect.removesuffix(described.zookeeper_chroot)
    status = admin.describe_broker(broker.broker_id)
    assert status.pid == cluster.brokers[0].pid
    assert "dataport.connections" in status.counters


def test_a_broker_that_is_not_registered_is_told_at_once(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> None:
        raise AssertionError("it is tried again")

    admin.describe_cluster()
    monkeypatch.setattr(admin._cluster._stopped, "wait", again)
    with pytest.raises(BrokerUnreachable, match="no broker reachable at broker 99: it is not registered"):
        admin.describe_broker(99)


@pytest.mark.parametrize(
    "call, kind, sentence",
    [
        (lambda a, t: a.create_topic(t), TopicExists, "exists already"),
        (lambda a, t: a.create_topic("a/b"), InvalidTopicName, "'a/b' is not a topic name"),
        (lambda a, t: a.create_topic("x", partitions=0), InvalidArgument, "partitions must be from 1 to"),
        (lambda a, t: a.create_topic("x", partitions=1 << 20), InvalidPartitions, "not a valid number of partitions"),
        (lambda a, t: a.create_topic("x", config={"retention.mss": 1}), UnknownSetting, "did you mean 'retention.ms'?"),
        (lambda a, t: a.create_topic("x", config={"retention.ms": "x"}), InvalidSetting, "it must be a whole number"),
        (lambda a, t: a.alter_topic(t, partitions=1), InvalidPartitions, "partitions cannot be removed"),
        (lambda a, t: a.alter_topic("no.such"), UnknownTopic, "there is no topic 'no.such'"),
        (lambda a, t: a.delete_topic("no.such"), UnknownTopic, "there is no topic 'no.such'"),
        (lambda a, t: a.describe_topics([t, "no.such"]), UnknownTopic, "there is no topic 'no.such'"),
        (lambda a, t: a.list_offsets({TopicPartition(t, 2): "latest"}), UnknownPartition, "no partition 2; it has 2"),
        (lambda a, t: a.list_offsets({TopicPartition(t, 0): "last"}), InvalidArgument, "'last' is not a position in"),
        (lambda a, t: a.delete_records({TopicPartition(t, 0): 1}), OffsetOutOfRange, "is outside [0, 0]"),
        (lambda a, t: a.commit("g", {TopicPartition(t, 0): -1}), InvalidArgument, "is negative"),
        (lambda a, t: a.commit("g", {TopicPartition(t, 9): 1}), UnknownPartition, "has no partition 9; it has 2"),
        (lambda a, t: a.committed("a/b"), KafkalogError, "'a/b' is not a group name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_in_one_sentence(
    admin: Admin, topic: str, call: Callable[[Admin, str], object], kind: type[KafkalogError], sentence: str
) -> None:
    admin.create_topic(topic, partitions=2)
    with pytest.raises(kind) as raised:
        call(admin, topic)
    assert sentence in str(raised.value)


def test_offsets_are_listed(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"x", partition=0, timestamp_us=100 * number)
    assert admin.list_offsets({first: "latest", second: "latest"})[first].offset == 10
    found = admin.list_offsets({second: AtTimestamp(5), first: AtTimestamp(450)})
    assert list(found) == [second, first]
    assert found[first][:2] == (5, 500)
    assert found[first].size_bytes > 0
    assert found[second] == ListedOffset(None, None, 0)
    assert admin.delete_records({first: 4}) == {first: 4}
    assert admin.list_offsets({first: "earliest"})[first].offset == 4
    assert admin.delete_records({first: -1}) == {first: 10}
    assert admin.list_offsets({}) == {}


def test_bytes_lead_to_an_offset_and_a_wait_ends_when_an_end_moves(cluster: LocalCluster, topic: str) -> None:
    where = TopicPartition(topic, 0)
    with contextlib.closing(Cluster(cluster.bootstrap_servers)) as shared, Admin(shared) as admin:
        admin.create_topic(topic, config={"index.interval.bytes": 64})
        with Producer(cluster.bootstrap_servers) as producer:
            for _ in range(4):
                producer.send(topic, bytes(1000))
                producer.flush()
        size = admin.list_offsets({where: "latest"})[where].size_bytes // 4
        found = admin.list_offsets({where: AfterBytes(1, 2 * size)})[where]
        assert found == ListedOffset(3, None, 2 * size)
        assert wait_for_records(shared, {where: 3}, 30_000)
        assert not wait_for_records(shared, {where: 4}, 50)
        admin.delete_topic(topic)
        assert wait_for_records(shared, {where: 4}, 50)  # not known any more: whoever asks next is told


def test_all_brokers_wait_for_records_side_by_side() -> None:
    with (
        LocalCluster(brokers=2) as cluster,
        contextlib.closing(Cluster(cluster.bootstrap_servers)) as shared,
        Producer(cluster.bootstrap_servers, linger_ms=0) as producer,
    ):
        partitions = [TopicPartition("spread", number) for number in range(2)]
        Admin(shared).create_topic("spread", partitions=2)
        assert len({shared.leader_of(partition)[1].broker_id for partition in partitions}) == 2
        known = dict.fromkeys(partitions, 0)
        for partition in partitions:  # of one after the other the second would be asked half a minute later
            told: list[bool] = []
            asked = (shared, dict(known), 60_000)
            waiting = threading.Thread(target=lambda asked=asked, told=told: told.append(wait_for_records(*asked)))
            waiting.start()
            producer.send("spread", b"v", partition=partition.partition).result()
            waiting.join(20)
            assert told == [True]
            known[partition] += 1
        assert not wait_for_records(shared, known, 50)


def test_a_partition_that_another_client_added_is_found(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    with Admin(cluster.bootstrap_servers) as other:
        assert other.list_offsets({TopicPartition(topic, 0): "latest"})[TopicPartition(topic, 0)].offset == 0
        admin.alter_topic(topic, partitions=3)
        added = TopicPartition(topic, 1)  # the first that it does not know
        assert other.list_offsets({added: "latest"})[added].offset == 0
        with pytest.raises(UnknownPartition, match="has no partition 3; it has 3"):
            other.list_offsets({TopicPartition(topic, 3): "latest"})


def test_a_cluster_may_be_shared(cluster: LocalCluster, topic: str) -> None:
    shared = Cluster(cluster.bootstrap_servers)
    with Admin(shared) as admin:
        admin.create_topic(topic)
    with Producer(shared) as producer:
        producer.send(topic, b"x").result(30)
    assert shared.topic(topic).name == topic
    shared.close()
    with pytest.raises(Closed, match="this client is closed"):
        Admin(shared).topics()


def test_a_new_topic_is_known_whichever_broker_is_asked(topic: str) -> None:
    with LocalCluster(brokers=3) as three:
        for number in range(9):
            name = f"{topic}.{number}"
            maker, other = three.brokers[number % 3].address, three.brokers[(number + 1) % 3].address
            with Admin(maker) as admin, Producer(other) as producer:
                admin.create_topic(name, partitions=3)
                offsets = [producer.send(name, b"x", partition=partition).result(30).offset for partition in range(3)]
                assert offsets == [0, 0, 0]


# --- over brokers that answer as the test says ------------------------------------------------------------------------

LOST = PartitionLost(partition="t-0", reason="gone", broker_id=1, topic="t", number=0)
AWAY = BrokerUnreachable(address="here:1", reason="connection refused")


class Leading:
    """In the place of a Cluster: one broker leads all, `answers` says what it has of partitions, call by call."""

    def __init__(self, *answers: dict[int, int | KafkalogError]) -> None:
        self._answers = list(answers)
        self.settings = ClientSettings.parse({})
        self.asked: list[list[int]] = []
        self.refreshed: list[list[str]] = []

    def leader_of(self, partition: TopicPartition) -> tuple[SimpleNamespace, SimpleNamespace]:
        return SimpleNamespace(topic_id=b"t" * 16), SimpleNamespace(broker_id=1)

    def refresh(self, names: Iterable[str], *, patient: bool = True) -> None:
        self.refreshed.append(list(names))

    def retrying(self, attempt: Callable[[], object], *, finds_leaders: bool) -> object:
        while True:
            with contextlib.suppress(RetriableError):
                return attempt()

    def call(self, method: str, request: Any, broker_id: int, *, patient: bool = True) -> pb.ListOffsetsReply:
        numbers = [each.partition for each in request.partitions]
        self.asked.append(numbers)
        reply, answers = pb.ListOffsetsReply(), self._answers.pop(0)
        for number in numbers:
            answer = answers[number]
            if isinstance(answer, BrokerUnreachable):
                raise answer
            if isinstance(answer, KafkalogError):
                reply.partitions.add(error=error_to_wire(answer))
            else:
                reply.partitions.add(found=True, offset=answer)
        return reply

    def first_of(self, method: str, requests: Any, is_enough: Callable[[int, Any], bool]) -> bool:
        if not self._answers:
            raise AWAY
        return is_enough(1, self.call(method, requests[1], 1))


@pytest.mark.parametrize(
    "stale",
    [
        NotLeader(broker_id=1, partition="t-1"),
        UnknownTopicId(topic_id="74"),
        LeaderNotAvailable(partition="t-1", broker_id=1),
    ],
)
def test_a_partition_that_is_lost_is_asked_for_once_and_one_whose_leader_moved_until_it_is_found(
    stale: KafkalogError,
) -> None:
    leading: Any = Leading({0: LOST, 1: stale, 2: 5}, {1: 7, 2: 6})
    places = [TopicPartition("t", number) for number in range(3)]
    failed: dict[TopicPartition, KafkalogError] = {}
    found = list_offsets(leading, dict.fromkeys(places, "latest"), failed)
    assert {each: found[each].offset for each in found} == {places[1]: 7, places[2]: 6}
    assert list(map(str, failed)) == ["t-0"]
    assert leading.asked == [[0, 1, 2], [1, 2]]
    assert leading.refreshed == [["t"]]


def test_the_end_of_a_partition_is_asked_for_until_its_new_leader_knows_it() -> None:
    partition = TopicPartition("t", 0)
    unknown = OffsetNotAvailable(partition="t-0", leader_epoch=2)
    leading: Any = Leading({0: AWAY}, {0: unknown}, {0: 5})
    assert list_offsets(leading, {partition: "latest"})[partition].offset == 5
    assert leading.refreshed == [["t"], ["t"]]  # each time: another may lead


def test_ends_that_are_not_known_yet_are_not_waited_for_if_so_asked() -> None:
    places = [TopicPartition("t", number) for number in range(2)]
    unknown = OffsetNotAvailable(partition="t-0", leader_epoch=2)
    leading: Any = Leading({0: unknown, 1: 5})
    failed: dict[TopicPartition, KafkalogError] = {}
    found = list_offsets(leading, dict.fromkeys(places, "latest"), failed, awaits_ends=False)
    assert {each: found[each].offset for each in found} == {places[1]: 5}
    assert {each: type(error) for each, error in failed.items()} == {places[0]: OffsetNotAvailable}
    assert leading.refreshed == []


@pytest.mark.parametrize(("answers", "is_news"), [([{0: 0}], False), ([{0: 6}], True), ([{0: LOST}], True), ([], True)])
def test_a_wait_for_records_ends_with_whatever_the_next_question_has_to_tell(
    answers: list[dict[int, int | KafkalogError]], is_news: bool
) -> None:
    leading: Any = Leading(*answers)
    assert wait_for_records(leading, {TopicPartition("t", 0): 0}, 10) is is_news


def test_what_an_operator_changes_or_deletes_is_not_known_as_it_was(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    asking = admin._cluster
    assert asking.topic(topic).partitions
    admin.alter_topic(topic, {"retention.ms": 12345}, partitions=2)
    known = asking.known_topic(topic)
    assert known is not None
    assert (known.config["retention.ms"], len(known.partitions)) == ("12345", 2)
    admin.delete_topic(topic)
    assert asking.known_topic(topic) is None


def test_a_change_that_comes_while_an_earlier_one_is_followed_stays_known(
    cluster: LocalCluster, admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create_topic(topic, 1)
    ask = admin._cluster.begin

    def altered_before(*asked: Any) -> Any:
        monkeypatch.undo()
        with Admin(cluster.bootstrap_servers) as other:
            other.alter_topic(topic, partitions=3)
        admin._cluster.refresh([topic])
        return ask(*asked)

    monkeypatch.setattr(admin._cluster, "begin", altered_before)
    admin.alter_topic(topic, {"retention.ms": 12345})
    known = admin._cluster.known_topic(topic)
    assert known is not None and len(known.partitions) == 3


def test_a_change_is_made_also_if_no_broker_answers_any_more(
    admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be called a failure: whoever asks again would get TopicExists or UnknownTopic."""

    def fail(**_: Any) -> None:
        raise AWAY

    [broker] = admin.describe_cluster().brokers
    with monkeypatch.context() as away:
        away.setattr(admin._cluster, "describe", fail)
        assert admin.create_topic(topic, 1).behind == (broker.broker_id,)
        assert admin.alter_topic(topic, partitions=2).behind == (broker.broker_id,)
        assert admin.delete_topic(topic) == (broker.broker_id,)
    assert topic not in [each.name for each in admin.topics()]


def test_a_topic_whose_name_no_topic_can_have_is_not_there_to_be_deleted(admin: Admin) -> None:
    with pytest.raises(UnknownTopic):
        admin.delete_topic("a b")


def test_offsets_that_are_reset_or_kept_are_of_the_topic_that_was_meant(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    meant = admin.create_topic(topic, 1).topic_id
    place = TopicPartition(topic, 0)
    spied: Any = admin._cluster
    call, told = spied.call, []

    def noted(method: str, request: Any, **more: Any) -> Any:
        if method in ("ResetOffsets", "KeepMember") and request.offsets:
            told.append((method, [each.topic_id for each in request.offsets]))
        return call(method, request, **more)

    spied.call = noted
    keep_member(spied, topic, GroupMember("m", "", "h", "1"), {place: 0}, {topic: meant})
    leave_group(spied, topic, "m")
    admin.reset_offsets(topic, {place: "latest"})
    assert told == [("KeepMember", [meant]), ("ResetOffsets", [meant])]


@pytest.mark.parametrize(
    "error", [AWAY, BrokerStopping(broker=1), RequestTimedOut(what="a", address="b", timeout_ms=1)]
)
def test_a_broker_that_does_not_answer_at_once_is_left_out_of_what_is_unserved(
    admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch, error: KafkalogError
) -> None:
    admin.create_topic(topic, 1)
    spied: Any = admin._cluster
    call = spied.call

    def fail(method: str, request: Any, **more: Any) -> Any:
        if method == "DescribeTopics" and more.get("broker_id") is not None:
            raise error
        return call(method, request, **more)

    monkeypatch.setattr(spied, "call", fail)
    assert admin.unserved([topic]) == {}


def test_what_an_operator_changes_is_asked_for_once_and_values_go_as_the_brokers_write_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, bool]] = []
    requests: list[Any] = []

    def call(method: str, request: Any, *, repeatable: bool = True, **_: Any) -> Any:
        if method == "DescribeTopics":
            return pb.TopicDescriptions(topics=[pb.TopicDescription(name="t")])
        asked.append((method, repeatable))
        requests.append(request)
        return pb.TopicDescription(name="t")

    with Admin("here:1") as admin:
        monkeypatch.setattr(admin._cluster, "call", call)
        monkeypatch.setattr(admin._cluster, "describe", lambda patient: ClusterInfo("", (), "", ""))
        admin.create_topic("t", 1, config={"a.b": True, "c": 5})
        admin.alter_topic("t", set={"a.b": False})
        admin.delete_topic("t")
        with pytest.raises(InvalidArgument, match="partitions must be from 1 to 2147483647, not 2147483648"):
            admin.create_topic("t", 1 << 31)
    assert asked == [("CreateTopic", False), ("AlterTopic", False), ("DeleteTopic", False)]
    assert dict(requests[0].config) == {"a.b": "true", "c": "5"}
    assert dict(requests[1].set) == {"a.b": "false"}


def test_what_is_recovered_is_what_is_lost_or_what_was_named_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, list[int]]] = []

    def call(method: str, request: Any, *, repeatable: bool, **_: Any) -> pb.RecoverPartitionsReply:
        asked.append((repeatable, list(request.partitions)))
        reply = pb.RecoverPartitionsReply()
        for number in request.partitions:
            reply.partitions.add(partition=number, start_offset=10 + number)
        return reply

    unserved = {TopicPartition("t", 0): LOST, TopicPartition("t", 1): AWAY}
    with Admin("here:1") as admin:
        told: Any = admin._cluster
        monkeypatch.setattr(told, "describe_topics", lambda names: [SimpleNamespace(topic_id=b"t" * 16)])
        monkeypatch.setattr(told, "leader", lambda topic, number: SimpleNamespace(broker_id=number % 2))
        monkeypatch.setattr(told, "call", call)
        monkeypatch.setattr(admin, "unserved", lambda names: unserved)
        assert admin.recover_partitions("t") == {TopicPartition("t", 0): 10}
        found = admin.recover_partitions("t", [3, 1, 2, 1])
    assert list(found.items()) == [(TopicPartition("t", number), 10 + number) for number in (1, 2, 3)]
    assert asked == [(False, [0]), (False, [1, 3]), (False, [2])]
