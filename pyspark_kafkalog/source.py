"""Reading: a batch's and a stream's readers, as Spark calls them: `read` in the tasks, the other methods on the driver.
`read/batch_query.py` plans a batch, `read/stream.py` has what a stream remembers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from kafkalog.errors import InvalidArgument
from kafkalog.events import get_logger
from pyspark_kafkalog.columns import check_projection
from pyspark_kafkalog.offsets import check_batch_bounds, from_log, to_log
from pyspark_kafkalog.read.batch_query import planned_batch
from pyspark_kafkalog.read.options import parse_source
from pyspark_kafkalog.read.partition_reader import read_ranges
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
        return [InputPartition(planned) for planned in planned_batch(self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's placeholder if nothing was planned
            return iter(())
        return read_ranges(self._options, self._schema, partition.value)


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
            session.finish(position)
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
