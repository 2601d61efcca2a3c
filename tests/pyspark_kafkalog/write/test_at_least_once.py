"""A task's rows written straight into the log, called without Spark; through the sink it is in `test_sink.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from kafkalog import Admin, Message, TopicPartition
from kafkalog.errors import BatchTooLarge, KafkalogError
from pyspark_kafkalog.write import at_least_once
from pyspark_kafkalog.write.at_least_once import write_rows
from pyspark_kafkalog.write.options import SinkOptions, parse_sink

pytestmark = pytest.mark.timeout(60)
MessagesIn = Callable[[str], list[Message]]


@pytest.fixture
def sink(admin: Admin, options: dict[str, str], topic: str) -> SinkOptions:
    admin.create_topic(topic, partitions=1)
    return parse_sink({**options, "delivery": "at-least-once"})


def rows(*values: bytes, **more: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary()), **more})


def test_rows_of_several_batches_keep_their_order_and_the_producer_is_kept(
    sink: SinkOptions, kept: dict[Any, Any], topic: str, messages_in: MessagesIn
) -> None:
    write_rows(iter([rows(b"0", b"1"), rows(b"2"), rows(b"3", b"4")]), sink, ("value",))
    [producer] = kept.values()
    write_rows(iter([rows(b"5")]), sink, ("value",))
    assert list(kept.values()) == [producer]
    assert [message.value for message in messages_in(topic)] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_the_next_task_finds_a_topic_that_was_created_again_by_one_call(
    admin: Admin, sink: SinkOptions, kept: dict[Any, Any], topic: str, messages_in: MessagesIn,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_rows(iter([rows(b"old")]), sink, ("value",))
    [producer] = kept.values()
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1)
    call, called = producer._cluster.call, []

    def counted(method: str, *given: Any, **more: Any) -> Any:
        called.append(method)
        return call(method, *given, **more)

    monkeypatch.setattr(producer._cluster, "call", counted)
    write_rows(iter([rows(b"0"), rows(b"1")]), sink, ("value",))
    assert [message.value for message in messages_in(topic)] == [b"0", b"1"]
    assert called == ["DescribeTopics"]
    assert caplog.messages == []


def test_rows_go_to_the_topics_that_they_name(
    admin: Admin, options: dict[str, str], new_topic: Callable[[], str], kept: dict[Any, Any], messages_in: MessagesIn
) -> None:
    one, other = new_topic(), new_topic()
    for name in (one, other):
        admin.create_topic(name, partitions=1)
    sink = parse_sink(
        {"kafkalog.bootstrap.servers": options["kafkalog.bootstrap.servers"], "delivery": "at-least-once"}
    )
    topics = pa.array([one, other, one])
    write_rows(iter([rows(b"0", b"1", b"2", topic=topics)]), sink, ("value", "topic"))
    assert [message.value for message in messages_in(one)] == [b"0", b"2"]
    assert [message.value for message in messages_in(other)] == [b"1"]


def test_settings_of_its_own_make_a_producer_of_its_own(
    sink: SinkOptions, options: dict[str, str], kept: dict[Any, Any]
) -> None:
    other = parse_sink({**options, "delivery": "at-least-once", "kafkalog.linger.ms": "7"})
    for each in (sink, other, sink):
        write_rows(iter([rows(b"v")]), each, ("value",))
    first, second = kept.values()
    assert first is not second


@pytest.mark.parametrize("comes", ["while rows come", "at the end"])
def test_a_row_that_fails_fails_the_task_however_late_it_is_told(
    admin: Admin, sink: SinkOptions, kept: dict[Any, Any], topic: str, comes: str
) -> None:
    write_rows(iter([rows(b"v")]), sink, ("value",))  # so that the client knows the topic, and its limit as it is now
    [producer] = kept.values()
    end = admin.list_offsets({TopicPartition(topic, 0): "latest"})

    def batches() -> Iterator[pa.RecordBatch]:
        admin.alter_topic(topic, {"max.message.bytes": 10_000})
        yield rows(b"x" * 20_000)
        if comes == "while rows come":
            with pytest.raises(BatchTooLarge):
                producer.flush()
            yield rows(b"after")
            raise AssertionError("nothing more is asked for after a failure")

    with pytest.raises(BatchTooLarge, match=topic):
        write_rows(batches(), sink, ("value",))
    assert kept == {}
    with pytest.raises(KafkalogError):
        producer.send(topic, b"later")
    if comes == "at the end":
        assert admin.list_offsets({TopicPartition(topic, 0): "latest"}) == end


@pytest.mark.parametrize("ends", [EOFError, KeyboardInterrupt])
def test_a_task_that_ends_amid_its_rows_leaves_no_producer_to_the_next(
    sink: SinkOptions, options: dict[str, str], kept: dict[Any, Any], ends: type[BaseException], topic: str,
    messages_in: MessagesIn,
) -> None:  # fmt: skip
    lingering = parse_sink({**options, "delivery": "at-least-once", "kafkalog.linger.ms": "60000"})
    write_rows(iter([rows(b"0")]), lingering, ("value",))
    [producer] = kept.values()

    def batches() -> Iterator[pa.RecordBatch]:
        assert kept == {}, "it is this task's alone meanwhile"
        yield rows()
        raise ends

    with pytest.raises(ends):
        write_rows(batches(), lingering, ("value",))
    assert kept == {}
    with pytest.raises(KafkalogError):
        producer.send(topic, b"later")
    write_rows(iter([rows(b"1")]), lingering, ("value",))
    assert [message.value for message in messages_in(topic)] == [b"0", b"1"]


def test_a_producer_is_as_patient_at_first_as_later(options: dict[str, str]) -> None:
    sink = parse_sink({**options, "kafkalog.retry.timeout.ms": "700", "delivery": "at-least-once"})
    with at_least_once.new_producer(sink) as producer:
        assert producer._cluster.settings.bootstrap_timeout_ms == 700
