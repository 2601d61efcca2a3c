"""`kafkalog produce` and `consume`: what goes in and comes out, against a running cluster."""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from kafkalog.cli import records
from kafkalog.cli.extents import readable
from kafkalog.cli.line_reader import LineReader
from kafkalog.cli.main import run
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer.membership import Membership
from kafkalog.client.groups import GroupMember, keep_member, leave_group
from kafkalog.errors import BrokerUnreachable, GroupIsLive, InvalidArgument, NotOwner, PartitionLost, UnknownTopic
from kafkalog.net.control import ControlConnection
from kafkalog.wire import broker_pb2 as pb
from tests.between import ahead
from tests.kafkalog.cli.command_line import KAFKALOG, Ran, feed, running
from tests.threads import join_all
from tests.waiting import pending_signals, suspend, waited_for


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


@pytest.mark.parametrize("standard_input", ["pipe", "terminal"])
@pytest.mark.parametrize("limit_is_known", [True, False])
def test_a_line_that_is_too_large_is_named_and_ends_produce_while_no_other_line_comes(
    topic: str, cluster: LocalCluster, limit_is_known: bool, standard_input: str
) -> None:
    """By the producer before it is sent, or by a broker whose limit was lowered since."""
    where = TopicPartition(topic, 0)
    reading, writing = os.pipe() if standard_input == "pipe" else pty.openpty()[::-1]
    command = [*KAFKALOG, "produce", topic, "--partition", "0", "--bootstrap", cluster.bootstrap_servers]
    with Admin(cluster.bootstrap_servers) as admin:

        def lower() -> None:
            admin.alter_topic(topic, set={"max.message.bytes": 1024})

        try:
            if limit_is_known:
                lower()
            with subprocess.Popen(command, stdin=reading, stderr=subprocess.PIPE) as process:
                os.write(writing, b"small\n")
                waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 1)
                if not limit_is_known:
                    lower()
                os.write(writing, b"large" * 500 + b"\n")
                try:
                    assert process.wait(60) == 1
                finally:
                    process.kill()
                assert process.stderr is not None
                told = process.stderr.read().decode()
        finally:
            os.close(reading)
            os.close(writing)
        assert re.fullmatch(
            "kafkalog: line 2 of the input: .*; the first line is acknowledged"
            + ("; the last 1 of 2 lines read from the pipe may be missing\n" if standard_input == "pipe" else "\n"),
            told,
        )
        assert admin.list_offsets({where: "latest"})[where].offset == 1


def test_produce_asks_for_no_more_lines_once_one_has_failed(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = TopicPartition(topic, 0)
    reading, writing = os.pipe()
    with Admin(cluster.bootstrap_servers) as admin, open(reading) as stdin, open(writing, "wb", buffering=0) as pipe:

        def write() -> None:
            pipe.write(b"small\n")
            waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 1)
            admin.alter_topic(topic, set={"max.message.bytes": 20_000})  # which the producer does not know yet
            pipe.write(b"large" * 10_000 + b"\n")
            with suppress(BrokenPipeError):
                while True:
                    pipe.write(b"more\n")

        writer = threading.Thread(target=write)
        writer.start()
        monkeypatch.setattr(sys, "stdin", stdin)
        ran = Ran(capfdbinary, "produce", topic, "--partition", "0")
        stdin.close()
        writer.join(60)
        assert not writer.is_alive()
    ran.fails_with("line 2 of the input: ")


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
        ([topic, "--config", "acks=2"], "acks='2' is not valid"),
        ([f"{topic}-not"], f"there is no topic '{topic}-not'"),
    ):
        feed(monkeypatch, b"a\n")
        Ran(capfdbinary, "produce", *arguments).fails_with(sentence)
        assert sys.stdin.buffer.read() == b"a\n"  # it fails before the first line is read


def test_a_group_continues_where_it_committed(
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
def test_a_group_continues_where_it_began_in_partitions_that_it_had_not_come_to(
    topic: str,
    cluster: LocalCluster,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    begin: list[str],
) -> None:
    group = f"stopped.early.{len(begin)}"
    consumers = subscribing(monkeypatch)

    def showing(message: Message) -> bytes:
        one = consumers[-1]  # where the other partition starts is looked up meanwhile
        waited_for(lambda: not one.awaited() or bool(membership_of(one).callbacks))
        return b"%b\n" % (message.value or b"")

    monkeypatch.setattr(records, "_line_of", lambda *_: showing)
    with Producer(cluster.bootstrap_servers) as producer, Admin(cluster.bootstrap_servers) as admin:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=number % 2).result(60)
        if not begin:
            with closing(Cluster(cluster.bootstrap_servers)) as client:  # the topic is not new to the group
                member = pb.GroupMember(member="m", topics=[topic], session_timeout_ms=10_000)
                client.call("JoinGroup", pb.JoinGroupRequest(group=group, member=member, assignor="sticky"))
                client.call("LeaveGroup", pb.LeaveGroupRequest(group=group, member="m"))
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


