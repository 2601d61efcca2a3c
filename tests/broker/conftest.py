"""Brokers inside the test process, so that its threads and memory can be looked at. Every test has a chroot of its
own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.config import BrokerSettings
from broker.local.zookeeper import EmbeddedZooKeeper
from broker.server import Broker
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.wire import broker_pb2
from kafkalog.zk import registry
from tests.broker.data_port_client import DataPortClient
from tests.broker.stub import BrokerStub

_chroots = itertools.count()


class RunningBroker:
    """A started broker with a gRPC channel to it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.channel = grpc.insecure_channel(f"127.0.0.1:{broker.grpc_port}")
        self.stub = BrokerStub(self.channel)

    def client(self, *, greet: bool = True) -> DataPortClient:
        return DataPortClient(self.broker.data_port, greet=greet)

    def new_topic(self, name: str = "t", partitions: int = 1, **config: Any) -> bytes:
        """Make a topic with settings in snake_case; its id."""
        given = {key.replace("_", "."): str(value) for key, value in config.items()}
        request = broker_pb2.CreateTopicRequest(name=name, partitions=partitions, config=given)
        return bytes(self.stub.CreateTopic(request, timeout=30).topic_id)

    def described(self, name: str) -> broker_pb2.TopicDescription:
        reply: broker_pb2.TopicDescriptions
        reply = self.stub.DescribeTopics(broker_pb2.DescribeTopicsRequest(names=[name]), timeout=30)
        return reply.topics[0]

    def record(self, name: str) -> registry.TopicRecord:
        """What ZooKeeper has of a topic."""
        record = registry.read_topic(self.broker.host.metadata.session, name)
        assert record is not None
        return record

    def counters(self) -> dict[str, int]:
        return dict(self.stub.DescribeBroker(broker_pb2.DescribeBrokerRequest(), timeout=30).counters)

    def stop(self, clean: bool = True) -> None:
        self.channel.close()
        self.broker.stop(clean)


StartBroker = Callable[..., RunningBroker]


@pytest.fixture
def chroot(zookeeper: EmbeddedZooKeeper) -> str:
    """A connect string with a chroot that no other test uses."""
    return f"{zookeeper.connect}/test-{next(_chroots)}"


@pytest.fixture
def start_broker(chroot: str, tmp_path: Path) -> Iterator[StartBroker]:
    """Starts brokers in this process, by settings in snake_case; they are stopped at the end."""
    running = []

    def start(broker_id: int = 0, clock: Clock = SYSTEM_CLOCK, **settings: Any) -> RunningBroker:
        given = {
            "broker.id": broker_id,
            "log.dir": str(tmp_path / f"broker-{broker_id}"),
            "zookeeper.connect": chroot,
            "grpc.port": 0,
            "data.port": 0,
            **settings,
        }
        broker = Broker(BrokerSettings.parse(given), clock)
        broker.start()
        running.append(RunningBroker(broker))
        return running[-1]

    yield start
    for one in reversed(running):
        one.stop()


@pytest.fixture
def broker(start_broker: StartBroker) -> RunningBroker:
    return start_broker()
