"""Rules in which Spark has its part: what rises at load(), what stands in the checkpoint, triggers and restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from broker.local import LocalCluster
from tests.damage import flip
from tests.pyspark_kafkalog.live import Live


class Query:
    """A query over one checkpoint, however often it is run."""

    def __init__(self, spark: SparkSession, checkpoint: Path, options: dict[str, str]) -> None:
        self._spark = spark
        self.checkpoint = checkpoint
        self._options = options
        self.read: list[tuple[int, int]] = []
        """(partition, offset) of the rows read so far."""

    def run(self, **trigger: Any) -> StreamingQuery:
        frame = self._spark.readStream.format("kafkalog").options(**self._options).load()

        def take(batch: DataFrame, _: int) -> None:
            self.read += [(row["partition"], row["offset"]) for row in batch.select("partition", "offset").collect()]

        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(**(trigger or {"availableNow": True})).start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return query

    def logged(self) -> list[Any]:
        """The source's offsets in the checkpoint, a micro-batch each, as they are written."""
        files = sorted((path for path in (self.checkpoint / "offsets").iterdir() if path.name.isdecimal()), key=_number)
        return [path.read_text().splitlines()[2] for path in files]

    def forget_commit(self, number: int) -> None:
        for name in (str(number), f".{number}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)


def _number(path: Path) -> int:
    return int(path.name)


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path, live: Live) -> Callable[..., Query]:
    return lambda **options: Query(spark, tmp_path / "checkpoint", live.options(**options))


def test_sql_reads_a_view_and_makes_no_table_that_it_could_not_read(
    spark: SparkSession, live: Live, request: pytest.FixtureRequest
) -> None:
    options = live.options(subscribe=live.topic(2, 1))
    given = ", ".join(f"'{name}' '{value}'" for name, value in options.items())
    spark.sql(f"CREATE TEMPORARY VIEW seen_by_sql USING kafkalog OPTIONS ({given})")
    request.addfinalizer(lambda: spark.sql("DROP VIEW seen_by_sql"))
    assert spark.sql("SELECT count(*) FROM seen_by_sql").collect() == [(3,)]
    with pytest.raises(AnalysisException, match="a table made with CREATE TABLE cannot be read") as refused:
        spark.sql(f"CREATE TABLE made_by_sql USING kafkalog OPTIONS ({given})")
    assert "use CREATE TEMPORARY VIEW" in str(refused.value)


def test_wrong_options_rise_at_load_for_batch_and_stream(spark: SparkSession, live: Live) -> None:
    options = live.options(subscribe="t", minOffsetsPerTrigger="20", maxOffsetsPerTrigger="15")
    for read in (spark.read, spark.readStream):
        with pytest.raises(Exception, match=r"minOffsetsPerTrigger \(20\) is greater than maxOffsetsPerTrigger \(15\)"):
            read.format("kafkalog").options(**options).load()


def test_columns_and_splits_follow_the_options(spark: SparkSession, live: Live) -> None:
    topic = live.topic(6, 2)
    options = live.options(subscribe=topic, columns="offset,partition", maxRecordsPerPartition="2")
    frame = spark.read.format("kafkalog").options(**options).load()
    assert frame.columns == ["offset", "partition"]
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(map(tuple, frame.collect())) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_the_offset_log_has_sorted_offsets_and_never_none_once_a_topic_matched(
    query: Callable[..., Query], live: Live
) -> None:
    prefix = live.new_topic()
    stream = query(subscribePattern=f"{prefix}.*", startingOffsets="earliest", failOnDataLoss="false")
    stream.run()
    assert set(stream.logged()) <= {"{}", "null"}  # Spark writes it; nothing has matched yet
    before = len(stream.logged())
    for name in (f"{prefix}.b", f"{prefix}.a"):
        live.admin.create_topic(name, partitions=11)
        live.append(name, 1, 10)
    stream.run()
    [text] = stream.logged()[before:]
    numbers = [str(number) for number in range(11)]
    assert [(topic, list(ends)) for topic, ends in json.loads(text).items()] == [
        (f"{prefix}.a", numbers),
        (f"{prefix}.b", numbers),
    ]
    for name in (f"{prefix}.b", f"{prefix}.a"):
        live.admin.delete_topic(name)
    stream.run()
    assert stream.logged()[before:] == [text]  # and no empty batch for nothing new
    assert stream.read == [(10, 0), (10, 0)]


