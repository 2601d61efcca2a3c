"""Appends, top to bottom: check what came, write all of a partition's batches at once, say what each request gets.

The same for both ports. Nothing waits here: an ack that needs a group commit is `Outcome.waits_for`, and whoever
answers asks `ack_reply` when that is met.

A batch's checksum is always checked. What the body holds is checked for codec none (Arrow's full validation, 0.2-6 us a
batch); a compressed body is not inflated here, so that no request makes the broker hold more than its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker.replica.catalog import Catalog
from broker.replica.partition import Partition
from kafkalog.errors import (
    BatchTooLarge,
    CorruptBatch,
    InternalError,
    InvalidRequest,
    KafkalogError,
    RequestTimedOut,
    UnsupportedAcks,
)
from kafkalog.format.batch import HEADER_SIZE, NO_PRODUCER, BatchHeader, body_fault, read_header
from kafkalog.format.columns import HAS_OFFSET, HAS_TIMESTAMP, decode_columns
from kafkalog.log import get_logger
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire

log = get_logger(__name__)

ACKS_NONE, ACKS_LEADER = 0, 1


class Call:
    """One append request and, once `append` has run, what became of it.

    Attributes:
        request: as it came.
        body: the batches of its partitions, one after the other; writable, for they are stamped in place.
        results: per partition of the request: (base_offset, append_timestamp_us, log_start_offset) or an error.
        waits_for: by index of the result, (partition, end_offset) that must be flushed before the ack.
    """

    __slots__ = ("body", "request", "results", "waits_for")

    def __init__(self, request: pb.AppendRequest, body: memoryview) -> None:
        self.request = request
        self.body = body
        self.results: list[tuple[int, int, int] | KafkalogError] = []
        self.waits_for: dict[int, tuple[Partition, int]] = {}

    @property
    def acks(self) -> int:
        return self.request.acks

    def is_acked(self) -> bool:
        """Whether all that the ack promises has happened."""
        return all(partition.is_acked_at(end_offset) for partition, end_offset in self.waits_for.values())

    def failed(self) -> KafkalogError | None:
        """The first error among its partitions."""
        return next((result for result in self.results if isinstance(result, KafkalogError)), None)


@dataclass(slots=True)
class _Group:
    """The batches of several calls for one partition, to be written at once."""

    batches: list[tuple[BatchHeader, memoryview]] = field(default_factory=list)
    parts: list[tuple[Call, int, int]] = field(default_factory=list)  # call, index of its result, batches


def append(calls: Sequence[Call], catalog: Catalog) -> None:
    """Append what the calls ask for, in their order for each partition, and fill in their results.

    A partition that fails fails alone: its result is the error, and nothing of that part of that call is written.
    """
    groups: dict[Partition, _Group] = {}
    for call in calls:
        try:
            _sort_in(call, catalog, groups)
        except KafkalogError as error:
            call.results = [error] * max(1, len(call.request.partitions))
    for partition, group in groups.items():
        _write(partition, group)


def _sort_in(call: Call, catalog: Catalog, groups: dict[Partition, _Group]) -> None:
    """Check a call and put its batches with those of the same partition."""
    request, body = call.request, call.body
    if request.acks not in (ACKS_NONE, ACKS_LEADER):
        reason = "there is no replication yet, so the leader's word (acks=1) is all there is"
        if request.acks != -1:
            reason = "it is 0 (no answer), 1 (the leader has it) or -1 (all replicas)"
        raise UnsupportedAcks(acks="all" if request.acks == -1 else request.acks, reason=reason)
    parts = request.partitions
    if not parts:
        raise InvalidRequest(reason="an append names no partition")
    if len(parts) == 1:
        total = parts[0].length
    else:
        total = sum(part.length for part in parts)
    if total != len(body):
        raise InvalidRequest(reason=f"an append's partitions have {total} bytes, its body {len(body)}")
    start = 0
    for part in parts:
        end = start + part.length
        index = len(call.results)
        try:
            partition = catalog.leader_of(part.topic_id, part.partition)
            batches = list(_checked(body[start:end] if total != part.length else body, partition))
        except KafkalogError as error:
            call.results.append(error)
        else:
            call.results.append(_UNWRITTEN)
            group = groups.get(partition)
            if group is None:
                group = groups[partition] = _Group()
            group.batches += batches
            group.parts.append((call, index, len(batches)))
        start = end


_UNWRITTEN = InternalError(reason="the append was not reached")


def _checked(data: memoryview, partition: Partition) -> Iterator[tuple[BatchHeader, memoryview]]:
    """(header, bytes) of each batch of a request's part. Raises CorruptBatch, BatchTooLarge, InvalidRequest."""
    position, end, label = 0, len(data), partition.label
    limit = partition.settings.max_message_bytes
    if not end:
        raise InvalidRequest(reason=f"an append to {label} has no batch")
    while position < end:
        header = read_header(data, position, label)
        if header.length > limit:
            raise BatchTooLarge(size=header.length, partition=label, limit=limit)
        if end - position < header.length:
            raise CorruptBatch(
                partition=label, offset="?", reason=f"only {end - position} of its {header.length} bytes were sent"
            )
        batch = data[position : position + header.length]
        fault = body_fault(header, batch) or _producer_fault(header)
        if fault:
            raise CorruptBatch(partition=label, offset="?", reason=fault)
        if header.codec == 0:
            decode_columns(header, batch, label)
        yield header, batch
        position += header.length


