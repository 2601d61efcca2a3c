from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODECS, HEADER_SIZE, BatchHeader, encode_batch
from kafkalog.format.columns import (
    _FEW,
    DELTA,
    DELTA_MAX,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET,
    HAS_TIMES,
    HAS_TIMESTAMP,
    HAS_TIMESTAMP_DELTA,
    HEADERS,
    SCHEMAS,
    TIMESTAMP,
    Columns,
    checked_columns,
    columns_from_arrays,
    columns_from_lists,
    copied,
    decode_columns,
    encode_columns,
    joined,
    nulls_of,
    numpy_of,
    timestamp_list,
    timestamps,
)
from tests.golden.make import BATCHES, GOLDEN
from tests.whole_batch import check_batch


def batch_of(columns: Columns, codec: str = "none", **changed: int) -> tuple[BatchHeader, memoryview]:
    fields: dict[str, Any] = {"attributes": columns.attributes, "record_count": columns.batch.num_rows} | changed
    encoded = encode_batch(
        encode_columns(columns.batch, CODECS[codec]),
        codec=CODECS[codec],
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        **fields,
    ).tobytes()
    return check_batch(encoded), memoryview(encoded)


def rows(header: BatchHeader, columns: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """(timestamp, key, value, headers) of each record, absent columns filled as their attribute bit says."""
    count = columns.num_rows
    names = columns.schema.names
    array = timestamps([header], [columns])
    assert array.type == TIMESTAMP
    times = array.view(pa.int64()).to_pylist()
    if header.attributes & HAS_TIMES:
        assert list(timestamp_list(header, columns)) == times
    keys = columns["key"].to_pylist() if "key" in names else [None] * count
    headers = columns["headers"].to_pylist() if "headers" in names else [None] * count
    pairs = [[(pair["key"], pair["value"]) for pair in found] if found else None for found in headers]
    return list(zip(times, keys, columns["value"].to_pylist(), pairs, strict=True))


@pytest.mark.parametrize("name", list(BATCHES))
def test_golden_batch_version_1_has_its_records(name: str) -> None:
    what = BATCHES[name]
    data = (GOLDEN / f"batch-1-{name}.bin").read_bytes()
    header = check_batch(data)
    count = len(what["values"])
    times = what["timestamps_us"] if isinstance(what["timestamps_us"], list) else [what["timestamps_us"]] * count
    expected = zip(
        times, what.get("keys", [None] * count), what["values"],
        [pairs or None for pairs in what.get("headers", [None] * count)], strict=True,
    )  # fmt: skip
    assert rows(header, decode_columns(header, memoryview(data))) == list(expected)
    assert (header.min_timestamp_us, header.max_timestamp_us) == (min(times), max(times))


BYTES = st.none() | st.binary(max_size=40)
TIME = st.integers(-(1 << 62), 1 << 62) | st.integers(1_700_000_000_000_000, 1_700_000_000_000_000 + DELTA_MAX)
RECORDS = st.lists(
    st.tuples(
        TIME,
        BYTES,
        BYTES,
        st.none() | st.lists(st.tuples(st.text(max_size=5), BYTES), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=30,
)


@settings(derandomize=True, max_examples=150)
@given(records=RECORDS, codec=st.sampled_from(list(CODECS)), same_time=st.booleans())
def test_records_come_back_as_they_were(records: list[Any], codec: str, same_time: bool) -> None:
    if same_time:
        records = [(records[0][0], *rest) for _, *rest in records]
    times, keys, values, headers = (list(column) for column in zip(*records, strict=True))
    with_keys, with_headers = any(key is not None for key in keys), any(headers)
    columns = columns_from_lists(values, times, keys if with_keys else None, headers if with_headers else None)
    assert columns.attributes & HAS_TIMES == expected_times(times)
    header, batch = batch_of(columns, codec)
    assert rows(header, checked_columns(header, batch)) == records
    arrays = columns_from_arrays(
        pa.array(values, pa.binary()),
        pa.array(times, pa.int64()).view(TIMESTAMP),
        pa.array(keys, pa.binary()),
        pa.array(headers, HEADERS),
    )
    assert arrays.attributes == columns.attributes
    assert columns.batch.equals(arrays.batch)
    columns.batch.validate(full=True)
    header, batch = batch_of(arrays, codec)
    assert rows(header, checked_columns(header, batch)) == records


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1)), st.integers(0, 20), st.integers(0, 20))
def test_an_array_as_numpy_is_what_arrow_makes_of_it(numbers: list[int | None], first: int, count: int) -> None:
    expected = numbers[first : first + count]
    for kind in (pa.int32(), pa.int64(), TIMESTAMP):
        array = pa.array(numbers, pa.int64()).cast(kind).slice(first, count)
        nulls = nulls_of(array)
        assert nulls.tolist() == [number is None for number in expected]
        found = zip(numpy_of(array).tolist(), nulls, strict=True)
        assert [None if null else number for number, null in found] == expected


