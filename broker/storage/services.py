"""What all logs of one data directory share: clock and disk, background threads, the directory's health. Data only:
`LogDirectory` makes it and starts the threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from broker.storage.disk import Disk
from broker.storage.disk_errors import DirectoryHealth
from broker.storage.flusher import Flusher
from broker.storage.unlinker import Unlinker
from kafkalog.clock import Clock


@dataclass(frozen=True)
class Services:
    """The shared objects and settings of one data directory.

    Attributes:
        path: the data directory.
        disk, clock: the machine's, or a test's.
        steady_clock: the time used to delete records and to forget producers.
        producer_batches_remembered: deduplication window of each producer, in batches; see `Producers`.
        producer_state_max: maximum number of producers of each log; see `Producers`.
    """

    path: Path
    disk: Disk
    clock: Clock
    steady_clock: Clock
    health: DirectoryHealth
    flusher: Flusher
    unlinker: Unlinker
    producer_batches_remembered: int
    producer_state_max: int