def _producer_fault(header: BatchHeader) -> str | None:
    """What is wrong with a header that is undamaged, but that no producer may send."""
    if header.last_offset_delta != header.record_count - 1:
        return "its records are not consecutive"
    if header.attributes & HAS_OFFSET:
        return "it brings offsets of its own"
    if not header.attributes & HAS_TIMESTAMP and header.min_timestamp_us != header.max_timestamp_us:
        return "it has no timestamps though they differ"
    if header.producer_id != NO_PRODUCER and (
        header.producer_id < 0 or header.producer_epoch < 0 or header.base_sequence < 0
    ):
        return f"producer {header.producer_id} gives no epoch or no sequence"
    if header.transaction_batch_id != -1 or header.part != -1:
        return "it is part of a transaction, which this broker does not know"
    if header.length < HEADER_SIZE + 8:
        return "it has no body"
    return None


def _write(partition: Partition, group: _Group) -> None:
    """Append a group, and give each call the first outcome that is an error, or where its first batch stands."""
    try:
        outcomes = partition.append_as_leader(group.batches)
    except KafkalogError as error:
        for call, index, _ in group.parts:
            call.results[index] = error
        return
    except Exception as error:  # a defect: told to the client, and logged for us
        log.exception("append_failed", partition=partition.label)
        for call, index, _ in group.parts:
            call.results[index] = InternalError(reason=f"{type(error).__name__}: {error}")
        return
    start_offset = partition.log.start_offset
    needs_flush = partition.log.needs_flush_for_ack
    position = 0
    for call, index, count in group.parts:
        mine = outcomes[position : position + count] if count != 1 else (outcomes[position],)
        position += count
        for outcome in mine:
            if isinstance(outcome, KafkalogError):
                call.results[index] = outcome
                break
        else:
            call.results[index] = (mine[0].base_offset, mine[0].append_timestamp_us, start_offset)
            if needs_flush and call.request.acks:
                call.waits_for[index] = (partition, mine[-1].end_offset)
    if needs_flush:
        partition.log.request_flush()


def ack_reply(call: Call, timed_out: bool = False) -> pb.AppendReply:
    """The answer to a call that `is_acked`, or whose time is up: then the unflushed partitions get RequestTimedOut."""
    reply = pb.AppendReply()
    for index, result in enumerate(call.results):
        if timed_out and index in call.waits_for:
            partition, end_offset = call.waits_for[index]
            if not partition.is_acked_at(end_offset):
                flush = f"the flush of {partition.label}"
                result = RequestTimedOut(what=flush, address="its disk", timeout_ms=call.request.timeout_ms)
        added = reply.partitions.add()
        if isinstance(result, KafkalogError):
            added.error.CopyFrom(error_to_wire(result))
        else:
            added.base_offset, added.append_timestamp_us, added.log_start_offset = result
    return reply
