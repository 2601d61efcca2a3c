"""The daemon of Spark's Python workers, called as Spark calls it: what is printed when Spark ends one."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 4)])  # it waits for a task, or Spark has enough in one
def test_a_worker_that_spark_has_ended_ends_without_a_word(tmp_path: Path, sent: bytes) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(tmp_path),
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-m", "pyspark_kafkalog.daemon", "pyspark.sql.worker.create_data_source"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as daemon:  # type: ignore[call-overload]
        assert daemon.stdin is not None and daemon.stdout is not None and daemon.stderr is not None
        [length] = struct.unpack("!i", daemon.stdout.read(4))
        path = daemon.stdout.read(length).decode()
        with socket.socket(socket.AF_UNIX) as spark:
            spark.connect(path)
            assert len(spark.recv(4)) == 4  # the worker's process id: it is there
            spark.sendall(sent)
        workers = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
        waited_for(lambda: workers.read_text().strip() == "")
        daemon.stdin.close()
        assert daemon.stderr.read().decode() == ""
