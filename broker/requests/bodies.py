"""Checks that a batch's body is as its header says, as `checked_columns` does, but faster for batches of one record.

Decoding costs 3 us whatever the size: little for a batch of many records, a fifth of the whole append for a single one.
Arrow's own description of a body (its metadata: counts, and where the buffers are) has the same bytes for records of
the same size. So the result of decoding one such body is cached by its metadata. Of the next such body only the offsets
are checked, because nothing else outside the metadata can point outside the body.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from kafkalog.format.batch import HEADER_SIZE, BatchHeader
from kafkalog.format.columns import BINARY, HAS_HEADERS, HAS_TIMESTAMP_DELTA, checked_columns

_METADATA_LENGTH = struct.Struct("<xxxxi")  # after Arrow's continuation mark
_OFFSETS = struct.Struct("<ii")
_METADATA_MAX = 1024
_REMEMBERED = 4096

_NOT_IN_METADATA = HAS_HEADERS | HAS_TIMESTAMP_DELTA  # columns with more to check than a pair of offsets

_Shape = tuple[tuple[int, int], ...]
"""For each binary column of a one-record body: where its offsets stand in the batch, and how many data bytes it has."""


class BodyCheck:
    """Checks bodies, and caches the metadata of those of one record. Thread-safe: it only replaces and adds."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, int, bytes], _Shape] = {}

    def check(self, header: BatchHeader, batch: memoryview, where: str) -> None:
        """Raises CorruptBatch when an uncompressed body is not what its header says. `batch`: its bytes, exactly."""
        if header.record_count != 1 or header.attributes & _NOT_IN_METADATA or header.length < HEADER_SIZE + 8:
            checked_columns(header, batch, where)
            return
        (metadata_length,) = _METADATA_LENGTH.unpack_from(batch, HEADER_SIZE)
        if not 0 <= metadata_length <= _METADATA_MAX:
            checked_columns(header, batch, where)
            return
        # The attributes choose the columns, the schema id must be ours, the length bounds the buffers.
        key = (
            header.attributes << 32 | header.schema_id & 0xFFFFFFFF,
            header.length,
            bytes(batch[HEADER_SIZE : HEADER_SIZE + 8 + metadata_length]),
        )
        shape = self._shapes.get(key)
        if shape is not None:
            for position, length in shape:
                start, end = _OFFSETS.unpack_from(batch, position)
                if not 0 <= start <= end <= length:
                    break
            else:
                return
        columns = checked_columns(header, batch, where)
        if shape is None:
            self._remember(key, columns, batch)

    def _remember(self, key: tuple[int, int, bytes], columns: pa.RecordBatch, batch: memoryview) -> None:
        base = pa.py_buffer(batch).address
        shape = []
        for column in columns.columns:
            if column.type != BINARY:
                continue
            validity, offsets, data = column.buffers()
            if validity is not None or offsets is None:
                return  # the metadata does not show whether a record is null
            shape.append((offsets.address - base, 0 if data is None else data.size))
        if len(self._shapes) >= _REMEMBERED:
            self._shapes = {}
        self._shapes[key] = tuple(shape)
