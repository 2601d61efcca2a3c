"""Claims, releases and commits over a real ZooKeeper: one owner for each partition, and only the owner commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from broker.groups import claims
from broker.groups.claims import Claim, Claimant
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    GroupIsLive,
    GroupIsSubscribed,
    InvalidRequest,
    MemberFenced,
    NotOwner,
    StaleGeneration,
    UnknownMember,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members
from kafkalog.zk.groups import Offset
from kafkalog.zk.members import STREAM, GroupState
from kafkalog.zk.session import ZooKeeperSession
from tests.between import ahead, amid
from tests.broker.groups.sides import Side, partitions
from tests.proxy import StallingProxy
from tests.waiting import waited_for

P0, P1, P2, P3 = partitions("t", 0, 1, 2, 3)


@pytest.fixture
def topic_id(side: Side) -> bytes:
    """Of t, which has 4 partitions, all of member a."""
    topic_id = side.new_topic("t", 4)
    side.join("a", "t")
    return topic_id


def commit(side: Side, who: Claimant, partition: TopicPartition, at: int, number: int, order: int = 1) -> None:
    topic_id = side.state().topics[partition.topic].topic_id
    claims.commit(side.states, who, {partition: Offset(at, topic_id, 0, number, order)}, now_us=order)


def release(side: Side, who: Claimant, ending: Mapping[TopicPartition, Claim | int]) -> None:
    numbers = {p: each if isinstance(each, int) else each.number for p, each in ending.items()}
    claims.release(side.states, who, numbers, {}, 0)


# --- claims


def test_a_member_gets_the_partitions_of_its_share_that_nobody_owns(side: Side, topic_id: bytes) -> None:
    groups.commit_offsets(side.session, "g", {P1: Offset(7, topic_id)}, 1)
    before = side.state()
    got = claims.claim(side.states, side.claimant("a"), 1, [P1, P0])
    assert set(got.claims) == {P0, P1} and got.owners == {}
    assert got.claims[P0].committed is None
    found = got.claims[P1].committed
    assert found is not None and found.offset == 7
    state = side.state()
    assert {p: claim.number for p, claim in got.claims.items()} == state.seats["a"].claims
    assert set(state.seats["a"].claims.values()) == {before.number + 1} == {state.number}
    assert state.generation == before.generation  # claims are no change of members


def test_an_offset_of_a_topic_of_before_is_none(side: Side, topic_id: bytes) -> None:
    groups.commit_offsets(side.session, "g", {P0: Offset(7, b"an old id.......")}, 1)
    assert side.claimed("a", P0)[P0].committed is None


def test_a_claim_that_is_made_again_finds_itself(side: Side, topic_id: bytes) -> None:
    first = side.claimed("a", P0, P1)
    assert side.claimed("a", P0, P1) == first
    again = side.claimed("a", P0, P1, P2)
    assert {p: again[p] for p in (P0, P1)} == first
    assert again[P2].number > first[P0].number


def test_a_partition_that_another_member_owns_is_waited_for(side: Side, topic_id: bytes) -> None:
    mine = side.claimed("a", P0, P1, P2, P3)
    side.join("b", "t")
    one, other = side.shares()["b"]
    release(side, side.claimant("a"), {one: mine[one]})
    got = claims.claim(side.states, side.claimant("b"), 2, [one, other])
    assert list(got.claims) == [one] and got.owners == {other: "a"}
    assert side.owners()[other] == "a"
    assert claims.claim(side.states, side.claimant("b"), 2, [other]) == ({}, {other: "a"})
    release(side, side.claimant("a"), {other: mine[other]})
    assert list(claims.claim(side.states, side.claimant("b"), 2, [other]).claims) == [other]


def test_when_a_member_goes_so_do_its_claims(side: Side, topic_id: bytes) -> None:
    leaves: list[Callable[[], object]] = [
        lambda: side.groups.leave("g", "a"),
        lambda: side.lapse("a"),
    ]
    for leave in leaves:
        old = side.claimed("a", P0)[P0]
        side.join("b", "t")
        leave()
        assert side.owners() == {}
        assert side.claimed("b", P0)[P0].number > old.number
        side.groups.leave("g", "b")
        side.join("a", "t")


def test_a_claim_is_for_a_generation_and_for_the_share_in_it(side: Side, topic_id: bytes) -> None:
    side.join("b", "t")
    me = side.claimant("a")
    for generation in (1, 3, 0, -1):
        with pytest.raises(StaleGeneration) as raised:
            claims.claim(side.states, me, generation, [P0])
        assert raised.value.facts["generation"] == 2
        assert raised.value.retriable
    [of_b, *_], [of_a, *_] = side.shares()["b"], side.shares()["a"]
    for wanted in ([of_b], [of_a, of_b], partitions("t", 99), partitions("nothing", 0)):
        with pytest.raises(InvalidRequest, match="is not in the share of a in group 'g'"):
            claims.claim(side.states, me, 2, wanted)
    assert side.owners() == {}
    assert list(claims.claim(side.states, me, 2, [of_a, of_a]).claims) == [of_a]  # named twice


def test_a_claim_is_by_a_member_of_that_epoch(side: Side, topic_id: bytes) -> None:
    old = side.claimant("a")
    for nobody in (old._replace(name="b"), old._replace(group="no-group")):
        with pytest.raises(UnknownMember):
            claims.claim(side.states, nobody, 1, [P0])
    side.join("a", "t")
    for epoch in (old.epoch, old.epoch + 99, -1, 0):
        with pytest.raises(MemberFenced):
            claims.claim(side.states, old._replace(epoch=epoch), 1, [P0])
    assert list(side.claimed("a", P0)) == [P0]


@pytest.mark.parametrize("count", [499, 1201])
def test_more_partitions_than_one_multi_takes(side: Side, count: int) -> None:
    side.new_topic("many", count)
    state, _ = side.join("a", "many")
    me, wanted = side.claimant("a"), side.shares()["a"]
    got = claims.claim(side.states, me, 1, wanted)
    assert len(got.claims) == count
    assert side.owners() == dict.fromkeys(wanted, "a")
    topic_id = state.topics["many"].topic_id
    offsets = {p: Offset(3, topic_id, 0, claim.number, 1) for p, claim in got.claims.items()}
    claims.commit(side.states, me, offsets, 1)
    assert side.committed() == dict.fromkeys(wanted, 3)
    ending = {p: claim.number for p, claim in got.claims.items()}
    last = {p: offset._replace(offset=4, order=2) for p, offset in offsets.items()}
    claims.release(side.states, me, ending, last, 1)
    assert side.owners() == {}
    assert side.committed() == dict.fromkeys(wanted, 4)


def test_all_or_none_when_another_changes_the_group_at_the_claim(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 4)
    other.learn()
    side.join("a", "t")
    me = side.claimant("a")
    ahead(monkeypatch, side.session, "multi", lambda: other.join("b", "t"))
    with pytest.raises(StaleGeneration):
        claims.claim(side.states, me, 1, [P0, P1, P2, P3])
    assert side.owners() == {}


def test_a_claim_that_another_of_the_group_overtakes_keeps_both(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 4)
    other.learn()
    side.join("a", "t")
    side.join("b", "t")
    shares = side.shares()
    ahead(monkeypatch, side.session, "multi", lambda: other.claimed("b", *shares["b"]))
    assert set(side.claimed("a", *shares["a"])) == set(shares["a"])
    assert side.owners() == {p: name for name, share in shares.items() for p in share}
    numbers = {name: set(seat.claims.values()) for name, seat in side.state().seats.items()}
    assert numbers["a"].isdisjoint(numbers["b"])


def test_the_offset_is_read_after_the_claim(new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last owner may commit as long as it owns the partition, so an offset that is read before may be old."""
    side, other = new_side(), new_side()
    topic_id = side.new_topic("t", 1)
    other.learn()
    side.join("a", "t")

    def another_commits() -> None:
        groups.commit_offsets(other.session, "g", {P0: Offset(9, topic_id)}, 1)

    amid(monkeypatch, side.session, "multi", another_commits)
    found = side.claimed("a", P0)[P0].committed
    assert found is not None and found.offset == 9


