"""Stages a task's rows: sends them to the partitions' leaders, which keep them beside the log until the driver commits.

Each partition gets one part, named by a uuid that only this stager has, so that a part of another attempt of the task
is never taken for it. Batches of a part are numbered and acknowledged in order. After a lost connection those without
an ack are sent again, and the leader recognizes those it has. So does another leader after a failover: the in-sync
replicas have all that was acknowledged. All topics share one connection for each broker, whether they belong to one
transaction or to one each. Not thread-safe: a task is one thread. Commits nothing (`coordinator.py` does).
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from kafkalog.client.cluster import Cluster, TopicInfo, longest_pause
from kafkalog.client.complaints import Complaint
from kafkalog.client.config import ProducerSettings
from kafkalog.client.link import Link
from kafkalog.client.producer import tables
from kafkalog.client.transaction.renewal import Renewal
from kafkalog.errors import (
    DeliveryTimedOut,
    KafkalogError,
    ProtocolError,
    StagedOutOfOrder,
    StagedPartLost,
    UnknownPartition,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.format.batch import CODECS, EncodedBatch, encode_batch
from kafkalog.format.columns import encode_columns
from kafkalog.format.producer_ids import family_of, family_of_application, producer_id_of
from kafkalog.records import TopicPartition
from kafkalog.retry import Retry
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import transactions_pb2
from kafkalog.wire.frames import error_from_wire, frame_start

if TYPE_CHECKING:
    import pyarrow as pa

log = get_logger(__name__)

_IN_FLIGHT_MAX = 16 << 20
_EPOCH = 0


class NumberedTransactions(NamedTuple):
    """The transactions of a numbered write: one for each topic.

    Attributes:
        app_id: the application's.
        of_topics: their ids, in the order of the topics; asked once for each topic.
    """

    app_id: str
    of_topics: Callable[[Sequence[TopicInfo]], Sequence[str]]


class StagedPartition(NamedTuple):
    """A part as its writer knows it, for the task's commit message."""

    topic: str
    topic_id: bytes
    partition: int
    uuid: bytes
    part: int
    batches: int
    length: int
    records: int


class _Sent(NamedTuple):
    """A batch without an ack."""

    sequence: int
    encoded: EncodedBatch


class _Topic:
    """A topic with staged rows, as last reported, and its transaction. `turn`: decides the partition of the next rows
    without keys."""

    def __init__(self, info: TopicInfo, transactional_id: str, first_turn: int) -> None:
        self.info = info
        self.transactional_id = transactional_id
        self.producer_id = producer_id_of(transactional_id)
        # Each task begins at another partition, and each batch one partition further than the one before, so that many
        # small batches of one task fill all partitions alike. A write that comes once begins at a random partition.
        self.turn = self.producer_id + first_turn

    def next_turn(self) -> int:
        turn = self.turn
        self.turn += 1
        return turn % len(self.info.partitions)


class _Part:
    """What is staged for one partition."""

    def __init__(self, topic: _Topic, partition: int) -> None:
        self.topic = topic
        self.topic_partition = TopicPartition(topic.info.name, partition)
        self.topic_id = topic.info.topic_id
        self.uuid = uuid.uuid4().bytes
        self.batches = 0
        self.length = 0
        self.records = 0
        self.unacked: deque[_Sent] = deque()

    def add(self, encoded: EncodedBatch) -> _Sent:
        sent = _Sent(self.batches, encoded)
        self.batches += 1
        self.length += encoded.length
        self.records += encoded.record_count
        self.unacked.append(sent)
        return sent


