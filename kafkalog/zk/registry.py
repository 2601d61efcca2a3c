"""Brokers, topics and partition states in ZooKeeper: the paper's registries.

Each function is one read or one change. `broker/controller/` decides which broker hosts and leads which
partition. Contents are JSON objects with the fields of `paths.py`. Unknown fields, of a newer broker, are kept
(`content.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kafkalog.errors import TopicExists, UnknownTopic, UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.versions import FIRST, FORMATS, PROTOCOL, VersionRange
from kafkalog.zk import paths
from kafkalog.zk.cluster import read_cluster
from kafkalog.zk.content import fields_of, read_each, to_json, unknown_in, unknown_of
from kafkalog.zk.session import (
    ANY_VERSION,
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
_MULTI_BYTES_MAX = 400_000
"""Of the changes of states in one multi: ZooKeeper takes 1 MB, and a multi is written to its log in one piece."""
_TOPIC_FIELDS = frozenset({"topic_id", "config", "partitions", "created_us", "deleted"})
_STATE_FIELDS = frozenset({"leader", "leader_epoch", "isr", "eligible", "directories"})
_MOVE_FIELDS = frozenset({"replicas", "target", "throttled_rate"})  # left out where they are empty
_OPERATION_BYTES = 100  # of an operation, without its path and content: the chroot, versions, lengths, the ACL


@dataclass(frozen=True)
class BrokerRecord:
    """A live broker.

    Attributes:
        directory: the id of its data directory. It identifies the broker, also after a move to another machine.
        lock: identifies its locked file in that directory, on its own machine and until the next boot.
        where: host and path of the directory, for people.
        epoch: of its registration: the version of /brokers/epochs/<id>, which grows with each (KIP-903).
        stopping: it is about to stop, and leads no partition that another in-sync replica can lead.
        protocol: the protocol versions that it speaks.
        formats: the format levels that it understands.
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
    stopping: bool = False
    protocol: VersionRange = PROTOCOL
    formats: VersionRange = FORMATS


@dataclass(frozen=True)
class PartitionState:
    """The state of a partition: who leads it, who has all its acknowledged records, and where the logs are.

    Attributes:
        leader: a broker id; -1: nobody leads.
        leader_epoch: grows with each new leader.
        isr: the in-sync set: the replicas that have every acknowledged record. Empty if the last one may have lost
            some: then nobody leads.
        eligible: replicas that left the in-sync set while it was smaller than min.insync.replicas. They have every
            acknowledged record too, because the high watermark did not move since (KIP-966).
        directories: by broker id, the id of the data directory of each replica whose log was ever opened. It is written
            after the log is opened, so a log that is missing there has been lost.
        replicas: the brokers that the partition is assigned to, the preferred leader first. Empty: those in the topic's
            znode; it was never reassigned.
        target: the brokers that it is being moved to (KIP-455); empty: it is not.
        throttled_rate: bytes a second that each broker copies that is added by the move; 0: no limit.
        version: of the state's znode, for the next write.
        unknown: the fields that this version does not know.
    """

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    eligible: tuple[int, ...] = ()
    directories: Mapping[int, str] = field(default_factory=dict)
    version: int = 0
    replicas: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    throttled_rate: int = 0
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def only(cls, broker: int, directory: str, leader_epoch: int = 0, version: int = 0) -> PartitionState:
        """The state of a partition whose only log is that of one broker."""
        return cls(broker, leader_epoch, (broker,), (), {broker: directory}, version)

    @property
    def directory(self) -> str:
        """The id of the data directory with the leader's log; empty if nobody leads, or the log was never opened."""
        return self.directories.get(self.leader, "")

    def held_by(self, assigned: Sequence[int]) -> tuple[int, ...]:
        """The brokers that have a replica or are to get one, the preferred leader first.

        Args:
            assigned: those in the topic's znode.
        """
        return (*(self.replicas or assigned), *self.adding)

    @property
    def adding(self) -> tuple[int, ...]:
        """The brokers that get a replica by the move."""
        return tuple(broker for broker in self.target if broker not in self.replicas)

    @property
    def removing(self) -> tuple[int, ...]:
        """The brokers that give up their replica once the move is over."""
        return tuple(broker for broker in self.replicas if broker not in self.target) if self.target else ()


