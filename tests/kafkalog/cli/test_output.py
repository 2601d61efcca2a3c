"""What commands share: arguments they read, and what they print. No cluster."""

from __future__ import annotations

import time

import click
import pytest

from kafkalog import TopicPartition
from kafkalog.cli import groups, output
from kafkalog.client.admin import AtTimestamp
from kafkalog.errors import KafkalogError


@pytest.mark.parametrize(
    ("text", "named"),
    [("t", ("t", [])), ("t:0", ("t", [0])), ("t:2,0,2", ("t", [0, 2])), ("a.b:1, 3", ("a.b", [1, 3]))],
)
def test_a_topic_and_its_partitions_are_read(text: str, named: tuple[str, list[int]]) -> None:
    assert output.partitions_named(text) == named


@pytest.mark.parametrize("text", ["", ":0", "t:", "t:-1", "t:0,", "t:x"])
def test_what_names_no_partitions_is_wrong_usage(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected TOPIC or TOPIC:0,2"):
        output.partitions_named(text)


def test_a_setting_is_a_name_and_a_value_without_the_spaces_around() -> None:
    context, parameter = click.Context(click.Command("c")), click.Option(["--config"])
    assert output.pairs(context, parameter, [" a = b=c ", "d="]) == {"a": "b=c", "d": ""}
    for text in ("a", "=b"):
        with pytest.raises(click.BadParameter, match=f"expected NAME=VALUE, not '{text}'"):
            output.pairs(context, parameter, [text])


def test_what_is_counted_has_its_number() -> None:
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


@pytest.mark.parametrize(
    ("text", "timestamp_us"),
    [
        ("1500", 1_500_000),
        ("1970-01-02T00:00:01.25", 86_401_250_000),
        ("1970-01-02T00:00:01.25+01:00", 82_801_250_000),
        ("1970-01-01", 0),
        ("1969-12-31T23:59:59.5", -500_000),
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str, timestamp_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert groups._timestamp(text) == AtTimestamp(timestamp_us)
    finally:
        monkeypatch.undo()
        time.tzset()
