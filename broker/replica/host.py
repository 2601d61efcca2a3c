"""The replicas that this broker holds: opens and closes their logs, and gives them their roles, by the metadata. One
thread calls it (`watcher.py`); requests look up hosted partitions without a lock.

A topic is known as soon as it is read, before its logs are open. While ZooKeeper is unreachable, partitions are still
served: a leader acknowledges nothing that its in-sync set does not have, whoever else believes to lead.

A partition is served once its log is open and then its state is written in ZooKeeper, with the id of the directory that
has the log, and after an unclean stop with a raised leader epoch. A log that cannot be opened is tried again every
second. A log that is not where its state says is lost, and so is one whose files were removed while it was open.

- If it was the only replica, it is neither opened nor created until it is there at a start, or until `replace_lost` is
  called.
- If there are others, this one first leaves the in-sync set and the eligible replicas, and then begins anew, empty, as
  a follower. The same is done after the machine may have lost what was not synced; then the log is kept, and cut to
  where it agrees with its leader's. It is done too if only what is staged may be incomplete, unless nobody else can
  lead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace

from broker.config import BrokerSettings, TopicSettings
from broker.replica.follower import Links
from broker.replica.losses import Losses
from broker.replica.metadata import Metadata, topic_settings
from broker.replica.partition import Partition
from broker.replica.removal import Removal
from broker.replica.turn import Turn
from broker.replica.undone import Undone
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import (
    KafkalogError,
    NotLeader,
    NotLost,
    PartitionLost,
    StorageFailed,
    UnknownPartition,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import PartitionState, TopicRecord

log = get_logger(__name__)

_TURN_SECONDS = 0.5
_OPENED_TOGETHER = 100
"""Of a topic's logs, so many share a sync of their folders' names and a write of their states."""
_EVERY_DELETED = paths.DELETED_TOPICS + "/"
PartitionKey = tuple[bytes, int]


class Host:
    """The partitions that this broker holds.

    Args:
        broker_id: this broker's.
        directory: of its logs.
        metadata: decides what is hosted.
        settings: the broker's.

    Attributes:
        on_joinable: called when a follower of some partition may join the in-sync set.
        on_damage: called with a partition and an offset at which a read has met damage. It must neither wait nor raise.
    """

    def __init__(
        self,
        broker_id: int,
        directory: LogDirectory,
        metadata: Metadata,
        settings: BrokerSettings,
        undone: Undone,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.broker_id = broker_id
        self.metadata = metadata
        self.settings = settings
        self.clock = clock
        self._directory = directory
        self._health = directory.services.health
        self._session = metadata.session
        self._undone = undone
        # Views: replaced, never changed; written by the watching thread.
        self._hosted: Mapping[PartitionKey, Partition] = {}
        self._failed: Mapping[PartitionKey, KafkalogError] = {}
        # Topics that are not yet in line with the metadata, with the first partition that was not handled. Written by
        # the watching thread; others only check whether a topic is in it.
        self._to_open: OrderedDict[str, int] = OrderedDict()
        self._refused: set[tuple[bytes, str, str]] = set()  # settings of topics that were warned of
        self._removal = Removal(broker_id, directory, metadata, undone)
        self.on_joinable: Callable[[], object] = lambda: None
        self.on_damage: Callable[[Partition, int], object] = lambda partition, offset: None
        self.links = Links(broker_id, self._directory_id, metadata, clock, self._diverged)
        self.losses = Losses(broker_id, directory, metadata, self.links)
        self._replacing = threading.Lock()  # one `replace_lost` at a time; before metadata.changed

    @property
    def _directory_id(self) -> str:
        return self._directory.directory_id

    def close(self) -> None:
        """Close every partition. After the watcher's stop."""
        self.links.stop()
        hosted, self._hosted = self._hosted, {}
        for partition in hosted.values():
            partition.close()

    # --- what requests ask -----------------------------------------------------------------------------------------

    def leader_of(self, topic_id: bytes, number: int) -> Partition:
        """The partition, if it is led here.

        Raises:
            UnknownTopicId, UnknownPartition, NotLeader; or why its log could not be opened.
            StorageFailed: the directory is out of service. Answers from memory would not help: a stream would wait for
                news for ever.
        """
        partition = self._hosted.get((topic_id, number))
        if partition is not None and partition.role.leads:
            if self._health.failed is not None:
                self._health.check()
            return partition
        raise self._not_here(topic_id, number)

    def replica_of(self, topic_id: bytes, number: int) -> Partition:
        """The partition, if it is held here, in whatever role. Raises as `leader_of`."""
        partition = self._hosted.get((topic_id, number))
        if partition is None:
            raise self._not_here(topic_id, number)
        return partition

    def _not_here(self, topic_id: bytes, number: int) -> KafkalogError:
        topic = self.metadata.topic_by_id(topic_id)
        if number >= len(topic.replicas):
            raise UnknownPartition(topic=topic.name, partition=number, partitions=len(topic.replicas))
        failed = self._failed.get((topic_id, number))
        if failed is not None:
            return failed.fresh()
        return NotLeader(broker_id=self.broker_id, partition=f"{topic.name}-{number}")

    def failure(self, topic_id: bytes, number: int) -> KafkalogError | None:
        """Why a partition of this broker is not served; None also if it is not this broker's."""
        return self._failed.get((topic_id, number))

    def unserved(self) -> Mapping[PartitionKey, KafkalogError]:
        """This broker's partitions that are not served, and why."""
        return self._failed

    @property
    def failed(self) -> StorageFailed | None:
        """Why the directory is out of service; None while it serves."""
        return self._directory.failed

    @property
    def is_full(self) -> bool:
        """Whether the disk had no room for something in the last minute."""
        return self._directory.is_full

    @property
    def hosted(self) -> Mapping[PartitionKey, Partition]:
        """The partitions served here."""
        return self._hosted

    def is_behind(self, name: str) -> bool:
        """Whether the last read of a topic left work for this broker: logs to open, settings to pass on."""
        return name in self._to_open

    def is_opening(self, name: str) -> bool:
        """Whether some of a topic's logs were opened, and others are left."""
        return self._to_open.get(name, 0) > 0

    @property
    def has_work(self) -> bool:
        """Whether any topic `is_behind`."""
        return bool(self._to_open)

    def replace_lost(self, topic_id: bytes, number: int, start_offset: int, seconds: float) -> PartitionState:
        """Replace a lost log by an empty one. The records of the lost log are given up for good.

        Args:
            start_offset: of its first record; see `broker/requests/topics.py`.
            seconds: how long to wait until it is served.

        Returns:
            its state.

        Raises:
            UnknownTopicId, UnknownPartition, NotLeader.
            NotLost: it is served, or its log could not be opened for another reason.
        """
        name = self.metadata.topic_by_id(topic_id).name
        with self._replacing:
            while True:
                topic = registry.read_topic(self._session, name)
                if topic is None or topic.deleted or topic.topic_id != topic_id:
                    raise UnknownTopicId(topic_id=topic_id.hex())
                if number >= len(topic.replicas):
                    raise UnknownPartition(topic=name, partition=number, partitions=len(topic.replicas))
                label = f"{name}-{number}"
                if topic.preferred_leader(number) != self.broker_id:
                    raise NotLeader(broker_id=self.broker_id, partition=label)
                state = topic.states.get(number)
                if state is None or self._loss(topic, number, state) is None:
                    raise NotLost(partition=label)
                # The log first, because a state must not name a missing log. It counts as lost until the state is
                # written.
                self._directory.replace_log(topic_id, number, label, start_offset)
                renewed = PartitionState.only(self.broker_id, self._directory_id, state.leader_epoch + 1, state.version)
                renewed = replace(renewed, replicas=state.replicas, unknown=state.unknown)
                written = registry.write_states(self._session, topic, {number: renewed}).get(number)
                if written is not None and written.directory == renewed.directory:
                    self._directory.trust_log(topic_id, number)
                    break
        log.warning(
            "lost_partition_replaced", partition=label, start_offset=start_offset, given_up_in=state.directory,
            leader_epoch=written.leader_epoch,
        )  # fmt: skip
        self.metadata.path_changed(paths.topic(name))
        self.metadata.wait_until(lambda: (topic_id, number) in self._hosted, seconds)
        return written

    # --- obeying the metadata ----------------------------------------------------------------------------------------

    def look_at(self, changed: Iterable[str], gone: Iterable[str]) -> None:
        """Note the topics that were read again, or deleted."""
        to_open = OrderedDict(self._to_open)
        for name in gone:
            to_open.pop(name, None)
        for name in changed:
            to_open[name] = 0
        self._to_open = to_open

    def settle_loss(self) -> None:
        """Note that the broker has done what follows from a loss of unsynced writes, once every log that is there has
        been opened: what may be missing is looked for then."""
        if not self._directory.may_have_lost or self._to_open or self._undone.reasons or self.failed is not None:
            return
        if all(isinstance(error, PartitionLost) for error in self._failed.values()):
            self._directory.settle_loss()

    def open_for_a_turn(self) -> None:
        """Bring what is hosted in line with the topics as they were read, some partitions of each in its turn."""
        topics = dict(self.metadata.topics)
        turn_end = self.clock.monotonic() + _TURN_SECONDS
        try:
            while self._to_open:
                name, start = next(iter(self._to_open.items()))
                end = count = len(topics[name].replicas)
                with self._undone.sparing_others(paths.topic(name)):
                    topics[name], end = self._open_some(topics[name], start)
                if end < count:  # after the others; never absent meanwhile, because other threads check (`is_behind`)
                    self._to_open[name] = end
                    self._to_open.move_to_end(name)
                else:
                    del self._to_open[name]
                if self.clock.monotonic() >= turn_end:
                    break
        finally:  # also without ZooKeeper: the open logs are known
            self.metadata.publish(topics)
        self._removal.remove(self._hosted)

    def _open_some(self, topic: TopicRecord, start: int) -> tuple[TopicRecord, int]:
        """Open the logs of this broker's partitions of a topic that are not open yet, from partition `start` on, at
        most `_OPENED_TOGETHER`. Returns the topic with their states, and the first partition that is left."""
        settings = topic_settings(topic)
        if not start:
            self._warn_of_refused(topic)
            self._drop_closed(topic)
        turn = self._look_through(topic, start, settings)
        if turn.departing:
            topic = self.losses.leave(topic, turn)
        opened = self._open_all(topic, settings, turn)
        try:
            topic = self.losses.leave_without_staged(topic, turn, opened)
            states = self._write_states(topic, opened, turn)
            hosted = dict(self._hosted)
            for number, partition in opened.items():
                if number not in states:  # the topic was deleted meanwhile
                    continue
                if number not in turn.anew:
                    lost = self._loss(topic, number, states[number])
                    if lost is not None:  # another broker wrote the state first
                        turn.failed[number] = lost
                        continue
                try:
                    self._give_role(partition, topic, number, states[number])
                except KafkalogError as error:
                    turn.failed[number] = error
                    continue
                hosted[topic.topic_id, number] = partition
                if number in turn.departing:
                    partition.following.forget_copies()
            for number in (*turn.failed, *turn.moved):
                fenced = hosted.pop((topic.topic_id, number), None)
                if fenced is not None:
                    self.links.leave((topic.topic_id, number))
                    fenced.close()
            self._hosted = hosted
            for number in turn.moved:
                self._removal.moved(topic.name, (topic.topic_id, number))
            for number, partition in opened.items():
                if hosted.get((topic.topic_id, number)) is partition:
                    self.links.follow(partition, states[number].throttled_rate)
            self._take_in_failures(topic, turn.failed, range(start, turn.end))
            return replace(topic, states=states), turn.end
        finally:
            for number, partition in opened.items():
                if self._hosted.get((topic.topic_id, number)) is not partition:
                    partition.close()

    def _look_through(self, topic: TopicRecord, start: int, settings: TopicSettings) -> Turn:
        """Find the partitions to open, from `start` on; open ones get their epoch and settings."""
        turn = Turn(len(topic.replicas))
        for number in range(start, turn.end):
            if len(turn.wanted) == _OPENED_TOGETHER:
                turn.end = number
                break
            state = topic.states.get(number)
            if self.broker_id not in topic.replicas_of(number):
                if state is not None and state.replicas:
                    turn.moved.add(number)
                continue
            if state is None and topic.preferred_leader(number) != self.broker_id:
                continue  # it opens the first log
            partition = self._hosted.get((topic.topic_id, number))
            try:
                lost = self._loss(topic, number, state) if state is not None else None
                if partition is not None and lost is None:
                    if partition.settings.given() != settings.given():
                        was_unclean = partition.settings.unclean_leader_election_enable
                        partition.update_settings(settings)
                        if settings.unclean_leader_election_enable and not was_unclean:
                            self.links.leave((topic.topic_id, number))  # follow anew: one that diverged may be cut now
                    if state is not None:
                        self._give_role(partition, topic, number, state)
                        self.links.follow(partition, state.throttled_rate)
                    else:
                        turn.lost_states[number] = self._state_of(partition)
                    continue
            except KafkalogError as error:
                turn.failed[number] = error
                continue
            if state is not None and self.losses.others_have(topic, number, state):
                if lost is not None:
                    turn.anew.add(number)
                if lost is not None or self.losses.may_lack_acknowledged(topic.topic_id, number):
                    turn.departing[number] = state
            if lost is not None and number not in turn.anew:
                turn.failed[number] = lost
            else:
                turn.wanted[number] = self.losses.wanted_state(state)
        return turn

    def _give_role(self, partition: Partition, topic: TopicRecord, number: int, state: PartitionState) -> None:
        """Raises StorageFailed, DiskFull, NotLeader: it keeps the role that it had."""
        if len(state.held_by(topic.replicas[number])) > 1 and not partition.log.has_high_watermark:
            partition.log.high_watermark = partition.log.start_offset  # killed before it was saved: not known
        if state.leader == self.broker_id:
            partition.role.lead(state, topic.replicas[number])
            return
        following = partition.following
        if following.may_have_lost and state.leader >= 0 and self.broker_id not in (*state.isr, *state.eligible):
            following.cut_unsynced_damage()  # the leader has what is cut; without one, what is left may be needed
        partition.role.follow(state.leader, state.leader_epoch)

    def _diverged(self, partition: Partition, error: KafkalogError) -> None:
        """A replica has stopped to follow. Called by a link's thread."""
        log.error("replica_diverged", partition=partition.label, reason=str(error))

    def _write_states(
        self, topic: TopicRecord, opened: Mapping[int, Partition], turn: Turn
    ) -> dict[int, PartitionState]:
        """Write the new states; returns all of the topic's states after that.

        A partition without a state was never opened, unless its log is open here, or is here with records: then the
        state was lost. It is written again, because clients find the leader by it, and because a log without a state
        that is missing at the next start would be created empty.
        """
        new, lost_states = {}, turn.lost_states
        for number, partition in opened.items():
            state = topic.states.get(number)
            if state is None and partition.end_offset > 0:
                lost_states[number] = self._state_of(partition, raised=not self._directory.was_clean)
            elif turn.wanted[number] != state:
                new[number] = turn.wanted[number]
        states = dict(topic.states)
        if to_write := new | lost_states:
            states |= registry.write_states(self._session, topic, to_write)
        for number in sorted(lost_states.keys() & states.keys()):  # else the topic was deleted meanwhile
            epoch = states[number].leader_epoch
            log.warning("partition_state_missing", partition=f"{topic.name}-{number}", leader_epoch=epoch)
        return states

    def _drop_closed(self, topic: TopicRecord) -> None:
        """Stop serving partitions whose logs were closed, as by the replacement of a log that was not known to be
        lost."""
        keys = [(topic.topic_id, number) for number in range(len(topic.replicas))]
        closed = {key: each for key in keys if (each := self._hosted.get(key)) is not None and not each.is_open}
        if closed:
            self._hosted = {key: partition for key, partition in self._hosted.items() if key not in closed}
            for partition in closed.values():
                partition.close()

    def _state_of(self, partition: Partition, raised: bool = False) -> PartitionState:
        """The state for an open log that has none."""
        epoch = max(partition.role.epoch, partition.log.last_epoch, 0) + raised
        return PartitionState.only(self.broker_id, self._directory_id, epoch)

    def _loss(self, topic: TopicRecord, number: int, state: PartitionState) -> PartitionLost | None:
        return self.losses.find(topic, number, state, (topic.topic_id, number) in self._hosted)

    def _open_all(self, topic: TopicRecord, settings: TopicSettings, turn: Turn) -> dict[int, Partition]:
        """Open the logs of the wanted partitions that can be opened."""
        opened = {}
        if turn.wanted:
            try:
                self._directory.make_folders(topic.topic_id, turn.wanted)
            except KafkalogError:
                pass  # opening logs why
        for number in turn.wanted:
            try:
                opened[number] = self._open(topic, number, settings)
            except KafkalogError as error:
                turn.failed[number] = error
        return opened

    def _take_in_failures(self, topic: TopicRecord, failed: Mapping[int, KafkalogError], among: Container[int]) -> None:
        """Keep the errors of a topic's partitions that are not served, for requests; each reason is logged once."""
        others = {key: error for key, error in self._failed.items() if key[0] != topic.topic_id or key[1] not in among}
        for number, error in failed.items():
            if str(error) != str(self._failed.get((topic.topic_id, number))):
                event = "partition_lost" if isinstance(error, PartitionLost) else "partition_not_opened"
                log.error(event, partition=f"{topic.name}-{number}", reason=str(error))
            self._undone.retry_later()
        self._failed = others | {(topic.topic_id, number): error for number, error in failed.items()}
        self.losses.forget_all_but(self._failed)

    def take_out(self, removed: Collection[PartitionKey]) -> None:
        """Stop serving partitions whose files were removed. Does not need ZooKeeper, which may be unreachable."""
        for topic_id, number in sorted(removed):
            topic = self.metadata.ids.get(topic_id)
            state = topic.states.get(number) if topic is not None else None
            if topic is None or state is None or not self._directory.note_if_missing(topic_id, number):
                continue  # deleted, or created again, meanwhile
            hosted = dict(self._hosted)
            partition = hosted.pop((topic_id, number), None)
            self._hosted = hosted
            lost = self._loss(topic, number, state)
            if lost is not None and len(topic.replicas_of(number)) > 1:
                self._to_open[topic.name] = 0
            elif lost is not None:
                self._take_in_failures(topic, {number: lost}, {number})
            if partition is not None:
                self.links.leave((topic_id, number))
                partition.close()
        if removed:
            with self.metadata.changed:
                self.metadata.changed.notify_all()

    def _open(self, topic: TopicRecord, number: int, settings: TopicSettings) -> Partition:
        label = f"{topic.name}-{number}"
        self._removal.opened((topic.topic_id, number))
        may_lack = self.losses.may_lack_acknowledged(topic.topic_id, number)
        opened = self._directory.open_log(topic.topic_id, number, label, settings, None)
        if len(topic.replicas_of(number)) > 1:
            opened.high_watermark = self._directory.saved_high_watermark(topic.topic_id, number)
        opened_partition = Partition(
            topic.name, topic.topic_id, number, opened, self._directory, settings, self.broker_id, self.clock
        )
        opened_partition.role.on_joinable = lambda: self.on_joinable()
        opened_partition.role.is_certain = self.metadata.is_certain
        opened.reader.on_damage = lambda offset: self.on_damage(opened_partition, offset)
        opened_partition.following.may_have_lost = self._directory.may_have_lost and len(topic.replicas_of(number)) > 1
        if opened_partition.following.may_have_lost and not may_lack:
            opened_partition.following.cut_unsynced_damage()  # it was not synced, so it was not acknowledged
        return opened_partition

    def close_deleted(self) -> None:
        """Close the partitions that belong to no topic any more."""
        self._failed = {key: error for key, error in self._failed.items() if key[0] in self.metadata.ids}
        self.losses.forget_all_but(self._failed)
        gone = [key for key in self._hosted if key[0] not in self.metadata.ids]
        if gone:
            closing = [self._hosted[key] for key in gone]
            self._hosted = {key: partition for key, partition in self._hosted.items() if key[0] in self.metadata.ids}
            for partition in closing:
                partition.close()
                self.links.leave((partition.topic_id, partition.number))
                log.info("partition_closed", partition=partition.label, topic_id=partition.topic_id.hex())

    def remove_deleted(self, deleted: Collection[bytes]) -> None:
        """Remove the logs of topics that were deleted, by their ids."""
        to_remove = {
            paths.deleted_topic(topic_id): topic_id for topic_id in sorted(set(deleted) - set(self.metadata.ids))
        }
        if self._directory.failed is not None:
            to_remove = {}  # the directory is not touched; the next start removes them
        for path in [
            path for path in self._undone.reasons if path.startswith(_EVERY_DELETED) and path not in to_remove
        ]:
            del self._undone.reasons[path]
        for path, topic_id in to_remove.items():
            with self._undone.sparing_others(path):
                for existing_id, number in self._directory.existing():
                    if existing_id == topic_id:
                        self._directory.remove_log(topic_id, number)
                        log.info("log_removed", topic_id=topic_id.hex(), partition=number)
                registry.logs_removed(self._session, topic_id, self.broker_id)

    def _warn_of_refused(self, topic: TopicRecord) -> None:
        _, refused = TopicSettings.understood(topic.config)
        for name, reason in refused.items():
            value = topic.config[name]
            if (topic.topic_id, name, value) not in self._refused:
                self._refused.add((topic.topic_id, name, value))
                log.warning("topic_setting_ignored", topic=topic.name, setting=name, value=value, reason=reason)

    def warn_of_strays(self) -> None:
        """Warn of logs whose topics ZooKeeper neither has nor recorded as deleted. They are kept, because ZooKeeper's
        data may be an old backup."""
        for topic_id, number in self._directory.existing():
            if topic_id not in self.metadata.ids:
                log.warning("stray_log", topic_id=topic_id.hex(), partition=number, kept_in=str(self._directory.path))
