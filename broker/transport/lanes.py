"""Lanes: the threads that answer gRPC calls, so that calls which wait for one thing hold up none that wait for another.

A method's lane depends on what the method may wait for:

    quick       nothing: the answer is in memory
    listings    an end that moves, if it was asked to wait; else a look at an index
    pulls       data, memory for the answer, a read of the log
    appends     a write, and its flush
    staged      writes of a transaction, and deletions: an Apply writes gigabytes
    checks      reads of a log, or a repair of it: up to 10 s
    brief       the lock of a log's staged data, for as long as one write to it takes
    zookeeper   ZooKeeper
    leases      ZooKeeper; a member that is renewed late loses what it owns
    groups      a change of a group: most of the time
    topics      ZooKeeper, and brokers that open logs: up to 10 s

A lane has its own threads, started as they are needed, and a bounded queue. A call for which there is no room, or for
which no thread can be started, gets a retriable error at once from another thread (`is_refusing`). A call that waited
until its client gave up is not begun: gRPC ensures this.

gRPC in Python occupies a thread for a call before its message has arrived. While others queue in the lane, calls whose
message has not arrived within 3 s are ended (`Lane.next_message`), the oldest first, one for each queued call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from kafkalog.errors import OutOfThreads
from kafkalog.threads import Pool

QUEUED_MAX = 256
"""Calls that wait for a thread of their lane."""
_MESSAGE_SECONDS = 3.0
_LOOK_SECONDS_MIN = 0.05


class LaneOf(NamedTuple):
    """The methods of a lane. Threads are cheap, because they mostly wait."""

    methods: tuple[str, ...]
    threads: int


LANES: Mapping[str, LaneOf] = {
    "quick": LaneOf(("DescribeCluster", "DescribeBroker", "DescribeTopics", "InitProducer"), 8),
    "listings": LaneOf(("ListOffsets",), 24),
    "pulls": LaneOf(("Pull",), 16),
    "appends": LaneOf(("Append",), 8),
    "staged": LaneOf(("Prepare", "Apply", "ForgetStaged", "AbortStaged", "DeleteRecords"), 16),
    "checks": LaneOf(("DigestRange", "RepairPartition"), 4),
    "brief": LaneOf(("Renew", "ListStaged"), 4),
    "zookeeper": LaneOf(
        (
            "DescribeController",
            "CommitOffsets",
            "CommittedOffsets",
            "ListGroups",
            "DescribeGroup",
            "ResetOffsets",
            "DeleteGroup",
            "ForgetOffsets",
            "KeepMember",
            "JoinGroup",
            "ClaimPartitions",
            "ReleasePartitions",
            "LeaveGroup",
            "ReadDecisions",
            "Decide",
            "ListDecisions",
            "UpgradeCluster",
        ),
        16,
    ),
    "leases": LaneOf(("RenewMember",), 8),
    "groups": LaneOf(("AwaitGroup",), 128),
    "topics": LaneOf(("CreateTopic", "AlterTopic", "DeleteTopic", "RecoverPartitions", "ReassignPartitions"), 4),
}

_LANE_OF = {method: name for name, lane in LANES.items() for method in lane.methods}

_thread = threading.local()


def is_refusing() -> bool:
    """Whether this thread answers calls for which their lanes had no room."""
    return getattr(_thread, "refusing", False)


def _refuse_from_now_on() -> None:
    _thread.refusing = True


class MessageOverdue(Exception):
    """A call was ended because its message did not come while others queued."""


class Lane(Pool):
    """Threads with a bounded queue. If the queue is full, or there is no thread at all, a call goes to `full`.

    gRPC calls `submit` in the single thread that accepts all calls, and an exception would end that thread. So `submit`
    neither waits nor raises.

    Args:
        crowded: set while calls queue and threads wait for messages of other calls; `end_overdue` is then called.
    """

    def __init__(self, name: str, threads: int, full: Pool, crowded: threading.Event) -> None:
        super().__init__(threads, process="the broker", thread_name_prefix=f"rpc-{name}")
        self._full = full
        self._crowded = crowded
        self._busy_lock = threading.Lock()
        self._busy = 0  # threads that have a call
        self._awaited: dict[Any, float] = {}  # calls without a message, the oldest first; the end of the wait pops it

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._work_queue.qsize() >= QUEUED_MAX:
            return self._full.submit(call, *args, **kwargs)
        try:
            future = super().submit(self._run, call, args, kwargs)
        except OutOfThreads:
            return self._full.submit(call, *args, **kwargs)
        if self._awaited and self._queued:
            self._crowded.set()
        return future

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._busy_lock:
            self._busy += 1
        try:
            return call(*args, **kwargs)
        finally:
            with self._busy_lock:
                self._busy -= 1

    @property
    def _queued(self) -> int:
        """Calls for which there is no thread: one that an idle thread is about to take does not count."""
        return self._work_queue.qsize() if self._busy >= len(self._threads) else 0

    def next_message(self, messages: Iterator[bytes], context: Any) -> bytes | None:
        """The next message of a call, in a thread of this lane; None: the client sends no more.

        Raises:
            MessageOverdue, grpc.RpcError: the call has ended.
        """
        self._awaited[context] = time.monotonic()
        if self._queued:
            self._crowded.set()
        try:
            message = next(messages, None)
        except BaseException:
            self._awaited.pop(context, None)
            raise
        if self._awaited.pop(context, None) is None:  # it came while the call was being ended
            raise MessageOverdue
        return message

    def end_overdue(self) -> float | None:
        """End calls whose message is overdue while others queue. Returns the seconds until the next check."""
        queued, now = self._queued, time.monotonic()
        for context, since in list(self._awaited.items())[:queued]:
            if now < since + _MESSAGE_SECONDS:
                return max(_LOOK_SECONDS_MIN, since + _MESSAGE_SECONDS - now)
            if self._awaited.pop(context, None) is not None:
                context.cancel()
        return _LOOK_SECONDS_MIN if queued and self._awaited else None


class Lanes:
    """All lanes. `default` answers methods of other services: health, reflection."""

    def __init__(self) -> None:
        self._crowded = threading.Event()
        self._ended = False
        self._refusing = Pool(1, process="the broker", thread_name_prefix="rpc-full", initializer=_refuse_from_now_on)
        self._refusing.submit(int)  # starts its thread now, so that it can always refuse
        self._lanes = {name: self._lane(name, lane.threads) for name, lane in LANES.items()}
        self.default = self._lane("other", 4)
        self._watch = threading.Thread(target=self._end_overdue, name="rpc-overdue", daemon=True)
        self._watch.start()

    def _lane(self, name: str, threads: int) -> Lane:
        return Lane(name, threads, self._refusing, self._crowded)

    def of(self, method: str) -> tuple[str, Lane]:
        """A method's lane and the lane's name; the lane `staged` for a method in no list."""
        name = _LANE_OF.get(method, "staged")
        return name, self._lanes[name]

    def _end_overdue(self) -> None:
        look_after: float | None = None
        while not self._ended:
            self._crowded.wait(look_after)
            self._crowded.clear()
            looks = [lane.end_overdue() for lane in (*self._lanes.values(), self.default)]
            look_after = min((seconds for seconds in looks if seconds is not None), default=None)

    def shut_down(self) -> None:
        """End the threads after they have answered the accepted calls."""
        for pool in (*self._lanes.values(), self._refusing, self.default):
            pool.shutdown(wait=True)
        self._ended = True
        self._crowded.set()
        self._watch.join()
