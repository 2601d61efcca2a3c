"""Prints a log for people, and checks all of it. Offline: takes no lock, changes nothing, needs no broker.

A path is a segment file, a partition's folder, a broker's data directory, or a folder of data directories, as `kafkalog
local --data` makes. The name of a partition comes from the checkpoint in its folder. If a broker is writing to a log,
its last batch may be incomplete; it is then reported as a torn tail, as after a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from broker.storage.checkpoint import Checkpoint, read_checkpoint, read_label, read_whole
from broker.storage.disk import Disk
from broker.storage.index import Damage, decode_index, places
from broker.storage.log_dir import is_data_directory, is_log_folder
from broker.storage.scan import Places, Scan, scan
from broker.storage.segment import INDEX_SUFFIX, LOG_SUFFIX, NEXT_SUFFIX, base_offset_of, segment_path
from kafkalog.config import nearest_hint
from kafkalog.errors import CorruptBatch, InvalidArgument
from kafkalog.format.batch import CODEC_NAMES, HEADER_SIZE, BatchHeader, header_at
from kafkalog.format.columns import HAS_TIMES, checked_columns, decode_columns, timestamps

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN_BYTES = 64
_BATCHES_AT_ONCE = 1000


@dataclass(frozen=True)
class Problem:
    """A fault in a file: what it is, its offsets [start_offset, end_offset), and its `bytes` from `position` on."""

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
class VerifiedLog:
    """The content of one log.

    Attributes:
        partition: its name, such as `flights-0`; None if that is not known.
        torn_bytes: bytes of a torn tail. They are no problem, because the next start cuts them off.
    """

    partition: str | None
    folder: str
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    torn_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Verification:
    """The result of `verify`: each log, and the totals."""

    logs: list[VerifiedLog] = field(default_factory=list)

    @property
    def segments(self) -> int:
        return sum(log.segments for log in self.logs)

    @property
    def batches(self) -> int:
        return sum(log.batches for log in self.logs)

    @property
    def records(self) -> int:
        return sum(log.records for log in self.logs)

    @property
    def bytes(self) -> int:
        return sum(log.bytes for log in self.logs)

    @property
    def torn_bytes(self) -> int:
        return sum(log.torn_bytes for log in self.logs)

    @property
    def problems(self) -> list[Problem]:
        return [problem for log in self.logs for problem in log.problems]


Topics = Mapping[str, Iterable[int]]
"""The topics to read, and the partitions of each; an empty list means all partitions, no topic means all topics."""


def verify(path: Path | str, topics: Topics | None = None) -> Verification:
    """Check every batch (checksums, order, contents) and every saved index.

    Raises:
        InvalidArgument: there is no log at the path, or a requested topic or partition is missing.
    """
    return Verification([_verify_log(log) for log in _logs(Path(path), topics or {})])


def _verify_log(log: _OfflineLog) -> VerifiedLog:
    result = VerifiedLog(log.partition, str(log.folder))
    for segment in log.segments:
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
        if segment.is_noise():
            base, size = segment.base_offset, segment.size
            damaged.append(Problem(str(segment.path), "contains no record batch", base, base, 0, size))
        else:
            result.torn_bytes += segment.torn_bytes
        result.problems += [*damaged, *lying, *index.problems()]
    return result


def entries(path: Path | str, *, records: bool = False, topics: Topics | None = None) -> Iterator[dict[str, Any]]:
    """The content of logs, in order, as dictionaries. `kind` is segment, batch, record, damaged or torn.

    Raises:
        InvalidArgument: there is no log at the path, or a requested topic or partition is missing.
    """
    chosen = [(log.partition, segment) for log in _logs(Path(path), topics or {}) for segment in log.segments]
    for partition, segment in chosen:
        yield {
            "kind": "segment",
            "partition": partition,
            "file": str(segment.path),
            "base_offset": segment.base_offset,
            "bytes": segment.size,
        }
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


def dump(path: Path | str, *, records: bool = False, topics: Topics | None = None) -> Iterator[str]:
    """`entries` as lines of text."""
    for entry in entries(path, records=records, topics=topics):
        yield _LINES[entry["kind"]].format_map({name: _shown(name, value) for name, value in entry.items()})


_LINES = {
    "segment": "{partition} {file} ({bytes} bytes)",
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
    if name == "partition":
        return value or "unnamed"
    if name.endswith("_us"):
        try:
            return (_EPOCH + timedelta(microseconds=value)).isoformat()
        except OverflowError:
            return f"{value} us"
    return "none" if value is None else value


class _EnoughForNow(Exception):
    """Stops a scan."""


class _OfflineSegment:
    """A segment file, read as recovery would read it. Of the saved index, only the known starts of batches are used. Of
    the checkpoint, the recovery point is used: it is a known start of a batch, and everything before it was synced.

    Attributes:
        end_position, torn_bytes: set at the end of `walk`.
    """

    def __init__(self, path: Path, base_offset: int, next_segment: int | None, checkpoint: Checkpoint) -> None:
        self._disk = Disk()
        self._checkpoint = checkpoint
        self.path = path
        self.base_offset = base_offset
        self.next_segment = next_segment
        self.synced_offset = max(checkpoint.synced_offset, base_offset)
        self.size = path.stat().st_size
        self.end_position = self.torn_bytes = 0

    def read(self, position: int, length: int) -> bytes:
        fd = self._disk.open(self.path)
        try:
            return self._disk.read(fd, length, position)
        finally:
            self._disk.close(fd)

    def walk(self) -> Iterator[tuple[BatchHeader, int] | Damage]:
        """(header, position) of every good batch, and the damage between them, in order, each as soon as it is found.

        The scan is stopped after some batches and restarted after the last of them. So millions of headers are neither
        kept nor waited for. This is correct because a scan needs only the end of the last good batch, not what is
        before it.
        """
        position, offset, leader_epoch = 0, self.base_offset, 0
        known = self._known()
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
                    known=known,
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

    def _known(self) -> Places:
        data = read_whole(self._disk, self.path.with_suffix(INDEX_SUFFIX))
        decoded = decode_index(data, self.base_offset, 1) if data is not None else None
        known = places(decoded[0], decoded[1].damaged) if decoded is not None else set()
        return known | self._checkpoint.places_in(self.base_offset)

    def is_noise(self) -> bool:
        """Whether the file contains neither a batch nor what an incomplete write leaves: the start of a batch, or
        zeros. Valid after `walk`."""
        if self.end_position or not self.torn_bytes:
            return False
        start = self.read(0, HEADER_SIZE)
        if not any(start):
            return False
        if len(start) < HEADER_SIZE:
            offset = self.base_offset.to_bytes(8, "little")
            return start[:8] != offset[: len(start)]
        return header_at(start) is None

    def contents_fault(self, position: int, header: BatchHeader) -> str | None:
        """Why the contents of a batch are wrong although its checksums match; None if they are right."""
        try:
            checked_columns(header, memoryview(self.read(position, header.length)), str(self.path))
        except CorruptBatch as error:
            return str(error.facts["reason"])
        return None

    def records(self, position: int, header: BatchHeader) -> Iterator[dict[str, Any]]:
        columns = decode_columns(header, memoryview(self.read(position, header.length)), str(self.path))
        names = set(columns.schema.names)
        times = timestamps([header], [columns]).view(pa.int64()) if header.attributes & HAS_TIMES else None
        for number in range(columns.num_rows):
            row = {name: columns.column(name)[number] for name in names}
            yield {
                "kind": "record",
                "offset": row["offset"].as_py() if "offset" in row else header.base_offset + number,
                "timestamp_us": header.min_timestamp_us if times is None else times[number].as_py(),
                "key": row["key"].as_py() if "key" in row else None,
                "value": row["value"].as_py(),
                "headers": _pairs(row["headers"].as_py()) if "headers" in row else [],
            }


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    return [(pair["key"], pair["value"]) for pair in headers or []]


class _SavedIndex:
    """A segment's saved index, to be compared with the batches. An index that is missing or ends early is no
    problem."""

    def __init__(self, segment: _OfflineSegment) -> None:
        self._path = segment.path.with_suffix(INDEX_SUFFIX)
        self._wrong: dict[int, int] = {}  # entries without a matching batch so far: position -> offset
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
            self._add("index describes more bytes than its segment has", 0, 0, segment.size, summary.covered)
        pairs = itertools.islice(zip(index.offsets, index.positions, strict=True), 1, None)
        self._wrong = {position: offset for offset, position in pairs}

    def batch(self, header: BatchHeader, position: int) -> None:
        if self._wrong.get(position) == header.base_offset:
            del self._wrong[position]

    def damaged(self, damage: Damage) -> None:
        self._wrong.pop(damage.position, None)

    def problems(self) -> list[Problem]:
        for position, offset in self._wrong.items():
            self._add("index entry without a batch", offset, offset + 1, position, 0)
        return self._problems

    def _add(self, what: str, *where: int) -> None:
        self._problems.append(Problem(str(self._path), what, *where))


class _OfflineLog(NamedTuple):
    """A partition's folder, the partition's name (None if not known), and its segments in order."""

    folder: Path
    partition: str | None
    segments: list[_OfflineSegment]


def _logs(path: Path, topics: Topics) -> list[_OfflineLog]:
    """The logs at a path, sorted by topic and partition: those of `topics`, or all if there are none."""
    if path.is_file():
        if not _is_segment(path):
            expected = f"the name of a segment is 20 digits and {LOG_SUFFIX} or {NEXT_SUFFIX}"
            raise InvalidArgument(reason=f"{path} is not a segment: {expected}")
        whole = _log_of(path.parent)
        found = [whole._replace(segments=[segment for segment in whole.segments if segment.path.name == path.name])]
    elif path.is_dir():
        found = sorted((_log_of(folder) for folder in _log_folders(path)), key=_order)
    else:
        raise InvalidArgument(reason=f"there is no file or folder {path}")
    return _of_topics(found, topics, path) if topics else found


def _log_folders(path: Path) -> list[Path]:
    """The partitions' folders of a path: the path itself, or those in it and in the data directories in it."""
    if is_log_folder(path.name) or any(map(_is_segment, path.iterdir())):
        return [path]
    directories = [path, *(sub for sub in path.iterdir() if sub.is_dir())]
    found = [sub for directory in directories for sub in _entries(directory, path) if is_log_folder(sub.name)]
    if not found and not any(map(is_data_directory, directories)):
        raise InvalidArgument(
            reason=f"{path} contains no log: give a segment, a partition's folder, a broker's data directory, "
            "or a folder of data directories"
        )
    return found


