"""Forgets old data, each kind after its own time: parts that were staged and never prepared, decisions of batch writes
that are done, and the apply progress of old transactions in logs.

An unprepared part lives as long as its write. All parts of a write on this broker count together, for a numbered write
those of all its topics, and the write's tasks renew them on every broker (`requests/staging.py:renew`). Ages are by the
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from broker.config import BrokerSettings
from broker.replica.host import Host
from broker.staging.part import Write
from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError, NotLeader
from kafkalog.events import get_logger
from kafkalog.format.decisions import Decision
from kafkalog.zk import decisions

log = get_logger(__name__)

_TIDY_EVERY_SECONDS = 60.0
_FORGET_EVERY_SECONDS = 600.0
_FORGET_SECONDS = 1.0
"""How long each look forgets decisions for, at most. 100,000 of them take ZooKeeper a minute."""


class Expiry:
    """Has no thread: the thread of in-doubt recovery calls `look` after each of its rounds.

    Args:
        clock: the directory's steady clock, which decides when decisions are forgotten.
        is_stopping: returns whether to leave the rest to the next start.
    """

    def __init__(self, host: Host, settings: BrokerSettings, clock: Clock, is_stopping: Callable[[], bool]) -> None:
        self._host = host
        self._clock = clock
        self._is_stopping = is_stopping
        self._retention = settings.transaction_staged_retention_ms / 1000
        self._tidy_at = 0.0
        self._forget_at = 0.0
        self._forgetting: Iterator[list[Decision]] = iter(())

    def look(self) -> None:
        """One round. Raises ZooKeeperUnreachable, after all that needs no ZooKeeper."""
        self.forget_parts()
        self._forget_progress()
        self.forget_decisions()

    def forget_parts(self) -> None:
        """Forget the parts of writes that were neither staged nor renewed here within the retention, and remove files
        without needed data."""
        before = self._clock.monotonic() - self._retention
        renewed: dict[Write, float] = {}
        partitions = list(self._host.hosted.values())
        for partition in partitions:
            if self._is_stopping():
                return
            for staged in partition.staged.all():
                if staged.prepared is None:
                    renewed[staged.write] = max(renewed.get(staged.write, staged.renewed), staged.renewed)
        writes = {write for write, last in renewed.items() if last < before}
        for partition in partitions:
            try:
                expired = partition.staged.expire(writes, before)
            except NotLeader:
                continue
            except KafkalogError as error:
                log.warning("staged_parts_not_expired", partition=partition.label, reason=str(error))
            else:
                if expired:
                    log.info("staged_parts_expired", partition=partition.label, parts=expired)

    def forget_decisions(self) -> None:
        """Every ten minutes, forget decisions of batch writes that are long done: as many as the time of one look
        allows, and the rest in the next looks. Every broker does so."""
        now = self._clock.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + _FORGET_EVERY_SECONDS
            self._forgetting = decisions.forget_expired(self._host.metadata.session, self._clock.now_us())
        for forgotten in self._forgetting:
            if forgotten:
                log.info("transactions_forgotten", count=len(forgotten))
            if self._is_stopping() or self._clock.monotonic() - now > _FORGET_SECONDS:
                break

    def _forget_progress(self) -> None:
        """Every minute, forget the apply progress of transactions that ended long ago."""
        now = self._clock.monotonic()
        if now < self._tidy_at:
            return
        self._tidy_at = now + _TIDY_EVERY_SECONDS
        for partition in list(self._host.hosted.values()):
            if self._is_stopping():
                return
            try:
                partition.staged.forget_silent()
            except KafkalogError:
                continue  # closed meanwhile, or its directory is out of service
