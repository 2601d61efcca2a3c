"""Start and end offsets of partitions, a group's lag, and the brokers that are away, as rows that commands print.

A partition that is not served, such as a lost one, has a row with its `error`; the others are shown all the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.errors import KafkalogError, RetriableError, UnknownTopic

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin, PartitionExtent
    from kafkalog.client.cluster import PartitionInfo
    from kafkalog.records import TopicPartition

_OPENING_SECONDS = 5.0
"""That long a partition whose broker is there, and has not opened its log, is waited for."""
_LOOK_SECONDS = 0.2
_ALL_BYTES = 1 << 62
_ANY_TIME = -1 << 63


def extent_rows(
    admin: Admin, partitions: Iterable[TopicPartition], committed: Mapping[TopicPartition, int] | None = None
) -> tuple[dict[TopicPartition, dict[str, Any]], dict[TopicPartition, KafkalogError]]:
    """The rows of some partitions, and the errors of those that are not served, or have no lag.

    Args:
        committed: a group's offsets, for its lag; there is no lag if the offset is past the end.
    """
    from kafkalog.client.groups import lag

    wanted = list(partitions)
    served, failed = readable(admin, wanted)
    rows = {}
    for partition in wanted:
        error = failed.get(partition)
        start = end = size = None
        if partition in served:
            start, end, size = served[partition]
        row: dict[str, Any] = {
            "partition": partition.partition,
            "start_offset": start,
            "end_offset": end,
            "size_bytes": size,
        }
        if committed is not None:
            reached = committed.get(partition)
            behind = None if start is None or end is None else lag(start, end, reached)
            if behind is not None and behind < 0:
                error = failed[partition] = KafkalogError(
                    reason=f"the group has committed offset {reached} of {partition}, which ends at {end}: records at "
                    "its end are lost; say where to go on with `kafkalog groups reset`"
                )
                behind = None
            row |= {"committed": reached, "lag": behind}
        rows[partition] = row | {"error": None if error is None else str(error)}
    return rows, failed


def unread_bytes(admin: Admin, unread: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """About how many bytes partitions have from their first unread records on, by their indexes. Partitions that are
    not served any more are left out."""
    from kafkalog.client.admin import AfterBytes

    found = admin.list_offsets({p: AfterBytes(offset, _ALL_BYTES) for p, offset in unread.items()}, {})
    return {partition: each.size_bytes for partition, each in found.items()}


def unread_seconds(admin: Admin, unread: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """The age of the first unread records of partitions. Partitions that are not served any more are left out."""
    from kafkalog.client.admin import AtTimestamp

    found = admin.list_offsets({p: AtTimestamp(_ANY_TIME, offset) for p, offset in unread.items()}, {})
    now_us = time.time_ns() // 1000
    return {
        partition: max(0, now_us - each.timestamp_us) / 1_000_000
        for partition, each in found.items()
        if each.timestamp_us is not None
    }


def live_brokers(admin: Admin) -> set[int]:
    """The ids of the brokers that are registered."""
    return {broker.broker_id for broker in admin.describe_cluster().brokers}


def not_live(brokers: Iterable[int], live: Collection[int]) -> list[int]:
    """Those of some brokers that are not registered."""
    return [broker for broker in brokers if broker not in live]


def is_under_replicated(partition: PartitionInfo, live: Collection[int]) -> bool:
    """Whether some replica is not in sync, or its broker is not registered: the in-sync set has it until a leader or
    the controller writes it anew, and if it is the last one, for good. Replicas that are being added do not count."""
    return partition.is_under_replicated or bool(not_live(set(partition.replicas) - set(partition.adding), live))


def why_unserved(
    found: PartitionExtent | KafkalogError | None, leader: int, live: Collection[int]
) -> KafkalogError | None:
    """Why a partition is not served, by its result of `Admin.extents`; None: it is served.

    Args:
        leader: the id of the broker that leads it.
        live: the ids of the brokers that are registered.
    """
    if found is not None:
        return found if isinstance(found, KafkalogError) else None
    away = "does not answer" if leader in live else "is not registered in the cluster"
    return RetriableError(
        reason=f"its leader, broker {leader}, {away}" if leader >= 0 else "no live broker has opened its log"
    )


def readable(
    admin: Admin, partitions: Iterable[TopicPartition], *, without_gone: bool = False
) -> tuple[dict[TopicPartition, PartitionExtent], dict[TopicPartition, KafkalogError]]:
    """The extents of the served partitions, and the errors of the others.

    Args:
        without_gone: leave out partitions that do not exist.

    Raises:
        UnknownTopic, UnknownPartition
    """
    wanted = list(partitions)
    until = time.monotonic() + _OPENING_SECONDS
    while True:
        if not wanted:
            return {}, {}
        names = sorted({partition.topic for partition in wanted})
        try:
            topics = {topic.name: topic for topic in admin.describe_topics(names)}
            if without_gone:  # a topic may have been made anew with fewer
                wanted = [p for p in wanted if p.partition < len(topics[p.topic].partitions)]
            leaders = {partition: topics[partition.topic].partition(partition.partition).leader for partition in wanted}
            # Only these: another broker of the topics may hang, and an earlier look may have waited for it.
            found = admin.extents(names, brokers=leaders.values())
        except UnknownTopic as unknown:
            if not without_gone:
                raise
            wanted = [partition for partition in wanted if partition.topic != unknown.facts["topic"]]
            continue
        live = live_brokers(admin)
        served: dict[TopicPartition, PartitionExtent] = {}
        failed: dict[TopicPartition, KafkalogError] = {}
        is_opening = False
        for partition in wanted:
            extent = found.get(partition)
            leader = leaders[partition]
            error = why_unserved(extent, leader, live)
            if error is not None:
                failed[partition] = error
                is_opening = is_opening or (extent is None and (leader < 0 or leader in live))
            elif not isinstance(extent, KafkalogError | None):
                served[partition] = extent
        if not is_opening or time.monotonic() >= until:
            return served, failed
        # A log that is being opened is served within moments, but brokers do not notify clients of that. This looks
        # again for _OPENING_SECONDS at most, while its broker is live; Ctrl-C ends it at once.
        time.sleep(_LOOK_SECONDS)


def totals(
    extents: Mapping[TopicPartition, PartitionExtent | KafkalogError], partitions: Iterable[TopicPartition]
) -> tuple[int, int, int]:
    """The sums of the partitions' records and bytes, and the number of partitions not served, which are not in the
    sums."""
    records = size_bytes = unserved = 0
    for partition in partitions:
        extent = extents.get(partition)
        if extent is None or isinstance(extent, KafkalogError):
            unserved += 1
        else:
            records += extent.end_offset - extent.start_offset
            size_bytes += extent.size_bytes
    return records, size_bytes, unserved
