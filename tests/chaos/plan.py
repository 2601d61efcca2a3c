"""What a run does, all of it from one seed: settings, clients, and faults with the times between them. Pure.

A seed fixes what is attempted. When it happens depends on the machine: threads and processes are not simulated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

TOPIC = "chaos"

PROCESS = ("kill", "suspend", "restart")
"""Faults of one broker's process."""
NETWORK = (
    "cut from zookeeper",
    "held from zookeeper",
    "answers of zookeeper lost",
    "cut from brokers",
    "cut",
    "answers lost",
    "slow",
)
"""Faults of one broker's network."""
SHARED = ("kill all", "kill zookeeper", "suspend zookeeper")
CLIENTS = ("kill writer", "kill member")
KINDS = (*PROCESS, *NETWORK, *SHARED, *CLIENTS)
LOSSES = ("lose power", "lose disk")
"""Faults that lose what one broker had: what was not synced, or all. They happen while all replicas are in sync, so
where there are three no acknowledged record is lost by them. Elsewhere no seed has them unless they are asked for."""
MOVES = ("move",)
"""Not faults but what goes on beside them, and needs a broker that has no copy: `--replication-factor 2`."""
MORTAL = ("kill", "suspend", "restart", "cut from zookeeper")
"""Faults that end what one broker leads, and nothing else: all other partitions must go on meanwhile. A leader that is
cut off from brokers alone keeps its session, and leads on without taking writes, as in Kafka."""

_REMEMBERED_MIN = 5  # of producer.batches.remembered
ROLES = ("leader", "follower", "any")


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        role, partition: the broker that it happens to: what it is of the partition. Without replication no partition
            has a follower; then it is another broker than its leader.
    """

    kind: str
    role: str
    partition: int


class Step(NamedTuple):
    """Faults at the same time. `hold_s` passes until they are mended, `pause_s` before they begin."""

    pause_s: float
    faults: tuple[Fault, ...]
    hold_s: float


class Plan(NamedTuple):
    """A run.

    Attributes:
        producers, readers, writers: settings of each, snake_case.
        members: of the consumers' group.
        spared: the broker that is down while the others have to serve.
    """

    seed: int
    replication_factor: int
    brokers: int
    partitions: int
    broker_settings: dict[str, Any]
    topic_settings: dict[str, str]
    producers: tuple[dict[str, Any], ...]
    readers: tuple[dict[str, Any], ...]
    writers: tuple[dict[str, Any], ...]
    members: int
    spared: int
    steps: tuple[Step, ...]

    def text(self) -> str:
        """All of it, one part a line."""
        lines = [f"    {name}: {json.dumps(value)}" for name, value in self._asdict().items() if name != "steps"]
        lines += [
            f"    step {number}: after {step.pause_s} s for {step.hold_s} s: "
            + ", ".join(f"{fault.kind} ({fault.role} of {fault.partition})" for fault in step.faults)
            for number, step in enumerate(self.steps)
        ]
        return "\n".join(lines)


def plan(
    seed: int, seconds: float, replication_factor: int = 1, kinds: Sequence[str] = (), acks: str | None = None
) -> Plan:
    """What a seed stands for.

    Args:
        seconds: that all steps take together, at least.
        kinds: of the faults; none given: `KINDS`, and `LOSSES` where there are three replicas.
        acks: of the producers, 1 or all: what is not acknowledged cannot be missed. None: all if there are replicas.
    """
    acks = acks or ("all" if replication_factor > 1 else "1")
    kinds = kinds or (*KINDS, *(LOSSES if replication_factor > 2 else ()))
    dice = random.Random(seed)
    brokers = max(3 if replication_factor > 1 else 2, replication_factor)
    partitions = dice.choice((2, 3, 4))
    return Plan(
        seed=seed,
        replication_factor=replication_factor,
        brokers=brokers,
        partitions=partitions,
        broker_settings=({"default.replication.factor": replication_factor} if replication_factor > 1 else {})
        | {
            "producer.batches.remembered": dice.choice((_REMEMBERED_MIN, 128)),
            "log.retention.check.interval.ms": dice.choice((200, 60_000)),
        },
        topic_settings=_topic_settings(dice, replication_factor),
        producers=tuple(_producer(dice, acks) for _ in range(3)),
        readers=tuple(_reader(dice) for _ in range(2)),
        writers=({"rows": dice.choice((2, 20, 200)), "tasks": dice.choice((1, 2)), "kills": dice.choice((0.0, 0.05))},),
        members=dice.choice((1, 2)),
        spared=dice.randrange(brokers),
        steps=tuple(_steps(dice, seconds, partitions, kinds)),
    )


def _topic_settings(dice: random.Random, replication_factor: int) -> dict[str, str]:
    settings = {
        "segment.bytes": dice.choice(("16384", "262144", "1073741824")),
        "index.interval.bytes": dice.choice(("256", "65536")),
        **dice.choice(({}, {}, {"flush.messages": "1"}, {"flush.ms": "50", "flush.visibility": "flushed"})),
    }
    if replication_factor > 1:
        settings |= {"min.insync.replicas": str(dice.choice((1, 2)) if replication_factor == 2 else 2)}
    return settings


def _producer(dice: random.Random, acks: str) -> dict[str, Any]:
    return {
        "acks": acks,
        "linger_ms": dice.choice((0, 5, 50)),
        "batch_records": dice.choice((1, 7, 1000)),
        "compression_type": dice.choice(("none", "lz4", "zstd")),
        "max_in_flight_requests": dice.choice((1, _REMEMBERED_MIN)),
        "delivery_timeout_ms": dice.choice((3_000, 120_000, 120_000)),
        "enable_idempotence": dice.random() < 0.85,
        "given_up": dice.choice((0.0, 0.005)),
    }


def _reader(dice: random.Random) -> dict[str, Any]:
    return {
        "reads": dice.choice(("consume", "arrow", "poll")),
        "goes_back": dice.choice((0.0, 0.01)),
        "fetch_max_bytes": dice.choice((1000, 8 << 20)),
        "fetch_max_wait_ms": dice.choice((20, 500)),
    }


def _steps(dice: random.Random, seconds: float, partitions: int, kinds: Sequence[str]) -> list[Step]:
    """One fault at a time, and in every third step several."""
    steps, passed = [], 0.0
    while passed < seconds:
        count = 1 if dice.random() < 0.67 else dice.choice((2, 3))
        faults = tuple(Fault(dice.choice(kinds), dice.choice(ROLES), dice.randrange(partitions)) for _ in range(count))
        # Past the session's timeout in two of three steps.
        step = Step(round(dice.uniform(0.1, 1.5), 2), faults, round(dice.choice((0.3, 3.0, 5.0)) + dice.random(), 2))
        steps.append(step)
        passed += step.pause_s + step.hold_s
    return steps
