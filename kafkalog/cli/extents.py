"""From where to where partitions go, and how far a group is in them, as rows that commands print.

A partition that is not served, as a lost one, has a row with its `error`; the others are shown all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.errors import KafkalogError

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin, PartitionExtent
    from kafkalog.records import TopicPartition


def extent_rows(
    admin: Admin, partitions: Iterable[TopicPartition], committed: Mapping[TopicPartition, int] | None = None
) -> tuple[dict[TopicPartition, dict[str, Any]], dict[TopicPartition, KafkalogError]]:
    """The rows of some partitions, and why some of them are not served.

    Args:
        committed: a group's offsets, for its lag.
    """
    from kafkalog.client.groups import lag

    failed: dict[TopicPartition, KafkalogError] = {}
    wanted = list(partitions)
    starts = admin.list_offsets(dict.fromkeys(wanted, "earliest"), failed)
    ends = admin.list_offsets(dict.fromkeys(wanted, "latest"), failed)
    rows = {}
    for partition in wanted:
        error = failed.get(partition)
        start = end = size = None
        if error is None:
            start, end, size = starts[partition].offset, ends[partition].offset, ends[partition].size_bytes
        row: dict[str, Any] = {
            "partition": partition.partition,
            "start_offset": start,
            "end_offset": end,
            "size_bytes": size,
        }
        if committed is not None:
            reached = committed.get(partition)
            row |= {"committed": reached, "lag": None if start is None or end is None else lag(start, end, reached)}
        rows[partition] = row | {"error": None if error is None else str(error)}
    return rows, failed


def totals(
    extents: Mapping[TopicPartition, PartitionExtent | KafkalogError], partitions: Iterable[TopicPartition]
) -> tuple[int, int, int]:
    """How many records and bytes some partitions have together, and how many of them are not served and not counted."""
    records = size_bytes = unserved = 0
    for partition in partitions:
        extent = extents.get(partition)
        if extent is None or isinstance(extent, KafkalogError):
            unserved += 1
        else:
            records += extent.end_offset - extent.start_offset
            size_bytes += extent.size_bytes
    return records, size_bytes, unserved
