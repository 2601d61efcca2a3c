"""Bit rot on real brokers' disks is found, and repaired from other replicas, while clients read."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.replica.scrubber import Scrubber, _Replica
from broker.states import reassignment
from kafkalog.clock import ManualClock
from kafkalog.errors import BrokerUnreachable, CorruptBatch
from kafkalog.format.batch import iter_batches
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import frames
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk.registry import BrokerRecord, StateChange, change_states
from tests.broker.conftest import RunningBroker, StartBroker
from tests.broker.data_port_client import a_batch
from tests.broker.replica.test_replication import Brokers, in_sync, leader_of, new_topic, replica
from tests.waiting import waited_for

BATCHES = 20
SIZE = 1000


@pytest.fixture
def brokers(start_broker: StartBroker) -> Brokers:
    return {number: start_broker(number, replica_lag_time_max_ms=3000) for number in range(3)}


def fill(leader: RunningBroker, topic: bytes, batches: int = BATCHES) -> None:
    with leader.client() as client:
        for number in range(batches):
            appended = client.append(topic, a_batch([b"%04d" % number + bytes(SIZE)]), acks=-1)
            assert not appended.HasField("error"), appended


def filled_topic(brokers: Brokers) -> tuple[bytes, RunningBroker, list[RunningBroker]]:
    """A topic with closed segments, all of which every replica has; its leader and the followers."""
    topic = new_topic(brokers[0], min_insync_replicas=2, segment_bytes=4096)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, *brokers))
    fill(leader, topic)
    waited_for(lambda: all(replica(each, topic).role.high_watermark == BATCHES for each in brokers.values()))
    return topic, leader, [each for each in brokers.values() if each is not leader]


def segments(broker: RunningBroker, topic: bytes) -> list[Path]:
    return sorted(Path(broker.broker.settings.log_dir).glob(f"{topic.hex()}-0/*.log"))


def contents(broker: RunningBroker, topic: bytes) -> list[bytes]:
    replica(broker, topic).log.flush()
    return [path.read_bytes() for path in segments(broker, topic)]


def flip(broker: RunningBroker, topic: bytes, segment: int, at: int) -> None:
    path = segments(broker, topic)[segment]
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 4]))


def scrub(broker: RunningBroker) -> None:
    """One round, at once, with a scrubber of its own."""
    host, clock = broker.broker.host, ManualClock()
    scrubber = Scrubber(host, host._directory, clock)
    assert scrubber.step() == 60, "it leaves the start of a broker alone"
    clock.advance(61)
    while (pause := scrubber.step()) < 30:
        clock.advance(pause)
    assert (clock.monotonic() - 61) * host.settings.scrub_bytes_per_second >= scrubber.checked_bytes > 0


def test_a_round_is_as_fast_as_it_may_read_and_rests_after_each_log(start_broker: StartBroker) -> None:
    broker = start_broker(scrub_bytes_per_second=1 << 30)
    topic = new_topic(broker, replicas=1, segment_bytes=4096)
    leader_of({0: broker}, topic)
    fill(broker, topic)
    clock = ManualClock()
    scrubber = Scrubber(broker.broker.host, broker.broker.host._directory, clock)
    clock.advance(61)
    pauses = []
    while (pause := scrubber.step()) < 30:
        pauses.append(pause)
    assert pauses.count(0.1) == 1 + len(broker.broker.host.hosted), "of the directory, and of each log"
    assert len(pauses) >= 2 + len(segments(broker, topic))
    assert {*pauses} == {0.1, 0.01}


def known(broker: RunningBroker) -> list[tuple[int, int, str]]:
    status = broker.stub.DescribeBroker(bpb.DescribeBrokerRequest(), timeout=30)
    return [(each.start_offset, each.end_offset, each.reason) for each in status.damaged]


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_round_finds_damage_and_repairs_it_byte_for_byte(brokers: Brokers, leads: bool) -> None:
    topic, leader, followers = filled_topic(brokers)
    broker = leader if leads else followers[0]
    before = contents(broker, topic)
    assert len(before) > 3
    for segment, at in ((0, 10), (1, 700), (2, 1500)):
        flip(broker, topic, segment, at)
    scrub(broker)
    assert contents(broker, topic) == before
    assert known(broker) == []


@pytest.mark.parametrize("number", [0, -1], ids=["closed", "active"])
def test_a_read_that_meets_damage_gets_an_error_and_then_the_repaired_records(brokers: Brokers, number: int) -> None:
    topic, leader, _ = filled_topic(brokers)
    before = contents(leader, topic)
    flip(leader, topic, number, 10)
    offset = int(segments(leader, topic)[number].name[:20])
    with leader.client() as client:
        fetched, _ = client.fetch(topic, offset)
        assert isinstance(error_from_wire(fetched.error), CorruptBatch)
        waited_for(lambda: contents(leader, topic)[: len(before)] == before)

        def is_served() -> bool:
            fetched, body = client.fetch(topic, offset)
            if fetched.HasField("error"):
                return False
            assert next(header.base_offset for header, _ in iter_batches(memoryview(body))) == offset
            return True

        waited_for(is_served)


@pytest.mark.parametrize("at", [10, 700], ids=["header", "body"])
def test_a_follower_copies_over_a_hole_of_its_leader_that_another_replica_fills(
    brokers: Brokers, start_broker: StartBroker, at: int
) -> None:
    topic = new_topic(brokers[0], min_insync_replicas=2, segment_bytes=4096)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    late = next(number for number, each in brokers.items() if each is not leader)
    brokers.pop(late).stop(clean=False)
    fill(leader, topic)
    other = next(each for each in brokers.values() if each is not leader)
    waited_for(lambda: replica(other, topic).role.high_watermark == BATCHES)
    before = contents(leader, topic)
    flip(leader, topic, 1, at)
    brokers[late] = start_broker(late)
    waited_for(in_sync(brokers, topic, 0, 0, 1, 2))
    assert b"".join(contents(brokers[late], topic)) == b"".join(before)
    assert contents(leader, topic) == before


def test_damage_at_different_places_is_repaired_on_both_and_at_the_same_place_stays(brokers: Brokers) -> None:
    topic, leader, followers = filled_topic(brokers)
    before = {id(each): contents(each, topic) for each in brokers.values()}
    flip(leader, topic, 0, 700)
    for each in followers:
        flip(each, topic, 2, 700)
    flip(followers[0], topic, 1, 700)
    flip(followers[1], topic, 0, 2000)
    for each in brokers.values():
        scrub(each)
    for each in brokers.values():
        assert contents(each, topic) == before[id(each)]
    for each in brokers.values():
        flip(each, topic, 2, 700)
    scrub(leader)
    [(start, end, _)] = known(leader)
    request = bpb.RepairPartitionRequest(topic_id=topic, partition=0, max_wait_ms=10_000)
    reply = leader.stub.RepairPartition(request, timeout=30)
    assert reply.done
    [left] = reply.damaged
    assert (left.start_offset, left.end_offset) == (start, end) and "corrupt batch" in left.reason
    assert known(leader) == [(start, end, left.reason)]
    found, offset = [], 0
    while offset < BATCHES:
        try:
            with replica(leader, topic).read(offset, 1 << 20, None) as piece:
                found += [header.base_offset for header, _ in iter_batches(memoryview(piece.read()))]
            offset = found[-1] + 1
        except CorruptBatch as error:
            offset = error.facts["end_offset"]
    assert found == [each for each in range(BATCHES) if not start <= each < end]


def test_a_replica_with_damage_joins_once_it_is_repaired_and_keeps_what_is_good_until_then(
    start_broker: StartBroker,
) -> None:
    """Its log was cut at the damage at its start, and the leader, with the same damage, could not give it the rest."""
    brokers = {number: start_broker(number, replica_lag_time_max_ms=1000) for number in range(2)}
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1, segment_bytes=4096)
    leader = leader_of(brokers, topic)
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    fill(leader, topic)
    number = next(number for number, each in brokers.items() if each is not leader)
    waited_for(lambda: all(replica(each, topic).role.high_watermark == BATCHES for each in brokers.values()))
    before = contents(leader, topic)
    for each in brokers.values():
        flip(each, topic, 1, 700)
    log = replica(brokers[number], topic).log
    list(log.check(log.view.segments[1]))
    log.check_index(log.view.segments[1])
    brokers.pop(number).stop()
    waited_for(in_sync(brokers, topic, 0, 1 - number))
    brokers[number] = start_broker(number, replica_lag_time_max_ms=1000)
    waited_for(lambda: any(reason for _, _, reason in known(brokers[number])))
    waited_for(lambda: replica(leader, topic).role.lacking_bytes(number) == 0)
    fill(leader, topic, 1)
    waited_for(lambda: replica(brokers[number], topic).role.high_watermark == BATCHES + 1)
    assert leader.record("t").states[0].isr == (1 - number,)
    assert replica(brokers[number], topic).start_offset == 0
    flip(leader, topic, 1, 700)
    replica(leader, topic).log.view.segments[1].damaged = ()
    request = bpb.RepairPartitionRequest(topic_id=topic, partition=0, max_wait_ms=10_000)
    assert not brokers[number].stub.RepairPartition(request, timeout=30).damaged
    waited_for(in_sync(brokers, topic, 0, 0, 1))
    assert b"".join(contents(brokers[number], topic)).startswith(b"".join(before))


def test_a_partition_that_was_moved_is_repaired_from_where_it_is(brokers: Brokers) -> None:
    """The topic's znode names the old replicas until no partition of the topic is being moved."""
    topic = new_topic(brokers[0], partitions=2, replicas=1, segment_bytes=4096)
    replicas = brokers[0].record("t").replicas
    first, second = replicas[0][0], replicas[1][0]
    other = next(number for number in brokers if number not in (first, second))
    leader = leader_of(brokers, topic)
    fill(leader, topic)
    before = contents(leader, topic)

    def begin(number: int, *target: int) -> None:
        record = brokers[0].record("t")
        after = reassignment.begin(record.states[number], record.replicas[number], target, 0)
        session = brokers[0].broker.host.metadata.session
        change_states(session, [StateChange(record, number, record.states[number], after)])

    begin(1, second, 99)  # there is no such broker, so this move goes on
    begin(0, first, other)
    waited_for(lambda: brokers[0].record("t").states[0].replicas == (first, other))
    waited_for(lambda: replica(brokers[other], topic).role.high_watermark == BATCHES)
    assert brokers[0].record("t").replicas[0] == (first,)
    waited_for(lambda: leader.broker.host.metadata.topics["t"].replicas_of(0) == (first, other))
    flip(leader, topic, 1, 700)
    scrub(leader)
    assert contents(leader, topic) == before


