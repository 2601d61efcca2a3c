"""The thread that looks after groups: removes members whose leases have ended, and notices new partitions.

Each group has one monitor among the live brokers, chosen by the group's name, so nobody is elected. Brokers whose views
of the live brokers differ may both look after a group, or neither for a moment: a removal names the epoch and the
lease that were seen.

A lease has ended when its version was the same in all looks for its session timeout, by this broker's monotonic clock.
ZooKeeper's stamps are not used: they come from the clock of its leader, and a jump of that clock would remove
everybody. A time in which this broker could not look does not count, because members could not renew their leases then
either, or their renewals were not seen: after a look that failed (ZooKeeper was away) the count begins anew, and of a
time in which the broker stood still only `LOOK_SECONDS` count.

A look removes members and refreshes groups for a limited time, and leaves the rest to the next look, so that looks do
not get far apart. A group of which something cannot be read, or that changes all the time, holds up no other. A look
reads what changed since the last one, and the leases of members: groups that nobody uses any more may be many.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from broker.groups.membership import Groups, Lapsed
from broker.replica.metadata import Metadata
from kafkalog.clock import Clock
from kafkalog.errors import GroupTooLarge, KafkalogError, UnreadableZnode, ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import members
from kafkalog.zk.content import read_each
from kafkalog.zk.groups import group_names
from kafkalog.zk.members import CONSUMER, GroupState

log = get_logger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

LOOK_SECONDS = 0.5
_LATE_SECONDS = 2.0
_GAP_SECONDS = 5.0
"""Of looks further apart than this, or than half of a shorter session timeout, `LOOK_SECONDS` count."""
_WORK_SECONDS = 0.5
"""Of a look, for removals and for refreshes: while a topic came to the patterns of 400 groups each 2.5 s, and a look
refreshed all of them, no lease ended."""


def broker_of(group: str, brokers: Iterable[int]) -> int:
    """The broker that looks after a group. Rendezvous hashing: of all live brokers the one whose id gives the highest
    hash with the group's name. By a checksum in place of the hash, one of three looked after half of the groups."""
    return max(brokers, key=lambda each: blake2b(f"{each} {group}".encode(), digest_size=8).digest())


class _Seen(NamedTuple):
    """The lease of a membership, and for how long it was seen with this version."""

    epoch: int
    version: int
    seconds: float


