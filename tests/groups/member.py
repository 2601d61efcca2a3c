"""A member of a group as a process of its own: reads, commits, and writes its history. `Options` says how.

`faults` of its requests are as a network or a suspended broker makes them: the answer is lost, or the request is given
up and executed later. Proxies before the brokers (`registry`) lose answers too.

Ends in order on SIGTERM: `close` is called by the signal's handler, above whatever runs.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow as pa

from broker.local.guard import python_command
from kafkalog import Consumer, Message, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer.brokers import Brokers
from kafkalog.errors import Closed, NotOwner, RequestTimedOut
from kafkalog.wire import broker_pb2 as pb
from tests.groups.history import Writer

Run = tuple[int, int, int]
"""Consecutive records: partition, offset, end_offset."""

_CHANGES = ("JoinGroup", "ClaimPartitions", "ReleasePartitions", "CommitOffsets", "LeaveGroup", "RenewMember")


class Options(NamedTuple):
    """How a member reads.

    Attributes:
        folder, name: of its history.
        reading: iterate, poll, consume or arrow.
        pause_ms: that the processing of what was handed out takes at most.
        commit_every: commits itself after so many hand-outs; 0: auto-commit.
        faults: the share of its requests that go wrong.
        instance_id: its static name.
        registry: the brokers to ask for what concerns the group first; empty: those that there are.
    """

    bootstrap_servers: str
    group: str
    topic: str
    folder: str
    name: str
    seed: int = 0
    reading: str = "iterate"
    pause_ms: float = 1.0
    commit_every: int = 0
    session_timeout_ms: int = 2000
    assignor: str = "sticky"
    faults: float = 0.0
    instance_id: str | None = None
    registry: str = ""


def start(options: Options) -> subprocess.Popen[bytes]:
    """Start a member; its log is beside its history."""
    with Path(options.folder, f"{options.name}.log").open("ab") as output:
        return subprocess.Popen(
            python_command("tests.groups.member", json.dumps(options._asdict())),
            stdin=subprocess.PIPE,
            stderr=output,
            stdout=output,
        )


class _Requests:
    """Writes the commits of the membership to the history, and lets requests go wrong."""

    def __init__(self, writer: Writer, options: Options) -> None:
        self._writer = writer
        self._faults = options.faults
        self._dice = random.Random(options.seed)
        self._lock = threading.Lock()  # guards the dice
        self._ask: Callable[..., Any] = Brokers.ask

    def ask(self, brokers: Brokers, method: str, request: Any, seconds: float | None = None) -> Any:
        offsets = _offsets_in(request)
        if offsets:
            self._writer.write_all("committing", offsets)
        reply = self._answered(brokers, method, request, seconds)
        if offsets:
            self._writer.write_all("committed", offsets)
        return reply

    def _answered(self, brokers: Brokers, method: str, request: Any, seconds: float | None) -> Any:
        with self._lock:
            thrown, delay = self._dice.random(), self._dice.random()
        if method not in _CHANGES or thrown >= self._faults:
            return self._ask(brokers, method, request, seconds)
        if thrown >= self._faults / 2:
            copy = type(request).FromString(request.SerializeToString())
            late = threading.Timer(delay, self._execute_late, (brokers, method, copy))
            late.daemon = True
            late.start()
        else:
            self._ask(brokers, method, request, seconds)
        raise RequestTimedOut(what=method, address="a broker", timeout_ms=0)

    def _execute_late(self, brokers: Brokers, method: str, request: Any) -> None:
        try:
            self._ask(brokers, method, request)
        except Exception:  # nobody waits for it
            pass


def _offsets_in(request: Any) -> list[Run]:
    """The offsets that a request commits."""
    if isinstance(request, pb.CommitOffsetsRequest):
        return [(each.partition, each.offset, 0) for each in request.offsets]
    if isinstance(request, pb.ReleasePartitionsRequest):
        return [(each.partition, each.offset, 0) for each in request.claims if each.HasField("offset")]
    return []


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> int:
    options = Options(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    dice = random.Random(options.seed)
    ended = threading.Event()
    consumer = Consumer(
        options.bootstrap_servers,
        group=options.group,
        client_id=options.name,
        session_timeout_ms=options.session_timeout_ms,
        heartbeat_interval_ms=options.session_timeout_ms // 4,
        auto_commit_interval_ms=300,
        enable_auto_commit=not options.commit_every,
        auto_offset_reset="earliest",
        partition_assignment_strategy=options.assignor,
        group_instance_id=options.instance_id,
    )

    def end(*_: object) -> None:
        ended.set()
        consumer.close(timeout=10)

    signal.signal(signal.SIGTERM, end)
    writer = Writer(Path(options.folder), options.name)  # from now on it ends in order
    requests = _Requests(writer, options)

    def dump(*_: object) -> None:
        """For the log: where the threads are, and what is known of the membership."""
        faulthandler.dump_traceback()
        print(vars(consumer._membership), flush=True)

    signal.signal(signal.SIGUSR1, dump)

    def assigned(reader: Consumer, partitions: list[TopicPartition]) -> None:
        writer.write_all("assigned", [(p.partition, reader.position(p), 0) for p in partitions])

    def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
        writer.write_all("revoked", [(p.partition, 0, 0) for p in partitions])

    def lost(_: Consumer, partitions: list[TopicPartition]) -> None:
        writer.write_all("lost", [(p.partition, 0, 0) for p in partitions])

    def connections(brokers: Brokers) -> Cluster:
        if not options.registry:
            return new_connections(brokers)
        patience_ms = options.session_timeout_ms // 4
        return Cluster(options.registry, connect_timeout_ms=patience_ms, request_timeout_ms=patience_ms)

    new_connections = Brokers._new_connections
    with (
        patch.object(Brokers, "ask", lambda *given: requests.ask(*given)),
        patch.object(Brokers, "_new_connections", connections),
    ):
        try:
            consumer.subscribe(options.topic, on_assigned=assigned, on_revoked=revoked, on_lost=lost)
        except Closed:
            assert ended.is_set()
            return 0
        last: dict[int, int] = {}
        for number, runs in enumerate(_read(consumer, options, ended), 1):
            # Between a hand-out and its line the consumer may be closed: then the records are not processed.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            if ended.is_set():
                break
            writer.write_all("out", runs)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            last = {partition: end_offset for partition, _, end_offset in runs}
            ended.wait(dice.random() * options.pause_ms / 1000)  # the application's work; a signal ends it
            if ended.is_set():
                break
            if options.commit_every and number % options.commit_every == 0:
                _commit(consumer, writer, options.topic, last, ended)
            writer.write_all("back", [(partition, end_offset, 0) for partition, end_offset in last.items()])
    return 0


def _commit(consumer: Consumer, writer: Writer, topic: str, last: Mapping[int, int], ended: threading.Event) -> None:
    """Commit what was handed out last: it is processed."""
    offsets = [(partition, end_offset, 0) for partition, end_offset in last.items()]
    writer.write_all("back", offsets)
    writer.write_all("committing", offsets)
    try:
        consumer.commit({TopicPartition(topic, partition): offset for partition, offset, _ in offsets})
    except NotOwner:
        return  # others go on from the last commit
    except Closed:
        assert ended.is_set()
        return
    writer.write_all("committed", offsets)


def _read(consumer: Consumer, options: Options, ended: threading.Event) -> Iterator[list[Run]]:
    """What is handed out together, until the consumer is closed."""
    if options.reading == "iterate":
        for message in consumer:
            yield _runs([message])
    elif options.reading == "arrow":
        yield from map(_runs_of_arrow, consumer.arrow_batches())
    else:
        try:
            while not ended.is_set():
                if options.reading == "consume":
                    yield _runs(consumer.consume(50, 0.2))
                elif (polled := consumer.poll(1.0)) is not None:
                    yield _runs([polled])
        except Closed:  # between the look and the call
            assert ended.is_set()


def _runs(messages: Iterable[Message]) -> list[Run]:
    runs: list[Run] = []
    for message in messages:
        if runs and runs[-1][0] == message.partition and runs[-1][2] == message.offset:
            runs[-1] = (message.partition, runs[-1][1], message.offset + 1)
        else:
            runs.append((message.partition, message.offset, message.offset + 1))
    return runs


def _runs_of_arrow(batch: pa.RecordBatch) -> list[Run]:
    partition, offsets = batch.column("partition")[0].as_py(), batch.column("offset").to_pylist()
    runs = []
    for _, group in itertools.groupby(enumerate(offsets), lambda each: each[1] - each[0]):
        listed = [offset for _, offset in group]
        runs.append((partition, listed[0], listed[-1] + 1))
    return runs


if __name__ == "__main__":
    sys.exit(main())
