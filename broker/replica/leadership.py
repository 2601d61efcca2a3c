"""What the leader of a partition knows of its replicas during one leader epoch: the in-sync set, how far each follower
has fetched, and the high watermark that follows from these. Pure: no clock, no lock, no log, no ZooKeeper.

The rules have their numbers from docs/REPLICATION.md; `tests/model/replication.py` explores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kafkalog.zk.registry import BrokerRecord, PartitionState

IN_FLIGHT_MAX = 2
"""Requests that a follower's broker sends before the first one is answered. The second one names partitions that came
meanwhile: the first one is answered at once then."""
_NEAR_SECONDS = 1.0
"""A follower is near the leader's end if it has all that the leader had so long ago. One that waits for a slow disk's
flushes never has all that the leader has now, while others append."""


class Pulse:
    """The last request of a follower's broker, for whichever partitions.

    Attributes:
        at: when it came; by the monotonic clock.
        proven_at: it was surely sent after this.
        registration: of the broker, as it says.
        connection: on which it came; a connection that was accepted later has a larger number.
        is_open: the connection is.
    """

    __slots__ = ("at", "connection", "is_open", "proven_at", "registration")

    def __init__(self, at: float, registration: int, connection: int) -> None:
        self.at = at
        self.proven_at = -math.inf
        self.registration = registration
        self.connection = connection
        self.is_open = True

    def is_after(self, connection: int) -> bool:
        """Whether its broker has made an open connection after another one, of which something comes late. That is not
        what the broker says now: it would stand for as long as the broker has nothing new to say."""
        return self.is_open and self.connection > connection


@dataclass(slots=True)
class Follower:
    """A replica that has fetched in this epoch.

    Attributes:
        end_offset: it has every record before it.
        is_whole: none of them is known to be damaged there, and it has the state of the producers before them.
        staged_end: it has everything that was staged before it, by the leader's count (`Staging.staged_end`).
        said_at: when it said so.
        goal_end, goal_at: where the leader's log ended at a fetch of this follower, and when that was. There is another
            goal once this one is reached.
        reached_at: as of when it has all that the leader had, as it said on this connection.
        caught_up_at: as of when it had all that the leader had last, as far as is known.
    """

    pulse: Pulse
    end_offset: int
    is_whole: bool
    staged_end: int
    said_at: float
    goal_end: int
    goal_at: float
    reached_at: float
    caught_up_at: float


@dataclass(frozen=True, slots=True)
class Joining:
    """A replica that the leader has asked to be taken into the in-sync set. It may be in it already."""

    broker_id: int
    registration: int
    directory: str


class Leadership:
    """A leader's epoch.

    Args:
        broker_id: the leader's.
        state: of the partition, which names it as the leader.
        assigned: the brokers in the topic's znode; the state may have others.
        min_insync: min.insync.replicas; it counts as at most the number of replicas.
        end_offset: of the leader's log, when the epoch began.
        staged_end: how much was staged by then.
        watermark: up to which the leader knows that all is acknowledged.
        now: when it began; by the monotonic clock.

    Attributes:
        epoch: the leader epoch.
        start_offset: the log's end when the epoch began.
        watermark: the high watermark: every member of the in-sync set has every record before it.
        staged_watermark: the same of what is staged; -1: not known in this epoch.
        state: the last that is known to be written.
        replicas: the brokers that may be in the in-sync set.
        joining: of which it is not known whether they are in the set.
    """

    def __init__(
        self,
        broker_id: int,
        state: PartitionState,
        assigned: Iterable[int],
        min_insync: int,
        end_offset: int,
        staged_end: int,
        watermark: int,
        now: float,
    ) -> None:
        self.broker_id = broker_id
        self.epoch = state.leader_epoch
        self.start_offset = end_offset
        self.watermark = min(watermark, end_offset)
        self.staged_start = staged_end
        self.staged_watermark = -1
        self.state = state
        self.joining: dict[int, Joining] = {}
        # By broker and directory: two processes may fetch under one id, the broker that has it and one that had it
        # until it was cut off from ZooKeeper.
        self._followers: dict[tuple[int, str], Follower] = {}
        self._began_at = now
        self.configure(assigned, min_insync)

    def configure(self, assigned: Iterable[int], min_insync: int) -> None:
        """Use another assignment or another min.insync.replicas from now on."""
        self._assigned, self._min_insync_given = tuple(assigned), min_insync
        self._take_replicas()

    def _take_replicas(self) -> None:
        """By the state: a replica that was removed must not join again by a change that is made from a newer state."""
        self.replicas = self.state.held_by(self._assigned)
        self.min_insync = min(self._min_insync_given, len(self.replicas))

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has the partition, so that the log's end is the high watermark."""
        return len(self.replicas) == 1 and self.state.isr == (self.broker_id,) and not self.joining

    @property
    def is_below_min(self) -> bool:
        """Whether the in-sync set is smaller than min.insync.replicas, so that nothing is acknowledged (rule 4). It
        counts as that while a replica outside of it may be elected, as after min.insync.replicas was lowered: the next
        change of the state takes the eligible replicas out."""
        return len(self.state.isr) < self.min_insync or bool(self.state.eligible)

    def adopt(self, state: PartitionState) -> bool:
        """Take in what is written of the in-sync set, unless something newer is known. Returns whether it changed."""
        if state.leader_epoch != self.epoch or state.leader != self.broker_id or state.version <= self.state.version:
            return False
        self.state = state
        self._take_replicas()
        return True

    def fetched(
        self,
        broker_id: int,
        directory: str,
        pulse: Pulse,
        end_offset: int,
        is_whole: bool,
        staged_end: int,
        leader_end: int,
    ) -> bool:
        """A follower's log agrees with the leader's up to its end. Returns whether the follower may join.

        Args:
            pulse: of the follower's connection.
            end_offset: of the follower's log: what it has, durably if the topic asks for that.
            is_whole: nothing of its log is known to be damaged, and it has the state of the producers before it.
            staged_end: up to where it has what is staged; -1: it lacks something from before this epoch.
            leader_end: the end of the leader's log.
        """
        if broker_id not in self.replicas or broker_id == self.broker_id:
            return False
        replica = broker_id, directory
        before = self._followers.get(replica)
        goal_end, goal_at, reached_at = leader_end, pulse.at, -math.inf
        if end_offset >= leader_end:
            reached_at = pulse.at
        elif before is not None and before.pulse is pulse:
            if end_offset >= before.goal_end:
                reached_at = before.goal_at
            else:  # another goal at each fetch could be out of reach for ever, while others append
                goal_end, goal_at, reached_at = before.goal_end, before.goal_at, before.reached_at
        caught_up_at = max(self._caught_up_at(replica), reached_at)
        follower = self._followers[replica] = Follower(
            pulse, end_offset, is_whole, staged_end, pulse.at, goal_end, goal_at, reached_at, caught_up_at
        )
        return broker_id not in self.joining and self._may_join(broker_id, follower)

    def is_superseded(self, broker_id: int, directory: str, connection: int) -> bool:
        """Whether a follower fetches on a later connection than this one."""
        follower = self._followers.get((broker_id, directory))
        return follower is not None and follower.pulse.is_after(connection)

    def left(self, broker_id: int, directory: str, connection: int) -> None:
        """A follower follows this leader no longer, whatever its broker asks of other partitions."""
        follower = self._followers.get((broker_id, directory))
        if follower is not None and not follower.pulse.is_after(connection):
            follower.pulse = Pulse(follower.pulse.at, follower.pulse.registration, connection)
            follower.pulse.is_open = False

    def _may_join(self, broker_id: int, follower: Follower) -> bool:
        """Rule 2. A damaged record is one that a replica does not have; nor would it recognise duplicates of records
        without their producers' state. Below min.insync.replicas the high watermark stands still: there a replica has
        to be near the leader's end too, or it would lead without what was appended since once the leader stops."""
        if broker_id in self.state.isr or not self._has_acknowledged(follower):
            return False
        return not self.is_below_min or follower.reached_at >= follower.pulse.at - _NEAR_SECONDS

    def _has_acknowledged(self, follower: Follower) -> bool:
        """Whether a follower has all that was acknowledged by the in-sync set."""
        if not follower.is_whole:
            return False
        return follower.end_offset >= max(self.watermark, self.start_offset) and follower.staged_end >= max(
            self.staged_watermark, self.staged_start
        )

    def changes(
        self, now: float, lag_seconds: float, leader_end: int, live: Mapping[int, BrokerRecord]
    ) -> tuple[list[Joining], list[int]]:
        """The followers that may join the in-sync set now, also those that were asked for already, and the members that
        have not caught up for too long. To be asked for several times in that time: a follower that has everything says
        nothing, so it is looked at here whether it lives.

        Args:
            live: the registration of each live broker. A dead follower stays as far as it had come. One whose directory
                is not the registered one does not join.
        """
        since = now - lag_seconds
        joining = []
        for (broker_id, directory), follower in self._followers.items():
            pulse = follower.pulse
            if follower.end_offset >= leader_end:
                follower.reached_at = pulse.at
                follower.caught_up_at = max(follower.caught_up_at, pulse.at)
            if (
                broker_id not in self.state.isr  # first: nearly always they all are, and a broker leads thousands
                and broker_id in self.replicas
                and (registered := live.get(broker_id)) is not None
                and (registered.epoch, registered.directory) == (pulse.registration, directory)
                and pulse.at >= since
                and self._may_join(broker_id, follower)
            ):
                joining.append(Joining(broker_id, pulse.registration, directory))
        joining.sort(key=lambda each: (each.broker_id, each.directory))
        return joining, [member[0] for member in self._members() if self._caught_up_at(member) < since]

    def holds_no_ack(self, broker_id: int) -> bool:
        """Whether nothing waits for a follower, however slowly it copies: by what it has said last, it is not in the
        in-sync set, and would not be if it were near the leader's end. It gets there only if it is not held."""
        if broker_id in self.state.isr or broker_id in self.joining:
            return False
        follower = self._last_of(broker_id)
        return follower is None or not self._has_acknowledged(follower)

    def end_of(self, broker_id: int) -> int:
        """Up to where a follower has the log, as it said in this epoch; 0 if it has said nothing."""
        follower = self._last_of(broker_id)
        return 0 if follower is None else follower.end_offset

    def _last_of(self, broker_id: int) -> Follower | None:
        """Of the followers that have fetched under a broker's id, the one that did so last."""
        found = [follower for (number, _), follower in self._followers.items() if number == broker_id]
        return max(found, key=lambda follower: follower.said_at, default=None)

    def _members(self) -> list[tuple[int, str]]:
        """The other members of the in-sync set, with the directories that the state has."""
        directories = self.state.directories
        return [(broker, directories.get(broker, "")) for broker in self.state.isr if broker != self.broker_id]

    def _caught_up_at(self, replica: tuple[int, str]) -> float:
        follower = self._followers.get(replica)
        return self._began_at if follower is None else follower.caught_up_at

    def is_followed(self, since: float) -> bool:
        """Whether no other replica can have been elected before a time, by what the in-sync set says: each of its other
        members followed this leader after that, or there is none. Eligible replicas may be elected without the set."""
        if self.state.eligible:
            return False
        members = [self._followers.get(member) for member in self._members()]
        return all(member is not None and member.pulse.proven_at >= since for member in members)

    def asked_to_join(self, joining: Joining) -> None:
        """From now on the high watermark counts a replica, until the outcome is known (rule 3). However far behind the
        leader's end it joins, it gets the whole time of a member to reach it."""
        self.joining[joining.broker_id] = joining
        follower = self._followers.get((joining.broker_id, joining.directory))
        if follower is not None:
            follower.caught_up_at = max(follower.caught_up_at, follower.pulse.at)

    def nothing_asked(self) -> None:
        """What was asked for is in the state that was adopted last, or will never be written."""
        self.joining.clear()

    def advance(self, end_offset: int, staged_end: int) -> bool:
        """Move the watermarks as far as they may. Returns whether one moved.

        Args:
            end_offset: the end of what the leader has, durably if the topic asks for that.
            staged_end: how much is staged.
        """
        if self.is_below_min:
            return False
        for replica in {*self._members(), *((each.broker_id, each.directory) for each in self.joining.values())}:
            follower = self._followers.get(replica)
            if follower is None:  # it has not fetched in this epoch (rule 5)
                return False
            end_offset = min(end_offset, follower.end_offset)
            staged_end = min(staged_end, follower.staged_end)
        has_moved = end_offset > self.watermark or staged_end > self.staged_watermark
        self.watermark = max(self.watermark, end_offset)
        self.staged_watermark = max(self.staged_watermark, staged_end)
        return has_moved
