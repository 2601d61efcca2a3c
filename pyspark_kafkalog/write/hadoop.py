"""Reads files of file systems that Spark supports and Python does not (HDFS, s3a, abfs, ...), by a Java process beside
the driver, with Spark's jars, the same HADOOP_CONF_DIR, and the application's `spark.hadoop.` settings.

The process that commits a sink's batches is a Python process of Spark without access to the driver's JVM. So a Java
process is started at the first read (about a second, 100 MB) and kept; further reads take milliseconds. It ends with
this process, because it reads the end of a pipe. If it has ended, or does not answer, it is replaced at the next read.
`write_stream` commits where the session is, whose own Java reads the files, with all that was set in it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_END_SECONDS = 5.0
"""How long a Java may take to say its port, for one call, and to end. A commit waits for it, so there is an end; the
retries of a file system that is away for a moment (HDFS's failover) take up to about a minute."""


class HadoopUnavailable(Exception):
    """The Java process could not be started, or could not read a file; the sentence has the reason."""


class SessionFiles:
    """Reads whole files by the Java of this process's session."""

    def __init__(self, session: SparkSession) -> None:
        self._session: Any = session

    def read(self, address: str) -> bytes:
        """A file's bytes. Raises HadoopUnavailable, FileNotFoundError."""
        try:
            path = self._session._jvm.org.apache.hadoop.fs.Path(address)
            files = path.getFileSystem(self._session._jsparkSession.sessionState().newHadoopConf())
            if files.exists(path):
                return _all_of(files.open(path))
        except Exception as error:  # py4j's, of which a Java exception is one; or the session was stopped
            raise HadoopUnavailable(_first_line(error)) from None
        raise FileNotFoundError(address)


class HadoopFiles:
    """Reads whole files by their addresses, in a Java process of its own.

    Args:
        settings: of Hadoop, over those of its configuration files.
        jars: paths of jars besides Spark's, with commas between.
    """

    def __init__(self, settings: Mapping[str, str], jars: str = "") -> None:
        self._process, self._gateway = _started(jars)
        self._is_lost = False
        try:
            jvm: Any = self._gateway.jvm
            self._path = jvm.org.apache.hadoop.fs.Path
            self._configuration = jvm.org.apache.hadoop.conf.Configuration()
            for name, value in settings.items():
                self._configuration.set(name, value)
        except Exception as error:
            reason = _first_line(error)  # Java is asked for it
            self.close()
            raise HadoopUnavailable(reason) from None

    def read(self, address: str) -> bytes:
        """A file's bytes. Raises HadoopUnavailable, FileNotFoundError."""
        made: list[Any] = []  # in Java, to be let go there
        try:
            made.append(path := self._path(address))
            made.append(files := path.getFileSystem(self._configuration))
            if not files.exists(path):
                raise FileNotFoundError(address)
            made.append(stream := files.open(path))
            return _all_of(stream)
        except FileNotFoundError:
            raise
        except Exception as error:  # py4j's, of which a Java exception is one
            if not hasattr(error, "java_exception"):
                self._is_lost = True  # the connection or the process is gone
            raise HadoopUnavailable(_first_line(error)) from None
        finally:
            if not self._is_lost:
                with suppress(Exception):
                    for each in made:
                        self._gateway.detach(each)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, as after the OOM killer."""
        return self._process.poll() is not None

    @property
    def is_alive(self) -> bool:
        """Whether it can be used again; if not, close it and start another."""
        return not self._is_lost and not self.has_ended

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(Exception):
            self._gateway.close()
        _end(self._process)


def _all_of(stream: Any) -> bytes:
    try:
        return bytes(stream.readAllBytes())
    finally:
        stream.close()


def _started(jars: str) -> tuple[subprocess.Popen[bytes], Any]:
    from py4j.java_gateway import GatewayParameters, JavaGateway
    from pyspark.find_spark_home import _find_spark_home

    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if os.environ.get("JAVA_HOME") else "java"
    places = [os.environ.get("HADOOP_CONF_DIR", ""), str(Path(_find_spark_home(), "jars", "*"))]
    places += [jar.removeprefix("file:") for jar in jars.split(",")]
    command = [java, "-Xmx128m", "-XX:+UseSerialGC", "-cp", os.pathsep.join(filter(None, places)), "py4j.GatewayServer"]
    try:
        process = subprocess.Popen(
            [*command, "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise HadoopUnavailable(f"{java}: {error.strerror}") from None
    said = _first_lines(process, 2)
    if len(said) < 2 or not said[0].isdigit():
        _end(process, at_once=True)
        raise HadoopUnavailable(f"{java} did not start py4j of Spark's jars")
    port, secret = said
    # Otherwise objects that the garbage collector finds later would be released over a closed connection.
    parameters = GatewayParameters(
        port=int(port), auth_token=secret, enable_memory_management=False, read_timeout=_ANSWER_SECONDS
    )
    return process, JavaGateway(gateway_parameters=parameters)


def _first_lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """The first lines that a process prints; fewer if it ends or the time is over."""
    assert process.stdout is not None
    until = time.monotonic() + _START_SECONDS
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while found.count(b"\n") < count and selector.select(max(0.0, until - time.monotonic())):
            data = os.read(process.stdout.fileno(), 4096)
            if not data:
                break
            found += data
    return found.decode(errors="replace").split("\n")[:-1][:count]


def _end(process: subprocess.Popen[bytes], at_once: bool = False) -> None:
    """End a process; it is killed if it does not end on its own."""
    if not at_once:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
            return
    process.kill()
    process.wait()


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]