def test_once_reads_everything_at_once(query: Callable[..., Query], live: Live) -> None:
    topic = live.topic(9)
    stream = query(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="2", minOffsetsPerTrigger="2")
    stream.run(once=True)
    assert stream.read == [(0, offset) for offset in range(9)]
    assert [json.loads(text) for text in stream.logged()] == [{topic: {"0": 9}}]


def test_the_progress_has_offsets_and_rows_and_neither_metrics_nor_a_description_of_ours(
    query: Callable[..., Query], live: Live
) -> None:
    topic = live.topic(3)
    run = query(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="2").run()
    sources = [json.loads(progress.json)["sources"][0] for progress in run.recentProgress]
    offsets = [[source[name][topic]["0"] for name in ("endOffset", "latestOffset")] for source in sources]
    assert offsets == [[2, 3], [3, 3]]
    assert [source["startOffset"] for source in sources] == [None, sources[0]["endOffset"]]  # the first has none yet
    assert [source["numInputRows"] for source in sources] == [2, 1]
    assert [(source.get("metrics", {}), "afka" in source["description"]) for source in sources] == [({}, False)] * 2


def test_a_first_batch_from_latest_whose_commit_was_lost_loses_nothing(query: Callable[..., Query], live: Live) -> None:
    topic = live.topic(4)
    stream = query(subscribe=topic)
    stream.run()
    assert stream.read == []
    assert [json.loads(text) for text in stream.logged()] == [{topic: {"0": 4}}]
    stream.forget_commit(0)
    live.append(topic, 3)
    stream.run()
    assert stream.read == [(0, 4), (0, 5), (0, 6)]


def test_a_query_continues_with_what_is_there_when_losses_do_not_fail_it(
    query: Callable[..., Query], live: Live
) -> None:
    topic = live.topic(3)
    stream = query(subscribe=topic, startingOffsets="earliest", failOnDataLoss="false", maxInputPartitions="1")
    stream.run()
    live.append(topic, 5)
    live.delete_before(topic, 6)
    live.admin.alter_topic(topic, partitions=3)
    live.append(topic, 2, 2)
    live.delete_before(topic, 1, 2)
    stream.run()
    assert sorted(stream.read) == [(0, 0), (0, 1), (0, 2), (0, 6), (0, 7), (2, 1)]
    assert json.loads(stream.logged()[-1]) == {topic: {"0": 8, "1": 0, "2": 2}}


# --- damage on a broker's disk ---------------------------------------------------------------------------------------


def test_a_bit_that_flips_in_a_body_fails_a_read_or_is_gone_on_behind(
    spark: SparkSession, query: Callable[..., Query], live: Live, cluster: LocalCluster
) -> None:
    topic = live.topic(0)
    for _ in range(7):
        live.append(topic, 1)
    for batch, byte in ((1, 40), (3, 120), (4, 120), (6, 120)):  # 40: its record_count; 6: the last one
        flip(cluster, topic, batch, byte)
    reading = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "1"}
    corrupt = f"corrupt batch in {topic}-0 at 1: .* go on at offset 2"

    def batch_read(**options: str) -> list[int]:
        frame = spark.read.format("kafkalog").options(**live.options(subscribe=topic, **options)).load()
        return [row["offset"] for row in frame.select("offset").collect()]

    with pytest.raises(Exception, match=corrupt):
        batch_read()
    assert batch_read(failOnDataLoss="false") == [0, 2, 5]
    strict = query(**reading)
    with pytest.raises(StreamingQueryException, match=corrupt):
        strict.run()
    assert strict.read == [(0, 0)]
    lenient = query(**reading, failOnDataLoss="false")
    lenient.run()
    assert lenient.read == [(0, 2), (0, 5)]
