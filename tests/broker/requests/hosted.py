"""Real partitions over a log directory, as requests find them, without ZooKeeper or a port."""

from __future__ import annotations

from typing import Any

from broker.config import BrokerSettings, TopicSettings
from broker.replica.partition import Partition
from broker.storage.log_dir import LogDirectory
from kafkalog import errors
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.zk.registry import PartitionState

TOPIC_ID = b"0123456789abcdef"


class Hosted:
    """The part of a host that requests of data ask."""

    def __init__(self, directory: LogDirectory, partitions: int = 2, **config: Any) -> None:
        settings = TopicSettings.parse(config)
        self.partitions = [
            Partition(
                "t",
                TOPIC_ID,
                number,
                directory.open_log(TOPIC_ID, number, f"t-{number}", settings, None),
                directory,
                settings,
                0,
                SYSTEM_CLOCK,
            )
            for number in range(partitions)
        ]
        for partition in self.partitions:
            partition.role.lead(PartitionState.only(0, "here"), [0])
        self.hosted = {(TOPIC_ID, partition.number): partition for partition in self.partitions}
        self.settings = BrokerSettings.parse()
        self.clock: Clock = SYSTEM_CLOCK

    def leader_of(self, topic_id: bytes, number: int) -> Partition:
        if topic_id != TOPIC_ID:
            raise errors.UnknownTopicId(topic_id=topic_id.hex())
        return self.partitions[number]
