"""Brokers are restarted one by one, as the same version and as the next one, while records are written and read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.local import guard
from broker.local.zookeeper import EmbeddedZooKeeper
from kafkalog import Admin, Producer
from kafkalog.errors import FormatLevelNotRaised, FormatLevelNotUnderstood, KafkalogError, NoCommonVersion
from kafkalog.net.data import DataConnection
from kafkalog.records import RecordMetadata
from kafkalog.versions import VersionRange
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import HELLO_SIZE, check_hello, hello
from kafkalog.zk import paths
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.stub import BrokerStub
from tests.chaos.servers import Unwatched
from tests.kafkalog.client.failover.test_reading import Reading, assigned
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.versions.next_broker import FIELD, NEXT, SETTING

pytestmark = pytest.mark.timeout(180)
OURS, THEIRS = "broker.__main__", "tests.versions.next_broker"
PAUSE_SECONDS_MAX = 5.0
"""The machine may be very busy; it was 0.13 s on two busy cores."""


class TimedSending(Sending):
    """Also measures the longest time without an ack."""

    longest_pause = 0.0
    _acked_at = float("inf")

    def _told(self, error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        super()._told(error, metadata)
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._acked_at)
        self._acked_at = now


def test_a_rolling_restart_of_the_same_version_interrupts_no_writer(brokers: Brokers) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS, 3, {"min.insync.replicas": 2})
        reading = Reading(assigned, brokers.bootstrap_servers)
        with Producer(brokers.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with TimedSending(producer, "t") as sending:
                for broker_id in range(3):
                    sending.wait_for_more()
                    brokers.stop(broker_id)
                    sending.wait_for_more()
                    brokers.start(broker_id)
                    wait_in_sync(admin, "t")
            producer.flush()
        assert (sending.failures, sending.acked) == ([], sending.sent)
        reading.wait_for(sending.sent)
        reading.end()
    assert sending.longest_pause < PAUSE_SECONDS_MAX
    assert reading.found == in_order(sending)


def in_order(sending: Sending) -> list[list[bytes | None]]:
    return [[b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)]


class Processes:
    """Three brokers that are processes, each of this version or the next."""

    def __init__(self, folder: Path, zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        settings = {
            "zookeeper.connect": zookeeper,
            "zookeeper.session.timeout.ms": 2000,
            "default.replication.factor": 3,
            "default.min.insync.replicas": 2,
            "grpc.port": 0,
            "data.port": 0,
            "exit.with.stdin": True,
        }
        self._children = [
            guard.BrokerChild(
                {**settings, "broker.id": number, "log.dir": str(folder / f"broker-{number}")}, folder, (), Unwatched()
            )
            for number in range(3)
        ]
        self.announced: list[dict[str, Any]] = []

    def start_all(self) -> None:
        for child in self._children:
            child.launch()
            child.let_go()
        self.announced = [child.await_ready() for child in self._children]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{each['grpc_port']}" for each in self.announced)

    def start(self, broker_id: int, module: str) -> None:
        """Start one again, as one of a version. Raises the error if it cannot start."""
        original = guard.python_command
        with self._monkeypatch.context() as patched:
            patched.setattr(guard, "python_command", lambda _, *arguments: original(module, *arguments))
            self._children[broker_id].launch()
        self._children[broker_id].let_go()
        self.announced[broker_id] = self._children[broker_id].await_ready()

    def stop(self, broker_id: int) -> None:
        self._children[broker_id].begin_stop()
        assert self._children[broker_id].finish_stop() in (0, None)

    def log(self, broker_id: int) -> str:
        return self._children[broker_id].log_file.read_text()

    def call(self, broker_id: int, method: str, request: Any) -> Any:
        """A call of one broker, which only it can answer."""
        with grpc.insecure_channel(f"127.0.0.1:{self.announced[broker_id]['grpc_port']}") as channel:
            return getattr(BrokerStub(channel), method)(request, timeout=30)

    def greeted(self, broker_id: int, versions: VersionRange) -> int:
        """The protocol version that a peer with these versions speaks with a broker."""
        port = self.announced[broker_id]["data_port"]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as peer:
            peer.sendall(hello(versions))
            return check_hello(peer.recv(HELLO_SIZE, socket.MSG_WAITALL), "broker", versions)

    def close(self) -> None:
        for child in self._children:
            child.begin_stop()
        for child in self._children:
            child.finish_stop()


@pytest.fixture
def session(zookeeper: EmbeddedZooKeeper) -> Iterator[ZooKeeperSession]:
    session = ZooKeeperSession(f"{zookeeper.connect}/rolling")
    session.start()
    yield session
    session.close()


@pytest.fixture
def processes(zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    processes = Processes(tmp_path, f"{zookeeper.connect}/rolling", monkeypatch)
    try:
        processes.start_all()
        yield processes
    finally:
        processes.close()


def fields(session: ZooKeeperSession, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(session.get(path)[0])
    return found


def test_brokers_of_two_versions_serve_one_cluster_until_its_level_is_raised(
    processes: Processes, session: ZooKeeperSession
) -> None:
    with Admin(processes.bootstrap_servers) as admin:
        topic_id = admin.create_topic("t", PARTITIONS).topic_id
        states = [paths.partition_state("t", topic_id, number) for number in range(PARTITIONS)]
        reading = Reading(assigned, processes.bootstrap_servers)
        with Producer(processes.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with TimedSending(producer, "t") as sending:
                with_field: set[str] = set()
                for broker_id in range(3):
                    sending.wait_for_more()
                    processes.stop(broker_id)
                    sending.wait_for_more()
                    processes.start(broker_id, THEIRS)
                    wait_in_sync(admin, "t")
                    now = {path for path in states if FIELD in fields(session, path)}
                    assert now >= with_field, "what a newer broker wrote into a state stays, whoever writes it"
                    with_field = now
                    if broker_id == 0:
                        is_mixed(processes, session, admin)
            producer.flush()
        assert (sending.failures, sending.acked) == ([], sending.sent)
        assert with_field == set(states)
        assert sending.longest_pause < PAUSE_SECONDS_MAX

        assert admin.describe_cluster().format_level == 1
        assert admin.upgrade_cluster()[:2] == (1, 2)
        assert fields(session, paths.CLUSTER)["format_level"] == 2
        processes.stop(2)
        with pytest.raises(FormatLevelNotUnderstood) as refused:
            processes.start(2, OURS)
        assert str(refused.value) == (
            "the cluster has format level 2, and broker 2 understands 1: "
            "start a version of the broker that understands level 2"
        )
        processes.start(2, THEIRS)
        wait_in_sync(admin, "t")
        reading.wait_for(sending.sent)
        reading.end()
    assert reading.found == in_order(sending)


def is_mixed(processes: Processes, session: ZooKeeperSession, admin: Admin) -> None:
    """Broker 0 is of the next version, the others are not yet."""
    assert fields(session, paths.broker(0))[FIELD] == 0
    assert [processes.greeted(0, NEXT), processes.greeted(1, NEXT)] == [2, 1]
    with pytest.raises(NoCommonVersion, match="speaks the protocol versions 1, and this side 2"):
        processes.greeted(1, VersionRange(2, 2))
    port = processes.announced[0]["data_port"]
    connection = DataConnection("127.0.0.1", port, connect_timeout_ms=30_000, request_timeout_ms=30_000)
    assert connection.protocol == 1, "this process is of this version"
    connection.close()

    with pytest.raises(FormatLevelNotRaised, match="broker 1 understands 1, broker 2 understands 1; upgrade them"):
        admin.upgrade_cluster(2)
    dry = admin.upgrade_cluster(dry_run=True)
    assert (dry.level_before, dry.level, [each.broker_id for each in dry.behind]) == (1, 1, [1, 2])

    processes.call(0, "CreateTopic", pb.CreateTopicRequest(name="newer", config={SETTING: "5"}))
    changed = pb.AlterTopicRequest(name="newer", set={"retention.ms": "1000000"})
    config = dict(processes.call(1, "AlterTopic", changed).config)
    assert config == fields(session, paths.topic("newer"))["config"]
    assert (config[SETTING], config["retention.ms"]) == ("5", "1000000")
    assert f"topic_setting_ignored topic=newer setting={SETTING} value=5" in processes.log(1)
    assert "topic_setting_ignored" not in processes.log(0)
