"""A task of a read: reads its ranges, one after the other, into batches for Spark. Knows the client; the ranges were
planned on the driver.

Symbols are converted to numbers here. The start is looked up before the end, so that records appended or deleted in
between cannot put the start after the end. A range in numbers is not looked up: its first fetch goes to the leader that
the driver knew, and the answer has the end of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.client.config import ClientSettings
from kafkalog.errors import (
    CorruptBatch,
    DataLost,
    InvalidArgument,
    KafkalogError,
    OffsetOutOfRange,
    RequestTimedOut,
)
from kafkalog.records import TopicPartition
from pyspark_kafkalog.columns import Fetched, Rows
from pyspark_kafkalog.offsets import EARLIEST, LATEST, InputRange, PartitionOffsets
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.offset_reader import GONE, connected, offsets_at
from pyspark_kafkalog.read.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.client.cluster import Cluster
    from kafkalog.client.consumer.range_fetch import LeaderHint

_GONE = -100  # no offset, and no symbol: of a partition that is not there, which may be passed over


class PlannedRange(NamedTuple):
    """A range for a task, with the conditions under which it may be read.

    Attributes:
        topic_id: of the topic, if one created again under the name must not be read; else None.
        is_piece: cut from a larger range: the log's start may be past its end.
        leader: of the partition when the range was planned.
    """

    range: InputRange
    topic_id: bytes | None = None
    is_piece: bool = False
    leader: LeaderHint | None = None


def read_ranges(
    options: SourceOptions, schema: StructType, planned: Sequence[PlannedRange]
) -> Iterator[pa.RecordBatch]:
    """Spark's batches of planned ranges.

    Raises:
        DataLost: records of a range are not in the log, and failOnDataLoss is true.
        RequestTimedOut: no answer came for kafkaConsumer.pollTimeoutMs.
    """
    try:
        yield from _read_ranges(options, schema, planned)
    except KafkalogError as error:
        if options.poll_timeout_ms is None or not error.retriable:
            raise
        names = ", ".join(str(each.range.partition) for each in planned)
        raise RequestTimedOut(
            what=f"a read of {names} (kafkaConsumer.pollTimeoutMs; {error})",
            address=options.bootstrap_servers,
            timeout_ms=options.poll_timeout_ms,
        ) from error


def _read_ranges(
    options: SourceOptions, schema: StructType, planned: Sequence[PlannedRange]
) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    cluster = connected(options, _task_settings(options))
    losses = Losses(options.fail_on_data_loss)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    from_first = [each for each in planned if each.range.start == EARLIEST]
    to_last = [each for each in planned if each.range.end == LATEST]
    earliest = _offsets(cluster, [each.range.partition for each in from_first], EARLIEST, losses)
    latest = _offsets(cluster, [each.range.partition for each in to_last], LATEST, losses)
    for each in planned:
        partition, start, end = each.range
        if start == EARLIEST:
            start = earliest.get(partition, _GONE)
        if end == LATEST:
            end = latest.get(partition, _GONE)
        if _GONE not in (start, end):
            rows = Rows(arrow_schema, partition.topic, partition.partition)
            yield from _RangeRead(cluster, each, start, end, losses).batches(rows)


def _task_settings(options: SourceOptions) -> Mapping[str, str]:
    """The client's settings, with kafkaConsumer.pollTimeoutMs for how long it goes on without an answer."""
    timeout_ms = options.poll_timeout_ms
    if timeout_ms is None:
        return options.client
    given = int(options.client.get("request.timeout.ms", ClientSettings.request_timeout_ms.default))
    return {
        **options.client,
        "retry.timeout.ms": str(timeout_ms),
        "bootstrap.timeout.ms": str(timeout_ms),
        "request.timeout.ms": str(min(given, timeout_ms)),
    }


def _offsets(cluster: Cluster, partitions: Sequence[TopicPartition], symbol: int, losses: Losses) -> PartitionOffsets:
    """The current start or end of partitions; missing partitions are left out, if `losses` allows it."""
    try:
        return offsets_at(cluster, dict.fromkeys(partitions, symbol))
    except GONE as error:
        if len(partitions) == 1:
            losses.found(f"{partitions[0]} is not there any more: {error}")
            return {}
    found: PartitionOffsets = {}
    for partition in partitions:
        found.update(_offsets(cluster, [partition], symbol, losses))
    return found


class _RangeRead:
    """One range being read: its position, and the handling of records that are gone."""

    def __init__(self, cluster: Cluster, planned: PlannedRange, start: int, end: int, losses: Losses) -> None:
        self._cluster = cluster
        self._partition = planned.range.partition
        self._topic_id = planned.topic_id
        self._leader = planned.leader
        self._losses = losses
        self._from_first = planned.range.start == EARLIEST
        self._position = start
        self._end = end
        self._lost: KafkalogError | None = None
        self._is_begun = False  # something was read, or is there and damaged
        self._suspected: tuple[int, int] | None = None  # where damage was met once, and where it ends
        if start > end and not (self._from_first and planned.is_piece):
            raise InvalidArgument(
                reason=f"the start offset {start} of {self._partition} is greater than its end offset {end}"
            )

    def batches(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        while self._position < self._end:
            start, self._lost = self._position, None
            yield from rows.batches(self._fetched(), start)  # once for each run without a gap
            if self._lost is None:
                if self._position < self._end:
                    raise DataLost(reason=f"{self._partition} was read to offset {self._position}, not to {self._end}")
                return
            self._go_on_behind(self._lost)

    def _fetched(self) -> Fetched:
        """Batches from the position on. A loss ends it without an error, so that earlier batches are passed on."""
        from kafkalog.client.consumer.range_fetch import fetch_range

        try:
            leader, self._leader = self._leader, None
            for group in fetch_range(
                self._cluster, self._partition, self._topic_id, self._position, self._end, hint=leader
            ):
                if group:
                    self._position, self._is_begun = group[-1][0].end_offset, True
                yield group
        except (OffsetOutOfRange, CorruptBatch, *GONE) as error:
            self._lost = error

    def _go_on_behind(self, lost: KafkalogError) -> None:
        """Move past the lost records, never back: to the first existing record, or to the end."""
        if isinstance(lost, GONE):
            self._losses.found(f"{self._partition} is not there any more: {lost}")
            self._position = self._end
        elif isinstance(lost, CorruptBatch):
            self._is_begun = True
            where, seen = self._suspected or (None, None)
            is_met_again = where == self._position
            behind = lost.facts.get("end_offset", seen if is_met_again else None)  # what came first may say more
            if self._losses.fail or behind is None:
                raise lost
            if not is_met_again:  # fetched again first: the bytes may have changed on the way
                self._suspected = self._position, behind
                return
            self._losses.found(str(lost))
            self._position = max(self._position, behind)
        elif lost.facts["end_offset"] < self._end:
            ends, self._end = self._end, lost.facts["end_offset"]
            self._losses.found(f"{self._partition} ends at offset {self._end} and was to be read up to {ends}")
        else:
            if self._is_begun or not self._from_first:  # else the first record is what there is
                self._losses.found(str(lost))
            first = _offsets(self._cluster, [self._partition], EARLIEST, self._losses)
            behind = first.get(self._partition, self._end)
            self._position = behind if behind > self._position else self._end
