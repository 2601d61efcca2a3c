"""Tables to send: types, partitions, sizes."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.client.producer import tables
from kafkalog.client.producer.partitioner import partition_for_key
from kafkalog.client.producer.tables import Chunk, record_batches
from kafkalog.errors import InvalidArgument, RecordTooLarge, UnknownPartition
from kafkalog.format.columns import HAS_HEADERS, HAS_KEY, HAS_TIMESTAMP, HEADERS

NOW_US = 1_700_000_000_000_000


def chunks(table: pa.Table, partitions: int = 4, first_turn: int = 0, **changes: Any) -> list[Chunk]:
    turns = count(first_turn)
    given = {
        "topic": "t", "partitions": partitions, "partition": None, "partitioner": None, "now_us": NOW_US,
        "next_turn": lambda: next(turns) % partitions,
        "rows_max": 1000, "bytes_max": 1 << 20, "message_bytes_max": 1 << 23,
    }  # fmt: skip
    return [chunk for batch in record_batches(table) for chunk in tables.chunks(batch, **{**given, **changes})]


def values_of(chunk: Chunk) -> list[bytes | None]:
    return chunk.columns.batch.column("value").to_pylist()


def test_a_table_of_values_goes_to_the_partition_whose_turn_it_is() -> None:
    [chunk] = chunks(pa.table({"value": [b"a", None]}), first_turn=6)
    assert chunk.partition == 2
    assert values_of(chunk) == [b"a", None]
    assert (chunk.columns.attributes, chunk.columns.min_timestamp_us) == (0, NOW_US)


def test_rows_for_any_partition_take_a_turn_for_each_batch() -> None:
    found = chunks(pa.table({"value": [b"%d" % number for number in range(10)]}), rows_max=3, first_turn=1)
    assert [(chunk.partition, len(values_of(chunk))) for chunk in found] == [(1, 3), (2, 3), (3, 3), (0, 1)]


@given(
    st.lists(st.tuples(st.integers(0, 5) | st.none(), st.sampled_from([b"x", b"yy", None]), st.booleans())),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_rows_keep_their_order_in_each_partition_whatever_they_name(
    rows: list[tuple[int | None, bytes | None, bool]], first_turn: int, rows_max: int
) -> None:
    table = pa.table(
        {
            "partition": pa.array([row[0] for row in rows], pa.int32()),
            "key": pa.array([row[1] for row in rows], pa.binary()),
            "headers": pa.array([[("h", b"")] if row[2] else None for row in rows], HEADERS),
            "value": pa.array([b"%d" % number for number in range(len(rows))], pa.binary()),
        }
    )
    placed: dict[int, int] = {}
    in_order: dict[int, list[int]] = {}
    for chunk in chunks(table, partitions=6, first_turn=first_turn, rows_max=rows_max):
        assert 1 <= chunk.columns.batch.num_rows <= rows_max
        numbers = [int(value or b"") for value in values_of(chunk)]
        in_order.setdefault(chunk.partition, []).extend(numbers)
        placed |= dict.fromkeys(numbers, chunk.partition)
    assert all(numbers == sorted(numbers) for numbers in in_order.values())
    assert sum(map(len, in_order.values())) == len(placed) == len(rows)
    named = [partition_for_key(key, 6) if number is None and key else number for number, key, _ in rows]
    assert all(placed[row] == number for row, number in enumerate(named) if number is not None)
    anywhere = [placed[row] for row, number in enumerate(named) if number is None]
    turns = [(first_turn + row // rows_a_turn(len(rows), rows_max)) % 6 for row in range(len(anywhere))]
    assert anywhere == turns


def rows_a_turn(rows: int, rows_max: int) -> int:
    """Batches of a table are alike in size."""
    return -(-rows // -(-rows // rows_max))


def test_rows_of_a_single_partition_keep_their_order_with_and_without_keys() -> None:
    keys = pa.array([None, b"a", None, b"b", None, None, b"a"], pa.binary())
    found = chunks(pa.table({"value": [b"%d" % number for number in range(7)], "key": keys}), partitions=1, rows_max=3)
    assert {chunk.partition for chunk in found} == {0}
    assert [value for chunk in found for value in values_of(chunk)] == [b"%d" % number for number in range(7)]


@pytest.mark.parametrize("nulls", ["none", "values", "keys"])
@pytest.mark.parametrize("rows_max", [3, 1000])
def test_rows_of_many_partitions_are_parted_as_they_are(nulls: str, rows_max: int) -> None:
    keys = [None if nulls == "keys" and number % 5 == 0 else b"%d" % (number % 40) for number in range(200)]
    values = [None if nulls == "values" and number % 3 == 0 else b"%d" % number for number in range(200)]
    found = chunks(pa.table({"key": keys, "value": values}), partitions=8, rows_max=rows_max)
    assert all(chunk.columns.batch.num_rows <= rows_max for chunk in found)
    assert all(abs(chunk.size - chunk.columns.batch.nbytes) <= 8 for chunk in found), "the size is that of its columns"
    parted: dict[int, list[tuple[Any, Any]]] = {}
    for chunk in found:
        batch = chunk.columns.batch
        assert chunk.columns.attributes == HAS_KEY or (nulls == "keys" and chunk.columns.attributes == 0)
        key = batch.column("key").to_pylist() if chunk.columns.attributes else [None] * batch.num_rows
        parted.setdefault(chunk.partition, []).extend(zip(key, values_of(chunk), strict=True))
    for partition, rows in parted.items():
        with_key = [row for row in rows if row[0] is not None]
        assert with_key == [
            row
            for row in zip(keys, values, strict=True)
            if row[0] is not None and partition_for_key(row[0], 8) == partition
        ]
    assert sum(map(len, parted.values())) == 200


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.uint32(), pa.int64(), pa.uint64()])
def test_partitions_may_be_of_any_type_of_integers(kind: pa.DataType) -> None:
    greatest = {pa.int8(): 127, pa.uint8(): 255}.get(kind, 32_767 if kind == pa.int16() else 65_535)
    numbers = pa.array([greatest, None, 1], kind)
    found = chunks(pa.table({"value": [b"a", b"b", b"c"], "partition": numbers}), greatest + 1, first_turn=2)
    assert {chunk.partition: values_of(chunk) for chunk in found} == {1: [b"c"], 2: [b"b"], greatest: [b"a"]}


@pytest.mark.parametrize("partitions", [65_536, 65_537])
def test_a_table_may_go_to_the_last_of_very_many_partitions(partitions: int) -> None:
    numbers = pa.array([partitions - 1, 1, partitions - 1], pa.int32())
    found = chunks(pa.table({"value": [b"a", b"b", b"c"], "partition": numbers}), partitions)
    assert {chunk.partition: values_of(chunk) for chunk in found} == {1: [b"b"], partitions - 1: [b"a", b"c"]}


@pytest.mark.parametrize("goes", ["to one", "by key", "to any"])
@pytest.mark.parametrize("limits", [(10_000, 1 << 23), (1 << 23, 11_024)])
def test_chunks_are_of_so_many_bytes(goes: str, limits: tuple[int, int]) -> None:
    columns: dict[str, Any] = {"value": [b"%d" % (number % 10) * 1000 for number in range(1000)]}
    if goes == "by key":
        columns["key"] = [b"%d" % (number % 2) for number in range(1000)]
    bytes_max, message_bytes_max = limits
    found = chunks(
        pa.table(columns),
        partition=2 if goes == "to one" else None,
        bytes_max=bytes_max,
        message_bytes_max=message_bytes_max,
    )
    assert sum(chunk.columns.batch.num_rows for chunk in found) == 1000
    assert all(5_000 < chunk.size < 11_000 for chunk in found)
    if goes == "to any":
        assert [chunk.partition for chunk in found[:5]] == [0, 1, 2, 3, 0]


def test_a_header_that_is_null_is_refused() -> None:
    headers = pa.array([[None]], HEADERS)
    with pytest.raises(InvalidArgument, match="has a header without a key"):
        chunks(pa.table({"value": [b"a"], "headers": headers}))


def test_nanoseconds_are_cut_to_microseconds() -> None:
    [chunk] = chunks(pa.table({"value": [b"a"], "timestamp": pa.array([1_500], pa.timestamp("ns"))}))
    assert chunk.columns.min_timestamp_us == 1


def test_a_partitioner_is_asked_for_each_key() -> None:
    table = pa.table({"key": pa.array([b"a", None, b"c"], pa.binary()), "value": [b"1", b"2", b"3"]})
    found = chunks(table, partitioner=lambda key, partitions: 0 if key is None else partitions - 1)
    assert {chunk.partition: values_of(chunk) for chunk in found} == {0: [b"2"], 3: [b"1", b"3"]}
    with pytest.raises(InvalidArgument, match="partitioner returned 4, not a number from 0 to 3"):
        chunks(table, partitioner=lambda key, partitions: partitions)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"ab", None]),
        pa.array(["ab", None]),
        pa.array([b"ab", None], pa.large_binary()),
        pa.array(["ab", None], pa.large_string()),
        pa.array([b"ab", None], pa.binary(2)),
        pa.array([b"ab", None], pa.binary_view()),
        pa.array(["ab", None], pa.string_view()),
        pa.array(["ab", None]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_bytes_and_strings_of_every_kind(column: pa.Array) -> None:
    [chunk] = chunks(pa.table({"value": column, "key": column}), partition=0)
    assert values_of(chunk) == [b"ab", None]
    assert chunk.columns.batch.column("key").to_pylist() == [b"ab", None]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1_000_000, None], pa.int64()),
        pa.array([1_000, None], pa.timestamp("ms")),
        pa.array([1_000_000_000, None], pa.timestamp("ns", tz="UTC")),
        pa.array([datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), None], pa.timestamp("us", tz="Europe/Zurich")),
    ],
    ids=lambda column: str(column.type),
)
def test_timestamps_of_every_kind(column: pa.Array) -> None:
    [chunk] = chunks(pa.table({"value": [b"a", b"b"], "timestamp": column}))
    assert chunk.columns.attributes == HAS_TIMESTAMP
    assert chunk.columns.batch.column("timestamp").view(pa.int64()).to_pylist() == [1_000_000, NOW_US]


def test_headers() -> None:
    column = pa.array([[{"key": "a", "value": b"b"}], None, []])
    [chunk] = chunks(pa.table({"value": [b"1", b"2", b"3"], "headers": column}))
    assert chunk.columns.attributes == HAS_HEADERS
    assert chunk.columns.batch.column("headers").to_pylist() == [[{"key": "a", "value": b"b"}], None, []]


def test_columns_of_nulls_are_left_out() -> None:
    nulls = pa.nulls(2)
    [chunk] = chunks(pa.table({"value": nulls, "key": nulls, "headers": nulls, "timestamp": nulls, "partition": nulls}))
    assert chunk.columns.attributes & (HAS_KEY | HAS_HEADERS) == 0
    assert values_of(chunk) == [None, None]


@pytest.mark.parametrize(
    "table, sentence",
    [
        ({"valeu": [b"a"]}, "a table to send may not have a column 'valeu'; did you mean 'value'?"),
        ({"key": [b"a"]}, "a table to send needs a column 'value'; it has key"),
        ({"value": [1]}, "column 'value' of a table to send is of type int64; it must be binary or string"),
        (
            {"value": [b"a"], "headers": [b"x"]},
            "column 'headers' of a table to send is of type binary; it must be list",
        ),
        ({"value": [b"a"], "timestamp": ["now"]}, "column 'timestamp' of a table to send is of type string"),
        ({"value": [b"a"], "partition": [1.5]}, "column 'partition' of a table to send is of type double"),
        ({"value": [b"a"], "headers": [[{"key": None, "value": b""}]]}, "has a header without a key"),
    ],
)
def test_wrong_columns_are_reported_in_one_sentence(table: dict[str, list[Any]], sentence: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        chunks(pa.table(table))
    assert sentence in str(raised.value)


def test_a_list_is_refused_as_a_table() -> None:
    with pytest.raises(InvalidArgument, match="a pyarrow Table or RecordBatch, not list"):
        record_batches([b"a"])  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 4])
def test_a_partition_that_is_not_there(number: int) -> None:
    with pytest.raises(UnknownPartition, match=f"topic 't' has no partition {number}; it has 4"):
        chunks(pa.table({"value": [b"a", b"b"], "partition": [0, number]}))


def test_chunks_stay_below_the_largest_message() -> None:
    values = [b"x" * size for size in (10, 10, 5000, 10, 3000, 10, 10, 2000)] * 3
    found = chunks(pa.table({"value": values}), message_bytes_max=8192, bytes_max=1 << 20)
    assert [value for chunk in found for value in values_of(chunk)] == values
    assert max(chunk.size for chunk in found) + tables.BATCH_OVERHEAD <= 8192


def test_a_row_that_fits_in_no_message() -> None:
    with pytest.raises(RecordTooLarge, match=r"for topic 't' is larger than its max\.message\.bytes of 8192"):
        chunks(pa.table({"value": [b"", b"x" * 8000]}), message_bytes_max=8192)


def test_many_small_chunks_of_a_table_are_joined() -> None:
    table = pa.concat_tables([pa.table({"value": [b"%d" % number]}) for number in range(100)])
    [chunk] = chunks(table)
    assert values_of(chunk) == [b"%d" % number for number in range(100)]
