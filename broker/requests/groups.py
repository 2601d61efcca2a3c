"""Groups: their offsets and live members, in ZooKeeper. Any broker answers; it keeps nothing of a group itself."""

from __future__ import annotations

from collections.abc import Iterable

from broker.replica.catalog import Catalog
from kafkalog.config import nearest_hint
from kafkalog.errors import (
    GroupIsLive,
    InvalidRequest,
    MembershipMoved,
    UnknownGroup,
    UnknownPartition,
    UnknownTopicId,
)
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk import groups, members, paths
from kafkalog.zk.session import Check

_TEXT_MAX = 4096  # of what a member tells of itself: a znode is no place for more
_RENEWALS_MAX = 5


def commit_offsets(request: pb.CommitOffsetsRequest, catalog: Catalog) -> pb.CommitOffsetsReply:
    """Write a group's offsets in one go. Raises InvalidRequest, UnknownTopic, UnknownPartition."""
    _check_name(request.group)
    _commit(request.group, request.offsets, catalog)
    return pb.CommitOffsetsReply()


def committed_offsets(request: pb.CommittedOffsetsRequest, catalog: Catalog) -> pb.CommittedOffsetsReply:
    """A group's offsets; partitions without one are left out, and topics that are gone unless they are asked for too.

    Raises InvalidRequest.
    """
    _check_name(request.group)
    topic_ids = None if request.any_id else _topic_ids(catalog)
    found = groups.committed(catalog.session, request.group, topic_ids, request.topics)
    reply = pb.CommittedOffsetsReply()
    for (topic, number), each in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=each.offset, topic_id=each.topic_id)
    return reply


def forget_offsets(request: pb.ForgetOffsetsRequest, catalog: Catalog) -> pb.ForgetOffsetsReply:
    """Forget a group's offsets in topics that were deleted. Raises InvalidRequest."""
    _check_name(request.group)
    topic_ids = {TopicPartition(each.topic, each.partition): each.topic_id for each in request.offsets}
    groups.forget(catalog.session, request.group, topic_ids)
    return pb.ForgetOffsetsReply()


def list_groups(request: pb.ListGroupsRequest, catalog: Catalog) -> pb.ListGroupsReply:
    """Every group that has offsets or live members."""
    reply = pb.ListGroupsReply()
    for name in groups.group_names(catalog.session):
        topics = groups.topics_of(catalog.session, name)
        live = members.live_members(catalog.session, name)
        if topics or live:
            reply.groups.add(group=name, topics=topics, live_members=len(live))
    return reply


def describe_group(request: pb.DescribeGroupRequest, catalog: Catalog) -> pb.GroupDescription:
    """A group's offsets and live members. Raises InvalidRequest, UnknownGroup."""
    _check_known(request.group, catalog)
    live = members.live_members(catalog.session, request.group)
    reply = pb.GroupDescription(members=[_member_to_wire(member) for member in live])
    found = groups.committed(catalog.session, request.group, _topic_ids(catalog))
    for (topic, number), each in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=each.offset, committed_us=each.committed_us)
    return reply


def reset_offsets(request: pb.ResetOffsetsRequest, catalog: Catalog) -> pb.ResetOffsetsReply:
    """Write the offsets that an operator wants.

    Raises:
        GroupIsLive: it has a live member, and `force` is not set.
        InvalidRequest, UnknownGroup, UnknownTopic, UnknownPartition.
    """
    _check_known(request.group, catalog)
    live = members.live_members(catalog.session, request.group)
    if live and not request.force:
        raise GroupIsLive(
            group=request.group,
            member=live[0].name,
            host=live[0].host or "an unknown host",
            left_ms=max(member.left_ms for member in live),
        )
    _commit(request.group, request.offsets, catalog)
    return pb.ResetOffsetsReply()


def keep_member(request: pb.KeepMemberRequest, catalog: Catalog) -> pb.KeepMemberReply:
    """Register or renew a live member; write its offsets if it is the group's first, and still that member as they are
    written: one that lapsed meanwhile leaves alone what its successor wrote.

    Raises InvalidRequest, UnknownTopic, UnknownPartition, MembershipMoved.
    """
    told = request.member
    _check_name(request.group)
    _check_name(told.member, "member")
    subscription, host, process = (text[:_TEXT_MAX] for text in (told.subscription, told.host, told.process))
    member = members.Member(told.member, subscription, host, process)
    for _ in range(_RENEWALS_MAX):
        live = members.keep(catalog.session, request.group, member)
        first = live[0] if live else None
        if first is None or first.name != told.member:
            return pb.KeepMemberReply(first=None if first is None else _member_to_wire(first))
        try:
            guard = Check(paths.group_member(request.group, first.name), first.version)
            _commit(request.group, request.offsets, catalog, guard)
        except groups.GuardMoved:
            continue
        return pb.KeepMemberReply(first=_member_to_wire(first))
    raise MembershipMoved(group=request.group, member=told.member)


def leave_group(request: pb.LeaveGroupRequest, catalog: Catalog) -> pb.LeaveGroupReply:
    """Forget a member at once. Raises InvalidRequest."""
    _check_name(request.group)
    _check_name(request.member, "member")
    members.leave(catalog.session, request.group, request.member)
    return pb.LeaveGroupReply()


def _commit(group: str, wanted: Iterable[pb.GroupOffset], catalog: Catalog, guard: Check | None = None) -> None:
    offsets, ids = {}, {}
    for committed in wanted:
        topic = catalog.topic(committed.topic)
        if committed.topic_id and committed.topic_id != topic.topic_id:  # made anew: it is no offset of this one
            raise UnknownTopicId(topic_id=f"{committed.topic_id.hex()} ('{topic.name}')")
        if committed.partition >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=committed.partition, partitions=len(topic.replicas))
        if committed.offset < 0:
            raise InvalidRequest(reason=f"offset {committed.offset} of {topic.name}-{committed.partition} is negative")
        offsets[TopicPartition(committed.topic, committed.partition)] = committed.offset
        ids[committed.topic] = topic.topic_id
    if offsets:
        groups.commit_offsets(catalog.session, group, offsets, ids, catalog.clock.now_us(), guard)


def _topic_ids(catalog: Catalog) -> dict[str, bytes]:
    return {name: topic.topic_id for name, topic in catalog.topics.items()}


def _member_to_wire(member: members.Member) -> pb.GroupMember:
    return pb.GroupMember(
        member=member.name,
        subscription=member.subscription,
        host=member.host,
        process=member.process,
        since_us=member.since_ms * 1000,
        lease_left_ms=member.left_ms,
    )


def _check_known(group: str, catalog: Catalog) -> None:
    _check_name(group)
    known = groups.group_names(catalog.session)
    if group not in known:
        raise UnknownGroup(group=group, hint=nearest_hint(group, known))


def _check_name(name: str, what: str = "group") -> None:
    if not paths.is_valid_name(name):
        raise InvalidRequest(
            reason=f"'{name}' is no {what} name: 1 to 249 of the characters a-z A-Z 0-9 . _ - and not '.' or '..'"
        )
