"""What is checked of a write's target before its first task, called without Spark; through Spark it is in
`test_sink_rules.py`."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kafkalog import Admin
from kafkalog.errors import UnknownTopic
from pyspark_kafkalog.write.options import SinkOptions, parse_sink
from pyspark_kafkalog.write.target import check_target

pytestmark = pytest.mark.timeout(60)


def sink(options: dict[str, str], **more: str) -> SinkOptions:
    """A write's options that give up soon."""
    return parse_sink({**options, "kafkalog.retry.timeout.ms": "100", **more})


@pytest.fixture
def unreachable() -> Iterator[dict[str, str]]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: it refuses
        yield {"kafkalog.bootstrap.servers": f"127.0.0.1:{unused.getsockname()[1]}", "topic": "t"}


def test_a_missing_topic_is_refused_and_accepted_once_it_is_made(
    admin: Admin, options: dict[str, str], topic: str
) -> None:
    with pytest.raises(UnknownTopic, match=topic):
        check_target(sink(options))
    admin.create_topic(topic)
    check_target(sink(options))


def test_topics_in_a_column_are_left_to_the_tasks(options: dict[str, str]) -> None:
    del options["topic"]
    check_target(sink(options))


def test_a_broker_that_does_not_answer_is_left_to_the_tasks(unreachable: dict[str, str]) -> None:
    check_target(sink(unreachable))
