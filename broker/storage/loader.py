"""Opens a partition's folder at a start: the segments with their indexes, the damage, the state of the producers.

A segment has the offsets [base offset in its name, base offset of the next segment), so missing records are detected.

- Every segment before one named `.log` was synced. It is opened by its saved index.
- Of the last `.log` segment, the bytes that its saved index does not cover are read (`scan.py`) and synced.
- Segments named `.next` come after it if a roll was not synced yet. Such a segment belongs to the log if it begins
  where the segment before it ends. It then becomes the last segment. From the first gap on, these segments are removed,
  because nothing in them was acknowledged as durable.

After a clean stop no batch has to be read.

A reset replaces a log by an empty one that begins at another offset. The file `reset` is its record: once it is
durable, the old log counts as gone. An opening that finds it deletes what is left of the old log, makes the new one,
and then removes the file.

A replacement of segments that was decided is finished first (`replacement.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from broker.config import TopicSettings
from broker.storage import flushed_acks, replacement
from broker.storage.checkpoint import (
    TEMPORARY,
    Checkpoint,
    read_checkpoint,
    read_whole,
    seal,
    unseal,
    write_atomic,
    write_checkpoint,
)
from broker.storage.disk import Disk, is_full, passes
from broker.storage.disk_errors import DiskErrors
from broker.storage.epochs import EPOCHS_NAME, NO_EPOCH, LeaderEpochs, read_epochs
from broker.storage.index import Damage
from broker.storage.producer_state import PRODUCERS_SUFFIX, Producers
from broker.storage.segment import INDEX_SUFFIX, LOG_SUFFIX, NEXT_SUFFIX, Segment, base_offset_of
from kafkalog.events import get_logger
from kafkalog.format.batch import BatchHeader

log = get_logger(__name__)

RESET_NAME = "reset"
_OF_A_LOG = (LOG_SUFFIX, NEXT_SUFFIX, INDEX_SUFFIX, PRODUCERS_SUFFIX)
_ANY_INTERVAL = 1 << 16  # the index of an empty log that is closed at once gets no entries


class Opened(NamedTuple):
    """An opened folder.

    Attributes:
        deleted: segments whose deletion a stop interrupted.
        segments: the log's segments.
        checkpoint: the current checkpoint.
        saved_offset: the saved index and the saved state of the producers describe the log up to this offset.
        synced_before: every record before this offset was synced before the last stop, as far as is known.
        epochs: the leader epochs between the log's start and end.
        lacks_producers: see `lacks_producers`.
        notes_flushed_acks: the file of `flushed_acks.py` is there.
    """

    deleted: list[Segment]
    segments: list[Segment]
    checkpoint: Checkpoint
    saved_offset: int
    synced_before: int
    epochs: LeaderEpochs
    lacks_producers: bool
    notes_flushed_acks: bool


def open_folder(
    disk: Disk, folder: Path, label: str, settings: TopicSettings, producers: Producers, errors: DiskErrors
) -> Opened:
    """Open the segments of a folder, the last one for appending. If there is none, create the first one. Bring the
    state of the producers to the log's end. Note whether acks wait for flushes, before the log is used.

    Raises:
        OSError: the log cannot be opened.
        StorageFailed: the directory is out of service from now on.
    """
    names = disk.names(folder)
    if RESET_NAME in names:
        finish_reset(disk, folder, label)
        names = disk.names(folder)
    decided = [offsets for name in names if (offsets := replacement.offsets_of(name)) is not None]
    for base_offset, end_offset in decided:
        log.info("replacement_finished", partition=label, base_offset=base_offset, end_offset=end_offset)
        replacement.finish(disk, folder, base_offset, end_offset)
    if decided:
        names = disk.names(folder)
    for name in names:
        if name.endswith(TEMPORARY):
            disk.unlink(folder / name)
    bases = {
        base: suffix
        for suffix in (NEXT_SUFFIX, LOG_SUFFIX)
        for name in names
        if (base := base_offset_of(name, suffix)) is not None
    }
    stored = read_checkpoint(disk, folder)
    checkpoint = stored or Checkpoint()
    if stored is None and bases:
        log.warning("checkpoint_missing", partition=label, folder=str(folder))
    notes_flushed_acks = flushed_acks.NAME in names
    if notes_flushed_acks and settings.flush_messages != 1:
        flushed_acks.forget(disk, folder)
        notes_flushed_acks = False
    index_interval_bytes = settings.index_interval_bytes
    segments = [Segment(disk, folder, base, index_interval_bytes, bases[base]) for base in sorted(bases)]
    saved_producers = max(snapshot_offsets(disk, folder), default=-1)
    deleted, segments = _without_deleted(segments, min(checkpoint.start_offset, saved_producers))
    segments, unsynced = _proven(disk, folder, segments)
    indexed_offset = checkpoint.synced_offset
    synced_before = max(checkpoint.synced_offset, segments[-1].base_offset if segments else 0)
    fresh = not segments
    try:
        for segment, after in itertools.pairwise(segments):
            _open_closed(segment, after.base_offset, checkpoint, label)
        if segments:
            indexed_offset = _open_end(disk, folder, segments, unsynced, checkpoint, label, errors)
        else:
            segments = [Segment(disk, folder, checkpoint.synced_offset, index_interval_bytes)]
            segments[0].create()
            if settings.flush_messages == 1 and not notes_flushed_acks:
                flushed_acks.note(disk, folder)
                notes_flushed_acks = True
        start_offset = max(checkpoint.start_offset, segments[0].base_offset)
        found = Checkpoint(start_offset, segments[-1].end_offset, segments[-1].size)
        # The checkpoint of a new log need not be durable: without it, a start determines the same. This saves one sync
        # for each partition, and a topic may have thousands.
        durable = not fresh or found != Checkpoint(0, 0, 0)
        saved = found != stored and _unless_full(lambda: write_checkpoint(disk, folder, found, label, durable=durable))
        if fresh and not (saved and durable):
            disk.sync_dir(folder)  # makes the segment's name durable
        producers_at = open_producers(disk, folder, segments, producers, label)
        epochs = _open_epochs(disk, folder, segments, start_offset, label)
        lacks = lacks_producers(disk, folder, segments)
    except BaseException:
        for segment in [*segments, *unsynced]:
            segment.close()
        raise
    saved_offset = min(indexed_offset, producers_at)
    return Opened(deleted, segments, found, saved_offset, synced_before, epochs, lacks, notes_flushed_acks)


def make_empty_log(disk: Disk, folder: Path, label: str, start_offset: int) -> None:
    """Create the files of an empty log that starts at an offset, in a folder without one. They are durable
    afterwards."""
    segment = Segment(disk, folder, start_offset, _ANY_INTERVAL)
    segment.create()
    segment.close()
    write_checkpoint(disk, folder, Checkpoint(start_offset, start_offset, 0), label)


def record_reset(disk: Disk, folder: Path, offset: int) -> None:
    """Decide durably that a log is to be replaced by an empty one that begins at an offset. Raises OSError: nothing is
    decided, unless `may_be_reset`."""
    write_atomic(disk, folder / RESET_NAME, seal({"offset": offset}))


def may_be_reset(disk: Disk, folder: Path) -> bool:
    """Whether the next opening may find a recorded reset. Looking takes no descriptor, because a lack of them may be
    why it was not recorded."""
    try:
        return disk.exists(folder / RESET_NAME)
    except OSError:
        return True


def finish_reset(disk: Disk, folder: Path, label: str) -> None:
    """Replace a log as `record_reset` decided, durably. May be repeated after a stop at any step."""
    facts = unseal(read_whole(disk, folder / RESET_NAME) or b"") or {}
    offset = int(facts.get("offset", 0))  # if the record is damaged: a follower that begins at 0 is reset again
    for name in disk.names(folder):
        if name == EPOCHS_NAME or any(base_offset_of(name, suffix) is not None for suffix in _OF_A_LOG):
            disk.unlink(folder / name)
    make_empty_log(disk, folder, label, offset)
    disk.unlink(folder / RESET_NAME)
    disk.sync_dir(folder)  # before an append: a restored record would delete it
    log.warning("log_reset", partition=label, folder=str(folder), offset=offset)


def _unless_full(save: Callable[[], None]) -> bool:
    """Save a result of opening. Returns False if the disk is full: the next start then determines the result again."""
    try:
        save()
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def _without_deleted(segments: list[Segment], offset: int) -> tuple[list[Segment], list[Segment]]:
    """Split the segments into those before an offset, whose deletion a stop interrupted, and the others. A deletion
    first saves the producers' state. Segments before the start without a saved state after them were not deleted: a
    truncation has moved the start to the end of a segment. The next retention deletes them."""
    old = sum(after.base_offset <= offset for after in segments[1:])
    return segments[:old], segments[old:]


def _open_closed(segment: Segment, next_segment: int, checkpoint: Checkpoint, label: str) -> None:
    segment.open_closed()
    size = segment.size
    described = segment.load_index() and segment.end_offset <= next_segment
    if not described:
        segment.start_over()
    described_to = segment.size
    if described and segment.size == size:
        if segment.end_offset == next_segment:
            return
        # The segments between the two were lost, and their names with them.
        segment.damaged += (Damage(segment.end_offset, next_segment, size, size),)
        segment.end_offset = next_segment
    else:
        segment.recover(size, next_segment, next_segment, checkpoint.places_in(segment.base_offset))
        segment.size = size
        segment.close()
        event = "index_completed" if described_to else "index_rebuilt"
        log.warning(event, partition=label, base_offset=segment.base_offset, bytes=size - described_to)
    _log_damage(segment, segment.damaged, label)
    _unless_full(segment.save_index)


def _proven(disk: Disk, folder: Path, segments: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Split the segments after the last one named `.log`, which proves that all earlier segments were synced. Earlier
    segments that are named `.next` are renamed. The first segment is always in the first part, whatever its name."""
    count = max((number + 1 for number, segment in enumerate(segments) if not segment.is_next), default=1)
    unnamed = [segment for segment in segments[:count] if segment.is_next]
    for segment in unnamed:
        segment.rename()
    if unnamed:
        disk.sync_dir(folder)
    return segments[:count], segments[count:]


