"""What becomes of the requests that are in flight on a connection."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.client import link as links
from kafkalog.client.link import Link
from kafkalog.errors import ProtocolError, TooManyConnections
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire


def make() -> tuple[Link[str], list[str]]:
    """A link, and what is done to its connection."""
    done: list[str] = []
    connection: Any = SimpleNamespace(address="here:1", close=lambda: done.append("closed"))
    return Link(connection), done


def test_answers_come_in_the_order_of_the_requests() -> None:
    link, _ = make()
    for name in ("a", "b"):
        link.began(link.next_id(), name)
    assert link.in_flight == ["a", "b"]
    assert link.request_of(pb.ReplyHeader(correlation_id=1)) == "a"
    assert link.count == 2, "it is in flight until its answer is taken"
    link.answered()
    assert link.request_of(pb.ReplyHeader(correlation_id=2)) == "b"
    link.answered()
    assert link.count == 0


def test_an_answer_that_is_arriving_is_overdue_later() -> None:
    link, _ = make()
    for deadline in (1.0, 2.0):
        link.began(link.next_id(), "a", deadline)
    link.extend(5.0)
    assert link.deadline == 5.0
    assert link.request_of(pb.ReplyHeader(correlation_id=1)) == "a"
    link.answered()
    assert link.deadline == 2.0


def test_an_error_of_a_request_is_raised_to_its_caller() -> None:
    link, _ = make()
    link.began(link.next_id(), "a")
    reply = pb.ReplyHeader(correlation_id=1, error=error_to_wire(TooManyConnections(limit=7)))
    assert link.request_of(reply) == "a"


def test_an_answer_that_nobody_asked_for_is_refused_and_an_error_of_the_connection_rises() -> None:
    link, _ = make()
    with pytest.raises(ProtocolError, match="here:1: an answer to a request that was not made"):
        link.request_of(pb.ReplyHeader(correlation_id=1))
    link.began(link.next_id(), "a")
    link.began(link.next_id(), "b")
    with pytest.raises(ProtocolError):
        link.request_of(pb.ReplyHeader(correlation_id=2))
    with pytest.raises(TooManyConnections):
        link.request_of(pb.ReplyHeader(correlation_id=0, error=error_to_wire(TooManyConnections(limit=7))))
    assert link.in_flight == ["a", "b"]


def test_correlation_ids_are_what_the_wire_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links._CORRELATION_ID_MAX == (1 << 32) - 1
    monkeypatch.setattr(links, "_CORRELATION_ID_MAX", 3)
    link, _ = make()
    assert [link.next_id() for _ in range(5)] == [1, 2, 3, 1, 2]


def test_the_oldest_request_is_overdue_first() -> None:
    link, _ = make()
    assert link.deadline == math.inf
    link.began(link.next_id(), "a", 5.0)
    link.began(link.next_id(), "b", 3.0)
    assert link.deadline == 5.0
    link.answered()
    assert link.deadline == 3.0


def test_a_lost_link_tells_what_was_in_flight_and_is_closed() -> None:
    link, done = make()
    link.began(link.next_id(), "a")
    link.began(link.next_id(), "b")
    assert (link.lose(), done) == (["a", "b"], ["closed"])
    assert (link.in_flight, link.deadline) == ([], math.inf)
    link.began(link.next_id(), "c")
    assert (link.forget(), done) == (["c"], ["closed"])
