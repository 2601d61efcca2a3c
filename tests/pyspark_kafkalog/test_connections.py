"""A process's connections are made once for each cluster and its settings, and a forked child has its own."""

from __future__ import annotations

import os

from kafkalog.client.config import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from pyspark_kafkalog.connections import cluster_of

SERVERS = "127.0.0.1:1"


def test_they_are_shared_by_what_connects_alike_whatever_else_it_sets() -> None:
    first = cluster_of(SERVERS, PRODUCER_SETTINGS.parse({"linger.ms": "7", "retry.timeout.ms": "100"}))
    assert cluster_of(SERVERS, CONSUMER_SETTINGS.parse({"retry.timeout.ms": "100"})) is first
    assert cluster_of(SERVERS, CONSUMER_SETTINGS.parse({"retry.timeout.ms": "101"})) is not first
    assert cluster_of("127.0.0.1:2", CONSUMER_SETTINGS.parse({"retry.timeout.ms": "100"})) is not first


def test_a_forked_child_has_its_own() -> None:
    settings = CONSUMER_SETTINGS.parse({})
    parents = cluster_of(SERVERS, settings)
    child = os.fork()
    if child == 0:
        os._exit(cluster_of(SERVERS, settings) is parents)
    assert os.waitpid(child, 0)[1] == 0
