"""Assignors: every partition has one member, as evenly as can be, and `sticky` moves what it must."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.assignors import ASSIGNORS, Assignment, range_, round_robin, sticky
from kafkalog.records import TopicPartition

_TOPICS = ("a", "b", "c")
_groups = st.dictionaries(st.sampled_from("mnopq"), st.sets(st.sampled_from(_TOPICS)), min_size=1, max_size=4)
_partitions = st.dictionaries(st.sampled_from(_TOPICS), st.integers(0, 4))


def on(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def sizes(assigned: Assignment) -> list[int]:
    return sorted(map(len, assigned.values()))


def test_range_is_the_papers_the_first_get_one_more() -> None:
    assert range_({"n": "t", "m": "t", "o": "t"}, {"t": 8, "u": 3}, {}) == {
        "m": on("t", 0, 1, 2), "n": on("t", 3, 4, 5), "o": on("t", 6, 7)
    }  # fmt: skip
    assert range_({"m": "ab", "n": "ab"}, {"a": 3, "b": 1}, {}) == {"m": on("a", 0, 1) + on("b", 0), "n": on("a", 2)}


def test_round_robin_goes_on_with_the_next_member_at_the_next_topic() -> None:
    dealt = round_robin({"m": "ab", "n": "ab", "o": "b"}, {"a": 3, "b": 3}, {})
    assert dealt == {"m": on("a", 0, 2) + on("b", 2), "n": on("a", 1) + on("b", 0), "o": on("b", 1)}


def test_sticky_moves_to_a_newcomer_what_it_lacks_and_nothing_else() -> None:
    before = {"m": on("t", 0, 1, 2, 3), "n": on("t", 4, 5, 6)}
    after = sticky({"m": "t", "n": "t", "o": "t"}, {"t": 7}, before)
    assert sizes(after) == [2, 2, 3]
    assert set(after["n"]) <= set(before["n"]) and set(after["m"]) <= set(before["m"])


def test_sticky_gives_what_one_leaves_to_those_that_stay_and_moves_nothing_else() -> None:
    before = {"m": on("t", 0, 3), "n": on("t", 1, 4), "o": on("t", 2, 5)}
    after = sticky({"m": "t", "o": "t"}, {"t": 6}, before)
    assert set(before["m"]) < set(after["m"]) and set(before["o"]) < set(after["o"])
    assert sizes(after) == [3, 3]


def test_sticky_evens_out_over_a_member_between() -> None:
    """The first may hand nothing to the last, but to one that may."""
    before = {"m": on("a", 0, 1, 2), "n": on("b", 0, 1), "o": []}
    after = sticky({"m": "a", "n": "ab", "o": "b"}, {"a": 3, "b": 2}, before)
    assert sizes(after) == [1, 2, 2]


@pytest.mark.parametrize("name", ASSIGNORS)
@given(subscriptions=_groups, partitions=_partitions, data=st.data())
def test_each_partition_has_one_member_that_subscribes_to_it(
    name: str, subscriptions: dict[str, set[str]], partitions: dict[str, int], data: st.DataObject
) -> None:
    before = data.draw(_befores())
    assigned = ASSIGNORS[name](subscriptions, partitions, before)
    assert assigned.keys() == subscriptions.keys()
    assert all(listed == sorted(listed) for listed in assigned.values())
    assert sorted(itertools.chain(*assigned.values())) == sorted(_wanted(subscriptions, partitions))
    for member, listed in assigned.items():
        assert {partition.topic for partition in listed} <= subscriptions[member]
    assert assigned == ASSIGNORS[name](dict(reversed(subscriptions.items())), partitions, before), "of the same view"


@st.composite
def _befores(draw: st.DrawFn) -> dict[str, list[TopicPartition]]:
    """Also with partitions and members that are gone, and with a partition at two members."""
    numbers = st.lists(st.builds(TopicPartition, st.sampled_from(_TOPICS), st.integers(0, 5)), unique=True, max_size=6)
    return draw(st.dictionaries(st.sampled_from("mnopqr"), numbers))


def _wanted(subscriptions: Mapping[str, Collection[str]], partitions: Mapping[str, int]) -> list[TopicPartition]:
    read = set().union(*subscriptions.values())
    return [
        TopicPartition(topic, number) for topic in partitions if topic in read for number in range(partitions[topic])
    ]


@given(
    subscriptions=_groups, partitions=st.dictionaries(st.sampled_from(_TOPICS), st.integers(0, 2)), before=_befores()
)
def test_no_assignment_is_more_even_than_the_sticky_one(
    subscriptions: dict[str, set[str]], partitions: dict[str, int], before: dict[str, list[TopicPartition]]
) -> None:
    wanted = _wanted(subscriptions, partitions)
    able = [[member for member, topics in subscriptions.items() if each.topic in topics] for each in wanted]
    best = min(sum(chosen.count(member) ** 2 for member in subscriptions) for chosen in itertools.product(*able))
    assert sum(size**2 for size in sizes(sticky(subscriptions, partitions, before))) == best


@given(members=st.integers(1, 6), left=st.integers(0, 3), joined=st.integers(0, 3), count=st.integers(0, 40))
def test_sticky_moves_the_fewest_where_all_subscribe_to_the_same(
    members: int, left: int, joined: int, count: int
) -> None:
    names = [f"m{number}" for number in range(members + joined)]
    first = sticky(dict.fromkeys(names[:members], "t"), {"t": count}, {})
    stay = dict.fromkeys(names[min(left, members - 1) :], "t")
    after = sticky(stay, {"t": count}, first)
    kept = sum(len(set(first.get(member, ())) & set(after[member])) for member in stay)
    each, more = divmod(count, len(stay))
    quotas = [each + (place < more) for place in range(len(stay))]
    most_kept = sum(map(min, sorted((len(first.get(member, ())) for member in stay), reverse=True), quotas))
    assert kept == most_kept
    assert max(sizes(after)) - min(sizes(after)) <= 1


def test_a_thousand_partitions_take_no_time() -> None:
    members = {f"m{number:02}": ("t",) for number in range(10)}
    began = time.process_time()
    one = sticky({"m00": ("t",)}, {"t": 900}, {})
    many = sticky(members, {"t": 900}, one)
    assert sizes(many) == [90] * 10
    assert time.process_time() - began < 2


def test_hundreds_of_members_take_no_time() -> None:
    """While a broker computes the shares of one group, it answers nobody."""
    members = {f"m{number:03}": ("t",) for number in range(400)}
    settled = round_robin(members, {"t": 900}, {})
    began = time.process_time()
    assert sticky(members, {"t": 900}, settled) == settled
    settled_seconds = time.process_time() - began
    joined = sticky({**members, "new": ("t",)}, {"t": 900}, settled)
    assert len(joined["new"]) == 2
    assert settled_seconds < 0.1 and time.process_time() - began < 0.6
