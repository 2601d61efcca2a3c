"""Waiting for memory and for acks."""

from __future__ import annotations

import math
import threading

import pytest

from kafkalog.client.batcher import Batch, PartitionQueue
from kafkalog.client.config import LONG_MAX
from kafkalog.client.outbox import Outbox
from kafkalog.records import TopicPartition

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("wait_for", ["room", "acks"])
def test_waits_of_any_length_are_taken(wait_for: str) -> None:
    outbox = Outbox(1000, LONG_MAX, "here:1", lambda queue: None)
    queue = PartitionQueue(
        TopicPartition("t", 0),
        b"i" * 16,
        idempotent=False,
        window=1,
        delivery_timeout_ms=LONG_MAX,
        backoff=1.0,
        backoff_max=1.0,
    )
    batch = Batch(queue, 0.0, math.inf)
    batch.charged = outbox.buffered = 1000
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            with outbox.lock:
                if wait_for == "room":
                    outbox.wait_for_room(10)
                else:
                    outbox.wait_done([batch], 1e300, "a batch")
            ended.append(None)
        except Exception as error:  # for the test's thread
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    poll = threading.Event()
    while not (outbox._blocked or batch.awaited) and waiting.is_alive():
        poll.wait(0.001)
    with outbox.lock:
        outbox.finish([(batch, None)])
    waiting.join(30)
    assert ended == [None]
