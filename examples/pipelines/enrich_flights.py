"""A spark-submit job: adds to each flight of a topic what a table knows of its plane, and writes it to another topic.

    spark-submit --master local[2] examples/pipelines/enrich_flights.py \\
        --bootstrap 127.0.0.1:9192 --flights flights --planes planes --to flights-with-planes --checkpoint /tmp/enrich

The table is a topic too: a record is a plane as of now, keyed by its tail number, and one without a value removes it.
The stream joins each of its micro-batches with the table as it stands then. Flights of planes that the table does not
have go through without one. It reads what there is and ends (Trigger.AvailableNow); started again with the same
checkpoint it goes on from there. The executors' Python, which PYSPARK_PYTHON names, needs kafkalog installed.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

FLIGHT = "carrier string, flight int, tailnum string, origin string, dest string, time_hour string"
PLANE = "manufacturer string, model string, seats int"


def newest(rows: DataFrame) -> DataFrame:
    """Key and value of each key's last record. A key's records are all in one partition, so their offsets tell."""
    return rows.groupBy("key").agg(F.max_by("value", "offset").alias("value"))


def enriched(flights: DataFrame, planes: DataFrame) -> DataFrame:
    """Key and value: the flights with their planes. A broadcast leaves them where they are, in their order."""
    table = newest(planes).select(
        F.col("key").cast("string").alias("tailnum"), F.from_json(F.col("value").cast("string"), PLANE).alias("plane")
    )
    flight = F.from_json(F.col("value").cast("string"), FLIGHT).alias("flight")
    return (
        flights.select("key", flight)
        .select("key", "flight.*")
        .join(F.broadcast(table), "tailnum", "left")
        .select("key", F.to_json(F.struct("carrier", "flight", "tailnum", "origin", "dest", "time_hour", "plane")))
        .toDF("key", "value")
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Add to each flight of a topic what a table knows of its plane.")
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--flights", required=True, help="topic to read: flights as JSON, with their tailnum")
    parser.add_argument("--planes", required=True, help="topic that is the table: planes as JSON, keyed by tailnum")
    parser.add_argument("--to", dest="target", required=True, help="topic to write")
    parser.add_argument("--checkpoint", required=True, help="directory where the stream keeps its position")
    return parser.parse_args(arguments)


def main(spark: SparkSession, given: argparse.Namespace) -> str:
    """Run the job; what it did, in one line."""
    planes = (
        spark.read.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.planes)
        .load()
    )
    flights = (
        spark.readStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.flights)
        .option("startingOffsets", "earliest")
        .option("kafkalog.group.id", "flights-with-planes")
        .load()
    )
    query = (
        enriched(flights, planes)
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
    return f"{written:,} flights are new in {given.target}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; it may be run again
    arguments = parse()
    try:
        with SparkSession.builder.appName("enrich flights").getOrCreate() as spark:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print(main(spark, arguments))
    except KeyboardInterrupt:  # of a handler that Spark sets as it starts
        raise SystemExit("interrupted") from None
