"""`kafkalog doctor`: checks what kafkalog and Spark need on this machine and of the cluster, and prints advice.

Each check is a function that returns `Finding`s; one that fails does not stop the others. The workers' Python is
started in a process of its own, as by Spark, because a missing package shows only there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from kafkalog.cli.command import DEFAULT_BOOTSTRAP, Command, bootstrap_option, json_option
from kafkalog.cli.output import START_ONE, counted, print_json, print_table
from kafkalog.errors import KafkalogError

if TYPE_CHECKING:
    from kafkalog.client.admin import TopicDescription
    from kafkalog.wire.broker_pb2 import BrokerStatus

DISTRIBUTION = "pyspark-kafkalog"
JAVA_MIN = 17
_STATUS_TIMEOUTS = {"request_timeout_ms": 5000, "retry_timeout_ms": 5000}
_ANSWER_SECONDS = 60  # a cold import of pyspark on a busy machine takes long
_NAMED_MAX = 5


class Finding(NamedTuple):
    """The result of one check; `advice` is what to do, and is empty if all is well."""

    check: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""


@click.command(
    cls=Command,
    examples=[
        ("This machine, and the cluster on it", "kafkalog doctor"),
        ("Another cluster", "kafkalog doctor --bootstrap broker-1.example.org:9192"),
    ],
)
@bootstrap_option
@json_option
@click.pass_context
def doctor(context: click.Context, bootstrap: str, as_json: bool) -> None:
    """Check Java, the workers' Python, versions and the cluster, and print what to correct."""
    asked_for = context.get_parameter_source("bootstrap") is not click.core.ParameterSource.DEFAULT
    findings = [*check_packages(), *check_java(), *check_workers_python(), *check_cluster(bootstrap, asked_for)]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        rows = [finding._asdict() for finding in findings]
        print_table(rows, ["check", "state", "found"])
        checks: dict[str, list[str]] = {}
        for finding in findings:
            checks.setdefault(finding.advice, []).append(finding.check)
        for advice, theirs in checks.items():
            if advice:
                click.echo(f"\n{', '.join(dict.fromkeys(theirs))}: {advice}")
    failed = [finding.check for finding in findings if finding.state == "failed"]
    if failed:
        raise KafkalogError(reason=f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")


# --- packages ----------------------------------------------------------------------------------------------------


def check_packages() -> Iterator[Finding]:
    """Check this Python, and every runtime requirement of the distribution against its bounds."""
    from importlib import metadata

    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"{version} at {sys.executable}")
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        advice = "install it (docs/how-to/install-on-a-cluster.md): Spark finds the format where the package is"
        yield Finding(DISTRIBUTION, "warning", "not installed", advice)
        return
    yield Finding(DISTRIBUTION, "ok", metadata.version(DISTRIBUTION))
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        name, bounds = parse_requirement(requirement)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "failed", "not installed", f"pip install '{requirement}'")
            continue
        if within(installed, bounds):
            yield Finding(name, "ok", installed)
        else:
            yield Finding(name, "failed", f"{installed}, wanted {','.join(bounds)}", f"pip install '{requirement}'")


