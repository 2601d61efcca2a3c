"""Group offsets in a real ZooKeeper."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from kafkalog.records import TopicPartition
from kafkalog.zk import groups, paths
from kafkalog.zk.session import ZooKeeperSession

IDS = {"a": b"a" * 16, "b": b"b" * 16}


def test_offsets_are_read_back_by_partition(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", 0): 5, TopicPartition("a", 10): 1 << 40, TopicPartition("b", 0): 0}
    groups.commit_offsets(session, "g", offsets, IDS, 123)
    assert groups.committed_offsets(session, "g", IDS) == offsets
    assert groups.committed_offsets(session, "g", IDS, ["b", "c"]) == {TopicPartition("b", 0): 0}
    assert groups.committed_offsets(session, "nobody", IDS) == {}
    groups.commit_offsets(session, "g", {TopicPartition("a", 0): 4, TopicPartition("b", 1): 9}, IDS, 124)
    assert groups.committed_offsets(session, "g", IDS) == offsets | {
        TopicPartition("a", 0): 4,
        TopicPartition("b", 1): 9,
    }
    content, _ = session.get(paths.group_offset("g", "a", 0))
    assert json.loads(content) == {"offset": 4, "topic_id": IDS["a"].hex(), "committed_us": 124}


def test_a_topic_made_anew_inherits_no_offset(session: ZooKeeperSession) -> None:
    groups.commit_offsets(session, "g", {TopicPartition("a", 0): 5}, IDS, 1)
    assert groups.committed_offsets(session, "g", {"a": b"new id.........."}) == {}
    assert groups.committed_offsets(session, "g", {}) == {}


def test_offsets_of_topics_that_were_deleted_are_told_with_their_ids_and_forgotten_unless_written_again(
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
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(groups.committed_offsets(new_session(), "g", IDS)) == 8


def test_more_partitions_than_one_multi_takes(session: ZooKeeperSession) -> None:
    offsets = {TopicPartition("a", number): number for number in range(1200)}
    groups.commit_offsets(session, "g", offsets, IDS, 1)
    assert groups.committed_offsets(session, "g", IDS) == offsets
