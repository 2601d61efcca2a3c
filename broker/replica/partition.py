"""One replica of a partition on this broker: its log, who leads it, who waits for it. Knows no sockets, no ZooKeeper.

Thread-safe. Waiters are woken outside every lock; a wake is a hint to look again, and a registration is good for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from broker.storage.directory import LogDirectory
from broker.storage.file_slice import FileSlice, Hint
from broker.storage.log import Appended, Log
from kafkalog.config import Values
from kafkalog.errors import Closed, KafkalogError, NotLeader, StorageFailed
from kafkalog.format.batch import BatchHeader

Wake = Callable[[], None]


class Partition:
    """A partition that this broker holds and leads.

    Args:
        topic: the topic's name, for messages.
        topic_id: what requests name it by.
        number: within the topic.
        log: its open log, of `directory`, which closes it.
        settings: the topic's.
    """

    def __init__(
        self,
        topic: str,
        topic_id: bytes,
        number: int,
        log: Log,
        directory: LogDirectory,
        settings: Values,
        broker_id: int,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.label = f"{topic}-{number}"
        self.log = log
        self.settings = settings
        self._directory = directory
        self._broker_id = broker_id
        self._closed = False
        self._lock = threading.Lock()  # guards _waiters; taken after none, held for set operations only
        self._waiters: set[Wake] = set()
        log.on_flushed = self.wake_waiters

    # --- what requests do ----------------------------------------------------------------------------------------

    def append_as_leader(self, batches: Sequence[tuple[BatchHeader, memoryview]]) -> list[Appended | KafkalogError]:
        """Append checked batches in one write; each one's outcome, in order. Those that wait for data are woken.

        Raises:
            NotLeader: the partition was closed here meanwhile.
            StorageFailed, DiskFull: nothing was written.
        """
        if self._closed:
            raise self._not_here()
        try:
            outcomes = self.log.append(batches)
        except Closed:  # between the check above and here
            raise self._not_here() from None
        if self._waiters:
            self.wake_waiters()
        return outcomes

    def read(self, offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        """A description of the bytes from an offset on; see Log.read."""
        if self._closed:
            raise self._not_here()
        try:
            return self.log.read(offset, max_bytes, hint)
        except Closed:
            raise self._not_here() from None

    def is_flushed_to(self, end_offset: int) -> bool:
        """Whether what ends there outlives a power cut.

        Raises:
            StorageFailed: it cannot be known any more.
            NotLeader: the partition was closed here before it did.
        """
        failed = self._directory.failed
        if failed is not None:
            raise StorageFailed(**failed.facts)
        closed = self._closed  # before the offset is looked at: a clean close flushes first
        if self.log.flushed_offset >= end_offset:
            return True
        if closed:
            raise self._not_here()
        return False

    def _not_here(self) -> NotLeader:
        return NotLeader(broker_id=self._broker_id, partition=self.label)

    # --- waiting -------------------------------------------------------------------------------------------------

    def register(self, wake: Wake) -> None:
        """Have `wake` called once, at the next append, flush or close; look again after registering."""
        with self._lock:
            self._waiters.add(wake)

    def unregister(self, wake: Wake) -> None:
        with self._lock:
            self._waiters.discard(wake)

    def wake_waiters(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    @property
    def waiting(self) -> int:
        """How many wait here right now."""
        return len(self._waiters)

    # --- what the catalog does -----------------------------------------------------------------------------------

    def update_settings(self, settings: Values) -> None:
        self.settings = settings
        self.log.update_settings(settings)

    def close(self) -> None:
        """Refuse requests from now on, and let go who waits. The log is the directory's to close."""
        self._closed = True
        self.wake_waiters()
