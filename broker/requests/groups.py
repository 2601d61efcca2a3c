"""Groups: their offsets and members, in ZooKeeper. Any broker answers; it keeps nothing of a group itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from broker.groups import claims
from broker.groups.claims import Claimant
from broker.groups.states import States
from broker.replica.host import Host
from kafkalog.config import nearest_hint
from kafkalog.errors import (
    GroupIsLive,
    InvalidRequest,
    UnknownGroup,
    UnknownPartition,
    UnknownTopicId,
    UnreadableZnode,
)
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.shares import shares_of
from kafkalog.zk import groups, members, paths, registry
from kafkalog.zk.content import read_each
from kafkalog.zk.groups import NO_EPOCH, Committed, Offset
from kafkalog.zk.members import GroupState, Lease, Member

ORIGIN = ("subscription", "host", "process", "client_id")
"""The texts by which a member describes itself to people."""


def commit_offsets(request: pb.CommitOffsetsRequest, host: Host, states: States) -> pb.CommitOffsetsReply:
    """Write a group's offsets in one go.

    Raises:
        NotOwner, UnknownMember, MemberFenced: a member's commit, to partitions that it does not own.
        GroupIsSubscribed: a commit of another reader, and the group has subscribed members.
        InvalidRequest, UnknownTopic, UnknownTopicId, UnknownPartition.
    """
    check_name(request.group)
    now_us = host.clock.now_us()
    if request.HasField("member"):
        if request.member.group != request.group:
            raise InvalidRequest(reason=f"the member is of group '{request.member.group}', not '{request.group}'")
        offsets = owned_offsets_of(request.offsets, request.order)
        claims.commit(states, claimant_of(request.member), offsets, now_us)
    elif offsets := offsets_of(request.offsets, host, request.order):
        if request.writer < 0:
            raise InvalidRequest(reason=f"writer {request.writer} is negative")
        by_writer = {partition: offset._replace(number=-request.writer) for partition, offset in offsets.items()}
        claims.commit_unclaimed(states, request.group, by_writer, now_us)
    return pb.CommitOffsetsReply()


def committed_offsets(request: pb.CommittedOffsetsRequest, host: Host) -> pb.CommittedOffsetsReply:
    """A group's offsets; partitions without one are left out, and so are deleted topics unless requested.

    Raises InvalidRequest.
    """
    check_name(request.group)
    session = host.metadata.session
    found = groups.committed(session, request.group, None, request.topics)
    if not request.any_id:
        found = _of_present_topics(host, found)
    reply = pb.CommittedOffsetsReply()
    for (topic, number), each in sorted(found.items()):
        told = reply.offsets.add(topic=topic, partition=number, offset=each.offset, topic_id=each.topic_id)
        if each.leader_epoch != NO_EPOCH:
            told.leader_epoch = each.leader_epoch
    return reply


def forget_offsets(request: pb.ForgetOffsetsRequest, host: Host) -> pb.ForgetOffsetsReply:
    """Forget a group's offsets in topics that were deleted. Raises InvalidRequest."""
    check_name(request.group)
    topic_ids = {TopicPartition(each.topic, each.partition): each.topic_id for each in request.offsets}
    groups.forget(host.metadata.session, request.group, topic_ids)
    return pb.ForgetOffsetsReply()


def list_groups(request: pb.ListGroupsRequest, host: Host) -> pb.ListGroupsReply:
    """Every group that has offsets or live members. One whose members cannot be read is listed without them."""
    reply = pb.ListGroupsReply()
    session = host.metadata.session
    found = read_each(lambda some: members.read_states(session, some), groups.group_names(session))
    for name, state in found.items():
        topics = groups.topics_of(session, name)
        if isinstance(state, UnreadableZnode):
            reply.groups.add(group=name, topics=topics)
        elif state is not None and (topics or state.seats):
            reply.groups.add(group=name, topics=topics, live_members=len(state.seats), kind=state.kind)
    return reply


