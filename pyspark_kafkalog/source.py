"""Reading: a batch's and a stream's readers, on the driver and in the tasks. Knows the client; the arithmetic of
offsets is `offsets.py`'s, the making of rows `columns.py`'s.

A batch is bound late: its partitions carry earliest and latest as symbols that each task looks up when it reads, for
Spark plans a DataFrame once and runs the same plan again and again. A stream's partitions carry numbers.

A stream's position is in Spark's checkpoint, as JSON; what this reader remembers between micro-batches (its start, the
ids of its topics, the target of AvailableNow) is gone after a restart and must not be needed then. Spark calls
`initialOffset` twice on a first start, so it is remembered: a `latest` that moved in between would lose what lies there.
For the same reason the first `latestOffset` of a stream that starts at latest returns the start unchanged: an empty
first batch writes the position down before anything is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from kafkalog.errors import DataLost, InvalidArgument, OffsetOutOfRange, UnknownPartition, UnknownTopic, UnknownTopicId
from kafkalog.log import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.columns import Rows, check_projection
from pyspark_kafkalog.offsets import (
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

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.client.cluster import Cluster

log = get_logger(__name__)

NO_LIMIT = (1 << 63) - 1


class PlannedRange(NamedTuple):
    """What travels to a task: a range, and the topic's id where a topic made anew under the name must not be read."""

    range: InputRange
    topic_id: bytes | None


class Selected:
    """The partitions that a read selects, as the brokers tell of them now."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    @property
    def _cluster(self) -> Cluster:
        return connected(self._options)

    def partitions(self) -> dict[TopicPartition, bytes]:
        """The id of its topic, by selected partition.

        Raises:
            UnknownTopic: a topic named by subscribe or assign is not there.
        """
        selection = self._options.selection
        if selection.option == "subscribePattern":
            topics = [topic for topic in self._cluster.topics() if selection.matches(topic.name)]
        else:
            topics = self._cluster.describe_topics(selection.topics())
        found = {
            TopicPartition(topic.name, partition.partition): topic.topic_id
            for topic in topics
            for partition in topic.partitions
        }
        if selection.option == "assign" and (missing := set(selection.value) - found.keys()):
            log.warning("assigned_partitions_not_there", partitions=partition_names(missing))
        return {partition: found[partition] for partition in sorted(found) if selection.takes(partition)}

    def at(self, symbol: int, partitions: Iterator[TopicPartition]) -> PartitionOffsets:
        """The offset at which each partition starts or ends now."""


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
        starts = position_of_each("startingOffsets", starting, partitions)
        ends = position_of_each("endingOffsets", ending, partitions)
        return [
            InputPartition(PlannedRange(InputRange(partition, starts[partition], ends[partition]), None))
            for partition in partitions
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's stand-in where nothing was planned
            return iter(())
        return read_rows(self._options, self._schema, partition.value)
