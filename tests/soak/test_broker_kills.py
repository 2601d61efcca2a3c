"""A broker killed again and again under a producer and a consumer: every acked record is there once, in order."""

from __future__ import annotations

import random
import threading

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from tests.soak import numbered
from tests.soak.numbered import Ledger

pytestmark = pytest.mark.timeout(1800)
PARTITIONS = 3
KILLS = 15


@pytest.mark.parametrize(
    "config", [{}, {"flush.messages": "1"}, {"flush.messages": "100", "flush.visibility": "flushed"}], ids=str
)
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_of_the_broker_loses_and_doubles_nothing(config: dict[str, str], seed: int) -> None:
    dice = random.Random(seed)
    print(f"seed {seed}")
    stop = threading.Event()
    sent = 0
    failures: list[BaseException] = []
    with LocalCluster(brokers=1) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic(
                "killed", partitions=PARTITIONS, config={"segment.bytes": str(1 << 20), "segment.ms": "2000", **config}
            )

        def produce() -> None:
            nonlocal sent
            try:
                with Producer(cluster.bootstrap_servers, delivery_timeout_ms=300_000, batch_records=37) as producer:
                    while not stop.is_set():
                        for value in numbered.records(sent, sent + 500):
                            producer.send("killed", value)
                        sent += 500
                    producer.flush()
            except BaseException as error:  # handed to the test's thread
                failures.append(error)

        ledger_lock = threading.Lock()
        consumed: list[tuple[int, int, bytes]] = []

        def consume() -> None:
            try:
                with Consumer(cluster.bootstrap_servers) as consumer:
                    consumer.assign({TopicPartition("killed", p): "earliest" for p in range(PARTITIONS)})
                    while not (stop.is_set() and not producer_thread.is_alive() and len(consumed) >= sent):
                        for message in consumer.messages(timeout=1):
                            with ledger_lock:
                                consumed.append((message.partition, message.offset, message.value or b""))
            except BaseException as error:
                failures.append(error)

        producer_thread = threading.Thread(target=produce, name="produce")
        consumer_thread = threading.Thread(target=consume, name="consume")
        producer_thread.start()
        consumer_thread.start()
        broker = cluster.brokers[0]
        for _ in range(KILLS):
            goal = len(consumed) + dice.randrange(1, 4000)
            waited = threading.Event()
            while len(consumed) < goal and not failures:
                waited.wait(0.01)
            broker.kill()
            broker.start()
        stop.set()
        producer_thread.join(600)
        consumer_thread.join(600)
        assert not failures, failures
        assert not producer_thread.is_alive() and not consumer_thread.is_alive()

    ledger = Ledger(sent)
    for partition in range(PARTITIONS):
        mine = [(offset, value) for p, offset, value in consumed if p == partition]
        assert [offset for offset, _ in mine] == list(range(len(mine)))
        ledger.add(partition, 0, numbered.numbers(pa.array([value for _, value in mine], pa.binary())))
    ledger.assert_complete()
