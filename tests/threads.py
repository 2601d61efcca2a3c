"""A machine that has no thread left, for tests: what `threading` says then."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


class NoThreads:
    """While it is `on`, threads whose names it is asked about cannot be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Callable[[str], bool]) -> None:
        self.on = True
        self.refused: list[str] = []
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.on and names(thread.name):
                self.refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
