"""Files read by a Java of our own: what it is started with and may say, with programs in its place, and what a real one
reads. What a checkpoint makes of its end is in `test_fingerprint.py`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from pyspark_kafkalog.write import hadoop
from pyspark_kafkalog.write.hadoop import HadoopFiles, HadoopUnavailable

Says = Callable[[str], None]


@pytest.fixture
def java_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Has a shell script be Java; it notes its process and what it was given first."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(hadoop, "_END_SECONDS", 0.1)

    def write(script: str) -> None:
        java = tmp_path / "bin" / "java"
        java.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/process\nprintf "%s\\n" "$@" > {tmp_path}/given\n{script}\n')
        java.chmod(0o755)

    return write


def given(tmp_path: Path) -> list[str]:
    return (tmp_path / "given").read_text().splitlines()


def test_a_java_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(HadoopUnavailable, match="bin/java: No such file"):
        HadoopFiles({})


@pytest.mark.parametrize(
    "script", ["exit 1", "echo 25333", "echo port; echo secret; exec sleep 600", "echo; echo x; cat"]
)
def test_what_is_no_py4j_is_refused_and_ended(java_says: Says, tmp_path: Path, script: str) -> None:
    java_says(script)
    with pytest.raises(HadoopUnavailable, match="bin/java did not start py4j of Spark's jars"):
        HadoopFiles({})
    process = int((tmp_path / "process").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_java_is_given_hadoops_configuration_sparks_jars_and_the_applications(
    java_says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_says("exit 1")
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    with pytest.raises(HadoopUnavailable):
        HadoopFiles({}, jars="file:/a.jar,/b c.jar")
    arguments = given(tmp_path)
    first, spark, *more = arguments[arguments.index("-cp") + 1].split(os.pathsep)
    assert first == "/etc/hadoop"
    assert spark.endswith("/jars/*") and Path(spark).parent.is_dir()
    assert more == ["/a.jar", "/b c.jar"]
    assert "--die-on-broken-pipe" in arguments and "--enable-auth" in arguments
    monkeypatch.delenv("HADOOP_CONF_DIR")
    with pytest.raises(HadoopUnavailable):
        HadoopFiles({})
    arguments = given(tmp_path)
    assert arguments[arguments.index("-cp") + 1] == spark, "an empty place would be the working directory"


def test_its_first_lines_are_taken_in_whatever_pieces_they_come(java_says: Says, tmp_path: Path) -> None:
    java_says("printf 25; sleep 0.05; printf '333\\nsec'; sleep 0.05; printf 'ret\\nmore\\nand'; exec cat")
    with subprocess.Popen([tmp_path / "bin" / "java"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert hadoop._first_lines(process, 2) == ["25333", "secret"]
        process.kill()


def test_a_line_that_does_not_end_is_none(java_says: Says, tmp_path: Path) -> None:
    java_says("printf '25333\\nsecr'")
    with subprocess.Popen([tmp_path / "bin" / "java"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert hadoop._first_lines(process, 2) == ["25333"]


# --- a real one


@pytest.fixture(scope="module")
def files() -> Iterator[HadoopFiles]:
    made = HadoopFiles({"fs.viewfs.mounttable.c.link./root": "file:/", "fs.defaultFS": "viewfs://c"})
    yield made
    made.close()
    assert made.has_ended and not made.is_alive


@pytest.mark.java
def test_a_file_is_read_whole_by_the_settings_that_were_given(files: HadoopFiles, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    (tmp_path / "a file").write_bytes(data)
    assert files.read(f"viewfs://c/root{tmp_path}/a file") == data
    assert files.read(f"/root{tmp_path}/a file") == data
    (tmp_path / "empty").touch()
    assert files.read(f"file:{tmp_path}/empty") == b""


@pytest.mark.java
def test_what_cannot_be_read_is_said_and_the_process_is_kept(files: HadoopFiles, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        files.read(f"file:{tmp_path}/nothing")
    for address, reason in (
        (f"file:{tmp_path}", "directory"),
        ("nosuch://place/x", 'No FileSystem for scheme "nosuch"'),
    ):
        with pytest.raises(HadoopUnavailable, match=reason) as raised:
            files.read(address)
        assert "\n" not in str(raised.value) and len(str(raised.value)) <= 300
    assert files.is_alive and not files.has_ended


@pytest.mark.java
def test_a_java_that_refuses_a_setting_is_ended() -> None:
    def children() -> set[str]:
        tasks = Path("/proc/self/task").iterdir()
        return {child for task in tasks for child in (task / "children").read_text().split()}

    before = children()
    with pytest.raises(HadoopUnavailable, match="x must not be null"):
        HadoopFiles({"x": cast(str, None)})
    assert children() == before
