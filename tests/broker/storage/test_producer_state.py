from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from broker.storage.apply_progress import RecordBatch
from broker.storage.producer_state import Producers, Remembered
from kafkalog.clock import ManualClock
from kafkalog.errors import OutOfOrderSequence, ProducerFenced, SequenceForgotten, TooManyProducers
from kafkalog.format.batch import SEQUENCE_MODULUS, BatchHeader
from tests.broker.storage.batches import make_batch, numbered


def header(sequence: int, count: int = 1, *, epoch: int = 0, producer: int = 7) -> BatchHeader:
    return numbered(0, count, producer=(producer, epoch, sequence))[0]


def after(*sequences: int, epoch: int = 0, remembered: int = 5) -> Producers:
    """One producer whose batches of one record were appended at offsets 100, 101 ..., at times 0, 1 ..."""
    producers = Producers("t-0", remembered, 1000, ManualClock())
    for number, sequence in enumerate(sequences):
        producers.record(header(sequence, epoch=epoch), 100 + number, number)
    return producers


def test_sequence_in_order_is_taken() -> None:
    assert after().check(header(0)) is None
    assert after(0, 1).check(header(2)) is None


def test_unknown_producer_must_begin_at_zero() -> None:
    refused = after().check(header(5))
    assert isinstance(refused, OutOfOrderSequence)
    assert str(refused) == "producer 7 sent sequence 5 to t-0, but 0 is next"


@pytest.mark.parametrize("producer", [0, 7])
def test_a_replayed_batch_is_known_again_the_first_producers_too(producer: int) -> None:
    producers = after()
    producers.replay(header(0, producer=producer)._replace(base_offset=40))
    again = producers.check(header(0, producer=producer))
    assert isinstance(again, Remembered) and again.base_offset == 40
    assert producers.check(header(1, producer=producer)) is None


def test_gap_is_refused_with_what_comes_next() -> None:
    refused = after(0, 1).check(header(3))
    assert isinstance(refused, OutOfOrderSequence)
    assert refused.facts["expected"] == 2


def test_batch_sent_again_is_found_where_it_was() -> None:
    assert after(0, 1, 2).check(header(1)) == Remembered(1, 1, 101, 102, 1)


def test_batch_older_than_the_window_raises_sequence_forgotten() -> None:
    producers = after(*range(10))
    assert producers.check(header(5)) == Remembered(5, 1, 105, 106, 5)
    assert isinstance(producers.check(header(4)), SequenceForgotten)
    assert isinstance(producers.check(header(8, count=2)), SequenceForgotten)  # never sent like that


def test_newer_epoch_begins_at_zero_and_shuts_the_older_one_out() -> None:
    producers = after(0, 1)
    assert isinstance(producers.check(header(2, epoch=1)), OutOfOrderSequence)
    first = header(0, epoch=1)
    assert producers.check(first) is None
    producers.record(first, 200, 9)
    refused = producers.check(header(2))
    assert isinstance(refused, ProducerFenced)
    assert str(refused) == "producer 7 has epoch 0 on t-0, and is fenced by epoch 1"
    assert producers.check(header(0, epoch=1)) == Remembered(0, 1, 200, 201, 9)


def test_sequence_wraps_to_zero() -> None:
    last = SEQUENCE_MODULUS - 1
    producers = Producers("t-0", 5, 1000, ManualClock())
    producers.record(header(last - 1), 1, 0)
    assert producers.check(header(last, 2)) is None
    producers.record(header(last, 2), 2, 0)
    assert producers.check(header(1)) is None
    assert isinstance(producers.check(header(2)), OutOfOrderSequence)
    assert producers.check(header(last, 2)) == Remembered(last, 2, 2, 4, 0)
    assert isinstance(producers.check(header(last - 2)), SequenceForgotten)


def test_silent_producer_is_forgotten() -> None:
    producers = after(0, 1)
    assert producers.forget_silent(before_us=1) == 0
    assert producers.forget_silent(before_us=2) == 1
    assert isinstance(producers.check(header(2)), OutOfOrderSequence)


