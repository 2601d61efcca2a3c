"""A stream from one replicated topic to another while leaders are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.client.admin import PartitionExtent
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending, leader_of, values
from tests.kafkalog.replicated import wait_in_sync
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(300)


def run_through(spark: SparkSession, checkpoint: Path, failovers: int) -> None:
    """Stream rows while leaders of either topic are killed in turn, each after the one before has come back. The query
    must not fail, and each row must arrive once and in order."""
    soon = {"zookeeper.session.timeout.ms": 2000}
    with LocalCluster(brokers=3, settings=soon) as cluster, Admin(cluster.bootstrap_servers) as admin:
        for name in ("in", "out"):
            admin.create_topic(name, PARTITIONS)
        rows = (
            spark.readStream.format("kafkalog")
            .option("kafkalog.bootstrap.servers", cluster.bootstrap_servers)
            .option("subscribe", "in")
            .option("startingOffsets", "earliest")
            .load()
            .select("value", "partition")
        )
        query = (
            rows.writeStream.format("kafkalog")
            .option("kafkalog.bootstrap.servers", cluster.bootstrap_servers)
            .option("topic", "out")
            .option("checkpointLocation", str(checkpoint))
            .start()
        )

        def arrived() -> int:
            return sum(each.end_offset for each in admin.extents(["out"]).values() if isinstance(each, PartitionExtent))

        with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with Sending(producer, "in") as sending:
                sending.wait_for_more()
                for number in range(failovers):
                    leader = leader_of(admin, ("in", "out")[number % 2], number // 2 % PARTITIONS)
                    cluster.brokers[leader].kill()
                    sending.wait_for_more()
                    before = arrived()
                    waited_for(lambda before=before: arrived() > before or query.exception() is not None, 60)  # type: ignore[misc]
                    cluster.brokers[leader].start()
                    wait_in_sync(admin, "in")
                    wait_in_sync(admin, "out")
            producer.flush()
        assert sending.failures == []
        query.processAllAvailable()
        query.stop()
        found = values(cluster.bootstrap_servers, "out", sending.sent)
    assert found == [[b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)]


def test_a_stream_reads_and_writes_each_row_once_and_in_order_while_leaders_are_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    run_through(spark, tmp_path / "checkpoint", failovers=2)
