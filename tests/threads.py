"""Threads in tests: their end, and a machine that has no thread left."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from kafkalog.net.main_thread import BACKGROUND


def join_all(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait until all have ended; fail when one has not within so many seconds, which are for all of them together."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} has not ended within {seconds} s"


class NoThreads:
    """While it is `on`, threads whose names it is asked about cannot be started: what `threading` says then. Those of
    the main thread in the background are refused before they have a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Callable[[str], bool]) -> None:
        self.on = True
        self.refused: list[str] = []
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.on and names(thread.name):
                self.refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            real(thread)

        start_new_thread = _thread.start_new_thread

        def start_unnamed(run: Callable[..., object], arguments: tuple[object, ...]) -> int:
            if self.on and names(BACKGROUND):
                raise RuntimeError("can't start new thread")
            return start_new_thread(run, arguments)

        monkeypatch.setattr(threading.Thread, "start", start)
        monkeypatch.setattr(_thread, "start_new_thread", start_unnamed)
