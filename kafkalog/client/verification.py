"""Compares the replicas of a partition over the wire, range by range: each broker reads the range from its disk, checks
it and sums it up. A range in which the sums differ, or some replica is damaged, is looked at again in smaller ranges.

Replicas have the same bytes up to the lowest high watermark. A replica that is behind, or whose log begins later, is
compared as far as it has the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kafkalog.client.cluster import Cluster, PartitionInfo, TopicInfo
from kafkalog.errors import KafkalogError
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb

RANGE_BYTES = 8 << 20
_ONE_ENTRY_BYTES = 1
"""A range with this limit ends at the next entry of the index: after index.interval.bytes, 64 KiB if it is not set."""
_REPAIR_WAIT_MS = 5_000
"""Of one request."""


@dataclass(frozen=True)
class ReplicaFault:
    """Offsets [start_offset, end_offset) that are wrong in a replica.

    Attributes:
        what: "damaged": the broker cannot read them. "differs": they are intact, and other than in the leader's log.
            "not checked": the broker did not answer.
        reason: why it is so, or why it could not be repaired; may be empty.
    """

    partition: TopicPartition
    broker_id: int
    what: str
    start_offset: int
    end_offset: int
    reason: str = ""


@dataclass
class VerifiedPartition:
    """What was compared of a partition.

    Attributes:
        replicas: the brokers that answered.
        bytes: of the longest replica.
    """

    partition: TopicPartition
    replicas: list[int]
    start_offset: int = 0
    end_offset: int = 0
    batches: int = 0
    bytes: int = 0
    faults: list[ReplicaFault] = field(default_factory=list)


class Verification:
    """The comparison of one partition's replicas.

    Args:
        bytes_per_second: bounds how fast each broker reads; None: not.
        advance: called with the number of bytes that were compared.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: TopicInfo,
        partition: PartitionInfo,
        bytes_per_second: float | None = None,
        advance: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._cluster = cluster
        self._topic_id = topic.topic_id
        self._number = partition.partition
        self._bytes_per_second = bytes_per_second
        self._advance = advance
        self._label = TopicPartition(topic.name, partition.partition)
        leader_first = sorted(partition.replicas, key=lambda each: each != partition.leader)
        self.found = VerifiedPartition(self._label, leader_first)

    def run(self) -> VerifiedPartition:
        """Compare all of the partition. Brokers that do not answer become faults."""
        found = self.found
        offset = 0
        while found.replicas:
            begun = time.monotonic()
            first = self._digest(found.replicas[0], offset, None, RANGE_BYTES)
            if first is None:
                continue  # the next replica goes first
            if not offset:
                found.start_offset = found.end_offset = first.start_offset
            if first.end_offset <= first.start_offset:
                break
            self._compare(first, first.start_offset, first.end_offset)
            found.end_offset = offset = first.end_offset
            found.batches += first.batches
            found.bytes += first.bytes
            self._advance(first.bytes)
            if self._bytes_per_second:
                # The rate that the caller asked for: nothing is waited for. A close of the client ends it at once.
                self._cluster.pause(max(0.0, begun + first.bytes / self._bytes_per_second - time.monotonic()))
        found.faults[:] = merged(found.faults)
        return found

    def _digest(
        self, broker_id: int, start_offset: int, end_offset: int | None, max_bytes: int
    ) -> pb.RangeDigest | None:
        """A broker's digest; None if it does not answer: then it is left out from now on."""
        request = pb.DigestRangeRequest(
            topic_id=self._topic_id,
            partition=self._number,
            start_offset=start_offset,
            end_offset=end_offset,
            max_bytes=max_bytes,
        )
        try:
            digest: pb.RangeDigest = self._cluster.call("DigestRange", request, broker_id=broker_id, patient=False)
            return digest
        except KafkalogError as error:
            self.found.replicas.remove(broker_id)
            self._fault(broker_id, "not checked", start_offset, start_offset, str(error))
            return None

    def _compare(self, first: pb.RangeDigest, start: int, end: int) -> None:
        """Compare the other replicas with the first one in a range."""
        reference, *others = list(self.found.replicas)
        digests = {reference: first}
        for broker_id in others:
            digest = self._digest(broker_id, start, end, 0)
            if digest is not None:
                digests[broker_id] = digest
        there = [digest for digest in digests.values() if digest.end_offset > digest.start_offset]
        sums = {(each.start_offset, each.end_offset, each.digest, each.batches) for each in there}
        if len(sums) > 1 or any(digest.damaged for digest in digests.values()):
            for piece_start, piece_end in self._pieces(reference, start, end):
                self._compare_piece(list(digests), piece_start, piece_end)

    def _pieces(self, broker_id: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A range in pieces as small as a broker's index allows."""
        while start < end:
            piece = self._digest(broker_id, start, None, _ONE_ENTRY_BYTES)
            to = end if piece is None else min(piece.end_offset, end)
            if to <= start:
                return
            yield start, to
            start = to

    def _compare_piece(self, broker_ids: list[int], start: int, end: int) -> None:
        good: dict[int, tuple[int, int]] = {}
        for broker_id in broker_ids:
            if broker_id not in self.found.replicas:
                continue
            digest = self._digest(broker_id, start, end, 0)
            if digest is None:
                continue
            for damage in digest.damaged:
                self._fault(broker_id, "damaged", damage.start_offset, damage.end_offset, damage.reason)
            if not digest.damaged and (digest.start_offset, digest.end_offset) == (start, end):
                good[broker_id] = digest.digest, digest.batches
        expected = next(iter(good.values()), None)
        for broker_id, found in good.items():
            if found != expected:
                self._fault(broker_id, "differs", start, end, f"from broker {next(iter(good))}")

    def _fault(self, broker_id: int, what: str, start_offset: int, end_offset: int, reason: str) -> None:
        self.found.faults.append(ReplicaFault(self._label, broker_id, what, start_offset, end_offset, reason))

    def repair(self, seconds: float) -> None:
        """Have the damaged replicas repaired from the others, and keep only the faults that are left.

        Args:
            seconds: how long to wait for each broker.
        """
        found = self.found
        for broker_id in sorted({fault.broker_id for fault in found.faults if fault.what == "damaged"}):
            left = self._repair(broker_id, seconds)
            found.faults[:] = [
                fault for fault in found.faults if fault.broker_id != broker_id or fault.what != "damaged"
            ] + left

    def _repair(self, broker_id: int, seconds: float) -> list[ReplicaFault]:
        request = pb.RepairPartitionRequest(
            topic_id=self._topic_id, partition=self._number, max_wait_ms=_REPAIR_WAIT_MS
        )
        until = time.monotonic() + seconds
        try:
            while True:
                reply: pb.RepairPartitionReply
                reply = self._cluster.call("RepairPartition", request, broker_id=broker_id, patient=False)
                if reply.done or time.monotonic() >= until:
                    break
        except KafkalogError as error:
            return [ReplicaFault(self._label, broker_id, "damaged", 0, 0, f"not repaired: {error}")]
        return [
            ReplicaFault(self._label, broker_id, "damaged", each.start_offset, each.end_offset, each.reason)
            for each in reply.damaged
        ]


def merged(faults: list[ReplicaFault]) -> list[ReplicaFault]:
    """Faults in order, each once, those of one kind that touch or overlap as one."""
    found: list[ReplicaFault] = []
    order = sorted(set(faults), key=lambda each: (each.broker_id, each.what, each.start_offset, each.end_offset))
    for each in order:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.broker_id, last.what, last.reason) == (each.broker_id, each.what, each.reason)
            and each.start_offset <= last.end_offset
        ):
            found[-1] = replace(last, end_offset=max(last.end_offset, each.end_offset))
        else:
            found.append(each)
    return found
