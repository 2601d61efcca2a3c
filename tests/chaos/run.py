"""A run: the cluster and the clients of a plan, its faults, then what must hold.

1. Clients begin, and every partition takes writes.
2. Faults, step by step. During a single fault that ends what one broker leads, all partitions that enough of their
   replicas still serve must take writes within `LIVE_SECONDS`.
3. One broker is down and all else is mended: the same must hold.
4. All is mended, and all partitions must take writes. Clients end, consumers come to the end of each partition, each
   partition is read from its start to its end, and the history is checked.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from kafkalog import Admin, TopicPartition
from kafkalog.errors import KafkalogError
from tests.chaos import coverage
from tests.chaos.checker import Anomaly, check, summary
from tests.chaos.faults import Faults
from tests.chaos.history import Recorder, read
from tests.chaos.plan import MORTAL, TOPIC, Plan
from tests.chaos.servers import Servers
from tests.chaos.workload import Asking, Churning, Client, Committing, Group, Reading, Sending
from tests.reading import messages_of

LIVE_SECONDS = 30.0
"""How long a partition may take no writes although enough of its replicas serve: a session of 2 s, an election, and
what two busy cores add."""
_END_SECONDS = 180.0
_READY_SECONDS = 60.0


class Outcome(NamedTuple):
    """What a run found. `reached`: the probes of `coverage.py`."""

    operations: int
    faults: Counter[str]
    anomalies: list[Anomaly]
    reached: Counter[str]

    def text(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        reached = ", ".join(f"{name}: {count}" for name, count in sorted(self.reached.items()))
        return (
            f"{self.operations} operations, {sum(self.faults.values())} faults ({faults or 'none'}), "
            f"{len(self.anomalies)} anomalies; reached {reached or 'nothing'}"
        )


def run(plan: Plan, folder: Path, say: Callable[[str], object] = print) -> Outcome:
    """Do what a plan says, with all files in a folder.

    A client or a server that ends by itself ends the run: that is the anomaly `failure`, and its history, which has no
    end, is not checked.
    """
    say(f"seed {plan.seed}\n{plan.text()}")
    servers = Servers(folder, plan.brokers, plan.broker_settings)
    with servers, _Run(plan, folder, servers, say) as running:
        try:
            running.disturb_all()
            anomalies, is_whole = running.end(), True
        except (AssertionError, KafkalogError):
            anomalies, is_whole = [Anomaly("failure", traceback.format_exc())], False
    operations = read(folder)
    if is_whole:
        anomalies += check(operations, running.may_repeat())
    reached = coverage.of_history(operations)
    for server in servers.brokers:
        with server.log_file.open(errors="replace") as log:
            reached += coverage.of_logs(log)
    outcome = Outcome(len(operations), running.faults.happened, sorted(anomalies), reached)
    say(f"seed {plan.seed}: {outcome.text()}\n{summary(outcome.anomalies)}".rstrip())
    return outcome


class _Run:
    """The clients of a plan while it is carried out."""

    def __init__(self, plan: Plan, folder: Path, servers: Servers, say: Callable[[str], object]) -> None:
        self._plan = plan
        self._folder = folder
        self._servers = servers
        self._say = say
        self._began = time.monotonic()
        self._stack = ExitStack()
        self._anomalies: list[Anomaly] = []
        bootstrap = servers.bootstrap_servers
        self._admin = self._stack.enter_context(Admin(bootstrap, retry_timeout_ms=2000, request_timeout_ms=5000))
        self._create_topic()
        self._sending = [
            Sending(folder, f"p{number}", bootstrap, plan, settings) for number, settings in enumerate(plan.producers)
        ]
        self._reading = [
            Reading(folder, f"c{number}", bootstrap, plan, settings) for number, settings in enumerate(plan.readers)
        ]
        self._others: list[Client] = [
            Asking(folder, "ends", bootstrap, plan),
            Churning(folder, "topics", bootstrap, plan),
        ]
        self._committing = [
            Committing(folder, f"x{number}", bootstrap, plan, settings) for number, settings in enumerate(plan.writers)
        ]
        self._group = Group(folder, bootstrap, plan)
        clients = {"kill writer": self._kill_writer, "kill member": self._kill_member}
        self.faults = Faults(servers, self._admin, clients, plan.topic_settings.get("flush.messages") == "1")

    def _create_topic(self) -> None:
        self._admin.create_topic(TOPIC, partitions=self._plan.partitions, config=self._plan.topic_settings)

    def __enter__(self) -> Self:
        for client in self._threads():
            client.start()
        for writer in self._committing:
            writer.start()
        self._group.start()
        self._await_writes(range(self._plan.partitions), _READY_SECONDS, "at the beginning")
        return self

    def __exit__(self, *exception: object) -> None:
        for client in self._threads():
            client.stop()
        for writer in self._committing:
            writer.kill()
        self._group.kill()
        self._stack.close()

    def _threads(self) -> list[Client]:
        return [*self._sending, *self._reading, *self._others]

    def _note(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:7.2f} {text}")

    def may_repeat(self) -> set[str]:
        """The producers that are not idempotent."""
        return {name for each in self._sending if not each.is_idempotent for name in each.names}

    # --- faults

    def disturb_all(self) -> None:
        """The steps of the plan, and the step with one broker down."""
        for number, step in enumerate(self._plan.steps):
            self._pass(step.pause_s)
            self._group.disturb(step.hold_s + LIVE_SECONDS)
            struck = self.faults.strike(step.faults)
            self._note(f"step {number}: {', '.join(struck) or 'nothing'}")
            self._pass(step.hold_s)
            if len(step.faults) == 1 and step.faults[0].kind in MORTAL:
                self._await_writes(self.faults.served(), LIVE_SECONDS, f"in step {number}")
            self.faults.mend()
            self._group.disturb(0)
        self._with_one_down()

    def _with_one_down(self) -> None:
        spared = self._servers.brokers[self._plan.spared]
        self._group.disturb(LIVE_SECONDS)
        if spared.is_well:
            spared.kill()
            self.faults.happened["kill"] += 1
        self.faults.mend(without=spared)
        self._note(f"{spared.name} is down")
        self._await_writes(self.faults.served(), LIVE_SECONDS, f"without {spared.name}")
        self.faults.mend()
        self._group.disturb(0)

    def _kill_writer(self) -> None:
        for writer in self._committing:
            writer.kill()

    def _kill_member(self) -> None:
        self._group.kill_one()

    def _pass(self, seconds: float) -> None:
        """Let time pass; start writers again that were killed, fail if another client or server has ended."""
        until = time.monotonic() + seconds
        waiting = threading.Event()
        while True:
            self._check_all()
            if time.monotonic() >= until:
                return
            waiting.wait(0.05)

    def _check_all(self) -> None:
        self._servers.check()
        for client in self._threads():
            client.check()
        for writer in self._committing:
            writer.check()
        self._group.check()

    def _await_writes(self, partitions: Iterable[int], seconds: float, when: str) -> None:
        """Wait until each partition has acknowledged a record from now on; it is an anomaly if one does not."""
        before = self._acked()
        left = set(partitions)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            self._pass(0.05)
            now = self._acked()
            left = {number for number in left if now[number] <= before[number]}
        for number in sorted(left):
            self._anomalies.append(Anomaly("no-progress", f"{TOPIC}-{number} took no writes for {seconds} s {when}"))
            self._note(self._anomalies[-1].text)

    def _acked(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for client in self._sending:
            total += client.acked
        return total

    # --- the end

    def end(self) -> list[Anomaly]:
        """Mend everything, end the clients, and read all that there is. Returns what the history does not show."""
        self.faults.mend()
        self._await_writes(range(self._plan.partitions), LIVE_SECONDS, "after all was mended")
        for client in (*self._sending, *self._others):
            client.stop()
        for client in (*self._sending, *self._others):
            client.join(_END_SECONDS)
        for writer in self._committing:
            writer.check()
            writer.stop()
            writer.join(_END_SECONDS)
        ends = self._ends()
        self._note(f"all clients have written; the partitions end at {list(ends.values())}")
        self._read_to(ends)
        self._read_all(ends)
        return self._anomalies

    def _ends(self) -> dict[TopicPartition, int]:
        wanted = dict.fromkeys((TopicPartition(TOPIC, number) for number in range(self._plan.partitions)), "latest")
        until = time.monotonic() + LIVE_SECONDS
        while True:
            try:
                return {each: found.offset or 0 for each, found in self._admin.list_offsets(wanted).items()}
            except KafkalogError:
                if time.monotonic() > until:
                    raise

    def _read_to(self, ends: dict[TopicPartition, int]) -> None:
        """Wait until every consumer has had all records before the ends, as long as one comes nearer. What they lack
        after that, the checker finds in the history of those that assign, and here in that of the group."""
        for client in self._reading:
            client.catch_up()
        before: list[str] = []
        until = 0.0
        while lacking := self._lag(ends) + self._group.missing(ends):
            if lacking != before:
                before, until = lacking, time.monotonic() + _END_SECONDS
            elif time.monotonic() > until:
                break
            self._pass(0.1)
        for client in self._reading:
            client.stop()
        for client in self._reading:
            client.join(_END_SECONDS)
        self._group.stop()
        self._anomalies += [Anomaly("group", text) for text in self._group.violations()]
        self._anomalies += [Anomaly("unseen", f"by the group: {text}") for text in self._group.missing(ends)]
        self._anomalies += [Anomaly("unseen", text) for text in self._lag(ends)]

    def _lag(self, ends: dict[TopicPartition, int]) -> list[str]:
        return [
            f"{partition}: {client.name} has read to {client.read_to[partition]} of {end}"
            for client in self._reading
            for partition, end in ends.items()
            if client.read_to[partition] < end
        ]

    def _read_all(self, ends: dict[TopicPartition, int]) -> None:
        found = messages_of(self._servers.bootstrap_servers, TOPIC)
        with Recorder(self._folder, "end") as recorder:
            for number, messages in sorted(found.items()):
                records = [(message.offset, (message.value or b"").decode()) for message in messages]
                recorder.write("read", "ok", TopicPartition(TOPIC, number), records, number=len(records))
