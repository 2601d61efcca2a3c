"""The rules of Spark's Kafka sink, each with its test: columns and their types, topics, partitions, headers, modes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from kafkalog import Admin, Message
from kafkalog.client.producer.partitioner import partition_for_key

MessagesIn = Callable[[str], list[Message]]
DELIVERIES = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])


def write(rows: DataFrame, options: dict[str, str], **more: str) -> None:
    rows.coalesce(1).write.format("kafkalog").options(**{**options, **more}).mode("append").save()


def without_topic(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name != "topic"}


def run_stream(rows: DataFrame, options: dict[str, str], checkpoint: Path, mode: str = "append", **more: str) -> None:
    """Everything that a stream's sources have, to the sink. Raises what fails the query."""
    writer = rows.writeStream.format("kafkalog").options(**{**options, **more}, checkpointLocation=str(checkpoint))
    assert writer.outputMode(mode).trigger(availableNow=True).start().awaitTermination(120)


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Callable[[list[Any], str], DataFrame]:
    """A stream of rows."""

    def of(rows: list[Any], schema: str) -> DataFrame:
        spark.createDataFrame(rows, schema).coalesce(1).write.mode("append").parquet(str(tmp_path / "rows"))
        return spark.readStream.schema(schema).parquet(str(tmp_path / "rows"))

    return of


@DELIVERIES
def test_value_and_key_may_be_strings_or_binaries_and_null(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic)
    rows = [("k", "ü", b"\x00", b"\xff"), (None, None, None, None)]
    both = spark.createDataFrame(rows, "sk string, sv string, bk binary, bv binary")
    write(both.selectExpr("sk AS key", "sv AS value"), options, delivery=delivery)
    write(both.selectExpr("bk AS key", "bv AS value"), options, delivery=delivery)
    write(spark.range(1).selectExpr("'never null' AS value"), options, delivery=delivery)
    assert {(m.key, m.value) for m in messages_in(topic)} == {
        (b"k", "ü".encode()),
        (None, None),
        (b"\x00", b"\xff"),
        (None, b"never null"),
    }


@DELIVERIES
def test_the_option_topic_is_trimmed_and_beats_the_column_whatever_that_holds(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic)
    options["topic"] = f" {topic} "
    for column in ("cast(NULL AS string)", "'elsewhere'", "7"):
        write(spark.range(1).selectExpr("'v' AS value", f"{column} AS topic"), options, delivery=delivery)
    assert len(messages_in(topic)) == 3


@DELIVERIES
def test_a_row_with_null_for_its_topic_fails_the_write(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic)
    del options["topic"]
    rows = spark.range(2).selectExpr("'v' AS value", f"if(id = 0, '{topic}', NULL) AS topic")
    with pytest.raises(Exception, match="a row to write has null in column 'topic', and the option topic is not set"):
        write(rows, options, delivery=delivery)
    assert messages_in(topic) == []


@DELIVERIES
def test_a_partition_beats_the_key_and_null_leaves_it_to_the_key(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic, partitions=4)
    by_key = {key: partition_for_key(key.encode(), 4) for key in "abcdefgh"}
    rows: list[tuple[str, int | None]] = [(key, None) for key in by_key]
    rows += [(key, (partition + 1) % 4) for key, partition in by_key.items()]
    values = spark.createDataFrame(rows, "key string, partition int").selectExpr("*", "key AS value")
    write(values, options, delivery=delivery)
    found = sorted((str(m.key, "ascii"), m.partition) for m in messages_in(topic) if m.key)
    assert found == sorted((key, by_key[key] if given is None else given) for key, given in rows)


@DELIVERIES
def test_headers_keep_order_and_doubles_and_may_be_null_or_empty(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic)
    given = [[("b", b"1"), ("a", None), ("b", b"1"), ("b", b"2")], None, []]
    rows = spark.createDataFrame([("v", headers) for headers in given], f"value string, headers {HEADERS}")
    write(rows, options, delivery=delivery)
    assert sorted(m.headers for m in messages_in(topic)) == sorted(tuple(headers or ()) for headers in given)


