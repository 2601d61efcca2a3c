"""Consumer groups' offsets in ZooKeeper: the paper's offset registry. Knows no consumer and no log.

An offset is stored with the id of its topic, so that a topic deleted and created again under the same name does not
inherit it.

A commit is a compare-and-set on the versions that it read. So a commit whose outcome was never known (its connection
was lost, its broker was suspended) cannot overwrite a later one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kafkalog.records import TopicPartition
from kafkalog.zk import paths
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
    """The znode that a commit depends on has another version, or is gone: nothing more was written."""


class HasMembers(Exception):
    """The group has a member, live or not."""


class Committed(NamedTuple):
    """The next offset to consume, when that was written, and in which topic of the name."""

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
    """Write a group's offsets: all of them or none, up to 500 in one go.

    Args:
        offsets: the next offset to consume, by partition.
        topic_ids: the id of every topic among them.
        guard: written only while that znode has that version.

    Raises:
        GuardMoved: it has not.
        ZooKeeperUnreachable: whether they were written is unknown; they are not once somebody wrote others.
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
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


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
        except (NoNode, NodeExists, BadVersion):  # another one commits the same partitions; who asks last is the last
            if guard is not None:
                stat = session.exists(guard.path)
                if stat is None or stat.version != guard.version:
                    raise GuardMoved from None
            if attempt == _ATTEMPTS - 1:
                raise


def committed(
    session: ZooKeeperSession, group: str, topic_ids: Mapping[str, bytes] | None, topics: Iterable[str] = ()
) -> dict[TopicPartition, Committed]:
    """A group's offsets; those of topics that are not in `topic_ids`, or have another id there, are left out.

    Args:
        topic_ids: None: none is left out.
        topics: only these; none: all that the group has.
    """
    names = [name for name in _names(session, group, topics) if topic_ids is None or name in topic_ids]
    return {
        partition: each
        for partition, each in _read(session, group, names).items()
        if topic_ids is None or each.topic_id == topic_ids[partition.topic]
    }


def forget(session: ZooKeeperSession, group: str, topic_ids: Mapping[TopicPartition, bytes]) -> None:
    """Delete a group's offsets of partitions, as far as they are of the topics with these ids."""
    for partition, topic_id in topic_ids.items():
        path = paths.group_offset(group, *partition)
        try:
            content, stat = session.get(path)
            if _parse(content).topic_id == topic_id:
                session.delete(path, stat.version)
        except (NoNode, BadVersion):  # written meanwhile: in a topic that is there
            continue


def delete(session: ZooKeeperSession, group: str) -> None:
    """Delete a group's znodes, but those of offsets that are written meanwhile, and what they stand below.

    Raises:
        HasMembers: nothing was deleted.
    """
    versions: dict[str, list[tuple[str, int]]] = {}  # before the look at the members: what a new one commits stays
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
    """Whether the znode is gone."""
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
        contents = session.get_many([paths.group_offset(group, name, number) for number in numbers])
        for number, content in zip(numbers, contents, strict=True):
            if content is not None:
                found[TopicPartition(name, number)] = _parse(content[0])
    return found


def _parse(content: bytes) -> Committed:
    fields = json.loads(content)
    return Committed(int(fields["offset"]), int(fields["committed_us"]), bytes.fromhex(fields["topic_id"]))


def committed_offsets(
    session: ZooKeeperSession, group: str, topic_ids: Mapping[str, bytes], topics: Iterable[str] = ()
) -> dict[TopicPartition, int]:
    """The same, offsets alone."""
    return {partition: each.offset for partition, each in committed(session, group, topic_ids, topics).items()}


def highest_offsets(session: ZooKeeperSession, topic: str, topic_id: bytes) -> dict[int, tuple[int, str]]:
    """The highest offset that any group has committed of each partition of a topic, and which group it was."""
    highest: dict[int, tuple[int, str]] = {}
    for group in group_names(session):
        for partition, offset in committed_offsets(session, group, {topic: topic_id}, [topic]).items():
            highest[partition.partition] = max((offset, group), highest.get(partition.partition, (0, "")))
    return highest


def group_names(session: ZooKeeperSession) -> list[str]:
    """Every group that ever committed an offset or had a member."""
    return sorted(session.children(paths.CONSUMERS))


def topics_of(session: ZooKeeperSession, group: str) -> list[str]:
    """Names of the topics for which a group has offsets, whether or not the topic is still there."""
    try:
        return sorted(session.children(paths.group_offsets(group)))
    except NoNode:
        return []
