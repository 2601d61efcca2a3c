"""Keeps a write's staged parts alive while one of its tasks runs.

Brokers drop parts that were staged and never prepared, `transaction.staged.retention.ms` after they last heard of their
write. Parts that a task staged in the first minutes of a long write have to live until the commit. Meanwhile the other
tasks may stage only to other topics, partitions and brokers, or have no rows yet. So every task renews the whole write,
on all brokers, by the family of its transactions (`format/producer_ids.py`): first after a second, which most tasks do
not last, then as often as the brokers request. This needs a thread, because a task may wait for its rows for hours.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from kafkalog.client.cluster import Cluster
from kafkalog.errors import Closed, KafkalogError
from kafkalog.events import get_logger
from kafkalog.net.main_thread import Signal
from kafkalog.wire import transactions_pb2 as pb

log = get_logger(__name__)

_AT_FIRST_SECONDS = 1.0
_AGAIN_SECONDS = 60.0
_AT_LEAST_SECONDS = 0.1


class Renewal:
    """Renews a write from `start` to `stop`, or until the cluster is closed. A renewal that fails is tried again a
    minute later.

    Args:
        family: of the producer ids of the write's transactions.
        batch_id: of their batches.
    """

    def __init__(self, cluster: Cluster, family: int, batch_id: int) -> None:
        self._cluster = cluster
        self._request = pb.RenewRequest(family=family, batch_id=batch_id)
        self._stopped = Signal()
        self._is_short = False
        self._thread = threading.Thread(target=self._run, name="staged-renewal", daemon=True)

    def start(self) -> None:
        """Start, unless it was started. If no thread can be started now, a later call tries again: young parts need no
        renewal."""
        if self._thread.ident is not None:
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            if not self._is_short:  # once, however often it is called
                log.warning("thread_not_started", thread=self._thread.name, reason=str(error))
            self._is_short = True

    def stop(self) -> None:
        """Make no more renewals. Does not wait for one in flight."""
        self._stopped.set()

    def _run(self) -> None:
        pause = _AT_FIRST_SECONDS
        with suppress(Closed):
            while not self._stopped.wait(pause):
                pause = self._renew()

    def _renew(self) -> float:
        """Ask every broker; returns the seconds until the next renewal."""
        try:
            brokers = self._cluster.describe(patient=False).brokers
        except Closed:
            raise
        except KafkalogError:
            return _AGAIN_SECONDS
        return min((self._renew_at(broker.broker_id) for broker in brokers), default=_AGAIN_SECONDS)

    def _renew_at(self, broker_id: int) -> float:
        try:
            reply: pb.RenewReply = self._cluster.call("Renew", self._request, broker_id=broker_id, patient=False)
        except Closed:
            raise
        except KafkalogError as error:
            log.debug("staged_not_renewed", broker_id=broker_id, reason=str(error))
            return _AGAIN_SECONDS
        return max(reply.renew_within_ms / 1000, _AT_LEAST_SECONDS)