def test_the_only_replica_keeps_what_it_has_and_says_so(broker: RunningBroker) -> None:
    topic = new_topic(broker, replicas=1, segment_bytes=4096)
    leader_of({0: broker}, topic)
    fill(broker, topic)
    flip(broker, topic, 0, 700)
    before = contents(broker, topic)
    scrub(broker)
    [(start, end, _)] = known(broker)
    assert end - start == 1
    request = bpb.RepairPartitionRequest(topic_id=topic, partition=0, max_wait_ms=10_000)
    broker.stub.RepairPartition(request, timeout=30)
    assert known(broker) == [(start, end, "there is no other replica")]
    assert contents(broker, topic) == before


def test_a_replica_is_told_that_it_is_a_broker_that_comes_to_copy() -> None:
    """Clients may have taken all of its broker's connections."""
    scrubber = cast(Any, SimpleNamespace(connected=lambda _: None))
    partition = cast(Any, SimpleNamespace(topic_id=bytes(16), number=0, label="t-0"))
    with ThreadPoolExecutor() as threads, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30)
        source = _Replica(scrubber, partition, 1, BrokerRecord(1, "127.0.0.1", 1, other.getsockname()[1]))
        reading = threads.submit(source.read, 0, 1000)
        accepted, _ = other.accept()
        with accepted:
            assert accepted.recv(frames.HELLO_SIZE, socket.MSG_WAITALL) == frames.hello(of_replica=True)
        with pytest.raises(BrokerUnreachable):
            reading.result(30)


