"""Finds what this broker's replicas have lost, and takes them out of the sets for it (rules 7 and 8 of
docs/REPLICATION.md). The watching thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from broker.replica.follower import Links
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.turn import Turn
from broker.states import election
from broker.storage.log_dir import LogDirectory, folder_name
from kafkalog.errors import PartitionLost, UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import PartitionState, TopicRecord

log = get_logger(__name__)

_LOG_LOST = "its log is lost"
_POWER_LOST = "the machine may have lost writes"
_STAGED_DAMAGED = "staged data is damaged"


class Losses:
    """What the replicas of this broker have lost.

    Attributes:
        raise_epoch: ends all registrations of this broker until now (`Registration.raise_epoch`).
    """

    def __init__(self, broker_id: int, directory: LogDirectory, metadata: Metadata, links: Links) -> None:
        self._broker_id = broker_id
        self._directory = directory
        self._metadata = metadata
        self._links = links
        # Logs that were lost and begun anew, with the directories that their states had then. A state has it until the
        # replica has joined the in-sync set.
        self._begun_anew: dict[tuple[bytes, int], str | None] = {}
        # Partitions that are not served and have left the sets after a loss.
        self._left: set[tuple[bytes, int]] = set()
        self.raise_epoch: Callable[[], object] = lambda: None

    def find(self, topic: TopicRecord, number: int, state: PartitionState, is_hosted: bool) -> PartitionLost | None:
        """The error if a partition's log is not where its state says; else None."""
        here = f"{self._directory.directory_id} ({self._directory.path})"
        directory = state.directories.get(self._broker_id)
        key = topic.topic_id, number
        if directory is None and (state.leader != self._broker_id or not state.directories):
            return None  # it was never opened here
        if directory != self._directory.directory_id:
            is_copying = is_hosted and key in self._begun_anew and self._begun_anew[key] == directory
            if is_copying and self._broker_id not in (state.leader, *state.isr, *state.eligible):
                return None  # it has not joined yet; if the directory of before has, that is another process's
            reason = f"its log is in data directory {directory}, but broker {self._broker_id} has {here}"
        elif not is_hosted and self._directory.note_if_missing(topic.topic_id, number):
            folder = folder_name(topic.topic_id, number)
            if self._directory.has_log(topic.topic_id, number):
                reason = (
                    f"files of its folder {folder} in data directory {here} were removed or replaced while in use, "
                    "or by a recovery that did not finish"
                )
            else:
                reason = f"its folder {folder} is missing from data directory {here}, or empty"
        else:
            return None
        return PartitionLost(
            partition=f"{topic.name}-{number}",
            reason=reason,
            broker_id=self._broker_id,
            topic=topic.name,
            number=number,
        )

    def may_lack_acknowledged(self, topic_id: bytes, number: int) -> bool:
        """Whether a loss of power may have taken acknowledged records of a log."""
        return self._directory.may_have_lost and not self._directory.acks_were_flushed(topic_id, number)

    def others_have(self, topic: TopicRecord, number: int, state: PartitionState) -> bool:
        """Whether another replica may have the partition's log. Before one has joined, this is the only copy."""
        others = {*topic.replicas_of(number)} - {self._broker_id}
        return not others.isdisjoint(state.directories)

    def wanted_state(self, state: PartitionState | None) -> PartitionState:
        """The state that a partition is to have once its log is open here."""
        if state is None:
            return PartitionState.only(self._broker_id, self._directory.directory_id)
        if state.leader != self._broker_id:
            return state
        if not state.directories:  # elected because the first replica is away
            state = replace(state, directories={self._broker_id: self._directory.directory_id})
        return state if self._directory.was_clean else replace(state, leader_epoch=state.leader_epoch + 1)

    def leave(self, topic: TopicRecord, turn: Turn) -> TopicRecord:
        """Leave the in-sync sets and the eligible replicas of partitions whose records may be missing here (rules 7 and
        8 of docs/REPLICATION.md). Then drop what is left of the logs that are lost. Returns the topic with the states
        after that."""
        # Who left before is still out, unless it was elected: no leader lets a replica join that does not fetch.
        are_out = {
            number: state
            for number, state in turn.departing.items()
            if number not in turn.anew
            and (topic.topic_id, number) in self._left
            and self._broker_id not in (state.leader, *state.isr, *state.eligible)
        }
        turn.departing = {number: state for number, state in turn.departing.items() if number not in are_out}
        if turn.departing:
            reasons = {number: _LOG_LOST if number in turn.anew else _POWER_LOST for number in turn.departing}
            topic = self._leave_sets(topic, turn, turn.departing, reasons)
            self._left |= {(topic.topic_id, number) for number in turn.departing}
        for number in turn.anew & turn.departing.keys():
            self._directory.replace_log(topic.topic_id, number, f"{topic.name}-{number}", 0)
            self._directory.trust_log(topic.topic_id, number)
            self._begun_anew[topic.topic_id, number] = topic.states[number].directories.get(self._broker_id)
        turn.departing |= are_out
        return topic

    def leave_without_staged(self, topic: TopicRecord, turn: Turn, opened: Mapping[int, Partition]) -> TopicRecord:
        """The same where the log is whole, but something may be missing of what is staged beside it. The last replica
        stays: there is nobody to copy from. So does the last live one after a loss of power, which others may have had
        too: if all left, nobody would lead. Returns the topic with the states after that."""
        leaving = {
            number: state
            for number, partition in opened.items()
            if number not in turn.departing
            and (state := topic.states.get(number)) is not None
            and self.others_have(topic, number, state)
            and partition.following.may_lack_staged(self._directory.may_have_lost)
        }
        if leaving:
            live = self._metadata.brokers
            damaged = {number for number in leaving if opened[number].following.may_lack_staged(False)}
            reasons = {number: _STAGED_DAMAGED if number in damaged else _POWER_LOST for number in leaving}
            of_whom = {number: None if number in damaged else live for number in leaving}
            topic = self._leave_sets(topic, turn, leaving, reasons, of_whom)
            turn.departing |= leaving
        return topic

    def forget_all_but(self, unserved: Container[tuple[bytes, int]]) -> None:
        """Forget which partitions have left the sets, except those of `unserved`."""
        self._left = {key for key in self._left if key in unserved}

    def _leave_sets(
        self,
        topic: TopicRecord,
        turn: Turn,
        leaving: dict[int, PartitionState],
        reasons: Mapping[int, str],
        unless_last: Mapping[int, Container[int] | None] | None = None,
    ) -> TopicRecord:
        """Leave the sets of some partitions; those whose topic was deleted are taken out of `leaving`.

        Args:
            reasons: for the event.
            unless_last: not those whose last replica is this one, of which brokers; see `is_last`.
        """
        # A leader knows how far this replica had come before the loss, and may be about to let it join, or have done so
        # since the states were read.
        for number in leaving:
            self._links.leave((topic.topic_id, number))
        self.raise_epoch()
        states = dict(topic.states) | self._read_states(topic, leaving)
        left = set(leaving)
        while left:
            of_whom = unless_last or {}
            last = {
                each for each in left & of_whom.keys() if election.is_last(states[each], self._broker_id, of_whom[each])
            }
            for number in last:
                del leaving[number]
                left.discard(number)
                turn.wanted[number] = self.wanted_state(states[number])
            departed = {number: election.depart(states[number], self._broker_id) for number in left}
            wanted = {number: state for number, state in departed.items() if state is not None}
            if wanted:
                written = registry.write_states(self._metadata.session, replace(topic, states=states), wanted)
                for number in wanted.keys() - written.keys():  # the topic was deleted
                    turn.wanted.pop(number, None)
                    del leaving[number]
                states |= written
            left = wanted.keys() & leaving.keys()
        for number in leaving:
            state = states[number]
            log.warning(
                "replica_left_the_sets",
                partition=f"{topic.name}-{number}",
                reason=reasons[number],
                leader=state.leader,
                isr=list(state.isr),
            )
            turn.wanted[number] = state
        return replace(topic, states=states)

    def _read_states(self, topic: TopicRecord, numbers: Iterable[int]) -> dict[int, PartitionState]:
        """Raises UnreadableZnode."""
        wanted = {paths.partition_state(topic.name, topic.topic_id, number): number for number in numbers}
        states = {}
        for path, state in registry.read_states(self._metadata.session, list(wanted)).items():
            if isinstance(state, UnreadableZnode):
                raise state
            if state is not None:
                states[wanted[path]] = state
        return states
