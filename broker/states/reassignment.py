"""What becomes of a partition's state when its replicas are moved to other brokers, as KIP-455. Decides only: no I/O,
no clock.

    begin     the target is in the state, in a new leader epoch: the brokers that are added open logs, follow, and join
              the in-sync set
    finish    all of the target are in sync: they are the replicas, and the others are in no set any more
    cancel    the replicas are those from before, and the added ones are in no set any more

Each step is one change of the partition's state at the version that was read (rule 6 of docs/REPLICATION.md). Both
ends keep a part of the in-sync set, and are refused if nothing of it would be left. Every member has all acknowledged
records, so what stays has them too (rule 13). A replica is added in a new leader epoch (rule 14).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kafkalog.zk.registry import PartitionState


def begin(state: PartitionState, assigned: Sequence[int], target: Sequence[int], throttled_rate: int) -> PartitionState:
    """The state of a partition that is to be moved.

    Args:
        assigned: its brokers in the topic's znode.
        throttled_rate: bytes a second that each added broker copies; 0: no limit.
    """
    assert not state.target, "it is being moved already"
    begun = replace(
        state, replicas=state.replicas or tuple(assigned), target=tuple(target), throttled_rate=throttled_rate
    )
    # In a new epoch the leader counts nothing that a broker said when it had an earlier replica, which it has removed.
    return replace(begun, leader_epoch=state.leader_epoch + 1) if begun.adding else begun


def finish(state: PartitionState, can_lead: Collection[int]) -> PartitionState | None:
    """The state after the move; None: it is not over, or there is none.

    Args:
        can_lead: live brokers that do not stop.
    """
    if not state.target or state.leader < 0 or not set(state.target).issubset(can_lead):
        return None
    return _kept_by(state, state.target, can_lead) if set(state.target) <= set(state.isr) else None


def cancel(state: PartitionState, can_lead: Collection[int]) -> PartitionState | None:
    """The state as before the move; None: no replica from before could lead or hold what was acknowledged."""
    assert state.target, "it is not being moved"
    return _kept_by(state, state.replicas, can_lead)


def _kept_by(state: PartitionState, replicas: tuple[int, ...], can_lead: Collection[int]) -> PartitionState | None:
    isr = tuple(broker for broker in state.isr if broker in replicas)
    if not isr:
        return None
    after = replace(
        state,
        isr=isr,
        eligible=tuple(broker for broker in state.eligible if broker in replicas),
        directories={broker: directory for broker, directory in state.directories.items() if broker in replicas},
        replicas=replicas,
        target=(),
        throttled_rate=0,
    )
    if state.leader < 0 or state.leader in replicas:
        return after
    leader = next((broker for broker in replicas if broker in isr and broker in can_lead), None)
    return None if leader is None else replace(after, leader=leader, leader_epoch=state.leader_epoch + 1)
