"""Waits at partitions for the event that a request needs: bytes, a moved end, a flush. The same for both ports.

A waiter first registers and then looks: it sees earlier events, and later events wake it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from broker.replica.host import Host
from broker.replica.partition import Partition
from broker.replica.waiters import Wake
from broker.requests.fetch import Answer, fetch
from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError
from kafkalog.wire.broker_pb2 import ListOffsetsRequest
from kafkalog.wire.dataport_pb2 import FetchReply, FetchRequest

_Found = TypeVar("_Found")


class Waiter:
    """A waiter at some partitions. Not thread-safe, except for `wake`, which any thread may call.

    Attributes:
        partitions: where it is registered.
    """

    __slots__ = ("_wake", "partitions")

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self.partitions: Sequence[Partition] = ()

    def look(self, partitions: Sequence[Partition], look: Callable[[], _Found]) -> _Found:
        """Return the result of a look. From now on changes of these partitions wake, and no longer those of earlier
        ones."""
        wake = self._wake
        for partition in self.partitions:
            partition.waiters.unregister(wake)
        self.partitions = partitions
        for partition in partitions:
            partition.waiters.register(wake)
        return look()

    def leave(self) -> None:
        """Unregister everywhere."""
        for partition in self.partitions:
            partition.waiters.unregister(self._wake)
        self.partitions = ()


def wait_for(
    partitions: Sequence[Partition],
    look: Callable[[], _Found],
    deadline: float,
    clock: Clock,
    changed: threading.Event | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> _Found:
    """Wait until a look finds something; look again after each change of a partition. Returns the last look's result.

    Args:
        deadline: by the monotonic clock.
        changed: may also be set by others, to make it look again.
        is_wanted: checked before each wait.
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
            continue  # the answer has the error
    return found


def enough(request: FetchRequest, host: Host, max_bytes: int) -> Answer[FetchReply] | None:
    """The answer to a fetch if there is enough data for one, else None."""
    answer = fetch(request, host, max_bytes)
    if answer.is_enough(request):
        return answer
    answer.close()
    return None
