from __future__ import annotations

import pytest

from broker.storage.producers import Producers, Remembered
from kafkalog.errors import OutOfOrderSequence, SequenceForgotten, StaleProducerEpoch
from kafkalog.format.batch import SEQUENCE_MODULUS, BatchHeader
from tests.broker.storage.batches import numbered


def header(sequence: int, count: int = 1, *, epoch: int = 0, producer: int = 7) -> BatchHeader:
    return numbered(0, count, producer=(producer, epoch, sequence))[0]


def after(*sequences: int, epoch: int = 0, remembered: int = 5) -> Producers:
    """One producer whose batches of one record were appended at offsets 100, 101 ..., at times 0, 1 ..."""
    producers = Producers("t-0", remembered)
    for number, sequence in enumerate(sequences):
        producers.record(header(sequence, epoch=epoch), 100 + number, number)
    return producers


def test_sequence_in_order_is_taken() -> None:
    assert after().verdict(header(0)) is None
    assert after(0, 1).verdict(header(2)) is None


def test_unknown_producer_must_begin_at_zero() -> None:
    refused = after().verdict(header(5))
    assert isinstance(refused, OutOfOrderSequence)
    assert str(refused) == "producer 7 sent sequence 5 to t-0 where 0 comes next"


def test_gap_is_refused_with_what_comes_next() -> None:
    refused = after(0, 1).verdict(header(3))
    assert isinstance(refused, OutOfOrderSequence)
    assert refused.facts["expected"] == 2


def test_batch_sent_again_is_found_where_it_was() -> None:
    assert after(0, 1, 2).verdict(header(1)) == Remembered(1, 1, 101, 102, 1)


def test_batch_older_than_remembered_cannot_be_told() -> None:
    producers = after(*range(10))
    assert producers.verdict(header(5)) == Remembered(5, 1, 105, 106, 5)
    assert isinstance(producers.verdict(header(4)), SequenceForgotten)
    assert isinstance(producers.verdict(header(8, count=2)), SequenceForgotten)  # never sent like that


def test_newer_epoch_begins_at_zero_and_shuts_the_older_one_out() -> None:
    producers = after(0, 1)
    assert isinstance(producers.verdict(header(2, epoch=1)), OutOfOrderSequence)
    first = header(0, epoch=1)
    assert producers.verdict(first) is None
    producers.record(first, 200, 9)
    refused = producers.verdict(header(2))
    assert isinstance(refused, StaleProducerEpoch)
    assert str(refused) == "producer 7 has epoch 0 on t-0 but 1 is in use"
    assert producers.verdict(header(0, epoch=1)) == Remembered(0, 1, 200, 201, 9)


def test_sequence_wraps_to_zero() -> None:
    last = SEQUENCE_MODULUS - 1
    producers = Producers("t-0", 5)
    producers.record(header(last - 1), 1, 0)
    assert producers.verdict(header(last, 2)) is None
    producers.record(header(last, 2), 2, 0)
    assert producers.verdict(header(1)) is None
    assert isinstance(producers.verdict(header(2)), OutOfOrderSequence)
    assert producers.verdict(header(last, 2)) == Remembered(last, 2, 2, 4, 0)
    assert isinstance(producers.verdict(header(last - 2)), SequenceForgotten)


def test_silent_producer_is_forgotten() -> None:
    producers = after(0, 1)
    assert producers.forget_silent(before_us=1) == 0
    assert producers.forget_silent(before_us=2) == 1
    assert isinstance(producers.verdict(header(2)), OutOfOrderSequence)


def test_saved_state_comes_back_and_damage_is_refused() -> None:
    producers = after(*range(8))
    producers.record(header(0, producer=8), 300, 4)
    data = producers.encode(301)
    loaded = Producers("t-0", 5)
    assert loaded.load(data, 301)
    assert loaded.encode(301) == data
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        assert not Producers("t-0", 5).load(bytes(flipped), 301)
        assert not Producers("t-0", 5).load(data[:at], 301)
    assert not loaded.load(data, 300)
    assert len(loaded) == 2


@pytest.mark.parametrize("fewer", [1, 3])
def test_saved_state_fits_a_smaller_window(fewer: int) -> None:
    loaded = Producers("t-0", fewer)
    assert loaded.load(after(*range(5)).encode(105), 105)
    assert loaded.verdict(header(5)) is None
    assert isinstance(loaded.verdict(header(4)), Remembered)
    assert isinstance(loaded.verdict(header(4 - fewer)), SequenceForgotten)
