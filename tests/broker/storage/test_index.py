from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from broker.storage.index import NO_TIME, Damage, Index, Summary, decode_index, encode_index, united

BASE = 100


def make_index() -> Index:
    """Entries at 100, 110, 120 ... 190; positions 1000 apart; running maximum of wandering timestamps."""
    index = Index(BASE, 1000)
    for number, newest in enumerate([5, 5, 9, 9, 9, 20, 21, 21, 30], 1):
        index.add(BASE + 10 * number, 1000 * number, newest)
    return index


SUMMARY = Summary(BASE, 9500, 195, 33, 7, 8, 2, (Damage(110, 112, 1000, 1300), Damage(150, 151, 5000, 5000)))


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        ([], []),
        ([(5, 6, 50, 60), (5, 8, 50, 80)], [(5, 8, 50, 80)]),
        ([(5, 6, 50, 60), (4, 6, 40, 60)], [(4, 6, 40, 60)]),
        ([(5, 8, 50, 80), (6, 7, 60, 70)], [(5, 8, 50, 80)]),
        ([(5, 8, 50, 80), (7, 9, 70, 90)], [(5, 9, 50, 90)]),
        ([(5, 6, 50, 60), (8, 9, 80, 90), (5, 9, 50, 90)], [(5, 9, 50, 90)]),
        ([(5, 6, 50, 60), (6, 7, 60, 70)], [(5, 6, 50, 60), (6, 7, 60, 70)]),
        ([(5, 5, 50, 60), (5, 6, 50, 70)], [(5, 6, 50, 70)]),
        ([(5, 9, 50, 50), (5, 6, 50, 60)], [(5, 9, 50, 60)]),
        ([(5, 9, 50, 50), (9, 10, 50, 60)], [(5, 9, 50, 50), (9, 10, 50, 60)]),
    ],
    ids=str,
)
def test_damage_that_overlaps_is_one_range(
    damaged: list[tuple[int, int, int, int]], expected: list[tuple[int, int, int, int]]
) -> None:
    for given in (damaged, [*reversed(damaged)], [*damaged, *damaged]):
        assert united(Damage._make(each) for each in given) == tuple(expected)


def test_entry_before_an_offset_is_never_behind_it() -> None:
    index = make_index()
    assert index.before(0) == index.before(BASE) == (0, BASE)
    for offset in range(BASE, 220):
        number = min(bisect_right(range(BASE, 200, 10), offset) - 1, 9)
        assert index.before(offset) == (1000 * number, BASE + 10 * number)


def test_entry_before_a_time_has_only_older_records_before_it() -> None:
    index = make_index()
    assert index.before_time(NO_TIME) == index.before_time(5) == (0, BASE)
    assert index.before_time(6) == (2000, 120)
    assert index.before_time(9) == (2000, 120)
    assert index.before_time(10) == (5000, 150)
    assert index.before_time(31) == (9000, 190)


def test_entries_around_a_position() -> None:
    index = make_index()
    assert index.around(0) == ((0, 100), (1000, 110))
    assert index.around(1999) == ((1000, 110), (2000, 120))
    assert index.around(50_000) == ((9000, 190), None)


def test_a_copy_up_to_an_offset_has_no_later_entries_and_keeps_the_spacing() -> None:
    index = make_index()
    cut = index.up_to(130)
    assert list(cut.offsets) == [100, 110, 120]
    assert cut.next_position == 3000
    assert list(index.up_to(0).offsets) == [100]
    cut.add(130, 3000, 0)
    assert list(index.offsets) == list(make_index().offsets)


def test_saved_index_comes_back_whole() -> None:
    decoded = decode_index(encode_index(make_index(), SUMMARY), BASE, 1000)
    assert decoded is not None
    index, summary = decoded
    assert summary == SUMMARY
    original = make_index()
    assert (index.offsets, index.positions, index.max_before_us) == (
        original.offsets, original.positions, original.max_before_us,
    )  # fmt: skip
    assert index.next_position == original.next_position


def test_saved_index_of_a_part_leaves_out_what_is_behind_it() -> None:
    decoded = decode_index(encode_index(make_index(), SUMMARY._replace(covered=3000)), BASE, 1000)
    assert decoded is not None
    assert list(decoded[0].positions) == [0, 1000, 2000]


def test_saved_index_of_one_entry_comes_back() -> None:
    index = make_index()
    decoded = decode_index(encode_index(index, SUMMARY._replace(covered=1)), BASE, 1000)
    assert decoded is not None
    assert list(decoded[0].offsets) == [BASE]


def test_damaged_index_is_refused() -> None:
    data = encode_index(make_index(), SUMMARY)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.Random(at).randrange(8)
        assert decode_index(bytes(flipped), BASE, 1000) is None
        assert decode_index(data[:at], BASE, 1000) is None
    assert decode_index(data, BASE + 1, 1000) is None
    assert decode_index(data + bytes(24), BASE, 1000) is None
