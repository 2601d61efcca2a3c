"""A process's connections are made once for each cluster and its settings, and a forked child has its own."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.client.config import ClientSettings, ConsumerSettings, ProducerSettings
from pyspark_kafkalog import connections
from pyspark_kafkalog.connections import cluster_of
from pyspark_kafkalog.source import BatchReader, StreamReader
from pyspark_kafkalog.write import at_least_once as direct
from pyspark_kafkalog.write.options import parse_sink

SERVERS = "127.0.0.1:1"


def test_they_are_shared_by_what_connects_alike_whatever_else_it_sets() -> None:
    first = cluster_of(SERVERS, ProducerSettings.parse({"linger.ms": "7", "retry.timeout.ms": "100"}))
    assert cluster_of(SERVERS, ConsumerSettings.parse({"retry.timeout.ms": "100"})) is first
    assert cluster_of(SERVERS, ConsumerSettings.parse({"retry.timeout.ms": "101"})) is not first
    assert cluster_of("127.0.0.1:2", ConsumerSettings.parse({"retry.timeout.ms": "100"})) is not first


def test_a_new_process_is_as_patient_as_one_that_had_an_answer_unless_told_otherwise() -> None:
    assert cluster_of(SERVERS, ConsumerSettings.parse({})).settings.bootstrap_timeout_ms == 30_000
    assert cluster_of(SERVERS, ProducerSettings.parse({"retry.timeout.ms": 7})).settings.bootstrap_timeout_ms == 7
    given = {"retry.timeout.ms": 7, "bootstrap.timeout.ms": 8}
    assert cluster_of(SERVERS, ConsumerSettings.parse(given)).settings.bootstrap_timeout_ms == 8


@pytest.mark.timeout(180)
def test_reads_and_writes_that_start_while_their_broker_is_away_wait_for_it_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than bootstrap.timeout.ms, and in processes that were never answered."""
    monkeypatch.setattr(ClientSettings.bootstrap_timeout_ms, "default", 1000)
    schema = StructType([StructField("value", BinaryType())])
    rows = pa.record_batch([pa.array([b"v"], pa.binary())], names=["value"])
    with LocalCluster(brokers=1) as cluster:
        options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers}
        with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers) as producer:
            admin.create_topic("t", partitions=1)
            producer.send("t", b"v")
        monkeypatch.setattr(connections, "_clusters", {})
        monkeypatch.setattr(direct, "_producers", {})
        stream = StreamReader(schema, {**options, "subscribe": "t", "startingOffsets": "earliest"})
        batch = BatchReader(schema, {**options, "subscribe": "t"})
        sink = parse_sink({**options, "topic": "t"})
        cluster.brokers[0].stop()
        with ThreadPoolExecutor() as pool:
            started = pool.submit(stream.initialOffset)
            planned = pool.submit(batch.partitions)
            written = pool.submit(direct.write_rows, iter([rows]), sink, ("value",))
            pending: list[Future[Any]] = [started, planned, written]
            assert not wait(pending, timeout=3, return_when=FIRST_COMPLETED).done
            told = [record.getMessage() for record in caplog.records if "no_broker_answers_yet" in record.getMessage()]
            assert 2 <= len(told) <= 3  # one for each, but what shares its connections with another may be told by it
            assert all(f"{cluster.bootstrap_servers}: connection refused" in each for each in told)
            cluster.brokers[0].start()
            assert started.result() == {"t": {"0": 0}}
            assert len(planned.result()) == 1
            written.result()
        direct._producers.popitem()[1].close()


def test_a_forked_child_has_its_own() -> None:
    settings = ConsumerSettings.parse({})
    parents = cluster_of(SERVERS, settings)
    child = os.fork()
    if child == 0:
        os._exit(cluster_of(SERVERS, settings) is parents)
    assert os.waitpid(child, 0)[1] == 0
