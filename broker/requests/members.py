"""Members of groups: join, lease, claims, release, leave. Any broker answers; it keeps nothing of a member itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from broker.groups import claims
from broker.groups.claims import Claimant, seat_of
from broker.groups.membership import Groups
from broker.groups.waits import RETRY_AFTER_MS, GroupWaits
from broker.replica.host import Host
from broker.requests.groups import ORIGIN, check_name, claimant_of, member_to_wire, offsets_of, owned_offsets_of
from kafkalog.assignors import ASSIGNORS
from kafkalog.errors import (
    InvalidArgument,
    InvalidRequest,
    KafkalogError,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.patterns import matcher
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.shares import partitions_of, shares_of
from kafkalog.zk import members
from kafkalog.zk.groups import NO_EPOCH, Offset
from kafkalog.zk.members import GroupState, Member
from kafkalog.zk.session import NoNode

# Characters of a member's texts: its znode must stay small, and so must what the broker keeps of it.
_TEXT_MAX = 256  # of those for people; a host name of Linux has 64
_PATTERN_MAX = 4096
_TOPICS_TEXT_MAX = 65_536  # of all names of topics together
_TOPICS_MAX = 1000
_PARTITIONS_MAX = 100_000
_SESSION_TIMEOUT_MS_MAX = 3_600_000


def join_group(request: pb.JoinGroupRequest, groups: Groups) -> pb.JoinGroupReply:
    """Add a subscribed member, or replace the one of its name.

    Raises:
        GroupKindDiffers, AssignorDiffers: the group's members are of another kind, or share by another assignor.
        InvalidRequest, GroupBusy.
    """
    check_name(request.group)
    given = request.member
    check_name(given.member, "member")
    if request.assignor not in ASSIGNORS:
        raise InvalidRequest(reason=f"there is no assignor '{request.assignor}', only {', '.join(ASSIGNORS)}")
    if bool(given.pattern) == bool(given.topics):
        raise InvalidRequest(reason="a member subscribes either to topics or to a pattern")
    if given.instance_id:
        check_name(given.instance_id, "static member")
    _check_pattern(given.pattern)
    _check_topics(given.topics)
    member = _member(given)._replace(
        topics=tuple(sorted(given.topics)),
        pattern=given.pattern,
        instance_id=given.instance_id,
        session_timeout_ms=_checked_timeout_ms(given.session_timeout_ms),
    )
    state, epoch = groups.join(request.group, member, members.CONSUMER, request.assignor)
    return pb.JoinGroupReply(epoch=epoch, news=_news(state, given.member))


def _check_pattern(pattern: str) -> None:
    if len(pattern) > _PATTERN_MAX:
        raise InvalidRequest(reason=f"the pattern is longer than {_PATTERN_MAX} characters")
    try:
        matcher(pattern)
    except InvalidArgument as error:
        raise InvalidRequest(reason=error.facts["reason"]) from None


def _check_topics(topics: Sequence[str]) -> None:
    if len(topics) > _TOPICS_MAX:
        raise InvalidRequest(reason=f"a member cannot name more than {_TOPICS_MAX} topics: use a pattern")
    if (length := sum(map(len, topics))) > _TOPICS_TEXT_MAX:
        raise InvalidRequest(
            reason=f"the names of the member's topics have {length} characters together, more than {_TOPICS_TEXT_MAX}: "
            "use a pattern"
        )
    for topic in topics:
        check_name(topic, "topic")


def _checked_timeout_ms(session_timeout_ms: int) -> int:
    if not 0 < session_timeout_ms <= _SESSION_TIMEOUT_MS_MAX:
        raise InvalidRequest(reason=f"the session timeout must be from 1 to {_SESSION_TIMEOUT_MS_MAX} ms")
    return session_timeout_ms


def renew_member(request: pb.RenewMemberRequest, groups: Groups) -> pb.RenewMemberReply:
    """Renew a member's lease. Raises UnknownMember, MemberFenced, InvalidRequest."""
    claimant = claimant_of(request.member)
    _renew(groups, claimant, _checked_timeout_ms(request.session_timeout_ms))
    return pb.RenewMemberReply(generation=groups.states.read(claimant.group).generation)


