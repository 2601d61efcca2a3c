"""A partition's queue against a log that knows its producers, with everything lost, late and refused that can be."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable

import pyarrow as pa
import pytest

from broker.storage.producer_state import Producers
from kafkalog.client.producer.delivery import Delivery, ManyDelivery, Run
from kafkalog.client.producer.queue import EPOCH_MAX, Batch, Failed, Identity, PartitionQueue
from kafkalog.clock import ManualClock
from kafkalog.errors import (
    BatchTooLarge,
    BrokerUnreachable,
    CorruptBatch,
    DeliveryTimedOut,
    DiskFull,
    KafkalogError,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OutcomeUnknown,
    OutOfOrderSequence,
    UnknownTopicId,
)
from kafkalog.format.batch import BatchHeader
from kafkalog.format.columns import Columns, columns_from_arrays, columns_from_lists, joined
from kafkalog.records import TopicPartition
from kafkalog.retry import Backoff

LOST = BrokerUnreachable(address="here:1", reason="it closed the connection")
TIMEOUT = 100.0


def make_queue(window: int = 5, idempotent: bool = True) -> PartitionQueue:
    queue = PartitionQueue(
        TopicPartition("t", 0),
        b"i" * 16,
        idempotent=idempotent,
        window=window,
        delivery_timeout_ms=int(TIMEOUT * 1000),
        backoff=Backoff(1.0, 8.0),
    )
    if idempotent:
        queue.identity = Identity(7, 0)
    return queue


def add(queue: PartitionQueue, now: float = 0.0, count: int = 1) -> Batch:
    batch = queue.start_batch(now, now + TIMEOUT)
    for _ in range(count):
        batch.values.append(b"v")
        batch.timestamps_us.append(1)
    batch.size = 100 * count
    queue.close_batch()
    return batch


class SimulatedLog:
    """What the broker does with batches: in order, known again, or refused."""

    def __init__(self) -> None:
        self.producers = Producers("t-0", 128, 1000, ManualClock())
        self.batches: list[Batch] = []
        self.end_offset = 0

    def append(self, frame: Frame) -> int | KafkalogError:
        header = frame.header
        known = self.producers.check(header)
        if isinstance(known, KafkalogError):
            return known
        if known is not None:
            return known.base_offset
        base = self.end_offset
        self.producers.record(header, base, 0)
        self.batches.append(frame.batch)
        self.end_offset += header.record_count
        return base


class Frame:
    """A batch as it was when it was sent."""

    def __init__(self, batch: Batch) -> None:
        assert batch.identity is not None
        self.batch = batch
        self.header = BatchHeader(
            0, 0, 0, 0, 0, 0, 1, 0, 0, 0, batch.count, batch.count - 1, 1, 1, *batch.identity, batch.sequence, -1, -1
        )  # fmt: skip


class Simulation:
    """One queue, one log, one connection at a time; frames of lost connections may arrive late."""

    def __init__(self, window: int) -> None:
        self.now = 0.0
        self.queue = make_queue(window)
        self.log = SimulatedLog()
        self.sent: list[Batch] = []
        self.acked: dict[Batch, int] = {}
        self.failed: dict[Batch, KafkalogError] = {}
        self.too_large: set[Batch] = set()
        self.frames: deque[list[Frame]] = deque()
        self.answers: deque[tuple[list[Batch], int | KafkalogError]] = deque()
        self.late: deque[Frame] = deque()

    def fail(self, failed: Failed) -> None:
        for batch, error in failed:
            assert batch not in self.acked
            assert batch not in self.failed
            self.failed[batch] = error

    def add(self, count: int, too_large: bool = False) -> None:
        batch = add(self.queue, self.now, count)
        self.sent.append(batch)
        if too_large:
            self.too_large.add(batch)

    def send(self, size: int) -> None:
        batches = self.queue.take(self.now, size)
        if batches:
            together = [batches] if batches[0].sends == 1 else [[batch] for batch in batches]
            self.frames.extend([Frame(batch) for batch in group] for group in together)

    def process(self, refusal: KafkalogError | None = None) -> None:
        """The broker takes the next request."""
        if not self.frames:
            return
        frames = self.frames.popleft()
        answer: int | KafkalogError | None = refusal
        for frame in frames:
            if refusal is not None:
                break
            result: int | KafkalogError = BatchTooLarge(size=1, partition="t-0", limit=0)
            if frame.batch not in self.too_large:
                result = self.log.append(frame)
            if isinstance(result, KafkalogError):
                answer = answer if isinstance(answer, KafkalogError) else result
            elif answer is None:
                answer = result
        assert answer is not None
        self.answers.append(([frame.batch for frame in frames], answer))

    def shrink_limit(self) -> None:
        """The next request's batches are too large from now on, unless an answer has told that one is in the log."""
        if self.frames and not any(frame.batch in self.log.batches for frame in self.frames[0] if not frame.batch.lost):
            self.too_large.update(frame.batch for frame in self.frames[0])

    def answer(self) -> None:
        if not self.answers:
            return
        batches, result = self.answers.popleft()
        if isinstance(result, int):
            for batch in batches:
                assert batch not in self.acked
                self.acked[batch] = result
                result += batch.count
                self.fail(self.queue.acked(batch))
        elif len(batches) == 1:
            self.fail(self.queue.refused(batches[0], result, self.now))
        else:
            self.fail(self.queue.refused_together(batches, result, self.now))

    def cut(self, arrive_late: bool) -> None:
        in_flight = [batch for batches, _ in self.answers for batch in batches]
        in_flight += [frame.batch for frames in self.frames for frame in frames]
        if arrive_late:
            self.late.extend(frame for frames in self.frames for frame in frames)
        self.frames.clear()
        self.answers.clear()
        if in_flight:
            self.fail(self.queue.lost(in_flight, LOST, self.now))

    def arrive(self) -> None:
        """A frame of a connection that is gone reaches the log after all."""
        if self.late:
            frame = self.late.popleft()
            if frame.batch not in self.too_large:
                self.log.append(frame)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.fail(self.queue.expired(self.now))

    def heal(self) -> None:
        for _ in range(1000):
            if self.queue.is_idle:
                break
            self.send(1 << 30)
            while self.frames:
                self.process()
            while self.answers:
                self.answer()
            self.now += 1.0
        assert self.queue.is_idle
        while self.late:
            self.arrive()

    def check(self) -> None:
        log = self.log.batches
        assert len(log) == len(set(log)), "a batch is in the log twice"
        place = {batch: number for number, batch in enumerate(self.sent)}
        assert [place[batch] for batch in log] == sorted(place[batch] for batch in log), "batches are out of order"
        assert set(self.acked) | set(self.failed) == set(self.sent), "a batch has no outcome"
        offset = 0
        for batch in log:
            if batch in self.acked:
                assert self.acked[batch] == offset
            else:
                assert isinstance(self.failed[batch], DeliveryTimedOut | OutcomeUnknown)
            offset += batch.count
        assert set(self.acked) <= set(log), "an acked batch is not in the log"


