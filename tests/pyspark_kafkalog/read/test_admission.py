"""How much a micro-batch takes, and when it is worth one: the connector's rules as plain arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafkalog.clock import ManualClock
from kafkalog.records import TopicPartition
from pyspark_kafkalog.read import admission as limits

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def test_a_limit_is_shared_in_proportion_and_rounded_down() -> None:
    # What Spark's Kafka connector was seen to do: a limit of 5 over backlogs of 10 and 5 is 3 + 1.
    assert limits.limited({A0: 0, A1: 100}, {A0: 10, A1: 105}, 5) == {A0: 3, A1: 101}


def test_a_share_below_one_is_rounded_up_so_that_a_small_partition_moves_on() -> None:
    assert limits.limited({A0: 0, A1: 0}, {A0: 1_000_000, A1: 1}, 10) == {A0: 9, A1: 1}


def test_a_partition_without_backlog_stays_where_it_is() -> None:
    assert limits.limited({A0: 5, A1: 0}, {A0: 5, A1: 10}, 4) == {A0: 5, A1: 4}


def test_a_partition_new_to_the_stream_begins_at_zero() -> None:
    assert limits.limited({A0: 0}, {A0: 10, A1: 10}, 10) == {A0: 5, A1: 5}


@given(
    st.dictionaries(
        st.builds(TopicPartition, st.sampled_from("ab"), st.integers(0, 4)),
        st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)),
    ),
    st.integers(1, 2**62),
)
def test_a_limited_batch_moves_on_and_stays_within_bounds(
    ranges: dict[TopicPartition, tuple[int, int]], limit: int
) -> None:
    start = {partition: first for partition, (first, _) in ranges.items()}
    end = {partition: first + size for partition, (first, size) in ranges.items()}
    ends = limits.limited(start, end, limit)
    assert ends.keys() == end.keys()
    for partition, offset in ends.items():
        assert start[partition] <= offset <= end[partition]
        assert (offset > start[partition]) == (end[partition] > start[partition])
    assert sum(ends.values()) - sum(start.values()) <= limit + len(ends)


def test_min_offsets_admit_at_once_then_at_the_minimum_or_after_the_delay() -> None:
    clock = ManualClock()
    min_offsets = limits.MinOffsets(10, 60, clock.monotonic)
    assert min_offsets.admits(1)  # the first time after a start
    assert [min_offsets.admits(new) for new in (0, 9)] == [False, False]
    clock.advance(59)
    assert not min_offsets.admits(9)
    assert min_offsets.admits(10)
    clock.advance(59)
    assert not min_offsets.admits(9)  # from the last that was admitted
    clock.advance(1)
    assert min_offsets.admits(1)  # after the delay to the second
    assert not min_offsets.admits(1)


def test_without_a_minimum_every_micro_batch_is_admitted() -> None:
    min_offsets = limits.MinOffsets(None, 60, ManualClock().monotonic)
    assert min_offsets.admits(0) and min_offsets.admits(0)
