"""Waits for what announces itself to nobody, by looking again and again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path


def waited_for(event: Callable[[], bool], seconds: float = 30, otherwise: str = "it never came to be") -> None:
    """Return once `event` is true; fail when it is not within so many seconds, and say so in these words."""
    pause, until = threading.Event(), time.monotonic() + seconds
    while not event():
        assert time.monotonic() < until, f"{otherwise} within {seconds} s"
        pause.wait(0.01)


def suspend(pid: int) -> None:
    """Have a process do nothing until SIGCONT. Its threads may run on for a moment after the call to the system; here
    none does any more."""

    def is_suspended() -> bool:
        try:
            threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # one that ends just now
            return False
        return {thread.rpartition(")")[2].split()[0] for thread in threads} == {"T"}

    os.kill(pid, signal.SIGSTOP)
    waited_for(is_suspended, otherwise=f"process {pid} does not stop")


def pending_signals(process_id: int) -> int:
    """Those of a process that it has not received, as a mask."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return sum(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))
