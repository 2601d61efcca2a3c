"""The partitions that this broker holds, and the whole cluster as ZooKeeper tells it. Follows ZooKeeper by watches.

One thread reads what changed, opens and closes logs, and publishes new views; requests read the views without a lock.
While ZooKeeper is away the last views hold and partitions are served on: without replication nobody else can lead them.

A partition is served once its log is open and then its state is written in ZooKeeper; after an unclean stop with its
leader epoch raised. A log that cannot be opened is tried again every second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from broker.config import TOPIC_SETTINGS
from broker.replica.partition import Partition
from broker.storage.directory import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.config import Values
from kafkalog.errors import (
    InvalidSetting,
    KafkalogError,
    NotLeader,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.log import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import BrokerRecord, PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_REOPEN_SECONDS = 1.0
_EVERY_TOPIC = paths.TOPICS + "/"
_EVERYTHING = frozenset({paths.BROKER_IDS, paths.TOPICS, paths.DELETED_TOPICS, _EVERY_TOPIC})
"""What is to be read where no watch can be relied on; in `_dirty` beside the paths that changed."""
PartitionKey = tuple[bytes, int]


class Catalog:
    """What is hosted here and what is in the cluster.

    Args:
        broker_id: this broker's.
        directory: where its logs are.
        session: a started one.
        settings: the broker's.
    """

    def __init__(
        self,
        broker_id: int,
        directory: LogDirectory,
        session: ZooKeeperSession,
        settings: Values,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.broker_id = broker_id
        self.session = session
        self.settings = settings
        self.clock = clock
        self._directory = directory
        self._registration: BrokerRecord | None = None
        # Views: replaced, never changed; written by the thread that syncs.
        self._hosted: Mapping[PartitionKey, Partition] = {}
        self._failed: Mapping[PartitionKey, KafkalogError] = {}
        self._topics: Mapping[str, TopicRecord] = {}
        self._ids: Mapping[bytes, TopicRecord] = {}
        self._brokers: Mapping[int, BrokerRecord] = {}
        self._changed = threading.Condition()  # guards _dirty, _reregister, _stopping; notified after every sync too
        self._dirty: set[str] = set()
        self._reregister = False
        self._reopen_at = 0.0  # when logs that could not be opened are tried again
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name="catalog", daemon=True)

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read everything once, open the logs, then follow. Raises ZooKeeperUnreachable."""
        self.session.on_state(self._state_changed)  # first: a reconnect during the sync loses the watches it has set
        self._sync(_EVERYTHING)
        self._warn_of_strays()
        self._thread.start()

    def register_broker(self, broker: BrokerRecord) -> None:
        """Put this broker on the list of live ones, now and after every loss of the session.

        Raises:
            InvalidSetting: a live broker of another directory has this id.
        """
        with self._changed:
            self._registration = broker  # a session lost from now on is made good by the thread
        deadline = self.clock.monotonic() + self.settings.zookeeper_session_timeout_ms / 1000 + 2
        while True:
            other = registry.register_broker(self.session, broker)
            if other is None:
                break
            if self.clock.monotonic() > deadline:
                reason = f"the broker at {other.host}:{other.grpc_port} has it ({other.directory})"
                raise InvalidSetting(name="broker.id", value=broker.broker_id, reason=reason)
            with self._changed:
                self._changed.wait(0.2)
        self.wait_until(lambda: broker.broker_id in self._brokers, 10.0)

    def stop_following(self) -> None:
        """Follow ZooKeeper no more; what is hosted stays. Safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """Close every partition. After `stop_following`."""
        hosted, self._hosted = self._hosted, {}
        for partition in hosted.values():
            partition.close()

    # --- what requests ask -----------------------------------------------------------------------------------------

    def leader_of(self, topic_id: bytes, number: int) -> Partition:
        """The partition, if it is led here.

        Raises:
            UnknownTopicId, UnknownPartition, NotLeader; or why its log could not be opened.
        """
        partition = self._hosted.get((topic_id, number))
        if partition is not None:
            return partition
        topic = self.topic_by_id(topic_id)
        if number >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=number, partitions=len(topic.replicas))
        failed = self._failed.get((topic_id, number))
        if failed is not None:
            raise type(failed)(**failed.facts)  # anew: one that is raised again and again gathers tracebacks
        raise NotLeader(broker_id=self.broker_id, partition=f"{topic.name}-{number}")

    def topic(self, name: str) -> TopicRecord:
        """Raises UnknownTopic."""
        found = self._topics.get(name)
        if found is None:
            raise UnknownTopic(topic=name)
        return found

    def topic_by_id(self, topic_id: bytes) -> TopicRecord:
        """Raises UnknownTopicId."""
        found = self._ids.get(topic_id)
        if found is None:
            raise UnknownTopicId(topic_id=topic_id.hex())
        return found

    @property
    def topics(self) -> Mapping[str, TopicRecord]:
        """Every topic, by name, in the order of names."""
        return self._topics

    @property
    def brokers(self) -> Mapping[int, BrokerRecord]:
        """Every live broker, by id."""
        return self._brokers

    @property
    def hosted(self) -> Mapping[PartitionKey, Partition]:
        """The partitions served here."""
        return self._hosted

    def leader_id(self, topic: TopicRecord, number: int) -> int:
        """The broker that leads a partition, live or not; -1 while its log was never opened."""
        state = topic.states.get(number)
        return state.leader if state is not None else -1

    def has_failed(self, topic_id: bytes, number: int) -> bool:
        """Whether a partition is ours and its log could not be opened so far."""
        return (topic_id, number) in self._failed

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait until the views are so; False when time ran out (or the catalog stops) before that."""
        with self._changed:
            return self._changed.wait_for(lambda: reached() or self._stopping, seconds) and reached()

    # --- following ZooKeeper -----------------------------------------------------------------------------------------

    def _path_changed(self, path: str) -> None:
        with self._changed:
            self._dirty.add(path)
            self._changed.notify_all()

    def _state_changed(self, connected: bool, session_is_new: bool) -> None:
        if not connected:
            return
        with self._changed:
            self._reregister |= session_is_new
            self._dirty |= _EVERYTHING
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            with self._changed:
                pause = self._reopen_at - self.clock.monotonic() if self._can_reopen() else None
                self._changed.wait_for(lambda: self._dirty or self._reregister or self._stopping, pause)
                if self._stopping:
                    return
                dirty, self._dirty = self._dirty, set()
                if self._can_reopen() and self.clock.monotonic() >= self._reopen_at:
                    dirty |= {paths.topic(self._ids[topic_id].name) for topic_id, _ in self._failed}
                reregister, self._reregister = self._reregister, False
            try:
                if reregister and self._registration is not None:
                    other = registry.register_broker(self.session, self._registration)
                    if other is not None:
                        log.error("broker_id_taken", broker_id=self.broker_id, by=other.directory)
                self._sync(dirty)
            except Exception as error:  # tried again: a broker that stops following would serve old views for ever
                if isinstance(error, ZooKeeperUnreachable):
                    log.warning("catalog_sync_failed", reason=str(error))
                else:
                    log.exception("catalog_sync_failed")
                with self._changed:
                    self._dirty |= dirty
                    self._reregister |= reregister
                    self._changed.wait_for(lambda: self._stopping, _RETRY_SECONDS)

    def _can_reopen(self) -> bool:
        """Whether there are logs that may be opened yet: not if the whole directory is out of service."""
        return bool(self._failed) and self._directory.failed is None

    def _sync(self, dirty: Collection[str]) -> None:
        """Read what changed, and bring what is hosted in line with it."""
        if any(path.startswith(paths.BROKER_IDS) for path in dirty):
            self._brokers = registry.live_brokers(self.session, self._path_changed)
        topics = dict(self._topics)
        changed = {_topic_of(path) for path in dirty if path.startswith(paths.TOPICS + "/") and path != _EVERY_TOPIC}
        if paths.TOPICS in dirty:
            names = set(registry.topic_names(self.session, self._path_changed))
            changed |= names | set(topics) if _EVERY_TOPIC in dirty else names ^ set(topics)
        for name in sorted(changed):
            record = registry.read_topic(self.session, name, self._path_changed)
            if record is None or record.deleted:
                topics.pop(name, None)
            else:
                topics[name] = record
        for name in sorted(changed & set(topics)):
            topics[name] = self._host(topics[name])
        self._topics = dict(sorted(topics.items()))
        self._ids = {record.topic_id: record for record in topics.values()}
        self._drop_deleted()
        with self._changed:
            self._changed.notify_all()

    def _host(self, topic: TopicRecord) -> TopicRecord:
        """Open the logs of a topic's partitions that are ours and not open yet; the topic with their states."""
        settings = topic_settings(topic)
        wanted: dict[int, PartitionState] = {}
        for number, replicas in enumerate(topic.replicas):
            if replicas[0] != self.broker_id:
                continue
            partition = self._hosted.get((topic.topic_id, number))
            if partition is not None:
                if partition.settings.given() != settings.given():
                    partition.update_settings(settings)
                continue
            state = topic.states.get(number)
            if state is None:
                wanted[number] = PartitionState(self.broker_id, 0, (self.broker_id,))
            elif self._directory.was_clean:
                wanted[number] = state
            else:
                wanted[number] = PartitionState(self.broker_id, state.leader_epoch + 1, state.isr)
        if not wanted:
            return topic
        opened = self._open_all(topic, settings, wanted)
        to_write = {number: wanted[number] for number in opened if wanted[number] != topic.states.get(number)}
        states = dict(topic.states)
        if to_write:
            states |= registry.write_states(self.session, topic, to_write)
        hosted = dict(self._hosted)
        for number, partition in opened.items():
            if number in states:  # else the topic was deleted meanwhile
                partition.log.leader_epoch = states[number].leader_epoch
                hosted[topic.topic_id, number] = partition
        self._hosted = hosted
        return TopicRecord(**{**vars(topic), "states": states})

    def _open_all(
        self, topic: TopicRecord, settings: Values, wanted: Mapping[int, PartitionState]
    ) -> dict[int, Partition]:
        """Open the logs of partitions; those that fail are remembered, told to who asks, and tried again later."""
        opened, failed = {}, dict(self._failed)
        try:
            self._directory.make_folders(topic.topic_id, wanted)
        except KafkalogError:
            pass  # opening tells why
        for number, state in wanted.items():
            key = (topic.topic_id, number)
            try:
                opened[number] = self._open(topic, number, settings, state.leader_epoch)
                failed.pop(key, None)
            except KafkalogError as error:
                if str(error) != str(failed.get(key)):  # once, however often it is tried
                    log.error("partition_not_opened", partition=f"{topic.name}-{number}", reason=str(error))
                failed[key] = error
                self._reopen_at = self.clock.monotonic() + _REOPEN_SECONDS
        self._failed = failed
        return opened

    def _open(self, topic: TopicRecord, number: int, settings: Values, leader_epoch: int) -> Partition:
        label = f"{topic.name}-{number}"
        opened = self._directory.open_log(topic.topic_id, number, label, settings, leader_epoch)
        return Partition(topic.name, topic.topic_id, number, opened, self._directory, settings, self.broker_id)

    def _drop_deleted(self) -> None:
        """Close what no topic names any more, and remove the logs of topics that were deleted."""
        self._failed = {key: error for key, error in self._failed.items() if key[0] in self._ids}
        gone = [key for key in self._hosted if key[0] not in self._ids]
        if gone:
            closing = [self._hosted[key] for key in gone]
            self._hosted = {key: partition for key, partition in self._hosted.items() if key[0] in self._ids}
            for partition in closing:
                partition.close()
                log.info("partition_closed", partition=partition.label, topic_id=partition.topic_id.hex())
        deleted = registry.deleted_topics(self.session, self._path_changed)
        for topic_id in sorted(deleted - set(self._ids)):
            for existing_id, number in self._directory.existing():
                if existing_id == topic_id:
                    self._directory.remove_log(topic_id, number)
                    log.info("log_removed", topic_id=topic_id.hex(), partition=number)
            registry.logs_removed(self.session, topic_id, self.broker_id)

    def _warn_of_strays(self) -> None:
        """Logs of topics that ZooKeeper neither has nor saw deleted are kept: its data may be an old backup."""
        for topic_id, number in self._directory.existing():
            if topic_id not in self._ids:
                log.warning("stray_log", topic_id=topic_id.hex(), partition=number, kept_in=str(self._directory.path))


def topic_settings(topic: TopicRecord) -> Values:
    """A topic's settings; names that only a newer broker knows are left out."""
    return TOPIC_SETTINGS.parse({name: value for name, value in topic.config.items() if name in TOPIC_SETTINGS})


def _topic_of(path: str) -> str:
    """The topic whose znode, or a znode below it, is at a path."""
    return path[len(paths.TOPICS) + 1 :].partition("/")[0]
