"""A peer with queues, and a client program of ours for each end of one."""

from __future__ import annotations

from abc import abstractmethod

from bench.peers.processes import PeerProcesses


class QueuePeer(PeerProcesses):
    """See `PeerProcesses`. Every call raises NotAvailable if the client fails."""

    def produce(self, queue: str, count: int, record_bytes: int, how: object) -> float:
        """Seconds for so many messages."""
        return float(self._client("produce", queue, count, record_bytes, how))

    def consume(self, queue: str, count: int, how: object) -> float:
        """Seconds from the first to the last of so many messages."""
        return float(self._client("consume", queue, count, how))

    def delete(self, queue: str) -> None:
        self._client("delete", queue)

    @abstractmethod
    def _client(self, *arguments: object) -> str:
        """What the client program prints."""
