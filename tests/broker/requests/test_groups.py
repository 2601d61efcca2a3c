"""Groups over gRPC: their offsets, and whose are written when a membership changes in the middle."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from broker.groups.membership import Lapsed
from broker.replica.metadata import Metadata
from kafkalog.errors import (
    GroupBusy,
    GroupIsLive,
    GroupIsSubscribed,
    InvalidRequest,
    MemberFenced,
    NotOwner,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.zk import groups, members, paths
from kafkalog.zk.members import SESSION_TIMEOUT_MS
from kafkalog.zk.session import ZooKeeperSession
from tests.between import amid
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.requests.group_calls import claim, committed, join, keep, kept, leave, me, refused

ONE = bpb.GroupMember(member="one", subscription="topic t", host="here", process="1")


def session_of(broker: RunningBroker) -> ZooKeeperSession:
    return broker.broker.host.metadata.session


# --- streams


def test_a_member_that_lapsed_in_the_middle_leaves_alone_what_its_successor_wrote(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    epoch = broker.stub.KeepMember(kept("one"), timeout=30).epoch
    renew = members.renew

    def and_then_stand_still(session: ZooKeeperSession, *given: Any) -> None:
        monkeypatch.setattr(members, "renew", renew)
        renew(session, *given)
        [lease] = members.read_leases(session, [("g", "one")])
        assert lease is not None
        looked_after = broker.broker.rpc_service._groups
        epoch = looked_after.states.read("g").seats["one"].epoch
        assert looked_after.lapse("g", {"one": Lapsed(epoch, lease.version)})
        assert keep(broker, "two", 2000, 1) == "two"

    monkeypatch.setattr(members, "renew", and_then_stand_still)
    assert isinstance(refused(broker.stub.KeepMember, kept("one", 100, 2, epoch)), UnknownMember)
    assert committed(broker) == [2000]


def test_an_attempt_of_before_leaves_alone_what_a_later_one_of_the_member_wrote(broker: RunningBroker) -> None:
    broker.new_topic("t")
    for offset, order in ((1, 1), (30, 3), (2, 2)):
        assert keep(broker, "one", offset, order) == "one"
    assert committed(broker) == [30]
    assert keep(broker, "one", 4, 4) == "one"  # the stream may have gone back
    assert committed(broker) == [4]


def test_an_attempt_that_a_later_one_overtakes_in_the_middle_leaves_it_alone(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    assert keep(broker, "one", 1, 1) == "one"
    renew = members.renew

    def and_then_stand_still(session: ZooKeeperSession, *given: Any) -> None:
        monkeypatch.setattr(members, "renew", renew)
        renew(session, *given)
        assert keep(broker, "one", 30, 3) == "one"

    monkeypatch.setattr(members, "renew", and_then_stand_still)
    assert keep(broker, "one", 2, 2) == "one"
    assert committed(broker) == [30]


def test_the_first_offsets_of_a_successor_are_written_whatever_their_order(broker: RunningBroker) -> None:
    broker.new_topic("t")
    keep(broker, "one", 30, 99)
    leave(broker, "one")
    assert keep(broker, "one", 5, 1) == "one"
    assert committed(broker) == [5]


def overtake(monkeypatch: pytest.MonkeyPatch, broker: RunningBroker, always: bool) -> None:
    """Have the group change before the offsets are written, in the first attempt or in each."""
    commit, session = groups.commit_offsets, session_of(broker)

    def after_another_joins(*given: Any, **named: Any) -> None:
        if not always:
            monkeypatch.setattr(groups, "commit_offsets", commit)
        session.set(paths.group("g"), session.get(paths.group("g"))[0])
        commit(*given, **named)

    monkeypatch.setattr(groups, "commit_offsets", after_another_joins)


def test_an_attempt_in_which_the_group_changes_every_time_is_an_error(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    monkeypatch.setattr("broker.groups.states._PAUSE_SECONDS", 0.0)
    epoch = broker.stub.KeepMember(kept("one"), timeout=30).epoch
    overtake(monkeypatch, broker, always=True)
    error = refused(broker.stub.KeepMember, kept("one", 1, epoch=epoch))
    assert isinstance(error, GroupBusy)
    assert error.retriable
    assert committed(broker) == []


def test_an_attempt_in_which_the_group_changes_once_is_made_again(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    overtake(monkeypatch, broker, always=False)
    assert keep(broker, "one", 4) == "one"
    assert committed(broker) == [4]


# --- commits


def commit(offset: int = 5, partition: int = 0, claim: int = 0, **given: Any) -> bpb.CommitOffsetsRequest:
    wanted = bpb.GroupOffset(topic="t", partition=partition, offset=offset, claim=claim)
    return bpb.CommitOffsetsRequest(group="g", offsets=[wanted], **given)


def test_a_member_commits_what_it_owns(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    call = broker.stub.CommitOffsets
    for offset, order in ((7, 2), (3, 1)):  # the second one is executed late
        call(commit(offset, claim=mine.claim, member=me(broker, "one"), order=order), timeout=30)
    assert committed(broker) == [7]
    for given in (
        {"claim": mine.claim, "partition": 1},
        {"claim": mine.claim + 1},
        {"claim": -1},
        {"claim": 0},
        {"claim": (1 << 63) - 1},
    ):
        error = refused(call, commit(9, member=me(broker, "one"), **given))
        assert isinstance(error, NotOwner), given
    assert isinstance(
        refused(call, commit(9, claim=mine.claim, member=bpb.Membership(group="g", member="one", epoch=1))),
        MemberFenced,
    )
    assert isinstance(refused(call, commit(9, claim=mine.claim, member=me(broker, "two"))), UnknownMember)
    error = refused(call, commit(9))
    assert isinstance(error, GroupIsSubscribed) and error.facts["owner"] == "one"
    assert committed(broker) == [7]


def test_a_commit_in_the_name_of_a_member_of_another_group_is_refused(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    request = commit(9, claim=mine.claim, member=bpb.Membership(group="h", member="one"))
    assert isinstance(refused(broker.stub.CommitOffsets, request), InvalidRequest)
    assert committed(broker) == []


def test_a_commit_of_a_reader_that_is_no_member_stands_in_the_way_of_no_member(broker: RunningBroker) -> None:
    broker.new_topic("t")
    broker.stub.CommitOffsets(commit(5, claim=(1 << 63) - 1, order=(1 << 63) - 1), timeout=30)
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    broker.stub.CommitOffsets(commit(9, claim=mine.claim, member=me(broker, "one"), order=1), timeout=30)
    assert committed(broker) == [9]


def test_a_late_commit_of_a_reader_that_is_no_member_changes_nothing_after_its_later_one(broker: RunningBroker) -> None:
    broker.new_topic("t")

    def write(offset: int, **place: Any) -> list[int]:
        request = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=offset)], **place)
        broker.stub.CommitOffsets(request, timeout=30)
        return committed(broker)

    assert write(9, writer=7, order=2) == [9]
    assert write(5, writer=7, order=1) == [9]
    assert write(5, writer=7, order=3) == [5], "the reader may have gone back"
    assert write(4, writer=3, order=1) == [4], "another reader"
    assert write(8) == [8], "an operator"
    assert write(6, writer=3, order=2) == [6]
    request = bpb.CommitOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=1)], writer=-1)
    assert "writer -1 is negative" in str(refused(broker.stub.CommitOffsets, request))


def test_readers_with_and_without_a_membership_follow_each_other(broker: RunningBroker) -> None:
    broker.new_topic("t")
    [at] = [bpb.GroupOffset(topic="t", offset=9)]
    broker.stub.CommitOffsets(bpb.CommitOffsetsRequest(group="g", offsets=[at], writer=1 << 62, order=5), timeout=30)
    keep(broker, "one", 4, 1)
    assert committed(broker) == [4]
    leave(broker, "one")
    broker.stub.CommitOffsets(bpb.CommitOffsetsRequest(group="g", offsets=[at], writer=1, order=1), timeout=30)
    assert committed(broker) == [9]


def test_a_reset_that_a_member_comes_into_says_how_much_is_written(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = start_broker(0), start_broker(1)
    broker.new_topic("t", partitions=3)
    offsets = [bpb.GroupOffset(topic="t", partition=number, offset=5) for number in range(3)]
    broker.stub.CommitOffsets(bpb.CommitOffsetsRequest(group="g", offsets=offsets), timeout=30)
    for offset in offsets:
        offset.offset = 2
    monkeypatch.setattr(groups, "MULTI_MAX", 3)  # two of them are checks of the group
    amid(monkeypatch, groups, "_write", lambda: join(other, "one", "t"))
    error = refused(broker.stub.ResetOffsets, bpb.ResetOffsetsRequest(group="g", offsets=offsets))
    assert isinstance(error, GroupIsLive)
    assert "It came during the reset: 1 of the 3 offsets are as wanted" in str(error)
    assert committed(broker) == [2, 5, 5]


def test_a_commit_to_what_is_not_there_is_refused(broker: RunningBroker) -> None:
    broker.new_topic("t")
    call = broker.stub.CommitOffsets
    offset = bpb.GroupOffset(topic="t", offset=5)
    for wanted, kind in (
        (bpb.GroupOffset(topic="nothing", offset=5), UnknownTopic),
        (bpb.GroupOffset(topic="t", offset=5, topic_id=b"x" * 16), UnknownTopicId),
        (bpb.GroupOffset(topic="t", partition=1, offset=5), UnknownPartition),
        (bpb.GroupOffset(topic="t", offset=-1), InvalidRequest),
    ):
        request = bpb.CommitOffsetsRequest(group="g", offsets=[offset, wanted])
        assert isinstance(refused(call, request), kind)
    call(bpb.CommitOffsetsRequest(group="g"), timeout=30)
    assert committed(broker) == []
    assert not broker.stub.ListGroups(bpb.ListGroupsRequest()).groups


# --- a broker that was stopped, and has not read again what topics there are


def test_a_broker_that_has_not_heard_of_a_topic_answers_for_its_offsets(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    topic = broker.broker.host.metadata.topic("t")
    request = commit(5, claim=mine.claim, member=me(broker, "one"), order=1)
    request.offsets[0].topic_id = topic.topic_id
    release = bpb.ReleasePartitionsRequest(member=me(broker, "one"), order=2)
    release.claims.add(topic="t", claim=mine.claim, offset=7, topic_id=topic.topic_id)
    try:
        for known in ({}, {"t": replace(topic, topic_id=b"of an earlier t.")}):
            broker.broker.host.metadata.publish(known)
            broker.stub.CommitOffsets(request, timeout=30)
            assert committed(broker) == [5]
            [described] = broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="g"), timeout=30).offsets
            assert described.offset == 5
        broker.stub.ReleasePartitions(release, timeout=30)
        assert committed(broker) == [7]
    finally:
        broker.broker.host.metadata.publish({"t": topic})


def test_offsets_of_a_topic_made_anew_are_not_those_of_the_one_that_a_broker_knows(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    broker.stub.CommitOffsets(commit(5), timeout=30)
    topic = broker.broker.host.metadata.topic("t")
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=30)
    broker.new_topic("t")
    monkeypatch.setattr(Metadata, "topics", {"t": topic})
    assert committed(broker) == []


def test_a_topic_that_cannot_be_read_hides_no_offset(broker: RunningBroker) -> None:
    for name in "ut":
        broker.new_topic(name)
        offset = bpb.GroupOffset(topic=name, offset=5)
        broker.stub.CommitOffsets(bpb.CommitOffsetsRequest(group="g", offsets=[offset]), timeout=30)
    session_of(broker).set(paths.topic("u"), b"no JSON")
    reply = broker.stub.CommittedOffsets(bpb.CommittedOffsetsRequest(group="g"), timeout=30)
    assert [(each.topic, each.offset) for each in reply.offsets] == [("t", 5), ("u", 5)]
    join(broker, "one", pattern="[tu]")


# --- groups


def test_a_refused_reset_says_who_is_live_and_for_how_long(broker: RunningBroker) -> None:
    broker.new_topic("t")
    keep(broker, "one", 5)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    error = refused(broker.stub.ResetOffsets, request)
    assert isinstance(error, GroupIsLive)
    left_ms = error.facts.pop("left_ms")
    assert 0 < left_ms <= SESSION_TIMEOUT_MS
    assert "kafkalog groups reset --wait" in error.facts.pop("hint")
    assert error.facts == {"group": "g", "member": "one", "host": "here"}
    assert committed(broker) == [5]


def test_a_refused_reset_says_when_the_last_of_the_members_will_be_gone(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t", session_timeout_ms=5_000)
    join(broker, "two", "t", session_timeout_ms=3_000_000)
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=0)])
    error = refused(broker.stub.ResetOffsets, request)
    assert isinstance(error, GroupIsLive)
    assert error.facts["member"] == "one" and 5_000 < error.facts["left_ms"] <= 3_000_000


def test_a_reset_that_names_a_claim_stands_in_the_way_of_no_owner(broker: RunningBroker) -> None:
    broker.new_topic("t")
    offset = bpb.GroupOffset(topic="t", offset=7, claim=1 << 62)
    broker.stub.ResetOffsets(bpb.ResetOffsetsRequest(group="g", offsets=[offset], create=True), timeout=30)
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    broker.stub.CommitOffsets(commit(9, claim=mine.claim, member=me(broker, "one"), order=1), timeout=30)
    assert committed(broker) == [9]


def test_a_reset_by_force_is_refused_only_while_consumers_share_the_partitions(broker: RunningBroker) -> None:
    broker.new_topic("t")
    request = bpb.ResetOffsetsRequest(group="g", offsets=[bpb.GroupOffset(topic="t", offset=9)], force=True)
    keep(broker, "one", 5)
    broker.stub.ResetOffsets(request, timeout=30)
    assert committed(broker) == [9]
    leave(broker, "one")
    join(broker, "one", "t")
    assert isinstance(refused(broker.stub.ResetOffsets, request), GroupIsLive)
    leave(broker, "one")
    request.force = False
    broker.stub.ResetOffsets(request, timeout=30)


def test_what_a_member_tells_of_itself_is_described_and_cut_where_it_is_too_long(broker: RunningBroker) -> None:
    broker.new_topic("t")
    told = bpb.GroupMember(member="one", subscription="s" * 5000, host="h" * 5000, process="p" * 5000)
    first = broker.stub.KeepMember(bpb.KeepMemberRequest(group="g", member=told), timeout=30).first
    assert (first.subscription, first.host, first.process) == ("s" * 256, "h" * 256, "p" * 256)
    assert abs(first.since_us / 1e6 - time.time()) < 3600
    assert 0 < first.lease_left_ms <= SESSION_TIMEOUT_MS


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
    leave(broker, "one")
    delete = groups.delete

    def after_one_comes(session: ZooKeeperSession, group: str) -> None:
        monkeypatch.setattr(groups, "delete", delete)
        assert keep(broker, "two", 6) == "two"
        delete(session, group)

    monkeypatch.setattr(groups, "delete", after_one_comes)
    error = refused(broker.stub.DeleteGroup, bpb.DeleteGroupRequest(group="g"))
    assert isinstance(error, GroupIsLive) and error.facts["member"] == "two"
    assert committed(broker) == [6]
    leave(broker, "two")
    broker.stub.DeleteGroup(bpb.DeleteGroupRequest(group="g"), timeout=30)
    assert not broker.stub.ListGroups(bpb.ListGroupsRequest()).groups


def test_a_group_is_described_with_its_members_shares_and_owners(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=4)
    join(broker, "one", "t", client_id="mine", host="here", process="7", subscription="topic t", instance_id="one")
    [first, *_] = claim(broker, "one", 1, 0, 1, 2, 3).claims
    join(broker, "two", pattern="t.*", session_timeout_ms=9_000)
    offset = bpb.GroupOffset(topic="t", offset=3, claim=first.claim)
    broker.stub.CommitOffsets(
        bpb.CommitOffsetsRequest(group="g", offsets=[offset], member=me(broker, "one")), timeout=30
    )
    found = broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="g"), timeout=30)
    assert (found.generation, found.kind, found.assignor) == (2, "consumer", "sticky")
    one, two = found.members
    assert (one.member, one.client_id, one.host, one.process) == ("one", "mine", "here", "7")
    assert (one.subscription, one.instance_id, list(one.topics)) == ("topic t", "one", ["t"])
    assert (two.pattern, two.session_timeout_ms) == ("t.*", 9_000)
    assert 0 < two.lease_left_ms <= 9_000
    shares = [sorted(number for each in member.share for number in each.partitions) for member in (one, two)]
    assert sorted(shares[0] + shares[1]) == [0, 1, 2, 3] and len(shares[0]) == 2
    owned = [sorted(number for each in member.owned for number in each.partitions) for member in (one, two)]
    assert owned == [[0, 1, 2, 3], []]  # two waits
    assert [(each.partition, each.offset) for each in found.offsets] == [(0, 3)]
    listed = broker.stub.ListGroups(bpb.ListGroupsRequest(), timeout=30).groups
    assert [(each.group, each.live_members, each.kind) for each in listed] == [("g", 2, "consumer")]


def test_a_group_that_cannot_be_read_is_listed_and_hides_no_other(broker: RunningBroker) -> None:
    broker.new_topic("t")
    keep(broker, "one", 5)
    session_of(broker).create(paths.group("bad"), b"{")
    listed = broker.stub.ListGroups(bpb.ListGroupsRequest(), timeout=30).groups
    assert [(each.group, each.live_members) for each in listed] == [("bad", 0), ("g", 1)]
