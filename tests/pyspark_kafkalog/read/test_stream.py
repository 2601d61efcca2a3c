"""What a reader decides by itself, with answers as the test says. Over real brokers: `test_stream_reader.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from kafkalog.errors import LeaderNotAvailable, OffsetNotAvailable
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import EARLIEST, LATEST
from pyspark_kafkalog.read.options import parse_source
from pyspark_kafkalog.read.stream import StreamSession
from pyspark_kafkalog.source import BatchReader, StreamReader

A0, B0 = TopicPartition("a", 0), TopicPartition("b", 0)
OPTIONS = {"kafkalog.bootstrap.servers": "here:1", "subscribe": "a,b"}
SCHEMA = StructType([StructField("offset", LongType())])


@pytest.fixture
def session() -> Any:
    """A stream's, of which a test replaces what asks brokers."""
    return StreamSession(parse_source(OPTIONS))


@pytest.mark.parametrize("reader", [BatchReader, StreamReader])
def test_sparks_stand_in_for_no_partitions_has_no_rows(reader: Any) -> None:
    assert list(reader(SCHEMA, OPTIONS).read(InputPartition(None))) == []


def test_a_new_partition_that_is_gone_again_begins_at_zero(session: Any) -> None:
    session._lookup = SimpleNamespace(earliest_of_those_there=lambda new: {})
    assert session._with_new({A0: 5}, {A0: 9, B0: 3}) == {A0: 5, B0: 0}


def test_what_is_published_is_of_partitions_that_are_there_and_are_what_they_were(session: Any) -> None:
    told: list[Any] = []
    session.progress = SimpleNamespace(at=lambda position, ids: told.append(position))
    session._publish({A0: 5, B0: 3}, {A0: 9})
    session._again = {A0: 0}
    session._publish({A0: 5, B0: 3}, {A0: 9, B0: 3})
    session._again, session._is_unread = {}, True
    session._publish({A0: 5}, {A0: 9})
    assert told == [{A0: 5}, {B0: 3}, {}]


def test_a_start_without_topics_asks_for_no_offsets_of_the_group(session: Any) -> None:
    """Those of no topic in particular are those of all that the group has."""
    forgotten: list[Any] = []
    session._lookup = SimpleNamespace(
        group_offsets=lambda topics, patient: {A0: (5, b"old")} if topics else pytest.fail("asked for all"),
        forget_group_offsets=lambda gone, patient: forgotten.append(gone),
    )
    session._forget_of_deleted({})
    session._forget_of_deleted({"a": b"new"})
    session._forget_of_deleted({"a": b"old"})
    assert forgotten == [{}, {A0: b"old"}, {}]


class Opening:
    """In the place of a Lookup: partition a-0 and, from when it is opened on, b-0."""

    def __init__(self) -> None:
        self.closed = {B0}

    def asked_again(self, attempt: Any, losses: Any) -> Any:
        return attempt(losses)

    def partitions(self, missing: object, *, may_lack_new: bool) -> dict[TopicPartition, bytes]:
        return {A0: b"a", B0: b"b"}

    def unopened(self, partitions: Any) -> set[TopicPartition]:
        return self.closed & set(partitions)

    def at(self, symbol: int, partitions: Any) -> dict[TopicPartition, int]:
        for partition in self.closed & set(partitions):
            raise LeaderNotAvailable(partition=str(partition), broker_id=-1)
        return dict.fromkeys(partitions, 0 if symbol == EARLIEST else 7)

    def known_ends(self, partitions: Any) -> dict[TopicPartition, int]:
        return self.at(LATEST, partitions)

    def earliest_of_those_there(self, partitions: Any) -> dict[TopicPartition, int]:
        return self.at(EARLIEST, partitions)


def test_a_new_partition_is_met_once_its_log_is_open_and_keeps_no_other_waiting(session: Any) -> None:
    session._lookup = opening = Opening()
    session._see_group = lambda *_: None
    assert session._look({A0: 5}) == {A0: 7}
    opening.closed.clear()
    assert session._look({A0: 5}) == {A0: 7, B0: 7}
    opening.closed.add(B0)
    with pytest.raises(LeaderNotAvailable):  # one that the stream has is waited for
        session._look({A0: 7, B0: 7})
    session.available_now = True
    with pytest.raises(LeaderNotAvailable):  # there is no later look
        session._look({A0: 5})


class Elected(Opening):
    """A leader of a-0 that does not know its end while `waits` is set, and a b-0 with another leader."""

    def __init__(self) -> None:
        super().__init__()
        self.closed.clear()
        self.waits: set[TopicPartition] = set()

    def known_ends(self, partitions: Any) -> dict[TopicPartition, int]:
        return {partition: 7 for partition in partitions if partition not in self.waits}

    def at(self, symbol: int, partitions: Any) -> dict[TopicPartition, int]:
        for partition in self.waits & set(partitions) if symbol == LATEST else ():
            raise OffsetNotAvailable(partition=str(partition), leader_epoch=1)
        return super().at(symbol, partitions)


def test_a_partition_whose_new_leader_does_not_know_its_end_has_nothing_new_and_does_not_go_back(session: Any) -> None:
    session._lookup = elected = Elected()
    session._see_group = lambda *_: None
    assert session._look({A0: 5, B0: 5}) == {A0: 7, B0: 7}
    elected.waits = {A0}
    assert session._look({A0: 5, B0: 5}) == {A0: 7, B0: 7}, "as it was seen last"
    session.latest = {}
    assert session._look({A0: 5, B0: 5}) == {A0: 5, B0: 7}, "after a restart nobody has seen more than was read"
    assert session._look({B0: 5}) == {B0: 7}, "a new one is met later"
    with pytest.raises(OffsetNotAvailable):
        session._look({A0: 5, B0: 5}, is_last=True)


@pytest.mark.parametrize("everything", [False, True])
def test_only_what_a_trigger_ends_with_waits_for_a_leader_that_does_not_know_its_end(
    session: Any, everything: bool
) -> None:
    session._lookup = elected = Elected()
    session._see_group = lambda *_: None
    session.progress = SimpleNamespace(at=lambda position, ids: None)
    session.available_now, elected.waits = not everything, {A0}
    with pytest.raises(OffsetNotAvailable):
        session._next_position({A0: 5, B0: 5}, 100, everything)
    elected.waits = set()
    assert session._next_position({A0: 5, B0: 5}, 100, everything) == {A0: 7, B0: 7}
    elected.waits = {A0}
    if not everything:
        assert session._next_position({A0: 7, B0: 7}, 100, everything) == {A0: 7, B0: 7}, "its target is known"
