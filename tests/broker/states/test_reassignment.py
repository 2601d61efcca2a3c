"""What becomes of a state when its replicas are moved: every small state, and what is never lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, permutations, product

from broker.states.election import elect
from broker.states.reassignment import begin, cancel, finish
from kafkalog.zk.registry import PartitionState

BROKERS = (0, 1, 2, 3)
DISKS = {broker: f"disk-{broker}" for broker in BROKERS}


def subsets(of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(of, size) for size in range(len(of) + 1))


def moving_states() -> Iterator[PartitionState]:
    """From brokers 0 and 1, to any others, with any of them in sync and any leading."""
    for target in chain.from_iterable(permutations(BROKERS, size) for size in (1, 2)):
        held = tuple({0: 0, 1: 0} | dict.fromkeys(target, 0))
        for isr in subsets(held):
            for leader in (-1, *isr):
                yield PartitionState(leader, 7, isr, (), {each: DISKS[each] for each in held}, 3, (0, 1), target, 50)


def test_a_move_begins_in_a_new_epoch_and_changes_nobody_but_the_followers() -> None:
    before = PartitionState(0, 4, (0, 1), (), {0: "a", 1: "b"}, 9)
    begun = begin(before, (0, 1), (1, 2), 10)
    assert begun == replace(before, leader_epoch=5, replicas=(0, 1), target=(1, 2), throttled_rate=10)
    assert (begun.held_by((0, 1)), begun.adding, begun.removing) == ((0, 1, 2), (2,), (0,))
    assert begin(before, (0, 1), (1, 0), 0).leader_epoch == 4, "nobody is added"
    again = begin(replace(before, replicas=(2, 3)), (0, 1), (1,), 0)
    assert again.held_by((0, 1)) == (2, 3, 1)
    assert before.held_by((0, 1)) == (0, 1)
    assert (before.adding, before.removing) == ((), ())


def test_a_move_is_over_once_all_of_its_target_are_in_sync_and_one_of_them_leads() -> None:
    count = 0
    for state, can_lead in product(moving_states(), subsets(BROKERS)):
        after = finish(state, can_lead)
        is_due = {*state.target} <= {*state.isr} & {*can_lead} and state.leader >= 0
        assert (after is not None) == is_due, (state, can_lead)
        if after is not None:
            count += 1
            assert (after.replicas, after.target, after.throttled_rate) == (state.target, (), 0)
            check_kept(state, after)
            assert after.leader in after.isr
            assert set(after.isr) == set(state.target)
    assert count > 100
    assert finish(PartitionState(0, 4, (0, 1)), BROKERS) is None


def test_a_cancelled_move_keeps_a_replica_with_all_acknowledged_records_or_is_refused() -> None:
    outcomes = set()
    for state, can_lead in product(moving_states(), subsets(BROKERS)):
        after = cancel(state, can_lead)
        may_lead = {0, 1} & {*state.isr} & {*can_lead}
        outcomes.add(after is None)
        if after is None:
            assert not {0, 1} & {*state.isr} or not may_lead, (state, can_lead)
        else:
            assert (after.replicas, after.target, after.throttled_rate) == ((0, 1), (), 0)
            check_kept(state, after)
    assert outcomes == {True, False}


def check_kept(before: PartitionState, after: PartitionState) -> None:
    """Whoever may lead after it could before, and no replica that is no member any more has a directory."""
    assert after.isr
    assert {*after.isr} <= {*before.isr}
    assert {*after.eligible} <= {*before.eligible}
    assert {*after.isr, *after.eligible, *after.directories} <= {*after.replicas}
    if after.leader == before.leader:
        assert after.leader_epoch == before.leader_epoch
    else:
        assert after.leader in after.isr
        assert after.leader_epoch == before.leader_epoch + 1


def test_a_cancelled_move_is_led_by_a_live_replica_from_before_or_is_refused() -> None:
    moving = PartitionState(2, 7, (0, 1, 2), (), DISKS, 3, (0, 1), (2,), 0)
    after = cancel(moving, {1, 2})
    assert after is not None
    assert (after.leader, after.leader_epoch) == (1, 8)
    assert cancel(moving, {2}) is None


def test_a_cancelled_growth_of_one_copy_is_led_again_once_its_broker_is_back() -> None:
    growing = PartitionState(0, 1, (0,), (), {0: "disk-0"}, 2, (0,), (0, 1))
    away = elect(growing, (0, 1), {1: "disk-1"}, unclean=False, min_insync=1)
    assert away is not None
    assert (away.leader, away.isr) == (-1, (0,))
    cancelled = cancel(away, {1})
    assert cancelled is not None
    assert (cancelled.leader, cancelled.replicas) == (-1, (0,))
    assert elect(cancelled, (0,), {1: "disk-1"}, unclean=False, min_insync=1) is None
    back = elect(cancelled, (0,), DISKS, unclean=False, min_insync=1)
    assert back is not None
    assert (back.leader, back.leader_epoch) == (0, 3)
