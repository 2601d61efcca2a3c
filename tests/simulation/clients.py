"""Simulated clients: producers that send a batch again until its outcome is known, and readers. They write the history
that `tests/chaos/checker.py` checks.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from kafkalog.errors import KafkalogError, OffsetOutOfRange, RetriableError
from kafkalog.format.batch import iter_batches
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames
from tests.chaos.history import NO_OFFSET, Operation
from tests.simulation.batches import batch_of, values, values_of
from tests.simulation.machine import Answered
from tests.simulation.network import Connection
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_ACK_MS = 6000
_REQUEST_SECONDS = (1.0, 7.0)
ACKS_ALL, ACKS_LEADER = -1, 1
_DELETES, _DELETES_AMONG = 0.2, 10


class Client:
    """A client of one partition: finds its leader, whom it never believes to have gone back."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.partition = TopicPartition(world.topic, number)
        self.process: Process = world.scheduler.process(name)
        self.chance = random.Random(f"{world.scheduler.seed} {name}")
        self.is_done = False
        self._request_seconds = self.chance.choice(_REQUEST_SECONDS)
        self._leader, self._epoch = -1, -1
        self._connections: dict[int, Connection] = {}
        world.scheduler.spawn(self.process, "run", self._main)

    def _main(self) -> None:
        self.run()
        self.is_done = True

    def run(self) -> None:
        raise NotImplementedError

    def find_leader(self) -> None:
        """Ask the brokers that can be reached. Their views may be old."""
        for machine in self.world.machines:
            host = machine.host
            topic = host.metadata.topics.get(self.world.topic) if host is not None else None
            state = topic.states.get(self.number) if topic is not None else None
            if state is not None and state.leader_epoch > self._epoch:
                self._leader, self._epoch = state.leader, state.leader_epoch

    def call(self, request: Any) -> Any:
        """Ask the leader. Raises BrokerUnreachable, RequestTimedOut: it is not known whether it was executed."""
        if self._leader < 0:
            self.find_leader()
        leader = max(self._leader, 0)
        try:
            connection = self._connections.get(leader)
            if connection is None:
                machine = self.world.machines[leader]
                connection = self.world.connect(self.process, machine, machine.serve)
                self._connections[leader] = connection
            connection.send(request)
            return connection.receive(self._request_seconds)
        except KafkalogError:
            broken = self._connections.pop(leader, None)
            if broken is not None:
                broken.cut()
            raise

    def pause(self) -> None:
        """Before a request is sent again."""
        self.world.scheduler.sleep(0.02 + self.chance.random() * 0.2)
        self.find_leader()

    def record(self, what: str, outcome: str, records: list[tuple[int, str]], number: int = 0, run: str = "") -> None:
        time_ns = self.world.tick()
        self.world.history.append(
            Operation(time_ns, self.name, what, outcome, self.partition, tuple(records), number, run)
        )


class Producer(Client):
    """Sends batches with acks=all, each until it is acknowledged."""

    def __init__(self, world: World, name: str, number: int, producer_id: int, pause_seconds: float) -> None:
        self.producer_id = producer_id
        self._pause_seconds = pause_seconds
        super().__init__(world, name, number)

    def run(self) -> None:
        sequence = 0
        while not self.world.is_ending or not sequence:
            count = self.chance.randint(1, 3)
            sent = values(self.producer_id, sequence, count)
            self.record("send", "invoke", [(NO_OFFSET, value) for value in sent])
            if not self._send(batch_of(self.producer_id, sequence, count), sent):
                return
            sequence += count
            self.world.scheduler.sleep(self.chance.expovariate(1 / self._pause_seconds))

    def _send(self, batch: bytes, sent: list[str]) -> bool:
        """Returns False if the producer cannot go on."""
        request = append_request(self.world.topic_id, self.number, batch, ACKS_ALL)
        while True:
            try:
                reply = self.call((request, batch)).partitions[0]
                if not reply.HasField("error"):
                    offsets = range(reply.base_offset, reply.base_offset + len(sent))
                    self.record("send", "ok", list(zip(offsets, sent, strict=True)))
                    return True
                raise frames.error_from_wire(reply.error)
            except RetriableError as error:
                self.world.retries[type(error).__name__] += 1
            except KafkalogError as error:
                self.world.anomaly("refused", f"{sent} of {self.partition} with acks=all: {error}")
                return False
            self.pause()


class HastyProducer(Client):
    """Sends each batch once, with acks=1: it may be lost. Each has a producer of its own."""

    def __init__(self, world: World, name: str, number: int, producer_ids: itertools.count[int]) -> None:
        self._producer_ids = producer_ids
        super().__init__(world, name, number)

    def run(self) -> None:
        while not self.world.is_ending:
            producer_id = next(self._producer_ids)
            self.record("send", "invoke", [(NO_OFFSET, value) for value in values(producer_id, 0, 1)])
            batch = batch_of(producer_id, 0, 1)
            try:
                reply = self.call((append_request(self.world.topic_id, self.number, batch, ACKS_LEADER), batch))
                if reply.partitions[0].HasField("error"):
                    self.find_leader()
            except KafkalogError:
                self.find_leader()
            self.world.scheduler.sleep(self.chance.expovariate(1.5))


def append_request(topic_id: bytes, number: int, batch: bytes, acks: int) -> pb.AppendRequest:
    part = pb.AppendPartition(topic_id=topic_id, partition=number, length=len(batch))
    return pb.AppendRequest(acks=acks, timeout_ms=_ACK_MS, partitions=[part])


class Reader(Client):
    """Reads from the first offset to the end, and goes on. It may delete what it has read.

    Attributes:
        offset: the next one.
        records: that it was handed.
    """

    def __init__(self, world: World, name: str, number: int) -> None:
        self.offset = 0
        self.records: list[tuple[int, str]] = []
        super().__init__(world, name, number)

    def run(self) -> None:
        self.record("assign", "ok", [], 0, self.name)
        while not self.world.is_over:
            try:
                self.read()
                if self.world.plan.deletes and self.records and self.chance.random() < _DELETES:
                    self.delete()
            except OffsetOutOfRange:  # a new leader does not know yet up to where the last one let readers read
                self.pause()
            except KafkalogError:
                self.pause()
            self.world.scheduler.sleep(self.chance.random() * 0.4)

    def read(self) -> None:
        """Raises KafkalogError."""
        part = pb.FetchPartition(topic_id=self.world.topic_id, partition=self.number, offset=self.offset)
        request = pb.FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=1 << 20, partitions=[part])
        answered = self.call(pb.RequestHeader(fetch=request))
        if isinstance(answered, KafkalogError):
            raise answered
        assert isinstance(answered, Answered)
        fetched = answered.reply.partitions[0]
        if fetched.HasField("error"):
            raise frames.error_from_wire(fetched.error)
        records = []
        for header, _ in iter_batches(memoryview(answered.body), self.name):
            records += [(offset, value) for offset, value in values_of(header) if offset >= self.offset]
            self.offset = header.end_offset
        if records:
            self.records += records
            self.record("poll", "ok", records, 0, self.name)

    def delete(self) -> None:
        """Delete up to some record of the last ones, also amid a batch. Raises KafkalogError."""
        offset, _ = self.chance.choice(self.records[-_DELETES_AMONG:])
        answered = self.call(
            bpb.DeleteRecordsRequest(topic_id=self.world.topic_id, partition=self.number, before_offset=offset)
        )
        if isinstance(answered, KafkalogError):
            raise answered
