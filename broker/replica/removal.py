"""Removes the logs of partitions that were moved to other brokers. The watching thread calls it.

A log is removed only if the partition's state, as ZooKeeper's leader has it at that moment, names the replicas and this
broker is none of them. If it is made one again after that, it learns so by the same thread, and begins with an empty
log, in a new leader epoch, in which nothing counts that was said of the removed one.
"""

from __future__ import annotations

from collections.abc import Container

from broker.replica.metadata import Metadata
from broker.replica.undone import Undone
from broker.storage.log_dir import LogDirectory
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry

log = get_logger(__name__)

_Key = tuple[bytes, int]


class Removal:
    def __init__(self, broker_id: int, directory: LogDirectory, metadata: Metadata, undone: Undone) -> None:
        self._broker_id = broker_id
        self._directory = directory
        self._metadata = metadata
        self._undone = undone
        self._there = set(directory.existing())  # or was there
        self._moved: dict[_Key, str] = {}  # those of them that are to be removed, with the path of the state

    def opened(self, key: _Key) -> None:
        """Note that a log is there."""
        self._there.add(key)

    def moved(self, topic: str, key: _Key) -> None:
        """Note that the state which was read last has moved a partition to other brokers."""
        if key in self._there:
            self._moved[key] = paths.partition_state(topic, *key)

    def remove(self, hosted: Container[_Key]) -> None:
        """Remove what is to be removed, except what is hosted again. Raises ZooKeeperUnreachable."""
        if not self._moved or self._directory.failed is not None:
            return
        for key in [key for key in self._moved if key in hosted or key[0] not in self._metadata.ids]:
            self._undone.reasons.pop(self._moved.pop(key), None)
        states = registry.current_states(self._metadata.session, list(self._moved.values()))
        for key, path in list(self._moved.items()):
            state = states.get(path)
            if state is None:  # it changes just now, and is looked at again after that
                continue
            if state.replicas and self._broker_id not in state.held_by(()):
                with self._undone.sparing_others(path):
                    self._directory.remove_log(*key)
                    log.info("log_removed", topic_id=key[0].hex(), partition=key[1], replicas=list(state.replicas))
                    self._there.discard(key)
                    del self._moved[key]
            else:
                del self._moved[key]
