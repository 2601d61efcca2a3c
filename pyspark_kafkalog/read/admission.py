"""How many of the available records a micro-batch reads, and whether there are enough for one yet. Pure, except for the
clock that is passed in.

The rules are those of Spark's Kafka connector. A limit is shared out in proportion to each partition's backlog, of
records or of bytes; a share is rounded down from 1 on and up below 1, so that every partition with a backlog moves on
and the sum may miss the limit a little either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import PartitionOffsets


def backlog(start: Mapping[TopicPartition, int], end: PartitionOffsets) -> PartitionOffsets:
    """How many records lie between two positions, by partition that has any. One that `start` lacks begins at 0."""
    sizes = {partition: offset - start.get(partition, 0) for partition, offset in end.items()}
    return {partition: size for partition, size in sizes.items() if size > 0}


def shares(sizes: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """A limit shared out in proportion to the sizes; no more than each, and at least 1."""
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    # whole numbers: a float would lose offsets beyond 2**53
    return {partition: min(limit * size // total or 1, size) for partition, size in sizes.items()}


def limited(start: Mapping[TopicPartition, int], end: PartitionOffsets, max_offsets: int) -> PartitionOffsets:
    """The end offsets of a micro-batch of about `max_offsets` records; without a backlog as in `end`."""
    taken = shares(backlog(start, end), max_offsets)
    return {
        partition: start.get(partition, 0) + taken[partition] if partition in taken else offset
        for partition, offset in end.items()
    }


class MinOffsets:
    """Whether there are enough records for a micro-batch (minOffsetsPerTrigger), or the wait was long enough.

    The first micro-batch after a start is always admitted, because the time of the previous one is unknown.

    Args:
        min_offsets: records that are enough; None: any are.
        max_delay_s: so long after the last micro-batch was admitted, fewer records are enough (maxTriggerDelay).
    """

    def __init__(self, min_offsets: int | None, max_delay_s: float, clock: Callable[[], float]) -> None:
        self._min_offsets = min_offsets
        self._max_delay_s = max_delay_s
        self._clock = clock
        self._admitted: float | None = None

    def admits(self, new_records: int) -> bool:
        """Whether a micro-batch of `new_records` records may begin; if so, it counts as begun."""
        if self._min_offsets is None:
            return True
        now = self._clock()
        waited = self._admitted is None or now - self._admitted >= self._max_delay_s
        if not waited and new_records < self._min_offsets:
            return False
        self._admitted = now
        return True
