"""`kafkalog topics reassign`: what it prints, what it refuses, and that Ctrl-C ends the wait and not the move."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import click
import pytest

from kafkalog import Admin, Producer
from kafkalog.cli.command import rate
from kafkalog.cli.reassign import _bar, _numbers, _wait
from kafkalog.client.reassignments import ReassignmentProgress
from kafkalog.records import TopicPartition
from tests.kafkalog.cli.command_line import Ran, running
from tests.kafkalog.replicated import Brokers
from tests.waiting import waited_for


@pytest.fixture
def bootstrap(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", brokers.bootstrap_servers)
    with Admin(brokers.bootstrap_servers) as admin, Producer(brokers.bootstrap_servers, batch_records=1) as producer:
        admin.create_topic("t", 2, 1)
        for number in range(16):
            producer.send("t", bytes(60_000), partition=number % 2)
    return brokers.bootstrap_servers


def reassign(capture: pytest.CaptureFixture[bytes], *arguments: str) -> Ran:
    return Ran(capture, "topics", "reassign", *arguments)


def test_moves_are_planned_made_shown_throttled_and_cancelled(
    bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    planned = reassign(capfdbinary, "t", "--to-brokers", "2", "--dry-run")
    assert re.search(r"^t +1 +1 +2$", planned.out, re.MULTILINE), planned.out
    assert "WOULD GO TO" in planned.out
    none = reassign(capfdbinary, "--status")
    assert (none.code, none.out, none.err) == (0, "", "no partition is being moved\n")

    moved = reassign(capfdbinary, "t", "--partitions", "0", "--to-brokers", "2")
    assert moved.code == 0, moved.err
    assert re.search(r"^t +0 +0 +2$", moved.out, re.MULTILINE), moved.out
    assert json.loads(reassign(capfdbinary, "--status", "--json").out) == []
    again = reassign(capfdbinary, "t", "--partitions", "0", "--to-brokers", "2")
    assert (again.code, again.err) == (0, "nothing to do: the partitions are on these brokers already\n")

    grown = reassign(
        capfdbinary, "t", "--partitions", "1", "--replication-factor", "2", "--throttle", "1", "--no-wait", "--json"
    )
    [begun] = json.loads(grown.out)
    assert (begun["partition"], begun["replicas"], begun["error"]) == (1, [1], None)
    [row] = json.loads(reassign(capfdbinary, "t", "--status", "--json").out)
    assert (row["target"], row["adding"], row["removing"], row["throttled_rate"]) == ([1, 0], [0], [], 1)
    assert 0 < row["lacking_bytes"] <= row["size_bytes"]
    shown = Ran(capfdbinary, "topics", "describe", "t").out
    assert re.search(r"PARTITION +LEADER +LEADER EPOCH +REPLICAS +ADDING +REMOVING", shown), shown
    reassign(capfdbinary, "t", "--to-brokers", "2").fails_with("t-1 is being moved to brokers [1, 0] already")
    faster = reassign(capfdbinary, "t", "--throttle", "1GB")
    assert faster.code == 0, faster.err
    with Admin(bootstrap) as admin:
        waited_for(lambda: not admin.reassignments())
    cancelled = reassign(capfdbinary, "--cancel")
    assert (cancelled.code, cancelled.err) == (0, "no partition is being moved\n")
    assert "ADDING" not in Ran(capfdbinary, "topics", "describe", "t").out


def test_a_command_that_is_given_again_waits_for_its_move_and_leaves_the_rate_as_it_is(
    bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    off = ("--from-broker", "1")
    begun = reassign(capfdbinary, *off, "--throttle", "1", "--no-wait")
    assert re.search(r"^t +1 +1 +2$", begun.out, re.MULTILINE), begun.out
    again = reassign(capfdbinary, *off, "--no-wait")
    assert (again.code, again.out) == (0, begun.out)
    with Admin(bootstrap) as admin:
        assert [each.throttled_rate for each in admin.reassignments()] == [1]
        with running("topics", "reassign", *off) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "moving 1 partition; Ctrl-C ends this wait and not the move\n"
            assert [each.throttled_rate for each in admin.reassignments()] == [1]
            assert reassign(capfdbinary, *off, "--throttle", "0").out == begun.out.replace("GOING TO", "NOW AT")
            assert process.wait(30) == 0
        assert admin.describe_topics(["t"])[0].partition(1).replicas == (2,)
    grown = [reassign(capfdbinary, "t", "--replication-factor", "2", "--throttle", "1", "--no-wait") for _ in range(2)]
    assert grown[0].code == 0 and grown[0].out == grown[1].out, grown[1].err
    reassign(capfdbinary, "t", "--cancel")
    empty = reassign(capfdbinary, *off)
    assert (empty.code, empty.err) == (0, "nothing to do: no partition is on broker 1\n")
    lost = reassign(capfdbinary, "--from-broker", "9")
    assert (lost.code, lost.err) == (
        0,
        "nothing to do: no partition is on broker 9, which is not registered in the cluster\n",
    )


def test_a_command_that_asks_for_something_else_does_not_take_a_move_for_its_own(
    bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Who empties a broker, amid a move to it, would stop it with what has come."""
    off = ("--from-broker", "1")
    begun = reassign(capfdbinary, *off, "--to-brokers", "2", "--throttle", "1", "--no-wait")
    assert re.search(r"^t +1 +1 +2$", begun.out, re.MULTILINE), begun.out
    for other in (
        ("--from-broker", "2"),
        (*off, "--to-brokers", "0"),
        (*off, "--replication-factor", "2"),
        ("t", "--partitions", "1", "--replication-factor", "2"),
    ):
        reassign(capfdbinary, *other, "--no-wait").fails_with("t-1 is being moved to brokers [2] already")


