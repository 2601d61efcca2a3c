"""The paper's evaluation (section 5): messages of 200 bytes that one producer sends and one consumer reads, beside
Kafka, RabbitMQ and ActiveMQ, all on this machine; and the bytes that each keeps on its disk for a message.

Each way to produce or consume is at its `defaults`, or `tuned`: as fast as its documents say it can be, with the disk
left to the operating system, as all of the paper's were. A topic or queue has one partition, as in the paper, and is
made anew for each run of a producer. What runs wrote is kept until the end, so that the disk has to take all of it;
`deleted` are runs for which what the one before wrote is deleted, which favours the system that writes back later.
Consumers of the two logs read, again and again, what a producer wrote at its defaults. A million messages, five to
consume from the logs, where the paper had ten: with the slow ones by turns, that takes half an hour. Java has compiled
its clients before they are timed, by messages of the same run that are not counted. After each run of a producer the
messages are counted.
"""

from __future__ import annotations

import os
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer as LibrdkafkaConsumer
from confluent_kafka import Producer as LibrdkafkaProducer
from confluent_kafka.admin import AdminClient

from bench.measure import NotAvailable, all_there, by_turns, figure, records_in, seconds
from bench.peers import activemq, rabbitmq
from bench.peers.jars import patience_seconds
from bench.peers.kafka import (
    SERVER,
    SERVER_VERSION,
    TOOLS,
    KafkaServer,
    consumer_performance,
    kafka_jars,
    producer_performance,
)
from bench.peers.librdkafka import (
    TUNED_CONSUMER,
    TUNED_PRODUCER,
    delete_topic,
    end_offsets,
    make_topic,
    produce_all,
)
from bench.peers.queues import QueuePeer
from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition

RECORD_BYTES = 200
BATCH = 50
_KAFKA_BATCH_BYTES = BATCH * (RECORD_BYTES + 8) + 61
"""Of 50 records: Kafka's format has 7 to 9 bytes a record, and a header of 61."""

Client = Callable[[int], float]
"""Given how many messages to produce or consume, returns the seconds that they took."""

_WARMUP = 10_000
"""Messages by which Java's clients get warm, of ten thousand and more."""
_SINGLE = "batches of 1"
_SHARE_OF_SINGLE = 0.05
"""Of the messages, so that those who make a batch of each do not take minutes."""


class System(ABC):
    """One of those compared, which serves from its making until the stack is left.

    Attributes:
        name, version: of the system.
        share, consumed_share: how many of the benchmark's messages are enough for it, to produce and to consume.
        data: its folder.
        current: the topic or queue to use.
        producers, consumers: ways to use it, by name. The first producer makes what the consumers read.
        sizes: further producers of which only the bytes on disk are asked.
    """

    name: str
    version: str
    share = 1.0
    consumed_share = 5.0
    data: Path
    producers: Mapping[str, Client]
    consumers: Mapping[str, Client]
    sizes: Mapping[str, Client] = {}

    def __init__(self) -> None:
        self._numbers = count()
        self.current = ""

    def renew(self, is_last_deleted: bool) -> None:
        """Make another topic or queue the current one."""
        last, self.current = self.current, f"messages-{next(self._numbers)}"
        if last and is_last_deleted:
            self._delete(last)
        self._make(self.current)

    @property
    def fill(self) -> Client:
        """What makes what the consumers read."""
        return next(iter(self.producers.values()))

    @abstractmethod
    def _make(self, topic: str) -> None: ...

    @abstractmethod
    def _delete(self, topic: str) -> None: ...


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    patience = patience_seconds(scale)
    records = max(10_000, int(1_000_000 * scale))
    with ExitStack() as stack:
        systems: list[System] = []
        for kind in (Kafkalog, Kafka, RabbitMq, ActiveMq):
            try:
                systems.append(kind(stack, patience))
            except NotAvailable as reason:
                yield {"name": kind.__name__, "skipped": str(reason)}
        for is_deleted in (False, True):
            clients = {(system, name): client for system in systems for name, client in system.producers.items()}

            def renew_and_run(system: System, client: Client, messages: int, is_deleted: bool = is_deleted) -> float:
                system.renew(is_deleted)
                return client(messages)

            shares = {system: system.share for system in systems}
            yield from _figures("produce" + ", deleted" * is_deleted, clients, renew_and_run, records, shares, scale)
            for system in () if is_deleted else systems:  # before anything is deleted: its files may go at any time
                yield from _sizes(system, int(records * system.share))
        for system in systems:
            system.renew(False)
            system.fill(int(records * system.consumed_share))
        clients = {(system, name): client for system in systems for name, client in system.consumers.items()}
        shares = {system: system.consumed_share for system in systems}
        yield from _figures(
            "consume", clients, lambda system, client, messages: client(messages), records, shares, scale
        )


