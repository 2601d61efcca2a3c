from __future__ import annotations

from dataclasses import fields, replace

from kafkalog.format.decisions import DecidedTopic, Decision, Writer
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
    unknown='{"weight": 3}',
)


def test_a_decision_comes_back_with_everything_that_it_says() -> None:
    """Each field by itself: none may stand in for another, nor be left out."""
    empty = Decision("tx")
    for field in fields(Decision):
        assert getattr(DECISION, field.name) != getattr(empty, field.name) or field.name == "transactional_id"
        alone = replace(empty, **{field.name: getattr(DECISION, field.name)})
        assert decision_from_wire(pb.Decision.FromString(decision_to_wire(alone).SerializeToString())) == alone
    assert decision_from_wire(decision_to_wire(DECISION)) == DECISION
