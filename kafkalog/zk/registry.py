"""Brokers, topics, partition states and the cluster's id in ZooKeeper: the paper's registries.

Each function is one read or one change. `broker/requests/topics.py` decides which broker hosts which partition.
Contents are JSON objects with the fields of `paths.py`. Unknown fields of a newer broker are ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kafkalog.errors import NoBrokers, TopicExists, UnknownTopic, UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, read_each, to_json
from kafkalog.zk.session import (
    MULTI_MAX,
    BadVersion,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    Set,
    Watch,
    ZooKeeperSession,
)

log = get_logger(__name__)

_TAKE_DOWN_ATTEMPTS = 20


@dataclass(frozen=True)
class BrokerRecord:
    """A live broker.

    Attributes:
        directory: the id of its data directory. It identifies the broker, also after a move to another machine.
        lock: identifies its locked file in that directory, on its own machine and until the next boot.
        where: host and path of the directory, for people.
        epoch: the czxid of its znode, which grows with every registration.
    """

    broker_id: int
    host: str
    grpc_port: int
    data_port: int
    rack: str = ""
    version: str = ""
    directory: str = ""
    lock: str = ""
    where: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class PartitionState:
    """The state of a partition: its leader, leader epoch and in-sync replicas.

    Attributes:
        directory: the id of the data directory that has the leader's log. It is written after the log is opened, so a
            log that is missing there has been lost.
        version: of the state's znode, for the next write.
    """

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    directory: str
    version: int = 0


@dataclass(frozen=True)
class TopicRecord:
    """A topic's registration in ZooKeeper.

    Attributes:
        replicas: broker ids by partition number. The first one leads unless the partition's state has another leader.
        states: by partition number; none for a partition until its leader has opened the log.
        version: of the topic's znode, for the next write.
        deleted: the topic is deleted, but its znodes are not all removed yet.
    """

    name: str
    topic_id: bytes
    config: Mapping[str, str]
    replicas: Sequence[tuple[int, ...]]
    created_us: int
    states: Mapping[int, PartitionState] = field(default_factory=dict)
    version: int = 0
    deleted: bool = False

    def preferred_leader(self, number: int) -> int:
        """The broker that opens and leads a partition by default: its first replica."""
        return self.replicas[number][0]


# --- the cluster ---------------------------------------------------------------------------------------------------


def cluster_id(session: ZooKeeperSession, now_us: int) -> str:
    """The cluster's id, which the first broker creates. Also creates the permanent parents where they are missing."""
    session.ensure(paths.PERMANENT)
    try:
        session.create(paths.CLUSTER, to_json({"cluster_id": uuid.uuid4().hex, "created_us": now_us}))
    except NodeExists:
        pass
    content, _ = session.get(paths.CLUSTER)
    with fields_of(paths.CLUSTER, content) as fields:
        return str(fields["cluster_id"])


# --- brokers -------------------------------------------------------------------------------------------------------


def register_broker(session: ZooKeeperSession, broker: BrokerRecord) -> BrokerRecord | None:
    """Register a broker as live until the session ends. The znode of an earlier, dead run of the broker is replaced.

    Returns:
        None if the broker was registered; else the other live broker with this id.
    """
    while True:
        try:
            session.create(paths.broker(broker.broker_id), _broker_content(broker), ephemeral=True)
            return None
        except NodeExists:
            pass
        found = _registered(session, broker.broker_id)
        if found is None:
            continue
        other, stat = found
        if _is_another(other, broker):
            return other
        try:
            if stat.ephemeralOwner == session.session_id:
                session.set(paths.broker(broker.broker_id), _broker_content(broker), stat.version)
                return None
            session.delete(paths.broker(broker.broker_id), stat.version)
        except (NoNode, BadVersion):
            continue


def other_broker(session: ZooKeeperSession, broker: BrokerRecord) -> BrokerRecord | None:
    """The registered broker with this broker's id, unless it is this broker or a dead run of it; else None."""
    found = _registered(session, broker.broker_id)
    return found[0] if found is not None and _is_another(found[0], broker) else None


def withdraw_broker(session: ZooKeeperSession, broker: BrokerRecord) -> None:
    """Remove a broker's registration, if this session made it."""
    while True:
        found = _registered(session, broker.broker_id)
        if found is None or found[1].ephemeralOwner != session.session_id:
            return
        try:
            session.delete(paths.broker(broker.broker_id), found[1].version)
            return
        except (NoNode, BadVersion):
            continue


