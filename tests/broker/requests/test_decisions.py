"""Decisions over gRPC: what is written is read, a stale version is refused with its facts, nonsense is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from broker.replica import expiry, in_doubt
from broker.transport import rpc
from kafkalog.errors import DecisionMoved, InvalidRequest, KafkalogError, TooLargeForZooKeeper
from kafkalog.format.decisions import DecidedTopic, Decision
from kafkalog.wire import dataport_pb2
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk import decisions, paths
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker

DECIDED = Decision(
    "app-a/b-t",
    batch_id=3,
    commit_uuid=b"c" * 16,
    run_id="run",
    fingerprint=b"f",
    topics=(DecidedTopic(b"t" * 16, "t", ((0, 1), (4, 4))),),
    replaced_runs=("older",),
    decided_us=5,
)


def refused(call: Callable[..., Any], request: Any) -> KafkalogError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    return error_from_wire(dataport_pb2.Error.FromString(metadata[rpc.ERROR_KEY]))


def decide(broker: RunningBroker, decision: Decision) -> int:
    request = pb.DecideRequest(decision=decision_to_wire(decision))
    return int(broker.stub.Decide(request, timeout=30).version)


def read(broker: RunningBroker, *transactional_ids: str) -> list[Decision]:
    request = pb.ReadDecisionsRequest(transactional_ids=transactional_ids)
    return [decision_from_wire(each) for each in broker.stub.ReadDecisions(request, timeout=30).decisions]


def test_a_decision_is_made_read_and_listed(broker: RunningBroker) -> None:
    assert read(broker, "app-a/b-t") == [Decision("app-a/b-t")]
    before_us = time.time_ns() // 1000
    assert decide(broker, DECIDED) == 0
    none, found = read(broker, "none", "app-a/b-t")
    assert none == Decision("none")
    assert found == replace(DECIDED, version=0, decided_us=found.decided_us)
    assert before_us <= found.decided_us <= time.time_ns() // 1000
    assert decide(broker, replace(found, done=True)) == 1
    [listed] = broker.stub.ListDecisions(pb.ListDecisionsRequest(), timeout=30).decisions
    assert [decision_from_wire(listed)] == read(broker, "app-a/b-t")
    assert listed.done


def test_a_decision_on_another_version_is_refused_with_both_versions(broker: RunningBroker) -> None:
    decide(broker, DECIDED)
    error = refused(broker.stub.Decide, pb.DecideRequest(decision=decision_to_wire(DECIDED)))
    assert isinstance(error, DecisionMoved)
    assert error.facts == {"transactional_id": "app-a/b-t", "expected": -1, "version": 0}
    assert not error.retriable


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        (replace(DECIDED, transactional_id=""), "1 to 1000 characters, not 0"),
        (replace(DECIDED, transactional_id="x" * 1001), "1 to 1000 characters, not 1001"),
        (replace(DECIDED, commit_uuid=b"short"), "it must have 16, or 0"),
        (replace(DECIDED, batch_id=-1), "or 0 if no batch is decided"),
        (replace(DECIDED, batch_id=-2), "must be >= -1"),
        (replace(DECIDED, version=-2), "must be >= -1"),
        (replace(DECIDED, topics=(DecidedTopic(b"t" * 16, "t", ((3, 2),)),)), "has an invalid topic id or range"),
        (replace(DECIDED, topics=(DecidedTopic(b"short", "t", ((0, 2),)),)), "has an invalid topic id or range"),
        (replace(DECIDED, applied=(DecidedTopic(b"short", "t", ((0, 0),)),)), "has an invalid topic id or range"),
        (replace(DECIDED, applied=(DecidedTopic(b"t" * 16, "t", ((1, 0),)),)), "has an invalid topic id or range"),
    ],
)
def test_nonsense_is_refused_and_nothing_is_written(broker: RunningBroker, decision: Decision, says: str) -> None:
    error = refused(broker.stub.Decide, pb.DecideRequest(decision=decision_to_wire(decision)))
    assert isinstance(error, InvalidRequest)
    assert says in str(error)
    assert not broker.stub.ListDecisions(pb.ListDecisionsRequest(), timeout=30).decisions


def test_a_request_without_an_id_is_refused(broker: RunningBroker) -> None:
    request = pb.ReadDecisionsRequest(transactional_ids=["a", ""])
    assert isinstance(refused(broker.stub.ReadDecisions, request), InvalidRequest)


@pytest.mark.parametrize("unknown", ["no json", "[1]", "[" * 100_000])
def test_unknown_fields_that_are_no_object_are_refused(broker: RunningBroker, unknown: str) -> None:
    request = pb.DecideRequest(decision=decision_to_wire(replace(DECIDED, unknown=unknown)))
    error = refused(broker.stub.Decide, request)
    assert isinstance(error, InvalidRequest) and "unknown fields must be a JSON object" in str(error)


def test_a_broker_forgets_batch_decisions_that_are_long_done(chroot: str, start_broker: StartBroker) -> None:
    session = ZooKeeperSession(chroot)
    session.start()
    try:
        for name, stays in (("app-old", False), ("spark-stream-old", True)):
            old = replace(DECIDED, transactional_id=name, stays=stays, done=True)
            decisions.write_decision(session, old)
        gone = threading.Event()
        session.children(paths.TRANSACTIONS, lambda _: gone.set())
        start_broker()
        assert gone.wait(30)
        assert [each.transactional_id for each in decisions.list_decisions(session)] == ["spark-stream-old"]
    finally:
        session.close()


def test_a_broker_forgets_many_decisions_over_several_looks(
    chroot: str, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_CHUNK", 1)
    monkeypatch.setattr(expiry, "_FORGET_SECONDS", 0.0)
    monkeypatch.setattr(in_doubt, "_EVERY_SECONDS", 0.01)
    left, none_left = [5], threading.Event()
    forget_expired = expiry.Expiry.forget_decisions

    def noted(self: expiry.Expiry) -> None:
        forget_expired(self)
        left.append(len(self._host.metadata.session.children(paths.TRANSACTIONS)))
        if not left[-1]:
            none_left.set()

    monkeypatch.setattr(expiry.Expiry, "forget_decisions", noted)
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        for number in range(left[0]):
            decisions.write_decision(session, replace(DECIDED, transactional_id=f"{number}", done=True))
    start_broker()
    assert none_left.wait(30)
    assert left[: left.index(0) + 1] == [5, 4, 3, 2, 1, 0]


def test_a_decision_that_zookeeper_would_not_take_is_refused_and_holds_nobody_else_up(broker: RunningBroker) -> None:
    states: list[bool] = []
    broker.broker.host.metadata.session.on_state(lambda connected, _: states.append(connected))
    for name in ("one", "two"):
        request = pb.DecideRequest(decision=decision_to_wire(replace(DECIDED, run_id="r" * 1_200_000)))
        error = refused(broker.stub.Decide, request)
        assert isinstance(error, TooLargeForZooKeeper)
        assert not error.retriable
        assert error.facts["size"] > 1_200_000
        assert decide(broker, replace(DECIDED, transactional_id=name)) == 0
    assert [each.version for each in read(broker, DECIDED.transactional_id)] == [-1]
    assert states == []
