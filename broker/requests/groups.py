"""Groups: their offsets and live members, in ZooKeeper. Any broker answers; it keeps nothing of a group itself."""

from __future__ import annotations

from collections.abc import Iterable

from broker.replica.host import Host
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

_TEXT_MAX = 4096  # bytes of each text of a member: its znode must stay small
_RENEWALS_MAX = 5


def commit_offsets(request: pb.CommitOffsetsRequest, host: Host) -> pb.CommitOffsetsReply:
    """Write a group's offsets in one go. Raises InvalidRequest, UnknownTopic, UnknownPartition."""
    _check_name(request.group)
    _commit(request.group, request.offsets, host)
    return pb.CommitOffsetsReply()


def committed_offsets(request: pb.CommittedOffsetsRequest, host: Host) -> pb.CommittedOffsetsReply:
    """A group's offsets; partitions without one are left out, and so are deleted topics unless requested.

    Raises InvalidRequest.
    """
    _check_name(request.group)
    topic_ids = None if request.any_id else _topic_ids(host)
    found = groups.committed(host.metadata.session, request.group, topic_ids, request.topics)
    reply = pb.CommittedOffsetsReply()
    for (topic, number), each in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=each.offset, topic_id=each.topic_id)
    return reply


def forget_offsets(request: pb.ForgetOffsetsRequest, host: Host) -> pb.ForgetOffsetsReply:
    """Forget a group's offsets in topics that were deleted. Raises InvalidRequest."""
    _check_name(request.group)
    topic_ids = {TopicPartition(each.topic, each.partition): each.topic_id for each in request.offsets}
    groups.forget(host.metadata.session, request.group, topic_ids)
    return pb.ForgetOffsetsReply()


def list_groups(request: pb.ListGroupsRequest, host: Host) -> pb.ListGroupsReply:
    """Every group that has offsets or live members."""
    reply = pb.ListGroupsReply()
    for name in groups.group_names(host.metadata.session):
        topics = groups.topics_of(host.metadata.session, name)
        live = members.live_members(host.metadata.session, name)
        if topics or live:
            reply.groups.add(group=name, topics=topics, live_members=len(live))
    return reply


def describe_group(request: pb.DescribeGroupRequest, host: Host) -> pb.GroupDescription:
    """A group's offsets and live members. Raises InvalidRequest, UnknownGroup."""
    _check_known(request.group, host)
    live = members.live_members(host.metadata.session, request.group)
    reply = pb.GroupDescription(members=[_member_to_wire(member) for member in live])
    found = groups.committed(host.metadata.session, request.group, _topic_ids(host))
    for (topic, number), each in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=each.offset, committed_us=each.committed_us)
    return reply


def reset_offsets(request: pb.ResetOffsetsRequest, host: Host) -> pb.ResetOffsetsReply:
    """Write the offsets that an operator wants.

    Raises:
        GroupIsLive: it has a live member, and `force` is not set.
        UnknownGroup: there is none, and `create` is not set.
        InvalidRequest, UnknownTopic, UnknownPartition.
    """
    if request.create:
        _check_name(request.group)
    else:
        _check_known(request.group, host)
    if not request.force:
        _check_not_live(request.group, host, " (`kafkalog groups reset --wait` waits for that; --force resets at once)")
    _commit(request.group, request.offsets, host)
    return pb.ResetOffsetsReply()


def delete_group(request: pb.DeleteGroupRequest, host: Host) -> pb.DeleteGroupReply:
    """Forget a group and its offsets. A commit meanwhile creates the group again.

    Raises:
        GroupIsLive: it has a live member.
        InvalidRequest, UnknownGroup.
    """
    _check_known(request.group, host)
    while True:
        _check_not_live(request.group, host)
        try:
            groups.delete(host.metadata.session, request.group)
            return pb.DeleteGroupReply()
        except groups.HasMembers:  # one came after the look
            continue


def keep_member(request: pb.KeepMemberRequest, host: Host) -> pb.KeepMemberReply:
    """Register or renew a live member. Write its offsets if it is the group's first member, and still is at the write:
    a member that lapsed meanwhile must not overwrite its successor's offsets.

    Raises InvalidRequest, UnknownTopic, UnknownPartition, MembershipMoved.
    """
    given = request.member
    _check_name(request.group)
    _check_name(given.member, "member")
    subscription, machine, process = (text[:_TEXT_MAX] for text in (given.subscription, given.host, given.process))
    member = members.Member(given.member, subscription, machine, process)
    for _ in range(_RENEWALS_MAX):
        live = members.keep(host.metadata.session, request.group, member)
        first = live[0] if live else None
        if first is None or first.name != given.member:
            return pb.KeepMemberReply(first=None if first is None else _member_to_wire(first))
        try:
            guard = Check(paths.group_member(request.group, first.name), first.version)
            _commit(request.group, request.offsets, host, guard)
        except groups.GuardMoved:
            continue
        return pb.KeepMemberReply(first=_member_to_wire(first))
    raise MembershipMoved(group=request.group, member=given.member)


def leave_group(request: pb.LeaveGroupRequest, host: Host) -> pb.LeaveGroupReply:
    """Forget a member at once. Raises InvalidRequest."""
    _check_name(request.group)
    _check_name(request.member, "member")
    members.leave(host.metadata.session, request.group, request.member)
    return pb.LeaveGroupReply()


def _commit(group: str, wanted: Iterable[pb.GroupOffset], host: Host, guard: Check | None = None) -> None:
    offsets, ids = {}, {}
    for committed in wanted:
        topic = host.metadata.topic(committed.topic)
        if committed.topic_id and committed.topic_id != topic.topic_id:  # made anew: it is no offset of this one
            raise UnknownTopicId(topic_id=f"{committed.topic_id.hex()} ('{topic.name}')")
        if committed.partition >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=committed.partition, partitions=len(topic.replicas))
        if committed.offset < 0:
            raise InvalidRequest(reason=f"offset {committed.offset} of {topic.name}-{committed.partition} is negative")
        offsets[TopicPartition(committed.topic, committed.partition)] = committed.offset
        ids[committed.topic] = topic.topic_id
    if offsets:
        groups.commit_offsets(host.metadata.session, group, offsets, ids, host.clock.now_us(), guard)


def _topic_ids(host: Host) -> dict[str, bytes]:
    return {name: topic.topic_id for name, topic in host.metadata.topics.items()}


def _member_to_wire(member: members.Member) -> pb.GroupMember:
    return pb.GroupMember(
        member=member.name,
        subscription=member.subscription,
        host=member.host,
        process=member.process,
        since_us=member.since_ms * 1000,
        lease_left_ms=member.left_ms,
    )


def _check_not_live(group: str, host: Host, hint: str = "") -> None:
    live = members.live_members(host.metadata.session, group)
    if live:
        machine, left_ms = live[0].host or "an unknown host", max(member.left_ms for member in live)
        raise GroupIsLive(group=group, member=live[0].name, host=machine, left_ms=left_ms, hint=hint)


def _check_known(group: str, host: Host) -> None:
    _check_name(group)
    known = groups.group_names(host.metadata.session)
    if group not in known:
        raise UnknownGroup(group=group, hint=nearest_hint(group, known))


def _check_name(name: str, what: str = "group") -> None:
    if not paths.is_valid_name(name):
        raise InvalidRequest(
            reason=f"'{name}' is not a {what} name: use 1 to 249 of the characters a-z A-Z 0-9 . _ - but not '.', '..'"
        )
