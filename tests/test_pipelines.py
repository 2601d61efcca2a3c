"""The spark-submit jobs, each run whole on some days of real flights and compared with pandas on the same flights. They
run in the tests' session, and one of them also as README starts it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from broker.local import LocalCluster
from examples import demo, publish_flights
from examples.pipelines import backfill, delays_by_window, enrich_flights
from kafkalog import Admin, Producer
from tests.free_ports import free_ports
from tests.reading import all_messages

ROOT = Path(__file__).resolve().parent.parent
PIPELINES = ROOT / "examples" / "pipelines"
FLIGHTS = "pipelines-flights"
COUNT = 4000  # the flights of four days and a half


@pytest.fixture(scope="module")
def flights(cluster: LocalCluster) -> pd.DataFrame:
    """The flights that the topic has, keyed by carrier, in the order of their scheduled departures. The last three are
    of the first morning, and so come days late. `time` is that of a flight's record."""
    published = demo.read_flights()[:COUNT]
    published += [{**flight, "flight": 10_000 + number} for number, flight in enumerate(published[:3])]
    publish_flights.publish_flights(cluster.bootstrap_servers, FLIGHTS, published, partitions=3)
    frame = pd.DataFrame(published)
    frame["scheduled"] = pd.to_datetime(frame["time_hour"]) + pd.to_timedelta(frame["minute"], unit="min")
    return frame.assign(time=frame["scheduled"].cummax(), late=frame["flight"] >= 10_000)


