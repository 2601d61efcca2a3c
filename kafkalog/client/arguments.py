"""Checks of callers' arguments: a wrong Python type raises one clear sentence, not a TypeError from deep inside."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TypeVar

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from kafkalog.zk.paths import NAME_RULE, is_valid_name

_Value = TypeVar("_Value")


def text(what: str, given: object) -> str:
    """A name. Raises InvalidArgument."""
    if not isinstance(given, str):
        raise InvalidArgument(reason=f"{what} is {given!r}, not a str")
    return utf8(what, given)


def name(what: str, given: object) -> str:
    """A name that brokers accept for a group. Raises InvalidArgument."""
    if not is_valid_name(text(what, given)):
        raise InvalidArgument(reason=f"{what} is {given!r}, which is not a name: {NAME_RULE}")
    return str(given)


def utf8(what: str, given: str) -> str:
    """A text that can be encoded as UTF-8: one from a file's name or from JSON may have a lone surrogate. Raises
    InvalidArgument."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(reason=f"{what} is {given!r}, which UTF-8 cannot encode") from None
    return given


def texts(what: str, given: Iterable[str]) -> list[str]:
    """Names; a single str is refused. Raises InvalidArgument."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidArgument(reason=f"{what} is {given!r}, not a list of str")
    return [text(f"one of {what}", each) for each in given]


def whole_number(what: str, given: object) -> int:
    """An int. Raises InvalidArgument."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise InvalidArgument(reason=f"{what} is {given!r}, not an int")
    return given


def seconds(what: str, given: object) -> float | None:
    """A time to wait. None: for ever, which a negative one means too, as in Kafka's Python client, and one that is
    longer than a thread can wait. Raises InvalidArgument."""
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool):
        return None if given < 0 or given >= threading.TIMEOUT_MAX else given
    raise InvalidArgument(reason=f"{what} is {given!r}, not a number of seconds or None")


def partition(given: object) -> TopicPartition:
    """A TopicPartition, or the two as a tuple. Raises InvalidArgument."""
    if isinstance(given, tuple) and len(given) == 2:
        topic, number = given
        if isinstance(topic, str) and isinstance(number, int) and not isinstance(number, bool):
            return TopicPartition(topic, number)
    raise InvalidArgument(reason=f"{given!r} is not a partition: give TopicPartition(topic, number)")


def partitions(what: str, given: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Partitions; a single one is refused. Raises InvalidArgument."""
    if isinstance(given, TopicPartition | str | bytes) or not isinstance(given, Iterable):
        raise InvalidArgument(reason=f"{what} is {given!r}, not a list of TopicPartition")
    return [partition(each) for each in given]


def by_partition(what: str, given: Mapping[TopicPartition, _Value]) -> dict[TopicPartition, _Value]:
    """A mapping by partition. Raises InvalidArgument."""
    if not isinstance(given, Mapping):
        raise InvalidArgument(reason=f"{what} is {given!r}, not a dict by TopicPartition")
    return {partition(each): value for each, value in given.items()}


def offsets(what: str, given: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Offsets by partition. Raises InvalidArgument."""
    found = by_partition(what, given)
    for each, offset in found.items():
        whole_number(f"the offset of {each}", offset)
    return found


def settings(what: str, given: object) -> dict[str, object]:
    """Settings by dotted name. Raises InvalidArgument."""
    if not isinstance(given, Mapping):
        raise InvalidArgument(reason=f"{what} is {given!r}, not a dict of settings by name")
    return {text(f"a setting's name in {what}", name): value for name, value in given.items()}
