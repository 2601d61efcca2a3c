"""What tests of the Spark format share: clients of the cluster, and a topic's records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Message, Producer
from pyspark_kafkalog.write import at_least_once
from tests.pyspark_kafkalog.live import Live
from tests.reading import all_messages


@pytest.fixture(scope="session")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def options(cluster: LocalCluster, topic: str) -> dict[str, str]:
    """A write's options; the topic is not made."""
    return {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": topic}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Producer]]:
    """The producers that this process keeps for its next task: none before a test, none after it."""
    producers: dict[Any, Producer] = {}
    monkeypatch.setattr(at_least_once, "_producers", producers)
    yield producers
    for producer in producers.values():
        producer.close()


@pytest.fixture
def messages_in(cluster: LocalCluster) -> Callable[[str], list[Message]]:
    """Every record of a topic, partition by partition."""
    return partial(all_messages, cluster.bootstrap_servers)


@pytest.fixture(scope="package")
def clients(cluster: LocalCluster, admin: Admin) -> Iterator[tuple[Admin, Producer]]:
    with Producer(cluster.bootstrap_servers, linger_ms=0) as producer:
        yield admin, producer


@pytest.fixture
def live(cluster: LocalCluster, clients: tuple[Admin, Producer], new_topic: Callable[[], str]) -> Live:
    return Live(cluster.bootstrap_servers, *clients, new_topic)