def create(cluster: LocalCluster, *topics: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        for topic in topics:
            admin.create_topic(topic, partitions=2)


def run(job: ModuleType, spark: SparkSession, *arguments: str) -> str:
    """Run a job with the arguments of its command line; the line that it prints."""
    line: str = job.main(spark, job.parse(arguments))
    if "--checkpoint" in arguments:
        assert job.main(spark, job.parse(arguments)).startswith("0 "), "a second run finds nothing new"
    return line


def by_key(rows: Iterable[tuple[bytes | None, Any]]) -> dict[str, list[Any]]:
    """What each key has, in order."""
    found: dict[str, list[Any]] = {}
    for key, row in rows:
        assert key is not None
        found.setdefault(key.decode(), []).append(row)
    return found


def test_each_flight_gets_its_plane_as_of_now_and_keeps_its_place(
    cluster: LocalCluster, spark: SparkSession, flights: pd.DataFrame, tmp_path: Path
) -> None:
    planes = [
        {name: plane[name] for name in ("tailnum", "manufacturer", "model", "seats")}
        for plane in publish_flights.read_planes()
    ]
    firsts = [{**plane, "model": "its first", "seats": 1} for plane in planes]
    publish_flights.publish_planes(cluster.bootstrap_servers, "planes", firsts + planes)
    gone = planes[::5]
    with Producer(cluster.bootstrap_servers) as producer:
        for plane in gone:
            producer.send("planes", None, key=plane["tailnum"].encode())
    create(cluster, "flights-with-planes")

    said = run(
        enrich_flights, spark, "--bootstrap", cluster.bootstrap_servers, "--flights", FLIGHTS, "--planes", "planes",
        "--to", "flights-with-planes", "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip

    def row(flight: dict[str, Any]) -> tuple[Any, ...]:
        plane = flight.get("plane") or {}
        return (flight["flight"], flight.get("tailnum"), plane.get("model"), plane.get("seats"))

    assert said == f"{len(flights):,} flights are new in flights-with-planes"
    messages = all_messages(cluster.bootstrap_servers, "flights-with-planes")
    found = by_key((message.key, row(json.loads(message.value or b""))) for message in messages)
    kept = pd.DataFrame([plane for plane in planes if plane not in gone])
    joined = flights.merge(kept, on="tailnum", how="left").astype(object)
    joined = joined.where(joined.notna(), None)
    assert 0 < joined["model"].isna().sum() < joined["model"].notna().sum()
    rows = joined[["flight", "tailnum", "model", "seats"]].itertuples(index=False, name=None)
    assert found == by_key(zip(joined["carrier"].str.encode("utf-8"), rows, strict=True))


def test_each_closed_window_is_written_once_with_the_departures_that_came_in_time(
    cluster: LocalCluster, spark: SparkSession, flights: pd.DataFrame, tmp_path: Path
) -> None:
    create(cluster, "delays")
    elsewhere = spark.newSession()
    elsewhere.conf.set("spark.sql.session.timeZone", "America/New_York")
    said = run(
        delays_by_window, elsewhere, "--bootstrap", cluster.bootstrap_servers, "--from", FLIGHTS, "--to", "delays",
        "--window", "3 hours", "--lateness", "12 hours", "--batch", "2000",
        "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip
    values = [json.loads(message.value or b"") for message in all_messages(cluster.bootstrap_servers, "delays")]
    assert all(row["start"].endswith("Z") for row in values)
    found = sorted(
        (row["origin"], datetime.fromisoformat(row["start"]), row["departures"], row["mean_delay"], row["max_delay"])
        for row in values
    )
    departed = flights[flights["dep_delay"].notna() & ~flights["late"]]
    assert len(departed) < len(flights[~flights["late"]])
    watermark = departed["scheduled"].max() - timedelta(hours=12)
    groups = departed.groupby(["origin", departed["scheduled"].dt.floor("3h")])["dep_delay"]
    expected = sorted(
        (origin, start.to_pydatetime(), len(group), group.sum() / len(group), int(group.max()))
        for (origin, start), group in groups
        if start + timedelta(hours=3) <= watermark
    )
    assert len(expected) > 60
    assert said == f"{len(expected)} closed windows are new in delays"
    assert found == expected


def test_a_range_of_time_is_copied_once_however_often_the_job_is_run(
    cluster: LocalCluster, spark: SparkSession, flights: pd.DataFrame
) -> None:
    create(cluster, "backfilled")
    since, until = "2013-01-02T07:30:00-05:00", "2013-01-04T00:00:00Z"
    ranged = flights[(flights["time"] >= pd.Timestamp(since)) & (flights["time"] < pd.Timestamp(until))]
    for _ in range(2):
        said = run(
            backfill, spark, "--bootstrap", cluster.bootstrap_servers, "--from", FLIGHTS, "--to", "backfilled",
            "--since", since, "--until", until,
        )  # fmt: skip
        assert (
            said
            == f"{len(ranged):,} records of 2013-01-02T12:30:00+00:00 until 2013-01-04T00:00:00+00:00 are in backfilled"
        )
    found = by_key(
        (message.key, json.loads(message.value or b"")["flight"])
        for message in all_messages(cluster.bootstrap_servers, "backfilled")
    )
    assert 1000 < len(ranged) < COUNT - 1000
    assert found == by_key(zip(ranged["carrier"].str.encode("utf-8"), ranged["flight"], strict=True))


@pytest.mark.parametrize(
    "since, until, told",
    [
        ("2013-01-01T00:00:00Z", "2999-01-01T00:00:00Z", "is yet to come"),
        ("2013-01-01T00:00:00", "2013-01-02T00:00:00Z", "has no zone"),
        ("2013-01-02T00:00:00Z", "2013-01-02T00:00:00Z", "--since must be before --until"),
        ("yesterday", "2013-01-02T00:00:00Z", "invalid moment value: 'yesterday'"),
    ],
)
def test_a_range_that_could_not_be_copied_whole_is_refused(
    since: str, until: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        backfill.parse(["--bootstrap", "host:1", "--from", "a", "--to", "b", "--since", since, "--until", until])
    assert told in capsys.readouterr().err


def test_who_publishes_without_a_broker_is_told_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_ports(1)}"
    monkeypatch.setattr(sys, "argv", ["publish_flights", "--bootstrap", address, "--count", "1"])
    with pytest.raises(SystemExit, match=f"^no broker reachable at {address}: .*; `kafkalog local`, in another shell"):
        publish_flights.main()


def test_the_commands_that_readme_and_docstrings_print_are_what_the_jobs_take() -> None:
    pages = [ROOT / "README.md", *PIPELINES.glob("*.py")]
    # A backslash is doubled in a docstring.
    text = "\n".join(page.read_text().replace("\\\\\n", "\\\n") for page in pages)
    printed = [
        shlex.split(command.replace("\\\n", " "))
        for command in re.findall(r"^    spark-submit ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    ]
    ran = set()
    for command in printed:
        [job] = [word for word in command if word.endswith(".py")]
        module = importlib.import_module(job.removesuffix(".py").replace("/", "."))
        module.parse(command[command.index(job) + 1 :])
        ran.add(ROOT / job)
    assert ran == set(PIPELINES.glob("*.py")) and len(printed) == 2 * len(ran)


def test_spark_submit_starts_a_job_whose_last_line_is_its_result_and_which_logs_no_more_than_it_must(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    flights = [
        {"origin": origin, "dep_delay": delay, "flight": number}
        for number, (origin, delay) in enumerate((o, d) for o in ("EWR", "JFK", "LGA") for d in (-5, 60, 61, None, 300))
    ]
    create(cluster, "submitted-flights", "submitted-late")
    with Producer(cluster.bootstrap_servers) as producer:
        for number, flight in enumerate(flights):
            producer.send("submitted-flights", json.dumps(flight).encode(), partition=number % 2)
    command = [
        str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]", "--conf", "spark.ui.enabled=false",
        str(PIPELINES / "late_flights.py"), "--bootstrap", cluster.bootstrap_servers,
        "--from", "submitted-flights", "--to", "submitted-late", "--minutes", "60",
        "--checkpoint", str(tmp_path / "checkpoint"),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ours = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path, "SPARK_CONF_DIR": str(ROOT / "conf")}
    environment = {name: value for name, value in {**os.environ, **ours}.items() if name != "SPARK_HOME"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-5000:]
    late = [flight for flight in flights if isinstance(flight["dep_delay"], int) and flight["dep_delay"] > 60]
    assert ran.stdout == f"{len(late)} late flights are new in submitted-late\n"
    assert "adaptive" not in ran.stderr and " INFO " not in ran.stderr
    copies = all_messages(cluster.bootstrap_servers, "submitted-late")
    found = [(message.key, json.loads(message.value or b"")) for message in copies]
    assert sorted(row["flight"] for _, row in found) == [flight["flight"] for flight in late]
    assert all(key is not None and key.decode() == row["origin"] for key, row in found)
