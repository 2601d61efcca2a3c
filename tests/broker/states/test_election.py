"""What becomes of a partition's state: every state of three replicas, with every set of live brokers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from typing import NamedTuple

import pytest

from broker.states.election import depart, elect, first_state, join, leave, prefer
from kafkalog.zk.registry import PartitionState
from tests.model.replication import Model, State, World, Znode

ASSIGNMENT = (0, 1, 2)


def disks(brokers: Collection[int]) -> dict[int, str]:
    return {broker: f"disk-{broker}" for broker in brokers}


def subsets(of: Collection[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(sorted(of), size) for size in range(len(of) + 1))


def states() -> Iterator[PartitionState]:
    """Every state that may be: a leader is in sync, and who is in a set has a log, unless none was ever opened."""
    for roles in product(("in sync", "eligible", "out"), repeat=3):
        isr = tuple(broker for broker in ASSIGNMENT if roles[broker] == "in sync")
        eligible = tuple(broker for broker in ASSIGNMENT if roles[broker] == "eligible")
        for directories in {isr + eligible, ASSIGNMENT, () if len(isr) == 1 and not eligible else ASSIGNMENT}:
            for leader in (-1, *isr):
                yield PartitionState(leader, 7, isr, eligible, disks(directories), version=3)


class Case(NamedTuple):
    state: PartitionState
    live: Mapping[int, str]
    stopping: tuple[int, ...]
    unclean: bool
    min_insync: int

    def elected(self, state: PartitionState | None = None) -> PartitionState | None:
        state = self.state if state is None else state
        return elect(state, ASSIGNMENT, self.live, self.unclean, self.min_insync, self.stopping)


CASES = [
    Case(state, disks(live), stopping, unclean, min_insync)
    for state in states()
    for live in subsets(ASSIGNMENT)
    for stopping in subsets(live)
    for unclean in (False, True)
    for min_insync in (1, 2, 3)
]


def test_every_election() -> None:
    for case in CASES:
        state, live = case.state, case.live
        after = case.elected()
        assert after != state, "None says that nothing changes"
        after = after or state
        assert case.elected(after) is None, "it is done at once"
        assert after.leader_epoch == 7 + (after.leader != state.leader)
        assert (after.directories, after.version) == (state.directories, 3)
        can_lead = live.keys() - set(case.stopping)
        if state.leader in can_lead:
            assert after.leader == state.leader, "a leader that is well stays"
        if after.leader >= 0:
            assert after.leader in after.isr and after.leader in live
            assert after.leader in can_lead or after.leader == state.leader, "one that stops is not elected"
        assert set(after.isr) <= live.keys() or after.isr == state.isr
        assert not set(after.isr) & set(after.eligible)
        assert not after.eligible or len(after.isr) < case.min_insync
        up_to_date = {*state.isr, *(state.eligible if len(state.isr) < case.min_insync else ())}
        if up_to_date & can_lead and state.leader not in live:
            assert after.leader in up_to_date, "nobody else leads, and somebody does"
        nobody_has_all = case.unclean and not live.keys() & set(state.isr)
        if not state.directories or nobody_has_all:
            with_log = {each for each in can_lead if each in state.directories or not state.directories}
            assert after.leader >= 0 or not with_log
        else:
            assert after.leader in (-1, *up_to_date)
            if len(after.isr) < case.min_insync:
                assert up_to_date == {*after.isr, *after.eligible}, "who has every acknowledged record is kept in mind"


@pytest.mark.parametrize(
    ("state", "live", "stopping", "leads"),
    [
        (PartitionState(0, 7, (0, 2, 1)), (1, 2), (), 1),  # the order is that of the assignment
        (PartitionState(0, 7, (0,), (2, 1)), (1, 2), (), 1),
        (PartitionState(0, 7, (0, 2), (1,)), (1, 2), (), 2),  # in sync before eligible
        (PartitionState(0, 7, (0, 1)), (0, 1, 2), (0,), 1),
        (PartitionState(0, 7, (0,), (1,)), (0, 1), (0,), 0),  # nobody in sync takes over from one that stops
        (PartitionState(0, 7, (0,)), (1, 2), (), -1),
        (PartitionState(-1, 7, (0,)), (0, 1, 2), (), 0),
        (PartitionState(-1, 7, (), ()), (0, 1, 2), (), -1),
    ],
)
def test_who_is_elected(state: PartitionState, live: Sequence[int], stopping: Sequence[int], leads: int) -> None:
    state = replace(state, directories=disks(ASSIGNMENT))
    after = elect(state, ASSIGNMENT, disks(live), False, 3, stopping) or state
    assert after.leader == leads


def test_a_partition_whose_min_insync_was_lowered_has_nobody_eligible() -> None:
    """Its leader may have acknowledged since what the eligible ones do not have."""
    state = PartitionState(0, 7, (0,), (1,), disks((0, 1)))
    assert elect(state, ASSIGNMENT, disks((1,)), False, 2) == PartitionState(1, 8, (1,), (0,), disks((0, 1)))
    assert elect(state, ASSIGNMENT, disks((1,)), False, 1) == PartitionState(-1, 8, (0,), (), disks((0, 1)))
    assert elect(state, ASSIGNMENT, disks((0, 1)), False, 1) == replace(state, eligible=())


def test_an_unclean_leader_has_the_log_that_the_state_names() -> None:
    state = PartitionState(0, 7, (0,), (), disks(ASSIGNMENT))
    live = {1: "another disk", 2: "disk-2"}
    assert elect(state, ASSIGNMENT, live, True, 1) == replace(state, leader=2, leader_epoch=8, isr=(2,))
    assert elect(state, ASSIGNMENT, {1: "another disk"}, True, 1) == replace(state, leader=-1, leader_epoch=8)


def test_a_single_copy_is_never_elected_by_others() -> None:
    state = PartitionState.only(0, "disk-0")
    assert elect(state, (0,), disks((1, 2)), True, 1) is None
    assert first_state((0,), (1, 2)) is None


def test_another_leads_a_new_partition_whose_first_replica_is_dead() -> None:
    assert first_state(ASSIGNMENT, {0, 1}) is None
    assert first_state(ASSIGNMENT, {1, 2}) == PartitionState(1, 0, (1,))
    assert first_state(ASSIGNMENT, ()) is None


def test_every_preferred_leader() -> None:
    for state in states():
        for live in subsets(ASSIGNMENT):
            after = prefer(state, ASSIGNMENT, live)
            may = state.leader > 0 and 0 in state.isr and 0 in live
            assert after == (replace(state, leader=0, leader_epoch=8) if may else None)


def test_every_departure() -> None:
    for state in states():
        for broker in ASSIGNMENT:
            after = depart(state, broker)
            assert after != state
            after = after or state
            assert depart(after, broker) is None
            assert set(after.isr) == set(state.isr) - {broker} and set(after.eligible) == set(state.eligible) - {broker}
            led = state.leader == broker
            assert (after.leader, after.leader_epoch) == ((-1, 8) if led else (state.leader, 7))
            assert after.directories == state.directories, "a lost log stays known as lost"


def test_who_joins_has_its_directory_in_the_state() -> None:
    state = PartitionState(0, 7, (0,), (1, 2), {0: "disk-0", 1: "old"})
    assert join(state, 1, "new", 3) == PartitionState(0, 7, (0, 1), (2,), {0: "disk-0", 1: "new"})
    assert join(state, 1, "new", 2) == PartitionState(0, 7, (0, 1), (), {0: "disk-0", 1: "new"})
    assert join(state, 0, "moved", 3) == replace(state, directories={0: "moved", 1: "old"})


def test_the_leader_does_not_leave() -> None:
    with pytest.raises(AssertionError, match="the leader does not leave the set"):
        leave(PartitionState(0, 7, (0, 1)), (0,), 1)


@pytest.mark.parametrize("min_insync", [1, 2, 3])
def test_the_sets_change_as_in_the_model(min_insync: int) -> None:
    model = Model(World(min_insync=min_insync))
    compared = 0

    def assert_same(after: PartitionState, modelled: Znode) -> None:
        nonlocal compared
        compared += 1
        found = (after.leader, after.leader_epoch, frozenset(after.isr), frozenset(after.eligible))
        assert found == modelled[:4]

    for state in states():
        if len(state.isr) >= min_insync and state.eligible:
            continue  # which the model does not reach
        if state.leader < 0 or not state.directories:
            continue
        znode = Znode(state.leader, 7, frozenset(state.isr), frozenset(state.eligible), 3, frozenset(ASSIGNMENT))
        for broker in set(ASSIGNMENT) - {state.leader}:
            if broker in state.isr:
                left = leave(state, (broker,), min_insync)
                assert_same(left, model._with_set(znode, znode.insync - {broker}, state.leader))
            else:
                joined = join(state, broker, f"disk-{broker}", min_insync)
                assert_same(joined, model._with_set(znode, znode.insync | {broker}, state.leader))
        live = set(ASSIGNMENT) - {state.leader}
        after = elect(state, ASSIGNMENT, disks(live), False, min_insync)
        assert after is not None
        if after.leader >= 0 and len(after.isr) == len(state.isr) - 1:
            assert_same(after, model._led_by(_state_of(model, znode), after.leader, frozenset(after.isr)).znode)
    assert compared > 20


def _state_of(model: Model, znode: Znode) -> State:
    return model.start()._replace(znode=znode)
