"""Framing of the data port. Pure: bytes in, bytes out; no sockets.

A connection starts with a hello each way, client first: 4 bytes `KLOG`, u16 newest and u16 oldest protocol version that
the side speaks. Both speak the highest common one from then on. A server that has none in common with the client sends
its hello and closes. Then frames, each way, little-endian:

    u32 header_length   of a kafkalog.wire.RequestHeader or ReplyHeader
    u32 body_length
    header_length bytes
    body_length bytes   record batches

Requests of one connection may be sent without waiting; replies come in the order of the requests (an append with
acks=0 has none).
"""

from __future__ import annotations

import struct

from kafkalog.errors import KafkalogError, NoCommonVersion, ProtocolError, from_wire
from kafkalog.versions import PROTOCOL, VersionRange
from kafkalog.wire import dataport_pb2 as pb

HELLO = struct.Struct("<4sHH")
HELLO_SIZE = 8
assert HELLO.size == HELLO_SIZE
HELLO_MAGIC = b"KLOG"
REPLICA_MAGIC = b"KREP"
"""In the hello of a broker that comes to copy: clients must not keep it out (`max.connections`)."""

PREFIX = struct.Struct("<II")
PREFIX_SIZE = 8
assert PREFIX.size == PREFIX_SIZE
HEADER_LENGTH_MAX = 1 << 20
"""A frame header (not body) larger than this is refused: 1 MiB is over 30,000 partitions in one request."""


def hello(versions: VersionRange = PROTOCOL, *, of_replica: bool = False) -> bytes:
    return HELLO.pack(REPLICA_MAGIC if of_replica else HELLO_MAGIC, versions.newest, versions.oldest)


def check_hello(data: bytes, address: str, ours: VersionRange = PROTOCOL) -> int:
    """The protocol version that both sides speak.

    Raises:
        NoCommonVersion: there is none.
        ProtocolError: the peer is not a kafkalog data port.
    """
    magic: bytes
    magic, newest, oldest = HELLO.unpack(data)
    if magic not in (HELLO_MAGIC, REPLICA_MAGIC):
        raise ProtocolError(address=address, reason="this is not a kafkalog data port (is it the gRPC port?)")
    return common_version(address, VersionRange(oldest, newest), ours)


def common_version(address: str, theirs: VersionRange, ours: VersionRange = PROTOCOL) -> int:
    """The highest protocol version that both sides speak. Raises NoCommonVersion."""
    version = theirs.highest_common(ours)
    if version is None:
        raise NoCommonVersion(address=address, theirs=str(theirs), ours=str(ours))
    return version


def frame_start(header: bytes, body_length: int) -> bytes:
    """Prefix and header, to be followed by the body."""
    return PREFIX.pack(len(header), body_length) + header


def error_to_wire(error: KafkalogError) -> pb.Error:
    code, facts = error.to_wire()
    return pb.Error(code=code, facts=facts)


def error_from_wire(error: pb.Error) -> KafkalogError:
    return from_wire(error.code, error.facts)
