"""Finds the first record at or after a timestamp. A broker finds its batch, by the headers; the record is found here.

One request to a leader fetches the batches of all its partitions, one of each, checked and decoded as in a consumer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer.decode import ArrowBuilder, Decoded
from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch, decode, split_body
from kafkalog.client.link import Link
from kafkalog.errors import CorruptBatch, KafkalogError, OffsetOutOfRange, ProtocolError
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire, frame_start

_BATCHES_AT_ONCE = 500  # in one request, so that a broker can put them into one answer
_AFTER_A_MISS_BYTES = 1 << 20
"""Batches that are searched if the first one has no such record. 4,000 small batches whose headers state a maximum that
is too late took 19 s with a request for each, and take 1.4 s with this."""


class BatchAt(NamedTuple):
    """A batch that a broker named: the one with this offset. The timestamp is searched for from this offset on."""

    topic_id: bytes
    offset: int
    timestamp_us: int


class RecordAt(NamedTuple):
    """A record's offset and timestamp."""

    offset: int
    timestamp_us: int


def first_records(
    cluster: Cluster, batches: Mapping[TopicPartition, BatchAt]
) -> dict[TopicPartition, RecordAt | int | KafkalogError]:
    """For each batch the first record at or after the timestamp, in it or in those that closely follow it; or the
    offset up to which there is none; or the partition's error, which is OffsetOutOfRange if the batch was deleted.

    Raises:
        LeaderNotAvailable, UnknownTopicId: a partition has no leader, or its topic was created again.
        BrokerUnreachable, RequestTimedOut, NotLeader: a leader did not answer, or will not. It is asked once.
    """
    by_leader: dict[int, list[PartitionFetch]] = {}
    for partition, at in batches.items():
        _, leader = cluster.leader_of(partition, at.topic_id)
        by_leader.setdefault(leader.broker_id, []).append(PartitionFetch(partition, at.topic_id, at.offset))
    found: dict[TopicPartition, RecordAt | int | KafkalogError] = {}
    for broker_id, fetches in by_leader.items():
        found |= _look(cluster, broker_id, fetches, batches, 1)  # one whole batch of each
        missed = [fetch for fetch in fetches if isinstance(found[fetch.topic_partition], int)]
        for partition, outcome in _look(cluster, broker_id, missed, batches, _AFTER_A_MISS_BYTES).items():
            if not isinstance(outcome, OffsetOutOfRange):  # else no batch follows
                found[partition] = outcome
    return found


def _look(
    cluster: Cluster,
    broker_id: int,
    fetches: Sequence[PartitionFetch],
    batches: Mapping[TopicPartition, BatchAt],
    max_bytes: int,
) -> dict[TopicPartition, RecordAt | int | KafkalogError]:
    """`first_records` of one leader, in the batches that fetches of `max_bytes` return."""
    found: dict[TopicPartition, RecordAt | int | KafkalogError] = {}
    left = list(fetches)
    while left:  # batches that did not fit into one answer are requested again
        answers = _fetch(cluster, broker_id, left[:_BATCHES_AT_ONCE], max_bytes)
        if not answers:
            break  # nothing follows yet
        for partition, taken in answers.items():
            found[partition] = _first_record(taken, batches[partition].timestamp_us, partition)
        left = [fetch for fetch in left if fetch.topic_partition not in found]
    return found


def _first_record(
    batches: Sequence[FetchedBatch] | KafkalogError, timestamp_us: int, partition: TopicPartition
) -> RecordAt | int | KafkalogError:
    if isinstance(batches, KafkalogError):
        return batches
    try:
        for batch in batches:
            if batch.header.max_timestamp_us >= timestamp_us:
                record = first_record_at(batch, timestamp_us, partition)
                if record is not None:
                    return record
    except CorruptBatch as error:
        return error
    return batches[-1].header.end_offset


def first_record_at(batch: FetchedBatch, timestamp_us: int, partition: TopicPartition) -> RecordAt | None:
    """The first wanted record of a batch at or after a timestamp, or None.

    Raises:
        CorruptBatch: the body does not match the header.
    """
    columns = decode(batch, partition)
    records = ArrowBuilder(partition).build([Decoded(batch.header, columns, batch.start_offset)])
    timestamps = records.column("timestamp").view(pa.int64())
    number: int = pc.greater_equal(timestamps, timestamp_us).index(True).as_py()
    if number < 0:
        return None
    return RecordAt(records.column("offset")[number].as_py(), timestamps[number].as_py())


def _fetch(
    cluster: Cluster, broker_id: int, fetches: Sequence[PartitionFetch], max_bytes: int
) -> dict[TopicPartition, Sequence[FetchedBatch] | KafkalogError]:
    """The batches, or errors, for some fetches from one leader: as many as fit into one answer, at least one."""
    link: Link[None] = Link(cluster.borrow_data(broker_id))
    try:
        header = pb.RequestHeader(correlation_id=link.next_id())
        for fetch in fetches:
            fetch.ask(header.fetch, max_bytes)
        link.began(header.correlation_id, None)
        link.connection.send([frame_start(header.SerializeToString(), 0)])
        cluster.await_answer(broker_id, link.connection, fetches[0].topic_partition)
        reply, body = link.connection.receive()
        link.request_of(reply)
        if reply.HasField("error"):
            raise error_from_wire(reply.error)
        answers = reply.fetch.partitions
        found = {
            fetch.topic_partition: taken
            for fetch, answer, data in zip(fetches, answers, split_body(reply.fetch, body), strict=True)
            if (taken := _taken(fetch, answer, data)) is not None
        }
        if not found and max_bytes == 1:  # each asked for a batch that the broker has named
            raise ProtocolError(address=link.connection.address, reason="an answer without a batch")
    except BaseException:
        link.lose()
        raise
    cluster.give_back(broker_id, link.connection)
    return found


def _taken(
    fetch: PartitionFetch, answer: pb.FetchedPartition, data: memoryview
) -> Sequence[FetchedBatch] | KafkalogError | None:
    """A partition's part of an answer; None: its batch did not fit."""
    offset = fetch.offset
    try:
        batches = fetch.take(answer, data)
    except KafkalogError as error:
        return error
    if batches:
        return batches
    if offset < answer.end_offset:
        return None
    return OffsetOutOfRange(
        offset=offset,
        partition=str(fetch.topic_partition),
        start_offset=answer.log_start_offset,
        end_offset=answer.end_offset,
    )
