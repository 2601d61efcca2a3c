"""A spark-submit job: how many flights left each airport in each window of time, and how late, into a topic.

    spark-submit --master local[2] examples/pipelines/delays_by_window.py \\
        --bootstrap 127.0.0.1:9192 --from flights --to delays --window '1 hour' --lateness '2 hours' \\
        --checkpoint /tmp/delays

Windows are of scheduled departure. One is written once, when the watermark has passed its end: the latest departure
read so far, less the lateness. Flights that come later than that are left out. It reads what there is and ends
(Trigger.AvailableNow), and keeps the windows that are still open in its checkpoint; started again with that it goes on
from there. The executors' Python, which PYSPARK_PYTHON names, needs kafkalog installed.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

FLIGHT = "origin string, dep_delay int, time_hour timestamp, minute int"


def delays(rows: DataFrame, window: str, lateness: str) -> DataFrame:
    """Origin, window, how many departed, and their mean and greatest delay in minutes. A flight without a delay never
    left."""
    return (
        rows.select(F.from_json(F.col("value").cast("string"), FLIGHT).alias("flight"))
        .select("flight.*", F.expr("flight.time_hour + make_interval(0, 0, 0, 0, 0, flight.minute)").alias("scheduled"))
        .where("dep_delay is not null")
        .withWatermark("scheduled", lateness)
        .groupBy("origin", F.window("scheduled", window).alias("window"))
        .agg(
            F.count("*").alias("departures"),
            F.avg("dep_delay").alias("mean_delay"),
            F.max("dep_delay").alias("max_delay"),
        )
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count departures and their delays by airport and window of time.")
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--from", dest="source", required=True, help="topic to read: flights as JSON")
    parser.add_argument("--to", dest="target", required=True, help="topic to write")
    parser.add_argument("--window", default="1 hour", help="length of a window (default 1 hour)")
    parser.add_argument("--lateness", default="2 hours", help="how late a flight may come (default 2 hours)")
    parser.add_argument(
        "--batch", type=int, default=100_000, help="flights of one micro-batch, at most (default 100000)"
    )
    parser.add_argument("--checkpoint", required=True, help="directory where the stream keeps its position and windows")
    return parser.parse_args(arguments)


def main(spark: SparkSession, given: argparse.Namespace) -> str:
    """Run the job; what it did, in one line."""
    rows = (
        spark.readStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.source)
        .option("startingOffsets", "earliest")
        .option("kafkalog.group.id", "delays-by-window")
        .option("maxOffsetsPerTrigger", given.batch)
        .load()
    )
    value = F.struct("origin", F.col("window.start").alias("start"), "departures", "mean_delay", "max_delay")
    query = (
        delays(rows, given.window, given.lateness)
        .select(F.col("origin").alias("key"), F.to_json(value, {"timeZone": "UTC"}).alias("value"))
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
    return f"{written:,} closed windows are new in {given.target}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; it may be run again
    arguments = parse()
    builder = SparkSession.builder.appName("delays by window")
    # Each has a state store and, in every micro-batch, a task: with Spark's 200 they were nearly all that it did.
    try:
        with builder.config("spark.sql.shuffle.partitions", "4").getOrCreate() as spark:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            print(main(spark, arguments))
    except KeyboardInterrupt:  # of a handler that Spark sets as it starts
        raise SystemExit("interrupted") from None
