"""The consumer against a real broker."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, AtTimestamp, Consumer, Message, Producer, TopicPartition
from kafkalog.client.cluster import BrokerInfo, Cluster
from kafkalog.client.consumer import cursors as cursors_module
from kafkalog.client.consumer import decode as decode_module
from kafkalog.client.consumer import fetcher as fetcher_module
from kafkalog.client.consumer.cursors import Cursor, Hand, Named
from kafkalog.client.consumer.decode import ARROW_SCHEMA
from kafkalog.client.consumer.fetcher import Source
from kafkalog.client.consumer.partition_fetch import FetchedBatch
from kafkalog.client.groups import offsets_with_epochs
from kafkalog.errors import (
    BrokerUnreachable,
    Closed,
    CorruptBatch,
    InvalidArgument,
    InvalidSetting,
    KafkalogError,
    NoCommittedOffset,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.net.data import DataConnection
from kafkalog.records import Messages
from tests.between import amid
from tests.damage import flip
from tests.interrupts import interrupted_at
from tests.proxy import DataPortProxy, ProxiedCluster, proxied
from tests.threads import join_all
from tests.waiting import suspend, waited_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def consumer(cluster: LocalCluster) -> Iterator[Consumer]:
    with Consumer(cluster.bootstrap_servers, group="readers") as connected:
        yield connected


@pytest.fixture
def filled(cluster: LocalCluster, admin: Admin, topic: str) -> TopicPartition:
    """A partition with records 0 to 99, ten a batch, their timestamps 1000, 1010, 1020 ..."""
    return filled_with(100, cluster, admin, topic)


def filled_with(count: int, cluster: LocalCluster, admin: Admin, topic: str) -> TopicPartition:
    """The only partition of a new topic, with records."""
    admin.create_topic(topic, partitions=1)
    fill(cluster, topic, count)
    return TopicPartition(topic, 0)


def fill(cluster: LocalCluster, topic: str, count: int, **settings: Any) -> None:
    with Producer(cluster.bootstrap_servers, **{"batch_records": 10, "linger_ms": 60_000, **settings}) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=0, timestamp_us=1000 + 10 * number)


def make_anew(cluster: LocalCluster, admin: Admin, name: str, count: int) -> None:
    """Delete a topic and make another of its name, with so many records."""
    admin.delete_topic(name)
    admin.create_topic(name, partitions=1)
    fill(cluster, name, count)


def numbers(messages: Iterator[Message]) -> list[int]:
    return [int(message.value or b"") for message in messages]


# --- where it starts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, first",
    [
        ("earliest", 0),
        (0, 0),
        (37, 37),
        (99, 99),
        (AtTimestamp(0), 0),
        (AtTimestamp(1500), 50),
        (AtTimestamp(1501), 51),
        (AtTimestamp(1990), 99),
    ],
)
def test_it_starts_at_the_given_offset(consumer: Consumer, filled: TopicPartition, start: Any, first: int) -> None:
    consumer.assign({filled: start})
    assert consumer.position(filled) == first
    assert numbers(consumer.messages(max_messages=100 - first, timeout=30)) == list(range(first, 100))
    assert consumer.position(filled) == 100


@pytest.mark.parametrize("start", ["latest", 100, AtTimestamp(1991)])
def test_it_starts_at_the_end(cluster: LocalCluster, consumer: Consumer, filled: TopicPartition, start: Any) -> None:
    consumer.assign({filled: start})
    assert list(consumer.messages(timeout=0)) == []
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(filled.topic, b"100", partition=0)
    assert numbers(consumer.messages(max_messages=1, timeout=30)) == [100]


@pytest.mark.parametrize("timeout", [-1, math.inf])
def test_threads_that_wait_for_ever_get_what_comes(
    cluster: LocalCluster, consumer: Consumer, filled: TopicPartition, timeout: float
) -> None:
    consumer.assign({filled: "latest"})
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(numbers(consumer.messages(1, timeout))), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    arrival: Any = consumer._fetcher._arrival
    waited_for(lambda: bool(arrival._waiters) or not any(thread.is_alive() for thread in threads))
    fill(cluster, filled.topic, 2)
    join_all(threads, 30)
    assert sorted(found) == [0, 1]


def test_nothing_more_is_handed_out_once_it_is_closed(consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: 0})
    iterators = [consumer.messages(), consumer.messages(50), iter(consumer.streams()[0])]
    assert numbers(next(each) for each in iterators) == [0, 1, 2]
    assert numbers(message for message in (consumer.poll(30), consumer.poll(30)) if message) == [3, 4]
    consumer.close()
    with pytest.raises(Closed):
        consumer.poll(0)
    assert [list(each) for each in iterators] == [[], [], []]


def test_nothing_is_handed_out_once_a_signal_handler_has_closed_it_amid_the_taking(
    consumer: Consumer, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.assign({filled: 0})
    amid(monkeypatch, cursors_module, "Rows", consumer.close)
    assert list(consumer.messages(timeout=30)) == []


def test_it_continues_where_its_group_has_committed(cluster: LocalCluster, filled: TopicPartition) -> None:
    group = f"group.{filled.topic}"[:200]
    with Consumer(cluster.bootstrap_servers, group) as first:
        first.assign({filled: "earliest"})
        assert first.committed() == {}
        assert numbers(first.messages(max_messages=33, timeout=30)) == list(range(33))
        first.commit()
        assert first.committed() == {filled: 33}
    with Consumer(cluster.bootstrap_servers, group) as second:
        second.assign({filled: "committed"})
        assert numbers(second.messages(max_messages=2, timeout=30)) == [33, 34]
        second.commit({filled: 5})
        assert second.committed([filled]) == {filled: 5}
        assert second.committed([]) == {}
    with Admin(cluster.bootstrap_servers) as admin:
        assert admin.committed(group) == {filled: 5}
        admin.commit(group, {filled: 7})
        assert admin.committed(group, [filled.topic]) == {filled: 7}


def test_commits_of_an_assigned_consumer_are_numbered_and_a_forked_one_counts_for_itself(
    cluster: LocalCluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Consumer(cluster.bootstrap_servers, f"group.{filled.topic}"[:200]) as consumer:
        consumer.assign({filled: "earliest"})
        sent: list[tuple[int, int]] = []
        call = consumer._cluster.call

        def noted(method: str, request: Any, **more: Any) -> Any:
            if method == "CommitOffsets":
                sent.append((request.writer, request.order))
            return call(method, request, **more)

        monkeypatch.setattr(consumer._cluster, "call", noted)
        consumer.commit({filled: 5})
        consumer.commit({filled: 3})
        assert consumer.committed() == {filled: 3}
        consumer._after_fork_in_child()
        consumer.commit({filled: 4})
        assert consumer.committed([filled]) == {filled: 4}
    (parent, first), (same, second), (child, _) = sent
    assert first < second
    assert parent == same != child
    assert min(parent, child) > 0


def test_a_group_without_a_commit(cluster: LocalCluster, filled: TopicPartition) -> None:
    group = f"none.{filled.topic}"[:200]
    told = pytest.raises(NoCommittedOffset, match=f"group '{group}' has committed no offset for {filled}")
    with Consumer(cluster.bootstrap_servers, group) as consumer, told:
        consumer.assign({filled: "committed"})
    for fallback, position in (("earliest", 0), ("latest", 100)):
        with Consumer(cluster.bootstrap_servers, group, committed_fallback=fallback) as consumer:
            consumer.assign({filled: "committed"})
            assert consumer.position(filled) == position


@pytest.mark.parametrize(
    "start, sentence",
    [
        ("begin", "'begin' is not a start in"),
        (-1, "-1 is not a start in"),
        (1.5, "1.5 is not a start in"),
        (True, "True is not a start in"),
    ],
)
def test_a_wrong_start(consumer: Consumer, filled: TopicPartition, start: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        consumer.assign({filled: start})
    assert sentence in str(raised.value)


def test_assign_refuses_unknown_topics_and_partitions(
    consumer: Consumer, filled: TopicPartition, new_topic: Callable[[], str]
) -> None:
    missing = new_topic()
    for start in ("earliest", 0):
        with pytest.raises(UnknownTopic, match=f"there is no topic '{missing}'"):
            consumer.assign({TopicPartition(missing, 0): start})
        with pytest.raises(UnknownPartition, match="has no partition 1; it has 1"):
            consumer.assign({TopicPartition(filled.topic, 1): start})


def test_calls_without_a_group_or_an_assignment_are_refused(cluster: LocalCluster, filled: TopicPartition) -> None:
    with Consumer(cluster.bootstrap_servers) as consumer:
        with pytest.raises(InvalidArgument, match="no partition is assigned"):
            next(iter(consumer))
        with pytest.raises(InvalidArgument, match="this consumer has no group"):
            consumer.assign({filled: "committed"})
        consumer.assign({filled: "earliest"})
        for call in (consumer.commit, consumer.committed):
            with pytest.raises(InvalidArgument, match="this consumer has no group"):
                call()
        other = TopicPartition(filled.topic, 7)
        for misplaced in (lambda: consumer.position(other), lambda: consumer.seek(other, 0)):
            with pytest.raises(InvalidArgument, match=f"{other} is not assigned"):
                misplaced()
    with pytest.raises(InvalidSetting, match=r"auto\.offset\.reset='none' is not valid"):
        Consumer(cluster.bootstrap_servers, auto_offset_reset="none")


# --- what counts as processed ----------------------------------------------------------------------------------------


@pytest.fixture
def grouped(cluster: LocalCluster, filled: TopicPartition) -> Iterator[Consumer]:
    """A consumer of a group of its own, assigned to the partition from its start."""
    with Consumer(cluster.bootstrap_servers, group=filled.topic) as connected:
        connected.assign({filled: "earliest"})
        yield connected


def begin_to_read(consumer: Consumer, partition: TopicPartition, is_subscribed: bool) -> None:
    """From its first record, as a member of the group or by itself."""
    if is_subscribed:
        consumer.subscribe(partition.topic)
    else:
        consumer.assign({partition: 0})


def commit_elsewhere(consumer: Consumer) -> None:
    """As a timer's thread would, or one that takes the partition away."""
    elsewhere = threading.Thread(target=consumer.commit)
    elsewhere.start()
    join_all([elsewhere], 60)


