"""Waits for what announces itself to nobody, by looking again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def waited_for(event: Callable[[], bool], seconds: float = 30, otherwise: str = "it never came to be") -> None:
    """Return once `event` is true; fail when it is not within so many seconds, and say so in these words."""
    pause, until = threading.Event(), time.monotonic() + seconds
    while not event():
        assert time.monotonic() < until, f"{otherwise} within {seconds} s"
        pause.wait(0.01)
