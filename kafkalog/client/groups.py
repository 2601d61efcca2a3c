"""Groups as a client sees them: offsets, live members, and membership. Brokers keep them in ZooKeeper.

`Admin` and `Consumer` offer what users need; `keep_member` and `leave_group` are for a reader that is a member of a
group while it lives.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kafkalog.client.cluster import Cluster
from kafkalog.errors import InvalidArgument, UnknownTopic, UnknownTopicId
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.shares import partitions_of

_ANY: Mapping[str, bytes] = {}


class GroupSummary(NamedTuple):
    """A group: the topics for which it has offsets, how many live members, and the kind of its members: "consumer",
    "stream", or empty if it never had one."""

    name: str
    topics: tuple[str, ...]
    live_members: int
    kind: str = ""


class GroupOffset(NamedTuple):
    """The next offset that a group consumes, and when it was written (microseconds since the epoch)."""

    offset: int
    committed_us: int


class GroupMember(NamedTuple):
    """A live member of a group.

    Attributes:
        subscription: describes what it reads.
        process: names its process on `host`.
        left_ms: so long it counts as live without a renewal.
        client_id, instance_id: as it was given them (client.id, group.instance.id); empty: it was not.
        topics, pattern: what a consumer subscribes to: names, or a regular expression that a whole name matches.
        share: the partitions that the group has assigned to it.
        owned: the partitions that it reads; of its share it waits for the others.
    """

    name: str
    subscription: str
    host: str
    process: str
    since_us: int = 0
    left_ms: int = 0
    client_id: str = ""
    instance_id: str = ""
    topics: tuple[str, ...] = ()
    pattern: str = ""
    share: tuple[TopicPartition, ...] = ()
    owned: tuple[TopicPartition, ...] = ()


class Awaited(NamedTuple):
    """A partition that a member is to read and does not own yet; `owner` is '' if nobody owns it."""

    member: str
    partition: TopicPartition
    owner: str


class GroupInfo(NamedTuple):
    """A group.

    Attributes:
        members: in the order in which they came. Of streams the first one's offsets are written.
        kind: of the members: "consumer", "stream", or empty if the group never had one.
        generation: rises with each change of members or their shares.
        assignor: by which consumers share the partitions.
    """

    name: str
    offsets: Mapping[TopicPartition, GroupOffset]
    members: tuple[GroupMember, ...]
    kind: str = ""
    generation: int = 0
    assignor: str = ""

    def owners(self) -> dict[TopicPartition, str]:
        """The owner of each partition that has one."""
        return {partition: member.name for member in self.members for partition in member.owned}

    def awaited(self) -> list[Awaited]:
        """What members wait for."""
        owners = self.owners()
        return [
            Awaited(member.name, partition, owners.get(partition, ""))
            for member in self.members
            for partition in member.share
            if owners.get(partition) != member.name
        ]


def lag(start: int, end: int, committed: int | None) -> int:
    """How many records of [start, end) a group has not consumed; all if it has no committed offset. Negative if the
    committed offset is past the end: then records at the end are lost, and the lag is unknown."""
    return end - (start if committed is None else max(committed, start))


def list_groups(cluster: Cluster) -> list[GroupSummary]:
    """Every group that has offsets or live members, by name."""
    reply: pb.ListGroupsReply = cluster.call("ListGroups", pb.ListGroupsRequest())
    return [GroupSummary(each.group, tuple(each.topics), each.live_members, each.kind) for each in reply.groups]


def describe_group(cluster: Cluster, group: str, *, patient: bool = True) -> GroupInfo:
    """A group's offsets and live members. Raises InvalidRequest, UnknownGroup."""
    reply: pb.GroupDescription = cluster.call("DescribeGroup", pb.DescribeGroupRequest(group=group), patient=patient)
    offsets = {
        TopicPartition(each.topic, each.partition): GroupOffset(each.offset, each.committed_us)
        for each in reply.offsets
    }
    members = tuple(_member(each) for each in reply.members)
    return GroupInfo(group, offsets, members, reply.kind, reply.generation, reply.assignor)


