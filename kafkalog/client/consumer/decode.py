"""Converts fetched columns to fields of messages, or to Arrow batches with every column. Pure.

The fields are put together by C functions over whole columns, `binary_values` and `zip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple, overload

import numpy as np
import pyarrow as pa

from kafkalog.format.batch import BatchHeader
from kafkalog.format.columns import (
    BINARY,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET,
    HAS_TIMES,
    HEADERS,
    TIMESTAMP,
    binary_array,
    integer_array,
    timestamp_list,
    timestamps,
)
from kafkalog.records import MessageFields, TopicPartition

TOPIC = pa.dictionary(pa.int32(), pa.string())
ARROW_SCHEMA = pa.schema(
    [
        pa.field("topic", TOPIC),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("key", BINARY),
        pa.field("value", BINARY),
        pa.field("headers", HEADERS),
    ]
)
"""The columns of `Consumer.arrow_batches`."""
_FAST_LISTS = int(pa.__version__.split(".")[0]) >= 26
ROWS_AT_ONCE = 1000
"""Messages by the thousand stay in the processor's cache; ten thousand at once take 1.5 times as long. Who asks for so
many at once gets columns."""


class Decoded(NamedTuple):
    """The columns of a batch's wanted records; `first_offset` is the first one's."""

    header: BatchHeader
    columns: pa.RecordBatch
    first_offset: int

    def cut(self, rows: int) -> tuple[Decoded, int]:
        """The first so many of its records, and the offset of the next one."""
        header, columns, first = self
        end = columns.column("offset")[rows].as_py() if header.attributes & HAS_OFFSET else first + rows
        return self._replace(columns=columns.slice(0, rows)), end


class Rows(Sequence[MessageFields]):
    """The fields of the messages of a batch's wanted records, put together when they are looked at. Keeps the memory
    that they were received into."""

    __slots__ = ("_decoded", "_partition", "_topic_id")

    def __init__(self, partition: TopicPartition, topic_id: bytes, decoded: Decoded) -> None:
        self._partition = partition
        self._topic_id = topic_id
        self._decoded = decoded

    def __len__(self) -> int:
        return self._decoded.columns.num_rows

    def __iter__(self) -> Iterator[MessageFields]:
        if len(self) <= ROWS_AT_ONCE:
            return _fields(self._partition, self._topic_id, self._decoded)
        return chain.from_iterable(map(self._some, range(0, len(self), ROWS_AT_ONCE)))

    def _some(self, first: int, rows: int = ROWS_AT_ONCE) -> Iterator[MessageFields]:
        header, columns, first_offset = self._decoded
        some = Decoded(header, columns.slice(first, rows), first_offset + first)
        return _fields(self._partition, self._topic_id, some)

    @overload
    def __getitem__(self, at: int) -> MessageFields: ...
    @overload
    def __getitem__(self, at: slice) -> list[MessageFields]: ...
    def __getitem__(self, at: int | slice) -> MessageFields | list[MessageFields]:
        if isinstance(at, slice):
            first, end, step = at.indices(len(self))
            return list(self._some(first, max(0, end - first))) if step == 1 else list(self)[at]
        return next(self._some(range(len(self))[at], 1))


def _fields(partition: TopicPartition, topic_id: bytes, decoded: Decoded) -> Iterator[MessageFields]:
    header, columns, first = decoded
    attributes = header.attributes
    return zip(
        repeat(partition.topic),
        repeat(partition.partition),
        columns.column("offset").to_pylist() if attributes & HAS_OFFSET else range(first, first + columns.num_rows),
        timestamp_list(header, columns) if attributes & HAS_TIMES else repeat(header.min_timestamp_us),
        binary_values(columns.column("key")) if attributes & HAS_KEY else repeat(None),
        binary_values(columns.column("value")),
        _headers(columns.column("headers")) if attributes & HAS_HEADERS else repeat(()),
        repeat(header.leader_epoch),
        repeat(topic_id),
    )


def binary_values(array: pa.Array) -> list[bytes | None]:
    """The values of a binary array: 0.04 us for each either way. `to_pylist` took 1 us before pyarrow 26, and numpy's
    objects take 2 us to begin, and pandas' import once, where that is installed."""
    values: list[bytes | None]
    values = array.to_pylist() if _FAST_LISTS else array.to_numpy(zero_copy_only=False).tolist()
    return values


def _headers(array: pa.Array) -> list[tuple[tuple[str, bytes | None], ...]]:
    return [tuple((pair["key"], pair["value"]) for pair in pairs) if pairs else () for pairs in array.to_pylist()]


class ArrowBuilder:
    """Builds batches with all columns for one partition. Columns with the same value in every row are built once and
    sliced."""

    def __init__(self, partition: TopicPartition) -> None:
        self._partition = partition
        self._rows = 0
        self._constants: dict[str, pa.Array] = {}

    def build(self, pieces: Sequence[Decoded]) -> pa.RecordBatch:
        """One batch of the records of all pieces, in `ARROW_SCHEMA`."""
        rows = sum(piece.columns.num_rows for piece in pieces)
        self._provide(rows)
        arrays = [
            self._constants["topic"].slice(0, rows),
            self._constants["partition"].slice(0, rows),
            _offsets(pieces, rows),
            timestamps([piece.header for piece in pieces], [piece.columns for piece in pieces]),
            self._optional("key", HAS_KEY, pieces, rows),
            _joined([piece.columns.column("value") for piece in pieces]),
            self._optional("headers", HAS_HEADERS, pieces, rows),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)

    def _provide(self, rows: int) -> None:
        if rows > self._rows:
            rows = max(rows, 2 * self._rows)
            zeros = integer_array(pa.int32(), np.zeros(rows, np.int32))
            topic = binary_array(pa.string(), [self._partition.topic.encode()])
            self._constants = {
                "topic": pa.DictionaryArray.from_arrays(zeros, topic),
                "partition": integer_array(pa.int32(), np.full(rows, self._partition.partition, np.int32)),
                "key": pa.nulls(rows, BINARY),
                "headers": pa.nulls(rows, HEADERS),
            }
            self._rows = rows  # last, because an interrupt may come before it

    def _optional(self, name: str, bit: int, pieces: Sequence[Decoded], rows: int) -> pa.Array:
        if not any(piece.header.attributes & bit for piece in pieces):
            return self._constants[name].slice(0, rows)
        return _joined(
            [
                piece.columns.column(name)
                if piece.header.attributes & bit
                else self._constants[name].slice(0, piece.columns.num_rows)
                for piece in pieces
            ]
        )


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _offsets(pieces: Sequence[Decoded], rows: int) -> pa.Array:
    first, last = pieces[0].first_offset, pieces[-1]
    has_gap = last.first_offset + last.columns.num_rows - first != rows
    if not has_gap and not last.header.attributes & HAS_OFFSET:  # has_gap does not see a gap in the last batch
        return integer_array(pa.int64(), np.arange(first, first + rows))
    return _joined(
        [
            piece.columns.column("offset")
            if piece.header.attributes & HAS_OFFSET
            else integer_array(pa.int64(), np.arange(piece.first_offset, piece.first_offset + piece.columns.num_rows))
            for piece in pieces
        ]
    )
