"""Reading: a batch's and a stream's readers, on the driver and in the tasks. Knows the client; the arithmetic of
offsets is `offsets.py`'s, the making of rows `columns.py`'s.

A batch is bound late: its partitions carry earliest and latest as symbols that each task looks up when it reads, for
Spark plans a DataFrame once and runs the same plan again and again. A stream's partitions carry numbers.

A stream's position is in Spark's checkpoint, as JSON; what this reader remembers between micro-batches (its start, the
ids of its topics, the target of AvailableNow) is gone after a restart and must not be needed then. Spark calls
`initialOffset` twice on a first start, so it is remembered: a `latest` that moved in between would lose what lies
there. For the same reason the first `latestOffset` of a stream that starts at latest returns the start unchanged: an
empty first batch writes the position down before anything is read. A start at what a group has committed, which others
may move, is held the same way.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from kafkalog.errors import DataLost, InvalidArgument, OffsetOutOfRange, UnknownTopic, UnknownTopicId
from kafkalog.log import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.columns import Fetched, Rows, check_projection
from pyspark_kafkalog.committed import with_committed
from pyspark_kafkalog.offsets import (
    COMMITTED,
    EARLIEST,
    LATEST,
    InputRange,
    PartitionOffsets,
    check_batch_positions,
    from_log,
    input_ranges,
    limited,
    partition_names,
    position_of_each,
    resolved,
    symbols_in,
    to_log,
    whats_lost,
)
from pyspark_kafkalog.options import SourceOptions, parse_source
from pyspark_kafkalog.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.client.cluster import Cluster

log = get_logger(__name__)

NO_LIMIT = (1 << 63) - 1
_IDLE_WAIT_S = 0.2
_IDLE_CHECKS = 4
_LOSS_PAUSES_S = (0.1, 0.5)

LoggedOffsets = dict[str, dict[str, int]]
"""Offsets as `offsets.to_log` makes them."""

_clusters: dict[tuple[int, str, tuple[tuple[str, str], ...]], Cluster] = {}
"""This process's connections by process id (a forked child must not use its parent's), servers and settings. Spark's
Python workers live through many tasks and micro-batches."""


def connected(options: SourceOptions) -> Cluster:
    """This process's connections to the cluster."""
    key = (os.getpid(), options.bootstrap_servers, tuple(sorted(options.client.items())))
    cluster = _clusters.get(key)
    if cluster is None:
        from kafkalog.client.cluster import Cluster
        from kafkalog.client.config import CONSUMER_SETTINGS, connection_settings

        settings = connection_settings(CONSUMER_SETTINGS.parse(options.client))
        cluster = _clusters[key] = Cluster(options.bootstrap_servers, settings)
    return cluster


def offsets_at(cluster: Cluster, symbols: Mapping[TopicPartition, int]) -> PartitionOffsets:
    """The offset that each partition's EARLIEST or LATEST stands for now."""
    from kafkalog.client.admin import list_offsets

    if not symbols:
        return {}
    words = {EARLIEST: "earliest", LATEST: "latest"}
    listed = list_offsets(cluster, {partition: words[symbol] for partition, symbol in symbols.items()})
    return {partition: each.offset for partition, each in listed.items() if each.offset is not None}


def started(options: SourceOptions, starts: PartitionOffsets) -> PartitionOffsets:
    """Starts without COMMITTED. Raises NoCommittedOffset, CommittedOffsetGone."""
    return with_committed(connected(options), options.group, options.committed_fallback, starts)


class PlannedRange(NamedTuple):
    """What travels to a task: a range, and the topic's id where a topic made anew under the name must not be read."""

    range: InputRange
    topic_id: bytes | None


