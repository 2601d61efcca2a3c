"""A table's rows to record columns: checked, typed, sorted by partition and cut to size. Pure, Arrow to Arrow.

Columns by name: `value` (binary or string), and if wanted `key` (the same), `headers` (list<struct<key: string, value:
binary>>), `timestamp` (a timestamp, or int64 microseconds) and `partition` (integer). A null value, key
or headers is stored as none. A null timestamp becomes the time of sending. A null partition is chosen by the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafkalog.client.config import Partitioner
from kafkalog.client.producer.partitioner import NO_KEY, chosen_partition, partitions_for_keys
from kafkalog.config import nearest_hint
from kafkalog.errors import InvalidArgument, RecordTooLarge, UnknownPartition
from kafkalog.format.batch import HEADER_SIZE
from kafkalog.format.columns import (
    BINARY,
    HAS_KEY,
    HEADERS,
    SCHEMAS,
    TIMESTAMP,
    Columns,
    columns_from_arrays,
    encode_columns,
    integer_array,
    nulls_of,
    numpy_of,
)

COLUMNS = ("value", "key", "headers", "timestamp", "partition")
BATCH_OVERHEAD = 1024
"""Bytes of a batch beside its columns' own, at most: header, metadata, padding, 8 for each compressed buffer."""


class Chunk(NamedTuple):
    """Rows for one batch."""

    partition: int
    columns: Columns
    size: int


