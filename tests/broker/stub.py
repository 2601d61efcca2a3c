"""A plain gRPC client of a broker: each method of its service as an attribute."""

from __future__ import annotations

from typing import Any

import grpc

from kafkalog.wire.service import METHODS


class BrokerStub:
    """`stub.CreateTopic(request, timeout=30)`; raises grpc.RpcError."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"broker.proto has no {name}")
        return METHODS[name].on(self._channel)
