"""What a broker reports to the process that started it, as lines of JSON on standard output: that it serves, or the
error that kept it from serving, and from then on the warnings and errors that it logs.

A pipe is used because the log file may be on the disk that is full. Nobody has to read the pipe: what does not fit is
dropped. Of a repeated event the first is reported, and a minute later the number of the others.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from typing import Any

from kafkalog.clock import SYSTEM_CLOCK, Clock

AGAIN_SECONDS = 60.0
_TEXT_MAX = 600
"""Of an event: a line of up to 4096 bytes (PIPE_BUF) is written whole or not at all, and JSON may need six for each."""


def announce(fd: int, facts: dict[str, Any]) -> None:
    """Write one line and ignore failures: if the reader is gone, the broker is ended in another way."""
    try:
        os.write(fd, json.dumps(facts).encode() + b"\n")
    except OSError:
        pass


class Announcer(logging.Handler):
    """Announces warnings and errors on a pipe, which it makes non-blocking. One thread reports all repeats, while any
    are due: a thousand threads, one for each event, would delay each other."""

    def __init__(self, fd: int, again_seconds: float = AGAIN_SECONDS, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(logging.WARNING)
        self._fd = fd
        self._again_seconds = again_seconds
        self._clock = clock
        # Under the handler's lock: how often each event came since its last report; when to report it again, in this
        # order; and whether a thread waits for the first of them.
        self._repeats: dict[tuple[str, str], int] = {}
        self._due: deque[tuple[float, tuple[str, str]]] = deque()
        self._timer: threading.Timer | None = None
        os.set_blocking(fd, False)

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        try:
            self._report_due()  # done here only if no thread could be started
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                error = record.exc_info[1]
                text = f"{text} ({type(error).__name__}: {error})"
            event = record.levelname.lower(), text.partition(" ")[0]
            if event in self._repeats:
                self._repeats[event] += 1
            else:
                self._repeats[event] = 0
                self._report(record.levelname.lower(), text)
                self._due.append((self._clock.monotonic() + self._again_seconds, event))
            self._wait()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self.acquire()
        try:
            self._due.clear()
            self._repeats.clear()
            if self._timer is not None:
                self._timer.cancel()
        finally:
            self.release()
        super().close()

    def _wait(self) -> None:
        """Start a thread that waits for the next report of repeats, if one is due and no thread waits."""
        if self._timer is not None or not self._due:
            return
        timer = threading.Timer(max(0.0, self._due[0][0] - self._clock.monotonic()), self._report_repeats)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            return  # the machine has no thread left; the next event tries again
        self._timer = timer

    def _report_repeats(self) -> None:
        self.acquire()
        try:
            self._timer = None
            self._report_due()
            self._wait()
        finally:
            self.release()

    def _report_due(self) -> None:
        while self._due and self._due[0][0] <= self._clock.monotonic():
            _, event = self._due.popleft()
            repeats = self._repeats.pop(event)
            if repeats:
                self._report(event[0], f"{event[1]}, {repeats} more in {self._again_seconds:g} s")

    def _report(self, level: str, text: str) -> None:
        announce(self._fd, {"level": level, "event": " ".join(text.split())[:_TEXT_MAX]})
