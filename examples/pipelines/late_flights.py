"""A spark-submit job: copies the flights that left late from one topic into another, keyed by origin.

    spark-submit --master local[2] examples/pipelines/late_flights.py \\
        --bootstrap 127.0.0.1:9192 --from flights --to late-flights --minutes 60 --checkpoint /tmp/late-flights

It reads what there is and ends (Trigger.AvailableNow); started again with the same checkpoint it goes on from there.
The executors' Python, which PYSPARK_PYTHON names, needs kafkalog installed.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

FLIGHT = "origin string, dep_delay int"


def late(rows: DataFrame, minutes: int) -> DataFrame:
    """Key and value of the flights, among the rows of a topic, that left more than so many minutes late."""
    flight = F.from_json(F.col("value").cast("string"), FLIGHT)
    return rows.withColumn("flight", flight).where(F.col("flight.dep_delay") > minutes).select("flight.origin", "value")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Copy the flights that left late into a topic of their own.")
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--from", dest="source", required=True, help="topic to read")
    parser.add_argument("--to", dest="target", required=True, help="topic to write")
    parser.add_argument("--minutes", type=int, default=60, help="how late is late (default 60)")
    parser.add_argument("--checkpoint", required=True, help="directory where the stream keeps its position")
    return parser.parse_args(arguments)


def main(spark: SparkSession, given: argparse.Namespace) -> str:
    """Run the job; what it did, in one line."""
    rows = (
        spark.readStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.source)
        .option("startingOffsets", "earliest")
        .option("kafkalog.group.id", "late-flights")
        .load()
    )
    query = (
        late(rows, given.minutes)
        .withColumnRenamed("origin", "key")
        .observe("written", F.count("*").alias("records"))
        .writeStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("topic", given.target)
        .option("checkpointLocation", given.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    observed = [progress.observedMetrics.get("written") for progress in query.recentProgress]
    written = sum(each["records"] for each in observed if each is not None)  # None: nothing was new
    return f"{written:,} late flights are new in {given.target}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; it may be run again
    arguments = parse()
    try:
        with SparkSession.builder.appName("late flights").getOrCreate() as spark:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print(main(spark, arguments))
    except KeyboardInterrupt:  # of a handler that Spark sets as it starts
        raise SystemExit("interrupted") from None
