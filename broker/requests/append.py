"""Appends, top to bottom: check the requests, write all of a partition's batches at once, return each one's result.

The same for both ports. Nothing here waits for an ack: `Call.waits_for` has what the ack depends on, and the port calls
`ack_reply` once the call `is_acked`.

A batch's checksum is always checked. The columns of its body are checked for codec none (`bodies.py`). A compressed
body is not inflated here, so that an append makes the broker hold no more than its own bytes. Its record count is
bounded by what max.message.bytes would hold uncompressed, because a consumer would inflate a few kilobytes to all its
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.replica.ack import Ack
from broker.replica.host import Host
from broker.replica.partition import Partition
from broker.requests.bodies import BodyCheck
from broker.storage.log import Appended
from kafkalog.errors import (
    BatchTooLarge,
    CorruptBatch,
    InternalError,
    InvalidRequest,
    KafkalogError,
    RequestTimedOut,
    UnsupportedAcks,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import (
    HEADER_SIZE,
    NO_PRODUCER,
    NO_TRANSACTION,
    Batch,
    BatchHeader,
    iter_batches,
    read_header,
)
from kafkalog.format.columns import DELTA_MAX, HAS_OFFSET, HAS_TIMES, HAS_TIMESTAMP_DELTA
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire

log = get_logger(__name__)

ACKS_NONE, ACKS_LEADER, ACKS_ALL = 0, 1, -1
_ACK_TIMEOUT_MS = 30_000
_RECORD_MIN = 4  # bytes that a record takes uncompressed, whatever it holds: its place in the value column's offsets
_WRITTEN = memoryview(b"")
_BODIES = BodyCheck()


class Call:
    """One append request and, after `append`, its results.

    Attributes:
        correlation_id: of the request, for the port.
        deadline: when the ack is given up, by the port's clock; set by the port.
        held_bytes: about how much memory it holds until it is answered; set by the port.
        request: as received.
        acks: the request's.
        body: the batches of its partitions, one after the other; writable, because they are stamped in place; released
            when written.
        results: per partition of the request: (base_offset, append_timestamp_us, log_start_offset) or an error.
        waits_for: by index of the result, what the ack waits for.
    """

    __slots__ = ("acks", "body", "correlation_id", "deadline", "held_bytes", "request", "results", "waits_for")

    def __init__(self, request: pb.AppendRequest, body: memoryview, correlation_id: int = 0) -> None:
        self.correlation_id = correlation_id
        self.deadline = 0.0
        self.held_bytes = 0
        self.request = request
        self.acks: int = request.acks
        self.body = body
        self.results: list[tuple[int, int, int] | KafkalogError] = []
        self.waits_for: dict[int, Ack] | None = None

    @property
    def timeout_ms(self) -> int:
        """How long its ack may wait."""
        return ack_timeout_ms(self.request.timeout_ms)

    def is_acked(self) -> bool:
        """Whether the ack's promise is kept, or can no longer be kept; the result is then that error."""
        waits_for = self.waits_for
        if waits_for:
            for index, ack in list(waits_for.items()):
                try:
                    if not ack.is_kept():
                        return False
                except KafkalogError as error:
                    self.results[index] = _kept(error)
                del waits_for[index]
        return True

    def waiting_at(self) -> list[Partition]:
        """The partitions whose flush or followers are waited for."""
        return [ack.partition for ack in self.waits_for.values()] if self.waits_for else []

    def failed(self) -> KafkalogError | None:
        """The first error among its partitions."""
        return next((result for result in self.results if isinstance(result, KafkalogError)), None)


@dataclass(slots=True)
class _Group:
    """The batches of several calls for one partition, to be written at once."""

    needs_replicas: bool
    batches: list[tuple[BatchHeader, memoryview]] = field(default_factory=list)
    parts: list[tuple[Call, int, int]] = field(default_factory=list)  # call, index of its result, batches


def ack_timeout_ms(asked: int) -> int:
    """How long an ack may wait, by what a request says (0: nothing)."""
    return min(asked or _ACK_TIMEOUT_MS, _ACK_TIMEOUT_MS)


Groups = dict[tuple[Partition, bool], _Group]
"""What some calls bring, checked, by partition and whether acks=all; to be written."""


