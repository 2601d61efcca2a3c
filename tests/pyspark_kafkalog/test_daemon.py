"""The daemon of Spark's Python workers, called as Spark calls it: what is printed when Spark ends one."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[2]
OURS, PYSPARKS = "pyspark_kafkalog.daemon", "pyspark.daemon"
END_OF_STREAM = -4


@pytest.fixture
def folder() -> Iterator[str]:
    """For a Unix socket, whose path has 108 bytes at most: `tmp_path` may be too long."""
    with TemporaryDirectory() as short:
        yield short


@contextmanager
def worker(folder: str, daemon: str, job: str) -> Iterator[tuple[socket.socket, Callable[[], str]]]:
    """A connection to a new worker of a daemon, and what closes it: it returns what was printed until all had ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-m", daemon, f"pyspark.sql.worker.{job}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        given, told, complaints = process.stdin, process.stdout, process.stderr
        assert given is not None and told is not None and complaints is not None
        [length] = struct.unpack("!i", told.read(4))
        path = told.read(length).decode()
        with socket.socket(socket.AF_UNIX) as spark:
            spark.connect(path)
            assert len(spark.recv(4)) == 4  # the worker's process id: it is there

            def printed() -> str:
                spark.close()
                workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                waited_for(lambda: workers.read_text().strip() == "")
                given.close()
                return complaints.read().decode()

            yield spark, printed


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 4)])  # it waits for a task, or Spark has enough in one
def test_a_worker_that_spark_has_ended_ends_without_a_word(folder: str, sent: bytes) -> None:
    with worker(folder, OURS, "create_data_source") as (spark, printed):
        spark.sendall(sent)
        assert printed() == ""


@pytest.mark.parametrize("daemon", [OURS, PYSPARKS])
def test_a_worker_that_has_looked_for_data_sources_ends_without_a_word(folder: str, daemon: str) -> None:
    with worker(folder, daemon, "lookup_data_sources") as (spark, printed):
        texts = ["{}.{}".format(*sys.version_info), folder]
        request = b"".join(struct.pack("!i", len(text)) + text.encode() for text in texts)
        spark.sendall(request + struct.pack("!i?iii", 0, False, 0, 0, END_OF_STREAM))
        with spark.makefile("rb") as answer:

            def number() -> int:
                return int(struct.unpack("!i", answer.read(4))[0])

            found = [(answer.read(number()), answer.read(number()))[0] for _ in range(number())]
            assert b"kafkalog" in found
            for _ in range(number()):  # what it has counted
                answer.read(number())
            assert number() == END_OF_STREAM
        assert printed() == ""
