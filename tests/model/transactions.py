"""The exactly-once write as an explicit-state model: every interleaving of a small world, breadth first.

Drivers run a query's batches one after the other: stage, read, prepare, decide, apply, done. A driver that crashes is
one that takes no further step, a zombie one that goes on beside its successor. A request may be late, doubled, or heard
although nobody waits for it any more. Leaders crash, time out, reap, and resolve what they have prepared from the
znode. Every rule of the protocol is a switch; `RULES` says what each demands.

Names are the code's: `client/transaction/coordinator.py` is the driver, `broker/requests` the leader,
`zk/decisions.py` the znode. What is left out: an apply asked for by a driver does what a leader that resolves does,
so it is not modelled beside it; answers that only repeat what stays true are looked up where it is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.model.explore import Violation

RULES = {
    "fresh_uuid_per_attempt": "a part is named by a uuid of its task attempt, not by batch and task",
    "prepare_checks_parts": "prepare refuses missing or short parts",
    "keep_prepared": "the reaper of old parts leaves prepared ones alone",
    "parts_live_with_write": "a part does not expire while a task of its write runs",
    "renewed_by_family": "tasks renew all that is staged of their write, not only what is for topics that they met",
    "raise_version_first": "a leader raises the version before it drops a prepared set that timed out",
    "drop_only_on_news": "a set is dropped only when a newer version records another uuid for its batch or a later one",
    "cas_on_version": "a decision is written only over exactly the version that was prepared at",
    "reread_after_unknown": "after an unknown outcome the decision is read again and its uuid compared",
    "reprepare_at_new_version": "when the version moved and the batch is undecided, it is prepared again",
    "keep_newer_version": "a late prepare at an older version does not take a newer one back",
    "roll_forward_recorded": "the batch recorded under another uuid is rolled forward, and ours dropped",
    "fail_when_recorded_higher": "a recorded batch id above ours fails the commit",
    "run_superseded": "a run that was replaced decides nothing more",
    "replaced_runs_in_znode": "which runs were replaced is remembered in the znode, not in the process",
    "fingerprint": "the same batch id with another input is no success",
    "whole_set_checked": "an apply checks all that it will append before its first append",
    "lost_hides_nothing": "half a batch is hidden only as long as the rest of it can come",
    "apply_resumes_after_mark": "apply goes on after what the log has of the batch",
    "marks_rebuilt": "how far a batch came is rebuilt from the log after a crash",
    "mark_kept_with_set": "how far a batch came is not forgotten while a set of it is prepared",
    "drop_synced_before_mark": "nor before it is durable that its set was dropped",
    "staged_kept_until_done": "staged parts stay until the batch is done, not until they are appended",
    "done_before_next": "a batch is decided only after the one before is done",
    "abort_spares_prepared": "discard never removes a prepared part",
    "streams_never_expire": "the znode of a stream is not forgotten",
    "gone_was_done": "an open decision of a batch write that is not there any more was done",
    "outlives_late_requests": "a batch write's decision is not forgotten while a request for it may be on its way",
    "not_asked_again_late": "nor is it asked for again once it may be forgotten: whether it was made is not known then",
    "decided_soon": "a first decision is asked for soon after it was prepared, while a version raised since is there",
    "query_beside_version": "a numbered write skips a version only where the same query recorded it",
    "only_last_is_skipped": "a query's numbered write below the recorded version fails",
    "one_write_a_run": "a second write of a version in one run fails",
    "skip_is_recorded": "the write that a run was skipped for counts as its write of the version",
    "writes_of_all_runs": "each run's write of the version is kept, not only the newest run's",
    "fence_before_giving_up": "a commit that asked for its decision raises the version before it says 'not decided'",
    "look_before_giving_up": "a commit that is given up looks whether it is decided before it says that it is not",
    "any_attempt_counts": "a commit that is given up says 'decided' if another attempt at its batch is",
    "applied_once_synced": "a leader says that it has a batch once that is synced",
    "done_by_the_last": "leaders write a batch done once the last of them has said that it has it",
    "deadline_by_progress": "a commit is given up only while no leader gets on with it",
}


@dataclass(frozen=True)
class World:
    """How large the world is, and what may go wrong in it, how often."""

    leaders: int = 1
    parts: int = 1  # of each batch and leader
    length: int = 1  # batches of each part
    twins: int = 1  # attempts of each task
    batches: int = 1  # of the query
    restarts: int = 1  # drivers after the first, over the same checkpoint
    copies: int = 0  # drivers over a copy of the checkpoint; of numbered writes: of another query under the same name
    one_off: bool = False  # a batch write: its decision is forgotten once it is done
    by_topic: bool = False  # each part is of another topic and staged by a task of its own
    numbered: bool = False  # the driver writes versions in foreachBatch: what was written is skipped
    writes: int = 1  # of each run and batch, under one name: a driver each, one after the other in any order
    restored: bool = False  # the copies of numbered writes are older checkpoints of the same query
    gives_up: bool = False  # a driver may give a commit up; a batch given up as undecided is written again elsewhere
    reaps: int = 0
    overdue: int = 0  # the retention of staged parts passes, by their own age, while tasks run
    damages: int = 0  # what is staged goes bad on the disk
    kills: int = 0  # the operating system keeps what was written
    power_losses: int = 0  # only what was synced stays
    timeouts: int = 0
    discards: bool = False
    expires: bool = False
    tidy: bool = False  # no prepare is doubled, and what can have no effect any more is gone at once: for larger worlds
    forgets: int = 0  # a leader forgets how far a batch came; applies that drivers asked for come late, and again
    closes: bool = False  # leaders say what they have of an open batch, and write it done without any driver
    forgetful: bool = False  # the driver's process is a new one for every batch


class Znode(NamedTuple):
    version: int = -1
    batch: int = -1
    uuid: int = -1  # the driver whose attempt was decided
    run: int = -1
    done: bool = False
    replaced: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()  # of numbered writes: the driver of each run that wrote the batch, or was skipped
    applied: frozenset[int] = frozenset()  # leaders that say that they have the open batch


class Leader(NamedTuple):
    parts: frozenset[Any] = frozenset()  # (name, contents)
    prepared: frozenset[Any] = frozenset()  # (driver, batch, task attempt, version)
    log: tuple[Any, ...] = ()  # (batch, driver, part)
    synced: int = 0
    mark: tuple[int, int] = (-1, 0)  # batch, its parts in the log; in memory
    applying: tuple[int, int, int] | None = None  # driver, batch, next part; in memory
    damaged: frozenset[Any] = frozenset()  # names of parts
    lost: frozenset[Any] = frozenset()  # (driver, batch) whose damage was found
    dropped: frozenset[Any] = frozenset()  # (prepared, its parts) that a power loss may bring back
    forgot: int = (
        -1
    )  # the last batch whose mark was forgotten, which is saved: what the log has of it is not read again


class Driver(NamedTuple):
    phase: str = "absent"
    batch: int = 0
    staged: tuple[int, ...] = ()  # by task attempt: batches sent of each part; by_topic: by part
    task: int = 0  # the attempt whose message counts
    version: int = -1
    target: tuple[int, int] = (-1, -1)  # what is rolled forward: driver, batch
    recorded: bool = False  # whether this process has seen its own run recorded
    asked: int = -2  # the version that its decision was last asked for at, where that matters


class State(NamedTuple):
    znode: Znode
    leaders: tuple[Leader, ...]
    drivers: tuple[Driver, ...]
    network: frozenset[Any]
    committed: int  # batches in Spark's commit log
    deciders: tuple[int, ...]  # runs in the order in which they took over
    reaps: int
    kills: int
    power_losses: int
    timeouts: int
    overdue: int
    damages: int
    forgets: int


_NO_STEPS = ("absent", "end", "second", "superseded")
"""Phases of a driver that has not begun, or will take no further step."""


class Model:
    """The protocol with all rules but those left out."""

    def __init__(self, world: World, without: frozenset[str] = frozenset()) -> None:
        assert without <= set(RULES)
        self.world = world
        self.without = without

    def has(self, rule: str) -> bool:
        return rule not in self.without

    def run_of(self, driver: int) -> int:
        return driver // self.world.writes

    def input_of(self, driver: int) -> int:
        """What the checkpoint of a driver says of its batches' input: a copy planned its own."""
        return max(0, self.run_of(driver) - self.world.restarts)

    def start(self) -> State:
        world = self.world
        later = (world.restarts + world.copies) * world.writes
        first = self._at_batch(0) if world.writes == 1 else Driver()
        drivers = (*[first] * world.writes, *[Driver()] * later)
        budget = (world.reaps, world.kills, world.power_losses, world.timeouts, world.overdue, world.damages)
        return State(Znode(), (Leader(),) * world.leaders, drivers, frozenset(), 0, (), *budget, world.forgets)

    def _at_batch(self, batch: int, recorded: bool = False) -> Driver:
        tasks = self.world.parts if self.world.by_topic else self.world.twins
        return Driver("stage", batch, (0,) * tasks, recorded=recorded and not self.world.forgetful)

    # --- drivers

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Every next step and the state after it. Raises Violation from a step that breaks an invariant at once."""
        for number, driver in enumerate(state.drivers):
            for step, after in self._driver_steps(state, number, driver):
                yield f"driver {number}: {step}", after
        for step, after in self._znode_steps(state):
            yield f"znode: {step}", after
        for number, leader in enumerate(state.leaders):
            for step, after in self._leader_steps(state, number, leader):
                yield f"leader {number}: {step}", after

    def _driver_steps(self, state: State, number: int, driver: Driver) -> Iterator[tuple[str, State]]:
        def to(phase: str, send: frozenset[Any] = frozenset(), **fields: Any) -> State:
            drivers = list(state.drivers)
            drivers[number] = driver._replace(phase=phase, **fields)
            kept = frozenset(message for message in state.network if message[:2] != ("prepared", number))
            return state._replace(drivers=tuple(drivers), network=kept | send)

        batch, phase = driver.batch, driver.phase
        if phase == "absent":
            of_run = number - number % self.world.writes
            if any(each.phase not in _NO_STEPS for each in state.drivers[of_run : of_run + self.world.writes]):
                return
            copied = self.run_of(number) > self.world.restarts
            for first in range(0 if copied else state.committed, state.committed + 1):
                if first < self.world.batches:
                    yield f"starts at batch {first}", self._begin(state, number, first)
            return
        yield from self._task_steps(state, number, driver)
        if phase == "stage":
            ready = [task for task, sent in enumerate(driver.staged) if sent == self.world.length]
            if self.world.by_topic:
                ready = [0] if len(ready) == len(driver.staged) else []
            for task in ready:
                yield self._read(state, number, driver._replace(task=task), to)
        elif phase == "prepare":
            wanted = {("prepared", number, batch, driver.version, leader) for leader in range(self.world.leaders)}
            if wanted <= state.network:
                decide = ("decide", number, batch, driver.version)
                asked = driver.version if self.world.gives_up else -2
                yield f"decides at {driver.version}", to("decide", frozenset({decide}), asked=asked)
        elif phase == "late":
            yield self._read(state, number, driver, to)
        elif phase == "decide" and self.world.one_off and self._is_gone(state):  # an hour has passed
            if self.has("not_asked_again_late"):
                yield "does not know", to("unknown")
            else:
                yield "asks again", to("decide", frozenset({("decide", number, batch, driver.version)}))
        elif phase == "apply" and self.world.one_off and self._is_gone(state):
            if self.has("gone_was_done"):
                yield "finds it done and forgotten", self._returned(state, number, driver)
            else:
                yield self._read(state, number, driver, to)
        elif phase == "decide":  # answered or not: it reads again, and finds its uuid or another version
            now = state.znode
            undecided = now.batch < batch and (now.batch < 0 or now.done)
            if undecided and now.version > driver.version and not self.has("reprepare_at_new_version"):
                decide = ("decide", number, batch, now.version)
                yield f"decides at {now.version}", to("decide", frozenset({decide}), version=now.version)
            elif not self.has("reread_after_unknown") and (now.uuid, now.batch) != (number, batch):
                applies = frozenset(("apply", number, batch, leader) for leader in range(self.world.leaders))
                yield "takes it for decided", to("apply", applies, target=(number, batch))
            elif self.world.one_off and now.version == driver.version:
                return  # asked again until it is refused: only then it is known
            elif not self.has("done_before_next") and (now.uuid, now.batch) == (number, batch):
                yield "returns undone", self._returned(state, number, driver)
            else:
                yield self._read(state, number, driver, to)
        elif phase == "apply" and any(driver.target in leader.lost for leader in state.leaders):
            yield "finds it lost", to("lost")
        elif phase == "apply" and self._is_applied(state, driver.target[1]):
            now = state.znode
            if (now.uuid, now.batch) == driver.target and not now.done:
                state = state._replace(znode=now._replace(version=now.version + 1, done=True, applied=frozenset()))
            if driver.target == (number, batch):
                yield "done", self._returned(state, number, driver)
            else:
                yield self._read(state, number, driver, to)
        if self.world.gives_up:
            yield from self._give_up(state, number, driver, to)
        if self.world.discards and phase in ("prepare", "decide", "apply"):
            yield "fails and aborts", to("failed", frozenset({("discard", number, batch)}))

    def _give_up(self, state: State, number: int, driver: Driver, to: Any) -> Iterator[tuple[str, State]]:
        """The time of a commit is over. In `given up` its rows are written again, by a transaction of their own."""
        now, batch, phase = state.znode, driver.batch, driver.phase
        if phase not in ("prepare", "decide", "apply"):
            return
        mine = (now.uuid, now.batch) == (number, batch)
        decided = now.batch == batch if self.has("any_attempt_counts") else mine
        if phase == "apply" and driver.target == (number, batch):
            works = any(leader.applying is not None for leader in state.leaders)
            if works and self.has("deadline_by_progress"):
                return
            if works:
                raise Violation(
                    f"the commit of batch {batch} fails while a leader gets on with it: a large one never ends"
                )
        if decided and self.has("look_before_giving_up"):
            yield "gives up, decided", to("given up, decided")
        elif now.batch == batch and not mine:
            raise Violation(f"batch {batch} of another attempt is there although it was given up: a retry doubles it")
        elif decided or not self.has("fence_before_giving_up") or now.version != driver.asked:
            yield "gives up", to("given up")
        else:
            fenced = to("given up")
            yield "gives up and raises the version", fenced._replace(znode=now._replace(version=now.version + 1))

    def _is_gone(self, state: State) -> bool:
        """Whether the decision was made and is forgotten; a version that a leader raised since may stand there."""
        return bool(state.deciders) and state.znode.batch < 0

    def _is_applied(self, state: State, batch: int) -> bool:
        """Whether every leader can acknowledge it: what is synced stays, so when it is asked does not matter."""
        parts = self.world.parts
        return all(leader.mark >= (batch, parts) and leader.synced == len(leader.log) for leader in state.leaders)

    def _begin(self, state: State, number: int, batch: int, recorded: bool = False) -> State:
        """A batch's tasks start; where nothing depends on when they write, they have written."""
        drivers = list(state.drivers)
        drivers[number] = self._at_batch(batch, recorded)
        state = state._replace(drivers=tuple(drivers))
        if self.world.length == self.world.twins == 1:
            [(_, state)] = self._task_steps(state, number, drivers[number])
        return state

    def _returned(self, state: State, number: int, driver: Driver) -> State:
        """`commit` has returned, and Spark writes its own commit log."""
        now = state.znode
        undone = not self.has("done_before_next") and now.batch == driver.batch and not now.done
        for leader in state.leaders:
            found = [entry for entry in leader.log[: leader.synced] if entry[0] == driver.batch]
            if undone and not found:
                continue
            if len(found) != self.world.parts:
                raise Violation(
                    f"batch {driver.batch} is lost: commit returned to driver {number} without it in the log"
                )
            if self.input_of(found[0][1]) != self.input_of(number):
                raise Violation(f"batch {driver.batch} of driver {number} was taken for that of another input: lost")
        after = driver.batch + 1
        if self.world.writes > 1:
            return self._returned_of_several(state, number)
        if not self.input_of(number):
            state = state._replace(committed=max(state.committed, after))
        if after < self.world.batches:
            return self._begin(state, number, after, driver.recorded)
        drivers = list(state.drivers)
        drivers[number] = Driver("end", staged=driver.staged, batch=driver.batch)
        return state._replace(drivers=tuple(drivers))

    def _returned_of_several(self, state: State, number: int) -> State:
        """One of the writes of a batch has ended well. Spark counts the batch once all of them have."""
        assert self.world.batches == 1 and not self.world.copies
        drivers = list(state.drivers)
        drivers[number] = Driver("end", staged=drivers[number].staged)
        first = number - number % self.world.writes
        if any(each.phase != "end" for each in drivers[first : first + self.world.writes]):
            return state._replace(drivers=tuple(drivers))
        written = {driver % self.world.writes for leader in state.leaders for _, driver, _ in leader.log}
        if lost := set(range(self.world.writes)) - written:
            raise Violation(f"all writes of run {self.run_of(number)} ended well, and the rows of {lost} are lost")
        return state._replace(drivers=tuple(drivers), committed=1)

    def _task_steps(self, state: State, number: int, driver: Driver) -> Iterator[tuple[str, State]]:
        """A task's next batch of each part; a twin may be late, and write while the driver has gone on."""
        for task, sent in enumerate(driver.staged):
            if sent == self.world.length:
                continue
            leaders = []
            for leader in state.leaders:
                parts = dict(leader.parts)
                for part in [task] if self.world.by_topic else range(self.world.parts):
                    attempt = 0 if self.world.by_topic else task
                    name = self._part(number, driver.batch, attempt, part)
                    contents = parts.get(name, ())
                    if sent > len(contents):
                        break  # StagedOutOfOrder: what was there is gone; the task fails
                    if sent == len(contents):
                        parts[name] = (*contents, (number, attempt))
                else:
                    leaders.append(leader._replace(parts=frozenset(parts.items())))
            if len(leaders) == len(state.leaders):
                drivers = list(state.drivers)
                staged = (*driver.staged[:task], sent + 1, *driver.staged[task + 1 :])
                drivers[number] = driver._replace(staged=staged)
                yield f"task {task} stages {sent}", state._replace(leaders=tuple(leaders), drivers=tuple(drivers))

    def _part(self, driver: int, batch: int, task: int, part: int) -> tuple[int, int, int, int]:
        return (driver, batch, task, part) if self.has("fresh_uuid_per_attempt") else (0, batch, 0, part)

    def _read(self, state: State, number: int, driver: Driver, to: Any) -> tuple[str, State]:
        """The rules of Decide, in the order of `TransactionCoordinator.commit`."""
        now, batch = state.znode, driver.batch
        mine = (now.uuid, now.batch) == (number, batch)
        run = self.run_of(number)
        recorded = driver.recorded or now.run == run
        if self.has("run_superseded"):
            if self.has("replaced_runs_in_znode"):
                superseded = run in now.replaced
            else:
                superseded = driver.recorded and now.run != run
            if superseded:
                return "is superseded", to("superseded")
        is_open = now.batch >= 0 and not now.done
        rolls = now.batch >= batch or self.has("done_before_next")
        if is_open and rolls and (mine or now.batch != batch or self.has("roll_forward_recorded")):
            target = (now.uuid, now.batch)
            applies = [("apply", *target, leader) for leader in range(self.world.leaders)] if self.world.forgets else []
            fields = {"target": target, "task": driver.task, "recorded": recorded}
            return f"rolls {target} forward", to("apply", frozenset(applies), **fields)
        if mine:
            return "finds its own done", self._returned(state, number, driver)
        if self.world.numbered and now.batch >= batch:
            differs = self.input_of(now.uuid) != self.input_of(number)
            if differs and not self.world.restored and self.has("query_beside_version"):
                return "finds another query's version", to("another's")
            if now.batch > batch and self.world.restored and self.has("only_last_is_skipped"):
                return "finds a later batch", to("copied")
            if now.batch == batch and differs and self.world.restored and self.has("fingerprint"):
                return "finds the batch with another input", to("copied")
            others = {self.run_of(writer) for writer in now.writers if writer != number}
            if now.batch == batch and run in others and self.has("one_write_a_run"):
                return "finds another write of its run", to("second")
            if now.batch == batch and self.has("skip_is_recorded"):
                writers = (*now.writers, number) if self.has("writes_of_all_runs") else (number,)
                state = state._replace(znode=now._replace(version=now.version + 1, writers=writers))
            return "skips", self._returned(state, number, driver)
        if now.batch == batch and self.has("roll_forward_recorded"):
            if self.has("fingerprint") and self.input_of(now.uuid) != self.input_of(number):
                return "finds the batch with another input", to("copied")
            return "finds the batch done by another", self._returned(state, number, driver)
        if now.batch > batch:
            if self.has("fail_when_recorded_higher"):
                return "finds a later batch", to("copied")
            return "skips", self._returned(state, number, driver)
        prepares = frozenset(
            ("prepare", number, batch, driver.task, now.version, leader) for leader in range(self.world.leaders)
        )
        fields = {"version": now.version, "task": driver.task, "recorded": recorded}
        return f"prepares at {now.version}", to("prepare", prepares, **fields)

    # --- the znode

    def _znode_steps(self, state: State) -> Iterator[tuple[str, State]]:
        now = state.znode
        for message in state.network:
            if message[0] != "decide":
                continue
            _, driver, batch, version = message
            if now.version != version and self.has("cas_on_version"):
                continue  # refused; who reads again finds out
            run = self.run_of(driver)
            replaced = tuple(each for each in now.replaced if each != run)
            if now.run not in (-1, run):
                replaced = (*replaced, now.run)
            deciders = state.deciders
            if run != (deciders[-1] if deciders else None):
                if run in deciders:
                    raise Violation(f"run {run} decides batch {batch} although it was replaced")
                deciders = (*deciders, run)
            if batch < now.batch:
                raise Violation(f"batch {batch} is decided after batch {now.batch}")
            if self.world.one_off and self._is_gone(state):
                raise Violation(f"batch {batch} is decided a second time: what was staged of it may be gone")
            writers = (driver,) if self.world.numbered else ()
            decided = Znode(now.version + 1, batch, driver, run, False, replaced, writers)
            network, leaders = state.network, state.leaders
            if self.has("cas_on_version"):
                network -= {message}  # heard again it is refused
            if self.world.tidy:
                network = frozenset(each for each in network if each[0] != "decide" or each[3] > now.version)
                leaders = tuple(self._tidied(leader, batch) for leader in leaders)
            after = state._replace(znode=decided, deciders=deciders, network=network, leaders=leaders)
            yield f"{message}", after
            if self.world.one_off:
                yield f"{message}, and again later", after._replace(network=state.network)
        if self.world.expires and now.done and not self.has("streams_never_expire"):
            yield "expires", state._replace(znode=Znode())
        if self.world.one_off and (now.done or now.batch < 0 <= now.version):
            if self.has("decided_soon"):
                late = [each._replace(phase="late") if each.phase == "prepare" else each for each in state.drivers]
                state = state._replace(drivers=tuple(late))
            is_late = any(message[0] == "decide" for message in state.network)
            if not is_late:
                yield "is forgotten", state._replace(znode=Znode())
            elif not self.has("outlives_late_requests"):
                yield "is forgotten too soon", state._replace(znode=Znode())

    def _tidied(self, leader: Leader, batch: int) -> Leader:
        return leader._replace(
            parts=frozenset(part for part in leader.parts if part[0][1] >= batch),
            prepared=frozenset(each for each in leader.prepared if each[1] >= batch),
        )

    # --- leaders

    def _leader_steps(self, state: State, number: int, leader: Leader) -> Iterator[tuple[str, State]]:
        def to(send: frozenset[Any] = frozenset(), world: dict[str, Any] | None = None, **fields: Any) -> State:
            leaders = list(state.leaders)
            leaders[number] = leader._replace(**fields)
            return state._replace(leaders=tuple(leaders), network=state.network | send, **(world or {}))

        for message in state.network:
            if message[0] == "prepare" and message[-1] == number:
                yield from self._prepare(state, leader, message, to)
            elif message[0] == "apply" and message[-1] == number:
                yield from self._apply(leader, message, to)
            elif message[0] == "discard":
                yield self._discard(leader, message, to)
        if leader.applying is not None:
            yield "goes on", to(**self._go_on(leader)._asdict())
        yield from self._resolve(state, number, leader, to)
        yield from self._forget(state, leader, to)
        yield from self._faults(state, leader, to)

    def _names(self, prepared: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [self._part(*prepared[:3], part) for part in range(self.world.parts)]

    def _prepare(self, state: State, leader: Leader, message: Any, to: Any) -> Iterator[tuple[str, State]]:
        _, number, batch, task, version, at = message
        known = next((each for each in leader.prepared if each[:2] == (number, batch)), None)
        driver = state.drivers[number]
        waits = (driver.phase, driver.batch, driver.version) == ("prepare", batch, version)
        if known is None and self.has("prepare_checks_parts"):
            parts = dict(leader.parts)
            if any(len(parts.get(name, ())) < self.world.length for name in self._names((number, batch, task, 0))):
                if waits and self.world.one_off and self._is_gone(state):
                    raise Violation(f"batch {batch} is taken for lost although it is there: a retry doubles it")
                return  # refused: whoever waits for it fails
        kept = max(version, known[3]) if known is not None and self.has("keep_newer_version") else version
        prepared = (leader.prepared - {known}) | {(number, batch, task, kept)}
        ack = frozenset({("prepared", number, batch, version, at)}) if waits else frozenset()
        after = to(ack, prepared=prepared)
        yield f"{message}", after._replace(network=after.network - {message}) if self.world.tidy else after

    def _apply(self, leader: Leader, message: Any, to: Any) -> Iterator[tuple[str, State]]:
        """An apply that the znode does not call for (any more); the others are those of `_resolve`."""
        _, driver, batch, _ = message
        known = any(each[:2] == (driver, batch) for each in leader.prepared)
        if leader.applying is None and known and leader.mark < (batch, self.world.parts):
            yield f"{message}", to(**self._begins(leader, driver, batch))

    def _begins(self, leader: Leader, driver: int, batch: int) -> dict[str, Any]:
        """An apply, its first step; all of it where nothing can interrupt it."""
        resumes = leader.mark[0] == batch and self.has("apply_resumes_after_mark")
        begun = leader._replace(applying=(driver, batch, leader.mark[1] if resumes else 0))
        if leader.damaged and self.has("whole_set_checked") and self._is_damaged(begun):
            return self._found_lost(begun)._asdict()
        if not self.world.kills and not self.world.power_losses and not self.world.gives_up:
            while begun.applying is not None:
                begun = self._go_on(begun)
        return begun._asdict()

    def _is_damaged(self, leader: Leader) -> bool:
        """Whether something of what an apply is still to append is damaged."""
        assert leader.applying is not None
        driver, batch, part = leader.applying
        prepared = next((each for each in leader.prepared if each[:2] == (driver, batch)), None)
        return prepared is not None and any(name in leader.damaged for name in self._names(prepared)[part:])

    def _found_lost(self, leader: Leader) -> Leader:
        """An apply that found damage ends. What was damaged before it began can be found before it appends anything."""
        assert leader.applying is not None
        driver, batch, part = leader.applying
        if part and not self.has("lost_hides_nothing"):
            raise Violation(f"half of batch {batch} hides the partition for good")
        if part and not self.world.kills:  # nothing comes between the steps of an apply here, and no restart
            raise Violation(f"half of batch {batch} is shown, although part {part} was damaged before it was begun")
        return leader._replace(applying=None, lost=leader.lost | {(driver, batch)})

    def _go_on(self, leader: Leader) -> Leader:
        """The next step of an apply under way: a part, or the sync."""
        assert leader.applying is not None
        driver, batch, part = leader.applying
        if part == self.world.parts:
            return leader._replace(synced=len(leader.log), applying=None)
        prepared = next((each for each in leader.prepared if each[:2] == (driver, batch)), None)
        if prepared is None:
            raise Violation(f"staged parts of batch {batch} are gone while they are applied")
        if self._names(prepared)[part] in leader.damaged:
            return self._found_lost(leader)
        contents = dict(leader.parts).get(self._names(prepared)[part], ())
        if contents != (((driver, prepared[2]),) * self.world.length):
            raise Violation(f"batch {batch} is torn: part {part} of driver {driver} holds {contents}")
        entry = (batch, driver, part)
        self._check_follows(leader.log, entry)
        if part + 1 == self.world.parts and not self.has("staged_kept_until_done"):
            leader = leader._replace(**self._without(leader, prepared))
        return leader._replace(log=(*leader.log, entry), mark=(batch, part + 1), applying=(driver, batch, part + 1))

    def _check_follows(self, log: tuple[Any, ...], entry: tuple[int, int, int]) -> None:
        batch, _, part = entry
        if not log:
            follows = (batch, part) == (0, 0)
        else:
            last_batch, last_driver, last_part = log[-1]
            if last_part + 1 < self.world.parts:
                follows = entry == (last_batch, last_driver, last_part + 1)
            else:
                follows = (batch, part) == (last_batch + 1, 0)
        if not follows:
            kind = "twice" if any(each[::2] == (batch, part) for each in log) else "out of order"
            raise Violation(f"{entry} comes {kind} after {log}")

    def _without(self, leader: Leader, prepared: Any) -> dict[str, Any]:
        names = self._names(prepared)
        gone = frozenset(part for part in leader.parts if part[0] in names)
        fields: dict[str, Any] = {"prepared": leader.prepared - {prepared}, "parts": leader.parts - gone}
        if self.world.forgets:
            fields["dropped"] = leader.dropped | {(prepared, gone)}
        return fields

    def _forget(self, state: State, leader: Leader, to: Any) -> Iterator[tuple[str, State]]:
        """How far a batch came is kept no longer than it is needed."""
        if leader.dropped:
            yield "syncs what it dropped", to(dropped=frozenset())
        batch, parts = leader.mark
        if not state.forgets or parts < self.world.parts or leader.applying is not None:
            return
        if any(each[1] == batch for each in leader.prepared) and self.has("mark_kept_with_set"):
            return
        if leader.dropped and self.has("drop_synced_before_mark"):
            return
        yield (
            f"forgets how far batch {batch} came",
            to(mark=(-1, 0), forgot=batch, world={"forgets": state.forgets - 1}),
        )

    def _resolve(self, state: State, number: int, leader: Leader, to: Any) -> Iterator[tuple[str, State]]:
        """What a leader does on its own with what it has prepared, by the znode."""
        now = state.znode
        for prepared in leader.prepared:
            driver, batch, _, version = prepared
            recorded = (now.uuid, now.batch) == (driver, batch)
            if recorded and not now.done and leader.mark >= (batch, self.world.parts):
                yield from self._close(state, number, leader)
            if leader.applying is not None and leader.applying[:2] == (driver, batch):
                continue
            if recorded and not now.done:
                if (driver, batch) in leader.lost:
                    continue  # until somebody accepts the loss
                if leader.applying is None and leader.mark < (batch, self.world.parts):
                    yield f"resolves {prepared}", to(**self._begins(leader, driver, batch))
                continue
            if self.has("drop_only_on_news"):
                drops = recorded or now.batch > batch or (now.version > version and now.batch == batch)
            else:
                drops = now.batch >= 0
            if drops:
                yield f"drops {prepared}", to(**self._without(leader, prepared))
            elif self.world.timeouts:
                if not self.has("raise_version_first") or now.version > version:
                    if state.timeouts < self.world.timeouts or not self.has("raise_version_first"):
                        yield f"drops {prepared}, timed out", to(**self._without(leader, prepared))
                elif state.timeouts:
                    raised = {"znode": now._replace(version=now.version + 1), "timeouts": state.timeouts - 1}
                    yield "raises the version", to(world=raised)

    def _close(self, state: State, number: int, leader: Leader) -> Iterator[tuple[str, State]]:
        """A leader that has the open batch says so, and the last of them that it is done."""
        now = state.znode
        if not self.world.closes or number in now.applied:
            return
        if leader.synced < len(leader.log) and self.has("applied_once_synced"):
            return
        applied = now.applied | {number}
        done = len(applied) == self.world.leaders or not self.has("done_by_the_last")
        told = now._replace(version=now.version + 1, done=done, applied=frozenset() if done else applied)
        yield f"has batch {now.batch}{', the last' if done else ''}", state._replace(znode=told)

    def _discard(self, leader: Leader, message: Any, to: Any) -> tuple[str, State]:
        _, driver, batch = message
        hit = [each for each in leader.prepared if each[:2] == (driver, batch)]
        if hit and self.has("abort_spares_prepared"):
            return f"{message} spares what is prepared", to()
        gone = frozenset(part for part in leader.parts if part[0][:2] == (driver, batch))
        return f"{message}", to(parts=leader.parts - gone, prepared=leader.prepared - set(hit))

    def _faults(self, state: State, leader: Leader, to: Any) -> Iterator[tuple[str, State]]:
        spared = {name for each in leader.prepared for name in self._names(each)}
        synced = frozenset(part for part in leader.parts if part[0] in spared)
        if state.reaps and leader.parts and leader.applying is None:
            if not self.has("keep_prepared"):
                yield "reaps", to(parts=frozenset(), prepared=frozenset(), world={"reaps": state.reaps - 1})
            elif synced != leader.parts:
                yield "reaps", to(parts=synced, world={"reaps": state.reaps - 1})
        if state.overdue and leader.parts and leader.applying is None:
            kept = spared | {name for name in dict(leader.parts) if self._is_renewed(state, name)}
            parts = frozenset(part for part in leader.parts if part[0] in kept)
            if any(self._is_being_staged(state, name) for name, _ in leader.parts - parts):
                raise Violation("a part expired while its write went on")
            if parts != leader.parts:
                yield "lets old parts expire", to(parts=parts, world={"overdue": state.overdue - 1})
        if state.damages:
            for name in dict(leader.parts).keys() - leader.damaged:
                fields = {"damaged": leader.damaged | {name}, "world": {"damages": state.damages - 1}}
                yield f"part {name} goes bad", to(**fields)
        if state.kills:
            yield "is killed", to(**self._restarted(leader, leader.log), world={"kills": state.kills - 1})
        if state.power_losses:
            fields = self._restarted(leader, leader.log[: leader.synced])
            fields |= {"dropped": frozenset(), "world": {"power_losses": state.power_losses - 1}}
            yield "loses power", to(parts=synced, **fields)
            if leader.dropped:
                back = leader.prepared | {prepared for prepared, _ in leader.dropped}
                parts = synced.union(*(parts for _, parts in leader.dropped))
                yield "loses power, and has back what it dropped", to(**fields | {"parts": parts, "prepared": back})

    def _is_renewed(self, state: State, name: tuple[int, int, int, int]) -> bool:
        """Whether a task asks for a part to be kept."""
        driver = state.drivers[name[0]]
        if self.world.by_topic and not self.has("renewed_by_family") and driver.staged[name[3]] == self.world.length:
            return False  # the tasks that still run have no rows for its topic
        return self.has("parts_live_with_write") and self._is_being_staged(state, name)

    def _is_being_staged(self, state: State, name: tuple[int, int, int, int]) -> bool:
        """Whether the write that a part belongs to is still being staged."""
        driver = state.drivers[name[0]]
        return (driver.phase, driver.batch) == ("stage", name[1])

    def _restarted(self, leader: Leader, log: tuple[Any, ...]) -> dict[str, Any]:
        mark = (-1, 0)
        if log and log[-1][0] > leader.forgot and self.has("marks_rebuilt"):
            mark = (log[-1][0], log[-1][2] + 1)
        lost = frozenset(
            each[:2]
            for each in leader.prepared
            if mark < (each[1], self.world.parts) and any(name in leader.damaged for name in self._names(each))
        )
        return {"log": log, "synced": len(log), "mark": mark, "applying": None, "lost": lost}

    def phases(self, state: State) -> set[str]:
        return {driver.phase for driver in state.drivers}

    # --- invariants

    def check(self, state: State) -> None:
        """What has to hold in every state. Raises Violation."""
        now = state.znode
        for number, driver in enumerate(state.drivers):
            if driver.phase == "given up" and (now.uuid, now.batch) == (number, driver.batch):
                raise Violation(
                    f"batch {driver.batch} appears although it was given up as undecided: a retry doubles it"
                )
        attempts: dict[int, int] = {}
        for leader in state.leaders:
            for batch, driver, _ in leader.log:
                if attempts.setdefault(batch, driver) != driver:
                    raise Violation(
                        f"batch {batch} is torn: attempts {attempts[batch]} and {driver} of it are in the logs"
                    )
            if now.batch >= 0 and not now.done:
                there = sum(entry[:2] == (now.batch, now.uuid) for entry in leader.log)
                prepared = next((each for each in leader.prepared if each[:2] == (now.uuid, now.batch)), None)
                parts = dict(leader.parts)
                whole = prepared is not None and all(
                    len(parts.get(name, ())) == self.world.length for name in self._names(prepared)
                )
                if not whole and (there < self.world.parts or leader.synced < len(leader.log)):
                    raise Violation(
                        f"batch {now.batch} is lost: decided, but a leader has neither staged nor applied it"
                    )
