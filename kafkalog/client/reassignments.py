"""Moves of partitions to other brokers as a client sees them (KIP-455). `Admin` offers what users need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kafkalog.client.cluster import Cluster
from kafkalog.errors import BrokerBusy, BrokerStopping, BrokerUnreachable, KafkalogError, RequestTimedOut
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_from_wire

_SILENT = (BrokerBusy, BrokerUnreachable, BrokerStopping, RequestTimedOut)


class Reassignment(NamedTuple):
    """What became of a request to move a partition.

    Attributes:
        replicas: the brokers that have it, the preferred leader first.
        target: the brokers that it is moved to.
        error: why nothing was changed; None: it was.
    """

    partition: TopicPartition
    replicas: tuple[int, ...]
    target: tuple[int, ...]
    error: KafkalogError | None = None


class ReassignmentProgress(NamedTuple):
    """A partition that is being moved.

    Attributes:
        replicas: the brokers that had it before, the preferred leader first.
        target: the brokers that it is moved to.
        adding: those of the target that did not have it.
        removing: those from before that will not have it.
        isr: the replicas that are in sync. The move is over once the whole target is.
        throttled_rate: bytes a second that each added broker copies; 0: no limit.
        size_bytes: of the log; None: its leader did not answer.
        lacking_bytes: by broker in `adding`, about how much of the log it does not have; empty: the leader did not
            answer.
    """

    partition: TopicPartition
    replicas: tuple[int, ...]
    target: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    isr: tuple[int, ...]
    throttled_rate: int
    size_bytes: int | None
    lacking_bytes: Mapping[int, int]


def change(cluster: Cluster, request: pb.ReassignPartitionsRequest) -> list[Reassignment]:
    """Send a request, which may be repeated: what it wants is not changed a second time."""
    reply: pb.ReassignPartitionsReply = cluster.call("ReassignPartitions", request)
    return [
        Reassignment(
            TopicPartition(each.topic, each.partition),
            tuple(each.replicas),
            tuple(each.target),
            error_from_wire(each.error) if each.HasField("error") else None,
        )
        for each in reply.partitions
    ]


def under_way(cluster: Cluster, topic: str | None, partitions: Iterable[int]) -> list[ReassignmentProgress]:
    """The partitions that are being moved, as far as any live broker knows. Sends one request to each."""
    request = pb.DescribeTopicsRequest(names=[] if topic is None else [topic], extents=True, moving=True)
    wanted, found = set(partitions), dict[TopicPartition, ReassignmentProgress]()
    live = [broker.broker_id for broker in cluster.describe().brokers]
    for reply in cluster.call_each("DescribeTopics", request, live).values():
        if isinstance(reply, _SILENT):
            continue
        if isinstance(reply, Exception):
            raise reply
        for described in reply.topics:
            if described.HasField("error") and topic is not None:
                raise error_from_wire(described.error)
            for each in described.partitions:
                where = TopicPartition(described.name, each.partition)
                is_leaders = each.HasField("extent")
                if each.target and (not wanted or each.partition in wanted) and (is_leaders or where not in found):
                    found[where] = _progress(where, each)
    return [found[where] for where in sorted(found)]


def _progress(where: TopicPartition, described: pb.PartitionDescription) -> ReassignmentProgress:
    adding = tuple(described.adding)
    return ReassignmentProgress(
        where,
        tuple(broker for broker in described.replicas if broker not in adding),
        tuple(described.target),
        adding,
        tuple(described.removing),
        tuple(described.isr),
        described.throttled_rate,
        described.extent.size_bytes if described.HasField("extent") else None,
        {copy.broker_id: copy.lacking_bytes for copy in described.copies},
    )
