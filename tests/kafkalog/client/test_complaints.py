"""Warnings of what is tried again: at once, once a minute, and of every trouble anew."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.complaints import Complaint
from kafkalog.client.config import parse_producer
from kafkalog.client.transaction.stager import PartStager
from kafkalog.clock import ManualClock
from kafkalog.errors import BrokerUnreachable, Closed, KafkalogError, NotLeader, UnknownPartition
from kafkalog.events import get_logger
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(120)
GONE = BrokerUnreachable(address="here:1", reason="connection refused")


class Failing:
    """Something that fails every second."""

    def __init__(self, caplog: pytest.LogCaptureFixture, patience_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self._caplog = caplog
        self.complaint = Complaint(get_logger("kafkalog.test"), "held_up", self.clock.monotonic, patience_s)

    def failed(
        self, seconds: int, error: KafkalogError = GONE, until: float = 200.0, each: int = 1, **facts: Any
    ) -> list[str]:
        """What is said in so many seconds, of tries that take `each` seconds."""
        self._caplog.clear()
        for _ in range(0, seconds, each):
            self.complaint.failed(error, until, **facts)
            self.clock.advance(each)
        return [record.getMessage() for record in self._caplog.records]


def test_it_is_said_at_once_and_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(caplog)
    reason = 'reason="no broker reachable at here:1: connection refused"'
    assert failing.failed(60, partition="t-0") == [
        f"held_up partition=t-0 {reason} failing_for_s=0 given_up_in_s=200",
    ]
    assert failing.failed(61, partition="t-0") == [
        f"held_up partition=t-0 {reason} failing_for_s=60 given_up_in_s=140",
        f"held_up partition=t-0 {reason} failing_for_s=120 given_up_in_s=80",
    ]


def test_a_new_trouble_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(caplog)
    assert len(failing.failed(3)) == 1
    failing.clock.advance(10)
    assert len(failing.failed(3, until=213.0)) == 1
    failing.clock.advance(3)  # a pause between two tries
    assert failing.failed(3, until=213.0) == []


def test_retries_without_an_end_are_said_once_they_last_and_again_after_they_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(caplog, patience_s=4.0)
    reason = 'reason="no broker reachable at here:1: connection refused"'
    for _ in range(2):
        assert failing.failed(4, until=math.inf) == []
        assert failing.failed(12, until=math.inf, each=6) == [f"held_up {reason} failing_for_s=4"]
        failing.complaint.ended()
        failing.clock.advance(100)


def test_tries_that_take_long_are_of_one_trouble(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(caplog)
    assert [line.partition(" failing")[2] for line in failing.failed(70, each=7)] == [
        "_for_s=0 given_up_in_s=200",
        "_for_s=63 given_up_in_s=137",
    ]


@pytest.mark.parametrize(
    "error", [NotLeader(broker_id=1, partition="t-0"), UnknownPartition(topic="t", partition=2, partitions=2)]
)
def test_what_a_change_of_leaders_or_a_new_partition_brings_is_said_when_it_lasts(
    error: KafkalogError, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(caplog)
    assert failing.failed(2, error) == []
    assert len(failing.failed(2, error)) == 1


def test_everybody_who_tries_again_says_so_at_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster() as own:
        with Admin(own.bootstrap_servers) as admin:
            admin.create_topic("t", partitions=1)
        servers, where = own.bootstrap_servers, TopicPartition("t", 0)
        settings = parse_producer({"delivery.timeout.ms": 1500, "linger.ms": 0})
        shared = Cluster(servers)
        producer = Producer(servers, delivery_timeout_ms=60_000)
        producer.send("t", b"1").result(30)
        stager = PartStager(shared, settings, "spark-batch-x", 0, 0)
        stager.stage({"t": pa.table({"value": ["1"]})})
        stager.finish()
        consumer = Consumer(servers, retry_timeout_ms=1500)
        consumer.assign({where: "earliest"})
        assert len(list(consumer.messages(max_messages=1, timeout=30))) == 1
        asking = Cluster(servers, retry_timeout_ms=60_000)
        asking.describe()
        own.brokers[0].kill()
        caplog.clear()

        def said(event: str) -> list[str]:
            messages = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
            return [message for message in messages if message.startswith(event + " ")]

        delivery = producer.send("t", b"2")
        waited_for(lambda: bool(said("records_held_up")))
        with pytest.raises(KafkalogError):
            list(consumer)
        with pytest.raises(KafkalogError):
            _stage(stager)
        with ThreadPoolExecutor() as pool:
            described = pool.submit(asking.describe)
            waited_for(lambda: bool(said("call_held_up")))
            asking.close()
            with pytest.raises(Closed):
                described.result()
        for event in ("records_held_up", "fetching_held_up", "staging_held_up", "call_held_up"):
            assert len(said(event)) == 1, caplog.text
            assert "given_up_in_s=" in said(event)[0]
            assert "reason=" in said(event)[0]
        assert "partition=t-0" in said("records_held_up")[0]
        own.brokers[0].start()
        delivery.result(60)
        producer.close()
        consumer.close()
        stager.__exit__(None, None, None)
        shared.close()


def _stage(stager: PartStager) -> None:
    stager.stage({"t": pa.table({"value": ["2"]})})
    stager.finish()
