"""The renewal of what is staged: one thread for all that a task stages."""

from __future__ import annotations

import contextlib
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog.client import renewal as renewal_module
from kafkalog.client.cluster import Cluster
from kafkalog.client.renewal import Renewal
from kafkalog.errors import BrokerUnreachable
from kafkalog.wire import transactions_pb2 as pb
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


class Brokers:
    """In the place of a Cluster: brokers by id, and within how many milliseconds each wants to hear again; None: it is
    away."""

    def __init__(self, within_ms: dict[int, int | None]) -> None:
        self._within_ms = within_ms
        self.asked: list[int] = []

    def describe(self, patient: bool) -> SimpleNamespace:
        return SimpleNamespace(brokers=[SimpleNamespace(broker_id=broker_id) for broker_id in self._within_ms])

    def call(self, method: str, request: pb.RenewRequest, broker_id: int, patient: bool) -> pb.RenewReply:
        self.asked.append(broker_id)
        within_ms = self._within_ms[broker_id]
        if within_ms is None:
            raise BrokerUnreachable(address=f"broker {broker_id}", reason="connection refused")
        return pb.RenewReply(renew_within_ms=within_ms)


@pytest.mark.parametrize(
    ("within_ms", "again"),
    [
        ({0: 9000, 1: 5000, 2: 7000}, 5.0),  # the least patient counts
        ({0: None, 1: 5000}, 5.0),
        ({0: None, 1: 90_000}, 60.0),  # one that is away is asked again a minute later
        ({0: 0}, 0.1),
        ({}, 60.0),
    ],
)
def test_all_brokers_are_told_whichever_is_away_and_as_often_as_the_first_wants_it(
    within_ms: dict[int, int | None], again: float
) -> None:
    brokers: Any = Brokers(within_ms)
    assert Renewal(brokers, 7)._renew({1}) == again
    assert brokers.asked == list(within_ms)


def test_transactions_that_keep_coming_put_no_renewal_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(renewal_module, "time", SimpleNamespace(monotonic=lambda: now))
    brokers: Any = Brokers({0: 30_000})
    renewal = Renewal(brokers, 7)
    arrivals = [(0.4, {1}), (0.8, {2}), (1.2, {3}), (2.0, {3}), (40.0, None)]
    renewed: list[tuple[float, set[int]]] = []

    def get(timeout: float) -> set[int] | None:
        nonlocal now
        at, news = arrivals[0]
        if at > now + timeout:
            now += timeout
            raise Empty
        now = at
        del arrivals[0]
        return news

    def renew(producer_ids: set[int]) -> float:
        renewed.append((round(now, 1), set(producer_ids)))
        return 30.0

    monkeypatch.setattr(renewal, "_news", SimpleNamespace(get=get))
    monkeypatch.setattr(renewal, "_renew", renew)
    renewal._run()
    assert renewed == [(1.4, {1, 2, 3}), (31.4, {1, 2, 3})]
