"""The first record at or after a timestamp: in a batch, and over a real cluster, where batches may be anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, AtTimestamp, TopicPartition
from kafkalog.client import timestamps
from kafkalog.client.admin import ListedOffset
from kafkalog.client.consumer.partition_fetch import FetchedBatch, PartitionFetch
from kafkalog.client.timestamps import first_record_at
from kafkalog.errors import CorruptBatch, KafkalogError, LeaderNotAvailable, NotLeader, OffsetOutOfRange, ProtocolError
from kafkalog.format.batch import CODECS, Batch, encode_batch, read_header, stamp
from kafkalog.format.columns import (
    HAS_OFFSET,
    HAS_TIMESTAMP,
    HAS_TIMESTAMP_DELTA,
    SCHEMAS,
    columns_from_lists,
    encode_columns,
)
from kafkalog.wire import dataport_pb2
from tests.broker.data_port_client import DataPortClient
from tests.broker.storage.batches import make_batch
from tests.damage import flip

WHERE = TopicPartition("t", 0)
TIMES = [50, 20, 70, 70, 10, 90] * 30


# --- in a batch -------------------------------------------------------------------------------------------------------


def first(batch: Batch, timestamp_us: int, start_offset: int) -> tuple[int, int] | None:
    header, data = batch
    return first_record_at(FetchedBatch(header, data, max(start_offset, header.base_offset)), timestamp_us, WHERE)


def stamped(batch: Batch, base_offset: int) -> Batch:
    _, data = batch
    stamp(data, base_offset, 0, 0)
    return read_header(data), data


@pytest.mark.parametrize("unit", [1, 1 << 31])  # deltas of timestamps, and timestamps
@pytest.mark.parametrize("codec", list(CODECS))
def test_first_record_at_or_after_a_time_is_exact(codec: str, unit: int) -> None:
    times = [unit * time for time in TIMES]
    batch = stamped(make_batch([b"x%d" % i for i in range(len(times))], times, codec=codec), 1000)
    for start_offset in (0, 1000, 1003, 1179):
        for wanted in (unit * each for each in (-5, 10, 11, 50, 51, 70, 71, 90, 91)):
            expected = next(
                ((1000 + i, t) for i, t in enumerate(times) if t >= wanted and 1000 + i >= start_offset), None
            )
            assert first(batch, wanted, start_offset) == expected


def test_batch_with_one_time_for_all_has_no_column() -> None:
    batch = make_batch([b"a", b"b", b"c"], 40)
    assert first(batch, 40, 0) == (0, 40)
    assert first(batch, 40, 2) == (2, 40)
    assert first(batch, 41, 0) is None


@pytest.mark.parametrize(
    ("bit", "times"),
    [
        (HAS_TIMESTAMP, pa.array([5, 9, 30], pa.timestamp("us", tz="UTC"))),
        (HAS_TIMESTAMP_DELTA, pa.array([0, 4, 25], pa.int32())),
    ],
)
def test_records_of_a_compacted_batch_have_offsets_of_their_own(bit: int, times: pa.Array) -> None:
    """As compaction will leave them."""
    arrays = [times, pa.array([b"v"] * 3, pa.binary()), pa.array([1002, 1007, 1011])]
    attributes = bit | HAS_OFFSET
    body = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[attributes]).serialize()
    data = memoryview(bytearray(encode_batch(
        memoryview(body), codec=0, attributes=attributes, record_count=3, min_timestamp_us=5, max_timestamp_us=30,
        last_offset_delta=15,
    ).tobytes()))  # fmt: skip
    batch = stamped((read_header(data), data), 1000)
    assert [first(batch, wanted, 0) for wanted in (0, 6, 10, 31)] == [(1002, 5), (1007, 9), (1011, 30), None]
    assert first(batch, 0, 1008) == (1011, 30)


def with_body(body: bytes, codec: str, count: int, attributes: int = HAS_TIMESTAMP) -> Batch:
    encoded = encode_batch(
        memoryview(body), codec=CODECS[codec], attributes=attributes, record_count=count, min_timestamp_us=0,
        max_timestamp_us=1 << 40,
    ).tobytes()  # fmt: skip
    return read_header(encoded), memoryview(encoded)


@pytest.mark.parametrize("unit", [1, 1 << 31])
@pytest.mark.parametrize("codec", list(CODECS))
def test_body_that_is_no_arrow_batch_is_a_corrupt_batch(codec: str, unit: int) -> None:
    columns = columns_from_lists([b"v"] * 50, [unit * number for number in range(50)])
    attributes = columns.attributes
    body = bytes(encode_columns(columns.batch, CODECS[codec]))
    places = range(min(len(body), 400))
    corrupt = 0
    for at in places:
        try:  # what stands in place of a value, or pads, may be anything; no other error comes
            first(with_body(body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :], codec, 50, attributes), 49, 0)
        except CorruptBatch:
            corrupt += 1
        with pytest.raises(CorruptBatch):
            first(with_body(body[:at], codec, 50, attributes), 49, 0)
    assert corrupt > len(places) // 4


def test_schema_message_is_no_record_batch() -> None:
    with pytest.raises(CorruptBatch, match="not an Arrow batch"):
        first(with_body(bytes(SCHEMAS[HAS_TIMESTAMP].serialize()), "none", 3), 5, 0)


def test_a_null_is_no_time() -> None:
    times = pa.array([5, None, 9, 30], pa.timestamp("us", tz="UTC"))
    body = pa.RecordBatch.from_arrays([times, pa.array([b"v"] * 4, pa.binary())], schema=SCHEMAS[HAS_TIMESTAMP])
    batch = with_body(bytes(body.serialize()), "none", 4)
    with pytest.raises(CorruptBatch, match="a timestamp is null"):
        first(batch, 6, 0)


# --- over a cluster ---------------------------------------------------------------------------------------------------


class Asked:
    """A topic that batches are appended to as they are, and what is asked of its broker."""

    def __init__(self, cluster: LocalCluster, admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admin, self.topic = admin, topic
        self.topic_id = admin.create_topic(topic, 3).topic_id
        self._port = cluster.brokers[0].data_port
        self.lists: list[int] = []  # how many partitions, request by request
        self.fetches: list[int] = []
        spied: Any = admin._cluster
        call, fetch = spied.call, timestamps._fetch

        def counted_call(method: str, request: Any, **more: Any) -> Any:
            if method == "ListOffsets":
                self.lists.append(len(request.partitions))
            return call(method, request, **more)

        def counted_fetch(cluster: Any, broker_id: int, fetches: Any, max_bytes: int) -> Any:
            self.fetches.append(len(fetches))
            return fetch(cluster, broker_id, fetches, max_bytes)

        monkeypatch.setattr(spied, "call", counted_call)
        monkeypatch.setattr(timestamps, "_fetch", counted_fetch)

    def place(self, number: int = 0) -> TopicPartition:
        return TopicPartition(self.topic, number)

    def append(self, *times: list[int] | int, partition: int = 0, codec: str = "none") -> None:
        """A batch for each list of times; of a number for three records that have it."""
        batches = [
            make_batch([b"v"] * (3 if isinstance(each, int) else len(each)), each, codec=codec)[1] for each in times
        ]
        self.append_raw(b"".join(batches), partition)

    def append_raw(self, data: bytes, partition: int = 0) -> None:
        with DataPortClient(self._port) as client:
            assert not client.append(self.topic_id, data, partition=partition).HasField("error")

    def find(self, timestamp_us: int, **more: Any) -> tuple[int | None, int | None]:
        return self.admin.list_offsets({self.place(): AtTimestamp(timestamp_us)}, **more)[self.place()][:2]


@pytest.fixture
def asked(cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    with Admin(cluster.bootstrap_servers, retry_timeout_ms=3000) as admin:
        yield Asked(cluster, admin, topic, monkeypatch)


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_record_is_found_where_it_is_whatever_its_batch_and_the_start_of_the_log(asked: Asked, codec: str) -> None:
    times = [[100, 300, 200], [250, 260, 240], [400, 400, 400], [350, 500, 450]]
    asked.append(*times, codec=codec)
    flat = [each for batch in times for each in batch]
    for start in range(len(flat)):
        if start:
            asked.admin.delete_records({asked.place(): start})
        for wanted in (0, 100, 201, 255, 261, 301, 400, 401, 451, 500, 501):
            expected = next(
                ((offset, when) for offset, when in enumerate(flat) if when >= wanted and offset >= start), (None, None)
            )
            assert asked.find(wanted) == expected, (start, wanted)


def test_a_leader_is_asked_once_and_for_batches_once_more_where_that_matters(asked: Asked) -> None:
    asked.append([100, 300, 200], partition=0)
    asked.append([100, 300, 200], partition=1)
    asked.append(200, partition=2)
    size = asked.admin.list_offsets({asked.place(1): "latest"})[asked.place(1)].size_bytes
    assert size > 0
    del asked.lists[:]
    found = asked.admin.list_offsets({asked.place(number): AtTimestamp(150) for number in (2, 1, 0)})
    assert [found[asked.place(number)][:2] for number in (2, 1, 0)] == [(0, 200), (1, 300), (1, 300)]
    assert found[asked.place(1)] == ListedOffset(1, 300, size)
    assert (asked.lists, asked.fetches) == ([3], [2])
    asked.admin.list_offsets(
        {asked.place(2): AtTimestamp(150), asked.place(1): "latest", asked.place(0): AtTimestamp(301)}
    )
    assert asked.fetches == [2]


def test_a_connection_serves_the_next_who_looks(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.append([100, 300, 200])
    connect, connected = asked.admin._cluster.connect_data, []

    def counted(broker_id: int, *known: Any) -> Any:
        connected.append(broker_id)
        return connect(broker_id, *known)

    monkeypatch.setattr(asked.admin._cluster, "connect_data", counted)
    assert [asked.find(150), asked.find(150)] == [(1, 300)] * 2
    assert len(connected) == 1


def test_batches_that_have_no_room_in_one_answer_are_asked_for_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        asked.append([100, 300, 200], partition=number)
    ask = PartitionFetch.ask

    def in_a_small_answer(self: PartitionFetch, request: Any, max_bytes: int) -> None:
        ask(self, request, max_bytes)
        request.max_bytes = 400  # a batch and a half

    monkeypatch.setattr(PartitionFetch, "ask", in_a_small_answer)
    found = asked.admin.list_offsets({asked.place(number): AtTimestamp(150) for number in range(3)})
    assert [found[asked.place(number)][:2] for number in range(3)] == [(1, 300)] * 3
    assert (asked.lists, asked.fetches) == ([3], [3, 2, 1])


def test_a_lookup_continues_after_a_false_header(asked: Asked) -> None:
    """A broker does not inflate a body: a compressed batch may say anything of its times."""
    columns = columns_from_lists([b"v"] * 2, [100, 200])
    for _ in range(3):
        asked.append_raw(
            encode_batch(
                encode_columns(columns.batch, CODECS["zstd"]), codec=CODECS["zstd"], attributes=columns.attributes,
                record_count=2, min_timestamp_us=100, max_timestamp_us=1 << 30,
            ).tobytes()
        )  # fmt: skip
    assert asked.find(201) == (None, None)
    asked.append([150, 250])
    del asked.fetches[:]
    assert asked.find(201) == (7, 250)
    assert asked.fetches == [1, 1], "batches that follow are looked through together"


def test_a_body_that_is_no_batch_is_told_of_its_partition_alone(asked: Asked) -> None:
    asked.append_raw(
        encode_batch(
            memoryview(bytes(64)), codec=CODECS["zstd"], attributes=HAS_TIMESTAMP, record_count=2, min_timestamp_us=100,
            max_timestamp_us=200,
        ).tobytes()
    )  # fmt: skip
    asked.append([100, 200], partition=1)
    with pytest.raises(CorruptBatch, match="at 0: its body is not an Arrow batch"):
        asked.find(150)
    failed: dict[TopicPartition, KafkalogError] = {}
    wanted = {asked.place(number): AtTimestamp(150) for number in (0, 1)}
    found = asked.admin.list_offsets(wanted, failed)
    assert {each: found[each][:2] for each in found} == {asked.place(1): (1, 200)}
    assert [type(error) for error in failed.values()] == [CorruptBatch] and list(failed) == [asked.place(0)]


def test_a_damaged_batch_is_reported_as_by_any_read(cluster: LocalCluster, asked: Asked) -> None:
    asked.append([100, 300, 200], [400, 600, 500])
    flip(cluster, asked.topic, 1, 120)
    assert asked.find(150) == (1, 300)
    for _ in range(2):
        with pytest.raises(CorruptBatch, match="offsets 3 to 5 are damaged on disk") as caught:
            asked.find(450)
        assert caught.value.facts["end_offset"] == 6


def test_a_batch_that_is_deleted_meanwhile_is_asked_for_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.append([100, 300, 200], [400, 600, 500])
    fetch = timestamps._fetch
    deletions = [2, 4]

    def after_a_deletion(*arguments: Any) -> Any:
        if deletions:
            asked.admin.delete_records({asked.place(): deletions.pop(0)})
        return fetch(*arguments)

    monkeypatch.setattr(timestamps, "_fetch", after_a_deletion)
    assert asked.find(150) == (4, 600)
    assert len(asked.lists) == 3
    deletions.append(-1)
    assert asked.find(150) == (None, None)


def test_a_batch_that_is_gone_time_and_again_is_told_at_last(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.append([100, 300, 200])
    gone = OffsetOutOfRange(offset=0, partition="t-0", start_offset=1, end_offset=3)
    monkeypatch.setattr(timestamps, "_taken", lambda *arguments: gone)
    with pytest.raises(OffsetOutOfRange):
        asked.find(150, failed={})
    assert 2 < len(asked.fetches) < 100


def test_a_leader_that_moved_between_the_requests_is_looked_for(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.append([100, 300, 200])
    fetch, moved = timestamps._fetch, [LeaderNotAvailable(partition="t-0", broker_id=1)]

    def once_elsewhere(*arguments: Any) -> Any:
        if moved:
            raise moved.pop()
        return fetch(*arguments)

    monkeypatch.setattr(timestamps, "_fetch", once_elsewhere)
    assert asked.find(150) == (1, 300)


def test_a_leader_that_is_silent_is_not_waited_for_once_another_one_leads(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.append([100, 300])
    cluster = asked.admin._cluster
    await_answer, waited = cluster.await_answer, []

    def moved(broker_id: int, connection: Any, partition: TopicPartition) -> None:
        waited.append(partition)
        if len(waited) == 1:
            raise NotLeader(broker_id=broker_id, partition=str(partition))
        await_answer(broker_id, connection, partition)

    monkeypatch.setattr(cluster, "await_answer", moved)
    assert asked.find(200) == (1, 300)
    assert len(waited) == 2


def test_a_batch_that_the_log_ends_before_by_now_is_out_of_range_and_no_lack_of_room() -> None:
    """As where a power cut took the end of the log between the two requests."""
    answer = dataport_pb2.FetchedPartition(log_start_offset=2, end_offset=7)
    gone = timestamps._taken(PartitionFetch(WHERE, bytes(16), 7), answer, memoryview(b""))
    assert isinstance(gone, OffsetOutOfRange)
    assert gone.facts == {"offset": 7, "partition": "t-0", "start_offset": 2, "end_offset": 7}
    assert timestamps._taken(PartitionFetch(WHERE, bytes(16), 6), answer, memoryview(b"")) is None


def test_an_append_amid_the_look_at_what_follows_is_no_error(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.append([100, 300, 200])
    asked.admin.delete_records({asked.place(): 2})
    taken = timestamps._taken

    def before_the_append(fetch: Any, answer: Any, data: Any) -> Any:
        if fetch.offset == 3:
            assert not len(data)
            answer.end_offset = 4  # it came after the read, and before the end was asked for
        return taken(fetch, answer, data)

    monkeypatch.setattr(timestamps, "_taken", before_the_append)
    assert asked.find(250) == (None, None)


def test_an_answer_without_a_batch_is_none(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that leaves out what is there would be asked for ever."""
    asked.append([100, 300, 200])
    borrow, borrowed = asked.admin._cluster.borrow_data, []

    def noted(broker_id: int) -> Any:
        borrowed.append(borrow(broker_id))
        return borrowed[-1]

    monkeypatch.setattr(asked.admin._cluster, "borrow_data", noted)
    monkeypatch.setattr(timestamps, "split_body", lambda reply, body: [memoryview(b"")] * len(reply.partitions))
    with pytest.raises(ProtocolError, match="an answer without a batch"):
        asked.find(150)
    assert [connection.fileno() for connection in borrowed] == [-1], "it is closed: more may come on it"
