"""What a user of the Python client sees of it, as `dir` lists it. A name that is added here is kept for good."""

from __future__ import annotations

import pytest

import kafkalog
from kafkalog import aio
from kafkalog.client.consumer.consumer import MessageStream
from kafkalog.client.producer.delivery import Delivery, ManyDelivery

PUBLIC = {
    "Producer": "close flush look_up_again send send_arrow send_many",
    "Consumer": "arrow_batches assign assignment awaited close commit committed consume failures messages pause paused "
    "poll position resume seek streams subscribe unassign unsubscribe",
    "Admin": "alter_topic cancel_reassignments close commit committed create_topic delete_group delete_records "
    "delete_topic describe_broker describe_brokers describe_cluster describe_controller describe_group "
    "describe_topics extents groups list_offsets reassign reassignments recover_partitions "
    "reset_offsets throttle_reassignments topics unserved upgrade_cluster verify",
    "AtTimestamp": "count from_offset index timestamp_us",
    "KafkalogError": "add_note args code fresh message retriable to_wire with_traceback",
    "Message": "count headers index key leader_epoch offset partition timestamp_us topic topic_id value",
    "Messages": "count index",
    "RecordMetadata": "count index offset partition timestamp_us topic",
    "TopicPartition": "count index partition topic",
}


AIO = {
    "Producer": "close flush send send_and_wait send_arrow send_many",
    "Consumer": "arrow_batches assign assignment close commit committed consume failures pause paused poll position "
    "resume seek subscribe unassign unsubscribe",
    "Delivery": "done",
}


def public_names(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_class_shows_what_is_public_and_nothing_else(name: str) -> None:
    assert public_names(getattr(kafkalog, name)) == PUBLIC[name].split()


def test_every_public_class_is_named_here() -> None:
    assert set(PUBLIC) | {"__version__"} == set(kafkalog.__all__)


@pytest.mark.parametrize("name", AIO)
def test_a_class_for_asyncio_shows_what_is_public_and_nothing_else(name: str) -> None:
    assert public_names(getattr(kafkalog.aio, name)) == AIO[name].split()


def test_every_class_for_asyncio_is_named_here() -> None:
    assert set(AIO) == set(aio.__all__)
    assert "aio" in dir(kafkalog)


def test_what_is_handed_out_shows_what_is_public_and_nothing_else() -> None:
    assert public_names(Delivery) == ["done", "exception", "result"]
    assert public_names(ManyDelivery) == ["done", "exception", "result"]
    assert public_names(MessageStream) == ["messages"]


def test_objects_hide_what_they_keep() -> None:
    producer, consumer, admin = (made("127.0.0.1:1") for made in (kafkalog.Producer, kafkalog.Consumer, kafkalog.Admin))
    for each in (producer, consumer, admin):
        with each:
            assert public_names(each) == PUBLIC[type(each).__name__].split()
