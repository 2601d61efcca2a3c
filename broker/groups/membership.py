"""Changes of a group's members: join, leave, lapse, and partitions that come or go. Each makes the next generation.

The broker that makes a change also computes what each member is to read (`kafkalog/assignors.py`), and writes it with
the generation in one change. So all members act on the same view, and no member has to be elected. A broker is not
asked for what it knows of a group: it may be any.

A topic of which a generation saw n partitions, and which now has more, is read from 0 in the others, whatever
`auto.offset.reset` says, and so is a topic that is new to the pattern of a member: what came between its creation and
its discovery would be lost. Their offsets are committed as 0 before the generation that has them. A group keeps in mind
what it has read, also while no member reads it, or it is deleted: the only reader of a topic may be away for a moment,
in which it grows or is made anew. What a Spark stream has read, or what was read or reset without a membership, it
knows by the offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from broker.groups.states import States
from broker.replica.metadata import Metadata
from kafkalog.assignors import ASSIGNORS
from kafkalog.clock import Clock
from kafkalog.errors import AssignorDiffers, GroupKindDiffers, GroupTooLarge, InvalidRequest, UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, registry
from kafkalog.zk.members import GroupState, Member, Seat, Topic
from kafkalog.zk.session import ANY_VERSION, BadVersion, NoNode

log = get_logger(__name__)

MEMBERS_MAX = 1000
"""Of a group: each change is written with the shares of all, and each member reads it."""
LAPSED_MAX = 200
"""Members that are removed in one change."""
GONE_MAX = 100
"""Topics that were deleted and that a group keeps in mind: each change writes their names."""


class Lapsed(NamedTuple):
    """A membership whose lease has ended: a member that joins again has another epoch, and a lease that begins anew."""

    epoch: int
    version: int


class Groups:
    """Makes the changes, for any group."""

    def __init__(self, states: States, metadata: Metadata, clock: Clock) -> None:
        self.states = states
        self._metadata = metadata
        self._session = metadata.session
        self._clock = clock

    def join(self, group: str, member: Member, kind: str, assignor: str = "") -> tuple[GroupState, int]:
        """Add a member, or replace the one of its name. Then the generation stays, unless it subscribes to something
        else, and what the one before owned is free.

        Returns:
            The state with it, and its epoch.

        Raises:
            GroupKindDiffers, AssignorDiffers: of its members.
            InvalidRequest: it has as many members as it may have.
            GroupTooLarge: its claims would not fit the group's znode.
            GroupBusy: the group changed too often meanwhile.
        """

        def change(state: GroupState) -> tuple[GroupState, int]:
            if state.version < 0 or not state.seats:
                members.make_group(self._session, group)
            if state.version < 0:
                raise NoNode  # not any more: it is read again
            if member.name not in state.seats and len(state.seats) >= MEMBERS_MAX:
                raise InvalidRequest(
                    reason=f"group '{group}' has {MEMBERS_MAX} members, which is the most: use several groups"
                )
            described = self._described(group, state)
            self._check_kind(group, state, described, member, kind, assignor)
            known, seat = described.get(member.name), state.seats.get(member.name)
            if seat is not None and kind == state.kind == members.STREAM:  # not known here yet
                return state, seat.epoch
            epoch = state.number + 1
            wanted = {**described, member.name: member}
            is_same = known is not None and (known.topics, known.pattern) == (member.topics, member.pattern)
            after = replace(state, number=epoch)
            if not is_same or (state.kind, state.assignor) != (kind, assignor):
                there = self._with_topics_of(member)
                after = self._next(group, after, described, wanted, kind, assignor, there=there, is_sure=True)
            after = after.with_seat(member.name, Seat(epoch, after.seats[member.name].share))
            members.check_room_for_claims(group, after)
            describe = members.create_member if seat is None else members.describe_member
            kept = member if known is None else member._replace(unknown=known.unknown)
            return self.states.write(group, state, after, describe(group, kept)), epoch

        return self.states.change(group, change)

    def leave(self, group: str, name: str, epoch: int | None = None) -> None:
        """Remove a member; do nothing if it is not there, or has another epoch than the one given."""

        def change(state: GroupState) -> None:
            seat = state.seats.get(name)
            if seat is not None and epoch in (None, seat.epoch):
                self._remove(group, state, {name: ANY_VERSION})

        self.states.change(group, change)

    def lapse(self, group: str, ended: Mapping[str, Lapsed]) -> list[str]:
        """Remove those members who have these epochs and whose leases have these versions, because they were not
        renewed: at most `LAPSED_MAX` in one call. Returns whom."""

        def change(state: GroupState) -> list[str]:
            there = [name for name in ended if name in state.seats and state.seats[name].epoch == ended[name].epoch]
            names = there[:LAPSED_MAX]
            leases = members.read_leases(self._session, [(group, name) for name in names])
            late = {
                name: lease.version
                for name, lease in zip(names, leases, strict=True)
                if lease is not None and lease.version == ended[name].version
            }
            if late:
                self._remove(group, state, late)
            return list(late)

        lapsed = self.states.change(group, change, is_own=True)
        for name in lapsed:
            log.info("member_lapsed", group=group, member=name)
        return lapsed

    def _remove(self, group: str, state: GroupState, lease_versions: Mapping[str, int]) -> None:
        described = self._described(group, state)
        left = {name: member for name, member in described.items() if name not in lease_versions}
        deletes = [
            operation
            for name, version in lease_versions.items()
            for operation in members.delete_member(group, name, version)
        ]
        try:
            after = self._next(group, state, described, left, state.kind, state.assignor)
            members.check_room_for_claims(group, after)
            self.states.write(group, state, after, deletes)
        except GroupTooLarge:
            # Its topics have grown. With the partitions that it had, it gets smaller: else nobody could leave it.
            after = self._next(group, state, described, left, state.kind, state.assignor, there=state.topics)
            self.states.write(group, state, after, deletes)

    def refresh(self, group: str) -> None:
        """Make the next generation if the topics that the group reads have other partitions than it has."""

        def change(state: GroupState) -> None:
            described = self._described(group, state)
            after = self._next(group, state, described, described, state.kind, state.assignor, is_sure=True)
            if replace(after, generation=state.generation) == state:
                return
            try:
                members.check_room_for_claims(group, after)
            except GroupTooLarge:
                there = {
                    name: topic._replace(partitions=min(topic.partitions, known.partitions))
                    for name, topic in after.topics.items()
                    if (known := state.topics.get(name)) is not None
                }
                after = self._next(
                    group, state, described, described, state.kind, state.assignor, there=there, is_sure=True
                )
                if replace(after, generation=state.generation) == state:
                    raise
                # What has gone or was made anew, at least, without what has grown.
                members.check_room_for_claims(group, after)
            self.states.write(group, state, after)

        self.states.change(group, change, is_own=True)

    def is_current(self, state: GroupState, described: Mapping[str, Member]) -> bool:
        """Whether the topics that a group reads have the partitions that it has, as far as this broker knows. It may
        know less than the broker that made the generation, so only `refresh` is sure."""
        return _of_group(self._topics(), state, described) == state.topics

    # --- one change

    def _described(self, group: str, state: GroupState) -> dict[str, Member]:
        """The members of a state. Raises BadVersion: the group has another state by now."""
        found = self.states.described(group, state)
        if len(found) != len(state.seats):
            raise BadVersion
        return found

    @staticmethod
    def _check_kind(
        group: str, state: GroupState, described: Mapping[str, Member], member: Member, kind: str, assignor: str
    ) -> None:
        other = next((each for name, each in described.items() if name != member.name), None)
        if other is None:
            return
        if state.kind != kind:
            raise GroupKindDiffers(group=group, kind=state.kind, member=other.name, host=other.host, other=kind)
        if state.assignor != assignor:
            raise AssignorDiffers(group=group, assignor=state.assignor, other=assignor)

    def _next(
        self,
        group: str,
        state: GroupState,
        before: Mapping[str, Member],
        wanted: Mapping[str, Member],
        kind: str,
        assignor: str,
        *,
        there: Mapping[str, Topic] | None = None,
        is_sure: bool = False,
    ) -> GroupState:
        """The generation after a state, with these members instead of those before, of some topics instead of all.
        Commits the offsets of what is new to the group."""
        there = self._topics() if there is None else there
        after = replace(state, generation=state.generation + 1, kind=kind, assignor=assignor)
        seats = {name: state.seats.get(name, _NO_SEAT) for name in wanted}
        if kind != members.CONSUMER:
            return replace(after, seats={name: Seat(seat.epoch) for name, seat in seats.items()})
        if not wanted:
            return replace(after, seats={})
        # What the members had subscribed to before is looked at first: what is new to them is read from 0.
        readers = before if state.kind == members.CONSUMER else {}
        known = self._topics_of(there, state, readers, is_sure=is_sure)
        topics = self._topics_of(there, replace(state, topics=known), wanted, is_sure=is_sure)
        first_read = topics.keys() - known.keys()
        if first_read:  # but not those that something else than members has read: a stream, or who assigns partitions
            first_read -= set(groups.topics_of(self._session, group))
        self._begin_new(group, state, {name: topic for name, topic in topics.items() if name not in first_read})
        if is_sure:
            self._forget_gone(group, state, topics)
        assigned = ASSIGNORS[assignor](
            members.topics_read(wanted, topics),
            {name: topic.partitions for name, topic in topics.items()},
            {name: seat.share for name, seat in state.seats.items()},
        )
        return replace(
            after,
            seats={name: seat._replace(share=frozenset(assigned[name])) for name, seat in seats.items()},
            topics=topics,
        )

    def _topics_of(
        self, there: Mapping[str, Topic], state: GroupState, wanted: Mapping[str, Member], *, is_sure: bool
    ) -> dict[str, Topic]:
        """The topics that a group has read or that members read. This broker may know less than the one that made the
        last generation, or less of late: a topic keeps the partitions that it had, unless it was created again; it is
        gone only if that is sure, and new only if it is still there. One that is gone has no partitions."""
        doubtful: dict[str, Topic] = {}
        for name, known in state.topics.items():
            found = there.get(name, Topic(known.topic_id, 0))
            if found.topic_id != known.topic_id or found.partitions < known.partitions:
                doubtful[name] = known
        there = {name: topic for name, topic in there.items() if name not in doubtful}
        there |= self._ask(doubtful) if is_sure else doubtful
        topics = _of_group(there, state, wanted)
        new = {name: topic for name, topic in topics.items() if name not in state.topics}
        if new:
            topics = {name: topic for name, topic in topics.items() if name not in new} | self._ask(new)
        return topics

    def _topics(self) -> dict[str, Topic]:
        """All topics that this broker knows."""
        return {name: Topic(*each) for name, each in self._metadata.partition_counts.items()}

    def _with_topics_of(self, member: Member) -> dict[str, Topic]:
        """All topics as this broker knows them, but those to which a member subscribes as they are now: what is there
        before the first member is not new to the group."""
        names = registry.topic_names(self._session) if member.pattern else member.topics
        [subscribed] = members.topics_read({member.name: member}, names).values()
        known = self._topics()
        now = self._ask({name: known.pop(name, None) for name in subscribed})
        return known | now

    def _ask(self, known: Mapping[str, Topic | None]) -> dict[str, Topic]:
        """Those of these topics that exist, as ZooKeeper has them now; one that cannot be read is as it was known."""
        now: dict[str, Topic] = {}
        for name, found in registry.topics_now(self._session, known).items():
            topic = known[name] if isinstance(found, UnreadableZnode) else Topic(found.topic_id, len(found.replicas))
            if topic is not None:
                now[name] = topic
        return now

    def _begin_new(self, group: str, state: GroupState, topics: Mapping[str, Topic]) -> None:
        """Commit offset 0 for partitions that are new to a group, which reads these topics now."""
        new: dict[TopicPartition, groups.Offset] = {}
        for name, topic in topics.items():
            known = state.topics.get(name)
            first = known.partitions if known is not None and known.topic_id == topic.topic_id else 0
            for number in range(first, topic.partitions):
                new[TopicPartition(name, number)] = groups.Offset(0, topic.topic_id)
        if new:
            guards = self.states.guards(group, state)  # what is new to an old state may have offsets by now
            now_us = self._clock.now_us()
            groups.commit_offsets(self._session, group, new, now_us, guards, only_new=True, of_present_topics=True)

    def _forget_gone(self, group: str, state: GroupState, topics: Mapping[str, Topic]) -> None:
        """Delete a group's offsets of topics that were deleted, of which it has those now that are there."""
        there = {topic.topic_id for topic in topics.values() if topic.partitions}
        gone = {
            name: known.topic_id
            for name, known in state.topics.items()
            if known.partitions and known.topic_id not in there
        }
        if gone:
            with suppress(UnreadableZnode):  # what cannot be read stays, and holds up nobody
                found = groups.committed(self._session, group, gone, gone)
                groups.forget(self._session, group, {partition: each.topic_id for partition, each in found.items()})


_NO_SEAT = Seat(0)


def _of_group(topics: Mapping[str, Topic], state: GroupState, wanted: Mapping[str, Member]) -> dict[str, Topic]:
    """Those of some topics that a group has read, or to which members subscribe, by name. Those that are not there any
    more, and of which only the last are kept, come after the others, as they went."""
    there = {name: topic for name, topic in topics.items() if Topic(topic.topic_id, 0) != state.topics.get(name)}
    names = {name for read in members.topics_read(wanted, there).values() for name in read}
    listed = {name: there[name] for name in sorted(names | (state.topics.keys() & there.keys()))}
    gone = {name: Topic(topic.topic_id, 0) for name, topic in state.topics.items() if name not in there}
    by_time = sorted(gone, key=lambda name: state.topics[name].partitions > 0)
    return listed | {name: gone[name] for name in by_time[-GONE_MAX:]}
