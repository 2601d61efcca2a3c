"""Keeps what is staged of a write alive while one of its tasks runs.

Brokers throw away what was staged and never prepared, a time after they last heard of its write
(`transaction.staged.retention.ms`). Parts that a task staged in the first minutes of a long write have to live until
the commit, and other tasks may stage to other partitions and brokers only. So every task renews the whole write, on
all brokers: first after a second, which most tasks do not last, then as often as the brokers say. It is a thread, for a
task may wait for its rows for hours.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from kafkalog.client.cluster import Cluster
from kafkalog.errors import KafkalogError
from kafkalog.log import get_logger
from kafkalog.wire import transactions_pb2 as pb

log = get_logger(__name__)

_AT_FIRST_SECONDS = 1.0
_AGAIN_SECONDS = 60.0
_AT_LEAST_SECONDS = 0.1


class Renewal:
    """Renews transactions' batches of one number, from `start` to `stop`. A renewal that fails is tried again a minute
    later."""

    def __init__(self, cluster: Cluster, batch_id: int) -> None:
        self._cluster = cluster
        self._batch_id = batch_id
        self._news: SimpleQueue[set[int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="staged-renewal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, producer_ids: set[int]) -> None:
        """Renew the batches of these transactions as well, first within a second."""
        self._news.put(producer_ids)

    def stop(self) -> None:
        """No more renewals. One that is on its way is not waited for."""
        self._news.put(None)

    def _run(self) -> None:
        renewed: set[int] = set()
        due = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                added = self._news.get(timeout=max(due - time.monotonic(), 0))
            except Empty:
                due = time.monotonic() + self._renew(renewed)
                continue
            if added is None:
                return
            if not added <= renewed:
                renewed |= added
                due = min(due, time.monotonic() + _AT_FIRST_SECONDS)

    def _renew(self, producer_ids: set[int]) -> float:
        """Ask every broker; the seconds until the next time."""
        request = pb.RenewRequest(producer_ids=producer_ids, batch_id=self._batch_id)
        within: list[float] = []
        with suppress(KafkalogError):
            brokers = self._cluster.describe(patient=False).brokers
            within = [self._renew_at(broker.broker_id, request) for broker in brokers]
        return min(within, default=_AGAIN_SECONDS)

    def _renew_at(self, broker_id: int, request: pb.RenewRequest) -> float:
        try:
            reply = self._cluster.call("Renew", request, broker_id=broker_id, patient=False)
        except KafkalogError as error:
            log.debug("staged_not_renewed", broker_id=broker_id, reason=str(error))
            return _AGAIN_SECONDS
        return max(reply.renew_within_ms / 1000, _AT_LEAST_SECONDS)
