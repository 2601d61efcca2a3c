"""Apache Kafka: brokers as KRaft nodes, and the programs with which it measures itself."""

from __future__ import annotations

import os
import re
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from bench.measure import NotAvailable
from bench.peers.jars import Artifact, jars
from bench.peers.java import java_command, output_of
from bench.peers.processes import PeerProcesses
from broker.local.zookeeper import find_java
from broker.ports import free_port

SERVER_VERSION = "4.4.0"
CONNECTOR_VERSION = "4.2.0"
CLIENT_VERSION = "3.9.2"

_LOGGING = Artifact("org.slf4j:slf4j-simple:1.7.36")
SERVER = (Artifact(f"org.apache.kafka:kafka_2.13:{SERVER_VERSION}"), _LOGGING)
TOOLS = (Artifact(f"org.apache.kafka:kafka-tools:{SERVER_VERSION}"), _LOGGING)
CONNECTOR = (
    Artifact(f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}", transitive=False),
    # For delegation tokens, which are not used here: the versions need not be equal.
    Artifact("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0", transitive=False),
    Artifact(f"org.apache.kafka:kafka-clients:{CLIENT_VERSION}", transitive=False),
    Artifact("org.apache.commons:commons-pool2:2.13.1", transitive=False),
)
"""The connector and what its own pom names but Spark has not."""

_HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
"""Heap and collector of Kafka's own start script."""
_TOOL_OPTIONS = ("-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
"""Heap of Kafka's own script for tools."""


def kafka_jars(artifacts: tuple[Artifact, ...], timeout: float) -> list[str]:
    """Paths of those of `SERVER`, `TOOLS` or `CONNECTOR`. Raises NotAvailable."""
    return jars("Kafka", artifacts, timeout)


class KafkaServer(PeerProcesses):
    """Brokers, as a context manager: they serve inside the block. `bootstrap_servers` has the host:port of each.

    Args:
        jars: those of `SERVER`.
        settings: of each broker, on top of those that make it a node of its own.
        nodes: how many brokers. The first is the controller too.
    """

    def __init__(self, jars: list[str], settings: Mapping[str, object], nodes: int = 1) -> None:
        super().__init__("Kafka")
        self._java = [find_java(), *_HEAP, "-cp", os.pathsep.join(jars)]
        self._settings = settings
        self._controller = f"127.0.0.1:{free_port('127.0.0.1', 'the port of its controller')}"
        self._addresses = [f"127.0.0.1:{free_port('127.0.0.1', 'a port of Kafka')}" for _ in range(nodes)]
        self.bootstrap_servers = ",".join(self._addresses)

    def _start(self) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        for number, address in enumerate(self._addresses, 1):
            config = self.folder / f"server-{number}.properties"
            settings = self._node(number, address, self.folder / f"data-{number}")
            config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            making = [*self._java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", str(config)]
            self._run_to_end(making, "making its storage")
            self._serve([*self._java, "kafka.Kafka", str(config)])
        for address, process in zip(self._addresses, self._servers, strict=True):
            self._wait_ready(address, process)

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


def producer_performance(
    jars: list[str], topic: str, count: int, payloads: Path, settings: Mapping[str, object], warmup: int
) -> float:
    """Seconds that Kafka's own ProducerPerformance takes for so many records, as fast as it can, after some that are
    not counted, while which Java compiles. Its records are ready made: it would make random ones within its time.

    Args:
        jars: those of `TOOLS`.
        payloads: a file of values, a line each.
        settings: of its producer, with `bootstrap.servers`.
        warmup: how many records are not counted.

    Raises:
        NotAvailable: it fails here.
    """
    given = ("--topic", topic, "--num-records", count + warmup, "--payload-file", payloads, "--throughput", -1)
    counted = ("--warmup-records", warmup) if warmup else ()
    properties = ("--command-property", *(f"{name}={value}" for name, value in settings.items()))
    options = (*given, *counted, *properties)
    command = java_command(jars, "org.apache.kafka.tools.ProducerPerformance", options, *_TOOL_OPTIONS)
    printed = output_of("Kafka", command)
    # "1000000 steady state records sent, 421585.2 records/sec (80.41 MB/sec), ..."; without warm-up not "steady state".
    found = re.findall(rf"^{count} (?:steady state )?records sent, ([0-9.]+) records/sec", printed, re.MULTILINE)
    if not found:
        raise NotAvailable(f"Kafka's ProducerPerformance has not sent all: {printed.strip().splitlines()[-1:]}")
    return count / float(found[-1])


def consumer_performance(
    jars: list[str], topic: str, count: int, config: Path, settings: Mapping[str, object]
) -> float:
    """Seconds that Kafka's own ConsumerPerformance takes for so many records, without the join of its group.

    Args:
        jars: those of `TOOLS`.
        config: a file to write the settings to.
        settings: of its consumer, with `bootstrap.servers`.

    Raises:
        NotAvailable: it fails here.
    """
    servers = settings["bootstrap.servers"]
    config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    given = ("--bootstrap-server", servers, "--topic", topic, "--num-records", count, "--command-config", config)
    command = java_command(
        jars, "org.apache.kafka.tools.ConsumerPerformance", (*given, "--timeout", 60_000), *_TOOL_OPTIONS
    )
    names, *_, figures = (line.split(", ") for line in output_of("Kafka", command).strip().splitlines())
    found = dict(zip(names, figures, strict=True))
    consumed = int(found["data.consumed.in.nMsg"])
    if consumed < count:
        raise NotAvailable(f"Kafka's ConsumerPerformance got {consumed} of {count} records within its time")
    return consumed / float(found["fetch.nMsg.sec"])
