"""A client of the shared cluster for the tests of the Spark format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from tests.pyspark_kafkalog.live import Live


@pytest.fixture(scope="package")
def clients(cluster: LocalCluster) -> Iterator[tuple[Admin, Producer]]:
    with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers, linger_ms=0) as producer:
        yield admin, producer


@pytest.fixture
def live(cluster: LocalCluster, clients: tuple[Admin, Producer], new_topic: Callable[[], str]) -> Live:
    return Live(cluster.bootstrap_servers, *clients, new_topic)
