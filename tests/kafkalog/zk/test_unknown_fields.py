"""Fields that a newer version has added to a znode are still there after this version has written it again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.states import election
from kafkalog.client.transaction.coordinator import CommitBatch, decided
from kafkalog.format.decisions import Decision
from kafkalog.records import TopicPartition
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire
from kafkalog.zk import decisions, groups, members, paths, registry
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.controllers import elect_controller
from kafkalog.zk.groups import Offset
from kafkalog.zk.members import Member, Seat
from kafkalog.zk.registry import BrokerRecord, PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession

NEWER = {"of_a_newer_version": {"a": [1, "b"]}}
TOPIC = TopicRecord("t", b"0123456789abcdef", {"retention.ms": "5", "newer.setting": "x"}, [(0, 1)], 77)
FIRST = TopicPartition("t", 0)


@pytest.fixture
def cluster(session: ZooKeeperSession) -> ZooKeeperSession:
    join_cluster(session, 1)
    return session


def add_to(session: ZooKeeperSession, path: str) -> None:
    """Add a field to a znode, as a newer version might."""
    content, _ = session.get(path)
    session.set(path, json.dumps({**json.loads(content), **NEWER}).encode())


def in_it(session: ZooKeeperSession, path: str) -> dict[str, Any]:
    """The fields of a znode."""
    content, _ = session.get(path)
    found: dict[str, Any] = json.loads(content if content.startswith(b"{") else zlib.decompress(content))
    return found


def has_newer(session: ZooKeeperSession, path: str) -> bool:
    return in_it(session, path).items() >= NEWER.items()


def test_of_a_topic_and_its_settings(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, TOPIC)
    add_to(cluster, paths.topic("t"))
    topic = registry.read_topic(cluster, "t")
    assert topic is not None
    assert registry.update_topic(cluster, replace(topic, replicas=[(0, 1), (1, 0)]))
    found = in_it(cluster, paths.topic("t"))
    assert found.items() >= NEWER.items()
    assert found["partitions"] == {"0": [0, 1], "1": [1, 0]}
    assert found["config"]["newer.setting"] == "x"


def test_of_a_partitions_state_through_every_change_of_it(cluster: ZooKeeperSession) -> None:
    registry.create_topic(cluster, TOPIC)
    state = PartitionState(0, 0, (0, 1), (), {0: "d0", 1: "d1"})
    registry.write_states(cluster, TOPIC, {0: state})
    path = paths.partition_state("t", TOPIC.topic_id, 0)
    add_to(cluster, path)
    changes: list[Callable[[PartitionState], PartitionState | None]] = [
        lambda state: election.elect(state, (0, 1), {1: "d1"}, False, 2),
        lambda state: election.join(state, 0, "d0", 2),
        lambda state: election.prefer(state, (0, 1), {0, 1}),
        lambda state: election.leave(state, {1}, 2),
        lambda state: election.depart(state, 0),
    ]
    for change in changes:
        topic = registry.read_topic(cluster, "t")
        assert topic is not None
        after = change(topic.states[0])
        assert after is not None
        written = registry.write_states(cluster, topic, {0: after})
        assert written[0] == replace(after, version=topic.states[0].version + 1)
        assert has_newer(cluster, path)


def test_of_the_controllers_epoch(cluster: ZooKeeperSession) -> None:
    registry.register_broker(cluster, BrokerRecord(0, "h", 1, 2, directory="d"))
    epoch = registry.live_brokers(cluster)[0].epoch
    assert elect_controller(cluster, 0, epoch) is not None
    add_to(cluster, paths.CONTROLLER_EPOCH)
    term = elect_controller(cluster, 0, epoch)
    assert term is not None
    assert has_newer(cluster, paths.CONTROLLER_EPOCH)
    assert not has_newer(cluster, paths.CONTROLLER), "it ends with the session that wrote it"


@pytest.mark.parametrize("number", [0, 7], ids=["an operator's", "a member's"])
def test_of_a_committed_offset_of_the_same_topic(cluster: ZooKeeperSession, number: int) -> None:
    members.make_group(cluster, "g")
    groups.commit_offsets(cluster, "g", {FIRST: Offset(5, TOPIC.topic_id)}, 1)
    path = paths.group_offset("g", *FIRST)
    add_to(cluster, path)
    groups.commit_offsets(cluster, "g", {FIRST: Offset(6, TOPIC.topic_id, number=number)}, 2)
    assert in_it(cluster, path).items() >= {**NEWER, "offset": 6}.items()
    groups.commit_offsets(cluster, "g", {FIRST: Offset(1, b"another topic id", number=number)}, 3)
    assert not has_newer(cluster, path), "it is another topic's now"


def test_an_offset_that_cannot_be_read_is_replaced(cluster: ZooKeeperSession) -> None:
    members.make_group(cluster, "g")
    path = paths.group_offset("g", *FIRST)
    cluster.create(path, b"no json")
    groups.commit_offsets(cluster, "g", {FIRST: Offset(6, TOPIC.topic_id)}, 2)
    assert in_it(cluster, path)["offset"] == 6


@pytest.mark.parametrize("topics", [1, 2000], ids=["plain", "compressed"])
def test_of_a_group_and_its_members(cluster: ZooKeeperSession, topics: int) -> None:
    members.make_group(cluster, "g")
    add_to(cluster, paths.group("g"))
    state = members.read_state(cluster, "g")
    assert state is not None
    share = frozenset(TopicPartition(f"topic-{number}", 0) for number in range(topics))
    member = Member("m", ("t",))
    seated = state.with_seat("m", Seat(1, share))
    state = members.change(cluster, "g", state, seated, members.create_member("g", member))
    assert has_newer(cluster, paths.group("g"))
    path = paths.group_member("g", "m")
    add_to(cluster, path)
    known = members.read_members(cluster, "g", ["m"])["m"]
    again = member._replace(topics=("u",), unknown=known.unknown)
    members.change(cluster, "g", state, replace(state, number=9), members.describe_member("g", again))
    assert in_it(cluster, path).items() >= {**NEWER, "topics": ["u"]}.items()
    assert has_newer(cluster, paths.group("g"))


def test_of_a_decision_on_its_way_through_a_coordinator(cluster: ZooKeeperSession) -> None:
    decisions.write_decision(cluster, Decision("id", batch_id=1, commit_uuid=b"u" * 16))
    path = paths.transaction("id")
    add_to(cluster, path)
    read = decision_from_wire(decision_to_wire(decisions.read_decision(cluster, "id")))
    batch = CommitBatch("id", 2, "", False, b"", [])
    decisions.write_decision(cluster, decided(read, batch, b"v" * 16))
    assert in_it(cluster, path).items() >= {**NEWER, "batch_id": 2}.items()
    decisions.raise_version(cluster, decisions.read_decision(cluster, "id"))
    assert has_newer(cluster, path)