class PartStager:
    """Stages what one attempt of a task writes; use it with `with`.

    Args:
        settings: a producer's; used are batch.size, batch.records, compression.type, buffer.memory and
            delivery.timeout.ms.
        transaction: its id; or a numbered write's transactions.
        batch_id: of the transaction's batch.
        part: the number of the task's part, which orders the parts of a batch.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ProducerSettings,
        transaction: str | NumberedTransactions,
        batch_id: int,
        part: int,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._batch_id = batch_id
        self._part = part
        self._codec = CODECS[settings.compression_type]
        self._in_flight_max = min(_IN_FLIGHT_MAX, settings.buffer_memory)
        self._topics: dict[str, _Topic] = {}
        self._parts: dict[TopicPartition, _Part] = {}
        self._links: dict[int, Link[tuple[_Part, _Sent]]] = {}
        self._in_flight = 0
        self._retry = Retry(cluster.settings.backoff(), settings.delivery_timeout_ms / 1000)
        self._complaint = Complaint(log, "staging_held_up")
        self._transaction = transaction
        if isinstance(transaction, str):
            family = family_of(producer_id_of(transaction))
        else:
            family = family_of_application(transaction.app_id)
        self._renewal = Renewal(cluster, family, batch_id)

    def __enter__(self) -> Self:
        self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._renewal.stop()
        self._let_go()
        if kind is not None:
            self.abort()

    def stage(self, tables: Mapping[str, pa.Table | pa.RecordBatch]) -> None:
        """Stage tables' rows, in order for each partition.

        Args:
            tables: by topic; columns as `Producer.send_arrow` takes them.

        Raises:
            UnknownTopic: nothing was staged.
            UnknownPartition, RecordTooLarge, InvalidArgument: nothing of the wrong table was staged.
            UnknownTopicId: the topic was deleted meanwhile.
            StagedPartLost: a leader has lost what it had acknowledged.
            DeliveryTimedOut: a leader could not be reached for delivery.timeout.ms.
        """
        self._renewal.start()  # if no thread could be started before
        self._look_up([name for name in tables if name not in self._topics])
        for name, table in tables.items():
            topic = self._topics[name]
            for chunk in self._chunks(topic, table):
                partition = TopicPartition(name, chunk.partition)
                part = self._parts.get(partition) or _Part(topic, chunk.partition)
                sent = part.add(self._encoded(part, chunk))
                self._parts[partition] = part
                self._in_flight += sent.encoded.length
                try:
                    self._send(part, sent)
                except KafkalogError as error:
                    self._recover(error)
                self._receive_until(self._in_flight_max)

    def finish(self) -> list[StagedPartition]:
        """Wait until all is acknowledged; returns the parts, by topic and partition. Raises as `stage`."""
        self._receive_until(0)
        return [
            StagedPartition(
                *(partition.topic, each.topic_id, partition.partition, each.uuid, self._part),
                *(each.batches, each.length, each.records),
            )
            for partition, each in sorted(self._parts.items())
        ]

    def abort(self) -> None:
        """Report to the leaders that these parts will not be committed. A hint: it never fails."""
        abort_parts(
            self._cluster,
            [(partition, part.topic_id, part.uuid) for partition, part in self._parts.items()],
        )

    # --- rows to batches

    def _look_up(self, topics: list[str]) -> None:
        """Look up topics and their transactions. They are fetched anew because Spark's processes live long: a cached
        topic may have been created again since."""
        if not topics:
            return
        found = self._cluster.describe_topics(topics)
        named = self._transaction
        names = [named] * len(found) if isinstance(named, str) else named.of_topics(found)
        for info, transactional_id in zip(found, names, strict=True):
            self._topics[info.name] = _Topic(info, transactional_id, self._batch_id + self._part)

    def _chunks(self, topic: _Topic, table: pa.Table | pa.RecordBatch) -> list[tables.Chunk]:
        try:
            return self._cut(topic, table)
        except UnknownPartition:  # it may have been added since
            [newer] = self._cluster.describe_topics([topic.info.name])
            if newer.topic_id != topic.info.topic_id:
                raise UnknownTopicId(topic_id=topic.info.topic_id.hex()) from None
            topic.info = newer
            return self._cut(topic, table)

    def _cut(self, topic: _Topic, table: pa.Table | pa.RecordBatch) -> list[tables.Chunk]:
        return [
            chunk
            for batch in tables.record_batches(table)
            for chunk in tables.chunks(
                batch,
                topic=topic.info.name,
                partitions=len(topic.info.partitions),
                partition=None,
                partitioner=None,
                next_turn=topic.next_turn,
                now_us=time_ns() // 1000,
                rows_max=self._settings.batch_records,
                bytes_max=self._settings.batch_size,
                message_bytes_max=topic.info.max_message_bytes,
            )
        ]

    def _encoded(self, part: _Part, chunk: tables.Chunk) -> EncodedBatch:
        columns = chunk.columns
        return encode_batch(
            encode_columns(columns.batch, self._codec),
            codec=self._codec,
            attributes=columns.attributes,
            record_count=columns.batch.num_rows,
            min_timestamp_us=columns.min_timestamp_us,
            max_timestamp_us=columns.max_timestamp_us,
            producer_id=part.topic.producer_id,
            producer_epoch=_EPOCH,
            base_sequence=part.batches,
            transaction_batch_id=self._batch_id,
            part=self._part,
        )

    # --- sending and acks

    def _send(self, part: _Part, sent: _Sent) -> None:
        _, leader = self._cluster.leader_of(part.topic_partition, part.topic_id)
        link = self._links.get(leader.broker_id)
        if link is None:
            link = self._links[leader.broker_id] = Link(self._cluster.borrow_data(leader.broker_id))
        header = pb.RequestHeader(correlation_id=link.next_id())
        header.stage.timeout_ms = self._cluster.settings.request_timeout_ms
        encoded = sent.encoded
        header.stage.partitions.add(
            topic_id=part.topic_id, partition=part.topic_partition.partition, uuid=part.uuid, length=encoded.length
        )
        link.began(header.correlation_id, (part, sent))
        start = frame_start(header.SerializeToString(), encoded.length)
        link.connection.send([start, encoded.header, encoded.body, encoded.padding])

    def _receive_until(self, in_flight: int) -> None:
        """Receive acks until at most that many bytes are unacknowledged."""
        while self._in_flight > in_flight:
            broker_id, link = next(each for each in self._links.items() if each[1].count)
            try:
                part, _ = link.in_flight[0]
                self._cluster.await_answer(broker_id, link.connection, part.topic_partition)
                for reply in link.connection.receive_some():
                    self._take(link, reply)
            except KafkalogError as error:
                self._recover(error)

    def _take(self, link: Link[tuple[_Part, _Sent]], reply: pb.ReplyHeader) -> None:
        part, sent = link.request_of(reply)
        if reply.HasField("error"):
            raise error_from_wire(reply.error)
        if len(reply.stage.partitions) != 1:
            raise ProtocolError(address=link.connection.address, reason="an answer to a request that was not made")
        answer = reply.stage.partitions[0]
        if answer.HasField("error"):
            error = error_from_wire(answer.error)
            if isinstance(error, StagedOutOfOrder) and int(error.facts["expected"]) < part.unacked[0].sequence:
                raise StagedPartLost(
                    transactional_id=part.topic.transactional_id,
                    batch_id=self._batch_id,
                    partition=str(part.topic_partition),
                    reason=f"its leader has {error.facts['expected']} batches of part {self._part} "
                    f"and had acknowledged {part.unacked[0].sequence}",
                )
            raise error
        link.answered()
        part.unacked.popleft()
        self._in_flight -= sent.encoded.length
        self._retry.succeeded()

    def _recover(self, error: KafkalogError) -> None:
        """Send the unacknowledged batches again on new connections, until that succeeds. Raises the error if it is
        final, or DeliveryTimedOut once the time without an ack is over."""
        while True:
            if not error.retriable:
                raise error
            self._drop_links()
            pause = self._retry.failed(time.monotonic(), longest_pause(error))
            if pause is None:
                unacked = next(part for part in self._parts.values() if part.unacked)
                raise DeliveryTimedOut(
                    partition=str(unacked.topic_partition),
                    timeout_ms=self._settings.delivery_timeout_ms,
                    reason=str(error),
                )
            self._complaint.failed(error, self._retry.until, batch_id=self._batch_id, part=self._part)
            self._cluster.pause(pause)
            try:
                self._refresh()
                for part in self._parts.values():
                    for sent in part.unacked:
                        self._send(part, sent)
                return
            except UnknownTopicId:  # from fresh metadata, not from a broker that may not know the topic yet
                raise
            except KafkalogError as next_error:
                error = next_error

    def _refresh(self) -> None:
        """Refresh the metadata. Raises UnknownTopicId if a topic is gone."""
        self._cluster.refresh(self._topics, patient=False)
        for name, topic in self._topics.items():
            if self._cluster.topic(name, patient=False).topic_id != topic.info.topic_id:
                raise UnknownTopicId(topic_id=topic.info.topic_id.hex())

    def _drop_links(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.lose()

    def _let_go(self) -> None:
        """Return clean connections for the process's next task."""
        for broker_id, link in list(self._links.items()):
            if not link.count:
                self._cluster.give_back(broker_id, link.connection)
                del self._links[broker_id]
        self._drop_links()


