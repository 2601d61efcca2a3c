"""RabbitMQ: a node of the Debian package `rabbitmq-server`, installed if need be, and a client for each end of a queue.

The node has folders, ports and a name of its own: one that runs as a service is left alone. So has its Erlang port
mapper (epmd), which would go on running as a daemon if the node started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.measure import NotAvailable
from bench.peers.jars import Artifact, jars
from bench.peers.java import SOURCES, java_command, output_of
from bench.peers.queues import QueuePeer
from broker.ports import free_port

CLIENT_VERSION = "5.37.1"
ARTIFACTS = (
    Artifact(f"com.rabbitmq:amqp-client:{CLIENT_VERSION}"),
    Artifact("org.slf4j:slf4j-simple:1.7.36"),
)
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_PACKAGE = "rabbitmq-server"
_SYSTEMD = Path("/run/systemd/system")
_INSTALL_TIMEOUT = 600.0
_PROGRAM = SOURCES / "RabbitMq.java"


class RabbitMq(QueuePeer):
    """A node, as a context manager. `how` to produce: at most so many messages are not confirmed; to consume: at most
    so many are not acknowledged; 0: without confirms, or acks. Raises NotAvailable.

    Args:
        jars: of the client, as of `rabbitmq_jars`.
    """

    def __init__(self, jars: list[str]) -> None:
        super().__init__("RabbitMQ")
        self._jars = jars
        ports = (free_port("127.0.0.1", "a port of RabbitMQ") for _ in range(3))
        self._port, self._dist_port, self._mapper_port = ports

    def _start(self) -> None:
        _installed()
        folder = self.folder
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{self._port}\n"
            "disk_free_limit.absolute = 1GB\n"
            "loopback_users.guest = true\n"
        )
        (folder / "plugins").write_text("[].\n")
        environment = {
            "HOME": str(folder),  # the cookie
            "RABBITMQ_NODENAME": f"kafkalog-bench-{os.getpid()}@localhost",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_ALLOW_INPUT": "true",  # its script then becomes the node, and does not stay as its parent
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput",
        }
        mapper = self._serve(["/usr/bin/epmd", "-address", "127.0.0.1", "-port", str(self._mapper_port)])
        self._wait_ready(f"127.0.0.1:{self._mapper_port}", mapper)
        process = self._serve([str(_SERVER)], environment)
        self._wait_ready(f"127.0.0.1:{self._port}", process)

    def _client(self, *arguments: object) -> str:
        command = java_command(self._jars, _PROGRAM, (arguments[0], self._port, *arguments[1:]))
        return output_of("RabbitMQ", command)


def rabbitmq_jars(timeout: float) -> list[str]:
    """Raises NotAvailable."""
    return jars("RabbitMQ", ARTIFACTS, timeout)


def version() -> str:
    """Of the package that is installed. Raises NotAvailable."""
    _installed()
    return _of_package("${Version}")


def _of_package(what: str) -> str:
    """A field of it; "" if it was never installed."""
    if (query := shutil.which("dpkg-query")) is None:
        return ""
    asked = [query, "--show", f"--showformat={what}", _PACKAGE]
    return subprocess.run(asked, capture_output=True, text=True).stdout


def _installed() -> None:
    """Install the package where that starts no service: on a machine with systemd it would run from then on."""
    status = _of_package("${Status}")
    if status.endswith(" ok installed") and _SERVER.exists():
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0 or _SYSTEMD.exists() or status.endswith(("configured", "unpacked")):
        raise NotAvailable(
            f"RabbitMQ is not installed here{f' ({status})' if status else ''}: install the package {_PACKAGE}, and "
            "stop the service that comes with it"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # 1: starts no service
    for command in ([apt, "update", "-qq"], [apt, "install", "-y", "-qq", "--no-install-recommends", _PACKAGE]):
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=_INSTALL_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise NotAvailable(f"RabbitMQ was not installed after {_INSTALL_TIMEOUT:g} s") from None
    if not _SERVER.exists():
        raise NotAvailable(f"RabbitMQ cannot be had from here: apt-get has no {_PACKAGE}")
