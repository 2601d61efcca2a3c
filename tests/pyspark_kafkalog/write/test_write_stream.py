"""`write_stream` through Spark and a running cluster: what is written, its rules where they are its own, checkpoints.
Tasks and drivers that end at any step of a commit are in `test_fire.py`."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.connect.dataframe import DataFrame as ConnectDataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Message
from kafkalog.client.cluster import Cluster
from kafkalog.errors import InvalidArgument, KafkalogError, UnknownTopic
from kafkalog.wire import transactions_pb2
from pyspark_kafkalog import write_stream
from pyspark_kafkalog.sink import BatchWriter, StreamWriter
from pyspark_kafkalog.streaming_write import written_by
from pyspark_kafkalog.write.exactly_once import Messages, Staged
from pyspark_kafkalog.write.fingerprint import CONFIGURED
from tests.pyspark_kafkalog.text_files import TextFiles
from tests.waiting import waited_for

MessagesIn = Callable[[str], list[Message]]
DELIVERIES = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
SECONDS = 120


@pytest.fixture
def lines(spark: SparkSession, tmp_path: Path) -> TextFiles:
    return TextFiles(spark, tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def brokers(cluster: LocalCluster) -> Iterator[Cluster]:
    """To ask brokers what no client's method asks."""
    asked = Cluster(cluster.bootstrap_servers)
    yield asked
    asked.close()


def run(rows: DataFrame, options: dict[str, str], checkpoint: Path | None, **more: Any) -> StreamingQuery:
    """Write all that is there. Raises what fails the query."""
    more.setdefault("trigger", {"availableNow": True})
    given: dict[str, Any] = {**options, **more}
    if checkpoint is not None:
        given["checkpoint_location"] = str(checkpoint)
    query = write_stream(rows, **given)
    assert query.awaitTermination(SECONDS)
    return query


def run_by_the_format(rows: DataFrame, options: dict[str, str], checkpoint: Path) -> None:
    writer = rows.writeStream.format("kafkalog").options(**options, checkpointLocation=str(checkpoint))
    assert writer.trigger(availableNow=True).start().awaitTermination(SECONDS)


