"""Producer ids: unique in the cluster, taken from ZooKeeper in blocks, so that most requests need no round trip."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk import registry
from kafkalog.zk.session import ZooKeeperSession


class ProducerIds:
    """Hands out producer ids. Those of a block that a restart cuts short are never used: there are enough."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._lock = threading.Lock()  # guards _block; held while a new block is taken
        self._block: Iterator[int] = iter(())

    def init_producer(self, request: pb.InitProducerRequest) -> pb.InitProducerReply:
        """A new producer id, at epoch 0. Raises ZooKeeperUnreachable."""
        with self._lock:
            producer_id = next(self._block, None)
            if producer_id is None:
                self._block = iter(registry.take_producer_ids(self._session))
                producer_id = next(self._block)
        return pb.InitProducerReply(producer_id=producer_id, producer_epoch=0)
