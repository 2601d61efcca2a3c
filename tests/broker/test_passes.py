"""Which files of the broker a request passes, from its first byte to its last: as docs/ARCHITECTURE.md lists them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pytest

from kafkalog.client.cluster import Cluster
from kafkalog.client.config import parse_producer
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome, TransactionCoordinator
from kafkalog.client.transaction.stager import PartStager
from tests.broker.conftest import StartBroker
from tests.broker.data_port_client import a_batch

ROOT = Path(__file__).resolve().parents[2]


class Passed:
    """The files whose functions were called by threads that were started since, while `recording`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.recording: Callable[[FrameType], bool] = lambda frame: False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(str(ROOT / "broker")) and self.recording(frame):
                self.files.add(str(Path(path).relative_to(ROOT)))


@pytest.fixture
def passed() -> Iterator[Passed]:
    found = Passed()
    threading.setprofile(found)
    yield found
    threading.setprofile(None)


def listed(request: str) -> set[str]:
    """The files that the page lists for a request."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    [row] = re.findall(rf"^\| {request} \|(.*)\|$", page, re.MULTILINE)
    return {f"broker/{name}" for name in re.findall(r"`([\w/]+\.py)`", row)}


def on_the_data_port(passed: Passed, ask: Callable[[], object]) -> set[str]:
    """What the connection's thread passes for a request of a client that connected since `passed` is there."""
    passed.recording = lambda frame: threading.current_thread().name.startswith("dataport-127")
    ask()
    passed.recording = lambda frame: False
    return passed.files


def test_an_append_passes_the_files_that_are_listed(start_broker: StartBroker, passed: Passed) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch())
        assert on_the_data_port(passed, lambda: client.append(topic, a_batch())) == listed("append")


def test_a_fetch_passes_the_files_that_are_listed(start_broker: StartBroker, passed: Passed) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch())
        assert on_the_data_port(passed, lambda: client.fetch(topic, 0)) == listed("fetch")


def test_an_apply_passes_the_files_that_are_listed(start_broker: StartBroker, passed: Passed) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch())  # the first of a leader epoch saves that too
    applying: set[int] = set()

    def within_apply(frame: FrameType) -> bool:
        """Since the handler of the request was called, on its thread."""
        if frame.f_code.co_qualname.endswith("BrokerService.Apply"):
            applying.add(threading.get_ident())
        if frame.f_code.co_qualname.endswith("BrokerService.ForgetStaged"):
            applying.discard(threading.get_ident())
        return threading.get_ident() in applying

    cluster = Cluster(f"127.0.0.1:{broker.broker.grpc_port}")
    settings = parse_producer({})
    coordinator = TransactionCoordinator(cluster)
    with PartStager(cluster, settings, "spark-stream-x", 0, 0) as stager:
        stager.stage({"t": pa.table({"value": [b"x"] * 10})})
        parts = stager.finish()
    passed.recording = within_apply
    assert coordinator.commit(CommitBatch("spark-stream-x", 0, "run", True, b"", parts)) is Outcome.COMMITTED
    passed.recording = lambda frame: False
    coordinator.close()
    cluster.close()
    assert passed.files == listed("apply")
