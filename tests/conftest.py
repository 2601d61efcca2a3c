"""Fixtures for what needs real parts: a cluster, a ZooKeeper and a Spark session for the whole run, a topic name
for each test."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.java import QUICK
from tests.processes import ByModule, put_in_order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer

    from broker.local import LocalCluster
    from broker.local.zookeeper import EmbeddedZooKeeper

ROOT = Path(__file__).resolve().parent.parent

_topic_numbers = itertools.count()

NEED_JAVA = {"cluster", "spark", "zookeeper"}
"""Fixtures. A test module that imports one of the classes below starts Java by itself, and so does a test that is
marked with `java`."""
STARTS_JAVA = ("LocalCluster", "EmbeddedZooKeeper", "SparkSession", "LocalBroker")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="only the tests that need no Java: no ZooKeeper, no Spark")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pure = {item for item in items if _is_pure(item)}
    if config.getoption("--pure"):
        config.hook.pytest_deselected(items=[item for item in items if item not in pure])
        items[:] = [item for item in items if item in pure]
    if hasattr(config, "workerinput"):  # one of several processes
        put_in_order(items, pure)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    config.option.loadscopereorder = False
    return ByModule(config, log)


def _is_pure(item: pytest.Item) -> bool:
    if item.get_closest_marker("java") or NEED_JAVA & set(getattr(item, "fixturenames", ())):
        return False
    return not any(hasattr(getattr(item, "module", None), name) for name in STARTS_JAVA)


def pytest_configure() -> None:
    # A job that a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # So does one that is started by nohup with a hangup. It still does: only a handler is not inherited.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    hypothesis.settings.register_profile("busy", deadline=None)  # an example waits while others have the processor
    hypothesis.settings.load_profile("busy")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", QUICK)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A running cluster of one broker, shared by all tests: use topics of your own."""
    from broker.local import LocalCluster

    with LocalCluster() as running:
        yield running


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    """A running ZooKeeper without a cluster, shared by all tests: use a chroot of your own."""
    from broker.local.zookeeper import EmbeddedZooKeeper

    server = EmbeddedZooKeeper(tmp_path_factory.mktemp("zookeeper"), durable=False)
    server.start()
    server.wait_ready(threading.Event().wait)
    yield server
    server.stop()


@pytest.fixture
def new_topic(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes topic names that no other test uses."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", request.node.name)[:100]
    return lambda: f"{name}.{next(_topic_numbers)}"


@pytest.fixture
def topic(new_topic: Callable[[], str]) -> str:
    """A topic name that no other test uses; the topic is not made."""
    return new_topic()


def _started(builder: SparkSession.Builder) -> SparkSession:
    """A session. Other tests have run gRPC servers in this very process, and those have gRPC's fork handlers abort one
    fork in twenty, that which is to become Java among them."""
    from pyspark.errors import PySparkRuntimeError

    for _ in range(9):
        try:
            return builder.getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
    return builder.getOrCreate()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session on two cores, which finds the format as users' sessions do: by the package's name."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("kafkalog tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.python.daemon.module", "pyspark_kafkalog.daemon")
    )
    session = _started(builder)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
