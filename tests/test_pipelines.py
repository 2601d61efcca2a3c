"""The spark-submit jobs, each run whole on some days of real flights and compared with pandas on the same flights."""

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
from typing import Any

import pandas as pd
import pytest

from broker.local import LocalCluster
from examples import demo, publish_flights
from examples.pipelines import backfill
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition

ROOT = Path(__file__).resolve().parent.parent
PIPELINES = ROOT / "examples" / "pipelines"
FLIGHTS = "pipelines-flights"
COUNT = 4000  # the flights of four days and a half

pytestmark = pytest.mark.timeout(600)  # Spark starts cold, perhaps on a busy machine


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


def submit(job: str, *arguments: str) -> None:
    """Run a job as its docstring says, with the project's Spark settings."""
    command = [
        str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]",
        "--properties-file", str(ROOT / "conf" / "spark-defaults.conf"), "--conf", "spark.ui.enabled=false",
        "--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.driver.memory=1g",
        str(PIPELINES / job), *arguments,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
    environment.pop("SPARK_HOME", None)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-5000:]


def read(cluster: LocalCluster, topic: str) -> list[Message]:
    """Every message of a topic that `create` made, in the order of each partition."""
    partitions = [TopicPartition(topic, number) for number in range(2)]
    with Admin(cluster.bootstrap_servers) as admin:
        ends = admin.list_offsets(dict.fromkeys(partitions, "latest"))
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign(dict.fromkeys(partitions, "earliest"))
        return list(consumer.messages(max_messages=sum(end.offset or 0 for end in ends.values())))


def by_key(rows: Iterable[tuple[bytes | None, Any]]) -> dict[str, list[Any]]:
    """What each key has, in order."""
    found: dict[str, list[Any]] = {}
    for key, row in rows:
        assert key is not None
        found.setdefault(key.decode(), []).append(row)
    return found


def test_each_flight_gets_its_plane_as_of_now_and_keeps_its_place(
    cluster: LocalCluster, flights: pd.DataFrame, tmp_path: Path
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

    submit(
        "enrich_flights.py", "--bootstrap", cluster.bootstrap_servers, "--flights", FLIGHTS, "--planes", "planes",
        "--to", "flights-with-planes", "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip

    def row(flight: dict[str, Any]) -> tuple[Any, ...]:
        plane = flight.get("plane") or {}
        return (flight["flight"], flight.get("tailnum"), plane.get("model"), plane.get("seats"))

    messages = read(cluster, "flights-with-planes")
    found = by_key((message.key, row(json.loads(message.value or b""))) for message in messages)
    kept = pd.DataFrame([plane for plane in planes if plane not in gone])
    joined = flights.merge(kept, on="tailnum", how="left").astype(object)
    joined = joined.where(joined.notna(), None)
    assert 0 < joined["model"].isna().sum() < joined["model"].notna().sum()
    rows = joined[["flight", "tailnum", "model", "seats"]].itertuples(index=False, name=None)
    assert found == by_key(zip(joined["carrier"].str.encode("utf-8"), rows, strict=True))


def test_each_closed_window_is_written_once_with_the_departures_that_came_in_time(
    cluster: LocalCluster, flights: pd.DataFrame, tmp_path: Path
) -> None:
    create(cluster, "delays")
    submit(
        "delays_by_window.py", "--bootstrap", cluster.bootstrap_servers, "--from", FLIGHTS, "--to", "delays",
        "--window", "3 hours", "--lateness", "12 hours", "--batch", "2000",
        "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip
    values = [json.loads(message.value or b"") for message in read(cluster, "delays")]
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
    assert found == expected


def test_a_range_of_time_is_copied_once_however_often_the_job_is_run(
    cluster: LocalCluster, flights: pd.DataFrame
) -> None:
    create(cluster, "backfilled")
    since, until = "2013-01-02T07:30:00-05:00", "2013-01-04T00:00:00Z"
    for _ in range(2):
        submit(
            "backfill.py", "--bootstrap", cluster.bootstrap_servers, "--from", FLIGHTS, "--to", "backfilled",
            "--since", since, "--until", until,
        )  # fmt: skip
    found = by_key((message.key, json.loads(message.value or b"")["flight"]) for message in read(cluster, "backfilled"))
    ranged = flights[(flights["time"] >= pd.Timestamp(since)) & (flights["time"] < pd.Timestamp(until))]
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
