"""A standalone Spark: a master and workers of two cores each, with addresses of their own on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.free_ports import free_ports
from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[3]
_CLASS = "org.apache.spark.deploy"


@contextmanager
def standalone_master(folder: Path, workers: Sequence[str]) -> Iterator[str]:
    """Address of a master that has its workers, each at one of these addresses."""
    folder.mkdir()
    port = free_ports(1)
    address = f"spark://127.0.0.1:{port}"
    running = [_started(folder, "master", "master.Master", "--host", "127.0.0.1", "--port", str(port))]
    try:
        for host in workers:
            options = ("--host", host, "--cores", "2", "--memory", "1g", "--work-dir", str(folder / host))
            running.append(_started(folder, f"worker-{host}", "worker.Worker", *options, address))
        log = folder / "master"
        waited_for(lambda: len(re.findall("Registering worker", log.read_text())) == len(workers), 180)
        yield address
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


def _started(folder: Path, name: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_WEBUI_PORT": "0",
        "SPARK_MASTER_WEBUI_PORT": "0",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with (folder / name).open("wb") as log:
        return subprocess.Popen(
            [str(script), f"{_CLASS}.{main}", *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