def test_a_scrubber_of_a_directory_out_of_service_rests_though_something_is_asked_of_it() -> None:
    settings = SimpleNamespace(scrub_bytes_per_second=1, scrub_interval_ms=1)
    host: Any = SimpleNamespace(failed=None, settings=settings, hosted={})
    scrubber = Scrubber(host, cast(Any, None), ManualClock())
    with scrubber._changed:
        scrubber._ask((b"t" * 16, 0))
    assert scrubber._is_asked()
    host.failed = CorruptBatch
    assert scrubber.step() == 60
    assert not scrubber._is_asked(), "it would be woken again at once"


def test_a_broker_stops_at_once_while_it_scrubs(start_broker: StartBroker) -> None:
    broker = start_broker(scrub_bytes_per_second=1)
    topic = new_topic(broker, replicas=1, segment_bytes=4096)
    leader_of({0: broker}, topic)
    fill(broker, topic)
    scrubber = broker.broker.scrubber
    scrubber._next_round_at = 0.0
    with scrubber._changed:
        scrubber._ask((topic, 0))  # wakes the thread
    waited_for(lambda: scrubber.checked_bytes > 0)
    scrubber.stop()
    assert not scrubber._thread.is_alive()


def test_digests_of_replicas_are_the_same_and_count_damage(brokers: Brokers) -> None:
    topic, leader, followers = filled_topic(brokers)
    request = bpb.DigestRangeRequest(topic_id=topic, partition=0, start_offset=0, max_bytes=1 << 20)
    whole = leader.stub.DigestRange(request, timeout=30)
    assert (whole.start_offset, whole.end_offset, whole.batches) == (0, BATCHES, BATCHES)
    assert whole.bytes == sum(map(len, contents(leader, topic)))
    request.end_offset = whole.end_offset
    assert all(each.stub.DigestRange(request, timeout=30) == whole for each in followers)
    part = bpb.DigestRangeRequest(topic_id=topic, partition=0, start_offset=3, end_offset=7)
    found = [each.stub.DigestRange(part, timeout=30) for each in brokers.values()]
    assert {(each.digest, each.batches) for each in found} == {(found[0].digest, 4)}
    flip(followers[0], topic, 0, 700)
    damaged = followers[0].stub.DigestRange(request, timeout=30)
    assert damaged.batches == BATCHES - 1 and len(damaged.damaged) == 1


