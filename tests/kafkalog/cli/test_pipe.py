"""What `kafkalog consume` commits of lines that it writes into a pipe: real processes, pipes and brokers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.cli.pipe import ReadLines, WrittenPipe
from tests.kafkalog.cli.command_line import KAFKALOG
from tests.waiting import pending_signals, waited_for

LINES = 30_000
"""More than a pipe holds: each has 10 bytes, and a pipe 65,536."""


@pytest.fixture
def full(topic: str, cluster: LocalCluster) -> TopicPartition:
    """A partition with so many records that each contain their own offset."""
    fill(cluster, topic, range(LINES))
    return TopicPartition(topic, 0)


def fill(cluster: LocalCluster, topic: str, numbers: range) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for number in numbers:
            producer.send(topic, b"%09d" % number, partition=0)


@contextmanager
def consuming(partition: TopicPartition, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`kafkalog consume` of a topic, with a group of its name: the process, and the pipe to read from."""
    command = [*KAFKALOG, "consume", partition.topic, "--group", partition.topic]
    with subprocess.Popen([*command, "--from-beginning", *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.fileno()
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def piped(consume: list[str], produce: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """`kafkalog consume ... | kafkalog produce ...`"""
    with (
        subprocess.Popen([*KAFKALOG, "consume", *consume], stdout=subprocess.PIPE) as consuming,
        subprocess.Popen([*KAFKALOG, "produce", *produce], stdin=consuming.stdout, stderr=subprocess.PIPE) as producing,
    ):
        assert consuming.stdout is not None
        consuming.stdout.close()  # produce alone reads
        try:
            yield consuming, producing
        finally:
            for process in (consuming, producing):
                if process.poll() is None:
                    process.kill()


def read(pipe: int, lines: int) -> None:
    """Read that many lines, and not a byte more."""
    left = 10 * lines
    while left:
        data = os.read(pipe, left)
        assert data, "the pipe ended"
        left -= len(data)


def values(cluster: LocalCluster, topic: str) -> list[bytes | None]:
    with Consumer(cluster.bootstrap_servers) as consumer, Admin(cluster.bootstrap_servers) as admin:
        ends = admin.list_offsets({TopicPartition(topic, number): "latest" for number in range(2)})
        consumer.assign(dict.fromkeys(ends, "earliest"))
        count = sum(each.offset or 0 for each in ends.values())
        return [message.value for message in consumer.messages(count)]


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


def test_a_misspelt_destination_loses_no_line(full: TopicPartition, cluster: LocalCluster, admin: Admin) -> None:
    copy = f"{full.topic}.copy"
    admin.create_topic(copy, partitions=2)
    consume = [full.topic, "--group", full.topic, "--from-beginning", "--exit-at-end"]
    with piped(consume, [f"{copy}.not"]) as (consuming, producing):
        assert producing.stderr is not None
        assert producing.wait(60) == 1
        assert producing.stderr.read().endswith(b"; no line is acknowledged\n")
        assert consuming.wait(60) == 0
    assert not admin.committed(full.topic).get(full), "0, or nothing if it ended before it had the partition"
    with piped(consume, [copy]) as (consuming, producing):
        assert (producing.wait(60), consuming.wait(60)) == (0, 0)
    assert sorted(values(cluster, copy)) == [b"%09d" % number for number in range(LINES)]  # type: ignore[type-var]
    assert admin.committed(full.topic)[full] == LINES
    admin.delete_topic(copy)


def test_a_group_that_is_moved_back_as_a_failed_produce_says_loses_no_line(
    full: TopicPartition, cluster: LocalCluster, admin: Admin
) -> None:
    copy = f"{full.topic}.copy"
    admin.create_topic(copy, partitions=2, config={"max.message.bytes": 1024})
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(full.topic, b"large" * 1000, partition=0)
    fill(cluster, full.topic, range(LINES, 2 * LINES))
    consume = [full.topic, "--group", full.topic, "--from-beginning", "--exit-at-end"]
    with piped(consume, [copy]) as (consuming, producing):
        assert producing.stderr is not None
        assert producing.wait(60) == 1
        told = producing.stderr.read().decode()
        assert consuming.wait(60) == 0
    said = re.search(r"the last (\d+) of (\d+) lines read from the pipe may be missing", told)
    assert said is not None, told
    assert admin.committed(full.topic)[full] == int(said[2]) < 2 * LINES
    back = ["groups", "reset", full.topic, "--shift-by", f"-{said[1]}"]
    subprocess.run([*KAFKALOG, *back], check=True, capture_output=True)
    admin.alter_topic(copy, unset=["max.message.bytes"])
    with piped(consume, [copy]) as (consuming, producing):
        assert (producing.wait(60), consuming.wait(60)) == (0, 0)
    assert set(values(cluster, copy)) == {b"%09d" % number for number in range(2 * LINES)} | {b"large" * 1000}
    admin.delete_topic(copy)


@pytest.mark.parametrize("number", [1, 3000, 20_000])
def test_a_reader_that_goes_away_has_read_what_is_committed(full: TopicPartition, admin: Admin, number: int) -> None:
    with consuming(full) as (process, pipe):
        read(pipe, number)
        os.read(pipe, 5)  # and half a line
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
    assert admin.committed(full.topic)[full] == number


def test_a_reader_that_goes_away_while_no_record_comes_ends_consume(topic: str, cluster: LocalCluster) -> None:
    partition = TopicPartition(topic, 0)
    fill(cluster, topic, range(3))
    with consuming(partition) as (process, pipe), Admin(cluster.bootstrap_servers) as admin:
        read(pipe, 2)
        waited_for(lambda: admin.committed(topic).get(partition) == 2)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert admin.committed(topic)[partition] == 2


def test_what_a_slow_reader_reads_is_committed_while_consume_waits_for_records(
    topic: str, cluster: LocalCluster, admin: Admin
) -> None:
    partition = TopicPartition(topic, 0)
    fill(cluster, topic, range(100))
    with consuming(partition) as (process, pipe):
        for number in range(0, 100, 10):
            waited_for(lambda number=number: admin.committed(topic).get(partition) == number)  # type: ignore[misc]
            read(pipe, 10)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert admin.committed(topic)[partition] == 100


def test_nothing_is_committed_that_a_slow_reader_has_not_read(full: TopicPartition, admin: Admin) -> None:
    with consuming(full, "--exit-at-end") as (process, pipe):
        for number in range(1000, LINES + 1, 1000):
            read(pipe, 1000)
            assert admin.committed(full.topic).get(full, 0) <= number
        assert process.wait(60) == 0
    assert admin.committed(full.topic)[full] == LINES


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("end", ["--exit-at-end", "--max-messages", "Ctrl-C"])
def test_consume_ends_once_its_last_line_is_read_or_nobody_is_left_to_read_it(
    topic: str, cluster: LocalCluster, admin: Admin, end: str, is_read: bool
) -> None:
    partition = TopicPartition(topic, 0)
    fill(cluster, topic, range(10))
    arguments = {"--exit-at-end": ["--exit-at-end"], "--max-messages": ["--max-messages", "10"], "Ctrl-C": []}[end]
    with consuming(partition, *arguments) as (process, pipe):
        read(pipe, 9)
        if end == "Ctrl-C":
            waited_for(lambda: admin.committed(topic).get(partition) == 9)
            process.send_signal(signal.SIGINT)
        if is_read:
            read(pipe, 1)
        else:
            assert process.stdout is not None
            process.stdout.close()
        assert process.wait(60) == 0
    assert admin.committed(topic)[partition] == 9 + is_read


def test_a_second_ctrl_c_ends_the_wait_for_a_reader(topic: str, cluster: LocalCluster, admin: Admin) -> None:
    partition = TopicPartition(topic, 0)
    fill(cluster, topic, range(10))
    with consuming(partition) as (process, pipe):
        read(pipe, 9)
        waited_for(lambda: admin.committed(topic).get(partition) == 9)
        process.send_signal(signal.SIGINT)
        waited_for(lambda: not pending_signals(process.pid))
        while process.poll() is None:  # Python takes two for one that come before it looks
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        assert process.returncode == 1
        assert os.read(pipe, 100) == b"%09d\n" % 9
    assert admin.committed(topic)[partition] == 9


def test_ctrl_c_to_both_ends_of_a_pipe_copies_every_record_once(
    full: TopicPartition, cluster: LocalCluster, admin: Admin
) -> None:
    copy = f"{full.topic}.copy"
    admin.create_topic(copy, partitions=2)
    consume = [full.topic, "--group", full.topic, "--from-beginning"]
    ends = dict.fromkeys((TopicPartition(copy, number) for number in range(2)), "latest")

    def copied() -> int:
        return sum(each.offset or 0 for each in admin.list_offsets(ends).values())

    for part in range(3):
        before = copied()
        with piped(consume, [copy]) as (consuming, producing):
            waited_for(lambda before=before: copied() > before)  # type: ignore[misc]
            for process in (producing, consuming):
                process.send_signal(signal.SIGINT)
            assert (producing.wait(60), consuming.wait(60)) == (0, 0)
        assert admin.committed(full.topic)[full] == copied()
        fill(cluster, full.topic, range(LINES + part * LINES, LINES + (part + 1) * LINES))
    found = values(cluster, copy)
    assert len(found) == len(set(found)) == copied()
    admin.delete_topic(copy)


def test_bytes_of_another_writer_are_not_taken_for_read_ones() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"of another")
        pipe = WrittenPipe(writing)
        lines = ReadLines(pipe)
        for number in range(3):
            pipe.write(b"line\n")
            lines.add(5, TopicPartition("t", number), 7)
        assert lines.look() and not lines.offsets
        os.read(reading, 10 + 5 + 4)
        assert lines.look() and lines.offsets == {TopicPartition("t", 0): 7}
        os.read(reading, 100)
        assert not lines.look() and len(lines.offsets) == 3
        assert pipe.has_reader()
        os.close(reading)
        assert not pipe.has_reader()
    finally:
        os.close(writing)


def test_lines_of_a_partition_that_another_member_got_count_no_more_also_once_it_is_back() -> None:
    reading, writing = os.pipe()
    gone, kept = TopicPartition("t", 0), TopicPartition("t", 1)
    try:
        pipe = WrittenPipe(writing)
        lines = ReadLines(pipe)
        for partition in (gone, kept):
            pipe.write(b"line\n")
            lines.add(5, partition, 7)
        lines.forget([gone])
        lines.offsets[gone] = 20  # where it goes on, when it comes back
        os.read(reading, 10)
        assert not lines.look() and lines.offsets == {gone: 20, kept: 7}
        lines.forget([kept])
        assert lines.offsets == {gone: 20}
    finally:
        os.close(reading)
        os.close(writing)


def test_a_full_pipe_that_must_not_block_takes_what_it_can() -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        pipe = WrittenPipe(writing)
        out = io.BufferedWriter(pipe)
        with pytest.raises(BlockingIOError):
            out.write(bytes(1 << 20))
        assert pipe.read_to() == 0
        taken = len(os.read(reading, 1 << 20))
        assert pipe.read_to() == taken > 0
    finally:
        os.close(reading)
        os.close(writing)


def test_a_produce_that_finds_no_broker_has_read_nothing() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb", buffering=0) as writer, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it, and it refuses
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        writer.write(b"line\n")
        ran = subprocess.run(
            [*KAFKALOG, "produce", "t", "--bootstrap", address], stdin=pipe, capture_output=True, timeout=60
        )
        assert ran.returncode == 1
        assert ran.stderr.endswith(b"; no line is acknowledged\n")
        assert pipe.readline() == b"line\n"


def test_a_socket_whose_peer_goes_away_commits_nothing_that_was_not_written(full: TopicPartition, admin: Admin) -> None:
    ours, stdout = socket.socketpair()
    stdout.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    command = [*KAFKALOG, "consume", full.topic, "--group", full.topic, "--from-beginning"]
    with subprocess.Popen(command, stdout=stdout.fileno()) as process:
        try:
            stdout.close()
            with ours:
                read(ours.fileno(), 1000)
                received = 10_000
                ours.shutdown(socket.SHUT_RD)
                ours.setblocking(False)
                with suppress(BlockingIOError):
                    while data := ours.recv(1 << 16):
                        received += len(data)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert admin.committed(full.topic)[full] <= received / 10
