"""Pages that a newcomer types: their Python and their commands in order, and what each of them prints."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker.local import LocalCluster
from kafkalog.cli.main import run

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BY_HAND = ("./run setup", "kafkalog local", "rm -r")
"""Beginnings of the blocks that start a cluster and take it away, which the test does itself."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page, outputs", [("tutorial/exactly-once.md", 7), ("how-to/use-python.md", 3)])
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
