"""The `kafkalog` command: what it prints, what it exits with, and that a failure is one sentence."""

from __future__ import annotations

import base64
import errno
import io
import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import psutil
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from kafkalog.cli import doctor, groups, main, output, records, topics, transactions
from kafkalog.cli.extents import extents
from kafkalog.cli.main import run
from kafkalog.client.admin import AtTimestamp, ListedOffset
from kafkalog.client.cluster import PartitionInfo, TopicInfo
from kafkalog.errors import BrokerUnreachable, InvalidArgument, KafkalogError, PartitionLost
from kafkalog.wire.decisions import DecidedTopic, Decision
from kafkalog.wire.transactions_pb2 import StagedSet
from tests.free_ports import free_ports
from tests.waiting import waited_for

COMMANDS: tuple[list[str], ...] = (
    [], ["local"], ["broker"], ["zookeeper"], ["topics"], ["topics", "create"], ["topics", "list"],
    ["topics", "describe"], ["topics", "alter"], ["topics", "recover"], ["topics", "delete"],
    ["produce"], ["consume"], ["offsets"], ["log"],
    ["log", "dump"], ["log", "verify"], ["doctor"], ["transactions"], ["transactions", "list"],
    ["transactions", "describe"], ["transactions", "abort"], ["transactions", "resolve"],
)  # fmt: skip

KAFKALOG = [sys.executable, "-m", "kafkalog.cli"]


