"""Keeps what is staged of a write alive while one of its tasks runs.

Brokers throw away what was staged and never prepared, a time after they last heard of its write
(`transaction.staged.retention.ms`). Parts that a task staged in the first minutes of a long write have to live until
the commit, and other tasks may stage to other partitions and brokers only. So every task renews the whole write, on
all brokers: first after a second, which most tasks do not last, then as often as the brokers say. It is a thread, for a
task may wait for its rows for hours.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from kafkalog.client.cluster import Cluster
from kafkalog.errors import KafkalogError
from kafkalog.log import get_logger
from kafkalog.wire import transactions_pb2 as pb

log = get_logger(__name__)

_AT_FIRST_SECONDS = 1.0
_AGAIN_SECONDS = 60.0
_AT_LEAST_SECONDS = 0.1


class Renewal:
    """Renews a transaction's batch from `start` to `stop`. A renewal that fails is tried again a minute later."""

    def __init__(self, cluster: Cluster, producer_id: int, batch_id: int) -> None:
        self._cluster = cluster
        self._request = pb.RenewRequest(producer_id=producer_id, batch_id=batch_id)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="staged-renewal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more renewals. One that is on its way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        seconds = _AT_FIRST_SECONDS
        while not self._stopped.wait(seconds):
            seconds = self._renew()

    def _renew(self) -> float:
        """Ask every broker; the seconds until the next time."""
        within: list[float] = []
        with suppress(KafkalogError):
            within = [self._renew_at(broker.broker_id) for broker in self._cluster.describe(patient=False).brokers]
        return min(within, default=_AGAIN_SECONDS)

    def _renew_at(self, broker_id: int) -> float:
        try:
            reply = self._cluster.call("Renew", self._request, broker_id=broker_id, patient=False)
        except KafkalogError as error:
            log.debug("staged_not_renewed", broker_id=broker_id, reason=str(error))
            return _AGAIN_SECONDS
        return max(reply.renew_within_ms / 1000, _AT_LEAST_SECONDS)
