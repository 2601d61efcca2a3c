"""One producer or consumer as a process of its own, of kafkalog or, by `confluent-kafka`, of Kafka.

    with loads([Load("kafkalog", "produce", servers, "topic", 1_000_000, 200)]) as started:
        started.begin()
        seconds = started.ended()

A process says that it is ready once it has made what it sends, and is connected: a producer has sent its first record;
or once it knows how many records there are to read. It begins when it is told to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from broker.local.zookeeper import with_parent

ROOT = Path(__file__).resolve().parent.parent
_VALUES = 1000
_LARGE = {"message.max.bytes": 4_000_000, "queue.buffering.max.kbytes": 64 << 10}


class Load(NamedTuple):
    """What one process does.

    Attributes:
        system: kafkalog, or kafka.
        doing: produce; or consume, all that there is.
        records: to produce.
        record_bytes: of a value.
        partitions: of the topic; to consume, those whose number divided by `share_of` leaves `share`.
    """

    system: str
    doing: str
    bootstrap_servers: str
    topic: str
    records: int
    record_bytes: int
    partitions: int = 1
    share: int = 0
    share_of: int = 1


class Started:
    """Processes that are ready. Every call raises RuntimeError if one of them has failed."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def ended(self) -> float:
        """Seconds from the beginning until the last one has ended."""
        for process in self._processes:
            _said(process)
        return time.perf_counter() - self._begun


@contextmanager
def loads(wanted: Sequence[Load]) -> Iterator[Started]:
    """Start processes, which live in the block. Raises RuntimeError if one fails."""
    processes = []
    try:
        for each in wanted:
            command = with_parent([sys.executable, "-m", "bench.load", json.dumps(each)])
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
        for process in processes:
            _said(process)
        yield Started(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _said(process: subprocess.Popen[str]) -> None:
    """Return once a process has said something."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"a process of the benchmark has ended with {process.wait()}")


def _begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def _produce_ours(load: Load, values: list[bytes]) -> None:
    from kafkalog import Producer

    with Producer(load.bootstrap_servers, acks=1) as producer:
        send, topic, records = producer.send, load.topic, load.records - 1
        send(topic, values[0])
        producer.flush()
        _begin()
        for start in range(0, records, len(values)):
            for value in values[: records - start]:
                send(topic, value)
        producer.flush()
        print("done", flush=True)


def _produce_theirs(load: Load, values: list[bytes]) -> None:
    import confluent_kafka

    from bench.peers.librdkafka import TUNED_PRODUCER, produce_all

    producer = confluent_kafka.Producer({"bootstrap.servers": load.bootstrap_servers, **TUNED_PRODUCER, **_LARGE})
    produce_all(producer, load.topic, values, 1)
    _begin()
    produce_all(producer, load.topic, values, load.records - 1)
    print("done", flush=True)


def _consume_ours(load: Load, numbers: list[int]) -> None:
    from kafkalog import Admin, Consumer, TopicPartition

    partitions = [TopicPartition(load.topic, number) for number in numbers]
    with Admin(load.bootstrap_servers) as admin:
        left = sum(found.offset or 0 for found in admin.list_offsets(dict.fromkeys(partitions, "latest")).values())
    with Consumer(load.bootstrap_servers) as consumer:
        _begin()
        consumer.assign(dict.fromkeys(partitions, "earliest"))
        while left > 0:
            messages = consumer.consume(min(left, 10_000), 1.0)
            assert all(len(message.value or b"") == load.record_bytes for message in messages)
            left -= len(messages)
        print("done", flush=True)


def _consume_theirs(load: Load, numbers: list[int]) -> None:
    import confluent_kafka

    from bench.peers.librdkafka import TUNED_CONSUMER, end_offset

    group = {"group.id": f"g{os.getpid()}", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer({"bootstrap.servers": load.bootstrap_servers, **group, **TUNED_CONSUMER})
    partitions = [confluent_kafka.TopicPartition(load.topic, number, 0) for number in numbers]
    left = sum(end_offset(consumer, each) for each in partitions)
    _begin()
    consumer.assign(partitions)
    while left > 0:
        messages = consumer.consume(min(left, 10_000), 1.0)
        assert all(len(message.value() or b"") == load.record_bytes for message in messages)
        left -= len(messages)
    print("done", flush=True)
    consumer.close()


def main() -> None:
    load = Load(*json.loads(sys.argv[1]))
    if load.doing == "produce":
        values = [os.urandom(load.record_bytes) for _ in range(min(_VALUES, max(1, (64 << 20) // load.record_bytes)))]
        (_produce_ours if load.system == "kafkalog" else _produce_theirs)(load, values)
    else:
        numbers = list(range(load.share, load.partitions, load.share_of))
        (_consume_ours if load.system == "kafkalog" else _consume_theirs)(load, numbers)


if __name__ == "__main__":
    main()
