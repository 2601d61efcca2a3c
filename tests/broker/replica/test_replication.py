"""Topics with several replicas on real brokers: what followers copy, what is acknowledged, and who leads next."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.replica.insync import InSyncSets
from broker.replica.partition import Partition
from broker.replica.registration import Registration
from broker.replica.role import Role, Wanted
from broker.requests.replicate import ReplicaSession
from broker.staging.format import PartSpec, PreparedSet
from broker.states.election import join
from broker.storage.disk import Disk
from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from broker.storage.segment import FileSlice, Hint
from kafkalog import errors
from kafkalog.client.cluster import Cluster
from kafkalog.client.transaction.coordinator import TransactionCoordinator
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.format.batch import Batch
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import transactions_pb2 as tpb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk import paths, registry
from kafkalog.zk.controllers import read_controller
from kafkalog.zk.registry import (
    PartitionState,
    StateChange,
    TopicRecord,
    change_states,
    registration_check,
    write_states,
)
from kafkalog.zk.session import ZooKeeperSession
from tests.between import ahead
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import a_batch
from tests.broker.replica.test_staged_writes import apply, batch, write
from tests.waiting import waited_for

Brokers = dict[int, RunningBroker]


def new_topic(
    broker: RunningBroker, partitions: int = 1, replicas: int = 3, name: str = "t", **config: int | str
) -> bytes:
    given = {name.replace("_", "."): str(value) for name, value in config.items()}
    request = bpb.CreateTopicRequest(name=name, partitions=partitions, replicas=replicas, config=given)
    return bytes(broker.stub.CreateTopic(request, timeout=30).topic_id)


def replica(broker: RunningBroker, topic: bytes, number: int = 0) -> Partition:
    return broker.broker.host.replica_of(topic, number)


def leader_of(brokers: Brokers, topic: bytes, number: int = 0) -> RunningBroker:
    """The broker that leads; waits for one."""
    found: list[RunningBroker] = []

    def leads() -> bool:
        found[:] = [each for each in brokers.values() if _leads(each, topic, number)]
        return len(found) == 1

    waited_for(leads, 30, "nobody leads")
    return found[0]


def _leads(broker: RunningBroker, topic: bytes, number: int) -> bool:
    try:
        return broker.broker.host.leader_of(topic, number).role.leads
    except errors.KafkalogError:
        return False


def in_sync(brokers: Brokers, topic: bytes, number: int, *isr: int) -> Callable[[], bool]:
    def is_written() -> bool:
        state = leader_of(brokers, topic, number).record("t").states[number]
        return sorted(state.isr) == sorted(isr)

    return is_written


@pytest.fixture
def brokers(start_broker: StartBroker) -> Brokers:
    return {number: start_broker(number, replica_lag_time_max_ms=3000) for number in range(3)}


def values(partition: Partition) -> bytes:
    """The bytes of its log."""
    piece = partition.read_as_replica(partition.start_offset, 1 << 30, None)
    try:
        return piece.read() if hasattr(piece, "read") else _bytes_of(piece)
    finally:
        piece.close()


def _bytes_of(piece: object) -> bytes:
    import os

    return os.pread(piece.fileno(), piece.length, piece.position)  # type: ignore[attr-defined]


def led_and_followed(brokers: Brokers) -> tuple[bytes, RunningBroker, int]:
    """A new topic that is in sync on all brokers, the broker that leads it, and the id of one that follows."""
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    return topic, leader, next(number for number, each in brokers.items() if each is not leader)


def test_followers_copy_the_bytes_and_acks_all_waits_for_them(brokers: Brokers) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=3)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        for number in range(20):
            appended = client.append(topic, a_batch([b"%d" % number]), acks=-1)
            assert not appended.HasField("error"), appended
            assert appended.base_offset == number
    copies = [values(replica(each, topic)) for each in brokers.values()]
    assert copies[0] == copies[1] == copies[2] != b""
    assert replica(leader, topic).role.high_watermark == 20
    waited_for(lambda: all(replica(each, topic).role.high_watermark == 20 for each in brokers.values()))


def test_a_follower_serves_no_client(brokers: Brokers) -> None:
    topic = new_topic(brokers[0])
    leader = leader_of(brokers, topic)
    for broker in brokers.values():
        if broker is not leader:
            waited_for(lambda broker=broker: (topic, 0) in broker.broker.host.hosted)  # type: ignore[misc]
            with pytest.raises(errors.NotLeader):
                broker.broker.host.leader_of(topic, 0)


def test_too_few_in_sync_replicas_refuse_acks_all_and_readers_wait(brokers: Brokers) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=3)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    gone = next(number for number, each in brokers.items() if each is not leader)
    brokers.pop(gone).stop(clean=False)
    waited_for(lambda: len(leader.record("t").states[0].isr) == 2)
    waited_for(lambda: replica(leader, topic).role.leadership.is_below_min)  # type: ignore[union-attr]
    with leader.client() as client:
        refused = error_from_wire(client.append(topic, a_batch(), acks=-1).error)
        assert isinstance(refused, errors.NotEnoughReplicas)
        assert not client.append(topic, a_batch(), acks=1).HasField("error")
        fetched, _ = client.fetch(topic, 0)
        assert fetched.end_offset == 0
        [state] = leader.record("t").states.values()
        assert state.eligible == (gone,)


def test_a_leader_that_may_be_one_no_more_does_not_say_where_the_log_ends(brokers: Brokers) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        assert not client.append(topic, a_batch([b"before"]), acks=-1).HasField("error")
    partition = replica(leader, topic)
    assert partition.role.is_certain()
    partition.role.is_certain = lambda: False
    waited_for(lambda: partition.role.leadership.is_followed(time.monotonic() - 2))  # type: ignore[union-attr]
    assert partition.end_for_readers() == 1  # its followers prove it
    partition.read(1, 100, None).close()
    with pytest.raises(errors.OffsetOutOfRange):
        partition.read(2, 100, None)
    elsewhere = PreparedSet("x", 7, 0, b"c" * 16, -1, (PartSpec(b"u" * 16, 0, 1, 100),))
    with pytest.raises(errors.StagedPartLost):
        partition.staged.prepare(elsewhere)
    for broker in brokers.values():
        if broker is not leader:
            broker.broker.host.links.stop()
    waited_for(lambda: not partition.role.leadership.is_followed(time.monotonic() - 3))  # type: ignore[union-attr]
    with pytest.raises(errors.OffsetNotAvailable):
        partition.end_for_readers()
    with pytest.raises(errors.OffsetNotAvailable):  # the one that leads would keep them
        partition.delete_before(1)
    for offset in (1, 2):
        with pytest.raises(errors.OffsetNotAvailable):
            partition.read(offset, 100, None)
    partition.read(0, 100, None).close()
    with pytest.raises(errors.OffsetNotAvailable):  # it may be staged at the one that leads
        partition.staged.prepare(elsewhere)


def test_another_replica_leads_when_the_leader_is_gone_and_it_follows_when_it_comes_back(
    brokers: Brokers, start_broker: StartBroker
) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        assert not client.append(topic, a_batch([b"before"]), acks=-1).HasField("error")
    old = next(number for number, each in brokers.items() if each is leader)
    brokers.pop(old).stop(clean=False)
    second = leader_of(brokers, topic)
    assert replica(second, topic).role.epoch == 1
    with second.client() as client:
        appended = client.append(topic, a_batch([b"after"]), acks=-1)
        assert (appended.base_offset, appended.HasField("error")) == (1, False)
    brokers[old] = start_broker(old)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    copies = {values(replica(each, topic)) for each in brokers.values()}
    assert len(copies) == 1


def test_another_replica_leads_when_the_leader_is_gone_though_the_disk_of_the_controller_hangs(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = {number: start_broker(number, zookeeper_session_timeout_ms=1000) for number in range(3)}
    session = brokers[0].broker.host.metadata.session
    found = read_controller(session)
    assert found is not None
    controller = found.broker_id
    first, second = sorted(brokers.keys() - {controller})
    topic = b"t" * 16
    registry.create_topic(session, TopicRecord("t", topic, {}, [(first, second, controller)], 0))
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(fd: int) -> None:
        hangs.set()
        assert goes_on.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(brokers[controller].broker.host._directory.disk, "sync_dir", hang)
        registry.create_topic(session, TopicRecord("u", b"u" * 16, {}, [(0, 1, 2)], 0))
        assert hangs.wait(30)
        try:
            brokers.pop(first).stop(clean=False)
            assert leader_of(brokers, topic) is brokers[second]
            assert not replica(brokers[controller], topic).role.is_certain(), "another could lead without its knowledge"
        finally:
            goes_on.set()


def test_acks_all_with_a_flush_before_each_ack_waits_for_the_followers_disks(brokers: Brokers) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=2, flush_messages=1)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        for number in range(5):
            appended = client.append(topic, a_batch([b"%d" % number]), acks=-1)
            assert (appended.base_offset, appended.HasField("error")) == (number, False)
    assert all(replica(each, topic).log.flushed_offset == 5 for each in brokers.values())


def test_a_replica_that_begins_anew_is_emptied_once_however_often_its_state_is_looked_at(
    brokers: Brokers, start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state has the directory of the lost log until it joins. A look before that took its copy for lost again, and
    emptied it while the leader let it join."""
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        for number in range(20):
            assert not client.append(topic, a_batch([b"%d" % number]), acks=-1).HasField("error")
    lost = next(number for number, each in brokers.items() if each is not leader)
    brokers.pop(lost).stop(clean=False)
    shutil.rmtree(tmp_path / f"broker-{lost}")
    with monkeypatch.context() as patched:
        patched.setattr(InSyncSets, "look", lambda self: None)  # nobody joins
        brokers[lost] = start_broker(lost)
        host = brokers[lost].broker.host
        waited_for(lambda: host.hosted[topic, 0].end_offset == 20)
        copy = replica(brokers[lost], topic)
        host.metadata.path_changed(paths.topic("t"))
        other = new_topic(brokers[0], name="u")  # it is looked at after the first one
        waited_for(lambda: (other, 0) in host.hosted)
        assert replica(brokers[lost], topic) is copy and copy.end_offset == 20
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))