def parse_requirement(text: str) -> tuple[str, list[str]]:
    """('click', ['>=8.1', '<9']) of 'click<9,>=8.1': the plain form that this project's requirements have."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+?)\s*((?:[<>=]=?[0-9.]+,?)*)(?:;.*)?", text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a plain requirement")
    return match[1], [bound for bound in match[2].split(",") if bound]


def within(version: str, bounds: list[str]) -> bool:
    """Whether a version is within all of the bounds."""
    numbers = _numbers(version)
    for bound in bounds:
        match = re.fullmatch(r"(>=|<=|==|<|>)([0-9.]+)", bound)
        assert match, bound
        limit = _numbers(match[2])
        length = max(len(numbers), len(limit))
        left, right = (part + [0] * (length - len(part)) for part in (numbers, limit))
        kept = {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}
        if not kept[match[1]]:
            return False
    return True


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []


# --- Java --------------------------------------------------------------------------------------------------------

_GET_JAVA = (
    f"install a Java of {JAVA_MIN} or later (on Debian: apt-get install openjdk-17-jre-headless) "
    "and set JAVA_HOME to it"
)


def check_java() -> Iterator[Finding]:
    """Check the Java that Spark and the embedded ZooKeeper use: JAVA_HOME's, or the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if home and not (java and os.access(java, os.X_OK)):
        advice = f"set JAVA_HOME to a Java of {JAVA_MIN} or later"
        if found := shutil.which("java"):
            advice = f"unset it, and {found} is taken; or {advice}"
        yield Finding("java", "failed", f"JAVA_HOME points to nothing usable: {java} is no program", advice)
        return
    if java is None:
        yield Finding("java", "failed", "none on PATH, and JAVA_HOME is not set", _GET_JAVA)
        return
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS)
        modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("java", "failed", f"{java} does not run: {error}", _GET_JAVA)
        return
    major = java_major(told.stderr + told.stdout)
    if major is None or major < JAVA_MIN:
        yield Finding("java", "failed", f"{java} is version {major or 'unknown'}", _GET_JAVA)
    elif "jdk.incubator.vector" not in modules.stdout:
        advice = f"Spark does not start without this module; {_GET_JAVA}"
        yield Finding("java", "failed", f"{java} ({major}) lacks jdk.incubator.vector", advice)
    else:
        yield Finding("java", "ok", f"{major} at {java}")


def java_major(text: str) -> int | None:
    """17 of `openjdk version "17.0.15"`, 8 of `java version "1.8.0_292"`; None if there is no version."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])


# --- the workers' Python -----------------------------------------------------------------------------------------

_ASK_WORKER = """
import importlib, json, pkgutil, sys
told = {"python": list(sys.version_info[:3]), "missing": [], "failing": []}
for name in ("pyarrow", "kafkalog"):
    try:
        importlib.import_module(name)
    except Exception as error:
        told["missing"].append(f"{name} ({error})")
