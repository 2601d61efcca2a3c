"""Groups of reads: their names, and starts where a group has committed, in batches and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.client import admin as clients_admin
from kafkalog.client.cluster import Cluster
from kafkalog.errors import CommittedOffsetGone, InvalidArgument, NoCommittedOffset
from kafkalog.zk.paths import is_valid_name
from pyspark_kafkalog.offsets import EARLIEST
from pyspark_kafkalog.options import check_names
from pyspark_kafkalog.read.group_start import default_group, start_of
from pyspark_kafkalog.read.options import parse_source
from pyspark_kafkalog.read.stream import NO_LIMIT
from pyspark_kafkalog.source import BatchReader, StreamReader

SCHEMA = StructType([StructField("offset", LongType())])
EVERYTHING = ReadMaxRows(NO_LIMIT)
AT = TopicPartition("t", 0)
READ = {"kafkalog.bootstrap.servers": "h:1", "subscribe": "t"}


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_read_of_one_topic_has_its_name() -> None:
    assert parse_source(READ).group == "spark-t"
    assert parse_source({**READ, "subscribe": " flights.v1 "}).group == "spark-flights.v1"


def test_other_reads_have_stable_readable_names_of_their_own() -> None:
    assert parse_source({**READ, "subscribe": "b, a"}).group == parse_source({**READ, "subscribe": "a,b"}).group
    names = [
        default_group("subscribe", ("a", "b"), "spark"),
        default_group("subscribe", ("a-b",), "spark"),
        default_group("subscribePattern", "a-b", "spark"),
        default_group("subscribePattern", "^fl(ights|eas)$", "spark"),
        default_group("assign", (TopicPartition("a", 0), TopicPartition("b", 1)), "spark"),
        default_group("subscribe", ("x" * 249,), "spark"),
        default_group("subscribe", tuple(f"topic{number}" for number in range(100)), "spark"),
    ]
    assert names[:5] == [
        "spark-a-b-3151e021",
        "spark-a-b",
        "spark-a-b-9f5ca4e4",
        "spark-_fl_ights_eas_-0abd70a5",
        "spark-a-0-b-1-7e8314e8",
    ]
    assert len(set(names)) == len(names) and all(is_valid_name(name) for name in names)


def test_a_group_of_the_user_s_is_taken_under_either_name() -> None:
    assert parse_source({**READ, "kafkalog.group.id": "mine"}).group == "mine"
    assert parse_source({**READ, "kafka.group.id": "mine"}).group == "mine"
    with pytest.raises(InvalidArgument, match=r"kafkalog.group.id \(a\) and kafka.group.id \(b\) differ"):
        parse_source({**READ, "kafkalog.group.id": "a", "kafka.group.id": "b"})
    with pytest.raises(InvalidArgument, match="'a/b' is not valid"):
        parse_source({**READ, "kafkalog.group.id": "a/b"})


def test_a_prefix_begins_the_name_of_a_group_that_is_not_given() -> None:
    assert parse_source({**READ, "groupIdPrefix": "etl"}).group == "etl-t"
    assert parse_source({**READ, "groupIdPrefix": "etl", "kafka.group.id": "mine"}).group == "mine"
    assert is_valid_name(parse_source({**READ, "subscribe": "a,b", "groupIdPrefix": "p" * 249}).group)


@pytest.mark.parametrize("name", ["committed.fallback", "kafkalog.committed.fallback"])
def test_the_fallback_is_taken_under_either_name(name: str) -> None:
    assert parse_source(READ).committed_fallback == "error"
    check_names({**READ, name: "latest"})
    assert parse_source({**READ, name: "latest"}).committed_fallback == "latest"
    with pytest.raises(InvalidArgument, match="it must be error, earliest or latest"):
        parse_source({**READ, name: "nowhere"})


def test_an_end_is_not_committed() -> None:
    with pytest.raises(InvalidArgument, match="endingOffsets='committed' is not valid"):
        parse_source({**READ, "endingOffsets": "committed"})


# --- starts ----------------------------------------------------------------------------------------------------------


def test_a_committed_offset_that_the_log_has_is_the_start() -> None:
    for offset in (3, 5, 9):  # its first record, one between, and the next to come
        assert start_of(AT, "g", "error", {AT: offset}, 3, 9) == offset


@pytest.mark.parametrize("fallback, start", [("earliest", EARLIEST), ("latest", 9)])
def test_without_one_in_the_log_the_fallback_is(fallback: str, start: int) -> None:
    for committed in ({}, {AT: 2}, {AT: 10}):
        assert start_of(AT, "g", fallback, committed, 3, 9) == start


def test_without_one_and_without_a_fallback_it_is_an_error_with_the_facts() -> None:
    with pytest.raises(NoCommittedOffset, match=r"'g' has committed no offset for t-0; .*.*kafkalog\.group\.id$"):
        start_of(AT, "g", "error", {}, 3, 9)
    for offset in (2, 10):
        says = rf"offset {offset}, which group 'g' has committed for t-0, is outside \[3, 9\]; set committed.fallback"
        with pytest.raises(CommittedOffsetGone, match=says):
            start_of(AT, "g", "error", {AT: offset}, 3, 9)


# --- against a cluster -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def made(admin: Admin, cluster: LocalCluster, topic: str) -> str:
    """A topic of three partitions with 10 records each; group of its name: 4 in the first, a lost one in the second,
    and the third is new to it."""
    admin.create_topic(topic, partitions=3)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(30):
            producer.send(topic, b"v", partition=number % 3)
    admin.delete_records({TopicPartition(topic, 1): 3})
    admin.commit(topic, {TopicPartition(topic, 0): 4, TopicPartition(topic, 1): 1})
    return topic


@pytest.fixture
def options(cluster: LocalCluster, made: str) -> dict[str, str]:
    return {
        "kafkalog.bootstrap.servers": cluster.bootstrap_servers,
        "subscribe": made,
        "startingOffsets": " Committed",
        "kafkalog.group.id": made,
    }


STARTS = [("earliest", [4, 3, 0]), ("latest", [4, 10, 0])]


def rows_of(reader: BatchReader) -> list[list[int]]:
    return [
        [offset for batch in reader.read(planned) for offset in batch.column("offset").to_pylist()]
        for planned in reader.partitions()
    ]


@pytest.mark.parametrize("fallback, starts", STARTS)
def test_a_batch_starts_where_its_group_is(options: dict[str, str], fallback: str, starts: list[int]) -> None:
    reader = BatchReader(SCHEMA, {**options, "committed.fallback": fallback})
    assert rows_of(reader) == [list(range(start, 10)) for start in starts]


@pytest.mark.parametrize("fallback, starts", STARTS)
def test_a_new_stream_starts_where_its_group_is(
    admin: Admin, options: dict[str, str], made: str, fallback: str, starts: list[int]
) -> None:
    stream = StreamReader(SCHEMA, {**options, "kafkalog.committed.fallback": fallback})
    start = stream.initialOffset()
    assert start == {made: {str(number): offset for number, offset in enumerate(starts)}}
    # What others may move is written down by an empty first batch before anything is read.
    admin.commit(made, {TopicPartition(made, 0): 9})
    assert stream.initialOffset() == stream.latestOffset(start, EVERYTHING) == start
    assert stream.latestOffset(start, EVERYTHING) == {made: {"0": 10, "1": 10, "2": 10}}
    stream.stop()


@pytest.mark.parametrize("fallback, starts", STARTS)
def test_trigger_once_reads_from_where_the_group_is_for_it_has_one_micro_batch(
    options: dict[str, str], made: str, fallback: str, starts: list[int]
) -> None:
    stream = StreamReader(SCHEMA, {**options, "kafkalog.committed.fallback": fallback})
    start = stream.initialOffset()
    assert start == {made: {str(number): offset for number, offset in enumerate(starts)}}
    assert stream.latestOffset(start, ReadAllAvailable()) == {made: {"0": 10, "1": 10, "2": 10}}
    stream.stop()


def test_what_is_committed_while_a_start_is_looked_up_is_not_behind_the_end(
    admin: Admin, cluster: LocalCluster, options: dict[str, str], made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = clients_admin.list_offsets

    def others_get_on_then(cluster: Cluster, wanted: Any, *more: Any) -> Any:
        found = listed(cluster, wanted, *more)
        if "latest" in wanted.values():
            for _ in range(3):
                producer.send(made, b"v", partition=0)
            producer.flush(60)
            admin.commit(made, {TopicPartition(made, 0): 12})
        return found

    monkeypatch.setattr(clients_admin, "list_offsets", others_get_on_then)
    with Producer(cluster.bootstrap_servers) as producer:
        planned = BatchReader(SCHEMA, {**options, "committed.fallback": "earliest"}).partitions()
    assert planned[0].value[0].range.start == 4


@pytest.mark.parametrize("fallback", ["error", "latest"])
def test_a_partition_that_came_to_a_topic_of_the_group_is_read_from_its_first_record(
    admin: Admin, options: dict[str, str], made: str, fallback: str
) -> None:
    admin.alter_topic(made, partitions=4)
    admin.commit(made, {TopicPartition(made, 1): 5})
    options = {**options, "committed.fallback": fallback}
    assert rows_of(BatchReader(SCHEMA, options)) == [[*range(4, 10)], [*range(5, 10)], [*range(10)], []]
    stream = StreamReader(SCHEMA, options)
    assert stream.initialOffset() == {made: {"0": 4, "1": 5, "2": 0, "3": 0}}
    stream.stop()


def test_without_a_fallback_both_fail(options: dict[str, str], made: str) -> None:
    with pytest.raises(CommittedOffsetGone, match=rf"offset 1, .* for {made}-1, is outside \[3, 10\]"):
        BatchReader(SCHEMA, options).partitions()
    with pytest.raises(CommittedOffsetGone):
        StreamReader(SCHEMA, options).initialOffset()
    with pytest.raises(NoCommittedOffset, match=f"group 'nobody' has committed no offset for {made}-0"):
        StreamReader(SCHEMA, {**options, "kafkalog.group.id": "nobody"}).initialOffset()


def test_a_topic_created_again_has_nothing_committed(admin: Admin, options: dict[str, str], made: str) -> None:
    admin.delete_topic(made)
    admin.create_topic(made)
    with pytest.raises(NoCommittedOffset):
        StreamReader(SCHEMA, options).initialOffset()


def test_a_stream_without_its_checkpoint_continues_where_it_published(
    admin: Admin, cluster: LocalCluster, made: str
) -> None:
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": made}
    first = StreamReader(SCHEMA, {**options, "startingOffsets": "earliest"})
    first.prepareForTriggerAvailableNow()
    end = first.latestOffset(first.initialOffset(), ReadMaxRows(9))
    assert first.latestOffset(end, ReadMaxRows(9)) != end
    first.stop()
    start = StreamReader(SCHEMA, {**options, "startingOffsets": "committed"}).initialOffset()
    assert start == end
