"""`kafkalog log`: what it says of the files of a broker that has stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from tests.kafkalog.cli.command_line import Ran


def test_log_dump_and_verify_read_a_stopped_brokers_files(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with LocalCluster(data=tmp_path) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic("seen", partitions=1)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(3):
                producer.send("seen", b"value %d" % number, key=b"key").result(30)
    [segment] = [path for path in tmp_path.rglob("*.log") if re.fullmatch(r"\d{20}\.log", path.name)]
    for path in (segment, segment.parent):
        ran = Ran(capfdbinary, "log", "verify", str(path))
        assert ran.code == 0, ran.err
        assert "3 records" in ran.out
        assert "value 2" in Ran(capfdbinary, "log", "dump", str(path), "--records").out
    lines = Ran(capfdbinary, "log", "dump", str(segment), "--records", "--json").out.splitlines()
    last = json.loads(lines[-1])
    assert (last["kind"], last["offset"], last["key"], last["value"]) == ("record", 2, "key", "value 2")
    damaged = bytearray(segment.read_bytes())
    damaged[100] ^= 1
    segment.write_bytes(damaged)
    ran = Ran(capfdbinary, "log", "verify", str(segment))
    ran.fails_with(": 1 problem, the first: ")
    assert "damaged: offsets 0 to 0" in ran.out


def is_dir_once(is_dir: Callable[[Path], bool], vanishing: Path) -> Callable[[Path], bool]:
    """`is_dir`, but that one directory goes as soon as it was asked for."""

    def asked(path: Path) -> bool:
        was = is_dir(path)
        if was and path == vanishing:
            path.rmdir()
        return was

    return asked


def test_log_commands_take_what_local_was_given_and_name_topics(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=2, data=tmp_path) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            assert Ran(capfdbinary, "log", "verify", str(tmp_path)).out == (
                "0 logs: 0 segments, 0 batches, 0 records, 0 bytes\n"
            )
            admin.create_topic("flights", partitions=2)
            admin.create_topic("planes-2", partitions=1)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(3):
                producer.send("flights", b"value %d" % number, partition=1).result(30)
            producer.send("planes-2", b"p").result(30)
    told = Ran(capfdbinary, "log", "verify", str(tmp_path))
    assert (told.code, told.err) == (0, "")
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["flights-0", "flights-1", "planes-2-0"]
    assert lines[3].startswith("3 logs: 3 segments, ") and ", 4 records, " in lines[3]
    [log] = json.loads(Ran(capfdbinary, "log", "verify", str(tmp_path), "--topic", "flights:1", "--json").out)["logs"]
    assert (log["partition"], log["records"]) == ("flights-1", 3)
    assert Path(log["folder"]).parent.parent == tmp_path
    directory = str(Path(log["folder"]).parent)
    for path in (str(tmp_path), directory, log["folder"]):
        dumped = Ran(capfdbinary, "log", "dump", path, "--topic", "flights:1", "--records").out
        assert dumped.startswith(f"flights-1 {log['folder']}/") and "value 2" in dumped and "planes" not in dumped
    assert "planes-2-0" in Ran(capfdbinary, "--json", "log", "dump", str(tmp_path), "--topic", "planes-2").out
    vanished = tmp_path / "vanished"
    vanished.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", is_dir_once(Path.is_dir, vanished))
        assert Ran(capfdbinary, "log", "verify", str(tmp_path)).out == told.out
    assert not vanished.exists()
    Ran(capfdbinary, "log", "verify", str(tmp_path), "--topic", "flight").fails_with("did you mean 'flights'?")
    Ran(capfdbinary, "log", "dump", str(tmp_path), "--topic", "flights:7").fails_with("has no partition 7 in")
