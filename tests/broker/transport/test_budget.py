"""The shared memory budget."""

from __future__ import annotations

from broker.transport.budget import Budget


def nobody() -> None:
    raise AssertionError("woken without a reason")


def test_bytes_are_granted_at_once_while_there_are_some() -> None:
    budget = Budget(100)
    one = budget.reserve(60, nobody)
    assert one.granted
    assert budget.used == 60
    assert budget.try_reserve(41, nobody) is None
    other = budget.try_reserve(40, nobody)
    assert other is not None
    assert budget.used == 100
    one.release()
    other.release()
    assert budget.used == 0


def test_waiters_are_granted_in_the_order_of_asking_and_a_small_one_does_not_overtake() -> None:
    budget = Budget(100)
    woken: list[str] = []
    held = budget.reserve(90, lambda: woken.append("held"))
    large = budget.reserve(80, lambda: woken.append("large"))
    small = budget.reserve(5, lambda: woken.append("small"))
    assert woken == ["held", "held"]  # whoever holds bytes is asked for them, once for each that waits
    assert not large.granted
    assert not small.granted
    assert budget.is_wanted
    assert budget.try_reserve(1, nobody) is None  # there are 10, but others were first
    held.release()
    assert large.granted
    assert small.granted
    assert woken[2:] == ["large", "small"]
    assert not budget.is_wanted
    assert budget.used == 85


def test_one_who_gives_up_waiting_lets_the_next_in() -> None:
    budget = Budget(100)
    held = budget.reserve(60, lambda: None)
    large = budget.reserve(80, nobody)
    woken: list[str] = []
    small = budget.reserve(30, lambda: woken.append("small"))
    large.release()
    assert small.granted
    assert woken == ["small"]
    for reservation in (held, small):
        reservation.release()
        reservation.release()  # again: nothing is given back twice
    assert budget.used == 0
