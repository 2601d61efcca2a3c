"""Each rule of the checker finds what breaks it, and a history that breaks none has no anomaly."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.records import TopicPartition
from tests.chaos.checker import Anomaly, check, summary
from tests.chaos.history import NO_OFFSET, Operation, Recorder, read

MS = 1_000_000
_TOPIC = "t"


def history(text: str) -> list[Operation]:
    """Of lines `client what outcome partition/number/run record record ...`, one each millisecond.

    A record is `offset:value`, or a value alone. A `latest` begins half a millisecond before its line; `latest@n` began
    just before line n of those that are counted from 0.
    """
    found: list[Operation] = []
    for at, line in enumerate(text.strip().splitlines()):
        client, what, outcome, named, *records = line.split()
        what, _, since = what.partition("@")
        partition, number, run = [*named.split("/"), "0", ""][:3] if "/" in named else (named, "0", "")
        since_ns = (int(since) if since else at) * MS - MS // 2
        parsed = tuple(_record(record) for record in records)
        place = TopicPartition(_TOPIC, int(partition))
        found.append(Operation(at * MS, client, what, outcome, place, parsed, int(number), run, since_ns))
    return found


def _record(text: str) -> tuple[int, str]:
    offset, colon, value = text.rpartition(":")
    return (int(offset) if colon else NO_OFFSET), value


CLEAN = """
p send invoke 0 a b c
p send ok 0 0:a 1:b
p send invoke 0 d
p send ok 0 2:c
q send invoke 1 u v
q send info 1 v
x stage invoke 0/1/x1 k l
x stage invoke 1/1/x1 m
x commit invoke 0/1/x1
x commit info 0/1/x1
x stage invoke 0/1/x2 n o
x stage invoke 1/1/x2 r
x commit invoke 0/1/x2
x commit fail 0/1/x2
x batch ok 0/1/x2
c assign ok 0/0/c1
c assign ok 1/0/c1
c poll ok 0/0/c1 0:a 1:b
o latest ok 0/3
c poll ok 0/0/c1 2:c 3:k 4:l
o latest ok 0/5
c assign ok 0/1/c2
c poll ok 0/0/c2 1:b 2:c
c poll ok 1/0/c1 0:v 1:m
e read ok 0 0:a 1:b 2:c
e read ok 0 3:k 4:l
e read ok 1 0:v 1:m
"""
"""Two producers, of which one was killed: u and d are lost, v is there; a batch in two attempts; two readings."""


def names(text: str, **repeats: tuple[str, ...]) -> list[str]:
    return sorted({anomaly.name for anomaly in check(history(text), **repeats)})


def changed(before: str, after: str) -> str:
    assert CLEAN.count(before) == 1, before
    return CLEAN.replace(before, after)


def test_a_history_without_anomalies() -> None:
    assert check(history(CLEAN)) == []


@pytest.mark.parametrize(
    ("anomaly", "text"),
    [
        ("lost-write", "p send invoke 0 a\np send ok 0 0:a\ne read ok 0"),
        ("lost-write", "p send invoke 0 a\np send ok 0 a\ne read ok 0"),
        ("lost-write", "p send invoke 0 a\nc assign ok 0/0/c1\nc poll ok 0/0/c1 0:a\ne read ok 0"),
        ("lost-write", "x stage invoke 0/1/x1 a\nx commit ok 0/1/x1\ne read ok 0"),
        ("lost-write", "x stage invoke 0/1/x1 a\nx batch ok 0/1\ne read ok 0"),
        ("duplicate", CLEAN + "c poll ok 0/0/c1 5:a\ne read ok 0 5:a"),
        ("duplicate", CLEAN + "c poll ok 1/0/c1 2:u 3:v\ne read ok 1 2:u 3:v"),
        ("unseen", CLEAN + "e read ok 1 2:u"),
        ("aborted-read", changed("q send info 1 v", "q send fail 1 v")),
        ("unexpected", CLEAN + "c poll ok 1/0/c1 2:z\ne read ok 1 2:z"),
        ("unexpected", CLEAN + "c poll ok 0/0/c1 5:u\ne read ok 0 5:u"),
        ("inconsistent-offsets", changed("p send ok 0 2:c", "p send ok 0 1:c")),
        ("inconsistent-offsets", changed("p send ok 0 2:c", "p send ok 0 9:c")),
        ("inconsistent-offsets", "p send invoke 0 a\nq send invoke 0 b\np send ok 0 0:a\nq send ok 0 0:b"),
        ("poll-skip", changed("c poll ok 0/0/c1 2:c 3:k 4:l", "c poll ok 0/0/c1 2:c 4:l\nd poll ok 0/0/d1 3:k")),
        ("poll-skip", changed("c poll ok 1/0/c1 0:v 1:m", "c poll ok 1/0/c1 1:m\nd poll ok 1/0/d1 0:v")),
        ("nonmonotonic-poll", CLEAN + "c poll ok 0/0/c2 2:c"),
        ("nonmonotonic-poll", CLEAN + "c poll ok 0/0/c2 0:a"),
        ("nonmonotonic-poll", CLEAN + "d assign ok 0/4/d1\nd poll ok 0/0/d1 3:k"),
        ("nonmonotonic-send", CLEAN + "c poll ok 1/0/c1 2:u\ne read ok 1 2:u"),
        ("torn", changed("e read ok 1 0:v 1:m", "e read ok 1 0:v")),
        ("stale-end", CLEAN + "o latest ok 0/4"),
        ("stale-end", "o latest ok 0/4\no latest ok 0/3"),
        ("stale-end", "c assign ok 0/0/c1\nc poll ok 0/0/c1 0:a 1:b\no latest ok 0/1"),
    ],
)
def test_each_anomaly_is_found(anomaly: str, text: str) -> None:
    assert anomaly in names(text)


@pytest.mark.parametrize(
    ("anomaly", "text"),
    [
        ("inconsistent-offsets", "p send invoke 0 a b\nd poll ok 0/0/d1 0:a\nc poll ok 0/0/c1 0:b"),
        ("duplicate", "p send invoke 0 a b\nc poll ok 0/0/c1 0:a\nd poll ok 0/0/d1 1:a\ne read ok 0 0:a"),
    ],
)
def test_what_readers_saw_counts_though_the_end_does_not_have_it(anomaly: str, text: str) -> None:
    assert anomaly in names(text)


def test_two_attempts_of_a_batch_are_there() -> None:
    both = changed("e read ok 1 0:v 1:m", "e read ok 1 0:v 1:m 2:r\ne read ok 0 5:n 6:o\nd poll ok 1/0/d1 2:r")
    found = check(history(both.replace("x commit fail 0/1/x2", "x commit info 0/1/x2")))
    assert Anomaly("duplicate", "batch 1 of x is there by the attempts x1, x2") in found


def test_only_a_batch_that_is_known_to_be_in_the_log_is_lost() -> None:
    assert names("x stage invoke 0/1/x1 a\nx commit info 0/1/x1\ne read ok 0") == []
    assert names("x stage invoke 0/1/x1 a\nx commit fail 0/1/x1\ne read ok 0") == []


def test_a_producer_without_idempotence_may_repeat_and_reorder() -> None:
    text = CLEAN + "d poll ok 1/0/d1 2:u 3:v\ne read ok 1 2:u 3:v"
    assert names(text) == ["duplicate", "nonmonotonic-send"]
    assert names(text, may_repeat=("q",)) == []


def test_an_end_that_was_asked_for_before_a_record_was_read_may_be_lower() -> None:
    polled = "c assign ok 0/0/c1\nc poll ok 0/0/c1 0:a\nc poll ok 0/0/c1 1:b\n"
    ended = "p send invoke 0 a b\ne read ok 0 0:a 1:b\n"
    assert names(ended + polled + "o latest@3 ok 0/0") == []
    assert names(ended + polled + "o latest@4 ok 0/1") == []
    assert names(ended + polled + "o latest@4 ok 0/0") == ["stale-end"]


def test_a_reader_may_pass_offsets_that_have_no_record() -> None:
    text = "p send invoke 0 a b\nc assign ok 0/0/c1\nc poll ok 0/0/c1 0:a 5:b\ne read ok 0 0:a 5:b"
    assert names(text) == []


def test_an_anomaly_states_its_facts() -> None:
    found = check(history(CLEAN + "o latest ok 0/4"))
    assert summary(found) == "stale-end: 1\n    t-0: o was told 4 after c was handed 4"


def test_a_client_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    partition = TopicPartition("t", 3)
    with Recorder(tmp_path, "p") as p, Recorder(tmp_path, "c") as c:
        p.write("send", "invoke", partition, [(NO_OFFSET, "a")])
        c.write("poll", "ok", partition, [(0, "a")], run="c1")
        p.write("commit", "info", number=7, run="x1", since_ns=5)
    with (tmp_path / "c.operations").open("a") as file:
        file.write('[1234,"po')
    found = read(tmp_path)
    assert [operation[1:] for operation in found] == [
        ("p", "send", "invoke", partition, ((NO_OFFSET, "a"),), 0, "", 0),
        ("c", "poll", "ok", partition, ((0, "a"),), 0, "c1", 0),
        ("p", "commit", "info", TopicPartition("", -1), (), 7, "x1", 5),
    ]
    assert [operation.time_ns for operation in found] == sorted(operation.time_ns for operation in found)
