"""Where the replicas of new partitions go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

from broker.controller.placement import place_replicas
from kafkalog.errors import InvalidReplicationFactor, NoBrokers


def without_racks(count: int) -> dict[int, str]:
    return dict.fromkeys(range(count), "")


def spread(brokers: Iterable[int], places: Iterable[int]) -> int:
    """By how many the broker with most of some places has more than the one with fewest."""
    counts = Counter(places)
    return max(counts[broker] for broker in brokers) - min(counts[broker] for broker in brokers)


def followers(placed: Sequence[tuple[int, ...]]) -> list[int]:
    return [broker for replicas in placed for broker in replicas[1:]]


def test_leaders_go_round_robin_beginning_with_the_broker_that_leads_fewest() -> None:
    assert place_replicas(without_racks(3), {}, {}, 4, 1) == [(0,), (1,), (2,), (0,)]
    assert place_replicas(without_racks(3), {0: 5, 1: 2, 2: 3}, {}, 4, 1) == [(1,), (2,), (0,), (1,)]
    assert place_replicas(without_racks(3), {0: 1, 1: 1, 2: 1}, {0: 2, 1: 3, 2: 1}, 2, 1) == [(2,), (0,)]
    assert place_replicas(without_racks(1), {}, {}, 0, 1) == []


def test_a_factor_above_the_live_brokers_is_refused_with_both_numbers() -> None:
    sentence = "^replication factor 3 is larger than the number of live brokers, 2$"
    with pytest.raises(InvalidReplicationFactor, match=sentence):
        place_replicas(without_racks(2), {}, {}, 1, 3)
    with pytest.raises(NoBrokers):
        place_replicas({}, {}, {}, 1, 1)


@pytest.mark.parametrize("count", range(1, 7))
def test_leaders_and_followers_are_spread_evenly(count: int) -> None:
    brokers = without_racks(count)
    for factor in range(1, count + 1):
        for partitions in (1, count, 2 * count + 1, 30):
            placed = place_replicas(brokers, {}, {}, partitions, factor)
            assert all(len(set(replicas)) == factor for replicas in placed)
            assert spread(brokers, (replicas[0] for replicas in placed)) <= 1
            assert spread(brokers, followers(placed)) <= 2
            assert spread(brokers, (broker for replicas in placed for broker in replicas)) <= 2


@pytest.mark.parametrize(("count", "factor"), [(4, 2), (4, 3), (5, 3), (6, 2)])
def test_if_one_broker_fails_each_other_one_takes_over_some_of_its_partitions(count: int, factor: int) -> None:
    placed = place_replicas(without_racks(count), {}, {}, 60, factor)
    for failed in range(count):
        heirs = Counter(replicas[1] for replicas in placed if replicas[0] == failed)
        assert heirs.keys() == set(range(count)) - {failed}
        assert max(heirs.values()) <= 2 * min(heirs.values())


def test_one_partition_topics_are_led_by_different_brokers() -> None:
    led, hosted, leaders = Counter[int](), Counter[int](), []
    for _ in range(6):
        [replicas] = place_replicas(without_racks(3), led, hosted, 1, 3)
        leaders.append(replicas[0])
        led[replicas[0]] += 1
        hosted.update(replicas)
    assert leaders == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("racks", ["aab", "aabb", "aaab", "aabbcc", "abc", "aaabbc"])
def test_replicas_are_on_as_many_racks_as_there_are(racks: str) -> None:
    brokers: Mapping[int, str] = dict(enumerate(racks))
    for factor in range(1, len(racks) + 1):
        placed = place_replicas(brokers, {}, {}, 30, factor)
        for replicas in placed:
            per_rack = Counter(brokers[broker] for broker in replicas)
            assert len(per_rack) == min(factor, len(set(racks)))
            assert len(set(replicas)) == factor
        assert spread(brokers, (replicas[0] for replicas in placed)) <= 1
    if racks in ("aabb", "aabbcc"):
        assert spread(brokers, followers(place_replicas(brokers, {}, {}, 60, 2))) <= 1


def test_brokers_without_a_rack_are_not_taken_to_share_one() -> None:
    brokers = {0: "a", 1: "", 2: "", 3: "a"}
    for replicas in place_replicas(brokers, {}, {}, 20, 3):
        assert {1, 2} < set(replicas)
