"""A partition whose log is not where its state says is lost: refused, told, and never served as an empty one."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.replica.watcher import Watcher
from broker.requests.topics import OFFSETS_SKIPPED
from broker.states import reassignment
from kafkalog import Admin, Consumer, Producer, TopicPartition, errors
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.zk import paths, registry
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import a_batch
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(120)


def until(broker: RunningBroker, reached: Callable[[], bool]) -> None:
    assert broker.broker.host.metadata.wait_until(reached, 60.0)


def filled(broker: RunningBroker, partitions: int = 2) -> bytes:
    """A topic with five records in each partition."""
    topic = broker.new_topic(partitions=partitions)
    with broker.client() as client:
        for partition in range(partitions):
            client.append(topic, a_batch([b"old%d" % number for number in range(5)]), partition=partition)
    return topic


def folder(tmp_path: Path, topic: bytes, partition: int) -> Path:
    return tmp_path / "broker-0" / f"{topic.hex()}-{partition}"


def wipe_directory(tmp_path: Path, topic: bytes) -> None:
    shutil.move(tmp_path / "broker-0", tmp_path / "kept")


def wipe_folder(tmp_path: Path, topic: bytes) -> None:
    shutil.move(folder(tmp_path, topic, 0), tmp_path / "kept")


def empty_folder(tmp_path: Path, topic: bytes) -> None:
    shutil.copytree(folder(tmp_path, topic, 0), tmp_path / "kept")
    for path in folder(tmp_path, topic, 0).iterdir():
        if path.is_file():
            path.unlink()


def put_back(tmp_path: Path, topic: bytes, wipe: object) -> None:
    place = tmp_path / "broker-0" if wipe is wipe_directory else folder(tmp_path, topic, 0)
    shutil.rmtree(place, ignore_errors=True)
    shutil.move(tmp_path / "kept", place)


def assert_lost(broker: RunningBroker, topic: bytes, partition: int, reason: str) -> None:
    sentence = rf"partition t-{partition} is lost: {reason}.*kafkalog topics recover t --partition {partition} --accept"
    with pytest.raises(errors.PartitionLost, match=sentence) as caught:
        broker.broker.host.leader_of(topic, partition)
    assert not caught.value.retriable
    with broker.client() as client:
        assert client.append(topic, a_batch(), partition=partition).error.code == errors.PartitionLost.code
        assert client.fetch(topic, 5, partition=partition)[0].error.code == errors.PartitionLost.code
    wanted = bpb.ListOffsetsRequest(partitions=[bpb.ListOffset(topic_id=topic, partition=partition)])
    assert broker.stub.ListOffsets(wanted, timeout=30).partitions[0].error.code == errors.PartitionLost.code
    described = broker.described("t").partitions[partition]
    assert (described.leader, described.error.code) == (0, errors.PartitionLost.code)


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("wipe", [wipe_directory, wipe_folder, empty_folder])
def test_a_log_that_is_gone_is_refused_and_served_again_once_it_is_back(
    start_broker: StartBroker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wipe: Callable[[Path, bytes], None],
    clean: bool,
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop(clean)
    wipe(tmp_path, topic)
    broker = start_broker()
    if wipe is wipe_directory:
        for partition in (0, 1):
            assert_lost(broker, topic, partition, "its log is in data directory [0-9a-f]{32}, but broker 0 has")
        assert broker.new_topic("other")  # the new directory is as good as any
        assert broker.broker.host.leader_of(broker.broker.host.metadata.topic("other").topic_id, 0).log.end_offset == 0
    else:
        assert_lost(broker, topic, 0, rf"its folder {topic.hex()}-0 is missing from data directory")
        assert broker.broker.host.leader_of(topic, 1).log.end_offset == 5
    assert caplog.text.count("partition_lost partition=t-0") == 1
    broker.stop(clean)
    put_back(tmp_path, topic, wipe)
    broker = start_broker()
    for partition in (0, 1):
        log = broker.broker.host.leader_of(topic, partition).log
        assert (log.start_offset, log.end_offset) == (0, 5)
        assert log.last_epoch == 0 or not clean or wipe is not wipe_directory
    assert not any(partition.HasField("error") for partition in broker.described("t").partitions)


def test_a_lost_log_without_another_copy_is_not_moved_and_stays_the_only_one_amid_a_move(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """It left the in-sync set, as if others had copies. Nobody led from then on, also once the log was back."""
    broker, other = start_broker(), start_broker(1)
    topic = broker.new_topic(partitions=2)
    number = next(number for number in (0, 1) if broker.record("t").preferred_leader(number) == 0)
    with broker.client() as client:
        assert not client.append(topic, a_batch([b"old"]), partition=number).HasField("error")
    broker.stop()
    wipe_directory(tmp_path, topic)
    broker = start_broker()
    where = TopicPartition("t", number)
    with Admin(f"127.0.0.1:{broker.broker.grpc_port}") as admin:
        [asked] = [each for each in admin.reassign("t", to_brokers=[1]) if each.partition == where]
        assert isinstance(asked.error, errors.PartitionLost)
    record = broker.record("t")
    before = record.states[number]
    begun = reassignment.begin(before, record.replicas[number], (1,), 0)  # as before the loss
    registry.change_states(broker.broker.host.metadata.session, [registry.StateChange(record, number, before, begun)])
    until(broker, lambda: broker.broker.host.metadata.topic("t").states[number].target == (1,))
    waited_for(lambda: not broker.broker.host.has_work)
    state = broker.record("t").states[number]
    assert (state.leader, state.isr) == (0, (0,))
    assert isinstance(broker.broker.host.failure(topic, number), errors.PartitionLost)
    broker.stop()
    put_back(tmp_path, topic, wipe_directory)
    broker = start_broker()
    waited_for(lambda: broker.record("t").states[number].replicas == (1,), 60)
    waited_for(lambda: other.broker.host.hosted[topic, number].role.leads)  # it reads the state that names it by itself
    assert other.broker.host.leader_of(topic, number).log.end_offset == 1


def test_a_folder_that_a_kill_left_and_that_was_away_over_a_clean_stop_is_not_taken_for_clean(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop(clean=False)
    wipe_folder(tmp_path, topic)
    start_broker().stop()
    put_back(tmp_path, topic, wipe_folder)
    broker = start_broker()
    assert broker.broker.host.leader_of(topic, 0).log.last_epoch == 1


def test_a_directory_that_was_moved_under_another_host_name_is_the_same_broker(
    start_broker: StartBroker, tmp_path: Path, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    topic = filled(broker)
    (registered,) = broker.broker.host.metadata.brokers.values()
    broker.stop()
    with contextlib.closing(ZooKeeperSession(chroot)) as session:
        session.start()
        registry.register_broker(session, registered)  # as if it had been killed: its registration outlives it
        (tmp_path / "broker-0").rename(tmp_path / "elsewhere")
        monkeypatch.setattr("socket.gethostname", lambda: "renamed")
        moved = start_broker(0, log_dir=str(tmp_path / "elsewhere"), zookeeper_session_timeout_ms=3_600_000)
        assert moved.broker.host.leader_of(topic, 1).log.end_offset == 5
        new_place = f"renamed:{tmp_path / 'elsewhere'}"
        until(moved, lambda: [each.where for each in moved.broker.host.metadata.brokers.values()] == [new_place])


def test_a_copy_of_a_live_brokers_directory_opens_nothing(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    topic = filled(broker)
    shutil.copytree(tmp_path / "broker-0", tmp_path / "copy")
    with pytest.raises(
        errors.InvalidSetting, match=r"the broker at 127\.0\.0\.1:\d+ has this id .* is a copy of the other"
    ):
        start_broker(0, log_dir=str(tmp_path / "copy"), zookeeper_session_timeout_ms=1000)
    states = broker.record("t").states
    assert [states[number].leader_epoch for number in (0, 1)] == [0, 0]
    assert set(registry.live_brokers(broker.broker.host.metadata.session)) == {0}
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 5


def test_a_crash_between_a_new_partitions_folder_and_its_state_leaves_it_to_be_made(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()

    with monkeypatch.context() as patched:
        patched.setattr(registry, "write_states", unreachable)
        patched.setattr("broker.requests.topics._OPENED_SECONDS", 0.0)
        topic = broker.new_topic()
        while not folder(tmp_path, topic, 0).exists():
            broker.broker.host.metadata.wait_until(lambda: False, 0.05)
        broker.stop(clean=False)
    broker = start_broker()
    assert broker.described("t").partitions[0].leader == 0
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 0


def test_a_state_that_another_directory_was_faster_to_write_is_respected(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two brokers of one id, each over a directory of its own, may both see a new topic before one is refused."""
    broker = start_broker()
    written = registry.write_states

    def second(
        session: ZooKeeperSession, topic: registry.TopicRecord, states: dict[int, registry.PartitionState]
    ) -> object:
        written(session, topic, {0: replace(states[0], directories={0: "another"})})
        return written(session, topic, states)

    monkeypatch.setattr("broker.replica.host.registry.write_states", second)
    topic = broker.new_topic()
    assert_lost(broker, topic, 0, "its log is in data directory another, but broker 0 has")