STEPS = 120
SEEDS = 1500


def a_run(seed: int) -> Simulation:
    """Random events; the clock moves so that deadlines pass between batches, too."""
    dice = random.Random(seed)
    simulation = Simulation(window=dice.randint(1, 4))
    events: dict[Callable[[], None], int] = {
        lambda: simulation.add(dice.randint(1, 3), too_large=dice.random() < 0.1): 4,
        lambda: simulation.send(dice.choice([1, 150, 1 << 30])): 4,
        lambda: simulation.process(): 6,
        lambda: simulation.process(DiskFull(directory="/d")): 1,
        lambda: simulation.shrink_limit(): 1,
        lambda: simulation.answer(): 6,
        lambda: simulation.cut(arrive_late=dice.random() < 0.5): 1,
        lambda: simulation.arrive(): 1,
        lambda: simulation.pass_time(dice.choice([1.0, 1.0, 10.0, TIMEOUT - 5.0])): 3,
    }
    for event in dice.choices(list(events), list(events.values()), k=STEPS):
        event()
    simulation.heal()
    return simulation


def test_whatever_happens_nothing_is_doubled_reordered_or_acked_without_being_there() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(SEEDS):
        simulation = a_run(seed)
        try:
            simulation.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        outcomes["acked"] += len(simulation.acked)
        outcomes.update(type(error).__name__ for error in simulation.failed.values())
    assert min(outcomes[name] for name in ("acked", "DeliveryTimedOut", "OutcomeUnknown", "BatchTooLarge")) > 50


