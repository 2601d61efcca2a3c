"""Which segments are old: decisions only, no I/O. Retention uses the append time, never the records' timestamps: a
producer's wrong clock must neither keep records for ever nor delete them at once."""

from __future__ import annotations

from collections.abc import Sequence

from broker.config import TopicSettings
from broker.storage.segment import Segment


def expired(segments: Sequence[Segment], settings: TopicSettings, now_us: int) -> int:
    """How many of the oldest segments are to go; all of them, if even the last one is too old.

    By time: the segment was appended to last longer ago than retention.ms. By size: the partition is larger than
    retention.bytes; the last segment never goes by size.
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
    """When the first segment that has a readable batch was appended to last; -1 if none has one."""
    return next((segment.last_append_us for segment in segments if segment.last_append_us >= 0), -1)


def roll_is_due(segment: Segment, settings: TopicSettings, now_us: int) -> bool:
    """Whether a segment is old enough to be closed, by the append time of its first batch."""
    return segment.first_append_us >= 0 and now_us - segment.first_append_us >= settings.segment_ms * 1000
