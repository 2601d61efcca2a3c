"""The registries in a real ZooKeeper, also when two write at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kafkalog.errors import TopicExists, UnknownTopic
from kafkalog.zk import paths, registry
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.registry import BrokerRecord, PartitionState, TopicRecord
from kafkalog.zk.session import Delete, NoNode, Operation, ZooKeeperSession
from tests.between import amid
from tests.threads import join_all

A_TOPIC = TopicRecord("t", b"0123456789abcdef", {"retention.ms": "5"}, [(0,), (1,), (0,)], 77)


@pytest.fixture
def cluster(session: ZooKeeperSession) -> ZooKeeperSession:
    join_cluster(session, 1)
    return session


def test_the_cluster_id_is_made_once(new_session: Callable[[], ZooKeeperSession]) -> None:
    ids = {join_cluster(new_session(), number).cluster_id for number in range(3)}
    assert len(ids) == 1
    assert len(ids.pop()) == 32


def test_a_broker_is_listed_while_its_session_lasts(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    other = new_session()
    one = BrokerRecord(1, "host", 10, 11, "rack", "1.0", "one", "boot:8:77", "host:/one")
    assert registry.register_broker(other, one) is None
    changed = threading.Event()
    (listed,) = registry.live_brokers(cluster, lambda _: changed.set()).values()
    assert listed == replace(one, epoch=listed.epoch)
    assert registry.register_broker(other, replace(one, grpc_port=20)) is None  # again, by the same session
    assert changed.wait(30)
    changed.clear()
    renewed = registry.live_brokers(cluster, lambda _: changed.set())[1]
    assert (renewed.grpc_port, renewed.epoch) == (20, listed.epoch)
    other.close()
    assert changed.wait(30)
    assert registry.live_brokers(cluster) == {}


def test_the_epoch_of_a_registration_is_the_version_of_a_znode_that_stays(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    record = BrokerRecord(1, "host", 10, 11, directory="one", lock="boot:8:77")
    epochs = []
    for ends in ("it stops", "it is killed", "it is still there"):
        session = new_session()
        assert registry.register_broker(session, record) is None
        epochs.append(registry.live_brokers(cluster)[1].epoch)
        assert cluster.get(paths.broker_epoch(1))[1].version == epochs[-1]
        if ends == "it stops":
            session.close()
    assert epochs == [1, 2, 3]
    registry.raise_broker_epoch(cluster, record)
    assert cluster.get(paths.broker_epoch(1))[1].version == 4
    other = BrokerRecord(2, "host", 10, 11, directory="two")
    registry.raise_broker_epoch(cluster, other)
    registry.register_broker(cluster, other)
    assert registry.live_brokers(cluster)[2].epoch == 2


def test_a_broker_registers_though_the_list_of_brokers_is_missing(cluster: ZooKeeperSession) -> None:
    cluster.delete(paths.BROKER_IDS)
    assert registry.register_broker(cluster, BrokerRecord(1, "host", 10, 11)) is None
    assert set(registry.live_brokers(cluster)) == {1}


@pytest.mark.parametrize(
    ("znode", "content"),
    [("7", b'{"host": "h", "ports": {}}'), ("7", b""), ("seven", b"{}"), ("7", b'{"host": ' + b"[" * 100_000)],
    ids=["of another version", "empty", "no broker's", "nested too deeply"],
)
def test_a_broker_that_cannot_be_read_hides_no_other(cluster: ZooKeeperSession, znode: str, content: bytes) -> None:
    registry.register_broker(cluster, BrokerRecord(1, "host", 10, 11, directory="one", lock="boot:8:77"))
    cluster.create(f"{paths.BROKER_IDS}/{znode}", content)
    assert set(registry.live_brokers(cluster)) == {1}


def test_a_dead_runs_registration_is_replaced_and_anothers_is_respected(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    stale, now = new_session(), new_session()
    record = BrokerRecord(1, "host", 10, 11, directory="one", lock="boot:8:77", where="host:/one")
    registry.register_broker(stale, record)
    before = registry.live_brokers(cluster)[1].epoch
    moved = replace(record, host="renamed", where="renamed:/elsewhere")
    assert registry.other_broker(now, moved) is None
    assert registry.register_broker(now, moved) is None
    assert registry.live_brokers(cluster)[1].epoch > before
    other_disk, copied_disk = replace(record, directory="two"), replace(record, lock="boot:8:78")
    epoch = registry.live_brokers(cluster)[1].epoch
    for other in (other_disk, copied_disk):
        for ask in (registry.register_broker, registry.other_broker, registry.raise_broker_epoch):
            holder = ask(new_session(), other)
            assert holder is not None
            assert holder.where == "renamed:/elsewhere"
    assert cluster.get(paths.broker_epoch(1))[1].version == epoch


def test_a_broker_takes_only_its_own_registration_back(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    mine, other = new_session(), new_session()
    record = BrokerRecord(1, "host", 10, 11, directory="one")
    registry.withdraw_broker(mine, record)
    registry.register_broker(mine, record)
    registry.withdraw_broker(other, record)
    assert set(registry.live_brokers(cluster)) == {1}
    registry.withdraw_broker(mine, record)
    assert registry.live_brokers(cluster) == {}


def test_a_topic_is_read_back_as_it_was_made(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    assert registry.read_topic(cluster, "t") == A_TOPIC
    assert registry.topic_names(cluster) == ["t"]
    assert registry.read_topic(cluster, "other") is None
    with pytest.raises(TopicExists):
        registry.create_topic(cluster, replace(A_TOPIC, topic_id=b"another id......"))


def test_a_change_over_an_old_version_is_not_made(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    assert registry.update_topic(cluster, replace(A_TOPIC, config={}))
    assert not registry.update_topic(cluster, A_TOPIC)
    changed = registry.read_topic(cluster, "t")
    assert changed is not None
    assert changed.config == {}
    assert changed.version == 1


def test_states_are_made_once_and_replaced_at_their_version_only(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    first = {number: PartitionState.only(0, "disk-0") for number in (0, 2)}
    assert registry.write_states(cluster, A_TOPIC, first) == first
    late = registry.write_states(
        cluster, A_TOPIC, {0: PartitionState.only(9, "disk-9", 9), 1: PartitionState.only(1, "disk-1")}
    )
    assert late == {0: first[0], 1: PartitionState.only(1, "disk-1")}  # 0 was there already
    topic = registry.read_topic(cluster, "t")
    assert topic is not None
    assert set(topic.states) == {0, 1, 2}
    raised = registry.write_states(cluster, topic, {0: PartitionState.only(0, "disk-0", 1)})
    assert raised == {0: PartitionState.only(0, "disk-0", 1, version=1)}
    assert (
        registry.write_states(cluster, topic, {0: PartitionState.only(0, "disk-0", 5)}) == raised
    )  # topic.states is old


def test_a_state_of_several_replicas_is_read_back_as_it_was_written(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    led = PartitionState(2, 7, (2, 0), (1,), {2: "disk-2", 0: "disk-0", 1: "disk-1"})
    without_leader = PartitionState(-1, 3, (12,), (), {12: "disk-12"})
    states = {0: led, 1: without_leader}
    assert registry.write_states(cluster, A_TOPIC, states) == states
    topic = registry.read_topic(cluster, "t")
    assert topic is not None
    assert topic.states == states
    assert (led.directory, without_leader.directory) == ("disk-2", "")


def test_many_partitions_take_few_round_trips(cluster: ZooKeeperSession) -> None:
    topic = replace(A_TOPIC, replicas=[(0,)] * 1100)
    registry.create_topic(cluster, topic)
    states = {number: PartitionState.only(0, "disk-0") for number in range(1100)}
    assert registry.write_states(cluster, topic, states) == states
    registry.delete_topic(cluster, "t")
    assert cluster.children(paths.TOPICS) == []


def test_a_watch_on_a_topic_tells_of_its_content_and_of_every_state(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    other = new_session()
    for change in (
        lambda: registry.update_topic(cluster, A_TOPIC),
        lambda: registry.write_states(cluster, A_TOPIC, {1: PartitionState.only(1, "disk-1")}),
        lambda: cluster.set(paths.partition_state("t", A_TOPIC.topic_id, 1), b'{"isr":[],"leader":1,"leader_epoch":3}'),
    ):
        changed = threading.Event()

        def noted(path: str, changed: threading.Event = changed) -> None:
            changed.set()

        registry.read_topic(other, "t", noted)
        change()
        assert changed.wait(30)


def test_a_deleted_topic_leaves_a_note_for_each_broker_that_held_it(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    registry.write_states(cluster, A_TOPIC, {0: PartitionState.only(0, "disk-0")})
    assert registry.delete_topic(cluster, "t") == A_TOPIC.topic_id
    assert registry.topic_names(cluster) == []
    assert registry.deleted_topics(cluster) == {A_TOPIC.topic_id}
    with pytest.raises(UnknownTopic):
        registry.delete_topic(cluster, "t")
    for broker_id in (0, 5, 0):
        registry.logs_removed(cluster, A_TOPIC.topic_id, broker_id)
    assert registry.deleted_topics(cluster) == {A_TOPIC.topic_id}
    registry.logs_removed(cluster, A_TOPIC.topic_id, 1)
    registry.logs_removed(cluster, A_TOPIC.topic_id, 1)
    assert registry.deleted_topics(cluster) == set()


def test_a_deletion_that_broke_off_is_finished_by_whoever_makes_the_topic_again(
    cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    registry.write_states(cluster, A_TOPIC, {0: PartitionState.only(0, "disk-0")})
    monkeypatch.setattr(registry, "_take_down", lambda *_: None)
    registry.delete_topic(cluster, "t")
    monkeypatch.undo()
    half = registry.read_topic(cluster, "t")
    assert half is not None
    assert half.deleted
    with pytest.raises(UnknownTopic):
        registry.delete_topic(cluster, "t")
    again = replace(A_TOPIC, topic_id=b"another id......")
    registry.create_topic(cluster, again)
    assert registry.read_topic(cluster, "t") == again
    assert registry.deleted_topics(cluster) == {A_TOPIC.topic_id}


def test_states_of_a_topic_deleted_meanwhile_are_not_written(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    known = registry.write_states(cluster, A_TOPIC, {0: PartitionState.only(0, "disk-0")})
    registry.delete_topic(cluster, "t")
    assert registry.write_states(cluster, A_TOPIC, {1: PartitionState.only(1, "disk-1")}) == {}
    seen = replace(A_TOPIC, states=known)
    assert registry.write_states(cluster, seen, {0: PartitionState.only(0, "disk-0", 1)}) == {}
    assert registry.topic_names(cluster) == []


def test_a_state_written_while_its_topic_is_taken_down_goes_too(
    cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    delete_all, late = registry._delete_all, [paths.partition_state("t", A_TOPIC.topic_id, 1)]

    def racing(session: ZooKeeperSession, gone: list[str]) -> None:
        delete_all(session, gone)
        if late:
            session.ensure([late.pop()])

    monkeypatch.setattr(registry, "_delete_all", racing)
    registry.delete_topic(cluster, "t")
    assert registry.topic_names(cluster) == []


A_STATE = PartitionState.only(0, "disk-0")
MADE_ANEW = replace(A_TOPIC, topic_id=b"another id......")


def make_anew(session: ZooKeeperSession, version: int) -> None:
    """Delete the topic, also where another's deletion is under way, and make one of its name that has a state and whose
    znode is at a version."""
    with contextlib.suppress(UnknownTopic):
        registry.delete_topic(session, "t")
    for broker_id in (0, 1):
        registry.logs_removed(session, A_TOPIC.topic_id, broker_id)
    registry.create_topic(session, MADE_ANEW)
    for number in range(version):
        assert registry.update_topic(session, replace(MADE_ANEW, version=number))
    registry.write_states(session, MADE_ANEW, {0: A_STATE})


def assert_as_made_anew(session: ZooKeeperSession, version: int) -> None:
    assert registry.read_topic(session, "t") == replace(MADE_ANEW, version=version, states={0: A_STATE})
    assert registry.delete_topic(session, "t") == MADE_ANEW.topic_id  # nothing stands in its way
    assert registry.topic_names(session) == []


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize("states", [0, 1])
def test_a_deletion_that_is_late_spares_the_topic_created_again_whatever_its_version(
    cluster: ZooKeeperSession,
    new_session: Callable[[], ZooKeeperSession],
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    states: int,
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    registry.write_states(cluster, A_TOPIC, dict.fromkeys(range(states), A_STATE))
    other, send = new_session(), cluster.multi

    def after_it_was_made_anew(operations: Sequence[Operation]) -> None:
        if any(isinstance(each, Delete) for each in operations):
            monkeypatch.setattr(cluster, "multi", send)
            make_anew(other, version)
        send(operations)

    monkeypatch.setattr(cluster, "multi", after_it_was_made_anew)
    registry.delete_topic(cluster, "t")
    assert_as_made_anew(cluster, version)


def test_a_mark_of_deletion_that_is_late_spares_the_topic_created_again(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    other, read = new_session(), registry.read_topic

    def and_then_it_is_made_anew(session: ZooKeeperSession, name: str) -> TopicRecord | None:
        monkeypatch.setattr(registry, "read_topic", read)
        found = read(session, name)
        make_anew(other, version=0)
        return found

    monkeypatch.setattr(registry, "read_topic", and_then_it_is_made_anew)
    assert registry.delete_topic(cluster, "t") == MADE_ANEW.topic_id  # the topic that bears the name now, and whole
    assert registry.topic_names(cluster) == []
    assert registry.deleted_topics(cluster) == {MADE_ANEW.topic_id}


def test_a_change_that_is_late_spares_the_topic_created_again(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    make_anew(cluster, version=0)
    assert not registry.update_topic(cluster, replace(A_TOPIC, config={}))
    assert_as_made_anew(cluster, version=0)


def test_states_that_are_late_spare_the_topic_created_again(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    known = registry.write_states(cluster, A_TOPIC, {0: A_STATE})
    make_anew(cluster, version=0)
    seen = replace(A_TOPIC, states=known)
    assert registry.write_states(cluster, seen, {0: replace(A_STATE, leader_epoch=1), 1: A_STATE}) == {}
    assert_as_made_anew(cluster, version=0)


def without_id(session: ZooKeeperSession) -> None:
    """Remove the znode of the topic's id with all below it, as somebody may who tidies up."""
    below = [f("t", A_TOPIC.topic_id, number) for number in (0, 1) for f in (paths.partition_state, paths.partition)]
    found = session.get_many(below)
    there = [path for path, each in zip(below, found, strict=True) if each is not None]
    session.multi([Delete(path) for path in (*there, paths.partitions("t", A_TOPIC.topic_id))])