def test_of_several_producers_the_silent_ones_are_forgotten() -> None:
    producers = after(0, 1)
    for producer, append_us in ((8, 5), (9, 6)):
        producers.record(header(0, producer=producer), 10 + producer, append_us)
    assert producers.forget_silent(before_us=6) == 2
    assert isinstance(producers.check(header(2)), OutOfOrderSequence)
    assert producers.check(header(1, producer=9)) is None


def test_saved_state_comes_back_and_damage_is_refused() -> None:
    producers = after(*range(8))
    producers.record(header(0, producer=8), 300, 4)
    data = producers.snapshot(301).encode()
    loaded = Producers("t-0", 5, 1000, ManualClock())
    assert loaded.load(data, 301)
    assert loaded.snapshot(301).encode() == data
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        assert not Producers("t-0", 5, 1000, ManualClock()).load(bytes(flipped), 301)
        assert not Producers("t-0", 5, 1000, ManualClock()).load(data[:at], 301)
    assert not loaded.load(data, 300)
    assert len(loaded) == 2


@pytest.mark.parametrize("fewer", [1, 3])
def test_saved_state_fits_a_smaller_window(fewer: int) -> None:
    loaded = Producers("t-0", fewer, 1000, ManualClock())
    assert loaded.load(after(*range(5)).snapshot(105).encode(), 105)
    assert loaded.check(header(5)) is None
    assert isinstance(loaded.check(header(4)), Remembered)
    assert isinstance(loaded.check(header(4 - fewer)), SequenceForgotten)


def test_the_producer_silent_longest_is_forgotten_for_a_new_one_and_none_that_may_send_again() -> None:
    clock = ManualClock()
    producers = Producers("t-0", 5, 3, clock)

    def append(producer: int, sequence: int = 0) -> None:
        assert producers.check(header(sequence, producer=producer)) is None
        producers.record(header(sequence, producer=producer), 0, clock.now_us())

    for producer in (1, 2, 3):
        append(producer)
        clock.advance(100)
    append(1, 1)
    refused = producers.check(header(0, producer=4))
    assert isinstance(refused, TooManyProducers) and refused.retriable
    assert str(refused) == "t-0 already keeps the state of 3 producers, all active recently; raise producer.state.max"
    assert len(producers) == 3
    clock.advance(101)  # 2 appended last five minutes ago
    append(4)
    assert len(producers) == 3
    assert isinstance(producers.check(header(1, producer=2)), OutOfOrderSequence)  # a gap: it starts an epoch
    for producer, sequence in ((1, 2), (3, 1), (4, 1)):
        assert producers.check(header(sequence, producer=producer)) is None
    clock.jump(-86_400)
    clock.advance(98)
    assert isinstance(producers.check(header(0, producer=5)), TooManyProducers)
    clock.advance(1)
    append(5)  # whatever the wall clock says
    assert len(producers) == 3


@pytest.mark.parametrize("seconds", [600, -2, -86_400])
def test_a_wall_clock_that_is_set_makes_no_producer_silent(seconds: int) -> None:
    clock = ManualClock()
    producers = Producers("t-0", 5, 3, clock)
    for producer in (1, 2, 3):
        producers.record(header(0, producer=producer), producer, clock.now_us())
        clock.advance(1)
    clock.jump(seconds)
    assert isinstance(producers.check(header(0, producer=4)), TooManyProducers)
    producers.record(header(1, producer=3), 4, clock.now_us())
    assert isinstance(producers.check(header(0, producer=1)), Remembered)
    clock.advance(297)
    assert producers.check(header(0, producer=4)) is None
    producers.record(header(0, producer=4), 5, clock.now_us())
    assert len(producers) == 3
    assert producers.check(header(2, producer=3)) is None  # who was silent longest is forgotten, and nobody else
    assert isinstance(producers.check(header(1, producer=1)), OutOfOrderSequence)


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(("before", "waits"), [(299, 1), (301, 0), (-86_400, 300)])
def test_after_a_start_the_stamps_say_how_long_a_producer_was_silent(before: int, waits: int, replayed: bool) -> None:
    clock = ManualClock()
    append_us = clock.now_us() - before * 1_000_000
    producers = Producers("t-0", 5, 1, clock)
    if replayed:
        producers.replay(header(0, producer=1)._replace(append_timestamp_us=append_us))
    else:
        saved = Producers("t-0", 5, 1, clock)
        saved.record(header(0, producer=1), 0, append_us)
        assert producers.load(saved.snapshot(1).encode(), 1)
    newcomer = header(0, producer=2)
    if waits:
        clock.advance(waits - 0.5)
        assert isinstance(producers.check(newcomer), TooManyProducers)
        clock.advance(0.5)
    assert producers.check(newcomer) is None


