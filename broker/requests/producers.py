"""Producer ids: unique in the cluster, taken from ZooKeeper in blocks, so that most requests need no round trip."""

from __future__ import annotations

import threading

from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk import registry
from kafkalog.zk.session import ZooKeeperSession


class ProducerIds:
    """Hands out producer ids. Those of a block that a restart cuts short are never used: there are enough."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._taking = threading.Lock()  # held while a new block is taken; before _lock
        self._lock = threading.Lock()  # guards _block
        self._block = range(0)

    def init_producer(self, request: pb.InitProducerRequest) -> pb.InitProducerReply:
        """A new producer id, at epoch 0. Raises ZooKeeperUnreachable, if there is none left of the block."""
        producer_id = self._next()
        while producer_id is None:
            with self._taking:
                producer_id = self._next()  # of a block that another call took meanwhile
                if producer_id is None:
                    block = registry.take_producer_ids(self._session)
                    with self._lock:
                        self._block = block
        return pb.InitProducerReply(producer_id=producer_id, producer_epoch=0)

    def _next(self) -> int | None:
        with self._lock:
            if not self._block:
                return None
            producer_id, self._block = self._block[0], self._block[1:]
            return producer_id
