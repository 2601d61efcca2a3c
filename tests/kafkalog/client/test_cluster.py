"""Which broker is asked, with brokers that are silent, gone or moved as the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client import cluster as cluster_module
from kafkalog.client.background import in_background
from kafkalog.client.cluster import OUT_OF_DATE, BrokerInfo, Cluster, PartitionInfo, TopicInfo
from kafkalog.errors import (
    BY_CODE,
    BrokerBusy,
    BrokerNotAsked,
    BrokerUnreachable,
    Closed,
    DiskFull,
    KafkalogError,
    NotLeader,
    RequestTimedOut,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire

Address = tuple[str, int]


class Network:
    """Brokers by address; `silent` ones accept and do not answer, `suspended` ones answer once they are `woken`. Keeps
    who was called, and which channels are open."""

    def __init__(self) -> None:
        self.brokers: dict[Address, int] = {}
        self.silent: set[Address] = set()
        self.suspended: set[Address] = set()
        self.woken = threading.Event()
        self.uncertain: set[Address] = set()
        self.epochs: dict[int, int] = {}
        self.cluster_id = ""
        self.calls: list[tuple[str, Address]] = []
        self.timeouts_ms: list[int] = []
        self.begun: list[Call] = []
        self.open: list[Control] = []
        self.on_connect: Callable[[], object] = lambda: None

    def control(self, host: str, port: int, *, connect_timeout_ms: int) -> Control:
        return Control(self, (host, port))

    def description(self, address: Address) -> pb.ClusterDescription:
        described = pb.ClusterDescription(is_uncertain=address in self.uncertain, cluster_id=self.cluster_id)
        for (host, port), broker_id in self.brokers.items():
            epoch = self.epochs.get(broker_id, 0)
            described.brokers.add(broker_id=broker_id, host=host, grpc_port=port, data_port=port, epoch=epoch)
        return described


class Call:
    """In the place of a PendingCall."""

    def __init__(self, address: Address, when_done: Callable[[], object]) -> None:
        self.address = address
        self.when_done = when_done
        self.answer: Future[object] | None = None
        self.is_given_up = False

    @property
    def is_done(self) -> bool:
        return self.answer is not None

    def end(self, answer: Future[object]) -> None:
        self.answer = answer
        self.when_done()

    def result(self) -> object:
        if self.answer is None:
            assert self.is_given_up
            raise Closed(what="call")
        return self.answer.result()

    def cancel(self) -> None:
        self.is_given_up = True
        self.when_done()


class Control:
    """In the place of a ControlConnection."""

    def __init__(self, network: Network, address: Address) -> None:
        self.network = network
        self.address = address

    def connect(self) -> pb.ClusterDescription:
        if self.address not in self.network.brokers or self.address in self.network.silent:
            raise BrokerUnreachable(address=str(self.address), reason="connection refused")
        self.network.open.append(self)
        self.network.on_connect()
        return self.network.description(self.address)

    def call(self, method: str, request: object, timeout_ms: int) -> object:
        self._hear(method, timeout_ms)
        return self._answer(method, timeout_ms)

    def _hear(self, method: str, timeout_ms: int) -> None:
        if self not in self.network.open:
            raise BrokerNotAsked(address=str(self.address), reason="the connection was closed here")
        self.network.calls.append((method, self.address))
        self.network.timeouts_ms.append(timeout_ms)

    def _answer(self, method: str, timeout_ms: int) -> object:
        if self.address not in self.network.brokers:
            raise BrokerUnreachable(address=str(self.address), reason="connection refused")
        if self.address in self.network.silent:
            raise RequestTimedOut(what=method, address=str(self.address), timeout_ms=timeout_ms)
        if self.address in self.network.suspended:
            assert self.network.woken.wait(30)
        return self.network.description(self.address) if method == "DescribeCluster" else (method, self.address)

    def begin(self, method: str, request: object, timeout_ms: int, when_done: Callable[[], object]) -> Call:
        call = Call(self.address, when_done)
        self._hear(method, timeout_ms)
        self.network.begun.append(call)
        if self.address in self.network.suspended:
            in_background(partial(self._answer, method, timeout_ms), call.end)
            return call
        answer: Future[object] = Future()
        try:
            answer.set_result(self._answer(method, timeout_ms))
        except KafkalogError as error:
            answer.set_exception(error)
        call.end(answer)
        return call

    def close(self) -> None:
        if self in self.network.open:
            self.network.open.remove(self)

    def abandon(self) -> None:
        """In children that later tests fork, while a cluster of ours is still in memory."""


class Data:
    """In the place of a DataConnection."""

    def __init__(self, host: str, port: int, **timeouts: int) -> None:
        self.address = f"{host}:{port}"
        self.broker_epoch = timeouts["broker_epoch"]
        self.is_ended = self.is_closed = self.is_shut_down = False

    def is_quiet(self) -> bool:
        return not self.is_ended

    def close(self) -> None:
        self.is_closed = True

    def shut_down(self) -> None:
        self.is_shut_down = True

    def abandon(self) -> None:
        """As `Control.abandon`."""


ONE, TWO, MOVED = ("one", 1), ("two", 2), ("moved", 3)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    made.brokers = {ONE: 1, TWO: 2}
    monkeypatch.setattr(cluster_module, "ControlConnection", made.control)
    monkeypatch.setattr(cluster_module, "DataConnection", Data)
    return made


@pytest.fixture
def connected(network: Network) -> Cluster:
    """Connected to the first of two brokers, and it knows both."""
    made = Cluster("one:1", retry_timeout_ms=0)
    made.describe()
    assert [control.address for control in network.open] == [ONE]
    network.calls.clear()
    network.timeouts_ms.clear()
    return made


def test_a_broker_that_accepts_and_does_not_answer_is_asked_once_and_then_another_is(
    network: Network, connected: Cluster
) -> None:
    network.silent = {ONE}
    for _ in range(2):
        assert connected.call("Ask", None) == ("Ask", TWO)
    assert network.calls == [("Ask", ONE), ("Ask", TWO), ("Ask", TWO)]


@pytest.fixture
def hurried(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A client that waits for the first broker for a moment only; suspended brokers wake at the end."""
    monkeypatch.setattr(cluster_module, "_ELSEWHERE_SECONDS", 0.02)
    yield network
    network.woken.set()