def expected_times(times: Sequence[int]) -> int:
    """The attribute bit of a batch with these timestamps."""
    span = max(times) - min(times)
    return 0 if span == 0 else HAS_TIMESTAMP_DELTA if span < 1 << 31 else HAS_TIMESTAMP


@settings(derandomize=True, max_examples=100)
@given(
    pieces=st.lists(
        st.lists(st.tuples(st.integers(0, 3) | st.just(1 << 32), BYTES, BYTES), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_columns_of_several_pieces_are_those_of_all_their_records(pieces: list[list[Any]]) -> None:
    columns = []
    for records in pieces:
        times, keys, values = (list(column) for column in zip(*records, strict=True))
        columns.append(columns_from_lists(values, times, keys))
    whole = joined(columns)
    header, batch = batch_of(whole, "none")
    expected = [(time, key, value, None) for records in pieces for time, key, value in records]
    assert rows(header, checked_columns(header, batch)) == expected
    times = [time for time, *_ in expected]
    assert (whole.min_timestamp_us, whole.max_timestamp_us) == (min(times), max(times))
    assert whole.attributes & HAS_TIMES == expected_times(times)


def test_columns_that_say_nothing_are_left_out() -> None:
    value = pa.array([b"a", b"b"], pa.binary())
    nothing = pa.nulls(2, pa.binary())
    columns = columns_from_arrays(value, pa.array([7, 7], pa.int64()).view(TIMESTAMP), nothing, pa.nulls(2, HEADERS))
    assert columns.attributes == 0
    assert columns.batch.schema.names == ["value"]
    assert (columns.min_timestamp_us, columns.max_timestamp_us) == (7, 7)
    assert columns_from_arrays(value, 9).min_timestamp_us == 9
    full = columns_from_lists([b"v"] * 2, [1, 2], [b"k", None], [[("h", None)], None])
    assert full.attributes == HAS_TIMESTAMP_DELTA | HAS_KEY | HAS_HEADERS
    assert full.batch.schema == SCHEMAS[full.attributes]


def test_a_codec_compresses_and_none_does_not() -> None:
    columns = columns_from_lists([b"a" * 100_000], 5)
    plain, *compressed = (len(encode_columns(columns.batch, CODECS[name])) for name in ("none", "lz4", "zstd"))
    assert plain > 100_000 and all(length < 10_000 for length in compressed)


def test_decoding_copies_nothing() -> None:
    header, batch = batch_of(columns_from_lists([b"value" * 100], 5))
    column = decode_columns(header, batch).column("value")
    start = pa.py_buffer(batch).address
    [*_, data] = column.buffers()
    assert data is not None and start <= data.address < start + len(batch)


@pytest.mark.parametrize("codec", list(CODECS))
def test_batch_that_says_too_much_or_too_little_is_refused(codec: str) -> None:
    columns = columns_from_lists([b"a", b"b", b"c"], [1, 2, 3])
    with pytest.raises(CorruptBatch, match="it has 3 records, but its header says 2"):
        decode_columns(*batch_of(columns, codec, record_count=2))
    for attributes in (HAS_TIMESTAMP | HAS_TIMESTAMP_DELTA, 32 | HAS_TIMESTAMP_DELTA):
        with pytest.raises(CorruptBatch, match=f"its attributes {attributes} or schema 0 are unknown"):
            decode_columns(*batch_of(columns, codec, attributes=attributes))
    with pytest.raises(CorruptBatch, match="its body is not an Arrow batch"):
        decode_columns(*batch_of(columns, codec, attributes=HAS_TIMESTAMP_DELTA | HAS_KEY | HAS_HEADERS))
    header, batch = batch_of(columns, codec)
    with pytest.raises(CorruptBatch, match="schema 4"):
        decode_columns(header._replace(schema_id=4), batch)


def test_damaged_body_under_right_checksums_never_crashes() -> None:
    """Every byte set to extremes: an error, or columns that can be read to the end."""
    columns = columns_from_lists([b"abc", None, b"d" * 50], [1, 2, 3], [b"k", None, b"l"], [[("h", b"x")], None, None])
    body = bytes(encode_columns(columns.batch, 0))
    refused = 0
    for at in range(len(body)):
        for byte in (0, 0xFF, body[at] ^ 0x80):
            broken = body[:at] + bytes([byte]) + body[at + 1 :]
            encoded = encode_batch(
                memoryview(broken), codec=0, attributes=columns.attributes, record_count=3, min_timestamp_us=1,
                max_timestamp_us=3,
            ).tobytes()  # fmt: skip
            header = check_batch(encoded)
            try:
                rows(header, decode_columns(header, memoryview(encoded)))
                accepted = fault_of(header, memoryview(encoded))
                assert accepted == by_arrow(header, memoryview(encoded)), (at, byte)
            except CorruptBatch:
                refused += 1
    assert refused > 100


# --- timestamps as deltas


@pytest.mark.parametrize(
    ("span", "bit", "size"), [(1, 16, 4), ((1 << 31) - 1, 16, 4), (1 << 31, 1, 8), (36 * 60 * 1_000_000, 1, 8)]
)
@pytest.mark.parametrize("low", [-5, 0, 1_700_000_000_000_000])
def test_a_batch_that_spans_35_minutes_has_deltas_and_one_that_spans_more_has_timestamps(
    span: int, bit: int, size: int, low: int
) -> None:
    times = [low + span, low, low + 1]
    for columns in (
        columns_from_lists([b"v"] * 3, times),
        columns_from_arrays(pa.array([b"v"] * 3, pa.binary()), pa.array(times, pa.int64()).view(TIMESTAMP)),
    ):
        assert (columns.attributes, columns.min_timestamp_us, columns.max_timestamp_us) == (bit, low, low + span)
        assert columns.batch.column(0).nbytes == 3 * size
        header, batch = batch_of(columns)
        assert [row[0] for row in rows(header, checked_columns(header, batch))] == times


def test_no_attributes_have_both_timestamps_and_deltas_and_all_others_are_known() -> None:
    both = HAS_TIMESTAMP | HAS_TIMESTAMP_DELTA
    assert set(SCHEMAS) == {attributes for attributes in range(32) if attributes & both != both}
    assert SCHEMAS[HAS_TIMESTAMP_DELTA | HAS_KEY | HAS_HEADERS | HAS_OFFSET].names == [
        "timestamp_delta", "key", "value", "headers", "offset",
    ]  # fmt: skip


PIECES = st.lists(
    st.tuples(
        st.lists(TIME, min_size=1, max_size=6)
        | st.integers(1, 6).flatmap(lambda count: TIME.map(lambda time: [time] * count))
        | TIME.map(lambda time: [time + 3 * number for number in range(_FEW)]),
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=5,
)


@given(PIECES)
def test_the_timestamps_of_slices_of_any_batches_are_those_of_their_records(
    pieces: list[tuple[list[int], int, int]],
) -> None:
    headers, columns, expected = [], [], []
    for times, skipped, count in pieces:
        header, batch = batch_of(columns_from_lists([b"v"] * len(times), times))
        headers.append(header)
        columns.append(decode_columns(header, batch).slice(skipped, count))
        expected += times[skipped : skipped + count]
        if header.attributes & HAS_TIMES:
            assert list(timestamp_list(header, columns[-1])) == times[skipped : skipped + count]
    found = timestamps(headers, columns)
    assert found.type == TIMESTAMP
    assert found.view(pa.int64()).to_pylist() == expected


def with_deltas(
    deltas: Sequence[int | None], span: int, codec: str = "none", more: int = 0
) -> tuple[BatchHeader, memoryview]:
    """A batch with deltas of any kind, in whose header the timestamps are `span` apart. `more`: further attributes."""
    count = len(deltas)
    arrays: list[pa.Array] = [pa.array(deltas, DELTA)]
    arrays += [pa.array([b"k"] * count, pa.binary())] * bool(more & HAS_KEY) + [pa.array([b"v"] * count, pa.binary())]
    arrays += [pa.nulls(count, HEADERS)] * bool(more & HAS_HEADERS)
    arrays += [pa.array(range(count), pa.int64())] * bool(more & HAS_OFFSET)
    attributes = HAS_TIMESTAMP_DELTA | more
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes])
    return batch_of(Columns(batch, attributes, 1_000, 1_000 + span), codec)


def fault_of(header: BatchHeader, batch: memoryview) -> str | None:
    try:
        checked_columns(header, batch)
    except CorruptBatch as error:
        return str(error.facts["reason"])
    return None


def by_arrow(header: BatchHeader, batch: memoryview) -> str | None:
    """What `fault_of` returns of a batch that can be decoded, by what Arrow finds in it."""
    column = decode_columns(header, batch).column(0)
    if column.null_count:
        return "a timestamp's delta is null"
    deltas = column.to_numpy()
    low, high, span = deltas.min(), deltas.max(), header.max_timestamp_us - header.min_timestamp_us
    if (low, high) == (0, span):
        return None
    return f"its timestamps' deltas are {low} to {high}; by its header's timestamps they are 0 to {span}"


INT32 = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 2) | st.sampled_from([-(1 << 31), (1 << 31) - 1])


@given(
    st.lists(INT32, min_size=1, max_size=8),
    st.sampled_from([1, _FEW, 1000]),
    st.none() | st.integers(0, 1 << 33),
    st.sampled_from(list(CODECS)),
    st.sampled_from([0, HAS_KEY, HAS_HEADERS, HAS_OFFSET, HAS_KEY | HAS_HEADERS | HAS_OFFSET]),
    st.booleans(),
)
def test_deltas_are_accepted_only_if_they_are_0_to_the_headers_span(
    deltas: list[int], times: int, span: int | None, codec: str, more: int, is_right: bool
) -> None:
    """For few, where they are read by struct, and for many, by numpy."""
    if is_right:
        deltas = [abs(delta) if delta > -(1 << 31) else 5 for delta in deltas] + [0]
    if span is None:
        span = max(0, *deltas, 0)
    header, batch = with_deltas(deltas * times, span, codec, more)
    expected = None
    if (min(deltas), max(deltas)) != (0, span):
        expected = (
            f"its timestamps' deltas are {min(deltas)} to {max(deltas)}; "
            f"by its header's timestamps they are 0 to {span}"
        )
    assert fault_of(header, batch) == expected == by_arrow(header, batch)


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize(
    ("deltas", "span", "sentence"),
    [
        ([0, -1, 7], 7, "its timestamps' deltas are -1 to 7; by its header's timestamps they are 0 to 7"),
        ([1, 7], 7, "its timestamps' deltas are 1 to 7; by its header's timestamps they are 0 to 7"),
        ([0, 6], 7, "its timestamps' deltas are 0 to 6; by its header's timestamps they are 0 to 7"),
        ([0, 8], 7, "its timestamps' deltas are 0 to 8; by its header's timestamps they are 0 to 7"),
        ([0, -1], (1 << 32) - 1, "its timestamps' deltas are -1 to 0; by its header's .* they are 0 to 4294967295"),
        ([0, None, 7], 7, "a timestamp's delta is null"),
    ],
)
def test_bad_deltas_are_refused_with_a_sentence(deltas: list[int | None], span: int, sentence: str, times: int) -> None:
    with pytest.raises(CorruptBatch, match=sentence):
        checked_columns(*with_deltas(deltas * times, span))


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize(
    ("attributes", "first", "sentence"),
    [
        (HAS_HEADERS, [[None]], "a header has no key"),
        (HAS_HEADERS, [[{"key": None, "value": b"x"}]], "a header has no key"),
        (HAS_HEADERS, [[{"key": "k", "value": b"x"}, None]], "a header has no key"),
        (HAS_HEADERS, [None, []], None),
        (HAS_HEADERS, [[{"key": "", "value": None}]], None),
        (HAS_OFFSET, [None, 3], "an offset is null"),
        (HAS_OFFSET, [2, 3], None),
        (HAS_TIMESTAMP, [None, 3], "a timestamp is null"),
        (HAS_TIMESTAMP, [2, 3], None),
    ],
)
def test_a_null_where_a_record_has_none_is_refused(
    attributes: int, first: list[Any], sentence: str | None, codec: str
) -> None:
    """Arrow accepts it, and whoever reads the batch would fail at it later."""
    found: dict[str, pa.Array] = {"value": pa.array([b"v"] * len(first), pa.binary())}
    [name] = set(SCHEMAS[attributes].names) - set(found)
    found[name] = pa.array(first, SCHEMAS[attributes].field(name).type)
    columns = pa.RecordBatch.from_arrays(
        [found[each] for each in SCHEMAS[attributes].names], schema=SCHEMAS[attributes]
    )
    header, data = batch_of(Columns(columns, attributes, 2, 3), codec)
    if sentence is None:
        assert decode_columns(header, data).num_rows == len(first)
    else:
        with pytest.raises(CorruptBatch, match=sentence):
            decode_columns(header, data)


def test_a_copy_of_a_slice_has_memory_of_its_own() -> None:
    whole = columns_from_lists([b"%d" % number * 100 for number in range(1000)], 5, [b"k"] * 1000)
    part = whole._replace(batch=whole.batch.slice(500, 3))
    assert copied(part) == part
    assert copied(part).batch.get_total_buffer_size() < 4000 < part.batch.get_total_buffer_size()


def test_deltas_with_a_bitmap_that_has_no_null_are_accepted() -> None:
    """Arrow for C++ leaves such a bitmap out; other writers need not."""
    header, batch = with_deltas([0, None, 9], 9)
    body = bytearray(batch[HEADER_SIZE:])
    nodes = body.index(struct.pack("<qqqq", 3, 1, 3, 0))  # (records, nulls) of the deltas and of the values
    struct.pack_into("<q", body, nodes + 8, 0)
    encoded = encode_batch(
        memoryview(body), codec=0, attributes=header.attributes, record_count=3, min_timestamp_us=1_000,
        max_timestamp_us=1_009,
    ).tobytes()  # fmt: skip
    header = check_batch(encoded)
    assert fault_of(header, memoryview(encoded)) is None
    assert [row[0] for row in rows(header, decode_columns(header, memoryview(encoded)))] == [1_000, 1_000, 1_009]


def test_a_reader_takes_deltas_as_they_are() -> None:
    """Nobody has checked those of a compressed batch: what is said is odd, and no reason to stop reading."""
    for deltas in ([-3, 5], [-3, 5] * 100):
        header, batch = with_deltas(deltas, 7, "zstd")
        assert [row[0] for row in rows(header, decode_columns(header, batch))] == [1_000 + delta for delta in deltas]
