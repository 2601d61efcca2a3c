"""Changes of many partitions' states at once, with checks of other znodes, in a real ZooKeeper."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kafkalog.errors import UnreadableZnode
from kafkalog.zk import paths, registry
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.registry import BrokerRecord, PartitionState, StateChange, TopicRecord, change_states
from kafkalog.zk.session import MULTI_MAX, BadVersion, Check, Operation, ZooKeeperSession
from tests.between import ahead

STATE = PartitionState(0, 0, (0, 1, 2), (), {0: "disk-0", 1: "disk-1", 2: "disk-2"})
LED_BY_1 = replace(STATE, leader=1, leader_epoch=1, isr=(1, 2))
FENCE = "/fence"


@pytest.fixture
def cluster(session: ZooKeeperSession) -> ZooKeeperSession:
    join_cluster(session, 1)
    session.create(FENCE)
    return session


def new_topic(session: ZooKeeperSession, partitions: int, name: str = "t") -> TopicRecord:
    topic = TopicRecord(name, name[:1].encode() * 16, {}, [(0, 1, 2)] * partitions, 0)
    registry.create_topic(session, topic)
    states = registry.write_states(session, topic, dict.fromkeys(range(partitions), STATE))
    return replace(topic, states=states)


def led_by_1(topic: TopicRecord, *checks: Check) -> list[StateChange]:
    return [StateChange(topic, number, before, LED_BY_1, checks) for number, before in topic.states.items()]


def states(session: ZooKeeperSession, topic: TopicRecord) -> list[PartitionState]:
    found = registry.read_topic(session, topic.name)
    assert found is not None
    return [found.states[number] for number in sorted(found.states)]


@pytest.fixture
def multis(cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Operation]]:
    """The multis of the session from now on."""
    made: list[Sequence[Operation]] = []
    multi = cluster.multi

    def counted(operations: Sequence[Operation]) -> None:
        made.append(operations)
        multi(operations)

    monkeypatch.setattr(cluster, "multi", counted)
    return made


def test_partitions_of_many_topics_change_in_one_write(
    cluster: ZooKeeperSession, multis: list[Sequence[Operation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [new_topic(cluster, 30, name) for name in "abcdef"]
    multis.clear()
    read = "it reads nothing back"
    monkeypatch.setattr(cluster, "get_many", lambda wanted, watch=None: pytest.fail(read) if wanted else [])
    changed = change_states(cluster, [change for topic in topics for change in led_by_1(topic)], Check(FENCE, 0))
    assert [len(operations) for operations in multis] == [181]
    assert set(changed) == {(topic.topic_id, number) for topic in topics for number in range(30)}
    monkeypatch.undo()
    for topic in topics:
        assert states(cluster, topic) == [replace(LED_BY_1, version=1)] * 30
    assert list(changed.values()) == [replace(LED_BY_1, version=1)] * 180


def test_a_multi_has_no_more_operations_and_bytes_than_zookeeper_takes(
    cluster: ZooKeeperSession, multis: list[Sequence[Operation]]
) -> None:
    large = replace(STATE, directories={broker: f"{broker:032}" for broker in range(40)})
    topic = new_topic(cluster, MULTI_MAX, "x" * 249)
    multis.clear()
    changes = [StateChange(topic, number, before, large) for number, before in topic.states.items()]
    change_states(cluster, changes, Check(FENCE, 0))
    sizes = [sum(len(each.path) + len(getattr(each, "value", b"")) for each in operations) for operations in multis]
    assert len(multis) > 2 and max(sizes) < 500_000
    topic = replace(topic, states=dict(enumerate(states(cluster, topic))))
    multis.clear()
    change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    assert max(map(len, multis)) <= MULTI_MAX and len(multis) == 2


def test_a_change_that_is_refused_leaves_the_others_alone(
    cluster: ZooKeeperSession, multis: list[Sequence[Operation]]
) -> None:
    topic = new_topic(cluster, 300)
    theirs = replace(STATE, leader=2, leader_epoch=9)
    for number in (3, 200):
        registry.write_states(cluster, topic, {number: theirs})
    multis.clear()
    changed = change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    assert len(multis) == 2, "the others are not tried one by one"
    wanted = [replace(theirs if number in (3, 200) else LED_BY_1, version=1) for number in range(300)]
    assert states(cluster, topic) == wanted
    assert [changed[topic.topic_id, number] for number in range(300)] == wanted


def test_nothing_is_changed_by_one_whose_fence_has_moved(
    cluster: ZooKeeperSession, multis: list[Sequence[Operation]]
) -> None:
    topic = new_topic(cluster, 3)
    cluster.set(FENCE, b"")
    multis.clear()
    with pytest.raises(BadVersion):
        change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    assert len(multis) == 1
    assert states(cluster, topic) == [STATE] * 3
    change_states(cluster, led_by_1(topic), Check(FENCE, 1))
    assert states(cluster, topic) == [replace(LED_BY_1, version=1)] * 3


def test_a_fence_that_moves_between_the_tries_stops_them(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(cluster, 3)
    registry.write_states(cluster, topic, {1: replace(STATE, leader_epoch=5)})
    other = new_session()
    ahead(monkeypatch, registry, "_possible", lambda: other.set(FENCE, b""))
    with pytest.raises(BadVersion):
        change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    assert [state.leader for state in states(cluster, topic)] == [0, 0, 0]


def test_a_registration_that_has_ended_since_does_not_join(
    cluster: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], multis: list[Sequence[Operation]]
) -> None:
    topic = new_topic(cluster, 3)
    epochs = []
    for broker_id in (1, 2):
        registry.register_broker(cluster, BrokerRecord(broker_id, "h", 1, 2, directory=f"disk-{broker_id}"))
        epochs.append(registry.live_brokers(cluster)[broker_id].epoch)
    again = BrokerRecord(2, "h", 1, 2, directory="disk-2")
    registry.register_broker(new_session(), again)
    checks = [registry.registration_check(broker_id, epoch) for broker_id, epoch in zip((1, 2), epochs, strict=True)]
    changes = [
        StateChange(topic, number, topic.states[number], LED_BY_1, (check,))
        for number, check in ((0, checks[0]), (1, checks[1]), (2, checks[0]))
    ]
    multis.clear()
    changed = change_states(cluster, changes)
    assert len(multis) == 2
    after = [replace(LED_BY_1, version=1), STATE, replace(LED_BY_1, version=1)]
    assert states(cluster, topic) == after
    assert [changed[topic.topic_id, number] for number in range(3)] == after


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_state_that_changes_to_and_fro_is_tried_alone(
    cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    topic = new_topic(cluster, 3)
    refusals: list[Any] = ["all together"]
    multi = cluster.multi

    def refused_once(operations: Sequence[Operation]) -> None:
        if refusals:
            refusals.pop()
            raise BadVersion
        if is_fenced and len(operations) == 2:
            cluster.set(FENCE, b"")
        multi(operations)

    monkeypatch.setattr(cluster, "multi", refused_once)
    if is_fenced:
        with pytest.raises(BadVersion):
            change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    else:
        change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    expected = STATE if is_fenced else replace(LED_BY_1, version=1)
    assert states(cluster, topic) == [expected] * 3


def test_states_are_created_and_changed_together_and_deleted_topics_left_out(cluster: ZooKeeperSession) -> None:
    kept, gone = new_topic(cluster, 2, "kept"), new_topic(cluster, 2, "gone")
    grown = replace(kept, replicas=[(0, 1, 2)] * 3, version=kept.version)
    assert registry.update_topic(cluster, grown)
    registry.delete_topic(cluster, "gone")
    first = PartitionState(1, 0, (1,))
    changes = [*led_by_1(kept), StateChange(grown, 2, None, first), *led_by_1(gone), StateChange(gone, 5, None, first)]
    changed = change_states(cluster, changes, Check(FENCE, 0))
    assert set(changed) == {(kept.topic_id, number) for number in range(3)}
    assert states(cluster, kept) == [replace(LED_BY_1, version=1)] * 2 + [first]
    assert cluster.exists(paths.topic("gone")) is None


def test_a_state_that_can_not_be_read_leaves_the_other_changes_alone(cluster: ZooKeeperSession) -> None:
    topic = new_topic(cluster, 3)
    path = paths.partition_state("t", topic.topic_id, 1)
    cluster.set(path, b"not json")
    changed = change_states(cluster, led_by_1(topic), Check(FENCE, 0))
    unreadable = changed.pop((topic.topic_id, 1))
    assert isinstance(unreadable, UnreadableZnode) and path in str(unreadable)
    assert changed == {(topic.topic_id, number): replace(LED_BY_1, version=1) for number in (0, 2)}
    assert cluster.get(path)[0] == b"not json"


def test_whoever_needs_a_state_is_told_that_it_can_not_be_read(cluster: ZooKeeperSession) -> None:
    topic = new_topic(cluster, 2)
    cluster.set(paths.partition_state("t", topic.topic_id, 0), b"not json")
    with pytest.raises(UnreadableZnode):
        registry.write_states(cluster, topic, dict.fromkeys(range(2), LED_BY_1))
    other = paths.partition_state("t", topic.topic_id, 1)
    assert registry.read_states(cluster, [other]) == {other: replace(LED_BY_1, version=1)}


def test_a_state_names_replicas_and_target_only_once_the_partition_was_moved(cluster: ZooKeeperSession) -> None:
    topic = new_topic(cluster, 2)
    moved = replace(STATE, replicas=(1, 2), target=(2, 3), throttled_rate=50)
    change_states(cluster, [StateChange(topic, 1, topic.states[1], moved)])
    contents = [json.loads(cluster.get(paths.partition_state("t", topic.topic_id, number))[0]) for number in (0, 1)]
    assert contents[0].keys() == {"leader", "leader_epoch", "isr", "eligible", "directories"}
    assert contents[1] == contents[0] | {"replicas": [1, 2], "target": [2, 3], "throttled_rate": 50}
    found = registry.read_topic(cluster, "t")
    assert found is not None
    assert found.states[1] == replace(moved, version=1)
    assert [found.replicas_of(number) for number in (0, 1)] == [(0, 1, 2), (1, 2, 3)]
    assert found.preferred_leader(1) == 1


def test_states_that_are_read_are_checked_to_be_the_current_ones(
    cluster: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lags answers a read with what was there before."""
    topic = new_topic(cluster, 3)
    where = [paths.partition_state("t", topic.topic_id, number) for number in range(4)]
    assert registry.current_states(cluster, where) == dict.fromkeys(where[:3], STATE)
    seen = registry.read_states(cluster, where)
    change_states(cluster, [StateChange(topic, 1, topic.states[1], LED_BY_1)])
    monkeypatch.setattr(registry, "read_states", lambda *_: seen)
    assert registry.current_states(cluster, where) == {where[0]: STATE, where[2]: STATE}
    monkeypatch.undo()
    assert registry.current_states(cluster, where)[where[1]] == replace(LED_BY_1, version=1)
