"""Which broker is asked, with brokers that are silent, gone or moved as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalog.client import cluster as cluster_module
from kafkalog.client.cluster import Cluster
from kafkalog.errors import BrokerUnreachable, Closed, RequestTimedOut
from kafkalog.wire import broker_pb2 as pb

Address = tuple[str, int]


class Network:
    """Brokers by address; `silent` ones accept and do not answer. Keeps who was called, and which channels are open."""

    def __init__(self) -> None:
        self.brokers: dict[Address, int] = {}
        self.silent: set[Address] = set()
        self.calls: list[tuple[str, Address]] = []
        self.begun: list[Call] = []
        self.open: list[Control] = []
        self.on_connect: Callable[[], object] = lambda: None

    def control(self, host: str, port: int, *, connect_timeout_ms: int) -> Control:
        return Control(self, (host, port))

    def description(self) -> pb.ClusterDescription:
        described = pb.ClusterDescription()
        for (host, port), broker_id in self.brokers.items():
            described.brokers.add(broker_id=broker_id, host=host, grpc_port=port)
        return described


class Call:
    """In the place of a PendingCall; answered with the address of its broker."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_done = self.is_given_up = False

    def result(self) -> Address:
        return self.address

    def cancel(self) -> None:
        self.is_given_up = True


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
        return self.network.description()

    def call(self, method: str, request: object, timeout_ms: int) -> object:
        self.network.calls.append((method, self.address))
        if self.address not in self.network.brokers:
            raise BrokerUnreachable(address=str(self.address), reason="connection refused")
        if self.address in self.network.silent:
            raise RequestTimedOut(what=method, address=str(self.address), timeout_ms=timeout_ms)
        return self.network.description() if method == "DescribeCluster" else (method, self.address)

    def begin(self, method: str, request: object, timeout_ms: int, when_done: Callable[[], object]) -> Call:
        call = Call(self.address)
        self.network.begun.append(call)
        if self.address not in self.network.silent:
            call.is_done = True
            when_done()
        return call

    def close(self) -> None:
        if self in self.network.open:
            self.network.open.remove(self)

    def abandon(self) -> None:
        """In children that later tests fork, while a cluster of ours is still in memory."""


class Data:
    """In the place of a DataConnection."""

    def __init__(self, host: str, port: int, **timeouts: int) -> None:
        self.is_ended = self.is_closed = False

    def is_quiet(self) -> bool:
        return not self.is_ended

    def close(self) -> None:
        self.is_closed = True

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
    return made


def test_a_broker_that_accepts_and_does_not_answer_is_asked_once_and_then_another_is(
    network: Network, connected: Cluster
) -> None:
    network.silent = {ONE}
    for _ in range(2):
        assert connected.call("Ask", None) == ("Ask", TWO)
    assert network.calls == [("Ask", ONE), ("Ask", TWO), ("Ask", TWO)]


def test_a_call_that_may_have_been_heard_is_not_made_again_elsewhere(network: Network, connected: Cluster) -> None:
    network.silent = {ONE}
    with pytest.raises(RequestTimedOut):
        connected.call("Change", None, repeatable=False)
    assert network.calls == [("Change", ONE)]
    assert connected.call("Change", None, repeatable=False) == ("Change", TWO)


def test_brokers_that_are_all_silent_are_told_as_a_timeout(network: Network, connected: Cluster) -> None:
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
    network.silent = {TWO} if enough else {ONE, TWO}
    asked = dict.fromkeys([1, 2] if enough else [1, 2, 3])
    if enough:
        assert connected.first_of("Wait", asked, lambda broker_id, answer: (broker_id, answer) == (1, ONE))
    else:
        with pytest.raises(BrokerUnreachable, match="broker 3: it is not registered"):
            connected.first_of("Wait", asked, lambda broker_id, answer: True)
    assert [call.address for call in network.begun] == [ONE, TWO]
    assert all(call.is_done or call.is_given_up for call in network.begun), "a broker's thread waits for nobody"


def test_an_idle_connection_is_used_again_unless_its_broker_has_ended_it(connected: Cluster) -> None:
    first: Any = connected.borrow_data(1)
    connected.give_back(1, first)
    assert connected.borrow_data(1) is first
    first.is_ended = True
    connected.give_back(1, first)
    assert connected.borrow_data(1) is not first
    assert first.is_closed


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
