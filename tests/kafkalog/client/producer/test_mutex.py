"""The producer's lock: one at a time, nobody forgotten, also below conditions, and whatever interrupts it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from itertools import count

import pytest

from kafkalog.client.producer import mutex as mutexes
from kafkalog.client.producer.mutex import Mutex
from kafkalog.errors import ReentrantCall
from tests.interrupts import interrupted_at
from tests.threads import join_all
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(60)


def test_one_holder_at_a_time_and_every_thread_gets_the_lock() -> None:
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
        join_all(threads, 60)
    finally:
        sys.setswitchinterval(interval)
    assert counter == 18_000
    assert mutex.holder is None and mutex.tokens == [None]
    assert not mutex.waiting


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
    join_all(takers, 60)
    assert sorted(taken) == list(range(1500))
    with mutex:
        assert not ready.wait(0.001)


# --- interrupts ------------------------------------------------------------------------------------------------------

OURS = "client/producer/mutex.py"


def test_an_interrupt_anywhere_leaves_it_free() -> None:
    mutex = Mutex()
    ran = 0

    def section() -> None:
        nonlocal ran
        assert mutex.holder is not None and not mutex.tokens
        ran += 1

    for number in count():
        if not interrupted_at(number, lambda: mutex.run(section), OURS):
            break
        assert mutex.holder is None and mutex.tokens == [None]
    assert number > 2
    assert ran > 1


def test_an_interrupt_of_who_waits_for_it_keeps_no_other_from_it() -> None:
    mutex = Mutex()
    for number in count():
        others = [0]
        hold, held = threading.Event(), threading.Event()

        def holder(hold: threading.Event = hold, held: threading.Event = held) -> None:
            def section() -> None:
                held.set()
                assert hold.wait(30)

            mutex.run(section)

        def add(others: list[int] = others) -> None:
            others[0] += 1

        def free_it(hold: threading.Event = hold) -> None:
            waited_for(lambda: bool(mutex.waiting))
            hold.set()

        threads = [threading.Thread(target=holder)]
        threads[0].start()
        assert held.wait(30)
        if number % 2:  # somebody waits before us, or else comes behind us
            threads.append(threading.Thread(target=mutex.run, args=(add,)))
            threads[-1].start()
            waited_for(lambda: bool(mutex.waiting))
        freeing = threading.Thread(target=free_it)
        freeing.start()
        was_interrupted = interrupted_at(number // 2, lambda: mutex.run(int), OURS)
        threads.append(threading.Thread(target=mutex.run, args=(add,)))
        threads[-1].start()
        for thread in [*threads, freeing]:
            thread.join(30)
            assert not thread.is_alive()
        assert others == [len(threads) - 1]
        assert mutex.holder is None and mutex.tokens == [None]
        assert not mutex.waiting
        if not was_interrupted:
            break
    assert number > 5


@pytest.mark.parametrize("wait", [lambda ready: ready.wait(0.001), lambda ready: ready.wait(0)])
def test_an_interrupt_of_who_waits_for_a_condition_leaves_it_free(
    wait: Callable[[threading.Condition], object],
) -> None:
    mutex = Mutex()
    ready = threading.Condition(mutex)  # type: ignore[arg-type]
    for number in count():
        if not interrupted_at(number, lambda: mutex.run(wait, ready), OURS):
            break
        assert mutex.holder is None and mutex.tokens == [None]
        assert not mutex.waiting
    assert number > 10


def test_what_is_interrupted_is_repaired_while_it_is_held_and_no_more_after() -> None:
    repaired: list[type] = []

    def repair(error: BaseException) -> None:
        assert mutex.holder is not None and not mutex.tokens
        repaired.append(type(error))

    mutex = Mutex(repair)
    with pytest.raises(ZeroDivisionError):
        mutex.run(lambda: 1 // 0)
    assert repaired == [ZeroDivisionError]
    assert mutex.holder is None and mutex.tokens == [None]


# --- signal handlers that want the lock ------------------------------------------------------------------------------


@pytest.mark.parametrize("held_by", ["run", "with"])
def test_a_signal_handler_above_its_holder_is_reported_and_does_not_wait(held_by: str) -> None:
    mutex = Mutex()

    def interrupt() -> None:
        if held_by == "run":
            mutex.run(signal.raise_signal, signal.SIGUSR1)
        else:
            with mutex:
                signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: mutex.run(int))
    try:
        with pytest.raises(ReentrantCall):
            interrupt()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert mutex.holder is None and mutex.tokens == [None]
    assert not mutex.waiting


@pytest.mark.parametrize("held_by", ["run", "with"])
def test_a_signal_handler_above_one_that_waits_gets_it(held_by: str) -> None:
    mutex = Mutex()
    held, hold = threading.Event(), threading.Event()
    order: list[str] = []

    def section() -> None:
        held.set()
        assert hold.wait(30)

    def hold_it() -> None:
        if held_by == "run":
            mutex.run(section)
        else:
            with mutex:
                section()

    def interrupt_who_waits() -> None:
        waited_for(lambda: len(mutex.waiting) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        waited_for(lambda: len(mutex.waiting) == 2)
        hold.set()

    threads = [threading.Thread(target=hold_it), threading.Thread(target=interrupt_who_waits)]
    before = signal.signal(signal.SIGUSR1, lambda *_: mutex.run(order.append, "handler"))
    try:
        threads[0].start()
        assert held.wait(30)
        threads[1].start()
        mutex.run(order.append, "interrupted")
    finally:
        signal.signal(signal.SIGUSR1, before)
        hold.set()
    for thread in threads:
        thread.join(30)
    assert order == ["handler", "interrupted"]
    assert mutex.holder is None and mutex.tokens == [None]
    assert not mutex.waiting


def test_a_lock_that_another_thread_keeps_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutexes, "_LOOK_SECONDS", 0.001)
    mutex = Mutex()
    waits: set[int] = set()
    held = threading.Event()

    def section() -> None:
        held.set()
        waited_for(lambda: waits.update(map(id, mutex.waiting)) or len(waits) > 1)  # it has looked again

    holder = threading.Thread(target=mutex.run, args=(section,))
    holder.start()
    assert held.wait(30)
    assert mutex.run(int) == 0
    holder.join(30)
