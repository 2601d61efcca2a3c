"""Runs a streaming query under fire and checks what came out of it.

A query copies an input topic of four partitions into an output topic of four, with a fixed number of rows in each
micro-batch, while by a plan tasks fail, drivers and brokers are killed, and drivers that were replaced go on. Whenever
a driver ends before its work is done the next one, which was started beforehand, goes on from the checkpoint. A
consumer reads the output all along.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from tests.pyspark_kafkalog.fire.faults import DRIVER, FOLDER, POINTS, TASK_FAULTS, Plan
from tests.reading import messages_of
from tests.threads import join_all
from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[3]
PARTITIONS = 4
ROWS = 8
"""Of one micro-batch from one partition; half of them are a record batch of their own."""
INPUT, OUTPUT, WARM = "fire-in", "fire-out", "fire-warm"
RESUMED_AFTER = 3
"""Micro-batches that a driver's replacement commits before the driver goes on."""

Record = tuple[int, bytes]
"""Offset and value."""


@dataclass
class Scenario:
    """What a run does.

    Attributes:
        broker_kills: numbers of micro-batches after whose commit a broker is killed and started again.
        by: the format's sink, or write_stream, where the process that commits is the driver's.
    """

    batches: int
    plan: Plan
    broker_kills: list[int] = field(default_factory=list)
    delivery: str = "exactly-once"
    by: str = "format"
    spark: dict[str, str] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        seed: int,
        batches: int,
        *,
        kills: Sequence[str] = POINTS,
        crashes: Sequence[str] = (),
        pauses: int = 0,
        broker_kills: int = 1,
        task_faults: Sequence[str] = TASK_FAULTS,
        **more: Any,
    ) -> Scenario:
        """Drivers killed, and committing processes, once after each of these points, a number of drivers paused, and a
        fault in every eighth task or so."""
        dice = random.Random(seed)
        chosen = dice.sample(range(1, batches - RESUMED_AFTER - 2), len(kills) + len(crashes) + pauses)
        plan = Plan(
            kills={chosen.pop(): point for point in kills},
            crashes={chosen.pop(): point for point in crashes},
            pauses={batch: dice.choice(POINTS[1:-1]) for batch in chosen},
            tasks={
                f"{batch}-{part}": dice.choice(task_faults)
                for batch in range(batches)
                for part in range(PARTITIONS)
                if dice.random() < 0.12
            },
        )
        return cls(batches, plan, sorted(dice.sample(range(batches - 1), broker_kills)), **more)


class Job:
    """A Spark driver in a process of its own. `say` is told what it does."""

    def __init__(self, config: dict[str, Any], number: int) -> None:
        self.number = number
        self._folder = Path(config["folder"])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYSPARK_PYTHON": sys.executable,
            FOLDER: config["folder"],
            DRIVER: str(number),
        }
        self._errors = (self._folder / f"stderr-{number}").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pyspark_kafkalog.fire.job", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._folder,
            env=environment,
        )

    def go(self) -> None:
        """Start the query, as soon as Spark is there."""
        assert self._process.stdin and self._process.stdout
        line = self._process.stdout.readline()
        assert line == b"ready\n", (self._folder / f"stderr-{self.number}").read_text()[-3000:]
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """As `kill -9`: Java and Python."""
        for pid in json.loads((self._folder / f"pids-{self.number}").read_text()):
            os.kill(pid, 9)

    @property
    def paused(self) -> bool:
        return (self._folder / f"paused-{self.number}").exists()

    def resume(self) -> None:
        (self._folder / f"resume-{self.number}").touch()

    @property
    def failure(self) -> str:
        path = self._folder / f"failure-{self.number}"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()  # at which it ends, wherever it is
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Reader:
    """Reads the output from its start on, in a thread, and holds it to offsets without a hole."""

    def __init__(self, servers: str, poll: Callable[[], bool]) -> None:
        self.seen: dict[int, list[Record]] = {partition: [] for partition in range(PARTITIONS)}
        self.failure: BaseException | None = None
        self._servers = servers
        self._goes_on = poll
        self._thread = threading.Thread(target=self._read, name="reader")
        self._thread.start()

    def _read(self) -> None:
        try:
            with Consumer(self._servers, retry_timeout_ms=120_000) as consumer:
                consumer.assign({TopicPartition(OUTPUT, partition): "earliest" for partition in self.seen})
                while self._goes_on():
                    for message in consumer.messages(timeout=0.2):
                        records = self.seen[message.partition]
                        assert message.offset == len(records), f"offset {message.offset} after {len(records) - 1}"
                        records.append((message.offset, message.value or b""))
        except BaseException as error:  # for the test's thread
            self.failure = error

    def join(self) -> None:
        join_all([self._thread], 120)
        if self.failure is not None:
            raise self.failure


