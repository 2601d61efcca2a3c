"""A partition over a log directory, without ZooKeeper or a port."""

from __future__ import annotations

from collections.abc import Sequence

from broker.config import TopicSettings
from broker.replica.partition import Partition
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.format.batch import Batch
from kafkalog.zk.registry import PartitionState
from tests.broker.storage.batches import TOPIC_ID, topic


def open_partition(directory: LogDirectory, settings: TopicSettings | None = None, leader_epoch: int = 0) -> Partition:
    settings = settings or topic()
    log = directory.open_log(TOPIC_ID, 0, "t-0", settings, None)
    partition = Partition("t", TOPIC_ID, 0, log, directory, settings, 0, SYSTEM_CLOCK)
    partition.role.lead(PartitionState.only(0, "here", max(leader_epoch, log.last_epoch)), [0])
    return partition


def append_part_of_a_batch(partition: Partition, batches: Sequence[Batch]) -> None:
    """As an apply does that stops behind them."""
    header, _ = batches[0]
    partition._applier.hide((header.producer_id, header.transaction_batch_id))
    partition.log.append_decided(batches, partition.log.last_epoch)