def describe_group(request: pb.DescribeGroupRequest, host: Host, states: States) -> pb.GroupDescription:
    """A group's offsets and live members. Raises InvalidRequest, UnknownGroup."""
    group, session = request.group, host.metadata.session
    _check_known(group, host)
    state = states.read(group)
    reply = pb.GroupDescription(generation=state.generation, kind=state.kind, assignor=state.assignor)
    described = states.described(group, state)
    leases = members.read_leases(session, [(group, name) for name in described])
    now_ms = members.now_ms(session) if described else 0
    for member, lease in zip(described.values(), leases, strict=True):
        seat = state.seats[member.name]
        told = member_to_wire(member, lease, now_ms)
        told.share.extend(shares_of(seat.share))
        told.owned.extend(shares_of(seat.claims))
        reply.members.append(told)
    found = _of_present_topics(host, groups.committed(session, group, None))
    for (topic, number), each in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=each.offset, committed_us=each.committed_us)
    return reply


def reset_offsets(request: pb.ResetOffsetsRequest, host: Host, states: States) -> pb.ResetOffsetsReply:
    """Write the offsets that an operator wants.

    Raises:
        GroupIsLive: it has a live member, a subscribed one or one that `force` is not set against. If that came
            meanwhile, some offsets may be written.
        UnknownGroup: there is none, and `create` is not set.
        InvalidRequest, UnknownTopic, UnknownPartition.
    """
    if request.create:
        check_name(request.group)
    else:
        _check_known(request.group, host)

    offsets = offsets_of(request.offsets, host)
    was_free = False

    def check(state: GroupState) -> None:
        """Called before each attempt; more offsets than fit one multi are written one after another."""
        nonlocal was_free
        if not request.force or state.kind == members.CONSUMER:
            hint = partial(_reset_hint, states, state, offsets, was_free, request.force)
            _check_not_live(request.group, states, state, hint)
            was_free = True

    if offsets:
        claims.commit_unclaimed(states, request.group, offsets, host.clock.now_us(), check)
    return pb.ResetOffsetsReply()


def delete_group(request: pb.DeleteGroupRequest, host: Host, states: States) -> pb.DeleteGroupReply:
    """Forget a group and its offsets. A commit meanwhile creates the group again.

    Raises:
        GroupIsLive: it has a live member.
        InvalidRequest, UnknownGroup.
    """
    _check_known(request.group, host)
    while True:
        _check_not_live(request.group, states, states.read(request.group))
        try:
            groups.delete(host.metadata.session, request.group)
            return pb.DeleteGroupReply()
        except groups.HasMembers:  # one came after the look
            continue


def owned_offsets_of(wanted: Iterable[pb.GroupOffset | pb.GroupClaim], order: int) -> dict[TopicPartition, Offset]:
    """Offsets to be committed by the claims that they name: the group knows their topics, and this broker may not.
    Raises InvalidRequest."""
    offsets = {}
    for each in wanted:
        if each.offset < 0:
            raise InvalidRequest(reason=f"offset {each.offset} of {each.topic}-{each.partition} is negative")
        partition = TopicPartition(each.topic, each.partition)
        offsets[partition] = Offset(each.offset, each.topic_id, _leader_epoch(each), each.claim, order)
    return offsets


def offsets_of(wanted: Iterable[pb.GroupOffset], host: Host, order: int = 0) -> dict[TopicPartition, Offset]:
    """Offsets to be committed by no claim. Raises UnknownTopic, UnknownTopicId, UnknownPartition, InvalidRequest."""
    offsets = {}
    for committed in wanted:
        topic = host.metadata.topic(committed.topic)
        if committed.topic_id and committed.topic_id != topic.topic_id:  # made anew: it is no offset of this one
            raise UnknownTopicId(topic_id=f"{committed.topic_id.hex()} ('{topic.name}')")
        if committed.partition >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=committed.partition, partitions=len(topic.replicas))
        if committed.offset < 0:
            raise InvalidRequest(reason=f"offset {committed.offset} of {topic.name}-{committed.partition} is negative")
        offsets[TopicPartition(committed.topic, committed.partition)] = Offset(
            committed.offset,
            topic.topic_id,
            _leader_epoch(committed),
            order=order,
        )
    return offsets


