"""Clients that write their history while a cluster fails: producers, readers, one that asks for ends, a writer of
transactions and the members of a group. All but the last two are threads; those are processes, which are killed.

A value is `client-number`. A client that is replaced has a new name: nothing of the old one may come after the new
one's by the rules that the checker has.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from broker.local.guard import python_command
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.producer.delivery import Delivery
from kafkalog.errors import (
    BatchTooLarge,
    BufferExhausted,
    InvalidArgument,
    KafkalogError,
    OffsetOutOfRange,
    RecordTooLarge,
    UnknownPartition,
    UnsupportedAcks,
)
from tests.chaos.history import NO_OFFSET, Record, Recorder
from tests.chaos.plan import TOPIC, Plan
from tests.groups import history as groups
from tests.groups import member
from tests.threads import join_all
from tests.waiting import waited_for

GROUP = "chaos"
NOT_WRITTEN = (RecordTooLarge, BatchTooLarge, UnsupportedAcks, InvalidArgument, UnknownPartition, BufferExhausted)
"""Errors that say that a record is not in the log, and never will be. After all others it may be."""
_BACK_MAX = 100  # records that a reader goes back
_PENDING_MAX = 2  # rounds of one producer in one partition that are not acknowledged
_END_SECONDS = 150.0  # more than the longest delivery.timeout.ms
_GROUP_SESSION_MS = 2000
_GROUP_MOVED_MS = 3000
_SLACK = 5.0  # as for groups alone: how many times longer than promised it may take on a busy machine


def outcome_of(error: KafkalogError | None) -> str:
    """The outcome of a send that ended with this error: ok, fail (not written for certain) or info."""
    if error is None:
        return "ok"
    return "fail" if isinstance(error, NOT_WRITTEN) else "info"


class Client(ABC):
    """A thread that runs until it is stopped. Its failure is kept for `join`."""

    def __init__(self, folder: Path, name: str, seed: str) -> None:
        self.name = name
        self._folder = folder
        self._dice = random.Random(seed)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def join(self, seconds: float) -> None:
        join_all([self._thread], seconds)
        self.check()

    def check(self) -> None:
        """Raise what ended it."""
        if self._failure is not None:
            raise AssertionError(f"{self.name} failed") from self._failure

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # handed to the test's thread
            self._failure = error

    @abstractmethod
    def _run(self) -> None:
        """Work until `_stopping` is set."""


class _Round(NamedTuple):
    """Records that were sent together to a partition, with their deliveries."""

    partition: TopicPartition
    deliveries: list[tuple[str, Delivery]]

    def is_done(self) -> bool:
        return all(delivery.done() for _, delivery in self.deliveries)


class Sending(Client):
    """A producer, which is given up now and then, with what is in flight, for another one of another name.

    Attributes:
        acked: how many of its records each partition has acknowledged.
        names: of all that there were.
    """

    def __init__(self, folder: Path, name: str, servers: str, plan: Plan, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, name, f"{plan.seed} {name}")
        given = dict(settings)
        self._given_up = given.pop("given_up")
        self._settings = given
        self._servers = servers
        self._partitions = plan.partitions
        self._sent = 0
        self.acked: Counter[int] = Counter()
        self.names: list[str] = []
        self.is_idempotent = bool(given["enable_idempotence"])

    def _run(self) -> None:
        while not self._stopping.is_set():
            name = f"{self.name}.{len(self.names)}"
            self.names.append(name)
            with Recorder(self._folder, name) as recorder:
                producer = Producer(self._servers, retry_timeout_ms=120_000, **self._settings)
                pending: dict[int, deque[_Round]] = {number: deque() for number in range(self._partitions)}
                try:
                    self._send_on(producer, recorder, pending)
                finally:
                    # If it is given up, what is in flight may still arrive; at the end there is nothing.
                    with suppress(KafkalogError):
                        producer.close(timeout=0)
                for rounds in pending.values():
                    for each in rounds:
                        self._note(recorder, each)

    def _send_on(self, producer: Producer, recorder: Recorder, pending: dict[int, deque[_Round]]) -> None:
        """Send until it is to be given up, or until the end; then wait for what is in flight."""
        while not self._stopping.wait(self._dice.choice((0.0, 0.005, 0.05))):
            number = self._dice.randrange(self._partitions)
            if len(pending[number]) < _PENDING_MAX:
                pending[number].append(self._send(producer, recorder, number))
            for rounds in pending.values():
                while rounds and rounds[0].is_done():
                    self._note(recorder, rounds.popleft())
            if self._dice.random() < self._given_up:
                return
        until = time.monotonic() + _END_SECONDS
        for rounds in pending.values():
            for each in rounds:
                for _, delivery in each.deliveries:
                    delivery.exception(max(0.0, until - time.monotonic()))

    def _send(self, producer: Producer, recorder: Recorder, number: int) -> _Round:
        partition = TopicPartition(TOPIC, number)
        count = self._dice.choice((1, 1, 5, 30))
        values = [f"{recorder.client}-{each}" for each in range(self._sent, self._sent + count)]
        self._sent += count
        recorder.write("send", "invoke", partition, [(NO_OFFSET, value) for value in values])
        deliveries: list[tuple[str, Delivery]] = []
        for value in values:
            try:
                deliveries.append((value, producer.send(TOPIC, value.encode(), partition=number)))
            except KafkalogError:  # the record was not taken
                recorder.write("send", "fail", partition, [(NO_OFFSET, value)])
        return _Round(partition, deliveries)

    def _note(self, recorder: Recorder, done: _Round) -> None:
        by_outcome: dict[str, list[Record]] = {}
        for value, delivery in done.deliveries:
            error = delivery.exception()
            offset = delivery.result().offset if error is None else NO_OFFSET
            by_outcome.setdefault(outcome_of(error), []).append((offset, value))
        for outcome, records in by_outcome.items():
            recorder.write("send", outcome, done.partition, records)
        self.acked[done.partition.partition] += len(by_outcome.get("ok", ()))


class Reading(Client):
    """A consumer of all partitions, which assigns them itself. It goes on after an error where it was, and sometimes
    goes back a little, until `catch_up`.

    Attributes:
        read_to: the offset up to which it has read each partition, in one reading or in several.
    """

    def __init__(self, folder: Path, name: str, servers: str, plan: Plan, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, name, f"{plan.seed} {name}")
        given = dict(settings)
        self._reads = given.pop("reads")
        self._goes_back = given.pop("goes_back")
        self._settings = given
        self._servers = servers
        self.read_to = dict.fromkeys((TopicPartition(TOPIC, number) for number in range(plan.partitions)), 0)
        self._runs = 0
        self._handed_out_ns = 0  # when it had written the last that it was handed

    def catch_up(self) -> None:
        """From now on read on only."""
        self._goes_back = 0.0

    def _run(self) -> None:
        with Recorder(self._folder, self.name) as recorder:
            while not self._stopping.is_set():
                try:
                    with Consumer(self._servers, **self._settings) as consumer:
                        self._read_on(consumer, recorder)
                except OffsetOutOfRange as error:
                    self._note_end(error, recorder)
                except KafkalogError as error:
                    if not error.retriable:
                        raise
                    self._stopping.wait(0.2)

    def _note_end(self, error: OffsetOutOfRange, recorder: Recorder) -> None:
        """A partition ends before what was read of it: write that, for the checker, and go on from there."""
        [partition] = [each for each in self.read_to if str(each) == error.facts["partition"]]
        end = error.facts["end_offset"]
        recorder.write("latest", "ok", partition, number=end, since_ns=self._handed_out_ns)
        self.read_to[partition] = min(self.read_to[partition], end)

    def _read_on(self, consumer: Consumer, recorder: Recorder) -> None:
        starts = dict(self.read_to)
        if self._runs and self._goes_back:
            back = self._dice.choice((0, 1, _BACK_MAX))
            starts = {partition: max(0, offset - back) for partition, offset in starts.items()}
        run = f"{self.name}.{self._runs}"
        self._runs += 1
        consumer.assign(starts)
        for partition, offset in starts.items():
            recorder.write("assign", "ok", partition, number=offset, run=run)
        for records in self._batches(consumer):
            for partition, found in records.items():
                recorder.write("poll", "ok", partition, found, run=run)
                self.read_to[partition] = max(self.read_to[partition], found[-1][0] + 1)
            self._handed_out_ns = time.monotonic_ns()
            if self._stopping.is_set() or self._dice.random() < self._goes_back:
                return

    def _batches(self, consumer: Consumer) -> Iterator[dict[TopicPartition, list[Record]]]:
        """What is handed out together, perhaps nothing."""
        while True:
            found: dict[TopicPartition, list[Record]] = {}
            if self._reads == "arrow":
                for batch in consumer.arrow_batches(timeout=0.2):
                    partition = TopicPartition(batch["topic"][0].as_py(), batch["partition"][0].as_py())
                    values = [value.decode() for value in batch["value"].to_pylist()]
                    yield {partition: list(zip(batch["offset"].to_pylist(), values, strict=True))}
            else:
                polled = consumer.consume(1000, 0.2) if self._reads == "consume" else [consumer.poll(0.2)]
                for message in polled:
                    if message is not None:
                        records = found.setdefault(TopicPartition(message.topic, message.partition), [])
                        records.append((message.offset, (message.value or b"").decode()))
            yield found


class Asking(Client):
    """Asks for the latest offset of one partition after the other."""

    def __init__(self, folder: Path, name: str, servers: str, plan: Plan) -> None:
        super().__init__(folder, name, f"{plan.seed} {name}")
        self._servers = servers
        self._partitions = [TopicPartition(TOPIC, number) for number in range(plan.partitions)]

    def _run(self) -> None:
        with (
            Recorder(self._folder, self.name) as recorder,
            Admin(self._servers, retry_timeout_ms=500, request_timeout_ms=3000) as admin,
        ):
            while not self._stopping.wait(0.02):
                partition = self._dice.choice(self._partitions)
                since_ns = time.monotonic_ns()
                try:
                    offset = admin.list_offsets({partition: "latest"})[partition].offset
                except KafkalogError as error:
                    if not error.retriable:
                        raise
                    continue
                assert offset is not None
                recorder.write("latest", "ok", partition, number=offset, since_ns=since_ns)


class Churning(Client):
    """Creates topics and deletes them again, with a record in each."""

    def __init__(self, folder: Path, name: str, servers: str, plan: Plan) -> None:
        super().__init__(folder, name, f"{plan.seed} {name}")
        self._servers = servers

    def _run(self) -> None:
        made = 0
        with Admin(self._servers, retry_timeout_ms=500, request_timeout_ms=10_000) as admin:
            while not self._stopping.wait(self._dice.random() * 2):
                name = f"{self.name}-{made % 3}"
                made += 1
                try:
                    admin.create_topic(name, partitions=self._dice.choice((1, 5)))
                    with Producer(self._servers, delivery_timeout_ms=2000) as producer:
                        producer.send(name, b"short-lived")
                except KafkalogError:
                    pass  # whatever it is: the next one may succeed
                try:
                    admin.delete_topic(name)
                except KafkalogError:
                    pass


class _Process:
    """A client that is a process, which may be killed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, module: str, options: Mapping[str, Any]) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                python_command(module, json.dumps(options)), stdin=subprocess.PIPE, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, seconds: float) -> int:
        """Wait for its end; its exit code."""
        process = self._process
        assert process is not None
        waited_for(lambda: process.poll() is not None, seconds, f"{self.name} does not stop")
        self._process = None
        code: int = process.returncode
        return code

    def _said(self, code: int) -> str:
        log = (self._folder / f"{self.name}.log").read_text(errors="replace")
        return f"{self.name} ended with {code}: {log[-3000:]}"


