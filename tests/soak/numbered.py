"""Records that tell their own number: 200 bytes, the number first and a filler that follows from it.

So a reader can tell, from the record alone, whether it is exactly what was sent, and which one it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

RECORD_BYTES = 200
_FILLERS = 1021  # prime: neighbours differ, and no batch size divides it
_SOURCE = random.Random(20110612)
FILLERS = [_SOURCE.randbytes(RECORD_BYTES - 8) for _ in range(_FILLERS)]
_TABLE = np.frombuffer(b"".join(FILLERS), np.uint8).reshape(_FILLERS, RECORD_BYTES - 8)


def record(number: int) -> bytes:
    return number.to_bytes(8, "big") + FILLERS[number % _FILLERS]


def records(start: int, stop: int) -> Iterator[bytes]:
    return map(record, range(start, stop))


def numbers(values: pa.Array) -> np.ndarray:
    """The numbers of an array of records, each byte of each checked; raises AssertionError at a foreign one."""
    assert values.null_count == 0
    _, bounds, content = values.buffers()
    assert bounds is not None and content is not None
    offsets = np.frombuffer(memoryview(bounds), np.int32)[values.offset : values.offset + len(values) + 1]
    assert (np.diff(offsets) == RECORD_BYTES).all(), "a record of another length"
    data = memoryview(content)[offsets[0] : offsets[-1]]
    table = np.frombuffer(data, np.uint8).reshape(len(values), RECORD_BYTES)
    found = table[:, :8].copy().view(">i8").reshape(-1).astype(np.int64)
    assert (table[:, 8:] == _TABLE[found % _FILLERS]).all(), "a record whose bytes are not those sent"
    return found


class Ledger:
    """Which of the numbers 0..count have been seen, and in what order in each partition."""

    def __init__(self, count: int) -> None:
        self.seen = np.zeros(count, np.uint8)
        self.last: dict[int, int] = {}
        self.next_offset: dict[int, int] = {}

    def add(self, partition: int, first_offset: int, found: np.ndarray) -> None:
        """Records of one partition at consecutive offsets."""
        if not len(found):
            return
        assert first_offset == self.next_offset.get(partition, 0), f"partition {partition} skips or repeats offsets"
        self.next_offset[partition] = first_offset + len(found)
        assert found[0] > self.last.get(partition, -1) and (np.diff(found) > 0).all(), "not in the order sent"
        self.last[partition] = int(found[-1])
        assert not self.seen[found].any(), "a record twice"
        self.seen[found] = 1

    def assert_complete(self) -> None:
        missing = np.flatnonzero(self.seen == 0)
        assert not len(missing), f"{len(missing)} records missing, the first {missing[:5]}"
