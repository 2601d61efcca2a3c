"""Claims of partitions by the members of a group, their release, and commits. Knows no thread and no request.

A partition has at most one owner, and only its owner commits offsets of it. Claims are a part of the group's state, so
a claim or a release is one change of it, and a commit is written together with a check of it. It does not matter which
broker makes them, or how late.

- A partition that another member owns is waited for, never taken. When a member goes, so do its claims.
- A claim that is made again finds itself, and keeps its number: its answer may have been lost.
- The offset from which a member reads is read after its claim. Before, the last owner may still commit.
- A commit names the number of the claim. So a request that is executed late, when its member owns the partition by
  another claim, changes nothing; and of the commits of a claim an earlier one changes nothing after a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from broker.groups.states import States
from kafkalog.errors import (
    GroupIsSubscribed,
    InvalidRequest,
    MemberFenced,
    NotOwner,
    StaleGeneration,
    UnknownMember,
    UnknownTopicId,
)
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, paths
from kafkalog.zk.groups import Committed, Offset
from kafkalog.zk.members import GroupState, Seat
from kafkalog.zk.session import NoNode


class Claimant(NamedTuple):
    """A member as it names itself in a request."""

    group: str
    name: str
    epoch: int


class Claim(NamedTuple):
    """A claim that a member has, and from where the group goes on.

    Attributes:
        number: of the claim.
        committed: None: the group has no offset of the partition.
    """

    number: int
    committed: Committed | None


class Claimed(NamedTuple):
    """What a member got of what it asked for, and who owns the rest."""

    claims: Mapping[TopicPartition, Claim]
    owners: Mapping[TopicPartition, str]


def seat_of(states: States, state: GroupState, claimant: Claimant) -> Seat:
    """The seat of a member. Raises UnknownMember, MemberFenced."""
    group, name, epoch = claimant
    seat = state.seats.get(name)
    if seat is None:
        raise UnknownMember(group=group, member=name)
    if seat.epoch != epoch:
        [other] = members.read_members(states.session, group, [name]).values() or [members.Member(name)]
        raise MemberFenced(group=group, member=name, host=other.host, process=other.process)
    return seat


def claim(states: States, claimant: Claimant, generation: int, partitions: Sequence[TopicPartition]) -> Claimed:
    """Claim those partitions that no other member owns, of the member's share in a generation.

    Raises:
        UnknownMember, MemberFenced: it is no member (any more), or was replaced.
        StaleGeneration: the group has another generation.
        InvalidRequest: a partition is not in the member's share.
    """
    group, name, _ = claimant

    def change(state: GroupState) -> GroupState:
        seat = seat_of(states, state, claimant)
        if state.generation != generation:
            raise StaleGeneration(group=group, generation=state.generation, expected=generation)
        for partition in set(partitions) - seat.share:
            raise InvalidRequest(reason=f"{partition} is not in the share of {name} in group '{group}'")
        free = [partition for partition in partitions if partition not in state.owners]
        if not free:
            return state
        number = state.number + 1
        seat = seat._replace(claims={**seat.claims, **dict.fromkeys(free, number)})
        return states.write(group, state, replace(state, number=number).with_seat(name, seat))

    state = states.change(group, change)
    own = state.seats[name].claims
    mine = {partition: own[partition] for partition in partitions if partition in own}
    topic_ids = {topic: known.topic_id for topic, known in state.topics.items()}
    committed = groups.committed_of(states.session, group, mine, topic_ids)
    return Claimed(
        {partition: Claim(number, committed.get(partition)) for partition, number in mine.items()},
        {partition: state.owners[partition] for partition in partitions if partition not in own},
    )


def release(
    states: States,
    claimant: Claimant,
    claims: Mapping[TopicPartition, int],
    offsets: Mapping[TopicPartition, Offset],
    now_us: int,
) -> None:
    """End claims, given by their numbers, after a commit of offsets of them. A claim that has ended is no error: the
    answer may have been lost.

    Raises:
        UnknownMember, MemberFenced: it owns nothing any more.
    """
    group, name, _ = claimant

    def change(state: GroupState) -> None:
        seat = seat_of(states, state, claimant)
        mine = {partition for partition, number in claims.items() if seat.claims.get(partition) == number}
        last = {p: offset for p, offset in offsets.items() if p in mine and _topic_id(state, p) == offset.topic_id}
        _commit(states, group, state, last, now_us, without_gone=True)
        if mine:
            left = {partition: number for partition, number in seat.claims.items() if partition not in mine}
            states.write(group, state, state.with_seat(name, seat._replace(claims=left)))

    states.change(group, change)


def commit(states: States, claimant: Claimant, offsets: Mapping[TopicPartition, Offset], now_us: int) -> None:
    """Write offsets of partitions that a member owns, by the claims that the offsets name.

    Raises:
        NotOwner: it does not own one of them.
        UnknownMember, MemberFenced: it owns nothing any more.
        UnknownTopicId: a partition's topic was deleted, and perhaps created again.
    """
    group, name, _ = claimant

    def change(state: GroupState) -> None:
        seat, mine = seat_of(states, state, claimant), {}
        for partition, offset in offsets.items():
            if seat.claims.get(partition) != offset.number:
                owner = state.owners.get(partition, "")
                raise NotOwner(member=name, partition=str(partition), group=group, owner=owner)
            known = _topic_id(state, partition)
            if known is None or offset.topic_id not in (known, b""):  # deleted, or made anew
                raise UnknownTopicId(topic_id=f"{offset.topic_id.hex()} ('{partition.topic}')")
            mine[partition] = offset._replace(topic_id=known)
        _commit(states, group, state, mine, now_us)

    states.change(group, change)


def commit_as_first(states: States, claimant: Claimant, offsets: Mapping[TopicPartition, Offset], now_us: int) -> str:
    """Write offsets of a group that Spark streams follow, but for those of deleted topics, if the member is the first.
    Returns who is.

    Raises UnknownMember, MemberFenced.
    """

    def change(state: GroupState) -> str:
        seat_of(states, state, claimant)
        first = state.first()
        assert first is not None
        if first == claimant.name:
            _commit(states, claimant.group, state, offsets, now_us, without_gone=True)
        return first

    return states.change(claimant.group, change)


def commit_unclaimed(
    states: States,
    group: str,
    offsets: Mapping[TopicPartition, Offset],
    now_us: int,
    check: Callable[[GroupState], object] = lambda _: None,
) -> None:
    """Write offsets for a reader that assigned its partitions itself, or an operator.

    Args:
        check: raises an error if they must not be written into a group with this state.

    Raises:
        GroupIsSubscribed: the group has subscribed members, who share its partitions among themselves.
    """

    def change(state: GroupState) -> None:
        check(state)
        if state.kind == members.CONSUMER and state.seats:
            partition = next(iter(offsets))
            owner = state.owners.get(partition) or "a member of it"
            raise GroupIsSubscribed(group=group, partition=str(partition), owner=owner)
        if state.version < 0:
            members.make_group(states.session, group)  # the commit depends on it: nobody must join meanwhile
            raise NoNode
        _commit(states, group, state, offsets, now_us)

    states.change(group, change)


def _topic_id(state: GroupState, partition: TopicPartition) -> bytes | None:
    """The id of a partition's topic, as its group knows it: brokers learn of topics later."""
    topic = state.topics.get(partition.topic)
    return None if topic is None else topic.topic_id


def _commit(
    states: States,
    group: str,
    state: GroupState,
    offsets: Mapping[TopicPartition, Offset],
    now_us: int,
    *,
    without_gone: bool = False,
) -> None:
    """Write offsets if the group has this state.

    Args:
        without_gone: leave out those of topics that were deleted, perhaps made anew.

    Raises:
        GuardMoved: the group has another state by now.
        UnknownTopicId: there is no topic with the id of one; the group may learn it later than a reader.
    """
    while offsets:
        try:
            guards = states.guards(group, state)
            groups.commit_offsets(states.session, group, offsets, now_us, guards, of_present_topics=True)
            return
        except groups.GuardMoved as moved:
            gone = [p for p, each in offsets.items() if paths.partitions(p.topic, each.topic_id) == moved.path]
            if not gone:
                raise
            if not without_gone:
                gone_id = offsets[gone[0]].topic_id.hex()
                raise UnknownTopicId(topic_id=f"{gone_id} ('{gone[0].topic}')") from None
            offsets = {partition: offset for partition, offset in offsets.items() if partition not in gone}