def test_a_topic_whose_id_somebody_removed_is_written_changed_and_deleted_again(
    cluster: ZooKeeperSession, caplog: pytest.LogCaptureFixture
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    states = {0: A_STATE, 1: A_STATE}
    assert registry.write_states(cluster, A_TOPIC, states) == states
    without_id(cluster)
    assert registry.write_states(cluster, A_TOPIC, states) == states
    assert caplog.text.count("topic_znode_restored topic=t") == 1
    without_id(cluster)
    assert registry.update_topic(cluster, replace(A_TOPIC, config={}))
    without_id(cluster)
    assert registry.delete_topic(cluster, "t") == A_TOPIC.topic_id
    assert registry.topic_names(cluster) == []
    assert registry.write_states(cluster, A_TOPIC, states) == {}
    assert not registry.update_topic(cluster, A_TOPIC)


def test_a_topic_whose_id_somebody_removed_amid_its_deletion_can_be_made_again(
    cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create_topic(cluster, A_TOPIC)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_take_down", lambda *_: None)  # as if whoever deletes it were stopped
        registry.delete_topic(cluster, "t")
    without_id(cluster)
    registry.create_topic(cluster, MADE_ANEW)
    assert registry.read_topic(cluster, "t") == MADE_ANEW


def test_a_deletion_leaves_that_of_a_topic_created_again_to_whoever_began_it(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    registry.create_topic(cluster, A_TOPIC)
    read, reads = registry.read_topic, []

    def counted(session: ZooKeeperSession, name: str) -> TopicRecord | None:
        reads.append(name)
        assert len(reads) < 10, "it looks again and again"
        return read(session, name)

    def another_gets_on() -> None:
        registry.create_topic(other, MADE_ANEW)  # the rest of the deletion first
        with monkeypatch.context() as patched:
            patched.setattr(registry, "_take_down", lambda *_: None)  # as if whoever deletes it were stopped
            registry.delete_topic(other, "t")
        monkeypatch.setattr(registry, "read_topic", counted)

    amid(monkeypatch, cluster, "multi", another_gets_on)
    assert registry.delete_topic(cluster, "t") == A_TOPIC.topic_id
    left = read(cluster, "t")
    assert left is not None
    assert (left.topic_id, left.deleted) == (MADE_ANEW.topic_id, True)


def test_a_deletion_that_finds_a_permanent_znode_gone_ends(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, A_TOPIC)
    cluster.delete(paths.DELETED_TOPICS)
    with pytest.raises(NoNode):
        registry.delete_topic(cluster, "t")


def test_two_deletions_at_once_delete_once(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    registry.create_topic(cluster, replace(A_TOPIC, replicas=[(0,)] * 50))
    outcomes: list[object] = []

    def delete(session: ZooKeeperSession) -> None:
        try:
            outcomes.append(registry.delete_topic(session, "t"))
        except UnknownTopic as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=delete, args=(new_session(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert sorted(map(str, outcomes)) == sorted(map(str, [A_TOPIC.topic_id, UnknownTopic, UnknownTopic]))


def test_two_brokers_that_have_removed_a_topics_logs_at_once_are_both_noted(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    registry.create_topic(cluster, A_TOPIC)
    registry.delete_topic(cluster, "t")
    amid(monkeypatch, cluster, "get", lambda: registry.logs_removed(other, A_TOPIC.topic_id, 1))
    registry.logs_removed(cluster, A_TOPIC.topic_id, 0)
    assert registry.deleted_topics(cluster) == set()


def test_a_setting_that_is_changed_while_its_topic_is_deleted_does_not_keep_it(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    registry.create_topic(cluster, A_TOPIC)
    amid(monkeypatch, cluster, "get", lambda: registry.update_topic(other, replace(A_TOPIC, config={})))
    assert registry.delete_topic(cluster, "t") == A_TOPIC.topic_id
    assert registry.topic_names(cluster) == []


@pytest.mark.parametrize("made_by_another", [[0], [1], [0, 1]])
def test_partitions_that_another_makes_meanwhile_keep_the_rest_from_nothing(
    cluster: ZooKeeperSession,
    new_session: Callable[[], ZooKeeperSession],
    monkeypatch: pytest.MonkeyPatch,
    made_by_another: list[int],
) -> None:
    other = new_session()
    registry.create_topic(cluster, A_TOPIC)
    theirs = dict.fromkeys(made_by_another, PartitionState.only(9, "disk-9"))
    amid(monkeypatch, cluster, "get_many", lambda: registry.write_states(other, A_TOPIC, theirs))
    ours = dict.fromkeys(range(3), A_STATE)
    assert registry.write_states(cluster, A_TOPIC, ours) == ours | theirs


@pytest.mark.parametrize("happens", ["deleted", "taken down"])
def test_a_topic_that_is_deleted_while_its_id_is_looked_for_is_not_brought_back(
    cluster: ZooKeeperSession,
    new_session: Callable[[], ZooKeeperSession],
    monkeypatch: pytest.MonkeyPatch,
    happens: str,
) -> None:
    other = new_session()
    registry.create_topic(cluster, A_TOPIC)
    without_id(cluster)

    def delete() -> None:
        with monkeypatch.context() as patched:
            if happens == "deleted":  # and its znodes are there still
                patched.setattr(registry, "_take_down", lambda *_: None)
            registry.delete_topic(other, "t")

    amid(monkeypatch, cluster, "get", delete)
    assert not registry._restore_id(cluster, A_TOPIC)
    topic = registry.read_topic(cluster, "t")
    assert topic is None or topic.deleted
    assert not registry._restore_id(cluster, A_TOPIC)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_broker_that_registers_anew_meanwhile_keeps_its_registration(
    cluster: ZooKeeperSession,
    new_session: Callable[[], ZooKeeperSession],
    monkeypatch: pytest.MonkeyPatch,
    leaves: bool,
) -> None:
    """Neither one that leaves nor one that replaces what a dead run left takes out what it has not read."""
    stale, mine, other = new_session(), new_session(), new_session()
    record = BrokerRecord(1, "host", 10, 11, directory="one", lock="boot:8:77")
    anew = replace(record, lock="boot:8:78")
    registry.register_broker(mine if leaves else stale, record)

    def register_anew() -> None:
        other.delete(paths.broker(1))
        assert registry.register_broker(other, anew) is None
        if leaves:
            other.set(paths.broker(1), registry._broker_content(anew))

    amid(monkeypatch, mine, "get", register_anew)
    if leaves:
        registry.withdraw_broker(mine, record)
    else:
        found = registry.register_broker(mine, record)
        assert found is not None
        assert found.lock == anew.lock
    assert registry.live_brokers(cluster)[1].lock == anew.lock
