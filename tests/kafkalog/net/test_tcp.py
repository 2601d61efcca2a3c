from __future__ import annotations

import socket

import pytest

from kafkalog.net.tcp import tune


def test_a_machine_that_does_not_offer_reno_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "TCP_CONGESTION", 0xFFFF)  # no such option: as where reno is not allowed
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        tune(client)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
