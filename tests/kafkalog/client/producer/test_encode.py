"""Batches written by hand are those that pyarrow would write, and read back as what went in."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.client.producer import encode as encoder
from kafkalog.client.producer.encode import encode_records
from kafkalog.format.batch import CODECS, encode_batch
from kafkalog.format.columns import (
    DELTA_MAX,
    HAS_HEADERS,
    HAS_KEY,
    HAS_TIMES,
    HAS_TIMESTAMP,
    HAS_TIMESTAMP_DELTA,
    checked_columns,
    columns_from_lists,
    encode_columns,
    timestamps,
)
from tests.whole_batch import check_batch

BYTES = st.binary(max_size=40)
MAYBE_BYTES = st.none() | BYTES
TIME = st.integers(0, 1 << 40) | st.integers(1 << 40, (1 << 40) + DELTA_MAX)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), MAYBE_BYTES), min_size=1, max_size=3)


def read_back(body: encoder.Body, codec: int) -> dict[str, list[Any]]:
    batch = encode_batch(
        memoryview(body.data),
        codec=codec,
        attributes=body.attributes,
        record_count=body.record_count,
        min_timestamp_us=body.min_timestamp_us,
        max_timestamp_us=body.max_timestamp_us,
    ).tobytes()
    header = check_batch(batch)
    columns = checked_columns(header, memoryview(batch))
    return columns.to_pydict() | {"timestamp": timestamps([header], [columns]).view(pa.int64()).to_pylist()}


@given(
    st.lists(st.tuples(MAYBE_BYTES, TIME, MAYBE_BYTES, HEADERS), min_size=1, max_size=30),
    st.sampled_from(list(CODECS.values())),
    st.booleans(),
    st.booleans(),
)
def test_every_record_reads_back(
    records: list[tuple[Any, ...]], codec: int, with_keys: bool, with_headers: bool
) -> None:
    values, stamps, keys, headers = (list(column) for column in zip(*records, strict=True))
    body = encode_records(values, stamps, keys if with_keys else None, headers if with_headers else None, codec)
    columns = read_back(body, codec)
    assert columns["value"] == values
    assert columns["timestamp"] == stamps
    assert (body.min_timestamp_us, body.max_timestamp_us) == (min(stamps), max(stamps))
    if with_keys:
        assert columns["key"] == keys
    else:
        assert not body.attributes & HAS_KEY
    if with_headers:
        told = [[(pair["key"], pair["value"]) for pair in pairs] if pairs else None for pairs in columns["headers"]]
        assert told == [pairs or None for pairs in headers]
    else:
        assert not body.attributes & HAS_HEADERS


@given(
    st.lists(st.tuples(BYTES, TIME, BYTES), min_size=1, max_size=60),
    st.booleans(),
    st.sampled_from(["any", "one", "close"]),
    st.sampled_from([1, 3]),
)
def test_a_plain_batch_is_what_pyarrow_writes_to_the_byte(
    records: list[tuple[Any, ...]], keyed: bool, times: str, repeated: int
) -> None:
    """Up to 180 records: numpy begins to subtract the timestamps at 100."""
    values, stamps, keys = (list(column) for column in zip(*records * repeated, strict=True))
    if times == "one":
        stamps = [stamps[0]] * len(stamps)
    elif times == "close":
        stamps = [stamps[0] + stamp % (DELTA_MAX // 2) for stamp in stamps]
    body = encode_records(values, stamps, keys if keyed else None, None, 0)
    shared = stamps[0] if min(stamps) == max(stamps) else stamps
    columns = columns_from_lists(values, shared, keys if keyed else None)
    assert bytes(body.data) == bytes(encode_columns(columns.batch, 0))
    assert body.attributes == columns.attributes
    span = max(stamps) - min(stamps)
    bit = 0 if span == 0 else HAS_TIMESTAMP_DELTA if span < 1 << 31 else HAS_TIMESTAMP
    assert body.attributes & HAS_TIMES == bit


@pytest.mark.parametrize(("span", "bit"), [((1 << 31) - 1, HAS_TIMESTAMP_DELTA), (1 << 31, HAS_TIMESTAMP)])
@pytest.mark.parametrize("count", [2, 3, 150, encoder._PLAIN_MAX + 1])
@pytest.mark.parametrize("codec", [CODECS["none"], CODECS["zstd"]])
def test_timestamps_are_deltas_up_to_the_largest_number_of_32_bits(span: int, bit: int, count: int, codec: int) -> None:
    stamps = [1_700_000_000_000_000 + span] + [1_700_000_000_000_000] * (count - 1)
    body = encode_records([b"v"] * count, stamps, None, None, codec)
    assert body.attributes == bit
    assert read_back(body, codec)["timestamp"] == stamps


@pytest.mark.parametrize("size", [50, 1000])
def test_a_message_takes_8_bytes_more_than_its_value_and_a_batch_312(size: int) -> None:
    values, stamps = [bytes(200)] * size, [1_700_000_000_000_000 + 3 * number for number in range(size)]
    body = encode_records(values, stamps, None, None, 0)
    batch = encode_batch(
        memoryview(body.data), codec=0, attributes=body.attributes, record_count=size,
        min_timestamp_us=body.min_timestamp_us, max_timestamp_us=body.max_timestamp_us,
    )  # fmt: skip
    assert batch.length == 200 * size + 8 * size + 312


@pytest.mark.parametrize("count", [encoder._PLAIN_MAX - 1, encoder._PLAIN_MAX, encoder._PLAIN_MAX + 1])
def test_both_ways_meet_where_one_takes_over(count: int) -> None:
    values = [b"%d" % number for number in range(count)]
    body = encode_records(values, list(range(count)), None, None, 0)
    assert read_back(body, 0)["value"] == values