@DELIVERIES
def test_a_partition_that_is_not_there_and_a_header_without_a_key_fail_the_write(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn, delivery: str
) -> None:
    admin.create_topic(topic, partitions=2)
    no_key = "array(struct(cast(NULL AS string) AS key, cast('h' AS binary) AS value))"
    for column, says in (
        ("if(id = 0, 0, 2) AS partition", f"'{topic}' has no partition 2"),
        ("if(id = 0, 0, -1) AS partition", f"'{topic}' has no partition -1"),
        (f"if(id = 0, NULL, {no_key}) AS headers", "has a header without a key"),
    ):
        with pytest.raises(Exception, match=says):
            write(spark.range(2).selectExpr("'v' AS value", column), options, delivery=delivery)
    assert messages_in(topic) == []


HEADERS = "array<struct<key:string,value:binary>>"


def test_names_are_matched_with_their_case_and_other_columns_ignored(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic, partitions=2)
    others = (
        "'k' AS KEY",
        "1 AS Partition",
        "timestamp '2001-01-01' AS Timestamp",
        "map(1, 2) AS other",
        "'2001' AS timestamp",
    )
    write(spark.range(1).selectExpr("'v' AS value", "0 AS partition", *others), options)
    (message,) = messages_in(topic)
    assert (message.partition, message.key, message.value) == (0, None, b"v")
    assert message.timestamp_us > 1_500_000_000_000_000  # the time of writing


@pytest.mark.parametrize(
    ("select", "says"),
    [
        (["'v' AS Value"], "the rows to write need a column 'value'; they have Value"),
        (["1.5 AS value"], "column 'value' is of type decimal(2,1); it must be string or binary"),
        (["'v' AS value", "1 AS key"], "column 'key' is of type int; it must be string or binary"),
        (["'v' AS value", "1L AS partition"], "column 'partition' is of type bigint; it must be int"),
        (
            ["'v' AS value", "map('k', 'v') AS headers"],
            "column 'headers' is of type map<string,string>; it must be array",
        ),
        (
            ["'v' AS value", "array(struct('k' AS key, 'v' AS value)) AS headers"],
            "column 'headers' is of type array<struct<key:string,value:string>>; it must be array<",
        ),
    ],
)
def test_a_column_of_another_type_is_named_with_the_type_that_it_must_have(
    spark: SparkSession, options: dict[str, str], select: list[str], says: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        write(spark.range(1).selectExpr(*select), options)
    assert says in str(raised.value)


def test_a_topic_column_of_another_type_and_no_topic_at_all_are_refused(
    spark: SparkSession, options: dict[str, str]
) -> None:
    del options["topic"]
    with pytest.raises(AnalysisException, match="column 'topic' is of type int; it must be string"):
        write(spark.range(1).selectExpr("'v' AS value", "1 AS topic"), options)
    with pytest.raises(AnalysisException, match="the rows to write need the option topic, or a column 'topic'"):
        write(spark.range(1).selectExpr("'v' AS value"), options)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"kafka.key.serializer": "x"},
            "the option kafka.key.serializer is not supported: keys are written as the bytes",
        ),
        ({"kafka.value.serializer": "x"}, "the option kafka.value.serializer is not supported: values are written as"),
        ({"kafka.partitioner.class": "x"}, "is not supported: a row goes where its column 'partition' says"),
        (
            {"delivery": "at-most-once"},
            "'at-most-once' is not valid: it must be exactly-once or at-least-once",
        ),
        ({"txnAppId": "app"}, "the option txnAppId requires txnVersion"),
    ],
)
def test_a_batch_write_with_a_wrong_option_is_refused_before_any_task(
    spark: SparkSession, options: dict[str, str], more: dict[str, str], says: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        write(spark.range(1).selectExpr("'v' AS value"), options, **more)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "more", "says"),
    [
        ("value string", {"kafka.value.serializer": "x"}, "kafka.value.serializer is not supported"),
        ("value string", {"txnAppId": "a", "txnVersion": "1"}, "txnAppId and txnVersion are for batch writes"),
        ("value string", {"topic": "not.there"}, "there is no topic 'not.there'"),
        ("value bigint", {}, "column 'value' is of type bigint; it must be string or binary"),
        ("body string", {}, "the rows to write need a column 'value'; they have body"),
    ],
)
def test_a_streams_wrong_options_and_columns_fail_its_first_batch(
    stream: Callable[[list[Any], str], DataFrame],
    options: dict[str, str],
    admin: Admin,
    topic: str,
    tmp_path: Path,
    schema: str,
    more: dict[str, str],
    says: str,
) -> None:
    admin.create_topic(topic)
    with pytest.raises(StreamingQueryException) as raised:
        run_stream(stream([(None,)], schema), options, tmp_path / "checkpoint", **more)
    assert says in str(raised.value)


