"""Batches written by hand are those that pyarrow would write, and read back as what went in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.client.producer import encode as encoder
from kafkalog.client.producer.encode import encode_records
from kafkalog.format.batch import CODECS, encode_batch
from kafkalog.format.columns import (
    HAS_HEADERS,
    HAS_KEY,
    HAS_TIMESTAMP,
    columns_from_lists,
    decode_columns,
    encode_columns,
)
from tests.whole_batch import check_batch

BYTES = st.binary(max_size=40)
MAYBE_BYTES = st.none() | BYTES
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
    columns = decode_columns(header, memoryview(batch)).to_pydict()
    if "timestamp" in columns:
        columns["timestamp"] = [round(stamp.timestamp() * 1e6) for stamp in columns["timestamp"]]
    else:
        columns["timestamp"] = [header.min_timestamp_us] * header.record_count
    return columns


@given(
    st.lists(st.tuples(MAYBE_BYTES, st.integers(0, 1 << 40), MAYBE_BYTES, HEADERS), min_size=1, max_size=30),
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
    st.lists(st.tuples(BYTES, st.integers(0, 1 << 40), BYTES), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_a_plain_batch_is_what_pyarrow_writes_to_the_byte(
    records: list[tuple[Any, ...]], keyed: bool, one_time: bool
) -> None:
    values, stamps, keys = (list(column) for column in zip(*records, strict=True))
    if one_time:
        stamps = [stamps[0]] * len(stamps)
    body = encode_records(values, stamps, keys if keyed else None, None, 0)
    shared = stamps[0] if min(stamps) == max(stamps) else stamps
    columns = columns_from_lists(values, shared, keys if keyed else None)
    assert bytes(body.data) == bytes(encode_columns(columns.batch, 0))
    assert body.attributes == columns.attributes
    assert bool(body.attributes & HAS_TIMESTAMP) == (min(stamps) != max(stamps))


@pytest.mark.parametrize("count", [encoder._PLAIN_MAX - 1, encoder._PLAIN_MAX, encoder._PLAIN_MAX + 1])
def test_both_ways_meet_where_one_takes_over(count: int) -> None:
    values = [b"%d" % number for number in range(count)]
    body = encode_records(values, list(range(count)), None, None, 0)
    assert read_back(body, 0)["value"] == values
