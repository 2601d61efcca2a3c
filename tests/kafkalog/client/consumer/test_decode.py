"""Fetched columns to messages and to Arrow batches: what is absent, what begins in the middle, and what is joined."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from kafkalog.client.consumer import decode
from kafkalog.client.consumer.decode import ARROW_SCHEMA, ArrowBuilder, Decoded, Rows
from kafkalog.format.columns import Columns, Headers, columns_from_lists, decode_columns
from kafkalog.records import Message, TopicPartition, as_messages
from tests.kafkalog.client.consumer.batches import stamped, with_offsets
from tests.whole_batch import check_batch

T7 = TopicPartition("t", 7)
ID = b"i" * 16
EPOCH = 1
KEYS = [b"k0", None, b"k2", b""]
VALUES = [None, b"v1", b"", b"v3"]
TIMES = [30, 10, 20, 40]
HEADERS: list[Headers | None] = [None, [("h", b"1"), ("h", None)], [], [("i", b"")]]


def messages(partition: TopicPartition, topic_id: bytes, piece: Decoded) -> list[Message]:
    return list(as_messages(Rows(partition, topic_id, piece)))


def decoded(columns: Columns, first: int, *, skipped: int = 0, count: int | None = None) -> Decoded:
    """A batch that begins at an offset, without its first records and of so many."""
    data = stamped(columns, first, columns.batch.num_rows - 1)
    header = check_batch(data)
    return Decoded(header, decode_columns(header, memoryview(data)).slice(skipped, count), first + skipped)


def full(first: int = 100, skipped: int = 0, count: int | None = None) -> Decoded:
    return decoded(columns_from_lists(VALUES, TIMES, KEYS, HEADERS), first, skipped=skipped, count=count)


def wide(first: int = 100, skipped: int = 0) -> Decoded:
    """Over more than 36 minutes."""
    times = [time << 40 for time in TIMES]
    return decoded(columns_from_lists(VALUES, times, KEYS, HEADERS), first, skipped=skipped)


def plain(first: int, count: int, time: int = 5) -> Decoded:
    """Values alone, which are their offsets."""
    return decoded(columns_from_lists([b"%d" % (first + number) for number in range(count)], time), first)


def compacted(offsets: Sequence[int], first: int | None = None) -> Decoded:
    """`first`: where the batch began before its first records were left out."""
    columns = columns_from_lists([b"%d" % offset for offset in offsets], 5)
    return decoded(with_offsets(columns, offsets), offsets[0] if first is None else first)


EXPECTED = [
    Message("t", 7, 100, 30, b"k0", None, (), EPOCH, ID),
    Message("t", 7, 101, 10, None, b"v1", (("h", b"1"), ("h", None)), EPOCH, ID),
    Message("t", 7, 102, 20, b"k2", b"", (), EPOCH, ID),
    Message("t", 7, 103, 40, b"", b"v3", (("i", b""),), EPOCH, ID),
]


def test_every_column_of_a_record_is_in_its_message() -> None:
    found = messages(T7, ID, full())
    assert found == EXPECTED
    assert all(type(each) is Message for each in found)


@pytest.mark.parametrize("skipped", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_batch_of_which_a_piece_is_wanted_gives_that_piece(skipped: int, count: int) -> None:
    assert messages(T7, ID, full(skipped=skipped, count=count)) == EXPECTED[skipped : skipped + count]
    rows = ArrowBuilder(T7).build([full(skipped=skipped, count=count)])
    assert from_arrow(rows) == EXPECTED[skipped : skipped + count]


def test_timestamps_of_a_batch_over_hours_are_those_that_were_given() -> None:
    assert [message.timestamp_us for message in messages(T7, ID, wide())] == [time << 40 for time in TIMES]


def test_columns_that_are_absent_have_what_the_header_says() -> None:
    assert messages(T7, ID, plain(50, 2)) == [
        Message("t", 7, offset, 5, None, b"%d" % offset, (), EPOCH, ID) for offset in (50, 51)
    ]


def test_a_compacted_batch_keeps_its_offsets() -> None:
    assert [message.offset for message in messages(T7, ID, compacted([10, 17, 19]))] == [10, 17, 19]


@pytest.mark.parametrize("apart", [7, 1 << 31])
@pytest.mark.parametrize("count", [79, 80, 81, 199, 200, 201])
def test_many_records_are_read_as_few_are(count: int, apart: int) -> None:
    """numpy begins to read the integers at 200, and to add deltas at 80."""
    times = [5 + apart * number for number in range(count + 1)]
    columns = columns_from_lists([b"%d" % number for number in range(count + 1)], times)
    found = messages(T7, ID, decoded(columns, 0, skipped=1))
    assert [message.timestamp_us for message in found] == times[1:]
    assert [message.value for message in found] == [b"%d" % number for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("skipped", [0, 3])
def test_each_row_is_found_by_its_place(count: int, skipped: int) -> None:
    """Rows are put together by the thousand."""
    numbers = range(skipped + count)
    columns = columns_from_lists(
        [None if number % 7 == 0 else b"v%d" % number for number in numbers],
        [5 + number for number in numbers],
        [b"k%d" % number if number % 3 else None for number in numbers],
        [[("h", b"%d" % number)] if number % 5 == 0 else None for number in numbers],
    )
    rows = Rows(T7, ID, decoded(columns, 100, skipped=skipped))
    made = list(rows)
    assert len(rows) == len(made) == count
    for place, (topic, partition, offset, stamp, key, value, headers, epoch, topic_id) in enumerate(made, skipped):
        assert (topic, partition, offset, stamp, epoch, topic_id) == ("t", 7, 100 + place, 5 + place, EPOCH, ID)
        assert key == (b"k%d" % place if place % 3 else None)
        assert value == (None if place % 7 == 0 else b"v%d" % place)
        assert headers == ((("h", b"%d" % place),) if place % 5 == 0 else ())
    assert [rows[place] for place in (0, count // 2, -1)] == [made[0], made[count // 2], made[-1]]
    assert rows[-3:] == made[-3:] and rows[::-400] == made[::-400]
    for first, end in ((3, 1), (5, 5), (0, 1), (-1, 0), (998, 1002)):
        assert rows[first:end] == made[first:end]
    with pytest.raises(IndexError):
        rows[count]


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("array", [
    pa.array([], pa.binary()), pa.array([None, None], pa.binary()), pa.array([b""], pa.binary()),
    pa.array([b"a", None, b"", b"bcd"], pa.binary()), pa.array([b"a", None, b"", b"bcd"], pa.binary()).slice(1, 2),
    pa.array([None, b"x" * 1000, b"y"], pa.binary()).slice(2), pa.array([None, b"x"], pa.binary()).slice(1),
])  # fmt: skip
def test_values_are_the_same_both_ways(array: pa.Array, monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(decode, "_FAST_LISTS", is_fast)
    values = decode.binary_values(array)
    assert values == [value.as_py() for value in array]
    assert {type(value) for value in values} <= {bytes, type(None)}


def test_rows_of_a_compacted_batch_keep_their_offsets_when_they_are_cut() -> None:
    offsets = [10 + 3 * number for number in range(2500)]
    whole = compacted(offsets)
    first, end = whole.cut(1200)
    assert end == offsets[1200] and list(Rows(T7, ID, first)) == list(Rows(T7, ID, whole))[:1200]
    assert [fields[2] for fields in Rows(T7, ID, whole)] == offsets


# --- Arrow


def from_arrow(batch: pa.RecordBatch) -> list[Message]:
    assert batch.schema == ARROW_SCHEMA
    batch.validate(full=True)
    times = batch.column("timestamp").view(pa.int64()).to_pylist()
    return [
        Message(
            row["topic"], row["partition"], row["offset"], time, row["key"], row["value"],
            tuple((pair["key"], pair["value"]) for pair in row["headers"] or ()),
            EPOCH,
            ID,
        )
        for row, time in zip(batch.to_pylist(), times, strict=True)
    ]  # fmt: skip


def all_messages(*pieces: Decoded) -> list[Message]:
    return [message for piece in pieces for message in messages(T7, ID, piece)]


@pytest.mark.parametrize("pieces", [
    [plain(100, 3)],
    [plain(100, 3), plain(103, 2, time=6)],  # one time each
    [plain(98, 2), full(100), plain(104, 1)],  # a column that only one of them has
    [full(100), full(104, skipped=1)],
    [compacted([10, 17, 19])],
    [compacted([10, 17, 19]), plain(20, 2)],
    [plain(20, 2), compacted([22, 29])],
    [plain(5, 2), compacted([8, 10], first=7)],
    [decoded(columns_from_lists([b"v"], 5, None, [[("h", b"1")]]), 7)],  # headers and no key
    [plain(1, 2), plain(13, 2)],  # a gap between two
    [compacted([10, 12]), compacted([13, 14, 15])],
    [full(100, skipped=4), plain(104, 2)],  # of the first nothing is wanted
    [wide(96), full(100), plain(104, 1)],  # timestamps, deltas of timestamps, and neither
    [full(96, skipped=1, count=2), wide(100, skipped=2)],
])  # fmt: skip
def test_pieces_make_one_batch_with_the_records_of_all(pieces: list[Decoded]) -> None:
    assert from_arrow(ArrowBuilder(T7).build(pieces)) == all_messages(*pieces)


def test_one_builder_makes_batches_of_any_length_in_any_order() -> None:
    builder = ArrowBuilder(T7)
    for count in (3, 1, 3, 4, 20, 5, 41):
        piece = plain(0, count)
        assert from_arrow(builder.build([piece])) == messages(T7, ID, piece)


def test_what_is_the_same_in_every_row_is_made_seldom() -> None:
    """Twice as much as before each time that it does not suffice: batches that grow by a row make it few times."""
    builder = ArrowBuilder(T7)
    buffers = set()
    for count in range(1, 65):
        [_, numbers] = builder.build([plain(0, count)]).column("partition").buffers()
        assert numbers is not None
        buffers.add(numbers.address)
    assert len(buffers) == 7
    assert builder._rows == 64


def test_an_interrupt_while_the_columns_are_made_leaves_no_batch_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> pa.Array:
        raise KeyboardInterrupt

    builder = ArrowBuilder(T7)
    with monkeypatch.context() as patched:
        patched.setattr(pa, "nulls", interrupted)
        with pytest.raises(KeyboardInterrupt):
            builder.build([plain(0, 3)])
    assert from_arrow(builder.build([plain(0, 3)])) == messages(T7, ID, plain(0, 3))