def _is_another(registered: BrokerRecord, broker: BrokerRecord) -> bool:
    """Whether a registration may belong to another live process.

    It does not if directory and lock are the same: only one process can hold the lock, and `broker` holds it. The
    directory's id alone is not enough, because a copy of the directory has the same id.
    """
    return (registered.directory, registered.lock) != (broker.directory, broker.lock)


def _broker_content(broker: BrokerRecord) -> bytes:
    return to_json({name: value for name, value in vars(broker).items() if name not in ("broker_id", "epoch")})


def _registered(session: ZooKeeperSession, broker_id: int) -> tuple[BrokerRecord, Any] | None:
    try:
        content, stat = session.get(paths.broker(broker_id))
    except NoNode:
        return None
    return _broker_record(broker_id, content, stat), stat


def live_brokers(session: ZooKeeperSession, watch: Watch | None = None) -> dict[int, BrokerRecord]:
    """All live brokers by id. `watch` is called when one is registered, changed or removed."""
    found = {}
    for name in session.children(paths.BROKER_IDS, watch):
        try:
            content, stat = session.get(paths.broker(int(name)), watch)
            found[int(name)] = _broker_record(int(name), content, stat)
        except NoNode:
            continue
        except (ValueError, UnreadableZnode) as error:  # not a broker's, or a newer version's; use the others
            log.warning("broker_not_readable", znode=f"{paths.BROKER_IDS}/{name}", reason=str(error))
    return dict(sorted(found.items()))


def _broker_record(broker_id: int, content: bytes, stat: Any) -> BrokerRecord:
    with fields_of(paths.broker(broker_id), content) as fields:
        return BrokerRecord(
            broker_id=broker_id,
            host=fields["host"],
            grpc_port=fields["grpc_port"],
            data_port=fields["data_port"],
            rack=fields.get("rack", ""),
            version=fields.get("version", ""),
            directory=fields.get("directory", ""),
            lock=fields.get("lock", ""),
            where=fields.get("where", ""),
            epoch=stat.czxid,
        )


# --- topics --------------------------------------------------------------------------------------------------------


def topic_names(session: ZooKeeperSession, watch: Watch | None = None) -> list[str]:
    """Names of all topics, including those that are being deleted. `watch` is called when one is created or removed."""
    return sorted(session.children(paths.TOPICS, watch))


def read_topic(session: ZooKeeperSession, name: str, watch: Watch | None = None) -> TopicRecord | None:
    """A topic with the states of its partitions; None if it does not exist. `watch` is called when any of these
    changes."""
    try:
        content, stat = session.get(paths.topic(name), watch)
    except NoNode:
        return None
    topic = _parse_topic(name, content, stat)
    if topic.deleted:
        return topic
    wanted = [paths.partition_state(name, topic.topic_id, number) for number in range(len(topic.replicas))]
    states = {
        number: _read_state(path, *found)
        for number, (path, found) in enumerate(zip(wanted, session.get_many(wanted, watch), strict=True))
        if found is not None
    }
    return replace(topic, states=states)


def topics_now(session: ZooKeeperSession, names: Iterable[str]) -> dict[str, TopicRecord | UnreadableZnode]:
    """Those of these topics that exist, without the states of their partitions. One that cannot be read hides no
    other."""

    def read(some: Sequence[str]) -> list[TopicRecord | None]:
        found = session.get_many([paths.topic(name) for name in some])
        topics = [None if each is None else _parse_topic(name, *each) for name, each in zip(some, found, strict=True)]
        return [None if topic is None or topic.deleted else topic for topic in topics]

    return {name: topic for name, topic in read_each(read, list(names)).items() if topic is not None}


def _parse_topic(name: str, content: bytes, stat: Any) -> TopicRecord:
    with fields_of(paths.topic(name), content) as fields:
        return TopicRecord(
            name=name,
            topic_id=bytes.fromhex(fields["topic_id"]),
            config=fields["config"],
            replicas=[tuple(fields["partitions"][str(number)]) for number in range(len(fields["partitions"]))],
            created_us=fields["created_us"],
            version=stat.version,
            deleted=bool(fields.get("deleted")),
        )


def _read_state(path: str, content: bytes, stat: Any) -> PartitionState:
    with fields_of(path, content) as fields:
        return PartitionState(
            leader=fields["leader"],
            leader_epoch=fields["leader_epoch"],
            isr=tuple(fields["isr"]),
            directory=fields["directory"],
            version=stat.version,
        )


