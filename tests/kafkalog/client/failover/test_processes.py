"""Brokers that are processes, ended by SIGKILL: a producer and a reader over failovers, and the end of all."""

from __future__ import annotations

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from tests.kafkalog.client.failover.test_reading import Reading, assigned
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending, leader_of
from tests.kafkalog.replicated import wait_in_sync

pytestmark = pytest.mark.timeout(180)


def test_killed_leaders_and_then_all_brokers_at_once_lose_double_and_reorder_nothing() -> None:
    soon = {"zookeeper.session.timeout.ms": 2000}
    with LocalCluster(brokers=3, settings=soon) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS)
        reading = Reading(assigned, cluster.bootstrap_servers)
        with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with Sending(producer, "t") as sending:
                sending.wait_for_more()
                for number in (0, 1):
                    leader = leader_of(admin, "t", number)
                    cluster.brokers[leader].kill()
                    sending.wait_for_more()
                    cluster.brokers[leader].start()
                    wait_in_sync(admin, "t")
                for broker in cluster.brokers:
                    broker.kill()
                for broker in cluster.brokers:
                    broker.start()
                sending.wait_for_more()
            producer.flush()
        assert sending.failures == []
        reading.wait_for(sending.sent)
        reading.end()
    assert reading.found == [
        [b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)
    ]