def test_ids_that_clients_invent_take_no_more_than_the_limit() -> None:
    clock = ManualClock()
    producers = Producers("t-0", 5, 100, clock)
    for producer in range(2000):
        clock.advance(4)
        producers.record(header(0, producer=producer), producer, clock.now_us())
    assert len(producers) == 100
    data = producers.snapshot(2000).encode()
    again = Producers("t-0", 5, 100, clock)
    assert again.load(data, 2000)
    assert again.snapshot(2000).encode() == data


def test_snapshot_is_not_changed_by_what_comes_after_it() -> None:
    producers = after(*range(4))
    producers.apply_progress.record(transactional(0), 200, 5)
    before = producers.snapshot(300)
    expected = before.encode()
    for sequence in range(4, 9):
        producers.record(header(sequence), 300 + sequence, sequence)
    producers.record(header(0, producer=8), 310, 9)
    producers.apply_progress.record(transactional(1), 311, 9)
    producers.forget_silent(before_us=100)
    producers.apply_progress.done(9, 1)
    producers.apply_progress.forget_silent(1 << 60, ())
    assert not producers.apply_progress
    assert before.encode() == expected
    loaded = Producers("t-0", 5, 1000, ManualClock())
    assert loaded.load(expected, 300)
    assert loaded.check(header(3)) == Remembered(3, 1, 103, 104, 3)
    progress = loaded.apply_progress.get(9)
    assert progress is not None and progress.has(0, 0) and not progress.has(0, 1)


def transactional(number: int) -> BatchHeader:
    return make_batch([b"x"], producer=(9, 0, number), transaction=(1, 0))[0]


def history(chance: random.Random) -> list[BatchHeader]:
    """The batches of a log: those of some producers, with new epochs, and of a transaction."""
    headers: list[BatchHeader] = []
    sent: dict[tuple[int, int], int] = {}
    offset = batch_id = 0
    for at_us in range(40):
        if chance.random() < 0.3:
            batch_id += chance.random() < 0.2
            part = chance.randrange(2)
            number = sent[batch_id, part] = sent.get((batch_id, part), -1) + 1
            made, _ = make_batch([b"x"] * chance.randint(1, 3), producer=(99, 0, number), transaction=(batch_id, part))
        else:
            producer, epoch = chance.randrange(4), at_us // 25
            sequence = sent.get((producer, epoch), 0)
            made = header(sequence, chance.randint(1, 3), epoch=epoch, producer=producer)
            sent[producer, epoch] = made.end_sequence
        headers.append(made._replace(base_offset=offset, append_timestamp_us=at_us))
        offset = headers[-1].end_offset
    return headers


def replayed(headers: Iterable[BatchHeader]) -> Producers:
    producers = Producers("t-0", 5, 1000, ManualClock())
    for each in headers:
        producers.replay(each)
    return producers