@pytest.mark.parametrize("is_subscribed", [False, True])
def test_an_offset_by_number_is_committed_with_a_leader_epoch_only_where_the_consumer_stands(
    cluster: LocalCluster, filled: TopicPartition, is_subscribed: bool
) -> None:
    """Another one may be past what it has read, or be of the log before it was cut: a restart would be told wrongly. A
    message has its own."""
    group = filled.topic
    with Consumer(cluster.bootstrap_servers, group, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        begin_to_read(consumer, filled, is_subscribed)

        def committed(done: Any) -> tuple[int, bool]:
            consumer.commit(done)
            offset, epoch = offsets_with_epochs(consumer._cluster, group, [filled.topic])[filled]
            return offset, epoch is not None

        messages = consumer.messages(timeout=30)
        first, last = [next(messages) for _ in range(10)][::9]
        assert committed({filled: 80}) == (80, False), "it comes from elsewhere"
        assert committed(first) == (1, True)
        assert committed({filled: 2}) == (2, False), "it was read before"
        assert committed(last) == (10, True)
        assert committed({filled: 9}) == (9, True), "it is in hand"
        assert committed([first, last]) == (10, True)
        assert committed([first._replace(leader_epoch=last.leader_epoch + 1), last]) == (1, True), "it was read later"
        assert committed(first._replace(offset=4, leader_epoch=-1)) == (5, False)
        if not is_subscribed:
            assert committed(None) == (9, True)
        source = consumer._cursors.by_partition[filled].source
        source.reset(5)  # the log was cut there, and what has arrived before is handed out still
        assert source.reader.read_in is None
        assert committed({filled: 9}) == (9, True), "of the log before it was cut"
        batch = next(consumer.arrow_batches(timeout=30))
        end = batch.column("offset")[-1].as_py() + 1
        source.reset(5)
        assert committed(batch) == (end, True)


@pytest.mark.parametrize("iterate", ["consumer", "messages", "stream"])
def test_the_message_in_hand_is_left_out_of_a_commit_from_elsewhere(
    grouped: Consumer, filled: TopicPartition, iterate: str
) -> None:
    sources: dict[str, Iterable[Message]]
    sources = {"consumer": grouped, "messages": grouped.messages(100), "stream": grouped.streams()[0]}
    source = sources[iterate]
    for message in source:
        if message.offset in (0, 9, 10, 77):
            assert grouped.position(filled) == message.offset
            commit_elsewhere(grouped)
            assert grouped.committed() == {filled: message.offset}
            grouped.commit()
            assert grouped.committed() == {filled: message.offset}
            grouped.commit(message)
            assert grouped.committed() == {filled: message.offset + 1}
        if message.offset == 77:
            break
    assert message.offset == 77


def test_what_an_iterator_has_behind_it_is_processed_while_it_waits(
    cluster: LocalCluster, grouped: Consumer, filled: TopicPartition
) -> None:
    in_hand, go_on = threading.Event(), threading.Event()

    def read() -> None:
        for message in grouped:
            if message.offset == 99:
                in_hand.set()
                go_on.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    assert in_hand.wait(60)
    grouped.commit()
    assert grouped.committed() == {filled: 99}
    go_on.set()
    waited_for(lambda: grouped.position(filled) == 100)
    grouped.commit()
    assert grouped.committed() == {filled: 100}
    grouped.close()
    join_all([reader], 60)


@pytest.mark.parametrize("last", [1, 10, 13, 100])
def test_lists_of_messages_are_processed_as_a_whole(grouped: Consumer, filled: TopicPartition, last: int) -> None:
    assert len(list(grouped.messages(max_messages=last, timeout=30))) == last
    assert grouped.position(filled) == last
    list(grouped.messages(timeout=0.1))
    assert grouped.position(filled) == 100


@pytest.mark.parametrize("again", ["messages", "arrow"])
def test_a_message_that_a_loop_was_left_with_is_processed_once_another_is_asked_for(
    grouped: Consumer, filled: TopicPartition, again: str
) -> None:
    for message in grouped:
        if message.offset == 20:
            break
    grouped.commit()
    assert grouped.committed() == {filled: 20}
    if again == "messages":
        assert next(iter(grouped)).offset == 21
        assert grouped.position(filled) == 21
    else:
        batch = next(grouped.arrow_batches())
        assert batch.column("offset")[0].as_py() == 21
        assert grouped.position(filled) == 21


@pytest.mark.parametrize("other", ["running", "made"])
def test_what_one_iterator_failed_with_is_not_committed_by_one_that_was_there_already(
    grouped: Consumer, filled: TopicPartition, other: str
) -> None:
    failing, going_on = grouped.messages(timeout=5), grouped.messages(timeout=0)
    assert next(failing).offset == 0
    if other == "running":
        assert next(going_on).offset == 1
    del failing  # as an error in the body of its loop leaves it
    assert [message.offset for message in going_on][-1] == 99
    commit_elsewhere(grouped)
    assert grouped.committed() == {filled: 0}
    assert list(grouped.messages(timeout=0)) == []  # who begins anew goes on
    assert grouped.position(filled) == 100


def test_an_arrow_batch_that_one_iterator_failed_with_is_not_committed_by_another(
    grouped: Consumer, filled: TopicPartition
) -> None:
    failing, going_on = grouped.arrow_batches(timeout=5), grouped.messages(timeout=0)
    assert next(failing).num_rows > 0
    del failing
    assert list(going_on) == []
    assert grouped.position(filled) == 0


def test_of_several_hands_the_one_furthest_back_counts(grouped: Consumer, filled: TopicPartition) -> None:
    slow, quick = grouped.messages(timeout=5), grouped.messages(timeout=0)
    assert next(slow).offset == 0
    assert [next(quick).offset for _ in range(55)] == list(range(1, 56))
    assert grouped.position(filled) == 0
    assert next(slow).offset == 56
    assert grouped.position(filled) == 55
    assert [message.offset for message in quick] == list(range(57, 100))
    assert grouped.position(filled) == 56
    assert list(quick) == []
    commit_elsewhere(grouped)
    assert grouped.committed() == {filled: 56}


def test_the_hands_of_an_earlier_place_or_assignment_count_no_more(grouped: Consumer, filled: TopicPartition) -> None:
    held = iter(grouped)
    assert next(held).offset == 0
    grouped.seek(filled, 50)
    assert grouped.position(filled) == 50
    assert next(held).offset == 50
    grouped.assign({filled: 70})
    assert grouped.position(filled) == 70
    assert next(held).offset == 70
    assert grouped.position(filled) == 70


def test_an_arrow_batch_in_hand_is_left_out_of_a_commit(grouped: Consumer, filled: TopicPartition) -> None:
    first = 0
    for batch in grouped.arrow_batches(timeout=0.1):
        assert grouped.position(filled) == first
        commit_elsewhere(grouped)
        assert grouped.committed() == {filled: first}
        first += batch.num_rows
        grouped.commit(batch)
        assert grouped.committed() == {filled: first}
    assert first == grouped.position(filled) == 100


# --- going on --------------------------------------------------------------------------------------------------------


def test_an_iterator_left_in_the_middle_continues_in_the_next(consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: "earliest"})
    seen = []
    for message in consumer:
        seen.append(int(message.value or b""))
        assert consumer.position(filled) == message.offset
        if len(seen) == 7:
            break
    seen += numbers(consumer.messages(max_messages=5, timeout=30))
    held = consumer.messages(timeout=30)
    seen.append(int(next(held).value or b""))
    seen.append(int(next(iter(consumer)).value or b""))
    seen.append(int(next(held).value or b""))
    seen += numbers(consumer.messages(max_messages=85, timeout=30))
    assert seen == list(range(100))