def test_a_lost_connection_sends_the_same_batches_again_in_order_under_the_same_numbers() -> None:
    queue = make_queue()
    first, second, third = add(queue), add(queue), add(queue)
    assert queue.take(0.0, 1 << 20) == [first, second, third]
    numbers = [(batch.identity, batch.sequence) for batch in (first, second, third)]
    queue.acked(first)
    queue.lost([second, third], LOST, now=0.0)
    assert queue.take(0.5, 1 << 20) == [], "it pauses first"
    assert queue.take(1.0, 1 << 20) == [second, third]
    assert [(batch.identity, batch.sequence) for batch in (first, second, third)] == numbers


def test_nothing_new_is_sent_while_something_is_to_be_sent_again() -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.refused(first, DiskFull(directory="/d"), now=0.0)
    third = add(queue)
    assert queue.take(5.0, 1 << 20) == [], "the second's answer is awaited"
    gap = OutOfOrderSequence(producer_id=7, sequence=1, partition="t-0", expected=0)
    queue.refused(second, gap, now=5.0)
    assert queue.take(20.0, 1 << 20) == [first, second]
    queue.acked(first)
    queue.acked(second)
    assert queue.take(20.0, 1 << 20) == [third]


def test_a_batch_that_fails_for_good_raises_the_epoch_and_those_behind_it_continue_from_0() -> None:
    queue = make_queue()
    first, second = add(queue, count=2), add(queue)
    queue.take(0.0, 1 << 20)
    too_large = BatchTooLarge(size=9, partition="t-0", limit=1)
    assert queue.refused(first, too_large, now=0.0) == [(first, too_large)]
    gap = OutOfOrderSequence(producer_id=7, sequence=2, partition="t-0", expected=0)
    assert queue.refused(second, gap, now=0.0) == []
    assert queue.take(10.0, 1 << 20) == [second]
    assert (second.identity, second.sequence) == (Identity(7, 1), 0)


def test_a_batch_of_unknown_fate_behind_a_failed_one_is_not_sent_under_a_new_number() -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.lost([first, second], LOST, now=0.0)
    third = add(queue, now=50.0)
    failed = dict(queue.expired(TIMEOUT))
    assert isinstance(failed.pop(first), DeliveryTimedOut)
    assert isinstance(failed.pop(second), DeliveryTimedOut)
    assert not failed
    assert queue.take(TIMEOUT, 1 << 20) == [third]
    assert (third.identity, third.sequence) == (Identity(7, 1), 0)


def test_frames_that_linger_in_a_lost_connection_can_not_double_a_batch_that_was_refused_since() -> None:
    queue = make_queue()
    first = add(queue)
    second = add(queue, now=50.0)
    queue.take(50.0, 1 << 20)
    queue.lost([first, second], LOST, now=50.0)  # and their frames are still on their way
    queue.take(60.0, 1 << 20)
    queue.refused(first, DiskFull(directory="/d"), now=60.0)
    gap = OutOfOrderSequence(producer_id=7, sequence=1, partition="t-0", expected=0)
    assert queue.refused(second, gap, now=60.0) == []
    failed = dict(queue.expired(TIMEOUT))
    assert isinstance(failed[first], DeliveryTimedOut)
    assert isinstance(failed[second], OutcomeUnknown)


@pytest.mark.parametrize("together", [True, False])
def test_batches_behind_one_that_failed_are_told_why_that_one_did(together: bool) -> None:
    queue = make_queue()
    first, second, third = add(queue), add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    full = DiskFull(directory="/d")
    gap = OutOfOrderSequence(producer_id=7, sequence=1, partition="t-0", expected=0)
    queue.refused(first, full, now=0.0)
    if together:
        queue.refused_together([second, third], gap, now=0.0)
    else:
        for batch in (second, third):
            queue.refused(batch, gap, now=0.0)
    failed = dict(queue.expired(TIMEOUT))
    assert set(failed) == {first, second, third}
    assert all(str(full) in str(error) for error in failed.values())


