"""Cutting and packing ranges, without a broker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import EARLIEST, LATEST, InputRange
from pyspark_kafkalog.read.ranges import most_splits, pack, split, split_late_bound


def of(partition: int, start: int, end: int) -> InputRange:
    return InputRange(TopicPartition("t", partition), start, end)


@pytest.mark.parametrize(
    ("sizes", "min_partitions", "max_records", "pieces"),
    [
        ([5, 5], None, None, [5, 5]),
        ([5, 5], 2, None, [5, 5]),  # as many as wanted: whole
        ([7500, 2500, 1, 1, 1, 1, 1, 1], 8, None, [7500, 2500, 1, 1, 1, 1, 1, 1]),  # however unequal they are
        ([10], 3, None, [3, 3, 4]),  # the last takes the remainder
        ([10, 10], 4, None, [5, 5, 5, 5]),
        ([100, 1], 4, None, [33, 33, 34, 1]),  # a small one stays whole and is not counted in the proportions
        ([6, 2], 3, None, [3, 3, 2]),
        ([1], 5, None, [1]),  # never an empty piece
        ([3, 3], 3, None, [1, 2, 1, 2]),  # 3/6 of 3 is 1.5: rounded up, so there is one more than asked for
        ([10], None, 4, [3, 3, 4]),
        ([8], None, 4, [4, 4]),
        ([8], None, 8, [8]),
        ([10, 2], 6, 5, [1, 2, 2, 1, 2, 2, 2]),  # cut by records first, then in proportion
    ],
)
def test_ranges_are_cut_as_the_connector_cuts_them(
    sizes: list[int], min_partitions: int | None, max_records: int | None, pieces: list[int]
) -> None:
    cut = split([of(number, 100, 100 + size) for number, size in enumerate(sizes)], min_partitions, max_records)
    assert [each.end - each.start for each in cut] == pieces


RANGES = st.lists(st.tuples(st.integers(0, 2**60), st.integers(1, 10_000)), min_size=1, max_size=6)


@given(RANGES, st.none() | st.integers(1, 50), st.none() | st.integers(100, 5000))
def test_pieces_cover_their_ranges_once_and_in_order(
    given_ranges: list[tuple[int, int]], min_partitions: int | None, max_records: int | None
) -> None:
    ranges = [of(number, start, start + size) for number, (start, size) in enumerate(given_ranges)]
    cut = split(ranges, min_partitions, max_records)
    for whole in ranges:
        pieces = [each for each in cut if each.partition == whole.partition]
        assert pieces[0].start == whole.start and pieces[-1].end == whole.end
        assert all(one.end == two.start for one, two in zip(pieces, pieces[1:], strict=False))
        assert all(each.start < each.end for each in pieces)
        assert max_records is None or all(each.end - each.start <= max_records for each in pieces)


@given(RANGES, st.integers(1, 8))
def test_packing_keeps_every_range_and_spreads_the_records(given_ranges: list[tuple[int, int]], most: int) -> None:
    splits = [([of(number, start, start + size)], size) for number, (start, size) in enumerate(given_ranges)]
    packed = pack(splits, most)
    assert sorted(each for one in packed for each in one) == sorted(each for one, _ in splits for each in one)
    assert len(packed) == min(most, len(splits)) and all(packed)
    loads = [sum(each.end - each.start for each in one) for one in packed]
    assert max(loads) - min(loads) <= max(size for _, size in splits)


@pytest.mark.parametrize(
    ("records", "min_partitions", "max_splits", "min_records", "most"),
    [
        (5000, None, None, None, None),
        (5000, 4, 9, None, 9),
        (5000, None, None, 1000, 5),
        (4999, None, None, 1000, 4),
        (999, None, None, 1000, 1),
        (0, None, None, 1000, 1),
        (5000, None, 3, 1000, 3),
        (2000, None, 3, 1000, 2),
        (2000, 3, None, 1000, 3),
        (2000, 3, 3, 1000, 3),
    ],
)
def test_a_read_has_no_more_splits_than_its_records_make(
    records: int, min_partitions: int | None, max_splits: int | None, min_records: int | None, most: int | None
) -> None:
    assert most_splits(records, min_partitions, max_splits, min_records) == most


def test_the_largest_is_packed_first() -> None:
    packed = pack([([of(0, 0, 1)], 1), ([of(1, 0, 1)], 1), ([of(2, 0, 4)], 4)], 2)
    assert packed == [[of(2, 0, 4)], [of(0, 0, 1), of(1, 0, 1)]]


def test_what_is_packed_together_is_read_in_the_order_it_was_given() -> None:
    splits = [([of(number, 0, size)], size) for number, size in enumerate((1, 4, 2))]
    assert pack(splits, 1) == [[each for ranges, _ in splits for each in ranges]]


def test_a_batch_is_cut_by_records_and_keeps_its_symbols() -> None:
    ranges = [of(0, EARLIEST, LATEST), of(1, EARLIEST, LATEST)]
    numbers = [of(0, 0, 9), of(1, 5, 5)]
    assert split_late_bound(ranges, lambda: numbers, None, 3) == [
        [of(0, EARLIEST, 3)],
        [of(0, 3, 6)],
        [of(0, 6, LATEST), ranges[1]],
    ]


def test_empty_ranges_are_packed_evenly_too() -> None:
    packed = pack([([of(number, 0, 0)], 0) for number in range(9)], 3)
    assert [len(one) for one in packed] == [3, 3, 3]


def test_a_batch_that_is_cut_keeps_its_symbols_at_both_ends() -> None:
    ranges = [of(0, EARLIEST, LATEST), of(1, EARLIEST, LATEST), of(2, 3, LATEST)]
    numbers = [of(0, 2, 12), of(1, 7, 7), of(2, 3, 13)]
    # Three ranges, one of them empty, are as many as wanted: nothing is looked up.
    assert split_late_bound(ranges, lambda: pytest.fail("looked up"), 3, None) == [[each] for each in ranges]
    assert split_late_bound(ranges, lambda: numbers, 4, None) == [
        [of(0, EARLIEST, 7)],
        [of(0, 7, LATEST)],
        [of(2, 3, 8)],
        [of(2, 8, LATEST), ranges[1]],
    ]
    assert split_late_bound(ranges[1:2], lambda: numbers[1:2], None, 5) == [[ranges[1]]]


def test_a_range_without_a_record_takes_no_piece_from_the_others() -> None:
    ranges = [of(0, EARLIEST, LATEST), of(1, EARLIEST, LATEST)]
    numbers = [of(0, 0, 9), of(1, 5, 5)]
    assert split_late_bound(ranges, lambda: numbers, 3, None) == [
        [of(0, EARLIEST, 3)],
        [of(0, 3, 6)],
        [of(0, 6, LATEST), ranges[1]],
    ]
