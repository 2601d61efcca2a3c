"""The benchmarks run, small, and say what they measured; their figures are looked at elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.spark_conf import MEASURED

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_small(name: str) -> None:
    command = [sys.executable, "-m", "bench", name, "--scale", "0.002"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    figures = [json.loads(line) for line in ran.stdout.splitlines()]
    assert figures
    if "skipped" in figures[0]:
        pytest.skip(figures[0]["skipped"])
    for figure in figures:
        assert figure["benchmark"] == name
        assert figure["value"] > 0
        assert figure["command"] == f"./run bench {name}"


def test_kafka_without_its_jars_is_one_sentence(tmp_path: Path) -> None:
    no_network = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9 -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=9"
    environment = {**os.environ, "HOME": str(tmp_path), "JAVA_TOOL_OPTIONS": no_network}
    command = [sys.executable, "-m", "bench", "kafka", "--scale", "0.002"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    [line] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert line["benchmark"] == "kafka"
    assert line["skipped"].startswith("Kafka's jars can not be had from here: ")
    assert "\n" not in line["skipped"]


def test_every_setting_of_the_spark_defaults_is_measured() -> None:
    lines = (ROOT / "conf" / "spark-defaults.conf").read_text().splitlines()
    settings = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    assert settings <= set(MEASURED)


def test_an_unknown_benchmark_is_named() -> None:
    command = [sys.executable, "-m", "bench", "spark_raed"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "there is no benchmark 'spark_raed'" in ran.stderr
