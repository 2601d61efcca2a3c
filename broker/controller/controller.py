"""The controller: elects the leaders of replicated partitions. Each broker has one of these threads, and one broker at
a time is elected (`kafkalog/zk/controllers.py`). What a state becomes is decided in `election.py`.

It looks at the metadata's views whenever they change, and writes the states that are to change, all together, each at
the version that the view has. A change that is refused has been overtaken by another, which comes into the view and is
looked at then. A term ends when the session is lost or in doubt. The next begins once everything was read again: by a
view from before, a broker that has come back would count as dead.

The views are of no use either while the watching thread hangs, as in a disk that does not answer. The session is kept
meanwhile, so this thread, which touches no disk, resigns after a session's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from broker.config import BrokerSettings
from broker.replica.metadata import Metadata, topic_settings
from broker.replica.registration import Registration
from broker.states.election import elect, first_state, prefer
from broker.states.reassignment import finish
from kafkalog.clock import Clock
from kafkalog.errors import ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import registry
from kafkalog.zk.controllers import ControllerRecord, elect_controller, read_controller, resign
from kafkalog.zk.registry import BrokerRecord, PartitionState, StateChange, TopicRecord
from kafkalog.zk.session import BadVersion

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_LOOKS_IN_SESSION_TIMEOUT = 4


class Controller:
    """Stands for election from `start` to `stop`, while this broker is registered."""

    def __init__(
        self, broker_id: int, metadata: Metadata, registration: Registration, settings: BrokerSettings, clock: Clock
    ) -> None:
        self._broker_id = broker_id
        self._metadata = metadata
        self._session = metadata.session
        self._registration = registration
        self._interval = settings.leader_rebalance_interval_ms / 1000
        self._session_timeout = settings.zookeeper_session_timeout_ms / 1000
        self._clock = clock
        self._changed = metadata.changed  # guards the next three
        self._is_due = True  # /controller is to be read
        self._in_doubt = False  # the connection was lost
        self._stopping = False
        # Of the thread:
        self._term: ControllerRecord | None = None
        self._is_elected = False  # /controller may be this session's, also when the term has ended
        self._seen: tuple[Mapping[str, TopicRecord], Mapping[int, BrokerRecord]] = (
            {},
            {},
        )  # the views of the last look
        # States that were written, or were found when a write was refused, beside those in the view at that time. They
        # count until the view has others.
        self._written: dict[tuple[bytes, int], tuple[PartitionState | None, PartitionState]] = {}
        self._movable: dict[tuple[bytes, int], float] = {}  # when partitions are given back to their preferred leaders
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    @property
    def term(self) -> ControllerRecord | None:
        """This broker's term as the controller; None if it is not the controller."""
        return self._term

    def start(self) -> None:
        self._session.on_state(self._state_changed)
        self._thread.start()

    def stop(self) -> None:
        """Resign. Safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # --- what wakes it

    def _state_changed(self, connected: bool, session_is_new: bool) -> None:
        with self._changed:
            self._is_due = self._in_doubt = True
            self._changed.notify_all()

    def _controller_changed(self, path: str) -> None:
        with self._changed:
            self._is_due = True
            self._changed.notify_all()

    def _has_news(self) -> bool:
        if self._term is None and not self._metadata.is_followed:
            return self._is_elected and self._session.connected
        if self._term is None:
            return self._is_due and self._metadata.is_current and (self._is_elected or self._registration.epoch > 0)
        return (
            self._is_due
            or self._in_doubt
            or not self._metadata.is_followed
            or self._registration.epoch != self._term.broker_epoch
            or self._metadata.topics is not self._seen[0]
            or self._metadata.brokers is not self._seen[1]
            or min(self._movable.values(), default=float("inf")) <= self._clock.monotonic()
        )

    def _pause(self) -> float | None:
        """How long nothing becomes due by time alone."""
        if not self._is_elected:
            return None
        next_move = min(self._movable.values(), default=float("inf")) - self._clock.monotonic()
        return min(max(0.0, next_move), self._session_timeout / _LOOKS_IN_SESSION_TIMEOUT)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: self._stopping or self._has_news(), self._pause()):
                    pass
                if self._stopping:
                    break
            try:
                self._act()
            except Exception as error:  # tried again: without a controller nobody leads after a failure
                if isinstance(error, ZooKeeperUnreachable):
                    log.warning("controller_not_acting", reason=str(error))
                else:
                    log.exception("controller_not_acting")
                with self._changed:
                    self._is_due = True
                    self._changed.wait_for(lambda: self._stopping or self._in_doubt, _RETRY_SECONDS)
        with suppress(ZooKeeperUnreachable):  # the znode ends with the session
            self._resign()

    # --- one step

    def _act(self) -> None:
        with self._changed:
            in_doubt, self._in_doubt = self._in_doubt, False
            if in_doubt:
                self._end_term("its session was in doubt")
            is_followed = self._metadata.is_followed
            if is_followed and not self._metadata.is_current:
                return
            is_due, self._is_due = self._is_due, False
        epoch = self._registration.epoch
        if not is_followed:
            self._end_term("its broker does not follow ZooKeeper")
        elif self._term is not None and epoch != self._term.broker_epoch:
            self._end_term("its registration has ended")
        if not epoch or not is_followed:
            self._resign()
            with self._changed:
                self._is_due = True  # it stands again once it is registered, and the views follow
            return
        if is_due or self._term is None:
            self._stand(epoch)
        if self._term is not None:
            try:
                self._look(self._term)
            except BadVersion:
                self._end_term("another one was elected")
                with self._changed:
                    self._is_due = True

    def _stand(self, epoch: int) -> None:
        found = read_controller(self._session, self._controller_changed)
        if found is not None and (not found.is_own or found == self._term):
            if not found.is_own:
                self._end_term(f"broker {found.broker_id} was elected")
            return
        self._end_term("its znode was removed")
        self._is_elected = True  # before it is: the outcome may stay unknown
        self._term = elect_controller(self._session, self._broker_id, epoch)
        if self._term is not None:
            self._seen = ({}, {})
            log.info("controller_elected", broker_id=self._broker_id, epoch=self._term.epoch)
        else:  # another one was faster, or this broker has registered again and the view does not have it yet
            with self._changed:
                self._is_due = True
                self._changed.wait(_RETRY_SECONDS)

    def _end_term(self, reason: str) -> None:
        if self._term is not None:
            log.info("controller_term_ended", broker_id=self._broker_id, epoch=self._term.epoch, reason=reason)
        self._term = None
        self._written, self._movable = {}, {}

    def _resign(self) -> None:
        self._end_term("it resigned")
        if self._is_elected:
            resign(self._session)
            self._is_elected = False

    # --- the states of partitions

    def _look(self, term: ControllerRecord) -> None:
        """Look at what has changed since the last look, and write the states that change by it. Raises BadVersion:
        another controller was elected."""
        topics, brokers = self._metadata.topics, self._metadata.brokers
        live = {broker.broker_id: broker.directory for broker in brokers.values()}
        stopping = {broker.broker_id for broker in brokers.values() if broker.stopping}
        is_same = brokers is self._seen[1]
        looked_at = [
            topic
            for name, topic in topics.items()
            if not (is_same and self._seen[0].get(name) is topic) and _is_replicated(topic)
        ]
        changes = [change for topic in looked_at for change in self._changes(topic, live, stopping)]
        self._write(changes, term, "leaders_elected")
        for topic in looked_at:
            self._settle(topic, term)
        self._seen = (topics, brokers)
        now = self._clock.monotonic()
        moves = {key for key, at in self._movable.items() if at <= now}
        if moves:
            self._move(moves, live.keys() - stopping, term)

    def _state(self, topic: TopicRecord, number: int) -> PartitionState | None:
        """The newest state of a partition that is known."""
        state = topic.states.get(number)
        before, written = self._written.get((topic.topic_id, number), (None, None))
        if written is not None and before == state:
            return written
        self._written.pop((topic.topic_id, number), None)
        return state

    def _changes(self, topic: TopicRecord, live: Mapping[int, str], stopping: set[int]) -> list[StateChange]:
        settings = topic_settings(topic)
        unclean, min_insync = settings.unclean_leader_election_enable, settings.min_insync_replicas
        changes = []
        for number, assigned in enumerate(topic.replicas):
            state = self._state(topic, number)
            assignment = tuple(assigned) if state is None else state.held_by(assigned)
            if state is None:
                after = first_state(assignment, live.keys() - stopping)
            else:
                after = elect(state, assignment, live, unclean, min_insync, stopping)
                after = finish(after or state, live.keys() - stopping) or after
            if after is not None:
                changes.append(StateChange(topic, number, state, after))
            key = (topic.topic_id, number)
            if after is None and state is not None and prefer(state, assignment, live.keys() - stopping) is not None:
                self._movable.setdefault(key, self._clock.monotonic() + self._interval)
            else:
                self._movable.pop(key, None)
        return changes

    def _settle(self, topic: TopicRecord, term: ControllerRecord) -> None:
        """Write the replicas of a topic of which nothing is moved any more into its znode: a state that is lost is made
        again by that. If the topic has changed meanwhile, it is looked at again."""
        states = {number: state for number in topic.states if (state := self._state(topic, number)) is not None}
        if any(state.target for state in states.values()):
            return
        replicas = [
            states[number].held_by(assigned) if number in states else tuple(assigned)
            for number, assigned in enumerate(topic.replicas)
        ]
        if replicas != list(topic.replicas):
            registry.update_topic(self._session, replace(topic, replicas=replicas), term.fence)

    def _move(self, moves: set[tuple[bytes, int]], can_lead: set[int], term: ControllerRecord) -> None:
        """Give partitions back to their preferred leaders."""
        changes = []
        for topic_id, number in sorted(moves):
            topic = self._metadata.ids.get(topic_id)
            state = self._state(topic, number) if topic is not None else None
            assignment = state.held_by(topic.replicas[number]) if topic is not None and state is not None else ()
            after = prefer(state, assignment, can_lead) if state is not None else None
            if topic is not None and after is not None:
                changes.append(StateChange(topic, number, state, after))
                self._movable[topic_id, number] = self._clock.monotonic() + _RETRY_SECONDS  # if it is refused
            else:
                del self._movable[topic_id, number]
        self._write(changes, term, "leaders_moved_back")

    def _write(self, changes: list[StateChange], term: ControllerRecord, event: str) -> None:
        if not changes:
            return
        began = self._clock.monotonic()
        found = registry.change_states(self._session, changes, term.fence)
        written = {key: state for key, state in found.items() if isinstance(state, PartitionState)}
        for change in changes:
            key = (change.topic.topic_id, change.number)
            self._written.pop(key, None)
            if key in written:
                self._written[key] = (change.topic.states.get(change.number), written[key])
        made = [
            change
            for change in changes
            if (state := written.get((change.topic.topic_id, change.number))) is not None
            and (state.leader, state.leader_epoch, state.isr) == (
                change.after.leader, change.after.leader_epoch, change.after.isr
            )
        ]  # fmt: skip
        for change in made:
            if change.before is not None and _is_unclean(change.before, change.after):
                label = f"{change.topic.name}-{change.number}"
                log.warning("unclean_leader_elected", partition=label, leader=change.after.leader)
        log.info(
            event,
            partitions=len(made),
            refused=len(changes) - len(made),
            without_leader=sum(change.after.leader < 0 for change in made),
            moved=sum(change.before is not None and change.before.target != change.after.target for change in made),
            seconds=round(self._clock.monotonic() - began, 3),
        )


def _is_replicated(topic: TopicRecord) -> bool:
    """Whether some partition has several replicas, or had."""
    return any(len(each) > 1 for each in topic.replicas) or any(state.replicas for state in topic.states.values())


def _is_unclean(before: PartitionState, after: PartitionState) -> bool:
    """Whether the new leader may not have every acknowledged record."""
    return bool(before.directories) and after.leader not in (-1, before.leader, *before.isr, *before.eligible)
