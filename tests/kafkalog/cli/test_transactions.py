"""`kafkalog transactions`: what it lists. What it does to a transaction stands with the coordinator's tests."""

from __future__ import annotations

import time

import pytest

from kafkalog.cli import transactions
from kafkalog.format.decisions import DecidedTopic, Decision
from kafkalog.wire.transactions_pb2 import StagedSet
from tests.kafkalog.cli.command_line import Ran


def test_what_other_attempts_have_staged_stands_beside_a_decision_and_is_none_of_its_bytes() -> None:
    decision = Decision(
        "q", version=3, batch_id=7, commit_uuid=b"a" * 16, topics=(DecidedTopic(b"t" * 16, "t", ((0, 2),)),)
    )

    def staged(partition: int, batch_id: int, commit_uuid: bytes, length: int) -> StagedSet:
        name = "q" if commit_uuid else ""
        return StagedSet(
            topic_id=b"t" * 16, partition=partition, transactional_id=name, producer_id=5, batch_id=batch_id,
            commit_uuid=commit_uuid, length=length,
        )  # fmt: skip

    sets = [staged(0, 7, b"a" * 16, 10), staged(1, 7, b"a" * 16, 20), staged(0, 7, b"b" * 16, 100)]
    sets += [staged(0, 8, b"", 1000), staged(0, 8, b"", 2000), staged(1, 8, b"", 4000)]
    rows = transactions._rows([decision], sets)
    assert [(row["transaction"], row["batch"], row["state"], row["partitions"], row["bytes"]) for row in rows] == [
        ("q", 7, "decided", 3, 30),
        ("producer 5", 8, "staged", 2, 7000),
        ("q", 7, "prepared", 1, 100),
    ]


@pytest.mark.parametrize("action", ["describe", "abort", "resolve"])
def test_an_unknown_transaction_fails(action: str, topic: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ran = Ran(capfdbinary, "transactions", action, "nope")
    ran.fails_with("there is no transaction 'nope'")
    assert ran.out == ""


def test_an_age_is_never_negative() -> None:
    assert transactions._age((time.time_ns() // 1000) + 60_000_000) == 0
    assert 59 <= transactions._age((time.time_ns() // 1000) - 60_000_000) <= 120
