"""Calls that an interrupt of the main thread does not spoil."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog.net.control import ControlConnection
from kafkalog.net.main_thread import BACKGROUND, Signal, off_main_thread, start_thread
from kafkalog.wire import broker_pb2 as pb
from tests.interrupts import Interrupted, interrupted_at, traced
from tests.threads import NoThreads, join_all


def test_the_main_thread_has_it_called_in_another_and_other_threads_call_it() -> None:
    assert off_main_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        off_main_thread(lambda: 1 // 0)
    idents: list[int] = []
    other = threading.Thread(
        target=lambda: idents.extend([threading.get_ident(), off_main_thread(threading.get_ident)])
    )
    other.start()
    join_all([other], 30)
    assert idents[0] == idents[1]


def test_without_a_thread_it_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    NoThreads(monkeypatch, lambda _: True)
    assert off_main_thread(threading.get_ident) == threading.get_ident()


def test_with_one_thread_left_it_is_called_in_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread would wait for ever for a call that nobody makes."""
    main = threading.get_ident()
    machine = NoThreads(monkeypatch, lambda name: name == BACKGROUND and threading.get_ident() != main)
    called_in: list[int] = []
    is_called = Signal()

    def call() -> None:
        called_in.append(threading.get_ident())
        is_called.set()

    start_thread(call)
    assert is_called.wait(30)
    assert machine.refused == [BACKGROUND] and main not in called_in


def test_a_signal_is_waited_for_by_any_number_of_threads_and_can_be_cleared_by_one() -> None:
    signal = Signal()
    assert not signal.wait(0.0) and not signal.wait(-1.0) and not signal.is_set()
    waiting = [threading.Thread(target=signal.wait, daemon=True) for _ in range(3)]
    for each in waiting:
        each.start()
    signal.set()
    signal.set()
    join_all(waiting, 30)
    assert signal.wait() and signal.is_set()
    signal.clear()
    assert not signal.wait(0.0)
    signal.set()
    assert signal.wait()
    signal.clear()
    assert not interrupting(lambda: signal.wait(0.01))


def interrupting(call: Callable[[], object]) -> bool:
    """Interrupt this thread where a condition of the standard library has taken its lock, which stays locked; returns
    whether one did. Those that are taken by what is destroyed do not count: nobody else has that object."""
    was_raised = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal was_raised
        has_taken = event == "return" and frame.f_code is threading.Condition.__enter__.__code__
        if has_taken and not was_raised and frame.f_back is not None and frame.f_back.f_code.co_name != "__del__":
            was_raised = True
            raise Interrupted
        return trace

    traced(call, trace)
    return was_raised


def test_no_interrupt_comes_amid_a_call_of_a_broker(cluster: LocalCluster) -> None:
    """gRPC's lock would stay locked, and no call of the connection would ever end."""
    assert interrupting(lambda: threading.Condition().__enter__()), "it finds such places"
    control = ControlConnection("127.0.0.1", cluster.brokers[0].grpc_port, connect_timeout_ms=30_000)
    request = pb.DescribeClusterRequest()
    done = _thread.allocate_lock()
    done.acquire()

    def begun() -> None:
        call = control.begin("DescribeCluster", request, 30_000, done.release)
        done.acquire()
        assert call.is_done and call.result().cluster_id
        call.cancel()

    assert not interrupting(lambda: control.call("DescribeCluster", request, 30_000))
    assert not interrupting(begun)
    assert not interrupting(control.close)


@pytest.mark.parametrize("what, places", [("set", 2), ("wait", 1)])
def test_an_interrupt_of_one_that_sets_or_waits_leaves_nobody_waiting(what: str, places: int) -> None:
    number = 0
    is_interrupted = True
    while is_interrupted:
        signal = Signal()
        others = [threading.Thread(target=signal.wait, daemon=True) for _ in range(2)]
        for other in others:
            other.start()
        if what == "wait":
            signal._is_set = True  # as it is for one that has got the lock, and has to pass it on
        is_interrupted = interrupted_at(number, getattr(signal, what), "net/main_thread.py", "contextlib.py")
        if number == 0:  # it had not begun
            getattr(signal, what)()
        join_all(others, 30)
        number += 1
    assert number > places
