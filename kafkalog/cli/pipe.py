"""Standard input and output as pipes: how much of what is written into one its reader has read.

A pipe holds 64 KiB, so a program may count lines as handed over that nobody ever reads. Knows bytes and offsets; no
brokers, no commits.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import stat
import sys
import termios
from collections import deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from kafkalog.records import TopicPartition

_LOOK_MS = 20


def is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or not a file
        return False


class WrittenPipe(io.FileIO):
    """The write end of a pipe, to be written into without a buffer or under one."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._written = 0
        self._reader = select.poll()
        self._reader.register(descriptor, 0)  # only that it is gone, which is always reported

    def write(self, data: ReadableBuffer, /) -> int:
        count = super().write(data)
        self._written += count or 0  # None: a pipe that must not block is full
        return count

    def _unread(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)

    def read_to(self) -> int:
        """How many of the written bytes are read. It may be fewer than are, if another process writes into the same
        pipe, because unread bytes do not say whose they are."""
        return max(0, self._written - self._unread())

    def has_reader(self) -> bool:
        return not self._reader.poll(0)

    def wait_until_read(self, meanwhile: Callable[[], object]) -> None:
        """Return once everything is read, or no reader is left. Until then call `meanwhile` again and again."""
        # A reader that goes away ends the wait at once. A pipe does not announce that it is empty, so this looks.
        while self._unread() and not self._reader.poll(_LOOK_MS):
            meanwhile()


class ReadLines:
    """The lines written into a pipe, and up to which offsets its reader has read them.

    Attributes:
        offsets: of each partition, the one after its last line that is read; to be set to where a partition begins.
    """

    def __init__(self, pipe: WrittenPipe | None) -> None:
        """`pipe`: None if lines go elsewhere: then they count as read once they are written."""
        self.offsets: dict[TopicPartition, int] = {}
        self._pipe = pipe
        self._end = 0
        self._unread: deque[tuple[int, TopicPartition | None, int]] = (
            deque()
        )  # as many lines as a pipe holds, and a buffer

    def add(self, size: int, partition: TopicPartition, next_offset: int) -> None:
        """A line was written, or is in the buffer of the pipe."""
        self._end += size
        self._unread.append((self._end, partition, next_offset))

    def look(self) -> int:
        """Count the lines that are read by now. Returns how many others are left."""
        read_to = self._end if self._pipe is None else self._pipe.read_to()
        unread = self._unread
        while unread and unread[0][0] <= read_to:
            _, partition, offset = unread[0]
            if partition is not None:
                self.offsets[partition] = offset
            unread.popleft()  # last: Ctrl-C may come before it, and forgets no line
        return len(unread)

    def forget(self, partitions: Container[TopicPartition]) -> None:
        """Keep no offsets of these: the lines of them that are not read by now will not count."""
        self.offsets = {p: offset for p, offset in self.offsets.items() if p not in partitions}
        self._unread = deque((end, None if p in partitions else p, offset) for end, p, offset in self._unread)
