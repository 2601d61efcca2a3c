"""Members of groups in a real ZooKeeper: the znodes of a state, and which changes of it are made."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kafkalog.errors import UnreadableZnode
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, paths
from kafkalog.zk.content import read_each
from kafkalog.zk.members import GroupState, Lease, Member, Seat, Topic
from kafkalog.zk.session import BadVersion, NodeExists, NoNode, ZooKeeperSession
from tests.kafkalog.zk.transitions import join, leave, live, state_of

ONE = Member("one", ("t", "u"), "", "topics t, u", "host", "1", "a client", "one", 7_000)


@pytest.fixture
def session(session: ZooKeeperSession) -> ZooKeeperSession:
    session.ensure([paths.CONSUMERS])  # as a broker does when it first connects
    return session


def lease_of(session: ZooKeeperSession, name: str) -> Lease:
    [lease] = members.read_leases(session, [("g", name)])
    assert lease is not None
    return lease


def test_a_member_is_read_back_as_it_described_itself(session: ZooKeeperSession) -> None:
    join(session, "g", ONE)
    [found] = members.read_members(session, "g", ["nobody", "one"]).values()
    assert found == ONE._replace(since_ms=found.since_ms)
    assert abs(found.since_ms / 1000 - time.time()) < 60
    lease = lease_of(session, "one")
    assert (lease.version, lease.session_timeout_ms) == (0, 7_000)
    assert abs(lease.renewed_ms - members.now_ms(session)) < 60_000
    assert members.read_leases(session, [("g", "nobody"), ("h", "one")]) == [None, None]


def test_a_large_state_is_compressed_and_read_back(session: ZooKeeperSession) -> None:
    before = join(session, "g", "a")
    topics = {f"topic.{number}": Topic(bytes([number]) * 16, 100) for number in range(100)}
    share = [TopicPartition(topic, number) for topic in topics for number in range(100)]
    claims = {partition: before.number + 7 * number for number, partition in enumerate(share)}
    after = replace(before, topics=topics, seats={"a": Seat(before.number, frozenset(share), claims)})
    made = members.change(session, "g", before, after)
    assert state_of(session, "g") == made
    assert len(session.get(paths.group("g"))[0]) < 80_000
    session.set(paths.group("g"), b"x")
    with pytest.raises(UnreadableZnode, match="neither JSON nor compressed"):
        state_of(session, "g")


def test_a_group_that_never_had_a_member_is_none_of_an_earlier_one_of_its_name(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    old = state_of(session, "g")
    assert old.number == session.get(paths.group("g"))[1].czxid
    groups.delete(session, "g")
    members.make_group(session, "g")
    members.make_group(session, "g")
    new = state_of(session, "g")
    assert (new.version, new.seats) == (old.version, {})
    with pytest.raises(NoNode):
        members.prove(session, "g", old)
    members.prove(session, "g", new)
    assert join(session, "g", "a").number > new.number > old.number


def test_a_state_of_a_group_that_was_deleted_is_none_of_the_next_group_of_its_name(session: ZooKeeperSession) -> None:
    """The versions of its znode begin anew."""
    join(session, "g", "a")
    old = leave(session, "g", "a")
    groups.delete(session, "g")
    join(session, "g", "b")
    new = leave(session, "g", "b")
    assert new.version == old.version
    for late in (
        lambda: members.change(session, "g", old, replace(old, generation=99)),
        lambda: members.prove(session, "g", old),
        lambda: session.multi(members.guards("g", old)),
    ):
        with pytest.raises(NoNode):
            late()
    members.prove(session, "g", new)
    groups.delete(session, "g")
    assert session.children(paths.CONSUMERS) == []


def test_a_state_is_read_back_with_members_in_the_order_of_joining(session: ZooKeeperSession) -> None:
    join(session, "g", "z")
    before = join(session, "g", "a")
    of_t = [TopicPartition("t", number) for number in range(9)]
    seats = {
        "z": Seat(
            3, frozenset([*of_t[:3], of_t[5], *of_t[7:], TopicPartition("u", 3)]), {of_t[0]: 7, of_t[1]: 7, of_t[3]: 6}
        ),
        "a": Seat(before.seats["a"].epoch, frozenset([of_t[3], of_t[4], of_t[6]])),
    }
    topics = {"t": Topic(b"t" * 16, 9), "u": Topic(b"u" * 16, 4)}
    after = GroupState(3, "consumer", "sticky", seats, topics, before.number + 5, before.incarnation, before.version)
    made = members.change(session, "g", before, after)
    found = state_of(session, "g")
    assert found == made == replace(after, version=before.version + 1)
    assert list(found.seats) == ["z", "a"] and found.first() == "z"
    assert found.owners == {of_t[0]: "z", of_t[1]: "z", of_t[3]: "z"}
    content, stat = session.get(paths.group("g"))
    assert stat.version == made.version
    [z, a] = json.loads(content)["members"]
    assert z == ["z", 3, [[0, "0-2,5,7-8"], [1, "3"]], [[7, [[0, "0-1"]]], [6, [[0, "3"]]]]]
    assert a == ["a", before.seats["a"].epoch, [[0, "3-4,6"]], []]


def test_the_order_of_joining_stays_whoever_changes_the_group(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    broker = new_session()
    join(broker, "g", "one")
    broker.close()
    join(session, "g", "two")
    assert live(session, "g") == ["one", "two"]
    leave(session, "g", "one")
    assert state_of(session, "g").first() == "two"
    join(session, "g", "one")
    assert live(session, "g") == ["two", "one"]
    assert state_of(session, "g").generation == 4
    assert state_of(session, "nobody").first() is None


def test_a_change_of_a_state_that_is_over_writes_nothing(session: ZooKeeperSession) -> None:
    before = join(session, "g", "one")
    join(session, "g", "two")
    after = before.with_seat("three", Seat(9))
    with pytest.raises(BadVersion):
        members.change(session, "g", before, after, members.create_member("g", Member("three")))
    with pytest.raises(BadVersion):
        session.multi([*members.guards("g", before)])
    assert live(session, "g") == ["one", "two"]
    assert members.read_members(session, "g", ["three"]) == {}
    assert members.read_leases(session, [("g", "three")]) == [None]


def test_a_change_is_made_with_all_its_operations_or_not_at_all(session: ZooKeeperSession) -> None:
    before = join(session, "g", "one")
    after = before.with_seat("two", Seat(9))
    for operations, error in (
        (members.create_member("g", Member("one")), NodeExists),
        (members.describe_member("g", Member("two")), NoNode),
        (members.delete_member("g", "two"), NoNode),
        (members.delete_member("g", "one", lease_version=1), BadVersion),
    ):
        with pytest.raises(error):
            members.change(session, "g", before, after, operations)
    assert state_of(session, "g") == before
    assert lease_of(session, "one").version == 0


def test_a_member_that_is_described_anew_has_its_lease_renewed(session: ZooKeeperSession) -> None:
    before = join(session, "g", ONE)
    described = ONE._replace(process="2", session_timeout_ms=9_000)
    members.change(session, "g", before, before, members.describe_member("g", described))
    assert members.read_members(session, "g", ["one"])["one"].process == "2"
    assert lease_of(session, "one")[::2] == (1, 9_000)


def test_a_lease_is_renewed_while_its_member_is_there(session: ZooKeeperSession) -> None:
    join(session, "g", ONE)
    members.renew(session, "g", "one", 9_000)
    assert lease_of(session, "one")[::2] == (1, 9_000)
    with pytest.raises(NoNode):
        members.renew(session, "g", "two", 9_000)
    leave(session, "g", "one")
    with pytest.raises(NoNode):
        members.renew(session, "g", "one", 9_000)


def test_a_member_that_renews_while_it_is_removed_stays(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    before = join(session, "g", "one")
    seen = lease_of(session, "one")
    members.renew(new_session(), "g", "one", 9_000)
    with pytest.raises(BadVersion):
        members.change(session, "g", before, replace(before, seats={}), members.delete_member("g", "one", seen.version))
    assert live(session, "g") == ["one"]


def test_a_member_that_leaves_leaves_nothing(session: ZooKeeperSession) -> None:
    join(session, "g", ONE)
    leave(session, "g", "one")
    assert session.children(paths.group_members("g")) == session.children(paths.group_leases("g")) == []


def test_numbers_rise_also_over_groups_of_a_name(session: ZooKeeperSession) -> None:
    """So nothing that is executed late names an epoch or a claim of a group that came later."""
    last = 0
    for _ in range(3):
        for _ in range(3):
            state = join(session, "g", "one")
            assert state.seats["one"].epoch == state.number > last
            last = state.number
            leave(session, "g", "one")
        groups.delete(session, "g")
        assert members.read_state(session, "g") is None


def test_a_group_that_has_offsets_only_gets_members(session: ZooKeeperSession) -> None:
    session.create(paths.group_topic_offsets("g", "t"))
    found = state_of(session, "g")
    assert found == GroupState(version=0, number=found.number) and found.number > 0
    join(session, "g", "one")
    assert live(session, "g") == ["one"]
    assert session.children(paths.group_topic_offsets("g", "t")) == []


def test_a_change_of_a_group_that_does_not_exist_is_none(session: ZooKeeperSession) -> None:
    with pytest.raises(NoNode):
        members.change(session, "g", GroupState(), GroupState(1).with_seat("one", Seat(1)))
    assert members.read_state(session, "g") is None


def test_many_groups_are_read_at_once(session: ZooKeeperSession) -> None:
    join(session, "a", "one")
    join(session, "c", "two")
    found = members.read_states(session, ["c", "b", "a"])
    assert [None if state is None else list(state.seats) for state in found] == [["two"], None, ["one"]]


# --- what cannot be read


def test_none_that_cannot_be_read_hides_another(session: ZooKeeperSession) -> None:
    names = [f"g{number}" for number in range(7)]
    for name in names:
        if name not in ("g2", "g6"):
            join(session, name, "one")
    session.create(paths.group("g2"), b"{")

    found = read_each(lambda some: members.read_states(session, some), names)
    assert list(found) == names
    assert isinstance(found["g2"], UnreadableZnode) and found["g6"] is None
    assert all(isinstance(found[name], GroupState) for name in names if name not in ("g2", "g6"))
    assert read_each(lambda some: members.read_states(session, some), []) == {}


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"{}", b'{"generation": 1, "members": 3}', b"\xff"])
def test_a_generation_that_cannot_be_read_is_an_error_and_not_taken_for_none(
    session: ZooKeeperSession, content: bytes
) -> None:
    session.create(paths.group("g"), content)
    with pytest.raises(UnreadableZnode, match=re.escape(f"znode {paths.group('g')} in ZooKeeper cannot be read")):
        members.read_state(session, "g")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b'{"topics": 3}', b'{"session_timeout_ms": "x"}'])
def test_a_member_that_cannot_be_read_is_an_error(session: ZooKeeperSession, content: bytes) -> None:
    session.create(paths.group_member("g", "one"), content)
    with pytest.raises(UnreadableZnode, match=re.escape(paths.group_member("g", "one"))):
        members.read_members(session, "g", ["one"])


def test_a_lease_that_cannot_be_read_is_an_error(session: ZooKeeperSession) -> None:
    session.create(paths.group_lease("g", "one"), b"{}")
    with pytest.raises(UnreadableZnode, match=re.escape(paths.group_lease("g", "one"))):
        members.read_leases(session, [("g", "one")])


# --- subscriptions


def test_a_member_reads_what_it_names_or_what_its_pattern_matches_as_a_whole() -> None:
    topics = ["orders", "orders-eu", "u", "orders.de"]
    described = {
        "names": Member("names", ("u", "none")),
        "pattern": Member("pattern", pattern=r"orders.*"),
        "either": Member("either", pattern=r"orders|u"),
        "nothing": Member("nothing"),
    }
    assert members.topics_read(described, topics) == {
        "names": ["u"],
        "pattern": ["orders", "orders-eu", "orders.de"],
        "either": ["orders", "u"],
        "nothing": [],
    }


def test_a_pattern_that_many_members_have_is_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(members, "matcher", lambda pattern: asked.append)
    described = {str(number): Member(str(number), pattern="o.*") for number in range(100)}
    assert members.topics_read(described, ["a", "b"]).keys() == described.keys()
    assert asked == ["a", "b"]
