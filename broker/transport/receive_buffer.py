"""The bytes of a connection that were received and not yet taken: one buffer, filled by recv_into, parsed in place.

Knows frames' boundaries, not their meaning, and no sockets; how large it may be is the connection's business. Views
handed out are good until the next `space` or `resize`.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from kafkalog.wire.frames import HEADER_LENGTH_MAX, PREFIX, PREFIX_SIZE

BASE_CAPACITY = 32 * 1024
"""What every connection has: 1000 of them take 32 MB."""


Frame = tuple[bytes, memoryview]
"""A whole frame: header, and body as a view of the buffer. A plain tuple, for it is made for every append."""


@dataclass(frozen=True)
class OversizedHeader:
    """A frame whose header is longer than is ever read: the stream cannot be followed any further."""

    header_length: int


@dataclass(frozen=True)
class OversizedBody:
    """A frame whose header is here and whose body is larger than allowed; the body is what comes next."""

    header: bytes
    body_length: int


class ReceiveBuffer:
    """Not thread-safe.

    Args:
        body_max: largest body of a frame.
    """

    def __init__(self, body_max: int) -> None:
        self._body_max = body_max
        self._view = memoryview(bytearray(BASE_CAPACITY))
        self._start = 0
        self._end = 0
        self.needed = PREFIX_SIZE
        """Capacity that the next frame needs as a whole, as far as is known."""

    @property
    def capacity(self) -> int:
        return len(self._view)

    def __len__(self) -> int:
        """Bytes received and not taken."""
        return self._end - self._start

    def space(self) -> memoryview:
        """Where to receive to; empty only if the frame at hand needs more than the capacity."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and (self._start + self.needed > self.capacity or self._end == self.capacity):
            count = len(self)
            self._view[:count] = self._view[self._start : self._end]
            self._start, self._end = 0, count
        return self._view[self._end :]

    def received(self, count: int) -> None:
        self._end += count

    def resize(self, capacity: int) -> None:
        """Another capacity, with the same bytes in it; one above the base is the kernel's again when dropped."""
        count = len(self)
        assert capacity >= count
        # An anonymous map takes no memory until it is written to, and goes back at once: malloc would keep it.
        memory = bytearray(capacity) if capacity <= BASE_CAPACITY else mmap.mmap(-1, capacity)
        view = memoryview(memory)
        view[:count] = self._view[self._start : self._end]
        self._view, self._start, self._end = view, 0, count

    def take(self, count: int) -> bytes:
        """A copy of the first `count` bytes, taken."""
        taken = bytes(self._view[self._start : self._start + count])
        self._start += len(taken)
        return taken

    def discard(self, count: int) -> int:
        """Take up to so many bytes and forget them; how many."""
        taken = min(count, len(self))
        self._start += taken
        return taken

    def next_frame(self) -> Frame | OversizedBody | OversizedHeader | None:
        """The next frame, taken; None when it is not whole yet (`needed` then says what capacity it takes)."""
        view, start = self._view, self._start
        have = self._end - start
        if have < PREFIX_SIZE:
            self.needed = PREFIX_SIZE
            return None
        header_length, body_length = PREFIX.unpack_from(view, start)
        if header_length > HEADER_LENGTH_MAX:
            return OversizedHeader(header_length)
        header_end = PREFIX_SIZE + header_length
        if body_length > self._body_max:
            self.needed = header_end
            if have < header_end:
                return None
            self._start = start + header_end
            return OversizedBody(bytes(view[start + PREFIX_SIZE : start + header_end]), body_length)
        total = header_end + body_length
        self.needed = total
        if have < total:
            return None
        self._start = start + total
        header_start = start + PREFIX_SIZE
        body_start = header_start + header_length
        return bytes(view[header_start:body_start]), view[body_start : body_start + body_length]