@pytest.mark.parametrize("method", sorted(cluster_module._ASKED_OF_SEVERAL - {*cluster_module._METADATA}))
def test_what_any_broker_can_answer_is_asked_of_another_too_while_one_is_silent(
    hurried: Network, connected: Cluster, method: str
) -> None:
    hurried.suspended = {ONE}
    assert connected.call(method, None) == (method, TWO)
    assert hurried.calls == [(method, ONE), (method, TWO)]
    assert [control.address for control in hurried.open] == [ONE, TWO], "it may have other calls"
    assert connected.call(method, None) == (method, TWO)
    assert hurried.calls[2:] == [(method, TWO)], "the one that answered comes first from then on"


def test_what_is_asked_of_several_is_given_up_where_it_is_not_answered_first(
    hurried: Network, connected: Cluster
) -> None:
    hurried.suspended = {ONE}
    connected.describe()
    assert [(call.address, call.is_done) for call in hurried.begun] == [(ONE, False), (TWO, True)]
    assert hurried.begun[0].is_given_up


def test_metadata_is_soon_asked_of_another_broker(hurried: Network, connected: Cluster) -> None:
    hurried.suspended = {ONE}
    for asked in ([ONE, TWO], [TWO]):
        hurried.calls.clear()
        assert {broker.broker_id for broker in connected.describe().brokers} == {1, 2}
        assert hurried.calls == [("DescribeCluster", address) for address in asked]


def test_the_first_answer_counts_also_of_a_broker_that_was_silent_for_a_while(
    hurried: Network, connected: Cluster
) -> None:
    asked_all = threading.Event()
    hurried.suspended, hurried.on_connect = {ONE, TWO}, asked_all.set
    waking = threading.Thread(target=lambda: asked_all.wait(30) and hurried.woken.set(), daemon=True)
    waking.start()
    method, answered_by = connected.call("ListGroups", None)
    assert method == "ListGroups" and answered_by in (ONE, TWO)
    assert set(hurried.timeouts_ms) == {30_000}, "each has the whole time"
    waking.join(30)


@pytest.mark.parametrize("how", [{"repeatable": False}, {}])
def test_a_change_is_sent_to_one_broker_only_that_has_answered_lately(
    hurried: Network, connected: Cluster, how: dict[str, Any]
) -> None:
    hurried.suspended = {ONE}
    threading.Event().wait(0.03)  # since it has answered
    assert connected.call("Change", None, **how) == ("Change", TWO)
    assert hurried.calls == [("DescribeCluster", ONE), ("DescribeCluster", TWO), ("Change", TWO)]


def test_metadata_of_a_broker_that_is_uncertain_of_it_counts_only_if_every_broker_is(
    network: Network, connected: Cluster
) -> None:
    network.uncertain, known = {ONE}, set(network.brokers.values())
    for asked in ([ONE, TWO], [TWO]):
        network.calls.clear()
        assert {broker.broker_id for broker in connected.describe().brokers} == known
        assert [address for _, address in network.calls] == asked
    network.uncertain = {ONE, TWO}
    network.calls.clear()
    assert {broker.broker_id for broker in connected.describe().brokers} == known
    assert [address for _, address in network.calls] == [TWO, ONE]


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_broker_is_waited_for_only_a_while_once_another_has_answered_uncertainly(
    hurried: Network, connected: Cluster, silent: int
) -> None:
    hurried.brokers[MOVED] = 3
    connected.describe()
    addresses = [ONE, TWO, MOVED]
    hurried.suspended = {addresses[silent]}
    hurried.uncertain = set(addresses) - hurried.suspended
    hurried.calls.clear()
    hurried.begun.clear()
    assert {broker.broker_id for broker in connected.describe().brokers} == {1, 2, 3}
    assert {address for _, address in hurried.calls} == set(addresses), "each may be certain"
    assert [call.is_given_up for call in hurried.begun if call.address in hurried.suspended] == [True]