def forget_commit(checkpoint: Path, batch: int) -> None:
    """As if the driver had died before Spark noted the end of a micro-batch."""
    (checkpoint / "commits" / str(batch)).unlink()
    (checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


@pytest.fixture
def relative(spark: SparkSession) -> Iterator[str]:
    """A folder's name, that is in Java's working directory once it is made."""
    context: Any = spark.sparkContext
    name = f"checkpoint-{uuid.uuid4()}"
    yield name
    shutil.rmtree(Path(context._jvm.java.lang.System.getProperty("user.dir")) / name)


def decided(brokers: Cluster, query: StreamingQuery) -> list[int]:
    request = transactions_pb2.ReadDecisionsRequest(transactional_ids=[f"spark-stream-{query.id}"])
    return [each.batch_id for each in brokers.call("ReadDecisions", request).decisions]


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_relative_checkpoint_is_where_java_was_started_wherever_this_process_is(
    spark: SparkSession,
    is_configured: bool,
    lines: TextFiles,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    relative: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The commit looks into it, to notice a copy of the checkpoint."""
    admin.create_topic(topic)
    monkeypatch.chdir(tmp_path)
    if is_configured:
        spark.conf.set(CONFIGURED, relative)
    try:
        for line in ("a", "b"):
            lines.add(line)
            if is_configured:
                run(lines.rows(), options, None, query_name="relative")
            else:
                run(lines.rows(), options, Path(relative))
    finally:
        spark.conf.unset(CONFIGURED)
    assert values(messages_in(topic)) == [b"a", b"b"]
    assert "checkpoint_not_read" not in caplog.text
    assert not (tmp_path / relative).exists()


def test_an_option_that_is_given_twice_is_refused(lines: TextFiles, options: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="the option checkpointLocation is given twice"):
        run(lines.rows(), options, Path("a"), checkpointlocation="b")


@DELIVERIES
def test_rows_go_to_the_topics_that_they_name_with_keys_and_headers_and_partitions(
    lines: TextFiles,
    admin: Admin,
    options: dict[str, str],
    new_topic: Callable[[], str],
    messages_in: MessagesIn,
    checkpoint: Path,
    delivery: str,
) -> None:
    one, two = new_topic(), new_topic()
    admin.create_topic(one, partitions=3)
    admin.create_topic(two)
    del options["topic"]
    lines.add("a", "b")
    lines.add("c")
    rows = lines.rows().selectExpr(
        "value",
        "concat('key of ', value) AS key",
        f"if(value = 'b', '{two}', '{one}') AS topic",
        "if(value = 'b', 0, 2) AS partition",
        "array(struct('h' AS key, cast(value AS binary) AS value)) AS headers",
        "timestamp'2024-05-06 07:08:09Z' AS timestamp",
        "length(value) AS other",
    )
    run(rows, options, checkpoint, delivery=delivery)
    found = [(m.partition, m.key, m.value, m.headers, m.timestamp_us) for m in messages_in(one) + messages_in(two)]
    assert found == [
        (partition, b"key of " + value, value, (("h", value),), 1_714_979_289_000_000)
        for partition, value in ((2, b"a"), (2, b"c"), (0, b"b"))
    ]


def test_only_columns_that_are_written_go_to_the_tasks(
    lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, checkpoint: Path
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    seen = checkpoint.parent / "seen"

    class Noting(StreamWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:  # type: ignore[override] # as pyspark's
            batches = list(iterator)
            seen.write_text(",".join(batches[0].schema.names))
            return super().write(iter(batches))

    for number, (columns, expected) in enumerate(
        ((("value", "1 AS other"), "value"), (("value", "'k' AS key", "2 AS KEY"), "value,key"))
    ):
        rows = lines.rows().selectExpr(*columns)
        location = str(checkpoint / str(number))
        writer = Noting(rows.schema, options | {"checkpointLocation": location})
        stream = written_by(writer, rows).option("checkpointLocation", location).trigger(availableNow=True)
        assert stream.start().awaitTermination(SECONDS)
        assert seen.read_text() == expected
    assert [(m.key, m.value) for m in messages_in(topic)] == [(None, b"a"), (b"k", b"a")]


@pytest.mark.parametrize(
    "mode, second",
    [("complete", {(b"a", b"3"), (b"b", b"1")}), ("update", {(b"a", b"3")})],
)
def test_in_update_mode_rows_that_changed_are_written_and_in_complete_mode_all(
    lines: TextFiles,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    checkpoint: Path,
    mode: str,
    second: set[tuple[bytes, bytes]],
) -> None:
    admin.create_topic(topic)
    counted = lines.rows().groupBy("value").count().selectExpr("value AS key", "cast(count AS string) AS value")
    lines.add("a", "b", "a")
    run(counted, options, checkpoint, output_mode=mode)
    assert {(m.key, m.value) for m in messages_in(topic)} == {(b"a", b"2"), (b"b", b"1")}
    lines.add("a")
    run(counted, options, checkpoint, output_mode=mode)
    assert {(m.key, m.value) for m in messages_in(topic)[2:]} == second


# --- exactly once ----------------------------------------------------------------------------------------------------


def test_a_stream_continues_from_its_checkpoint_and_a_batch_without_rows_decides_nothing(
    lines: TextFiles,
    brokers: Cluster,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    checkpoint: Path,
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    lines.add("b")
    first = run(lines.rows(), options, checkpoint, query_name="named")
    assert first.name == "named"
    lines.add("filtered")
    query = run(lines.rows().where("value != 'filtered'"), options, checkpoint)
    assert query.id == first.id and decided(brokers, query) == [1]
    lines.add("c")
    run(lines.rows(), options, checkpoint)
    assert decided(brokers, query) == [3]
    assert values(messages_in(topic)) == [b"a", b"b", b"c"]


def test_a_batch_that_was_decided_and_runs_again_is_not_written_again(
    lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, checkpoint: Path
) -> None:
    admin.create_topic(topic)
    for line in "abc":
        lines.add(line)
    run(lines.rows(), options, checkpoint)
    forget_commit(checkpoint, 2)
    lines.add("d")
    run(lines.rows().selectExpr("concat(value, ' again') AS value"), options, checkpoint)
    assert values(messages_in(topic)) == [b"a", b"b", b"c", b"d again"]


def test_a_query_goes_on_by_the_format_and_back(
    lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, checkpoint: Path
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    run(lines.rows(), options, checkpoint)
    forget_commit(checkpoint, 0)
    lines.add("b")
    run_by_the_format(lines.rows(), options, checkpoint)
    forget_commit(checkpoint, 1)
    lines.add("c")
    run(lines.rows(), options, checkpoint)
    assert values(messages_in(topic)) == [b"a", b"b", b"c"]


def test_a_copy_of_a_checkpoint_fails_and_neither_skips_nor_doubles_rows(
    lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, tmp_path: Path
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    run(lines.rows(), options, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    lines.add("b")
    run(lines.rows(), options, tmp_path / "first")
    with pytest.raises(StreamingQueryException, match="CheckpointCopied: batch 1 of transaction 'spark-stream-"):
        run(lines.rows(), options, tmp_path / "copy")
    assert values(messages_in(topic)) == [b"a", b"b"]


def test_a_copy_of_a_checkpoint_is_noticed_on_a_file_system_that_only_the_session_knows(
    spark: SparkSession, lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, tmp_path: Path
) -> None:
    """Programs set keys of s3a by `hadoopConfiguration()`, which no other Java process sees."""
    admin.create_topic(topic)
    java: Any = spark.sparkContext._jsc
    java.hadoopConfiguration().set("fs.viewfs.mounttable.set-later.link./checkpoints", tmp_path.as_uri())
    first, copy = (f"viewfs://set-later/checkpoints/{name}" for name in ("first", "copy"))
    lines.add("a")
    run(lines.rows(), options, None, checkpoint_location=first)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    lines.add("b")
    run(lines.rows(), options, None, checkpoint_location=first)
    with pytest.raises(StreamingQueryException, match="CheckpointCopied"):
        run(lines.rows(), options, None, checkpoint_location=copy)


def test_a_commit_that_fails_has_its_staged_rows_dropped(
    lines: TextFiles,
    brokers: Cluster,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    checkpoint: Path,
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    staged: list[Staged] = []

    class Failing(StreamWriter):
        def commit(self, messages: Messages, batchId: int) -> None:
            staged.extend(each for each in messages if isinstance(each, Staged))
            raise RuntimeError("on purpose")

    rows = lines.rows()
    stream = written_by(Failing(rows.schema, options), rows).option("checkpointLocation", str(checkpoint))
    with pytest.raises(StreamingQueryException, match="on purpose"):
        stream.start().awaitTermination(SECONDS)
    assert sum(part.records for each in staged for batch in each.batches for part in batch.parts) == 1

    def sets() -> list[transactions_pb2.StagedSet]:
        request = transactions_pb2.ListStagedRequest()
        answers = [brokers.call("ListStaged", request, broker_id=each.broker_id) for each in brokers.describe().brokers]
        return [each for answer in answers for each in answer.sets if each.topic == topic]

    waited_for(lambda: sets() == [], 30)
    run(lines.rows(), options, checkpoint)
    assert values(messages_in(topic)) == [b"a"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, says",
    [
        ({"delivery": "twice"}, "delivery"),
        ({"topci": "t"}, "the format kafkalog has no option 'topci'; did you mean 'topic'"),
        ({"txnAppId": "a", "txnVersion": "1"}, "txnAppId and txnVersion are for batch writes"),
        ({"kafkalog.linger.ms": "soon"}, "linger.ms"),
        ({"kafkalog.bootstrap.servers": None}, "the option kafkalog.bootstrap.servers is missing"),
    ],
)
def test_a_wrong_option_is_refused_before_the_query_starts_in_one_sentence(
    spark: SparkSession,
    lines: TextFiles,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    checkpoint: Path,
    more: dict[str, Any],
    says: str,
) -> None:
    admin.create_topic(topic)
    with pytest.raises(KafkalogError) as raised:
        run(lines.rows(), options, checkpoint, **more)
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert not checkpoint.exists() and spark.streams.active == []


def test_a_dataframe_of_spark_connect_is_refused_for_its_driver_is_another_process() -> None:
    elsewhere: Any = ConnectDataFrame.__new__(ConnectDataFrame)
    with pytest.raises(InvalidArgument, match=r"which Spark Connect does not give: use df\.writeStream"):
        write_stream(elsewhere, topic="t", checkpoint_location="c")


def test_what_is_no_dataframe_is_refused() -> None:
    wrong: Any = "flights"
    with pytest.raises(InvalidArgument, match="write_stream writes a streaming DataFrame, not 'flights'"):
        write_stream(wrong, topic="t", checkpoint_location="c")


@pytest.mark.parametrize("messages", [[None, None], [Staged(()), None]])
def test_a_commit_of_tasks_that_have_written_nothing_fails(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages: list[Any]
) -> None:
    """Spark commits the epochs of a continuous trigger, in which it never lets a sink in Python write."""
    admin.create_topic(topic)
    schema = StructType([StructField("value", StringType())])
    for delivery in ("exactly-once", "at-least-once"):
        given = {**options, "delivery": delivery}
        with pytest.raises(InvalidArgument, match=r"not for trigger\(continuous=\.\.\.\)"):
            StreamWriter(schema, given).commit(messages, 0)
        with pytest.raises(InvalidArgument, match="tasks that have written nothing"):
            BatchWriter(schema, given, False).commit(messages)


def test_a_column_or_a_topic_that_is_missing_is_refused_before_the_query_starts(
    spark: SparkSession, lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, checkpoint: Path
) -> None:
    with pytest.raises(UnknownTopic, match=f"there is no topic '{topic}'"):
        run(lines.rows(), options, checkpoint)
    admin.create_topic(topic)
    with pytest.raises(InvalidArgument, match="need a column 'value'; they have other"):
        run(lines.rows().selectExpr("value AS other"), options, checkpoint)
    assert spark.streams.active == []


def test_a_query_without_a_checkpoint_of_its_own_is_refused(
    spark: SparkSession,
    lines: TextFiles,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
) -> None:
    """Spark would make a temporary one."""
    admin.create_topic(topic)
    lines.add("a")
    named: dict[str, Any] = {**options, "query_name": topic, "trigger": {"availableNow": True}}
    with pytest.raises(InvalidArgument, match="checkpoint_location is missing: give it, or set"):
        write_stream(lines.rows(), **named)
    spark.conf.set(CONFIGURED, str(tmp_path / "root"))
    try:
        with pytest.raises(InvalidArgument, match="and give query_name"):  # Spark would make another folder each time
            write_stream(lines.rows(), **{**named, "query_name": None})
        assert write_stream(lines.rows(), **named).awaitTermination(SECONDS)
    finally:
        spark.conf.unset(CONFIGURED)
    assert (tmp_path / "root" / topic / "commits" / "0").exists()
    run(lines.rows(), {**options, "checkpointLocation": str(tmp_path / "option")}, None)
    assert values(messages_in(topic)) == [b"a", b"a"]


def test_a_topic_that_is_deleted_meanwhile_fails_the_query_with_a_sentence_before_any_task(
    lines: TextFiles, admin: Admin, options: dict[str, str], topic: str, checkpoint: Path
) -> None:
    admin.create_topic(topic)
    lines.add("a")
    run(lines.rows(), options, checkpoint)
    rows = lines.rows().where("value != 'b'")  # no task of the micro-batch has a row to ask a broker for
    forgetful = {**options, "kafkalog.metadata.max.age.ms": "1"}  # known topics are believed for so long
    stream = written_by(StreamWriter(rows.schema, forgetful), rows).option("checkpointLocation", str(checkpoint))
    admin.delete_topic(topic)
    lines.add("b")
    with pytest.raises(StreamingQueryException, match=f"UnknownTopic: there is no topic '{topic}'") as raised:
        stream.trigger(availableNow=True).start().awaitTermination(SECONDS)
    assert "Job aborted" not in str(raised.value)