def _open_end(
    disk: Disk,
    folder: Path,
    segments: list[Segment],
    unsynced: list[Segment],
    checkpoint: Checkpoint,
    label: str,
    errors: DiskErrors,
) -> int:
    """Open the last segment. Append the unsynced segments to `segments` up to the first gap, and delete the others. If
    the log's tail is damaged, append a new segment. Returns the offset up to which the saved index described the last
    segment."""
    indexed_offset, tail_damaged = _open_last(
        segments[-1], checkpoint, unsynced[0].base_offset if unsynced else None, label, errors
    )
    while unsynced and unsynced[0].base_offset == segments[-1].end_offset:
        segment = unsynced.pop(0)
        segment.rename()
        disk.sync_dir(folder)
        _unless_full(segments[-1].save_index)
        segments[-1].close()
        segments.append(segment)
        after = unsynced[0].base_offset if unsynced else None
        indexed_offset, tail_damaged = _open_last(segment, checkpoint, after, label, errors)
    if unsynced:
        for segment in reversed(unsynced):
            log.warning("unsynced_segment_dropped", partition=label, base_offset=segment.base_offset)
            segment.delete()
        unsynced.clear()
        disk.sync_dir(folder)  # before an append: a restored segment could then seem to continue the log
    if tail_damaged:
        # The position of the next batch is unknown, and the offsets of the damage must not be given out again. The name
        # of a new segment, which is the first free offset, records both.
        segment = segments[-1]
        _unless_full(segment.save_index)
        segment.close()
        segments.append(_new_segment(disk, folder, segment.end_offset, segment.index.interval_bytes))
        indexed_offset = segment.end_offset
    return indexed_offset


