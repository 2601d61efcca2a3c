"""A log for human eyes, and its check from end to end. Offline: takes no lock, changes nothing, needs no broker.

A path is a segment file, a partition's folder, or a data directory. Of a log that a broker is writing to, the last
batch may be there in part: that shows as a torn tail, as it would after a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from broker.storage.checkpoint import Checkpoint, read_checkpoint, read_whole
from broker.storage.directory import is_log_folder
from broker.storage.disk import Disk
from broker.storage.index import Damage, decode_index
from broker.storage.recovery import Scan, scan
from broker.storage.segment import INDEX_SUFFIX, LOG_SUFFIX, base_offset_of
from kafkalog.errors import CorruptBatch, InvalidArgument
from kafkalog.format.batch import CODEC_NAMES, BatchHeader
from kafkalog.format.columns import decode_columns

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN_BYTES = 64
_BATCHES_AT_ONCE = 1000


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be. Offsets [start_offset, end_offset), bytes from `position` on."""

    file: str
    what: str
    start_offset: int
    end_offset: int
    position: int
    bytes: int

    def __str__(self) -> str:
        offsets = f"offsets {self.start_offset} to {self.end_offset - 1}" if self.end_offset > self.start_offset else ""
        place = f"{self.bytes} bytes at {self.position}"
        return f"{self.file}: {self.what}: {', '.join(filter(None, (offsets, place)))}"


@dataclass
class Verification:
    """What a check from end to end found. `torn_bytes` are no problem: the next start cuts them off."""

    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    torn_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: Path | str) -> Verification:
    """Check every batch (checksums, order, contents) and every saved index.

    Raises:
        InvalidArgument: there is no log at the path.
    """
    result = Verification()
    for segment in _segments(Path(path)):
        result.segments += 1
        result.bytes += segment.size
        damaged: list[Problem] = []
        lying: list[Problem] = []
        index = _SavedIndex(segment)
        for found in segment.walk():
            if isinstance(found, Damage):
                index.damaged(found)
                damaged.append(Problem(str(segment.path), "damaged", *found[:3], found.end_position - found.position))
                continue
            header, position = found
            result.batches += 1
            result.records += header.record_count
            index.batch(header, position)
            fault = segment.contents_fault(position, header)
            if fault:
                lying.append(
                    Problem(str(segment.path), fault, header.base_offset, header.end_offset, position, header.length)
                )
        result.torn_bytes += segment.torn_bytes
        result.problems += [*damaged, *lying, *index.problems()]
    return result


def entries(path: Path | str, *, records: bool = False) -> Iterator[dict[str, Any]]:
    """What stands in a log, in order, as plain values: `kind` is segment, batch, record, damaged or torn.

    Raises:
        InvalidArgument: there is no log at the path.
    """
    for segment in _segments(Path(path)):
        yield {"kind": "segment", "file": str(segment.path), "base_offset": segment.base_offset, "bytes": segment.size}
        for found in segment.walk():
            if isinstance(found, Damage):
                yield _damage_entry(found)
                continue
            header, position = found
            yield _batch_entry(header, position)
            if records:
                yield from segment.records(position, header)
        if segment.torn_bytes:
            yield {"kind": "torn", "position": segment.end_position, "bytes": segment.torn_bytes}


def dump(path: Path | str, *, records: bool = False) -> Iterator[str]:
    """The same as lines of text."""
    for entry in entries(path, records=records):
        yield _LINES[entry["kind"]].format_map({name: _shown(name, value) for name, value in entry.items()})


_LINES = {
    "segment": "{file} ({bytes} bytes)",
    "batch": (
        "  {position}: offsets {start_offset} to {last_offset}, {bytes} bytes, {records} records, codec {codec}, "
        "epoch {leader_epoch}, appended {append_timestamp_us}, timestamps {min_timestamp_us} to {max_timestamp_us}, "
        "producer {producer}"
    ),
    "record": "    {offset} {timestamp_us} key={key} value={value} headers={headers}",
    "damaged": "  {position}: DAMAGED offsets {start_offset} to {last_offset}, {bytes} bytes",
    "torn": "  {position}: torn tail, {bytes} bytes (the next start cuts them off)",
}


def _batch_entry(header: BatchHeader, position: int) -> dict[str, Any]:
    idempotent = header.producer_id >= 0
    return {
        "kind": "batch",
        "position": position,
        "bytes": header.length,
        "start_offset": header.base_offset,
        "last_offset": header.end_offset - 1,
        "records": header.record_count,
        "codec": CODEC_NAMES[header.codec],
        "attributes": header.attributes,
        "leader_epoch": header.leader_epoch,
        "append_timestamp_us": header.append_timestamp_us,
        "min_timestamp_us": header.min_timestamp_us,
        "max_timestamp_us": header.max_timestamp_us,
        "producer": f"{header.producer_id}/{header.producer_epoch}/{header.base_sequence}" if idempotent else None,
    }


def _damage_entry(damage: Damage) -> dict[str, Any]:
    return {
        "kind": "damaged",
        "position": damage.position,
        "bytes": damage.end_position - damage.position,
        "start_offset": damage.start_offset,
        "last_offset": damage.end_offset - 1,
    }


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return repr(value) if len(value) <= _SHOWN_BYTES else f"{value[:_SHOWN_BYTES]!r}... ({len(value)} bytes)"
    if name.endswith("_us"):
        try:
            return (_EPOCH + timedelta(microseconds=value)).isoformat()
        except OverflowError:
            return f"{value} us"
    return "none" if value is None else value


class _EnoughForNow(Exception):
    """Stops a scan."""


