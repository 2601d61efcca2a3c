"""A peer with queues, and a client program of ours for each end of one."""

from __future__ import annotations

from abc import abstractmethod

from bench.peers.processes import PeerProcesses


class QueuePeer(PeerProcesses):
    """See `PeerProcesses`. Every call raises NotAvailable if the client fails."""

    def produce(self, queue: str, count: int, record_bytes: int, how: object, warmup: int = 0) -> float:
        """Seconds for so many messages, after some to another queue, while which Java compiles. All are in the queue
        then."""
        return float(self._client("produce", queue, count, record_bytes, how, warmup))

    def consume(self, queue: str, count: int, record_bytes: int, how: object, warmup: int = 0) -> float:
        """Seconds from the first to the last of so many messages, after some of another queue."""
        return float(self._client("consume", queue, count, record_bytes, how, warmup))

    def delete(self, queue: str) -> None:
        self._client("delete", queue)

    @abstractmethod
    def _client(self, *arguments: object) -> str:
        """What the client program prints."""
