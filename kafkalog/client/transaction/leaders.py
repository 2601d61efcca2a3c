"""Requests to the leaders of many partitions: in parallel, and again until every partition has answered.

Each partition has an answer of its own. Those that cannot answer yet (their broker restarts, their leader moved, or is
still working) are asked again as long as there is progress for any of them. Knows nothing of what the requests mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from kafkalog.client.cluster import Cluster, longest_pause
from kafkalog.client.complaints import Complaint
from kafkalog.errors import (
    KafkalogError,
    LeaderNotAvailable,
    NoProgress,
    OutOfThreads,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.net.forks import after_fork
from kafkalog.records import TopicPartition
from kafkalog.threads import Pool
from kafkalog.wire import broker_pb2
from kafkalog.wire.frames import error_from_wire

log = get_logger(__name__)

_THREADS = 8
_ROUND_SECONDS = 5.0
"""How long a leader that works is asked again before those that failed are."""
_PLACES_MAX = 256
_WEIGHT_MAX = 10_000
"""Of one request. A broker takes messages of 2 MiB, in which a part of a Prepare takes up to 50 bytes."""


class OutOfPatience(Exception):
    """There was no progress for too long. `error`: why the last try failed."""

    def __init__(self, error: KafkalogError) -> None:
        super().__init__(str(error))
        self.error = error


class Patience:
    """A time limit for work without progress: every sign of progress restarts it. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()  # guards all that follows
        self._since = clock()
        self._complaint = Complaint(log, "commit_held_up", clock)
        self._seen: dict[tuple[Place, bool], int] = {}
        self._stuck: dict[Place, KafkalogError] = {}  # places that failed and made no progress since
        self._finished: set[tuple[str, Place]] = set()

    def progressed(self) -> None:
        with self._lock:
            self._since = self._clock()

    def saw(self, place: Place, answer: Any) -> None:
        """Record the number in the answer of a place that is unfinished or failed: a changed number is progress.

        A place whose work is queued returns the progress of all staged writes on its broker, which is another measure.
        For a place that keeps failing it does not count as progress: each retry queues again, so other places' work
        changes the number.
        """
        failed = answer.HasField("error")
        if failed and not answer.progress:  # no work was done
            return
        with self._lock:
            measure = place, answer.queued
            moved = self._seen.setdefault(measure, answer.progress) != answer.progress
            self._seen[measure] = answer.progress
            if moved and not answer.queued:
                self._stuck.pop(place, None)
            if moved and place not in self._stuck:
                self._since = self._clock()
            if failed:
                self._stuck[place] = error_from_wire(answer.error)

    def finished(self, method: str, place: Place) -> None:
        """Record that a place has completed a request: progress if it is the first time."""
        with self._lock:
            self._stuck.pop(place, None)
            if (method, place) not in self._finished:
                self._finished.add((method, place))
                self._since = self._clock()

    def failed(self, error: KafkalogError, pause: float = 0.0) -> None:
        """Report a failure that is retried after a pause. Raises OutOfPatience if the time would be up by then."""
        with self._lock:
            self._check(error, pause)

    def works(self, what: str, address: str) -> None:
        """Report that something is not finished yet. Not a failure: logged only after a whole round without progress.

        Raises:
            OutOfPatience: when the time is up, with the last error of a place that keeps failing, else NoProgress.
        """
        with self._lock:
            idle = self._clock() - self._since
            error = next(iter(self._stuck.values()), NoProgress(what=what, address=address, seconds=round(idle)))
            self._check(error, is_said=idle > _ROUND_SECONDS)

    def _check(self, error: KafkalogError, pause: float = 0.0, is_said: bool = True) -> None:
        until = self._since + self._seconds
        if self._clock() + pause > until:
            raise OutOfPatience(error)
        if is_said:
            self._complaint.failed(error, until)