def _topic_content(topic: TopicRecord, deleted: bool = False) -> bytes:
    fields = {
        "topic_id": topic.topic_id.hex(),
        "config": dict(topic.config),
        "partitions": {str(number): list(brokers) for number, brokers in enumerate(topic.replicas)},
        "created_us": topic.created_us,
    }
    if deleted:
        fields["deleted"] = True
    return to_json(fields)


def create_topic(session: ZooKeeperSession, topic: TopicRecord) -> None:
    """Create a topic. Raises TopicExists."""
    while True:
        try:
            session.multi(
                [
                    Create(paths.topic(topic.name), _topic_content(topic)),
                    Create(paths.partitions(topic.name, topic.topic_id)),
                ]
            )
            return
        except NodeExists:
            existing = read_topic(session, topic.name)
            if existing is not None and not existing.deleted:
                raise TopicExists(topic=topic.name) from None
            if existing is not None:  # its deletion was begun and not finished
                _take_down(session, existing)


def _set_topic(topic: TopicRecord, deleted: bool = False) -> list[Operation]:
    """The operations that write a topic's znode if it still has the version that was read.

    A new topic of the same name may have reached the same version. So the operations also check the znode of the
    topic's id, and fail with NoNode if it is missing.
    """
    return [
        Check(paths.partitions(topic.name, topic.topic_id), 0),
        Set(paths.topic(topic.name), _topic_content(topic, deleted), topic.version),
    ]


def _restore_id(session: ZooKeeperSession, topic: TopicRecord) -> bool:
    """Create the znode of a topic's id again after a write found it missing. Without it the topic can be neither
    written nor deleted. Returns False, and creates nothing, if the topic was changed or deleted meanwhile."""
    current = read_topic(session, topic.name)
    if current is None or (current.topic_id, current.deleted) != (topic.topic_id, topic.deleted):
        return False
    path = paths.partitions(topic.name, topic.topic_id)
    try:
        session.multi([Check(paths.topic(topic.name), current.version), Create(path)])
    except NodeExists:
        return True
    except (NoNode, BadVersion):
        return False
    log.warning("topic_znode_restored", topic=topic.name, path=path)
    return True


def update_topic(session: ZooKeeperSession, topic: TopicRecord) -> bool:
    """Write a topic's config and partitions. Returns False, and writes nothing, if the topic has changed since it was
    read."""
    try:
        session.multi(_set_topic(topic))
        return True
    except BadVersion:
        return False
    except NoNode:
        return _restore_id(session, topic) and update_topic(session, topic)


def delete_topic(session: ZooKeeperSession, name: str) -> bytes:
    """Mark a topic as deleted, which takes effect at once, and then remove its znodes. The brokers remove its logs.

    Returns:
        The topic's id.

    Raises:
        UnknownTopic: there is no such topic, or it is deleted already.
    """
    missing = 0
    while True:
        topic = read_topic(session, name)
        if topic is None or topic.deleted:
            raise UnknownTopic(topic=name)
        hosts = sorted({broker for replicas in topic.replicas for broker in replicas})
        note = Create(paths.deleted_topic(topic.topic_id), to_json({"topic": name, "brokers": hosts}))
        try:
            session.multi([*_set_topic(topic, deleted=True), note])
        except BadVersion:
            continue
        except NoNode:
            missing += 1
            if missing == _TAKE_DOWN_ATTEMPTS:
                raise
            _restore_id(session, topic)
            continue
        _take_down(session, topic)
        return topic.topic_id


def _take_down(session: ZooKeeperSession, topic: TopicRecord) -> None:
    """Remove a deleted topic's znodes, leaves first.

    Several brokers may do so at once, and a leader that has not seen the deletion may still write a state. So only
    znodes below the topic's id are removed, and the znode of the id is removed together with the topic's own znode, in
    one change. A new topic of the same name has another id. It loses nothing, even if a request of this function
    arrives late.
    """
    name, topic_id, attempt = topic.name, topic.topic_id, 0
    while True:
        current = read_topic(session, name)
        if current is None or not current.deleted or current.topic_id != topic_id:
            return  # another broker finished it
        numbers = range(len(current.replicas))
        try:
            _delete_all(session, [paths.partition_state(name, topic_id, number) for number in numbers])
            _delete_all(session, [paths.partition(name, topic_id, number) for number in numbers])
            session.multi([Delete(paths.partitions(name, topic_id)), Delete(paths.topic(name), current.version)])
            return
        except BadVersion:  # the topic's znode has changed meanwhile
            continue
        except NoNode:  # another broker removes them too; or the id's znode is missing, and is needed for the deletion
            _restore_id(session, current)
        except NotEmpty:
            attempt += 1
            if attempt == _TAKE_DOWN_ATTEMPTS:
                raise


