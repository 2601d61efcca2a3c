"""Copies of partitions: what they cost a producer, and how soon many of them are made, led and led again.

Three brokers on this machine. Producers send to topics with one replica and with three; both kinds lie on the same
brokers. Records are deleted between runs, so that the disk has little to write back.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from bench.measure import fresh_topic, interleaved, looked_for, rate, ratio
from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.client.cluster import PartitionInfo

PARTITIONS = 4
MANY = 1000
RECORD_BYTES = 200
IDLE_SECONDS = 60.0
"""As long as the rounds over all logs are apart, so that each counts in its share."""
SESSION_TIMEOUT_MS = 3000
_WITHIN_SECONDS = 120.0


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    settings = {"zookeeper.session.timeout.ms": SESSION_TIMEOUT_MS}
    with LocalCluster(brokers=3, settings=settings) as cluster:
        yield from producing(cluster, scale)
        yield from many_partitions(cluster, max(6, int(MANY * scale)), scale)


def producing(cluster: LocalCluster, scale: float) -> Iterator[dict[str, object]]:
    """Records a second: acks=all of three replicas and of one beside acks=1 of one."""
    values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
    rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
    counts = {"send, batches of 50": max(1000, int(500_000 * scale)), "send_arrow": max(10_000, int(3_000_000 * scale))}

    def send(topic: str, acks: int | str) -> None:
        with Producer(cluster.bootstrap_servers, acks=acks, batch_records=50) as producer:
            for start in range(0, counts["send, batches of 50"], len(values)):
                for value in values[: counts["send, batches of 50"] - start]:
                    producer.send(topic, value)
            producer.flush()

    def send_arrow(topic: str, acks: int | str) -> None:
        with Producer(cluster.bootstrap_servers, acks=acks) as producer:
            deliveries = [producer.send_arrow(topic, rows) for _ in range(0, counts["send_arrow"], len(values))]
            for delivery in deliveries:
                delivery.result()

    with Admin(cluster.bootstrap_servers) as admin:

        def renew() -> None:
            for topic, replicas in (("one", 1), ("three", 3)):
                fresh_topic(admin, cluster, topic, PARTITIONS, replicas)

        for name, function in (("send, batches of 50", send), ("send_arrow", send_arrow)):
            before = sendfile_bytes(admin)
            times = interleaved(
                {
                    "acks=1, one replica": partial(function, "one", 1),
                    "acks=all, one replica": partial(function, "one", "all"),
                    "acks=all, three replicas": partial(function, "three", "all"),
                },
                scale,
                before=renew,
            )
            reference = times["acks=1, one replica"]
            for kind, taken in times.items():
                yield {
                    "name": f"{name}, {kind}",
                    "value": round(rate(counts[name], taken)),
                    "unit": "records/s",
                    "ratio": round(ratio(taken, reference), 3),
                    "seconds": [round(each, 4) for each in taken],
                    "records": counts[name],
                    "record_bytes": RECORD_BYTES,
                }
            yield {
                "name": f"{name}: sent to followers by sendfile",
                "value": sendfile_bytes(admin) - before,
                "unit": "bytes",
            }


def sendfile_bytes(admin: Admin) -> int:
    """What the brokers have sent from files to sockets; nobody but followers fetches meanwhile."""
    return sum(admin.describe_broker(number).counters["dataport.sendfile_bytes"] for number in range(3))


def many_partitions(cluster: LocalCluster, count: int, scale: float) -> Iterator[dict[str, object]]:
    """How soon many partitions have all their replicas, what they cost while nothing happens, and how soon all those
    that a killed broker led are led by others."""
    found: dict[str, list[float]] = {"created": [], "failover": []}
    with Admin(cluster.bootstrap_servers) as admin:

        def create() -> float:
            if "many" in {topic.name for topic in admin.topics()}:
                admin.delete_topic("many")
            begun = time.perf_counter()
            admin.create_topic("many", partitions=count, replication_factor=3)
            _await(lambda: all(len(each.isr) == 3 for each in _partitions(admin)))
            return time.perf_counter() - begun

        def fail() -> float:
            led = sum(each.leader == 2 for each in _partitions(admin))
            assert led, "broker 2 leads nothing"
            begun = time.perf_counter()
            cluster.brokers[2].kill()
            _await(lambda: all(each.leader in (0, 1) for each in _partitions(admin)))
            taken = time.perf_counter() - begun
            cluster.brokers[2].start()
            _await(lambda: all(len(each.isr) == 3 for each in _partitions(admin)))
            return taken

        for _ in range(1 if scale < 0.1 else 3):
            found["created"].append(create())
            found["failover"].append(fail())
        yield {
            "name": "partitions with three replicas made, all in sync",
            "value": round(statistics.median(found["created"]), 3),
            "unit": "s",
            "partitions": count,
            "seconds": [round(each, 3) for each in found["created"]],
        }
        yield {
            "name": "a broker is killed: all its partitions are led by others",
            "value": round(statistics.median(found["failover"]), 3),
            "unit": "s",
            "partitions": count,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "seconds": [round(each, 3) for each in found["failover"]],
        }
    pids = [broker.pid for broker in cluster.brokers if broker.pid]
    idle = IDLE_SECONDS if scale >= 0.1 else 1.0
    before = sum(map(_cpu_seconds, pids))
    # The span is what is measured: the processor time that is used while nothing happens. No event ends it.
    time.sleep(idle)
    yield {
        "name": "three brokers while nothing happens",
        "value": round((sum(map(_cpu_seconds, pids)) - before) / idle * 100, 2),
        "unit": "% of a core",
        "partitions": count,
    }


def _partitions(admin: Admin) -> list[PartitionInfo]:
    [topic] = admin.describe_topics(["many"])
    return list(topic.partitions)


def _await(event: Callable[[], bool]) -> None:
    looked_for(event, _WITHIN_SECONDS, "the partitions are not as they should be")


def _cpu_seconds(pid: int) -> float:
    """Of all threads; finer than the clock ticks of `stat`."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
