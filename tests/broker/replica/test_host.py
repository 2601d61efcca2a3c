"""What a broker hosts, in step with ZooKeeper, through restarts, crashes and deletions."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.local.zookeeper import EmbeddedZooKeeper
from broker.replica.host import Host
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.watcher import Watcher
from kafkalog import Admin, Producer, errors
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.zk import paths, registry
from kafkalog.zk.session import Delete, Operation, ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import a_batch
from tests.kafkalog.zk.expiry import expire
from tests.waiting import waited_for

_PATIENT_SECONDS = 120.0


def until(broker: RunningBroker, reached: Callable[[], bool]) -> None:
    assert broker.broker.host.metadata.wait_until(reached, 30.0)


def test_a_topic_made_at_one_broker_is_known_and_hosted_at_the_other(start_broker: StartBroker) -> None:
    one, other = start_broker(0), start_broker(1)
    topic = one.new_topic(partitions=4)
    host = other.broker.host
    until(other, lambda: len(host.hosted) == 2)
    assert sorted(number for _, number in host.hosted) == [1, 3]
    until(other, lambda: len(host.metadata.topic("t").states) == 4)
    with pytest.raises(errors.NotLeader, match="broker 1 does not lead partition t-0"):
        host.leader_of(topic, 0)
    with pytest.raises(errors.UnknownPartition, match="topic 't' has no partition 4; it has 4"):
        host.leader_of(topic, 4)
    with pytest.raises(errors.UnknownTopicId):
        host.leader_of(b"?" * 16, 0)
    one.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"))
    until(other, lambda: not host.hosted and not host.metadata.topics)


def test_a_broker_that_comes_and_goes_is_seen(start_broker: StartBroker) -> None:
    one, other = start_broker(0), start_broker(1)
    host = one.broker.host
    until(one, lambda: set(host.metadata.brokers) == {0, 1})
    assert host.metadata.brokers[1].grpc_port == other.broker.grpc_port
    other.stop()
    until(one, lambda: set(host.metadata.brokers) == {0})


def test_an_unclean_start_raises_the_leader_epoch_and_a_clean_one_does_not(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.new_topic(partitions=2)

    def epochs(running: RunningBroker) -> list[int]:
        described = running.stub.DescribeTopics(bpb.DescribeTopicsRequest(names=["t"])).topics[0]
        assert [running.broker.host.leader_of(topic, number).log.last_epoch for number in (0, 1)] == [
            partition.leader_epoch for partition in described.partitions
        ]
        return [partition.leader_epoch for partition in described.partitions]

    assert epochs(broker) == [0, 0]
    for clean, expected in ((True, 0), (False, 1), (True, 1), (False, 2)):
        broker.stop(clean)
        broker = start_broker()
        assert epochs(broker) == [expected, expected]
    broker.new_topic("new")
    assert broker.broker.host.metadata.topic("new").states[0].leader_epoch == 0


def test_a_topic_deleted_while_a_broker_was_down_is_removed_when_it_is_back(start_broker: StartBroker) -> None:
    one, other = start_broker(0), start_broker(1)
    topic = one.new_topic(partitions=2)
    until(other, lambda: (topic, 1) in other.broker.host.hosted)
    folder = other.broker.host.leader_of(topic, 1).log.directory
    other.stop()
    one.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"))
    assert folder.exists()
    other = start_broker(1)
    assert not folder.exists()
    session = one.broker.host.metadata.session
    assert registry.deleted_topics(session) == set()


def test_a_deletion_takes_the_logs_of_its_topic_and_no_other(start_broker: StartBroker) -> None:
    broker = start_broker()
    gone, kept = broker.new_topic("gone", partitions=2), broker.new_topic("kept", partitions=2)
    with broker.client() as client:
        for partition in (0, 1):
            client.append(kept, a_batch(), partition=partition)
    folders = {topic: broker.broker.host.leader_of(topic, 0).log.directory for topic in (gone, kept)}
    session = broker.broker.host.metadata.session
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="gone"), timeout=60)
    while registry.deleted_topics(session):
        broker.broker.host.metadata.wait_until(lambda: False, 0.1)
    assert [folder.exists() for folder in folders.values()] == [False, True]
    with broker.client() as client:
        assert [client.append(kept, a_batch(), partition=number).base_offset for number in (0, 1)] == [1, 1]


def test_logs_of_a_topic_that_nobody_deleted_are_kept_and_told(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    folder = broker.broker.host.leader_of(topic, 0).log.directory
    session = broker.broker.host.metadata.session

    def tree(path: str) -> list[Operation]:
        below = [tree(f"{path}/{name}") for name in session.children(path)]
        return [*itertools.chain.from_iterable(below), Delete(path)]

    session.multi(tree(paths.topic("t")))  # as if ZooKeeper's data were an old backup; at once, or a state is made anew
    until(broker, lambda: not broker.broker.host.hosted)
    broker.stop()
    start_broker()
    assert folder.exists()
    assert f"stray_log topic_id={topic.hex()} partition=0" in caplog.text


def test_a_log_that_cannot_be_opened_is_told_to_those_who_ask_and_harms_no_other(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    opened = broker.broker.host._directory.open_log

    def open_log(topic_id: bytes, number: int, *rest: Any) -> Any:
        if number == 1:
            raise errors.DiskFull(directory="/data")
        return opened(topic_id, number, *rest)

    monkeypatch.setattr(broker.broker.host._directory, "open_log", open_log)
    waits: list[bool] = []
    wait_until = broker.broker.host.metadata.wait_until

    def waiting(reached: Callable[[], bool], seconds: float) -> bool:
        waits.append(wait_until(reached, seconds))
        return waits[-1]

    monkeypatch.setattr(broker.broker.host.metadata, "wait_until", waiting)
    topic = broker.new_topic(partitions=3)
    assert all(waits)  # for none of them until time is up
    with broker.client() as client:
        assert client.append(topic, a_batch(), partition=1).error.code == errors.DiskFull.code
        assert client.append(topic, a_batch(), partition=2).base_offset == 0
    raised: list[errors.DiskFull] = []
    for _ in range(2):
        with pytest.raises(errors.DiskFull) as each:
            broker.broker.host.leader_of(topic, 1)
        raised.append(each.value)
    assert raised[0] is not raised[1], "threads that raise one error at once write to one traceback"


def test_a_log_that_could_not_be_opened_is_tried_again_until_it_opens(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    opened = host._directory.open_log
    full = threading.Event()
    full.set()

    def open_log(*args: Any) -> Any:
        if full.is_set():
            raise errors.DiskFull(directory="/data")
        return opened(*args)

    monkeypatch.setattr(host._directory, "open_log", open_log)
    topic = broker.new_topic()
    assert broker.described("t").partitions[0].leader == -1
    assert host.metadata.topic("t").states == {}
    full.clear()
    until(broker, lambda: (topic, 0) in host.hosted)
    until(broker, lambda: 0 in host.metadata.topic("t").states)
    assert broker.described("t").partitions[0].leader == 0
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0


def test_a_session_lost_while_a_broker_starts_leaves_it_following(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    broker.new_topic()
    broker.stop()
    open_some = Host._open_some
    lost: list[str] = []

    def losing(self: Host, topic: registry.TopicRecord, start: int) -> tuple[registry.TopicRecord, int]:
        if not lost:
            lost.append(topic.name)
            expire(self.metadata.session)
        return open_some(self, topic, start)

    monkeypatch.setattr(Host, "_open_some", losing)
    broker = start_broker()
    assert lost
    registry.update_topic(
        broker.broker.host.metadata.session, replace(broker.record("t"), config={"retention.ms": "5"})
    )
    until(broker, lambda: broker.broker.host.metadata.topic("t").config == {"retention.ms": "5"})
    topic = broker.new_topic("late")
    until(broker, lambda: (topic, 0) in broker.broker.host.hosted)


def test_a_broker_that_opens_nothing_keeps_no_change_of_topics_waiting_for_long(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start_broker(0), start_broker(1)
    until(one, lambda: set(one.broker.host.metadata.brokers) == {0, 1})
    other.broker.watcher.stop()  # registered as before, like one that was killed a moment ago
    made = one.stub.CreateTopic(bpb.CreateTopicRequest(name="t", partitions=2), timeout=5)
    assert sorted(partition.leader for partition in made.partitions) == [-1, 0]
    monkeypatch.setattr("broker.requests.topics._OPENED_SECONDS", 3600.0)
    started = time.monotonic()
    one.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.ms": "5"}), timeout=60)
    assert time.monotonic() - started < 30, "settings wait for no log"


def test_a_topic_that_comes_and_goes_is_known_or_unknown_and_nothing_between(broker: RunningBroker) -> None:
    """Two views replaced one after the other once let a request between them meet a KeyError."""
    host = broker.broker.host
    topic = broker.new_topic()
    names = host.metadata._topics
    host.metadata._topics = {}
    try:
        assert host.metadata.topic_by_id(topic).name == "t"
        assert host.leader_of(topic, 0).label == "t-0"
        with pytest.raises(errors.UnknownPartition):
            host.leader_of(topic, 9)
    finally:
        host.metadata._topics = names


def test_without_zookeeper_data_is_served_and_what_needs_it_says_so(
    tmp_path: Path, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedZooKeeper(tmp_path / "zookeeper", durable=False)
    server.start()
    server.wait_ready(threading.Event().wait)
    try:
        # A session that lasts: under load a short one is lost while requests are under way, as nothing here is about.
        broker = start_broker(zookeeper_connect=server.connect)
        topic = broker.new_topic()
        session = broker.broker.host.metadata.session
        server.kill()
        waited_for(lambda: not session.connected, _PATIENT_SECONDS)
        with broker.client() as client:
            assert client.append(topic, a_batch()).base_offset == 0
            assert client.fetch(topic, 0)[0].end_offset == 1
        assert broker.stub.DescribeTopics(bpb.DescribeTopicsRequest()).topics[0].name == "t"
        with monkeypatch.context() as impatient:
            impatient.setattr(session, "_connection_timeout", 0.1)  # it would wait so long for a connection
            with pytest.raises(Exception, match=f"ZooKeeper at {server.connect} is not reachable"):
                broker.new_topic("other")
        server.start()
        server.wait_ready(threading.Event().wait, _PATIENT_SECONDS)
        waited_for(lambda: session.connected, _PATIENT_SECONDS)
        monkeypatch.setattr(session, "_connection_timeout", _PATIENT_SECONDS)
        broker.new_topic("other")
        with broker.client() as client:
            assert client.append(topic, a_batch()).base_offset == 1
    finally:
        broker.stop()
        server.stop()


def test_a_broker_whose_session_was_lost_registers_again(start_broker: StartBroker, chroot: str) -> None:
    broker = start_broker()
    host = broker.broker.host
    epoch = host.metadata.brokers[0].epoch
    expire(host.metadata.session)
    until(broker, lambda: 0 in host.metadata.brokers and host.metadata.brokers[0].epoch > epoch)
    other = ZooKeeperSession(chroot)
    other.start()
    assert registry.live_brokers(other)[0].grpc_port == broker.broker.grpc_port
    other.close()


def test_a_topic_of_many_partitions_is_usable_when_the_call_returns(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.new_topic(partitions=40)
    assert len(broker.broker.host.hosted) == 40
    with broker.client() as client:
        assert client.append(topic, a_batch(), partition=39).base_offset == 0


def test_a_topic_is_known_while_its_logs_are_being_opened_and_whoever_uses_it_waits(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the call that made it returned, and the next one said that there is no such topic."""
    host = broker.broker.host
    opened, opens = host._directory.open_log, threading.Semaphore(150)

    def open_log(*arguments: Any) -> Any:
        assert opens.acquire(timeout=_PATIENT_SECONDS)  # a disk that takes its time
        return opened(*arguments)

    monkeypatch.setattr(host._directory, "open_log", open_log)
    monkeypatch.setattr("broker.requests.topics._OPENED_SECONDS", 0.5)
    made = broker.stub.CreateTopic(bpb.CreateTopicRequest(name="t", partitions=250), timeout=60)
    assert made.partitions[249].leader == -1
    waited_for(lambda: broker.described("t").topic_id == made.topic_id)  # 0.5 s may be too short to read it
    with pytest.raises(errors.NotLeader):
        host.leader_of(made.topic_id, 249)
    address = f"127.0.0.1:{broker.broker.grpc_port}"
    with Admin(address) as admin, Producer(address) as producer:
        [topic] = admin.describe_topics(["t"])
        assert len(topic.partitions) == 250
        sent = [producer.send("t", b"x", partition=number) for number in (0, 249)]
        opens.release(100)
        assert [each.result(_PATIENT_SECONDS).offset for each in sent] == [0, 0]
    until(broker, lambda: len(host.metadata.topic("t").states) == 250)


