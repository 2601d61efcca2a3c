"""The pool of threads where the machine has none left."""

from __future__ import annotations

import threading

import pytest

from kafkalog.errors import OutOfThreads
from kafkalog.threads import Pool
from tests.threads import NoThreads

SECONDS = 30


def test_without_any_thread_nothing_is_taken_and_nothing_is_left_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    machine = NoThreads(monkeypatch, lambda name: name.startswith("pool"))
    with Pool(2, process="this process", thread_name_prefix="pool") as pool:
        for _ in range(3):
            with pytest.raises(OutOfThreads, match="this process cannot start a thread now: can't start new thread"):
                pool.submit(done.append, "refused")
        machine.on = False
        pool.submit(done.append, "taken").result(SECONDS)
    assert done == ["taken"]


def test_the_threads_that_are_there_do_what_no_other_can_be_started_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    with Pool(2, process="this process", thread_name_prefix="pool") as pool:
        first = pool.submit(lambda: (begun.set(), may_end.wait(SECONDS)))
        assert begun.wait(SECONDS)
        machine = NoThreads(monkeypatch, lambda name: name.startswith("pool"))
        second = pool.submit(lambda: threading.current_thread().name)
        may_end.set()
        assert second.result(SECONDS) == "pool_0"
        assert machine.refused == ["pool_1"]
        first.result(SECONDS)