def append(calls: Sequence[Call], host: Host) -> None:
    """Append the calls' batches, in their order for each partition, and fill in the results.

    A failure affects one partition of one call: its result is the error, and nothing of that part is written.
    """
    write(calls, check(calls, host))


def check(calls: Sequence[Call], host: Host) -> Groups:
    """The first half of `append`: all work for the processor, without waits for locks or disks."""
    groups: Groups = {}
    for call in calls:
        try:
            _sort_in(call, host, groups)
        except KafkalogError as error:
            call.results = [_kept(error)] * max(1, len(call.request.partitions))
    return groups


def write(calls: Sequence[Call], groups: Groups) -> None:
    """The second half of `append`: waits for the logs' locks, and for their disk."""
    for (partition, _), group in groups.items():
        _write(partition, group)
    for call in calls:
        call.body = _WRITTEN  # a view would keep a buffer that was given back


def _sort_in(call: Call, host: Host, groups: Groups) -> None:
    """Check a call and put its batches with those of the same partition."""
    request, body = call.request, call.body
    if call.acks not in (ACKS_NONE, ACKS_LEADER, ACKS_ALL):
        reason = "it must be 0 (no answer), 1 (the leader has it) or -1 (all in-sync replicas have it)"
        raise UnsupportedAcks(acks=call.acks, reason=reason)
    parts = request.partitions
    if len(parts) == 1:
        part = parts[0]
        if part.length != len(body):
            raise _wrong_length(part.length, body)
        _add(call, part, body, host, groups)
        return
    if not parts:
        raise InvalidRequest(reason="an append names no partition")
    total = sum(part.length for part in parts)
    if total != len(body):
        raise _wrong_length(total, body)
    start = 0
    for part in parts:
        _add(call, part, body[start : start + part.length], host, groups)
        start += part.length


def _wrong_length(total: int, body: memoryview) -> InvalidRequest:
    return InvalidRequest(reason=f"an append's partitions have {total} bytes, but its body has {len(body)}")


_UNWRITTEN = InternalError(reason="the append was not executed")


def _add(call: Call, part: pb.AppendPartition, data: memoryview, host: Host, groups: Groups) -> None:
    """Check one partition's batches, and put them with those of other calls."""
    results = call.results
    try:
        partition = host.leader_of(part.topic_id, part.partition)
        batches = checked(data, partition)
    except KafkalogError as error:
        results.append(_kept(error))
        return
    except Exception as error:
        results.append(_defect(error, f"partition {part.partition}"))
        return
    key = partition, call.acks == ACKS_ALL
    group = groups.get(key)
    if group is None:
        group = groups[key] = _Group(key[1])
    group.batches += batches
    group.parts.append((call, len(results), len(batches)))
    results.append(_UNWRITTEN)


def checked(data: memoryview, partition: Partition, *, staged: bool = False) -> list[Batch]:
    """(header, bytes) of each batch of a request's part, which are those of a transaction or of none.

    Raises:
        CorruptBatch, BatchTooLarge, InvalidRequest.
    """
    label, limit = partition.label, partition.settings.max_message_bytes
    if not data:
        raise InvalidRequest(reason=f"a request for {label} has no batch")
    batches = []
    length = 0
    for header, batch in iter_batches(data, label, is_stamped=False):
        if header.length > limit:
            raise BatchTooLarge(size=header.length, partition=label, limit=limit)
        fault = _producer_fault(header, staged)
        if fault:
            raise CorruptBatch(partition=label, reason=fault)
        if header.codec == 0:
            _BODIES.check(header, batch, label)
        elif header.record_count > limit // _RECORD_MIN:
            reason = f"a compressed batch for {label} has {header.record_count} records, too many for {limit} bytes"
            raise InvalidRequest(reason=reason)
        batches.append((header, batch))
        length += header.length
    if length < len(data):
        whole = read_header(data, length, label).length
        reason = f"only {len(data) - length} of its {whole} bytes were sent"
        raise CorruptBatch(partition=label, reason=reason)
    return batches


