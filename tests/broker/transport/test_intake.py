"""What a connection receives, and when it is too slow; over a real pair of sockets, by a clock of the test's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from broker.config import BROKER_SETTINGS
from broker.transport.budget import Budget, Budgets
from broker.transport.intake import Intake
from kafkalog.clock import ManualClock
from kafkalog.wire.frames import frame_start

LIMIT = 4 << 20
FRAME = frame_start(b"header", 300_000) + bytes(300_000)


class Receiving:
    """An intake, the other end of its socket, and what its memory comes from."""

    def __init__(self, mine: socket.socket, peer: socket.socket) -> None:
        self.peer = peer
        self.clock = ManualClock()
        self.budgets = Budgets(Budget(LIMIT), Budget(0))
        settings = BROKER_SETTINGS.parse({"request.max.bytes": LIMIT, "queued.max.request.bytes": LIMIT})
        self.wakes: list[None] = []
        self.intake = Intake(mine, settings, self.clock, self.budgets, lambda: self.wakes.append(None))

    def receive(self, data: bytes) -> None:
        """Send so much, and take in what there is memory for."""
        self.peer.sendall(data)
        before = -1
        while self.intake.may_receive and before < self.intake.received_bytes:
            before = self.intake.received_bytes
            assert self.intake.receive()
            assert self.intake.next_frame() is None
            self.intake.fit()


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    mine, peer = socket.socketpair()
    with mine, peer:
        mine.setblocking(False)
        made = Receiving(mine, peer)
        yield made
        made.intake.close()
        assert made.budgets.bodies.used == 0


def test_the_time_for_which_a_frame_waits_for_memory_is_not_its_peers(receiving: Receiving) -> None:
    intake, clock = receiving.intake, receiving.clock
    receiving.receive(FRAME[:20_000])
    others = receiving.budgets.bodies.reserve(LIMIT, lambda: None)
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