class Committing(_Process):
    """A writer of transactions (`writer.py`), which is started again when it was killed, also by itself."""

    def __init__(self, folder: Path, name: str, servers: str, plan: Plan, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, name)
        self._options = {
            **settings,
            "servers": servers,
            "folder": str(folder),
            "name": name,
            "seed": plan.seed,
            "partitions": plan.partitions,
        }
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        self._start("tests.chaos.writer", {**self._options, "start": self._starts})

    def check(self) -> None:
        """Start it again if it was killed; fail if it ended otherwise."""
        if self._process is not None and (code := self._process.poll()) is not None:
            assert code == -signal.SIGKILL, self._said(code)
            self.start()

    def stop(self) -> None:
        """Have it end with the next batch that is in the log: then nothing of an earlier one is in doubt."""
        process = self._process
        assert process is not None and process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: `join` starts it again
            process.stdin.write(b"s")
            process.stdin.flush()

    def join(self, seconds: float) -> None:
        code = self._wait(seconds)
        if code == -signal.SIGKILL:  # by itself, on the way to its end
            self._options["kills"] = 0.0
            self.start()
            self.stop()
            code = self._wait(seconds)
        assert code == 0, self._said(code)


class Group:
    """The members of a group, which subscribe (`tests/groups/member.py`). What they do must keep the rules of groups
    (`tests/groups/history.py`); all has to be handed out at the end."""

    def __init__(self, folder: Path, servers: str, plan: Plan) -> None:
        self._folder = folder / "group"
        self._folder.mkdir()
        self._servers = servers
        self._wanted = plan.members
        self._dice = random.Random(f"{plan.seed} group")
        self._writer = groups.Writer(self._folder, "test")
        self._reader, self._history = groups.Reader(self._folder), groups.History()
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        self.disturb(0)
        self._writer.write("partitions", offset=plan.partitions if self._wanted else 0)

    def start(self) -> None:
        for _ in range(self._wanted):
            self._join()

    def _join(self) -> None:
        name = f"m{self._started}"
        self._started += 1
        options = member.Options(
            self._servers,
            GROUP,
            TOPIC,
            str(self._folder),
            name,
            seed=self._dice.randrange(1 << 30),
            reading=self._dice.choice(("iterate", "poll", "consume", "arrow")),
            pause_ms=0.0,
            commit_every=self._dice.choice((0, 3)),
            session_timeout_ms=_GROUP_SESSION_MS,
        )
        self._members[name] = member.start(options)

    def disturb(self, seconds: float) -> None:
        """From now on partitions may move, for so long and as long as groups may take."""
        limit_ms = seconds * 1000 + _GROUP_SESSION_MS + _GROUP_MOVED_MS
        self._writer.write("disturbed", offset=round(limit_ms * _SLACK))

    def kill_one(self) -> None:
        """Kill a member, and have another one join."""
        name = self._dice.choice(sorted(self._members))
        process = self._members.pop(name)
        self.disturb(0)
        self._writer.write("killed", member=name)
        process.kill()
        process.wait()
        self._join()

    def check(self) -> None:
        for name, process in self._members.items():
            assert process.poll() is None, self._said(name)

    def missing(self, ends: Mapping[TopicPartition, int]) -> list[str]:
        """The records before these offsets that were not handed out; none if the group has no members."""
        if not self._wanted:
            return []
        self._history.add(self._reader.news())
        return self._history.missing({partition.partition: offset for partition, offset in ends.items()})

    def violations(self) -> list[str]:
        self._history.add(self._reader.news())
        return self._history.violations

    def stop(self) -> None:
        """Have all members leave; fail if one does not end in order."""
        waited_for(self._all_ready, 60, "members do not start")
        self.disturb(60)
        for process in self._members.values():
            process.terminate()
        for process in self._members.values():
            process.wait(60)
        failed = [name for name, process in self._members.items() if process.returncode]
        assert not failed, "\n".join(self._said(name) for name in failed)

    def _all_ready(self) -> bool:
        return all((self._folder / (name + groups.SUFFIX)).exists() for name in self._members)

    def _said(self, name: str) -> str:
        log = (self._folder / f"{name}.log").read_text(errors="replace")
        return f"{name} ended with {self._members[name].returncode}: {log[-3000:]}"

    def kill(self) -> None:
        for process in self._members.values():
            process.kill()
            process.wait()