def test_a_certain_answer_counts_at_once_whoever_else_is_uncertain_or_silent(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_ELSEWHERE_SECONDS", 60.0)
    network.brokers[MOVED] = 3
    connected.describe()
    network.uncertain, network.suspended = {ONE}, {TWO}
    connected.describe()
    assert connected._addresses()[0] == MOVED
    network.woken.set()


def test_a_topic_is_missing_only_if_a_broker_with_a_connection_to_zookeeper_says_so(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker was cut off before the topic was made, and those that knew it died: the topic was taken for deleted."""
    there = {"t", "u"}

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        if method == "DescribeCluster":
            return network.description(self.address)
        known = {"u"} if self.address in network.uncertain else there
        error = error_to_wire(UnknownTopic(topic="t"))
        reply = pb.TopicDescriptions(is_uncertain=self.address in network.uncertain)
        reply.topics.extend(pb.TopicDescription(name=name, topic_id=name.encode()) for name in sorted(known))
        if "t" not in known and is_named:
            reply.topics.add(name="t", error=error)
        return reply

    monkeypatch.setattr(Control, "_answer", answer)
    is_named = False
    assert [topic.name for topic in connected.describe_topics()] == ["t", "u"]
    network.uncertain, network.silent = {ONE}, {TWO}
    assert [topic.name for topic in connected.describe_topics(patient=False)] == ["t", "u"]
    is_named = True
    with pytest.raises(BrokerUnreachable, match="topic 't' may be there"):
        connected.describe_topics(["t"], patient=False)
    assert connected.known_topic("t") is not None
    network.silent = set()
    there.remove("t")
    with pytest.raises(UnknownTopic):
        connected.describe_topics(["t"], patient=False)
    is_named = False
    assert [topic.name for topic in connected.describe_topics()] == ["u"]
    assert connected.known_topic("t") is None


def test_a_list_of_all_topics_is_complete_if_a_broker_that_is_certain_made_one(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process that asked a broker which was cut off before a topic was made read nothing of it."""

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        if method == "DescribeCluster":
            return network.description(self.address)
        is_uncertain = self.address in network.uncertain
        names = ["u"] if self.address == ONE else ["t", "u"]
        topics = [pb.TopicDescription(name=name, topic_id=name.encode()) for name in names]
        return pb.TopicDescriptions(is_uncertain=is_uncertain, topics=topics)

    def listed(is_complete: bool, may_lack_new: bool = False) -> list[str]:
        found = connected.describe_topics(patient=False, is_complete=is_complete, may_lack_new=may_lack_new)
        return [topic.name for topic in found]

    monkeypatch.setattr(Control, "_answer", answer)
    network.uncertain, network.silent = {ONE}, {TWO}
    assert listed(False) == ["u"]
    for may_lack_new in (False, True):
        with pytest.raises(BrokerUnreachable, match="there may be more topics"):
            listed(True, may_lack_new)
    network.silent = set()
    assert listed(True) == ["t", "u"]
    network.uncertain = {ONE, TWO}
    assert listed(True, may_lack_new=True) == ["t", "u"], "it was complete once"
    with pytest.raises(BrokerUnreachable, match="there may be more topics"):
        listed(True)  # as of a batch, which looks once


def test_a_topic_is_missing_if_a_broker_that_is_certain_is_reached_only_by_the_look_elsewhere(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Address] = []

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        asked.append(self.address)
        if asked.count(TWO) == 1 and self.address == TWO:
            raise BrokerUnreachable(address="two:2", reason="it starts")
        error = error_to_wire(UnknownTopic(topic="t"))
        return pb.TopicDescriptions(
            topics=[pb.TopicDescription(name="t", error=error)], is_uncertain=self.address == ONE
        )

    monkeypatch.setattr(Control, "_answer", answer)
    with pytest.raises(UnknownTopic):
        connected.describe_topics(["t"], patient=False)
    assert asked.count(TWO) == 2


def test_a_call_that_may_have_been_heard_is_not_made_again_elsewhere(network: Network, connected: Cluster) -> None:
    network.silent = {ONE}
    with pytest.raises(RequestTimedOut):
        connected.call("Change", None, repeatable=False)
    assert network.calls == [("Change", ONE)]
    assert connected.call("Change", None, repeatable=False) == ("Change", TWO)


def test_brokers_that_are_all_silent_are_reported_as_a_timeout(network: Network, connected: Cluster) -> None:
    assert connected.call("Ask", None, broker_id=2) == ("Ask", TWO)
    network.silent = {ONE, TWO}
    with pytest.raises(RequestTimedOut):
        connected.call("Ask", None)
    assert network.open == []
    with pytest.raises(BrokerUnreachable, match=r"one:1.*two:2"):
        connected.call("Ask", None)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("was_connected", [False, True])
def test_a_broker_that_is_back_at_another_address_is_found(
    network: Network, connected: Cluster, was_connected: bool, patient: bool
) -> None:
    if was_connected:
        assert connected.call("Ask", None, broker_id=2) == ("Ask", TWO)
    network.brokers = {ONE: 1, MOVED: 2}
    assert connected.call("Ask", None, broker_id=2, patient=patient) == ("Ask", MOVED)


def test_a_broker_that_registered_since_is_found(network: Network, connected: Cluster) -> None:
    network.brokers[MOVED] = 3
    assert connected.call("Ask", None, broker_id=3) == ("Ask", MOVED)
    with pytest.raises(BrokerUnreachable, match="broker 4: it is not registered"):
        connected.call("Ask", None, broker_id=4)


@pytest.mark.parametrize("enough", [True, False])
def test_calls_side_by_side_are_given_up_once_one_is_enough_or_one_broker_cannot_be_asked(
    network: Network, connected: Cluster, enough: bool
) -> None:
    connected.call("Ask", None, broker_id=2)
    network.suspended = {TWO} if enough else {ONE, TWO}
    asked = dict.fromkeys([1, 2] if enough else [1, 2, 3])
    if enough:
        assert connected.first_of("Wait", asked, lambda broker_id, answer: (broker_id, answer) == (1, ("Wait", ONE)))
    else:
        with pytest.raises(BrokerUnreachable, match="broker 3: it is not registered"):
            connected.first_of("Wait", asked, lambda broker_id, answer: True)
    assert [call.address for call in network.begun] == [ONE, TWO]
    assert all(call.is_done or call.is_given_up for call in network.begun), "a broker's thread waits for nobody"
    network.woken.set()


def test_an_idle_connection_is_used_again_unless_its_broker_has_ended_it(connected: Cluster) -> None:
    first: Any = connected.borrow_data(1)
    connected.give_back(1, first)
    assert id(connected.borrow_data(1)) == id(first)
    first.is_ended = True
    connected.give_back(1, first)
    assert connected.borrow_data(1) is not first
    assert first.is_closed


@pytest.mark.parametrize("what", ["gone", "registered again", "moved"])
def test_an_answer_that_will_not_come_is_not_waited_for(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(cluster_module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "QUIET_LOOK_SECONDS", 0.0)
    network.epochs = {1: 4}
    connected.describe()
    connection: Any = connected.borrow_data(1)
    here, there = socket.socketpair()
    connection.fileno, connection.has_buffered = here.fileno, False
    described = pb.TopicDescription(name="t", topic_id=b"t" * 16, partitions=[pb.PartitionDescription(leader=1)])
    looks = 0

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        nonlocal looks
        if method == "DescribeCluster":
            return network.description(self.address)
        looks += 1
        if looks == 3 and what == "moved":
            described.partitions[0].MergeFrom(pb.PartitionDescription(leader=2, leader_epoch=1))
        if looks == 2 and what == "registered again":
            network.brokers, network.epochs = {MOVED: 1, TWO: 2}, {1: 5}
        if looks == 2 and what == "gone":
            network.brokers = {TWO: 2}
        return pb.TopicDescriptions(topics=[described])

    monkeypatch.setattr(Control, "_answer", answer)
    error, reason = {
        "gone": (BrokerUnreachable, "one:1: it is not registered in the cluster any more"),
        "registered again": (BrokerUnreachable, "one:1: broker 1 has registered again since, at moved:3"),
        "moved": (NotLeader, "broker 1 does not lead partition t-0"),
    }[what]
    with here, there, pytest.raises(error, match=reason):
        connected.await_answer(1, connection, TopicPartition("t", 0))
    assert looks >= 2


@pytest.mark.parametrize("is_hint", [False, True])
def test_an_idle_connection_to_an_earlier_process_of_a_broker_is_not_used(
    network: Network, connected: Cluster, is_hint: bool
) -> None:
    """As to a machine that was lost: nothing ends it."""
    network.epochs = {1: 4}
    connected.describe()
    first: Any = connected.borrow_data(1)
    connected.give_back(1, first)
    hint = BrokerInfo(1, "moved", 3, 3, "", "", epoch=5) if is_hint else None
    if not is_hint:
        network.brokers, network.epochs = {MOVED: 1, TWO: 2}, {1: 5}
        connected.describe()
    assert (connected.borrow_data(1, hint).address, first.is_closed) == ("moved:3", True)


def test_a_close_ends_what_is_asked_on_borrowed_connections_and_on_no_other(connected: Cluster) -> None:
    borrowed, given_back = (connected.borrow_data(1) for _ in range(2))
    connected.give_back(1, given_back)
    connected.close()
    for connection, is_borrowed in ((borrowed, True), (given_back, False)):
        assert isinstance(connection, Data)
        assert (connection.is_shut_down, connection.is_closed) == (is_borrowed, not is_borrowed)
    with pytest.raises(Closed):
        connected.borrow_data(1)


def test_a_connection_that_is_given_back_after_the_close_is_closed(connected: Cluster) -> None:
    idle, lent = (connected.borrow_data(1) for _ in range(2))
    connected.give_back(1, idle)
    connected.close()
    connected.give_back(1, lent)
    held: list[Any] = [idle, lent]
    assert all(each.is_closed for each in held)


def test_a_channel_that_is_made_while_the_cluster_closes_is_closed(network: Network) -> None:
    cluster = Cluster("one:1")
    network.on_connect = cluster.close
    with pytest.raises(Closed):
        cluster.describe()
    assert network.open == []


def test_a_broker_that_knows_of_none_makes_no_broker_forgotten(network: Network, connected: Cluster) -> None:
    """As one does that has just lost its ZooKeeper."""
    brokers, network.brokers = network.brokers, {}
    connected._take_in(network.description(ONE), 0.0)
    network.brokers = brokers
    assert connected.call("Ask", None, broker_id=2) == ("Ask", TWO)
    assert network.calls == [("Ask", TWO)]  # and nobody was asked where that is


def test_a_broker_that_is_cut_off_makes_no_broker_forgotten_nor_known(network: Network, connected: Cluster) -> None:
    """It knows those from before, for as long as that lasts."""
    network.brokers, network.uncertain, network.silent = {ONE: 1, MOVED: 3}, {ONE}, {MOVED}
    connected.describe()
    assert connected._brokers.keys() == {1, 2}
    network.uncertain = set()
    connected.describe()
    assert connected._brokers.keys() == {1, 3}


def test_of_two_channels_that_are_made_at_once_one_is_kept_and_the_other_closed(
    network: Network, connected: Cluster
) -> None:
    def and_another_is_quicker() -> None:
        network.on_connect = lambda: None
        assert connected.call("Ask", None, broker_id=2) == ("Ask", TWO)

    network.on_connect = and_another_is_quicker
    assert connected.call("Ask", None, broker_id=2) == ("Ask", TWO)
    assert [control.address for control in network.open] == [ONE, TWO]


def test_a_channel_that_failed_late_takes_out_nothing_of_its_successor(network: Network, connected: Cluster) -> None:
    [first] = network.open
    failed: Any = first
    connected._forget(ONE, failed)
    connected.describe()
    [successor] = network.open
    connected._forget(ONE, failed)
    assert network.open == [successor]
    network.calls.clear()
    connected.describe()
    assert network.open == [successor], "it is used on"


@pytest.mark.parametrize("how", [{"patient": False, "broker_id": 1}, {"repeatable": False}])
def test_a_call_that_finds_its_connection_closed_by_another_thread_is_made_on_the_next(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    [first] = network.open
    call = Control.call

    def overtaken(self: Control, method: str, request: object, timeout_ms: int) -> object:
        forgotten: Any = first
        connected._forget(ONE, forgotten)
        return call(self, method, request, timeout_ms)

    monkeypatch.setattr(Control, "call", overtaken)
    assert connected.call("Change", None, **how) == ("Change", ONE)
    assert network.calls == [("Change", ONE)], "it was heard once"


@pytest.mark.parametrize("how", [{"patient": False, "broker_id": 1}, {"repeatable": False}, {}])
@pytest.mark.parametrize("was_sent", [False, True])
def test_a_call_that_the_close_of_its_cluster_ends_says_so(
    connected: Cluster, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], was_sent: bool
) -> None:
    call = Control.call

    def ended(self: Control, method: str, request: object, timeout_ms: int) -> object:
        connected.close()
        if was_sent:
            raise BrokerUnreachable(address="one:1", reason="the connection was closed here")
        return call(self, method, request, timeout_ms)

    monkeypatch.setattr(Control, "call", ended)
    with pytest.raises(Closed):
        connected.call("Change", None, **how)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_topic_is_looked_for_at_every_broker_whichever_is_away_or_silent(
    hurried: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    network, gone, asleep = hurried, ("gone", 5), ("asleep", 6)
    network.brokers = {ONE: 1, asleep: 6, gone: 5, TWO: 2, MOVED: 3}
    connected.describe()
    network.suspended = {asleep}
    answer_of = Control._answer

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        if self.address == gone:
            raise BrokerUnreachable(address="gone:5", reason="connection refused")
        if self.address == asleep:
            answer_of(self, method, timeout_ms)
        described = pb.TopicDescription(name="t", error=error_to_wire(UnknownTopic(topic="t")))
        if is_there and self.address == MOVED:
            described = pb.TopicDescription(name="t", topic_id=b"t" * 16)
        return pb.TopicDescriptions(topics=[described])

    monkeypatch.setattr(Control, "_answer", answer)
    if is_there:
        assert [topic.topic_id for topic in connected.describe_topics(["t"])] == [b"t" * 16]
    else:
        with pytest.raises(UnknownTopic):
            connected.describe_topics(["t"])
        assert {address for _, address in network.calls} == set(network.brokers)
    assert not network.woken.is_set()


def test_no_more_idle_connections_are_kept_than_are_of_use(connected: Cluster) -> None:
    lent: list[Any] = [connected.borrow_data(1) for _ in range(12)]
    for each in lent:
        connected.give_back(1, each)
    assert [each.is_closed for each in lent] == [False] * 8 + [True] * 4


def test_where_the_cluster_says_that_a_broker_is_counts_before_a_hint_that_is_not_newer(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Address] = []
    monkeypatch.setattr(cluster_module, "DataConnection", lambda host, port, **_: asked.append((host, port)))
    network.epochs = {1: 5}
    connected.describe()
    outdated = BrokerInfo(1, "outdated", 7, 8, "", "", epoch=4)
    connected.connect_data(1, outdated)
    connected.connect_data(9, outdated)  # nobody has told of that one
    assert asked == [("one", 1), ("outdated", 8)]
    connected.connect_data(1, outdated._replace(host="newer", epoch=6))
    connected.connect_data(1)
    assert asked[2:] == [("newer", 8), ("newer", 8)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_pause_ends_with_the_close_and_a_forked_child_of_a_closed_cluster_is_closed(
    connected: Cluster, is_closed: bool
) -> None:
    if is_closed:
        connected.close()
    connected._after_fork_in_child()
    if not is_closed:
        connected.pause(0)
        connected.close()
    with pytest.raises(Closed):
        connected.pause(60)
    with pytest.raises(Closed):
        connected.describe()


def test_a_broker_without_zookeeper_keeps_its_channel_and_its_reason_is_reported(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = ZooKeeperUnreachable(address="zoo:1", reason="no answer in time")

    def call(self: Control, method: str, request: object, timeout_ms: int) -> object:
        raise away if self.address == ONE else BrokerUnreachable(address="two:2", reason="connection refused")

    monkeypatch.setattr(Control, "call", call)
    with pytest.raises(ZooKeeperUnreachable):
        connected.call("Ask", None, patient=False)
    assert [control.address for control in network.open] == [ONE]


def test_what_was_told_of_a_topic_grows_old(connected: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now))
    asked: list[str] = []

    def ask(method: str, request: Any, **how: Any) -> pb.TopicDescriptions:
        asked.append(method)
        return pb.TopicDescriptions(topics=[pb.TopicDescription(name="t", topic_id=b"t" * 16)])

    asking: Any = connected
    asking.call = ask
    for now, times in ((0.0, 1), (299.0, 1), (301.0, 2)):  # noqa: B007
        connected.topic("t")
        assert len(asked) == times


def test_a_broker_that_is_connected_is_asked_before_one_that_is_not(network: Network, connected: Cluster) -> None:
    network.silent = {ONE}
    connected.call("Ask", None)
    network.silent = set()
    assert connected.call("Ask", None) == ("Ask", TWO)
    assert [control.address for control in network.open] == [TWO]


def test_a_busy_broker_is_told_rather_than_one_that_was_not_reached(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: Control, method: str, request: object, timeout_ms: int) -> object:
        raise BrokerBusy(broker=1) if self.address == ONE else BrokerUnreachable(address="two:2", reason="refused")

    monkeypatch.setattr(Control, "call", call)
    with pytest.raises(BrokerBusy):
        connected.call("Ask", None, patient=False)


def test_topics_come_in_the_order_asked(connected: Cluster) -> None:
    asking: Any = connected
    asking.call = lambda *_, **__: pb.TopicDescriptions(topics=[pb.TopicDescription(name=name) for name in "abc"])
    assert [topic.name for topic in connected.describe_topics(["c", "a", "b"])] == ["c", "a", "b"]
    assert [topic.name for topic in connected.describe_topics()] == ["a", "b", "c"]


@pytest.mark.parametrize("number", [-1, 1])
def test_a_partition_is_one_of_those_there_are(number: int) -> None:
    topic = TopicInfo("t", b"t" * 16, {}, {}, (PartitionInfo(0, 1, 1, (1,), (1,)),), 0)
    assert topic.partition(0).leader == 1
    with pytest.raises(UnknownPartition, match=rf"{number}"):
        topic.partition(number)


def test_a_leader_of_an_older_epoch_is_not_taken_for_the_newest(connected: Cluster) -> None:
    def topic(*leaders: tuple[int, int], topic_id: bytes = b"t" * 16) -> TopicInfo:
        partitions = [PartitionInfo(number, *leader, (0, 1), ()) for number, leader in enumerate(leaders)]
        return TopicInfo("t", topic_id, {}, {}, tuple(partitions), 0)

    connected.remember(topic((0, 1), (1, 7)))
    connected.remember(topic((1, 2), (0, 6), (0, 0)))  # the second partition as a broker knows it that is cut off
    known = connected.known_topic("t")
    assert known is not None
    assert [(each.leader, each.leader_epoch) for each in known.partitions] == [(1, 2), (1, 7), (0, 0)]
    connected.remember(topic((1, 2), (1, 7)))  # before a partition was added
    known = connected.known_topic("t")
    assert known is not None
    assert len(known.partitions) == 3, "keyed records went to other partitions meanwhile"
    anew = topic((0, 0), topic_id=b"u" * 16)
    connected.remember(anew)
    assert connected.known_topic("t") is anew


def test_a_deleted_topic_is_not_taken_for_the_one_that_was_created_again_under_its_name(connected: Cluster) -> None:
    """A broker that is behind reports it."""

    def description(topic_id: bytes, created_zxid: int) -> pb.TopicDescription:
        return pb.TopicDescription(name="t", topic_id=topic_id * 16, created_zxid=created_zxid)

    reported = {"old": description(b"o", 7), "new": description(b"n", 9), "unread": description(b"u", 0)}
    asking: Any = connected
    for said, known in (("old", "old"), ("new", "new"), ("old", "new"), ("new", "new"), ("unread", "unread")):
        asking.call = lambda *_, said=said, **__: pb.TopicDescriptions(topics=[reported[said]])
        [found] = connected.describe_topics(["t"])
        assert found == connected.known_topic("t")
        assert found.topic_id == reported[known].topic_id


def topics_at(monkeypatch: pytest.MonkeyPatch, network: Network, topics: pb.TopicDescriptions) -> None:
    """The brokers have these topics, of the cluster that the answer names."""
    answer = Control._answer

    def answered(self: Control, method: str, timeout_ms: int) -> object:
        described = answer(self, method, timeout_ms)
        return topics if method == "DescribeTopics" else described

    monkeypatch.setattr(Control, "_answer", answered)


def test_a_broker_that_names_no_cluster_is_of_the_one_that_is_known(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one, as during an upgrade."""
    topics = pb.TopicDescriptions(topics=[pb.TopicDescription(name="t", topic_id=b"t" * 16)], cluster_id="first")
    topics_at(monkeypatch, network, topics)
    network.cluster_id = "first"
    made: Any = Cluster("one:1", retry_timeout_ms=0)
    made.topic("t")
    idle = made.borrow_data(1)
    made.give_back(1, idle)
    topics.cluster_id = ""
    assert [topic.name for topic in made.describe_topics()] == ["t"]
    network.cluster_id, network.brokers = "", {ONE: 1, MOVED: 3}
    made.describe()
    assert made._brokers.keys() == {1, 3}, "what it reports counts"
    assert made.fresh_topic("t") is not None and not idle.is_closed


def test_topics_of_an_earlier_cluster_are_asked_for_again_and_not_listed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = pb.TopicDescriptions(cluster_id="first")
    topics.topics.extend(pb.TopicDescription(name=name, topic_id=name.encode() * 16) for name in ("gone", "t"))
    topics_at(monkeypatch, network, topics)
    network.cluster_id = "first"
    made: Any = Cluster("one:1", retry_timeout_ms=0)
    assert [topic.name for topic in made.describe_topics()] == ["gone", "t"]
    network.cluster_id = topics.cluster_id = "second"
    made.describe()
    del topics.topics[:]
    topics.topics.add(name="t", topic_id=b"s" * 16)
    assert made.topic("t").topic_id == b"s" * 16
    topics.is_uncertain = True  # so that it may not know all of them
    with pytest.raises(BrokerUnreachable, match="there may be more topics"):
        made.describe_topics(patient=False, is_complete=True, may_lack_new=True)
    made.remember(TopicInfo("new", b"n" * 16, {}, {}, (), 0))
    assert [topic.name for topic in made.describe_topics()] == ["new", "t"]
    assert made.known_topic("gone") is not None, "it was there"


@pytest.mark.parametrize("said", ["now", "late", "cut off"])
def test_topics_of_another_cluster_count_only_if_it_is_there_now(
    network: Network, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """A ZooKeeper that was made anew counts from 0 again."""
    reported = {
        "first": pb.TopicDescription(name="t", topic_id=b"f" * 16, created_zxid=9),
        "second": pb.TopicDescription(name="t", topic_id=b"s" * 16, created_zxid=7),
    }
    now = 0.0
    monkeypatch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now))
    network.cluster_id = "first"
    made: Any = Cluster("one:1", retry_timeout_ms=0)
    made.describe()
    idle = made.borrow_data(1)
    made.give_back(1, idle)
    answers: list[str] = []

    def answer(self: Control, method: str, timeout_ms: int) -> object:
        if method == "DescribeCluster":
            return network.description(self.address)
        return pb.TopicDescriptions(topics=[reported[answers[-1]]], cluster_id=answers[-1])

    monkeypatch.setattr(Control, "_answer", answer)
    for network.cluster_id in ("first", "second", "second"):
        now += 1.0
        answers.append(network.cluster_id)
        assert made.describe_topics(["t"])[0].topic_id == reported[network.cluster_id].topic_id
        assert idle.is_closed == (network.cluster_id == "second")
    if said == "cut off":
        network.uncertain = {ONE, TWO}
    network.cluster_id = "first"
    network.brokers[MOVED] = 3
    made._take_in(network.description(ONE), 0.0 if said == "late" else now)
    assert (3 in made._brokers) == (said == "now")
    answers.append("first")
    if said == "now":
        assert made.describe_topics(["t"])[0].topic_id == b"f" * 16
    else:
        network.cluster_id = "second" if said == "late" else "first"
        with pytest.raises(BrokerUnreachable, match="a broker of cluster first answers, and not one of second"):
            made.describe_topics(["t"])
        assert made.known_topic("t").topic_id == b"s" * 16


def test_a_topic_that_was_created_again_is_looked_up_before_its_id_is_called_unknown(connected: Cluster) -> None:
    described = pb.TopicDescription(name="t", topic_id=b"o" * 16, partitions=[pb.PartitionDescription(leader=1)])
    asked: list[str] = []

    def ask(method: str, *_: object, **__: object) -> object:
        asked.append(method)
        return pb.TopicDescriptions(topics=[described])

    asking: Any = connected
    asking.call = ask
    partition = TopicPartition("t", 0)
    connected.leader_of(partition, b"o" * 16)
    described.topic_id = b"n" * 16
    assert connected.leader_of(partition, b"n" * 16)[0].topic_id == b"n" * 16
    connected.leader_of(partition, b"n" * 16)
    assert len(asked) == 2
    with pytest.raises(UnknownTopicId):
        connected.leader_of(partition, b"o" * 16)
    assert len(asked) == 3


@pytest.mark.parametrize(("was_answered", "seconds"), [(False, 12), (True, 20)])
def test_patience_is_that_of_a_start_until_a_broker_has_answered_and_what_may_take_long_is_reported(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, was_answered: bool,
    seconds: int,
) -> None:  # fmt: skip
    now = 0.0
    monkeypatch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now))
    cluster = Cluster("one:1", bootstrap_timeout_ms=12_000, retry_timeout_ms=20_000, retry_backoff_max_ms=250)
    if was_answered:
        cluster.describe()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    waiting: Any = cluster
    waiting.pause = pause
    network.brokers = {}
    with pytest.raises(BrokerUnreachable):
        cluster.call("Ask", None)
    assert now == pytest.approx(seconds)
    assert pauses[-3:-1] == [0.25, 0.25]
    event = "call_held_up" if was_answered else "no_broker_answers_yet"
    assert event in caplog.text
    cluster.close()


@pytest.mark.parametrize(
    "error", [each for each in BY_CODE.values() if each.retriable and not issubclass(each, OUT_OF_DATE)]
)
def test_a_retriable_error_is_retried(error: type[KafkalogError]) -> None:
    cluster = Cluster("one:1", retry_backoff_ms=1)
    failures = [error.__new__(error)]

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert cluster.retrying(attempt) == "answer"
    cluster.close()


@pytest.mark.parametrize(
    "error", [NotLeader(broker_id=1, partition="t-0"), UnknownTopicId(topic_id="74"), TopicExists(topic="t")]
)
def test_an_error_that_needs_newer_metadata_is_raised_at_once(error: KafkalogError) -> None:
    cluster = Cluster("one:1", retry_backoff_ms=1)
    failures = [error]

    def attempt() -> None:
        raise failures.pop()

    with pytest.raises(type(error)):
        cluster.retrying(attempt)
    cluster.close()


def test_a_call_that_must_not_be_made_twice_is_not_repeated_after_an_answer(
    network: Network, connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def full(*_: Any, **__: Any) -> None:
        calls.append("")
        raise DiskFull(directory="/data", reason="full")

    monkeypatch.setattr(connected, "_call_at", full)
    with pytest.raises(DiskFull):
        connected.call("RecoverPartitions", None, repeatable=False)
    assert len(calls) == 1


def test_a_start_that_is_given_up_soon_is_not_logged_while_it_lasts(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    network.brokers = {}
    cluster = Cluster("one:1", bootstrap_timeout_ms=10_000)
    waiting: Any = cluster
    waiting.pause = lambda seconds: cluster._stopped.set()
    with pytest.raises(Closed):
        cluster.call("Ask", None)
    assert caplog.text == ""


def test_a_signal_handler_may_close_what_it_interrupted() -> None:
    cluster = Cluster("here:1")

    def interrupted() -> None:
        with cluster._lock:  # as one that notes what a broker told
            cluster.close()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_nobody_is_named_as_the_leader_of_a_log_that_is_not_open() -> None:
    with pytest.raises(
        BrokerUnreachable, match=r"the partition's leader: there is none: no live broker has opened its log$"
    ):
        Cluster("here:1").connect_data(-1)
