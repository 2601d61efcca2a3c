"""Decisions of transactions in a real ZooKeeper."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kafkalog.errors import DecisionMoved, UnreadableZnode
from kafkalog.format.decisions import DecidedTopic, Decision, Writer, ranges
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire
from kafkalog.zk import decisions, paths
from kafkalog.zk.session import NoNode, ZooKeeperSession
from tests.threads import join_all

ID = "spark-stream-6b0c8f2e-4f5e-4d6e-9a5e-0d6a3c1b2a90"
DECIDED = Decision(
    ID,
    batch_id=7,
    commit_uuid=bytes(range(16)),
    run_id="run 1",
    fingerprint=b"f" * 32,
    topics=(DecidedTopic(b"t" * 16, "out", ((0, 3), (7, 7))), DecidedTopic(b"u" * 16, "other", ((2, 2),))),
    replaced_runs=("run 0",),
    stays=True,
    decided_us=123,
    writers=(Writer(b"u" * 16, "run 1", "session"), Writer(b"v" * 16, "run 2")),
)
HOUR_US = 3600 * 1_000_000


def forgotten(session: ZooKeeperSession) -> list[str]:
    """Ids of those that were decided when `DECIDED` was, and are forgotten an hour later."""
    pieces = decisions.forget_expired(session, 124 + HOUR_US)
    return [decision.transactional_id for piece in pieces for decision in piece]


def test_a_decision_is_read_back_with_its_version(session: ZooKeeperSession) -> None:
    assert decisions.read_decision(session, ID) == Decision(ID)
    assert decisions.write_decision(session, DECIDED) == 0
    assert decisions.read_decision(session, ID) == replace(DECIDED, version=0)
    done = replace(DECIDED, version=0, done=True)
    assert decisions.write_decision(session, done) == 1
    assert decisions.read_decision(session, ID) == replace(done, version=1)


def test_a_decision_is_the_same_after_protobuf() -> None:
    assert decision_from_wire(decision_to_wire(DECIDED)) == DECIDED
    assert decision_from_wire(decision_to_wire(Decision(ID))) == Decision(ID)


def test_a_write_over_another_version_is_refused_and_changes_nothing(session: ZooKeeperSession) -> None:
    with pytest.raises(DecisionMoved) as absent:
        decisions.write_decision(session, replace(DECIDED, version=3))
    assert absent.value.facts == {"transactional_id": ID, "expected": 3, "version": -1}
    decisions.write_decision(session, DECIDED)
    decisions.raise_version(session, replace(DECIDED, version=0))
    for stale in (-1, 0, 2):
        with pytest.raises(DecisionMoved) as moved:
            decisions.write_decision(session, replace(DECIDED, version=stale, batch_id=8))
        assert moved.value.facts == {"transactional_id": ID, "expected": stale, "version": 1}
    assert decisions.read_decision(session, ID) == replace(DECIDED, version=1)


def test_of_many_who_decide_on_one_version_one_succeeds(new_session: Callable[[], ZooKeeperSession]) -> None:
    outcomes: list[int | str] = []

    def decide(session: ZooKeeperSession, number: int) -> None:
        for version in range(-1, 9):
            try:
                mine = replace(DECIDED, version=version, commit_uuid=bytes([number]) * 16)
                outcomes.append(decisions.write_decision(session, mine))
            except DecisionMoved:
                outcomes.append("moved")

    threads = [threading.Thread(target=decide, args=(new_session(), number)) for number in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    versions = [outcome for outcome in outcomes if outcome != "moved"]
    assert len(versions) == len(set(versions))
    assert decisions.read_decision(new_session(), ID).version == max(map(int, versions))


def test_raising_the_version_of_what_is_absent_makes_it_empty(session: ZooKeeperSession) -> None:
    absent = decisions.read_decision(session, ID)
    assert decisions.raise_version(session, absent) == 0
    empty = decisions.read_decision(session, ID)
    assert (empty.version, empty.batch_id, empty.done, empty.is_open) == (0, -1, False, False)
    assert empty.decided_us > 1_600_000_000_000_000  # when it was made, so that it can get old
    with pytest.raises(DecisionMoved):
        decisions.write_decision(session, replace(DECIDED, version=absent.version))


@pytest.mark.parametrize(
    "transactional_id",
    [
        "app-etl/orders-out",
        "app-..",
        "a b%2Fc",
        "app-ünïcode-☃-t",
        ".",
        "..",
        "a\nb\0c",
        "zookeeper",
        "x" * 1000,
        "%",
        "%41",
    ],
)
def test_any_id_becomes_a_znode_and_comes_back(session: ZooKeeperSession, transactional_id: str) -> None:
    mine = replace(DECIDED, transactional_id=transactional_id)
    decisions.write_decision(session, mine)
    assert decisions.read_decision(session, transactional_id) == replace(mine, version=0)
    assert [each.transactional_id for each in decisions.list_decisions(session)] == [transactional_id]


def test_ids_that_look_alike_escaped_are_different_znodes() -> None:
    ids = ["a/b", "a%2Fb", "a%2fb", "a b", "a+b", "a%20b", ".", "%2E", "%252E"]
    assert len({paths.transaction(each) for each in ids}) == len(ids)


def test_decisions_are_listed_by_id(session: ZooKeeperSession) -> None:
    assert decisions.list_decisions(session) == []
    for name in ("b", "a/c", "a"):
        decisions.write_decision(session, replace(DECIDED, transactional_id=name))
    assert [each.transactional_id for each in decisions.list_decisions(session)] == ["a", "a/c", "b"]


def test_only_batch_decisions_that_are_done_for_an_hour_expire() -> None:
    old_batch = replace(DECIDED, stays=False, done=True, decided_us=1000)
    now_us = 1000 + HOUR_US + 1
    empty = Decision("raised", 0, decided_us=1000)
    kept = [
        replace(old_batch, stays=True),
        replace(old_batch, done=False),
        replace(old_batch, decided_us=1001),
        replace(empty, decided_us=1001),
    ]
    assert decisions.expired([*kept, old_batch, empty], now_us) == [old_batch, empty]


def test_a_decision_that_cannot_be_read_keeps_no_other_from_being_listed_and_forgotten(
    session: ZooKeeperSession,
) -> None:
    decisions.write_decision(session, replace(DECIDED, transactional_id="old", stays=False, done=True))
    session.create(paths.transaction("unreadable"), b"{}")
    session.create(paths.transaction("nested"), b"[" * 100_000)
    assert [each.transactional_id for each in decisions.list_decisions(session)] == ["old"]
    assert forgotten(session) == ["old"]
    for name, reason in (("unreadable", "it has no field 'batch_id'"), ("nested", "its JSON is nested too deeply")):
        sentence = f"znode {paths.transaction(name)} in ZooKeeper cannot be read: {reason}"
        with pytest.raises(UnreadableZnode, match=re.escape(sentence)):
            decisions.read_decision(session, name)


def test_several_brokers_forget_expired_decisions_at_once(session: ZooKeeperSession) -> None:
    for number in range(3):
        decisions.write_decision(
            session, replace(DECIDED, transactional_id=f"old {number}", stays=number == 2, done=True)
        )
    assert sorted(forgotten(session)) == ["old 0", "old 1"]
    assert forgotten(session) == []
    assert [each.transactional_id for each in decisions.list_decisions(session)] == ["old 2"]


def test_partition_numbers_are_kept_as_ranges() -> None:
    assert ranges([]) == ()
    assert ranges([5, 1, 2, 3, 2, 7, 8]) == ((1, 3), (5, 5), (7, 8))
    assert DecidedTopic(b"", "t", ranges([5, 1, 2])).numbers() == [1, 2, 5]
    assert [number for number in range(-1, 10) if DECIDED.has(b"t" * 16, number)] == [0, 1, 2, 3, 7]
    assert DECIDED.has(b"u" * 16, 2) and not DECIDED.has(b"u" * 16, 0) and not DECIDED.has(b"v" * 16, 0)


def test_decisions_that_are_removed_or_used_again_while_they_are_listed_keep_no_other_from_it(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    old = replace(DECIDED, stays=False, done=True)
    for name in ("a", "b", "c", "d"):
        decisions.write_decision(session, replace(old, transactional_id=name))
    children, delete_many = session.children, session.delete_many

    def and_then_one_goes(path: str) -> list[str]:
        found = children(path)
        with contextlib.suppress(NoNode):
            other.delete(paths.transaction("b"))
        return found

    def once_one_is_used_and_one_goes(wanted: Sequence[tuple[str, int]]) -> list[bool]:
        decisions.raise_version(other, replace(old, transactional_id="a", version=0))
        other.delete(paths.transaction("d"))
        return delete_many(wanted)

    monkeypatch.setattr(session, "children", and_then_one_goes)
    monkeypatch.setattr(session, "delete_many", once_one_is_used_and_one_goes)
    assert forgotten(session) == ["c"]
    assert [each.transactional_id for each in decisions.list_decisions(session)] == ["a"]


def test_many_decisions_are_forgotten_and_listed_in_pieces(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_CHUNK", 2)
    for number in range(5):
        old = replace(DECIDED, transactional_id=f"{number}", stays=number == 4, done=True)
        decisions.write_decision(session, old)
    asked: list[int] = []
    get_many = session.get_many
    monkeypatch.setattr(session, "get_many", lambda wanted: asked.append(len(wanted)) or get_many(wanted))
    names = [decision.transactional_id for decision in decisions.list_decisions(session)]
    assert (names, asked) == (["0", "1", "2", "3", "4"], [2, 2, 1])
    asked.clear()
    removed = 0
    for step, piece in enumerate(decisions.forget_expired(session, 124 + HOUR_US), 1):
        removed += len(piece)
        assert sum(asked) == min(2 * step, 5)  # nothing is read before it is its turn
        assert len(session.children(paths.TRANSACTIONS)) == 5 - removed
    assert (removed, session.children(paths.TRANSACTIONS)) == (4, ["4"])


def test_a_version_that_was_raised_with_nothing_decided_counts_from_when_it_was(session: ZooKeeperSession) -> None:
    decisions.raise_version(session, Decision("raised"))
    [raised] = decisions.list_decisions(session)
    assert decisions.expired([raised], raised.decided_us + HOUR_US) == []
    assert abs(raised.decided_us / 1e6 - time.time()) < 3600
