"""A request to stop, by SIGTERM, by SIGINT or from any thread: a byte in a pipe.

A pipe and not an Event: the system may deliver a signal to any thread (not the main one if the process was just
continued after SIGSTOP). Python runs handlers in the main thread only, and a main thread that waits for a lock does not
run them. A read or poll of the pipe does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Handles the signals within its `with` block, which must be in the main thread; thread-safe otherwise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _asking against being closed while it is written to
        self._asked = self._asking = -1

    def __enter__(self) -> Self:
        self._asked, self._asking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_fd = signal.set_wakeup_fd(self._asking)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        with self._lock:
            asked, self._asked = self._asked, -1
            asking, self._asking = self._asking, -1
        os.close(asked)
        os.close(asking)

    def ask(self) -> None:
        """Ask to stop, from any thread."""
        with self._lock:
            if self._asking >= 0:
                os.write(self._asking, b"\0")

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a request to stop, for at most so many seconds (None: for ever); returns whether there is one."""
        poller = select.poll()
        poller.register(self._asked, select.POLLIN)
        return bool(poller.poll(None if seconds is None else max(seconds, 0) * 1000))
