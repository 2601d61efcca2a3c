from __future__ import annotations

import pickle
import struct

import pytest
from fastcrc.crc32 import iscsi as crc32c
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import (
    ALIGNMENT,
    HEADER,
    HEADER_SIZE,
    LENGTH_MAX,
    SEQUENCE_MODULUS,
    STAMPED_SIZE,
    body_fault,
    damage_end,
    encode_batch,
    header_at,
    iter_batches,
    read_header,
    stamp,
)
from kafkalog.format.columns import columns_from_lists, decode_columns, encode_columns
from tests.golden.make import APPEND_TIMESTAMP_US, BASE_OFFSET, BATCHES, GOLDEN, LEADER_EPOCH
from tests.whole_batch import check_batch


def encoded(values: list[bytes], **more: int) -> bytes:
    columns = columns_from_lists(values, 5)
    return encode_batch(
        encode_columns(columns.batch, 0),
        codec=0,
        attributes=columns.attributes,
        record_count=len(values),
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        **more,
    ).tobytes()


def forged(**fields: int) -> bytes:
    """A batch whose header has other fields, with both checksums made right again."""
    batch = encoded([b"value"])
    header = read_header(batch)._replace(**fields)
    data = bytearray(HEADER.pack(*header) + batch[HEADER_SIZE:])
    struct.pack_into("<I", data, 28, crc32c(bytes(data[32:])))
    struct.pack_into("<I", data, 24, crc32c(bytes(data[:STAMPED_SIZE])))
    return bytes(data)


@pytest.mark.parametrize("name", list(BATCHES))
def test_golden_batch_version_1_is_read_and_its_header_written_the_same(name: str) -> None:
    data = (GOLDEN / f"batch-1-{name}.bin").read_bytes()
    what = BATCHES[name]
    header = check_batch(data)
    assert (header.base_offset, header.leader_epoch, header.append_timestamp_us) == (
        BASE_OFFSET, LEADER_EPOCH, APPEND_TIMESTAMP_US,
    )  # fmt: skip
    assert header.length == len(data)
    assert header.record_count == len(what["values"])
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == what.get("producer", (-1, -1, -1))
    columns = decode_columns(header, memoryview(data))
    assert columns.column("value").to_pylist() == what["values"]
    again = bytearray(
        encode_batch(
            memoryview(data)[HEADER_SIZE:], codec=header.codec, attributes=header.attributes,
            record_count=header.record_count, min_timestamp_us=header.min_timestamp_us,
            max_timestamp_us=header.max_timestamp_us, producer_id=header.producer_id,
            producer_epoch=header.producer_epoch, base_sequence=header.base_sequence,
            transaction_batch_id=header.transaction_batch_id, part=header.part,
        ).tobytes()
    )  # fmt: skip
    stamp(again, BASE_OFFSET, LEADER_EPOCH, APPEND_TIMESTAMP_US)
    assert bytes(again) == data


def test_batch_is_padded_to_eight_and_starts_unstamped() -> None:
    for size in range(20):
        batch = encoded([bytes(size)])
        assert len(batch) % ALIGNMENT == 0
        header = check_batch(batch)
        assert header[:4] == (0, len(batch), 0, 0)
    odd = encode_batch(
        memoryview(b"12345"), codec=0, attributes=0, record_count=1, min_timestamp_us=0, max_timestamp_us=0
    )
    assert odd.length == 104 == len(odd.tobytes())
    assert body_fault(read_header(odd.tobytes()), odd.tobytes()) is None


def test_stamping_changes_the_stamped_fields_and_nothing_that_the_body_checksum_covers() -> None:
    before = encoded([b"a", b"b"], producer_id=7, producer_epoch=1, base_sequence=4)
    after = bytearray(before)
    stamp(memoryview(after), 10, 3, 99)
    header = check_batch(after)
    assert (header.base_offset, header.leader_epoch, header.append_timestamp_us, header.end_offset) == (10, 3, 99, 12)
    assert after[28:] == before[28:]
    stamp(after, 20, 4, 100)  # and again, as after a refused write
    assert check_batch(after).base_offset == 20


def test_any_flipped_bit_is_found() -> None:
    batch = encoded([b"some value"])
    for at in range(len(batch)):
        for bit in range(8):
            damaged = bytearray(batch)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptBatch):
                check_batch(bytes(damaged))


def test_of_a_batch_with_any_bit_of_its_body_flipped_the_end_is_known_or_not_told() -> None:
    batch, following = bytearray(encoded([b"some value", b"another"])), bytearray(encoded([b"one"]))
    stamp(batch, 10, 1, 9)
    stamp(following, 12, 1, 9)
    header = read_header(batch)
    for at in range(28, len(batch)):
        for bit in range(8):
            damaged = bytearray(batch)
            damaged[at] ^= 1 << bit
            header = read_header(damaged)
            assert damage_end(header, bytes(damaged + following), 0) == 12
            assert damage_end(header, bytes(following + damaged + following), len(following)) == 12
            # The last one, or before a bad header: the end is in the damaged bytes 40 to 48 alone.
            alone = None if 40 <= at < 48 else 12
            for behind in (b"", following[:95], bytes(96), b"\xff" * 96):
                assert damage_end(header, bytes(damaged + behind), 0) == alone


