"""Waiting for memory and for acks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from kafkalog.client.config import LONG_MAX
from kafkalog.client.producer import accumulator as module
from kafkalog.client.producer.accumulator import BATCH_COST, Accumulator
from kafkalog.client.producer.queue import Batch, PartitionQueue
from kafkalog.errors import BufferExhausted, Closed, DiskFull
from kafkalog.records import TopicPartition
from kafkalog.retry import Backoff

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("wait_for", ["room", "acks"])
def test_waits_of_any_length_are_taken(wait_for: str) -> None:
    accumulator = Accumulator(1000, LONG_MAX, "here:1", lambda queue: None)
    queue = PartitionQueue(
        TopicPartition("t", 0),
        b"i" * 16,
        idempotent=False,
        window=1,
        delivery_timeout_ms=LONG_MAX,
        backoff=Backoff(1.0, 1.0),
    )
    batch = Batch(queue, 0.0, math.inf)
    batch.charged = accumulator.buffered = 1000
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            with accumulator.lock:
                if wait_for == "room":
                    accumulator.wait_for_room(10)
                else:
                    accumulator.wait_done([batch], 1e300, "a batch")
            ended.append(None)
        except Exception as error:  # for the test's thread
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    poll = threading.Event()
    while not (accumulator._blocked or batch.awaited) and waiting.is_alive():
        poll.wait(0.001)
    with accumulator.lock:
        accumulator.finish([(batch, None)])
    waiting.join(30)
    assert ended == [None]


def batch_of(accumulator: Accumulator, charged: int) -> Batch:
    """A batch that is not acknowledged."""
    queue = PartitionQueue(
        TopicPartition("t", 0),
        b"i" * 16,
        idempotent=False,
        window=1,
        delivery_timeout_ms=1000,
        backoff=Backoff(1.0, 1.0),
    )
    batch = queue.start_batch(0.0, math.inf)
    batch.charged = charged
    with accumulator.lock:
        accumulator.buffered += charged
        accumulator.started(batch)
    return batch


def outcome_of_waiting(accumulator: Accumulator, charge: int, then: Callable[[], object]) -> BaseException | None:
    """What a wait for room comes to when something is done meanwhile, with the lock held."""
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            with accumulator.lock:
                accumulator.wait_for_room(charge)
            ended.append(None)
        except Exception as error:  # for the test's thread
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    poll = threading.Event()
    while not accumulator._blocked and waiting.is_alive():
        poll.wait(0.001)
    with accumulator.lock:
        then()
    waiting.join(5)
    assert not waiting.is_alive(), "nobody woke it"
    return ended[0]


def test_a_wait_for_room_ends_as_soon_as_a_quarter_is_free() -> None:
    accumulator = Accumulator(1000, 60_000, "here:1", lambda queue: None)
    batch_of(accumulator, 700)
    acknowledged = batch_of(accumulator, 300)
    assert outcome_of_waiting(accumulator, 100, lambda: accumulator.finish([(acknowledged, None)])) is None


def test_a_wait_for_room_ends_with_closed() -> None:
    accumulator = Accumulator(1000, 60_000, "here:1", lambda queue: None)
    batch_of(accumulator, 1000)
    assert isinstance(outcome_of_waiting(accumulator, 100, accumulator.close), Closed)


def test_a_callback_does_not_wait_for_room_that_its_own_thread_has_to_make() -> None:
    accumulator = Accumulator(1000, 200, "here:1", lambda queue: None)
    batch_of(accumulator, 1000)
    accumulator.own_threads.add(threading.get_ident())
    with accumulator.lock, pytest.raises(BufferExhausted) as full:
        accumulator.wait_for_room(1)
    assert full.value.facts["waited_ms"] == 0


def test_a_batch_that_is_closed_gives_back_what_was_reserved_for_it_and_not_used() -> None:
    accumulator = Accumulator(100_000, 200, "here:1", lambda queue: None)
    batch = batch_of(accumulator, 50_000)
    batch.size = 100
    with accumulator.lock:
        accumulator.close_batch(batch.queue)
    assert accumulator.buffered == batch.charged == 100 + BATCH_COST


@pytest.mark.parametrize("told", [[0], [0, 1]])
def test_a_failure_of_which_every_records_sender_was_told_is_not_told_again(told: list[int]) -> None:
    accumulator = Accumulator(100_000, 200, "here:1", lambda queue: None)
    batch, error = batch_of(accumulator, 100), DiskFull(directory="/d")
    batch.count = 2
    for index in told:
        batch.add_callback(index, lambda error, metadata: None)
    with accumulator.lock:
        assert accumulator.finish([(batch, error)]) == [batch]
        assert accumulator.failures() == ([batch] if told == [0] else [])
        assert accumulator.take_failure([batch]) == (error if told == [0] else None)
        assert accumulator.failures() == []


def test_who_waits_for_a_batch_and_has_no_record_of_its_own_is_told_and_does_not_count() -> None:
    accumulator = Accumulator(100_000, 200, "here:1", lambda queue: None)
    batch, error = batch_of(accumulator, 100), DiskFull(directory="/d")
    batch.count = 1
    batch.add_callback(-1, lambda error, metadata: None)
    with accumulator.lock:
        assert accumulator.finish([(batch, error)]) == [batch]
        assert accumulator.failures() == [batch]


def test_of_more_failures_than_are_kept_none_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent the kept ones may ask for them later."""
    monkeypatch.setattr(module, "_FAILURES_KEPT", 100)
    accumulator = Accumulator(1 << 20, 200, "here:1", lambda queue: None)
    batches = [batch_of(accumulator, 100) for _ in range(250)]
    with accumulator.lock:
        for number, batch in enumerate(batches):
            batch.count = 1
            accumulator.finish([(batch, DiskFull(directory=f"/{number}"))])
            if 0 < number < 100:
                batch.ask(0)
        assert accumulator.failures() == [batches[0], *batches[100:199]], "those that were asked for made room"
        for batch in batches[:198]:
            batch.ask(0)
        # What a flush tells of its own leaves the one that was not kept, which is perhaps another thread's.
        assert accumulator.take_failure(accumulator.failures()) is batches[198].error
        assert accumulator.take_failure(accumulator.failures()) is batches[199].error
        assert accumulator.take_failure(accumulator.failures()) is None


