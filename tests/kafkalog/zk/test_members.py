"""Live members of groups in a real ZooKeeper: who is live, who is first, and when neither."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kafkalog.zk import members, paths
from kafkalog.zk.members import Member
from kafkalog.zk.session import NodeExists, ZooKeeperSession
from tests.kafkalog.zk.between import amid

ONE = Member("one", "topic a", "host", "1", 0)
TWO = Member("two", "topic a", "host", "2", 0)


@pytest.fixture
def session(session: ZooKeeperSession) -> ZooKeeperSession:
    session.ensure([paths.CONSUMERS])  # as a broker does when it first connects
    return session


def names(live: list[Member]) -> list[str]:
    return [member.name for member in live]


def test_the_first_stays_first_whoever_renews_through_whichever_broker(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    other = new_session()
    assert names(members.keep(session, "g", ONE)) == ["one"]
    assert names(members.keep(other, "g", TWO)) == ["one", "two"]
    assert names(members.keep(other, "g", ONE)) == ["one", "two"]
    live = members.live_members(other, "g")
    assert [member[:4] for member in live] == [ONE[:4], TWO[:4]]
    assert abs(live[0].since_ms / 1000 - time.time()) < 60
    assert members.live_members(session, "nobody") == []


def test_a_member_that_cannot_be_read_hides_no_other(session: ZooKeeperSession) -> None:
    members.keep(session, "g", ONE)
    session.create(paths.group_member("g", "nested"), b"[" * 100_000)
    session.create(paths.group_member("g", "list"), b"[]")
    assert names(members.keep(session, "g", TWO)) == ["one", "two"]


def test_a_member_outlives_the_broker_through_which_it_came(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    broker = new_session()
    members.keep(broker, "g", ONE)
    broker.close()
    assert names(members.keep(session, "g", TWO)) == ["one", "two"]


def test_when_the_first_member_leaves_the_next_becomes_first(session: ZooKeeperSession) -> None:
    members.keep(session, "g", ONE)
    members.keep(session, "g", TWO)
    members.leave(session, "g", "one")
    members.leave(session, "g", "one")
    assert names(members.live_members(session, "g")) == ["two"]
    assert names(members.keep(session, "g", ONE)) == ["two", "one"]


def test_a_member_that_is_silent_for_its_lease_is_removed_and_comes_last_when_it_returns(
    session: ZooKeeperSession,
) -> None:
    lease_ms = 300
    members.keep(session, "g", ONE, lease_ms)
    deadline = time.monotonic() + 20
    while names(members.keep(session, "g", TWO, lease_ms)) != ["two"]:
        assert time.monotonic() < deadline
    assert session.children(paths.group_members("g")) == ["two"]
    assert names(members.keep(session, "g", ONE, lease_ms)) == ["two", "one"]


def test_a_member_that_came_back_is_not_removed_for_having_lapsed(session: ZooKeeperSession) -> None:
    members.keep(session, "g", ONE)
    path = paths.group_member("g", "one")
    _, seen = session.get(path)
    members.keep(session, "g", ONE)
    members._remove(session, path, seen.version)
    assert names(members.live_members(session, "g")) == ["one"]


def test_who_came_back_is_spared_by_a_leave_of_before(session: ZooKeeperSession) -> None:
    members.keep(session, "g", ONE)
    path = paths.group_member("g", "one")
    before = session.exists(path)
    assert before is not None
    [renewed] = members.keep(session, "g", ONE)
    assert renewed.version == before.version + 1
    members._remove(session, path, before.version)  # as a leave that arrives late
    [live] = members.live_members(session, "g")
    assert live.version == renewed.version
    assert 0 < live.left_ms <= members.LEASE_MS


def test_a_member_that_renews_while_it_is_found_lapsed_stays(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    members.keep(session, "g", ONE)
    amid(monkeypatch, session, "get_many", lambda: members.keep(other, "g", ONE))
    assert members._live(session, "g", time.time_ns() // 1_000_000 + 3_600_000, members.LEASE_MS) == []
    assert names(members.live_members(session, "g")) == ["one"]


def test_a_leave_spares_who_comes_back_before_it_is_made(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    members.keep(session, "g", ONE)
    amid(monkeypatch, session, "exists", lambda: members.keep(other, "g", ONE))
    members.leave(session, "g", "one")
    assert names(members.live_members(session, "g")) == ["one"]


def test_a_member_that_is_removed_as_lapsed_while_it_renews_comes_back_as_the_last(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    members.keep(session, "g", ONE)
    members.keep(session, "g", TWO)
    amid(monkeypatch, session, "children", lambda: members.leave(other, "g", "one"))
    assert names(members.keep(session, "g", ONE)) == ["two", "one"]


def test_a_member_that_was_made_by_an_attempt_without_an_answer_is_renewed(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard() -> None:
        raise NodeExists

    amid(monkeypatch, session, "create", unheard)
    assert names(members.keep(session, "g", ONE)) == ["one"]
