"""A partition's part of a fetch: what is asked for, what of an answer is taken, and where it goes on."""

from __future__ import annotations

import pytest

from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch, decode, split_body
from kafkalog.errors import CorruptBatch, NotLeader
from kafkalog.format.batch import HEADER_SIZE
from kafkalog.format.columns import columns_from_lists
from kafkalog.records import TopicPartition
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from tests.kafkalog.client.consumer.batches import batches, stamped, with_offsets
from tests.whole_batch import check_batch

T0 = TopicPartition("t", 0)


def fetch(offset: int) -> PartitionFetch:
    return PartitionFetch(T0, b"i" * 16, offset)


def answer(position: int = 0) -> pb.FetchedPartition:
    return pb.FetchedPartition(slice=pb.PositionHint(segment_base_offset=0, position=position))


def asked(partition: PartitionFetch) -> pb.FetchPartition:
    request = pb.FetchRequest()
    partition.ask(request, 10)
    [part] = request.partitions
    return part


def taken(partition: PartitionFetch, data: bytes, position: int = 0) -> list[tuple[int, int]]:
    """(the first offset that is wanted, the end offset) of each batch that is taken."""
    found = partition.take(answer(position), memoryview(data))
    return [(batch.start_offset, batch.header.end_offset) for batch in found]


def damaged(data: bytes) -> bytes:
    """Its last batch's body does not match its checksum."""
    return data[:-30] + bytes([data[-30] ^ 1]) + data[-29:]


def test_a_request_says_which_partition_from_where_and_how_much() -> None:
    partition = PartitionFetch(TopicPartition("t", 3), b"i" * 16, 42)
    part = asked(partition)
    assert (part.topic_id, part.partition, part.offset, part.max_bytes) == (b"i" * 16, 3, 42, 10)
    assert not part.HasField("hint")
    partition.go_to(7)
    assert (partition.offset, asked(partition).offset) == (7, 7)


def test_a_cut_last_batch_is_left_for_the_next_time() -> None:
    data = batches(3, 4, 5)
    whole = len(batches(3, 4))
    for length in range(whole, len(data)):
        partition = fetch(1)
        assert taken(partition, data[:length], position=1000) == [(1, 3), (3, 7)]
        assert partition.offset == 7
        assert asked(partition).hint.position == 1000 + whole


def test_batches_before_the_offset_are_passed_over_and_count_to_where_the_next_one_stands() -> None:
    for offset, first in ((7, 7), (8, 8), (11, 11)):
        partition = fetch(offset)
        assert taken(partition, batches(3, 4, 5), position=1000) == [(first, 12)]
        assert asked(partition).hint.position == 1000 + len(batches(3, 4, 5))


def test_the_hint_is_of_the_segment_that_the_answer_came_from_and_stays_where_an_answer_has_none() -> None:
    partition = fetch(0)
    partition.take(pb.FetchedPartition(slice=pb.PositionHint(segment_base_offset=500, position=7)), memoryview(b""))
    hint = asked(partition).hint
    assert (hint.segment_base_offset, hint.position) == (500, 7)
    assert partition.take(pb.FetchedPartition(), memoryview(b"")) == []
    assert asked(partition).hint == hint


@pytest.mark.parametrize("event", ["a seek", "damage"])
def test_where_a_batch_stands_on_the_disk_is_not_said_of_another_place_nor_where_it_was_damaged(event: str) -> None:
    partition = fetch(0)
    assert taken(partition, batches(3)) == [(0, 3)]
    if event == "a seek":
        partition.go_to(6)
    else:
        with pytest.raises(CorruptBatch):
            partition.take(answer(), memoryview(damaged(batches(3, 3))[len(batches(3)) :]))
    assert not asked(partition).HasField("hint")


def test_what_the_broker_says_is_wrong_is_raised_and_nothing_moves() -> None:
    partition = fetch(0)
    taken(partition, batches(3), position=8)
    before = asked(partition)
    with pytest.raises(NotLeader):
        partition.take(pb.FetchedPartition(error=error_to_wire(NotLeader(partition="t-0", leader=2))), memoryview(b""))
    assert asked(partition) == before