class _Turns:
    """Some work for each of many groups, of which a look does as much as it has time for, at least for one group."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = ""  # of the next look
        self.is_behind = False

    def of(self, groups: Iterable[str]) -> Iterator[str]:
        """Those of some groups whose turn it is in this look. The next look goes on after them."""
        until = self._clock.monotonic() + _WORK_SECONDS
        listed = sorted(groups)
        start = bisect_left(listed, self._first)
        self.is_behind = False
        for group in listed[start:] + listed[:start]:
            if self._clock.monotonic() > until:
                self._first, self.is_behind = group, True
                return
            yield group


class Monitor:
    """Looks after the groups of a broker, from `start` to `stop`."""

    def __init__(self, broker_id: int, metadata: Metadata, groups: Groups, clock: Clock) -> None:
        self._broker_id = broker_id
        self._metadata = metadata
        self._session = metadata.session
        self._groups = groups
        self._clock = clock
        self._stopping = threading.Event()
        self._looked_at = 0.0
        self._seen: dict[tuple[str, str], _Seen] = {}
        # By group: what was compared last, the group's state and metadata.partition_counts.
        self._noticed: dict[str, tuple[GroupState, Mapping[str, tuple[bytes, int]]]] = {}
        self._lapses, self._refreshes = _Turns(clock), _Turns(clock)
        self._failures: set[str] = set()  # of the last look, which are not logged again
        self._thread = threading.Thread(target=self._run, name="group-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe to call twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        is_failing = is_behind = False
        while not self._stopping.wait(0 if is_behind else LOOK_SECONDS):
            is_behind = False
            try:
                is_behind = self.look()
                is_failing = False
            except ZooKeeperUnreachable:
                pass  # logged by the session; this look does not count
            except Exception as error:
                if not is_failing:
                    is_failing = True
                    log.warning(
                        "groups_not_looked_after", reason=str(error), exc_info=not isinstance(error, KafkalogError)
                    )

    def look(self) -> bool:
        """Look at all groups of this broker once. Returns whether it left work to the next look. Raises
        ZooKeeperUnreachable."""
        began = self._clock.monotonic()
        seen_before, self._seen = self._seen, {}  # if this look fails, nothing was seen
        failures_before, self._failures = self._failures, set()
        names = group_names(self._session)
        self._groups.states.keep_only(set(names))
        brokers = self._metadata.brokers.keys() or {self._broker_id}
        mine = [group for group in names if broker_of(group, brokers) == self._broker_id]
        found = self._readable(self._groups.states.read_each(mine))
        states = {group: state for group, state in found.items() if state.seats}
        self._end_leases(states, seen_before)
        self._notice_partitions({group: state for group, state in states.items() if state.kind == CONSUMER})
        for failure in sorted(self._failures - failures_before):
            log.warning("group_not_looked_after", reason=failure)
        seconds = self._clock.monotonic() - began
        if seconds > _LATE_SECONDS:
            log.warning("groups_looked_after_late", seconds=round(seconds, 1), groups=len(mine))
        return self._lapses.is_behind or self._refreshes.is_behind

    def _readable(self, found: Mapping[_Key, _Value | UnreadableZnode]) -> dict[_Key, _Value]:
        readable = {}
        for key, value in found.items():
            if isinstance(value, UnreadableZnode):
                self._failures.add(str(value))
            else:
                readable[key] = value
        return readable

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """During the `with` block, a failure is that of one group, and ends the block only."""
        try:
            yield
        except ZooKeeperUnreachable:
            raise
        except KafkalogError as error:
            self._failures.add(str(error))

    def _end_leases(self, states: Mapping[str, GroupState], seen_before: Mapping[tuple[str, str], _Seen]) -> None:
        names = [(group, name) for group, state in states.items() for name in state.seats]
        leases = self._readable(read_each(lambda some: members.read_leases(self._session, some), names))
        now = self._clock.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        late: dict[str, dict[str, Lapsed]] = {}  # by group
        for (group, name), lease in leases.items():
            if lease is None:
                continue  # it has just left
            epoch = states[group].seats[name].epoch
            seen = seen_before.get((group, name))
            gap = max(_LATE_SECONDS, min(_GAP_SECONDS, lease.session_timeout_ms / 2000))
            if seen is None or (seen.epoch, seen.version) != (epoch, lease.version):
                seen = _Seen(epoch, lease.version, 0.0)
            else:
                seen = seen._replace(seconds=seen.seconds + (elapsed if elapsed <= gap else LOOK_SECONDS))
            self._seen[group, name] = seen
            if seen.seconds >= lease.session_timeout_ms / 1000:
                late.setdefault(group, {})[name] = Lapsed(epoch, lease.version)
        for group in self._lapses.of(late):
            with self._alone():
                self._groups.lapse(group, late[group])

    def _notice_partitions(self, states: Mapping[str, GroupState]) -> None:
        counts = self._metadata.partition_counts
        self._noticed = {
            group: before
            for group, before in self._noticed.items()
            if before[0] is states.get(group) and before[1] is counts
        }
        for group in self._refreshes.of(states.keys() - self._noticed.keys()):
            state = states[group]
            with self._alone():
                described = self._groups.states.described(group, state)
                if len(described) < len(state.seats):
                    continue
                try:
                    if not self._groups.is_current(state, described):
                        self._groups.refresh(group)
                        continue
                except GroupTooLarge as error:
                    self._failures.add(str(error))  # again when something has changed
                self._noticed[group] = state, counts