def committed_offsets(cluster: Cluster, group: str, topics: Iterable[str]) -> dict[TopicPartition, int]:
    """A group's offsets in some topics, or in all if none is named."""
    return {partition: offset for partition, (offset, _) in offsets_with_epochs(cluster, group, topics).items()}


def offsets_with_epochs(
    cluster: Cluster, group: str, topics: Iterable[str]
) -> dict[TopicPartition, tuple[int, int | None]]:
    """The same, with the leader epochs in which the logs had what is before the offsets; None: not known."""
    request = pb.CommittedOffsetsRequest(group=group, topics=list(topics))
    reply: pb.CommittedOffsetsReply = cluster.call("CommittedOffsets", request)
    return {
        TopicPartition(each.topic, each.partition): (
            each.offset,
            each.leader_epoch if each.HasField("leader_epoch") else None,
        )
        for each in reply.offsets
    }


def offsets_with_topic_ids(
    cluster: Cluster, group: str, topics: Iterable[str], *, patient: bool = True
) -> dict[TopicPartition, tuple[int, bytes]]:
    """A group's offsets in topics of these names, with the topics' ids. The topics may be deleted."""
    request = pb.CommittedOffsetsRequest(group=group, topics=list(topics), any_id=True)
    reply: pb.CommittedOffsetsReply = cluster.call("CommittedOffsets", request, patient=patient)
    return {TopicPartition(each.topic, each.partition): (each.offset, each.topic_id) for each in reply.offsets}


def forget_offsets(
    cluster: Cluster, group: str, topic_ids: Mapping[TopicPartition, bytes], *, patient: bool = True
) -> None:
    """Forget a group's offsets of partitions, if they belong to the topics with these ids."""
    offsets = [pb.GroupOffset(topic=topic, partition=n, topic_id=id_) for (topic, n), id_ in topic_ids.items()]
    cluster.call("ForgetOffsets", pb.ForgetOffsetsRequest(group=group, offsets=offsets), patient=patient)


class Writer:
    """Who commits without being a member: a commit of it that is executed late changes nothing after its later ones.
    Thread-safe; a forked process is another writer.

    Attributes:
        token: random; brokers know it by this.
    """

    def __init__(self) -> None:
        self.token = secrets.randbits(62) + 1
        self._orders = itertools.count(1)

    def next_order(self) -> int:
        return next(self._orders)


def commit_offsets(
    cluster: Cluster,
    group: str,
    offsets: Mapping[TopicPartition, int],
    topic_ids: Mapping[str, bytes] = _ANY,
    writer: Writer | None = None,
    epochs: Mapping[TopicPartition, int | None] = MappingProxyType({}),
) -> None:
    """Write a group's offsets.

    Args:
        topic_ids: of the offsets' topics, if known: a topic created again under the name gets none of them.
        writer: None: a commit by hand; of several the one that is executed last counts.
        epochs: the leader epochs in which the logs had what is before the offsets, where they are known.

    Raises:
        InvalidRequest, UnknownTopic, UnknownTopicId, UnknownPartition.
    """
    request = pb.CommitOffsetsRequest(group=group, offsets=_to_wire(offsets, topic_ids))
    for partition, each in zip(offsets, request.offsets, strict=True):
        if (epoch := epochs.get(partition)) is not None:
            each.leader_epoch = epoch
    if writer is not None:
        request.writer, request.order = writer.token, writer.next_order()
    cluster.call("CommitOffsets", request)


def reset_offsets(
    cluster: Cluster,
    group: str,
    offsets: Mapping[TopicPartition, int],
    force: bool,
    create: bool,
    topic_ids: Mapping[str, bytes],
) -> None:
    """Write a group's offsets for an operator. Raises GroupIsLive, UnknownGroup, UnknownTopic, UnknownTopicId,
    UnknownPartition."""
    listed = _to_wire(offsets, topic_ids)
    cluster.call("ResetOffsets", pb.ResetOffsetsRequest(group=group, offsets=listed, force=force, create=create))


