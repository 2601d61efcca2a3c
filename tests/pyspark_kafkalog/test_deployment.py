"""The format wherever Spark runs: one job (`deployed_job.py`) in each kind of deployment."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from broker.local import LocalCluster
from kafkalog import Admin, Message
from tests.borrowed_environment import borrowed_environment
from tests.java import QUICK
from tests.pyspark_kafkalog.deployed_job import HALTING_TASK, TASKS
from tests.pyspark_kafkalog.deployments import (
    CONF,
    FOREACH_BATCH_JOB,
    JOB,
    ROOT,
    SPARK_HOME,
    Running,
    environment,
    options,
    standalone_master,
)

pytestmark = pytest.mark.timeout(600)  # Spark starts cold, perhaps on a busy machine

COMMON = {
    "spark.ui.enabled": "false",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
}
SUBMIT = str(SPARK_HOME / "bin" / "spark-submit")
EQUAL = {"missing": 0, "foreign": 0, "doubled": 0}


def check(found: dict[str, Any], master: str, *, conf: bool) -> None:
    """The job ran as it was meant to, and both of its topics have each row once."""
    assert found["source"] == found["target"] == EQUAL
    assert found["micro_batches"] >= 2
    settings = found["settings"]
    assert settings["spark.master"] == master
    assert settings["spark.python.unix.domain.socket.enabled"] == ("true" if conf else None)


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
                admin.create_topic(topic, partitions=TASKS)
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
    # A name, not a path: each machine's PATH says which Python it is there.
    path = os.environ["PATH"]
    settings = {**COMMON, "spark.executorEnv.PATH": f"{executors}:{path}"}
    command = [SUBMIT, "--master", "local-cluster[2,1,1024]", "--properties-file", str(CONF), *options(settings)]
    variables = environment(PYTHONPATH="", PYSPARK_PYTHON="python3", PATH=f"{driver}:{path}")
    job = [str(JOB), cluster.bootstrap_servers, str(tmp_path), topics()]
    with Running([*command, *job], variables, tmp_path) as running:
        [found] = running.answer()
    check(found, "local-cluster[2,1,1024]", conf=True)
    assert found["driver"] == str(driver.parent)
    assert found["prefixes"] == [str(executors.parent)]
    assert [package.startswith(str(executors.parent)) for package in found["packages"]] == [True]
    started = {tuple(line.split(" ", 1)) for line in told.read_text().splitlines()}
    of_data_sources = {(prefix, line) for prefix, line in started if "-m pyspark" in line}
    daemon = "pyspark_kafkalog.daemon pyspark.worker"
    tasks = {(prefix, line) for prefix, line in of_data_sources if line.endswith(daemon)}
    assert {prefix for prefix, _ in tasks} == {str(executors.parent)}
    planners = of_data_sources - tasks
    assert {prefix for prefix, _ in planners} == {str(driver.parent)}
    assert any("python_streaming_source_runner" in line for _, line in planners)


def test_standalone_with_speculation_twins_run_and_each_row_is_there_once(
    cluster: LocalCluster, topics: Callable[[], str], tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    settings = {
        **COMMON,
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.5",
        "spark.executor.memory": "512m",
        "spark.python.task.killTimeout": "100ms",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20",  # rows reach the sink before the task halts
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    job = [str(JOB), "--halting", cluster.bootstrap_servers, str(tmp_path), topics(), f"{topics()}:at-least-once"]
    with standalone_master(tmp_path) as master:
        command = [SUBMIT, "--master", master, *options(settings), *job]
        with Running(command, environment(), tmp_path) as running:
            found, doubled = running.answer()
    check(found, master, conf=False)
    for topic in ("source", "target"):  # which shows that the twins' rows would be seen
        assert doubled[topic]["doubled"] > 0 and doubled[topic]["missing"] == doubled[topic]["foreign"] == 0
    [log] = events.iterdir()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    name_of = {
        event["Stage Info"]["Stage ID"]: event["Stage Info"]["Stage Name"]
        for event in logged
        if event["Event"] == "SparkListenerStageCompleted"
    }
    twins = Counter(
        name_of[event["Stage ID"]].split(" ")[0]
        for event in logged
        if event["Event"] == "SparkListenerTaskEnd"
        and event["Task Info"]["Speculative"]
        and event["Task Info"]["Index"] == HALTING_TASK
        and event["Task End Reason"]["Reason"] == "Success"
    )
    assert twins["save"] == 2 and twins["start"] == found["micro_batches"] + doubled["micro_batches"]


@pytest.fixture(scope="module")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A Spark Connect server, and its address."""
    settings = {
        **COMMON,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    }
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", *options(settings)]
    command = [SUBMIT, "--master", "local[2]", "--properties-file", str(CONF), *server]
    with Running(command, environment(SPARK_CONNECT_MODE="0"), tmp_path_factory.mktemp("connect")) as serving:
        port = serving.told(r"Spark Connect server started at: \S+:(\d+)")
        yield serving, f"sc://127.0.0.1:{port}"


