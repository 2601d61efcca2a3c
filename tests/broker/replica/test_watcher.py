"""What the watching thread reads of ZooKeeper when states of partitions change. None of the partitions is this
broker's, so that no logs are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kafkalog.zk import paths, registry
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.registry import PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.between import amid
from tests.broker.conftest import RunningBroker, StartBroker

ELSEWHERE = PartitionState.only(7, "disk-7")


def until(broker: RunningBroker, name: str, number: int, state: PartitionState | None) -> None:
    topics = broker.broker.host.metadata
    assert topics.wait_until(lambda: name in topics.topics and topics.topic(name).states.get(number) == state, 30.0)


def new_topic(session: ZooKeeperSession, partitions: int, name: str = "t") -> TopicRecord:
    topic = TopicRecord(name, name.encode() * 16, {}, [(7,)] * partitions, 0)
    registry.create_topic(session, topic)
    states = registry.write_states(session, topic, dict.fromkeys(range(partitions), ELSEWHERE))
    return replace(topic, states=states)


def write(session: ZooKeeperSession, topic: TopicRecord, number: int, state: PartitionState) -> PartitionState:
    [written] = registry.write_states(session, topic, {number: state}).values()
    return written


def reads_of(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The znodes of topics that the broker reads from now on, each as often as it is read."""
    session, paths_read = broker.broker.host.metadata.session, list[str]()
    get, get_many, children = session.get, session.get_many, session.children

    def note(wanted: Sequence[str]) -> None:
        paths_read.extend(path for path in wanted if path.startswith(paths.TOPICS))

    def counted(path: str, *watch: Any) -> Any:
        note([path])
        return get(path, *watch)

    def all_counted(wanted: Sequence[str], *watch: Any, **how: Any) -> Any:
        note(wanted)
        return get_many(wanted, *watch, **how)

    def listed(path: str, *watch: Any) -> Any:
        note([path])
        return children(path, *watch)

    monkeypatch.setattr(session, "get", counted)
    monkeypatch.setattr(session, "get_many", all_counted)
    monkeypatch.setattr(session, "children", listed)
    return paths_read


@pytest.fixture
def other(chroot: str) -> Iterator[ZooKeeperSession]:
    """A session of another process."""
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        join_cluster(session, 0)
        yield session


def test_a_change_of_one_state_of_300_reads_one_znode(
    start_broker: StartBroker, other: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(other, 300)
    broker = start_broker()
    read = reads_of(broker, monkeypatch)
    changed = write(other, topic, 123, replace(ELSEWHERE, leader=8, leader_epoch=1))
    until(broker, "t", 123, changed)
    assert read == [paths.partition_state("t", topic.topic_id, 123)]


def test_states_of_two_topics_that_change_in_one_step_are_read_in_one(
    start_broker: StartBroker, other: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [new_topic(other, 2, name) for name in ("t", "u")]
    broker = start_broker()
    read = reads_of(broker, monkeypatch)
    metadata = broker.broker.host.metadata
    raised = replace(ELSEWHERE, leader_epoch=1)
    with metadata.changed:  # the thread waits meanwhile
        for topic in topics:
            write(other, topic, 1, raised)
    for topic in topics:
        until(broker, topic.name, 1, replace(raised, version=1))
    assert sorted(read) == [paths.partition_state(topic.name, topic.topic_id, 1) for topic in topics]


def test_a_state_that_changes_while_it_is_read_is_read_again(
    broker: RunningBroker, other: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(other, 2)
    until(broker, "t", 1, ELSEWHERE)
    last = replace(ELSEWHERE, leader_epoch=2, version=2)

    def once_more() -> None:
        write(other, replace(topic, states={1: replace(ELSEWHERE, version=1)}), 1, last)

    amid(monkeypatch, broker.broker.host.metadata.session, "get_many", once_more)
    write(other, topic, 1, replace(ELSEWHERE, leader_epoch=1))
    until(broker, "t", 1, last)


def test_a_state_that_is_removed_and_made_again_is_followed(broker: RunningBroker, other: ZooKeeperSession) -> None:
    topic = new_topic(other, 2)
    until(broker, "t", 1, ELSEWHERE)
    other.delete(paths.partition_state("t", topic.topic_id, 1))
    until(broker, "t", 1, None)
    write(other, replace(topic, states={}), 1, replace(ELSEWHERE, leader_epoch=5))
    until(broker, "t", 1, replace(ELSEWHERE, leader_epoch=5))


def test_a_state_that_cannot_be_read_keeps_no_other_topics_state_from_being_followed(
    broker: RunningBroker, other: ZooKeeperSession, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = new_topic(other, 2, "bad"), new_topic(other, 2, "good")
    for topic in (bad, good):
        until(broker, topic.name, 1, ELSEWHERE)
    content, _ = other.get(paths.partition_state("bad", bad.topic_id, 0))
    metadata = broker.broker.host.metadata
    with metadata.changed:  # both are read together
        other.set(paths.partition_state("bad", bad.topic_id, 0), b"{")
        changed = write(other, good, 1, replace(ELSEWHERE, leader_epoch=1))
    until(broker, "good", 1, changed)
    assert metadata.topic("bad").states[0] == ELSEWHERE
    assert caplog.text.count("not_followed path=/brokers/topics/bad") == 1
    other.set(paths.partition_state("bad", bad.topic_id, 0), content)
    until(broker, "bad", 0, replace(ELSEWHERE, version=2))
