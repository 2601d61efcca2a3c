"""The demo's steps on the real flights, compared with pandas on the CSV: exactly, not about."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from broker.local import LocalCluster
from examples import demo
from tests.reading import all_messages

pytestmark = pytest.mark.timeout(600)  # Spark starts cold, perhaps on a busy machine
FLIGHTS = 336_776


@pytest.fixture(scope="module")
def csv() -> pd.DataFrame:
    """The flights as pandas reads them, with the instant of the scheduled departure."""
    with zipfile.ZipFile(demo.flights_file()) as archive:
        flights = pd.read_csv(archive.open(archive.namelist()[0]))
    scheduled = pd.to_datetime(flights["time_hour"]) + pd.to_timedelta(flights["minute"], unit="m")
    return flights.assign(scheduled=scheduled)


@pytest.fixture(scope="module")
def published() -> Iterator[LocalCluster]:
    """A cluster of its own with every flight in its topic."""
    with LocalCluster(brokers=1) as cluster:
        sent = 0

        def advance(count: int) -> None:
            nonlocal sent
            sent += count

        demo.publish(cluster.bootstrap_servers, demo.read_flights(), advance)
        assert sent == FLIGHTS
        yield cluster


def test_a_printed_table_has_no_spaces_at_the_ends_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("carrier")
    table.add_column("departures", justify="right")
    table.add_row("9E", "17416")
    demo.print_lines(Console(highlight=False), table)
    assert capsys.readouterr().out == "carrier  departures\n9E            17416\n"


def test_every_flight_is_in_the_topic_once_in_order_per_carrier(published: LocalCluster, csv: pd.DataFrame) -> None:
    assert len(csv) == FLIGHTS
    of_carrier: dict[str, list[dict[str, object]]] = {}
    for message in all_messages(published.bootstrap_servers, demo.FLIGHTS):
        assert message.key is not None and message.value is not None
        of_carrier.setdefault(message.key.decode(), []).append(json.loads(message.value))
    read = [flight for flights in of_carrier.values() for flight in flights]
    assert len(read) == FLIGHTS
    for flights in of_carrier.values():
        times = [(flight["time_hour"], flight["minute"], flight["flight"]) for flight in flights]
        assert times == sorted(times)
    columns = ["year", "month", "day", "carrier", "flight", "tailnum", "origin", "dest", "sched_dep_time", "dep_delay"]
    ours = pd.DataFrame(read)[columns].sort_values(columns[:-1], ignore_index=True)
    theirs = csv[columns].sort_values(columns[:-1], ignore_index=True)
    for frame in (ours, theirs):
        frame["tailnum"] = frame["tailnum"].fillna("")  # None in JSON, NaN in pandas
    pd.testing.assert_frame_equal(ours, theirs, check_dtype=False)


def test_the_batch_gives_the_delays_that_pandas_gives(
    published: LocalCluster, spark: SparkSession, csv: pd.DataFrame
) -> None:
    rows = demo.delays_by_carrier(spark, published.bootstrap_servers).collect()
    found = {row["carrier"]: (row["departures"], row["mean_delay_minutes"]) for row in rows}
    delays = csv.dropna(subset=["dep_delay"]).groupby("carrier")["dep_delay"]
    assert found == {carrier: (len(group), group.sum() / len(group)) for carrier, group in delays}


def test_the_stream_gives_the_hours_that_the_watermark_has_closed(
    published: LocalCluster, spark: SparkSession, csv: pd.DataFrame, tmp_path: Path
) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")  # to_json writes hours in the session's zone
    shuffles = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    try:
        query = demo.count_departures(spark, published.bootstrap_servers, str(tmp_path / "checkpoint"))
        query.awaitTermination()
        rows = demo.departures(spark, published.bootstrap_servers).selectExpr(
            "origin", "unix_seconds(hour) as hour", "departures"
        )
        found = sorted(tuple(row) for row in rows.collect())
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone or "")
        spark.conf.set("spark.sql.shuffle.partitions", shuffles or "")
    assert len(query.recentProgress) >= FLIGHTS // demo.FLIGHTS_PER_TRIGGER, "it was meant to take several batches"

    departed = csv.dropna(subset=["dep_time"])
    hours = departed["scheduled"].dt.floor("h")
    counts = departed.groupby([departed["origin"], hours]).size()
    watermark = departed["scheduled"].max() - pd.Timedelta(demo.LATENESS)
    expected = sorted(
        (origin, int(hour.timestamp()), int(count))
        for (origin, hour), count in counts.items()
        if hour + pd.Timedelta(hours=1) <= watermark
    )
    assert len(expected) > 15_000
    assert found == expected


def test_the_readme_shows_the_steps_that_it_takes() -> None:
    steps = re.findall(r'with \(?\s*step\(f?"([^"]+)"', Path(demo.__file__).read_text())
    shown = (Path(demo.__file__).parent.parent / "README.md").read_text().split("## What the demo prints")[1]
    assert len(steps) == 6
    for step in steps:
        step = step.replace("{len(flights):,}", f"{FLIGHTS:,}")
        assert f"    {step} ...\n" in shown
        assert re.search(rf"    {re.escape(step)} +\d+\.\d\n", shown), step


def test_ctrl_c_ends_the_demo_with_a_word() -> None:
    command = [sys.executable, "-u", demo.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("publish "))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert [line for line in told.splitlines() if not line.startswith("WARNING: ")] == ["interrupted"]  # one is Java's