def _entries(directory: Path, path: Path) -> list[Path]:
    """The entries of a directory. If a directory other than the given path is missing or not readable, it counts as
    empty."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, PermissionError):
        if directory == path:
            raise
        return []


def _log_of(folder: Path) -> _OfflineLog:
    disk = Disk()
    found = sorted((int(path.name[:20]), path.suffix) for path in folder.iterdir() if _is_segment(path))
    checkpoint = read_checkpoint(disk, folder) or Checkpoint()
    segments = []
    for (base, suffix), (after, its_suffix) in itertools.zip_longest(found, found[1:], fillvalue=(None, None)):
        assert base is not None and suffix is not None
        # A segment before one named `.next` may have a tail that was never synced.
        after = after if its_suffix == LOG_SUFFIX else None
        segments.append(_OfflineSegment(segment_path(folder, base, suffix), base, after, checkpoint))
    return _OfflineLog(folder, read_label(disk, folder), segments)


def _order(log: _OfflineLog) -> tuple[str, int, Path]:
    topic, number = _topic_and_number(log)
    return topic or "\U0010ffff", number, log.folder


def _topic_and_number(log: _OfflineLog) -> tuple[str | None, int]:
    topic, dash, number = (log.partition or "").rpartition("-")
    return (topic, int(number)) if dash and number.isdecimal() else (None, 0)


def _of_topics(found: list[_OfflineLog], topics: Topics, path: Path) -> list[_OfflineLog]:
    wanted = {topic: set(numbers) for topic, numbers in topics.items()}
    there = {log.folder: _topic_and_number(log) for log in found}
    for topic, numbers in wanted.items():
        here = {number for name, number in there.values() if name == topic}
        if not here:
            hint = nearest_hint(topic, {name for name, _ in there.values() if name})
            raise InvalidArgument(reason=f"{path} has no partition of topic '{topic}'{hint}")
        if numbers - here:
            missing = ", ".join(map(str, sorted(numbers - here)))
            raise InvalidArgument(reason=f"topic '{topic}' has no partition {missing} in {path}")
    return [
        log
        for log in found
        for topic, number in [there[log.folder]]
        if topic in wanted and (not wanted[topic] or number in wanted[topic])
    ]


def _is_segment(path: Path) -> bool:
    return any(base_offset_of(path.name, suffix) is not None for suffix in (LOG_SUFFIX, NEXT_SUFFIX))
