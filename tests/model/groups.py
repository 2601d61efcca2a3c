"""Consumer groups as an explicit-state model: every interleaving of claims, releases, lapses and commits of a small
group, breadth first.

Members ask brokers, and these change the group's state in ZooKeeper: each change is one compare-and-set. A request may
be executed late, after its member has given it up, and its answer may be lost. A member may stall (SIGSTOP, or
ZooKeeper away) past its lease, crash, leave and come back. Every rule of the protocol is a switch; `RULES` says what
each demands.

Left out: retries that would change nothing, and which of several brokers executes a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from kafkalog.assignors import sticky
from kafkalog.records import TopicPartition
from tests.model.explore import Violation

RULES = {
    "claim_checks_generation": "a claim of an earlier generation is refused",
    "claim_waits": "a partition that another owns is waited for, not taken",
    "claims_are_repeated": "a claim is repeated until it is granted, and finds what an earlier one was granted",
    "own_claims_are_known": "with a generation a member learns what it owns, also if the answer to its claim was lost",
    "stop_before_release": "a member hands out nothing of a partition whose release it has ever asked for",
    "release_at_version": "a release frees only the claim that it names",
    "fenced_commit": "a commit is written only while the claim that it names stands",
    "commits_in_order": "a late commit does not take back a later one of the same claim",
    "start_read_after_claim": "where to begin is read after the claim",
    "lease_by_own_clock": "a member whose lease is over by its own clock hands out nothing",
    "lapse_at_lease_version": "a lapse is refused if the lease was renewed since it was found to be over",
    "lapse_frees_claims": "the claims of a member that lapsed are freed with it",
    "new_partitions_from_zero": "a partition that is new to the group is read from its first record",
}


@dataclass(frozen=True)
class World:
    """How large the world is, and what may go wrong in it, how often."""

    members: int = 2
    partitions: int = 2
    records: int = 1  # of each partition
    joins: int = 3  # of all members together
    leaves: int = 0
    stalls: int = 0  # a lease is over
    crashes: int = 0
    losses: int = 0  # answers that are lost, or requests that are given up and executed later
    grows: int = 0  # partitions that the topic gets later


class Claim(NamedTuple):
    partition: int
    version: int  # the number of the claim
    position: int  # the next record to hand out
    committed: int = 0  # commits made
    releasing: bool = False


class Member(NamedTuple):
    phase: str = "out"  # "in", "crashed"
    name: int = -1  # another one for each join
    generation: int = 0  # as learned
    share: frozenset[int] = frozenset()
    claims: frozenset[Claim] = frozenset()
    waits_for: Any = None  # the request without an answer
    is_late: bool = False  # its lease is over, by its own clock
    begins: tuple[int, ...] = ()  # the offsets as they were when it learned the generation


class State(NamedTuple):
    generation: int
    assignment: tuple[tuple[int, frozenset[int]], ...]  # (member's name, partitions); of those registered
    leases: tuple[tuple[int, int, bool], ...]  # (member's name, version, is over)
    owners: tuple[tuple[int, int], ...]  # by partition: name or -1, version
    offsets: tuple[tuple[int, tuple[int, int]], ...]  # by partition: offset, (version of the claim, its commits)
    handed_out: tuple[int, ...]  # by partition: the records that were, from the first one on
    members: tuple[Member, ...]
    network: frozenset[Any]  # requests that may still be executed though nobody waits for them
    found_over: frozenset[tuple[int, int]]  # leases that a broker found to be over: name, version
    joins: int
    leaves: int
    stalls: int
    crashes: int
    losses: int
    grows: int


@cache
def assign(
    names: tuple[int, ...], partitions: int, before: tuple[tuple[int, frozenset[int]], ...]
) -> tuple[tuple[int, frozenset[int]], ...]:
    assigned = sticky(
        {f"{name:03}": ("t",) for name in names},
        {"t": partitions},
        {f"{name:03}": [TopicPartition("t", number) for number in share] for name, share in before},
    )
    return tuple((int(name), frozenset(each.partition for each in share)) for name, share in assigned.items())


class Model:
    def __init__(self, world: World, without: frozenset[str] = frozenset()) -> None:
        self.world = world
        self.without = without
        assert without <= RULES.keys()

    def has(self, rule: str) -> bool:
        return rule not in self.without

    def start(self) -> State:
        world = self.world
        return State(
            0, (), (), ((-1, 0),) * world.partitions, ((0, (0, 0)),) * world.partitions, (0,) * world.partitions,
            (Member(),) * world.members, frozenset(), frozenset(),
            world.joins, world.leaves, world.stalls, world.crashes, world.losses, world.grows,
        )  # fmt: skip

    def phases(self, state: State) -> set[str]:
        found = {member.phase for member in state.members}
        return found | {"moved" for owner, version in state.owners if owner >= 0 and version > 1}

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        for number, member in enumerate(state.members):
            if member.phase == "out":
                yield from self._join(state, number)
            elif member.phase == "in":
                yield from self._member_steps(state, number, member)
        for request in state.network:
            after, _ = self._execute(state._replace(network=state.network - {request}), request)
            yield f"late: {request}", after
        yield from self._broker_steps(state)
        if state.grows:
            yield "the topic grows", self._grown(state)

    # --- members

    def _with(self, state: State, number: int, member: Member, **fields: Any) -> State:
        members = (*state.members[:number], member, *state.members[number + 1 :])
        return state._replace(members=members, **fields)

    def _join(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        if not state.joins:
            return
        name = self.world.joins - state.joins
        names = (*(each for each, _ in state.assignment), name)
        after = self._with(state, number, Member("in", name), joins=state.joins - 1)
        after = after._replace(leases=(*state.leases, (name, 0, False)))
        yield f"{name} joins", self._next_generation(after, names)

    def _next_generation(self, state: State, names: tuple[int, ...]) -> State:
        before = tuple((name, share) for name, share in state.assignment)
        return state._replace(
            generation=state.generation + 1, assignment=assign(tuple(sorted(names)), len(state.owners), before)
        )

    def _member_steps(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        name = member.name
        lease = next((each for each in state.leases if each[0] == name), None)
        may_act = not member.is_late or not self.has("lease_by_own_clock")
        if state.crashes:
            yield f"{name} crashes", self._with(state, number, Member("crashed", name), crashes=state.crashes - 1)
        if member.waits_for is not None:
            yield from self._wait(state, number, member)
        if may_act:
            yield from self._hand_out(state, number, member)
        if member.waits_for is not None:
            return
        if lease is None:
            yield f"{name} learns that it is out", self._with(state, number, Member())
            return
        if member.is_late:
            yield f"{name} asks to be renewed", self._asked(state, number, member, ("renew", name))
            yield f"{name} gives its lease up", self._with(state, number, Member())
        if not may_act:
            return
        if member.generation != state.generation:
            yield f"{name} learns the generation", self._learned(state, number, member)
            return
        for claim in member.claims:
            if claim.partition not in member.share or claim.releasing:
                claims = member.claims - {claim} | {claim._replace(releasing=True)}
                asking = member._replace(claims=claims)
                yield f"{name} asks to release", self._asked(state, number, asking, ("release", name, claim))
            elif state.offsets[claim.partition][0] != claim.position:
                yield f"{name} asks to commit", self._asked(state, number, member, ("commit", name, claim))
        for partition in member.share - {claim.partition for claim in member.claims}:
            if state.owners[partition][0] in (-1, name) or not self.has("claim_waits"):
                begin = member.begins[partition] if member.begins else -1
                request = ("claim", name, partition, member.generation, begin)
                yield f"{name} asks to claim", self._asked(state, number, member, request)
        if state.leaves and not member.claims:
            gone = self._gone(state, name)
            yield f"{name} leaves", self._with(gone, number, Member(), leaves=state.leaves - 1)

    def _learned(self, state: State, number: int, member: Member) -> State:
        share = dict(state.assignment).get(member.name, frozenset())
        claims = member.claims
        if self.has("own_claims_are_known"):
            known = {claim.partition for claim in claims}
            claims |= {
                Claim(partition, version, state.offsets[partition][0])
                for partition, (owner, version) in enumerate(state.owners)
                if owner == member.name and partition not in known
            }
        member = member._replace(generation=state.generation, share=share, claims=claims)
        if not self.has("start_read_after_claim"):
            member = member._replace(begins=tuple(offset for offset, _ in state.offsets))
        return self._with(state, number, member)

    def _hand_out(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        for claim in member.claims:
            partition, position = claim.partition, claim.position
            if position >= self.world.records or (claim.releasing and self.has("stop_before_release")):
                continue
            if state.owners[partition] != (member.name, claim.version):
                raise Violation(f"{member.name} hands out a record of {partition}, which is not its own")
            if position < state.offsets[partition][0]:
                raise Violation(f"{member.name} hands out a record of {partition} that was committed before")
            handed_out = list(state.handed_out)
            if position == handed_out[partition]:
                handed_out[partition] += 1
            claims = member.claims - {claim} | {claim._replace(position=position + 1)}
            after = self._with(state, number, member._replace(claims=claims), handed_out=tuple(handed_out))
            yield f"{member.name} hands out {position} of {partition}", after

    def _asked(self, state: State, number: int, member: Member, request: Any) -> State:
        return self._with(state, number, member._replace(waits_for=request))

    def _wait(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        """Its request is executed and answered; or the answer is lost; or it is given up, and executed later."""
        request = member.waits_for
        after, answer = self._execute(state, request)
        yield f"answered: {request}", self._answered(after, number, request, answer)
        if state.losses:
            lost = self._with(after, number, member._replace(waits_for=None), losses=state.losses - 1)
            yield f"not answered: {request}", self._unanswered(lost, number, request)
            given_up = self._with(state, number, member._replace(waits_for=None), losses=state.losses - 1)
            given_up = given_up._replace(network=state.network | {request})
            yield f"given up: {request}", self._unanswered(given_up, number, request)

    def _unanswered(self, state: State, number: int, request: Any) -> State:
        member = state.members[number]
        if request[0] == "claim" and not self.has("claims_are_repeated"):
            return self._with(state, number, member._replace(share=member.share - {request[2]}))
        if request[0] == "commit":  # the next commit is another one
            return self._with(state, number, self._counted(member, request[2]))
        return state

    def _answered(self, state: State, number: int, request: Any, answer: Any) -> State:
        member = state.members[number]._replace(waits_for=None)
        if request[0] == "claim" and answer is not None:
            member = member._replace(claims=member.claims | {answer})
        elif request[0] == "release":
            member = member._replace(
                claims=frozenset(claim for claim in member.claims if claim.version != request[2].version
                                 or claim.partition != request[2].partition)
            )  # fmt: skip
        elif request[0] == "commit":
            member = self._counted(member, request[2])
        elif request[0] == "renew" and answer is not None:
            member = member._replace(is_late=False)
        return self._with(state, number, member)

    def _counted(self, member: Member, committed: Claim) -> Member:
        claims = {
            claim._replace(committed=claim.committed + 1) if claim.partition == committed.partition else claim
            for claim in member.claims
        }
        return member._replace(claims=frozenset(claims))

    # --- registries

    def _execute(self, state: State, request: Any) -> tuple[State, Any]:
        """What a broker does with a request, in one multi; the answer is None if it was refused."""
        what, name = request[:2]
        is_member = any(each == name for each, _ in state.assignment)
        if what == "renew":
            if not is_member:
                return state, None
            leases = tuple(
                (each, version + (each == name), over and each != name) for each, version, over in state.leases
            )
            return state._replace(leases=leases), True
        if what == "claim":
            return self._claim(state, request)
        claim = request[2]
        is_owner = state.owners[claim.partition] == (name, claim.version)
        if what == "release":
            if not is_owner and self.has("release_at_version"):
                return state, None
            if is_owner:
                state = self._committed(state, name, claim)
            return state._replace(owners=self._set(state.owners, claim.partition, (-1, claim.version + 1))), True
        if not is_owner and self.has("fenced_commit"):
            return state, None
        return self._committed(state, name, claim), True

    def _claim(self, state: State, request: Any) -> tuple[State, Claim | None]:
        _, name, partition, generation, begin = request
        if generation != state.generation and self.has("claim_checks_generation"):
            return state, None
        owner, version = state.owners[partition]
        if owner != name:
            if owner >= 0 and self.has("claim_waits"):
                return state, None
            version += 1
            state = state._replace(owners=self._set(state.owners, partition, (name, version)))
        if self.has("start_read_after_claim"):
            begin = state.offsets[partition][0]
        return state, Claim(partition, version, begin)

    def _committed(self, state: State, name: int, claim: Claim) -> State:
        partition, position = claim.partition, claim.position
        if state.owners[partition] != (name, claim.version):
            raise Violation(f"{name} commits to {partition}, which is not its own")
        offset, place = state.offsets[partition]
        if (claim.version, claim.committed) < place and self.has("commits_in_order"):
            return state
        if claim.version == place[0] and position < offset:
            raise Violation(f"a late commit takes {partition} back from {offset} to {position}")
        if position > state.handed_out[partition]:
            raise Violation(f"record {state.handed_out[partition]} of {partition} is skipped")
        offsets = self._set(state.offsets, partition, (position, (claim.version, claim.committed)))
        return state._replace(offsets=offsets)

    @staticmethod
    def _set(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
        return (*values[:place], value, *values[place + 1 :])

    def _gone(self, state: State, name: int, frees: bool = True) -> State:
        """A member is removed, with its lease and its claims, and the generation is raised."""
        if frees:
            owners = tuple((-1, version + 1) if owner == name else (owner, version) for owner, version in state.owners)
            state = state._replace(owners=owners)
        leases = tuple(each for each in state.leases if each[0] != name)
        return self._next_generation(
            state._replace(leases=leases), tuple(each for each, _ in state.assignment if each != name)
        )

    def _broker_steps(self, state: State) -> Iterator[tuple[str, State]]:
        for name, version, over in state.leases:
            if state.stalls and not over and any(each.name == name for each in state.members):
                leases = tuple((each, at, late or each == name) for each, at, late in state.leases)
                members = tuple(each._replace(is_late=each.is_late or each.name == name) for each in state.members)
                after = state._replace(leases=leases, members=members, stalls=state.stalls - 1)
                yield f"the lease of {name} ends", after
            is_dead = not any(each.name == name and each.phase == "in" for each in state.members)
            if (over or is_dead) and (name, version) not in state.found_over:
                yield f"{name} is found over", state._replace(found_over=state.found_over | {(name, version)})
        for name, version in state.found_over:
            known = next((each for each in state.leases if each[0] == name), None)
            if known is None or (known[1] != version and self.has("lapse_at_lease_version")):
                yield f"no lapse of {name}", state._replace(found_over=state.found_over - {(name, version)})
                continue
            after = self._gone(state, name, self.has("lapse_frees_claims"))
            yield f"{name} lapses", after._replace(found_over=state.found_over - {(name, version)})

    def _grown(self, state: State) -> State:
        """A partition comes, with records; where nobody has read yet, a group begins where its policy says."""
        begin = 0 if self.has("new_partitions_from_zero") else self.world.records
        after = state._replace(
            owners=(*state.owners, (-1, 0)), offsets=(*state.offsets, (begin, (0, 0))),
            handed_out=(*state.handed_out, 0), grows=state.grows - 1,
        )  # fmt: skip
        return self._next_generation(after, tuple(name for name, _ in after.assignment)) if after.assignment else after

    # --- invariants

    def check(self, state: State) -> None:
        """What has to hold where only faults are left: each partition is at the member that it is assigned to, and all
        that was read is committed. Raises Violation."""
        faultless = state._replace(stalls=0, crashes=0, losses=0, leaves=0, grows=0)
        if next(self.successors(faultless), None) is not None:
            return
        for name, share in state.assignment:
            for partition in share:
                if state.owners[partition][0] != name:
                    raise Violation(f"{partition} is assigned to {name} and stays with {state.owners[partition][0]}")
                member = next(each for each in state.members if each.name == name)
                if all(claim.partition != partition for claim in member.claims):
                    raise Violation(f"{name} owns {partition} and does not know it")
                if state.offsets[partition][0] < self.world.records:
                    raise Violation(f"records of {partition} are skipped or stay unread")
