"""The replication of one partition as an explicit-state model: every interleaving of appends, fetches, elections,
changes of the in-sync set, kills, power losses and lost disks of a few replicas, breadth first.

A log is the leader epochs of its records: a record is known by its offset and its epoch, because an epoch has one
leader. A request is executed at once, or late: then its sender has given it up and gets no answer. The cluster's state
is one znode; whoever writes it names the version that it read, and learns the outcome in a later step. Every rule of
the protocol is a switch; `RULES` says what each demands.

An answer that is late but in time for its epoch is as one that was sent later: within an epoch a leader only appends.

Left out: what the bytes are, and staged parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.model.explore import Violation

RULES = {
    "truncate_by_epoch": "a follower cuts its log to where it agrees with the leader's epochs, not to its watermark",
    "join_at_epoch_start": "a replica joins the in-sync set only with all records before the leader's epoch",
    "watermark_counts_joining": "the watermark counts replicas whose joining may have been written",
    "watermark_waits_for_min": "the watermark stays while the in-sync set is smaller than min.insync.replicas",
    "matched_in_this_epoch": "the watermark counts what a follower has fetched in the leader's own epoch only",
    "state_at_version": "a change of the in-sync set names the version of the state that it was made from",
    "lost_machines_leave": "a replica whose machine may have lost writes is in no set until it has caught up",
    "lost_disks_leave": "a replica with an empty or another directory is in no set until it has caught up",
    "incarnation_joins": "the joining of a replica that has lost something since it fetched is refused",
    "elect_eligible": "a leader is elected from the in-sync set or the eligible replicas only",
    "eligible_below_min": "a replica stays eligible only if it left while the watermark could not move",
    "watermark_after_truncation": "a follower takes the leader's watermark only once its log agrees with the leader's",
    "removals_keep_in_sync": "a replica is taken away only if an in-sync one stays, and one of those leads",
    "added_in_new_epoch": "a replica is added in a new leader epoch",
    "replicas_of_the_state": "the leader takes its replicas from the state that it makes changes from",
}


@dataclass(frozen=True)
class World:
    """How large the world is, and what may go wrong in it, how often."""

    replicas: int = 3
    insync: int = 3  # replicas in the in-sync set at the beginning
    min_insync: int = 2
    records: int = 1
    elections: int = 0  # the leader is taken for dead
    moves: int = 0  # of the leader, which is well
    shrinks: int = 0
    joins: int = 0
    kills: int = 0  # the log stays
    power_losses: int = 0  # any end of the log is lost
    disk_losses: int = 0
    removals: int = 0  # a replica is taken away, and removes its log
    additions: int = 0  # one that was taken away is added again
    late: int = 0  # requests that are executed late, and not answered


WORLDS = {
    "fast elections": World(records=2, elections=2),
    "a set that shrinks to one": World(insync=2, shrinks=1, joins=1, elections=1),
    "one that joins": World(insync=2, joins=1, elections=1),
    "one that joins while the leader moves": World(records=2, insync=2, moves=1, elections=1, joins=1),
    "a minimum of one": World(insync=2, min_insync=1, shrinks=1, elections=1),
    "a change that is late": World(min_insync=1, shrinks=2, elections=1, late=1),
    "a machine that is lost": World(elections=1, power_losses=1),
    "a machine that is lost and joins again": World(insync=2, elections=1, joins=1, power_losses=1),
    "a disk that is lost": World(elections=1, disk_losses=1, shrinks=1),
    "kills": World(insync=2, elections=1, joins=1, kills=1),
    "fetches that are late": World(moves=3, late=1),
    "one that joins amid late fetches": World(insync=2, moves=1, elections=1, joins=1, late=2),
    "lost machines, changes of the set and elections": World(elections=2, shrinks=1, joins=1, power_losses=1),
    "kills, changes of the set and elections": World(elections=2, shrinks=1, joins=1, kills=1),
    "one that is taken away": World(insync=2, elections=1, removals=1),
    "one of two that is taken away and added again": World(
        replicas=2, insync=2, min_insync=1, joins=1, elections=1, removals=1, additions=1
    ),
    "one of three that is taken away and added again": World(insync=2, joins=1, elections=1, removals=1, additions=1),
}
LARGE_WORLDS = [*list(WORLDS)[-7:-3], list(WORLDS)[-1]]

_LOST = "which was acked"
WITHOUT = {
    "truncate_by_epoch": ("fast elections", "see different records"),
    "join_at_epoch_start": ("one that joins amid late fetches", _LOST),
    "watermark_counts_joining": ("one that joins", _LOST),
    "watermark_waits_for_min": ("a set that shrinks to one", _LOST),
    "matched_in_this_epoch": ("fetches that are late", _LOST),
    "state_at_version": ("a change that is late", _LOST),
    "lost_machines_leave": ("a machine that is lost", _LOST),
    "lost_disks_leave": ("a disk that is lost", _LOST),
    "incarnation_joins": ("a machine that is lost and joins again", _LOST),
    "elect_eligible": ("one that joins", _LOST),
    "eligible_below_min": ("a minimum of one", _LOST),
    "watermark_after_truncation": ("fast elections", "below its watermark"),
    "removals_keep_in_sync": ("one that is taken away", _LOST),
    "added_in_new_epoch": ("one of two that is taken away and added again", _LOST),
    "replicas_of_the_state": ("one of two that is taken away and added again", _LOST),
}
"""The world in which a rule is missed, and what goes wrong there first."""


class Znode(NamedTuple):
    leader: int  # -1: nobody
    epoch: int
    insync: frozenset[int]
    eligible: frozenset[int]
    version: int
    held: frozenset[int]  # the replicas


class Replica(NamedTuple):
    log: tuple[int, ...] = ()
    watermark: int = 0
    is_up: bool = True
    has_lost: str = ""  # the rule for what its next start finds
    incarnation: int = 0
    epoch: int = 0  # the last that it has adopted
    leads: bool = False
    # Of a leader:
    start: int = 0  # its log's end when it began
    insync: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    version: int = -1  # of the state that it knows
    matched: tuple[tuple[int, int], ...] = ()  # by replica: end, incarnation; -1: has not fetched in this epoch


NOT_FETCHED = (-1, -1)


class State(NamedTuple):
    znode: Znode
    replicas: tuple[Replica, ...]
    network: frozenset[Any]
    acked: frozenset[tuple[int, int]]  # offset and epoch of the records that were
    records: int
    elections: int
    moves: int
    shrinks: int
    joins: int
    kills: int
    power_losses: int
    disk_losses: int
    removals: int
    additions: int
    late: int


class Model:
    def __init__(self, world: World, without: frozenset[str] = frozenset()) -> None:
        self.world = world
        self.without = without
        assert without <= RULES.keys()

    def has(self, rule: str) -> bool:
        return rule not in self.without

    def start(self) -> State:
        world = self.world
        insync = frozenset(range(world.insync))
        held = frozenset(range(world.replicas))
        leader = Replica(leads=True, insync=insync, held=held, version=0, matched=(NOT_FETCHED,) * world.replicas)
        return State(
            Znode(0, 0, insync, frozenset(), 0, held),
            (leader, *(Replica() for _ in range(world.replicas - 1))),
            frozenset(),
            frozenset(),
            world.records,
            world.elections,
            world.moves,
            world.shrinks,
            world.joins,
            world.kills,
            world.power_losses,
            world.disk_losses,
            world.removals,
            world.additions,
            world.late,
        )

    def phases(self, state: State) -> set[str]:
        found = set()
        if state.znode.leader < 0:
            found.add("no leader")
        if state.znode.eligible:
            found.add("eligible")
        if len(state.acked) == self.world.records:
            found.add("all acked")
        if sum(replica.leads for replica in state.replicas) > 1:
            found.add("two lead")
        if any(len(set(replica.log)) > 1 for replica in state.replicas):
            found.add("two epochs")
        return found

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        for number, replica in enumerate(state.replicas):
            if replica.is_up:
                yield from self._learn(state, number, replica)
                yield from (self._lead if replica.leads else self._follow)(state, number, replica)
                yield from self._break(state, number, replica)
            else:
                yield f"{number} starts", self._started(state, number, replica)
        for message in state.network:
            delivered = state._replace(network=state.network - {message})
            yield f"late: {message}", self._arrived(delivered, message)
        yield from self._elect(state)
        yield from self._reassign(state)

    # --- replicas

    def _with(self, state: State, number: int, replica: Replica, **fields: Any) -> State:
        replicas = (*state.replicas[:number], replica, *state.replicas[number + 1 :])
        return state._replace(replicas=replicas, **fields)

    def _learn(self, state: State, number: int, replica: Replica) -> Iterator[tuple[str, State]]:
        """A replica reads the state."""
        znode = state.znode
        if number not in znode.held:
            removed = Replica(incarnation=replica.incarnation, epoch=-1)
            if replica != removed:
                yield f"{number} removes its log", self._with(state, number, removed)
        elif znode.epoch > replica.epoch:
            learned = replica._replace(epoch=znode.epoch, leads=False, version=-1, matched=())
            learned = learned._replace(start=0, insync=frozenset(), held=frozenset(), joining=frozenset())
            if znode.leader == number:
                learned = learned._replace(
                    leads=True,
                    start=len(replica.log),
                    insync=znode.insync,
                    held=znode.held,
                    version=znode.version,
                    matched=(NOT_FETCHED,) * self.world.replicas,
                )
                yield f"{number} leads", self._advanced(state, number, learned)
            else:
                yield f"{number} follows", self._with(state, number, learned)
        elif replica.leads and znode.epoch == replica.epoch and znode.version > replica.version:
            learned = replica._replace(insync=znode.insync, version=znode.version, joining=frozenset())
            if self.has("replicas_of_the_state"):
                learned = learned._replace(held=znode.held)
            yield f"{number} learns the set", self._advanced(state, number, learned)

    def _advanced(self, state: State, number: int, leader: Replica) -> State:
        """The leader moves its watermark; what it passes is acked."""
        counted = leader.insync | (leader.joining if self.has("watermark_counts_joining") else frozenset())
        ends = [len(leader.log) if each == number else leader.matched[each][0] for each in counted]
        watermark = leader.watermark
        if len(leader.insync) >= self.world.min_insync or not self.has("watermark_waits_for_min"):
            watermark = max(watermark, min(ends, default=0))
        acked = state.acked | {(offset, leader.log[offset]) for offset in range(leader.watermark, watermark)}
        return self._with(state, number, leader._replace(watermark=watermark), acked=acked)

    def _lead(self, state: State, number: int, leader: Replica) -> Iterator[tuple[str, State]]:
        if state.records and len(leader.insync) >= self.world.min_insync:
            appended = leader._replace(log=(*leader.log, leader.epoch))
            yield f"{number} appends", self._advanced(state._replace(records=state.records - 1), number, appended)
        for other in leader.insync - {number}:
            if state.shrinks:
                change = ("set", number, leader.epoch, leader.version, leader.insync - {other}, -1, -1)
                asking = state._replace(shrinks=state.shrinks - 1)
                yield from self._asked(f"{number} shrinks", asking, change)
        for other in leader.held - leader.insync:
            end, incarnation = leader.matched[other]
            enough = max(leader.watermark, leader.start if self.has("join_at_epoch_start") else 0)
            if len(leader.insync) < self.world.min_insync:
                enough = len(leader.log)
            if state.joins and end >= enough:
                insync = leader.insync | {other}
                change = ("set", number, leader.epoch, leader.version, insync, other, incarnation)
                letting = leader._replace(joining=leader.joining | {other})
                asking = self._with(state, number, letting, joins=state.joins - 1)
                yield from self._asked(f"{number} lets {other} join", asking, change)

    def _asked(self, step: str, state: State, request: tuple[Any, ...]) -> Iterator[tuple[str, State]]:
        yield step, self._arrived(state, request)
        if state.late:
            yield f"{step}, late", state._replace(network=state.network | {request}, late=state.late - 1)

    def _follow(self, state: State, number: int, replica: Replica) -> Iterator[tuple[str, State]]:
        last = replica.log[-1] if replica.log else -1
        fetch = ("fetch", number, replica.incarnation, replica.epoch, len(replica.log), last)
        leader = state.znode.leader
        if leader >= 0 and state.replicas[leader].leads and state.replicas[leader].epoch == replica.epoch:
            yield f"{number} fetches", self._fetched(state, *fetch[1:], is_answered=True)
        if state.late:
            yield f"{number} fetches, late", state._replace(network=state.network | {fetch}, late=state.late - 1)

    def _break(self, state: State, number: int, replica: Replica) -> Iterator[tuple[str, State]]:
        down = Replica(replica.log, is_up=False, incarnation=replica.incarnation, has_lost=replica.has_lost)
        if state.kills:
            yield f"{number} is killed", self._with(state, number, down, kills=state.kills - 1)
        if state.power_losses:
            for end in range(len(replica.log)):
                lost = down._replace(log=replica.log[:end], has_lost="lost_machines_leave")
                after = self._with(state, number, lost, power_losses=state.power_losses - 1)
                yield f"{number} loses power and all from {end}", after
        if state.disk_losses and replica.log:
            lost = down._replace(log=(), has_lost="lost_disks_leave")
            yield f"{number} loses its disk", self._with(state, number, lost, disk_losses=state.disk_losses - 1)

    def _started(self, state: State, number: int, replica: Replica) -> State:
        """It registers. One that may have lost something leaves the sets in the same step."""
        started = Replica(replica.log, incarnation=replica.incarnation + 1, epoch=-1)
        znode = state.znode
        if replica.has_lost and self.has(replica.has_lost) and number in znode.insync | znode.eligible:
            led = znode.leader == number
            znode = znode._replace(
                leader=-1 if led else znode.leader,
                epoch=znode.epoch + led,
                insync=znode.insync - {number},
                eligible=znode.eligible - {number},
                version=znode.version + 1,
            )
        return self._with(state, number, started, znode=znode)

    # --- requests

    def _arrived(self, state: State, request: tuple[Any, ...]) -> State:
        if request[0] == "fetch":
            return self._fetched(state, *request[1:], is_answered=False)
        return self._set_changed(state, *request[1:])

    def _fetched(
        self, state: State, number: int, incarnation: int, epoch: int, offset: int, last: int, *, is_answered: bool
    ) -> State:
        """Whoever leads in that epoch executes a fetch."""
        for leader_number, leader in enumerate(state.replicas):
            is_of_epoch = leader.epoch == epoch or (epoch < leader.epoch and not self.has("matched_in_this_epoch"))
            if not leader.leads or not is_of_epoch:
                continue
            replica = state.replicas[number]
            cut = _cut(leader.log, offset, last) if self.has("truncate_by_epoch") else None
            if offset > len(leader.log):
                cut = len(leader.log) if cut is None else cut
            if cut is not None:
                log, watermark = replica.log[:cut], replica.watermark
                if not self.has("watermark_after_truncation"):
                    watermark = max(watermark, min(leader.watermark, offset))
                if is_answered and cut < watermark:
                    raise Violation(f"{number} cuts its log to {cut}, below its watermark {watermark}")
            else:
                said = (offset, incarnation) if number in leader.held else leader.matched[number]
                matched = (*leader.matched[:number], said, *leader.matched[number + 1 :])
                state = self._advanced(state, leader_number, leader._replace(matched=matched))
                log, watermark = replica.log + leader.log[offset:], state.replicas[leader_number].watermark
            if is_answered:
                heard = replica._replace(log=log, watermark=max(replica.watermark, min(watermark, len(log))))
                state = self._with(state, number, heard)
            return state
        return state

    def _set_changed(
        self, state: State, number: int, epoch: int, version: int, insync: frozenset[int], joined: int, incarnation: int
    ) -> State:
        znode = state.znode
        if znode.epoch != epoch or (znode.version != version and self.has("state_at_version")):
            return state
        if joined >= 0 and self.has("incarnation_joins") and state.replicas[joined].incarnation != incarnation:
            return state
        return state._replace(znode=self._with_set(znode, insync, number))

    def _with_set(self, znode: Znode, insync: frozenset[int], leader: int) -> Znode:
        eligible = (znode.eligible | znode.insync) - insync
        if len(insync) >= self.world.min_insync and self.has("eligible_below_min"):
            eligible = frozenset()
        return znode._replace(leader=leader, insync=insync, eligible=eligible, version=znode.version + 1)

    # --- the controller

    def _elect(self, state: State) -> Iterator[tuple[str, State]]:
        """A leader that is taken for dead may be up: it may be cut off."""
        znode = state.znode
        others = {number for number, replica in enumerate(state.replicas) if replica.is_up} - {znode.leader}
        candidates = (znode.insync & others) or (znode.eligible & others)
        if not self.has("elect_eligible"):
            candidates = frozenset(others) & znode.held
        for number in candidates:
            if state.elections:
                after = state._replace(elections=state.elections - 1)
                yield f"{number} is elected", self._led_by(after, number, znode.insync - {znode.leader} | {number})
            if state.moves and number in znode.insync:
                after = state._replace(moves=state.moves - 1)
                yield f"{number} takes over", self._led_by(after, number, znode.insync)

    def _reassign(self, state: State) -> Iterator[tuple[str, State]]:
        """The end of a move takes a replica away, and the beginning of another one adds it again."""
        znode = state.znode
        for number in znode.held if state.removals else ():
            stays, insync = znode.held - {number}, znode.insync - {number}
            after = state._replace(removals=state.removals - 1)
            leaders = {znode.leader} & stays or (insync if self.has("removals_keep_in_sync") else stays)
            for leader in leaders if insync or not self.has("removals_keep_in_sync") else ():
                kept = self._with_set(znode, insync or frozenset({leader}), leader)
                kept = kept._replace(
                    held=stays, eligible=kept.eligible - {number}, epoch=znode.epoch + (leader != znode.leader)
                )
                yield f"{number} is taken away and {leader} leads", after._replace(znode=kept)
        for number in frozenset(range(self.world.replicas)) - znode.held if state.additions else frozenset():
            added = znode._replace(held=znode.held | {number}, version=znode.version + 1)
            if self.has("added_in_new_epoch"):
                added = added._replace(epoch=znode.epoch + 1)
            yield f"{number} is added", state._replace(znode=added, additions=state.additions - 1)

    def _led_by(self, state: State, number: int, insync: frozenset[int]) -> State:
        znode = self._with_set(state.znode, insync, number)
        return state._replace(znode=znode._replace(epoch=znode.epoch + 1))

    # --- what must hold

    def check(self, state: State) -> None:
        znode = state.znode
        ends = [(number, replica) for number, replica in enumerate(state.replicas) if replica.is_up]
        for number, replica in ends:
            if replica.leads and replica.epoch == znode.epoch:
                for offset, epoch in state.acked:
                    if offset >= len(replica.log) or replica.log[offset] != epoch:
                        raise Violation(f"{number} leads without record {offset} of epoch {epoch}, which was acked")
            for other, another in ends[:number]:
                end = min(replica.watermark, another.watermark)
                if replica.log[:end] != another.log[:end]:
                    raise Violation(f"readers of {other} and {number} see different records below {end}")


def _cut(log: tuple[int, ...], offset: int, last: int) -> int | None:
    """To which end a follower whose log ends at an offset with a record of some epoch has to cut it; None: it need not.
    `log` is the leader's."""
    before = sum(epoch <= last for epoch in log)  # epochs only rise
    if offset == 0 or (before >= offset and log[before - 1] == last):
        return None
    return min(before, offset - 1)
