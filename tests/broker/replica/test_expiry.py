"""What nobody needs any more is forgotten: over real partitions, without ZooKeeper, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.config import BrokerSettings
from broker.replica.expiry import Expiry
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import StorageFailed
from kafkalog.zk import decisions
from tests.broker.replica.test_staged_writes import batch
from tests.broker.requests.hosted import Hosted


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hosted(tmp_path: Path, clock: ManualClock) -> Iterator[Any]:
    directory = LogDirectory(tmp_path / "data", clock=clock)
    yield Hosted(directory)
    directory.close()


@pytest.fixture
def expiry(hosted: Any, clock: ManualClock) -> Expiry:
    hosted.metadata = SimpleNamespace(session=None)
    settings = BrokerSettings.parse({"transaction.staged.retention.ms": 1000})
    return Expiry(hosted, settings, clock, lambda: False)


def test_a_partition_whose_parts_cannot_be_forgotten_keeps_no_other_from_it(
    hosted: Any, clock: ManualClock, expiry: Expiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in hosted.partitions:
        partition.staged.stage(b"%016d" % partition.number, [batch(0)])
    clock.advance(2)

    def fails(*_: object) -> int:
        raise StorageFailed(directory="/data", reason="a broken disk")

    monkeypatch.setattr(hosted.partitions[0].staged, "expire", fails)
    expiry.forget_parts()
    assert [len(partition.staged.all()) for partition in hosted.partitions] == [1, 0]


def test_a_partition_that_is_closed_meanwhile_is_passed_over_without_a_word(
    hosted: Any, clock: ManualClock, expiry: Expiry, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in hosted.partitions:
        partition.staged.stage(b"%016d" % partition.number, [batch(0)])
    clock.advance(2)
    hosted.partitions[0].close()
    expiry.forget_parts()
    assert hosted.partitions[1].staged.all() == []
    assert "staged_parts_not_expired" not in caplog.text


def test_progress_is_looked_at_once_a_minute(
    hosted: Any, clock: ManualClock, expiry: Expiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    began = clock.monotonic()
    monkeypatch.setattr(decisions, "forget_expired", lambda *_: iter(()))
    monkeypatch.setattr(hosted.partitions[1].staged, "forget_silent", lambda: looked.append(clock.monotonic() - began))
    for _ in range(5):
        expiry.look()
        clock.advance(30)
    assert looked == [0, 60, 120]


def test_a_partition_whose_progress_cannot_be_forgotten_keeps_no_other_from_it(
    hosted: Any, expiry: Expiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def fails() -> None:
        looked.append(0)
        raise StorageFailed(directory="/data", reason="a broken disk")

    monkeypatch.setattr(decisions, "forget_expired", lambda *_: iter(()))
    monkeypatch.setattr(hosted.partitions[0].staged, "forget_silent", fails)
    monkeypatch.setattr(hosted.partitions[1].staged, "forget_silent", lambda: looked.append(1))
    expiry.look()
    assert looked == [0, 1]


def test_decisions_are_forgotten_for_a_second_in_a_look_and_the_rest_in_the_next(
    clock: ManualClock, expiry: Expiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def forget_expired(*_: object) -> Iterator[list[object]]:
        for number in range(3):
            clock.advance(0.6)
            steps.append(number)
            yield []

    monkeypatch.setattr(decisions, "forget_expired", forget_expired)
    expiry.forget_decisions()
    assert steps == [0, 1]
    expiry.forget_decisions()
    clock.advance(500)
    expiry.forget_decisions()
    assert steps == [0, 1, 2]
    clock.advance(100)
    expiry.forget_decisions()
    assert steps == [0, 1, 2, 0, 1]


def test_followers_are_woken_only_for_what_is_forgotten(hosted: Any, clock: ManualClock, expiry: Expiry) -> None:
    """They would look at each of a thousand idle partitions every few seconds."""
    _, written = hosted.partitions
    written.staged.stage(b"%016d" % 0, [batch(0)])
    woken: list[int] = []
    for partition in hosted.partitions:
        partition.replica_waiters.register(partial(woken.append, partition.number))
    expiry.forget_parts()
    assert not woken
    clock.advance(2)
    expiry.forget_parts()
    assert woken == [written.number]
    assert not written.staged.all()
