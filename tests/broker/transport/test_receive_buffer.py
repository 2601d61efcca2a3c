"""The receive buffer: frames cut anywhere come out whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.transport.intake import BASE_CAPACITY, OversizedBody, OversizedHeader, ReceiveBuffer
from kafkalog.wire.frames import HEADER_LENGTH_MAX, PREFIX, frame_start


def fill(buffer: ReceiveBuffer, data: bytes) -> int:
    """Put in as much as there is room for; how much."""
    space = buffer.space()
    count = min(len(space), len(data))
    space[:count] = data[:count]
    buffer.received(count)
    return count


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=300)), min_size=1, max_size=12),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_frames_cut_anywhere_come_out_whole_and_in_order(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame_start(header, len(body)) + body for header, body in frames)
    buffer = ReceiveBuffer(1 << 20)
    found: list[tuple[bytes, bytes]] = []
    position = cut = 0
    while position < len(stream):
        position += fill(buffer, stream[position : position + cuts[cut % len(cuts)]])
        cut += 1
        while (frame := buffer.next_frame()) is not None:
            assert isinstance(frame, tuple)
            found.append((frame[0], bytes(frame[1])))
    assert found == frames
    assert len(buffer) == 0


def test_a_frame_at_the_end_of_the_buffer_moves_to_the_front() -> None:
    buffer = ReceiveBuffer(1 << 20)
    body = b"x" * (BASE_CAPACITY // 3)
    stream = (frame_start(b"h", len(body)) + body) * 10
    position = found = 0
    while position < len(stream):
        taken = fill(buffer, stream[position:])
        assert taken > 0
        position += taken
        while (frame := buffer.next_frame()) is not None:
            assert isinstance(frame, tuple)
            assert frame[1] == body
            found += 1
    assert found == 10


def test_a_large_frame_says_what_it_needs_and_keeps_its_bytes_over_a_resize() -> None:
    buffer = ReceiveBuffer(1 << 20)
    body = bytes(range(256)) * 1024
    stream = frame_start(b"head", len(body)) + body
    position = fill(buffer, stream)
    assert buffer.next_frame() is None
    assert buffer.needed == len(stream) > buffer.capacity
    assert len(buffer.space()) == 0
    buffer.resize(buffer.needed)
    fill(buffer, stream[position:])
    frame = buffer.next_frame()
    assert isinstance(frame, tuple)
    assert frame[0] == b"head"
    assert frame[1] == body
    frame[1][:1] = b"?"  # it can be stamped in place
    buffer.resize(BASE_CAPACITY)
    assert buffer.capacity == BASE_CAPACITY


def test_a_body_over_the_limit_is_reported_with_its_header_and_can_be_discarded() -> None:
    buffer = ReceiveBuffer(100)
    after = frame_start(b"next", 1) + b"!"
    stream = frame_start(b"head", 101) + bytes(101) + after
    fill(buffer, stream[:9])
    assert buffer.next_frame() is None  # the header is not all there
    fill(buffer, stream[9:])
    assert buffer.next_frame() == OversizedBody(b"head", 101)
    assert buffer.discard(101) == 101
    assert buffer.next_frame() == (b"next", memoryview(b"!"))
    assert buffer.discard(5) == 0


def test_an_oversized_header_is_detected_from_its_prefix() -> None:
    buffer = ReceiveBuffer(100)
    fill(buffer, PREFIX.pack(HEADER_LENGTH_MAX + 1, 0))
    assert buffer.next_frame() == OversizedHeader(HEADER_LENGTH_MAX + 1)