def test_a_broker_that_forgot_the_producer_is_met_with_a_new_epoch() -> None:
    queue = make_queue()
    first = add(queue)
    queue.take(0.0, 1 << 20)
    queue.acked(first)
    second = add(queue)
    queue.take(0.0, 1 << 20)
    assert second.sequence == 1
    queue.refused(second, OutOfOrderSequence(producer_id=7, sequence=1, partition="t-0", expected=0), now=0.0)
    assert queue.take(10.0, 1 << 20) == [second]
    assert (second.identity, second.sequence) == (Identity(7, 1), 0)


def test_used_up_epochs_ask_for_another_producer_id() -> None:
    queue = make_queue()
    queue.identity = Identity(7, EPOCH_MAX)
    first, second = add(queue), add(queue)
    queue.take(0.0, 100)
    queue.refused(first, BatchTooLarge(size=9, partition="t-0", limit=1), now=0.0)
    assert queue.needs_identity
    assert queue.used_up == 7
    queue.identity = Identity(8, 0)
    assert queue.take(10.0, 1 << 20) == [second]
    assert (second.identity, second.sequence) == (Identity(8, 0), 0)


def test_sequences_wrap() -> None:
    queue = make_queue()
    queue._next_sequence = (1 << 31) - 1
    first, second = add(queue, count=2), add(queue)
    queue.take(0.0, 1 << 20)
    assert (first.sequence, second.sequence) == ((1 << 31) - 1, 1)


def test_the_window_bounds_what_is_in_flight() -> None:
    queue = make_queue(window=2)
    batches = [add(queue) for _ in range(3)]
    assert queue.take(0.0, 1 << 20) == batches[:2]
    assert not queue.can_send(0.0) and queue.take(0.0, 1 << 20) == []
    queue.acked(batches[0])
    assert queue.can_send(0.0) and queue.take(0.0, 1 << 20) == batches[2:]


def test_pauses_double_up_to_the_largest_and_an_ack_ends_them() -> None:
    queue = make_queue()
    batch = add(queue)
    now = 0.0
    pauses = []
    for _ in range(5):
        assert queue.take(now, 1 << 20) == [batch]
        queue.refused(batch, DiskFull(directory="/d"), now)
        wake_at = queue.wake_at()
        assert wake_at is not None
        pauses.append(wake_at - now)
        now = wake_at
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]
    queue.take(now, 1 << 20)
    queue.acked(batch)
    other = add(queue)
    queue.take(now, 1 << 20)
    queue.refused(other, DiskFull(directory="/d"), now)
    assert queue.wake_at() == now + 1.0


def test_a_new_leader_is_sent_to_at_once_and_pauses_begin_anew() -> None:
    queue = make_queue()
    batch = add(queue)
    for now in (0.0, 1.0):
        queue.take(now, 1 << 20)
        queue.unsent([batch], LOST, now)
    assert queue.is_held(1.5) and queue.failing_since == 0.0
    queue.leader_changed()
    assert queue.take(1.5, 1 << 20) == [batch]
    queue.unsent([batch], LOST, 1.5)
    assert queue.wake_at() == 2.5
    queue.take(2.5, 1 << 20)
    queue.acked(batch)
    assert queue.failing_since is None


def test_while_leaders_change_pauses_are_no_longer_than_the_first() -> None:
    queue = make_queue()
    batch = add(queue)
    for now in (0.0, 5.0, 10.0):
        queue.take(now, 1 << 20)
        queue.refused(batch, NotLeader(broker_id=1, partition="t-0"), now)
        assert queue.wake_at() == now + 1.0


@pytest.mark.parametrize("error", [NotLeader, NotEnoughReplicasAfterAppend])
def test_a_batch_whose_ack_a_leader_could_not_give_is_not_sent_under_a_new_number(
    error: type[KafkalogError],
) -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    assert not queue.refused(second, error(partition="t-0"), 0.0)
    failed = dict(queue.refused(first, CorruptBatch(reason="it is damaged"), 0.0))
    assert isinstance(failed.pop(first), CorruptBatch)
    assert isinstance(failed.pop(second), OutcomeUnknown)
    assert not failed and queue.is_idle