def test_a_topic_made_while_another_ones_logs_are_being_opened_does_not_wait_for_them(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = broker.broker.host
    opened = host._directory.open_log
    small = registry.TopicRecord("small", b"s" * 16, {}, [(0,)], 0)
    seen = []

    def open_log(topic_id: bytes, number: int, label: str, *rest: Any) -> Any:
        if label == "many-50":
            registry.create_topic(host.metadata.session, small)
            waited_for(lambda: paths.TOPICS in host.metadata.dirty)
        if label == "many-599":
            seen.append((small.topic_id, 0) in host.hosted)
        return opened(topic_id, number, label, *rest)

    monkeypatch.setattr("broker.replica.host._TURN_SECONDS", 0.0)
    monkeypatch.setattr(host._directory, "open_log", open_log)
    made = broker.stub.CreateTopic(bpb.CreateTopicRequest(name="many", partitions=600), timeout=60)
    until(broker, lambda: len(host.metadata.topic("many").states) == 600)
    assert seen == [True]
    assert host.leader_of(made.topic_id, 599).label == "many-599"


def test_a_state_that_another_writes_while_a_topics_logs_are_being_opened_is_read_once_they_are(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, open_for_a_turn = broker.broker.host, Host.open_for_a_turn
    made = registry.TopicRecord("many", b"m" * 16, {}, [(0,)] * 100 + [(1,)], 0)
    changes = {paths.partition_state(made.name, made.topic_id, number) for number in range(101)}
    theirs = registry.PartitionState.only(1, "another")

    def turn(self: Host) -> None:
        open_for_a_turn(self)
        if self.is_opening("many"):  # one partition is left, which is not ours
            registry.write_states(self.metadata.session, made, {100: theirs})
            waited_for(lambda: changes <= self.metadata.dirty)  # none is left to come once no log is being opened

    monkeypatch.setattr("broker.replica.host._TURN_SECONDS", 0.0)
    monkeypatch.setattr(Host, "open_for_a_turn", turn)
    registry.create_topic(host.metadata.session, made)
    until(broker, lambda: "many" in host.metadata.topics and len(host.metadata.topic("many").states) == 101)
    assert host.metadata.leader_id(host.metadata.topic("many"), 100) == 1


# --- one bad topic ---------------------------------------------------------------------------------------------------


def test_a_change_of_a_topic_over_one_that_came_in_between_is_made_on_top_of_that(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.new_topic()
    update_topic = registry.update_topic

    def too_late(session: ZooKeeperSession, topic: registry.TopicRecord) -> bool:
        monkeypatch.setattr(registry, "update_topic", update_topic)
        assert update_topic(session, replace(topic, config={"segment.bytes": "5000"}))
        return update_topic(session, topic)

    monkeypatch.setattr(registry, "update_topic", too_late)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.ms": "7"}), timeout=30)
    assert dict(broker.described("t").config) == {"segment.bytes": "5000", "retention.ms": "7"}


def alter_as_a_newer_broker(broker: RunningBroker, name: str, config: dict[str, str]) -> None:
    assert registry.update_topic(broker.broker.host.metadata.session, replace(broker.record(name), config=config))
    until(broker, lambda: broker.broker.host.metadata.topic(name).config == config)


def test_settings_that_this_version_does_not_understand_are_kept_warned_of_once_and_ignored(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker()
    broker.new_topic(retention_ms=5000)
    given = {
        "cleanup.policy": "compact",
        "compression.level": "9",
        "segment.bytes": "-1",
        "retention.ms": "6000",
        "flush.visibility": "flushed",
    }
    alter_as_a_newer_broker(broker, "t", given)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.bytes": "77"}), timeout=60)
    assert broker.described("t").config == given | {"retention.bytes": "77"}
    for refused in ({"compression.level": "8"}, {"flush.visibility": "flushed"}, {"cleanup.policy": "compact"}):
        with pytest.raises(grpc.RpcError, match=r"is not valid|there is no topic setting"):
            broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set=refused), timeout=60)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", unset=["compression.level", "retention_bytes"]), timeout=60)
    described = broker.described("t")
    del given["compression.level"]
    assert described.config == given
    assert described.effective["segment.bytes"] == str(1 << 30)
    assert described.effective["flush.visibility"] == "written"
    # What a policy means to keep is not known, so nothing is deleted.
    assert (described.effective["retention.ms"], described.effective["retention.bytes"]) == ("-1", "-1")
    for name in ("cleanup.policy", "compression.level", "segment.bytes", "flush.visibility"):
        assert caplog.text.count(f"topic_setting_ignored topic=t setting={name} ") == 1
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"cleanup.policy": "delete"}), timeout=60)
    assert broker.described("t").effective["retention.ms"] == "6000"