class _OfflineSegment:
    """A segment file, read as recovery would, with nothing believed but its name.

    Attributes:
        end_position, torn_bytes: known once `walk` is through.
    """

    def __init__(self, path: Path, base_offset: int, next_segment: int | None, synced_offset: int) -> None:
        self._disk = Disk()
        self.path = path
        self.base_offset = base_offset
        self.next_segment = next_segment
        self.synced_offset = synced_offset
        self.size = path.stat().st_size
        self.end_position = self.torn_bytes = 0

    def read(self, position: int, length: int) -> bytes:
        fd = self._disk.open(self.path)
        try:
            return self._disk.read(fd, length, position)
        finally:
            self._disk.close(fd)

    def walk(self) -> Iterator[tuple[BatchHeader, int] | Damage]:
        """Every good batch with its position, and the damage between them, in order and as they are found.

        The scan is stopped after some batches and taken up behind the last of them: a scan knows no more of what is
        before a good batch than where it ends. Millions of headers are not held, nor waited for.
        """
        position, offset, leader_epoch = 0, self.base_offset, 0
        some: list[tuple[BatchHeader, int]] = []

        def on_batch(header: BatchHeader, at: int) -> None:
            some.append((header, at))
            if len(some) == _BATCHES_AT_ONCE:
                raise _EnoughForNow

        found: Scan | None = None
        while found is None:
            some.clear()
            try:
                found = scan(
                    self.read,
                    self.size,
                    position=position,
                    offset=offset,
                    leader_epoch=leader_epoch,
                    synced_offset=self.synced_offset,
                    next_segment=self.next_segment,
                    on_batch=on_batch,
                )
            except _EnoughForNow:
                pass
            for header, at in some:
                if at != position:
                    yield Damage(offset, header.base_offset, position, at)
                yield header, at
                position, offset, leader_epoch = at + header.length, header.end_offset, header.leader_epoch
        if found.tail_damaged:
            yield found.damaged[-1]
        self.end_position, self.torn_bytes = found.end_position, found.torn_bytes

    def contents_fault(self, position: int, header: BatchHeader) -> str | None:
        """What is wrong with a batch whose checksums hold, or None."""
        try:
            decode_columns(header, memoryview(self.read(position, header.length)), str(self.path))
        except CorruptBatch as error:
            return str(error.facts["reason"])
        return None

    def records(self, position: int, header: BatchHeader) -> Iterator[dict[str, Any]]:
        columns = decode_columns(header, memoryview(self.read(position, header.length)), str(self.path))
        names = set(columns.schema.names)
        for number in range(columns.num_rows):
            row = {name: columns.column(name)[number] for name in names}
            yield {
                "kind": "record",
                "offset": row["offset"].as_py() if "offset" in row else header.base_offset + number,
                "timestamp_us": row["timestamp"].value if "timestamp" in row else header.min_timestamp_us,
                "key": row["key"].as_py() if "key" in row else None,
                "value": row["value"].as_py(),
                "headers": _pairs(row["headers"].as_py()) if "headers" in row else [],
            }


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    return [(pair["key"], pair["value"]) for pair in headers or []]


class _SavedIndex:
    """A segment's saved index, to hold its batches against. A missing one is no problem, nor one that ends early."""

    def __init__(self, segment: _OfflineSegment) -> None:
        self._path = segment.path.with_suffix(INDEX_SUFFIX)
        self._wrong: dict[int, int] = {}  # entries, offset by position, that no batch was found for yet
        self._problems: list[Problem] = []
        data = read_whole(Disk(), self._path)
        if data is None:
            return
        decoded = decode_index(data, segment.base_offset, 1)
        if decoded is None:
            self._add("damaged index", 0, 0, 0, len(data))
            return
        index, summary = decoded
        if summary.covered > segment.size:
            self._add("an index of more than its segment", 0, 0, segment.size, summary.covered)
        pairs = itertools.islice(zip(index.offsets, index.positions, strict=True), 1, None)
        self._wrong = {position: offset for offset, position in pairs}

    def batch(self, header: BatchHeader, position: int) -> None:
        if self._wrong.get(position) == header.base_offset:
            del self._wrong[position]

    def damaged(self, damage: Damage) -> None:
        self._wrong.pop(damage.position, None)

    def problems(self) -> list[Problem]:
        for position, offset in self._wrong.items():
            self._add("an index entry where no such batch is", offset, offset + 1, position, 0)
        return self._problems

    def _add(self, what: str, *where: int) -> None:
        self._problems.append(Problem(str(self._path), what, *where))


def _segments(path: Path) -> Iterator[_OfflineSegment]:
    """The segments at a path, in order."""
    if path.is_file():
        base_offset = base_offset_of(path.name, LOG_SUFFIX)
        if base_offset is None:
            raise InvalidArgument(reason=f"{path} is no segment: its name is not 20 digits and {LOG_SUFFIX}")
        chosen = [segment for segment in _of_folder(path.parent) if segment.path.name == path.name]
        return iter(chosen)
    if not path.is_dir():
        raise InvalidArgument(reason=f"there is no file or folder {path}")
    folders = [path] if list(_of_folder(path)) else sorted(sub for sub in path.iterdir() if is_log_folder(sub.name))
    if not folders:
        raise InvalidArgument(reason=f"{path} holds no log: no segment and no partition's folder")
    return itertools.chain.from_iterable(_of_folder(folder) for folder in folders)


def _of_folder(folder: Path) -> Iterator[_OfflineSegment]:
    bases = sorted(base for path in folder.iterdir() if (base := base_offset_of(path.name, LOG_SUFFIX)) is not None)
    checkpoint = read_checkpoint(Disk(), folder) or Checkpoint()
    for base, behind in zip(bases, [*bases[1:], None], strict=False):
        path = folder / f"{base:020d}{LOG_SUFFIX}"
        yield _OfflineSegment(path, base, behind, max(*checkpoint, base))
