"""The cluster's metadata as last reported (brokers, topics, leaders), and the connections to brokers.

Any broker can answer requests for metadata; the bootstrap servers serve to find the other brokers. A call is tried at
one broker after the other, with pauses, until it is answered or its time is over. Thread-safe. After a fork the child
has connections of its own.
"""

from __future__ import annotations

import math
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Generator, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kafkalog.client.background import in_background
from kafkalog.client.complaints import Complaint
from kafkalog.client.config import ClientSettings, parse_bootstrap
from kafkalog.errors import (
    LEADER_CHANGES,
    BrokerBusy,
    BrokerNotAsked,
    BrokerStopping,
    BrokerUnreachable,
    Closed,
    KafkalogError,
    LeaderNotAvailable,
    NoBrokers,
    NotLeader,
    RequestTimedOut,
    RetriableError,
    UnknownPartition,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.events import get_logger
from kafkalog.net.control import ControlConnection, PendingCall
from kafkalog.net.data import DataConnection
from kafkalog.net.forks import after_fork
from kafkalog.net.main_thread import Signal
from kafkalog.net.tcp import format_address
from kafkalog.records import TopicPartition
from kafkalog.retry import Retry
from kafkalog.versions import FIRST, FORMATS, PROTOCOL, VersionRange
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.wire.ranges import versions_from_wire

log = get_logger(__name__)

_Answer = TypeVar("_Answer")


def longest_pause(error: KafkalogError) -> float:
    """The longest pause in seconds before a request that failed is repeated: short if a new leader may answer it."""
    return LOOK_SECONDS if isinstance(error, _AWAITS_LEADER) else math.inf


_IDLE_CONNECTIONS_MAX = 8  # kept for each broker
_SILENT_MS = 10_000  # a wait for the first answer that may be longer than this is logged
_REFUSED = (BrokerStopping, BrokerBusy, NoBrokers)
_ELSEWHERE = (BrokerUnreachable, ZooKeeperUnreachable, *_REFUSED)
"""Failures after which another broker may answer."""
LOOK_SECONDS = 0.2
"""The longest pause before a partition's leader is looked up again while it has none, or does not answer. An election
takes tens of milliseconds once the old leader's session is over, and no event reports it to clients."""
_AWAITS_LEADER = (*LEADER_CHANGES, BrokerUnreachable)
QUIET_SECONDS = 2.0
"""A broker that does not answer for so long is looked up: if it is not registered any more, it will not answer."""
QUIET_LOOK_SECONDS = 0.5
"""How often it is looked up then."""
_METADATA = ("DescribeCluster", "DescribeTopics")
_ASKED_OF_SEVERAL = frozenset(
    {
        *_METADATA,
        "DescribeBroker",
        "DescribeController",
        "ListGroups",
        "DescribeGroup",
        "CommittedOffsets",
        "ReadDecisions",
        "ListDecisions",
        "InitProducer",
    }
)
"""Calls that any broker can answer, and that change nothing: InitProducer returns a random id. Of these calls the next
broker is asked too while one is silent. Any other call could be executed late by a broker that wakes, over a newer
change."""
_ELSEWHERE_SECONDS = 1.0
"""How long a broker may be silent before the next one is asked too: one that is suspended accepts connections and never
answers, and while a leader is looked up nothing is sent."""
OUT_OF_DATE = (NotLeader, UnknownTopicId)
"""What is known of the topics is not true any more. To ask the same again does not help: ask for the topics first."""


class BrokerInfo(NamedTuple):
    """A live broker.

    Attributes:
        protocol: the protocol versions that it speaks.
        formats: the format levels that it understands (`kafkalog/versions.py`).
        epoch: of its registration: higher than of any before under its id; 0: not known.
    """

    broker_id: int
    host: str
    grpc_port: int
    data_port: int
    rack: str
    version: str
    protocol: VersionRange = PROTOCOL
    formats: VersionRange = FORMATS
    epoch: int = 0


NO_LEADER = -1


class PartitionInfo(NamedTuple):
    """A partition.

    Attributes:
        leader: a broker's id; NO_LEADER while no broker has opened its log, or no replica may lead.
        leader_epoch: how often the leader has changed.
        replicas: the brokers that have a copy, the preferred leader first.
        isr: those of them that are in sync: they have every acknowledged record.
        eligible: replicas outside the isr that may lead too, while the isr is smaller than min.insync.replicas.
        adding: those of the replicas that are being added by a move (KIP-455).
        removing: those that it will remove.
    """

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    eligible: tuple[int, ...] = ()
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()

    @property
    def has_leader(self) -> bool:
        return self.leader != NO_LEADER

    @property
    def is_under_replicated(self) -> bool:
        """Whether some replica is not in sync; those that are being added do not count."""
        return any(broker not in self.isr and broker not in self.adding for broker in self.replicas)

    def is_offline(self, live: Container[int]) -> bool:
        """Whether no live broker leads it, so that it can be neither read nor written.

        Args:
            live: the ids of the brokers that are registered (`Admin.describe_cluster`).
        """
        return self.leader not in live


class TopicInfo(NamedTuple):
    """A topic. `config` has the settings that were set, `effective` all settings with their values in force, as text.
    `behind`: in the result of a change, the brokers of its partitions that have not followed yet.
    `created_zxid`: higher than that of any topic that had the name before in this cluster; 0: not known."""

    name: str
    topic_id: bytes
    config: Mapping[str, str]
    effective: Mapping[str, str]
    partitions: tuple[PartitionInfo, ...]
    created_us: int
    behind: tuple[int, ...] = ()
    created_zxid: int = 0

    @property
    def max_message_bytes(self) -> int:
        return int(self.effective["max.message.bytes"])

    def partition(self, number: int) -> PartitionInfo:
        """Raises UnknownPartition."""
        if not 0 <= number < len(self.partitions):
            raise UnknownPartition(topic=self.name, partition=number, partitions=len(self.partitions))
        return self.partitions[number]


class ClusterInfo(NamedTuple):
    """A cluster, its live brokers by id.

    Attributes:
        format_level: nothing is written in a format of a higher one (`kafkalog/versions.py`).
        is_uncertain: no broker that answers has a connection to ZooKeeper. This is how the cluster was before, and so
            are descriptions of topics.
    """

    cluster_id: str
    brokers: tuple[BrokerInfo, ...]
    zookeeper_connect: str
    zookeeper_chroot: str
    format_level: int = FIRST
    is_uncertain: bool = False


def topic_info(description: pb.TopicDescription) -> TopicInfo:
    return TopicInfo(
        description.name,
        description.topic_id,
        dict(description.config),
        dict(description.effective),
        tuple(
            PartitionInfo(
                each.partition,
                each.leader,
                each.leader_epoch,
                tuple(each.replicas),
                tuple(each.isr),
                tuple(each.eligible),
                tuple(each.adding),
                tuple(each.removing),
            )
            for each in description.partitions
        ),
        description.created_us,
        created_zxid=description.created_zxid,
    )


def _cluster_info(description: pb.ClusterDescription) -> ClusterInfo:
    return ClusterInfo(
        description.cluster_id,
        tuple(map(broker_info, description.brokers)),
        description.zookeeper_connect,
        description.zookeeper_chroot,
        description.format_level or FIRST,
        description.is_uncertain,
    )


def broker_info(description: pb.BrokerDescription) -> BrokerInfo:
    return BrokerInfo(
        description.broker_id,
        description.host,
        description.grpc_port,
        description.data_port,
        description.rack,
        description.version,
        versions_from_wire(description.protocol),
        versions_from_wire(description.formats),
        description.epoch,
    )


class _Known(NamedTuple):
    """A topic as last reported.

    Attributes:
        at: when, by the monotonic clock.
        cluster_id: of the cluster that reported it.
    """

    topic: TopicInfo
    at: float
    cluster_id: str


class Cluster:
    """A cluster's metadata and connections.

    Args:
        bootstrap_servers: `host:port` of one broker's gRPC port or more, with commas between.
        settings: of `ClientSettings`, or values parsed already.
        **given: the same as keywords.

    Raises:
        InvalidSetting, UnknownSetting: of the arguments; nothing connects yet.
    """

    def __init__(
        self, bootstrap_servers: str | Iterable[str], settings: ClientSettings | None = None, /, **given: Any
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap_servers)
        self.settings = ClientSettings.parse(given) if settings is None else settings
        # Guards all below; not held during I/O. Reentrant, for `close` in a signal handler above a call that holds it.
        self._lock = threading.RLock()
        self._brokers: dict[int, BrokerInfo] = {}
        self._cluster_id = ""  # of the brokers that answered last; empty: none has
        self._cluster_since = 0.0  # when it was first seen
        self._topics: dict[str, _Known] = {}
        self._knows_all = False  # all topics were reported once, by a broker that was certain
        self._control: dict[tuple[str, int], ControlConnection] = {}
        self._idle: dict[int, list[DataConnection]] = {}
        self._borrowed: weakref.WeakSet[DataConnection] = weakref.WeakSet()
        self._answered_at: dict[tuple[str, int], float] = {}  # when a broker did last
        self._ever_answered = False
        self._stopped = Signal()
        after_fork(self, Cluster._after_fork_in_child)

    @property
    def address(self) -> str:
        """The bootstrap servers, as errors name them."""
        return ", ".join(format_address(*address) for address in self._bootstrap)

    # --- calls

    def call(
        self,
        method: str,
        request: Any,
        *,
        broker_id: int | None = None,
        repeatable: bool = True,
        patient: bool = True,
        timeout_ms: int | None = None,
    ) -> Any:
        """Call a broker's gRPC method, any broker's unless one is named.

        Args:
            broker_id: of the broker that has to answer.
            repeatable: whether the call may be repeated if a broker may have received it.
            patient: whether to keep trying if no broker answers.
            timeout_ms: for one broker's answer; None: `request.timeout.ms`.

        Raises:
            BrokerUnreachable: none answered in time, see `bootstrap.timeout.ms` and `retry.timeout.ms`.
            KafkalogError: what the broker answered.
        """
        if not patient:
            return self._call_once(method, request, broker_id, True, timeout_ms)
        # A call that is not repeatable may be half done when a broker answers it with another retriable error.
        retried = (RetriableError,) if repeatable else (*_ELSEWHERE, LeaderNotAvailable)
        return self.retrying(lambda: self._call_once(method, request, broker_id, repeatable, timeout_ms), retried)

    def begin(self, method: str, request: Any, broker_id: int) -> Future[Any]:
        """Begin a call of a broker, which is tried once; the future gets the answer, or what `call` raises."""
        call = partial(self.call, method, request, broker_id=broker_id, patient=False)
        return in_background(call, here_if_need_be=True)

    def call_each(self, method: str, request: Any, broker_ids: Iterable[int]) -> dict[int, Any]:
        """Call brokers in parallel, each once. Returns the answer of each, or what it raised."""
        calls = {broker_id: self.begin(method, request, broker_id) for broker_id in broker_ids}
        return {broker_id: call.exception() or call.result() for broker_id, call in calls.items()}

    def first_of(self, method: str, requests: Mapping[int, Any], is_enough: Callable[[int, Any], bool]) -> bool:
        """Ask brokers in parallel, until the answer of one is enough; the other calls are then cancelled.

        Args:
            requests: by broker id.
            is_enough: (broker id, answer) -> whether the answer is enough.

        Returns:
            Whether one answer was enough; if not, all brokers have answered.

        Raises:
            BrokerUnreachable: a broker did not answer. Each is tried once.
            KafkalogError: what a broker answered.
        """
        news = Signal()
        calls: dict[int, PendingCall] = {}
        try:
            for broker_id, request in requests.items():
                address = self._known_address(broker_id)
                if address is None:
                    raise _unregistered(broker_id)
                control = self._connected(address)
                calls[broker_id] = control.begin(method, request, self.settings.request_timeout_ms, news.set)
            waiting = dict(calls)
            while waiting:
                news.wait()
                news.clear()
                for broker_id in [each for each, call in waiting.items() if call.is_done]:
                    if is_enough(broker_id, waiting.pop(broker_id).result()):
                        return True
            return False
        finally:
            for call in calls.values():
                call.cancel()

    def retrying(
        self,
        attempt: Callable[[], _Answer],
        retried: tuple[type[KafkalogError], ...] = (RetriableError,),
        *,
        finds_leaders: bool = False,
    ) -> _Answer:
        """Call `attempt` until it succeeds, fails for good, or `retry.timeout.ms` is over.

        Every `RetriableError` is retried, except those in `OUT_OF_DATE`.

        Args:
            finds_leaders: whether each attempt looks up the leaders again; its pauses are short then.
        """
        settings = self.settings
        retry = Retry(settings.backoff(), math.inf, since=time.monotonic())
        complaint = Complaint(log, "no_broker_answers_yet" if not self._ever_answered else "call_held_up")
        while True:
            try:
                return attempt()
            except _NotSure as error:
                raise error.cause from None
            except OUT_OF_DATE:
                raise
            except retried as error:
                limit_ms = settings.retry_timeout_ms if self._ever_answered else settings.bootstrap_timeout_ms
                if self._stopped.is_set():
                    raise Closed(what="client") from None
                retry.limit = limit_ms / 1000
                pause = retry.failed(time.monotonic(), longest_pause(error) if finds_leaders else math.inf)
                if pause is None:
                    raise error from None
                if limit_ms > _SILENT_MS:
                    complaint.failed(error, retry.until)
            self.pause(pause)

    def pause(self, seconds: float) -> None:
        """Wait between two tries, because no event reports that a broker is back. Raises Closed, at once when `close`
        is called meanwhile."""
        if self._stopped.wait(seconds):
            raise Closed(what="client")

    def _call_once(
        self, method: str, request: Any, broker_id: int | None, repeatable: bool, timeout_ms: int | None
    ) -> Any:
        if broker_id is None:
            if method not in _ASKED_OF_SEVERAL and timeout_ms is None:
                self._see_who_answers()
            return self._call_any_of(self._addresses(), method, request, repeatable, timeout_ms)
        address = self._known_address(broker_id)
        try:
            if address is None:
                raise _unregistered(broker_id)
            return self._call_any_of([address], method, request, repeatable, timeout_ms)
        except BrokerUnreachable:
            moved = self._address_now(broker_id)
            if moved is None or moved == address:
                raise
        return self._call_any_of([moved], method, request, repeatable, timeout_ms)

    def _call_any_of(
        self,
        addresses: list[tuple[str, int]],
        method: str,
        request: Any,
        repeatable: bool,
        timeout_ms: int | None,
    ) -> Any:
        timeout_ms = timeout_ms or self.settings.request_timeout_ms
        is_of_several = method in _ASKED_OF_SEVERAL and len(addresses) > 1
        ask = partial(self._call_at, method=method, request=request, timeout_ms=timeout_ms)
        with closing((_side_by_side if is_of_several else _in_turn)(addresses, ask)) as outcomes:
            return self._first_answer(outcomes, addresses, repeatable)

    def _first_answer(
        self,
        outcomes: Iterable[tuple[tuple[str, int], Callable[[], Any]]],
        addresses: list[tuple[str, int]],
        repeatable: bool,
    ) -> Any:
        failures: list[KafkalogError] = []
        uncertain: Any = None
        for address, answer_of in outcomes:
            try:
                answer = answer_of()
            except _NotSure as error:
                if not repeatable:
                    raise
                failures.append(error.cause)
            except _ELSEWHERE as error:
                failures.append(error)
            else:
                if _is_uncertain(answer):
                    # Cut off from ZooKeeper it would name the leaders from before for as long as that lasts.
                    uncertain = answer if uncertain is None else uncertain
                    continue
                if address != addresses[0]:
                    self._ask_first(address)
                return answer
        if uncertain is not None:
            return uncertain
        if len(failures) == 1 or all(isinstance(error, RequestTimedOut) for error in failures):
            raise failures[0]
        for failure in failures:
            if isinstance(failure, (ZooKeeperUnreachable, BrokerBusy)):  # says more than BrokerUnreachable
                raise failure
        listed = ", ".join(format_address(*address) for address in addresses)
        raise BrokerUnreachable(address=listed, reason="; ".join(_reason(error) for error in failures))

    def _call_at(
        self,
        address: tuple[str, int],
        attempt: _Attempt | None = None,
        *,
        method: str,
        request: Any,
        timeout_ms: int,
    ) -> Any:
        """Call the broker at an address. Raises _NotSure if it may have received the call and did not answer."""
        while True:
            control = self._connected(address, attempt)
            try:
                if attempt is None:
                    answer = control.call(method, request, timeout_ms)
                else:
                    answer = attempt.call(control, method, request, timeout_ms)
            except BrokerNotAsked:
                continue  # another thread has closed the connection (`_forget`): use a new one
            except ZooKeeperUnreachable as error:
                raise _NotSure(error) from None
            except (BrokerUnreachable, RequestTimedOut) as error:
                if self._stopped.is_set():  # `close` ended the call
                    raise Closed(what="client") from None
                self._forget(address, control)  # a silent connection would delay the next calls too
                raise _NotSure(error) from None
            with self._lock:
                self._answered_at[address] = time.monotonic()
            return answer

    def _see_who_answers(self) -> None:
        """Before a call that is sent to one broker after the other: if the first one has not answered lately, ask for
        the cluster, so that one that answers now comes first."""
        addresses = self._addresses()
        answered_at = self._answered_at.get(addresses[0], -math.inf)
        if len(addresses) > 1 and time.monotonic() - answered_at >= _ELSEWHERE_SECONDS:
            with suppress(KafkalogError):  # the call's own failure says more
                self.describe(patient=False)

    def _known_address(self, broker_id: int) -> tuple[str, int] | None:
        with self._lock:
            broker = self._brokers.get(broker_id)
        return None if broker is None else (broker.host, broker.grpc_port)

    def _address_now(self, broker_id: int) -> tuple[str, int] | None:
        """The current address of a broker that does not answer at the known one: it may have moved."""
        try:
            self.describe(patient=False)
        except KafkalogError:
            return None
        return self._known_address(broker_id)

    def addresses(self) -> list[str]:
        """`host:port` of every broker that is known, and of the bootstrap servers."""
        return [format_address(*address) for address in self._addresses()]

    def _addresses(self) -> list[tuple[str, int]]:
        with self._lock:
            known = [(broker.host, broker.grpc_port) for broker in self._brokers.values()]
            connected = [address for address in self._control if address in known or address in self._bootstrap]
            return list(dict.fromkeys([*connected, *self._bootstrap, *known]))

    def _connected(self, address: tuple[str, int], attempt: _Attempt | None = None) -> ControlConnection:
        """The connection to a broker, perhaps a new one."""
        with self._lock:
            if self._stopped.is_set():
                raise Closed(what="client")
            known = self._control.get(address)
        if known is not None:
            return known
        control = ControlConnection(*address, connect_timeout_ms=self.settings.connect_timeout_ms)
        asked_at = time.monotonic()
        description = control.connect() if attempt is None else attempt.connect(control)
        with self._lock:
            stopped = self._stopped.is_set()  # closed meanwhile: nobody would close this one
            if not stopped:
                self._take_in(description, asked_at)
                self._answered_at[address] = time.monotonic()
            kept = None if stopped else self._control.setdefault(address, control)
        if kept is not control:
            control.close()
        if kept is None:
            raise Closed(what="client")
        return kept

    def _ask_first(self, address: tuple[str, int]) -> None:
        """Ask this broker before the others from now on."""
        with self._lock:
            if address in self._control:
                self._control = {address: self._control[address], **self._control}

    def _forget(self, address: tuple[str, int], control: ControlConnection) -> None:
        """Close a connection, and end the calls of other threads on it. It is removed first, so that a thread that
        finds it closed gets another one."""
        with self._lock:
            if self._control.get(address) is control:
                del self._control[address]
                self._answered_at.pop(address, None)
        control.close()

    def _take_in(self, description: pb.ClusterDescription, asked_at: float) -> None:
        """Lock held: keep what a broker reported."""
        self._ever_answered = True
        if self._is_other(description.cluster_id) and not self._has_changed(description, asked_at):
            return
        if description.brokers and not (description.is_uncertain and self._brokers):
            self._brokers = {broker.broker_id: broker for broker in _cluster_info(description).brokers}

    def _is_other(self, cluster_id: str) -> bool:
        """Whether an answer with this id is not of the cluster that is known. An older broker gives none."""
        return cluster_id not in ("", self._cluster_id)

    def _has_changed(self, description: pb.ClusterDescription, asked_at: float) -> bool:
        """Lock held: whether another cluster is at the addresses now, as after an embedded one was started anew without
        its data. Then nothing of the earlier one counts any more, except that its topics were there: that they are not
        is only known when the new one was asked for them. A broker of the earlier one may answer late, or while it is
        cut off: a topic would seem to be another one twice then (`remember`)."""
        if self._cluster_id:
            if description.is_uncertain or asked_at < self._cluster_since:
                return False
            log.warning("cluster_changed", cluster_id=description.cluster_id, before=self._cluster_id)
            self._brokers, self._knows_all = {}, False
            idle, self._idle = self._idle, {}
            for connections in idle.values():
                for connection in connections:
                    connection.close()
        self._cluster_id, self._cluster_since = description.cluster_id, time.monotonic()
        return True

    # --- metadata

    def describe(self, *, patient: bool = True) -> ClusterInfo:
        """The cluster as it is now."""
        asked_at = time.monotonic()
        description: pb.ClusterDescription = self.call("DescribeCluster", pb.DescribeClusterRequest(), patient=patient)
        with self._lock:
            self._take_in(description, asked_at)
        return _cluster_info(description)

    def describe_topics(
        self,
        names: Iterable[str] = (),
        *,
        patient: bool = True,
        is_complete: bool = False,
        may_lack_new: bool = False,
    ) -> list[TopicInfo]:
        """Topics as they are now, in the order asked; all of them, by name, if none is named.

        Args:
            is_complete: fail rather than leave some out.
            may_lack_new: then, too, those may be left out that were created since all were listed to this client once.

        Raises:
            UnknownTopic.
            BrokerUnreachable: some may be missing: nobody who answers has a connection to ZooKeeper.
        """
        names = list(names)
        found, errors = self._ask_for_topics(names, patient, is_complete, may_lack_new)
        if errors:
            raise errors[0]
        return [found[name] for name in (names or found)]

    def look_up(self, names: Iterable[str], *, patient: bool = True) -> None:
        """Fetch the metadata of all these topics that is missing or older than metadata.max.age.ms, in one request.
        Topics that do not exist are dropped from the cache."""
        if unknown := [name for name in names if self.fresh_topic(name) is None]:
            self._ask_for_topics(unknown, patient)

    def _ask_for_topics(
        self, names: list[str], patient: bool, is_complete: bool = False, may_lack_new: bool = False
    ) -> tuple[dict[str, TopicInfo], list[KafkalogError]]:
        """Fetch topics (all if none is named) into the cache. Returns those found by name, and the errors of the
        others."""
        ask = partial(self._ask_once_for_topics, names, is_complete, may_lack_new)
        return self.retrying(ask) if patient else ask()

    def _ask_once_for_topics(
        self, names: list[str], is_complete: bool, may_lack_new: bool
    ) -> tuple[dict[str, TopicInfo], list[KafkalogError]]:
        """As `_ask_for_topics`, of one broker that is of the cluster that is known.

        Raises:
            BrokerUnreachable: nobody who answers has a connection to ZooKeeper, so that a topic may be there.
        """
        request = pb.DescribeTopicsRequest(names=names)
        reply: pb.TopicDescriptions = self.call("DescribeTopics", request, patient=False)
        if self._is_other(reply.cluster_id):  # gRPC connects again by itself: this may be the first answer of a new one
            self.describe(patient=False)
        found: dict[str, pb.TopicDescription] = {}
        missing: dict[str, pb.TopicDescription] = {}
        for description in reply.topics:
            (missing if description.HasField("error") else found)[description.name] = description
        is_certain = not reply.is_uncertain
        if missing or not (names or is_certain):
            elsewhere, knows = self._known_elsewhere(missing)
            found.update(elsewhere)
            is_certain = is_certain or knows
        unknown = [name for name in missing if name not in found]
        if unknown and not is_certain:
            reason = f"topic '{unknown[0]}' may be there: no broker that answers has a connection to ZooKeeper"
            raise BrokerUnreachable(address=self.address, reason=reason)
        if is_complete and not (is_certain or (may_lack_new and self._knows_all)):
            reason = "there may be more topics: no broker that answers has a connection to ZooKeeper"
            raise BrokerUnreachable(address=self.address, reason=reason)
        errors = [error_from_wire(missing[name].error) for name in unknown]
        with self._lock:
            if self._is_other(reply.cluster_id):
                reason = f"a broker of cluster {reply.cluster_id} answers, and not one of {self._cluster_id}"
                raise BrokerUnreachable(address=self.address, reason=reason)
            for name in missing:
                self.forget(name)
            topics = {topic.name: topic for topic in self.remember(*map(topic_info, found.values()))}
            return topics if names else self._all_topics(topics, is_certain), errors

    def _all_topics(self, reported: dict[str, TopicInfo], is_certain: bool) -> dict[str, TopicInfo]:
        """Lock held: all topics, of which those were reported. A broker without a connection to ZooKeeper does not know
        of new ones."""
        self._knows_all = self._knows_all or is_certain
        for name in self._topics.keys() - reported.keys():
            if is_certain:
                self.forget(name)
            elif self._topics[name].cluster_id == self._cluster_id:
                reported[name] = self._topics[name].topic
        return dict(sorted(reported.items()))

    def _known_elsewhere(self, names: Collection[str]) -> tuple[dict[str, pb.TopicDescription], bool]:
        """The topics that other brokers know (all if none is named), because a new topic is not known to all brokers at
        once; and whether one of them knows for certain. Silent ones are waited for a while only."""
        with self._lock:
            addresses = [(broker.host, broker.grpc_port) for broker in self._brokers.values()]
        found: dict[str, pb.TopicDescription] = {}
        is_certain = False
        if len(addresses) == 1:
            return found, is_certain
        request = pb.DescribeTopicsRequest(names=names)
        ask = partial(
            self._call_at, method="DescribeTopics", request=request, timeout_ms=self.settings.request_timeout_ms
        )
        with closing(_side_by_side(addresses, ask, at_once=True)) as outcomes:
            for _, answer_of in outcomes:
                try:
                    reply: pb.TopicDescriptions = answer_of()
                except (_NotSure, KafkalogError):
                    continue
                if not self._is_other(reply.cluster_id):
                    found.update({each.name: each for each in reply.topics if not each.HasField("error")})
                    is_certain = is_certain or not reply.is_uncertain
                if len(found) == len(names) if names else is_certain:
                    break
        return found, is_certain

    def remember(self, *topics: TopicInfo) -> list[TopicInfo]:
        """Keep reported descriptions of topics, and return what is then known of each. What is older than that which is
        known is not taken in: a broker that is cut off from ZooKeeper reports it. A leader of an older epoch would
        serve a log without the newest records. A topic that was deleted and created again would seem to be another one
        twice, and records whose outcome is unknown would be sent again as new ones. What another cluster reported
        before is older: each counts from 0."""
        now = time.monotonic()
        newest: list[TopicInfo] = []
        with self._lock:
            for topic in topics:
                known = self._topics.get(topic.name)
                if known is not None and known.cluster_id == self._cluster_id:
                    topic = _newest(topic, known.topic)
                newest.append(topic)
                self._topics[topic.name] = _Known(topic, now, self._cluster_id)
        return newest

    def forget(self, name: str) -> None:
        """Drop a topic from the cache: it is fetched again when it is next needed."""
        with self._lock:
            self._topics.pop(name, None)

    def loss_of(self, broker_id: int, connection: DataConnection) -> BrokerUnreachable | None:
        """Why a broker that is silent on a connection will not answer there, as last reported: it is not registered any
        more, or a later process is, as on a new machine with its id. None: it is there."""
        with self._lock:
            broker = self._brokers.get(broker_id)
        if broker is None:
            reason = "it is not registered in the cluster any more"
        elif _is_of_an_earlier_process(connection, broker):
            reason = (
                f"broker {broker_id} has registered again since, at {format_address(broker.host, broker.data_port)}"
            )
        else:
            return None
        return BrokerUnreachable(address=connection.address, reason=reason)

    def known_topic(self, name: str) -> TopicInfo | None:
        """A topic as last reported; None if it was never fetched, or was deleted."""
        with self._lock:
            known = self._topics.get(name)
        return known.topic if known is not None else None

    def topic(self, name: str, *, patient: bool = True) -> TopicInfo:
        """A topic as reported within metadata.max.age.ms. Raises UnknownTopic."""
        return self.fresh_topic(name) or self.describe_topics([name], patient=patient)[0]

    def fresh_topic(self, name: str) -> TopicInfo | None:
        """A topic if it was reported within metadata.max.age.ms, else None."""
        with self._lock:
            known = self._topics.get(name)
            if known is None or known.cluster_id != self._cluster_id:
                return None
        return known.topic if time.monotonic() - known.at < self.settings.metadata_max_age_ms / 1000 else None

    def refresh(self, names: Iterable[str] = (), *, patient: bool = True) -> None:
        """Fetch the brokers and some topics again. Topics that do not exist are dropped from the cache."""
        self.describe(patient=patient)
        if listed := list(names):
            self._ask_for_topics(listed, patient)

    def leader(self, topic: TopicInfo, number: int) -> BrokerInfo:
        """The broker that leads a partition. Raises UnknownPartition, LeaderNotAvailable."""
        broker_id = topic.partition(number).leader
        with self._lock:
            broker = self._brokers.get(broker_id)
        if broker is None:
            raise LeaderNotAvailable(partition=str(TopicPartition(topic.name, number)), broker_id=broker_id)
        return broker

    def _leader_id(self, partition: TopicPartition) -> int:
        """Who leads a partition, as last reported; NO_LEADER also if that is not known."""
        topic = self.known_topic(partition.topic)
        if topic is None or partition.partition >= len(topic.partitions):
            return NO_LEADER
        return topic.partitions[partition.partition].leader

    def leader_of(
        self, partition: TopicPartition, topic_id: bytes | None = None, *, patient: bool = True
    ) -> tuple[TopicInfo, BrokerInfo]:
        """A partition's topic and leader as last reported; as they are now if that does not fit.

        Raises:
            UnknownTopicId: the topic of that name has another id.
            UnknownTopic, UnknownPartition, LeaderNotAvailable.
        """
        topic = self.topic(partition.topic, patient=patient)
        is_other = topic_id is not None and topic.topic_id != topic_id
        if is_other or partition.partition >= len(topic.partitions):  # it may have been created again, or added since
            [topic] = self.describe_topics([partition.topic], patient=patient)
        if topic_id is not None and topic.topic_id != topic_id:
            raise UnknownTopicId(topic_id=topic_id.hex())
        return topic, self.leader(topic, partition.partition)

    # --- data connections

    def connect_data(self, broker_id: int, known: BrokerInfo | None = None) -> DataConnection:
        """A new connection to a broker's data port, the caller's own. Raises BrokerUnreachable.

        Args:
            known: the broker as the caller knows it; None: as last reported to this cluster. That counts unless the
                caller knows of a later registration.
        """
        with self._lock:
            if self._stopped.is_set():
                raise Closed(what="client")
            broker = self._newer_of(broker_id, known)
        if broker is None:
            raise _unregistered(broker_id)
        return DataConnection(
            broker.host,
            broker.data_port,
            connect_timeout_ms=self.settings.connect_timeout_ms,
            request_timeout_ms=self.settings.request_timeout_ms,
            broker_epoch=broker.epoch,
        )

    def _newer_of(self, broker_id: int, known: BrokerInfo | None) -> BrokerInfo | None:
        """Lock held: a broker as last reported, or as a caller knows it if that is a later registration."""
        broker = self._brokers.get(broker_id)
        if broker is None:
            return known
        if known is not None and known.epoch > broker.epoch:
            self._brokers[broker_id] = broker = known
        return broker

    def borrow_data(self, broker_id: int, known: BrokerInfo | None = None) -> DataConnection:
        """An idle connection to a broker's data port, or a new one. The caller gives it back, or closes it if in doubt.

        Args:
            known: as for `connect_data`.
        """
        while idle := self._idle.get(broker_id):
            with self._lock:
                if not idle:
                    continue
                connection = idle.pop()
                broker = self._newer_of(broker_id, known)
            if connection.is_quiet() and not (broker is not None and _is_of_an_earlier_process(connection, broker)):
                break
            connection.close()  # the broker has ended it, or its machine was lost
        else:
            connection = self.connect_data(broker_id, known)
        with self._lock:
            self._borrowed.add(connection)
            stopped = self._stopped.is_set()
        if stopped:  # meanwhile: nobody would end what is asked on it
            connection.close()
            raise Closed(what="client")
        return connection

    def await_answer(self, broker_id: int, connection: DataConnection, partition: TopicPartition) -> None:
        """Wait until a broker's answer about a partition that it leads can be received.

        Raises:
            BrokerUnreachable: it does not answer, and will not (`loss_of`).
            NotLeader: it does not answer, and another broker leads the partition now.
            RequestTimedOut: nothing came within request.timeout.ms.
        """
        if connection.has_buffered:
            return
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        until = time.monotonic() + self.settings.request_timeout_ms / 1000
        pause = QUIET_SECONDS
        while not poller.poll(max(0.0, min(pause, until - time.monotonic())) * 1000):
            if time.monotonic() >= until:
                timeout_ms = self.settings.request_timeout_ms
                raise RequestTimedOut(what="an answer", address=connection.address, timeout_ms=timeout_ms)
            try:
                self.refresh([partition.topic], patient=False)
            except KafkalogError:
                pass  # nobody says that it is away
            if (lost := self.loss_of(broker_id, connection)) is not None:
                raise lost
            if self._leader_id(partition) not in (broker_id, NO_LEADER):
                raise NotLeader(broker_id=broker_id, partition=str(partition))
            pause = QUIET_LOOK_SECONDS

    def give_back(self, broker_id: int, connection: DataConnection) -> None:
        """Keep a connection without outstanding answers for the next call of `borrow_data`."""
        with self._lock:
            self._borrowed.discard(connection)
            idle = self._idle.setdefault(broker_id, [])
            if not self._stopped.is_set() and len(idle) < _IDLE_CONNECTIONS_MAX:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all connections; calls that wait fail with Closed."""
        self._stopped.set()
        with self._lock:
            control, self._control = self._control, {}
            idle, self._idle = self._idle, {}
            borrowed = list(self._borrowed)
        for connection in control.values():
            connection.close()
        for lent in borrowed:
            lent.shut_down()
        for connections in idle.values():
            for data in connections:
                data.close()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        stopped, self._stopped = self._stopped.is_set(), Signal()
        if stopped:
            self._stopped.set()
        for control in self._control.values():
            control.abandon()
        for connections in self._idle.values():
            for connection in connections:
                connection.abandon()
        self._control, self._idle = {}, {}
        self._borrowed = weakref.WeakSet()  # the parent's: to shut one down would end it there


class _Attempt:
    """What is asked of one broker in a thread of its own, until it is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._is_given_up = False
        self._end: Callable[[], object] | None = None

    def connect(self, control: ControlConnection) -> pb.ClusterDescription:
        """As `ControlConnection.connect`; its connection is closed if this is given up meanwhile. Raises Closed."""
        self._ends_by(control.close)
        description = control.connect()
        self._ends_by(None)  # other threads may use it from here on
        return description

    def call(self, control: ControlConnection, method: str, request: Any, timeout_ms: int) -> Any:
        """As `ControlConnection.call`; the call is cancelled if this is given up meanwhile. Raises Closed."""
        done = Signal()
        call = control.begin(method, request, timeout_ms, done.set)
        self._ends_by(call.cancel)
        done.wait()
        return call.result()

    def give_up(self) -> None:
        """End what is done now. What is done next ends as well, before it waits for anything but a TCP connection."""
        with self._lock:
            self._is_given_up = True
            if self._end is not None:
                self._end()

    def _ends_by(self, end: Callable[[], object] | None) -> None:
        """Note what ends that which is done next. Raises Closed."""
        with self._lock:
            self._end = end
            if not self._is_given_up:
                return
            if end is not None:
                end()
        raise Closed(what="call")


def _in_turn(
    addresses: Iterable[tuple[str, int]], ask: Callable[[tuple[str, int]], Any]
) -> Generator[tuple[tuple[str, int], Callable[[], Any]], None, None]:
    """Each address, and what asks there."""
    for address in addresses:
        yield address, partial(ask, address)


def _side_by_side(
    addresses: Iterable[tuple[str, int]],
    ask: Callable[[tuple[str, int], _Attempt], Any],
    *,
    at_once: bool = False,
) -> Generator[tuple[tuple[str, int], Callable[[], Any]], None, None]:
    """Ask at one address after another, at the next one when all before have failed or been silent for a while. Yields
    each address once there is an outcome, and what returns or raises it. Those that are silent are waited for only if
    the caller goes on, and given up when it closes this: with a call under way a channel survives a fork, and gRPC's
    fork handlers then abort children.

    Args:
        at_once: ask at all addresses, and wait for a while only. After an uncertain answer that is done in any case: it
            is of use, and another one may be better.
    """
    attempts: list[_Attempt] = []
    asked: dict[Future[Any], tuple[str, int]] = {}
    left = deque(addresses)
    until = time.monotonic() + _ELSEWHERE_SECONDS if at_once else math.inf
    try:
        while left or asked:
            if left:
                address = left.popleft()
                attempts.append(_Attempt())
                asked[in_background(partial(ask, address, attempts[-1]), here_if_need_be=True)] = address
            if until < math.inf:
                pause: float | None = 0.0 if left else max(0.0, until - time.monotonic())
            else:
                pause = _ELSEWHERE_SECONDS if left else None
            done, _ = wait(asked, pause, FIRST_COMPLETED)
            if not done and not left:
                return
            for each in done:
                if until == math.inf and each.exception() is None and _is_uncertain(each.result()):
                    until = time.monotonic() + _ELSEWHERE_SECONDS
                yield asked.pop(each), each.result
    finally:
        for attempt in attempts:
            attempt.give_up()


def _is_uncertain(answer: Any) -> bool:
    """Whether a broker answers about metadata and is cut off from ZooKeeper."""
    return isinstance(answer, pb.ClusterDescription | pb.TopicDescriptions) and answer.is_uncertain


def _is_of_an_earlier_process(connection: DataConnection, broker: BrokerInfo) -> bool:
    """Whether a broker has registered again since a connection to it was made, as far as that is known."""
    return 0 < connection.broker_epoch < broker.epoch


def _newest(topic: TopicInfo, known: TopicInfo) -> TopicInfo:
    """The one of two topics of one name that was created later; if both are the same, the first description, with the
    partitions of the other one that have a newer leader or are not in the first: partitions are only ever added."""
    if topic.topic_id != known.topic_id:
        return known if 0 < topic.created_zxid < known.created_zxid else topic
    partitions = list(topic.partitions) + list(known.partitions[len(topic.partitions) :])
    for each, reported in zip(known.partitions, topic.partitions, strict=False):
        if each.leader_epoch > reported.leader_epoch:
            partitions[each.partition] = each
    return topic._replace(partitions=tuple(partitions))


class _NotSure(Exception):
    """A call was not answered, and the broker may have received it."""

    def __init__(self, cause: KafkalogError) -> None:
        self.cause = cause


def _reason(error: KafkalogError) -> str:
    return str(error.facts.get("reason", error))


def _unregistered(broker_id: int) -> BrokerUnreachable:
    if broker_id == NO_LEADER:
        return BrokerUnreachable(
            address="the partition's leader", reason="there is none: no live broker has opened its log"
        )
    return BrokerUnreachable(address=f"broker {broker_id}", reason="it is not registered in the cluster")