class Ran:
    """A command line run in this process: its exit code and what it wrote."""

    def __init__(self, capture: pytest.CaptureFixture[bytes], *arguments: str) -> None:
        capture.readouterr()
        self.code = run(arguments)
        written = capture.readouterr()
        self.out, self.err = written.out.decode(errors="surrogateescape"), written.err.decode()

    def fails_with(self, sentence: str) -> None:
        """It failed, with that in one line on stderr and nothing else."""
        assert self.code == 1
        assert sentence in self.err
        assert self.err.startswith("kafkalog: ") and self.err.count("\n") == 1, self.err


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic of two partitions, and KAFKALOG_BOOTSTRAP set so that commands find it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)
    os.environ["KAFKALOG_BOOTSTRAP"] = cluster.bootstrap_servers
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(name, partitions=2)
        yield name
        if name in [each.name for each in admin.topics()]:
            admin.delete_topic(name)
    del os.environ["KAFKALOG_BOOTSTRAP"]


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own; killed if the test leaves it running."""
    with subprocess.Popen(
        [*KAFKALOG, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


# --- usage and failures ------------------------------------------------------------------------------------------


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
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it, and it refuses
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        Ran(capfdbinary, *arguments, "--bootstrap", address).fails_with(address)


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
    assert topic in Ran(capfdbinary, *arguments).out.splitlines()
    assert topic in json.loads(Ran(capfdbinary, "--json", *arguments).out)
    assert "No such option '--json'" in Ran(capfdbinary, "--json", "consume", topic).err


def test_a_terminal_is_told_what_is_waited_for() -> None:
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


# --- topics and offsets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaders", "said"),
    [([0, 1], "2 partitions"), ([0, -1, -1], "3 partitions (2 not open yet; clients ask again for a while)")],
)
def test_a_topic_that_was_made_says_which_part_of_it_cannot_be_used_yet(leaders: list[int], said: str) -> None:
    partitions = tuple(PartitionInfo(number, leader, 0, (0,), ()) for number, leader in enumerate(leaders))
    assert topics._partitions_of(TopicInfo("t", b"t" * 16, {}, {}, partitions, 0)) == said


def test_topics_are_made_listed_described_altered_and_deleted(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    name = f"{topic}-more"
    made = Ran(capfdbinary, "topics", "create", name, "--partitions", "3", "--config", "retention.ms=60000")
    assert (made.code, made.out) == (0, f"made topic {name} with 3 partitions\n")
    Ran(capfdbinary, "topics", "create", name).fails_with(f"topic '{name}' exists already")
    assert name in Ran(capfdbinary, "topics", "list").out.splitlines()
    assert {topic, name} <= set(json.loads(Ran(capfdbinary, "topics", "list", "--json").out))

    [described] = json.loads(Ran(capfdbinary, "topics", "describe", name, "--json").out)
    assert described["topic"] == name and len(described["partitions"]) == 3
    assert described["config"] == {"retention.ms": "60000"}
    assert described["effective"]["segment.bytes"] == str(1 << 30)
    text = Ran(capfdbinary, "topics", "describe", name).out
    assert text.splitlines()[0].startswith(name) and "retention.ms=60000" in text and "PARTITION" in text

    altered = Ran(
        capfdbinary, "topics", "alter", name, "--set", "segment.bytes=65536", "--unset", "retention.ms",
        "--partitions", "4",
    )  # fmt: skip
    assert altered.out == f"topic {name} has 4 partitions, segment.bytes=65536\n"
    Ran(capfdbinary, "topics", "alter", name, "--set", "segment.byte=1").fails_with("did you mean 'segment.bytes'?")
    assert Ran(capfdbinary, "topics", "delete", name, "--yes").out == f"deleted topic {name}\n"
    Ran(capfdbinary, "topics", "describe", name).fails_with(f"there is no topic '{name}'")


def test_making_and_deleting_can_be_repeated(topic: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    name = f"{topic}-again"
    said = [
        Ran(capfdbinary, "topics", *arguments).out
        for arguments in [("create", name, "--if-not-exists")] * 2 + [("delete", name, "--if-exists", "--yes")] * 2
    ]
    assert said == [
        f"made topic {name} with 1 partition\n",
        f"topic {name} exists already\n",
        f"deleted topic {name}\n",
        f"there is no topic {name}\n",
    ]
    Ran(capfdbinary, "topics", "delete", name, "--yes").fails_with(f"there is no topic '{name}'")


@pytest.mark.parametrize("answer", [b"", b"n\n", b"y\n"], ids=["nothing", "no", "yes"])
def test_without_a_terminal_and_without_yes_no_topic_is_deleted(
    answer: bytes, topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, answer)
    ran = Ran(capfdbinary, "topics", "delete", topic)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(
        f"Error: delete topic {topic} and all its records? "
        "Standard input is no terminal, so nobody can be asked: give --yes\n"
    )
    assert topic in Ran(capfdbinary, "topics", "list").out.splitlines()


def test_what_other_attempts_have_staged_stands_beside_a_decision_and_is_none_of_its_bytes() -> None:
    decision = Decision(
        "q", version=3, batch_id=7, commit_uuid=b"a" * 16, topics=(DecidedTopic(b"t" * 16, "t", ((0, 2),)),)
    )

    def staged(partition: int, batch_id: int, commit_uuid: bytes, length: int) -> StagedSet:
        name = "q" if commit_uuid else ""
        return StagedSet(
            topic_id=b"t" * 16, partition=partition, transactional_id=name, producer_id=5, batch_id=batch_id,
            commit_uuid=commit_uuid, length=length,
        )  # fmt: skip

    sets = [staged(0, 7, b"a" * 16, 10), staged(1, 7, b"a" * 16, 20), staged(0, 7, b"b" * 16, 100)]
    sets += [staged(0, 8, b"", 1000), staged(0, 8, b"", 2000), staged(1, 8, b"", 4000)]
    rows = transactions._rows([decision], sets)
    assert [(row["transaction"], row["batch"], row["state"], row["partitions"], row["bytes"]) for row in rows] == [
        ("q", 7, "decided", 3, 30),
        ("producer 5", 8, "staged", 2, 7000),
        ("q", 7, "prepared", 1, 100),
    ]


@pytest.mark.parametrize("action", ["describe", "abort", "resolve"])
def test_an_unknown_transaction_fails(action: str, topic: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, "transactions", action, "nope")
    ran.fails_with("nothing is decided or staged of a transaction 'nope'")
    assert ran.out == ""


def test_a_lost_partition_is_described_and_recovered(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(data=tmp_path) as running:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", running.bootstrap_servers)
        with Admin(running.bootstrap_servers) as admin:
            topic_id = admin.create_topic("t", partitions=2).topic_id
            admin.commit("readers", {TopicPartition("t", 1): 4})
        assert Ran(capfdbinary, "topics", "recover", "t").err == "no partition of t is lost\n"
        assert Ran(capfdbinary, "topics", "recover", "t", "--accept-loss").err == "no partition of t is lost\n"
        [broker] = running.brokers
        broker.stop()
        shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-1")
        broker.start()

        sentence = f"partition t-1 is lost: its folder {topic_id.hex()}-1 is gone from data directory"
        assert sentence in Ran(capfdbinary, "topics", "describe", "t").out
        [described] = json.loads(Ran(capfdbinary, "topics", "describe", "--json").out)
        assert described["partitions"][0]["error"] is None
        assert described["partitions"][1]["error"].startswith(sentence)
        findings = {each["check"]: each for each in json.loads(Ran(capfdbinary, "doctor", "--json").out)}
        assert findings["partition t-1"]["state"] == "failed"
        assert findings["partition t-1"]["found"].startswith(sentence)
        assert sentence in Ran(capfdbinary, "topics", "recover", "t").out
        assert sentence not in Ran(capfdbinary, "topics", "recover", "t", "--partition", "0").out
        Ran(capfdbinary, "topics", "recover", "t", "--partition", "0", "--accept-loss").fails_with("t-0 is not lost")
        Ran(capfdbinary, "topics", "recover", "nope").fails_with("there is no topic 'nope'")
        for accepts in ((), ("--accept-loss",)):
            ran = Ran(capfdbinary, "topics", "recover", "t", "--partition", "9", *accepts)
            ran.fails_with("topic 't' has no partition 9; it has 2")
        recovered = Ran(capfdbinary, "topics", "recover", "t", "--accept-loss")
        assert recovered.out == "t-1 begins anew at offset 10000004; what it held is lost\n"
        table = json.loads(Ran(capfdbinary, "offsets", "t", "--json").out)
        assert [row["start_offset"] for row in table] == [0, 10000004]

        broker.stop()
        for number in (0, 1):
            shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-{number}")
        broker.start()
        recover = ["topics", "recover", "t", "--accept-loss"]
        recovered = Ran(capfdbinary, *recover, "--partition", "0", "--start-offset", "7")
        assert recovered.out == "t-0 begins anew at offset 7; what it held is lost\n"
        assert Ran(capfdbinary, *recover).out.startswith("t-1 begins anew at offset ")


def test_commands_show_the_other_partitions_of_a_topic_and_say_which_is_lost(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"log.retention.check.interval.ms": 50}
    with LocalCluster(data=tmp_path, settings=settings) as cluster, Admin(cluster.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
        topic_id = admin.create_topic("t", partitions=3).topic_id
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(9):
                producer.send("t", b"%d" % number, partition=number // 3)
        admin.commit("readers", {TopicPartition("t", number): 1 for number in range(3)})
        sentence = f"partition t-1 is lost: its folder {topic_id.hex()}-1 is gone from data directory"

        def lost() -> bool:
            return TopicPartition("t", 1) in admin.unserved(["t"])

        # While it is read: the others go on.
        with running("consume", "t", "--from-beginning") as consumer:
            assert consumer.stdout is not None and consumer.stderr is not None
            assert sorted(consumer.stdout.readline() for _ in range(9)) == [f"{number}\n" for number in range(9)]
            shutil.rmtree(cluster.brokers[0].data_directory / f"{topic_id.hex()}-1")
            waited_for(lost)
            assert consumer.stderr.readline().startswith(f"kafkalog: {sentence}")
            with Producer(cluster.bootstrap_servers) as producer:
                for partition in (0, 2):
                    producer.send("t", b"more", partition=partition).result(60)
            assert [consumer.stdout.readline() for _ in range(2)] == ["more\n"] * 2
            consumer.send_signal(signal.SIGINT)
            assert consumer.wait(60) == 1
            assert consumer.stderr.read() == ""

        # Before it is read.
        ran = Ran(capfdbinary, "offsets", "t", "--group", "readers")
        ran.fails_with(sentence)
        assert ran.out.splitlines()[2].split() == ["1", "-", "-", "-", "1", "-"]
        rows = json.loads(Ran(capfdbinary, "offsets", "t", "--group", "readers", "--json").out)
        assert [row["end_offset"] for row in rows] == [4, None, 4]
        assert [row["lag"] for row in rows] == [3, None, 3]
        assert rows[0]["error"] is None and rows[1]["error"].startswith(sentence)
        ran = Ran(capfdbinary, "groups", "describe", "readers")
        ran.fails_with(sentence)
        assert "\nlag 6, of " in ran.out
        rows = json.loads(Ran(capfdbinary, "groups", "describe", "readers", "--json").out)["partitions"]
        assert [row["lag"] for row in rows] == [3, None, 3]
        assert rows[1]["error"].startswith(sentence) and rows[1]["committed"] == 1
        ran = Ran(capfdbinary, "consume", "t", "--from-beginning", "--max-messages", "8")
        ran.fails_with(sentence)
        assert sorted(ran.out.split()) == ["0", "1", "2", "6", "7", "8", "more", "more"]
        ran = Ran(capfdbinary, "consume", "t", "--group", "readers", "--max-messages", "6")
        ran.fails_with(sentence)
        assert sorted(ran.out.split()) == ["1", "2", "7", "8", "more", "more"]
        assert admin.committed("readers") == {TopicPartition("t", n): offset for n, offset in enumerate((4, 1, 4))}

        for number in (0, 2):
            shutil.rmtree(cluster.brokers[0].data_directory / f"{topic_id.hex()}-{number}")
        waited_for(lambda: len(admin.unserved(["t"])) == 3)
        ran = Ran(capfdbinary, "consume", "t")
        assert (ran.code, ran.out, ran.err.count("is lost")) == (1, "", 3)


def test_a_damaged_partition_ends_no_other_ones_records(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(data=tmp_path) as cluster, Admin(cluster.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
        topic_id = admin.create_topic("t", partitions=2).topic_id
        with Producer(cluster.bootstrap_servers) as producer:
            for partition in (0, 1):
                producer.send("t", b"a value to be found", partition=partition)
        path = cluster.brokers[0].data_directory / f"{topic_id.hex()}-0" / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        ran = Ran(capfdbinary, "consume", "t", "--from-beginning", "--max-messages", "1")
        # Which one is asked for first is nobody's promise, so it may have ended before it met the damage.
        assert ran.out == "a value to be found\n"
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send("t", b"another", partition=1)
        with running("consume", "t", "--from-beginning") as consumer:
            assert consumer.stdout is not None and consumer.stderr is not None
            assert [consumer.stdout.readline() for _ in range(2)] == ["a value to be found\n", "another\n"]
            assert re.search("t-0 .* go on at offset 1$", consumer.stderr.readline())
            consumer.send_signal(signal.SIGINT)
            assert consumer.wait(60) == 1


def test_a_partition_that_is_lost_between_two_looks_has_a_row_with_its_error() -> None:
    kept, lost = TopicPartition("t", 0), TopicPartition("t", 1)
    error = PartitionLost(partition=lost, reason="its folder is gone", broker_id=0, topic="t", number=1)

    def list_offsets(
        wanted: dict[TopicPartition, str], failed: dict[TopicPartition, KafkalogError]
    ) -> dict[TopicPartition, ListedOffset]:
        if "latest" in wanted.values():
            failed[lost] = error
        return {partition: ListedOffset(5, None, 100) for partition in wanted if partition not in failed}

    rows, failed = extents(cast(Admin, SimpleNamespace(list_offsets=list_offsets)), [kept, lost], {kept: 5, lost: 5})
    assert failed == {lost: error}
    assert [(row["end_offset"], row["lag"], row["error"]) for row in rows.values()] == [
        (5, 0, None),
        (None, None, str(error)),
    ]


def test_offsets_tell_start_end_and_a_groups_lag(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 0): 3})
        admin.commit("watchers", {TopicPartition(topic, 0): 7})
    rows = json.loads(Ran(capfdbinary, "offsets", topic, "--group", "watchers", "--json").out)
    assert [(row["partition"], row["start_offset"], row["end_offset"]) for row in rows] == [(0, 3, 10), (1, 0, 0)]
    assert [(row["committed"], row["lag"]) for row in rows] == [(7, 3), (None, 0)]
    assert rows[0]["size_bytes"] > 0
    Ran(capfdbinary, "offsets", topic, "--group", "watcher").fails_with("no group is called 'watcher'")
    table = Ran(capfdbinary, "offsets", topic).out.splitlines()
    assert table[0].split() == ["PARTITION", "START", "OFFSET", "END", "OFFSET", "SIZE", "BYTES"]
    assert table[1].split()[:3] == ["0", "3", "10"]


# --- records -----------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_were_sent(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b"plain", b"", b"\xff not utf-8", "Grüße".encode(), b"a" * 100_000]
    feed(monkeypatch, b"\n".join(lines))  # the last line without its end
    assert Ran(capfdbinary, "produce", topic, "--partition", "1").code == 0
    ran = Ran(capfdbinary, "consume", topic, "--from-beginning", "--max-messages", "5")
    assert ran.out.encode(errors="surrogateescape") == b"".join(line + b"\n" for line in lines)


def test_keys_choose_the_partition_and_come_back(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"".join(b"k%d=>v%d=>x\n" % (number % 7, number) for number in range(50)))
    config = ["--config", "compression.type=zstd"]
    assert Ran(capfdbinary, "produce", topic, "--key-separator", "=>", *config).code == 0
    ran = Ran(capfdbinary, "consume", topic, "--from-beginning", "--max-messages", "50", "--format", "json")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert sorted(int(row["value"][1:-3]) for row in found) == list(range(50))
    assert all(row["key"] == f"k{int(row['value'][1:-3]) % 7}" for row in found)
    partition_of = {row["key"]: row["partition"] for row in found}
    assert all(partition_of[row["key"]] == row["partition"] for row in found)
    pairs = Ran(capfdbinary, "consume", topic, "--from-beginning", "--max-messages", "50", "--format", "key-value")
    assert set(pairs.out.splitlines()) == {f"k{number % 7}\tv{number}=>x" for number in range(50)}


def test_a_line_without_the_separator_is_named(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"a:1\nb2\n")
    with monkeypatch.context() as patched:
        feed(patched, b"a\tb\n")
        assert Ran(capfdbinary, "produce", topic, "--key-separator", r"\t").code == 0
    ran = Ran(capfdbinary, "produce", topic, "--key-separator", ":")
    ran.fails_with("line 2 of the input has no key separator ':'; the first line is acknowledged\n")
    feed(monkeypatch, b"no key\n")
    ran = Ran(capfdbinary, "produce", topic, "--key-separator", ":")
    ran.fails_with("line 1 of the input has no key separator ':'; no line is acknowledged\n")


@pytest.mark.parametrize("limit_is_known", [True, False])
def test_a_line_that_is_too_large_is_named(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch,
    limit_is_known: bool,
) -> None:  # fmt: skip
    """By the producer before it is sent, or by a broker whose limit was lowered since."""
    where = TopicPartition(topic, 0)
    lines = [b"small\n", b"large" * 10_000 + b"\n"]
    with Admin(cluster.bootstrap_servers) as admin:

        def lower() -> None:
            admin.alter_topic(topic, set={"max.message.bytes": 20_000})

        class Input(io.BytesIO):
            def __iter__(self) -> Iterator[bytes]:
                yield lines[0]
                while admin.list_offsets({where: "latest"})[where].offset != 1:
                    pass
                if not limit_is_known:
                    lower()
                yield lines[1]

        if limit_is_known:
            lower()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Input()))
        ran = Ran(capfdbinary, "produce", topic, "--partition", "0")
        ran.fails_with("line 2 of the input: ")
        ran.fails_with("; the first line is acknowledged\n")
        assert admin.list_offsets({where: "latest"})[where].offset == 1


def test_produce_asks_for_no_more_lines_once_one_has_failed(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = TopicPartition(topic, 0)
    failed, in_line = threading.Event(), records._in_line

    def noted(number: int, error: BaseException) -> InvalidArgument:
        failed.set()
        return in_line(number, error)

    monkeypatch.setattr(records, "_in_line", noted)
    with Admin(cluster.bootstrap_servers) as admin:

        class Input(io.BytesIO):
            def __iter__(self) -> Iterator[bytes]:
                yield b"small\n"
                waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 1)
                admin.alter_topic(topic, set={"max.message.bytes": 20_000})  # which the producer does not know yet
                yield b"large" * 10_000 + b"\n"
                assert failed.wait(30)
                # The callback has the failure; that the command is about to look at it is told by nothing. A line every
                # 10 ms, so that it need not be quick, and 1,000 of them before it counts as not looking.
                for _ in range(1000):
                    threading.Event().wait(0.01)
                    yield b"more\n"
                raise AssertionError("all of it was asked for")

        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Input()))
        Ran(capfdbinary, "produce", topic, "--partition", "0").fails_with("line 2 of the input: ")


def test_a_failed_produce_says_which_lines_are_acknowledged() -> None:
    acknowledged = records._Acknowledged()
    said = [str(acknowledged)]
    for number in (2, 1, 3, 5, 7):
        acknowledged.add(number)
        said.append(str(acknowledged))
    assert said == [
        "no line is acknowledged",
        "1 line is acknowledged, but not the first",
        "the first 2 lines are acknowledged",
        "the first 3 lines are acknowledged",
        "4 lines are acknowledged, the first 3 of the input among them",
        "5 lines are acknowledged, the first 3 of the input among them",
    ]


def test_produce_says_what_is_wrong(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, sentence in (
        ([topic, "--config", "linger=5"], "did you mean 'linger.ms'?"),
        ([topic, "--partition", "9"], f"topic '{topic}' has no partition 9"),
        ([topic, "--config", "acks=all"], "acks=all is not supported"),
        ([f"{topic}-not"], f"there is no topic '{topic}-not'"),
    ):
        feed(monkeypatch, b"a\n")
        Ran(capfdbinary, "produce", *arguments).fails_with(sentence)
    feed(monkeypatch, b"")  # before there is a line
    Ran(capfdbinary, "produce", f"{topic}-not").fails_with(f"there is no topic '{topic}-not'")


def test_a_group_goes_on_where_it_committed(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
    seen = []
    for count in ("4", "6"):
        ran = Ran(
            capfdbinary, "consume", topic, "--group", "readers", "--from-beginning", "--max-messages", count
        )  # fmt: skip
        seen.append(ran.out.split())
    assert seen == [["0", "1", "2", "3"], ["4", "5", "6", "7", "8", "9"]]
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed("readers") == {TopicPartition(topic, 0): 10, TopicPartition(topic, 1): 0}


@pytest.mark.parametrize("begin", [["--from-beginning"], []], ids=["beginning", "end"])
def test_a_group_goes_on_where_it_began_in_partitions_that_it_had_not_come_to(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], begin: list[str]
) -> None:
    group = f"stopped.early.{len(begin)}"
    with Producer(cluster.bootstrap_servers) as producer, Admin(cluster.bootstrap_servers) as admin:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=number % 2).result(60)
        if not begin:
            admin.commit(group, {TopicPartition(topic, 0): 0})
        first = Ran(capfdbinary, "consume", topic, "--group", group, *begin, "--max-messages", "2").out.split()
        not_come_to = 0 if begin else 5
        assert sorted(admin.committed(group).values()) == sorted([2, not_come_to])
        for number in range(10, 14):
            producer.send(topic, b"%d" % number, partition=1).result(60)
    left = 12 if begin else 7
    second = Ran(capfdbinary, "consume", topic, "--group", group, "--max-messages", str(left)).out.split()
    wanted = [number for number in range(14) if begin or number % 2 == 0 or number >= 10]
    assert sorted(map(int, first + second)) == wanted


def test_a_group_that_was_shown_nothing_begins_where_it_is_told_to_the_next_time(
    topic: str,
    cluster: LocalCluster,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=number % 2)

    def interrupted(consumer: Consumer, max_messages: int | None, timeout: float | None) -> Iterator[Message]:
        raise KeyboardInterrupt

    group = "shown.nothing"
    with monkeypatch.context() as patched, Admin(cluster.bootstrap_servers) as admin:
        patched.setattr(Consumer, "messages", interrupted)
        assert Ran(capfdbinary, "consume", topic, "--group", group).code == 0
        assert admin.committed(group) == {}
    ran = Ran(capfdbinary, "consume", topic, "--group", group, "--from-beginning", "--max-messages", "10")
    assert sorted(ran.out.split()) == [str(number) for number in range(10)]


@pytest.mark.parametrize("interrupted", [1, 3])
def test_ctrl_c_before_a_record_is_written_commits_those_before_it(
    topic: str,
    cluster: LocalCluster,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: int,
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(5):
            producer.send(topic, b"%d" % number, partition=0)
    lines = itertools.count(1)

    def interrupt(message: Message) -> bytes:
        if next(lines) == interrupted:
            raise KeyboardInterrupt
        return b"%b\n" % (message.value or b"")

    monkeypatch.setitem(records._LAYOUTS, "value", interrupt)
    group = f"interrupted.{interrupted}"
    ran = Ran(capfdbinary, "consume", topic, "--group", group, "--from-beginning", "--max-messages", "5")
    assert ran.out.split() == [str(number) for number in range(interrupted - 1)]
    with Admin(cluster.bootstrap_servers) as admin:
        shown = {TopicPartition(topic, 0): interrupted - 1, TopicPartition(topic, 1): 0}
        assert admin.committed(group) == shown


def test_consume_commits_nothing_that_is_not_written(
    topic: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
    written: list[bytes] = []
    commits: list[tuple[int, int]] = []
    commit = Consumer.commit

    class Output(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            written.extend(bytes(data).splitlines())
            return len(data)

    def noted(consumer: Consumer, done: dict[TopicPartition, int]) -> None:
        commits.append((sum(done.values()), len(written)))
        commit(consumer, done)

    monkeypatch.setattr(records, "_COMMIT_EVERY", 3)
    monkeypatch.setattr(Consumer, "commit", noted)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Output(), 1 << 20)))
    assert run(["consume", topic, "--group", "written", "--from-beginning", "--max-messages", "10"]) == 0
    assert written == [b"%d" % number for number in range(10)]
    assert commits[0] == (0, 0) and commits[-1] == (10, 10)
    assert len(commits) >= 5
    assert all(committed <= lines for committed, lines in commits)


def test_consume_ends_once_none_of_its_partitions_is_left(topic: str, cluster: LocalCluster) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for partition in (0, 1):
            producer.send(topic, b"x", partition=partition)
    with running("consume", topic, "--from-beginning") as consumer, Admin(cluster.bootstrap_servers) as admin:
        assert consumer.stdout is not None and consumer.stderr is not None
        assert [consumer.stdout.readline() for _ in range(2)] == ["x\n"] * 2
        admin.delete_topic(topic)
        assert consumer.wait(60) == 1
        said = [line for line in consumer.stderr.read().splitlines() if line.startswith("kafkalog: ")]
        assert len(said) == 1 and "there is no topic" in said[0], said  # for both of its partitions


def test_consume_fails_with_what_is_the_failure_of_no_partition(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = iter([BrokerUnreachable(address="here:1", reason="down"), KeyboardInterrupt()])

    def fails(*_: object, **__: object) -> Iterator[Message]:
        raise next(raised)

    monkeypatch.setattr(Consumer, "messages", fails)
    Ran(capfdbinary, "consume", topic).fails_with("no broker reachable at here:1: down")


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("made_anew", [True, False], ids=["made anew", "deleted"])
def test_a_topic_deleted_while_it_is_shown_gets_no_offset_and_ends_consume(
    topic: str,
    cluster: LocalCluster,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
    made_anew: bool,
) -> None:
    group = f"of.the.old.one.{partitions}"
    lines = itertools.count(1)

    def fill(admin: Admin, word: str) -> None:
        admin.create_topic(topic, partitions=partitions)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(30):
                producer.send(topic, f"{word}{number}".encode(), partition=number % partitions)

    def delete(message: Message) -> bytes:
        if next(lines) == 5:
            admin.delete_topic(topic)
            if made_anew:
                fill(admin, "new")
        return b"%b\n" % (message.value or b"")

    monkeypatch.setitem(records._LAYOUTS, "value", delete)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topic(topic)
        fill(admin, "old")
        ran = Ran(capfdbinary, "consume", topic, "--group", group, "--from-beginning")
        ran.fails_with(f"('{topic}')" if made_anew else f"there is no topic '{topic}'")
        assert len(ran.out.split()) >= 5 and "new" not in ran.out
        assert admin.committed(group) == {}


def test_consume_waits_for_new_records_and_ctrl_c_ends_it_well(topic: str, cluster: LocalCluster) -> None:
    with running("consume", topic) as consumer:
        assert consumer.stdout is not None and consumer.stderr is not None
        shown: Any = consumer.stdout
        seen = b""
        with Producer(cluster.bootstrap_servers, linger_ms=0) as producer:
            # When it has started is not told: send until it shows one.
            os.set_blocking(consumer.stdout.fileno(), False)
            while not seen and consumer.poll() is None:
                producer.send(topic, b"x").result(30)
                seen = shown.buffer.read() or b""
        consumer.send_signal(signal.SIGINT)
        assert consumer.wait(30) == 0
        assert consumer.stderr.read() == ""
        assert set(seen.split()) == {b"x"}


def test_a_reader_that_goes_away_ends_consume_without_a_word(topic: str, cluster: LocalCluster) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(50_000):
            producer.send(topic, b"%d" % number, partition=0)
    command = f"{' '.join(KAFKALOG)} consume {topic} --from-beginning | head -n 2; exit ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b"0\n1\n", b"")


def test_json_of_a_record_keeps_what_is_not_text() -> None:
    message = Message("t", 0, 5, 1_000, None, b"\xff", (("h", b"1"), ("h", None), ("b", b"\xfe")))
    told = json.loads(records._json_line(message))
    assert told["key"] is None and base64.b64decode(told["value_base64"]) == b"\xff" and "value" not in told
    assert told["headers"] == [
        {"key": "h", "value": "1"},
        {"key": "h", "value": None},
        {"key": "b", "value_base64": base64.b64encode(b"\xfe").decode()},
    ]


def test_key_and_value_part_at_the_first_separator() -> None:
    assert records._key_and_value(b"a::b::c", b"::", 1) == (b"a", b"b::c")
    assert records._key_and_value(b"a::b", None, 1) == (None, b"a::b")
    with pytest.raises(InvalidArgument, match="line 7"):
        records._key_and_value(b"ab", b"::", 7)


def test_no_bar_in_a_pipe_and_one_on_a_terminal(topic: str) -> None:
    command = [*KAFKALOG, "produce", topic]
    piped = subprocess.run(command, input=b"a\n" * 5000, capture_output=True, timeout=60)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b"", b"")
    reading, writing = pty.openpty()
    with os.fdopen(reading, "rb", buffering=0) as terminal:
        watched = subprocess.run(
            command, input=b"a\n" * 5000, stdout=subprocess.PIPE, stderr=writing, timeout=60,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(writing)
        assert (watched.returncode, watched.stdout) == (0, b"")
        assert b"records sent" in terminal.read(65536)


# --- servers -----------------------------------------------------------------------------------------------------


def test_local_serves_keeps_its_data_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    port = free_ports(4)
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 2}"
    command = ["local", "--brokers", "2", "--port", str(port), "--data", str(tmp_path / "kept")]
    for turn in range(2):
        with running(*command) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == f"bootstrap servers: {addresses}\n"
            with Admin(addresses) as admin:
                assert [broker.grpc_port for broker in admin.describe_cluster().brokers] == [port, port + 2]
                if turn == 0:
                    admin.create_topic("kept", partitions=2)
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


def pid_of(process: subprocess.Popen[str], what: str) -> int:
    """Of the broker or ZooKeeper of a `kafkalog local`: the one with that in its command line."""
    [found] = [
        child.pid
        for child in psutil.Process(process.pid).children(recursive=True)
        if any(what in word for word in child.cmdline())
    ]
    return found


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


def test_local_without_restarts_goes_on_until_its_last_broker_ends(tmp_path: Path) -> None:
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


FULL_DISK = """
import errno, os, re