def test_a_failed_batch_keeps_nothing_of_its_records() -> None:
    accumulator = Accumulator(1 << 20, 200, "here:1", lambda queue: None)
    batch = batch_of(accumulator, 100)
    batch.add_records([b"value"], [b"key"], 7)
    with accumulator.lock:
        accumulator.finish([(batch, DiskFull(directory="/d"))])
    assert (batch.values, batch.keys, batch.timestamps_us) == ([], None, [])


@pytest.mark.parametrize("is_own", [True, False])
def test_a_callback_that_ends_the_program_ends_no_thread_of_the_producer(is_own: bool) -> None:
    accumulator = Accumulator(1 << 20, 200, "here:1", lambda queue: None)
    batch = batch_of(accumulator, 100)
    called = []

    def exits(error: object, metadata: object) -> None:
        called.append(error)
        raise SystemExit(1)

    batch.count = 2
    for index in range(2):
        batch.add_callback(index, exits)
    if is_own:
        accumulator.own_threads.add(threading.get_ident())
    with accumulator.lock:
        accumulator.finish([(batch, DiskFull(directory="/d"))])
    with nullcontext() if is_own else pytest.raises(SystemExit):
        accumulator.call_back([batch])
    assert called == 2 * [batch.error], "all are called"


def test_who_stops_waiting_without_the_outcome_was_not_told_of_it() -> None:
    accumulator = Accumulator(1 << 20, 200, "here:1", lambda queue: None)
    before, after = batch_of(accumulator, 100), batch_of(accumulator, 100)
    with accumulator.lock:
        for batch in (before, after):
            batch.count = 1
            batch.ask(0)
        accumulator.ask_no_more(before, 0)
        for batch in (before, after):
            accumulator.finish([(batch, DiskFull(directory="/d"))])
        assert accumulator.failures() == [before]
        accumulator.ask_no_more(after, 0)
        accumulator.ask_no_more(before, 0)
        assert accumulator.failures() == [before, after]


def test_the_usual_wait_is_that_of_the_last_acks() -> None:
    accumulator = Accumulator(1 << 20, 200, "here:1", lambda queue: None)
    for error in (DiskFull(directory="/d"), None):
        batch = batch_of(accumulator, 100)
        batch.deadline = time.monotonic() + batch.queue.delivery_timeout_ms / 1000 - 64.0
        with accumulator.lock:
            accumulator.finish([(batch, error)])
        assert accumulator.usual_wait == pytest.approx(0.0 if error else 1.0, abs=0.5)


def test_what_failed_after_a_flush_began_is_for_the_next_one() -> None:
    accumulator = Accumulator(100_000, 200, "here:1", lambda queue: None)
    mine, other = batch_of(accumulator, 100), batch_of(accumulator, 100)
    with accumulator.lock:
        for batch in (mine, other):
            batch.count = 1
            accumulator.finish([(batch, DiskFull(directory="/d"))])
        for _ in range(2):  # two threads have waited for it
            assert accumulator.take_failure([mine]) is mine.error
        assert accumulator.failures() == [other]