told["listed"] = False
for module in pkgutil.iter_modules():  # as Spark looks for formats; what only an import hook provides is not listed
    if module.name.startswith("pyspark_"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            told["failing"].append(f"{module.name} ({type(error).__name__}: {error})")
        told["listed"] |= module.name == "pyspark_kafkalog"
print(json.dumps(told))
"""


def check_workers_python() -> Iterator[Finding]:
    """Check the Pythons that Spark starts. Its workers use PYSPARK_PYTHON, or `python3` on PATH. If
    PYSPARK_DRIVER_PYTHON is set, it plans reads and writes on the driver, and carries them out on the executors, by the
    same path.
    """
    workers = os.environ.get("PYSPARK_PYTHON", "python3")
    planners = os.environ.get("PYSPARK_DRIVER_PYTHON", workers)
    yield from _check_python("workers' python", workers, f"export PYSPARK_PYTHON={sys.executable}")
    if planners != workers:
        findings = list(_check_python("planners' python", planners, "unset PYSPARK_DRIVER_PYTHON"))
        yield from findings
        if findings[0].state == "failed":
            return  # it is to be unset: how it differs from the workers' does not matter
        found = f"tasks that read or write run {planners}, all others {workers}, on every executor"
        yield Finding("executors' python", "warning", found, "unset PYSPARK_DRIVER_PYTHON, unless it is on purpose")


def _check_python(check: str, named: str, advice: str) -> Iterator[Finding]:
    python = shutil.which(named)
    if python is None:
        yield Finding(check, "failed", f"'{named}' was not found", advice)
        return
    try:
        # Not in the working directory: a checkout there would hide that the package is not installed.
        told = subprocess.run(
            [python, "-c", _ASK_WORKER], capture_output=True, text=True, timeout=_ANSWER_SECONDS, cwd="/"
        )
        answer = json.loads(told.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(check, "failed", f"{python} does not answer: {error}", advice)
        return
    except ValueError:
        yield Finding(check, "failed", f"{python} is not a Python: it does not run `{named} -c CODE`", advice)
        return
    version = ".".join(map(str, answer["python"]))
    if tuple(answer["python"][:2]) != sys.version_info[:2]:
        found = f"{version} at {python}, this one is {sys.version_info[0]}.{sys.version_info[1]}"
        yield Finding(check, "failed", found, f"Spark wants the same version on both sides: {advice}")
        return  # further findings would only follow from this one
    if answer["missing"]:
        yield Finding(check, "failed", f"{python} lacks {', '.join(answer['missing'])}", advice)
        return
    yield Finding(check, "ok", f"{version} at {python}")
    check = f"spark format in {check}"
    if answer["failing"]:
        found = f"{', '.join(answer['failing'])} cannot be imported"
        yield Finding(check, "failed", found, "repair or remove it: it hides every Python data source from Spark")
    elif not answer["listed"]:
        found = f"{python} has no package pyspark_kafkalog where Spark looks"
        yield Finding(check, "failed", found, f"install {DISTRIBUTION} into it, or {advice}")
    else:
        yield Finding(check, "ok", "kafkalog")


# --- the cluster -------------------------------------------------------------------------------------------------


def check_cluster(bootstrap: str, asked_for: bool) -> Iterator[Finding]:
    """Check that the brokers answer, each at both of its ports, and serve their partitions. A missing cluster is only a
    warning, unless its address was given."""
    from kafkalog.client.admin import Admin

    try:
        with Admin(bootstrap) as admin:
            cluster = admin.describe_cluster()
            topics = admin.describe_topics()
            unserved = admin.unserved([topic.name for topic in topics])
    except KafkalogError as error:
        if asked_for:
            yield Finding("cluster", "failed", str(error), START_ONE)
        else:
            yield Finding("cluster", "warning", f"none at {DEFAULT_BOOTSTRAP}", START_ONE)
        return
    yield Finding("cluster", "ok", f"{cluster.cluster_id} with {counted(len(cluster.brokers), 'broker')}")
    for broker in cluster.brokers:
        failures = {port: _connect_failure(broker.host, port) for port in (broker.grpc_port, broker.data_port)}
        if all(isinstance(failure, ConnectionRefusedError) for failure in failures.values()):
            # It was killed, and is registered until its session ends.
            found = f"nothing listens at {broker.host}:{broker.grpc_port} and :{broker.data_port}"
            advice = (
                f"start broker {broker.broker_id}; if it runs, see its log, and whether advertised.host is an address "
                "of its machine"
            )
            yield Finding(f"broker {broker.broker_id}", "failed", found, advice)
            continue
        for what, (port, failure) in zip(("grpc", "data"), failures.items(), strict=True):
            name = f"broker {broker.broker_id} {what} port"
            if failure is None:
                yield Finding(name, "ok", f"{broker.host}:{port}")
            else:
                advice = "open the port, or set advertised.host to an address that clients can reach"
                yield Finding(name, "failed", f"{broker.host}:{port}: {failure.strerror or failure}", advice)
        yield from _check_broker(bootstrap, broker.broker_id, cluster.zookeeper_connect)
    registered = {broker.broker_id for broker in cluster.brokers}
    partitions = [each for topic in topics for each in topic.partitions]
    replicas = Counter(broker_id for each in partitions for broker_id in each.replicas)
    offline = Counter(broker_id for each in partitions if each.is_offline(registered) for broker_id in each.replicas)
    yield from _check_unregistered(bootstrap, registered, replicas, offline, cluster.zookeeper_connect)
    yield from _check_replicas(topics, registered)
    for partition, why in unserved.items():
        advice = "the sentence says what to do; the log of its broker has more"
        yield Finding(f"partition {partition}", "failed", str(why), advice)


def _connect_failure(host: str, port: int) -> OSError | None:
    """Why there is no connection to a port; None: there is one."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return error
    return None


def _check_broker(bootstrap: str, broker_id: int, zookeeper: str) -> Iterator[Finding]:
    """Check the status of a registered broker."""
    from kafkalog.client.admin import Admin

    try:
        with Admin(bootstrap, **_STATUS_TIMEOUTS) as admin:
            status = admin.describe_broker(broker_id)
    except KafkalogError as error:
        yield Finding(f"broker {broker_id}", "failed", str(error), "check whether it hangs; its log may say more")
        return
    yield from _status_findings(status, zookeeper)


def _check_replicas(topics: Sequence[TopicDescription], registered: Collection[int]) -> Iterator[Finding]:
    """Check for partitions that nobody leads although a broker that has them is there, and for those in which writes
    wait for replicas."""
    leaderless, short = [], []
    for topic in topics:
        least = int(topic.effective["min.insync.replicas"])
        for each in topic.partitions:
            name = f"{topic.name}-{each.partition}"
            if each.is_offline(registered):
                if any(broker_id in registered for broker_id in each.replicas):
                    leaderless.append(name)
            elif len(each.isr) < least:
                short.append(name)
    if leaderless:
        advice = "start the brokers of their replicas; `kafkalog topics list --offline` lists them"
        yield Finding("leaders", "failed", f"no live broker may lead {_named(leaderless)}", advice)
    if short:
        found = f"fewer in-sync replicas than min.insync.replicas: {_named(short)}; producers with acks=all wait"
        advice = "start the brokers that are away; `kafkalog topics list --under-replicated` lists their partitions"
        yield Finding("in-sync replicas", "failed", found, advice)


def _named(partitions: Sequence[str]) -> str:
    """Their number, and the first of them."""
    more = ", ..." if len(partitions) > _NAMED_MAX else ""
    return f"{counted(len(partitions), 'partition')} ({', '.join(partitions[:_NAMED_MAX])}{more})"


def _check_unregistered(
    bootstrap: str,
    registered: Collection[int],
    replicas: Mapping[int, int],
    offline: Mapping[int, int],
    zookeeper: str,
) -> Iterator[Finding]:
    """Check for brokers that are not registered, and have partitions or answer. The status is requested from each
    --bootstrap address, because ZooKeeper no longer has the address of such a broker, but only if such a broker has
    partitions, or no broker is registered.

    Args:
        replicas, offline: how many partitions each broker has, and how many of these nobody leads.
    """
    from kafkalog.client.admin import Admin
    from kafkalog.client.config import parse_bootstrap
    from kafkalog.net.tcp import format_address

    answers = {}
    if set(replicas) - set(registered) or not registered:
        for address in parse_bootstrap(bootstrap):
            with contextlib.suppress(KafkalogError), Admin(format_address(*address), **_STATUS_TIMEOUTS) as admin:
                status = admin.describe_broker()
                answers[status.broker_id] = status
    for broker_id in sorted((set(replicas) | set(answers)) - set(registered)):
        found = "not registered in the cluster"
        if count := replicas.get(broker_id):
            lost, its = offline.get(broker_id, 0), counted(count, "partition")
            if lost:
                found += f"; {f'its {its}' if lost == count else f'{lost} of its {its}'} cannot be read or written"
            else:
                found += f"; other brokers lead its {its}"
        advice = "start the broker; if it runs, its log says why it is not registered"
        yield Finding(f"broker {broker_id}", "failed", found, advice)
        if broker_id in answers:
            yield from _status_findings(answers[broker_id], zookeeper)


def _status_findings(status: BrokerStatus, zookeeper: str) -> Iterator[Finding]:
    """Findings from a broker's status: its connection to ZooKeeper, and its data directory."""
    from kafkalog.wire.frames import error_from_wire

    name = f"broker {status.broker_id}"
    if status.zookeeper_connected:
        yield Finding(f"{name} zookeeper", "ok", zookeeper)
    else:
        advice = (
            "look at ZooKeeper; until it is back, no leader is elected, no in-sync set changes, and topics, groups and "
            "exactly-once writes stand still"
        )
        yield Finding(f"{name} zookeeper", "failed", f"no connection to {zookeeper}", advice)
    check = f"{name} data directory"
    if status.HasField("failure"):
        found = str(error_from_wire(status.failure))
        yield Finding(check, "failed", found, "look at the disk, mount it again, then restart the broker")
    elif status.counters["disk.full"]:
        advice = (
            "make room: delete topics, lower the retention.ms of some, or move partitions to other brokers "
            "(`kafkalog topics reassign`); appends then go on by themselves"
        )
        yield Finding(check, "failed", "its disk was full less than a minute ago", advice)
    else:
        yield Finding(check, "ok", f"{counted(status.counters['partitions.served'], 'partition')} served")
    for each in status.damaged:
        found = f"offsets {each.start_offset} to {each.end_offset - 1} of {each.topic}-{each.partition} are damaged"
        advice = each.reason or "they are about to be repaired from another replica"
        yield Finding(f"{name} disk", "failed", found, advice)
