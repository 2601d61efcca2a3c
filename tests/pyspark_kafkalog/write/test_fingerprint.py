"""What a checkpoint says of a batch: the same after a restart, another in a copy, unknown where it cannot be read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.sql import SparkSession

from pyspark_kafkalog.write import fingerprint, hadoop
from pyspark_kafkalog.write.fingerprint import (
    CONFIGURED,
    UNKNOWN,
    Checkpoint,
    CheckpointUnreadable,
    Fingerprints,
    checkpoint_of,
)
from pyspark_kafkalog.write.hadoop import HadoopFiles, SessionFiles
from pyspark_kafkalog.write.micro_batch import MicroBatch
from tests.waiting import suspend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a checkpoint."""
    made = tmp_path / "check point"
    (made / "offsets").mkdir(parents=True)
    (made / "metadata").write_text(json.dumps({"id": "query"}))
    (made / "offsets" / "7").write_text("v1\n{}\n{}")
    return made


@pytest.fixture
def fingerprints() -> Iterator[Fingerprints]:
    made = Fingerprints()
    yield made
    made.close()


def at(location: object) -> Checkpoint:
    return Checkpoint(str(location), "query")


def test_it_tells_what_is_planned_and_not_where_the_checkpoint_is(
    folder: Path, tmp_path: Path, fingerprints: Fingerprints
) -> None:
    first = fingerprints.of(at(folder), 7)
    assert len(first) == 32
    assert fingerprints.of(at(folder.rename(tmp_path / "moved")), 7) == first
    (tmp_path / "moved" / "offsets" / "7").write_text("v1\n{}\n{later}")
    assert fingerprints.of(at(tmp_path / "moved"), 7) not in (first, UNKNOWN)


def test_a_file_address_is_read_as_the_path_is(folder: Path, fingerprints: Fingerprints) -> None:
    found = {fingerprints.of(at(each), 7) for each in (f"file://{folder}", f"file:{folder}/", folder)}
    assert len(found) == 1
    assert UNKNOWN not in found


@pytest.mark.java
def test_another_file_system_is_read_as_spark_does(folder: Path, fingerprints: Fingerprints) -> None:
    settings = (("fs.viewfs.mounttable.c.link./mounted", folder.parent.as_uri()), ("fs.defaultFS", "viewfs://c"))
    local = fingerprints.of(at(folder), 7)
    for location in (f"viewfs://c/mounted/{folder.name}/", f"/mounted/{folder.name}"):
        assert fingerprints.of(Checkpoint(location, "query", settings), 7) == local
    assert fingerprints.of(Checkpoint("viewfs://c/mounted/no", "query", settings), 7) == UNKNOWN


@pytest.mark.java
def test_what_lies_at_the_same_path_of_this_machine_is_not_read_for_another_file_system(
    folder: Path, tmp_path: Path, fingerprints: Fingerprints, spark: SparkSession
) -> None:
    left = tmp_path / "left over"
    shutil.copytree(folder, left)
    (left / "offsets" / "7").write_text("v1\n{}\n{of another run}")
    settings = (
        ("fs.viewfs.mounttable.c.link." + str(left), folder.as_uri()),
        ("fs.defaultFS", "viewfs://c"),
    )
    assert fingerprints.of(Checkpoint(str(left), "query", settings), 7) == fingerprints.of(at(folder), 7)

    class OfSession(SessionFiles):
        def read(self, address: str) -> bytes:
            return super().read(address.replace(str(left), str(folder)))

    given = Checkpoint(str(left), "query", files=OfSession(spark))
    assert fingerprints.of(given, 7) == fingerprints.of(at(folder), 7)


@pytest.mark.java
def test_what_can_not_be_read_is_unknown_and_warned_of_once(
    folder: Path, fingerprints: Fingerprints, caplog: pytest.LogCaptureFixture
) -> None:
    def said(checkpoint: Checkpoint, batch_id: int = 7) -> list[str]:
        caplog.clear()
        assert fingerprints.of(checkpoint, batch_id) == UNKNOWN
        return [record.message for record in caplog.records if "checkpoint_not_read" in record.message]

    for checkpoint, reason in (
        (at(""), "its location is not known"),
        (at(f"file:{folder}/no"), "No such file"),
        (at("nosuch://place/checkpoint"), 'No FileSystem for scheme "nosuch"'.replace('"', '\\"')),
        (Checkpoint(str(folder), "other"), "it is another query's"),
    ):
        [warning] = said(checkpoint)
        assert reason in warning
        assert "give the query's own checkpointLocation as an option of the write" in warning
        assert said(checkpoint, 8) == []


