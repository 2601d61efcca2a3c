"""Wrong Python types: one sentence each, and nothing is sent."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition, aio
from kafkalog.client import arguments
from kafkalog.errors import InvalidArgument

pytestmark = pytest.mark.timeout(60)
P0 = TopicPartition("t", 0)
Call = Callable[[Any], object]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: c.assign([P0]), "starts is [TopicPartition(topic='t', partition=0)], not a dict by TopicPartition"),
        (lambda c: c.assign({"t": 0}), "'t' is not a partition: give TopicPartition(topic, number)"),
        (lambda c: c.assign({("t", "0"): 0}), "('t', '0') is not a partition: give TopicPartition(topic, number)"),
        (
            lambda c: c.assign({P0: 1.5}),
            "1.5 is not a start in t-0: give 'earliest', 'latest', 'committed', an offset",
        ),
        (lambda c: c.assign(None), "starts is None, not a dict by TopicPartition"),
        (lambda c: c.seek("t-0", 0), "'t-0' is not a partition: give TopicPartition(topic, number)"),
        (lambda c: c.position(0), "0 is not a partition: give TopicPartition(topic, number)"),
        (lambda c: c.commit({P0: "7"}), "the offset of t-0 is '7', not an int"),
        (
            lambda c: c.commit(7),
            "done is a int, not a message, an Arrow batch of this consumer's, or a dict of offsets",
        ),
        (lambda c: c.committed(P0), "partitions is TopicPartition(topic='t', partition=0), not a list of"),
        (lambda c: list(c.messages(max_messages="3")), "max_messages is '3', not an int"),
        (lambda c: list(c.messages(timeout="3")), "timeout is '3', not a number of seconds or None"),
        (lambda c: list(c.arrow_batches(timeout=True)), "timeout is True, not a number of seconds or None"),
        (lambda c: c.commit(P0), "t-0 has no offset to commit: give a dict of offsets by TopicPartition"),
        (lambda c: c.commit([P0]), "t-0 has no offset to commit: give a dict of offsets by TopicPartition"),
        (lambda c: type(c)("127.0.0.1:1", group=5), "group is 5, not a str"),
        (lambda c: type(c)("127.0.0.1:1", group="a b"), "group is 'a b', which is not a name: use 1 to 249 of"),
        (lambda c: type(c)("127.0.0.1:1", group=""), "group is '', which is not a name: use 1 to 249 of"),
    ],
)
def test_a_consumers(cluster: LocalCluster, call: Call, sentence: str) -> None:
    with Consumer(cluster.bootstrap_servers, "g") as consumer:
        assert_told(lambda: call(consumer), sentence)


@pytest.mark.parametrize("client", [Admin, Consumer, Producer, aio.Consumer, aio.Producer])
def test_a_dict_of_settings_as_confluents_client_takes_it_is_shown_as_arguments(client: Call) -> None:
    given = {"bootstrap.servers": "b:1", "group.id": "g", "auto.offset.reset": "earliest", "sasl.password": "secret"}
    arguments = "('b:1', group='g', auto_offset_reset='earliest', sasl_password=...)"
    assert_told(lambda: client(given), f"settings are arguments, not a dict: write {arguments}")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda a: a.create_topic(5), "name is 5, not a str"),
        (lambda a: a.create_topic(b"t"), "name is b't', not a str"),
        (lambda a: a.create_topic("t", partitions="3"), "partitions is '3', not an int"),
        (lambda a: a.create_topic("t", 2.0), "partitions is 2.0, not an int"),
        (
            lambda a: a.create_topic("t", 1, config="retention.ms=1"),
            "config is 'retention.ms=1', not a dict of settings by name",
        ),
        (lambda a: a.create_topic("t", 1, config={5: 1}), "a setting's name in config is 5, not a str"),
        (lambda a: a.alter_topic("t", unset="retention.ms"), "unset is 'retention.ms', not a list of str"),
        (lambda a: a.alter_topic(None), "name is None, not a str"),
        (lambda a: a.delete_topic(["t"]), "name is ['t'], not a str"),
        (lambda a: a.describe_topics("t"), "names is 't', not a list of str"),
        (lambda a: a.describe_topics([1]), "one of names is 1, not a str"),
        (lambda a: a.delete_records({P0: None}), "the offset of t-0 is None, not an int"),
        (lambda a: a.list_offsets([P0]), "wanted is [TopicPartition(topic='t', partition=0)], not a dict by"),
        (lambda a: a.commit("g", {"t": 1}), "'t' is not a partition: give TopicPartition(topic, number)"),
        (lambda a: a.commit(1, {}), "group is 1, not a str"),
        (lambda a: a.committed("g", "t"), "topics is 't', not a list of str"),
        (lambda a: a.reset_offsets("g", ["t"]), "to is ['t'], not a dict by TopicPartition"),
    ],
)
def test_an_admins(cluster: LocalCluster, call: Call, sentence: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        assert_told(lambda: call(admin), sentence)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: p.send(["t"], b"v"), "topic is ['t'], not a str"),
        (lambda p: p.send(5, b"v"), "topic is 5, not a str"),
        (lambda p: p.send_arrow({}, pa.table({"value": [b"v"]})), "topic is {}, not a str"),
        (lambda p: p.flush("soon"), "timeout is 'soon', not a number of seconds or None"),
        (lambda p: p.close("soon"), "timeout is 'soon', not a number of seconds or None"),
    ],
)
def test_a_producers(cluster: LocalCluster, call: Call, sentence: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        assert_told(lambda: call(producer), sentence)


@pytest.mark.parametrize("given", [None, -1, -0.5, math.inf, threading.TIMEOUT_MAX, 1 << 63])
def test_a_timeout_that_means_for_ever(given: float | None) -> None:
    assert arguments.seconds("timeout", given) is None
    assert arguments.seconds("timeout", 0) == 0


def test_a_callback_that_is_none(cluster: LocalCluster, topic: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic)
    with Producer(cluster.bootstrap_servers) as producer:
        wrong: Any = "tell"
        assert_told(lambda: producer.send(topic, b"v", on_delivery=wrong), "on_delivery is 'tell', not a function")
        assert producer.send(topic, b"w").result(30).offset == 0


def assert_told(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        call()
    assert sentence in str(raised.value)
