"""Calls in threads of their own: what their futures get, and calls to several brokers at once."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.errors import BrokerUnreachable, OutOfThreads
from tests.threads import NoThreads
from tests.waiting import waited_for


def test_a_future_gets_the_result_or_the_error_and_reports_its_end() -> None:
    done: queue.Queue[Future[Any]] = queue.Queue()
    calls = [in_background(lambda: 5, done.put), in_background(lambda: 5 // 0, done.put)]
    assert calls[0].result(60) == 5
    assert isinstance(calls[1].exception(60), ZeroDivisionError)
    assert {done.get(timeout=60), done.get(timeout=60)} == set(calls)


def test_a_call_has_ended_before_that_is_reported_and_is_asked_without_its_lock() -> None:
    """An interrupt of who takes that lock may leave it locked."""
    ended: queue.Queue[bool] = queue.Queue()
    gate = threading.Event()
    call = in_background(lambda: gate.wait(60), lambda _: ended.put(call.has_ended))
    with call._condition:
        asked: queue.Queue[bool] = queue.Queue()
        threading.Thread(target=lambda: asked.put(call.has_ended), daemon=True).start()
        assert asked.get(timeout=60) is False
    gate.set()
    assert ended.get(timeout=60) is True


def test_a_result_is_let_go_with_its_call() -> None:
    """In a cycle it stayed until the garbage collector came, with the answers of many brokers."""

    class Answer:
        pass

    calls = [in_background(Answer)]
    answer = weakref.ref(calls[0].result(60))
    waited_for(lambda: calls[0].has_ended)
    gc.disable()
    try:
        calls.clear()
        waited_for(lambda: answer() is None)
    finally:
        gc.enable()


def test_the_end_of_the_process_waits_for_no_call() -> None:
    program = "import threading; from kafkalog.client.background import in_background as b; b(threading.Event().wait)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_call_for_which_there_is_no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    NoThreads(monkeypatch, lambda name: name == "kafkalog-background")
    done: list[Future[Any]] = []
    with pytest.raises(OutOfThreads, match="the client cannot start a thread now: can't start new thread"):
        in_background(lambda: 5, done.append).result(60)
    assert len(done) == 1
    assert in_background(lambda: 5, done.append, here_if_need_be=True).result(60) == 5
    assert len(done) == 2


def test_brokers_are_called_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    unreachable = BrokerUnreachable(address="here:1", reason="refused")

    def call(method: str, request: object, *, broker_id: int, patient: bool) -> str:
        assert not patient
        if broker_id == 2:
            raise unreachable
        both.wait()
        return f"{method} {request} {broker_id}"

    cluster = Cluster("here:1")
    monkeypatch.setattr(cluster, "call", call)
    assert cluster.call_each("Ask", "it", range(3)) == {0: "Ask it 0", 1: "Ask it 1", 2: unreachable}
    cluster.close()
