from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kafkalog.format.decisions import DecidedTopic, Decision, Writer, ranges, with_applied
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire

ONE, OTHER = b"1" * 16, b"2" * 16
DECISION = Decision(
    "tx",
    version=3,
    batch_id=7,
    commit_uuid=b"u" * 16,
    run_id="run",
    fingerprint=b"f",
    done=True,
    topics=(DecidedTopic(ONE, "flights", ((0, 2), (5, 5))), DecidedTopic(OTHER, "planes", ((1, 1),))),
    replaced_runs=("a", "b"),
    stays=True,
    decided_us=99,
    query_id="query",
    forgotten=True,
    writers=(Writer(b"u" * 16, "run", "session"), Writer(b"v" * 16, "next")),
    applied=(DecidedTopic(ONE, "flights", ((1, 1),)),),
)


def test_a_decision_comes_back_with_everything_that_it_says() -> None:
    """Each field by itself: none may stand in for another, nor be left out."""
    empty = Decision("tx")
    for field in fields(Decision):
        assert getattr(DECISION, field.name) != getattr(empty, field.name) or field.name == "transactional_id"
        alone = replace(empty, **{field.name: getattr(DECISION, field.name)})
        assert decision_from_wire(pb.Decision.FromString(decision_to_wire(alone).SerializeToString())) == alone
    assert decision_from_wire(decision_to_wire(DECISION)) == DECISION


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
