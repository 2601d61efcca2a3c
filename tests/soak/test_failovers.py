"""Failovers, many and timed: a stream runs through all of them, and writes go on within the time that is promised."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.errors import KafkalogError
from kafkalog.wire import broker_pb2 as pb
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending, leader_of, values
from tests.kafkalog.replicated import wait_in_sync
from tests.pyspark_kafkalog.test_failover import run_through
from tests.waiting import suspend, waited_for

pytestmark = [pytest.mark.java, pytest.mark.timeout(1800)]
SESSION_TIMEOUT_MS = 3000
WITHIN_SECONDS = 5.0


def leads_nothing(admin: Admin, topic: str, broker_id: int) -> bool:
    """Whether a broker that was away has learned that it leads nothing."""
    try:
        reply = admin._cluster.call("DescribeTopics", pb.DescribeTopicsRequest(names=[topic]), broker_id=broker_id)
    except KafkalogError:
        return False
    return all(each.leader != broker_id for each in reply.topics[0].partitions)


def test_a_stream_runs_through_twenty_failovers(spark: SparkSession, tmp_path: Path) -> None:
    run_through(spark, tmp_path / "checkpoint", failovers=20)


@pytest.mark.parametrize("how", ["killed", "suspended"])
def test_writes_go_on_soon_after_a_leader_is_gone_and_nothing_acknowledged_is_lost(how: str) -> None:
    """A suspended leader wakes when another leads: it must not acknowledge anything then."""
    settings = {"zookeeper.session.timeout.ms": SESSION_TIMEOUT_MS}
    taken = []
    with LocalCluster(brokers=3, settings=settings) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS)
        with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with Sending(producer, "t") as sending:
                sending.wait_for_more()
                for number in range(6):
                    leader = leader_of(admin, "t", number % PARTITIONS)
                    broker = cluster.brokers[leader]
                    begun = time.monotonic()
                    if how == "killed":
                        broker.kill()
                    else:
                        assert broker.pid is not None
                        suspend(broker.pid)
                    try:
                        sending.wait_for_more()
                        taken.append(time.monotonic() - begun)
                    finally:
                        if how == "suspended" and broker.pid is not None:
                            os.kill(broker.pid, signal.SIGCONT)
                    if how == "killed":
                        broker.start()
                    waited_for(lambda leader=leader: leads_nothing(admin, "t", leader))  # type: ignore[misc]
                    wait_in_sync(admin, "t")
            producer.flush()
        assert sending.failures == []
        found = values(cluster.bootstrap_servers, "t", sending.sent)
    assert found == [[b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)]
    print(f"writes went on after {[round(each, 2) for each in taken]} s")
    assert max(taken) < WITHIN_SECONDS
