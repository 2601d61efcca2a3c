"""A group under torture: members come and go, are killed and stopped, brokers and ZooKeeper go away and come back, the
topic grows. What the members wrote is then checked (`history.py`)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from tests.groups import member
from tests.groups.history import SUFFIX, History, Reader, Writer
from tests.groups.member import Options
from tests.proxy import AnswerLosingProxy
from tests.threads import join_all
from tests.waiting import suspend, waited_for

GROUP, TOPIC = "g", "tortured"
SLACK = 5.0
"""How many times longer than the limits that are promised it may take on a busy machine."""
_SESSION_MS = 2000
_MOVED_MS = 3000
_READINGS = ("iterate", "poll", "consume", "arrow")


class Torture:
    """The processes of a group, and what is done to them. A context manager; `run` does it all.

    Args:
        folder: of the histories.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, seed: int, members: int, partitions: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._dice = random.Random(seed)
        self._members = members
        self._partitions = partitions
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._leaving: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[str, subprocess.Popen[bytes]] = {}
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._static: dict[str, str | None] = {}  # their static names
        self._started = 0
        self._waiting = threading.Event()
        self._writer = Writer(folder, "test")
        self._reader, self._seen = Reader(folder), History()
        self._admin = Admin(cluster.bootstrap_servers)
        self._producing = threading.Event()
        self._producer = threading.Thread(target=self._produce, name="produce")
        self._failures: list[BaseException] = []
        self._proxies = [AnswerLosingProxy(broker.grpc_port) for broker in cluster.brokers]

    def __enter__(self) -> Self:
        self._admin.create_topic(TOPIC, partitions=self._partitions)
        self._disturb(_MOVED_MS)
        self._writer.write("partitions", offset=self._partitions)
        return self

    def __exit__(self, *exception: object) -> None:
        self._producing.clear()
        for _, what in self._due:  # what is away comes back
            what()
        for process in [*self._processes.values(), *self._leaving.values(), *self._stopped.values()]:
            process.kill()
            process.wait()
        if self._producer.ident is not None:
            join_all([self._producer], 120)
        self._admin.close()
        for proxy in self._proxies:
            proxy.close()

    def _produce(self) -> None:
        dice, sent = random.Random(0), 0
        try:
            with Producer(self._cluster.bootstrap_servers, delivery_timeout_ms=300_000) as producer:
                while self._producing.is_set():
                    for _ in range(5):  # no more than the slowest members read: the end would wait for them
                        producer.send(TOPIC, str(sent).encode(), partition=dice.randrange(self._partitions))
                        sent += 1
                    self._waiting.wait(0.02)
                producer.flush()
        except BaseException as error:  # handed to the test's thread
            self._failures.append(error)

    # --- what is done

    def run(self, seconds: float) -> None:
        """Do it for so many seconds, then let the group come to rest, and end it."""
        self._producing.set()
        self._producer.start()
        for _ in range(self._members // 2):
            self._join()
        self._settle()
        actions = self._actions()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            action = self._dice.choice(actions)
            print(f"{time.monotonic():.3f} {action.__name__}")
            action()
            if self._dice.random() < 0.6:
                self._settle()
            else:
                self._pass(self._dice.random())
        while self._due:
            self._pass(0.1)
        self._settle()
        self._producing.clear()
        join_all([self._producer], 120)
        assert not self._failures, self._failures
        self._end()

    def run_kills(self, records: int, kills: int) -> None:
        """Have the group read so many records, and kill every now and then the member that has handed out the last
        ones: it has not committed them."""
        with Producer(self._cluster.bootstrap_servers) as producer:
            for number in range(records):
                producer.send(TOPIC, b"%d" % number, partition=number % self._partitions)
            producer.flush()
        for at in range(kills + 1):
            while len(self._processes) < self._members:
                self._join(pause_ms=0.2, faults=0, readings=_READINGS[:3])
            goal = records * at // (kills + 1)
            last = ""
            while self._seen.handed_out() < goal or self._any() is None or last not in self._processes:
                self._pass(0.02)
                news = self._reader.news()
                self._seen.add(news)
                last = next((event.member for event in reversed(news) if event.event == "out"), last)
            if at:
                self._kill(last)
        self._join(pause_ms=0.2, faults=0, readings=_READINGS[:3])
        self._end()

    def run_without_zookeeper(self, seconds: float) -> tuple[int, int]:
        """Suspend ZooKeeper for so long. Returns when all leases had ended, and when it was back, in nanoseconds."""
        self._producing.set()
        self._producer.start()
        for _ in range(self._members):
            self._join()
        self._settle()
        self._suspend_zookeeper(seconds)
        lapsed = time.monotonic_ns() + _SESSION_MS * 1_000_000
        while self._due:
            self._pass(0.1)
        back = time.monotonic_ns()
        self._settle()
        self._producing.clear()
        join_all([self._producer], 120)
        self._end()
        return lapsed, back

    def _end(self) -> None:
        """Wait until everything is read, and end the group."""
        ends = self._end_offsets()
        try:
            while not self._is_complete(ends):  # for as long as members get on, however slow the machine is
                gets_on = partial(self._has_more, self._seen.handed_out(), ends)
                waited_for(gets_on, 120, "not all records were handed out, and no more")
        except AssertionError:
            self._dump()
            raise
        waited_for(lambda: len(self._ready()) == len(self._processes), 60, "members do not start")
        for name in list(self._processes):
            self._leave(name)
        waited_for(self._all_left, 60, "members do not leave")

    def _actions(self) -> list[Callable[[], None]]:
        often: list[Callable[[], None]]
        often = [self._join, self._join, self._leave, self._kill, self._stall, self._lose_answers]
        return [*often, *often, self._grow, self._lose_broker, self._suspend_broker, self._suspend_zookeeper]

    def _disturb(self, milliseconds: float) -> None:
        self._writer.write("disturbed", offset=int(milliseconds * SLACK))

    def _join(
        self,
        pause_ms: float | None = None,
        faults: float | None = None,
        instance_id: str | None = None,
        readings: Sequence[str] = _READINGS,
    ) -> None:
        if len(self._processes) + len(self._stopped) >= self._members:
            self._leave()
            return
        name = f"m{self._started}"
        self._started += 1
        if instance_id is None and self._dice.random() < 0.25:
            instance_id = f"static-{name}"
        self._static[name] = instance_id
        self._disturb(_MOVED_MS)
        self._processes[name] = member.start(
            Options(
                self._cluster.bootstrap_servers,
                GROUP,
                TOPIC,
                str(self._folder),
                name,
                seed=self._dice.randrange(1 << 30),
                reading=self._dice.choice(readings),
                pause_ms=self._dice.choice((0, 2, 20)) if pause_ms is None else pause_ms,
                commit_every=self._dice.choice((0, 0, 3)),
                session_timeout_ms=_SESSION_MS,
                faults=self._dice.choice((0, 0.1, 0.3)) if faults is None else faults,
                instance_id=instance_id,
                registry=",".join(f"127.0.0.1:{proxy.port}" for proxy in self._proxies),
            )
        )

    def _any(self) -> str | None:
        """A member that has started, unless it is the only one."""
        ready = self._ready()
        return self._dice.choice(ready) if len(ready) > 1 else None

    def _ready(self) -> list[str]:
        return [name for name in self._processes if (self._folder / (name + SUFFIX)).exists()]

    def _leave(self, name: str | None = None) -> None:
        name = name or self._any()
        if name is not None:
            # A static member keeps its place until its session timeout.
            self._disturb(_MOVED_MS if self._static[name] is None else _SESSION_MS + _MOVED_MS)
            process = self._leaving[name] = self._processes.pop(name)
            process.terminate()

    def _kill(self, name: str | None = None) -> None:
        if (name := name or self._any()) is not None:
            process = self._processes.pop(name)
            self._disturb(_SESSION_MS + _MOVED_MS)
            self._writer.write("killed", member=name)
            process.kill()
            process.wait()
            if (instance_id := self._static[name]) is not None and self._dice.random() < 0.7:
                self._join(instance_id=instance_id)

    def _stall(self) -> None:
        if (name := self._any()) is not None:
            process = self._stopped[name] = self._processes.pop(name)
            seconds = self._dice.choice((0.5, 1, 2)) * _SESSION_MS / 1000 + self._dice.random()
            self._disturb(_SESSION_MS + _MOVED_MS)
            suspend(process.pid)
            self._writer.write("stopped", member=name)
            self._later(seconds, lambda: self._continue(name))

    def _continue(self, name: str) -> None:
        process = self._processes[name] = self._stopped.pop(name)
        self._disturb(_SESSION_MS + _MOVED_MS)
        self._writer.write("continued", member=name)
        process.send_signal(signal.SIGCONT)

    def _lose_answers(self) -> None:
        """What members ask about the group is executed, and the answers are lost, for a moment in which others join."""
        seconds = self._dice.random()
        self._disturb(seconds * 1000 + _SESSION_MS + _MOVED_MS)
        for proxy in self._proxies:
            proxy.is_losing.set()
            self._later(seconds, proxy.is_losing.clear)
        self._join()

    def _grow(self) -> None:
        if self._due:
            return
        self._disturb(_MOVED_MS)
        self._admin.alter_topic(TOPIC, partitions=self._partitions + 1)
        self._partitions += 1
        self._writer.write("partitions", offset=self._partitions)

    def _lose_broker(self) -> None:
        if not self._due:  # one thing at a time: there are only two
            broker = self._dice.choice(self._cluster.brokers)
            self._disturb(_SESSION_MS + _MOVED_MS)
            broker.kill()
            self._later(2.0, lambda: (self._disturb(_SESSION_MS + _MOVED_MS), broker.start()))

    def _suspend_broker(self) -> None:
        if not self._due:
            self._suspend(self._dice.choice(self._cluster.brokers).pid, 1 + 3 * self._dice.random())

    def _suspend_zookeeper(self, seconds: float = 5.0) -> None:
        if not self._due and self._cluster.zookeeper is not None:
            self._suspend(self._cluster.zookeeper.pid, seconds)

    def _suspend(self, pid: int | None, seconds: float) -> None:
        assert pid is not None
        self._disturb(seconds * 1000 + _SESSION_MS + _MOVED_MS)
        suspend(pid)

        def resume() -> None:
            self._disturb(_SESSION_MS + _MOVED_MS)
            os.kill(pid, signal.SIGCONT)

        self._later(seconds, resume)

    # --- time

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, what))

    def _pass(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        until = time.monotonic() + seconds
        while True:
            for due in [due for due in self._due if due[0] <= time.monotonic()]:
                self._due.remove(due)
                due[1]()
            self._check_processes()
            if time.monotonic() >= until:
                return
            self._waiting.wait(0.05)

    def _settle(self) -> None:
        """Wait until each partition has an owner; whether it took too long is for the history to say."""
        until = time.monotonic() + SLACK * (_SESSION_MS + _MOVED_MS) / 1000 + 10
        self._pass(0.1)
        while unowned := self._unowned():
            if time.monotonic() >= until:
                self._dump()
                raise AssertionError(f"partitions {unowned} have no owner")
            self._pass(0.1)

    def _unowned(self) -> list[int]:
        self._seen.add(self._reader.news())
        return self._seen.unowned()

    def _has_more(self, handed_out: int, ends: dict[int, int]) -> bool:
        return self._is_complete(ends) or self._seen.handed_out() > handed_out

    def _check_processes(self) -> None:
        for name, process in list(self._leaving.items()):
            if process.poll() is not None:
                del self._leaving[name]
                assert process.returncode == 0, f"{name} ended with {process.returncode}: {self._log_of(name)}"
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self._log_of(name)}"

    def _dump(self) -> None:
        """Say what is known of the group; members write it to their logs."""
        print(f"unowned: {self._unowned()}; {self._admin.describe_group(GROUP)}")
        for process in self._processes.values():
            process.send_signal(signal.SIGUSR1)
        self._waiting.wait(1.0)

    def _log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-5000:]

    def _all_left(self) -> bool:
        self._check_processes()
        return not self._leaving

    # --- the end

    def _end_offsets(self) -> dict[int, int]:
        wanted = dict.fromkeys((TopicPartition(TOPIC, number) for number in range(self._partitions)), "latest")
        found = self._admin.list_offsets(wanted)
        return {partition.partition: each.offset or 0 for partition, each in found.items()}

    def _is_complete(self, ends: dict[int, int]) -> bool:
        self._check_processes()
        self._seen.add(self._reader.news())
        return not self._seen.missing(ends)

    def check(self) -> int:
        """Assert that the history broke no rule. Returns how many records were handed out again."""
        history = History()
        history.add(Reader(self._folder).news())
        ends = self._end_offsets()
        broken = history.violations + history.missing(ends)
        again = history.handed_out() - sum(ends.values())
        print(f"{sum(ends.values())} records, {again} again, {len(broken)} violations")
        assert not broken, "\n".join(broken[:50])
        return again