# --- releases


def test_a_release_that_is_made_again_is_no_error_and_releases_no_later_claim(side: Side, topic_id: bytes) -> None:
    me, first = side.claimant("a"), side.claimed("a", P0, P1)
    release(side, me, first)
    release(side, me, first)
    assert side.owners() == {}
    side.claimed("a", P0)
    release(side, me, first)
    assert side.owners() == {P0: "a"}


def test_a_release_of_claims_of_which_some_have_ended_ends_the_others(side: Side, topic_id: bytes) -> None:
    me, mine = side.claimant("a"), side.claimed("a", P0, P1, P2, P3)
    release(side, me, {P1: mine[P1]})
    release(side, me, {p: mine[p] for p in (P0, P1, P2)} | {TopicPartition("never", 1): mine[P0]})
    assert side.owners() == {P3: "a"}


def test_a_release_commits_only_what_it_owns_and_only_in_order(side: Side, topic_id: bytes) -> None:
    me, mine = side.claimant("a"), side.claimed("a", P0, P1, P2)
    release(side, me, {P1: mine[P1]})
    commit(side, me, P2, 9, mine[P2].number, order=7)
    offsets = {p: Offset(5, topic_id, 0, mine[p].number, 3) for p in (P0, P1, P2)}
    numbers = {p: claim.number for p, claim in mine.items()}
    claims.release(side.states, me, numbers, offsets, 1)
    assert side.committed() == {P0: 5, P2: 9}
    assert side.owners() == {}


