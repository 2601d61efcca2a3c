"""What the tasks and the driver of an exactly-once write hold and ask: as much for many topics as for one. Without
Spark; what is written is in `test_exactly_once.py`."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, TopicPartition
from kafkalog.client.cluster import Cluster
from pyspark_kafkalog import connections, staged
from pyspark_kafkalog.micro_batch import MicroBatch
from pyspark_kafkalog.sink_options import parse_sink
from pyspark_kafkalog.staged import Staged
from tests.waiting import waited_for


def connections_to(port: int) -> int:
    """How many this process has."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # that of the listing
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in own for row in rows)


def renewals() -> int:
    """How many threads of this process renew what is staged."""
    return sum(thread.name == "staged-renewal" for thread in threading.enumerate())


@contextmanager
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """As in a process that has asked for nothing yet; which topics and decisions it asks for, by method."""
    asked: Counter[str] = Counter()
    call = Cluster.call

    def counted(cluster: Cluster, method: str, request: Any, **more: Any) -> Any:
        if method in ("DescribeTopics", "ReadDecision", "ReadDecisions"):
            asked[method] += 1
        return call(cluster, method, request, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "call", counted)
        patched.setattr(connections, "_clusters", {})
        patched.setattr(staged, "_committers", {})
        try:
            yield asked
        finally:
            for committer in staged._committers.values():
                committer.close()
            for kept in connections._clusters.values():
                kept.close()


@pytest.mark.parametrize("count", [1, 100])
def test_a_numbered_write_holds_and_asks_as_much_for_many_topics_as_for_one(
    cluster: LocalCluster,
    admin: Admin,
    new_topic: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    topics = [new_topic() for _ in range(count)]
    for topic in topics:
        admin.create_topic(topic)
    port = cluster.brokers[0].data_port
    options = parse_sink({"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "txnAppId": "a", "txnVersion": "0"})
    others = connections_to(port)  # of tests before, kept for the process's next task
    held: list[tuple[int, int]] = []

    def batches(error: BaseException | None) -> Iterator[pa.RecordBatch]:
        rows = pa.RecordBatch.from_pydict({"topic": topics, "value": topics})
        yield rows
        held.append((connections_to(port) - others, renewals()))
        if error is not None:
            raise error
        yield rows

    def stage(error: BaseException | None = None) -> Staged:
        assert options.txn is not None
        return staged.stage_numbered(batches(error), options, ("topic", "value"), options.txn, MicroBatch(), 0)

    for error in (None, ZeroDivisionError(), KeyboardInterrupt()):
        waited_for(lambda: renewals() == 0)
        with new_process(monkeypatch) as asked:
            if error is None:
                message = stage()
            else:
                with pytest.raises(type(error)):
                    stage(error)
            assert held.pop() == (1, 1)
            assert asked == {"DescribeTopics": 1, "ReadDecisions": 1}
        assert connections_to(port) == others
    waited_for(lambda: renewals() == 0)
    with new_process(monkeypatch) as asked:
        staged.commit([message], options)
        assert asked["DescribeTopics"] == 1
    ends = admin.list_offsets(dict.fromkeys([TopicPartition(topic, 0) for topic in topics], "latest"))
    assert {end.offset for end in ends.values()} == {2}
