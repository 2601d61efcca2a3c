"""The first record of a batch at or after a timestamp. Pure.

A compressed batch may be made to inflate to anything, so of one only the timestamp column is inflated, and only to the
8 bytes a record that it must have. For that its buffer is found in the Arrow message by hand: pyarrow inflates all.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODEC_NAMES, HEADER_SIZE, BatchHeader
from kafkalog.format.columns import HAS_TIMESTAMP

_CONTINUATION = 0xFFFFFFFF
_RECORD_BATCH = 3  # MessageHeader.RecordBatch
_NOT_COMPRESSED = -1  # a buffer's length prefix where compressing it did not pay
COMPRESSED_RECORDS_MAX = 1 << 22
"""Of one compressed batch. 13 KB of zstd held the timestamps of 33 million records, and inflating them took 268 MB;
this bounds it to 32 MiB."""
_ARROW_CODECS = {"lz4": "lz4", "zstd": "zstd"}


def first_record_at(
    header: BatchHeader, batch: bytes, timestamp_us: int, start_offset: int, where: str
) -> tuple[int, int] | None:
    """(offset, timestamp_us) of the first record at or after a timestamp and an offset, or None.

    Args:
        header, batch: a batch whose checksums hold.
        where: the partition, for errors.

    Raises:
        CorruptBatch: the body is not what the header says.
    """
    first = max(start_offset - header.base_offset, 0)
    if header.max_timestamp_us < timestamp_us or first >= header.record_count:
        return None
    if not header.attributes & HAS_TIMESTAMP:
        return header.base_offset + first, header.min_timestamp_us
    try:
        timestamps = memoryview(_timestamps(header, memoryview(batch))).cast("q")
    except (struct.error, IndexError, ValueError, TypeError, OSError, pa.ArrowException) as error:
        raise CorruptBatch(
            partition=where, offset=header.base_offset, reason=f"its timestamps cannot be read: {error}"
        ) from None
    for number in range(first, header.record_count):
        if timestamps[number] >= timestamp_us:
            return header.base_offset + number, timestamps[number]
    return None


def _timestamps(header: BatchHeader, batch: memoryview) -> memoryview:
    """The timestamp column's 8 bytes for each record."""
    body, start, length = _first_column(batch[HEADER_SIZE : header.length])
    wanted = 8 * header.record_count
    data = body[start : start + length]
    if header.codec == 0:
        if len(data) < wanted:
            raise ValueError(f"{len(data)} bytes for {header.record_count} records")
        return data[:wanted]
    (inflated,) = struct.unpack_from("<q", data)
    if inflated == _NOT_COMPRESSED:
        if len(data) - 8 < wanted:
            raise ValueError(f"{len(data) - 8} bytes for {header.record_count} records")
        return data[8 : 8 + wanted]
    if inflated != wanted:
        raise ValueError(f"{inflated} bytes for {header.record_count} records")
    if header.record_count > COMPRESSED_RECORDS_MAX:
        raise ValueError(f"{header.record_count} compressed records are too many to look at")
    codec = pa.Codec(_ARROW_CODECS[CODEC_NAMES[header.codec]])
    return memoryview(codec.decompress(data[8:], decompressed_size=wanted))


def _first_column(message: memoryview) -> tuple[memoryview, int, int]:
    """The body of an Arrow IPC message, and where in it the first column's data buffer stands: position, length.

    The message is u32 0xFFFFFFFF, i32 metadata length, metadata, body. The metadata is a FlatBuffers table Message
    (field 1: header type, 2: header) whose header is a RecordBatch (field 2: a vector of {i64 offset, i64 length},
    for each column its validity bitmap and its data).
    """
    continuation, metadata_length = struct.unpack_from("<Ii", message)
    if continuation != _CONTINUATION or metadata_length < 0:
        raise ValueError("no Arrow message")
    metadata, body = message[8 : 8 + metadata_length], message[8 + metadata_length :]
    (root,) = struct.unpack_from("<I", metadata)
    kind = _field(metadata, root, 1)
    header = _field(metadata, root, 2)
    if kind is None or header is None or metadata[kind] != _RECORD_BATCH:
        raise ValueError("no Arrow record batch")
    buffers = _field(metadata, _follow(metadata, header), 2)
    if buffers is None:
        raise ValueError("an Arrow record batch without buffers")
    vector = _follow(metadata, buffers)
    (count,) = struct.unpack_from("<I", metadata, vector)
    if count < 2:
        raise ValueError(f"{count} Arrow buffers")
    start, length = struct.unpack_from("<qq", metadata, vector + 4 + 16)
    if start < 0 or length < 0 or start + length > len(body):
        raise ValueError("an Arrow buffer outside the batch")
    return body, start, length


def _follow(data: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Where a field of a FlatBuffers table stands, or None if it is left out."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if vtable < 0:
        raise ValueError("no FlatBuffers table")
    (vtable_size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * number
    if slot >= vtable_size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else None
