"""Group offsets in a real ZooKeeper."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

import pytest

from kafkalog.errors import UnreadableZnode, ZooKeeperNotAsked, ZooKeeperUnreachable
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, paths
from kafkalog.zk.session import BadVersion, Check, Operation, Watch, ZooKeeperSession
from tests.kafkalog.zk.between import amid
from tests.proxy import StallingProxy
from tests.threads import join_all
from tests.waiting import waited_for

IDS = {"a": b"a" * 16, "b": b"b" * 16}


def test_offsets_are_read_back_by_partition(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", 0): 5, TopicPartition("a", 10): 1 << 40, TopicPartition("b", 0): 0}
    groups.commit_offsets(session, "g", offsets, IDS, 123)
    assert groups.committed_offsets(session, "g", IDS) == offsets
    assert groups.committed_offsets(session, "g", IDS, ["b", "c"]) == {TopicPartition("b", 0): 0}
    assert groups.committed_offsets(session, "nobody", IDS) == {}
    assert groups.committed_offsets(session, "nobody", IDS, ["a"]) == {}
    groups.commit_offsets(session, "g", {TopicPartition("a", 0): 4, TopicPartition("b", 1): 9}, IDS, 124)
    assert groups.committed_offsets(session, "g", IDS) == offsets | {
        TopicPartition("a", 0): 4,
        TopicPartition("b", 1): 9,
    }
    content, _ = session.get(paths.group_offset("g", "a", 0))
    assert json.loads(content) == {"offset": 4, "topic_id": IDS["a"].hex(), "committed_us": 124}


def test_an_offset_that_cannot_be_read_is_an_error_and_not_taken_for_none(session: ZooKeeperSession) -> None:
    for group in ("g", "h"):
        groups.commit_offsets(session, group, {TopicPartition("a", 0): 5}, IDS, 1)
    path = paths.group_offset("g", "a", 0)
    session.set(path, b"[" * 100_000)
    with pytest.raises(UnreadableZnode, match=f"znode {path} in ZooKeeper cannot be read: .* nested too deeply"):
        groups.committed_offsets(session, "g", IDS)
    assert groups.committed_offsets(session, "h", IDS) == {TopicPartition("a", 0): 5}


def test_a_topic_created_again_inherits_no_offset(session: ZooKeeperSession) -> None:
    groups.commit_offsets(session, "g", {TopicPartition("a", 0): 5}, IDS, 1)
    assert groups.committed_offsets(session, "g", {"a": b"new id.........."}) == {}
    assert groups.committed_offsets(session, "g", {}) == {}


def test_offsets_of_topics_that_were_deleted_are_reported_with_their_ids_and_forgotten_unless_written_again(
    session: ZooKeeperSession,
) -> None:
    first, second, new = TopicPartition("a", 0), TopicPartition("a", 1), b"new id.........."
    groups.commit_offsets(session, "g", {first: 5, second: 6, TopicPartition("b", 0): 7}, IDS, 1)
    found = groups.committed(session, "g", None, ["a"])
    assert found == {first: (5, 1, IDS["a"]), second: (6, 1, IDS["a"])}
    groups.commit_offsets(session, "g", {second: 2}, {"a": new}, 2)
    groups.forget(session, "g", {partition: each.topic_id for partition, each in found.items()})
    assert groups.committed(session, "g", None) == {second: (2, 2, new), TopicPartition("b", 0): (7, 1, IDS["b"])}
    groups.forget(session, "g", {first: IDS["a"]})  # gone already


def test_members_that_commit_the_same_new_partitions_at_once_all_succeed(
    new_session: Callable[[], ZooKeeperSession],
) -> None:
    errors: list[Exception] = []

    def commit(session: ZooKeeperSession, offset: int) -> None:
        try:
            for number in range(8):
                groups.commit_offsets(session, "g", {TopicPartition("a", number): offset}, IDS, 1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=commit, args=(new_session(), offset)) for offset in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert errors == []
    assert len(groups.committed_offsets(new_session(), "g", IDS)) == 8


def test_more_partitions_than_one_multi_takes(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", number): number for number in range(1200)}
    groups.commit_offsets(session, "g", offsets, IDS, 1)
    assert groups.committed_offsets(session, "g", IDS) == offsets


P0 = TopicPartition("a", 0)


def test_a_commit_refused_while_zookeeper_is_away_is_never_made(
    new_session: Callable[..., ZooKeeperSession], proxy: StallingProxy
) -> None:
    cut_off, other = new_session(proxy), new_session()
    groups.commit_offsets(other, "g", {P0: 50}, IDS, 0)
    proxy.cut()
    waited_for(lambda: not cut_off.connected)
    with pytest.raises(ZooKeeperNotAsked):
        groups.commit_offsets(cut_off, "g", {P0: 100}, IDS, 0)
    groups.commit_offsets(other, "g", {P0: 2000}, IDS, 0)
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
        groups.commit_offsets(other, "g", {P0: before}, IDS, 0)
    send = stalled.multi

    def on_a_stalled_network(operations: Sequence[Operation]) -> None:
        proxy.hold()
        send(operations)

    monkeypatch.setattr(stalled, "multi", on_a_stalled_network)
    with pytest.raises(ZooKeeperUnreachable) as raised:
        groups.commit_offsets(stalled, "g", {P0: 100}, IDS, 0)
    assert type(raised.value) is ZooKeeperUnreachable  # it was sent
    groups.commit_offsets(other, "g", {P0: 2000}, IDS, 0)
    proxy.resume()
    waited_for(lambda: not stalled._client._pending)
    assert groups.committed_offsets(stalled, "g", IDS) == {P0: 2000}


def test_of_two_commits_at_once_the_one_that_sees_the_other_is_the_last(
    new_session: Callable[..., ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = new_session(), new_session()
    groups.commit_offsets(one, "g", {P0: 1}, IDS, 0)
    send = one.multi

    def after_the_other(operations: Sequence[Operation]) -> None:
        monkeypatch.setattr(one, "multi", send)
        groups.commit_offsets(other, "g", {P0: 2}, IDS, 0)
        send(operations)

    monkeypatch.setattr(one, "multi", after_the_other)
    groups.commit_offsets(one, "g", {P0: 3}, IDS, 0)
    assert groups.committed_offsets(one, "g", IDS) == {P0: 3}


def test_a_commit_that_others_overtake_every_time_fails_and_is_not_taken_for_made(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def overtaken(operations: Sequence[Operation]) -> None:
        tries.append(len(operations))
        raise BadVersion

    monkeypatch.setattr(session, "multi", overtaken)
    with pytest.raises(BadVersion):
        groups.commit_offsets(session, "g", {P0: 1}, IDS, 0)
    assert tries == [1] * groups._ATTEMPTS


def test_a_commit_depends_on_its_guard(session: ZooKeeperSession) -> None:
    session.create("/guard")
    groups.commit_offsets(session, "g", {P0: 1}, IDS, 0, Check("/guard", 0))
    session.set("/guard", b"")
    with pytest.raises(groups.GuardMoved):
        groups.commit_offsets(session, "g", {P0: 2}, IDS, 0, Check("/guard", 0))
    groups.commit_offsets(session, "g", {P0: 3}, IDS, 0, Check("/guard", 1))
    session.delete("/guard")
    with pytest.raises(groups.GuardMoved):
        groups.commit_offsets(session, "g", {P0: 4}, IDS, 0, Check("/guard", 1))
    assert groups.committed_offsets(session, "g", IDS) == {P0: 3}


def test_offsets_that_are_written_or_forgotten_while_they_are_forgotten_or_read(
    new_session: Callable[..., ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = new_session(), new_session()
    first, second, new = TopicPartition("a", 0), TopicPartition("a", 1), b"new id.........."
    groups.commit_offsets(session, "g", {first: 5, second: 6}, IDS, 1)
    get, children = session.get, session.children

    def and_then_it_is_written(path: str, watch: Watch | None = None) -> object:
        found = get(path, watch)
        if path == paths.group_offset("g", *first):
            groups.commit_offsets(other, "g", {first: 7}, {"a": new}, 2)
        return found

    monkeypatch.setattr(session, "get", and_then_it_is_written)
    groups.forget(session, "g", {TopicPartition("a", 7): IDS["a"], first: IDS["a"], second: IDS["a"]})
    assert groups.committed(session, "g", None) == {first: (7, 2, new)}

    def and_then_it_is_forgotten(path: str, watch: Watch | None = None) -> list[str]:
        found = children(path, watch)
        groups.forget(other, "g", {first: new})
        return found

    monkeypatch.setattr(session, "children", and_then_it_is_forgotten)
    assert groups.committed(session, "g", None, ["a"]) == {}


def test_the_highest_offset_is_that_of_the_group_furthest_on_whatever_its_name(session: ZooKeeperSession) -> None:
    session.ensure([paths.CONSUMERS])
    for group, offset in (("a", 3), ("b", 9), ("c", 4)):
        groups.commit_offsets(session, group, {P0: offset}, IDS, 1)
    groups.commit_offsets(session, "d", {P0: 99}, {"a": b"new id.........."}, 1)
    assert groups.highest_offsets(session, "a", IDS["a"]) == {0: (9, "b")}


def test_a_deleted_group_leaves_no_znode(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition(topic, number): number for topic in ("t", "u") for number in range(3)}
    groups.commit_offsets(session, "g", offsets, {"t": b"t" * 16, "u": b"u" * 16}, 1)
    members.keep(session, "g", members.Member("one", "", "", ""))
    with pytest.raises(groups.HasMembers):
        groups.delete(session, "g")
    assert len(groups.committed(session, "g", None)) == 6
    members.leave(session, "g", "one")
    groups.delete(session, "g")
    assert session.children(paths.CONSUMERS) == []
    groups.delete(session, "g")  # fine


def test_two_may_delete_a_group_at_once(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.commit_offsets(session, "g", {P0: 1}, IDS, 1)
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
    groups.commit_offsets(session, "g", {kept: 1, gone: 1}, {"t": b"t" * 16}, 1)
    delete_many = ZooKeeperSession.delete_many

    def and_before_that_another_commits(own: ZooKeeperSession, wanted: list[tuple[str, int]]) -> list[bool]:
        groups.commit_offsets(session, "g", {kept: 7}, {"t": b"t" * 16}, 2)
        return delete_many(own, wanted)

    monkeypatch.setattr(ZooKeeperSession, "delete_many", and_before_that_another_commits)
    groups.delete(session, "g")
    assert {partition: each.offset for partition, each in groups.committed(session, "g", None).items()} == {kept: 7}


def test_what_a_member_commits_that_comes_while_its_group_is_deleted_stays(
    session: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, another = TopicPartition("t", 0), TopicPartition("u", 0), new_session()
    ids = {"t": b"t" * 16, "u": b"u" * 16}
    groups.commit_offsets(session, "g", {old: 1}, ids, 1)
    members.keep(session, "g", members.Member("one", "", "", ""))
    members.leave(session, "g", "one")

    def a_member_comes() -> None:
        members.keep(another, "g", members.Member("two", "", "", ""))
        groups.commit_offsets(another, "g", {old: 7, new: 8}, ids, 2)

    amid(monkeypatch, session, "delete", a_member_comes)  # of the znode of members, which was empty
    groups.delete(session, "g")
    assert {partition: each.offset for partition, each in groups.committed(session, "g", None).items()} == {
        old: 7,
        new: 8,
    }
    assert [member.name for member in members.live_members(session, "g")] == ["two"]
