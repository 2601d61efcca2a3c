"""Moves of partitions to other brokers (KIP-455): begin, throttle, cancel. Any broker answers. Each partition is
changed by one write of its state, which names the version that was read; `broker/states/reassignment.py` has the
steps, and the controller does the last one. Progress is in the descriptions of topics
(`broker/requests/topics.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.replica.host import Host
from broker.replica.metadata import topic_settings
from broker.states import reassignment
from broker.states.placement import move_replicas
from kafkalog.errors import (
    BrokerBusy,
    InvalidRequest,
    InvalidSetting,
    KafkalogError,
    LeaderNotAvailable,
    NoBrokers,
    PartitionLost,
    ReassignmentInProgress,
    ReassignmentNotCancelled,
    UnknownBroker,
    UnknownPartition,
    UnknownTopic,
    UnreadableZnode,
)
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import PartitionState, StateChange, TopicRecord

_SEEN_SECONDS = 10.0
_ATTEMPTS = 20
"""To change a state that others change at the same time."""


@dataclass
class _Move:
    """A partition that is to be changed. `state`: as it was read last; `target`: where it goes."""

    topic: TopicRecord
    number: int
    state: PartitionState | None
    target: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.topic.name}-{self.number}"

    @property
    def replicas(self) -> tuple[int, ...]:
        """Before the move."""
        assigned = tuple(self.topic.replicas[self.number])
        return assigned if self.state is None else self.state.replicas or assigned


_Step = Callable[[_Move, PartitionState], PartitionState]


def reassign_partitions(
    request: pb.ReassignPartitionsRequest, host: Host, seconds_left: float
) -> pb.ReassignPartitionsReply:
    """Begin, throttle or cancel moves. Returns once this broker has seen the changes, or after a while.

    Args:
        seconds_left: until the caller gives the call up.

    Raises:
        UnknownTopic, UnknownPartition: of those that are named.
        UnknownBroker, NoBrokers, TooFewBrokers, InvalidSetting: the brokers or the number of replicas are not possible;
            nothing was changed.
    """
    moves = _named(request, host)
    live = registry.live_brokers(host.metadata.session)
    can_lead = {broker.broker_id for broker in live.values() if not broker.stopping}
    if request.action == request.BEGIN:
        moves = _with_targets(moves, request, host, {each: live[each].rack for each in can_lead})

        def step(move: _Move, state: PartitionState) -> PartitionState:
            if state.target and state.target != move.target:
                raise ReassignmentInProgress(partition=move.label, topic=move.topic.name, target=list(state.target))
            if state.leader not in live:
                raise LeaderNotAvailable(partition=move.label, broker_id=state.leader)
            here, there = state.directories.get(state.leader), live[state.leader].directory
            if here is not None and here != there:
                reason = f"its log is in data directory {here}, but broker {state.leader} has {there}"
                raise PartitionLost(
                    partition=move.label,
                    reason=reason,
                    broker_id=state.leader,
                    topic=move.topic.name,
                    number=move.number,
                )
            if state.target:  # the request is made again
                is_throttled = request.HasField("throttled_rate")
                return replace(state, throttled_rate=request.throttled_rate) if is_throttled else state
            return reassignment.begin(state, move.topic.replicas[move.number], move.target, request.throttled_rate)

    elif request.action == request.THROTTLE:
        moves = [move for move in moves if move.target]

        def step(move: _Move, state: PartitionState) -> PartitionState:
            return replace(state, throttled_rate=request.throttled_rate) if state.target else state

    else:
        moves = [replace(move, target=move.replicas) for move in moves if move.target]

        def step(move: _Move, state: PartitionState) -> PartitionState:
            if not state.target:
                return state  # it is there meanwhile
            cancelled = reassignment.cancel(state, can_lead)
            if cancelled is None:
                raise ReassignmentNotCancelled(
                    partition=move.label, replicas=list(state.replicas), insync=list(state.isr)
                )
            return cancelled

    before = [move.replicas for move in moves]
    failed, written = _change(moves, step, host, is_dry=request.dry_run)

    def is_seen() -> bool:
        return all(_version_here(host, key) >= version for key, version in written.items())

    host.metadata.wait_until(is_seen, max(0.0, min(_SEEN_SECONDS, seconds_left - 1.0)))
    reply = pb.ReassignPartitionsReply()
    for number, (move, replicas) in enumerate(zip(moves, before, strict=True)):
        named = reply.partitions.add(
            topic=move.topic.name, partition=move.number, replicas=replicas, target=move.target
        )
        if number in failed:
            named.error.CopyFrom(error_to_wire(failed[number]))
    return reply


def _named(request: pb.ReassignPartitionsRequest, host: Host) -> list[_Move]:
    """The partitions that a request is about, each with its target if it is being moved. They are read anew: what this
    broker knows may be from before a request to another one."""
    if request.partitions and not request.topic:
        raise InvalidRequest(reason="partitions are named without a topic")
    names = [request.topic] if request.topic else list(host.metadata.topics)
    read = [registry.read_topic(host.metadata.session, name) if paths.is_valid_name(name) else None for name in names]
    topics = [topic for topic in read if topic is not None and not topic.deleted]
    if request.topic and not topics:
        raise UnknownTopic(topic=request.topic)
    for topic in topics:
        for number in request.partitions:
            if number >= len(topic.replicas):
                raise UnknownPartition(topic=topic.name, partition=number, partitions=len(topic.replicas))
    return [
        _Move(topic, number, state, () if state is None else state.target)
        for topic in topics
        for number in (sorted(set(request.partitions)) or range(len(topic.replicas)))
        for state in [topic.states.get(number)]
    ]


def _with_targets(
    moves: Sequence[_Move], request: pb.ReassignPartitionsRequest, host: Host, racks: Mapping[int, str]
) -> list[_Move]:
    """Those of the partitions that are to be moved, each with its target."""
    if not racks:
        raise NoBrokers()
    for broker_id in request.to_brokers:
        if broker_id not in racks:
            raise UnknownBroker(broker_id=broker_id, brokers=sorted(racks))
    leaving = [request.from_broker] if request.HasField("from_broker") else []
    moves = [move for move in moves if not leaving or request.from_broker in (*move.replicas, *move.target)]
    if leaving and not moves:
        return []
    allowed = [each for each in request.to_brokers or racks if each not in leaving]
    if not allowed:
        raise NoBrokers()
    begun = [move for move in moves if _is_begun(move, request)]
    moves = [move for move in moves if not _is_begun(move, request)]
    factors = [request.replication_factor or len(move.replicas) for move in moves]
    for move, factor in zip(moves, factors, strict=True):
        least = topic_settings(move.topic).min_insync_replicas
        if factor < min(least, len(move.replicas)):
            reason = f"topic {move.topic.name} would have {factor} {'replica' if factor == 1 else 'replicas'}"
            raise InvalidSetting(name="min.insync.replicas", value=least, reason=f"{reason}; lower the setting before")
    topics = host.metadata.topics.values()
    hosted = Counter(
        broker for topic in topics for number in range(len(topic.replicas)) for broker in topic.replicas_of(number)
    )
    led = Counter(topic.preferred_leader(number) for topic in topics for number in range(len(topic.replicas)))
    is_spread = bool(request.to_brokers) and not leaving
    targets = move_replicas(
        [move.label for move in moves],
        [move.replicas for move in moves],
        racks,
        set(allowed),
        hosted,
        factors,
        led,
        is_spread=is_spread,
        leaving=leaving,
    )
    moved = [replace(move, target=target) for move, target in zip(moves, targets, strict=True)]
    moved = [move for move in moved if move.target != move.replicas or (move.state is not None and move.state.target)]
    return sorted([*begun, *moved], key=lambda move: (move.topic.name, move.number))


def _is_begun(move: _Move, request: pb.ReassignPartitionsRequest) -> bool:
    """Whether a partition is being moved as a request wants, which is made again to wait for it. The brokers that have
    least would be others now. Where replicas are spread there is no such choice."""
    if not move.target or (request.to_brokers and not request.HasField("from_broker")):
        return False
    if request.HasField("from_broker") and request.from_broker in move.target:
        return False
    added = set(move.target) - set(move.replicas)
    return len(move.target) == (request.replication_factor or len(move.replicas)) and (
        not request.to_brokers or added <= set(request.to_brokers)
    )


def _version_here(host: Host, key: tuple[bytes, int]) -> int:
    """Of a partition's state as this broker has read it last."""
    topic = host.metadata.ids.get(key[0])
    state = topic.states.get(key[1]) if topic is not None else None
    return 1 << 31 if topic is None else -1 if state is None else state.version


