"""Lines of a file, a pipe or a terminal, which another thread can stop, and a signal interrupt. Knows no records.

A pipe wakes the wait for both. The system may deliver a signal to any thread, or just before the main one begins to
wait: neither ends that wait, and Python runs handlers in the main thread only, once it runs.
"""

from __future__ import annotations

import io
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Self


class LineReader:
    """Iterates over lines, without their ends. A context manager.

    Attributes:
        count: of the lines that are read, also if they are not handed out yet.
    """

    def __init__(self, descriptor: int) -> None:
        self.count = 0
        self._descriptor = descriptor
        self._is_stopped = False
        self._is_taking = self._is_interrupted = False
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_fd: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_fd = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopped = True  # who stops it later finds nobody to wake
        is_put_back = self._previous_fd is None
        try:
            if self._previous_fd is not None:
                signal.set_wakeup_fd(self._previous_fd)
                is_put_back = True
        finally:
            if not is_put_back:  # an interrupt, or that one is closed: signals may not be written to whoever gets ours
                signal.set_wakeup_fd(-1)
            os.close(self._woken)
            os.close(self._waker)

    def stop(self) -> None:
        """Hand out no more lines, at once also if none comes. Thread-safe."""
        if not self._is_stopped:
            self._is_stopped = True
            with suppress(BlockingIOError):  # full of signals, each of which wakes it
                os.write(self._waker, b"\0")

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler. Raises KeyboardInterrupt; what was just read is counted before. The read itself may wait,
        where another process reads the same pipe: then the next signal raises."""
        if not self._is_taking or self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True

    def __iter__(self) -> Iterator[bytes]:
        begun: list[bytes] = []  # of a line whose end is not read
        while data := self._read():
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = b"".join((*begun, lines[0]))
                begun.clear()
            begun.append(rest)
            yield from self._until_stopped(lines)
        last = b"".join(begun)
        if last and not self._is_stopped:
            self.count += 1
            yield last

    def _until_stopped(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            if self._is_stopped:
                return
            yield line

    def _read(self) -> bytes:
        """What has come, once something has; nothing at the end, and when stopped."""
        ready: list[int] = []
        while self._descriptor not in ready and not self._is_stopped:
            ready, _, _ = select.select([self._descriptor, self._woken], [], [])
            if self._woken in ready:  # stopped, or a signal whose handler has not ended this
                os.read(self._woken, io.DEFAULT_BUFFER_SIZE)
        if self._is_stopped:
            return b""
        self._is_taking = True
        try:
            data = os.read(self._descriptor, io.DEFAULT_BUFFER_SIZE)
            self.count += data.count(b"\n")
        finally:
            self._is_taking = False
        if self._is_interrupted:
            raise KeyboardInterrupt
        return data
