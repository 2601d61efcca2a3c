"""`kafkalog doctor`: what it finds, and what it advises."""

from __future__ import annotations

import json
import os
import socket
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.cli import doctor
from kafkalog.client.config import ClientSettings
from kafkalog.errors import KafkalogError
from kafkalog.wire.broker_pb2 import BrokerStatus
from tests.full_disk import FULL_DISK
from tests.kafkalog.cli.command_line import Ran
from tests.kafkalog.replicated import Brokers
from tests.waiting import waited_for


def test_doctor_finds_all_well(topic: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, "doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(ran.out)}
    assert ran.code == 0, ran.err
    assert findings["java"]["state"] == findings["cluster"]["state"] == "ok"
    assert findings["broker 0 data port"]["state"] == findings["spark format in workers' python"]["state"] == "ok"
    table = Ran(capfdbinary, "doctor")
    assert table.code == 0 and "workers' python" in table.out


def test_doctor_says_that_a_broker_has_no_zookeeper_and_that_its_disk_is_full(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    with LocalCluster() as own, Admin(own.bootstrap_servers) as admin:

        def failed() -> dict[str, str]:
            ran = Ran(capfdbinary, "doctor", "--bootstrap", own.bootstrap_servers, "--json")
            found = {each["check"]: each["found"] for each in json.loads(ran.out) if each["state"] == "failed"}
            assert ran.code == bool(found)
            return found

        admin.create_topic("t")
        assert failed() == {}
        with Producer(own.bootstrap_servers, delivery_timeout_ms=2000) as producer, pytest.raises(KafkalogError):
            producer.send("t", b"x").result(60)
        waited_for(lambda: bool(admin.describe_broker(0).counters["disk.full"]))
        assert own.zookeeper is not None
        own.zookeeper.kill()
        waited_for(lambda: not admin.describe_broker(0).zookeeper_connected)
        assert failed() == {
            "broker 0 zookeeper": f"no connection to {own.zookeeper_connect}",
            "broker 0 data directory": "its disk was full less than a minute ago",
        }


def test_doctor_says_of_a_killed_broker_that_nothing_listens_there(
    brokers: Brokers, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_workers_python", list)
    monkeypatch.setattr(doctor, "check_java", list)
    with Admin(brokers.bootstrap_servers) as admin:
        registered = admin.describe_cluster()
        killed = registered.brokers[2]
        brokers.kill(2)
        waited_for(lambda: len(admin.describe_cluster().brokers) == 2)
    monkeypatch.setattr(Admin, "describe_cluster", lambda admin: registered)  # until a dead process' session ends
    found = findings_of(capfdbinary, brokers.bootstrap_servers)
    assert found == {
        "broker 2": {
            "check": "broker 2",
            "state": "failed",
            "found": f"nothing listens at {killed.host}:{killed.grpc_port} and :{killed.data_port}",
            "advice": "start broker 2; if it runs, see its log, and whether advertised.host is an address of its "
            "machine",
        }
    }
    with socket.create_server((killed.host, killed.data_port)):
        found = findings_of(capfdbinary, brokers.bootstrap_servers)
    assert "open the port" in found["broker 2 grpc port"]["advice"] and "broker 2 data port" not in found


def test_doctor_gives_an_advice_once_for_all_brokers_that_have_no_zookeeper(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_workers_python", list)
    monkeypatch.setattr(doctor, "check_java", list)

    def check_cluster(bootstrap: str, asked_for: bool) -> Iterator[doctor.Finding]:
        for broker_id in range(3):
            yield from doctor._status_findings(BrokerStatus(broker_id=broker_id), "127.0.0.1:1")

    monkeypatch.setattr(doctor, "check_cluster", check_cluster)
    ran = Ran(capfdbinary, "doctor")
    assert ran.out.count("no connection to 127.0.0.1:1") == 3
    assert ran.out.endswith(
        "\n\nbroker 0 zookeeper, broker 1 zookeeper, broker 2 zookeeper: look at ZooKeeper; until it is back, no "
        "leader is elected, no in-sync set changes, and topics, groups and exactly-once writes stand still\n"
    )


def findings_of(capture: pytest.CaptureFixture[bytes], bootstrap: str) -> dict[str, dict[str, str]]:
    """What doctor finds wrong with a cluster, by check; only that makes it fail."""
    ran = Ran(capture, "doctor", "--bootstrap", bootstrap, "--json")
    found = {each["check"]: each for each in json.loads(ran.out) if each["state"] == "failed"}
    assert ran.code == bool(found)
    return found


def test_doctor_says_that_a_data_directory_failed_and_that_a_broker_is_away(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    settings = {"log.retention.check.interval.ms": 50}
    with LocalCluster(2, data=tmp_path, settings=settings) as own, Admin(own.bootstrap_servers) as admin:
        admin.create_topic("t", partitions=2)
        broker = own.brokers[1]
        broker.data_directory.rename(tmp_path / "elsewhere")
        waited_for(lambda: [each.broker_id for each in admin.describe_cluster().brokers] == [0])
        found = findings_of(capfdbinary, own.bootstrap_servers)
        assert set(found) == {"broker 1", "broker 1 data directory"}
        assert found["broker 1"]["found"] == "not registered in the cluster; its 1 partition cannot be read or written"
        assert "the directory was removed, emptied or replaced" in found["broker 1 data directory"]["found"]
        assert "restart the broker" in found["broker 1 data directory"]["advice"]
        assert set(findings_of(capfdbinary, own.brokers[0].address)) == {"broker 1"}  # nobody says where it is


def test_doctor_says_that_a_broker_does_not_answer(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"connect_timeout_ms": 1000, "request_timeout_ms": 5000, "retry_timeout_ms": 1000}
    monkeypatch.setattr(doctor, "_STATUS_TIMEOUTS", short)
    with LocalCluster(2) as own:
        hung = psutil.Process(own.brokers[1].pid)
        hung.suspend()
        try:
            found = findings_of(capfdbinary, own.brokers[0].address)
        finally:
            hung.resume()
    assert "does not answer within" in found["broker 1"]["found"], found
    assert "hangs" in found["broker 1"]["advice"]


def test_doctor_prints_advice(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", "127.0.0.1:1")
    monkeypatch.setattr(ClientSettings.bootstrap_timeout_ms, "default", 300)
    ran = Ran(capfdbinary, "doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(ran.out)}
    assert ran.code == 1 and ran.err.startswith("kafkalog: 3 of ")
    assert findings["java"]["found"] == f"JAVA_HOME points to nothing usable: {tmp_path}/bin/java is no program"
    assert "set JAVA_HOME" in findings["java"]["advice"] and "install" not in findings["java"]["advice"]
    assert findings["workers' python"]["advice"] == f"export PYSPARK_PYTHON={sys.executable}"
    assert "kafkalog local" in findings["cluster"]["advice"] and "127.0.0.1:1" in findings["cluster"]["found"]


def set_java(monkeypatch: pytest.MonkeyPatch, home: Path, command: str) -> Path:
    """A program in the place of Java, which does what a shell's command does."""
    (home / "bin").mkdir()
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\n{command}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    return java


def test_doctor_sees_an_old_java_and_workers_without_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_java(monkeypatch, tmp_path, "echo 'java version \"1.8.0_292\"' >&2")
    [finding] = doctor.check_java()
    assert finding.state == "failed" and "is version 8" in finding.found
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    [only] = doctor.check_workers_python()  # that Spark sees no format in such a Python follows from it
    assert only.state == "failed" and "lacks pyarrow" in only.found


def test_doctor_says_of_a_java_that_hangs_that_it_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = set_java(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(doctor, "_ANSWER_SECONDS", 0.3)
    [finding] = doctor.check_java()
    assert finding.state == "failed" and f"{java} does not run" in finding.found


def test_doctor_tells_that_the_drivers_python_also_reads_and_writes_in_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    assert {finding.state for finding in doctor.check_workers_python()} == {"ok"}
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", str(other))
    findings = {finding.check: finding for finding in doctor.check_workers_python()}
    assert findings["planners' python"].state == "ok"
    assert findings["executors' python"].state == "warning"
    assert str(other) in findings["executors' python"].found
    assert "unset PYSPARK_DRIVER_PYTHON" in findings["executors' python"].advice


@pytest.mark.parametrize(
    "name, sentence", [("jupyter", "is not a Python: it does not run"), ("jupyter-that-is-not-there", "was not found")]
)
def test_doctor_gives_one_advice_for_a_driver_python_that_is_none(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jupyter = tmp_path / "jupyter"  # it takes its first argument for a command of its own
    jupyter.write_text("#!/bin/sh\necho 'usage: jupyter [subcommand]' >&2\nexit 1\n")
    jupyter.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", str(tmp_path / name))
    [finding] = [finding for finding in doctor.check_workers_python() if finding.state != "ok"]
    assert (finding.check, finding.state) == ("planners' python", "failed")
    assert name in finding.found and sentence in finding.found
    assert finding.advice == "unset PYSPARK_DRIVER_PYTHON"


@pytest.mark.parametrize(
    "text, major", [('openjdk version "17.0.15" 2025-04-15', 17), ('java version "1.8.0_292"', 8), ("no java", None)]
)
def test_java_versions_are_read(text: str, major: int | None) -> None:
    assert doctor.java_major(text) == major


def test_our_requirements_are_plain_and_versions_are_compared() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["name"] == doctor.DISTRIBUTION
    for requirement in project["dependencies"]:
        name, bounds = doctor.parse_requirement(requirement)
        assert len(bounds) == 2, f"{requirement} is not bounded on both sides"
        assert doctor.within(metadata.version(name), bounds), requirement
    assert doctor.parse_requirement("click<9,>=8.1") == ("click", ["<9", ">=8.1"])
    assert doctor.within("8.10.1", ["<9", ">=8.2"]) and not doctor.within("9.0", ["<9"])
    assert doctor.within("4.3.0.dev1", [">=4.3"]) and not doctor.within("4.2.9", [">=4.3"])
    assert doctor.within("8", [">=8.0", "<=8.0.0"]) and doctor.within("9.0", ["==9"])


def test_doctor_says_which_partitions_wait_for_replicas_and_which_nobody_may_lead(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    with LocalCluster(2) as own, Admin(own.bootstrap_servers) as admin:
        admin.create_topic("t", partitions=7, replication_factor=2, config={"min.insync.replicas": "2"})
        waited_for(lambda: all(len(each.isr) == 2 for each in admin.topics()[0].partitions))
        own.brokers[1].kill()
        waited_for(lambda: all(list(each.isr) == [0] for each in admin.topics()[0].partitions), 60)
        found = findings_of(capfdbinary, own.brokers[0].address)
    assert found["broker 1"]["found"] == "not registered in the cluster; other brokers lead its 7 partitions"
    assert found["in-sync replicas"]["found"] == (
        "fewer in-sync replicas than min.insync.replicas: 7 partitions (t-0, t-1, t-2, t-3, t-4, ...); "
        "producers with acks=all wait"
    )
    assert "leaders" not in found
    topic = SimpleNamespace(
        name="t",
        effective={"min.insync.replicas": "1"},
        partitions=[SimpleNamespace(partition=0, replicas=(0, 1), isr=(), is_offline=lambda live: True)],
    )
    [leaderless] = doctor._check_replicas([topic], {0})  # type: ignore[list-item]
    assert leaderless.found == "no live broker may lead 1 partition (t-0)"
    assert not list(doctor._check_replicas([topic], {2}))  # type: ignore[list-item]
