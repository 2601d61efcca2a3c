"""A link to a leader: how it reports one that stays away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.replica.follower import _Link
from kafkalog.clock import SYSTEM_CLOCK
from tests.waiting import waited_for


class _Registered(dict[int, object]):
    """No broker is registered; counts how often one was looked up."""

    looked_up = 0

    def get(self, key: int, default: object = None) -> object:
        self.looked_up += 1
        return default


def test_a_leader_that_stays_away_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="broker.replica.follower")
    registered = _Registered()
    fetcher = cast(Any, SimpleNamespace(leader_id=7, has_replicas=True))
    link = _Link(fetcher, cast(Any, SimpleNamespace(brokers=registered)), SYSTEM_CLOCK)
    link.start()
    try:
        waited_for(lambda: registered.looked_up > 3)
    finally:
        link.stop()
        link.join()
    [said] = [record.getMessage() for record in caplog.records]
    assert "replica_link_interrupted" in said and "broker 7" in said
