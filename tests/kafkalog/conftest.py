"""Three brokers inside the test process, for what clients do while brokers are killed."""

from __future__ import annotations

import pytest

from tests.broker.conftest import StartBroker, chroot, start_broker
from tests.kafkalog.replicated import Brokers

__all__ = ["chroot", "start_broker"]


@pytest.fixture
def brokers(start_broker: StartBroker) -> Brokers:
    return Brokers(start_broker)
