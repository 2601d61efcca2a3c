"""The benchmarks that start Sparks with settings of their own, or Apache Kafka, run small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_bench import ALONE, BESIDE_KAFKA, check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)  # several Sparks start cold, perhaps on a busy machine
@pytest.mark.parametrize("name", ALONE)
def test_a_benchmark_with_a_spark_of_its_own_runs_small(name: str) -> None:
    command = [sys.executable, "-m", "bench", name, "--scale", "0.002"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr
    figures = [json.loads(line) for line in ran.stdout.splitlines()]
    if "skipped" in figures[0]:
        # Apache Kafka and its connector are no dependencies of the project's: the jars come over the network, which not
        # every machine has. No other benchmark may be left out, and these for no other reason.
        assert name in (*BESIDE_KAFKA, "paper") and figures[0]["skipped"].startswith("Kafka's jars ")
        pytest.skip(figures[0]["skipped"])
    check(name, [figure for figure in figures if "skipped" not in figure])
