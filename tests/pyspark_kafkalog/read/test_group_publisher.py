"""A stream's progress under its group, against a running cluster: seen while it runs, and by whom it is written. Stream
readers are called as Spark calls them; Spark itself runs where its processes are what is looked at."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

from broker.local import LocalCluster
from kafkalog import Admin, Producer, TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.groups import GroupMember, Kept, keep_member, leave_group, offsets_with_topic_ids
from kafkalog.errors import DataLost, UnknownGroup, UnknownTopic, UnknownTopicId
from kafkalog.zk.paths import is_valid_name
from pyspark_kafkalog import processes
from pyspark_kafkalog.read import group_publisher as progress
from pyspark_kafkalog.read.group_publisher import Progress
from pyspark_kafkalog.read.stream import NO_LIMIT
from pyspark_kafkalog.source import StreamReader
from tests.waiting import waited_for

SCHEMA = StructType([StructField("offset", LongType())])
EVERYTHING = ReadMaxRows(NO_LIMIT)

MakeReader = Callable[..., StreamReader]


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    client = Cluster(cluster.bootstrap_servers, retry_timeout_ms=500, bootstrap_timeout_ms=500)
    yield client
    client.close()


@pytest.fixture
def made(admin: Admin, cluster: LocalCluster, topic: str) -> str:
    """A topic of two partitions with 10 records each."""
    admin.create_topic(topic, partitions=2)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(20):
            producer.send(topic, b"v", partition=number % 2)
    return topic


@pytest.fixture
def reader(cluster: LocalCluster) -> Iterator[MakeReader]:
    readers = []

    def make(**options: str) -> StreamReader:
        given = {name.replace("__", "."): value for name, value in options.items()}
        readers.append(StreamReader(SCHEMA, {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, **given}))
        return readers[-1]

    yield make
    for each in readers:
        each.stop()


def published(admin: Admin, group: str) -> dict[str, int]:
    return {str(partition): offset for partition, offset in admin.committed(group).items()}


def members(admin: Admin, group: str) -> list[str]:
    try:
        return [member.name for member in admin.describe_group(group).members]
    except UnknownGroup:
        return []


# --- one stream ------------------------------------------------------------------------------------------------------


def test_the_position_is_seen_as_soon_as_the_stream_asks_for_more(admin: Admin, reader: MakeReader, made: str) -> None:
    stream = reader(subscribe=made, startingOffsets="earliest")
    group = f"spark-{made}"
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(10))
    waited_for(lambda: len(members(admin, group)) == 1)  # before anything is done
    assert published(admin, group) == {}
    stream.latestOffset(end, EVERYTHING)
    waited_for(lambda: published(admin, group) == {f"{made}-0": 5, f"{made}-1": 5})
    [member] = admin.describe_group(group).members
    assert member.subscription == f"subscribe {made}"
    assert not processes.has_ended(member.process) and member.process == processes.own_name()
    stream.stop()
    assert members(admin, group) == []


def test_a_stream_that_repeats_a_micro_batch_after_a_restart_is_a_member_meanwhile(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    start, end = {made: {"0": 2, "1": 2}}, {made: {"0": 5, "1": 5}}
    stream = reader(subscribe=made, kafkalog__group__id=made)
    stream.partitions(start, end)
    waited_for(lambda: len(members(admin, made)) == 1)
    assert published(admin, made) == {}
    stream.latestOffset(end, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 5, f"{made}-1": 5})


def test_a_commit_moves_the_position_forward_only(admin: Admin, reader: MakeReader, made: str) -> None:
    stream = reader(subscribe=made, kafkalog__group__id=made)
    position = {made: {"0": 6, "1": 6}}
    stream.latestOffset(position, EVERYTHING)
    stream.commit({made: {"0": 4, "1": 7}})
    waited_for(lambda: published(admin, made) == {f"{made}-0": 6, f"{made}-1": 7})


def test_a_stream_that_continues_from_an_older_checkpoint_sets_the_group_back(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    first = reader(subscribe=made, kafkalog__group__id=made)
    first.latestOffset({made: {"0": 8, "1": 9}}, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 8, f"{made}-1": 9})
    first.stop()
    reader(subscribe=made, kafkalog__group__id=made).latestOffset({made: {"0": 2, "1": 9}}, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 2, f"{made}-1": 9})


def test_the_last_call_of_available_now_is_answered_once_the_position_is_written_and_the_member_gone(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    stream = reader(subscribe=made, startingOffsets="earliest", kafkalog__group__id=made)
    stream.prepareForTriggerAvailableNow()
    middle = stream.latestOffset(stream.initialOffset(), ReadMaxRows(10))
    waited_for(lambda: len(members(admin, made)) == 1)
    end = stream.latestOffset(middle, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 5, f"{made}-1": 5})
    assert len(members(admin, made)) == 1  # none of these calls was the last
    assert stream.latestOffset(end, EVERYTHING) == end
    assert published(admin, made) == {f"{made}-0": 10, f"{made}-1": 10}
    assert members(admin, made) == []


def test_the_first_call_of_available_now_is_not_its_last_if_the_stream_starts_at_latest(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    stream = reader(subscribe=made, kafkalog__group__id=made)
    stream.prepareForTriggerAvailableNow()
    start = stream.initialOffset()
    assert stream.latestOffset(start, EVERYTHING) == start  # the empty micro-batch that writes the start down
    waited_for(lambda: len(members(admin, made)) == 1)
    assert published(admin, made) == {}
    assert stream.latestOffset(start, EVERYTHING) == start
    assert published(admin, made) == {f"{made}-0": 10, f"{made}-1": 10}
    assert members(admin, made) == []


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_stream_that_fails_at_its_start_publishes_nothing(
    admin: Admin, reader: MakeReader, made: str, start: str
) -> None:
    failing = reader(subscribe=made, startingOffsets=start, kafkalog__group__id=made)
    failing.latestOffset(failing.initialOffset(), EVERYTHING)
    waited_for(lambda: len(members(admin, made)) == 1)
    failing.stop()  # its first micro-batch fails, and Spark ends the source
    assert published(admin, made) == {}
    fallback = {"startingOffsets": "committed", "committed__fallback": "earliest"}
    again = reader(subscribe=made, kafkalog__group__id=made, **fallback)
    assert again.initialOffset() == {made: {"0": 0, "1": 0}}


def test_a_stream_that_finds_its_start_wrong_publishes_nothing(admin: Admin, reader: MakeReader, made: str) -> None:
    beyond = reader(subscribe=made, kafkalog__group__id=made, fetchOffset__numRetries="1")
    with pytest.raises(DataLost):
        beyond.latestOffset({made: {"0": 99, "1": 99}}, EVERYTHING)
    beyond.stop()
    assert published(admin, made) == {}
    assert members(admin, made) == []


def test_a_start_with_a_new_checkpoint_leaves_what_the_group_has_of_topics_that_are_there(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    admin.commit(made, {TopicPartition(made, 0): 4, TopicPartition(made, 1): 5})
    reader(subscribe=made, startingOffsets="earliest", kafkalog__group__id=made).initialOffset()
    assert published(admin, made) == {f"{made}-0": 4, f"{made}-1": 5}


def test_a_topic_created_again_never_gets_an_offset_of_the_one_before(
    admin: Admin, reader: MakeReader, made: str
) -> None:
    options = {"kafkalog__group__id": made, "failOnDataLoss": "false", "fetchOffset__numRetries": "1"}
    stream = reader(subscribe=made, startingOffsets="earliest", **options)
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    admin.delete_topic(made)
    admin.create_topic(made, partitions=2)
    back = stream.latestOffset(end, EVERYTHING)
    assert back == {made: {"0": 0, "1": 0}}
    stream.commit(end)
    asked = stream._session.progress._asked
    waited_for(lambda: stream._session.progress._answered >= asked)
    assert published(admin, made) == {}
    stream.latestOffset(back, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 0, f"{made}-1": 0})


def test_the_end_of_a_micro_batch_is_published_for_the_topics_that_are_left(
    admin: Admin, reader: MakeReader, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, group = f"{made}-other", made
    admin.create_topic(other)
    options = {"kafkalog__group__id": group, "failOnDataLoss": "false", "fetchOffset__numRetries": "1"}
    stream = reader(subscribe=f"{made},{other}", startingOffsets="earliest", **options)
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    admin.delete_topic(other)
    stream.latestOffset(end, EVERYTHING)
    stream.commit(end)
    asked = stream._session.progress._asked
    waited_for(lambda: stream._session.progress._answered >= asked)
    assert published(admin, group) == {f"{made}-0": 10, f"{made}-1": 10}
    assert "group_progress_not_published" not in caplog.text


def test_an_offset_of_a_topic_created_again_meanwhile_is_refused(client: Cluster, admin: Admin, made: str) -> None:
    at, me = TopicPartition(made, 0), GroupMember("me", "", "", "")
    old = admin.describe_topics([made])[0].topic_id
    admin.delete_topic(made)
    admin.create_topic(made, partitions=2)
    with pytest.raises(UnknownTopicId, match=made):
        keep_member(client, made, me, {at: 5}, {made: old})
    assert published(admin, made) == {}
    keep_member(client, made, me, {at: 0}, {made: admin.describe_topics([made])[0].topic_id})
    assert published(admin, made) == {str(at): 0}


def test_a_reader_that_is_dropped_leaves_the_group(admin: Admin, cluster: LocalCluster, made: str) -> None:
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": made, "kafkalog.group.id": made}
    stream = StreamReader(SCHEMA, options)
    stream.latestOffset(stream.initialOffset(), EVERYTHING)
    waited_for(lambda: len(members(admin, made)) == 1)
    del stream
    waited_for(lambda: members(admin, made) == [])


def test_a_copy_for_the_tasks_publishes_nothing(admin: Admin, reader: MakeReader, made: str) -> None:
    stream = reader(subscribe=made, startingOffsets="earliest", kafkalog__group__id=made)
    start = stream.initialOffset()
    end = stream.latestOffset(start, EVERYTHING)
    waited_for(lambda: len(members(admin, made)) == 1)
    copy = pickle.loads(pickle.dumps(stream))
    assert sum(batch.num_rows for planned in stream.partitions(start, end) for batch in copy.read(planned)) == 20
    assert copy._session.progress._thread is None
    copy.stop()
    assert len(members(admin, made)) == 1


def test_a_forked_child_publishes_nothing(client: Cluster, admin: Admin, made: str) -> None:
    told = Progress(client, made, "here")
    told.at({TopicPartition(made, 0): 1})
    waited_for(lambda: published(admin, made) == {f"{made}-0": 1})
    child = os.fork()
    if not child:
        told.at({TopicPartition(made, 0): 2})
        os._exit(told._position != {TopicPartition(made, 0): 1})
    assert os.waitpid(child, 0)[1] == 0
    told.stop()
    assert published(admin, made) == {f"{made}-0": 1}


def test_a_cluster_that_is_gone_neither_fails_nor_holds_up_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pyspark_kafkalog.read.group_publisher")
    told = Progress(Cluster("127.0.0.1:1"), "g", "nothing")
    started = time.monotonic()
    for offset in range(1000):
        told.at({TopicPartition("t", 0): offset})
    told.done({TopicPartition("t", 0): 1000})
    assert time.monotonic() - started < 5
    told.finish()
    assert time.monotonic() - started < 2 * progress._FINISH_S
    failed = [record for record in caplog.records if "group_progress_not_published" in record.message]
    assert len(failed) == 1 and "127.0.0.1:1" in failed[0].message


# --- the thread that publishes ---------------------------------------------------------------------------------------


@pytest.fixture
def never_renewing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is done because something woke the thread, not because a renewal came along."""
    monkeypatch.setattr(progress, "RENEW_S", 3600)
    monkeypatch.setattr(progress, "_PUBLISH_EVERY_S", 0)


