"""What a decision says of a set that is prepared: the rule of in-doubt recovery, by itself."""

from __future__ import annotations

import pytest

from broker.replica.in_doubt import Resolution, resolution
from broker.staging.format import PreparedSet
from kafkalog.format.decisions import DecidedTopic, Decision

TOPIC, UUID, ANOTHER = b"t" * 16, b"u" * 16, b"x" * 16
SET = PreparedSet("tx", 1, batch_id=7, commit_uuid=UUID, version=3, parts=())


@pytest.mark.parametrize(
    ("version", "batch_id", "commit_uuid", "done", "partition", "expected"),
    [
        (2, 7, UUID, False, 0, Resolution.WAIT),
        (3, 7, UUID, False, 0, Resolution.WAIT),  # the coordinator may still decide for it
        (3, 8, ANOTHER, True, 0, Resolution.WAIT),
        (4, 6, ANOTHER, True, 0, Resolution.WAIT),  # an abort: the version alone was raised, and this batch is to come
        (4, 7, UUID, False, 0, Resolution.APPLY),
        (9, 7, UUID, False, 2, Resolution.APPLY),
        (4, 7, UUID, False, 3, Resolution.WAIT),  # not among the decided partitions
        (4, 7, UUID, True, 0, Resolution.DROP),
        (4, 7, ANOTHER, False, 0, Resolution.DROP),
        (4, 8, UUID, False, 0, Resolution.DROP),
        (4, 7, UUID, False, 1, Resolution.DROP),  # it is reported to have the batch
    ],
)
def test_a_prepared_set_waits_is_applied_or_dropped_as_the_decision_says(
    version: int, batch_id: int, commit_uuid: bytes, done: bool, partition: int, expected: Resolution
) -> None:
    topics = (DecidedTopic(TOPIC, "flights", ((0, 2),)),)
    applied = (DecidedTopic(TOPIC, "flights", ((1, 1),)),)
    decision = Decision("tx", version, batch_id, commit_uuid, done=done, topics=topics, applied=applied)
    assert resolution(decision, SET, TOPIC, partition) is expected


def test_a_set_of_another_topic_of_that_name_waits() -> None:
    decision = Decision("tx", 4, 7, UUID, topics=(DecidedTopic(TOPIC, "flights", ((0, 2),)),))
    assert resolution(decision, SET, b"o" * 16, 0) is Resolution.WAIT
