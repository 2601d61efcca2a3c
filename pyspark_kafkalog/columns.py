"""Converts between Spark's columns and the log's: the columns of a read, rows from fetched batches, columns of a batch
to write. Arrow to Arrow, never row by row. Knows no broker; offsets and partitions are passed in.

A read's columns, all nullable, are those of Spark's Kafka source (`SOURCE_COLUMNS`); a user's schema picks some of
them, in any order. Spark requires that a batch's Arrow schema equals its own exactly.

Small batches are joined before they go to Spark, because every batch costs Spark about 0.2 ms whatever its size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafkalog.errors import InvalidArgument
from kafkalog.events import get_logger
from kafkalog.format.batch import BatchHeader
from kafkalog.format.columns import (
    BINARY,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET,
    HEADERS,
    binary_array,
    integer_array,
    numpy_of,
    timestamps,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = get_logger(__name__)

SOURCE_COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp_ltz",
    "timestampType": "int",
}
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
CREATE_TIME = 0
"""timestampType of every record: the time is the producer's."""

_TYPE_NAMES = {"timestamp_ltz": "timestamp"}
"""What Spark calls a type, if not as its DDL does: there `timestamp` is what spark.sql.timestampType says."""
_MAY_BE_NULL = ("key", "value", "headers")

_SPREADING = frozenset({"key", "partition", "topic"})
"""With one of these, rows to write go to various partitions."""
_GATHERED_BYTES = 8 << 20
_GATHERED_SECONDS = 0.5
_FILTERED_MAX = 30
"""Topics of a batch whose rows are picked one topic after the other; those of more are sorted once. 40,000 rows of 200
bytes: 10 topics take 11 ms and 27 sorted, 100 take 41 and 10, 1,000 take 379 and 19."""

JOINED_ROWS = 10_000
JOINED_BYTES = 2 << 20
_LARGE_ROWS = JOINED_ROWS // 4
_LARGE_BYTES = JOINED_BYTES // 4

Fetched = Iterable[list[tuple[BatchHeader, pa.RecordBatch]]]