def record_batches(table: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
    """A table's rows in as few batches as the types allow. Raises InvalidArgument if it is no table."""
    if isinstance(table, pa.RecordBatch):
        return [table] if table.num_rows else []
    if isinstance(table, pa.Table):
        whole = table.combine_chunks() if table.num_columns and table.column(0).num_chunks > 1 else table
        return [batch for batch in whole.to_batches() if batch.num_rows]
    raise InvalidArgument(reason=f"send_arrow takes a pyarrow Table or RecordBatch, not {type(table).__name__}")


def chunks(
    batch: pa.RecordBatch,
    *,
    topic: str,
    partitions: int,
    partition: int | None,
    partitioner: Partitioner | None,
    next_turn: Callable[[], int],
    now_us: int,
    rows_max: int,
    bytes_max: int,
    message_bytes_max: int,
) -> list[Chunk]:
    """The rows of a batch, cut into those of a record batch each, in order for each partition.

    A row that may go to any partition gets one before the rows are sorted, so that it keeps its place among the rows
    that name the same partition.

    Args:
        partition: for all rows; None: by the column `partition`, then by the partitioner, else by the key.
        next_turn: returns a partition for about one record batch of the rows that may go to any.
        now_us: for rows without a timestamp.
        rows_max, bytes_max: of a chunk; a single row may be larger, up to `message_bytes_max`.

    Raises:
        InvalidArgument: an unknown column, or one of a type that it cannot have.
        UnknownPartition: in the column `partition`.
        RecordTooLarge: a row that fits in no batch. Nothing of the table is sent then.
    """
    _check_names(batch.schema.names)
    found = {name: _typed(name, batch.column(name)) for name in batch.schema.names}
    if "timestamp" in found and found["timestamp"].null_count:
        now = integer_array(TIMESTAMP, np.array([now_us], np.int64))[0]
        found["timestamp"] = pc.fill_null(found["timestamp"], now)
    result: list[Chunk] = []
    limit = message_bytes_max - BATCH_OVERHEAD
    bytes_max = min(bytes_max, limit)
    numbers: npt.NDArray[np.int32] | int | None
    if partition is not None:
        found.pop("partition", None)
        numbers = partition
    else:
        numbers = _numbers(found, topic, partitions, partitioner)
        if numbers is not None:
            _take_turns(numbers, next_turn, _rows_a_chunk(found, batch.num_rows, rows_max, bytes_max))
    if numbers is None or isinstance(numbers, int):
        runs: Iterable[_Run] = [_Run(numbers, found)]
    elif (numbers == numbers[0]).all():
        runs = [_Run(int(numbers[0]), found)]
    else:
        runs = _sorted_runs(found, numbers, rows_max, bytes_max, now_us, result)
    for number, rows in runs:
        value = rows["value"]
        step = _rows_a_chunk(rows, len(value), rows_max, bytes_max)
        for start in range(0, len(value), step):
            piece = {name: column.slice(start, step) for name, column in rows.items()}
            for fitting in _fitting(piece, limit, topic, message_bytes_max):
                columns = columns_from_arrays(
                    fitting["value"], fitting.get("timestamp", now_us), fitting.get("key"), fitting.get("headers")
                )
                result.append(Chunk(next_turn() if number is None else number, columns, columns.batch.nbytes))
    return result


def _check_names(names: list[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            hint = nearest_hint(name, COLUMNS)
            raise InvalidArgument(
                reason=f"a table to send may not have a column '{name}'{hint}; its columns are {', '.join(COLUMNS)}"
            )
    if "value" not in names:
        raise InvalidArgument(reason=f"a table to send needs a column 'value'; it has {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise InvalidArgument(reason=f"a table to send has a column twice: {', '.join(names)}")


def _typed(name: str, column: pa.Array) -> pa.Array:
    """The column in the exact type of the log, without a copy if the bytes are the same."""
    kind = column.type
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
        kind = column.type
    if name in ("value", "key"):
        if kind == BINARY:
            return column
        if (
            pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_binary(kind)
            or pa.types.is_large_string(kind) or pa.types.is_fixed_size_binary(kind)
            or kind in (pa.binary_view(), pa.string_view())
        ):  # fmt: skip
            return column.cast(BINARY)
        wanted = "binary or string"
    elif name == "headers":
        wanted = "list<struct<key: string, value: binary>>"
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_null(kind):
            try:
                headers = column if kind == HEADERS else column.cast(HEADERS)
            except pa.ArrowException:
                raise _wrong_type(name, kind, wanted) from None
            assert isinstance(headers, pa.ListArray)
            pairs = headers.flatten()
            assert isinstance(pairs, pa.StructArray)
            if pairs.null_count or pairs.field("key").null_count:
                raise InvalidArgument(reason="column 'headers' of a table to send has a header without a key")
            return headers
    elif name == "timestamp":
        wanted = "a timestamp, or int64 microseconds"
        if pa.types.is_timestamp(kind):
            return column if kind == TIMESTAMP else column.cast(TIMESTAMP, safe=False)
        if pa.types.is_int64(kind):
            return column.view(TIMESTAMP)
    else:
        wanted = "an integer"
        if pa.types.is_integer(kind):
            return column
    if pa.types.is_null(kind):
        return pa.nulls(len(column), {"timestamp": TIMESTAMP, "partition": pa.int32()}.get(name, BINARY))
    raise _wrong_type(name, kind, wanted)


def _wrong_type(name: str, kind: pa.DataType, wanted: str) -> InvalidArgument:
    return InvalidArgument(reason=f"column '{name}' of a table to send is of type {kind}; it must be {wanted}")


class _Run(NamedTuple):
    """Columns of rows of one partition, in order; None: they may go to any."""

    partition: int | None
    columns: dict[str, pa.Array]


def _sorted_runs(
    found: dict[str, pa.Array],
    numbers: npt.NDArray[np.int32],
    rows_max: int,
    bytes_max: int,
    now_us: int,
    result: list[Chunk],
) -> Iterator[_Run]:
    """The rows of each partition that make more than one chunk, or need a look at their values. Those of the others,
    nearly all if there are many partitions, are added to `result`, each by one slice: a chunk that is looked at costs
    as much as 100 rows."""
    if int(numbers.max()) < 1 << 16:
        numbers = numbers.astype(np.uint16)  # sorted in a twentieth of the time
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    rows = pa.RecordBatch.from_arrays(list(found.values()), names=list(found)).take(integer_array(pa.int64(), order))
    first_rows = np.concatenate(([0], np.flatnonzero(np.diff(in_order)) + 1))
    bounds = np.append(first_rows, len(in_order))
    alike = _alike(rows)
    attributes = HAS_KEY if "key" in found else 0
    sizes = np.diff(bounds) if alike is None else _sizes(alike, bounds)
    for number, start, end, size in zip(
        in_order[first_rows].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), sizes.tolist(), strict=True
    ):
        if alike is not None and end - start <= rows_max and size <= bytes_max:
            columns = Columns(alike.slice(start, end - start), attributes, now_us, now_us)
            result.append(Chunk(number, columns, size))
        else:
            yield _Run(number, {name: rows.column(name).slice(start, end - start) for name in found})


def _alike(rows: pa.RecordBatch) -> pa.RecordBatch | None:
    """The rows, if a batch can have any slice of them as it is: values, and keys without nulls. Else None."""
    names = [name for name in ("key", "value") if name in rows.schema.names]
    if len(names) < rows.num_columns or ("key" in names and rows.column("key").null_count):
        return None
    return pa.RecordBatch.from_arrays(
        [rows.column(name) for name in names], schema=SCHEMAS[HAS_KEY if "key" in names else 0]
    )


def _sizes(rows: pa.RecordBatch, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of each run of rows: of data, offsets, and a bit a row that says which values are null."""
    counts = np.diff(bounds)
    sizes = np.zeros(len(counts), np.int64)
    for column in rows.columns:
        _, offsets, _ = column.buffers()
        assert offsets is not None and column.offset == 0
        at = np.frombuffer(memoryview(offsets), np.int32)[bounds].astype(np.int64)
        sizes += np.diff(at) + 4 * (counts + 1) + (counts // 8 + 1 if column.null_count else 0)
    return sizes


def _numbers(
    found: dict[str, pa.Array], topic: str, partitions: int, partitioner: Partitioner | None
) -> npt.NDArray[np.int32] | None:
    """The partition of every row, NO_KEY for one that may go to any; None if all may. Removes the column
    `partition`."""
    chosen, key, count = found.pop("partition", None), found.get("key"), len(found["value"])
    derived: npt.NDArray[np.int32] | None = None
    if partitioner is not None:
        derived = _partitioned(key, count, partitions, partitioner)
    elif key is not None and key.null_count < count:
        derived = partitions_for_keys(key, partitions)
    if chosen is None or chosen.null_count == count:
        return derived
    limits = pc.min_max(chosen)
    for number in (limits["min"].as_py(), limits["max"].as_py()):
        if not 0 <= number < partitions:
            raise UnknownPartition(topic=topic, partition=number, partitions=partitions)
    numbers = numpy_of(chosen.cast(pa.int32()))  # it may be of any type of integers
    if not chosen.null_count:
        return numbers
    return np.where(nulls_of(chosen), np.int32(NO_KEY) if derived is None else derived, numbers)


def _take_turns(numbers: npt.NDArray[np.int32], next_turn: Callable[[], int], rows_a_turn: int) -> None:
    """Set, in place, a partition for the rows that may go to any: the same for as many rows as a batch takes."""
    anywhere = np.flatnonzero(numbers == NO_KEY)
    for start in range(0, len(anywhere), rows_a_turn):
        numbers[anywhere[start : start + rows_a_turn]] = next_turn()


def _partitioned(key: pa.Array | None, count: int, partitions: int, partitioner: Partitioner) -> npt.NDArray[np.int32]:
    """The partition of each key by the user's function; only this works row by row."""
    keys = [None] * count if key is None else key.to_pylist()
    numbers = [chosen_partition(partitioner, each, partitions) for each in keys]
    return np.array(numbers, np.int32)


def _rows_a_chunk(rows: dict[str, pa.Array], count: int, rows_max: int, bytes_max: int) -> int:
    """How many rows a chunk may have if all are about equally large."""
    size = sum(column.nbytes for column in rows.values())
    pieces = max(-(-size // max(1, bytes_max)), -(-count // rows_max))
    return max(1, -(-count // pieces))


def _fitting(
    piece: dict[str, pa.Array], limit: int, topic: str, message_bytes_max: int
) -> Iterator[dict[str, pa.Array]]:
    """A piece, halved until no part is too large for a message."""
    size = sum(column.nbytes for column in piece.values())
    count = len(piece["value"])
    if size <= limit:
        yield piece
    elif count == 1:
        alone = HEADER_SIZE + len(encode_columns(pa.RecordBatch.from_pydict(piece), 0)) + 8 * len(piece)
        if alone > message_bytes_max:
            raise RecordTooLarge(size=alone, topic=topic, limit=message_bytes_max)
        yield piece
    else:
        for start, length in ((0, count // 2), (count // 2, count - count // 2)):
            half = {name: column.slice(start, length) for name, column in piece.items()}
            yield from _fitting(half, limit, topic, message_bytes_max)
