"""A broker as a whole: what keeps it from starting, what its stop keeps, what it leaves behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker.config import BROKER_SETTINGS
from broker.server import Broker, read_config
from broker.zookeeper import EmbeddedZooKeeper
from kafkalog import errors
from tests.broker.conftest import StartBroker
from tests.broker.data_port_client import DataPortClient, a_batch


@pytest.mark.parametrize("setting", ["grpc.port", "data.port"])
def test_a_port_in_use_is_named_with_its_setting(start_broker: StartBroker, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.AddressInUse, match=rf"127\.0\.0\.1:{port} is in use .*{setting}"):
            start_broker(**{setting: port})


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
    with pytest.raises(errors.ClusterMismatch):
        start_broker(0, zookeeper_connect=f"{chroot}-other")
    with pytest.raises(errors.ClusterMismatch):
        start_broker(1, log_dir=str(tmp_path / "broker-0"))


def test_a_broker_id_that_a_live_broker_has_is_refused(start_broker: StartBroker, tmp_path: Path) -> None:
    start_broker(0)
    with pytest.raises(errors.InvalidSetting, match=r"broker\.id=0 is not valid: the broker at 127\.0\.0\.1:\d+ has"):
        start_broker(0, log_dir=str(tmp_path / "elsewhere"), zookeeper_session_timeout_ms=1000)


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
    assert start_broker().broker.catalog.topic("t").states[0].leader_epoch == 0


def test_start_and_stop_leave_no_thread_and_no_descriptor(start_broker: StartBroker) -> None:
    def cycle() -> None:
        broker = start_broker()
        topic = broker.new_topic() if not broker.broker.catalog.topics else broker.broker.catalog.topic("t").topic_id
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
    with pytest.raises(errors.ClusterMismatch):
        start_broker(1, log_dir=str(tmp_path / "broker-0"))
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    start_broker(0)


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


class Process:
    """`python -m broker` over a configuration."""

    def __init__(self, folder: Path, connect: str, *arguments: str, **settings: str) -> None:
        self.config = folder / "broker.properties"
        given = {"log.dir": folder / "data", "zookeeper.connect": connect, "grpc.port": 0, "data.port": 0}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        self.config.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "broker", "--config", str(self.config), "--announce", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def announced(self) -> dict[str, int]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

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


def test_settings_of_the_table_start_a_broker_without_a_file(tmp_path: Path, chroot: str) -> None:
    settings = {"log.dir": str(tmp_path), "zookeeper.connect": chroot, "grpc.port": 0, "data.port": 0}
    broker = Broker(BROKER_SETTINGS.parse(settings))
    broker.start()
    assert broker.grpc_port
    assert broker.data_port
    broker.stop()
    broker.stop()  # again: nothing happens
