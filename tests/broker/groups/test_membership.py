"""Changes of groups over a real ZooKeeper: one generation for each, whoever makes them, and what is new to a group."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from broker.groups import membership
from broker.groups.claims import commit, commit_as_first, commit_unclaimed, release, seat_of
from broker.groups.membership import Lapsed
from kafkalog.errors import (
    AssignorDiffers,
    GroupBusy,
    GroupKindDiffers,
    GroupTooLarge,
    InvalidRequest,
    MemberFenced,
    UnknownMember,
    UnknownTopicId,
)
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, paths
from kafkalog.zk.groups import Offset
from kafkalog.zk.members import STREAM, GroupState, Member, Topic
from kafkalog.zk.session import REQUEST_BYTES_MAX, Create
from tests.between import ahead, amid
from tests.broker.groups.sides import Side, partitions, shares_of
from tests.threads import join_all


def owned_once(state: GroupState, *topics: tuple[str, int]) -> bool:
    """Whether each partition is in the share of exactly one member."""
    counts = Counter(partition for seat in state.seats.values() for partition in seat.share)
    wanted = [TopicPartition(name, number) for name, count in topics for number in range(count)]
    return counts == Counter(wanted)


# --- generations


def test_each_change_makes_one_generation_and_gives_each_partition_one_owner(side: Side) -> None:
    side.new_topic("t", 5)
    state, epoch = side.join("a", "t")
    assert state.generation == 1 and state.seats["a"].epoch == epoch
    assert shares_of(state) == {"a": partitions("t", 0, 1, 2, 3, 4)}
    state, _ = side.join("b", "t")
    assert (state.generation, sorted(map(len, shares_of(state).values()))) == (2, [2, 3])
    assert owned_once(state, ("t", 5))
    side.groups.leave("g", "a", epoch + 1)
    side.groups.leave("g", "a", epoch)
    state = side.state()
    assert (state.generation, shares_of(state)) == (3, {"b": partitions("t", 0, 1, 2, 3, 4)})
    side.groups.leave("g", "a", epoch)
    side.groups.leave("g", "nobody")
    side.groups.leave("no group", "nobody")
    assert side.state() == state
    side.groups.leave("g", "b")
    assert (side.state().generation, side.shares()) == (4, {})
    assert side.join("c", "t")[0].generation == 5


def test_members_that_join_at_once_through_several_brokers_are_all_there(new_side: Callable[[], Side]) -> None:
    sides = [new_side() for _ in range(3)]
    sides[0].new_topic("t", 32)
    for each in sides:
        each.learn()
    errors: list[Exception] = []

    def join(number: int) -> None:
        try:
            sides[number % 3].join(f"m{number}", "t")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    join_all(threads, 120)
    assert errors == []
    state = sides[0].state()
    assert state.generation == 9
    assert list(state.seats) == list(members.read_members(sides[0].session, "g", state.seats))
    assert owned_once(state, ("t", 32))
    assert {len(share) for share in shares_of(state).values()} == {3, 4}


def test_a_change_that_is_overtaken_is_made_from_what_is_then_there(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 4)
    other.learn()
    side.join("a", "t")
    ahead(monkeypatch, side.session, "multi", lambda: other.join("b", "t"))
    state, _ = side.join("c", "t")
    assert (state.generation, list(state.seats)) == (3, ["a", "b", "c"])
    assert owned_once(state, ("t", 4))
    ahead(monkeypatch, side.session, "multi", lambda: other.groups.leave("g", "b"))
    side.groups.leave("g", "c")
    assert (side.state().generation, side.shares()) == (5, {"a": partitions("t", 0, 1, 2, 3)})


def test_a_change_that_is_overtaken_every_time_is_an_error(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    multi = side.session.multi

    def after_a_change(operations: list[object]) -> None:
        side.session.set(paths.group("g"), side.session.get(paths.group("g"))[0])
        multi(operations)  # type: ignore[arg-type]

    monkeypatch.setattr(side.session, "multi", after_a_change)
    monkeypatch.setattr("broker.groups.states._PAUSE_SECONDS", 0.0)
    with pytest.raises(GroupBusy):
        side.join("b", "t")
    monkeypatch.undo()
    assert list(side.shares()) == ["a"]


def test_a_group_has_no_more_members_than_it_may_have(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 2)
    side.join("a", "t")
    side.join("b", "t")
    with pytest.raises(InvalidRequest, match="group 'g' has 2 members, which is the most"):
        side.join("c", "t")
    side.join("b", "t")
    side.groups.leave("g", "a")
    side.join("c", "t")
    assert list(side.shares()) == ["b", "c"]


# --- a member of the name


def test_who_replaces_a_member_of_the_name_fences_it_and_moves_nothing(side: Side) -> None:
    side.new_topic("t", 4)
    side.join("s", "t", instance_id="s")
    before, _ = side.join("b", "t")
    old = side.claimant("s")
    side.claimed("s", *side.shares()["s"])
    state, epoch = side.join("s", "t", instance_id="s")
    assert (state.generation, shares_of(state)) == (before.generation, shares_of(before))
    assert list(state.seats) == ["s", "b"]
    assert side.state() == state
    assert state.owners == {}  # the new one knows no claim
    assert seat_of(side.states, state, old._replace(epoch=epoch)).epoch == epoch > old.epoch
    with pytest.raises(MemberFenced) as raised:
        seat_of(side.states, state, old)
    assert raised.value.facts["host"] == "host of s"
    with pytest.raises(UnknownMember):
        seat_of(side.states, state, old._replace(name="nobody"))
    side.groups.leave("g", "s", old.epoch)  # of the one that was replaced
    assert side.state() == state


def test_what_a_newer_broker_wrote_of_a_member_stays_when_another_replaces_it(side: Side) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    path = paths.group_member("g", "a")
    content, _ = side.session.get(path)
    side.session.set(path, json.dumps({**json.loads(content), "newer": 1}).encode())
    side.states.keep_only(set())  # another broker, which has not read it
    side.join("a", "t", instance_id="x")
    content, _ = side.session.get(path)
    assert json.loads(content).items() >= {"newer": 1, "instance_id": "x"}.items()


def test_who_replaces_a_member_and_reads_something_else_makes_a_generation(side: Side) -> None:
    side.new_topic("t", 2)
    side.new_topic("u", 2)
    side.join("s", "t", instance_id="s")
    state, _ = side.join("s", "u", instance_id="s")
    assert (state.generation, shares_of(state)) == (2, {"s": partitions("u", 0, 1)})
    state, _ = side.join("s", pattern="t", instance_id="s")
    assert (state.generation, shares_of(state)) == (3, {"s": partitions("t", 0, 1)})
    state, _ = side.join("s", pattern="u", instance_id="s")
    assert (state.generation, shares_of(state)) == (4, {"s": partitions("u", 0, 1)})


def test_the_only_member_may_come_back_with_another_assignor(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("s", "t", instance_id="s", assignor="sticky")
    state, _ = side.join("s", "t", instance_id="s", assignor="range")
    assert state.assignor == "range" == side.state().assignor
    side.join("b", "t", assignor="range")


def test_the_only_member_may_come_back_as_another_kind(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("s", kind=STREAM, assignor="")
    state, _ = side.join("s", "t")
    assert (state.kind, state.assignor, shares_of(state)) == ("consumer", "sticky", {"s": partitions("t", 0, 1)})
    assert side.committed() == {}  # nobody read t before
    state, _ = side.join("s", kind=STREAM, assignor="")
    assert (state.kind, shares_of(state)) == (STREAM, {"s": []})


def test_each_join_has_an_epoch_of_its_own(side: Side) -> None:
    side.new_topic("t", 2)
    epochs = []
    for _ in range(3):
        epochs.append(side.join("s", "t", instance_id="s")[1])
        epochs.append(side.join("s", "t", instance_id="s")[1])
        epochs.append(side.join("b", "t")[1])
        side.groups.leave("g", "s", epochs[-2])
        side.groups.leave("g", "b", epochs[-1])
    assert epochs == sorted(set(epochs))
    assert side.state().generation == 12


def test_members_of_another_kind_or_assignor_are_refused_while_there_are_others(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t", assignor="range")
    with pytest.raises(GroupKindDiffers) as kind:
        side.join("s", kind=STREAM, assignor="")
    assert kind.value.facts == {"group": "g", "kind": "consumer", "member": "a", "host": "host of a", "other": STREAM}
    with pytest.raises(AssignorDiffers) as assignor:
        side.join("b", "t", assignor="roundrobin")
    assert assignor.value.facts == {"group": "g", "assignor": "range", "other": "roundrobin"}
    assert list(side.shares()) == ["a"]
    assert members.read_leases(side.session, [("g", "b"), ("g", "s")]) == [None, None]
    side.groups.leave("g", "a")
    side.join("s", kind=STREAM, assignor="")
    with pytest.raises(GroupKindDiffers):
        side.join("b", "t")


@pytest.mark.parametrize(
    ("assignor", "shares"),
    [
        ("range", {"b": [(0, 0), (0, 1), (1, 0)], "a": [(0, 2), (1, 1)]}),
        ("roundrobin", {"b": [(0, 0), (0, 2), (1, 1)], "a": [(0, 1), (1, 0)]}),
    ],
)
def test_shares_are_those_of_the_assignor(side: Side, assignor: str, shares: dict[str, list[tuple[int, int]]]) -> None:
    side.new_topic("t", 3)
    side.new_topic("u", 2)
    side.join("b", "t", "u", assignor=assignor)
    state, _ = side.join("a", "t", "u", assignor=assignor)
    assert list(shares_of(state)) == ["b", "a"]
    given = {name: {TopicPartition("tu"[topic], number) for topic, number in share} for name, share in shares.items()}
    swapped = dict(zip(given, reversed(list(given.values())), strict=True))  # assignors sort the members
    assert {name: set(share) for name, share in shares_of(state).items()} == swapped


def test_a_partition_that_stays_even_does_not_move(side: Side) -> None:
    side.new_topic("t", 6)
    before, _ = side.join("a", "t")
    state, _ = side.join("b", "t")
    kept = set(shares_of(state)["a"])
    assert kept < set(shares_of(before)["a"]) and len(kept) == 3
    side.join("c", "t")
    side.groups.leave("g", "c")
    assert set(side.shares()["a"]) <= kept | set(shares_of(state)["b"])
    assert len(set(side.shares()["a"]) & kept) >= 2


# --- lapse


def test_a_member_lapses_with_the_lease_that_was_seen_only(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    side.join("b", "t")
    members.renew(side.session, "g", "a", 10_000)
    assert not side.lapse("a")
    assert not side.groups.lapse("g", {"nobody": Lapsed(1, 0)})
    assert list(side.shares()) == ["a", "b"]
    assert side.lapse("a", version=1)
    state = side.state()
    assert (state.generation, shares_of(state)) == (3, {"b": partitions("t", 0, 1)})


def test_a_member_that_joined_again_after_its_lease_was_seen_stays(side: Side) -> None:
    """Its new lease has the version of the old one by chance."""
    _, epoch = side.join("a", "t")
    side.groups.leave("g", "a", epoch)
    side.join("a", "t")
    assert not side.groups.lapse("g", {"a": Lapsed(epoch, 0)})
    assert list(side.shares()) == ["a"]
    assert side.lapse("a") == ["a"]


def test_members_that_lapse_together_are_removed_in_changes_of_many(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LAPSED_MAX", 3)
    side.new_topic("t", 2)
    for name in "abcde":
        side.join(name, "t")
    before = side.state()
    dead = {name: Lapsed(before.seats[name].epoch, 0) for name in "abde"}
    assert side.groups.lapse("g", dead) == ["a", "b", "d"]
    assert side.groups.lapse("g", dead) == ["e"]
    assert list(side.shares()) == ["c"]
    assert side.state().version == before.version + 2
    assert list(members.read_members(side.session, "g", "abcde")) == ["c"]


def test_a_member_that_renews_just_before_its_removal_stays(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    side.new_topic("t", 2)
    side.join("a", "t")
    ahead(monkeypatch, side.session, "multi", lambda: members.renew(other.session, "g", "a", 10_000))
    assert not side.lapse("a")
    assert list(side.shares()) == ["a"]


def test_a_lapse_of_the_last_member_leaves_the_group_with_what_it_knew(side: Side) -> None:
    topic_id = side.new_topic("t", 2)
    side.join("a", "t")
    assert side.lapse("a")
    assert side.state().topics == {"t": Topic(topic_id, 2)}
    assert side.shares() == {}


# --- partitions that are new to the group


def is_current(side: Side) -> bool:
    state = side.state()
    return side.groups.is_current(state, members.read_members(side.session, "g", state.seats))


def offset(side: Side, partition: TopicPartition, at: int, topic_id: bytes) -> None:
    groups.commit_offsets(side.session, "g", {partition: Offset(at, topic_id)}, 1)


def test_a_group_that_starts_has_no_offsets_so_that_its_reset_policy_counts(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    side.join("b", "t")
    assert side.committed() == {}


def test_partitions_that_are_new_to_a_running_group_are_read_from_the_start(side: Side) -> None:
    topic_id = side.new_topic("t", 2)
    side.join("a", "t")
    side.grow("t", 5)
    offset(side, TopicPartition("t", 3), 7, topic_id)
    side.groups.refresh("g")
    state = side.state()
    assert (state.generation, shares_of(state)) == (2, {"a": partitions("t", 0, 1, 2, 3, 4)})
    assert state.topics == {"t": Topic(topic_id, 5)}
    assert side.committed() == dict(zip(partitions("t", 2, 3, 4), (0, 7, 0), strict=True))
    side.groups.refresh("g")
    assert side.state() == state


def test_partitions_that_came_while_the_group_was_away_are_read_from_the_start(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    side.groups.leave("g", "a")
    side.grow("t", 3)
    side.new_topic("u", 1)
    state, _ = side.join("b", "t", "u")
    assert shares_of(state)["b"] == [*partitions("t", 0, 1, 2), TopicPartition("u", 0)]
    assert side.committed() == {TopicPartition("t", 2): 0}  # u was not the group's


@pytest.mark.parametrize("is_noticed", [True, False])
def test_what_comes_to_a_topic_while_its_only_reader_is_away_is_read_from_the_start(
    side: Side, is_noticed: bool
) -> None:
    side.new_topic("t", 2)
    topic_id = side.new_topic("u", 2)
    side.join("a", "t", "u")
    side.join("b", "t")
    side.groups.leave("g", "a")
    assert side.state().topics["u"] == Topic(topic_id, 2)
    side.grow("u", 4)
    if is_noticed:
        assert not is_current(side)
        side.groups.refresh("g")
        assert is_current(side)
    side.join("a", "t", "u")
    assert side.committed() == dict.fromkeys(partitions("u", 2, 3), 0)


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_topic_that_was_created_again_while_its_only_reader_is_away_is_read_from_the_start(
    side: Side, is_noticed: bool
) -> None:
    side.new_topic("t", 2)
    side.new_topic("u", 2)
    side.join("a", "t", "u")
    side.join("b", "t")
    side.groups.leave("g", "a")
    side.delete_topic("u")
    if is_noticed:
        side.groups.refresh("g")
    side.new_topic("u", 1)
    side.join("a", "t", "u")
    side.groups.refresh("g")
    assert side.committed() == {TopicPartition("u", 0): 0}


def test_the_last_topics_that_were_deleted_are_kept_in_mind(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, behind = new_side(), new_side()
    monkeypatch.setattr(membership, "GONE_MAX", 2)
    ids = {name: side.new_topic(name, 2) for name in ("t", "u", "w", "v")}
    behind.learn()
    side.join("a", *ids)
    side.join("b", "t")
    side.groups.leave("g", "a")
    for name in ("w", "v", "u"):
        side.delete_topic(name)
        assert not is_current(side)
        side.groups.refresh("g")
    state = side.state()
    kept = [("t", 2), ("v", 0), ("u", 0)]
    assert list(state.topics.items()) == [(name, Topic(ids[name], count)) for name, count in kept]
    assert is_current(side)
    behind.groups.refresh("g")
    assert side.state() == state, "a broker that has not heard of the deletions brings none back"


@pytest.mark.parametrize("how", ["refresh", "join", "made anew"])
def test_offsets_of_a_deleted_topic_are_forgotten(side: Side, how: str) -> None:
    ids = {name: side.new_topic(name, 2) for name in "tu"}
    side.join("a", "t", "u")
    for name, topic_id in ids.items():
        for partition in partitions(name, 0, 1):
            offset(side, partition, 7, topic_id)
    if how == "join":
        side.groups.leave("g", "a")
    side.delete_topic("u")
    if how == "made anew":
        side.new_topic("u", 1)
    if how == "join":
        side.join("b", "t")
    else:
        side.groups.refresh("g")
    anew = dict.fromkeys(partitions("u", 0), 0) if how == "made anew" else {}
    assert side.committed() == dict.fromkeys(partitions("t", 0, 1), 7) | anew
    assert groups.topics_of(side.session, "g") == (["t", "u"] if anew else ["t"])


def test_an_offset_of_a_deleted_topic_that_cannot_be_read_holds_up_nobody(side: Side) -> None:
    topic_id = side.new_topic("t", 1)
    side.join("a", "t")
    [where] = partitions("t", 0)
    offset(side, where, 7, topic_id)
    side.session.set(paths.group_offset("g", *where), b"{")
    side.delete_topic("t")
    side.groups.refresh("g")
    assert side.shares() == {"a": []}


def test_a_group_keeps_its_topics_while_streams_follow_it(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    side.groups.leave("g", "a")
    side.join("s", kind=STREAM, assignor="")
    side.groups.leave("g", "s")
    side.grow("t", 3)
    side.join("a", "t")
    assert side.committed() == {TopicPartition("t", 2): 0}


@pytest.mark.parametrize("how", ["stream", "reset"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_topic_has_more_than_a_stream_or_an_operator_knew_is_read_from_the_start(
    side: Side, how: str, is_first: bool
) -> None:
    topic_id = side.new_topic("t", 2)
    side.new_topic("u", 2)
    read = dict.fromkeys(partitions("t", 0, 1), Offset(7, topic_id))
    if how == "stream":
        side.join("s", kind=STREAM, assignor="")
        commit_as_first(side.states, side.claimant("s"), read, 1)
        side.groups.leave("g", "s")
    else:
        commit_unclaimed(side.states, "g", read, 1)
    if not is_first:
        side.join("b", "u")
    side.grow("t", 4)
    side.join("a", "t", "u")
    assert side.committed() == dict.fromkeys(read, 7) | dict.fromkeys(partitions("t", 2, 3), 0)


def test_a_topic_made_anew_of_which_only_offsets_were_left_is_read_from_the_start(side: Side) -> None:
    old = side.new_topic("t", 2)
    [first, _] = both = partitions("t", 0, 1)
    commit_unclaimed(side.states, "g", {first: Offset(7, old)}, 1)
    side.delete_topic("t")
    side.new_topic("t", 2)
    side.join("a", "t")
    assert side.committed() == dict.fromkeys(both, 0)


@pytest.mark.parametrize("assignor", ["sticky", "range", "roundrobin"])
def test_a_topic_that_nobody_reads_any_more_is_in_no_share(side: Side, assignor: str) -> None:
    side.new_topic("t", 2)
    side.new_topic("u", 2)
    side.join("a", "t", "u", assignor=assignor)
    side.join("b", "t", assignor=assignor)
    side.groups.leave("g", "a")
    assert side.shares() == {"b": partitions("t", 0, 1)}
    side.join("c", "t", assignor=assignor)
    assert owned_once(side.state(), ("t", 2))


def test_partitions_that_come_as_somebody_joins_are_read_from_the_start(side: Side) -> None:
    side.new_topic("t", 2)
    side.new_topic("u", 1)
    side.join("a", "t")
    side.grow("t", 3)
    state, _ = side.join("b", "t", "u")
    assert owned_once(state, ("t", 3), ("u", 1))
    assert side.committed() == {TopicPartition("t", 2): 0}  # u is new to the group because b reads it


def test_offsets_of_new_partitions_are_there_before_the_generation_that_has_them(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    side.grow("t", 2)
    multi, seen = side.session.multi, list[tuple[int, int]]()

    def watched(operations: list[object]) -> None:
        multi(operations)  # type: ignore[arg-type]
        seen.append((side.state().generation, len(side.committed())))

    monkeypatch.setattr(side.session, "multi", watched)
    side.groups.refresh("g")
    assert seen == [(1, 1), (2, 1)]


def test_a_topic_that_comes_to_a_pattern_is_read_from_the_start(side: Side) -> None:
    side.new_topic("logs-a", 1)
    side.join("a", pattern="logs-.*")
    side.new_topic("logs-b", 2)
    side.new_topic("other", 2)
    side.groups.refresh("g")
    assert side.shares() == {"a": [TopicPartition("logs-a", 0), *partitions("logs-b", 0, 1)]}
    assert side.committed() == dict.fromkeys(partitions("logs-b", 0, 1), 0)


def test_a_topic_that_was_named_before_it_was_there_is_read_from_the_start(side: Side) -> None:
    state, _ = side.join("a", "t")
    assert shares_of(state) == {"a": []}
    side.new_topic("t", 2)
    side.groups.refresh("g")
    assert side.shares() == {"a": partitions("t", 0, 1)}
    assert side.committed() == dict.fromkeys(partitions("t", 0, 1), 0)


def test_a_topic_that_was_created_again_is_read_from_the_start(side: Side) -> None:
    old = side.new_topic("t", 2)
    side.join("a", "t")
    offset(side, TopicPartition("t", 0), 7, old)
    side.delete_topic("t")
    new = side.new_topic("t", 2)
    assert not is_current(side)
    side.groups.refresh("g")
    assert side.state().generation == 2
    assert side.state().topics == {"t": Topic(new, 2)}
    assert side.committed() == dict.fromkeys(partitions("t", 0, 1), 0)
    assert {each.topic_id for each in groups.committed(side.session, "g", None).values()} == {new}


def test_a_topic_that_was_created_again_while_somebody_joins_is_read_from_the_start(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    side.delete_topic("t")
    new = side.new_topic("t", 1)
    side.join("b", "t")
    side.groups.refresh("g")
    assert side.state().topics == {"t": Topic(new, 1)}
    assert owned_once(side.state(), ("t", 1))
    assert groups.committed(side.session, "g", {"t": new}).keys() == {TopicPartition("t", 0)}


def test_a_deleted_topic_is_nobodys(side: Side) -> None:
    side.new_topic("t", 2)
    side.new_topic("u", 1)
    side.join("a", "t", "u")
    side.delete_topic("t")
    assert not is_current(side)
    side.groups.refresh("g")
    assert side.shares() == {"a": partitions("u", 0)}
    assert is_current(side)


# --- a broker that knows less


def test_a_broker_that_knows_fewer_partitions_or_topics_does_not_shrink_the_group(
    new_side: Callable[[], Side],
) -> None:
    behind, side = new_side(), new_side()
    side.new_topic("t", 2)
    behind.learn()
    side.grow("t", 4)
    side.new_topic("u", 1)
    side.join("a", "t", "u")
    state, _ = behind.join("b", "t", "u")
    assert owned_once(state, ("t", 4), ("u", 1))
    behind.groups.leave("g", "a")
    assert owned_once(side.state(), ("t", 4), ("u", 1))
    state = side.state()
    behind.groups.refresh("g")
    assert side.state() == state
    assert side.committed() == {}


def test_a_broker_that_knows_a_topic_of_before_does_not_bring_it_back(new_side: Callable[[], Side]) -> None:
    behind, side = new_side(), new_side()
    side.new_topic("t", 4)
    behind.learn()
    side.delete_topic("t")
    new = side.new_topic("t", 2)
    side.join("a", "t")
    behind.join("b", "t")
    behind.groups.refresh("g")
    assert side.state().topics == {"t": Topic(new, 2)}
    assert owned_once(side.state(), ("t", 2))
    assert side.committed() == {}


def test_a_broker_that_has_not_heard_of_a_deletion_changes_the_groups_of_a_pattern(
    new_side: Callable[[], Side],
) -> None:
    behind, side = new_side(), new_side()
    for name in ("t1", "t2"):
        side.new_topic(name, 2)
    behind.learn()
    for name in ("a", "b", "c"):
        side.join(name, pattern="t.*")
    side.delete_topic("t2")
    side.groups.refresh("g")
    behind.groups.refresh("g")
    assert behind.lapse("a") == ["a"]
    behind.groups.leave("g", "b")
    behind.join("d", pattern="t.*")
    assert owned_once(side.state(), ("t1", 2))
    assert side.state().topics["t2"].partitions == 0


def test_a_stream_is_assigned_nothing(side: Side) -> None:
    side.new_topic("t", 2)
    side.join("s", kind=STREAM, assignor="")
    state, _ = side.join("r", kind=STREAM, assignor="")
    assert (state.kind, shares_of(state), state.topics) == (STREAM, {"s": [], "r": []}, {})
    assert side.state().first() == "s"
    side.groups.leave("g", "s")
    assert side.state().first() == "r"


def test_members_without_partitions_wait_in_the_group(side: Side) -> None:
    side.new_topic("t", 1)
    for name in ("a", "b", "c"):
        state, _ = side.join(name, "t")
    assert shares_of(state) == {"a": partitions("t", 0), "b": [], "c": []}
    side.groups.leave("g", "a")
    assert sorted(map(len, side.shares().values())) == [0, 1]


def test_a_member_describes_itself_to_the_group(side: Side) -> None:
    side.new_topic("t", 1)
    side.join("a", "t", instance_id="static")
    [found] = members.read_members(side.session, "g", ["a"]).values()
    assert found == Member("a", ("t",), host="host of a", instance_id="static", since_ms=found.since_ms)


# --- a broker that knows an old state


@pytest.mark.parametrize("how", ["join", "refresh"])
def test_what_a_member_already_reads_is_not_new_to_a_broker_that_knows_less(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It reads the description of a member that has subscribed to one topic more, and the state from before that."""
    side, late = new_side(), new_side()
    side.new_topic("t", 2)
    side.new_topic("old", 2)
    late.learn()
    side.join("a", "t", instance_id="a")
    ahead(monkeypatch, late.states, "described", lambda: side.join("a", "t", "old", instance_id="a"))
    if how == "join":
        late.join("b", "t", "old")
    else:
        late.groups.refresh("g")
    assert side.committed() == {}
    assert side.state().topics.keys() == {"t", "old"}