def test_an_interrupt_ends_the_wait_and_not_the_move(bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with Admin(bootstrap) as admin:
        with running("topics", "reassign", "t", "--to-brokers", "2", "--throttle", "1") as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "moving 2 partitions; Ctrl-C ends this wait and not the move\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        assert process.returncode == 1
        assert said.strip().startswith("kafkalog: interrupted; 2 partitions not moved yet: that goes on"), said
        assert len(admin.reassignments()) == 2
    planned = reassign(capfdbinary, "t", "--cancel", "--dry-run")
    assert re.search(r"WOULD BE BACK AT\nt +0 +0 +0$", planned.out, re.MULTILINE), planned.out
    back = reassign(capfdbinary, "t", "--cancel")
    assert re.search(r"^t +0 +0 +0$", back.out, re.MULTILINE), back.out


def test_a_move_to_a_broker_that_is_not_live_says_once_that_it_waits(
    brokers: Brokers, bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.cli.reassign._LOOKS_PER_CHECK", 1)
    monkeypatch.setattr("kafkalog.cli.reassign._LOOK_SECONDS", 0.05)
    said, looks = "", 0

    def is_said(sentence: str) -> bool:
        nonlocal said
        said += capfdbinary.readouterr().err.decode()
        return sentence in said

    with Admin(bootstrap) as admin, ThreadPoolExecutor() as threads:
        admin.reassign("t", [0], to_brokers=[0, 2], replication_factor=2, throttled_rate=1)
        brokers.kill(2)
        waited_for(lambda: 2 not in {each.broker_id for each in admin.describe_cluster().brokers})
        [row] = json.loads(reassign(capfdbinary, "--status", "--json").out)
        assert (row["target"], row["not_live"]) == ([0, 2], [2])
        assert "NOT LIVE" in reassign(capfdbinary, "--status").out
        look = admin.reassignments

        def counted_look(topic: str | None) -> list[ReassignmentProgress]:
            nonlocal looks
            looks += 1
            return look(topic)

        monkeypatch.setattr(admin, "reassignments", counted_look)
        waiting = threads.submit(_wait, admin, "t", [TopicPartition("t", 0)])
        try:
            sentence = "t-0 waits: broker 2 is not live; start it, or `kafkalog topics reassign t --cancel`\n"
            waited_for(lambda: is_said(sentence))
            seen = looks
            waited_for(lambda: looks > seen + 3)
        finally:
            admin.cancel_reassignments()
        waiting.result(30)
        assert is_said(sentence) and said.count("waits") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "nothing to do"),
        (("--to-brokers", "1"), "name a TOPIC"),
        (("--partitions", "0", "--status"), "--partitions needs a TOPIC"),
        (("t", "--cancel", "--status"), "give only one of"),
        (("t", "--cancel", "--to-brokers", "1"), "give only one of"),
        (("t", "--status", "--throttle", "3MB"), "--status changes no rate: give --throttle without it"),
        (("t", "--cancel", "--throttle", "0"), "--cancel changes no rate: give --throttle without it"),
        (("t", "--to-brokers", "one"), "expected numbers such as 1,2,3 or 0-3"),
        (("t", "--to-brokers", "3-1"), "expected numbers such as 1,2,3 or 0-3"),
        (("t", "--throttle", "fast"), "'fast' is no rate"),
        (("t", "--throttle", "0.4"), "'0.4' is less than a byte a second"),
    ],
)
def test_wrong_usage_gets_one_sentence(
    capfdbinary: pytest.CaptureFixture[bytes], arguments: tuple[str, ...], sentence: str
) -> None:
    wrong = reassign(capfdbinary, *arguments)
    assert wrong.code == 2
    assert sentence in wrong.err


def test_brokers_that_are_not_there_or_too_few_are_refused(
    bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    reassign(capfdbinary, "t", "--to-brokers", "9").fails_with("broker 9 is not registered in the cluster")
    reassign(capfdbinary, "t", "--replication-factor", "4").fails_with(
        "t-0 with 4 replicas needs as many brokers, and only 3 may be used: start another broker, name more, or give a "
        "replication factor of at most 3"
    )
    reassign(capfdbinary, "u", "--to-brokers", "1").fails_with("there is no topic 'u'")


def test_a_terminal_shows_bytes_and_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with _bar("2 partitions") as show:
        show(0, 10_000_000)
        show(5_000_000, 10_000_000)
    shown = capsys.readouterr().err
    assert "moving 2 partitions" in shown
    assert "/10.0 MB" in shown


def test_rates_and_numbers_are_read_as_people_write_them() -> None:
    context, parameter = click.Context(click.Command("c")), click.Option(["--throttle"])
    rates = {"50MB": 50_000_000, "1.5 GiB/s": 3 << 29, "64KiB": 65536, "100": 100, "0": 0, "7b": 7}
    assert {text: rate(context, parameter, text) for text in rates} == rates
    assert _numbers(context, parameter, "0-3,7") == [0, 1, 2, 3, 7]
    assert _numbers(context, parameter, None) == []
