"""The renewal of what is staged: one thread for all that a task stages."""

from __future__ import annotations

import contextlib
from typing import Any

from broker.local import LocalCluster
from kafkalog.client.cluster import Cluster
from kafkalog.client.renewal import Renewal
from tests.waiting import waited_for


def test_a_transaction_that_is_added_late_is_renewed_at_once_with_the_others(cluster: LocalCluster) -> None:
    with contextlib.closing(Cluster(cluster.bootstrap_servers)) as client:
        spied: Any = client
        call, renewed = spied.call, []

        def seen(method: str, request: Any, **more: Any) -> Any:
            reply = call(method, request, **more)
            if method == "Renew":
                renewed.append((set(request.producer_ids), request.batch_id))
            return reply

        spied.call = seen
        renewal = Renewal(client, 7)
        renewal.start()
        try:
            renewal.add({1})
            waited_for(lambda: renewed == [({1}, 7)])  # again in six hours
            renewal.add({1})
            renewal.add({2, 3})
            waited_for(lambda: renewed == [({1}, 7), ({1, 2, 3}, 7)])
        finally:
            renewal.stop()
        renewal._thread.join(30)
        assert not renewal._thread.is_alive()
