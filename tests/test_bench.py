"""The benchmarks run, small, in the tests' Spark, and say what they measured; their figures are looked at elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from bench.__main__ import BENCHMARKS, main
from bench.spark_conf import MEASURED

pytestmark = pytest.mark.java

ROOT = Path(__file__).resolve().parent.parent
BESIDE_KAFKA = ("kafka", "kafka_stream", "kafka_replicated", "confluent", "scale", "durable")
ALONE = ("spark_conf", *BESIDE_KAFKA, "paper")
"""These start Sparks with settings of their own, or peers: `tests/soak/test_bench.py`."""


def check(name: str, figures: list[dict[str, Any]]) -> None:
    assert figures
    for figure in figures:
        assert figure["benchmark"] == name
        assert figure["value"] > 0
        assert figure["command"] == f"./run bench {name}"


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in ALONE])
def test_a_benchmark_runs_small(name: str, spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    spark.createDataFrame([], "none int")  # makes it the active session: a test before may have left another
    assert main([name, "--scale", "0.002"]) == 0
    check(name, [json.loads(line) for line in capsys.readouterr().out.splitlines()])


def test_kafka_without_its_jars_is_one_sentence(tmp_path: Path) -> None:
    no_network = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9 -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=9"
    environment = {**os.environ, "HOME": str(tmp_path), "JAVA_TOOL_OPTIONS": no_network}
    command = [sys.executable, "-m", "bench", "kafka", "--scale", "0.002"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    [line] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert line["benchmark"] == "kafka"
    assert line["skipped"].startswith("Kafka's jars cannot be had from here: ")
    assert "\n" not in line["skipped"]


def test_every_setting_of_the_spark_defaults_is_measured() -> None:
    lines = (ROOT / "conf" / "spark-defaults.conf").read_text().splitlines()
    settings = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    settings.remove("spark.python.daemon.module")  # what it gives is silence
    assert settings <= set(MEASURED)


def test_an_unknown_benchmark_is_named() -> None:
    command = [sys.executable, "-m", "bench", "spark_raed"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "there is no benchmark 'spark_raed'" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peers", "producer"], "no page shows the figures of 'producer'; --peers is for paper, "),
        (
            ["--peers", "--scale", "0.1", "start"],
            "--peers publishes its figures, so they are of the full record counts",
        ),
    ],
)
def test_what_is_not_published_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert says in capsys.readouterr().err
