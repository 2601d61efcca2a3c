"""The faults of a run under fire: what is to happen in which micro-batch, and the Spark format that makes it happen.

`FireSource` is the format kafkalog with writers that do as the product's do, and carry out the plan besides: in tasks
before and after the writing, on the driver between two calls of the commit. Each fault happens once in a run, however
often its batch is tried again: a marker file says that it did.

A row is written as `source partition|number|random|token`. The third comes from the query and the last from the attempt
of the task, so no two attempts write the same rows.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_kafkalog.datasource import KafkalogDataSource
from pyspark_kafkalog.sink import StreamWriter
from pyspark_kafkalog.write.exactly_once import task_context
from pyspark_kafkalog.write.micro_batch import micro_batch_of

FORMAT = "kafkalogfire"
FOLDER = "KAFKALOG_FIRE_FOLDER"
DRIVER = "KAFKALOG_FIRE_DRIVER"
"""Environment: the run's folder, and the number of the driver within it."""

POINTS = ("some staged", "all staged", "prepared", "decided", "half applied", "applied", "done", "committed")
"""After which a driver is killed; the last is Spark's own commit, seen from outside."""
TASK_FAULTS = ("fails", "killed", "twin", "late twin")
SLOW = "slow"
"""A task's fault where Spark speculates: it waits in its middle for its twin, which Spark starts elsewhere."""
_SLOW_S = 20


@dataclass
class Plan:
    """What happens when, by the numbers of micro-batches.

    Attributes:
        kills: batch -> the point after which the driver is killed.
        crashes: batch -> the point after which the process that commits is killed; the query fails and starts again.
        pauses: batch -> the point after which the driver pauses, and goes on when another has taken its place.
        tasks: "batch-part" -> what happens in the first attempt of that task.
    """

    kills: dict[int, str] = field(default_factory=dict)
    crashes: dict[int, str] = field(default_factory=dict)
    pauses: dict[int, str] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)

    def stops(self) -> Iterator[tuple[str, int, str]]:
        """Kind, batch and point of all that ends or holds up a driver."""
        for kind, stops in (("kill", self.kills), ("crash", self.crashes), ("pause", self.pauses)):
            for batch, point in stops.items():
                yield kind, batch, point

    def driver_events(self) -> set[str]:
        """What must have happened when a run is over."""
        return {f"{kind} {batch}" for kind, batch, _ in self.stops()}

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Plan:
        plan = json.loads((folder / "plan.json").read_text())
        kills, crashes, pauses = (
            {int(batch): point for batch, point in plan[kind].items()} for kind in ("kills", "crashes", "pauses")
        )
        return Plan(kills, crashes, pauses, plan["tasks"])


def happens(folder: Path, event: str) -> bool:
    """Whether an event is to happen now, for it has not before."""
    try:
        (folder / "happened" / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def crash_marker(folder: Path, batch: str) -> Path:
    """Says that this driver's committing process was killed in a batch; `*` for any."""
    return folder / f"crashed-{os.environ[DRIVER]}-{batch}"


class FireSource(KafkalogDataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return FireWriter(schema, self.options)


class FireWriter(StreamWriter):
    """Pickled by reference: it is imported where it runs."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as pyspark's
        folder, plan = _plan()
        context = task_context()
        micro_batch, task = micro_batch_of(context), context.partitionId()
        batch = micro_batch.batch_id
        fault = plan.tasks.get(f"{batch}-{task}")
        is_first = fault is not None and happens(folder, f"task {batch}-{task} {fault}")
        twin_of_slow = folder / "happened" / f"twin of slow {batch}-{task}"
        if fault == SLOW and not is_first:
            twin_of_slow.touch()
        fault = fault if is_first else None
        rows = list(iterator)
        token = f"{micro_batch.run_id}/{uuid.uuid4()}"
        twin = threading.Thread(target=self._write_as_twin, args=[rows, f"{token} twin"], name="twin")
        if fault in ("twin", "late twin"):
            twin.start()
        if fault == "twin":
            twin.join(120)
            assert not twin.is_alive()
        middles: dict[str, Callable[[], None]] = {SLOW: partial(_wait_for, twin_of_slow), "fails": _fail}
        message = super().write(_with_token(rows, token, middles.get(fault or "", _do_nothing)))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.kills.get(batch) == "some staged" and happens(folder, f"kill {batch}"):
            _kill_driver(folder)
        return message

    def _write_as_twin(self, rows: list[pa.RecordBatch], token: str) -> None:
        """A second attempt of the same task, which runs to its end; Spark takes the other's message."""
        super().write(_with_token(rows, token, _do_nothing))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        from kafkalog.client.cluster import Cluster

        folder, plan = _plan()
        call = Cluster.call
        stop = _Stop(folder, plan, batchId)
        first_apply, goes_on = threading.Lock(), threading.Event()

        def watched(cluster: Cluster, method: str, request: Any, **more: Any) -> Any:
            done = method == "Decide" and request.decision.done
            if method == "Decide":
                stop.at("applied" if done else "prepared")
            if method == "Apply" and stop.point == "half applied" and not first_apply.acquire(blocking=False):
                goes_on.wait()
            try:
                result = call(cluster, method, request, **more)
                if method == "Decide":
                    stop.at("done" if done else "decided")
                elif method == "Apply":
                    stop.at("half applied")
            finally:
                goes_on.set()
            return result

        stop.at("all staged")
        with mock.patch.object(Cluster, "call", watched):
            super().commit(messages, batchId)


class _Stop:
    """Where in its commit a batch ends or holds up its driver, if it still is to."""

    def __init__(self, folder: Path, plan: Plan, batch: int) -> None:
        self._folder = folder
        self._batch = batch
        self._kind = ""
        self.point: str | None = None
        for kind, number, point in plan.stops():
            if number == batch and point in POINTS[1:-1] and not (folder / "happened" / f"{kind} {batch}").exists():
                self._kind, self.point = kind, point

    def at(self, point: str) -> None:
        if point != self.point:
            return
        self.point = None
        if not happens(self._folder, f"{self._kind} {self._batch}"):
            return
        if self._kind == "kill":
            _kill_driver(self._folder)
        elif self._kind == "crash":
            crash_marker(self._folder, str(self._batch)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            (self._folder / f"paused-{os.environ[DRIVER]}").touch()
            resumes = self._folder / f"resume-{os.environ[DRIVER]}"
            never = threading.Event()
            while not resumes.exists():
                never.wait(0.02)


def _plan() -> tuple[Path, Plan]:
    folder = Path(os.environ[FOLDER])
    return folder, Plan.read(folder)


def _kill_driver(folder: Path) -> NoReturn:
    """End the driver, Java and Python, and this process, as `kill -9` does."""
    for pid in json.loads((folder / f"pids-{os.environ[DRIVER]}").read_text()):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def _do_nothing() -> None:
    pass


def _fail() -> None:
    raise RuntimeError("the task fails in its middle, as planned")


def _wait_for(path: Path) -> None:
    pause, until = threading.Event(), time.monotonic() + _SLOW_S
    while not path.exists() and time.monotonic() < until:
        pause.wait(0.02)


def _with_token(rows: list[pa.RecordBatch], token: str, middle: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    """The rows with an attempt's token at their end, in two batches for each that there is."""
    for batch in rows:
        values = pc.binary_join_element_wise(batch.column("value"), token, "|")
        marked = batch.set_column(batch.schema.get_field_index("value"), "value", values)
        half = marked.num_rows // 2
        yield marked.slice(0, half)
        middle()
        yield marked.slice(half)
