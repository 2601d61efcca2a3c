"""What a task does about answers that end early, go back, or do not come. Over real brokers: `test_rules_*.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from kafkalog.errors import CorruptBatch, DataLost, KafkalogError, LeaderNotAvailable, OffsetOutOfRange, RequestTimedOut
from kafkalog.records import TopicPartition
from pyspark_kafkalog.columns import Rows
from pyspark_kafkalog.offsets import EARLIEST, InputRange
from pyspark_kafkalog.read import partition_reader as reading
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.options import SourceOptions, parse_source
from pyspark_kafkalog.read.partition_reader import PlannedRange

A0 = TopicPartition("a", 0)
SCHEMA = StructType([StructField("offset", LongType())])


def options(**given: str) -> SourceOptions:
    texts = {name.replace("__", "."): text for name, text in given.items()}
    return parse_source({"kafkalog.bootstrap.servers": "here:1", "subscribe": "a", **texts})


def range_read(start: int, end: int, fail: bool = True) -> reading._RangeRead:
    cluster: Any = None
    return reading._RangeRead(cluster, PlannedRange(InputRange(A0, start, end)), start, end, Losses(fail))


def test_a_range_of_which_less_comes_than_was_planned_is_lost_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalog.client.consumer.range_fetch.fetch_range", lambda *_, **__: iter(()))
    rows: Any = Rows(reading_schema(), "a", 0)
    with pytest.raises(DataLost, match="a-0 was read to offset 3, not to 9"):
        list(range_read(3, 9).batches(rows))


def reading_schema() -> Any:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(SCHEMA, timezone="UTC")


@pytest.mark.parametrize(("ends", "goes_on"), [(7, 7), (2, 4), (4, 4)])
def test_behind_damage_reading_continues_and_never_back(ends: int, goes_on: int) -> None:
    one = range_read(0, 9, fail=False)
    one._position = 4
    damage = CorruptBatch(partition="a-0", offset=1, reason="damaged", end_offset=ends)
    one._go_on_behind(damage)
    assert one._position == 4  # it is looked at again
    one._go_on_behind(damage)
    assert one._position == goes_on


def test_damage_whose_end_only_the_first_answer_tells_is_gone_on_behind() -> None:
    """The second one may hold the damaged batch alone."""
    one = range_read(0, 9, fail=False)
    one._position = 4
    one._go_on_behind(CorruptBatch(partition="a-0", offset=4, reason="damaged", end_offset=7))
    one._go_on_behind(CorruptBatch(partition="a-0", offset=4, reason="damaged"))
    assert one._position == 7
    with pytest.raises(CorruptBatch):  # of another place it tells nothing
        one._go_on_behind(CorruptBatch(partition="a-0", offset=7, reason="damaged"))


@pytest.mark.parametrize(("met", "told"), [([], 0), ([4], 1), ([0], 1)], ids=["nothing", "records", "damage"])
def test_what_is_gone_is_no_loss_to_a_read_from_the_earliest_only_if_it_met_nothing(
    met: list[int], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = range_read(EARLIEST, 9, fail=False)
    one._position = 0
    answers = iter([*met, OffsetOutOfRange(offset=0, partition="a-0", start_offset=6, end_offset=9)])

    def fetch_range(*_: object, **__: object) -> Iterator[Any]:
        for answer in answers:
            if isinstance(answer, KafkalogError):
                raise answer
            if not answer:
                raise CorruptBatch(partition="a-0", offset=0, reason="damaged", end_offset=5)
            yield [(SimpleNamespace(end_offset=answer), None)]

    monkeypatch.setattr("kafkalog.client.consumer.range_fetch.fetch_range", fetch_range)
    monkeypatch.setattr(reading, "_offsets", lambda *_: {A0: 6})
    losses: list[str] = []
    monkeypatch.setattr(one._losses, "found", losses.append)
    while one._position < 6:
        list(one._fetched())
        assert one._lost is not None
        one._go_on_behind(one._lost)
    assert len(losses) == told


def test_damage_of_unknown_length_fails_whatever_fail_on_data_loss_says() -> None:
    with pytest.raises(CorruptBatch):
        range_read(0, 9, fail=False)._go_on_behind(CorruptBatch(partition="a-0", offset=1, reason="damaged"))


@pytest.mark.parametrize(("given", "request_ms"), [({}, "400"), ({"kafkalog__request__timeout__ms": "300"}, "300")])
def test_poll_timeout_bounds_every_wait_of_the_client_and_lengthens_none(
    given: dict[str, str], request_ms: str
) -> None:
    settings = reading._task_settings(options(kafkaConsumer__pollTimeoutMs="400", **given))
    assert settings == {
        "retry.timeout.ms": "400",
        "bootstrap.timeout.ms": "400",
        "request.timeout.ms": request_ms,
    }
    assert "retry.timeout.ms" not in reading._task_settings(options(**given))


@pytest.mark.parametrize(
    ("error", "given", "raised"),
    [
        (LeaderNotAvailable(partition="a-0", broker_id=1), {"kafkaConsumer__pollTimeoutMs": "400"}, RequestTimedOut),
        (LeaderNotAvailable(partition="a-0", broker_id=1), {}, LeaderNotAvailable),
        (DataLost(reason="gone"), {"kafkaConsumer__pollTimeoutMs": "400"}, DataLost),
    ],
)
def test_what_could_have_passed_is_reported_as_the_poll_timeout_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, error: KafkalogError, given: dict[str, str], raised: type[KafkalogError]
) -> None:
    def fail(*_: object) -> Iterator[Any]:
        raise error
        yield

    monkeypatch.setattr(reading, "_read_ranges", fail)
    with pytest.raises(raised) as told:
        list(reading.read_ranges(options(**given), SCHEMA, [PlannedRange(InputRange(A0, 0, 1))]))
    if raised is RequestTimedOut:
        assert "a read of a-0 (kafkaConsumer.pollTimeoutMs; " in str(told.value)