def _figures(
    what: str,
    clients: Mapping[tuple[System, str], Client],
    timed: Callable[[System, Client, int], float],
    records: int,
    of_systems: Mapping[System, float],
    scale: float,
) -> Iterator[dict[str, object]]:
    """Messages a second of each client."""
    shares = {key: of_systems[key[0]] * (_SHARE_OF_SINGLE if key[1].endswith(_SINGLE) else 1.0) for key in clients}
    counts = {key: max(500, int(records * share)) for key, share in shares.items()}
    seconds_a_message = {
        f"{key[0].name}, {key[1]}": lambda key=key, client=client: timed(key[0], client, counts[key]) / counts[key]
        for key, client in clients.items()
    }
    taken = by_turns(seconds_a_message, scale)
    for (system, name), times in zip(clients, taken.values(), strict=True):
        yield figure(
            f"{what}, {system.name}, {name}",
            "messages/s",
            [1 / each for each in times],
            records=counts[system, name],
            record_bytes=RECORD_BYTES,
            version=system.version,
        )


def _sizes(system: System, messages: int) -> Iterator[dict[str, object]]:
    """What a message takes on disk."""
    for name, client in {**system.sizes, system.name: system.fill}.items():
        system.renew(False)
        before = _bytes_of(system.data)
        client(messages)
        taken = [(_bytes_of(system.data) - before) / messages]
        facts = {"records": messages, "record_bytes": RECORD_BYTES, "version": system.version}
        yield figure(f"bytes on disk a message, {name}", "bytes", taken, **facts)


def _bytes_of(folder: Path) -> int:
    """Bytes of all files, without what is reserved after their ends, or left out in them."""
    found = [each.stat() for each in folder.rglob("*") if each.is_file()]
    return sum(min(each.st_size, each.st_blocks * 512) for each in found)