def test_a_release_ends_no_claim_of_another(side: Side, topic_id: bytes) -> None:
    side.join("b", "t")
    [of_a, *_], [of_b, *_] = side.shares()["a"], side.shares()["b"]
    side.claimed("a", of_a)
    theirs = side.claimed("b", of_b)[of_b]
    for number in (theirs.number, -1, 0, 1 << 62):
        offsets = {of_b: Offset(5, topic_id, 0, number, 1)}
        claims.release(side.states, side.claimant("a"), {of_b: number}, offsets, 1)
    assert side.owners() == {of_a: "a", of_b: "b"}
    assert side.committed() == {}


def test_who_was_replaced_releases_nothing_of_its_successor(side: Side, topic_id: bytes) -> None:
    old, mine = side.claimant("a"), side.claimed("a", P0)
    side.join("a", "t")
    assert side.owners() == {}
    new = side.claimed("a", P0)
    for ending in (mine, new):
        with pytest.raises(MemberFenced):
            release(side, old, ending)
        with pytest.raises(UnknownMember):
            release(side, old._replace(name="b"), ending)
    release(side, side.claimant("a"), mine)
    assert side.owners() == {P0: "a"}


# --- commits


def test_only_the_owner_commits(side: Side, topic_id: bytes) -> None:
    a, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    commit(side, a, P0, 5, mine)
    release(side, a, {P0: mine})
    with pytest.raises(NotOwner, match="nobody does now"):
        commit(side, a, P0, 6, mine, 2)
    side.join("b", "t")
    b = side.claimant("b")
    side.groups.leave("g", "a")
    theirs = side.claimed("b", P0)[P0]
    assert theirs.committed is not None and theirs.committed.offset == 5
    with pytest.raises(UnknownMember):
        commit(side, a, P0, 6, mine, 3)
    for number in (mine, -1, 0, 1 << 62):
        with pytest.raises(NotOwner) as raised:
            commit(side, b, P0, 6, number)
        assert raised.value.facts == {"member": "b", "partition": "t-0", "group": "g", "owner": "b"}
    commit(side, b, P0, 7, theirs.number)
    assert side.committed() == {P0: 7}


def test_a_commit_of_which_one_partition_is_not_owned_writes_none(side: Side, topic_id: bytes) -> None:
    side.join("b", "t")
    [of_a, *_], [of_b, *_] = side.shares()["a"], side.shares()["b"]
    own, theirs = side.claimed("a", of_a)[of_a], side.claimed("b", of_b)[of_b]
    wanted = {p: Offset(5, topic_id, 0, claim.number, 1) for p, claim in ((of_a, own), (of_b, theirs))}
    with pytest.raises(NotOwner) as raised:
        claims.commit(side.states, side.claimant("a"), wanted, 1)
    assert (raised.value.facts["partition"], raised.value.facts["owner"]) == (str(of_b), "b")
    assert side.committed() == {}


def test_a_member_that_was_replaced_commits_nothing(side: Side, topic_id: bytes) -> None:
    old, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    side.join("a", "t")
    with pytest.raises(MemberFenced):
        commit(side, old, P0, 5, mine)
    with pytest.raises(NotOwner):
        commit(side, side.claimant("a"), P0, 5, mine)
    assert side.committed() == {}


