"""Lanes: the threads that answer gRPC calls, so that calls which wait for one thing hold up none that wait for another.

Which lane answers a method is told by what the method may wait for:

    quick       nothing: what it says is in memory
    listings    an end that moves, if it was asked to wait; else a look at an index
    pulls       data, memory for the answer, a read of the log
    appends     a write, and its flush
    staged      writes of a transaction, and deletions: an Apply writes gigabytes
    brief       the lock of a log's staged data, for as long as one write to it takes
    zookeeper   ZooKeeper
    producers   ZooKeeper, once in a thousand calls
    topics      ZooKeeper, and brokers that open logs: up to 10 s

A lane has its threads, made as they are needed, and a bounded queue. A call for which there is no room is answered by
another thread, at once, that it may be tried again (`is_refusing`). One that waited until its client gave up is not
begun: gRPC sees to that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

QUEUED_MAX = 256
"""Calls that wait for a thread of their lane."""


class LaneOf(NamedTuple):
    """The methods of a lane. Threads are cheap: what they are for waits."""

    methods: tuple[str, ...]
    threads: int


LANES: Mapping[str, LaneOf] = {
    "quick": LaneOf(("DescribeCluster", "DescribeBroker", "DescribeTopics"), 8),
    "listings": LaneOf(("ListOffsets",), 24),
    "pulls": LaneOf(("Pull",), 16),
    "appends": LaneOf(("Append",), 8),
    "staged": LaneOf(("Prepare", "Apply", "Release", "Discard", "DeleteRecords"), 16),
    "brief": LaneOf(("Renew", "ListStaged"), 4),
    "zookeeper": LaneOf(
        (
            "CommitOffsets",
            "CommittedOffsets",
            "ListGroups",
            "DescribeGroup",
            "ResetOffsets",
            "ForgetOffsets",
            "KeepMember",
            "LeaveGroup",
            "ReadDecision",
            "Decide",
            "ListDecisions",
        ),
        16,
    ),
    "producers": LaneOf(("InitProducer",), 2),
    "topics": LaneOf(("CreateTopic", "AlterTopic", "DeleteTopic", "RecoverPartitions"), 4),
}

_LANE_OF = {method: name for name, lane in LANES.items() for method in lane.methods}

_thread = threading.local()


def is_refusing() -> bool:
    """Whether this thread answers calls that their lanes had no room for."""
    return getattr(_thread, "refusing", False)


def _refuse_from_now_on() -> None:
    _thread.refusing = True


class Lane(ThreadPoolExecutor):
    """Threads, and a bounded queue before them; what finds it full goes to `full`.

    gRPC hands it a call from the one thread that takes all calls in, so `submit` neither waits nor raises.
    """

    def __init__(self, name: str, threads: int, full: ThreadPoolExecutor) -> None:
        super().__init__(threads, thread_name_prefix=f"rpc-{name}")
        self._full = full

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._work_queue.qsize() >= QUEUED_MAX:
            return self._full.submit(call, *args, **kwargs)
        return super().submit(call, *args, **kwargs)


class Lanes:
    """All of them. `default` answers what is no method of the service: health, reflection."""

    def __init__(self) -> None:
        self._refusing = ThreadPoolExecutor(1, thread_name_prefix="rpc-full", initializer=_refuse_from_now_on)
        self._lanes = {name: Lane(name, lane.threads, self._refusing) for name, lane in LANES.items()}
        self.default = ThreadPoolExecutor(2, thread_name_prefix="rpc-other")

    def of(self, method: str) -> tuple[str, Lane]:
        """A method's lane, and its name. One that is in no list may take its time."""
        name = _LANE_OF.get(method, "staged")
        return name, self._lanes[name]

    def shut_down(self) -> None:
        """End the threads once they have answered what was taken in."""
        for pool in (*self._lanes.values(), self._refusing, self.default):
            pool.shutdown(wait=True)