def test_spark_connect_with_conf_and_a_client_that_has_no_kafkalog(
    cluster: LocalCluster, connect_server: tuple[Running, str], topics: Callable[[], str], tmp_path: Path
) -> None:
    _, address = connect_server
    home = tmp_path / "client"
    borrowed_environment(home)
    job = [str(JOB), cluster.bootstrap_servers, str(tmp_path), topics(), "--remote", address]
    client = [str(home / "bin" / "python"), *job]
    with Running(client, environment(PYTHONPATH="", PYSPARK_PYTHON=""), tmp_path) as running:
        [found] = running.answer()
    check(found, "local[2]", conf=True)
    assert found["driver"] == str(home) and not found["driver_has_kafkalog"]
    assert found["prefixes"] == [sys.prefix] and found["packages"] == [str(ROOT / "pyspark_kafkalog")]


def test_foreach_batch_under_spark_connect_knows_its_query_by_its_checkpoint(
    cluster: LocalCluster,
    connect_server: tuple[Running, str],
    topic: str,
    messages_in: Callable[[str], list[Message]],
    tmp_path: Path,
) -> None:
    serving, address = connect_server
    home = tmp_path / "client"
    borrowed_environment(home)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic)
    client = [str(home / "bin" / "python"), str(FOREACH_BATCH_JOB), cluster.bootstrap_servers, str(tmp_path)]
    with Running([*client, topic, address], environment(PYTHONPATH="", PYSPARK_PYTHON=""), tmp_path) as running:
        found = running.answer()
    assert found["unnumbered"] is found["named"] is found["again"] is None
    assert "the query that writes version 0 of txnAppId 'connect' is not known" in found["unnamed"]
    assert f"query {found['id']} wrote to topic '{topic}', and this write belongs to query" in found["new"]
    assert [message.value for message in messages_in(topic)] == [b"a", b"a"]  # unnumbered, and named
    [warning] = [line for line in serving.errors if "write_not_numbered" in line]
    assert "txnAppId" in warning and "checkpointLocation" in warning


IN_A_CELL = """
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark_kafkalog import DefaultSource

spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(DefaultSource)

def same(batches):
    import pyspark_kafkalog
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"same": [DefaultSource is pyspark_kafkalog.DefaultSource] * batch.num_rows})

assert spark.range(1).mapInArrow(same, "same boolean").collect()[0].same
"""
"""The class that a task gets from a notebook is the one that it has itself: it went by its name, not as a copy."""


def test_notebook_on_local_cores_without_conf_and_without_reuse_of_workers(
    cluster: LocalCluster, topics: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**COMMON, "spark.python.worker.reuse": "false"}
    submit = shlex.join(["--master", "local[2]", *options(settings), "pyspark-shell"])
    arguments = ["job", cluster.bootstrap_servers, str(tmp_path), topics()]
    cells = [f"import sys; sys.argv = {arguments!r}", IN_A_CELL, JOB.read_text()]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment(PYSPARK_SUBMIT_ARGS=submit))
    printed = "".join(output["text"] for output in notebook.cells[-1].outputs if output.get("name") == "stdout")
    [found] = json.loads(printed.splitlines()[-1])
    check(found, "local[2]", conf=False)
    assert found["settings"]["spark.python.worker.reuse"] == "false"
    first, second = found["pids"]
    assert not set(first) & set(second)
