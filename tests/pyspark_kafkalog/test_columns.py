"""Columns without Spark and broker: fetched batches to Spark's, small ones joined; Spark's batches to records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kafkalog.errors import InvalidArgument
from kafkalog.format.batch import BatchHeader, encode_batch, stamp
from kafkalog.format.columns import Headers, columns_from_lists, decode_columns, encode_columns
from pyspark_kafkalog import columns
from pyspark_kafkalog.columns import JOINED_BYTES, JOINED_ROWS, Rows
from tests.whole_batch import check_batch

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
FULL = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField("headers", HEADERS),
    ]
)
ARROW = to_arrow_schema(FULL, timezone="UTC")

Fetched = tuple[BatchHeader, pa.RecordBatch]


def fetched(
    base_offset: int,
    values: Sequence[bytes | None],
    timestamps_us: Sequence[int] | int = 1,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
) -> Fetched:
    """A batch as a fetch hands it out: encoded, stamped, checked and decoded."""
    records = columns_from_lists(values, timestamps_us, keys, headers)
    batch = bytearray(
        encode_batch(
            encode_columns(records.batch, 0),
            codec=0,
            attributes=records.attributes,
            record_count=len(values),
            min_timestamp_us=records.min_timestamp_us,
            max_timestamp_us=records.max_timestamp_us,
        ).tobytes()
    )
    stamp(batch, base_offset, 0, 0)
    header = check_batch(batch)
    return header, decode_columns(header, memoryview(batch))


def addresses(array: pa.Array) -> list[int]:
    """Of the buffers of an array without nulls."""
    return [buffer.address for buffer in array.buffers() if buffer is not None]


def spark_batches(groups: Sequence[list[Fetched]], start: int = 0, schema: pa.Schema = ARROW) -> list[pa.RecordBatch]:
    batches = list(Rows(schema, "flights", 3).batches(groups, start))
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(schema)
    return batches


def test_rows_have_the_kafka_sources_columns() -> None:
    batch = fetched(7, [b"v", None], [1_000_000, 2_000_000], [None, b"k"], [None, [("h", b"x"), ("h", None)]])
    (rows,) = spark_batches([[batch]])
    assert rows.to_pylist() == [
        {
            "key": None,
            "value": b"v",
            "topic": "flights",
            "partition": 3,
            "offset": 7,
            "timestamp": datetime.fromtimestamp(1, UTC),
            "timestampType": 0,
            "headers": None,
        },
        {
            "key": b"k",
            "value": None,
            "topic": "flights",
            "partition": 3,
            "offset": 8,
            "timestamp": datetime.fromtimestamp(2, UTC),
            "timestampType": 0,
            "headers": [{"key": "h", "value": b"x"}, {"key": "h", "value": None}],
        },
    ]


def test_small_batches_of_different_columns_are_joined_in_order() -> None:
    groups = [
        [fetched(0, [b"a", b"b"]), fetched(2, [b"c"], 5, [b"k"])],
        [fetched(3, [b"d", b"e"], [8, 9], None, [[], [("h", b"x")]])],
        [],
        [fetched(5, [b"f"], 7)],
    ]
    (rows,) = spark_batches(groups)
    assert rows.column("value").to_pylist() == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert rows.column("offset").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [1, 1, 5, 8, 9, 7]
    assert rows.column("key").to_pylist() == [None, None, b"k", None, None, None]
    # A record without headers has NULL, whether it was written without any or with an empty list.
    assert rows.column("headers").to_pylist() == [None, None, None, None, [{"key": "h", "value": b"x"}], None]


def test_joining_stops_at_the_rows_that_pay() -> None:
    groups = [[fetched(base, [b"v"] * 1000)] for base in range(0, 25_000, 1000)]
    batches = spark_batches(groups)
    assert [batch.num_rows for batch in batches] == [JOINED_ROWS, JOINED_ROWS, 5_000]
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(25_000))


def test_joining_stops_at_the_bytes_that_pay() -> None:
    value = bytes(100_000)
    batches = spark_batches([[fetched(base, [value])] for base in range(50)])
    assert sum(batch.num_rows for batch in batches) == 50
    assert all(batch.nbytes <= JOINED_BYTES + 200_000 for batch in batches)
    assert 2 <= len(batches) <= 4


def test_a_large_batch_is_not_copied_and_keeps_its_place_among_small_ones() -> None:
    large = fetched(2, [b"v"] * JOINED_ROWS)
    groups = [[fetched(0, [b"v"]), fetched(1, [b"v"])], [large, fetched(2 + JOINED_ROWS, [b"v"])]]
    batches = spark_batches(groups)
    assert [batch.num_rows for batch in batches] == [2, JOINED_ROWS, 1]
    assert [batch.column("offset")[0].as_py() for batch in batches] == [0, 2, 2 + JOINED_ROWS]
    assert addresses(batches[1].column("value")) == addresses(large[1].column("value"))


def test_joining_restarts_behind_a_large_batch() -> None:
    small, large = JOINED_ROWS // 10, JOINED_ROWS
    bases = [*range(0, 9 * small, small), *range(9 * small + large, 18 * small + large, small)]
    groups = [[fetched(base, [b"v"] * small)] for base in bases]
    groups.insert(9, [fetched(9 * small, [b"v"] * large)])
    assert [batch.num_rows for batch in spark_batches(groups)] == [9 * small, large, 9 * small]


def test_a_batch_trimmed_at_its_head_has_the_offsets_that_are_left() -> None:
    header, records = fetched(10, [b"a", b"b", b"c", b"d"], [1, 2, 3, 4])
    trimmed = records.slice(2, 1)
    (rows,) = spark_batches([[(header, trimmed)], [fetched(14, [b"e"])]], start=12)
    assert rows.column("offset").to_pylist() == [12, 14]
    assert rows.column("value").to_pylist() == [b"c", b"e"]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [3, 1]


@pytest.mark.parametrize("first", [[1 << 40, 5, 1 << 33], [30, 10, 20], 7])
@pytest.mark.parametrize("second", [[1, 1 << 31], [1, (1 << 31) - 1], 2])
def test_batches_are_joined_however_their_timestamps_are_stored(
    first: list[int] | int, second: list[int] | int
) -> None:
    """As timestamps, as their deltas, or as one for all records."""
    header, records = fetched(10, [b"a", b"b", b"c"], first)
    (rows,) = spark_batches([[(header, records.slice(1))], [fetched(13, [b"d", b"e"], second)]], start=11)
    expected = (first[1:] if isinstance(first, list) else [first] * 2) + (
        second if isinstance(second, list) else [second] * 2
    )
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == expected
    assert rows.column("value").to_pylist() == [b"b", b"c", b"d", b"e"]


def test_explicit_offsets_are_taken_as_they_are() -> None:
    header, records = fetched(10, [b"a", b"b"])
    sparse = records.append_column("offset", pa.array([10, 17]))
    header = header._replace(attributes=header.attributes | 8, last_offset_delta=9)
    (rows,) = spark_batches([[(header, sparse)], [fetched(20, [b"c"])]])
    assert rows.column("offset").to_pylist() == [10, 17, 20]


def test_constants_grow_with_a_batch_larger_than_any_before() -> None:
    count = 3 * JOINED_ROWS
    (rows,) = spark_batches([[fetched(0, [b"v"] * count)]])
    assert rows.column("topic").unique().to_pylist() == ["flights"]
    assert len(rows.column("partition")) == count


def test_a_projection_has_its_columns_in_its_order() -> None:
    schema = to_arrow_schema(StructType([FULL["offset"], FULL["value"]]), timezone="UTC")
    (rows,) = spark_batches([[fetched(5, [b"a"])]], schema=schema)
    assert rows.to_pylist() == [{"offset": 5, "value": b"a"}]


def test_no_batches_give_no_rows() -> None:
    assert spark_batches([]) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([], "the schema has no column"),
        ([StructField("body", BinaryType())], "no column 'body'"),
        ([StructField("Value", BinaryType())], "no column 'Value'"),
        ([StructField("value", StringType())], "column 'value' is of type binary, not string"),
        ([StructField("offset", IntegerType())], "column 'offset' is of type bigint, not int"),
        ([StructField("value", BinaryType(), False)], "cannot be NOT NULL"),
        ([StructField("value", BinaryType()), StructField("value", BinaryType())], "names a column twice"),
    ],
)
def test_a_wrong_projection_names_the_column(fields: list[StructField], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        columns.check_projection(StructType(fields))


def test_the_sources_own_schema_is_a_projection() -> None:
    columns.check_projection(FULL)
    named = columns.source_schema(include_headers=True)
    # In Spark's DDL `timestamp` would be what spark.sql.timestampType says.
    types = {field.name: field.dataType.simpleString() for field in FULL.fields} | {"timestamp": "timestamp_ltz"}
    assert named == ", ".join(f"{name} {of_type}" for name, of_type in types.items())
    assert columns.source_schema(include_headers=False) == named.rpartition(", headers")[0]


# --- writing ---------------------------------------------------------------------------------------------------------


def rows_to_write(**of_columns: Any) -> pa.RecordBatch:
    types = {"partition": pa.int32(), "headers": ARROW.field("headers").type}
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, types.get(name, pa.string())) for name, values in of_columns.items()}
    )


def written(batch: pa.RecordBatch, topic_option: str | None = None) -> list[tuple[str, list[dict[str, Any]]]]:
    names = tuple(name for name in batch.schema.names if name != "topic" or topic_option is None)
    return [(topic, part.to_pylist()) for topic, part in columns.batches_by_topic(batch, names, topic_option)]


def test_the_option_topic_beats_the_column() -> None:
    batch = rows_to_write(value=["a", "b"], topic=["x", None])
    assert written(batch, "out") == [("out", [{"value": "a"}, {"value": "b"}])]


@pytest.mark.parametrize("filtered", [30, 1])
def test_rows_go_to_their_topics_in_order(monkeypatch: pytest.MonkeyPatch, filtered: int) -> None:
    monkeypatch.setattr(columns, "_FILTERED_MAX", filtered)
    batch = rows_to_write(value=["1", "2", "3", "4"], topic=["b", "a", "b", "a"], partition=[0, None, 1, 2])
    assert written(batch) == [
        ("b", [{"value": "1", "partition": 0}, {"value": "3", "partition": 1}]),
        ("a", [{"value": "2", "partition": None}, {"value": "4", "partition": 2}]),
    ]


def test_rows_of_more_topics_than_are_filtered_are_the_same_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [number * 7919 % 311 for number in range(2000)]
    batch = rows_to_write(
        value=[f"{place}" for place in range(2000)], topic=[f"t{each}" for each in numbers], partition=numbers
    )
    by_sorting = written(batch)
    monkeypatch.setattr(columns, "_FILTERED_MAX", 1000)
    assert by_sorting == written(batch)
    assert len(by_sorting) == 311


def test_rows_of_many_topics_of_somebody_elses_dictionary_are_all_sent() -> None:
    topics = pa.DictionaryArray.from_arrays(
        pa.array(range(200), pa.uint8()), pa.array([f"t{each}" for each in range(200)])
    )
    values = pa.array([b"%d" % each for each in range(200)], pa.binary())
    batch = pa.RecordBatch.from_arrays([values, topics], names=["value", "topic"])
    found = written(batch)
    assert {topic: [row["value"] for row in rows] for topic, rows in found} == {
        f"t{each}": [b"%d" % each] for each in range(200)
    }


def test_rows_of_one_topic_are_not_copied() -> None:
    batch = rows_to_write(value=["a" * 1000] * 10, topic=["t"] * 10)
    ((_, records),) = columns.batches_by_topic(batch, ("value", "topic"), None)
    assert addresses(records.column("value")) == addresses(batch.column("value"))


def test_batches_whose_rows_go_to_various_partitions_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [rows_to_write(value=[f"{number}"] * 10, key=["k"] * 10) for number in range(7)]
    monkeypatch.setattr(columns, "_GATHERED_BYTES", 3 * rows[0].nbytes)
    gathered = list(columns.gathered(iter(rows), ("value", "key")))
    assert [batch.num_rows for batch in gathered] == [30, 30, 10]
    assert pa.Table.from_batches(gathered).to_pylist() == pa.Table.from_batches(rows).to_pylist()


def test_a_batch_that_would_make_them_too_large_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    small = rows_to_write(value=["a"], key=["k"])
    large = rows_to_write(value=["a" * 1000], key=["k"])
    monkeypatch.setattr(columns, "_GATHERED_BYTES", 3 * small.nbytes)
    found = columns.gathered(iter([small, small, large, small, small, small, small]), ("value", "key"))
    assert [batch.num_rows for batch in found] == [2, 1, 3, 1]


def test_rows_wait_for_others_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [rows_to_write(value=[f"{number}"] * 10, key=["k"] * 10) for number in range(7)]
    at = iter([0.0, *(0.2 * number for number in range(20))])  # it looks twice at the first of some
    monkeypatch.setattr("pyspark_kafkalog.columns.time.monotonic", lambda: next(at))
    gathered = list(columns.gathered(iter(rows), ("value", "key")))
    assert [batch.num_rows for batch in gathered] == [30, 30, 10]
    assert pa.Table.from_batches(gathered).to_pylist() == pa.Table.from_batches(rows).to_pylist()


def test_batches_whose_rows_may_go_anywhere_are_written_as_they_come() -> None:
    rows = [rows_to_write(value=["a"]) for _ in range(3)]
    assert [id(batch) for batch in columns.gathered(iter(rows), ("value",))] == [id(batch) for batch in rows]


def test_batches_without_rows_are_gathered_too() -> None:
    empty = rows_to_write(value=[], key=[])
    assert [batch.num_rows for batch in columns.gathered(iter([empty, empty]), ("value", "key"))] == [0]
    assert list(columns.gathered(iter([]), ("key",))) == []


def test_no_rows_are_no_records() -> None:
    assert written(rows_to_write(value=[], topic=[])) == []


def test_a_row_without_a_topic_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="null in column 'topic'"):
        written(rows_to_write(value=["v", "w"], topic=["t", None]))


def test_the_columns_written_are_found_by_name_and_others_ignored() -> None:
    schema = StructType([StructField("n", IntegerType()), StructField("value", StringType()), FULL["key"]])
    assert columns.sink_columns(schema, "out") == ("value", "key")
    assert columns.sink_columns(FULL, None) == ("key", "value", "topic", "partition", "timestamp", "headers")
    assert "topic" not in columns.sink_columns(FULL, "out")


@pytest.mark.parametrize("kind", [StringType(), LongType(), DateType(), TimestampNTZType()], ids=str)
def test_a_column_timestamp_that_holds_no_timestamps_is_ignored_with_one_warning(
    kind: DataType, caplog: pytest.LogCaptureFixture
) -> None:
    columns._warn_of_times.cache_clear()
    schema = StructType([FULL["value"], StructField("timestamp", kind), FULL["key"]])
    with caplog.at_level(logging.WARNING):
        assert columns.sink_columns(schema, "out") == columns.sink_columns(schema, "out") == ("value", "key")
    [warning] = [record.getMessage() for record in caplog.records]
    assert "column_timestamp_ignored" in warning
    assert f"type={kind.simpleString()}" in warning
    assert "cast the column to timestamp" in warning


@pytest.mark.parametrize(
    ("fields", "topic", "says"),
    [
        ([StructField("key", BinaryType())], "out", "need a column 'value'; they have key"),
        ([StructField("Value", BinaryType())], "out", "need a column 'value'"),
        ([StructField("value", BinaryType())], None, "need the option topic, or a column 'topic'"),
        ([StructField("value", LongType())], "out", "'value' is of type bigint; it must be string or binary"),
        ([FULL["value"], StructField("key", LongType())], "out", "'key' is of type bigint"),
        ([FULL["value"], FULL["key"], FULL["value"]], "out", "have a column 'value' more than once"),
        ([FULL["value"], StructField("topic", BinaryType())], None, "'topic' is of type binary; it must be string"),
        ([FULL["value"], StructField("partition", LongType())], "out", "'partition' is of type bigint; it must be int"),
        ([FULL["value"], StructField("headers", StringType())], "out", "'headers' is of type string"),
        (
            [FULL["value"], FULL["timestamp"], StructField("timestamp", LongType())],
            "out",
            "have a column 'timestamp' more than once",
        ),
    ],
)
def test_wrong_columns_to_write_are_named(fields: list[StructField], topic: str | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        columns.sink_columns(StructType(fields), topic)
