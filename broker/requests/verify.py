"""Compares replicas: digests of ranges of a log, which the client compares, and repairs on request. Any replica
answers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

from fastcrc.crc32 import iscsi as crc32c

from broker.replica.host import Host
from broker.replica.partition import Partition
from broker.replica.scrubber import Scrubber, known_damage
from broker.storage.index import Damage
from broker.storage.reader import reach
from kafkalog.format.batch import BatchHeader
from kafkalog.wire import broker_pb2 as pb

_SUMMED = struct.Struct("<qiiqI")
"""Of each batch: offset, length, epoch, append time, and the checksum of the rest. Not the header's checksum: the
checksum of bytes and of their own checksum after them is the same whatever the bytes are."""
assert _SUMMED.size == 28
_BYTES_MAX = 8 << 20
_WAIT_SECONDS_MAX = 10.0
_DAMAGED_MAX = 1000


def digest_range(request: pb.DigestRangeRequest, host: Host) -> pb.RangeDigest:
    """Check the batches of a range, and sum them up. At most about 8 MiB if the request names no end.

    Raises:
        UnknownTopicId, UnknownPartition, NotLeader: there is no replica here.
        StorageFailed, DiskFull: the log cannot be read.
    """
    partition = host.replica_of(request.topic_id, request.partition)
    view, high_watermark = partition.log.view, partition.role.high_watermark
    start = max(request.start_offset, view.start_offset)
    if request.HasField("end_offset"):
        end = min(request.end_offset, high_watermark)
    elif start < high_watermark:
        end, _ = reach(view, start, min(request.max_bytes, _BYTES_MAX), high_watermark)
    else:
        end = high_watermark
    reply = pb.RangeDigest(
        start_offset=start,
        end_offset=max(start, end),
        log_start_offset=view.start_offset,
        high_watermark=high_watermark,
    )

    def add(header: BatchHeader) -> None:
        if start <= header.base_offset < end:
            reply.digest = crc32c(_SUMMED.pack(*header[:4], header.crc), reply.digest)
            reply.batches += 1
            reply.bytes += header.length

    for segment, base, after in zip(view.segments, view.bases, (*view.bases[1:], view.end_offset), strict=True):
        if base < end and start < after:
            for _ in partition.log.check(segment, start, end, add):
                pass
    reply.damaged.extend(
        _range_of(partition, each)
        for each in known_damage(partition)
        if each.start_offset < end and start < each.end_offset
    )
    return reply


def repair_partition(
    request: pb.RepairPartitionRequest, host: Host, scrubber: Scrubber, seconds_left: float
) -> pb.RepairPartitionReply:
    """Repair the known damage of a replica from the others. Raises as `digest_range`."""
    partition = host.replica_of(request.topic_id, request.partition)
    seconds = min(request.max_wait_ms / 1000, seconds_left, _WAIT_SECONDS_MAX)
    reply = pb.RepairPartitionReply(done=scrubber.repair_partition(partition, seconds))
    reply.damaged.extend(_range_of(*each) for each in scrubber.damaged() if each[0] is partition)
    return reply


def damaged_ranges(scrubber: Scrubber) -> Iterator[pb.DamagedRange]:
    """The known damage of every log, the first thousand ranges."""
    return (_range_of(*each) for each in islice(scrubber.damaged(), _DAMAGED_MAX))


def _range_of(partition: Partition, damage: Damage, reason: str = "") -> pb.DamagedRange:
    return pb.DamagedRange(
        topic=partition.topic,
        partition=partition.number,
        start_offset=damage.start_offset,
        end_offset=damage.end_offset,
        reason=reason,
    )
