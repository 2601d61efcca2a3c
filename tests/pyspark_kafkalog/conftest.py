"""What tests of the Spark format share: clients of the cluster, and a topic's records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from tests.pyspark_kafkalog.live import Live


@pytest.fixture(scope="session")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def options(cluster: LocalCluster, topic: str) -> dict[str, str]:
    """A write's options; the topic is not made."""
    return {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": topic}


@pytest.fixture
def messages_in(cluster: LocalCluster, admin: Admin) -> Callable[[str], list[Message]]:
    """Every record of a topic, partition by partition."""

    def messages(topic: str) -> list[Message]:
        partitions = [TopicPartition(topic, each.partition) for each in admin.describe_topics([topic])[0].partitions]
        ends = {
            partition: each.offset or 0
            for partition, each in admin.list_offsets(dict.fromkeys(partitions, "latest")).items()
        }
        with Consumer(cluster.bootstrap_servers) as consumer:
            consumer.assign(dict.fromkeys(partitions, "earliest"))
            found = list(consumer.messages(max_messages=sum(ends.values()), timeout=60))
        return sorted(found, key=lambda message: (message.partition, message.offset))

    return messages


@pytest.fixture(scope="package")
def clients(cluster: LocalCluster, admin: Admin) -> Iterator[tuple[Admin, Producer]]:
    with Producer(cluster.bootstrap_servers, linger_ms=0) as producer:
        yield admin, producer


@pytest.fixture
def live(cluster: LocalCluster, clients: tuple[Admin, Producer], new_topic: Callable[[], str]) -> Live:
    return Live(cluster.bootstrap_servers, *clients, new_topic)
