"""Apache Kafka brokers to be measured beside: their jars by Maven coordinates, the servers as child processes.

The jars come from where Ivy's own settings say (Maven Central) through the Ivy that lies in pyspark, and stay in the
cache that Spark's `--packages` uses. The servers are KRaft nodes over a temporary folder. They die with the thread that
started them, and a sweeper removes the folder once they are gone, however this process ends.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from xml.sax.saxutils import quoteattr

from bench.measure import NotAvailable
from broker.local.sweeper import swept_folder
from broker.local.zookeeper import find_java, with_parent
from broker.ports import free_port

SERVER_VERSION = "4.1.2"
CONNECTOR_VERSION = "4.2.0"
CLIENT_VERSION = "3.9.2"

SERVER = ((f"org.apache.kafka:kafka_2.13:{SERVER_VERSION}", True), ("org.slf4j:slf4j-simple:1.7.36", True))
"""Coordinates, and whether what they need in turn is to come too."""

CONNECTOR = (
    (f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}", False),
    # For delegation tokens, which are not used here; in a version that also partial mirrors of Maven Central have.
    ("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0", False),
    (f"org.apache.kafka:kafka-clients:{CLIENT_VERSION}", False),
    ("org.apache.commons:commons-pool2:2.13.1", False),
)
"""The connector and what its own pom names but Spark has not."""

_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0
_HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
"""Heap and collector of Kafka's own start script."""


def jars(coordinates: tuple[tuple[str, bool], ...], timeout: float) -> list[str]:
    """Paths of the jars of some coordinates, fetched if need be within so many seconds. Raises NotAvailable."""
    with tempfile.TemporaryDirectory(prefix="kafkalog-ivy-") as folder:
        wanted, found = Path(folder, "ivy.xml"), Path(folder, "classpath")
        wanted.write_text(_ivy_module(coordinates))
        cache = Path.home() / ".ivy2.5.2" / "cache"
        command = [find_java(), "-jar", _ivy_jar(), "-warn", "-cache", str(cache), "-ivy", str(wanted)]
        command += ["-confs", "default", "-cachepath", str(found)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise NotAvailable(f"Kafka's jars had not all come after {timeout:g} s") from None
        if ran.returncode or not found.exists():
            missing = [line.strip(" :\t") for line in ran.stdout.splitlines() if line.rstrip().endswith(": not found")]
            raise NotAvailable(
                f"Kafka's jars cannot be had from here: {'; '.join(dict.fromkeys(missing)) or ran.stderr}"
            )
        return found.read_text().strip().split(os.pathsep)


def _ivy_module(coordinates: tuple[tuple[str, bool], ...]) -> str:
    lines = []
    for coordinate, transitive in coordinates:
        org, name, rev = map(quoteattr, coordinate.split(":"))
        conf = "default->default" if transitive else "default->master"
        lines.append(
            f'<dependency org={org} name={name} rev={rev} conf="{conf}" transitive="{str(transitive).lower()}"/>'
        )
    return (
        '<ivy-module version="2.0"><info organisation="kafkalog" module="bench"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{"".join(lines)}</dependencies>'
        "</ivy-module>"
    )


def _ivy_jar() -> str:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    found = sorted(folder.glob("ivy-*.jar"))
    if not found:
        raise NotAvailable(f"there is no Ivy among pyspark's jars in {folder}, to get Kafka's with")
    return str(found[-1])


class KafkaServer:
    """Brokers, as a context manager: they serve inside the block. `bootstrap_servers` has the host:port of each.

    Args:
        jars: those of `SERVER`.
        settings: of each broker, on top of those that make it a node of its own.
        nodes: how many brokers. The first is the controller too.
    """

    def __init__(self, jars: list[str], settings: Mapping[str, object], nodes: int = 1) -> None:
        self._java = [find_java(), *_HEAP, "-cp", os.pathsep.join(jars)]
        self._settings = settings
        self._controller = f"127.0.0.1:{free_port('127.0.0.1', 'the port of its controller')}"
        self._addresses = [f"127.0.0.1:{free_port('127.0.0.1', 'a port of Kafka')}" for _ in range(nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.bootstrap_servers = ",".join(self._addresses)

    def __enter__(self) -> Self:
        folder, self._sweeper, keep_fd = swept_folder("kafkalog-kafka-")
        try:
            self._log = folder / "server.log"
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            for number, address in enumerate(self._addresses, 1):
                config = folder / f"server-{number}.properties"
                settings = self._node(number, address, folder / f"data-{number}")
                config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
                made = self._run(keep_fd, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(config))
                if made.wait(_START_TIMEOUT) != 0:
                    raise NotAvailable(f"Kafka's storage could not be made: {self._last_line()}")
                self._processes.append(self._run(keep_fd, "kafka.Kafka", str(config)))
            for address, process in zip(self._addresses, self._processes, strict=True):
                self._wait_ready(address, process)
        except BaseException:
            os.close(keep_fd)
            self._stop()
            raise
        os.close(keep_fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _node(self, number: int, address: str, folder: Path) -> dict[str, object]:
        is_controller = number == 1
        return {
            "process.roles": "broker,controller" if is_controller else "broker",
            "node.id": number,
            "listeners": f"PLAINTEXT://{address}" + f",CONTROLLER://{self._controller}" * is_controller,
            "advertised.listeners": f"PLAINTEXT://{address}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@{self._controller}",
            "log.dirs": folder,
            "offsets.topic.replication.factor": 1,
            **self._settings,
        }

    def _run(self, keep_fd: int, *command: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                with_parent([*self._java, *command]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(keep_fd,),
                start_new_session=True,
            )

    def _wait_ready(self, address: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        host, port = address.split(":")
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NotAvailable(f"Kafka does not start here: {self._last_line()}") from None
            # The kernel wakes nobody when another program begins to listen, and Kafka signals it to no parent: so this
            # connects until it can. It ends when Kafka does, or at the deadline.
            time.sleep(0.05)

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"

    def _stop(self) -> None:
        for process in reversed(self._processes):  # the controller last: the others stop in order by its word
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._sweeper.wait()
