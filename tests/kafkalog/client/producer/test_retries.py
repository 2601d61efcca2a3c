"""Brokers killed and connections cut under a producer: nothing acked is lost, nothing is doubled or out of order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.producer.queue import OnDelivery
from kafkalog.errors import BrokerUnreachable, Closed, DeliveryTimedOut, KafkalogError, RequestTimedOut, UnknownTopic
from kafkalog.records import RecordMetadata
from kafkalog.wire import broker_pb2 as pb
from tests.interrupts import Interrupted, interrupted_at
from tests.proxy import proxied
from tests.reading import messages_of
from tests.threads import join_all
from tests.waiting import suspend, waited_for

pytestmark = pytest.mark.timeout(180)
PARTITIONS = 2


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[LocalCluster]:
    """A cluster whose broker may be killed; it is to be running again at the end of a test."""
    with LocalCluster() as running:
        yield running


def create(cluster: LocalCluster, topic: str, partitions: int = PARTITIONS) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=partitions)


def read_numbers(cluster: LocalCluster, topic: str) -> list[list[int]]:
    """Those of each partition."""
    found = messages_of(cluster.bootstrap_servers, topic).values()
    return [[int(message.value or b"") for message in messages] for messages in found]


class Sending:
    """A thread that sends 0, 1, 2 ... to every partition until stopped, and keeps the deliveries."""

    def __init__(self, producer: Producer, topic: str, partitions: int = PARTITIONS) -> None:
        self._producer = producer
        self._topic = topic
        self._partitions = partitions
        self._stop = threading.Event()
        self.sent = 0
        self.acked = 0
        self.offsets: list[list[int]] = [[] for _ in range(partitions)]
        self.errors: list[KafkalogError] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for partition in range(self._partitions):
                    self._producer.send(
                        self._topic, b"%d" % self.sent, partition=partition, on_delivery=self._told(partition)
                    )
                self.sent += 1
        except KafkalogError as error:  # for the test's thread
            self.errors.append(error)

    def _told(self, partition: int) -> OnDelivery:
        def tell(error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
            if metadata is None:
                assert error is not None
                self.errors.append(error)
            else:
                self.offsets[partition].append(metadata.offset)
                self.acked = min(map(len, self.offsets))

        return tell

    def wait_acked(self, more: int) -> None:
        """Until so many more are acknowledged."""
        goal = self.acked + more
        poll = threading.Event()
        while self.acked < goal and not self.errors:
            poll.wait(0.005)

    def stop(self) -> None:
        self._stop.set()
        join_all([self._thread], 60)
        self._producer.flush(60)


def assert_all_there_once_in_order(cluster: LocalCluster, topic: str, sending: Sending) -> None:
    assert not sending.errors
    found = read_numbers(cluster, topic)
    assert found == [list(range(sending.sent))] * PARTITIONS, "records are lost, doubled or out of order"
    assert sending.offsets == found, "offsets were told wrong"


@pytest.mark.parametrize("batch_records", [1, 20])
def test_connections_cut_at_any_byte_lose_and_double_nothing(
    cluster: LocalCluster, topic: str, batch_records: int
) -> None:
    create(cluster, topic)
    dice = random.Random(batch_records)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port, retry_backoff_ms=5) as (through, proxy),
        Producer(
            through, batch_records=batch_records, linger_ms=1, buffer_memory=200_000, retry_backoff_ms=5
        ) as producer,
    ):
        sending = Sending(producer, topic)
        for _ in range(12):
            sending.wait_acked(dice.randrange(1, 60))
            proxy.cut_after(dice.randrange(1, 30_000))
            while proxy.cut_at is not None:
                sending.wait_acked(1)
        sending.stop()
        assert proxy.accepted > 12
    assert_all_there_once_in_order(cluster, topic, sending)


def test_appends_whose_answers_are_lost_are_not_written_twice(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, batch_records=5, linger_ms=1, buffer_memory=200_000, retry_backoff_ms=5) as producer,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        sending = Sending(producer, topic)
        for _ in range(8):
            sending.wait_acked(20)
            proxy.hold_answers()
            held, poll = sending.acked, threading.Event()
            ends = {TopicPartition(topic, partition): "latest" for partition in range(PARTITIONS)}
            while min(each.offset or 0 for each in admin.list_offsets(ends).values()) <= held + 10:
                poll.wait(0.005)
            proxy.cut()
        sending.stop()
    assert_all_there_once_in_order(cluster, topic, sending)


def test_what_a_broker_that_is_behind_says_of_a_deleted_topic_doubles_nothing(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the first look-up finds after the connection is lost, in the pause before the batch is sent again."""
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, linger_ms=0, retry_backoff_ms=200) as producer,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        admin.create_topic(topic, partitions=1)
        request = pb.DescribeTopicsRequest(names=[topic])
        before = through.call("DescribeTopics", request)
        admin.delete_topic(topic)
        admin.create_topic(topic, partitions=1)
        producer.send(topic, b"0").result(30)
        proxy.hold_answers()
        unknown = producer.send(topic, b"1")
        where = TopicPartition(topic, 0)
        waited_for(lambda: admin.list_offsets({where: "latest"})[where].offset == 2)
        call, said_before = through.call, [before]

        def behind(method: str, *given: Any, **more: Any) -> Any:
            return said_before.pop() if method == "DescribeTopics" and said_before else call(method, *given, **more)

        monkeypatch.setattr(through, "call", behind)
        proxy.cut()
        unknown.result(30)
        assert not said_before
    assert read_numbers(cluster, topic) == [[0, 1]]


