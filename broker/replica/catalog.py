"""The partitions that this broker holds, and the whole cluster as ZooKeeper tells it. Follows ZooKeeper by watches.

One thread reads what changed, opens and closes logs, and publishes new views; requests read the views without a lock.
A topic is known as soon as it is read, before its logs are open. They are opened in turns of half a second, between
which the thread reads what else changed: thousands of them keep no other topic from being known and opened.
While ZooKeeper is away the last views hold and partitions are served on: without replication nobody else can lead them.

A partition is served once its log is open and then its state is written in ZooKeeper, with the id of the directory
that the log stands in; after an unclean stop with its leader epoch raised. A log that cannot be opened is tried again
every second. One that is not where its state says is lost, and so is one whose files were removed while it was open:
it is neither opened nor made, until it is back at a start or `recover` is called.

What goes wrong with one topic concerns that topic alone: it is logged once, and tried again every second.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from broker.config import BrokerSettings, TopicSettings
from broker.replica.partition import Partition
from broker.storage.log_dir import LogDirectory, folder_name
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import (
    InvalidSetting,
    KafkalogError,
    NotLeader,
    NotLost,
    PartitionLost,
    StorageFailed,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import BrokerRecord, PartitionState, TopicRecord
from kafkalog.zk.session import ZooKeeperSession

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_TURN_SECONDS = 0.5
_OPENED_TOGETHER = 100
"""Of a topic's logs, so many share a sync of their folders' names and a write of their states."""
_EVERY_TOPIC = paths.TOPICS + "/"
_EVERY_DELETED = paths.DELETED_TOPICS + "/"
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
        settings: BrokerSettings,
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
        self._undone: Mapping[str, str] = {}  # paths that could not be dealt with, and why; tried again
        # Topics that are not in line with what was read of them, and each one's first partition that was not looked at.
        # The thread's own; others only ask whether a topic is in it.
        self._to_host: OrderedDict[str, int] = OrderedDict()
        self._read_later: set[str] = set()  # paths of states that changed while their topics' logs were being opened
        self._refused: set[tuple[bytes, str, str]] = set()  # settings of topics that were warned of
        self._recovering = threading.Lock()  # one `recover` at a time; before _changed
        # Guards _dirty, _removed, _reregister, _withdrawn, _stopping; notified after syncs.
        self._changed = threading.Condition()
        self._dirty: set[str] = set()
        self._removed: set[PartitionKey] = set()  # closed by the directory, for their files were gone
        self._reregister = False
        self._withdrawn = False
        self._retry_at = 0.0  # when what failed is tried again
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name="catalog", daemon=True)
        directory.on_lost = self._log_removed

    @property
    def _directory_id(self) -> str:
        found = self._directory.directory_id
        assert found is not None, "the directory was not claimed"
        return found

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read everything once, open the logs, then follow. Raises ZooKeeperUnreachable."""
        self.session.on_state(self._state_changed)  # first: a reconnect during the sync loses the watches it has set
        self._sync(_EVERYTHING)
        while self._to_host:
            self._sync(())
        self._warn_of_strays()
        self._thread.start()

    def check_broker_id(self, broker: BrokerRecord) -> None:
        """Find out before anything is opened or written that this broker may not register, as far as that can be known.

        Raises:
            InvalidSetting: a live broker of another directory, or of a copy of this one, has this id.
        """
        self._wait_for_id(broker, lambda: registry.other_broker(self.session, broker))

    def register_broker(self, broker: BrokerRecord) -> None:
        """Put this broker on the list of live ones, now and after every loss of the session.

        Raises:
            InvalidSetting: a live broker of another directory, or of a copy of this one, has this id.
            StorageFailed: its own directory is out of service.
        """
        if self.failed is not None:
            raise StorageFailed(**self.failed.facts)
        with self._changed:
            self._registration = broker  # a session lost from now on is made good by the thread
        self._wait_for_id(broker, lambda: registry.register_broker(self.session, broker))
        if self._withdrawn:  # meanwhile, perhaps before there was anything to take back
            registry.withdraw_broker(self.session, broker)
        if self.failed is not None:
            raise StorageFailed(**self.failed.facts)
        self.wait_until(lambda: broker.broker_id in self._brokers, 10.0)

    def _wait_for_id(self, broker: BrokerRecord, holder: Callable[[], BrokerRecord | None]) -> None:
        """Wait until no other live broker has the id: one that is dead is dropped after its session's timeout."""
        deadline = self.clock.monotonic() + self.settings.zookeeper_session_timeout_ms / 1000 + 2
        while True:
            with self.session.patient():
                other = holder()
            if other is None:
                return
            if self.clock.monotonic() > deadline:
                raise _id_taken(broker, other)
            with self._changed:
                self._changed.wait(0.2)

    def withdraw(self) -> None:
        """Take this broker off the list of live ones, for good. Does not block; it is done by the thread."""
        with self._changed:
            self._withdrawn = self._reregister = True
            self._changed.notify_all()

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
            StorageFailed: the directory is out of service. What is still known of it in memory helps nobody: a stream
                would wait for news for ever.
        """
        partition = self._hosted.get((topic_id, number))
        if partition is not None:
            if self._directory.failed is not None:
                raise StorageFailed(**self._directory.failed.facts)
            return partition
        topic = self.topic_by_id(topic_id)
        if number >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=number, partitions=len(topic.replicas))
        failed = self._failed.get((topic_id, number))
        if failed is not None:
            raise type(failed)(**failed.facts)  # anew: one that is raised again and again gathers tracebacks
        raise NotLeader(broker_id=self.broker_id, partition=f"{topic.name}-{number}")

    def failure(self, topic_id: bytes, number: int) -> KafkalogError | None:
        """Why a partition that is ours is not served; None too where it is not ours."""
        return self._failed.get((topic_id, number))

    def unserved(self) -> Mapping[PartitionKey, KafkalogError]:
        """The partitions that are ours and not served, and why."""
        return self._failed

    @property
    def failed(self) -> StorageFailed | None:
        """Why nothing here is served any more."""
        return self._directory.failed

    @property
    def is_full(self) -> bool:
        """Whether the disk had no room for something in the last minute."""
        return self._directory.is_full

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

    def is_behind(self, name: str) -> bool:
        """Whether there is work left for this broker from what it last read of a topic: logs to open, settings to pass
        on."""
        return name in self._to_host

    def leader_id(self, topic: TopicRecord, number: int) -> int:
        """The broker that leads a partition, live or not; -1 while its log was never opened."""
        state = topic.states.get(number)
        return state.leader if state is not None else -1

    def recover(self, topic_id: bytes, number: int, start_offset: int, seconds: float) -> PartitionState:
        """Put an empty log in the place of a lost one: what was in that is given up for good.

        Args:
            start_offset: of its first record; see `broker/requests/topics.py`.
            seconds: how long to wait until it is served.

        Returns:
            its state.

        Raises:
            UnknownTopicId, UnknownPartition, NotLeader.
            NotLost: it is served, or its log could not be opened for another reason.
        """
        name = self.topic_by_id(topic_id).name
        with self._recovering:
            while True:
                topic = registry.read_topic(self.session, name)
                if topic is None or topic.deleted or topic.topic_id != topic_id:
                    raise UnknownTopicId(topic_id=topic_id.hex())
                if number >= len(topic.replicas):
                    raise UnknownPartition(topic=name, partition=number, partitions=len(topic.replicas))
                label = f"{name}-{number}"
                if topic.replicas[number][0] != self.broker_id:
                    raise NotLeader(broker_id=self.broker_id, partition=label)
                state = topic.states.get(number)
                if state is None or self._loss(topic, number, state) is None:
                    raise NotLost(partition=label)
                # The log first: a state is not to name a log that is not there. It is lost until the state is written.
                self._directory.replace_log(topic_id, number, label, start_offset)
                renewed = PartitionState(
                    self.broker_id, state.leader_epoch + 1, (self.broker_id,), self._directory_id, state.version
                )
                written = registry.write_states(self.session, topic, {number: renewed}).get(number)
                if written is not None and written.directory == renewed.directory:
                    self._directory.trust_log(topic_id, number)
                    break
        log.warning(
            "partition_recovered", partition=label, start_offset=start_offset, given_up_in=state.directory,
            leader_epoch=written.leader_epoch,
        )  # fmt: skip
        self._path_changed(paths.topic(name))
        self.wait_until(lambda: (topic_id, number) in self._hosted, seconds)
        return written

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait until the views are so; False when time ran out (or the catalog stops) before that."""
        with self._changed:
            return self._changed.wait_for(lambda: reached() or self._stopping, seconds) and reached()

    # --- following ZooKeeper -----------------------------------------------------------------------------------------

    def _path_changed(self, path: str) -> None:
        with self._changed:
            self._dirty.add(path)
            self._changed.notify_all()

    def _log_removed(self, topic_id: bytes, number: int) -> None:
        with self._changed:
            self._removed.add((topic_id, number))
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
                pause = self._retry_at - self.clock.monotonic() if self._to_retry() else None
                self._changed.wait_for(
                    lambda: self._dirty or self._removed or self._reregister or self._to_host or self._stopping, pause
                )
                if self._stopping:
                    return
                dirty, self._dirty = self._dirty, set()
                removed, self._removed = self._removed, set()
                now = self.clock.monotonic()
                if now >= self._retry_at:
                    dirty |= self._to_retry()
                    self._retry_at = now + _RETRY_SECONDS  # whatever becomes of them: no retry is to follow at once
                reregister, self._reregister = self._reregister, False
            try:
                self._take_out(removed)
                if reregister or paths.broker(self.broker_id) in self._undone:
                    self._renew_registration()
                self._sync(dirty)
            except Exception as error:  # tried again: a broker that stops following would serve old views for ever
                if isinstance(error, ZooKeeperUnreachable):
                    log.warning("catalog_sync_failed", reason=str(error))
                else:
                    log.exception("catalog_sync_failed")
                with self._changed:
                    self._dirty |= dirty
                    self._removed |= removed
                    self._reregister |= reregister
                    self._changed.wait_for(lambda: self._stopping, _RETRY_SECONDS)

    def _to_retry(self) -> set[str]:
        """Paths with which something could not be done so far that may be done yet: no log is opened in a directory
        that is out of service, and none that is lost."""
        again = set(self._undone) - {paths.topic(name) for name in self._to_host}
        if self._directory.failed is None:
            for (topic_id, _), error in self._failed.items():
                topic = self._ids.get(topic_id)
                if topic is None or topic.name in self._to_host:  # it is being tried
                    continue
                if not isinstance(error, PartitionLost):
                    again.add(paths.topic(topic.name))
        return again

    @contextmanager
    def _sparing_others(self, path: str, is_last: bool = True) -> Iterator[None]:
        """What fails here is logged, and tried again later, while the rest goes on. Only the absence of ZooKeeper
        concerns all. `is_last`: if it does not fail, the path is dealt with."""
        undone = {other: why for other, why in self._undone.items() if other != path}
        try:
            yield
        except ZooKeeperUnreachable:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if self._undone.get(path) != why:  # once, however often it is tried
                if isinstance(error, KafkalogError):
                    log.error("not_followed", path=path, reason=str(error))
                else:
                    log.exception("not_followed", path=path)
            undone[path] = why
            self._retry_at = self.clock.monotonic() + _RETRY_SECONDS
        else:
            if not is_last:
                return
        self._undone = undone

    def _renew_registration(self) -> None:
        broker = self._registration
        if broker is None:
            return
        with self._sparing_others(paths.broker(self.broker_id)):
            if self._withdrawn:
                registry.withdraw_broker(self.session, broker)
                return
            other = registry.register_broker(self.session, broker)
            if other is not None:
                raise _id_taken(broker, other)

    def _sync(self, dirty: Collection[str]) -> None:
        """Read what changed, and bring what is hosted in line with it, for a turn; `_to_host` is what is left."""
        if any(path.startswith(paths.BROKER_IDS) for path in dirty):
            self._brokers = registry.live_brokers(self.session, self._path_changed)
        self._read_topics(dirty)
        self._close_deleted()
        self._host_for_a_turn()
        self._remove_deleted()
        with self._changed:
            self._dirty |= {path for path in self._read_later if _topic_of(path) not in self._to_host}
            self._read_later -= self._dirty
            self._changed.notify_all()

    def _read_topics(self, dirty: Collection[str]) -> None:
        """Read the topics that changed, and let them be known."""
        of_topics = {path for path in dirty if path.startswith(paths.TOPICS + "/") and path != _EVERY_TOPIC}
        # Each state that is written here while a topic's logs are opened comes back as a change, and all of its states
        # would be read for it in every turn.
        own = {path for path in of_topics if path != paths.topic(name := _topic_of(path)) and self._to_host.get(name)}
        topics = dict(self._topics)
        changed = {_topic_of(path) for path in of_topics - own}
        if paths.TOPICS in dirty:
            names = set(registry.topic_names(self.session, self._path_changed))
            changed |= names | set(topics) if _EVERY_TOPIC in dirty else names ^ set(topics)
        to_host = OrderedDict(self._to_host)
        for name in sorted(changed):
            with self._sparing_others(paths.topic(name), is_last=False):
                record = registry.read_topic(self.session, name, self._path_changed)
                if record is None or record.deleted:
                    topics.pop(name, None)
                    to_host.pop(name, None)
                    self._undone = {path: why for path, why in self._undone.items() if path != paths.topic(name)}
                else:
                    topics[name] = record
                    to_host[name] = 0
        self._read_later |= own
        self._to_host = to_host
        self._publish(topics)

    def _host_for_a_turn(self) -> None:
        """Bring what is hosted in line with the topics as they were read, some partitions of each in its turn."""
        topics = dict(self._topics)
        turn_end = self.clock.monotonic() + _TURN_SECONDS
        try:
            while self._to_host:
                name, start = next(iter(self._to_host.items()))
                end = count = len(topics[name].replicas)
                with self._sparing_others(paths.topic(name)):
                    topics[name], end = self._host(topics[name], start)
                if end < count:  # after the others; never absent meanwhile, for other threads look (`is_behind`)
                    self._to_host[name] = end
                    self._to_host.move_to_end(name)
                else:
                    del self._to_host[name]
                if self.clock.monotonic() >= turn_end:
                    break
        finally:  # without ZooKeeper too: what is open is known
            self._publish(topics)

    def _publish(self, topics: Mapping[str, TopicRecord]) -> None:
        self._topics = dict(sorted(topics.items()))
        self._ids = {record.topic_id: record for record in topics.values()}

    def _host(self, topic: TopicRecord, start: int) -> tuple[TopicRecord, int]:
        """Open the logs of a topic's partitions that are ours and not open yet, from a partition on, no more than
        `_OPENED_TOGETHER`; the topic with their states, and the first partition that is left.

        A partition without a state was never opened, unless its log is open here, or stands here with records: then the
        state was lost. It is written again, for without one nobody finds the leader, and a log that is gone at the next
        start would begin anew.
        """
        settings = topic_settings(topic)
        self._warn_of_refused(topic)
        wanted: dict[int, PartitionState] = {}
        to_write: dict[int, PartitionState] = {}
        lost_states: dict[int, PartitionState] = {}
        failed: dict[int, KafkalogError] = {}
        end = len(topic.replicas)
        for number in range(start, end):
            if len(wanted) == _OPENED_TOGETHER:
                end = number
                break
            if topic.replicas[number][0] != self.broker_id:
                continue
            state = topic.states.get(number)
            try:
                lost = self._loss(topic, number, state) if state is not None else None
            except KafkalogError as error:
                failed[number] = error
                continue
            partition = self._hosted.get((topic.topic_id, number))
            if lost is not None:
                failed[number] = lost
            elif partition is not None:
                if state is not None:
                    partition.log.leader_epoch = state.leader_epoch
                else:
                    lost_states[number] = self._state_of(partition)
                if partition.settings.given() != settings.given():
                    partition.update_settings(settings)
            elif state is None:
                wanted[number] = PartitionState(self.broker_id, 0, (self.broker_id,), self._directory_id)
            elif self._directory.was_clean:
                wanted[number] = state
            else:
                wanted[number] = replace(state, leader_epoch=state.leader_epoch + 1)
        opened = self._open_all(topic, settings, wanted, failed)
        try:
            for number, partition in opened.items():
                state = topic.states.get(number)
                if state is None and partition.log.end_offset > 0:
                    lost_states[number] = self._state_of(partition, raised=not self._directory.was_clean)
                elif wanted[number] != state:
                    to_write[number] = wanted[number]
            states = dict(topic.states)
            if to_write := to_write | lost_states:
                states |= registry.write_states(self.session, topic, to_write)
            for number in sorted(lost_states.keys() & states.keys()):  # else the topic was deleted meanwhile
                epoch = states[number].leader_epoch
                log.warning("partition_state_missing", partition=f"{topic.name}-{number}", leader_epoch=epoch)
            hosted = dict(self._hosted)
            for number, partition in opened.items():
                if number not in states:  # the topic was deleted meanwhile
                    continue
                lost = self._loss(topic, number, states[number])
                if lost is not None:  # another one was faster to write the state
                    failed[number] = lost
                    continue
                partition.log.leader_epoch = states[number].leader_epoch
                hosted[topic.topic_id, number] = partition
            for number in failed:
                fenced = hosted.pop((topic.topic_id, number), None)
                if fenced is not None:
                    fenced.close()
            self._hosted = hosted
            self._take_in_failures(topic, failed, range(start, end))
            return replace(topic, states=states), end
        finally:
            for number, partition in opened.items():
                if self._hosted.get((topic.topic_id, number)) is not partition:
                    partition.close()

    def _state_of(self, partition: Partition, raised: bool = False) -> PartitionState:
        """The state that an open log without one gets."""
        epoch = partition.log.leader_epoch + raised
        return PartitionState(self.broker_id, epoch, (self.broker_id,), self._directory_id)

    def _loss(self, topic: TopicRecord, number: int, state: PartitionState) -> PartitionLost | None:
        """What there is to say if a partition's log is not where its state says."""
        here = f"{self._directory_id} ({self._directory.path})"
        if state.directory != self._directory_id:
            reason = f"its log is in data directory {state.directory}, and broker {self.broker_id} has {here}"
        elif (topic.topic_id, number) not in self._hosted and self._directory.note_if_missing(topic.topic_id, number):
            folder = folder_name(topic.topic_id, number)
            if self._directory.has_log(topic.topic_id, number):
                reason = (
                    f"files of its folder {folder} in data directory {here} were removed or replaced while in use, "
                    "or by a recovery that did not end"
                )
            else:
                reason = f"its folder {folder} is gone from data directory {here}, or empty"
        else:
            return None
        return PartitionLost(
            partition=f"{topic.name}-{number}",
            reason=reason,
            broker_id=self.broker_id,
            topic=topic.name,
            number=number,
        )

    def _open_all(
        self,
        topic: TopicRecord,
        settings: TopicSettings,
        wanted: Mapping[int, PartitionState],
        failed: dict[int, KafkalogError],
    ) -> dict[int, Partition]:
        """Open the logs of partitions; why those failed that could not be opened is put into `failed`."""
        opened = {}
        if wanted:
            try:
                self._directory.make_folders(topic.topic_id, wanted)
            except KafkalogError:
                pass  # opening tells why
        for number, state in wanted.items():
            try:
                opened[number] = self._open(topic, number, settings, state.leader_epoch)
            except KafkalogError as error:
                failed[number] = error
        return opened

    def _take_in_failures(self, topic: TopicRecord, failed: Mapping[int, KafkalogError], among: Container[int]) -> None:
        """Remember why some of a topic's partitions are not served, for those who ask; each reason is logged once."""
        others = {key: error for key, error in self._failed.items() if key[0] != topic.topic_id or key[1] not in among}
        for number, error in failed.items():
            if str(error) != str(self._failed.get((topic.topic_id, number))):
                event = "partition_lost" if isinstance(error, PartitionLost) else "partition_not_opened"
                log.error(event, partition=f"{topic.name}-{number}", reason=str(error))
            self._retry_at = self.clock.monotonic() + _RETRY_SECONDS
        self._failed = others | {(topic.topic_id, number): error for number, error in failed.items()}

    def _take_out(self, removed: Collection[PartitionKey]) -> None:
        """Serve partitions no longer whose files somebody removed. Asks nothing of ZooKeeper, which may be away."""
        for topic_id, number in sorted(removed):
            topic = self._ids.get(topic_id)
            state = topic.states.get(number) if topic is not None else None
            if topic is None or state is None or not self._directory.note_if_missing(topic_id, number):
                continue  # deleted, or made anew, meanwhile
            hosted = dict(self._hosted)
            partition = hosted.pop((topic_id, number), None)
            self._hosted = hosted
            lost = self._loss(topic, number, state)
            if lost is not None:
                self._take_in_failures(topic, {number: lost}, {number})
            if partition is not None:
                partition.close()
        if removed:
            with self._changed:
                self._changed.notify_all()

    def _open(self, topic: TopicRecord, number: int, settings: TopicSettings, leader_epoch: int) -> Partition:
        label = f"{topic.name}-{number}"
        opened = self._directory.open_log(topic.topic_id, number, label, settings, leader_epoch)
        return Partition(topic.name, topic.topic_id, number, opened, self._directory, settings, self.broker_id)

    def _close_deleted(self) -> None:
        """Close what no topic names any more."""
        self._failed = {key: error for key, error in self._failed.items() if key[0] in self._ids}
        gone = [key for key in self._hosted if key[0] not in self._ids]
        if gone:
            closing = [self._hosted[key] for key in gone]
            self._hosted = {key: partition for key, partition in self._hosted.items() if key[0] in self._ids}
            for partition in closing:
                partition.close()
                log.info("partition_closed", partition=partition.label, topic_id=partition.topic_id.hex())

    def _remove_deleted(self) -> None:
        """Remove the logs of topics that were deleted."""
        deleted = registry.deleted_topics(self.session, self._path_changed)
        to_remove = {paths.deleted_topic(topic_id): topic_id for topic_id in sorted(deleted - set(self._ids))}
        if self._directory.failed is not None:
            to_remove = {}  # nothing of it is touched; the next start removes them
        self._undone = {
            path: why for path, why in self._undone.items() if path in to_remove or not path.startswith(_EVERY_DELETED)
        }
        for path, topic_id in to_remove.items():
            with self._sparing_others(path):
                for existing_id, number in self._directory.existing():
                    if existing_id == topic_id:
                        self._directory.remove_log(topic_id, number)
                        log.info("log_removed", topic_id=topic_id.hex(), partition=number)
                registry.logs_removed(self.session, topic_id, self.broker_id)

    def _warn_of_refused(self, topic: TopicRecord) -> None:
        _, refused = TopicSettings.understood(topic.config)
        for name, reason in refused.items():
            value = topic.config[name]
            if (topic.topic_id, name, value) not in self._refused:
                self._refused.add((topic.topic_id, name, value))
                log.warning("topic_setting_ignored", topic=topic.name, setting=name, value=value, reason=reason)

    def _warn_of_strays(self) -> None:
        """Logs of topics that ZooKeeper neither has nor saw deleted are kept: its data may be an old backup."""
        for topic_id, number in self._directory.existing():
            if topic_id not in self._ids:
                log.warning("stray_log", topic_id=topic_id.hex(), partition=number, kept_in=str(self._directory.path))


def topic_settings(topic: TopicRecord) -> TopicSettings:
    """A topic's settings, as far as this version understands them; the others, of a newer one, have their defaults.

    Where it does not understand the cleanup.policy, it does not know what that means to keep, and deletes nothing.
    """
    values, refused = TopicSettings.understood(topic.config)
    return values.with_({"retention.ms": -1, "retention.bytes": -1}) if "cleanup.policy" in refused else values


def _id_taken(broker: BrokerRecord, other: BrokerRecord) -> InvalidSetting:
    """What there is to say to a broker whose id another live one has."""
    reason = f"the broker at {other.host}:{other.grpc_port} has it ({other.where})"
    if other.directory == broker.directory:
        reason += ", and one of the two data directories is a copy of the other"
    return InvalidSetting(name="broker.id", value=broker.broker_id, reason=reason)


def _topic_of(path: str) -> str:
    """The topic whose znode, or a znode below it, is at a path."""
    return path[len(paths.TOPICS) + 1 :].partition("/")[0]