def _renew(groups: Groups, claimant: Claimant, session_timeout_ms: int) -> None:
    """Raises UnknownMember, MemberFenced."""
    states = groups.states
    states.sure(claimant.group, lambda state: seat_of(states, state, claimant), claimant.epoch)
    try:
        members.renew(states.session, claimant.group, claimant.name, session_timeout_ms)
    except NoNode:
        raise UnknownMember(group=claimant.group, member=claimant.name) from None


def await_group(
    request: pb.AwaitGroupRequest,
    groups: Groups,
    waits: GroupWaits,
    wait: Callable[[threading.Event], bool],
    changed: threading.Event,
) -> pb.AwaitGroupReply:
    """Wait until a group has another generation than a known one, or one of some partitions can be claimed; or not at
    all, if too many wait already.

    Args:
        wait: waits for an event; returns False if the caller waits no longer.
        changed: is set also when the caller has gone, or the broker stops.

    Raises:
        UnknownMember, MemberFenced, InvalidRequest.
    """
    claimant, states = claimant_of(request.member), groups.states
    wanted = frozenset(from_wire(request.partitions))

    def look(state: GroupState) -> GroupState:
        seat_of(states, state, claimant)
        return state

    with waits.waiting(claimant, changed) as may_wait, states.waiting(claimant.group, changed):
        while True:
            changed.clear()
            state = states.sure(claimant.group, look, claimant.epoch)
            is_news = state.generation != request.generation or any(each not in state.owners for each in wanted)
            if is_news or not may_wait() or not wait(changed):
                retry_after_ms = 0 if is_news or may_wait() else RETRY_AFTER_MS
                return pb.AwaitGroupReply(news=_news(state, claimant.name), retry_after_ms=retry_after_ms)


def claim_partitions(request: pb.ClaimPartitionsRequest, groups: Groups) -> pb.ClaimPartitionsReply:
    """Claim partitions. Raises StaleGeneration, UnknownMember, MemberFenced, InvalidRequest, GroupBusy."""
    wanted = from_wire(request.partitions)
    claimed = claims.claim(groups.states, claimant_of(request.member), request.generation, wanted)
    reply = pb.ClaimPartitionsReply()
    for (topic, number), claim in claimed.claims.items():
        added = reply.claims.add(topic=topic, partition=number, claim=claim.number)
        if claim.committed is not None:
            added.offset = claim.committed.offset
            if claim.committed.leader_epoch != NO_EPOCH:
                added.leader_epoch = claim.committed.leader_epoch
    for (topic, number), owner in claimed.owners.items():
        reply.owners.add(topic=topic, partition=number, owner=owner)
    return reply


def release_partitions(request: pb.ReleasePartitionsRequest, groups: Groups, host: Host) -> pb.ReleasePartitionsReply:
    """Commit a member's last offsets, and end its claims. Offsets of claims that have ended are not written, nor of
    topics that were created again.

    Raises UnknownMember, MemberFenced, InvalidRequest, GroupBusy.
    """
    ending = {TopicPartition(each.topic, each.partition): each.claim for each in request.claims}
    last = [each for each in request.claims if each.HasField("offset")]
    offsets = owned_offsets_of(last, request.order)
    claims.release(groups.states, claimant_of(request.member), ending, offsets, host.clock.now_us())
    return pb.ReleasePartitionsReply()


