"""Restarts the processes of a local cluster and logs why they ended; used by `kafkalog local`.

A broker or ZooKeeper that ended on its own is restarted: at once if it had run for a minute, else after a pause that
doubles each time. The others continue meanwhile. `look` is one round; the caller decides how often.

A broker whose data directory failed is not restarted, for whatever reason it ended: the page cache may still show data
that the disk has lost, and a start would trust it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from broker.local.cluster import LocalBroker, LocalCluster, LocalZooKeeper
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import BrokerUnreachable, KafkalogError, StorageFailed

PAUSE_SECONDS = 1.0
PAUSE_SECONDS_MAX = 60.0
STEADY_SECONDS = 60.0
"""What ran for that long is started again without a pause."""
_DISK_FAILED = "log_directory_failed"
"""What a broker logs when its data directory failed (`broker/storage/log_dir.py`)."""
_LOOK_FIRST = ": look at its disk, mount it again, then start the cluster anew"


@dataclass
class _Process:
    """A process that is kept running. `due`: when it is restarted; None while it runs, or if it is not restarted any
    more. `disk_failed`: its data directory failed."""

    name: str
    member: LocalBroker | LocalZooKeeper
    started: float
    pause: float = 0.0
    due: float | None = None
    is_gone: bool = False
    disk_failed: bool = False


class Supervisor:
    """Looks after a started cluster.

    Args:
        say: called with each sentence.
        restart: restart processes that ended; False: only report them.
    """

    def __init__(
        self, cluster: LocalCluster, say: Callable[[str], None], *, restart: bool = True, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        assert cluster.zookeeper is not None
        self._cluster = cluster
        self._say = say
        self._restart = restart
        self._clock = clock
        now = clock.monotonic()
        self._processes = [
            _Process("ZooKeeper", cluster.zookeeper, now),
            *(_Process(f"broker {broker.broker_id}", broker, now) for broker in cluster.brokers),
        ]

    def look(self) -> None:
        """Report the events since the last look, and restart the processes that are due.

        Raises:
            LocalClusterEnded: the guard has ended, and the cluster with it.
            BrokerUnreachable: no broker is left, and none will be restarted.
        """
        health = self._cluster.look()
        for broker_id, logged in health.events:
            self._say(f"broker {broker_id}: {logged['level']}: {logged['event']}")
            if logged["event"].partition(" ")[0] == _DISK_FAILED:
                self._by_name(f"broker {broker_id}").disk_failed = True
        for process in self._processes:
            code = health.ended.get(process.name)
            if process.due is not None:
                self._start_if_due(process)
            elif code is not None and not process.is_gone:
                self._ended(process, code)
        brokers = [process for process in self._processes if isinstance(process.member, LocalBroker)]
        if all(process.is_gone for process in brokers):
            raise BrokerUnreachable(address=self._cluster.bootstrap_servers, reason="every broker has ended")

    def _by_name(self, name: str) -> _Process:
        return next(process for process in self._processes if process.name == name)

    def _ended(self, process: _Process, code: int) -> None:
        process.member.pid = None
        log_file = process.member.log_file
        sentence = f"{process.name} {how_it_ended(code)}; its log is {log_file}"
        if not self._restart or process.disk_failed:
            process.is_gone = True
            self._say(f"{sentence}; it is not started again{_LOOK_FIRST if process.disk_failed else ''}")
            return
        now = self._clock.monotonic()
        self._set_pause(process, steady=now - process.started >= STEADY_SECONDS)
        process.due = now + process.pause
        when = f"in {process.pause:g} s" if process.pause else "now"
        self._say(f"{sentence}; it is started again {when}")
        self._start_if_due(process)

    def _start_if_due(self, process: _Process) -> None:
        assert process.due is not None
        if self._clock.monotonic() < process.due:
            return
        try:
            process.member.start()
        except StorageFailed as error:
            process.is_gone, process.due = True, None
            self._say(f"{process.name} does not start: {error}; it is not tried again{_LOOK_FIRST}")
            return
        except KafkalogError as error:
            self._set_pause(process, steady=False)
            process.due = self._clock.monotonic() + process.pause
            self._say(f"{process.name} does not start: {error}; it is tried again in {process.pause:g} s")
            return
        process.started, process.due = self._clock.monotonic(), None
        self._say(f"{process.name} serves again")

    def _set_pause(self, process: _Process, steady: bool) -> None:
        if steady:
            process.pause = 0.0
        else:
            process.pause = min(max(process.pause * 2, PAUSE_SECONDS), PAUSE_SECONDS_MAX)


def how_it_ended(code: int) -> str:
    """`was ended by signal 9 (SIGKILL)`, or `ended with code 1`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was ended by signal {-code}{name}"
