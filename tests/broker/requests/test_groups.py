"""Members and offsets of groups over gRPC: whose offsets are written when a membership changes in the middle."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from broker.transport import rpc
from kafkalog.errors import GroupIsLive, InvalidRequest, KafkalogError, MembershipMoved
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
    metadata = {each.key: each.value for each in caught.value.trailing_metadata()}
    return error_from_wire(pb.Error.FromString(metadata[rpc.ERROR_KEY]))


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


def overtake(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Have a later attempt of the member come in between, in the first attempt or in each."""
    found = members.keep

    def and_stand_still(session: ZooKeeperSession, group: str, member: Member) -> list[Member]:
        if not always:
            monkeypatch.setattr(members, "keep", found)
        live = found(session, group, member)
        found(session, group, member)
        return live

    monkeypatch.setattr(members, "keep", and_stand_still)


def test_an_attempt_of_before_leaves_alone_what_a_later_one_of_the_member_wrote(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    overtake(monkeypatch, always=True)
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
    assert "kafkalog groups reset --wait" in error.facts.pop("hint")
    assert error.facts == {"group": "g", "member": "one", "host": "here"}
    assert committed(broker) == [5]


def test_a_refused_reset_says_when_the_last_of_the_members_will_be_gone(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    keep(broker, "one", 5)
    [one] = members.live_members(broker.broker.host.metadata.session, "g")
    both = [one._replace(left_ms=10), one._replace(name="two", left_ms=LEASE_MS + 1)]
    monkeypatch.setattr(members, "live_members", lambda *_: both)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    error = refused(broker.stub.ResetOffsets, request)
    assert (error.facts["member"], error.facts["left_ms"]) == ("one", LEASE_MS + 1)


def test_an_attempt_that_was_overtaken_once_is_made_again(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    overtake(monkeypatch, always=False)
    assert keep(broker, "one", 4) == "one"
    assert committed(broker) == [4]


def test_what_a_member_tells_of_itself_is_described_and_cut_where_it_is_too_long(broker: RunningBroker) -> None:
    broker.new_topic("t")
    told = bpb.GroupMember(member="one", subscription="s" * 5000, host="h" * 5000, process="p" * 5000)
    first = broker.stub.KeepMember(bpb.KeepMemberRequest(group="g", member=told), timeout=30).first
    assert (first.subscription, first.host, first.process) == ("s" * 4096, "h" * 4096, "p" * 4096)
    assert abs(first.since_us / 1e6 - time.time()) < 3600
    assert 0 < first.lease_left_ms <= LEASE_MS


def test_a_reset_against_a_member_of_no_known_host_says_so(broker: RunningBroker) -> None:
    broker.new_topic("t")
    broker.stub.KeepMember(bpb.KeepMemberRequest(group="g", member=bpb.GroupMember(member="one")), timeout=30)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    assert refused(broker.stub.ResetOffsets, request).facts["host"] == "an unknown host"


def test_a_group_is_one_with_offsets_or_with_live_members(broker: RunningBroker) -> None:
    topic = broker.new_topic("t", partitions=2)
    listing = broker.stub.ListGroups
    before_us = time.time_ns() // 1000
    offsets = [bpb.GroupOffset(topic="t", partition=1, offset=7), bpb.GroupOffset(topic="t", offset=3)]
    broker.stub.CommitOffsets(bpb.CommitOffsetsRequest(group="read", offsets=offsets), timeout=30)
    broker.stub.KeepMember(bpb.KeepMemberRequest(group="alive", member=ONE), timeout=30)
    listed = listing(bpb.ListGroupsRequest()).groups
    assert [(each.group, list(each.topics), each.live_members) for each in listed] == [
        ("alive", [], 1),
        ("read", ["t"], 0),
    ]
    described = broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="read"), timeout=30)
    assert [(each.partition, each.offset) for each in described.offsets] == [(0, 3), (1, 7)]
    assert all(before_us <= each.committed_us <= time.time_ns() // 1000 for each in described.offsets)
    broker.stub.LeaveGroup(bpb.LeaveGroupRequest(group="alive", member="one"), timeout=30)
    assert [each.group for each in listing(bpb.ListGroupsRequest()).groups] == ["read"]

    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=30)
    broker.new_topic("t")
    assert not broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="read"), timeout=30).offsets
    assert not broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group="read"), timeout=30).offsets
    old = broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group="read", any_id=True), timeout=30).offsets
    assert [(each.partition, each.offset, each.topic_id) for each in old] == [(0, 3, topic), (1, 7, topic)]


def test_an_unknown_group_gets_the_nearest_name(broker: RunningBroker) -> None:
    broker.stub.KeepMember(bpb.KeepMemberRequest(group="orders", member=ONE), timeout=30)
    for call, request in (
        (broker.stub.DescribeGroup, bpb.DescribeGroupRequest(group="order")),
        (broker.stub.ResetOffsets, bpb.ResetOffsetsRequest(group="order")),
        (broker.stub.DeleteGroup, bpb.DeleteGroupRequest(group="order")),
    ):
        assert "did you mean 'orders'" in str(refused(call, request))


def test_every_request_refuses_a_name_that_is_none(broker: RunningBroker) -> None:
    no_member = bpb.GroupMember(member="a/b")
    for call, request, what in (
        (broker.stub.CommittedOffsets, bpb.CommittedOffsetsRequest(group="a/b"), "group"),
        (broker.stub.ForgetOffsets, bpb.ForgetOffsetsRequest(group="a/b"), "group"),
        (broker.stub.DescribeGroup, bpb.DescribeGroupRequest(group="a/b"), "group"),
        (broker.stub.ResetOffsets, bpb.ResetOffsetsRequest(group="a/b"), "group"),
        (broker.stub.ResetOffsets, bpb.ResetOffsetsRequest(group="a/b", create=True), "group"),
        (broker.stub.DeleteGroup, bpb.DeleteGroupRequest(group="a/b"), "group"),
        (broker.stub.KeepMember, bpb.KeepMemberRequest(group="a/b", member=ONE), "group"),
        (broker.stub.KeepMember, bpb.KeepMemberRequest(group="g", member=no_member), "member"),
        (broker.stub.LeaveGroup, bpb.LeaveGroupRequest(group="a/b", member="one"), "group"),
        (broker.stub.LeaveGroup, bpb.LeaveGroupRequest(group="g", member="a/b"), "member"),
    ):
        error = refused(call, request)
        assert isinstance(error, InvalidRequest)
        assert f"'a/b' is not a {what} name" in str(error)


def test_a_member_that_comes_as_its_group_is_deleted_keeps_it(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    assert keep(broker, "one", 5) == "one"
    broker.stub.LeaveGroup(bpb.LeaveGroupRequest(group="g", member="one"), timeout=30)
    live_members = members.live_members

    def and_then_one_comes(session: ZooKeeperSession, group: str) -> list[Member]:
        monkeypatch.setattr(members, "live_members", live_members)
        found = live_members(session, group)
        assert found == [] and keep(broker, "two", 6) == "two"
        return found

    monkeypatch.setattr(members, "live_members", and_then_one_comes)
    error = refused(broker.stub.DeleteGroup, bpb.DeleteGroupRequest(group="g"))
    assert isinstance(error, GroupIsLive) and error.facts["member"] == "two"
    assert committed(broker) == [6]