def test_a_flipped_bit_anywhere_is_noticed_and_what_is_before_it_is_handed_out() -> None:
    good, data = len(batches(3)), batches(3, 4)
    for position in range(good, len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        partition = fetch(0)
        assert taken(partition, bytes(flipped)) in ([(0, 3)], [])  # a longer length looks like a cut batch at first
        if partition.offset:
            with pytest.raises(CorruptBatch):
                partition.take(answer(), memoryview(flipped)[good:])


@pytest.mark.parametrize("offset", [3, 5, 6])
def test_a_damaged_body_is_an_error_that_says_where_to_continue(offset: int) -> None:
    good, end = len(batches(3)), len(batches(3, 4))
    data = damaged(batches(3, 4)) + batches(3, 4, 5)[end:]
    for to in (len(data), end):  # where the next batch is in the answer, and where it is not
        with pytest.raises(CorruptBatch) as raised:
            fetch(offset).take(answer(), memoryview(data)[good:to])
        assert raised.value.facts["end_offset"] == 7
        assert (
            str(raised.value) == "corrupt batch in t-0 at 3: its checksum does not match; reading can go on at offset 7"
        )


@pytest.mark.parametrize("offset", [3, 4])
def test_an_end_offset_before_the_requested_offset_is_not_a_place_to_continue(offset: int) -> None:
    with pytest.raises(CorruptBatch) as raised:
        fetch(offset).take(answer(), memoryview(damaged(batches(3))))
    assert "end_offset" not in raised.value.facts
    assert raised.value.facts["reason"] == "its checksum does not match"


def test_batches_that_go_back_are_refused_and_those_before_them_are_taken() -> None:
    partition = fetch(0)
    assert taken(partition, batches(3) + batches(2) + batches(3, 4)[len(batches(3)) :]) == [(0, 3)]
    assert partition.offset == 3
    assert asked(partition).hint.position == len(batches(3))


def decoded(data: bytes, start_offset: int, end_offset: int | None) -> list[int]:
    """Of a batch whose records' values are their offsets, those that are wanted."""
    batch = FetchedBatch(check_batch(data), memoryview(data), start_offset)
    columns = decode(batch, T0, end_offset)
    values = [int(value) for value in columns.column("value").to_pylist()]
    assert columns.num_rows == len(values)
    return values


@pytest.mark.parametrize("start, end, wanted", [
    (3, None, [3, 4, 5, 6]), (5, None, [5, 6]), (6, 7, [6]), (3, 4, [3]), (4, 6, [4, 5]), (3, 100, [3, 4, 5, 6]),
    (5, 5, []), (5, 4, []), (3, 2, []),
])  # fmt: skip
def test_of_a_batch_the_records_within_the_range_are_taken(start: int, end: int | None, wanted: list[int]) -> None:
    assert decoded(batches(3, 4)[len(batches(3)) :], start, end) == wanted


@pytest.mark.parametrize("start, end, wanted", [
    (10, None, [10, 17, 19, 20]), (11, 19, [17]), (17, 18, [17]), (11, 12, []), (20, 21, [20]), (21, None, []),
    (19, 17, []),
])  # fmt: skip
def test_of_a_batch_with_gaps_the_records_within_the_range_are_taken(
    start: int, end: int | None, wanted: list[int]
) -> None:
    left = [10, 17, 19, 20]
    columns = with_offsets(columns_from_lists([b"%d" % offset for offset in left], 5), left)
    assert decoded(stamped(columns, 10, last_offset_delta=11), start, end) == wanted


def test_a_batch_that_cannot_be_decoded_names_its_partition() -> None:
    data = batches(4)
    header = check_batch(data)._replace(record_count=5)
    with pytest.raises(CorruptBatch, match=r"corrupt batch in t-0 at 0: it has 4 records, but its header says 5"):
        decode(FetchedBatch(header, memoryview(data), 0), T0)
    with pytest.raises(CorruptBatch, match="its body is not an Arrow batch"):
        decode(FetchedBatch(check_batch(data), memoryview(data[:HEADER_SIZE]).toreadonly(), 0), T0)


def test_a_body_is_the_partitions_slices_one_after_the_other() -> None:
    reply = pb.FetchReply(partitions=[{"length": 3}, {"length": 0}, {"length": 2}])
    assert [bytes(part) for part in split_body(reply, memoryview(b"abcde"))] == [b"abc", b"", b"de"]
    assert [bytes(part) for part in split_body(pb.FetchReply(partitions=[{}, {}]), None)] == [b"", b""]


def test_the_leader_is_asked_once_in_each_of_its_epochs_whether_it_has_what_was_read() -> None:
    def epochs(leader_epoch: int) -> tuple[int, int]:
        """What a request names; -1: nothing."""
        request = pb.FetchRequest()
        partition.ask(request, 10, leader_epoch)
        [part] = request.partitions
        return (
            part.leader_epoch if part.HasField("leader_epoch") else -1,
            part.last_epoch if part.HasField("last_epoch") else -1,
        )

    partition = fetch(0)
    assert (partition.read_in, epochs(-1)) == (None, (-1, -1))
    assert epochs(2) == (2, -1), "nothing was read"
    taken(partition, batches(3))  # of epoch 1
    assert (partition.read_in, epochs(2)) == (2, (2, -1))
    assert epochs(3) == (3, 1)
    with pytest.raises(NotLeader):
        partition.take(
            pb.FetchedPartition(error=error_to_wire(NotLeader(broker_id=1, partition="t-0"))), memoryview(b"")
        )
    assert (partition.read_in, epochs(3)) == (2, (3, 1)), "it has not answered yet"
    taken(partition, b"")
    assert (partition.read_in, epochs(3)) == (3, (3, -1))
    partition.go_to(9)
    assert (partition.read_in, epochs(4)) == (None, (4, -1)), "it was sought"
    taken(partition, b"")
    assert (partition.read_in, epochs(5)) == (4, (5, 4)), "nothing was read, but the log reached that far"


def test_a_committed_offset_is_checked_in_the_first_request() -> None:
    partition = PartitionFetch(T0, b"i" * 16, 5, 3)
    request = pb.FetchRequest()
    partition.ask(request, 10, 4)
    assert (request.partitions[0].last_epoch, partition.read_in) == (3, 3)
