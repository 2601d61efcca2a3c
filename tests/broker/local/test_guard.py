"""The guard's broker processes: those that say nothing, refuse to start or do not stop. The guard as a whole is in
`test_cluster.py`."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from broker.local import guard
from broker.local.guard import BrokerChild, LineReader, Watch
from kafkalog.errors import BrokerUnreachable, InvalidSetting
from tests.waiting import suspend


class Patient(Watch):
    """A watch that nothing ends: the real one takes this process's signals."""

    def __init__(self) -> None:
        """Nothing to watch."""

    def wait_readable(self, fd: int, seconds: float | None) -> bool:
        return bool(select.select([fd], [], [], seconds)[0])


def launched(folder: Path, **settings: object) -> BrokerChild:
    """A broker's process, before it is let go."""
    given: dict[str, object] = {"broker.id": 3, "log.dir": str(folder / "data"), "grpc.port": 0, "data.port": 0}
    given |= {name.replace("_", "."): value for name, value in settings.items()}
    child = BrokerChild(given, folder, (), Patient())
    child.launch()
    return child


def pid_of(child: BrokerChild) -> int:
    assert child._process is not None
    return child._process.pid


def is_gone(pid: int) -> bool:
    """Whether there is no such process, not even one that nobody has asked how it ended."""
    return not Path(f"/proc/{pid}").exists()


def test_a_broker_that_says_nothing_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_START_SECONDS", 0.05)
    child = launched(tmp_path)
    pid = pid_of(child)
    with pytest.raises(BrokerUnreachable, match="broker 3: it did not serve in time; its log ends: nothing"):
        child.await_ready()
    assert is_gone(pid)


def test_a_broker_that_ends_before_it_serves_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = launched(tmp_path)
    pid = pid_of(child)
    child.log_file.write_text("a line\nthe last line\n")
    os.kill(pid, signal.SIGKILL)
    assert child._process is not None and child._process.wait(30) == -signal.SIGKILL
    child.let_go()  # nobody is there to be
    with pytest.raises(BrokerUnreachable, match="broker 3: it ended with code -9; its log ends: the last line"):
        child.await_ready()
    assert is_gone(pid)


def test_a_broker_that_refuses_to_start_is_gone_when_its_reason_is_reported(tmp_path: Path) -> None:
    child = launched(tmp_path, grpc_port=1234, data_port=1234, zookeeper_connect="127.0.0.1:1")
    pid = pid_of(child)
    child.let_go()
    with pytest.raises(InvalidSetting, match=r"data\.port"):
        child.await_ready()
    assert is_gone(pid)
    assert child.look() == {"broker_id": 3, "ended": None, "events": []}
    child.launch()  # again: it does not run already
    child.kill()


def test_a_broker_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_STOP_SECONDS", 0.05)
    child = launched(tmp_path)
    pid = pid_of(child)
    suspend(pid)
    assert child.finish_stop() == -signal.SIGKILL
    assert is_gone(pid)
    assert child.finish_stop() is None


def test_a_suspended_broker_is_woken_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_STOP_SECONDS", 5.0)
    child = launched(tmp_path)
    suspend(pid_of(child))
    child.begin_stop()
    assert child.finish_stop() == -signal.SIGTERM, "it has not begun to serve: the signal ends it"


def test_lines_come_whole_and_one_after_the_other() -> None:
    reading, writing = os.pipe()
    lines = LineReader(reading, Patient())
    os.write(writing, b"one\ntw")
    assert lines.next_line(0.0) == "one"
    assert lines.next_line(0.0) is None
    os.write(writing, b"o\nthree\nrest")
    os.close(writing)
    assert [lines.next_line(0.0) for _ in range(3)] == ["two", "three", ""]
    os.close(reading)


def test_what_a_broker_logs_before_it_serves_is_kept_until_somebody_looks(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = BrokerChild({"broker.id": 3}, tmp_path, (), Patient())
    child._lines = LineReader(reading, Patient())
    os.write(writing, b'{"event": "one", "level": "warning"}\n{"pid": 5}\n{"event": "two", "level": "error"}\n')
    assert child._next_announced(0.0) == '{"pid": 5}'
    told = child.look()
    assert [event["event"] for event in told["events"]] == ["one", "two"]
    assert child.look()["events"] == []
    for fd in (reading, writing):
        os.close(fd)
