"""Who of a group reads which partitions: pure functions of members, partitions and the assignment before.

`range` is the paper's (section 3.2, Algorithm 1): the sorted partitions of each topic in as many ranges as there are
members, so that the first ones get one more. `round_robin` deals the sorted partitions of all topics to the members in
turn. `sticky` (KIP-54) is as even as the subscriptions allow, and moves only what makes it so. Each partition of a
subscribed topic gets exactly one member. Knows no ZooKeeper and no offsets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from itertools import cycle

from kafkalog.records import TopicPartition

Assignment = dict[str, list[TopicPartition]]
"""The partitions of each member, sorted; of every member, also if it gets none."""
Assignor = Callable[
    [Mapping[str, Collection[str]], Mapping[str, int], Mapping[str, Collection[TopicPartition]]], Assignment
]
"""(topics by member, number of partitions by topic, assignment before) -> assignment."""


def range_(
    subscriptions: Mapping[str, Collection[str]],
    partitions: Mapping[str, int],
    before: Mapping[str, Collection[TopicPartition]],
) -> Assignment:
    """Consecutive partitions of each topic to each of its members; the first ones get one more."""
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    for topic, members in _members_by_topic(subscriptions, partitions).items():
        each, more = divmod(partitions[topic], len(members))
        start = 0
        for place, member in enumerate(members):
            end = start + each + (place < more)
            assigned[member] += [TopicPartition(topic, number) for number in range(start, end)]
            start = end
    return assigned


def round_robin(
    subscriptions: Mapping[str, Collection[str]],
    partitions: Mapping[str, int],
    before: Mapping[str, Collection[TopicPartition]],
) -> Assignment:
    """The sorted partitions of all topics, each to the next member that subscribes to its topic."""
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    by_topic = _members_by_topic(subscriptions, partitions)
    turns = cycle(assigned)
    for topic, members in by_topic.items():
        for number in range(partitions[topic]):
            member = next(each for each in turns if each in members)
            assigned[member].append(TopicPartition(topic, number))
    return assigned


def sticky(
    subscriptions: Mapping[str, Collection[str]],
    partitions: Mapping[str, int],
    before: Mapping[str, Collection[TopicPartition]],
) -> Assignment:
    """Leave partitions where they are, and move only what makes the shares even."""
    by_topic = _members_by_topic(subscriptions, partitions)
    shares = {member: _Share() for member in sorted(subscriptions)}
    taken: set[TopicPartition] = set()
    for member, share in shares.items():
        for partition in sorted(before.get(member, ())):
            wanted = partition.partition < partitions.get(partition.topic, 0)
            if wanted and partition.topic in subscriptions[member] and partition not in taken:
                share.add(partition)
                taken.add(partition)
    for topic, members in sorted(by_topic.items(), key=lambda item: (len(item[1]), item[0])):
        for number in range(partitions[topic]):
            if (partition := TopicPartition(topic, number)) not in taken:
                min((shares[member] for member in members), key=len).add(partition)
    while path := _path_to_less(shares, by_topic):
        for giver, topic, taker in reversed(path):
            shares[taker].add(shares[giver].give(topic))
    return {member: sorted(share.partitions()) for member, share in shares.items()}


ASSIGNORS: dict[str, Assignor] = {"sticky": sticky, "range": range_, "roundrobin": round_robin}
"""By the names of `partition.assignment.strategy`."""


class _Share:
    """A member's partitions."""

    def __init__(self) -> None:
        self._by_topic: dict[str, list[TopicPartition]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def topics(self) -> list[str]:
        return [topic for topic, listed in self._by_topic.items() if listed]

    def add(self, partition: TopicPartition) -> None:
        self._by_topic.setdefault(partition.topic, []).append(partition)
        self._count += 1

    def give(self, topic: str) -> TopicPartition:
        """The partition of a topic that came last: one that did not stay here goes before one that did."""
        self._count -= 1
        return self._by_topic[topic].pop()

    def partitions(self) -> list[TopicPartition]:
        return [partition for listed in self._by_topic.values() for partition in listed]


def _path_to_less(shares: Mapping[str, _Share], by_topic: Mapping[str, list[str]]) -> list[tuple[str, str, str]]:
    """A way (giver, topic, taker) ... on which each giver hands one partition to its taker: from the member with the
    most to the one with the fewest that it can reach, which has at least two fewer. Empty if no member has such a way:
    then no other assignment is more even."""
    fewest = min(map(len, shares.values()), default=0)
    for member in sorted(shares, key=lambda each: -len(shares[each])):
        if len(shares[member]) - fewest < 2:
            break
        came = _reached(member, shares, by_topic, fewest)
        least = min(came, key=lambda each: len(shares[each]), default=member)
        if len(shares[least]) <= len(shares[member]) - 2:
            return _way_back(least, member, came)
    return []


def _reached(
    member: str, shares: Mapping[str, _Share], by_topic: Mapping[str, list[str]], fewest: int
) -> dict[str, tuple[str, str]]:
    """How members are reached from a member, breadth first: (giver, topic) by taker, up to one that has the fewest."""
    came: dict[str, tuple[str, str]] = {}
    waiting, handed = deque([member]), set[str]()
    while waiting:
        giver = waiting.popleft()
        for topic in shares[giver].topics():
            if topic in handed:
                continue
            handed.add(topic)  # another giver of it reaches nobody else
            for taker in by_topic[topic]:
                if taker != member and taker not in came:
                    came[taker] = giver, topic
                    if len(shares[taker]) == fewest:
                        return came
                    waiting.append(taker)
    return came


def _way_back(taker: str, member: str, came: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    path: list[tuple[str, str, str]] = []
    while taker != member:
        giver, topic = came[taker]
        path.append((giver, topic, taker))
        taker = giver
    return path[::-1]


def _members_by_topic(
    subscriptions: Mapping[str, Collection[str]], partitions: Mapping[str, int]
) -> dict[str, list[str]]:
    """The members of each topic that exists and that any subscribes to; both sorted."""
    members: dict[str, list[str]] = {}
    for member, topics in sorted(subscriptions.items()):
        for topic in topics:
            if topic in partitions:
                members.setdefault(topic, []).append(member)
    return dict(sorted(members.items()))
