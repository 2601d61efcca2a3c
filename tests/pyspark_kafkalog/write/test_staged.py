"""What the tasks and the driver of an exactly-once write hold and ask: as much for many topics as for one. Without
Spark; what is written is in `test_exactly_once.py`."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.transaction.coordinator import CommitBatch, Outcome
from kafkalog.client.transaction.stager import StagedPartition
from kafkalog.errors import CountMoved, QueryNotKnown
from kafkalog.format.numbered import transactional_id as numbered_id
from kafkalog.net.local import socket_name
from pyspark_kafkalog import columns, connections
from pyspark_kafkalog.write import exactly_once as staged
from pyspark_kafkalog.write.exactly_once import Staged, StagedBatch, Transaction
from pyspark_kafkalog.write.fingerprint import UNKNOWN, Checkpoint
from pyspark_kafkalog.write.micro_batch import MicroBatch
from pyspark_kafkalog.write.options import TxnVersion, parse_sink
from tests.waiting import waited_for


def connections_to(port: int) -> int:
    """How many this process has."""
    ends = (("127.0.0.1", port), socket_name("127.0.0.1", port))
    found = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            copied = os.dup(descriptor)
        except OSError:
            continue  # that of the listing
        try:
            one = socket.socket(fileno=copied)
        except OSError:
            os.close(copied)  # it is no socket
            continue
        with one, suppress(OSError):  # not connected
            found += one.getpeername() in ends
    return found


def renewals() -> int:
    """How many threads of this process renew what is staged."""
    return sum(thread.name == "staged-renewal" for thread in threading.enumerate())


@contextmanager
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """As in a process that has asked for nothing yet; which topics and decisions it asks for, by method."""
    asked: Counter[str] = Counter()
    call = Cluster.call

    def counted(cluster: Cluster, method: str, request: Any, **more: Any) -> Any:
        if method in ("DescribeTopics", "ReadDecisions"):
            asked[method] += 1
        return call(cluster, method, request, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "call", counted)
        patched.setattr(connections, "_clusters", {})
        patched.setattr(staged, "_coordinators", {})
        try:
            yield asked
        finally:
            for coordinator in staged._coordinators.values():
                coordinator.close()
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
    monkeypatch.setattr(columns, "_GATHERED_BYTES", 1)  # the first rows are staged before others are asked for
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


def test_tasks_that_met_two_counts_of_a_topic_commit_nothing(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic)
    txn = {"txnAppId": topic, "txnVersion": "0"}
    options = parse_sink({"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": topic} | txn)
    assert options.txn is not None
    coordinator = staged._coordinator(options)
    messages = []
    for part in range(2):
        rows = pa.RecordBatch.from_pydict({"value": ["v"]})
        messages.append(staged.stage_numbered(iter([rows]), options, ("value",), options.txn, MicroBatch(), part))
        [batch] = messages[-1].batches
        coordinator.forget([coordinator.decision(batch.transaction.transactional_id)])  # between two tasks
    for each in (messages, messages[::-1]):
        with pytest.raises(CountMoved):
            staged.commit(each, options)
    staged.abort(messages, options)
    latest = {TopicPartition(topic, 0): "latest"}
    assert [end.offset for end in admin.list_offsets(latest).values()] == [0]


def test_a_write_without_rows_needs_no_checkpoint(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    location = f"file:{tmp_path}/no"
    transaction = Transaction("spark-stream-q", 0, "run", stays=True)
    for query_id, batches in (("q", (StagedBatch(transaction, ()),)), ("", ())):
        message = Staged(batches, Checkpoint(location, query_id))
        assert staged.with_query([message, None], TxnVersion("a", 0)) == [message, None]
        assert staged.fingerprint([message, None]) == UNKNOWN
    assert caplog.messages == []
    part = StagedPartition("t", b"t" * 16, 0, b"u" * 16, 0, 1, 1, 1)
    message = Staged((StagedBatch(transaction, (part,)),), Checkpoint(location, ""))
    assert staged.fingerprint([message]) == UNKNOWN
    assert "checkpoint_not_read" in caplog.text
    with pytest.raises(QueryNotKnown):
        staged.with_query([message], TxnVersion("a", 0))


class Committing:
    """In the place of a TransactionCoordinator: keeps what it is to do, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def look_up(self, topics: set[str]) -> None:
        self.done.append(topics)

    def commit(self, batch: CommitBatch) -> Outcome:
        self.done.append(batch)
        return Outcome.COMMITTED

    def abort_parts(self, parts: list[StagedPartition]) -> None:
        self.done.append(parts)


def part_of(topic: str, part: int) -> StagedPartition:
    return StagedPartition(topic, topic.encode() * 16, 0, b"u" * 16, part, 1, 1, 1)


def test_what_all_tasks_staged_is_committed_by_transaction_with_its_parts_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    committing = Committing()
    monkeypatch.setattr(staged, "_coordinator", lambda options: committing)
    options = parse_sink({"kafkalog.bootstrap.servers": "here:1", "txnAppId": "app", "txnVersion": "3"})
    ids = {topic: numbered_id("app", topic, topic.encode() * 16) for topic in "ab"}
    names = sorted(ids, key=lambda topic: ids[topic])

    def of(topic: str) -> Transaction:
        return Transaction(ids[topic], 3, "run", True, skip_if_recorded=True, query_id="q", session_id="s")

    messages = [
        Staged(
            (StagedBatch(of(names[1]), (part_of(names[1], 1),)), StagedBatch(of(names[0]), (part_of(names[0], 1),)))
        ),
        None,
        Staged((StagedBatch(of(names[1]), (part_of(names[1], 0),)),)),
    ]
    staged.commit(messages, options, b"print")
    known, *commits = committing.done
    assert known == {"a", "b"}
    assert commits == [
        CommitBatch(ids[topic], 3, "run", True, b"print", [part_of(topic, part) for part in parts], True, "q", "s")
        for topic, parts in zip(names, ((1,), (0, 1)), strict=True)
    ]


