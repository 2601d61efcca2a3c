"""Lines of a file, a pipe or a terminal, which another thread can stop. Knows no records."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
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
        self._woken, self._waker = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopped = True  # who stops it later finds nobody to wake
        os.close(self._woken)
        os.close(self._waker)

    def stop(self) -> None:
        """Hand out no more lines, at once also if none comes. Thread-safe."""
        if not self._is_stopped:
            self._is_stopped = True
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
        ready, _, _ = select.select([self._descriptor, self._woken], [], [])
        if self._woken in ready:
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
