from __future__ import annotations

from pathlib import Path

import pytest

from broker.storage.disk import Disk
from broker.storage.retention import expired
from broker.storage.segment import Segment
from tests.broker.storage.batches import topic

NOW_US = 1_000_000_000


def segment(size: int, last_append_seconds_ago: float | None) -> Segment:
    made = Segment(Disk(), Path("/"), 0, 512)
    made.size = size
    if last_append_seconds_ago is not None:
        made.first_append_us = made.last_append_us = NOW_US - int(last_append_seconds_ago * 1_000_000)
    return made


@pytest.mark.parametrize(
    ("ages", "old"),
    [
        ([30, 20, 5, 0], 2),
        ([30, 20, 10.001], 3),  # the last one as well
        ([30, 20, 10], 2),  # exactly as old is not older
        ([5, 30], 0),  # only from the head
        ([None, 20, 5], 2),  # nothing readable in the first: it goes with the next
        ([None, 5], 0),
        ([30, None], 1),  # the last one is empty
        ([None], 0),
        ([-60, 20, 5], 2),  # a time to come is wrong: it goes with the next
        ([-60, -60, 20, -60, 5], 3),
        ([-60, 5], 0),
        ([-60], 0),
        ([20, -60], 1),
    ],
)
def test_segments_appended_to_last_too_long_ago_are_old(ages: list[float | None], old: int) -> None:
    settings = topic(retention_ms=10_000)
    assert expired([segment(100, age) for age in ages], settings, NOW_US) == old
    assert expired([segment(100, age) for age in ages], topic(retention_ms=-1), NOW_US) == 0


def test_no_time_at_all_is_a_time_and_1970_is_one_too() -> None:
    assert expired([segment(100, 1), segment(100, 0)], topic(retention_ms=0), NOW_US) == 1
    of_1970 = segment(100, NOW_US / 1_000_000)
    assert of_1970.last_append_us == 0
    assert expired([of_1970, segment(100, 0)], topic(retention_ms=10_000), NOW_US) == 1


@pytest.mark.parametrize(("limit", "old"), [(-1, 0), (0, 2), (99, 2), (100, 2), (199, 2), (200, 1), (299, 1), (300, 0)])
def test_oldest_segments_go_while_the_partition_is_larger(limit: int, old: int) -> None:
    assert expired([segment(100, 1)] * 3, topic(retention_bytes=limit, retention_ms=-1), NOW_US) == old


def test_retention_by_size_counts_what_retention_by_time_keeps() -> None:
    settings = topic(retention_ms=10_000, retention_bytes=250)
    assert expired([segment(100, 20), segment(100, 5), segment(100, 1)], settings, NOW_US) == 1


@pytest.mark.parametrize(("age", "is_old"), [(10, True), (9.999, False), (None, False), (NOW_US / 1_000_000, True)])
def test_a_segment_is_old_by_the_age_of_its_first_batch(age: float | None, is_old: bool) -> None:
    assert segment(100, age).is_old(10_000_000, NOW_US) is is_old
