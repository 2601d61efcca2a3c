"""Topics: describe, create, alter, delete. Any broker answers; a change is one write in ZooKeeper, which all brokers
follow. A lost partition is replaced by the broker that should lead it.

A change returns once this broker has seen it. For a new topic or partition it also waits until the leader has opened
the log, so that a client may use it at once. This wait is bounded, because a leader that has just died opens nothing,
and a leader may have thousands of logs to open; the answer then has no leader for it, and states whether this broker is
behind. The topic exists all the same, and clients wait for its leaders. Whether other brokers have followed a change, a
client asks them (`Admin`).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from broker.config import TopicSettings
from broker.replica.host import Host
from broker.replica.metadata import topic_settings
from broker.states.placement import place_replicas
from kafkalog.errors import (
    InvalidPartitions,
    InvalidRequest,
    InvalidSetting,
    InvalidTopicName,
    KafkalogError,
    UnknownTopic,
)
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from kafkalog.zk import groups, paths, registry
from kafkalog.zk.registry import TopicRecord

OFFSETS_SKIPPED = 10_000_000
"""Offsets skipped when a lost log is replaced: from the highest committed offset to the first record of the new log.
They must cover what was read and not yet committed: a stream publishes its position within seconds, and a partition
that gets a million records a second gets this many in ten. More would cost a stream with failOnDataLoss=false, because
it crosses the gap in micro-batches of maxOffsetsPerTrigger."""
_START_OFFSET_MAX = 1 << 62
_MIN_INSYNC = "min.insync.replicas"
_COMMITTED_MAX = 1 << 53
"""A larger committed offset is no position in a log: 285 years at a million records a second."""
_SEEN_SECONDS = 10.0
_OPENED_SECONDS = 10.0  # `Admin.create_topic` says so
_ANSWER_SECONDS = 1.0
"""Left of a call's time to answer in: so that the reply arrives before the client's timeout."""


def describe_topics(request: pb.DescribeTopicsRequest, host: Host, cluster_id: str) -> pb.TopicDescriptions:
    """The topics asked for, each once and in that order (names first); all of them if none is named."""
    reply = pb.TopicDescriptions(is_uncertain=not host.metadata.is_certain(), cluster_id=cluster_id)
    if not request.names and not request.ids:
        for topic in host.metadata.topics.values():
            if not request.moving or any(state.target for state in topic.states.values()):
                _describe(topic, host, reply.topics.add(), request.extents, request.moving)
    for name in dict.fromkeys(request.names):
        described = reply.topics.add()
        try:
            _describe(_topic(name, host), host, described, request.extents, request.moving)
        except KafkalogError as error:
            described.name = name
            described.error.CopyFrom(error_to_wire(error))
    for topic_id in dict.fromkeys(request.ids):
        described = reply.topics.add()
        try:
            _describe(host.metadata.topic_by_id(topic_id), host, described, request.extents, request.moving)
        except KafkalogError as error:
            described.topic_id = topic_id
            described.error.CopyFrom(error_to_wire(error))
    return reply


def create_topic(request: pb.CreateTopicRequest, host: Host, seconds_left: float) -> pb.TopicDescription:
    """Make a topic, its replicas spread over the live brokers.

    Args:
        seconds_left: until the caller gives the call up.

    Raises:
        InvalidTopicName, InvalidPartitions, TopicExists, NoBrokers, InvalidReplicationFactor, UnknownSetting,
            InvalidSetting.
    """
    if not paths.is_valid_name(request.name):
        raise InvalidTopicName(topic=request.name)
    replication_factor = request.replicas or host.settings.default_replication_factor
    count = request.partitions or host.settings.num_partitions
    _check_count(request.name, count, host)
    config = _checked_config(dict(request.config))
    least = min(host.settings.default_min_insync_replicas, replication_factor)
    if _MIN_INSYNC not in config and least > 1:
        config[_MIN_INSYNC] = str(least)
    _check_min_insync(config, replication_factor)
    topic = TopicRecord(
        name=request.name,
        topic_id=uuid.uuid4().bytes,
        config=config,
        replicas=_place(host, count, replication_factor),
        created_us=host.clock.now_us(),
    )
    registry.create_topic(host.metadata.session, topic)
    return _once_opened(topic, 0, range(count), host, seconds_left)


def alter_topic(request: pb.AlterTopicRequest, host: Host, seconds_left: float) -> pb.TopicDescription:
    """Change a topic's settings, or give it more partitions.

    Args:
        seconds_left: until the caller gives the call up.

    Raises:
        UnknownTopic, InvalidPartitions, UnknownSetting, InvalidSetting, NoBrokers, InvalidReplicationFactor.
    """
    while True:
        topic = registry.read_topic(host.metadata.session, request.name) if paths.is_valid_name(request.name) else None
        if topic is None or topic.deleted:
            raise UnknownTopic(topic=request.name)
        config = _altered_config(topic.config, request)
        if topic.replicas:
            _check_min_insync(config, _fewest_replicas(topic))
        replicas = list(topic.replicas)
        if request.partitions:
            if request.partitions < len(replicas):
                reason = f"it has {len(replicas)}, and partitions cannot be removed"
                raise InvalidPartitions(topic=topic.name, partitions=request.partitions, reason=reason)
            _check_count(topic.name, request.partitions, host)
            replicas += _place(host, request.partitions - len(replicas), len(_assigned(topic)[0]))
        altered = TopicRecord(**{**vars(topic), "config": config, "replicas": replicas})
        if registry.update_topic(host.metadata.session, altered):
            added = range(len(topic.replicas), len(replicas))
            return _once_opened(altered, topic.version + 1, added, host, seconds_left)


def delete_topic(request: pb.DeleteTopicRequest, host: Host, seconds_left: float) -> pb.DeleteTopicReply:
    """Delete a topic; its logs are removed by the brokers that hold them. Raises UnknownTopic."""
    if not paths.is_valid_name(request.name):
        raise UnknownTopic(topic=request.name)
    topic_id = registry.delete_topic(host.metadata.session, request.name)
    seconds = _bounded(_SEEN_SECONDS, seconds_left)
    host.metadata.wait_until(
        lambda: all(topic.topic_id != topic_id for topic in host.metadata.topics.values()), seconds
    )
    return pb.DeleteTopicReply(topic_id=topic_id)


def recover_partitions(
    request: pb.RecoverPartitionsRequest, host: Host, seconds_left: float
) -> pb.RecoverPartitionsReply:
    """Replace lost logs that should be led here by empty ones.

    No offset may be assigned twice. How many the lost log had assigned is unknown; only the groups' committed offsets
    are known. So a new log begins `OFFSETS_SKIPPED` after the highest of these: a reader that continues from an offset
    of the lost log gets OffsetOutOfRange, and neither takes new records for old ones nor skips any.

    Raises:
        UnknownTopicId, UnknownPartition, NotLeader, NotLost, InvalidRequest, StorageFailed, DiskFull.
    """
    topic = host.metadata.topic_by_id(request.topic_id)
    reply = pb.RecoverPartitionsReply()
    read_to: Mapping[int, tuple[int, str]] = {}
    if request.HasField("start_offset"):
        if not 0 <= request.start_offset <= _START_OFFSET_MAX:
            raise InvalidRequest(reason=f"start offset {request.start_offset} must be from 0 to {_START_OFFSET_MAX}")
    else:
        read_to = groups.highest_offsets(host.metadata.session, topic.name, topic.topic_id)
    for number in request.partitions:
        committed, group = read_to.get(number, (0, ""))
        if committed > _COMMITTED_MAX:
            raise InvalidRequest(
                reason=f"group '{group}' has committed offset {committed} of {topic.name}-{number}, which is too "
                "large to be an offset of its log: give the start of the new log (--start-offset)"
            )
    for number in request.partitions:
        behind = read_to.get(number, (0, ""))[0] + OFFSETS_SKIPPED
        start_offset = request.start_offset if request.HasField("start_offset") else behind
        state = host.replace_lost(topic.topic_id, number, start_offset, _bounded(_OPENED_SECONDS, seconds_left))
        reply.partitions.add(partition=number, start_offset=start_offset, leader_epoch=state.leader_epoch)
    return reply


def _topic(name: str, host: Host) -> TopicRecord:
    if not paths.is_valid_name(name):
        raise InvalidTopicName(topic=name)
    return host.metadata.topic(name)


def _dotted(name: str) -> str:
    return name.replace("_", ".")


def _checked_config(config: Mapping[str, str]) -> dict[str, str]:
    """A topic's config as ZooKeeper keeps it: dotted names, valid values as text."""
    given = TopicSettings.parse(config).given()
    return {name: TopicSettings.rows[name].to_text(value) for name, value in given.items()}