def test_messages_and_arrow_take_turns(consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: "earliest"})
    assert numbers(consumer.messages(max_messages=13, timeout=30)) == list(range(13))
    seen = []
    for batch in consumer.arrow_batches(timeout=30):
        seen += batch.column("offset").to_pylist()
        assert batch.column("value").to_pylist() == [b"%d" % offset for offset in batch.column("offset").to_pylist()]
        assert consumer.position(filled) == batch.column("offset")[0].as_py()
        if seen[-1] == 99:
            break
    assert seen == list(range(13, 100))


def test_a_large_batch_is_handed_out_whole_whichever_way(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    where = TopicPartition(topic, 0)
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send_arrow(topic, pa.table({"value": [b"%d" % number for number in range(10_000)]}), partition=0)
        producer.send(topic, b"10000", partition=0)
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({where: "earliest"})
        assert numbers(consumer.messages(max_messages=10_001, timeout=30)) == list(range(10_001))
        consumer.seek(where, 17)
        seen = numbers(consumer.messages(max_messages=1500, timeout=30))
        assert consumer.position(where) == 1517
        seen += [int(value) for value in next(consumer.arrow_batches(timeout=30)).column("value").to_pylist()]
        seen += numbers(consumer.messages(max_messages=10_001 - 17 - len(seen), timeout=30))
        assert seen == list(range(17, 10_001))
        assert consumer.position(where) == 10_001


@pytest.mark.parametrize("where, first", [(0, 0), (42, 42), ("earliest", 0), (AtTimestamp(1200), 20)])
def test_seek_goes_back_and_forth(consumer: Consumer, filled: TopicPartition, where: Any, first: int) -> None:
    consumer.assign({filled: "earliest"})
    held = consumer.messages(timeout=30)
    assert [next(held).offset for _ in range(35)] == list(range(35))
    consumer.seek(filled, where)
    assert consumer.position(filled) == first
    assert next(held).offset == first
    consumer.seek(filled, "latest")
    assert list(consumer.messages(timeout=0)) == []
    consumer.seek(filled, where)
    assert numbers(consumer.messages(max_messages=100 - first, timeout=30)) == list(range(first, 100))


def test_an_answer_to_what_was_asked_before_a_seek_is_of_no_use_after_it(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    where = TopicPartition(topic, 0)
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(10):  # a batch for each, and so an answer
            producer.send(topic, bytes(2000), partition=0).result(30)
    with Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=1024) as consumer:
        consumer.assign({where: "earliest"})
        for _ in range(3):
            assert [message.offset for message in consumer.messages(max_messages=1, timeout=30)] == [0]
            consumer.seek(where, 0)  # what comes next was asked for already
        assert [message.offset for message in consumer.messages(max_messages=10, timeout=30)] == list(range(10))


def test_max_messages_counts_what_was_handed_out(consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: "earliest"})
    seen: list[int] = []
    for message in consumer.messages(max_messages=100, timeout=30):
        seen.append(message.offset)
        if len(seen) == 3:
            consumer.seek(filled, 0)
        if len(seen) == 20:
            assert numbers(consumer.messages(max_messages=2, timeout=30)) == [17, 18]
    assert seen == [0, 1, 2, *range(17), *range(19, 99)]


def test_a_new_assignment_replaces_the_old(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition, new_topic: Callable[[], str]
) -> None:
    other = filled_with(10, cluster, admin, new_topic())
    consumer.assign({filled: "earliest"})
    assert len(list(consumer.messages(max_messages=5, timeout=30))) == 5
    consumer.assign({other: "earliest"})
    assert consumer.assignment() == [other]
    assert [message.topic for message in consumer.messages(max_messages=10, timeout=30)] == [other.topic] * 10


@pytest.mark.parametrize("iterate", ["messages", "stream"])
def test_a_waiting_iterator_continues_with_a_new_assignment(
    cluster: LocalCluster, consumer: Consumer, filled: TopicPartition, iterate: str
) -> None:
    consumer.assign({filled: "latest"})
    found: list[Message] = []
    source = consumer if iterate == "messages" else consumer.streams()[0]
    reading = threading.Thread(target=lambda: found.extend(source.messages(max_messages=1)), daemon=True)
    reading.start()
    while consumer._fetcher._driver is None:
        threading.Event().wait(0.001)
    consumer.assign({filled: 97})
    reading.join(30)
    assert [message.offset for message in found] == [97]


def test_an_iterator_continues_with_what_is_assigned_or_left_to_it(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition, new_topic: Callable[[], str]
) -> None:
    """Of what was taken away it hands out nothing more, although it has some at hand."""
    other = filled_with(100, cluster, admin, new_topic())
    consumer.assign({filled: "earliest"})
    iterator = consumer.messages(timeout=30)
    assert next(iterator)[:3] == (*filled, 0)
    consumer.assign({other: "earliest"})
    assert [next(iterator)[:3] for _ in range(15)] == [(*other, offset) for offset in range(15)]
    consumer.assign({filled: 20, other: 20})
    topic, number, offset = next(iterator)[:3]
    assert offset == 20
    gone = TopicPartition(topic, number)
    [left] = {filled, other} - {gone}
    consumer.unassign([gone])
    assert [next(iterator)[:3] for _ in range(80)] == [(*left, offset) for offset in range(20, 100)]


def test_what_an_iterator_left_of_its_rows_is_given_to_one_that_waits(
    consumer: Consumer, filled: TopicPartition
) -> None:
    consumer.assign({filled: 0})
    assert len(list(consumer.messages(max_messages=2))) == 2
    consumer.assign({filled: 90})
    mine = consumer.messages()
    assert next(mine).offset == 90
    found: list[Message] = []
    reading = threading.Thread(target=lambda: found.extend(consumer.messages(max_messages=9)), daemon=True)
    reading.start()
    waited_for(lambda: consumer._fetcher._driver is not None or bool(found))
    mine.close()  # type: ignore[attr-defined]
    reading.join(20)
    assert [message.offset for message in found] == list(range(91, 100))