class Selected:
    """The partitions that a read selects, as the brokers tell of them now."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._warned = False

    def partitions(self) -> dict[TopicPartition, bytes]:
        """The id of its topic, by selected partition.

        Raises:
            UnknownTopic: a topic named by subscribe or assign is not there.
        """
        cluster = connected(self.options)
        selection = self.options.selection
        if selection.option == "subscribePattern":
            topics = [topic for topic in cluster.describe_topics() if selection.matches(topic.name)]
        else:
            topics = cluster.describe_topics(selection.topics())
        found = {
            TopicPartition(topic.name, partition.partition): topic.topic_id
            for topic in topics
            for partition in topic.partitions
        }
        if selection.option == "assign" and not self._warned and (missing := set(selection.value) - found.keys()):
            self._warned = True
            log.warning("assigned_partitions_not_there", partitions=partition_names(missing))
        return {partition: found[partition] for partition in sorted(found) if selection.takes(partition)}

    def at(self, symbol: int, partitions: Iterable[TopicPartition]) -> PartitionOffsets:
        """The offset at which each partition starts (EARLIEST) or ends (LATEST) now."""
        return offsets_at(connected(self.options), dict.fromkeys(partitions, symbol))


def read_rows(options: SourceOptions, schema: StructType, planned: PlannedRange) -> Iterator[pa.RecordBatch]:
    """Spark's batches of a planned range, in a task.

    Raises:
        OffsetOutOfRange, DataLost: the log has not, or not any more, all that the range names.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    from kafkalog.client.fetcher import fetch_range

    cluster = connected(options)
    partition, start, end = planned.range
    if planned.topic_id not in (None, cluster.topic(partition.topic).topic_id):
        cluster.describe_topics([partition.topic])  # this worker's view is older than the driver's
    if start == EARLIEST:
        start = offsets_at(cluster, {partition: EARLIEST})[partition]
    latest = offsets_at(cluster, {partition: LATEST})[partition]
    if end == LATEST:
        end = latest
    elif end > latest:  # else the fetch would wait for what may never come
        earliest = offsets_at(cluster, {partition: EARLIEST})[partition]
        raise OffsetOutOfRange(partition=str(partition), offset=end, start_offset=earliest, end_offset=latest)
    if start > end:
        raise InvalidArgument(reason=f"the start offset {start} of {partition} is greater than its end offset {end}")
    rows = Rows(to_arrow_schema(schema, timezone="UTC"), partition.topic, partition.partition)
    fetched = fetch_range(cluster, partition, planned.topic_id, start, end)
    yield from rows.batches(_whole(fetched, partition, start, end), start)


def _whole(fetched: Fetched, partition: TopicPartition, start: int, end: int) -> Fetched:
    """The same batches, with proof at their end that they reach the range's."""
    position = start
    for group in fetched:
        if group:
            position = group[-1][0].end_offset
        yield group
    if position < end:
        raise DataLost(reason=f"{partition} was read up to offset {position} instead of {end}")


