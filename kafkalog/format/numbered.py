"""The names of numbered writes: which transaction counts the versions of an application (`txnAppId`) in a topic.

`app-<application>:<topic>:<topic id in hex>`, followed by `:<generation>` after the count was forgotten. The name has
the topic's id, so the count restarts for a topic that is created again. Leaders keep a transaction's apply progress and
accept no earlier batches, so a count that restarts needs a new name: the forgotten decision stays, and refers to the
next generation. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX = "app-"
_NAME = re.compile(
    PREFIX + r"(?P<app_id>.*):(?P<topic>[^:]*):(?P<topic_id>[0-9a-f]{32})(?::(?P<generation>[1-9][0-9]*))?", re.DOTALL
)


class NumberedName(NamedTuple):
    """The parts of a name. `generation`: how often the count was forgotten."""

    app_id: str
    topic: str
    topic_id: bytes
    generation: int


def transactional_id(app_id: str, topic: str, topic_id: bytes, generation: int = 0) -> str:
    """The name. It is unique, because no topic's name has a colon."""
    name = f"{PREFIX}{app_id}:{topic}:{topic_id.hex()}"
    return f"{name}:{generation}" if generation else name


def parse(transactional_id: str) -> NumberedName | None:
    """The parts of a name; None for another kind of transaction's."""
    found = _NAME.fullmatch(transactional_id)
    if found is None:
        return None
    return NumberedName(
        found["app_id"], found["topic"], bytes.fromhex(found["topic_id"]), int(found["generation"] or 0)
    )


def name_of(transactional_id: str) -> NumberedName:
    """The parts of the name of a numbered write."""
    name = parse(transactional_id)
    assert name is not None, f"'{transactional_id}' is no numbered write"
    return name
