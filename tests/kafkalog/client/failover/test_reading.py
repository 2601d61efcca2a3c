"""Readers while leaders are killed: they wait, and then get every record once, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client.admin import list_offsets
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer.range_fetch import fetch_range
from tests.kafkalog.client.failover.test_sending import PARTITIONS, Sending, leader_of
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.threads import join_all
from tests.waiting import waited_for

Found = list[list[bytes | None]]


class Reading:
    """Reads from a thread until `stop` is set.

    Attributes:
        found: the values of each partition.
        failure: what the thread raised.
    """

    def __init__(self, read: Callable[[str, Found, threading.Event], None], bootstrap_servers: str) -> None:
        self.found: Found = [[] for _ in range(PARTITIONS)]
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(read, bootstrap_servers), daemon=True)
        self._thread.start()

    def _run(self, read: Callable[[str, Found, threading.Event], None], bootstrap_servers: str) -> None:
        try:
            read(bootstrap_servers, self.found, self.stop)
        except BaseException as error:
            self.failure = error

    @property
    def count(self) -> int:
        return sum(map(len, self.found))

    def wait_for(self, count: int) -> None:
        waited_for(lambda: self.count >= count or self.failure is not None, 60, f"{count} records were not read")
        assert self.failure is None, repr(self.failure)

    def end(self) -> None:
        self.stop.set()
        join_all([self._thread], 60)


def assigned(bootstrap_servers: str, found: Found, stop: threading.Event) -> None:
    with Consumer(bootstrap_servers) as consumer:
        consumer.assign({TopicPartition("t", number): "earliest" for number in range(PARTITIONS)})
        while not stop.is_set():
            for message in consumer.consume(100, timeout=0.1):
                found[message.partition].append(message.value)


def subscribed(bootstrap_servers: str, found: Found, stop: threading.Event) -> None:
    with Consumer(bootstrap_servers, "readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        while not stop.is_set():
            for message in consumer.consume(100, timeout=0.1):
                found[message.partition].append(message.value)


def in_arrow_batches(bootstrap_servers: str, found: Found, stop: threading.Event) -> None:
    with Consumer(bootstrap_servers) as consumer:
        consumer.assign({TopicPartition("t", number): "earliest" for number in range(PARTITIONS)})
        while not stop.is_set():
            for batch in consumer.arrow_batches(timeout=0.1):
                for partition, value in zip(batch["partition"].to_pylist(), batch["value"].to_pylist(), strict=True):
                    found[partition].append(value)
                if stop.is_set():
                    break


def by_ranges(bootstrap_servers: str, found: Found, stop: threading.Event) -> None:
    """As Spark does: up to the latest offsets, again and again."""
    cluster = Cluster(bootstrap_servers)
    partitions = [TopicPartition("t", number) for number in range(PARTITIONS)]
    position = dict.fromkeys(partitions, 0)
    while not stop.is_set():
        for partition, listed in list_offsets(cluster, dict.fromkeys(partitions, "latest")).items():
            end = listed.offset or 0
            assert end >= position[partition], f"{partition} went back from {position[partition]} to {end}"
            for answer in fetch_range(cluster, partition, None, position[partition], end):
                for _, columns in answer:
                    found[partition.partition] += columns.column("value").to_pylist()
            position[partition] = end
        stop.wait(0.01)  # between two micro-batches
    cluster.close()


@pytest.mark.parametrize("read", [assigned, subscribed, in_arrow_batches, by_ranges])
def test_a_reader_gets_every_record_once_and_in_order_while_leaders_are_killed(
    brokers: Brokers, read: Callable[[str, Found, threading.Event], None]
) -> None:
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS, 3, {"min.insync.replicas": 2})
        reading = Reading(read, brokers.bootstrap_servers)
        with Producer(brokers.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with Sending(producer, "t") as sending:
                sending.wait_for_more()
                for number in (0, 1):
                    leader = leader_of(admin, "t", number)
                    brokers.kill(leader)
                    sending.wait_for_more()
                    reading.wait_for(sending.acked)
                    brokers.start(leader)
                    wait_in_sync(admin, "t")
            producer.flush()
        assert sending.failures == []
        reading.wait_for(sending.sent)
        reading.end()
    assert reading.failure is None
    assert reading.found == [
        [b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)
    ]