def test_keys_and_headers_stand_at_their_records_indices() -> None:
    """None where a record has none, also for those that came before the first that has one."""
    batch = make_queue().start_batch(0.0, TIMEOUT)
    assert (batch.is_mixed, batch.keys, batch.headers, batch.callbacks) == (False, None, None, None)
    batch.add_key_and_headers(2, b"k", None)
    assert (batch.is_mixed, batch.keys, batch.headers) == (True, [None, None, b"k"], None)
    batch.add_key_and_headers(3, None, [("h", b"1")])
    batch.add_key_and_headers(4, b"", None)
    assert batch.keys == [None, None, b"k", None, b""]
    assert batch.headers == [None, None, None, [("h", b"1")], None]
    told: list[object] = []
    batch.add_callback(2, lambda *outcome: told.append(outcome))
    batch.add_callback(4, lambda *outcome: told.append(outcome))
    assert batch.callbacks is not None and [index for index, _ in batch.callbacks] == [2, 4]


def test_a_records_metadata_counts_from_its_batch() -> None:
    batch = make_queue().start_batch(0.0, TIMEOUT)
    batch.timestamps_us += [11, 12, 13]
    assert batch.metadata(2) == ("t", 0, -1, 13)  # acks=0: nobody told where
    batch.base_offset = 0
    assert batch.metadata(1) == ("t", 0, 1, 12)


def test_a_batch_has_no_number_until_it_is_taken_and_each_sending_counts() -> None:
    queue = make_queue()
    batch = add(queue)
    assert (batch.identity, batch.sequence, batch.body, batch.sends, batch.base_offset) == (None, -1, None, 0, -1)
    for sends in (1, 2):
        assert queue.take(10.0 * sends, 1 << 20) == [batch] and batch.sends == sends
        queue.lost([batch], LOST, now=10.0 * sends)


@pytest.mark.parametrize(("bytes_max", "count"), [(1, 1), (199, 1), (200, 2), (299, 2), (300, 3)])
def test_as_many_batches_are_taken_as_fit_and_at_least_one(bytes_max: int, count: int) -> None:
    queue = make_queue()
    batches = [add(queue) for _ in range(3)]  # 100 bytes each
    assert queue.take(0.0, bytes_max) == batches[:count]


def test_a_whole_batch_is_put_behind_the_open_one() -> None:
    queue = make_queue()
    first = queue.start_batch(0.0, TIMEOUT)
    first.values.append(b"v")
    whole = Batch(queue, 0.0, TIMEOUT)
    queue.put(whole)
    assert list(queue.ready) == [first, whole] and queue.open is None and first.count == 1


def test_holding_pauses_as_a_failed_send_does() -> None:
    queue = make_queue()
    add(queue)
    queue.hold(LOST, now=5.0)
    assert queue.last_failure is LOST
    assert queue.is_held(5.9) and not queue.is_held(6.0)
    assert not queue.can_send(5.9) and queue.can_send(6.0)


def test_what_falls_due_first_is_what_the_link_wakes_for() -> None:
    queue = make_queue(window=1)
    assert queue.wake_at() is None
    queue.start_batch(linger_until=3.0, deadline=50.0)
    assert queue.wake_at() == 3.0
    queue.close_batch()
    assert queue.wake_at() == 0.0  # it may go now
    queue.start_batch(linger_until=7.0, deadline=20.0)
    [first] = queue.take(0.0, 1 << 20)
    assert queue.wake_at() == 7.0  # the deadline of what is in flight is its connection's
    queue.close_batch()
    assert queue.wake_at() == 20.0  # the window is full: nothing but the deadline of what waits
    queue.lost([first], LOST, now=10.0)
    assert queue.wake_at() == 11.0  # the pause


def test_a_deadline_that_passes_during_the_pause_wakes_the_sender() -> None:
    queue = make_queue()
    first = queue.start_batch(linger_until=0.0, deadline=5.5)
    queue.start_batch(linger_until=0.0, deadline=2.0)
    queue.close_batch()
    queue.take(0.0, 1)
    queue.lost([first], LOST, now=5.0)
    assert queue.wake_at() == 5.5  # of the first in line, before the pause ends at 6


