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
    without a readable batch has the append time of the next one that has such a batch. By size: the oldest segments
    while the partition is larger than retention.bytes, but never the last segment.
    """
    old = 0
    if settings.retention_ms >= 0:
        horizon_us = now_us - settings.retention_ms * 1000
        while old < len(segments) and 0 <= _last_append_us(segments[old:]) < horizon_us:
            old += 1
    if settings.retention_bytes >= 0:
        size = sum(segment.size for segment in segments[old:])
        while old < len(segments) - 1 and size > settings.retention_bytes:
            size -= segments[old].size
            old += 1
    return old


def _last_append_us(segments: Sequence[Segment]) -> int:
    """The latest append time of the first segment that has a readable batch; -1 if no segment has one."""
    return next((segment.last_append_us for segment in segments if segment.last_append_us >= 0), -1)
