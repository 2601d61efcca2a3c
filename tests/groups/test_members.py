"""Members of a group in one process: what they do when an answer is lost, a lease ends, or others come and go."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from kafkalog.client.admin import list_offsets
from kafkalog.client.cluster import Cluster
from kafkalog.client.complaints import Complaint
from kafkalog.client.consumer import cursors, starts
from kafkalog.client.consumer import membership as membership_module
from kafkalog.client.consumer.brokers import Brokers
from kafkalog.client.consumer.callbacks import Callback
from kafkalog.client.consumer.consumer import MessageStream
from kafkalog.client.consumer.cursors import Lease
from kafkalog.client.consumer.membership import Membership
from kafkalog.errors import (
    BrokerUnreachable,
    Closed,
    InvalidArgument,
    InvalidRequest,
    MemberFenced,
    NoCommittedOffset,
    NotOwner,
    OutOfThreads,
    RequestTimedOut,
    StaleGeneration,
    UnknownMember,
)
from kafkalog.net.main_thread import Signal
from kafkalog.wire import broker_pb2 as pb
from tests.between import ahead, amid
from tests.interrupts import interrupted_at
from tests.threads import NoThreads, join_all
from tests.waiting import waited_for

Ask = Callable[..., Any]


@pytest.fixture
def tested(cluster: LocalCluster, topic: str) -> str:
    """A topic of two partitions with one record each."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=2)
    produce(cluster, topic, 0, 1)
    return topic


def produce(cluster: LocalCluster, topic: str, *partitions: int) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        for partition in partitions:
            producer.send(topic, b"", partition=partition)


def member(
    cluster: LocalCluster, topic: str, callbacks: Mapping[str, Callback] | None = None, **settings: Any
) -> Consumer:
    """A subscribed consumer, in a group that has the topic's name."""
    chosen = {"session_timeout_ms": 2000, "heartbeat_interval_ms": 200, "auto_offset_reset": "earliest"}
    consumer = Consumer(cluster.bootstrap_servers, group=topic, **chosen | settings)
    consumer.subscribe(topic, **callbacks or {})
    return consumer


def of(consumer: Consumer) -> Membership:
    """Its membership."""
    assert consumer._membership is not None
    return consumer._membership


def partitions_of(consumer: Consumer) -> list[int]:
    """Those that it reads, in the order of their numbers; asks for a record, so that it takes part."""
    consumer.poll(0)
    return sorted(partition.partition for partition in consumer.assignment())


@contextmanager
def requests(answer: Callable[[Ask, str], Any], only: Consumer | None = None) -> Iterator[None]:
    """During the `with` block members, or one of them, get their answers from a function of (ask the broker, the
    method's name)."""
    real = Brokers.ask

    def ask(brokers: Brokers, method: str, request: Any, seconds: float | None = None) -> Any:
        if only is not None and brokers is not of(only)._brokers:
            return real(brokers, method, request, seconds)
        return answer(lambda: real(brokers, method, request, seconds), method)

    with patch.object(Brokers, "ask", ask):
        yield


def lost() -> RequestTimedOut:
    return RequestTimedOut(what="a request", address="a broker", timeout_ms=0)


def noting(told: list[tuple[str, list[int]]]) -> dict[str, Callback]:
    """Callbacks that note what they are called with."""

    def note(what: str) -> Callback:
        return lambda _, partitions: told.append((what, [each.partition for each in partitions]))

    return {f"on_{what}": note(what) for what in ("assigned", "revoked", "lost")}


def offset_of(message: Message | None) -> int:
    assert message is not None
    return message.offset


# --- moves


