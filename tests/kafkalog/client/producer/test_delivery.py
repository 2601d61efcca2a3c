"""What a handle says of what was sent, and how long it waits: over batches that the test acknowledges."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest

from kafkalog.client.producer.accumulator import Accumulator
from kafkalog.client.producer.delivery import Delivery, ManyDelivery, Run
from kafkalog.client.producer.queue import Batch, PartitionQueue
from kafkalog.errors import DiskFull, InvalidArgument, KafkalogError, RequestTimedOut
from kafkalog.records import RecordMetadata, TopicPartition
from kafkalog.retry import Backoff

pytestmark = pytest.mark.timeout(60)

FAILED, FAILED_TOO = DiskFull(directory="/a"), DiskFull(directory="/b")


class Sending:
    """Batches of a producer, one a partition, and what was hurried."""

    def __init__(self) -> None:
        self.hurried: list[int] = []
        self.accumulator = Accumulator(1 << 20, 60_000, "here:1", self._hurry)
        self._queues: list[PartitionQueue] = []

    def _hurry(self, queue: PartitionQueue) -> None:
        assert self.accumulator.lock._is_owned()
        self.hurried.append(queue.topic_partition.partition)

    def batch(self, *times: int, is_open: bool = False) -> Batch:
        queue = PartitionQueue(
            TopicPartition("t", len(self._queues)),
            b"i" * 16,
            idempotent=False,
            window=1,
            delivery_timeout_ms=1000,
            backoff=Backoff(1.0, 1.0),
            accumulator=self.accumulator,
        )
        self._queues.append(queue)
        batch = queue.start_batch(math.inf, math.inf)
        batch.timestamps_us = list(times)
        batch.values = [b"v"] * len(times)
        if not is_open:
            queue.close_batch()
        return batch

    def finish(self, batch: Batch, base_offset: int = -1, error: KafkalogError | None = None) -> None:
        with self.accumulator.lock:
            batch.base_offset = base_offset
            self.accumulator.finish([(batch, error)])


def delivery_of(batch: Batch, index: int) -> Delivery:
    delivery = Delivery()
    delivery._batch, delivery._index = batch, index
    return delivery


def of_batches(batches: Sequence[Batch]) -> ManyDelivery:
    return ManyDelivery([Run(batch, 0, batch.count or len(batch.values)) for batch in batches])


def waited_for(wait: Callable[[], object], batches: Sequence[Batch], then: Callable[[], None]) -> object:
    """What a wait comes to when, once it waits for one of the batches, something is done."""
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.append(wait()), daemon=True)
    waiting.start()
    poll = threading.Event()
    while not any(batch.awaited for batch in batches):
        assert waiting.is_alive()
        poll.wait(0.001)
    then()
    waiting.join(30)
    assert not waiting.is_alive(), "nobody woke it"
    return results[0]


def test_each_record_gets_its_own_place() -> None:
    sending = Sending()
    batch = sending.batch(7, 8, 9)
    delivery = delivery_of(batch, 2)
    assert not delivery.done()
    sending.finish(batch, 40)
    assert delivery.done()
    assert delivery.result() == RecordMetadata("t", 0, 42, 9)
    assert delivery.exception() is None
    assert sending.hurried == []


def test_a_record_that_was_not_acknowledged_has_the_reason_of_its_batch() -> None:
    sending = Sending()
    batch = sending.batch(7)
    sending.finish(batch, error=FAILED)
    delivery = delivery_of(batch, 0)
    assert delivery.exception() is FAILED
    with pytest.raises(DiskFull) as raised:
        delivery.result()
    assert raised.value is FAILED


def test_who_asks_counts_as_told_of_a_failure_before_it_comes_and_after() -> None:
    """Else a flush would raise what its sender has dealt with."""
    for asks_first in (True, False):
        sending = Sending()
        batch = sending.batch(7)
        if asks_first:
            waited_for(delivery_of(batch, 0).exception, [batch], lambda: sending.finish(batch, error=FAILED))  # noqa: B023
        else:
            sending.finish(batch, error=FAILED)
            delivery_of(batch, 0).exception()
        with sending.accumulator.lock:
            assert sending.accumulator.take_failure([batch]) is None


def test_of_two_that_wait_for_a_record_one_stops_and_the_other_is_told() -> None:
    sending = Sending()
    batch = sending.batch(7)

    def then() -> None:
        with pytest.raises(RequestTimedOut):
            delivery_of(batch, 0).result(0)
        sending.finish(batch, error=FAILED)

    assert waited_for(delivery_of(batch, 0).exception, [batch], then) is FAILED
    with sending.accumulator.lock:
        assert sending.accumulator.take_failure([batch]) is None


def test_who_stopped_waiting_was_not_told() -> None:
    sending = Sending()
    batches = [sending.batch(7), sending.batch(8)]
    for ask in (delivery_of(batches[0], 0).exception, of_batches(batches).result):
        with pytest.raises(RequestTimedOut):
            ask(0)
    for batch in batches:
        sending.finish(batch, error=FAILED)
    with sending.accumulator.lock:
        assert sending.accumulator.failures() == batches
        assert sending.accumulator.take_failure(batches) is FAILED


@pytest.mark.parametrize("is_open", [True, False])
def test_what_is_waited_for_lingers_no_longer(is_open: bool) -> None:
    sending = Sending()
    batch = sending.batch(7, is_open=is_open)
    found = waited_for(delivery_of(batch, 0).result, [batch], lambda: sending.finish(batch, 3))
    assert found == RecordMetadata("t", 0, 3, 7)
    assert sending.hurried == ([0] if is_open else []), "what is closed is on its way: the next one may linger"


def test_a_wait_ends_with_its_time_and_may_be_begun_again() -> None:
    sending = Sending()
    batch = sending.batch(7)
    for ask in (delivery_of(batch, 0).result, delivery_of(batch, 0).exception, of_batches([batch]).result):
        with pytest.raises(RequestTimedOut, match="a delivery at here:1 did not finish within 1 ms"):
            ask(0.001)
    assert not batch.done
    sending.finish(batch, 3)
    assert delivery_of(batch, 0).result(0).offset == 3


def test_a_callback_that_asks_for_what_it_would_have_to_bring_is_refused() -> None:
    sending = Sending()
    sending.accumulator.own_threads.add(threading.get_ident())
    with pytest.raises(InvalidArgument, match="a delivery cannot be waited for in on_delivery"):
        delivery_of(sending.batch(7), 0).exception()


def test_a_record_says_which_it_is() -> None:
    assert repr(delivery_of(Sending().batch(7, 8), 1)) == "<Delivery of record 1 of a batch to t-0>"


# --- tables


def test_a_table_is_delivered_when_all_its_batches_are() -> None:
    sending = Sending()
    batches = [sending.batch(7), sending.batch(8), sending.batch(9)]
    for number, batch in enumerate(batches):
        batch.count = number + 1
    table = of_batches(batches)
    for number, batch in enumerate(batches):
        assert not table.done()
        sending.finish(batch, 10 * number)
    assert table.done()
    assert table.exception() is None
    assert table.result() == [(TopicPartition("t", number), 10 * number, number + 1) for number in range(3)]


def test_a_table_without_rows_is_delivered() -> None:
    table = ManyDelivery([])
    assert (table.done(), table.exception(), table.result()) == (True, None, [])


def test_of_a_table_the_first_batch_that_failed_says_why_and_all_are_waited_for() -> None:
    sending = Sending()
    good, bad, worse = batches = [sending.batch(7), sending.batch(8), sending.batch(9)]
    table = of_batches(batches)
    sending.finish(worse, error=FAILED_TOO)
    sending.finish(bad, error=FAILED)
    with pytest.raises(RequestTimedOut):
        table.exception(0.001)
    assert waited_for(table.exception, [good], lambda: sending.finish(good, 1)) is FAILED
    with pytest.raises(DiskFull) as raised:
        table.result()
    assert raised.value is FAILED


def test_of_a_table_every_batch_that_lingers_is_hurried_and_whoever_asks_is_told_of_all() -> None:
    sending = Sending()
    batches = [sending.batch(7, is_open=True), sending.batch(8), sending.batch(9, is_open=True)]

    def fail() -> None:
        for batch in batches:
            batch.queue.close_batch()
            sending.finish(batch, error=FAILED)

    assert waited_for(of_batches(batches).exception, batches, fail) is FAILED
    assert sending.hurried == [0, 2]
    with sending.accumulator.lock:
        assert sending.accumulator.take_failure(batches) is None


def test_the_batch_that_comes_last_is_waited_for_first() -> None:
    """When it is acknowledged most others are: one wait is enough."""
    sending = Sending()
    batches = [sending.batch(7), sending.batch(8), sending.batch(9)]

    def finish() -> None:
        for batch in batches:
            sending.finish(batch, 1)

    waited_for(of_batches(batches).result, batches, finish)
    assert [batch.awaited for batch in batches] == [False, False, True]
