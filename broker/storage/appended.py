"""What a log takes and what it answers: a batch with its header, and where it stands. Data."""

from __future__ import annotations

from typing import NamedTuple

from broker.storage.producers import Remembered
from kafkalog.format.batch import BatchHeader

Batch = tuple[BatchHeader, memoryview]
"""Header and bytes, checked by whoever brings them; the bytes are writable where they are to be stamped."""


class Appended(NamedTuple):
    """Where a batch stands: offsets [base_offset, end_offset). `duplicate`: since it was first sent."""

    base_offset: int
    end_offset: int
    append_timestamp_us: int
    duplicate: bool

    @classmethod
    def before(cls, known: Remembered) -> Appended:
        """Of a batch that was sent again."""
        return cls(known.base_offset, known.end_offset, known.append_us, True)
