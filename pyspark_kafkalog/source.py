"""Reading: a batch's and a stream's readers, as Spark calls them on the driver; `read` in the tasks. What a stream
remembers is in `read/stream.py`.

A batch is bound late: its partitions carry earliest and latest as symbols that each task looks up when it reads,
because Spark plans a DataFrame once and may run the plan many times. A stream's partitions carry numbers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from kafkalog.errors import InvalidArgument
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.columns import check_projection
from pyspark_kafkalog.offsets import EARLIEST, LATEST, InputRange, check_batch_bounds, check_order, from_log, to_log
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.offset_reader import Lookup
from pyspark_kafkalog.read.options import parse_source
from pyspark_kafkalog.read.partition_reader import PlannedRange, read_ranges
from pyspark_kafkalog.read.ranges import pack, record_count, split_late_bound
from pyspark_kafkalog.read.stream import NO_LIMIT, StreamSession
from pyspark_kafkalog.sentences import in_sentences

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = get_logger(__name__)

LoggedOffsets = dict[str, dict[str, int]]
"""Offsets as `offsets.to_log` makes them."""


@in_sentences
class BatchReader(DataSourceReader):
    """One batch read, as Spark's `KafkaBatch`. Pickled whole into every task."""

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        self._schema = schema
        self._options = parse_source(options)
        check_projection(schema, self._options.columns, self._options.include_headers)
        check_batch_bounds(*self._options.batch_bounds())
        for name in self._options.only_for_streams():
            log.warning("option_ignored_in_a_batch_read", option=name)

    def partitions(self) -> list[InputPartition]:
        lookup = Lookup(self._options)
        ranges, topic_ids = lookup.asked_again(lambda _: self._ranges(lookup), Losses(fail=True))
        options = self._options
        splits = split_late_bound(
            ranges, lambda: _numbers(lookup, ranges), options.min_partitions, options.max_records_per_partition
        )
        most = options.max_input_partitions
        if most is not None and len(splits) > most:
            numbers = iter(_numbers(lookup, [each for one_split in splits for each in one_split]))
            splits = pack([(each, record_count(list(itertools.islice(numbers, len(each))))) for each in splits], most)
        whole = set(ranges)
        leaders = {partition: lookup.leader(partition, topic_id) for partition, topic_id in topic_ids.items()}
        return [
            InputPartition(
                [PlannedRange(each, is_piece=each not in whole, leader=leaders[each.partition]) for each in one_split]
            )
            for one_split in splits
        ]

    def _ranges(self, lookup: Lookup) -> tuple[list[InputRange], dict[TopicPartition, bytes]]:
        """A range for each partition that is read, with symbols as the options have them, and its topic's id."""
        start, end = self._options.batch_bounds()
        partitions = lookup.partitions()
        starts = lookup.start(start, partitions)
        ends = lookup.end(end, partitions)
        check_order(start, end, "offset", starts, ends)
        return [InputRange(partition, starts[partition], ends[partition]) for partition in partitions], partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's placeholder if nothing was planned
            return iter(())
        return read_ranges(self._options, self._schema, partition.value)


def _numbers(lookup: Lookup, ranges: Sequence[InputRange]) -> list[InputRange]:
    """Ranges with their symbols replaced by current offsets; the start is looked up before the end."""
    earliest = lookup.at(EARLIEST, {each.partition for each in ranges if each.start == EARLIEST})
    latest = lookup.at(LATEST, {each.partition for each in ranges if each.end == LATEST})
    return [
        each._replace(
            start=earliest[each.partition] if each.start == EARLIEST else each.start,
            end=latest[each.partition] if each.end == LATEST else each.end,
        )
        for each in ranges
    ]


@in_sentences
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream's read, as Spark's `KafkaMicroBatchStream`. One instance is in the source's own process on the driver,
    copies of it are in the tasks.

    Options are parsed at the first call, because Spark wraps an error from the constructor in one of its own.
    """

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        self._schema = schema
        self._given = dict(options)
        self._session_once: StreamSession | None = None

    @property
    def _session(self) -> StreamSession:
        if self._session_once is None:
            options = parse_source(self._given)
            check_projection(self._schema, options.columns, options.include_headers)
            if refused := options.only_for_batches():
                raise InvalidArgument(reason=f"{refused[0]} is only for batch reads: a stream has no end; remove it")
            self._session_once = StreamSession(options)
            weakref.finalize(self, self._session_once.progress.end)
        return self._session_once

    def __getstate__(self) -> dict[str, object]:
        """The state that a task needs; the stream's own state stays on the driver."""
        return {"_schema": self._schema, "_given": self._given, "_session_once": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        # Never ReadAllAvailable, even without a limit: Trigger.Once sends that.
        return ReadMaxRows(self._session.options.max_offsets_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        self._session.available_now = True

    def initialOffset(self) -> LoggedOffsets:
        return to_log(self._session.initial_position())

    def latestOffset(self, start: LoggedOffsets, limit: ReadLimit) -> LoggedOffsets:
        session, position = self._session, from_log(start)
        if isinstance(limit, ReadAllAvailable):
            end = session.next_position(position, everything=True)
        else:
            end = session.next_position(position, limit.max_rows if isinstance(limit, ReadMaxRows) else NO_LIMIT)
        if session.has_ended(position, end):
            session.progress.finish()
        return to_log(end)

    def commit(self, end: LoggedOffsets) -> None:
        self._session.done(from_log(end))

    def stop(self) -> None:
        if self._session_once is not None:
            self._session_once.progress.stop()

    def reportLatestOffset(self) -> LoggedOffsets:
        return to_log(self._session.latest)

    def partitions(self, start: LoggedOffsets, end: LoggedOffsets) -> Sequence[InputPartition]:
        return [InputPartition(planned) for planned in self._session.planned(from_log(start), from_log(end))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:
            return iter(())
        return read_ranges(self._session.options, self._schema, partition.value)
