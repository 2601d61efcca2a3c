"""LocalCluster and its guard, as processes: started, stopped, killed from every side, with nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from broker.local import LocalCluster
from broker.local import cluster as local
from kafkalog import Admin
from kafkalog.errors import (
    AddressInUse,
    Closed,
    DataDirInUse,
    InvalidArgument,
    InvalidRequest,
    InvalidSetting,
    LocalClusterEnded,
    MissingDependency,
    UnknownSetting,
    ZooKeeperUnreachable,
)
from kafkalog.wire import broker_pb2
from tests.broker.data_port_client import DataPortClient, a_batch
from tests.broker.stub import BrokerStub
from tests.free_ports import free_ports
from tests.waiting import suspend

LIMIT_SECONDS = 60.0


class Watched:
    """Processes that are waited for by their end, whoever's children they are."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = {os.pidfd_open(pid): pid for pid in pids}

    def all_end(self) -> bool:
        poller = select.poll()
        for fd in self._fds:
            poller.register(fd, select.POLLIN)
        left = set(self._fds)
        while left:
            ended = poller.poll(LIMIT_SECONDS * 1000)
            if not ended:
                return False
            for fd, _ in ended:
                poller.unregister(fd)
                left.discard(fd)
        return True

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def stub_of(address: str) -> tuple[grpc.Channel, BrokerStub]:
    channel = grpc.insecure_channel(address)
    return channel, BrokerStub(channel)


def create_topic(address: str, name: str, partitions: int = 1, replicas: int = 0) -> broker_pb2.TopicDescription:
    channel, stub = stub_of(address)
    with channel:
        made: broker_pb2.TopicDescription
        request = broker_pb2.CreateTopicRequest(name=name, partitions=partitions, replicas=replicas)
        made = stub.CreateTopic(request, timeout=30)
        return made


def processes_of(cluster: LocalCluster) -> list[int]:
    """The guard, ZooKeeper, the brokers and the sweeper."""
    guard = psutil.Process(cluster.guard_pid)
    sweepers = [child for child in psutil.Process().children() if str(cluster.root) in child.cmdline()]
    return [process.pid for process in [guard, *guard.children(recursive=True), *sweepers]]


