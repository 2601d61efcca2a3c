"""Lag of a query from its progress: the arithmetic, and Spark's own progress of a stream that starts as committed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.errors import InvalidArgument
from pyspark_kafkalog.lag import Lag, LagListener, kafkalog_lag
from tests.waiting import waited_for

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)


def progress(*sources: tuple[Any, Any], description: str = "PythonMicroBatchStream") -> dict[str, Any]:
    """A progress as Spark's JSON has it, of sources by (end, latest)."""
    return {
        "sources": [{"description": description, "endOffset": end, "latestOffset": latest} for end, latest in sources]
    }


def test_lag_is_the_end_of_the_log_minus_the_end_of_the_batch() -> None:
    lag = kafkalog_lag(progress(('{"t": {"0": 5, "1": 9}}', '{"t": {"0": 12, "1": 9}}')))
    assert lag == Lag({T0: 7, T1: 0})
    assert lag.total == 7
    assert (lag.furthest, lag.partitions_behind) == (T0, 1)
    assert (Lag({T0: 0}).furthest, Lag({}).furthest) == (None, None)


def test_a_query_without_progress_has_no_lag_yet() -> None:
    with pytest.raises(InvalidArgument, match=r"no progress yet \(lastProgress is None\); ask again after its"):
        kafkalog_lag(None)


@pytest.mark.parametrize("null", [None, "null", "None"])
def test_the_lag_is_unknown_after_a_micro_batch_that_a_restart_repeated(
    null: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    told = progress(('{"t": {"0": 5}}', null))
    with pytest.raises(InvalidArgument, match=r"no latestOffset, because a restart repeated its micro-batch; ask"):
        kafkalog_lag(told)
    assert kafkalog_lag(progress(('{"t": {"0": 5}}', null), description="KafkaV2[Subscribe[t]]")) == Lag({})
    caplog.set_level(logging.INFO, "pyspark_kafkalog.lag")
    event: Any = SimpleNamespace(progress=Told(told))
    LagListener().onQueryProgress(event)
    [line] = [record.message for record in caplog.records]
    assert "stream_lag_unknown query=3f1c batch=7 reason=" in line


def test_offsets_may_be_parsed_already() -> None:
    assert kafkalog_lag(progress(({"t": {"0": 5}}, {"t": {"0": 12}}))).total == 7


def test_a_new_partition_is_behind_from_its_first_record_and_a_deleted_one_is_not() -> None:
    assert kafkalog_lag(progress(('{"t": {"0": 5}, "u": {"0": 3}}', '{"t": {"0": 5, "1": 4}}'))) == Lag({T0: 0, T1: 4})


def test_an_end_beyond_an_older_latest_is_no_negative_lag() -> None:
    assert kafkalog_lag(progress(('{"t": {"0": 5}}', '{"t": {"0": 4}}'))).total == 0


def test_sources_are_added_up_and_what_two_read_counts_once() -> None:
    sources = [
        ('{"t": {"0": 3}, "u": {"0": 0}}', '{"t": {"0": 9}, "u": {"0": 2}}'),
        ('{"t": {"0": 5}}', '{"t": {"0": 9}}'),
    ]
    assert kafkalog_lag(progress(*sources)) == kafkalog_lag(progress(*reversed(sources))) == Lag({T0: 6, U0: 2})


@pytest.mark.parametrize(
    "end, latest",
    [(None, None), ("null", "null"), ("None", "None"), ("{}", "null"), ("5", "7"), ('{"offset": 5}', '{"offset": 7}')],
)
def test_what_is_not_ours_or_not_known_yet_has_no_lag(end: Any, latest: Any) -> None:
    assert kafkalog_lag(progress((end, latest))) == Lag({})
    ours = ('{"t": {"0": 5}}', '{"t": {"0": 9}}')
    assert kafkalog_lag(progress((end, latest), ours)) == Lag({T0: 4})
    assert kafkalog_lag(progress(ours, description="KafkaV2[Subscribe[t]]")) == Lag({})


def test_of_partitions_as_far_behind_the_first_by_name_is_the_furthest() -> None:
    assert Lag({U0: 4, T1: 4, T0: 1}).furthest == T1


class Told(dict[str, Any]):
    """A progress as Spark hands it to a listener."""

    name = None
    id = "3f1c"
    batchId = 7


def test_a_query_without_a_name_is_logged_by_its_id_and_one_without_our_sources_not_at_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pyspark_kafkalog.lag")
    for sources in ((None, None), ('{"t": {"0": 5}}', '{"t": {"0": 9}}')):
        event: Any = SimpleNamespace(progress=Told(progress(sources)))
        LagListener().onQueryProgress(event)
    [line] = [record.message for record in caplog.records]
    assert "stream_lag query=3f1c batch=7 lag=4" in line


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


def test_a_query_that_starts_as_committed_tells_its_lag_batch_by_batch(
    spark: SparkSession, cluster: LocalCluster, admin: Admin, topic: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    admin.create_topic(topic)
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(10):
            producer.send(topic, b"v")
    partition = TopicPartition(topic, 0)
    admin.commit("elsewhere." + topic, {partition: 3})
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": topic}
    options |= {"startingOffsets": "committed", "kafkalog.group.id": "elsewhere." + topic, "maxOffsetsPerTrigger": "4"}
    read: list[int] = []

    def take(batch: DataFrame, number: int) -> None:
        read.extend(row.offset for row in batch.select("offset").collect())

    caplog.set_level(logging.INFO, "pyspark_kafkalog.lag")
    listener = LagListener()
    spark.streams.addListener(listener)
    try:
        rows = spark.readStream.format("kafkalog").options(**options).load()
        writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).queryName("lagging")
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        waited_for(lambda: len([record for record in caplog.records if "stream_lag" in record.message]) >= 3)
    finally:
        spark.streams.removeListener(listener)
    assert read == list(range(3, 10))
    told = query.recentProgress
    assert [kafkalog_lag(each).partitions for each in told] == [{partition: lag} for lag in (7, 3, 0)]
    again = StreamingQueryProgress.fromJson(json.loads(told[1].json))
    assert kafkalog_lag(again).total == kafkalog_lag(json.loads(told[1].json)).total == 3
    lines = [record.message for record in caplog.records if "stream_lag" in record.message]
    assert [re.sub("^.*stream_lag ", "", line) for line in lines] == [
        f"query=lagging batch=0 lag=7 partitions_behind=1 furthest={partition} furthest_lag=7",
        f"query=lagging batch=1 lag=3 partitions_behind=1 furthest={partition} furthest_lag=3",
        "query=lagging batch=2 lag=0 partitions_behind=0 furthest= furthest_lag=0",
    ]
    assert admin.committed("elsewhere." + topic) == {partition: 10}
