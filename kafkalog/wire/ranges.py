"""Ranges of versions to and from protobuf. A peer that names none has the first version."""

from __future__ import annotations

from kafkalog.versions import FIRST, VersionRange
from kafkalog.wire import broker_pb2 as pb


def versions_to_wire(versions: VersionRange) -> pb.VersionRange:
    return pb.VersionRange(oldest=versions.oldest, newest=versions.newest)


def versions_from_wire(message: pb.VersionRange) -> VersionRange:
    return VersionRange(message.oldest, message.newest) if message.newest else VersionRange(FIRST, FIRST)