HOLDER = """
import sys
from broker.local import LocalCluster
from tests.broker.local.test_cluster import processes_of
cluster = LocalCluster().start()
print(cluster.root, cluster.guard_pid, *processes_of(cluster), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[bytes], Path, int, list[int]]]:
    """A process that holds a cluster: (process, its root, the guard, all the cluster's processes)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    words = process.stdout.readline().split()
    root, pids = Path(os.fsdecode(words[0])), [int(word) for word in words[1:]]
    assert root.is_dir()
    assert len(pids) == 1 + 4  # the guard twice, ZooKeeper, a broker, the sweeper
    yield process, root, pids[0], pids[1:]
    process.kill()
    process.communicate()


def test_kill_of_the_parent_leaves_no_process_and_no_file(
    holder: tuple[subprocess.Popen[bytes], Path, int, list[int]],
) -> None:
    process, root, _, pids = holder
    watched = Watched(pids)
    process.kill()
    assert watched.all_end()
    assert not root.exists()
    watched.close()


def test_kill_of_the_guard_leaves_no_process_and_no_file(
    holder: tuple[subprocess.Popen[bytes], Path, int, list[int]],
) -> None:
    _, root, guard, pids = holder
    watched = Watched(pids)
    os.kill(guard, signal.SIGKILL)
    assert watched.all_end()
    assert not root.exists()
    watched.close()


def test_kill_of_parent_and_guard_at_once_leaves_no_process_and_no_file(
    holder: tuple[subprocess.Popen[bytes], Path, int, list[int]],
) -> None:
    process, root, guard, pids = holder
    watched = Watched(pids)
    os.kill(guard, signal.SIGKILL)
    process.kill()
    assert watched.all_end()
    assert not root.exists()
    watched.close()


def test_sigterm_of_the_guard_stops_everything_in_order(
    holder: tuple[subprocess.Popen[bytes], Path, int, list[int]],
) -> None:
    _, root, guard, pids = holder
    watched = Watched(pids)
    os.kill(guard, signal.SIGTERM)
    assert watched.all_end()
    assert not root.exists()
    watched.close()


def test_close_leaves_no_process_and_no_file_and_closes_no_descriptor_of_ours() -> None:
    before = set(os.listdir("/proc/self/fd"))
    cluster = LocalCluster()
    with cluster:
        watched = Watched(processes_of(cluster))
        assert cluster.root.is_dir()
    assert watched.all_end()
    watched.close()
    assert not cluster.root.exists()
    assert set(os.listdir("/proc/self/fd")) == before
    assert [broker.pid for broker in cluster.brokers] == [None]
    cluster.close()  # again: nothing happens
    with pytest.raises(Closed):
        _ = cluster._ask({"do": "stop_broker", "broker": 0})


def test_topics_spread_over_three_brokers_and_any_of_them_knows_all() -> None:
    with LocalCluster(brokers=3) as cluster:
        made = create_topic(cluster.brokers[1].address, "spread", partitions=6, replicas=1)
        leaders = sorted(partition.leader for partition in made.partitions)
        assert leaders == [0, 0, 1, 1, 2, 2]
        for broker in cluster.brokers:
            channel, stub = stub_of(broker.address)
            with channel:
                described = stub.DescribeCluster(broker_pb2.DescribeClusterRequest())
                assert [one.broker_id for one in described.brokers] == [0, 1, 2]
                assert described.answering_broker_id == broker.broker_id
                assert [one.grpc_port for one in described.brokers] == [one.grpc_port for one in cluster.brokers]
                assert described.zookeeper_connect == cluster.zookeeper_connect
        for partition in made.partitions:
            with DataPortClient(cluster.brokers[partition.leader].data_port) as client:
                appended = client.append(made.topic_id, a_batch(), partition=partition.partition)
                assert not appended.HasField("error")
        with DataPortClient(cluster.brokers[(made.partitions[0].leader + 1) % 3].data_port) as client:
            appended = client.append(made.topic_id, a_batch(), partition=0)
            assert appended.error.code == 13  # NotLeader


@pytest.mark.parametrize(
    ("brokers", "settings", "replicas", "least"),
    [(2, {}, 1, "1"), (3, {}, 3, "2"), (3, {"default_replication_factor": 1}, 1, "1")],
)
def test_three_brokers_keep_three_copies_unless_told_otherwise(
    brokers: int, settings: dict[str, int], replicas: int, least: str
) -> None:
    with LocalCluster(brokers, settings=settings) as cluster, Admin(cluster.bootstrap_servers) as admin:
        topic = admin.create_topic("t", partitions=2)
        assert [len(each.replicas) for each in topic.partitions] == [replicas] * 2
        assert topic.effective["min.insync.replicas"] == least


def test_a_killed_broker_comes_back_at_its_ports_with_its_data() -> None:
    with LocalCluster() as cluster:
        broker = cluster.brokers[0]
        made = create_topic(broker.address, "kept")
        with DataPortClient(broker.data_port) as client:
            for number in range(10):
                assert client.append(made.topic_id, a_batch([b"%d" % number])).base_offset == number
        ports = broker.grpc_port, broker.data_port
        broker.kill()
        assert broker.pid is None
        broker.start()
        assert broker.pid is not None
        assert (broker.grpc_port, broker.data_port) == ports
        with DataPortClient(broker.data_port) as client:
            part, body = client.fetch(made.topic_id, 0)
            assert part.end_offset == 10
            assert part.length == len(body) > 0
            assert client.append(made.topic_id, a_batch()).base_offset == 10
        channel, stub = stub_of(broker.address)
        with channel:
            described = stub.DescribeTopics(broker_pb2.DescribeTopicsRequest(names=["kept"])).topics[0]
        assert described.partitions[0].leader_epoch == 1  # raised, for the stop was unclean
        assert broker.stop() == 0
        assert broker.pid is None
        broker.start()
        channel, stub = stub_of(broker.address)
        with channel:
            described = stub.DescribeTopics(broker_pb2.DescribeTopicsRequest(names=["kept"])).topics[0]
        assert described.partitions[0].leader_epoch == 1  # the stop was clean
        assert broker.stop() == 0
        assert broker.stop() is None
        broker.start()
        broker.kill()
        assert broker.stop() is None
        broker.start()
        with pytest.raises(InvalidRequest, match="is already running"):
            broker.start()


def test_two_clusters_side_by_side_do_not_meet() -> None:
    with LocalCluster() as one, LocalCluster() as other:
        create_topic(one.brokers[0].address, "here")
        channel, stub = stub_of(other.brokers[0].address)
        with channel:
            assert not stub.DescribeTopics(broker_pb2.DescribeTopicsRequest()).topics
            there = stub.DescribeCluster(broker_pb2.DescribeClusterRequest())
        channel, stub = stub_of(one.brokers[0].address)
        with channel:
            here = stub.DescribeCluster(broker_pb2.DescribeClusterRequest())
        assert here.cluster_id != there.cluster_id
        assert len(here.brokers) == len(there.brokers) == 1


def test_data_directory_and_ports_are_kept_over_a_restart(tmp_path: Path) -> None:
    port = free_ports(2)
    with LocalCluster(data=tmp_path / "all", port=port) as cluster:
        broker = cluster.brokers[0]
        assert (broker.grpc_port, broker.data_port) == (port, port + 1)
        assert cluster.bootstrap_servers == f"127.0.0.1:{port}"
        made = create_topic(broker.address, "kept")
        with DataPortClient(broker.data_port) as client:
            client.append(made.topic_id, a_batch())
        with pytest.raises(DataDirInUse, match="all is in use"):
            LocalCluster(data=tmp_path / "all").start()
    assert (tmp_path / "all" / "broker-0" / "clean").exists()  # it was stopped in order, and not just ended
    with LocalCluster(data=tmp_path / "all", port=port) as cluster, DataPortClient(port + 1) as client:
        assert client.append(made.topic_id, a_batch()).base_offset == 1


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_in_use_is_named_and_nothing_is_left(taken: int) -> None:
    port = free_ports(2)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", port + taken))
        occupied.listen()
        cluster = LocalCluster(port=port)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port + taken} is in use"):
            cluster.start()
        assert not cluster.root.exists()


