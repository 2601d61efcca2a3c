"""Columns as consumers hand them out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from kafkalog.client.consumer.decode import ArrowBuilder, Decoded
from kafkalog.format.columns import HAS_OFFSET
from kafkalog.records import TopicPartition


def piece(first_offset: int, offsets: list[int]) -> Decoded:
    """Records of one batch; dense if their offsets are none of their own."""
    header: Any = type("Header", (), {"attributes": HAS_OFFSET if offsets else 0, "min_timestamp_us": 0})
    arrays = {"value": pa.array([b"v"] * (len(offsets) or 2), pa.binary())}
    if offsets:
        arrays["offset"] = pa.array(offsets)
    return Decoded(header, pa.RecordBatch.from_pydict(arrays), first_offset)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(5, []), (7, [])], [5, 6, 7, 8]),
        ([(5, [5, 8, 9])], [5, 8, 9]),
        ([(5, []), (7, [8, 10])], [5, 6, 8, 10]),
        ([(5, [5, 6, 9]), (10, [])], [5, 6, 9, 10, 11]),
    ],
)
def test_offsets_of_a_compacted_batch_are_its_own(pieces: list[tuple[int, list[int]]], expected: list[int]) -> None:
    built = ArrowBuilder(TopicPartition("t", 0)).build([piece(*each) for each in pieces])
    assert built.column("offset").to_pylist() == expected
