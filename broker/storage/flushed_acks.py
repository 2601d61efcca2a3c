"""The file `flushed-acks` in a partition's folder: all that was acknowledged was durable here before.

It is there while the topic has flush.messages=1. The topic's settings do not say so after a loss of power, because they
may have been changed while the machine was down.
"""

from __future__ import annotations

from pathlib import Path

from broker.storage.disk import Disk

NAME = "flushed-acks"


def is_noted(disk: Disk, folder: Path) -> bool:
    """Whether the file is there. Raises OSError."""
    return disk.exists(folder / NAME)


def note(disk: Disk, folder: Path) -> None:
    """Make the file; it is durable with the folder's next sync. To be repeated after an OSError."""
    if not is_noted(disk, folder):
        disk.close(disk.create(folder / NAME))


def forget(disk: Disk, folder: Path) -> None:
    """Remove the file durably, before anything is acknowledged that is not flushed. To be repeated after an OSError."""
    if is_noted(disk, folder):
        disk.unlink(folder / NAME)
    disk.sync_dir(folder)
