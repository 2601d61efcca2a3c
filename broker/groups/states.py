"""The states of groups, as this broker reads and changes them. Decides nothing.

A state is read once for each change that ZooKeeper reports, however many members ask for it. So it may be old, by as
much as this broker is late. A broker that knows that it is cut off from ZooKeeper has none. What is decided from a
state is written as a compare-and-set on its version, or with a check of it. A decision that writes nothing, such as a
refusal, is answered only after a check that the group still has that state: another broker may have answered otherwise
before. Where that fails, it is decided again from a fresh state.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from kafkalog.errors import GroupBusy, KafkalogError, UnreadableZnode, ZooKeeperUnreachable
from kafkalog.zk import groups, members, paths
from kafkalog.zk.content import read_each
from kafkalog.zk.members import GroupState, Member
from kafkalog.zk.session import BadVersion, Check, NodeExists, NoNode, Operation, ZooKeeperSession

_Result = TypeVar("_Result")

_OVERTAKEN = (BadVersion, NodeExists, NoNode, groups.GuardMoved)
_ATTEMPTS = 100
_PAUSE_SECONDS = 0.01
CHANGING_MAX = 12
"""Threads of one group: fewer than the lane of such requests has, so that one group does not occupy them all."""


class _Group:
    """What is known of a group.

    Attributes:
        lock: held while the state is changed, so that the threads of this broker do not compete. It comes first.
        changing: how many threads have the lock or wait for it.
        is_proven: what the holder of the lock decides is written with a check of the state.
        reading: held while the state is read, so that it is read once. Changes do not hold up who only reads.
        state: None: it has to be read.
        changes: how many changes were reported; what was read before one is not kept.
        described: the members of the state that was asked for last, by name and epoch.
        is_there: the group existed when it was read or written last.
        waiters: who wait for another state.
        written: the version that was written here last; no older one is kept.
    """

    __slots__ = (
        "changes",
        "changing",
        "described",
        "is_proven",
        "is_there",
        "lock",
        "reading",
        "state",
        "waiters",
        "written",
    )

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changing = 0
        self.is_proven = False
        self.reading = threading.Lock()
        self.state: GroupState | None = None
        self.changes = 0
        self.described: Mapping[tuple[str, int], Member] = {}
        self.is_there = False
        self.waiters: set[threading.Event] = set()
        self.written = -1

    @property
    def is_used(self) -> bool:
        """Whether threads depend on it."""
        return bool(self.waiters or self.changing)


class States:
    """The states of all existing groups that are asked for. Thread-safe."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self.session = session
        self._lock = threading.Lock()  # guards what follows, and of each group what its own locks do not; comes last
        self._groups: dict[str, _Group] = {}
        session.on_state(self._connection_changed)

    def read(self, group: str) -> GroupState:
        """A group's state, perhaps a moment old; of version -1 if it does not exist. Raises UnreadableZnode."""
        known = self._group(group)
        state = known.state
        if state is not None:
            return state
        try:
            with known.reading:
                state = known.state
                if state is not None:
                    return state
                changes = known.changes
                state = members.read_state(self.session, group, self._changed)
                self._keep(known, changes, state)
                return state or GroupState()
        finally:
            self._drop_unless_needed(group, known)

    def read_each(self, wanted: Iterable[str]) -> dict[str, GroupState | UnreadableZnode]:
        """The states of many groups, as `read`. Those that have to be read are requested at once. One that cannot be
        read hides no other."""
        listed = {group: self._group(group) for group in wanted}
        found: dict[str, GroupState | UnreadableZnode] = {
            group: state for group, known in listed.items() if (state := known.state) is not None
        }
        changes = {group: known.changes for group, known in listed.items() if group not in found}
        read = read_each(lambda some: members.read_states(self.session, some, self._changed), list(changes))
        for group, each in read.items():
            found[group] = each or GroupState()
            if not isinstance(each, UnreadableZnode):
                self._keep(listed[group], changes[group], each)
        for group, known in listed.items():
            self._drop_unless_needed(group, known)
        return found

    def _keep(self, known: _Group, changes: int, state: GroupState | None) -> None:
        """Keep a state that was read after so many changes, unless it is old by now; None: the group does not exist."""
        with self._lock:
            known.is_there = state is not None
            if state is not None and known.changes == changes and state.version >= known.written:
                known.state = state

    def described(self, group: str, state: GroupState) -> dict[str, Member]:
        """The members of a state, but for those that have gone since. A description changes only with the epoch, so it
        is read once for each. Raises UnreadableZnode."""
        with self._lock:
            known = self._groups.get(group) or _Group()
        epochs = {name: (name, seat.epoch) for name, seat in state.seats.items()}
        found = {name: known.described.get(key) for name, key in epochs.items()}
        missing = [name for name, member in found.items() if member is None]
        read = members.read_members(self.session, group, missing) if missing else {}
        described = {name: member for name, each in found.items() if (member := each or read.get(name)) is not None}
        known.described = {epochs[name]: member for name, member in described.items()}
        return described

    def sure(self, group: str, look: Callable[[GroupState], _Result], number: int) -> _Result:
        """The result of `look`, called with a group's state, perhaps a moment old. If it raises an error, the state was
        the group's present one, or had at least this number.

        Args:
            number: the epoch of a member that is looked for. Numbers rise, and no epoch comes back: a state with this
                number, and without the member, is one after it has gone.

        Raises:
            GroupBusy: others changed the group all the time.
        """
        for _ in range(_ATTEMPTS):
            state = self.read(group)
            try:
                return look(state)
            except ZooKeeperUnreachable:
                raise
            except KafkalogError:
                if state.number >= number or self._is_current(group, state):
                    raise
        raise GroupBusy(group=group)

    def change(self, group: str, decide: Callable[[GroupState], _Result], *, is_own: bool = False) -> _Result:
        """The result of `decide`, called with a group's state, and again with a fresh one if that was not the present
        one, or while `decide` raises BadVersion, NoNode, NodeExists or GuardMoved, because others were faster.

        Args:
            is_own: the broker does it for itself, however many threads of clients change this group.

        Raises:
            GroupBusy: they were all the time, or too many threads change this group.
        """
        known = self._group(group, is_changing=True, is_own=is_own)
        try:
            return self._change(group, known, decide)
        finally:
            with self._lock:
                known.changing -= 1
            self._drop_unless_needed(group, known)

    def _change(self, group: str, known: _Group, decide: Callable[[GroupState], _Result]) -> _Result:
        for attempt in range(_ATTEMPTS):
            with known.lock:
                state = self.read(group)
                known.is_proven = False
                try:
                    result = decide(state)
                except _OVERTAKEN:
                    self._forget(known)
                except ZooKeeperUnreachable:
                    raise
                except KafkalogError:
                    if known.is_proven or self._is_current(group, state):
                        raise
                else:
                    if known.is_proven or self._is_current(group, state):
                        return result
            if attempt:
                # Another broker was faster, twice. No event can end this pause: a watch reports the change that has won
                # to all that lost at the same moment, and they would compete again. Pauses of different lengths, of
                # 0.1 s at most and outside of the lock, let one of them through.
                time.sleep(random.random() * _PAUSE_SECONDS * min(attempt, 10))
        raise GroupBusy(group=group)

    def _is_current(self, group: str, state: GroupState) -> bool:
        """Whether a group has a state now. If not, it is read again."""
        try:
            members.prove(self.session, group, state)
        except _OVERTAKEN:
            self._forget_group(group)
            return False
        return True

    def write(
        self, group: str, before: GroupState, after: GroupState, operations: Iterable[Operation] = ()
    ) -> GroupState:
        """Replace a state, as `members.change`; for `decide`."""
        written = members.change(self.session, group, before, after, operations)
        known = self._group(group)
        known.is_proven = True
        # ZooKeeper reports it too, before or after the answer: if before, it has perhaps been read again already.
        with self._lock:
            known.is_there, known.written = True, written.version
            if known.state is None or known.state.version < written.version:
                self._wake(known)
        return written

    def guards(self, group: str, state: GroupState) -> list[Check]:
        """Operations without which `decide` writes nothing else; see `members.guards`."""
        self._group(group).is_proven = True
        return members.guards(group, state)

    def _group(
        self, group: str, *, waiter: threading.Event | None = None, is_changing: bool = False, is_own: bool = False
    ) -> _Group:
        """What is known of a group, with a waiter more if one is given, or a thread more that changes it. Raises
        GroupBusy: too many do."""
        with self._lock:
            known = self._groups.get(group)
            if known is None:
                known = self._groups[group] = _Group()
            if waiter is not None:
                known.waiters.add(waiter)
            if is_changing:
                if known.changing >= CHANGING_MAX and not is_own:
                    raise GroupBusy(group=group)
                known.changing += 1
            return known

    def _drop_unless_needed(self, group: str, known: _Group) -> None:
        """Forget a group that does not exist: a request may name any."""
        with self._lock:
            if not (known.is_there or known.is_used) and self._groups.get(group) is known:
                del self._groups[group]

    def keep_only(self, groups: Container[str]) -> None:
        """Forget all but these, which exist."""
        with self._lock:
            gone = [group for group, known in self._groups.items() if group not in groups and not known.is_used]
            for group in gone:
                del self._groups[group]

    # --- news

    def _forget_group(self, group: str) -> None:
        with self._lock:
            known = self._groups.get(group)
        if known is not None:
            self._forget(known)

    def _forget(self, known: _Group) -> None:
        with self._lock:
            known.changes += 1
            known.written = -1
            self._wake(known)

    @staticmethod
    def _wake(known: _Group) -> None:
        """Lock held: the state has to be read."""
        known.state = None
        for waiter in known.waiters:
            waiter.set()

    def _changed(self, path: str) -> None:
        """A watch."""
        self._forget_group(path[len(paths.CONSUMERS) + 1 :])

    def _connection_changed(self, connected: bool, session_is_new: bool) -> None:
        """Watches are lost with the connection, so everything is read again. As long as this broker has none, whoever
        asks or waits for a state gets an error, and turns to another broker."""
        self.wake_all()

    def wake_all(self) -> None:
        """Make everybody who waits look again."""
        with self._lock:
            listed = list(self._groups.values())
        for known in listed:
            self._forget(known)

    @contextmanager
    def waiting(self, group: str, waiter: threading.Event) -> Iterator[None]:
        """During the `with` block, an event is set when the group may have another state than was read."""
        known = self._group(group, waiter=waiter)
        try:
            yield
        finally:
            with self._lock:
                known.waiters.discard(waiter)
            self._drop_unless_needed(group, known)
