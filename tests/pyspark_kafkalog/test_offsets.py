"""Offsets without a broker: text in and out, resolving, the proportional limit, ranges."""

from __future__ import annotations

import json
import re

import pytest

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from pyspark_kafkalog import offsets
from pyspark_kafkalog.offsets import EARLIEST, LATEST, Bound, InputRange

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("earliest", EARLIEST),
        (" Latest ", LATEST),
        ('{"a": {"0": 23, "1": -2}, "b": {"0": -1}}', {A0: 23, A1: EARLIEST, B0: LATEST}),
        ("{}", {}),
    ],
)
def test_a_position_is_a_symbol_or_an_offset_for_each_partition(text: str, position: object) -> None:
    assert offsets.parse_position("startingOffsets", text) == position


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("newest", "expected earliest, latest or"),
        ('{"a": {"0": 23}', "expected earliest, latest or"),
        ("[1]", "expected earliest, latest or"),
        ('{"a": 5}', "'a' must have an offset for each partition"),
        ('{"a": {"0": -3}}', "'0': -3 of topic 'a'"),
        ('{"a": {"0": "5"}}', "'0': \"5\" of topic 'a'"),
        ('{"a": {"0": 1.5}}', "'0': 1.5 of topic 'a'"),
        ('{"a": {"0": true}}', "'0': true of topic 'a'"),
        ('{"a": {"x": 5}}', "'x': 5 of topic 'a'"),
        ('{"a": {"0": 5, "0": 6}}', "twice"),
        ('{"a": {"0": 5, "00": 6}}', "twice"),
    ],
)
def test_a_wrong_position_names_its_option_and_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        offsets.parse_position("startingOffsets", text)
    assert "startingOffsets" in str(raised.value)
    assert says in str(raised.value)


def test_an_assignment_lists_partitions_once_and_in_order() -> None:
    assert offsets.parse_assignment('{"b": [0], "a": [1, 0, 1]}') == (A0, A1, B0)
    many = tuple(TopicPartition("a", number) for number in range(30))  # a set of them is in order by no chance
    assert offsets.parse_assignment(f'{{"a": {[each.partition for each in reversed(many)]}}}') == many


@pytest.mark.parametrize("text", ["a", "{}", '{"a": 0}', '{"a": [-1]}', '{"a": ["0"]}', '{"a": [true]}', '["a"]'])
def test_a_wrong_assignment_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="assign"):
        offsets.parse_assignment(text)


def test_the_offset_log_has_one_text_for_equal_offsets() -> None:
    ten = TopicPartition("a", 10)
    forwards = {A0: 1, A1: 2, ten: 3, B0: 4}
    backwards = dict(reversed(forwards.items()))
    text = json.dumps(offsets.to_log(forwards))
    assert text == json.dumps(offsets.to_log(backwards)) == '{"a": {"0": 1, "1": 2, "10": 3}, "b": {"0": 4}}'
    assert offsets.from_log(json.loads(text)) == forwards


@pytest.mark.parametrize("logged", [None, {}])
def test_a_log_entry_from_before_any_topic_matched_has_no_partition(logged: dict[str, dict[str, int]] | None) -> None:
    assert offsets.from_log(logged) == {}


def test_a_symbol_stands_for_every_partition() -> None:
    assert offsets.position_of_each(Bound("startingOffsets", EARLIEST), [B0, A0]) == {A0: EARLIEST, B0: EARLIEST}


def test_listed_offsets_must_be_those_of_the_partitions_read() -> None:
    assert offsets.position_of_each(Bound("startingOffsets", {A0: 3, A1: LATEST}), [A1, A0]) == {A0: 3, A1: LATEST}
    for listed in ({A0: 3}, {A0: 3, A1: 4, B0: 5}, {}):
        with pytest.raises(InvalidArgument, match="read are a-0, a-1"):
            offsets.position_of_each(Bound("startingOffsets", listed), [A0, A1])


def test_symbols_are_replaced_and_offsets_kept() -> None:
    positions = {A0: EARLIEST, A1: LATEST, B0: 7}
    assert offsets.resolved(positions, {A0: 1, A1: 2, B0: 3}, {A0: 10, A1: 20, B0: 30}) == {A0: 1, A1: 20, B0: 7}


@pytest.mark.parametrize(
    ("starting", "ending", "says"),
    [
        (LATEST, LATEST, "startingOffsets of a batch read cannot be latest"),
        ({A0: LATEST}, LATEST, r"cannot be latest \(-1\) for a-0"),
        (EARLIEST, EARLIEST, "endingOffsets of a batch read cannot be earliest"),
        (EARLIEST, {A1: EARLIEST}, r"cannot be earliest \(-2\) for a-1"),
        ({A0: 1}, {A1: 2}, "must list the same partitions: a-0 and a-1"),
        ({A0: 3}, {A0: 2}, r"start offset 3 of a-0 \(startingOffsets\) is greater than its end offset 2"),
    ],
)
def test_a_batch_range_that_can_not_be_is_refused(starting: object, ending: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        offsets.check_batch_bounds(Bound("startingOffsets", starting), Bound("endingOffsets", ending))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starting", "ending"),
    [(EARLIEST, LATEST), ({A0: 3}, {A0: 3}), ({A0: 3}, {A0: LATEST}), ({A0: EARLIEST}, {A0: 0}), ({A0: 3}, LATEST)],
)
def test_a_batch_range_that_can_be_is_accepted(starting: object, ending: object) -> None:
    offsets.check_batch_bounds(Bound("startingOffsets", starting), Bound("endingOffsets", ending))  # type: ignore[arg-type]


