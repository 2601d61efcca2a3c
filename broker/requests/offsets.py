"""Offsets of partitions led here: list them (earliest, latest, by timestamp, by bytes), and delete records before an
offset.

Nothing waits here: the caller of a listing decides by `has_news` whether to wait for more (`waits.py`)."""

from __future__ import annotations

from collections.abc import Callable

from broker.replica.host import Host
from kafkalog.errors import InvalidRequest, KafkalogError
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire


def list_offsets(
    request: pb.ListOffsetsRequest, host: Host, is_awaited: Callable[[], bool] = lambda: True
) -> pb.ListOffsetsReply:
    """Each partition's offset, in the order asked; a partition that fails has its error. A search by timestamp may take
    a millisecond, so each first looks whether the client still waits."""
    reply = pb.ListOffsetsReply()
    for wanted in request.partitions:
        if wanted.at == pb.ListOffset.TIMESTAMP and not is_awaited():
            break
        listed = reply.partitions.add()
        try:
            partition = host.leader_of(wanted.topic_id, wanted.partition)
            listed.size_bytes = partition.size_bytes
            if wanted.at == pb.ListOffset.EARLIEST:
                listed.found, listed.offset = True, partition.start_offset
            elif wanted.at == pb.ListOffset.LATEST:
                listed.found, listed.offset = True, partition.end_for_readers()
            elif wanted.at == pb.ListOffset.TIMESTAMP:
                found = partition.offset_for_timestamp(wanted.timestamp_us, wanted.from_offset)
                if found is not None:
                    listed.found = True
                    listed.offset, timestamp_us = found
                    if timestamp_us is None:
                        listed.in_batch = True
                    else:
                        listed.timestamp_us = timestamp_us
            elif wanted.at == pb.ListOffset.AFTER_BYTES:
                listed.found = True
                listed.offset, listed.size_bytes = partition.reach(wanted.from_offset, wanted.max_bytes)
            else:
                raise InvalidRequest(reason=f"unknown kind of offset {wanted.at}")
        except KafkalogError as error:
            listed.Clear()
            listed.error.CopyFrom(error_to_wire(error))
    return reply


def has_news(request: pb.ListOffsetsRequest, host: Host) -> bool:
    """Whether the end of some partition differs from its known offset, or a partition fails."""
    for wanted in request.partitions:
        try:
            if host.leader_of(wanted.topic_id, wanted.partition).readable_end_offset != wanted.known_offset:
                return True
        except KafkalogError:
            return True
    return False


def delete_records(request: pb.DeleteRecordsRequest, host: Host) -> pb.DeleteRecordsReply:
    """Delete a partition's records before an offset; -1 deletes all there are.

    Raises:
        UnknownTopicId, UnknownPartition, NotLeader.
        OffsetOutOfRange: it is past the end.
    """
    partition = host.leader_of(request.topic_id, request.partition)
    return pb.DeleteRecordsReply(log_start_offset=partition.delete_before(request.before_offset))
