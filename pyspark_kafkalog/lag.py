"""How far a streaming query is behind, from the progress that Spark reports.

    spark.streams.addListener(LagListener())        # logs it with every progress
    kafkalog_lag(query.lastProgress).total

Spark has metrics of a source (`offsetsBehindLatest`) only for sources in Java; it does report `latestOffset` for ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming.listener import StreamingQueryListener

from kafkalog.errors import InvalidArgument
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import PartitionOffsets, from_log

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

log = get_logger(__name__)

_NULL = (None, "null", "None")
"""How a progress has Spark's null: parsed, as JSON, and as PySpark makes text of it."""


class Lag(NamedTuple):
    """The lag of a query: records between its position and the ends of its partitions."""

    partitions: dict[TopicPartition, int]

    @property
    def total(self) -> int:
        return sum(self.partitions.values())

    @property
    def partitions_behind(self) -> int:
        """How many partitions have a lag."""
        return sum(lag > 0 for lag in self.partitions.values())

    @property
    def furthest(self) -> TopicPartition | None:
        """The partition with the largest lag; None if none has any."""
        return max(sorted(self.partitions), key=self.partitions.__getitem__) if self.partitions_behind else None


def kafkalog_lag(progress: Mapping[str, Any] | None) -> Lag:
    """The lag of a query at a progress, over all of its kafkalog sources.

    A partition that two of them read counts with the larger lag. Spark does not report a source's name; one that is
    written in Python and whose offsets look like ours counts as ours.

    Args:
        progress: a `StreamingQueryProgress`, or the dictionary that its JSON holds.

    Raises:
        InvalidArgument: it is None, as a query's `lastProgress` before its first micro-batch has ended; or it is of a
            micro-batch that a restart repeated, with which Spark reports no ends of partitions.
    """
    if progress is None:
        raise InvalidArgument(
            reason="the query has no progress yet (lastProgress is None); ask again after its first micro-batch"
        )
    lags: dict[TopicPartition, int] = {}
    for end, latest in _positions(progress):
        for partition, lag in behind(end, latest).items():
            lags[partition] = max(lag, lags.get(partition, lag))
    return Lag(lags)


def behind(end: PartitionOffsets, latest: PartitionOffsets) -> PartitionOffsets:
    """Records of each partition between two positions. One that only `latest` has is new: it is read from 0."""
    return {partition: max(0, offset - end.get(partition, 0)) for partition, offset in latest.items()}


def _positions(progress: Mapping[str, Any]) -> Iterable[tuple[PartitionOffsets, PartitionOffsets]]:
    for source in progress["sources"]:
        end, latest = _offsets(source["endOffset"]), _offsets(source["latestOffset"])
        if end is None or str(source["description"]).startswith("Kafka"):
            continue
        if end and source["latestOffset"] in _NULL:
            raise InvalidArgument(
                reason="this progress has no latestOffset, because a restart repeated its micro-batch; ask again after "
                "the next one"
            )
        if latest is not None:
            yield end, latest


def _offsets(told: Any) -> PartitionOffsets | None:
    """A source's offsets, from JSON text or what was made of it; None if they are not ours."""
    try:
        parsed = json.loads(told) if isinstance(told, str) else told
        return from_log(parsed)
    except (ValueError, TypeError, AttributeError):
        return None


class LagListener(StreamingQueryListener):
    """Logs every query's lag, as the event `stream_lag` of the logger `pyspark_kafkalog.lag`, at level info; as
    `stream_lag_unknown` where Spark does not report the ends of partitions."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        try:
            lag = kafkalog_lag(progress)
        except InvalidArgument as error:
            log.info(
                "stream_lag_unknown",
                query=progress.name or str(progress.id),
                batch=progress.batchId,
                reason=error.facts["reason"],
            )
            return
        if lag.partitions:
            log.info(
                "stream_lag",
                query=progress.name or str(progress.id),
                batch=progress.batchId,
                lag=lag.total,
                partitions_behind=lag.partitions_behind,
                furthest=str(lag.furthest or ""),
                furthest_lag=max(lag.partitions.values()),
            )

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Logs nothing."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Logs nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Logs nothing: the group in ZooKeeper has the last position."""
