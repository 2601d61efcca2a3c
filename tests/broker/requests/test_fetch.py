"""The fetch request over real partitions, without a port: what comes of each, how much, and when that is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.requests import fetch as fetching
from broker.requests.fetch import Answer, fetch
from broker.storage.log_dir import LogDirectory
from broker.storage.reader import Look
from kafkalog.errors import (
    FencedLeaderEpoch,
    InvalidRequest,
    KafkalogError,
    LogTruncated,
    OffsetOutOfRange,
    UnknownLeaderEpoch,
    UnknownTopicId,
)
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from kafkalog.zk.registry import PartitionState
from tests.broker.data_port_client import a_batch
from tests.broker.requests.hosted import TOPIC_ID, Hosted
from tests.whole_batch import check_batch

BATCH = a_batch([bytes(1000)])
SIZE = len(BATCH)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    directory = LogDirectory(tmp_path / "data")
    host = Hosted(directory)
    for partition in host.partitions:
        for _ in range(3):
            view = memoryview(bytearray(BATCH))
            partition.append_as_leader([(check_batch(view), view)])
    yield host
    directory.close()


def part(number: int = 0, offset: int = 0, max_bytes: int = 0) -> pb.FetchPartition:
    return pb.FetchPartition(topic_id=TOPIC_ID, partition=number, offset=offset, max_bytes=max_bytes)


def fetched(host: Hosted, *parts: pb.FetchPartition, max_bytes: int = 0, limit: int = 1 << 20) -> Answer[pb.FetchReply]:
    answer = fetch(pb.FetchRequest(partitions=parts, max_bytes=max_bytes), host, limit)  # type: ignore[arg-type]
    assert answer.length == sum(piece.length for piece in answer.slices)
    answer.close()
    return answer


def lengths(answer: Answer[pb.FetchReply]) -> list[int]:
    return [each.length for each in answer.reply.partitions]


def test_each_partition_has_its_bytes_its_place_and_its_ends(host: Hosted) -> None:
    host.partitions[1].log.delete_before(1)
    answer = fetched(host, part(1, offset=2), part(0))
    assert lengths(answer) == [SIZE, 3 * SIZE]
    first, second = answer.reply.partitions
    assert (first.log_start_offset, first.end_offset) == (1, 3)
    assert (second.log_start_offset, second.end_offset) == (0, 3)
    assert (first.slice.segment_base_offset, first.slice.position) == (0, 2 * SIZE)
    assert not answer.failed


@pytest.mark.parametrize(
    ("max_bytes", "limit", "of_the_first", "sizes"),
    [
        (0, 10 * SIZE, 0, [3, 3]),
        (4 * SIZE, 10 * SIZE, 0, [3, 1]),  # what the request wants
        (10 * SIZE, 4 * SIZE, 0, [3, 1]),  # no more than the broker gives
        (0, 10 * SIZE, 2 * SIZE, [2, 3]),  # what it wants of one partition
        (4 * SIZE - 1, 10 * SIZE, 0, [3, 0]),  # half a batch helps nobody
        (3 * SIZE, 10 * SIZE, 0, [3, 0]),
        (1, 10 * SIZE, 0, [1, 0]),  # a whole batch whatever the limits say, and that once
        (0, 1, 0, [1, 0]),
        (0, 10 * SIZE, 1, [1, 3]),
    ],
)
def test_an_answer_keeps_its_limits(
    host: Hosted, max_bytes: int, limit: int, of_the_first: int, sizes: list[int]
) -> None:
    answer = fetched(host, part(max_bytes=of_the_first), part(1), max_bytes=max_bytes, limit=limit)
    assert [length // SIZE for length in lengths(answer)] == sizes
    assert [each.end_offset for each in answer.reply.partitions] == [3, 3]


def test_the_first_partition_with_data_gets_on_where_those_before_it_have_none(host: Hosted) -> None:
    assert lengths(fetched(host, part(0, offset=3), part(1), max_bytes=1)) == [0, SIZE]


def test_no_answer_has_more_slices_than_files_may_be_open(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_SLICES_MAX", 2)
    answer = fetch(pb.FetchRequest(partitions=[part(), part(1), part()]), host, 1 << 20)  # type: ignore[arg-type]
    assert lengths(answer) == [3 * SIZE, 3 * SIZE, 0]
    assert answer.is_enough(pb.FetchRequest(min_bytes=1 << 30))  # it cannot become more
    answer.close()
    assert not answer.slices


def test_an_answer_is_enough_with_as_many_bytes_as_are_wanted_or_with_an_error(host: Hosted) -> None:
    answer = fetched(host, part())
    answer.length = SIZE
    assert answer.is_enough(pb.FetchRequest(min_bytes=SIZE))
    assert not answer.is_enough(pb.FetchRequest(min_bytes=SIZE + 1))
    assert fetched(host, part(offset=9)).is_enough(pb.FetchRequest(min_bytes=1 << 30))


def test_a_partition_that_fails_has_its_error_and_nothing_else(host: Hosted) -> None:
    unknown = pb.FetchPartition(topic_id=bytes(16))
    answer = fetched(host, part(offset=9), unknown, part(1))
    assert answer.failed
    out_of_range, not_there, well = answer.reply.partitions
    assert isinstance(error_from_wire(out_of_range.error), OffsetOutOfRange)
    assert isinstance(error_from_wire(not_there.error), UnknownTopicId)
    assert out_of_range.end_offset == 0
    assert well.length == 3 * SIZE


def test_hidden_records_are_neither_returned_nor_counted(host: Hosted) -> None:
    host.partitions[0]._applier.hide((1, 0), 2)
    answer = fetched(host, part())
    assert lengths(answer) == [2 * SIZE]
    assert answer.reply.partitions[0].end_offset == 2


def test_a_hint_is_handed_to_the_log(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[tuple[int, int] | None] = []
    reader = host.partitions[0].log.reader
    read = reader.read

    def reading(offset: int, max_bytes: int, hint: tuple[int, int] | None, look: Look) -> object:
        hints.append(hint)
        return read(offset, max_bytes, hint, look)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "read", reading)
    hinted = part(offset=2)
    hinted.hint.segment_base_offset, hinted.hint.position = 0, 2 * SIZE
    fetched(host, hinted)
    fetched(host, part())
    assert hints == [(0, 2 * SIZE), None]


def test_a_fetch_of_no_partition_is_refused(host: Hosted) -> None:
    with pytest.raises(InvalidRequest, match="a fetch names no partition"):
        fetched(host)


# --- what a reader believes --------------------------------------------------------------------------------------


def believing(offset: int, leader_epoch: int | None, last_epoch: int | None = None) -> pb.FetchPartition:
    return pb.FetchPartition(topic_id=TOPIC_ID, offset=offset, leader_epoch=leader_epoch, last_epoch=last_epoch)


@pytest.fixture
def in_epoch_1(host: Hosted) -> Hosted:
    """Its first partition has offsets 0 to 2 of epoch 0, and 3 to 5 of epoch 1."""
    partition = host.partitions[0]
    partition.role.lead(PartitionState.only(0, "here", leader_epoch=1), [0])
    for _ in range(3):
        view = memoryview(bytearray(BATCH))
        partition.append_as_leader([(check_batch(view), view)])
    return host


@pytest.mark.parametrize(
    ("offset", "leader_epoch", "last_epoch"),
    [
        (5, None, None),  # a client of an older version
        (5, 1, None),  # it was sought
        (3, 1, 0),  # where the epoch ended
        (2, 1, 0),
        (5, 1, 1),
        (6, 1, 1),
        (5, 1, 7),  # one that nobody wrote in
    ],
)
def test_a_reader_whose_records_are_in_the_log_reads_on(
    in_epoch_1: Hosted, offset: int, leader_epoch: int | None, last_epoch: int | None
) -> None:
    assert not fetched(in_epoch_1, believing(offset, leader_epoch, last_epoch)).failed


@pytest.mark.parametrize(
    ("offset", "leader_epoch", "last_epoch", "error"),
    [
        (5, 0, 0, FencedLeaderEpoch(partition="t-0", epoch=0, current=1)),
        (5, 2, 1, UnknownLeaderEpoch(partition="t-0", epoch=2, current=1)),
        (5, 1, 0, LogTruncated(partition="t-0", offset=5, epoch=0, start_offset=0, end_offset=3)),
        (7, 1, 1, LogTruncated(partition="t-0", offset=7, epoch=1, start_offset=0, end_offset=6)),
    ],
)
def test_a_reader_that_believes_something_else_is_told(
    in_epoch_1: Hosted, offset: int, leader_epoch: int, last_epoch: int, error: KafkalogError
) -> None:
    answer = fetched(in_epoch_1, believing(offset, leader_epoch, last_epoch))
    told = error_from_wire(answer.reply.partitions[0].error)
    assert (type(told), told.facts) == (type(error), error.facts)


def test_what_was_deleted_is_not_taken_for_truncated(in_epoch_1: Hosted) -> None:
    in_epoch_1.partitions[0].log.delete_before(4)
    assert not fetched(in_epoch_1, believing(4, 1, 0)).failed
    told = error_from_wire(fetched(in_epoch_1, believing(3, 1, 0)).reply.partitions[0].error)
    assert type(told) is OffsetOutOfRange
