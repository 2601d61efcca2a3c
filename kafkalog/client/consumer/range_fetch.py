"""Fetches a range of one partition; sends the next request before it hands out a batch. Used by Spark."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import pyarrow as pa

from kafkalog.client.admin import list_offsets
from kafkalog.client.cluster import BrokerInfo, Cluster, longest_pause
from kafkalog.client.complaints import Complaint
from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch, decode
from kafkalog.client.link import Link
from kafkalog.errors import (
    CorruptBatch,
    DataLost,
    KafkalogError,
    OffsetNotAvailable,
    OffsetOutOfRange,
    ProtocolError,
    RetriableError,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import BatchHeader
from kafkalog.records import TopicPartition
from kafkalog.retry import Retry
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire, frame_start

log = get_logger(__name__)

FETCH_BYTES = 4 << 20
_WAIT_MS = 500
# Bytes in the first request of a range: enough for most ranges, and little for a range of a few records, whose answer
# would otherwise contain all that follows it in the log. The answers show how large records are.
_FIRST_BYTES = 64 << 10
_GUESSED_RECORD_BYTES = 1 << 10


class LeaderHint(NamedTuple):
    """A partition's topic id and leader, as found earlier: a fetch with a hint needs no metadata request first."""

    topic_id: bytes
    broker: BrokerInfo


def fetch_range(
    cluster: Cluster,
    partition: TopicPartition,
    topic_id: bytes | None,
    start_offset: int,
    end_offset: int,
    *,
    max_bytes: int = FETCH_BYTES,
    hint: LeaderHint | None = None,
) -> Generator[list[tuple[BatchHeader, pa.RecordBatch]], None, None]:
    """The records of [start_offset, end_offset), one answer of the broker at a time.

    Each batch comes with its header, whose `base_offset` may be before the first record handed out, because batches are
    cut to the range by slicing. Unreachable brokers are retried for retry.timeout.ms from the first failure on; the
    caller's time between two answers does not count.

    Args:
        topic_id: of the topic; None: of the topic that has the name now.
        max_bytes: of one request, less for the rest of a small range; a larger batch is returned all the same.
        hint: the broker to ask first, without a metadata request; if it is outdated, metadata is fetched.

    Raises:
        OffsetOutOfRange: records of the range are not in the log; raised with the first answer that shows it.
        CorruptBatch: records are damaged; those before were handed out. See `PartitionFetch.take`.
        DataLost: an answer does not follow the records handed out before.
        UnknownTopic, UnknownTopicId, UnknownPartition, BrokerUnreachable.
    """
    if start_offset >= end_offset:
        return
    meant = topic_id
    if hint is not None:
        meant = meant or hint.topic_id
    else:  # the only wait for a first answer: retries do not wait for one of their own
        known = cluster.topic(partition.topic)
        meant = meant or known.topic_id
    reader = PartitionFetch(partition, meant, start_offset)
    follows_name = topic_id is None and hint is not None
    yield from _RangeFetch(cluster, reader, end_offset, max_bytes, hint, follows_name).run()


