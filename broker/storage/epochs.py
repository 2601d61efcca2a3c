"""Where each leader epoch of a log began, in the file `leader-epochs` of the partition's folder.

Followers find out by it where their log and the leader's diverge (KIP-101, KIP-279). The file is a sealed document
(`checkpoint.py`):

    {"epochs": [[0, 0], [3, 120]], "partition": "flights-0"}      pairs of epoch and start offset, both ascending

An epoch without records has an entry too. Entries with the same start offset are all kept: a follower that does not
find the epoch that it asks for would ask for ever (KAFKA-20961).

The file is written before the first batch of an epoch. If it lacks an epoch that the log has, or is missing or damaged,
it is rebuilt from the batch headers (`loader.py`), which do not show epochs without records. So with one copy it is
synced only while it has such an epoch: otherwise a power cut takes nothing that the headers do not tell.
It may have entries before the log's start, because deletions do not write it, and entries after the log's end, because
a power cut takes unsynced batches. An opening drops both.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from broker.storage.checkpoint import is_whole, read_whole, seal, unseal, write_atomic
from broker.storage.disk import Disk

EPOCHS_NAME = "leader-epochs"
NO_EPOCH = -1


class EpochStart(NamedTuple):
    """An epoch, and the offset of its first record; without records, the log's end when it began."""

    epoch: int
    start_offset: int


class LeaderEpochs:
    """The epochs of one log. Not thread-safe: Log holds the lock.

    Attributes:
        last: the last epoch; -1 if there is none.
        is_saved: the file has every change that a start cannot repeat.
    """

    def __init__(self, entries: Iterable[tuple[int, int]] = (), *, is_saved: bool = True) -> None:
        self._entries = [EpochStart(*entry) for entry in entries]
        self.is_saved = is_saved
        self._changed()

    def _changed(self) -> None:
        self.last = self._entries[-1].epoch if self._entries else NO_EPOCH

    @property
    def entries(self) -> list[EpochStart]:
        return list(self._entries)

    @property
    def last_start(self) -> int:
        """Where the last epoch began; 0 if there is none."""
        return self._entries[-1].start_offset if self._entries else 0

    def begin(self, epoch: int, start_offset: int) -> None:
        """Add an epoch after the last one."""
        assert epoch > self.last
        assert not self._entries or start_offset >= self._entries[-1].start_offset
        self._entries.append(EpochStart(epoch, start_offset))
        self.is_saved = False
        self._changed()

    def end_of(self, epoch: int, start_offset: int, end_offset: int) -> EpochStart:
        """The largest known epoch that is at most `epoch`, with the offset where it ended.

        Args:
            start_offset, end_offset: of the log.

        Returns:
            (-1, the log's start) if all known epochs are later.
        """
        known = sum(entry.epoch <= epoch for entry in self._entries)
        if not known:
            return EpochStart(NO_EPOCH, start_offset)
        ended = self._entries[known].start_offset if known < len(self._entries) else end_offset
        return EpochStart(self._entries[known - 1].epoch, ended)

    def at(self, offset: int) -> int:
        """The epoch of the record at an offset; -1 if it is not known."""
        known = sum(entry.start_offset <= offset for entry in self._entries)
        return self._entries[known - 1].epoch if known else NO_EPOCH

    def start_at(self, start_offset: int) -> None:
        """Replace the entries before the log's start by one for the epoch of the last record before it. It stays
        without records too: the log of a follower that has not heard of a later epoch may end with that record."""
        kept = [entry for entry in self._entries if entry.start_offset >= start_offset]
        if len(kept) < len(self._entries):
            kept.insert(0, EpochStart(self._entries[-len(kept) - 1].epoch, start_offset))
        self._entries = kept

    def truncate_to(self, end_offset: int) -> None:
        """Drop the epochs that began at or after an offset, also one without records: a leader that has another log
        does not know it."""
        self._drop_from(sum(entry.start_offset < end_offset for entry in self._entries))

    def end_at(self, end_offset: int) -> None:
        """Drop the epochs that began after the log's end, because their records are lost. One that began at the end
        stays."""
        self._drop_from(sum(entry.start_offset <= end_offset for entry in self._entries))

    def _drop_from(self, number: int) -> None:
        if number < len(self._entries):
            del self._entries[number:]
            self.is_saved = False
            self._changed()

    @property
    def are_in_batches(self) -> bool:
        """Whether each epoch but the last has records."""
        return all(entry.start_offset < after.start_offset for entry, after in pairwise(self._entries))

    def is_damaged(self, disk: Disk, folder: Path) -> bool:
        """Whether the file should be there, and is missing or damaged. Raises OSError."""
        expected = self.is_saved and bool(self._entries)
        return expected and not is_whole(read_whole(disk, folder / EPOCHS_NAME))

    def save(self, disk: Disk, folder: Path, label: str, *, durable: bool = True) -> None:
        """Write the file. Raises OSError."""
        data = seal({"epochs": self._entries, "partition": label})
        write_atomic(disk, folder / EPOCHS_NAME, data, durable=durable)
        self.is_saved = True


def read_epochs(disk: Disk, folder: Path) -> LeaderEpochs | None:
    """The epochs from a folder's file; None if it is missing or damaged."""
    facts = unseal(read_whole(disk, folder / EPOCHS_NAME) or b"") or {}
    try:
        entries = [EpochStart(int(epoch), int(start_offset)) for epoch, start_offset in facts["epochs"]]
    except (KeyError, TypeError, ValueError):
        return None
    if any(a.epoch >= b.epoch or a.start_offset > b.start_offset for a, b in pairwise(entries)):
        return None
    return LeaderEpochs(entries)