def test_what_did_not_leave_goes_again_after_a_pause_under_its_number() -> None:
    queue = make_queue()
    batches = [add(queue), add(queue)]
    assert queue.take(0.0, 1 << 20) == batches
    assert queue.unsent(batches, LOST, now=5.0) == []
    assert queue.last_failure is LOST and queue.in_flight == 0
    assert queue.take(5.5, 1 << 20) == [] and queue.wake_at() == 6.0
    assert queue.take(6.0, 1 << 20) == batches
    assert [batch.sequence for batch in batches] == [0, 1]


def test_a_batch_without_an_answer_leaves_the_queue_when_it_is_sent() -> None:
    queue = make_queue(idempotent=False)
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.dropped(second)
    assert list(queue.unacked) == [first] and queue.in_flight == 1
    queue.dropped(first)
    assert queue.is_idle and queue.in_flight == 0


def test_a_topic_created_again_starts_with_nothing_of_unknown_fate() -> None:
    """What might have been written into the old topic is not in the new one: it may get another number."""
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.lost([first, second], LOST, now=0.0)
    queue.retarget(b"j" * 16)
    assert queue.topic_id == b"j" * 16
    assert queue.take(10.0, 1 << 20) == [first, second]
    assert queue.refused(first, BatchTooLarge(size=2, partition="t-0", limit=1), now=10.0)[0][0] is first
    assert queue.refused(second, OutOfOrderSequence(partition="t-0", expected=0, got=1), now=10.0) == []
    assert queue.take(20.0, 1 << 20) == [second]
    assert (second.identity, second.sequence) == (Identity(7, 2), 0)


def test_a_topic_created_again_gets_everything_that_is_left_from_sequence_0() -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 100)
    queue.retarget(b"j" * 16)
    assert queue.topic_id != b"j" * 16, "an answer is awaited"
    queue.refused(first, UnknownTopicId(topic_id="69"), now=0.0)
    assert queue.is_held(0.0)
    queue.retarget(b"j" * 16)
    assert queue.topic_id == b"j" * 16
    assert queue.take(0.0, 1 << 20) == [first], "the new topic has not failed"
    queue.acked(first)
    assert queue.take(10.0, 1 << 20) == [second]
    assert [(batch.identity, batch.sequence) for batch in (first, second)] == [(Identity(7, 1), 0), (Identity(7, 1), 1)]


def test_without_idempotence_batches_carry_no_numbers() -> None:
    queue = make_queue(idempotent=False)
    batch = add(queue)
    assert not queue.needs_identity
    assert queue.take(0.0, 1 << 20) == [batch]
    assert batch.identity is None
    queue.lost([batch], LOST, now=0.0)
    assert queue.take(1.0, 1 << 20) == [batch]
    assert queue.acked(batch) == []
    assert queue.is_idle


@pytest.mark.parametrize("in_flight", [False, True])
def test_giving_up_hands_back_everything(in_flight: bool) -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    if in_flight:
        queue.take(0.0, 100)
    queue.start_batch(0.0, TIMEOUT)
    assert len(queue.clear()) == 3
    assert queue.is_idle
    assert first is not second


@pytest.mark.parametrize("idempotent", [False, True])
def test_answers_that_come_after_giving_up_are_nothing_to_the_queue_which_continues(idempotent: bool) -> None:
    queue = make_queue(idempotent=idempotent)
    late = [add(queue) for _ in range(5)]
    assert queue.take(0.0, 1 << 20) == late
    assert queue.clear() == late
    following = add(queue)
    assert queue.acked(late[0]) == []
    assert queue.refused(late[1], DiskFull(directory="/d"), now=0.0) == []
    assert queue.refused_together([late[2]], DiskFull(directory="/d"), now=0.0) == []
    assert queue.lost([late[3]], LOST, now=0.0) == []
    assert queue.unsent([late[4]], LOST, now=0.0) == []
    queue.dropped(late[4])
    assert queue.in_flight == 0
    assert queue.last_failure is None
    assert queue.take(0.0, 1 << 20) == [following]
    if idempotent:
        assert (following.identity, following.sequence) == (Identity(7, 1), 0)