def full(fd, buffers, offset, write=os.pwritev):
    if re.search(r"/\\d{20}[.]log$", os.readlink(f"/proc/self/fd/{fd}")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(fd, buffers, offset)

os.pwritev = full
"""
"""A sitecustomize of every Python of a cluster: no segment has room. To mount a small file system would take rights."""


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
        assert re.fullmatch(r"kafkalog: ZooKeeper at \S+ is not reachable: it ended; \S+ says why\n", said), said


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_produce_that_is_told_to_end_sends_what_it_has_read(
    cluster: LocalCluster, topic: str, number: signal.Signals
) -> None:
    where = TopicPartition(topic, 0)
    with Admin(cluster.bootstrap_servers) as admin:
        command = [
            *KAFKALOG,
            "produce",
            topic,
            "--partition",
            "0",
            "--bootstrap",
            cluster.bootstrap_servers,
            "--config",
            "linger.ms=60000",
        ]
        command += ["--config", "batch.records=2000"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(b"line\n" * 3000)
            process.stdin.flush()
            while admin.list_offsets({where: "latest"})[where].offset != 2000:  # the rest lingers
                assert process.poll() is None
            process.send_signal(number)
            assert process.wait(60) == 1
            told = process.stderr.read().strip().decode()
        sent = admin.list_offsets({where: "latest"})[where].offset or 0
        assert sent > 2000
        assert told == f"kafkalog: interrupted; the first {sent} lines are acknowledged"


def test_a_hangup_that_nohup_has_ignored_ends_no_command(cluster: LocalCluster, topic: str) -> None:
    where = TopicPartition(topic, 0)
    produce = [*KAFKALOG, "produce", topic, "--partition", "0", "--bootstrap", cluster.bootstrap_servers]
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    with (
        Admin(cluster.bootstrap_servers) as admin,
        subprocess.Popen([*nohup, *produce], stdin=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(b"before\n")
        process.stdin.flush()
        waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 1)
        process.send_signal(signal.SIGHUP)
        process.stdin.write(b"after\n")
        process.stdin.close()
        assert process.wait(60) == 0
        assert admin.list_offsets({where: "latest"})[where].offset == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">/dev/full"])
def test_closed_and_full_standard_streams_are_no_defect(cluster: LocalCluster, topic: str, closed: str) -> None:
    command = "produce" if closed == "<&-" else "topics describe"
    line = f"{' '.join(KAFKALOG)} {command} {topic} --bootstrap {cluster.bootstrap_servers} {closed}"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert ran.returncode == (1 if closed == ">/dev/full" else 0), ran.stderr
    assert ran.stderr in ("", "kafkalog: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("data", ["file/sub", "/proc/kafkalog"])
def test_local_in_a_folder_that_can_not_be_is_one_sentence(tmp_path: Path, data: str) -> None:
    (tmp_path / "file").touch()
    command = [*KAFKALOG, "local", "--port", str(free_ports(2)), "--data", str(tmp_path / data)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.startswith("kafkalog: ") and ran.stderr.count("\n") == 1, ran.stderr
    assert str(tmp_path / data) in ran.stderr


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
        (b"\xff\xfe\x00", "broker.properties' is not valid: it is not a text file"),
        (b"zookeeper.connect=127.0.0.1:1\nhost=203.0.113.1\n", "host='203.0.113.1' is not valid: it is not an address"),
        (
            b"flush.messages=1\n",
            "no broker setting 'flush.messages': it is a topic's: kafkalog topics create TOPIC --config",
        ),
        (b"zookeeper.connect=127.0.0.1:1\ngrpc.port=19999\ndata.port=19999\n", "data.port=19999 is not valid"),
    ],
    ids=["name", "binary", "host", "topic's", "ports"],
)
def test_a_broker_with_a_wrong_config_is_one_sentence(tmp_path: Path, text: bytes, told: str) -> None:
    config = tmp_path / "broker.properties"
    config.write_bytes(text + f"log.dir={tmp_path}\n".encode())
    ran = subprocess.run([*KAFKALOG, "broker", "--config", str(config)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert told in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


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
    ran.fails_with(": 1 problem, the first of them: ")
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


# --- doctor ------------------------------------------------------------------------------------------------------


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


def test_doctor_says_that_a_broker_does_not_answer(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with LocalCluster(2) as own:
        hung = psutil.Process(own.brokers[1].pid)
        hung.suspend()
        try:
            found = findings_of(capfdbinary, own.brokers[0].address)
        finally:
            hung.resume()
    assert "does not answer within" in found["broker 1"]["found"], found
    assert "hangs" in found["broker 1"]["advice"]


def test_doctor_says_what_to_do(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("KAFKALOG_BOOTSTRAP", "127.0.0.1:1")
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    assert {finding.state for finding in doctor.check_workers_python()} == {"ok"}
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "jupyter-that-is-not-there")
    findings = {finding.check: finding for finding in doctor.check_workers_python()}
    assert findings["planners' python"].state == "failed"
    assert findings["executors' python"].state == "warning"
    assert "jupyter-that-is-not-there" in findings["executors' python"].found
    assert "unset PYSPARK_DRIVER_PYTHON" in findings["executors' python"].advice


@pytest.mark.parametrize(
    "text, major", [('openjdk version "17.0.15" 2025-04-15', 17), ('java version "1.8.0_292"', 8), ("no java", None)]
)
def test_java_versions_are_read(text: str, major: int | None) -> None:
    assert doctor.java_major(text) == major


def test_our_requirements_are_plain_and_versions_are_compared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == doctor.DISTRIBUTION
    for requirement in project["dependencies"]:
        name, bounds = doctor.parse_requirement(requirement)
        assert len(bounds) == 2, f"{requirement} is not bounded on both sides"
        assert doctor.within(metadata.version(name), bounds), requirement
    assert doctor.parse_requirement("click<9,>=8.1") == ("click", ["<9", ">=8.1"])
    assert doctor.within("8.10.1", ["<9", ">=8.2"]) and not doctor.within("9.0", ["<9"])
    assert doctor.within("4.3.0.dev1", [">=4.3"]) and not doctor.within("4.2.9", [">=4.3"])
    assert doctor.within("8", [">=8.0", "<=8.0.0"]) and doctor.within("9.0", ["==9"])


# --- what is read and shown, by itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [("t", ("t", [])), ("t:0", ("t", [0])), ("t:2,0,2", ("t", [0, 2])), ("a.b:1, 3", ("a.b", [1, 3]))],
)
def test_a_topic_and_its_partitions_are_read(text: str, named: tuple[str, list[int]]) -> None:
    assert output.partitions_named(text) == named


@pytest.mark.parametrize("text", ["", ":0", "t:", "t:-1", "t:0,", "t:x"])
def test_what_names_no_partitions_is_wrong_usage(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected TOPIC or TOPIC:0,2"):
        output.partitions_named(text)


def test_a_setting_is_a_name_and_a_value_without_the_spaces_around() -> None:
    context, parameter = click.Context(click.Command("c")), click.Option(["--config"])
    assert output.pairs(context, parameter, [" a = b=c ", "d="]) == {"a": "b=c", "d": ""}
    for text in ("a", "=b"):
        with pytest.raises(click.BadParameter, match=f"expected NAME=VALUE, not '{text}'"):
            output.pairs(context, parameter, [text])


def test_what_is_counted_has_its_number() -> None:
    assert [output.counted(number, "batch") for number in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert [output.counted(number, "broker") for number in (0, 1, 2)] == ["0 brokers", "1 broker", "2 brokers"]


def test_a_cell_is_for_people() -> None:
    values = [None, "", True, False, 0, [], [1, 2], (), {}, {"a": 1, "b": 2}, "text"]
    shown = ["-", "-", "yes", "no", "0", "-", "1, 2", "-", "-", "a=1 b=2", "text"]
    assert [output._cell(value) for value in values] == shown


def test_a_failure_names_its_partition_once(capsys: pytest.CaptureFixture[str]) -> None:
    partition = TopicPartition("t", 0)
    output.say_failure(partition, KafkalogError(reason="t-0\n  is lost"))
    output.say_failure(partition, KafkalogError(reason="the disk is full"))
    assert capsys.readouterr().err == "kafkalog: t-0 is lost\nkafkalog: t-0: the disk is full\n"


@pytest.mark.parametrize(
    ("text", "timestamp_us"),
    [
        ("1500", 1_500_000),
        ("1970-01-02T00:00:01.25", 86_401_250_000),
        ("1970-01-02T00:00:01.25+01:00", 82_801_250_000),
        ("1970-01-01", 0),
        ("1969-12-31T23:59:59.5", -500_000),
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str, timestamp_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert groups._timestamp(text) == AtTimestamp(timestamp_us)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_age_is_never_negative() -> None:
    assert transactions._age((time.time_ns() // 1000) + 60_000_000) == 0
    assert 59 <= transactions._age((time.time_ns() // 1000) - 60_000_000) <= 120


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
