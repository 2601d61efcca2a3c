"""Requests to the leaders of many partitions: side by side, and again until every partition has answered.

Each partition answers for itself; those that can not yet (their broker restarts, their leader moved) are asked again
until the time is over. Knows nothing of what the requests mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kafkalog.client.cluster import Cluster
from kafkalog.connection import after_fork
from kafkalog.errors import KafkalogError, LeaderNotAvailable, UnknownTopic, UnknownTopicId
from kafkalog.log import get_logger
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2
from kafkalog.wire.frames import error_from_wire

log = get_logger(__name__)

_THREADS = 8


class Place(NamedTuple):
    """A partition of one topic and no later one of the same name."""

    topic: str
    topic_id: bytes
    partition: int

    @property
    def label(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Leaders:
    """Asks leaders. Thread-safe; its threads are made when two leaders are first to be asked at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # guards _pool
        self._pool: ThreadPoolExecutor | None = None
        after_fork(self)

    def ask(
        self,
        method: str,
        places: Iterable[Place],
        request: Callable[[Sequence[Place]], Any],
        deadline: float,
        settle: Callable[[Place, KafkalogError], bool],
    ) -> dict[Place, Any]:
        """Ask the leader of every place, until all have answered.

        Args:
            request: makes the request for some places; the reply's `partitions` are in their order.
            deadline: monotonic; after it what keeps a place from answering is raised.
            settle: whether a final error of a place is as good as an answer; what it raises, or else the error, rises.

        Returns:
            the answer of every place but those whose error was settled.
        """
        answers: dict[Place, Any] = {}
        waiting = list(places)
        pause = self._cluster.settings.retry_backoff_ms / 1000
        while True:
            failures: dict[Place, KafkalogError] = {}
            by_leader = self._by_leader(waiting, failures)
            replies = self.each(by_leader.items(), lambda item: self._call(method, item[0], request(item[1])))
            for (_, asked), reply in zip(by_leader.items(), replies, strict=True):
                for index, place in enumerate(asked):
                    if isinstance(reply, KafkalogError):
                        failures[place] = reply
                    elif reply.partitions[index].HasField("error"):
                        failures[place] = error_from_wire(reply.partitions[index].error)
                    else:
                        answers[place] = reply.partitions[index]
            waiting = [place for place, error in failures.items() if not self._settled(place, error, settle)]
            if not waiting:
                return answers
            if time.monotonic() + pause > deadline:
                raise failures[waiting[0]]
            self._cluster.pause(pause)
            pause = min(pause * 2, self._cluster.settings.retry_backoff_max_ms / 1000)
            self._refresh({place.topic for place in waiting})

    def _settled(self, place: Place, error: KafkalogError, settle: Callable[[Place, KafkalogError], bool]) -> bool:
        """Whether nothing more is to be waited for at a place. Raises the error if it is final."""
        if isinstance(error, UnknownTopic | UnknownTopicId):
            if not self.is_deleted(place.topic_id):
                return False  # one broker does not know it yet
            error = UnknownTopicId(topic_id=f"{place.topic_id.hex()} ('{place.topic}')")
        elif error.retriable:
            return False
        if not settle(place, error):
            raise error
        return True

    def is_deleted(self, topic_id: bytes) -> bool:
        """Whether every live broker says that there is no topic of that id."""
        request = broker_pb2.DescribeTopicsRequest(ids=[topic_id])
        try:
            brokers = self._cluster.describe(patient=False).brokers
            for broker in brokers:
                reply = self._cluster.call("DescribeTopics", request, broker_id=broker.broker_id, patient=False)
                if not reply.topics[0].HasField("error"):
                    return False
        except KafkalogError:
            return False  # asked again
        return bool(brokers)

    def _by_leader(self, places: Iterable[Place], failures: dict[Place, KafkalogError]) -> dict[int, list[Place]]:
        found: dict[int, list[Place]] = {}
        for place in places:
            try:
                _, leader = self._cluster.leader_of(place.label, place.topic_id)
            except (LeaderNotAvailable, UnknownTopic, UnknownTopicId) as error:
                failures[place] = error
            except KafkalogError as error:
                if not error.retriable:
                    raise
                failures[place] = error
            else:
                found.setdefault(leader.broker_id, []).append(place)
        return found

    def _call(self, method: str, broker_id: int, request: Any) -> Any:
        return self._cluster.call(method, request, broker_id=broker_id, patient=False)

    def _refresh(self, topics: Iterable[str]) -> None:
        try:
            self._cluster.refresh(sorted(topics), patient=False)
        except KafkalogError:
            pass  # the next round says what is wrong

    def hint(self, method: str, places: Iterable[Place], request: Callable[[Sequence[Place]], Any]) -> None:
        """Tell leaders something that need not reach them: once, and nobody waits for it."""
        try:
            by_leader = self._by_leader(places, {})
        except KafkalogError:
            return
        for broker_id, told in by_leader.items():
            self._threads().submit(self._tell, method, broker_id, request(told))

    def _tell(self, method: str, broker_id: int, request: Any) -> None:
        try:
            self._call(method, broker_id, request)
        except KafkalogError as error:
            log.debug("hint_lost", method=method, broker_id=broker_id, reason=str(error))

    def each(self, items: Iterable[Any], call: Callable[[Any], Any]) -> list[Any]:
        """What the calls return or raise (KafkalogError), side by side, in the order of the items."""

        def outcome(item: Any) -> Any:
            try:
                return call(item)
            except KafkalogError as error:
                return error

        listed = list(items)
        if len(listed) <= 1:
            return [outcome(item) for item in listed]
        return list(self._threads().map(outcome, listed))

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="committer")
            return self._pool

    def close(self) -> None:
        """End the threads. The cluster is its owner's to close."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._pool = None