def test_kill_9_of_the_broker_loses_and_doubles_nothing(own_cluster: LocalCluster, topic: str) -> None:
    create(own_cluster, topic)
    with Producer(own_cluster.bootstrap_servers, batch_records=10, linger_ms=1, buffer_memory=500_000) as producer:
        sending = Sending(producer, topic)
        for _ in range(2):
            sending.wait_acked(500)
            own_cluster.brokers[0].kill()
            own_cluster.brokers[0].start()
        sending.wait_acked(500)
        sending.stop()
    assert_all_there_once_in_order(own_cluster, topic, sending)


def test_a_stop_in_order_loses_and_doubles_nothing(own_cluster: LocalCluster, topic: str) -> None:
    create(own_cluster, topic)
    with Producer(own_cluster.bootstrap_servers, batch_records=10, linger_ms=1, buffer_memory=500_000) as producer:
        sending = Sending(producer, topic)
        sending.wait_acked(500)
        assert own_cluster.brokers[0].stop() == 0
        own_cluster.brokers[0].start()
        sending.wait_acked(500)
        sending.stop()
    assert_all_there_once_in_order(own_cluster, topic, sending)


def test_a_broker_that_stays_away_is_reported_with_its_address_within_the_delivery_timeout(
    own_cluster: LocalCluster, topic: str
) -> None:
    create(own_cluster, topic)
    broker = own_cluster.brokers[0]
    with Producer(own_cluster.bootstrap_servers, delivery_timeout_ms=1500, retry_backoff_max_ms=200) as producer:
        producer.send(topic, b"0", partition=0).result(30)
        broker.kill()
        try:
            started = time.monotonic()
            late = [producer.send(topic, b"lost", partition=0) for _ in range(3)]
            error = late[0].exception(30)
            assert time.monotonic() - started < 15
            assert isinstance(error, DeliveryTimedOut)
            assert f"no ack for {topic}-0 within delivery.timeout.ms (1500 ms); last failure: " in str(error)
            assert f"127.0.0.1:{broker.data_port}" in str(error)
            assert all(each.exception(30) is not None for each in late[1:])
        finally:
            broker.start()
        assert producer.send(topic, b"1", partition=0).result(30).offset == 1
    assert read_numbers(own_cluster, topic)[0] == [0, 1]


def test_a_frozen_broker_is_given_up_after_the_request_timeout(own_cluster: LocalCluster, topic: str) -> None:
    create(own_cluster, topic)
    pid = own_cluster.brokers[0].pid
    assert pid is not None
    with Producer(
        own_cluster.bootstrap_servers, request_timeout_ms=300, connect_timeout_ms=300, retry_backoff_max_ms=100
    ) as producer:
        producer.send(topic, b"0", partition=0).result(30)
        suspend(pid)
        try:
            delivery = producer.send(topic, b"1", partition=0)
            while delivery._batch.queue.last_failure is None:
                assert not delivery.done()
                threading.Event().wait(0.005)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert delivery.result(60).offset == 1
        assert producer.send(topic, b"2", partition=0).result(30).offset == 2
    assert read_numbers(own_cluster, topic)[0] == [0, 1, 2]


