"""Group offsets: commit and read, in ZooKeeper. Any broker answers; it keeps nothing of a group itself."""

from __future__ import annotations

from broker.replica.catalog import Catalog
from kafkalog.errors import InvalidRequest, UnknownPartition
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk import groups, paths


def commit_offsets(request: pb.CommitOffsetsRequest, catalog: Catalog) -> pb.CommitOffsetsReply:
    """Write a group's offsets in one go. Raises InvalidRequest, UnknownTopic, UnknownPartition."""
    _check_group(request.group)
    offsets = {}
    for committed in request.offsets:
        topic = catalog.topic(committed.topic)
        if committed.partition >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=committed.partition, partitions=len(topic.replicas))
        if committed.offset < 0:
            raise InvalidRequest(reason=f"offset {committed.offset} of {topic.name}-{committed.partition} is negative")
        offsets[TopicPartition(committed.topic, committed.partition)] = committed.offset
    if offsets:
        ids = {partition.topic: catalog.topic(partition.topic).topic_id for partition in offsets}
        groups.commit_offsets(catalog.session, request.group, offsets, ids, catalog.clock.now_us())
    return pb.CommitOffsetsReply()


def committed_offsets(request: pb.CommittedOffsetsRequest, catalog: Catalog) -> pb.CommittedOffsetsReply:
    """A group's offsets; partitions without one, and topics that are gone, are left out. Raises InvalidRequest."""
    _check_group(request.group)
    ids = {name: topic.topic_id for name, topic in catalog.topics.items()}
    found = groups.committed_offsets(catalog.session, request.group, ids, request.topics)
    reply = pb.CommittedOffsetsReply()
    for (topic, number), offset in sorted(found.items()):
        reply.offsets.add(topic=topic, partition=number, offset=offset)
    return reply


def _check_group(group: str) -> None:
    if not paths.is_valid_name(group):
        raise InvalidRequest(
            reason=f"'{group}' is no group name: 1 to 249 of the characters a-z A-Z 0-9 . _ - and not '.' or '..'"
        )