def test_a_partition_that_another_directory_took_over_is_served_no_longer(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    partition = host.leader_of(topic, 0)
    record = broker.record("t")
    taken = replace(record.states[0], leader_epoch=1, directories={0: "another"})
    registry.write_states(host.metadata.session, record, {0: taken})
    until(broker, lambda: (topic, 0) not in host.hosted)
    assert_lost(broker, topic, 0, "its log is in data directory another, but broker 0 has")
    with pytest.raises(errors.NotLeader):
        partition.read(0, 100, None)
    assert host.leader_of(topic, 1).log.end_offset == 5
    recovered = recover(broker, topic, 0, start_offset=70)
    assert (recovered.start_offset, recovered.leader_epoch) == (70, 2)
    assert host.leader_of(topic, 0).log.end_offset == 70


# --- removed while the broker runs -----------------------------------------------------------------------------------


def remove_last_segment(tmp_path: Path, topic: bytes) -> None:
    log = folder(tmp_path, topic, 0)
    shutil.copytree(log, tmp_path / "kept")
    (log / f"{0:020d}.log").unlink()
    (log / f"{5:020d}.log").write_bytes(b"")  # as another segment is left: the folder is not empty


def replace_by_copy(tmp_path: Path, topic: bytes) -> None:
    shutil.move(folder(tmp_path, topic, 0), tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", folder(tmp_path, topic, 0))


@pytest.mark.parametrize("wipe", [wipe_folder, empty_folder, remove_last_segment, replace_by_copy])
def test_a_log_that_is_removed_while_it_is_open_is_lost_until_it_is_back_at_a_start(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, wipe: Callable[[Path, bytes], None]
) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    partition = host.leader_of(topic, 0)
    assert partition.log.flushed_offset == 0  # so that a round which does not see it would save it, where it was
    partition.waiters.register(lambda: None)
    wipe(tmp_path, topic)
    host._directory.tidy()
    until(broker, lambda: host.failure(topic, 0) is not None)
    told = (
        "its folder {} is missing" if wipe in (wipe_folder, empty_folder) else "files of its folder {} .* were removed"
    )
    assert_lost(broker, topic, 0, told.format(f"{topic.hex()}-0"))
    with pytest.raises(errors.NotLeader):
        partition.append_as_leader([])
    assert len(partition.waiters) == 0
    assert host.leader_of(topic, 1).log.end_offset == 5
    counters = broker.counters()
    assert (counters["partitions.served"], counters["partitions.unserved"]) == (1, 1)
    put_back(tmp_path, topic, wipe)
    broker.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"retention.ms": "1000000"}), timeout=60)
    host._directory.tidy()
    assert_lost(broker, topic, 0, "files of its folder")  # nobody knows what else was done to it meanwhile
    assert host.failed is None
    assert "log_directory_failed" not in caplog.text
    broker.stop()
    assert not (tmp_path / "broker-0" / "clean").exists()
    broker = start_broker()
    log = broker.broker.host.leader_of(topic, 0).log
    assert (log.end_offset, log.last_epoch) == (5, 1)


