"""Points in time and spans of time, as options write them. Pure.

A point is milliseconds since the epoch, as for Spark's Kafka connector, or ISO-8601 (`2026-03-01`,
`2026-03-01T12:00:00.5+01:00`; UTC where it names no zone); here it becomes microseconds, which is what the log keeps. A
span is Spark's: `500ms`, `5s`, `15m`; a bare number is milliseconds. As for Spark's Kafka connector a point may be any
number of milliseconds that a long holds; one beyond TIMESTAMP_US_MAX is later than every record.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from kafkalog.errors import InvalidArgument

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MILLISECONDS_MAX = (1 << 63) - 1
TIMESTAMP_US_MAX = (1 << 63) - 1
"""The latest that a record can bear."""
_SPAN = re.compile(r"([0-9]+)\s*([a-z]*)")
_UNITS_US = {
    "us": 1,
    "": 1_000,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


def timestamp_us(value: Any) -> int | None:
    """Microseconds since the epoch of milliseconds (a number, or text) or ISO-8601; None if it is neither."""
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.isdecimal()):
            return _from_iso(text)
        value = int(text)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MILLISECONDS_MAX:
        return None
    return value * 1000


def _from_iso(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - _EPOCH
    return since // _MICROSECOND if since >= timedelta(0) else None


def parse_timestamp(option: str, text: str) -> int:
    """The value of startingTimestamp or endingTimestamp, in microseconds. Raises InvalidArgument, naming the option."""
    moment = timestamp_us(text)
    if moment is None:
        raise InvalidArgument(
            reason=f"{option}='{text}' is not valid: it must be milliseconds since 1970 or ISO-8601, "
            "as in 1772366400000 or 2026-03-01T12:00:00Z"
        )
    return moment


def parse_span_s(option: str, text: str) -> float:
    """A span of time, in seconds. Raises InvalidArgument, naming the option."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS_US:
        raise InvalidArgument(
            reason=f"{option}='{text}' is not valid: it must be a time as in 500ms, 5s, 15m, 1h or 1d, "
            "or a number of milliseconds"
        )
    return int(found[1]) * _UNITS_US[found[2]] / 1_000_000
