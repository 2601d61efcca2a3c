"""Reading a log: from an offset or a timestamp to a range of a file.

Takes no lock: a `View` is immutable, and the bytes that it describes are written. Damage that a read finds is examined
and logged once. Later reads get the same error.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

from broker.storage.disk import Disk
from broker.storage.disk_errors import DiskErrors
from broker.storage.index import Damage
from broker.storage.segment import BadHeader, FileSlice, Hint, Segment, SharedFile
from kafkalog.errors import Closed, CorruptBatch, OffsetOutOfRange
from kafkalog.events import get_logger
from kafkalog.format.batch import HEADER_SIZE, BatchHeader, body_fault, header_at
from kafkalog.format.columns import HAS_TIMES

log = get_logger(__name__)

UNKNOWN = -1
_NO_LIMIT = 1 << 62


class View(NamedTuple):
    """The state of a log at one moment, for reads.

    Attributes:
        start_offset: the first offset that may be read.
        bases: base offsets of `segments`.
        end_offset, end_position: the log's end; the position is in the last segment.
        flushed_offset, flushed_position: the end of the flushed part; the position is in the last segment, or UNKNOWN
            if the flushed part ends before that segment.
    """

    start_offset: int
    segments: tuple[Segment, ...]
    bases: tuple[int, ...]
    end_offset: int
    end_position: int
    flushed_offset: int
    flushed_position: int

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def limit(self, number: int) -> tuple[int, int]:
        """(end position, end offset) of a segment, given by its number."""
        if number == len(self.segments) - 1:
            return self.end_position, self.end_offset
        return self.segments[number].size, self.bases[number + 1]

    def position(self, end_offset: int) -> int:
        """The position of `end_offset` in the last segment; UNKNOWN unless it is the end of the log or of the flushed
        part."""
        if end_offset == self.end_offset:
            return self.end_position
        return self.flushed_position if end_offset == self.flushed_offset else UNKNOWN

    def place(self, end_offset: int) -> tuple[int, int]:
        """(number of the segment, position in it) of `end_offset`. If the position is not known, the result is the next
        index entry's position, or the segment's end: too large by at most about index.interval.bytes."""
        position = self.position(end_offset)
        if position != UNKNOWN:
            return len(self.segments) - 1, position
        number = max(bisect_left(self.bases, end_offset) - 1, 0)  # of the segment that contains the record before it
        last_position, last_offset = self.limit(number)
        entry = self.segments[number].index.at_or_after(end_offset)
        if entry is None or end_offset >= last_offset:
            return number, last_position
        return number, min(entry[0], last_position)


Look = Callable[[], tuple[View, int]]
"""Returns the current view and the readable end offset."""


def reach(view: View, offset: int, max_bytes: int, end_offset: int) -> tuple[int, int]:
    """Find the offset about `max_bytes` after an offset. Uses only the indexes, and reads no file.

    Args:
        end_offset: the result is at most this offset, but never before `offset`: a new leader may not know yet that the
            log goes further.

    Returns:
        (offset reached, bytes up to it). The offset is `end_offset`, or that of an index entry; then the bytes differ
        from `max_bytes` by at most about index.interval.bytes. The bytes are exact, unless the offset is `end_offset`
        and its position is not known (`View.place`). The offset is at least one index entry further, whatever
        `max_bytes` is, so that a reader in such steps always makes progress.
    """
    offset = max(offset, view.start_offset)
    if offset >= end_offset:
        return offset, 0
    first = bisect_right(view.bases, offset) - 1
    position, _ = view.segments[first].index.before(offset)
    last, last_position = view.place(end_offset)
    counted = 0
    for number in range(first, last + 1):
        segment = view.segments[number]
        end_position = last_position if number == last else segment.size
        if end_position - position > max_bytes - counted:
            (at, reached), after = segment.index.around(position + max_bytes - counted)
            if reached <= offset:  # in the first segment only
                at, reached = after or (end_position, segment.end_offset)
            if reached < end_offset:
                return reached, counted + at - position
        counted += end_position - position
        position = 0
    return end_offset, counted


class Reader:
    """Reads of one log. Thread-safe.

    Attributes:
        view: the log's current state. The log replaces it, as a whole, after the bytes that it describes are written.
        closed: set by the log when it is closed; reads then raise Closed.
        on_damage: called with an offset whenever a read meets damage. It must neither wait nor raise.
    """

    view: View

    def __init__(self, disk: Disk, label: str, errors: DiskErrors) -> None:
        self.closed = False
        self.on_damage: Callable[[int], object] = lambda offset: None
        self._disk = disk
        self._label = label
        self._errors = errors
        self._health = errors.health

    def _look(self, look: Look | None) -> tuple[View, int]:
        if self.closed or self._health.failed is not None:
            self._errors.check()
            raise Closed(what=f"log of {self._label}")
        return look() if look is not None else (view := self.view, view.end_offset)

    def read(
        self,
        offset: int,
        max_bytes: int,
        hint: Hint | None = None,
        look: Look | None = None,
        *,
        for_copy: bool = False,
    ) -> FileSlice:
        """Find the batches from an offset on.

        Args:
            offset: the slice starts with the batch that contains it.
            max_bytes: the slice is at most that long, unless its first batch is longer.
            hint: position where that batch may start, from an earlier slice. A wrong hint is ignored.
            look: returns the readable end offset; without it, the log's end counts. No batch that reaches beyond the
                readable end is in the slice.
            for_copy: the offset may also be the `copy_offset`, before the log's start.

        Returns:
            A slice of one segment. It is empty if no batch from the offset on is readable yet.

        Raises:
            OffsetOutOfRange: the offset is before the log's start or after its end.
            CorruptBatch: the offset is in a damaged range, and the error's fact `end_offset` is where to continue; or
                the segment's file is missing.
            StorageFailed, DiskFull: the file cannot be read.
            Closed: the log is closed.
        """
        while True:
            view, end = self._look(look)
            try:
                if for_copy and offset < view.start_offset and offset == self._copy_offset(view):
                    return self._read(view, view.start_offset, max_bytes, hint, end)
                if not view.start_offset <= offset <= view.end_offset:
                    raise self.out_of_range(offset, view, end)
                return self._read(view, offset, max_bytes, hint, end)
            except FileNotFoundError:
                self._check_moved(view, offset)
            except OSError as error:
                self._failed(error)

    def copy_offset(self) -> int:
        """Where a copy of the log begins: with the batch that contains the start offset. Raises as `read`."""
        while True:
            view, _ = self._look(None)
            try:
                return self._copy_offset(view)
            except FileNotFoundError:
                self._check_moved(view, view.start_offset)
            except OSError as error:
                self._failed(error)

    def _copy_offset(self, view: View) -> int:
        start_offset = view.start_offset
        if start_offset == view.end_offset:
            return start_offset
        return self.boundary(view, bisect_right(view.bases, start_offset) - 1, start_offset)[1]

    def headers(self, offset: int, end_offset: int) -> Iterator[BatchHeader]:
        """The headers of the batches in a range, whose start and end are those of batches. No body is read.

        Raises:
            OffsetOutOfRange: the log does not have all of it (any more).
            CorruptBatch, StorageFailed, DiskFull, Closed: as `read`.
        """
        while offset < end_offset:
            with self.read(offset, _NO_LIMIT, for_copy=True) as found:
                if not found.length:
                    raise self.out_of_range(end_offset, self.view, self.view.end_offset)
                position = found.position
                while position < found.position + found.length and offset < end_offset:
                    header = self._header(found, position)
                    if header is None or header.base_offset != offset:
                        self.on_damage(offset)
                        raise CorruptBatch(partition=self._label, offset=offset, reason="no batch begins there")
                    yield header
                    position, offset = position + header.length, header.end_offset

    def _header(self, found: FileSlice, position: int) -> BatchHeader | None:
        try:
            return header_at(self._disk.read(found.fileno(), HEADER_SIZE, position))
        except OSError as error:
            self._failed(error)

    def offset_for_timestamp(
        self, timestamp_us: int, from_offset: int = 0, look: Look | None = None
    ) -> tuple[int, int | None] | None:
        """Find the first record at or after a timestamp, from the headers of batches: no body is decoded.

        Args:
            from_offset: records before it do not count.
            look: as in `read`.

        Returns:
            - (offset, timestamp_us) of the record, if all records of its batch have one timestamp.
            - (offset, None), if the first batch whose maximum timestamp is large enough has a timestamp for each
              record. The offset is the first one of the batch that counts. The record may be there, after it, or in a
              later batch.
            - None, if there is no such record before the readable end.

        Raises:
            CorruptBatch: the record may be in a damaged range.
            StorageFailed, DiskFull: a file cannot be read.
            Closed: the log is closed.
        """
        while True:
            view, end = self._look(look)
            start_offset = max(view.start_offset, from_offset)
            try:
                return self._search(view, timestamp_us, start_offset, end)
            except FileNotFoundError:
                self._check_moved(view, view.start_offset)
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> NoReturn:
        self._errors.refuse(error, "reading")

    def _check_moved(self, view: View, offset: int) -> None:
        """Raise CorruptBatch for a missing segment file, unless the log has a new view: then retention or a deletion
        may have removed the file, and the read is retried."""
        if self._look(None)[0] is view:
            self.on_damage(offset)
            raise CorruptBatch(partition=self._label, offset=offset, reason="the file of its segment is missing")

    def out_of_range(self, offset: int, view: View, end_offset: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            offset=offset, partition=self._label, start_offset=view.start_offset, end_offset=end_offset
        )

    def _read(self, view: View, offset: int, max_bytes: int, hint: Hint | None, end: int) -> FileSlice:
        number = bisect_right(view.bases, offset) - 1
        segment = view.segments[number]
        if offset >= end:
            return FileSlice(self._disk, None, segment.base_offset, 0, 0, self._failed)
        limit, limit_offset = view.limit(number)
        file = segment.share_file()
        try:
            position, length = self._find(segment, file, offset, hint, limit, limit_offset)
            if end < limit_offset:
                limit = self._end_position(view, segment, file, end, limit, limit_offset)
            if position + length > limit:  # the batch that contains the offset reaches beyond the readable end
                file.release()
                return FileSlice(self._disk, None, segment.base_offset, 0, 0, self._failed)
            limit = segment.slice_end(position, limit)
            slice_length = max(length, min(max_bytes, limit - position))
            if slice_length < limit - position:  # end where a batch starts, because readers discard a partial batch
                (last, _), _ = segment.index.around(position + slice_length)
                if last > position:
                    slice_length = max(length, last - position)
            return FileSlice(self._disk, file, segment.base_offset, position, slice_length, self._failed)
        except BaseException:
            file.release()
            raise

    def _find(
        self, segment: Segment, file: SharedFile, offset: int, hint: Hint | None, limit: int, limit_offset: int
    ) -> tuple[int, int]:
        """(position, length) of the batch that contains an offset, from the hint if that is correct."""
        if hint is not None and hint.segment_base_offset == segment.base_offset and not segment.damaged:
            length = segment.batch_length(file, hint.position, offset, limit)
            if length is not None:
                return hint.position, length
        return self._locate(segment, file, offset, limit, limit_offset)

    def _end_position(
        self, view: View, segment: Segment, file: SharedFile, end: int, limit: int, limit_offset: int
    ) -> int:
        """The position at which readers stop: the start of the batch, or damaged range, that contains offset `end`."""
        position = view.position(end)
        if position != UNKNOWN and segment is view.segments[-1]:
            return position
        try:
            return self._locate(segment, file, end, limit, limit_offset)[0]
        except CorruptBatch:
            damage = segment.damage_at(end)
            if damage is None:
                raise
            return damage.position

    def _locate(
        self, segment: Segment, file: SharedFile, offset: int, limit: int, limit_offset: int
    ) -> tuple[int, int]:
        """(position, length) of the batch that contains an offset. Damage before it is examined. Raises CorruptBatch if
        the offset is in a damaged range, or in no batch."""
        examined = -1
        while True:
            damage = segment.damage_at(offset)
            if damage is not None:
                raise self._corrupt(damage)
            try:
                return segment.locate(file, offset, limit)
            except BadHeader as bad:  # damage across several index entries is examined entry by entry
                if bad.position <= examined:
                    break
                examined = bad.position
                self._examine(segment, file, examined, limit, limit_offset)
        self.on_damage(offset)
        after = segment.index.at_or_after(offset + 1)  # a batch starts there, so the lost range ends there or before
        end_offset = limit_offset if after is None else min(after[1], limit_offset)
        raise CorruptBatch(partition=self._label, offset=offset, reason="no batch contains it", end_offset=end_offset)

    def examine(self, segment: Segment, position: int, limit: int, limit_offset: int) -> None:
        """Determine the damage at a position, up to `limit`, where the segment ends; see `Segment.examine`. Raises
        OSError."""
        file = segment.share_file()
        try:
            self._examine(segment, file, position, limit, limit_offset)
        finally:
            file.release()

    def _examine(
        self, segment: Segment, file: SharedFile, position: int, limit: int, limit_offset: int
    ) -> list[Damage]:
        found = segment.examine(file, position, limit, limit_offset)
        self._log_damage(segment, found)
        return found

    def note_damage(self, segment: Segment, damaged: Iterable[Damage]) -> None:
        """Add damage that was found without `examine`."""
        self._log_damage(segment, segment.add_damage(damaged))

    def _log_damage(self, segment: Segment, found: Iterable[Damage]) -> None:
        if segment not in self.view.segments:
            return  # its file was cut or removed meanwhile
        for damage in found:
            log.error(
                "damage_found",
                partition=self._label,
                start_offset=damage.start_offset,
                end_offset=damage.end_offset,
                file=str(segment.path),
                position=damage.position,
                bytes=damage.end_position - damage.position,
            )

    def _corrupt(self, damage: Damage) -> CorruptBatch:
        self.on_damage(damage.start_offset)
        return CorruptBatch(
            partition=self._label,
            offset=damage.start_offset,
            reason=f"offsets {damage.start_offset} to {damage.end_offset - 1} are damaged on disk",
            end_offset=damage.end_offset,
        )

    def boundary(self, view: View, number: int, offset: int) -> tuple[int, int]:
        """(position, offset) of the start of the batch, or damaged range, that contains an offset of segment
        `number`."""
        segment = view.segments[number]
        if offset == segment.base_offset:
            return 0, offset
        limit, limit_offset = view.limit(number)
        file = segment.share_file()
        try:
            position, _ = self._locate(segment, file, offset, limit, limit_offset)
            _, header = next(segment.headers(file, position, limit))
            return position, header.base_offset
        except CorruptBatch:
            damage = segment.damage_at(offset)
            if damage is None:
                raise
            return damage.position, damage.start_offset
        finally:
            file.release()

    def _search(
        self, view: View, timestamp_us: int, start_offset: int, end_offset: int
    ) -> tuple[int, int | None] | None:
        for number, segment in enumerate(view.segments):
            if segment.max_timestamp_us < timestamp_us or view.limit(number)[1] <= start_offset:
                continue
            found = self._search_segment(view, number, timestamp_us, start_offset)
            if found is not None:
                return found if found[0] < end_offset else None
        return None

    def _search_segment(
        self, view: View, number: int, timestamp_us: int, start_offset: int
    ) -> tuple[int, int | None] | None:
        """`_search` in one segment. Damage is examined."""
        segment = view.segments[number]
        limit, limit_offset = view.limit(number)
        file = segment.share_file()
        try:
            while True:
                try:
                    return self._search_file(segment, file, timestamp_us, start_offset, limit, limit_offset)
                except BadHeader as bad:  # search again with the damage known, as a later read would
                    if not self._examine(segment, file, bad.position, limit, limit_offset):
                        raise CorruptBatch(
                            partition=self._label,
                            offset=segment.base_offset,
                            reason="its segment cannot be searched for a timestamp",
                        ) from None
        finally:
            file.release()

    def _search_file(
        self, segment: Segment, file: SharedFile, timestamp_us: int, start_offset: int, limit: int, limit_offset: int
    ) -> tuple[int, int | None] | None:
        """`_search_segment` with the damage known so far. Raises CorruptBatch at that damage, and BadHeader at other
        damage."""
        position, offset = segment.index.before_time(timestamp_us)
        if offset < start_offset:
            first = max(start_offset, segment.base_offset)
            position, _ = self._locate(segment, file, first, limit, limit_offset)
        damaged = {damage.position: damage for damage in segment.damaged if damage.end_offset > start_offset}
        for at, header in segment.headers(file, position, limit):
            if position in damaged:  # `headers` skipped it
                raise self._corrupt(damaged[position])
            if body_fault(header, self._disk.read(file.fd, header.length, at)):
                raise BadHeader(at)  # a timestamp counts only if the batch's checksum matches
            if header.max_timestamp_us >= timestamp_us:
                is_exact = not header.attributes & HAS_TIMES
                return max(header.base_offset, start_offset), header.min_timestamp_us if is_exact else None
            position = at + header.length
        if position in damaged:
            raise self._corrupt(damaged[position])
        return None
