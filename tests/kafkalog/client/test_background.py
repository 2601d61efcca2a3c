"""Calls in threads of their own: what their futures get, and calls to several brokers at once."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.errors import BrokerUnreachable, OutOfThreads


def test_a_future_gets_the_result_or_the_error_and_reports_its_end() -> None:
    done: list[Future[Any]] = []
    calls = [in_background(lambda: 5, done.append), in_background(lambda: 5 // 0, done.append)]
    assert calls[0].result(60) == 5
    assert isinstance(calls[1].exception(60), ZeroDivisionError)
    assert set(done) == set(calls)


def test_a_call_for_which_there_is_no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[Future[Any]] = []
    with pytest.raises(OutOfThreads, match="the client cannot start a thread now: can't start new thread"):
        in_background(lambda: 5, done.append).result(60)
    assert len(done) == 1


def test_brokers_are_called_at_the_same_time_and_one_that_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, both = threading.Event(), threading.Barrier(2, timeout=60)
    unreachable = BrokerUnreachable(address="here:1", reason="refused")

    def call(method: str, request: object, *, broker_id: int, patient: bool) -> str:
        assert not patient
        if broker_id == 2:
            go_on.wait(60)
        elif broker_id == 3:
            raise unreachable
        else:
            both.wait()
        return f"{method} {request} {broker_id}"

    cluster = Cluster("here:1")
    monkeypatch.setattr(cluster, "call", call)
    answers = {0: "Ask it 0", 1: "Ask it 1", 3: unreachable}
    assert cluster.call_each("Ask", "it", range(4), seconds=5) == answers
    go_on.set()
    assert cluster.call_each("Ask", "it", range(4)) == answers | {2: "Ask it 2"}
    cluster.close()