def test_offsets_of_a_topic_made_anew_are_not_overwritten_by_a_broker_that_knew_the_old_one(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, late = new_side(), new_side()
    side.new_topic("t", 2)
    side.join("a", pattern=".*")
    side.new_topic("u", 1)
    late.learn()

    def make_anew() -> None:
        side.delete_topic("u")
        side.groups.refresh("g")
        side.new_topic("u", 1)
        side.groups.refresh("g")
        [u] = partitions("u", 0)
        number = side.claimed("a", u)[u].number
        offset = Offset(100, side.state().topics["u"].topic_id, 0, number, 1)
        commit(side.states, side.claimant("a"), {u: offset}, 0)

    ahead(monkeypatch, groups, "commit_offsets", make_anew)
    late.groups.refresh("g")
    assert side.committed()[TopicPartition("u", 0)] == 100


@pytest.mark.parametrize("subscription", [{}, {"pattern": "t.*"}], ids=["names", "pattern"])
def test_a_topic_that_a_broker_has_not_heard_of_at_the_first_join_is_not_new_later(
    new_side: Callable[[], Side], subscription: dict[str, str]
) -> None:
    side, late = new_side(), new_side()
    side.new_topic("topic", 2)
    late.join("a", *([] if subscription else ["topic"]), **subscription)
    assert late.shares() == {"a": partitions("topic", 0, 1)}
    late.learn()
    late.groups.refresh("g")
    assert side.committed() == {}


def test_a_stream_that_its_broker_does_not_know_yet_keeps_its_place(new_side: Callable[[], Side]) -> None:
    side, late = new_side(), new_side()
    _, epoch = side.join("s", kind=STREAM, assignor="")
    side.join("r", kind=STREAM, assignor="")
    before = side.state()
    assert late.join("s", kind=STREAM, assignor="")[1] == epoch
    assert side.state() == before


def test_a_group_that_was_away_knows_the_topic_that_was_made_anew_when_it_comes_back(side: Side) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    side.groups.leave("g", "a")
    side.delete_topic("t")
    topic_id = side.new_topic("t", 1)
    [where] = partitions("t", 0)
    commit_unclaimed(side.states, "g", {where: Offset(5, topic_id)}, 1)
    side.join("a", "t")
    assert side.state().topics == {"t": Topic(topic_id, 1)}
    found = side.claimed("a", where)[where].committed
    assert found is not None and found.offset == 5


def test_a_commit_of_the_old_topic_amid_a_refresh_leaves_the_start_of_the_one_made_anew(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = side.new_topic("t", 1)
    side.join("a", "t")
    [where] = partitions("t", 0)
    number = side.claimed("a", where)[where].number
    claimant = side.claimant("a")
    side.delete_topic("t")
    side.new_topic("t", 1)

    def commit_of_old() -> None:
        with pytest.raises(UnknownTopicId):
            commit(side.states, claimant, {where: Offset(8, old, 0, number, 1)}, 1)

    amid(monkeypatch, groups, "commit_offsets", commit_of_old)
    monkeypatch.setattr(side.states._group("g"), "lock", threading.RLock())  # as at another broker
    side.groups.refresh("g")
    assert side.committed() == {where: 0}


def test_a_release_of_a_topic_that_was_made_anew_ends_the_claim_and_writes_nothing(side: Side) -> None:
    old = side.new_topic("t", 1)
    side.join("a", "t")
    [where] = partitions("t", 0)
    number = side.claimed("a", where)[where].number
    side.delete_topic("t")
    side.new_topic("t", 1)
    release(side.states, side.claimant("a"), {where: number}, {where: Offset(8, old, 0, number, 1)}, 1)
    assert (side.owners(), side.committed()) == ({}, {})


def test_a_group_without_room_for_what_has_grown_still_learns_what_has_gone(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grows", "goes"):
        side.new_topic(name, 900)
    side.join("a", "grows", "goes")
    monkeypatch.setattr(members, "STATE_BYTES_MAX", 0)
    with pytest.raises(GroupTooLarge) as raised:
        members.check_room_for_claims("g", side.state())
    monkeypatch.setattr(members, "STATE_BYTES_MAX", raised.value.facts["size"])
    side.grow("grows", 3000)
    side.delete_topic("goes")
    side.groups.refresh("g")
    assert side.shares() == {"a": partitions("grows", *range(900))}
    with pytest.raises(GroupTooLarge):
        side.groups.refresh("g")


# --- a state that does not fit its znode


def test_a_member_whose_claims_would_not_fit_does_not_join(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.new_topic("t", 4)
    side.new_topic("u" * 200, 4)
    side.join("a", "t")
    side.claimed("a", *partitions("t", 0, 1, 2, 3))
    monkeypatch.setattr(members, "STATE_BYTES_MAX", 500)
    with pytest.raises(GroupTooLarge) as raised:
        side.join("b", "u" * 200)
    assert raised.value.facts["limit"] == 500 < raised.value.facts["size"]
    assert not raised.value.retriable
    assert list(side.shares()) == ["a"]
    side.join("b", "t")


@pytest.mark.parametrize("how", ["leave", "lapse"])
def test_a_member_goes_also_if_its_topics_have_grown_beyond_what_fits(
    side: Side, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    topic_id = side.new_topic("t", 4)
    for name in "ab":
        side.join(name, pattern=".*")
    for name, share in side.shares().items():
        side.claimed(name, *share)
    monkeypatch.setattr(members, "STATE_BYTES_MAX", len(side.session.get(paths.group("g"))[0]) + 100)
    side.new_topic("u" * 200, 4)
    with pytest.raises(GroupTooLarge):
        side.groups.refresh("g")
    if how == "leave":
        side.groups.leave("g", "a")
    else:
        assert side.lapse("a")
    assert side.shares() == {"b": partitions("t", 0, 1, 2, 3)}
    assert side.state().topics == {"t": Topic(topic_id, 4)}
    monkeypatch.undo()
    side.groups.refresh("g")
    assert owned_once(side.state(), ("t", 4), ("u" * 200, 4))
    assert side.committed() == dict.fromkeys(partitions("u" * 200, 0, 1, 2, 3), 0)


def test_the_largest_state_and_the_largest_member_fit_one_request() -> None:
    text = "x" * 4096
    member = Member("m" * 249, ("t" * 65_536,), text, text, text, text, text)
    creates = [each for each in members.create_member("g" * 249, member) if isinstance(each, Create)]
    size = sum(len(each.value) + len(each.path) for each in creates)
    assert members.STATE_BYTES_MAX + size + 10_000 < REQUEST_BYTES_MAX
