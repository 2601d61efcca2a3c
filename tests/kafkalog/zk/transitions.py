"""Changes of a group's members without a broker: nobody gets a partition."""

from __future__ import annotations

from dataclasses import replace

from kafkalog.zk import members
from kafkalog.zk.members import CONSUMER, GroupState, Member, Seat
from kafkalog.zk.session import ZooKeeperSession


def state_of(session: ZooKeeperSession, group: str) -> GroupState:
    return members.read_state(session, group) or GroupState()


def live(session: ZooKeeperSession, group: str) -> list[str]:
    """The names of the members, in the order in which they joined."""
    return list(state_of(session, group).seats)


def join(session: ZooKeeperSession, group: str, member: Member | str) -> GroupState:
    """Add a member. Returns the state with it."""
    added = Member(member) if isinstance(member, str) else member
    members.make_group(session, group)
    before = state_of(session, group)
    epoch = before.number + 1
    after = replace(before, generation=before.generation + 1, kind=CONSUMER, number=epoch)
    after = after.with_seat(added.name, Seat(epoch))
    return members.change(session, group, before, after, members.create_member(group, added))


def leave(session: ZooKeeperSession, group: str, name: str) -> GroupState:
    """Remove a member. Returns the state without it."""
    before = state_of(session, group)
    seats = {other: seat for other, seat in before.seats.items() if other != name}
    after = replace(before, generation=before.generation + 1, seats=seats)
    return members.change(session, group, before, after, members.delete_member(group, name))
