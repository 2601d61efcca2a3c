"""Waits for events of other processes, by asking again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def waited_for(event: Callable[[], bool], seconds: float = 30) -> None:
    """Return once `event` is true; fail when it is not within so many seconds."""
    pause, until = threading.Event(), time.monotonic() + seconds
    while not event():
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        pause.wait(0.01)