def test_a_log_that_could_not_be_taken_out_at_once_is_taken_out_later(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.replica.undone.RETRY_SECONDS", 0.05)
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    note_if_missing, refused = host._directory.note_if_missing, threading.Event()

    def out_of_files(topic_id: bytes, partition: int) -> bool:
        if not refused.is_set():
            refused.set()
            raise errors.OutOfFiles(directory="/data", reason="too many open files")
        return note_if_missing(topic_id, partition)

    wipe_folder(tmp_path, topic)
    monkeypatch.setattr(host._directory, "note_if_missing", out_of_files)
    host._directory.tidy()
    assert refused.wait(60)
    until(broker, lambda: host.failure(topic, 0) is not None)
    assert (topic, 0) not in host.hosted


def test_the_broker_looks_for_its_logs_from_time_to_time_and_says_once_that_one_is_gone(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker(log_retention_check_interval_ms=20)
    topic = filled(broker)
    host = broker.broker.host
    tidy, rounds = host._directory.tidy, threading.Semaphore(0)
    monkeypatch.setattr(host._directory, "tidy", lambda: (tidy(), rounds.release()))

    def some_rounds_pass() -> None:
        while rounds.acquire(blocking=False):
            pass  # of those before
        for _ in range(3):
            assert rounds.acquire(timeout=60)

    wipe_folder(tmp_path, topic)
    until(broker, lambda: host.failure(topic, 0) is not None)
    some_rounds_pass()
    assert caplog.text.count("partition_lost partition=t-0") == 1
    assert broker.broker.watcher._to_retry() == set(), "a lost log is not opened by trying again"
    assert_lost(broker, topic, 0, rf"its folder {topic.hex()}-0 is missing")
    recovered = recover(broker, topic, 0, start_offset=12)
    assert (recovered.start_offset, recovered.leader_epoch) == (12, 1)
    assert host.leader_of(topic, 0).log.end_offset == 12
    some_rounds_pass()
    assert host.failure(topic, 0) is None


def test_logs_of_a_topic_that_are_removed_one_after_the_other_are_all_lost(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    topic = filled(broker, partitions=3)
    host = broker.broker.host
    for number in range(2):
        shutil.rmtree(folder(tmp_path, topic, number))
        host._directory.tidy()
        until(broker, lambda: len(host.unserved()) > number)  # noqa: B023
    for number in range(2):
        assert_lost(broker, topic, number, rf"its folder {topic.hex()}-{number} is missing")
    assert host.leader_of(topic, 2).log.end_offset == 5


def test_a_directory_whose_lost_log_was_deleted_is_clean_again(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    empty_folder(tmp_path, topic)
    host._directory.tidy()
    until(broker, lambda: host.failure(topic, 0) is not None)
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
    broker.stop()
    assert (tmp_path / "broker-0" / "clean").exists()


def test_a_roll_in_a_folder_that_is_gone_takes_its_partition_out_and_no_other(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    wipe_folder(tmp_path, topic)
    with pytest.raises(errors.NotLeader), host.leader_of(topic, 0).role.hosted():
        host.leader_of(topic, 0).log.delete_before(5)  # all of it: another segment is to be made
    until(broker, lambda: host.failure(topic, 0) is not None)
    assert_lost(broker, topic, 0, rf"its folder {topic.hex()}-0 is missing")
    assert host.failed is None
    with broker.client() as client:
        assert client.append(topic, a_batch(), partition=1).base_offset == 5


def test_a_topic_that_is_deleted_while_its_logs_are_looked_for_is_no_loss(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    log = host.leader_of(topic, 0).log
    is_gone = log.is_gone

    def deleted_meanwhile() -> bool:
        monkeypatch.setattr(log, "is_gone", is_gone)
        broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
        until(broker, lambda: not host._directory.logs())
        return True

    monkeypatch.setattr(log, "is_gone", deleted_meanwhile)
    host._directory.tidy()
    assert host.failure(topic, 0) is None
    assert "partition_lost" not in caplog.text
    assert not host._directory._missing


def test_a_data_directory_that_is_removed_takes_its_broker_out_of_service(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    topic = filled(broker)
    host = broker.broker.host
    wipe_directory(tmp_path, topic)
    host._directory.tidy()
    with pytest.raises(
        errors.StorageFailed, match="the directory was removed, emptied or replaced while it was in use"
    ):
        host.leader_of(topic, 0)
    until(broker, lambda: 0 not in host.metadata.brokers)
    assert not list(host.unserved())  # no partition is lost by it
    broker.stop()
    shutil.move(tmp_path / "kept", tmp_path / "broker-0")
    broker = start_broker()
    assert broker.broker.host.leader_of(topic, 0).log.end_offset == 5


# --- recovering ------------------------------------------------------------------------------------------------------


def recover(broker: RunningBroker, topic: bytes, partition: int, **options: int) -> bpb.RecoveredPartition:
    request = bpb.RecoverPartitionsRequest(topic_id=topic, partitions=[partition], **options)
    reply: bpb.RecoverPartitionsReply = broker.stub.RecoverPartitions(request, timeout=60)
    return reply.partitions[0]


@pytest.mark.parametrize("wipe", [wipe_directory, wipe_folder, empty_folder])
def test_a_recovered_partition_gives_out_no_offset_a_second_time(
    start_broker: StartBroker, tmp_path: Path, wipe: Callable[[Path, bytes], None]
) -> None:
    broker = start_broker()
    topic = filled(broker)
    address = f"127.0.0.1:{broker.broker.grpc_port}"
    with Admin(address) as admin:
        admin.commit("ahead", {TopicPartition("t", 0): 4})
        admin.commit("behind", {TopicPartition("t", 0): 2})
    session = broker.broker.host.metadata.session
    content, _ = session.get(paths.partition_state("t", topic, 0))
    session.set(paths.partition_state("t", topic, 0), json.dumps({**json.loads(content), "newer": 1}).encode())
    broker.stop()
    wipe(tmp_path, topic)
    broker = start_broker()
    address = f"127.0.0.1:{broker.broker.grpc_port}"
    with Admin(address) as admin:
        lost = admin.unserved(["t"])
        assert all(isinstance(error, errors.PartitionLost) for error in lost.values())
        begun = admin.recover_partitions("t")
        assert set(begun) == set(lost)
        assert begun[TopicPartition("t", 0)] == 4 + OFFSETS_SKIPPED
        assert begun.get(TopicPartition("t", 1), OFFSETS_SKIPPED) == OFFSETS_SKIPPED
        assert admin.unserved(["t"]) == {}
        assert admin.recover_partitions("t") == {}
    state = broker.described("t").partitions[0]
    assert (state.leader, state.leader_epoch, state.error.code) == (0, 1, 0)
    assert broker.record("t").states[0].unknown == {"newer": 1}
    with Producer(address) as producer:
        producer.send("t", b"new", partition=0).result(60)
    with Consumer(address, "behind") as consumer:
        consumer.assign({TopicPartition("t", 0): "committed"})
        with pytest.raises(errors.OffsetOutOfRange, match=rf"offset 2 of t-0 is outside \[{4 + OFFSETS_SKIPPED}, "):
            next(iter(consumer))
    broker.stop()
    broker = start_broker()  # and it stays so
    assert broker.broker.host._directory.was_clean  # nothing is missing any more
    log = broker.broker.host.leader_of(topic, 0).log
    assert (log.start_offset, log.end_offset) == (4 + OFFSETS_SKIPPED, 5 + OFFSETS_SKIPPED)


def test_no_groups_impossible_offset_decides_where_a_recovered_log_begins(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    topic = filled(broker)
    partition = TopicPartition("t", 0)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker()
    with Admin(f"127.0.0.1:{broker.broker.grpc_port}") as admin:
        admin.commit("honest", {partition: 4})
        for offset in ((1 << 63) - 1, 4 * 10**18):
            admin.commit("liar", {partition: offset})
            sentence = f"group 'liar' has committed offset {offset} of t-0, .*--start-offset"
            with pytest.raises(errors.InvalidRequest, match=sentence):
                admin.recover_partitions("t", [0])
        assert admin.recover_partitions("t", [0], start_offset=12) == {partition: 12}


def test_only_what_is_lost_is_recovered_and_by_its_own_broker(start_broker: StartBroker, tmp_path: Path) -> None:
    broker, other = start_broker(0), start_broker(1)
    until(broker, lambda: set(broker.broker.host.metadata.brokers) == {0, 1})
    topic = broker.new_topic(partitions=2)
    until(other, lambda: len(other.broker.host.metadata.topics) == 1)
    for asked, number, refused in (
        (broker, 0, "partition t-0 is not lost, so there is nothing to recover"),
        (other, 0, "broker 1 does not lead partition t-0"),
        (broker, 2, "topic 't' has no partition 2"),
    ):
        with pytest.raises(grpc.RpcError, match=refused):
            recover(asked, topic, number)
    with pytest.raises(grpc.RpcError, match="start offset -1 must be from 0 to"):
        recover(broker, topic, 0, start_offset=-1)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker(0)
    assert recover(broker, topic, 0, start_offset=12).start_offset == 12
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 12
    with pytest.raises(grpc.RpcError, match="partition t-0 is not lost"):
        recover(broker, topic, 0)


def unreachable(*_: object) -> None:
    raise errors.ZooKeeperUnreachable(address="zk", reason="the connection was lost")


def test_a_recovery_whose_state_was_not_written_is_done_again(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop()
    wipe_directory(tmp_path, topic)
    broker = start_broker()

    with monkeypatch.context() as patched:
        patched.setattr(registry, "write_states", unreachable)
        with pytest.raises(grpc.RpcError, match="is not reachable"):
            recover(broker, topic, 0, start_offset=30)
    broker.stop(clean=False)
    broker = start_broker()
    assert_lost(broker, topic, 0, "its log is in data directory")
    assert recover(broker, topic, 0, start_offset=40).start_offset == 40
    assert broker.broker.host.leader_of(topic, 0).log.start_offset == 40
    assert_lost(broker, topic, 1, "its log is in data directory")


@pytest.mark.parametrize("arrived", [False, True], ids=["not written", "written, and not answered"])
def test_a_recovery_whose_state_was_not_written_is_done_again_by_the_same_broker(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker()
    host, write = broker.broker.host, registry.write_states

    def unanswered(*arguments: Any) -> None:
        if arrived:
            write(*arguments)
        raise errors.ZooKeeperUnreachable(address="zk", reason="no answer in time")

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(registry, "write_states", unanswered)
            with pytest.raises(grpc.RpcError, match="is not reachable"):
                recover(broker, topic, 0, start_offset=30)
        changed = bpb.AlterTopicRequest(name="t", set={"retention.ms": "1000000"})
        broker.stub.AlterTopic(changed, timeout=60)  # which has the broker look at its logs
        assert_lost(broker, topic, 0, f"files of its folder {topic.hex()}-0 .* were removed or replaced")
    recovered = recover(broker, topic, 0, start_offset=40)
    assert (recovered.start_offset, recovered.leader_epoch) == (40, 3 if arrived else 1)
    log = host.leader_of(topic, 0).log
    assert (log.start_offset, log.last_epoch) == (40, 3 if arrived else 1)


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_a_log_whose_recovery_did_not_end_gets_another_epoch_at_the_next_start(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker()

    with monkeypatch.context() as patched:
        patched.setattr(registry, "write_states", unreachable)
        with pytest.raises(grpc.RpcError, match="is not reachable"):
            recover(broker, topic, 0, start_offset=30)
    broker.stop(clean)
    log = start_broker().broker.host.leader_of(topic, 0).log
    assert (log.start_offset, log.last_epoch) == (30, 1)


def test_of_two_who_recover_a_partition_at_once_one_does(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker()
    host = broker.broker.host
    replaced, both = host._directory.replace_log, threading.Barrier(2)

    def replace_log(*arguments: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)  # would let both in, if there were no lock
        replaced(*arguments)

    monkeypatch.setattr(host._directory, "replace_log", replace_log)
    with ThreadPoolExecutor(2) as pool:
        calls = {start: pool.submit(host.replace_lost, topic, 0, start, 60.0) for start in (100, 200)}
    [done] = [start for start, call in calls.items() if call.exception() is None]
    [refused] = [call.exception() for call in calls.values() if call.exception() is not None]
    assert isinstance(refused, errors.NotLost)
    assert host.leader_of(topic, 0).log.start_offset == done
    until(broker, lambda: host.metadata.topic("t").states[0].leader_epoch == 1)


def test_a_lost_partition_of_a_deleted_topic_is_forgotten(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    topic = filled(broker)
    broker.stop()
    wipe_folder(tmp_path, topic)
    broker = start_broker()
    broker.stub.DeleteTopic(bpb.DeleteTopicRequest(name="t"), timeout=60)
    host = broker.broker.host
    until(broker, lambda: host.failure(topic, 0) is None)
    assert not folder(tmp_path, topic, 1).exists()
    again = filled(broker)
    assert again != topic
    assert host.leader_of(again, 0).log.end_offset == 5


def test_a_state_with_a_higher_epoch_is_taken_over_by_an_open_log(broker: RunningBroker) -> None:
    topic = broker.new_topic()
    host = broker.broker.host
    record = broker.record("t")
    registry.write_states(host.metadata.session, record, {0: replace(record.states[0], leader_epoch=3)})
    until(broker, lambda: host.metadata.topic("t").states[0].leader_epoch == 3)
    until(broker, lambda: host.leader_of(topic, 0).log.last_epoch == 3)


def test_a_partition_that_is_recovered_before_its_loss_was_seen_is_served(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker()
    topic = broker.new_topic()
    host = broker.broker.host
    old = host.leader_of(topic, 0)
    may_look, sync = threading.Event(), Watcher._sync

    def late(self: Watcher, dirty: Collection[str]) -> None:
        assert may_look.wait(60)
        sync(self, dirty)

    monkeypatch.setattr(Watcher, "_sync", late)
    record = broker.record("t")
    elsewhere = replace(record.states[0], directories={0: "f" * 32})
    registry.write_states(host.metadata.session, record, {0: elsewhere})
    recovering = threading.Thread(target=host.replace_lost, args=(topic, 0, 1000, 30.0))
    recovering.start()
    waited_for(lambda: not old.is_open)
    may_look.set()
    recovering.join(60)
    until(broker, lambda: host.hosted.get((topic, 0)) not in (old, None))
    with broker.client() as client:
        assert client.append(topic, a_batch()).base_offset == 1000