def abort_parts(cluster: Cluster, parts: Iterable[tuple[TopicPartition, bytes, bytes]]) -> None:
    """Report to leaders that parts (partition, topic id, uuid) will not be prepared. A hint: it never fails, and asks
    for topics once, waiting for no broker that is away."""
    parts = list(parts)
    requests: dict[int, transactions_pb2.AbortStagedRequest] = {}
    places: dict[tuple[int, bytes, int], transactions_pb2.AbortStagedPartition] = {}
    with suppress(KafkalogError):
        cluster.look_up({partition.topic for partition, *_ in parts}, patient=False)
    for partition, topic_id, part_uuid in parts:
        topic = cluster.known_topic(partition.topic)
        if topic is None or topic.topic_id != topic_id:
            continue
        with suppress(KafkalogError):
            leader = cluster.leader(topic, partition.partition)
            request = requests.setdefault(leader.broker_id, transactions_pb2.AbortStagedRequest())
            key = (leader.broker_id, topic_id, partition.partition)
            if key not in places:
                places[key] = request.partitions.add(topic_id=topic_id, partition=partition.partition)
            places[key].uuids.append(part_uuid)
    for broker_id, request in requests.items():
        with suppress(KafkalogError):
            cluster.call("AbortStaged", request, broker_id=broker_id, patient=False)