@pytest.mark.parametrize("filling", [b"\x00", b"\xff"])
def test_of_a_body_that_is_overwritten_with_its_header_the_end_is_not_guessed(filling: bytes) -> None:
    batch = bytearray(encoded([b"some value"]))
    batch[32:] = filling * (len(batch) - 32)
    assert damage_end(read_header(batch), bytes(batch), 0) is None


def test_a_batch_of_a_newer_version_is_not_damaged() -> None:
    batch = forged(magic=2)
    assert damage_end(read_header(batch), batch, 0) is None


def test_batch_cut_at_any_length_is_found() -> None:
    batch = encoded([b"some value"])
    for length in range(len(batch)):
        with pytest.raises(CorruptBatch):
            check_batch(batch[:length], "t-0")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"length": 88}, "its length 88 is impossible"),
        ({"length": 0}, "its length 0 is impossible"),
        ({"length": -8}, "its length -8 is impossible"),
        ({"length": 1001}, "its length 1001 is impossible"),
        ({"magic": 2}, "its format version 2 is not known here"),
        ({"codec": 3}, "its codec 3 is not known"),
        ({"record_count": 0}, "its record count 0 does not fit"),
        ({"record_count": -1}, "its record count -1 does not fit"),
        ({"record_count": 2}, "its record count 2 does not fit its last offset delta 0"),
        ({"last_offset_delta": -1}, "does not fit its last offset delta -1"),
        ({"min_timestamp_us": 6}, "its smallest timestamp is greater than its largest"),
    ],
)
def test_header_that_lies_under_right_checksums_is_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(CorruptBatch) as caught:
        check_batch(forged(**fields), "t-0")
    assert reason in str(caught.value)


def test_largest_length_is_still_aligned() -> None:
    assert LENGTH_MAX % ALIGNMENT == 0
    largest = header_at(forged(length=LENGTH_MAX))
    assert largest is not None and largest.length == LENGTH_MAX
    assert header_at(forged(length=LENGTH_MAX + 1)) is None


def test_sequence_wraps() -> None:
    header = read_header(encoded([b"a", b"b", b"c"], producer_id=1, producer_epoch=0, base_sequence=(1 << 31) - 2))
    assert header.end_sequence == 1
    assert SEQUENCE_MODULUS == 1 << 31


def test_row_of_batches_gives_the_whole_ones_and_stops_at_damage() -> None:
    row = b"".join(encoded([b"%d" % number]) for number in range(3))
    length = len(row) // 3
    assert [header.record_count for header, _ in iter_batches(memoryview(row))] == [1, 1, 1]
    for cut in range(2 * length, 3 * length):
        assert len(list(iter_batches(memoryview(row[:cut])))) == 2
    damaged = bytearray(row)
    damaged[length + 100] ^= 1
    found = iter_batches(memoryview(bytes(damaged)), "t-0")
    next(found)
    with pytest.raises(CorruptBatch, match="its checksum does not match"):
        next(found)
    assert list(iter_batches(memoryview(b""))) == []


def test_damage_in_a_row_of_batches_names_where_to_continue_if_offsets_are_known() -> None:
    batches = [bytearray(encoded([b"%d" % number, b"more"])) for number in range(3)]
    for number, batch in enumerate(batches):
        stamp(batch, 10 + 2 * number, 1, 9)
    batches[1][100] ^= 1
    row = memoryview(b"".join(batches))
    with pytest.raises(CorruptBatch) as caught:
        list(iter_batches(row, "t-0"))
    assert (caught.value.facts["offset"], caught.value.facts["end_offset"]) == (12, 14)
    with pytest.raises(CorruptBatch) as caught:
        list(iter_batches(row, "t-0", is_stamped=False))
    assert caught.value.facts.keys() == {"partition", "reason"}
    assert str(caught.value).startswith("corrupt batch for t-0: ")


@given(lengths=st.lists(st.integers(0, 300), max_size=6), cut=st.integers(0, 400))
def test_any_row_of_batches_cut_anywhere_gives_what_is_whole(lengths: list[int], cut: int) -> None:
    batches = [encoded([b"v" * length]) for length in lengths]
    row = b"".join(batches)
    kept = row[: max(0, len(row) - cut)]
    found = [bytes(batch) for _, batch in iter_batches(memoryview(kept))]
    assert found == batches[: len(found)]
    whole = sum(map(len, found))
    assert len(found) == len(batches) or whole + len(batches[len(found)]) > len(kept)


def test_header_read_at_a_position() -> None:
    row = b"x" * 8 + encoded([b"a"])
    assert read_header(row, 8).record_count == 1
    assert header_at(row, 8) == read_header(row, 8)
    assert header_at(row[: 8 + 95], 8) is None
    with pytest.raises(CorruptBatch, match="only 95 of its header's 96 bytes"):
        read_header(row[: 8 + 95], 8)
    assert pickle.loads(pickle.dumps(read_header(row, 8))) == read_header(row, 8)


def test_a_staged_batch_carries_its_transaction() -> None:
    header = read_header(encoded([b"a"], producer_id=1 << 62, base_sequence=7, transaction_batch_id=1 << 40, part=3))
    assert (header.transaction_batch_id, header.part, header.base_sequence) == (1 << 40, 3, 7)
    plain = read_header(encoded([b"a"]))
    assert (plain.transaction_batch_id, plain.part) == (-1, -1)
