"""Small files that are written atomically: written under another name, synced, renamed. A data directory has two kinds:
`meta` (its broker and cluster) and, in each partition's folder, `checkpoint`.

A sealed document is one line, written twice: the CRC-32C of a JSON object, then the object:

    789211b2 {"partition": "flights-0", "recovery_point": 120, "recovery_position": 4096, "start_offset": 0}
    789211b2 {"partition": "flights-0", "recovery_point": 120, "recovery_position": 4096, "start_offset": 0}

The first copy with a matching checksum is used, so damage to one copy loses nothing. If both are damaged, the document
counts as missing. This module does not know the log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from broker.storage.disk import Disk, write_all

CHECKPOINT_NAME = "checkpoint"
TEMPORARY = ".tmp"
"""Suffix of a file while it is written. A start removes such files, which a crash may leave."""


class Checkpoint(NamedTuple):
    """The checkpoint of a partition's log.

    Attributes:
        start_offset: the first offset that may be read.
        recovery_point: all records before this offset were synced. So if one is missing or wrong, that is damage, not
            an incomplete write.
        recovery_position: position of the recovery point in the segment that contains the record before it; -1 if not
            known.
    """

    start_offset: int = 0
    recovery_point: int = 0
    recovery_position: int = -1

    @property
    def synced_offset(self) -> int:
        """Every record before this offset was synced, or may not be read any more."""
        return max(self.start_offset, self.recovery_point)

    def places_in(self, base_offset: int) -> frozenset[tuple[int, int]]:
        """(position, offset) of the recovery point, if its position is known and may be in the segment that begins at
        `base_offset`. The position is in the segment that contains the record before the recovery point."""
        if self.recovery_position < 0 or self.recovery_point <= base_offset:
            return frozenset()
        return frozenset({(self.recovery_position, self.recovery_point)})


def seal(facts: dict[str, Any]) -> bytes:
    """Encode a sealed document; see the module's docstring for its format."""
    text = json.dumps(facts, sort_keys=True)
    line = f"{crc32c(text.encode()):08x} {text}\n"
    return (line + line).encode()


def unseal(data: bytes) -> dict[str, Any] | None:
    """Decode a sealed document; None if neither copy is intact."""
    half = len(data) // 2
    # Try halves, because the newline between the copies may be damaged. Try lines, because the end may be missing.
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


def is_whole(data: bytes | None) -> bool:
    """Whether a sealed document has both copies intact."""
    if data is None:
        return False
    half = len(data) // 2
    return data[:half] == data[half:] and unseal(data) is not None


def write_atomic(disk: Disk, path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file, atomically replacing one of that name.

    Args:
        durable: the new content is durable when this returns. If false, a power cut may leave the old content, the new
            content, or a torn file: only for files that have a checksum and can be rebuilt.
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
    """All bytes of a file, or None if the file does not exist."""
    try:
        fd = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return disk.read(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def write_checkpoint(disk: Disk, folder: Path, checkpoint: Checkpoint, label: str, *, durable: bool = True) -> None:
    """Write a folder's checkpoint, atomically replacing the last one.

    Args:
        label: the partition's name, such as `flights-0`. The folder's name contains only the topic's id, and offline
            tools have no other source of the topic's name.
    """
    facts = {**checkpoint._asdict(), "partition": label}
    write_atomic(disk, folder / CHECKPOINT_NAME, seal(facts), durable=durable)


def read_checkpoint(disk: Disk, folder: Path) -> Checkpoint | None:
    """A folder's checkpoint; None if it is missing or damaged."""
    facts = unseal(read_whole(disk, folder / CHECKPOINT_NAME) or b"")
    if facts is None:
        return None
    try:
        return Checkpoint(*(int(facts[name]) for name in Checkpoint._fields))
    except (KeyError, TypeError, ValueError):
        return None


def read_label(disk: Disk, folder: Path) -> str | None:
    """The partition's name from a folder's checkpoint; None if the checkpoint is missing or damaged."""
    name = (unseal(read_whole(disk, folder / CHECKPOINT_NAME) or b"") or {}).get("partition")
    return name if isinstance(name, str) else None
