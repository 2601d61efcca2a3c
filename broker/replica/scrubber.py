"""Looks for bit rot in this broker's logs, and has what is damaged repaired from other replicas. One thread.

    round:  partition by partition, in a random order: its small files, then each closed segment at a bounded rate
    asked:  damage that a read or a follower met, or an operator wants repaired: at once, before the round goes on

The order is random so that brokers that are restarted often do not always begin with the same partitions. Damage is
known from its segment and survives restarts in the saved index. What could not be repaired is tried again, at growing
intervals. `step` does one bounded piece of work; the thread calls it, or a test.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from broker.replica.host import Host, PartitionKey
from broker.replica.partition import Partition
from broker.replica.repair import Source, Unrepaired, repair
from broker.storage.index import Damage
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import Clock
from kafkalog.errors import BrokerUnreachable, CorruptBatch, KafkalogError
from kafkalog.events import get_logger
from kafkalog.net.data import DataConnection
from kafkalog.retry import Backoff
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames
from kafkalog.zk.registry import BrokerRecord

log = get_logger(__name__)

_FIRST_ROUND_SECONDS = 60.0
"""After the start, when other work waits."""
_IDLE_SECONDS = 60.0
_PAUSE_SECONDS_MIN = 0.01
"""After each piece of a round, however small: a broker may have thousands of small segments."""
_LOG_SECONDS_MIN = 0.1
"""After the last piece of a log: a broker may have thousands with nothing to read."""
_AGAIN_SECONDS, _AGAIN_SECONDS_MAX = 60.0, 3600.0
_CONNECT_TIMEOUT_MS = 3_000
_REQUEST_TIMEOUT_MS = 10_000


@dataclass
class _Asked:
    """A partition of which damage is to be repaired.

    Attributes:
        offsets: at which damage was met; the batches there are checked first.
        due: when.
        done: set after the attempt.
    """

    offsets: set[int] = field(default_factory=set)
    due: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Left:
    """What could not be repaired of a partition."""

    unrepaired: list[Unrepaired]
    backoff: Backoff


class Scrubber:
    """`start` once the host has opened its partitions, `stop` before it closes them. Thread-safe, except `step`.

    Attributes:
        checked_bytes, repaired_ranges: since the start.
    """

    def __init__(self, host: Host, directory: LogDirectory, clock: Clock) -> None:
        self._host = host
        self._directory = directory
        self._clock = clock
        self._bytes_per_second = host.settings.scrub_bytes_per_second
        self._interval_seconds = host.settings.scrub_interval_ms / 1000
        self.checked_bytes = self.repaired_ranges = 0
        self._changed = threading.Condition()  # guards the following
        self._asked: OrderedDict[PartitionKey, _Asked] = OrderedDict()
        self._left: dict[PartitionKey, _Left] = {}
        self._stopping = False
        self._connection: DataConnection | None = None
        self._round: deque[PartitionKey] = deque()  # what is left of it; the thread's, as the following
        self._next_round_at = clock.monotonic() + _FIRST_ROUND_SECONDS
        self._work: Iterator[int] | None = None
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    # --- what others call --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._host.on_damage = self.met_damage
        self._ask_for_known()  # first, because a replica with damage does not join
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.shut_down()
        if self._thread.is_alive():
            self._thread.join()
        with self._changed:
            for asked in self._asked.values():
                asked.done.set()

    def met_damage(self, partition: Partition, offset: int) -> None:
        """A read has met damage, or a follower has got damaged bytes: have it repaired, unless that failed lately.
        Called by any thread."""
        key = partition.topic_id, partition.number
        with self._changed:
            left = self._left.get(key)
            if left is None or not any(_has(each.damage, offset) for each in left.unrepaired):
                self._ask(key, offset)

    def repair_partition(self, partition: Partition, seconds: float) -> bool:
        """Repair the known damage of a partition now; returns whether the attempt is over within so many seconds."""
        with self._changed:
            asked = self._ask((partition.topic_id, partition.number))
        return asked.done.wait(seconds)

    def _ask(self, key: PartitionKey, offset: int | None = None, after_seconds: float = 0.0) -> _Asked:
        """Lock held."""
        asked = self._asked.setdefault(key, _Asked(due=float("inf")))
        asked.due = min(asked.due, self._clock.monotonic() + after_seconds)
        if offset is not None:
            asked.offsets.add(offset)
        self._changed.notify_all()
        return asked

    def damaged(self) -> Iterator[tuple[Partition, Damage, str]]:
        """The known damage of every partition, and why it could not be repaired; empty: that was not tried yet."""
        for key, partition in self._host.hosted.items():
            left = self._left.get(key)
            reasons = {each.damage: each.reason for each in left.unrepaired} if left is not None else {}
            for damage in known_damage(partition):
                yield partition, damage, reasons.get(damage, "")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                pause = self.step()
            except Exception:  # a defect: the work goes on with the next partition
                log.exception("scrub_failed")
                self._work, pause = None, _IDLE_SECONDS
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._is_asked(), pause)
                if self._stopping:
                    return

    def _is_asked(self) -> bool:
        now = self._clock.monotonic()
        return self._host.failed is None and any(asked.due <= now for asked in self._asked.values())

    def step(self) -> float:
        """Do a bounded piece of the work that is due. Returns the seconds until the next piece is."""
        if self._host.failed is not None:
            return _IDLE_SECONDS
        now = self._clock.monotonic()
        with self._changed:
            key = next((key for key, asked in self._asked.items() if asked.due <= now), None)
            asked = self._asked.pop(key) if key is not None else None
            wait = min((each.due - now for each in self._asked.values()), default=_IDLE_SECONDS)
        if key is not None and asked is not None:
            try:
                self._repair(key, asked.offsets)
            finally:
                asked.done.set()
            return 0.0
        if not self._bytes_per_second:
            return max(0.0, wait)
        if self._work is None:
            self._work = self._next_work(now)
        if self._work is None:
            return max(0.0, min(wait, self._next_round_at - now))
        read = next(self._work, None)
        if read is None:
            self._work = None
            return _LOG_SECONDS_MIN
        self.checked_bytes += read
        return max(_PAUSE_SECONDS_MIN, read / self._bytes_per_second)

    def _next_work(self, now: float) -> Iterator[int] | None:
        """The check of the next partition; None: the round is over, and the next one not due."""
        if not self._round:
            if now < self._next_round_at:
                return None
            self._next_round_at = now + self._interval_seconds
            return self._begin_round()
        return self._check(self._round.popleft())

    def _begin_round(self) -> Iterator[int]:
        """Check the files of the directory, and ask for the repair of all damage that is known."""
        hosted = self._host.hosted
        self._round.extend(random.sample(list(hosted), len(hosted)))
        with self._changed:
            self._left = {key: left for key, left in self._left.items() if key in hosted}
        self._ask_for_known()
        yield 0
        try:
            self._directory.check_files()
        except KafkalogError as error:
            log.info("scrub_interrupted", directory=str(self._directory.path), reason=str(error))

    def _check(self, key: PartitionKey) -> Iterator[int]:
        """Check the files of a partition; yields the bytes read."""
        partition = self._host.hosted.get(key)
        if partition is None:
            return
        try:
            partition.log.check_files()
            for segment in partition.log.view.segments[:-1]:
                before = segment.damaged
                yield from partition.log.check(segment)
                partition.log.check_index(segment)
                if segment.damaged != before:
                    with self._changed:
                        self._ask(key)
        except KafkalogError as error:
            if partition.is_open:
                log.info("scrub_interrupted", partition=partition.label, reason=str(error))

    def _ask_for_known(self) -> None:
        """Ask for the repair of all damage that is known."""
        for key, partition in self._host.hosted.items():
            if not partition.following.is_whole:
                with self._changed:
                    self._ask(key)

    # --- repairing ---------------------------------------------------------------------------------------------------

    def _repair(self, key: PartitionKey, offsets: set[int]) -> None:
        """Repair the known damage of a partition, and that at some offsets."""
        partition = self._host.hosted.get(key)
        if partition is None:
            self._left.pop(key, None)
            return
        target = partition.log
        unrepaired: list[Unrepaired] = []
        try:
            for offset in offsets:
                self._look_at(partition, offset)
            target.roll_if_damaged()
            with ExitStack() as at_the_end:
                sources = self._sources(partition)
                for source in sources:
                    at_the_end.callback(source.close)
                for segment in target.view.segments[:-1]:
                    if segment.damaged:
                        outcome = repair(target, segment, sources, lambda: self._stopping)
                        target.check_index(segment)  # so that the damage is known after a restart
                        self.repaired_ranges += outcome.repaired
                        unrepaired += outcome.left
        except KafkalogError as error:
            if self._stopping or not partition.is_open:
                return
            reason = str(error)
            unrepaired = [Unrepaired(damage, reason) for damage in known_damage(partition)]
        self._note_left(key, partition, unrepaired)

    def _look_at(self, partition: Partition, offset: int) -> None:
        """Check the batches around an offset."""
        view = partition.log.view
        if view.start_offset <= offset < view.end_offset:
            segment = next(each for each in reversed(view.segments) if each.base_offset <= offset)
            for read in partition.log.check(segment, offset, offset + 1):
                self.checked_bytes += read

    def _note_left(self, key: PartitionKey, partition: Partition, unrepaired: list[Unrepaired]) -> None:
        with self._changed:
            before = self._left.pop(key, None)
            if not unrepaired:
                return
            backoff = Backoff(_AGAIN_SECONDS, _AGAIN_SECONDS_MAX) if before is None else before.backoff
            self._left[key] = _Left(unrepaired, backoff)
            if self._has_others(partition):
                self._ask(key, after_seconds=backoff.next())
        known = {each.damage for each in before.unrepaired} if before is not None else set()
        for damage, reason in unrepaired:
            if damage not in known:
                log.error(
                    "damage_not_repaired",
                    partition=partition.label,
                    start_offset=damage.start_offset,
                    end_offset=damage.end_offset,
                    reason=reason,
                )

    def _has_others(self, partition: Partition) -> bool:
        topic = self._host.metadata.ids.get(partition.topic_id)
        return topic is not None and len(topic.replicas_of(partition.number)) > 1

    def _sources(self, partition: Partition) -> list[_Replica]:
        """The other replicas of a partition: the leader first, then those in sync."""
        topic = self._host.metadata.ids.get(partition.topic_id)
        if topic is None:
            return []
        state = topic.states.get(partition.number)
        others = [each for each in topic.replicas_of(partition.number) if each != self._host.broker_id]
        if state is not None:
            others.sort(key=lambda each: (each != state.leader, each not in state.isr))
        brokers = self._host.metadata.brokers
        return [_Replica(self, partition, each, brokers.get(each)) for each in others]

    def connected(self, connection: DataConnection | None) -> None:
        """Note the connection that is waited for, to be shut down at a stop."""
        with self._changed:
            self._connection = connection
            if self._stopping and connection is not None:
                connection.shut_down()


class _Replica(Source):
    """A replica on another broker, with a connection from its first read on until it is closed."""

    def __init__(self, scrubber: Scrubber, partition: Partition, broker_id: int, broker: BrokerRecord | None) -> None:
        self.name = f"broker {broker_id}"
        self._scrubber = scrubber
        self._partition = partition
        self._broker = broker
        self._connection: DataConnection | None = None
        self._sent = 0

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._scrubber.connected(None)
            connection.close()

    def read(self, offset: int, max_bytes: int) -> memoryview:
        partition = self._partition
        part = pb.FetchPartition(topic_id=partition.topic_id, partition=partition.number, offset=offset)
        request = pb.FetchRequest(max_bytes=max_bytes, partitions=[part], for_repair=True)
        try:
            connection = self._connected()
            self._sent += 1
            header = pb.RequestHeader(correlation_id=self._sent, fetch=request).SerializeToString()
            connection.send([frames.frame_start(header, 0)])
            reply = connection.receive()
        except KafkalogError:
            self.close()  # what comes later would be taken for the answer to another request
            raise
        if reply.header.HasField("error"):
            raise frames.error_from_wire(reply.header.error)
        [fetched] = reply.header.fetch.partitions
        if fetched.HasField("error"):
            raise frames.error_from_wire(fetched.error)
        if reply.body is None:
            raise CorruptBatch(partition=partition.label, offset=offset, reason="it ends before its high watermark")
        return reply.body[: fetched.length]

    def _connected(self) -> DataConnection:
        if self._connection is None:
            if self._broker is None:
                raise BrokerUnreachable(address=self.name, reason="it is not registered")
            self._connection = DataConnection(
                self._broker.host,
                self._broker.data_port,
                connect_timeout_ms=_CONNECT_TIMEOUT_MS,
                request_timeout_ms=_REQUEST_TIMEOUT_MS,
                of_replica=True,
            )
        self._scrubber.connected(self._connection)
        return self._connection


def known_damage(partition: Partition) -> Iterator[Damage]:
    """The damage that is known of a partition and not before its start."""
    view = partition.log.view
    for segment in view.segments:
        for damage in segment.damaged:
            if damage.end_offset > max(view.start_offset, damage.start_offset):
                yield damage


def _has(damage: Damage, offset: int) -> bool:
    return damage.start_offset <= offset < damage.end_offset
