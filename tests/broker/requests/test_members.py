"""Members of groups over gRPC: what each method answers, and what it refuses."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest

from broker.groups import claims, waits
from broker.replica.metadata import Metadata
from broker.transport.lanes import LANES
from kafkalog.errors import (
    AssignorDiffers,
    GroupKindDiffers,
    InvalidRequest,
    KafkalogError,
    MemberFenced,
    StaleGeneration,
    UnknownMember,
    UnknownTopic,
)
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.zk import groups, members
from kafkalog.zk.groups import Offset
from kafkalog.zk.members import Member
from tests.between import amid
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.requests.group_calls import (
    claim,
    committed,
    epoch_of,
    join,
    joining,
    keep,
    kept,
    leave,
    listed,
    me,
    refused,
    share,
)
from tests.waiting import waited_for


def member_of(broker: RunningBroker, name: str) -> Member:
    return members.read_members(broker.broker.host.metadata.session, "g", [name])[name]


def timeout_of(broker: RunningBroker, name: str) -> int:
    [lease] = members.read_leases(broker.broker.host.metadata.session, [("g", name)])
    assert lease is not None
    return lease.session_timeout_ms


def members_there(broker: RunningBroker) -> list[str]:
    described = broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="g"), timeout=30)
    return [member.member for member in described.members]


def owners(broker: RunningBroker) -> dict[TopicPartition, str]:
    state = members.read_state(broker.broker.host.metadata.session, "g")
    assert state is not None
    return dict(state.owners)


# --- JoinGroup


def test_a_member_joins_and_is_told_its_share(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t", partitions=3)
    broker.new_topic("u")
    reply = join(broker, "one", "u", "t", host="h", process="1", client_id="c", subscription="s")
    assert reply.news.generation == 1 and reply.epoch == epoch_of(broker, "one") and not reply.news.claims
    assert listed(reply.news.share) == [("t", 0), ("t", 1), ("t", 2), ("u", 0)]
    assert {each.topic: each.topic_id for each in reply.news.topics}["t"] == topic_id
    found = member_of(broker, "one")
    assert (found.topics, found.pattern, found.host, found.process) == (("t", "u"), "", "h", "1")
    assert (found.client_id, found.subscription, found.session_timeout_ms) == ("c", "s", 30_000)
    reply = join(broker, "two", pattern="t|nothing")
    assert reply.news.generation == 2
    assert {topic for topic, _ in listed(reply.news.share)} == {"t"}
    assert [each.topic for each in reply.news.topics] == ["t"]


def test_who_replaces_a_member_gets_its_share_and_none_of_its_claims(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t", instance_id="one")
    claim(broker, "one", 1, 0, 1)
    old = me(broker, "one")
    reply = join(broker, "one", "t", instance_id="one")
    assert (reply.news.generation, len(listed(reply.news.share))) == (1, 2)
    assert reply.epoch > old.epoch and not reply.news.claims
    assert owners(broker) == {}
    request = bpb.RenewMemberRequest(member=old, session_timeout_ms=9_000)
    assert isinstance(refused(broker.stub.RenewMember, request), MemberFenced)


def test_a_request_that_names_more_partitions_than_a_group_can_have_is_refused(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    many = [bpb.GroupShare(topic="t", partitions=[0] * 100_001)]
    for call, request in (
        (broker.stub.AwaitGroup, bpb.AwaitGroupRequest(member=me(broker, "one"), partitions=many)),
        (broker.stub.ClaimPartitions, bpb.ClaimPartitionsRequest(member=me(broker, "one"), partitions=many)),
    ):
        error = refused(call, request)
        assert isinstance(error, InvalidRequest) and "more than 100000 partitions" in str(error)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"assignor": "mine"}, "there is no assignor 'mine', only sticky, range, roundrobin"),
        ({"assignor": ""}, "there is no assignor ''"),
        ({"pattern": "t.*"}, "either to topics or to a pattern"),
        ({"topics": []}, "either to topics or to a pattern"),
        ({"topics": [], "pattern": "t["}, "'t\\[' is not a regular expression as RE2 knows them .*: missing ]"),
        ({"topics": [], "pattern": "a" * 4097}, "the pattern is longer than 4096 characters"),
        ({"topics": [f"t{number}" for number in range(1001)]}, "more than 1000 topics"),
        ({"topics": [f"{number:0249}" for number in range(264)]}, "have 65736 characters together, more than 65536"),
        ({"instance_id": "x" * 250}, "is not a static member name"),
        ({"instance_id": "a/b"}, "'a/b' is not a static member name"),
        ({"topics": ["a/b"]}, "'a/b' is not a topic name"),
        ({"session_timeout_ms": 0}, "the session timeout must be from 1 to 3600000 ms"),
        ({"session_timeout_ms": 3_600_001}, "the session timeout must be from 1 to 3600000 ms"),
        ({"member": "../x"}, "'../x' is not a member name"),
        ({"group": "."}, "'.' is not a group name"),
    ],
)
def test_a_member_that_makes_no_sense_is_refused(broker: RunningBroker, given: dict[str, Any], reason: str) -> None:
    wanted: dict[str, Any] = {
        "member": "one",
        "topics": ["t"],
        "session_timeout_ms": 10_000,
        "assignor": "sticky",
        "group": "g",
    }
    wanted |= given
    group, assignor = wanted.pop("group"), wanted.pop("assignor")
    request = bpb.JoinGroupRequest(group=group, member=bpb.GroupMember(**wanted), assignor=assignor)
    error = refused(broker.stub.JoinGroup, request)
    assert isinstance(error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=reason):
        raise error
    assert groups.group_names(broker.broker.host.metadata.session) == []


def test_a_member_of_another_kind_or_assignor_is_refused(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t", assignor="range")
    assert isinstance(refused(broker.stub.JoinGroup, joining("two", "t")), AssignorDiffers)
    assert isinstance(refused(broker.stub.KeepMember, kept("two")), GroupKindDiffers)
    leave(broker, "one")
    keep(broker, "two")
    assert isinstance(refused(broker.stub.JoinGroup, joining("one", "t")), GroupKindDiffers)


# --- RenewMember


def test_a_lease_is_renewed_for_as_long_as_the_member_wants(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    request = bpb.RenewMemberRequest(member=me(broker, "one"), session_timeout_ms=45_000)
    assert broker.stub.RenewMember(request, timeout=30).generation == 1
    assert timeout_of(broker, "one") == 45_000
    join(broker, "two", "t")
    assert broker.stub.RenewMember(request, timeout=30).generation == 2
    for timeout_ms in (0, 3_600_001, (1 << 32) - 1):
        wrong = bpb.RenewMemberRequest(member=me(broker, "one"), session_timeout_ms=timeout_ms)
        assert isinstance(refused(broker.stub.RenewMember, wrong), InvalidRequest)
    assert timeout_of(broker, "one") == 45_000


def test_a_static_member_that_left_renews_nothing(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t", instance_id="one")
    left = me(broker, "one")
    leave(broker, "one", left.epoch)
    request = bpb.RenewMemberRequest(member=left, session_timeout_ms=45_000)
    assert isinstance(refused(broker.stub.RenewMember, request), UnknownMember)


def test_a_member_that_was_removed_and_is_still_known_to_the_broker_renews_nothing(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    states, removed = broker.broker.rpc_service._groups.states, me(broker, "one")
    known = states.read("g")
    leave(broker, "one")
    monkeypatch.setattr(states, "read", lambda group: known)  # it has not heard of it yet
    request = bpb.RenewMemberRequest(member=removed, session_timeout_ms=45_000)
    assert isinstance(refused(broker.stub.RenewMember, request), UnknownMember)


def test_what_a_member_says_of_itself_is_cut(broker: RunningBroker) -> None:
    """ZooKeeper keeps it in memory, and so does the broker."""
    told = dict.fromkeys(("host", "process", "client_id", "subscription"), "x" * 100_000)
    join(broker, "one", "t", **told)
    found = member_of(broker, "one")
    assert {getattr(found, name) for name in told} == {"x" * 256}


# --- every request of a member


def requests_of(member: bpb.Membership) -> list[tuple[str, Any]]:
    one = share("t", 0)
    return [
        ("RenewMember", bpb.RenewMemberRequest(member=member, session_timeout_ms=1_000)),
        ("AwaitGroup", bpb.AwaitGroupRequest(member=member, generation=1, max_wait_ms=60_000)),
        ("ClaimPartitions", bpb.ClaimPartitionsRequest(member=member, generation=1, partitions=one)),
        ("ReleasePartitions", bpb.ReleasePartitionsRequest(member=member, claims=[bpb.GroupClaim(topic="t", claim=1)])),
    ]


@pytest.mark.parametrize(
    ("group", "name", "epoch", "kind"),
    [
        ("g", "nobody", 1, UnknownMember),
        ("none", "one", 1, UnknownMember),
        ("g", "one", 0, MemberFenced),
        ("g", "one", 1, MemberFenced),
        ("g", "one", (1 << 63) - 1, MemberFenced),
        ("g", "one", -1, InvalidRequest),
        ("g", "../one", 1, InvalidRequest),
        ("g/ids", "one", 1, InvalidRequest),
        ("", "", 0, InvalidRequest),
    ],
)
def test_who_is_no_member_in_that_epoch_is_refused(
    broker: RunningBroker, group: str, name: str, epoch: int, kind: type[KafkalogError]
) -> None:
    broker.new_topic("t")
    join(broker, "one", "t", instance_id="one")
    claim(broker, "one", 1, 0)
    for method, request in requests_of(bpb.Membership(group=group, member=name, epoch=epoch)):
        error = refused(getattr(broker.stub, method), request)
        assert isinstance(error, kind), (method, error)
    assert set(owners(broker).values()) == {"one"}
    assert timeout_of(broker, "one") == 30_000


def test_a_member_of_which_the_broker_does_not_know_yet_is_not_refused(broker: RunningBroker) -> None:
    """It has joined at another one a moment ago."""
    broker.new_topic("t")
    join(broker, "one", "t")
    states = broker.broker.rpc_service._groups.states
    for method, request in requests_of(me(broker, "one")):
        states.read("g")
        states._groups["g"].state = replace(states.read("g"), version=0, generation=0, number=0, seats={})
        if method == "AwaitGroup":
            request.generation = 0
        getattr(broker.stub, method)(request, timeout=30)


# --- ClaimPartitions and ReleasePartitions


def test_claims_name_owners_and_the_offsets_from_which_to_go_on(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t", partitions=4)
    join(broker, "one", "t")
    read = {TopicPartition("t", 2): Offset(9, topic_id)}
    groups.commit_offsets(broker.broker.host.metadata.session, "g", read, 1)
    got = claim(broker, "one", 1, 0, 1, 2, 3)
    assert [(each.partition, each.offset if each.HasField("offset") else None) for each in got.claims] == [
        (0, None),
        (1, None),
        (2, 9),
        (3, None),
    ]
    assert len({each.claim for each in got.claims}) == 1 and not got.owners
    reply = join(broker, "two", "t")
    numbers = [number for _, number in listed(reply.news.share)]
    got = claim(broker, "two", 2, *numbers)
    assert not got.claims
    assert [(each.topic, each.partition, each.owner) for each in got.owners] == [("t", n, "one") for n in numbers]
    request = bpb.ClaimPartitionsRequest(member=me(broker, "two"), generation=1, partitions=share("t", *numbers))
    assert isinstance(refused(broker.stub.ClaimPartitions, request), StaleGeneration)
    request = bpb.ClaimPartitionsRequest(member=me(broker, "two"), generation=2, partitions=share("t", 4_000_000_000))
    assert isinstance(refused(broker.stub.ClaimPartitions, request), InvalidRequest)
    request = bpb.ClaimPartitionsRequest(member=me(broker, "two"), generation=2, partitions=share("../ids", 0))
    assert isinstance(refused(broker.stub.ClaimPartitions, request), InvalidRequest)


def released(broker: RunningBroker, *claims: bpb.GroupClaim, name: str = "one", **given: Any) -> None:
    request = bpb.ReleasePartitionsRequest(member=me(broker, name), claims=claims, **given)
    broker.stub.ReleasePartitions(request, timeout=30)


def test_a_release_commits_and_ends_the_claims_and_may_be_made_again(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t", partitions=3)
    join(broker, "one", "t")
    claims = list(claim(broker, "one", 1, 0, 1, 2).claims)
    ended = [
        bpb.GroupClaim(topic="t", partition=each.partition, claim=each.claim, offset=7, topic_id=topic_id)
        for each in claims
    ]
    ended[1].ClearField("offset")
    ended[2].topic_id = b"an old id......."
    released(broker, *ended, order=3)
    assert committed(broker) == [7]
    assert owners(broker) == {}
    ended[0].offset = 8
    released(broker, *ended, order=4)  # the claims are over
    assert committed(broker) == [7]
    [again] = claim(broker, "one", 1, 0).claims
    assert again.offset == 7
    released(broker, *ended, order=5)
    assert owners(broker)[TopicPartition("t", 0)] == "one"


def test_a_release_ends_no_claim_of_another_and_commits_nothing_to_it(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t", partitions=2)
    reply = join(broker, "one", "t")
    reply = join(broker, "two", "t")
    [(_, number)] = listed(reply.news.share)
    [theirs] = claim(broker, "two", 2, number).claims
    for wrong in (theirs.claim, -1, 0, (1 << 63) - 1):
        released(broker, bpb.GroupClaim(topic="t", partition=number, claim=wrong, offset=7, topic_id=topic_id))
    assert owners(broker)[TopicPartition("t", number)] == "two"
    assert committed(broker) == []


def test_a_release_with_a_negative_offset_is_refused(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t")
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    for offset in (-1, -5):
        ended = bpb.GroupClaim(topic="t", claim=mine.claim, offset=offset, topic_id=topic_id)
        request = bpb.ReleasePartitionsRequest(member=me(broker, "one"), claims=[ended])
        assert isinstance(refused(broker.stub.ReleasePartitions, request), InvalidRequest)
    assert committed(broker) == []


def test_a_late_release_commits_nothing_after_a_later_commit(broker: RunningBroker) -> None:
    topic_id = broker.new_topic("t")
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 0).claims
    offset = bpb.GroupOffset(topic="t", offset=9, claim=mine.claim)
    broker.stub.CommitOffsets(
        bpb.CommitOffsetsRequest(group="g", offsets=[offset], member=me(broker, "one"), order=5), timeout=30
    )
    ended = bpb.GroupClaim(topic="t", claim=mine.claim, offset=3, topic_id=topic_id)
    released(broker, ended, order=4)
    assert committed(broker) == [9]


def test_a_member_is_told_of_claims_whose_answers_were_lost(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    [mine] = claim(broker, "one", 1, 1).claims
    join(broker, "two", "t")
    news = Waiting(broker, "one", 1).news()
    assert [(each.topic, each.partition, each.claim) for each in news.claims] == [("t", 1, mine.claim)]


# --- AwaitGroup


class Waiting:
    """A call of AwaitGroup that is on its way. It is registered at the broker when the constructor returns."""

    def __init__(self, broker: RunningBroker, name: str, generation: int, *numbers: int, seconds: float = 60) -> None:
        self._broker = broker
        self.began = time.monotonic()
        request = bpb.AwaitGroupRequest(
            member=me(broker, name),
            generation=generation,
            partitions=share("t", *numbers),
            max_wait_ms=int(seconds * 1000),
        )
        before = self._waiters()
        self.call = broker.stub.AwaitGroup.future(request, timeout=120)
        waited_for(lambda: bool(self._waiters() - before) or self.call.done())

    def _waiters(self) -> set[threading.Event]:
        return set(self._broker.broker.rpc_service._groups.states._group("g").waiters)

    def news(self) -> bpb.GroupNews:
        news: bpb.GroupNews = self.call.result(30).news
        return news


def test_a_member_hears_of_the_next_generation(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    waiting = Waiting(broker, "one", 1)
    assert not waiting.call.done()
    join(broker, "two", "t")
    news = waiting.news()
    assert (news.generation, len(listed(news.share))) == (2, 1)
    assert Waiting(broker, "one", 1).news() == news  # it is over already


def test_a_member_hears_of_a_partition_that_is_released(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    held = {each.partition: each for each in claim(broker, "one", 1, 0, 1).claims}
    [(_, number)] = listed(join(broker, "two", "t").news.share)
    waiting = Waiting(broker, "two", 2, number)
    released(broker, held[1 - number])  # another one
    assert not waiting.call.done()
    released(broker, held[number])
    assert waiting.news().generation == 2
    assert [each.partition for each in claim(broker, "two", 2, number).claims] == [number]
    assert not Waiting(broker, "two", 2, number).call.done()  # it is its own


def test_a_member_hears_that_the_owner_for_which_it_waits_has_lapsed(broker: RunningBroker) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    claim(broker, "one", 1, 0, 1)
    [(_, number)] = listed(join(broker, "two", "t").news.share)
    waiting = Waiting(broker, "two", 2, number)
    leave(broker, "one")
    assert waiting.news().generation == 3


def test_a_wait_ends_with_its_time_and_without_news(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    waiting = Waiting(broker, "one", 1, seconds=0.3)
    assert waiting.news().generation == 1
    assert time.monotonic() - waiting.began >= 0.3


def test_a_member_that_is_removed_while_it_waits_is_told(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    waiting = Waiting(broker, "one", 1)
    leave(broker, "one")
    with pytest.raises(grpc.RpcError) as raised:
        waiting.news()
    assert "has no member one" in str(raised.value)


def test_a_wait_ends_when_the_broker_stops(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    waiting = Waiting(broker, "one", 1)
    broker.broker.rpc_service.stop_waiting()
    assert waiting.news().generation == 1
    assert Waiting(broker, "one", 1).news().generation == 1  # one that comes after that


def test_a_wait_whose_caller_has_gone_ends(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    waiting = Waiting(broker, "one", 1)
    waiting.call.cancel()
    waited_for(lambda: not waiting._waiters())


def test_a_wait_whose_caller_goes_just_before_it_begins_ends(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    states, cancelled = broker.broker.rpc_service._groups.states, threading.Event()
    waiting: list[Waiting] = []
    read = states.read

    def and_then_it_has_gone(group: str) -> members.GroupState:
        found = read(group)
        monkeypatch.setattr(states, "read", read)
        assert cancelled.wait(60)
        for event in waiting[0]._waiters():
            waited_for(event.is_set)
            event.clear()  # as if it had been set before the look began
        return found

    monkeypatch.setattr(states, "read", and_then_it_has_gone)
    waiting.append(Waiting(broker, "one", 1))
    waiting[0].call.cancel()
    cancelled.set()
    waited_for(lambda: not waiting[0]._waiters())


def test_news_that_come_between_the_look_and_the_wait_are_not_missed(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t", partitions=2)
    join(broker, "one", "t")
    states, wanted = broker.broker.rpc_service._groups.states, me(broker, "one")
    read = states.read

    def and_then_it_changes(group: str) -> members.GroupState:
        found = read(group)
        monkeypatch.setattr(states, "read", read)
        join(broker, "two", "t")
        return found

    monkeypatch.setattr(states, "read", and_then_it_changes)
    request = bpb.AwaitGroupRequest(member=wanted, generation=1, max_wait_ms=1000)
    assert broker.stub.AwaitGroup(request, timeout=30).news.generation == 2


def test_a_member_waits_once(broker: RunningBroker) -> None:
    """Each wait occupies a thread of the broker."""
    broker.new_topic("t")
    join(broker, "one", "t")
    join(broker, "two", "t")
    older, other = Waiting(broker, "one", 2), Waiting(broker, "two", 2)
    newer = Waiting(broker, "one", 2)
    assert older.call.result(30).retry_after_ms == waits.RETRY_AFTER_MS
    assert not newer.call.done() and not other.call.done()
    leave(broker, "two")
    assert newer.news().generation == 3
    waited_for(lambda: not broker.broker.rpc_service._group_waits._waits)


def test_members_for_which_there_is_no_room_to_wait_are_answered_at_once(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LANES["groups"].threads > waits.WAITS_MAX + 8
    monkeypatch.setattr(waits, "WAITS_MAX", 2)
    broker.new_topic("t")
    for name in ("one", "two", "three"):
        join(broker, name, "t")
    waiting = [Waiting(broker, name, 3) for name in ("one", "two")]
    late = Waiting(broker, "three", 3).call.result(30)
    assert (late.news.generation, late.retry_after_ms) == (3, waits.RETRY_AFTER_MS)
    known_late = Waiting(broker, "three", 2).call.result(30)
    assert (known_late.news.generation, known_late.retry_after_ms) == (3, 0)
    waiting.append(Waiting(broker, "one", 3))  # in the place of its older one
    waiting.pop(0).news()
    assert not any(each.call.done() for each in waiting)
    leave(broker, "three")
    assert [each.call.result(30).retry_after_ms for each in waiting] == [0, 0]


def test_news_come_through_whichever_broker(start_broker: StartBroker) -> None:
    one, two = start_broker(0), start_broker(1)
    one.new_topic("t", partitions=2)
    join(one, "one", "t")
    waiting = Waiting(two, "one", 1)
    join(one, "two", "t")
    assert waiting.news().generation == 2


# --- LeaveGroup


def test_a_member_leaves_in_its_epoch_or_whatever_it_has(broker: RunningBroker) -> None:
    broker.new_topic("t")
    for _ in range(2):
        join(broker, "one", "t", instance_id="one")
    session = broker.broker.host.metadata.session

    def is_there() -> bool:
        state = members.read_state(session, "g")
        return state is not None and "one" in state.seats

    epoch = epoch_of(broker, "one")
    for wrong in (0, epoch - 1, epoch + 1, -1):
        leave(broker, "one", wrong)
        assert is_there()
    leave(broker, "one", epoch)
    assert not is_there()
    join(broker, "one", "t", instance_id="one")
    leave(broker, "one")
    leave(broker, "one")
    leave(broker, "one", group="none")
    assert not is_there()
    assert groups.group_names(session) == ["g"]


# --- KeepMember


def test_a_stream_is_kept_and_is_no_consumer(broker: RunningBroker) -> None:
    broker.new_topic("t")
    request = kept("one", topics=["t"], pattern="(", instance_id="static", session_timeout_ms=4_000_000_000)
    assert broker.stub.KeepMember(request, timeout=30).first.member == "one"
    assert keep(broker, "one", 5) == "one"
    found = member_of(broker, "one")
    assert (found.topics, found.pattern, found.instance_id, found.session_timeout_ms) == ((), "", "", 10_000)
    assert timeout_of(broker, "one") == 10_000
    assert committed(broker) == [5]
    described = broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="g"), timeout=30)
    assert (described.kind, described.assignor, listed(described.members[0].share)) == ("stream", "", [])


def test_what_a_stream_sent_before_it_left_brings_back_neither_it_nor_its_offset(broker: RunningBroker) -> None:
    broker.new_topic("t")
    epoch = broker.stub.KeepMember(kept("one"), timeout=30).epoch
    late = kept("one", 5, 1, epoch)
    keep(broker, "one", 9, 2)
    leave(broker, "one")
    assert isinstance(refused(broker.stub.KeepMember, late), UnknownMember)
    assert committed(broker) == [9]
    assert members_there(broker) == []
    keep(broker, "one", 12, 1)  # it begins again
    assert isinstance(refused(broker.stub.KeepMember, late), MemberFenced)
    assert committed(broker) == [12]


def test_a_stream_of_which_a_topic_is_gone_stays_a_member_and_its_other_offsets_are_written(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic("t")
    request = kept("one", 5, 1, broker.stub.KeepMember(kept("one"), timeout=30).epoch)
    gone = request.offsets.add(topic="gone", offset=1)
    renewed = []
    renew = members.renew
    monkeypatch.setattr(members, "renew", lambda *given: (renewed.append(given), renew(*given)))
    assert isinstance(refused(broker.stub.KeepMember, request), UnknownTopic)
    assert (len(renewed), committed(broker)) == (1, [5])

    gone.topic, gone.topic_id = "u", broker.new_topic("u")
    late = {name: broker.broker.host.metadata.topic(name) for name in "tu"}
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="u"), timeout=30)
    request.offsets[0].offset, request.order = 6, 2
    monkeypatch.setattr(Metadata, "topic", lambda _, name: late[name])
    assert broker.stub.KeepMember(request, timeout=30).first.member == "one"
    assert committed(broker) == [6]


def test_a_stream_that_registers_commits_nothing(broker: RunningBroker) -> None:
    broker.new_topic("t")
    assert "by its epoch" in str(refused(broker.stub.KeepMember, kept("one", 5)))
    assert not broker.stub.ListGroups(bpb.ListGroupsRequest()).groups


def test_only_the_first_streams_offsets_are_written(broker: RunningBroker) -> None:
    broker.new_topic("t")
    assert keep(broker, "one", 5, 1) == "one"
    assert keep(broker, "two", 9, 1) == "one"
    assert committed(broker) == [5]
    leave(broker, "one")
    assert keep(broker, "two", 9, 2) == "two"
    assert committed(broker) == [9]


def test_a_stream_is_told_who_was_first_when_its_offsets_were_not_written_also_if_that_one_has_left(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take its position for published."""
    broker.new_topic("t")
    keep(broker, "one", 5)
    epoch = broker.stub.KeepMember(kept("two"), timeout=30).epoch
    amid(monkeypatch, claims, "commit_as_first", lambda: leave(broker, "one"))
    assert broker.stub.KeepMember(kept("two", 9, epoch=epoch), timeout=30).first.member == "one"
    assert committed(broker) == [5]
    assert keep(broker, "two", 9) == "two"
    assert committed(broker) == [9]


def test_a_stream_under_the_name_of_the_only_consumer_takes_its_place(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "one", "t")
    claim(broker, "one", 1, 0)
    old = me(broker, "one")
    assert keep(broker, "one", 5) == "one"
    assert broker.stub.DescribeGroup(bpb.DescribeGroupRequest(group="g"), timeout=30).kind == "stream"
    assert owners(broker) == {}
    request = bpb.ClaimPartitionsRequest(member=old, generation=1, partitions=share("t", 0))
    assert isinstance(refused(broker.stub.ClaimPartitions, request), MemberFenced)


# --- the monitor of a broker


def test_a_brokers_monitor_removes_who_is_silent_and_notices_new_partitions(broker: RunningBroker) -> None:
    broker.new_topic("t")
    join(broker, "silent", "t", session_timeout_ms=1)

    def shares() -> Any:
        state = members.read_state(broker.broker.host.metadata.session, "g")
        assert state is not None
        return {name: seat.share for name, seat in state.seats.items()}

    waited_for(lambda: not shares())
    join(broker, "one", "t", session_timeout_ms=3_600_000)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", partitions=3), timeout=30)
    waited_for(lambda: len(shares()["one"]) == 3)
    assert committed(broker) == [0, 0]
