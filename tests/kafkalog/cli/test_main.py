"""The `kafkalog` command as a whole: help, usage, exit codes, and that a failure is one sentence."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading

import pytest

from broker.local import LocalCluster
from kafkalog import Admin
from kafkalog.cli import doctor, main, output
from kafkalog.client.config import ClientSettings
from tests.kafkalog.cli.command_line import KAFKALOG, Ran, feed
from tests.waiting import waited_for

COMMANDS: tuple[list[str], ...] = (
    [], ["local"], ["broker"], ["zookeeper"], ["cluster"],
    ["cluster", "describe"], ["topics"], ["topics", "create"], ["topics", "list"],
    ["topics", "describe"], ["topics", "alter"], ["topics", "recover"], ["topics", "delete"],
    ["produce"], ["consume"], ["offsets"], ["log"],
    ["log", "dump"], ["log", "verify"], ["doctor"], ["transactions"], ["transactions", "list"],
    ["transactions", "describe"], ["transactions", "abort"], ["transactions", "resolve"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, *command, "--help")
    assert ran.code == 0
    assert ran.out.startswith("Usage: kafkalog") and ran.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["topics", "create"],
        ["topics", "create", "t", "--partitions", "0"],
        ["topics", "create", "t", "--config", "retention.ms"],
        ["topics", "alter", "t"],
        ["consume", "t", "--format", "xml"],
        ["produce", "t", "--key-separator", ""],
        ["local", "--brokers", "0"],
        ["local", "--port", "65535", "--brokers", "2"],
        ["broker"],
        ["log", "verify", "/nonexistent"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: list[str], capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, *arguments)
    assert ran.code == 2
    assert "Error: " in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("arguments", [["topics", "list"], ["produce", "t"], ["consume", "t"]], ids=" ".join)
def test_an_unreachable_cluster_is_one_sentence_with_its_address(
    arguments: list[str], capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"a\n")
    monkeypatch.setattr(ClientSettings.bootstrap_timeout_ms, "default", 300)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it, and it refuses
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        ran = Ran(capfdbinary, *arguments, "--bootstrap", address)
    ran.fails_with(f"no broker reachable at {address}: connection refused; start a cluster (`kafkalog local`), or give")


def test_a_wrong_address_is_one_sentence(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    Ran(capfdbinary, "topics", "list", "--bootstrap", "nowhere").fails_with("nowhere")


def test_a_defect_is_one_sentence_and_its_traceback_is_kept_for_who_asks(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "check_packages", broken)
    monkeypatch.delenv("KAFKALOG_DEBUG", raising=False)
    Ran(capfdbinary, "doctor").fails_with("a defect of kafkalog: RuntimeError: two lines")
    monkeypatch.setenv("KAFKALOG_DEBUG", "1")
    assert "Traceback" in Ran(capfdbinary, "doctor").err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bootstrap", "{}", "topics", "list"],
        ["topics", "--bootstrap", "{}", "list"],
        ["topics", "list", "--bootstrap", "{}"],
        ["--bootstrap", "127.0.0.1:1", "topics", "--bootstrap", "127.0.0.1:1", "list", "--bootstrap", "{}"],
    ],
    ids=["first", "between", "last", "the last counts"],
)
def test_bootstrap_and_json_may_stand_before_the_command(
    cluster: LocalCluster, topic: str, arguments: list[str], capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", "127.0.0.1:1")
    arguments = [text.format(cluster.bootstrap_servers) for text in arguments]
    assert topic in Ran(capfdbinary, *arguments).out.split()
    assert topic in [each["topic"] for each in json.loads(Ran(capfdbinary, "--json", *arguments).out)]
    ran = Ran(capfdbinary, "--json", "topics", "delete", topic)
    assert (ran.code, ran.out) == (2, "")
    assert "`kafkalog topics delete` has no --json: leave it out" in ran.err


@pytest.mark.parametrize(
    "arguments, command",
    [(["--bootstrap", "b:1", "local"], "local"), (["log", "dump", "--bootstrap=b:1", "data"], "log dump")],
)
def test_bootstrap_is_refused_by_commands_that_ask_no_broker(
    arguments: list[str], command: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ran = Ran(capfdbinary, *arguments)
    assert ran.code == 2
    assert f"`kafkalog {command}` has no --bootstrap: leave it out, or see `kafkalog {command} --help`" in ran.err


def test_local_says_which_ports_it_would_use(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, "local", "--port", "65535")
    assert ran.code == 2
    assert "1 broker would use the ports 65535 to 65536, and the highest is 65535" in ran.err


def test_a_terminal_shows_what_is_waited_for() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        reading, writing = pty.openpty()
        with os.fdopen(reading, "rb", buffering=0) as terminal:
            command = [*KAFKALOG, "topics", "list", "--bootstrap", address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing) as process:
                os.close(writing)
                assert terminal.readline() == f"waiting for a broker at {address} ...\r\n".encode()
                assert process.poll() is None  # it goes on trying
                process.send_signal(signal.SIGINT)


def test_nobody_is_told_of_waiting_for_a_broker_that_has_answered(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_WAIT_TOLD_SECONDS", 3600.0)
    with output.admin_of(cluster.bootstrap_servers):
        waited_for(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_a_list_without_entries_is_a_sentence_and_an_empty_array(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with LocalCluster() as empty:
        where = ["--bootstrap", empty.bootstrap_servers]
        for arguments, sentence in (
            (["topics", "list"], "there are no topics"),
            (["topics", "describe"], "there are no topics"),
            (["groups", "list"], "there are no groups"),
            (["transactions", "list"], "there are no transactions"),
        ):
            ran = Ran(capfdbinary, *arguments, *where)
            assert (ran.code, ran.out, ran.err) == (0, "", f"{sentence}\n")
            ran = Ran(capfdbinary, *arguments, *where, "--json")
            assert (ran.code, json.loads(ran.out), ran.err) == (0, [], "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">/dev/full"])
def test_closed_and_full_standard_streams_are_no_defect(cluster: LocalCluster, topic: str, closed: str) -> None:
    command = "produce" if closed == "<&-" else "topics describe"
    line = f"{' '.join(KAFKALOG)} {command} {topic} --bootstrap {cluster.bootstrap_servers} {closed}"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert ran.returncode == (1 if closed == ">/dev/full" else 0), ran.stderr
    said = ("", f"sent 0 records to {topic}\n", "kafkalog: [Errno 28] No space left on device\n")
    assert ran.stderr in said


def test_an_error_of_a_file_names_it_and_loses_no_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/f")

    monkeypatch.setattr(main.kafkalog, "main", full)
    stdout = sys.stdout
    assert main.run([]) == 1
    assert sys.stdout is stdout
    assert capsys.readouterr().err == "kafkalog: /data/f: No space left on device\n"


def test_a_no_to_a_question_is_no_interrupt(topic: str, cluster: LocalCluster) -> None:
    command = [*KAFKALOG, "topics", "delete", topic]
    reading, writing = pty.openpty()
    with open(reading, "rb+", buffering=0) as terminal:
        terminal.write(b"n\n")
        ran = subprocess.run(command, stdin=writing, capture_output=True, text=True, timeout=60)
        os.close(writing)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("kafkalog: nothing was done\n")
    with Admin(cluster.bootstrap_servers) as admin:
        assert topic in [each.name for each in admin.topics()]


@pytest.mark.parametrize("command", [["topics", "describe"], ["consume"], ["produce"], ["offsets"]], ids=" ".join)
def test_a_misspelt_topic_is_reported_with_the_one_that_may_be_meant(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    feed(monkeypatch, b"")
    ran = Ran(capfdbinary, *command, f"{topic[:-1]}")
    ran.fails_with(f"there is no topic '{topic[:-1]}'; did you mean '{topic}'?")


@pytest.mark.parametrize(
    "command",
    [
        ["produce", "\udcff"],
        ["produce", "t", "-H", "\udcff=v"],
        ["produce", "t", "--null", "\udcff"],
        ["consume", "t", "--group", "\udcff"],
        ["topics", "create", "t", "--config", "name=\udcff"],
    ],
    ids=lambda command: " ".join(command[:3:2]),
)
def test_an_argument_that_is_not_utf_8_is_wrong_usage(
    capfdbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    ran = Ran(capfdbinary, *command)
    assert ran.code == 2 and "'\\udcff' is not UTF-8" in ran.err, ran.err