@pytest.mark.parametrize("role", ["member", "leader"])
def test_a_replica_that_begins_anew_takes_no_role_that_the_directory_of_before_got_since(
    brokers: Brokers,
    start_broker: StartBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    """Its state has that directory until it joins. A process that still had it joined, and this one led instead."""
    topic, leader, lost = led_and_followed(brokers)
    brokers.pop(lost).stop(clean=False)
    shutil.rmtree(tmp_path / f"broker-{lost}")
    monkeypatch.setattr(InSyncSets, "look", lambda self: None)  # nobody joins
    brokers[lost] = start_broker(lost)
    waited_for(lambda: (topic, 0) in brokers[lost].broker.host.hosted)
    led: list[int] = []
    real = Role.lead

    def lead(self: Role, state: PartitionState, assigned: Sequence[int]) -> None:
        led.append(state.leader)
        real(self, state, assigned)

    monkeypatch.setattr(Role, "lead", lead)
    record = leader.record("t")
    state = join(record.states[0], lost, record.states[0].directories[lost], 2)
    if role == "leader":
        state = replace(state, leader=lost, leader_epoch=state.leader_epoch + 1)
    write_states(leader.broker.host.metadata.session, record, {0: state})
    waited_for(lambda: lost not in leader.record("t").states[0].isr)
    assert lost not in led


def test_a_log_is_left_before_the_registration_ends_under_which_it_was_fetched(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next requests of the link say of it, by the new registration, what the lost log had."""
    topic, leader, lost = led_and_followed(brokers)
    host, followed = brokers[lost].broker.host, list[bool]()
    raise_epoch = host.losses.raise_epoch

    def raised() -> None:
        followed.append((topic, 0) in host.links._followed)
        raise_epoch()

    monkeypatch.setattr(host.losses, "raise_epoch", raised)
    record = leader.record("t")
    state = record.states[0]
    elsewhere = replace(state, directories={**state.directories, lost: "elsewhere"})
    write_states(leader.broker.host.metadata.session, record, {0: elsewhere})
    waited_for(lambda: followed == [False] and host._directory_id in leader.record("t").states[0].directories.values())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_join_that_was_on_its_way_when_a_machine_lost_power_comes_to_nothing(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """The states, as the broker reads them when it starts, do not show it as a member yet."""
    topic, leader, lost = led_and_followed(brokers)
    before = brokers[lost].broker.registration.epoch
    monkeypatch.setattr(InSyncSets, "look", lambda self: None)  # nobody joins otherwise
    brokers.pop(lost).stop(clean=False)
    waited_for(lambda: lost not in leader.record("t").states[0].isr)
    raise_epoch, written = Registration.raise_epoch, []

    def write() -> None:
        record = leader.record("t")
        state = record.states[0]
        after = join(state, lost, state.directories[lost], 2)
        checks = (registration_check(lost, before),)
        session = leader.broker.host.metadata.session
        found = change_states(session, [StateChange(record, 0, state, after, checks)])[topic, 0]
        assert isinstance(found, PartitionState)
        written.append(found.isr)

    def raised(self: Registration) -> None:
        if not is_late:
            write()
        raise_epoch(self)
        if is_late:
            write()

    monkeypatch.setattr(Registration, "raise_epoch", raised)
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another boot")
    brokers[lost] = start_broker(lost)
    assert [lost in isr for isr in written] == [not is_late]
    assert lost not in leader.record("t").states[0].isr


def test_a_departure_that_another_change_overtakes_is_written_on_top_of_that(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that had lost power stayed in the set, as if it had all that was acknowledged."""
    topic, leader, lost = led_and_followed(brokers)
    monkeypatch.setattr(InSyncSets, "look", lambda self: None)  # nobody else changes the set
    monkeypatch.setattr("broker.controller.controller.elect", lambda *_: None)
    brokers.pop(lost).stop(clean=False)
    overtaken: list[PartitionState] = []

    def overtake() -> None:
        record = leader.record("t")
        overtaken.append(record.states[0])
        throttled = replace(record.states[0], throttled_rate=1 << 30)
        write_states(leader.broker.host.metadata.session, record, {0: throttled})

    ahead(monkeypatch, registry, "write_states", overtake)
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another boot")
    brokers[lost] = start_broker(lost)
    waited_for(lambda: (topic, 0) in brokers[lost].broker.host.hosted)
    assert [lost in state.isr for state in overtaken] == [True]
    state = leader.record("t").states[0]
    assert (lost in state.isr, state.throttled_rate) == (False, 1 << 30)


@pytest.mark.parametrize("is_altered", [False, True], ids=["without a flush", "with a flush since then"])
def test_what_was_acknowledged_without_a_flush_may_be_lost_by_a_machine_that_was_down_when_that_changed(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_altered: bool
) -> None:
    """Half of its log was not on its disk. It was believed by the topic's settings, led, and the other one was cut."""
    brokers = {number: start_broker(number) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    [lost] = [number for number, each in brokers.items() if each is not leader]
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    with leader.client() as client:
        for number in range(10):
            assert not client.append(topic, a_batch([b"%05d" % number]), acks=-1).HasField("error")
    brokers.pop(lost).stop(clean=False)
    [path] = (tmp_path / f"broker-{lost}" / f"{topic.hex()}-0").glob("*.log")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    waited_for(in_sync(brokers, topic, 0, 1 - lost))
    assert leader.record("t").states[0].eligible == (lost,)
    if is_altered:
        leader.stub.AlterTopic(bpb.AlterTopicRequest(name="t", set={"flush.messages": "1"}), timeout=30)
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "boot_id", lambda self: "another boot")
        patched.setattr(InSyncSets, "look", lambda self: None)  # it does not join again
        brokers[lost] = start_broker(lost)
        assert leader.record("t").states[0].eligible == ()


def with_one_that_may_join(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, RunningBroker, int, Callable[[], None]]:
    """As `led_and_followed`, but the follower is out of the in-sync set again, and has all that the leader has. Nobody
    joins until the last result is called, which is a look of the leader at its in-sync sets."""
    topic, leader, follower = led_and_followed(brokers)
    look, host = InSyncSets.look, leader.broker.host
    monkeypatch.setattr(InSyncSets, "look", lambda self: None)
    record = leader.record("t")
    state = record.states[0]
    isr = tuple(each for each in state.isr if each != follower)
    write_states(host.metadata.session, record, {0: replace(state, isr=isr)})
    waited_for(lambda: may_join(leader, topic) == [follower])
    return topic, leader, follower, lambda: look(InSyncSets(host, SYSTEM_CLOCK))


def may_join(leader: RunningBroker, topic: bytes) -> list[int]:
    wanted = replica(leader, topic).role.wanted_changes(time.monotonic(), 60.0, leader.broker.host.metadata.brokers)
    return [] if wanted is None else [each.broker_id for each in wanted.joining]


def test_a_follower_that_registers_anew_as_its_leader_takes_it_in_does_not_join_by_what_it_had_before(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, leader, follower, look = with_one_that_may_join(brokers, monkeypatch)
    partition = replica(leader, topic)
    begin_change = partition.role.begin_change

    def begin_and_register_anew(wanted: Wanted) -> bool:
        brokers[follower].broker.registration.raise_epoch()
        return begin_change(wanted)

    with monkeypatch.context() as patched:
        patched.setattr(partition.role, "begin_change", begin_and_register_anew)
        look()
    assert follower not in leader.record("t").states[0].isr

    def has_joined() -> bool:
        look()
        return follower in leader.record("t").states[0].isr

    waited_for(has_joined)  # once the leader has heard of the registration


def test_a_follower_whose_broker_is_about_to_stop_does_not_join(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, leader, follower, look = with_one_that_may_join(brokers, monkeypatch)
    brokers[follower].broker.registration.announce_stop()
    waited_for(lambda: leader.broker.host.metadata.brokers[follower].stopping)
    waited_for(lambda: may_join(leader, topic) == [follower])
    look()
    assert follower not in leader.record("t").states[0].isr


def with_an_acknowledged_part(brokers: Brokers) -> tuple[bytes, int, int]:
    """A topic with flush.messages=1 and a staged part on all three replicas; its leader's id; the part's bytes."""
    topic = new_topic(brokers[0], min_insync_replicas=2, flush_messages=1)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    _, length, ack = replica(leader, topic).staged.stage(b"u" * 16, [batch(number, size=700) for number in range(4)])
    assert ack is not None
    waited_for(ack.is_kept)
    return topic, next(number for number, each in brokers.items() if each is leader), length


def test_what_is_staged_is_counted_once_not_with_each_copy(brokers: Brokers) -> None:
    topic, _, length = with_an_acknowledged_part(brokers)
    waited_for(lambda: staged_on_each(brokers, topic) == [[(1, length)]] * 3)
    request = tpb.ListStagedRequest()
    listed = [each for broker in brokers.values() for each in broker.stub.ListStaged(request, timeout=30).sets]
    assert [(each.topic, each.parts, each.length) for each in listed] == [("t", 1, length)] * 3
    assert sorted(each.is_copy for each in listed) == [False, True, True]
    addresses = [f"127.0.0.1:{broker.broker.grpc_port}" for broker in brokers.values()]
    with contextlib.closing(Cluster(addresses)) as cluster:
        [found] = TransactionCoordinator(cluster).staged()
    assert not found.is_copy


def staged_on_each(brokers: Brokers, topic: bytes) -> list[list[tuple[int, int]]]:
    """The numbers of parts and the bytes that each replica has staged."""
    return [[(each.parts, each.length) for each in replica(broker, topic).staged.all()] for broker in brokers.values()]


@pytest.mark.parametrize("loss", ["of power", "of power and of a batch", "by damage"])
def test_a_replica_that_may_lack_what_is_staged_leaves_the_set_and_copies_it_anew(
    brokers: Brokers,
    start_broker: StartBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    loss: str,
) -> None:
    """Its log is whole, with flush.messages=1 or without a loss of power. A leader counted it for what was staged by
    the sizes of its files, and as the leader it had its followers remove their good copies."""
    topic, lost, length = with_an_acknowledged_part(brokers)
    others = [number for number in brokers if number != lost] if loss == "by damage" else []
    for number in (*others, lost):
        brokers.pop(number).stop(clean=False)
    [path] = (tmp_path / f"broker-{lost}" / f"{topic.hex()}-0" / "staging").glob("*.staged")
    with monkeypatch.context() as patched:
        if loss == "by damage":
            at = 0
        else:
            patched.setattr(Disk, "boot_id", lambda self: "another boot")
            at = path.stat().st_size // 2
        if loss != "of power":
            data = path.read_bytes()
            path.write_bytes(data[:at] + bytes(50) + data[at + 50 :])
        caplog.clear()
        brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
        reason = "the machine may have lost writes" if loss == "of power" else "staged data is damaged"
        assert f'replica_left_the_sets partition=t-0 reason="{reason}"' in caplog.text
        waited_for(lambda: (topic, 0) in brokers[lost].broker.host.hosted)
        assert not others or replica(brokers[lost], topic).staged.copies() == []
    for number in others:
        brokers[number] = start_broker(number, replica_lag_time_max_ms=3000)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2), 30)
    assert staged_on_each(brokers, topic) == [[(1, length)]] * 3


def emptied_and_leading(
    brokers: Brokers, start_broker: StartBroker, path: Path, topic: bytes, deleted_to: int
) -> RunningBroker:
    """Of two replicas: the one that does not lead loses its disk after records were deleted, comes back, and leads."""
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    waited_for(lambda: replica(leader, topic).role.high_watermark == replica(leader, topic).end_offset)
    [old] = [number for number, each in brokers.items() if each is leader]
    brokers.pop(1 - old).stop(clean=False)
    waited_for(in_sync(brokers, topic, 0, old))
    replica(leader, topic).delete_before(deleted_to)
    shutil.rmtree(path / f"broker-{1 - old}")
    brokers[1 - old] = start_broker(1 - old, replica_lag_time_max_ms=500)
    waited_for(in_sync(brokers, topic, 0, 0, 1), 30)
    assert replica(brokers[1 - old], topic).start_offset == deleted_to
    brokers.pop(old).stop(clean=False)
    return leader_of(brokers, topic)


def test_followers_copy_a_batch_while_it_is_applied(start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apply may take minutes; followers that got nothing of it meanwhile would leave the in-sync set."""
    monkeypatch.setattr("broker.staging.part._PIECE_BYTES", 1)
    monkeypatch.setattr("broker.replica.applier._WAKE_BYTES", 1)
    brokers = {number: start_broker(number) for number in range(3)}
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = replica(leader_of(brokers, topic), topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    prepared = write(leader, 0, [batch(number) for number in range(3)])
    ack = leader.staged.prepare(prepared)  # once more
    assert ack is not None
    waited_for(ack.is_kept)  # by all: what they ask for from here on comes of the apply
    leadership, append = leader.role.leadership, leader.log.append_decided
    assert leadership is not None
    before = leadership.state

    def slowly(batches: Sequence[Batch], leader_epoch: int) -> None:
        waited_for(lambda: all(replica(each, topic).end_offset == leader.end_offset for each in brokers.values()))
        append(batches, leader_epoch)

    monkeypatch.setattr(leader.log, "append_decided", slowly)
    assert apply(leader, prepared) == 3
    assert leadership.state is before, "one left the set"


@pytest.mark.parametrize("deleted_to", [6, 10])
def test_a_replica_that_was_emptied_recognises_duplicates_of_deleted_records_when_it_leads(
    start_broker: StartBroker, tmp_path: Path, deleted_to: int
) -> None:
    """It copied only the records that are left, and appended the producer's batches a second time or refused them."""
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    sent = [a_batch(producer_id=7, producer_epoch=0, base_sequence=number) for number in range(10)]
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    with leader_of(brokers, topic).client() as client:
        for number, each in enumerate(sent):
            assert client.append(topic, each, acks=-1).base_offset == number
    second = emptied_and_leading(brokers, start_broker, tmp_path, topic, deleted_to)
    with second.client() as client:
        for number, each in enumerate(sent):
            again = client.append(topic, each, acks=-1)
            assert (again.base_offset, again.HasField("error")) == (number, False)
        assert replica(second, topic).end_offset == 10


@pytest.mark.parametrize("deleted_to", [3, 5])
def test_a_replica_that_was_emptied_does_not_apply_a_batch_again_of_which_records_were_deleted(
    start_broker: StartBroker, tmp_path: Path, deleted_to: int
) -> None:
    """It leads before the batch is noted as done, and is asked to apply it."""
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    prepared = write(replica(leader, topic), 0, [batch(number) for number in range(5)])
    assert apply(replica(leader, topic), prepared) == 5
    second = replica(emptied_and_leading(brokers, start_broker, tmp_path, topic, deleted_to), topic)
    assert [staged.prepared for staged in second.staged.all()] == [prepared]
    assert apply(second, prepared) == second.end_offset == 5


def test_a_replica_that_was_emptied_does_not_join_without_the_state_of_the_producers(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a restart make it forget that it lacks it."""
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    leader = leader_of(brokers, topic)
    with leader.client() as client:
        assert client.append(topic, a_batch(producer_id=7, producer_epoch=0, base_sequence=0), acks=-1).base_offset == 0
    [lost] = [number for number, each in brokers.items() if each is not leader]
    brokers.pop(lost).stop(clean=False)
    waited_for(in_sync(brokers, topic, 0, 1 - lost))
    replica(leader, topic).delete_before(1)
    shutil.rmtree(tmp_path / f"broker-{lost}")
    asked: list[int] = []

    def refuse(self: Log, offset: int) -> bytes:
        asked.append(offset)
        raise errors.NotLeader(broker_id=1 - lost, partition="t-0")  # it is asked again soon

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(Log, "producers_before", refuse)
            brokers[lost] = start_broker(lost, replica_lag_time_max_ms=500)
            asked.clear()
            waited_for(lambda: len(asked) >= 3)
            assert leader.record("t").states[0].isr == (1 - lost,)
            brokers.pop(lost).stop(clean=False)
    brokers[lost] = start_broker(lost, replica_lag_time_max_ms=500)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    assert len(replica(brokers[lost], topic).log._producers) == 1
    assert 'replica_left_the_sets partition=t-0 reason="its log is lost"' in caplog.text


@pytest.mark.parametrize("deleted_to", [6, 10])
def test_a_replica_that_was_emptied_copies_from_a_leader_that_does_not_give_the_state_of_the_producers(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted_to: int
) -> None:
    """A leader of an older version ignores that it is asked for it."""
    real = ReplicaSession.take

    def take(self: ReplicaSession, request: pb.ReplicaFetchRequest) -> None:
        for named in request.partitions:
            named.ClearField("needs_producers")
        real(self, request)

    monkeypatch.setattr(ReplicaSession, "take", take)
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    with leader_of(brokers, topic).client() as client:
        for number in range(10):
            assert client.append(topic, a_batch(), acks=-1).base_offset == number
    second = emptied_and_leading(brokers, start_broker, tmp_path, topic, deleted_to)
    with second.client() as client:
        assert client.append(topic, a_batch(), acks=-1).base_offset == 10


def test_a_replica_that_was_emptied_copies_a_log_whose_start_is_amid_a_batch(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """The batch reaches back before the start, and the replica refused it again and again."""
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    sent = [
        a_batch([b"%d" % each for each in range(3)], producer_id=7, producer_epoch=0, base_sequence=3 * number)
        for number in range(4)
    ]
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    with leader_of(brokers, topic).client() as client:
        for number, each in enumerate(sent):
            assert client.append(topic, each, acks=-1).base_offset == 3 * number
    second = emptied_and_leading(brokers, start_broker, tmp_path, topic, 7)
    with second.client() as client:
        for number, each in enumerate(sent):
            again = client.append(topic, each, acks=-1)
            assert (again.base_offset, again.HasField("error")) == (3 * number, False)
        assert replica(second, topic).end_offset == 12


def test_the_last_replica_stays_though_something_of_what_is_staged_is_damaged(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    brokers = {number: start_broker(number, replica_lag_time_max_ms=500) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    leader = leader_of(brokers, topic)
    last = next(number for number, each in brokers.items() if each is leader)
    replica(leader, topic).staged.stage(b"u" * 16, [batch(0)])
    brokers.pop(1 - last).stop(clean=False)
    waited_for(in_sync(brokers, topic, 0, last))
    brokers.pop(last).stop(clean=False)
    [path] = (tmp_path / f"broker-{last}" / f"{topic.hex()}-0" / "staging").glob("*.staged")
    path.write_bytes(b"!" + path.read_bytes()[1:])
    brokers[last] = start_broker(last, replica_lag_time_max_ms=500)
    assert leader_of(brokers, topic) is brokers[last]


def test_a_follower_of_a_leader_that_is_cut_meanwhile_keeps_its_log(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old leader cuts its log while it reads for a follower: that its log does not reach the offset is no reason to
    begin anew."""
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    partition = replica(leader, topic)
    refused: list[int] = []
    real = partition.read_as_replica

    def read(offset: int, max_bytes: int, hint: Hint | None) -> FileSlice:
        if offset >= 10 and len(refused) < 2:
            refused.append(offset)
            raise errors.OffsetOutOfRange(offset=offset, partition="t-0", start_offset=0, end_offset=5)
        return real(offset, max_bytes, hint)

    monkeypatch.setattr(partition, "read_as_replica", read)
    emptied: list[int] = []
    monkeypatch.setattr(Log, "reset_to", lambda self, offset: emptied.append(offset))
    with leader.client() as client:
        for number in range(20):
            assert not client.append(topic, a_batch([b"%d" % number]), acks=1).HasField("error")
    waited_for(lambda: len(refused) == 2)
    waited_for(lambda: all(replica(each, topic).role.high_watermark == 20 for each in brokers.values()))
    assert not emptied


def on_two(brokers: Brokers, topic: bytes) -> tuple[RunningBroker, Sequence[int]]:
    """Twenty records on both replicas of a partition. Returns its leader, and the brokers that have it."""
    leader = leader_of(brokers, topic)
    members = leader.record("t").replicas[0]
    waited_for(in_sync(brokers, topic, 0, *members))
    with leader.client() as client:
        for number in range(20):
            assert not client.append(topic, a_batch([b"%d" % number]), acks=-1).HasField("error")
    return leader, members


def test_a_watermark_that_was_saved_before_a_deletion_is_not_before_the_start(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log had fewer than no records for as long as the set was too small, and nothing could be deleted."""
    monkeypatch.setattr(LogDirectory, "save_high_watermarks", lambda self: None)
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=2)
    leader, members = on_two(brokers, topic)
    deletion = bpb.DeleteRecordsRequest(topic_id=topic, before_offset=10)
    assert leader.stub.DeleteRecords(deletion, timeout=30).log_start_offset == 10
    [back] = [number for number in members if brokers[number] is leader]
    for number in members:
        brokers.pop(number).stop(clean=False)
    brokers[back] = start_broker(back, replica_lag_time_max_ms=3000)
    leader = leader_of(brokers, topic)
    extents = bpb.DescribeTopicsRequest(names=["t"], extents=True)
    [described] = leader.stub.DescribeTopics(extents, timeout=30).topics
    extent = described.partitions[0].extent
    assert (extent.start_offset, extent.end_offset) == (10, 10)
    assert leader.stub.DeleteRecords(deletion, timeout=30).log_start_offset == 10
    with leader.client() as client:
        fetched, _ = client.fetch(topic, 5)
    assert isinstance(error_from_wire(fetched.error), errors.OffsetOutOfRange)


def test_a_replica_with_a_flush_before_each_ack_keeps_what_was_synced_after_a_loss_of_power(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit rot of records that were acknowledged long ago was taken for writes that were lost."""
    topic = new_topic(brokers[0], min_insync_replicas=2, flush_messages=1)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        for number in range(20):
            assert not client.append(topic, a_batch([b"%d" % number]), acks=-1).HasField("error")
    lost = next(number for number, each in brokers.items() if each is not leader)
    waited_for(lambda: replica(brokers[lost], topic).role.high_watermark == 20)
    brokers[lost].broker.host._directory.save_high_watermarks()
    log = replica(brokers[lost], topic).log
    before = values(replica(leader, topic))
    brokers.pop(lost).stop(clean=False)
    [path] = log.directory.glob("*.log")
    with path.open("r+b") as file:
        file.seek(len(before) // 2)
        file.write(b"!!!")
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another boot")
    brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
    partition = replica(brokers[lost], topic)
    assert partition.end_offset == 20 and "damaged_end_cut" not in caplog.text
    waited_for(lambda: partition.following.is_whole)
    waited_for(lambda: "damage_repaired" in caplog.text)
    assert path.read_bytes() == before


def test_a_replica_that_lost_power_while_nobody_led_is_cut_once_somebody_does(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    leader, members = on_two(brokers, topic)
    [first] = [number for number in members if brokers[number] is leader]
    [lost] = [number for number in members if number != first]
    [witness] = brokers.keys() - set(members)
    log, length = replica(brokers[lost], topic).log, len(values(replica(leader, topic)))
    brokers.pop(lost).stop(clean=False)
    brokers.pop(first).stop(clean=False)
    waited_for(lambda: brokers[witness].record("t").states[0].leader == -1, 30)
    [path] = log.directory.glob("*.log")
    with path.open("r+b") as file:
        file.seek(length // 2)
        file.write(b"!!!")
    (path.parent.parent / "high-watermarks").unlink(missing_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "boot_id", lambda self: "another boot")
        brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
    partition = replica(brokers[lost], topic)
    waited_for(lambda: not partition.following.is_whole)
    assert partition.end_offset == 20
    brokers[first] = start_broker(first, replica_lag_time_max_ms=3000)
    waited_for(in_sync(brokers, topic, 0, *members), 30)
    assert "damaged_end_cut" in caplog.text and partition.following.is_whole and partition.end_offset == 20


@pytest.mark.parametrize("fails", ["the log", "the topic's znode"])
def test_a_loss_of_power_counts_for_a_log_that_could_be_opened_only_later(
    brokers: Brokers,
    start_broker: StartBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    fails: str,
) -> None:
    """It kept its place without what was staged. Once it led, the others cut their good copies."""
    topic, lost, length = with_an_acknowledged_part(brokers)
    brokers.pop(lost).stop(clean=False)
    [path] = (tmp_path / f"broker-{lost}" / f"{topic.hex()}-0" / "staging").glob("*.staged")
    with path.open("r+b") as file:
        file.truncate(60)
    real, real_read = LogDirectory.open_log, registry.read_topic
    others = [each.broker.host.metadata.session for each in brokers.values()]
    failures: list[errors.KafkalogError] = []

    def open_log(self: LogDirectory, *given: Any, **named: Any) -> Log:
        if not failures:
            failures.append(errors.DiskFull(directory=str(self.path)))
            raise failures[0]
        return real(self, *given, **named)

    def read_topic(session: ZooKeeperSession, name: str, *given: Any) -> TopicRecord | None:
        if not failures and session not in others:
            failures.append(errors.UnreadableZnode(path=paths.topic(name), reason="it is not whole"))
            raise failures[0]
        return real_read(session, name, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "boot_id", lambda self: "another boot")
        if fails == "the log":
            patched.setattr(LogDirectory, "open_log", open_log)
        else:
            patched.setattr(registry, "read_topic", read_topic)
        brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
        waited_for(lambda: (topic, 0) in brokers[lost].broker.host.hosted)
        waited_for(lambda: not brokers[lost].broker.host._directory.may_have_lost)
    assert failures and "replica_left_the_sets" in caplog.text
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2), 30)
    assert staged_on_each(brokers, topic) == [[(1, length)]] * 3


def test_a_broker_leaves_the_sets_once_after_a_loss_of_power_though_a_log_cannot_be_opened(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It left them, and ended its registration, at each attempt to open the log."""
    topic, _, lost = led_and_followed(brokers)
    brokers.pop(lost).stop(clean=False)
    real = LogDirectory.open_log
    real_raise, attempts = Registration.raise_epoch, itertools.count()
    raised: list[Registration] = []

    def open_log(self: LogDirectory, *given: Any, **named: Any) -> Log:
        if next(attempts) < 2:
            raise errors.DiskFull(directory=str(self.path))
        return real(self, *given, **named)

    def raise_epoch(self: Registration) -> None:
        raised.append(self)
        real_raise(self)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "boot_id", lambda self: "another boot")
        patched.setattr(LogDirectory, "open_log", open_log)
        patched.setattr(Registration, "raise_epoch", raise_epoch)
        brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
        waited_for(in_sync(brokers, topic, 0, 0, 1, 2), 30)
    waited_for(lambda: not brokers[lost].broker.host._directory.may_have_lost)
    assert caplog.text.count("replica_left_the_sets") == len(raised) == 1


def test_a_replica_that_was_elected_before_its_log_could_be_opened_leaves_the_sets_again(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It led with what the loss of power had left of its log."""
    monkeypatch.setattr("broker.replica.undone.RETRY_SECONDS", 0.05)
    topic, leader, lost = led_and_followed(brokers)
    monkeypatch.setattr(InSyncSets, "look", lambda self: None)  # nobody else changes the set
    monkeypatch.setattr("broker.controller.controller.elect", lambda *_: None)
    brokers.pop(lost).stop(clean=False)
    real, real_lead = LogDirectory.open_log, Role.lead
    failures, led = list[errors.DiskFull](), list[int]()

    def open_log(self: LogDirectory, *given: Any, **named: Any) -> Log:
        if failures:
            return real(self, *given, **named)
        failures.append(errors.DiskFull(directory=str(self.path)))
        record = leader.record("t")
        state = record.states[0]
        elected = replace(state, leader=lost, leader_epoch=state.leader_epoch + 1, isr=(lost,))
        write_states(leader.broker.host.metadata.session, record, {0: elected})
        raise failures[0]

    def lead(self: Role, state: PartitionState, assigned: Sequence[int]) -> None:
        led.append(state.leader)
        real_lead(self, state, assigned)

    monkeypatch.setattr(Disk, "boot_id", lambda self: "another boot")
    monkeypatch.setattr(LogDirectory, "open_log", open_log)
    monkeypatch.setattr(Role, "lead", lead)
    brokers[lost] = start_broker(lost)
    waited_for(lambda: (topic, 0) in brokers[lost].broker.host.hosted)
    assert lost not in led
    state = leader.record("t").states[0]
    assert (state.leader, state.isr) == (-1, ())
    assert caplog.text.count("replica_left_the_sets") == 2


def test_after_all_lost_power_the_first_one_back_leads_what_was_synced_though_something_was_staged(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left the sets, until the only member was the one that did not come back."""
    topic = new_topic(brokers[0], min_insync_replicas=2, flush_messages=1)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    replica(leader, topic).staged.stage(b"u" * 16, [batch(0)])
    with leader.client() as client:
        assert not client.append(topic, a_batch([b"kept"]), acks=-1).HasField("error")
    for number in range(3):
        brokers.pop(number).stop(clean=False)
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another boot")
    for number in range(2):
        brokers[number] = start_broker(number, replica_lag_time_max_ms=3000)
    waited_for(in_sync(brokers, topic, 0, 0, 1), 30)
    assert b"kept" in values(replica(leader_of(brokers, topic), topic))


def test_a_log_that_ends_amid_a_batch_of_its_leader_begins_anew_with_that(
    brokers: Brokers, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records were deleted up to amid a batch, which a loss of power then took."""
    topic = new_topic(brokers[0], min_insync_replicas=2)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    with leader.client() as client:
        for _ in range(3):
            assert not client.append(topic, a_batch([b"%d" % each for each in range(10)]), acks=-1).HasField("error")
    waited_for(lambda: replica(leader, topic).role.high_watermark == 30)
    replica(leader, topic).delete_before(15)
    lost = next(number for number, each in brokers.items() if each is not leader)
    waited_for(lambda: replica(brokers[lost], topic).start_offset == 15)
    log = replica(brokers[lost], topic).log
    brokers.pop(lost).stop(clean=False)
    [path] = log.directory.glob("*.log")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "boot_id", lambda self: "another boot")
        brokers[lost] = start_broker(lost, replica_lag_time_max_ms=3000)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2), 30)
    assert (replica(brokers[lost], topic).start_offset, replica(brokers[lost], topic).end_offset) == (15, 30)


def test_a_state_that_can_not_be_read_leaves_the_join_open_and_other_partitions_alone(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The join may have been written before: the leader goes on counting the follower, or what it acknowledges could be
    lost with the others."""
    topic, leader, follower, look = with_one_that_may_join(brokers, monkeypatch)
    session, role = leader.broker.host.metadata.session, replica(leader, topic).role
    path = paths.partition_state("t", topic, 0)
    content, _ = session.get(path)
    begin_change = role.begin_change

    def begin_and_spoil(wanted: Wanted) -> bool:
        session.set(path, b"not json")
        return begin_change(wanted)

    with monkeypatch.context() as patched:
        patched.setattr(role, "begin_change", begin_and_spoil)
        look()
    assert role.leadership is not None and follower in role.leadership.joining
    session.set(path, content)

    def has_joined() -> bool:
        look()
        return follower in leader.record("t").states[0].isr

    waited_for(has_joined)
    assert not role.leadership.joining
