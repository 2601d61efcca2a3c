"""`kafkalog local`, `broker` and `zookeeper`, as processes of their own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from kafkalog import Admin, Producer
from tests.free_ports import free_ports
from tests.full_disk import FULL_DISK
from tests.kafkalog.cli.command_line import KAFKALOG, running
from tests.waiting import waited_for

pytestmark = pytest.mark.java


def pid_of(process: subprocess.Popen[str], what: str) -> int:
    """Of the broker or ZooKeeper of a `kafkalog local`: the one with that in its command line."""
    [found] = [
        child.pid
        for child in psutil.Process(process.pid).children(recursive=True)
        if any(what in word for word in child.cmdline())
    ]
    return found


def test_local_serves_keeps_its_data_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    port = free_ports(4)
    addresses, ports = f"127.0.0.1:{port},127.0.0.1:{port + 2}", {port, port + 2}
    command = ["local", "--brokers", "2", "--port", str(port), "--data", str(tmp_path / "kept"),
               "--config", "num.partitions=2"]  # fmt: skip
    for turn in range(2):
        with running(*command) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == f"bootstrap servers: {addresses}\n"
            with Admin(addresses) as admin:
                waited_for(lambda: {broker.grpc_port for broker in admin.describe_cluster().brokers} == ports)
                if turn == 0:
                    admin.create_topic("kept")
                assert [each.name for each in admin.topics()] == ["kept"]
            with Producer(addresses) as producer:
                assert producer.send("kept", b"x", partition=1).result(30).offset == turn
            if turn == 0:
                for again, what in (
                    (command, f"data directory {tmp_path / 'kept'} is in use"),
                    (["local", "--port", str(port)], f"127.0.0.1:{port} is in use"),
                ):
                    taken = subprocess.run([*KAFKALOG, *again], capture_output=True, text=True, timeout=60)
                    assert (taken.returncode, taken.stdout) == (1, "")
                    assert taken.stderr.startswith(f"kafkalog: {what}") and taken.stderr.count("\n") == 1, taken.stderr
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert "Traceback" not in process.stderr.read()


def test_local_starts_what_was_killed_again_and_keeps_the_others(tmp_path: Path) -> None:
    port = free_ports(4)
    with running("local", "--brokers", "2", "--port", str(port), "--data", str(tmp_path)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("bootstrap servers: ")
        for name, what, log_file in (
            ("broker 1", "broker-1.properties", "broker-1.log"),
            ("ZooKeeper", "ZooKeeperServerMain", "zookeeper/zookeeper.log"),
        ):
            first = pid_of(process, what)
            os.kill(first, signal.SIGKILL)
            said = process.stderr.readline()
            while "was ended by" not in said:  # what broker 0 says of ZooKeeper's end may come first
                assert said.startswith("broker "), said
                said = process.stderr.readline()
            expected = f"{name} was ended by signal 9 (SIGKILL); its log is {tmp_path}/{log_file}; it is started again"
            assert said.startswith(expected), said
            with Admin(f"127.0.0.1:{port}") as admin:
                assert admin.describe_cluster().brokers  # of the other
            while said != f"{name} serves again\n":
                said = process.stderr.readline()
                assert said, "it has ended"
            assert pid_of(process, what) != first
        with Admin(f"127.0.0.1:{port}") as admin:
            waited_for(lambda: len(admin.describe_cluster().brokers) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_local_without_restarts_continues_until_its_last_broker_ends(tmp_path: Path) -> None:
    port = free_ports(4)
    command = ["local", "--brokers", "2", "--port", str(port), "--data", str(tmp_path), "--no-restart"]
    with running(*command) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("bootstrap servers: ")
        os.kill(pid_of(process, "broker-1.properties"), signal.SIGKILL)
        ended = "was ended by signal 9 (SIGKILL); its log is"
        assert f"broker 1 {ended} {tmp_path}/broker-1.log; it is not started again\n" == process.stderr.readline()
        with Admin(f"127.0.0.1:{port}") as admin:
            assert admin.describe_cluster().brokers
        os.kill(pid_of(process, "broker-0.properties"), signal.SIGKILL)
        assert process.wait(60) == 1
        said = process.stderr.read().splitlines()
        assert f"broker 0 {ended} {tmp_path}/broker-0.log; it is not started again" in said
        assert "every broker has ended" in said[-1]


def test_local_says_that_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The brokers' log files are on the full disk too, so it is not from there that it is known."""
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broker-0.log").symlink_to("/dev/full")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    port = free_ports(2)
    with running("local", "--port", str(port), "--data", str(tmp_path / "data")) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("bootstrap servers: ")
        with Admin(f"127.0.0.1:{port}") as admin:
            admin.create_topic("full", partitions=1)
        produce = [*KAFKALOG, "produce", "full", "--bootstrap", f"127.0.0.1:{port}"]
        with subprocess.Popen(produce, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as producer:
            assert producer.stdin is not None
            producer.stdin.write("x\n")
            producer.stdin.close()
            said = process.stderr.readline()
            producer.kill()
        assert said.startswith("broker 0: warning: disk_full ") and "partition=full-0" in said, said
        assert f"no space left on the disk of {tmp_path}/data/broker-0" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_zookeeper_and_a_broker_of_its_own_run_and_stop(tmp_path: Path) -> None:
    port = free_ports(3)
    config = tmp_path / "broker.properties"
    config.write_text(
        f"# one broker\nbroker.id=7\nzookeeper.connect=127.0.0.1:{port + 2}\nlog.dir={tmp_path / 'log'}\n"
        f"grpc.port={port}\ndata.port={port + 1}\n"
    )
    with running("zookeeper", "--port", str(port + 2)) as zookeeper:
        assert zookeeper.stdout is not None
        assert zookeeper.stdout.readline() == f"ZooKeeper: 127.0.0.1:{port + 2}\n"
        with running("broker", "--config", str(config)) as server:
            with Admin(f"127.0.0.1:{port}", bootstrap_timeout_ms=60_000) as admin:
                while not (brokers := admin.describe_cluster().brokers):  # it answers before it is registered
                    assert server.poll() is None
                assert [broker.broker_id for broker in brokers] == [7]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        (tmp_path / "log" / "meta").unlink()
        (tmp_path / "log" / f"{'0' * 32}-0").mkdir()  # a log, and nothing that says whose it is
        with running("broker", "--config", str(config)) as server:
            assert server.wait(60) == os.EX_IOERR
            assert server.stderr is not None
            assert server.stderr.read().splitlines()[-1].startswith("kafkalog: log directory ")
        zookeeper.send_signal(signal.SIGINT)
        assert zookeeper.wait(60) == 0


def test_a_zookeeper_that_ends_ends_its_command() -> None:
    with running("zookeeper", "--port", str(free_ports(1))) as zookeeper:
        assert zookeeper.stdout is not None and zookeeper.stderr is not None
        assert zookeeper.stdout.readline().startswith("ZooKeeper: ")
        os.kill(pid_of(zookeeper, "ZooKeeperServerMain"), signal.SIGKILL)
        assert zookeeper.wait(60) == 1
        said = zookeeper.stderr.read()
        assert re.fullmatch(r"kafkalog: ZooKeeper at \S+ is not reachable: it ended; see \S+\n", said), said


def test_zookeeper_keeps_its_data_in_a_relative_folder_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running("zookeeper", "--port", str(free_ports(1)), "--data", "kept") as zookeeper:
        assert zookeeper.stdout is not None
        assert zookeeper.stdout.readline().startswith("ZooKeeper: ")
        second = [*KAFKALOG, "zookeeper", "--port", str(free_ports(1)), "--data", "kept"]
        ran = subprocess.run(second, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 1
        assert (
            ran.stderr == f"kafkalog: data directory {tmp_path}/kept is in use by another process ({zookeeper.pid})\n"
        )


@pytest.mark.parametrize("data", ["file/sub", "/proc/kafkalog"])
def test_local_in_a_folder_that_can_not_be_is_one_sentence(tmp_path: Path, data: str) -> None:
    (tmp_path / "file").touch()
    command = [*KAFKALOG, "local", "--port", str(free_ports(2)), "--data", str(tmp_path / data)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.startswith("kafkalog: ") and ran.stderr.count("\n") == 1, ran.stderr
    assert str(tmp_path / data) in ran.stderr


@pytest.mark.parametrize(("command", "after"), [("local", 0), ("local", 1), ("zookeeper", 0)])
def test_a_port_that_is_taken_is_named_with_its_option_and_another_port(command: str, after: int) -> None:
    port = free_ports(2)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", port + after))
        occupied.listen()
        with running(command, "--port", str(port)) as process:
            _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    sentence, advice = told.removeprefix("kafkalog: ").split("; ")
    assert sentence == f"127.0.0.1:{port + after} is in use by another process (setting --port)"
    assert advice == f"to use other ports, give for instance `--port {port + (100 if port <= 65335 else -100)}`\n"


def test_a_killed_zookeeper_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("zookeeper", "--port", str(free_ports(1))) as zookeeper:
        assert zookeeper.stdout is not None
        assert zookeeper.stdout.readline()
        assert list(tmp_path.glob("kafkalog-zookeeper-*"))
        zookeeper.kill()
        zookeeper.wait(60)
        waited_for(lambda: not list(tmp_path.glob("kafkalog-zookeeper-*")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"grpc.prot=1\n", "did you mean 'grpc.port'?"),
        (b"listeners=PLAINTEXT://:9092\n", "no broker setting 'listeners': give host, advertised.host, grpc.port and"),
        (
            b"zookeeper.connect=127.0.0.1:1\nzookeeper.connection.timeout.ms=300\ngrpc.port=0\ndata.port=0\n",
            "within 0.3 s: connection refused; start ZooKeeper, or correct zookeeper.connect\n",
        ),
        (b"\xff\xfe\x00", "broker.properties' is not valid: it is not a text file"),
        (b"zookeeper.connect=127.0.0.1:1\nhost=203.0.113.1\n", "host='203.0.113.1' is not valid: it is not an address"),
        (
            b"flush.messages=1\n",
            "no broker setting 'flush.messages': it is a setting of topics: kafkalog topics create TOPIC --config",
        ),
        (b"zookeeper.connect=127.0.0.1:1\ngrpc.port=19999\ndata.port=19999\n", "data.port=19999 is not valid"),
    ],
    ids=["name", "Kafka's", "no ZooKeeper", "binary", "host", "topic's", "ports"],
)
def test_a_broker_with_a_wrong_config_is_one_sentence(tmp_path: Path, text: bytes, told: str) -> None:
    config = tmp_path / "broker.properties"
    config.write_bytes(text + f"log.dir={tmp_path}\n".encode())
    ran = subprocess.run([*KAFKALOG, "broker", "--config", str(config)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert told in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
