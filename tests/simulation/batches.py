"""Batches of simulated clients. Their values are not in their bodies: a value is known by its batch's header and its
place in it, so nothing has to be decoded."""

from __future__ import annotations

import functools

from kafkalog.format.batch import NO_TRANSACTION, BatchHeader, encode_batch
from kafkalog.format.columns import columns_from_lists, encode_columns

_STAGED_RECORDS = 2


@functools.cache
def _body(count: int) -> tuple[memoryview, int]:
    columns = columns_from_lists([b"%020d" % number for number in range(count)], 1_000)
    return encode_columns(columns.batch, 0), columns.attributes


def batch_of(
    producer_id: int, sequence: int, count: int, batch_id: int = NO_TRANSACTION, part: int = NO_TRANSACTION
) -> bytes:
    """A batch of `count` records."""
    body, attributes = _body(count)
    encoded = encode_batch(
        body,
        codec=0,
        attributes=attributes,
        record_count=count,
        min_timestamp_us=1_000,
        max_timestamp_us=1_000,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transaction_batch_id=batch_id,
        part=part,
    )
    return encoded.tobytes()


def staged_batch(producer_id: int, batch_id: int, part: int, index: int) -> bytes:
    """The batch at a place in a part."""
    return batch_of(producer_id, index, _STAGED_RECORDS, batch_id, part)


def values(producer_id: int, sequence: int, count: int) -> list[str]:
    """Of a batch that no transaction has."""
    return [f"{producer_id}:{sequence + number}" for number in range(count)]


def staged_values(producer_id: int, batch_id: int, part: int, index: int) -> list[str]:
    """Of the batch at a place in a part."""
    return [f"{producer_id}:{batch_id}/{part}/{index}.{number}" for number in range(_STAGED_RECORDS)]


def values_of(header: BatchHeader) -> list[tuple[int, str]]:
    """Offset and value of the records of a batch in a log."""
    producer_id, sequence = header.producer_id, header.base_sequence
    if header.transaction_batch_id == NO_TRANSACTION:
        found = values(producer_id, sequence, header.record_count)
    else:
        found = staged_values(producer_id, header.transaction_batch_id, header.part, sequence)
    return [(header.base_offset + number, value) for number, value in enumerate(found)]
