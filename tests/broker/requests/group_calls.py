"""Calls of a broker about groups, as a client makes them; members of the group g, topics of at most one name each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from broker.transport import rpc
from kafkalog.errors import KafkalogError
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk import members
from tests.broker.conftest import RunningBroker


def refused(call: Any, request: Any) -> KafkalogError:
    """What a broker answers to a call that it refuses."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    return error_from_wire(pb.Error.FromString(metadata[rpc.ERROR_KEY]))


def committed(broker: RunningBroker, group: str = "g") -> list[int]:
    """The offsets of a group, by topic and partition."""
    reply = broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group=group), timeout=30)
    return [each.offset for each in reply.offsets]


def kept(
    name: str, offset: int | None = None, order: int = 0, epoch: int | None = None, **described: Any
) -> bpb.KeepMemberRequest:
    """What a Spark stream sends that has come to an offset of t-0; without an epoch it registers."""
    told = {"subscription": "topic t", "host": "here", "process": "1", **described}
    offsets = [] if offset is None else [bpb.GroupOffset(topic="t", offset=offset)]
    member = bpb.GroupMember(member=name, **told)
    return bpb.KeepMemberRequest(group="g", member=member, offsets=offsets, order=order, epoch=epoch)


def keep(broker: RunningBroker, name: str, offset: int | None = None, order: int = 0) -> str:
    """Register a Spark stream, or renew it. Returns the group's first member."""
    epoch = broker.stub.KeepMember(kept(name), timeout=30).epoch
    return str(broker.stub.KeepMember(kept(name, offset, order, epoch), timeout=30).first.member)


def leave(broker: RunningBroker, name: str, epoch: int | None = None, group: str = "g") -> None:
    broker.stub.LeaveGroup(bpb.LeaveGroupRequest(group=group, member=name, epoch=epoch), timeout=30)


def joining(name: str, *topics: str, assignor: str = "sticky", **described: Any) -> bpb.JoinGroupRequest:
    told = {"session_timeout_ms": 30_000, **described}
    return bpb.JoinGroupRequest(
        group="g", member=bpb.GroupMember(member=name, topics=topics, **told), assignor=assignor
    )


def join(broker: RunningBroker, name: str, *topics: str, **described: Any) -> bpb.JoinGroupReply:
    reply: bpb.JoinGroupReply = broker.stub.JoinGroup(joining(name, *topics, **described), timeout=30)
    return reply


def epoch_of(broker: RunningBroker, name: str) -> int:
    state = members.read_state(broker.broker.host.metadata.session, "g")
    return 0 if state is None or name not in state.seats else state.seats[name].epoch


def me(broker: RunningBroker, name: str) -> bpb.Membership:
    """A member of g, in the epoch that it has."""
    return bpb.Membership(group="g", member=name, epoch=epoch_of(broker, name))


def share(topic: str, *numbers: int) -> list[bpb.GroupShare]:
    return [bpb.GroupShare(topic=topic, partitions=numbers)]


def listed(shares: Iterable[bpb.GroupShare]) -> list[tuple[str, int]]:
    return [(each.topic, number) for each in shares for number in each.partitions]


def claim(broker: RunningBroker, name: str, generation: int, *numbers: int) -> bpb.ClaimPartitionsReply:
    request = bpb.ClaimPartitionsRequest(
        member=me(broker, name), generation=generation, partitions=share("t", *numbers)
    )
    reply: bpb.ClaimPartitionsReply = broker.stub.ClaimPartitions(request, timeout=30)
    return reply
