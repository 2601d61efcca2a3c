"""Messages that were consumed together, as a list of them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle

import pytest

from kafkalog import Message, Messages
from kafkalog.records import MessageFields, lasts_of

FIELDS: list[MessageFields] = [("t", 1, at, 5, None, b"%d" % at, (), 3, b"i" * 16) for at in range(5)]
MADE = [Message(*fields) for fields in FIELDS]


@pytest.fixture
def messages() -> Messages:
    return Messages([FIELDS[:2], [], FIELDS[2:]])


def test_they_are_what_a_list_of_them_is(messages: Messages) -> None:
    assert list(messages) == MADE
    assert messages == MADE and messages == Messages([FIELDS])
    assert messages != MADE[:4] and messages != Messages([FIELDS[:4]])
    assert len(messages) == 5 and messages
    assert list(reversed(messages)) == MADE[::-1]
    assert {type(message) for message in reversed(messages)} == {Message}
    assert messages != tuple(MADE) and messages != 5
    assert messages.index(MADE[2], 1, 3) == messages.index(MADE[2], start=2) == 2
    for bounds in ((3,), (0, 2)):
        with pytest.raises(ValueError):
            messages.index(MADE[2], *bounds)
    assert MADE[3] in messages and MADE[3]._replace(offset=9) not in messages
    assert messages.index(MADE[2]) == 2
    assert repr(messages) == f"Messages({MADE!r})"


def test_each_is_a_message(messages: Messages) -> None:
    assert {type(message) for message in messages} == {type(messages[0])} == {Message}
    assert [messages[0], messages[-1]] == [MADE[0], MADE[-1]]
    for beyond in (5, -6):
        with pytest.raises(IndexError, match=f"there are 5 messages, and none at {beyond}"):
            messages[beyond]


def test_a_slice_of_them_is_one_of_them(messages: Messages) -> None:
    assert isinstance(messages[1:3], Messages)
    assert messages[1:3] == MADE[1:3]
    assert messages[::2] == MADE[::2]


@pytest.mark.parametrize("parts", [[], [0], [3, 0, 0, 1, 2], [0, 0, 6, 0]])
def test_each_is_found_by_its_place(parts: list[int]) -> None:
    every = iter([*FIELDS, (*FIELDS[0][:2], 5, *FIELDS[0][3:])])
    cut = [[next(every) for _ in range(length)] for length in parts]
    whole = [Message(*fields) for part in cut for fields in part]
    messages = Messages(cut)
    for first, end in itertools.product([None, *range(-len(whole) - 2, len(whole) + 3)], repeat=2):
        for step in (None, 1, 2, -1, -2):
            assert list(messages[first:end:step]) == whole[first:end:step], (first, end, step)
    places = range(-len(whole), len(whole))
    assert [messages[place] for place in places] == [whole[place] for place in places]
    assert list(reversed(messages)) == whole[::-1] and len(messages) == len(whole)


def test_with_a_list_they_make_a_list(messages: Messages) -> None:
    assert messages + MADE == MADE + messages == messages + messages == MADE * 2
    assert [*messages, *MADE] == MADE * 2


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_they_can_be_pickled_and_copied(messages: Messages, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(messages, protocol))
    assert type(again) is Messages and again == messages
    assert copy.deepcopy(messages) == copy.copy(messages) == messages


def test_none_is_false_and_equals_the_empty_list() -> None:
    assert not Messages()
    assert Messages() == []
    assert list(Messages()) == []


def test_the_garbage_collector_leaves_them_alone() -> None:
    """It would look at each several times, which takes longer than to make it."""
    messages = Messages([[("t", 1, at, 5, b"k", b"v", (("h", b"x"),), 3, b"i" * 16) for at in range(100)]])
    gc.collect()
    gc.collect()
    assert not any(gc.is_tracked(fields) for fields in messages._fields())


def test_of_runs_of_partitions_the_last_of_each_are_given_alone() -> None:
    runs = [MADE[:1], [], MADE[1:]]
    assert lasts_of(Messages(runs, are_runs=True)) == [MADE[0], MADE[-1]]
    for unknown in (Messages(runs), Messages(runs, are_runs=True)[:]):
        assert list(lasts_of(unknown)) == MADE


def test_many_are_shown_in_part() -> None:
    shown = repr(Messages([MADE[:1] * 12]))
    assert shown == f"Messages([{', '.join([repr(MADE[0])] * 10)}, ... 2 more])"
