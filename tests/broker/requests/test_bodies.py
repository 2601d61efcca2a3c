"""The quick check of bodies says what decoding says, whatever the bytes."""

from __future__ import annotations

import random
import struct

import pyarrow as pa
import pytest

from broker.requests.bodies import BodyCheck
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import HEADER, HEADER_SIZE, BatchHeader, encode_batch
from kafkalog.format.columns import (
    DELTA,
    HAS_TIMESTAMP_DELTA,
    SCHEMAS,
    checked_columns,
    columns_from_lists,
    encode_columns,
)


def one_record(value: bytes | None, key: bytes | None = None) -> bytearray:
    columns = columns_from_lists([value], 5, [key] if key is not None else None)
    body = encode_columns(columns.batch, 0)
    batch = encode_batch(
        body, codec=0, attributes=columns.attributes, record_count=1, min_timestamp_us=5, max_timestamp_us=5
    )
    return bytearray(batch.tobytes())


def header_of(batch: bytearray) -> BatchHeader:
    return BatchHeader._make(HEADER.unpack_from(batch))


def decodes(batch: bytearray) -> bool:
    try:
        checked_columns(header_of(batch), memoryview(batch))
    except CorruptBatch:
        return False
    return True


def passes(check: BodyCheck, batch: bytearray) -> bool:
    try:
        check.check(header_of(batch), memoryview(batch), "t-0")
    except CorruptBatch:
        return False
    return True


def test_the_quick_check_says_what_decoding_says_of_changed_bodies() -> None:
    dice = random.Random(20110612)
    check = BodyCheck()
    bases = [
        one_record(b"v" * 20),
        one_record(b""),
        one_record(None),
        one_record(b"v" * 9, b"key"),
        one_record(b"", b""),
    ]
    accepted = 0
    for number in range(12_000):
        batch = bytearray(dice.choice(bases))
        for _ in range(dice.randint(0, 2)):
            at = dice.randrange(HEADER_SIZE, len(batch) - 8)
            if dice.random() < 0.5:
                batch[at] ^= 1 << dice.randrange(8)
            else:
                number_ = dice.choice([0, 1, 8, 9, 20, 21, -1, 1 << 30, (1 << 31) - 1, -(1 << 31)])
                batch[at : at + 4] = struct.pack("<i", number_)
        expected = decodes(batch)
        assert passes(check, batch) == expected, f"case {number}: {batch.hex()}"
        accepted += expected
    assert 2000 < accepted < 11_000


def test_offsets_that_point_anywhere_are_found_in_a_shape_that_is_known() -> None:
    check = BodyCheck()
    good = one_record(b"v" * 20)
    at = good.rindex(struct.pack("<ii", 0, 20))
    for _ in range(3):
        assert passes(check, good)
    for start, end in ((0, 21), (0, -1), (-1, 20), (7, 6), (20, 1 << 30)):
        bad = bytearray(good)
        struct.pack_into("<ii", bad, at, start, end)
        assert not decodes(bad)
        assert not passes(check, bad)
    struct.pack_into("<ii", good, at, 3, 17)
    assert passes(check, good)


def test_a_known_shape_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = BodyCheck()
    decoded: list[int] = []

    def counting(header: BatchHeader, batch: memoryview, where: str) -> object:
        decoded.append(header.length)
        return checked_columns(header, batch, where)

    monkeypatch.setattr("broker.requests.bodies.checked_columns", counting)
    for letter in b"abcdef":
        assert passes(check, one_record(bytes([letter]) * 20))
    assert len(decoded) == 1
    for _ in range(2):
        assert passes(check, one_record(None))  # nulls stand outside the metadata: decoded each time
    assert len(decoded) == 3


def test_no_more_shapes_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.requests.bodies._REMEMBERED", 10)
    check = BodyCheck()
    for size in range(35):
        assert passes(check, one_record(bytes(size)))
        assert len(check._shapes) <= 10


@pytest.mark.parametrize("cut", [8, 16, 24])
def test_a_body_that_is_shorter_than_its_shape_is_refused(cut: int) -> None:
    """Its checksum is right: whoever made the batch left the end of a value out."""
    check = BodyCheck()
    columns = columns_from_lists([b"v" * 20], 5)
    body = encode_columns(columns.batch, 0)

    def batch_of(length: int) -> bytearray:
        batch = encode_batch(
            body[:length],
            codec=0,
            attributes=columns.attributes,
            record_count=1,
            min_timestamp_us=5,
            max_timestamp_us=5,
        )
        return bytearray(batch.tobytes())

    assert passes(check, batch_of(len(body)))
    assert not passes(check, batch_of(len(body) - cut))


def with_deltas(deltas: list[int], span: int) -> bytearray:
    """Records of the value `v` with these deltas of timestamps, in whose header the timestamps are `span` apart."""
    arrays = [pa.array(deltas, DELTA), pa.array([b"v"] * len(deltas), pa.binary())]
    columns = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[HAS_TIMESTAMP_DELTA])
    batch = encode_batch(
        encode_columns(columns, 0), codec=0, attributes=HAS_TIMESTAMP_DELTA, record_count=len(deltas),
        min_timestamp_us=5, max_timestamp_us=5 + span,
    )  # fmt: skip
    return bytearray(batch.tobytes())


@pytest.mark.parametrize("times", [1, 100])
def test_deltas_of_timestamps_are_checked_each_time(times: int) -> None:
    check = BodyCheck()
    for _ in range(3):
        assert passes(check, with_deltas([3, 0, 9] * times, 9))
        for deltas, span in (([0, -1, 9], 9), ([3, 1, 9], 9), ([3, 0, 8], 9), ([0, -1], (1 << 32) - 1)):
            assert not passes(check, with_deltas(deltas * times, span))


def test_the_delta_of_a_single_record_is_checked_though_its_shape_is_known() -> None:
    """No producer of ours writes such a batch."""
    check = BodyCheck()
    for _ in range(2):
        assert passes(check, with_deltas([0], 0))
        assert not passes(check, with_deltas([1], 0))
        assert not passes(check, with_deltas([1], 1))
