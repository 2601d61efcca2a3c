"""A loss fails the read, or is told once: what failOnDataLoss says."""

from __future__ import annotations

import pytest

from kafkalog.errors import DataLost, UnknownTopic
from pyspark_kafkalog.read.data_loss import Losses


def test_a_loss_fails_the_read_each_time_and_says_how_to_continue(caplog: pytest.LogCaptureFixture) -> None:
    losses = Losses(fail=True)
    for reason in ("t-0 begins at 7", "t-0 begins at 7", "t-1 is gone"):
        with pytest.raises(DataLost) as raised:
            losses.found(reason)
        assert (
            raised.value.facts["reason"]
            == f"{reason}; set failOnDataLoss=false to continue with the records that are left"
        )
    assert caplog.text == ""


def test_a_loss_that_is_to_be_gone_over_is_reported_once_each(caplog: pytest.LogCaptureFixture) -> None:
    losses = Losses(fail=False)
    for reason in ("t-0 begins at 7", "t-1 is gone", "t-0 begins at 7", "t-0 begins at 8", "t-1 is gone"):
        losses.found(reason)
    told = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for line, reason in zip(told, ("t-0 begins at 7", "t-1 is gone", "t-0 begins at 8"), strict=True):
        assert line.startswith("data_lost ") and reason in line


def test_a_loss_that_was_accepted_before_fails_nothing_and_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    losses = Losses(fail=True, accepted={"t-1 is gone"})
    losses.found("t-1 is gone", UnknownTopic(topic="t"))
    with pytest.raises(UnknownTopic):
        losses.found("t-2 is gone", UnknownTopic(topic="t"))
    assert (losses.gone_over, caplog.text) == ({"t-1 is gone"}, "")


def test_a_loss_is_logged_for_each_read(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Losses(fail=False).found("t-1 is gone")
    assert len(caplog.records) == 2