@dataclass(frozen=True)
class TopicRecord:
    """A topic's registration in ZooKeeper.

    Attributes:
        replicas: broker ids by partition number, as in the topic's znode. A partition that was reassigned has others in
            its state: `replicas_of` knows both.
        states: by partition number; none for a partition until its leader has opened the log.
        version: of the topic's znode, for the next write.
        created_zxid: of the topic's znode; 0 before it is read. Of topics of one name the newest has the highest.
        deleted: the topic is deleted, but its znodes are not all removed yet.
        unknown: the fields of the topic's znode that this version does not know.
    """

    name: str
    topic_id: bytes
    config: Mapping[str, str]
    replicas: Sequence[tuple[int, ...]]
    created_us: int
    states: Mapping[int, PartitionState] = field(default_factory=dict)
    version: int = 0
    created_zxid: int = field(default=0, compare=False)
    deleted: bool = False
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def replicas_of(self, number: int) -> tuple[int, ...]:
        """The brokers that have a replica of a partition or are to get one, the preferred leader first."""
        state = self.states.get(number)
        return tuple(self.replicas[number]) if state is None else state.held_by(self.replicas[number])

    def preferred_leader(self, number: int) -> int:
        """The broker that opens and leads a partition by default: its first replica."""
        return self.replicas_of(number)[0]


# --- brokers -------------------------------------------------------------------------------------------------------


def register_broker(session: ZooKeeperSession, broker: BrokerRecord) -> BrokerRecord | None:
    """Register a broker as live until the session ends. The znode of an earlier, dead run of the broker is replaced.

    Returns:
        None if the broker was registered; else the other live broker with this id.

    Raises:
        FormatLevelNotUnderstood: of the cluster, by this broker.
    """
    path, epoch_path = paths.broker(broker.broker_id), paths.broker_epoch(broker.broker_id)
    while True:
        epoch, known = _broker_epoch(session, broker)  # first: a registration after this is noticed by the write
        cluster = read_cluster(session)
        if cluster is not None:
            cluster.check_understood(broker.broker_id, broker.formats)
        found = _registered(session, broker.broker_id)
        if found is not None and is_another(found[0], broker):
            return found[0]
        operations: list[Operation]
        if found is not None and found[1].ephemeralOwner == session.session_id:
            operations = [Set(path, _broker_content(replace(broker, epoch=found[0].epoch)), found[1].version)]
        else:
            operations = [Delete(path, found[1].version)] if found is not None else []
            operations += [] if cluster is None else [cluster.check]
            operations += [
                Set(paths.BROKER_EPOCHS, b"", ANY_VERSION),  # counts the registrations
                Set(epoch_path, known, epoch),
                Create(path, _broker_content(replace(broker, epoch=epoch + 1)), ephemeral=True),
            ]
        try:
            session.multi(operations)
            return None
        except NoNode:
            session.ensure([paths.BROKER_IDS])
        except (NodeExists, BadVersion):
            continue


def raise_broker_epoch(session: ZooKeeperSession, broker: BrokerRecord) -> BrokerRecord | None:
    """End all registrations of a broker until now: no late write lets one of them join an in-sync set. If this session
    has registered it, it is registered with the next epoch at the same moment.

    Returns:
        None; or the other live broker with this id, whose registration goes on.
    """
    while True:
        epoch, content = _broker_epoch(session, broker)
        operations: list[Operation] = [Set(paths.broker_epoch(broker.broker_id), content, epoch)]
        found = _registered(session, broker.broker_id)
        if found is not None and is_another(found[0], broker):
            return found[0]
        if found is not None and found[1].ephemeralOwner == session.session_id:
            renewed = _broker_content(replace(broker, epoch=epoch + 1))
            operations.append(Set(paths.broker(broker.broker_id), renewed, found[1].version))
        try:
            session.multi(operations)
            return None
        except (BadVersion, NoNode):
            continue