@pytest.mark.parametrize("how", ["send", "send_many", "send_arrow"])
def test_a_flush_tells_of_a_record_that_failed_beside_one_whose_sender_asked(
    cluster: LocalCluster, topic: str, how: str
) -> None:
    create(cluster, topic)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, linger_ms=1000, delivery_timeout_ms=1000, request_timeout_ms=500) as producer,
    ):
        producer.send(topic, b"", partition=0).result(30)

        def send(value: bytes) -> Any:
            if how == "send":
                return producer.send(topic, value, partition=0)
            if how == "send_many":
                return producer.send_many(topic, [value], partition=0)
            return producer.send_arrow(topic, pa.table({"value": [value]}), partition=0)

        proxy.hold_answers()
        lost, asked = send(b"nobody asks"), send(b"asked")
        [batch] = {each._batch if how == "send" else each._runs[0].batch for each in (lost, asked)}
        assert isinstance(asked.exception(30), DeliveryTimedOut)
        assert batch.count == 2
        with pytest.raises(DeliveryTimedOut):
            producer.flush()
        producer.flush()
        proxy.cut()


@pytest.mark.parametrize("how", ["send", "send_many"])
def test_a_flush_tells_of_a_record_whose_sender_stopped_waiting(cluster: LocalCluster, topic: str, how: str) -> None:
    create(cluster, topic)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, delivery_timeout_ms=1500, request_timeout_ms=500) as producer,
    ):
        producer.send(topic, b"", partition=0).result(30)
        proxy.hold_answers()
        lost = producer.send(topic, b"x", partition=0) if how == "send" else producer.send_many(topic, [b"x"])
        with pytest.raises(RequestTimedOut):
            lost.result(0.1)
        with pytest.raises(DeliveryTimedOut):
            producer.flush()
        assert isinstance(lost.exception(), DeliveryTimedOut)
        proxy.cut()


def test_a_callback_that_exits_leaves_the_producer_sending(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(topic, b"0", partition=0, on_delivery=lambda error, metadata: sys.exit(1)).result(30)
        assert producer.send(topic, b"1", partition=0).result(30).offset == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_closes_beside_another_thread_waits_for_it(cluster: LocalCluster, topic: str, is_refused: bool) -> None:
    create(cluster, topic)
    delivery_timeout_ms = 2000 if is_refused else 60_000
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, delivery_timeout_ms=delivery_timeout_ms, request_timeout_ms=500) as producer,
    ):
        producer.send(topic, b"0", partition=0).result(30)
        proxy.hold_answers()
        producer.send(topic, b"1", partition=0)
        told: list[KafkalogError] = []

        def close() -> None:
            try:
                producer.close()
            except KafkalogError as error:
                told.append(error)

        first = threading.Thread(target=close)
        first.start()
        waited_for(lambda: producer._closing is not None)
        with pytest.raises(RequestTimedOut, match="a close"):
            producer.close(0.1)
        if not is_refused:
            proxy.cut()
        second = threading.Thread(target=close)
        second.start()
        join_all([first, second], 60)
        assert [type(error) for error in told] == 2 * [DeliveryTimedOut] * is_refused
        producer.close()
        proxy.cut()
    assert read_numbers(cluster, topic)[0] == [0, 1]


