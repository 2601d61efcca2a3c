"""Whom a consumer's fetching asks, and for how long it tries: over leaders that change as the test says. Over real
brokers it is in `test_consumer.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client import session
from kafkalog.client.config import CONSUMER_SETTINGS
from kafkalog.client.session import FetchSession, Source
from kafkalog.errors import BrokerUnreachable
from kafkalog.records import TopicPartition

TOPIC_ID = b"t" * 16


class Unreachable:
    """A cluster of which no broker can be reached; `leader_id` leads."""

    leader_id = 1

    def topic(self, name: str, *, patient: bool) -> SimpleNamespace:
        return SimpleNamespace(topic_id=TOPIC_ID)

    def leader(self, topic: object, number: int) -> SimpleNamespace:
        return SimpleNamespace(broker_id=self.leader_id)

    def connect_data(self, broker_id: int) -> None:
        raise BrokerUnreachable(address=f"broker {broker_id}", reason="connection refused")

    def refresh(self, names: object, *, patient: bool) -> None:
        """Always known."""


def test_a_leader_that_failed_before_another_led_is_tried_as_long_as_one_that_never_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now))
    cluster: Any = Unreachable()
    fetching = FetchSession(cluster, CONSUMER_SETTINGS.parse({"retry.timeout.ms": 1000}))
    fetching.sources = [Source(TopicPartition("t", 0), TOPIC_ID, 0)]
    for leader_id, now in ((1, 0.0), (2, 0.9), (1, 1.8), (1, 2.7)):  # noqa: B007
        cluster.leader_id = leader_id
        fetching._ask_all()
    now = 3.6
    with pytest.raises(BrokerUnreachable, match="broker 1"):
        fetching._ask_all()
    fetching.close()