def _broker_epoch(session: ZooKeeperSession, broker: BrokerRecord) -> tuple[int, bytes]:
    """The version of the znode of a broker's epoch, which is created if it is missing, and what it is to hold."""
    path = paths.broker_epoch(broker.broker_id)
    own = {"directory": broker.directory, "where": broker.where}
    while True:
        [found] = session.get_many([path])
        if found is not None:
            content, stat = found
            return int(stat.version), to_json({**unknown_of(content, own), **own})
        with suppress(NodeExists):
            session.create(path)


def other_broker(session: ZooKeeperSession, broker: BrokerRecord) -> BrokerRecord | None:
    """The registered broker with this broker's id, unless it is this broker or a dead run of it; else None."""
    found = _registered(session, broker.broker_id)
    return found[0] if found is not None and is_another(found[0], broker) else None


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


def is_another(registered: BrokerRecord, broker: BrokerRecord) -> bool:
    """Whether a registration may belong to another live process.

    It does not if directory and lock are the same: only one process can hold the lock, and `broker` holds it. The
    directory's id alone is not enough, because a copy of the directory has the same id.
    """
    return (registered.directory, registered.lock) != (broker.directory, broker.lock)


def _broker_content(broker: BrokerRecord) -> bytes:
    return to_json({name: value for name, value in vars(broker).items() if name != "broker_id"})


def _registered(session: ZooKeeperSession, broker_id: int) -> tuple[BrokerRecord, Any] | None:
    try:
        content, stat = session.get(paths.broker(broker_id))
    except NoNode:
        return None
    return _broker_record(broker_id, content), stat


def live_brokers(session: ZooKeeperSession, watch: Watch | None = None) -> dict[int, BrokerRecord]:
    """All live brokers by id. `watch` is called when one is registered, changed or removed."""
    found = {}
    for name in session.children(paths.BROKER_IDS, watch):
        try:
            content, _ = session.get(paths.broker(int(name)), watch)
            found[int(name)] = _broker_record(int(name), content)
        except NoNode:
            continue
        except (ValueError, UnreadableZnode) as error:  # not a broker's, or a newer version's; use the others
            log.warning("broker_not_readable", znode=f"{paths.BROKER_IDS}/{name}", reason=str(error))
    return dict(sorted(found.items()))


def _broker_record(broker_id: int, content: bytes) -> BrokerRecord:
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
            epoch=int(fields["epoch"]),
            stopping=bool(fields.get("stopping")),
            protocol=VersionRange(*fields.get("protocol", (FIRST, FIRST))),
            formats=VersionRange(*fields.get("formats", (FIRST, FIRST))),
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
            created_zxid=stat.czxid,
            deleted=bool(fields.get("deleted")),
            unknown=unknown_in(fields, _TOPIC_FIELDS),
        )


def _read_state(path: str, content: bytes, stat: Any) -> PartitionState:
    with fields_of(path, content) as fields:
        return PartitionState(
            leader=fields["leader"],
            leader_epoch=fields["leader_epoch"],
            isr=tuple(fields["isr"]),
            eligible=tuple(fields["eligible"]),
            directories={int(broker): str(directory) for broker, directory in fields["directories"].items()},
            version=stat.version,
            replicas=tuple(fields.get("replicas", ())),
            target=tuple(fields.get("target", ())),
            throttled_rate=int(fields.get("throttled_rate", 0)),
            unknown=unknown_in(fields, _STATE_FIELDS | _MOVE_FIELDS),
        )