def test_a_job_that_exits_at_the_end_begins_where_its_first_run_ended_though_it_showed_nothing(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    shown, said = [], []
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(3):
            producer.send(topic, b"%d" % number, partition=number % 2).result(60)
            ran = Ran(capfdbinary, "consume", topic, "--group", "nightly", "--exit-at-end")
            assert ran.code == 0
            shown.append(ran.out.split())
            said.append(ran.err)
    assert shown == [[], ["1"], ["2"]]
    begins = "it begins at the end (--from-beginning begins at the start)"
    assert said == [f"kafkalog: group nightly has no offset in these topics: {begins}\n", "", ""]


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

    monkeypatch.setattr(records, "_line_of", lambda *_: interrupt)
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


def test_a_broker_that_is_away_hides_no_other_ones_partitions(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=2) as own, Admin(own.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", own.bootstrap_servers)
        away = admin.create_topic("t", partitions=2).partitions[1].leader
        with Producer(own.bootstrap_servers) as producer:
            for partition in (0, 1):
                producer.send("t", b"in %d" % partition, partition=partition)
        next(each for each in own.brokers if each.broker_id == away).stop()
        waited_for(lambda: len(admin.describe_cluster().brokers) == 1)
        for until in (["--exit-at-end"], ["--max-messages", "1"], ["--exit-at-end", "--group", "readers"]):
            ran = Ran(capfdbinary, "consume", "t", "--from-beginning", *until)
            ran.fails_with(f"t-1: its leader, broker {away}, is not registered in the cluster")
            assert ran.out == "in 0\n"


def test_a_member_reads_on_when_a_broker_that_was_away_is_back(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Message] = []
    looks = list[object]()
    with LocalCluster(brokers=2) as own, Admin(own.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", own.bootstrap_servers)
        away = admin.create_topic("t", partitions=2).partitions[1].leader
        broker = next(each for each in own.brokers if each.broker_id == away)
        send(own, "t", range(2))

        def showing(message: Message) -> bytes:
            shown.append(message)
            if len(shown) == 2:
                broker.stop()
                monkeypatch.setattr(records, "readable", looking)
            if message.value == b"3":
                signal.raise_signal(signal.SIGINT)
            return b"%b\n" % (message.value or b"")

        def looking(*given: Any, **how: Any) -> Any:
            looks.append(given)
            if len(looks) == 2:  # the first was in vain
                broker.start()
                send(own, "t", [2, 3])
            return readable(*given, **how)

        monkeypatch.setattr(Consumer, "__init__", partialmethod(Consumer.__init__, retry_timeout_ms=500))
        monkeypatch.setattr(records, "_line_of", lambda *_: showing)
        monkeypatch.setattr(records, "_LOOK_SECONDS", 0.0)
        ran = Ran(capfdbinary, "consume", "t", "--group", "readers", "--from-beginning")
    said = [line for line in ran.err.splitlines() if line.startswith("kafkalog: ")]
    assert (ran.code, len(said), said[-1]) == (0, 2, "kafkalog: t-1 is served again"), ran.err
    assert "t-1" in said[0]
    assert [message.offset for message in shown if message.partition == 1] == [0, 1]


def test_a_member_reads_a_partition_that_was_not_served_when_it_got_it(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(2))
    where, looks = TopicPartition(topic, 1), itertools.count(1)

    def looking(admin: Admin, partitions: Iterable[TopicPartition], **how: Any) -> Any:
        served, failed = readable(admin, partitions, **how)
        if next(looks) <= 3 and where in served:  # at first, in `on_assigned`, and once in vain
            del served[where]
            failed[where] = PartitionLost(partition=str(where), reason="gone", broker_id=0, topic=topic, number=1)
        return served, failed

    def showing(message: Message) -> bytes:
        if message.partition == 1:
            signal.raise_signal(signal.SIGINT)
        return b"%b\n" % (message.value or b"")

    monkeypatch.setattr(records, "_line_of", lambda *_: showing)
    monkeypatch.setattr(records, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(records, "readable", looking)
    ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning")
    lost, served = ran.err.splitlines()
    assert (ran.code, served, next(looks)) == (0, f"kafkalog: {where} is served again", 5)
    assert f"partition {where} is lost: gone" in lost
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(topic)[where] == 0, "where it began to read"


def test_a_commit_that_reaches_no_broker_ends_no_member(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(4))
    commit = Membership.commit
    failed: list[Any] = []

    def failing(membership: Membership, offsets: Any, epochs: Any) -> None:
        if any(offsets.values()) and len(failed) < 2:
            failed.append(offsets)
            raise BrokerUnreachable(address="it", reason="it is away")
        commit(membership, offsets, epochs)

    monkeypatch.setattr(Membership, "commit", failing)
    monkeypatch.setattr(records, "_COMMIT_EVERY", 1)
    ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning", "--max-messages", "4")
    assert (ran.code, len(ran.out.splitlines()), len(failed)) == (0, 4, 2), ran.err
    with Admin(cluster.bootstrap_servers) as admin:
        assert sum(admin.committed(topic).values()) == 4


def test_a_topic_that_is_deleted_as_it_is_assigned_ends_no_member(topic: str, cluster: LocalCluster) -> None:
    gone = TopicPartition(f"{topic}.gone", 0)
    with Admin(cluster.bootstrap_servers) as admin:
        served, failed = readable(admin, [gone, TopicPartition(topic, 0)], without_gone=True)
        assert (list(served), failed) == ([TopicPartition(topic, 0)], {})
        assert readable(admin, [gone], without_gone=True) == ({}, {})
        assert readable(admin, [TopicPartition(topic, 1000)], without_gone=True) == ({}, {}), "it was made anew"
        with pytest.raises(UnknownTopic):
            readable(admin, [gone])


def test_brokers_that_hang_are_waited_for_once_and_together(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=3) as own, Admin(own.bootstrap_servers) as admin:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", own.brokers[0].address)
        created = admin.create_topic("t", partitions=3, replication_factor=1)
        leader_of = [partition.leader for partition in created.partitions]
        with Producer(own.bootstrap_servers) as producer:
            for partition, leader in enumerate(leader_of):
                producer.send("t", b"in %d" % leader, partition=partition)
        asked: list[int] = []
        under_way: list[int] = []
        together = 0
        connect = ControlConnection.connect

        def noted(control: ControlConnection) -> Any:
            nonlocal together
            under_way.append(control._port)
            together = max(together, len(under_way))
            try:
                return connect(control)
            except BrokerUnreachable:
                asked.append(control._port)
                raise
            finally:
                under_way.remove(control._port)

        monkeypatch.setattr(ControlConnection, "connect", noted)
        hung = [each.pid for each in own.brokers if each.broker_id != 0 and each.pid is not None]
        for pid in hung:
            suspend(pid)
        try:
            ran = Ran(capfdbinary, "consume", "t", "--from-beginning", "--exit-at-end")
        finally:
            for pid in hung:
                os.kill(pid, signal.SIGCONT)
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "in 0\n", 2)
        for partition, leader in enumerate(leader_of):
            assert not leader or f"kafkalog: t-{partition}: its leader, broker {leader}, " in ran.err
        assert (len(asked), together) == (2, 2), asked


def test_a_topic_created_again_as_consume_starts_is_not_read_to_the_ends_of_the_old_one(
    filled: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assign = Consumer.assign

    def made_anew(consumer: Consumer, starts: dict[TopicPartition, Any]) -> None:
        monkeypatch.setattr(Consumer, "assign", assign)
        with Admin(cluster.bootstrap_servers) as admin:
            admin.delete_topic(filled)
            admin.create_topic(filled, partitions=2)
        consumer.assign(starts)

    monkeypatch.setattr(Consumer, "assign", made_anew)
    ran = Ran(capfdbinary, "consume", filled, "--from-beginning", "--exit-at-end")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


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
def test_a_member_goes_on_in_the_topic_that_is_made_anew_and_commits_nothing_of_the_old_one(
    topic: str,
    cluster: LocalCluster,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
    made_anew: bool,
) -> None:
    group = f"of.the.old.one.{partitions}"
    shown: list[bytes] = []

    def fill(admin: Admin, word: str) -> None:
        admin.create_topic(topic, partitions=partitions)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(30):
                producer.send(topic, f"{word}{number}".encode(), partition=number % partitions)

    def delete(message: Message) -> bytes:
        value = message.value or b""
        shown.append(value)
        if len(shown) == 5:
            admin.delete_topic(topic)
            if made_anew:
                fill(admin, "new")
        if sum(each.startswith(b"new") for each in shown) == 30:
            signal.raise_signal(signal.SIGINT)
        return value + b"\n"

    monkeypatch.setattr(records, "_line_of", lambda *_: delete)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topic(topic)
        fill(admin, "old")
        ends = () if made_anew else ("--exit-at-end",)
        ran = Ran(capfdbinary, "consume", topic, "--group", group, "--from-beginning", *ends)
        assert ran.code == 0, ran.err
        new = [value for value in shown if value.startswith(b"new")]
        assert sorted(new) == sorted(f"new{number}".encode() for number in range(30) if made_anew)
        written = 29 if made_anew else 0  # Ctrl-C came before the last one was
        assert sum(admin.committed(group).values()) == written


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


def test_a_reader_that_goes_away_has_moved_a_group_by_what_it_read_and_consume_says_how_much(
    topic: str, cluster: LocalCluster
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(20_000):
            producer.send(topic, b"%d" % number, partition=0)
    consume = f"consume {topic} --group {topic} --from-beginning"
    command = f"{' '.join(KAFKALOG)} {consume} | head -n 2; exit ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, text=True)
    assert (piped.returncode, piped.stdout) == (0, "0\n1\n")
    with Admin(cluster.bootstrap_servers) as admin:
        committed = admin.committed(topic)[TopicPartition(topic, 0)]
    assert piped.stderr == (
        f"kafkalog: the reader of the pipe has ended, and group {topic} goes on after the {committed} records that it "
        "read, shown or not; --max-messages stops after an exact number\n"
    )


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
    def read(line: bytes, separator: bytes | None) -> tuple[bytes | None, bytes | None]:
        record = records._from_line(line, 7, separator, null=None)
        return record.key, record.value

    assert read(b"a::b::c", b"::") == (b"a", b"b::c")
    assert read(b"a::b", None) == (None, b"a::b")
    assert read(b"::", b"::") == (b"", b"")
    with pytest.raises(InvalidArgument, match="line 7"):
        read(b"ab", b"::")


def test_produce_counts_at_its_end_and_shows_a_bar_on_a_terminal_only(topic: str) -> None:
    command = [*KAFKALOG, "produce", topic]
    piped = subprocess.run(command, input=b"a\n" * 5000, capture_output=True, timeout=60)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b"", f"sent 5000 records to {topic}\n".encode())
    piped = subprocess.run([*command, "-q"], input=b"a\n", capture_output=True, timeout=60)
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


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_once_the_pipe_is_read_an_interrupt_does_what_it_did_before(
    monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    others = signal.signal(signal.SIGINT, signal.default_int_handler)  # Spark's, when a test before this one started it
    reading, writing = os.pipe()
    try:
        with open(reading) as stdin, open(writing, "w"):
            monkeypatch.setattr(sys, "stdin", stdin)
            with LineReader(reading) as lines, records._reading_a_pipe_to_its_end(lines):
                assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                if is_interrupted:
                    signal.raise_signal(signal.SIGINT)
                    with pytest.raises(KeyboardInterrupt):
                        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, others)


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
            process.send_signal(number)  # the first is left to who writes into the pipe
            assert b"reading what is in the pipe" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
            told = process.stderr.read().strip().decode()
        sent = admin.list_offsets({where: "latest"})[where].offset or 0
        assert sent > 2000
        left = "" if sent == 3000 else f"; the last {3000 - sent} of 3000 lines read from the pipe may be missing"
        assert told == f"kafkalog: interrupted; the first {sent} lines are acknowledged{left}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_patient", [True, False])
def test_ctrl_c_leaves_nothing_in_a_pipe_that_whoever_wrote_it_counts_as_done(
    cluster: LocalCluster, topic: str, is_patient: bool, number: signal.Signals
) -> None:
    where = TopicPartition(topic, 0)
    command = [*KAFKALOG, "produce", topic, "--partition", "0", "--bootstrap", cluster.bootstrap_servers]
    with (
        Admin(cluster.bootstrap_servers) as admin,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"before\n")
        process.stdin.flush()
        waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 1)
        process.send_signal(number)
        assert b"another Ctrl-C ends at once" in process.stderr.readline()
        if number == signal.SIGHUP:
            process.send_signal(number)  # a terminal that closes sends several
        process.stdin.write(b"after\n" * 20_000)  # more than a pipe holds
        process.stdin.flush()
        if is_patient:
            process.stdin.close()
            assert process.wait(60) == 0
            assert process.stderr.read() == b"sent 20001 records to %b\n" % topic.encode()
            assert admin.list_offsets({where: "latest"})[where].offset == 20_001
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 1
            assert b"kafkalog: interrupted; the first " in process.stderr.read()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("comes", ["before a hang-up", "with a hang-up", "twice"])
def test_an_interrupt_cuts_no_line_and_a_second_one_ends_at_once(
    cluster: LocalCluster, topic: str, comes: str, unbuffered: str
) -> None:
    """The reader would take what is there of the line for a record."""
    value = b"x" * 100_000
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(20):
            producer.send(topic, value, partition=0)
    command = [*KAFKALOG, "consume", topic, "--from-beginning", "--bootstrap", cluster.bootstrap_servers]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([*command, "--group", topic], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        waited_for(lambda: bytes_in(pipe) == 65_536)  # it is full, amid a line
        if comes == "with a hang-up":
            suspend(process.pid)
        process.send_signal(signal.SIGINT)
        if comes != "with a hang-up":
            waited_for(lambda: not pending_signals(process.pid))
        process.send_signal(signal.SIGHUP)  # a terminal that is closed sends it too, more than once
        process.send_signal(signal.SIGCONT)
        if comes == "twice":
            waited_for(lambda: not pending_signals(process.pid))
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 1
            return
        lines = process.stdout.read().split(b"\n")
        assert process.wait(60) == 0
    assert lines.pop() == b"" and set(lines) == {value}
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(topic)[TopicPartition(topic, 0)] == len(lines)


def bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_the_group_of_a_consume_is_reset_once_it_has_ended(cluster: LocalCluster, topic: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(3):
            producer.send(topic, b"x", partition=0)
    where = TopicPartition(topic, 0)
    with (
        running("consume", topic, "--from-beginning", "--group", topic) as process,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["x\n"] * 3
        waited_for(lambda: admin.committed(topic).get(where) == 3)
        with pytest.raises(GroupIsLive, match="has a live member"):
            admin.reset_offsets(topic, {where: 1})
        with pytest.raises(GroupIsLive, match="--force does not help against consumers"):
            admin.reset_offsets(topic, {where: 1}, force=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert admin.committed(topic)[where] == 3
        admin.reset_offsets(topic, {where: 1})  # it has left: nobody waits for its lease
        assert admin.committed(topic)[where] == 1


# --- members of a group --------------------------------------------------------------------------------------------


def send(cluster: LocalCluster, topic: str, numbers: Iterable[int], partition: int | None = None) -> None:
    """Numbers as values, the even ones to partition 0, the odd ones to 1, unless to a given one."""
    with Producer(cluster.bootstrap_servers) as producer:
        for number in numbers:
            producer.send(topic, b"%d" % number, partition=number % 2 if partition is None else partition)


def owners(admin: Admin, group: str) -> list[int]:
    """How many partitions each member owns, in the order in which they joined."""
    return [len(member.owned) for member in admin.describe_group(group).members]


def begun(admin: Admin, group: str, *counts: int) -> None:
    """Wait until members own so many partitions."""
    waited_for(
        lambda: group in [each.name for each in admin.groups()] and owners(admin, group) == list(counts),
        seconds=90,  # processes start slowly on a busy machine
        otherwise=f"the members of {group} never owned {counts} partitions",
    )


def line_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def subscribing(monkeypatch: pytest.MonkeyPatch) -> list[Consumer]:
    """The consumers that subscribe from now on, in this order."""
    consumers, subscribe = list[Consumer](), Consumer.subscribe

    def noted(consumer: Consumer, *given: Any, **callbacks: Any) -> None:
        consumers.append(consumer)
        subscribe(consumer, *given, **callbacks)

    monkeypatch.setattr(Consumer, "subscribe", noted)
    return consumers


def membership_of(consumer: Consumer) -> Membership:
    assert consumer._membership is not None
    return consumer._membership


def test_two_members_share_a_topic_and_one_that_ends_leaves_its_part_to_the_other(
    topic: str, cluster: LocalCluster
) -> None:
    command = ["consume", topic, "--group", topic, "--from-beginning"]
    send(cluster, topic, range(10))
    with Admin(cluster.bootstrap_servers) as admin, running(*command) as first, running(*command) as second:
        both = (first, second)
        begun(admin, topic, 1, 1)
        # Those from before may have been shown by whoever came first, or by both.
        seen: list[set[int]] = [set(), set()]
        send(cluster, topic, range(10, 30))
        for process, numbers in zip(both, seen, strict=True):
            while len({number for number in numbers if number >= 10}) < 10:
                numbers.add(line_of(process))
        for numbers in seen:
            new = {number for number in numbers if number >= 10}
            assert len({number % 2 for number in new}) == 1, seen
        assert seen[0] | seen[1] == set(range(30))
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
        begun(admin, topic, 2)
        send(cluster, topic, range(30, 40))
        assert {line_of(first) for _ in range(10)} == set(range(30, 40))  # nothing of the other's is shown again
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 0
        assert admin.describe_group(topic).members == ()
        assert admin.committed(topic) == {TopicPartition(topic, 0): 20, TopicPartition(topic, 1): 20}


def test_a_member_whose_reader_stops_keeps_its_part_until_it_ends_and_loses_no_line_of_it(
    topic: str, cluster: LocalCluster
) -> None:
    """Its pipe is full, so it cannot come to the end of what it has in hand."""
    count, width = 2_000, 200
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(count):
            producer.send(topic, b"%0*d" % (width - 1, number), partition=number % 2)
    command = ["consume", topic, "--group", topic, "--from-beginning"]
    with Admin(cluster.bootstrap_servers) as admin, running(*command) as stopped:
        assert stopped.stdout is not None and stopped.stderr is not None
        pipe = stopped.stdout.fileno()
        waited_for(lambda: bytes_in(pipe) > 60_000)
        read = {int(line) for line in os.read(pipe, 10 * width).splitlines()}
        assert len(read) == 10
        with running(*command, "--exit-at-end") as other:
            waited_for(lambda: len(admin.describe_group(topic).awaited()) == 1)
            [waits] = admin.describe_group(topic).awaited()
            assert [member.name for member in admin.describe_group(topic).members] == [waits.owner, waits.member]
            with running(*command, "--exit-at-end") as third:  # there is no partition for it, so it is at the end
                assert (*third.communicate(timeout=60), third.returncode) == ("", "", 0)
            assert other.poll() is None
            stopped.stdout.close()
            assert stopped.wait(60) == 0
            assert f"group {topic} goes on after the 10 records that it read" in stopped.stderr.read()
            out, err = other.communicate(timeout=60)
            assert (other.returncode, err) == (0, "")
        shown = [int(line) for line in out.splitlines()]
        assert len(shown) == len(set(shown))
        assert read | set(shown) == set(range(count))
        assert not read & set(shown)  # what it has read was committed
        assert sum(admin.committed(topic).values()) == count


def test_a_member_exits_at_the_end_of_its_share_once_it_has_it(topic: str, cluster: LocalCluster) -> None:
    send(cluster, topic, range(10))
    group = ["consume", topic, "--group", topic, "--from-beginning"]
    with Admin(cluster.bootstrap_servers) as admin, running(*group) as first:
        assert {line_of(first) for _ in range(10)} == set(range(10))
        waited_for(lambda: sum(admin.committed(topic).values()) == 10)
        with running(*group, "--exit-at-end") as second:
            out, err = second.communicate(timeout=60)
            assert (second.returncode, out, err) == (0, "", "")
        # Two joins and a leave: it had its share.
        assert admin.describe_group(topic).generation == 3
        begun(admin, topic, 2)
        send(cluster, topic, range(10, 14))
        assert {line_of(first) for _ in range(4)} == set(range(10, 14))


def test_members_that_exit_at_the_end_show_every_record(topic: str, cluster: LocalCluster) -> None:
    send(cluster, topic, range(1000))
    command = ["consume", topic, "--group", topic, "--from-beginning", "--exit-at-end"]
    with running(*command) as first, running(*command) as second, running(*command) as third:  # for two partitions
        shown: list[str] = []
        for process in (first, second, third):
            out, err = process.communicate(timeout=60)
            late = f"kafkalog: --from-beginning is not used where group {topic} has offsets"  # the others have ended
            assert process.returncode == 0 and (not err or err.startswith(late)), err
            shown += out.split()
    assert {int(number) for number in shown} == set(range(1000))
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(topic) == {TopicPartition(topic, 0): 500, TopicPartition(topic, 1): 500}


def test_a_partition_is_handed_over_with_its_place_also_if_nothing_of_it_was_shown(
    topic: str, cluster: LocalCluster
) -> None:
    """Or its next owner would begin at its end by then."""
    send(cluster, topic, range(10))
    with Admin(cluster.bootstrap_servers) as admin, running("consume", topic, "--group", topic) as first:
        begun(admin, topic, 2)
        with running("consume", topic, "--group", topic) as second:
            begun(admin, topic, 1, 1)
            assert list(admin.committed(topic).values()) == [5]
            first.send_signal(signal.SIGINT)
            assert first.wait(60) == 0
            assert list(admin.committed(topic).values()) == [5, 5]
            begun(admin, topic, 2)
            send(cluster, topic, [10, 11])
            assert {line_of(second) for _ in range(2)} == {10, 11}


def test_what_was_shown_of_a_partition_is_written_and_committed_before_another_member_gets_it(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(10), partition=1)
    lines, consumers = itertools.count(1), subscribing(monkeypatch)
    found: list[Message] = []
    committed: list[tuple[Any, bytes]] = []
    commit = Consumer.commit

    def noting(consumer: Consumer, done: Any = None) -> None:
        committed.append((done, os.pread(1, 100, 0)))
        commit(consumer, done)

    with Admin(cluster.bootstrap_servers) as admin, Consumer(cluster.bootstrap_servers, topic) as other:

        def read_and_send() -> None:
            found.extend(other.messages(1, timeout=60))
            send(cluster, topic, [10], partition=0)  # the command's last

        reading = threading.Thread(target=read_and_send)

        def joined(message: Message) -> bytes:
            if next(lines) == 5:
                other.subscribe(topic)
                waited_for(lambda: len(admin.describe_group(topic).awaited()) == 1)
                reading.start()
                due = membership_of(consumers[0]).callbacks.due
                # Before the command sees that nothing more comes, and writes what it has shown.
                ahead(monkeypatch, consumers[0]._fetcher, "next", lambda: waited_for(lambda: due() is not None))
            return b"%b\n" % (message.value or b"")

        monkeypatch.setattr(Consumer, "commit", noting)
        monkeypatch.setattr(records, "_line_of", lambda *_: joined)
        monkeypatch.setattr(records, "_COMMIT_SECONDS", 1000.0)
        ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning", "--max-messages", "6")
        join_all([reading], 60)
    assert ran.out.split() == ["0", "1", "2", "3", "4", "10"]
    assert [(message.partition, message.offset) for message in found] == [(1, 5)]
    assert ({TopicPartition(topic, 1): 5}, b"0\n1\n2\n3\n4\n") in committed, "each with what was written by then"


def test_a_lease_that_ends_before_a_commit_ends_no_consume(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(10))
    commit, refused = Consumer.commit, list[object]()

    def refuse_one(consumer: Consumer, done: Any = None) -> None:
        if not refused:
            refused.append(done)
            raise NotOwner(member="m", partition=f"{topic}-0", group=topic, owner="")
        commit(consumer, done)

    monkeypatch.setattr(Consumer, "commit", refuse_one)
    ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning", "--exit-at-end")
    assert (ran.code, ran.err, len(refused)) == (0, "", 1)
    assert sorted(map(int, ran.out.split())) == list(range(10))
    with Admin(cluster.bootstrap_servers) as admin:
        assert list(admin.committed(topic).values()) == [5, 5]


def test_a_lease_that_ends_while_partitions_are_begun_ends_no_consume(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(10))
    consumers, looks = subscribing(monkeypatch), itertools.count(1)

    def losing(*given: Any, **how: Any) -> Any:
        found = readable(*given, **how)
        if next(looks) == 2:  # in `on_assigned`
            membership, is_waiting = consumers[0]._membership, threading.Event()
            assert membership is not None
            ahead(monkeypatch, membership.callbacks, "wait_returned", is_waiting.set)
            membership._lease.end = -1.0
            waited_for(lambda: is_waiting.is_set() or not consumers[0].assignment())
        return found

    monkeypatch.setattr(records, "readable", losing)
    ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning", "--exit-at-end")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(map(int, ran.out.split())) == list(range(10))


@pytest.mark.timeout(60)
def test_a_partition_that_was_lost_stands_in_the_way_of_no_commit(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, topic, range(10))
    lines, consumers = itertools.count(1), subscribing(monkeypatch)
    with Admin(cluster.bootstrap_servers) as admin, Consumer(cluster.bootstrap_servers, topic) as other:

        def losing(message: Message) -> bytes:
            if next(lines) == 2:
                other.subscribe(topic)
                waited_for(lambda: len(admin.describe_group(topic).awaited()) == 1)
                membership_of(consumers[0])._lease.end = -1.0
            return b"%b\n" % (message.value or b"")

        monkeypatch.setattr(records, "_line_of", lambda *_: losing)
        ran = Ran(capfdbinary, "consume", topic, "--group", topic, "--from-beginning", "--exit-at-end")
        assert (ran.code, ran.err) == (0, "")
        assert 5 in admin.committed(topic).values()  # of the partition that it has got again


def test_a_member_that_waits_for_the_reader_of_its_last_line_hands_partitions_over(
    topic: str, cluster: LocalCluster
) -> None:
    send(cluster, topic, range(10))
    command = ["consume", topic, "--group", topic, "--from-beginning"]
    with Admin(cluster.bootstrap_servers) as admin, running(*command, "--exit-at-end") as first:
        assert first.stdout is not None
        pipe = first.stdout.fileno()
        waited_for(lambda: bytes_in(pipe) == 20)
        with running(*command) as second:
            begun(admin, topic, 1, 1)
            # Nobody has read the lines of the partition that moved: its new owner shows them too.
            assert len({line_of(second) for _ in range(5)}) == 5
            second.send_signal(signal.SIGINT)
            assert second.wait(60) == 0
        send(cluster, topic, range(10, 20))
        begun(admin, topic, 2)
        # What it gets back meanwhile it does not read, but hands over again.
        with running(*command, "--exit-at-end") as third:
            out, err = third.communicate(timeout=60)
            assert (third.returncode, err) == (0, "") and set(range(10, 20)) & set(map(int, out.split()))
        begun(admin, topic, 2)
        assert first.poll() is None
        out, err = first.communicate(timeout=60)
        assert (first.returncode, err, sorted(map(int, out.split()))) == (0, "", list(range(10)))
        assert sorted(admin.committed(topic).values()) == [5, 10]


def test_a_topic_that_comes_to_match_the_pattern_of_a_member_is_shown(topic: str, cluster: LocalCluster) -> None:
    other = f"{topic}-other"
    command = ["consume", "--pattern", f"{topic}.*", "--group", topic]
    with Admin(cluster.bootstrap_servers) as admin, running(*command) as process:
        begun(admin, topic, 2)
        admin.create_topic(other, partitions=1)
        send(cluster, other, range(3), partition=0)
        assert [line_of(process) for _ in range(3)] == [0, 1, 2]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        admin.delete_topic(other)


def test_a_member_waits_for_the_first_topic_that_matches_its_pattern(topic: str, cluster: LocalCluster) -> None:
    later = f"{topic}-later"
    with running("consume", "--pattern", f"{topic}-.*", "--group", topic) as process:
        assert process.stderr is not None
        no_match = f"no topic name matches the whole of '{topic}-.*'"
        assert process.stderr.readline() == f"kafkalog: {no_match} yet: waiting for one\n"
        with Admin(cluster.bootstrap_servers) as admin:
            begun(admin, topic, 0)
            admin.create_topic(later, partitions=1)
            send(cluster, later, range(3), partition=0)
            assert [line_of(process) for _ in range(3)] == [0, 1, 2]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            admin.delete_topic(later)


@pytest.mark.parametrize("options", [["--group", "at.end", "--exit-at-end"], ["--from-beginning"]])
def test_no_topic_that_matches_a_pattern_is_a_failure_where_none_is_waited_for(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], options: list[str]
) -> None:
    ran = Ran(capfdbinary, "consume", "--pattern", f"{topic}-.*", *options)
    ran.fails_with(f"no topic name matches the whole of '{topic}-.*'")


def test_a_stream_s_group_is_not_joined(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.client.consumer.membership._STREAMS_END_SECONDS", 0.0)  # it has not just ended
    client = Cluster(cluster.bootstrap_servers)
    keep_member(client, topic, GroupMember("stream-1", "", "here", ""), {})
    ran = Ran(capfdbinary, "consume", topic, "--group", topic)
    ran.fails_with(f"group '{topic}' has members of the kind stream, among them stream-1 on here")
    leave_group(client, topic, "stream-1")
    client.close()


def test_records_that_come_steadily_are_written_and_committed_in_time(cluster: LocalCluster, topic: str) -> None:
    """Each sooner than the command has waited for one: it never finds that none comes."""
    where = TopicPartition(topic, 0)
    stopped = threading.Event()

    def send() -> None:
        with Producer(cluster.bootstrap_servers) as producer:
            while not stopped.wait(0.05):
                producer.send(topic, b"x", partition=0)
                producer.flush()

    sending = threading.Thread(target=send)
    command = ["consume", topic, "--group", topic, "--from-beginning", "--bootstrap", cluster.bootstrap_servers]
    with running(*command) as process, Admin(cluster.bootstrap_servers) as admin:
        sending.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "x\n"
            waited_for(lambda: admin.committed(topic).get(where, 0) > 0)
        finally:
            stopped.set()
            join_all([sending], 60)


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


# --- where consume starts and ends ---------------------------------------------------------------------------------


@pytest.fixture
def filled(topic: str, cluster: LocalCluster) -> str:
    """The topic with records 0 to 4 in partition 0 and 5 to 9 in partition 1, a second apart from 1970 on."""
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=number // 5, timestamp_us=number * 1_000_000)
    return topic


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--from-beginning"], "0123456789"),
        (["--offset", "earliest"], "0123456789"),
        (["--offset", "3"], "3489"),
        (["--offset", "5"], ""),
        (["--offset", "3", "--partition", "1"], "89"),
        (["--from-beginning", "--partition", "1", "--partition", "0"], "0123456789"),
        (["--timestamp", "3000"], "3456789"),
        (["--timestamp", "1970-01-01T00:00:08"], "89"),
        (["--timestamp", "2099-01-01"], ""),
        (["--from-beginning", "--partition", "0", "--max-messages", "2"], "01"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_consume_starts_where_it_is_told_and_exits_at_the_end(
    filled: str, arguments: list[str], expected: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ran = Ran(capfdbinary, "consume", filled, "--exit-at-end", *arguments)
    assert (ran.code, ran.err, "".join(sorted(ran.out.split()))) == (0, "", expected)


def test_a_place_beyond_the_end_is_an_error_also_where_the_end_is_the_limit(
    filled: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ran = Ran(capfdbinary, "consume", filled, "--exit-at-end", "--offset", "99", "--partition", "0")
    assert (ran.code, ran.out) == (1, "")
    assert f"offset 99 of {filled}-0 is outside [0, 5]" in ran.err


def test_the_end_is_where_partitions_ended_as_consume_started(
    filled: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:

        def more(message: Message) -> bytes:
            producer.send(filled, b"more", partition=message.partition).result(30)
            return b"%b\n" % (message.value or b"")

        monkeypatch.setattr(records, "_line_of", lambda *_: more)
        ran = Ran(capfdbinary, "consume", filled, "--from-beginning", "--exit-at-end")
    assert sorted(ran.out.split()) == [str(number) for number in range(10)]


def test_a_group_exits_at_the_end_and_has_committed_it(
    filled: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    group = f"{filled}.at.end"
    arguments = ["consume", filled, "--group", group, "--exit-at-end"]
    ran = Ran(capfdbinary, *arguments, "--from-beginning")
    assert (len(ran.out.split()), ran.err) == (10, "")
    ran = Ran(capfdbinary, *arguments, "--from-beginning")
    assert (ran.code, ran.out) == (0, "")
    reset = f"kafkalog groups reset {group} --to earliest"
    assert ran.err == f"kafkalog: --from-beginning is not used where group {group} has offsets ({reset})\n"
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(group) == {TopicPartition(filled, 0): 5, TopicPartition(filled, 1): 5}


def test_consume_reads_several_topics_and_those_that_a_pattern_matches_as_a_whole(
    filled: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    other = f"{filled}-other"
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(other, partitions=1)
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send(other, b"other", partition=0)
        arguments = ["--from-beginning", "--exit-at-end", "--format", "json"]
        ran = Ran(capfdbinary, "consume", filled, other, *arguments)
        found = [json.loads(line) for line in ran.out.splitlines()]
        assert sorted(each["topic"] for each in found) == [filled] * 10 + [other]
        assert Ran(capfdbinary, "consume", "--pattern", f"{filled}-o.*", *arguments[:2]).out == "other\n"
        assert len(Ran(capfdbinary, "consume", "--pattern", f"{filled}.*", *arguments).out.splitlines()) == 11
        ran = Ran(capfdbinary, "consume", "--pattern", filled[:-1], *arguments)
        ran.fails_with(f"no topic name matches the whole of '{filled[:-1]}'")
        ran = Ran(capfdbinary, "consume", "--pattern", f"{filled}.*", "--partition", "1", *arguments)
        assert [json.loads(line)["partition"] for line in ran.out.splitlines()] == [1] * 5
        ran = Ran(capfdbinary, "consume", "--pattern", f"{filled}.*", "--partition", "2", *arguments)
        ran.fails_with(f"no topic that matches '{filled}.*' has such a partition")
        ran = Ran(capfdbinary, "consume", filled, other, "--partition", "1", *arguments)
        ran.fails_with(f"topic '{other}' has no partition 1")
        admin.delete_topic(other)


def test_an_offset_outside_of_a_partition_leaves_it_out(
    filled: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(filled, 0): 4})
    ran = Ran(capfdbinary, "consume", filled, "--offset", "2", "--exit-at-end")
    ran.fails_with(f"offset 2 of {filled}-0 is outside [4, 5]")
    assert sorted(ran.out.split()) == ["7", "8", "9"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "say what to read: TOPICs, or a --pattern for their names"),
        (["t", "--pattern", "t.*"], "say what to read: TOPICs, or a --pattern for their names"),
        (["--pattern", "("], "'(' is not a regular expression"),
        (["t", "--from-beginning", "--offset", "3"], "--from-beginning and --offset say different places to start"),
        (["t", "--offset", "3", "--timestamp", "0"], "--offset and --timestamp say different places to start"),
        (
            ["t", "--group", "g", "--offset", "3"],
            "the group has committed, and --offset elsewhere",
        ),
        (["t", "--group", "g", "--timestamp", "0"], "and --timestamp elsewhere"),
        (
            ["t", "--group", "g", "--partition", "0"],
            "--group assigns the partitions to the group's members: leave out --partition",
        ),
        (["t", "--exit-at-end"], "--exit-at-end shows nothing from the end on"),
        (["t", "--exit-at-end", "--offset", "latest"], "--exit-at-end shows nothing from the end on"),
        (["t", "--offset", "-1"], "expected an offset from 0, earliest or latest, not '-1'"),
        (["t", "--offset", "first"], "expected an offset from 0, earliest or latest, not 'first'"),
        (["t", "--timestamp", "noon"], "'noon' is no time"),
        (["t", "--format", "json", "--null", "x"], "leave out --null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], sentence: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ran = Ran(capfdbinary, "consume", *arguments, "--bootstrap", "127.0.0.1:1")
    assert ran.code == 2 and sentence in ran.err and "Traceback" not in ran.err


# --- nulls, headers, JSON ----------------------------------------------------------------------------------------


def test_plain_lines_tell_null_from_empty_and_show_headers(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"k:NULL\n:\nNULL:v\n")
    produce = ["produce", topic, "--partition", "0", "--key-separator", ":", "--null", "NULL"]
    ran = Ran(capfdbinary, *produce, "-H", "a=1", "--header", "a= 2")
    assert (ran.code, ran.out, ran.err) == (0, "", f"sent 3 records to {topic}\n")
    consume = ["consume", topic, "--from-beginning", "--exit-at-end"]
    assert Ran(capfdbinary, *consume).out == "\\N\n\nv\n"
    assert Ran(capfdbinary, *consume, "--format", "key-value", "--null", "-").out == "k\t-\n\t\n-\tv\n"
    assert Ran(capfdbinary, *consume, "--headers").out.splitlines()[2] == "a=1,a= 2\tv"
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, 0): "earliest"})
        found = list(consumer.messages(3))
    assert [(each.key, each.value) for each in found] == [(b"k", None), (b"", b""), (None, b"v")]
    assert found[0].headers == (("a", b"1"), ("a", b" 2"))


BYTES = st.one_of(st.none(), st.binary(max_size=20), st.text(max_size=20).map(str.encode))
NAMES = st.text(st.characters(codec="utf-8"), max_size=10)


@given(BYTES, BYTES, st.lists(st.tuples(NAMES, BYTES), max_size=3), st.integers(-1 << 60, 1 << 60))
def test_what_json_says_of_a_record_is_read_back(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], timestamp_us: int
) -> None:
    message = Message("t", 3, 5, timestamp_us, key, value, tuple(headers))
    line = records._json_line(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert records._from_json(line, 1) == records._Record(value, key, 3, timestamp_us, tuple(headers))


def test_keys_and_values_go_through_plain_lines_with_their_nulls(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the example of produce has it."""
    sent = [(None, b"v"), (b"k", None), (b"", b""), (b"k", b"tab\tin it"), (b"\xff", b"\xfe")]
    with Producer(cluster.bootstrap_servers) as producer:
        for key, value in sent:
            producer.send(topic, value, key, partition=0)
    both = ["--from-beginning", "--exit-at-end", "--partition", "0"]
    lines = Ran(capfdbinary, "consume", topic, *both, "--format", "key-value").out.encode(errors="surrogateescape")
    feed(monkeypatch, lines)
    copied = Ran(capfdbinary, "produce", topic, "--partition", "1", "--key-separator", r"\t", "--null", r"\N")
    assert copied.code == 0, copied.err
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, 1): "earliest"})
        found = [(each.key, each.value) for each in consumer.messages(max_messages=len(sent), timeout=30)]
    assert found == sent


def test_a_header_that_cannot_be_encoded_is_named_with_its_line(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = b'{"value": "v", "headers": [{"key": "\\ud800", "value": "v"}]}'
    feed(monkeypatch, b'{"value": "v"}\n' + bad + b"\n")
    ran = Ran(capfdbinary, "produce", topic, "--json")
    ran.fails_with(
        "line 2 of the input: a header's key has the lone surrogate \\ud800, which UTF-8 cannot encode; "
        "the first line is acknowledged"
    )


def test_a_defect_says_too_which_lines_are_acknowledged(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(line: bytes, number: int, **_: Any) -> Any:
        if line == b"second":
            raise ZeroDivisionError("oh")
        return records._Record(line)

    monkeypatch.setattr(records, "_from_line", broken)
    feed(monkeypatch, b"first\nsecond\n")
    ran = Ran(capfdbinary, "produce", topic)
    ran.fails_with("a defect of kafkalog: ZeroDivisionError: oh (KAFKALOG_DEBUG=1 shows where); the first line is ack")


def test_json_has_no_needless_escapes() -> None:
    line = records._json_line(Message("t", 0, 5, 1_000, "Grüße".encode(), b"", (("ä", b"1"),)))
    assert '"key": "Grüße", "value": "", "headers": [{"key": "ä", "value": "1"}]' in line.decode()


def test_what_consume_prints_as_json_produce_takes(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
        (b"key", b"value", [("h", b"1"), ("h", None), ("b", b"\xfe")]),
        (None, None, []),
        (b"", b"", [("", b"")]),
        (b"\xff", "Grüße\n".encode(), []),
        ("\u2028".encode(), b"\x00\xff", []),
    ]
    copy = f"{topic}-copy"
    with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers) as producer:
        admin.create_topic(copy, partitions=2)
        for number, (key, value, headers) in enumerate(sent):
            producer.send(topic, value, key, partition=1, timestamp_us=number * 1_000_001, headers=headers)
        producer.flush()
        consume = ["--from-beginning", "--exit-at-end", "--format", "json"]
        printed = Ran(capfdbinary, "consume", topic, *consume).out
        feed(monkeypatch, printed.encode())
        ran = Ran(capfdbinary, "produce", copy, "--json")
        assert (ran.code, ran.err) == (0, f"sent {len(sent)} records to {copy}\n")
        again = Ran(capfdbinary, "consume", copy, *consume).out
        assert again == printed.replace(f'"topic": "{topic}"', f'"topic": "{copy}"')
        with Consumer(cluster.bootstrap_servers) as consumer:
            consumer.assign({TopicPartition(copy, 1): "earliest"})
            found = [(each.key, each.value, list(each.headers)) for each in consumer.messages(len(sent))]
        assert found == sent
        feed(monkeypatch, printed.encode())
        assert Ran(capfdbinary, "produce", copy, "--json", "--partition", "0", "-q", "-H", "copied=yes").err == ""
        rows = map(json.loads, Ran(capfdbinary, "consume", copy, "--partition", "0", *consume).out.split("\n")[:-1])
        assert [row["headers"][-1] for row in rows] == [{"key": "copied", "value": "yes"}] * len(sent)
        admin.delete_topic(copy)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"text", "it is not JSON: Expecting value (column 1)"),
        (b"\xff", "it is not JSON: Expecting value (column 1)"),
        (b"[1]", "it is no JSON object"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"{}", "it has no value; a tombstone's is null"),
        (b'{"value": 5}', "value must be a text or null, not 5"),
        (b'{"value": {"a": 1}}', 'value must be a text or null, not {"a": 1}; JSON within it stands in quotes'),
        (b'{"value": "a", "value_base64": "YQ=="}', "it has value and value_base64"),
        (b'{"value_base64": "?"}', "value_base64 is no base64"),
        (b'{"value_base64": null}', "value_base64 is no base64"),
        (b'{"value": "a", "kee": "b"}', "there is no field 'kee'"),
        (
            b'{"value": "a\\ud800"}',
            r"value has the lone surrogate \ud800, which UTF-8 cannot encode; give its bytes as value_base64",
        ),
        (
            b'{"value": "a", "key": "\xc3\xa4\xff"}',
            "key has the byte 0xff, which is not UTF-8; give its bytes as key_base64",
        ),
        (
            b'{"value": "a", "headers": [{"key": "a", "value": "\xfe"}]}',
            "a header's value has the byte 0xfe, which is not UTF-8; give its bytes as value_base64",
        ),
        (
            b'{"value": "a", "headers": [{"key": "\xfe"}]}',
            "a header's key has the byte 0xfe, which is not UTF-8",
        ),
        (b'{"value": "a", "offset": ' + b"1" * 5000 + b"}", "a number in it has too many digits"),
        (b'{"value": "a", "partition": true}', "partition must be a whole number, not true"),
        (b'{"value": "a", "timestamp_us": 1.5}', "timestamp_us must be a whole number, not 1.5"),
        (b'{"value": "a", "headers": {"a": "b"}}', "headers must be like"),
        (b'{"value": "a", "headers": [{"key": 1}]}', "headers must be like"),
        (b'{"value": "a", "headers": [{"key": "a", "vale": "b"}]}', "headers must be like"),
    ],
)
def test_json_that_is_no_record_is_named_with_its_line(line: bytes, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^line 7 of the input: {re.escape(sentence)}"):
        records._from_json(line, 7)


def test_a_line_of_json_that_the_producer_refuses_is_named(
    topic: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition, sentence in (
        (2, f"topic '{topic}' has no partition 2"),
        (-1, f"topic '{topic}' has no partition -1"),
    ):
        feed(monkeypatch, b'{"value": "a"}\n{"value": "b", "partition": %d}\n' % partition)
        ran = Ran(capfdbinary, "produce", topic, "--json")
        ran.fails_with(f"line 2 of the input: {sentence}")
        ran.fails_with("the first line is acknowledged")
    feed(monkeypatch, b'{"value": "a", "timestamp_us": 99999999999999999999}\n')
    Ran(capfdbinary, "produce", topic, "--json").fails_with("line 1 of the input: timestamp_us=9999")
    ran = Ran(capfdbinary, "produce", topic, "--json", "--null", "x")
    assert ran.code == 2 and "leave out --key-separator and --null" in ran.err
