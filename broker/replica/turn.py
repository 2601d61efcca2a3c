"""What is to be done for some partitions of a topic (`broker/replica/host.py:Host.open_for_a_turn`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafkalog.errors import KafkalogError
from kafkalog.zk.registry import PartitionState


@dataclass
class Turn:
    """The work of one turn for some partitions of a topic.

    Attributes:
        wanted: the partitions to open, with the states that they will have.
        lost_states: the states of open partitions whose states in ZooKeeper are missing.
        failed: the errors of partitions that are not served.
        departing: the partitions of whose sets this replica must not be a member any more.
        anew: those of them of which it has no log.
        moved: the partitions that were moved to other brokers.
    """

    end: int
    wanted: dict[int, PartitionState] = field(default_factory=dict)
    lost_states: dict[int, PartitionState] = field(default_factory=dict)
    failed: dict[int, KafkalogError] = field(default_factory=dict)
    departing: dict[int, PartitionState] = field(default_factory=dict)
    anew: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