@pytest.mark.parametrize("seed", range(20))
def test_the_state_before_an_offset_gives_the_whole_state_with_the_batches_from_there_on(seed: int) -> None:
    """And it has nothing about those, which may be lost."""
    headers = history(random.Random(seed))
    whole = replayed(headers)
    offset = headers[-1].end_offset
    taken = whole.snapshot(offset)
    expected = taken.encode()
    for number, first in enumerate(headers):
        at, rest = first.base_offset, headers[number:]
        until = taken.end_of_batches_across(at)
        later = {
            RecordBatch(each.producer_id, each.transaction_batch_id, each.part, each.base_sequence)
            for each in rest
            if each.producer_id == 99 and each.base_offset < until
        }
        copy = Producers("t-0", 5, 1000, ManualClock())
        assert copy.load(taken.before(at, later).encode(), at)
        known = copy.apply_progress.get(99)
        for each in rest:
            if each.producer_id != 99:
                assert not isinstance(copy.check(each), Remembered)
            elif known is not None and known.batch_id == each.transaction_batch_id:
                assert not known.has(each.part, each.base_sequence)
        for each in rest:
            copy.replay(each)
        assert copy.snapshot(offset).encode() == expected
    assert whole.snapshot(offset).encode() == expected


@pytest.mark.parametrize("seed", range(20))
def test_batches_that_a_repair_brings_back_give_the_state_that_there_would_be_with_them(seed: int) -> None:
    """In whatever order ranges are repaired, and if some of them were known."""
    chance = random.Random(seed)
    headers = history(chance)
    whole = replayed(headers)
    lost = [number for number in range(len(headers)) if chance.random() < 0.4]
    producers = replayed(each for number, each in enumerate(headers) if number not in lost)
    before = producers.snapshot(0).encode()
    taken = producers.snapshot(0)
    ranges = [[headers[number] for number in range(start, start + 5)] for start in range(0, len(headers), 5)]
    chance.shuffle(ranges)
    for each in ranges:
        producers.restore(each)
    assert taken.encode() == before, "a snapshot is not changed by what comes after it"
    assert without_progress(producers) == without_progress(whole)
    known, expected = producers.apply_progress.get(99), whole.apply_progress.get(99)
    assert known is not None and expected is not None
    for name in ("batch_id", "start_offset", "end_offset", "first", "last_append_us"):
        assert getattr(known, name) == getattr(expected, name)
    counts = Counter(each.part for each in headers if each.transaction_batch_id == expected.batch_id)
    assert known.has_all(counts.items())


@pytest.mark.parametrize("seed", range(20))
def test_of_many_batches_only_those_are_kept_that_a_state_may_remember(seed: int) -> None:
    """A repair restores them with locks held; a damaged segment may have a million batches."""
    chance = random.Random(seed)
    headers = history(chance)
    start, end = sorted(chance.sample(range(len(headers)), 2))
    brought_back = headers[start:end]
    ends = sorted(chance.sample([each.base_offset for each in headers], 3))
    memorable = replayed([]).memorable(brought_back, ends)
    for offset in (*ends, headers[-1].end_offset):
        expected, found = (
            replayed(each for each in (*headers[:start], *headers[end:]) if each.base_offset < offset) for _ in range(2)
        )
        expected.restore(each for each in brought_back if each.base_offset < offset)
        found.restore(each for each in memorable if each.base_offset < offset)
        assert found.snapshot(offset).encode() == expected.snapshot(offset).encode()
    few = [header(number)._replace(base_offset=number) for number in range(1000)]
    assert replayed([]).memorable([*few, header(0, producer=-1)], [500]) == [*few[495:500], *few[995:]]


def without_progress(producers: Producers) -> bytes:
    length = len(b"".join(producers.apply_progress.snapshot().encode()))
    return producers.snapshot(0).encode()[: -length - 4]


def test_a_producer_that_a_repair_brings_back_takes_no_place_of_a_later_one() -> None:
    producers, clock = Producers("t-0", 5, 2, clock := ManualClock()), clock
    for number in (1, 2):
        producers.record(header(0, producer=number), 100 + number, clock.now_us())
    clock.advance(1000)
    producers.restore([header(0, producer=3)._replace(base_offset=40)])
    assert [number in producers for number in (1, 2, 3)] == [True, True, False]
