"""Which brokers get the replicas of partitions that are new, or are moved. Does no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kafkalog.errors import InvalidReplicationFactor, NoBrokers, TooFewBrokers


def place_replicas(
    brokers: Mapping[int, str],
    led: Mapping[int, int],
    hosted: Mapping[int, int],
    partitions: int,
    replication_factor: int,
) -> list[tuple[int, ...]]:
    """Choose brokers for new partitions of a topic. As Kafka's AdminUtils.assignReplicasToBrokers, but it begins with
    the brokers that have least, not with a random one.

    Leaders go round robin over the brokers, so that a topic is spread even if a broker is new and empty. The replicas
    of a partition are on different brokers, and on as many racks as there are. Followers are spread as evenly as the
    racks allow, and so are those of the partitions that one broker leads: if it fails, all others take over some.

    Args:
        brokers: rack by id of each live broker; a broker without a rack ("") counts as a rack of its own.
        led: number of partitions whose first replica is on a broker, by broker id.
        hosted: number of replicas by broker id.
        partitions: number of partitions to place.
        replication_factor: replicas of each partition, at least 1.

    Returns:
        The replicas of each new partition; the first one is the preferred leader.

    Raises:
        NoBrokers: there is no live broker.
        InvalidReplicationFactor: there are fewer live brokers than replicas of a partition.
    """
    if not brokers:
        raise NoBrokers()
    if replication_factor > len(brokers):
        raise InvalidReplicationFactor(replication_factor=replication_factor, brokers=len(brokers))
    order = sorted(brokers, key=lambda broker: (led.get(broker, 0), hosted.get(broker, 0), broker))
    following: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()  # a leader and one of its followers
    heirs: Counter[tuple[int, int]] = Counter()  # a leader and its first follower, which leads after it
    placed = []
    for number in range(partitions):
        start = number % len(order)
        leader, ring = order[start], order[start + 1 :] + order[:start]
        followers: list[int] = []
        while len(followers) < replication_factor - 1:
            racks = Counter(brokers[broker] for broker in (leader, *followers) if brokers[broker])
            rest = [broker for broker in ring if broker not in followers]
            least = [(racks[brokers[broker]], following[broker], pairs[leader, broker]) for broker in rest]
            followers.append(rest[least.index(min(least))])
        for follower in followers:
            following[follower] += 1
            pairs[leader, follower] += 1
        followers.sort(key=lambda broker: heirs[leader, broker])
        if followers:
            heirs[leader, followers[0]] += 1
        placed.append((leader, *followers))
    return placed


def move_replicas(
    labels: Sequence[str],
    current: Sequence[tuple[int, ...]],
    racks: Mapping[int, str],
    allowed: Collection[int],
    hosted: Mapping[int, int],
    factors: Sequence[int],
    led: Mapping[int, int],
    is_spread: bool,
    leaving: Collection[int] = (),
) -> list[tuple[int, ...]]:
    """Choose the brokers of partitions that are moved, with as few copies as possible. Replicas that stay keep their
    order. A broker that takes a leaving one's replica takes its place too. It becomes the preferred leader only if it
    is that of fewer partitions than the one that would be otherwise.

    Args:
        labels: the name of each partition, for an error.
        current: the replicas of each partition.
        racks: rack by id of each live broker; "": a rack of its own.
        allowed: those of them that may get replicas.
        hosted: number of replicas by broker id, in the whole cluster.
        factors: how many replicas each partition is to have.
        led: number of partitions whose first replica is on a broker, by broker id, in the whole cluster.
        is_spread: whether these partitions end on the allowed brokers alone, as evenly as that goes. Otherwise a
            replica stays where it is.
        leaving: brokers that keep none.

    Raises:
        TooFewBrokers: there are fewer brokers than replicas of a partition.
    """
    targets = [
        [broker for broker in replicas if broker not in leaving and (broker in allowed or not is_spread)]
        for replicas in current
    ]
    for label, target, factor in zip(labels, targets, factors, strict=True):
        there = len({*target, *allowed})
        if factor > there:
            raise TooFewBrokers(partition=label, replication_factor=factor, brokers=there)
    # How many replicas a broker has: of these partitions if they are spread, else of all.
    loads = Counter(broker for target in targets for broker in target) if is_spread else Counter(hosted)
    for target, factor in zip(targets, factors, strict=True):
        while len(target) > factor:
            others = target[1:] if target[0] in racks else target  # its preferred leader stays
            _take(
                target,
                max(others, key=lambda each: (each not in racks, _beside(target, racks, each), loads[each], each)),
                loads,
            )
    if is_spread:
        _release(targets, factors, {broker: racks[broker] for broker in allowed}, loads)
    most = -(-sum(factors) // len(allowed)) if is_spread else math.inf
    leads = Counter(led)
    for replicas, target, factor in zip(current, targets, factors, strict=True):
        vacated = [place for place, broker in enumerate(replicas) if broker in leaving]
        while len(target) < factor:
            least = min(
                (broker for broker in sorted(allowed) if broker not in target),
                key=lambda each: (_beside(target, racks, each), loads[each] >= most, loads[each], hosted.get(each, 0)),
            )
            place = vacated.pop(0) if vacated else len(target)
            target.insert(len(target) if place == 0 and target and leads[target[0]] <= leads[least] else place, least)
            loads[least] += 1
        if replicas[0] in leaving:
            leads[target[0]] += 1
    return _led_evenly(targets, allowed) if is_spread else [tuple(target) for target in targets]


def _beside(target: Sequence[int], racks: Mapping[int, str], broker: int) -> int:
    """How many replicas of a partition are on other brokers of a broker's rack."""
    rack = racks.get(broker)
    return sum(racks.get(each) == rack for each in target if each != broker) if rack else 0


def _take(target: list[int], broker: int, loads: Counter[int]) -> None:
    target.remove(broker)
    loads[broker] -= 1


def _release(
    targets: Sequence[list[int]], factors: Sequence[int], racks: Mapping[int, str], loads: Counter[int]
) -> None:
    """Take replicas from where they are too many: on one rack, or on one broker."""
    racks_there = len({rack or broker for broker, rack in racks.items()})
    for target, factor in zip(targets, factors, strict=True):
        for broker in reversed(list(target)):
            if 1 + _beside(target, racks, broker) > -(-factor // racks_there):
                _take(target, broker, loads)
    least, rest = divmod(sum(factors), len(racks))
    by_load = sorted(racks, key=lambda broker: -loads[broker])
    quotas = {broker: least + (place < rest) for place, broker in enumerate(by_load)}
    for _ in range(max(factors, default=0)):  # one of a partition at a time: a new broker takes one of each at most
        for target in reversed(targets):
            fullest = max(target, key=lambda broker: (loads[broker] - quotas[broker], broker), default=None)
            if fullest is not None and loads[fullest] > quotas[fullest]:
                _take(target, fullest, loads)


def _led_evenly(targets: Sequence[list[int]], brokers: Collection[int]) -> list[tuple[int, ...]]:
    """The targets, each with a preferred leader in front, so that all brokers lead about as many."""
    most = -(-len(targets) // len(brokers))
    leads: Counter[int] = Counter()
    led = []
    for target in targets:
        leader = target[0] if leads[target[0]] < most else min(target, key=lambda broker: leads[broker])
        leads[leader] += 1
        led.append((leader, *(broker for broker in target if broker != leader)))
    return led
