"""Controllers over a real ZooKeeper, with the thread that follows it, but without logs and ports; and brokers that are
only registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerSettings
from broker.controller.controller import Controller
from broker.replica.metadata import Metadata
from broker.replica.registration import Registration
from broker.replica.undone import Undone
from broker.replica.watcher import Watcher
from broker.storage.disk_errors import DirectoryHealth
from kafkalog.clock import ManualClock
from kafkalog.zk import registry
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.registry import BrokerRecord, PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.kafkalog.zk.conftest import new_session as new_session
from tests.kafkalog.zk.conftest import proxy as proxy


class _NoLogs:
    """A host of no partitions."""

    failed = None
    has_work = False

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id

    def is_behind(self, name: str) -> bool:
        return False

    is_opening = is_behind

    def unserved(self) -> dict[Any, Any]:
        return {}

    def nothing(self, *_: object) -> None: ...

    look_at = open_for_a_turn = settle_loss = close_deleted = remove_deleted = take_out = warn_of_strays = nothing


def record(broker_id: int, lock: str = "") -> BrokerRecord:
    return BrokerRecord(broker_id, "h", 1, 2, directory=f"disk-{broker_id}", lock=lock)


class Side:
    """A broker's side: what it knows, its registration and its controller."""

    def __init__(self, session: ZooKeeperSession, broker_id: int, clock: ManualClock) -> None:
        join_cluster(session, 0)
        self.session = session
        self.broker_id = broker_id
        self.clock = clock
        settings = BrokerSettings.parse({"leader.rebalance.interval.ms": 300_000})
        self.metadata = Metadata(session, clock, settings.zookeeper_session_timeout_ms / 1000)
        health = DirectoryHealth(Path("/data"), clock)
        self.registration = Registration(record(broker_id), self.metadata, health, settings, clock)
        host: Any = _NoLogs(broker_id)
        self.watcher = Watcher(self.metadata, host, self.registration, Undone(clock), clock)
        self.controller = Controller(broker_id, self.metadata, self.registration, settings, clock)

    def start(self) -> None:
        self.watcher.start()
        self.registration.register()
        self.controller.start()

    def stop(self) -> None:
        self.controller.stop()
        self.watcher.stop()

    def until(self, reached: Callable[[], object]) -> None:
        assert self.metadata.wait_until(lambda: bool(reached()), 30.0)

    def until_elected(self) -> int:
        """Wait until it is the controller; the epoch."""
        with self.metadata.changed:
            self.metadata.changed.notify_all()
        for _ in range(3000):
            term = self.controller.term
            if term is not None:
                return term.epoch
            with self.metadata.changed:
                self.metadata.changed.wait(0.01)
        raise AssertionError("it is not elected")

    def state(self, topic: str, number: int = 0) -> PartitionState | None:
        found = self.metadata.topics.get(topic)
        return found.states.get(number) if found is not None else None

    def until_state(self, topic: str, wanted: PartitionState, number: int = 0) -> None:
        """Wait until a partition has a state, of whatever version."""
        self.until(lambda: _without_version(self.state(topic, number)) == _without_version(wanted))

    def new_topic(
        self, replicas: list[tuple[int, ...]], state: PartitionState | None, name: str = "t", **config: str
    ) -> TopicRecord:
        given = {key.replace("_", "."): value for key, value in config.items()}
        topic = TopicRecord(name, name.encode().ljust(16), given, replicas, 0)
        registry.create_topic(self.session, topic)
        if state is not None:
            registry.write_states(self.session, topic, dict.fromkeys(range(len(replicas)), state))
        return topic


def _without_version(state: PartitionState | None) -> tuple[object, ...] | None:
    return None if state is None else tuple(value for name, value in vars(state).items() if name != "version")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def new_side(new_session: Callable[..., ZooKeeperSession], clock: ManualClock) -> Iterator[Callable[..., Side]]:
    """Starts the sides of brokers of one cluster, each with a session of its own."""
    made: list[Side] = []

    def make(broker_id: int = 9, **of_session: Any) -> Side:
        made.append(Side(new_session(**of_session), broker_id, clock))
        made[-1].start()
        return made[-1]

    yield make
    for side in reversed(made):
        side.stop()


@pytest.fixture
def side(new_side: Callable[..., Side]) -> Side:
    """The controller. It hosts no partitions."""
    made = new_side()
    made.until_elected()
    return made


@pytest.fixture
def register(new_session: Callable[..., ZooKeeperSession]) -> Callable[..., ZooKeeperSession]:
    """Registers a broker that does nothing. The end of its session ends it."""

    def registered(broker_id: int) -> ZooKeeperSession:
        session = new_session()
        assert registry.register_broker(session, record(broker_id)) is None
        return session

    return registered
