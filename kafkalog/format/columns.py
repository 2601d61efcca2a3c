"""A batch's body: records to Arrow columns and back. Knows the columns; the header and checks are `format/batch.py`'s.

Columns in this order, each absent where its attribute bit is clear:

    bit 0  timestamp  timestamp[us, UTC]                        absent: every record has the header's (min = max)
    bit 1  key        binary, nullable                          absent: every key is null
           value      binary, nullable                          always there
    bit 2  headers    list<struct<key: string, value: binary>>  absent: no record has any
    bit 3  offset     int64                                     absent: base_offset, base_offset + 1, ...

Bit 3 is reserved for compaction, which leaves gaps. Clients read it; no broker writes or accepts it yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODECS, HEADER_SIZE, BatchHeader

HAS_TIMESTAMP = 1
HAS_KEY = 2
HAS_HEADERS = 4
HAS_OFFSET = 8
_KNOWN_BITS = HAS_TIMESTAMP | HAS_KEY | HAS_HEADERS | HAS_OFFSET

TIMESTAMP = pa.timestamp("us", tz="UTC")
BINARY = pa.binary()
HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
OFFSET = pa.int64()


def _schema(attributes: int) -> pa.Schema:
    fields = []
    if attributes & HAS_TIMESTAMP:
        fields.append(pa.field("timestamp", TIMESTAMP))
    if attributes & HAS_KEY:
        fields.append(pa.field("key", BINARY))
    fields.append(pa.field("value", BINARY))
    if attributes & HAS_HEADERS:
        fields.append(pa.field("headers", HEADERS))
    if attributes & HAS_OFFSET:
        fields.append(pa.field("offset", OFFSET))
    return pa.schema(fields)


SCHEMAS = [_schema(attributes) for attributes in range(_KNOWN_BITS + 1)]
"""The body's schema by attributes."""

_WRITE_OPTIONS = {CODECS[name]: pa.ipc.IpcWriteOptions(compression=None if name == "none" else name) for name in CODECS}

Headers = Sequence[tuple[str, bytes | None]]


class Columns(NamedTuple):
    """Records as columns, with the header's fields about them."""

    batch: pa.RecordBatch
    attributes: int
    min_timestamp_us: int
    max_timestamp_us: int


def columns_from_lists(
    values: Sequence[bytes | None],
    timestamps_us: Sequence[int] | int,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
) -> Columns:
    """Columns of n records from sequences of length n.

    Args:
        values: bytes or None.
        timestamps_us: microseconds since the epoch; one number if all share it.
        keys: None if no record has one.
        headers: None if no record has any.
    """
    attributes = 0
    arrays = []
    if isinstance(timestamps_us, int):
        low = high = timestamps_us
    else:
        low, high = min(timestamps_us), max(timestamps_us)
        if low != high:
            attributes |= HAS_TIMESTAMP
            arrays.append(pa.array(timestamps_us, pa.int64()).view(TIMESTAMP))
    if keys is not None:
        attributes |= HAS_KEY
        arrays.append(pa.array(keys, BINARY))
    arrays.append(pa.array(values, BINARY))
    if headers is not None:
        attributes |= HAS_HEADERS
        arrays.append(pa.array([list(pairs) if pairs else None for pairs in headers], HEADERS))
    return Columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]), attributes, low, high)


def columns_from_arrays(
    value: pa.Array,
    timestamp: pa.Array | int,
    key: pa.Array | None = None,
    headers: pa.Array | None = None,
) -> Columns:
    """Columns from Arrow arrays of the exact types of this module, without copying; n >= 1 rows."""
    attributes = 0
    arrays = []
    if isinstance(timestamp, int):
        low = high = timestamp
    else:
        import pyarrow.compute as pc

        limits = pc.min_max(timestamp.view(pa.int64()))
        low, high = limits["min"].as_py(), limits["max"].as_py()
        if low != high:
            attributes |= HAS_TIMESTAMP
            arrays.append(timestamp)
    if key is not None and key.null_count < len(key):
        attributes |= HAS_KEY
        arrays.append(key)
    arrays.append(value)
    if headers is not None and headers.null_count < len(headers):
        attributes |= HAS_HEADERS
        arrays.append(headers)
    return Columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]), attributes, low, high)


def joined(pieces: Sequence[Columns]) -> Columns:
    """The records of some columns one after the other. Their attributes may differ by `HAS_TIMESTAMP` alone."""
    if len(pieces) == 1:
        return pieces[0]
    low, high = min(each.min_timestamp_us for each in pieces), max(each.max_timestamp_us for each in pieces)
    attributes = pieces[0].attributes & ~HAS_TIMESTAMP | (HAS_TIMESTAMP if low != high else 0)
    arrays = [_timestamps(pieces)] if attributes & HAS_TIMESTAMP else []
    names = SCHEMAS[attributes].names[len(arrays) :]
    arrays += [pa.concat_arrays([each.batch.column(name) for each in pieces]) for name in names]
    return Columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]), attributes, low, high)


def _timestamps(pieces: Sequence[Columns]) -> pa.Array:
    """The timestamp of every record."""
    if not any(each.attributes & HAS_TIMESTAMP for each in pieces):
        stamps = np.array([each.min_timestamp_us for each in pieces], np.int64)
        return pa.array(np.repeat(stamps, [each.batch.num_rows for each in pieces])).view(TIMESTAMP)
    return pa.concat_arrays(
        [each.batch.column("timestamp") if each.attributes & HAS_TIMESTAMP else _timestamps([each]) for each in pieces]
    )


def encode_columns(columns: pa.RecordBatch, codec: int) -> memoryview:
    """The body: one Arrow IPC message, its buffers compressed as `codec` says. `columns` has a schema of `SCHEMAS`."""
    if codec == 0:
        return memoryview(columns.serialize())
    # serialize() has no options, and a stream's writer has: write a stream, cut off its schema and its end mark.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema, options=_WRITE_OPTIONS[codec]) as writer:
        writer.write_batch(columns)
    return memoryview(sink.getvalue())[_schema_length(columns.schema) : -_END_MARK_LENGTH]


_END_MARK_LENGTH = 8


@functools.cache
def _schema_length(schema: pa.Schema) -> int:
    """Bytes that a stream's schema message takes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    return sink.getvalue().size - _END_MARK_LENGTH


def decode_columns(header: BatchHeader, batch: memoryview, where: str = "a request") -> pa.RecordBatch:
    """The columns of a batch whose checksums were checked; zero-copy over `batch` unless compressed.

    Raises:
        CorruptBatch: the body does not match the header (a producer's mistake, not damage).
    """
    if header.attributes & ~_KNOWN_BITS or header.schema_id != 0:
        raise CorruptBatch(
            partition=where,
            offset=header.base_offset,
            reason=f"its attributes {header.attributes} or schema {header.schema_id} are unknown to this version",
        )
    try:
        columns = pa.ipc.read_record_batch(pa.py_buffer(batch[HEADER_SIZE : header.length]), SCHEMAS[header.attributes])
        columns.validate(full=True)  # 0.2 us at 50 rows, 6 us at 10,000: a false offset would crash a reader
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise CorruptBatch(
            partition=where, offset=header.base_offset, reason=f"its body is not an Arrow batch: {error}"
        ) from None
    if columns.num_rows != header.record_count:
        raise CorruptBatch(
            partition=where,
            offset=header.base_offset,
            reason=f"it has {columns.num_rows} records, but its header says {header.record_count}",
        )
    return columns
