"""From one partition to a thousand, from messages of 10 bytes to 1 MB, from one producer and consumer to 16: kafkalog
beside Kafka, one broker of each on this machine, by their Python clients (`confluent-kafka`, tuned).

Each producer and consumer is a process of its own, and consumers share the partitions out among themselves. Then what
the brokers use: processor time and memory for a GB written and read; and how fast a backlog is read while a producer
goes on writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import NamedTuple

import psutil
from confluent_kafka.admin import AdminClient

from bench.load import Load, loads
from bench.measure import by_turns, figure
from bench.peers.jars import patience_seconds
from bench.peers.kafka import SERVER, SERVER_VERSION, KafkaServer, kafka_jars
from bench.peers.librdkafka import delete_topic, make_topic
from broker.local import LocalCluster
from kafkalog import Admin

RECORD_BYTES = 200
SYSTEMS = ("kafkalog", "kafka")
RUNS = 3
_LARGE = {"message.max.bytes": 4_000_000, "replica.fetch.max.bytes": 4_000_000}


class Case(NamedTuple):
    """A point of a figure: `axis` is what varies."""

    axis: str
    partitions: int = 4
    record_bytes: int = RECORD_BYTES
    clients: int = 1
    records: int = 200_000


_USED, _DRAINED = Case("used"), Case("drained")
CASES = (
    *(Case("partitions", partitions=number) for number in (1, 10, 100, 1000)),
    *(
        Case("record bytes", record_bytes=size, records=min(200_000, 200_000_000 // size))
        for size in (10, 100, 1000, 10_000, 100_000, 1_000_000)
    ),
    *(Case("clients", partitions=16, clients=number, records=400_000) for number in (1, 4, 16)),
)


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    with (
        KafkaServer(
            kafka_jars(SERVER, patience_seconds(scale)), {"log.segment.delete.delay.ms": 1000, **_LARGE}
        ) as kafka,
        LocalCluster(durable=True) as cluster,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        sides = Sides(cluster, admin, kafka)
        cases = CASES if scale >= 0.1 else (Case("partitions"), Case("clients", clients=2))
        for case in cases:
            yield from sides.measured(case._replace(records=max(500, int(case.records * scale))), scale)
        yield from sides.used(max(10_000, int(1_000_000 * scale)))
        yield from sides.drained(max(10_000, int(2_000_000 * scale)), scale)


class Sides:
    """Both brokers, and topics on both."""

    def __init__(self, cluster: LocalCluster, admin: Admin, kafka: KafkaServer) -> None:
        self._servers = {"kafkalog": cluster.bootstrap_servers, "kafka": kafka.bootstrap_servers}
        self._admin, self._kafka_admin = admin, AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        self._pids = {
            "kafkalog": [each.pid for each in (*cluster.brokers, cluster.zookeeper) if each and each.pid],
            "kafka": kafka.pids,
        }
        self._numbers = count()

    def measured(self, case: Case, scale: float) -> Iterator[dict[str, object]]:
        """What is produced and consumed in a case, in records and in bytes a second."""
        taken = by_turns(
            {system: partial(self._produced_and_consumed, system, case) for system in SYSTEMS},
            scale,
            runs=RUNS,
        )
        for system, rounds in taken.items():
            for number, doing in enumerate(("produce", "consume")):
                yield figure(
                    f"{doing}, {case.axis}, {_value(case)}, {system}",
                    "records/s",
                    [case.records / each[number] for each in rounds],
                    at=_value(case),
                    **case._asdict(),
                    kafka=SERVER_VERSION,
                )

    def used(self, records: int) -> Iterator[dict[str, object]]:
        """What a broker uses for what is written once and read once; ours with ZooKeeper, Kafka's with a controller."""
        case = _USED._replace(records=records)
        for system in SYSTEMS:
            before = self._cpu_seconds(system)
            self._produced_and_consumed(system, case)
            gigabytes = records * case.record_bytes / 1e9
            spent = [(self._cpu_seconds(system) - before) / gigabytes]
            yield figure(f"broker's processor time for a GB written and read, {system}", "s", spent, records=records)
            memory = sum(psutil.Process(pid).memory_info().rss for pid in self._pids[system]) / 1e6
            yield figure(f"broker's memory after it, {system}", "MB", [memory], records=records)

    def drained(self, records: int, scale: float) -> Iterator[dict[str, object]]:
        """How fast a backlog is read, alone and while a producer writes to the same partitions."""

        def drain(system: str, is_written: bool) -> float:
            topic = self._topic(system, 4)
            _run([self._load(system, "produce", topic, records)])
            readers = [self._load(system, "consume", topic, records)]
            # More than is written meanwhile: it is ended with the block.
            writers = [self._load(system, "produce", topic, 50 * records)] if is_written else []
            with loads(readers) as reading, loads(writers) as writing:
                writing.begin()
                reading.begin()
                taken = reading.ended()
            self._delete(system, topic)
            return taken

        candidates = {
            f"{system}, {'while more is written' if is_written else 'alone'}": (system, is_written)
            for system in SYSTEMS
            for is_written in (False, True)
        }
        taken = by_turns({name: partial(drain, *given) for name, given in candidates.items()}, scale, runs=RUNS)
        for name, times in taken.items():
            yield figure(f"backlog, {name}", "records/s", [records / each for each in times], records=records)

    def _produced_and_consumed(self, system: str, case: Case) -> tuple[float, float]:
        """Seconds of each."""
        topic = self._topic(system, case.partitions)
        share = case.records // case.clients
        produced = [self._load(system, "produce", topic, share, case) for _ in range(case.clients)]
        consumed = [
            self._load(system, "consume", topic, share, case)._replace(share=number, share_of=case.clients)
            for number in range(case.clients)
        ]
        times = _run(produced), _run(consumed)
        self._delete(system, topic)
        return times

    def _load(self, system: str, doing: str, topic: str, records: int, case: Case = _DRAINED) -> Load:
        return Load(system, doing, self._servers[system], topic, records, case.record_bytes, case.partitions)

    def _topic(self, system: str, partitions: int) -> str:
        topic = f"scale-{next(self._numbers)}"
        if system == "kafkalog":
            self._admin.create_topic(topic, partitions=partitions, config={"max.message.bytes": 4_000_000})
        else:
            make_topic(self._kafka_admin, topic, partitions)
        return topic

    def _delete(self, system: str, topic: str) -> None:
        if system == "kafkalog":
            self._admin.delete_topic(topic)
        else:
            delete_topic(self._kafka_admin, topic)

    def _cpu_seconds(self, system: str) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self._pids[system]]
        return sum(each.user + each.system for each in times)


def _run(wanted: list[Load]) -> float:
    """Seconds."""
    with loads(wanted) as started:
        started.begin()
        return started.ended()


def _value(case: Case) -> int:
    """What the case has of what varies."""
    values: Mapping[str, int] = {
        "partitions": case.partitions,
        "record bytes": case.record_bytes,
        "clients": case.clients,
    }
    return values[case.axis]
