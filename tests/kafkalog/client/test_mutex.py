"""The producer's lock: one at a time, nobody forgotten, also below conditions."""

from __future__ import annotations

import sys
import threading

import pytest

from kafkalog.client.mutex import Mutex

pytestmark = pytest.mark.timeout(60)


def test_one_at_a_time_and_nobody_waits_for_ever() -> None:
    mutex = Mutex()
    counter = 0
    interval = sys.getswitchinterval()

    def count() -> None:
        nonlocal counter
        for _ in range(3000):
            with mutex:
                before = counter
                for _ in range(3):  # somewhere to be interrupted
                    pass
                counter = before + 1

    threads = [threading.Thread(target=count) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counter == 18_000
    assert mutex.tokens == [None]
    assert not mutex.is_wanted


def test_it_is_not_waited_for_unless_wanted() -> None:
    mutex = Mutex()
    assert mutex.acquire()
    assert not mutex.acquire(blocking=False)
    mutex.release()
    assert mutex.acquire(blocking=False)
    mutex.release()
    with pytest.raises(AssertionError):
        mutex.release()


def test_conditions_wait_for_it_and_give_it_back() -> None:
    mutex = Mutex()
    ready = threading.Condition(mutex)  # type: ignore[arg-type]
    items: list[int] = []
    taken: list[int] = []

    def take() -> None:
        for _ in range(500):
            with mutex:
                while not items:
                    ready.wait()
                taken.append(items.pop())

    takers = [threading.Thread(target=take) for _ in range(3)]
    for taker in takers:
        taker.start()
    for number in range(1500):
        with mutex:
            items.append(number)
            ready.notify()
    for taker in takers:
        taker.join()
    assert sorted(taken) == list(range(1500))
    with mutex:
        assert not ready.wait(0.001)
