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
        batches: dict[int, BatchHeader] = {}  # by position
        found = segment.scan(batches)
        result.segments += 1
        result.batches += len(batches)
        result.records += sum(header.record_count for header in batches.values())
        result.bytes += segment.size
        result.torn_bytes += found.torn_bytes
        for damage in found.damaged:
            result.problems.append(
                Problem(str(segment.path), "damaged", *damage[:3], damage.end_position - damage.position)
            )
        for position, header in batches.items():
            fault = segment.contents_fault(position, header)
            if fault:
                result.problems.append(
                    Problem(str(segment.path), fault, header.base_offset, header.end_offset, position, header.length)
                )
        result.problems.extend(_index_problems(segment, batches, found.damaged))
    return result


def entries(path: Path | str, *, records: bool = False) -> Iterator[dict[str, Any]]:
    """What stands in a log, in order, as plain values: `kind` is segment, batch, record, damaged or torn.

    Raises:
        InvalidArgument: there is no log at the path.
    """
    for segment in _segments(Path(path)):
        yield {"kind": "segment", "file": str(segment.path), "base_offset": segment.base_offset, "bytes": segment.size}
        batches: dict[int, BatchHeader] = {}
        found = segment.scan(batches)
        damaged = {damage.position: damage for damage in found.damaged}
        for position in sorted({*batches, *damaged}):
            if position in damaged:
                yield _damage_entry(damaged[position])
            if position in batches:
                header = batches[position]
                yield _batch_entry(header, position)
                if records:
                    yield from segment.records(position, header)
        if found.torn_bytes:
            yield {"kind": "torn", "position": found.end_position, "bytes": found.torn_bytes}


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


class _OfflineSegment:
    """A segment file, read as recovery would, with nothing believed but its name."""

    def __init__(self, path: Path, base_offset: int, next_segment: int | None, synced_offset: int) -> None:
        self._disk = Disk()
        self.path = path
        self.base_offset = base_offset
        self.next_segment = next_segment
        self.synced_offset = synced_offset
        self.size = path.stat().st_size

    def read(self, position: int, length: int) -> bytes:
        fd = self._disk.open(self.path)
        try:
            return self._disk.read(fd, length, position)
        finally:
            self._disk.close(fd)

    def scan(self, batches: dict[int, BatchHeader]) -> Scan:
        def on_batch(header: BatchHeader, position: int) -> None:
            batches[position] = header

        return scan(
            self.read,
            self.size,
            position=0,
            offset=self.base_offset,
            leader_epoch=0,
            synced_offset=self.synced_offset,
            next_segment=self.next_segment,
            on_batch=on_batch,
        )

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


def _index_problems(
    segment: _OfflineSegment, batches: dict[int, BatchHeader], damaged: tuple[Damage, ...]
) -> Iterator[Problem]:
    """A saved index that disagrees with its segment; a missing one is no problem, nor one that ends early."""
    path = segment.path.with_suffix(INDEX_SUFFIX)
    data = read_whole(Disk(), path)
    if data is None:
        return
    decoded = decode_index(data, segment.base_offset, 1)
    if decoded is None:
        yield Problem(str(path), "damaged index", 0, 0, 0, len(data))
        return
    index, summary = decoded
    if summary.covered > segment.size:
        yield Problem(str(path), "an index of more than its segment", 0, 0, segment.size, summary.covered)
    broken = {damage.position for damage in damaged}
    for offset, position in itertools.islice(zip(index.offsets, index.positions, strict=True), 1, None):
        header = batches.get(position)
        if position not in broken and (header is None or header.base_offset != offset):
            yield Problem(str(path), "an index entry where no such batch is", offset, offset + 1, position, 0)


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
