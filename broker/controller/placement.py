"""Which brokers get the replicas of new partitions. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kafkalog.errors import InvalidReplicationFactor, NoBrokers


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
