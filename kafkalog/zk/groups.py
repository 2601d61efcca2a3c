"""Offsets of consumer groups in ZooKeeper: the paper's offset registry. Knows no consumer and no log.

An offset is stored with the id of its topic, so that a topic that is deleted and created again under the same name does
not inherit it.

A commit is a compare-and-set on the versions that it has read. So a commit whose outcome is unknown (its connection was
lost, its broker was suspended) cannot overwrite a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kafkalog.records import TopicPartition
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, to_json
from kafkalog.zk.session import (
    MULTI_MAX,
    BadVersion,
    Check,
    Create,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    Set,
    ZooKeeperSession,
)

_ATTEMPTS = 20


class GuardMoved(Exception):
    """The znode that a commit depends on has another version or was deleted. Nothing more was written."""


class HasMembers(Exception):
    """The group has a member's znode, live or not."""


class Committed(NamedTuple):
    """A committed offset.

    Attributes:
        offset: the next offset to consume.
        committed_us: time of the commit.
        topic_id: distinguishes topics of the same name.
    """

    offset: int
    committed_us: int
    topic_id: bytes


def commit_offsets(
    session: ZooKeeperSession,
    group: str,
    offsets: Mapping[TopicPartition, int],
    topic_ids: Mapping[str, bytes],
    now_us: int,
    guard: Check | None = None,
) -> None:
    """Write a group's offsets, up to 500 in each atomic multi. More than 500 are not written atomically.

    Args:
        offsets: the next offset to consume, by partition.
        topic_ids: the id of every topic in `offsets`, by name.
        guard: the offsets are written only if this znode has this version.

    Raises:
        GuardMoved: the znode of `guard` has another version or was deleted.
        ZooKeeperUnreachable: it is unknown whether the offsets were written. They are not written any more after
            another commit of the same partitions.
    """
    numbered = sorted(offsets.items())
    for start in range(0, len(numbered), MULTI_MAX):
        contents = {
            paths.group_offset(group, *partition): _content(offset, topic_ids[partition.topic], now_us)
            for partition, offset in numbered[start : start + MULTI_MAX]
        }
        _write(session, contents, guard)


def _content(offset: int, topic_id: bytes, now_us: int) -> bytes:
    fields = {"offset": offset, "topic_id": topic_id.hex(), "committed_us": now_us}
    return to_json(fields)


def _write(session: ZooKeeperSession, contents: Mapping[str, bytes], guard: Check | None) -> None:
    for attempt in range(_ATTEMPTS):
        present = session.get_many(list(contents))
        if None in present:
            session.ensure({path.rpartition("/")[0] for path in contents})
        operations: list[Operation] = [] if guard is None else [guard]
        for (path, content), found in zip(contents.items(), present, strict=True):
            operations.append(Create(path, content) if found is None else Set(path, content, found[1].version))
        try:
            session.multi(operations)
            return
        except (NoNode, NodeExists, BadVersion):  # another commit wrote the same partitions; the last request wins
            if guard is not None:
                stat = session.exists(guard.path)
                if stat is None or stat.version != guard.version:
                    raise GuardMoved from None
            if attempt == _ATTEMPTS - 1:
                raise


def committed(
    session: ZooKeeperSession, group: str, topic_ids: Mapping[str, bytes] | None, topics: Iterable[str] = ()
) -> dict[TopicPartition, Committed]:
    """A group's committed offsets by partition.

    Args:
        topic_ids: topic ids by name. Offsets of other topics, and of topics with another id, are left out. None leaves
            out no topic.
        topics: names of the topics to read; empty for all topics of the group.
    """
    names = [name for name in _names(session, group, topics) if topic_ids is None or name in topic_ids]
    return {
        partition: each
        for partition, each in _read(session, group, names).items()
        if topic_ids is None or each.topic_id == topic_ids[partition.topic]
    }


