"""A request to stop: by a signal, whichever thread gets it, or by a thread; asked once, it stays asked."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from broker.signals import StopRequest
from tests.threads import join_all

WAIT_SECONDS = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_gets_ends_the_wait(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.wait(0)
        hitting = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
        hitting.start()
        assert stop.wait(WAIT_SECONDS)
        assert stop.wait()
        join_all([hitting], 60)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_thread_may_ask_and_one_that_comes_late_harms_nobody() -> None:
    with StopRequest() as stop:
        asking = threading.Thread(target=stop.ask)
        asking.start()
        assert stop.wait()
        join_all([asking], 60)
    stop.ask()


def test_whoever_was_told_of_signals_before_is_told_again_afterwards() -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing)
    try:
        with StopRequest():
            pass
        assert signal.set_wakeup_fd(before) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