@pytest.mark.parametrize(("micro_batch", "found"), [(3, b"earlier 2"), (2, UNKNOWN)])
def test_earlier_inputs_are_looked_up_where_versions_are_the_numbers_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch, micro_batch: int, found: bytes
) -> None:
    """The checkpoint has no file for another number, or one of another micro-batch."""
    committing = Committing()
    monkeypatch.setattr(staged, "_coordinator", lambda options: committing)
    monkeypatch.setattr(staged._fingerprints, "of_earlier", lambda checkpoint, number: f"earlier {number}".encode())
    options = parse_sink({"kafkalog.bootstrap.servers": "here:1", "txnAppId": "app", "txnVersion": "3"})
    name = numbered_id("app", "a", b"a" * 16)
    transaction = Transaction(name, 3, "run", True, skip_if_recorded=True, query_id="q", session_id="s")
    batches = (StagedBatch(transaction, (part_of("a", 0),)),)
    staged.commit([Staged(batches, Checkpoint("file:/c", "q"), micro_batch)], options, b"print")
    assert committing.done[-1].fingerprint_of(2) == found


def test_tasks_that_met_two_counts_of_a_topic_commit_nothing_of_another_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forgotten count refuses its commit too, but only after those of topics whose names sort before."""
    committing = Committing()
    monkeypatch.setattr(staged, "_coordinator", lambda options: committing)
    options = parse_sink({"kafkalog.bootstrap.servers": "here:1", "txnAppId": "app", "txnVersion": "3"})

    def staged_of(topic: str, part: int, generation: int) -> StagedBatch:
        name = numbered_id("app", topic, topic.encode() * 16, generation)
        transaction = Transaction(name, 3, "run", True, skip_if_recorded=True)
        return StagedBatch(transaction, (part_of(topic, part),))

    before = Staged((staged_of("a", 0, 0), staged_of("b", 0, 0)))
    after = Staged((staged_of("a", 1, 0), staged_of("b", 1, 1)))  # the count in b was forgotten between the tasks
    for messages in ([before, after], [after, before]):
        with pytest.raises(CountMoved, match="app-app:b:"):
            staged.commit(messages, options)
    assert committing.done == []
    staged.commit([before], options)
    assert [batch.parts for batch in committing.done[1:]] == [[part_of("a", 0)], [part_of("b", 0)]]


def test_a_failed_write_has_all_parts_discarded_and_asks_nobody_about_none(monkeypatch: pytest.MonkeyPatch) -> None:
    committing = Committing()
    monkeypatch.setattr(staged, "_coordinator", lambda options: committing)
    options = parse_sink({"kafkalog.bootstrap.servers": "here:1"})
    transaction = Transaction("spark-stream-q", 0, "run", stays=True)
    staged.abort([None, Staged((StagedBatch(transaction, ()),))], options)
    assert committing.done == []
    messages = [Staged((StagedBatch(transaction, (part_of("a", part),)),)) for part in range(2)]
    staged.abort([*messages, None], options)
    assert committing.done == [[part_of("a", 0), part_of("a", 1)]]


def test_the_query_of_a_numbered_write_is_that_of_its_checkpoint_where_spark_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged._fingerprints, "query_of", lambda checkpoint: "theirs")
    monkeypatch.setattr(
        staged._fingerprints, "of", lambda checkpoint, number: f"{checkpoint.query_id} {number}".encode()
    )
    unnamed = Checkpoint("file:/c", "")

    def message(*parts: int) -> Staged:
        transaction = Transaction("t", 3, "", True, skip_if_recorded=True, session_id="s")
        batch = StagedBatch(transaction, tuple(part_of("a", part) for part in parts))
        return Staged((batch,) if parts else (), unnamed, 3)

    messages = [None, message(), message(0), message(1)]
    assert staged.with_query(messages, None) is messages
    named = staged.with_query(messages, TxnVersion("app", 3))
    assert [each.batches[0].parts[0].part for each in named if isinstance(each, Staged)] == [0, 1]
    for each in named:
        assert isinstance(each, Staged)
        assert each.batches[0].transaction == Transaction("t", 3, "", True, True, "theirs", "s")
        assert (each.checkpoint, each.micro_batch) == (Checkpoint("file:/c", "theirs"), 3)
    assert staged.fingerprint(named) == b"theirs 3"
    assert staged.fingerprint(messages[:2]) == UNKNOWN


def test_a_process_has_one_committer_for_the_same_servers_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch):
        servers = {"kafkalog.bootstrap.servers": "here:1"}
        one = staged._coordinator(parse_sink(servers))
        assert staged._coordinator(parse_sink(servers | {"topic": "t"})) is one
        assert staged._coordinator(parse_sink(servers | {"kafkalog.request.timeout.ms": "5"})) is not one
        assert staged._coordinator(parse_sink({"kafkalog.bootstrap.servers": "there:1"})) is not one