def _leader_epoch(given: pb.GroupOffset | pb.GroupClaim) -> int:
    """Raises InvalidRequest."""
    if not given.HasField("leader_epoch"):
        return NO_EPOCH
    if given.leader_epoch < 0:
        raise InvalidRequest(reason=f"leader epoch {given.leader_epoch} is negative")
    return given.leader_epoch


def _of_present_topics(host: Host, found: Mapping[TopicPartition, Committed]) -> dict[TopicPartition, Committed]:
    """Offsets of topics that exist now: what this broker knows of them may be old, and counts only if they cannot be
    read."""
    ids: dict[str, bytes] = {}
    for name, topic in registry.topics_now(host.metadata.session, {partition.topic for partition in found}).items():
        known = host.metadata.topics.get(name) if isinstance(topic, UnreadableZnode) else topic
        if known is not None:
            ids[name] = known.topic_id
    return {partition: each for partition, each in found.items() if ids.get(partition.topic) == each.topic_id}


def claimant_of(given: pb.Membership) -> Claimant:
    check_name(given.group)
    check_name(given.member, "member")
    if given.epoch < 0:  # ZooKeeper takes -1 for any version
        raise InvalidRequest(reason=f"epoch {given.epoch} of member {given.member} is negative")
    return Claimant(given.group, given.member, given.epoch)


def member_to_wire(member: Member, lease: Lease | None = None, now_ms: int = 0) -> pb.GroupMember:
    left_ms = 0 if lease is None else max(0, lease.renewed_ms + lease.session_timeout_ms - now_ms)
    return pb.GroupMember(
        member=member.name,
        **{name: getattr(member, name) for name in ORIGIN},
        instance_id=member.instance_id,
        topics=member.topics,
        pattern=member.pattern,
        session_timeout_ms=member.session_timeout_ms,
        since_us=member.since_ms * 1000,
        lease_left_ms=left_ms,
    )


def _reset_hint(
    states: States,
    state: GroupState,
    offsets: Mapping[TopicPartition, Offset],
    was_free: bool,
    is_forced: bool,
    group: str,
) -> str:
    """What an operator is told whose reset is refused."""
    force = "; --force resets at once" if state.kind == members.STREAM else ""
    if is_forced:
        force = "; --force does not help against consumers, which own the offsets"
    hint = f" (`kafkalog groups reset --wait` waits for that{force})"
    if was_free:
        topic_ids = {topic: offset.topic_id for (topic, _), offset in offsets.items()}
        found = groups.committed_of(states.session, group, offsets, topic_ids)
        count = sum(each.offset == offsets[partition].offset for partition, each in found.items())
        hint += f". It came during the reset: {count} of the {len(offsets)} offsets are as wanted, so reset them again"
    return hint


def _check_not_live(group: str, states: States, state: GroupState, hint: Callable[[str], str] = lambda _: "") -> None:
    session = states.session
    live = members.read_members(session, group, state.seats)
    if not live:
        return
    leases = members.read_leases(session, [(group, name) for name in live])
    now_ms = members.now_ms(session)
    left_ms = max(lease.renewed_ms + lease.session_timeout_ms - now_ms if lease else 0 for lease in leases)
    first = next(iter(live.values()))
    raise GroupIsLive(
        group=group, member=first.name, host=first.host or "an unknown host", left_ms=max(left_ms, 0), hint=hint(group)
    )


def _check_known(group: str, host: Host) -> None:
    check_name(group)
    known = groups.group_names(host.metadata.session)
    if group not in known:
        raise UnknownGroup(group=group, hint=nearest_hint(group, known))


def check_name(name: str, what: str = "group") -> None:
    if not paths.is_valid_name(name):
        raise InvalidRequest(reason=f"'{name}' is not a {what} name: {paths.NAME_RULE}")
