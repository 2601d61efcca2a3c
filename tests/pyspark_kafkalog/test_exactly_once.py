"""Exactly once through Spark and a running cluster: what readers see, what a failed write leaves, checkpoints that are
old or copied, runs that others replaced, numbered writes. Under fire it is in `test_fire.py`."""

from __future__ import annotations

import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import inheritable_thread_target
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from kafkalog.cli.main import run
from kafkalog.client.cluster import Cluster
from kafkalog.errors import RunFenced, VersionWrittenTwice
from kafkalog.format.numbered import transactional_id as numbered_id
from kafkalog.wire import transactions_pb2
from pyspark_kafkalog.sink import BatchWriter, StreamWriter
from pyspark_kafkalog.write import exactly_once as staged
from pyspark_kafkalog.write import micro_batch
from pyspark_kafkalog.write.exactly_once import Staged, Transaction
from pyspark_kafkalog.write.fingerprint import CONFIGURED
from pyspark_kafkalog.write.options import SinkOptions, parse_sink
from tests.pyspark_kafkalog.text_files import TextFiles
from tests.waiting import waited_for

MessagesIn = Callable[[str], list[Message]]
VALUES = StructType([StructField("value", StringType())])


@pytest.fixture
def brokers(cluster: LocalCluster) -> Iterator[Cluster]:
    """To ask brokers what no client's method asks."""
    asked = Cluster(cluster.bootstrap_servers)
    yield asked
    asked.close()


def texts(messages: list[Message]) -> list[str]:
    """The values, of records at offsets without a hole."""
    at: dict[int, int] = {}
    for message in messages:
        assert message.offset == at.get(message.partition, 0), "a hole in the offsets"
        at[message.partition] = message.offset + 1
    return [(message.value or b"").decode() for message in messages]


def staged_sets(brokers: Cluster, topic: str) -> list[transactions_pb2.StagedSet]:
    """What is staged for a topic."""
    request = transactions_pb2.ListStagedRequest()
    answers = [brokers.call("ListStaged", request, broker_id=each.broker_id) for each in brokers.describe().brokers]
    return [each for answer in answers for each in answer.sets if each.topic == topic]


def write(rows: DataFrame, options: dict[str, str], **more: str) -> None:
    rows.write.format("kafkalog").options(**{**options, **more}).mode("append").save()


class Stream(TextFiles):
    """A stream of text files into a topic, whose checkpoint can be copied and set back."""

    def __init__(self, spark: SparkSession, options: dict[str, str], folder: Path) -> None:
        super().__init__(spark, folder)
        self._options = options
        self.checkpoint = folder / "checkpoint"

    def run(self, checkpoint: Path | None = None, where: str = "true", **more: str) -> StreamingQuery:
        """All that is there. Raises what fails the query."""
        rows = self.rows().where(where)
        location = str(checkpoint or self.checkpoint)
        writer = rows.writeStream.format("kafkalog").options(**{**self._options, **more}, checkpointLocation=location)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        return query


@pytest.fixture
def stream(spark: SparkSession, options: dict[str, str], tmp_path: Path) -> Stream:
    return Stream(spark, options, tmp_path)


# --- what readers see ------------------------------------------------------------------------------------------------


