"""Keeps the in-sync sets of the partitions that this broker leads: takes in followers that have caught up, and takes
out those that have not for `replica.lag.time.max.ms`. One thread; it writes many changes with one request.

A replica that is to join counts for the high watermark from before the write until its outcome is known: it may be
elected before the leader learns that it was written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from broker.replica.host import Host
from broker.replica.partition import Partition
from broker.replica.role import Wanted
from broker.states import election
from kafkalog.clock import Clock
from kafkalog.errors import UnreadableZnode, ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import registry
from kafkalog.zk.registry import BrokerRecord, StateChange

log = get_logger(__name__)

_LOOKS_IN_LAG_TIME = 10
_LOOK_SECONDS_MAX = 1.0
_GATHER_SECONDS = 0.02
"""From the first follower that may join to the write: the others of a link come with the next requests."""


class _Wish(NamedTuple):
    partition: Partition
    wanted: Wanted
    change: StateChange


class InSyncSets:
    """`start` once the host has opened its partitions, `stop` before it closes them."""

    def __init__(self, host: Host, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._lag_seconds = host.settings.replica_lag_time_max_ms / 1000
        self._look_seconds = min(self._lag_seconds / _LOOKS_IN_LAG_TIME, _LOOK_SECONDS_MAX)
        self._changed = threading.Condition()
        self._is_joinable = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="in-sync-sets", daemon=True)

    def start(self) -> None:
        self._host.on_joinable = self.joinable
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def joinable(self) -> None:
        """Some follower may join an in-sync set. Called by any thread."""
        if not self._is_joinable:
            with self._changed:
                self._is_joinable = True
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_joinable or self._stopping, self._look_seconds):
                    self._changed.wait_for(lambda: self._stopping, _GATHER_SECONDS)
                if self._stopping:
                    return
                self._is_joinable = False
            try:
                self.look()
            except ZooKeeperUnreachable as error:
                log.info("in_sync_sets_not_written", reason=str(error))
                self._pause()
            except Exception:  # the next look tries again
                log.exception("in_sync_sets_not_written")
                self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, self._look_seconds)

    def look(self) -> None:
        """One round over all partitions that are led here. Raises ZooKeeperUnreachable."""
        now = self._clock.monotonic()
        live = {number: each for number, each in self._host.metadata.brokers.items() if not each.stopping}
        wishes = [
            wish
            for partition in list(self._host.hosted.values())
            if (wish := self._wish_of(partition, now, live)) is not None
        ]
        begun = [wish for wish in wishes if wish.partition.role.begin_change(wish.wanted)]
        if not begun:
            return
        found = registry.change_states(self._host.metadata.session, [wish.change for wish in begun])
        for partition, wanted, _ in begun:
            state = found.get((partition.topic_id, partition.number))
            if not isinstance(state, UnreadableZnode):  # else who was to join may have: it goes on counting
                partition.role.take_outcome(wanted, state)

    def _wish_of(self, partition: Partition, now: float, live: Mapping[int, BrokerRecord]) -> _Wish | None:
        wanted = partition.role.wanted_changes(now, self._lag_seconds, live)
        topic = self._host.metadata.ids.get(partition.topic_id)
        if wanted is None or topic is None:
            return None
        min_insync = partition.settings.min_insync_replicas
        after = wanted.state
        if wanted.leaving:
            after = election.leave(after, wanted.leaving, min_insync)
        for each in wanted.joining:
            after = election.join(after, each.broker_id, each.directory, min_insync)
        checks = tuple(registry.registration_check(each.broker_id, each.registration) for each in wanted.joining)
        return _Wish(partition, wanted, StateChange(topic, partition.number, wanted.state, after, checks))
