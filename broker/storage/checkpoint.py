"""Small files that are written atomically: written under another name, synced, renamed. A data directory has two of
them: `meta` (its broker and cluster) and, in each partition's folder, `checkpoint`.

A sealed document is one JSON object on a line, with the CRC-32C of the JSON before it, and the same line again:

    789211b2 {"partition": "flights-0", "recovery_point": 120, "recovery_position": 4096, "start_offset": 0}
    789211b2 {"partition": "flights-0", "recovery_point": 120, "recovery_position": 4096, "start_offset": 0}

The copy with a matching checksum is used, so damage to one copy costs nothing. If both are damaged, the document counts
as missing. Knows no log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.disk import Disk, write_all

CHECKPOINT_NAME = "checkpoint"
TEMPORARY = ".tmp"
"""Ending of a file that is being written; what is left of one after a crash is removed."""


class Checkpoint(NamedTuple):
    """What a partition's folder says of its log.

    `start_offset`: no earlier record is to be read. `recovery_point`: everything before it was synced, so what is
    missing or wrong there is damage and not a write cut short. `recovery_position`: where that is in the segment that
    holds the record before it; -1 if that is not known.
    """

    start_offset: int = 0
    recovery_point: int = 0
    recovery_position: int = -1

    @property
    def synced_offset(self) -> int:
        """Everything before it was synced, or is not to be read any more."""
        return max(self.start_offset, self.recovery_point)

    def places_in(self, base_offset: int) -> frozenset[tuple[int, int]]:
        """(position, offset) of the recovery point, if its position is known and it may be in the segment that begins
        at an offset: it is in the segment of the record before it."""
        if self.recovery_position < 0 or self.recovery_point <= base_offset:
            return frozenset()
        return frozenset({(self.recovery_position, self.recovery_point)})


def seal(facts: dict[str, Any]) -> bytes:
    text = json.dumps(facts, sort_keys=True)
    line = f"{crc32c(text.encode()):08x} {text}\n"
    return (line + line).encode()


def unseal(data: bytes) -> dict[str, Any] | None:
    """The facts of a sealed document, or None if neither copy is whole."""
    half = len(data) // 2
    # By halves, for the byte that ends the first line may be the damaged one; by lines, for the end may be missing.
    for line in (data[:half], data[half:], *data.split(b"\n", 1)):
        checksum, text = line[:8], line[9:].rstrip(b"\n")
        if checksum == b"%08x" % crc32c(text):
            try:
                facts = json.loads(text)
            except ValueError:
                continue
            if isinstance(facts, dict):
                return facts
    return None


def write_atomic(disk: Disk, path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put a file in another's place.

    Args:
        durable: when this returns, the new content is durable. Without, either content may be there after
            one, or a torn one: for files that carry a checksum and can be made again.
    """
    beside = path.with_name(path.name + TEMPORARY)
    try:
        disk.unlink(beside)
    except FileNotFoundError:
        pass
    fd = disk.create(beside)
    try:
        write_all(disk, fd, [data], 0)
        if durable:
            disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(beside, path)
    if durable:
        disk.sync_dir(path.parent)


def read_whole(disk: Disk, path: Path) -> bytes | None:
    """A file's bytes, or None if there is no such file."""
    try:
        fd = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return disk.read(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def write_checkpoint(disk: Disk, folder: Path, checkpoint: Checkpoint, label: str, *, durable: bool = True) -> None:
    """Put a folder's checkpoint in the place of its last one.

    Args:
        label: the partition's name, such as `flights-0`: the folder's own has the topic's id, and without a broker
            nothing else names the topic.
    """
    facts = {**checkpoint._asdict(), "partition": label}
    write_atomic(disk, folder / CHECKPOINT_NAME, seal(facts), durable=durable)


def read_checkpoint(disk: Disk, folder: Path) -> Checkpoint | None:
    """The folder's checkpoint; None if it has none or a damaged one."""
    facts = unseal(read_whole(disk, folder / CHECKPOINT_NAME) or b"")
    if facts is None:
        return None
    try:
        return Checkpoint(*(int(facts[name]) for name in Checkpoint._fields))
    except (KeyError, TypeError, ValueError):
        return None


def read_label(disk: Disk, folder: Path) -> str | None:
    """The name of the partition that the folder is of; None if its checkpoint is missing or damaged."""
    name = (unseal(read_whole(disk, folder / CHECKPOINT_NAME) or b"") or {}).get("partition")
    return name if isinstance(name, str) else None