def _producer_fault(header: BatchHeader, staged: bool) -> str | None:
    """Why a producer may not send an undamaged header; None if it may."""
    (_, length, _, _, _, _, _, _, attributes, _, record_count, last_offset_delta, min_timestamp_us, max_timestamp_us,
     producer_id, producer_epoch, base_sequence, batch_id, part) = header  # fmt: skip
    if last_offset_delta != record_count - 1:
        return "its records are not consecutive"
    if attributes & HAS_OFFSET:
        return "it has its own offsets; only the leader assigns offsets"
    if min_timestamp_us != max_timestamp_us and not attributes & HAS_TIMES:
        return "its smallest and largest timestamps differ, but it has no column of timestamps"
    if attributes & HAS_TIMESTAMP_DELTA:
        if attributes & HAS_TIMES != HAS_TIMESTAMP_DELTA:
            return "it has timestamps and deltas of timestamps; it may have one of them"
        if max_timestamp_us - min_timestamp_us > DELTA_MAX:
            return f"its timestamps span {max_timestamp_us - min_timestamp_us} us, too much for deltas of 32 bits"
    if producer_id != NO_PRODUCER and (producer_id < 0 or producer_epoch < 0 or base_sequence < 0):
        return f"producer {producer_id}, epoch {producer_epoch} and sequence {base_sequence} must all be >= 0"
    if length == HEADER_SIZE:
        return "it has no body"
    if not staged:
        if batch_id == part == NO_TRANSACTION:
            return None
        return f"it has transaction batch {batch_id} and part {part}; send it as a stage request, not as an append"
    if batch_id < 0 or part < 0 or producer_id == NO_PRODUCER:
        return f"a staged batch needs producer id, batch id and part >= 0, not {producer_id}, {batch_id} and {part}"
    return None


def _write(partition: Partition, group: _Group) -> None:
    """Append a group, and give each call its first error, or the place of its first batch."""
    try:
        epoch, outcomes = partition.append_as_leader(group.batches, group.needs_replicas)
    except KafkalogError as error:
        for call, index, _ in group.parts:
            call.results[index] = _kept(error)
        return
    except Exception as error:
        defect = _defect(error, partition.label)
        for call, index, _ in group.parts:
            call.results[index] = defect
        return
    start_offset = partition.start_offset
    position = 0
    for call, index, count in group.parts:
        first = last = outcomes[position]
        if count > 1:
            mine = outcomes[position : position + count]
            last = mine[-1]
            first = next((outcome for outcome in mine if isinstance(outcome, KafkalogError)), first)
        position += count
        if isinstance(first, KafkalogError):
            call.results[index] = first
            continue
        call.results[index] = (first.base_offset, first.append_timestamp_us, start_offset)
        if call.acks:
            assert isinstance(last, Appended)
            ack = partition.ack_of(last.end_offset, epoch, group.needs_replicas)
            if ack is not None:
                if call.waits_for is None:
                    call.waits_for = {}
                call.waits_for[index] = ack


def _kept(error: KafkalogError) -> KafkalogError:
    """An error to be kept as a result: without its traceback, whose frames hold the call and the call's body."""
    return error.fresh()


def _defect(error: Exception, partition: str) -> InternalError:
    """An error of the broker itself: returned to the client, and logged with its traceback."""
    log.exception("append_failed", partition=partition)
    return InternalError.of(error)


def _late(
    result: tuple[int, int, int] | KafkalogError, ack: Ack, timeout_ms: int
) -> tuple[int, int, int] | KafkalogError:
    """A partition's result when the time is up. Those behind the first whose ack is late were not looked at."""
    try:
        if ack.is_kept():
            return result
    except KafkalogError as error:
        return _kept(error)
    what, address = f"the fdatasync of {ack.partition.label}", "the broker's disk"
    if ack.needs_replicas:
        what, address = f"the in-sync replicas' copy of {ack.partition.label}", "the other brokers"
    return RequestTimedOut(what=what, address=address, timeout_ms=timeout_ms)


def ack_reply(call: Call) -> pb.AppendReply:
    """The answer to a call that `is_acked`, or whose time is up: partitions whose ack's promise is not kept then get
    RequestTimedOut."""
    reply = pb.AppendReply()
    for index, result in enumerate(call.results):
        if call.waits_for and index in call.waits_for:
            result = _late(result, call.waits_for[index], call.timeout_ms)
        added = reply.partitions.add()
        if isinstance(result, KafkalogError):
            added.error.CopyFrom(error_to_wire(result))
        else:
            added.base_offset, added.append_timestamp_us, added.log_start_offset = result
    return reply