def test_partitions_that_came_to_be_asked_for_apart_wait_together_and_not_for_each_other(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    """A second request ends the wait of the first: two of them would go round and round."""
    admin.create_topic(topic, partitions=2)
    first, second = (TopicPartition(topic, number) for number in range(2))
    with Consumer(cluster.bootstrap_servers, fetch_max_wait_ms=20_000) as consumer:
        consumer.assign({first: "earliest", second: "earliest"})
        consumer.pause([second])
        assert consumer.poll(0.5) is None
        consumer.resume([second])
        assert consumer.poll(0.5) is None
        [link] = consumer._fetcher._links.values()
        before = link.next_id()
        assert consumer.poll(1.0) is None
        assert link.next_id() - before < 5
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send(topic, b"x", partition=1).result(10)
        begun = time.monotonic()
        assert consumer.poll(40) is not None
        assert time.monotonic() - begun < 10, "both are waited for"


def test_a_partition_that_is_resumed_is_asked_for_at_once_though_the_last_answer_had_nothing_of_it(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    """Records may have come since. A broker lets the request for the others wait for 30 s."""
    admin.create_topic(topic, partitions=2)
    first, second = (TopicPartition(topic, number) for number in range(2))
    with Consumer(cluster.bootstrap_servers, fetch_max_wait_ms=30_000) as consumer:
        consumer.assign({first: "earliest", second: "earliest"})
        source = consumer._cursors.of(second).source
        waited_for(lambda: consumer.poll(0.05) is None and source.asked is not None)
        consumer.pause([second])
        consumer.seek(first, 0)  # it is asked for alone then, which ends the wait for both
        waited_for(lambda: consumer.poll(0.05) is None and source.asked is None and source.is_dry)
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send(topic, b"x", partition=1).result(10)
        consumer.resume([second])
        assert consumer.poll(15) is not None


@pytest.mark.parametrize("how", ["seek", "assign", "unassign"])
def test_a_wait_for_a_broker_ends_at_once_when_assignment_or_position_changes(
    cluster: LocalCluster, admin: Admin, filled: TopicPartition, how: str
) -> None:
    """A broker lets it wait for 30 s."""
    found: list[Message] = []
    told: list[BaseException] = []
    with Consumer(cluster.bootstrap_servers, fetch_max_wait_ms=600_000) as consumer:
        consumer.assign({filled: "latest"})

        def read() -> None:
            try:
                found.extend(consumer.messages(max_messages=1))
            except InvalidArgument as error:
                told.append(error)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        waited_for(lambda: any(link.count for link in list(consumer._fetcher._links.values())))
        if how == "seek":
            consumer.seek(filled, 97)
        elif how == "assign":
            consumer.assign({filled: 97})
        else:
            consumer.unassign([filled])
        reading.join(20)
        assert not reading.is_alive()
    assert [message.offset for message in found] == ([] if how == "unassign" else [97])
    assert len(told) == (how == "unassign")


@pytest.mark.parametrize("iterate", ["messages", "stream"])
def test_a_waiting_iterator_whose_partition_is_unassigned_raises(
    consumer: Consumer, filled: TopicPartition, iterate: str
) -> None:
    consumer.assign({filled: "latest"})
    source = consumer if iterate == "messages" else consumer.streams()[0]
    told: list[BaseException] = []

    def read() -> None:
        try:
            list(source.messages())
        except InvalidArgument as error:
            told.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    while consumer._fetcher._driver is None:
        threading.Event().wait(0.001)
    consumer.assign({})
    reading.join(30)
    sentence = "no partition is assigned" if iterate == "messages" else f"{filled} is not assigned to this consumer"
    assert [sentence in str(error) for error in told] == [True]


def test_a_blocked_iterator_wakes_for_a_new_record(
    cluster: LocalCluster, consumer: Consumer, filled: TopicPartition
) -> None:
    consumer.assign({filled: "latest"})
    found: list[Message] = []
    reading = threading.Thread(target=lambda: found.extend(consumer.messages(max_messages=1)))
    reading.start()
    waited_for(lambda: any(link.count for link in list(consumer._fetcher._links.values())))
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(filled.topic, b"new", partition=0)
    join_all([reading], 30)
    assert [message.value for message in found] == [b"new"]


def test_timeout_bounds_the_wait_for_the_next_message(consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: 98})
    started = time.monotonic()
    assert numbers(consumer.messages(timeout=0.2)) == [98, 99]
    assert 0.2 <= time.monotonic() - started < 10


def test_a_timeout_of_zero_does_not_wait(cluster: LocalCluster, consumer: Consumer, filled: TopicPartition) -> None:
    consumer.assign({filled: "latest"})
    waited_for(lambda: consumer.poll(0) is None and any(link.count for link in consumer._fetcher._links.values()))

    def polled() -> float:
        began = time.perf_counter()
        assert consumer.poll(0) is None
        return time.perf_counter() - began

    assert min(polled() for _ in range(100)) < 0.001
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(filled.topic, b"100", partition=0)
    waited_for(lambda: consumer.poll(0) is not None)


def test_records_larger_than_a_fetch_come_all_the_same(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(6):
            producer.send(topic, bytes([number]) * 300_000, partition=number % 2)
    with Consumer(cluster.bootstrap_servers, fetch_max_bytes=1000, max_partition_fetch_bytes=1000) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in (0, 1)})
        found = list(consumer.messages(max_messages=6, timeout=30))
    assert sorted((m.value or b"")[0] for m in found) == list(range(6))
    assert {len(m.value or b"") for m in found} == {300_000}


# --- offsets that are gone -------------------------------------------------------------------------------------------


def delete_to_60(cluster: LocalCluster, admin: Admin, topic: str) -> TopicPartition:
    admin.create_topic(topic, partitions=1)
    fill(cluster, topic, 100)
    admin.delete_records({TopicPartition(topic, 0): 60})
    return TopicPartition(topic, 0)


@pytest.mark.parametrize("offset", [10, 500])
def test_an_offset_out_of_range_is_reported(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, topic: str, offset: int
) -> None:
    gone = delete_to_60(cluster, admin, topic)
    consumer.assign({gone: offset})
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match=rf"offset {offset} of {gone} is outside \[60, 100\]"):
            next(consumer.messages(timeout=30))
    consumer.seek(gone, "earliest")
    assert numbers(consumer.messages(max_messages=40, timeout=30)) == list(range(60, 100))


@pytest.mark.parametrize("offset", [10, 500])
@pytest.mark.parametrize("policy, first", [("earliest", 60), ("latest", 100)])
def test_an_offset_out_of_range_is_reset_as_the_setting_says(
    cluster: LocalCluster, admin: Admin, topic: str, offset: int, policy: str, first: int
) -> None:
    gone = delete_to_60(cluster, admin, topic)
    with Consumer(cluster.bootstrap_servers, auto_offset_reset=policy) as consumer:
        consumer.assign({gone: offset})
        assert len(list(consumer.messages(max_messages=100 - first, timeout=30))) == 100 - first
        while consumer._cursors.by_partition[gone].source.reader.offset != 100:
            assert list(consumer.messages(timeout=0.02)) == []
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send(topic, b"100", partition=0)
        assert next(consumer.messages(timeout=30)).offset == 100


@pytest.mark.parametrize(("policy", "at"), [("earliest", 60), ("latest", 100)])
def test_a_position_is_where_the_reset_went_before_anything_has_come(
    cluster: LocalCluster, admin: Admin, topic: str, policy: str, at: int
) -> None:
    """What was committed, else, is out of range again, and what came until then would be skipped."""
    gone = delete_to_60(cluster, admin, topic)
    with Consumer(cluster.bootstrap_servers, group=topic, auto_offset_reset=policy) as consumer:
        consumer.assign({gone: 10})
        if policy == "latest":
            assert list(consumer.messages(timeout=0.5)) == []
        else:
            assert next(consumer.messages(timeout=30)).offset == 60
        assert consumer.position(gone) == at
        consumer.commit()
        assert consumer.committed() == {gone: at}


@pytest.mark.parametrize(("first", "next_offset", "is_there"), [(None, 60, True), (60, 60, True), (50, 10, False)])
def test_a_reset_is_over_with_the_first_batch_from_where_it_went(
    first: int | None, next_offset: int, is_there: bool
) -> None:
    """What arrived before it comes first."""
    source = fetcher_module.Source(TopicPartition("t", 0), b"t" * 16, 10)
    source.reset_to = 60
    if first is not None:
        source.arrived.append(arrived(first, first + 10))
    cursor = cursors_module.Cursor(source)
    assert cursor.next_offset() == next_offset
    assert (source.reset_to is None) is is_there


def arrived(offset: int, end_offset: int) -> FetchedBatch:
    header: Any = SimpleNamespace(length=1, end_offset=end_offset, record_count=1)
    return FetchedBatch(header, memoryview(b""), offset)