def _delete_all(session: ZooKeeperSession, gone: Sequence[str]) -> None:
    """Delete those znodes that exist. Raises NoNode if another broker deletes them at the same time."""
    present = [path for path, found in zip(gone, session.get_many(gone), strict=True) if found is not None]
    for start in range(0, len(present), MULTI_MAX):
        session.multi([Delete(path) for path in present[start : start + MULTI_MAX]])


def deleted_topics(session: ZooKeeperSession, watch: Watch | None = None) -> set[bytes]:
    """Ids of deleted topics of which some broker may still have logs. `watch` is called when this list changes."""
    return {bytes.fromhex(name) for name in session.children(paths.DELETED_TOPICS, watch)}


def logs_removed(session: ZooKeeperSession, topic_id: bytes, broker_id: int) -> None:
    """Record that a broker has no log of a deleted topic any more. After the last broker, the topic is forgotten."""
    path = paths.deleted_topic(topic_id)
    while True:
        try:
            content, stat = session.get(path)
            with fields_of(path, content) as fields:
                left = [each for each in fields["brokers"] if each != broker_id]
            if len(left) == len(fields["brokers"]):
                return
            if left:
                session.set(path, to_json(fields | {"brokers": left}), stat.version)
            else:
                session.delete(path, stat.version)
            return
        except BadVersion:
            continue
        except NoNode:
            return


# --- partition states ------------------------------------------------------------------------------------------------


def write_states(
    session: ZooKeeperSession, topic: TopicRecord, states: Mapping[int, PartitionState]
) -> dict[int, PartitionState]:
    """Write partition states, each as a compare-and-set. A state that `topic` does not have is created; another is
    replaced if it still has the version in `topic`.

    Returns:
        The current states, with their versions. If another broker was faster, its state is returned. Partitions whose
        topic was deleted meanwhile are left out.
    """
    numbers = sorted(states)
    written: dict[int, PartitionState] = {}
    new = [number for number in numbers if number not in topic.states]
    while True:
        try:
            _make_all(session, [paths.partition(topic.name, topic.topic_id, number) for number in new])
            break
        except NoNode:
            if not _restore_id(session, topic):
                return {}
    for start in range(0, len(numbers), MULTI_MAX):
        chunk = numbers[start : start + MULTI_MAX]
        wanted = [paths.partition_state(topic.name, topic.topic_id, number) for number in chunk]
        operations: list[Operation] = []
        for number, path in zip(chunk, wanted, strict=True):
            content = _state_content(states[number])
            if number in topic.states:
                operations.append(Set(path, content, topic.states[number].version))
            else:
                operations.append(Create(path, content))
        try:
            session.multi(operations)
        except (NodeExists, BadVersion, NoNode):
            for operation in operations:
                try:
                    session.multi([operation])
                except (NodeExists, BadVersion, NoNode):
                    continue
        for number, path, found in zip(chunk, wanted, session.get_many(wanted), strict=True):
            if found is not None:
                written[number] = _read_state(path, *found)
    return written


def _make_all(session: ZooKeeperSession, wanted: Sequence[str]) -> None:
    """Create those znodes that do not exist, with fewer round trips than `ensure`. Raises NoNode if their parent does
    not exist. The parent is not created, because a topic's znode without content could not be read."""
    missing = [path for path, found in zip(wanted, session.get_many(wanted), strict=True) if found is None]
    for start in range(0, len(missing), MULTI_MAX):
        chunk = missing[start : start + MULTI_MAX]
        try:
            session.multi([Create(path) for path in chunk])
        except NodeExists:
            for path in chunk:
                try:
                    session.multi([Create(path)])
                except NodeExists:
                    pass


def _state_content(state: PartitionState) -> bytes:
    return to_json({name: value for name, value in vars(state).items() if name != "version"})


def place_partitions(brokers: Iterable[int], hosted: Mapping[int, int], count: int) -> list[tuple[int, ...]]:
    """Choose brokers for new partitions: round robin over the live brokers, starting with the one that hosts fewest
    partitions.

    Args:
        brokers: ids of the live brokers.
        hosted: number of partitions by broker id.
        count: number of partitions to place.

    Returns:
        The replicas of each new partition.

    Raises:
        NoBrokers: there is no live broker.
    """
    order = sorted(brokers, key=lambda broker: (hosted.get(broker, 0), broker))
    if not order:
        raise NoBrokers()
    return [(order[number % len(order)],) for number in range(count)]
