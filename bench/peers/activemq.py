"""ActiveMQ: a broker with queues in KahaDB, and a client for each end of one.

The broker is the one of the paper's figures 4 and 5, in today's version; `java/ActiveMq.java` starts it in its own
process, with the heap of its start script.
"""

from __future__ import annotations

from bench.peers.jars import Artifact, jars
from bench.peers.java import SOURCES, java_command, output_of
from bench.peers.queues import QueuePeer
from broker.ports import free_port

VERSION = "6.2.0"
ARTIFACTS = (
    Artifact(f"org.apache.activemq:activemq-client:{VERSION}"),
    Artifact(f"org.apache.activemq:activemq-broker:{VERSION}"),
    Artifact(f"org.apache.activemq:activemq-kahadb-store:{VERSION}"),
    Artifact("org.slf4j:slf4j-simple:2.0.17"),
)
_OPTIONS = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
_HEAP = ("-Xms64m", "-Xmx1g")
_PROGRAM = SOURCES / "ActiveMq.java"


class ActiveMq(QueuePeer):
    """A broker, as a context manager. `how` to produce: "each" is stored before the next is sent, "async", or a number:
    so many in a transaction; to consume: "each" is acknowledged, or "some" at once.

    Args:
        jars: as of `activemq_jars`.
        sync: when its journal is synced: ALWAYS (its default, before each ack), PERIODIC (each second) or NEVER.
    """

    def __init__(self, jars: list[str], sync: str = "ALWAYS") -> None:
        super().__init__("ActiveMQ")
        self._jars, self._sync = jars, sync
        self._port = free_port("127.0.0.1", "the port of ActiveMQ")

    def _start(self) -> None:
        serving = (("serve", self._port, self.folder, self._sync), *_OPTIONS, *_HEAP)
        process = self._serve(java_command(self._jars, _PROGRAM, *serving))
        self._wait_ready(f"127.0.0.1:{self._port}", process)

    def _client(self, *arguments: object) -> str:
        command = java_command(self._jars, _PROGRAM, (arguments[0], self._port, *arguments[1:]), *_OPTIONS, *_HEAP)
        return output_of("ActiveMQ", command)


def activemq_jars(timeout: float) -> list[str]:
    """Raises NotAvailable."""
    return jars("ActiveMQ", ARTIFACTS, timeout)
