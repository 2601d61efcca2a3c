"""Makes the faults of a plan happen to a cluster, and mends them. One thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kafkalog import Admin
from kafkalog.client.cluster import PartitionInfo
from kafkalog.errors import KafkalogError
from kafkalog.wire import broker_pb2 as pb
from tests.chaos.network import ANSWERS, REQUESTS, Weather
from tests.chaos.plan import LOSSES, MOVES, TOPIC, Fault
from tests.chaos.servers import Server, Servers

_ALL = -1  # in place of a broker's id
_DELAY_S = 0.05
_IN_SYNC_SECONDS = 30.0


class Faults:
    """What goes wrong now.

    Args:
        clients: what kills a client, by the kind of the fault.
        keeps_logs: no machine that loses power loses a record.

    Attributes:
        happened: how many of each kind, over all.
        struck: brokers that do not serve now, or not everybody.
    """

    def __init__(
        self, servers: Servers, admin: Admin, clients: dict[str, Callable[[], None]], keeps_logs: bool
    ) -> None:
        self._servers = servers
        self._admin = admin
        self._clients = clients
        self._keeps_logs = keeps_logs
        self._known: tuple[PartitionInfo, ...] = ()
        self._now: set[tuple[str, int]] = set()  # kind and broker, since all was mended
        self.happened: Counter[str] = Counter()
        self.struck: set[int] = set()

    def partitions(self) -> tuple[PartitionInfo, ...]:
        """The partitions as a broker has them, or had them when last one answered."""
        try:
            [topic] = self._admin.describe_topics([TOPIC])
            self._known = topic.partitions
        except KafkalogError:
            pass
        return self._known

    def strike(self, faults: Iterable[Fault]) -> list[str]:
        """Make faults happen; returns what happened. Of several to one broker only those happen that still can, and of
        those that lose something one, first."""
        in_order = sorted(faults, key=lambda fault: fault.kind not in LOSSES)
        return [said for fault in in_order if (said := self._strike(fault)) is not None]

    def _strike(self, fault: Fault) -> str | None:
        if fault.kind in self._clients:
            self._clients[fault.kind]()
        elif fault.kind in MOVES:
            if not self._move(fault):
                return None
        elif fault.kind in _OF_ALL:
            if (fault.kind, _ALL) in self._now or not _OF_ALL[fault.kind](self._servers):
                return None
            self._now.add((fault.kind, _ALL))
            self.struck |= {server.broker_id for server in self._servers.brokers}
        else:
            server = self._target(fault)
            if not server.is_well or (fault.kind, server.broker_id) in self._now:
                return None
            if fault.kind not in LOSSES:
                _OF_A_BROKER[fault.kind](server, self._servers)
            elif self._now or not self._come_in_sync():
                return None
            elif fault.kind == "lose disk":
                server.lose_disk()
            else:
                server.lose_power(self._keeps_logs)
            self._now.add((fault.kind, server.broker_id))
            self.struck.add(server.broker_id)
        self.happened[fault.kind] += 1
        is_one = fault.kind not in self._clients and fault.kind not in _OF_ALL
        return f"{fault.kind} {server.broker_id}" if is_one else fault.kind

    def _come_in_sync(self) -> bool:
        """Wait until every replica is in sync, for a while."""
        until, pause = time.monotonic() + _IN_SYNC_SECONDS, threading.Event()
        while not self._are_in_sync():
            if time.monotonic() > until:
                return False
            pause.wait(0.1)
        return True

    def _are_in_sync(self) -> bool:
        """Whether every replica is in sync, as each broker has it: one that has just come back may not know."""
        request = pb.DescribeTopicsRequest(names=[TOPIC])
        answers = self._admin._cluster.call_each(
            "DescribeTopics", request, [server.broker_id for server in self._servers.brokers]
        )
        topics = [answer.topics[0] for answer in answers.values() if not isinstance(answer, KafkalogError)]
        return len(topics) == len(answers) and all(
            len(each.isr) == len(each.replicas) and each.leader_epoch == same.leader_epoch
            for topic in topics
            for each, same in zip(topic.partitions, topics[0].partitions, strict=True)
        )

    def _move(self, fault: Fault) -> bool:
        """Begin to move a partition off a broker, or cancel its move if there is one. Returns whether that was done."""
        try:
            if self._admin.reassignments(TOPIC, [fault.partition]):
                changed = self._admin.cancel_reassignments(TOPIC, [fault.partition])
            else:
                broker_id = self._target(fault).broker_id
                changed = self._admin.reassign(TOPIC, [fault.partition], from_broker=broker_id)
        except KafkalogError:
            return False
        return any(each.error is None for each in changed)

    def _target(self, fault: Fault) -> Server:
        known = {each.partition: each for each in self.partitions()}
        brokers = self._servers.brokers
        partition = known.get(fault.partition)
        if partition is None or fault.role == "any" or not partition.has_leader:
            return brokers[fault.partition % len(brokers)]
        if fault.role == "leader":
            return brokers[partition.leader]
        followers = [each for each in partition.replicas if each != partition.leader]
        others = followers or [each.broker_id for each in brokers if each.broker_id != partition.leader]
        return brokers[others[fault.partition % len(others)]]

    def mend(self, without: Server | None = None) -> None:
        """Mend everything, except one broker if it is named."""
        self._servers.heal(without)
        self._now.clear()
        self.struck = set() if without is None else {without.broker_id}

    def served(self) -> list[int]:
        """The partitions that have to take writes now: enough of their replicas serve.

        Enough are the leader of a partition with one copy, and of others more than half, and min.insync.replicas.
        """
        wanted = []
        for each in self.partitions():
            replicas = [broker for broker in each.replicas if broker not in each.adding]
            well = [broker for broker in replicas if broker not in self.struck]
            if len(well) * 2 > len(replicas):
                wanted.append(each.partition)
        return wanted


def _kill_all(servers: Servers) -> bool:
    for server in servers.brokers:
        server.kill()
    return True


def _kill_zookeeper(servers: Servers) -> bool:
    servers.resume_zookeeper()
    servers.zookeeper.kill()
    return True


def _suspend_zookeeper(servers: Servers) -> bool:
    if servers.zookeeper.pid is None:
        return False
    servers.suspend_zookeeper()
    return True


_OF_ALL: dict[str, Callable[[Servers], bool]] = {
    "kill all": _kill_all,
    "kill zookeeper": _kill_zookeeper,
    "suspend zookeeper": _suspend_zookeeper,
}
"""Each returns whether it could happen."""


def _restart(server: Server, servers: Servers) -> None:
    server.stop()


def _cut_from_zookeeper(server: Server, servers: Servers) -> None:
    server.to_zookeeper.set(Weather(is_cut=True))


def _held_from_zookeeper(server: Server, servers: Servers) -> None:
    server.to_zookeeper.set(Weather(holds=frozenset({REQUESTS, ANSWERS})))


def _answers_of_zookeeper_lost(server: Server, servers: Servers) -> None:
    server.to_zookeeper.set(Weather(loses=True))


def _cut_from_brokers(server: Server, servers: Servers) -> None:
    """No broker reaches it, and it reaches none. Clients and ZooKeeper still reach it."""
    others = [other for other in servers.brokers if other is not server]
    for link in server.links:
        link.set(Weather(is_cut=True), *(other.name for other in others))
    for other in others:
        for link in other.links:
            link.set(Weather(is_cut=True), server.name)


def _cut(server: Server, servers: Servers) -> None:
    """As `_cut_from_brokers`, and from clients too."""
    _cut_from_brokers(server, servers)
    for link in server.links:
        link.set(Weather(is_cut=True))


def _answers_lost(server: Server, servers: Servers) -> None:
    """What it is asked is executed, and nobody learns so."""
    for link in server.links:
        link.set(Weather(loses=True))


def _slow(server: Server, servers: Servers) -> None:
    for link in (*server.links, server.to_zookeeper):
        link.set(Weather(delay_s=_DELAY_S))


_OF_A_BROKER: dict[str, Callable[[Server, Servers], None]] = {
    "kill": lambda server, servers: server.kill(),
    "suspend": lambda server, servers: server.suspend(),
    "restart": _restart,
    "cut from zookeeper": _cut_from_zookeeper,
    "held from zookeeper": _held_from_zookeeper,
    "answers of zookeeper lost": _answers_of_zookeeper_lost,
    "cut from brokers": _cut_from_brokers,
    "cut": _cut,
    "answers lost": _answers_lost,
    "slow": _slow,
}
