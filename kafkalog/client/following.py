"""Which brokers have followed a change of a topic. Only each broker itself knows, so each is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.errors import KafkalogError
from kafkalog.wire import broker_pb2 as pb

FOLLOWED_SECONDS = 10.0
"""How long a change of a topic waits for its brokers."""
_ASK_AGAIN_SECONDS = 0.1


def brokers_behind(
    cluster: Cluster,
    topic_id: bytes,
    brokers: Collection[int],
    has_followed: Callable[[pb.TopicDescription], bool],
    until: float,
    *,
    was_seen: bool,
) -> tuple[int, ...]:
    """Those of some brokers that have not followed a change of a topic by a time, by the monotonic clock. The change is
    made, so no failure is raised. Brokers that are not live are not waited for.

    Args:
        has_followed: whether the broker that gives this description has.
        was_seen: the broker that made the change knows the topic: if no broker knows it, it was deleted since.
    """
    behind = set(brokers)
    describing = in_background(partial(cluster.describe, patient=False), here_if_need_be=True)
    wait([describing], max(0.0, until - time.monotonic()))
    if not describing.done() or describing.exception() is not None:
        return tuple(sorted(behind))
    live = {broker.broker_id for broker in describing.result().brokers}
    request = pb.DescribeTopicsRequest(ids=[topic_id])
    asked: dict[int, Future[Any]] = {}
    knows: dict[int, bool] = {}  # by broker, whether its last answer had the topic
    to_ask = live
    while True:
        for broker_id in to_ask - asked.keys():
            asked[broker_id] = cluster.begin("DescribeTopics", request, broker_id)
        wait(asked.values(), max(0.0, until - time.monotonic()), FIRST_COMPLETED)
        for broker_id in [each for each, call in asked.items() if call.done()]:
            call = asked.pop(broker_id)
            if isinstance(call.exception(), KafkalogError):
                continue
            [seen] = call.result().topics
            is_there = not seen.HasField("error")
            if has_followed(seen) or (knows.get(broker_id) and not is_there):  # it was deleted meanwhile
                behind.discard(broker_id)
            knows[broker_id] = is_there
        if was_seen and knows.keys() == live and not any(knows.values()):
            behind.clear()
        to_ask = live & behind
        if not to_ask or time.monotonic() >= until:
            return tuple(sorted(behind))
        if to_ask - asked.keys():
            cluster.pause(_ASK_AGAIN_SECONDS)  # brokers notify no client that they have followed
