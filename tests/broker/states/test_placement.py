"""Where the replicas of new partitions go, and those of partitions that are moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

from broker.states.placement import move_replicas, place_replicas
from kafkalog.errors import InvalidReplicationFactor, NoBrokers, TooFewBrokers


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
    sentence = "^replication factor 3 is larger than the number of live brokers, 2: "
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


# --- moves


def moved(
    current: Sequence[tuple[int, ...]],
    racks: Mapping[int, str],
    factor: int | None = None,
    *,
    allowed: Sequence[int] | None = None,
    cluster: Sequence[tuple[int, ...]] | None = None,
    is_spread: bool = False,
    leaving: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    cluster = current if cluster is None else cluster
    hosted = Counter(broker for replicas in cluster for broker in replicas)
    led = Counter(replicas[0] for replicas in cluster)
    factors = [len(replicas) if factor is None else factor for replicas in current]
    allowed = [broker for broker in racks if broker not in leaving] if allowed is None else allowed
    labels = [f"t-{number}" for number in range(len(current))]
    found = move_replicas(labels, current, racks, allowed, hosted, factors, led, is_spread=is_spread, leaving=leaving)
    assert all(len(set(replicas)) == size for replicas, size in zip(found, factors, strict=True))
    return found


def copies(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> int:
    """How many replicas are made."""
    return sum(len(set(there) - set(here)) for here, there in zip(before, after, strict=True))


def test_what_leaves_a_broker_goes_to_those_that_have_least_and_nothing_else_moves() -> None:
    before = place_replicas(without_racks(4), {}, {}, 12, 3)
    brokers = {0: "", 1: "", 3: "", 4: ""}
    after = moved(before, brokers, leaving=[2])
    for here, there in zip(before, after, strict=True):
        assert [broker for broker in there if broker in here] == [broker for broker in here if broker != 2]
    assert copies(before, after) == sum(2 in replicas for replicas in before)
    assert Counter(broker for replicas in after for broker in replicas)[4] == copies(before, after), "it was empty"


@pytest.mark.parametrize(
    ("count", "partitions", "factor", "new"),
    [(4, 12, 3, 1), (5, 30, 3, 1), (4, 12, 2, 0), (6, 60, 2, 0), (3, 12, 1, 1)],
)
def test_who_takes_over_from_a_broker_leads_its_share(count: int, partitions: int, factor: int, new: int) -> None:
    before = place_replicas(without_racks(count), {}, {}, partitions, factor)
    for left in range(count):
        brokers = {broker: "" for broker in range(count + new) if broker != left}
        after = moved([each for each in before if left in each], brokers, cluster=before, leaving=[left])
        after += [each for each in before if left not in each]
        assert spread(brokers, [replicas[0] for replicas in after]) <= 1


def test_a_replica_takes_the_place_of_the_one_that_left_but_leads_no_more_than_others() -> None:
    brokers = dict.fromkeys([1, 3, 4], "")
    assert moved([(2, 1, 3)], brokers, cluster=[(1,)], leaving=[2]) == [(4, 1, 3)]
    assert moved([(2, 1, 3)], brokers, cluster=[(4,)], leaving=[2]) == [(1, 3, 4)]
    assert moved([(1, 2, 3)], brokers, cluster=[(4,)], leaving=[2]) == [(1, 4, 3)]
    many = moved([(2, 1, 3)] * 6, brokers, leaving=[2])
    assert Counter(replicas[0] for replicas in many) == {1: 3, 4: 3}, "each counts for those after it"


def test_a_topic_is_spread_over_more_brokers_with_as_few_copies_as_possible() -> None:
    before = [(0,)] * 6
    after = moved(before, without_racks(3), is_spread=True)
    assert Counter(replicas[0] for replicas in after) == {0: 2, 1: 2, 2: 2}
    assert copies(before, after) == 4
    assert moved(after, without_racks(3), is_spread=True) == after, "nothing is left to do"
    wide = moved(place_replicas(without_racks(3), {}, {}, 12, 2), without_racks(4), is_spread=True)
    assert spread(range(4), [broker for replicas in wide for broker in replicas]) <= 1
    assert spread(range(4), [replicas[0] for replicas in wide]) <= 1
    assert copies(place_replicas(without_racks(3), {}, {}, 12, 2), wide) == 6


@pytest.mark.parametrize(("racks", "factor"), [("aabb", 2), ("aabbcc", 3), ("aabb", 3), ("ab", 2)])
def test_moved_replicas_are_on_as_many_racks_as_there_are(racks: str, factor: int) -> None:
    brokers = dict(enumerate(racks))
    for before in ([(0,)] * 8, [tuple(range(factor))] * 8):
        after = moved(before, brokers, factor, is_spread=True)
        for replicas in after:
            assert len({brokers[broker] for broker in replicas}) == min(factor, len(set(racks)))
        assert spread(brokers, [broker for replicas in after for broker in replicas]) <= 2
    grown = moved([(0,), (3,), (1,)][: len(racks)][:1] * 4, brokers, factor)
    assert all(len({brokers[broker] for broker in each}) == min(factor, len(set(racks))) for each in grown)


def test_more_and_fewer_copies_keep_the_preferred_leader_and_what_is_live() -> None:
    assert moved([(2,)], without_racks(3), 3) == [(2, 0, 1)]
    assert moved([(2, 0, 1)], without_racks(3), 1) == [(2,)]
    assert moved([(2, 0, 1)], {0: "", 1: ""}, 2) == [(0, 1)], "broker 2 is away"
    assert moved([(2, 0)], {0: "", 1: ""}, 2) == [(2, 0)], "a broker that is away may come back"


def test_a_replica_that_moves_avoids_the_racks_of_those_that_stay() -> None:
    racks = {0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c"}
    assert moved([(0, 1, 2)], racks, allowed=[3, 4, 5], leaving=[2]) == [(0, 1, 5)]
    assert moved([(0, 1, 2)], racks, allowed=[3, 4], leaving=[2]) == [(0, 1, 3)]
    assert moved([(0, 3, 1)], racks, 2) == [(0, 1)], "brokers 0 and 3 share a rack"


def test_too_few_brokers_are_refused_with_the_partition_both_numbers_and_what_to_do() -> None:
    sentence = (
        "^t-1 with 3 replicas needs as many brokers, and only 2 may be used: start another broker, name more, or give "
        "a replication factor of at most 2$"
    )
    with pytest.raises(TooFewBrokers, match=sentence):
        moved([(0,), (0, 1, 2)], without_racks(3), leaving=[2])
    with pytest.raises(TooFewBrokers):
        moved([(0, 1)], without_racks(2), 3)
