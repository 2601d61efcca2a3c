"""The renewal of what is staged: one thread for all that a task stages."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client.transaction.renewal import Renewal
from kafkalog.errors import BrokerUnreachable, Closed
from kafkalog.wire import transactions_pb2 as pb
from tests.threads import NoThreads


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
    assert Renewal(brokers, 1, 7)._renew() == again
    assert brokers.asked == list(within_ms)


def test_without_a_thread_nothing_fails_and_a_later_start_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers: Any = Brokers({})
    machine = NoThreads(monkeypatch, lambda name: name == "staged-renewal")
    renewal = Renewal(brokers, 1, 7)
    renewal.start()
    renewal.start()
    assert len(machine.refused) == 2
    machine.on = False
    for _ in range(2):  # it is started once
        renewal.start()
    assert renewal._thread.is_alive()
    renewal.stop()
    renewal._thread.join(30)
    assert not renewal._thread.is_alive()


@pytest.mark.parametrize("where", ["describe", "call"])
def test_a_closed_cluster_ends_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(1)

    def closed(*_: object, **__: object) -> None:
        assert next(calls) == 1, "asked again"
        raise Closed(what="Cluster")

    brokers: Any = Brokers({0: 100})
    monkeypatch.setattr(brokers, where, closed)
    monkeypatch.setattr("kafkalog.client.transaction.renewal._AT_FIRST_SECONDS", 0)
    monkeypatch.setattr("kafkalog.client.transaction.renewal._AGAIN_SECONDS", 0)
    Renewal(brokers, 1, 7)._run()
    assert next(calls) == 2
