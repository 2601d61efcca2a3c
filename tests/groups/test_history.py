"""Each rule of a history finds what breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.groups.history import Event, History, Reader, Writer

MS = 1_000_000


def history(text: str) -> History:
    """Of lines `member event partition offset end_offset`, one each millisecond; +n passes so many of them."""
    found, now = History(), MS
    for line in text.strip().splitlines():
        first, *rest = line.split()
        if first.startswith("+"):
            now += int(first) * MS
            continue
        event, *numbers = rest
        partition, offset, end_offset, *_ = [*map(int, numbers), 0, 0, 0]
        found.add([Event(now, first, event, partition, offset, end_offset)])
        now += MS
    return found


MOVED = """
test disturbed -1 50
test partitions -1 1
a assigned 0 0
a out 0 0 10
a back 0 10
a committing 0 10
a committed 0 10
a out 0 10 12
a back 0 11
a revoked 0
a committing 0 11
a committed 0 11
b assigned 0 11
b out 0 11 15
"""
LAPSED = """
a assigned 0 0
a out 0 0 10
a stopped -1
b assigned 0 0
b out 0 0 20
"""


def test_a_group_that_keeps_its_rules() -> None:
    kept = history(MOVED)
    assert kept.violations == []
    assert kept.missing({0: 15}) == []
    assert kept.handed_out() == 16


@pytest.mark.parametrize(
    "text, said",
    [
        ("a out 0 0 1", "a out 0: it is not assigned"),
        (MOVED + "a out 0 12 13", "a out 0: it is not assigned"),
        (MOVED + "c assigned 0 11\nb out 0 15 16", "b out 0: c was assigned it before"),
        (MOVED + "c assigned 0 11\nb revoked 0", "b revoked 0: c was assigned it before"),
        (LAPSED + "a continued -1\na out 0 10 11\na out 0 11 12", "a out 0: b was assigned it before"),
        (LAPSED + "a continued -1\na lost 0\na out 0 10 11", "a out 0: it is not assigned"),
        (MOVED + "b out 0 16 17", "b out 0: offset 16 comes after 14"),
        (MOVED + "b out 0 14 15", "b out 0: offset 14 comes after 14"),
        (MOVED + "b revoked 0\nc assigned 0 12", "c assigned 0: starts at 12: 11 was acknowledged, 11 was committed"),
        (MOVED + "b revoked 0\nc assigned 0 10", "c assigned 0: starts at 10: 11 was acknowledged, 11 was committed"),
        (MOVED + "b back 0 14\nb committing 0 15", "b committing 0: offset 15 is past 14"),
        (MOVED + "c committing 0 12", "c committing 0: offset 12 is past 11"),
        (MOVED + "b committed 0 13", "b committed 0: offset 13 was never sent"),
        (
            MOVED + "b back 0 13\nb committing 0 13\nb committed 0 13\nb committing 0 12\nb committed 0 12",
            "b committed 0: offset 12 was sent after 13 had been acknowledged",
        ),
        (
            LAPSED + "a continued -1\na back 0 10\na committing 0 10\na committed 0 10",
            "a committed 0: offset 10 was committed after b had begun before it",
        ),
        ("test disturbed -1 5\ntest partitions -1 1\n+5\ntest killed -1", "partition 0 has no live owner, but ''"),
        (MOVED + "b revoked 0\n+50\ntest killed -1", "partition 0 has no live owner, but ''"),
        (MOVED + "b killed -1\n+50\na back 0 1", "partition 0 has no live owner, but 'b'"),
    ],
)
def test_each_rule_finds_what_breaks_it(text: str, said: str) -> None:
    found = history(text).violations
    assert len(found) == 1 and said in found[0], found


def test_a_line_that_a_stopped_process_still_writes_is_excused() -> None:
    assert history(LAPSED + "a continued -1\na out 0 10 11\na lost 0").violations == []


def test_an_owner_that_lapses_may_notice_later() -> None:
    assert history(LAPSED + "a continued -1\na lost 0\na assigned 0 0").violations == []


def test_the_time_of_a_disturbance_is_not_looked_at() -> None:
    assert history(MOVED + "+50\ntest disturbed -1 5\nb revoked 0\nc assigned 0 11\n+5\nc out 0 11 12").violations == []


def test_records_that_nobody_was_handed_are_missing() -> None:
    found = history(MOVED + "b out 0 16 17")
    assert found.missing({0: 17}) == ["partition 0: offsets 15 to 15 were never handed out"]
    assert found.missing({0: 15, 1: 1}) == ["partition 1: offsets 0 to 0 were never handed out"]
    assert found.missing({0: 20})[1:] == ["partition 0: offsets 17 to 19 were never handed out"]


def test_files_are_read_as_they_grow(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    one, other = Writer(tmp_path, "one"), Writer(tmp_path, "other")
    other.write("out", 1, 2, 3)
    one.write("stopped", member="other")
    assert [event[1:] for event in reader.news()] == [("other", "out", 1, 2, 3), ("other", "stopped", -1, 0, 0)]
    one.write_all("back", [(0, 5, 0), (1, 6, 0)])
    with (tmp_path / "other.history").open("a") as file:
        file.write("12345 out 1")
    assert [event[1:] for event in reader.news()] == [("one", "back", 0, 5, 0), ("one", "back", 1, 6, 0)]
