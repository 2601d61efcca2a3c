"""What commands print. No cluster."""

from __future__ import annotations

import re
import sys

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


@pytest.mark.parametrize(
    "width, columns", [(60, "NAME START END OWNER"), (50, "NAME END OWNER"), (44, "NAME OWNER"), (20, "NAME OWNER")]
)
def test_a_narrow_terminal_shows_fewer_columns_and_a_pipe_all(
    width: int, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"name": "flights", "start": 1234567, "end": 7654321, "owner": "o" * 30}

    def heading() -> list[str]:
        output.print_table([row], ["name", "start", "end", "owner"], spare=["lag", "start", "end"])
        return re.findall("[A-Z]{3,}", capsys.readouterr().out.splitlines()[0])

    assert heading() == ["NAME", "START", "END", "OWNER"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert heading() == columns.split()


def test_a_failure_names_its_partition_once(capsys: pytest.CaptureFixture[str]) -> None:
    partition = TopicPartition("t", 0)
    output.say_failure(partition, KafkalogError(reason="t-0\n  is lost"))
    output.say_failure(partition, KafkalogError(reason="the disk is full"))
    assert capsys.readouterr().err == "kafkalog: t-0 is lost\nkafkalog: t-0: the disk is full\n"
