"""Batches as a broker's log has them, for tests: made and stamped, and with what columns a test asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kafkalog.format.batch import encode_batch, stamp
from kafkalog.format.columns import HAS_OFFSET, OFFSET, SCHEMAS, Columns, columns_from_lists, encode_columns


def stamped(columns: Columns, base_offset: int, last_offset_delta: int | None = None) -> bytes:
    encoded = encode_batch(
        encode_columns(columns.batch, 0),
        codec=0,
        attributes=columns.attributes,
        record_count=columns.batch.num_rows,
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        last_offset_delta=last_offset_delta,
    )
    data = bytearray(encoded.tobytes())
    stamp(data, base_offset, 1, 9)
    return bytes(data)


def batches(*counts: int) -> bytes:
    """Batches of so many records each, from offset 0 on; a record's value is its offset."""
    data, offset = b"", 0
    for count in counts:
        data += stamped(columns_from_lists([b"%d" % (offset + n) for n in range(count)], 5), offset)
        offset += count
    return data


def with_offsets(columns: Columns, offsets: Sequence[int]) -> Columns:
    """The columns with the one that compaction adds: it left these records only."""
    attributes = columns.attributes | HAS_OFFSET
    arrays = [*columns.batch.columns, pa.array(offsets, OFFSET)]
    return columns._replace(batch=pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]), attributes=attributes)
