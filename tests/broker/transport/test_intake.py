"""What a connection receives, and when it is too slow; over a real pair of sockets, by a clock of the test's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from broker.config import BrokerSettings
from broker.transport.intake import Intake
from broker.transport.memory_pool import MemoryPool, MemoryPools
from kafkalog.clock import ManualClock
from kafkalog.wire.frames import frame_start
from tests.threads import join_all

LIMIT = 4 << 20
READ_AHEAD = 1 << 20
FRAME = frame_start(b"header", 300_000) + bytes(300_000)
SMALL = frame_start(b"header", 0)


class Receiving:
    """An intake, the other end of its socket, and what its memory comes from."""

    def __init__(self, mine: socket.socket, peer: socket.socket, read_ahead: int) -> None:
        self.peer = peer
        self.clock = ManualClock()
        self.pools = MemoryPools(MemoryPool(LIMIT), MemoryPool(read_ahead))
        settings = BrokerSettings.parse({"request.max.bytes": LIMIT, "queued.max.request.bytes": LIMIT})
        self.wakes: list[None] = []
        self.intake = Intake(mine, settings, self.clock, self.pools, lambda: self.wakes.append(None))

    def receive(self, data: bytes) -> int:
        """Send so much, and take in what there is memory for; how many frames are whole then."""
        frames = 0
        for start in range(0, max(1, len(data)), 50_000):  # what the sockets hold
            self.peer.sendall(data[start : start + 50_000])
            before = -1
            while self.intake.may_receive and before < self.intake.received_bytes:
                before = self.intake.received_bytes
                assert self.intake.receive()
                while self.intake.next_frame() is not None:
                    frames += 1
                self.intake.fit()
        return frames


def made(read_ahead: int) -> Iterator[Receiving]:
    mine, peer = socket.socketpair()
    with mine, peer:
        mine.setblocking(False)
        receiving = Receiving(mine, peer, read_ahead)
        yield receiving
        receiving.intake.close()
        assert receiving.pools.bodies.used == receiving.pools.read_ahead.used == 0


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    """Without memory to read ahead."""
    yield from made(0)


@pytest.fixture
def reading_ahead() -> Iterator[Receiving]:
    """With memory for one to read ahead."""
    yield from made(READ_AHEAD)


def test_the_time_for_which_a_frame_waits_for_memory_is_not_its_peers(receiving: Receiving) -> None:
    intake, clock = receiving.intake, receiving.clock
    receiving.receive(FRAME[:20_000])
    others = receiving.pools.bodies.reserve(LIMIT, lambda: None)
    receiving.receive(FRAME[20_000:60_000])
    assert not intake.may_receive
    clock.advance(1000)
    assert not intake.is_too_slow
    others.release()
    assert receiving.wakes and intake.may_receive
    receiving.receive(b"")
    assert intake.received_bytes == 60_000
    assert not intake.is_too_slow  # it has the rest of its 30 s
    clock.advance(31)
    assert intake.is_too_slow


def test_the_time_after_a_large_frame_came_is_not_its_peers(receiving: Receiving) -> None:
    intake = receiving.intake
    receiving.receive(FRAME[:200_000])
    sender = threading.Thread(target=receiving.peer.sendall, args=(FRAME[200_000:],))
    sender.start()
    frame = None
    while frame is None:
        assert intake.receive()
        frame = intake.next_frame()
        intake.fit()
    join_all([sender], 60)
    receiving.clock.advance(1000)
    assert not intake.is_too_slow


def test_a_frame_that_has_come_leaves_the_next_one_all_of_its_time(receiving: Receiving) -> None:
    assert receiving.receive(FRAME) == 1
    receiving.clock.advance(1000)
    receiving.receive(FRAME[:60_000])
    assert not receiving.intake.is_too_slow
    receiving.clock.advance(31)
    assert receiving.intake.is_too_slow


def test_the_next_waiter_waits_a_time_of_its_own_for_a_body_with_little_progress(receiving: Receiving) -> None:
    intake, clock, bodies = receiving.intake, receiving.clock, receiving.pools.bodies
    receiving.receive(FRAME[:60_000])
    first = bodies.reserve(LIMIT, lambda: None)
    intake.fit()
    clock.advance(1)
    second = bodies.reserve(LIMIT, lambda: None)
    first.release()
    intake.fit()
    clock.advance(1)
    assert not intake.is_in_the_way
    clock.advance(1)
    assert intake.is_in_the_way
    second.release()
    assert not intake.is_in_the_way  # nobody waits any more


def test_a_connection_that_ends_gives_back_what_it_reads_ahead_on(reading_ahead: Receiving) -> None:
    assert reading_ahead.receive(FRAME[:60_000]) == 0
    assert reading_ahead.pools.read_ahead.used == READ_AHEAD
    reading_ahead.intake.close()
    assert reading_ahead.pools.read_ahead.used == 0


def test_what_is_read_ahead_on_is_given_back_unused_for_five_seconds(reading_ahead: Receiving) -> None:
    intake, clock, read_ahead = reading_ahead.intake, reading_ahead.clock, reading_ahead.pools.read_ahead
    assert reading_ahead.receive(SMALL * 5000) == 5000
    assert read_ahead.used == READ_AHEAD
    assert intake.deadline is not None
    clock.advance(intake.deadline - clock.monotonic() - 1)
    intake.fit()
    assert read_ahead.used == READ_AHEAD
    clock.advance(1)
    intake.fit()
    assert read_ahead.used == 0
    assert intake.deadline is None


def test_a_large_frame_takes_the_place_of_what_was_read_ahead_on(reading_ahead: Receiving) -> None:
    large = frame_start(b"header", 2 << 20) + bytes(2 << 20)
    assert reading_ahead.receive(SMALL * 5000) == 5000
    assert reading_ahead.pools.read_ahead.used == READ_AHEAD
    assert reading_ahead.receive(large[: 3 << 19]) == 0
    assert reading_ahead.pools.read_ahead.used == 0
    assert 0 < reading_ahead.pools.bodies.used < len(large)
    assert reading_ahead.receive(large[3 << 19 :]) == 1
