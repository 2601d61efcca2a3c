"""Listing and deleting over real partitions, without a port: what is seen of a log while part of it is hidden, and
what of a request that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.replica.leadership import Pulse
from broker.replica.partition import Partition
from broker.requests.offsets import delete_records, has_news, list_offsets
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import InvalidRequest, OffsetNotAvailable, OffsetOutOfRange, UnknownTopicId
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk.registry import PartitionState
from tests.between import ahead
from tests.broker.data_port_client import a_batch
from tests.broker.requests.hosted import TOPIC_ID, Hosted
from tests.broker.storage.batches import make_batch
from tests.whole_batch import check_batch

HIDDEN_FROM = 3


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """Five records of one batch each, stamped 100 to 104, in partition 0; nothing in partition 1."""
    directory = LogDirectory(tmp_path / "data")
    host = Hosted(directory)
    for number in range(5):
        view = memoryview(bytearray(a_batch(timestamp_us=100 + number)))
        host.partitions[0].append_as_leader([(check_batch(view), view)])
    yield host
    directory.close()


def listed(host: Hosted, *wanted: pb.ListOffset) -> list[pb.ListedOffset]:
    return list(list_offsets(pb.ListOffsetsRequest(partitions=wanted), host).partitions)  # type: ignore[arg-type]


def at(place: int, number: int = 0, **more: int) -> pb.ListOffset:
    return pb.ListOffset(topic_id=TOPIC_ID, partition=number, at=place, **more)  # type: ignore[arg-type]


def test_every_place_is_listed_with_the_size_of_the_log(host: Hosted) -> None:
    log = host.partitions[0].log
    log.delete_before(1)
    earliest, latest, found, none = listed(
        host,
        at(pb.ListOffset.EARLIEST),
        at(pb.ListOffset.LATEST),
        at(pb.ListOffset.TIMESTAMP, timestamp_us=103),
        at(pb.ListOffset.TIMESTAMP, timestamp_us=105),
    )
    assert (earliest.found, earliest.offset) == (True, 1)
    assert (latest.found, latest.offset) == (True, 5)
    assert (found.found, found.offset, found.timestamp_us) == (True, 3, 103)
    assert (none.found, none.offset) == (False, 0)
    assert {each.size_bytes for each in (earliest, latest, found, none)} == {log.view.size_bytes}
    assert not found.in_batch
    [reached] = listed(host, at(pb.ListOffset.AFTER_BYTES, from_offset=1, max_bytes=1 << 20))
    assert (reached.found, reached.offset) == (True, 5)
    assert 0 < reached.size_bytes <= log.view.size_bytes


def leads_anew(host: Hosted) -> Partition:
    """Partition 0 after an election: records from offset 2 on may have been read before, which is not known yet."""
    partition = host.partitions[0]
    state = PartitionState.only(0, "here")
    both = replace(state, leader_epoch=5, replicas=(0, 1), isr=(0, 1), directories={0: "here", 1: "there"}, version=1)
    partition.role.follow(1, 4)
    partition.log.high_watermark = 2
    partition.role.lead(both, [0, 1])
    return partition


def follower_has_all(partition: Partition) -> None:
    pulse = Pulse(SYSTEM_CLOCK.monotonic(), 1, 0)
    assert partition.role.fetched(1, "there", pulse, 5, 5, -1, True, []) is None


def test_a_new_leader_that_does_not_know_the_end_takes_no_record_for_missing(host: Hosted) -> None:
    """Readers may have read it before; and positions do not go back (KIP-207)."""
    partition = leads_anew(host)
    found, unknown, latest, reached = listed(
        host,
        at(pb.ListOffset.TIMESTAMP, timestamp_us=101),
        at(pb.ListOffset.TIMESTAMP, timestamp_us=103),
        at(pb.ListOffset.LATEST),
        at(pb.ListOffset.AFTER_BYTES, from_offset=4, max_bytes=1 << 20),
    )
    assert (found.found, found.offset) == (True, 1)
    for each in (unknown, latest):
        assert isinstance(error_from_wire(each.error), OffsetNotAvailable)
    assert (reached.found, reached.offset, reached.size_bytes) == (True, 4, 0)
    for before in (-1, 4):
        with pytest.raises(OffsetNotAvailable):
            partition.delete_before(before)
    assert partition.delete_before(2) == 2
    follower_has_all(partition)
    [found, latest] = listed(host, at(pb.ListOffset.TIMESTAMP, timestamp_us=103), at(pb.ListOffset.LATEST))
    assert (found.offset, latest.offset) == (3, 5)


def test_a_record_is_found_by_its_time_though_only_the_check_of_the_end_learns_how_far_it_may_be_read(
    host: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = leads_anew(host)
    ahead(monkeypatch, partition.role, "check_knows_end", lambda: follower_has_all(partition))
    [found] = listed(host, at(pb.ListOffset.TIMESTAMP, timestamp_us=103))
    assert (found.found, found.offset) == (True, 3)


def test_nothing_is_searched_any_more_for_a_client_that_has_gone(host: Hosted) -> None:
    looked: list[int] = []

    def is_awaited() -> bool:
        looked.append(len(looked))
        return len(looked) < 3

    request = pb.ListOffsetsRequest(partitions=[at(pb.ListOffset.TIMESTAMP, timestamp_us=103)] * 100)
    assert [each.offset for each in list_offsets(request, host, is_awaited).partitions] == [3, 3]  # type: ignore[arg-type]


def test_of_a_batch_whose_times_differ_the_offset_to_look_from_is_listed(host: Hosted) -> None:
    header, data = make_batch([b"a", b"b", b"c"], [200, 400, 300])
    for _ in range(2):
        host.partitions[1].append_as_leader([(header, memoryview(bytearray(data)))])
    host.partitions[1].log.delete_before(1)

    def found(**more: int) -> tuple[bool, int, bool]:
        [each] = listed(host, at(pb.ListOffset.TIMESTAMP, 1, **more))
        assert each.timestamp_us == 0
        return each.found, each.offset, each.in_batch

    assert found(timestamp_us=250) == (True, 1, True)
    assert found(timestamp_us=250, from_offset=3) == (True, 3, True)
    assert found(timestamp_us=401) == (False, 0, False)


def test_what_is_hidden_is_not_listed_and_not_deleted(host: Hosted) -> None:
    host.partitions[0]._applier.hide((1, 0), HIDDEN_FROM)
    latest, beyond = listed(host, at(pb.ListOffset.LATEST), at(pb.ListOffset.TIMESTAMP, timestamp_us=104))
    assert latest.offset == HIDDEN_FROM
    assert not beyond.found
    past = pb.DeleteRecordsRequest(topic_id=TOPIC_ID, partition=0, before_offset=HIDDEN_FROM + 1)
    with pytest.raises(OffsetOutOfRange) as caught:
        delete_records(past, host)  # type: ignore[arg-type]
    assert caught.value.facts == {"offset": 4, "partition": "t-0", "start_offset": 0, "end_offset": HIDDEN_FROM}
    everything = pb.DeleteRecordsRequest(topic_id=TOPIC_ID, partition=0, before_offset=-1)
    assert delete_records(everything, host).log_start_offset == HIDDEN_FROM  # type: ignore[arg-type]


def test_a_partition_that_fails_has_its_error_and_nothing_else(host: Hosted) -> None:
    unknown, nowhere, well = listed(host, pb.ListOffset(topic_id=bytes(16)), at(9), at(pb.ListOffset.LATEST))
    assert isinstance(error_from_wire(unknown.error), UnknownTopicId)
    refused = error_from_wire(nowhere.error)
    assert isinstance(refused, InvalidRequest) and "unknown kind of offset 9" in str(refused)
    assert nowhere == pb.ListedOffset(error=nowhere.error)
    assert well.offset == 5


def test_there_is_news_where_an_end_moved_either_way_or_a_partition_fails(host: Hosted) -> None:
    def news(*wanted: pb.ListOffset) -> bool:
        return has_news(pb.ListOffsetsRequest(partitions=wanted), host)  # type: ignore[arg-type]

    known = at(pb.ListOffset.LATEST, known_offset=5)
    assert not news(known, at(pb.ListOffset.LATEST, number=1))
    assert news(known, at(pb.ListOffset.LATEST, number=1, known_offset=1))  # a log that was made anew
    assert news(at(pb.ListOffset.LATEST, known_offset=4))
    assert news(known, pb.ListOffset(topic_id=bytes(16)))
    host.partitions[0]._applier.hide((1, 0), 5)
    view = memoryview(bytearray(a_batch()))
    host.partitions[0].append_as_leader([(check_batch(view), view)])
    assert not news(known)  # hidden