def forget(session: ZooKeeperSession, group: str, topic_ids: Mapping[TopicPartition, bytes]) -> None:
    """Delete a group's offsets of partitions. Offsets of a topic with another id than the one given are kept."""
    for partition, topic_id in topic_ids.items():
        path = paths.group_offset(group, *partition)
        try:
            content, stat = session.get(path)
            if _parse(path, content).topic_id == topic_id:
                session.delete(path, stat.version)
        except (NoNode, BadVersion):  # it is gone, or was just written, and so is of an existing topic
            continue


def delete(session: ZooKeeperSession, group: str) -> None:
    """Delete a group's znodes. Offsets that are committed meanwhile are kept, and so are their parents.

    Raises:
        HasMembers: nothing was deleted.
    """
    versions: dict[str, list[tuple[str, int]]] = {}  # read before the members, so that a new member's commits are kept
    for topic in topics_of(session, group):
        above = paths.group_topic_offsets(group, topic)
        try:
            found = [f"{above}/{number}" for number in session.children(above)]
        except NoNode:
            continue
        contents = session.get_many(found)
        versions[above] = [(path, each[1].version) for path, each in zip(found, contents, strict=True) if each]
    if not _delete_empty(session, paths.group_members(group)):
        raise HasMembers
    for above, listed in versions.items():
        session.delete_many(listed)
        _delete_empty(session, above)
    _delete_empty(session, paths.group_offsets(group))
    _delete_empty(session, paths.group(group))


def _delete_empty(session: ZooKeeperSession, path: str) -> bool:
    """Delete a znode that has no children. Returns False if it has children."""
    try:
        session.delete(path)
    except NoNode:
        pass
    except NotEmpty:
        return False
    return True


def _names(session: ZooKeeperSession, group: str, topics: Iterable[str]) -> list[str]:
    try:
        return sorted(set(topics) or session.children(paths.group_offsets(group)))
    except NoNode:
        return []


def _read(session: ZooKeeperSession, group: str, names: Iterable[str]) -> dict[TopicPartition, Committed]:
    found: dict[TopicPartition, Committed] = {}
    for name in names:
        try:
            numbers = sorted(int(number) for number in session.children(paths.group_topic_offsets(group, name)))
        except NoNode:
            continue
        wanted = [paths.group_offset(group, name, number) for number in numbers]
        for number, path, content in zip(numbers, wanted, session.get_many(wanted), strict=True):
            if content is not None:
                found[TopicPartition(name, number)] = _parse(path, content[0])
    return found


def _parse(path: str, content: bytes) -> Committed:
    with fields_of(path, content) as fields:
        return Committed(int(fields["offset"]), int(fields["committed_us"]), bytes.fromhex(fields["topic_id"]))


def committed_offsets(
    session: ZooKeeperSession, group: str, topic_ids: Mapping[str, bytes], topics: Iterable[str] = ()
) -> dict[TopicPartition, int]:
    """The offsets alone of `committed`."""
    return {partition: each.offset for partition, each in committed(session, group, topic_ids, topics).items()}


def highest_offsets(session: ZooKeeperSession, topic: str, topic_id: bytes) -> dict[int, tuple[int, str]]:
    """For each partition of a topic, the highest offset that any group has committed, and the group's name."""
    highest: dict[int, tuple[int, str]] = {}
    for group in group_names(session):
        for partition, offset in committed_offsets(session, group, {topic: topic_id}, [topic]).items():
            highest[partition.partition] = max((offset, group), highest.get(partition.partition, (0, "")))
    return highest


def group_names(session: ZooKeeperSession) -> list[str]:
    """Names of all groups that have committed an offset or had a member, and were not deleted since."""
    return sorted(session.children(paths.CONSUMERS))


def topics_of(session: ZooKeeperSession, group: str) -> list[str]:
    """Names of the topics for which a group has offsets, including deleted topics."""
    try:
        return sorted(session.children(paths.group_offsets(group)))
    except NoNode:
        return []
