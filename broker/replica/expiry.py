"""Forgets what is over, each after its time: parts that were staged and never prepared, decisions of batch writes that
are done, and what logs know of how far transactions came.

A part that nobody prepares lives as long as its write: all parts of a write on this broker count together, those of all
topics of a numbered one, and its tasks renew them on every broker (`requests/staging.py:renew`). Ages are by the
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
from kafkalog.wire.decisions import Decision
from kafkalog.zk import decisions

log = get_logger(__name__)

_TIDY_EVERY_SECONDS = 60.0
_FORGET_EVERY_SECONDS = 600.0
_FORGET_SECONDS = 1.0
"""How long each look forgets decisions for, at most. 100,000 of them take ZooKeeper a minute."""


class Expiry:
    """Has no thread: in-doubt recovery's looks, after it did what is decided.

    Args:
        clock: the directory's steady one, for decisions are forgotten by it.
        is_stopping: whether to leave the rest to the next start.
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
        """Forget the parts of writes of which nothing was staged or renewed here for the retention, and files that hold
        nothing any more."""
        before = self._clock.monotonic() - self._retention
        renewed: dict[Write, float] = {}
        partitions = list(self._host.hosted.values())
        for partition in partitions:
            if self._is_stopping():
                return
            for staged in partition.staged():
                if staged.prepared is None:
                    renewed[staged.write] = max(renewed.get(staged.write, staged.renewed), staged.renewed)
        writes = {write for write, last in renewed.items() if last < before}
        for partition in partitions:
            try:
                expired = partition.expire(writes, before)
            except NotLeader:
                continue
            except KafkalogError as error:
                log.warning("staged_parts_not_expired", partition=partition.label, reason=str(error))
            else:
                if expired:
                    log.info("staged_parts_expired", partition=partition.label, parts=expired)

    def forget_decisions(self) -> None:
        """Every ten minutes: decisions of batch writes that are long done, as many as the time of one look allows, and
        the rest with the next looks. Every broker does so."""
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
        """Every minute: how far transactions came in logs that are long over."""
        now = self._clock.monotonic()
        if now < self._tidy_at:
            return
        self._tidy_at = now + _TIDY_EVERY_SECONDS
        for partition in list(self._host.hosted.values()):
            if self._is_stopping():
                return
            try:
                partition.forget_silent_transactions()
            except KafkalogError:
                continue  # it was closed meanwhile, or its directory is out of service
