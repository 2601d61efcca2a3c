"""Replaces segments of a log by one that has the same offsets: in a repair of damage, and in any rewriting of closed
segments. Readers that hold an old file read on in it.

The new segment is written beside the old ones:

    %020d-%020d.swap.tmp    base offset and end offset; being written, or given up: a start removes it
    %020d-%020d.swap        whole and synced: from now on the segments between these offsets count as replaced

The durable name `.swap` is the decision. `finish` removes the old segments and gives the new one the name of the first.
A start that finds the file does so too. Until then the old segments are whole and in place.

Knows files and offsets; `Log.replace` has the locks and the view.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from broker.storage.checkpoint import TEMPORARY
from broker.storage.disk import Buffer, Disk, TruncateFailed
from broker.storage.disk_errors import DiskErrors
from broker.storage.index import Damage, places
from broker.storage.segment import INDEX_SUFFIX, LOG_SUFFIX, BadHeader, Segment, base_offset_of, segment_path
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import BatchHeader

SWAP_SUFFIX = ".swap"
_NAME = re.compile(r"(\d{20})-(\d{20})\.swap")


def swap_path(folder: Path, base_offset: int, end_offset: int) -> Path:
    return folder / f"{base_offset:020d}-{end_offset:020d}{SWAP_SUFFIX}"


def offsets_of(name: str) -> tuple[int, int] | None:
    """Base offset and end offset in the name of a decided replacement; None if the name is not of that form."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


class Replacement:
    """A segment that is being written to replace others. One thread uses it. End it with `Log.replace` or `abandon`.

    Attributes:
        old: the segments to be replaced, in order, without a gap between them.
        segment: the new one, at the base offset of the first. Its file is open, under another name until `finish`.
        end_offset: of the last.

    Raises:
        DiskFull, StorageFailed.
    """

    def __init__(self, disk: Disk, folder: Path, old: Sequence[Segment], end_offset: int, errors: DiskErrors) -> None:
        self.old = tuple(old)
        self.end_offset = end_offset
        self._disk = disk
        self._folder = folder
        self._errors = errors
        self._swap = swap_path(folder, old[0].base_offset, end_offset)
        self.segment = Segment(disk, folder, old[0].base_offset, old[0].index.interval_bytes)
        self.segment.path = self._swap.with_name(self._swap.name + TEMPORARY)
        try:
            self._unlink()
            self.segment.create()
        except OSError as error:
            errors.refuse(error, "creating a segment")

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.segment.size

    def append(self, data: Buffer) -> None:
        """Write whole batches, or damaged bytes that are kept. Raises DiskFull, StorageFailed."""
        try:
            self.segment.append([data], len(data))
        except TruncateFailed as error:
            self._errors.fail(error, "writing a segment")
        except OSError as error:
            self._errors.refuse(error, "writing a segment")

    def cut(self, size: int) -> None:
        """Take back what was written after a position. Raises DiskFull, StorageFailed."""
        try:
            self.segment.cut(size)
        except OSError as error:
            self._errors.refuse(error, "writing a segment")

    def complete(self, known: Collection[Damage] = ()) -> tuple[Damage, ...]:
        """Sync the file, and read it from its start to its end: every batch is checked, and the index is made.

        Args:
            known: damage that was taken over from the old segments, at its new positions.

        Returns:
            The damage in the new segment.

        Raises:
            DiskFull, StorageFailed.
        """
        segment, size = self.segment, self.size
        try:
            segment.sync()
            segment.start_over()
            segment.recover(size, self.end_offset, self.end_offset, places(segment.index, known))
        except OSError as error:
            self._errors.refuse(error, "writing a segment")
        segment.size = size
        return segment.damaged

    def restored(self) -> Iterator[BatchHeader]:
        """The headers of the batches that are damaged in the old segments and good in the new one, in order; once it is
        complete. Raises DiskFull, StorageFailed, CorruptBatch."""
        segment = self.segment
        file = segment.share_file()
        try:
            for damage in [each for old in self.old for each in old.damaged]:
                position, offset = segment.index.before(damage.start_offset)
                for _, header in segment.headers(file, position, segment.size):
                    offset = header.base_offset
                    if offset >= damage.end_offset:
                        break
                    if offset >= damage.start_offset:
                        yield header
        except BadHeader as error:
            raise CorruptBatch(partition=self._errors.label, offset=offset, reason=str(error)) from None
        except OSError as error:
            self._errors.refuse(error, "reading a segment")
        finally:
            file.release()

    def decide(self) -> None:
        """Decide durably that the segment replaces the old ones. Raises OSError: nothing is decided, unless
        `may_be_decided`."""
        self._disk.rename(self.segment.path, self._swap)
        self._disk.sync_dir(self._folder)

    @property
    def may_be_decided(self) -> bool:
        """Whether the next opening may find the decision. Looking takes no descriptor, because a lack of them may
        be why nothing was decided."""
        try:
            return self._disk.exists(self._swap)
        except OSError:
            return True

    def finish(self) -> None:
        """Carry out the decision. Raises OSError: the next opening carries it out."""
        base_offset = self.segment.base_offset
        finish(self._disk, self._folder, base_offset, self.end_offset)
        self.segment.path = segment_path(self._folder, base_offset)

    def abandon(self) -> None:
        """Give it up before it is decided. A file that cannot be unlinked is left to the next start."""
        self.segment.close()
        with contextlib.suppress(OSError):
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self.segment.path)


def finish(disk: Disk, folder: Path, base_offset: int, end_offset: int) -> None:
    """Put a decided replacement in the place of the old segments, durably. May be repeated after a stop at any step.

    The old indexes go first, because they must not describe the new file, and all other old segments with them. The
    first one goes by the rename: a folder without any segment would be a lost log.
    """
    for name in disk.names(folder):
        index, segment = base_offset_of(name, INDEX_SUFFIX), base_offset_of(name, LOG_SUFFIX)
        if (index is not None and base_offset <= index < end_offset) or (
            segment is not None and base_offset < segment < end_offset
        ):
            disk.unlink(folder / name)
    disk.sync_dir(folder)
    disk.rename(swap_path(folder, base_offset, end_offset), segment_path(folder, base_offset))
    disk.sync_dir(folder)
