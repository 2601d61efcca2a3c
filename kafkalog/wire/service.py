"""The broker's gRPC service from its descriptor: each method's path and messages. Imports no gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kafkalog.wire import broker_pb2, dataport_pb2, transactions_pb2

if TYPE_CHECKING:
    import grpc

_DESCRIPTION = broker_pb2.DESCRIPTOR.services_by_name["Broker"]
_MODULES = {module.DESCRIPTOR.name: module for module in (broker_pb2, dataport_pb2, transactions_pb2)}

SERVICE: str = _DESCRIPTION.full_name
"""kafkalog.wire.Broker"""


class Method(NamedTuple):
    """A unary method: its path, and the classes of its messages."""

    path: str
    request: type[Message]
    reply: type[Message]

    def on(self, channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Any, Any]:
        """The method of the server behind a gRPC channel: called with a request (and `timeout` in seconds)."""
        return channel.unary_unary(
            self.path, request_serializer=self.request.SerializeToString, response_deserializer=self.reply.FromString
        )


def _message(described: Descriptor) -> type[Message]:
    message: type[Message] = getattr(_MODULES[described.file.name], described.name)
    return message


METHODS: Mapping[str, Method] = {
    method.name: Method(f"/{SERVICE}/{method.name}", _message(method.input_type), _message(method.output_type))
    for method in _DESCRIPTION.methods
}
"""By name, in the order of broker.proto."""
