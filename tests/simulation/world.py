"""A simulated cluster: brokers, clients, ZooKeeper, the network and faults, by the plan of one seed.

    faults for some seconds -> everything is mended -> all partitions must come back -> all logs are read and compared

Everything that happens follows from the seed. `run` gives the anomalies: those of the clients' history
(`tests/chaos/checker.py`), and those that can be seen from outside of the brokers at any time.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from broker.config import BrokerSettings
from broker.replica.partition import Partition
from broker.staging import staging
from kafkalog.format.batch import iter_batches
from kafkalog.records import TopicPartition
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.chaos.checker import Anomaly, check
from tests.chaos.history import Operation
from tests.simulation.batches import values_of
from tests.simulation.clients import Client, HastyProducer, Producer, Reader
from tests.simulation.machine import Machine
from tests.simulation.network import Connection, Network
from tests.simulation.plan import Fault, Plan
from tests.simulation.scheduler import Process, Scheduler, threads
from tests.simulation.staged import Coordinator
from tests.simulation.zookeeper import Server, sessions

_START_SECONDS = 30.0
_MENDED_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_CHROOT = paths.DEFAULT_CHROOT
_STATE = re.compile(rf"^{_CHROOT}{paths.TOPICS}/[^/]+/[0-9a-f]+/([0-9]+)/state$")

OF_LOGS = {
    "epoch without records": r"^leader_epoch_begun\b.*\bprevious_is_empty=true",
    "duplicate after failover": r"^duplicate_recognised\b.*\bearlier_epoch=true",
    "ISR at min": r"^in_sync_set_changed\b.*\bat_min=true",
    "follower cut its log": r"^log_truncated\b",
    "truncation across two epochs": r"^log_truncated\b.*\bepochs=([2-9]|[1-9][0-9])",
    "damaged end cut": r"^damaged_end_cut\b",
    "staged file became a segment": r"^segment_adopted\b",
    "truncation of such a segment": r"^adopted_segment_cut\b",
    "begun anew after deletions": r"^log_reset\b.*\boffset=[1-9]",
}
PROBES = (
    *OF_LOGS,
    "last replica standing",
    "power loss of a member",
    "loss of a member's disk",
    "session expired",
    "late write of a state",
)
"""Situations that a set of seeds has to reach."""


class Outcome(NamedTuple):
    """Of one seed.

    Attributes:
        events: how many the scheduler had.
        trace: a checksum of all that happened, in order.
        reached: the probes, and how often.
        log: what happened, for people.
    """

    seed: int
    events: int
    faults: int
    trace: int
    anomalies: list[Anomaly]
    reached: Counter[str]
    log: list[str]


class World:
    """See the module.

    Attributes:
        history: of the clients.
        retries: of producers, by their reasons.
        is_ending: clients begin nothing new.
        is_over: readers stop too.
    """

    topic = "t"
    topic_id = bytes(range(16))

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed)
        self.chance = random.Random(f"world {plan.seed}")
        self.zookeeper = Server(self.scheduler, random.Random(f"zookeeper {plan.seed}"))
        self.zookeeper.on_write = self._written
        self.network = Network(self.scheduler, random.Random(f"network {plan.seed}"))
        self.history: list[Operation] = []
        self.retries: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.anomalies: list[Anomaly] = []
        self.log: list[str] = []
        self.faults = 0
        self.is_ending = self.is_over = False
        self.machines: list[Machine] = []
        self._ticks = itertools.count()
        self._patterns = {name: re.compile(pattern) for name, pattern in OF_LOGS.items()}
        self._leaders: dict[tuple[int, int], int] = {}  # by partition and leader epoch
        self.states: dict[int, PartitionState] = {}  # of partitions
        self._watermarks: dict[Partition, int] = {}
        self._kills_at_join = 0.0  # until when the leader is killed as soon as a replica has joined
        self._readers: list[Reader] = []
        self._producers: list[Client] = []

    # --- what its parts call -----------------------------------------------------------------------------------------

    def connect(self, source: Process, machine: Machine, serve: Callable[[Connection], object]) -> Connection:
        """Raises BrokerUnreachable."""
        return self.network.connect(source, machine.process if machine.is_serving else None, serve)

    def tick(self) -> int:
        """The time of an operation; later ones have a later time."""
        return int(self.scheduler.now * 1_000_000_000) + next(self._ticks)

    def note(self, text: str) -> None:
        self.log.append(f"{self.scheduler.now:10.6f} {text}")

    def anomaly(self, name: str, text: str) -> None:
        self.note(f"ANOMALY {name}: {text}")
        self.anomalies.append(Anomaly(name, text))

    def logged(self, record: logging.LogRecord) -> None:
        """By the logging of brokers."""
        fiber = self.scheduler.current
        text = record.getMessage()
        self.note(f"{'' if fiber is None else fiber.name}: {text}")
        if record.exc_info:
            self.log.append("".join(traceback.format_exception(*record.exc_info)))
        for name, pattern in self._patterns.items():
            if pattern.search(text):
                self.reached[name] += 1
        event = text.partition(" ")[0]
        if event in ("replica_diverged", "not_followed", "replica_link_failed") or record.exc_info:
            self.anomaly(event, text)

    # --- what can be seen from outside -------------------------------------------------------------------------------

    def _written(self, path: str, data: bytes | None) -> None:
        """A write of ZooKeeper: one leader has an epoch, and epochs do not go back."""
        found = _STATE.match(path)
        if found is None or data is None:
            return
        fields, number = json.loads(data), int(found[1])
        state = PartitionState(fields["leader"], fields["leader_epoch"], (*fields["isr"],), (*fields["eligible"],))
        before = self.states.get(number)
        self.states[number] = state
        self.note(f"state of {number}: {data.decode()}")
        known = self._leaders.setdefault((number, state.leader_epoch), state.leader)
        if known != state.leader:
            self.anomaly("two-leaders", f"{number}: {known} and {state.leader} lead in epoch {state.leader_epoch}")
        if before is None:
            return
        if state.leader_epoch < before.leader_epoch:
            self.anomaly("epoch-back", f"{number}: {before} and then {state}")
        if state.leader in before.eligible and state.leader not in before.isr:
            self.reached["last replica standing"] += 1
        if self._kills_at_join > self.scheduler.now and len(state.isr) > len(before.isr):
            self._kills_at_join = 0.0
            self.scheduler.after(self.chance.random() * 0.03, self._kill_leader, "killed as one joins")

    def _look(self) -> None:
        """High watermarks do not go back."""
        for machine in self.machines:
            if machine.host is not None:
                for partition in machine.host.hosted.values():
                    watermark = partition.log.high_watermark
                    if partition.log.has_high_watermark and watermark < self._watermarks.get(partition, 0):
                        text = f"{machine.name} {partition.label}: {watermark} after {self._watermarks[partition]}"
                        self.anomaly("watermark-back", text)
                    self._watermarks[partition] = watermark
        if not self.is_over:
            self.scheduler.after(_LOOK_SECONDS, self._look, "look")

    # --- faults ------------------------------------------------------------------------------------------------------

    def _make(self, fault: Fault) -> None:
        machine = self._leader() if fault.target < 0 else self.machines[fault.target]
        process = machine.process
        if self._does(fault, machine, process):
            self.faults += 1
            self.note(f"FAULT {fault.kind} of {machine.name} for {fault.seconds:.3f} s")
            if process is not None and process.is_dead and fault.is_noticed:
                self.zookeeper.expire(process)

    def _does(self, fault: Fault, machine: Machine, process: Process | None) -> bool:
        """Returns whether it was done: not to what is down, nor a loss that the settings do not survive."""
        seconds = fault.seconds
        if process is None:
            return False
        match fault.kind:
            case "kill":
                machine.kill()
                self._start_later(machine, seconds)
            case "stop at a disk step":
                machine.disk.steps_left = fault.steps
                self._start_later(machine, seconds + 1.0)
            case "loss of power" | "loss of a disk":
                if not self._survives(machine, fault.kind):
                    return False
                is_member = any(machine.number in state.isr for state in self.states.values())
                if fault.kind == "loss of power":
                    self.reached["power loss of a member"] += is_member
                    machine.lose_power(fault.keep)
                else:
                    self.reached["loss of a member's disk"] += is_member
                    machine.lose_disk()
                self._start_later(machine, seconds)
            case "clean stop":
                machine.stop()
                self._start_later(machine, seconds + 4.0)
            case "two failovers":
                machine.kill()
                self._start_later(machine, seconds + 1.0)
                self.scheduler.after(0.02 + seconds / 4, self._kill_leader, "second failover")
            case "cut off from ZooKeeper":
                self.zookeeper.cut(process, seconds)
            case "slow ZooKeeper":
                self.zookeeper.slow_until[process.name] = self.scheduler.now + seconds
            case "session expires":
                self.zookeeper.expire(process)
                self.reached["session expired"] += 1
            case "freeze":
                process.frozen_until = self.scheduler.now + seconds
            case "isolated":
                self.zookeeper.cut(process, seconds)
                for other in self.machines:
                    self._block_both(machine.name, other.name, seconds)
            case "link blocked":
                self.network.block(machine.name, self.machines[fault.other].name, seconds)
                if fault.steps % 2:
                    self._block_both(machine.name, self.machines[fault.other].name, seconds)
            case "slow links":
                for other in self.machines:
                    for way in ((machine.name, other.name), (other.name, machine.name)):
                        self.network.slow_until[way] = self.scheduler.now + seconds
            case "slow threads":
                machine.slow_until = self.scheduler.now + seconds
            case "failovers with a straggler":
                self._fail_over_with_straggler(self._leader(), self.machines[fault.other], seconds)
            case "deposed leader":
                self._depose(self._leader(), seconds)
            case "connections cut":
                self.network.drop(process)
                self.zookeeper.drop(process)
        return True

    def _fail_over_with_straggler(self, leader: Machine, straggler: Machine, seconds: float) -> None:
        """The leader dies while a follower lacks so much that it has left the set; the next one dies as it joins."""
        out = int(self.plan.settings["replica.lag.time.max.ms"]) / 1000 + 0.5
        self._block_both(leader.name, straggler.name, out)
        for other in self.machines:
            for way in ((straggler.name, other.name), (other.name, straggler.name)):
                self.network.slow_until[way] = self.scheduler.now + out + 3.0

        def first() -> None:
            self._kill_leader()
            self._kills_at_join = self.scheduler.now + 1.0 + seconds

        self.scheduler.after(out - 0.2, first, "first failover")

    def _depose(self, leader: Machine, seconds: float) -> None:
        """A leader appends what its followers do not get; then it leads no longer, and soon again."""
        alone = 0.1 + seconds / 4
        leader.slow_until = self.scheduler.now + alone
        for other in self.machines:
            self._block_both(leader.name, other.name, alone)

        def expire(machine: Machine) -> None:
            if machine.process is not None:
                self.zookeeper.expire(machine.process)

        self.scheduler.after(alone, lambda: expire(leader), "deposed")

        def again() -> None:
            if self._leader() is not leader:
                expire(self._leader())

        self.scheduler.after(alone + 0.5 + self.chance.random(), again, "leads again")

    def _block_both(self, one: str, other: str, seconds: float) -> None:
        self.network.block(one, other, seconds)
        self.network.block(other, one, seconds)

    def _start_later(self, machine: Machine, seconds: float) -> None:
        self.scheduler.after(seconds, machine.start, f"{machine.name}/start")

    def _leader(self) -> Machine:
        """That of the first partition; any if there is none."""
        state = self.states.get(0)
        return self.machines[0 if state is None else max(state.leader, 0)]

    def _kill_leader(self) -> None:
        leader = self._leader()
        process = leader.process
        if process is not None:
            leader.kill()
            self.zookeeper.expire(process)
            self._start_later(leader, 1.0)

    def _survives(self, machine: Machine, kind: str) -> bool:
        """Whether each partition has another member with all that is acknowledged. It must not have lost anything, and
        be no member by a write that is still on its way."""
        if kind == "loss of power" and self.plan.config.get("flush.messages") == "1":
            return True
        for state in self.states.values():
            members = {*state.isr, *state.eligible}
            if not any(
                not other.may_have_lost for other in self.machines if other.number in members and other is not machine
            ):
                return False
        return int(self.plan.config["min.insync.replicas"]) > 1 and bool(self.states)

    def _mend(self) -> None:
        self.network.heal()
        self.zookeeper.cut_until.clear()
        self.zookeeper.slow_until.clear()
        for machine in self.machines:
            if machine.process is not None:
                machine.process.frozen_until = 0.0
            machine.disk.steps_left = 0
            machine.start()

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self._simulated():
            try:
                self._run()
            except Exception as error:  # of a thread of a broker, or of this code
                self.anomaly("failed", f"{type(error).__name__}: {error}")
                self.log.append(traceback.format_exc())
            finally:
                scheduler = self.scheduler
                events, trace = scheduler.events, scheduler.trace
                scheduler.close()
        self.reached["late write of a state"] += self.zookeeper.late_writes
        return Outcome(self.plan.seed, events, self.faults, trace, self.anomalies, self.reached, self.log)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        handler = _Handler(self.logged)
        loggers = [logging.getLogger(name) for name in ("broker", "kafkalog")]
        before = [(each, each.level, each.propagate, each.handlers) for each in loggers]
        for each in loggers:
            each.handlers = [handler]
            each.setLevel(logging.INFO)
            each.propagate = False
        try:
            with threads(self.scheduler), sessions(self.zookeeper), self._small_staged_files():
                yield
        finally:
            for each, level, propagate, handlers in before:
                each.handlers, each.propagate = handlers, propagate
                each.setLevel(level)

    @contextmanager
    def _small_staged_files(self) -> Iterator[None]:
        size = self.plan.staged_file_bytes
        sizes: dict[str, Any] = {"_FILE_BYTES": size, "_WASTE_MAX": size // 2}
        if self.plan.adopts:
            sizes |= {"_OWN_FROM": 1, "_ADOPTED_MIN": 1, "_BATCH_MIN": 1}
        with mock.patch.multiple(staging, **sizes):
            yield

    def _run(self) -> None:
        plan, scheduler = self.plan, self.scheduler
        scheduler.switch_chance = plan.switch_chance
        self.network.latency_seconds = plan.latency_seconds
        for number in range(plan.brokers):
            settings = BrokerSettings.parse(plan.settings | {"broker.id": str(number)})
            self.machines.append(Machine(self, number, settings))
            self.machines[-1].start()
        scheduler.spawn(scheduler.process("admin"), "create", self._create_topic)
        if not scheduler.run_until(self._is_whole, _START_SECONDS):
            self.anomaly("stuck", f"at the beginning: {self._missing()}")
            return
        self._look()
        producer_ids = itertools.count(1)
        for number in range(plan.partitions):
            for which in range(2):
                name = f"producer-{number}-{which}"
                self._producers.append(Producer(self, name, number, next(producer_ids), plan.pause_seconds))
            hasty_ids = itertools.count(1000 * number + 1000)
            self._producers.append(HastyProducer(self, f"hasty-{number}", number, hasty_ids))
            if plan.stages:
                name = f"coordinator-{number}"
                self._producers.append(Coordinator(self, name, number, plan.pause_seconds * 3))
            self._readers.append(Reader(self, f"reader-{number}", number))
        begun = scheduler.now
        for fault in plan.faults:
            scheduler.after(fault.at, partial(self._make, fault), f"fault {fault.kind}")
        scheduler.run_until(lambda: False, plan.seconds)
        self.note(f"MENDED after {scheduler.now - begun:.3f} s")
        self.is_ending = True
        self._keep_mended()
        if not scheduler.run_until(self._is_settled, _MENDED_SECONDS):
            self.anomaly("stuck", self._missing())
            return
        self.is_over = True
        self._compare()
        may_repeat = [each.name for each in self._producers if isinstance(each, HastyProducer)]
        self.anomalies += check(self.history, may_repeat)

    def _keep_mended(self) -> None:
        """Faults that go on, such as a start that is due, end too."""
        self._mend()
        if not self.is_over:
            self.scheduler.after(1.0, self._keep_mended, "mend")

    def _create_topic(self) -> None:
        session = ZooKeeperSession("zk:2181")
        session.start()
        session.ensure(paths.PERMANENT)
        replicas = [tuple((number + each) % self.plan.brokers for each in range(3)) for number in range(2)]
        topic = TopicRecord(self.topic, self.topic_id, self.plan.config, replicas[: self.plan.partitions], 1)
        registry.create_topic(session, topic)
        session.close()

    def _is_whole(self) -> bool:
        """Whether every partition has a leader and all its replicas in the in-sync set."""
        return (
            self.scheduler.events % 20 == 0
            and len(self.states) == self.plan.partitions
            and all(len(state.isr) == 3 and state.leader >= 0 for state in self.states.values())
        )

    def _is_settled(self) -> bool:
        return (
            self._is_whole()
            and all(machine.is_serving for machine in self.machines)
            and all(each.is_done for each in self._producers)
            and all(self._is_read(each) for each in self._readers)
        )

    def _is_read(self, reader: Reader) -> bool:
        replicas = self._replicas(reader.number)
        ends = {(each.end_offset, each.role.high_watermark) for each in replicas}
        return len(replicas) == 3 and ends == {(reader.offset, reader.offset)}

    def _replicas(self, number: int) -> list[Partition]:
        hosts = [machine.host for machine in self.machines if machine.host is not None]
        return [found for host in hosts if (found := host.hosted.get((self.topic_id, number))) is not None]

    def _missing(self) -> str:
        """What is not as it should be at the end."""
        facts = [f"{machine.name} does not serve" for machine in self.machines if not machine.is_serving]
        facts += [f"{each.name} waits" for each in self._producers if not each.is_done]
        for reader in self._readers:
            ends = [(each.end_offset, each.role.high_watermark) for each in self._replicas(reader.number)]
            facts.append(f"{reader.name} is at {reader.offset}, the replicas have {ends}")
        return "; ".join([*facts, *(f"state of {number}: {state}" for number, state in sorted(self.states.items()))])

    def _compare(self) -> None:
        """Read each partition to its end; the replicas have the same bytes. What was deleted was read before."""
        for reader in self._readers:
            number = reader.number
            replicas = self._replicas(number)
            start_offset = max(replica.start_offset for replica in replicas)
            copies = [self._read_all(replica, start_offset) for replica in replicas]
            if len(set(copies)) > 1:
                self.anomaly("replicas-differ", f"{number}: their logs have {[len(each) for each in copies]} bytes")
            records = [each for each in reader.records if each[0] < start_offset]
            for header, _ in iter_batches(memoryview(copies[0]), "end"):
                records += [each for each in values_of(header) if each[0] >= start_offset]
            where = TopicPartition(self.topic, number)
            self.history.append(Operation(self.tick(), "end", "read", "ok", where, tuple(records)))

    @staticmethod
    def _read_all(replica: Partition, offset: int) -> bytes:
        data = b""
        while offset < replica.end_offset:
            with replica.read_as_replica(offset, 1 << 20, None) as piece:
                read = piece.read()
            data += read
            for header, _ in iter_batches(memoryview(read), "end"):
                offset = header.end_offset
        return data


class _Handler(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


def run(plan: Plan) -> Outcome:
    """Run a plan."""
    return World(plan).run()