class _RangeFetch:
    """One range being fetched over one connection at a time.

    Args:
        follows_name: before the first records, a topic created again under the name is read instead.
    """

    def __init__(
        self,
        cluster: Cluster,
        reader: PartitionFetch,
        end_offset: int,
        max_bytes: int,
        hint: LeaderHint | None,
        follows_name: bool,
    ) -> None:
        self._cluster = cluster
        self._reader = reader
        self._end_offset = end_offset
        self._max_bytes = max_bytes
        self._leader = hint.broker if hint is not None else None
        self._follows_name = follows_name
        self._records = self._bytes = 0  # received so far, to estimate the rest
        self._link: Link[None] | None = None  # with one request in flight at most
        self._broker_id = -1
        self._asked_offset = self._position = reader.offset
        self._retry = Retry(cluster.settings.backoff(), cluster.settings.retry_timeout_ms / 1000)
        self._complaint = Complaint(log, "fetching_held_up")

    def run(self) -> Iterator[list[tuple[BatchHeader, pa.RecordBatch]]]:
        try:
            while self._position < self._end_offset:
                try:
                    if self._link is None or not self._link.count:
                        self._ask()
                    found = self._receive()
                except RetriableError as error:
                    self._recover(error)
                    continue
                if found:
                    self._check_follows(found)
                    self._follows_name = False
                    self._records += sum(batch.header.record_count for batch in found)
                    self._bytes += sum(batch.header.length for batch in found)
                    self._retry.succeeded()
                self._ask_ahead()
                if found:
                    yield from self._decoded(found)
        finally:
            self._let_go()

    def _ask_ahead(self) -> None:
        """Send the next request early. A failure does not hold back received records: the request is repeated later."""
        if self._reader.offset < self._end_offset:
            try:
                self._ask()
            except KafkalogError:
                self._drop()

    def _check_follows(self, found: list[FetchedBatch]) -> None:
        """Raise DataLost unless the batches continue at the end of those handed out. Compaction leaves gaps in an
        answer."""
        for batch in found:
            if batch.start_offset != self._position and not (
                self._asked_offset <= self._position < batch.start_offset and self._is_compacted()
            ):
                raise DataLost(
                    reason=f"{self._reader.topic_partition} continues at offset {batch.start_offset}, but "
                    f"{self._position} is next"
                )
            self._position = batch.header.end_offset

    def _is_compacted(self) -> bool:
        topic = self._cluster.topic(self._reader.topic_partition.topic)
        return "compact" in topic.effective.get("cleanup.policy", "")

    def _decoded(self, found: list[FetchedBatch]) -> Iterator[list[tuple[BatchHeader, pa.RecordBatch]]]:
        """The batches' columns; if a batch is damaged, those before it, and then raises the error."""
        good: list[tuple[BatchHeader, pa.RecordBatch]] = []
        damage: CorruptBatch | None = None
        for batch in found:
            if batch.start_offset >= self._end_offset:
                break
            try:
                good.append((batch.header, decode(batch, self._reader.topic_partition, self._end_offset)))
            except CorruptBatch as error:
                damage = error
                break
        if good:
            yield good
        if damage is not None:
            raise damage

    def _ask(self) -> None:
        if self._link is None:
            leader, self._leader = self._leader, None  # a hint gets one try
            known = leader
            if leader is None:
                _, leader = self._cluster.leader_of(self._reader.topic_partition, self._reader.topic_id, patient=False)
            self._link = Link(self._cluster.borrow_data(leader.broker_id, known))
            self._broker_id = leader.broker_id
        link = self._link
        header = pb.RequestHeader(correlation_id=link.next_id())
        header.fetch.max_wait_ms = _WAIT_MS
        header.fetch.min_bytes = 1
        header.fetch.max_bytes = self._bytes_left()
        self._reader.ask(header.fetch, header.fetch.max_bytes)
        self._asked_offset = self._reader.offset
        link.began(header.correlation_id, None)
        link.connection.send([frame_start(header.SerializeToString(), 0)])

    def _bytes_left(self) -> int:
        """A generous estimate of the size of the rest: by the size of the received records, or a guess."""
        left = self._end_offset - self._reader.offset
        if not self._records:
            return min(self._max_bytes, max(_FIRST_BYTES, left * _GUESSED_RECORD_BYTES))
        return min(self._max_bytes, _FIRST_BYTES + left * self._bytes * 2 // self._records)

    def _receive(self) -> list[FetchedBatch]:
        link = self._link
        assert link is not None
        self._cluster.await_answer(self._broker_id, link.connection, self._reader.topic_partition)
        header, body = link.connection.receive()
        link.request_of(header)
        if header.HasField("error"):
            raise error_from_wire(header.error)
        if len(header.fetch.partitions) != 1:
            raise ProtocolError(address=link.connection.address, reason="an answer to a request that was not made")
        link.answered()
        answer = header.fetch.partitions[0]
        where = str(self._reader.topic_partition)
        try:
            found = self._reader.take(answer, body if body is not None else memoryview(b""))
        except OffsetOutOfRange as error:
            if self._reader.offset < error.facts["start_offset"]:
                raise
            self._check_end(error)
            raise OffsetNotAvailable(partition=where, leader_epoch=-1) from None
        if answer.end_offset < self._end_offset:
            start, end = answer.log_start_offset, answer.end_offset
            self._check_end(
                OffsetOutOfRange(offset=self._end_offset - 1, partition=where, start_offset=start, end_offset=end)
            )
            if not found:
                raise OffsetNotAvailable(partition=where, leader_epoch=-1)
            self._drop()
        return found

    def _check_end(self, error: OffsetOutOfRange) -> None:
        """A log that ends before the range's end is not the proof that its records are lost: a new leader does not know
        at once up to where the last one let readers read, and a broker that leads no more may lack the end. The leader
        as it is now decides; it answers only when it knows. Raises the error if records of the range may never come."""
        name = self._reader.topic_partition.topic
        self._cluster.refresh([name])
        if self._cluster.topic(name).topic_id != self._reader.topic_id:
            raise error
        [listed] = list_offsets(self._cluster, {self._reader.topic_partition: "latest"}).values()
        if listed.offset is None or listed.offset < self._end_offset:
            raise error

    def _recover(self, error: KafkalogError) -> None:
        """Release the connection, pause, and refresh the metadata. Raises the error once the time for it is over."""
        self._drop()
        pause = self._retry.failed(time.monotonic(), longest_pause(error))
        if pause is None:
            raise error
        self._complaint.failed(error, self._retry.until, partition=str(self._reader.topic_partition))
        self._cluster.pause(pause)
        try:
            self._cluster.refresh([self._reader.topic_partition.topic], patient=False)
            topic = self._cluster.topic(self._reader.topic_partition.topic, patient=False)  # UnknownTopic
        except RetriableError:
            return
        if topic.topic_id != self._reader.topic_id:
            if self._follows_name:
                self._reader = PartitionFetch(self._reader.topic_partition, topic.topic_id, self._reader.offset)
                return
            raise UnknownTopicId(topic_id=self._reader.topic_id.hex())

    def _drop(self) -> None:
        if self._link is not None:
            self._link.lose()
        self._link = None

    def _let_go(self) -> None:
        """Give the connection back if it is clean."""
        if self._link is not None and not self._link.count:
            self._cluster.give_back(self._broker_id, self._link.connection)
            self._link = None
        self._drop()