@dataclass
class Outcome:
    """What came out of a run.

    Attributes:
        output: the records of each partition, read when all was over.
        seen: the same as the reader had seen them while it went on.
        failures: why drivers failed that others had replaced.
        starts: of drivers.
    """

    output: dict[int, list[Record]]
    seen: dict[int, list[Record]]
    failures: list[str]
    starts: int
    happened: set[str]


def run(scenario: Scenario, folder: Path, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run a scenario in a cluster of its own."""
    (folder / "happened").mkdir()
    scenario.plan.write(folder)
    with LocalCluster(brokers=2) as cluster:
        _fill_input(cluster.bootstrap_servers, scenario.batches)
        config = {
            "servers": cluster.bootstrap_servers,
            "input": INPUT,
            "output": OUTPUT,
            "warm": WARM,
            "checkpoint": str(folder / "checkpoint"),
            "folder": str(folder),
            "batches": scenario.batches,
            "rows_per_batch": ROWS * PARTITIONS,
            "partitions": PARTITIONS,
            "delivery": scenario.delivery,
            "by": scenario.by,
            "spark": scenario.spark,
        }
        return _Run(scenario, cluster, config, say).outcome()


def _fill_input(servers: str, batches: int) -> None:
    with Admin(servers) as admin:
        for topic in (INPUT, OUTPUT):
            admin.create_topic(topic, partitions=PARTITIONS)
        admin.create_topic(WARM)
    rows = pa.array([b""] * (batches * ROWS), pa.binary())
    with Producer(servers) as producer:
        for partition in range(PARTITIONS):
            producer.send_arrow(INPUT, pa.RecordBatch.from_pydict({"value": rows}), partition=partition)


class _Run:
    def __init__(
        self, scenario: Scenario, cluster: LocalCluster, config: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._config = config
        self._say = say
        self._folder = Path(config["folder"])
        self._commits = Path(config["checkpoint"], "commits")
        self._jobs: list[Job] = []
        self._restarting: list[threading.Thread] = []
        self._failures: list[str] = []
        self._zombies: list[tuple[Job, int]] = []
        self._standby: Job | None = None
        self._began_after = -1
        self._expected_starts = 1 + len(scenario.plan.kills) + len(scenario.plan.pauses)

    def outcome(self) -> Outcome:
        over = threading.Event()
        reader = Reader(self._cluster.bootstrap_servers, lambda: not over.is_set())
        try:
            self._drive()
            output = self._read_all()
            waited_for(lambda: reader.failure is not None or _lengths(reader.seen) == _lengths(output), 60)
        finally:
            over.set()
            for job in self._jobs:
                job.close()
            join_all(self._restarting, 120)
            reader.join()
        happened = {path.name for path in (self._folder / "happened").iterdir()}
        return Outcome(output, reader.seen, self._failures, len(self._jobs), happened)

    def _drive(self) -> None:
        kills_by_commit = {batch for batch, point in self._scenario.plan.kills.items() if point == "committed"}
        broker_kills = list(self._scenario.broker_kills)
        job = self._next()
        pause = threading.Event()
        while True:
            pause.wait(0.01)
            committed = self._committed()
            self._start_follower(committed)
            if broker_kills and committed >= broker_kills[0]:
                self._restart_broker(broker_kills.pop(0))
            for zombie, batch in self._zombies[:]:
                if committed >= batch + RESUMED_AFTER:
                    self._zombies.remove((zombie, batch))
                    self._let_go_on(zombie)
            if due := {batch for batch in kills_by_commit if committed >= batch}:
                kills_by_commit -= due
                (self._folder / "happened" / f"kill {due.pop()}").touch()
                job.kill()
                waited_for(lambda: job.poll() is not None, 30)  # noqa: B023
            code = job.poll()
            if job.paused:
                self._say(f"driver {job.number} pauses after batch {committed}")
                self._zombies.append((job, committed))
                job = self._next()
            elif code == 0:
                assert not self._zombies, "the query ended before its zombies went on"
                return
            elif code is not None:
                assert code == -9, f"driver {job.number} ended with {code}: {job.failure}{self._errors_of(job)}"
                self._say(f"driver {job.number} was killed after batch {committed}")
                job = self._next()

    def _new_job(self) -> Job:
        job = Job(self._config, len(self._jobs))
        self._jobs.append(job)
        return job

    def _next(self) -> Job:
        """Let the driver begin that was started to follow, or one that is started now."""
        job, self._standby = self._standby or self._new_job(), None
        job.go()
        self._began_after = self._committed()
        return job

    def _start_follower(self, committed: int) -> None:
        """Start the driver that is to follow; not while the one that runs now starts itself."""
        if self._standby is None and committed > self._began_after and len(self._jobs) < self._expected_starts:
            self._standby = self._new_job()

    def _committed(self) -> int:
        """The last batch that Spark has committed, -1 before the first."""
        if not self._commits.exists():
            return -1
        return max((int(path.name) for path in self._commits.iterdir() if path.name.isdecimal()), default=-1)

    def _let_go_on(self, zombie: Job) -> None:
        zombie.resume()
        waited_for(lambda: zombie.poll() is not None, 60)
        assert zombie.poll() == 3, f"the replaced driver ended with {zombie.poll()}{self._errors_of(zombie)}"
        self._failures.append(zombie.failure)
        self._say(f"driver {zombie.number}, which was replaced, failed")

    def _restart_broker(self, number: int) -> None:
        broker = self._cluster.brokers[number % len(self._cluster.brokers)]
        self._say(f"broker {broker.broker_id} is killed after batch {number}")

        def restart() -> None:
            broker.kill()
            broker.start()

        thread = threading.Thread(target=restart, name="restart broker")
        thread.start()
        self._restarting.append(thread)

    def _errors_of(self, job: Job) -> str:
        return (self._folder / f"stderr-{job.number}").read_text()[-2000:]

    def _read_all(self) -> dict[int, list[Record]]:
        join_all(self._restarting, 120)
        return {
            partition: [(message.offset, message.value or b"") for message in messages]
            for partition, messages in messages_of(self._cluster.bootstrap_servers, OUTPUT).items()
        }


def _lengths(records: dict[int, list[Record]]) -> list[int]:
    return [len(records[partition]) for partition in sorted(records)]


# --- what must hold --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the output: where it came from, and which attempt wrote it."""

    partition: int
    number: int
    run: str
    attempt: str

    @classmethod
    def parsed(cls, value: bytes) -> Row:
        partition, number, _, token = value.decode().split("|")
        run, attempt = token.split("/")
        return cls(int(partition), int(number), run, attempt)

    @property
    def batch(self) -> int:
        return self.number // ROWS


def check_reader(outcome: Outcome) -> None:
    """What the reader saw is what is there, at offsets without a hole, and never changed."""
    for partition, records in outcome.output.items():
        assert [offset for offset, _ in records] == list(range(len(records)))
        assert outcome.seen[partition] == records


def duplicates_and_losses(outcome: Outcome, batches: int) -> tuple[int, int]:
    """How many rows are there more than once, and how many not at all."""
    counts = Counter((row.partition, row.number) for row in rows_of(outcome))
    wanted = {(partition, number) for partition in range(PARTITIONS) for number in range(batches * ROWS)}
    assert counts.keys() <= wanted, "rows that nobody wrote"
    return sum(count > 1 for count in counts.values()), len(wanted - counts.keys())


def rows_of(outcome: Outcome) -> Iterable[Row]:
    return (Row.parsed(value) for records in outcome.output.values() for _, value in records)


def check_exactly_once(outcome: Outcome, batches: int) -> None:
    """Every row once and in order; each batch in one piece, as one attempt had it."""
    assert duplicates_and_losses(outcome, batches) == (0, 0)
    runs: dict[int, set[str]] = defaultdict(set)
    attempts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for partition, records in outcome.output.items():
        rows = [Row.parsed(value) for _, value in records]
        assert all(row.number % PARTITIONS == partition for row in rows)
        order = [(row.batch, row.partition, row.number) for row in rows]
        assert order == sorted(order), f"partition {partition} is not in the order of batches, tasks and rows"
        for row in rows:
            runs[row.batch].add(row.run)
            attempts[row.batch, row.partition].add(row.attempt)
    assert all(len(of_batch) == 1 for of_batch in runs.values()), "a batch of several runs"
    assert all(len(of_task) == 1 for of_task in attempts.values()), "a task's rows of several attempts"