def test_giving_up_behind_a_batch_that_failed_for_good_does_not_hold_the_queue_for_ever() -> None:
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.refused(first, BatchTooLarge(size=2, partition="t-0", limit=1), now=0.0)
    assert queue.clear() == [second]
    following = add(queue)
    assert queue.take(0.0, 1 << 20) == [following]


def out_of_order() -> OutOfOrderSequence:
    return OutOfOrderSequence(partition="t-0", expected=0, got=1)


def test_nothing_new_is_sent_behind_a_gap_before_it_is_closed() -> None:
    queue = make_queue()
    first, second, waiting = add(queue), add(queue), add(queue)
    assert queue.take(0.0, 200) == [first, second]
    queue.refused(first, BatchTooLarge(size=2, partition="t-0", limit=1), now=0.0)
    assert not queue.can_send(10.0), "the second one's answer is awaited, and what comes behind it would be refused too"
    queue.refused(second, out_of_order(), now=0.0)
    assert queue.take(10.0, 1 << 20) == [second]
    queue.acked(second)
    assert queue.take(10.0, 1 << 20) == [waiting]
    assert [(batch.identity, batch.sequence) for batch in (second, waiting)] == [
        (Identity(7, 1), 0),
        (Identity(7, 1), 1),
    ]


def test_a_batch_that_is_out_of_order_is_not_in_the_log_whatever_was_to_be_feared_before() -> None:
    """It goes on behind the gap, where one whose fate is unknown fails."""
    queue = make_queue()
    first, second = add(queue), add(queue)
    queue.take(0.0, 1 << 20)
    queue.refused_together([first, second], DiskFull(directory="/d"), now=0.0)
    queue.take(10.0, 1 << 20)  # one by one
    queue.refused(second, out_of_order(), now=10.0)
    failed = queue.refused(first, BatchTooLarge(size=2, partition="t-0", limit=1), now=10.0)
    assert [batch for batch, _ in failed] == [first]
    assert queue.take(20.0, 1 << 20) == [second]


# --- tables -----------------------------------------------------------------------------------------------------------


def rows_of(count: int, key: bytes | None = None, timestamp_us: int = 1) -> Columns:
    return columns_from_lists([b"v"] * count, timestamp_us, None if key is None else [key] * count)


def add_table(queue: PartitionQueue, columns: Columns, linger_until: float = 0.0) -> Batch:
    batch = Batch(queue, linger_until, TIMEOUT)
    batch.add_rows(columns, 100)
    queue.put(batch)
    return batch


def test_rows_of_a_table_are_added_to_the_last_batch_while_it_was_not_sent() -> None:
    queue = make_queue()
    batch = add_table(queue, rows_of(2))
    assert (
        queue.last_of_tables(rows_of(3, timestamp_us=2), 10, rows_max=5, bytes_max=10_000, deadline=TIMEOUT + 0.5)
        is batch
    )
    batch.add_rows(rows_of(3, timestamp_us=2), 10)
    assert (batch.count, batch.size) == (5, 110)
    assert queue.take(0.0, 1 << 20) == [batch]
    assert queue.last_of_tables(rows_of(1), 10, rows_max=100, bytes_max=10_000, deadline=TIMEOUT) is None, (
        "it is under way"
    )
    following = add_table(queue, rows_of(1))
    assert queue.take(0.0, 1 << 20) == [following]
    assert following.sequence == 5


def test_the_first_deadline_is_that_of_the_batch_that_waits_longest() -> None:
    queue = make_queue()
    assert queue.first_deadline == math.inf
    for number, expected in enumerate((5.0, 5.0, 5.0)):
        batch = Batch(queue, 0.0, 5.0 + number)
        batch.add_rows(rows_of(1), 100)
        queue.put(batch)
        assert queue.first_deadline == expected
        if number == 0:
            assert queue.take(0.0, 1 << 20) == [batch]  # it is unacknowledged, and before those that are ready
    queue = make_queue()
    queue.start_batch(linger_until=1.0, deadline=9.0)
    assert queue.first_deadline == 9.0


def test_rows_with_one_time_and_rows_with_their_own_join() -> None:
    queue = make_queue()
    batch = add_table(queue, rows_of(2))
    assert queue.last_of_tables(columns_from_lists([b"v"] * 2, [1, 2]), 10, 100, 10_000, TIMEOUT) is batch