def _altered_config(config: Mapping[str, str], request: pb.AlterTopicRequest) -> dict[str, str]:
    """A topic's config after a change. Settings that this version does not know are kept, unless the request names
    them."""
    for name in request.unset:
        if name not in config:
            TopicSettings.parse({name: None})  # an unknown one is refused with the nearest known one
    changes = {_dotted(name): value for name, value in request.set.items()}
    unset = {*request.unset, *map(_dotted, request.unset)}
    kept = {name: value for name, value in config.items() if name not in unset and name not in changes}
    _, refused = TopicSettings.understood(config)
    checked = _checked_config({name: value for name, value in kept.items() if name not in refused} | changes)
    return {name: value for name, value in kept.items() if name in refused} | checked


def _check_count(topic: str, count: int, host: Host) -> None:
    limit = host.settings.max_partitions_per_topic
    if count > limit:
        reason = f"the broker's max.partitions.per.topic is {limit}"
        raise InvalidPartitions(topic=topic, partitions=count, reason=reason)


def _place(host: Host, count: int, replication_factor: int) -> list[tuple[int, ...]]:
    assigned = [replicas for topic in host.metadata.topics.values() for replicas in _assigned(topic)]
    hosted = Counter(broker for replicas in assigned for broker in replicas)
    led = Counter(replicas[0] for replicas in assigned)
    live = registry.live_brokers(host.metadata.session).values()
    return place_replicas(
        {each.broker_id: each.rack for each in live if not each.stopping}, led, hosted, count, replication_factor
    )


