"""Records to a batch's body on the producer's hot path. Pure; the columns are those of `format/columns.py`.

pyarrow takes 20 to 40 us to build and serialize a batch of 50 records, mostly for creating objects. Two uncompressed
batches without nulls and headers are the same Arrow IPC message except for lengths and offsets. So such a batch is
written here by `struct`, in 10 us, from the metadata of a message that pyarrow wrote once; a test checks that both give
the same bytes. All other batches go through pyarrow.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafkalog.format.columns import (
    BINARY,
    DELTA,
    DELTA_MAX,
    HAS_KEY,
    HAS_TIMES,
    HAS_TIMESTAMP,
    HAS_TIMESTAMP_DELTA,
    SCHEMAS,
    TIMESTAMP,
    Headers,
    columns_from_lists,
    encode_columns,
)

_PADDING = bytes(8)
_PLAIN_MAX = 2000  # records; above, pyarrow's cost a record is lower
_FEW = 100  # timestamps; above, numpy's cost a timestamp is lower


class Body(NamedTuple):
    """An encoded body, and what its batch's header says of it."""

    data: bytes | memoryview
    attributes: int
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int


def encode_records(
    values: Sequence[bytes | None],
    timestamps_us: list[int],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers | None] | None,
    codec: int,
) -> Body:
    """The body of n >= 1 records from sequences of length n; `keys` and `headers` are None where no record has one."""
    low, high = timestamps_us[0], timestamps_us[-1]
    if timestamps_us != sorted(timestamps_us):  # nearly always sorted, and then faster than min and max
        low, high = min(timestamps_us), max(timestamps_us)
    if codec == 0 and headers is None and len(values) <= _PLAIN_MAX:
        try:
            return _encode_plain(values, timestamps_us, keys, low, high)
        except TypeError:  # a null among them: len(None)
            pass
    columns = columns_from_lists(values, low if low == high else timestamps_us, keys, headers)
    return Body(encode_columns(columns.batch, codec), columns.attributes, len(values), low, high)


def _encode_plain(
    values: Sequence[bytes | None],
    timestamps_us: Sequence[int],
    keys: Sequence[bytes | None] | None,
    low: int,
    high: int,
) -> Body:
    count = len(values)
    attributes = 0
    pieces: list[bytes] = [b""]
    buffers: list[int] = []  # (offset, length) of each in the order of the message; a validity buffer is empty
    position = 0
    if high - low > DELTA_MAX:
        attributes = HAS_TIMESTAMP
        position = 8 * count
        pieces.append(_packer(count, "q")(*timestamps_us))
        buffers += (0, 0, 0, position)
    elif low != high:
        attributes = HAS_TIMESTAMP_DELTA
        position = size = 4 * count
        if count < _FEW:
            pieces.append(_packer(count, "i")(*[timestamp - low for timestamp in timestamps_us]))
        else:
            pieces.append((np.array(timestamps_us, np.int64) - low).astype(np.int32).tobytes())
        buffers += (0, 0, 0, size)
        if size & 7:
            pieces.append(_PADDING[:4])
            position += 4
    columns: tuple[Sequence[bytes | None], ...] = (values,)
    if keys is not None:
        attributes |= HAS_KEY
        columns = (keys, values)
    for column in columns:
        offsets = list(accumulate(map(len, column), initial=0))  # type: ignore[arg-type]
        size = 4 * count + 4
        buffers += (position, 0, position, size)
        pieces.append(_packer(count + 1, "i")(*offsets))
        position += size
        if size & 7:
            pieces.append(_PADDING[:4])
            position += 4
        size = offsets[-1]
        buffers += (position, size)
        pieces += column  # type: ignore[arg-type]
        position += size
        if size & 7:
            padding = -size & 7
            pieces.append(_PADDING[:padding])
            position += padding
    pieces[0] = _specimen(attributes).filled(count, position, buffers)
    return Body(b"".join(pieces), attributes, count, low, high)


@functools.cache
def _packer(count: int, kind: str) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}{kind}").pack


class _Specimen:
    """A message's metadata as pyarrow writes it, and the positions of the numbers that differ between batches.

    The metadata is a flatbuffer: Message {bodyLength, RecordBatch {length, nodes [(length, null_count)], buffers
    [(offset, length)]}}, with the vectors' elements inline; their number depends on the columns alone.
    """

    def __init__(self, attributes: int) -> None:
        stamps, offsets, data = (pa.py_buffer(buffer) for buffer in (bytes(16), struct.pack("<3i", 0, 1, 2), b"vv"))
        arrays = [pa.Array.from_buffers(BINARY, 2, [None, offsets, data])] * (1 + bool(attributes & HAS_KEY))
        if attributes & HAS_TIMES:
            kind = DELTA if attributes & HAS_TIMESTAMP_DELTA else TIMESTAMP
            arrays.insert(0, pa.Array.from_buffers(kind, 2, [None, stamps]))
        message = bytes(encode_columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]), 0))
        prefix = 8  # continuation mark, length of the metadata
        self._metadata = message[: prefix + struct.unpack_from("<I", message, 4)[0]]
        root = prefix + struct.unpack_from("<I", message, prefix)[0]
        _, _, record_batch_at, self._body_length_at = _fields(message, root)[:4]
        record_batch = record_batch_at + struct.unpack_from("<I", message, record_batch_at)[0]
        self._count_at, nodes_at, buffers_at = _fields(message, record_batch)[:3]
        nodes, self._nodes_at = _vector(message, nodes_at)
        buffers, self._buffers_at = _vector(message, buffers_at)
        self._nodes = struct.Struct("<" + "qq" * nodes)
        self._buffers = struct.Struct("<" + "qq" * buffers)
        assert nodes == len(arrays)

    def filled(self, count: int, body_length: int, buffers: list[int]) -> bytes:
        """The metadata of `count` records without nulls. `buffers`: offset and length of each in turn."""
        data = bytearray(self._metadata)
        _INT64.pack_into(data, self._body_length_at, body_length)
        _INT64.pack_into(data, self._count_at, count)
        self._nodes.pack_into(data, self._nodes_at, *((count, 0) * (self._nodes.size // 16)))
        self._buffers.pack_into(data, self._buffers_at, *buffers)
        return bytes(data)


_INT64 = struct.Struct("<q")


def _fields(message: bytes, table: int) -> list[int]:
    """The positions of a flatbuffer table's fields."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    size = struct.unpack_from("<H", message, vtable)[0]
    return [table + offset for offset in struct.unpack_from(f"<{(size - 4) // 2}H", message, vtable + 4)]


def _vector(message: bytes, field: int) -> tuple[int, int]:
    """(number of elements, position of the first) of a flatbuffer vector."""
    vector = field + struct.unpack_from("<I", message, field)[0]
    return struct.unpack_from("<I", message, vector)[0], vector + 4


@functools.cache
def _specimen(attributes: int) -> _Specimen:
    return _Specimen(attributes)