class BatchReader(DataSourceReader):
    """One batch read. Pickled whole into every task."""

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        check_projection(schema)
        self._schema = schema
        self._options = parse_source(options)
        check_batch_positions(*self._options.batch_positions())
        if self._options.max_offsets_per_trigger is not None:
            log.warning("option_ignored_in_a_batch_read", option="maxOffsetsPerTrigger")

    def partitions(self) -> list[InputPartition]:
        partitions = Selected(self._options).partitions()
        starting, ending = self._options.batch_positions()
        starts = started(self._options, position_of_each("startingOffsets", starting, partitions))
        ends = position_of_each("endingOffsets", ending, partitions)
        return [
            InputPartition(PlannedRange(InputRange(partition, starts[partition], ends[partition]), None))
            for partition in partitions
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's stand-in where nothing was planned
            return iter(())
        return read_rows(self._options, self._schema, partition.value)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream's read. An instance lives in the source's own process on the driver, copies of it in the tasks.

    Options are parsed at the first call: what rises in the constructor reaches the user wrapped in an error of Spark's.
    """

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        self._schema = schema
        self._given = dict(options)
        self._selected_once: Selected | None = None
        self._progress_once: Progress | None = None
        self._initial: PartitionOffsets | None = None
        self._hold_start = False
        self._latest: PartitionOffsets = {}
        self._topic_ids: dict[str, bytes] = {}
        self._available_now = False
        self._target: PartitionOffsets | None = None

    @property
    def _selected(self) -> Selected:
        if self._selected_once is None:
            check_projection(self._schema)
            options = parse_source(self._given)
            if options.ending is not None:
                raise InvalidArgument(reason="endingOffsets is for batch reads; a stream has no end")
            self._selected_once = Selected(options)
        return self._selected_once

    def getDefaultReadLimit(self) -> ReadLimit:
        # Never ReadAllAvailable, even without a limit: that is what Trigger.Once sends.
        return ReadMaxRows(self._selected.options.max_offsets_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        # The target is taken at the first latestOffset: what is replayed before may end beyond the log's end now.
        assert self._selected  # wrong options rise here first
        self._available_now = True

    def initialOffset(self) -> LoggedOffsets:
        if self._initial is None:
            selected = self._selected
            partitions = self._partitions_now()
            told = position_of_each("startingOffsets", selected.options.stream_start(), partitions)
            start = started(selected.options, told)
            moving = symbols_in([told], LATEST) + symbols_in([told], COMMITTED)
            self._initial = resolved(
                start,
                selected.at(EARLIEST, symbols_in([start], EARLIEST)),
                selected.at(LATEST, symbols_in([start], LATEST)),
            )
            self._hold_start = bool(moving)
        return to_log(self._initial)

    def latestOffset(self, start: LoggedOffsets, limit: ReadLimit) -> LoggedOffsets:
        progress = self._progress
        progress.at(from_log(start))
        end = self._next_end(start, limit)
        if self._available_now and end == start:  # the last call: Spark ends this process once it has its answer
            progress.finish()
        return end

    def commit(self, end: LoggedOffsets) -> None:
        self._progress.done(from_log(end))

    def stop(self) -> None:
        if self._progress_once is not None:
            self._progress_once.stop()

    @property
    def _progress(self) -> Progress:
        if self._progress_once is None:
            options = self._selected.options
            self._progress_once = Progress(connected(options), options.group, options.selection.words())
            weakref.finalize(self, self._progress_once.end)
        return self._progress_once

    def _next_end(self, start: LoggedOffsets, limit: ReadLimit) -> LoggedOffsets:
        position = from_log(start)
        once = isinstance(limit, ReadAllAvailable)
        latest = self._latest_from(position)
        if latest == position and not once and not self._available_now:
            latest = self._waited(position)
        self._latest = latest
        if self._available_now:
            latest = self._up_to_target(latest)
        if self._hold_start:
            self._hold_start = False
            if position == self._initial:
                return to_log(position)
        if isinstance(limit, ReadMaxRows):
            latest = limited(position, latest, limit.max_rows)
        return to_log(latest)

    def reportLatestOffset(self) -> LoggedOffsets:
        return to_log(self._latest)

    def partitions(self, start: LoggedOffsets, end: LoggedOffsets) -> Sequence[InputPartition]:
        ranges = input_ranges(from_log(start), from_log(end))
        topic_ids = self._partitions_now([each.partition for each in ranges])
        gone = {each.partition for each in ranges} - topic_ids.keys()
        if gone:
            raise DataLost(reason=f"the batch reads {partition_names(gone)}, deleted since")
        return [InputPartition(PlannedRange(each, topic_ids[each.partition])) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        try:
            yield from read_rows(self._selected.options, self._schema, partition.value)
        except (OffsetOutOfRange, UnknownTopic, UnknownTopicId) as error:
            raise DataLost(reason=str(error)) from error

    def _waited(self, position: PartitionOffsets) -> PartitionOffsets:
        """Where the partitions end, once they have more than the position, at the latest after a while.

        An idle stream would else ask 90 times a second: Spark's pause between two calls is 10 ms.
        """
        latest = position
        for _ in range(_IDLE_CHECKS):
            # Spark ends this process to stop the query, so nothing has to be able to wake it.
            time.sleep(_IDLE_WAIT_S / _IDLE_CHECKS)
            latest = self._latest_from(position)
            if latest != position:
                break
        return latest

    def _up_to_target(self, latest: PartitionOffsets) -> PartitionOffsets:
        """Where AvailableNow ends: what the log had at the first call, as long as it still has it."""
        if self._target is None:
            self._target = latest
        elif lost := whats_lost(self._target, latest):
            raise DataLost(reason=lost)
        return self._target

    def _partitions_now(self, known: Iterable[TopicPartition] = ()) -> dict[TopicPartition, bytes]:
        """The selected partitions.

        Raises:
            DataLost: a topic of those that the stream knows was deleted, or created again since this process began.
        """
        try:
            partitions = self._selected.partitions()
        except UnknownTopic as error:
            topic = error.facts["topic"]
            if not any(partition.topic == topic for partition in known):
                raise
            raise DataLost(reason=f"topic '{topic}', which the stream reads, was deleted") from error
        for partition, topic_id in partitions.items():
            if self._topic_ids.setdefault(partition.topic, topic_id) != topic_id:
                raise DataLost(reason=f"topic '{partition.topic}' was deleted and created again")
        return partitions

    def _latest_from(self, position: PartitionOffsets) -> PartitionOffsets:
        """Where the selected partitions end now.

        Raises:
            DataLost: the log has no longer what follows a position. Asked several times before: a broker that has not
                heard yet of a new partition, which another told of, has it neither.
        """
        for pause in _LOSS_PAUSES_S:
            try:
                return self._latest_checked(position)
            except DataLost as error:
                log.warning("data_loss_suspected", reason=str(error))
                time.sleep(pause)  # for a broker's watch to fire elsewhere: nothing here is told of it
        return self._latest_checked(position)

    def _latest_checked(self, position: PartitionOffsets) -> PartitionOffsets:
        partitions = self._partitions_now(position)
        selected = self._selected
        latest = selected.at(LATEST, partitions)
        if lost := whats_lost(position, latest):
            raise DataLost(reason=lost)
        added = partitions.keys() - position.keys()
        for partition, earliest in sorted(selected.at(EARLIEST, added).items()):
            if earliest > 0:
                raise DataLost(reason=f"partition {partition}, new to the stream, starts at {earliest}, not at 0")
        return latest