def test_nothing_can_be_read_before_all_tasks_have_ended_and_then_everything(
    spark: SparkSession,
    brokers: Cluster,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    admin.create_topic(topic, partitions=2)
    gate = str(tmp_path / "gate")

    def second_waits(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        while context is not None and context.partitionId() == 1 and not Path(gate).exists():
            threading.Event().wait(0.02)

    def looks_and_opens() -> list[Message]:
        waited_for(lambda: sum(each.length for each in staged_sets(brokers, topic)) > 0, 60)
        with Consumer(options["kafkalog.bootstrap.servers"]) as consumer:
            consumer.assign({TopicPartition(topic, partition): "earliest" for partition in range(2)})
            seen = list(consumer.messages(timeout=0.3))
        Path(gate).touch()
        return seen

    rows = spark.range(0, 2000, 1, 2).selectExpr("cast(id AS string) AS value", "cast(id % 2 AS int) AS partition")
    with ThreadPoolExecutor() as pool:
        seen = pool.submit(looks_and_opens)
        write(rows.mapInArrow(second_waits, rows.schema), options)
        assert seen.result() == []
    assert [int(text) for text in texts(messages_in(topic))] == [*range(0, 2000, 2), *range(1, 2000, 2)]


def test_a_batchs_rows_are_in_the_order_of_its_tasks(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    write(spark.range(0, 800, 1, 8).selectExpr("cast(id AS string) AS value"), options)
    assert [int(text) for text in texts(messages_in(topic))] == list(range(800))


def test_a_failed_batch_write_leaves_nothing_to_read(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    value = "if(id = 3999, raise_error('on purpose'), cast(id AS string)) AS value"
    with pytest.raises(Exception, match="on purpose"):
        write(spark.range(0, 4000, 1, 4).selectExpr(value), options)
    assert messages_in(topic) == []
    write(spark.range(1).selectExpr("'after' AS value"), options)
    assert texts(messages_in(topic)) == ["after"]


# --- the writer's own calls, without Spark ---------------------------------------------------------------------------


class Attempt:
    """Stages and commits batches of a transaction, as a sink's processes do."""

    def __init__(self, options: dict[str, str], transactional_id: str, run_id: str = "run") -> None:
        self._options: SinkOptions = parse_sink(options)
        self._transactional_id = transactional_id
        self._run_id = run_id

    def stage(self, batch_id: int, *values: str, part: int = 0) -> Staged:
        batch = pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})
        transaction = Transaction(self._transactional_id, batch_id, self._run_id, stays=True)
        return staged.stage_rows(iter([batch]), self._options, ("value",), transaction, part)

    def commit(self, *messages: Staged | None, fingerprint: bytes = b"") -> None:
        staged.commit(list(messages), self._options, fingerprint)

    def abort(self, *messages: Staged | None) -> None:
        staged.abort(list(messages), self._options)


@pytest.fixture
def transactional_id() -> str:
    return f"spark-stream-{uuid.uuid4()}"


def test_a_twins_rows_and_those_of_a_late_attempt_are_never_seen(
    admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, transactional_id: str
) -> None:
    admin.create_topic(topic)
    attempt = Attempt(options, transactional_id)
    attempt.stage(0, "twin of 0")
    messages = [attempt.stage(0, "0"), attempt.stage(0, "1", part=1)]
    attempt.stage(0, "twin of 1", part=1)
    attempt.commit(*messages)
    attempt.stage(0, "late")
    attempt.commit(attempt.stage(1, "2"))
    assert texts(messages_in(topic)) == ["0", "1", "2"]


def test_an_abort_takes_back_nothing_that_was_committed(
    admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, transactional_id: str
) -> None:
    admin.create_topic(topic)
    attempt = Attempt(options, transactional_id)
    message = attempt.stage(0, "0")
    attempt.commit(message)
    attempt.abort(message, None)
    assert texts(messages_in(topic)) == ["0"]
    attempt.abort(attempt.stage(1, "1"), None)
    attempt.abort(None)
    assert texts(messages_in(topic)) == ["0"]


def test_a_batch_that_is_tried_again_appears_as_its_first_commit_had_it(
    admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, transactional_id: str
) -> None:
    admin.create_topic(topic)
    first, again = Attempt(options, transactional_id, "first"), Attempt(options, transactional_id, "again")
    first.commit(first.stage(0, "0 of the first"), fingerprint=b"f" * 32)
    again.commit(again.stage(0, "0 again"), fingerprint=b"f" * 32)
    again.commit(again.stage(1, "1"))
    assert texts(messages_in(topic)) == ["0 of the first", "1"]


def test_a_run_that_was_replaced_fails(
    admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, transactional_id: str
) -> None:
    admin.create_topic(topic)
    zombie, other = Attempt(options, transactional_id, "zombie"), Attempt(options, transactional_id, "other")
    zombie.commit(zombie.stage(0, "0"))
    late = [zombie.stage(1, "1 of the zombie"), zombie.stage(2, "2 of the zombie")]
    other.commit(other.stage(1, "1"))
    for message in late:
        with pytest.raises(RunFenced, match="run zombie of transaction"):
            zombie.commit(message)
    other.commit(other.stage(2, "2"))
    assert texts(messages_in(topic)) == ["0", "1", "2"]


@pytest.mark.parametrize("written_as", ["batch", "numbered", "stream"])
def test_parts_that_are_never_prepared_are_dropped(
    brokers: Cluster, admin: Admin, options: dict[str, str], topic: str, transactional_id: str, written_as: str
) -> None:
    admin.create_topic(topic)
    message = Attempt(options, transactional_id).stage(0, "staged")
    assert [each.parts for each in staged_sets(brokers, topic)] == [1]
    if written_as == "stream":
        StreamWriter(VALUES, options).abort([message, None], 0)
    else:
        numbered = {"txnAppId": "a", "txnVersion": "0"} if written_as == "numbered" else {}
        BatchWriter(VALUES, options | numbered, overwrite=False).abort([message, None])
    waited_for(lambda: staged_sets(brokers, topic) == [], 30)


def test_an_open_transaction_delays_no_other_writer(
    admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, transactional_id: str
) -> None:
    admin.create_topic(topic)
    attempt = Attempt(options, transactional_id)
    message = attempt.stage(0, "staged first")
    with Producer(options["kafkalog.bootstrap.servers"]) as producer:
        producer.send(topic, b"sent").result(30)
    other = Attempt(options, f"{transactional_id}-2")
    other.commit(other.stage(0, "staged later"))
    assert texts(messages_in(topic)) == ["sent", "staged later"]
    attempt.commit(message)
    assert texts(messages_in(topic)) == ["sent", "staged later", "staged first"]


def test_what_is_staged_and_what_is_committed_outlive_a_killed_broker(tmp_path: Path) -> None:
    with LocalCluster() as cluster:
        options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": "t"}
        attempt = Attempt(options, "spark-stream-x")
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic("t")
            attempt.commit(attempt.stage(0, "committed"))
            message = attempt.stage(1, "staged")
            cluster.brokers[0].kill()
            cluster.brokers[0].start()
            attempt.commit(message)
            with Consumer(cluster.bootstrap_servers) as consumer:
                consumer.assign({TopicPartition("t", 0): "earliest"})
                assert texts(list(consumer.messages(max_messages=2, timeout=30))) == ["committed", "staged"]


# --- streams and their checkpoints -----------------------------------------------------------------------------------


def test_a_stream_continues_from_its_checkpoint_and_a_batch_without_rows_decides_nothing(
    stream: Stream, brokers: Cluster, admin: Admin, topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    stream.add("a")
    stream.add("b")
    query = stream.run()
    stream.add("filtered")
    stream.run(where="value != 'filtered'")
    request = transactions_pb2.ReadDecisionsRequest(transactional_ids=[f"spark-stream-{query.id}"])
    assert [each.batch_id for each in brokers.call("ReadDecisions", request).decisions] == [1]
    stream.add("c")
    stream.run()
    assert [each.batch_id for each in brokers.call("ReadDecisions", request).decisions] == [3]
    assert texts(messages_in(topic)) == ["a", "b", "c"]


def test_a_stream_that_failed_after_its_commit_writes_the_batch_no_second_time(
    stream: Stream, admin: Admin, topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    for line in "abc":
        stream.add(line)
        stream.run()
    for kept in ("2", ".2.crc"):
        (stream.checkpoint / "commits" / kept).unlink(missing_ok=True)
    stream.run()
    stream.add("d")
    stream.run()
    assert texts(messages_in(topic)) == ["a", "b", "c", "d"]


def test_an_old_checkpoint_fails_and_neither_skips_nor_doubles_rows(
    stream: Stream, admin: Admin, topic: str, messages_in: MessagesIn, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    stream.add("a")
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "old")
    for line in "bc":
        stream.add(line)
        stream.run()
    with pytest.raises(StreamingQueryException, match="batch 1 of transaction 'spark-stream-"):
        stream.run(tmp_path / "old")
    stream.add("d")
    stream.run()
    assert texts(messages_in(topic)) == ["a", "b", "c", "d"]


def test_a_copy_of_a_live_checkpoint_fails_although_its_batch_bears_the_same_number(
    stream: Stream, admin: Admin, topic: str, messages_in: MessagesIn, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    stream.add("a")
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "copy")
    stream.add("b")
    stream.run()
    with pytest.raises(StreamingQueryException, match="batch 1 of transaction 'spark-stream-"):
        stream.run(tmp_path / "copy")
    assert texts(messages_in(topic)) == ["a", "b"]


def test_a_copy_of_a_checkpoint_that_the_session_names_fails_too(
    spark: SparkSession,
    stream: Stream,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    admin.create_topic(topic)

    def run_in(root: Path) -> None:
        spark.conf.set(CONFIGURED, str(root))
        try:
            writer = stream.rows().writeStream.format("kafkalog").options(**options).queryName("named")
            assert writer.trigger(availableNow=True).start().awaitTermination(120)
        finally:
            spark.conf.unset(CONFIGURED)

    stream.add("a")
    run_in(tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    stream.add("b")
    run_in(tmp_path / "root")
    with pytest.raises(StreamingQueryException, match="batch 1 of transaction 'spark-stream-"):
        run_in(tmp_path / "copy")
    assert texts(messages_in(topic)) == ["a", "b"]


def test_a_topic_created_again_between_two_batches_takes_what_follows(
    stream: Stream, admin: Admin, topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    stream.add("into the old one")
    stream.run()
    admin.delete_topic(topic)
    admin.create_topic(topic)
    stream.add("into the new one")
    stream.run()
    assert texts(messages_in(topic)) == ["into the new one"]


# --- numbered writes -------------------------------------------------------------------------------------------------


def test_a_write_whose_version_was_written_is_skipped(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)

    def write_version(version: int, value: str, app_id: str = "app") -> None:
        rows = spark.range(1).selectExpr(f"'{value}' AS value")
        write(rows, options, txnAppId=app_id, txnVersion=str(version))

    write_version(5, "first")
    write_version(5, "again")
    write_version(4, "older")
    write_version(7, "next")
    write_version(5, "of another", "other app")
    assert texts(messages_in(topic)) == ["first", "next", "of another"]


def test_a_numbered_write_to_a_topic_created_again_is_written(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    for life in ("old", "new"):
        admin.create_topic(topic)
        for version in (0, 1, 1):
            write(
                spark.range(1).selectExpr(f"'{life} {version}' AS value"),
                options,
                txnAppId="a",
                txnVersion=str(version),
            )
        assert texts(messages_in(topic)) == [f"{life} 0", f"{life} 1"]
        admin.delete_topic(topic)


def test_a_numbered_write_counts_each_topic_that_its_rows_name(
    spark: SparkSession, admin: Admin, options: dict[str, str], new_topic: Callable[[], str], messages_in: MessagesIn
) -> None:
    one, two = new_topic(), new_topic()
    admin.create_topic(one)
    admin.create_topic(two)
    write(spark.range(1).selectExpr("'alone' AS value"), options, topic=one, txnAppId="a", txnVersion="3")
    del options["topic"]
    rows = spark.range(0, 6, 1, 3).selectExpr("cast(id AS string) AS value", f"if(id < 4, '{one}', '{two}') AS topic")
    for version in ("3", "4", "4"):
        write(rows, options, txnAppId="a", txnVersion=version)
    assert texts(messages_in(one)) == ["alone", "0", "1", "2", "3"]
    assert texts(messages_in(two)) == ["4", "5", "4", "5"]


def test_after_a_write_that_failed_those_beside_it_are_tried_again_in_the_next_run(
    admin: Admin, options: dict[str, str], new_topic: Callable[[], str], messages_in: MessagesIn
) -> None:
    """In the same run another write might be one of other rows."""
    one, two = new_topic(), new_topic()
    numbered = options | {"txnAppId": one, "txnVersion": "0"}
    admin.create_topic(one)
    admin.create_topic(two)

    def stage(topic: str, run_id: str) -> tuple[BatchWriter, Staged]:
        """As in a micro-batch."""
        in_query = micro_batch.MicroBatch("query", run_id, batch_id=0, is_of_query=True)
        writer = BatchWriter(VALUES, numbered | {"topic": topic}, overwrite=False)
        batch = pa.RecordBatch.from_pydict({"value": pa.array(["v"])})
        to = parse_sink(numbered | {"topic": topic})
        assert to.txn is not None
        return writer, staged.stage_numbered(iter([batch]), to, ("value",), to.txn, in_query, 0)

    writer, message = stage(one, "run")
    writer.commit([message])
    writer, message = stage(two, "run")
    writer.abort([message, None])
    writer, message = stage(one, "run")
    with pytest.raises(VersionWrittenTwice):
        writer.commit([message])
    for topic in (one, two):
        writer, message = stage(topic, "next run")
        writer.commit([message])
    assert texts(messages_in(one)) == texts(messages_in(two)) == ["v"]


class ForeachBatch:
    """A stream of text files whose micro-batches a function writes by itself."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._input = folder / "input"
        self._input.mkdir()
        self.checkpoint = folder / "checkpoint"

    def add(self, *lines: str) -> None:
        (self._input / str(len(list(self._input.iterdir())))).write_text("".join(f"{line}\n" for line in lines))

    def run(self, function: Callable[[DataFrame, int], None], checkpoint: Path | None = None) -> str:
        """All that is there; the query's id. Raises what fails the query."""
        writer = self._spark.readStream.text(str(self._input)).writeStream.foreachBatch(function)
        writer = writer.option("checkpointLocation", str(checkpoint or self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        return str(query.id)


@pytest.fixture
def foreach_batch(spark: SparkSession, tmp_path: Path) -> ForeachBatch:
    return ForeachBatch(spark, tmp_path)


def test_a_new_checkpoint_under_an_old_name_fails_and_says_what_to_do(
    foreach_batch: ForeachBatch,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    admin.create_topic(topic)

    def numbered(rows: DataFrame, batch_id: int) -> None:
        write(rows, options, txnAppId="etl", txnVersion=str(batch_id))

    foreach_batch.add("a")
    query_id = foreach_batch.run(numbered)
    with pytest.raises(
        StreamingQueryException, match=f"query {query_id} wrote to topic.*transactions forget etl {topic}"
    ):
        foreach_batch.run(numbered, tmp_path / "new")
    assert (
        run(["transactions", "forget", "etl", topic, "--yes", "--bootstrap", options["kafkalog.bootstrap.servers"]])
        == 0
    )
    foreach_batch.run(numbered, tmp_path / "new")
    assert texts(messages_in(topic)) == ["a", "a"]


def test_an_older_checkpoint_fails_a_numbered_write_and_loses_no_rows(
    foreach_batch: ForeachBatch,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    admin.create_topic(topic)
    old, older = tmp_path / "old", tmp_path / "older"

    def numbered(checkpoint: Path) -> Callable[[DataFrame, int], None]:
        more = {"txnAppId": topic, "checkpointLocation": str(checkpoint)}
        return lambda rows, batch_id: write(rows, options, txnVersion=str(batch_id), **more)

    for line, copy in (("a", older), ("b", old), ("c", tmp_path / "newest")):
        foreach_batch.add(line)
        foreach_batch.run(numbered(foreach_batch.checkpoint))
        shutil.copytree(foreach_batch.checkpoint, copy)
    foreach_batch.add("d")
    for copy, reason in ((older, "batch 2 is in the topic already"), (old, "of this number from another input")):
        with pytest.raises(StreamingQueryException, match=reason):
            foreach_batch.run(numbered(copy), copy)
    (foreach_batch.checkpoint / "commits" / "2").unlink()  # it died before it had noted the end of c
    (foreach_batch.checkpoint / "commits" / ".2.crc").unlink(missing_ok=True)
    foreach_batch.run(numbered(foreach_batch.checkpoint))
    assert texts(messages_in(topic)) == ["a", "b", "c", "d"]


def test_a_checkpoint_does_not_go_on_after_rows_that_another_copy_of_it_wrote(
    foreach_batch: ForeachBatch,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    """A batch without rows for a topic leaves no decision there: the older copy is not seen by its first write, and
    the newest one has to see what the older one wrote."""
    late, every = new_topic(), new_topic()
    for topic in (late, every):
        admin.create_topic(topic)

    def both(checkpoint: Path) -> Callable[[DataFrame, int], None]:
        def function(rows: DataFrame, batch_id: int) -> None:
            more = {"txnAppId": late, "txnVersion": str(batch_id), "checkpointLocation": str(checkpoint)}
            write(rows.where("value like '%late'"), options, topic=late, **more)
            write(rows, options, topic=every, **more)

        return function

    newest, old = foreach_batch.checkpoint, tmp_path / "old"
    foreach_batch.add("a late")
    foreach_batch.run(both(newest))
    shutil.copytree(newest, old)
    foreach_batch.add("b")
    foreach_batch.run(both(newest))
    foreach_batch.add("c late")
    with pytest.raises(StreamingQueryException, match="wrote a batch of this number from another input"):
        foreach_batch.run(both(old), old)
    with pytest.raises(StreamingQueryException, match="wrote batch 1 from another input than this checkpoint has for"):
        foreach_batch.run(both(newest))
    assert texts(messages_in(late)) == ["a late", "c late"]
    assert texts(messages_in(every)) == ["a late", "b"]


def test_two_writes_to_one_topic_under_one_name_fail_after_each_restart_until_they_have_two(
    foreach_batch: ForeachBatch, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)

    def twice(second: str) -> Callable[[DataFrame, int], None]:
        def function(rows: DataFrame, batch_id: int) -> None:
            for filtered, app_id in (("value < 'b'", topic), ("value >= 'b'", second)):
                write(rows.where(filtered), options, txnAppId=app_id, txnVersion=str(batch_id))

        return function

    foreach_batch.add("a", "b")
    for _ in range(3):
        with pytest.raises(StreamingQueryException, match="Two writes to one topic need a txnAppId"):
            foreach_batch.run(twice(topic))
        assert texts(messages_in(topic)) == ["a"]
    foreach_batch.run(twice(f"{topic} b"))
    assert texts(messages_in(topic)) == ["a", "b"]


def in_a_thread(
    function: Callable[[DataFrame, int], None], inheriting: bool = False
) -> Callable[[DataFrame, int], None]:
    """For foreachBatch: calls a function in a Python thread of its own, and raises what it raises."""

    def call(rows: DataFrame, batch_id: int) -> None:
        def run() -> None:
            rows.sparkSession.createDataFrame([], "a int")  # Spark looks for sources in the thread's active session
            function(rows, batch_id)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(inheritable_thread_target(rows.sparkSession)(run) if inheriting else run).result()

    return call


def test_a_numbered_write_in_a_thread_that_does_not_know_its_query_fails_and_says_what_to_do(
    foreach_batch: ForeachBatch, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)

    def numbered(rows: DataFrame, batch_id: int) -> None:
        write(rows, options, txnAppId="threads", txnVersion=str(batch_id))

    foreach_batch.add("a")
    says = "the query that writes version 0 of txnAppId 'threads' is not known.*own checkpointLocation as an option"
    with pytest.raises(StreamingQueryException, match=says):
        foreach_batch.run(in_a_thread(numbered))
    assert messages_in(topic) == []
    foreach_batch.run(in_a_thread(numbered, inheriting=True))
    assert texts(messages_in(topic)) == ["a"]


@pytest.mark.parametrize("inheriting", [False, True])
def test_a_numbered_write_in_a_thread_knows_its_query_by_the_thread_or_the_checkpoint(
    foreach_batch: ForeachBatch,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
    inheriting: bool,
) -> None:
    admin.create_topic(topic)
    fails = [False]

    def numbered(checkpoint: Path) -> Callable[[DataFrame, int], None]:
        more = {} if inheriting else {"checkpointLocation": str(checkpoint)}

        def function(rows: DataFrame, batch_id: int) -> None:
            write(rows, options, txnAppId="etl", txnVersion=str(batch_id), **more)
            if fails[0]:
                raise RuntimeError("the batch fails after its write")

        return in_a_thread(function, inheriting)

    foreach_batch.add("a")
    fails[0] = True
    with pytest.raises(StreamingQueryException, match="the batch fails after its write"):
        foreach_batch.run(numbered(foreach_batch.checkpoint))
    fails[0] = False
    query_id = foreach_batch.run(numbered(foreach_batch.checkpoint))
    shutil.copytree(foreach_batch.checkpoint, tmp_path / "old")
    with pytest.raises(StreamingQueryException, match=f"query {query_id} wrote to topic.*belongs to query [0-9a-f-]+"):
        foreach_batch.run(numbered(tmp_path / "new"), tmp_path / "new")
    foreach_batch.add("b")
    foreach_batch.run(numbered(foreach_batch.checkpoint))
    if not inheriting:
        foreach_batch.add("c")
        with pytest.raises(StreamingQueryException, match="wrote a batch of this number from another input"):
            foreach_batch.run(numbered(tmp_path / "old"), tmp_path / "old")
    assert texts(messages_in(topic)) == ["a", "b"]


def test_two_writes_in_threads_to_one_topic_under_one_name_fail_after_each_restart(
    foreach_batch: ForeachBatch, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    more = {"txnAppId": topic, "checkpointLocation": str(foreach_batch.checkpoint)}

    def twice(rows: DataFrame, batch_id: int) -> None:
        for filtered in ("value < 'b'", "value >= 'b'"):
            write(rows.where(filtered), options, txnVersion=str(batch_id), **more)

    foreach_batch.add("a", "b")
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="Two writes to one topic need a txnAppId"):
            foreach_batch.run(in_a_thread(twice))
        assert texts(messages_in(topic)) == ["a"]


def test_a_checkpoint_that_can_not_be_read_fails_a_numbered_write_that_needs_it(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    rows = spark.range(1).selectExpr("'a' AS value")
    with pytest.raises(Exception, match=r"the query that writes version 0.*no/metadata.*that the driver can read"):
        write(rows, options, txnAppId="a", txnVersion="0", checkpointLocation=f"file:{tmp_path}/no")
    assert messages_in(topic) == []


def test_a_job_group_that_is_named_in_foreach_batch_replaces_no_run(
    spark: SparkSession,
    foreach_batch: ForeachBatch,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
) -> None:
    admin.create_topic(topic)

    def grouped(rows: DataFrame, batch_id: int) -> None:
        group = spark.sparkContext.setJobGroup
        if batch_id % 3 == 0:
            group("etl", "before the write")
        write(rows, options, txnAppId="grouped", txnVersion=str(batch_id))
        group("etl", "after the write")

    for life in range(3):
        for step in range(2):
            foreach_batch.add(f"{life}.{step}")
            foreach_batch.run(grouped)
    assert texts(messages_in(topic)) == [f"{life}.{step}" for life in range(3) for step in range(2)]


def test_a_replaced_run_writes_no_version_from_foreach_batch(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    properties = {micro_batch.QUERY_ID: "query", micro_batch.BATCH_ID: "0"}

    def write_in(run_id: str, version: int, group: str) -> None:
        """As in a micro-batch of a run: Spark's own properties of its jobs."""
        description = f"id = query\nrunId = {run_id}\nbatch = {version}"
        described = {micro_batch.DESCRIPTION: description, "spark.jobGroup.id": group}
        for name, text in {**properties, **described}.items():
            spark.sparkContext.setLocalProperty(name, text)
        try:
            rows = spark.range(1).selectExpr(f"'{version} of {run_id}' AS value")
            write(rows, options, txnAppId="fenced", txnVersion=str(version))
        finally:
            for name in (*properties, *described):
                spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]

    write_in("zombie", 0, "zombie")
    write_in("other", 1, "other")
    for group in ("zombie", "a name of its user's"):
        with pytest.raises(Exception, match=r"run zombie of transaction 'app-fenced.* was replaced by run other"):
            write_in("zombie", 2, group)
    write_in("other", 2, "a name of its user's")
    assert texts(messages_in(topic)) == ["0 of zombie", "1 of other", "2 of other"]


def test_a_write_in_foreach_batch_that_is_not_numbered_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, admin: Admin, options: dict[str, str], topic: str, transactional_id: str
) -> None:
    admin.create_topic(topic)
    attempt = Attempt(options, transactional_id)

    def commit(number: int, query_id: str, stays: bool = False, session_id: str = "") -> list[str]:
        name = f"{transactional_id}-{number}"
        transaction = Transaction(name, 0, "", stays=stays, query_id=query_id, session_id=session_id)
        batch = pa.RecordBatch.from_pydict({"value": pa.array(["v"])})
        caplog.clear()
        attempt.commit(staged.stage_rows(iter([batch]), parse_sink(options), ("value",), transaction, 0))
        return [record.message for record in caplog.records if "write_not_numbered" in record.message]

    [warning] = commit(0, f"{topic} 1")
    assert "txnAppId" in warning and "txnVersion" in warning and "checkpointLocation" not in warning
    [warning] = commit(5, "", session_id=f"{topic} s")  # in a Python thread, or under Spark Connect
    assert "txnAppId" in warning and "checkpointLocation" in warning
    assert commit(6, "", session_id=f"{topic} s") == []
    assert commit(1, f"{topic} 1") == []
    assert len(commit(2, f"{topic} 2")) == 1
    assert commit(3, "") == commit(4, f"{topic} 3", stays=True) == []


@pytest.mark.parametrize(
    ("query_id", "says"),
    [
        ("", "a write outside any query wrote this version.*transactions forget 'my app' TOPIC`.*checkpointLocation"),
        ("q", "query q, which this write comes from, wrote this version before; nothing is written now"),
    ],
    ids=["a plain job", "a query"],
)
def test_a_skip_is_reported_with_name_version_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
    brokers: Cluster,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    query_id: str,
    says: str,
) -> None:
    admin.create_topic(topic)
    [info] = brokers.describe_topics([topic])
    numbered = Transaction(numbered_id("my app", topic, info.topic_id), 3, "", True, True, query_id)
    for value in ("first", "again"):
        caplog.clear()
        batch = pa.RecordBatch.from_pydict({"value": pa.array([value])})
        message = staged.stage_rows(iter([batch]), parse_sink(options), ("value",), numbered, 0)
        staged.commit([message], parse_sink(options))
    [warning] = [record.message for record in caplog.records if "write_skipped" in record.message]
    assert all(fact in warning for fact in ('app_id="my app"', f"topic={topic}", "version=3"))
    assert re.search(says.replace("TOPIC", topic), warning)
    assert texts(messages_in(topic)) == ["first"]


def test_two_writes_of_one_foreach_batch_both_land_and_once_when_the_batch_runs_again(
    spark: SparkSession,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    one, two = new_topic(), new_topic()
    admin.create_topic(one)
    admin.create_topic(two)
    (tmp_path / "input").mkdir()
    failures = ["the batch fails between its writes", "the batch fails after its writes"]

    def write_both(rows: DataFrame, batch_id: int) -> None:
        version = {"txnAppId": str(tmp_path), "txnVersion": str(batch_id)}
        write(rows, options, topic=one, **version)
        if len(failures) == 2:
            raise RuntimeError(failures.pop(0))
        write(rows, options, topic=two, **version)
        if failures:
            raise RuntimeError(failures.pop(0))

    def run() -> Any:
        query = (
            spark.readStream.text(str(tmp_path / "input"))
            .writeStream.foreachBatch(write_both)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    (tmp_path / "input" / "a").write_text("a\n")
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="the batch fails"):
            run()
    run()
    (tmp_path / "input" / "b").write_text("b\n")
    run()
    assert texts(messages_in(one)) == texts(messages_in(two)) == ["a", "b"]