def test_a_commit_of_the_topic_of_before_is_none_of_the_one_made_anew(side: Side, topic_id: bytes) -> None:
    """The next reader skipped the new topic's records before that offset."""
    side.delete_topic("t")
    side.new_topic("t", 4)
    side.groups.refresh("g")
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    with pytest.raises(UnknownTopicId):
        claims.commit(side.states, me, {P0: Offset(8, topic_id, 0, mine, 1)}, 1)
    assert side.committed() == dict.fromkeys((P0, P1, P2, P3), 0)
    commit(side, me, P0, 3, mine)
    assert side.committed()[P0] == 3


def test_a_commit_that_is_executed_late_spares_a_later_one(side: Side, topic_id: bytes) -> None:
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    commit(side, me, P0, 20, mine, order=2)
    commit(side, me, P0, 10, mine, order=1)
    assert side.committed() == {P0: 20}
    commit(side, me, P0, 3, mine, order=3)  # a seek back
    assert side.committed() == {P0: 3}


def test_a_commit_that_stalls_on_the_way_spares_the_next_owners(
    new_session: Callable[..., ZooKeeperSession],
    proxy: StallingProxy,
    new_side: Callable[[], Side],
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = new_side()
    stalled = Side(new_session(proxy, session_timeout_ms=60_000, request_timeout_ms=500), clock)
    topic_id = side.new_topic("t", 1)
    side.join("a", "t")
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0]
    side.join("b", "t")
    ahead(monkeypatch, stalled.session, "multi", proxy.hold)
    with pytest.raises(ZooKeeperUnreachable):
        claims.commit(stalled.states, me, {P0: Offset(5, topic_id, 0, mine.number, 9)}, 1)
    side.lapse("a")
    assert side.claimed("b", P0)[P0].committed is None
    proxy.resume()
    waited_for(lambda: not stalled.session._client._pending)
    assert side.committed() == {}


def test_a_commit_of_a_deleted_group_changes_nothing_in_the_next_one_of_the_name(side: Side, topic_id: bytes) -> None:
    side.groups.leave("g", "a")
    side.join("a", "t", instance_id="a")
    old, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    side.groups.leave("g", "a")
    groups.delete(side.session, "g")
    waited_for(lambda: side.states.read("g").version < 0)
    side.join("a", "t", instance_id="a")
    new, theirs = side.claimant("a"), side.claimed("a", P0)[P0].number
    assert new.epoch > old.epoch and theirs > mine
    with pytest.raises(MemberFenced):
        commit(side, old, P0, 5, mine, order=99)
    with pytest.raises(NotOwner):
        commit(side, new, P0, 5, mine, order=99)
    assert side.committed() == {}


def test_a_commit_that_another_of_the_same_owner_overtakes_changes_nothing(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 1)
    side.join("a", "t")
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    ahead(monkeypatch, side.session, "multi", lambda: commit(other, me, P0, 20, mine, order=2))
    commit(side, me, P0, 10, mine, order=1)
    assert side.committed() == {P0: 20}


@pytest.mark.parametrize("happens", ["lapse", "release", "claim"])
def test_what_changes_the_group_at_a_commit_is_looked_at_again(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 2)
    side.join("a", "t")
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0]
    change = {
        "lapse": lambda: other.lapse("a"),
        "release": lambda: release(other, me, {P0: mine}),
        "claim": lambda: other.claimed("a", P1),
    }[happens]
    ahead(monkeypatch, side.session, "multi", change)
    if happens == "claim":  # of another partition
        commit(side, me, P0, 5, mine.number)
        assert side.committed() == {P0: 5}
        return
    with pytest.raises(UnknownMember if happens == "lapse" else NotOwner):
        commit(side, me, P0, 5, mine.number)
    assert side.committed() == {}


# --- a broker that knows of a change later than the member


@pytest.fixture
def late(new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, topic_id: bytes) -> Side:
    """A broker that has read the group with member a, and whose watches report nothing."""
    late = new_side()
    monkeypatch.setattr(late.states, "_changed", lambda path: None)
    late.states.read("g")
    return late


def test_a_member_that_has_joined_elsewhere_is_known(late: Side, side: Side, topic_id: bytes) -> None:
    side.join("b", "t")
    b = side.claimant("b")
    with pytest.raises(NotOwner):
        commit(late, b, P0, 5, 1)
    late.states.wake_all()
    late.states.read("g")
    side.groups.leave("g", "a")
    mine = side.claimed("b", P0)[P0].number
    commit(late, b, P0, 5, mine)
    assert side.committed() == {P0: 5}


