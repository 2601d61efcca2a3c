"""The producer against a real broker: what is sent is there, once and in order, or the caller is told."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Message, Producer, TopicPartition
from kafkalog.client.background import in_background
from kafkalog.client.cluster import Cluster
from kafkalog.client.producer import accumulator as accumulator_module
from kafkalog.client.producer import mutex
from kafkalog.client.producer import producer as module
from kafkalog.client.producer.partitioner import partition_for_key
from kafkalog.client.producer.queue import Batch, PartitionQueue
from kafkalog.client.producer.sender import Sender
from kafkalog.errors import (
    BatchTooLarge,
    BufferExhausted,
    Closed,
    InvalidArgument,
    KafkalogError,
    NotEnoughReplicas,
    OutOfThreads,
    RecordTooLarge,
    ReentrantCall,
    RequestTimedOut,
    UnknownPartition,
    UnknownTopic,
)
from kafkalog.format.columns import HEADERS
from kafkalog.records import RecordMetadata
from tests.interrupts import interrupted_at
from tests.proxy import proxied
from tests.reading import messages_of
from tests.threads import NoThreads, join_all
from tests.waiting import waited_for

pytestmark = pytest.mark.timeout(120)
PARTITIONS = 3


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def made(admin: Admin, topic: str) -> str:
    """A topic of three partitions."""
    admin.create_topic(topic, partitions=PARTITIONS)
    return topic


def read(cluster: LocalCluster, topic: str, count: int) -> dict[int, list[Message]]:
    """All of a topic's messages by partition: exactly `count`."""
    found = messages_of(cluster.bootstrap_servers, topic)
    assert sum(map(len, found.values())) == count
    return found


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


