"""A writer of transactions as a process of its own, as Spark's sink is: tasks stage rows, and the driver commits the
batch. It is killed and started again, and then writes the last batch again with other values, as Spark runs its last
micro-batch again. So each attempt can be told from the others in the log.

It also kills itself: after one of its requests was answered, by chance. When a byte comes on standard input it ends
with the next batch that is known to be in the log.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from kafkalog import TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import parse_producer
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome, TransactionCoordinator
from kafkalog.client.transaction.stager import PartStager, StagedPartition
from kafkalog.errors import CommitTimedOut, KafkalogError
from tests.chaos.history import NO_OFFSET, Recorder, read_client
from tests.chaos.plan import TOPIC

_STEPS = ("Prepare", "Decide", "Apply")
_SETTINGS = {"delivery_timeout_ms": 10_000, "transaction_commit_timeout_ms": 10_000}
_IN_LOG = (("commit", "ok"), ("batch", "ok"))


class Options(NamedTuple):
    """How it writes.

    Attributes:
        rows, tasks: of a batch: rows of a task for each partition, and tasks.
        kills: after which share of the requests of a commit it kills itself.
        start: how often it was started under its name.
    """

    servers: str
    folder: str
    name: str
    seed: int
    partitions: int
    rows: int
    tasks: int
    kills: float
    start: int


class _Mortal(Cluster):
    """Kills this process after some of its requests."""

    dice: random.Random
    kills: float

    def call(self, method: str, request: Any, **how: Any) -> Any:
        answer = super().call(method, request, **how)
        if method in _STEPS and self.dice.random() < self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class _Writer:
    def __init__(self, options: Options, cluster: Cluster, recorder: Recorder) -> None:
        self._options = options
        self._cluster = cluster
        self._settings = parse_producer(_SETTINGS)
        self._coordinator = TransactionCoordinator(cluster, self._settings)
        self._recorder = recorder
        self._attempts = 0

    def write(self, batch: int) -> bool:
        """Write a batch; False if it is not known to be in the log: then it is to be written again."""
        run = f"{self._options.name}.{self._options.start}.{self._attempts}"
        self._attempts += 1
        rows = [self._rows(run, batch, task) for task in range(self._options.tasks)]
        outcome, is_in_log = self._attempt(batch, rows)
        self._recorder.write("commit", outcome, number=batch, run=run)
        if is_in_log:
            self._recorder.write("batch", "ok", number=batch, run=run)
        return is_in_log

    def _rows(self, run: str, batch: int, task: int) -> list[tuple[int, str]]:
        """A task's rows as (partition, value); written to the history as begun."""
        rows = []
        for number in range(self._options.partitions):
            values = [f"{run}.{task}.{number}-{each}" for each in range(self._options.rows)]
            records = [(NO_OFFSET, value) for value in values]
            self._recorder.write("stage", "invoke", TopicPartition(TOPIC, number), records, batch, run)
            rows += [(number, value) for value in values]
        return rows

    def _attempt(self, batch: int, rows: list[list[tuple[int, str]]]) -> tuple[str, bool]:
        """Stage and commit. Returns the outcome of the attempt, and whether the batch is known to be in the log."""
        parts: list[StagedPartition] = []
        try:
            for task, of_task in enumerate(rows):
                parts += self._stage(batch, task, of_task)
        except KafkalogError as error:
            print(f"batch {batch} is not staged: {error}", flush=True)
            return "fail", False
        try:
            name = f"chaos-{self._options.name}"
            staged = CommitBatch(name, batch, f"run-{self._options.start}", True, b"", parts)
            outcome = self._coordinator.commit(staged)
        except CommitTimedOut as error:
            print(f"batch {batch} is not committed: {error}", flush=True)
            decided = error.facts["decided"]
            return ("fail" if decided == "no" else "info"), decided == "yes"
        return ("ok" if outcome is Outcome.COMMITTED else "fail"), True

    def _stage(self, batch: int, task: int, rows: list[tuple[int, str]]) -> list[StagedPartition]:
        table = pa.table(
            {
                "value": pa.array([value.encode() for _, value in rows], pa.binary()),
                "partition": pa.array([number for number, _ in rows], pa.int32()),
            }
        )
        with PartStager(self._cluster, self._settings, f"chaos-{self._options.name}", batch, task) as stager:
            stager.stage({TOPIC: table})
            return stager.finish()


def _next_batch(folder: Path, name: str) -> int:
    """The first batch that is not known to be in the log."""
    done = [each.number for each in read_client(folder, name) if (each.what, each.outcome) in _IN_LOG]
    return max(done, default=-1) + 1


def _listen(stopping: threading.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        os._exit(1)  # the parent has ended
    stopping.set()


def main() -> int:
    options = Options(**json.loads(sys.argv[1]))
    stopping = threading.Event()
    threading.Thread(target=_listen, args=[stopping], daemon=True).start()
    cluster = _Mortal(options.servers, retry_timeout_ms=5_000, bootstrap_timeout_ms=60_000)
    cluster.dice = random.Random(f"{options.seed} {options.name} {options.start}")
    cluster.kills = options.kills
    batch = _next_batch(Path(options.folder), options.name)
    with Recorder(Path(options.folder), options.name) as recorder:
        writer = _Writer(options, cluster, recorder)
        is_in_log = False
        while not (is_in_log and stopping.is_set()):
            is_in_log = writer.write(batch)
            batch += is_in_log
            stopping.wait(0.05)
    cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
