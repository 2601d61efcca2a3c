"""What kafkalog is to reach beside the peers, as ratios of figures of one run. Pure.

A goal names figures as "benchmark/figure". Where several peers are named, the fastest of them counts. A ratio is the
median of the ratios of rounds side by side in time (`each` of a figure), so that a slow minute hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, Mapping[str, Any]]
"""What benchmarks yielded, by "benchmark/figure"."""


class Goal(NamedTuple):
    """A ratio of ours to a peer's that is to be reached.

    Attributes:
        row: what is compared.
        ours: a figure.
        peers: figures; none: `ours` itself is what is to be reached.
        at_least, at_most: the goal; one of them.
        subtracted: from ours, without a peer.
    """

    row: str
    ours: str
    peers: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    subtracted: float = 0.0


class Reached(NamedTuple):
    """A goal, and the ratio that was measured; None: not all of its figures are there."""

    goal: Goal
    value: float | None

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        if self.goal.at_least is not None:
            return self.value >= self.goal.at_least
        assert self.goal.at_most is not None
        return self.value <= self.goal.at_most


def reached(figures: Figures) -> list[Reached]:
    return [Reached(goal, _value(goal, figures)) for goal in GOALS]


def by_name(lines: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {f"{line['benchmark']}/{line['name']}": line for line in lines if "value" in line}


def _value(goal: Goal, figures: Figures) -> float | None:
    if goal.ours not in figures:
        return None
    ours = figures[goal.ours]
    if not goal.peers:
        return float(ours["value"]) - goal.subtracted
    if not set(goal.peers) <= set(figures):  # the fastest may be among those that are missing
        return None
    peers = [figures[name] for name in goal.peers]
    is_rate = str(ours["unit"]).endswith("/s")
    peer = max(peers, key=_median) if is_rate else min(peers, key=_median)
    ratios = [float(mine) / float(theirs) for mine, theirs in zip(ours["each"], peer["each"], strict=True)]
    return statistics.median(ratios)


def _median(figure: Mapping[str, Any]) -> float:
    return float(figure["value"])


def _at_both(row: str, benchmark: str, what: str, ours: str, at_least: float) -> tuple[Goal, ...]:
    """A goal of a rate beside the connector at its defaults, and with the settings that make it faster."""
    defaults, tuned = (f"{benchmark}/{what}, connector {each}" for each in ("defaults", "tuned"))
    return tuple(
        Goal(f"{row}, over the connector {settings}", f"{benchmark}/{what}, {ours}", peers, at_least)
        for settings, peers in (("at its defaults", (defaults,)), ("as it is faster", (defaults, tuned)))
    )


def _of_stream(delivery: str, at_most: float) -> tuple[Goal, ...]:
    """Of both ways to write a stream, at their defaults and tuned, beside the connector as it is faster."""
    stream = "kafka_stream/stream to stream at 500 records/s, p50"
    peers = (f"{stream}, connector defaults", f"{stream}, connector tuned")
    row = "stream to stream at 500 records/s, p50"
    return tuple(
        Goal(f"{row}, {each}: time, of the connector's", f"{stream}, {each}", peers, at_most=at_most)
        for each in (
            delivery,
            f"{delivery}, tuned",
            f"{delivery}, write_stream",
            f"{delivery}, write_stream tuned",
        )
    )


_SEND_50 = "paper/produce, kafkalog, send, batches of 50"
_RDKAFKA = "paper/produce, Kafka, confluent-kafka"
_ALL_OF_RDKAFKA = tuple(f"{_RDKAFKA}, {each}" for each in ("defaults", "batches of 50", "tuned"))
_TO_QUEUES = {
    "RabbitMQ": tuple(f"paper/produce, RabbitMQ, {each}" for each in ("tuned", "1,000 unconfirmed")),
    "ActiveMQ": tuple(f"paper/produce, ActiveMQ, {each}" for each in ("tuned", "one by one", "transactions of 50")),
}
_FROM_QUEUES = {
    "RabbitMQ": tuple(f"paper/consume, RabbitMQ, {each}" for each in ("tuned", "1,000 unacknowledged")),
    "ActiveMQ": tuple(f"paper/consume, ActiveMQ, {each}" for each in ("tuned", "an ack for each")),
}

GOALS: tuple[Goal, ...] = (
    Goal(
        "Spark read, full schema: of the in-memory limit",
        "kafka/read, full schema, kafkalog",
        ("kafka/read, full schema, in-memory source",),
        0.95,
    ),
    *_at_both("Spark read, full schema", "kafka", "read, full schema", "kafkalog", 3.0),
    Goal(
        "Spark read, value only: of the in-memory limit",
        "kafka/read, value only, kafkalog",
        ("kafka/read, value only, in-memory source",),
        0.85,
    ),
    *_at_both("Spark read, value only", "kafka", "read, value only", "kafkalog", 4.5),
    *_at_both(
        "Spark read of 64 partitions, maxInputPartitions=2",
        "kafka",
        "read, 64 partitions",
        "kafkalog, maxInputPartitions=2",
        12.0,
    ),
    *_at_both("Spark write, at least once", "kafka", "write, kept", "at-least-once", 3.5),
    Goal(
        "Spark write, exactly once: of at least once",
        "kafka/write, kept, exactly-once",
        ("kafka/write, kept, at-least-once",),
        0.8,
    ),
    *_at_both("Spark write, exactly once", "kafka", "write, kept", "exactly-once", 2.5),
    *_at_both(
        "Spark write by key, 64 partitions, exactly once", "kafka", "write by key, 64 partitions", "exactly-once", 3
    ),
    *_at_both(
        "Spark write by key, 64 partitions, at least once", "kafka", "write by key, 64 partitions", "at-least-once", 3.5
    ),
    Goal("send, batches of 50, over librdkafka", _SEND_50, (f"{_RDKAFKA}, batches of 50",), 2.0),
    Goal(
        "send, batches of 50, over Java", _SEND_50, ("paper/produce, Kafka, ProducerPerformance, batches of 50",), 3.5
    ),
    Goal(
        "send_many, lists of 50, over librdkafka",
        "paper/produce, kafkalog, send_many, lists of 50",
        (f"{_RDKAFKA}, batches of 50",),
        3.5,
    ),
    Goal(
        "send, default settings, over librdkafka's",
        "paper/produce, kafkalog, send, defaults",
        (f"{_RDKAFKA}, defaults",),
        1.2,
    ),
    Goal(
        "send, batches of 1, over librdkafka",
        "paper/produce, kafkalog, send, batches of 1",
        (f"{_RDKAFKA}, batches of 1",),
        3.0,
    ),
    *(
        Goal(
            f"one record after the other, acks=1, p{each}: time, of librdkafka's",
            f"confluent/one by one, p{each}, kafkalog, acks=1",
            (f"confluent/one by one, p{each}, confluent-kafka, acks=1",),
            at_most=1.0,
        )
        for each in (50, 99)
    ),
    Goal("send_arrow, over librdkafka's best", "paper/produce, kafkalog, send_arrow", _ALL_OF_RDKAFKA, 6.0),
    Goal(
        "send_arrow, deleted, over librdkafka's best",
        "paper/produce, deleted, kafkalog, send_arrow",
        tuple(name.replace("produce, ", "produce, deleted, ") for name in _ALL_OF_RDKAFKA),
        6.0,
    ),
    *(
        Goal(
            f"send_arrow by key into 1,000 partitions, tables of {rows:,}, rows/s",
            f"confluent/by key, send_arrow, tables of {rows:,}",
            (),
            1e6,
        )
        for rows in (100_000, 10_000)
    ),
    Goal(
        "messages of four partitions, consume(10000), over librdkafka's, tuned",
        "confluent/consume(10000), kafkalog",
        ("confluent/consume(10000), confluent-kafka tuned",),
        2.0,
    ),
    Goal(
        "messages of one partition, over librdkafka's consume(10000), tuned",
        "paper/consume, kafkalog, messages",
        ("paper/consume, Kafka, confluent-kafka, tuned",),
        2.0,
    ),
    Goal(
        "Arrow, over ConsumerPerformance",
        "paper/consume, kafkalog, arrow",
        tuple(f"paper/consume, Kafka, ConsumerPerformance, {each}" for each in ("defaults", "tuned")),
        10.0,
    ),
    *(Goal(f"produce, batches of 50, over {peer}", _SEND_50, names, 10.0) for peer, names in _TO_QUEUES.items()),
    *(
        Goal(f"consume, over {peer}", "paper/consume, kafkalog, messages", names, 20.0)
        for peer, names in _FROM_QUEUES.items()
    ),
    *_of_stream("exactly-once", 1.3),
    *_of_stream("at-least-once", 1.1),
    *(
        Goal(
            f"an empty micro-batch, {each}: time, of an empty source and sink in Python",
            f"spark_stream/empty micro-batch, {each}",
            ("spark_stream/empty micro-batch, memory",),
            at_most=1.1,
        )
        for delivery in ("exactly-once", "at-least-once")
        for each in (delivery, f"{delivery}, write_stream")
    ),
    *(
        Goal(
            f"{doing} with 20 GB retained: of that with 100 MB",
            f"retained/{doing}, 20 GB retained",
            (f"retained/{doing}, 0.1 GB retained",),
            0.95,
        )
        for doing in ("produce", "consume")
    ),
    Goal(
        "bytes over the payload a message of 200 bytes, batches of 1,000",
        "paper/bytes on disk a message, kafkalog, batches of 1,000",
        at_most=9.0,
        subtracted=200.0,
    ),
    Goal("kafkalog local to serving, s", "start/kafkalog local to serving", at_most=1.5),
    Goal("a demo, environment made, s", "start/a demo, environment made", at_most=25.0),
)
