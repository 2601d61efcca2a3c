"""A simulated coordinator of exactly-once writes: stages the parts of a batch, prepares them as a set, decides, and
applies the set until it is done, each by the brokers' own requests. What it decides is in its memory, and it never
fails.

What was acknowledged must survive: a part that is lost after the ack of all of it is an anomaly.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from kafkalog.errors import KafkalogError, RetriableError, StagedOutOfOrder
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames
from kafkalog.wire import transactions_pb2 as tpb
from tests.chaos.history import NO_OFFSET
from tests.simulation.batches import staged_batch, staged_values
from tests.simulation.clients import Client

if TYPE_CHECKING:
    from tests.simulation.world import World

_ACK_MS = 3000
_PARTS_OF_ATTEMPT = 10
StagedRequest = tuple[pb.StageRequest, bytes] | tpb.PrepareRequest | tpb.ApplyRequest | tpb.ForgetStagedRequest


class Part(NamedTuple):
    """A part: its batches, and what is said of it."""

    uuid: bytes
    number: int
    batches: list[bytes]
    values: list[str]


class Lost(Exception):
    """The attempt has to begin again."""


class Coordinator(Client):
    """Writes batches of its transaction to one partition."""

    def __init__(self, world: World, name: str, number: int, pause_seconds: float) -> None:
        self._id = name
        self._producer_id = producer_id_of(name)
        self._pause_seconds = pause_seconds
        super().__init__(world, name, number)

    def run(self) -> None:
        batch_id = 0
        while not self.world.is_ending or not batch_id:
            attempt = 0
            while not self._attempt(batch_id, attempt):
                attempt += 1
            self.record("batch", "ok", [], batch_id)
            batch_id += 1
            self.world.scheduler.sleep(self.chance.expovariate(1 / self._pause_seconds))

    def _attempt(self, batch_id: int, attempt: int) -> bool:
        """Write a batch. Returns False if it has to be written again."""
        run = f"{self.name}/{batch_id}.{attempt}"
        parts = [
            self._part(batch_id, _PARTS_OF_ATTEMPT * attempt + number) for number in range(self.chance.randint(1, 2))
        ]
        values = [(NO_OFFSET, value) for part in parts for value in part.values]
        self.record("stage", "invoke", values, batch_id, run)
        self.record("commit", "invoke", [], batch_id, run)
        commit = random.Random(run).randbytes(16)
        try:
            for part in parts:
                self._stage(part)
            self._prepare(parts, batch_id, commit)
        except Lost:
            self.record("commit", "fail", [], batch_id, run)
            return False
        if self.chance.random() < 0.15:  # it decides for another attempt
            self.record("commit", "fail", [], batch_id, run)
            self._hint(tpb.ForgetStagedRequest(commit_uuid=commit, below_version=1, partitions=[self._place()]))
            return False
        self._apply(batch_id, commit)
        self.record("commit", "ok", [], batch_id, run)
        self._hint(
            tpb.ForgetStagedRequest(
                transactional_id=self._id, batch_id=batch_id, partitions=[self._place()], stays=True
            )
        )
        return True

    def _part(self, batch_id: int, number: int) -> Part:
        count = self.chance.randint(1, 3)
        batches = [staged_batch(self._producer_id, batch_id, number, index) for index in range(count)]
        values = [
            value for index in range(count) for value in staged_values(self._producer_id, batch_id, number, index)
        ]
        return Part(self.chance.randbytes(16), number, batches, values)

    def _place(self) -> Any:
        return tpb.TransactionPartition(topic_id=self.world.topic_id, partition=self.number)

    def _stage(self, part: Part) -> None:
        """Raises Lost."""
        index = acked = 0
        while index < len(part.batches):
            batch = part.batches[index]
            place = pb.StagePartition(
                topic_id=self.world.topic_id, partition=self.number, uuid=part.uuid, length=len(batch)
            )
            request = pb.StageRequest(partitions=[place], timeout_ms=_ACK_MS)
            try:
                self._until_answered((request, batch))
                index = acked = index + 1
            except StagedOutOfOrder as error:  # a new leader does not have what was not acknowledged
                index = error.facts["expected"]
                if index < acked:
                    self.world.anomaly("staged-lost", f"{part.uuid.hex()} of {self._id}: {index} < {acked}, {error}")
                    raise Lost from None

    def _prepare(self, parts: list[Part], batch_id: int, commit: bytes) -> None:
        specs = [
            tpb.StagedPart(
                uuid=part.uuid,
                part=part.number,
                batches=len(part.batches),
                length=sum(len(each) for each in part.batches),
            )
            for part in parts
        ]
        place = tpb.PreparePartition(topic_id=self.world.topic_id, partition=self.number, parts=specs)
        self._until_answered(
            tpb.PrepareRequest(
                transactional_id=self._id,
                producer_id=self._producer_id,
                batch_id=batch_id,
                commit_uuid=commit,
                version=0,
                partitions=[place],
            )
        )

    def _apply(self, batch_id: int, commit: bytes) -> None:
        self._until_answered(
            tpb.ApplyRequest(
                transactional_id=self._id,
                producer_id=self._producer_id,
                batch_id=batch_id,
                commit_uuid=commit,
                partitions=[self._place()],
            )
        )

    def _until_answered(self, request: StagedRequest) -> Any:
        """Ask until the partition has no error and is done. Raises Lost, StagedOutOfOrder."""
        while True:
            try:
                reply = self.call(request)
                if isinstance(reply, KafkalogError):
                    raise reply
                [answer] = reply.partitions
                if answer.HasField("error"):
                    raise frames.error_from_wire(answer.error)
                if not getattr(answer, "unfinished", False):
                    return answer
            except StagedOutOfOrder:
                raise
            except RetriableError as error:
                self.world.retries[type(error).__name__] += 1
            except KafkalogError as error:
                self.world.anomaly("staged-lost", f"{type(request).__name__} of {self._id}: {error}")
                raise Lost from None
            self.pause()

    def _hint(self, request: StagedRequest) -> None:
        try:
            self.call(request)
        except KafkalogError:
            self.find_leader()
