"""Batches for tests of the log: small, deterministic, told apart by their values."""

from __future__ import annotations

import functools

from broker.config import TopicSettings
from broker.replica.partition import Partition
from broker.storage.log import Log
from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import CODECS, Batch, BatchHeader, encode_batch, iter_batches
from kafkalog.format.columns import columns_from_lists, decode_columns, encode_columns
from tests.whole_batch import check_batch

TOPIC_ID = bytes(range(16))


def make_batch(
    values: list[bytes | None],
    timestamps_us: list[int] | int = 1_000,
    *,
    codec: str = "none",
    producer: tuple[int, int, int] = (-1, -1, -1),
    transaction: tuple[int, int] = (-1, -1),
) -> Batch:
    """A batch as `Log.append` takes it. `producer`: id, epoch, base sequence. `transaction`: batch id, part."""
    times = timestamps_us if isinstance(timestamps_us, int) else tuple(timestamps_us)
    header, data = _encoded(tuple(values), times, codec, producer, transaction)
    return header, memoryview(bytearray(data))


@functools.lru_cache(2000)  # the crash tests make the same ones hundreds of times
def _encoded(
    values: tuple[bytes | None, ...],
    timestamps_us: tuple[int, ...] | int,
    codec: str,
    producer: tuple[int, int, int],
    transaction: tuple[int, int],
) -> tuple[BatchHeader, bytes]:
    columns = columns_from_lists(values, timestamps_us)
    producer_id, epoch, sequence = producer
    encoded = encode_batch(
        encode_columns(columns.batch, CODECS[codec]),
        codec=CODECS[codec],
        attributes=columns.attributes,
        record_count=len(values),
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transaction_batch_id=transaction[0],
        part=transaction[1],
    ).tobytes()
    return check_batch(encoded), encoded


def numbered(first: int, count: int = 1, size: int = 20, **more: object) -> Batch:
    """A batch of `count` records whose values are the numbers from `first` on."""
    return make_batch([b"%0*d" % (size, first + i) for i in range(count)], **more)  # type: ignore[arg-type]


def topic(**settings: object) -> TopicSettings:
    """Topic settings with small segments; `retention_ms=5` is retention.ms."""
    given: dict[str, object] = {"segment.bytes": 4096, "index.interval.bytes": 512}
    given |= {name.replace("_", "."): value for name, value in settings.items()}
    return TopicSettings.parse(given)


def values_of(header: BatchHeader, batch: bytes | memoryview) -> list[tuple[int, bytes | None]]:
    """(offset, value) of a batch's records."""
    column = decode_columns(header, memoryview(batch)).column("value")
    return [(header.base_offset + i, value.as_py()) for i, value in enumerate(column)]


def read_batches(log: Log | Partition, offset: int, max_bytes: int = 1 << 20) -> list[tuple[BatchHeader, bytes]]:
    """What one read gives: its whole batches, each checked as a client checks them."""
    reader = log if isinstance(log, Partition) else log.reader
    with reader.read(offset, max_bytes, None) as found:
        data = found.read()
        assert len(data) == found.length
    return [(header, bytes(batch)) for header, batch in iter_batches(memoryview(data))]


def read_all(log: Log | Partition) -> dict[int, bytes | None]:
    """Every readable record by offset; every damaged offset as the value None. Values in these tests are never null.
    The log's leader epochs must agree with the batches."""
    whole = log.log if isinstance(log, Partition) else log
    found: dict[int, bytes | None] = {}
    offset = log.start_offset
    end = log.readable_end_offset if isinstance(log, Partition) else log.end_offset
    while offset < end:
        try:
            batches = read_batches(log, offset, 1500)
        except CorruptBatch as error:
            damaged_to = error.facts["end_offset"]
            assert damaged_to > offset
            found |= dict.fromkeys(range(offset, min(damaged_to, end)))
            offset = damaged_to
            continue
        assert batches, f"nothing at {offset} before the end {end}"
        for header, batch in batches:
            check_epoch(whole, header)
            found |= {at: value for at, value in values_of(header, batch) if offset <= at}
            offset = header.end_offset
    return found


def check_epoch(log: Log, header: BatchHeader) -> None:
    """The log knows the leader epoch of one of its batches, and that the batch is within it."""
    epoch, end_offset = log.epoch_end(header.leader_epoch)
    assert epoch == header.leader_epoch and header.end_offset <= end_offset
    _, start_offset = log.epoch_end(header.leader_epoch - 1)
    assert start_offset <= max(header.base_offset, log.start_offset)
