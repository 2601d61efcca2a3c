"""What becomes of a partition's state when brokers come, go, fall behind or catch up. Decides only: no I/O, no clock.

The words and the numbers of rules are those of docs/REPLICATION.md. Each function returns a new state, which the caller
writes at the version of the old one (rule 6).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace

from kafkalog.zk.registry import PartitionState


def first_state(assignment: Sequence[int], live: Collection[int]) -> PartitionState | None:
    """The state of a partition that has none and whose first replica is dead: another one leads. It has no directory,
    so its leader may create the log. None: the first replica lives and will write the state, or no replica lives, or
    there is one replica only."""
    if len(assignment) == 1 or assignment[0] in live:
        return None
    leader = next((broker for broker in assignment if broker in live), None)
    return None if leader is None else PartitionState(leader, 0, (leader,))


def elect(
    state: PartitionState,
    assignment: Sequence[int],
    live: Mapping[int, str],
    unclean: bool,
    min_insync: int,
    stopping: Collection[int] = (),
) -> PartitionState | None:
    """The state of a partition for these live brokers.

    Dead replicas leave the in-sync set, but not the last ones: they are known to have every acknowledged record. If the
    leader is dead, the first live replica of the in-sync set leads, or else an eligible one, which then is the whole
    set (rules 10 and 11). Nobody leads if there is none.

    Args:
        assignment: the partition's replicas, in the order in which they are preferred as leaders.
        live: by id of each live broker, the id of its data directory.
        unclean: unclean.leader.election.enable: if no member of the in-sync set lives, any live replica leads that has
            its log. Acknowledged records may be lost.
        min_insync: min.insync.replicas. It may have changed: nobody is eligible if the set is not smaller.
        stopping: live brokers that are about to stop. They stay in the set, and lead only what no other in-sync replica
            can lead.

    Returns:
        None: nothing changes. A partition with one replica never changes, unless nobody leads it after it had more.
    """
    if len(assignment) == 1 and state.leader >= 0:
        return None
    candidates = [broker for broker in assignment if broker in live and broker not in stopping]
    isr = tuple(broker for broker in state.isr if broker in live) or state.isr
    after = _with_isr(state, isr, min_insync)
    if state.leader not in candidates:
        in_sync = next((broker for broker in candidates if broker in state.isr), None)
        if in_sync is not None:
            after = _led_by(after, in_sync)
        elif state.leader not in live:
            eligible = next((broker for broker in candidates if broker in after.eligible), None)
            if eligible is not None:
                after = _led_by(_with_isr(after, (eligible,), min_insync), eligible)
            else:
                after = _led_by_any(after, candidates, live, unclean)
    return None if after == state else after


def _led_by_any(
    state: PartitionState, candidates: Sequence[int], live: Mapping[int, str], unclean: bool
) -> PartitionState:
    """The state after its leader has died and none of the candidates is known to have every acknowledged record."""
    may_lose = unclean and not any(broker in live for broker in state.isr)  # one that stops may be back soon
    for broker in candidates:
        has_log = state.directories.get(broker) == live[broker]
        if not state.directories or (may_lose and has_log):  # without any directory nothing was ever written
            return _led_by(replace(state, isr=(broker,), eligible=()), broker)
    return _led_by(state, -1)


def prefer(state: PartitionState, assignment: Sequence[int], live: Collection[int]) -> PartitionState | None:
    """The state in which the preferred leader, which is the first replica, leads again; None if it leads, is not in
    sync, is not live, or if nobody leads."""
    preferred = assignment[0]
    if state.leader in (preferred, -1) or preferred not in state.isr or preferred not in live:
        return None
    return _led_by(state, preferred)


def join(state: PartitionState, broker: int, directory: str, min_insync: int) -> PartitionState:
    """The state with a replica that has caught up in the in-sync set, and with the directory of its log. Nobody stays
    eligible once the set is large enough (rule 11)."""
    isr = state.isr if broker in state.isr else (*state.isr, broker)
    joined = replace(state, directories={**state.directories, broker: directory})
    eligible = tuple(each for each in state.eligible if each != broker)
    return _with_isr(replace(joined, eligible=eligible), isr, min_insync)


def leave(state: PartitionState, brokers: Collection[int], min_insync: int) -> PartitionState:
    """The state without some followers in the in-sync set. They stay eligible if the set is too small after that: the
    high watermark does not move until it is large enough (rules 4 and 11)."""
    assert state.leader not in brokers, "the leader does not leave the set"
    return _with_isr(state, tuple(broker for broker in state.isr if broker not in brokers), min_insync)


def depart(state: PartitionState, broker: int) -> PartitionState | None:
    """The state without a replica that may have lost writes, in either set (rules 7 and 8); None if nothing changes.
    The in-sync set may be empty after that. If the replica led, nobody leads."""
    after = replace(
        state,
        isr=tuple(each for each in state.isr if each != broker),
        eligible=tuple(each for each in state.eligible if each != broker),
    )
    if state.leader == broker:
        after = _led_by(after, -1)
    return None if after == state else after


def is_last(state: PartitionState, broker: int, live: Container[int] | None = None) -> bool:
    """Whether no other replica may be elected, or none of those that live."""
    return not any(each != broker and (live is None or each in live) for each in (*state.isr, *state.eligible))


def _with_isr(state: PartitionState, isr: tuple[int, ...], min_insync: int) -> PartitionState:
    """The state with another in-sync set. Those that left it are eligible while it is too small, but not those from
    before a time in which it was large enough: by a min.insync.replicas that was lowered since."""
    before = state.eligible if len(state.isr) < min_insync else ()
    eligible = tuple(broker for broker in (*before, *state.isr) if broker not in isr) if len(isr) < min_insync else ()
    return replace(state, isr=isr, eligible=eligible)


def _led_by(state: PartitionState, leader: int) -> PartitionState:
    """The state with another leader, in the next epoch."""
    return state if leader == state.leader else replace(state, leader=leader, leader_epoch=state.leader_epoch + 1)
