"""A broker as a whole: what keeps it from starting, what its stop keeps, what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.config import BrokerSettings
from broker.local.zookeeper import EmbeddedZooKeeper
from broker.replica.in_doubt import InDoubtRecovery
from broker.replica.watcher import Watcher
from broker.server import Broker, read_config
from broker.states.election import join
from broker.storage import log_dir as directory
from broker.storage.disk import Disk
from kafkalog import Admin, errors
from kafkalog.wire import broker_pb2
from kafkalog.wire.service import SERVICE
from kafkalog.zk import paths, registry
from kafkalog.zk.controllers import read_controller
from kafkalog.zk.registry import BrokerRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import StartBroker
from tests.broker.data_port_client import DataPortClient, a_batch
from tests.broker.stub import BrokerStub
from tests.free_ports import free_ports
from tests.kafkalog.zk.expiry import expire
from tests.waiting import waited_for


@pytest.mark.parametrize("setting", ["grpc.port", "data.port"])
def test_a_port_in_use_is_named_with_its_setting(start_broker: StartBroker, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        threads = set(threading.enumerate())
        with pytest.raises(errors.AddressInUse, match=rf"127\.0\.0\.1:{port} is in use .*{setting}"):
            start_broker(**{setting: port})
        assert [thread.name for thread in set(threading.enumerate()) - threads] == []


def test_two_brokers_do_not_share_a_grpc_port(start_broker: StartBroker) -> None:
    port = start_broker(0).broker.grpc_port
    with pytest.raises(errors.AddressInUse, match=rf"{port} is in use"):
        start_broker(1, grpc_port=port)


def test_a_data_directory_in_use_is_named(start_broker: StartBroker, tmp_path: Path) -> None:
    start_broker(0)
    with pytest.raises(errors.DataDirInUse, match=rf"broker-0 is in use .*process \({os.getpid()}\)"):
        start_broker(1, log_dir=str(tmp_path / "broker-0"))


def test_a_data_directory_of_another_cluster_or_broker_is_refused(
    start_broker: StartBroker, zookeeper: EmbeddedZooKeeper, tmp_path: Path, chroot: str
) -> None:
    start_broker(0).stop()
    with pytest.raises(errors.ClusterMismatch, match="not to a new cluster"):
        start_broker(0, zookeeper_connect=f"{chroot}-other")
    with contextlib.closing(ZooKeeperSession(f"{chroot}-other")) as session:
        session.start()
        assert session.children("/") == [], "a cluster that nobody wants"
    with pytest.raises(errors.ClusterMismatch):
        start_broker(1, log_dir=str(tmp_path / "broker-0"))
    start_broker(1, zookeeper_connect=f"{chroot}-other").stop()
    with pytest.raises(errors.ClusterMismatch, match=r"belongs to cluster \w+, not to cluster \w+: correct zookeeper"):
        start_broker(0, zookeeper_connect=f"{chroot}-other")


def test_a_broker_id_that_a_live_broker_has_is_refused(start_broker: StartBroker, tmp_path: Path) -> None:
    start_broker(0)
    refused = r"broker\.id=0 is not valid: the broker at 127\.0\.0\.1:\d+ has .*: give this one another broker\.id"
    with pytest.raises(errors.InvalidSetting, match=refused):
        start_broker(0, log_dir=str(tmp_path / "elsewhere"), zookeeper_session_timeout_ms=1000)
    start_broker(1, log_dir=str(tmp_path / "elsewhere"))  # which another id has not made its own


def test_an_unreachable_zookeeper_is_named_in_bounded_time(start_broker: StartBroker) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(errors.ZooKeeperUnreachable, match=f"{address} is not reachable"):
            start_broker(zookeeper_connect=address, zookeeper_connection_timeout_ms=300)


def test_a_start_that_zookeeper_keeps_from_its_end_leaves_a_clean_directory_clean(start_broker: StartBroker) -> None:
    broker = start_broker()
    broker.new_topic()
    broker.stop()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(errors.ZooKeeperUnreachable):
            start_broker(zookeeper_connect=address, zookeeper_connection_timeout_ms=300)
    assert start_broker().broker.host.metadata.topic("t").states[0].leader_epoch == 0


def test_a_broker_whose_disk_failed_takes_itself_out_of_service_and_says_why(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = start_broker(0), start_broker(1)
    host = failing.broker.host
    assert other.broker.host.metadata.wait_until(lambda: set(other.broker.host.metadata.brokers) == {0, 1}, 60)
    topic = other.new_topic(partitions=2, flush_messages=1)
    with failing.client() as client:
        client.append(topic, a_batch())  # its first sync is that of the leader epoch

    def sync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(host._directory.disk, "sync", sync)
    with failing.client() as client:
        for _ in range(2):
            assert client.append(topic, a_batch()).error.code == errors.StorageFailed.code
        assert client.fetch(topic, 0)[0].error.code == errors.StorageFailed.code
    latest = broker_pb2.ListOffsetsRequest(partitions=[broker_pb2.ListOffset(topic_id=topic)], max_wait_ms=30_000)
    listed = failing.stub.ListOffsets(latest, timeout=20).partitions[0]  # or who waits for news would wait for ever
    assert listed.error.code == errors.StorageFailed.code
    assert other.broker.host.metadata.wait_until(lambda: set(other.broker.host.metadata.brokers) == {1}, 60)
    health = health_pb2_grpc.HealthStub(failing.channel)
    for service in ("", SERVICE):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    with Admin(f"127.0.0.1:{failing.broker.grpc_port}") as admin:
        assert admin.describe_broker().failure.code == errors.StorageFailed.code
        assert admin.create_topic("elsewhere", partitions=3).partitions[2].leader == 1
    assert not other.stub.DescribeBroker(broker_pb2.DescribeBrokerRequest(), timeout=30).HasField("failure")
    said = [line for line in caplog.text.splitlines() if "broker_out_of_service broker_id=0" in line]
    assert len(said) == 1
    assert "fdatasync for t-0: Input/output error" in said[0]

    expire(host.metadata.session)
    other.new_topic("later")
    other.stub.DeleteTopic(broker_pb2.DeleteTopicRequest(name="t"), timeout=60)
    assert host.metadata.wait_until(
        lambda: {*host.metadata.topics} == {"elsewhere", "later"}, 60
    )  # it follows, but ...
    assert set(registry.live_brokers(other.broker.host.metadata.session)) == {1}
    monkeypatch.undo()
    failing.stop()
    assert set(start_broker(0).broker.host.metadata.brokers) == {0, 1}


def test_a_failed_broker_that_zookeeper_does_not_hear_takes_itself_out_later(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start_broker().broker.host
    withdraw, heard = registry.withdraw_broker, threading.Event()

    def unheard(session: ZooKeeperSession, broker: BrokerRecord) -> None:
        if not heard.is_set():
            heard.set()
            raise errors.ZooKeeperUnreachable(address="zk", reason="no answer in time")
        withdraw(session, broker)

    monkeypatch.setattr("broker.replica.host.registry.withdraw_broker", unheard)
    host._directory.services.health.fail(errors.StorageFailed(directory="/data", reason="the disk is gone"))
    assert host.metadata.wait_until(lambda: not host.metadata.brokers, 60)
    assert heard.is_set()


def test_a_broker_whose_disk_fails_while_it_starts_does_not_start(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, chroot: str
) -> None:
    registered = registry.register_broker

    def late(session: ZooKeeperSession, broker: BrokerRecord) -> object:
        done = registered(session, broker)
        directory = watchers[0]._host._directory
        directory.services.health.fail(errors.StorageFailed(directory="/data", reason="the disk is gone"))
        return done

    watchers: list[Watcher] = []
    start = Watcher.start
    monkeypatch.setattr(Watcher, "start", lambda self: (watchers.append(self), start(self)))
    monkeypatch.setattr("broker.replica.host.registry.register_broker", late)
    with pytest.raises(errors.StorageFailed, match="the disk is gone"):
        start_broker()
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        assert registry.live_brokers(session) == {}


def test_a_broker_that_cannot_sync_what_it_recovers_does_not_start_and_never_registers(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, chroot: str
) -> None:
    killed = start_broker()
    topic = killed.new_topic()
    with killed.client() as client:
        client.append(topic, a_batch())
    killed.broker.stop(clean=False)
    fails = [1]
    synced = Disk.sync

    def sync(disk: Disk, fd: int) -> None:
        if fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
            fails.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced(disk, fd)

    registered: list[BrokerRecord] = []
    monkeypatch.setattr(Disk, "sync", sync)
    monkeypatch.setattr("broker.replica.host.registry.register_broker", lambda _, broker: registered.append(broker))
    with pytest.raises(errors.StorageFailed, match="fdatasync of recovered bytes for t-0: Input/output error"):
        start_broker()
    assert not fails and not registered


def test_an_advertised_name_that_cannot_be_resolved_is_warned_of(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    start_broker()
    assert "advertised_host_unknown" not in caplog.text
    start_broker(1, advertised_host="no-such-host.invalid")
    assert 'advertised_host_unknown host=no-such-host.invalid reason="' in caplog.text


def test_one_broker_is_the_controller_until_it_stops(start_broker: StartBroker) -> None:
    one, other = start_broker(0), start_broker(1)
    session = other.broker.host.metadata.session

    def controller() -> tuple[int, int]:
        found = read_controller(session)
        return (-1, 0) if found is None else (found.broker_id, found.epoch)

    waited_for(lambda: controller() == (0, 1))
    one.stop()
    waited_for(lambda: controller() == (1, 2))


def test_a_stop_hands_leaderships_over_first(start_broker: StartBroker) -> None:
    """No follower copies a log yet; the states are written as if one had."""
    one, other = start_broker(0), start_broker(1)
    metadata, session = other.broker.host.metadata, other.broker.host.metadata.session
    assert one.broker.host.metadata.wait_until(lambda: set(one.broker.host.metadata.brokers) == {0, 1}, 30)
    topic = registry.TopicRecord("t", b"t" * 16, {}, [(0, 1)], 0)
    registry.create_topic(session, topic)
    assert metadata.wait_until(lambda: metadata.topics.keys() == {"t"} and 0 in metadata.topic("t").states, 30)
    state = metadata.topic("t").states[0]
    joined = join(state, 1, metadata.brokers[1].directory, 1)
    registry.change_states(session, [registry.StateChange(topic, 0, state, joined)])
    assert one.broker.host.metadata.wait_until(lambda: one.broker.registration.leads_for_others, 30)
    seen: list[tuple[int, tuple[int, ...]]] = []

    def noted() -> None:
        found = registry.read_topic(session, "t")
        assert found is not None
        seen.append((found.states[0].leader, found.states[0].isr))

    one.broker._undo.insert(-1, noted)  # right after the first thing that a stop does
    one.stop()
    assert seen == [(1, (0, 1))], "it is in sync until it is gone"
    assert metadata.wait_until(lambda: metadata.topic("t").states[0].isr == (1,), 30)
    assert metadata.topic("t").states[0].leader_epoch == 1


def test_a_stop_does_not_wait_for_a_zookeeper_that_is_away(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = start_broker()
    monkeypatch.setattr(type(one.broker.registration), "leads_for_others", True)
    away = errors.ZooKeeperNotAsked(address="zk", reason="there is no connection")

    def not_asked(*_: object) -> None:
        raise away

    monkeypatch.setattr(registry, "register_broker", not_asked)
    one.stop()
    assert "leaderships_not_handed_over broker_id=0" in caplog.text and str(away) in caplog.text
    assert "stop_failed" not in caplog.text


def test_start_and_stop_leave_no_thread_and_no_descriptor(start_broker: StartBroker) -> None:
    def cycle() -> None:
        broker = start_broker()
        topic = (
            broker.new_topic()
            if not broker.broker.host.metadata.topics
            else broker.broker.host.metadata.topic("t").topic_id
        )
        with broker.client() as client:
            client.append(topic, a_batch())
            client.fetch(topic, 0)
        broker.stop()

    cycle()  # gRPC keeps a few threads and descriptors of its own from the first time on
    gc.collect()
    threads, count = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cycle()
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert left == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= count


def test_a_failed_start_leaves_no_thread_and_frees_what_it_took(
    start_broker: StartBroker, tmp_path: Path, chroot: str
) -> None:
    start_broker(0).stop()
    threads = set(threading.enumerate())
    port = free_ports(1)
    with pytest.raises(errors.ClusterMismatch):
        start_broker(1, log_dir=str(tmp_path / "broker-0"), data_port=port)
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    start_broker(0, data_port=port)


def test_one_part_that_fails_to_stop_keeps_no_other_from_it(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = InDoubtRecovery.stop

    def fails(in_doubt: InDoubtRecovery) -> None:
        stop(in_doubt)
        raise ZeroDivisionError("a defect")

    start_broker().stop()  # gRPC keeps a few threads of its own from the first time on
    threads = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(InDoubtRecovery, "stop", fails)
        start_broker().stop()
    assert caplog.text.count("stop_failed") == 1
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert (tmp_path / "broker-0" / "clean").exists()
    start_broker()


def test_a_broker_is_registered_once_it_answers_at_both_ports(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = registry.register_broker
    answered: list[int] = []

    def ask_first(session: ZooKeeperSession, broker: BrokerRecord) -> object:
        with grpc.insecure_channel(f"127.0.0.1:{broker.grpc_port}") as channel, DataPortClient(broker.data_port):
            told = BrokerStub(channel).DescribeCluster(broker_pb2.DescribeClusterRequest(), timeout=30)
            answered.append(told.answering_broker_id)
        return register(session, broker)

    monkeypatch.setattr("broker.replica.host.registry.register_broker", ask_first)
    start_broker()
    assert answered == [0]


def test_a_config_file_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    config = tmp_path / "broker.properties"
    config.write_text("# a comment\nbroker.id = 7\nlog.dir=/somewhere\n")
    assert read_config(config).broker_id == 7
    assert read_config(config, {"broker.id": 8}).broker_id == 8
    config.write_text("broker.idd=7\n")
    with pytest.raises(errors.UnknownSetting, match=r"did you mean 'broker\.id'"):
        read_config(config)
    with pytest.raises(errors.InvalidSetting, match="No such file"):
        read_config(tmp_path / "none")
    config.write_bytes(b"\xef\xbb\xbfbroker.id=7\r\n")  # with a byte order mark, as editors on Windows write it
    assert read_config(config).broker_id == 7
    for again in ("broker.id=2", "broker_id=1"):
        config.write_text(f"broker.id=1\nlog.dir=/somewhere\n{again}\n")
        with pytest.raises(errors.InvalidSetting, match=r"broker\.properties line 3=.* line 1 gives broker.id already"):
            read_config(config)


@pytest.mark.parametrize("log_dir", ["", " ", "~/logs"])
def test_a_log_dir_that_names_no_directory_is_refused(log_dir: str) -> None:
    with pytest.raises(errors.InvalidSetting, match=r"^log\.dir="):
        BrokerSettings.parse({"log.dir": log_dir})


@pytest.mark.parametrize("every", ["0.0.0.0", "::", "0", ""])
def test_an_address_that_leads_each_client_to_itself_is_not_advertised(every: str) -> None:
    with pytest.raises(errors.InvalidSetting, match=r"^host=.*set advertised\.host to a name"):
        BrokerSettings.parse({"host": every})
    with pytest.raises(errors.InvalidSetting, match=r"^advertised\.host=.*set advertised\.host to a name"):
        BrokerSettings.parse({"host": "10.0.0.1", "advertised.host": every or "::"})
    assert BrokerSettings.parse({"host": every, "advertised.host": "broker.example"}).host == every
    for host in ("10.0.0.1", "::1", "broker.example", "0.example"):
        assert BrokerSettings.parse({"host": host}).host == host


class Process:
    """`python -m broker` over a configuration."""

    def __init__(
        self, folder: Path, connect: str, *arguments: str, command: Sequence[str] = (), **settings: str
    ) -> None:
        self.config = folder / "broker.properties"
        given = {"log.dir": folder / "data", "zookeeper.connect": connect, "grpc.port": 0, "data.port": 0}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        self.config.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        self.process = subprocess.Popen(
            [*command, sys.executable, "-m", "broker", "--config", str(self.config), "--announce", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def announced(self) -> dict[str, int]:
        assert self.process.stdout is not None
        ports: dict[str, int] = json.loads(self.process.stdout.readline())
        return ports

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT, "stdin"])
def test_the_process_stops_in_order_on_a_signal_and_at_the_end_of_its_input(
    tmp_path: Path, chroot: str, ended_by: signal.Signals | str
) -> None:
    running = Process(tmp_path, chroot, exit_with_stdin="true")
    ports = running.announced()
    assert ports["pid"] == running.process.pid
    with DataPortClient(ports["data_port"]):
        if isinstance(ended_by, signal.Signals):
            running.process.send_signal(ended_by)
        code, said = running.end()
    assert code == 0
    assert "broker_stopped broker_id=0 clean=true" in said
    assert "Traceback" not in said
    assert (tmp_path / "data" / "clean").exists()


def test_the_process_may_open_as_many_files_as_its_limit_can_be_raised_to(tmp_path: Path, chroot: str) -> None:
    running = Process(tmp_path, chroot, command=["sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh"])
    soft, hard = resource.prlimit(running.announced()["pid"], resource.RLIMIT_NOFILE)
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    assert soft == hard


def test_a_signal_that_the_system_hands_to_another_thread_stops_the_process(tmp_path: Path, chroot: str) -> None:
    running = Process(tmp_path, chroot)
    pid = running.announced()["pid"]
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
    other = int(next(task.name for task in tasks if "SigBlk:\t0000000000000000" in (task / "status").read_text()))
    assert ctypes.CDLL(None).tgkill(pid, other, signal.SIGTERM) == 0
    code, said = running.end()
    assert code == 0
    assert "broker_stopped broker_id=0 clean=true" in said


def test_the_process_says_why_it_does_not_start_in_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        failed = Process(tmp_path, address, zookeeper_connection_timeout_ms="300")
        assert failed.announced()["error"] == errors.ZooKeeperUnreachable.code
        code, said = failed.end()
    assert code == 1
    assert said.strip().splitlines()[-1].startswith(f"broker: ZooKeeper at {address} is not reachable")
    assert "Traceback" not in said


def test_the_process_ends_with_one_sentence_when_another_broker_has_its_id(tmp_path: Path, chroot: str) -> None:
    running = Process(tmp_path, chroot)
    running.announced()
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        mine = registry.live_brokers(session)[0]
        session.delete(paths.broker(0))  # as the end of its session does
        assert registry.register_broker(session, replace(mine, directory="another", where="host:/another")) is None
        code, said = running.end()
        assert registry.live_brokers(session)[0].where == "host:/another"
    assert code == 1
    assert "broker_replaced broker_id=0" in said
    assert said.strip().splitlines()[-1].startswith("broker: broker.id=0 is not valid: the broker at 127.0.0.1:")
    assert said.strip().endswith("has this id (host:/another): give this one another broker.id")
    assert "Traceback" not in said
    assert (tmp_path / "data" / "clean").exists()


def test_a_broker_out_of_service_stays_when_it_is_replaced_and_writes_no_state(
    start_broker: StartBroker, chroot: str
) -> None:
    running = start_broker()
    running.new_topic()
    host, replaced = running.broker.host, threading.Event()
    running.broker.on_replaced = replaced.set
    mine = host.metadata.brokers[0]
    host._directory.services.health.fail(errors.StorageFailed(directory="/data", reason="fdatasync"))
    waited_for(lambda: 0 not in host.metadata.brokers)
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        assert registry.register_broker(session, replace(mine, directory="another")) is None
        waited_for(lambda: running.broker.registration.taken is not None and not host.hosted)
        running.broker.watcher._thread.join(30)
        assert not replaced.is_set()
        assert session.get(paths.broker_epoch(0))[1].version == registry.live_brokers(session)[0].epoch


def test_the_process_ends_with_a_code_of_its_own_if_its_directory_failed(tmp_path: Path, chroot: str) -> None:
    (tmp_path / "data" / f"{'0' * 32}-0").mkdir(parents=True)  # a log, and nothing that says whose it is
    failed = Process(tmp_path, chroot)
    assert failed.announced()["error"] == errors.StorageFailed.code
    assert failed.end()[0] == os.EX_IOERR


def test_the_process_ends_with_a_code_of_its_own_if_its_disk_hangs(tmp_path: Path, chroot: str) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "meta")  # its opening returns when somebody writes
    hanging = Process(tmp_path, chroot, disk_stall_timeout_ms="500")
    code, said = hanging.end()
    assert code == os.EX_TEMPFAIL
    assert f"disk_stalled directory={tmp_path}/data call=open thread=MainThread seconds=0.5" in said


def test_a_broker_within_a_program_whose_disk_hangs_is_out_of_service_and_another_leads(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, failing = start_broker(0), start_broker(1, disk_stall_timeout_ms=1000)
    session = other.broker.host.metadata.session
    topic = b"t" * 16
    registry.create_topic(session, registry.TopicRecord("t", topic, {}, [(1, 0)], 0))
    waited_for(lambda: (found := other.record("t").states.get(0)) is not None and found.isr == (1, 0))
    goes_on, sync_dir = threading.Event(), Disk.sync_dir

    def hang(disk: Disk, path: Path) -> None:
        if "broker-1" in path.parts:
            assert goes_on.wait(60)
        sync_dir(disk, path)

    monkeypatch.setattr(Disk, "sync_dir", hang)
    try:
        registry.create_topic(session, registry.TopicRecord("u", b"u" * 16, {}, [(1, 0)], 0))
        waited_for(lambda: other.record("t").states[0].leader == 0)
        assert "call=sync_dir thread=zookeeper-watcher seconds=1.0" in caplog.text
        with pytest.raises(errors.StorageFailed, match=r"the disk hangs: sync_dir has not returned for 1 s"):
            failing.broker.host.leader_of(topic, 0)
        assert other.broker.host.failed is None
    finally:
        goes_on.set()


def test_a_broker_is_found_where_its_settings_say(start_broker: StartBroker) -> None:
    running = start_broker(advertised_host="broker.example", rack="a-1")
    [found] = running.stub.DescribeCluster(broker_pb2.DescribeClusterRequest(), timeout=30).brokers
    assert (found.host, found.rack) == ("broker.example", "a-1")
    assert (found.grpc_port, found.data_port) == (running.broker.grpc_port, running.broker.data_port)
    [found] = start_broker(1).stub.DescribeCluster(broker_pb2.DescribeClusterRequest(), timeout=30).brokers[1:]
    assert (found.host, found.rack) == ("127.0.0.1", "")


def test_settings_of_the_table_start_a_broker_without_a_file(tmp_path: Path, chroot: str) -> None:
    settings = {"log.dir": str(tmp_path), "zookeeper.connect": chroot, "grpc.port": 0, "data.port": 0}
    broker = Broker(BrokerSettings.parse(settings))
    broker.start()
    assert broker.grpc_port
    assert broker.data_port
    broker.stop()
    broker.stop()  # again: nothing happens


def test_a_start_waits_for_no_unlink_of_a_topic_that_was_deleted_meanwhile(
    start_broker: StartBroker, chroot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_broker()
    topic = running.new_topic()
    with running.client() as client:
        client.append(topic, a_batch())
    running.stop()
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        registry.delete_topic(session, "t")
    began, may_go_on = threading.Event(), threading.Event()

    class SlowUnlinks(Disk):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".log":
                began.set()
                assert may_go_on.wait(60)
            super().unlink(path)

    monkeypatch.setattr(directory, "Disk", SlowUnlinks)
    try:
        running = start_broker()
        assert began.wait(30)
        running.stub.DescribeCluster(broker_pb2.DescribeClusterRequest(), timeout=30)
    finally:
        may_go_on.set()
    waited_for(lambda: not list((tmp_path / "broker-0").glob("*.deleted")))