class Place(NamedTuple):
    """A partition of the topic with this id, not of a later topic of the same name."""

    topic: str
    topic_id: bytes
    partition: int

    @property
    def label(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class _LeaderRound:
    """The requests to one leader in a round, and its answers. `waiting`: the places without an answer, in order."""

    def __init__(
        self,
        method: str,
        broker_id: int,
        places: Iterable[Place],
        request: Callable[[Sequence[Place]], Any],
        weight: Callable[[Place], int],
    ) -> None:
        self.method = method
        self.broker_id = broker_id
        self.request = request
        self.waiting = dict.fromkeys(places)
        self.answers: dict[Place, Any] = {}
        self.failures: dict[Place, KafkalogError] = {}
        self._weight = weight

    def next_places(self) -> list[Place]:
        """The first waiting places, as many as a request may hold; at least one."""
        found: list[Place] = []
        weight = 0
        for place in self.waiting:
            weight += self._weight(place)
            if found and (len(found) == _PLACES_MAX or weight > _WEIGHT_MAX):
                break
            found.append(place)
        return found


class Leaders:
    """Asks leaders. Thread-safe; its threads are created when two leaders are first asked at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # guards _pool
        self._pool: Pool | None = None
        after_fork(self, Leaders._after_fork_in_child)

    def ask(
        self,
        method: str,
        places: Iterable[Place],
        request: Callable[[Sequence[Place]], Any],
        patience: Patience,
        settle: Callable[[Place, KafkalogError], bool],
        weight: Callable[[Place], int] = lambda place: 1,
    ) -> dict[Place, Any]:
        """Ask the leader of every place, until all have answered.

        Args:
            request: makes the request for some places; the reply's `partitions` are in their order.
            settle: returns whether a final error of a place counts as an answer. If not, the error is raised, or what
                `settle` itself raises.
            weight: of a place in a request, which has its limit.

        Returns:
            the answer of every place but those whose error was settled.

        Raises:
            OutOfPatience: some place neither answered nor made any progress; with the reason.
        """
        answers: dict[Place, Any] = {}
        waiting = list(places)
        backoff = self._cluster.settings.backoff()
        while True:
            failures: dict[Place, KafkalogError] = {}
            rounds = [
                _LeaderRound(method, broker_id, asked, request, weight)
                for broker_id, asked in self._by_leader(waiting, failures).items()
            ]
            self.each(rounds, lambda asking: self._take(asking, patience))
            unfinished = [place for asking in rounds for place in asking.waiting]
            for asking in rounds:
                answers.update(asking.answers)
                failures.update(asking.failures)
            failed = [place for place, error in failures.items() if not self._settled(place, error, settle)]
            waiting = [*failed, *unfinished]
            if not waiting:
                return answers
            if not failed:
                backoff.reset()
                self._refresh({place.topic for place in waiting})  # one that works on it for so long may lead no more
                continue
            pause = backoff.next(min(longest_pause(failures[place]) for place in failed))
            patience.failed(failures[failed[0]], pause)
            self._cluster.pause(pause)
            self._refresh({place.topic for place in failed})

    def _take(self, asking: _LeaderRound, patience: Patience) -> None:
        """Ask a leader for its places, repeatedly for a while for those it is working on. Raises OutOfPatience."""
        until = time.monotonic() + _ROUND_SECONDS
        while asking.waiting:
            asked = asking.next_places()
            try:
                reply = self._call(asking.method, asking.broker_id, asking.request(asked))
            except KafkalogError as error:
                asking.failures.update(dict.fromkeys(asking.waiting, error))  # tried once a round, not once a request
                asking.waiting.clear()
                return
            for place, answer in zip(asked, reply.partitions, strict=True):
                if answer.unfinished:
                    patience.saw(place, answer)
                    continue
                del asking.waiting[place]
                if answer.HasField("error"):
                    patience.saw(place, answer)
                    asking.failures[place] = error_from_wire(answer.error)
                else:
                    patience.finished(asking.method, place)
                    asking.answers[place] = answer
            if asking.waiting:
                what = f"{asking.method} of {next(iter(asking.waiting)).label}"
                patience.works(what, f"broker {asking.broker_id}")
                if time.monotonic() > until:
                    return

    def _settled(self, place: Place, error: KafkalogError, settle: Callable[[Place, KafkalogError], bool]) -> bool:
        """Whether a failed place needs no retry. Raises the error if it is final."""
        if isinstance(error, UnknownTopic | UnknownTopicId):
            if not self.is_deleted(place.topic_id):
                return False  # one broker may not know it yet
            error = UnknownTopicId(topic_id=f"{place.topic_id.hex()} ('{place.topic}')")
        elif error.retriable:
            return False
        if not settle(place, error):
            raise error
        return True

    def is_deleted(self, topic_id: bytes) -> bool:
        """Whether every live broker answers that there is no topic of that id, and is certain of it."""
        request = broker_pb2.DescribeTopicsRequest(ids=[topic_id])
        try:
            brokers = self._cluster.describe(patient=False).brokers
            for broker in brokers:
                reply: broker_pb2.TopicDescriptions
                reply = self._cluster.call("DescribeTopics", request, broker_id=broker.broker_id, patient=False)
                if reply.is_uncertain or not reply.topics[0].HasField("error"):
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
            pass  # the next round reports what is wrong

    def hint(self, method: str, places: Iterable[Place], request: Callable[[Sequence[Place]], Any]) -> None:
        """Send leaders a request that need not reach them: once, without waiting for an answer."""
        try:
            by_leader = self._by_leader(places, {})
        except KafkalogError:
            return
        for broker_id, theirs in by_leader.items():
            try:
                self._threads().submit(self._hint, method, broker_id, request(theirs))
            except OutOfThreads as error:
                log.debug("hint_lost", method=method, broker_id=broker_id, reason=str(error))

    def _hint(self, method: str, broker_id: int, request: Any) -> None:
        try:
            self._call(method, broker_id, request)
        except KafkalogError as error:
            log.debug("hint_lost", method=method, broker_id=broker_id, reason=str(error))

    def each(self, items: Iterable[Any], call: Callable[[Any], Any]) -> list[Any]:
        """Make the calls in parallel and return their results in the order of the items. If one raises, its error is
        raised after all have ended.

        If no thread can be started, the calls are made in this thread, one by one: a commit must not fail for that.
        """
        listed = list(items)
        if len(listed) <= 1:
            return [call(item) for item in listed]
        futures: list[Future[Any]] = []
        for item in listed:
            try:
                futures.append(self._threads().submit(call, item))
            except OutOfThreads:
                futures.append(_called(call, item))
        wait(futures)
        return [future.result() for future in futures]

    def _threads(self) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = Pool(_THREADS, process="this process", thread_name_prefix="coordinator")
            return self._pool

    def close(self) -> None:
        """End the threads. The cluster is closed by its owner."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._pool = None


def _called(call: Callable[[Any], Any], item: Any) -> Future[Any]:
    """The outcome of a call, made in this thread."""
    made: Future[Any] = Future()
    try:
        made.set_result(call(item))
    except Exception as error:
        made.set_exception(error)
    return made