def test_a_repaired_replica_that_comes_to_lead_knows_what_was_acknowledged(
    brokers: Brokers, start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """It appended a batch again whose answer was lost."""
    topic = new_topic(brokers[0], replicas=2, min_insync_replicas=1)
    leader = leader_of(brokers, topic)
    members = leader.record("t").replicas[0]
    waited_for(in_sync(brokers, topic, 0, *members))
    batches = [a_batch([b"%d" % id], producer_id=id, producer_epoch=0, base_sequence=0) for id in (77, 78, 79)]
    with leader.client() as client:
        for batch in batches:
            assert not client.append(topic, batch, acks=-1).HasField("error")
    [other] = [number for number in members if brokers[number] is not leader]
    waited_for(lambda: replica(brokers[other], topic).role.high_watermark == len(batches))
    brokers[other].broker.host._directory.save_high_watermarks()
    stopped = brokers.pop(other)
    stopped.stop(clean=False)
    flip(stopped, topic, 0, len(batches[0]) - 1)
    brokers[other] = start_broker(other, replica_lag_time_max_ms=3000)
    waited_for(lambda: "damage_repaired" in caplog.text)
    waited_for(in_sync(brokers, topic, 0, *members))
    [number] = [number for number, each in brokers.items() if each is leader]
    brokers.pop(number).stop()
    leader = leader_of(brokers, topic)
    assert leader is brokers[other]
    with leader.client() as client:
        assert [client.append(topic, batch).base_offset for batch in batches] == [0, 1, 2]
