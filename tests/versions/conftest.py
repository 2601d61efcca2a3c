"""Three brokers inside the test process, and three that are processes."""

from __future__ import annotations

from tests.broker.conftest import chroot, start_broker
from tests.kafkalog.conftest import brokers

__all__ = ["brokers", "chroot", "start_broker"]
