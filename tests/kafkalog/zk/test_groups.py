"""Group offsets in a real ZooKeeper."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence

import pytest

from kafkalog.errors import GroupBusy, UnreadableZnode, ZooKeeperNotAsked, ZooKeeperUnreachable
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, paths
from kafkalog.zk.groups import Committed, GuardMoved, Offset
from kafkalog.zk.session import BadVersion, Check, Operation, Watch, ZooKeeperSession
from tests.between import amid
from tests.kafkalog.zk.transitions import join, leave, live, state_of
from tests.proxy import StallingProxy
from tests.threads import join_all
from tests.waiting import waited_for

IDS = {"a": b"a" * 16, "b": b"b" * 16}


@pytest.fixture(autouse=True)
def consumers(session: ZooKeeperSession) -> None:
    """The parent of all groups, which the first broker makes."""
    session.ensure([paths.CONSUMERS])


def commit(
    session: ZooKeeperSession,
    group: str,
    offsets: Mapping[TopicPartition, int],
    ids: Mapping[str, bytes],
    now_us: int,
    *guards: Check,
) -> None:
    """Commit as a reader that is no member."""
    if not guards:
        members.make_group(session, group)
    wanted = {partition: Offset(offset, ids[partition.topic]) for partition, offset in offsets.items()}
    groups.commit_offsets(session, group, wanted, now_us, guards)


def test_offsets_are_read_back_by_partition(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", 0): 5, TopicPartition("a", 10): 1 << 40, TopicPartition("b", 0): 0}
    commit(session, "g", offsets, IDS, 123)
    assert groups.committed_offsets(session, "g", IDS) == offsets
    assert groups.committed_offsets(session, "g", IDS, ["b", "c"]) == {TopicPartition("b", 0): 0}
    assert groups.committed_offsets(session, "nobody", IDS) == {}
    assert groups.committed_offsets(session, "nobody", IDS, ["a"]) == {}
    commit(session, "g", {TopicPartition("a", 0): 4, TopicPartition("b", 1): 9}, IDS, 124)
    assert groups.committed_offsets(session, "g", IDS) == offsets | {
        TopicPartition("a", 0): 4,
        TopicPartition("b", 1): 9,
    }
    content, _ = session.get(paths.group_offset("g", "a", 0))
    assert json.loads(content) == {"offset": 4, "topic_id": IDS["a"].hex(), "leader_epoch": -1, "committed_us": 124}


def test_an_offset_that_cannot_be_read_is_an_error_and_not_taken_for_none(session: ZooKeeperSession) -> None:
    for group in ("g", "h"):
        commit(session, group, {TopicPartition("a", 0): 5}, IDS, 1)
    path = paths.group_offset("g", "a", 0)
    session.set(path, b"[" * 100_000)
    with pytest.raises(UnreadableZnode, match=f"znode {path} in ZooKeeper cannot be read: .* nested too deeply"):
        groups.committed_offsets(session, "g", IDS)
    assert groups.committed_offsets(session, "h", IDS) == {TopicPartition("a", 0): 5}


def test_a_topic_created_again_inherits_no_offset(session: ZooKeeperSession) -> None:
    commit(session, "g", {TopicPartition("a", 0): 5}, IDS, 1)
    assert groups.committed_offsets(session, "g", {"a": b"new id.........."}) == {}
    assert groups.committed_offsets(session, "g", {}) == {}


def test_offsets_of_topics_that_were_deleted_are_reported_with_their_ids_and_forgotten_unless_written_again(
    session: ZooKeeperSession,
) -> None:
    first, second, new = TopicPartition("a", 0), TopicPartition("a", 1), b"new id.........."
    commit(session, "g", {first: 5, second: 6, TopicPartition("b", 0): 7}, IDS, 1)
    found = groups.committed(session, "g", None, ["a"])
    assert found == {first: Committed(5, 1, IDS["a"]), second: Committed(6, 1, IDS["a"])}
    commit(session, "g", {second: 2}, {"a": new}, 2)
    groups.forget(session, "g", {partition: each.topic_id for partition, each in found.items()})
    assert groups.committed(session, "g", None) == {
        second: Committed(2, 2, new),
        TopicPartition("b", 0): Committed(7, 1, IDS["b"]),
    }
    groups.forget(session, "g", {first: IDS["a"]})  # gone already
    groups.forget(session, "g", {second: new})
    assert groups.topics_of(session, "g") == ["b"]


def test_members_that_commit_the_same_new_partitions_at_once_all_succeed(
    new_session: Callable[[], ZooKeeperSession],
) -> None:
    errors: list[Exception] = []

    def commit_all(session: ZooKeeperSession, offset: int) -> None:
        try:
            for number in range(8):
                commit(session, "g", {TopicPartition("a", number): offset}, IDS, 1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=commit_all, args=(new_session(), offset)) for offset in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert errors == []
    assert len(groups.committed_offsets(new_session(), "g", IDS)) == 8


def test_more_partitions_than_one_multi_takes(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", number): number for number in range(1200)}
    commit(session, "g", offsets, IDS, 1)
    assert groups.committed_offsets(session, "g", IDS) == offsets


P0 = TopicPartition("a", 0)


def test_a_commit_refused_while_zookeeper_is_away_is_never_made(
    new_session: Callable[..., ZooKeeperSession], proxy: StallingProxy
) -> None:
    cut_off, other = new_session(proxy), new_session()
    commit(other, "g", {P0: 50}, IDS, 0)
    proxy.cut()
    waited_for(lambda: not cut_off.connected)
    with pytest.raises(ZooKeeperNotAsked):
        commit(cut_off, "g", {P0: 100}, IDS, 0)
    commit(other, "g", {P0: 2000}, IDS, 0)
    proxy.resume()
    waited_for(lambda: cut_off.connected)
    assert groups.committed_offsets(cut_off, "g", IDS) == {P0: 2000}


@pytest.mark.parametrize("before", [None, 50])
def test_a_commit_that_arrives_late_spares_a_later_one(
    new_session: Callable[..., ZooKeeperSession],
    proxy: StallingProxy,
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
) -> None:
    stalled, other = new_session(proxy, session_timeout_ms=60_000, request_timeout_ms=500), new_session()
    other.ensure([paths.group_topic_offsets("g", "a")])
    if before is not None:
        commit(other, "g", {P0: before}, IDS, 0)
    send = stalled.multi

    def on_a_stalled_network(operations: Sequence[Operation]) -> None:
        proxy.hold()
        send(operations)

    monkeypatch.setattr(stalled, "multi", on_a_stalled_network)
    with pytest.raises(ZooKeeperUnreachable) as raised:
        commit(stalled, "g", {P0: 100}, IDS, 0)
    assert type(raised.value) is ZooKeeperUnreachable  # it was sent
    commit(other, "g", {P0: 2000}, IDS, 0)
    proxy.resume()
    waited_for(lambda: not stalled._client._pending)
    assert groups.committed_offsets(stalled, "g", IDS) == {P0: 2000}


def test_of_two_commits_at_once_the_one_that_sees_the_other_is_the_last(
    new_session: Callable[..., ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = new_session(), new_session()
    commit(one, "g", {P0: 1}, IDS, 0)
    send = one.multi

    def after_the_other(operations: Sequence[Operation]) -> None:
        monkeypatch.setattr(one, "multi", send)
        commit(other, "g", {P0: 2}, IDS, 0)
        send(operations)

    monkeypatch.setattr(one, "multi", after_the_other)
    commit(one, "g", {P0: 3}, IDS, 0)
    assert groups.committed_offsets(one, "g", IDS) == {P0: 3}


def test_a_commit_that_others_overtake_every_time_fails_and_is_not_taken_for_made(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.make_group(session, "g")
    tries: list[int] = []

    def overtaken(operations: Sequence[Operation]) -> None:
        tries.append(len(operations))
        raise BadVersion

    monkeypatch.setattr(session, "multi", overtaken)
    with pytest.raises(GroupBusy):
        commit(session, "g", {P0: 1}, IDS, 0)
    assert tries == [3] * groups._ATTEMPTS  # the offset, and the znodes above it


def test_a_commit_depends_on_its_guard(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    session.create("/guard")
    commit(session, "g", {P0: 1}, IDS, 0, Check("/guard", 0))
    session.set("/guard", b"")
    with pytest.raises(GuardMoved):
        commit(session, "g", {P0: 2}, IDS, 0, Check("/guard", 0))
    commit(session, "g", {P0: 3}, IDS, 0, Check("/guard", 1))
    session.delete("/guard")
    with pytest.raises(GuardMoved):
        commit(session, "g", {P0: 4}, IDS, 0, Check("/guard", 1))
    assert groups.committed_offsets(session, "g", IDS) == {P0: 3}


def test_a_commit_whose_guard_does_not_hold_makes_nothing(session: ZooKeeperSession) -> None:
    with pytest.raises(GuardMoved):
        commit(session, "deleted", {P0: 1}, IDS, 0, Check(paths.group("deleted"), 1))
    assert session.children(paths.CONSUMERS) == []


def test_offsets_that_are_written_or_forgotten_while_they_are_forgotten_or_read(
    new_session: Callable[..., ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = new_session(), new_session()
    first, second, new = TopicPartition("a", 0), TopicPartition("a", 1), b"new id.........."
    commit(session, "g", {first: 5, second: 6}, IDS, 1)
    children = session.children
    amid(monkeypatch, session, "get_many", lambda: commit(other, "g", {first: 7}, {"a": new}, 2))
    groups.forget(session, "g", {TopicPartition("a", 7): IDS["a"], first: IDS["a"], second: IDS["a"]})
    assert groups.committed(session, "g", None) == {first: Committed(7, 2, new)}

    def and_then_it_is_forgotten(path: str, watch: Watch | None = None) -> list[str]:
        found = children(path, watch)
        groups.forget(other, "g", {first: new})
        return found

    monkeypatch.setattr(session, "children", and_then_it_is_forgotten)
    assert groups.committed(session, "g", None, ["a"]) == {}


def test_the_highest_offset_is_that_of_the_group_furthest_on_whatever_its_name(session: ZooKeeperSession) -> None:
    session.ensure([paths.CONSUMERS])
    for group, offset in (("a", 3), ("b", 9), ("c", 4)):
        commit(session, group, {P0: offset}, IDS, 1)
    commit(session, "d", {P0: 99}, {"a": b"new id.........."}, 1)
    assert groups.highest_offsets(session, "a", IDS["a"]) == {0: (9, "b")}


def test_a_deleted_group_leaves_no_znode(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition(topic, number): number for topic in ("t", "u") for number in range(3)}
    commit(session, "g", offsets, {"t": b"t" * 16, "u": b"u" * 16}, 1)
    join(session, "g", "one")
    with pytest.raises(groups.HasMembers):
        groups.delete(session, "g")
    assert len(groups.committed(session, "g", None)) == 6
    leave(session, "g", "one")
    groups.delete(session, "g")
    assert session.children(paths.CONSUMERS) == []
    groups.delete(session, "g")  # fine


def test_a_group_of_many_offsets_is_deleted_until_a_member_comes(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    many, another = [TopicPartition("a", number) for number in range(1200)], new_session()
    commit(session, "g", dict.fromkeys(many, 5), IDS, 1)
    join(session, "g", "one")
    leave(session, "g", "one")
    amid(monkeypatch, session, "multi", lambda: join(another, "g", "two"))
    with pytest.raises(groups.HasMembers):
        groups.delete(session, "g")
    assert len(groups.committed(session, "g", None)) == 1200 - 498
    leave(another, "g", "two")
    groups.delete(session, "g")
    assert session.children(paths.CONSUMERS) == []


def test_two_may_delete_a_group_at_once(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(session, "g", {P0: 1}, IDS, 1)
    children, other = session.children, new_session()

    def and_then_another_deletes_it(path: str, watch: Watch | None = None) -> list[str]:
        found = children(path, watch)
        groups.delete(other, "g")
        return found

    monkeypatch.setattr(session, "children", and_then_another_deletes_it)
    groups.delete(session, "g")
    assert other.children(paths.CONSUMERS) == []


def test_an_offset_that_is_written_while_its_group_is_deleted_stays(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = TopicPartition("t", 0), TopicPartition("t", 1)
    commit(session, "g", {kept: 1, gone: 1}, {"t": b"t" * 16}, 1)
    amid(monkeypatch, session, "stats", lambda: commit(session, "g", {kept: 7}, {"t": b"t" * 16}, 2))
    groups.delete(session, "g")
    assert {partition: each.offset for partition, each in groups.committed(session, "g", None).items()} == {kept: 7}


def test_what_a_member_commits_that_comes_while_its_group_is_deleted_stays(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, another = TopicPartition("t", 0), TopicPartition("u", 0), new_session()
    ids = {"t": b"t" * 16, "u": b"u" * 16}
    commit(session, "g", {old: 1}, ids, 1)
    join(session, "g", "one")
    leave(session, "g", "one")

    def a_member_comes() -> None:
        join(another, "g", "two")
        commit(another, "g", {old: 7, new: 8}, ids, 2)

    amid(monkeypatch, session, "delete", a_member_comes)  # of the znode of members, which was empty
    groups.delete(session, "g")
    assert {partition: each.offset for partition, each in groups.committed(session, "g", None).items()} == {
        old: 7,
        new: 8,
    }
    assert live(session, "g") == ["two"]


@pytest.mark.parametrize(
    ("call", "is_before"), [("get_many", True), ("stats", True), ("multi", False), ("delete", False)]
)
def test_a_member_that_joins_as_its_group_is_deleted_is_in_it_with_what_is_left(
    session: ZooKeeperSession,
    new_session: Callable[[], ZooKeeperSession],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    is_before: bool,
) -> None:
    another = new_session()
    commit(session, "g", {P0: 1}, IDS, 1)
    join(session, "g", "one")
    before = leave(session, "g", "one")
    amid(monkeypatch, session, call, lambda: join(another, "g", "two"))
    if is_before:
        with pytest.raises(groups.HasMembers):
            groups.delete(session, "g")
    else:
        groups.delete(session, "g")
    assert groups.committed_offsets(session, "g", IDS) == ({P0: 1} if is_before else {})
    state = state_of(session, "g")
    assert list(state.seats) == ["two"] == list(members.read_members(session, "g", ["two"]))
    assert state.generation == before.generation + 1
    [lease] = members.read_leases(session, [("g", "two")])
    assert lease is not None


def member_offset(offset: int, number: int, order: int) -> dict[TopicPartition, Offset]:
    return {P0: Offset(offset, IDS["a"], 3, number, order)}


def test_of_the_commits_of_a_claim_one_that_is_executed_late_changes_nothing(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    for offset, number, order in ((10, 5, 1), (30, 5, 3), (20, 5, 2), (99, 4, 9)):
        groups.commit_offsets(session, "g", member_offset(offset, number, order), 1)
    assert groups.committed(session, "g", None) == {P0: Committed(30, 1, IDS["a"], 3, (5, 3))}
    groups.commit_offsets(session, "g", member_offset(25, 5, 3), 2)  # the same request again, or a seek back
    assert groups.committed_offsets(session, "g", IDS) == {P0: 25}
    groups.commit_offsets(session, "g", member_offset(7, 6, 1), 3)  # of a later claim
    assert groups.committed(session, "g", None) == {P0: Committed(7, 3, IDS["a"], 3, (6, 1))}


def test_a_late_commit_keeps_the_others_of_its_request(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    p1 = P0._replace(partition=1)
    groups.commit_offsets(session, "g", member_offset(10, 5, 5), 1)
    groups.commit_offsets(session, "g", {**member_offset(3, 5, 2), p1: Offset(4, IDS["a"], 0, 9, 2)}, 2)
    assert groups.committed_offsets(session, "g", IDS) == {P0: 10, p1: 4}


def test_a_commit_to_a_topic_created_again_is_not_late(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    groups.commit_offsets(session, "g", member_offset(10, 5, 5), 1)
    new = {P0: Offset(1, IDS["b"], 0, 5, 1)}
    groups.commit_offsets(session, "g", new, 2)
    assert groups.committed_offsets(session, "g", {"a": IDS["b"]}) == {P0: 1}


def test_a_reset_by_an_operator_is_late_after_nothing(session: ZooKeeperSession) -> None:
    members.make_group(session, "g")
    groups.commit_offsets(session, "g", member_offset(10, 5, 5), 1)
    commit(session, "g", {P0: 2}, IDS, 2)
    assert groups.committed(session, "g", None) == {P0: Committed(2, 2, IDS["a"])}


def test_only_new_offsets_are_written_where_the_group_has_none_of_that_topic(session: ZooKeeperSession) -> None:
    p1, p2 = P0._replace(partition=1), P0._replace(partition=2)
    commit(session, "g", {P0: 7}, IDS, 1)
    commit(session, "g", {p1: 8}, {"a": b"an old id......."}, 1)
    groups.commit_offsets(session, "g", {p: Offset(0, IDS["a"]) for p in (P0, p1, p2)}, 2, only_new=True)
    assert groups.committed_offsets(session, "g", IDS) == {P0: 7, p1: 0, p2: 0}


def test_more_offsets_than_one_multi_takes_depend_on_the_guard_each_time(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before the guard moved stays."""
    members.make_group(session, "g")
    many = [TopicPartition("a", number) for number in range(1200)]
    session.create("/guard")
    amid(monkeypatch, session, "multi", lambda: session.set("/guard", b""))
    with pytest.raises(GuardMoved) as raised:
        commit(session, "g", dict.fromkeys(many, 5), IDS, 1, Check("/guard", 0))
    assert raised.value.path == "/guard"
    assert sorted(groups.committed(session, "g", None)) == many[:499]


def test_offsets_of_some_partitions_are_those_of_the_topics_with_these_ids(session: ZooKeeperSession) -> None:
    p1, of_b = P0._replace(partition=1), TopicPartition("b", 0)
    commit(session, "g", {P0: 1, p1: 2, of_b: 3}, IDS, 1)
    wanted = [P0, of_b, P0._replace(partition=9)]
    assert groups.committed_of(session, "g", wanted, IDS) == {
        P0: Committed(1, 1, IDS["a"]),
        of_b: Committed(3, 1, IDS["b"]),
    }
    assert groups.committed_of(session, "g", wanted, {"a": IDS["b"], "b": IDS["b"]}).keys() == {of_b}
    assert groups.committed_of(session, "nobody", wanted, IDS) == {}
