"""How long the pieces of copies wait for each other."""

from __future__ import annotations

import pytest

from broker.replica.throttle import Throttle

A, B = (b"t" * 16, 0), (b"t" * 16, 1)


def test_copies_share_the_rate_and_one_without_a_rate_never_waits() -> None:
    throttle = Throttle()
    assert throttle.set_rate(A, 100)
    assert throttle.set_rate(B, 100)
    assert not throttle.set_rate(B, 100)
    assert throttle.pause(A, 50, 1000.0) == 0.5
    assert throttle.pause(B, 50, 1000.0) == 1.0
    assert throttle.pause((b"u" * 16, 0), 1 << 30, 1000.0) == 0.0
    assert throttle.pause(A, 50, 1000.5) == 1.0
    assert throttle.pause(A, 50, 2000.0) == 0.5, "time that was not used is not saved up"


def test_over_a_long_time_the_rate_is_held_by_any_number_of_copies() -> None:
    throttle = Throttle()
    due = {(b"t" * 16, number): 0.0 for number in range(7)}
    for key in due:
        throttle.set_rate(key, 1000)
    copied = 0
    while True:
        key, now = min(due.items(), key=lambda each: each[1])
        if now > 60:
            break
        copied += 20 + key[1]
        due[key] = now + throttle.pause(key, 20 + key[1], now)
    assert copied == pytest.approx(60_000, rel=0.01)


def test_a_new_rate_counts_for_what_is_owed_already() -> None:
    throttle = Throttle()
    throttle.set_rate(A, 1)
    assert throttle.pause(A, 1000, 0.0) == 1000.0
    assert throttle.set_rate(A, 1000)
    assert throttle.pause(A, 100, 1.0) == pytest.approx(1.099)
    throttle.set_rate(A, 0)
    assert throttle.pause(A, 100, 1.0) == 0.0
