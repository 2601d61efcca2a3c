from __future__ import annotations

from dataclasses import replace

import pytest

from kafkalog.errors import InvalidRequest
from kafkalog.format.decisions import (
    DecidedTopic,
    Decision,
    Writer,
    check_transactional_id,
    ranges,
    with_applied,
)

ONE, OTHER = b"1" * 16, b"2" * 16
DECISION = Decision(
    "tx",
    batch_id=7,
    commit_uuid=b"u" * 16,
    done=True,
    topics=(DecidedTopic(ONE, "flights", ((0, 2), (5, 5))), DecidedTopic(OTHER, "planes", ((1, 1),))),
    applied=(DecidedTopic(ONE, "flights", ((1, 1),)),),
)


def test_a_transactional_id_has_up_to_1000_characters() -> None:
    check_transactional_id("é")
    check_transactional_id("é" * 1000)
    for wrong in ("", "é" * 1001):
        with pytest.raises(InvalidRequest, match=f"must have 1 to 1000 characters, not {len(wrong)}"):
            check_transactional_id(wrong)


@pytest.mark.parametrize(
    ("topic_id", "partitions"), [(ONE, {0, 1, 2, 5}), (OTHER, {1}), (b"3" * 16, set())], ids=["one", "other", "none"]
)
def test_a_batch_has_parts_for_the_partitions_in_its_ranges_and_no_others(
    topic_id: bytes, partitions: set[int]
) -> None:
    assert {number for number in range(-1, 9) if DECISION.has(topic_id, number)} == partitions


def test_ranges_and_numbers_are_each_others_reverse() -> None:
    assert ranges([5, 0, 2, 1, 5]) == ((0, 2), (5, 5))
    assert ranges([]) == ()
    assert DecidedTopic(ONE, "t", ((0, 2), (5, 5))).numbers() == [0, 1, 2, 5]


def test_a_decision_is_open_from_its_batch_until_that_is_done() -> None:
    assert replace(DECISION, done=False).is_open
    assert replace(DECISION, batch_id=0, done=False).is_open
    assert not DECISION.is_open
    assert not Decision("tx").is_open


@pytest.mark.parametrize(
    ("one", "other", "is_one_run"),
    [
        (("run", "s"), ("run", "t"), True),  # where both are known, the ids count
        (("run", "s"), ("next", "s"), False),
        (("", "s"), ("run", "s"), True),
        (("", "s"), ("", "s"), True),
        (("", "s"), ("run", "t"), False),
        (("", "s"), ("run", ""), False),
        (("", ""), ("run", "s"), False),
        (("", ""), ("run", ""), False),  # two sessions that are not known are not one
        (("", ""), ("", ""), False),
    ],
)
def test_writes_are_of_one_run_only_where_something_known_says_so(
    one: tuple[str, str], other: tuple[str, str], is_one_run: bool
) -> None:
    """Otherwise a write whose run is not known would fail with VersionWrittenTwice instead of being skipped."""
    first, second = Writer(b"u" * 16, *one), Writer(b"v" * 16, *other)
    assert first.is_in_run_of(second) is second.is_in_run_of(first) is is_one_run


def test_a_batch_is_done_once_its_last_partition_is_known_to_have_it() -> None:
    decision = replace(DECISION, done=False)
    assert with_applied(decision, lambda topic_id, number: False) == decision
    more = with_applied(decision, lambda topic_id, number: (topic_id, number) in ((ONE, 2), (OTHER, 1), (ONE, 7)))
    assert more == replace(
        decision, applied=(DecidedTopic(ONE, "flights", ((1, 2),)), DecidedTopic(OTHER, "planes", ((1, 1),)))
    )
    assert with_applied(more, lambda topic_id, number: number == 0) == replace(
        more, applied=(DecidedTopic(ONE, "flights", ((0, 2),)), DecidedTopic(OTHER, "planes", ((1, 1),)))
    )
    assert with_applied(more, lambda topic_id, number: number in (0, 5)) == replace(decision, done=True, applied=())
