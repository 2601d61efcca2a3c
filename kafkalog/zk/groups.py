"""Offsets of consumer groups in ZooKeeper: the paper's offset registry. Knows no consumer and no log.

An offset is stored with the id of its topic, so that a topic that is deleted and created again under the same name does
not inherit it.

A commit is a compare-and-set on the versions that it has read. So a commit whose outcome is unknown (its connection was
lost, its broker was suspended) cannot overwrite a later one. The commits of a claim, and of a reader that is no member,
are numbered besides: a request that is executed late, after the next one, changes nothing. Only an operator's are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kafkalog.errors import GroupBusy, UnreadableZnode
from kafkalog.records import TopicPartition
from kafkalog.zk import members, paths
from kafkalog.zk.content import fields_of, to_json, unknown_in
from kafkalog.zk.session import (
    MULTI_MAX,
    BadVersion,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    Set,
    ZooKeeperSession,
)

NO_EPOCH = -1
_ATTEMPTS = 20
_FIELDS = frozenset({"offset", "topic_id", "leader_epoch", "committed_us", "number", "order"})


class GuardMoved(Exception):
    """A znode that a commit depends on has another version or was deleted. Nothing more was written.

    Args:
        path: of that znode.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class HasMembers(Exception):
    """The group has members, or has changed meanwhile."""


class Offset(NamedTuple):
    """An offset to be committed.

    Attributes:
        offset: the next offset to consume.
        topic_id: of the partition's topic.
        leader_epoch: in which what is before the offset was read; -1: not known.
        number: of the claim by which the owner commits, or of the join of the member that may commit; of a writer that
            is no member a negative one, which it has for itself; 0: of nobody.
        order: of the commits of a claim, member or writer, the later one has the higher.
    """

    offset: int
    topic_id: bytes
    leader_epoch: int = NO_EPOCH
    number: int = 0
    order: int = 0

    def to_json(self, now_us: int, before: Committed | None = None) -> bytes:
        """The content of its znode, which has `before` now."""
        kept = before.unknown if before is not None and before.topic_id == self.topic_id else {}
        fields: dict[str, Any] = {
            **kept,
            "offset": self.offset,
            "topic_id": self.topic_id.hex(),
            "leader_epoch": self.leader_epoch,
            "committed_us": now_us,
        }
        return to_json(fields | ({"number": self.number, "order": self.order} if self.number else {}))

    def is_late(self, found: Committed) -> bool:
        """Whether a later commit of the same claim or writer, or of a later claim, has been written."""
        if self.topic_id != found.topic_id:
            return False
        number, order = found.place
        return (self.number == number != 0 and self.order < order) or 0 < self.number < number


class Committed(NamedTuple):
    """A committed offset.

    Attributes:
        offset: the next offset to consume.
        committed_us: time of the commit.
        topic_id: distinguishes topics of the same name.
        leader_epoch: in which what is before it was read; -1: not known.
        place: the number of the claim, member or writer by which it was committed, and the commit's order; (0, 0): by
            none.
        unknown: the fields of its znode that this version does not know.
    """

    offset: int
    committed_us: int
    topic_id: bytes
    leader_epoch: int = NO_EPOCH
    place: tuple[int, int] = (0, 0)
    unknown: Mapping[str, Any] = {}


def commit_offsets(
    session: ZooKeeperSession,
    group: str,
    offsets: Mapping[TopicPartition, Offset],
    now_us: int,
    guards: Sequence[Check] = (),
    *,
    only_new: bool = False,
    of_present_topics: bool = False,
) -> None:
    """Write the offsets of a group that exists (`members.make_group`) in atomic multis of up to 500. More than fit one
    are not written atomically.

    Args:
        guards: the offsets are written only if these znodes have these versions.
        only_new: write no offset where the group has one of the topic with that id.
        of_present_topics: the offsets are written only if there are topics with their ids.

    Raises:
        GuardMoved: a guard does not hold; the znode of `paths.partitions`: a topic was deleted.
        GroupBusy: others commit the same partitions all the time.
        ZooKeeperUnreachable: it is unknown whether the offsets were written. They are not written any more after
            another commit of the same partitions.
    """
    numbered = sorted(offsets.items())
    step = MULTI_MAX - len(guards)
    for start in range(0, len(numbered), step):
        some, checks = dict(numbered[start : start + step]), list(guards)
        if of_present_topics:
            ids = {(topic, offset.topic_id) for (topic, _), offset in some.items()}
            checks += [Check(paths.partitions(*each), 0) for each in sorted(ids)]
        _write(session, group, some, now_us, checks, only_new)


def _write(
    session: ZooKeeperSession,
    group: str,
    offsets: Mapping[TopicPartition, Offset],
    now_us: int,
    guards: Sequence[Check],
    only_new: bool,
) -> None:
    wanted = [paths.group_offset(group, *partition) for partition in offsets]
    for _ in range(_ATTEMPTS):
        present = session.get_many(wanted)
        operations: list[Operation] = list(guards)
        if None in present:
            above = {paths.group_topic_offsets(group, topic) for topic, _ in offsets}
            parents = [paths.group_offsets(group), *sorted(above)]
            stats = session.stats(parents)
            operations += [Create(path) for path, stat in zip(parents, stats, strict=True) if stat is None]
        for path, offset, found in zip(wanted, offsets.values(), present, strict=True):
            if found is None:
                operations.append(Create(path, offset.to_json(now_us)))
                continue
            known = _parse(path, found[0]) if only_new or offset.number else _readable(path, found[0])
            is_known = known is not None and known.topic_id == offset.topic_id
            if known is None or not ((only_new and is_known) or offset.is_late(known)):
                operations.append(Set(path, offset.to_json(now_us, known), found[1].version))
        if not operations:
            return
        try:
            session.multi(operations)
            return
        except (NoNode, NodeExists, BadVersion):  # another commit wrote the same partitions; the last request wins
            _check(session, guards)
    raise GroupBusy(group=group)


