from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from broker.storage.timestamps import COMPRESSED_RECORDS_MAX, first_record_at
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODECS, HEADER_SIZE, check_batch, encode_batch, stamp
from kafkalog.format.columns import HAS_TIMESTAMP, SCHEMAS, columns_from_lists, encode_columns
from tests.broker.storage.batches import make_batch

TIMES = [50, 20, 70, 70, 10, 90] * 30


@pytest.mark.parametrize("codec", list(CODECS))
def test_first_record_at_or_after_a_time_is_exact(codec: str) -> None:
    header, data = make_batch([b"x%d" % i for i in range(len(TIMES))], TIMES, codec=codec)
    stamp(data, 1000, 0, 0)
    header = check_batch(data)
    for start_offset in (0, 1000, 1003, 1179, 1180):
        for wanted in (-5, 10, 11, 50, 51, 70, 71, 90, 91):
            expected = next(
                ((1000 + i, t) for i, t in enumerate(TIMES) if t >= wanted and 1000 + i >= start_offset), None
            )
            assert first_record_at(header, bytes(data), wanted, start_offset, "t-0") == expected


def test_batch_with_one_time_for_all_has_no_column() -> None:
    header, data = make_batch([b"a", b"b", b"c"], 40)
    assert first_record_at(header, bytes(data), 40, 0, "t-0") == (0, 40)
    assert first_record_at(header, bytes(data), 40, 2, "t-0") == (2, 40)
    assert first_record_at(header, bytes(data), 41, 0, "t-0") is None


def with_body(body: bytes, codec: str, count: int) -> tuple[object, bytes]:
    encoded = encode_batch(
        memoryview(body), codec=CODECS[codec], attributes=HAS_TIMESTAMP, record_count=count, min_timestamp_us=0,
        max_timestamp_us=1 << 40,
    ).tobytes()  # fmt: skip
    return check_batch(encoded), encoded


@pytest.mark.parametrize("codec", list(CODECS))
def test_body_that_is_no_arrow_batch_is_a_corrupt_batch(codec: str) -> None:
    columns = columns_from_lists([b"v"] * 50, list(range(50)))
    body = bytes(encode_columns(columns.batch, CODECS[codec]))
    survived = 0
    for at in range(min(len(body), 400)):
        broken = body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]
        for candidate in (broken, body[:at]):
            header, data = with_body(candidate, codec, 50)
            try:
                first_record_at(header, data, 49, 0, "t-0")  # type: ignore[arg-type]
                survived += 1
            except CorruptBatch:
                pass
    assert survived < 2 * len(body)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_column_that_would_inflate_to_more_than_its_records_is_refused_unread(codec: str) -> None:
    columns = columns_from_lists([b"v"] * 1000, list(range(1000)))
    body = bytearray(encode_columns(columns.batch, CODECS[codec]))
    at = body.index(struct.pack("<q", 8000))
    body[at : at + 8] = struct.pack("<q", 1 << 50)
    header, data = with_body(bytes(body), codec, 1000)
    with pytest.raises(CorruptBatch, match="1125899906842624 bytes for 1000 records"):
        first_record_at(header, data, 5, 0, "t-0")  # type: ignore[arg-type]


def test_more_compressed_records_than_are_taken_in_are_not_inflated() -> None:
    """An append refuses them; older logs may hold some."""
    count = COMPRESSED_RECORDS_MAX + 1
    body = bytearray(encode_columns(columns_from_lists([b"v"] * 1000, list(range(1000))).batch, CODECS["zstd"]))
    at = body.index(struct.pack("<q", 8000))
    body[at : at + 8] = struct.pack("<q", 8 * count)
    header, data = with_body(bytes(body), "zstd", count)
    with pytest.raises(CorruptBatch, match=f"{count} compressed records are too many"):
        first_record_at(header, data, 5, 0, "t-0")  # type: ignore[arg-type]


def test_schema_message_is_no_record_batch() -> None:
    body = bytes(SCHEMAS[HAS_TIMESTAMP].serialize())
    body += bytes(-(HEADER_SIZE + len(body)) % 8)
    header, data = with_body(body, "none", 3)
    with pytest.raises(CorruptBatch, match="no Arrow record batch"):
        first_record_at(header, data, 5, 0, "t-0")  # type: ignore[arg-type]


def test_nulls_before_the_column_shift_nothing() -> None:
    """A validity bitmap in front of the timestamps is skipped."""
    times = pa.array([5, None, 9, 30], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_arrays([times, pa.array([b"v"] * 4, pa.binary())], schema=SCHEMAS[HAS_TIMESTAMP])
    header, data = with_body(bytes(batch.serialize()), "none", 4)
    assert first_record_at(header, data, 6, 2, "t-0") == (2, 9)  # type: ignore[arg-type]
