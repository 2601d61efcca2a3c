"""Files of the file systems that Spark knows and Python does not (HDFS, s3a, abfs, ...), read by a Java process beside
the driver: Spark's jars, the same HADOOP_CONF_DIR, the application's `spark.hadoop.` settings.

The process that commits a sink's batches is a Python of Spark's without a way into the driver's JVM. So a Java of its
own is started at the first read (about a second, 100 MB) and kept; a read costs milliseconds then. It ends with this
process, whose end of a pipe it reads.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class HadoopUnavailable(Exception):
    """No such process can be had, or it could not read a file; says why."""


class HadoopFiles:
    """Reads whole files by their addresses.

    Args:
        settings: of Hadoop, over those of its configuration files.
        jars: paths of jars besides Spark's, with commas between.
    """

    def __init__(self, settings: Mapping[str, str], jars: str = "") -> None:
        self._process, self._gateway = _started(jars)
        try:
            jvm: Any = self._gateway.jvm
            self._path = jvm.org.apache.hadoop.fs.Path
            self._configuration = jvm.org.apache.hadoop.conf.Configuration()
            for name, value in settings.items():
                self._configuration.set(name, value)
        except Exception as error:
            self.close()
            raise HadoopUnavailable(_first_line(error)) from None

    def read(self, address: str) -> bytes:
        """A file's bytes. Raises HadoopUnavailable, FileNotFoundError."""
        made: list[Any] = []  # in Java, to be let go there
        try:
            made.append(path := self._path(address))
            made.append(files := path.getFileSystem(self._configuration))
            if not files.exists(path):
                raise FileNotFoundError(address)
            made.append(stream := files.open(path))
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()
        except FileNotFoundError:
            raise
        except Exception as error:  # py4j's, of which a Java exception is one
            raise HadoopUnavailable(_first_line(error)) from None
        finally:
            with suppress(Exception):
                for each in made:
                    self._gateway.detach(each)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._gateway.close()
        self._process.wait()


def _started(jars: str) -> tuple[subprocess.Popen[str], Any]:
    from py4j.java_gateway import GatewayParameters, JavaGateway
    from pyspark.find_spark_home import _find_spark_home

    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if os.environ.get("JAVA_HOME") else "java"
    places = [os.environ.get("HADOOP_CONF_DIR", ""), str(Path(_find_spark_home(), "jars", "*"))]
    places += [jar.removeprefix("file:") for jar in jars.split(",")]
    command = [java, "-Xmx128m", "-XX:+UseSerialGC", "-cp", os.pathsep.join(filter(None, places)), "py4j.GatewayServer"]
    try:
        process = subprocess.Popen(
            [*command, "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except OSError as error:
        raise HadoopUnavailable(f"{java}: {error.strerror}") from None
    assert process.stdout is not None
    port, secret = process.stdout.readline().strip(), process.stdout.readline().strip()
    if not port.isdigit():
        process.kill()
        process.wait()
        raise HadoopUnavailable(f"{java} did not start py4j of Spark's jars")
    # Else what the garbage collector finds after the end would be asked for over a connection that is closed.
    parameters = GatewayParameters(port=int(port), auth_token=secret, enable_memory_management=False)
    return process, JavaGateway(gateway_parameters=parameters)


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]