def _topic_content(topic: TopicRecord, deleted: bool = False) -> bytes:
    fields = {
        **topic.unknown,
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


def update_topic(session: ZooKeeperSession, topic: TopicRecord, fence: Check | None = None) -> bool:
    """Write a topic's config and partitions. Returns False, and writes nothing, if the topic has changed since it was
    read, or the fence does not hold."""
    try:
        session.multi([*_set_topic(topic), *([] if fence is None else [fence])])
        return True
    except BadVersion:
        return False
    except NoNode:
        return _restore_id(session, topic) and update_topic(session, topic, fence)


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
        hosts = {broker for replicas in topic.replicas for broker in replicas}
        hosts |= {broker for number in range(len(topic.replicas)) for broker in topic.replicas_of(number)}
        note = Create(paths.deleted_topic(topic.topic_id), to_json({"topic": name, "brokers": sorted(hosts)}))
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


class StateChange(NamedTuple):
    """A partition's state before and after a change.

    Attributes:
        before: as it was read; None: there was none, and it is created.
        checks: of other znodes, which must have these versions; see `registration_check`.
    """

    topic: TopicRecord
    number: int
    before: PartitionState | None
    after: PartitionState
    checks: tuple[Check, ...] = ()

    @property
    def path(self) -> str:
        return paths.partition_state(self.topic.name, self.topic.topic_id, self.number)


def registration_check(broker_id: int, epoch: int) -> Check:
    """The check that a broker has not registered again since the registration of an epoch (rule 9 of
    docs/REPLICATION.md)."""
    return Check(paths.broker_epoch(broker_id), epoch)


def change_states(
    session: ZooKeeperSession, changes: Sequence[StateChange], fence: Check | None = None
) -> dict[tuple[bytes, int], PartitionState | UnreadableZnode]:
    """Make changes of partition states, each as a compare-and-set, many in one request. One that is refused, because
    its state has changed or its checks do not hold, leaves the others alone.

    Args:
        fence: a check for all of them.

    Returns:
        By topic id and number, the state that was written, or the current one if the change was refused, or why that
        one cannot be read: it may be any. Partitions whose topic was deleted meanwhile are left out.

    Raises:
        BadVersion: the fence does not hold any more. Changes may have been made while it did.
    """
    current: dict[tuple[bytes, int], PartitionState | UnreadableZnode] = {}
    for chunk in _chunks(_with_parents(session, changes)):
        current |= _change_chunk(session, chunk, fence)
    return current


def _with_parents(session: ZooKeeperSession, changes: Sequence[StateChange]) -> list[StateChange]:
    """Create the znodes that new states need. Returns the changes without those of deleted topics."""
    new: dict[bytes, list[StateChange]] = {}
    for change in changes:
        if change.before is None:
            new.setdefault(change.topic.topic_id, []).append(change)
    deleted = set()
    for topic_id, of_topic in new.items():
        topic = of_topic[0].topic
        while True:
            try:
                _make_all(session, [paths.partition(topic.name, topic_id, change.number) for change in of_topic])
                break
            except NoNode:
                if not _restore_id(session, topic):
                    deleted.add(topic_id)
                    break
    return [change for change in changes if change.topic.topic_id not in deleted]


def _chunks(changes: Sequence[StateChange]) -> Iterator[list[StateChange]]:
    """The changes in as few multis as they may be in."""
    chunk: list[StateChange] = []
    operations = size = 0
    for change in changes:
        adds = len(change.path) + len(_state_content(change.after)) + _OPERATION_BYTES * (1 + len(change.checks))
        if chunk and (operations + 2 + len(change.checks) > MULTI_MAX or size + adds > _MULTI_BYTES_MAX):
            yield chunk
            chunk, operations, size = [], 0, 0
        chunk.append(change)
        operations += 1 + len(change.checks)
        size += adds
    if chunk:
        yield chunk


def _change_chunk(
    session: ZooKeeperSession, changes: list[StateChange], fence: Check | None
) -> dict[tuple[bytes, int], PartitionState | UnreadableZnode]:
    written: list[StateChange] = []
    left = changes
    while left and not written:
        try:
            session.multi(_operations(left, fence))
            written = left
        except (NodeExists, BadVersion, NoNode):
            if fence is not None and not _hold(session, [fence]):
                raise BadVersion from None
            possible = _possible(session, left)
            if len(possible) == len(left):  # they changed to and fro meanwhile, or a znode above one is missing
                written = [change for change in left if _try(session, change, fence)]
                if fence is not None and not _hold(session, [fence]):
                    raise BadVersion from None
                break
            left = possible
    current: dict[tuple[bytes, int], PartitionState | UnreadableZnode] = {
        (change.topic.topic_id, change.number): replace(
            change.after, version=0 if change.before is None else change.before.version + 1
        )
        for change in written
    }
    refused = [change for change in changes if (change.topic.topic_id, change.number) not in current]
    found = read_states(session, [change.path for change in refused])
    for change in refused:
        if (state := found[change.path]) is not None:
            current[change.topic.topic_id, change.number] = state
    return current


def _operations(changes: Sequence[StateChange], fence: Check | None) -> list[Operation]:
    operations: list[Operation] = [] if fence is None else [fence]
    operations += dict.fromkeys(check for change in changes for check in change.checks)
    for change in changes:
        content = _state_content(change.after)
        if change.before is None:
            operations.append(Create(change.path, content))
        else:
            operations.append(Set(change.path, content, change.before.version))
    return operations


def _possible(session: ZooKeeperSession, changes: Sequence[StateChange]) -> list[StateChange]:
    """Those changes of which nothing was changed meanwhile."""
    stats = session.stats([change.path for change in changes])
    checks = list(dict.fromkeys(check for change in changes for check in change.checks))
    held = {check for check in checks if _hold(session, [check])}
    return [
        change
        for change, stat in zip(changes, stats, strict=True)
        if (None if stat is None else stat.version) == (None if change.before is None else change.before.version)
        and held.issuperset(change.checks)
    ]


def _hold(session: ZooKeeperSession, checks: Sequence[Check]) -> bool:
    stats = session.stats([check.path for check in checks])
    return all(stat is not None and stat.version == check.version for check, stat in zip(checks, stats, strict=True))


def _try(session: ZooKeeperSession, change: StateChange, fence: Check | None) -> bool:
    try:
        session.multi(_operations([change], fence))
        return True
    except (NodeExists, BadVersion, NoNode):
        return False


def write_states(
    session: ZooKeeperSession, topic: TopicRecord, states: Mapping[int, PartitionState]
) -> dict[int, PartitionState]:
    """Write states of a topic's partitions, as `change_states`. A state that `topic` does not have is created; another
    is replaced if it still has the version in `topic`. Returns the current states by number.

    Raises:
        UnreadableZnode: of a state that was not written. The others were.
    """
    changes = [StateChange(topic, number, topic.states.get(number), states[number]) for number in sorted(states)]
    current = {}
    for (_, number), state in change_states(session, changes).items():
        if isinstance(state, UnreadableZnode):
            raise state
        current[number] = state
    return current


def read_states(
    session: ZooKeeperSession, wanted: Sequence[str], watch: Watch | None = None
) -> dict[str, PartitionState | UnreadableZnode | None]:
    """The partition states at these paths, requested at once; None for one that does not exist. One that cannot be read
    hides no other. `watch` is called when any of these changes, also when a missing one is created."""
    states: dict[str, PartitionState | UnreadableZnode | None] = {}
    for path, found in zip(wanted, session.get_many(wanted, watch), strict=True):
        try:
            states[path] = None if found is None else _read_state(path, *found)
        except UnreadableZnode as error:
            states[path] = error
    return states


def current_states(session: ZooKeeperSession, wanted: Sequence[str]) -> dict[str, PartitionState]:
    """The partition states at these paths, as they are now: a server that lags may answer a read with an older state,
    so it is checked by a write that changes nothing. Those that are missing, cannot be read, or change meanwhile are
    left out."""
    found = {path: state for path, state in read_states(session, wanted).items() if isinstance(state, PartitionState)}
    checks = [Check(path, state.version) for path, state in found.items()]
    held: set[str] = set()
    for start in range(0, len(checks), MULTI_MAX):
        chunk = checks[start : start + MULTI_MAX]
        for group in (chunk, *([check] for check in chunk)):  # one by one if they do not hold together
            with suppress(BadVersion, NoNode):
                session.multi(group)
                held.update(check.path for check in group)
                if group is chunk:
                    break
    return {path: state for path, state in found.items() if path in held}


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
    fields = {name: getattr(state, name) for name in _STATE_FIELDS}
    of_moves = {name: value for name in _MOVE_FIELDS if (value := getattr(state, name))}
    return to_json({**state.unknown, **fields, **of_moves})