def _open_last(
    segment: Segment, checkpoint: Checkpoint, next_segment: int | None, label: str, errors: DiskErrors
) -> tuple[int, bool]:
    """Open a segment for appending, and cut its torn tail.

    Args:
        next_segment: base offset of the unsynced segment after it; None if there is none.

    Returns:
        (offset up to which the saved index described the segment, whether the segment's tail is damaged).
    """
    synced = checkpoint.synced_offset if next_segment is None else min(checkpoint.synced_offset, next_segment)
    segment.open_for_append()
    size = segment.size
    if not segment.load_index():
        segment.start_over()
    described, indexed_offset = segment.size, segment.end_offset
    found = segment.recover(size, max(synced, segment.base_offset), None, checkpoint.places_in(segment.base_offset))
    if described < size:
        log.info("log_recovered", partition=label, bytes=size - described, end_offset=segment.end_offset)
    _log_damage(segment, segment.damaged, label)
    if found.torn_bytes:
        log.warning("torn_tail_cut", partition=label, bytes=found.torn_bytes, end_offset=found.end_offset)
    try:
        if found.torn_bytes:
            segment.cut(found.end_position)
        elif described < size:
            segment.sync()  # a killed process may leave bytes that are only in the page cache
    except OSError as error:  # any error: a second attempt could not trust the page cache
        if segment.is_adopted and passes(error):  # it made a copy first; another try syncs the folder
            raise
        errors.fail(error, "fdatasync of recovered bytes")
    if found.damaged:
        _unless_full(segment.save_index)
    return indexed_offset, found.tail_damaged


