"""The names of numbered writes: which transaction counts the versions of an application (`txnAppId`) in a topic.

`app-<application>:<topic>:<topic id in hex>`, and `:<generation>` behind it once the count was forgotten. The topic's
id is in it, so a topic made anew counts anew. Leaders keep how far a transaction's batches came and take no earlier
ones, so a count that begins anew needs a new name: the forgotten decision stays, and says to look at the next
generation. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX = "app-"
_NAME = re.compile(
    PREFIX + r"(?P<app_id>.*):(?P<topic>[^:]*):(?P<topic_id>[0-9a-f]{32})(?::(?P<generation>[1-9][0-9]*))?", re.DOTALL
)


class NumberedName(NamedTuple):
    """What a name says. `generation`: how often the count was forgotten."""

    app_id: str
    topic: str
    topic_id: bytes
    generation: int


def transactional_id(app_id: str, topic: str, topic_id: bytes, generation: int = 0) -> str:
    """The name. No topic's name has a colon, so no two of them are alike."""
    name = f"{PREFIX}{app_id}:{topic}:{topic_id.hex()}"
    return f"{name}:{generation}" if generation else name


def parse(transactional_id: str) -> NumberedName | None:
    """What a name says; None for another kind of transaction's."""
    found = _NAME.fullmatch(transactional_id)
    if found is None:
        return None
    return NumberedName(
        found["app_id"], found["topic"], bytes.fromhex(found["topic_id"]), int(found["generation"] or 0)
    )


def name_of(transactional_id: str) -> NumberedName:
    """What the name of a numbered write says."""
    name = parse(transactional_id)
    assert name is not None, f"'{transactional_id}' is no numbered write"
    return name
