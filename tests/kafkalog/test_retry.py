"""Pauses between tries, and when there are no more."""

from __future__ import annotations

import math

from kafkalog.client.config import parse_producer
from kafkalog.retry import Backoff, Retry


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(0.05, 0.3)
    assert [backoff.next() for _ in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    backoff.reset()
    assert backoff.pause == backoff.next() == 0.05


def test_the_settings_are_in_milliseconds() -> None:
    backoff = parse_producer({"retry_backoff_ms": 20, "retry_backoff_max_ms": 30}).backoff()
    assert [backoff.next() for _ in range(3)] == [0.02, 0.03, 0.03]


def test_the_time_counts_from_the_first_failure_in_a_row() -> None:
    retry = Retry(Backoff(1.0, 4.0), 10.0)
    assert retry.until == math.inf
    assert retry.failed(100.0) == 1.0
    assert retry.until == 110.0
    retry.succeeded()
    assert retry.until == math.inf
    assert retry.failed(109.5) == 1.0
    assert retry.until == 119.5


def test_the_last_try_is_made_when_the_time_ends() -> None:
    retry = Retry(Backoff(1.0, 4.0), 10.0)
    assert [retry.failed(now) for now in (0.0, 1.0, 3.0, 7.0)] == [1.0, 2.0, 4.0, 3.0]
    assert retry.failed(10.0) is None


def test_a_time_that_began_before_the_first_failure() -> None:
    retry = Retry(Backoff(1.0, 4.0), 10.0, since=-8.0)
    assert retry.failed(1.0) == 1.0
    assert retry.failed(2.0) is None


def test_without_any_time_nothing_is_tried_again() -> None:
    assert Retry(Backoff(1.0, 4.0), 0.0).failed(5.0) is None