def test_it_names_its_query_or_says_why_it_does_not(folder: Path, fingerprints: Fingerprints) -> None:
    assert fingerprints.query_of(Checkpoint(str(folder), "")) == "query"
    (folder / "metadata").write_text("[]")
    for location, reason in ((folder, "its metadata is no query's"), (f"file:{folder}/no", "there is no .*metadata")):
        with pytest.raises(CheckpointUnreadable, match=reason):
            fingerprints.query_of(Checkpoint(str(location), ""))


def mounted(folder: Path) -> Checkpoint:
    """A checkpoint on this disk that only Hadoop finds."""
    settings = (("fs.viewfs.mounttable.c.link./mounted", folder.parent.as_uri()), ("fs.defaultFS", "viewfs://c"))
    return Checkpoint(f"viewfs://c/mounted/{folder.name}", "query", settings)


@pytest.mark.java
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_java_that_has_ended_or_is_silent_is_replaced(
    folder: Path, fingerprints: Fingerprints, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(hadoop, "_END_SECONDS", 0.2)
    first = fingerprints.of(mounted(folder), 7)
    assert first != UNKNOWN
    [java] = fingerprints._files.values()
    assert isinstance(java, HadoopFiles)
    java._gateway._gateway_client.gateway_parameters.read_timeout = 1
    for connection in java._gateway._gateway_client.deque:
        connection.socket.settimeout(1)
    if sent == signal.SIGKILL:
        java._process.kill()
        java._process.wait()
    else:
        suspend(java._process.pid)
        assert fingerprints.of(mounted(folder), 7) == UNKNOWN  # the commit goes on without it
    assert fingerprints.of(mounted(folder), 7) == first
    assert java._process.poll() is not None


@pytest.mark.java
def test_a_java_is_kept_whatever_its_file_system_says_and_keeps_nothing_itself_until_it_dies_in_a_read(
    folder: Path, fingerprints: Fingerprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = mounted(folder)
    first = fingerprints.of(checkpoint, 7)
    [java] = fingerprints._files.values()
    assert isinstance(java, HadoopFiles)
    assert fingerprints.of(checkpoint._replace(location="nosuch://place/checkpoint"), 7) == UNKNOWN
    made: list[Any] = []
    path = java._path
    java._path = lambda address: made.append(path(address)) or made[-1]
    assert fingerprints.of(checkpoint, 7) == first
    assert list(fingerprints._files.values()) == [java]
    for each in made:
        with pytest.raises(Py4JError, match="does not exist"):
            each.toString()
    read = java.read

    def dies(address: str) -> bytes:
        java._process.kill()
        java._process.wait()
        return read(address)

    monkeypatch.setattr(java, "read", dies)
    assert fingerprints.of(checkpoint, 7) == first
    [another] = fingerprints._files.values()
    fingerprints.close()
    assert isinstance(another, HadoopFiles)
    assert another._process.returncode >= 0  # it was not killed


def test_a_java_that_says_nothing_is_given_up(
    folder: Path, fingerprints: Fingerprints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nexec sleep 600\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    patience = hadoop._START_SECONDS
    monkeypatch.setattr(hadoop, "_START_SECONDS", 1.0)
    for _ in range(2):
        assert fingerprints.of(mounted(folder), 7) == UNKNOWN
    [process] = (tmp_path / "started").read_text().split()  # not started again at each batch
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(hadoop, "_START_SECONDS", patience)
    now = time.monotonic() + fingerprint._AGAIN_SECONDS + 1
    monkeypatch.setattr(fingerprint, "time", SimpleNamespace(monotonic=lambda: now))
    assert fingerprints.of(mounted(folder), 7) != UNKNOWN


@pytest.mark.parametrize(
    ("properties", "name", "option", "location"),
    [
        ({}, "", "/given", "/given"),
        ({CONFIGURED: "/root"}, "named", "/given", "/given"),
        ({CONFIGURED: "/base/"}, "named", None, "/base/named"),
        ({CONFIGURED: "/root"}, "", None, ""),
        ({}, "named", None, ""),
    ],
)
def test_it_is_where_the_write_or_the_session_says(
    properties: dict[str, str], name: str, option: str | None, location: str
) -> None:
    task = TaskContext()
    more = {"spark.hadoop.fs.s3a.endpoint": "e", "spark.jars": "file:/a.jar", "spark.app.id": "x"}
    task._localProperties = {**properties, **more}
    found = checkpoint_of(task, MicroBatch("q", name=name), option)
    assert found == Checkpoint(location, "q", (("fs.s3a.endpoint", "e"),), "file:/a.jar")
