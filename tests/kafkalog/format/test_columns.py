from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODECS, BatchHeader, encode_batch
from kafkalog.format.columns import (
    HAS_HEADERS,
    HAS_KEY,
    HAS_TIMESTAMP,
    HEADERS,
    SCHEMAS,
    TIMESTAMP,
    Columns,
    columns_from_arrays,
    columns_from_lists,
    decode_columns,
    encode_columns,
    joined,
)
from tests.golden.make import BATCHES, GOLDEN
from tests.whole_batch import check_batch


def batch_of(columns: Columns, codec: str = "none", **changed: int) -> tuple[BatchHeader, memoryview]:
    fields: dict[str, Any] = {"attributes": columns.attributes, "record_count": columns.batch.num_rows} | changed
    encoded = encode_batch(
        encode_columns(columns.batch, CODECS[codec]),
        codec=CODECS[codec],
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        **fields,
    ).tobytes()
    return check_batch(encoded), memoryview(encoded)


def rows(header: BatchHeader, columns: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """(timestamp, key, value, headers) of each record, absent columns filled as their attribute bit says."""
    count = columns.num_rows
    names = columns.schema.names
    times = columns["timestamp"].view(pa.int64()).to_pylist() if "timestamp" in names else None
    keys = columns["key"].to_pylist() if "key" in names else [None] * count
    headers = columns["headers"].to_pylist() if "headers" in names else [None] * count
    pairs = [[(pair["key"], pair["value"]) for pair in found] if found else None for found in headers]
    return list(zip(times or [header.min_timestamp_us] * count, keys, columns["value"].to_pylist(), pairs, strict=True))


@pytest.mark.parametrize("name", list(BATCHES))
def test_golden_batch_version_1_has_its_records(name: str) -> None:
    what = BATCHES[name]
    data = (GOLDEN / f"batch-1-{name}.bin").read_bytes()
    header = check_batch(data)
    count = len(what["values"])
    times = what["timestamps_us"] if isinstance(what["timestamps_us"], list) else [what["timestamps_us"]] * count
    expected = zip(
        times, what.get("keys", [None] * count), what["values"],
        [pairs or None for pairs in what.get("headers", [None] * count)], strict=True,
    )  # fmt: skip
    assert rows(header, decode_columns(header, memoryview(data))) == list(expected)
    assert (header.min_timestamp_us, header.max_timestamp_us) == (min(times), max(times))


BYTES = st.none() | st.binary(max_size=40)
RECORDS = st.lists(
    st.tuples(
        st.integers(-(1 << 62), 1 << 62),
        BYTES,
        BYTES,
        st.none() | st.lists(st.tuples(st.text(max_size=5), BYTES), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=30,
)


@settings(derandomize=True, max_examples=150)
@given(records=RECORDS, codec=st.sampled_from(list(CODECS)), same_time=st.booleans())
def test_records_come_back_as_they_were(records: list[Any], codec: str, same_time: bool) -> None:
    if same_time:
        records = [(records[0][0], *rest) for _, *rest in records]
    times, keys, values, headers = (list(column) for column in zip(*records, strict=True))
    with_keys, with_headers = any(key is not None for key in keys), any(headers)
    columns = columns_from_lists(values, times, keys if with_keys else None, headers if with_headers else None)
    header, batch = batch_of(columns, codec)
    assert rows(header, decode_columns(header, batch)) == records
    arrays = columns_from_arrays(
        pa.array(values, pa.binary()),
        pa.array(times, pa.int64()).view(TIMESTAMP),
        pa.array(keys, pa.binary()),
        pa.array(headers, HEADERS),
    )
    assert arrays.attributes == columns.attributes
    header, batch = batch_of(arrays, codec)
    assert rows(header, decode_columns(header, batch)) == records


@settings(derandomize=True, max_examples=100)
@given(
    pieces=st.lists(
        st.lists(st.tuples(st.integers(0, 3), BYTES, BYTES), min_size=1, max_size=4), min_size=1, max_size=4
    )
)
def test_columns_of_several_pieces_are_those_of_all_their_records(pieces: list[list[Any]]) -> None:
    columns = []
    for records in pieces:
        times, keys, values = (list(column) for column in zip(*records, strict=True))
        columns.append(columns_from_lists(values, times, keys))
    whole = joined(columns)
    header, batch = batch_of(whole, "none")
    expected = [(time, key, value, None) for records in pieces for time, key, value in records]
    assert rows(header, decode_columns(header, batch)) == expected
    times = [time for time, *_ in expected]
    assert (whole.min_timestamp_us, whole.max_timestamp_us) == (min(times), max(times))
    assert bool(whole.attributes & HAS_TIMESTAMP) == (min(times) != max(times))


def test_columns_that_say_nothing_are_left_out() -> None:
    value = pa.array([b"a", b"b"], pa.binary())
    nothing = pa.nulls(2, pa.binary())
    columns = columns_from_arrays(value, pa.array([7, 7], pa.int64()).view(TIMESTAMP), nothing, pa.nulls(2, HEADERS))
    assert columns.attributes == 0
    assert columns.batch.schema.names == ["value"]
    assert (columns.min_timestamp_us, columns.max_timestamp_us) == (7, 7)
    assert columns_from_arrays(value, 9).min_timestamp_us == 9
    full = columns_from_lists([b"v"] * 2, [1, 2], [b"k", None], [[("h", None)], None])
    assert full.attributes == HAS_TIMESTAMP | HAS_KEY | HAS_HEADERS
    assert full.batch.schema == SCHEMAS[full.attributes]


def test_a_codec_compresses_and_none_does_not() -> None:
    columns = columns_from_lists([b"a" * 100_000], 5)
    plain, *compressed = (len(encode_columns(columns.batch, CODECS[name])) for name in ("none", "lz4", "zstd"))
    assert plain > 100_000 and all(length < 10_000 for length in compressed)


def test_decoding_copies_nothing() -> None:
    header, batch = batch_of(columns_from_lists([b"value" * 100], 5))
    column = decode_columns(header, batch).column("value")
    start = pa.py_buffer(batch).address
    [*_, data] = column.buffers()
    assert data is not None and start <= data.address < start + len(batch)


@pytest.mark.parametrize("codec", list(CODECS))
def test_batch_that_says_too_much_or_too_little_is_refused(codec: str) -> None:
    columns = columns_from_lists([b"a", b"b", b"c"], [1, 2, 3])
    with pytest.raises(CorruptBatch, match="it has 3 records, but its header says 2"):
        decode_columns(*batch_of(columns, codec, record_count=2))
    with pytest.raises(CorruptBatch, match="its attributes 17"):
        decode_columns(*batch_of(columns, codec, attributes=17))
    with pytest.raises(CorruptBatch, match="its body is not an Arrow batch"):
        decode_columns(*batch_of(columns, codec, attributes=HAS_TIMESTAMP | HAS_KEY | HAS_HEADERS))
    header, batch = batch_of(columns, codec)
    with pytest.raises(CorruptBatch, match="schema 4"):
        decode_columns(header._replace(schema_id=4), batch)


def test_damaged_body_under_right_checksums_never_crashes() -> None:
    """Every byte set to extremes: an error, or columns that can be read to the end."""
    columns = columns_from_lists([b"abc", None, b"d" * 50], [1, 2, 3], [b"k", None, b"l"], [[("h", b"x")], None, None])
    body = bytes(encode_columns(columns.batch, 0))
    refused = 0
    for at in range(len(body)):
        for byte in (0, 0xFF, body[at] ^ 0x80):
            broken = body[:at] + bytes([byte]) + body[at + 1 :]
            encoded = encode_batch(
                memoryview(broken), codec=0, attributes=columns.attributes, record_count=3, min_timestamp_us=1,
                max_timestamp_us=3,
            ).tobytes()  # fmt: skip
            header = check_batch(encoded)
            try:
                rows(header, decode_columns(header, memoryview(encoded)))
            except CorruptBatch:
                refused += 1
    assert refused > 100