def test_include_headers_is_a_readers_option_and_does_a_write_no_harm(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    headers = "array(struct('k' AS key, cast('h' AS binary) AS value)) AS headers"
    write(spark.range(1).selectExpr("'v' AS value", headers), options, includeHeaders="false")
    assert [m.headers for m in messages_in(topic)] == [(("k", b"h"),)]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("overwrite", "rows can only be added to a topic: write with mode\\('append'\\)"),
        ("ignore", "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"),
        ("errorifexists", "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"),  # Spark's own default, which it allows no Python sink
    ],
)
def test_a_batch_write_has_no_save_mode_but_append(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, mode: str, says: str
) -> None:
    admin.create_topic(topic)
    writer = spark.range(1).selectExpr("'v' AS value").write.format("kafkalog").options(**options)
    with pytest.raises(AnalysisException, match=says):
        writer.mode(mode).save()


@DELIVERIES
def test_a_stream_in_append_mode_writes_its_rows_and_in_complete_mode_its_result_each_time(
    stream: Callable[[list[Any], str], DataFrame],
    admin: Admin,
    options: dict[str, str],
    topic: str,
    messages_in: MessagesIn,
    tmp_path: Path,
    delivery: str,
) -> None:
    admin.create_topic(topic)
    counted = stream([("a",), ("b",), ("a",)], "key string")
    run_stream(counted.selectExpr("key AS value"), options, tmp_path / "append", delivery=delivery)
    assert sorted(m.value or b"" for m in messages_in(topic)) == [b"a", b"a", b"b"]
    counted = counted.groupBy("key").count().selectExpr("key", "cast(count AS string) AS value")
    run_stream(counted, options, tmp_path / "complete", "complete", delivery=delivery)
    assert sorted((m.key, m.value) for m in messages_in(topic)[3:]) == [(b"a", b"2"), (b"b", b"1")]
    stream([("c",)], "key string")
    run_stream(counted, options, tmp_path / "complete", "complete", delivery=delivery)
    assert sorted((m.key, m.value) for m in messages_in(topic)[5:]) == [(b"a", b"2"), (b"b", b"1"), (b"c", b"1")]


def test_spark_refuses_update_mode_for_a_sink_in_python(
    stream: Callable[[list[Any], str], DataFrame], options: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        run_stream(stream([("a",)], "value string"), options, tmp_path / "checkpoint", "update")


@DELIVERIES
def test_a_topic_that_is_not_there_fails_the_write_and_is_not_made(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, delivery: str
) -> None:
    with pytest.raises(AnalysisException, match=f"there is no topic '{topic}'"):  # of the driver, before any task
        write(spark.range(1).selectExpr("'v' AS value"), options, delivery=delivery)
    named = spark.range(1).selectExpr("'v' AS value", f"'{topic}' AS topic")
    with pytest.raises(Exception, match=f"there is no topic '{topic}'"):
        write(named, without_topic(options), delivery=delivery)
    assert topic not in {each.name for each in admin.describe_topics()}


@pytest.mark.parametrize("name", ["kafka.acks", "kafkalog.acks"])
@DELIVERIES
def test_acks_all_is_what_the_producer_takes(
    spark: SparkSession,
    admin: Admin,
    options: dict[str, str],
    topic: str,
    delivery: str,
    name: str,
    messages_in: MessagesIn,
) -> None:
    admin.create_topic(topic)
    write(spark.range(1).selectExpr("'v' AS value"), options, **{name: "all"}, delivery=delivery)
    assert [message.value for message in messages_in(topic)] == [b"v"]


def test_a_thread_writes_once_it_has_an_active_session(
    spark: SparkSession, admin: Admin, options: dict[str, str], topic: str, messages_in: MessagesIn
) -> None:
    admin.create_topic(topic)
    rows = spark.range(1).selectExpr("'v' AS value")

    def write_in_thread() -> None:
        spark.createDataFrame([], "a int")
        write(rows, options)

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):  # once Spark finds it, this test can go
            threads.submit(write, rows, options).result()
        threads.submit(write_in_thread).result()
    assert len(messages_in(topic)) == 1
