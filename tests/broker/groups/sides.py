"""What a broker has for groups, without the rest of it: a session, what it knows of the topics, and the changes."""

from __future__ import annotations

import uuid
from dataclasses import replace

from broker.groups.claims import Claim, Claimant, claim
from broker.groups.membership import Groups, Lapsed
from broker.groups.states import States
from broker.replica.metadata import Metadata
from kafkalog.clock import Clock
from kafkalog.records import TopicPartition
from kafkalog.zk import groups, members, registry
from kafkalog.zk.members import CONSUMER, GroupState, Member
from kafkalog.zk.registry import TopicRecord
from kafkalog.zk.session import ZooKeeperSession


class Side:
    """A broker's side. It knows the topics as of its last `learn`."""

    def __init__(self, session: ZooKeeperSession, clock: Clock) -> None:
        self.session = session
        self.metadata = Metadata(session)
        self.states = States(session)
        self.groups = Groups(self.states, self.metadata, clock)

    # --- topics

    def learn(self) -> None:
        found = [registry.read_topic(self.session, name) for name in registry.topic_names(self.session)]
        self.metadata.publish({topic.name: topic for topic in found if topic is not None and not topic.deleted})

    def new_topic(self, name: str, partitions: int) -> bytes:
        topic = TopicRecord(name, uuid.uuid4().bytes, {}, [(0,)] * partitions, 0)
        registry.create_topic(self.session, topic)
        self.learn()
        return topic.topic_id

    def grow(self, name: str, partitions: int) -> None:
        topic = registry.read_topic(self.session, name)
        assert topic is not None
        assert registry.update_topic(self.session, replace(topic, replicas=[(0,)] * partitions))
        self.learn()

    def delete_topic(self, name: str) -> None:
        registry.delete_topic(self.session, name)
        self.learn()

    # --- the group g

    def join(
        self,
        name: str,
        *topics: str,
        pattern: str = "",
        instance_id: str = "",
        kind: str = CONSUMER,
        assignor: str = "sticky",
        group: str = "g",
    ) -> tuple[GroupState, int]:
        member = Member(name, topics, pattern, host=f"host of {name}", instance_id=instance_id)
        return self.groups.join(group, member, kind, assignor)

    def lapse(self, *names: str, version: int = 0) -> list[str]:
        """Remove members, in the epochs that they have, if their leases have this version. Returns whom."""
        seats = self.state().seats
        return self.groups.lapse("g", {name: Lapsed(seats[name].epoch, version) for name in names})

    def state(self, group: str = "g") -> GroupState:
        return members.read_state(self.session, group) or GroupState()

    def shares(self, group: str = "g") -> dict[str, list[TopicPartition]]:
        """What each member is to read, in the order in which they joined."""
        return shares_of(self.state(group))

    def claimant(self, name: str) -> Claimant:
        """A member of the group, in the epoch that it has."""
        return Claimant("g", name, self.state().seats[name].epoch)

    def claimed(self, name: str, *wanted: TopicPartition) -> dict[TopicPartition, Claim]:
        """What a member gets of partitions that it claims, in the group's generation."""
        return dict(claim(self.states, self.claimant(name), self.state().generation, wanted).claims)

    def owners(self) -> dict[TopicPartition, str]:
        return dict(self.state().owners)

    def committed(self) -> dict[TopicPartition, int]:
        found = groups.committed(self.session, "g", None)
        return {partition: each.offset for partition, each in found.items()}


def partitions(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def shares_of(state: GroupState) -> dict[str, list[TopicPartition]]:
    return {name: sorted(seat.share) for name, seat in state.seats.items()}