def test_a_tables_rows_that_linger_are_added_to_and_are_whole_after_an_interrupt() -> None:
    queue = make_queue()
    batch = add_table(queue, rows_of(2), linger_until=5.0)
    assert queue.wake_at() == 5.0
    assert queue.take(0.0, 1 << 20) == [], "it lingers"
    assert queue.last_of_tables(rows_of(3), 10, 100, 10_000, TIMEOUT) is batch
    batch.add_rows(rows_of(3), 10)
    assert not queue.cut_open_batch(), "it has no half records"
    queue.close_batch()
    assert queue.take(0.0, 1 << 20) == [batch]
    assert (batch.count, queue.open) == (5, None)


@pytest.mark.parametrize(
    ("columns", "rows_max", "bytes_max"),
    [(rows_of(4), 5, 10_000), (rows_of(1), 5, 101), (rows_of(1, b"k"), 5, 10_000)],
    ids=["too many rows", "too many bytes", "other columns"],
)
def test_rows_that_do_not_fit_the_last_batch_are_not_added(columns: Columns, rows_max: int, bytes_max: int) -> None:
    queue = make_queue()
    add_table(queue, rows_of(2))
    assert queue.last_of_tables(columns, 1, rows_max, bytes_max, TIMEOUT) is None


def test_rows_do_not_get_the_deadline_of_much_older_ones() -> None:
    queue = make_queue()
    add_table(queue, rows_of(2))
    assert queue.last_of_tables(rows_of(1), 1, 100, 10_000, TIMEOUT + 2.0) is None


@pytest.mark.parametrize("pieces", [[b"k", None], [None, b"k"]])
def test_joined_rows_fit_where_they_were_reckoned_to_fit(pieces: list[bytes | None]) -> None:
    """Bitmaps of nulls and whole timestamps come into being by joining."""
    queue = make_queue()
    arrays = [
        columns_from_arrays(
            pa.array([b"v" * 90] * 2000 if key else [None] + [b"v" * 90] * 1999, pa.binary()),
            number << 40,
            pa.array([key] + [b"k"] * 1999, pa.binary()),
        )
        for number, key in enumerate(pieces)
    ]
    batch = Batch(queue, 0.0, TIMEOUT)
    batch.add_rows(arrays[0], arrays[0].batch.nbytes)
    queue.put(batch)
    size = arrays[1].batch.nbytes
    least = next(
        limit
        for limit in range(2 * size, 3 * size, 50)
        if queue.last_of_tables(arrays[1], size, 10_000, limit, TIMEOUT) is batch
    )
    assert joined(arrays).batch.nbytes <= least


def test_a_failure_is_reported_unless_each_record_of_the_batch_was_asked_for() -> None:
    queue = make_queue()
    batch = add_table(queue, rows_of(2))
    first = ManyDelivery([Run(batch, 0, 2)])
    batch.done, batch.error = True, DiskFull(directory="/d")
    assert not batch.is_observed
    first.exception(0)
    assert batch.is_observed
    batch.add_rows(rows_of(3), 10)
    assert not batch.is_observed, "the second table was not asked for"
    first.exception(0)
    assert not batch.is_observed
    ManyDelivery([Run(batch, 2, 3)]).exception(0)
    assert batch.is_observed

    records = queue.start_batch(0.0, TIMEOUT)
    records.add_records([b"v"] * 3, None, 1)
    queue.close_batch()
    records.done, records.error = True, batch.error
    ManyDelivery([Run(records, 0, 2)]).exception(0)
    assert not records.is_observed
    alone = Delivery()
    alone._batch, alone._index = records, 2
    alone.exception(0)
    assert records.is_observed


def test_rows_are_not_added_before_records_that_were_sent_later() -> None:
    queue = make_queue()
    add_table(queue, rows_of(2))
    queue.start_batch(0.0, TIMEOUT).values.append(b"v")
    assert queue.last_of_tables(rows_of(1), 1, 100, 10_000, TIMEOUT) is None, "the open batch comes after the table"
    queue.close_batch()
    assert queue.last_of_tables(rows_of(1), 1, 100, 10_000, TIMEOUT) is None, "and so it does once it is closed"