def test_a_topic_with_a_setting_of_a_newer_version_is_served_and_keeps_no_other_from_being_made(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    alter_as_a_newer_broker(broker, "t", {"cleanup.policy": "compact", "compression.level": "9"})
    for _ in range(2):
        with broker.client() as client:
            client.append(topic, a_batch())
        name = f"made-{len(broker.broker.host.metadata.topics)}"
        broker.new_topic(name)
        assert broker.described(name).partitions[0].leader == 0
        broker.stop()
        broker = start_broker()
    assert broker.broker.host.leader_of(topic, 0).log.end_offset == 2


def test_a_topic_that_cannot_be_read_keeps_no_other_from_being_made_and_is_read_once_it_can_be(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    broker.new_topic("a")
    read, tries = registry.read_topic, []

    def counted(session: ZooKeeperSession, name: str, *watch: Any) -> Any:
        tries.extend([name] * (name == "a"))
        return read(session, name, *watch)

    monkeypatch.setattr(registry, "read_topic", counted)
    started = time.monotonic()
    session = broker.broker.host.metadata.session
    good, _ = session.get(paths.topic("a"))
    session.set(paths.topic("a"), b"{")
    broker.new_topic("b")
    assert broker.described("b").partitions[0].leader == 0
    broker.stop()
    broker = start_broker()
    assert set(broker.broker.host.metadata.topics) == {"b"}
    broker.new_topic("c")
    assert len(tries) < 5 + time.monotonic() - started, "it is tried again every second, not all the time"
    broker.broker.host.metadata.session.set(paths.topic("a"), good)
    until(broker, lambda: len(broker.broker.host.hosted) == 3)
    assert caplog.text.count("not_followed path=/brokers/topics/a") == 2  # once by each


def test_a_topic_that_could_not_be_read_is_tried_no_more_once_it_is_gone(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    host, path = broker.broker.host, paths.topic("bad")
    host.metadata.session.create(path, b"[" * 100_000)
    until(broker, lambda: path in host._undone.reasons)
    [record] = [record for record in caplog.records if record.getMessage().startswith("not_followed")]
    assert "cannot be read: its JSON is nested too deeply" in record.getMessage() and not record.exc_info
    host.metadata.session.delete(path)
    until(broker, lambda: path not in broker.broker.watcher._to_retry())


# --- trying again ----------------------------------------------------------------------------------------------------


class Refusing:
    """A function of a module that fails some times, for arguments of one's choice, before it does what it does."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, when: Callable[..., bool], times: int = 1) -> None:
        self.refused = threading.Event()
        found = getattr(registry, name)

        def call(*arguments: Any) -> Any:
            nonlocal times
            if times and when(*arguments):
                times -= 1
                self.refused.set()
                raise errors.ZooKeeperUnreachable(address="zk", reason="no answer in time")
            return found(*arguments)

        patch.setattr(registry, name, call)


def test_what_a_failed_sync_left_out_is_made_good_by_the_next(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    refusing = Refusing(monkeypatch, "read_topic", lambda _, name, *watch: name == "t" and bool(watch))
    topic = broker.new_topic()
    assert refusing.refused.is_set()
    assert (topic, 0) in broker.broker.host.hosted


def test_what_came_and_went_while_no_watch_was_there_is_seen_after_a_lost_session(
    start_broker: StartBroker, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, deaf = Metadata.path_changed, threading.Event()
    monkeypatch.setattr(
        Metadata, "path_changed", lambda self, path: None if deaf.is_set() else changed(self, path)
    )  # as ZooKeeper's watches are while the session is gone
    broker = start_broker()
    host = broker.broker.host
    gone, altered = broker.new_topic("gone"), broker.new_topic("altered")
    folder = host.leader_of(gone, 0).log.directory
    deaf.set()
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        registry.delete_topic(session, "gone")
        record = registry.read_topic(session, "altered")
        assert record is not None
        registry.update_topic(session, replace(record, config={"max.message.bytes": "2048"}))
        registry.create_topic(session, registry.TopicRecord("made", b"m" * 16, {}, [(0,)], 0))
        registry.register_broker(session, replace(host.metadata.brokers[0], broker_id=7))
        deaf.clear()
        expire(host.metadata.session)
        until(broker, lambda: (b"m" * 16, 0) in host.hosted and set(host.metadata.brokers) == {0, 7})
    assert set(host.metadata.topics) == {"altered", "made"}
    assert host.leader_of(altered, 0).settings.max_message_bytes == 2048
    assert (gone, 0) not in host.hosted
    waited_for(lambda: not folder.exists())  # removed by the same round, after what was awaited above
    until(broker, lambda: set(host.metadata.brokers) == {0})


def test_a_registration_that_failed_after_a_lost_session_is_made_good(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    epoch = host.metadata.brokers[0].epoch
    refusing = Refusing(monkeypatch, "register_broker", lambda *_: True)
    expire(host.metadata.session)
    until(broker, lambda: 0 in host.metadata.brokers and host.metadata.brokers[0].epoch > epoch)
    assert refusing.refused.is_set()


def test_a_log_that_was_opened_and_whose_state_could_not_be_written_is_closed_before_it_is_opened_again(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, closed, close = broker.broker.host, list[str](), Partition.close

    def noted(partition: Partition) -> None:
        closed.append(partition.label)
        close(partition)

    monkeypatch.setattr(Partition, "close", noted)
    refusing = Refusing(monkeypatch, "write_states", lambda *_: True)
    topic = broker.new_topic()
    until(broker, lambda: (topic, 0) in host.hosted)
    assert refusing.refused.is_set()
    assert closed == ["t-0"]


def test_a_state_is_known_once_it_is_written_whenever_zookeeper_reports_the_change(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = broker.broker.host
    monkeypatch.setattr("broker.requests.topics._OPENED_SECONDS", 0.1)
    monkeypatch.setattr(registry, "write_states", lambda session, topic, states: dict(states))  # it never does
    broker.new_topic()
    until(broker, lambda: "t" in host.metadata.topics and host.metadata.topic("t").states.keys() == {0})
    assert broker.described("t").partitions[0].leader == 0


def test_a_topic_that_is_gone_as_its_states_are_written_is_hosted_by_nobody_and_no_defect(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, written = broker.broker.host, threading.Event()

    def nowhere(*_: object) -> dict[int, registry.PartitionState]:
        written.set()
        return {}

    monkeypatch.setattr("broker.requests.topics._OPENED_SECONDS", 0.1)
    monkeypatch.setattr(registry, "write_states", nowhere)
    broker.new_topic()
    assert written.wait(30)
    until(broker, lambda: "t" in host.metadata.topics and not host.is_behind("t"))
    assert host.hosted == {}
    assert "not_followed" not in caplog.text


def test_a_broker_whose_disk_fails_as_it_registers_is_found_by_nobody(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = broker.broker.host
    register, withdraw, withdrawn = registry.register_broker, registry.withdraw_broker, threading.Event()

    def withdrawing(session: ZooKeeperSession, record: registry.BrokerRecord) -> None:
        withdraw(session, record)
        withdrawn.set()

    def too_late(session: ZooKeeperSession, record: registry.BrokerRecord) -> Any:
        host._directory.services.health.fail(errors.StorageFailed(directory="/data", reason="fdatasync"))
        assert withdrawn.wait(_PATIENT_SECONDS)
        return register(session, record)

    monkeypatch.setattr(registry, "withdraw_broker", withdrawing)
    monkeypatch.setattr(registry, "register_broker", too_late)
    with pytest.raises(errors.StorageFailed):
        broker.broker.registration.register()
    assert registry.live_brokers(host.metadata.session) == {}


class Replacement:
    """A broker of another directory that takes the id 0, and leads t-0."""

    def __init__(self, session: ZooKeeperSession, before: registry.BrokerRecord) -> None:
        self.session = session
        self.record = replace(before, directory="another", where="host:/another")
        self.state: registry.PartitionState | None = None

    def take(self) -> None:
        assert registry.register_broker(self.session, self.record) is None
        while self.state is None or self.state.directories[0] != "another":
            topic = registry.read_topic(self.session, "t")
            assert topic is not None
            state = topic.states[0]
            directories = {**state.directories, 0: "another"}
            led = replace(state, leader=0, leader_epoch=state.leader_epoch + 1, isr=(0, 1), directories=directories)
            self.state = registry.write_states(self.session, topic, {0: led})[0]


@pytest.mark.parametrize("moment", ["as it registers again", "amid a look at the states"])
def test_a_broker_that_another_one_replaced_while_it_was_cut_off_gives_up(
    start_broker: StartBroker,
    chroot: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    """What the states say of its id is said of the other one. It led beside that one, or emptied its log."""
    broker, _ = start_broker(0), start_broker(1)
    host = broker.broker.host
    topic = bytes(broker.stub.CreateTopic(bpb.CreateTopicRequest(name="t", replicas=2), timeout=30).topic_id)
    waited_for(lambda: (topic, 0) in host.hosted)
    replaced, [log] = threading.Event(), (tmp_path / "broker-0" / f"{topic.hex()}-0").glob("*.log")
    broker.broker.on_replaced = replaced.set
    inode = log.stat().st_ino
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        other = Replacement(session, host.metadata.brokers[0])
        if moment == "as it registers again":
            register = registry.register_broker

            def too_late(session: ZooKeeperSession, record: registry.BrokerRecord) -> Any:
                monkeypatch.undo()
                other.take()
                return register(session, record)

            monkeypatch.setattr(registry, "register_broker", too_late)
            expire(host.metadata.session)
        else:
            read = Watcher._read_topics

            def cut_off(self: Watcher, dirty: Collection[str]) -> None:
                if self is broker.broker.watcher:
                    monkeypatch.undo()
                    expire(host.metadata.session)
                    other.take()
                    dirty = {*dirty, paths.topic("t")}
                read(self, dirty)

            monkeypatch.setattr(Watcher, "_read_topics", cut_off)
            host.metadata.path_changed(paths.topic("t"))
        assert replaced.wait(30)
        assert host.hosted == {}
        with pytest.raises(errors.NotLeader):
            host.leader_of(topic, 0)
        assert broker.broker.registration.epoch == 0
        assert not host.metadata.is_certain()
        broker.stop()
        record = registry.read_topic(session, "t")
        assert record is not None and record.states[0] == other.state
        registered = registry.live_brokers(session)[0]
        assert (registered.directory, registered.epoch) == ("another", session.get(paths.broker_epoch(0))[1].version)
    assert log.stat().st_ino == inode
    assert caplog.text.count("broker_replaced broker_id=0") == 1
    assert "has this id (host:/another)" in caplog.text
    assert "leaderships_not_handed_over" not in caplog.text


def test_a_log_to_be_opened_again_of_a_topic_that_no_sync_has_taken_in_ends_no_thread(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    opened, full = host._directory.open_log, threading.Event()
    full.set()

    def open_log(topic_id: bytes, number: int, *rest: Any) -> Any:
        if number == 1 and full.is_set():
            raise errors.DiskFull(directory="/data")
        return opened(topic_id, number, *rest)

    monkeypatch.setattr(host._directory, "open_log", open_log)
    refusing = Refusing(monkeypatch, "write_states", lambda _, topic, *rest: topic.name == "b")
    with host.metadata.changed:  # so that one sync sees both
        for name in ("a", "b"):
            topic = registry.TopicRecord(name, name.encode() * 16, {}, [(0,), (0,)], 0)
            registry.create_topic(host.metadata.session, topic)
    until(broker, lambda: len(host.hosted) == 2)
    assert refusing.refused.is_set()
    full.clear()
    until(broker, lambda: len(host.hosted) == 4)


def test_a_deleted_log_that_cannot_be_removed_holds_nothing_up_and_is_removed_later(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    folder = host.leader_of(broker.new_topic(), 0).log.directory
    removed, stuck = host._directory.remove_log, threading.Event()
    stuck.set()

    def remove_log(*arguments: Any) -> None:
        if stuck.is_set():
            raise errors.OutOfFiles(directory="/data", reason="Too many open files")
        removed(*arguments)

    monkeypatch.setattr(host._directory, "remove_log", remove_log)
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
    assert "t" not in host.metadata.topics
    broker.new_topic("other")
    assert folder.exists()
    stuck.clear()
    while registry.deleted_topics(host.metadata.session):
        host.metadata.wait_until(lambda: False, 0.1)
    assert not folder.exists()


def removals_that_fail(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete a topic whose logs stay where they are."""
    host = broker.broker.host
    broker.new_topic()

    def remove_log(*_: Any) -> None:
        raise errors.StorageFailed(directory="/data", reason="Read-only file system")

    monkeypatch.setattr(host._directory, "remove_log", remove_log)
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
    until(broker, lambda: bool(host._undone.reasons))


def test_a_deletion_that_could_not_be_done_is_left_to_the_next_start_once_the_directory_has_failed(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    removals_that_fail(broker, monkeypatch)
    host._directory.services.health.fail(errors.StorageFailed(directory="/data", reason="Read-only file system"))
    until(broker, lambda: not broker.broker.watcher._to_retry())
    assert registry.deleted_topics(host.metadata.session)


def test_a_deletion_that_another_has_seen_to_is_not_tried_again(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    removals_that_fail(broker, monkeypatch)
    for topic_id in registry.deleted_topics(host.metadata.session):
        registry.logs_removed(host.metadata.session, topic_id, 0)
    until(broker, lambda: not broker.broker.watcher._to_retry())


def test_what_stays_undone_is_looked_at_once_a_second(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    host = broker.broker.host
    read, seen = registry.deleted_topics, list[float]()

    def noted(*arguments: Any) -> set[bytes]:
        seen.append(time.monotonic())
        return read(*arguments)

    monkeypatch.setattr(registry, "deleted_topics", noted)
    host._undone.reasons |= {"/nobody/deals/with/it": "whatever the reason"}
    host.metadata.path_changed(paths.DELETED_TOPICS)
    waited_for(lambda: len(seen) >= 4)
    assert seen[3] - seen[1] > 0.9  # the first came by itself, and the second may have as well


def test_a_change_that_comes_during_a_sync_is_not_missed(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    broker.new_topic()
    open_some = Host._open_some
    altered: list[registry.TopicRecord] = []

    def late(self: Host, topic: registry.TopicRecord, start: int) -> tuple[registry.TopicRecord, int]:
        if not altered and topic.config == {"retention.ms": "5"}:
            altered.append(topic)
            registry.update_topic(self.metadata.session, replace(topic, config={"retention.ms": "6"}))
        return open_some(self, topic, start)

    monkeypatch.setattr(Host, "_open_some", late)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.ms": "5"}), timeout=60)
    until(broker, lambda: host.leader_of(host.metadata.topic("t").topic_id, 0).settings.retention_ms == 6)
    assert host.metadata.topic("t").config == {"retention.ms": "6"}


def test_settings_reach_partitions_that_are_open(broker: RunningBroker) -> None:
    topic = broker.new_topic(partitions=2)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"max.message.bytes": "2048"}), timeout=60)
    for number in (0, 1):
        partition = broker.broker.host.leader_of(topic, number)
        assert partition.settings.max_message_bytes == partition.log.settings.max_message_bytes == 2048


def without_state(broker: RunningBroker, topic: bytes) -> None:
    broker.broker.host.metadata.session.delete(paths.partition_state("t", topic, 0))


def test_a_state_that_is_gone_is_written_again_by_the_broker_that_has_the_log_open(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    host = broker.broker.host
    before = host.metadata.topic("t").states[0]
    without_state(broker, topic)
    waited_for(lambda: "partition_state_missing partition=t-0" in caplog.text)
    until(broker, lambda: 0 in host.metadata.topic("t").states)
    assert host.metadata.topic("t").states[0] == before
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0


@pytest.mark.parametrize("clean", [True, False])
def test_a_state_that_went_while_its_broker_was_down_is_not_taken_for_that_of_a_new_log(
    start_broker: StartBroker, clean: bool
) -> None:
    broker, other = start_broker(0), start_broker(1)
    topic = broker.new_topic()
    broker.stop(clean=False)
    broker = start_broker()
    with broker.client() as client:
        client.append(topic, a_batch())
    assert broker.broker.host.metadata.topic("t").states[0].leader_epoch == 1
    broker.stop(clean)
    without_state(other, topic)
    broker = start_broker()
    state = broker.broker.host.metadata.topic("t").states[0]
    assert state.leader_epoch == (1 if clean else 2) == broker.broker.host.leader_of(topic, 0).log.last_epoch
    assert state.directory
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 1


def without_id(broker: RunningBroker, topic: bytes) -> None:
    below = (paths.partition_state("t", topic, 0), paths.partition("t", topic, 0), paths.partitions("t", topic))
    broker.broker.host.metadata.session.multi([Delete(path) for path in below])


@pytest.mark.parametrize("running", [True, False], ids=["running", "down"])
def test_a_topic_whose_id_is_gone_in_zookeeper_is_served_on_and_can_be_deleted(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, running: bool
) -> None:
    broker, other = start_broker(0), start_broker(1)
    topic = broker.new_topic()
    with broker.client() as client:
        client.append(topic, a_batch())
    if not running:
        broker.stop()
    without_id(other, topic)
    if not running:
        broker = start_broker()
    host = broker.broker.host
    waited_for(lambda: "topic_znode_restored topic=t" in caplog.text)
    until(broker, lambda: 0 in host.metadata.topic("t").states and (topic, 0) in host.hosted)
    until(other, lambda: 0 in other.broker.host.metadata.topic("t").states)
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 1
    without_id(other, topic)
    other.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
    until(broker, lambda: not host.hosted)


def test_a_deletion_that_is_slow_harms_no_topic_created_again_under_the_name(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = start_broker(0), start_broker(1)
    slow.new_topic(partitions=2)
    session, send = slow.broker.host.metadata.session, slow.broker.host.metadata.session.multi
    held, may_go_on = threading.Event(), threading.Event()

    def late(operations: Sequence[Operation]) -> None:
        if any(isinstance(each, Delete) for each in operations) and not held.is_set():
            held.set()
            assert may_go_on.wait(60)
        send(operations)

    monkeypatch.setattr(session, "multi", late)
    deletion = slow.stub.DeleteTopic.future(bpb.DeleteTopicRequest(name="t"), timeout=60)
    assert held.wait(30)
    topic = other.new_topic(partitions=2)
    other.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.ms": "7"}), timeout=30)
    may_go_on.set()
    deletion.result(60)
    record = registry.read_topic(other.broker.host.metadata.session, "t")
    assert record is not None
    assert record.topic_id == topic
    for running in (slow, other):
        until(running, lambda host=running.broker.host: topic in host.metadata.ids)  # type: ignore[misc]
        assert [partition.leader for partition in running.described("t").partitions] == [0, 1]


def test_folders_for_which_there_was_no_room_are_made_once_there_is(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    host = broker.broker.host
    disk = host._directory.disk
    make_dir = disk.make_dir
    full = threading.Event()
    full.set()

    def make_dir_if_there_is_room(path: Path) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make_dir(path)

    monkeypatch.setattr(disk, "make_dir", make_dir_if_there_is_room)
    topic = broker.new_topic()
    with broker.client() as client:
        assert client.append(topic, a_batch()).error.code == errors.DiskFull.code
    full.clear()
    until(broker, lambda: (topic, 0) in host.hosted)
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0
