"""The gRPC service as its descriptor tells it: a client needs no code that gRPC's compiler makes."""

from __future__ import annotations

from typing import Any, cast

from kafkalog.wire import broker_pb2, dataport_pb2, transactions_pb2
from kafkalog.wire.service import METHODS, SERVICE


class Channel:
    """Keeps what a method is called with, in bytes, and answers."""

    def __init__(self, answer: bytes) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self._answer = answer

    def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Any:
        def call(request: object) -> object:
            self.sent.append((path, request_serializer(request)))
            return response_deserializer(self._answer)

        return call


def test_every_method_of_the_proto_has_its_path_and_its_messages_in_order() -> None:
    described = broker_pb2.DESCRIPTOR.services_by_name["Broker"].methods
    assert SERVICE == "kafkalog.wire.Broker"
    assert list(METHODS) == [method.name for method in described]
    for method in described:
        found = METHODS[method.name]
        assert found.path == f"/kafkalog.wire.Broker/{method.name}"
        assert found.request.DESCRIPTOR is method.input_type
        assert found.reply.DESCRIPTOR is method.output_type


def test_messages_are_those_of_the_file_that_describes_them() -> None:
    """The service is in one file, and calls with messages of others."""
    assert METHODS["DescribeCluster"].request is broker_pb2.DescribeClusterRequest
    files = {message.DESCRIPTOR.file.name for method in METHODS.values() for message in (method.request, method.reply)}
    modules = (broker_pb2, dataport_pb2, transactions_pb2)
    assert files <= {module.DESCRIPTOR.name for module in modules}
    assert len(files) > 1


def test_a_call_takes_the_request_and_gives_the_reply_of_its_method() -> None:
    reply = broker_pb2.ClusterDescription(cluster_id="c")
    channel = Channel(reply.SerializeToString())
    call = METHODS["DescribeCluster"].on(cast(Any, channel))
    assert call(broker_pb2.DescribeClusterRequest()) == reply
    assert channel.sent == [("/kafkalog.wire.Broker/DescribeCluster", b"")]
