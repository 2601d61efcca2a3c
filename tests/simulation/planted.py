"""Mistakes that a simulation must find: while one is planted, the code breaks a rule of docs/REPLICATION.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from broker.replica.host import Host
from broker.replica.leadership import Follower, Leadership
from broker.replica.role import Role
from broker.storage import log as log_module
from broker.storage.log import Log
from kafkalog.zk import registry
from kafkalog.zk.session import Operation, Set

Plant = tuple[object, str, Callable[..., Any]]


def _follow_and_truncate(self: Role, leader_id: int, leader_epoch: int) -> None:
    with self.lock:
        if leader_id >= 0 and leader_epoch > self.epoch and self._log.has_high_watermark:
            self._applier.truncated(self._log.truncate_to(max(self._log.high_watermark, self._log.start_offset)))
    _follow(self, leader_id, leader_epoch)


_follow = Role.follow


def _may_join_at_watermark(self: Leadership, broker_id: int, follower: Follower) -> bool:
    return broker_id not in self.state.isr and follower.end_offset >= self.watermark


def _never_lost(self: Host, topic: object, number: int, state: object) -> None:
    return None


def _any_version(changes: Sequence[registry.StateChange], fence: object) -> list[Operation]:
    operations = _operations(changes, None)
    return [each._replace(version=-1) if isinstance(each, Set) else each for each in operations]


_operations = registry._operations


def _advance_with_unknown(self: Leadership, end_offset: int, staged_end: int) -> bool:
    if self.is_below_min:
        return False
    for replica in {*self._members(), *((each.broker_id, each.directory) for each in self.joining.values())}:
        follower = self._followers.get(replica)
        if follower is not None:
            end_offset = min(end_offset, follower.end_offset)
            staged_end = min(staged_end, follower.staged_end)
    has_moved = end_offset > self.watermark
    self.watermark = max(self.watermark, end_offset)
    self.staged_watermark = max(self.staged_watermark, staged_end)
    return has_moved


def _without_producers(disk: object, folder: object, segments: Sequence[Any], producers: Any, label: str) -> int:
    producers.clear()
    return int(segments[-1].end_offset)


def _truncate_and_forget(self: Log, view: Any, offset: int) -> None:
    with mock.patch.object(log_module, "open_producers", _without_producers):
        _truncate(self, view, offset)


_truncate = Log._truncate


def _replicated_by_any_epoch(self: Role, epoch: int, end_offset: int, staged_end: int) -> bool:
    leadership = self.leadership
    return _is_replicated(self, epoch if leadership is None else leadership.epoch, end_offset, staged_end)


_is_replicated = Role.is_replicated


PLANTED: dict[str, Plant] = {
    "truncates to the high watermark": (Role, "follow", _follow_and_truncate),
    "joins without the records from before the epoch": (Leadership, "_may_join", _may_join_at_watermark),
    "a wiped replica keeps its place": (Host, "_loss", _never_lost),
    "a late write of a state is executed": (registry, "_operations", _any_version),
    "the watermark counts who has not fetched in this epoch": (Leadership, "advance", _advance_with_unknown),
    "a truncation forgets the producers": (Log, "_truncate", _truncate_and_forget),
    "an ack is completed by a later epoch": (Role, "is_replicated", _replicated_by_any_epoch),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within the `with` block the code has that mistake."""
    owner, attribute, mistake = PLANTED[name]
    with mock.patch.object(owner, attribute, mistake):
        yield
