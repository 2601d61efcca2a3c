"""One whole batch in memory, checked as whoever reads it would."""

from __future__ import annotations

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import BatchHeader, body_fault, read_header


def check_batch(batch: bytes | bytearray | memoryview, where: str = "a request") -> BatchHeader:
    """The header of a batch that starts at 0. Raises CorruptBatch: it is not whole, or damaged."""
    header = read_header(batch, 0, where)
    fault = body_fault(header, batch)
    if fault:
        raise CorruptBatch(partition=where, offset=header.base_offset, reason=fault)
    return header