def _log_damage(segment: Segment, damaged: Iterable[Damage], label: str) -> None:
    for damage in damaged:
        log.error(
            "damage_found",
            partition=label,
            start_offset=damage.start_offset,
            end_offset=damage.end_offset,
            file=str(segment.path),
            position=damage.position,
            bytes=damage.end_position - damage.position,
        )


def _new_segment(disk: Disk, folder: Path, base_offset: int, index_interval_bytes: int) -> Segment:
    segment = Segment(disk, folder, base_offset, index_interval_bytes)
    segment.create()
    try:
        disk.sync_dir(folder)
    except BaseException:
        segment.close()
        raise
    return segment


def _open_epochs(disk: Disk, folder: Path, segments: list[Segment], start_offset: int, label: str) -> LeaderEpochs:
    """Read the leader epochs, and drop those outside the log. If the file is missing or damaged, or lacks the epoch of
    the last batch, rebuild it."""
    stored = read_epochs(disk, folder)
    last_of_batches = max((segment.leader_epoch for segment in segments if segment.size), default=NO_EPOCH)
    if stored is not None and stored.last >= last_of_batches:
        epochs = stored
    else:
        epochs = _epochs_of_batches(segments, label)
        if last_of_batches != NO_EPOCH:
            log.warning("leader_epochs_rebuilt", partition=label, folder=str(folder), epochs=len(epochs.entries))
            _unless_full(lambda: epochs.save(disk, folder, label))
    epochs.start_at(start_offset)
    epochs.end_at(segments[-1].end_offset)
    return epochs


def _epochs_of_batches(segments: list[Segment], label: str) -> LeaderEpochs:
    """The leader epochs of the batches in the log. Reads only the segments in which an epoch begins: the others end in
    the same epoch as the segment before them."""
    epochs = LeaderEpochs(is_saved=False)

    def note(header: BatchHeader) -> None:
        if header.leader_epoch > epochs.last:
            epochs.begin(header.leader_epoch, header.base_offset)

    for segment in segments:
        if segment.size and segment.leader_epoch > epochs.last:
            _replay(segment, segment.base_offset, note, label)
            if segment is not segments[-1]:
                segment.close()
    return epochs


def snapshot_path(folder: Path, offset: int) -> Path:
    return folder / f"{offset:020d}{PRODUCERS_SUFFIX}"


def snapshot_offsets(disk: Disk, folder: Path) -> list[int]:
    """The offsets of the producers' saved states, newest first."""
    found = (base_offset_of(name, PRODUCERS_SUFFIX) for name in disk.names(folder))
    return sorted((offset for offset in found if offset is not None), reverse=True)


def lacks_producers(disk: Disk, folder: Path, segments: list[Segment]) -> bool:
    """Whether a log is empty, begins after offset 0, and has no saved state of the producers before that. After
    `open_producers`, which leaves good states only."""
    end_offset = segments[-1].end_offset
    return 0 < segments[0].base_offset == end_offset and end_offset not in snapshot_offsets(disk, folder)


def open_producers(disk: Disk, folder: Path, segments: list[Segment], producers: Producers, label: str) -> int:
    """Bring the state of the producers to the log's end: load the newest good snapshot, then replay the batches after
    it. Snapshots that are damaged or beyond the log's end are deleted on the way. What the state lacks by damage comes
    with the repair (`Log.replace`).

    Returns:
        The snapshot's offset, or the base offset of the first segment if there is no good snapshot.
    """
    end_offset = segments[-1].end_offset
    from_offset = segments[0].base_offset
    producers.clear()
    dropped = False
    for offset in snapshot_offsets(disk, folder):
        path = snapshot_path(folder, offset)
        data = read_whole(disk, path) if offset <= end_offset else None
        if data is not None and producers.load(data, offset):
            from_offset = offset
            break
        log.warning("producer_state_dropped", partition=label, file=str(path))
        disk.unlink(path)
        dropped = True
    if dropped:
        disk.sync_dir(folder)  # a power cut could otherwise restore a removed state, which later records could match
    for segment in segments:
        if segment.end_offset > from_offset:
            _replay(segment, from_offset, producers.replay, label)
            if segment is not segments[-1]:
                segment.close()
    return from_offset


def _replay(segment: Segment, from_offset: int, on_batch: Callable[[BatchHeader], None], label: str) -> None:
    """Replay a segment, and note the damage in what its saved index describes: nobody knows of it yet."""
    found = segment.replay(from_offset, on_batch)
    if found:
        _log_damage(segment, found, label)
        _unless_full(segment.save_index)
