"""The embedded ZooKeeper as a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker.local import zookeeper
from broker.local.zookeeper import EmbeddedZooKeeper, find_java
from kafkalog.errors import AddressInUse, DataDirInUse, MissingDependency, ZooKeeperUnreachable
from kafkalog.zk.session import ZooKeeperSession

_OUT_OF_MEMORY = 3
"""The exit code of a Java that ends for want of memory."""

pytestmark = pytest.mark.timeout(180)


def _fill(session: ZooKeeperSession) -> None:
    for number in range(100):
        session.create(f"/{number}", b"x" * 900_000)


def test_a_server_that_has_no_memory_left_ends_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple("-Xmx16m" if option.startswith("-Xmx") else option for option in zookeeper._JAVA_OPTIONS)
    monkeypatch.setattr(zookeeper, "_JAVA_OPTIONS", small)
    server = EmbeddedZooKeeper(tmp_path, durable=False)
    server.start()
    try:
        server.wait_ready(threading.Event().wait)
        process = server._process
        assert process is not None
        session = ZooKeeperSession(server.connect)
        session.start()
        try:
            with pytest.raises(ZooKeeperUnreachable):
                _fill(session)
        finally:
            session.close()
        assert process.wait(60) == server.ended() == _OUT_OF_MEMORY
        assert "OutOfMemoryError" in str(server.unreachable("it ended"))
    finally:
        server.stop()


def _program(folder: Path) -> str:
    folder.mkdir(parents=True)
    program = folder / "java"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_java_is_java_homes_or_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path, at_home = _program(tmp_path / "path"), _program(tmp_path / "home" / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert find_java() == on_path
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == at_home
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "elsewhere"))
    assert find_java() == on_path
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"looked in .*elsewhere/bin and PATH"):
        find_java()
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(MissingDependency, match="looked in PATH, and JAVA_HOME is not set"):
        find_java()


def test_a_server_starts_without_a_fork_that_grpc_takes_part_in(tmp_path: Path) -> None:
    forked: list[bool] = []
    os.register_at_fork(before=lambda: forked.append(True))  # for good, and harmless after this test
    server = EmbeddedZooKeeper(tmp_path)
    server.start()
    server.kill()
    assert not forked


def test_what_starts_with_a_parent_that_has_ended_does_not_start() -> None:
    command = zookeeper.with_parent(["/bin/echo", "started"])
    assert subprocess.run(command, capture_output=True, text=True).stdout == "started\n"
    grandparent = f"import subprocess; subprocess.run({command!r})"
    assert subprocess.run([sys.executable, "-c", grandparent], capture_output=True, text=True).stdout == ""


def test_a_folder_is_one_servers_until_that_is_killed_or_stopped(tmp_path: Path) -> None:
    first, second = EmbeddedZooKeeper(tmp_path), EmbeddedZooKeeper(tmp_path)
    try:
        first.start()
        with pytest.raises(DataDirInUse):
            second.start()
        first.kill()
        assert first.pid is None
        second.start()
        second.wait_ready(threading.Event().wait)
        assert second.ended() is None
        second.stop()
        assert not second.serves()
        first.start()
    finally:
        first.kill()
        second.kill()


def test_a_start_that_failed_leaves_the_folder_to_others_once_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no process")

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressInUse, match="ZooKeeper's port"):
        EmbeddedZooKeeper(tmp_path, port=taken.getsockname()[1]).start()
    failed = EmbeddedZooKeeper(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("broker.local.zookeeper.subprocess.Popen", fails)
        with pytest.raises(OSError, match="no process"):
            failed.start()
    failed.stop()
    failed.stop()
    other = EmbeddedZooKeeper(tmp_path)
    other.start()
    other.kill()


def test_why_a_server_is_away_is_the_last_line_of_its_log_and_no_frame_of_a_stack(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path)
    away = server.unreachable("it ended")
    assert isinstance(away, ZooKeeperUnreachable)
    assert str(away).endswith(f"it ended; its log {server.log_file} is empty")
    server.log_file.write_text("first\nit is broken\n\tat Some.frame\n\n")
    assert str(server.unreachable("it ended")).endswith("ends: it is broken")