def source_schema(include_headers: bool, picked: Sequence[str] | None = None) -> str:
    """A read's schema as Spark's DDL: all columns, or those of the option columns. Raises InvalidArgument."""
    known = {**SOURCE_COLUMNS, "headers": HEADERS_TYPE}
    names = list(SOURCE_COLUMNS if picked is None else picked)
    if include_headers and "headers" not in names:
        names.append("headers")
    for name in names:
        if name not in known:
            raise InvalidArgument(reason=f"columns: a read has no column '{name}'; its columns are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise InvalidArgument(reason=f"columns names a column twice: {', '.join(names)}")
    return ", ".join(f"{name} {known[name]}" for name in names)


def check_projection(schema: StructType, picked: Sequence[str] | None = None, include_headers: bool = False) -> None:
    """Check that a schema (the source's, or the user's) has only existing columns.

    Args:
        picked: the option columns; a user's schema must agree with it.

    Raises:
        InvalidArgument: an unknown column, another type, NOT NULL where there may be nulls, or not those picked.
    """
    known = {**SOURCE_COLUMNS, "headers": HEADERS_TYPE}
    if picked is not None:
        wanted = [column.split(" ")[0] for column in source_schema(include_headers, picked).split(", ")]
        if schema.names != wanted:
            raise InvalidArgument(
                reason=f"the schema ({', '.join(schema.names)}) and the option columns ({', '.join(wanted)}) differ; "
                "give one of them"
            )
    if not schema.fields:
        raise InvalidArgument(reason=f"the schema has no column; it may have {', '.join(known)}")
    if len(set(schema.names)) < len(schema.names):
        raise InvalidArgument(reason=f"the schema names a column twice: {', '.join(schema.names)}")
    for field in schema.fields:
        if field.name not in known:
            raise InvalidArgument(reason=f"a read has no column '{field.name}'; its columns are {', '.join(known)}")
        wanted_type = _TYPE_NAMES.get(known[field.name], known[field.name])
        if field.dataType.simpleString() != wanted_type:
            raise InvalidArgument(
                reason=f"column '{field.name}' is of type {known[field.name]}, not {field.dataType.simpleString()} "
                "(cast it after reading)"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise InvalidArgument(reason=f"column '{field.name}' may be null; its schema cannot be NOT NULL")


# --- reading -------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A fetched batch, trimmed to the requested records."""

    header: BatchHeader
    columns: pa.RecordBatch
    first_offset: int


class Rows:
    """Converts a partition's fetched batches to batches for Spark.

    Args:
        schema: Arrow's, as Spark will compare it.
        topic: the records' topic.
        partition: the records' partition.
    """

    def __init__(self, schema: pa.Schema, topic: str, partition: int) -> None:
        self._schema = schema
        self._names = schema.names
        self._constants = {
            "topic": binary_array(pa.string(), [topic.encode()])[0],
            "partition": integer_array(pa.int32(), np.array([partition], np.int32))[0],
            "timestampType": integer_array(pa.int32(), np.array([CREATE_TIME], np.int32))[0],
            "key": pa.nulls(1, BINARY)[0],
            "headers": pa.nulls(1, HEADERS)[0],
        }
        self._repeated: dict[str, pa.Array] = {}

    def batches(self, fetched: Fetched, start_offset: int) -> Iterator[pa.RecordBatch]:
        """Spark's batches of fetched ones, which were trimmed to records from `start_offset` on."""
        small: list[Piece] = []
        rows = size = 0
        for group in fetched:
            for header, columns in group:
                piece = Piece(header, columns, max(header.base_offset, start_offset))
                if columns.num_rows >= _LARGE_ROWS or header.length >= _LARGE_BYTES:
                    if small:
                        yield self._spark_batch(small)
                        small, rows, size = [], 0, 0
                    yield self._spark_batch([piece])
                    continue
                small.append(piece)
                rows += columns.num_rows
                size += header.length
                if rows >= JOINED_ROWS or size >= JOINED_BYTES:
                    yield self._spark_batch(small)
                    small, rows, size = [], 0, 0
        if small:
            yield self._spark_batch(small)

    def _spark_batch(self, pieces: list[Piece]) -> pa.RecordBatch:
        rows = sum(piece.columns.num_rows for piece in pieces)
        arrays = [self._column(name, pieces, rows) for name in self._names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, name: str, pieces: list[Piece], rows: int) -> pa.Array:
        if name == "value":
            return _concatenated([piece.columns.column("value") for piece in pieces])
        if name == "offset":
            return _offsets(pieces, rows)
        if name == "timestamp":
            return timestamps([piece.header for piece in pieces], [piece.columns for piece in pieces])
        if name == "key":
            return self._optional("key", HAS_KEY, pieces, rows)
        if name == "headers":
            return self._headers(pieces, rows)
        return self._constant(name, rows)

    def _constant(self, name: str, rows: int) -> pa.Array:
        repeated = self._repeated.get(name)
        if repeated is None or len(repeated) < rows:
            repeated = self._repeated[name] = pa.repeat(self._constants[name], max(rows, 2 * JOINED_ROWS))
        return repeated.slice(0, rows)

    def _optional(self, name: str, bit: int, pieces: list[Piece], rows: int) -> pa.Array:
        """A column that batches omit if it is null in all rows."""
        if not any(piece.header.attributes & bit for piece in pieces):
            return self._constant(name, rows)
        return _concatenated(
            [
                piece.columns.column(name)
                if piece.header.attributes & bit
                else self._constant(name, piece.columns.num_rows)
                for piece in pieces
            ]
        )

    def _headers(self, pieces: list[Piece], rows: int) -> pa.Array:
        headers = self._optional("headers", HAS_HEADERS, pieces, rows)
        empty = pc.equal(pc.list_value_length(headers), 0)
        if pc.any(empty).as_py():  # a record without headers has NULL, as from the Kafka source
            headers = pc.if_else(empty, pa.nulls(1, HEADERS)[0], headers)
        return headers.cast(self._schema.field("headers").type)  # the list's child has another name: no copy


def _concatenated(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _offsets(pieces: list[Piece], rows: int) -> pa.Array:
    first = pieces[0].first_offset
    last = pieces[-1]
    dense = not any(piece.header.attributes & HAS_OFFSET for piece in pieces)
    if dense and last.first_offset + last.columns.num_rows - first == rows:
        return integer_array(pa.int64(), np.arange(first, first + rows, dtype=np.int64))
    return _concatenated(
        [
            piece.columns.column("offset")
            if piece.header.attributes & HAS_OFFSET
            else _offsets([piece], piece.columns.num_rows)
            for piece in pieces
        ]
    )


# --- writing -------------------------------------------------------------------------------------------------------

_SINK_TYPES = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (HEADERS_TYPE,),
    "timestamp": ("timestamp",),
}


def sink_columns(schema: StructType, topic_option: str | None) -> tuple[str, ...]:
    """The columns of a DataFrame that are written; others are ignored, as by the Kafka sink.

    The Kafka sink has no column `timestamp`, so one of another type is ignored too: a job for the Kafka sink may have
    it.

    Raises:
        InvalidArgument: no `value`, no topic from anywhere, or a column of another type.
    """
    found = {field.name: field.dataType.simpleString() for field in schema.fields if field.name in _SINK_TYPES}
    times = {field.dataType.simpleString() for field in schema.fields if field.name == "timestamp"}
    if times and not times & set(_SINK_TYPES["timestamp"]):
        _warn_of_times(found.pop("timestamp"))
    if "value" not in found:
        raise InvalidArgument(
            reason=f"the rows to write need a column 'value'; they have {', '.join(schema.names) or 'none'}"
        )
    if topic_option is None and "topic" not in found:
        raise InvalidArgument(reason="the rows to write need the option topic, or a column 'topic'")
    if topic_option is not None:
        found.pop("topic", None)
    for name, type_name in found.items():
        if schema.names.count(name) > 1:
            raise InvalidArgument(reason=f"the rows to write have a column '{name}' more than once")
        if type_name not in _SINK_TYPES[name]:
            raise InvalidArgument(
                reason=f"column '{name}' is of type {type_name}; it must be {' or '.join(_SINK_TYPES[name])}"
            )
    return tuple(found)


@cache  # once for each process: Spark makes a writer, and with it asks for this, for each micro-batch
def _warn_of_times(type_name: str) -> None:
    log.warning(
        "column_timestamp_ignored",
        type=type_name,
        effect="records bear the time of writing; cast the column to timestamp for its own times, or drop it",
    )


def gathered(batches: Iterable[pa.RecordBatch], columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Spark's batches, several together if their rows go to various partitions or topics: 10,000 rows over 64
    partitions make batches of 156 rows, and a batch costs as much as 100 rows. Rows keep their order. They wait for
    others until 8 MiB are together, or a batch comes half a second after them."""
    if _SPREADING.isdisjoint(columns):
        yield from batches
        return
    rows: list[pa.RecordBatch] = []
    size, since = 0, time.monotonic()
    for batch in batches:
        if not rows:
            since = time.monotonic()
        elif size + batch.nbytes > 2 * _GATHERED_BYTES:
            yield from _joined(rows)
            rows, size = [], 0
        rows.append(batch)
        size += batch.nbytes
        if size >= _GATHERED_BYTES or time.monotonic() - since >= _GATHERED_SECONDS:
            yield from _joined(rows)
            rows, size = [], 0
    if rows:
        yield from _joined(rows)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) == 1:
        return batches
    return pa.Table.from_batches(batches).combine_chunks().to_batches() or batches[:1]  # none of them may have rows


def batches_by_topic(
    batch: pa.RecordBatch, columns: tuple[str, ...], topic_option: str | None
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(topic, records) of a batch of Spark's, in the order of its rows within a topic; types are left to the client.

    Args:
        batch: as Spark passes it.
        columns: of `sink_columns`.
        topic_option: every row's topic; None: by the column `topic`.

    Raises:
        InvalidArgument: a row without a topic.
    """
    if batch.num_rows == 0:
        return
    records = batch.select([name for name in columns if name != "topic"])
    if topic_option is not None:
        yield topic_option, records
        return
    topics = batch.column("topic")
    if topics.null_count:
        raise InvalidArgument(reason="a row to write has null in column 'topic', and the option topic is not set")
    different = pc.unique(topics)
    if len(different) == 1:
        yield different[0].as_py(), records
    elif len(different) <= _FILTERED_MAX:
        for topic in different:
            yield topic.as_py(), records.filter(pc.equal(topics, topic))
    else:
        yield from _sorted_by_topic(topics, records)


def _sorted_by_topic(topics: pa.Array, records: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    encoded = topics.dictionary_encode()
    places = numpy_of(encoded.indices.cast(pa.int32()))  # of somebody else's dictionary, they may be of any type
    if len(encoded.dictionary) < 1 << 16:
        places = places.astype(np.uint16)  # sorted in a twentieth of the time
    in_order = records.take(integer_array(pa.int64(), np.argsort(places, kind="stable")))
    start = 0
    counts = np.bincount(places, minlength=len(encoded.dictionary)).tolist()
    for topic, count in zip(encoded.dictionary, counts, strict=True):
        if count:  # a dictionary of somebody else's may have more
            yield topic.as_py(), in_order.slice(start, count)
        start += count
