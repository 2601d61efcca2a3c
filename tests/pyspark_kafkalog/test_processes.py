"""Processes by names of their own, over this machine's: what is known to have ended, and what is not known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspark_kafkalog import processes
from pyspark_kafkalog.processes import has_ended, own_name
from tests.waiting import waited_for

# A name with brackets and spaces, as a program may give itself, is in the second field of its stat.
WAITS = "open('/proc/self/comm', 'w').write('a) Z 1 (b'); import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=pipe, stdout=pipe) as started:
        assert started.stdout is not None and started.stdout.readline()
        yield started
        started.kill()


def name_of(number: int) -> str:
    namespace = own_name().split(" ")[0]
    return f"{namespace} {number} {processes._state_and_start(number)[1]}"


def test_this_process_has_a_name_that_stays_and_has_not_ended() -> None:
    assert own_name() == own_name() == name_of(os.getpid())
    assert not has_ended(own_name())


def test_a_name_is_of_one_process_of_one_start_in_one_container_and_boot() -> None:
    namespace, number, start = own_name().split(" ")
    assert has_ended(f"{namespace} {number} {int(start) + 1}"), "the number was given again"
    assert has_ended(f"{namespace} {number} {int(start) - 1}")
    assert not has_ended(f"elsewhere {number} {int(start) + 1}"), "nobody here knows"
    boot, _, container = namespace.partition(".")
    for other in (f"{boot}.{int(container) + 1}", f"another.{container}"):
        assert not has_ended(f"{other} {number} {int(start) + 1}")


def test_the_start_is_of_the_process_and_not_of_what_it_is_called(child: subprocess.Popen[bytes]) -> None:
    """In clock ticks since the boot; a child began after this process."""
    [state, start] = processes._state_and_start(child.pid)
    assert state in "SRD"
    assert processes._state_and_start(os.getpid())[1].isdecimal()
    assert int(start) > int(processes._state_and_start(os.getpid())[1])
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 <= uptime_seconds - int(start) / os.sysconf("SC_CLK_TCK") < 120


def test_a_process_has_ended_once_it_is_killed_though_nobody_has_asked_for_its_end(
    child: subprocess.Popen[bytes],
) -> None:
    name = name_of(child.pid)
    assert not has_ended(name)
    child.kill()
    waited_for(lambda: has_ended(name))  # a zombie
    child.wait()
    assert has_ended(name)


def test_what_is_no_name_is_not_known_to_have_ended() -> None:
    namespace = own_name().split(" ")[0]
    for unknown in ("", "x", namespace, f"{namespace} ", f"{namespace} x", f"{namespace} -1 7", f"{namespace} ../1 7"):
        assert not has_ended(unknown)


def test_where_there_is_no_proc_there_is_no_name_and_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    namespace, number, start = own_name().split(" ")
    gone = f"{namespace} {number} {int(start) + 1}"
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert own_name() == ""
    assert not has_ended(gone)


def test_a_process_that_may_not_be_looked_at_is_not_known_to_have_ended(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    def refused(number: int) -> tuple[str, str]:
        raise PermissionError

    name = name_of(child.pid)
    child.kill()
    child.wait()
    monkeypatch.setattr(processes, "_state_and_start", refused)
    assert not has_ended(name)
