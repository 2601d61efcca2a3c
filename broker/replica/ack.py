"""What the ack of a write waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from broker.replica.partition import Partition


class Ack(NamedTuple):
    """What the ack of a write waits for. It belongs to a place and to a leader epoch: no later epoch's watermark keeps
    its promise.

    Attributes:
        epoch: in which the write was made.
        end_offset: where it ends in the log.
        staged_end: where it ends in what is staged; -1: nothing was.
        needs_flush: the log must be durable up to the offset.
        needs_replicas: the watermarks must reach these places.
    """

    partition: Partition
    epoch: int
    end_offset: int
    staged_end: int
    needs_flush: bool
    needs_replicas: bool

    def is_kept(self) -> bool:
        """Whether the promise is kept.

        Raises:
            StorageFailed, NotLeader, NotEnoughReplicasAfterAppend: it is not known whether it will be.
        """
        return self.partition.keeps(self)
