"""Errors travel: as bytes to another process, as a code and facts to another version."""

from __future__ import annotations

import pickle
import string

import pytest

from kafkalog import errors
from kafkalog.errors import BY_CODE, KafkalogError, OffsetOutOfRange, RetriableError, UnknownTopic, from_wire

FACTS = {"offset": 7, "partition": "t-0", "start_offset": 1, "end_offset": 5}


def test_an_error_survives_the_wire() -> None:
    error = OffsetOutOfRange(**FACTS)
    for copy in (from_wire(*error.to_wire()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is OffsetOutOfRange
        assert copy.facts == FACTS
        assert str(copy) == str(error) == "offset 7 of t-0 is outside [1, 5]"


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_each_class_comes_back_by_its_code(kind: type[KafkalogError]) -> None:
    names = {name for _, name, _, _ in string.Formatter().parse(kind.message) if name is not None}
    error = kind(**dict.fromkeys(names, 1))
    assert "{" not in str(error)
    copy = from_wire(*error.to_wire())
    assert (type(copy), str(copy), copy.facts) == (kind, str(error), error.facts)


def test_every_code_is_given_once() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KafkalogError)}
    assert kinds - {RetriableError} == set(BY_CODE.values())


def test_an_error_of_a_newer_peer_says_what_there_is() -> None:
    unknown = from_wire(99_999, '{"topic": "t"}')
    assert type(unknown) is KafkalogError
    assert not unknown.retriable
    assert "error 99999 of a newer peer: {'topic': 't'}" in str(unknown)
    fewer = from_wire(UnknownTopic.code, '{"name": "t"}')
    assert type(fewer) is UnknownTopic
    assert str(fewer) == "UnknownTopic: {'name': 't'}"
    more = from_wire(UnknownTopic.code, '{"topic": "t", "since": 3}')
    assert str(more) == "there is no topic 't'"


@pytest.mark.parametrize(
    ("text", "facts"),
    [("", {}), ("no json", {"reason": "no json"}), ("[1]", {"reason": "[1]"}), ("null", {"reason": "None"})],
)
def test_facts_that_are_no_json_object_are_still_told(text: str, facts: dict[str, str]) -> None:
    assert from_wire(KafkalogError.code, text).facts == facts


def test_a_fact_that_json_has_not_travels_as_its_text() -> None:
    _, text = KafkalogError(reason=b"x").to_wire()
    assert text == '{"reason": "b\'x\'"}'


def test_a_fresh_error_says_the_same_without_a_traceback_and_with_the_facts_that_are_replaced() -> None:
    try:
        raise errors.RequestTimedOut(what="a fetch", address="here:1", timeout_ms=7)
    except errors.RequestTimedOut as raised:
        again, elsewhere = raised.fresh(), raised.fresh(address="there:2")
        assert again is not raised and raised.__traceback__ is not None
        assert (type(again), again.facts, again.__traceback__) == (errors.RequestTimedOut, raised.facts, None)
        assert str(elsewhere) == "a fetch at there:2 did not finish within 7 ms"
        assert raised.facts["address"] == "here:1"


def test_a_mistake_of_ours_is_reported_by_its_class_and_words() -> None:
    assert str(errors.InternalError.of(KeyError("k"))) == "the broker failed on this request: KeyError: 'k'"