def test_a_claim_in_a_generation_that_was_made_elsewhere_is_made(late: Side, side: Side) -> None:
    me = side.claimant("a")
    side.join("b", "t")
    [of_a, *_] = side.shares()["a"]
    assert list(claims.claim(late.states, me, 2, [of_a]).claims) == [of_a]


def test_a_release_of_a_claim_that_was_made_elsewhere_ends_it_and_commits(
    late: Side, side: Side, topic_id: bytes
) -> None:
    me, mine = side.claimant("a"), side.claimed("a", P0)[P0].number
    claims.release(late.states, me, {P0: mine}, {P0: Offset(7, topic_id, 0, mine, 1)}, 0)
    assert side.owners() == {} and side.committed() == {P0: 7}


def test_a_claim_that_has_ended_elsewhere_is_not_given_again(late: Side, side: Side) -> None:
    me, mine = side.claimant("a"), side.claimed("a", P0)
    late.states.wake_all()
    assert late.states.read("g").owners == {P0: "a"}
    release(side, me, mine)
    again = claims.claim(late.states, me, 1, [P0]).claims[P0]
    assert side.owners() == {P0: "a"} and again.number > mine[P0].number


# --- streams


def test_only_the_first_streams_offsets_are_written(side: Side) -> None:
    topic_id = side.new_topic("t", 1)
    for name in ("s", "r"):
        side.join(name, kind=STREAM, assignor="")
    s, r = side.claimant("s"), side.claimant("r")
    assert claims.commit_as_first(side.states, s, {P0: Offset(5, topic_id)}, 1) == "s"
    assert claims.commit_as_first(side.states, r, {P0: Offset(9, topic_id)}, 1) == "s"
    assert side.committed() == {P0: 5}
    side.groups.leave("g", "s")
    with pytest.raises(UnknownMember):
        claims.commit_as_first(side.states, s, {P0: Offset(6, topic_id)}, 1)
    assert claims.commit_as_first(side.states, r, {P0: Offset(9, topic_id)}, 1) == "r"
    assert side.committed() == {P0: 9}


# --- readers that assign partitions themselves


def test_a_reader_that_is_no_member_commits_while_nobody_subscribes(side: Side, topic_id: bytes) -> None:
    side.claimed("a", P0)
    for partition, owner in ((P0, "a"), (P1, "a member of it")):
        with pytest.raises(GroupIsSubscribed) as raised:
            claims.commit_unclaimed(side.states, "g", {partition: Offset(5, topic_id)}, 1)
        assert raised.value.facts == {"group": "g", "partition": str(partition), "owner": owner}
    assert side.committed() == {}
    side.groups.leave("g", "a")
    claims.commit_unclaimed(side.states, "g", {P0: Offset(5, topic_id)}, 1)
    side.join("s", kind=STREAM, assignor="")
    claims.commit_unclaimed(side.states, "g", {P0: Offset(6, topic_id)}, 1)
    claims.commit_unclaimed(side.states, "new", {P0: Offset(6, topic_id)}, 1)
    assert side.committed() == {P0: 6}


def test_an_operators_offsets_are_not_written_once_a_stream_has_joined(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    topic_id = side.new_topic("t", 1)

    def check(state: GroupState) -> None:
        if state.seats:
            raise GroupIsLive(group="g", member="s", host="", left_ms=0, hint="")

    claims.commit_unclaimed(side.states, "g", {P0: Offset(5, topic_id)}, 1, check)
    ahead(monkeypatch, side.session, "multi", lambda: other.join("s", kind=STREAM, assignor=""))
    with pytest.raises(GroupIsLive):
        claims.commit_unclaimed(side.states, "g", {P0: Offset(0, topic_id)}, 1, check)
    assert side.committed() == {P0: 5}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_reader_that_is_no_member_commits_nothing_once_one_has_joined(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    side, other = new_side(), new_side()
    topic_id = side.new_topic("t", 1)
    other.learn()
    if is_there:
        members.make_group(side.session, "g")
        groups.commit_offsets(side.session, "g", {TopicPartition("u", 0): Offset(1, topic_id)}, 1)
    ahead(monkeypatch, side.session, "multi", lambda: other.join("a", "t"))
    with pytest.raises(GroupIsSubscribed):
        claims.commit_unclaimed(side.states, "g", {P0: Offset(5, topic_id)}, 1)
    assert P0 not in side.committed()