def test_what_has_arrived_of_a_log_that_was_cut_since_is_not_handed_out() -> None:
    source = fetcher_module.Source(TopicPartition("t", 0), b"t" * 16, 10)
    cursor = cursors_module.Cursor(source)
    old = [arrived(10, 20), arrived(20, 30), arrived(30, 40)]
    source.put_back(old)
    source.reader.go_to(40, 3)
    source.reset(30, 2)
    source.reset(20)  # cut again, before the first answer
    assert (list(source.arrived), source.arrived_bytes, source.reader.offset) == (old[:1], 1, 20)
    assert (source.reader.read_in, cursor.read_in()) == (None, 3), "what is handed out is of the log from before"
    new = arrived(20, 25)
    source.arrived.append(new)
    assert cursor.next_offset() == 10
    assert source.take(1000, 1 << 20) == old[:1]
    source.put_back(old[:2])  # as of a partition that is held
    assert list(source.arrived) == [old[0], new]
    source.take(1, 1)
    assert (cursor.next_offset(), source.reset_to) == (20, None)
    source.reset(22)  # in the middle of a batch: what is before it is fetched again
    assert (list(source.arrived), source.reader.offset, source.reset_to) == ([], 20, 20)
    assert cursor.next_offset() == 20


def test_a_restart_keeps_the_leader_epoch_of_what_was_read_and_a_seek_does_not() -> None:
    """Without it nobody finds out that the log was cut meanwhile."""
    source = fetcher_module.Source(TopicPartition("t", 0), b"t" * 16, 10, 3)
    cursor = cursors_module.Cursor(source)
    cursor.cut()
    cursor.restart()
    assert (source.reader.offset, cursor.read_in()) == (10, 3)
    source.reset(5)
    cursor.resume = 10
    cursor.restart()
    assert (source.reader.offset, source.reset_to, cursor.read_in()) == (10, None, 3), (
        "its leader says again where it ends"
    )
    cursor.seek(10)
    assert (source.reader.offset, cursor.read_in()) == (10, None)
    source.reader.go_to(20, 4)  # as after an answer
    cursor.cut()
    cursor.restart()
    assert (source.reader.offset, cursor.read_in()) == (10, 4), "only the restart of the seek forgets it"


def test_a_topic_deleted_under_a_consumer_is_reported(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition
) -> None:
    consumer.assign({filled: "earliest"})
    assert len(list(consumer.messages(max_messages=100, timeout=30))) == 100
    admin.delete_topic(filled.topic)
    with pytest.raises(UnknownTopic, match=f"there is no topic '{filled.topic}'"):
        next(consumer.messages(timeout=30))


def test_a_topic_created_again_is_not_taken_for_the_old_one(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition
) -> None:
    consumer.assign({filled: "earliest"})
    assert len(list(consumer.messages(max_messages=100, timeout=30))) == 100
    make_anew(cluster, admin, filled.topic, 5)
    with pytest.raises(UnknownTopicId, match="no topic has the id"):
        next(consumer.messages(timeout=30))