# --- what is sent is there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("batch_records", [1, 7, 1000])
def test_everything_of_a_record_is_read_back(cluster: LocalCluster, made: str, codec: str, batch_records: int) -> None:
    sent = []
    with Producer(cluster.bootstrap_servers, compression_type=codec, batch_records=batch_records) as producer:
        for number in range(500):
            value = None if number % 11 == 0 else b"value %d" % number * (number % 5)
            key = None if number % 3 == 0 else b"key %d" % (number % 4)
            headers = {"h": b"%d" % number, "none": None} if number % 50 == 0 else None
            stamp = 1_600_000_000_000_000 + number * 1000 if number % 2 else None
            delivery = producer.send(made, value, key, timestamp_us=stamp, headers=headers, partition=number % 2)
            sent.append((delivery, value, key, stamp, tuple((headers or {}).items())))
        producer.flush()
    found = read(cluster, made, 500)
    assert not found[2]
    for number, (delivery, value, key, stamp, pairs) in enumerate(sent):
        metadata = delivery.result()
        message = found[number % 2][number // 2]
        assert message[:7] == (made, number % 2, number // 2, metadata.timestamp_us, key, value, pairs)
        assert metadata == RecordMetadata(made, number % 2, number // 2, stamp or metadata.timestamp_us)


def test_clients_import_no_pandas(cluster: LocalCluster, made: str) -> None:
    """It takes 0.15 to 0.5 s, which a producer of a second would spend amid its first records."""
    assert importlib.util.find_spec("pandas") is not None
    code = r"""if True:
        import sys
        import numpy as np
        import pyarrow as pa
        from kafkalog import Consumer, Producer
        from kafkalog.client.consumer import decode
        from kafkalog.format.columns import BINARY, TIMESTAMP, binary_array, integer_array

        values = [b"v"] * 3000
        with Producer(sys.argv[1], batch_records=3000) as producer, Consumer(sys.argv[1]) as consumer:
            for value in [*values, None]:
                producer.send(sys.argv[2], value)
            producer.send(sys.argv[2], b"v", headers=[("h", b"x"), ("n", None)])
            producer.send_many(sys.argv[2], values, keys=[b"k"] * 2999 + [None])
            few = binary_array(BINARY, [b"k", None, b"l"])
            numbers = np.arange(3, dtype=np.int32)
            numbers = pa.Array.from_buffers(pa.int32(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(numbers)])
            times = integer_array(TIMESTAMP, np.arange(3, dtype=np.int64))
            rows = [few.take(integer_array(pa.int64(), np.zeros(300, np.int64) + number)) for number in (0, 1)]
            rows = pa.concat_arrays(rows)  # 300 with a key, 300 without
            producer.send_arrow(sys.argv[2], pa.RecordBatch.from_arrays([rows, rows], names=["key", "value"]))
            names = ["partition", "timestamp", "key", "value"]
            table = pa.RecordBatch.from_arrays([numbers, times, few, few], names=names)
            producer.send_arrow(sys.argv[2], table)
            producer.flush()
            assert "pandas" not in sys.modules
            consumer.assign({(sys.argv[2], number): "earliest" for number in range(3)})
            read = 0
            while read < 6605:
                read += len([message.headers for message in consumer.consume(6605 - read, timeout=60)])
        assert "pandas" not in sys.modules or not decode._FAST_LISTS  # pyarrow before 26 makes no quick lists without
    """
    subprocess.run([sys.executable, "-c", code, cluster.bootstrap_servers, made], check=True, timeout=120)


def test_a_delivery_tells_when_it_is_done_and_does_not_linger_once_asked(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        delivery = producer.send(made, b"x", partition=1)
        assert not delivery.done()
        assert delivery.result(timeout=30).offset == 0
        assert delivery.done()
        assert delivery.exception() is None


def test_a_record_lingers_and_is_then_sent_by_itself(cluster: LocalCluster, made: str) -> None:
    told = threading.Event()
    with Producer(cluster.bootstrap_servers, linger_ms=50) as producer:
        producer.send(made, b"x", on_delivery=lambda error, metadata: told.set())
        assert told.wait(30)


def test_keys_choose_the_partition_and_keep_their_order(cluster: LocalCluster, made: str) -> None:
    keys = [b"", *(b"key %d" % number for number in range(1, 20))]  # an empty key is one
    with Producer(cluster.bootstrap_servers, batch_records=10) as producer:
        for number in range(300):
            producer.send(made, b"%d" % number, keys[number % 20])
    found = read(cluster, made, 300)
    for number, key in enumerate(keys):
        mine = [m.value for m in found[partition_for_key(key, PARTITIONS)] if m.key == key]
        assert mine == [b"%d" % n for n in range(number, 300, 20)]


def test_a_partition_function_decides(cluster: LocalCluster, made: str) -> None:
    def by_first_byte(key: bytes | None, partitions: int) -> int:
        return 0 if key is None else key[0] % partitions

    with Producer(cluster.bootstrap_servers, partitioner=by_first_byte) as producer:
        for number in range(6):
            producer.send(made, b"%d" % number, bytes([number]))
        producer.send(made, b"none")
        producer.send(made, b"given", b"\x00", partition=2)
        producer.send_arrow(made, pa.table({"key": [b"\x01"], "value": [b"table"]}))
    found = read(cluster, made, 9)
    assert values(found[0]) == [b"0", b"3", b"none"]
    assert values(found[1]) == [b"1", b"4", b"table"]
    assert values(found[2]) == [b"2", b"5", b"given"]


def check_turns(found: dict[int, list[Message]]) -> None:
    """Each partition has three batches of ten numbers that follow each other."""
    assert [len(messages) for messages in found.values()] == [30, 30, 30]
    for messages in found.values():
        for start in range(0, 30, 10):
            batch = [int(message.value or b"") for message in messages[start : start + 10]]
            assert batch == list(range(batch[0], batch[0] + 10))


def test_records_for_any_partition_go_in_turn_a_batch_each(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=60_000) as producer:
        for number in range(90):
            producer.send(made, b"%d" % number)
    check_turns(read(cluster, made, 90))


def test_a_batch_is_closed_by_its_size(cluster: LocalCluster, made: str) -> None:
    told: list[int] = []
    first_batch = threading.Event()

    def tell(error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        assert metadata is not None
        told.append(metadata.offset)
        first_batch.set()

    with Producer(cluster.bootstrap_servers, batch_size=10_000, linger_ms=60_000) as producer:
        for _ in range(15):
            producer.send(made, b"x" * 1000, partition=0, on_delivery=tell)
        assert first_batch.wait(30)
        assert max(told) < 10
    assert told == list(range(15))


def test_lists_and_records_keep_the_order_in_which_they_were_sent(cluster: LocalCluster, made: str) -> None:
    numbers = count()

    def some(many: int) -> list[bytes | None]:
        return [b"%d" % next(numbers) for _ in range(many)]

    with Producer(cluster.bootstrap_servers, batch_records=10, batch_size=400, linger_ms=60_000) as producer:
        for many in (1, 3, 10, 25, 2, 0, 40):
            producer.send_many(made, some(many), partition=1)
            producer.send(made, some(1)[0], partition=1)
            producer.send_arrow(made, pa.table({"value": some(2)}), partition=1)
    sent = next(numbers)
    assert values(read(cluster, made, sent)[1]) == [b"%d" % number for number in range(sent)]


def test_a_list_has_one_timestamp_and_its_delivery_says_where_each_run_is(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=4) as producer:
        producer.send(made, b"first", partition=0)
        sent = producer.send_many(made, (b"%d" % number for number in range(9)), partition=0, timestamp_us=7)
        assert sent.result(30) == [(TopicPartition(made, 0), first, many) for first, many in ((1, 3), (4, 4), (8, 2))]
        assert sent.done()
        assert sent.exception() is None
        empty = producer.send_many(made, [])
        assert (empty.done(), empty.result()) == (True, [])
    assert [message.timestamp_us for message in read(cluster, made, 10)[0]][1:] == [7] * 9


@pytest.mark.parametrize("many", [50, 5000])
def test_a_lists_keys_choose_the_partition_and_keep_their_order(cluster: LocalCluster, made: str, many: int) -> None:
    keys = [None if number % 5 == 0 else b"" if number % 5 == 1 else b"%d" % (number % 19) for number in range(many)]
    sent = [None if number % 7 == 0 else b"%d" % number for number in range(many)]
    with Producer(cluster.bootstrap_servers, batch_records=40) as producer:
        producer.send(made, b"", b"", headers={"a": b"1"})  # into a batch with headers too
        producer.send_many(made, sent, keys)
    found = read(cluster, made, many + 1)
    for key in {*keys} - {None}:
        assert key is not None
        mine = [message for message in found[partition_for_key(key, PARTITIONS)] if message.key == key]
        assert values(mine)[key == b"" :] == [value for value, of in zip(sent, keys, strict=True) if of == key]
        assert not any(message.headers for message in mine[key == b"" :])
    unkeyed = [message.value for messages in found.values() for message in messages if message.key is None]
    assert sorted(map(repr, unkeyed)) == sorted(repr(sent[number]) for number in range(0, many, 5))


def test_a_partition_function_decides_for_lists(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, partitioner=lambda key, count: 0 if key is None else key[0]) as producer:
        producer.send_many(made, [b"0", b"1", b"2"], [b"\x02", None, b"\x02"])
        producer.send_many(made, [b"3", b"4"])
        with pytest.raises(InvalidArgument, match="the partitioner returned 3, not a number from 0 to 2"):
            producer.send_many(made, [b"5", b"6"], [b"\x00", b"\x03"])
    found = read(cluster, made, 5)
    assert [values(messages) for messages in found.values()] == [[b"1", b"3", b"4"], [], [b"0", b"2"]]


@pytest.mark.parametrize("a_call", [1, 4, 10, 35, 90])
def test_lists_for_any_partition_go_in_turn_a_batch_each(cluster: LocalCluster, made: str, a_call: int) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=60_000) as producer:
        for start in range(0, 90, a_call):
            producer.send_many(made, [b"%d" % number for number in range(start, min(90, start + a_call))])
    check_turns(read(cluster, made, 90))


def test_a_list_larger_than_a_batch_or_than_the_buffer_is_cut(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, batch_size=10_000, buffer_memory=30_000) as producer:
        runs = producer.send_many(made, [b"x" * 1000] * 100, partition=0).result(30)
        assert [first for _, first, _ in runs] == [
            sum(each for *_, each in runs[:number]) for number in range(len(runs))
        ]
        assert {many for *_, many in runs[:-1]} == {8}, "each batch is filled"
        assert producer._accumulator.buffered == 0
    assert len(read(cluster, made, 100)[0]) == 100


@pytest.mark.parametrize("bad", [b"x" * 10_000, b"x" * 9_900])
def test_of_a_list_with_a_record_that_fits_in_no_message_nothing_is_sent(
    cluster: LocalCluster, admin: Admin, topic: str, bad: bytes
) -> None:
    admin.create_topic(topic, partitions=1, config={"max.message.bytes": 10_000})
    with Producer(cluster.bootstrap_servers) as producer:
        with pytest.raises(RecordTooLarge, match="is larger than its max"):
            producer.send_many(topic, [b"good", bad, b"good"])
        producer.send_many(topic, [b"y" * size for size in range(9000, 9600, 100)], [None, b"k"] * 3).result(30)
    read(cluster, topic, 6)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"values": b"abc"}, "values is bytes, not a list of bytes"),
        ({"values": 5}, "values is int, not a list of bytes"),
        ({"values": ["text"]}, "one of the values is str, not bytes: encode it"),
        ({"values": [b""], "keys": [1]}, "one of the keys is int, not bytes"),
        ({"values": [b"", b""], "keys": [b""]}, "there are 2 values and 1 keys"),
        ({"values": [b""], "timestamp_us": 1.5}, "timestamp_us=1.5 is not a whole number of microseconds"),
        ({"values": [b""], "partition": "0"}, "partition is '0', not a number"),
    ],
)
def test_send_many_refuses_a_wrong_argument(
    cluster: LocalCluster, made: str, arguments: dict[str, Any], sentence: str
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        with pytest.raises(InvalidArgument) as raised:
            producer.send_many(made, **arguments)
        assert sentence in str(raised.value)
        with pytest.raises(UnknownPartition):
            producer.send_many(made, [b""], partition=3)
        buffers: Any = [bytearray(b"fine"), memoryview(b"too")]
        producer.send_many(made, buffers)
    assert sum(map(len, read(cluster, made, 2).values())) == 2
    with pytest.raises(Closed):
        producer.send_many(made, [b""])


def test_tables_arrive_as_they_are(cluster: LocalCluster, made: str) -> None:
    count = 30_000
    table = pa.table(
        {
            "value": [b"%d" % number for number in range(count)],
            "key": pa.array([b"%d" % (number % 100) if number % 2 else None for number in range(count)], pa.binary()),
            "timestamp": pa.array(range(count), pa.timestamp("us", tz="UTC")),
            "headers": [
                [{"key": "n", "value": b"%d" % number}] if number % 1000 == 0 else None for number in range(count)
            ],
        }
    )
    with Producer(cluster.bootstrap_servers) as producer:
        placed = producer.send_arrow(made, table).result(60)
    assert sum(rows for _, _, rows in placed) == count
    assert {partition.topic for partition, _, _ in placed} == {made}
    found = read(cluster, made, count)
    seen = set()
    for partition, messages in found.items():
        last_by_key: dict[bytes | None, int] = {}
        for message in messages:
            number = int(message.value or b"")
            seen.add(number)
            assert message.timestamp_us == number
            assert message.headers == ((("n", b"%d" % number),) if number % 1000 == 0 else ())
            assert message.key == (b"%d" % (number % 100) if number % 2 else None)
            if message.key is not None:
                assert partition == partition_for_key(message.key, PARTITIONS)
                assert last_by_key.get(message.key, -1) < number
                last_by_key[message.key] = number
    assert seen == set(range(count))


def test_a_list_that_waited_for_room_fills_up_the_batch_that_another_has_begun_meanwhile(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=3, linger_ms=60_000) as producer:
        batch_with_room = producer._batch_with_room

        def begun_by_another(*given: Any) -> Batch:
            monkeypatch.setattr(producer, "_batch_with_room", batch_with_room)
            batch = batch_with_room(*given)
            batch.add_records([b"another's"] * 2, None, 1)
            return batch

        monkeypatch.setattr(producer, "_batch_with_room", begun_by_another)
        sent = producer.send_many(made, [b"0", b"1", b"2"], partition=1)
        assert [run.records for run in sent._runs] == [1, 2]
        assert sent._runs[0].batch.queue.open is not sent._runs[0].batch, "it is full, and lingers no longer"
        sent.result(30)
    assert values(read(cluster, made, 5)[1]) == [*[b"another's"] * 2, b"0", b"1", b"2"]


def test_rows_of_many_tables_share_batches_and_each_table_is_told_where_its_rows_are(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    partitions, tables, rows = 20, 60, 40
    admin.create_topic(topic, partitions=partitions)
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        producer.send(topic, b"", partition=0).result(60)  # from here on the tables come faster than they are sent
        sent = [
            [(b"%d" % (number % 7 * rows + row), b"%d" % (number * rows + row)) for row in range(rows)]
            for number in range(tables)
        ]
        deliveries = [
            producer.send_arrow(
                topic, pa.table({"key": [key for key, _ in table], "value": [value for _, value in table]})
            )
            for table in sent
        ]
        placed = [delivery.result(60) for delivery in deliveries]
    found = read(cluster, topic, 1 + tables * rows)
    for table, runs in zip(sent, placed, strict=True):
        told = [each for where, first, size in runs for each in found[where.partition][first : first + size]]
        assert sorted((message.key, message.value) for message in told) == sorted(table)
        for where, first, size in runs:
            values_there = [int(message.value or b"") for message in found[where.partition][first : first + size]]
            assert values_there == sorted(values_there)


def test_tables_and_records_keep_the_order_in_which_they_were_sent(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        for number in range(0, 50, 2):
            producer.send(made, b"%d" % number, partition=1)
            producer.send_arrow(made, pa.table({"value": [b"%d" % (number + 1)]}), partition=1)
    assert values(read(cluster, made, 50)[1]) == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("first", ["record", "keyed rows", "records by key"])
def test_what_rows_of_a_table_do_not_join_lingers_no_longer(cluster: LocalCluster, made: str, first: str) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        delivery: Any
        if first == "keyed rows":
            delivery = producer.send_arrow(made, pa.table({"value": [b"0"], "key": [b"k"]}), partition=1)
        else:
            delivery = producer.send(made, b"0", b"k" if "key" in first else None, partition=1)
        rows = producer.send_arrow(made, pa.table({"value": [b"1"]}), partition=1)
        delivery.result(30)
        assert not rows.done()
    assert values(read(cluster, made, 2)[1]) == [b"0", b"1"]


@pytest.mark.parametrize(("all_wait", "fails"), [(False, False), (True, False), (True, True)])
def test_rows_of_a_partition_that_is_held_up_do_not_keep_their_tables(
    cluster: LocalCluster, admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch, all_wait: bool, fails: bool
) -> None:
    """Each is a slice of the memory of all of its table's rows. If the others wait as long, they keep it anyway."""
    monkeypatch.setattr(module, "_HELD_UP_SECONDS", -1.0)
    monkeypatch.setattr(accumulator_module, "_USUAL_OF", 1 << 40)
    admin.create_topic(topic, partitions=10)
    value = os.urandom(2000)
    numbers = pa.array([row % 10 for row in range(1000)], pa.int32())
    with Producer(cluster.bootstrap_servers, linger_ms=0) as producer:
        producer.send_arrow(topic, pa.table({"value": [b""], "partition": pa.array([0], pa.int32())})).result(30)
        held = producer._routes[topic].queues[0]

        def let_go() -> None:  # else the producer waits for the rows at its end
            with producer._accumulator.lock:
                held.leader_changed()
                producer._has_work(held, 0.0)

        with ExitStack() as ending:
            ending.callback(let_go)
            with producer._accumulator.lock:
                held.hold(NotEnoughReplicas(partition=topic, insync=[], least=1), math.inf)
                held.failing_since = held.failing_since if fails else None
            producer._accumulator.usual_wait = 60.0 if all_wait else 0.0
            before = pa.total_allocated_bytes()
            for _ in range(20):
                sent = producer.send_arrow(topic, pa.table({"value": pa.array([value] * 1000), "partition": numbers}))
                waited_for(lambda runs=sent._runs: all(run.batch.done for run in runs[1:]))  # type: ignore[misc]
            is_copied = fails or not all_wait
            assert (pa.total_allocated_bytes() - before < 3 * 20 * 100 * 2000) is is_copied
    found = read(cluster, topic, 20 * 1000 + 1)
    assert {partition: len(messages) for partition, messages in found.items()} == {
        partition: 2000 + (partition == 0) for partition in range(10)
    }


def test_rows_with_and_without_keys_partitions_and_headers_keep_their_order(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    with Producer(cluster.bootstrap_servers, batch_records=7, linger_ms=60_000) as producer:
        for start in range(0, 300, 30):
            numbers = range(start, start + 20)
            table = pa.table(
                {
                    "value": [b"%d" % number for number in numbers],
                    "key": pa.array([b"k" if number % 3 == 0 else None for number in numbers], pa.binary()),
                    "partition": pa.array([0 if number % 5 == 0 else None for number in numbers], pa.int32()),
                    "headers": pa.array([[("h", b"")] if number % 4 == 0 else None for number in numbers], HEADERS),
                }
            )
            producer.send_arrow(topic, table)
            for number in range(start + 20, start + 30):
                key = b"k" if number % 3 == 0 else None
                partition = 0 if number % 5 == 0 else None
                producer.send(topic, b"%d" % number, key, partition, headers={"h": b""} if number % 4 == 0 else None)
    assert values(read(cluster, topic, 300)[0]) == [b"%d" % number for number in range(300)]


def test_records_for_any_partition_keep_their_order_among_those_that_name_it(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=10, linger_ms=60_000) as producer:
        for number in range(300):
            key = b"key %d" % number if number % 3 == 0 else None
            producer.send(made, b"%d" % number, key, number % PARTITIONS if number % 7 == 0 else None)
    for messages in read(cluster, made, 300).values():
        numbers = [int(message.value or b"") for message in messages]
        assert numbers == sorted(numbers)


def test_producers_of_one_record_each_use_all_partitions(cluster: LocalCluster, made: str) -> None:
    with closing(Cluster(cluster.bootstrap_servers)) as shared:
        for number in range(60):  # none of a given partition: one in 10 thousand millions
            with Producer(shared) as producer:
                if number % 2:
                    producer.send(made, b"%d" % number)
                else:
                    producer.send_arrow(made, pa.table({"value": [b"%d" % number]}))
    assert all(read(cluster, made, 60).values())


def test_small_tables_linger_and_share_a_batch_and_large_ones_go_at_once(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        large = producer.send_arrow(made, pa.table({"value": [b"x" * 1000] * 100}), partition=0)
        waited_for(large.done)
        small = [producer.send_arrow(made, pa.table({"value": [b"%d" % each]}), partition=1) for each in range(10)]
        full = [producer.send_arrow(made, pa.table({"value": [b"x"] * 1000}), partition=2) for _ in range(10)]
        waited_for(lambda: all(each.done() for each in full))  # 10,000 rows are as many as a batch may have
        assert not any(each.done() for each in small)
        following = producer.send(made, b"10", partition=1)
        small += [producer.send_arrow(made, pa.table({"value": [b"%d" % each]}), partition=1) for each in (11, 12)]
        assert small[-1].result(30) == [(TopicPartition(made, 1), 12, 1)]
        assert following.done() and all(each.done() for each in small)
        assert [each.result(0) for each in small[:10]] == [[(TopicPartition(made, 1), each, 1)] for each in range(10)]
        assert producer._accumulator.buffered == 0
    assert values(read(cluster, made, 10_113)[1]) == [b"%d" % number for number in range(13)]


def test_a_list_behind_a_table_is_not_cut_to_the_room_that_the_table_left(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=60_000, batch_size=2000) as producer:
        producer.send_arrow(made, pa.table({"value": [b"x" * 1500]}), partition=0)
        sent = producer.send_many(made, [b"y" * 100] * 5, partition=0)
        assert sent.result(30) == [(TopicPartition(made, 0), 1, 5)]


@pytest.mark.parametrize("linger_ms", [0, 50])
def test_a_small_table_is_sent_by_itself(cluster: LocalCluster, made: str, linger_ms: int) -> None:
    with Producer(cluster.bootstrap_servers, linger_ms=linger_ms) as producer:
        waited_for(producer.send_arrow(made, pa.table({"value": [b"x"]}), partition=0).done)


def test_an_empty_table_is_delivered_at_once(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        assert producer.send_arrow(made, pa.table({"value": pa.array([], pa.binary())})).result(0) == []


def test_many_threads_send_through_one_producer(cluster: LocalCluster, made: str) -> None:
    def send(name: int) -> None:
        for number in range(1000):
            producer.send(made, b"%d %d" % (name, number), partition=name % PARTITIONS)

    with Producer(cluster.bootstrap_servers, batch_records=13) as producer:
        threads = [threading.Thread(target=send, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        join_all(threads, 60)
    found = read(cluster, made, 6000)
    for name in range(6):
        mine = [
            int((v or b"").split()[1]) for v in values(found[name % PARTITIONS]) if (v or b"").startswith(b"%d " % name)
        ]
        assert mine == list(range(1000))


# --- acks ------------------------------------------------------------------------------------------------------------


def test_acks_0_counts_as_delivered_without_an_offset(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, acks=0) as producer:
        assert producer.send(made, b"x", partition=0).result(30).offset == -1
        assert producer.send_arrow(made, pa.table({"value": [b"y"]}), partition=0).result(30) == [
            (TopicPartition(made, 0), -1, 1)
        ]
        producer.send(made, b"z", partition=0)
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(made, 0): "earliest"})
        assert values(list(consumer.messages(3, timeout=30))) == [b"x", b"y", b"z"]


@pytest.mark.parametrize("acks", [1, "1", -1, "-1", "all"])
def test_with_one_replica_its_leader_acknowledges_whatever_acks_are_asked_for(
    cluster: LocalCluster, made: str, acks: int | str
) -> None:
    with Producer(cluster.bootstrap_servers, acks=acks) as producer:
        assert producer.send(made, b"x", partition=0).result(30).offset == 0


def test_without_idempotence_records_arrive_all_the_same(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers, enable_idempotence=False, batch_records=10) as producer:
        for number in range(100):
            producer.send(made, b"%d" % number, partition=0)
    assert values(read(cluster, made, 100)[0]) == [b"%d" % number for number in range(100)]


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_come_in_order_and_their_failures_harm_nobody(cluster: LocalCluster, made: str) -> None:
    told: list[RecordMetadata] = []

    def tell(error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        assert metadata is not None
        assert error is None
        told.append(metadata)
        if metadata.offset % 10 == 0:
            raise ValueError("the user's own mistake")

    with Producer(cluster.bootstrap_servers, batch_records=7) as producer:
        for number in range(100):
            producer.send(made, b"x", partition=0, timestamp_us=number, on_delivery=tell)
    assert told == [RecordMetadata(made, 0, number, number) for number in range(100)]


def test_a_callback_is_given_the_error_first(cluster: LocalCluster, admin: Admin, made: str) -> None:
    told: list[tuple[object, ...]] = []
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        producer.send(made, b"x", partition=1, timestamp_us=7, on_delivery=lambda *given: told.append(given))
        producer.flush()
        delivery = producer.send(made, b"x", partition=1, on_delivery=lambda *given: told.append(given))
        admin.delete_topic(made)
        with pytest.raises(KafkalogError):
            delivery.result(30)
    assert told[0] == (None, RecordMetadata(made, 1, 0, 7))
    [(error, metadata)] = told[1:]
    assert error is delivery.exception()
    assert metadata is None


def test_a_callback_may_send_but_not_wait(cluster: LocalCluster, made: str) -> None:
    errors: list[Exception] = []
    again: list[Any] = []
    told = threading.Event()

    def tell(error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        for wait in (lambda: producer.send(made, b"w").result(), producer.flush, producer.close):
            try:
                wait()
            except InvalidArgument as refused:
                errors.append(refused)
        again.append(producer.send(made, b"again"))
        told.set()

    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(made, b"x", on_delivery=tell)
        assert told.wait(30)
        assert again[0].result(30).offset >= 0
    assert [str(error) for error in errors] == [
        "a delivery cannot be waited for in on_delivery, because that thread receives the acks",
        "a flush cannot be waited for in on_delivery, because that thread receives the acks",
        "close() cannot be called in on_delivery, because it waits for that thread",
    ]


# --- interrupts ------------------------------------------------------------------------------------------------------

OURS = [
    f"client/producer/{name}.py"
    for name in ("mutex", "producer", "queue", "accumulator", "sender", "delivery", "lists")
]


def acting(producer: Producer, topic: str, act: str, number: int, placed: dict[int, Any]) -> Callable[[], object]:
    """Something that a user does, with that number in it, which is even; what it returned is put under it."""

    def tell(error: KafkalogError | None, metadata: RecordMetadata | None) -> None:
        assert error is None
        assert metadata is not None
        assert metadata.timestamp_us == number

    def send(**more: Any) -> None:
        placed[number] = producer.send(topic, b"%d" % number, timestamp_us=number, **more)

    def send_table(number: int = number) -> None:
        table = pa.table({"value": [b"%d" % number], "timestamp": pa.array([number], pa.int64())})
        placed[number] = producer.send_arrow(topic, table)

    def result() -> None:
        placed[number] = producer.send(topic, b"%d" % number, timestamp_us=number)
        placed[number].result(30)

    def send_many() -> None:
        placed[number] = producer.send_many(topic, [b"%d" % number], [b"k"], timestamp_us=number)

    acts = {
        "send": send,
        "send_many": send_many,
        "send with everything": lambda: send(key=b"k", headers={"h": b"1"}, on_delivery=tell),
        "send_arrow": send_table,
        "send_arrow twice": lambda: (send_table(), send_table(number + 1)),
        "flush": lambda: (send(), producer.flush(30)),
        "result": result,
    }
    return acts[act]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hit a generator's end
@pytest.mark.parametrize(
    "act", ["send", "send with everything", "send_many", "send_arrow", "send_arrow twice", "flush", "result"]
)
def test_an_interrupt_anywhere_leaves_the_producer_whole(
    cluster: LocalCluster, admin: Admin, topic: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_send = PartitionQueue.can_send
    is_held = threading.Event()  # nothing is sent: the second table's rows are added to the first one's batch
    monkeypatch.setattr(PartitionQueue, "can_send", lambda queue, now: not is_held.is_set() and can_send(queue, now))
    admin.create_topic(topic, partitions=1)
    placed: dict[int, Any] = {}
    numbers = count(step=2)
    with Producer(cluster.bootstrap_servers, batch_records=3, batch_size=400) as producer:
        for place in count():
            again = 0
            for records_before in range(
                1 if act == "send_arrow twice" else 4
            ):  # in an empty batch, and in one that is full by count or by size
                for _ in range(records_before):
                    number = next(numbers)
                    acting(producer, topic, "send", number, placed)()
                if act == "send_arrow twice":
                    is_held.set()
                again += interrupted_at(place, acting(producer, topic, act, next(numbers), placed), *OURS)
                is_held.clear()
                acting(producer, topic, "send", next(numbers), placed)()
                producer.flush(30)
                assert producer._accumulator.buffered == 0
            if not again:
                break
    assert place > 20
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, 0): "earliest"})
        messages = list(consumer.messages(timeout=1))
    found = [int(message.value or b"") for message in messages]
    assert found == sorted(set(found)), "records are doubled or out of order"
    assert [message.timestamp_us for message in messages] == found
    assert set(placed) <= set(found), "records are lost whose send returned"


def test_an_interrupt_of_the_first_send_to_a_topic_leaves_the_producer_whole(cluster: LocalCluster, made: str) -> None:
    with closing(Cluster(cluster.bootstrap_servers)) as shared:
        shared.topic(made)
        for place in count():
            with Producer(shared) as producer:
                was_interrupted = interrupted_at(place, lambda: producer.send(made, b"x"), *OURS)
                assert producer.send(made, b"y").result(30).offset >= 0
            if not was_interrupted:
                break
    assert place > 50


@pytest.mark.parametrize("handler", ["send", "flush", "close"])
@pytest.mark.parametrize("act", ["send", "flush"])
def test_a_signal_handler_that_calls_the_producer_anywhere_in_a_call_of_it_ends(
    cluster: LocalCluster, admin: Admin, topic: str, act: str, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutex, "_LOOK_SECONDS", 0.001)
    admin.create_topic(topic, partitions=1)
    placed: dict[int, Any] = {}
    numbers = count()
    outcomes: list[str] = []

    def handle(*_: object) -> None:
        try:
            if handler == "send":
                acting(producer, topic, "send", next(numbers), placed)()
            elif handler == "flush":
                producer.flush(30)
            else:
                producer.close(30)
        except ReentrantCall:
            outcomes.append("told")
            raise
        outcomes.append("done")

    def call() -> None:
        try:
            acting(producer, topic, act, next(numbers), placed)()
        except Closed:
            assert handler == "close"

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with closing(Cluster(cluster.bootstrap_servers)) as shared:
            producer = Producer(shared, batch_records=3, batch_size=400)
            for place in count():
                again = 0
                for records_before in range(3):  # in an empty batch, and in one that is full
                    if handler == "close":
                        producer.close(30)
                        producer = Producer(shared, batch_records=3, batch_size=400)
                    for _ in range(records_before):
                        acting(producer, topic, "send", next(numbers), placed)()
                    again += interrupted_at(place, call, *OURS, handler=lambda: signal.raise_signal(signal.SIGUSR1))
                    if producer._accumulator.closed is None:
                        acting(producer, topic, "send", next(numbers), placed)()
                        producer.flush(30)
                    assert producer._accumulator.buffered == 0
                if not again:
                    break
            producer.close(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(outcomes) == {"told", "done"}
    with Consumer(cluster.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition(topic, 0): "earliest"})
        messages = list(consumer.messages(timeout=1))
    found = [int(message.value or b"") for message in messages]
    assert len(found) == len(set(found)), "records are doubled"
    assert [message.timestamp_us for message in messages] == found
    assert set(placed) <= set(found), "records are lost whose send returned"


def test_a_flush_in_a_signal_handler_above_a_close_that_gives_up_ends(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[None] = []
    join = Sender.join

    def flush(*_: object) -> None:
        with pytest.raises(Closed):
            producer.flush()
        failed.append(None)

    def interrupted_join(sender: Sender, timeout: float | None = None) -> None:
        if not failed:
            signal.raise_signal(signal.SIGUSR1)
        join(sender, timeout)

    monkeypatch.setattr(Sender, "join", interrupted_join)
    before = signal.signal(signal.SIGUSR1, flush)
    try:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (slow, proxy):
            producer = Producer(slow)
            producer.send(made, b"first", partition=0).result(30)
            proxy.hold_answers()
            delivery = producer.send(made, b"x", partition=0)
            with pytest.raises(RequestTimedOut):
                producer.close(timeout=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert failed == [None]
    assert isinstance(delivery.exception(30), Closed)


# --- errors, each one sentence ---------------------------------------------------------------------------------------


def test_send_refuses_an_unknown_topic(cluster: LocalCluster, topic: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        with pytest.raises(UnknownTopic, match=f"there is no topic '{topic}'"):
            producer.send(topic, b"x")
        with pytest.raises(UnknownTopic):
            producer.send_arrow(topic, pa.table({"value": [b"x"]}))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"value": "text"}, "value is str, not bytes: encode it, for instance value.encode()"),
        ({"value": 5}, "value is int, not bytes"),
        ({"value": b"", "key": "text"}, "key is str, not bytes: encode it, for instance key.encode()"),
        ({"value": b"", "timestamp_us": 1.5}, "timestamp_us=1.5 is not a whole number of microseconds"),
        ({"value": b"", "timestamp_us": 1 << 63}, "is not a whole number of microseconds"),
        ({"value": b"", "headers": [("a", "text")]}, "header 'a' is str, not bytes: encode it"),
        ({"value": b"", "headers": [(b"a", b"")]}, "a header's name is bytes, not str"),
        ({"value": b"", "headers": [b"abc"]}, "headers are [b'abc'], not (name, bytes) pairs or a mapping"),
        ({"value": b"", "partition": "0"}, "partition is '0', not a number"),
    ],
)
def test_send_refuses_a_wrong_argument(
    cluster: LocalCluster, made: str, arguments: dict[str, Any], sentence: str
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        with pytest.raises(InvalidArgument) as raised:
            producer.send(made, **arguments)
        assert sentence in str(raised.value)
        buffers: Any = bytearray(b"fine"), memoryview(b"too")
        producer.send(made, *buffers)
    assert sum(map(len, read(cluster, made, 1).values())) == 1


def test_a_partition_that_is_not_there_is_reported_by_send(cluster: LocalCluster, made: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        with pytest.raises(UnknownPartition, match="has no partition 3; it has 3"):
            producer.send(made, b"x", partition=3)
        with pytest.raises(UnknownPartition, match="has no partition -1; it has 3"):
            producer.send_arrow(made, pa.table({"value": [b"x"]}), partition=-1)


def test_a_partition_added_since_is_found(cluster: LocalCluster, admin: Admin, made: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(made, b"x", partition=0)
        admin.alter_topic(made, partitions=4)
        assert producer.send(made, b"y", partition=3).result(30).offset == 0


def test_new_partitions_get_their_turn_once_the_topic_is_asked_for_again(
    cluster: LocalCluster, admin: Admin, made: str
) -> None:
    with Producer(cluster.bootstrap_servers, metadata_max_age_ms=1, linger_ms=0) as producer:
        producer.send(made, b"x").result(30)
        admin.alter_topic(made, partitions=5)
        partitions: set[int] = set()
        for _ in range(10_000):
            partitions.add(producer.send(made, b"y").result(30).partition)
            if len(partitions) == 5:
                break
        assert partitions == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_record_that_fits_in_no_message_is_reported_by_send(
    cluster: LocalCluster, admin: Admin, topic: str, codec: str
) -> None:
    admin.create_topic(topic, partitions=1, config={"max.message.bytes": 10_000})
    with Producer(cluster.bootstrap_servers, compression_type=codec) as producer:
        with pytest.raises(
            RecordTooLarge, match=rf"for topic '{topic}' is larger than its max\.message\.bytes of 10000"
        ):
            producer.send(topic, b"x" * 10_000)
        with pytest.raises(RecordTooLarge):
            producer.send_arrow(topic, pa.table({"value": [b"x", b"x" * 10_000]}))
        for size in range(9000, 9600, 100):
            producer.send(topic, b"x" * size).result(30)
            producer.send_arrow(topic, pa.table({"value": [b"x" * size]})).result(30)
        for _ in range(100):
            producer.send(topic, b"y" * 990)
    read(cluster, topic, 112)


def test_the_smallest_limit_takes_small_records(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, config={"max.message.bytes": 1024})
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(50):
            producer.send(topic, b"x" * 100, b"k")
        producer.send_arrow(topic, pa.table({"value": [b"x" * 100] * 50}))
    read(cluster, topic, 100)


def test_records_behind_one_that_the_broker_refuses_for_good_are_delivered(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    with Producer(cluster.bootstrap_servers, batch_records=1) as producer:
        producer.send(topic, b"first").result(30)
        admin.alter_topic(topic, set={"max.message.bytes": 2000})
        refused = producer.send(topic, b"x" * 5000)
        behind = [producer.send(topic, b"%d" % number) for number in range(10)]
        with pytest.raises(BatchTooLarge, match=rf"for {topic}-0 is larger than its max\.message\.bytes of 2000"):
            refused.result(30)
        for delivery in behind:
            delivery.result(30)
        with pytest.raises(RecordTooLarge):
            producer.send(topic, b"x" * 5000)  # it has learned
    assert values(read(cluster, topic, 11)[0]) == [b"first", *(b"%d" % number for number in range(10))]


def test_flush_raises_an_error_that_was_not_reported(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(topic, b"first").result(30)
        admin.alter_topic(topic, set={"max.message.bytes": 2000})
        producer.send(topic, b"x" * 5000)
        with pytest.raises(BatchTooLarge):
            producer.flush()
        producer.flush()
        admin.alter_topic(topic, set={"max.message.bytes": 1500})
        errors: list[KafkalogError | None] = []
        producer.send(topic, b"x" * 1700, on_delivery=lambda error, metadata: errors.append(error))
        producer.flush()
        assert [type(error) for error in errors] == [BatchTooLarge]


def test_a_closed_producer_says_so(cluster: LocalCluster, made: str) -> None:
    producer = Producer(cluster.bootstrap_servers)
    delivery = producer.send(made, b"x")
    producer.close()
    producer.close()
    assert delivery.result().offset == 0
    for send in (lambda: producer.send(made, b"x"), lambda: producer.send_arrow(made, pa.table({"value": [b"x"]}))):
        with pytest.raises(Closed, match="this producer is closed"):
            send()


def test_a_thread_that_gets_the_number_of_an_ended_sender_may_close(cluster: LocalCluster, made: str) -> None:
    producer = Producer(cluster.bootstrap_servers)
    producer.send(made, b"x").result()
    assert producer._accumulator.own_threads
    producer.close()
    assert producer._accumulator.own_threads == set()
    again = in_background(producer.close)  # the system gives it such a number more often than not
    assert again.result(30) is None


# --- topics that go --------------------------------------------------------------------------------------------------


def learn_of_topics(producer: Producer) -> None:
    """As a sender does after it asked for the topics."""
    with producer._lock:
        called = producer._accumulator.finish(producer._take_in_topics())
    producer._accumulator.call_back(called)


@pytest.mark.parametrize("kind", ["record", "table"])
def test_a_send_that_races_with_its_topics_deletion_is_reported(
    cluster: LocalCluster, admin: Admin, made: str, kind: str
) -> None:
    def delete(key: bytes | None, partitions: int) -> int:  # called with the topic's route in hand
        admin.delete_topic(made)
        producer._cluster.refresh([made])
        learn_of_topics(producer)
        return 0

    def send() -> None:
        if kind == "record":
            producer.send(made, b"y")
        else:
            producer.send_arrow(made, pa.table({"value": [b"y"]}))

    with Producer(cluster.bootstrap_servers, partitioner=delete) as producer:
        producer.send(made, b"x", partition=0).result(30)
        with pytest.raises(UnknownTopic, match=f"there is no topic '{made}'"):
            send()
        assert not producer._accumulator.unfinished(), "it is in a queue that nobody looks after"


def test_a_topic_that_goes_and_comes_back_while_a_new_partition_is_looked_up(
    cluster: LocalCluster, admin: Admin, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(made, b"x", partition=0).result(30)
        admin.alter_topic(made, partitions=4)
        describe = producer._cluster.describe_topics

        def describe_and_forget(names: list[str]) -> Any:
            found = describe(names)
            producer._cluster.forget(made)
            learn_of_topics(producer)
            return found

        monkeypatch.setattr(producer._cluster, "describe_topics", describe_and_forget)
        assert producer.send(made, b"y", partition=3).result(30).offset == 0


def test_what_was_for_a_partition_that_a_topic_created_again_lacks_is_reported(
    cluster: LocalCluster, admin: Admin, made: str
) -> None:
    told: list[KafkalogError | None] = []
    with Producer(cluster.bootstrap_servers, linger_ms=60_000) as producer:
        lost = producer.send(made, b"x", partition=2, on_delivery=lambda error, metadata: told.append(error))
        admin.delete_topic(made)
        admin.create_topic(made, partitions=1)
        with pytest.raises(UnknownPartition, match="has no partition 3; it has 1"):
            producer.send(made, b"y", partition=3)
        assert isinstance(lost.exception(30), UnknownPartition)
        assert told == [lost.exception()]


def test_a_close_that_does_not_wait_fails_all_that_is_not_acknowledged(cluster: LocalCluster, made: str) -> None:
    told: list[KafkalogError | None] = []
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (slow, proxy):
        producer = Producer(slow)
        producer.send(made, b"first", partition=0).result(30)
        proxy.hold_answers()
        delivery = producer.send(made, b"x", partition=0, on_delivery=lambda error, metadata: told.append(error))
        del producer._routes[made]
        with pytest.raises(RequestTimedOut):
            producer.close(timeout=0)
    assert isinstance(delivery.exception(30), Closed)
    assert told == [delivery.exception()]
    assert producer._accumulator.buffered == 0


# --- on a machine without a thread left -------------------------------------------------------------------------------


def test_a_send_that_finds_no_thread_for_its_link_is_reported_and_the_next_one_starts_it(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NoThreads(monkeypatch, lambda name: name.startswith("producer-"))
    with Producer(cluster.bootstrap_servers) as producer:
        for _ in range(2):
            with pytest.raises(OutOfThreads, match="this process cannot start a thread now"):
                producer.send(made, b"refused", partition=0)
        machine.on = False
        producer.send(made, b"x", partition=0)
        producer.flush(30)
    assert values(read(cluster, made, 1)[0]) == [b"x"]


def test_partitions_stay_with_their_leader_until_the_sender_to_the_next_one_has_a_thread(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        producer.send(made, b"x", partition=0).result(30)
        info = producer._cluster.topic(made)
        elsewhere = [each._replace(leader=77) for each in info.partitions]
        producer._cluster.remember(info._replace(partitions=tuple(elsewhere)))
        machine = NoThreads(monkeypatch, lambda name: name == "producer-77")
        before = {queue.leader for queue in producer._routes[made].queues}
        assert producer._lock.run(producer._take_in_topics) == []
        assert {queue.leader for queue in producer._routes[made].queues} == before
        producer.send(made, b"y", partition=0).result(30)
        machine.on = False
        assert producer._lock.run(producer._take_in_topics) == []
        assert {queue.leader for queue in producer._routes[made].queues} == {77}
        assert producer._senders[77]._thread.is_alive()
        producer._cluster.remember(info)
        producer._lock.run(producer._take_in_topics)
    assert machine.refused


# --- closing ---------------------------------------------------------------------------------------------------------


def test_a_sender_that_a_send_makes_while_the_producer_closes_leaves_no_thread(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(cluster.bootstrap_servers)
    topic = producer._cluster.topic

    def close_meanwhile(name: str) -> Any:
        found = topic(name)
        producer.close()
        return found

    monkeypatch.setattr(producer._cluster, "topic", close_meanwhile)
    with pytest.raises(Closed):
        producer.send(made, b"x")
    assert not [sender for sender in producer._senders.values() if sender._thread.is_alive()]


def test_a_close_with_a_timeout_does_not_wait_for_a_link_that_asks_the_cluster(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, answers = threading.Event(), threading.Event()

    def refresh(names: list[str], *, patient: bool = True) -> None:
        asks.set()
        answers.wait(10)

    with closing(Cluster(cluster.bootstrap_servers, metadata_max_age_ms=1)) as shared:
        monkeypatch.setattr(shared, "refresh", refresh)
        producer = Producer(shared)
        delivery = producer.send(made, b"x", partition=0)
        assert asks.wait(30)
        [sender] = producer._senders.values()
        with pytest.raises(RequestTimedOut):
            producer.close(timeout=0)
        assert sender._thread.is_alive()
        assert isinstance(delivery.exception(0), Closed)
        answers.set()
        sender.join(30)
        assert not sender._thread.is_alive()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_small_buffer_slows_send_down_and_loses_nothing(cluster: LocalCluster, made: str) -> None:
    largest = 0
    with Producer(cluster.bootstrap_servers, buffer_memory=50_000) as producer:
        for number in range(3000):
            producer.send(made, b"%05d" % number * 50, partition=0)
            largest = max(largest, producer._accumulator.buffered)
        producer.send(made, b"x" * 200_000, partition=0)  # larger than the buffer: alone, then
        producer.send_arrow(made, pa.table({"value": [b"y" * 1000] * 200}), partition=0)
    assert largest <= 50_000
    assert producer._accumulator.buffered == 0
    found = values(read(cluster, made, 3201)[0])
    assert found[:3000] == [b"%05d" % number * 50 for number in range(3000)]


def test_a_full_buffer_is_reported_after_max_block_ms(cluster: LocalCluster, made: str) -> None:
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (slow, proxy),
        Producer(slow, buffer_memory=20_000, max_block_ms=200) as producer,
    ):
        producer.send(made, b"first", partition=0).result(30)
        proxy.hold_answers()

        def fill() -> None:
            for _ in range(1000):
                producer.send(made, b"x" * 1000, partition=0)

        with pytest.raises(BufferExhausted, match=r"buffer\.memory \(20000 bytes\) was full for 200 ms"):
            fill()
        proxy.cut()
        producer.flush(30)
        producer.send(made, b"last", partition=0)


def test_closing_from_another_thread_ends_a_send_that_waits(cluster: LocalCluster, made: str) -> None:
    ended: list[BaseException] = []
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (slow, proxy):
        producer = Producer(slow, buffer_memory=20_000)
        producer.send(made, b"first", partition=0).result(30)
        proxy.hold_answers()
        last: list[Any] = []

        def send() -> None:
            try:
                while True:
                    last[:] = [producer.send(made, b"x" * 1000, partition=0)]
            except KafkalogError as error:
                ended.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        while not producer._accumulator._blocked:
            threading.Event().wait(0.001)
        with pytest.raises(RequestTimedOut, match=r"a flush at .* did not finish within 100 ms"):
            producer.close(timeout=0.1)
        sender.join(30)
        assert [str(error) for error in ended] == ["this producer is closed"]
        with pytest.raises(Closed):
            last[0].result(30)


def test_a_flush_that_takes_too_long_is_reported(cluster: LocalCluster, made: str) -> None:
    with (
        proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (slow, proxy),
        Producer(slow) as producer,
    ):
        producer.send(made, b"first").result(30)
        proxy.hold_answers()
        delivery = producer.send(made, b"x")
        with pytest.raises(RequestTimedOut):
            producer.flush(timeout=0.05)
        with pytest.raises(RequestTimedOut):
            delivery.result(timeout=0.05)
        proxy.cut()
        assert delivery.result(30).offset >= 0


def test_what_lingers_in_a_producer_that_nobody_closed_is_sent_at_exit(
    cluster: LocalCluster, admin: Admin, made: str
) -> None:
    program = f"""
from kafkalog import Producer
producer = Producer({cluster.bootstrap_servers!r}, linger_ms=60_000)
for number in range(100):
    producer.send({made!r}, b"%d" % number, partition=0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    where = TopicPartition(made, 0)
    assert admin.list_offsets({where: "latest"})[where].offset == 100
