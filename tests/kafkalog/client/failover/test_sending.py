"""A producer while leaders are killed: what it sent is in the log once, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import pytest

from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.errors import KafkalogError
from kafkalog.records import RecordMetadata
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.threads import join_all
from tests.waiting import waited_for

PARTITIONS = 2


class Sending:
    """Sends numbers to partitions in turn, from a thread, until `stop`.

    Attributes:
        sent: how many numbers were sent.
        acked: how many were acknowledged.
        failures: of those that were not.
    """

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._stopping = threading.Event()
        self.sent = self.acked = 0
        self.failures: list[KafkalogError] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        join_all([self._thread], 60)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for _ in range(20):
                value = b"%d" % self.sent
                self._producer.send(self._topic, value, partition=self.sent % PARTITIONS, on_delivery=self._told)
                self.sent += 1
            self._stopping.wait(0.002)  # the pace of the records, without an event to wait for

    def _told(self, error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        if error is None:
            self.acked += 1
        else:
            self.failures.append(error)

    def wait_for_more(self) -> None:
        """Wait until numbers are acknowledged that are sent from now on."""
        sent = self.sent + 20
        waited_for(lambda: self.acked >= sent or bool(self.failures), 60, "nothing is acknowledged")


def values(bootstrap_servers: str, topic: str, count: int) -> list[list[bytes | None]]:
    """Each partition's values, from its start to its end."""
    found: list[list[bytes | None]] = [[] for _ in range(PARTITIONS)]
    with Consumer(bootstrap_servers) as consumer, Admin(bootstrap_servers) as admin:
        consumer.assign({TopicPartition(topic, number): "earliest" for number in range(PARTITIONS)})
        ends = admin.list_offsets({TopicPartition(topic, number): "latest" for number in range(PARTITIONS)})
        assert sum(end.offset or 0 for end in ends.values()) == count
        for message in consumer.messages(count, timeout=60):
            found[message.partition].append(message.value)
    return found


def leader_of(admin: Admin, topic: str, number: int = 0) -> int:
    return admin.describe_topics([topic])[0].partition(number).leader


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_records_sent_while_leaders_go_are_in_the_log_once_and_in_order(brokers: Brokers, how: str) -> None:
    go: Callable[[int], None] = brokers.kill if how == "killed" else brokers.stop
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS, 3, {"min.insync.replicas": 2})
        with Producer(brokers.bootstrap_servers, batch_records=10, linger_ms=1) as producer:
            with Sending(producer, "t") as sending:
                sending.wait_for_more()
                for number in (0, 1, 0):
                    leader = leader_of(admin, "t", number)
                    go(leader)
                    sending.wait_for_more()
                    brokers.start(leader)
                    wait_in_sync(admin, "t")
            producer.flush()
        assert (sending.failures, sending.acked) == ([], sending.sent)
    found = values(brokers.bootstrap_servers, "t", sending.sent)
    assert found == [[b"%d" % n for n in range(number, sending.sent, PARTITIONS)] for number in range(PARTITIONS)]
