"""Shared by all logs of one data directory: clock and disk, background threads, and the health of the disk. Data only:
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
    """Attributes:
    path: the data directory.
    disk, clock: what stands for the machine.
    steady_clock: the time by which something is deleted or forgotten.
    producer_batches_remembered, producer_state_max: of each producer, and of each log; see `Producers`.
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