def test_a_close_that_is_interrupted_anywhere_leaves_nothing_open(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    place, was_interrupted = 0, True
    with closing(Cluster(cluster.bootstrap_servers)) as shared:
        while was_interrupted:
            producer = Producer(shared, linger_ms=60_000)
            sent = producer.send(topic, b"%d" % place, partition=0)
            was_interrupted = False
            with suppress(Interrupted):
                was_interrupted = interrupted_at(
                    place,
                    partial(producer.close, 30),
                    "producer/producer.py",
                    "producer/accumulator.py",
                )
            close = producer._closing
            assert close is None or close.ended.is_set(), place
            closers = [threading.Thread(target=_closed, args=(producer,)) for _ in range(2)]
            for closer in closers:
                closer.start()
            join_all(closers, 60)
            assert sent.done(), place
            if sent.exception() is not None:
                assert close is not None and isinstance(close.failure, Closed), place
            place += 1
    assert place > 20


def _closed(producer: Producer) -> None:
    with suppress(Closed):
        producer.close(30)


def test_a_callback_that_exits_keeps_no_other_producer_from_its_flush_at_exit(
    cluster: LocalCluster, topic: str
) -> None:
    create(cluster, topic)
    program = f"""
import sys
from kafkalog import Producer
from kafkalog.client.producer import producer as module

module._EXIT_SECONDS = 1.0
for number in range(4):
    lost = Producer("{cluster.bootstrap_servers}", linger_ms=60_000)
    lost.send("{topic}", b"-1", partition=1, on_delivery=lambda error, metadata: sys.exit(1))
    lost.flush = lambda timeout: sys.exit(1)
    kept = Producer("{cluster.bootstrap_servers}", linger_ms=60_000)
    kept.send("{topic}", b"%d" % number, partition=0)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert sorted(read_numbers(cluster, topic)[0]) == [0, 1, 2, 3], ran.stderr


def test_each_of_two_flushes_tells_of_the_failures_that_it_waited_for(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, linger_ms=1000, delivery_timeout_ms=1000, request_timeout_ms=500) as producer,
    ):
        producer.send(topic, b"", partition=0).result(30)
        proxy.hold_answers()
        for partition in range(2):
            producer.send(topic, b"nobody asks", partition=partition)
        told: list[KafkalogError] = []

        def flush() -> None:
            with pytest.raises(DeliveryTimedOut) as failed:
                producer.flush()
            told.append(failed.value)

        threads = [threading.Thread(target=flush) for _ in range(2)]
        for thread in threads:
            thread.start()
        join_all(threads, 60)
        assert len(told) == 2
        proxy.cut()


def test_a_topic_created_again_gets_what_is_sent_to_its_name(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    with Producer(cluster.bootstrap_servers) as producer, Admin(cluster.bootstrap_servers) as admin:
        for number in range(5):
            producer.send(topic, b"%d" % number, partition=0).result(30)
        admin.delete_topic(topic)
        admin.create_topic(topic, partitions=1)
        assert producer.send(topic, b"5", partition=0).result(30).offset == 0
        assert producer.send(topic, b"6", partition=0).result(30).offset == 1
    assert read_numbers(cluster, topic) == [[5, 6]]


def test_a_topic_deleted_under_a_producer_is_reported(cluster: LocalCluster, topic: str) -> None:
    create(cluster, topic)
    with Producer(cluster.bootstrap_servers) as producer, Admin(cluster.bootstrap_servers) as admin:
        producer.send(topic, b"0", partition=0).result(30)
        admin.delete_topic(topic)
        with pytest.raises(UnknownTopic, match=f"there is no topic '{topic}'"):
            producer.send(topic, b"1", partition=0).result(30)


def test_partitions_on_several_brokers_and_one_of_them_killed(topic: str) -> None:
    with LocalCluster(brokers=3) as three:
        create(three, topic, partitions=6)
        with Producer(three.brokers[2].address, batch_records=10, linger_ms=1, buffer_memory=500_000) as producer:
            sending = Sending(producer, topic, partitions=6)
            sending.wait_acked(100)
            three.brokers[1].kill()
            three.brokers[1].start()
            sending.wait_acked(100)
            sending.stop()
        assert not sending.errors
        assert read_numbers(three, topic) == [list(range(sending.sent))] * 6


@pytest.mark.parametrize("acks", [0, 1])
def test_an_unreachable_cluster_is_reported_by_send_within_a_bounded_time(acks: int) -> None:
    started = time.monotonic()
    with (
        Producer("127.0.0.1:1", acks=acks, bootstrap_timeout_ms=300) as producer,
        pytest.raises(BrokerUnreachable, match=r"no broker reachable at 127\.0\.0\.1:1: connection refused"),
    ):
        producer.send("t", b"x")
    assert time.monotonic() - started < 10
