"""A spark-submit job: copies what a topic got between two moments into another topic, once however often it is run.

    spark-submit --master local[2] examples/pipelines/backfill.py --bootstrap 127.0.0.1:9192 \\
        --from flights --to flights-of-may --since 2013-05-01T00:00:00Z --until 2013-06-01T00:00:00Z

Of each partition it copies the records from the first that is as late as --since up to the first that is as late as
--until. The copy is one transaction (txnAppId, txnVersion) named after the range: a run that fails leaves nothing that
can be read, and may be repeated; one after a run that came to its end copies nothing. So the range must be over:
a moment to come is refused. --version 2 copies the same range once more. Copies have the key, value and headers of
their records, and the time of the copying. The executors' Python, which PYSPARK_PYTHON names, needs kafkalog installed.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F


def moment(text: str) -> datetime:
    """A moment that is over, of ISO-8601 text with a zone."""
    parsed = datetime.fromisoformat(text)
    if parsed.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text} has no zone: write {text}Z for UTC, or its offset, such as +02:00")
    if parsed > datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text} is yet to come, and records with it")
    return parsed.astimezone(UTC)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Copy what a topic got between two moments into another topic, once.")
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--from", dest="source", required=True, help="topic to read")
    parser.add_argument("--to", dest="target", required=True, help="topic to write")
    parser.add_argument("--since", type=moment, required=True, help="first moment to copy, as 2013-05-01T00:00:00Z")
    parser.add_argument("--until", type=moment, required=True, help="first moment not to copy; it must be past")
    parser.add_argument("--version", type=int, default=1, help="of the copy; a higher one copies again (default 1)")
    given = parser.parse_args(arguments)
    if given.since >= given.until:
        parser.error("--since must be before --until")
    return given


def main(spark: SparkSession, given: argparse.Namespace) -> str:
    """Run the job; what it did, in one line."""
    since, until = given.since.isoformat(), given.until.isoformat()
    found = Observation()
    (
        spark.read.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.source)
        .option("startingTimestamp", since)
        .option("startingOffsetsByTimestampStrategy", "latest")  # a partition that has nothing so late gives nothing
        .option("endingTimestamp", until)
        .option("includeHeaders", "true")
        .load()
        .select("key", "value", "headers")
        .observe(found, F.count("*").alias("records"))
        .write.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("topic", given.target)
        .option("txnAppId", f"backfill of {given.source} from {since} until {until}")
        .option("txnVersion", given.version)
        .mode("append")
        .save()
    )
    return f"{found.get['records']:,} records of {since} until {until} are in {given.target}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; it may be run again
    arguments = parse()
    try:
        with SparkSession.builder.appName("backfill").getOrCreate() as spark:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print(main(spark, arguments))
    except KeyboardInterrupt:  # of a handler that Spark sets as it starts
        raise SystemExit("interrupted") from None
