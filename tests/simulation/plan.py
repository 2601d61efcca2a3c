"""What a seed expands to: the settings of a simulated cluster, and the faults with their times. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = {
    "kill": 3,
    "stop at a disk step": 2,
    "loss of power": 3,
    "loss of a disk": 2,
    "clean stop": 1,
    "two failovers": 3,
    "cut off from ZooKeeper": 2,
    "slow ZooKeeper": 2,
    "session expires": 2,
    "freeze": 2,
    "isolated": 2,
    "link blocked": 3,
    "slow links": 3,
    "slow threads": 2,
    "connections cut": 2,
    "failovers with a straggler": 3,
    "deposed leader": 3,
}
"""The faults, and how often each comes."""


class Fault(NamedTuple):
    """A fault.

    Attributes:
        at: when, in seconds.
        target: a broker; -1: the one that leads partition 0 then.
        other: another broker, of a link.
        seconds: how long it lasts, or until the broker starts again.
        steps: of the disk.
        keep: which part of what is not synced a loss of power leaves.
        is_noticed: ZooKeeper notices the end of a process at once, not after the session's timeout.
    """

    at: float
    kind: str
    target: int
    other: int
    seconds: float
    steps: int
    keep: float
    is_noticed: bool


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        brokers: how many.
        partitions: of the topic.
        config: the topic's.
        settings: of the brokers.
        pause_seconds: between the batches of a producer.
        switch_chance: of a change of threads where a lock is taken.
        latency_seconds: of the network.
        stages: there are exactly-once writes too.
        staged_file_bytes: at which a file of what is staged is full.
        adopts: parts have files of their own from their second batch on, which become segments.
        deletes: readers delete what they have read.
    """

    seed: int
    brokers: int
    partitions: int
    seconds: float
    config: dict[str, str]
    settings: dict[str, str]
    pause_seconds: float
    switch_chance: float
    latency_seconds: float
    stages: bool
    staged_file_bytes: int
    adopts: bool
    deletes: bool
    faults: list[Fault] = field(default_factory=list)

    def __str__(self) -> str:
        facts = [f"seed {self.seed}: {self.partitions} partitions, {self.config}, {self.settings}"]
        facts += [
            f"  {each.at:6.2f} s {each.kind} of {'the leader' if each.target < 0 else f'b{each.target}'} "
            f"(b{each.other}, {each.seconds:.2f} s, {each.steps} steps, keeps {each.keep:g})"
            for each in self.faults
        ]
        return "\n".join(facts)


def plan(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"plan {seed}")
    seconds = chance.uniform(6.0, 16.0)
    config = {
        "segment.bytes": "4096",
        "index.interval.bytes": "512",
        "min.insync.replicas": chance.choice(("2", "2", "2", "1", "3")),
    }
    if chance.random() < 0.15:
        config["flush.messages"] = "1"
    lag = chance.choice((500, 1000, 2000, 4000))
    settings = {
        "zookeeper.session.timeout.ms": str(chance.choice((2000, 3000, 5000))),
        "replica.lag.time.max.ms": str(lag),
        "leader.rebalance.interval.ms": str(chance.choice((300, 1000, 3000, 30_000))),
        "log.retention.check.interval.ms": str(chance.choice((1000, 5000))),
    }
    kinds, weights = list(KINDS), list(KINDS.values())
    faults = []
    at = 1.0
    rate = chance.uniform(0.5, 2.0)
    while (at := at + chance.expovariate(rate)) < seconds:
        target = chance.choice((-1, -1, 0, 1, 2))
        other = chance.choice([each for each in range(3) if each != target])
        long = chance.choice((0.3, 1.5, 6.0))
        faults.append(
            Fault(
                at,
                chance.choices(kinds, weights)[0],
                target,
                other,
                chance.random() * long,
                chance.randint(1, 40),
                chance.choice((0.0, 0.5, 0.9)),
                chance.random() < 0.6,
            )
        )
    return Plan(
        seed,
        3,
        2,
        seconds,
        config,
        settings,
        chance.choice((0.05, 0.15, 0.4)),
        chance.choice((0.0, 0.02)),
        chance.choice((0.0003, 0.0003, 0.003, 0.02)),
        chance.random() < 0.5,
        random.Random(f"staged files {seed}").choice((1000, 2000, 5000)),
        random.Random(f"adopted files {seed}").random() < 0.5,
        random.Random(f"deletes {seed}").random() < 0.4,
        faults,
    )
