"""Framing of the data port. Pure: bytes in, bytes out; no sockets.

A connection starts with a hello each way, client first: 4 bytes `KLOG`, u16 version, u16 zero. A server that does not
speak that version answers with its own and closes. Then frames, each way, little-endian:

    u32 header_length   of a kafkalog.wire.RequestHeader or ReplyHeader
    u32 body_length
    header_length bytes
    body_length bytes   record batches

Requests of one connection may be sent without waiting; replies come in the order of the requests (an append with
acks=0 has none).
"""

from __future__ import annotations

import struct

from kafkalog.errors import KafkalogError, ProtocolError, from_wire
from kafkalog.wire import dataport_pb2 as pb

HELLO = struct.Struct("<4sHH")
HELLO_SIZE = 8
assert HELLO.size == HELLO_SIZE
HELLO_MAGIC = b"KLOG"
VERSION = 1

PREFIX = struct.Struct("<II")
PREFIX_SIZE = 8
assert PREFIX.size == PREFIX_SIZE
HEADER_LENGTH_MAX = 1 << 20
"""A frame header (not body) larger than this is refused: 1 MiB is over 30,000 partitions in one request."""


def hello(version: int = VERSION) -> bytes:
    return HELLO.pack(HELLO_MAGIC, version, 0)


def check_hello(data: bytes, address: str) -> int:
    """The peer's version. Raises ProtocolError if it is not a kafkalog data port, or has another version."""
    magic: bytes
    version: int
    magic, version, _ = HELLO.unpack(data)
    if magic != HELLO_MAGIC:
        raise ProtocolError(address=address, reason="this is not a kafkalog data port (is it the gRPC port?)")
    if version != VERSION:
        raise ProtocolError(address=address, reason=f"it speaks data port version {version}, this side {VERSION}")
    return version


def frame_start(header: bytes, body_length: int) -> bytes:
    """Prefix and header, to be followed by the body."""
    return PREFIX.pack(len(header), body_length) + header


def error_to_wire(error: KafkalogError) -> pb.Error:
    code, facts = error.to_wire()
    return pb.Error(code=code, facts=facts)


def error_from_wire(error: pb.Error) -> KafkalogError:
    return from_wire(error.code, error.facts)