def _change(
    moves: Sequence[_Move], step: _Step, host: Host, is_dry: bool
) -> tuple[dict[int, KafkalogError], dict[tuple[bytes, int], int]]:
    """Change the states of some partitions. Returns, by the place in `moves`, why one was not changed; and the versions
    that were written."""
    failed: dict[int, KafkalogError] = {}
    versions: dict[tuple[bytes, int], int] = {}
    left = dict(enumerate(moves))
    for _ in range(_ATTEMPTS):
        changes: dict[int, StateChange] = {}
        for place, move in left.items():
            try:
                if move.state is None:
                    raise LeaderNotAvailable(partition=move.label, broker_id=-1)
                after = step(move, move.state)
            except KafkalogError as error:
                failed[place] = error
                continue
            if after != move.state:
                changes[place] = StateChange(move.topic, move.number, move.state, after)
        if is_dry:
            break
        written = registry.change_states(host.metadata.session, list(changes.values()))
        left = {}
        for place, change in changes.items():
            now = written.get((change.topic.topic_id, change.number))
            if now is None:
                failed[place] = UnknownTopic(topic=change.topic.name)
            elif isinstance(now, UnreadableZnode):
                failed[place] = now
            elif replace(now, version=0) != replace(change.after, version=0):
                left[place] = replace(moves[place], state=now)
            else:
                versions[change.topic.topic_id, change.number] = now.version
        if not left:
            break
    else:
        for place in left:
            reason = f"the state of {moves[place].label} keeps changing"
            failed[place] = BrokerBusy(broker=host.broker_id, reason=reason)
    return failed, versions
