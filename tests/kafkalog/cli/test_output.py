"""What commands print. No cluster."""

from __future__ import annotations

import pytest

from kafkalog import TopicPartition
from kafkalog.cli import output
from kafkalog.errors import KafkalogError


def test_counted_uses_singular_and_plural() -> None:
    assert [output.counted(number, "batch") for number in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert [output.counted(number, "broker") for number in (0, 1, 2)] == ["0 brokers", "1 broker", "2 brokers"]


def test_a_cell_is_for_people() -> None:
    values = [None, "", True, False, 0, [], [1, 2], (), {}, {"a": 1, "b": 2}, "text"]
    shown = ["-", "-", "yes", "no", "0", "-", "1, 2", "-", "-", "a=1 b=2", "text"]
    assert [output._cell(value) for value in values] == shown


def test_a_failure_names_its_partition_once(capsys: pytest.CaptureFixture[str]) -> None:
    partition = TopicPartition("t", 0)
    output.say_failure(partition, KafkalogError(reason="t-0\n  is lost"))
    output.say_failure(partition, KafkalogError(reason="the disk is full"))
    assert capsys.readouterr().err == "kafkalog: t-0 is lost\nkafkalog: t-0: the disk is full\n"