@pytest.mark.parametrize("is_subscribed", [False, True])
def test_messages_of_a_topic_that_was_created_again_are_left_out_of_a_commit(
    cluster: LocalCluster, admin: Admin, filled: TopicPartition, is_subscribed: bool
) -> None:
    """Their offsets are beyond what was read of the new topic, and were committed for it."""
    group = filled.topic
    with Consumer(cluster.bootstrap_servers, group, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        begin_to_read(consumer, filled, is_subscribed)
        old = list(consumer.messages(max_messages=50, timeout=30))
        make_anew(cluster, admin, filled.topic, 5)
        if not is_subscribed:
            consumer.assign({filled: 0})
        new: list[Message] = []
        while len(new) < 2:
            message = consumer.poll(30)
            assert message is not None
            if message.topic_id != old[0].topic_id:  # what had arrived of the old one comes first
                new.append(message)
        consumer.commit([*old, *new, *old])
        assert consumer.committed([filled]) == {filled: 2}
        consumer.commit(old[-1])
        assert consumer.committed([filled]) == {filled: 2}


@pytest.mark.parametrize("start", [0, "earliest"])
def test_a_topic_created_again_is_read_once_it_is_assigned_again(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition, start: int | str
) -> None:
    consumer.assign({filled: 0})
    assert len(list(consumer.messages(max_messages=100, timeout=30))) == 100
    make_anew(cluster, admin, filled.topic, 5)
    consumer.assign({filled: start})
    assert numbers(consumer.messages(max_messages=5, timeout=30)) == list(range(5))


@pytest.mark.parametrize("done", ["position", "message", "offsets"])
def test_a_topic_created_again_gets_no_offset_of_the_old_one(
    cluster: LocalCluster, admin: Admin, grouped: Consumer, filled: TopicPartition, done: str
) -> None:
    grouped.assign({filled: "earliest"})
    messages = list(grouped.messages(max_messages=50))
    make_anew(cluster, admin, filled.topic, 100)
    given = {"position": None, "message": messages[-1], "offsets": {filled: 50}}[done]
    with pytest.raises(UnknownTopicId, match=filled.topic):
        grouped.commit(given)
    assert grouped.committed() == {}


@pytest.mark.parametrize("done", ["message", "offsets"])
def test_a_topic_created_again_gets_no_offset_of_the_old_one_that_was_unassigned(
    cluster: LocalCluster, admin: Admin, grouped: Consumer, filled: TopicPartition, done: str
) -> None:
    grouped.assign({filled: "earliest"})
    messages = list(grouped.messages(max_messages=50))
    make_anew(cluster, admin, filled.topic, 100)
    grouped.unassign([filled])
    given: Any = {"message": messages[-1], "offsets": {filled: 50}}[done]
    with pytest.raises(UnknownTopicId, match=filled.topic):
        grouped.commit(given)
    grouped.assign({})
    with pytest.raises(UnknownTopicId, match=filled.topic):
        grouped.commit(given)
    assert grouped.committed([filled]) == {}
    grouped.assign({filled: "earliest"})  # the new one
    for _ in grouped.messages(max_messages=7):
        pass
    grouped.commit()
    assert grouped.committed() == {filled: 7}


HANDING_OUT = ("client/consumer/consumer.py", "client/consumer/cursors.py")
OURS = (
    *HANDING_OUT,
    *(f"client/consumer/{name}.py" for name in ("fetcher", "range_fetch", "decode")),
    "client/link.py",
    "net/data.py",
)


@pytest.mark.parametrize(
    "how",
    [
        *("messages", "messages of a stream", "messages of a member", "some messages of a member", "poll of a member"),
        *("lists of a member", "long lists", "long lists of a member", "arrow", "seek"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hit a generator's end
def test_an_interrupt_anywhere_loses_no_record(
    cluster: LocalCluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each place of some messages or batches once; the next iterator goes on where that one was left."""
    monkeypatch.setattr(cursors_module, "ROWS_AT_ONCE", 4)  # of a batch of ten records
    monkeypatch.setattr(decode_module, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(cursors_module, "_ARROW_ROWS", 25)
    for place in count():
        seen: list[int] = []
        with Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=700, retry_timeout_ms=30_000) as consumer:
            consumer.assign({filled: "earliest"})
            if "member" in how:
                consumer._cursors.by_partition[filled].lease = cursors_module.Lease(math.inf)

            def some(most: int, consumer: Consumer = consumer, seen: list[int] = seen) -> None:
                left = most
                if "poll" in how:
                    while left and (not seen or seen[-1] != 99):
                        message = consumer.poll(30)
                        assert message is not None
                        seen.append(message.offset)
                        left -= 1
                    return
                if "lists" in how:
                    while left > 0 and (not seen or seen[-1] != 99):
                        found = consumer.consume(20 if "long" in how else 2, 30)
                        seen.extend(message.offset for message in found)
                        left -= len(found)
                    return
                if how == "arrow":
                    for batch in consumer.arrow_batches(timeout=30):
                        seen.extend(batch.column("offset").to_pylist())
                        left -= 1
                        if not left or seen[-1] == 99:
                            break
                    return
                [stream] = consumer.streams() if "stream" in how else [consumer]
                for message in stream.messages(most if "some" in how else None, timeout=30):
                    seen.append(message.offset)
                    left -= 1
                    if not left or seen[-1] == 99:
                        break

            def seek(consumer: Consumer = consumer) -> None:
                consumer.seek(filled, 20)

            if how == "seek":
                some(1)
                was_interrupted = interrupted_at(place, seek, *OURS)
            else:
                # Below these it is as of all messages.
                files = HANDING_OUT[:1] if "member" in how else HANDING_OUT if "stream" in how else OURS
                if "long" in how:  # the messages are made while the caller looks at them
                    files = tuple(each for each in files if "decode" not in each)
                was_interrupted = interrupted_at(place, lambda: some(2 if how == "arrow" else 6), *files)
                assert consumer.position(filled) <= (seen[-1] + 1 if seen else 0)
            while not seen or seen[-1] != 99:
                some(1000)
        first = 0 if how != "seek" or 20 not in seen else seen.index(20)
        assert set(seen[first:]) == set(range(seen[first], 100)), place
        if not was_interrupted:
            break
    assert place > (5 if how == "seek" else 20 if "member" in how else 100)


@pytest.mark.parametrize("asked", [150, 1500], ids=["rows", "columns"])
def test_what_came_while_more_is_waited_for_is_not_in_the_applications_hands(
    grouped: Consumer, filled: TopicPartition, asked: int
) -> None:
    """It does not count as being processed for too long."""
    found: list[Messages] = []
    waiting = threading.Thread(target=lambda: found.append(grouped.consume(asked)))
    waiting.start()
    cursor = grouped._cursors.by_partition[filled]
    waited_for(lambda: cursor.next_offset() == 100 and bool(cursor.hands))
    assert grouped._cursors.in_hands() == {}
    assert grouped.position(filled) == 0, "it was not handed out"
    grouped.close()
    waiting.join()
    assert [len(messages) for messages in found] == [100], "all that had come"


@pytest.mark.parametrize("how", ["columns", "arrow"])
def test_an_offset_amid_what_is_in_hand_belongs_to_the_leader_epoch_in_which_that_was_read(
    grouped: Consumer, filled: TopicPartition, how: str
) -> None:
    in_hand: Any = grouped.consume(1500, 1) if how == "columns" else next(grouped.arrow_batches(timeout=30))
    cursor = grouped._cursors.by_partition[filled]
    read_in = cursor.read_in()
    assert read_in is not None and len(in_hand) > 50
    cursor.source.reader.go_to(100, read_in + 1)  # another leader has answered since
    with grouped._fetcher.lock:
        assert grouped._cursors.epochs_of({filled: 50}) == {filled: read_in}


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [40, 200, 300])
def test_a_damaged_batch_is_never_handed_out_and_those_around_it_are(
    cluster: LocalCluster, consumer: Consumer, filled: TopicPartition, byte: int
) -> None:
    flip(cluster, filled.topic, batch=4, byte=byte)
    seen: list[int] = []

    def read_messages() -> None:
        seen.extend(int(message.value or b"") for message in consumer.messages(timeout=30))

    def read_arrow() -> None:
        for batch in consumer.arrow_batches(timeout=30):
            seen.extend(int(value) for value in batch.column("value").to_pylist())

    for read in (read_messages, read_arrow):
        consumer.assign({filled: "earliest"})
        seen.clear()
        for _ in range(2):
            with pytest.raises(
                CorruptBatch, match=f"corrupt batch in {filled} at 40: .* go on at offset 50$"
            ) as raised:
                read()
            assert consumer.failures() == {filled: raised.value}
        assert seen == list(range(40))
        assert consumer.position(filled) == 40
        consumer.seek(filled, raised.value.facts["end_offset"])
        assert consumer.failures() == {}
        assert numbers(consumer.messages(max_messages=50, timeout=30)) == list(range(50, 100))


@pytest.mark.parametrize("at_once", [None, 15, 1000])
def test_a_batch_that_lies_under_right_checksums_is_a_failure_of_its_partition(
    consumer: Consumer, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch, at_once: int | None
) -> None:
    opened = FetchedBatch.opened

    def lies(batch: FetchedBatch, where: TopicPartition) -> FetchedBatch:
        if batch.header.base_offset == 40:
            raise CorruptBatch(partition=where, offset=40, reason="its columns are of unlike lengths")
        return opened(batch, where)

    monkeypatch.setattr(FetchedBatch, "opened", lies)
    monkeypatch.setattr(cursors_module, "ROWS_AT_ONCE", 15)
    consumer.assign({filled: "earliest"})
    seen: list[int] = []

    def read() -> Iterator[Message]:
        if at_once is None:
            yield from consumer.messages(timeout=30)
        while at_once is not None:
            yield from consumer.consume(at_once, timeout=30)

    for _ in range(2):
        with pytest.raises(CorruptBatch, match="unlike lengths") as raised:
            seen.extend(int(message.value or b"") for message in read())
        assert consumer.failures() == {filled: raised.value}
    assert seen == list(range(40))
    assert consumer.position(filled) == 40
    consumer.unassign(consumer.failures())
    assert consumer.assignment() == []


# --- arrow -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("batch_records", [7, 1000])
def test_arrow_batches_hold_what_messages_hold(
    cluster: LocalCluster, admin: Admin, topic: str, codec: str, batch_records: int
) -> None:
    admin.create_topic(topic, partitions=2)
    with Producer(cluster.bootstrap_servers, compression_type=codec, batch_records=batch_records) as producer:
        for number in range(400):
            producer.send(
                topic,
                None if number % 7 == 0 else b"v%d" % number,
                b"k%d" % number if number % 100 > 50 else None,
                partition=number % 2,
                headers=[("h", b"%d" % number), ("n", None)] if number % 90 == 0 else None,
            )
    starts = {TopicPartition(topic, p): 3 for p in (0, 1)}
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign(starts)
        messages = list(consumer.messages(max_messages=394, timeout=30))
        consumer.assign(starts)
        batches, rows = [], 0
        for batch in consumer.arrow_batches(timeout=30):
            batch.validate(full=True)
            assert batch.schema == ARROW_SCHEMA
            assert len(batch.column("partition").unique()) == 1
            batches.append(batch)
            rows += batch.num_rows
            if rows == 394:
                break
    table = pa.Table.from_batches(batches).set_column(
        3, "timestamp", pa.Table.from_batches(batches)["timestamp"].cast(pa.int64())
    )
    found = [
        Message(
            row["topic"], row["partition"], row["offset"], row["timestamp"], row["key"], row["value"],
            tuple((pair["key"], pair["value"]) for pair in row["headers"] or ()),
        )
        for row in table.to_pylist()
    ]  # fmt: skip
    order = lambda message: (message.partition, message.offset)  # noqa: E731
    assert sorted(found, key=order) == sorted((Message(*each[:-2]) for each in messages), key=order)


# --- threads, brokers, processes -------------------------------------------------------------------------------------


def test_streams_are_read_by_a_thread_each(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=4)
    with Producer(cluster.bootstrap_servers, batch_records=50) as producer:
        for number in range(8000):
            producer.send(topic, b"%d" % number, partition=number % 4)
    seen: dict[int, list[int]] = {}
    with Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=5000) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in range(4)})

        def read(stream: Any) -> None:
            seen[stream.topic_partition.partition] = numbers(stream.messages(max_messages=2000, timeout=60))

        threads = [threading.Thread(target=read, args=(stream,)) for stream in consumer.streams()]
        for thread in threads:
            thread.start()
        join_all(threads, 60)
    assert seen == {p: list(range(p, 8000, 4)) for p in range(4)}


@pytest.fixture
def four(cluster: LocalCluster, admin: Admin, topic: str) -> list[TopicPartition]:
    """Partitions with ten records each."""
    admin.create_topic(topic, partitions=4)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(40):
            producer.send(topic, b"%d" % number, partition=number % 4)
    return [TopicPartition(topic, number) for number in range(4)]


@pytest.mark.parametrize("gone", range(4))
def test_a_partition_stays_with_its_stream_when_another_goes(
    consumer: Consumer, four: list[TopicPartition], gone: int
) -> None:
    consumer.assign(dict.fromkeys(four, "earliest"))
    streams = consumer.streams(2)
    readers = [stream.messages(timeout=0.1) for stream in streams]
    found = [[next(messages)[:3]] for messages in readers]
    consumer.unassign([four[gone]])
    for begun, stream in zip(found, streams, strict=True):  # while both have one in hand
        begun += [message[:3] for message in stream.messages(timeout=0.1)]
    of = [{TopicPartition(*each[:2]) for each in some} for some in found]
    assert of[0] | of[1] >= set(four) - {four[gone]}
    assert not of[0] & of[1]


def test_streams_are_evened_out_by_what_is_not_in_hand(consumer: Consumer, four: list[TopicPartition]) -> None:
    consumer.assign(dict.fromkeys(four, "earliest"))
    first, second = consumer.streams(2)
    messages = first.messages()
    in_hand = TopicPartition(*next(messages)[:2])
    assert {message.partition for message in second.messages(20, timeout=10)} == {1, 3}
    consumer.unassign([four[1], four[3]])
    [other] = {four[0], four[2]} - {in_hand}
    assert [message[:3] for message in second.messages(10, timeout=10)] == [(*other, offset) for offset in range(10)]
    assert [message[:3] for message in itertools.islice(messages, 9)] == [(*in_hand, at) for at in range(1, 10)]


@pytest.mark.parametrize("was_read", [False, True])
def test_partitions_of_a_stream_that_nobody_reads_go_to_the_others(
    cluster: LocalCluster, four: list[TopicPartition], caplog: pytest.LogCaptureFixture, was_read: bool
) -> None:
    with Consumer(cluster.bootstrap_servers, max_poll_interval_ms=500) as consumer:
        consumer.assign(dict.fromkeys(four, "earliest"))
        first, second, _ = consumer.streams(3)
        assert [message.offset for message in itertools.islice(first, int(was_read))] == [0] * was_read
        read = [(message.partition, message.offset) for message in second.messages(40, timeout=30)]
        assert sorted(read) == [(partition, offset) for partition in range(4) for offset in range(10)]
        assert "stream_is_not_read stream=0" in caplog.text
        assert [consumer.position(place) for place in four] == [10] * 4
        again = first.messages(max_messages=1, timeout=30)  # whoever reads it gets a share again
        with Producer(cluster.bootstrap_servers) as producer:
            for place in four:
                producer.send(place.topic, b"new", partition=place.partition)
        assert next(again).offset == 10


def test_what_the_thread_of_a_stream_has_committed_as_it_ended_is_not_read_again() -> None:
    cursor = Cursor(Source(TopicPartition("t", 0), b"", 5))
    cursor.rows = [("t", 0, at, 0, None, b"", (), 0, b"") for at in range(5, 8)]
    cursor.left, cursor.end_offset = iter(cursor.rows), 8
    hand = Hand()
    hand.take_from(cursor, 5)
    hand.message = next(cursor.messages())
    hand.give_up()
    assert cursor.position() == 5
    cursor.named = Named(6, 5)
    assert cursor.take_back_given_up() == 6
    hand.take_from(cursor, 6)
    assert cursor.take_back_given_up() == 6, "that was committed before"


def test_a_stream_that_is_slow_with_its_records_is_read(
    cluster: LocalCluster, four: list[TopicPartition], caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer(cluster.bootstrap_servers, max_poll_interval_ms=400, fetch_max_wait_ms=50) as consumer:
        consumer.assign(dict.fromkeys(four, "earliest"))
        slow, other = consumer.streams(2)
        reads_on = threading.Thread(target=lambda: list(other.messages(timeout=30)))
        reads_on.start()
        read = []
        for message in slow.messages(max_messages=10, timeout=30):
            read.append(message.offset)
            time.sleep(0.1)  # as long as it takes to process it: the slowness is what is tested, and no event ends it
        consumer.close()
    join_all([reads_on], 30)
    assert read == list(range(10))
    assert "stream_is_not_read" not in caplog.text


def test_a_busy_partition_does_not_starve_others_of_its_stream(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=4)
    with Producer(cluster.bootstrap_servers, batch_records=10) as producer:
        for _ in range(3000):
            producer.send(topic, b"b" * 100, partition=0)
        producer.send(topic, b"quiet", partition=2)
    with Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=5000) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in range(4)})
        busy, idle = consumer.streams(2)
        drives = threading.Thread(target=lambda: list(idle))  # and so supplies the other without end
        drives.start()
        for before, message in enumerate(busy.messages(timeout=30)):
            if message.partition == 2:
                break
            if before % 10 == 0:
                time.sleep(0.005)  # slower than the driver supplies: no event says that it has, when nothing is missing
    join_all([drives], 30)
    assert before < 500


def test_a_stream_that_nobody_reads_delays_no_other(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    with Producer(cluster.bootstrap_servers, batch_records=10) as producer:
        for number in range(4000):
            producer.send(topic, b"%d" % number, partition=number % 2)
    with Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=2000) as consumer:
        consumer.assign({TopicPartition(topic, p): "earliest" for p in range(2)})
        first, second = consumer.streams()
        assert numbers(second.messages(max_messages=2000, timeout=30)) == list(range(1, 4000, 2))
        assert consumer._cursors.by_partition[TopicPartition(topic, 0)].source.arrived_bytes < 10_000
        assert numbers(first.messages(max_messages=2000, timeout=30)) == list(range(0, 4000, 2))


@pytest.mark.parametrize("iterate", ["messages", "arrow", "stream"])
def test_closing_from_another_thread_ends_iterators(
    cluster: LocalCluster, filled: TopicPartition, iterate: str
) -> None:
    consumer = Consumer(cluster.bootstrap_servers)
    consumer.assign({filled: "latest"})
    ended: list[Any] = []

    def read() -> None:
        sources: dict[str, Iterable[object]]
        sources = {"messages": consumer, "arrow": consumer.arrow_batches(), "stream": consumer.streams()[0]}
        ended.append(list(sources[iterate]))

    readers = [threading.Thread(target=read) for _ in range(3 if iterate == "stream" else 1)]
    for reader in readers:
        reader.start()
    while consumer._fetcher._driver is None:
        threading.Event().wait(0.001)
    consumer.close()
    for reader in readers:
        reader.join(30)
    assert ended == [[]] * len(readers)
    for call in (lambda: next(iter(consumer)), lambda: consumer.assign({}), consumer.commit):
        with pytest.raises(Closed, match="this consumer is closed"):
            call()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("moment", ["waiting", "with the lock"])
def test_closing_in_a_signal_handler_ends_what_it_interrupts(
    cluster: LocalCluster, filled: TopicPartition, moment: str
) -> None:
    consumer = Consumer(cluster.bootstrap_servers)
    consumer.assign({filled: "latest" if moment == "waiting" else "earliest"})
    fetching = consumer._fetcher
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    try:
        if moment == "waiting":

            def interrupt() -> None:
                while fetching._driver is None:
                    threading.Event().wait(0.001)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

            threading.Thread(target=interrupt).start()
            assert list(consumer) == []
        else:
            take = consumer._cursors._take_rows

            def interrupted(*given: Any) -> Any:
                signal.raise_signal(signal.SIGUSR1)
                return take(*given)

            consumer._cursors._take_rows = interrupted  # type: ignore[method-assign, assignment]
            assert len(list(consumer)) <= 100
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert fetching.closed
    assert fetching._links == {}
    assert fetching._wake_receiver.fileno() == -1
    with pytest.raises(Closed):
        consumer._cluster.describe()
    consumer.close()


@pytest.mark.parametrize("whose", ["its own cluster", "a shared cluster"])
def test_closing_waits_for_no_broker_that_does_not_answer(topic: str, whose: str) -> None:
    with LocalCluster() as own:
        with Admin(own.bootstrap_servers) as admin:
            admin.create_topic(topic, partitions=1)
        pid, port = own.brokers[0].pid, own.brokers[0].data_port
        assert pid is not None
        with proxied(own.bootstrap_servers, port) as (behind, proxy):
            consumer = Consumer(behind)
            consumer._owns_cluster = whose == "its own cluster"
            consumer.assign({TopicPartition(topic, 0): "latest"})
            refresh, asked = behind.refresh, threading.Event()

            def refreshed(*given: Any, **named: Any) -> None:
                asked.set()
                refresh(*given, **named)

            behind.refresh = refreshed  # type: ignore[method-assign]
            ended: list[Any] = []
            reader = threading.Thread(target=lambda: ended.append(list(consumer)))
            reader.start()
            waited_for(lambda: consumer._fetcher._driver is not None)
            suspend(pid)
            try:
                proxy.cut()
                assert asked.wait(30)  # for up to request.timeout.ms, 30 s
                started = time.monotonic()
                consumer.close(timeout=0.5)
                assert time.monotonic() - started < 10
            finally:
                os.kill(pid, signal.SIGCONT)
            reader.join(60)
            assert ended == [[]]
            assert consumer._fetcher._links == {}


@pytest.mark.parametrize("waits_for", ["its connection", "who leads"])
def test_a_broker_that_hangs_delays_neither_a_timeout_nor_what_others_have(topic: str, waits_for: str) -> None:
    with LocalCluster(brokers=2) as own, Admin(own.bootstrap_servers) as admin:
        made = admin.create_topic(topic, partitions=2)
        leaders = [next(each for each in own.brokers if each.broker_id == part.leader) for part in made.partitions]
        healthy, hanging = (TopicPartition(topic, number) for number in range(2))
        pid = leaders[1].pid
        assert pid is not None and leaders[0] is not leaders[1]
        by_address = leaders[1].address if waits_for == "who leads" else leaders[0].address
        with (
            Producer(own.bootstrap_servers) as producer,
            Consumer(by_address, connect_timeout_ms=60_000, request_timeout_ms=60_000) as consumer,
        ):
            producer.send(topic, b"0", partition=0).result(30)
            if waits_for == "who leads":
                consumer.assign({healthy: 0})
                assert numbers(consumer.messages(max_messages=1)) == [0]
                consumer._fetcher._stale = True
            else:
                consumer.assign({healthy: 0, hanging: 0})
            suspend(pid)
            try:
                began, used = time.monotonic(), time.thread_time()
                found = numbers(consumer.messages(timeout=2))
                assert found == ([] if waits_for == "who leads" else [0])
                assert 2 <= time.monotonic() - began < 12
                assert time.thread_time() - used < 1, "it waits, and does not look all the time"
                producer.send(topic, b"1", partition=0).result(30)
                assert numbers(consumer.messages(max_messages=1, timeout=20)) == [1]
                assert time.monotonic() - began < 40, "before the hanging broker was given up"
            finally:
                os.kill(pid, signal.SIGCONT)
            if waits_for == "its connection":
                producer.send(topic, b"2", partition=1).result(60)
                assert numbers(consumer.messages(max_messages=1, timeout=30)) == [2]


def test_closing_interrupts_the_wait_for_the_rest_of_an_answer(cluster: LocalCluster, filled: TopicPartition) -> None:
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
        proxy.hold_answers_after(100)
        consumer = Consumer(behind)
        consumer.assign({filled: "earliest"})
        ended: list[Any] = []
        reader = threading.Thread(target=lambda: ended.append(list(consumer)))
        reader.start()
        assert proxy.is_holding.wait(30)
        consumer.close(timeout=20)
        reader.join(10)
        assert ended == [[]]


def test_a_broker_that_stops_amid_an_answer_holds_up_no_other(topic: str) -> None:
    with LocalCluster(2) as own:
        with Admin(own.bootstrap_servers) as admin:
            admin.create_topic(topic, partitions=2)
            [described] = admin.describe_topics([topic])
        stopping = own.brokers[described.partitions[0].leader]

        class OneProxied(ProxiedCluster):
            def connect_data(self, broker_id: int, known: BrokerInfo | None = None) -> DataConnection:
                is_stopping = broker_id == described.partitions[0].leader
                return (ProxiedCluster if is_stopping else Cluster).connect_data(self, broker_id, known)

        proxy = DataPortProxy(stopping.data_port)
        with closing(proxy), closing(OneProxied(own.bootstrap_servers)) as behind, Consumer(behind) as consumer:
            behind.data_port = proxy.port
            with Producer(own.bootstrap_servers) as producer:
                producer.send(topic, b"x" * 100_000, partition=0)
                producer.flush()
                proxy.hold_answers_after(50_000)
                consumer.assign({TopicPartition(topic, number): "earliest" for number in range(2)})
                waited_for(lambda: proxy.is_holding.is_set() or any(consumer.messages(timeout=0.1)))
                assert proxy.is_holding.is_set()
                messages = consumer.messages(timeout=15)  # before the request timeout of 30 s
                for number in range(3):
                    producer.send(topic, b"%d" % number, partition=1)
                    producer.flush()
                    assert next(messages).value == b"%d" % number
                proxy.cut()
                assert [len(message.value or b"") for message in consumer.messages(1, timeout=30)] == [100_000]


def test_time_in_which_nobody_reads_is_not_counted_against_retries(
    cluster: LocalCluster, filled: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_passed = 0.0
    passing = SimpleNamespace(monotonic=lambda: time.monotonic() + time_passed)
    monkeypatch.setattr(fetcher_module, "time", passing)
    received = DataConnection.receive_now
    failures = 0

    def failing(connection: DataConnection) -> Any:
        nonlocal failures
        failures += 1
        raise BrokerUnreachable(address=connection.address, reason="reset by peer")

    with Consumer(cluster.bootstrap_servers, retry_timeout_ms=60_000) as consumer:
        consumer.assign({filled: "earliest"})
        monkeypatch.setattr(DataConnection, "receive_now", failing)
        for _ in range(3):
            before = failures
            while failures == before:
                assert list(consumer.messages(timeout=0.02)) == []
            time_passed += 3600
        monkeypatch.setattr(DataConnection, "receive_now", received)
        assert numbers(consumer.messages(max_messages=100, timeout=30)) == list(range(100))


def test_connections_cut_at_any_byte_lose_and_double_nothing(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    fill(cluster, topic, 20_000, batch_records=100)
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port, retry_backoff_ms=5) as (through, proxy),
        Consumer(through, max_partition_fetch_bytes=40_000, retry_backoff_ms=5) as consumer,
    ):
        consumer.assign({TopicPartition(topic, 0): "earliest"})
        seen = []
        for message in consumer.messages(max_messages=20_000, timeout=30):
            seen.append(int(message.value or b""))
            if len(seen) % 900 == 0:
                proxy.cut()
        assert proxy.accepted > 5
    assert seen == list(range(20_000))


def test_a_broker_restarted_under_a_consumer_and_one_that_stays_away(topic: str) -> None:
    with LocalCluster() as own:
        with Admin(own.bootstrap_servers) as admin:
            admin.create_topic(topic, partitions=1)
        fill(own, topic, 100)
        where = TopicPartition(topic, 0)
        with Consumer(own.bootstrap_servers, retry_timeout_ms=60_000) as consumer:
            consumer.assign({where: "earliest"})
            assert len(list(consumer.messages(max_messages=100, timeout=30))) == 100
            own.brokers[0].kill()
            own.brokers[0].start()
            fill(own, topic, 5)
            assert numbers(consumer.messages(max_messages=5, timeout=60)) == list(range(5))
            assert consumer.position(where) == 105
        with Consumer(own.bootstrap_servers, retry_timeout_ms=500) as consumer:
            consumer.assign({where: "latest"})
            assert list(consumer.messages(timeout=0.1)) == []
            own.brokers[0].kill()
            started = time.monotonic()
            with pytest.raises(BrokerUnreachable, match=r"no broker reachable at 127\.0\.0\.1:"):
                next(iter(consumer))
            assert time.monotonic() - started < 15


def test_a_broker_that_stays_away_ends_no_stream_of_another(topic: str) -> None:
    """Whichever thread finds it: here the only one that reads is that of the healthy broker."""
    with LocalCluster(2) as own:
        with Admin(own.bootstrap_servers) as admin:
            admin.create_topic(topic, partitions=2)
            [described] = admin.describe_topics([topic])
        with Consumer(own.bootstrap_servers, retry_timeout_ms=500) as consumer:
            consumer.assign({TopicPartition(topic, number): "earliest" for number in range(2)})
            dead, healthy = consumer.streams()
            assert list(consumer.messages(timeout=0.1)) == []
            own.brokers[described.partitions[0].leader].kill()
            assert list(healthy.messages(timeout=2)) == []
            assert consumer.failures() == {}
            with pytest.raises(BrokerUnreachable):
                next(iter(dead))
            assert list(consumer.failures()) == [dead.topic_partition]
            with Producer(own.bootstrap_servers) as producer:
                producer.send(topic, b"x", partition=1)
            assert next(iter(healthy)).value == b"x"


def test_an_error_of_the_brokers_choice_reaches_the_reader_once_it_gets_there(
    cluster: LocalCluster, admin: Admin, consumer: Consumer, filled: TopicPartition
) -> None:
    consumer.assign({filled: "earliest"})
    assert next(iter(consumer)).offset == 0
    admin.delete_topic(filled.topic)
    offsets = (message.offset for message in consumer)
    seen: list[int] = []
    with pytest.raises(KafkalogError):
        seen.extend(offsets)
    assert seen == list(range(1, len(seen) + 1))
