"""One partition in fetches: its part of a request, and its part of the answer, checked and in order.

Batches are not copied: their columns stand on the memory that the answer was received into. Sends nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import BatchHeader, iter_batches
from kafkalog.format.columns import HAS_OFFSET, decode_columns, numpy_of
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire


class FetchedBatch(NamedTuple):
    """A checked batch of which records from `start_offset` on are wanted.

    Attributes:
        columns: of all its records, once it was opened.
    """

    header: BatchHeader
    data: memoryview
    start_offset: int
    columns: pa.RecordBatch | None = None

    def opened(self, where: TopicPartition) -> FetchedBatch:
        """With its columns. Raises CorruptBatch."""
        if self.columns is not None:
            return self
        return self._replace(columns=decode_columns(self.header, self.data, str(where)))

    def wanted(self, end_offset: int | None = None) -> pa.RecordBatch:
        """The columns of the wanted records before `end_offset`; it was opened."""
        columns = self.columns
        assert columns is not None
        if self.header.attributes & HAS_OFFSET:
            offsets = numpy_of(columns.column("offset"))
            first = int(offsets.searchsorted(self.start_offset))
            last = len(offsets) if end_offset is None else int(offsets.searchsorted(end_offset))
        else:
            base = self.header.base_offset
            first = self.start_offset - base
            last = columns.num_rows if end_offset is None else min(columns.num_rows, end_offset - base)
        return columns if first == 0 and last == columns.num_rows else columns.slice(first, max(0, last - first))


NO_EPOCH = -1


class PartitionFetch:
    """A partition's next offset, the leader epoch of the batch before it, and the position of the next batch on the
    broker's disk.

    Whether the log still has what was read is checked by the leader, once in each of its epochs (KIP-320): only with a
    new epoch may a log have been cut.

    Args:
        offset: the next to be fetched; `go_to` sets it.
        last_epoch: of the batch before it, or a later one in which that was read; None: not known.
    """

    def __init__(
        self, topic_partition: TopicPartition, topic_id: bytes, offset: int, last_epoch: int | None = None
    ) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self._offset = offset
        self._last_epoch = NO_EPOCH if last_epoch is None else last_epoch
        self._asked_in = self._agreed_in = NO_EPOCH  # leader epochs: of the last request, and of the last good answer
        self._hint: tuple[int, int] | None = None

    @property
    def offset(self) -> int:
        return self._offset

    def go_to(self, offset: int, last_epoch: int | None = None) -> None:
        """Continue at another offset; `last_epoch` as above."""
        self._offset = offset
        self._last_epoch = NO_EPOCH if last_epoch is None else last_epoch
        self._agreed_in = NO_EPOCH
        self._hint = None

    @property
    def read_in(self) -> int | None:
        """A leader epoch in which the log had all that is before the offset; None: not known."""
        epoch = self._last_epoch if self._agreed_in == NO_EPOCH else self._agreed_in
        return None if epoch == NO_EPOCH else epoch

    def ask(self, request: pb.FetchRequest, max_bytes: int, leader_epoch: int = NO_EPOCH) -> None:
        """Add this partition to a request.

        Args:
            leader_epoch: in which it is led, as far as is known; -1: the leader checks nothing.
        """
        part = request.partitions.add(
            topic_id=self.topic_id,
            partition=self.topic_partition.partition,
            offset=self._offset,
            max_bytes=max_bytes,
        )
        if self._hint is not None:
            part.hint.segment_base_offset, part.hint.position = self._hint
        self._asked_in = leader_epoch
        if leader_epoch != NO_EPOCH:
            part.leader_epoch = leader_epoch
            last_epoch = self._agreed_in if self._last_epoch == NO_EPOCH else self._last_epoch
            if leader_epoch != self._agreed_in and last_epoch != NO_EPOCH:
                part.last_epoch = last_epoch

    def take(self, answer: pb.FetchedPartition, data: memoryview) -> list[FetchedBatch]:
        """The whole batches of this partition's part of an answer; the next offset moves past them.

        Raises:
            CorruptBatch: the first batch is damaged. If a later one is, the batches before it are returned. The fact
                `end_offset` is the offset after the damage, if it is known.
            KafkalogError: what the broker answered.
        """
        if answer.HasField("error"):
            raise error_from_wire(answer.error)
        self._agreed_in = self._asked_in
        where = str(self.topic_partition)
        found: list[FetchedBatch] = []
        position, offset = 0, self._offset
        try:
            for header, batch in iter_batches(data, where):
                end_offset = header.end_offset
                if end_offset > offset:
                    found.append(FetchedBatch(header, batch, max(offset, header.base_offset)))
                    offset = end_offset
                elif found:
                    raise CorruptBatch(
                        partition=where, offset=header.base_offset, reason=f"it goes back, to before offset {offset}"
                    )
                position += header.length
        except CorruptBatch as error:
            if not found:
                self._hint = None
                if error.facts.get("end_offset", offset + 1) <= offset:  # continuing there would return the same batch
                    facts = {name: fact for name, fact in error.facts.items() if name != "end_offset"}
                    raise CorruptBatch(**facts) from None
                raise
        self._offset = offset
        if found:
            self._last_epoch = found[-1].header.leader_epoch
        if answer.HasField("slice"):
            self._hint = (answer.slice.segment_base_offset, answer.slice.position + position)
        return found


def decode(batch: FetchedBatch, where: TopicPartition, end_offset: int | None = None) -> pa.RecordBatch:
    """The columns of a fetched batch's wanted records before `end_offset`. Raises CorruptBatch."""
    return batch.opened(where).wanted(end_offset)


def split_body(reply: pb.FetchReply, body: memoryview | None) -> list[memoryview]:
    """The body's part of each partition of a reply."""
    parts = []
    position = 0
    whole = body if body is not None else memoryview(b"")
    for answer in reply.partitions:
        parts.append(whole[position : position + answer.length])
        position += answer.length
    return parts
