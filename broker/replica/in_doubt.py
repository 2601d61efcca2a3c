"""In-doubt recovery: applies or drops the sets prepared on this broker as their decisions in ZooKeeper say, without a
coordinator. It records in an open decision which of its partitions have applied it; the broker that adds the last
partition writes the decision done, because the coordinator may have ended.

One thread looks every few seconds, and at once after a start and when ZooKeeper comes back. A set younger than
`_LEFT_TO_COORDINATOR_SECONDS` is left to its coordinator, except after a start. Ages are by the monotonic clock.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from broker.config import BrokerSettings
from broker.replica.applier import Applied
from broker.replica.expiry import Expiry
from broker.replica.host import Host
from broker.replica.jobs import StagedJobs
from broker.replica.partition import Partition
from broker.staging.format import PreparedSet
from broker.staging.staging import Staged
from kafkalog.clock import Clock
from kafkalog.errors import (
    BrokerStopping,
    DecisionMoved,
    KafkalogError,
    NotLeader,
    UnknownTopicId,
    ZooKeeperUnreachable,
)
from kafkalog.events import get_logger
from kafkalog.format.decisions import DecidedTopic, Decision, with_applied
from kafkalog.zk import decisions, registry

log = get_logger(__name__)

_EVERY_SECONDS = 5.0
_LEFT_TO_COORDINATOR_SECONDS = 10.0

_Key = tuple[bytes, int, bytes]
"""Topic id, partition and commit uuid: a prepared set."""


class Resolution(enum.Enum):
    """The action for a prepared set."""

    WAIT = "wait"
    APPLY = "apply"
    DROP = "drop"


def resolution(decision: Decision, prepared: PreparedSet, topic_id: bytes, partition: int) -> Resolution:
    """The action for a prepared set by the decision. While the znode has the version at which the set was prepared, the
    coordinator may still decide for it."""
    if decision.version <= prepared.version or decision.batch_id < prepared.batch_id:
        return Resolution.WAIT
    if decision.batch_id > prepared.batch_id or decision.commit_uuid != prepared.commit_uuid:
        return Resolution.DROP
    # A partition that has reported the batch has it durably, also if its leader does not know so any more: a replica
    # that began anew under a leader of an older version got no apply progress.
    if decision.done or decision.has_applied(topic_id, partition):
        return Resolution.DROP
    return Resolution.APPLY if decision.has(topic_id, partition) else Resolution.WAIT


class InDoubtRecovery:
    """The thread. `start` after the host, `stop` before it stops.

    Args:
        clock: the directory's steady clock, which decides when decisions are forgotten.

    Attributes:
        expiry: called by the thread after each look.
    """

    def __init__(self, host: Host, settings: BrokerSettings, clock: Clock, jobs: StagedJobs) -> None:
        self._host = host
        self._jobs = jobs
        self._clock = clock
        self._timeout = settings.transaction_timeout_ms / 1000
        self.expiry = Expiry(host, settings, clock, lambda: self._stopping)
        self._changed = threading.Condition()  # guards _stopping and _all; also notified when a job ends
        self._stopping = False
        self._all = True  # look at young sets too
        self._logged: dict[_Key, str] = {}  # sets that could not be resolved, with the logged reason
        self._not_closed: dict[str, str] = {}  # transactions whose decision was not written, with the logged reason
        self._thread = threading.Thread(target=self._run, name="in-doubt", daemon=True)

    def start(self) -> None:
        self._host.metadata.session.on_state(self._state_changed)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for an apply, which ends when its log is closed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _state_changed(self, connected: bool, session_is_new: bool) -> None:
        if connected:
            with self._changed:
                self._all = True
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._all, _EVERY_SECONDS)
                if self._stopping:
                    return
                look_at_all, self._all = self._all, False
            try:
                self.look(0 if look_at_all else _LEFT_TO_COORDINATOR_SECONDS)
            except ZooKeeperUnreachable as error:
                log.info("transactions_not_resolved", reason=str(error))  # the return of ZooKeeper wakes this thread
            except Exception:
                log.exception("transactions_not_resolved")

    def look(self, least_age: float) -> None:
        """`resolve`, and forget what is over, of which most needs no ZooKeeper."""
        try:
            self.resolve(least_age)
        finally:
            self.expiry.look()

    def resolve(self, least_age: float) -> None:
        """One round over all partitions' sets that were prepared at least `least_age` seconds ago. Raises
        ZooKeeperUnreachable."""
        now = self._clock.monotonic()
        known: dict[str, Decision] = {}
        failed: dict[_Key, str] = {}
        not_closed: dict[str, str] = {}
        applied: dict[str, set[tuple[bytes, int]]] = {}
        for partition in list(self._host.hosted.values()):
            for staged in partition.staged.all() if partition.role.leads else ():
                if self._stopping:
                    return
                if staged.prepared is not None and now - staged.renewed >= least_age:
                    try:
                        if self._resolve(partition, staged, staged.prepared, known, now):
                            name = staged.prepared.transactional_id
                            applied.setdefault(name, set()).add((partition.topic_id, partition.number))
                    except ZooKeeperUnreachable:
                        raise
                    except BrokerStopping:
                        return
                    except NotLeader:
                        break  # it was closed meanwhile
                    except Exception as error:  # it must not stop the resolution of other sets
                        failed[partition.topic_id, partition.number, staged.prepared.commit_uuid] = str(error)
                        self._log(partition, staged.prepared, error)
        for decision in [known[name] for name in applied if name in known]:
            try:
                self._add_applied(decision, applied[decision.transactional_id])
            except ZooKeeperUnreachable:
                raise
            except KafkalogError as error:  # such as a decision too large for a znode
                name, reason = decision.transactional_id, str(error)
                not_closed[name] = reason
                if self._not_closed.get(name) != reason:
                    log.warning("transaction_not_closed", transactional_id=name, reason=reason)
        self._logged, self._not_closed = failed, not_closed

    def _log(self, partition: Partition, prepared: PreparedSet, error: Exception) -> None:
        """Log that a set could not be resolved, once for each reason, because it is tried every few seconds."""
        if self._logged.get((partition.topic_id, partition.number, prepared.commit_uuid)) == str(error):
            return
        tell = log.warning if isinstance(error, KafkalogError) else log.exception
        tell("transaction_not_resolved", partition=partition.label, transactional_id=prepared.transactional_id,
             batch_id=prepared.batch_id, commit=prepared.commit_uuid.hex(), reason=str(error))  # fmt: skip

    def _resolve(
        self, partition: Partition, staged: Staged, prepared: PreparedSet, known: dict[str, Decision], now: float
    ) -> bool:
        """Resolve a set by its decision; returns whether the partition durably has all of an open decision's batch."""
        name = prepared.transactional_id
        if name not in known:
            known[name] = decisions.read_decision(self._host.metadata.session, name)
        decision = known[name]
        what = resolution(decision, prepared, partition.topic_id, partition.number)
        version = decision.version
        if what is Resolution.WAIT:
            if now - staged.renewed < self._timeout:
                return False
            if version <= prepared.version:
                # From now on its coordinator cannot decide for it without preparing it again.
                try:
                    version = decisions.raise_version(self._host.metadata.session, decision)
                except DecisionMoved:
                    return False  # the next round looks again
                del known[name]
        if what is Resolution.APPLY:
            batch = name, prepared.producer_id, prepared.batch_id, prepared.commit_uuid
            applied: Applied = self._done(partition, prepared.commit_uuid, partial(partition.staged.apply, *batch))
            partition.staged.finish_apply(applied)
            ack = partition.staged.ack_of_apply(applied)
            if ack is not None and not ack.is_kept():
                return False  # the next round asks again
            if not applied.batches:
                return True
        else:
            key = "drop", prepared.commit_uuid, version
            if not self._done(partition, key, partial(partition.staged.drop, prepared.commit_uuid, version)):
                return False
        log.info(
            "transaction_resolved",
            partition=partition.label,
            transactional_id=name,
            batch_id=prepared.batch_id,
            commit=prepared.commit_uuid.hex(),
            done="applied" if what is Resolution.APPLY else "dropped",
        )
        return what is Resolution.APPLY

    def _add_applied(self, decision: Decision, places: Collection[tuple[bytes, int]]) -> None:
        """Add partitions to those that have a decided batch. A partition of a deleted topic counts as having it."""
        gone = {topic.topic_id for topic in decision.topics if self._is_deleted(topic)}
        updated = with_applied(decision, lambda topic_id, number: (topic_id, number) in places or topic_id in gone)
        if updated == decision:
            return
        try:
            decisions.write_decision(
                self._host.metadata.session, replace(updated, decided_us=self._host.clock.now_us())
            )
        except DecisionMoved:
            return  # the next round looks again
        if updated.done:
            log.info("transaction_done", transactional_id=decision.transactional_id, batch_id=decision.batch_id)

    def _is_deleted(self, topic: DecidedTopic) -> bool:
        try:
            self._host.metadata.topic_by_id(topic.topic_id)
            return False
        except UnknownTopicId:  # deleted, or not seen here yet; a broker that sees the decision can see its topics
            found = registry.read_topic(self._host.metadata.session, topic.topic)
            return found is None or found.deleted or found.topic_id != topic.topic_id

    def _done(self, partition: Partition, key: Hashable, work: Callable[[], Any]) -> Any:
        """Do work on a partition as a job, and return its result: requests then see that the partition is busy, and do
        not begin the same apply again. Raises BrokerStopping."""
        job = self._jobs.applies.ask(partition, key, work)
        job.when_over(self._look_again)
        with self._changed:
            self._changed.wait_for(lambda: job.is_over or self._stopping)
        if not job.is_over:
            raise BrokerStopping(broker_id=self._host.broker_id)
        return job.result()

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()