def by_time(option: str, position: object) -> Bound:
    return Bound(option, position, by_time=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starting", "ending", "says"),
    [
        (5, 4, "the start timestamp 5 us (startingTimestamp) is greater than its end timestamp 4 us (endingTimestamp)"),
        (1, 0, "the start timestamp 1 us (startingTimestamp) is greater"),
        ({A0: 5, A1: 9}, {A0: 5, A1: 8}, "the start timestamp 9 us of a-1 (startingTimestamp) is greater"),
        ({A0: 5, A1: 9}, 8, "the start timestamp 9 us of a-1"),
        (9, {A1: 8, A0: 9}, "the start timestamp 9 us of a-1"),
        ({A0: 5}, {A1: 8}, "must list the same partitions: a-0 and a-1"),
    ],
)
def test_a_batch_range_by_time_that_ends_before_it_starts_is_refused(
    starting: object, ending: object, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        offsets.check_batch_bounds(by_time("startingTimestamp", starting), by_time("endingTimestamp", ending))


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (by_time("startingTimestamp", 5), by_time("endingTimestamp", 5)),
        (by_time("startingTimestamp", {A0: 5, A1: 6}), by_time("endingTimestamp", {A0: 5, A1: 9})),
        (by_time("startingTimestamp", LATEST), by_time("endingTimestamp", EARLIEST)),  # times like any other
        (by_time("startingTimestamp", {A0: 50}), Bound("endingOffsets", {A0: 10})),
        (Bound("startingOffsets", {A0: 50}), by_time("endingTimestamp", {A0: 10})),
        (Bound("startingOffsets", {A0: 50}), by_time("endingTimestamp", 10)),
        (Bound("startingOffsets", EARLIEST), by_time("endingTimestamp", {A0: 10})),
    ],
)
def test_a_time_is_compared_with_a_time_only(start: Bound, end: Bound) -> None:
    offsets.check_batch_bounds(start, end)


def test_listed_positions_name_the_symbols_that_may_stand_for_offsets_and_for_no_times() -> None:
    with pytest.raises(InvalidArgument, match="-2 for earliest, -1 for latest"):
        offsets.position_of_each(Bound("startingOffsets", {A0: 3}), [A0, A1])
    with pytest.raises(InvalidArgument) as refused:
        offsets.position_of_each(by_time("startingTimestamp", {A0: 3}), [A0, A1])
    assert "for earliest" not in str(refused.value) and "startingTimestamp" in str(refused.value)
    assert offsets.partition_names([]) == "none"


def test_a_wrong_end_is_seen_behind_a_start_by_time() -> None:
    with pytest.raises(InvalidArgument, match="endingOffsets of a batch read cannot be earliest"):
        offsets.check_batch_bounds(by_time("startingTimestamp", 5), Bound("endingOffsets", EARLIEST))


def test_a_partition_that_is_new_is_read_from_its_first_record() -> None:
    assert offsets.input_ranges({}, {A0: 1}) == [InputRange(A0, 0, 1)]
    assert offsets.input_ranges({}, {A0: 0}) == []


def test_a_partition_new_to_the_stream_begins_at_zero() -> None:
    assert offsets.input_ranges({A0: 10}, {A0: 10, A1: 4}) == [InputRange(A1, 0, 4)]


def test_ranges_are_in_order_and_have_records() -> None:
    start = {A0: 1, A1: 5, B0: 9}
    assert offsets.input_ranges(start, {B0: 12, A0: 4, A1: 5}) == [InputRange(A0, 1, 4), InputRange(B0, 9, 12)]


def test_a_start_beyond_the_end_gives_no_range() -> None:
    # Batch 0 of a stream from latest, replayed in a new process: the start is newer than the logged end.
    assert offsets.input_ranges({A0: 25}, {A0: 10}) == []


def test_a_position_ahead_of_the_log_or_without_its_partition_is_a_loss() -> None:
    assert offsets.whats_gone({A0: 5}, {A0: 5, A1: 0}) == offsets.whats_moved_back({A0: 5}, {A0: 5, A1: 0}) == []
    [says] = offsets.whats_moved_back({A0: 5, B0: 1}, {A0: 4})
    assert "offset 5 of a-0, which now ends at 4" in says
    [says] = offsets.whats_gone({A0: 5, A1: 0, B0: 2}, {A0: 4})
    assert "a-1, b-0, deleted since" in says