def _assigned(topic: TopicRecord) -> list[tuple[int, ...]]:
    """The replicas of each partition, once it is moved if it is being moved."""
    return [
        state.target or topic.replicas_of(number) if (state := topic.states.get(number)) else tuple(replicas)
        for number, replicas in enumerate(topic.replicas)
    ]


def _fewest_replicas(topic: TopicRecord) -> int:
    """How many replicas every partition has, also if it is moved, or the move is cancelled."""
    before = [state.replicas for state in topic.states.values() if state.target]
    return min(map(len, [*_assigned(topic), *before]))


def _check_min_insync(config: Mapping[str, str], replication_factor: int) -> None:
    """Raises InvalidSetting: acks=all could never be given, and nothing be read."""
    least = int(config.get(_MIN_INSYNC, 1))
    if least > replication_factor:
        reason = f"the topic has {replication_factor} {'replica' if replication_factor == 1 else 'replicas'}"
        raise InvalidSetting(name=_MIN_INSYNC, value=least, reason=reason)


def _bounded(seconds: float, left: float) -> float:
    return max(0.0, min(seconds, left - _ANSWER_SECONDS))


def _once_opened(
    topic: TopicRecord, version: int, added: range, host: Host, seconds_left: float
) -> pb.TopicDescription:
    """Wait for a change of a topic, then describe the topic. The change is complete when its znode's version is seen
    here, the logs here have the settings, and added partitions are open (or failed here; their users then get the
    error). The wait is bounded."""

    def current() -> TopicRecord | None:
        seen = host.metadata.topics.get(topic.name)
        return seen if seen is not None and seen.topic_id == topic.topic_id else None

    live = host.metadata.brokers.keys()

    def opened() -> bool:
        seen = current()
        return (
            seen is not None
            and seen.version >= version
            and not host.is_behind(topic.name)
            and all(_is_ready(seen, number, live) or host.failure(topic.topic_id, number) for number in added)
        )

    followed = host.metadata.wait_until(opened, _bounded(_OPENED_SECONDS, seconds_left))
    seen = current()
    description = pb.TopicDescription()
    _describe(
        seen if seen is not None and seen.version >= version else replace(topic, version=version), host, description
    )
    description.behind = not followed
    return description


def _is_ready(topic: TopicRecord, number: int, live: Collection[int]) -> bool:
    """Whether a partition has a leader, and its other live replicas are in sync."""
    state = topic.states.get(number)
    return state is not None and all(each in state.isr for each in topic.replicas_of(number) if each in live)


def _describe(
    topic: TopicRecord,
    host: Host,
    description: pb.TopicDescription,
    with_extents: bool = False,
    only_moving: bool = False,
) -> None:
    description.name = topic.name
    description.topic_id = topic.topic_id
    description.created_us = topic.created_us
    description.created_zxid = topic.created_zxid
    description.version = topic.version
    description.behind = host.is_behind(topic.name)
    description.config.update(topic.config)
    for name, value in topic_settings(topic).items():
        description.effective[name] = TopicSettings.rows[name].to_text(value)
    for number in range(len(topic.replicas)):
        state = topic.states.get(number)
        if only_moving and (state is None or not state.target):
            continue
        described = description.partitions.add(partition=number, leader=host.metadata.leader_id(topic, number))
        described.replicas.extend(topic.replicas_of(number))
        if state is not None:
            described.adding.extend(state.adding)
            described.removing.extend(state.removing)
            described.target.extend(state.target)
            described.throttled_rate = state.throttled_rate
            described.leader_epoch = state.leader_epoch
            described.isr.extend(state.isr)
            described.eligible.extend(state.eligible)
        failure = host.failure(topic.topic_id, number)
        if failure is not None and described.leader in (-1, host.broker_id):  # another replica serves it else
            described.error.CopyFrom(error_to_wire(failure))
        if with_extents:
            try:
                partition = host.leader_of(topic.topic_id, number)
            except KafkalogError:  # another broker's, or returned as the failure
                continue
            described.extent.start_offset = partition.start_offset  # before the end, which is never before it then
            described.extent.end_offset = partition.readable_end_offset
            described.extent.size_bytes = partition.size_bytes
            for broker_id in described.adding:
                described.copies.add(broker_id=broker_id, lacking_bytes=partition.role.lacking_bytes(broker_id))
