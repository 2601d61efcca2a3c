"""Which segments retention deletes, and when a segment is closed by age. Decisions only, no I/O.

Retention uses the append time, never the records' timestamps: a producer's wrong clock must neither keep records for
ever nor delete them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.config import TopicSettings
from broker.storage.segment import Segment


def expired(segments: Sequence[Segment], settings: TopicSettings, now_us: int) -> int:
    """The number of oldest segments to delete.

    By time: segments whose latest append time is longer ago than retention.ms, including the last segment. None behind
    one that is kept, so what was appended while a clock was behind is not old before what came earlier. A segment
    without a readable batch, or with a time after now, which is wrong, has that of the next one without that. By size:
    the oldest segments while the partition is larger than retention.bytes, but never the last segment.
    """
    old = 0
    if settings.retention_ms >= 0:
        horizon_us = now_us - settings.retention_ms * 1000
        while old < len(segments) and 0 <= _last_append_us(segments[old:], now_us) < horizon_us:
            old += 1
    if settings.retention_bytes >= 0:
        size = sum(segment.size for segment in segments[old:])
        while old < len(segments) - 1 and size > settings.retention_bytes:
            size -= segments[old].size
            old += 1
    return old


def _last_append_us(segments: Sequence[Segment], now_us: int) -> int:
    """The latest append time of the first segment; -1 if it is not known."""
    first = segments[0]
    found = next((segment.last_append_us for segment in segments if 0 <= segment.last_append_us <= now_us), -1)
    # A later one may be of a clock that was behind.
    return max(found, first.first_append_us) if found >= 0 and first.first_append_us <= now_us else found
