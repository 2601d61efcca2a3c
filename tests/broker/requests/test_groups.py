"""Members and offsets of groups over gRPC: whose offsets are written when a membership changes in the middle."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from broker.transport import rpc
from kafkalog.errors import GroupIsLive, KafkalogError, MembershipMoved
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk import members, paths
from kafkalog.zk.members import LEASE_MS, Member
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import RunningBroker

ONE = bpb.GroupMember(member="one", subscription="topic t", host="here", process="1")


def keep(broker: RunningBroker, name: str, offset: int) -> str:
    """Renew a member that has come to an offset; the group's first."""
    request = bpb.KeepMemberRequest(
        group="g",
        member=bpb.GroupMember(member=name, subscription="topic t", host="here", process="1"),
        offsets=[bpb.GroupOffset(topic="t", offset=offset)],
    )
    return str(broker.stub.KeepMember(request, timeout=30).first.member)


def committed(broker: RunningBroker) -> list[int]:
    reply = broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group="g"), timeout=30)
    return [each.offset for each in reply.offsets]


def refused(call: Any, request: Any) -> KafkalogError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    return error_from_wire(pb.Error.FromString(dict(caught.value.trailing_metadata())[rpc.ERROR_KEY]))


def test_a_member_that_lapsed_in_the_middle_leaves_alone_what_its_successor_wrote(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    assert keep(broker, "one", 5) == "one"
    found = members.keep

    def and_then_stand_still(session: ZooKeeperSession, group: str, member: Member) -> list[Member]:
        monkeypatch.setattr(members, "keep", found)
        live = found(session, group, member)
        session.delete(paths.group_member(group, "one"))  # as for a lease that is over
        assert keep(broker, "two", 2000) == "two"
        return live

    monkeypatch.setattr(members, "keep", and_then_stand_still)
    assert keep(broker, "one", 100) == "two"
    assert committed(broker) == [2000]


def test_an_attempt_of_before_leaves_alone_what_a_later_one_of_the_member_wrote(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    found = members.keep

    def and_then_stand_still(session: ZooKeeperSession, group: str, member: Member) -> list[Member]:
        live = found(session, group, member)
        found(session, group, member)
        return live

    monkeypatch.setattr(members, "keep", and_then_stand_still)
    request = bpb.KeepMemberRequest(group="g", member=ONE, offsets=[bpb.GroupOffset(topic="t", offset=1)])
    error = refused(broker.stub.KeepMember, request)
    assert isinstance(error, MembershipMoved)
    assert error.retriable
    assert committed(broker) == []


def test_a_refused_reset_says_who_is_live_and_for_how_long(broker: RunningBroker) -> None:
    broker.new_topic("t")
    keep(broker, "one", 5)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    error = refused(broker.stub.ResetOffsets, request)
    assert isinstance(error, GroupIsLive)
    left_ms = error.facts.pop("left_ms")
    assert 0 < left_ms <= LEASE_MS
    assert error.facts == {"group": "g", "member": "one", "host": "here"}
    assert committed(broker) == [5]


def test_a_refused_reset_says_when_the_last_of_the_members_will_be_gone(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    keep(broker, "one", 5)
    [one] = members.live_members(broker.broker.catalog.session, "g")
    both = [one._replace(left_ms=10), one._replace(name="two", left_ms=LEASE_MS + 1)]
    monkeypatch.setattr(members, "live_members", lambda *_: both)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    error = refused(broker.stub.ResetOffsets, request)
    assert (error.facts["member"], error.facts["left_ms"]) == ("one", LEASE_MS + 1)
