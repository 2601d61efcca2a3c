"""Waiting at partitions for what a request asks for: bytes, an end that moves, a flush. The same for both ports.

Whoever waits registers first and looks then: what came before it sees, and what comes later wakes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from broker.replica.host import Host
from broker.replica.partition import Partition, Wake
from broker.requests.fetch import Answer, fetch
from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError
from kafkalog.wire.broker_pb2 import ListOffsetsRequest
from kafkalog.wire.dataport_pb2 import FetchRequest

_Found = TypeVar("_Found")


class Waiter:
    """One who waits, at some partitions at a time. Not thread-safe; `wake` is called from any thread.

    Attributes:
        partitions: where it is registered.
    """

    __slots__ = ("_wake", "partitions")

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self.partitions: Sequence[Partition] = ()

    def look(self, partitions: Sequence[Partition], look: Callable[[], _Found]) -> _Found:
        """What a look finds. The next change of one of the partitions wakes, and no longer one of those before."""
        wake = self._wake
        for partition in self.partitions:
            partition.unregister(wake)
        self.partitions = partitions
        for partition in partitions:
            partition.register(wake)
        return look()

    def leave(self) -> None:
        """Wait nowhere any more."""
        for partition in self.partitions:
            partition.unregister(self._wake)
        self.partitions = ()


def wait_for(
    partitions: Sequence[Partition],
    look: Callable[[], _Found],
    deadline: float,
    clock: Clock,
    changed: threading.Event | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> _Found:
    """Wait until a look finds something, looking again whenever one of the partitions changes; what the last one found.

    Args:
        deadline: by the monotonic clock.
        changed: set by others too who want it to look again.
        is_wanted: asked before each wait.
    """
    changed = changed or threading.Event()
    waiter = Waiter(changed.set)
    try:
        while True:
            changed.clear()
            found = waiter.look(partitions, look)
            left = deadline - clock.monotonic()
            if found or left <= 0 or not is_wanted():
                return found
            changed.wait(left)
    finally:
        waiter.leave()


def hosted(request: FetchRequest | ListOffsetsRequest, host: Host) -> list[Partition]:
    """The partitions of a request that are led here: those to wait at."""
    found = []
    for part in request.partitions:
        try:
            found.append(host.leader_of(part.topic_id, part.partition))
        except KafkalogError:
            continue  # the answer itself tells
    return found


def enough(request: FetchRequest, host: Host, max_bytes: int) -> Answer | None:
    """What a fetch waits for: its answer, once there is enough for one."""
    answer = fetch(request, host, max_bytes)
    if answer.is_enough(request):
        return answer
    answer.close()
    return None
