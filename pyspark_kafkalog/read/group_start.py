"""The group of a read: its name, and starts where the group has committed. Knows no stream; the name is pure.

Spark does not report the query's id to a source's process, so a group that the user does not name is called after what
is read: the same query has the same group after a restart and on a new checkpoint, and two queries that read the same
share one (only the first of them publishes, see `group_publisher.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.errors import CommittedOffsetGone, NoCommittedOffset
from kafkalog.records import TopicPartition
from kafkalog.zk.paths import is_valid_name
from pyspark_kafkalog.offsets import COMMITTED, EARLIEST, PartitionOffsets, symbols_in

if TYPE_CHECKING:
    from kafkalog.client.cluster import Cluster

_READABLE_MAX = 100


def default_group(option: str, value: Any, prefix: str) -> str:
    """The group of a read that names none, from what it selects.

    One topic by subscribe: `<prefix>-<topic>`. Anything else: `<prefix>-<topics or pattern>-<8 hexadecimal digits>`,
    with what a name may not have replaced, and the digits those of its SHA-256.

    Args:
        option: subscribe, subscribePattern or assign.
        value: the option's parsed value.
        prefix: what the name begins with; of a long one the beginning.
    """
    if option == "subscribe" and len(value) == 1 and is_valid_name(f"{prefix}-{value[0]}"):
        return f"{prefix}-{value[0]}"
    names = [value] if isinstance(value, str) else [str(each) for each in value]  # a pattern; topics; partitions
    digest = hashlib.sha256("\n".join([option, *names]).encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-zA-Z0-9._-]+", "_", "-".join(names))[:_READABLE_MAX]
    return f"{prefix[:_READABLE_MAX]}-{readable}-{digest}"


def with_committed(cluster: Cluster, group: str, fallback: str, starts: PartitionOffsets) -> PartitionOffsets:
    """Replace COMMITTED in starts by the group's current offsets.

    Of a topic in which the group has an offset, a partition without one is new and starts at its first record, whatever
    the fallback is: nothing of it is skipped (docs/GROUPS.md, rule 10).

    Raises:
        NoCommittedOffset: the group has none in a topic, and the fallback is error.
        CommittedOffsetGone: an offset is not in the log, and the fallback is error.
    """
    from kafkalog.client.admin import list_offsets
    from kafkalog.client.groups import committed_offsets

    wanted = symbols_in([starts], COMMITTED)
    if not wanted:
        return starts
    committed = committed_offsets(cluster, group, sorted({partition.topic for partition in wanted}))
    first = {
        partition: found.offset for partition, found in list_offsets(cluster, dict.fromkeys(wanted, "earliest")).items()
    }
    last = {
        partition: found.offset for partition, found in list_offsets(cluster, dict.fromkeys(wanted, "latest")).items()
    }
    known = {partition.topic for partition in committed}
    new = {partition for partition in wanted if partition.topic in known and partition not in committed}
    return (
        starts
        | dict.fromkeys(new, EARLIEST)
        | {
            partition: start_of(partition, group, fallback, committed, first[partition] or 0, last[partition] or 0)
            for partition in wanted
            if partition not in new
        }
    )


def start_of(
    partition: TopicPartition,
    group: str,
    fallback: str,
    committed: Mapping[TopicPartition, int],
    earliest: int,
    latest: int,
) -> int:
    """Where a partition of [earliest, latest) starts: its committed offset, or by the fallback.

    Earliest stays a symbol, which a batch looks up when it reads. Latest becomes an offset, because a batch cannot
    start at the symbol.
    """
    offset = committed.get(partition)
    if offset is not None and earliest <= offset <= latest:
        return offset
    if fallback == "error":
        if offset is None:
            hint = ", or name the group that has offsets with kafkalog.group.id"  # it may be named after its topic
            raise NoCommittedOffset(group=group, partition=str(partition), hint=hint)
        raise CommittedOffsetGone(
            group=group, partition=str(partition), offset=offset, start_offset=earliest, end_offset=latest
        )
    return EARLIEST if fallback == "earliest" else latest