def delete_group(cluster: Cluster, group: str) -> None:
    """Forget a group and its offsets. Raises GroupIsLive, UnknownGroup."""
    cluster.call("DeleteGroup", pb.DeleteGroupRequest(group=group), repeatable=False)


class Kept(NamedTuple):
    """A group's oldest live member, and the epoch of the member that asked."""

    first: GroupMember
    epoch: int


def keep_member(
    cluster: Cluster,
    group: str,
    member: GroupMember,
    offsets: Mapping[TopicPartition, int],
    topic_ids: Mapping[str, bytes] | None = None,
    order: int = 0,
    epoch: int | None = None,
) -> Kept:
    """Be a live member for the next 10 s, and commit offsets if no live member is older.

    Each broker is tried once.

    Args:
        topic_ids: of the offsets' topics, if known: a topic created again under the name gets none of them.
        order: of a member's calls the later one has the higher: an earlier one writes no offset after it.
        epoch: as the last call returned it; None: it is not a member yet.

    Returns:
        The group's oldest live member (the offsets were written if it is the given one), and the member's epoch.

    Raises:
        UnknownMember, MemberFenced: the epoch is over; call again without it.
        BrokerUnreachable, InvalidRequest, UnknownTopic, UnknownTopicId, UnknownPartition.
    """
    name, subscription, host, process, *_ = member
    told = pb.GroupMember(member=name, subscription=subscription, host=host, process=process)
    request = pb.KeepMemberRequest(group=group, member=told)
    if epoch is None:  # a request of its own: one with offsets could bring the member and them back when it has left
        registered: pb.KeepMemberReply = cluster.call("KeepMember", request, patient=False)
        if not offsets:
            return Kept(_member(registered.first), registered.epoch)
        epoch = registered.epoch
    request.epoch, request.order = epoch, order
    request.offsets.extend(_to_wire(offsets, topic_ids or {}))
    reply: pb.KeepMemberReply = cluster.call("KeepMember", request, patient=False)
    return Kept(_member(reply.first), epoch)


def leave_group(cluster: Cluster, group: str, name: str) -> None:
    """End a membership. Each broker is tried once. Raises BrokerUnreachable."""
    cluster.call("LeaveGroup", pb.LeaveGroupRequest(group=group, member=name), patient=False)


def _member(told: pb.GroupMember) -> GroupMember:
    return GroupMember(
        told.member,
        told.subscription,
        told.host,
        told.process,
        told.since_us,
        told.lease_left_ms,
        told.client_id,
        told.instance_id,
        tuple(told.topics),
        told.pattern,
        tuple(partitions_of(told.share)),
        tuple(partitions_of(told.owned)),
    )


def _to_wire(offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, bytes] = _ANY) -> list[pb.GroupOffset]:
    for (topic, number), offset in offsets.items():
        if offset < 0:
            raise InvalidArgument(reason=f"offset {offset} of {topic}-{number} is negative")
    return [
        pb.GroupOffset(topic=topic, partition=number, offset=offset, topic_id=topic_ids.get(topic))
        for (topic, number), offset in offsets.items()
    ]


def commit_living(
    commit: Callable[[Mapping[TopicPartition, int]], object], offsets: Mapping[TopicPartition, int]
) -> None:
    """Commit offsets by a function, except those of topics that were deleted meanwhile, perhaps made anew.

    Raises KafkalogError: of `commit`, but for UnknownTopic and UnknownTopicId.
    """
    try:
        commit(offsets)
    except (UnknownTopic, UnknownTopicId):
        if len(topics := {partition.topic for partition in offsets}) > 1:
            for topic in topics:
                commit_living(commit, {p: offset for p, offset in offsets.items() if p.topic == topic})