def keeping(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Have something done before each renewal of a membership, with which a position is written."""

    def kept(*given: Any) -> Kept:
        before()
        return keep_member(*given)

    monkeypatch.setattr("kafkalog.client.groups.keep_member", kept)


@pytest.mark.usefixtures("never_renewing")
def test_a_stream_that_has_nothing_to_publish_is_a_member_at_once(client: Cluster, admin: Admin, made: str) -> None:
    told = Progress(client, made, "here")
    told.at({}, {})
    waited_for(lambda: len(members(admin, made)) == 1 and told._answered == told._asked)
    told.finish(30)
    assert told._thread is None
    assert members(admin, made) == []


@pytest.mark.usefixtures("never_renewing")
def test_what_comes_while_a_position_is_written_is_written_next_an_end_included(
    client: Cluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_write = threading.Event(), threading.Event()

    def gate() -> None:
        writing.set()
        assert may_write.wait(60)

    keeping(monkeypatch, gate)
    at, told = TopicPartition(made, 0), Progress(client, made, "here")
    for offset in (1, 3):
        writing.clear()
        may_write.clear()
        told.at({at: offset})
        assert writing.wait(60)
        told.at({at: offset + 1})
        if offset == 3:
            told.end()
        may_write.set()
        waited_for(lambda wanted=offset + 1: published(admin, made) == {str(at): wanted})  # type: ignore[misc]
    waited_for(lambda: told._thread is None)
    assert members(admin, made) == []


@pytest.mark.usefixtures("never_renewing")
def test_a_fast_stream_does_not_write_every_position(
    client: Cluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PUBLISH_EVERY_S", 0.1)
    at, told, offsets = TopicPartition(made, 0), Progress(client, made, "here"), iter(range(6))
    keeping(monkeypatch, lambda: told.at({at: next(offsets, 5)}))  # the next is there before this one is written
    started = time.monotonic()
    told.at({})
    waited_for(lambda: told._written == {at: 5})
    assert time.monotonic() - started >= 5 * 0.1
    told.stop()


@pytest.mark.usefixtures("never_renewing")
def test_the_last_position_is_tried_again_and_trouble_that_comes_back_is_warned_of_again(
    client: Cluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [0]

    def trouble() -> None:
        if failures[0]:
            failures[0] -= 1
            raise UnknownTopic(topic=made)  # of a broker that has not heard of it yet

    keeping(monkeypatch, trouble)
    at, told = TopicPartition(made, 0), Progress(client, made, "here")
    for offset in (1, 2):
        failures[0] = 3  # when it comes, and twice at the end
        told.at({at: offset})
        waited_for(lambda: failures[0] == 2 and told._answered == told._asked)
        told.finish(30)
        assert published(admin, made) == {str(at): offset}
    assert caplog.text.count("group_progress_not_published") == 2


@pytest.mark.usefixtures("never_renewing")
def test_a_stream_that_continues_after_it_left_is_a_member_again_and_writes_again_where_it_stands(
    client: Cluster, admin: Admin, made: str
) -> None:
    at, told, other = TopicPartition(made, 0), Progress(client, made, "here"), GroupMember("other", "", "", "")
    told.at({at: 5})
    told.finish(30)
    keep_member(client, made, other, {at: 9})
    leave_group(client, made, "other")
    told.at({at: 5})
    waited_for(lambda: told._answered == told._asked)
    assert published(admin, made) == {str(at): 5}
    assert told._thread is not None
    assert members(admin, made) == [told._name]
    told.stop()


@pytest.mark.usefixtures("never_renewing")
def test_a_stream_that_ends_leaves_its_whole_position_and_no_part_of_a_forced_reset(
    client: Cluster, admin: Admin, made: str
) -> None:
    at, other, told = TopicPartition(made, 0), TopicPartition(made, 1), Progress(client, made, "here")
    told.at({at: 5, other: 5})
    waited_for(lambda: told._answered == told._asked)
    admin.reset_offsets(made, {at: "earliest", other: "earliest"}, force=True)
    told.at({at: 6, other: 5})
    waited_for(lambda: told._answered == told._asked)
    assert published(admin, made) == {str(at): 6, str(other): 0}
    told.finish(30)
    assert published(admin, made) == {str(at): 6, str(other): 5}


def test_a_thread_that_can_not_be_started_is_warned_of_and_started_at_the_next_position(
    client: Cluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    at, told = TopicPartition(made, 0), Progress(client, made, "here")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        told.at({at: 1})
    assert "can't start new thread" in caplog.text
    told.stop()  # there is nobody to wait for
    assert "group_progress_late" not in caplog.text
    told.at({at: 1})
    waited_for(lambda: published(admin, made) == {str(at): 1})
    told.stop()


@pytest.mark.usefixtures("never_renewing")
def test_the_end_of_a_micro_batch_is_published_of_the_topic_that_it_was_read_from(
    client: Cluster, admin: Admin, made: str
) -> None:
    at, told = TopicPartition(made, 0), Progress(client, made, "here")
    told.at({at: 5}, {made: admin.describe_topics([made])[0].topic_id})
    waited_for(lambda: published(admin, made) == {str(at): 5})
    admin.delete_topic(made)
    admin.create_topic(made, partitions=2)
    told.done({at: 6})
    waited_for(lambda: told._answered == told._asked)
    assert published(admin, made) == {}
    told.stop()


def test_a_members_name_is_one_that_brokers_take_whatever_the_host_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere: Any = None
    monkeypatch.setattr("pyspark_kafkalog.read.group_publisher.socket.gethostname", lambda: "a host/é" * 100)
    told = Progress(nowhere, "g", "here")
    assert is_valid_name(told._name)
    assert told._name.startswith("a_host__a_host__")


# --- without ZooKeeper -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose ZooKeeper tests may end."""
    with LocalCluster(data=tmp_path_factory.mktemp("lone")) as cluster:
        yield cluster


@pytest.fixture
def without_zookeeper(lone: LocalCluster) -> Callable[[], AbstractContextManager[None]]:
    """Ends ZooKeeper for a while."""
    assert lone.zookeeper is not None
    zookeeper = lone.zookeeper

    @contextmanager
    def away() -> Iterator[None]:
        zookeeper.kill()
        try:
            yield
        finally:
            zookeeper.start()

    return away


def made_anew(lone: LocalCluster, topic: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Options of a stream whose topic was deleted and made anew since it ran, and where it was."""
    options = {"kafkalog.bootstrap.servers": lone.bootstrap_servers, "subscribe": topic, "kafkalog.group.id": topic}
    options |= {"startingOffsets": "earliest", "fetchOffset.numRetries": "1"}
    with Admin(lone.bootstrap_servers) as admin:
        for partitions, records in ((2, 3), (1, 5)):
            admin.create_topic(topic, partitions=partitions)
            with Producer(lone.bootstrap_servers) as producer:
                for _ in range(records):
                    producer.send(topic, b"v", partition=0)
            if partitions == 2:
                stream = StreamReader(SCHEMA, options)
                position = stream.latestOffset(stream.initialOffset(), EVERYTHING)
                stream.latestOffset(position, EVERYTHING)
                waited_for(lambda: published(admin, topic) == {f"{topic}-0": 3, f"{topic}-1": 0})
                stream.stop()
                admin.delete_topic(topic)
    return options, {topic: {"0": 3}}


@pytest.mark.timeout(180)
def test_a_new_stream_starts_without_zookeeper_and_what_the_group_has_of_others_goes_once_it_is_back(
    lone: LocalCluster, topic: str, without_zookeeper: Callable[[], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options, _ = made_anew(lone, topic)
    stream = StreamReader(SCHEMA, options | {"kafkalog.retry.timeout.ms": "300"})
    with without_zookeeper():
        start = stream.initialOffset()
        assert caplog.text.count("group_not_looked_at") == 1
        end = stream.latestOffset(start, EVERYTHING)
        assert end == {topic: {"0": 5}}
        assert stream.latestOffset(end, EVERYTHING) == end
    client = Cluster(lone.bootstrap_servers)
    [described] = client.describe_topics([topic])
    waited_for(
        lambda: offsets_with_topic_ids(client, topic, [topic]) == {TopicPartition(topic, 0): (5, described.topic_id)},
        60,
    )
    client.close()
    stream.stop()


@pytest.mark.timeout(180)
def test_a_stream_that_continues_does_so_without_zookeeper_and_warns_that_the_group_was_not_looked_at(
    lone: LocalCluster, topic: str, without_zookeeper: Callable[[], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options, position = made_anew(lone, topic)
    stream = StreamReader(SCHEMA, options | {"kafkalog.retry.timeout.ms": "300"})
    with without_zookeeper():
        for _ in range(3):
            assert stream.latestOffset(position, EVERYTHING) == {topic: {"0": 5}}
    assert caplog.text.count("group_not_looked_at") == 1
    stream.stop()


@pytest.mark.timeout(180)
def test_a_stream_waits_for_a_zookeeper_that_is_back_soon_and_finds_its_topic_created_again(
    lone: LocalCluster, topic: str, without_zookeeper: Callable[[], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options, position = made_anew(lone, topic)
    stream = StreamReader(SCHEMA, options)
    with ThreadPoolExecutor(1) as thread:
        with without_zookeeper():
            found = thread.submit(stream.latestOffset, position, EVERYTHING)
            waited_for(lambda: "call_held_up" in caplog.text)
        with pytest.raises(DataLost, match="was deleted and created again"):
            found.result(60)
    assert "group_not_looked_at" not in caplog.text
    stream.stop()


# --- two streams -----------------------------------------------------------------------------------------------------


def test_of_two_live_streams_of_a_group_the_first_publishes_and_the_other_warns_and_takes_over(
    admin: Admin, reader: MakeReader, made: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "RENEW_S", 0.05)
    caplog.set_level(logging.INFO, "pyspark_kafkalog.read.group_publisher")

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if "group_has_another_live_query" in record.message]

    first, second = (reader(subscribe=made, kafkalog__group__id=made) for _ in range(2))
    first.latestOffset({made: {"0": 1, "1": 1}}, EVERYTHING)
    waited_for(lambda: len(members(admin, made)) == 1)
    second.latestOffset({made: {"0": 7, "1": 7}}, EVERYTHING)
    waited_for(lambda: len(members(admin, made)) == 2 and len(warnings()) == 1)
    assert f"first={first._session.progress._name} " in warnings()[0]
    first.latestOffset({made: {"0": 2, "1": 1}}, EVERYTHING)
    waited_for(lambda: published(admin, made) == {f"{made}-0": 2, f"{made}-1": 1})
    for _ in range(3):
        renewed_s = second._session.progress._renewed_s
        waited_for(lambda seen=renewed_s: second._session.progress._renewed_s > seen)  # type: ignore[misc]
    assert len(warnings()) == 1
    first.stop()
    waited_for(lambda: published(admin, made) == {f"{made}-0": 7, f"{made}-1": 7})
    waited_for(lambda: any("group_taken_over" in record.message for record in caplog.records))  # after the answer came


def test_a_stream_that_lost_its_place_for_a_while_publishes_again_where_it_stands(
    client: Cluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "RENEW_S", 0.05)
    at = TopicPartition(made, 0)
    stalled, other = Progress(client, made, "stalled"), GroupMember("other", "", "", "")
    stalled.at({at: 5})
    waited_for(lambda: published(admin, made) == {str(at): 5})
    keep_member(client, made, other, {})
    leave_group(client, made, stalled._name)  # as after 10 s of silence; its next renewal finds the other before it
    waited_for(lambda: members(admin, made)[0] == "other")
    keep_member(client, made, other, {at: 9})
    waited_for(lambda: stalled._is_first is False)
    leave_group(client, made, "other")
    waited_for(lambda: published(admin, made) == {str(at): 5})
    stalled.stop()


def test_a_stream_whose_lease_lapsed_writes_again_what_another_may_have_overwritten_unseen(
    client: Cluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has come and gone between two renewals: nothing but the lapsed lease tells of it."""
    monkeypatch.setattr(progress, "RENEW_S", 3600)
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    at, told = TopicPartition(made, 0), Progress(client, made, "stalled")
    told.at({at: 5})
    waited_for(lambda: told._answered == told._asked)
    assert published(admin, made) == {str(at): 5}
    leave_group(client, made, told._name)
    keep_member(client, made, GroupMember("other", "", "", ""), {at: 9})
    leave_group(client, made, "other")
    now[0] += progress._LEASE_S + 1
    told.at({at: 5, TopicPartition(made, 1): 1})
    waited_for(lambda: published(admin, made) == {str(at): 5, f"{made}-1": 1})
    told.stop()


def test_a_successor_on_the_same_machine_does_not_wait_for_the_lease_of_a_killed_process(
    admin: Admin, cluster: LocalCluster, reader: MakeReader, made: str
) -> None:
    program = f"""
import sys, time
from kafkalog import TopicPartition
from kafkalog.client.cluster import Cluster
from kafkalog.client.groups import GroupMember, keep_member, leave_group
from pyspark_kafkalog.read.group_publisher import Progress
told = Progress(Cluster({cluster.bootstrap_servers!r}), {made!r}, "killed")
told.at({{TopicPartition({made!r}, 0): 3}})
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        waited_for(lambda: published(admin, made) == {f"{made}-0": 3})
        process.send_signal(signal.SIGKILL)
    assert len(members(admin, made)) == 1
    killed = time.monotonic()
    stream = reader(subscribe=made, kafkalog__group__id=made)
    stream.prepareForTriggerAvailableNow()
    end = {made: {"0": 10, "1": 10}}
    assert stream.latestOffset(end, EVERYTHING) == end
    assert published(admin, made) == {f"{made}-0": 10, f"{made}-1": 10}
    assert time.monotonic() - killed < 10


# --- Spark -----------------------------------------------------------------------------------------------------------


def test_the_position_of_a_spark_query_is_seen_while_it_runs_idle_killed_and_after_available_now(
    spark: SparkSession, cluster: LocalCluster, admin: Admin, made: str, tmp_path: Path
) -> None:
    options = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "subscribe": made}
    options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "10"}
    group = f"spark-{made}"

    def started(**trigger: Any) -> StreamingQuery:
        rows = spark.readStream.format("kafkalog").options(**options).load()
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
        return writer.trigger(**trigger).start()

    def send(count: int) -> None:
        with Producer(cluster.bootstrap_servers) as producer:
            for number in range(count):
                producer.send(made, b"v", partition=number % 2)

    query = started(processingTime="0 seconds")
    waited_for(lambda: published(admin, group) == {f"{made}-0": 10, f"{made}-1": 10}, 90)  # idle: no batch comes after
    [member] = members(admin, group)
    send(4)
    waited_for(lambda: published(admin, group) == {f"{made}-0": 12, f"{made}-1": 12}, 60)
    [told] = admin.describe_group(group).members
    os.kill(int(told.process.split(" ")[1]), signal.SIGKILL)  # the process of the source, which Spark started
    send(2)
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(60)
    assert members(admin, group) == [member]
    send(20)
    query = started(availableNow=True)
    assert query.awaitTermination(120)
    assert published(admin, group) == {f"{made}-0": 23, f"{made}-1": 23}
    assert members(admin, group) == []
