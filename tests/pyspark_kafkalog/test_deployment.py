"""The format wherever Spark runs: one job (`deployed_job.py`) in each kind of deployment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin
from tests.borrowed_environment import borrowed_environment
from tests.pyspark_kafkalog.deployments import CONF, JOB, ROOT, SPARK_HOME, Running, environment, options

pytestmark = pytest.mark.timeout(600)  # Spark starts cold, perhaps on a busy machine

QUIET = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
SUBMIT = str(SPARK_HOME / "bin" / "spark-submit")
EQUAL = {"missing": 0, "foreign": 0, "doubled": 0}

TELLING = """
import os, sys
with open({path!r}, "a") as told:  # one write a line, so that many processes may
    told.write(sys.prefix + " " + " ".join(sys.orig_argv[1:]) + "\\n")
"""
"""A module of an environment that every Python of it imports at its start."""


@pytest.fixture
def topics(cluster: LocalCluster, new_topic: Callable[[], str]) -> Callable[[], str]:
    """Makes a pair of topics as the job takes them."""

    def make() -> str:
        pair = [new_topic(), new_topic()]
        with Admin(cluster.bootstrap_servers) as admin:
            for topic in pair:
                admin.create_topic(topic, partitions=4)
        return ":".join(pair)

    return make


def ours(home: Path, told: Path) -> Path:
    """An environment with its own copy of the project, which tells of each Python that starts; its bin."""
    packages = borrowed_environment(home)
    for package in ("kafkalog", "pyspark_kafkalog"):
        shutil.copytree(ROOT / package, packages / package, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "telling.py").write_text(TELLING.format(path=str(told)))
    (packages / "telling.pth").write_text("import telling\n")
    return home / "bin"


def test_local_cluster_by_spark_submit_with_conf_and_separate_environments(
    cluster: LocalCluster, topics: Callable[[], str], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    driver, executors = (ours(tmp_path / name, told) for name in ("driver", "executors"))
    settings = {**QUIET, "spark.pyspark.driver.python": str(driver / "python")}
    command = [SUBMIT, "--master", "local-cluster[2,1,1024]", "--properties-file", str(CONF), *options(settings)]
    variables = environment(PYTHONPATH="", PYSPARK_PYTHON=str(executors / "python"))
    job = [str(JOB), cluster.bootstrap_servers, str(tmp_path), topics()]
    with Running([*command, *job], variables, tmp_path) as running:
        [found] = running.answer()
    print(json.dumps(found, indent=1), told.read_text())
    assert found["source"] == found["target"] == EQUAL
