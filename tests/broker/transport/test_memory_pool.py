"""The shared memory pool."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from broker.transport.memory_pool import MemoryPool, Reservation


def nobody() -> None:
    raise AssertionError("woken without a reason")


def test_bytes_are_granted_at_once_while_there_are_some() -> None:
    pool = MemoryPool(100)
    one = pool.reserve(60, nobody)
    assert one.granted
    assert pool.used == 60
    assert pool.try_reserve(41, nobody) is None
    other = pool.try_reserve(40, nobody)
    assert other is not None
    assert pool.used == 100
    one.release()
    other.release()
    assert pool.used == 0


def test_waiters_are_granted_in_the_order_of_asking_and_a_small_one_does_not_overtake() -> None:
    pool = MemoryPool(100)
    woken: list[str] = []
    held = pool.reserve(90, lambda: woken.append("held"))
    large = pool.reserve(80, lambda: woken.append("large"))
    small = pool.reserve(5, lambda: woken.append("small"))
    assert woken == ["held", "held"]  # whoever holds bytes is asked for them, once for each that waits
    assert not large.granted
    assert not small.granted
    assert pool.is_wanted
    assert pool.try_reserve(1, nobody) is None  # there are 10, but others were first
    held.release()
    assert large.granted
    assert small.granted
    assert woken[2:] == ["large", "small"]
    assert not pool.is_wanted
    assert pool.used == 85


def test_a_waiter_that_gives_up_lets_the_next_one_in() -> None:
    pool = MemoryPool(100)
    held = pool.reserve(60, lambda: None)
    large = pool.reserve(80, nobody)
    woken: list[str] = []
    small = pool.reserve(30, lambda: woken.append("small"))
    large.release()
    assert small.granted
    assert woken == ["small"]
    for reservation in (held, small):
        reservation.release()
        reservation.release()  # again: nothing is given back twice
    assert pool.used == 0


# --- bodies that take their memory step by step --------------------------------------------------------------------


def test_a_body_that_was_announced_holds_nothing_until_it_grows() -> None:
    pool = MemoryPool(100)
    silent = [pool.reservation(100, nobody) for _ in range(3)]
    assert pool.used == 0
    assert silent[0].grow(1)
    assert silent[0].held == pool.used == 1


def test_a_step_that_would_let_two_half_bodies_wait_for_each_other_is_not_granted() -> None:
    pool = MemoryPool(100)
    woken: list[str] = []
    one = pool.reservation(80, lambda: woken.append("one"))
    other = pool.reservation(60, lambda: woken.append("other"))
    assert one.grow(40)
    assert not other.grow(41)  # 19 would be free, and one of them lacks 40, the other 19
    other.release()
    assert other.grow(20)  # 40 are left for what the first lacks
    assert not other.grow(1)
    assert one.grow(40)  # it is the older one: what is free is its
    assert one.granted
    assert other.held == 20
    one.release()
    assert other.held == 21
    assert woken.count("other") == 2  # asked for what it held, and granted


def test_unfinished_bodies_come_before_new_ones() -> None:
    pool = MemoryPool(100)
    done = pool.reserve(50, lambda: None)
    half = pool.reservation(40, lambda: None)
    assert half.grow(10)
    new = pool.reservation(60, lambda: None)
    assert not new.grow(5)
    assert pool.first_waiting is new
    assert half.grow(30)
    half.release()
    held = [new.held]  # it may need 60, and 50 are free
    done.release()
    assert [*held, new.held] == [0, 5]


def test_one_that_was_cut_off_half_way_counts_no_more() -> None:
    pool = MemoryPool(100)
    half = pool.reservation(90, nobody)
    assert half.grow(10)
    half.release()
    new = pool.reservation(60, lambda: None)
    assert new.grow(30)  # although 90 would not be free then
    assert new.grow(30)
    waiting = pool.reserve(50, lambda: None)  # who holds bytes is asked for them, and nobody else
    assert not waiting.granted
    new.release()
    assert waiting.granted


@dataclasses.dataclass
class Body:
    """A body on its way: `arrived` bytes wait in the socket or are held."""

    share: Reservation
    arrived: int = 0

    def ask(self) -> None:
        if not self.share.asked and self.arrived > self.share.held:
            self.share.grow(self.arrived - self.share.held)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 60)), max_size=80),
)
def test_bodies_that_fill_the_pool_all_come_through_whatever_order_they_arrive_in(
    sizes: list[int], events: list[tuple[int, int]]
) -> None:
    pool = MemoryPool(100)
    bodies = [Body(pool.reservation(size, lambda: None)) for size in sizes]
    for number, count in events:  # 0: it is cut off, and sent again later
        body = bodies[number % len(bodies)]
        if count:
            body.arrived = min(body.arrived + count, body.share.size)
            body.ask()
        else:
            body.share.release()
            body.arrived = 0
        assert pool.used == sum(body.share.held for body in bodies) <= pool.limit
    rounds = 0
    while bodies:
        rounds += 1
        assert rounds <= 20 * len(sizes), [(body.share.size, body.share.held, body.share.asked) for body in bodies]
        for body in list(bodies):
            if body.share.granted:
                body.share.release()  # it was whole, and is written
                bodies.remove(body)
            else:
                body.arrived = body.share.size
                body.ask()
        assert pool.used <= pool.limit
    assert pool.used == 0
    assert not pool.is_wanted
