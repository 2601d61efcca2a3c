"""The format as Spark finds it: by its package's name, light to import, its errors one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from broker.local import LocalCluster
from kafkalog import Admin

SERVERS = "127.0.0.1:1"


def test_the_package_imports_nothing_heavy() -> None:
    """A failing import here would hide every Python data source, and a stream's process has 10 s to start."""
    heavy = ("pyarrow", "numpy", "grpc", "google.protobuf", "structlog", "kafkalog", "pandas")
    script = (
        "import sys; import pyspark.sql.datasource; before = set(sys.modules); import pyspark_kafkalog;"
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_spark_finds_the_format_by_itself_and_knows_its_schema_without_a_broker(spark: SparkSession) -> None:
    reader = spark.read.format("kafkalog").option("kafkalog.bootstrap.servers", SERVERS).option("subscribe", "t")
    assert reader.load().schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    assert reader.option("includeHeaders", "true").load().schema["headers"].dataType.simpleString() == (
        "array<struct<key:string,value:binary>>"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribes": "t"}, "the format kafkalog has no option 'subscribes'; did you mean 'subscribe'?"),
        ({}, "a read needs one of the options subscribe, subscribePattern, assign"),
        ({"subscribe": "t", "startingOffsets": "now"}, "startingOffsets='now' is not valid"),
        ({"subscribe": "t", "kafkalog.linger.mss": "5"}, "did you mean 'kafkalog.linger.ms'?"),
        ({"subscribe": "t", "kafkalog.fetch.max.bytes": "0"}, "fetch.max.bytes=0 is not valid"),
        ({"subscribe": "t", "kafka.security.protocol": "SASL_SSL"}, "kafka.security.protocol is not supported"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_option_is_told_at_load(
    spark: SparkSession, streaming: bool, options: dict[str, str], says: str
) -> None:
    reader = spark.readStream if streaming else spark.read
    with pytest.raises(AnalysisException) as raised:
        reader.format("kafkalog").option("kafkalog.bootstrap.servers", SERVERS).options(**options).load()
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "options", "says"),
    [
        (None, {"startingOffsets": "latest"}, "startingOffsets of a batch read cannot be latest"),
        (None, {"endingOffsets": "earliest"}, "endingOffsets of a batch read cannot be earliest"),
        ("body binary", {}, "a read has no column 'body'"),
        ("value binary", {"includeHeaders": "maybe"}, "includeHeaders='maybe' is not valid"),
        ("value string", {}, "column 'value' is of type binary, not string"),
    ],
)
def test_what_a_batch_read_can_not_do_is_told_at_the_first_action(
    spark: SparkSession, schema: str | None, options: dict[str, str], says: str
) -> None:
    reader = spark.read.format("kafkalog").option("kafkalog.bootstrap.servers", SERVERS).option("subscribe", "t")
    reader = reader.schema(schema) if schema else reader
    with pytest.raises(Exception, match="kafkalog") as raised:
        reader.options(**options).load().collect()
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("select", "mode", "options", "says"),
    [
        ("id AS value", "append", {"topic": "t"}, "column 'value' is of type bigint; it must be string or binary"),
        ("'v' AS body", "append", {"topic": "t"}, "need a column 'value'; they have body"),
        ("'v' AS value", "append", {}, "need the option topic, or a column 'topic'"),
        ("'v' AS value", "append", {"topics": "t"}, "no option 'topics'; did you mean 'topic'?"),
        ("'v' AS value", "overwrite", {"topic": "t"}, "write with mode('append')"),
        ("'v' AS value", "append", {"topic": "t", "kafkalog.acks": "2"}, "acks='2' is not valid"),
        ("'v' AS value", "append", {"topic": "t", "kafka.sasl.jaas.config": "x"}, "kafka.sasl.jaas.config is not supp"),
    ],
)
def test_a_wrong_write_is_told_before_any_task(
    spark: SparkSession, select: str, mode: str, options: dict[str, str], says: str
) -> None:
    writer = spark.range(1).selectExpr(select).write.format("kafkalog").mode(mode)
    with pytest.raises(AnalysisException) as raised:
        writer.option("kafkalog.bootstrap.servers", SERVERS).options(**options).save()
    assert says in str(raised.value)


def test_errors_of_ours_are_sentences_and_all_others_keep_their_frames(
    cluster: LocalCluster, spark: SparkSession, topic: str
) -> None:
    """Without a setting of Spark's, and although workers are used again."""
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "fetchOffset.retryIntervalMs": "1"}
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic)

    def read(**given: str) -> None:
        spark.read.format("kafkalog").options(**options, **given).load().collect()

    def write(**given: str) -> None:
        values = spark.range(1).selectExpr("'v' AS value")
        values.write.format("kafkalog").options(**options, **given).mode("append").save()

    beyond = {"startingOffsets": json.dumps({topic: {"0": 0}}), "endingOffsets": json.dumps({topic: {"0": 9}})}
    failures: Sequence[tuple[Callable[[], object], str]] = (
        (lambda: read(subscribes=topic), "has no option 'subscribes'; did you mean 'subscribe'?"),
        (lambda: read(subscribe=topic, startingOffsets="now"), "startingOffsets='now' is not valid"),
        (lambda: read(subscribe="not.there"), "there is no topic 'not.there'"),
        (lambda: read(subscribe=topic, **beyond), "ends at offset 0 and was to be read up to 9"),
        (lambda: write(topics=topic), "did you mean 'topic'?"),
        (lambda: write(topic="not.there"), "there is no topic 'not.there'"),
    )
    for fails, says in failures:
        with pytest.raises(PySparkException) as raised:
            fails()
        assert says in str(raised.value)
        assert "Traceback" not in str(raised.value)
        assert 'File "' not in str(raised.value)
    with pytest.raises(PySparkException, match="ZeroDivisionError") as raised:
        spark.range(1).select(udf(lambda number: 1 // number)("id")).collect()
    assert "Traceback" in str(raised.value)


def test_the_argument_of_load_and_save_is_the_topic(cluster: LocalCluster, spark: SparkSession, topic: str) -> None:
    option = ("kafkalog.bootstrap.servers", cluster.bootstrap_servers)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic)
    spark.range(3).selectExpr("'v' AS value").write.format("kafkalog").option(*option).mode("append").save(topic)
    assert spark.read.format("kafkalog").option(*option).load(topic).count() == 3
    assert spark.read.format("kafkalog").option(*option).load([topic]).count() == 3
    with pytest.raises(AnalysisException, match=f"'{topic}', the argument of load, and the option subscribe=t differ"):
        spark.readStream.format("kafkalog").option(*option).option("subscribe", "t").load(topic)
