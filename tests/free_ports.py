"""Ports for servers that are told theirs."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> int:
    """The first of so many free ports in a row. Below those that the system gives to outgoing connections: one of these
    may take a port between this look and the server's start."""
    while True:
        port = random.randrange(15_000, 32_000 - count)
        with ExitStack() as stack:
            try:
                for number in range(count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except OSError:
                continue
            return port
