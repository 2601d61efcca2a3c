"""Times and spans as options write them."""

from __future__ import annotations

import time

import pytest

from kafkalog.errors import InvalidArgument
from pyspark_kafkalog import times


@pytest.mark.parametrize(
    ("text", "timestamp_us"),
    [
        ("0", 0),
        (" 1772366400000 ", 1_772_366_400_000_000),
        ("2026-03-01T12:00:00Z", 1_772_366_400_000_000),
        ("2026-03-01T13:00:00.000001+01:00", 1_772_366_400_000_001),
        ("2026-03-01 12:00", 1_772_366_400_000_000),
        ("2026-03-01", 1_772_323_200_000_000),
        (str((1 << 63) - 1), ((1 << 63) - 1) * 1000),  # later than a record can be, as Java's Long.MAX_VALUE
    ],
)
def test_a_time_is_milliseconds_or_iso_8601(text: str, timestamp_us: int) -> None:
    assert times.parse_timestamp("startingTimestamp", text) == timestamp_us


@pytest.mark.parametrize(
    "text", ["", "now", "-1", "1.5", "1969-12-31", "2026-13-01", str(1 << 63), "\N{SUPERSCRIPT TWO}"]
)
def test_what_is_no_time_names_the_option_and_how_to_write_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"startingTimestamp='.*milliseconds since 1970 or ISO-8601"):
        times.parse_timestamp("startingTimestamp", text)


@pytest.mark.parametrize("value", [True, 1.5, None, [], -1])
def test_json_that_is_no_time_is_none(value: object) -> None:
    assert times.timestamp_us(value) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5),
        ("15m", 900),
        ("15 min", 900),
        ("250", 0.25),
        ("250ms", 0.25),
        ("1H", 3600),
        ("2d", 172_800),
        ("7us", 7e-6),
    ],
)
def test_a_span_is_written_as_for_spark(text: str, seconds: float) -> None:
    assert times.parse_span_s("maxTriggerDelay", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 weeks", "1.5s", "soon"])
def test_an_invalid_span_names_the_option(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"maxTriggerDelay='.*it must be a time as in"):
        times.parse_span_s("maxTriggerDelay", text)


def test_the_epoch_is_a_time_and_what_is_before_it_is_none() -> None:
    assert times.timestamp_us("1970-01-01T00:00:00Z") == 0
    assert times.timestamp_us("1969-12-31T23:59:59.999999Z") is None


def test_a_time_without_a_zone_is_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert times.timestamp_us("1970-01-02T00:00:00") == 86_400_000_000
    finally:
        monkeypatch.undo()
        time.tzset()