def test_zookeepers_port_in_use_is_named() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        cluster = LocalCluster(zookeeper_port=port)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} is in use"):
            cluster.start()
        assert not cluster.root.exists()


def test_a_zookeeper_that_can_write_nothing_is_named_with_its_log(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    cluster = LocalCluster(data=tmp_path, settings={"zookeeper.connection.timeout.ms": 2000})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # its first log file is larger
    try:
        with pytest.raises(ZooKeeperUnreachable) as told:
            cluster.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        cluster.close()
    assert re.search(rf"its log {tmp_path}/zookeeper/zookeeper\.log ends: .*File too large", str(told.value))


def test_without_java_the_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    cluster = LocalCluster()
    with pytest.raises(MissingDependency, match="java"):
        cluster.start()
    assert not cluster.root.exists()


def test_settings_reach_the_brokers_and_wrong_ones_are_refused() -> None:
    with LocalCluster(settings={"num.partitions": 3}) as cluster:
        assert len(create_topic(cluster.brokers[0].address, "three", partitions=0).partitions) == 3
    with pytest.raises(UnknownSetting, match=r"did you mean 'num\.partitions'"):
        LocalCluster(settings={"num.partition": 3})
    with pytest.raises(InvalidArgument, match=r"default\.replication\.factor=5 needs .* brokers=5 \(kafkalog local"):
        LocalCluster(3, settings={"default.replication.factor": 5})
    with pytest.raises(InvalidArgument, match=r"grpc\.port"):
        LocalCluster(settings={"grpc_port": 3})
    with pytest.raises(InvalidArgument):
        LocalCluster(brokers=0)
    with pytest.raises(InvalidArgument):
        LocalCluster(port=65535)


def test_what_keeps_a_broker_from_starting_is_reported_by_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "broker-0").write_text("no directory")
    with pytest.raises(InvalidSetting, match=r"broker-0' is not valid: it is not a directory.*File exists"):
        LocalCluster(data=tmp_path).start()


def test_fewer_brokers_than_the_data_directory_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broker-0").mkdir()
    (tmp_path / "broker-2").mkdir()
    (tmp_path / "broker-x").mkdir()
    for brokers, missing in ((1, "broker 2"), (2, "broker 2")):
        with pytest.raises(InvalidArgument) as raised:
            LocalCluster(brokers=brokers, data=tmp_path, port=1).start()
        assert str(raised.value) == (
            f"{tmp_path} has the data of {missing}, whose partitions would not be served with brokers={brokers}: "
            "give brokers=3 (kafkalog local --brokers 3)"
        )


def test_the_end_of_the_guard_is_reported_as_such(tmp_path: Path) -> None:
    with LocalCluster(data=tmp_path) as cluster:
        watched = Watched(processes_of(cluster))
        assert cluster.guard_pid is not None
        os.kill(cluster.guard_pid, signal.SIGKILL)
        assert watched.all_end()
        watched.close()
        with pytest.raises(LocalClusterEnded, match=f"^the guard process of the local cluster in {tmp_path} has ended"):
            cluster.look()


def test_a_guard_that_does_not_end_is_killed_and_everything_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_CLOSE_SECONDS", 0.1)
    cluster = LocalCluster().start()
    watched = Watched(processes_of(cluster))
    assert cluster.guard_pid is not None
    suspend(cluster.guard_pid)
    cluster.close()
    assert watched.all_end()
    watched.close()
    assert not cluster.root.exists()


def test_a_command_that_was_interrupted_leaves_its_answer_to_nobody() -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    main = threading.main_thread().ident
    assert main is not None

    def once_it_waits() -> None:
        while "_ask" not in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]:
            threading.Event().wait(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    with LocalCluster() as cluster:
        assert cluster.guard_pid is not None
        before = signal.signal(signal.SIGUSR1, interrupt)
        suspend(cluster.guard_pid)
        try:
            threading.Thread(target=once_it_waits).start()
            with pytest.raises(Interrupted):
                cluster._ask({"do": "no such thing", "broker": 0})
        finally:
            os.kill(cluster.guard_pid, signal.SIGCONT)
            signal.signal(signal.SIGUSR1, before)
        assert cluster.brokers[0].stop() == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"brokers": 0}, "brokers must be at least 1, not 0"),
        ({"port": 0}, "ports 0 to 1 are not all from 1 to 65535"),
        ({"port": 65_535}, "ports 65535 to 65536 are not all from 1 to 65535"),
        ({"brokers": 2, "port": 65_533}, "ports 65533 to 65536 are not all from 1 to 65535"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_it_is_started(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        LocalCluster(**given)
    LocalCluster(port=65_534)


def test_a_cluster_that_was_not_started_is_closed() -> None:
    cluster = LocalCluster()
    with pytest.raises(Closed):
        _ = cluster.zookeeper_connect
    with pytest.raises(Closed):
        cluster.look()
    assert cluster.bootstrap_servers == ""
    cluster.close()