def _check(session: ZooKeeperSession, guards: Sequence[Check]) -> None:
    """Raises GuardMoved."""
    for guard, stat in zip(guards, session.stats([guard.path for guard in guards]), strict=True):
        if stat is None or stat.version != guard.version:
            raise GuardMoved(guard.path)


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


def committed_of(
    session: ZooKeeperSession, group: str, partitions: Iterable[TopicPartition], topic_ids: Mapping[str, bytes]
) -> dict[TopicPartition, Committed]:
    """A group's committed offsets of some partitions, of the topics with these ids."""
    listed = list(partitions)
    wanted = [paths.group_offset(group, *partition) for partition in listed]
    found = {
        partition: _parse(path, content[0])
        for partition, path, content in zip(listed, wanted, session.get_many(wanted), strict=True)
        if content is not None
    }
    return {partition: each for partition, each in found.items() if each.topic_id == topic_ids[partition.topic]}


def forget(session: ZooKeeperSession, group: str, topic_ids: Mapping[TopicPartition, bytes]) -> None:
    """Delete a group's offsets of partitions. Offsets of a topic with another id than the one given are kept, and so is
    one that was just written: it is of an existing topic."""
    wanted = {paths.group_offset(group, *partition): topic_id for partition, topic_id in topic_ids.items()}
    found = zip(wanted.items(), session.get_many(list(wanted)), strict=True)
    versions = [
        (path, each[1].version)
        for (path, topic_id), each in found
        if each is not None and _parse(path, each[0]).topic_id == topic_id
    ]
    for start in range(0, len(versions), MULTI_MAX):
        _delete_offsets(session, versions[start : start + MULTI_MAX], ())
    for topic in {partition.topic for partition in topic_ids}:
        _delete_empty(session, paths.group_topic_offsets(group, topic))


def delete(session: ZooKeeperSession, group: str) -> None:
    """Delete a group's znodes. Offsets that are committed meanwhile are kept, and so are their parents.

    Raises:
        HasMembers: it has a member, or has changed meanwhile. A member that came goes on from what is left.
    """
    state = members.read_state(session, group)
    if state is None:
        return
    offsets = paths.group_offsets(group)
    listed = [_children(session, f"{offsets}/{name}") for name in _names_in(session, offsets)]
    if state.seats:
        raise HasMembers
    guards = members.guards(group, state)
    step = MULTI_MAX - len(guards)
    for versions in listed:
        for start in range(0, len(versions), step):
            _delete_offsets(session, versions[start : start + step], guards)
    for name in _names_in(session, offsets):
        _delete_empty(session, f"{offsets}/{name}")
    for parent in [paths.group_members(group), paths.group_leases(group), offsets]:
        _delete_empty(session, parent)
    try:
        incarnations = [name for name in _names_in(session, paths.group(group)) if paths.is_group_incarnation(name)]
        deletes = [Delete(f"{paths.group(group)}/{name}") for name in incarnations]
        session.multi([*deletes, Delete(paths.group(group), state.version)])
    except (NoNode, NotEmpty, BadVersion):  # somebody joined or committed meanwhile
        pass


def _delete_offsets(session: ZooKeeperSession, versions: Sequence[tuple[str, int]], guards: Sequence[Check]) -> None:
    """Delete znodes that still have these versions. Raises HasMembers: a guard does not hold."""
    while versions:
        try:
            session.multi([*guards, *(Delete(path, version) for path, version in versions)])
            return
        except (NoNode, BadVersion):
            stats = session.stats([path for path, _ in versions])
            try:
                _check(session, guards)
            except GuardMoved:
                raise HasMembers from None
        versions = [each for each, stat in zip(versions, stats, strict=True) if stat and stat.version == each[1]]


def _children(session: ZooKeeperSession, above: str) -> list[tuple[str, int]]:
    """The paths and versions of a znode's children."""
    found = [f"{above}/{name}" for name in _names_in(session, above)]
    stats = session.stats(found)
    return [(path, stat.version) for path, stat in zip(found, stats, strict=True) if stat is not None]


def _names_in(session: ZooKeeperSession, path: str) -> list[str]:
    try:
        return session.children(path)
    except NoNode:
        return []


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
        return Committed(
            int(fields["offset"]),
            int(fields["committed_us"]),
            bytes.fromhex(fields["topic_id"]),
            int(fields.get("leader_epoch", NO_EPOCH)),
            (int(fields.get("number", 0)), int(fields.get("order", 0))),
            unknown_in(fields, _FIELDS),
        )


def _readable(path: str, content: bytes) -> Committed | None:
    """As `_parse`; None if it cannot be read."""
    try:
        return _parse(path, content)
    except UnreadableZnode:
        return None


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