def test_a_member_gets_back_what_another_one_had(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        with member(cluster, tested) as other:
            waited_for(lambda: len(partitions_of(one)) == 1 and len(partitions_of(other)) == 1)
        waited_for(lambda: partitions_of(one) == [0, 1])


def test_what_was_fetched_of_partitions_that_stay_is_kept_while_others_move(cluster: LocalCluster, topic: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=3)
    with member(cluster, topic) as one:
        waited_for(lambda: partitions_of(one) == [0, 1, 2])
        produce(cluster, topic, 1, 2)
        empty = MessageStream(one, TopicPartition(topic, 0))

        def is_driven() -> bool:
            """It fetches all partitions, and hands out nothing."""
            return not any(empty.messages(timeout=0.05))

        filled = {p: cursor for p, cursor in one._cursors.by_partition.items() if p.partition > 0}
        waited_for(lambda: is_driven() and all(cursor.source.arrived for cursor in filled.values()))
        arrived = {partition: cursor.source.arrived[0] for partition, cursor in filled.items()}
        with member(cluster, topic) as other:
            waited_for(lambda: is_driven() and len(one.assignment()) == 2 and len(partitions_of(other)) == 1)
            stayed = filled.keys() & set(one.assignment())
            assert stayed
            for partition in stayed:
                assert one._cursors.by_partition[partition] is filled[partition]
                assert filled[partition].source.arrived[0] is arrived[partition]


def test_a_partition_that_is_new_to_a_running_group_is_read(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one, Admin(cluster.bootstrap_servers) as admin:
        assert {message.partition for message in one.messages(max_messages=2, timeout=30)} == {0, 1}
        admin.alter_topic(tested, partitions=3)
        produce(cluster, tested, 2)
        assert {message.partition for message in one.messages(max_messages=1, timeout=30)} == {2}


def test_a_partition_that_comes_back_while_it_is_in_hand_is_read_on(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        assert len(one.consume(2, 30)) == 2
        membership = of(one)
        with member(cluster, tested):
            waited_for(lambda: len(membership._going) == 1)
        waited_for(lambda: len(membership._share) == 2 and not membership._freed)
        assert len(membership._going) == 1, "it is in hand"
        produce(cluster, tested, 0, 1)
        assert {message.partition for message in one.messages(max_messages=2, timeout=30)} == {0, 1}


def test_the_offsets_that_on_revoked_commits_are_where_the_next_member_begins(
    cluster: LocalCluster, tested: str
) -> None:
    produce(cluster, tested, 0, 1)

    def commit(reader: Consumer, partitions: list[TopicPartition]) -> None:
        reader.commit(dict.fromkeys(partitions, 1))

    with member(cluster, tested, {"on_revoked": commit}, enable_auto_commit=False) as one:
        assert len(one.consume(4, 30)) == 4
        with member(cluster, tested, enable_auto_commit=False) as other:
            waited_for(lambda: len(partitions_of(one)) == 1)
            assert [message.offset for message in other.consume(1, 30)] == [1]


def test_a_member_that_gets_no_news_looks_itself_for_what_it_waits_for(cluster: LocalCluster, tested: str) -> None:
    has_failed = threading.Event()

    def fail(ask: Ask, method: str) -> Any:
        if method == "AwaitGroup":
            has_failed.set()
            raise lost()
        return ask()

    with member(cluster, tested) as other:
        assert len(other.consume(2, 30)) == 2  # it has them in hand, so the other one has to wait
        one = member(cluster, tested)
        with one, requests(fail, one):
            waited_for(lambda: len(of(one)._waiting) == 1)
            waited_for(lambda: len(partitions_of(other)) == 1)
            waited_for(lambda: len(partitions_of(one)) == 1)
            assert has_failed.is_set()


def test_what_was_claimed_without_an_answer_goes_to_who_is_to_read_it_now(cluster: LocalCluster, tested: str) -> None:
    others: list[Consumer] = []

    def another_joins(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "ClaimPartitions" and not others:
            others.append(member(cluster, tested))
            waited_for(lambda: len(of(others[0])._share) == 1)
            raise lost()
        return reply

    one = Consumer(cluster.bootstrap_servers, group=tested, auto_offset_reset="earliest")
    with requests(another_joins, one), one:
        one.subscribe(tested)
        waited_for(lambda: bool(others))
        with others[0] as other:
            waited_for(lambda: len(partitions_of(other)) == 1)


# --- commits


def test_the_last_commit_is_tried_again_when_its_answer_is_lost(cluster: LocalCluster, tested: str) -> None:
    asked: list[str] = []

    def lose_one(ask: Ask, method: str) -> Any:
        asked.append(method)
        if method == "CommitOffsets" and asked.count(method) == 1:
            raise lost()
        return ask()

    one = member(cluster, tested, auto_commit_interval_ms=3_600_000)
    assert len(one.consume(2, 30)) == 2
    assert one.consume(1, 0) == []
    with requests(lose_one):
        one.close()
    assert asked.count("CommitOffsets") == 2
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(tested) == {TopicPartition(tested, 0): 1, TopicPartition(tested, 1): 1}


def test_a_partition_whose_release_was_not_answered_is_read_again_when_it_comes_back(
    cluster: LocalCluster, tested: str
) -> None:
    is_refusing, was_refused = threading.Event(), threading.Event()
    is_refusing.set()

    def refuse(ask: Ask, method: str) -> Any:
        if method == "ReleasePartitions" and is_refusing.is_set():
            was_refused.set()
            raise lost()
        return ask()

    with requests(refuse), member(cluster, tested) as one:
        membership = one._membership
        assert membership is not None
        assert len(one.consume(2, 30)) == 2  # and they stay in hand, so that nothing is released yet
        with member(cluster, tested):
            waited_for(lambda: len(membership._share) == 1 and not membership._freed)
            assert one.poll(0) is None
            waited_for(was_refused.is_set)
        waited_for(lambda: len(membership._share) == 2)
        is_refusing.clear()
        produce(cluster, tested, 0, 1)
        assert {message.partition for message in one.messages(max_messages=2, timeout=30)} == {0, 1}


def test_consume_returns_nothing_of_a_lease_that_ended_while_it_waited(cluster: LocalCluster, tested: str) -> None:
    def refuse(ask: Ask, method: str) -> Any:
        if method in ("RenewMember", "JoinGroup"):
            raise lost()
        return ask()

    with member(cluster, tested, session_timeout_ms=1000) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        with requests(refuse):
            assert one.consume(3, 1.5) == []
        found = [(message.partition, message.offset) for message in one.consume(2, 30)]
        assert sorted(found) == [(0, 0), (1, 0)], "they are handed out by the next membership"


def test_consume_returns_later_what_it_had_when_a_callback_raised(cluster: LocalCluster, tested: str) -> None:
    there = {TopicPartition(tested, number) for number in range(2)}

    def fail(_: Consumer, partitions: list[TopicPartition]) -> None:
        if TopicPartition(tested, 2) in partitions:
            raise OSError("the database is away")

    def grow() -> None:
        waited_for(lambda: one._cursors.in_hand(there) == there)
        admin.alter_topic(tested, partitions=3)

    with member(cluster, tested, {"on_assigned": fail}) as one, Admin(cluster.bootstrap_servers) as admin:
        growing = threading.Thread(target=grow)
        growing.start()
        with pytest.raises(OSError, match="the database is away"):
            one.consume(3, 30)
        join_all([growing], 30)
        assert {message.partition for message in one.consume(2, 30)} == {0, 1}
        one.commit()
        assert set(one.committed(there).values()) <= {0}


@pytest.mark.parametrize("seconds", [60, None])
def test_consume_returns_what_it_has_of_a_partition_that_is_to_go(
    cluster: LocalCluster, tested: str, seconds: float | None
) -> None:
    there = {TopicPartition(tested, number) for number in range(2)}
    found: list[Message] = []
    with member(cluster, tested) as one:
        reading = threading.Thread(target=lambda: found.extend(one.consume(100, seconds)))
        reading.start()
        waited_for(lambda: one._cursors.in_hand(there) == there)
        with member(cluster, tested) as other:
            reading.join(10)
            assert [message.offset for message in found] == [0, 0]
            waited_for(lambda: len(partitions_of(one)) == 1 and len(partitions_of(other)) == 1)
            assert other.committed([*other.assignment()]) == dict.fromkeys(other.assignment(), 1)


@pytest.mark.parametrize("how", ["poll", "messages"])
def test_callbacks_wait_for_one_record_at_most(cluster: LocalCluster, tested: str, how: str) -> None:
    """However many of other partitions have come with it."""
    called: list[list[TopicPartition]] = []
    produce(cluster, tested, *[0, 1] * 50)
    with (
        member(cluster, tested, {"on_assigned": lambda _, assigned: called.append(assigned)}) as one,
        Admin(cluster.bootstrap_servers) as admin,
    ):
        messages: Iterator[Message | None] = one.messages() if how == "messages" else iter(lambda: one.poll(30), None)
        assert next(messages) is not None
        assert len(called) == 1
        admin.alter_topic(tested, partitions=3)
        membership = one._membership
        assert membership is not None
        waited_for(lambda: bool(membership.callbacks))
        waited_for(lambda: all(cursor.is_through() for cursor in one._cursors.by_partition.values()), 10)
        seen = {message[:3] for _, message in zip(range(101), messages, strict=False) if message is not None}
        assert called[1:] == [[TopicPartition(tested, 2)]]
        assert len(seen) == 101


def test_an_iterator_that_asks_no_more_keeps_no_partition(cluster: LocalCluster, tested: str) -> None:
    """However much others ask."""
    with member(cluster, tested, max_poll_interval_ms=500) as one:
        asks_no_more = one.messages()
        held = next(asks_no_more)
        found: list[tuple[int, int]] = []
        reading = threading.Thread(target=lambda: found.extend((each.partition, each.offset) for each in one))
        reading.start()
        waited_for(lambda: (held.partition, held.offset) in found)
    join_all([reading], 30)


def test_a_closed_iterator_keeps_no_partition_and_what_it_had_is_read_again(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        waited_for(lambda: len(one.assignment()) == 2)
        iterators = [stream.messages() for stream in one.streams(2)]
        assert [next(messages).offset for messages in iterators] == [0, 0]
        for messages in iterators:
            messages.close()  # type: ignore[attr-defined]
        with member(cluster, tested) as other:
            message = other.poll(10)
            assert message is not None and message.offset == 0


def test_a_commit_of_a_member_that_was_removed_says_that_it_owns_nothing(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, enable_auto_commit=False) as one:
        [message] = one.consume(1, 30)
        membership = one._membership
        assert membership is not None
        membership._leave()
        with pytest.raises(NotOwner):
            one.commit(message)
        assert one.commit(next(one.messages(timeout=30))) is None, "it has joined again"


def lose_and_join_again(one: Consumer) -> None:
    epoch = of(one)._epoch
    of(one)._lease.end = -1.0
    waited_for(lambda: of(one)._epoch > epoch and len(one.assignment()) == 2)


def test_a_record_of_before_a_lost_lease_is_not_committed_by_the_next_claim(cluster: LocalCluster, tested: str) -> None:
    """Another member may have read and committed more meanwhile."""
    with member(cluster, tested, enable_auto_commit=False) as one:
        [first, second] = one.consume(2, 30)
        assert first.partition != second.partition
        places = [TopicPartition(tested, each.partition) for each in (first, second)]
        one.commit(dict.fromkeys(places, 7))  # as another member does when it has read on
        lose_and_join_again(one)
        for done in (first, [second], {places[0]: 1, places[1]: 7}, {places[1]: 8}):
            with pytest.raises(NotOwner):
                one.commit(done)
        one.commit(dict.fromkeys(places, 7))
        one.seek(places[0], 2)
        one.commit({places[0]: 2})
        assert one.committed() == {places[0]: 2, places[1]: 7}


def test_a_commit_that_is_refused_after_its_member_has_joined_again_sends_no_old_position(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def refused(_: Membership, request: Any) -> None:
        sent.append(request)
        lose_and_join_again(one)
        raise NotOwner(member="one", partition=f"{tested}-0", group=tested, owner="")

    with member(cluster, tested, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.consume(1, 0) == []
        monkeypatch.setattr(Membership, "_ask_patiently", refused)
        with pytest.raises(NotOwner):
            one.commit()
        assert len(sent) == 1


def test_a_commit_that_is_refused_before_its_member_has_joined_again_says_so(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Membership, request: Any) -> None:
        of(one)._lease.end = -1.0
        waited_for(lambda: not of(one)._is_member)
        raise NotOwner(member="one", partition=f"{tested}-0", group=tested, owner="")

    with member(cluster, tested, {"on_lost": lambda *_: None}, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.consume(1, 0) == []
        monkeypatch.setattr(Membership, "_ask_patiently", refused)
        with pytest.raises(NotOwner):
            one.commit()


def test_a_commit_in_parts_says_so_if_its_member_is_out_before_the_last(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, parts = Membership._ask_patiently, []

    def then_out(asking: Membership, request: Any) -> None:
        parts.append(request)
        ask(asking, request)
        of(one)._lease.end = -1.0
        waited_for(lambda: not of(one)._is_member)

    with member(cluster, tested, {"on_lost": lambda *_: None}, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.consume(1, 0) == []
        monkeypatch.setattr("kafkalog.client.consumer.membership._PARTITIONS_AT_ONCE", 1)
        monkeypatch.setattr(Membership, "_ask_patiently", then_out)
        with pytest.raises(NotOwner):
            one.commit()
        assert len(parts) == 1


@pytest.mark.parametrize("then", ["a rebalance", "unsubscribe"])
def test_a_start_that_was_looked_up_undoes_no_commit_whose_answer_is_on_its_way(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    ask = Membership._ask_patiently

    def share() -> None:
        other = entered.enter_context(member(cluster, tested, enable_auto_commit=False))
        waited_for(lambda: len(partitions_of(one)) == len(partitions_of(other)) == 1)

    def ask_first(asking: Membership, request: Any) -> None:
        ask(asking, request)
        share() if then == "a rebalance" else one.unsubscribe()

    with ExitStack() as entered, Admin(cluster.bootstrap_servers) as admin:
        one = entered.enter_context(member(cluster, tested, enable_auto_commit=False))
        waited_for(lambda: partitions_of(one) == [0, 1])
        if then == "unsubscribe":
            share()
        places = one.assignment()
        for place in places:
            one.seek(place, 1)
        monkeypatch.setattr(Membership, "_ask_patiently", ask_first)
        one.commit()
        assert {place: admin.committed(tested)[place] for place in places} == dict.fromkeys(places, 1)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_commit_that_is_late_is_none_of_a_later_claim(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Another member has read on and committed in between."""
    ask, moved = Membership._ask_patiently, list[TopicPartition]()

    def ask_late(asking: Membership, request: Any) -> None:
        if not moved:
            with member(cluster, tested, enable_auto_commit=False) as other:
                waited_for(lambda: len(partitions_of(one)) == len(partitions_of(other)) == 1)
                moved.extend(other.assignment())
                other.seek(moved[0], 2)
                other.commit()
            waited_for(lambda: partitions_of(one) == [0, 1])
            assert not is_named or request.offsets[0].partition != moved[0].partition
        ask(asking, request)

    produce(cluster, tested, 0, 1)
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        places = sorted(one.assignment())
        one.pause(places)
        for place in places:
            one.seek(place, 1)
        monkeypatch.setattr(membership_module, "_PARTITIONS_AT_ONCE", 1)
        monkeypatch.setattr(Membership, "_ask_patiently", ask_late)
        with pytest.raises(NotOwner) if is_named else nullcontext():
            one.commit(dict.fromkeys(places, 1) if is_named else None)
        assert {place: admin.committed(tested)[place] for place in places} == dict.fromkeys(places, 1) | {moved[0]: 2}


@pytest.mark.parametrize(("newer", "is_answered"), [(3, True), (3, False), (1, True)])
def test_a_later_part_of_a_commit_undoes_no_newer_commit(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, newer: int, is_answered: bool
) -> None:
    """Not even one that found what it was to write: that was written before the older one."""
    call, sent = Cluster.call, list[str]()

    def lose(shared: Cluster, *given: Any, **named: Any) -> Any:
        call(shared, *given, **named)
        raise lost()

    def commit_anew(ask: Ask, method: str) -> Any:
        reply = ask()
        sent.append(method)
        if method == "CommitOffsets" and sent.count(method) == 1:  # not of the lease's thread, beside it
            monkeypatch.undo()
            seek(newer)
            if is_answered:
                one.commit()
            else:
                with patch.object(Cluster, "call", lose), pytest.raises(RequestTimedOut):
                    one.commit()
        return reply

    def seek(offset: int) -> None:
        for place in places:
            one.seek(place, offset)

    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        membership, places = of(one), one.assignment()
        one.pause(places)
        seek(1)
        one.commit()
        seek(2)
        monkeypatch.setattr(membership_module, "_PARTITIONS_AT_ONCE", 1)
        with requests(commit_anew, one):
            membership._commit_own(membership._auto_commit(), one._cursors.positions(places))
        assert admin.committed(tested) == dict.fromkeys(places, newer)


def test_the_last_commit_of_a_slow_member_is_tried_though_its_lease_counts_as_lost(
    cluster: LocalCluster, tested: str
) -> None:
    """Its lease's thread may notice the end before the commit; who reads next would look up a later start."""
    with member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        membership, offsets = of(one), {TopicPartition(tested, 0): 1}
        with membership._lock:
            membership._lost = UnknownMember(group=tested, member="one")
            membership._commit_own(membership._auto_commit(), offsets)
            with pytest.raises(NotOwner):
                membership.commit({TopicPartition(tested, 0): 2}, {})
            membership._lost = None
        assert one.committed([TopicPartition(tested, 0)]) == offsets


def test_on_assigned_commits_what_is_kept_elsewhere_and_no_other_thread_does_meanwhile(
    cluster: LocalCluster, tested: str
) -> None:
    kept: list[dict[TopicPartition, int]] = []

    def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if kept:
            offsets = {p: kept[0][p] for p in partitions}
            with ThreadPoolExecutor(1) as pool, pytest.raises(NotOwner):
                pool.submit(consumer.commit, offsets).result(30)
            consumer.commit(offsets)

    with member(cluster, tested, {"on_assigned": assigned}, enable_auto_commit=False) as one:
        places = [TopicPartition(tested, message.partition) for message in one.consume(2, 30)]
        one.commit(dict.fromkeys(places, 7))
        kept.append(dict.fromkeys(places, 3))
        epoch = of(one)._epoch
        of(one)._lease.end = -1.0
        waited_for(lambda: of(one)._epoch > epoch and len(partitions_of(one)) == 2)
        assert one.committed() == kept[0]


def test_the_end_of_a_batch_of_messages_asks_for_no_record(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, enable_auto_commit=False) as one:
        for number, _ in enumerate(one.messages(max_messages=2, timeout=30)):
            if number == 1:  # the lease ends while the last record of the batch is processed
                of(one)._lease.end = -1.0
                waited_for(lambda: not of(one)._is_member or partitions_of(one) == [0, 1], 60)
                waited_for(lambda: bool(of(one)._uncommitted), 60)
        with pytest.raises(NotOwner):
            one.commit()


def test_a_commit_by_name_waits_for_no_lock_of_the_member_while_it_has_the_fetchers(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler that closes the consumer may stand above a thread that has the member's."""
    check, has_fetchers, may_go_on = Membership._check_not_old, threading.Event(), threading.Event()

    def hold(checking: Membership, offsets: Any) -> None:
        has_fetchers.set()
        assert may_go_on.wait(30)
        check(checking, offsets)

    monkeypatch.setattr(Membership, "_check_not_old", hold)
    with member(cluster, tested, enable_auto_commit=False) as one, ThreadPoolExecutor(1) as pool:
        [message] = one.consume(1, 30)
        committing = pool.submit(one.commit, message)
        assert has_fetchers.wait(30)
        with of(one)._lock:
            may_go_on.set()
            assert one._fetcher.lock.acquire(timeout=30)
            one._fetcher.lock.release()
        committing.result(30)


def test_of_two_commits_by_name_at_once_the_last_name_is_that_of_the_last_commit(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_commit, has_begun, may_go_on = Membership._new_commit, threading.Event(), threading.Event()

    def hold(making: Membership, *given: Any, **named: Any) -> Any:
        commit = new_commit(making, *given, **named)
        if threading.current_thread().name.startswith("first"):
            has_begun.set()
            assert may_go_on.wait(30)
        return commit

    monkeypatch.setattr(Membership, "_new_commit", hold)
    with member(cluster, tested, enable_auto_commit=False) as one, ThreadPoolExecutor(1, "first") as pool:
        waited_for(lambda: partitions_of(one) == [0, 1])
        place = TopicPartition(tested, 0)
        committing = pool.submit(one.commit, {place: 1})
        assert has_begun.wait(30)
        one.commit({place: 2})
        may_go_on.set()
        committing.result(30)  # it named its offset last
        named = one._cursors.by_partition[place].named
        assert named is not None
        assert named.offset == one.committed([place])[place] == 1


def test_on_revoked_commits_after_a_lost_lease_as_ever(cluster: LocalCluster, tested: str) -> None:
    raised: list[NotOwner] = []

    def commit(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.commit()
        consumer.commit(dict.fromkeys(partitions, 0))

    with member(cluster, tested, callbacks={"on_revoked": commit}, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        lose_and_join_again(one)
        try:
            one.commit()
        except NotOwner as error:
            raised.append(error)
    assert raised


def test_a_callback_commits_no_old_offset_but_of_what_it_was_called_with(cluster: LocalCluster, tested: str) -> None:
    revoked: list[TopicPartition] = []

    def commit(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if not revoked:
            revoked.extend(partitions)
            with pytest.raises(NotOwner):
                consumer.commit(dict.fromkeys(places, 0))
            consumer.commit(dict.fromkeys(partitions, 0))

    with member(cluster, tested, {"on_revoked": commit}, enable_auto_commit=False) as one:
        places = [TopicPartition(tested, message.partition) for message in one.consume(2, 30)]
        one.commit(dict.fromkeys(places, 1))  # as another member may have done
        lose_and_join_again(one)
        with member(cluster, tested, enable_auto_commit=False) as other:
            waited_for(lambda: len(partitions_of(one)) == len(partitions_of(other)) == 1)
            assert one.committed(places) == dict.fromkeys(places, 1) | {revoked[0]: 0}


def test_a_commit_of_positions_says_that_what_was_handed_out_is_lost(cluster: LocalCluster, tested: str) -> None:
    def joined_again() -> None:
        lose_and_join_again(one)

    with member(cluster, tested, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        joined_again()
        joined_again()  # and nothing was asked for meanwhile
        with pytest.raises(NotOwner):
            one.commit()
        assert len(one.consume(2, 30)) == 2
        assert one.consume(1, 0) == []
        one.commit()
        assert list(one.committed().values()) == [1, 1]
        joined_again()
        one.commit()  # nothing is lost


@pytest.mark.parametrize("way", ["poll", "consume", "messages", "arrow"])
def test_who_waited_already_when_the_lease_ended_has_asked_for_no_record_since(
    cluster: LocalCluster, tested: str, way: str
) -> None:
    """Also if it serves a callback, or gives back what it had and begins anew."""
    announced = 0

    def keep_back(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        nonlocal announced
        if is_waiting.is_set():
            consumer.pause(partitions)
            announced += len(partitions)

    def wait() -> None:
        if way == "poll":
            assert one.poll(60) is not None
        elif way == "consume":
            assert len(one.consume(3, 60)) == 3
        else:
            assert next(one.messages(timeout=60) if way == "messages" else one.arrow_batches(60)) is not None

    is_waiting = threading.Event()
    with member(cluster, tested, {"on_assigned": keep_back}, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.consume(1, 0) == []
        places = one.assignment() if way == "consume" else []  # of which it has records, and waits for a third
        produce(cluster, tested, *[place.partition for place in places])
        waiting = threading.Thread(target=wait)
        waiting.start()
        waited_for(lambda: bool(of(one)._reading) and one._cursors.in_hand(places) == set(places))
        is_waiting.set()
        lose_and_join_again(one)
        waited_for(lambda: announced == 2 and not of(one).callbacks)
        waited_for(lambda: bool(of(one)._reading))
        with pytest.raises(NotOwner):
            one.commit()
        one.resume(one.assignment())
        join_all([waiting], 30)
        one.commit()  # it has got a record


def test_news_that_come_while_a_claim_is_refused_for_them_are_acted_upon(cluster: LocalCluster, tested: str) -> None:
    is_waiting, has_news, has_claimed = threading.Event(), threading.Event(), threading.Event()

    def news_during_a_claim(ask: Ask, method: str) -> Any:
        known = membership._generation
        if method == "AwaitGroup":
            is_waiting.set()
            reply = ask()
            if reply.news.generation > known and not has_claimed.is_set():
                has_news.set()
                assert has_claimed.wait(30)
            return reply
        if method == "ClaimPartitions" and has_news.is_set() and not has_claimed.is_set():
            has_claimed.set()
            waited_for(lambda: membership._generation > known)
        return ask()

    with member(cluster, tested) as other, Admin(cluster.bootstrap_servers) as admin:
        assert len(other.consume(2, 30)) == 2  # it has them in hand, so the other one has to wait
        with member(cluster, tested) as one:
            assert one._membership is not None
            membership = one._membership
            waited_for(lambda: len(membership._waiting) == 1)
            with requests(news_during_a_claim, one):
                assert is_waiting.wait(30)
                admin.alter_topic(tested, partitions=4)
                waited_for(lambda: bool(partitions_of(one)))
            assert has_claimed.is_set()


def test_a_slow_application_is_a_member_again_when_it_asks_for_a_record(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, max_poll_interval_ms=500, enable_auto_commit=False) as one:
        assert one.poll(30)
        waited_for(lambda: not of(one)._is_member)
        assert one.poll(30)


def test_a_share_is_claimed_again_after_a_broker_had_not_heard_of_its_generation(
    cluster: LocalCluster, tested: str
) -> None:
    asked: list[str] = []

    def be_behind(ask: Ask, method: str) -> Any:
        asked.append(method)
        if method == "ClaimPartitions" and asked.count(method) == 1:
            raise StaleGeneration(group=tested, generation=0, expected=1)
        return ask()

    with requests(be_behind), member(cluster, tested) as one:
        assert len(one.consume(2, 30)) == 2


def test_a_lost_connection_makes_no_member_forget_what_it_has_to_claim(cluster: LocalCluster, tested: str) -> None:
    """It joins again while it still waits for news of the membership before."""
    asked: list[str] = []
    is_armed, is_cut = threading.Event(), threading.Event()

    def cut(ask: Ask, method: str) -> Any:
        asked.append(method)
        if method == "AwaitGroup" and not is_cut.is_set():
            assert is_cut.wait(30)
            raise BrokerUnreachable(address="a broker", reason="the connection was lost")
        if method == "ClaimPartitions" and is_armed.is_set() and not is_cut.is_set():
            is_cut.set()
            raise BrokerUnreachable(address="a broker", reason="the connection was lost")
        return ask()

    with requests(cut), member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        waited_for(lambda: asked.count("AwaitGroup") == 1)
        is_armed.set()
        of(one)._lease.end = -1.0  # as if the process had been stopped
        waited_for(lambda: is_cut.is_set() and partitions_of(one) == [0, 1])


def test_news_of_a_broker_that_is_behind_are_not_asked_for_without_a_pause(cluster: LocalCluster, tested: str) -> None:
    count = 0

    def be_behind(ask: Ask, method: str) -> Any:
        nonlocal count
        if method != "AwaitGroup":
            return ask()
        count += 1
        return pb.AwaitGroupReply(news=pb.GroupNews(generation=0))

    with requests(be_behind), member(cluster, tested) as one:
        assert one.poll(30)
        before = count
        assert one.consume(100, 1.0)
        assert count - before < 30


@pytest.mark.parametrize("error", ["deleted", "refused"])
def test_an_auto_commit_that_fails_keeps_nobody_from_reading(cluster: LocalCluster, tested: str, error: str) -> None:
    """What is deleted is not committed; of what is another one's the news come."""
    other = f"{tested}.other"
    is_failing = threading.Event()

    def refuse(ask: Ask, method: str) -> Any:
        if error == "refused" and method == "CommitOffsets" and not is_failing.is_set():
            is_failing.set()
            raise NotOwner(member="it", partition="one", group=tested, owner="")
        return ask()

    with (
        Admin(cluster.bootstrap_servers) as admin,
        requests(refuse),
        member(cluster, tested, auto_commit_interval_ms=50) as one,
    ):
        admin.create_topic(other, partitions=1)
        one.subscribe([tested, other])
        produce(cluster, other, 0)
        assert len(one.consume(3, 30)) == 3
        if error == "deleted":
            admin.delete_topic(other)
        assert one.poll(0) is None  # they count as processed
        produce(cluster, tested, 0, 1)
        assert len(one.consume(2, 30)) == 2
        one.poll(0)
        waited_for(lambda: admin.committed(tested).get(TopicPartition(tested, 0)) == 2)


def test_a_commit_after_one_without_an_answer_is_sent_though_it_says_what_was_written_before(
    cluster: LocalCluster, tested: str
) -> None:
    where = TopicPartition(tested, 0)
    is_losing = threading.Event()

    def lose(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "CommitOffsets" and is_losing.is_set():
            raise lost()
        return reply

    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        one.commit({where: 0})
        is_losing.set()
        with requests(lose), pytest.raises(RequestTimedOut):
            of(one)._commit_own(of(one)._auto_commit(), {where: 1})
        assert admin.committed(tested)[where] == 1
        one.commit({where: 0})
        assert admin.committed(tested)[where] == 0


@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_start_that_was_looked_up_is_the_next_owner_s_too(
    cluster: LocalCluster, tested: str, auto_commit: bool
) -> None:
    settings: dict[str, Any] = {"auto_offset_reset": "latest", "enable_auto_commit": auto_commit}
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, **settings) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        if auto_commit:  # so it need not even be given back
            both = {TopicPartition(tested, number): 1 for number in (0, 1)}
            waited_for(lambda: admin.committed(tested) == both)
        one.pause(one.assignment())
        produce(cluster, tested, 0, 1)
        with member(cluster, tested, **settings) as other:
            waited_for(lambda: one.poll(0) is None and len(other.assignment()) == 1)
            assert other.position(other.assignment()[0]) == 1
            message = other.poll(30)
            assert message is not None
            assert message.offset == 1


@pytest.mark.parametrize("how", ["close", "unsubscribe", "slow polls"])
def test_a_start_that_was_looked_up_is_the_next_owners_too_when_its_member_leaves(
    cluster: LocalCluster, tested: str, how: str
) -> None:
    settings: dict[str, Any] = {"auto_offset_reset": "latest", "enable_auto_commit": False}
    limit: dict[str, Any] = {"max_poll_interval_ms": 1000} if how == "slow polls" else {}
    with member(cluster, tested, **settings, **limit) as one, member(cluster, tested, **settings) as other:
        waited_for(lambda: len(partitions_of(one)) == len(partitions_of(other)) == 1)
        [mine], [others] = one.assignment(), other.assignment()
        other.pause([others])
        produce(cluster, tested, 0, 1)
        message = one.poll(30)
        assert message is not None and message.offset == 1
        if how != "slow polls":
            getattr(one, how)()
        message = other.poll(60)
        assert message is not None
        assert (message.partition, message.offset) == (mine.partition, 1)


def test_a_group_that_ends_before_anything_is_committed_has_no_offsets(cluster: LocalCluster, tested: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        with member(cluster, tested, auto_offset_reset="latest", enable_auto_commit=False) as one:
            waited_for(lambda: partitions_of(one) == [0, 1])
        assert admin.committed(tested) == {}


def test_an_error_of_a_callback_in_consume_is_raised_also_if_messages_have_come(
    cluster: LocalCluster, topic: str
) -> None:
    def seek_nowhere(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if partitions[0].partition == 1:
            consumer.seek(partitions[0], -1001)

    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=1)
        produce(cluster, topic, 0, 0)
        with member(cluster, topic, {"on_assigned": seek_nowhere}) as one:
            grown = threading.Thread(
                target=lambda: (
                    waited_for(lambda: bool(one._cursors.in_hand([TopicPartition(topic, 0)]))),
                    admin.alter_topic(topic, partitions=2),
                )
            )
            grown.start()
            try:
                with pytest.raises(InvalidArgument, match="-1001"):
                    one.consume(3, 60)
                assert [message.offset for message in one.consume(2, 30)] == [0, 1]
            finally:
                join_all([grown], 60)


def test_who_closes_in_a_callback_after_the_lease_has_ended_is_told_what_is_lost(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, list[int]]] = []

    def close(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        told.append(("assigned", [each.partition for each in partitions]))
        if len(told) > 1:
            membership, is_losing = of(consumer), threading.Event()
            ahead(monkeypatch, membership.callbacks, "wait_returned", is_losing.set)
            membership._note_lost(membership._me(), UnknownMember(group=tested, member=membership.name))
            assert is_losing.wait(60)
            consumer.close()

    with member(cluster, tested) as other:
        waited_for(lambda: partitions_of(other) == [0, 1])
        with member(cluster, tested, noting(told) | {"on_assigned": close}) as one:
            waited_for(lambda: (other.poll(0), one.poll(0), bool(told))[-1])
            other.close()
            with suppress(Closed):
                waited_for(lambda: one.poll(0.1) is None and one._closing)
    assert told[0][0] == told[1][0] == "assigned"
    assert [what for what, _ in told[2:]] == ["lost"] and told[0][1][0] in told[2][1]


def test_commit_leaves_out_a_topic_that_was_deleted(cluster: LocalCluster, topic: str) -> None:
    gone = f"{topic}.gone"
    with Admin(cluster.bootstrap_servers) as admin:
        for name in (topic, gone):
            admin.create_topic(name, partitions=1)
            produce(cluster, name, 0)
        with Consumer(cluster.bootstrap_servers, topic, auto_offset_reset="earliest", enable_auto_commit=False) as one:
            one.subscribe([topic, gone])
            messages = [one.poll(30), one.poll(30)]
            assert None not in messages
            one.pause([TopicPartition(gone, 0)])
            assert one.poll(0) is None
            admin.delete_topic(gone)
            one.commit()
            assert admin.committed(topic) == {TopicPartition(topic, 0): 1}


def test_a_reset_of_the_position_is_committed_though_a_later_offset_was_committed_by_name(
    cluster: LocalCluster, tested: str
) -> None:
    where = TopicPartition(tested, 0)
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        one.seek(where, 1000)
        one.commit({where: 1000})
        message = one.poll(30)
        while message is None or message.partition:
            message = one.poll(30)
        assert message.offset == 0
        produce(cluster, tested, 0)
        assert one.poll(30)
        one.commit()
        assert admin.committed(tested)[where] == 1


def test_a_member_finds_brokers_that_it_did_not_know_when_it_joined(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        assert one.poll(30)
        of(one)._brokers._connections = before = Cluster("127.0.0.1:1", connect_timeout_ms=100)
        waited_for(lambda: of(one)._brokers._connections is not before)
        until = of(one)._lease.end
        waited_for(lambda: of(one)._lease.end > until, otherwise="its lease is not renewed")
        assert of(one)._is_member


def test_close_waits_no_longer_than_it_may_for_brokers_that_stand_still(cluster: LocalCluster, tested: str) -> None:
    one = member(cluster, tested, session_timeout_ms=60_000)
    assert one.poll(30)
    assert one.poll(30)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        of(one)._brokers._connections = Cluster(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_ms=30_000)
        begun = time.monotonic()
        one.close(timeout=0.5)
        assert time.monotonic() - begun < 10


def test_a_consumer_that_is_closed_while_it_subscribes_anew_is_no_member(cluster: LocalCluster, tested: str) -> None:
    with closing(Cluster(cluster.bootstrap_servers)) as shared, Admin(cluster.bootstrap_servers) as admin:
        one = Consumer(shared, group=tested, auto_offset_reset="earliest")
        one.subscribe(tested, on_revoked=lambda consumer, _: consumer.close())
        assert one.poll(30)
        with pytest.raises(Closed):
            one.subscribe(tested)
        waited_for(lambda: not any(thread.is_alive() for thread in of(one)._threads))
        waited_for(lambda: not admin.describe_group(tested).members)


def test_a_static_member_that_was_replaced_is_told_what_it_lost(cluster: LocalCluster, tested: str) -> None:
    told: list[int] = []
    with Consumer(cluster.bootstrap_servers, tested, auto_offset_reset="earliest", group_instance_id="it") as one:
        one.subscribe(tested, on_lost=lambda _, lost: told.extend(partition.partition for partition in lost))
        assert one.poll(30)
        with member(cluster, tested, group_instance_id="it") as other:
            assert other.poll(30)
            with pytest.raises(MemberFenced):
                one.poll(30)
            assert told == [0, 1]


def test_an_interrupt_after_a_callback_leaves_no_partition_that_is_never_read(
    cluster: LocalCluster, tested: str
) -> None:
    called: list[Any] = []
    modules = ("membership", "callbacks", "cursors")
    for number in range(1000):
        group = f"{tested}.{number}"
        with Consumer(cluster.bootstrap_servers, group, auto_offset_reset="earliest") as one:
            one.subscribe(tested, on_assigned=lambda *given: called.append(given))
            waited_for(lambda: bool(of(one).callbacks))
            called.clear()
            was_interrupted = interrupted_at(number, of(one).serve, *(f"consumer/{each}.py" for each in modules))
            assert len(one.consume(2, 5)) == 2, number
            assert len(called) == 1
        if not was_interrupted:
            return
    raise AssertionError("there are more places than that")


def test_without_auto_commit_nothing_is_committed(cluster: LocalCluster, tested: str) -> None:
    asked: list[str] = []

    def note(ask: Ask, method: str) -> Any:
        asked.append(method)
        return ask()

    with requests(note), Admin(cluster.bootstrap_servers) as admin:
        with member(cluster, tested, enable_auto_commit=False, auto_commit_interval_ms=10) as one:
            assert len(one.consume(2, 30)) == 2
            assert one.consume(1, 0) == []
            at = of(one)._commit_at
            waited_for(lambda: of(one)._commit_at > at + 0.02)
        assert "LeaveGroup" in asked and "CommitOffsets" not in asked
        assert admin.committed(tested) == {}


def test_messages_of_consume_are_committed_by_the_last_of_each_partition(cluster: LocalCluster, tested: str) -> None:
    produce(cluster, tested, 0)
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        messages = one.consume(3, 30)
        one.commit([])
        one.commit()
        assert set(admin.committed(tested).values()) <= {0}, "they are being processed"
        one.commit(messages)
        assert admin.committed(tested) == {TopicPartition(tested, 0): 2, TopicPartition(tested, 1): 1}
        with pytest.raises(InvalidArgument, match="a tuple among its messages"):
            one.commit([(1, 2)])  # type: ignore[list-item]


@pytest.mark.parametrize("then", ["auto commit", "commit()", "close", "a rebalance"])
def test_what_was_committed_by_name_is_not_undone_by_a_commit_of_the_position(
    cluster: LocalCluster, tested: str, then: str
) -> None:
    produce(cluster, tested, 0, 1)
    interval_ms = 20 if then == "auto commit" else 3_600_000
    both = {TopicPartition(tested, number): 2 for number in (0, 1)}
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, auto_commit_interval_ms=interval_ms) as one:
        messages = one.consume(4, 30)
        one.commit(messages)
        assert admin.committed(tested) == both
        if then == "auto commit":
            at = of(one)._commit_at
            waited_for(lambda: of(one)._commit_at > at + 0.05)
        elif then == "commit()":
            one.commit()
        elif then == "close":
            one.close()
        else:
            hands = list(one._polled)
            one._polled.clear()  # as if iterators were closed: what they have is read again
            for hand in hands:
                hand.give_up()
            with member(cluster, tested) as other:
                waited_for(lambda: len(of(one)._claims) == 1 and len(partitions_of(other)) == 1)
        assert admin.committed(tested) == both


def test_auto_commit_goes_on_after_a_commit_by_name(cluster: LocalCluster, tested: str) -> None:
    both = [TopicPartition(tested, number) for number in (0, 1)]
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, auto_commit_interval_ms=20) as one:
        one.commit(one.consume(2, 30))
        produce(cluster, tested, 0, 1)
        assert len(one.consume(2, 30)) == 2
        assert one.poll(0) is None
        waited_for(lambda: admin.committed(tested) == dict.fromkeys(both, 2))
        one.commit(dict.fromkeys(both, 1))
        produce(cluster, tested, 0)
        assert one.poll(30)
        assert one.poll(0) is None
        waited_for(lambda: admin.committed(tested) == {both[0]: 3, both[1]: 1})
        one.seek(both[0], 1)
        waited_for(lambda: admin.committed(tested)[both[0]] == 1)


def test_a_commit_by_name_that_failed_holds_back_no_auto_commit(cluster: LocalCluster, tested: str) -> None:
    def fail(shared: Cluster, method: str, *given: Any, **named: Any) -> Any:
        if method == "CommitOffsets":
            raise lost()
        return call(shared, method, *given, **named)

    call, both = Cluster.call, [TopicPartition(tested, number) for number in (0, 1)]
    with Admin(cluster.bootstrap_servers) as admin:
        with member(cluster, tested, auto_commit_interval_ms=3_600_000) as one:
            assert len(one.consume(2, 30)) == 2
            with patch.object(Cluster, "call", fail), pytest.raises(RequestTimedOut):
                one.commit(dict.fromkeys(both, 1000))
            assert one.poll(0) is None
        assert admin.committed(tested) == dict.fromkeys(both, 1)


def test_a_commit_by_name_that_was_interrupted_holds_back_no_auto_commit_unless_it_was_written(
    cluster: LocalCluster, tested: str
) -> None:
    where = TopicPartition(tested, 0)
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        cursor = one._cursors.by_partition[where]
        for number in range(1000):
            one.seek(where, 0)
            done = {where: 1000 + number}
            if not interrupted_at(number, partial(one.commit, done), "consumer/membership.py"):
                return
            assert cursor.named is None or admin.committed(tested)[where] == 1000 + number, number
    raise AssertionError("there are more places than that")


@pytest.mark.parametrize("how", ["rebalance", "close"])
def test_a_commit_in_on_revoked_is_the_last(cluster: LocalCluster, tested: str, how: str) -> None:
    produce(cluster, tested, 0, 1)
    told: list[TopicPartition] = []

    def commit(reader: Consumer, partitions: list[TopicPartition]) -> None:
        told.extend(partitions)
        reader.commit(dict.fromkeys(partitions, 1))

    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, {"on_revoked": commit}) as one:
        assert len(one.consume(4, 30)) == 4
        assert one.poll(0) is None
        if how == "close":
            one.close()
        else:
            with member(cluster, tested) as other:
                waited_for(lambda: len(partitions_of(one)) == 1 and len(other.assignment()) == 1)
                assert other.position(other.assignment()[0]) == 1
        assert {partition: admin.committed(tested)[partition] for partition in told} == dict.fromkeys(told, 1)


def test_a_record_that_is_handed_back_after_the_commit_of_on_revoked_does_not_undo_it(
    cluster: LocalCluster, tested: str
) -> None:
    produce(cluster, tested, 0, 1)
    has_committed, are_in_hand = threading.Event(), threading.Barrier(3)

    def read(stream: MessageStream) -> None:
        for message in stream:
            if message.offset == 1:
                are_in_hand.wait(30)
                assert has_committed.wait(30)

    def commit(reader: Consumer, partitions: list[TopicPartition]) -> None:
        reader.commit(dict.fromkeys(partitions, 0))
        has_committed.set()
        waited_for(lambda: not reader._cursors.in_hand(partitions))

    with Admin(cluster.bootstrap_servers) as admin:
        with member(cluster, tested, {"on_revoked": commit}) as one:
            waited_for(lambda: len(one.assignment()) == 2)
            readers = [threading.Thread(target=read, args=[stream]) for stream in one.streams(2)]
            for reader in readers:
                reader.start()
            are_in_hand.wait(30)
        join_all(readers, 30)
        assert set(admin.committed(tested).values()) == {0}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_commit_of_positions_leaves_out_what_is_no_longer_its_own(
    cluster: LocalCluster, tested: str, is_known: bool
) -> None:
    first, second = (TopicPartition(tested, number) for number in (0, 1))
    released: list[int] = []
    asked: list[str] = []
    call = Cluster.call

    def note(shared: Cluster, method: str, *given: Any, **named: Any) -> Any:
        asked.append(method)
        return call(shared, method, *given, **named)

    def commit(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "ReleasePartitions" and not released:
            [stays] = of(one)._share
            with patch.object(Cluster, "call", note):
                one.commit()
            released.append(admin.committed(tested)[stays])
        return reply

    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, enable_auto_commit=False) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.poll(0) is None
        if is_known:
            with requests(commit, one), member(cluster, tested):
                waited_for(lambda: one.poll(0) is None and bool(released))
            assert released == [1]
            assert asked.count("CommitOffsets") == 1, "it is not asked for what is just being released"
        else:
            ended = pb.GroupClaim(topic=tested, partition=0, claim=of(one)._claims[first])
            request = pb.ReleasePartitionsRequest(member=of(one)._me(), claims=[ended])
            of(one)._brokers.ask("ReleasePartitions", request)
            one.commit()
            assert admin.committed(tested) == {second: 1}


# --- many partitions


def test_a_large_share_is_claimed_committed_and_released_in_parts(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "_PARTITIONS_AT_ONCE", 2)
    ask, sizes = Brokers.ask, dict[str, list[int]]()

    def noted(brokers: Brokers, method: str, request: Any, seconds: float | None = None) -> Any:
        if method == "ClaimPartitions":
            sizes.setdefault(method, []).append(sum(len(each.partitions) for each in request.partitions))
        elif method in ("CommitOffsets", "ReleasePartitions"):
            some = request.claims if method == "ReleasePartitions" else request.offsets
            sizes.setdefault(method, []).append(len(some))
        return ask(brokers, method, request, seconds)

    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=7)
        produce(cluster, topic, *range(7))
        with patch.object(Brokers, "ask", noted):
            with member(cluster, topic, auto_commit_interval_ms=3_600_000) as one:
                assert len(one.consume(7, 30)) == 7
                assert sizes.pop("ClaimPartitions") == [2, 2, 2, 1]
                with member(cluster, topic) as other:
                    waited_for(lambda: len(partitions_of(one)) == 4 and len(partitions_of(other)) == 3)
                assert sizes.pop("ReleasePartitions") == [2, 1]
                sizes.clear()
            assert sum(sizes["CommitOffsets"]) == 4 and max(sizes["CommitOffsets"]) == 2
        assert admin.committed(topic) == {TopicPartition(topic, number): 1 for number in range(7)}


def test_commits_that_get_no_further_than_their_first_part_reach_all_partitions_in_turn(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "_PARTITIONS_AT_ONCE", 2)
    asked = 0

    def answer_the_first(ask: Ask, method: str) -> Any:
        nonlocal asked
        if method == "CommitOffsets":
            asked += 1
            if asked > 1:
                raise lost()
        return ask()

    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=6)
        with member(cluster, topic, enable_auto_commit=False) as one, requests(answer_the_first, one):
            for _ in range(3):
                produce(cluster, topic, *range(6))
                assert len(one.consume(6, 30)) == 6
                assert one.poll(0) is None
                asked = 0
                with pytest.raises(RequestTimedOut):
                    of(one)._commit_own(of(one)._auto_commit(), one._cursors.positions(one.assignment()))
            assert len(admin.committed(topic)) == 6


# --- starts


@pytest.mark.parametrize("failure", ["a broker is away", "an error for good", None])
def test_starts_that_were_not_found_are_looked_up_again(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, failure: str | None
) -> None:
    looks: list[int] = []

    def first_in_vain(*given: Any) -> Any:
        found = list_offsets(*given)
        looks.append(len(found))
        if len(looks) == 1:
            if failure is not None:
                raise lost() if failure == "a broker is away" else InvalidRequest(reason=failure)
            found.popitem()
        return found

    monkeypatch.setattr(starts, "list_offsets", first_in_vain)
    with member(cluster, tested) as one:
        if failure == "an error for good":
            with pytest.raises(InvalidRequest, match=failure):
                one.consume(2, 30)
            waited_for(lambda: of(one)._error is None)
        assert len(one.consume(2, 30)) == 2
    assert looks == ([2, 2] if failure else [2, 1])


def test_a_topic_that_is_deleted_while_starts_are_looked_up_keeps_no_other_one_from_being_read(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads gets no error meanwhile: the group takes the partitions away."""
    gone = f"{tested}-gone"
    looked_up: list[tuple[set[str], threading.Thread]] = []
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested) as one:
        one.unsubscribe()
        admin.create_topic(gone, partitions=2)

        def once_it_is_deleted(asked: Cluster, wanted: Mapping[TopicPartition, str], *given: Any) -> Any:
            looked_up.append(({partition.topic for partition in wanted}, threading.current_thread()))
            if len(looked_up) == 1:
                admin.delete_topic(gone)
                waited_for(lambda: one._cluster.refresh([gone]) or one._cluster.known_topic(gone) is None)
            return list_offsets(asked, wanted, *given)

        monkeypatch.setattr(starts, "list_offsets", once_it_is_deleted)
        one.subscribe([tested, gone])
        found: list[Message] = []
        while len(found) < 2 or one.awaited() != set():
            found += one.consume(2, 0.1)
        topics, threads = zip(*looked_up[:3], strict=True)
        assert topics == ({tested, gone}, {tested}, {gone})
        assert len(set(threads)) == 1, "the other topic waited for a lookup of its own"
        assert sorted(one.assignment()) == [TopicPartition(tested, 0), TopicPartition(tested, 1)]
        waited_for(lambda: not of(one)._starts._asked, otherwise="somebody still wants to know where it starts")


def test_starts_in_many_topics_are_asked_for_by_one_call_to_each_leader(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [f"{topic}-{number}" for number in range(20)]
    asked: list[int] = []

    def counted(*given: Any) -> Any:
        asked.append(len(given[1]))
        return list_offsets(*given)

    monkeypatch.setattr(starts, "list_offsets", counted)
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, topic) as one:
        for name in topics:
            admin.create_topic(name, partitions=2)
        one.subscribe(topics)
        waited_for(lambda: len(partitions_of(one)) == 40)
        leaders = {each.leader for info in admin.describe_topics(topics) for each in info.partitions}
    assert len(asked) == len(leaders)
    assert sum(asked) == 40


def test_an_auto_commit_comes_no_later_because_its_member_joins_again(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, auto_commit_interval_ms=60_000) as one:
        waited_for(lambda: partitions_of(one) == [0, 1] and len(one.committed()) == 2)
        at, epoch = of(one)._commit_at, of(one)._epoch
        of(one)._lease.end = -1.0
        assert one.poll(30)
        assert of(one)._epoch > epoch and of(one)._commit_at == at


# --- leases


def test_a_lease_counts_from_the_sending_of_its_renewal_and_ends_before_the_brokers_count(
    cluster: LocalCluster, tested: str
) -> None:
    sent: list[float] = []
    ends: list[float] = []  # each is of the request before

    def note(ask: Ask, method: str) -> Any:
        if method in ("JoinGroup", "RenewMember"):
            ends.append(of(one)._lease.end)
            sent.append(time.monotonic())
        return ask()

    one = Consumer(cluster.bootstrap_servers, tested, session_timeout_ms=20_000, heartbeat_interval_ms=1)
    with requests(note), one:
        one.subscribe(tested)
        waited_for(lambda: len(sent) > 5)
    assert all(end <= at + 20 * 0.9 for at, end in zip(sent, ends[1:], strict=False))
    assert ends[2] > ends[1], "it is renewed"


@pytest.mark.parametrize(("session_ms", "heartbeat"), [(60_000, {"heartbeat_interval_ms": 59_000}), (2_000, {})])
def test_a_lease_is_renewed_three_times_in_a_session_whatever_the_heartbeat_is(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, session_ms: int, heartbeat: dict[str, int]
) -> None:
    """Counted from the sending of a renewal, however late its answer comes."""
    waits: list[float | None] = []
    wait = Signal.wait

    def note(signal: Signal, seconds: float | None = None) -> bool:
        if threading.current_thread().name == "kafkalog-lease":
            waits.append(seconds)
        return wait(signal, seconds)

    def late(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "RenewMember":
            time.sleep(0.2)  # the fault is the time that an answer takes; nothing happens meanwhile that could end it
        return reply

    monkeypatch.setattr(Signal, "wait", note)
    with requests(late), Consumer(cluster.bootstrap_servers, tested, session_timeout_ms=session_ms, **heartbeat) as one:
        one.subscribe(tested)
        waited_for(lambda: len(waits) > 1)
        assert waits[1] is not None and waits[1] <= session_ms / 3000 - 0.2


def test_a_lease_that_ends_before_the_answer_to_its_renewal_stays_ended(cluster: LocalCluster, tested: str) -> None:
    told: list[tuple[str, list[int]]] = []
    is_late = threading.Event()

    def end_it(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "RenewMember" and is_late.is_set():
            is_late.clear()
            of(one)._lease.end = -1.0
        return reply

    with member(cluster, tested, noting(told)) as one, requests(end_it, one):
        waited_for(lambda: partitions_of(one) == [0, 1])
        is_late.set()
        waited_for(lambda: bool(partitions_of(one)) and ("lost", [0, 1]) in told)


def test_a_member_that_leaves_renews_its_lease_while_on_revoked_runs(cluster: LocalCluster, tested: str) -> None:
    """At most for max.poll.interval.ms, and hands out nothing meanwhile."""
    renewed: list[object] = []
    told: list[int] = []

    def note(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "RenewMember":
            renewed.append(reply)
        return reply

    def revoked(reader: Consumer, partitions: list[TopicPartition]) -> None:
        membership, before = of(reader), len(renewed)
        waited_for(lambda: len(renewed) > before + 1, 10)
        assert reader._cursors.is_late()
        assert 50 < membership._renew_until - time.monotonic() <= 60
        membership._renew_until = 0.0
        join_all([thread for thread in membership._threads if thread.name == "kafkalog-lease"], 10)
        told.append(len(partitions))

    with member(cluster, tested, {"on_revoked": revoked}, max_poll_interval_ms=60_000) as one, requests(note):
        waited_for(lambda: partitions_of(one) == [0, 1])
        one.close()
    assert told == [2]


@pytest.mark.parametrize("way", ["poll", "messages", "so many messages", "consume", "arrow"])
def test_nothing_more_is_handed_out_once_the_lease_has_ended(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What comes next is of the next membership, and begins at the last commit."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, partitions=1)
    with Producer(cluster.bootstrap_servers, linger_ms=1000) as producer:
        for _ in range(10):
            producer.send(topic, b"")

    def end_it() -> None:
        epochs.append(of(one)._epoch)
        of(one)._lease.end = -1.0

    epochs: list[int] = []
    with member(cluster, topic, enable_auto_commit=False) as one:
        next_offset: dict[str, Callable[[], int]] = {
            "poll": lambda: offset_of(one.poll(30)),
            "consume": lambda: offset_of(*one.consume(1, 30)),
            "messages": partial(lambda found: offset_of(next(found)), one.messages(timeout=30)),
            "so many messages": partial(lambda found: offset_of(next(found)), one.messages(9, timeout=30)),
            "arrow": partial(lambda found: int(next(found)["offset"][0].as_py()), one.arrow_batches(timeout=30)),
        }
        if way == "arrow":  # all in one batch: the lease ends before that is handed out
            amid(monkeypatch, one._cursors, "next_arrow", end_it)
        else:
            assert [next_offset[way]() for _ in range(3)] == [0, 1, 2]
            end_it()
        assert next_offset[way]() == 0
        assert of(one)._epoch > epochs[0]


def test_a_cluster_that_is_not_there_is_said_once_although_no_call_raises(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING", "kafkalog.client.consumer.membership")
    monkeypatch.setattr(membership_module, "_NOT_FOLLOWED_SECONDS", 0.5)
    failures: list[Exception] = []
    failed = Complaint.failed

    def counted(self: Complaint, error: Exception, *rest: Any, **facts: Any) -> None:
        failures.append(error)
        failed(self, error, *rest, **facts)

    monkeypatch.setattr(Complaint, "failed", counted)
    with Consumer("127.0.0.1:1", group="g", bootstrap_timeout_ms=200) as one:
        one.subscribe("t")
        waited_for(lambda: one.poll(0.1) is None and len(failures) >= 5)
    [said] = [record.getMessage() for record in caplog.records if "group_not_followed" in record.getMessage()]
    assert "no broker reachable at 127.0.0.1:1" in said


@pytest.mark.parametrize("way", ["consume", "consume columns", "arrow"])
def test_what_a_close_kept_back_is_not_committed(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Another thread closes the consumer after the last look at the lease; its `on_revoked` takes until the reader has
    asked again."""
    is_revoked, has_asked = threading.Event(), threading.Event()
    one = member(cluster, tested, {"on_revoked": lambda *_: (is_revoked.set(), has_asked.wait(30))})
    closing, has_ended = threading.Thread(target=one.close), Lease.has_ended

    def close_after(lease: Lease) -> bool:
        try:
            return has_ended(lease)
        finally:
            if threading.current_thread() is threading.main_thread():
                monkeypatch.setattr(Lease, "has_ended", has_ended)
                closing.start()
                assert is_revoked.wait(30)

    waited_for(lambda: len(one.assignment()) == 2)
    if way == "consume columns":
        monkeypatch.setattr(cursors, "ROWS_AT_ONCE", 1)
    take = "next_arrow" if way == "arrow" else "next_messages"
    amid(monkeypatch, one._cursors, take, lambda: monkeypatch.setattr(Lease, "has_ended", close_after))
    with Admin(cluster.bootstrap_servers) as admin:
        for _ in range(2):
            assert ([*one.arrow_batches(0.3)] if way == "arrow" else one.consume(1, 0.3)) == []
        has_asked.set()
        join_all([closing], 30)
        assert 1 not in admin.committed(tested).values()


# --- callbacks


def test_each_callback_says_once_what_became_of_the_partitions(cluster: LocalCluster, tested: str) -> None:
    told: list[tuple[str, list[int]]] = []
    with member(cluster, tested, noting(told)) as one:
        waited_for(lambda: partitions_of(one) == [0, 1] and len(told) == 1)
        of(one)._lease.end = -1.0
        waited_for(lambda: one.poll(0) is not None and len(told) == 3)
    assert told == [(what, [0, 1]) for what in ("assigned", "lost", "assigned", "revoked")]


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_consumer_that_is_closed_after_its_lease_says_that_its_partitions_are_lost(
    cluster: LocalCluster, tested: str, is_noticed: bool
) -> None:
    told: list[tuple[str, list[int]]] = []
    with member(cluster, tested, noting(told)) as one:
        waited_for(lambda: partitions_of(one) == [0, 1] and len(told) == 1)
        of(one)._lease.end = -1.0
        if is_noticed:  # and not told: nobody asks for a record
            waited_for(lambda: bool(of(one).callbacks))
    assert told == [("assigned", [0, 1]), ("lost", [0, 1])]


def test_partitions_that_were_never_announced_are_neither_revoked_nor_lost(cluster: LocalCluster, tested: str) -> None:
    told: list[tuple[str, list[int]]] = []
    with member(cluster, tested, noting(told)) as one:
        waited_for(lambda: bool(of(one).callbacks))
    assert told == []


def test_partitions_are_not_announced_once_the_lease_has_ended(cluster: LocalCluster, tested: str) -> None:
    told: list[tuple[str, list[int]]] = []
    with member(cluster, tested, noting(told)) as one:
        waited_for(lambda: bool(of(one).callbacks))
        of(one)._lease.end = -1.0
        of(one).serve()
        assert told == []


def test_a_callback_whose_partitions_are_lost_meanwhile_goes_on_as_if_they_were_not(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, list[int]]] = []
    note = noting(told)

    def place(reader: Consumer, partitions: list[TopicPartition]) -> None:
        note["on_assigned"](reader, partitions)
        if len(told) == 1:
            is_waiting = threading.Event()
            ahead(monkeypatch, of(reader).callbacks, "wait_returned", is_waiting.set)
            of(reader)._lease.end = -1.0
            waited_for(lambda: is_waiting.is_set() or not reader.assignment())
        for partition in partitions:
            reader.seek(partition, 0)
            assert reader.position(partition) == 0
        reader.pause(partitions)
        reader.resume(partitions)

    with member(cluster, tested, note | {"on_assigned": place}) as one:
        assert len(one.consume(2, 30)) == 2
        assert told == [("assigned", [0, 1]), ("lost", [0, 1]), ("assigned", [0, 1])]


def test_what_has_just_gone_is_neither_paused_nor_resumed(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        both = one.assignment()
        with member(cluster, tested):
            waited_for(lambda: len(partitions_of(one)) == 1)
            one.pause(both)
            assert one.paused() == one.assignment()
            one.resume(both)
            assert one.paused() == []
        with pytest.raises(InvalidArgument, match="is not assigned"):
            one.pause([TopicPartition("another", 0)])


# --- static members


def test_a_second_process_of_a_static_name_replaces_the_first_for_good(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, group_instance_id="seat") as first:
        assert len(first.consume(2, 30)) == 2
        with member(cluster, tested, group_instance_id="seat") as second:
            with pytest.raises(MemberFenced):
                first.poll(30)
            assert len(second.consume(2, 30)) == 2
            epoch = of(second)._epoch
            with pytest.raises(MemberFenced):
                first.poll(0.3)
            assert second.poll(0.3) is None
            assert of(second)._epoch == epoch


def test_a_static_member_whose_join_is_executed_twice_does_not_take_itself_for_another(
    cluster: LocalCluster, tested: str
) -> None:
    again: list[Any] = []

    def twice(ask: Ask, method: str) -> Any:
        reply = ask()
        if method == "JoinGroup" and not again:
            again.append(ask())
        return reply

    with requests(twice), member(cluster, tested, group_instance_id="seat") as one:
        assert len(one.consume(2, 30)) == 2
        assert of(one)._epoch > again[0].epoch


def test_a_static_member_that_is_closed_keeps_its_place_and_another_one_does_not(
    cluster: LocalCluster, tested: str
) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        with member(cluster, tested, group_instance_id="seat") as one, member(cluster, tested) as other:
            waited_for(lambda: len(partitions_of(one)) == len(partitions_of(other)) == 1)
        assert [each.instance_id for each in admin.describe_group(tested).members] == ["seat"]


# --- slow applications, and none


def test_a_consumer_that_keeps_a_record_for_too_long_leaves_and_joins_again_when_it_asks(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "_LOOK_SECONDS", 0.02)
    told: list[tuple[str, list[int]]] = []
    with member(cluster, tested, noting(told), max_poll_interval_ms=50) as slow:
        assert len(slow.consume(2, 30)) == 2
        with member(cluster, tested) as other:
            assert len(other.consume(2, 30)) == 2
            assert slow.awaited() is None
        assert len(slow.consume(2, 30)) == 2
        assert told[:3] == [("assigned", [0, 1]), ("lost", [0, 1]), ("assigned", [0, 1])]


def test_a_consumer_that_waits_for_records_is_not_slow(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "_LOOK_SECONDS", 0.02)
    with member(cluster, tested, max_poll_interval_ms=50) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.poll(0) is None
        epoch = of(one)._epoch
        assert one.consume(1, 0.3) == []
        assert of(one)._epoch == epoch


def test_the_threads_of_a_consumer_that_nobody_has_any_more_end(cluster: LocalCluster, tested: str) -> None:
    def threads() -> set[threading.Thread]:
        names = ("kafkalog-member", "kafkalog-lease", "kafkalog-news")
        return {thread for thread in threading.enumerate() if thread.name in names}

    def read() -> None:
        one = member(cluster, tested)
        waited_for(lambda: partitions_of(one) == [0, 1])
        assert len(threads() - before) == 3

    before = threads()
    read()
    gc.collect()
    waited_for(lambda: not threads() - before)


# --- starts


def test_offsets_that_are_kept_elsewhere_are_sought_in_on_assigned(cluster: LocalCluster, tested: str) -> None:
    produce(cluster, tested, 0, 1)

    def place(consumer: Any, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            consumer.seek(partition, 1)

    with member(cluster, tested, {"on_assigned": place}, auto_offset_reset="error") as one:
        assert [message.offset for message in one.consume(2, 30)] == [1, 1]


def test_what_starts_nowhere_says_so_until_the_group_has_an_offset(cluster: LocalCluster, tested: str) -> None:
    first, second = (TopicPartition(tested, number) for number in (0, 1))
    with Admin(cluster.bootstrap_servers) as admin, member(cluster, tested, auto_offset_reset="error") as one:
        with pytest.raises(NoCommittedOffset, match=r"set auto\.offset\.reset"):
            one.poll(30)
        with pytest.raises(NoCommittedOffset):
            one.position(first)
        one.seek(second, 0)
        with pytest.raises(NoCommittedOffset, match=str(first)):
            one.poll(0)
        assert first not in admin.committed(tested), "nobody has said where"
        one.commit({first: 1})
        produce(cluster, tested, 0)

        def found() -> bool:
            try:
                message = one.poll(0.1)
            except NoCommittedOffset:
                return False
            return message is not None and message[1:3] == (0, 1)

        waited_for(found)


def test_a_topic_that_does_not_exist_is_told(
    cluster: LocalCluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with member(cluster, topic):
        waited_for(lambda: f"group_topic_does_not_exist_yet group={topic} topic={topic}" in caplog.text)


def test_a_member_for_which_a_broker_has_no_room_to_wait_asks_again_a_moment_later(
    cluster: LocalCluster, tested: str
) -> None:
    asked: list[float] = []

    def no_room(ask: Ask, method: str) -> Any:
        if method != "AwaitGroup":
            return ask()
        asked.append(time.monotonic())
        return pb.AwaitGroupReply(retry_after_ms=300)

    with member(cluster, tested) as one:
        waited_for(lambda: partitions_of(one) == [0, 1])
        with requests(no_room, one):
            waited_for(lambda: len(asked) > 3)
    assert all(later - earlier >= 0.3 for earlier, later in itertools.pairwise(asked))


# --- subscribing anew, and what callbacks may do


def test_who_waits_while_its_consumer_subscribes_anew_reads_on_as_a_member(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, max_poll_interval_ms=700) as one:
        assert len(one.consume(2, 30)) == 2
        assert one.poll(0) is None
        found: list[Message] = []
        reading = threading.Thread(target=lambda: found.extend(one.messages(max_messages=2)), daemon=True)
        reading.start()
        waited_for(lambda: bool(of(one)._reading))
        one.subscribe(tested)
        waited_for(lambda: len(one.assignment()) == 2)
        waited_for(lambda: bool(of(one)._reading), otherwise="who waits is no reader of the new membership")
        produce(cluster, tested, 0, 1)
        reading.join(30)
        assert len(found) == 2


def test_a_callback_cannot_read(cluster: LocalCluster, tested: str) -> None:
    told: list[str] = []

    def read(consumer: Any, _: list[TopicPartition]) -> None:
        for how in (consumer.poll, consumer.consume, lambda: next(consumer.messages())):
            with pytest.raises(InvalidArgument, match="a callback of a subscription cannot read") as raised:
                how()
            told.append(str(raised.value))

    with member(cluster, tested, {"on_assigned": read}) as one:
        assert len(one.consume(2, 30)) == 2
        assert len(told) == 3


def test_streams_of_a_subscribed_consumer_need_a_count(cluster: LocalCluster, tested: str) -> None:
    """A stream of one partition would end with it, and nobody would read the partition when it comes back."""
    with member(cluster, tested) as one:
        with pytest.raises(InvalidArgument, match=r"come and go: streams\(\) needs a count, as streams\(2\)"):
            one.streams()
        assert [offset_of(next(iter(stream))) for stream in one.streams(2)] == [0, 0]
        one.unsubscribe()
        assert one.streams() == []


@pytest.mark.parametrize("how", ["unsubscribe", "subscribe"])
def test_a_callback_cannot_read_after_it_left_the_group(cluster: LocalCluster, tested: str, how: str) -> None:
    told: list[str] = []

    def read(consumer: Any, _: list[TopicPartition]) -> None:
        if not told:
            told.append(how)
            consumer.subscribe(tested) if how == "subscribe" else consumer.unsubscribe()
            with pytest.raises(InvalidArgument, match="a callback of a subscription cannot read"):
                consumer.poll(30)

    with member(cluster, tested, {"on_assigned": read}) as one, suppress(InvalidArgument):
        one.poll(30)
    assert told == [how]


def test_a_callback_of_leaving_cannot_read(cluster: LocalCluster, tested: str) -> None:
    told: list[str] = []

    def read(consumer: Any, _: list[TopicPartition]) -> None:
        with pytest.raises(InvalidArgument, match="a callback of a subscription cannot read") as raised:
            consumer.poll(30)
        told.append(str(raised.value))

    with member(cluster, tested, {"on_revoked": read}) as one:
        assert one.poll(30)
        one.subscribe(tested, on_revoked=read)
        assert one.poll(30)
    assert len(told) == 2


@pytest.mark.parametrize("how", ["unsubscribe", "subscribe"])
def test_a_callback_that_raises_leaves_no_consumer_that_waits_for_nothing(
    cluster: LocalCluster, tested: str, how: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("it does not work")

    with member(cluster, tested, {"on_revoked": fail}) as one:
        assert one.poll(30)
        with pytest.raises(ValueError, match="it does not work"):
            one.unsubscribe() if how == "unsubscribe" else one.subscribe(tested)
        with pytest.raises(InvalidArgument, match="no partition is assigned"):
            one.poll(30)


def test_a_seek_ends_the_error_that_asks_for_it_at_once(cluster: LocalCluster, tested: str) -> None:
    with member(cluster, tested, auto_offset_reset="error") as one:
        with pytest.raises(NoCommittedOffset):
            one.poll(30)
        for partition in one.assignment():
            one.seek(partition, 0)
        assert len(one.consume(2, 30)) == 2


# --- the end


@contextmanager
def no_threads_left() -> Iterator[None]:
    """All threads of members that begin in the `with` block end too."""
    names = ("kafkalog-member", "kafkalog-lease", "kafkalog-news")
    before = set(threading.enumerate())
    yield
    join_all([t for t in threading.enumerate() if t.name in names and t not in before], 30)


_LEAVING = tuple(f"consumer/{each}.py" for each in ("consumer", "membership", "callbacks"))


def new_members(cluster: LocalCluster, topic: str, admin: Admin) -> Iterator[tuple[int, Consumer]]:
    """Members of groups of their own, one after the other, with their numbers. Each has to have left, by all that the
    brokers know, before the next one comes."""
    for number in range(1000):
        group = f"{topic}.{number}"
        one = Consumer(cluster.bootstrap_servers, group, auto_offset_reset="earliest", session_timeout_ms=60_000)
        one.subscribe(topic)
        assert one.poll(30)
        yield number, one
        one.close()
        waited_for(
            lambda group=group: not admin.describe_group(group).members,  # type: ignore[misc]
            otherwise=f"what came at place {number} left a member",
        )
    raise AssertionError("there are more places than that")


def test_a_member_whose_join_is_under_way_leaves_after_it(cluster: LocalCluster, tested: str) -> None:
    """The leave came first, and the member stayed for its session timeout."""
    joins, goes_on = threading.Event(), threading.Event()

    def slow(ask: Ask, method: str) -> Any:
        if method == "JoinGroup":
            joins.set()
            assert goes_on.wait(30)
        if method == "LeaveGroup":
            assert goes_on.is_set()
        return ask()

    with Admin(cluster.bootstrap_servers) as admin, requests(slow):
        one = Consumer(cluster.bootstrap_servers, tested, session_timeout_ms=60_000)
        one.subscribe(tested)
        assert joins.wait(30)
        closed_amid(one, 4, goes_on)
        assert not admin.describe_group(tested).members


def test_a_consumer_that_is_closed_before_it_asks_to_join_does_not(cluster: LocalCluster, tested: str) -> None:
    """The join came after the leave that was left out, and made a member that stayed for its session timeout."""
    connects, goes_on, connect = threading.Event(), threading.Event(), Brokers.connect
    asked: list[str] = []

    def slow(brokers: Brokers) -> None:
        connects.set()
        assert goes_on.wait(30)
        connect(brokers)

    def noted(ask: Ask, method: str) -> Any:
        asked.append(method)
        return ask()

    with no_threads_left(), requests(noted), patch.object(Brokers, "connect", slow):
        one = Consumer(cluster.bootstrap_servers, tested, session_timeout_ms=60_000)
        one.subscribe(tested)
        assert connects.wait(30)
        closed_amid(one, 1, goes_on)
    assert "JoinGroup" not in asked


def closed_amid(consumer: Consumer, seconds: float, goes_on: threading.Event) -> None:
    """Close a consumer whose member waits for something, which goes on once it is being closed."""
    closing = threading.Thread(target=consumer.close, args=(seconds,), daemon=True)
    closing.start()
    waited_for(lambda: of(consumer)._closing.is_set())
    goes_on.set()
    join_all([closing], 30)


@pytest.mark.parametrize("how", ["close", "unsubscribe", "subscribe"])
def test_an_interrupt_of_leaving_leaves_no_member_once_the_consumer_is_closed(
    cluster: LocalCluster, tested: str, how: str
) -> None:
    was_interrupted = True
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        for number, one in new_members(cluster, tested, admin):
            if not was_interrupted:
                one.close()
                return
            call = partial(one.subscribe, tested) if how == "subscribe" else getattr(one, how)
            was_interrupted = interrupted_at(number, call, *_LEAVING)
            with suppress(Closed, InvalidArgument):
                one.poll(0.01)


@pytest.mark.parametrize(("how", "above"), [("close", "close"), ("subscribe", "close"), ("subscribe", "subscribe")])
def test_a_signal_handler_anywhere_above_a_call_that_leaves_has_the_last_word(
    cluster: LocalCluster, tested: str, how: str, above: str
) -> None:
    was_interrupted = True

    def call(consumer: Consumer, what: str) -> None:
        with suppress(Closed):
            consumer.close() if what == "close" else consumer.subscribe(tested)

    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        for number, one in new_members(cluster, tested, admin):
            if not was_interrupted:
                one.close()
                return
            handler = partial(call, one, above)
            was_interrupted = interrupted_at(number, partial(call, one, how), *_LEAVING, handler=handler)
            if how == above == "subscribe":
                one.poll(0)  # it is subscribed
            else:
                assert one._fetcher._let_go_of or not was_interrupted, number


def committing(committed: list[int], meanwhile: Callable[[Consumer], object]) -> Callback:
    """As `on_revoked`, once: something happens in it before it commits."""

    def commit(consumer: Any, partitions: list[TopicPartition]) -> None:
        if not committed:
            committed.append(len(partitions))
            meanwhile(consumer)
            consumer.commit(dict.fromkeys(partitions, 1))

    return commit


def closed_elsewhere(consumer: Consumer) -> None:
    closing = threading.Thread(target=consumer.close, daemon=True)
    closing.start()
    closing.join(0.3)  # it is not to end before this callback does


@pytest.mark.parametrize("how", ["close", "unsubscribe", "subscribe"])
@pytest.mark.parametrize("second", [Consumer.close, closed_elsewhere])
def test_a_close_takes_no_commit_from_the_on_revoked_of_a_call_that_leaves(
    cluster: LocalCluster, tested: str, how: str, second: Callable[[Consumer], object]
) -> None:
    committed: list[int] = []
    one = member(cluster, tested, {"on_revoked": committing(committed, second)}, enable_auto_commit=False)
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        assert len(one.consume(2, 30)) == 2
        if how == "subscribe":
            with pytest.raises(Closed):
                one.subscribe(tested)
        else:
            getattr(one, how)()
        assert admin.committed(tested) == dict.fromkeys([TopicPartition(tested, 0), TopicPartition(tested, 1)], 1)
        waited_for(lambda: one._fetcher.closed)
        with pytest.raises(Closed):
            one.subscribe(tested)


def test_a_close_waits_for_an_on_revoked_of_a_thread_that_reads(cluster: LocalCluster, tested: str) -> None:
    committed: list[int] = []
    callbacks = {"on_revoked": committing(committed, closed_elsewhere)}
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        one = member(cluster, tested, callbacks, enable_auto_commit=False)
        assert len(one.consume(2, 30)) == 2
        assert one.poll(0) is None
        with member(cluster, tested):
            while one.poll(0.1) is None and not one._fetcher.closed:
                pass
        assert committed == [1]
        assert 1 in admin.committed(tested).values()


def test_who_subscribes_while_its_consumer_closes_is_no_member(cluster: LocalCluster, tested: str) -> None:
    raised: list[BaseException] = []

    def subscribe(consumer: Any) -> None:
        try:
            consumer.subscribe(tested)
        except Closed as error:
            raised.append(error)

    def revoked(consumer: Any, _: list[TopicPartition]) -> None:
        subscribe(consumer)
        other = threading.Thread(target=subscribe, args=[consumer])
        other.start()
        join_all([other], 30)

    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        with member(cluster, tested, {"on_revoked": revoked}, session_timeout_ms=60_000) as one:
            assert one.poll(30)
        assert len(raised) == 2
        assert not admin.describe_group(tested).members


def elsewhere(call: Callable[[], object]) -> None:
    threading.Thread(target=call, daemon=True).start()


@pytest.mark.parametrize("where", [lambda call: call(), elsewhere])
def test_the_last_one_of_several_subscriptions_at_once_is_the_one(
    cluster: LocalCluster, tested: str, where: Callable[[Callable[[], object]], object]
) -> None:
    def revoked(consumer: Any, _: list[TopicPartition]) -> None:
        before = consumer._wanted
        where(partial(consumer.subscribe, tested, on_assigned=lambda *_: last.set()))
        waited_for(lambda: consumer._wanted is not before)

    last = threading.Event()
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        with member(cluster, tested, {"on_revoked": revoked}, session_timeout_ms=60_000) as one:
            assert one.poll(30)
            one.subscribe("a.topic.that.is.not.there")
            assert one.poll(30)
            assert last.is_set()
            assert [each.subscription for each in admin.describe_group(tested).members] == [tested]
        assert not admin.describe_group(tested).members


def test_a_subscription_by_a_signal_handler_above_another_is_the_one(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        with Consumer(cluster.bootstrap_servers, tested, auto_offset_reset="earliest") as one:
            ahead(monkeypatch, threading.Thread, "start", lambda: one.subscribe(tested))
            one.subscribe("a.topic.that.is.not.there")
            assert one.poll(30)
            assert [each.subscription for each in admin.describe_group(tested).members] == [tested]
        assert not admin.describe_group(tested).members


@pytest.mark.parametrize("name", ["kafkalog-member", "kafkalog-lease", "kafkalog-news"])
def test_a_consumer_that_found_no_thread_is_no_member_and_may_subscribe_again(
    cluster: LocalCluster, tested: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with Admin(cluster.bootstrap_servers) as admin, no_threads_left():
        with Consumer(cluster.bootstrap_servers, tested, auto_offset_reset="earliest") as one:
            machine = NoThreads(monkeypatch, lambda each: each == name)
            with pytest.raises(OutOfThreads, match="can't start new thread"):
                one.subscribe(tested)
            with pytest.raises(InvalidArgument, match="no partition is assigned"):
                one.poll(30)
            machine.on = False
            one.subscribe(tested)
            assert one.poll(30)
        assert not admin.describe_group(tested).members
