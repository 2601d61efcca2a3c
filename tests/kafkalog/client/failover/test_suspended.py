"""A leader whose process is suspended keeps its connections and answers nothing: what was asked of it is asked of the
next leader once there is one, long before the request's time is over."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, TopicPartition
from kafkalog.client.transaction.stager import PartStager
from tests.kafkalog.client.failover.test_sending import leader_of
from tests.kafkalog.client.transaction.test_coordinator import Query
from tests.kafkalog.replicated import wait_in_sync
from tests.waiting import suspend

pytestmark = [pytest.mark.java, pytest.mark.timeout(180)]
WITHIN_SECONDS = 25.0  # request.timeout.ms is 30 s


def test_what_waits_for_a_suspended_leader_goes_on_with_the_next_one() -> None:
    soon = {"zookeeper.session.timeout.ms": 2000}
    with LocalCluster(brokers=3, settings=soon) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic("t", 1)
        wait_in_sync(admin, "t")
        latest = {TopicPartition("t", 0): "latest"}
        query = Query(cluster.bootstrap_servers, "t", f"spark-stream-{uuid.uuid4()}")
        try:
            with PartStager(query.cluster, query.settings, query.transactional_id, 0, 0) as stager:
                stager.stage({"t": pa.table({"value": ["before"]})})
                stager.finish()
                admin.list_offsets(latest)  # both have connections to the leader now
                leader = cluster.brokers[leader_of(admin, "t")]
                assert leader.pid is not None
                suspend(leader.pid)
                began = time.monotonic()
                try:
                    stager.stage({"t": pa.table({"value": ["amid"]})})
                    [staged] = stager.finish()
                    staged_after = time.monotonic() - began
                    began = time.monotonic()
                    assert admin.list_offsets(latest)[TopicPartition("t", 0)].offset == 0
                    listed_after = time.monotonic() - began
                finally:
                    os.kill(leader.pid, signal.SIGCONT)
            assert staged.records == 2
            assert staged_after < WITHIN_SECONDS and listed_after < WITHIN_SECONDS
        finally:
            query.close()
