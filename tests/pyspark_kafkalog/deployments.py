"""Starts what Spark is deployed as, for tests: servers from pyspark's own jars, jobs, virtual environments. Everything
ends with its `with` block, and is killed when the tests' process is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pyspark

from broker.local.zookeeper import with_parent
from tests.java import QUICK

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
JOB = Path(__file__).with_name("deployed_job.py")
FOREACH_BATCH_JOB = Path(__file__).with_name("foreach_batch_job.py")
CONF = ROOT / "conf" / "spark-defaults.conf"

_OF_SPARK = re.compile(r"PYTHONPATH|PYSPARK_.*|SPARK_.*")
_TOLD_SECONDS = 180.0
_ANSWER_SECONDS = 400.0
_STOP_SECONDS = 30.0


def environment(**given: str) -> dict[str, str]:
    """Variables for a process of Spark: none that this process has for its own, the checkout importable, and those
    given; an empty one is left out."""
    plain = {name: value for name, value in os.environ.items() if not _OF_SPARK.fullmatch(name)}
    ours = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return {name: value for name, value in (plain | ours | given).items() if value}


def options(settings: Mapping[str, str]) -> list[str]:
    """Spark settings for spark-submit's command line."""
    return [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]


class Running:
    """A process in a group of its own, from its start to the end of the `with` block.

    Attributes:
        output: the lines of its standard output so far.
        errors: those of its standard error.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str], folder: Path) -> None:
        # Not by preexec_fn: that forks this process, with the threads of gRPC in it.
        self._process = subprocess.Popen(
            with_parent(command),
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []
        self.errors: list[str] = []
        self._news = threading.Condition()
        self._unread = 2
        assert self._process.stdout is not None and self._process.stderr is not None
        streams = ((self._process.stdout, self.output), (self._process.stderr, self.errors))
        self._readers = [threading.Thread(target=self._keep, args=each, daemon=True) for each in streams]
        for reader in self._readers:
            reader.start()

    def _keep(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                with self._news:
                    lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._unread -= 1
            self._news.notify_all()

    def told(self, pattern: str) -> str:
        """The first group of a pattern in what it logs, as soon as it is there."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.errors)), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self._unread, _TOLD_SECONDS)
            match = found()
        assert match, f"did not log '{pattern}': {''.join(self.errors)[-5000:]}"
        return match[1]

    def answer(self) -> Any:
        """The JSON of the last line that it printed, once it has ended well."""
        code = self._process.wait(_ANSWER_SECONDS)
        for reader in self._readers:
            reader.join(_STOP_SECONDS)
        assert code == 0, f"{''.join(self.errors)[-8000:]}"
        return json.loads(self.output[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            self._process.terminate()
            self._process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # what it started, too
            except ProcessLookupError:
                pass
            self._process.wait()


@contextmanager
def standalone_master(folder: Path, cores: int = 1) -> Iterator[str]:
    """The address of a standalone master with two workers of so many cores, each a host of its own to Spark, which
    starts a twin only where the first attempt does not run."""
    variables = environment(
        SPARK_MASTER_OPTS="-Dspark.master.rest.enabled=false",
        SPARK_DAEMON_MEMORY="256m",
        SPARK_DAEMON_JAVA_OPTS=QUICK,
    )
    spark_class = [str(SPARK_HOME / "bin" / "spark-class"), "org.apache.spark.deploy"]
    names = ["--port", "0", "--webui-port", "0", "--host"]
    with ExitStack() as stack:

        def start(kind: str, host: str, *arguments: str) -> Running:
            command = [spark_class[0], f"{spark_class[1]}.{kind}", *names, host, *arguments]
            return stack.enter_context(Running(command, variables, folder))

        address = start("master.Master", "127.0.0.1").told(r"Starting Spark master at (spark://\S+)")
        size = ["--cores", str(cores), "--memory", "1g", "--work-dir"]
        hosts = ("127.0.0.2", "127.0.0.3")
        workers = [start("worker.Worker", host, *size, str(folder / host), address) for host in hosts]
        for worker in workers:
            worker.told("(Successfully registered with master)")
        yield address
