"""Pages that a newcomer types: their Python and their commands in order, and what each of them prints."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from broker.local import LocalCluster
from kafkalog import Admin, Producer
from kafkalog.cli.main import run

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BY_HAND = ("./run setup", "kafkalog local", "rm -r")
"""Beginnings of the blocks that start a cluster and take it away, which the test does itself."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page, outputs",
    [("tutorial/exactly-once.md", 7), ("how-to/use-python.md", 4), ("how-to/use-asyncio.md", 3)],
)
def test_a_page_shows_what_is_printed(
    page: str, outputs: int, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    printed: str | None = None
    compared = 0
    with LocalCluster() as cluster:  # its own: the tutorial lists all groups
        text = (DOCS / page).read_text().replace("127.0.0.1:9192", cluster.bootstrap_servers)
        for language, block in _BLOCK.findall(text.replace("/tmp/kafkalog-tutorial", str(tmp_path))):
            if language == "text":
                if printed is not None:
                    assert [line.rstrip() for line in printed.splitlines()] == block.splitlines()
                    compared += 1
                printed = ""
                continue
            assert not printed, f"{page} does not show that this is printed: {printed}"
            if block.startswith(_BY_HAND):
                printed = None
                continue
            capfd.readouterr()
            if language == "python":
                for statement in ast.parse(block).body:  # as Python's prompt, which prints what a statement returns
                    exec(compile(ast.Interactive([statement]), page, "single"), names)
            else:
                for line in block.splitlines():
                    program, *arguments = shlex.split(line)
                    assert program == "kafkalog"
                    assert run(["--bootstrap", cluster.bootstrap_servers, *arguments]) == 0
            printed = "\n".join(capfd.readouterr().out.rstrip().splitlines())
    assert compared == outputs


@pytest.mark.timeout(300)
def test_each_query_of_a_page_reads_the_whole_topic(spark: SparkSession, tmp_path: Path) -> None:
    names: dict[str, Any] = {"spark": spark}
    queries = 0
    with LocalCluster() as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic("flights", partitions=2)
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(6):
                producer.send("flights", b"%d" % number, partition=number % 2)
        text = (DOCS / "how-to/read-a-stream.md").read_text().replace("127.0.0.1:9192", cluster.bootstrap_servers)
        for language, block in _BLOCK.findall(text):
            if language == "python":
                exec(block.replace("/data/", f"{tmp_path}/"), names)
                query: StreamingQuery = names.pop("query")
                query.processAllAvailable()
                query.stop()
                [folder] = re.findall(r'start\("/data/(.+?)"\)', block)
                read = spark.read.parquet(str(tmp_path / folder)).collect()
                assert sorted(row.flight for row in read) == list("012345")
                queries += 1
    assert queries == 3