class Kafkalog(System):
    name, version = "kafkalog", "this checkout"

    def __init__(self, stack: ExitStack, patience: float) -> None:
        super().__init__()
        self._cluster = stack.enter_context(LocalCluster(durable=True))
        self._servers = self._cluster.bootstrap_servers
        self._admin = stack.enter_context(Admin(self._servers))
        self._values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
        self._lists = [self._values[start : start + BATCH] for start in range(0, len(self._values), BATCH)]
        self.data = self._cluster.root
        self.producers = {
            "send, defaults": partial(self._send, {}),
            f"send, batches of {BATCH}": partial(self._send, {"batch_records": BATCH, "acks": 1}),
            f"send, {_SINGLE}": partial(self._send, {"batch_records": 1, "acks": 1}),
            f"send_many, lists of {BATCH}": self._send_many,
            "send_arrow": self._send_arrow,
        }
        self.consumers = {"messages": self._messages, "arrow": self._arrow}
        self.sizes = {
            f"kafkalog, batches of {records:,}": partial(self._send, {"batch_records": records, "acks": 1})
            for records in (BATCH, 1000)
        }

    def _timed(self, send: Callable[[], object], messages: int) -> float:
        taken = seconds(send)
        all_there(records_in(self._admin, self.current, 1), messages, self.current)
        return taken

    def _make(self, topic: str) -> None:
        self._admin.create_topic(topic, partitions=1)

    def _delete(self, topic: str) -> None:
        self._admin.delete_topic(topic)

    def _send(self, settings: Mapping[str, Any], messages: int) -> float:
        def send() -> None:
            with Producer(self._servers, **settings) as producer:
                send_one, topic = producer.send, self.current
                for start in range(0, messages, len(self._values)):
                    for value in self._values[: messages - start]:
                        send_one(topic, value)
                producer.flush()

        return self._timed(send, messages)

    def _send_many(self, messages: int) -> float:
        def send() -> None:
            with Producer(self._servers, acks=1, batch_records=BATCH) as producer:
                for start in range(0, messages, len(self._values)):
                    for values in self._lists[: -(-(messages - start) // BATCH)]:
                        producer.send_many(self.current, values)
                producer.flush()

        return self._timed(send, messages)

    def _send_arrow(self, messages: int) -> float:
        rows = pa.record_batch([pa.array(self._values, pa.binary())], names=["value"])

        def send() -> None:
            with Producer(self._servers, acks=1) as producer:
                for start in range(0, messages, len(self._values)):
                    producer.send_arrow(self.current, rows.slice(0, messages - start))
                producer.flush()

        return self._timed(send, messages)

    def _messages(self, messages: int) -> float:
        def read() -> None:
            with Consumer(self._servers) as consumer:
                consumer.assign({TopicPartition(self.current, 0): "earliest"})
                size = sum(len(message.value or b"") for message in consumer.messages(max_messages=messages))
                assert size == messages * RECORD_BYTES

        return seconds(read)

    def _arrow(self, messages: int) -> float:
        def read() -> None:
            with Consumer(self._servers) as consumer:
                consumer.assign({TopicPartition(self.current, 0): "earliest"})
                left = messages
                for batch in consumer.arrow_batches():
                    left -= batch.num_rows
                    if left <= 0:
                        break

        return seconds(read)


class Kafka(System):
    name, version = "Kafka", SERVER_VERSION
    _BATCHES: Mapping[str, Mapping[str, object]] = {
        "defaults": {},
        f"batches of {BATCH}": {"acks": 1, "batch.size": _KAFKA_BATCH_BYTES, "linger.ms": 100},
        _SINGLE: {"acks": 1, "batch.size": 0},
        "tuned": {"acks": 1, "batch.size": 1_000_000, "linger.ms": 20, "buffer.memory": 64 << 20},
    }
    _READS: Mapping[str, Mapping[str, object]] = {
        "defaults": {},
        "tuned": {"max.partition.fetch.bytes": 8 << 20, "fetch.max.bytes": 64 << 20, "max.poll.records": 10_000},
    }
    _LIBRDKAFKA_BATCHES: Mapping[str, Mapping[str, object]] = {
        "defaults": {},
        f"batches of {BATCH}": {"acks": 1, "batch.num.messages": BATCH},
        _SINGLE: {"acks": 1, "batch.num.messages": 1},
        "tuned": TUNED_PRODUCER,
    }
    _LIBRDKAFKA_READS: Mapping[str, Mapping[str, object]] = {
        "defaults": {},
        "tuned": TUNED_CONSUMER,
    }

    def __init__(self, stack: ExitStack, patience: float) -> None:
        super().__init__()
        self._tools = kafka_jars(TOOLS, patience)
        server = stack.enter_context(KafkaServer(kafka_jars(SERVER, patience), {"log.segment.delete.delay.ms": 1000}))
        self._servers = {"bootstrap.servers": server.bootstrap_servers}
        self._admin = AdminClient(dict(self._servers))
        self._values = [os.urandom(RECORD_BYTES) for _ in range(10_000)]
        self._config = server.folder / "consumer.properties"
        self._payloads = server.folder / "payloads"
        letters = string.ascii_letters + string.digits
        lines = ("".join(random.choices(letters, k=RECORD_BYTES)) for _ in self._values)
        self._payloads.write_text("\n".join(lines))
        self._groups = count()
        self.data = server.folder
        self.producers = {
            **{f"ProducerPerformance, {name}": partial(self._produce, given) for name, given in self._BATCHES.items()},
            **{
                f"confluent-kafka, {name}": partial(self._send, given)
                for name, given in self._LIBRDKAFKA_BATCHES.items()
            },
        }
        self.consumers = {
            **{f"ConsumerPerformance, {name}": partial(self._consume, given) for name, given in self._READS.items()},
            **{
                f"confluent-kafka, {name}": partial(self._read, given) for name, given in self._LIBRDKAFKA_READS.items()
            },
        }

    def _make(self, topic: str) -> None:
        make_topic(self._admin, topic, 1)

    def _delete(self, topic: str) -> None:
        delete_topic(self._admin, topic)

    def _produce(self, given: Mapping[str, object], messages: int) -> float:
        settings = {**self._servers, **given}
        taken = producer_performance(
            self._tools, self.current, messages, self._payloads, settings, warmup := messages // 2
        )
        self._all_there(messages + warmup)
        return taken

    def _all_there(self, messages: int) -> None:
        all_there(end_offsets(self._servers["bootstrap.servers"], self.current, 1), messages, self.current)

    def _consume(self, given: Mapping[str, object], messages: int) -> float:
        settings = {**self._servers, **given}
        return consumer_performance(self._tools, self.current, messages, self._config, settings)

    def _send(self, given: Mapping[str, object], messages: int) -> float:
        def send() -> None:
            producer = LibrdkafkaProducer({**self._servers, **given})
            produce_all(producer, self.current, self._values, messages)

        taken = seconds(send)
        self._all_there(messages)
        return taken

    @property
    def fill(self) -> Client:
        """By librdkafka, at its defaults: Java's tool sends some more, to get warm."""
        return partial(self._send, {})

    def _read(self, given: Mapping[str, object], messages: int) -> float:
        group = {"group.id": f"g{next(self._groups)}", "auto.offset.reset": "earliest"}
        consumer = LibrdkafkaConsumer({**self._servers, **group, **given})
        try:
            consumer.subscribe([self.current])
            while not consumer.consume(1, 1.0):
                pass

            def read() -> None:
                left = messages - 1
                while left:
                    got = consumer.consume(min(left, 10_000), 1.0)
                    sizes = [len(message.value() or b"") for message in got]
                    assert set(sizes) <= {RECORD_BYTES}
                    left -= len(got)

            return seconds(read)
        finally:
            consumer.close()


class Queues(System):
    """A system whose queues are empty once they are read.

    Args:
        filling: how to produce what is to be consumed.
    """

    def __init__(self, peer: QueuePeer, filling: object) -> None:
        super().__init__()
        self._peer, self._filling = peer, filling
        self.data = peer.folder
        self.consumed_share = self.share

    @property
    def fill(self) -> Client:
        return lambda messages: self._peer.produce(self.current, messages, RECORD_BYTES, self._filling)

    def _make(self, topic: str) -> None:
        """Its first client makes it."""

    def _delete(self, topic: str) -> None:
        self._peer.delete(topic)

    def _produce(self, how: object, messages: int) -> float:
        return self._peer.produce(self.current, messages, RECORD_BYTES, how, min(messages, _WARMUP))

    def _consume(self, how: object, messages: int) -> float:
        self.renew(True)
        self.fill(messages)
        return self._peer.consume(self.current, messages, RECORD_BYTES, how, min(messages, _WARMUP))


class RabbitMq(Queues):
    name = "RabbitMQ"
    share = 0.1

    def __init__(self, stack: ExitStack, patience: float) -> None:
        super().__init__(stack.enter_context(rabbitmq.RabbitMq(rabbitmq.rabbitmq_jars(patience))), 0)
        self.version = rabbitmq.version()
        self.producers = {"tuned": partial(self._produce, 0), "1,000 unconfirmed": partial(self._produce, 1000)}
        self.consumers = {"tuned": partial(self._consume, 0), "1,000 unacknowledged": partial(self._consume, 1000)}


class ActiveMq(Queues):
    name, version = "ActiveMQ", activemq.VERSION
    share = 0.03

    def __init__(self, stack: ExitStack, patience: float) -> None:
        super().__init__(stack.enter_context(activemq.ActiveMq(activemq.activemq_jars(patience), "NEVER")), "async")
        self.producers = {
            "tuned": partial(self._produce, "async"),
            "one by one": partial(self._produce, "each"),
            f"transactions of {BATCH}": partial(self._produce, BATCH),
        }
        self.consumers = {"tuned": partial(self._consume, "some"), "an ack for each": partial(self._consume, "each")}
