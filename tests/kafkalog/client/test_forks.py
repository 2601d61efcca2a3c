"""Clients in forked children: connections of their own, and none of the parent's touched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.client import cluster as cluster_module
from kafkalog.client.cluster import Cluster
from kafkalog.client.consumer.range_fetch import fetch_range
from kafkalog.errors import Closed, InvalidArgument
from kafkalog.net.control import _controls
from kafkalog.net.forks import after_fork
from kafkalog.net.tcp import format_address
from tests.proxy import proxied

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


def in_child(work: Callable[[], object]) -> None:
    """Run something in a forked child; its failure is ours."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[:60_000])
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, told


def fill(cluster: LocalCluster, topic: str, count: int) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=1)
    with Producer(cluster.bootstrap_servers, batch_records=5) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)


def test_a_cluster_continues_in_parent_and_child(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 20)
    where = TopicPartition(topic, 0)
    shared = Cluster(cluster.bootstrap_servers)

    def read() -> None:
        rows = sum(columns.num_rows for group in fetch_range(shared, where, None, 0, 20) for _, columns in group)
        assert rows == 20
        assert shared.describe_topics([topic])[0].name == topic

    read()
    for _ in range(2):
        in_child(read)
        read()
    shared.close()


def test_a_consumer_continues_in_the_child_from_where_it_was(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 20)
    where = TopicPartition(topic, 0)
    with Consumer(cluster.bootstrap_servers, "forked") as consumer:
        consumer.assign({where: "earliest"})

        def read(first: int, count: int) -> None:
            found = [int(message.value or b"") for message in consumer.messages(max_messages=count, timeout=30)]
            assert found == list(range(first, first + count))
            consumer.commit()

        read(0, 3)
        in_child(lambda: read(3, 17))
        read(3, 17)


def test_a_child_of_a_member_is_none_and_the_parent_goes_on(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 20)
    where = TopicPartition(topic, 0)
    told: list[str] = []
    with (
        Admin(cluster.bootstrap_servers) as admin,
        Consumer(cluster.bootstrap_servers, topic, auto_offset_reset="earliest") as consumer,
    ):
        consumer.subscribe(topic, on_revoked=lambda *_: told.append("revoked"), on_lost=lambda *_: told.append("lost"))
        assert [message.offset for message in consumer.messages(max_messages=3, timeout=30)] == [0, 1, 2]

        def read_by_itself() -> None:
            assert consumer.assignment() == []
            with pytest.raises(InvalidArgument, match="no partition is assigned"):
                consumer.poll(0)
            consumer.assign({where: 7})
            message = consumer.poll(30)
            assert message is not None and message.offset == 7
            consumer.close()
            assert told == []

        in_child(read_by_itself)
        assert len(admin.describe_group(topic).members) == 1
        assert [message.offset for message in consumer.messages(max_messages=17, timeout=30)] == list(range(3, 20))
    assert told == ["revoked"]


def test_a_producer_of_the_parent_refuses_in_the_child_and_continues_in_the_parent(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 0)
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(topic, b"first").result(30)

        def send() -> None:
            with pytest.raises(Closed, match="made before a fork"):
                producer.send(topic, b"child")
            producer.close()
            with Producer(cluster.bootstrap_servers) as own:
                own.send(topic, b"own").result(30)

        in_child(send)
        assert producer.send(topic, b"last").result(30).offset == 2


def test_a_child_neither_sends_nor_waits_for_what_the_parent_has_not_sent_yet(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 0)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (through, proxy),
        Producer(through, linger_ms=60_000) as producer,
    ):
        proxy.hold_answers()
        in_flight = producer.send(topic, b"0", partition=0)
        producer._lock.run(producer._close_batches)
        lingering = producer.send(topic, b"1", partition=0)

        def child() -> None:
            with pytest.raises(Closed, match="made before a fork"):
                producer.send(topic, b"child", partition=0)
            for delivery in (in_flight, lingering):
                assert isinstance(delivery.exception(30), Closed)
            producer.flush(30)
            producer.close(30)

        in_child(child)
        assert not lingering.done()
        proxy.cut()
        producer.close()
        assert (in_flight.result().offset, lingering.result().offset) == (0, 1)


def test_one_that_fails_after_a_fork_keeps_none_of_the_others_from_it() -> None:
    class Owner:
        count = 0

        def let_go(self) -> None:
            Owner.count += 1
            raise OSError("a defect")

    owners = [Owner() for _ in range(5)]
    for owner in owners:
        after_fork(owner, Owner.let_go)

    def look() -> None:
        assert Owner.count == 5

    in_child(look)
    assert Owner.count == 0


def test_no_connection_is_left_to_a_broker_that_was_silent_when_another_answered(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's fork handlers abort children while a call waits on a channel, which no fork can close then."""
    monkeypatch.setattr(cluster_module, "_ELSEWHERE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, as the kernel does for a suspended process
        address = format_address(*silent.getsockname())
        shared = Cluster(f"{address},{cluster.bootstrap_servers}")
        assert shared.describe().brokers
        [left] = [each for each in _controls.values() if each.address == address]
        assert left._is_closed and left._channel is None
        shared.close()


def test_programs_start_beside_an_open_channel(cluster: LocalCluster) -> None:
    """With a preexec_fn, as PySpark starts Java: gRPC aborted one child in twenty while a channel was open. In a
    process of its own, where no server of another test's keeps gRPC up."""
    program = f"""
import subprocess
from kafkalog import Admin
with Admin({cluster.bootstrap_servers!r}) as admin:
    for _ in range(100):
        admin.topics()
        assert subprocess.run(["true"], preexec_fn=int, timeout=60).returncode == 0
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


_FORK_BESIDE_A_CALL = """
import os, socket, sys, threading
from kafkalog.errors import BrokerUnreachable
from kafkalog.net.control import ControlConnection
from kafkalog.wire import broker_pb2

with socket.create_server(("127.0.0.1", 0)) as silent:
    control = ControlConnection("127.0.0.1", silent.getsockname()[1], connect_timeout_ms=1000)
    ended = threading.Event()
    call = control.begin("DescribeCluster", broker_pb2.DescribeClusterRequest(), 60_000, ended.set)
    calling, _ = silent.accept()
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    call.cancel()
    waiting.join()
    control.close()
"""


@pytest.mark.parametrize("verbosity", [None, "info"])
def test_grpc_writes_nothing_to_stderr_unless_the_user_asked_for_it(verbosity: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if verbosity is not None:
        environment["GRPC_VERBOSITY"] = verbosity
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK_BESIDE_A_CALL], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ("fork_posix.cc" in ran.stderr) == (verbosity is not None), ran.stderr
    assert verbosity is not None or ran.stderr == ""