def keep_member(request: pb.KeepMemberRequest, groups: Groups, host: Host) -> pb.KeepMemberReply:
    """Add a Spark stream as a member, or renew its lease. Write its offsets if it is the group's first member, and
    still is at the write: a member that lapsed meanwhile must not overwrite its successor's offsets.

    Raises:
        UnknownMember, MemberFenced: the epoch in the request is over; the stream has to register again.
        UnknownTopic, UnknownTopicId, UnknownPartition: of an offset; the lease is renewed, and the others are written.
        GroupKindDiffers, InvalidRequest, GroupBusy.
    """
    group, given = request.group, request.member
    check_name(group)
    check_name(given.member, "member")
    if request.offsets and not request.HasField("epoch"):
        raise InvalidRequest(reason="a member commits offsets only by its epoch")
    offsets, failure = _known_offsets(request, host)
    member = _member(given)
    if request.HasField("epoch"):
        claimant = claimant_of(pb.Membership(group=group, member=member.name, epoch=request.epoch))
    else:
        claimant = _registered(groups, group, member)
    _renew(groups, claimant, member.session_timeout_ms)
    numbered = {partition: offset._replace(number=claimant.epoch) for partition, offset in offsets.items()}
    first = claims.commit_as_first(groups.states, claimant, numbered, host.clock.now_us())
    if failure is not None:
        raise failure
    described = members.read_members(groups.states.session, group, [first]).get(first, Member(first))
    [lease] = members.read_leases(groups.states.session, [(group, first)])
    told = member_to_wire(described, lease, lease.renewed_ms if lease else 0)
    return pb.KeepMemberReply(first=told, epoch=claimant.epoch)


def _known_offsets(
    request: pb.KeepMemberRequest, host: Host
) -> tuple[dict[TopicPartition, Offset], KafkalogError | None]:
    """A stream's offsets in partitions that this broker knows, and the first error of the others: a stream may read
    on after one of its topics was deleted. Raises InvalidRequest."""
    offsets: dict[TopicPartition, Offset] = {}
    failure: KafkalogError | None = None
    for each in request.offsets:
        try:
            offsets |= offsets_of([each], host, request.order)
        except (UnknownTopic, UnknownTopicId, UnknownPartition) as error:
            failure = failure or error
    return offsets, failure


def _registered(groups: Groups, group: str, member: Member) -> Claimant:
    """A stream as a member: it finds itself, because its last answer may have been lost."""
    state = groups.states.read(group)
    seat = state.seats.get(member.name)
    if seat is not None and state.kind == members.STREAM:
        return Claimant(group, member.name, seat.epoch)
    return Claimant(group, member.name, groups.join(group, member, members.STREAM)[1])


def leave_group(request: pb.LeaveGroupRequest, groups: Groups) -> pb.LeaveGroupReply:
    """Forget a member at once. Raises InvalidRequest, GroupBusy."""
    check_name(request.group)
    check_name(request.member, "member")
    groups.leave(request.group, request.member, request.epoch if request.HasField("epoch") else None)
    return pb.LeaveGroupReply()


def _news(state: GroupState, name: str) -> pb.GroupNews:
    seat = state.seats[name]
    share = sorted(seat.share)
    topics = sorted({partition.topic for partition in share})
    return pb.GroupNews(
        generation=state.generation,
        share=shares_of(share),
        topics=[pb.GroupTopic(topic=topic, topic_id=state.topics[topic].topic_id) for topic in topics],
        claims=[
            pb.GroupClaim(topic=topic, partition=number, claim=claim)
            for (topic, number), claim in sorted(seat.claims.items())
        ],
    )


def from_wire(shares: Sequence[pb.GroupShare]) -> list[TopicPartition]:
    """Raises InvalidRequest."""
    if sum(len(share.partitions) for share in shares) > _PARTITIONS_MAX:
        raise InvalidRequest(reason=f"a member cannot name more than {_PARTITIONS_MAX} partitions at once")
    for share in shares:
        check_name(share.topic, "topic")
    return partitions_of(shares)


def _member(given: pb.GroupMember) -> Member:
    """Whose a member is, as it says; cut where that is longer than anybody needs."""
    return Member(given.member, **{name: getattr(given, name)[:_TEXT_MAX] for name in ORIGIN})
